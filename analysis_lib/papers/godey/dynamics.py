"""A run of training, checkpoint by checkpoint: ``dynamics("bert-4")``."""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy import stats
from tqdm import tqdm

from analysis_lib import capture, corpora
from analysis_lib.corpora import Corpus, packages
from analysis_lib.measurement import shards
from analysis_lib.measurement.measuring import measure
from analysis_lib.measurement.sources import code_hash, source_hash
from analysis_lib.metrics import resolve
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import wilson
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import load_model
from analysis_lib.papers.godey.directions import singular_directions
from analysis_lib.training.loop import alone
from analysis_lib.training.pretraining import checkpoint_name
from analysis_lib.training.runs import RUNS, Checkpoint, checkpoints, losses, run_description, run_identity

METRICS = ("anisotropy", "attention_entropy", "qk_alignment", "head_means")
TABLES = (*METRICS, "losses", "vectors")
# The share of all queries and keys of which Godey et al. (2024, sec. 5) take the singular vectors.
SAMPLED = 0.2
# What lies outside of the 99 % band of independent directions is not put down to chance.
BAND = 0.99
DESCRIPTION = "dynamics.json"


class Dynamics(Mapping[str, pd.DataFrame]):
    """The tables of every checkpoint of a run: each is one DataFrame, with the columns seed and step in front.

    Beside those of ``METRICS``: ``losses`` of the training (no rows where they are not known), and ``vectors``, the
    sampled queries and keys of the heads shown, of the first seed: seed, step, layer, head, space, and a column a
    dimension, from ``0``. The same tokens are sampled at every step.

    Attributes:
        about: run, data, limit, seed and seeds; what identifies run, data and the code that measured (``sources``);
            and ``training``, how the run was trained (settings, data and versions), where that is known.
    """

    def __init__(self, tables: Mapping[str, pd.DataFrame], about: dict):
        self._tables = dict(tables)
        self.about = about

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def made_by_other_code(self) -> bool:
        """Whether the code that measures has changed since, as it may have for measurements that are shipped."""
        return self.about.get("sources") != _sources()

    @property
    def code_warning(self) -> str:
        """For a page to show: that the measurements may not be what the code gives today, or an empty text."""
        if not self.made_by_other_code:
            return ""
        return (
            f"The code that measures has changed since {self.about['run']} was measured. To measure it anew: "
            f"`python -m analysis_lib dynamics {self.about['run']} --out FOLDER`."
        )

    @property
    def seeds(self) -> list[int]:
        """The seeds of the run, in the order they were asked for."""
        return self.about["seeds"]

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted(self["qk_alignment"]["step"].unique().tolist())

    @property
    def layers(self) -> int:
        """How many attention layers there are."""
        return int(self["qk_alignment"]["layer"].max())

    @property
    def head_width(self) -> int:
        """The dimensions of a head."""
        return int(self["head_means"]["dimension"].max()) + 1

    def save(self, folder: Path) -> None:
        """Write a Parquet file a table, and ``dynamics.json``, what they are of.

        Each file is replaced whole, and ``dynamics.json`` comes last: where it lies, every table does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
            _write(self, Path(unfinished))
            text = json.dumps(self.about, indent=1) + "\n"
            (Path(unfinished) / DESCRIPTION).write_text(text, encoding="utf-8")
            (folder / DESCRIPTION).unlink(missing_ok=True)
            for name in (*(f"{table}.parquet" for table in self), DESCRIPTION):
                os.replace(Path(unfinished) / name, folder / name)

    @classmethod
    def load(cls, folder: Path) -> "Dynamics":
        """What ``save`` has written."""
        about = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return cls({name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}, about)


def dynamics(
    run: str,
    data: str = "wikipedia:sentences",
    limit: int = 128,
    seed: int = 0,
    *,
    seeds: Sequence[int] = (0,),
    progress: bool = True,
) -> Dynamics:
    """Queries, keys, attention and hidden states of a run at every checkpoint.

    Measured once and kept. A run of which only the measurements are shipped, in ``data/measurements``, is read from
    there; it is trained where they were made otherwise than is asked for here.

    Args:
        run: as :func:`analysis_lib.training.checkpoints` takes it.
        data: the corpus to measure on, as ``load_corpus`` takes it.
        limit: how many of its texts; the paper has 128.
        seed: with which to draw them, and the queries and keys that are sampled.
        seeds: of the run.
        progress: whether to show a bar, on a terminal.

    Raises:
        AnalysisError: as ``checkpoints``, ``load_corpus`` and ``measure``.
    """
    asked = {"data": data, "limit": limit, "seed": seed, "seeds": list(dict.fromkeys(seeds))}
    if (shipped := _shipped(run)) is not None:
        found = Dynamics.load(shipped)
        if all(found.about[name] == value for name, value in asked.items()):
            return found
    corpora.check_draw(limit, seed)
    about = {
        "run": run,
        **asked,
        "checkpoints": run_identity(run),
        "texts": corpora.fingerprint(data),
        "training": run_description(run),
        "sources": _sources(),
    }
    key = json.dumps(about)
    label = f"dynamics-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
    folder = packages.derived_folder(key, label)
    measured = folder.with_name(f"{folder.name}.measured")

    def fill(unfinished: Path) -> None:
        _measure(checkpoints(run, asked["seeds"]), about, measured, progress).save(unfinished)

    with alone(folder.with_name(f"{folder.name}.lock")):
        packages.derived(key, label, fill)
        shutil.rmtree(measured, ignore_errors=True)
    return Dynamics.load(folder)


def fingerprint(run: str) -> str:
    """A short text that changes when what :func:`dynamics` finds in the run would; neither trains nor measures.

    Raises:
        AnalysisError: there is no such run.
    """
    if (shipped := _shipped(run)) is None:
        return run_identity(run)
    files = b"\0".join(path.read_bytes() for path in sorted(shipped.iterdir()))
    return f"{run_identity(run)} {hashlib.sha256(files).hexdigest()[:12]}"


def _shipped(run: str) -> Path | None:
    """Where the measurements of a run lie whose weights are not shipped."""
    folder = packages.data_directory() / "measurements" / run
    return folder if run in RUNS and (folder / DESCRIPTION).is_file() else None


def _sources() -> str:
    """The hash of the code that measures: the metrics, all that they need, and this module."""
    modules = {shards.__name__, *(type(metric).__module__ for metric in resolve(METRICS))}
    return f"{source_hash(modules)[:16]} {code_hash(Path(__file__))[:16]}"


def _measure(found: list[Checkpoint], about: dict, measured: Path, progress: bool) -> Dynamics:
    """The tables of all checkpoints. Those of each are kept in ``measured``: from there an interrupted run goes on."""
    corpus = corpora.load_corpus(about["data"], about["limit"], about["seed"])
    last = [checkpoint for checkpoint in found if checkpoint.seed == about["seeds"][0]][-1]
    # The last one first: it decides which heads are shown.
    ordered = sorted(found, key=lambda checkpoint: checkpoint != last)
    bar = tqdm(ordered, f"{about['run']} on {about['data']}", unit="checkpoint", disable=None if progress else True)
    tables: dict[Checkpoint, dict[str, pd.DataFrame]] = {}
    for checkpoint in bar:
        folder = measured / checkpoint_name(checkpoint.seed, checkpoint.step)
        if not folder.is_dir():
            unfinished = folder.with_name(f"unfinished-{folder.name}")
            _write(_of_checkpoint(checkpoint, corpus, about, tables.get(last)), unfinished)
            unfinished.rename(folder)
        tables[checkpoint] = {path.stem: pd.read_parquet(path) for path in folder.glob("*.parquet")}
    joined = {"losses": losses(about["run"], about["seeds"])}
    for name in (*METRICS, "vectors"):
        joined[name] = pd.concat([tables[c][name] for c in found if name in tables[c]], ignore_index=True)
    return Dynamics(joined, about)


def _of_checkpoint(
    checkpoint: Checkpoint, corpus: Corpus, about: dict, last: Mapping[str, pd.DataFrame] | None
) -> dict[str, pd.DataFrame]:
    """The tables of a checkpoint, given those of the last one, unless it is that."""
    model = load_model(checkpoint.model)
    measured = measure(model, corpus, METRICS, progress=False)
    tables = {name: _at(checkpoint, table) for name, table in measured.items()}
    if checkpoint.seed == about["seeds"][0]:
        heads = set(heads_shown((last or tables)["qk_alignment"]).values())
        tables["vectors"] = _at(checkpoint, sample_vectors(model, corpus, heads, SAMPLED, about["seed"]))
    return tables


def _write(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        floats = table.select_dtypes("floating").columns
        table.to_parquet(
            folder / f"{name}.parquet",
            index=False,
            compression="zstd",
            # A tenth smaller: the first bytes of like numbers are alike.
            use_byte_stream_split=[*floats],
            use_dictionary=[column for column in table if column not in floats],
        )


def _at(checkpoint: Checkpoint, table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([pd.DataFrame({"seed": checkpoint.seed, "step": checkpoint.step}, table.index), table], axis=1)


def sample_vectors(
    model: LoadedModel, corpus: Corpus, heads: set[tuple[int, int]], share: float, seed: int
) -> pd.DataFrame:
    """The queries and keys of some heads at tokens drawn uniformly, without replacement.

    Args:
        heads: (layer, head), both counted from 1.
        share: of the tokens of the corpus.
        seed: with which to draw them; models with the same tokenizer give the same tokens.

    Returns:
        Columns layer, head, space (query or key), and a column a dimension, ``0``, ``1``, ..., in half precision: a
        query and a key a token.
    """
    found: dict[tuple, list[Float[torch.Tensor, "token dim"]]] = {}

    def receive(activations: capture.Activations) -> None:
        for layer, head in heads:
            if layer == activations.layer:
                for space in ("query", "key"):
                    vectors = activations.spaces[space]
                    # Grouped queries share the keys of their group.
                    group = activations.spaces["query"].values.shape[1] // vectors.values.shape[1]
                    counted = vectors.values[:, (head - 1) // group][vectors.tokens.counted.bool()]
                    found.setdefault((layer, head, space), []).append(counted.float().cpu())

    groups = [0] * len(corpus.items)
    for batch in capture.batches(model, corpus.items, groups, capture.Settings(), capture.Reading()):
        capture.run(model, batch, frozenset({"query", "key"}), receive)
    frames = []
    for (layer, head, space), parts in sorted(found.items()):
        vectors = torch.cat(parts).numpy()
        drawn = np.random.default_rng(seed).choice(len(vectors), max(1, round(share * len(vectors))), replace=False)
        values = pd.DataFrame(vectors[np.sort(drawn)].astype(np.float16))
        values.columns = [str(dimension) for dimension in values]
        about = pd.DataFrame({"layer": layer, "head": head, "space": space}, values.index)
        frames.append(pd.concat([about, values], axis=1))
    return pd.concat(frames, ignore_index=True)


# --- What the figures show ------------------------------------------------------------------------


def heads_shown(alignment: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """The (layer, head) whose mean query and key end most ``similar``, and most ``opposite``, in the first seed."""
    last = alignment[(alignment["seed"] == alignment["seed"].iloc[0]) & (alignment["step"] == alignment["step"].max())]
    ends = {"similar": last.loc[last["cosine"].idxmax()], "opposite": last.loc[last["cosine"].idxmin()]}
    return {name: (int(row["layer"]), int(row["head"])) for name, row in ends.items()}


def cloud(found: Dynamics, shown: str, of: str = "both") -> pd.DataFrame:
    """Sampled queries and keys of a head at every step, on two directions that all steps share (Fig. 11, 19, 20).

    The directions are the first right singular vectors, uncentred, of the sampled vectors of all steps; the mean
    key of the last step has no negative coordinate along them.

    Args:
        found: from :func:`dynamics`.
        shown: ``similar`` or ``opposite``, see :func:`heads_shown`.
        of: the vectors whose directions they are: ``query``, ``key`` or ``both``.

    Returns:
        Columns step, space, x and y.
    """
    vectors = _vectors_of(found, shown)
    values = vectors[_dimensions(found)].to_numpy(np.float64)
    along = values @ _directions(found, shown, of).T
    return vectors[["step", "space"]].assign(x=along[:, 0], y=along[:, 1])


def mean_path(found: Dynamics, shown: str, of: str = "both") -> pd.DataFrame:
    """The mean query and key of a head at every step, on the directions of :func:`cloud` (Fig. 12, 21, 22).

    Returns:
        Columns step, space, x and y, in the order of the steps.
    """
    layer, head = heads_shown(found["qk_alignment"])[shown]
    means = _first_seed(found, "head_means")
    chosen = means[(means["layer"] == layer) & (means["head"] == head) & means["space"].isin(["query", "key"])]
    wide = chosen.pivot(index=["step", "space"], columns="dimension", values="mean").sort_index()
    along = wide.to_numpy() @ _directions(found, shown, of).T
    return wide.index.to_frame(index=False).assign(x=along[:, 0], y=along[:, 1])


def _first_seed(found: Dynamics, name: str) -> pd.DataFrame:
    return found[name][found[name]["seed"] == found.seeds[0]]


def _vectors_of(found: Dynamics, shown: str) -> pd.DataFrame:
    layer, head = heads_shown(found["qk_alignment"])[shown]
    vectors = found["vectors"]
    return vectors[(vectors["layer"] == layer) & (vectors["head"] == head)]


def _dimensions(found: Dynamics) -> list[str]:
    return [str(dimension) for dimension in range(found.head_width)]


def _directions(found: Dynamics, shown: str, of: str) -> Float[np.ndarray, "two dim"]:
    vectors = _vectors_of(found, shown)
    keys = vectors[(vectors["space"] == "key") & (vectors["step"] == found.steps[-1])]
    towards = keys[_dimensions(found)].to_numpy(np.float64).mean(0)
    union = vectors if of == "both" else vectors[vectors["space"] == of]
    return singular_directions(union[_dimensions(found)].to_numpy(np.float64), towards)


def chance_band(head_width: int) -> float:
    """|cos| of two independent directions of a head lies below this 99 times of 100.

    >>> round(chance_band(64), 3)
    0.317
    """
    return isotropic_cosine_quantile(head_width, (1 + BAND) / 2)


def chance_of(cosine: Float[np.ndarray, "*points"], head_width: int) -> Float[np.ndarray, "*points"]:
    r"""The probability that two independent directions of a head are as much alike, or as opposite: P(|cos| ≥ c).

    With (1 + cos) / 2 of Beta((d − 1)/2, (d − 1)/2) law, it is twice the upper tail at (1 + |c|) / 2.

    Args:
        cosine: c, of either sign.
        head_width: d, the dimensions of the head.

    >>> chance_of(np.array([0.0, 0.5, -0.5]), 3)  # uniform: Archimedes' hat box
    array([1. , 0.5, 0.5])
    """
    half = (head_width - 1) / 2
    return 2 * stats.beta.sf((1 + np.abs(cosine)) / 2, half, half)


def aligned_since(found: Dynamics) -> pd.DataFrame:
    """From which checkpoint on, to the last, the mean query and key of a head are beyond :func:`chance_band`.

    Returns:
        Columns seed, layer, head, cosine (at the last step) and step, missing where the head ends within the band.
    """
    band, rows = chance_band(found.head_width), []
    for keys, group in found["qk_alignment"].groupby(["seed", "layer", "head"], sort=False):
        ordered = group.sort_values("step")
        inside = np.flatnonzero(ordered["cosine"].abs() <= band)
        since = inside[-1] + 1 if len(inside) else 0
        step = ordered["step"].iloc[since] if since < len(ordered) else math.nan
        rows.append((*keys, ordered["cosine"].iloc[-1], step))
    return pd.DataFrame(rows, columns=["seed", "layer", "head", "cosine", "step"])


def drift_along(found: Dynamics, shown: str) -> pd.DataFrame:
    """How much of a head's queries and keys its first directions hold, whichever vectors the directions are of.

    Args:
        found: from :func:`dynamics`.
        shown: ``similar`` or ``opposite``, see :func:`heads_shown`.

    Returns:
        A row a choice as in :func:`cloud`: of (both, key, query); angle, in degrees, between its first direction and
        that of both, as lines; first and first_two, the share of the squared length of all sampled queries and keys
        on the first direction, and on the first two; query and key, how far their means have moved along the first
        direction from the first step to the last; query_share and key_share, the squares of these over the squared
        lengths of the whole moves.
    """
    values = _vectors_of(found, shown)[_dimensions(found)].to_numpy(np.float64)
    total = np.square(values).sum()
    layer, head = heads_shown(found["qk_alignment"])[shown]
    means = _first_seed(found, "head_means")
    means = means[(means["layer"] == layer) & (means["head"] == head)]
    wide = means.pivot(index=["space", "step"], columns="dimension", values="mean").sort_index()
    moves = {space: wide.loc[space].iloc[-1] - wide.loc[space].iloc[0] for space in ("query", "key")}
    common = _directions(found, shown, "both")[0]
    rows = []
    for of in ("both", "key", "query"):
        directions = _directions(found, shown, of)
        held = np.square(values @ directions.T).sum(0) / total
        row = {"of": of, "angle": math.degrees(math.acos(min(1.0, abs(directions[0] @ common))))}
        row |= {"first": held[0], "first_two": held.sum()}
        for space, move in moves.items():
            along = float(directions[0] @ move.to_numpy())
            length = float(np.square(move).sum())
            row |= {space: along, f"{space}_share": along**2 / length if length else math.nan}
        rows.append(row)
    return pd.DataFrame(rows)


def steps_shown(steps: Sequence[int], shares: Sequence[float] = (0, 0.02, 0.1, 1)) -> list[int]:
    """The checkpoints nearest to these shares of the run; by default those of Fig. 11: 0, 40k, 200k, 2M of 2M.

    >>> steps_shown([0, 40, 80, 400, 2000, 4000])
    [0, 80, 400, 4000]
    """
    return sorted({min(steps, key=lambda step: abs(step - share * max(steps))) for share in shares})


def outside_chance(found: Dynamics) -> pd.DataFrame:
    """The share of heads whose mean query and mean key are more alike, or more opposite, than chance would have them.

    Returns:
        A row a seed, step and part of the layers (``first third``, ``middle third``, ``last third`` and ``all``):
        seed, step, part, heads (how many), share (with |cos| above :func:`chance_band`), ci_low and ci_high (95 %,
        after Wilson, over heads).
    """
    table = found["qk_alignment"]
    outside = table.assign(outside=table["cosine"].abs() > chance_band(found.head_width), part=thirds(table, found))
    rows = []
    for part in (outside, outside.assign(part="all")):
        for keys, group in part.groupby(["seed", "step", "part"], sort=False):
            count = int(group["outside"].sum())
            rows.append((*keys, len(group), count / len(group), *wilson(count, len(group))))
    columns = ["seed", "step", "part", "heads", "share", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=columns).sort_values(["seed", "step"], kind="stable", ignore_index=True)


def thirds(table: pd.DataFrame, found: Dynamics) -> pd.Series:
    """Which third of the layers each row lies in; of 4 layers, the first and the last have one, the middle two."""
    size = max(1, round(found.layers / 3))
    layer = table["layer"]
    names = np.select([layer <= size, layer > found.layers - size], ["first third", "last third"], "middle third")
    return pd.Series(names, table.index)


def cosine_of_layers(found: Dynamics) -> pd.DataFrame:
    """The cosine of mean query and mean key with the heads of a layer put one after the other (Fig. 23).

    Returns:
        Columns seed, step, layer and cosine.
    """
    means = found["head_means"]
    of = {space: means[means["space"] == space] for space in ("query", "key")}
    on = ["seed", "step", "layer", "head", "dimension"]
    pairs = of["query"].merge(of["key"], on=on, suffixes=("_query", "_key"))
    q, k = pairs["mean_query"], pairs["mean_key"]
    sums = pairs[["seed", "step", "layer"]].assign(dot=q * k, q=q**2, k=k**2)
    sums = sums.groupby(["seed", "step", "layer"], sort=False).sum().reset_index()
    return sums[["seed", "step", "layer"]].assign(cosine=sums["dot"] / np.sqrt(sums["q"] * sums["k"]))


# What changes in a layer along training, in the words of the figures.
QUANTITIES = ("anisotropy of the layer's input", "alignment of queries and keys", "sharpness of attention")


def time_axis(found: Dynamics) -> pd.DataFrame:
    """Anisotropy, alignment and sharpness of each attention layer at every step (Godey et al. 2024, sec. 6).

    Returns:
        Columns seed, step, layer, quantity (of ``QUANTITIES``) and value: the average cosine of the hidden states
        that the layer reads; the mean |cos| of mean query and mean key over its heads; one minus the normalised
        attention entropy, over its heads.
    """
    hidden = found["anisotropy"][found["anisotropy"]["space"] == "hidden"]
    # Attention layer l reads hidden layer l - 1.
    read = hidden.assign(layer=hidden["layer"] + 1, value=hidden["cosine"])
    read = read[read["layer"] <= found.layers]
    alignment = found["qk_alignment"].assign(value=lambda table: table["cosine"].abs())
    sharpness = found["attention_entropy"].assign(value=lambda table: 1 - table["entropy_normalised"])
    frames = []
    for quantity, table in zip(QUANTITIES, (read, alignment, sharpness), strict=True):
        means = table.groupby(["seed", "step", "layer"], sort=False)["value"].mean().reset_index()
        frames.append(means.assign(quantity=quantity))
    return pd.concat(frames, ignore_index=True)[["seed", "step", "layer", "quantity", "value"]]


def half_way(axis: pd.DataFrame) -> pd.DataFrame:
    """When each quantity of :func:`time_axis` has made half of the way from its start to its farthest point.

    Between two checkpoints the quantity is taken as linear.

    Returns:
        Columns seed, layer, quantity, start, farthest (the value that differs most from the start), end (that of the
        last step) and step.
    """
    rows = []
    for keys, group in axis.groupby(["seed", "layer", "quantity"], sort=False):
        ordered = group.sort_values("step")
        steps, values = ordered["step"].to_numpy(float), ordered["value"].to_numpy(float)
        way = np.abs(values - values[0])
        farthest = int(way.argmax())
        along = (values - values[0]) * np.sign(values[farthest] - values[0])
        reached = int(np.argmax(along >= way[farthest] / 2))
        if not way[farthest] > 0:
            step = math.nan
        else:
            before, after = along[reached - 1], along[reached]
            share = (way[farthest] / 2 - before) / (after - before)
            step = steps[reached - 1] + share * (steps[reached] - steps[reached - 1])
        rows.append((*keys, values[0], values[farthest], values[-1], step))
    return pd.DataFrame(rows, columns=["seed", "layer", "quantity", "start", "farthest", "end", "step"])


def orders(half: pd.DataFrame) -> pd.DataFrame:
    """Which of two quantities comes first in a layer, for each pair of those of :func:`half_way`.

    Returns:
        A row a pair: first and second; first_step and second_step, the medians of their half-way steps; earlier, in
        how many layers (of all seeds) the first is half-way before the second; layers, of how many where both have
        changed; share, ci_low and ci_high (95 %, after Wilson, over layers).
    """
    wide = half.pivot(index=["seed", "layer"], columns="quantity", values="step")
    rows = []
    for first, second in itertools.combinations(QUANTITIES, 2):
        both = wide[[first, second]].dropna()
        earlier, layers = int((both[first] < both[second]).sum()), len(both)
        share = (earlier / layers, *wilson(earlier, layers)) if layers else (math.nan,) * 3
        rows.append((first, second, both[first].median(), both[second].median(), earlier, layers, *share))
    columns = ["first", "second", "first_step", "second_step", "earlier", "layers", "share", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=columns)
