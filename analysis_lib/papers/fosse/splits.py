"""What classifiers are trained and tested on, and an encoder before and after it is fine-tuned (Fosse et al. 2023)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis_lib.corpora.loading import SPLITS, Corpus, load_corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.models.loading import LoadedModel, load_model
from analysis_lib.training.classification import finetune

# The paper measures on so many utterances of the test data.
UTTERANCES = 1000


def stratified(corpus: Corpus, utterances: int = UTTERANCES, seed: int = 0) -> Corpus:
    """Utterances of a corpus, drawn without replacement so that each class keeps its share; in the corpus's order.

    A corpus of fewer is returned whole.

    Raises:
        AnalysisError: the corpus has no classes, or fewer than one utterance is asked for.
    """
    if corpus.labels is None or utterances < 1:
        raise AnalysisError(f"{utterances} utterances of {corpus.name}: give one or more, of a corpus with classes")
    if utterances >= len(corpus):
        return corpus
    labels, random = np.asarray(corpus.labels), np.random.default_rng(seed)
    names, counts = np.unique(labels, return_counts=True)
    exact = utterances * counts / len(labels)
    sizes = np.floor(exact).astype(int)
    # What rounding down has left goes to the classes that lost most by it.
    sizes[np.argsort(sizes - exact, kind="stable")[: utterances - sizes.sum()]] += 1
    parts = zip(names, sizes, strict=True)
    drawn = [random.choice(np.flatnonzero(labels == name), size, replace=False) for name, size in parts]
    chosen = np.sort(np.concatenate(drawn))
    return Corpus(
        corpus.name,
        [corpus.items[i] for i in chosen],
        labels=[corpus.labels[i] for i in chosen],
        classes=corpus.classes,
    )


def largest_classes(corpora: Sequence[Corpus], count: int, examples: int = 0, seed: int = 0) -> list[Corpus]:
    """The same corpora with some classes alone: those of which the first corpus has most, as many examples of each.

    Args:
        corpora: with classes, such as the splits of one.
        count: of the classes that are kept, two or more.
        examples: of each class in the first corpus, at most; 0 for as many as all of them have, as in the others.
        seed: of the draw of the examples.

    Raises:
        AnalysisError: fewer than two classes are asked for or there are fewer, or a class that a corpus lacks.
    """
    first = corpora[0]
    if first.labels is None or not 2 <= count <= len(first.classes):
        raise AnalysisError(f"{count} classes of {first.name}: give 2 to {len(first.classes or ())}, its classes")
    # Of classes of one size the first by name; sorted, since a corpus names its classes in that order.
    kept = sorted(name for name, _ in Counter(first.classes[i] for i in sorted(first.labels)).most_common(count))
    found = []
    for corpus in corpora:
        random, names = np.random.default_rng(seed), np.array([corpus.classes[label] for label in corpus.labels])
        places = [np.flatnonzero(names == name) for name in kept]
        if not all(map(len, places)):
            raise AnalysisError(f"{corpus.name} lacks some of the {count} classes: ask for fewer")
        size = min(map(len, places))
        size = min(size, examples) if corpus is first and examples else size
        chosen = np.sort(np.concatenate([random.choice(of, size, replace=False) for of in places]))
        items, labels = [corpus.items[i] for i in chosen], [kept.index(names[i]) for i in chosen]
        found.append(Corpus(corpus.name, items, labels=labels, classes=kept))
    return found


@dataclass(frozen=True, eq=False)
class FineTuned:
    """An encoder before and after it was fine-tuned, and on what.

    Attributes:
        before: the encoder as it was.
        after: the same encoder with the weights of the classifier, without its dense layer.
        folder: of the classifier, as of :func:`finetune`.
        train: what it was trained on.
        validation: by which training stopped.
        test: what to measure on; both models are to read the same texts.
    """

    before: LoadedModel
    after: LoadedModel
    folder: Path
    train: Corpus
    validation: Corpus
    test: Corpus


def fine_tuned(
    model: str, data: str, train_limit: int = 0, test_limit: int = 0, seed: int = 0, **settings
) -> FineTuned:
    """Fine-tune an encoder on the splits ``data:train`` and ``data:validation``; measure it on ``data:test``.

    Args:
        model: as ``load_model`` takes it.
        data: as ``load_corpus`` takes it, without the split.
        train_limit, test_limit: as of :func:`splits`.
        seed: of the draws and of the training.
        settings: of :func:`finetune`.

    Raises:
        AnalysisError: as ``load_corpus``, :func:`stratified` and :func:`finetune`.
    """
    train, validation, test = splits(data, train_limit, test_limit, seed)
    before = load_model(model)
    folder = finetune(before, train, validation, seed=seed, **settings)
    return FineTuned(before, load_model(str(folder)), folder, train, validation, test)


def splits(data: str, limit: int = 0, test_limit: int = 0, seed: int = 0) -> tuple[Corpus, Corpus, Corpus]:
    """What a classifier is trained on, stopped by and tested on.

    Args:
        data: a corpus with classes and the splits train, validation and test, or a file with classes
            (``reviews.csv:text:label``), whose splits are drawn as ``load_corpus`` says.
        limit: how many texts to train on, drawn with the balance of the classes, and a quarter of as many to validate
            on; 0 for all.
        test_limit: how many to test on, drawn in the same way.
        seed: of the draws.

    Raises:
        AnalysisError: there is no such corpus, it lacks a split or has no classes, the test split has a class more than
            the training split, or a limit is negative.
    """
    limits = (limit, -(-limit // 4), test_limit)
    whole = [load_corpus(f"{data}:{split}") for split in SPLITS]
    # Not after the training, when the texts of that class cannot be scored.
    if unknown := sorted(set(whole[-1].classes or ()) - set(whole[0].classes or ())):
        raise AnalysisError(f"{data}:test has the class {unknown[0]}, which {data}:train lacks: leave it out")
    return tuple(stratified(corpus, of or len(corpus), seed) for corpus, of in zip(whole, limits, strict=True))
