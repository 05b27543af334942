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
from analysis_lib.measurement.versions import formulas, is_current, library_hash
from analysis_lib.metrics import resolve
from analysis_lib.models import LoadedModel, weights_identity
from analysis_lib.models.loading import load_model, refuse_unloadable
from analysis_lib.models.names import title
from analysis_lib.progress import bar

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
    """The tables of every checkpoint of a run. Each is one DataFrame whose first columns are seed
    and step.

    Besides those of ``METRICS``: ``losses`` of the training; ``baselines``, what counting gives on
    its held-out texts, without seed and step; and ``vectors``, the sampled queries and keys of the
    heads shown, of the first seed: seed, step, layer, head, space, and one column per dimension,
    from ``0``. The same tokens are sampled at every step. The first two have no rows where they are
    not known. Shipped measurements may lack ``vectors``, and have no intervals.

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
        """For a page to show: that the measurements may not be what the code gives today, or an
        empty text.
        """
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
        kept = {
            name: table[table["seed"] == seed] if "seed" in table else table
            for name, table in self.items()
        }
        return Dynamics(kept, {**self.about, "seeds": [seed]})

    def save(self, folder: Path) -> None:
        """Write one Parquet file per table, then ``dynamics.json``, which says what was
        measured.
        """
        save_tables(self, output(folder, self.about["run"], self.about["data"]), self.about)

    @classmethod
    def load(cls, folder: Path) -> "Dynamics":
        """What ``save`` has written."""
        about = files.read_json(folder / DESCRIPTION)
        return cls(
            {
                path.stem: files.read(path, pd.read_parquet)
                for path in sorted(folder.glob("*.parquet"))
            },
            about,
        )

    def __missing__(self, name: str) -> pd.DataFrame:
        if name != "vectors":
            raise KeyError(name)
        run, seed = self.about["run"], self.seeds[0]
        raise AnalysisError(
            f"{run} is shipped without vectors: ask for one seed, dynamics({run!r}, seeds=[{seed}])"
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
    limit, seed = require_whole("the limit", limit, 1), require_seed("the seed", seed)
    if tokenizer is not None:
        tokenizer = str(
            require_path("the tokenizer", tokenizer, "the name or folder of one, or leave it out")
        )
    require_flag("progress", progress)
    asked = {"data": data, "limit": limit, "seed": seed, "seeds": seeds_of(run, seeds)}
    if run in RUNS and run in shipping.descriptions(DESCRIPTION):
        found = Dynamics.load(shipping.home() / run)
        if all(found.about[name] == value for name, value in asked.items()):
            return found
    about = {
        "run": run,
        **asked,
        "checkpoints": run_identity(run),
        "texts": corpora.data_identity(data),
        "training": run_description(run),
        "formulas": _formulas(),
    }
    about |= (
        {}
        if tokenizer is None
        else {"tokenizer": tokenizer, "read_by": weights_identity(tokenizer)}
    )
    corpus = corpora.load_corpus(data, limit, seed)
    # Before hours of training: what is pretrained here reads texts.
    if about["training"] and corpus.kind != "text":
        raise AnalysisError(
            f"{run} reads texts and {data} holds {corpora.PLURAL[corpus.kind]}: give texts"
        )
    found = checkpoints(run, asked["seeds"])
    refuse_unloadable(checkpoint.model for checkpoint in found if os.path.isdir(checkpoint.model))
    joined = {"losses": losses(run, asked["seeds"]), "baselines": baselines(run)}
    last = [checkpoint for checkpoint in found if checkpoint.seed == asked["seeds"][0]][-1]
    label = f"dynamics-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
    tables: dict[Checkpoint, dict[str, pd.DataFrame]] = {}
    with files.alone(store.derived_folder("", label).with_suffix(".lock")):
        # The last one first: it decides which heads are shown.
        ordered = sorted(found, key=lambda checkpoint: checkpoint != last)
        for checkpoint in bar(
            ordered, f"{run} on {data}", unit="checkpoint", show=None if progress else False
        ):
            fill = partial(_measure, checkpoint, corpus, about, tables.get(last))
            known = [about, library_hash(), book_hash(), checkpoint.seed, checkpoint.step]
            folder = store.derived(json.dumps(known), label, fill)
            tables[checkpoint] = {
                path.stem: pd.read_parquet(path) for path in folder.glob("*.parquet")
            }
    sizes = {c: tables[c]["qk_alignment"][["layer", "head"]].to_numpy().tolist() for c in found}
    if odd := [checkpoint for checkpoint in found if sizes[checkpoint] != sizes[last]]:
        raise AnalysisError(
            f"{odd[0].model} has other layers or heads than {last.model}: give the checkpoints of "
            "one run"
        )
    for name in (*METRICS, "vectors"):
        joined[name] = pd.concat(
            [tables[c][name] for c in found if name in tables[c]], ignore_index=True
        )
    return Dynamics(joined, about)


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
    place = {"seed": checkpoint.seed, "step": checkpoint.step}
    tables = {
        name: table.assign(**place)
        for name, table in measure(model, corpus, METRICS, progress=False).items()
    }
    if checkpoint.seed == about["seeds"][0]:
        heads = set(heads_shown((last or tables)["qk_alignment"]).values())
        tables["vectors"] = sample_vectors(model, corpus, heads, SAMPLED, about["seed"]).assign(
            **place
        )
    for name, table in tables.items():
        ordered = table[[*place, *table.columns.drop([*place])]]
        ordered.to_parquet(folder / f"{name}.parquet", index=False)


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
        One row per token and space. Columns layer, head, space (query or key), and one column per
        dimension, ``0``, ``1``, ..., in half precision.
    """
    found: dict[tuple, list[Float[torch.Tensor, "token dim"]]] = {}

    def receive(activations: capture.Activations) -> None:
        here = [head for layer, head in heads if layer == activations.layer]
        for head, space in itertools.product(here, ("query", "key")):
            vectors = activations.spaces[space]
            # Grouped queries share the keys of their group.
            group = activations.spaces["query"].values.shape[1] // vectors.values.shape[1]
            counted = vectors.values[:, (head - 1) // group][vectors.tokens.counted.bool()]
            found.setdefault((activations.layer, head, space), []).append(counted.float().cpu())

    groups = [0] * len(corpus.items)
    for batch in capture.batches(
        model, corpus.items, groups, capture.Settings(), capture.Reading()
    ):
        capture.run(model, batch, frozenset({"query", "key"}), receive)
    frames = {}
    for place, parts in sorted(found.items()):
        vectors = torch.cat(parts).numpy()
        drawn = np.random.default_rng(seed).choice(
            len(vectors), max(1, round(share * len(vectors))), replace=False
        )
        frames[place] = pd.DataFrame(vectors[np.sort(drawn)].astype(np.float16)).rename(columns=str)
    return (
        pd.concat(frames, names=["layer", "head", "space"])
        .reset_index([0, 1, 2])
        .reset_index(drop=True)
    )


def heads_shown(alignment: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """The heads whose mean query and key end most ``similar``, and most ``opposite``, in the first
    seed.

    Returns:
        By these two names, (layer, head), both counted from 1.
    """
    last = alignment[
        (alignment["seed"] == alignment["seed"].iloc[0])
        & (alignment["step"] == alignment["step"].max())
    ]
    ends = {
        "similar": last.loc[last["cosine"].idxmax()],
        "opposite": last.loc[last["cosine"].idxmin()],
    }
    return {name: (int(row["layer"]), int(row["head"])) for name, row in ends.items()}
