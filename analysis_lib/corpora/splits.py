"""The corpora of Fosse et al. (2023) as folders of CSV files, laid out as ``data/README.md`` says."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from analysis_lib.corpora.loading import Labelled

# Of a corpus with classes: to train on, to stop training by, and to measure on.
SPLITS = ("train", "validation", "test")

# Of YelpHat, which comes without a division: what is left is for training.
VALIDATION_SHARE, TEST_SHARE = 0.15, 0.25

# The marks that word-level corpora set apart, with the blank before them.
_SET_APART = re.compile(r" (?=[.,;:!?)%\u201d]|n't\b|'(?:s|m|d|re|ve|ll)\b)|(?<=[($\u201c]) ")


def join_words(text: str) -> str:
    """A text whose punctuation and contractions are set apart by blanks, as it would be written.

    >>> print(join_words("A man , who does n't smile , says ( twice ) it 's `` late '' ."))
    A man, who doesn't smile, says (twice) it's "late".
    """
    quoted = text.replace("``", "\u201c").replace("''", "\u201d")
    return _SET_APART.sub("", quoted).replace("\u201c", '"').replace("\u201d", '"')


Prepare = Callable[[list["Labelled"]], list["Labelled"]]


def _pairs_as_written(rows: list["Labelled"]) -> list["Labelled"]:
    return [row._replace(text=row.text._make(map(join_words, row.text))) for row in rows]


def part(order: np.ndarray, split: str, validation: int, test: int) -> np.ndarray:
    """What a split has of texts in a drawn order: the first are for the test, the next for validation.

    >>> [part(np.arange(6), split, 1, 2).tolist() for split in SPLITS]
    [[3, 4, 5], [2], [0, 1]]
    """
    parts = {"test": order[:test], "validation": order[test : test + validation]}
    return parts.get(split, order[test + validation :])


def divided(split: str, validation: float, test: float = 0.0) -> Prepare:
    """The rows of a split, drawn with the balance of the classes; in the order of the corpus.

    Args:
        validation: the share of each class that is for validation.
        test: the share that is for the test.
    """

    def draw(rows: list["Labelled"]) -> list["Labelled"]:
        labels = np.array([row.label for row in rows])
        found: list[int] = []
        for seed, label in enumerate(np.unique(labels)):
            order = np.random.default_rng(seed).permutation(np.flatnonzero(labels == label))
            found += part(order, split, round(validation * len(order)), round(test * len(order))).tolist()
        return [rows[i] for i in sorted(found)]

    return draw


def whole(rows: list["Labelled"]) -> list["Labelled"]:
    return rows


# The files of each split, their columns of texts, and what becomes of the rows.
_Layout = dict[str, tuple[Sequence[str], str, Prepare]]
_YELP_PARTS = [f"yelphat_part{part}.csv" for part in (1, 6, 7, 8)]

LAYOUTS: dict[str, _Layout] = {
    "hatexplain": {
        split: ([f"hatexplain_{name}.csv"], "text", whole)
        for split, name in zip(SPLITS, ("train", "val", "test"), strict=True)
    },
    "yelphat": {split: (_YELP_PARTS, "text", divided(split, VALIDATION_SHARE, TEST_SHARE)) for split in SPLITS},
    "esnli": {
        "train": (["snli_train_subset.csv"], "sentence1,sentence2", whole),
        "validation": (["esnli_dev.csv"], "sentence1,sentence2", _pairs_as_written),
        "test": (["esnli_test.csv"], "sentence1,sentence2", _pairs_as_written),
    },
}
