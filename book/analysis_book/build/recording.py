"""IPython's extension of a build: figures bring their data as CSV, cells the library's notes.

The metadata of an output say which variables of the notebook the tables in its CSV were, so that a
script that draws the figure can read them from there (``book/_ext/copying.py``).
"""

import functools
import logging
from collections.abc import Callable

import pandas as pd
import seaborn as sns
from IPython import get_ipython
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from analysis_book import figures
from analysis_book.figures.slider import png, svg
from analysis_lib.progress import Once


def load_ipython_extension(_: object) -> None:
    """Let seaborn's functions note what they draw, and figures show it as CSV, too."""
    for name in dir(sns):
        if name.endswith(("plot", "heatmap")):
            setattr(sns, name, _noting(getattr(sns, name)))
    figures.Slider._repr_mimebundle_ = of_frames
    Figure._repr_mimebundle_ = of_figure
    notes = _Notes()
    notes.addFilter(Once())
    logging.getLogger("analysis_lib").addHandler(notes)


class _Notes(logging.Handler):
    """Shows on the page what the library has to say of what was measured."""

    def emit(self, record: logging.LogRecord) -> None:
        words = figures.plain(record.getMessage().removeprefix("note: "))
        display(Markdown(f":::{{note}}\n{words}\n:::"))


def _noting(draw: Callable) -> Callable:
    @functools.wraps(draw)
    def noting(*arguments: object, **named: object) -> object:
        shown = draw(*arguments, **named)
        data = named.get("data", next(iter(arguments), None))
        if isinstance(data, pd.DataFrame):
            shown.figure.__dict__.setdefault("_drawn", []).append(data)
        return shown

    return noting


def of_figure(figure: Figure, **_: object) -> tuple[dict[str, str], dict[str, list]]:
    """A figure as PNG, and what it is drawn from; with ``tables``, where seaborn has drawn it."""
    pictures = {"image/png": png(figure, bbox_inches="tight")}
    described = [_described(table) for table in _tables(figure)]
    return pictures | _as_csv(drawn(figure)), {"tables": described} if described else {}


def of_frames(slider: figures.Slider, **_: object) -> dict[str, str]:
    """The frame that a slider begins with as SVG and PNG, and the tables of all as CSV.

    The first column of the CSV is the frame.
    """
    tables = {}
    for key, figure in slider.frames.items():
        table = drawn(figure)
        if table is not None:
            tables[key] = table
    whole = pd.concat(tables, names=["frame"]).reset_index(0) if tables else None
    *_, initial = slider.frames.values()
    pictures = {"image/svg+xml": svg(initial), "image/png": png(initial)}
    return pictures | _as_csv(whole)


def _as_csv(table: pd.DataFrame | None) -> dict[str, str]:
    if table is None:
        return {}
    return {"text/csv": table.infer_objects().to_csv(index=False, float_format="%.5g")}


def _tables(figure: Figure) -> list[pd.DataFrame]:
    """The tables from which seaborn has drawn a figure, each once."""
    return [*{id(table): table for table in getattr(figure, "_drawn", ())}.values()]


def drawn(figure: Figure) -> pd.DataFrame | None:
    """The tables from which seaborn has drawn a figure, one below the other.

    Of several tables, the column ``table`` has the number, from 0. Without any, they are the points
    of its lines, if it has lines.
    """
    tables = _tables(figure)
    if tables:
        named = []
        for number, table in enumerate(tables):
            columns = table.reset_index(_levels(table))
            if len(tables) > 1:
                columns.insert(0, "table", number, allow_duplicates=True)
            named.append(columns)
        return pd.concat(named, ignore_index=True)
    lines = [line for axes in figure.axes for line in axes.lines]
    points = [(str(line.get_label()), *point) for line in lines for point in line.get_xydata()]
    return pd.DataFrame(points, columns=["line", "x", "y"]) if points else None


def _levels(table: pd.DataFrame) -> list[str]:
    """The names of the levels of a table's index that have one."""
    return [name for name in table.index.names if name]


def _described(table: pd.DataFrame) -> dict[str, list | dict]:
    """What the CSV of a table does not say.

    Returns:
        ``names``, of the variables of the notebook that are the table; ``columns``, with the levels
        of its index; ``index``, the names of these; ``texts``, columns of texts that look like
        numbers; and ``orders``, the categories of columns, as text, where their order is not that
        of the rows.
    """
    shell = get_ipython()
    variables = shell.user_ns if shell else {}
    names = [name for name, value in variables.items() if value is table and name[0] != "_"]
    texts = []
    orders = {}
    for name, column in table.items():
        if isinstance(column.dtype, pd.CategoricalDtype):
            categories = column.cat.categories.astype(str).tolist()
            if [*column.dropna().astype(str).unique()] != categories:
                orders[name] = categories
        elif (
            column.map(type).eq(str).all() and pd.to_numeric(column, errors="coerce").notna().all()
        ):
            texts.append(name)
    index = _levels(table)
    columns = [*index, *map(str, table.columns)]
    return {"names": names, "columns": columns, "index": index, "texts": texts, "orders": orders}
