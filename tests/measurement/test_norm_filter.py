"""``tokens="norm<2x"``: tokens with long vectors do not count, in any metric; against naive
float64.
"""

import itertools
import math

import numpy as np
import pytest
import tiny
import torch

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.capture.inputs import Settings

BELOW = 1.05


@pytest.fixture(scope="module")
def naive(tiny_folder):
    """Of each layer and text: hidden vectors, their norms, queries and the rows of attention of
    head 1.
    """
    loaded = load_model(str(tiny_folder("gpt2")), dtype="float64")
    model, hidden, rows, queries = loaded.model, [], [], []
    model.config._attn_implementation = "eager"
    for text in tiny.TEXTS:
        inputs = {name: torch.tensor([value]) for name, value in loaded.tokenizer(text).items()}
        seen = []
        hook = model.h[0].attn.c_attn.register_forward_hook(
            lambda _m, _a, out, seen=seen: seen.append(out)
        )
        # The last hidden state that transformers gives is behind a norm: that of block 1 is not.
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True, output_attentions=True)
        hook.remove()
        hidden.append([state[0].numpy() for state in out.hidden_states[:2]])
        rows.append(out.attentions[0][0, 0].numpy())
        queries.append(seen[0][0, :, :12].numpy())
    return hidden, rows, queries


@pytest.fixture(scope="module")
def measured(tiny_folder):
    model = load_model(str(tiny_folder("gpt2")), dtype="float64")
    asked = "anisotropy,mean_vector,attention_entropy,dimension_means,token_norms"
    return measure(model, [*tiny.TEXTS], asked, tokens=f"norm<{BELOW}x", progress=False)


def short(hidden: list, layer: int) -> list[np.ndarray]:
    """True at tokens that count, text by text."""
    norms = [np.linalg.norm(states[layer], axis=1) for states in hidden]
    every = np.sort(np.concatenate(norms))
    median = every[(len(every) - 1) // 2]
    # As token_norms has it: half the norms lie below, those of its bin of 1/64 octave spread
    # evenly.
    bins = np.floor(64 * np.log2(every))
    here = math.floor(64 * math.log2(median))
    told = 2 ** ((here + (len(every) / 2 - (bins < here).sum()) / (bins == here).sum()) / 64)
    assert told == pytest.approx(median, rel=0.011)
    return [part < BELOW * told for part in norms]


def cosine(vectors: np.ndarray) -> float:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.mean([a @ b for a, b in itertools.combinations(units, 2)])


@pytest.mark.parametrize("layer", [0, 1])
def test_hidden_vectors_that_are_long_do_not_count(naive, measured, layer):
    hidden, *_ = naive
    kept = short(hidden, layer)
    count = int(sum(map(sum, kept)))
    every = sum(map(len, kept))
    assert 0 < every - count < every / 2
    vectors = np.concatenate(
        [states[layer][good] for states, good in zip(hidden, kept, strict=True)]
    )
    row = measured["anisotropy"].query("space == 'hidden' and layer == @layer").iloc[0]
    assert row["tokens"] == count
    assert row["cosine"] == pytest.approx(cosine(vectors), rel=1e-9)
    mean = measured["mean_vector"].query("space == 'hidden' and layer == @layer").iloc[0]
    assert mean["mean_norm"] == pytest.approx(np.linalg.norm(vectors, axis=1).mean(), rel=1e-9)
    means = measured["dimension_means"].query("layer == @layer and token_type == 'all'")["mean"]
    np.testing.assert_allclose(means, vectors.mean(0), rtol=1e-8, atol=1e-12)
    assert measured.run["report"]["long"][str(layer)] == every - count
    assert measured["token_norms"].query("layer == @layer")["tokens"].max() == count


def test_what_attention_makes_of_them_does_not_count_either_but_they_stay_keys(naive, measured):
    hidden, rows, queries = naive
    kept = short(hidden, 0)
    of_first = np.concatenate([part[good] for part, good in zip(queries, kept, strict=True)])
    row = measured["anisotropy"].query("space == 'query' and layer == 1 and head == 1").iloc[0]
    assert row["cosine"] == pytest.approx(cosine(of_first), rel=1e-9)
    entropies = []
    for part, good in zip(rows, kept, strict=True):
        logs = np.log(np.where(part > 0, part, 1))
        entropies += [-(part[m] * logs[m]).sum() for m in np.flatnonzero(good)]
    row = measured["attention_entropy"].query("layer == 1 and head == 1").iloc[0]
    assert row["entropy_nats"] == pytest.approx(np.mean(entropies), rel=1e-6)


def test_a_filter_that_leaves_nothing_out_changes_nothing(tiny_folder):
    model = load_model(str(tiny_folder("bert")), dtype="float64")
    asked = {"metrics": "all", "progress": False}
    plain, wide = (
        measure(model, [*tiny.TEXTS], tokens=tokens, **asked) for tokens in ("all", "norm<1000x")
    )
    for name, table in plain.items():
        assert table.equals(wide[name]), name
    assert {*wide.run["report"]["long"].values()} == {0}
    assert plain.run["report"]["long"] == {}


@pytest.mark.parametrize("tokens", ["norm<0x", "norm<x", "norm<-1x", "short", "norm>2x"])
def test_a_filter_that_is_none_is_refused(tokens):
    with pytest.raises(AnalysisError, match="'norm<10x'"):
        Settings(tokens=tokens)


def test_it_gives_the_same_with_workers_and_is_kept_apart(
    tiny_folder, tmp_path, monkeypatch, copied_workers
):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path))
    name = str(tiny_folder("gpt2"))
    texts = [*tiny.TEXTS] * 70
    one = measure(name, texts, "anisotropy", tokens="norm<1.05x", progress=False)
    assert len(one["anisotropy"]) == len(
        measure(name, texts, "anisotropy", progress=False)["anisotropy"]
    )
    again = measure(name, texts, "anisotropy", tokens="norm<1.05x", progress=False)
    assert again["anisotropy"].equals(one["anisotropy"])
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    two = measure(name, texts, "anisotropy", tokens="norm<1.05x", workers=2, progress=False)
    assert two["anisotropy"].equals(one["anisotropy"])
    assert not measure(name, texts, "anisotropy", progress=False)["anisotropy"].equals(
        one["anisotropy"]
    )
