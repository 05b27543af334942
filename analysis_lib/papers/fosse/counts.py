"""Classifiers of self-attention with more classes, and with less width (Fosse et al. 2023, sec. 5)."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.corpora import Corpus
from analysis_lib.corpora.splits import stratified
from analysis_lib.measurement import measure
from analysis_lib.models import load_model
from analysis_lib.papers.fosse.directions import (
    Kept,
    Labels,
    Vectors,
    class_vectors,
    cosines,
    mean_areas,
    over_utterances,
)
from analysis_lib.papers.fosse.splits import largest_classes, splits
from analysis_lib.progress import bar
from analysis_lib.training import accuracy, predict, self_attention


def by_count(
    data: str,
    class_counts: Sequence[int],
    widths: Sequence[int] = (300,),
    seeds: Sequence[int] = (0,),
    train_limit: int = 0,
    utterances: int = 0,
    **settings,
) -> pd.DataFrame:
    """Train classifiers of one block of several widths on 2, 4, ... classes, and measure where their classes point.

    Args:
        data: a corpus with classes, as of ``splits.splits``.
        class_counts: how many of its largest classes there are.
        widths: of the block.
        seeds: of the training.
        train_limit: texts to train on, as of ``splits.largest_classes``. With a limit, every number of classes has as
            many texts to train on, and so as many steps per epoch.
        utterances: of the test texts, drawn with their class balance, on which directions and similarities are
            measured; 0 for none.
        settings: of :func:`self_attention`.

    Returns:
        One row per classifier: classes, width, seed; accuracy on the test texts with its interval (ci_low, ci_high),
        and chance, the share of the most frequent class in them. With utterances also auc, with auc_low and auc_high:
        the area under the ROC curve of ``directions.areas``, mean over representatives and classes; cosine, with
        cosine_low and cosine_high: mean over pairs of classes of the cosine of their mean vectors; cosine_least and
        cosine_most: of a single pair; hidden, key and value: similarity inside an utterance, after the block and in
        it. Intervals are 95 % ones over utterances. A class of which no utterance is classified correctly has no
        representative and no part in the area.
    """
    whole, rows = splits(data), []
    chosen = {count: largest_classes(whole, count, train_limit) for count in class_counts}
    cells = list(itertools.product(class_counts, seeds, widths))
    for count, seed, width in bar(cells, data, unit="classifier"):
        *texts, test = chosen[count]
        folder = self_attention(*texts, seed=seed, block={"hidden_size": width, "entropy_weight": 0.0}, **settings)
        row = {"classes": count, "width": width, "seed": seed, **accuracy(predict(folder, test))}
        rows.append(row | {"chance": np.bincount(test.labels).max() / len(test)})
        if utterances:
            rows[-1] |= _directions(folder, stratified(test, utterances))
    return pd.DataFrame(rows)


def _directions(folder: Path, corpus: Corpus) -> dict[str, float]:
    predictions, labels, model = predict(folder, corpus), np.asarray(corpus.labels), load_model(str(folder))
    correct = (predictions["label"] == predictions["predicted"]).to_numpy()
    vectors = class_vectors(model, corpus)
    similar, pairs = cosines(vectors), mean_cosines(vectors, labels)

    def numbers(kept: Kept) -> list[float]:
        areas = mean_areas(similar, labels, correct, kept)
        known = areas[np.isfinite(areas)]
        return [known.mean() if len(known) else np.nan, mean_cosines(vectors[kept], labels[kept]).mean()]

    ends = zip(("", "_low", "_high"), over_utterances(numbers, len(labels)), strict=True)
    found = {f"{name}{end}": v for end, values in ends for name, v in zip(("auc", "cosine"), values, strict=True)}
    table = measure(model, corpus, "utterance_similarity", progress=False)["utterance_similarity"]
    last = table[table["layer"] == table["layer"].max()].set_index("space")["similarity"]
    return {**found, "cosine_least": pairs.min(), "cosine_most": pairs.max(), **last[["hidden", "key", "value"]]}


def mean_cosines(vectors: Vectors, labels: Labels) -> Float[np.ndarray, " pair"]:
    """The cosine of the mean vectors of every two classes.

    With K classes their mean is at least −1 / (K − 1); where all of them equal that, the K directions are those of a
    simplex, as far apart as can be.
    """
    means = np.stack([vectors[labels == label].mean(0) for label in np.unique(labels)])
    return cosines(means)[np.triu_indices(len(means), 1)]
