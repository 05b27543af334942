"""Losses of counting words and pairs of words, to set beside the loss of a model."""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int
from scipy import sparse


def n_gram_losses(
    train: Int[np.ndarray, "sequence token"],
    held_out: Int[np.ndarray, "held_out token"],
    predicted: Bool[np.ndarray, "held_out token"],
    ordinary: Int[np.ndarray, " word"],
    vocabulary: int,
) -> pd.DataFrame:
    r"""Mean negative log-probability of held-out tokens, by counts of words and of pairs.

    ``unigram`` is p(w), with one added to each count. ``bigram`` is p(w | l), smoothed after Witten
    and Bell: with c pairs that begin with l, of t kinds, (count(l, w) + t p(w)) / (c + t).
    ``neighbours`` is p(w | l, r) ∝ p(w | l) p(r | w). The neighbours are read as they are, whether
    or not a model that is compared saw them masked.

    Args:
        train: token ids, in which words and pairs are counted.
        held_out: token ids.
        predicted: which of these count; none is a special token or stands at an end of its
            sequence.
        ordinary: the ids that may be predicted, in order: all but those of special tokens.
        vocabulary: number of tokens.

    Returns:
        Columns baseline and loss (nats per token).
    """
    words = np.bincount(train.ravel(), minlength=vocabulary) + 1.0
    words /= words.sum()
    ones = np.ones(train[:, 1:].size)
    shape = (vocabulary, vocabulary)
    pairs = sparse.coo_array((ones, (train[:, :-1].ravel(), train[:, 1:].ravel())), shape).tocsr()
    kinds = np.maximum(np.diff(pairs.indptr), 1)
    total = pairs.sum(1) + kinds

    sequence, position = predicted.nonzero()
    left = held_out[sequence, position - 1]
    word = held_out[sequence, position]
    right = held_out[sequence, position + 1]
    after = (pairs[left].toarray() + np.outer(kinds[left], words)) / total[left, None]
    before = (pairs[:, right].toarray() + np.outer(kinds, words[right])) / total[:, None]
    likelihoods = {"unigram": words[None], "bigram": after, "neighbours": after * before.T}
    index = np.searchsorted(ordinary, word)[:, None]
    rows = []
    for name, likelihood in likelihoods.items():
        among = likelihood[:, ordinary]
        probabilities = among / among.sum(1, keepdims=True)
        of_word = np.take_along_axis(probabilities, index, 1)
        rows.append((name, -np.log(of_word).mean()))
    return pd.DataFrame(rows, columns=["baseline", "loss"])
