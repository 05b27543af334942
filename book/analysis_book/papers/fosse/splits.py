"""The corpora that classifiers are trained, stopped and tested on (Fosse et al. 2023, 2.3)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis_lib.corpora import SPLITS, Corpus, load_corpus
from analysis_lib.errors import AnalysisError, require_seed, require_text, require_whole


def splits(
    data: str,
    limit: int = 0,
    test_limit: int = 0,
    seed: int = 0,
    test: str | None = None,
) -> tuple[Corpus, Corpus, Corpus]:
    """The corpora that a classifier is trained on, stopped by and tested on.

    Args:
        data: a corpus with classes and the splits train, validation and test, or a file with
            classes (``reviews.csv:text:label``), whose splits are drawn as ``load_corpus`` says.
        limit: how many texts to train on, drawn with the balance of the classes, and a quarter as
            many to validate on; 0 for all.
        test_limit: how many texts to test on, drawn in the same way.
        seed: of the draws.
        test: a corpus with classes to test on, where one was published; all that is not for
            validation is trained on.

    Raises:
        AnalysisError: there is no such corpus, it lacks a split or has no classes, the test split
            has a class that the training split lacks, or a limit is negative.
    """
    require_text("data", data, "a corpus with classes, as in reviews.csv:text:label")
    limit = require_whole("the limit of texts to train on", limit)
    test_limit = require_whole("the limit of texts to test on", test_limit)
    seed = require_seed("the seed", seed)
    if test is not None:
        require_text("test", test, "a corpus with classes, or leave it out")
    limits = (limit, -(-limit // 4), test_limit)
    if data.count(":") < 2 and Path(data.partition(":")[0]).is_file():
        raise AnalysisError(
            f"{data} names no classes: give a table with both columns, as in reviews.csv:text:label"
        )
    if test is None:
        whole = [load_corpus(f"{data}:{split}") for split in SPLITS]
    else:
        every = load_corpus(data)
        validation = load_corpus(f"{data}:validation")
        published = load_corpus(test)
        if published.labels is None:
            raise AnalysisError(
                f"{test} has no classes: give texts with them, as in reviews.csv:text:label"
            )
        kept = {*validation.items, *published.items}
        rest = [index for index, item in enumerate(every.items) if item not in kept]
        whole = [every.take(rest), validation, published]
    if not len(whole[0]):
        raise AnalysisError(f"all texts of {data} are in {test}, too: give other texts to test on")
    # Refused here and not after the training, when the texts of that class cannot be scored.
    unknown = sorted({*(whole[-1].classes or ())} - {*(whole[0].classes or ())})
    if unknown:
        raise AnalysisError(
            f"{test or f'{data}:test'} has the class {unknown[0]}, which {data} lacks: leave it out"
        )
    samples = []
    for corpus, size in zip(whole, limits, strict=True):
        samples.append(stratified(corpus, size or len(corpus), seed))
    return tuple(samples)


def largest_classes(
    corpora: Sequence[Corpus],
    count: int,
    limit: int = 0,
) -> list[Corpus]:
    """The same corpora with only the largest classes of the first, as many examples of each.

    Args:
        corpora: with classes, such as the splits of one corpus.
        count: how many classes are kept, two or more.
        limit: of the first corpus, about how many examples are kept, ⌈limit / count⌉ of each class;
            0 for as many as each class has, which is what the other corpora keep.

    Raises:
        AnalysisError: fewer than two classes, or more than there are, are asked for; or a corpus
            lacks one of them.
    """
    require_whole("the number of classes", count, 2)
    require_whole("the limit", limit)
    first = corpora[0]
    if first.labels is None or not 2 <= count <= len(first.classes):
        raise AnalysisError(
            f"{count} classes of {first.name}: give 2 to {len(first.classes or ())}, its classes"
        )
    # Of classes of one size the first by name; sorted, since a corpus names its classes in that
    # order.
    counts = Counter(first.classes[label] for label in sorted(first.labels))
    kept = sorted(name for name, _ in counts.most_common(count))
    smaller = []
    for corpus in corpora:
        names = [corpus.classes[label] for label in corpus.labels]
        size = min(names.count(name) for name in kept)
        if not size:
            raise AnalysisError(f"{corpus.name} lacks some of the {count} classes: ask for fewer")
        if corpus is first and limit:
            size = min(size, -(-limit // count))
        chosen = drawn(names, dict.fromkeys(kept, size))
        labels = [kept.index(names[index]) for index in chosen]
        smaller.append(replace(corpus.take(chosen), labels=labels, classes=kept))
    return smaller


def stratified(corpus: Corpus, count: int, seed: int = 0) -> Corpus:
    """``count`` items of a corpus in its order, drawn so that each class keeps its share.

    A corpus of at most ``count`` items is returned as it is.

    Raises:
        AnalysisError: the corpus has no classes, or ``count`` is below 1.

    >>> letters = Corpus("letters", [*"aabbbb"], labels=[0, 0, 1, 1, 1, 1], classes=["a", "b"])
    >>> stratified(letters, 3).items
    ['a', 'b', 'b']
    """
    if corpus.labels is None or count < 1:
        raise AnalysisError(
            f"{count} items of {corpus.name}: give one or more, of a corpus with classes"
        )
    if count >= len(corpus):
        return corpus
    classes, sizes = np.unique(corpus.labels, return_counts=True)
    shares = count * sizes / len(corpus)
    counts = np.floor(shares).astype(int)
    # Items left over by rounding down go to the classes that lost most by it.
    left = count - counts.sum()
    by_loss = np.argsort(counts - shares, kind="stable")
    counts[by_loss[:left]] += 1
    sizes_drawn = dict(zip(classes, counts, strict=True))
    chosen = drawn(corpus.labels, sizes_drawn, seed)
    return corpus.take(chosen)


def drawn(labels: Sequence, sizes: Mapping[object, int], seed: int = 0) -> np.ndarray:
    """Sorted indices of ``sizes[label]`` items of each class, drawn without replacement.

    >>> drawn(["a", "b", "b", "c"], {"b": 2, "a": 1})
    array([0, 1, 2])
    """
    labels = np.asarray(list(labels))
    random = np.random.default_rng(seed)
    chosen = []
    for label, size in sizes.items():
        members = np.flatnonzero(labels == label)
        of_class = random.choice(members, size, replace=False)
        chosen.append(of_class)
    return np.sort(np.concatenate(chosen))
