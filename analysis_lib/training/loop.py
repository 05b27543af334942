"""What every training shares: settings in a name, the optimizer, and a loop that resumes if its process was killed."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
import yaml
from tqdm import tqdm

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measurement import processes

# The most work that a kill can undo, if a step or an epoch takes no longer.
SECONDS_BETWEEN_STATES = 60

Settings = TypeVar("Settings")


# --- Settings -------------------------------------------------------------------------------------


def shipped_settings(file: str, kind: type[Settings]) -> dict[str, Settings]:
    """The settings by name, each a ``kind``, that a YAML file in ``data/`` holds."""
    text = (packages.data_directory() / file).read_text(encoding="utf-8")
    return {name: kind(**fields) for name, fields in yaml.safe_load(text).items()}


def named_settings(name: str, known: Mapping[str, Settings], choices: Sequence[str]) -> Settings | None:
    """The settings that a name stands for: ``digits-vit@steps=50`` is ``digits-vit`` with 50 steps.

    They are None if the name is not a known one. ``choices`` are the settings that a name may change.
    """
    base, *changes = name.split("@")
    if base not in known:
        return None
    given = {}
    for change in changes:
        setting, _, value = change.partition("=")
        if setting not in choices:
            raise AnalysisError(f"{base} has no setting {setting}: {near_names(setting, choices)}")
        try:
            given[setting] = float(value) if "." in value or "e-" in value else int(value)
        except ValueError:
            raise AnalysisError(f"{name}: {change!r} is not a setting: write {base}@steps=50@seed=1") from None
    return dataclasses.replace(known[base], **given)


def require_whole(settings: object, **least: int) -> None:
    """Refuse settings that are not whole numbers, or lie below the least that makes sense."""
    for name, bound in least.items():
        if not isinstance(value := getattr(settings, name), int) or value < bound:
            raise AnalysisError(f"{name} is {value}: give a whole number, {bound} or more")


def versions() -> dict[str, str]:
    """The versions of the packages on which the weights depend."""
    return {name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")}


# --- Optimization ---------------------------------------------------------------------------------


def optimizer(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, and none on biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay)


def descend(loss: torch.Tensor, model: torch.nn.Module, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    """A step of the schedule's optimizer down the gradient of the loss, whose norm is cut to 1."""
    schedule.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    schedule.optimizer.step()
    schedule.step()


def drawn_seed(*numbers: int) -> int:
    """A seed that is independent of the seeds of all other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def require_finite(loss: float, place: str, learning_rate: float) -> float:
    """The loss, which is refused if the training has diverged."""
    if not math.isfinite(loss):
        raise AnalysisError(
            f"the loss of {place} is {loss}: give another folder and a learning rate below {learning_rate:g}"
        )
    return loss


@contextmanager
def isolated(device: str = "cpu") -> Iterator[None]:
    """Run on one thread, since sums over several round differently, and restore the caller's random numbers."""
    with processes.threads(1), torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        yield


# --- Files ----------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def files_hash(folder: Path) -> str:
    """A short text that changes when the files of a folder do."""
    files = b"\0".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(files).hexdigest()[:12]


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold the lock; other processes wait. The lock of a process that is killed ends with it."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnalysisError(f"{lock.parent} cannot be written ({error.strerror}): give another folder") from error
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def holds(description: Path, identity: dict) -> bool:
    """Whether the folder of a description holds the training with this identity.

    If it does not, the folder is empty but for hidden files, or does not exist.
    """
    folder = description.parent
    if folder.exists() and not folder.is_dir():
        raise AnalysisError(f"{folder} is a file: give a folder")
    if not description.is_file():
        if left := sorted(path.name for path in folder.glob("*") if not path.name.startswith(".")):
            raise AnalysisError(f"{folder} holds {left[0]} and no training: give an empty folder, or a new one")
        return False
    try:
        # By their place, as in settings.steps.
        (theirs,) = pd.json_normalize(json.loads(description.read_text(encoding="utf-8"))).to_dict("records")
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{description} is damaged: give another folder") from error
    (ours,) = pd.json_normalize(json.loads(json.dumps(identity))).to_dict("records")
    for name in ours | theirs:
        found, wanted = theirs.get(name), ours.get(name)
        if found != wanted:
            raise AnalysisError(f"{folder} holds a training whose {name} is {found}, not {wanted}: give another folder")
    return True


# --- Loop -----------------------------------------------------------------------------------------


def bar(numbers: Iterable[int], label: str, unit: str = "step", **more: Any) -> tqdm:
    """A progress bar of a training, which shows its loss as postfix."""
    # With None, tqdm shows a bar on a terminal only.
    return tqdm(numbers, label, unit=unit, disable=None, **more)


def finished(table: Path) -> bool:
    """Whether the training that writes this table has come to its end."""
    return table.exists() and not _state(table).exists()


def _state(table: Path) -> Path:
    return table.with_name(f".{table.stem}.pt")


class TrainingLog:
    """The steps or epochs of a training so far, and the state from which it resumes if its process is killed.

    It ends with the same weights if the random numbers of a step depend only on the number of the step.

    Args:
        table: the CSV file of the rows. The state is a hidden file beside it until the training is finished.
        columns: of the table. The first counts steps or epochs; one is ``loss``.
        device: where the state is loaded.
        parts: what changes along the way, by name; each has a ``state_dict``.

    Attributes:
        rows: one per step or epoch.
    """

    def __init__(self, table: Path, columns: Sequence[str], device: str, **parts: Any) -> None:
        self.table, self.state, self.columns, self.parts = table, _state(table), columns, parts
        self.rows: list[list[float | None]] = []
        if self.state.is_file():
            kept = torch.load(self.state, map_location=device, weights_only=True)
            self.rows = kept["log"]
            for name, part in parts.items():
                part.load_state_dict(kept[name])

    def remaining(self, last: int, label: str, first: int = 1) -> Iterator[int]:
        """The numbers of the steps or epochs that are left, up to the last. For each, the caller appends a row.

        On a terminal a progress bar shows the label and the loss.
        """
        numbers, saved = range(first, last + 1), time.monotonic()
        left = numbers[len(self.rows) :]
        shown = bar(left, label, self.columns[0], total=len(numbers), initial=len(self.rows))
        for number in shown:
            yield number
            shown.set_postfix(loss=self.rows[-1][self.columns.index("loss")], refresh=False)
            if time.monotonic() - saved > SECONDS_BETWEEN_STATES:
                unfinished = self.state.with_suffix(".unfinished")
                states = {name: part.state_dict() for name, part in self.parts.items()}
                torch.save({"log": self.rows, **states}, unfinished)
                unfinished.rename(self.state)
                self._write()
                saved = time.monotonic()

    def _write(self) -> None:
        write(self.table, pd.DataFrame(self.rows, columns=self.columns).to_csv(index=False))

    def finish(self) -> None:
        """Mark the training as finished. Everything else that it leaves must have been written."""
        self._write()
        for left in (self.state.with_suffix(".unfinished"), self.state):
            left.unlink(missing_ok=True)
