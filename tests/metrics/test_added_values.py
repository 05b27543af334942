"""What keys add to the output of a head, and how long vectors of each type are, by hand."""

import numpy as np
import pytest
import shrunk
import tiny
import torch
from clouds import CLS, OTHER, SEP, accumulated, activations_of, tokens_of

from analysis_lib import load_model, measure, metrics
from analysis_lib.capture import Activations, AttentionWeights, Block, Tokens, Vectors, Visibility


def attending(
    rows: list[list[float]], values: list[list[float]], tokens: Tokens, has_sink: bool = False
) -> Activations:
    """A layer of one text and one head, with these weights and values."""
    weights = torch.tensor(rows, dtype=torch.float64)[None, None]
    every = slice(0, 1), slice(0, 1), slice(0, len(rows))
    block = Block(every, len(values), weights)
    attention = AttentionWeights(Visibility(tokens, tokens), 1, lambda: [block], has_sink=has_sink)
    vectors = Vectors(torch.tensor(values, dtype=torch.float64)[None, None], tokens)
    spaces = {"value": vectors}
    return Activations(1, "blocks", "layer.0", tokens, spaces, attention=attention)


def added_by(*arguments, **options) -> dict[str, dict[str, float]]:
    layer = attending(*arguments, **options)
    table = accumulated(metrics.ValueWeightedAttention(), layer).table()
    return table.set_index("key_type").to_dict("index")


def test_a_silent_sink_has_the_weight_and_adds_nothing():
    tokens = tokens_of([[CLS, OTHER, OTHER]])
    rows = [[0.8, 0.2, 0.0], [0.8, 0.1, 0.1], [0.8, 0.0, 0.2]]
    found = added_by(rows, [[0, 0], [3, 0], [0, 4]], tokens)
    assert found["cls"]["mass"] == pytest.approx(0.8)
    assert (found["cls"]["added_norm"], found["cls"]["share"]) == (0, 0)
    # 0.6; (0.3, 0.4), of length 0.5 and with the lengths 0.3 + 0.4; 0.8.
    assert found["other"]["added_norm"] == pytest.approx((0.6 + 0.5 + 0.8) / 3)
    assert found["other"]["weighted_norm"] == pytest.approx((0.6 + 0.7 + 0.8) / 3)
    assert found["cls"]["rest_norm"] == pytest.approx(found["other"]["added_norm"])
    assert (found["other"]["rest_norm"], found["other"]["share"]) == (0, 1)


def test_the_share_of_a_type_is_that_of_the_weighted_norms():
    tokens = tokens_of([[CLS, OTHER, SEP]])
    # Each query reads 0.5 · 2, 0.25 · 4 and 0.25 · 8.
    found = added_by([[0.5, 0.25, 0.25]] * 3, [[2, 0], [0, -4], [8, 0]], tokens)
    assert [found[name]["share"] for name in ("cls", "other", "sep")] == pytest.approx(
        [0.25, 0.25, 0.5]
    )
    assert found["cls"]["rest_norm"] == pytest.approx(np.hypot(2, 1))


def test_a_learnt_sink_takes_weight_and_adds_nothing():
    tokens = tokens_of([[CLS, OTHER]])
    found = added_by([[0.1, 0.3], [0.2, 0.2]], [[1, 0], [0, 2]], tokens, has_sink=True)
    assert found["sink"]["mass"] == pytest.approx(0.6)
    assert (found["sink"]["added_norm"], found["sink"]["share"]) == (0, 0)
    output = (np.hypot(0.1, 0.6) + np.hypot(0.2, 0.4)) / 2
    assert found["sink"]["rest_norm"] == pytest.approx(output)
    assert sum(row["mass"] for row in found.values()) == pytest.approx(1)


def with_learnt_sinks() -> tuple[torch.nn.Module, object]:
    reads = tiny.tokenizer("llama")
    reads.pad_token = "<unk>"
    return shrunk.build("gpt_oss"), reads


@pytest.mark.parametrize("architecture", ["gpt_oss", "gpt2", "segformer"])
def test_masses_are_those_of_attention_by_token_type(architecture):
    """With a learnt sink; under a causal mask; with fewer keys than queries."""
    built = with_learnt_sinks() if architecture == "gpt_oss" else tiny.build(architecture)
    model, reads = built
    data = tiny.corpus("gpt2" if architecture == "gpt_oss" else architecture)
    loaded = load_model(model.double(), processor=reads)
    names = ["value_weighted_attention", "attention_by_token_type"]
    tables = measure(loaded, data, names, progress=False)
    added, weights = (tables[name].astype({"key_type": str}) for name in names)
    both = added.merge(weights, on=["layer", "head", "key_type"], suffixes=("", "_known"))
    assert len(both) == len(added) == len(weights)
    np.testing.assert_allclose(both["mass"], both["mass_known"], rtol=1e-9, atol=1e-12)
    assert (added["weighted_norm"] >= added["added_norm"] - 1e-9).all()
    assert ("sink" in {*added["key_type"]}) == (architecture == "gpt_oss")
    shares = added.groupby(["layer", "head"])["share"].sum()
    np.testing.assert_allclose(shares, 1, rtol=1e-9)


def test_norms_by_type_by_hand():
    activations = activations_of(
        [np.array([[3.0, 4], [0, 2]]), np.array([[0, 0], [6, 8], [0, 4]])],
        types=[[CLS, OTHER], [CLS, OTHER, OTHER]],
    )
    table = accumulated(metrics.NormsByType(), activations).table().set_index("token_type")
    # A zero vector is a short one.
    assert table["norm"].to_dict() == pytest.approx({"all": 21 / 5, "cls": 2.5, "other": 16 / 3})
    assert table["tokens"].to_dict() == {"all": 5, "cls": 2, "other": 3}
