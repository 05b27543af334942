"""Several models side by side, each with its untrained twin: ``compare({"wikipedia": ["minilm"]}, "anisotropy")``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pandas as pd

from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora.loading import load_corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.measuring import measure, measured
from analysis_lib.measurement.shipping import shipped_twin
from analysis_lib.measurement.tables import LazyTables, Tables
from analysis_lib.models import UNTRAINED
from analysis_lib.models.loading import load_model


class Comparison(LazyTables):
    """The tables of several models: each is one DataFrame, with the columns model, trained, stack and width in front.

    Attributes:
        runs: the tables of each model, by (model, trained).
    """

    def __init__(self, runs: dict[tuple[str, bool], Tables]):
        super().__init__({name: name for name in next(iter(runs.values()))}, self._joined)
        self.runs = runs

    def _joined(self, name: str) -> pd.DataFrame:
        frames = []
        for (model, trained), tables in self.runs.items():
            layers = tables.layers.set_index("layer").loc[tables[name]["layer"], ["stack", "width"]]
            columns = {"model": model, "trained": trained, **{c: layers[c].to_numpy() for c in layers}}
            frames.append(pd.concat([pd.DataFrame(columns, tables[name].index), tables[name]], axis=1))
        return pd.concat(frames, ignore_index=True)

    @property
    def trained(self) -> dict[str, Tables]:
        """The tables of the models as they are, by name, without their untrained twins."""
        return {model: tables for (model, trained), tables in self.runs.items() if trained}


def compare(
    models: Mapping[str, Sequence[str]],
    metrics: str,
    *,
    limit: int | None = None,
    seed: int | None = None,
    twins: bool = True,
    **settings,
) -> Comparison:
    """Measure several models, each on the corpus given for it, and their untrained twins.

    Twins whose tables come with the book are not measured again: see
    :func:`~analysis_lib.measurement.shipping.shipped_twin`.

    Args:
        models: by corpus, as ``load_corpus`` takes it, the models to measure on it, as ``load_model`` takes them.
        metrics: as ``measure`` takes them.
        limit: how many items of each corpus to read.
        seed: the seed with which they are drawn.
        twins: whether to measure each model also with the random weights that its training starts from.
        settings: of ``measure``.

    Raises:
        AnalysisError: no model, or the same twice; or what ``load_model``, ``load_corpus`` and ``measure`` raise.
    """
    names = [name for chosen in models.values() for name in chosen]
    if not names:
        raise AnalysisError("no model was given to compare: give one or more")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise AnalysisError(f"{repeated[0]} was given twice: give each model once")
    of_vectors = {key: value for key, value in settings.items() if key in asdict(Settings())}
    runs = {}
    for data, chosen in models.items():
        corpus = load_corpus(data, limit, seed) if chosen else None
        for name in chosen:
            for trained in (True, False) if twins and not name.endswith(UNTRAINED) else (True,):
                whole = name if trained else name + UNTRAINED
                known = measured(whole, corpus, metrics, **of_vectors)
                if not (known or trained):
                    known = shipped_twin(whole, corpus, metrics, Settings(**of_vectors))
                runs[name, trained] = known or measure(load_model(whole), corpus, metrics, **settings)
    return Comparison(runs)
