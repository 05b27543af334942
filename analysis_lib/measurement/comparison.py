"""Several models side by side, each with its untrained twin: ``compare({"wikipedia": ["minilm"]}, "anisotropy")``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pandas as pd

from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora.loading import load_corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.measuring import measure, measured, refuse_senseless
from analysis_lib.measurement.shipping import shipped_twin
from analysis_lib.measurement.tables import LazyTables, Tables
from analysis_lib.models import UNTRAINED, split_twin, title
from analysis_lib.models.loading import checked_options, load_model


class Comparison(LazyTables):
    """The tables of several models: each is one DataFrame, with the columns of the model in front.

    These are model (its :func:`~analysis_lib.models.title`), trained, twin (the seed of an untrained twin; missing for
    the model itself), stack and width.

    Attributes:
        runs: the tables of each model, by (name, twin); twin is None for the model itself.
        titles: what each is called, by name.
    """

    def __init__(self, runs: dict[tuple[str, int | None], Tables]):
        first, *others = runs.values()
        super().__init__({name: name for name in first if all(name in other for other in others)}, self._joined)
        self.runs, names = runs, {name: title(name) for name, _ in runs}
        # Two folders may end alike: then both are called by all that was given.
        self.titles = {name: name if [*names.values()].count(called) > 1 else called for name, called in names.items()}

    def _joined(self, name: str) -> pd.DataFrame:
        frames = []
        for (model, twin), tables in self.runs.items():
            layers = tables.layers.set_index("layer").loc[tables[name]["layer"], ["stack", "width"]]
            seed = pd.Series(pd.NA if twin is None else twin, tables[name].index, dtype="Int64")
            columns = {"model": self.titles[model], "trained": twin is None, "twin": seed}
            columns |= {c: layers[c].to_numpy() for c in layers}
            frames.append(pd.concat([pd.DataFrame(columns, tables[name].index), tables[name]], axis=1))
        return pd.concat(frames, ignore_index=True)

    @property
    def trained(self) -> dict[str, Tables]:
        """The tables of the models as they are, by title, without their untrained twins."""
        return {self.titles[model]: tables for (model, twin), tables in self.runs.items() if twin is None}


def compare(
    models: Mapping[str, Sequence[str]],
    metrics: str,
    *,
    limit: int | None = None,
    seed: int | None = None,
    units: str | None = None,
    twins: int = 1,
    dtype: str = "float32",
    tokenizer: str | None = None,
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
        units: of tables in files, the column of what each text is a part of, see ``load_corpus``.
        twins: with how many draws of the random weights that its training starts from to measure each model also.
        dtype, tokenizer: of all models, as ``load_model`` takes them.
        settings: of ``measure``.

    Raises:
        AnalysisError: no model, or the same twice; or what ``load_model``, ``load_corpus`` and ``measure`` raise.
    """
    names = [name for chosen in models.values() for name in chosen]
    if not names:
        raise AnalysisError("no model was given to compare: give one or more")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise AnalysisError(f"{repeated[0]} was given twice: give each model once")
    if twins < 0:
        raise AnalysisError(f"the number of twins is {twins}: give 0 or more")
    of_vectors = Settings(**{key: value for key, value in settings.items() if key in asdict(Settings())})
    given = {"dtype": dtype, "processor": tokenizer}
    checked_options(dtype, None)
    read, runs = {data: load_corpus(data, limit, seed, units=units) for data, chosen in models.items() if chosen}, {}
    for data, corpus in read.items():
        for name in models[data]:
            refuse_senseless(name, corpus, metrics, of_vectors, settings.get("workers", 1))
    for data, corpus in read.items():
        for name in models[data]:
            for twin in (None, *range(twins)) if split_twin(name)[1] is None else (None,):
                whole = name if twin is None else f"{name}{UNTRAINED}@seed={twin}"
                known = measured(whole, corpus, metrics, of_vectors, **given)
                if not known and twin is not None and given == {"dtype": "float32", "processor": None}:
                    known = shipped_twin(whole, corpus, metrics, of_vectors)
                runs[name, twin] = known or measure(load_model(whole, **given), corpus, metrics, **settings)
    return Comparison(runs)
