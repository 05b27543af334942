"""The corpora of Fosse et al. (2023) as folders of CSV files, laid out as ``data/README.md`` says."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from analysis_lib.corpora.corpus import Labelled, Located, refuse_gaps
from analysis_lib.corpora.files import read_column
from analysis_lib.corpora.media import read_bytes
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.errors import AnalysisError, near_names

# The marks that word-level corpora set apart, with the blank before them.
_SET_APART = re.compile(r" (?=[.,;:!?)%\u201d]|n't\b|'(?:s|m|d|re|ve|ll)\b)|(?<=[($\u201c]) ")


def join_words(text: str) -> str:
    """A text whose punctuation and contractions are set apart by blanks, as it would be written.

    >>> print(join_words("A man , who does n't smile , says ( twice ) it 's `` late '' ."))
    A man, who doesn't smile, says (twice) it's "late".
    """
    quoted = text.replace("``", "\u201c").replace("''", "\u201d")
    return _SET_APART.sub("", quoted).replace("\u201c", '"').replace("\u201d", '"')


def _as_written(rows: list[Labelled]) -> list[Labelled]:
    return [row._replace(text=row.text._make(map(join_words, row.text))) for row in rows]


class _Split(NamedTuple):
    """The files of a split, their columns, and what makes its rows of theirs."""

    files: Sequence[str]
    columns: str
    prepare: Callable[[list[Labelled]], list[Labelled]] = list


_YELP_PARTS = [f"yelphat_part{part}.csv" for part in (1, 6, 7, 8)]

# The splits of each folder, by its name.
FOLDERS: dict[str, dict[str, _Split]] = {
    "hatexplain": {
        "train": _Split(["hatexplain_train.csv"], "text:label"),
        "validation": _Split(["hatexplain_val.csv"], "text:label"),
        "test": _Split(["hatexplain_test.csv"], "text:label"),
    },
    # It comes without a division.
    "yelphat": {
        split: _Split(_YELP_PARTS, "text:label", partial(divided, split=split, validation=0.15, test=0.25))
        for split in SPLITS
    },
    "esnli": {
        "train": _Split(["snli_train_subset.csv"], "sentence1,sentence2:label"),
        "validation": _Split(["esnli_dev.csv"], "sentence1,sentence2:label", _as_written),
        "test": _Split(["esnli_test.csv"], "sentence1,sentence2:label", _as_written),
    },
}


def located(spec: str) -> Located | None:
    """The split of a folder that ``spec`` names, the first one if it names none; None if it names no such folder."""
    path, split = Path(spec), None
    if path.name not in FOLDERS and ":" in spec:
        before, split = spec.rsplit(":", 1)
        path = Path(before)
    # Not Path.is_dir, which raises an error of its own where a name is too long.
    if path.name not in FOLDERS or not os.path.isdir(path):
        return None
    splits = FOLDERS[path.name]
    split = split or next(iter(splits))
    if split not in splits:
        raise AnalysisError(f"{path} has no split {split}: {near_names(split, splits)}")
    return Located("text", partial(_read, path, splits[split]), partial(_identity, path, split))


def _read(folder: Path, split: _Split) -> list[Labelled]:
    found = {path: read_column(path, split.columns) for path in _files(folder, split)}
    for path, rows in found.items():
        # Here, where an example still has its place in a file.
        refuse_gaps(str(path), rows)
    return split.prepare([row for rows in found.values() for row in rows])


def _files(folder: Path, split: _Split) -> list[Path]:
    files = [folder / name for name in split.files]
    if missing := [path for path in files if not path.is_file()]:
        raise AnalysisError(f"there is no {missing[0]}: lay the folder out as data/README.md says")
    return files


def _identity(folder: Path, split: str) -> str:
    splits = FOLDERS[folder.name]
    _files(folder, splits[split])
    # Of every split: whoever names the folder alone may read them all.
    files = sorted({folder / name for kept in splits.values() for name in kept.files})
    digests = [hashlib.sha256(read_bytes(path)).digest() for path in files if path.is_file()]
    return f"{split} of sha256:{hashlib.sha256(b''.join(digests)).hexdigest()}"
