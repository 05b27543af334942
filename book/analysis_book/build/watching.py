"""The progress of notebooks: on a terminal a bar of their cells, in a log now and then a line.

Both show what runs inside the cells.
"""

import asyncio
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from tqdm import tqdm

from analysis_lib.progress import SECONDS_BETWEEN_LINES, is_log


class Watch:
    """The progress of notebooks that run.

    Args:
        notebooks: how many there are.
        cells: how many code cells they have.
        folder: where the bars that run inside the cells keep their lines.
    """

    def __init__(self, notebooks: int, cells: int, folder: Path):
        self.notebooks = notebooks
        self.folder = folder
        self.executed = 0
        self.in_log = is_log(sys.stderr)
        self.bar = tqdm(total=cells, unit="cell", disable=not cells or self.in_log)

    def begin(self, name: str) -> Path:
        """A notebook begins: the file for the line of what runs inside its cells."""
        line_file = self.folder / name.replace("/", "-")
        line_file.write_text("")
        return line_file

    def cell_ends(self) -> None:
        self.bar.update()

    def end(self, name: str) -> None:
        """A notebook is executed."""
        self.executed += 1
        count = f" ({self.executed} of {self.notebooks})" if self.in_log else ""
        tqdm.write(f"executed {name}{count}", file=sys.stderr)

    def running(self) -> list[str]:
        """Of each notebook that runs, its name and what runs inside its cells."""
        files = sorted(self.folder.iterdir())
        return [f"{path.name} {path.read_text(encoding='utf-8')}".strip() for path in files]


@asynccontextmanager
async def watched(notebooks: Collection[str], cells: int, rows: int) -> AsyncIterator[Watch]:
    """Inside it, what runs is shown, at most so many rows below the bar."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(len(notebooks), cells, Path(folder))
        lines = _lines(watch) if watch.in_log else _rows(watch, rows)
        showing = asyncio.create_task(lines)
        try:
            yield watch
        finally:
            showing.cancel()
            watch.bar.close()


async def _lines(watch: Watch) -> None:
    while True:
        await asyncio.sleep(SECONDS_BETWEEN_LINES)
        if running := watch.running():
            done = "running"
            if watch.notebooks > 1:
                done = f"{watch.executed} of {watch.notebooks} notebooks"
            print(f"{done}: {' | '.join(running)}", file=sys.stderr, flush=True)


async def _rows(watch: Watch, count: int) -> None:
    rows = []
    for i in range(count):
        rows.append(tqdm(bar_format="{desc}", position=1 + i, leave=False, disable=None))
    while True:
        for row, line in itertools.zip_longest(rows, watch.running()[:count], fillvalue=""):
            row.set_description_str(line)
        watch.bar.refresh()
        await asyncio.sleep(0.5)
