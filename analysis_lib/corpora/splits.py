"""Which items of a corpus are drawn: at random, or as one split of three with the balance of the classes.

Every draw depends on its arguments alone. The generators are numpy's, not scikit-learn's: the measurements in
``data/measurements`` are of the texts that these draw.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from analysis_lib.corpora.corpus import Corpus, Labelled
from analysis_lib.errors import AnalysisError

# Of a corpus with classes: to train on, to stop training by, and to measure on.
SPLITS = ("train", "validation", "test")
# One of so many is held out from pretraining.
_UNITS, _TEXTS = 10, 40


def check_draw(limit: int | None, seed: int | None) -> None:
    """Raise an AnalysisError if no items can be drawn so: a limit below 1 or a negative seed."""
    if limit is not None and limit < 1:
        raise AnalysisError(f"the limit is {limit}: give 1 or more, or leave it out to read the whole corpus")
    if seed is not None and seed < 0:
        raise AnalysisError(f"the seed is {seed}: give 0 or more")


def sample(corpus: Corpus, limit: int | None, seed: int | None) -> Corpus:
    """At most ``limit`` items of a corpus, in its order: a uniform sample, or where the seed is None the first."""
    if limit is None or limit >= len(corpus):
        return corpus
    if seed is None:
        return corpus.take(range(limit))
    return corpus.take(np.sort(np.random.default_rng(seed).choice(len(corpus), size=limit, replace=False)))


def stratified(corpus: Corpus, count: int, seed: int = 0) -> Corpus:
    """``count`` items of a corpus, drawn without replacement so that each class keeps its share; in its order.

    The corpus itself if it has no more than ``count`` items.

    Raises:
        AnalysisError: the corpus has no classes, or ``count`` is below 1.

    >>> stratified(Corpus("letters", [*"aabbbb"], labels=[0, 0, 1, 1, 1, 1], classes=["a", "b"]), 3).items
    ['a', 'b', 'b']
    """
    if corpus.labels is None or count < 1:
        raise AnalysisError(f"{count} items of {corpus.name}: give one or more, of a corpus with classes")
    if count >= len(corpus):
        return corpus
    classes, sizes = np.unique(corpus.labels, return_counts=True)
    exact = count * sizes / len(corpus)
    whole = np.floor(exact).astype(int)
    # What rounding down has left goes to the classes that lost most by it.
    whole[np.argsort(whole - exact, kind="stable")[: count - whole.sum()]] += 1
    return corpus.take(drawn(corpus.labels, dict(zip(classes, whole, strict=True)), seed))


def held_out(units: Sequence | None, count: int) -> np.ndarray:
    """Which of ``count`` texts pretraining does not see: those of the last of every ten units, such as articles.

    Without units, every 40th text.

    >>> held_out([*"aabcdefghiijk"], 13).nonzero()
    (array([11]),)
    """
    units, every = (range(count), _TEXTS) if units is None else (units, _UNITS)
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    return np.array([places[unit] % every == every - 1 for unit in units], bool)


def drawn(labels: Sequence, sizes: Mapping[object, int], seed: int = 0) -> np.ndarray:
    """The places of so many items of each class, drawn without replacement by one generator; in order.

    >>> drawn(["a", "b", "b", "c"], {"b": 2, "a": 1})
    array([0, 1, 2])
    """
    labels, random = np.asarray(list(labels)), np.random.default_rng(seed)
    places = [random.choice(np.flatnonzero(labels == name), size, replace=False) for name, size in sizes.items()]
    return np.sort(np.concatenate(places))


def division(
    labels: Sequence,
    classes: Iterable,
    split: str,
    validation: float,
    test: float = 0.0,
    rounding: Callable[[float], int] = round,
    most: int | None = None,
) -> list[int]:
    """The places of a split's items, class after class, each in an order drawn with the class's place as the seed.

    The first of a class are for the test, the next for validation, and the rest for training.

    Args:
        labels: the class of each item.
        classes: the classes that are divided, in order.
        split: one of ``SPLITS``.
        validation: the share of each class that is for validation.
        test: the share of each class that is for the test.
        rounding: makes a number of items of a share of them.
        most: how many items of a class are kept at most; None keeps all.

    >>> [sorted(division("aaaaabbbbb", "ab", split, 0.2, 0.2)) for split in SPLITS]
    [[0, 1, 3, 6, 7, 8], [4, 5], [2, 9]]
    """
    labels, found = np.asarray(list(labels)), []
    for seed, name in enumerate(classes):
        order = np.random.default_rng(seed).permutation(np.flatnonzero(labels == name))[:most]
        first, second = rounding(test * len(order)), rounding(validation * len(order))
        parts = np.split(order, [first, first + second])
        found += dict(zip(("test", "validation", "train"), parts, strict=True))[split].tolist()
    return found


def divided(rows: Sequence[Labelled], split: str, validation: float, test: float = 0.0) -> list[Labelled]:
    """The rows of a split, drawn with the balance of the classes as :func:`division` does; in their order."""
    labels = [row.label for row in rows]
    return [rows[i] for i in sorted(division(labels, np.unique(labels), split, validation, test))]
