"""Runs of pretraining by name, and their checkpoints: those trained here, the MultiBERTs, or a folder of yours."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import MULTIBERTS_SEEDS, MULTIBERTS_STEPS, multibert
from analysis_lib.training.loop import split_settings
from analysis_lib.training.pretraining import DESCRIPTION, Pretraining, pretrain, trained_whole

SETTINGS = ("steps", "batch", "length", "vocabulary", "learning_rate", "warmup", "weight_decay")


def _bert(layers: int, heads: int) -> dict:
    """A BERT with heads of 64 dimensions; nothing is dropped, as the runs see little of their text twice."""
    return {
        "hidden_size": 64 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 256 * heads,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


RUNS = {
    "bert-4": Pretraining(configuration=_bert(4, 3), vocabulary=4000, steps=800, batch=16, learning_rate=1e-3),
    "bert-12": Pretraining(configuration=_bert(12, 3), vocabulary=4000, steps=4000, batch=32, learning_rate=1e-3),
}
MULTIBERTS = "multiberts"


@dataclass(frozen=True)
class Checkpoint:
    """A model on its way.

    Attributes:
        seed: of the run.
        step: how many batches it has been trained on.
        model: what ``load_model`` takes.
    """

    seed: int
    step: int
    model: str


def checkpoints(run: str, seeds: Sequence[int] = (0,)) -> list[Checkpoint]:
    """The checkpoints of a run by seed and step; a run of ``RUNS`` is trained first, where it is not there yet.

    Args:
        run: a name of ``RUNS``, with other settings as in ``bert-4@steps=100``; ``multiberts``; or a folder that
            ``pretrain`` has filled.
        seeds: of the run.

    Raises:
        AnalysisError: there is no such run, seed or setting; or what ``pretrain`` raises.
    """
    if not seeds:
        raise AnalysisError("no seed was given: give one or more")
    seeds = list(dict.fromkeys(seeds))
    if run == MULTIBERTS:
        if wrong := [seed for seed in seeds if seed not in MULTIBERTS_SEEDS]:
            raise AnalysisError(f"the MultiBERTs have no checkpoints of seed {wrong[0]}: give seeds from 0 to 4")
        steps = [(seed, step) for seed in seeds for step in MULTIBERTS_STEPS]
        return [Checkpoint(s, 1000 * step, multibert(s, step)) for s, step in steps]
    if (settings := _settings(run)) is not None:
        folder = pretrain(_folder(run, settings), settings, seeds=seeds, workers=torch.get_num_threads())
    else:
        folder = Path(run)
    for seed in seeds:
        if not trained_whole(folder, seed):
            raise AnalysisError(
                f"{run} has no seed {seed} that is trained to its end: give `pretrain` its settings with this seed, "
                f"or leave the seed out"
            )
    found = [checkpoint for checkpoint in _found(folder) if checkpoint.seed in seeds]
    return sorted(found, key=lambda checkpoint: (seeds.index(checkpoint.seed), checkpoint.step))


def _found(folder: Path) -> list[Checkpoint]:
    matches = [(path, re.fullmatch(r"seed_(\d+)-step_(\d+)", path.name)) for path in folder.glob("seed_*-step_*")]
    return [Checkpoint(int(match[1]), int(match[2]), os.fspath(path)) for path, match in matches if match]


def losses(run: str, seeds: Sequence[int] = (0,)) -> pd.DataFrame:
    """The losses of a run that is trained: columns seed and those of ``seed_s.csv``, see :func:`pretrain`.

    The MultiBERTs', which were not published, have no rows.
    """
    columns = ["seed", "step", "tokens", "learning_rate", "loss", "held_out"]
    if run == MULTIBERTS:
        return pd.DataFrame(columns=columns, dtype=float)
    folder = Path(run) if (settings := _settings(run)) is None else _folder(run, settings)
    return pd.concat([pd.read_csv(folder / f"seed_{s}.csv").assign(seed=s)[columns] for s in seeds], ignore_index=True)


def run_fingerprint(run: str) -> str:
    """A short text that changes when the checkpoints of the run would; trains nothing.

    Raises:
        AnalysisError: there is no such run.
    """
    if run == MULTIBERTS:
        return run
    if (settings := _settings(run)) is not None:
        return _folder(run, settings).name
    kept = sorted(Path(checkpoint.model).name for checkpoint in _found(Path(run)))
    return f"{(Path(run) / DESCRIPTION).read_text(encoding='utf-8')}{kept}"


def run_description(run: str) -> dict:
    """How a run was, or would be, trained: its settings, data and versions; of the MultiBERTs nothing.

    Raises:
        AnalysisError: there is no such run.
    """
    if run == MULTIBERTS:
        return {}
    if (settings := _settings(run)) is not None:
        return settings.told()
    return json.loads((Path(run) / DESCRIPTION).read_text(encoding="utf-8"))


def _settings(run: str) -> Pretraining | None:
    """The settings that the name of a run means; None for a folder."""
    name, settings = split_settings(run)
    if name in RUNS:
        for setting in (given := settings()):
            if setting not in SETTINGS:
                raise AnalysisError(f"a run has no setting {setting}: {near_names(setting, SETTINGS)}")
        return dataclasses.replace(RUNS[name], **given)
    if not (Path(run) / DESCRIPTION).is_file():
        raise AnalysisError(
            f"there is no run {run!r}: {near_names(run, [*RUNS, MULTIBERTS])}; or give a folder of pretrain"
        )
    return None


def _folder(run: str, settings: Pretraining) -> Path:
    return packages.derived_folder(json.dumps(settings.told(), sort_keys=True), run)
