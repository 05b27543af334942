"""Notes and progress bars; in a build, bars of notebooks reach its terminal."""

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

# Variable that names a file for the current line of a bar, which is then not shown.
LINE_FILE = "ANALYSIS_LIB_PROGRESS"
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {remaining} left{postfix}"
# Seconds between lines in a log; shorter work has none.
SECONDS_BETWEEN_LINES = 60


class Once(logging.Filter):
    """A filter that passes each note once.

    A note with a ``subject``, such as a model, passes once for every subject.
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
    """A stream that receives the lines of a bar one by one, without cursor movements."""

    def write(self, text: str) -> None:
        # Nested bars move the cursor.
        if line := text.replace("\x1b[A", "").strip():
            self.write_line(line)

    def write_line(self, line: str) -> None:
        raise NotImplementedError


class _LineFile(_Lines):
    """A stream that keeps the last line in a file."""

    def __init__(self, path: str):
        self.path = Path(path)

    def write_line(self, line: str) -> None:
        self.path.write_text(line, encoding="utf-8")


class _Log(_Lines):
    """A stream that writes one line below the other."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write_line(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


def is_log(stream: TextIO | None) -> bool:
    """Whether a stream is a log, not a terminal or a notebook, where a line can be overwritten."""
    in_notebook = type(stream).__module__.startswith("ipykernel")
    return stream is not None and not in_notebook and not stream.isatty()


def bar(
    iterable: Iterable | None = None,
    description: str | None = None,
    *,
    show: bool | None = None,
    **settings,
) -> tqdm:
    """A progress bar of tqdm; in a log, where nothing can be overwritten, a line a minute.

    Args:
        iterable: the items to count, if the bar counts by itself.
        description: the task.
        show: whether to show it; by default, in a terminal or a log. In a build it is always shown.
        settings: further arguments of tqdm.
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
    # With None, tqdm shows a bar in a terminal.
    hidden = None if show is None else not show
    return tqdm(iterable, description, disable=hidden, **settings)
