"""A view of a sentence that a reader types: ``sentence.js`` runs the model on it in the page."""

from collections.abc import Mapping

import altair as alt
import pandas as pd
import torch

from analysis_book.figures.style import COLOURS
from analysis_book.figures.view import INK, Control, View
from analysis_book.figures.weights import LONGEST, as_in_page, average_cosines, read
from analysis_lib.models import LoadedModel

# In the order in which a page loads them.
SCRIPTS = ("wordpiece.js", "bert.js", "sentence.js")
OURS = "this sentence"
THEIRS = "the corpus"
# What a reader can change; without a dimension, whose number stands behind it.
CHANGES = {
    "nothing": "as it is",
    "dimension": "without dimension",
    "query": "without the mean query",
    "cls": "another [CLS]",
    "mean": "mean taken away",
}
UNCHANGED = "datum.state == 'nothing'"
QUANTITIES = {
    "cls": "attention to [CLS]",
    "lost": "part of it that is lost",
    "entropy": "entropy of attention",
    "cosine": "cosine after the layer",
}
# As many contributions are shown, and so many of them said.
LISTED = 12
SAID = 4
DIGITS = ".3~r"
ENDS = "' [' + format(datum.low, '.2f') + ', ' + format(datum.high, '.2f') + ']'"


def sentence(
    model: LoadedModel,
    text: str,
    corpus: pd.DataFrame,
    about: Mapping[str, object],
    name: str = "fig-sentence",
    caption: str = "",
    **start: str | int,
) -> View:
    """The attention of one head on a sentence that a reader types, and what makes it.

    The page needs the scripts of ``SCRIPTS`` and the weights of the model, which the site brings;
    elsewhere the view shows the sentence with which it begins.

    Args:
        model: a BERT that reads lower-case word pieces.
        text: the sentence with which it begins.
        corpus: what stands beside the sentence. Columns: state (of ``CHANGES``), layer (that of the
            attention that is changed or looked at, 0 for any), quantity (of ``QUANTITIES``), hidden
            (the hidden layer of a cosine), value, low and high.
        about: ``dimension``, the one that a reader can take away; ``hidden``, the mean hidden state
            by layer; ``queries``, the mean query by attention layer; ``other``, the text whose
            [CLS] takes the place of the sentence's.
        name: the id of the figure on its page.
        caption: a sentence below it.
        start: with what it begins: ``layer``, ``head``, ``query`` and ``key``, from 1.

    Raises:
        AnalysisError: the model does not run in a page, or the view cannot begin so.
    """
    first = {
        "layer": 1,
        "head": 1,
        "query": 1,
        "key": 1,
    } | start
    tables, limits = _tables(as_in_page(model), text, corpus, first)
    changes = dict(CHANGES)
    changes["dimension"] += f" {about['dimension']}"
    controls = [
        Control("sentence", "Sentence", None, text),
        Control("change", "Change in this layer", changes, "nothing"),
    ]
    for field in ("layer", "head", "query", "key"):
        controls.append(Control(field, field.capitalize(), None, first[field]))
    panels = [_attention(), _heads(), _contributions(), _cosines(), _beside()]
    known = corpus.astype(object).where(corpus.notna(), None).to_dict("records")
    about = dict(about) | {
        "corpus": known,
        "ours": OURS,
        "theirs": THEIRS,
        "runs": model.name,
    }
    return View(
        name,
        caption,
        tables,
        [],
        panels,
        controls,
        _said(changes),
        {text: limits},
        {0: ["key", "query"], 1: ["head", "layer"]},
        source="sentence",
        about=about,
    )


# --- Data -----------------------------------------------------------------------------------------


def _tables(
    model: LoadedModel, text: str, corpus: pd.DataFrame, first: Mapping[str, int]
) -> tuple[dict[str, pd.DataFrame], dict[str, list[int]]]:
    """What the view begins with, the tables of ``sentence.js``, and the range of each number."""
    ids = model.tokenizer(
        text,
        truncation=True,
        max_length=LONGEST,
    )["input_ids"]
    words = model.tokenizer.convert_ids_to_tokens(ids)
    tokens = [f"{number} {word}" for number, word in enumerate(words, 1)]
    hidden, attention = read(model, text)
    layer, head, query, key = (first[name] - 1 for name in ("layer", "head", "query", "key"))
    scores = _scores(model, hidden[layer], first)
    largest = scores[scores.abs().nlargest(LISTED).index].reset_index()
    weights = attention[layer]
    pair = {
        "query": tokens[query],
        "key": tokens[key],
        "weight": weights[head, query, key].item(),
        "score": scores.sum(),
    }
    cosines, beside = _beside_corpus(hidden, weights, corpus, first["layer"])
    tables = {
        "tokens": pd.DataFrame({"number": range(1, len(tokens) + 1), "token": tokens}),
        "attention": _weights(weights[head], tokens),
        "heads": _by_number(attention.mean(2)[:, :, key], "layer", "head"),
        "contributions": largest.assign(rank=range(1, len(largest) + 1)),
        "pair": pd.DataFrame([pair]),
        "cosines": cosines,
        "beside": beside,
    }
    layers, heads = attention.shape[:2]
    count = len(tokens)
    limits = {
        "layer": [1, layers],
        "head": [1, heads],
        "query": [1, count],
        "key": [1, count],
    }
    return tables, limits


def _by_number(values: torch.Tensor, row: str, column: str) -> pd.DataFrame:
    """A matrix of weights as a table, with rows and columns that count from 1."""
    rows, columns = values.shape
    index = pd.MultiIndex.from_product([range(1, rows + 1), range(1, columns + 1)])
    flat = pd.Series(values.flatten().tolist(), index.set_names([row, column]), name="weight")
    return flat.reset_index()


def _weights(weights: torch.Tensor, tokens: list[str]) -> pd.DataFrame:
    """The attention of a head with the words of its queries and keys."""
    table = _by_number(weights, "query", "key")
    words = pd.Series(tokens, range(1, len(tokens) + 1))
    return table.assign(**{"from": table["query"].map(words), "to": table["key"].map(words)})


def _scores(model: LoadedModel, read: torch.Tensor, first: Mapping[str, int]) -> pd.Series:
    """The C_j of a pair by dimension (Maruta and Matsuzaki 2024, eq. 7)."""
    attention = model.model.encoder.layer[first["layer"] - 1].attention.self
    width = attention.attention_head_size
    of_head = slice((first["head"] - 1) * width, first["head"] * width)
    with torch.no_grad():
        query = attention.query(read[first["query"] - 1].float())[of_head]
        adds = (query @ attention.key.weight[of_head]).double() * read[first["key"] - 1]
    return pd.Series(adds.tolist(), name="contribution").rename_axis("dimension")


def _beside_corpus(
    hidden: torch.Tensor, weights: torch.Tensor, corpus: pd.DataFrame, layer: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Average cosines by layer, and numbers of one layer: of the sentence, and of the corpus."""
    count = hidden.shape[1]
    average = average_cosines(hidden).tolist()
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean() / torch.tensor(count).log()
    numbers = {
        "cls": weights[:, :, 0].mean().item(),
        "entropy": entropy.item(),
        "cosine": average[layer],
    }
    ours = {"of": OURS, "state": "nothing"}
    known = corpus[(corpus["state"] == "nothing") & corpus["layer"].isin([0, layer])]
    known = known.assign(of=THEIRS)
    is_cosine = known["quantity"] == "cosine"
    cosines = pd.DataFrame(
        {
            "hidden": range(len(average)),
            **ours,
            "value": average,
        }
    )
    beside = pd.DataFrame(
        {
            "quantity": [*numbers],
            **ours,
            "value": [*numbers.values()],
        }
    )
    theirs = known[~is_cosine | (known["hidden"] == layer)]
    columns = ["hidden", "of", "state", "value", "low", "high"]
    return (
        pd.concat([cosines, known.loc[is_cosine, columns]]),
        pd.concat([beside, theirs[["quantity", *columns[1:]]]]),
    )


# --- Panels ---------------------------------------------------------------------------------------


def _chart(data: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(data))


def _titled(title: str, height: object, description: str, *layers: alt.Chart) -> alt.LayerChart:
    """Layers under a title, which is an expression of Vega."""
    title = alt.Title(alt.expr(title))
    return alt.layer(*layers).properties(
        title=title,
        height=height,
        description=description,
    )


def _cells(data: str, x: alt.X, y: alt.Y, chosen: str) -> list[alt.Chart]:
    """A heat map of weights, the deeper the larger, with an outline around what is chosen."""
    # Of a share of 0.1, too, there is something to see.
    scale = alt.Scale(
        type="sqrt",
        domain=[0, 1],
        range=[0, 1],
    )
    opacity = alt.Opacity(
        "weight:Q",
        scale=scale,
        legend=None,
    )
    number = alt.Tooltip("weight:Q", format=DIGITS)
    fields = [x.shorthand, y.shorthand, number]
    cells = _chart(data).mark_rect(color=COLOURS[0]).encode(x, y, opacity, tooltip=fields)
    width = alt.condition(chosen, alt.value(3), alt.value(0.25))
    outlines = _chart(data).mark_rect(fillOpacity=0, stroke=INK)
    return [
        cells,
        outlines.encode(
            x,
            y,
            strokeWidth=width,
            tooltip=fields,
        ),
    ]


def _attention() -> alt.LayerChart:
    """The weights of the chosen head: queries by keys."""
    top = alt.Axis(
        orient="top",
        labelAngle=-90,
        labelLimit=110,
        labelOverlap=True,
    )
    x = alt.X(
        "to:N",
        title="key",
        sort=alt.EncodingSortField("key", op="min"),
        axis=top,
    )
    side = alt.Axis(labelLimit=110)
    y = alt.Y(
        "from:N",
        title="query",
        sort=alt.EncodingSortField("query", op="min"),
        axis=side,
    )
    chosen = "datum.query == query && datum.key == key"
    title = "'Attention of layer ' + layer + ', head ' + head"
    layers = _cells("attention", x, y, chosen)
    return _titled(title, {"step": 18}, "Attention of each token to each token", *layers)


def _heads() -> alt.LayerChart:
    """The mean attention to the chosen key, of every head."""
    x = alt.X("head:O", axis=alt.Axis(labelAngle=0))
    y = alt.Y("layer:O", title="attention layer")
    chosen = "datum.layer == layer && datum.head == head"
    title = "'Attention to key ' + key + ', mean over queries'"
    layers = _cells("heads", x, y, chosen)
    return _titled(title, {"step": 18}, "Attention to the chosen key by layer and head", *layers)


def _contributions() -> alt.LayerChart:
    """The largest C_j of the chosen pair."""
    base = _chart("contributions")
    y = alt.Y("dimension:O", sort=alt.EncodingSortField("rank", op="min"))
    x = alt.X(
        "contribution:Q",
        title="Cⱼ",
        axis=alt.Axis(tickCount=5),
    )
    sign = "datum.contribution < 0"
    color = alt.condition(sign, alt.value(COLOURS[1]), alt.value(COLOURS[0]))
    number = alt.Tooltip("contribution:Q", format=DIGITS)
    bars = base.mark_bar(height=10).encode(
        x,
        y,
        color=color,
        tooltip=["dimension:O", number],
    )
    title = "'Largest Cⱼ of query ' + query + ' and key ' + key"
    return _titled(title, {"step": 18}, "What dimensions add to the score of the pair", bars)


def _points(base: alt.Chart) -> alt.Chart:
    """Circles of the sentence and squares of the corpus, hollow where something is changed."""
    owners = [OURS, THEIRS]
    colours = alt.Scale(domain=owners, range=COLOURS[:2])
    shapes = alt.Scale(domain=owners, range=["circle", "square"])
    legend = alt.Legend(title=None, columns=1)
    fill = alt.Fill(
        "of:N",
        scale=colours,
        legend=None,
    )
    return base.mark_point(
        size=60,
        strokeWidth=2,
        opacity=1,
    ).encode(
        stroke=alt.Stroke(
            "of:N",
            scale=colours,
            legend=legend,
        ),
        shape=alt.Shape(
            "of:N",
            scale=shapes,
            legend=legend,
        ),
        fill=alt.condition(UNCHANGED, fill, alt.value("transparent")),
        tooltip=["of:N", "state:N", alt.Tooltip("value:Q", format=DIGITS)],
    )


def _ends(base: alt.Chart) -> alt.Chart:
    """The intervals of the corpus."""
    return base.transform_filter("isValid(datum.low)").mark_rule(color=COLOURS[1], strokeWidth=2)


def _cosines() -> alt.LayerChart:
    """The average cosine by hidden layer."""
    x = alt.X(
        "hidden:O",
        title="hidden layer",
        axis=alt.Axis(labelAngle=0),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(zero=True),
    )
    base = _chart("cosines").encode(x)
    color = alt.condition(f"datum.of == '{OURS}'", alt.value(COLOURS[0]), alt.value(COLOURS[1]))
    dash = alt.condition(UNCHANGED, alt.value([1, 0]), alt.value([4, 3]))
    lines = base.mark_line().encode(
        y,
        detail=["of:N", "state:N"],
        color=color,
        strokeDash=dash,
    )
    ends = _ends(base).encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    title = "'Average cosine' + (change == 'nothing' ? '' : ' (hollow: changed)')"
    description = "The average cosine by hidden layer"
    return _titled(title, 180, description, lines, ends, _points(base).encode(y))


def _beside() -> alt.LayerChart:
    """Numbers of the chosen layer, of the sentence and of the corpus, as they are and changed."""
    base = _chart("beside").transform_calculate(name=f"{QUANTITIES}[datum.quantity]")
    axis = alt.Axis(labelLimit=0)
    base = base.encode(
        alt.Y(
            "name:N",
            title=None,
            sort=[*QUANTITIES.values()],
            axis=axis,
        ),
        alt.YOffset("of:N", scale=alt.Scale(domain=[OURS, THEIRS])),
    )
    x = alt.X(
        "value:Q",
        title=None,
        scale=alt.Scale(zero=True),
        axis=alt.Axis(tickCount=5),
    )
    ends = _ends(base).encode(alt.X("low:Q"), alt.X2("high:Q"))
    title = "'Layer ' + layer + ', means over heads'"
    description = "Numbers of the layer beside those of the corpus"
    return _titled(title, {"step": 15}, description, ends, _points(base).encode(x))


def _said(changes: Mapping[str, str]) -> list[tuple[str, ...]]:
    """What is said of the chosen state, a sentence each."""
    where = "'Layer ' + layer + ', head ' + head + ': “' + datum.query + '” gives '"
    given = f"{where} + format(datum.weight, '.0%') + ' of its attention to “' + datum.key + '”'"
    largest = f"datum.dimension + ' (' + format(datum.contribution, '{DIGITS}') + ')'"
    number = f"format(datum.value, '.2f') + (isValid(datum.low) ? {ENDS} : '')"
    word = f"{QUANTITIES}[datum.quantity] + ' ' + {number}"
    said = [
        ("tokens", "true", "datum.token", "Tokens: "),
        ("pair", "true", given),
        (
            "contributions",
            f"datum.rank <= {SAID}",
            largest,
            "Dimensions that add most to its score, with Cⱼ: ",
        ),
    ]
    for state, words in changes.items():
        for owner in (OURS, THEIRS):
            chosen = f"datum.of == '{owner}' && datum.state == '{state}'"
            said.append(("beside", chosen, word, f"{owner.capitalize()}, {words}: "))
    return said
