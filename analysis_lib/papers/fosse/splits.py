"""What classifiers are trained, stopped and tested on (Fosse et al. 2023, sec. 2.3)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from analysis_lib.corpora import SPLITS, Corpus, load_corpus
from analysis_lib.errors import AnalysisError

# The paper measures on so many utterances of the test data.
UTTERANCES = 1000


def splits(data: str, limit: int = 0, test_limit: int = 0, seed: int = 0) -> tuple[Corpus, Corpus, Corpus]:
    """What a classifier is trained on, stopped by and tested on.

    Args:
        data: a corpus with classes and the splits train, validation and test, or a file with classes
            (``reviews.csv:text:label``), whose splits are drawn as ``load_corpus`` says.
        limit: how many texts to train on, drawn with the balance of the classes, and a quarter as many to validate
            on; 0 for all.
        test_limit: how many texts to test on, drawn in the same way.
        seed: of the draws.

    Raises:
        AnalysisError: there is no such corpus, it lacks a split or has no classes, the test split has a class that
            the training split lacks, or a limit is negative.
    """
    limits = (limit, -(-limit // 4), test_limit)
    whole = [load_corpus(f"{data}:{split}") for split in SPLITS]
    # Found here and not after the training, when the texts of that class cannot be scored.
    if unknown := sorted(set(whole[-1].classes or ()) - set(whole[0].classes or ())):
        raise AnalysisError(f"{data}:test has the class {unknown[0]}, which {data}:train lacks: leave it out")
    return tuple(stratified(corpus, size or len(corpus), seed) for corpus, size in zip(whole, limits, strict=True))


def stratified(corpus: Corpus, utterances: int = UTTERANCES, seed: int = 0) -> Corpus:
    """Utterances drawn without replacement so that each class keeps its share, in the order of the corpus.

    A corpus of fewer utterances is returned whole.

    Raises:
        AnalysisError: the corpus has no classes, or fewer than one utterance is asked for.
    """
    if corpus.labels is None or utterances < 1:
        raise AnalysisError(f"{utterances} utterances of {corpus.name}: give one or more, of a corpus with classes")
    if utterances >= len(corpus):
        return corpus
    labels, counts = np.unique(corpus.labels, return_counts=True)
    exact = utterances * counts / len(corpus)
    sizes = np.floor(exact).astype(int)
    # What rounding down has left goes to the classes that lost most by it.
    sizes[np.argsort(sizes - exact, kind="stable")[: utterances - sizes.sum()]] += 1
    places = [np.flatnonzero(np.equal(corpus.labels, label)) for label in labels]
    return _drawn(corpus, places, sizes, seed, corpus.classes)


def largest_classes(corpora: Sequence[Corpus], count: int, examples: int = 0, seed: int = 0) -> list[Corpus]:
    """The same corpora with only the classes of which the first corpus has most, and as many examples of each class.

    Args:
        corpora: with classes, such as the splits of one corpus.
        count: how many classes are kept, two or more.
        examples: of each class in the first corpus, at most; 0 for as many as each class has. The other corpora keep
            as many as each class has.
        seed: of the draw of the examples.

    Raises:
        AnalysisError: fewer than two classes, or more than there are, are asked for; or a corpus lacks one of them.
    """
    first, found = corpora[0], []
    if first.labels is None or not 2 <= count <= len(first.classes):
        raise AnalysisError(f"{count} classes of {first.name}: give 2 to {len(first.classes or ())}, its classes")
    # Of classes of one size the first by name; sorted, since a corpus names its classes in that order.
    kept = sorted(name for name, _ in Counter(first.classes[i] for i in sorted(first.labels)).most_common(count))
    for corpus in corpora:
        names = np.array(corpus.classes)[np.asarray(corpus.labels)]
        places = [np.flatnonzero(names == name) for name in kept]
        size = min(map(len, places))
        if not size:
            raise AnalysisError(f"{corpus.name} lacks some of the {count} classes: ask for fewer")
        size = min(size, examples) if corpus is first and examples else size
        found.append(_drawn(corpus, places, [size] * count, seed, kept))
    return found


def _drawn(
    corpus: Corpus, places: Sequence[np.ndarray], sizes: Sequence[int], seed: int, classes: Sequence[str]
) -> Corpus:
    """So many utterances from each list of places, in the order of the corpus, with these classes."""
    random = np.random.default_rng(seed)
    chosen = np.sort(np.concatenate([random.choice(*draw, replace=False) for draw in zip(places, sizes, strict=True)]))
    labels = [list(classes).index(corpus.classes[corpus.labels[i]]) for i in chosen]
    return Corpus(corpus.name, [corpus.items[i] for i in chosen], labels=labels, classes=classes)
