"""Tables of texts in files and in memory, with common access to their columns.

In files: CSV, TSV, JSON, JSON lines, Parquet, Arrow and Feather, also compressed. In memory: frames
of pandas and polars, Arrow tables, ``datasets``, dictionaries of columns, rows as dictionaries.
Only the columns needed are read, and streams of rows stay streams.
"""

import csv
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from analysis_lib.corpora.conversations import Answered, Conversation, is_messages
from analysis_lib.corpora.reading import (
    ending,
    is_packed,
    lines_of,
    refuse_irregular,
    text_of,
    translated,
    unpacked,
)
from analysis_lib.errors import AnalysisError, near_names, shown

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Columns of prompts and answers, with the tokens of both if they are known.
ANSWERS = "prompt+answer"
_ANSWERS = ("prompt", "answer", "prompt_ids", "answer_ids")
# Types of the cells of texts, classes and units.
_SCALAR = str | int | float | None
_NO_PARQUET = "is no Parquet file or cannot be read"
_NO_ARROW = "is no Arrow file or cannot be read"


class Table(NamedTuple):
    """A table whose columns are read on request.

    Attributes:
        name: the path, or the type of the object.
        header: the names of the columns, in order; empty for an empty file.
        select: returns the rows of some columns, each as a tuple of its cells.
        is_stream: whether its rows can be read only once, one by one.
    """

    name: str
    header: list
    select: Callable[[Sequence], Iterable[tuple]]
    is_stream: bool = False

    def rows(self, columns: Sequence[str]) -> Iterable[tuple]:
        """The rows of some columns of a file, each as a tuple of its cells.

        Raises:
            AnalysisError: there is no such column, or several of that name.
        """
        for column in columns:
            count = self.header.count(column)
            if not self.header:
                raise AnalysisError(
                    f"{self.name} is empty: it needs a header row and at least one utterance"
                )
            if count > 1:
                raise AnalysisError(
                    f"{self.name} has {count} columns named {column}: rename all but one"
                )
            if not count:
                near = near_names(column, self.header)
                raise AnalysisError(f"{self.name} has no column {column}: {near}")
        return self.select(columns)

    def texts(self, column: str) -> list[str | Conversation]:
        """The cells of a column of a file: conversations if it holds messages, else texts.

        Raises:
            AnalysisError: as :meth:`column`; or a message without role or content.
        """
        cells = [cell for (cell,) in self.rows([column])]
        if not any(map(is_messages, cells)):
            return self._as_texts(column, cells)
        texts = []
        for number, cell in enumerate(cells, 1):
            if not is_messages(cell):
                raise AnalysisError(
                    f"{self.name}: row {number} holds no messages: remove it, or complete it"
                )
            texts.append(Conversation.of(f"{self.name}: row {number}", cell))
        return texts

    def answers(self) -> list[Answered]:
        """Prompts with their answers, and the tokens of both where the table has them.

        Raises:
            AnalysisError: an answer without a token, or a cell that is neither text nor tokens.
        """
        columns = [column for column in _ANSWERS if column in self.header]
        answers = []
        for number, cells in enumerate(self.rows(columns), 1):
            given = dict(zip(columns, cells, strict=True))
            answers.append(Answered.of(f"{self.name}: row {number}", **given))
        return answers

    def column(self, column: str) -> list[str]:
        """The cells of a column of a file as texts; a missing cell is empty.

        Raises:
            AnalysisError: there is no such column, or several of that name, or it does not hold
                texts.
        """
        return self._as_texts(column, (cell for (cell,) in self.rows([column])))

    def paths(self, column: str) -> list[list[str]]:
        """The paths in each cell of a column: one, or a list of several; a missing cell is empty.

        Raises:
            AnalysisError: as :meth:`column`.
        """
        paths = []
        for (cell,) in self.rows([column]):
            several = cell if isinstance(cell, list) else [cell]
            paths.append(self._as_texts(column, several))
        return paths

    def _as_texts(self, column: str, cells: Iterable) -> list[str]:
        texts = []
        for cell in cells:
            if isinstance(cell, list):
                raise AnalysisError(
                    f"{self.name}: column {column} holds {shown(cell)}: give texts; in a list, "
                    "messages with role and content, or paths of images"
                )
            if not isinstance(cell, _SCALAR):
                kind = type(cell).__name__
                raise AnalysisError(
                    f"{self.name}: column {column} holds a {kind}: name a column of texts"
                )
            # NaN, which is not equal to itself, is a missing cell.
            text = "" if cell is None or cell != cell else str(cell)
            texts.append(text)
        return texts


def open_table(data: Path | Iterable) -> Table:
    """A table in a file or in memory.

    Data without columns, such as a list of texts, has an empty header, and each row is an item.

    Raises:
        AnalysisError: the file is not in the format of its name; the object has neither texts nor
            rows.
    """
    if isinstance(data, Path):
        return _FORMATS.get(ending(data), _separated)(data)
    return _in_memory(data)


def _separated(path: Path) -> Table:
    """A table whose cells are separated by commas, tabs, semicolons or bars."""
    text = text_of(path)
    first_line = text.partition("\n")[0]
    delimiter = _delimiter(path, first_line)
    # In tab-separated files, quotation marks are part of the text, unless the header has them, too.
    is_quoted = delimiter != "\t" or first_line.startswith('"')
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    # The field limit of the csv module is 128 KiB; an utterance may be longer.
    csv.field_size_limit(2**31 - 1)
    lines = io.StringIO(text, newline="")
    with translated(path, "is not a well-formed table"):
        rows = list(csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True))
    _warn_of_lines_in_cells(path, rows)
    header, *body = rows or [[]]
    for number, row in enumerate(body, 2):
        if len(row) > len(header):
            cells = f"{len(row)} cells, and the header {len(header)}"
            raise AnalysisError(
                f"{path}: row {number} has {cells}: put what has the separator in it between quotes"
            )

    def select(columns: Sequence[str]) -> Iterator[tuple]:
        for number, row in enumerate(body, 2):
            cells = dict(zip(header, row, strict=False))
            for column in columns:
                if row and column not in cells:
                    fault = f"row {number} has no column {column}"
                    raise AnalysisError(f"{path}: {fault}: mend the row or its quotes")
            if row:
                yield tuple(cells[column] for column in columns)

    return Table(str(path), header, select)


def _delimiter(path: Path, first_line: str) -> str:
    usual = "\t" if ending(path) == ".tsv" else ","
    likely = max(";\t|", key=first_line.count)
    if usual in first_line or likely not in first_line:
        return usual
    note = "note: the columns of %s are taken to be separated by %r"
    logging.getLogger(__name__).warning(note, path, likely)
    return likely


def _warn_of_lines_in_cells(path: Path, rows: list[list[str]]) -> None:
    several = 0
    for row in rows:
        several += any("\n" in cell for cell in row)
    if several:
        note = (
            "note: %s of the rows of %s have a cell of several lines: if that is wrong, look for "
            "single quotation marks"
        )
        logging.getLogger(__name__).warning(note, several, path)


def _json(path: Path) -> Table:
    """A table of JSON objects, one per line or all in one array."""
    records = []
    names = {}
    for number, record in _numbered_records(path):
        if not isinstance(record, dict):
            raise AnalysisError(
                f'{path}: line {number} is no JSON object: give lines such as {{"text": "..."}}'
            )
        records.append(record)
        names |= dict.fromkeys(record)
    return Table(str(path), [*names], lambda columns: _cells_of(records, columns))


def _numbered_records(path: Path) -> Iterator[tuple[int, object]]:
    text = text_of(path)
    if text.lstrip().startswith("["):
        # A damaged array is refused below, with the number of the line.
        with suppress(ValueError, RecursionError):
            yield from enumerate(json.loads(text), 1)
            return
    for number, line in enumerate(lines_of(text), 1):
        if line.strip():
            with translated(f"{path}: line {number}", "is no JSON"):
                record = json.loads(line)
            yield number, record


def _parquet(path: Path) -> Table:
    # Imported here: Arrow takes half a second.
    from pyarrow import parquet

    refuse_irregular(path)

    def opened() -> parquet.ParquetFile:
        source = io.BytesIO(unpacked(path)) if is_packed(path) else path
        return parquet.ParquetFile(source)

    def select(columns: Sequence[str]) -> Iterable[tuple]:
        with translated(path, _NO_PARQUET), opened() as file:
            # Other columns, such as embeddings of the texts, are not unpacked.
            return _columns_of(file.read(columns=[*columns]), columns)

    with translated(path, _NO_PARQUET), opened() as file:
        return Table(str(path), file.schema_arrow.names, select)


def _arrow(path: Path) -> Table:
    """A table in an Arrow file (also Feather), or in an Arrow stream of ``datasets``."""
    import pyarrow as pa

    refuse_irregular(path)

    def opened(*fields: int) -> "pa.RecordBatchReader | pa.ipc.RecordBatchFileReader":
        options = pa.ipc.IpcReadOptions(included_fields=[*fields])
        source = pa.py_buffer(unpacked(path)) if is_packed(path) else pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source, options=options)
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(source, options=options)

    def select(columns: Sequence[str]) -> Iterable[tuple]:
        fields = [header.index(column) for column in columns]
        with translated(path, _NO_ARROW):
            return _columns_of(opened(*fields).read_all(), columns)

    with translated(path, _NO_ARROW):
        header = opened().schema.names
    return Table(str(path), header, select)


_FORMATS = {
    ".csv": _separated,
    ".tsv": _separated,
    ".json": _json,
    ".jsonl": _json,
    ".ndjson": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
ENDINGS = {*_FORMATS}


def _in_memory(data: Iterable) -> Table:
    import pandas as pd
    import pyarrow as pa

    name = type(data).__name__
    # Lazy frames of polars are collected; frames of polars are recognised by `iter_rows`.
    if hasattr(data, "collect"):
        data = data.collect()
    if hasattr(data, "iter_rows"):
        data = data.to_pandas()
    if isinstance(data, Mapping):
        with translated(f"a {name}", "of columns that are not equally long is no table"):
            data = pd.DataFrame(dict(data))
    if isinstance(data, pd.DataFrame):
        return Table(name, [*data.columns], lambda columns: _frame_rows(data, columns))
    if isinstance(data, pa.Table | pa.RecordBatch):
        return Table(name, data.schema.names, lambda columns: _columns_of(data, columns))
    if hasattr(data, "select_columns") and data.column_names:
        # Other columns of a dataset, such as images, are not decoded.
        return Table(
            name,
            data.column_names,
            lambda columns: _cells_of(data.select_columns([*columns]), columns),
            is_stream=True,
        )
    if isinstance(data, pa.Array | pa.ChunkedArray):
        data = data.to_pylist()
    return _iterated(name, data, is_stream=not isinstance(data, list | tuple | pd.Series))


def _iterated(name: str, data: Iterable, is_stream: bool) -> Table:
    """Texts, or rows as dictionaries, that are read one by one."""
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise AnalysisError(
            f"a {name} is no corpus: give texts in a list, a table with column=, or a name"
        )
    if isinstance(data, set | frozenset):
        fault = f"a {name} of texts has another order in every process"
        raise AnalysisError(f"{fault}: give sorted(...)")
    items = iter(data)
    first = [*islice(items, 1)]
    rows = chain(first, items)
    if first and isinstance(first[0], Mapping):
        return Table(name, [*first[0]], lambda columns: _cells_of(rows, columns), is_stream)
    return Table(name, [], lambda _: zip(rows), is_stream)


def _cells_of(records: Iterable[Mapping], columns: Sequence) -> Iterator[tuple]:
    """The cells of rows that are dictionaries; None if a row lacks the column."""
    for record in records:
        yield tuple(record.get(column) for column in columns)


def _frame_rows(frame: "pd.DataFrame", columns: Sequence) -> Iterable[tuple]:
    # A frame without columns has none to select.
    return zip(*(frame.get(column, ()) for column in columns), strict=True)


def _columns_of(table: "pa.Table | pa.RecordBatch", columns: Sequence[str]) -> Iterable[tuple]:
    cells = [table[column].to_pylist() for column in columns]
    return zip(*cells, strict=True)
