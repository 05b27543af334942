"""Corpora of texts that a program holds or generates: lists, columns of tables, streams."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice

import pandas as pd
import pyarrow as pa

from analysis_lib.corpora.captions import (
    COLUMNS,
    TEXT,
    WITH_TEXT,
    captioned_cell,
    kind_of_cell,
)
from analysis_lib.corpora.conversations import Answered, Conversation, is_messages
from analysis_lib.corpora.corpus import Example, Pair, Reader, TextItem
from analysis_lib.corpora.tables import Table, open_table
from analysis_lib.errors import AnalysisError, near_names, shown

# Number of texts of a stream that are in memory at a time.
_BATCH = 1000
_SCHEMA = pa.schema([("text", pa.large_string())])


class TextFile(Sequence):
    """Texts of a stream in a temporary Arrow file, with one batch in memory at a time.

    Another process receives them as a list.

    Args:
        batch: returns the texts of a batch by its number: ``_BATCH`` texts, fewer in the last
            batch.
        indices: the indices of the texts, in order.
    """

    def __init__(self, batch: Callable[[int], list[str]], indices: range):
        self._batch = batch
        self._indices = indices

    @classmethod
    def written(cls, texts: Iterator[str]) -> "TextFile":
        """A file of these texts, which disappears when it is no longer used."""
        count = 0
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            with pa.OSFile(file.name, "wb") as opened, pa.ipc.new_file(opened, _SCHEMA) as out:
                while batch := [*islice(texts, _BATCH)]:
                    if not all(isinstance(text, str) for text in batch):
                        raise AnalysisError(
                            "pairs and conversations are held in memory: give them in a list"
                        )
                    out.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], _SCHEMA))
                    count += len(batch)
            # An open file stays readable after its name is gone.
            stored = pa.ipc.open_file(pa.OSFile(file.name))

        @lru_cache(1)
        def read(number: int) -> list[str]:
            return stored.get_batch(number)["text"].to_pylist()

        return cls(read, range(count))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int | slice) -> "str | TextFile":
        if isinstance(index, slice):
            # Slices share one cached batch; a cache per slice would end up holding the corpus.
            return TextFile(self._batch, self._indices[index])
        number, row = divmod(self._indices[index], _BATCH)
        return self._batch(number)[row]

    def __reduce__(self) -> tuple:
        return list, ([*self],)


def object_reader(
    data: Iterable,
    column: str | Sequence[str] | None = None,
    units: str | None = None,
) -> Reader:
    """The reader of a corpus of texts or of a table in memory; a missing text is empty.

    Args:
        data: texts, or pairs of texts; or a table, see :mod:`analysis_lib.corpora.tables`.
        column: the column of texts in a table; two make pairs.
        units: the column of a table with the unit of each text.

    Raises:
        AnalysisError: the data are a single text; a table lacks the column, or has it twice; an
            item is not a text (the message gives its number).
    """
    columns = _column_names(column, units)
    table = open_table(data)
    if columns == [None]:
        columns = _columns_with_text(table) or columns
    wanted = columns if units is None else [*columns, units]
    name = table.name
    if table.header:
        name = f"{name}:{','.join(map(str, columns))}"
        _require_columns(table, wanted)
    elif wanted != [None]:
        raise AnalysisError(
            f"a {name} of texts has no columns: leave column= and units= out, or give a table"
        )

    rows = table.select(wanted)
    kind = None
    if len(columns) > 1:
        rows = iter(rows)
        first = [*islice(rows, 1)]
        rows = chain(first, rows)
        kind = kind_of_cell(first[0][0], columns[0]) if first else None

    def read() -> Iterator[Example]:
        for number, cells in enumerate(rows, 1):
            unit = None if units is None else _unit(cells[-1])
            if kind is not None:
                yield Example(captioned_cell(number, kind, *cells[:2]), unit=unit)
                continue
            text = _text(number, cells[0])
            if len(columns) > 1:
                text = _text(number, (text, _text(number, cells[1])))
            yield Example(text, unit=unit)

    # A file of texts cannot hold pairs.
    fits_in_memory = not table.is_stream or len(columns) > 1
    return Reader(name, WITH_TEXT.get(kind, "text"), read, lambda: name, fits_in_memory)


def _columns_with_text(table: Table) -> list[str]:
    """The columns of images or sounds and of their texts, by their names; empty without them."""
    named = [name for name in COLUMNS if name in table.header]
    return [named[0], TEXT] if named and TEXT in table.header else []


def _column_names(column: str | Sequence[str] | None, units: str | None) -> list:
    """The columns of the texts: one, or two that make pairs."""
    if not isinstance(units, str | int | None):
        raise AnalysisError(f"units= is {shown(units)}: give the name of a column")
    columns = [*column] if isinstance(column, list | tuple) else [column]
    are_names = all(isinstance(name, str | int | None) for name in columns)
    if not are_names or len(columns) not in (1, 2):
        raise AnalysisError(
            f"column= is {shown(column)}: give the name of a column, or of two that make pairs"
        )
    return columns


def _require_columns(table: Table, columns: Sequence) -> None:
    for column in columns:
        count = table.header.count(column)
        if count == 1:
            continue
        fault = near_names(str(column), map(str, table.header))
        if count:
            fault = "is there several times"
        if column is not None:
            fault = f"{column}, {fault}"
        raise AnalysisError(f"give column=, the texts of the {table.name}: {fault}")


def _is_missing(cell: object) -> bool:
    return bool(pd.api.types.is_scalar(cell) and pd.isna(cell))


def _unit(cell: object) -> str | None:
    return None if _is_missing(cell) else str(cell)


def _text(number: int, item: object) -> TextItem:
    match item:
        case str() | Pair() | Conversation() | Answered():
            return item
        case (str() as first, str() as second):
            return Pair(first, second)
    if is_messages(item):
        return Conversation.of(f"item {number}", item)
    if _is_missing(item):
        return ""
    kind = type(item).__name__
    raise AnalysisError(f"item {number} is a {kind}: give texts, or pairs of texts")
