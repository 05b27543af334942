"""Draws from a corpus: a random sample, or one of three splits with the same balance of classes.

Every draw depends only on its arguments. The generators are numpy's, not scikit-learn's: the
measurements in ``data/measurements`` use the texts that these draw.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from analysis_lib.corpora.corpus import Corpus, Example
from analysis_lib.errors import require_seed, require_whole

# Splits of a corpus with classes: for training, for early stopping, and for measuring.
SPLITS = ("train", "validation", "test")
# One unit in this many, or one text in this many without units, is held out from pretraining.
_UNITS = 10
_TEXTS = 40


def check_draw(limit: int | None, seed: int | None) -> None:
    """Check the arguments of a draw.

    Raises:
        AnalysisError: a limit below 1 or a negative seed.
    """
    if limit is not None:
        require_whole("the limit", limit, 1)
    if seed is not None:
        require_seed("the seed", seed)


def sample(corpus: Corpus, limit: int | None, seed: int | None) -> Corpus:
    """At most ``limit`` items of a corpus, in its order: a uniform sample.

    If the seed is None, the first items.
    """
    if limit is None or limit >= len(corpus):
        return corpus
    if seed is None:
        return corpus.take(range(limit))
    random = np.random.default_rng(seed)
    return corpus.take(np.sort(random.choice(len(corpus), size=limit, replace=False)))


def held_out(units: Sequence | None, count: int) -> np.ndarray:
    """True at those of ``count`` texts that pretraining does not see.

    They are the texts of every tenth unit, such as an article; without units, every 40th text.

    >>> held_out([*"aabcdefghiijk"], 13).nonzero()
    (array([11]),)
    """
    every = _UNITS
    if units is None:
        units = range(count)
        every = _TEXTS
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units), 1)}
    return np.array([number[unit] % every == 0 for unit in units], bool)


def division(
    labels: Sequence,
    classes: Iterable,
    split: str,
    validation: float,
    test: float = 0.0,
    rounding: Callable[[float], int] = round,
    most: int | None = None,
) -> list[int]:
    """Indices of a split's items, class after class, each class in a random order.

    The first items of a class are for the test, the next for validation, and the rest for training.
    The seed of a class is its index in ``classes``.

    Args:
        labels: the class of each item.
        classes: the classes to divide, in order.
        split: one of ``SPLITS``.
        validation: the share of each class for validation.
        test: the share of each class for the test.
        rounding: rounds a share of the items to a number of items.
        most: the largest number of items of a class that are kept; None keeps all.

    >>> [sorted(division("aaaaabbbbb", "ab", split, 0.2, 0.2)) for split in SPLITS]
    [[0, 1, 3, 6, 7, 8], [4, 5], [2, 9]]
    """
    labels = np.asarray(list(labels))
    chosen = []
    for seed, label in enumerate(classes):
        members = np.flatnonzero(labels == label)
        order = np.random.default_rng(seed).permutation(members)[:most]
        tests = rounding(test * len(order))
        validations = rounding(validation * len(order))
        parts = {
            "test": order[:tests],
            "validation": order[tests : tests + validations],
            "train": order[tests + validations :],
        }
        chosen += parts[split].tolist()
    return chosen


def divided(
    examples: Sequence[Example], split: str, validation: float, test: float = 0.0
) -> list[Example]:
    """The examples of a split in their order, drawn by :func:`division`."""
    labels = [example.label for example in examples]
    chosen = division(labels, np.unique(labels), split, validation, test)
    return [examples[i] for i in sorted(chosen)]
