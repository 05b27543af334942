"""Measurements of models to move in: layers by heads, and dimensions."""

from collections.abc import Iterable, Mapping, Sequence

import altair as alt
import pandas as pd

from analysis_book.figures.style import COLOURS
from analysis_book.figures.tables import TYPE_NAMES
from analysis_book.figures.view import INK, Control, View, as_csv, short, steps
from analysis_lib.errors import AnalysisError

Tables = Mapping[str, pd.DataFrame]
Measured = Tables | Mapping[str, Tables]
TYPES = [name for name in TYPE_NAMES if name != "all"]
# Of the points of each, in the order of TYPE_NAMES.
LOOKS = [*COLOURS, INK], ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
# What a heat map can show, by column.
QUANTITIES = {
    **{f"weight_{kind}": f"Attention to {TYPE_NAMES[kind]}, per key" for kind in TYPES},
    "entropy": "Attention entropy, normalised",
    "query": "Average cosine of the queries",
    "key": "Average cosine of the keys",
    "value": "Average cosine of the values",
    **{f"score_{kind}": f"Cⱼ of one dimension, keys: {TYPE_NAMES[kind]}" for kind in TYPES},
}
# What a view of dimensions can show: by the beginning of its columns, which are lists.
AMOUNTS = {
    "gap": "Cⱼ, beyond that of other tokens",
    "score": "Cⱼ: what it adds to the score",
    "mean": "Mean value in what the layer reads",
    "share": "Share of the average cosine",
}
COLUMNS = [*QUANTITIES, *(f"mean_{kind}" for kind in TYPES), "share"]
# What keys are made without, and the look of its bars.
ARMS = {"alone": "Without it", "together": "Without all outliers of the layer"}
DONE = [*ARMS.values()]
# Dimensions: of a head, those with the largest contributions; of a model, those that stand out in
# some layer.
LISTED = 12
# For rows of models and heads, in bytes; what effects add has its place beside them.
ROOM = 270_000
KEY = ["layer", "head"]
ENDS = {"": "", "ci_low": "_low", "ci_high": "_high"}
# By Vega's rules: a number with its interval, if it has one; what stands in the row of the chosen
# head.
WORDS = "format(datum.number, '.3~r')"
WORDS += (
    " + (isValid(datum.low) ? ' [' + format(datum.low, '.3~r') + ', ' + format(datum.high, "
    "'.3~r') + ']' : '')"
)
TYPED = f"datum.type + ' ' + {WORDS}"
HERE = "datum.layer == layer && datum.head == head"
# Of a dimension, whether it is among those that are chosen together, whatever stands between them.
AMONG = r"test(regexp('\\b' + datum.dimension + '\\b'), together)"


# --- Views ----------------------------------------------------------------------------------------


def explorer(
    measured: Measured, name: str = "fig-explorer", caption: str = "", **start: str | float
) -> View:
    """Layers by heads: a number of every head as a heat map, and the attention of one head.

    Args:
        measured: the tables of a measurement, a comparison, or tables by the title of their model.
            What it takes of them is ``anisotropy``, ``attention_entropy``,
            ``attention_by_token_type`` and ``score_contributions``.
        name: the id of the figure on its page.
        caption: a sentence below it.
        start: with what it begins: ``model``, ``quantity``, ``layer``, ``head``, ``first`` (of the
            list of heads: ``"largest"`` or ``"least"``) and ``dimension``. Unless given, a model
            begins at the head with the most of its first quantity.

    Raises:
        AnalysisError: nothing by head was measured, or it cannot begin so.

    >>> comparison = compare({"news": ["minilm"]}, "anisotropy", limit=40)  # doctest: +SKIP
    >>> figures.explorer(comparison).save("heads.html")  # doctest: +SKIP
    """
    rows = rows_of(measured)
    measured_columns = _with_values(rows)
    quantities = {c: words for c, words in QUANTITIES.items() if c in measured_columns}
    limits = {}
    for model, part in rows.groupby("model", sort=False):
        of_model = _with_values(part)
        shown_of_model = [c for c in quantities if c in of_model]
        limits[model] = {"quantity": shown_of_model} | _limits(part, "head", 1)
        # It begins at the head with the most of its first quantity, such as its strongest sink.
        heads = part[part["head"] > 0].set_index(KEY)
        if shown_of_model and not shown_of_model[0].startswith("score_"):
            layer, head = heads[shown_of_model[0]].idxmax()
            limits[model]["layer"].append(int(layer))
            limits[model]["head"].append(int(head))
    controls = [
        Control("model", "Model", {model: model for model in limits}),
        Control("quantity", "Show", quantities),
        Control("layer", "Layer"),
        Control("head", "Head"),
    ]
    weights = [c for c in quantities if c.startswith("weight_")]
    scores = [c for c in quantities if c.startswith("score_")]
    shown = "datum.quantity == quantity"
    if scores:
        # A heat map of contributions is of one dimension.
        shown += " && (datum.part != 'score' || datum.dimension == dimension)"
    panels = [_heat_map(shown)]
    head = "model + ', layer ' + layer + ', head ' + head"
    words = f"{QUANTITIES}[quantity] + ': ' + {WORDS}"
    said = [
        ("rows", f"datum.model == model && {HERE}", head),
        ("numbers", f"{HERE} && {shown}", words, "", "This is not among its largest"),
    ]
    if weights:
        chosen = f"{HERE} && datum.part == 'weight'"
        title = "'Attention of layer ' + layer + ', head ' + head"
        panels.append(_by_type(chosen, title, "mean weight per key"))
        said.append(("numbers", chosen, TYPED, "Attention per key: "))
    if scores:
        controls.append(Control("dimension", "Dimension of Cⱼ"))
        title = "'Layer ' + layer + ', head ' + head + ': largest Cⱼ'"
        chosen = f"{HERE} && datum.part == 'score'"
        panels.append(_by_dimension(chosen, scores, title, "-datum.most"))
    order = {"largest": "largest first", "least": "least first"}
    controls.append(Control("first", "List of heads", order))
    panels.append(_first_heads(shown))
    caption = caption or "A number of every head by attention layer, and what one head attends to."
    data = _data(rows, QUANTITIES, "datum.head > 0", f"(datum.dimension == dimension || ({HERE}))")
    moves = {0: ["head", "layer"]}
    return View(name, caption, {"rows": rows}, data, panels, controls, said, limits, moves, start)


def dimensions(
    measured: Measured,
    effects: pd.DataFrame | None = None,
    name: str = "fig-dimensions",
    caption: str = "",
    **start: str | float,
) -> View:
    """Dimensions of what a layer reads: contributions, means, and one of them through the layers.

    Args:
        measured: as :func:`explorer` takes it; models without ``score_contributions`` are left out.
            The other tables that it takes are ``dimension_means`` and ``cosine_by_dimension``.
        effects: what the layer attends to when its keys are made without a dimension, ``alone``, or
            without all outliers of the layer, ``together``, where it is one of them. Columns:
            model, layer, dimension, arm, key_type, effect (the change of the mean weight of a key,
            as a part of what that was), ci_low and ci_high.
        name, caption: as of :func:`explorer`.
        start: with what it begins: ``model``, ``amount``, ``layer``, ``heads`` (0: their mean),
            ``dimension``, ``together`` (dimensions whose sums are said, such as ``"7, 8"``) and
            ``order``.

    Raises:
        AnalysisError: of no model contributions were measured, or it cannot begin so.
    """
    rows = rows_of(measured)
    lists = [c for c in COLUMNS if c in rows and c.partition("_")[0] in AMOUNTS]
    limits: dict[str, dict] = {}
    for model, part in rows.groupby("model", sort=False):
        if (part["head"] == 0).any():
            amounts = _amounts(part, lists)
            limits[model] = {"amount": amounts} | _limits(part, "heads", 0)
    if not limits:
        raise AnalysisError(
            "no contributions of dimensions were measured: measure score_contributions"
        )
    controls = [
        Control("model", "Model", {model: model for model in limits}),
        Control("amount", "Show", AMOUNTS),
        Control("layer", "Layer"),
        Control("heads", "Head (0: mean of all)"),
        Control("dimension", "Dimension"),
        Control("together", "Together, e.g. 7, 8", value=""),
        Control("order", "Order", {"size": "largest first", "number": "by number"}),
    ]
    # A mean is of a layer, not of a head.
    heads = "datum.head == (datum.part == 'score' || datum.part == 'gap' ? heads : 0)"
    shown = f"datum.part == amount && {heads}"
    title = f"'Layer ' + layer + ': ' + {AMOUNTS}[amount]"
    rank = "order == 'size' ? -datum.most : datum.dimension"
    panels = [
        _by_dimension(f"{shown} && datum.layer == layer", lists, title, rank, AMONG),
        _by_layer(f"{shown} && datum.dimension == dimension", lists),
    ]
    said = _of_dimension(heads)
    tables = {"rows": rows}
    if effects is not None and len(effects):
        tables["effects"] = _effects(effects)
        title = "'Keys of layer ' + layer + ' without dimension ' + dimension"
        number = "change of the mean weight per key"
        panels.append(_by_type("datum.part == 'effect'", title, number, ".0%", DONE))
        words = TYPED.replace(".3~r", "+.0%")
        for arm in effects["arm"].unique():
            before = f"{ARMS[arm]}, attention changes: "
            otherwise = "What it does was not measured" if arm == "alone" else ""
            said.append(("numbers", f"datum.arm == '{arm}'", words, before, otherwise))
    caption = (
        caption
        or "What dimensions add to the scores of a layer, by type of key, and one of them by layer."
    )
    of_rows = "(datum.head == 0 || datum.head == heads)"
    data = _data(rows, lists, of_rows, "true", tables.get("effects"))
    together = f"datum.layer == layer && {heads} && {AMONG}"
    data.append(_sums("chosen", "dimension", together))
    data.append(_sums("sums", "type", together))
    return View(
        name,
        caption,
        tables,
        data,
        panels,
        controls,
        said,
        limits,
        start=start,
        sweeps={0: "together"},
    )


def _sums(name: str, by: str, chosen: str) -> dict:
    """Vega's data set of the sums of the chosen numbers, by their part and by another field."""
    aggregate = {
        "type": "aggregate",
        "groupby": ["part", by],
        "fields": ["number", "number"],
        "ops": ["sum", "count"],
        "as": ["number", "count"],
    }
    return {"name": name, "source": "numbers", "transform": [*steps(chosen), aggregate]}


def _with_values(rows: pd.DataFrame) -> set[str]:
    """The columns in which some row has a value."""
    return {column for column in rows if rows[column].notna().any()}


def _amounts(rows: pd.DataFrame, lists: Sequence[str]) -> list[str]:
    """The amounts of dimensions that a view can show of a model, in the order of ``AMOUNTS``."""
    columns = [column for column in lists if rows[column].notna().any()]
    amounts = {column.partition("_")[0] for column in columns}
    scores = [column for column in columns if column.startswith("score_")]
    # From keys of another type to ordinary ones.
    if "score_other" in scores and len(scores) > 1:
        amounts.add("gap")
    return [amount for amount in AMOUNTS if amount in amounts]


def _of_dimension(heads: str) -> list[tuple[str, ...]]:
    """The sentences on the chosen dimension, and on those that are chosen together."""
    here = "datum.layer == layer && datum.dimension == dimension"
    row = "datum.model == model && datum.layer == layer && datum.head == heads"
    head = "(heads ? 'head ' + heads : 'mean over heads')"
    name = f"model + ', layer ' + layer + ', ' + {head} + ', dimension ' + dimension"
    score = f"{here} && {heads} && datum.part == 'score'"
    counted = f"{WORDS} + ' (' + datum.count + ' of them)'"
    together = "Together, of those in the list: "
    share = f"{AMOUNTS['share']}: "
    return [
        ("rows", row, name),
        ("numbers", score, TYPED, "Cⱼ of a key: ", "It is not in the list"),
        ("numbers", f"{here} && datum.part == 'mean'", TYPED, "Mean value: "),
        ("numbers", f"{here} && datum.part == 'share'", WORDS, share),
        ("chosen", "datum.part == 'score'", "datum.dimension + ''", together),
        ("sums", "datum.part == 'score'", TYPED, "Sum of their Cⱼ of a key: "),
        ("sums", "datum.part == 'share'", counted, share),
    ]


# --- Data -----------------------------------------------------------------------------------------


def rows_of(measured: Measured) -> pd.DataFrame:
    """All that the views show: one row per head, and one per attention layer, whose head is 0.

    Columns that begin with ``score``, ``mean`` or ``share``, and ``dimensions``, are lists with
    blanks between, of the same dimensions: in the row of a head, of those with its largest
    contributions; in that of a layer, of those that stand out in some layer of the model. Rows that
    are too many for a page (``ROOM``) lose the last dimensions of each head, all but one, and then
    the intervals.

    Raises:
        AnalysisError: there are no tables, or they have nothing by head.
    """
    if not measured:
        raise AnalysisError(
            "nothing was measured: give tables, or tables by the title of their model"
        )
    measured = getattr(measured, "trained", None) or measured
    if isinstance(next(iter(measured.values())), pd.DataFrame):
        run = getattr(measured, "run", {})
        title = getattr(measured, "title", None) or run.get("model", "model")
        measured = {title: measured}
    models = []
    for title, tables in measured.items():
        heads = [*_scalars(tables)]
        layers = []
        if "score_contributions" in tables:
            heads.append(_of_heads(tables))
            layers.append(_of_layers(tables))
        if heads:
            of_heads = pd.concat(heads, axis=1).sort_index()
            frame = pd.concat([of_heads, *layers]).reset_index()
            models.append(frame.assign(model=title).astype(dict.fromkeys(KEY, int)))
    if not models:
        raise AnalysisError(
            f"nothing by head was measured of {', '.join(measured)}: measure anisotropy, ..."
        )
    rows = pd.concat(models, ignore_index=True)
    numbers = [f"{column}{end}" for column in COLUMNS for end in ENDS.values()]
    order = ["model", *KEY, "dimensions", *numbers]
    return _cut_to_room(rows[[column for column in order if column in rows]])


def _cut_to_room(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the last dimensions of each head, and then without intervals, if need be."""
    lists = [column for column in rows if column.startswith(("dimensions", "score_"))]
    for _ in range(1, LISTED):
        if len(as_csv(rows)) <= ROOM:
            return rows
        rows = rows.copy()
        for column in lists:
            shorter = rows[column].str.rpartition(" ")[0]
            rows[column] = shorter.where(rows["head"] > 0, rows[column])
    if len(as_csv(rows)) <= ROOM:
        return rows
    return rows.drop(columns=rows.filter(regex="_(low|high)$"))


def _by(
    rows: pd.DataFrame, index: list[str], column: str, value: str, prefix: str = ""
) -> pd.DataFrame:
    """A number for each kind in a column, with its interval: columns as in COLUMNS, with ENDS."""
    wide = rows.rename(columns={value: ""}).astype({column: str})
    values = [end for end in ENDS if end in wide]
    wide = wide.pivot(index=index, columns=column, values=values)
    return wide.set_axis([f"{prefix}{kind}{ENDS[end]}" for end, kind in wide], axis=1)


def _scalars(tables: Tables) -> Iterable[pd.DataFrame]:
    """One number per head, with its interval: cosines, entropy, and weights of keys by type."""
    for table, column, value, prefix in (
        ("anisotropy", "space", "cosine", ""),
        ("attention_entropy", "table", "entropy_normalised", ""),
        ("attention_by_token_type", "key_type", "weight", "weight_"),
    ):
        if table in tables:
            rows = tables[table].dropna(subset=["head"]).assign(table="entropy")
            yield _by(rows, KEY, column, value, prefix)


def _scores(tables: Tables, index: list[str]) -> pd.DataFrame:
    """C_j by type of key, one column each."""
    rows = tables["score_contributions"].query("key_type != 'all'").astype({"key_type": str})
    return rows.pivot_table("contribution", index, "key_type", observed=True).add_prefix("score_")


def _lists(values: pd.DataFrame, index: list[str]) -> pd.DataFrame:
    """The rows of all dimensions as one row of lists."""
    dimensions = values.index.get_level_values("dimension").astype(str)
    texts = values.map(short).assign(dimensions=dimensions)
    return texts.groupby(level=index).agg(" ".join)


def _of_heads(tables: Tables) -> pd.DataFrame:
    scores = _scores(tables, [*KEY, "dimension"])
    largest = scores.abs().max(axis=1).groupby(level=KEY).nlargest(LISTED)
    return _lists(scores.loc[largest.droplevel([0, 1]).index], KEY)


def _of_layers(tables: Tables) -> pd.DataFrame:
    index = ["layer", "dimension"]
    scores = _scores(tables, index)
    read = []
    if "dimension_means" in tables:
        means = tables["dimension_means"].query("token_type != 'all'").astype({"token_type": str})
        by_type = means.pivot(index=index, columns="token_type", values="mean")
        read.append(by_type.add_prefix("mean_"))
    if "cosine_by_dimension" in tables:
        parts = tables["cosine_by_dimension"].query("space == 'hidden'").set_index(index)["cosine"]
        read.append((parts / parts.groupby("layer").transform("sum")).rename("share"))
    values = scores
    for hidden in read:
        # Attention reads the hidden layer before.
        values = values.join(hidden.rename(index=lambda layer: layer + 1, level="layer"))
    # Those that come near the largest of some layer; first those that tell keys apart in most
    # layers.
    apart = scores.sub(scores["score_other"], axis=0) if "score_other" in scores else scores
    largest = _beside_largest(values).groupby("dimension").max().nlargest(LISTED).index
    ranks = _beside_largest(apart).groupby("dimension").mean()[largest]
    order = ranks.sort_values(ascending=False).index
    kept = values.unstack("layer").loc[order].stack("layer", future_stack=True)
    return _lists(kept, ["layer"]).assign(head=0).set_index("head", append=True)


def _beside_largest(values: pd.DataFrame) -> pd.Series:
    """The largest size of each dimension of a layer, over the largest of that layer."""
    sizes = values.abs()
    return (sizes / sizes.groupby("layer").transform("max")).max(axis=1)


def _effects(effects: pd.DataFrame) -> pd.DataFrame:
    """One row for all dimensions with the same numbers, which are rounded to hundredths."""
    index = ["dimension", "model", "layer", "arm"]
    wide = _by(effects, index, "key_type", "effect", "effect_").round(2).reset_index()
    alike = wide.groupby([*wide.columns[1:]], sort=False, dropna=False)["dimension"]
    lists = alike.agg(lambda dimensions: " ".join(map(str, dimensions)))
    return lists.rename("dimensions").reset_index()


def _limits(rows: pd.DataFrame, head: str, least: int) -> dict[str, list[int]]:
    """The least and the largest number of the fields of a model, and the first dimension listed."""
    lists = rows.get("dimensions", pd.Series(dtype=str))[rows["head"] == 0]
    first = int(lists.iloc[0].split()[0]) if len(lists) else 0
    return {
        "layer": [int(rows["layer"].min()), int(rows["layer"].max())],
        head: [least, int(rows["head"].max())],
        "dimension": [0, 99999, first],
    }


def _data(
    rows: pd.DataFrame,
    columns: Iterable[str],
    of_rows: str,
    of_dimensions: str,
    effects: pd.DataFrame | None = None,
) -> list[dict]:
    """Vega's data sets of columns of the chosen model, the last of them ``numbers``, one in a row.

    Each has model, layer, head, quantity (its column), number, low, high, dimension, part (the
    beginning of its column) and type (of token). The filters, of rows and of what stands in their
    lists, keep it quick.
    """

    def folded(columns: Iterable[str]) -> dict:
        return {"type": "fold", "fields": [*columns], "as": ["quantity", "number"]}

    columns = [c for c in columns if c in rows]
    lists = [c for c in columns if c.partition("_")[0] in AMOUNTS]
    chosen = steps(f"datum.model == model && {of_rows}")
    ends = steps(low="datum[datum.quantity + '_low']", high="datum[datum.quantity + '_high']")
    made = {}
    scalars = [c for c in columns if c not in lists]
    if scalars:
        made["of_heads"] = "rows", [*chosen, folded(scalars), *ends]
    if lists:
        names = ["dimensions", *lists]
        numbers = ["dimension", *lists]
        # With that of other tokens, the rest beyond it.
        gaps = {}
        if "score_other" in lists:
            scores = [c for c in lists if c.startswith("score") and c != "score_other"]
            gaps = {c.replace("score", "gap"): c for c in scores}
        split = {column: f"split(datum.{column} || '', ' ')" for column in names}
        as_numbers = {column: f"toNumber(datum.{column})" for column in numbers}
        flat = [
            *chosen,
            {"type": "project", "fields": ["model", *KEY, *names]},
            *steps(**split),
            {"type": "flatten", "fields": names, "as": numbers},
            *steps(**as_numbers),
            *steps(of_dimensions),
        ]
        for gap, score in gaps.items():
            beyond = f"isValid(datum.{score}) ? datum.{score} - datum.score_other : null"
            flat += steps(**{gap: beyond})
        made["of_dimensions"] = "rows", [*flat, folded([*lists, *gaps])]
    if effects is not None:
        here = (
            "datum.model == model && datum.layer == layer",
            "indexof(split(datum.dimensions, ' '), dimension + '') >= 0",
        )
        changes = [f"effect_{kind}" for kind in TYPES if f"effect_{kind}" in effects]
        made["of_effects"] = "effects", [*steps(*here), folded(changes), *ends]
    kind = f"{TYPE_NAMES}[split(datum.quantity, '_')[1] || 'all']"
    every = steps("isValid(datum.number)", part="split(datum.quantity, '_')[0]", type=kind)
    data = []
    for name, (source, transform) in made.items():
        data.append({"name": name, "source": source, "transform": transform})
    return [*data, {"name": "numbers", "source": [*made], "transform": every}]


# --- Panels ---------------------------------------------------------------------------------------


def _chart(data: str, chosen: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(data)).transform_filter(chosen)


def _titled(
    title: str,
    height: object,
    description: str,
    *layers: alt.Chart,
) -> alt.LayerChart:
    return alt.layer(*layers).properties(
        title=alt.Title(alt.expr(title)), height=height, description=description
    )


def _heat_map(chosen: str) -> alt.LayerChart:
    """The chosen number of every head: the deeper a cell, the larger."""
    scale = alt.Scale(padding=0.15)
    x = alt.X("head:O", axis=alt.Axis(labelAngle=0), scale=scale)
    y = alt.Y("layer:O", title="attention layer", scale=scale)
    look = {
        "symbolType": "square",
        "symbolSize": 200,
        "symbolFillColor": COLOURS[0],
        "symbolStrokeWidth": 0,
    }
    legend = alt.Legend(title="orange: below zero", titleOrient="left", tickCount=3, **look)
    outlines = _chart("rows", "datum.model == model && datum.head > 0").mark_rect(
        fillOpacity=0, stroke=INK
    )
    cells = _chart("numbers", f"datum.head > 0 && {chosen}").transform_calculate(
        size="abs(datum.number)", words=WORDS
    )
    sizes = alt.Scale(range=[0, 1], zero=True)
    cells = cells.mark_rect(opacity=1).encode(
        color=alt.condition("datum.number < 0", alt.value(COLOURS[1]), alt.value(COLOURS[0])),
        opacity=alt.Opacity("size:Q", scale=sizes, legend=legend),
        tooltip=["layer:Q", "head:Q", alt.Tooltip("words:N", title="value")],
    )
    width = alt.condition(HERE, alt.value(5), alt.value(1))
    layers = (outlines.encode(x, y, strokeWidth=width), cells.encode(x, y))
    description = "A number of heads by attention layer"
    return _titled(f"{QUANTITIES}[quantity]", {"step": 18}, description, *layers)


def _first_heads(chosen: str) -> alt.LayerChart:
    """The heads with the most of the chosen number, or the least: a list, a row for each."""
    base = _chart("numbers", f"datum.head > 0 && {chosen}")
    base = base.transform_calculate(
        name="'layer ' + datum.layer + ', head ' + datum.head",
        rank="first == 'largest' ? -datum.number : datum.number",
    )
    base = base.transform_window(place="row_number()", sort=[alt.SortField("rank")])
    base = base.transform_filter(f"datum.place <= {LISTED}")
    base = base.encode(alt.Y("name:N", title=None, sort=alt.EncodingSortField("place", op="min")))
    width = alt.condition(HERE, alt.value(2), alt.value(0))
    bars = base.mark_bar(color=COLOURS[0], stroke=INK, height=12).encode(
        alt.X("number:Q", title=None, axis=alt.Axis(tickCount=5)),
        strokeWidth=width,
        tooltip=["layer:Q", "head:Q", alt.Tooltip("number:Q", format=".3~r")],
    )
    title = "(first == 'largest' ? 'Largest: ' : 'Least: ') + 'heads of ' + model"
    return _titled(title, {"step": 18}, "Heads in the order of a number", bars)


def _by_type(
    chosen: str,
    title: str,
    number: str,
    digits: str = "",
    arms: Sequence[str] = (),
) -> alt.LayerChart:
    """A bar with its interval for each type of key, and for each arm."""
    base = _chart("numbers", chosen).transform_calculate(done=f"{ARMS}[datum.arm] || '{DONE[0]}'")
    y = alt.Y("type:N", title=None, sort=[*TYPE_NAMES.values()])
    base = base.encode(y, alt.YOffset("done:N", sort=DONE))
    scale = alt.Scale(domain=DONE, range=[COLOURS[0], COLOURS[4]])
    legend = alt.Legend(title=None, columns=1, labelLimit=0) if arms else None
    bars = base.mark_bar(height=10).encode(
        alt.X("number:Q", title=number, axis=alt.Axis(tickCount=5, format=digits)),
        alt.Color("done:N", scale=scale, legend=legend),
        tooltip=["type:N", "number:Q"],
    )
    rules = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    step = 14 if arms else 24
    return _titled(title, {"step": step}, f"Type of key: {number}", bars, rules)


def _points(
    base: alt.Chart,
    at: str,
    columns: list[str],
    number: alt.X | alt.Y,
    lines: int = 0,
    among: str = "false",
) -> list[alt.Chart]:
    """Markers for each type of token in the columns, and outlines around what is chosen.

    Args:
        at: the field of the chosen dimension or layer.
        among: the condition of others that have an outline, too.
    """
    kinds = {column.partition("_")[2] or "all" for column in columns}
    values = [name for kind, name in TYPE_NAMES.items() if kind in kinds]
    legend = alt.Legend(title=None, columns=3, values=values)
    domain = [*TYPE_NAMES.values()]
    colours, shapes = (alt.Scale(domain=domain, range=look) for look in LOOKS)
    color = alt.Color("type:N", scale=colours, legend=legend)
    shape = alt.Shape("type:N", scale=shapes, legend=legend)
    points = base.mark_point(filled=True, size=70, opacity=1, tooltip={"content": "encoding"})
    width = alt.when(f"datum.{at} == {at}").then(alt.value(1.5))
    width = width.when(among).then(alt.value(0.75))
    outline = base.mark_rect(fillOpacity=0, stroke=INK).encode(
        strokeWidth=width.otherwise(alt.value(0))
    )
    return [
        outline,
        *[base.mark_line().encode(number, color)] * lines,
        points.encode(number, color, shape),
    ]


def _by_dimension(
    chosen: str, columns: list[str], title: str, rank: str, among: str = "false"
) -> alt.LayerChart:
    """A row for each dimension."""
    base = _chart("numbers", chosen).transform_calculate(size="abs(datum.number)")
    base = base.transform_joinaggregate(most="max(size)", groupby=["dimension"])
    base = base.transform_calculate(rank=rank)
    base = base.encode(alt.Y("dimension:O", sort=alt.EncodingSortField("rank", op="min")))
    axis = alt.Axis(tickCount=5)
    number = alt.X("number:Q", title=None, scale=alt.Scale(padding=8), axis=axis)
    layers = _points(base, "dimension", columns, number, among=among)
    return _titled(title, {"step": 18}, "Dimensions of a layer", *layers)


def _by_layer(chosen: str, columns: list[str]) -> alt.LayerChart:
    """One dimension through the layers, whose markers are joined."""
    axis = alt.Axis(labelAngle=0, labelOverlap=True)
    base = _chart("numbers", chosen).encode(alt.X("layer:O", title="attention layer", axis=axis))
    number = alt.Y("number:Q", title=None, scale=alt.Scale(zero=True, padding=8))
    layers = _points(base, "layer", columns, number, lines=1)
    return _titled("'Dimension ' + dimension + ' by layer'", 220, "One dimension by layer", *layers)
