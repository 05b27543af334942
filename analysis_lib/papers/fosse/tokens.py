"""Exact sums over tokens: which decide in a classifier of one block of self-attention (Fosse et al. 2023, sec. 5).

Without positions the query of [CLS] is the same in every text, and the key and value of a token depend on its word
alone: all that the block knows of a word is one score and one value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.models.architectures import SelfAttentionForSequenceClassification
from analysis_lib.models.tokenization import Tokenizer
from analysis_lib.training.text_classifiers import Classification, encode

REMOVED = ("the largest contribution", "the largest weight", "a token at random")


@dataclass(frozen=True, eq=False)
class OneBlock:
    """A classifier of one block, in float64, in the terms that add up to its decision.

    Attributes:
        tokenizer: of the classifier.
        classes: names of the classes.
        scores: q_cls · k_w / √d of each word w of the vocabulary.
        values: x_w V of each word, without the bias of the values.
        start: x_cls and that bias, which every text has.
        directions: g ∘ (w_c − mean of the other w), with the gain g of the norm and the rows w of the dense layer.
        constants: of each class, what the biases of the norm and of the dense layer add.
        epsilon: of the norm.
    """

    tokenizer: Tokenizer
    classes: Sequence[str]
    scores: Float[np.ndarray, " word"]
    values: Float[np.ndarray, "word width"]
    start: Float[np.ndarray, " width"]
    directions: Float[np.ndarray, "class width"]
    constants: Float[np.ndarray, " class"]
    epsilon: float

    def weights(self, ids: Int[np.ndarray, " token"]) -> Float[np.ndarray, " token"]:
        """The attention weights a_0j of [CLS], the first of these tokens."""
        return special.softmax(self.scores[ids])

    def terms(
        self, ids: Int[np.ndarray, " token"]
    ) -> tuple[Float[np.ndarray, "class token"], Float[np.ndarray, " class"]]:
        """What each token and the start contribute to the margin of each class.

        The margin of class c is logit_c minus the mean of the other logits: the difference of two logits where there
        are two classes. With h = start + Σ_j a_0j x_j V, centred and divided by its standard deviation s by the norm,
        token j contributes a_0j u_c · (x_j V) / s, where u_c is the direction of the class, centred, too. Tokens, start
        and ``constants`` add up to the margin.
        """
        parts = self.weights(ids)[:, None] * self.values[ids]
        scale = np.sqrt((self.start + parts.sum(0)).var() + self.epsilon)
        centred = (self.directions - self.directions.mean(1, keepdims=True)) / scale
        return centred @ parts.T, centred @ self.start

    def margins(self, ids: Int[np.ndarray, " token"]) -> Float[np.ndarray, " class"]:
        """The margin of each class; the largest is that of the class that is given."""
        tokens, start = self.terms(ids)
        return tokens.sum(1) + start + self.constants

    def special(self, ids: Int[np.ndarray, " token"]) -> Bool[np.ndarray, " token"]:
        """True at [CLS] and [SEP], which every text has."""
        return np.isin(ids, [self.tokenizer.cls_token_id, self.tokenizer.sep_token_id])


def one_block(folder: Path | str) -> OneBlock:
    """Take apart a classifier that ``training.self_attention`` has trained with one layer.

    Raises:
        AnalysisError: it has another architecture, or another number of layers.
    """
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    if not isinstance(model, SelfAttentionForSequenceClassification) or model.config.num_hidden_layers != 1:
        raise AnalysisError(f"{folder} is no classifier of one block of self-attention: train one with layers=1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
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
    return OneBlock(tokenizer, classes, **{name: a.detach().numpy() for name, a in arrays.items()}, epsilon=norm.eps)


def _texts(block: OneBlock, corpus: Corpus, longest: int) -> Iterator[Int[np.ndarray, " token"]]:
    return (ids.numpy() for ids in encode(corpus, block.tokenizer, longest).ids)


def token_contributions(block: OneBlock, corpus: Corpus, longest: int = Classification.longest) -> pd.DataFrame:
    """What each token of each text contributes to the margin of each class.

    Args:
        block: from :func:`one_block`.
        corpus: with classes.
        longest: tokens of a text that are read, as in training.

    Returns:
        Columns utterance (its place), position (0 is [CLS]), token, special (whether it is [CLS] or [SEP]), weight
        (a_0j), class (by name), contribution, and chosen (whether the class is the one that is given).
    """
    frames = []
    for place, ids in enumerate(_texts(block, corpus, longest)):
        tokens, start = block.terms(ids)
        chosen = (tokens.sum(1) + start + block.constants).argmax()
        columns = {
            "utterance": place,
            "position": np.arange(len(ids)),
            "token": block.tokenizer.convert_ids_to_tokens(ids.tolist()),
            "special": block.special(ids),
            "weight": block.weights(ids),
        }
        frames += [
            pd.DataFrame({**columns, "class": name, "contribution": tokens[label], "chosen": label == chosen})
            for label, name in enumerate(block.classes)
        ]
    return pd.concat(frames, ignore_index=True)


def row_entropies(contributions: pd.DataFrame) -> Float[np.ndarray, " utterance"]:
    """The entropy of the attention row of [CLS] in each text, divided by the logarithm of the number of its keys."""
    rows = contributions[contributions["chosen"]].groupby("utterance")["weight"]
    return rows.agg(lambda row: special.entr(row).sum() / np.log(len(row))).to_numpy()


def concentration(decision: pd.DataFrame, ranks: Sequence[int] = (1, 3, 5)) -> pd.DataFrame:
    """How much the few largest tokens of a text carry, of its |contributions| and of its attention.

    Args:
        decision: rows of :func:`token_contributions` on tokens that are not special, for the class that is given;
            texts of more tokens than the highest rank are averaged.

    Returns:
        One row per rank: tokens (how many of the largest); contribution and weight, the mean share over texts, each
        with the ends of its 95 % interval (``_low``, ``_high``); and even, what equal shares would be.

    Raises:
        AnalysisError: no text is that long.
    """
    texts = [text for _, text in decision.groupby("utterance") if len(text) > max(ranks)]
    if not texts:
        raise AnalysisError(f"no text has more than {max(ranks)} tokens: give longer ones, or lower ranks")
    rows = []
    for rank in ranks:
        row = {"tokens": rank, "even": float(np.mean([rank / len(text) for text in texts]))}
        for name in ("contribution", "weight"):
            shares = [sizes.nlargest(rank).sum() / sizes.sum() for sizes in (text[name].abs() for text in texts)]
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), seed_interval(shares), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def rank_agreement(decision: pd.DataFrame) -> Float[np.ndarray, " utterance"]:
    """Spearman's correlation of attention weight and |contribution| among the tokens of each text of three or more.

    Texts in which one of the two is the same for all tokens have none and are left out.
    """
    texts = (text for _, text in decision.groupby("utterance") if len(text) > 2)
    pairs = ((text["weight"].to_numpy(), text["contribution"].abs().to_numpy()) for text in texts)
    return np.array([stats.spearmanr(*pair).statistic for pair in pairs if min(map(np.ptp, pair)) > 0])


def share_of_word(decision: pd.DataFrame, column: str) -> float:
    """The share of a column's variance over tokens that the word explains, adjusted for the number of words; at most 1.

    1 − (variance within words) / (variance of all), with degrees of freedom as denominators; words that occur once say
    nothing about the first and are left out.

    Args:
        decision: as of :func:`concentration`.
        column: contribution or weight.
    """
    several = decision[decision.groupby("token")["token"].transform("size") > 1]
    values, words = several[column], several.groupby("token")[column]
    within = ((values - words.transform("mean")) ** 2).sum() / (len(values) - words.ngroups)
    return float(1 - within / values.var(ddof=1))


def keywords(
    found: Sequence[pd.DataFrame],
    block: OneBlock,
    train: Corpus,
    least: int = 5,
    longest: int = Classification.longest,
) -> pd.DataFrame:
    """What the words contribute to each class, beside how often they stand in training texts of that class.

    Args:
        found: from :func:`token_contributions`, of one classifier or of several with the same word pieces, on the same
            texts.
        block: one of the classifiers.
        train: what it was trained on.
        least: words that occur less often are left out, in the measured texts and in those of training.

    Returns:
        One row per class and word: class, token, occurrences (in the measured texts), contribution (mean over them and
        over classifiers), trained (occurrences in training texts) and share (of these, in texts of the class), the
        largest mean contribution of a class first.
    """
    texts = zip(_texts(block, train, longest), train.labels, strict=True)
    words = [(train.classes[label], block.tokenizer.convert_ids_to_tokens(ids.tolist())) for ids, label in texts]
    counts = pd.DataFrame(words, columns=["class", "token"]).explode("token").value_counts().rename("own").reset_index()
    counts["trained"] = counts.groupby("token")["own"].transform("sum")
    means = pd.concat(found).query("~special").groupby(["class", "token"])["contribution"]
    table = means.agg(occurrences="size", contribution="mean").reset_index()
    table["occurrences"] //= len(found)
    table = table.merge(counts.drop_duplicates("token")[["token", "trained"]]).merge(
        counts.drop(columns="trained"), how="left"
    )
    table["share"] = table.pop("own").fillna(0) / table["trained"]
    table = table[(table["occurrences"] >= least) & (table["trained"] >= least)]
    return table.sort_values(["class", "contribution"], ascending=[True, False], ignore_index=True)


def removals(
    block: OneBlock, corpus: Corpus, seed: int = 0, longest: int = Classification.longest
) -> Bool[np.ndarray, "utterance removed"]:
    """Whether another class is given to each text once a token is removed, for each of ``REMOVED``.

    The first is the token that contributes most to the margin of the class that is given. Special tokens stay, and
    texts that would hold no other token afterwards are left out.

    Args:
        seed: of the tokens that are drawn at random.
    """
    random, flips = np.random.default_rng(seed), []
    for ids in _texts(block, corpus, longest):
        words = np.flatnonzero(~block.special(ids))
        if len(words) > 1:
            chosen = block.margins(ids).argmax()
            contributed = block.terms(ids)[0][chosen, words]
            places = contributed.argmax(), block.weights(ids)[words].argmax(), random.integers(len(words))
            flips.append([block.margins(np.delete(ids, words[place])).argmax() != chosen for place in places])
    return np.array(flips, dtype=bool).reshape(-1, len(REMOVED))
