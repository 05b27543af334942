"""Files and folders as corpora: columns of CSV, TSV, JSONL and Parquet, lines of text, and images or sounds."""

import csv
import hashlib
import io
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from analysis_lib.corpora.corpus import PLURAL, Example, Labelled, Located, Pair, refuse_gaps
from analysis_lib.corpora.media import MediaFile, read_bytes
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.errors import AnalysisError, near_names

# Of each class of a file without a division; of a class of fewer texts, none would be left for validation.
_VALIDATION_SHARE, _TEST_SHARE, _FEWEST_TEXTS = 0.1, 0.2, 10
_JSON = {".json", ".jsonl", ".ndjson"}
_TABLES = {".csv", ".tsv", ".parquet", *_JSON}
# Columns of what is said in a sound.
_SAID = ("transcription", "sentence", "text")
# What Pillow registers and does not read as an image: containers, and drawings that another program would have to draw.
_NO_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"}
# Formats of libsndfile whose files have other endings than their names.
_SOUNDS = {
    "AIFF": "aif aifc",
    "AU": "snd",
    "OGG": "oga opus",
    "NIST": "sph",
    "IRCAM": "sf",
    "SVX": "iff",
    "WAV": "wave",
}


def located(spec: str, known: Iterable[str], units: str | None = None) -> Located:
    """The file or folder that ``spec`` names; ``-`` is stdin.

    Args:
        known: the names to offer where there is none.
        units: of a table, the column of what each text is a part of.
    """
    if spec == "-" and units is None:
        return Located("text", lambda: _lines(_decoded("-", sys.stdin.buffer.read())), lambda: "lines of stdin")
    path, column = _path_and_column(spec, known)
    if units is not None and column is None:
        raise AnalysisError(f"{spec} is no column of a table: leave {units} out, which names the units of one")
    if column is None and (path.is_dir() or _kind(path)):
        kind, files, labels = _media(path)
        texts = _transcripts(path) if kind == "audio" else {}
        items = [MediaFile(kind, file.absolute(), text=texts.get(file, "")) for file in files]
        identity = partial(_media_identity, path.absolute(), kind, items)
        return Located(kind, lambda: zip(items, labels, strict=True), identity)
    read = (lambda: _lines(_decode(path))) if column is None else partial(read_column, path, column, units)
    return Located(
        "text", read, lambda: f"{column or 'lines'} of sha256:{hashlib.sha256(read_bytes(path)).hexdigest()}"
    )


def _lines(text: str) -> list[str]:
    # Not str.splitlines, which also cuts at form feeds and other separators inside a line.
    return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n") if text else []


def _media_identity(folder: Path, kind: str, items: list[MediaFile]) -> str:
    digest = hashlib.sha256()
    for item in items:
        name = str(item.path.relative_to(folder)).encode("utf-8", "surrogateescape")
        digest.update(name + b"\0" + item.digest())
    return f"{PLURAL[kind]} of sha256:{digest.hexdigest()}"


def _transcripts(folder: Path) -> dict[Path, str]:
    """What is said in the sounds of a folder: in its ``metadata.csv``, as ``datasets`` reads it, if there is one."""
    table = folder / "metadata.csv"
    header = _decode(table).partition("\n")[0].strip().split(",") if table.is_file() else []
    column = next((name for name in _SAID if name in header), None)
    rows = [] if column is None else read_column(table, f"file_name,{column}")
    return {folder / row.first: row.second for row in rows}


def _path_and_column(spec: str, known: Iterable[str]) -> tuple[Path, str | None]:
    """The file or folder and, for a CSV, the column that ``spec`` names."""
    if not spec.strip() or "\0" in spec or len(spec) > 4096:
        raise AnalysisError(
            f"{spec[:40]!r} is no name or path: give a name of `datasets`, file.csv:COLUMN, lines.txt or a folder"
        )
    path, column = Path(spec), None
    # The column alone, with that of the classes, or with a split, too; a path may have colons of its own.
    for cuts in (1, 2, 3):
        if not _is_file(path) and spec.count(":") >= cuts:
            before, *columns = spec.rsplit(":", cuts)
            path, column = Path(before), ":".join(columns)
    if _is_file(path):
        if column is None and path.suffix.lower() in _TABLES:
            header = ", ".join(_rows(path)[:1][0]) if path.stat().st_size else ""
            raise AnalysisError(f"{path} is a table: name its column, as in {path}:COLUMN (it has: {header})")
        return path, column
    if os.path.isdir(path):
        if column is not None:
            raise AnalysisError(f"{path} is a folder: name a text or CSV file in it")
        return path, None
    if path.suffix or "/" in spec:
        raise AnalysisError(f"there is no file {path}: check the path, or name a corpus of `datasets`")
    raise AnalysisError(f"there is no corpus, file or folder named {spec}: {near_names(spec.partition(':')[0], known)}")


def _is_file(path: Path) -> bool:
    # Not the methods of Path, which raise errors of their own where a name is too long.
    return os.path.exists(path) and not os.path.isdir(path)


def _decode(path: Path) -> str:
    return _decoded(str(path), read_bytes(path))


def _decoded(path: str, content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise AnalysisError(f"{path} is not UTF-8 but UTF-16: convert it first, with `iconv -f UTF-16 -t UTF-8`")
    if b"\0" in content:
        raise AnalysisError(f"{path} is no text (it has a zero byte): give a UTF-8 text or CSV file, unpacked")
    try:
        # utf-8-sig: spreadsheet programs put a byte-order mark before the first column's name.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AnalysisError(
            f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start}): "
            f"convert it first, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def _rows(path: Path) -> list[list]:
    """The header of a table and its rows."""
    if path.suffix.lower() == ".parquet":
        return _parquet_rows(path)
    if path.suffix.lower() in _JSON:
        return _json_rows(path)
    text = _decode(path)
    # The field limit of the csv module is 128 KiB; an utterance may be longer.
    csv.field_size_limit(2**31 - 1)
    header, delimiter = text.partition("\n")[0], "\t" if path.suffix.lower() == ".tsv" else ","
    if delimiter not in header and (found := max(";\t|", key=header.count)) in header:
        delimiter = found
        logging.getLogger(__name__).warning("note: the columns of %s are taken to be separated by %r", path, found)
    # Between tabs, quotation marks are part of the text, unless the header is in them, too.
    quoting = csv.QUOTE_NONE if delimiter == "\t" and not header.startswith('"') else csv.QUOTE_MINIMAL
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True))
    except csv.Error as error:
        raise AnalysisError(f"{path} is not a well-formed table: {error}") from error
    if several := sum(any("\n" in cell for cell in row) for row in rows):
        said = (
            "note: %s of the rows of %s have a cell of several lines: if that is wrong, look for single quotation marks"
        )
        logging.getLogger(__name__).warning(said, several, path)
    return rows


def _parquet_rows(path: Path) -> list[list]:
    # Imported here: Arrow takes half a second.
    from pyarrow import parquet

    content = read_bytes(path)
    try:
        table = parquet.read_table(io.BytesIO(content))
        return [[*table.column_names], *([*row.values()] for row in table.to_pylist())]
    except Exception as error:  # Whatever Arrow meets in a damaged file.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AnalysisError(f"{path} is no Parquet file ({reason}): write it again") from error


def _numbered_json(path: Path, text: str) -> Iterable[tuple[int, object]]:
    with suppress(ValueError):
        # What is no array is told by its line.
        if text.lstrip().startswith("["):
            return enumerate(json.loads(text), 1)
    return _json_lines(path, text)


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(_lines(text), 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except ValueError as error:
            raise AnalysisError(f"{path}: line {number} is no JSON ({error}): mend or remove it") from error


def _json_rows(path: Path) -> list[list]:
    """Those of objects, one a line or in one array."""
    records = []
    for number, record in _numbered_json(path, _decode(path)):
        records.append(record)
        if not isinstance(record, dict):
            raise AnalysisError(f'{path}: line {number} is no JSON object: give lines such as {{"text": "..."}}')
    header = [*dict.fromkeys(name for record in records for name in record)]
    return [header, *([record.get(name) for name in header] for record in records)] if records else []


def read_column(path: Path, column: str, units: str | None = None) -> list[str] | list[Pair] | list[Labelled | Example]:
    """The texts of a column, the pairs of two (``a,b``), either with classes (``a:label``), or a split of these.

    With ``units``, each says what it is a part of, by another column.
    """
    rows = _rows(path)
    if not rows:
        raise AnalysisError(f"{path} is empty: it needs a header row and at least one utterance")
    header, *body = rows
    if long := next((i for i, row in enumerate(body, 2) if len(row) > len(header)), None):
        cells = f"{len(body[long - 2])} cells, and the header {len(header)}"
        raise AnalysisError(f"{path}: row {long} has {cells}: put what has the separator in it between quotes")
    names, _, label = (column, "", "") if column in header else column.partition(":")
    label, _, split = (label, "", "") if label in header else label.partition(":")
    if names in header or names.count(",") != 1:
        texts = _cells(path, header, body, names)
    else:
        sides = (_cells(path, header, body, name) for name in names.split(","))
        texts = [Pair(*pair) for pair in zip(*sides, strict=True)]
    of = [None] * len(texts) if units is None else _cells(path, header, body, units)
    if column in header or ":" not in column:
        return texts if units is None else [Example(*row) for row in zip(texts, [None] * len(of), of, strict=True)]
    rows = [Labelled(*row) for row in zip(texts, _cells(path, header, body, label), of, strict=True)]
    return _drawn_split(path, rows, split) if split else rows


def _drawn_split(path: Path, rows: list[Labelled], split: str) -> list[Labelled]:
    if split not in SPLITS:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, SPLITS)}")
    refuse_gaps(str(path), rows)
    # A text that stands in the file twice would be trained on and tested on.
    distinct = list(dict.fromkeys(rows))
    name, count = Counter(row.label for row in distinct).most_common()[-1]
    if count < _FEWEST_TEXTS:
        raise AnalysisError(
            f"{path} has {count} distinct texts of the class {name}: to be divided, it needs {_FEWEST_TEXTS} or more"
        )
    return divided(distinct, split, _VALIDATION_SHARE, _TEST_SHARE)


def _cells(path: Path, header: list[str], body: list[list], column: str) -> list[str]:
    if header.count(column) > 1:
        raise AnalysisError(f"{path} has {header.count(column)} columns named {column}: rename all but one")
    if column not in header:
        raise AnalysisError(f"{path} has no column {column}: {near_names(column, header)}")
    index = header.index(column)
    short = next((i for i, row in enumerate(body, 2) if row and len(row) <= index), None)
    if short is not None:
        raise AnalysisError(f"{path}: row {short} has no column {column}: mend the row or its quotes")
    cells = [row[index] for row in body if row]
    if (strange := next((cell for cell in cells if not isinstance(cell, str | int | float | None)), None)) is not None:
        raise AnalysisError(f"{path}: column {column} holds a {type(strange).__name__}: name a column of texts")
    # NaN, which is not itself, is missing.
    return ["" if cell is None or cell != cell else str(cell) for cell in cells]


@cache
def _suffixes() -> dict[str, str]:
    """What the files of images and sounds that can be read hold, by their endings: all that the two libraries know."""
    # Imported here: a corpus of texts needs neither.
    import soundfile
    from PIL import Image

    Image.init()
    image = {ending for ending, form in Image.EXTENSION.items() if form in Image.OPEN and form not in _NO_IMAGES}
    # RAW has no header, and matrices of numbers are rarely sounds.
    formats = [name for name in soundfile.available_formats() if name not in ("RAW", "MAT4", "MAT5")]
    audio = {f".{ending}" for name in formats for ending in (name.lower(), *_SOUNDS.get(name, "").split())}
    return dict.fromkeys(image, "image") | dict.fromkeys(audio, "audio")


def _kind(path: Path) -> str | None:
    return _suffixes().get(path.suffix.lower()) if path.suffix.lower() not in (*_TABLES, ".txt", "") else None


def _media(path: Path) -> tuple[str, list[Path], list[int | None]]:
    """The kind of a file or of the files in a folder, their paths, sorted, and their labels."""
    visible = sorted(_visible_files(path)) if path.is_dir() else [path]
    images, sounds = ([file for file in visible if _kind(file) == kind] for kind in ("image", "audio"))
    if not images and not sounds:
        raise AnalysisError(
            f"{path} is a folder without images or sounds that can be read (png, jpg, wav, flac, ...): name another, "
            f"or a text or CSV file"
        )
    if images and sounds:
        raise AnalysisError(f"{path} has {len(images)} images and {len(sounds)} sound files: give a folder of one kind")
    kind, files = ("image", images) if images else ("audio", sounds)
    if rest := Counter(file.suffix.lower() or "no ending" for file in visible if not _kind(file)):
        endings = ", ".join(f"{count} of {ending}" for ending, count in rest.most_common())
        said = "note: left out of %s, where %d %s are read, are other files: %s"
        logging.getLogger(__name__).warning(said, path, len(files), PLURAL[kind], endings)
    below = [file.relative_to(path) for file in files]
    if not all(len(file.parts) > 1 for file in below):
        return kind, files, [None] * len(files)
    classes = sorted({file.parts[0] for file in below})
    return kind, files, [classes.index(file.parts[0]) for file in below]


def _visible_files(folder: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise AnalysisError(f"{error.filename} cannot be read: {error.strerror}") from error

    above = set()
    for home, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        above.add(os.path.realpath(home))
        # A link back to a folder that is being searched would lead round for ever.
        folders[:] = [
            name for name in folders if name[0] != "." and os.path.realpath(os.path.join(home, name)) not in above
        ]
        yield from (Path(home, name) for name in names if name[0] != ".")
