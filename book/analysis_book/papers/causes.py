"""Causes: attention and vectors when dimensions or directions change, one layer at a time."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from analysis_book.papers import maruta, recorded
from analysis_book.papers.fosse import directions
from analysis_lib import capture
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Replace
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import Tables, TableSet, measure
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.metrics.accumulator import GROUPS, Columns, LayerSums, Metric
from analysis_lib.metrics.intervals import Estimate, jackknife
from analysis_lib.models import TOKEN_TYPES, LoadedModel, load_model, title

# Of as many dimensions of nearest variance, one is drawn.
NEAREST = 10
WHOLE = "all"
# The file of what single dimensions do.
REMOVED = "dimensions"
# What the arms are chosen by.
TABLES = ("dimension_means", "score_contributions", "attention_by_token_type", "attention_entropy")
# Replacements by arm, and by the layer whose attention is measured.
Arms = Mapping[str, Mapping[int, Replace]]
# By attention layer.
Dimensions = Mapping[int, list[int]]
Statistic = Callable[[TableSet], pd.Series]
Quantities = Callable[[LoadedModel, Corpus, Replace, int], pd.DataFrame]


class DimensionVariances(Metric):
    """The variance over all tokens of each dimension of the input of attention.

    Columns: layer, dimension, variance.
    """

    name = "dimension_variances"
    needs = frozenset({"attention_input"})
    axes = ("dimension",)

    def update(self, activations: capture.Activations) -> None:
        read = activations.spaces.get("attention_input")
        if read is None:
            return
        layer = activations.layer
        counted = read.tokens.counted[:, None, :, None]
        values = read.values.double() * counted
        sums = {
            "sum": values.sum((1, 2)),
            "square": values.square().sum((1, 2)),
            "tokens": read.counts.unsqueeze(1),
        }
        for name, of_texts in sums.items():
            self.add((name, layer), of_texts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        mean = sums["sum"] / sums["tokens"]
        mean_square = sums["square"] / sums["tokens"]
        return {"variance": mean_square - mean**2}


def attention_in(tables: TableSet, layer: int) -> pd.Series:
    """The weight of a key of each type in a layer, and the normalised entropy: means over heads."""
    weights = tables["attention_by_token_type"]
    weights = weights[weights["layer"] == layer]
    kinds = weights["key_type"].unique()
    # In the order of the table, heads by types: grouping would take most of a page's time.
    by_head = weights["weight"].to_numpy().reshape(-1, len(kinds))
    means = pd.Series(by_head.mean(0), [*kinds])
    means = means.reindex(TOKEN_TYPES)
    entropy = tables["attention_entropy"]
    in_layer = entropy["layer"] == layer
    means["entropy"] = entropy.loc[in_layer, "entropy_normalised"].mean()
    return means


def left_out(tables: Tables, statistic: Statistic) -> pd.DataFrame:
    """A statistic on the whole corpus, ``all``, and without each jackknife group, as columns."""
    columns: list[pd.Series] = []

    def collect(part: TableSet) -> float:
        columns.append(statistic(part))
        return 0.0

    tables.interval(collect)
    names = [WHOLE, *map(str, tables.groups)]
    return pd.concat(columns, axis=1, keys=names)


def attention(
    model: LoadedModel,
    corpus: Corpus,
    change: Replace,
    layer: int,
) -> pd.DataFrame:
    """The :func:`attention_in` a layer under a change, :func:`left_out`."""
    metrics = "attention_by_token_type,attention_entropy"
    tables = measure(model, corpus, metrics, intervention=(change,), progress=False)
    return left_out(tables, lambda t: attention_in(t, layer))


def layer_by_layer(
    model: LoadedModel,
    corpus: Corpus,
    arms: Arms,
    quantities: Quantities = attention,
    name: str = "",
) -> pd.DataFrame:
    """Quantities of each layer when only that layer is changed.

    Args:
        arms: by the name of an arm and the layer that is looked at, the change.
        quantities: what is measured: by quantity, on all texts and without each jackknife group.
        name: of a file of such rows in ``data/measurements/causes``, which is read if it has these
            arms on these texts.

    Returns:
        By arm, quantity and layer: on all texts, ``all``, and without each jackknife group. What is
        computed from the rows, column by column, has the :func:`interval` of its differences
        between arms.
    """
    known = shipped(name, corpus)
    if known is not None:
        known_arms = known.index.unique("arm")
        if {*arms} <= {*known_arms}:
            return known.loc[[*arms]]
    measured = {}
    for arm_name, changes in arms.items():
        for layer, change in changes.items():
            measured[arm_name, layer] = quantities(model, corpus, change, layer)
    rows = pd.concat(measured, names=["arm", "layer", "quantity"])
    return rows.reorder_levels(["arm", "quantity", "layer"])


def shipped(name: str, corpus: Corpus) -> pd.DataFrame | None:
    """The rows of a file in ``data/measurements/causes``; None without it, or on other texts."""
    if not recorded.path(name).is_file():
        return None
    rows = recorded.read(name)
    texts = rows.pop("texts")
    if (texts != recorded.texts_of(corpus)).any():
        return None
    return rows.set_index(["arm", "quantity", "layer"])


def ship(
    rows: pd.DataFrame,
    name: str,
    corpus: Corpus,
) -> None:
    """Write the file that :func:`shipped` reads."""
    table = rows.dropna().reset_index()
    keys = {"texts": recorded.texts_of(corpus)}
    recorded.write(name, [(table, keys)])


def interval(values: pd.Series) -> Estimate:
    """The jackknife interval over texts of a number of the columns of :func:`layer_by_layer`."""
    without_each_group = values.drop(WHOLE).tolist()
    return jackknife(values[WHOLE], without_each_group)


def arm(
    where: str,
    dimensions: Dimensions,
    **options: object,
) -> dict[int, Replace]:
    """The change of some dimensions of the input of attention, by layer.

    Means and vectors are of other articles, unless the options say otherwise. On the residual
    stream, what attention layer l reads is what block l − 1 gives.
    """
    source = "same" if options["by"] == "zero" else "others"
    options = {"of": source} | options
    back = 1 if where == "residual" else 0
    changes = {}
    for layer, chosen in dimensions.items():
        changed = (layer - back,)
        changes[layer] = Replace(where, layers=changed, dimensions=tuple(chosen), **options)
    return changes


def drift(model: LoadedModel, corpus: Corpus) -> pd.DataFrame:
    """Rows of :func:`layer_by_layer` without the mean query of each head, or the mean key.

    The means are of other texts, and of queries and keys before rotation where a layer rotates
    them. Elsewhere the mean key moves nothing, and is taken away in every fifth layer.

    Returns:
        as there; the arms are ``unchanged`` and ``query`` and ``key``, or ``query_unrotated`` and
        ``key_unrotated``.
    """
    unchanged = Replace("query", by="nothing")
    arms = {"unchanged": {}}
    for layer, (_, attention) in enumerate(model.attending, 1):
        arms["unchanged"][layer] = unchanged
        spaces = ["query"]
        if attention.rotates:
            spaces = capture.UNROTATED
        elif layer % 5 == 1:
            spaces = ["query", "key"]
        for space in spaces:
            change = Replace(space, layers=(layer,), by="centre", of="others")
            arms.setdefault(space, {})[layer] = change
    return layer_by_layer(model, corpus, arms)


def outliers(tables: TableSet) -> Dimensions:
    """The outlier dimensions of what each attention layer reads (Maruta and Matsuzaki 2024)."""
    layers = sorted(tables["attention_entropy"]["layer"].unique())
    dimensions = {}
    for layer in layers:
        outlying = maruta.read_by(tables, [layer])
        dimensions[int(layer)] = [*map(int, outlying)]
    return dimensions


def largest(
    tables: TableSet,
    counts: Dimensions,
    key_type: str = "cls",
) -> Dimensions:
    """The dimensions of largest |C_j| for keys of a type, mean over heads, by attention layer.

    Args:
        counts: as many dimensions of each layer are taken as it has here.
    """
    rows = tables["score_contributions"].query(f"key_type == '{key_type}'")
    sizes = rows["contribution"].abs()
    sizes = sizes.groupby([rows["layer"], rows["dimension"]]).mean()
    dimensions = {}
    for layer, others in counts.items():
        dimensions[layer] = []
        if layer in sizes:
            leading = sizes[layer].nlargest(len(others))
            dimensions[layer] = [*map(int, leading.index)]
    return dimensions


def random_arms(
    where: str,
    named: Dimensions,
    tables: TableSet,
    sets: int,
    **options: object,
) -> dict[str, dict[int, Replace]]:
    """Arms of as many dimensions as are named, drawn so many times in two ways.

    ``random``: any. ``matched``: for each named one, in the order of variance, one of the
    ``NEAREST`` in variance that are neither named nor drawn.

    Args:
        tables: with :class:`DimensionVariances`.
    """
    variances = tables["dimension_variances"]
    variances = variances.pivot(index="layer", columns="dimension", values="variance")
    logs = np.log(variances)
    arms = {}
    for kind in ("random", "matched"):
        matched = kind == "matched"
        random = np.random.default_rng(0)
        for number in range(1, sets + 1):
            drawn = {}
            for layer, dimensions in named.items():
                of_layer = logs.loc[layer]
                drawn[layer] = _drawn(of_layer, dimensions, matched, random)
            arms[f"{kind} {number}"] = arm(where, drawn, **options)
    return arms


def _drawn(
    logs: pd.Series,
    named: list[int],
    matched: bool,
    random: np.random.Generator,
) -> list[int]:
    """One dimension for each named one, given the logarithms of the variances of a layer."""
    drawn: list[int] = []
    for dimension in logs[named].sort_values(ascending=False).index:
        distance = (logs - logs[dimension]).abs().drop(drawn)
        if matched:
            distance = distance.drop(named).nsmallest(NEAREST)
        drawn.append(int(random.choice(distance.index)))
    return drawn


def lost(rows: pd.DataFrame, arm_name: str) -> pd.DataFrame:
    """Which part of its attention a key loses under an arm, by type of key and layer.

    Args:
        rows: those of :func:`layer_by_layer`, with the arm ``unchanged``.
        arm_name: the arm.

    Returns:
        Columns key_type, layer, lost (1 is all, and what is gained is below zero), ci_low, ci_high
        (95 %, of paired differences over texts), groups.
    """
    weights = rows.drop("entropy", level="quantity", errors="ignore").dropna()
    parts = 1 - weights.xs(arm_name, level="arm") / weights.xs("unchanged", level="arm")
    numbers = [recorded.as_columns(interval(part)) for _, part in parts.iterrows()]
    table = pd.DataFrame(numbers, parts.index).reset_index()
    return table.rename(columns={"quantity": "key_type", "value": "lost"})


def without(
    model: LoadedModel, corpus: Corpus, dimensions: int | Dimensions, name: str = ""
) -> pd.DataFrame:
    """What keys lose of their attention when those of a layer are made without some dimensions.

    In their place stand their means over other articles; one layer is changed at a time.

    Args:
        dimensions: one of every layer, or those of each layer.
        name: of a file as in :func:`layer_by_layer`, in which the arm is ``dimension 99``, or
            ``mean`` for several dimensions.

    Returns:
        The columns of :func:`lost`.
    """
    removed = "mean"
    if isinstance(dimensions, int):
        removed = f"dimension {dimensions}"
        dimensions = in_every_layer(model, dimensions)
    arms = {
        "unchanged": arm("key_side", dimensions, by="nothing"),
        removed: arm("key_side", dimensions, by="mean"),
    }
    return lost(layer_by_layer(model, corpus, arms, name=name), removed)


def in_every_layer(model: LoadedModel, dimension: int) -> Dimensions:
    """One dimension of the input of each attention layer."""
    count = len([*model.attending])
    layers = range(1, count + 1)
    return {layer: [dimension] for layer in layers}


def removed(
    model: LoadedModel,
    corpus: Corpus,
    dimensions: Iterable[int],
) -> pd.DataFrame:
    """The attention of a layer when its keys are made without a dimension.

    In its place stands its mean over other articles. Taken away are some dimensions and the
    :func:`outliers` of the layer, ``alone``, and all of these outliers ``together``; in one layer
    at a time.

    Returns:
        Columns model (its title), layer, dimension, arm, key_type, effect (the change of the mean
        weight of a key, over heads, as a part of what that was), ci_low, ci_high, groups: what
        ``figures.dimensions`` takes. What is done together has rows for each of its dimensions.
    """
    tables = measure(model, corpus, list(TABLES), progress=False)
    groups = outliers(tables)
    # Which layers each set of dimensions, sorted, is taken away from.
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for layer, group in groups.items():
        sets = {(dimension,) for dimension in (*dimensions, *group)}
        if group:
            sets.add(tuple(group))
        for chosen in sets:
            layers_of.setdefault(chosen, []).append(layer)
    arms = {"": arm("key_side", groups, by="nothing")}
    for chosen, layers in sorted(layers_of.items()):
        name = " ".join(map(str, chosen))
        by_layer = {layer: [*chosen] for layer in layers}
        arms[name] = arm("key_side", by_layer, by="mean")
    rows = layer_by_layer(model, corpus, arms)
    rows = rows.drop("entropy", level="quantity")
    rows = rows.dropna()
    unchanged = rows.groupby(["quantity", "layer"]).transform("first")
    changes = (rows / unchanged - 1).drop("", level="arm")
    numbers = []
    for _, change in changes.iterrows():
        estimate = interval(change)
        numbers.append(recorded.as_columns(estimate))
    table = pd.DataFrame(numbers, changes.index).reset_index()
    table = table.rename(columns={"quantity": "key_type", "value": "effect"})
    dimension = table["arm"].str.split()
    several = dimension.str.len() > 1
    table["arm"] = np.where(several, "together", "alone")
    table = table.assign(model=title(model.name), dimension=dimension)
    table = table.explode("dimension")
    table = table.astype({"dimension": int})
    order = ["layer", "dimension", "arm"]
    columns = [
        "model",
        *order,
        "key_type",
        "effect",
        "ci_low",
        "ci_high",
        "groups",
    ]
    return table[columns].sort_values(order, kind="stable", ignore_index=True)


def record_removed(**models: tuple[Corpus, Iterable[int]]) -> None:
    """Write what comes with the book of :func:`removed`.

    Args:
        models: by name, the corpus that it reads, and dimensions.
    """
    tables = []
    for name, (corpus, dimensions) in models.items():
        rows = removed(load_model(name), corpus, dimensions)
        tables.append((rows, recorded.origin(name, corpus)))
    recorded.write(REMOVED, tables)


def effects(names: Iterable[str], *corpora: Corpus) -> pd.DataFrame:
    """The shipped rows of :func:`removed`, of some models on some texts.

    Returns:
        What ``figures.dimensions`` takes.
    """
    rows = recorded.read(REMOVED)
    of_models = rows["model"].isin([*names])
    on_texts = rows["texts"].isin(map(recorded.texts_of, corpora))
    rows = rows[of_models & on_texts]
    rows = rows.assign(model=rows["model"].map(title))
    return rows.drop(columns=["groups", "texts"])


def same_article(
    model: LoadedModel,
    corpus: Corpus,
    change: Replace,
    _layer: int,
) -> pd.DataFrame:
    """How well the cosine of mean vectors tells texts of one article from those of others.

    The area under the ROC curve: the probability that another text of its article is more like a
    text than one of another article, mean over texts; see
    :func:`~analysis_book.papers.fosse.directions.areas`.

    Args:
        model: of texts.
        corpus: texts with their articles.
        change: with means of the ``same`` texts: here every text is a group of its own.

    Returns:
        The row ``area``, as of :func:`left_out`.
    """
    settings = Settings(intervention=(change,))
    changes = changes_of(model, corpus, settings)
    last = sum(map(len, model.stacks.values()))
    texts = range(len(corpus))
    vectors: dict[int, np.ndarray] = {}

    def receive(activations: capture.Activations) -> None:
        if activations.layer == last:
            hidden = activations.spaces["hidden"]
            means = hidden.sum[:, 0] / hidden.counts.unsqueeze(1)
            means = means.double().cpu().numpy()
            vectors.update(zip(activations.tokens.groups, means, strict=True))

    for batch in capture.batches(model, corpus.items, texts, settings, capture.Reading()):
        capture.run(model, batch, frozenset({"hidden"}), receive, changes=changes)
    in_order = np.stack([vectors[text] for text in texts])
    similar = directions.cosines(in_order)
    _, articles = np.unique(corpus.units, return_inverse=True)

    def area(kept: np.ndarray) -> float:
        rows = similar[np.ix_(kept, kept)]
        labels = articles[kept]
        every = np.ones(len(kept), bool)
        areas = []
        for article in set(labels):
            own = labels == article
            areas.append(directions.areas(rows, own, every))
        return float(np.nanmean(np.concatenate(areas)))

    groups = np.array(corpus.groups(GROUPS))
    numbers = {WHOLE: area(np.arange(len(corpus)))}
    for group in np.unique(groups):
        kept = np.flatnonzero(groups != group)
        numbers[str(group)] = area(kept)
    return pd.DataFrame(numbers, index=["area"])
