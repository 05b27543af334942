"""The page on the spike and the sink of the first token."""

import math

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from planted import run_cells

from analysis_book.papers import spikes
from analysis_lib import Corpus, load_corpus, load_model, measure
from analysis_lib.capture.interventions import Replace
from analysis_lib.metrics.intervals import Estimate

CORPUS = Corpus("texts", tiny.TEXTS)
NUMBERS = {
    ("spike: mean", "weight"): 0.4,
    ("spike: mean", "loss"): 2.0,
    ("key: masked everywhere", "loss"): 0.05,
}
NUMBERS |= {("token: another text's", "loss"): 0.01, ("spike: mean", "cosine"): 0.5}


def planted(reach: float = 0.02) -> pd.DataFrame:
    rows = [
        (*at, number, number - reach, number + reach, 20, 12, "507 247 14")
        for at, number in NUMBERS.items()
    ]
    columns = ["arm", "quantity", "value", "ci_low", "ci_high", "groups", "layer", "dimensions"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture
def model(tmp_path):
    return load_model(tiny.save(tmp_path / "gpt2", "gpt2"), dtype="float64")


def forward(name: str, masked: tuple[int, ...] = ()):
    """Hidden states, weights and values of each text, as transformers computes them."""
    model, tokenizer = tiny.build(name)
    model.set_attn_implementation("eager")
    for text in tiny.TEXTS:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=True).input_ids
        with torch.no_grad():
            found = model.double().eval()(ids, output_hidden_states=True, output_attentions=True)
        yield [h[0] for h in found.hidden_states], [a[0] for a in found.attentions]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_heights_and_weights_of_the_first_tokens_are_those_of_transformers(tmp_path, name):
    model = load_model(tiny.save(tmp_path / name, name), dtype="float64")
    tables = measure(model, CORPUS, [spikes.SpikeHeight(), spikes.FirstKeys()], progress=False)
    height = tables["spike_height"].pivot(index="position", columns="layer", values="height")
    weight = tables["first_keys"].pivot(index="position", columns="layer", values="weight")
    heights, weights = [], []
    for hidden, attention in forward(name):
        if len(hidden[0]) > 3:
            middle = hidden[1].abs().flatten().sort().values[(hidden[1].numel() - 1) // 2]
            heights.append((hidden[1][:3].abs().amax(1) / middle).numpy())
            weights.append(attention[0][:, 3:, :3].mean((0, 1)).numpy())
    # A text of fewer tokens has no later query, but still a height.
    texts = tables["spike_height"].query("layer == 1")["texts"].to_numpy()
    if (texts == len(heights)).all():
        np.testing.assert_allclose(height[1], np.mean(heights, 0), rtol=1e-6)
    np.testing.assert_allclose(weight[1], np.mean(weights, 0), rtol=1e-6)


def test_a_masked_first_key_has_no_weight_and_the_rest_share_it(model):
    change = (Replace("weights", tokens=("first",)),)
    plain = measure(model, CORPUS, [spikes.FirstKeys()], progress=False)["first_keys"]
    masked = [spikes.FirstKeys(masked=(1, 2))]
    changed = measure(model, CORPUS, masked, intervention=change, progress=False)["first_keys"]
    first = changed[changed["position"] == 0]["weight"]
    assert first.tolist() == [0, 0]
    at = ["layer", "position"]
    plain, changed = (t.set_index(at)["weight"] for t in (plain, changed))
    # Before anything else is changed, what is left of the weights grows alike on average.
    assert (changed[1].drop(0) > plain[1].drop(0)).all()


def test_the_layer_of_the_spike_and_its_dimensions():
    heights = pd.DataFrame({"layer": [0, 1, 2, 0, 1, 2], "position": [0] * 3 + [1] * 3})
    tables = {"spike_height": heights.assign(height=[5.0, 1200.0, 9000.0, 9e9, 0, 0])}
    assert spikes.spike_layer(tables) == 1
    assert spikes.spike_layer(tables, 1e6) == 2  # None is so high: where it is highest.
    means = pd.DataFrame(
        {"layer": 1, "token_type": "first", "dimension": range(4), "mean": [1.0, -9, 3, 5]}
    )
    assert spikes.largest_dimensions({"dimension_means": means}, 1, "first", 2) == (1, 3)


def test_no_change_has_no_effect_and_every_arm_has_one(model):
    metrics = ["attention_by_token_type", spikes.HiddenAnisotropy(), "output_change"]
    nothing = Replace("residual", by="nothing")
    plain = measure(model, CORPUS, metrics, intervention=nothing, progress=False)
    same = spikes.effects(plain, plain, 1, "first")
    assert {name: one.value for name, one in same.items()} == pytest.approx(
        {"weight": 1, "cosine": 1, "turned": 1}
    )
    found = spikes._measured(model, CORPUS, draws=2)
    assert set(found["arm"]) == {*spikes.arms(1, (0,), "first", 2), spikes.RANDOM}
    turned = found[found["quantity"] == "turned"]["value"]
    assert len(turned) == len(spikes.arms(1, (0,), "first", 2)) + 2
    assert (turned < 1 - 1e-6).all()
    assert sorted(found.loc[found["arm"] == spikes.RANDOM, "draw"].unique()) == [0, 1]
    assert not ((found["quantity"] == "weight") & found["arm"].str.contains("masked")).any()


def test_what_comes_with_the_book_is_of_the_texts_of_its_page():
    found = spikes.every_effect("smollm2-135m", load_corpus("wikipedia", limit=60, seed=0), 20)
    random = found[found["arm"] == spikes.RANDOM]
    assert random.groupby("quantity").size().eq(20).all()
    assert set(found["spike"]) == {*spikes.HEIGHTS}


def test_verdicts_of_the_page():
    names = {"arms": planted(), "corpus": range(60)}
    found = run_cells("causes/spike", "decides = {", **names)
    expected = ["holds", "holds", "does not hold", "holds", "undecided"]
    assert found["verdicts"]["verdict"].tolist() == expected


def test_what_a_page_says_of_a_model_that_predicts_nothing():
    predicts, turns = (
        pd.DataFrame({"quantity": ["loss", "kl", "weight", "cosine"]}),
        ["turned", "weight", "cosine"],
    )
    assert [*spikes.panels(predicts)] == ["loss", "weight", "cosine"]
    assert [*spikes.panels(pd.DataFrame({"quantity": turns}))] == turns
    nothing, cost = Estimate(math.nan), Estimate(2.04, 1.0, 3.0)
    assert spikes.costs(nothing, nothing) == ""
    assert spikes.costs(cost, Estimate(2.0)) == ", but prediction costs **2.0 nats** more"
    assert spikes.costs(cost, Estimate(0.5)).endswith("more, because its value now adds noise")
