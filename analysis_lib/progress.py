"""Progress bars on a terminal; those of a notebook that a build executes reach the terminal of the build."""

import io
import os
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

# Names the file in which the current line of a bar is kept, instead of being shown.
LINE_FILE = "ANALYSIS_LIB_PROGRESS"
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {remaining} left{postfix}"


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
