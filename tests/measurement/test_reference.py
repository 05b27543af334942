"""Every table against the naive reference of ``reference.py``, on real models and on every
architecture.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
from reference import COLUMNS, KEYS, ON_REQUEST, assert_agree

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.capture import attention_rows
from analysis_lib.corpora import Corpus, Sound
from analysis_lib.models import folders

# Relative error allowed, and the absolute one in units of the column's root mean square: the second
# is for values that are what is left of a cancellation, such as the mean of a dimension that lies
# around zero.
FLOAT32 = (2e-4, 1e-6)
FLOAT64 = (1e-9, 1e-12)


def complete(tables: Mapping[str, pd.DataFrame]) -> Mapping[str, pd.DataFrame]:
    """All tables, in which no number is missing: missing ones would equal whatever is missing."""
    assert {*tables} == {*COLUMNS}
    for name, table in tables.items():
        assert not table.drop(columns=[*KEYS], errors="ignore").isna().any(axis=None), name
    return tables


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return reference.bundled_model(tmp_path_factory.mktemp("bundled"))


@pytest.fixture(scope="module")
def with_special(bundled, sentences):
    return complete(reference.Reference(bundled, sentences).tables())


@pytest.fixture(scope="module")
def without_special(bundled, sentences):
    return complete(reference.Reference(bundled, sentences, special_tokens=False).tables())


def test_sentences_hold_every_key_type(with_special):
    assert set(with_special["attention_by_token_type"]["key_type"]) == {
        "cls",
        "sep",
        "punct",
        "other",
    }


def test_float32_agrees_to_what_the_design_asks(minilm, sentences, with_special):
    assert_agree(
        measure(minilm, Corpus("sentences", sentences), progress=False), with_special, FLOAT32
    )


def test_float64_agrees_to_rounding(minilm64, sentences, with_special):
    assert_agree(
        measure(minilm64, Corpus("sentences", sentences), progress=False), with_special, FLOAT64
    )


@pytest.mark.parametrize("tokens_per_batch", [1, 10**6])
def test_padding_never_enters(minilm64, sentences, with_special, tokens_per_batch):
    corpus = Corpus("sentences", sentences)
    tables = measure(minilm64, corpus, tokens_per_batch=tokens_per_batch, progress=False)
    assert_agree(tables, with_special, FLOAT64)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32), ("float64", FLOAT64)])
def test_without_special_tokens_they_stay_keys_only(
    dtype, tolerance, minilm, minilm64, sentences, without_special
):
    model = minilm if dtype == "float32" else minilm64
    tables = measure(model, Corpus("sentences", sentences), special_tokens=False, progress=False)
    assert_agree(tables, without_special, tolerance)


def test_outlier_dimensions_row_for_row(minilm, sentences, with_special):
    found = measure(minilm, Corpus("sentences", sentences), "outlier_dimensions", progress=False)
    found, expected = found["outlier_dimensions"], with_special["outlier_dimensions"]
    assert len(expected) > 10
    assert found["layer"].tolist() == expected["layer"].tolist()
    assert found["dimension"].tolist() == expected["dimension"].tolist()
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=2e-4)
    np.testing.assert_allclose(found["zscore"], expected["zscore"], rtol=2e-4)


@pytest.fixture(scope="module")
def articles():
    """Texts of more than 96 tokens, of different lengths."""
    words = [text.split() for text in load_corpus("news:articles").texts]
    words = [article for article in words if len(article) >= 200]
    return [
        " ".join(article[:count]) for article, count in zip(words, (90, 150, 155), strict=False)
    ]


@pytest.fixture(scope="module")
def long_tables(bundled, articles):
    return complete(reference.Reference(bundled, articles).tables())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32), ("float64", FLOAT64)])
def test_long_texts_under_the_bundled_model(
    dtype, tolerance, minilm, minilm64, articles, long_tables
):
    """Rows that are formed in several parts, some of them with padding."""
    model = minilm if dtype == "float32" else minilm64
    lengths = [len(ids) for ids in model.tokenizer(articles)["input_ids"]]
    assert 12 * max(lengths) ** 2 > attention_rows.SCORES_AT_ONCE
    assert max(lengths) > 160
    tables = measure(model, Corpus("long", articles), tokens_per_batch=4096, progress=False)
    assert_agree(tables, long_tables, tolerance)


LONG = tuple(" ".join(tiny.TEXTS[i:] + tiny.TEXTS[:i]) for i in range(3))
MIXED = (*tiny.TEXTS, *LONG, " ".join(LONG), " ".join(LONG * 3), *tiny.TEXTS[:3])


@pytest.mark.parametrize("long_texts", ["cut", "window"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_texts_longer_than_the_model_reads(long_texts, dtype, tiny_folder):
    folder = tiny_folder("bert")
    model = load_model(str(folder), dtype=dtype)
    assert model.max_length == 160
    lengths = [len(ids) for ids in model.tokenizer(list(MIXED))["input_ids"]]
    long = sum(length > 160 for length in lengths)
    assert long == 2
    tables = measure(model, Corpus("mixed", MIXED), long_texts=long_texts, progress=False)
    naive = reference.Reference(folder, MIXED, long_texts=long_texts, max_length=160)
    assert tables.report.utterances == len(naive.utterances)
    assert tables.report.tokens == sum(len(utterance.types) for utterance in naive.utterances)
    assert (tables.report.cut, tables.report.windowed) == (
        (long, 0) if long_texts == "cut" else (0, long)
    )
    assert_agree(tables, complete(naive.tables()), FLOAT32 if dtype == "float32" else FLOAT64)


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture(name, special_tokens, tiny_folder):
    """With a text that is longer than those on which every variant is tried, and all types of
    keys.
    """
    folder = tiny_folder(name)
    corpus = Corpus("texts", (*tiny.TEXTS[:5], LONG[0]))
    model = load_model(str(folder), dtype="float64")
    tables = measure(model, corpus, special_tokens=special_tokens, progress=False)
    naive = reference.Reference(
        folder, corpus.texts, special_tokens=special_tokens, max_length=model.max_length
    )
    expected = complete(naive.tables())
    assert set(expected["attention_by_token_type"]["key_type"]) == {"cls", "sep", "punct", "other"}
    assert_agree(tables, expected, FLOAT64)


WITHOUT_ROTATION = ("bert", "gpt2", "t5", "deberta-v3", "canine")
ROTARY = ("qwen3", "gpt_neox", "modernbert")
# Metrics that an architecture does not have: it has no rotation, or its scores do not show.
ABSENT = [
    *itertools.product(WITHOUT_ROTATION, ("rotary_pairs", "qk_alignment_unrotated")),
    *(("deberta-v3", "largest_logits"), ("canine", "largest_logits")),
]


@pytest.mark.parametrize(("name", "metric"), ABSENT)
def test_what_is_absent_is_refused_in_one_line(name, metric, tiny_folder):
    reasons = {"largest_logits": "its attention shows weights, and no scores"}
    reason = reasons.get(metric, "it does not rotate queries and keys")
    words = f"^{metric} makes no sense for .*: {reason}; leave it out$"
    with pytest.raises(AnalysisError, match=words):
        measure(str(tiny_folder(name)), tiny.corpus(name), metric, progress=False)


PRESENT = {*itertools.product((*WITHOUT_ROTATION, *ROTARY), ON_REQUEST)} - {*ABSENT}


@pytest.mark.parametrize(("name", "metric"), sorted(PRESENT))
def test_what_is_made_on_request(name, metric, tiny_folder):
    folder = tiny_folder(name)
    corpus = Corpus("texts", (*tiny.TEXTS[:5], LONG[0]))
    model = load_model(str(folder), dtype="float64")
    naive = reference.Reference(folder, corpus.texts, max_length=model.max_length)
    expected = getattr(naive, metric)()
    assert list(expected.columns) == ON_REQUEST[metric]
    assert_agree(measure(model, corpus, metric, progress=False), {metric: expected}, FLOAT64)


def beginnings() -> Corpus:
    """Half a second of two clips: every pair of their frames is formed."""
    clips = load_corpus("speech-clips")
    return Corpus(
        "clips", [Sound(clips.items[i].load().samples[:8000], 16000) for i in (5, 10)], kind="audio"
    )


REAL = {
    "smollm2-135m": lambda: Corpus("news", load_corpus("news", limit=2, seed=0).texts),
    "vit-s14": lambda: load_corpus("photographs", limit=2, seed=0),
    "whisper-base": beginnings,
}


@pytest.mark.parametrize("name", REAL)
def test_real_models(name):
    model, corpus = load_model(name, dtype="float64"), REAL[name]()
    folder = folders.located(name, None)[0]
    read = {
        "text": lambda item: item,
        "image": lambda item: item.load(),
        "audio": lambda item: item.load().samples,
    }
    items = [read[corpus.kind](item) for item in corpus.items]
    wanted = complete(reference.Reference(folder, items, max_length=512).tables())
    assert_agree(measure(model, corpus, progress=False), wanted, FLOAT64)


def test_a_rotary_model_reads_more_than_it_was_trained_on(tiny_folder):
    folder = tiny_folder("llama")
    model = load_model(str(folder), dtype="float64")
    assert model.max_length == 160
    # Longer than 160 tokens, and than the 300 that are read.
    texts = [*tiny.TEXTS, LONG[0], " ".join(LONG)]
    lengths = [len(ids) for ids in model.tokenizer(texts)["input_ids"]]
    assert any(160 < length <= 300 for length in lengths)
    tables = measure(model, Corpus("long", texts), max_length=300, progress=False)
    assert tables.report.tokens == sum(min(length, 300) for length in lengths)
    assert tables.report.cut == sum(length > 300 for length in lengths)
    naive = reference.Reference(folder, texts, max_length=300)
    assert_agree(tables, complete(naive.tables()), FLOAT64)


def test_any_model_reads_less(tiny_folder):
    folder = tiny_folder("bert")
    model = load_model(str(folder), dtype="float64")
    settings = {"max_length": 12, "long_texts": "window"}
    tables = measure(model, Corpus("mixed", MIXED), **settings, progress=False)
    naive = reference.Reference(folder, MIXED, **settings)
    assert_agree(tables, complete(naive.tables()), FLOAT64)
    assert tables.run["settings"]["max_length"] == 12
    assert tables.report.windowed
    whole = measure(model, Corpus("mixed", MIXED), "anisotropy", progress=False)
    assert "max_length" not in whole.run["settings"]
    assert not whole["anisotropy"].equals(tables["anisotropy"])


def test_positions_that_are_not_computed_are_refused(tiny_folder):
    model = load_model(str(tiny_folder("bert")))
    assert measure(model, MIXED, "anisotropy", max_length=160, progress=False).report.cut
    with pytest.raises(AnalysisError, match=r"max_length is 161, and .* positions for 160 tokens"):
        measure(model, MIXED, "anisotropy", max_length=161)
    rotary = load_model(str(tiny_folder("llama")))
    assert rotary.positions == np.inf
    rotary.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    rotary = load_model(rotary.model, processor=rotary.tokenizer)
    with pytest.raises(AnalysisError, match="positions for 160 tokens"):
        measure(rotary, MIXED, "anisotropy", max_length=161)


def test_the_length_of_a_sound_is_not_in_tokens(tiny_folder):
    model = load_model(str(tiny_folder("whisper")))
    sounds = Corpus("sounds", [Sound(np.zeros(16_000), 16_000)], kind="audio")
    with pytest.raises(AnalysisError, match=r"max_length is 9 tokens, and .* reads sounds"):
        measure(model, sounds, "anisotropy", max_length=9)
