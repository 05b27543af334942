"""Exact sums over tokens: which decide in a classifier of one block of self-attention.

Fosse et al. 2023, sec. 5. Without positions the query of [CLS] is the same in every text, and the
key and value of a token depend on its word alone: all that the block knows of a word is one score
and one value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from scipy import special

from analysis_book.training.text_classifiers import Classification, classifier, encode
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.models.architectures import SelfAttentionForSequenceClassification
from analysis_lib.models.tokenization import Tokenizer

Ids = Int[np.ndarray, " token"]
OfTokens = Float[np.ndarray, " token"]
OfClasses = Float[np.ndarray, " class"]


@dataclass(frozen=True, eq=False)
class OneBlock:
    """A classifier of one block, in float64, in the terms that add up to its decision."""

    tokenizer: Tokenizer
    classes: Sequence[str]
    scores: Float[np.ndarray, " word"]  # q_cls · k_w / √d of each word w of the vocabulary
    values: Float[np.ndarray, "word width"]  # x_w V of each word, without the bias of the values
    start: Float[np.ndarray, " width"]  # x_cls and that bias, which every text has
    # g ∘ (w_c − mean of the other w), with the gain g of the norm and the rows w of the dense layer
    directions: Float[np.ndarray, "class width"]
    constants: OfClasses  # what the biases of the norm and of the dense layer add
    epsilon: float  # of the norm

    def read(self, corpus: Corpus) -> Iterator[Ids]:
        """The tokens of each text, as in training."""
        for text in encode(corpus, self.tokenizer, Classification.longest):
            yield np.array(text.ids)

    def weights(self, ids: Ids) -> OfTokens:
        """The attention weights a_0j of [CLS], the first of these tokens."""
        return special.softmax(self.scores[ids])

    def terms(self, ids: Ids) -> tuple[Float[np.ndarray, "class token"], OfClasses]:
        """The contributions of each token and of the start to the margin of each class.

        The margin of class c is logit_c minus the mean of the other logits: the difference of two
        logits where there are two classes. With h = start + Σ_j a_0j x_j V, centred and divided by
        its standard deviation s by the norm, token j contributes a_0j u_c · (x_j V) / s, where u_c
        is the direction of the class, centred, too. Tokens, start and ``constants`` add up to the
        margin.
        """
        weights = self.weights(ids)[:, None]
        parts = weights * self.values[ids]
        hidden = self.start + parts.sum(0)
        scale = np.sqrt(hidden.var() + self.epsilon)
        means = self.directions.mean(1, keepdims=True)
        centred = (self.directions - means) / scale
        return centred @ parts.T, centred @ self.start

    def margins(self, ids: Ids) -> OfClasses:
        """The margin of each class; the largest is that of the class that is given."""
        tokens, start = self.terms(ids)
        return tokens.sum(1) + start + self.constants

    def contributions(self, corpus: Corpus) -> pd.DataFrame:
        """One row per class and token of the texts.

        Returns:
            utterance (the index of the text), token, special (whether it is [CLS] or [SEP]), weight
            (a_0j), class, contribution (to the margin of the class), and chosen (whether that is
            the class that is given).
        """
        # In a text the tokens once for each class.
        count = len(self.classes)
        of_texts = []
        for index, ids in enumerate(self.read(corpus)):
            parts, _ = self.terms(ids)
            labels = np.repeat(range(count), len(ids))
            given = self.margins(ids).argmax()
            repeated = np.tile(ids, count)
            columns = {
                "utterance": np.repeat(index, parts.size),
                "token": self.tokenizer.convert_ids_to_tokens(repeated.tolist()),
                "special": self.special(repeated),
                "weight": np.tile(self.weights(ids), count),
                "class": np.array(self.classes)[labels],
                "contribution": parts.ravel(),
                "chosen": labels == given,
            }
            of_texts.append(pd.DataFrame(columns))
        return pd.concat(of_texts, ignore_index=True)

    def special(self, ids: Ids) -> Bool[np.ndarray, " token"]:
        """True at [CLS] and [SEP], which every text has."""
        ends = [self.tokenizer.cls_token_id, self.tokenizer.sep_token_id]
        return np.isin(ids, ends)


def word_share(rows: pd.DataFrame) -> float:
    """The share of the variance of ``contribution`` over tokens that the word (``token``) explains.

    It is 1 less the variance within words over that of all tokens, each divided by its degrees of
    freedom. Words that occur once say nothing about the first and are left out.
    """
    several = rows["token"].duplicated(keep=False)
    numbers = rows[several].set_index("token")["contribution"]
    words = numbers.groupby("token")
    deviations = numbers - words.transform("mean")
    freedom = len(numbers) - words.ngroups
    within = (deviations**2).sum() / freedom
    return float(1 - within / numbers.var())


def one_block(folder: Path | str) -> OneBlock:
    """Take apart a classifier that ``training.self_attention`` has trained with one layer.

    Raises:
        AnalysisError: it has another architecture, or another number of layers.
    """
    model, tokenizer = classifier(folder)
    kind = SelfAttentionForSequenceClassification
    if not isinstance(model, kind) or model.config.num_hidden_layers != 1:
        raise AnalysisError(
            f"{folder} is no classifier of one block of self-attention: train one with layers=1"
        )
    dense = model.double().classifier
    words = model.encoder.word_embeddings.weight
    attention = model.encoder.layers[0].attention
    norm = model.encoder.layers[0].norm
    cls = words[tokenizer.cls_token_id]
    scores = attention.key(words) @ attention.query(cls)
    start = cls
    if attention.value.bias is not None:
        start = cls + attention.value.bias
    # A row less the mean of the others.
    labels = model.config.num_labels
    same = torch.eye(labels, dtype=cls.dtype)
    others = (1 - same) / (labels - 1)
    rows = dense.weight - others @ dense.weight
    offsets = dense.bias - others @ dense.bias
    arrays = {
        "scores": scores * attention.scaling,
        "values": words @ attention.value.weight.T,
        "start": start,
        "directions": rows * norm.weight,
        "constants": rows @ norm.bias + offsets,
    }
    arrays = {name: array.detach().numpy() for name, array in arrays.items()}
    classes = [model.config.id2label[label] for label in range(labels)]
    return OneBlock(tokenizer, classes, **arrays, epsilon=norm.eps)
