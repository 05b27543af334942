"""Runs of training and their checkpoints: trained here, MultiBERTs, Trainer's, or on the hub."""

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from analysis_book.training.settings import (
    BASELINES,
    COLUMNS,
    DESCRIPTION,
    RUNS,
    Pretraining,
    finished,
    left_by,
    named_settings,
    require_seeds,
    seal_path,
    table_path,
)
from analysis_lib import files, store
from analysis_lib.errors import AnalysisError, near_names, require_path
from analysis_lib.models import MULTIBERTS_SEEDS, MULTIBERTS_STEPS, multibert
from analysis_lib.models.folders import file_hashes

if TYPE_CHECKING:
    import pandas as pd

MULTIBERTS = "multiberts"
# What Trainer keeps with each checkpoint, and in its folder when `save_state` is called; and what
# it calls our columns.
TRAINER_STATE = "trainer_state.json"
LOGGED = {
    "num_input_tokens_seen": "tokens",
    "learning_rate": "learning_rate",
    "loss": "loss",
    "eval_loss": "held_out",
}
NO_LOSSES = "remove it, and the losses are left out"


class Checkpoint(NamedTuple):
    """A model along a run, as ``load_model`` takes it; ``step`` counts the batches it has seen."""

    seed: int
    step: int
    model: str
    revision: str | None = None


def checkpoints(run: str, seeds: Sequence[int] = (0,)) -> list[Checkpoint]:
    """The checkpoints of a run by seed and step.

    A run of ``RUNS`` is trained first unless it is finished.

    Args:
        run: a name of ``RUNS``, with other settings as in ``bert-4@steps=100``; ``multiberts``; the
            folder of a finished :func:`pretrain`, or one in which Trainer of transformers has left
            ``checkpoint-N``; or a model of the hub with revisions, as in
            ``EleutherAI/pythia-160m@step0,step1000``, whose steps are the numbers in their names. A
            checkpoint of Trainer whose weights are those of an earlier one is left out with a
            warning.
        seeds: of the run, see :func:`seeds_of`.

    Raises:
        AnalysisError: there is no such run, seed or setting; or what ``pretrain`` raises.
    """
    run = _checked(run)
    seeds = seeds_of(run, seeds)
    if run == MULTIBERTS:
        return _of_multiberts(seeds)
    if elsewhere := _distinct(_of_trainer(run)) or _of_hub(run):
        return elsewhere
    folder, settings, about = _find(run)
    if settings is not None:
        # Imported where it is needed, since torch takes seconds.
        import torch

        from analysis_book.training.pretraining import pretrain

        pretrain(folder, settings, seeds=seeds, workers=torch.get_num_threads())
    for seed in seeds:
        if not finished(table_path(folder, seed)):
            raise AnalysisError(
                f"{run} has no seed {seed} that is trained to its end: give `pretrain` its "
                "settings with this seed, or leave the seed out"
            )
    steps = about["settings"]["checkpoints"]
    # What was just trained is whole.
    if settings is None:
        _require_whole_run(folder, seeds, steps)
    models = []
    for seed in seeds:
        for step in steps:
            model = folder / f"seed_{seed}-step_{step}"
            models.append(Checkpoint(seed, step, os.fspath(model)))
    return models


def _of_multiberts(seeds: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints of some seeds of the MultiBERTs."""
    for seed in seeds:
        if seed not in MULTIBERTS_SEEDS:
            raise AnalysisError(
                f"the MultiBERTs have no checkpoints of seed {seed}: give seeds from 0 to 4"
            )
    models = []
    for seed in seeds:
        for step in MULTIBERTS_STEPS:
            models.append(Checkpoint(seed, 1000 * step, multibert(seed, step)))
    return models


def _require_whole_run(folder: Path, seeds: Sequence[int], steps: Sequence[int]) -> None:
    """Refuse a run of which a file is missing or damaged."""
    left = {"run": []}
    for seed in seeds:
        left[f"seed_{seed}"] = left_by(seed, steps)
    for name, names in left.items():
        for path in store.lost(seal_path(folder, name), *names):
            raise AnalysisError(
                f"{path} is missing or damaged: give `pretrain` the same settings and folder again "
                "to mend it"
            )


def _checked(run: object) -> str:
    wanted = "a run, such as bert-4 or multiberts, or a folder that pretrain wrote"
    return str(require_path("the run", run, wanted))


def seeds_of(run: str, seeds: Sequence[int]) -> list[int]:
    """The seeds of a run that are asked for.

    Checkpoints of Trainer, or on the hub, are one run, of seed 0.
    """
    wanted = require_seeds("seeds", seeds)
    if run == MULTIBERTS or not _trained_elsewhere(run) or wanted == [0]:
        return wanted
    logging.getLogger(__name__).warning("note: %s is one run, which is shown for all seeds", run)
    return [0]


def _of_trainer(run: str) -> dict[int, Path]:
    """The checkpoints of Trainer in a folder, by step, in order."""
    folders = {}
    for path in Path(run).glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            folders[int(step)] = path
    return dict(sorted(folders.items()))


def _distinct(folders: dict[int, Path]) -> list[Checkpoint]:
    """Each state of the weights once, as of the first step that has it.

    The others are named in a warning.
    """
    distinct = []
    known = {}
    for step, path in folders.items():
        weights = file_hashes(path, ("*.safetensors",))
        first = known.setdefault(json.dumps(weights), path.name)
        if first == path.name or not weights:
            distinct.append(Checkpoint(0, step, os.fspath(path)))
        else:
            logging.getLogger(__name__).warning(
                "note: %s has the weights of %s and is left out", path, first
            )
    return distinct


def _of_hub(run: str) -> list[Checkpoint]:
    """The revisions of a model of the hub, by the numbers in their names.

    Where one has none, they are counted in their order.
    """
    name, _, revisions = run.partition("@")
    if "/" not in name or not revisions or Path(run).exists():
        return []
    revisions = revisions.split(",")
    numbers = [re.findall(r"\d+", revision) for revision in revisions]
    steps = range(len(revisions))
    if all(numbers):
        steps = [int(digits[-1]) for digits in numbers]
    pairs = zip(steps, revisions, strict=True)
    return sorted(Checkpoint(0, step, name, revision) for step, revision in pairs)


def _trained_elsewhere(run: str) -> bool:
    """True if nothing is known of a run but its checkpoints."""
    return run == MULTIBERTS or bool(_of_trainer(run) or _of_hub(run))


def losses(run: str, seeds: Sequence[int] = (0,)) -> "pd.DataFrame":
    """The losses of a finished run: columns seed and those of ``seed_s.csv``, see :func:`pretrain`.

    Those of Trainer are what it has logged: ``loss`` is the mean since the loss before it,
    ``held_out`` is its ``eval_loss``, and ``tokens`` is known where it has counted them
    (``include_num_input_tokens_seen``).

    The MultiBERTs have no rows, since theirs were not published; nor have revisions on the hub.
    """
    import pandas as pd

    columns = ["seed", *COLUMNS]
    if state := _trainer_state(run):
        return files.read(state, _logged, NO_LOSSES).assign(seed=0)[columns]
    if _trained_elsewhere(run):
        return pd.DataFrame(columns=columns, dtype=float)
    folder = _find(run)[0]

    def losses_of(path: Path) -> pd.DataFrame:
        table = pd.read_csv(path)[[*COLUMNS]]
        # Refused if it holds anything but numbers.
        table.astype(float)
        return table

    parts = [
        files.read(table_path(folder, seed), losses_of).assign(seed=seed)[columns] for seed in seeds
    ]
    return pd.concat(parts, ignore_index=True)


def _trainer_state(run: str) -> Path | None:
    """The longest log of Trainer: in its folder, or in its last checkpoint."""
    folders = [*_of_trainer(run).values()][-1:]
    if folders:
        folders.insert(0, Path(run))
    states = [state for folder in folders if (state := folder / TRAINER_STATE).is_file()]

    def last_step(state: Path) -> int:
        return int(json.loads(state.read_text("utf-8"))["global_step"])

    return max(states, key=lambda state: files.read(state, last_step, NO_LOSSES), default=None)


def _logged(state: Path) -> "pd.DataFrame":
    """The losses that Trainer has logged, one row per step that has any."""
    import pandas as pd

    steps: dict[int, dict[str, float]] = {}
    for entry in json.loads(state.read_text("utf-8"))["log_history"]:
        row = steps.setdefault(int(entry["step"]), {})
        for name, column in LOGGED.items():
            if name in entry:
                row[column] = float(entry[name])
    rows = [{"step": step, **steps[step]} for step in sorted(steps)]
    table = pd.DataFrame(rows, columns=COLUMNS, dtype=float)
    has_loss = table[["loss", "held_out"]].notna().any(axis="columns")
    return table[has_loss].astype({"step": int}).reset_index(drop=True)


def baselines(run: str) -> "pd.DataFrame":
    """The losses of counting on the held-out texts of a finished run, see :func:`n_gram_losses`.

    Runs that were trained elsewhere have none.
    """
    import pandas as pd

    if _trained_elsewhere(run):
        return pd.DataFrame(columns=["baseline", "loss"])
    return files.read(_find(run)[0] / BASELINES, pd.read_csv)


def run_identity(run: str) -> str:
    """A short text that changes when the checkpoints of the run would. Trains nothing."""
    run = _checked(run)
    if run == MULTIBERTS or _of_hub(run):
        return run
    if folders := _of_trainer(run):
        return json.dumps([file_hashes(path) for path in folders.values()])
    folder, settings, _ = _find(run)
    if settings is not None:
        return folder.name
    return json.dumps(file_hashes(folder, (DESCRIPTION, "seed_*-step_*/*")))


def run_description(run: str) -> dict:
    """The settings, data and versions of a run, trained or not; empty where they are not known."""
    run = _checked(run)
    if _trained_elsewhere(run):
        return {}
    return _find(run)[2]


def _find(run: str) -> tuple[Path, Pretraining | None, dict]:
    """The folder of a run, its settings if it is one of ``RUNS``, and its description."""
    if settings := named_settings(run, RUNS):
        about = settings.identity()
        return store.derived_folder(json.dumps(about, sort_keys=True), run), settings, about
    if not (Path(run) / DESCRIPTION).is_file():
        raise AnalysisError(
            f"there is no run {run!r}: {near_names(run, [*RUNS, MULTIBERTS])}; or give a folder of "
            "pretrain or of Trainer (with checkpoint-N in it), or revisions of a model, "
            "owner/name@REVISION,REVISION"
        )
    path = Path(run) / DESCRIPTION
    about = files.read_json(path)
    settings = about.get("settings")
    steps = settings.get("checkpoints") if isinstance(settings, dict) else None
    is_list = isinstance(steps, list) and bool(steps)
    if not is_list or not all(type(step) is int and step >= 0 for step in steps):
        raise AnalysisError(
            f"{path} lists no checkpoints, each by its step: pretrain into another folder"
        )
    return Path(run), None, about
