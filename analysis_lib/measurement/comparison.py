"""Several models side by side, each with its untrained twin.

Example: ``compare({"news": ["minilm"]}, "anisotropy")``.
"""

import functools
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis_lib import store
from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora.corpus import Corpus
from analysis_lib.corpora.loading import load_corpus
from analysis_lib.corpora.splits import check_draw
from analysis_lib.errors import (
    AnalysisError,
    in_order,
    near_names,
    require_known,
    require_path,
    require_whole,
    shown,
)
from analysis_lib.measurement.measuring import (
    measure,
    refuse_unavailable,
    refuse_unchanged,
    resolvable,
    stored_tables,
)
from analysis_lib.measurement.model_similarity import similarity
from analysis_lib.measurement.shipping import shipped_twin
from analysis_lib.measurement.stored import interruption
from analysis_lib.measurement.tables import LazyTables, Plain, Tables
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.intervals import Estimate, seed_and_unit_interval
from analysis_lib.metrics.representation_similarity import RepresentationSimilarity
from analysis_lib.models import ModelName, title
from analysis_lib.models.loading import checked_options, load_model, refuse_unloadable

# Columns that identify a row of a table.
PLACES = (
    *("positions", "type", "space", "layer", "head", "pair", "position", "from_position"),
    *("row", "column", "dimension"),
    *("token_type", "query_type", "key_type", "term", "measure"),
)
# Settings that ``compare`` and the callback of a Trainer pass to ``measure``: all except those that
# they set themselves.
SETTINGS = sorted(
    {
        name
        for name, argument in inspect.signature(measure).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY
    }
    - {"tokenizer", "processor", "column", "part"}
)
# Tables whose rows depend on their numbers, or that cannot leave texts out.
NOT_PAIRED = ("outlier_dimensions", "spike_dimensions", "isotropy")
# The table of two models at once, and the settings that it has.
SIMILARITY = RepresentationSimilarity.name
OF_SIMILARITY = ("special_tokens", "tokens_per_batch", "workers", "checkpoints", "progress")


class Comparison(LazyTables):
    """The tables of several models, each as one DataFrame with columns for the model in front.

    columns for the model are model (its :func:`~analysis_lib.models.title`), trained, twin (the
    seed of an untrained twin; missing for the model itself), stack and width.

    ``representation_similarity`` compares each model with the first one of the same corpus: its
    columns for the models are model and compared_with; the first has ``layer``, the other
    ``other_layer``.

    Attributes:
        runs: the tables of each model, by (name, twin); twin is None for the model itself.
        similarities: the tables of pairs of models, by the name of the first and of the other.
        titles: the title of each model, by name.
    """

    def __init__(
        self,
        runs: dict[tuple[str, int | None], Tables],
        similarities: dict[tuple[str, str], Tables] | None = None,
    ):
        self.runs = runs
        self.similarities = similarities or {}
        names = [{*tables} for tables in runs.values()]
        makers = {}
        for tables in [*runs.values()][:1]:
            common = set.intersection(*names)
            makers |= {name: self._joined for name in tables if name in common}
        if self.similarities:
            makers[SIMILARITY] = self._similarity
        parts = {name: functools.partial(make, name) for name, make in makers.items()}
        super().__init__(parts, lambda make: make())
        every = [name for name, _ in runs]
        self.titles = distinct_titles(itertools.chain(every, *self.similarities))

    def _similarity(self, name: str) -> pd.DataFrame:
        frames = []
        for (first, other), tables in self.similarities.items():
            table = tables[name].copy()
            table.insert(0, "model", self.titles[first])
            table.insert(1, "compared_with", self.titles[other])
            frames.append(table)
        return pd.concat(frames, ignore_index=True)

    def _joined(self, name: str) -> pd.DataFrame:
        frames = []
        for (model, twin), tables in self.runs.items():
            table = tables[name]
            layers = tables.layers.set_index("layer").loc[table["layer"], ["stack", "width"]]
            twin = pd.NA if twin is None else twin
            seed = pd.Series(twin, table.index, dtype="Int64")
            columns = {"model": self.titles[model], "trained": seed.isna(), "twin": seed}
            columns |= {column: layers[column].to_numpy() for column in layers}
            frames.append(pd.concat([pd.DataFrame(columns, table.index), table], axis=1))
        return pd.concat(frames, ignore_index=True)

    def differences(self, name: str) -> pd.DataFrame:
        """Differences between each model and the first one that was measured on the same texts.

        Twins are left out. Columns: model, compared_with, the columns that identify a row, quantity
        (the column of the table that is compared), difference, and the ends of its 95 % interval,
        paired over texts: the same texts are left out of both. Rows are those that both models
        have; dimensions are compared if both models have equally many. Tables in ``NOT_PAIRED``
        have no differences.
        """
        if not isinstance(name, str) or name not in self:
            raise AnalysisError(f"there is no table {shown(name)}: {near_names(str(name), self)}")
        frames = []
        first = {}
        for model, tables in self.trained.items():
            base, of_base = first.setdefault(tables.run["data_sha256"], (model, tables))
            if of_base is not tables and name not in (*NOT_PAIRED, SIMILARITY):
                rows = paired_difference(of_base, tables, name)
                rows.insert(0, "model", model)
                rows.insert(1, "compared_with", base)
                frames.append(rows)
        if frames:
            return pd.concat(frames, ignore_index=True)
        columns = ["model", "compared_with", "layer", "quantity", "difference", "ci_low", "ci_high"]
        return pd.DataFrame(columns=columns)

    def by_weights(self, name: str, value: str) -> pd.DataFrame:
        """A number of the hidden states by layer, of models as they are and untrained.

        An untrained model is the mean of its twins, whose interval counts texts and draws of the
        weights, see :func:`~analysis_lib.metrics.intervals.seed_and_unit_interval`.

        Args:
            name: of a table with a row per layer, or per space and layer, and intervals.
            value: the column of the number.

        Returns:
            Columns model, weights (``trained`` or ``untrained``), stack, width, layer, the number,
            ci_low and ci_high.
        """
        rows = self[name]
        if "space" in rows:
            rows = rows.query("space == 'hidden'")
        trained = rows["trained"]
        rows = rows.assign(weights=np.where(trained, "trained", "untrained"))
        keys = ["model", "weights", "stack", "width", "layer"]
        numbers = [value, "ci_low", "ci_high"]
        by_layer = rows[~trained].groupby(keys, sort=False)
        twins = []
        for labels, draws in by_layer[numbers]:
            estimates = map(Estimate, *draws.T.to_numpy())
            mean = seed_and_unit_interval(estimates)
            twins.append((*labels, *mean.row))
        parts = [rows.loc[trained, keys + numbers]]
        # An empty table has no types, and would take those of the other away.
        if twins:
            parts.append(pd.DataFrame(twins, columns=keys + numbers))
        return pd.concat(parts, ignore_index=True)

    @property
    def trained(self) -> dict[str, Tables]:
        """The tables of the models without their untrained twins, by title."""
        return {
            self.titles[model]: tables
            for (model, twin), tables in self.runs.items()
            if twin is None
        }


def distinct_titles(names: Iterable[str]) -> dict[str, str]:
    """Titles of models by name; folders with the same title get as much of their path as needed.

    >>> [*distinct_titles(["minilm", "a/x/model", "b/x/model"]).values()]
    ['MiniLM', 'a/x/model', 'b/x/model']
    """
    titles = {name: title(name) for name in names}
    often = Counter(titles.values())
    alike = [name for name in titles if often[titles[name]] > 1]
    parts = {name: name.replace("$", "_").strip("/").split("/") for name in alike}
    for depth in range(2, max(map(len, parts.values()), default=0) + 1):
        longer = {name: "/".join(part[-depth:]) for name, part in parts.items()}
        if len({*longer.values()}) == len(longer):
            break
    if alike:
        for name, end in longer.items():
            # Matplotlib leaves labels with a leading underscore out of a legend.
            titles[name] = f"./{end}" if end.startswith("_") else end
    return titles


def paired_difference(first: Tables, other: Tables, name: str) -> pd.DataFrame:
    """The table of ``other`` minus that of ``first``, see :meth:`Comparison.differences`."""
    columns = [column for column in PLACES if column in first[name]]
    of_first = _places(first[name], columns).reset_index(names="first")
    of_other = _places(other[name], columns).reset_index(names="other")
    pairs = of_first.merge(of_other, on=columns)
    if "dimension" in columns:
        widths, other_widths = (
            tables[name].groupby("layer")["dimension"].max() for tables in (first, other)
        )
        same = [layer for layer in widths.index if widths[layer] == other_widths.get(layer)]
        pairs = pairs[pairs["layer"].isin(same)]
    values = [c for c in first[name].select_dtypes("float") if c not in ("ci_low", "ci_high")]

    def difference(mine: Mapping, theirs: Mapping) -> np.ndarray:
        base = mine[name][values].to_numpy()[pairs["first"]]
        return (theirs[name][values].to_numpy()[pairs["other"]] - base).ravel()

    differences = first.interval(Plain(difference, smooth=first.smooth(name)), other)
    rows = pairs[columns].loc[pairs.index.repeat(len(values))].reset_index(drop=True)
    rows["quantity"] = np.tile(values, len(pairs))
    estimates = np.array([estimate.row for estimate in differences]).reshape(-1, 3)
    rows[["difference", "ci_low", "ci_high"]] = estimates
    return rows


def _places(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The columns that identify a row; categorical types, which differ between tables, as text."""
    types = [column for column in columns if table[column].dtype == "category"]
    return table[columns].astype(dict.fromkeys(types, str))


def _checked_models(models: object) -> dict[str | Corpus, list[str]]:
    """The names of models by corpus, or by its name, after validation.

    Raises:
        AnalysisError: the argument of ``compare`` is not valid.
    """
    wanted_models = (
        'give lists of models by corpus, as in {"news": ["minilm", "bert-base-uncased"]}'
    )
    if not isinstance(models, Mapping):
        raise AnalysisError(f"the models are {shown(models)}: {wanted_models}")
    named = {}
    for data, chosen in models.items():
        corpus = data
        if not isinstance(data, Corpus):
            corpus = str(
                require_path("a corpus", data, "its name or path, or what load_corpus returns")
            )
        called = corpus.name if isinstance(corpus, Corpus) else corpus
        if isinstance(chosen, str | Path):
            raise AnalysisError(f"the models on {called} are {shown(chosen)}: {wanted_models}")
        names = in_order(f"the models on {called}", chosen, "their names in a list")
        named[corpus] = [str(require_path("a model", name, "its name or folder")) for name in names]
    if not any(named.values()):
        raise AnalysisError("no model was given to compare: give one or more")
    return named


def _refuse_twice(names: list[str], dtype: str) -> None:
    """Raise an AnalysisError for a model that is given twice, even by another path."""
    known: dict[tuple, str] = {}
    for name in names:
        model = ModelName.parse(name)
        folders = [
            os.path.realpath(path) if os.path.isdir(path) else path for path in model.folders
        ]
        same = (*folders, model.part, model.untrained, model.seed or 0, model.dtype or dtype)
        if same in known:
            also = "" if known[same] == name else f", also as {known[same]}"
            raise AnalysisError(f"{name} was given twice{also}: give each model once")
        known[same] = name


def compare(
    models: Mapping[str | Corpus, Sequence[str]],
    metrics: str,
    *,
    limit: int | None = None,
    seed: int | None = 0,
    units: str | None = None,
    twins: int = 1,
    dtype: str = "float32",
    tokenizer: str | None = None,
    device: str | None = None,
    **settings,
) -> Comparison:
    """Measure several models, each on its corpus, and their untrained twins.

    Twins whose tables ship with the book are not measured again: see
    :func:`~analysis_lib.measurement.shipping.shipped_twin`.

    Args:
        models: by corpus (loaded, or an argument of ``load_corpus``), the models to measure, as
            names for ``load_model``.
        metrics: as in ``measure``.
        limit: number of items to read of each corpus.
        seed: the seed with which items are drawn; None takes the first ones.
        units: for tables in files, the column with the unit of each text, see ``load_corpus``.
        twins: number of untrained twins of each model, drawn as its training would start.
        dtype, tokenizer, device: for all models, as in ``load_model``.
        settings: further arguments of ``measure``.

    Raises:
        AnalysisError: no model, or the same one twice; or an error of ``load_model``,
            ``load_corpus`` or ``measure``.
        KeyboardInterrupt: the message says what is kept.
    """
    models = _checked_models(models)
    check_draw(limit, seed)
    twins = require_whole("the number of twins", twins)
    bins = settings.get("bins")
    metrics, of_pairs = _of_pairs(resolvable(metrics))
    if metrics:
        resolvable(metrics, bins)
    checked_options(dtype, device)
    if tokenizer is not None:
        tokenizer = str(
            require_path("the tokenizer", tokenizer, "the name or folder of one, or leave it out")
        )
    require_known("setting of measure", settings, SETTINGS)
    if of_pairs:
        _refuse_alone(models)
        defaults = inspect.signature(measure).parameters
        changed = [name for name, value in settings.items() if value != defaults[name].default]
        require_known(f"setting of {SIMILARITY}", changed, OF_SIMILARITY)
    if metrics:
        refuse_unchanged(metrics, settings.get("intervention"))
    names = [name for chosen in models.values() for name in chosen]
    _refuse_twice(names, dtype)
    refuse_unloadable(names)
    of_vectors = Settings(
        **{key: value for key, value in settings.items() if key in asdict(Settings())}
    )
    given = {"dtype": dtype, "processor": tokenizer, "device": device}
    usual = {"dtype": "float32", "processor": None, "device": None}
    read = {
        data: load_corpus(data, limit, seed, units=units)
        for data, chosen in models.items()
        if chosen
    }
    runs = {}
    similarities = {}
    # Of a similarity alone, there is nothing to measure of each model.
    measured = read if metrics else {}
    for data, corpus in measured.items():
        for name in models[data]:
            refuse_unavailable(name, corpus, metrics, of_vectors, settings.get("workers", 1))
    for data, corpus in measured.items():
        for name in models[data]:
            model = ModelName.parse(name)
            seeds = [] if model.untrained else range(twins)
            for twin in (None, *seeds):
                whole = name if twin is None else str(replace(model, untrained=True, seed=twin))
                known = stored_tables(whole, corpus, metrics, of_vectors, bins, **given)
                if not known and twin is not None and given == usual and bins is None:
                    known = shipped_twin(whole, corpus, metrics, of_vectors)
                if not known:
                    with interruption(kept=bool(runs and store.measurements_directory())):
                        loaded = load_model(whole, **given)
                        # ``maps`` has no effect on other models beside a network.
                        maps = of_vectors.maps if loaded.layout.maps else Settings.maps
                        known = measure(loaded, corpus, metrics, **{**settings, "maps": maps})
                runs[name, twin] = known
    of_pair = {name: settings[name] for name in OF_SIMILARITY if name in settings}
    for metric, (data, corpus) in itertools.product(of_pairs, read.items()):
        first, *others = models[data]
        loaded = load_model(first, **given)
        for other in others:
            both = loaded, load_model(other, **given)
            similarities[first, other] = similarity(*both, corpus, metric=metric, **of_pair)
    return Comparison(runs, similarities)


def _of_pairs(
    metrics: str | list[str | Metric],
) -> tuple[str | list[str | Metric], list[Metric]]:
    """The metrics of one model, and that of two models if it is among them."""
    if metrics == "all":
        return metrics, []
    resolved = resolve(metrics)
    of_pairs = [metric for metric in resolved if metric.name == SIMILARITY]
    return [metric for metric in resolved if metric.name != SIMILARITY], of_pairs


def _refuse_alone(models: Mapping[object, list[str]]) -> None:
    """Raise an AnalysisError if no corpus has two models to compare."""
    if max(map(len, models.values())) < 2:
        raise AnalysisError(f"{SIMILARITY} compares two models of a corpus: give another one")
