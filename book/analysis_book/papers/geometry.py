"""A measurement in the numbers of geometry.json, for other programs: ``geometry_of(tables)``.

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
    "anisotropy",
    "mean_vector",
    "utterance_similarity",
    "qk_alignment",
    "attention_entropy",
    "attention_by_token_type",
    "dimension_means",
    "outlier_dimensions",
    "score_contributions",
    "attention_received",
    "token_norms",
    "spike_dimensions",
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
KEYS = ["quantity", "of", "layer"]
NUMBERS = ["value", "ci_low", "ci_high"]
# What says how a model was measured.
RUN = (
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
# By which models are told apart: the headline number, what it is of, and whether its largest or
# smallest layer counts.
EXTREMES = {
    "anisotropy": ("hidden", "largest"),
    "similarity": ("hidden", "largest"),
    "drift": ("hidden", "largest"),
    "entropy": ("", "smallest"),
}


def numbers(tables: TableSet) -> pd.Series:
    """The headline numbers of a measurement, by quantity, of what, and layer.

    Of what: a space, a type of key, or "".
    """
    means = {}
    for quantity, (name, column, by, _) in QUANTITIES.items():
        if name not in tables:
            continue
        table = tables[name]
        if "position" in table:
            table = table[table["position"].isna()]
        of = table[by].astype(str) if by else pd.Series("", table.index)
        groups = [of.rename("of"), table["layer"]]
        means[quantity] = table.eval(column).groupby(groups, sort=False).mean()
    if not means:
        return pd.Series(dtype=float)
    return pd.concat(means, names=KEYS)


def _require_tables(given: object, wanted: type) -> None:
    if not isinstance(given, wanted):
        source = "compare" if wanted is Comparison else "measure"
        raise AnalysisError(f"the tables are {shown(given)}: give what {source} returns")


def headlines(tables: Tables | Comparison) -> pd.DataFrame:
    """The headline numbers with their 95 % intervals.

    Columns quantity, of, layer, value, ci_low and ci_high. Of a comparison, those of its models,
    without twins, with the column model in front.
    """
    if isinstance(tables, Comparison):
        by_title = {title: headlines(of_model) for title, of_model in tables.trained.items()}
        return grouped(by_title, "model")
    _require_tables(tables, Tables)
    index = numbers(tables).index
    if index.empty:
        return _as_rows(index, [], "value")
    estimates = []
    every = tables.interval(lambda part: numbers(part).reindex(index))
    for quantity, estimate in zip(index.get_level_values("quantity"), every, strict=True):
        *_, limits = QUANTITIES[quantity]
        estimates.append(estimate.within(*limits))
    return _as_rows(index, estimates, "value")


def headline_differences(comparison: Comparison) -> pd.DataFrame:
    """By how much each later model exceeds the first, with intervals paired over texts.

    Of the numbers that both have. Columns model, compared_with, quantity, of, layer, difference,
    ci_low and ci_high.

    Raises:
        AnalysisError: they are of different texts.
    """
    _require_tables(comparison, Comparison)
    (base, first), *others = comparison.trained.items()
    columns = ["model", "compared_with", *KEYS, "difference", "ci_low", "ci_high"]
    parts = []
    for title, other in others:
        differences = _differences(first, other)
        parts.append(differences.assign(model=title, compared_with=base))
    if not parts:
        return pd.DataFrame(columns=columns)
    return pd.concat(parts, ignore_index=True)[columns]


def _differences(first: Tables, other: Tables) -> pd.DataFrame:
    index = numbers(first).index
    index = index.intersection(numbers(other).index, sort=False)
    if index.empty:
        return _as_rows(index, [], "difference")

    def difference(before: TableSet, after: TableSet) -> pd.Series:
        return numbers(after).reindex(index) - numbers(before).reindex(index)

    estimates = first.interval(difference, other)
    return _as_rows(index, estimates, "difference")


def _as_rows(
    index: pd.Index,
    estimates: list[Estimate],
    name: str,
) -> pd.DataFrame:
    values = [estimate.row for estimate in estimates]
    rows = pd.DataFrame(values, columns=[name, "ci_low", "ci_high"], dtype=float)
    keys = pd.DataFrame([*index], columns=KEYS)
    return pd.concat([keys, rows], axis=1)


def as_table(model: Mapping) -> pd.DataFrame:
    """The headline numbers of a model of ``geometry.json`` as :func:`headlines` gives them."""
    rows = []
    for layer in model["layers"]:
        for quantity, (_, _, by, _) in QUANTITIES.items():
            if quantity not in layer:
                continue
            values = layer[quantity] if by else {"": layer[quantity]}
            for of, row in values.items():
                keys = {"quantity": quantity, "of": of, "layer": layer["layer"]}
                rows.append(keys | row)
    return pd.DataFrame(rows)


def references(*tables: Tables) -> pd.DataFrame:
    """The headline numbers of the reference models, but for those that were measured here.

    Of models that read what these measurements are of. Columns model, and those of
    :func:`headlines`. ``data/README.md`` says on what they were measured, and how.
    """
    for measured in tables:
        _require_tables(measured, Tables)
    kinds = {measured.run["kind"] for measured in tables}
    revisions = {measured.run["model_revision"] for measured in tables}
    rows = pd.read_csv(files.data_directory() / "reference_models.csv", keep_default_na=False)
    same_kind = rows["kind"].isin(kinds)
    measured_here = rows["revision"].isin(revisions)
    rows = rows[same_kind & ~measured_here]
    rows = rows.drop(columns=["kind", "revision"])
    for name in NUMBERS:
        rows[name] = pd.to_numeric(rows[name])
    return rows.reset_index(drop=True)


def beside_references(rows: pd.DataFrame, others: pd.DataFrame) -> list[dict]:
    """Where a model stands among reference models, by its most extreme layer: see ``EXTREMES``.

    ``side`` is ``above`` or ``below`` where its 95 % interval lies beyond those of all reference
    models, else ``within``.

    Args:
        rows: of the model, as of :func:`headlines`.
        others: of the reference models, as of :func:`references`.
    """
    comparisons = []
    for quantity, (of, end) in EXTREMES.items():
        mine = _extreme(rows, quantity, of, end)
        theirs = {}
        for name, part in others.groupby("model", sort=False):
            row = _extreme(part, quantity, of, end)
            if row is not None:
                theirs[name] = row
        if mine is None or not theirs:
            continue
        reference = pd.DataFrame(theirs).T
        side = "within"
        if mine["ci_low"] > reference["ci_high"].max():
            side = "above"
        elif mine["ci_high"] < reference["ci_low"].min():
            side = "below"
        comparison = {
            "quantity": quantity,
            "of": of,
            "layer": int(mine["layer"]),
            **{name: _or_none(mine[name]) for name in NUMBERS},
            "reference_low": float(reference["value"].min()),
            "reference_high": float(reference["value"].max()),
            "references": [*theirs],
            "side": side,
        }
        comparisons.append(comparison)
    return comparisons


def _extreme(
    rows: pd.DataFrame,
    quantity: str,
    of: str,
    end: str,
) -> pd.Series | None:
    """The row of the layer with the largest or smallest number; None without an interval."""
    chosen = (rows["quantity"] == quantity) & (rows["of"] == of)
    part = rows[chosen].dropna(subset=NUMBERS)
    if part.empty:
        return None
    values = part["value"]
    index = values.idxmax() if end == "largest" else values.idxmin()
    return part.loc[index]


def geometry_of(tables: Tables, about: Mapping[str, object] | None = None) -> dict:
    """One model of ``geometry.json``: the run, the headline numbers by layer, sinks and spikes.

    Args:
        tables: with what there is of ``METRICS``.
        about: what else is known of the model, such as its architecture.
    """
    _require_tables(tables, Tables)
    if not len(tables):
        raise AnalysisError(
            "nothing was measured: give a model and texts that some metric can be had of"
        )
    run = tables.run
    rows = headlines(tables)
    layers = []
    for layer in tables.layers.to_dict("records"):
        entry = {"layer": int(layer["layer"])}
        for name in ("stack", "width", "heads"):
            entry[name] = None if pd.isna(layer[name]) else layer[name]
        in_layer = rows[rows["layer"] == layer["layer"]]
        for quantity, of_quantity in in_layer.groupby("quantity", sort=False):
            values = {row.of: _number(row) for row in of_quantity.itertuples()}
            entry[quantity] = values.get("", values)
        layers.append(entry)
    return {
        "name": run["model"],
        "title": tables.title,
        **(about or {}),
        **{key: run[key] for key in RUN},
        # Measurements of earlier versions do not say it.
        "devices": run.get("devices", []),
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
    keys = ["position", "key_type"]
    shares = []
    for (position, key_type), rows in table.groupby(keys, dropna=False, observed=True, sort=False):
        received = rows["received"]
        share = {
            "position": None if pd.isna(position) else int(position),
            "key_type": key_type,
            "share_of_heads": float((received > SINK).mean()),
            "sink_rate": float(rows["sink_rate"].mean()),
            "received": float(received.mean()),
        }
        shares.append(share)
    return {"threshold": SINK, "all_heads": shares, "heads": _records(table)}


def _spikes(tables: TableSet) -> list[dict] | None:
    """By layer, which tokens have long vectors, in which dimensions; None where not measured."""
    if "token_norms" not in tables:
        return None
    spikes = []
    for layer, rows in tables["token_norms"].groupby("layer", sort=False):
        overall = rows["position"].isna() & (rows["token_type"] == "all")
        every = rows[overall].iloc[0]
        median = float(every["median"])
        largest = float(every["largest"])
        multiple = every["multiple"]
        where = rows[["position", "token_type", "spikes", "tokens"]].drop(index=every.name)
        dimensions = tables["spike_dimensions"].query("layer == @layer")
        entry = {
            "layer": int(layer),
            "median_norm": median,
            "largest_norm": largest,
            "ratio": largest / median,
            "multiple": None if pd.isna(multiple) else float(multiple),
            "spikes": int(every["spikes"]),
            "tokens": int(every["tokens"]),
            "where": _records(where[where["spikes"] > 0]),
            "dimensions": _records(dimensions.drop(columns="layer")),
        }
        spikes.append(entry)
    return spikes


def _number(row: object) -> dict:
    return {name: _or_none(getattr(row, name)) for name in NUMBERS}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _records(table: pd.DataFrame | None) -> list[dict]:
    """The rows of a table, as JSON has them: no NaN."""
    if table is None:
        return []
    records = []
    for row in table.astype(object).to_dict("records"):
        records.append({name: _plain(value) for name, value in row.items()})
    return records


def _plain(value: object) -> object:
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
