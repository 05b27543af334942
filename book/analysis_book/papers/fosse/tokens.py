"""Exact sums over tokens: which decide in a classifier of one block of self-attention (Fosse et al.
2023, sec. 5).

Without positions the query of [CLS] is the same in every text, and the key and value of a token
depend on its word alone: all that the block knows of a word is one score and one value.
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
    constants: Float[np.ndarray, " class"]  # what the biases of the norm and of the dense layer add
    epsilon: float  # of the norm

    def read(self, corpus: Corpus) -> Iterator[Int[np.ndarray, " token"]]:
        """The tokens of each text, as in training."""
        return (
            np.array(text.ids) for text in encode(corpus, self.tokenizer, Classification.longest)
        )

    def weights(self, ids: Int[np.ndarray, " token"]) -> Float[np.ndarray, " token"]:
        """The attention weights a_0j of [CLS], the first of these tokens."""
        return special.softmax(self.scores[ids])

    def terms(
        self, ids: Int[np.ndarray, " token"]
    ) -> tuple[Float[np.ndarray, "class token"], Float[np.ndarray, " class"]]:
        """What each token and the start contribute to the margin of each class.

        The margin of class c is logit_c minus the mean of the other logits: the difference of two
        logits where there are two classes. With h = start + Σ_j a_0j x_j V, centred and divided by
        its standard deviation s by the norm, token j contributes a_0j u_c · (x_j V) / s, where u_c
        is the direction of the class, centred, too. Tokens, start and ``constants`` add up to the
        margin.
        """
        parts = self.weights(ids)[:, None] * self.values[ids]
        scale = np.sqrt((self.start + parts.sum(0)).var() + self.epsilon)
        centred = (self.directions - self.directions.mean(1, keepdims=True)) / scale
        return centred @ parts.T, centred @ self.start

    def margins(self, ids: Int[np.ndarray, " token"]) -> Float[np.ndarray, " class"]:
        """The margin of each class; the largest is that of the class that is given."""
        tokens, start = self.terms(ids)
        return tokens.sum(1) + start + self.constants

    def contributions(self, corpus: Corpus) -> pd.DataFrame:
        """One row per class and token of the texts.

        Returns:
            utterance (the place of the text), token, special (whether it is [CLS] or [SEP]), weight
            (a_0j), class, contribution (to the margin of the class), and chosen (whether that is
            the class that is given).
        """
        texts, classes = [*self.read(corpus)], len(self.classes)
        parts, given = (
            [self.terms(ids)[0] for ids in texts],
            [self.margins(ids).argmax() for ids in texts],
        )
        # In a text the tokens once for each class.
        sizes, ids = (
            [part.size for part in parts],
            np.concatenate([np.tile(ids, classes) for ids in texts]),
        )
        labels = np.concatenate([np.repeat(range(classes), len(ids)) for ids in texts])
        rows = {
            "utterance": np.repeat(range(len(texts)), sizes),
            "token": self.tokenizer.convert_ids_to_tokens(ids.tolist()),
            "special": self.special(ids),
            "weight": np.concatenate([np.tile(self.weights(ids), classes) for ids in texts]),
            "class": np.array(self.classes)[labels],
            "contribution": np.concatenate([part.ravel() for part in parts]),
            "chosen": labels == np.repeat(given, sizes),
        }
        return pd.DataFrame(rows)

    def special(self, ids: Int[np.ndarray, " token"]) -> Bool[np.ndarray, " token"]:
        """True at [CLS] and [SEP], which every text has."""
        return np.isin(ids, [self.tokenizer.cls_token_id, self.tokenizer.sep_token_id])


def word_share(rows: pd.DataFrame) -> float:
    """The share of the variance of ``contribution`` over tokens that the word (``token``) explains.

    It is 1 less the variance within words over that of all tokens, each divided by its degrees of
    freedom. Words that occur once say nothing about the first and are left out.
    """
    numbers = rows[rows["token"].duplicated(keep=False)].set_index("token")["contribution"]
    words = numbers.groupby("token")
    within = ((numbers - words.transform("mean")) ** 2).sum() / (len(numbers) - words.ngroups)
    return float(1 - within / numbers.var())


def one_block(folder: Path | str) -> OneBlock:
    """Take apart a classifier that ``training.self_attention`` has trained with one layer.

    Raises:
        AnalysisError: it has another architecture, or another number of layers.
    """
    model, tokenizer = classifier(folder)
    if (
        not isinstance(model, SelfAttentionForSequenceClassification)
        or model.config.num_hidden_layers != 1
    ):
        raise AnalysisError(
            f"{folder} is no classifier of one block of self-attention: train one with layers=1"
        )
    dense, words = model.double().classifier, model.encoder.word_embeddings.weight
    attention, norm = model.encoder.layers[0].attention, model.encoder.layers[0].norm
    cls, bias = words[tokenizer.cls_token_id], attention.value.bias
    others = (1 - torch.eye(len(dense.weight), dtype=cls.dtype)) / (len(dense.weight) - 1)
    rows, offsets = (part - others @ part for part in (dense.weight, dense.bias))
    arrays = {
        "scores": attention.key(words) @ attention.query(cls) * attention.scaling,
        "values": words @ attention.value.weight.T,
        "start": cls if bias is None else cls + bias,
        "directions": rows * norm.weight,
        "constants": rows @ norm.bias + offsets,
    }
    classes = [model.config.id2label[label] for label in range(model.config.num_labels)]
    return OneBlock(
        tokenizer,
        classes,
        **{name: a.detach().numpy() for name, a in arrays.items()},
        epsilon=norm.eps,
    )
