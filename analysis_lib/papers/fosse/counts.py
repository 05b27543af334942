"""Classifiers of self-attention with more classes, and with less width (Fosse et al. 2023, sec. 5).

Layer norm puts every vector of width d on a sphere. Less its bias β and divided by its gain g, a vector has mean 0 and
norm √d, so it lies in the d − 1 dimensions orthogonal to (1, ..., 1), on a sphere of dimension d − 2. For d = 2 these
are two points, which tell two classes apart at most. For d = 3 they are a circle; each of its points is the farthest of
all in its own direction, so any number of classes can each have one that a dense layer tells from the others.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import transformers
from jaxtyping import Float
from torch import nn
from tqdm import tqdm

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
from analysis_lib.training import accuracy, predict, self_attention

# A width is enough if it gives this share of the accuracy of the largest.
ENOUGH = 0.9


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
        train_limit: texts to train on, the same number of each class; 0 for as many as there are. With a limit, every
            number of classes has as many texts to train on, and so as many steps per epoch.
        utterances: of the test texts, drawn with their class balance, on which directions and similarities are
            measured; 0 for none.
        settings: of :func:`self_attention`.

    Returns:
        One row per classifier: classes, width, seed; accuracy on the test texts with its interval (ci_low, ci_high),
        and chance, the share of the most frequent class in them. With utterances also auc, with auc_low and auc_high:
        the area under the ROC curve of ``directions.separation``, mean over classes; cosine, with cosine_low and
        cosine_high: mean over pairs of classes of the cosine of their mean vectors; cosine_least and cosine_most: of a
        single pair; hidden, key and value: similarity inside an utterance, after the block and in it. Intervals are
        95 % ones over utterances. A class of which no utterance is classified correctly has no representative and no
        part in the area.
    """
    whole, rows = splits(data), []
    chosen = {count: _chosen(whole, count, train_limit) for count in class_counts}
    cells = list(itertools.product(class_counts, seeds, widths))
    for count, seed, width in tqdm(cells, unit="classifier", desc=data, disable=None):
        test, folder = chosen[count][2], _one_block(chosen[count], width, seed, settings)
        row = {"classes": count, "width": width, "seed": seed, **accuracy(predict(folder, test))}
        rows.append(row | {"chance": np.bincount(test.labels).max() / len(test)})
        if utterances:
            rows[-1] |= _directions(folder, stratified(test, utterances))
    return pd.DataFrame(rows)


def _chosen(whole: Sequence[Corpus], count: int, train_limit: int) -> list[Corpus]:
    return largest_classes(whole, count, -(-train_limit // count))


def _one_block(corpora: Sequence[Corpus], width: int, seed: int, settings: dict) -> Path:
    block = {"hidden_size": width, "entropy_weight": 0.0}
    return self_attention(*corpora[:2], seed=seed, block=block, **settings)


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


def least_widths(found: pd.DataFrame, share: float = ENOUGH) -> pd.DataFrame:
    """The least width that gives a share of the accuracy of the largest, by number of classes.

    Args:
        found: from :func:`by_count`.
        share: of the accuracy of the largest width.

    Returns:
        Columns classes, largest (accuracy of the largest width), wanted (its share), width (the least whose accuracy,
        mean over seeds, reaches it), and lowest and highest (the same of a single seed).
    """
    wide = found.pivot(index=["classes", "seed"], columns="width", values="accuracy").sort_index(axis=1)
    mean = wide.groupby("classes").mean()

    def least(table: pd.DataFrame) -> pd.Series:
        return table.ge(share * table.iloc[:, -1], axis=0).idxmax(axis=1)

    single = least(wide).groupby("classes")
    columns = {"largest": mean.iloc[:, -1], "wanted": share * mean.iloc[:, -1], "width": least(mean)}
    return pd.DataFrame({**columns, "lowest": single.min(), "highest": single.max()}).reset_index()


def before_gain(norm: nn.LayerNorm, vectors: Float[np.ndarray, "vector width"]) -> Float[np.ndarray, "vector width"]:
    """The output of a layer norm without its bias and its gain: vectors of mean 0 and norm √d, if no gain is 0."""
    gain, bias = (weight.detach().double().numpy() for weight in (norm.weight, norm.bias))
    return (vectors - bias) / gain


def circle(data: str, classes: int, seed: int = 0, train_limit: int = 0, **settings) -> pd.DataFrame:
    """Where a classifier of width 3 puts the test texts: on a circle.

    Args:
        classes: how many there are.
        data, seed, train_limit, settings: as of :func:`by_count`.

    Returns:
        Columns x and y ([CLS] after the norm, without bias and gain, in the plane orthogonal to (1, 1, 1)), and class
        (by name).
    """
    corpora = _chosen(splits(data), classes, train_limit)
    folder = _one_block(corpora, 3, seed, settings)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    vectors = before_gain(model.encoder.layers[0].norm, class_vectors(load_model(str(folder)), corpora[2]))
    plane = np.array([[1, -1, 0], [1, 1, -2]]) / np.sqrt([[2], [6]])
    x, y = plane @ vectors.T
    return pd.DataFrame({"x": x, "y": y, "class": np.array(corpora[2].classes)[corpora[2].labels]})
