"""The direction of an utterance and its class (Fosse et al. 2023, sec. 3)."""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import stats

from analysis_lib import extraction, inputs
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS, jackknife_interval
from analysis_lib.models import LoadedModel


def class_vectors(model: LoadedModel, corpus: Corpus) -> Float[np.ndarray, "utterance width"]:
    """The vector of the first token, [CLS] in BERT, after the last block: cls_j of the paper.

    Args:
        corpus: of texts; what the model cannot read whole is cut.

    Raises:
        AnalysisError: the model reads no texts.
    """
    if (model.kind, corpus.kind) != ("text", "text"):
        raise AnalysisError(f"{model.name} on {corpus.name}: give a model that reads texts, and texts")
    last = sum(len(blocks) for blocks in model.stacks.values())
    found: dict[int, np.ndarray] = {}

    def receive(activations: extraction.Activations) -> None:
        if activations.layer == last:
            vectors = activations.spaces["hidden"].values[:, 0, 0].double().cpu().numpy()
            found.update(zip(activations.tokens.groups.tolist(), vectors, strict=True))

    # The group of an utterance is its place: batches come in an order of their own.
    for batch in inputs.batches(model, corpus.items, range(len(corpus)), inputs.Settings(), inputs.Reading()):
        extraction.run(model, batch, frozenset({"hidden"}), receive)
    return np.stack([found[i] for i in range(len(corpus))])


def cosines(vectors: Float[np.ndarray, "utterance width"]) -> Float[np.ndarray, "utterance utterance"]:
    """Of every two utterances; NaN where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, np.nan)
    return unit @ unit.T


def separation(
    vectors: Float[np.ndarray, "utterance width"],
    labels: Int[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
) -> pd.DataFrame:
    """How well the cosine to a representative of a class tells that class from the others (Fosse et al. 2023, Fig. 2).

    The area under the ROC curve is the probability that an utterance of the class is more like the representative
    than one of another class is; ties count half. 0.5 is no separation, 1 a whole one. The paper draws one
    representative of each class among the correctly classified; here every one of them takes its turn.

    Args:
        vectors: from :func:`class_vectors`.
        labels: the class of each utterance.
        correct: whether it was classified correctly; only those represent their class.

    Returns:
        A row a class: class (its number), auc (the mean over representatives), ci_low and ci_high (95 %, jackknife
        over utterances), lowest and highest (2.5 % and 97.5 % of the representatives: what a single draw may show),
        and representatives (how many).

    Raises:
        AnalysisError: one class alone, or a class that no utterance represents.
    """
    labels, correct = np.asarray(labels), np.asarray(correct, dtype=bool)
    if len(classes := np.unique(labels)) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    similar, groups = cosines(vectors), np.arange(len(labels)) % GROUPS
    rows = []
    for label in classes:
        if not (correct & (labels == label)).any():
            raise AnalysisError(f"no utterance of class {label} was classified correctly: there is no representative")
        areas = _areas(similar, labels == label, correct)
        kept = [groups != group for group in np.unique(groups)]
        left_out = np.array([_areas(similar[np.ix_(k, k)], labels[k] == label, correct[k]).mean() for k in kept])
        low, high = jackknife_interval(np.array(areas.mean()), left_out)
        bounds = np.quantile(areas, [0.025, 0.975])
        rows.append((label, areas.mean(), float(low), float(high), *bounds, len(areas)))
    return pd.DataFrame(rows, columns=["class", "auc", "ci_low", "ci_high", "lowest", "highest", "representatives"])


def _areas(
    similar: Float[np.ndarray, "utterance utterance"],
    own: Bool[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
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


def examples(
    similar: Float[np.ndarray, " utterance"], own: Bool[np.ndarray, " utterance"], representative: int
) -> dict[str, int]:
    """Which utterances are nearest to a representative, in the middle and farthest (Fosse et al. 2023, Table 2).

    Args:
        similar: the cosine of each utterance to the representative.
        own: whether it is of the representative's class.

    Returns:
        The place of the ``nearest`` and the ``farthest`` utterance of the class, and of the ``nearest other`` and the
        ``median other`` of the other classes.

    >>> examples(np.array([1.0, 0.9, 0.1, 0.5, 0.3, -0.2]), np.array([True, True, True, False, False, False]), 0)
    {'nearest': 1, 'farthest': 2, 'nearest other': 3, 'median other': 4}
    """
    same = np.flatnonzero(own & (np.arange(len(own)) != representative))
    others = np.flatnonzero(~own)
    same, others = same[np.argsort(-similar[same])], others[np.argsort(-similar[others])]
    places = same[0], same[-1], others[0], others[len(others) // 2]
    return {name: int(place) for name, place in zip(_EXAMPLES, places, strict=True)}


_EXAMPLES = ("nearest", "farthest", "nearest other", "median other")
