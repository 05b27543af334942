"""Files and folders as corpora: columns of CSV, TSV, JSONL and Parquet, lines of text, and images or sounds."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from analysis_lib.corpora.corpus import PLURAL, Example, Labelled, Located, Pair, refuse_gaps
from analysis_lib.corpora.media import MediaFile, parts_of, read_bytes
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.corpora.tables import ENDINGS, Table, decoded_text, ending, lines_of, text_of
from analysis_lib.corpora.transcripts import transcripts
from analysis_lib.errors import AnalysisError, near_names, require_extra

# Of each class of a file without a division; of a class of fewer texts, none would be left for validation.
_VALIDATION_SHARE, _TEST_SHARE, _FEWEST_TEXTS = 0.1, 0.2, 10
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


# What neither library reads, by ending, and what to do with it.
_CONVERT_SOUND = "convert them first, for example with `ffmpeg -i a.m4a a.flac`"
_CONVERT_IMAGE = "convert them to PNG first"
_TO_CONVERT = dict.fromkeys((".m4a", ".aac", ".mp4", ".m4b", ".wma", ".amr", ".webm", ".mkv", ".mov"), _CONVERT_SOUND)
_TO_CONVERT |= dict.fromkeys((".heic", ".heif", ".svg", ".pdf", ".jxl", ".dng", ".nef", ".cr2"), _CONVERT_IMAGE)


def located(spec: str, known: Iterable[str], units: str | None = None) -> Located:
    """The file or folder that ``spec`` names; ``-`` is stdin.

    Args:
        known: the names to offer where there is none.
        units: of a table, the column of what each text is a part of.
    """
    if spec == "-":
        if units is not None:
            raise AnalysisError(f"- is lines of text, and no table: leave {units} out, which names the units of one")
        return Located("text", lambda: lines_of(decoded_text("-", sys.stdin.buffer.read())), lambda: "lines of stdin")
    path, column = _path_and_column(spec, known)
    if units is not None and column is None:
        raise AnalysisError(f"{spec} is no column of a table: leave {units} out, which names the units of one")
    if column is None and (path.is_dir() or _kind(path) or path.suffix.lower() in _TO_CONVERT):
        return _located_media(path)
    read = (lambda: lines_of(text_of(path))) if column is None else partial(read_column, path, column, units)
    return Located("text", read, lambda: f"{column or 'lines'} of sha256:{sha256(read_bytes(path)).hexdigest()}")


def _located_media(path: Path) -> Located:
    """An image or a sound, or a folder of them."""
    visible = sorted(_visible_files(path)) if path.is_dir() else [path]
    kind, files = _of_one_kind(path, visible)
    tables = [file for file in visible if ending(file) in ENDINGS]
    texts, tables_read = transcripts(path, files, tables) if kind == "audio" else ({}, [])
    _count_others(path, kind, files, [file for file in visible if file not in {*files, *tables_read}])
    items = [MediaFile(kind, file.absolute(), text=texts.get(file, "")) for file in files]
    labels = _labels([file.relative_to(path) for file in files])

    def read() -> Iterator[Example]:
        for item, label in zip(items, labels, strict=True):
            parts = parts_of(item)
            unit = str(item.path.relative_to(path.absolute())) if len(parts) > 1 else None
            yield from (Example(part, label, unit) for part in parts)

    return Located(kind, read, partial(_media_identity, path.absolute(), kind, items))


def _media_identity(folder: Path, kind: str, items: list[MediaFile]) -> str:
    digest = sha256()
    for item in items:
        name = str(item.path.relative_to(folder)).encode("utf-8", "surrogateescape")
        digest.update(name + b"\0" + item.digest())
    return f"{PLURAL[kind]} of sha256:{digest.hexdigest()}"


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
        if column is None and ending(path) in ENDINGS:
            header = ", ".join(Table(path).header)
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


def read_column(path: Path, column: str, units: str | None = None) -> list[str] | list[Pair] | list[Labelled | Example]:
    """The texts of a column, the pairs of two (``a,b``), either with classes (``a:label``), or a split of these.

    With ``units``, each says what it is a part of, by another column.
    """
    table = Table(path)
    names, _, label = (column, "", "") if column in table.header else column.partition(":")
    label, _, split = (label, "", "") if label in table.header else label.partition(":")
    if names in table.header or names.count(",") != 1:
        texts = table.column(names)
    else:
        sides = [table.column(name) for name in names.split(",")]
        texts = [Pair(*pair) for pair in zip(*sides, strict=True)]
    of = [None] * len(texts) if units is None else table.column(units)
    if column in table.header or ":" not in column:
        return texts if units is None else [Example(*row) for row in zip(texts, [None] * len(of), of, strict=True)]
    rows = [Labelled(*row) for row in zip(texts, table.column(label), of, strict=True)]
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


@cache
def _suffixes() -> dict[str, str]:
    """What the files of images and sounds that can be read hold, by their endings: all that the two libraries know."""
    # Imported here: a corpus of texts needs neither.
    require_extra("packages", "soundfile", "PIL")
    import soundfile
    from PIL import Image

    Image.init()
    image = {ending for ending, form in Image.EXTENSION.items() if form in Image.OPEN and form not in _NO_IMAGES}
    # RAW has no header, and matrices of numbers are rarely sounds.
    formats = [name for name in soundfile.available_formats() if name not in ("RAW", "MAT4", "MAT5")]
    audio = {f".{ending}" for name in formats for ending in (name.lower(), *_SOUNDS.get(name, "").split())}
    return dict.fromkeys(image, "image") | dict.fromkeys(audio, "audio")


def _kind(path: Path) -> str | None:
    is_text = ending(path) in (*ENDINGS, ".txt", "")
    return None if is_text else _suffixes().get(path.suffix.lower())


def _of_one_kind(path: Path, visible: list[Path]) -> tuple[str, list[Path]]:
    """The kind of the images or the sounds among files, and which these are."""
    images, sounds = ([file for file in visible if _kind(file) == kind] for kind in ("image", "audio"))
    if not images and not sounds:
        unread = sorted({file.suffix.lower() for file in visible} & _TO_CONVERT.keys())
        if unread:
            raise AnalysisError(f"{path} holds files of {', '.join(unread)}: {_TO_CONVERT[unread[0]]}")
        raise AnalysisError(
            f"{path} is a folder without images or sounds that can be read (png, jpg, wav, flac, ...): name another, "
            f"or a text or CSV file"
        )
    if images and sounds:
        raise AnalysisError(f"{path} has {len(images)} images and {len(sounds)} sound files: give a folder of one kind")
    return ("image", images) if images else ("audio", sounds)


def _count_others(path: Path, kind: str, files: list[Path], others: list[Path]) -> None:
    """Say how many files of a folder are left out, by their endings."""
    if counts := Counter(file.suffix.lower() or "no ending" for file in others):
        endings = ", ".join(f"{count} of {suffix}" for suffix, count in counts.most_common())
        said = "note: left out of %s, where %d %s are read, are other files: %s"
        logging.getLogger(__name__).warning(said, path, len(files), PLURAL[kind], endings)


def _labels(files: list[Path]) -> list[int | None]:
    """The classes of the files of a folder: sub-folders of the first level, where every file lies in one."""
    if not all(len(file.parts) > 1 for file in files):
        return [None] * len(files)
    classes = sorted({file.parts[0] for file in files})
    return [classes.index(file.parts[0]) for file in files]


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
