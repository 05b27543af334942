"""Corpora of Fosse et al. (2023) as folders of CSV files, with the layout in ``data/README.md``.

To add one, write an entry of ``data/folders.yml``.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from analysis_lib.corpora.corpus import Example, Reader, checked
from analysis_lib.corpora.files import read_column
from analysis_lib.corpora.reading import read_bytes
from analysis_lib.corpora.splits import divided
from analysis_lib.errors import AnalysisError, near_names, shown
from analysis_lib.files import entries

# Marks that word-level corpora separate by a blank, with that blank.
_SET_APART = re.compile(
    r" (?=[.,;:!?)%\u201d]|n't\b|'(?:s|m|d|re|ve|ll)\b)|(?<=[($\u201c]) ",
)


def join_words(text: str) -> str:
    """A text whose punctuation and contractions are set apart by blanks, in normal spelling.

    >>> print(join_words("A man , who does n't smile , says ( twice ) it 's `` late '' ."))
    A man, who doesn't smile, says (twice) it's "late".
    """
    quoted = text.replace("``", "\u201c").replace("''", "\u201d")
    return _SET_APART.sub("", quoted).replace("\u201c", '"').replace("\u201d", '"')


class _Folder(NamedTuple):
    """An entry of ``data/folders.yml``, where the fields are explained."""

    title: str
    columns: str
    splits: dict[str, list[str]]
    shares: Sequence[float] = ()
    set_apart: Sequence[str] = ()


FOLDERS = entries("folders.yml", _Folder)


def title(name: str) -> str:
    """Title of a corpus in figures and sentences: its proper name, or the last part of its path.

    Dollar signs are avoided: Matplotlib typesets text between two of them as mathematics.

    >>> title("corpora/esnli"), title("e-snli"), title("corpora/mine.csv:text:label")
    ('e-SNLI', 'e-SNLI', 'mine.csv')
    """
    if not isinstance(name, str):
        raise AnalysisError(f"the name of a corpus is {shown(name)}: give a text")
    last = Path(name).name.partition(":")[0]
    known = FOLDERS.get(last.replace("-", "").lower())
    return known.title if known else last.replace("$", "_")


def folder_reader(spec: str) -> Reader | None:
    """The reader of a split of such a folder; None for other names.

    Without a split in the name, it is the first one.
    """
    path = Path(spec)
    split = ""
    if path.name not in FOLDERS and ":" in spec:
        before, split = spec.rsplit(":", 1)
        path = Path(before)
    # ``Path.is_dir`` raises an error of its own if a name is too long.
    if path.name not in FOLDERS or not os.path.isdir(path):
        return None
    splits = FOLDERS[path.name].splits
    if path == Path(spec):
        split = next(iter(splits))
    if split not in splits:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, splits)}")
    return Reader(spec, "text", lambda: _read(path, split), lambda: _identity(path, split))


def _read(folder: Path, split: str) -> list[Example]:
    layout = FOLDERS[folder.name]
    examples = []
    for path in _files(folder, split):
        # Checked here, where the number of an example in its file is known.
        examples += checked(str(path), read_column(path, layout.columns))
    if layout.shares:
        examples = divided(examples, split, *layout.shares)
    if split in layout.set_apart:
        examples = [_joined_words(example) for example in examples]
    return examples


def _joined_words(example: Example) -> Example:
    pair = example.item
    return example._replace(item=pair._make(map(join_words, pair)))


def _files(folder: Path, split: str) -> list[Path]:
    files = [folder / name for name in FOLDERS[folder.name].splits[split]]
    for path in files:
        if not path.is_file():
            raise AnalysisError(f"there is no {path}: lay the folder out as data/README.md says")
    return files


def _identity(folder: Path, split: str) -> str:
    _files(folder, split)
    # All splits, since a folder without a split may be read completely.
    names = sorted(set().union(*FOLDERS[folder.name].splits.values()))
    digest = hashlib.sha256()
    for path in (folder / name for name in names):
        if path.is_file():
            digest.update(hashlib.sha256(read_bytes(path)).digest())
    return f"{split} of sha256:{digest.hexdigest()}"
