"""What a measurement says, in the numbers that other programs ask for: ``geometry_of(tables)``, as
in geometry.json.

The file is described by ``data/geometry.schema.json``; ``VERSION`` counts changes that readers have
to know of.
"""

import math
from collections.abc import Mapping

import pandas as pd

from analysis_lib import files
from analysis_lib.errors import AnalysisError, shown
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.measurement.tables import Tables, TableSet, grouped
from analysis_lib.metrics.attention import SINK
from analysis_lib.metrics.intervals import Estimate

VERSION = 2
# What is measured for it, in one pass; what cannot be had of a model is left out.
METRICS = (
    *("anisotropy", "mean_vector", "utterance_similarity", "qk_alignment", "attention_entropy"),
    *("attention_by_token_type", "dimension_means", "outlier_dimensions", "score_contributions"),
    *("attention_received", "token_norms", "spike_dimensions"),
)
# The headline numbers, each a mean over heads: the table and column, what else has a row, and the
# range.
QUANTITIES = {
    "anisotropy": ("anisotropy", "cosine", "space", (-1, 1)),
    "drift": ("mean_vector", "norm_of_mean / mean_norm", "space", (0, 1)),
    "norm_of_mean": ("mean_vector", "norm_of_mean", "space", (0, math.inf)),
    "mean_norm": ("mean_vector", "mean_norm", "space", (0, math.inf)),
    "similarity": ("utterance_similarity", "similarity", "space", (-1, 1)),
    "alignment": ("qk_alignment", "cosine", None, (-1, 1)),
    "entropy": ("attention_entropy", "entropy_normalised", None, (0, 1)),
    "attention_mass": ("attention_by_token_type", "mass", "key_type", (0, 1)),
    "attention_weight": ("attention_by_token_type", "weight", "key_type", (0, 1)),
    "attention_received": ("attention_received", "received", "key_type", (0, 1)),
}
PLACES = ["quantity", "of", "layer"]
# By which models are told apart: the headline number, what it is of, and whether its largest or
# smallest layer counts.
EXTREMES = {
    "anisotropy": ("hidden", "largest"),
    "similarity": ("hidden", "largest"),
    "drift": ("hidden", "largest"),
    "entropy": ("", "smallest"),
}


def numbers(tables: TableSet) -> pd.Series:
    """The headline numbers of a measurement, by quantity, what it is of (a space, a type of key, or
    "") and layer.
    """
    found = {}
    for quantity, (name, column, by, _) in QUANTITIES.items():
        if name in tables:
            table = tables[name]
            table = table[table["position"].isna()] if "position" in table else table
            of = table[by].astype(str) if by else pd.Series("", table.index)
            means = table.eval(column).groupby([of.rename("of"), table["layer"]], sort=False).mean()
            found[quantity] = means
    return pd.concat(found, names=PLACES) if found else pd.Series(dtype=float)


def _require_tables(given: object, wanted: type) -> None:
    if not isinstance(given, wanted):
        source = "compare" if wanted is Comparison else "measure"
        raise AnalysisError(f"the tables are {shown(given)}: give what {source} returns")


def headlines(tables: Tables | Comparison) -> pd.DataFrame:
    """The headline numbers with their 95 % intervals: columns quantity, of, layer, value, ci_low
    and ci_high.

    Of a comparison, those of its models, without twins, with the column model in front.
    """
    if not isinstance(tables, Comparison):
        _require_tables(tables, Tables)
    if isinstance(tables, Comparison):
        return grouped(
            {called: headlines(found) for called, found in tables.trained.items()}, "model"
        )
    index = numbers(tables).index
    found = tables.interval(lambda t: numbers(t).reindex(index)) if len(index) else []
    ranges = (
        [QUANTITIES[quantity][3] for quantity in index.get_level_values("quantity")]
        if len(index)
        else []
    )
    return _as_rows(
        index, [one.within(*least) for one, least in zip(found, ranges, strict=True)], "value"
    )


def headline_differences(comparison: Comparison) -> pd.DataFrame:
    """What each later model has more than the first, of the numbers that both have, with intervals
    paired over texts.

    Columns model, compared_with, quantity, of, layer, difference, ci_low and ci_high.

    Raises:
        AnalysisError: they are of different texts.
    """
    _require_tables(comparison, Comparison)
    (base, first), *others = comparison.trained.items()
    rows = [
        _differences(first, other).assign(model=called, compared_with=base)
        for called, other in others
    ]
    columns = ["model", "compared_with", *PLACES, "difference", "ci_low", "ci_high"]
    return pd.concat(rows, ignore_index=True)[columns] if rows else pd.DataFrame(columns=columns)


def _differences(first: Tables, other: Tables) -> pd.DataFrame:
    index = numbers(first).index.intersection(numbers(other).index, sort=False)
    if not len(index):
        return _as_rows(index, [], "difference")
    found = first.interval(
        lambda a, b: numbers(b).reindex(index) - numbers(a).reindex(index), other
    )
    return _as_rows(index, found, "difference")


def _as_rows(
    index: pd.Index,
    found: list[Estimate],
    name: str,
) -> pd.DataFrame:
    rows = pd.DataFrame(
        [one.row for one in found], columns=[name, "ci_low", "ci_high"], dtype=float
    )
    places = pd.DataFrame([*index], columns=PLACES)
    return pd.concat([places, rows], axis=1)


def as_table(found: Mapping) -> pd.DataFrame:
    """The headline numbers of a model of ``geometry.json`` as :func:`headlines` gives them."""
    rows = []
    for layer in found["layers"]:
        for quantity in (name for name in QUANTITIES if name in layer):
            values = layer[quantity] if QUANTITIES[quantity][2] else {"": layer[quantity]}
            rows += [
                {"quantity": quantity, "of": of, "layer": layer["layer"]} | row
                for of, row in values.items()
            ]
    return pd.DataFrame(rows)


def references(*tables: Tables) -> pd.DataFrame:
    """The headline numbers of the reference models that read what these measurements are of, but
    for their own models.

    Columns model, and those of :func:`headlines`. ``data/README.md`` says on what they were
    measured, and how.
    """
    for measured in tables:
        _require_tables(measured, Tables)
    kinds, ours = {t.run["kind"] for t in tables}, {t.run["model_revision"] for t in tables}
    found = pd.read_csv(files.data_directory() / "reference_models.csv", keep_default_na=False)
    found = found[found["kind"].isin(kinds) & ~found["revision"].isin(ours)].drop(
        columns=["kind", "revision"]
    )
    numbers = ["value", "ci_low", "ci_high"]
    return found.assign(**{name: pd.to_numeric(found[name]) for name in numbers}).reset_index(
        drop=True
    )


def beside_references(rows: pd.DataFrame, others: pd.DataFrame) -> list[dict]:
    """Where a model stands among reference models, by its most extreme layer: see ``EXTREMES``.

    ``side`` is ``above`` or ``below`` where its 95 % interval lies beyond those of all reference
    models, else ``within``.

    Args:
        rows: of the model, as of :func:`headlines`.
        others: of the reference models, as of :func:`references`.
    """
    found = []
    for quantity, (of, end) in EXTREMES.items():
        mine = _extreme(rows, quantity, of, end)
        theirs = {
            name: _extreme(part, quantity, of, end)
            for name, part in others.groupby("model", sort=False)
        }
        theirs = pd.DataFrame({name: row for name, row in theirs.items() if row is not None}).T
        if mine is None or theirs.empty:
            continue
        highest, lowest = theirs["ci_high"].max(), theirs["ci_low"].min()
        side = (
            "above"
            if mine["ci_low"] > highest
            else "below"
            if mine["ci_high"] < lowest
            else "within"
        )
        number = {name: _or_none(mine[name]) for name in ("value", "ci_low", "ci_high")}
        ends = {
            "reference_low": float(theirs["value"].min()),
            "reference_high": float(theirs["value"].max()),
        }
        place = {"quantity": quantity, "of": of, "layer": int(mine["layer"])}
        found.append(place | number | ends | {"references": [*theirs.index], "side": side})
    return found


def _extreme(
    rows: pd.DataFrame,
    quantity: str,
    of: str,
    end: str,
) -> pd.Series | None:
    """The row of the layer with the largest or smallest number; None where there is none with an
    interval.
    """
    part = rows[(rows["quantity"] == quantity) & (rows["of"] == of)].dropna(
        subset=["value", "ci_low", "ci_high"]
    )
    if part.empty:
        return None
    return part.loc[part["value"].idxmax() if end == "largest" else part["value"].idxmin()]


def geometry_of(tables: Tables, about: Mapping[str, object] | None = None) -> dict:
    """One model of ``geometry.json``: what was measured, the headline numbers by layer, sinks and
    spikes.

    Args:
        tables: with what there is of ``METRICS``.
        about: what else is known of the model, such as its architecture.
    """
    _require_tables(tables, Tables)
    if not len(tables):
        raise AnalysisError(
            "nothing was measured: give a model and texts that some metric can be had of"
        )
    run, rows = tables.run, headlines(tables)
    keys = (
        "model_revision",
        "model_files",
        "dtype",
        "data",
        "data_sha256",
        "kind",
        "texts",
        "settings",
        "versions",
    )
    layers = []
    for layer in tables.layers.to_dict("records"):
        here = {
            name: None if pd.isna(layer[name]) else layer[name]
            for name in ("stack", "width", "heads")
        }
        entry = {"layer": int(layer["layer"]), **here}
        for quantity, of_quantity in rows[rows["layer"] == layer["layer"]].groupby(
            "quantity", sort=False
        ):
            values = {row.of: _number(row) for row in of_quantity.itertuples()}
            entry[quantity] = values.get("", values)
        layers.append(entry)
    return {
        "name": run["model"],
        "title": tables.title,
        **(about or {}),
        **{key: run[key] for key in keys},
        "tokens": run["report"]["tokens"],
        "left_out": run.get("left_out", {}),
        "notes": run["notes"],
        "beside_references": beside_references(rows, references(tables)),
        "layers": layers,
        "outlier_dimensions": _records(tables.get("outlier_dimensions")),
        "sinks": _sinks(tables),
        "spikes": _spikes(tables),
    }


def _sinks(tables: TableSet) -> dict | None:
    """Which keys draw attention; None where a model has no attention."""
    if "attention_received" not in tables:
        return None
    table = tables["attention_received"]
    shares = []
    for place, rows in table.groupby(
        ["position", "key_type"], dropna=False, observed=True, sort=False
    ):
        position, key_type = place
        where = {"position": None if pd.isna(position) else int(position), "key_type": key_type}
        above = {
            "share_of_heads": float((rows["received"] > SINK).mean()),
            "sink_rate": float(rows["sink_rate"].mean()),
        }
        shares.append({**where, **above, "received": float(rows["received"].mean())})
    return {"threshold": SINK, "all_heads": shares, "heads": _records(table)}


def _spikes(tables: TableSet) -> list[dict] | None:
    """Of each layer, which tokens have long vectors, and in which dimensions; None where no metric
    said so.
    """
    if "token_norms" not in tables:
        return None
    found = []
    for layer, rows in tables["token_norms"].groupby("layer", sort=False):
        every = rows[rows["position"].isna() & (rows["token_type"] == "all")].iloc[0]
        dimensions = tables["spike_dimensions"].query("layer == @layer").drop(columns="layer")
        median = float(every["median"])
        where = rows[["position", "token_type", "spikes", "tokens"]].drop(index=every.name)
        found.append(
            {
                "layer": int(layer),
                "median_norm": median,
                "largest_norm": float(every["largest"]),
                "ratio": float(every["largest"]) / median,
                "multiple": None if pd.isna(every["multiple"]) else float(every["multiple"]),
                "spikes": int(every["spikes"]),
                "tokens": int(every["tokens"]),
                "where": _records(where[where["spikes"] > 0]),
                "dimensions": _records(dimensions),
            }
        )
    return found


def _number(row: object) -> dict:
    return {name: _or_none(getattr(row, name)) for name in ("value", "ci_low", "ci_high")}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _records(table: pd.DataFrame | None) -> list[dict]:
    """The rows of a table, as JSON has them: no NaN."""
    rows = [] if table is None else table.astype(object).to_dict("records")
    return [
        {name: None if pd.isna(value) else _plain(value) for name, value in row.items()}
        for row in rows
    ]


def _plain(value: object) -> object:
    return value.item() if hasattr(value, "item") else value
