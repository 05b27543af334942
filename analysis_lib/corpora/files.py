"""Files as corpora: lines of text, columns of tables, and images or sounds in folders."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain, repeat
from pathlib import Path

from analysis_lib.corpora.captions import WITH_TEXT, captioned_files, folder_table, kind_of_paths
from analysis_lib.corpora.corpus import PLURAL, Example, Pair, Reader, checked
from analysis_lib.corpora.kinds import kind_of_file
from analysis_lib.corpora.media import MediaFile, parts_of
from analysis_lib.corpora.reading import decoded_text, ending, lines_of, read_bytes, text_of
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.corpora.tables import ANSWERS, ENDINGS, Table, open_table
from analysis_lib.corpora.transcripts import transcripts
from analysis_lib.errors import LONGEST_PATH, AnalysisError, near_names

# Shares of each class for validation and test, in a table without splits. Classes with too few
# texts would have none for validation.
_VALIDATION_SHARE = 0.1
_TEST_SHARE = 0.2
_FEWEST_TEXTS = 10
# Endings of sounds that neither library reads, and advice on them.
_SOUNDS_TO_CONVERT = (".m4a", ".aac", ".mp4", ".m4b", ".wma", ".amr", ".webm", ".mkv", ".mov")
_IMAGES_TO_CONVERT = (".heic", ".heif", ".svg", ".pdf", ".jxl", ".dng", ".nef", ".cr2")
_REMEDIES = {
    **dict.fromkeys(
        _SOUNDS_TO_CONVERT,
        "convert them first, for example with `ffmpeg -i a.m4a a.flac`",
    ),
    **dict.fromkeys(_IMAGES_TO_CONVERT, "convert them to PNG first"),
}


def file_reader(spec: str, known: Iterable[str], units: str | None = None) -> Reader:
    """The reader of the file or folder that ``spec`` names; ``-`` is standard input.

    Args:
        known: names of corpora to suggest if there is no such file.
        units: the column of a table with the unit of each text.
    """
    if spec == "-":
        if units is not None:
            raise AnalysisError(
                f"- is lines of text, and no table: leave {units} out, which names the units of one"
            )
        return Reader(spec, "text", _standard_input, lambda: "lines of stdin")
    path, column = _path_and_column(spec, known)
    folder = None
    if column is not None and path.is_dir():
        folder = path
        path, column = folder_table(folder, column)
    kind = None
    if column is not None:
        kind = kind_of_pairs(path, column)
    if folder is not None and kind is None:
        raise AnalysisError(
            f"{path} names no images or sounds alone in {column.partition(',')[0]}: mend it, or "
            f"give {folder} without a column"
        )
    if units is not None and column is None:
        raise AnalysisError(
            f"{spec} is no column of a table: leave {units} out, which names the units of one"
        )

    def identity() -> str:
        return f"{column or 'lines'} of sha256:{sha256(read_bytes(path)).hexdigest()}"

    if kind is not None:
        return _captioned_reader(spec, path, column, units, kind)
    if column is not None:
        return Reader(spec, "text", lambda: read_column(path, column, units), identity)
    if path.is_dir() or kind_of_file(path) or path.suffix.lower() in _REMEDIES:
        return _media_reader(spec, path)
    return Reader(spec, "text", lambda: map(Example, lines_of(text_of(path))), identity)


def _standard_input() -> Iterator[Example]:
    return map(Example, lines_of(decoded_text("-", sys.stdin.buffer.read())))


def _media_reader(spec: str, path: Path) -> Reader:
    """The reader of an image, of a sound, or of a folder of them."""
    visible = sorted(_visible_files(path)) if path.is_dir() else [path]
    kind, files = _of_one_kind(path, visible)
    texts = {}
    tables = []
    if kind == "audio":
        candidates = [file for file in visible if ending(file) in ENDINGS]
        texts, tables = transcripts(path, files, candidates)
    _note_others(path, kind, files, {*visible} - {*files, *tables})
    items = [MediaFile(kind, file.absolute(), text=texts.get(file, "")) for file in files]
    labels = _labels([file.relative_to(path) for file in files])
    folder = path.absolute()

    def read() -> Iterator[Example]:
        for item, label in zip(items, labels, strict=True):
            parts = parts_of(item)
            unit = None
            if len(parts) > 1:
                unit = str(item.path.relative_to(folder))
            for part in parts:
                yield Example(part, label, unit)

    def identity() -> str:
        digest = sha256()
        for item in items:
            name = str(item.path.relative_to(folder)).encode("utf-8", "surrogateescape")
            digest.update(name + b"\0" + item.digest())
        return f"{PLURAL[kind]} of sha256:{digest.hexdigest()}"

    return Reader(spec, kind, read, identity)


def _path_and_column(spec: str, known: Iterable[str]) -> tuple[Path, str | None]:
    """The file or folder and, for a table, the column that ``spec`` names."""
    if not spec.strip() or "\0" in spec or len(spec) > LONGEST_PATH:
        raise AnalysisError(
            f"{spec[:40]!r} is no name or path: give a name of `datasets`, file.csv:COLUMN, "
            "lines.txt or a folder"
        )
    name, columns = path_and_columns(spec)
    path = Path(name)
    column = columns[1:] if columns else None
    # The methods of Path raise errors of their own if a name is too long.
    is_folder = os.path.isdir(path)
    if os.path.exists(path) and not is_folder:
        if column is None and ending(path) in ENDINGS:
            column = _usual_column(path)
        return path, column
    if is_folder:
        return path, column
    if path.suffix or "/" in spec:
        raise AnalysisError(
            f"there is no file {path}: check the path, or name a corpus of `datasets`"
        )
    near = near_names(spec.partition(":")[0], known)
    raise AnalysisError(f"there is no corpus, file or folder named {spec}: {near}")


def _usual_column(path: Path) -> str:
    """The column of a table that is named without one: messages, or prompts with answers.

    Raises:
        AnalysisError: it has neither.
    """
    header = open_table(path).header
    if "messages" in header:
        return "messages"
    if {"prompt", "answer"} <= {*header}:
        return ANSWERS
    example = f"as in {path}:COLUMN (it has: {', '.join(header)})"
    raise AnalysisError(f"{path} is a table: name its column, {example}")


def _captioned_reader(spec: str, path: Path, column: str, units: str | None, kind: str) -> Reader:
    """The reader of the images or sounds that a table names, each with its text."""
    examples = read_column(path, column, units, kind)

    def identity() -> str:
        digest = sha256()
        for example in examples:
            digest.update(example.item.digest())
        return f"{column} of {PLURAL[WITH_TEXT[kind]]} of sha256:{digest.hexdigest()}"

    return Reader(spec, WITH_TEXT[kind], lambda: examples, identity)


def kind_of_pairs(path: Path, column: str) -> str | None:
    """Image or audio, if two columns hold files of that kind and their texts; else None."""
    if "," not in column:
        # Before the table is read, which may be long.
        return None
    table = open_table(path)
    names, *_ = _names_label_and_split(table, column)
    if len(names) < 2:
        return None
    return kind_of_paths(chain.from_iterable(table.paths(names[0])), names[0])


def read_column(
    path: Path, column: str, units: str | None = None, kind: str | None = None
) -> list[Example]:
    """The texts or conversations of a column of a table, or the pairs of two columns (``a,b``).

    The columns ``prompt+answer`` are prompts with their answers.

    With a column of classes (``a:label``) they have classes, and a split may be drawn
    (``a:label:test``).

    Args:
        units: the column with the unit of each text.
        kind: image or audio, if the first of two columns holds the paths of such files.
    """
    table = open_table(path)
    names, label, split = _names_label_and_split(table, column)
    if kind is not None and split:
        raise AnalysisError(
            f"{path} holds files with texts, which are not divided: leave {split} out"
        )
    if kind is not None:
        paths, column = names
        texts = captioned_files(path, kind, table.paths(paths), table.column(column))
    elif len(names) > 1:
        texts = map(Pair, *map(table.column, names))
    elif names[0] == ANSWERS and ANSWERS not in table.header:
        texts = table.answers()
    else:
        texts = table.texts(names[0])
    labels = repeat(None) if label is None else table.column(label)
    text_units = repeat(None) if units is None else table.column(units)
    examples = [*map(Example, texts, labels, text_units)]
    return _drawn_split(path, examples, split) if split else examples


def _names_label_and_split(table: Table, column: str) -> tuple[list[str], str | None, str]:
    """The column of texts, or two of pairs; that of classes, if any; and the split, if any."""
    names = column
    label = None
    split = ""
    if column not in table.header and ":" in column:
        names, _, label = column.partition(":")
        if label not in table.header:
            label, _, split = label.partition(":")
    if names == ANSWERS or names in table.header or names.count(",") != 1:
        return [names], label, split
    return names.split(","), label, split


def _drawn_split(path: Path, examples: list[Example], split: str) -> list[Example]:
    if split not in SPLITS:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, SPLITS)}")
    # A text that is in the file twice could be in the training set and in the test set.
    distinct = [*dict.fromkeys(checked(str(path), examples))]
    label, count = Counter(example.label for example in distinct).most_common()[-1]
    if count < _FEWEST_TEXTS:
        fault = f"{path} has {count} distinct texts of the class {label}"
        raise AnalysisError(f"{fault}: to be divided, it needs {_FEWEST_TEXTS} or more")
    return divided(distinct, split, _VALIDATION_SHARE, _TEST_SHARE)


def _of_one_kind(path: Path, visible: list[Path]) -> tuple[str, list[Path]]:
    """The kind of the images or sounds among files, and these files."""
    images = [file for file in visible if kind_of_file(file) == "image"]
    sounds = [file for file in visible if kind_of_file(file) == "audio"]
    if images and sounds:
        counts = f"{len(images)} images and {len(sounds)} sound files"
        raise AnalysisError(f"{path} has {counts}: give a folder of one kind")
    if images:
        return "image", images
    if sounds:
        return "audio", sounds
    if unread := sorted({file.suffix.lower() for file in visible} & _REMEDIES.keys()):
        remedy = _REMEDIES[unread[0]]
        raise AnalysisError(f"{path} holds files of {', '.join(unread)}: {remedy}")
    fault = "without images or sounds that can be read (png, jpg, wav, flac, ...)"
    raise AnalysisError(f"{path} is a folder {fault}: name another, or a text or CSV file")


def _note_others(path: Path, kind: str, files: list[Path], others: Iterable[Path]) -> None:
    """Log the number of files of a folder that are left out, by ending."""
    counts = Counter(file.suffix.lower() or "no ending" for file in sorted(others))
    if counts:
        endings = ", ".join(f"{count} of {suffix}" for suffix, count in counts.most_common())
        note = "note: left out of %s, where %d %s are read, are other files: %s"
        logging.getLogger(__name__).warning(note, path, len(files), PLURAL[kind], endings)


def _labels(files: list[Path]) -> list[int | None]:
    """The class of each file, its sub-folder of the first level, if every file is in one."""
    if any(len(file.parts) < 2 for file in files):
        return [None] * len(files)
    classes = sorted({file.parts[0] for file in files})
    return [classes.index(file.parts[0]) for file in files]


def _visible_files(folder: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise AnalysisError(f"{error.filename} cannot be read: {error.strerror}") from error

    above = set()
    for home, folders, files in os.walk(folder, onerror=unreadable, followlinks=True):
        above.add(os.path.realpath(home))
        kept = []
        for name in folders:
            # A link back to a folder that is being searched would lead to an endless loop.
            is_link_back = os.path.realpath(os.path.join(home, name)) in above
            if not name.startswith(".") and not is_link_back:
                kept.append(name)
        folders[:] = kept
        for name in files:
            if not name.startswith("."):
                yield Path(home, name)


def path_and_columns(spec: str) -> tuple[str, str]:
    """The path in a specification, and the rest; both may contain colons and slashes.

    >>> path_and_columns("absent/reviews.csv:text:label")
    ('absent/reviews.csv', ':text:label')
    """
    path = spec
    columns = ""
    while not os.path.lexists(path) and ":" in path:
        path, _, column = path.rpartition(":")
        columns = f":{column}{columns}"
    return path, columns
