"""The direction of an utterance is its class: cosines to representatives of classes (Fosse et al. 2023, sec. 3)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import stats

from analysis_lib import capture
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models import LoadedModel

# Below this area under the ROC curve two classes look like one: at it, two normal densities of one width still
# share 86 % of their area.
NOT_TOLD_APART = 0.6
# The cosine of a right angle, give or take 15°.
NEARLY_ORTHOGONAL = 0.25

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
            found.update(zip(activations.tokens.groups.tolist(), vectors, strict=True))

    # The group of an utterance is its place: batches come in an order of their own.
    for batch in capture.batches(model, corpus.items, range(len(corpus)), capture.Settings(), capture.Reading()):
        capture.run(model, batch, frozenset({"hidden"}), receive)
    return np.stack([found[i] for i in range(len(corpus))])


def cosines(vectors: Vectors) -> Cosines:
    """The cosine of every two utterances; NaN where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, np.nan)
    return unit @ unit.T


# --- Representatives that are drawn -------------------------------------------------------------------


def draw_representatives(labels: Labels, correct: Correct, seed: int = 0) -> dict[int, int]:
    """The place of one utterance of each class, drawn among those classified correctly.

    Raises:
        AnalysisError: as :func:`separation`.
    """
    random = np.random.default_rng(seed)
    return {int(c): int(random.choice(np.flatnonzero(correct & (labels == c)))) for c in _represented(labels, correct)}


def cosines_to(vectors: Vectors, labels: Labels, representatives: Mapping[int, int]) -> pd.DataFrame:
    """The cosine of every utterance to the representative of each class: cos(r_i, cls_j) of the paper.

    Args:
        vectors: from :func:`class_vectors`.
        labels: the class of each utterance.
        representatives: from :func:`draw_representatives`.

    Returns:
        One row per representative and other utterance: representative (its class), utterance (its place), class and
        cosine.
    """
    similar, places = cosines(vectors), np.arange(len(labels))
    frames = [
        pd.DataFrame({"representative": label, "utterance": places, "class": labels, "cosine": similar[place]})
        for label, place in representatives.items()
    ]
    found = pd.concat(frames, ignore_index=True)
    return found[found["utterance"] != found["representative"].map(representatives)].reset_index(drop=True)


def examples(similar: pd.DataFrame) -> pd.DataFrame:
    """Which utterances are nearest to a representative, in the middle and farthest (Fosse et al. 2023, Table 2).

    Args:
        similar: from :func:`cosines_to`.

    Returns:
        The rows of the ``nearest`` and the ``farthest`` utterance of the class of each representative, and of the
        ``nearest other`` and the ``median other`` of the other classes, with the column which in front.
    """
    frames = []
    for label, rows in similar.sort_values("cosine", ascending=False, kind="stable").groupby("representative"):
        own, others = rows[rows["class"] == label], rows[rows["class"] != label]
        chosen = {
            "nearest": own.iloc[0],
            "farthest": own.iloc[-1],
            "nearest other": others.iloc[0],
            "median other": others.iloc[len(others) // 2],
        }
        frames.append(pd.DataFrame(chosen).T.rename_axis("which").reset_index())
    return pd.concat(frames, ignore_index=True).astype(similar.dtypes)


# --- All representatives ------------------------------------------------------------------------------


def separation(vectors: Vectors, labels: Labels, correct: Correct) -> pd.DataFrame:
    """How well the cosine to a representative of a class tells that class from the others (Fosse et al. 2023, Fig. 2).

    The area under the ROC curve is the probability that an utterance of the class is more like the representative
    than one of another class is; ties count half. 0.5 is no separation, 1 a complete one. The paper draws one
    representative of each class among the correctly classified; here every one of them takes its turn.

    Args:
        vectors: from :func:`class_vectors`.
        labels: the class of each utterance.
        correct: whether it was classified correctly; only those represent their class.

    Returns:
        One row per class: class (its number), auc (the mean over representatives), ci_low and ci_high (95 %, jackknife
        over utterances), lowest and highest (2.5 % and 97.5 % of the representatives: what a single draw may show),
        and representatives (how many).

    Raises:
        AnalysisError: there is one class alone, or a class that no utterance represents.
    """
    classes, similar = _represented(labels, correct), cosines(vectors)
    auc, low, high = over_utterances(lambda kept: mean_areas(similar, labels, correct, kept), len(labels))
    areas = [_areas(similar, labels == label, correct) for label in classes]
    lowest, highest = np.transpose([np.quantile(single, [0.025, 0.975]) for single in areas])
    columns = {"class": classes, "auc": auc, "ci_low": low, "ci_high": high, "lowest": lowest, "highest": highest}
    return pd.DataFrame({**columns, "representatives": [len(single) for single in areas]})


def _represented(labels: Labels, correct: Correct) -> np.ndarray:
    """The classes, each of which has an utterance to represent it."""
    if len(classes := np.unique(labels)) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    if missing := sorted(set(classes) - set(labels[correct])):
        raise AnalysisError(f"no utterance of class {missing[0]} was classified correctly: there is no representative")
    return classes


def over_utterances(
    statistic: Callable[[Kept], Sequence[float]], utterances: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of a sample of utterances, with 95 % jackknife intervals over them.

    Args:
        statistic: computes the numbers from the utterances at the places it is given.
        utterances: how many there are.

    Returns:
        The values, the lower and the upper bounds.

    >>> value, low, high = over_utterances(lambda kept: np.array([kept.mean()]), 41)
    >>> float(value[0]), bool(low[0] < 20 < high[0])
    (20.0, True)
    """
    places = np.arange(utterances)
    value = np.asarray(statistic(places), dtype=float)
    groups = places % GROUPS
    left_out = np.array([statistic(places[groups != group]) for group in np.unique(groups)], dtype=float)
    return value, *jackknife_interval(value, left_out)


def mean_areas(similar: Cosines, labels: Labels, correct: Correct, kept: Kept) -> Float[np.ndarray, " class"]:
    """The area under the ROC curve of each class, mean over its representatives, among the utterances that are kept."""
    similar, own = similar[np.ix_(kept, kept)], labels[kept]
    return np.array([_areas(similar, own == label, correct[kept]).mean() for label in np.unique(labels)])


def cosines_of_others(
    similar: Cosines, labels: Labels, correct: Correct, kept: Kept
) -> list[Float[np.ndarray, " pair"]]:
    """For each class, the cosines of its representatives to all utterances of other classes, among those kept."""
    own = [labels[kept] == label for label in np.unique(labels)]
    return [similar[np.ix_(kept[mine & correct[kept]], kept[~mine])].ravel() for mine in own]


def _areas(
    similar: Cosines, own: Bool[np.ndarray, " utterance"], correct: Correct
) -> Float[np.ndarray, " representative"]:
    """The area under the ROC curve of each representative, which is itself left out (Mann and Whitney 1947)."""
    chosen, others = np.flatnonzero(own & correct), np.flatnonzero(~own)
    areas = []
    for representative in chosen:
        same = np.flatnonzero(own & (np.arange(len(own)) != representative))
        if len(same) and len(others):
            ranks = stats.rankdata(similar[representative, np.concatenate([same, others])])[: len(same)]
            areas.append((ranks.sum() - len(same) * (len(same) + 1) / 2) / (len(same) * len(others)))
    return np.array(areas) if areas else np.array([np.nan])


# --- What decides the claims: each from the cosines before and after fine-tuning, and the utterances kept --------


def lack_of_separation(before: Cosines, _: Cosines, labels: Labels, correct: Correct, kept: Kept) -> float:
    """0.6 minus the area before fine-tuning (:func:`mean_areas`), class where that is largest."""
    return NOT_TOLD_APART - mean_areas(before, labels, correct, kept).max()


def least_separation(_: Cosines, after: Cosines, labels: Labels, correct: Correct, kept: Kept) -> float:
    """The area after fine-tuning (:func:`mean_areas`), class where it is least."""
    return mean_areas(after, labels, correct, kept).min()


def least_gain(before: Cosines, after: Cosines, labels: Labels, correct: Correct, kept: Kept) -> float:
    """The area after fine-tuning minus that before (:func:`mean_areas`), class where it is least."""
    one, other = (mean_areas(similar, labels, correct, kept) for similar in (before, after))
    return (other - one).min()


def median_orthogonality(_: Cosines, after: Cosines, labels: Labels, correct: Correct, kept: Kept) -> float:
    """0.25 minus |median cosine| of representatives to other classes after fine-tuning, class where that is largest."""
    others = cosines_of_others(after, labels, correct, kept)
    return min(NEARLY_ORTHOGONAL - abs(np.median(found)) for found in others)


def orthogonal_share(_: Cosines, after: Cosines, labels: Labels, correct: Correct, kept: Kept) -> float:
    """The share of these cosines between −0.25 and 0.25, class where it is least."""
    others = cosines_of_others(after, labels, correct, kept)
    return min((np.abs(found) < NEARLY_ORTHOGONAL).mean() for found in others)
