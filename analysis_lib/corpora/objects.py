"""Texts that a program holds, or makes as it goes: a list, a column of a table, or anything that gives texts."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pandas as pd
import pyarrow as pa

from analysis_lib.corpora import packages
from analysis_lib.corpora.corpus import Pair
from analysis_lib.errors import AnalysisError, near_names

# So many texts are in memory at a time.
_BATCH = 1000
_SCHEMA = pa.schema([("text", pa.large_string())])


class TextFile(Sequence):
    """Texts in an Arrow file, of which some are in memory at a time.

    Another process reads those of a file that is kept from there; of one that is not, they are sent as a list.

    Args:
        batch: the texts of a batch by its number: ``_BATCH`` of them, of the last perhaps fewer.
        places: which of the texts, in order.
        path: of a file that is kept.
    """

    def __init__(self, batch: Callable[[int], list[str]], places: range, path: Path | None = None):
        self._batch, self._places, self._path = batch, places, path

    @classmethod
    def written(cls, texts: Iterator[str]) -> "TextFile":
        """A file of these texts that goes when it is no longer used."""
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            count = _write(Path(file.name), texts)
            # What is open stays readable without its name.
            return cls(_batches(pa.OSFile(file.name)), range(count))

    @classmethod
    def kept(cls, texts: Sequence[str], sha256: str) -> "TextFile":
        """A file of these texts, known by their hash, beside the packages, under ``derived``."""
        name = "texts.arrow"
        folder = packages.derived(sha256, "texts", lambda made: _write(made / name, iter(texts)))
        return cls.part(folder / name, range(len(texts)))

    @classmethod
    def part(cls, path: Path, places: range) -> "TextFile":
        """Those at some places of a file that is kept.

        Raises:
            AnalysisError: there is no such file: this process may be on another machine.
        """
        try:
            return cls(_batches(pa.memory_map(str(path))), places, path)
        except OSError as error:
            remedy = "let ANALYSIS_LIB_DATA name a folder that every worker sees, or run again if it was deleted"
            raise AnalysisError(f"{path}, in which the texts are, cannot be read here: {remedy}") from error

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int | slice) -> "str | TextFile":
        if isinstance(place, slice):
            # What is in memory is shared: parts that kept a batch each would hold the whole corpus in the end.
            return TextFile(self._batch, self._places[place], self._path)
        batch, row = divmod(self._places[place], _BATCH)
        return self._batch(batch)[row]

    def __reduce__(self) -> tuple:
        return (list, ([*self],)) if self._path is None else (TextFile.part, (self._path, self._places))


def _batches(source: pa.NativeFile) -> Callable[[int], list[str]]:
    file = pa.ipc.open_file(source)
    return lru_cache(1)(lambda number: file.get_batch(number)["text"].to_pylist())


def _write(path: Path, texts: Iterator[str]) -> int:
    """Write texts as batches; how many there were."""
    count = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as out:
        while batch := [*islice(texts, _BATCH)]:
            if any(isinstance(text, Pair) for text in batch):
                raise AnalysisError("pairs of texts are held in memory: give them in a list")
            out.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], _SCHEMA))
            count += len(batch)
    return count


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
