"""Directions that are classes, and the cone of the values that attention averages (Fosse et al.
2023, sec. 3).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from analysis_book.sources import book_hash
from analysis_book.training import predict
from analysis_lib import capture
from analysis_lib.corpora import Corpus, Pair
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.stored import StoredMeasurements
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.intervals import Estimate, jackknife
from analysis_lib.models import LoadedModel, load_model

Vectors = Float[np.ndarray, "utterance width"]
Cosines = Float[np.ndarray, "utterance utterance"]
Labels = Int[np.ndarray, " utterance"]
Correct = Bool[np.ndarray, " utterance"]
# Places of utterances, as a jackknife leaves them.
Kept = Int[np.ndarray, " kept"]


def class_vectors(model: LoadedModel, corpus: Corpus) -> Vectors:
    """The vector of the first token, [CLS] in BERT, after the last block: cls_j of the paper.

    Args:
        corpus: of texts; a text longer than the model reads is cut.

    Raises:
        AnalysisError: the model does not read texts.
    """
    if (model.kind, corpus.kind) != ("text", "text"):
        raise AnalysisError(
            f"{model.name} on {corpus.name}: give a model that reads texts, and texts"
        )
    last = sum(map(len, model.stacks.values()))
    found: dict[int, np.ndarray] = {}

    def receive(activations: capture.Activations) -> None:
        if activations.layer == last:
            vectors = activations.spaces["hidden"].values[:, 0, 0].double().cpu().numpy()
            found.update(zip(activations.tokens.groups, vectors, strict=True))

    def read() -> Vectors:
        # The group of an utterance is its place: batches come in an order of their own.
        for batch in capture.batches(
            model, corpus.items, range(len(corpus)), capture.Settings(), capture.Reading()
        ):
            capture.run(model, batch, frozenset({"hidden"}), receive)
        return np.stack([found[i] for i in range(len(corpus))])

    return _kept(
        "class_vectors", StoredMeasurements.of_model(model, corpus, capture.Settings()), read
    )


def _kept(
    name: str,
    beside: StoredMeasurements,
    make: Callable[[], np.ndarray],
) -> np.ndarray:
    """What this module makes of each text, kept beside the measurements: several pages ask for
    it.
    """
    return beside.array(f"{name}-{book_hash()[:16]}", make)


def cosines(vectors: Vectors) -> Cosines:
    """The cosine of every two utterances; NaN where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, np.nan)
    return unit @ unit.T


def predicted(folder: Path | str, corpus: Corpus) -> np.ndarray:
    """The class that a classifier gives each text, by its name."""

    def read() -> np.ndarray:
        return predict(folder, corpus)["predicted"].to_numpy(str)

    # Texts without classes are refused by who reads them, whether or not it has read them before.
    if corpus.labels is None:
        return read()
    return _kept(
        "predicted", StoredMeasurements.of_name(str(folder), corpus, capture.Settings()), read
    )


def classified(folder: Path | str, corpus: Corpus) -> tuple[Cosines, Correct]:
    """What a classifier makes of texts with classes: their :func:`cosines`, and which it finds the
    class of.
    """
    right = predicted(folder, corpus) == np.array(corpus.classes)[corpus.labels]
    return cosines(class_vectors(load_model(str(folder)), corpus)), right


def draw_representatives(
    labels: Labels,
    correct: Correct,
    seed: int = 0,
) -> dict[int, int]:
    """The place of one utterance of each class, drawn among those classified correctly.

    Raises:
        AnalysisError: there is one class alone, or a class that no utterance represents.
    """
    if len(classes := np.unique(labels)) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    if missing := sorted(set(classes) - set(labels[correct])):
        raise AnalysisError(
            f"no utterance of class {missing[0]} was classified correctly: there is no "
            "representative"
        )
    random = np.random.default_rng(seed)
    return {
        int(label): int(random.choice(np.flatnonzero(correct & (labels == label))))
        for label in classes
    }


def to_representatives(
    similar: Cosines,
    corpus: Corpus,
    representatives: Mapping[int, int],
) -> pd.DataFrame:
    """The cosine of all texts to a representative of each class, itself left out (Fosse et al.
    2023, Fig. 2).

    Args:
        similar: from :func:`cosines`.
        corpus: the texts, with classes.
        representatives: from :func:`draw_representatives`.

    Returns:
        One row per representative and other text: representative and class, both names of classes,
        and cosine.
    """
    names = np.array(corpus.classes)
    found = {
        names[label]: pd.DataFrame({"class": names[corpus.labels], "cosine": similar[place]}).drop(
            place
        )
        for label, place in representatives.items()
    }
    return (
        pd.concat(found, names=["representative"])
        .reset_index("representative")
        .reset_index(drop=True)
    )


def over_texts(
    statistics: Mapping[str, Callable[[Kept], float | Sequence[float]]], corpus: Corpus
) -> dict[str, Estimate | list[Estimate]]:
    """Numbers of a sample of texts, with 95 % jackknife intervals over them.

    Args:
        statistics: by name, what computes a number, or several, from the texts at the places it is
            given.

    >>> found = over_texts({"mean": lambda kept: kept.mean()}, Corpus("x", range(41)))["mean"]
    >>> found.value, found.side(19), found.draws
    (20.0, 'undecided', 20)
    """
    places, groups = np.arange(len(corpus)), np.array(corpus.groups(GROUPS))
    several = [places[groups != group] for group in np.unique(groups)]
    return {
        name: jackknife(of(places), [of(kept) for kept in several])
        for name, of in statistics.items()
    }


def of_class(
    similar: Cosines,
    labels: Labels,
    correct: Correct,
    own: bool,
    kept: Kept,
) -> list[Float[np.ndarray, " pair"]]:
    """For each class, the cosines between its representatives, the correctly classified, and other
    texts.

    Args:
        similar: from :func:`cosines`.
        labels: the class of each text.
        correct: which were classified correctly.
        own: whether the other texts are those of the same class, or those of all other classes.
        kept: the texts that count.
    """
    found = []
    for label in np.unique(labels):
        representatives, of_label = (
            kept[(labels[kept] == label) & correct[kept]],
            labels[kept] == label,
        )
        pairs = similar[np.ix_(representatives, kept[of_label == own])]
        itself = representatives[:, None] == kept[of_label == own]
        found.append(pairs[~itself])
    return found


def areas(
    similar: Cosines,
    own: Bool[np.ndarray, " utterance"],
    correct: Correct,
) -> Float[np.ndarray, " representative"]:
    """How well the cosine to a representative of a class tells that class from the others (Fosse et
    al. 2023, Fig. 2).

    The area under the ROC curve is the probability that an utterance of the class is more like the
    representative than one of another class is (Mann and Whitney 1947); ties count half. 0.5 is no
    separation, 1 a complete one. The paper draws one representative of each class among the
    correctly classified; here every one of them takes its turn, and is itself left out.

    Args:
        similar: from :func:`cosines`.
        own: which utterances are of the class.
        correct: which were classified correctly; only those represent their class.

    Returns:
        The area of each representative; a single NaN where there is none, or nothing to compare it
        with.
    """
    representatives, same = np.flatnonzero(own & correct), np.flatnonzero(own)
    pairs = (len(same) - 1) * (len(own) - len(same))
    if not (len(representatives) and pairs):
        return np.array([np.nan])
    rows = similar[representatives]
    # A rank among all less that among the class: how many of the others lie below, a tie as a half.
    below = stats.rankdata(rows, axis=1)[:, own] - stats.rankdata(rows[:, own], axis=1)
    itself = np.searchsorted(same, representatives)
    below[np.arange(len(representatives)), itself] = 0
    return below.sum(1) / pairs


def mean_areas(
    similar: Cosines,
    labels: Labels,
    correct: Correct,
    kept: Kept,
) -> Float[np.ndarray, " class"]:
    """The mean of the :func:`areas` of each class, among the utterances that are kept."""
    similar, own = similar[np.ix_(kept, kept)], labels[kept]
    return np.array(
        [areas(similar, own == label, correct[kept]).mean() for label in np.unique(labels)]
    )


def others_apart(
    similar: Cosines,
    labels: Labels,
    correct: Correct,
    label: int,
    kept: Kept,
) -> float:
    """How little a representative of one of three classes tells the two others apart.

    0.6 minus the larger of A and 1 − A, where A is the area under the ROC curve, between the two
    others, of the cosine to a representative of the class ``label``, mean over representatives.
    """
    own, one, other = (kept[labels[kept] == (label + turn) % 3] for turn in range(3))
    rows = similar[own[correct[own]]]
    ranks = stats.mannwhitneyu(rows[:, one], rows[:, other], axis=1).statistic
    area = ranks.mean() / len(one) / len(other)
    return float(0.6 - max(area, 1 - area))


def separation(
    before: Cosines,
    after: Cosines,
    correct: Correct,
    corpus: Corpus,
) -> dict[str, Callable]:
    """The numbers of the claims on direction, by the id of a claim: functions of the texts that are
    kept.

    Each gives a number for every class, of the cosines of its representatives, the correctly
    classified (sec. 3):

    - ``alike-before``: 0.6 minus the area under the ROC curve before fine-tuning, see
      :func:`areas`;
    - ``direction-is-class``: the area after it; ``direction-by-fine-tuning``: by how much it is
      larger than before;
    - ``own-class-high``: the share of the cosines to other texts of the class that are above 0.75;
    - of two classes, ``orthogonal-median`` and ``-most``: 0.25 minus the size of the median cosine
      to texts of the other class, and the share of these that are smaller than 0.25 in size;
    - where one of three classes is called contradiction, ``contradiction-apart``:
      :func:`others_apart` of it.

    Args:
        before, after: :func:`cosines` without fine-tuning and with it.
        correct: which texts are then classified correctly.
        corpus: the texts, with classes.
    """
    labels, classes = np.array(corpus.labels), [*corpus.classes]
    was, now = (partial(mean_areas, similar, labels, correct) for similar in (before, after))
    own, other = (partial(of_class, after, labels, correct, own) for own in (True, False))
    found = {
        "fosse-classes-alike-before": lambda kept: 0.6 - was(kept),
        "fosse-direction-is-class": now,
        "fosse-direction-by-fine-tuning": lambda kept: now(kept) - was(kept),
        "fosse-own-class-high": lambda kept: [(pairs > 0.75).mean() for pairs in own(kept)],
    }
    if len(classes) == 2:
        found["fosse-orthogonal-median"] = lambda kept: [
            0.25 - abs(np.median(pairs)) for pairs in other(kept)
        ]
        found["fosse-orthogonal-most"] = lambda kept: [
            (abs(pairs) < 0.25).mean() for pairs in other(kept)
        ]
    if len(classes) == 3 and "contradiction" in classes:
        place = classes.index("contradiction")
        found["fosse-contradiction-apart"] = partial(others_apart, after, labels, correct, place)
    return found


Heads = Float[np.ndarray, "head token width"]


def head_vectors(model: LoadedModel, text: str | Pair) -> list[tuple[Heads, Heads, Heads]]:
    """The queries, keys and values of a text in every attention layer.

    Raises:
        AnalysisError: the weights of a layer are not those of equation 1, where every query sees
            every key and a score does not depend on positions.
    """
    found: list[tuple[Heads, Heads, Heads]] = []

    def receive(activations: capture.Activations) -> None:
        scores = activations.scores
        if scores is None:
            return
        if not scores.visibility.everyone or scores.position is not None:
            raise AnalysisError(
                f"attention in {model.name} depends on positions: give a model such as BERT"
            )
        spaces = (activations.spaces[name] for name in ("query", "key", "value"))
        found.append(tuple(space.values[0].double().cpu().numpy() for space in spaces))

    needs = frozenset({"query", "key", "value", capture.SCORES})
    for batch in capture.batches(model, [text], [0], capture.Settings(), capture.Reading()):
        capture.run(model, batch, needs, receive)
    return found


def attention_rows(query: Heads, key: Heads) -> Float[np.ndarray, "head token token"]:
    """The weights a_ij of every token to every other (eq. 1)."""
    return special.softmax(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5, axis=-1)


def narrowing(model: LoadedModel, texts: Sequence[str | Pair]) -> Float[np.ndarray, " text"]:
    """By how much attention makes vectors more alike than the values that it averages (eq. 2).

    The similarity inside a text (eq. 3) of the outputs of a head minus that of its values, mean
    over all heads.
    """
    found = []
    for text in texts:
        layers = head_vectors(model, text)
        pairs = (
            (alike(attention_rows(query, key) @ value), alike(value))
            for query, key, value in layers
        )
        found.append(np.mean([of_outputs - of_values for of_outputs, of_values in pairs]))
    return np.array(found)


def alike(vectors: Heads) -> Float[np.ndarray, " head"]:
    """The mean cosine of two vectors of a head (eq. 3)."""
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return mean_pair_cosine(unit.sum(1), np.full(len(unit), unit.shape[1], dtype=float))


def cone(vectors: tuple[Heads, Heads], head: int) -> pd.DataFrame:
    """The values of a head and its outputs around the axis of the values, the mean of their
    directions.

    An output is a convex combination of the values. All vectors within an angle θ of an axis form a
    convex cone as long as θ is at most 90°; then no output is farther from the axis than the
    farthest value.

    Args:
        vectors: the values v_j of each head, and what attention makes of them, y_i = Σ_j a_ij v_j
            (eq. 2).
        head: counted from 1.

    Returns:
        One row per vector: vector (value or output), token (its place), angle (to the axis, in
        degrees), along (its component along the axis) and aside (the length of the rest, negative
        on one side of the first principal direction of what the values have besides the axis). In
        the plane of along and aside, angles to the axis and lengths are those of the space.
    """
    if not 1 <= head <= len(vectors[0]):
        raise AnalysisError(f"there is no head {head}: give one from 1 to {len(vectors[0])}")
    values, outputs = (kind[head - 1] for kind in vectors)
    axis = (values / np.linalg.norm(values, axis=1, keepdims=True)).mean(0)
    axis /= np.linalg.norm(axis)
    across = np.linalg.svd(values - np.outer(values @ axis, axis), full_matrices=False)[2][0]
    both = np.concatenate([values, outputs])
    along = both @ axis
    rest = np.linalg.norm(both - np.outer(along, axis), axis=1)
    columns = {
        "vector": np.repeat(["value", "output"], [len(values), len(outputs)]),
        "token": [*range(len(values)), *range(len(outputs))],
        "angle": np.degrees(np.arctan2(rest, along)),
        "along": along,
        "aside": np.where(both @ across < 0, -rest, rest),
    }
    return pd.DataFrame(columns)
