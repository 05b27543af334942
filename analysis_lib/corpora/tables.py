"""Tables in files: CSV, TSV, JSON, JSON lines, Parquet, Arrow and Feather, also compressed.

All of the library's tables of texts are read here: corpora, and what is said in the sounds of a folder.
"""

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from analysis_lib.corpora.media import read_bytes, refuse_irregular
from analysis_lib.errors import AnalysisError, near_names, what_failed

if TYPE_CHECKING:
    import pyarrow as pa

_JSON = {".json", ".jsonl", ".ndjson"}
_ARROW = {".arrow", ".feather"}
ENDINGS = {".csv", ".tsv", ".parquet", *_JSON, *_ARROW}
# What a cell of a text, a class or a unit may be.
_SCALAR = str | int | float | None


def _unpack_zstandard(content: bytes) -> bytes:
    # Imported here: Arrow takes half a second.
    import pyarrow as pa

    return pa.CompressedInputStream(pa.BufferReader(content), "zstd").read()


_UNPACK = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _unpack_zstandard,
}


def ending(path: Path) -> str:
    """The ending of a file's name that says what is in it, without that of a compressed file.

    >>> ending(Path("reviews.CSV.gz")), ending(Path("notes.txt"))
    ('.csv', '.txt')
    """
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if _is_packed(path) else suffix


def content(path: Path) -> bytes:
    """What is in a file, unpacked if it is compressed."""
    stored, unpack = read_bytes(path), _UNPACK.get(path.suffix.lower())
    if unpack is None:
        return stored
    try:
        return unpack(stored)
    except Exception as error:  # Each library has its own.
        raise AnalysisError(f"{path} cannot be unpacked ({error}): copy it again") from error


def text_of(path: Path) -> str:
    """The text of a file, or an AnalysisError if it is not UTF-8."""
    return decoded_text(str(path), content(path))


def decoded_text(name: str, stored: bytes) -> str:
    """Bytes as text, or an AnalysisError if they are not UTF-8."""
    if stored.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise AnalysisError(f"{name} is not UTF-8 but UTF-16: convert it first, with `iconv -f UTF-16 -t UTF-8`")
    if b"\0" in stored:
        raise AnalysisError(f"{name} is no text (it has a zero byte): give a UTF-8 text or CSV file, unpacked")
    try:
        # utf-8-sig: spreadsheet programs put a byte-order mark before the first column's name.
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AnalysisError(
            f"{name} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start}): "
            f"convert it first, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def lines_of(text: str) -> list[str]:
    """The lines of a text."""
    # Not str.splitlines, which also cuts at form feeds and other separators inside a line.
    return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n") if text else []


class Table:
    """A table in a file, of which each column is read when it is asked for.

    Attributes:
        header: the names of the columns, in order; empty if the file is.

    Raises:
        AnalysisError: the file cannot be read as what its name says it is.
    """

    def __init__(self, path: Path):
        self.path = path
        if ending(path) == ".parquet":
            self.header, self._column = _parquet(path)
        elif ending(path) in _ARROW:
            self.header, self._column = _arrow(path)
        elif ending(path) in _JSON:
            self.header, self._column = _json_objects(path)
        else:
            self.header, self._column = _separated(path)

    def column(self, name: str) -> list[str]:
        """The cells of a column as text; a missing one is empty.

        Raises:
            AnalysisError: there is no such column, or several, or it holds no texts.
        """
        if not self.header:
            raise AnalysisError(f"{self.path} is empty: it needs a header row and at least one utterance")
        if self.header.count(name) > 1:
            count = self.header.count(name)
            raise AnalysisError(f"{self.path} has {count} columns named {name}: rename all but one")
        if name not in self.header:
            raise AnalysisError(f"{self.path} has no column {name}: {near_names(name, self.header)}")
        texts = []
        for cell in self._column(self.header.index(name)):
            if not isinstance(cell, _SCALAR):
                kind = type(cell).__name__
                raise AnalysisError(f"{self.path}: column {name} holds a {kind}: name a column of texts")
            # NaN, which is not itself, is missing.
            is_missing = cell is None or cell != cell
            texts.append("" if is_missing else str(cell))
        return texts


# The names of the columns of a table, and what gives the cells of a column by its number.
_Columns = tuple[list[str], Callable[[int], list]]


def _separated(path: Path) -> _Columns:
    """A table whose cells are separated by commas, tabs, semicolons or bars."""
    text = text_of(path)
    # The field limit of the csv module is 128 KiB; an utterance may be longer.
    csv.field_size_limit(2**31 - 1)
    first_line, delimiter = text.partition("\n")[0], "\t" if ending(path) == ".tsv" else ","
    if delimiter not in first_line:
        likely = max(";\t|", key=first_line.count)
        if likely in first_line:
            delimiter = likely
            said = "note: the columns of %s are taken to be separated by %r"
            logging.getLogger(__name__).warning(said, path, delimiter)
    # Between tabs, quotation marks are part of the text, unless the header is in them, too.
    is_quoted = delimiter != "\t" or first_line.startswith('"')
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True))
    except csv.Error as error:
        raise AnalysisError(f"{path} is not a well-formed table: {error}") from error
    if several := sum(any("\n" in cell for cell in row) for row in rows):
        said = (
            "note: %s of the rows of %s have a cell of several lines: if that is wrong, look for single quotation marks"
        )
        logging.getLogger(__name__).warning(said, several, path)
    header, body = rows[0] if rows else [], rows[1:]
    for number, row in enumerate(body, 2):
        if len(row) > len(header):
            cells = f"{len(row)} cells, and the header {len(header)}"
            raise AnalysisError(f"{path}: row {number} has {cells}: put what has the separator in it between quotes")

    def column(place: int) -> list[str]:
        for number, row in enumerate(body, 2):
            if row and len(row) <= place:
                raise AnalysisError(f"{path}: row {number} has no column {header[place]}: mend the row or its quotes")
        return [row[place] for row in body if row]

    return header, column


def _json_objects(path: Path) -> _Columns:
    """A table of JSON objects, one on each line or all in one array."""
    records = []
    for number, record in _numbered_json(path, text_of(path)):
        if not isinstance(record, dict):
            raise AnalysisError(f'{path}: line {number} is no JSON object: give lines such as {{"text": "..."}}')
        records.append(record)
    header = [*dict.fromkeys(name for record in records for name in record)]
    return header, lambda place: [record.get(header[place]) for record in records]


def _numbered_json(path: Path, text: str) -> Iterable[tuple[int, object]]:
    with suppress(ValueError, RecursionError):
        # What is no array is told by its line.
        if text.lstrip().startswith("["):
            return enumerate(json.loads(text), 1)
    return _json_lines(path, text)


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(lines_of(text), 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = what_failed(error) if isinstance(error, RecursionError) else error
            raise AnalysisError(f"{path}: line {number} is no JSON ({fault}): mend or remove it") from error


def _parquet(path: Path) -> _Columns:
    # Imported here: Arrow takes half a second.
    from pyarrow import parquet

    def column(place: int) -> list:
        with _read_as("Parquet", path), parquet.ParquetFile(_source(path)) as file:
            name = file.schema_arrow.names[place]
            # What else lies in the file, such as embeddings of the texts, is not unpacked.
            return file.read(columns=[name])[name].to_pylist()

    with _read_as("Parquet", path), parquet.ParquetFile(_source(path)) as file:
        return file.schema_arrow.names, column


def _arrow(path: Path) -> _Columns:
    """A table in an Arrow file, which Feather is too, or in an Arrow stream, as ``datasets`` writes it."""
    import pyarrow as pa

    def opened(*places: int) -> "pa.RecordBatchReader | pa.ipc.RecordBatchFileReader":
        options = pa.ipc.IpcReadOptions(included_fields=[*places])
        source = pa.py_buffer(content(path)) if _is_packed(path) else pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source, options=options)
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(source, options=options)

    def column(place: int) -> list:
        with _read_as("Arrow", path):
            return opened(place).read_all().column(0).to_pylist()

    refuse_irregular(path)
    with _read_as("Arrow", path):
        return opened().schema.names, column


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() in _UNPACK


def _source(path: Path) -> Path | io.BytesIO:
    """What Arrow opens: the file itself, of which it reads parts, unless it is compressed."""
    refuse_irregular(path)
    return io.BytesIO(content(path)) if _is_packed(path) else path


@contextmanager
def _read_as(form: str, path: Path) -> Iterator[None]:
    """Inside it, what Arrow meets in a damaged file is said in one line."""
    try:
        yield
    except AnalysisError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AnalysisError(f"{path} is no {form} file ({reason}): write it again") from error
