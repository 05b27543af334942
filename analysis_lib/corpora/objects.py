"""Texts that a program holds, or makes as it goes: a list, a column of a table, or anything that gives texts."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import pandas as pd
import pyarrow as pa

from analysis_lib.corpora import packages
from analysis_lib.corpora.corpus import Example, Pair, encodable
from analysis_lib.errors import AnalysisError, near_names, shown

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


def text_items(
    data: Iterable, column: str | Sequence[str] | None = None, units: str | None = None
) -> tuple[str, Iterator[Example], bool]:
    """What a corpus of some texts is called, the texts or pairs in order, and whether they are in memory already.

    A missing text is empty.

    Args:
        data: texts, or pairs of texts; a table of pandas, polars, Arrow or ``datasets``, or of columns in a dictionary;
            or anything else that gives texts, or rows as dictionaries.
        column: of a table, the texts; two make pairs.
        units: of a table, the column of what each text is a part of.

    Raises:
        AnalysisError: it is a single text or gives none; a table lacks the column, or has it twice; an item is no text
            (its number is given).
    """
    name, data = type(data).__name__, _in_pandas(data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise AnalysisError(f"a {name} is no corpus: give texts in a list, a table with column=, or a name")
    if isinstance(data, set | frozenset):
        raise AnalysisError(f"a {name} of texts has another order in every process: give sorted(...)")
    chosen = [*column] if isinstance(column, list | tuple) else [column]
    if not isinstance(units, str | int | None):
        raise AnalysisError(f"units= is {shown(units)}: give the name of a column")
    if len(chosen) not in (1, 2) or not all(isinstance(each, str | int | None) for each in chosen):
        raise AnalysisError(f"column= is {shown(column)}: give the name of a column, or of two that make pairs")
    wanted, held = (
        chosen if units is None else [*chosen, units],
        isinstance(data, list | tuple | pd.Series | pd.DataFrame),
    )
    if isinstance(data, pd.DataFrame):
        columns = [*data.columns]
        rows = zip(*(data[each] for each in wanted), strict=True) if {*wanted} <= {*columns} else ()
    else:
        first = [*islice(whole := iter(data), 1)]
        rows = chain(first, whole)
        if not first or not isinstance(first[0], Mapping):
            if column is not None or units is not None:
                raise AnalysisError(f"a {name} of texts has no columns: leave column= and units= out, or give a table")
            return name, (Example(_text(number, item)) for number, item in enumerate(rows, 1)), held
        columns, rows = [*first[0]], ([row.get(each) for each in wanted] for row in rows)
    for each in wanted:
        if columns.count(each) != 1:
            what = "is there several times" if each in columns else near_names(str(each), map(str, columns))
            said = what if each is None else f"{each}, {what}"
            raise AnalysisError(f"give column=, the texts of the {name}: {said}")

    def examples() -> Iterator[Example]:
        for number, cells in enumerate(rows, 1):
            texts = cells[0] if len(chosen) == 1 else [_text(number, cell) for cell in cells[:2]]
            yield Example(_text(number, texts), unit=None if units is None else _unit(cells[-1]))

    # A file of texts holds no pairs.
    return f"{name}:{','.join(map(str, chosen))}", examples(), held or len(chosen) > 1


def _in_pandas(data: Iterable) -> Iterable:
    """What lies in memory as columns, of Arrow, of polars or in a dictionary, as of pandas; all else as it is."""
    data = data.collect() if hasattr(data, "collect") else data
    if isinstance(data, Mapping):
        try:
            return pd.DataFrame(dict(data))
        except ValueError as error:
            raise AnalysisError(f"a {type(data).__name__} of columns that are not equally long is no table") from error
    arrow = isinstance(data, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray)
    return data.to_pandas() if arrow or hasattr(data, "iter_rows") else data


def _unit(cell: object) -> str | None:
    """The name of a unit; None where it is missing."""
    is_missing = pd.api.types.is_scalar(cell) and pd.isna(cell)
    return None if is_missing else str(cell)


def _text(number: int, item: object) -> str | Pair:
    match item:
        case str():
            return encodable(f"item {number}", item)
        case (str() as first, str() as second):
            return Pair(*(encodable(f"item {number}", each) for each in (first, second)))
    if pd.api.types.is_scalar(item) and pd.isna(item):
        return ""
    raise AnalysisError(f"item {number} is a {type(item).__name__}: give texts, or pairs of texts")
