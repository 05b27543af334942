"""Clouds of queries and keys, and sinks, along texts that are longer than those of training."""

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
import transformers
from torch.nn import functional

from analysis_book.papers import long_texts
from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shipped
from analysis_lib.measurement.versions import formulas, is_current

LONG = (" ".join(tiny.TEXTS * 3), " ".join(tiny.TEXTS[::-1] * 3))
KEYS = ["rotation", "length", "layer", "head"]


def average(left: np.ndarray, right: np.ndarray) -> float:
    """The average cosine of all pairs, weighted by norms, every pair formed."""
    norms = np.linalg.norm(left, axis=-1)[:, None] * np.linalg.norm(right, axis=-1)
    return (left @ right.T).sum() / norms.sum()


@pytest.fixture
def rotary(tiny_folder):
    return tiny_folder("llama")


def test_clouds_are_those_of_all_pairs(rotary):
    tables = measure(
        load_model(str(rotary), dtype="float64"),
        Corpus("long", LONG[:1]),
        # The folder has a model without a head.
        [metric for metric in long_texts.METRICS if metric is not long_texts.LOSS],
        max_length=256,
        progress=False,
    )
    (text,) = reference.Reference(rotary, LONG[:1], max_length=256).utterances
    rows = []
    for layer, of_layer in enumerate(text.layers):
        if of_layer.attention is None:
            continue
        spaces = of_layer.attention.spaces
        for rotation, ending in long_texts.ROTATIONS.items():
            queries, keys = spaces[f"query{ending}"], spaces[f"key{ending}"]
            for length in 2 ** np.arange(9):
                # Two queries share a key.
                for head, query in enumerate(queries[:, :length]):
                    key = keys[head // 2, :length]
                    row = [rotation, length, layer, head + 1, average(query, query)]
                    rows.append([*row, average(key, key), average(query, key)])
    naive = pd.DataFrame(rows, columns=[*KEYS, "queries", "keys", "across"]).set_index(KEYS)
    clouds = long_texts.clouds(tables).set_index(KEYS)
    assert len(clouds) == len(naive) == 2 * 9 * 2 * 4
    np.testing.assert_allclose(clouds.loc[naive.index], naive, rtol=1e-9, atol=1e-12)
    assert (naive.xs("before") - naive.xs("after")).abs().max().min() > 1e-3


def test_sinks_are_rows_of_attention(rotary):
    model = load_model(str(rotary), dtype="float64")
    corpus = Corpus("long", LONG, units=["one text", "another"])
    tables, run = long_texts.measured(model, corpus, 128)
    assert (run["trained"], run["texts"], run["units"]) == (128, 2, 2)
    assert run["settings"]["max_length"] == 256
    assert run["data_sha256"] == corpus.sha256
    assert sorted(tables["clouds"]["length"].unique()) == [16, 32, 64, 128, 256]
    sinks = tables["sinks"].astype({"positions": str})
    sinks = sinks.set_index(["text", "positions", "layer", "head"])["mass"].sort_index()
    texts = reference.Reference(rotary, LONG, max_length=256).utterances
    for unit, text in zip(corpus.units, texts, strict=True):
        weights = text.layers[1].attention.weights
        for bin, queries in {"2": slice(1, 2), "129-256": slice(128, 256)}.items():
            first = weights[:, queries, 0].mean(1)
            np.testing.assert_allclose(sinks[unit, bin, 1], first, rtol=1e-9)


def test_losses_are_those_of_the_next_token(rotary, tmp_path):
    torch.manual_seed(0)
    base = transformers.AutoModel.from_pretrained(rotary)
    model = transformers.LlamaForCausalLM(base.config).double().eval()
    tiny.randomise(model)
    model.save_pretrained(tmp_path)
    reads = transformers.AutoTokenizer.from_pretrained(rotary)
    reads.save_pretrained(tmp_path)
    corpus = Corpus("long", LONG, units=["one text", "another"])
    headed = load_model(str(tmp_path), dtype="float64")
    losses = long_texts.measured(headed, corpus, 128)[0]["losses"]
    losses = losses.astype({"positions": str}).set_index(["text", "positions"])
    assert losses.columns.tolist() == ["loss", "tokens"]
    for unit, text in zip(corpus.units, LONG, strict=True):
        ids = reads(text, return_tensors="pt")["input_ids"][:, :256]
        with torch.no_grad(), reference.DoublePrecision():
            logits = model(ids).logits[0]
        every = functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        for bin, tokens in {"2": slice(1, 2), "65-128": slice(64, 128)}.items():
            assert losses.loc[(unit, bin), "loss"] == pytest.approx(float(every[tokens].mean()))
        # The last token has no next one.
        last = losses.loc[unit, "129-256"]
        assert last["tokens"] == 127
        assert last["loss"] == pytest.approx(float(every[128:].mean()))


def test_without_a_head_there_are_no_losses(rotary):
    corpus = Corpus("long", LONG[:1], units=["one text"])
    tables, run = long_texts.measured(load_model(str(rotary)), corpus, 128)
    assert tables["losses"].empty
    assert tables["losses"].columns.tolist() == ["text", "positions", "loss", "tokens"]
    assert "next_token_loss" not in run["formulas"]["metrics"]


def test_texts_of_one_unit_are_joined_and_the_longest_are_read(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("one\nthree words here\ntwo words\n")
    corpus = long_texts.longest_texts(str(lines), 2)
    assert list(corpus.texts) == ["three words here", "two words"]
    articles = long_texts.longest_texts("wikipedia:paragraphs", 1)
    assert corpus.units == ["1", "2"]
    assert articles.units == ["American Revolutionary War"]
    assert len(articles.texts[0].split()) > 10_000


def test_texts_that_are_too_short_and_lengths_that_no_bin_has(rotary, tiny_folder):
    corpus = Corpus("short", ["two words"], units=["a note"])
    model = load_model(str(rotary))
    with pytest.raises(AnalysisError, match=r"a note has \d+ tokens, and twice .* are 32"):
        long_texts.measured(model, corpus, 16)
    with pytest.raises(AnalysisError, match=r"powers of two.*such as 64"):
        long_texts.measured(model, corpus, 100)
    with pytest.raises(AnalysisError, match=r"the trained length is 4: .* 8 or more"):
        long_texts.measured(model, corpus, 4)
    still = load_model(str(tiny_folder("gpt2")))
    with pytest.raises(AnalysisError, match="does not rotate"):
        long_texts.measured(still, Corpus("long", LONG[:1], units=["a"]), 16)


def test_what_ships_is_taken_for_the_same_model_texts_and_length(rotary, monkeypatch):
    monkeypatch.setattr(long_texts, "measured", lambda *given: [given[1:]])
    four = long_texts.longest_texts("wikipedia:paragraphs", 4)
    assert long_texts.read("smollm2-135m", four, 8192)["clouds"]["length"].max() == 16384
    other = long_texts.longest_texts("wikipedia:paragraphs", 3)
    assert long_texts.read("smollm2-135m", other, 8192) == (other, 8192)
    assert long_texts.read("smollm2-135m", four, 4096) == (four, 4096)
    assert long_texts.read(str(rotary), four, 8192) == (four, 8192)


def test_what_ships_is_what_the_code_measures_today(monkeypatch):
    """The beginning of one article, which does not depend on what follows."""
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    recorded = shipped(long_texts.RECORDED)
    assert is_current(recorded.run, formulas(long_texts.METRICS))
    longest = long_texts.longest_texts("wikipedia:paragraphs", 1)
    now, _ = long_texts.measured(load_model("smollm2-135m"), longest, 512)
    # The last token has a next one in the recorded text alone.
    now["losses"] = now["losses"][now["losses"]["positions"] != "513-1024"]
    keys_of = {"clouds": KEYS, "sinks": ["positions", "layer", "head"], "losses": ["positions"]}
    lengths = {"clouds": 2 * 270, "sinks": 11 * 270, "losses": 10}
    for name, keys in keys_of.items():
        rows = recorded[name].query("text == @longest.units[0]").astype({keys[0]: str})
        both = now[name].astype({keys[0]: str}).merge(rows, on=keys, suffixes=("", "_recorded"))
        assert len(both) == lengths[name]
        for column in now[name].select_dtypes("float"):
            np.testing.assert_allclose(both[column], both[f"{column}_recorded"], 1e-3, 1e-5)
