"""What was measured of models, to move in: layers by heads, and dimensions."""

from collections.abc import Iterable, Mapping

import altair as alt
import pandas as pd

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.tables import NAMES
from analysis_lib.figures.view import COLOURS, INK, Control, View, short

Tables = Mapping[str, pd.DataFrame]
TYPES = [name for name in NAMES if name != "all"]
# The look of each, in the order of legends.
LOOKS = {
    "cls": (COLOURS[0], "circle"),
    "sep": (COLOURS[1], "square"),
    "first": (COLOURS[4], "triangle-up"),
    "punct": (COLOURS[2], "diamond"),
    "other": (COLOURS[3], "cross"),
    "all": (INK, "triangle-down"),
}
# What a heat map can show, by column.
QUANTITIES = {
    **{f"weight_{kind}": f"Attention to {NAMES[kind]}, per key" for kind in TYPES},
    "entropy": "Attention entropy, normalised",
    "query": "Average cosine of the queries",
    "key": "Average cosine of the keys",
    "value": "Average cosine of the values",
    **{f"score_{kind}": f"Cⱼ of one dimension, keys: {NAMES[kind]}" for kind in TYPES},
}
# What a view of dimensions can show: by the beginning of its columns, which are lists.
AMOUNTS = {
    "gap": "Cⱼ, beyond that of other tokens",
    "score": "Cⱼ: what it adds to the score",
    "mean": "Mean value in what the layer reads",
    "share": "Share of the squared mean vector",
}
COLUMNS = [*QUANTITIES, *(f"mean_{kind}" for kind in TYPES), "share"]
# Of a head, the dimensions with the largest contributions; of a model, those that stand out in some layer.
OF_HEAD, OF_MODEL = 12, 16
KEY = ["layer", "head"]
ENDS = {"": "", "ci_low": "_low", "ci_high": "_high"}
# By Vega's rules: a number with its interval, if it has one.
WORDS = "format(datum.number, '.3~r')"
WORDS += " + (isValid(datum.low) ? ' [' + format(datum.low, '.3~r') + ', ' + format(datum.high, '.3~r') + ']' : '')"
TYPED = f"datum.type + ' ' + {WORDS}"
HERE = "datum.layer == layer && datum.head == head"


# --- Views --------------------------------------------------------------------------------------------


def explorer(
    measured: Tables | Mapping[str, Tables], name: str = "fig-explorer", caption: str = "", **start: str | float
) -> View:
    """Layers by heads: a number of every head as a heat map; beside it what one head attends to, and by what.

    Args:
        measured: the tables of a measurement, a comparison, or tables by the title of their model. What it takes of
            them is ``anisotropy``, ``attention_entropy``, ``attention_by_token_type`` and ``score_contributions``.
        name: the id of the figure on its page.
        caption: a sentence below it.
        start: with what it begins: ``model``, ``quantity``, ``layer``, ``head`` and ``dimension``.

    Raises:
        AnalysisError: nothing by head was measured, or it cannot begin so.

    >>> figures.explorer(compare({"news": ["minilm"]}, "anisotropy", limit=40)).save("heads.html")  # doctest: +SKIP
    """
    rows = rows_of(by_model(measured))
    heads = rows[rows["head"] > 0]
    quantities = {c: words for c, words in QUANTITIES.items() if c in heads and heads[c].notna().any()}
    weights, scores = ([c for c in quantities if c.startswith(kind)] for kind in ("weight_", "score_"))
    limits = {
        model: {
            "quantity": [c for c in quantities if part[c].notna().any()],
            "layer": _ends(part["layer"]),
            "head": [1, int(part["head"].max())],
            **({"dimension": _dimensions(part)} if scores else {}),
        }
        for model, part in heads.groupby("model", sort=False)
    }
    controls = [
        Control("model", "Model", {model: model for model in limits}),
        Control("quantity", "Show", quantities),
        Control("layer", "Layer"),
        Control("head", "Head"),
        Control("dimension", "Dimension of Cⱼ"),
    ]
    # A heat map of contributions is of one dimension.
    shown = "datum.quantity == quantity" + " && (datum.part != 'score' || datum.dimension == dimension)" * bool(scores)
    words = f"{_chosen(quantities, 'quantity')} + ': ' + {WORDS}"
    said = [
        ("rows", f"datum.model == model && {HERE}", "model + ', layer ' + layer + ', head ' + head", "", ""),
        ("numbers", f"{HERE} && {shown}", words, "", "This is not among its largest"),
    ]
    panels = [_heat_map(quantities, shown)]
    if weights:
        chosen = f"{HERE} && datum.part == 'weight'"
        panels.append(_weights(chosen, weights))
        said.append(("numbers", chosen, TYPED, "Attention per key: ", ""))
    if scores:
        title = "'Layer ' + layer + ', head ' + head + ': largest Cⱼ'"
        panels.append(_by_dimension(f"{HERE} && datum.part == 'score'", scores, title, "-datum.most"))
    return View(
        name,
        caption or "A number of every head by attention layer, and what one head attends to.",
        "A heat map of heads by attention layer; beside it, of one head, its attention by type of token and the "
        "dimensions that add most to its scores.",
        {"rows": rows},
        _data(rows, QUANTITIES, "datum.head > 0", f"(datum.dimension == dimension || ({HERE}))"),
        panels,
        controls if scores else controls[:-1],
        said,
        limits,
        moves={0: ["head", "layer"]},
        start=start,
    )


def dimensions(
    measured: Tables | Mapping[str, Tables],
    effects: pd.DataFrame | None = None,
    name: str = "fig-dimensions",
    caption: str = "",
    **start: str | float,
) -> View:
    """Dimensions of what a layer reads: what they add to its scores, their means, and one of them through the layers.

    Args:
        measured: the tables of a measurement, a comparison, or tables by the title of their model; those without
            ``score_contributions`` are left out. The other table that it takes is ``dimension_means``.
        effects: what interventions on dimensions did, with the columns model, layer, dimension, arm, effect, ci_low and
            ci_high; shown of the dimension that is chosen.
        name: the id of the figure on its page.
        caption: a sentence below it.
        start: with what it begins: ``model``, ``amount``, ``layer``, ``heads`` (0: their mean), ``dimension`` and
            ``order``.

    Raises:
        AnalysisError: of no model contributions were measured, or it cannot begin so.
    """
    rows = rows_of(by_model(measured))
    layers = rows[rows["head"] == 0]
    if layers.empty:
        raise AnalysisError("no contributions of dimensions were measured: measure score_contributions")
    lists = [c for c in COLUMNS if c in layers and c.partition("_")[0] in AMOUNTS]
    limits = {}
    for model, part in layers.groupby("model", sort=False):
        there = {c.partition("_")[0] for c in lists if part[c].notna().any()}
        scored = [c for c in lists if c.startswith("score_") and part[c].notna().any()]
        there |= {"gap"} if "score_other" in scored and len(scored) > 1 else set()
        limits[model] = {
            "amount": [amount for amount in AMOUNTS if amount in there],
            "layer": _ends(part["layer"]),
            "heads": [0, int(rows.loc[rows["model"] == model, "head"].max())],
            "dimension": _dimensions(part),
        }
    controls = [
        Control("model", "Model", {model: model for model in limits}),
        Control("amount", "Show", AMOUNTS),
        Control("layer", "Layer"),
        Control("heads", "Head (0: mean of all)"),
        Control("dimension", "Dimension"),
        Control("order", "Order", {"size": "largest first", "number": "by number"}),
    ]
    # A mean is of a layer, not of a head.
    heads = "datum.head == (datum.part == 'score' || datum.part == 'gap' ? heads : 0)"
    shown, here = f"datum.part == amount && {heads}", "datum.layer == layer && datum.dimension == dimension"
    title = f"'Layer ' + layer + ': ' + {_chosen(AMOUNTS, 'amount')}"
    rank = "order == 'size' ? -datum.most : datum.dimension"
    panels = [
        _by_dimension(f"{shown} && datum.layer == layer", lists, title, rank),
        _by_layer(f"{shown} && datum.dimension == dimension", lists),
    ]
    place = "datum.model == model && datum.layer == layer && datum.head == heads"
    where = "', layer ' + layer + ', ' + (heads ? 'head ' + heads : 'mean over heads') + ', dimension ' + dimension"
    said = [
        ("rows", place, f"model + {where}", "", ""),
        ("numbers", f"{here} && {heads} && datum.part == 'score'", TYPED, "Cⱼ of a key: ", "It is not in the list"),
        ("numbers", f"{here} && datum.part == 'mean'", TYPED, "Mean value: ", ""),
        ("numbers", f"{here} && datum.part == 'share'", WORDS, "Share of the squared mean vector: ", ""),
    ]
    tables = {"rows": rows}
    if effects is not None:
        tables["effects"] = effects.rename(columns={"effect": "number", "ci_low": "low", "ci_high": "high"})
        panels.append(_effects(f"datum.model == model && {here}"))
        said.append(("effects", f"datum.model == model && {here}", f"datum.arm + ' ' + {WORDS}", "Removing it: ", ""))
    return View(
        name,
        caption or "What dimensions add to the scores of a layer, by type of key, and one of them by layer.",
        "Dimensions that stand out in a layer, a marker for each type of token; beside it one dimension by layer.",
        tables,
        _data(rows, lists, "(datum.head == 0 || datum.head == heads)", "true"),
        panels,
        controls,
        said,
        limits,
        start=start,
    )


# --- Data ---------------------------------------------------------------------------------------------


def by_model(measured: Tables | Mapping[str, Tables]) -> dict[str, Tables]:
    """The tables of each model by its title: of one measurement, of a comparison, or as they are given.

    Raises:
        AnalysisError: there are none.
    """
    if not measured:
        raise AnalysisError("nothing was measured: give tables, or tables by the title of their model")
    if trained := getattr(measured, "trained", None):
        return dict(trained)
    if isinstance(next(iter(measured.values())), pd.DataFrame):
        return {getattr(measured, "title", None) or getattr(measured, "run", {}).get("model", "model"): measured}
    return dict(measured)


def rows_of(measured: Mapping[str, Tables]) -> pd.DataFrame:
    """All that the views show, compactly: one row per head, and one per attention layer, whose head is 0.

    Columns that begin with ``score``, ``mean`` or ``share``, and ``dimensions``, are lists with blanks between, of the
    same dimensions: in the row of a head, of those with its largest contributions; in that of a layer, of those that
    stand out in some layer of the model.

    Raises:
        AnalysisError: the tables have nothing by head.
    """
    found = []
    for title, tables in measured.items():
        parts, layers = [*_scalars(tables)], []
        if "score_contributions" in tables:
            parts, layers = [*parts, _of_heads(tables)], [_of_layers(tables)]
        heads = [pd.concat(parts, axis=1).sort_index().reset_index()] if parts else []
        found += [frame.assign(model=title).astype(dict.fromkeys(KEY, int)) for frame in (*heads, *layers)]
    rows = pd.concat(found, ignore_index=True) if found else pd.DataFrame()
    if rows.empty:
        raise AnalysisError(f"nothing by head was measured of {', '.join(measured)}: measure anisotropy, ...")
    order = ["model", *KEY, "dimensions", *(f"{c}{end}" for c in COLUMNS for end in ENDS.values())]
    return rows[[column for column in order if column in rows]]


def _scalars(tables: Tables) -> Iterable[pd.DataFrame]:
    """One number per head, with its interval: cosines, entropy, and the weight of a key of each type."""
    for table, column, value, prefix in (
        ("anisotropy", "space", "cosine", ""),
        ("attention_entropy", None, "entropy_normalised", "entropy"),
        ("attention_by_token_type", "key_type", "weight", "weight_"),
    ):
        if table not in tables:
            continue
        rows = tables[table].dropna(subset=["head"]).rename(columns={value: ""})
        wide = rows.assign(by="" if column is None else rows[column].astype(str))
        wide = wide.pivot(index=KEY, columns="by", values=[end for end in ENDS if end in rows])
        yield wide.set_axis([f"{prefix}{by}{ENDS[end]}" for end, by in wide], axis=1)


def _scores(tables: Tables, index: list[str]) -> pd.DataFrame:
    """C_j by type of key, one column each."""
    rows = tables["score_contributions"].query("key_type != 'all'").astype({"key_type": str})
    return rows.pivot_table("contribution", index, "key_type", observed=True)


def _lists(values: pd.DataFrame, index: list[str]) -> pd.DataFrame:
    """The rows of all dimensions as one row of lists."""
    texts = values.map(short).assign(dimensions=values.index.get_level_values("dimension").astype(str))
    return texts.groupby(level=index).agg(" ".join)


def _of_heads(tables: Tables) -> pd.DataFrame:
    scores = _scores(tables, [*KEY, "dimension"]).add_prefix("score_")
    largest = scores.abs().max(axis=1).groupby(level=KEY).nlargest(OF_HEAD)
    return _lists(scores.loc[largest.droplevel([0, 1]).index], KEY)


def _of_layers(tables: Tables) -> pd.DataFrame:
    values = scores = _scores(tables, ["layer", "dimension"]).add_prefix("score_")
    if "dimension_means" in tables:
        means = tables["dimension_means"].astype({"token_type": str})
        # Attention reads the hidden layer before.
        means = means.assign(layer=means["layer"] + 1).pivot(
            index=["layer", "dimension"], columns="token_type", values="mean"
        )
        squares = means.pop("all") ** 2
        means["share"] = squares / squares.groupby("layer").transform("sum")
        values = values.join(means.rename(columns={name: f"mean_{name}" for name in TYPES}))
    # Those that come near the largest of some layer; first those that tell keys apart in most layers.
    apart = scores.sub(scores["score_other"], axis=0) if "score_other" in scores else scores
    near, order = (sizes.abs() / sizes.abs().groupby("layer").transform("max") for sizes in (values, apart))
    largest = near.max(axis=1).groupby("dimension").max().nlargest(OF_MODEL).index
    order = order.max(axis=1).groupby("dimension").mean()[largest].sort_values(ascending=False).index
    kept = values.unstack("layer").loc[order].stack("layer", future_stack=True)
    return _lists(kept, ["layer"]).reset_index().assign(head=0)


def _ends(layers: pd.Series) -> list[int]:
    return [int(layers.min()), int(layers.max())]


def _dimensions(rows: pd.DataFrame) -> list[int]:
    """The least and the largest that a reader may ask for, and the one that stands first in a list."""
    lists = rows["dimensions"].dropna() if "dimensions" in rows else ()
    return [0, 99999, int(lists.iloc[0].split()[0]) if len(lists) else 0]


def _data(rows: pd.DataFrame, columns: Iterable[str], of_rows: str, of_dimensions: str) -> list[dict]:
    """What Vega makes of columns of the chosen model: ``numbers``, one in a row.

    Each has model, layer, head, quantity (its column), number, low, high, dimension, part (the beginning of its column)
    and type (of token). The filters, of rows and of what stands in their lists, keep it quick.
    """

    def formula(name: str, expression: str) -> dict:
        return {"type": "formula", "as": name, "expr": expression}

    def kept(condition: str) -> dict:
        return {"type": "filter", "expr": condition}

    def folded(columns: Iterable[str]) -> dict:
        return {"type": "fold", "fields": [*columns], "as": ["quantity", "number"]}

    columns, place, data = [c for c in columns if c in rows], ["model", *KEY], []
    chosen = kept(f"datum.model == model && {of_rows}")
    lists = [c for c in columns if c.partition("_")[0] in AMOUNTS]
    if scalars := [c for c in columns if c not in lists]:
        ends = [formula(end, f"datum[datum.quantity + '_{end}']") for end in ("low", "high")]
        data.append({"name": "of_heads", "source": "rows", "transform": [chosen, folded(scalars), *ends]})
    if lists:
        names = ["dimension", *lists]
        split = [formula(c, f"split(datum.{c} || '', ' ')") for c in ["dimensions", *lists]]
        flat = {"type": "flatten", "fields": ["dimensions", *lists], "as": names}
        less = {
            f"gap_{c[6:]}": c for c in lists if c.startswith("score") and c != "score_other" and "score_other" in lists
        }
        steps = [chosen, {"type": "project", "fields": [*place, "dimensions", *lists]}, *split, flat]
        steps += [{"type": "project", "fields": [*place, *names]}, *(formula(c, f"toNumber(datum.{c})") for c in names)]
        steps += [kept(of_dimensions)]
        steps += [formula(gap, f"isValid(datum.{c}) ? datum.{c} - datum.score_other : null") for gap, c in less.items()]
        data.append({"name": "of_dimensions", "source": "rows", "transform": [*steps, folded([*lists, *less])]})
    kind = f"{NAMES}[split(datum.quantity, '_')[1] || 'all']"
    steps = [kept("isValid(datum.number)"), formula("part", "split(datum.quantity, '_')[0]"), formula("type", kind)]
    return [*data, {"name": "numbers", "source": [made["name"] for made in data], "transform": steps}]


def _chosen(names: Mapping[str, str], parameter: str) -> str:
    """By Vega's rules, the words of what a parameter names."""
    return f"{dict(names)}[{parameter}]"


# --- Panels -------------------------------------------------------------------------------------------


def _chart(data: str, chosen: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(data)).transform_filter(chosen)


def _titled(chart: alt.TopLevelMixin, title: str, height: object, description: str) -> alt.TopLevelMixin:
    return chart.properties(title=alt.Title(alt.expr(title)), height=height, description=description)


def _heat_map(quantities: Mapping[str, str], chosen: str) -> alt.LayerChart:
    """The chosen number of every head: the deeper a cell, the larger."""
    place = {
        "x": alt.X("head:O", axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.15)),
        "y": alt.Y("layer:O", title="attention layer", scale=alt.Scale(padding=0.15)),
    }
    look = {
        "symbolType": "square",
        "symbolSize": 200,
        "symbolFillColor": COLOURS[0],
        "symbolStrokeWidth": 0,
        "tickCount": 3,
    }
    legend = alt.Legend(title="orange: below zero", titleOrient="left", **look)
    width = alt.condition(HERE, alt.value(5), alt.value(1))
    outlines = _chart("rows", "datum.model == model && datum.head > 0").mark_rect(fillOpacity=0, stroke=INK)
    cells = _chart("numbers", f"datum.head > 0 && {chosen}").transform_calculate(size="abs(datum.number)", words=WORDS)
    cells = cells.mark_rect(opacity=1).encode(
        **place,
        color=alt.condition("datum.number < 0", alt.value(COLOURS[1]), alt.value(COLOURS[0])),
        opacity=alt.Opacity("size:Q", scale=alt.Scale(range=[0, 1], zero=True), legend=legend),
        tooltip=["layer:Q", "head:Q", alt.Tooltip("words:N", title="value")],
    )
    chart = alt.layer(outlines.encode(**place, strokeWidth=width), cells)
    return _titled(chart, _chosen(quantities, "quantity"), {"step": 18}, "Heads by attention layer")


def _weights(chosen: str, columns: list[str]) -> alt.LayerChart:
    """The attention of the chosen head by type of key."""
    base = _chart("numbers", chosen).encode(y=alt.Y("type:N", title=None, sort=[NAMES[c[7:]] for c in columns]))
    number = alt.X("number:Q", title="mean weight per key", axis=alt.Axis(tickCount=5))
    bars = base.mark_bar(color=COLOURS[0], height={"band": 0.6}).encode(x=number, tooltip=["type:N", "number:Q"])
    chart = alt.layer(bars, base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q"))
    title = "'Attention of layer ' + layer + ', head ' + head"
    return _titled(chart, title, {"step": 24}, "Attention of one head by type of key")


def _by_dimension(chosen: str, columns: list[str], title: str, rank: str) -> alt.LayerChart:
    """A row for each dimension, a marker for each type of token."""
    base = _chart("numbers", chosen).transform_calculate(size="abs(datum.number)")
    base = base.transform_joinaggregate(most="max(size)", groupby=["dimension"]).transform_calculate(rank=rank)
    base = base.encode(y=alt.Y("dimension:O", sort=alt.EncodingSortField("rank", op="min")))
    width = alt.condition("datum.dimension == dimension", alt.value(1.5), alt.value(0))
    number = alt.X("number:Q", title=None, scale=alt.Scale(padding=8), axis=alt.Axis(tickCount=5))
    tooltip = ["dimension:Q", "type:N", "number:Q"]
    points = base.mark_point(filled=True, size=70, opacity=1).encode(x=number, tooltip=tooltip, **_look(columns))
    chart = alt.layer(base.mark_rect(fillOpacity=0, stroke=INK).encode(strokeWidth=width), points)
    return _titled(chart, title, {"step": 15}, "Dimensions of a layer")


def _by_layer(chosen: str, columns: list[str]) -> alt.LayerChart:
    """One dimension through the layers, a line for each type of token."""
    layer = alt.X("layer:O", title="attention layer", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    base, look = _chart("numbers", chosen).encode(x=layer), _look(columns)
    width = alt.condition("datum.layer == layer", alt.value(1.5), alt.value(0))
    number = alt.Y("number:Q", title=None, scale=alt.Scale(zero=True, padding=8))
    chart = alt.layer(
        base.mark_rect(fillOpacity=0, stroke=INK).encode(strokeWidth=width),
        base.mark_line().encode(y=number, color=look["color"]),
        base.mark_point(filled=True, size=60, opacity=1).encode(
            y=number, tooltip=["layer:Q", "type:N", "number:Q"], **look
        ),
    )
    return _titled(chart, "'Dimension ' + dimension + ' by layer'", 220, "One dimension by layer")


def _effects(chosen: str) -> alt.LayerChart:
    """What interventions on the chosen dimension did, an interval for each arm."""
    base = _chart("effects", chosen).encode(y=alt.Y("arm:N", title=None))
    points = base.mark_point(filled=True, size=60, opacity=1, color=COLOURS[0])
    points = points.encode(x=alt.X("number:Q", title="effect"), tooltip=["arm:N", "number:Q"])
    chart = alt.layer(base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q"), points)
    title = "'Dimension ' + dimension + ' removed in layer ' + layer"
    return _titled(chart, title, {"step": 24}, "What removing the dimension did")


def _look(columns: list[str]) -> dict:
    """A colour and a shape for each type of token in the columns."""
    kinds = [kind for kind in LOOKS if kind in {c.partition("_")[2] or "all" for c in columns}]
    colours, shapes = zip(*(LOOKS[kind] for kind in kinds), strict=True)
    names, legend = [NAMES[kind] for kind in kinds], alt.Legend(title=None, columns=3)
    return {
        "color": alt.Color("type:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
        "shape": alt.Shape("type:N", scale=alt.Scale(domain=names, range=shapes), legend=legend),
    }
