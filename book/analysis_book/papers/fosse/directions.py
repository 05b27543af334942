"""Directions that are classes, and the cone of the values that attention averages.

Fosse et al. 2023, sec. 3.
"""

from collections.abc import Callable, Mapping, Sequence
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
# Indices of utterances, as a jackknife leaves them.
Kept = Int[np.ndarray, " kept"]
Statistic = Callable[[Kept], float | Sequence[float]]


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
    # The group of an utterance is its index: batches come in an order of their own.
    texts = range(len(corpus))
    settings = capture.Settings()
    by_text: dict[int, np.ndarray] = {}

    def receive(activations: capture.Activations) -> None:
        if activations.layer == last:
            first = activations.spaces["hidden"].values[:, 0, 0]
            vectors = first.double().cpu().numpy()
            by_text.update(zip(activations.tokens.groups, vectors, strict=True))

    def read() -> Vectors:
        for batch in capture.batches(model, corpus.items, texts, settings, capture.Reading()):
            capture.run(model, batch, frozenset({"hidden"}), receive)
        return np.stack([by_text[text] for text in texts])

    store = StoredMeasurements.of_model(model, corpus, settings)
    return _kept("class_vectors", store, read)


def _kept(
    name: str,
    store: StoredMeasurements,
    make: Callable[[], np.ndarray],
) -> np.ndarray:
    """An array of a row per text, kept beside the measurements: several pages ask for it."""
    return store.array(f"{name}-{book_hash()[:16]}", make)


def cosines(vectors: Vectors) -> Cosines:
    """The cosine of every two utterances; NaN where a vector is zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    norms = np.where(norms > 0, norms, np.nan)
    unit = vectors / norms
    return unit @ unit.T


def predicted(folder: Path | str, corpus: Corpus) -> np.ndarray:
    """The class that a classifier gives each text, by its name."""

    def read() -> np.ndarray:
        return predict(folder, corpus)["predicted"].to_numpy(str)

    # What needs the classes refuses texts without them, whether or not these were read before.
    if corpus.labels is None:
        return read()
    store = StoredMeasurements.of_name(str(folder), corpus, capture.Settings())
    return _kept("predicted", store, read)


def classified(folder: Path | str, corpus: Corpus) -> tuple[Cosines, Correct]:
    """The :func:`cosines` of texts with classes under a classifier, and which it gets right."""
    given = predicted(folder, corpus)
    correct = given == np.array(corpus.classes)[corpus.labels]
    model = load_model(str(folder))
    return cosines(class_vectors(model, corpus)), correct


def draw_representatives(
    labels: Labels,
    correct: Correct,
    seed: int = 0,
) -> dict[int, int]:
    """The index of one utterance of each class, drawn among those classified correctly.

    Raises:
        AnalysisError: there is one class alone, or a class that no utterance represents.
    """
    classes = np.unique(labels)
    if len(classes) < 2:
        raise AnalysisError("a separation needs two classes or more: give utterances of several")
    missing = sorted({*classes} - {*labels[correct]})
    if missing:
        raise AnalysisError(
            f"no utterance of class {missing[0]} was classified correctly: there is no "
            "representative"
        )
    random = np.random.default_rng(seed)
    representatives = {}
    for label in classes:
        candidates = np.flatnonzero(correct & (labels == label))
        representatives[int(label)] = int(random.choice(candidates))
    return representatives


def to_representatives(
    similar: Cosines,
    corpus: Corpus,
    representatives: Mapping[int, int],
) -> pd.DataFrame:
    """The cosine of all texts to a representative of each class, itself left out.

    Fosse et al. 2023, Fig. 2.

    Args:
        similar: from :func:`cosines`.
        corpus: the texts, with classes.
        representatives: from :func:`draw_representatives`.

    Returns:
        One row per representative and other text: representative and class, both names of classes,
        and cosine.
    """
    names = np.array(corpus.classes)
    classes = names[corpus.labels]
    tables = {}
    for label, index in representatives.items():
        table = pd.DataFrame({"class": classes, "cosine": similar[index]})
        tables[names[label]] = table.drop(index)
    rows = pd.concat(tables, names=["representative"])
    return rows.reset_index("representative").reset_index(drop=True)


def over_texts(
    statistics: Mapping[str, Statistic], corpus: Corpus
) -> dict[str, Estimate | list[Estimate]]:
    """Numbers of a sample of texts, with 95 % jackknife intervals over them.

    Args:
        statistics: by name, what computes a number, or several, from the texts of some indices.

    >>> found = over_texts({"mean": lambda kept: kept.mean()}, Corpus("x", range(41)))["mean"]
    >>> found.value, found.side(19), found.draws
    (20.0, 'undecided', 20)
    """
    every = np.arange(len(corpus))
    groups = np.array(corpus.groups(GROUPS))
    samples = [every[groups != group] for group in np.unique(groups)]
    estimates = {}
    for name, statistic in statistics.items():
        without = [statistic(kept) for kept in samples]
        estimates[name] = jackknife(statistic(every), without)
    return estimates


def of_class(
    similar: Cosines,
    labels: Labels,
    correct: Correct,
    own: bool,
    kept: Kept,
) -> list[Float[np.ndarray, " pair"]]:
    """For each class, the cosines between its representatives and other texts.

    Representatives are all that are classified correctly.

    Args:
        similar: from :func:`cosines`.
        labels: the class of each text.
        correct: which were classified correctly.
        own: whether the other texts are those of the same class, or those of all other classes.
        kept: the texts that count.
    """
    by_class = []
    for label in np.unique(labels):
        in_class = labels[kept] == label
        representatives = kept[in_class & correct[kept]]
        others = kept[in_class == own]
        pairs = similar[np.ix_(representatives, others)]
        itself = representatives[:, None] == others
        by_class.append(pairs[~itself])
    return by_class


def areas(
    similar: Cosines,
    own: Bool[np.ndarray, " utterance"],
    correct: Correct,
) -> Float[np.ndarray, " representative"]:
    """How well the cosine to a representative of a class tells that class from the others.

    The area under the ROC curve is the probability that an utterance of the class is more like the
    representative than one of another class is (Mann and Whitney 1947); ties count half. 0.5 is no
    separation, 1 a complete one. The paper (Fosse et al. 2023, Fig. 2) draws one representative of
    each class among the correctly classified; here every one of them takes its turn, and is itself
    left out.

    Args:
        similar: from :func:`cosines`.
        own: which utterances are of the class.
        correct: which were classified correctly; only those represent their class.

    Returns:
        The area of each representative; a single NaN where there is none, or nothing to compare it
        with.
    """
    representatives = np.flatnonzero(own & correct)
    same = np.flatnonzero(own)
    pairs = (len(same) - 1) * (len(own) - len(same))
    if not (len(representatives) and pairs):
        return np.array([np.nan])
    rows = similar[representatives]
    # A rank among all less that among the class: how many of the others lie below, a tie as a half.
    ranks = stats.rankdata(rows, axis=1)[:, own]
    below = ranks - stats.rankdata(rows[:, own], axis=1)
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
    among = similar[np.ix_(kept, kept)]
    represents = correct[kept]
    means = []
    for label in np.unique(labels):
        own = labels[kept] == label
        means.append(areas(among, own, represents).mean())
    return np.array(means)


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
    own = kept[labels[kept] == label]
    second = kept[labels[kept] == (label + 1) % 3]
    third = kept[labels[kept] == (label + 2) % 3]
    representatives = own[correct[own]]
    rows = similar[representatives]
    test = stats.mannwhitneyu(rows[:, second], rows[:, third], axis=1)
    area = test.statistic.mean() / len(second) / len(third)
    return float(0.6 - max(area, 1 - area))


def separation(
    before: Cosines,
    after: Cosines,
    correct: Correct,
    corpus: Corpus,
) -> dict[str, Callable]:
    """The numbers of the claims on direction, by the id of a claim, as functions of the texts kept.

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
    labels = np.array(corpus.labels)
    classes = [*corpus.classes]

    def areas_before(kept: Kept) -> Float[np.ndarray, " class"]:
        return mean_areas(before, labels, correct, kept)

    def areas_after(kept: Kept) -> Float[np.ndarray, " class"]:
        return mean_areas(after, labels, correct, kept)

    def high_of_own(kept: Kept) -> list[float]:
        of_own = of_class(after, labels, correct, True, kept)
        return [(pairs > 0.75).mean() for pairs in of_own]

    def near_orthogonal(kept: Kept) -> list[float]:
        of_other = of_class(after, labels, correct, False, kept)
        return [0.25 - abs(np.median(pairs)) for pairs in of_other]

    def mostly_orthogonal(kept: Kept) -> list[float]:
        of_other = of_class(after, labels, correct, False, kept)
        return [(abs(pairs) < 0.25).mean() for pairs in of_other]

    def contradiction_apart(kept: Kept) -> float:
        label = classes.index("contradiction")
        return others_apart(after, labels, correct, label, kept)

    statistics = {
        "fosse-classes-alike-before": lambda kept: 0.6 - areas_before(kept),
        "fosse-direction-is-class": areas_after,
        "fosse-direction-by-fine-tuning": lambda kept: areas_after(kept) - areas_before(kept),
        "fosse-own-class-high": high_of_own,
    }
    if len(classes) == 2:
        statistics["fosse-orthogonal-median"] = near_orthogonal
        statistics["fosse-orthogonal-most"] = mostly_orthogonal
    if len(classes) == 3 and "contradiction" in classes:
        statistics["fosse-contradiction-apart"] = contradiction_apart
    return statistics


Heads = Float[np.ndarray, "head token width"]
# Queries, keys and values.
Layer = tuple[Heads, Heads, Heads]


def head_vectors(model: LoadedModel, text: str | Pair) -> list[Layer]:
    """The queries, keys and values of a text in every attention layer.

    Raises:
        AnalysisError: the weights of a layer are not those of equation 1, where every query sees
            every key and a score does not depend on positions.
    """
    spaces = ("query", "key", "value")
    layers: list[Layer] = []

    def receive(activations: capture.Activations) -> None:
        scores = activations.scores
        if scores is None:
            return
        if not scores.visibility.everyone or scores.position is not None:
            raise AnalysisError(
                f"attention in {model.name} depends on positions: give a model such as BERT"
            )
        vectors = []
        for name in spaces:
            values = activations.spaces[name].values[0]
            vectors.append(values.double().cpu().numpy())
        layers.append(tuple(vectors))

    needs = frozenset({*spaces, capture.SCORES})
    settings = capture.Settings()
    for batch in capture.batches(model, [text], [0], settings, capture.Reading()):
        capture.run(model, batch, needs, receive)
    return layers


def attention_rows(query: Heads, key: Heads) -> Float[np.ndarray, "head token token"]:
    """The weights a_ij of every token to every other (eq. 1)."""
    scale = query.shape[-1] ** 0.5
    scores = query @ key.swapaxes(1, 2) / scale
    return special.softmax(scores, axis=-1)


def narrowing(model: LoadedModel, texts: Sequence[str | Pair]) -> Float[np.ndarray, " text"]:
    """By how much attention makes vectors more alike than the values that it averages (eq. 2).

    The similarity inside a text (eq. 3) of the outputs of a head minus that of its values, mean
    over all heads.
    """
    means = []
    for text in texts:
        differences = []
        for query, key, value in head_vectors(model, text):
            outputs = attention_rows(query, key) @ value
            differences.append(alike(outputs) - alike(value))
        means.append(np.mean(differences))
    return np.array(means)


def alike(vectors: Heads) -> Float[np.ndarray, " head"]:
    """The mean cosine of two vectors of a head (eq. 3)."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = vectors / norms
    heads, tokens, _ = unit.shape
    counts = np.full(heads, tokens, dtype=float)
    return mean_pair_cosine(unit.sum(1), counts)


def cone(vectors: tuple[Heads, Heads], head: int) -> pd.DataFrame:
    """The values of a head and its outputs around the axis of the values.

    The axis is the mean of their directions. An output is a convex combination of the values. All
    vectors within an angle θ of an axis form a convex cone as long as θ is at most 90°; then no
    output is farther from the axis than the farthest value.

    Args:
        vectors: the values v_j of each head, and what attention makes of them, y_i = Σ_j a_ij v_j
            (eq. 2).
        head: counted from 1.

    Returns:
        One row per vector: vector (value or output), token (its index), angle (to the axis, in
        degrees), along (its component along the axis) and aside (the length of the rest, negative
        on one side of the first principal direction of what the values have besides the axis). In
        the plane of along and aside, angles to the axis and lengths are those of the space.
    """
    if not 1 <= head <= len(vectors[0]):
        raise AnalysisError(f"there is no head {head}: give one from 1 to {len(vectors[0])}")
    values, outputs = (kind[head - 1] for kind in vectors)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    axis = (values / norms).mean(0)
    axis /= np.linalg.norm(axis)
    off_axis = values - np.outer(values @ axis, axis)
    _, _, principal = np.linalg.svd(off_axis, full_matrices=False)
    both = np.concatenate([values, outputs])
    side = both @ principal[0]
    along = both @ axis
    aside = both - np.outer(along, axis)
    rest = np.linalg.norm(aside, axis=1)
    counts = [len(values), len(outputs)]
    columns = {
        "vector": np.repeat(["value", "output"], counts),
        "token": [*range(len(values)), *range(len(outputs))],
        "angle": np.degrees(np.arctan2(rest, along)),
        "along": along,
        "aside": np.where(side < 0, -rest, rest),
    }
    return pd.DataFrame(columns)
