"""Directions that are classes, and the cone of the values that attention averages (Fosse et al. 2023, sec. 3)."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from analysis_lib import capture
from analysis_lib.corpora import Corpus, Pair
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models import LoadedModel

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
        raise AnalysisError(f"{model.name} on {corpus.name}: give a model that reads texts, and texts")
    last = sum(map(len, model.stacks.values()))
    found: dict[int, np.ndarray] = {}

    def receive(activations: capture.Activations) -> None:
        if activations.layer == last:
            vectors = activations.spaces["hidden"].values[:, 0, 0].double().cpu().numpy()
            found.update(zip(activations.tokens.groups, vectors, strict=True))

    # The group of an utterance is its place: batches come in an order of their own.
    for batch in capture.batches(model, corpus.items, range(len(corpus)), capture.Settings(), capture.Reading()):
        capture.run(model, batch, frozenset({"hidden"}), receive)
    return np.stack([found[i] for i in range(len(corpus))])


def cosines(vectors: Vectors) -> Cosines:
    """The cosine of every two utterances; NaN where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, np.nan)
    return unit @ unit.T


def draw_representatives(labels: Labels, correct: Correct, seed: int = 0) -> dict[int, int]:
    """The place of one utterance of each class, drawn among those classified correctly.

    Raises:
        AnalysisError: there is one class alone, or a class that no utterance represents.
    """
    if len(classes := np.unique(labels)) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    if missing := sorted(set(classes) - set(labels[correct])):
        raise AnalysisError(f"no utterance of class {missing[0]} was classified correctly: there is no representative")
    random = np.random.default_rng(seed)
    return {int(label): int(random.choice(np.flatnonzero(correct & (labels == label)))) for label in classes}


def over_utterances(
    statistic: Callable[[Kept], Sequence[float]], corpus: Corpus
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of a sample of utterances, with 95 % jackknife intervals over them.

    Args:
        statistic: computes the numbers from the utterances at the places it is given.

    >>> value, low, high = over_utterances(lambda kept: np.array([kept.mean()]), Corpus("x", range(41)))
    >>> float(value[0]), bool(low[0] < 20 < high[0])
    (20.0, True)
    """
    places, groups = np.arange(len(corpus)), np.array(corpus.groups(GROUPS))
    value = np.asarray(statistic(places), dtype=float)
    left_out = np.array([statistic(places[groups != group]) for group in np.unique(groups)], dtype=float)
    return value, *jackknife_interval(value, left_out)


def areas(
    similar: Cosines, own: Bool[np.ndarray, " utterance"], correct: Correct
) -> Float[np.ndarray, " representative"]:
    """How well the cosine to a representative of a class tells that class from the others (Fosse et al. 2023, Fig. 2).

    The area under the ROC curve is the probability that an utterance of the class is more like the representative
    than one of another class is (Mann and Whitney 1947); ties count half. 0.5 is no separation, 1 a complete one. The
    paper draws one representative of each class among the correctly classified; here every one of them takes its
    turn, and is itself left out.

    Args:
        similar: from :func:`cosines`.
        own: which utterances are of the class.
        correct: which were classified correctly; only those represent their class.

    Returns:
        The area of each representative; a single NaN where there is none, or nothing to compare it with.
    """
    others, found = np.flatnonzero(~own), []
    for representative in np.flatnonzero(own & correct):
        same = np.flatnonzero(own & (np.arange(len(own)) != representative))
        if len(same) and len(others):
            ranks = stats.rankdata(similar[representative, np.concatenate([same, others])])[: len(same)]
            found.append((ranks.sum() - len(same) * (len(same) + 1) / 2) / (len(same) * len(others)))
    return np.array(found or [np.nan])


def mean_areas(similar: Cosines, labels: Labels, correct: Correct, kept: Kept) -> Float[np.ndarray, " class"]:
    """The mean of the :func:`areas` of each class, among the utterances that are kept."""
    similar, own = similar[np.ix_(kept, kept)], labels[kept]
    return np.array([areas(similar, own == label, correct[kept]).mean() for label in np.unique(labels)])


# Values, and the outputs of attention.
HeadVectors = tuple[Float[np.ndarray, "head token width"], Float[np.ndarray, "head token width"]]


def attention_vectors(model: LoadedModel, text: str | Pair, layer: int) -> HeadVectors:
    """The values v_j of a text in one layer, and what attention makes of them: y_i = Σ_j a_ij v_j (eq. 1 and 2).

    Args:
        layer: of attention, from 1; 0 is the last.

    Raises:
        AnalysisError: the model has no such layer, or its weights are not those of equation 1, where every query
            sees every key and a score does not depend on positions.
    """
    found: list[capture.Activations] = []
    layer = layer or sum(map(len, model.stacks.values()))

    def receive(activations: capture.Activations) -> None:
        if activations.layer == layer and activations.scores is not None:
            found.append(activations)

    needs = frozenset({"query", "key", "value", capture.SCORES})
    for batch in capture.batches(model, [text], [0], capture.Settings(), capture.Reading()):
        capture.run(model, batch, needs, receive)
    if not found:
        raise AnalysisError(f"{model.name} has no attention layer {layer}: give one from 1 to its last")
    (seen,) = found
    if not seen.scores.visibility.everyone or seen.scores.position is not None:
        raise AnalysisError(f"attention in {model.name} depends on positions: give a model such as BERT")
    query, key, value = (seen.spaces[name].values[0].double().cpu().numpy() for name in ("query", "key", "value"))
    return value, special.softmax(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5, axis=-1) @ value


def cone(vectors: HeadVectors, head: int) -> pd.DataFrame:
    """The values of a head and its outputs around the axis of the values, the mean of their directions.

    An output is a convex combination of the values. All vectors within an angle θ of an axis form a convex cone as
    long as θ is at most 90°; then no output is farther from the axis than the farthest value.

    Args:
        vectors: from :func:`attention_vectors`.
        head: counted from 1.

    Returns:
        One row per vector: vector (value or output), token (its place), angle (to the axis, in degrees), along (its
        component along the axis) and aside (the length of the rest, negative on one side of the first principal
        direction of what the values have besides the axis). In the plane of along and aside, angles to the axis and
        lengths are those of the space.
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
