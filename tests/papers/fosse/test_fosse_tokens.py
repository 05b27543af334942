"""Contributions of tokens: they add up to what the classifier says, and planted words are found."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from planted import run_cells
from scipy import stats

from analysis_book.papers.fosse import tokens
from analysis_book.training import self_attention
from analysis_book.training.wordpiece import word_pieces
from analysis_lib import AnalysisError
from analysis_lib.corpora import Corpus
from analysis_lib.models.architectures import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)

TEXTS = (
    "a warm film",
    "a lovely thing indeed",
    "warm and lovely and warm",
    "a dull film",
    "a tired thing",
    "dull",
)
LABELS = (0, 0, 0, 1, 1, 1)


def corpus(classes: int = 2) -> Corpus:
    names = ["fresh", "rotten", "unseen"][:classes]
    return Corpus(
        "planted", list(TEXTS), labels=[label % classes for label in LABELS], classes=names
    )


def saved(folder, classes: int, bias: bool = True, layers: int = 1):
    """A classifier with random weights throughout: gains and biases of the norm, too."""
    tokenizer = word_pieces(TEXTS, 60)
    config = SelfAttentionConfig(
        vocab_size=len(tokenizer),
        hidden_size=7,
        num_hidden_layers=layers,
        bias=bias,
        num_labels=classes,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.id2label = dict(enumerate(["fresh", "rotten", "unseen"][:classes]))
    model = SelfAttentionForSequenceClassification(config)
    torch.manual_seed(classes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.double().eval(), tokenizer


def attention_row(model, ids: torch.Tensor) -> torch.Tensor:
    """The weights of [CLS], formed from queries and keys of all tokens."""
    attention, hidden = model.encoder.layers[0].attention, model.encoder.word_embeddings(ids)
    query, key = attention.query(hidden), attention.key(hidden)
    return torch.softmax(query @ key.T / hidden.shape[-1] ** 0.5, -1)[0]


def removals(block: tokens.OneBlock, texts: Corpus, seed: int = 0) -> np.ndarray:
    """Whether the decisions change, on the page, with the random numbers of the classifier at this
    place.
    """
    names = {"blocks": (seed + 1) * [block], "test": texts}
    return run_cells("classification/tokens", "def removals", "flips.append", **names)["flips"][
        seed
    ]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_tokens_start_and_constants_add_up_to_the_logits(tmp_path, classes, bias):
    model, tokenizer = saved(tmp_path, classes, bias)
    block = tokens.one_block(tmp_path)
    found = block.contributions(corpus(classes))
    for place, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            logits, row = model(ids[None]).logits[0].numpy(), attention_row(model, ids).numpy()
        margins = [logits[c] - np.delete(logits, c).mean() for c in range(classes)]
        parts, start = block.terms(ids.numpy())
        assert parts.sum(1) + start + block.constants == pytest.approx(margins, abs=1e-9)
        assert block.margins(ids.numpy()) == pytest.approx(margins, abs=1e-9)
        mine = found[found["utterance"] == place]
        names = {"measured": [mine], "flips": [], "test": Corpus("one", [text])}
        (entropy,) = run_cells("classification/tokens", "def over_units", "special.entr", **names)[
            "entropies"
        ]
        assert entropy.value == pytest.approx(stats.entropy(row) / np.log(len(row)))
        for label, name in enumerate(block.classes):
            rows = mine[mine["class"] == name]
            assert rows["contribution"].sum() + start[label] + block.constants[
                label
            ] == pytest.approx(margins[label])
            assert rows["weight"].to_numpy() == pytest.approx(row, abs=1e-12)
            assert rows["token"].tolist() == ["[CLS]", *tokenizer.tokenize(text), "[SEP]"]
            assert rows["special"].tolist() == [True, *[False] * (len(ids) - 2), True]
            assert rows["chosen"].all() == (label == logits.argmax())


def test_a_token_contributes_what_its_value_adds_before_the_division(tmp_path):
    """The formula of the paper's block, written out for one token."""
    model, tokenizer = saved(tmp_path, 2)
    block, ids = tokens.one_block(tmp_path), torch.tensor(tokenizer(TEXTS[1])["input_ids"])
    attention, norm, dense = (
        model.encoder.layers[0].attention,
        model.encoder.layers[0].norm,
        model.classifier,
    )
    with torch.no_grad():
        hidden, row = model.encoder.word_embeddings(ids), attention_row(model, ids)
        before = hidden[0] + row @ attention.value(hidden)
        value = attention.value(hidden[3]) - attention.value.bias
        toward = (dense.weight[1] - dense.weight[0]) * norm.weight
        expected = row[3] * (toward @ (value - value.mean())) / before.std(correction=0)
    assert block.terms(ids.numpy())[0][1, 3] == pytest.approx(expected.item(), abs=1e-9)


def test_only_one_block_of_self_attention_is_taken_apart(tmp_path):
    saved(tmp_path / "two", 2, layers=2)
    with pytest.raises(AnalysisError, match="no classifier of one block"):
        tokens.one_block(tmp_path / "two")
    bert = transformers.BertConfig(
        vocab_size=60,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(AnalysisError, match="no classifier of one block"):
        tokens.one_block(tmp_path / "bert")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A classifier that needs one word of a text, and the texts."""
    random = np.random.default_rng(0)
    filler = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    labels = (np.arange(160) % 2).tolist()
    texts = [
        " ".join(random.permutation([*random.choice(filler, 5), ("good", "bad")[label]]).tolist())
        for label in labels
    ]
    whole = Corpus("planted", texts, labels=labels, classes=["fresh", "rotten"])
    folder = tmp_path_factory.mktemp("trained") / "classifier"
    settings = {
        "epochs": 12,
        "patience": 12,
        "batch": 16,
        "vocabulary": 200,
        "block": {"hidden_size": 16},
    }
    return tokens.one_block(
        self_attention(whole, whole, folder, learning_rate=0.01, **settings)
    ), whole


def test_planted_words_are_the_keywords_and_their_removal_decides(trained):
    block, texts = trained
    found = block.contributions(texts)
    planted = {
        "measured": [found, found],
        "blocks": [block, block],
        "train": texts,
        "seeds": 2,
        "least": 3,
    }
    words = run_cells("classification/tokens", "words.join", "often = ", **planted)["words"]
    first = words.groupby("class").head(1).set_index("class")
    assert first["token"].to_dict() == {"fresh": "good", "rotten": "bad"}
    assert first["share"].tolist() == [1, 1]
    assert first["occurrences"].tolist() == first["trained"].tolist() == [80, 80]
    assert words[words["token"].isin(["one", "two"])]["share"].between(0.2, 0.8).all()
    assert not words["token"].isin(["[CLS]", "[SEP]"]).any()
    table = shares_of_page(found.query("chosen and not special"), texts)
    explained = tokens.word_share(found[found["class"] == block.classes[0]].query("not special"))
    assert table.loc[1, "contribution"]["share"] > 0.5
    assert table.loc[1, "contribution"]["even"] == pytest.approx(1 / 6)
    assert explained > 0.9


def shares_of_page(decision: pd.DataFrame, texts: Corpus) -> pd.DataFrame:
    """The shares of the largest tokens, by their number and by what is ranked."""
    found = run_cells(
        "classification/tokens",
        "def over_units",
        "def largest_share",
        "shares = []",
        decisions=[decision],
        test=texts,
    )["shares"]
    return found.set_index(["tokens", "name"])


def test_shares_of_the_largest_tokens_by_hand():
    decision = pd.DataFrame(
        {
            "utterance": [0] * 6 + [1] * 6 + [2],
            "token": "x",
            "contribution": [-5.0, 4, 3, 2, 1, 1, 1, 1, 1, -1, 1, 1, 9],
            "weight": [0.05, 0.1, 0.1, 0.2, 0.25, 0.3, *[1 / 6] * 6, 1],
        }
    )
    table = shares_of_page(decision, Corpus("three", ["a", "b", "c"]))
    for name, largest in (("contribution", {1: 5 / 16, 3: 12 / 16}), ("weight", {1: 0.3, 3: 0.75})):
        for rank, share in largest.items():
            assert table.loc[(rank, name), "share"] == pytest.approx((share + rank / 6) / 2)
            assert table.loc[(rank, name), "even"] == pytest.approx(rank / 6)
    assert (table["low"] < table["share"]).all()
    assert (table["share"] < table["high"]).all()
    with pytest.warns(RuntimeWarning):  # Without the only film, nothing is left.
        same = shares_of_page(
            decision, Corpus("three", ["a", "b", "c"], units=["film", "film", "other"])
        )
    assert same["share"].equals(table["share"])
    assert same["low"].isna().all()


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1.0), (1.0, 0.5)])
def test_the_share_of_the_word_is_that_of_its_variance(noise, expected):
    random = np.random.default_rng(1)
    words = np.repeat(np.arange(4000), 4)
    values = random.standard_normal(4000)[words] + noise * random.standard_normal(16000)
    table = pd.DataFrame({"token": words, "contribution": values})
    once = pd.DataFrame({"token": [-1, -2], "contribution": [50.0, -50.0]})
    assert tokens.word_share(pd.concat([table, once])) == pytest.approx(expected, abs=0.03)


def test_removing_is_reading_the_text_without_the_token(trained):
    block, texts = trained
    flips = removals(block, texts, seed=3)
    assert flips.shape == (160, 3)
    kept = [word for word in texts.items[0].split() if word not in ("good", "bad")]
    without = block.margins(np.array(block.tokenizer(" ".join(kept))["input_ids"])).argmax()
    given = block.margins(np.array(block.tokenizer(texts.items[0])["input_ids"])).argmax()
    assert flips[0, 0] == (without != given)
    assert (flips == removals(block, texts, seed=3)).all()
    # Without its only word of a class, half of the texts fall to the other class.
    assert flips[:, 0].mean() > flips[:, 2].mean()


def test_texts_of_one_token_are_left_out_of_removals(trained):
    block, _ = trained
    short = Corpus("short", ["good", "good one"], labels=[0, 0], classes=["fresh"])
    assert len(removals(block, short)) == 1
