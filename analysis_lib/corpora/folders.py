"""The corpora of Fosse et al. (2023) as folders of CSV files, laid out as ``data/README.md`` says."""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from analysis_lib.corpora.corpus import Labelled, Located, refuse_gaps
from analysis_lib.corpora.files import read_column
from analysis_lib.corpora.media import read_bytes
from analysis_lib.corpora.packages import entries
from analysis_lib.corpora.splits import divided
from analysis_lib.errors import AnalysisError, near_names, shown

# The marks that word-level corpora set apart, with the blank before them.
_SET_APART = re.compile(r" (?=[.,;:!?)%\u201d]|n't\b|'(?:s|m|d|re|ve|ll)\b)|(?<=[($\u201c]) ")


def join_words(text: str) -> str:
    """A text whose punctuation and contractions are set apart by blanks, as it would be written.

    >>> print(join_words("A man , who does n't smile , says ( twice ) it 's `` late '' ."))
    A man, who doesn't smile, says (twice) it's "late".
    """
    quoted = text.replace("``", "\u201c").replace("''", "\u201d")
    return _SET_APART.sub("", quoted).replace("\u201c", '"').replace("\u201d", '"')


class _Folder(NamedTuple):
    """An entry of ``data/folders.yml``, which says what each field means."""

    title: str
    columns: str
    splits: dict[str, list[str]]
    shares: Sequence[float] = ()
    set_apart: Sequence[str] = ()


FOLDERS = entries("folders.yml", _Folder)


def title(name: str) -> str:
    """What a corpus is called in figures and sentences: its proper name, or the last part of its path.

    Matplotlib sets what stands between two ``$`` as mathematics.

    >>> title("corpora/esnli"), title("e-snli"), title("corpora/mine.csv:text:label")
    ('e-SNLI', 'e-SNLI', 'mine.csv')
    """
    if not isinstance(name, str):
        raise AnalysisError(f"the name of a corpus is {shown(name)}: give a text")
    last = Path(name).name.partition(":")[0]
    known = FOLDERS.get(last.replace("-", "").lower())
    return known.title if known else last.replace("$", "_")


def located(spec: str) -> Located | None:
    """The split of a folder that ``spec`` names, the first one if it names none; None if it names no such folder."""
    path, split = Path(spec), None
    if path.name not in FOLDERS and ":" in spec:
        before, split = spec.rsplit(":", 1)
        path = Path(before)
    # Not Path.is_dir, which raises an error of its own where a name is too long.
    if path.name not in FOLDERS or not os.path.isdir(path):
        return None
    splits = FOLDERS[path.name].splits
    split = next(iter(splits)) if split is None else split
    if split not in splits:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, splits)}")
    return Located("text", partial(_read, path, split), partial(_identity, path, split))


def _read(folder: Path, split: str) -> list[Labelled]:
    layout = FOLDERS[folder.name]
    found = {path: read_column(path, layout.columns) for path in _files(folder, split)}
    for path, rows in found.items():
        # Here, where an example still has its place in a file.
        refuse_gaps(str(path), rows)
    rows = [row for rows in found.values() for row in rows]
    if layout.shares:
        rows = divided(rows, split, *layout.shares)
    if split in layout.set_apart:
        rows = [row._replace(text=row.text._make(map(join_words, row.text))) for row in rows]
    return rows


def _files(folder: Path, split: str) -> list[Path]:
    files = [folder / name for name in FOLDERS[folder.name].splits[split]]
    if missing := [path for path in files if not path.is_file()]:
        raise AnalysisError(f"there is no {missing[0]}: lay the folder out as data/README.md says")
    return files


def _identity(folder: Path, split: str) -> str:
    _files(folder, split)
    # Of every split: whoever names the folder alone may read them all.
    files = sorted({folder / name for names in FOLDERS[folder.name].splits.values() for name in names})
    digests = [hashlib.sha256(read_bytes(path)).digest() for path in files if path.is_file()]
    return f"{split} of sha256:{hashlib.sha256(b''.join(digests)).hexdigest()}"
