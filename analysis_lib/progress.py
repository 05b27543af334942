"""What is said along the way: notes, and progress bars, which reach the terminal of a build from
its notebooks.
"""

import io
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

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
# In a log, a line after so long; what takes less is not worth one.
SECONDS_BETWEEN_LINES = 60


class Once(logging.Filter):
    """Passes each note once.

    Of notes that have a ``subject``, such as a model, each is passed once for every subject.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        subject = getattr(record, "subject", "")
        words = str(record.args[-1]) if subject else record.getMessage()
        new = (subject, words) not in self._said
        self._said.add((subject, words))
        return new


class _Lines(io.TextIOBase):
    """A stream for a bar that gets each of its lines by itself, without what moves the cursor."""

    def write(self, text: str) -> None:
        # Bars inside others move the cursor.
        if line := text.replace("\x1b[A", "").strip():
            self.write_line(line)

    def write_line(self, line: str) -> None:
        raise NotImplementedError


class _LineFile(_Lines):
    """Keeps the last line in a file."""

    def __init__(self, path: str):
        self.path = Path(path)

    def write_line(self, line: str) -> None:
        self.path.write_text(line, encoding="utf-8")


class _Log(_Lines):
    """Writes one line below the other."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write_line(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


def is_log(stream: TextIO | None) -> bool:
    """Whether what is written stays: neither a terminal nor a notebook shows it, which overwrite a
    line.
    """
    in_notebook = type(stream).__module__.startswith("ipykernel")
    return stream is not None and not in_notebook and not stream.isatty()


def bar(
    iterable: Iterable | None = None,
    description: str | None = None,
    *,
    show: bool | None = None,
    **settings,
) -> tqdm:
    """tqdm's bar; in a log, where nothing can be overwritten, a line a minute.

    Args:
        iterable: what it counts, if it does so by itself.
        description: what goes on.
        show: whether to show it; in a terminal or a log unless given. In a build it always is.
        settings: of tqdm.
    """
    if path := os.environ.get(LINE_FILE):
        return tqdm(
            iterable,
            description,
            file=_LineFile(path),
            mininterval=0.5,
            bar_format=LINE,
            **settings,
        )
    if show is not False and is_log(sys.stderr):
        pause = SECONDS_BETWEEN_LINES
        settings |= {"delay": pause, "mininterval": pause, "maxinterval": pause, "bar_format": LINE}
        return tqdm(iterable, description, file=_Log(sys.stderr), **settings)
    # Left to itself, tqdm shows a bar where there is a terminal.
    hidden = None if show is None else not show
    return tqdm(iterable, description, disable=hidden, **settings)
