"""A run of training, checkpoint by checkpoint: ``dynamics("bert-4")``."""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from analysis_book.sources import book_hash
from analysis_book.training.runs import (
    RUNS,
    Checkpoint,
    baselines,
    checkpoints,
    losses,
    run_description,
    run_identity,
    seeds_of,
)
from analysis_lib import capture, corpora, files, store
from analysis_lib.corpora import Corpus
from analysis_lib.errors import (
    AnalysisError,
    require_flag,
    require_path,
    require_seed,
    require_whole,
)
from analysis_lib.files import Output
from analysis_lib.measurement import shipping
from analysis_lib.measurement.measuring import measure
from analysis_lib.measurement.tables import save_tables
from analysis_lib.measurement.versions import formulas, is_current
from analysis_lib.metrics import resolve
from analysis_lib.models import LoadedModel, weights_identity
from analysis_lib.models.loading import load_model, refuse_unloadable
from analysis_lib.models.names import title
from analysis_lib.progress import bar
from analysis_lib.store import library_hash

METRICS = ("anisotropy", "attention_entropy", "qk_alignment", "head_means")
# The share of all queries and keys of which singular vectors are taken; Godey et al. (2024, sec. 5)
# take 0.2.
SAMPLED = 0.1
DESCRIPTION = "dynamics.json"
# All tables that there may be.
TABLES = ("losses", "baselines", *METRICS, "vectors")
# Of the tables that this module makes itself, such as the sampled vectors.
VERSION = 1


class Dynamics(dict[str, pd.DataFrame]):
    """The tables of every checkpoint of a run, each with the first columns seed and step.

    Besides those of ``METRICS``: ``losses`` of the training; ``baselines``, what counting gives on
    its held-out texts, without seed and step; and ``vectors``, the sampled queries and keys of the
    heads shown, of the first seed: seed, step, layer, head, space, and one column per dimension,
    from ``0``. The same tokens are sampled at every step. The first two have no rows where they are
    not known. Shipped measurements have no intervals, and may lack ``vectors`` and ``head_means``,
    which the wheel of the site leaves out.

    Queries and keys are those before their rotation by position, in the layers that rotate them.
    The column ``before_rotation`` of ``qk_alignment`` tells these layers. Older recordings lack it,
    and have taken queries and keys after rotation.

    Attributes:
        about: run, data, limit, seed and seeds; what identifies run and data; ``formulas``, the
            versions of what measured; and ``training``, how the run was trained (settings, data and
            versions), where that is known.
    """

    def __init__(self, tables: Mapping[str, pd.DataFrame], about: dict):
        super().__init__(tables)
        self.about = about

    @property
    def code_warning(self) -> str:
        """For a page: that the code may give other numbers today, or an empty text."""
        outdated = [] if is_current(self.about, _formulas()) else [title(self.about["run"])]
        return shipping.code_warning(outdated)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the run, in the order they were asked for."""
        return self.about["seeds"]

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted(self["qk_alignment"]["step"].unique().tolist())

    @property
    def before_rotation(self) -> bool:
        """Whether queries and keys of layers that rotate them are taken before that."""
        return bool(self["qk_alignment"].get("before_rotation", pd.Series(False)).any())

    @property
    def layers(self) -> int:
        """How many attention layers there are."""
        return int(self["qk_alignment"]["layer"].max())

    @property
    def head_width(self) -> int:
        """The dimensions of a head."""
        return int(self["head_means"]["dimension"].max()) + 1

    @property
    def first_seed(self) -> "Dynamics":
        """The same of the first seed alone."""
        seed = self.seeds[0]
        tables = dict(self)
        for name, table in self.items():
            if "seed" in table:
                tables[name] = table[table["seed"] == seed]
        return Dynamics(tables, {**self.about, "seeds": [seed]})

    def save(self, folder: Path) -> None:
        """Write one Parquet file per table, then ``dynamics.json``, which says what they are of."""
        save_tables(self, output(folder, self.about["run"], self.about["data"]), self.about)

    @classmethod
    def load(cls, folder: Path) -> "Dynamics":
        """Read the tables that ``save`` has written."""
        about = files.read_json(folder / DESCRIPTION)
        paths = sorted(folder.glob("*.parquet"))
        tables = {path.stem: files.read(path, pd.read_parquet) for path in paths}
        return cls(tables, about)

    def __missing__(self, name: str) -> pd.DataFrame:
        if name not in ("vectors", "head_means"):
            raise KeyError(name)
        run = self.about["run"]
        seed = self.seeds[0]
        raise AnalysisError(
            f"{run} is shipped without {name}: ask for one seed, dynamics({run!r}, seeds=[{seed}])"
        )


def output(
    folder: Path,
    run: str,
    data: str,
) -> Output:
    """The folder that the tables of a run on a corpus are written into."""
    return Output(Path(folder), "dynamics", (run, data), DESCRIPTION)


def dynamics(
    run: str,
    data: str = "wikipedia:held-out",
    limit: int = 128,
    seed: int = 0,
    *,
    seeds: Sequence[int] = (0,),
    tokenizer: str | None = None,
    progress: bool = True,
) -> Dynamics:
    """Queries, keys, attention and hidden states of a run at every checkpoint.

    Measured once and kept. Where only the measurements of a run are shipped, in
    ``data/measurements``, they are read; if they were made with other settings than these, the run
    is trained.

    Args:
        run: as :func:`analysis_book.training.checkpoints` takes it.
        data: the corpus to measure on, as ``load_corpus`` takes it.
        limit: how many of its texts; the paper has 128.
        seed: with which to draw them, and the queries and keys that are sampled.
        seeds: of the run.
        tokenizer: where it is, if not with the checkpoints: a name or folder.
        progress: whether to show a bar, on a terminal.
    """
    run = str(
        require_path(
            "the run", run, "a run, such as bert-4 or multiberts, or a folder that pretrain wrote"
        )
    )
    data = str(
        require_path("the corpus", data, "a name of `datasets`, file.csv:COLUMN or lines.txt")
    )
    limit = require_whole("the limit", limit, 1)
    seed = require_seed("the seed", seed)
    if tokenizer is not None:
        tokenizer = str(
            require_path("the tokenizer", tokenizer, "the name or folder of one, or leave it out")
        )
    require_flag("progress", progress)
    seeds = seeds_of(run, seeds)
    settings = {"data": data, "limit": limit, "seed": seed, "seeds": seeds}
    if run in RUNS and run in shipping.descriptions(DESCRIPTION):
        shipped = Dynamics.load(shipping.home() / run)
        if all(shipped.about[name] == value for name, value in settings.items()):
            return shipped
    about = {
        "run": run,
        **settings,
        "checkpoints": run_identity(run),
        "texts": corpora.data_identity(data),
        "training": run_description(run),
        "formulas": _formulas(),
    }
    if tokenizer is not None:
        about["tokenizer"] = tokenizer
        about["read_by"] = weights_identity(tokenizer)
    corpus = corpora.load_corpus(data, limit, seed)
    # Before hours of training: what is pretrained here reads texts.
    if about["training"] and corpus.kind != "text":
        raise AnalysisError(
            f"{run} reads texts and {data} holds {corpora.PLURAL[corpus.kind]}: give texts"
        )
    of_run = checkpoints(run, seeds)
    refuse_unloadable(checkpoint.model for checkpoint in of_run if os.path.isdir(checkpoint.model))
    joined = {"losses": losses(run, seeds), "baselines": baselines(run)}
    last = [checkpoint for checkpoint in of_run if checkpoint.seed == seeds[0]][-1]
    label = f"dynamics-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
    tables: dict[Checkpoint, dict[str, pd.DataFrame]] = {}
    with files.alone(store.derived_folder("", label).with_suffix(".lock")):
        # The last one first: it decides which heads are shown.
        ordered = sorted(of_run, key=lambda checkpoint: checkpoint != last)
        show = None if progress else False
        for checkpoint in bar(ordered, f"{run} on {data}", unit="checkpoint", show=show):
            fill = partial(_measure, checkpoint, corpus, about, tables.get(last))
            known = [about, library_hash(), book_hash(), checkpoint.seed, checkpoint.step]
            folder = store.derived(json.dumps(known), label, fill)
            paths = folder.glob("*.parquet")
            tables[checkpoint] = {path.stem: pd.read_parquet(path) for path in paths}
    heads = tables[last]["qk_alignment"][["layer", "head"]].to_numpy().tolist()
    for checkpoint in of_run:
        of_checkpoint = tables[checkpoint]["qk_alignment"][["layer", "head"]]
        if of_checkpoint.to_numpy().tolist() != heads:
            raise AnalysisError(
                f"{checkpoint.model} has other layers or heads than {last.model}: give the "
                "checkpoints of one run"
            )
    for name in (*METRICS, "vectors"):
        parts = [tables[checkpoint].get(name) for checkpoint in of_run]
        parts = [part for part in parts if part is not None]
        joined[name] = pd.concat(parts, ignore_index=True)
    return Dynamics(joined, about)


def load_runs(
    runs: Sequence[str],
    data: str = "",
    limit: int = 128,
    seed: int = 0,
    seeds: Sequence[int] = (),
) -> dict[str, Dynamics]:
    """The measurements of runs, by what each is called.

    Args:
        runs: each as :func:`dynamics` takes it.
        data: what they read; by default what the measurements that come with the book have read, or
            ``wikipedia:held-out``.
        limit: how many of its texts.
        seed: with which to draw them.
        seeds: of each run; by default those of the measurements that come with the book, or 0.
    """
    shipped = shipping.descriptions(DESCRIPTION)
    tables = {}
    for run in runs:
        settings = {"data": data or "wikipedia:held-out", "seeds": [0]}
        if run in shipped and data in ("", shipped[run]["data"]):
            settings = shipped[run]
        tables[title(run)] = dynamics(
            run,
            settings["data"],
            limit,
            seed,
            seeds=seeds or settings["seeds"],
            progress=False,
        )
    return tables


def _formulas() -> dict[str, object]:
    """The versions that the tables of a run depend on."""
    return {"dynamics": VERSION, **formulas(resolve(METRICS))}


def _measure(
    checkpoint: Checkpoint,
    corpus: Corpus,
    about: dict,
    last: Mapping[str, pd.DataFrame] | None,
    folder: Path,
) -> None:
    """Write the tables of a checkpoint, given those of the last one, unless it is that."""
    model = load_model(checkpoint.model, checkpoint.revision, processor=about.get("tokenizer"))
    origin = {"seed": checkpoint.seed, "step": checkpoint.step}
    tables = _tables(model, corpus)
    tables = {name: table.assign(**origin) for name, table in tables.items()}
    if checkpoint.seed == about["seeds"][0]:
        alignment = (last or tables)["qk_alignment"]
        heads = {*heads_shown(alignment).values()}
        vectors = sample_vectors(model, corpus, heads, SAMPLED, about["seed"])
        tables["vectors"] = vectors.assign(**origin)
    for name, table in tables.items():
        rest = table.columns.drop([*origin])
        ordered = table[[*origin, *rest]]
        ordered.to_parquet(folder / f"{name}.parquet", index=False)


def _tables(model: LoadedModel, corpus: Corpus) -> dict[str, pd.DataFrame]:
    """The tables of ``METRICS``, with queries and keys before their rotation."""
    if not any(attention.rotates for _, attention in model.attending):
        tables = dict(measure(model, corpus, METRICS, progress=False))
        tables["qk_alignment"] = tables["qk_alignment"].assign(before_rotation=False)
        return tables
    tables = dict(measure(model, corpus, [*METRICS, "qk_alignment_unrotated"], progress=False))
    before = tables.pop("qk_alignment_unrotated").assign(before_rotation=True)
    rotating = before["layer"].unique()
    after = tables["qk_alignment"].assign(before_rotation=False)
    after = after[~after["layer"].isin(rotating)]
    both = pd.concat([before, after], ignore_index=True)
    tables["qk_alignment"] = both.sort_values(["layer", "head"], ignore_index=True)
    for name in ("anisotropy", "head_means"):
        table = tables[name]
        is_rotated = table["space"].isin(["query", "key"]) & table["layer"].isin(rotating)
        table = table[~is_rotated]
        plain = table["space"].str.removesuffix("_unrotated")
        tables[name] = table.assign(space=plain).reset_index(drop=True)
    return tables


def sample_vectors(
    model: LoadedModel,
    corpus: Corpus,
    heads: set[tuple[int, int]],
    share: float,
    seed: int,
) -> pd.DataFrame:
    """The queries and keys of some heads at tokens drawn uniformly, without replacement.

    Args:
        heads: (layer, head), both counted from 1.
        share: of the tokens of the corpus.
        seed: with which to draw them; models with the same tokenizer give the same tokens.

    Returns:
        One row per token and space. Columns layer, head, space (query or key, before any
        rotation), and one column per
        dimension, ``0``, ``1``, ..., in half precision.
    """
    of_heads: dict[tuple, list[Float[torch.Tensor, "token dim"]]] = {}

    def receive(activations: capture.Activations) -> None:
        here = [head for layer, head in heads if layer == activations.layer]
        for head, space in itertools.product(here, ("query", "key")):
            spaces = activations.spaces
            vectors = spaces.get(f"{space}_unrotated", spaces[space])
            # Grouped queries share the keys of their group.
            group = activations.spaces["query"].values.shape[1] // vectors.values.shape[1]
            of_head = vectors.values[:, (head - 1) // group]
            counted = of_head[vectors.tokens.counted.bool()].float().cpu()
            of_heads.setdefault((activations.layer, head, space), []).append(counted)

    groups = [0] * len(corpus.items)
    settings = capture.Settings()
    for batch in capture.batches(model, corpus.items, groups, settings, capture.Reading()):
        capture.run(model, batch, frozenset({"query", "key", *capture.UNROTATED}), receive)
    frames = {}
    for labels, parts in sorted(of_heads.items()):
        vectors = torch.cat(parts).numpy()
        count = max(1, round(share * len(vectors)))
        drawn = np.random.default_rng(seed).choice(len(vectors), count, replace=False)
        chosen = vectors[np.sort(drawn)].astype(np.float16)
        frames[labels] = pd.DataFrame(chosen).rename(columns=str)
    names = ["layer", "head", "space"]
    rows = pd.concat(frames, names=names).reset_index(names)
    return rows.reset_index(drop=True)


def heads_shown(alignment: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """The heads of the first seed whose mean query and key end most ``similar`` or ``opposite``.

    Returns:
        By these two names, (layer, head), both counted from 1.
    """
    first_seed = alignment["seed"] == alignment["seed"].iloc[0]
    last_step = alignment["step"] == alignment["step"].max()
    last = alignment[first_seed & last_step]
    similar = last.loc[last["cosine"].idxmax()]
    opposite = last.loc[last["cosine"].idxmin()]
    return {
        "similar": (int(similar["layer"]), int(similar["head"])),
        "opposite": (int(opposite["layer"]), int(opposite["head"])),
    }
