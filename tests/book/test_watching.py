"""How far notebooks are: on a terminal a bar of their cells, in a log a line for each and what runs
inside them.
"""

import asyncio
import io
import sys

import pytest
from planted_notebooks import write
from terminals import Terminal

from analysis_book.build import notebook, run_notebook, watching


@pytest.fixture
def often(monkeypatch) -> None:
    """Many lines in a log."""
    monkeypatch.setattr(watching, "SECONDS_BETWEEN_LINES", 0.01)


def watch_two() -> None:
    """Two notebooks, one after the other, each of two cells."""

    async def work() -> None:
        async with watching.watched(["part/one", "two"], 4, 1) as watch:
            for name in ("part/one", "two"):
                line_file = watch.begin(name)
                line_file.write_text("minilm on news: 3 of 9 texts, 00:10 left")
                watch.cell_ends()
                await asyncio.sleep(0.7)
                watch.cell_ends()
                watch.end(name)
                line_file.unlink()

    asyncio.run(work())


def test_a_log_of_notebooks_has_a_line_for_each_and_what_runs(monkeypatch, often):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    watch_two()
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    ended = [line for line in lines if line.startswith("executed")]
    assert ended == ["executed part/one (1 of 2)", "executed two (2 of 2)"]
    assert "0 of 2 notebooks: part-one minilm on news: 3 of 9 texts, 00:10 left" in lines
    assert "1 of 2 notebooks: two minilm on news: 3 of 9 texts, 00:10 left" in lines


def test_a_terminal_shows_the_cells_of_notebooks_and_what_runs(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    watch_two()
    assert "4/4" in stream.getvalue()
    assert "part-one minilm on news: 3 of 9 texts" in stream.getvalue()
    assert "executed part/one" in stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_notebook_that_runs_shows_how_far_it_is(monkeypatch, often, tmp_path, stream):
    monkeypatch.setattr(sys, "stderr", stream := stream())

    async def run(copy, _scratch, _sockets, _threads, on_cell, line_file) -> tuple:
        line_file.write_text("minilm on news: 3 of 9 texts, 00:10 left")
        for number, cell in enumerate(cell for cell in copy.cells if cell.cell_type == "code"):
            cell.execution_count = number + 1
            on_cell()
        await asyncio.sleep(0.7)
        return None, None, 0.0

    monkeypatch.setattr(notebook, "_run", run)
    run_notebook(
        write(tmp_path / "mine.ipynb", "a = 1", "b = 2"), {}, tmp_path / "out" / "mine.ipynb"
    )
    assert "mine minilm on news: 3 of 9 texts" in stream.getvalue()
    assert ("3/3" in stream.getvalue()) == stream.isatty()
