"""Content of files, with errors of one line for damaged ones."""

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from analysis_lib.errors import AnalysisError, what_failed

# Such as "cannot identify image file <_io.BytesIO object at 0x7f1c>".
_OBJECT = re.compile(r" ?<\S+ object at 0x\w+>")


@contextmanager
def translated(name: object, fault: str) -> Iterator[None]:
    """A context in which an error of another library becomes an AnalysisError of one line.

    Args:
        name: the name of the file, or of a part of it.
        fault: the rest of the line's first clause, such as "is no Parquet file".
    """
    try:
        yield
    except AnalysisError:
        raise
    except Exception as error:  # Each library has errors of its own.
        reason = _OBJECT.sub("", what_failed(error))[:200]
        raise AnalysisError(f"{name} {fault} ({reason}): mend it, or copy it again") from error


def refuse_irregular(path: Path) -> None:
    """Raise an AnalysisError for pipes and files of the kernel, which may never end."""
    if path.exists() and (not path.is_file() or path.resolve().is_relative_to("/proc")):
        raise AnalysisError(f"{path} is no regular file: give one, or pipe lines of text into -")


def read_bytes(path: Path) -> bytes:
    """The bytes of a file as it is stored.

    Raises:
        AnalysisError: it cannot be read.
    """
    refuse_irregular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise AnalysisError(f"{path} cannot be read: {error.strerror}") from error


def _unpack_zstandard(packed: bytes) -> bytes:
    # Imported here: Arrow takes half a second.
    import pyarrow as pa

    return pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()


_UNPACK = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _unpack_zstandard,
}


def is_packed(path: Path) -> bool:
    """Whether a file is compressed, by the ending of its name."""
    return path.suffix.lower() in _UNPACK


def ending(path: Path) -> str:
    """The ending of a file's name that gives its format, before that of a compression.

    >>> ending(Path("reviews.CSV.gz")), ending(Path("notes.txt"))
    ('.csv', '.txt')
    """
    inner = path.with_suffix("") if is_packed(path) else path
    return inner.suffix.lower()


def unpacked(path: Path) -> bytes:
    """The bytes of a file, decompressed if it is compressed."""
    stored = read_bytes(path)
    if not is_packed(path):
        return stored
    with translated(path, "cannot be unpacked"):
        return _UNPACK[path.suffix.lower()](stored)


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        AnalysisError: it is not UTF-8.
    """
    return decoded_text(str(path), unpacked(path))


def decoded_text(name: str, stored: bytes) -> str:
    """Bytes as text.

    Raises:
        AnalysisError: they are not UTF-8.
    """
    if stored.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise AnalysisError(
            f"{name} is not UTF-8 but UTF-16: convert it first, with `iconv -f UTF-16 -t UTF-8`"
        )
    if b"\0" in stored:
        raise AnalysisError(
            f"{name} is no text (it has a zero byte): give a UTF-8 text or CSV file, unpacked"
        )
    try:
        # utf-8-sig: spreadsheet programs put a byte-order mark before the first column's name.
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{stored[error.start]:02x} at position {error.start}"
        raise AnalysisError(
            f"{name} is not UTF-8 ({byte}): convert it first, for example with `iconv -f LATIN1 -t "
            "UTF-8`"
        ) from error


def lines_of(text: str) -> list[str]:
    """The lines of a text."""
    if not text:
        return []
    # ``str.splitlines`` also cuts at form feeds and other separators inside a line.
    return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n")
