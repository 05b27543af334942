"""The direction of an utterance and its class (Fosse et al. 2023, sec. 3)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from analysis_lib.capture import extraction, inputs
from analysis_lib.corpora.loading import Corpus, Pair
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models.loading import LoadedModel


def class_vectors(model: LoadedModel, corpus: Corpus) -> Float[np.ndarray, "utterance width"]:
    """The vector of the first token, [CLS] in BERT, after the last block: cls_j of the paper.

    Args:
        corpus: of texts; what the model cannot read whole is cut.

    Raises:
        AnalysisError: the model reads no texts.
    """
    if (model.kind, corpus.kind) != ("text", "text"):
        raise AnalysisError(f"{model.name} on {corpus.name}: give a model that reads texts, and texts")
    last = _depth(model)
    found: dict[int, np.ndarray] = {}

    def receive(activations: extraction.Activations) -> None:
        if activations.layer == last:
            vectors = activations.spaces["hidden"].values[:, 0, 0].double().cpu().numpy()
            found.update(zip(activations.tokens.groups.tolist(), vectors, strict=True))

    # The group of an utterance is its place: batches come in an order of their own.
    for batch in inputs.batches(model, corpus.items, range(len(corpus)), inputs.Settings(), inputs.Reading()):
        extraction.run(model, batch, frozenset({"hidden"}), receive)
    return np.stack([found[i] for i in range(len(corpus))])


def _depth(model: LoadedModel) -> int:
    return sum(len(blocks) for blocks in model.stacks.values())


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
    classes, similar = _represented(labels, correct), cosines(vectors)
    auc, low, high = over_utterances(lambda kept: mean_areas(similar, labels, correct, kept), len(labels))
    areas = [_areas(similar, labels == label, correct) for label in classes]
    lowest, highest = np.transpose([np.quantile(of, [0.025, 0.975]) for of in areas])
    columns = {"class": classes, "auc": auc, "ci_low": low, "ci_high": high, "lowest": lowest, "highest": highest}
    return pd.DataFrame({**columns, "representatives": [len(of) for of in areas]})


def change_of_separation(
    before: Float[np.ndarray, "utterance width"],
    after: Float[np.ndarray, "utterance width"],
    labels: Int[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
) -> pd.DataFrame:
    """What fine-tuning adds to the separation of each class, with the same representatives in both models.

    Args:
        before, after: from :func:`class_vectors`, of the same utterances.
        labels, correct: as of :func:`separation`; of the model after.

    Returns:
        A row a class: class, before and after (areas under the ROC curve), difference, ci_low and ci_high (of the
        difference: 95 %, jackknife that leaves the same utterances out of both).

    Raises:
        AnalysisError: as :func:`separation`.
    """
    classes, pair = _represented(labels, correct), (cosines(before), cosines(after))

    def areas(kept: Int[np.ndarray, " kept"]) -> np.ndarray:
        one, other = (mean_areas(similar, labels, correct, kept) for similar in pair)
        return np.stack([one, other, other - one])

    value, low, high = over_utterances(areas, len(labels))
    columns = dict(zip(("before", "after", "difference"), value, strict=True))
    return pd.DataFrame({"class": classes, **columns, "ci_low": low[2], "ci_high": high[2]})


def _represented(labels: Int[np.ndarray, " utterance"], correct: Bool[np.ndarray, " utterance"]) -> np.ndarray:
    """The classes, each of which has an utterance to represent it."""
    if len(classes := np.unique(labels)) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    if missing := sorted(set(classes) - set(labels[correct])):
        raise AnalysisError(f"no utterance of class {missing[0]} was classified correctly: there is no representative")
    return classes


def over_utterances(
    statistic: Callable[[Int[np.ndarray, " kept"]], Sequence[float]], utterances: int
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


def mean_areas(
    similar: Float[np.ndarray, "utterance utterance"],
    labels: Int[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
    kept: Int[np.ndarray, " kept"],
) -> Float[np.ndarray, " class"]:
    """The area under the ROC curve of each class, mean over its representatives, among the utterances that are kept."""
    similar, own = similar[np.ix_(kept, kept)], labels[kept]
    return np.array([_areas(similar, own == label, correct[kept]).mean() for label in np.unique(labels)])


def pair_cosines(
    similar: Float[np.ndarray, "utterance utterance"],
    labels: Int[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
    kept: Int[np.ndarray, " kept"],
) -> list[tuple[Float[np.ndarray, " pair"], Float[np.ndarray, " other_pair"]]]:
    """For each class, the cosines to its representatives of its own utterances, and of those of other classes.

    All pairs of a representative and another utterance count, among the utterances that are kept.
    """
    found, similar = [], similar[np.ix_(kept, kept)]
    for label in np.unique(labels):
        own = labels[kept] == label
        represents = own & correct[kept]
        rows, themselves = similar[represents], np.eye(len(kept), dtype=bool)[represents]
        found.append((rows[own & ~themselves], rows[:, ~own].ravel()))
    return found


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


def draw_representatives(
    labels: Int[np.ndarray, " utterance"], correct: Bool[np.ndarray, " utterance"], seed: int = 0
) -> dict[int, int]:
    """The place of one utterance of each class, drawn among the correctly classified (Fosse et al. 2023, sec. 3).

    Raises:
        AnalysisError: as :func:`separation`.
    """
    random = np.random.default_rng(seed)
    return {int(c): int(random.choice(np.flatnonzero(correct & (labels == c)))) for c in _represented(labels, correct)}


def cosines_to(
    vectors: Float[np.ndarray, "utterance width"],
    labels: Int[np.ndarray, " utterance"],
    representatives: Mapping[int, int],
) -> pd.DataFrame:
    """The cosine of every utterance to the representative of each class: cos(r_i, cls_j) of the paper.

    Args:
        vectors: from :func:`class_vectors`.
        labels: the class of each utterance.
        representatives: from :func:`draw_representatives`.

    Returns:
        A row a representative and another utterance: representative (its class), utterance (its place), class and
        cosine.
    """
    similar, frames = cosines(vectors), []
    for label, place in representatives.items():
        others = np.flatnonzero(np.arange(len(labels)) != place)
        columns = {"representative": label, "utterance": others, "class": labels[others]}
        frames.append(pd.DataFrame({**columns, "cosine": similar[place, others]}))
    return pd.concat(frames, ignore_index=True)


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


def examples_of_each(
    vectors: Float[np.ndarray, "utterance width"],
    corpus: Corpus,
    predicted: Sequence[str],
    representatives: Mapping[int, int],
    show_texts: bool = False,
) -> pd.DataFrame:
    """The :func:`examples` of each class, below its representative (Fosse et al. 2023, Table 2).

    Args:
        vectors: from :func:`class_vectors`.
        corpus: whose utterances they are.
        predicted: the class that each was given.
        representatives: from :func:`draw_representatives`.
        show_texts: whether to have the texts, too: not where they may hurt.

    Returns:
        Columns representative (its class), which, class, predicted, cosine (missing for the representative itself)
        and, if asked for, text.
    """
    similar, labels, rows = cosines(vectors), np.asarray(corpus.labels), []
    for label, place in representatives.items():
        found = examples(similar[place], labels == label, place)
        rows.append((label, "itself", place, np.nan))
        rows += [(label, which, other, similar[place, other]) for which, other in found.items()]
    table = pd.DataFrame(rows, columns=["representative", "which", "place", "cosine"])
    names, items = np.asarray(corpus.classes), [corpus.items[place] for place in table["place"]]
    columns = {
        "representative": names[table["representative"]],
        "which": table["which"],
        "class": names[labels[table["place"]]],
        "predicted": [predicted[place] for place in table["place"]],
        "cosine": table["cosine"],
    }
    texts = {"text": [" / ".join(item) if isinstance(item, Pair) else item for item in items]} if show_texts else {}
    return pd.DataFrame({**columns, **texts})


# --- The cone of the values (Fosse et al. 2023, Fig. 1) -------------------------------------------


def attention_vectors(
    model: LoadedModel, text: str | Pair, layer: int
) -> tuple[Float[np.ndarray, "head token width"], Float[np.ndarray, "head token width"]]:
    """The values v_j of a text in one layer, and what attention makes of them: y_i = Σ_j a_ij v_j (eq. 1 and 2).

    Args:
        layer: of attention, from 1; 0 is the last.

    Raises:
        AnalysisError: the model has no such layer, or its weights are not those of equation 1, where every query
            sees every key and a score owes nothing to positions.
    """
    found: list[extraction.Activations] = []
    layer = layer or _depth(model)

    def receive(activations: extraction.Activations) -> None:
        if activations.layer == layer and activations.scores is not None:
            found.append(activations)

    needs = frozenset({"query", "key", "value", extraction.SCORES})
    for batch in inputs.batches(model, [text], [0], inputs.Settings(), inputs.Reading()):
        extraction.run(model, batch, needs, receive)
    if not found:
        raise AnalysisError(f"{model.name} has no attention layer {layer}: give one from 1 to its last")
    (seen,) = found
    if not seen.scores.visibility.everyone or seen.scores.position is not None:
        raise AnalysisError(f"attention in {model.name} depends on positions: give a model such as BERT")
    query, key, value = (seen.spaces[name].values[0].double().cpu().numpy() for name in ("query", "key", "value"))
    return value, special.softmax(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5, axis=-1) @ value


def of_head(
    vectors: tuple[Float[np.ndarray, "head token width"], Float[np.ndarray, "head token width"]], head: int
) -> tuple[Float[np.ndarray, "token width"], Float[np.ndarray, "token width"]]:
    """The values and the outputs of one head of :func:`attention_vectors`, counted from 1.

    Raises:
        AnalysisError: there is no such head.
    """
    values, outputs = vectors
    if not 1 <= head <= len(values):
        raise AnalysisError(f"there is no head {head}: give one from 1 to {len(values)}")
    return values[head - 1], outputs[head - 1]


def cone(values: Float[np.ndarray, "token width"], outputs: Float[np.ndarray, "token width"]) -> pd.DataFrame:
    """The values of a head and its outputs around the axis of the values, the mean of their directions.

    An output is a convex combination of the values. All vectors within an angle θ of an axis make a convex cone as
    long as θ is at most 90°: no output is farther from the axis than the farthest value, then.

    Returns:
        A row a vector: of (value or output), token (its place), angle (to the axis, in degrees), along (its component
        along the axis) and aside (the length of the rest, negative on one side of the first principal direction of
        what the values have besides the axis). In the plane of along and aside, angles to the axis and lengths are
        those of the space.
    """
    axis = (values / np.linalg.norm(values, axis=1, keepdims=True)).mean(0)
    axis /= np.linalg.norm(axis)
    across = np.linalg.svd(values - np.outer(values @ axis, axis), full_matrices=False)[2][0]
    frames = []
    for of, vectors in (("value", values), ("output", outputs)):
        along = vectors @ axis
        rest = np.linalg.norm(vectors - np.outer(along, axis), axis=1)
        aside = np.where(vectors @ across < 0, -rest, rest)
        angle = np.degrees(np.arctan2(rest, along))
        columns = {"of": of, "token": np.arange(len(vectors)), "angle": angle, "along": along, "aside": aside}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def widest_angles(
    values: Float[np.ndarray, "head token width"], outputs: Float[np.ndarray, "head token width"]
) -> pd.DataFrame:
    """A row a head: head (from 1), and the largest angle of a value and of an output to the axis of the values."""
    widest = [cone(*of).groupby("of")["angle"].max() for of in zip(values, outputs, strict=True)]
    return pd.DataFrame(
        {"head": range(1, len(widest) + 1), **{of: [found[of] for found in widest] for of in ("value", "output")}}
    )
