"""Causes: what attention and vectors become when dimensions or directions are changed, one layer at
a time.
"""

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
Quantities = Callable[[LoadedModel, Corpus, Replace, int], pd.DataFrame]


class DimensionVariances(Metric):
    """Columns: layer, dimension, variance of what the attention of a layer reads, over all
    tokens.
    """

    name = "dimension_variances"
    needs = frozenset({"attention_input"})
    axes = ("dimension",)

    def update(self, activations: capture.Activations) -> None:
        if (read := activations.spaces.get("attention_input")) is not None:
            values = read.values.double() * read.tokens.counted[:, None, :, None]
            self.add(("sum", activations.layer), values.sum((1, 2)), activations)
            self.add(("square", activations.layer), values.square().sum((1, 2)), activations)
            self.add(("tokens", activations.layer), read.counts.unsqueeze(1), activations)

    def rows(self, sums: LayerSums) -> Columns:
        mean, square = sums["sum"] / sums["tokens"], sums["square"] / sums["tokens"]
        return {"variance": square - mean**2}


def attention_in(tables: TableSet, layer: int) -> pd.Series:
    """Of one layer, means over heads: the weight of a key of each type, and the normalised
    entropy.
    """
    weights, entropy = tables["attention_by_token_type"], tables["attention_entropy"]
    rows = weights[weights["layer"] == layer]
    kinds = rows["key_type"].unique()
    # In the order of the table, heads by types: grouping would take most of a page's time.
    found = pd.Series(rows["weight"].to_numpy().reshape(-1, len(kinds)).mean(0), [*kinds]).reindex(
        TOKEN_TYPES
    )
    found["entropy"] = entropy.loc[entropy["layer"] == layer, "entropy_normalised"].mean()
    return found


def left_out(tables: Tables, statistic: object) -> pd.DataFrame:
    """A statistic that is a Series on the whole corpus, ``all``, and without each jackknife group:
    one column each.
    """
    found: list[pd.Series] = []
    tables.interval(lambda t: found.append(statistic(t)) or 0.0)
    return pd.concat(found, axis=1, keys=[WHOLE, *map(str, tables.groups)])


def attention(model: LoadedModel, corpus: Corpus, change: Replace, layer: int) -> pd.DataFrame:
    """:func:`attention_in` a layer under a change, :func:`left_out`."""
    metrics = "attention_by_token_type,attention_entropy"
    tables = measure(model, corpus, metrics, intervention=(change,), progress=False)
    return left_out(tables, lambda t: attention_in(t, layer))


def layer_by_layer(
    model: LoadedModel, corpus: Corpus, arms: Arms, of: Quantities = attention, name: str = ""
) -> pd.DataFrame:
    """What becomes of each layer when only that layer is changed.

    Args:
        arms: by the name of an arm and the layer that is looked at, the change.
        of: what is measured: by quantity, on all texts and without each jackknife group.
        name: of a file of such rows in ``data/measurements/causes``, which is read if it has these
            arms on these texts.

    Returns:
        By arm, quantity and layer: on all texts, ``all``, and without each jackknife group. What is
        computed from the rows, column by column, has the :func:`interval` of its differences
        between arms.
    """
    known = shipped(name, corpus)
    if known is not None and {*arms} <= {*known.index.unique("arm")}:
        return known.loc[[*arms]]
    found = {
        (a, i): of(model, corpus, change, i)
        for a, changes in arms.items()
        for i, change in changes.items()
    }
    rows = pd.concat(found, names=["arm", "layer", "quantity"])
    return rows.reorder_levels(["arm", "quantity", "layer"])


def shipped(name: str, corpus: Corpus) -> pd.DataFrame | None:
    """The rows of a file in ``data/measurements/causes``; None where there is none, or of other
    texts.
    """
    if not recorded.path(name).is_file():
        return None
    rows = recorded.read(name)
    same = rows.pop("texts").eq(recorded.texts_of(corpus)).all()
    return rows.set_index(["arm", "quantity", "layer"]) if same else None


def ship(rows: pd.DataFrame, name: str, corpus: Corpus) -> None:
    """Write the file that :func:`shipped` reads."""
    recorded.write(name, [(rows.dropna().reset_index(), {"texts": recorded.texts_of(corpus)})])


def interval(values: pd.Series) -> Estimate:
    """The jackknife interval over texts of a number of the columns of :func:`layer_by_layer`."""
    return jackknife(values[WHOLE], values.drop(WHOLE).tolist())


def arm(where: str, dimensions: Dimensions, **how: object) -> dict[int, Replace]:
    """The change of some dimensions of what the attention of each layer reads, by means and vectors
    of other articles.

    On the residual stream, what attention layer l reads is what block l − 1 gives.
    """
    how = {"of": "same" if how["by"] == "zero" else "others"} | how
    back = 1 if where == "residual" else 0
    return {
        layer: Replace(where, layers=(layer - back,), dimensions=tuple(d), **how)
        for layer, d in dimensions.items()
    }


def drift(model: LoadedModel, corpus: Corpus) -> pd.DataFrame:
    """Rows of :func:`layer_by_layer` without the mean query of each head, of other texts, or
    without the mean key.

    The mean key, which moves nothing, is taken away in every fifth layer.
    """
    layers = range(1, len([*model.attending]) + 1)
    arms = {"unchanged": {layer: Replace("query", by="nothing") for layer in layers}}
    for space, some in (("query", layers), ("key", layers[::5])):
        arms[space] = {
            layer: Replace(space, layers=(layer,), by="centre", of="others") for layer in some
        }
    return layer_by_layer(model, corpus, arms)


def outliers(tables: TableSet) -> Dimensions:
    """By attention layer, the outlier dimensions of what it reads, by the rule of Maruta and
    Matsuzaki (2024).
    """
    layers = sorted(tables["attention_entropy"]["layer"].unique())
    return {int(layer): [*map(int, maruta.read_by(tables, [layer]))] for layer in layers}


def largest(tables: TableSet, counts: Dimensions, key_type: str = "cls") -> Dimensions:
    """By attention layer, the dimensions of largest |C_j| for keys of a type, mean over heads, as
    many as in others.
    """
    rows = tables["score_contributions"].query(f"key_type == '{key_type}'")
    sizes = rows["contribution"].abs().groupby([rows["layer"], rows["dimension"]]).mean()
    return {
        i: [*map(int, sizes[i].nlargest(len(d)).index)] if i in sizes else []
        for i, d in counts.items()
    }


def random_arms(
    where: str, named: Dimensions, tables: TableSet, sets: int, **how: object
) -> dict[str, dict[int, Replace]]:
    """Arms of as many dimensions as are named, drawn so many times in two ways.

    ``random``: any. ``matched``: for each named one, in the order of variance, one of the
    ``NEAREST`` in variance that are neither named nor drawn.

    Args:
        tables: with :class:`DimensionVariances`.
    """
    logs = np.log(
        tables["dimension_variances"].pivot(index="layer", columns="dimension", values="variance")
    )
    found = {}
    for kind in ("random", "matched"):
        draws = np.random.default_rng(0)
        for number in range(1, sets + 1):
            drawn: dict[int, list[int]] = {layer: [] for layer in named}
            for layer, dimensions in named.items():
                for dimension in logs.loc[layer, dimensions].sort_values(ascending=False).index:
                    taken = drawn[layer] + (dimensions if kind == "matched" else [])
                    distance = (logs.loc[layer] - logs.loc[layer, dimension]).abs().drop(taken)
                    near = distance.nsmallest(NEAREST) if kind == "matched" else distance
                    drawn[layer].append(int(draws.choice(near.index)))
            found[f"{kind} {number}"] = arm(where, drawn, **how)
    return found


def removed(model: LoadedModel, corpus: Corpus, dimensions: Iterable[int]) -> pd.DataFrame:
    """What a layer attends to when its keys are made without a dimension, which has its mean over
    other articles there.

    Taken away are some dimensions and the :func:`outliers` of the layer, ``alone``, and all of
    these outliers ``together``; in one layer at a time.

    Returns:
        Columns model (its title), layer, dimension, arm, key_type, effect (the change of the mean
        weight of a key, over heads, as a part of what that was), ci_low, ci_high, groups: what
        ``figures.dimensions`` takes. What is done together has rows for each of its dimensions.
    """
    groups = outliers(measure(model, corpus, list(TABLES), progress=False))
    sets = {
        layer: {(d,) for d in (*dimensions, *group)} | {tuple(group)} - {()}
        for layer, group in groups.items()
    }
    arms = {"": arm("key_side", groups, by="nothing")}
    for one in sorted(set().union(*sets.values())):
        arms[" ".join(map(str, one))] = arm(
            "key_side", {i: [*one] for i in sets if one in sets[i]}, by="mean"
        )
    rows = layer_by_layer(model, corpus, arms).drop("entropy", level="quantity").dropna()
    changes = (rows / rows.groupby(["quantity", "layer"]).transform("first") - 1).drop(
        "", level="arm"
    )
    found = pd.DataFrame(
        [recorded.as_columns(interval(change)) for _, change in changes.iterrows()], changes.index
    )
    found = found.reset_index().rename(columns={"quantity": "key_type", "value": "effect"})
    dimension = found["arm"].str.split()
    found["arm"] = dimension.str.len().gt(1).map({False: "alone", True: "together"})
    found = (
        found.assign(model=title(model.name), dimension=dimension)
        .explode("dimension")
        .astype({"dimension": int})
    )
    order = [
        "model",
        "layer",
        "dimension",
        "arm",
        "key_type",
        "effect",
        "ci_low",
        "ci_high",
        "groups",
    ]
    return found[order].sort_values(order[1:4], kind="stable", ignore_index=True)


def record_removed(**given: tuple[Corpus, Iterable[int]]) -> None:
    """Write what comes with the book of :func:`removed`: by model, the corpus that it reads, and
    dimensions.
    """
    found = (
        (removed(load_model(name), *of), recorded.place_of(name, of[0]))
        for name, of in given.items()
    )
    recorded.write(REMOVED, found)


def effects(names: Iterable[str], *corpora: Corpus) -> pd.DataFrame:
    """What comes with the book of :func:`removed`, of some models on some texts, as
    ``figures.dimensions`` takes it.
    """
    rows = recorded.read(REMOVED)
    rows = rows[rows["model"].isin([*names]) & rows["texts"].isin(map(recorded.texts_of, corpora))]
    return rows.assign(model=rows["model"].map(title)).drop(columns=["groups", "texts"])


def same_article(model: LoadedModel, corpus: Corpus, change: Replace, _layer: int) -> pd.DataFrame:
    """How well the cosine of their mean vectors tells two texts of one article from two of
    different ones.

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
    settings, found = Settings(intervention=(change,)), {}
    last, changes = sum(map(len, model.stacks.values())), changes_of(model, corpus, settings)

    def receive(activations: capture.Activations) -> None:
        if activations.layer == last:
            means = (hidden := activations.spaces["hidden"]).sum[:, 0] / hidden.counts.unsqueeze(1)
            found.update(zip(activations.tokens.groups, means.double().cpu().numpy(), strict=True))

    for batch in capture.batches(
        model, corpus.items, range(len(corpus)), settings, capture.Reading()
    ):
        capture.run(model, batch, frozenset({"hidden"}), receive, changes=changes)
    similar = directions.cosines(np.stack([found[i] for i in range(len(corpus))]))
    articles, groups = (
        np.unique(corpus.units, return_inverse=True)[1],
        np.array(corpus.groups(GROUPS)),
    )

    def area(kept: np.ndarray) -> float:
        rows, labels, every = similar[np.ix_(kept, kept)], articles[kept], np.ones(len(kept), bool)
        return float(
            np.nanmean(
                np.concatenate([directions.areas(rows, labels == a, every) for a in set(labels)])
            )
        )

    places = {WHOLE: groups >= 0} | {str(group): groups != group for group in np.unique(groups)}
    return pd.DataFrame(
        {name: [area(np.flatnonzero(kept))] for name, kept in places.items()}, index=["area"]
    )
