"""Images and sounds with their texts: the rows of a table that names files, or rows in memory."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis_lib.corpora.corpus import is_blank, refuse_half_characters
from analysis_lib.corpora.kinds import kind_of_file
from analysis_lib.corpora.media import ArrayImage, Captioned, MediaFile, Sound
from analysis_lib.corpora.reading import ending
from analysis_lib.corpora.tables import ENDINGS, open_table
from analysis_lib.corpora.transcripts import FILES, column_of, is_metadata
from analysis_lib.errors import AnalysisError, shown

# The kind of a corpus, by that of its files; and the words for them in messages.
WITH_TEXT = {"image": "image+text", "audio": "audio+text"}
NOUNS = {"image": "image", "audio": "sound"}
# Names of columns of images and of sounds in rows in memory, and of their texts.
COLUMNS = {"image": "image", "images": "image", "audio": "audio", "sound": "audio"}
TEXT = "text"
# A cell that may be the path of a file: it has an ending.
_PATH = re.compile(r".*\.[A-Za-z0-9]{2,5}\s*")
# Names of columns of file names in the table of a folder.
_FILES = [*FILES, "file_names", "image", "images", "image_path", "image_file_name"]


def kind_of_paths(cells: Iterable[str], column: object = None) -> str | None:
    """Image or audio, if half of the cells of a column that are not empty name such files.

    What the others hold is then told as a fault. Files whose endings say nothing are of the kind
    that the name of the column says.

    Args:
        column: its name.
    """
    paths = [cell.strip() for cell in cells if cell.strip()]
    kinds = Counter(_kind_of_path(path) for path in paths)
    for kind in WITH_TEXT:
        if kinds[kind] and 2 * kinds[kind] >= len(paths):
            return kind
    are_paths = bool(paths) and all(map(_PATH.fullmatch, paths))
    return COLUMNS.get(column) if are_paths else None


def _kind_of_path(path: str) -> str | None:
    return kind_of_file(Path(path)) if _PATH.fullmatch(path) else None


def captioned_files(
    table: Path, kind: str, paths: Iterable[Sequence[str]], texts: Iterable[str]
) -> list[Captioned]:
    """The images or sounds that a table names, each row with its text.

    Args:
        table: the table; paths are below its folder.
        kind: image or audio.
        paths: the paths of the files, by row: one, or those of several images.
        texts: their texts, by row.

    Raises:
        AnalysisError: a file without a text, a text without a file, or a file that is not there.
    """
    items = []
    for number, (names, text) in enumerate(zip(paths, texts, strict=True), 1):
        row = f"{table}: row {number}"
        if not names or not all(name.strip() for name in names):
            raise AnalysisError(f"{row} names no {NOUNS[kind]}: mend or remove it")
        media = []
        for name in names:
            file = (table.parent / name.strip()).absolute()
            if not os.path.isfile(file):
                raise AnalysisError(
                    f"{row} names {name.strip()}, which is not there: paths are below "
                    f"{table.parent}; mend or remove it"
                )
            media.append(MediaFile(kind, file))
        items.append(_captioned(row, kind, media, text))
    return items


def folder_table(folder: Path, column: str) -> tuple[Path, str]:
    """The table beside the files of a folder, and its two columns: of file names, and of texts.

    Args:
        column: the column of texts, perhaps with one of classes behind it.

    Raises:
        AnalysisError: there is no table, or none of its columns holds file names.
    """
    tables = [path for path in sorted(folder.iterdir()) if ending(path) in ENDINGS]
    chosen = [*filter(is_metadata, tables)] or tables
    if len(chosen) != 1:
        names = ", ".join(path.name for path in chosen) or "none"
        raise AnalysisError(
            f"{folder} is a folder, and its tables are {names}: for texts in {column}, put one "
            "beside its files, metadata.csv with the columns file_name and text"
        )
    table = open_table(chosen[0])
    files = column_of(table, _FILES)
    if files is None:
        raise AnalysisError(
            f"{table.name} has no column of file names (it has: "
            f"{', '.join(map(str, table.header))}): name it file_name"
        )
    return chosen[0], f"{files},{column}"


def kind_of_cell(cell: object, column: object) -> str | None:
    """Image or audio, if a cell of a row in memory is one or names one; None for other cells.

    Args:
        column: the name of its column, which decides for an array or a mapping.
    """
    if isinstance(cell, Sound):
        return "audio"
    if isinstance(cell, ArrayImage) or hasattr(cell, "getbbox"):
        return "image"
    if isinstance(cell, str | Path):
        return kind_of_paths([str(cell)])
    if isinstance(cell, Mapping) and "sampling_rate" in cell:
        return "audio"
    if _is_samples(cell):
        return "audio"
    if isinstance(cell, list | tuple) and cell:
        return kind_of_cell(cell[0], column)
    return COLUMNS.get(column) if isinstance(cell, np.ndarray) else None


def _is_samples(cell: object) -> bool:
    """Whether a cell has the samples of a sound, and their rate."""
    if not isinstance(cell, tuple) or len(cell) != 2:
        return False
    return isinstance(cell[0], np.ndarray) and not isinstance(cell[1], np.ndarray)


def captioned_cell(number: int, kind: str, cell: object, text: object) -> Captioned:
    """The images or the sound of a row in memory, with their text.

    Args:
        number: the number of the row, for errors.
        kind: image or audio.
        cell: a path; an image of Pillow or an array of its pixels; a :class:`Sound`, samples and
            their rate, or a mapping with ``array`` and ``sampling_rate``; or a list of images.

    Raises:
        AnalysisError: it is something else, there is no such file, or it has no text.
    """
    name = f"item {number}"
    if not isinstance(text, str):
        raise AnalysisError(f"{name} has {shown(text)} for a text: give a text with each file")
    several = isinstance(cell, list | tuple) and not _is_samples(cell)
    media = [_media(name, kind, each) for each in (cell if several else [cell])]
    return _captioned(name, kind, media, text)


def _media(name: str, kind: str, cell: object) -> MediaFile | ArrayImage | Sound:
    match cell:
        case ArrayImage() | Sound():
            return cell
        case str() | Path():
            if not os.path.isfile(cell):
                raise AnalysisError(f"{name} names {cell}, which is not there: mend its path")
            return MediaFile(kind, Path(cell).absolute())
        case {"array": samples, "sampling_rate": rate} | (samples, rate):
            return Sound(np.asarray(samples, dtype=np.float32), rate)
        case np.ndarray() if kind == "image":
            return ArrayImage(cell)
    if hasattr(cell, "getbbox"):
        mode = "L" if cell.mode in ("1", "L", "LA") else "RGB"
        return ArrayImage(np.asarray(cell.convert(mode)))
    wanted = "a path or an image" if kind == "image" else "a path, or samples with their rate"
    raise AnalysisError(f"{name} is {shown(cell)} where an {kind} is wanted: give {wanted}")


def _captioned(
    name: str, kind: str, media: Sequence[MediaFile | ArrayImage | Sound], text: str
) -> Captioned:
    if not media:
        raise AnalysisError(f"{name} has no {NOUNS[kind]}: give it one, or remove the row")
    if kind == "audio" and len(media) > 1:
        raise AnalysisError(f"{name} has {len(media)} sounds: give one with each text")
    if is_blank(text):
        raise AnalysisError(f"{name} has no text: give it one, or remove the row")
    refuse_half_characters(name, text)
    without_words = []
    for each in media:
        if isinstance(each, Sound | MediaFile) and each.text:
            each = replace(each, text="")
        without_words.append(each)
    return Captioned(tuple(without_words), text)
