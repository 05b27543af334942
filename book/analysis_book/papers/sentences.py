"""What a corpus says beside one sentence: the numbers of each layer, as it is and changed."""

from collections.abc import Mapping

import pandas as pd

from analysis_book.papers import causes
from analysis_lib.capture.interventions import Replace
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import TableSet, measure
from analysis_lib.models import LoadedModel

METRICS = "attention_by_token_type,attention_entropy,utterance_similarity"
QUANTITIES = ["cls", "lost", "entropy", "cosine"]
COLUMNS = ["state", "layer", "quantity", "hidden", "value", "low", "high"]


def arms(dimension: int, layers: int) -> dict[str, dict[int, Replace]]:
    """The changes of a model of so many layers, by name and by the layer that is changed.

    ``dimension N``: the keys of the layer read the mean of other articles in this dimension.
    ``query``: its queries are without their mean over other articles. ``cls``: its keys read the
    [CLS] of another article in place of that of the text. ``mean``: the hidden state of the layer
    is without its mean over other articles.
    """
    numbers = range(1, layers + 1)
    unchanged = Replace("key_side", by="nothing")
    other = {"by": "other_of_type", "tokens": ("cls",), "of": "others"}
    centred = {"by": "centre", "of": "others"}
    alone = {layer: [dimension] for layer in numbers}
    query, cls = {}, {}
    mean = {0: Replace("residual", layers=0, **centred)}
    for layer in numbers:
        query[layer] = Replace("query", layers=layer, **centred)
        cls[layer] = Replace("key_side", layers=layer, **other)
        mean[layer] = Replace("residual", layers=layer, **centred)
    return {
        "nothing": dict.fromkeys(numbers, unchanged),
        f"dimension {dimension}": causes.arm("key_side", alone, by="mean"),
        "query": query,
        "cls": cls,
        "mean": mean,
    }


def in_layer(tables: TableSet, layer: int) -> pd.Series:
    """The weight of [CLS] and the normalised entropy in a layer, and the cosines of all layers."""
    similarity = tables["utterance_similarity"].query("space == 'hidden'")
    cosines = similarity.set_index("layer")["similarity"].add_prefix("cosine ")
    if not layer:
        return cosines
    attention = causes.attention_in(tables, layer)[["cls", "entropy"]]
    return pd.concat([attention, cosines])


def _quantities(model: LoadedModel, corpus: Corpus, change: Replace, layer: int) -> pd.DataFrame:
    """The numbers :func:`in_layer` under a change, ``left_out``."""
    tables = measure(model, corpus, METRICS, intervention=(change,), progress=False)
    return causes.left_out(tables, lambda table: in_layer(table, layer))


def beside(model: LoadedModel, corpus: Corpus, dimension: int) -> pd.DataFrame:
    """The rows that ``figures.sentence`` shows beside a sentence.

    Returns:
        Columns state (the first word of an arm of :func:`arms`), layer (that is changed, or whose
        attention it is; 0 where it is of none), quantity (``cls``, ``entropy`` and ``lost``, the
        part of the weight of [CLS] that is lost, means over heads; or ``cosine``, of two tokens of
        a text), hidden (the hidden layer of a cosine), value, low and high, its 95 % interval.
    """
    layers = len([*model.attending])
    name = f"sentences-{model.name}"
    rows = causes.layer_by_layer(model, corpus, arms(dimension, layers), _quantities, name)
    weights = rows.xs("cls", level="quantity")
    unchanged = weights.xs("nothing", level="arm")
    lost = 1 - weights / unchanged.reindex(weights.index, level="layer")
    lost = pd.concat({"lost": lost.drop("nothing", level="arm")}, names=["quantity"])
    rows = pd.concat([rows, lost.reorder_levels(rows.index.names)])
    numbers = [_number(key, values) for key, values in rows.iterrows()]
    table = pd.DataFrame([number for number in numbers if number], columns=COLUMNS)
    # A mean that is taken from hidden states as they are measured moves no attention.
    of_attention = table["quantity"].isin(["cls", "entropy"])
    attention = table[of_attention & (table["state"] == "nothing")]
    table = pd.concat([table, attention.assign(state="mean")])
    table["quantity"] = pd.Categorical(table["quantity"], QUANTITIES)
    table = table.sort_values(["quantity", "state", "layer", "hidden"], ignore_index=True)
    return table.astype({"quantity": str})


def record(model: LoadedModel, corpus: Corpus, dimension: int) -> None:
    """Write the file that comes with the book, which :func:`beside` reads."""
    layers = len([*model.attending])
    rows = causes.layer_by_layer(model, corpus, arms(dimension, layers), _quantities)
    causes.ship(rows, f"sentences-{model.name}", corpus)


def _number(key: tuple[str, str, int], values: pd.Series) -> tuple | None:
    """A row of :func:`beside`; None of what does not hang on its arm."""
    arm, name, layer = key
    state = arm.split()[0]
    quantity, _, hidden = name.partition(" ")
    hidden = int(hidden) if hidden else None
    if state == "mean" and hidden != layer:
        return None
    if quantity == "cosine" and state in ("nothing", "mean"):
        if state == "nothing" and layer > 1:
            return None
        # Of whatever layer is looked at.
        layer = 0
    estimate = causes.interval(values)
    return state, layer, quantity, hidden, *estimate.row


def means(model: LoadedModel, corpus: Corpus) -> Mapping[str, list[list[float]]]:
    """The mean hidden state of each layer, and the mean query of each attention layer."""
    tables = measure(model, corpus, "dimension_means,head_means", progress=False)
    hidden = tables["dimension_means"].query("token_type == 'all'")
    hidden = hidden.pivot(index="layer", columns="dimension", values="mean")
    queries = tables["head_means"].query("space == 'query'")
    queries = queries.pivot(index="layer", columns=["head", "dimension"], values="mean")
    return {"hidden": _short(hidden), "queries": _short(queries)}


def _short(rows: pd.DataFrame) -> list[list[float]]:
    """Rows of numbers with five digits, which a page is to hold."""
    return rows.map(lambda value: float(f"{value:.5g}")).to_numpy().tolist()
