"""Classifiers trained several times over and measured: accuracy, keys, values, entropy (Fosse et al. 2023, sec. 4)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measure import measure
from analysis_lib.models import load_model
from analysis_lib.training.classification import accuracy, predict, self_attention

METRICS = ("utterance_similarity", "attention_entropy", "mean_vector")
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


def trials(
    train: Corpus,
    validation: Corpus,
    test: Corpus,
    *,
    layers: Sequence[int] = (1,),
    entropy_weights: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    utterances: int = UTTERANCES,
    block: dict | None = None,
    progress: bool = True,
    **settings,
) -> pd.DataFrame:
    """Train a classifier of self-attention for each depth, entropy weight and seed, and measure what it does.

    Args:
        train: with classes; validation and test with the same.
        layers: how many blocks.
        entropy_weights: λ.
        seeds: of the training.
        utterances: of the test corpus, drawn with its class balance, on which keys, values and attention are
            measured; the accuracy is that of the whole test corpus.
        block: as of :func:`self_attention`.
        progress: whether to show a bar, on a terminal.
        settings: of :func:`self_attention`.

    Returns:
        A row a number: layers, entropy_weight, seed, quantity, layer (missing for accuracy and epochs) and value. The
        quantities are ``accuracy`` (share of the test corpus), ``epochs`` (after which the state was best), ``key``,
        ``value``, ``query`` and ``hidden`` (similarity inside an utterance, eq. 3), ``entropy`` (of the attention
        rows, normalised) and ``key_norm`` (the mean of ‖k‖).

    Raises:
        AnalysisError: as :func:`self_attention`.
    """
    measured = stratified(test, utterances)
    work = [(depth, weight, seed) for depth in layers for weight in entropy_weights for seed in seeds]
    frames = []
    for depth, weight, seed in tqdm(work, unit="classifier", desc=train.name, disable=None if progress else True):
        chosen = {**(block or {}), "entropy_weight": weight}
        folder = self_attention(train, validation, layers=depth, block=chosen, seed=seed, **settings)
        epochs = pd.read_csv(folder / "epochs.csv")
        rows = [
            ("accuracy", pd.NA, accuracy(predict(folder, test))["accuracy"]),
            ("epochs", pd.NA, float(epochs["epoch"][epochs["accuracy"].idxmax()])),
        ]
        tables = measure(load_model(str(folder)), measured, METRICS, progress=False)
        for row in tables["utterance_similarity"].itertuples():
            rows.append((row.space, row.layer, row.similarity))
        for row in tables["attention_entropy"].itertuples():
            rows.append(("entropy", row.layer, row.entropy_normalised))
        norms = tables["mean_vector"]
        for row in norms[norms["space"] == "key"].itertuples():
            rows.append(("key_norm", row.layer, row.mean_norm))
        found = pd.DataFrame(rows, columns=["quantity", "layer", "value"]).astype({"layer": "Int64"})
        about = pd.DataFrame({"layers": depth, "entropy_weight": float(weight), "seed": seed}, found.index)
        frames.append(pd.concat([about, found], axis=1))
    return pd.concat(frames, ignore_index=True)


def beside_published(found: pd.DataFrame, published: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Numbers of several seeds beside published ones.

    Args:
        found: from :func:`trials`.
        published: with the columns of ``on``, and ``published``.
        on: what a number is about, such as layers, layer and quantity.

    Returns:
        The columns of ``on``; mean and spread (standard deviation) over seeds, seeds (how many), published, and
        difference: how many spreads our mean lies above the published value (missing for a single seed).
    """
    groups = found.groupby(list(on), dropna=False)["value"]
    summary = groups.agg(mean="mean", spread=lambda values: values.std(ddof=1), seeds="count").reset_index()
    both = summary.merge(published, on=list(on), how="left")
    return both.assign(difference=(both["mean"] - both["published"]) / both["spread"].where(both["spread"] > 0))
