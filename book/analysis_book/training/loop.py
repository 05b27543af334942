"""The optimizer of every training, and a loop that resumes if its process was killed."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analysis_book.training.settings import state_path
from analysis_lib import store
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.progress import bar

# The most work that a kill can undo, if a step or an epoch takes no longer.
SECONDS_BETWEEN_STATES = 60


# --- Optimization ---------------------------------------------------------------------------------


def optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, and none on biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay)


def descend(
    loss: torch.Tensor, model: torch.nn.Module, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """A step of the schedule's optimizer down the gradient of the loss, whose norm is cut to 1."""
    schedule.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    schedule.optimizer.step()
    schedule.step()


def drawn_seed(*numbers: int) -> int:
    """A seed that is independent of the seeds of all other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def require_finite(loss: float, batch: str, learning_rate: float) -> float:
    """The loss of a batch, which is refused if the training has diverged."""
    if not math.isfinite(loss):
        raise AnalysisError(
            f"the loss of {batch} is {loss}: give another folder and a learning rate below "
            f"{learning_rate:g}"
        )
    return loss


@contextmanager
def isolated(device: str = "cpu") -> Iterator[None]:
    """Run on one thread, and restore the caller's random numbers.

    Sums over several threads round differently.
    """
    devices = [device] if device.startswith("cuda") else []
    with processes.threads(1), torch.random.fork_rng(devices=devices):
        yield


# --- Loop -----------------------------------------------------------------------------------------


class TrainingLog:
    """The steps or epochs of a training so far, and the state from which it resumes when killed.

    It ends with the same weights if the random numbers of a step depend only on the number of the
    step.

    Args:
        table: the CSV file of the rows. The state is a hidden file beside it until the training is
            finished.
        columns: of the table. The first counts steps or epochs; one is ``loss``.
        device: where the state is loaded.
        parts: what changes along the way, by name; each has a ``state_dict``.

    Attributes:
        rows: one per step or epoch.
    """

    def __init__(self, table: Path, columns: Sequence[str], device: str, **parts: Any) -> None:
        self.table = table
        self.state = state_path(table)
        self.columns = columns
        self.parts = parts
        self.rows: list[list[float | None]] = []
        self.kept = store.Entry(table.parent)
        read = partial(torch.load, map_location=device, weights_only=True)
        state = self.kept.read(self.state.name, read)
        if state is not None:
            self.rows = state["log"]
            for name, part in parts.items():
                part.load_state_dict(state[name])

    def remaining(self, last: int, label: str, first: int = 1) -> Iterator[int]:
        """The numbers of the steps or epochs that are left, up to the last.

        For each, the caller appends a row. On a terminal a progress bar shows the label and the
        loss.
        """
        numbers = range(first, last + 1)
        saved = time.monotonic()
        left = numbers[len(self.rows) :]
        shown = bar(left, label, unit=self.columns[0], total=len(numbers), initial=len(self.rows))
        for number in shown:
            yield number
            loss = self.rows[-1][self.columns.index("loss")]
            shown.set_postfix(loss=loss, refresh=False)
            if time.monotonic() - saved > SECONDS_BETWEEN_STATES:
                state = {name: part.state_dict() for name, part in self.parts.items()}
                state["log"] = self.rows
                self.kept.write(self.state.name, partial(torch.save, state))
                self._write()
                saved = time.monotonic()

    def _write(self) -> None:
        table = pd.DataFrame(self.rows, columns=self.columns)
        self.kept.write(self.table.name, table.to_csv(index=False))

    def finish(self) -> None:
        """Mark the training as finished. Everything else that it leaves must have been written."""
        self._write()
        self.kept.remove(self.state.name)
