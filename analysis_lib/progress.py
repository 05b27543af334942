"""What is said along the way: notes, and progress bars, which reach the terminal of a build from its notebooks."""

import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from analysis_lib.errors import AnalysisError

try:
    from tqdm import tqdm
except ValueError as error:
    raise AnalysisError(
        f"a variable TQDM_... of the environment is none that tqdm takes ({error}): unset it"
    ) from error

# Names the file in which the current line of a bar is kept, instead of being shown.
LINE_FILE = "ANALYSIS_LIB_PROGRESS"
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {remaining} left{postfix}"


class Once(logging.Filter):
    """Of notes on models, such as the checkpoints of a run, passes each the first time, whatever the model."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        words = str(record.args[-1]) if isinstance(record.args, tuple) and record.args else record.getMessage()
        new = words not in self._said
        self._said.add(words)
        return new


class _LineFile(io.TextIOBase):
    """A stream that keeps the last line written to it in a file."""

    def __init__(self, path: str):
        self.path = Path(path)

    def write(self, text: str) -> None:
        # Bars inside others move the cursor.
        if line := text.replace("\x1b[A", "").strip():
            self.path.write_text(line, encoding="utf-8")


def bar(
    iterable: Iterable | None = None, description: str | None = None, *, show: bool | None = None, **settings
) -> tqdm:
    """tqdm's bar.

    Args:
        iterable: what it counts, if it does so by itself.
        description: what goes on.
        show: whether to show it; on a terminal only unless given. In a build it always is.
        settings: of tqdm.
    """
    if path := os.environ.get(LINE_FILE):
        return tqdm(iterable, description, file=_LineFile(path), mininterval=0.5, bar_format=LINE, **settings)
    return tqdm(iterable, description, disable=None if show is None else not show, **settings)
