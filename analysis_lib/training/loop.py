"""What every training here shares: settings in a name, the optimizer, one thread, one process at a time."""

import fcntl
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from analysis_lib.errors import AnalysisError


def split_settings(name: str) -> tuple[str, Callable[[], dict[str, float]]]:
    """What is trained, and how its settings differ, from a name such as ``digits-vit@steps=50``.

    The settings are read when called for: ``@`` may mean something else in a name that is not ours.

    Raises:
        AnalysisError: when called, a difference that is not a setting and a number.
    """
    trained, *differences = name.split("@")

    def read() -> dict[str, float]:
        settings = {}
        for difference in differences:
            setting, _, value = difference.partition("=")
            try:
                settings[setting] = float(value) if "." in value or "e-" in value else int(value)
            except ValueError:
                raise AnalysisError(
                    f"{name}: {difference!r} is no setting: write it as {trained}@steps=50@seed=1"
                ) from None
        return settings

    return trained, read


def optimizer(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices; biases and norms have none."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay)


def drawn_seed(*numbers: int) -> int:
    """A seed that has nothing to do with that of any other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def write(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def save_state(path: Path, state: dict) -> None:
    """Save tensors and numbers from which a training goes on, whole, or leave the last ones as they were."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.rename(path)


def versions() -> dict[str, str]:
    """Of the packages on which the weights depend."""
    return {name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")}


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums over several threads are rounded otherwise: one thread gives the same weights however many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """While no other process holds the lock; others wait. The lock of a process that is killed ends with it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
