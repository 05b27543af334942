"""Texts that a program holds, or makes as it goes: a list, a column of a table, or anything that gives texts."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

import pandas as pd
import pyarrow as pa

from analysis_lib.corpora.corpus import Pair
from analysis_lib.errors import AnalysisError, near_names

# So many texts are in memory at a time.
_BATCH = 1000
_SCHEMA = pa.schema([("text", pa.large_string())])


class TextFile(Sequence):
    """Texts in an Arrow file, of which some are in memory at a time; in another process they are a list.

    Args:
        file: batches of ``_BATCH`` texts, the last of them perhaps shorter.
        places: which of the texts, in order.
    """

    def __init__(self, file: pa.ipc.RecordBatchFileReader, places: range):
        self._places, self._batch = places, lru_cache(1)(lambda number: file.get_batch(number)["text"].to_pylist())
        self._file = file

    @classmethod
    def written(cls, texts: Iterator[str]) -> "TextFile":
        """A file of these texts that goes when it is no longer used."""
        count = 0
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            with pa.ipc.new_file(file, _SCHEMA) as out:
                while batch := [*islice(texts, _BATCH)]:
                    if any(isinstance(text, Pair) for text in batch):
                        raise AnalysisError("pairs of texts are held in memory: give them in a list")
                    out.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], _SCHEMA))
                    count += len(batch)
            file.flush()
            # What is open stays readable without its name.
            return cls(pa.ipc.open_file(pa.OSFile(file.name)), range(count))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int | slice) -> "str | TextFile":
        if isinstance(place, slice):
            return TextFile(self._file, self._places[place])
        batch, row = divmod(self._places[place], _BATCH)
        return self._batch(batch)[row]

    def __reduce__(self) -> tuple:
        return list, ([*self],)


def text_items(data: Iterable, column: str | None = None) -> tuple[str, Iterator[str | Pair], bool]:
    """What a corpus of some texts is called, the texts or pairs in order, and whether they are in memory already.

    A missing text is empty.

    Args:
        data: texts, or pairs of texts; a DataFrame or a ``datasets.Dataset``; or anything else that gives texts.
        column: of a table, the texts.

    Raises:
        AnalysisError: it is a single text or gives none; a table lacks the column; an item is no text (its number is
            given).
    """
    name, columns = type(data).__name__, getattr(data, "columns", getattr(data, "column_names", None))
    if columns is not None:
        if column not in columns:
            raise AnalysisError(f"give column=, the texts of the {name}: {near_names(str(column), map(str, columns))}")
        name, data = f"{name}:{column}", data[column] if isinstance(data, pd.DataFrame) else (r[column] for r in data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise AnalysisError(f"a {name} is no corpus: give texts in a list, a table with column=, or a name")
    held = isinstance(data, list | tuple | pd.Series)
    return name, (_text(number, item) for number, item in enumerate(data, 1)), held


def _text(number: int, item: object) -> str | Pair:
    match item:
        case str() | Pair():
            return item
        case (str() as first, str() as second):
            return Pair(first, second)
    if pd.api.types.is_scalar(item) and pd.isna(item):
        return ""
    raise AnalysisError(f"item {number} is a {type(item).__name__}: give texts, or pairs of texts")
