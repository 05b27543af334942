"""What changes do to what a model gives out: against the tables of two measurements, and of two
models.
"""

import pytest
import tiny
import torch
from transformers import BertForMaskedLM

from analysis_book.papers.effects import Effects
from analysis_lib import Replace, load_corpus, load_model, measure
from analysis_lib.models import LoadedModel

QUERY = Replace("query", by="zero")
ARMS = {
    "query": [QUERY],
    "nothing": [Replace("key", by="centre")],
    "two": [QUERY, Replace("key", by="centre")],
}
NOWHERE = {"nowhere": [Replace("residual", layers=99)]}


@pytest.fixture(scope="module")
def corpus():
    return load_corpus([*tiny.TEXTS])


@pytest.fixture(scope="module")
def bare(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder("bert")))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory) -> LoadedModel:
    """A masked language model."""
    folder, (body, tokenizer) = tmp_path_factory.mktemp("masked"), tiny.build("bert")
    BertForMaskedLM(body.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_model(str(folder))


def test_of_a_model_without_a_head_it_is_how_far_its_vectors_turn(bare, corpus):
    found = Effects(bare, corpus, ARMS | NOWHERE)
    table = found.table().set_index("arm")
    whole = measure(bare, corpus, "output_change", intervention=QUERY, progress=False)[
        "output_change"
    ]
    effect, ends = table.loc["query"], whole.iloc[0]
    assert effect[["effect", "ci_low", "ci_high"]].tolist() == pytest.approx(
        [1 - ends["cosine"], 1 - ends["ci_high"], 1 - ends["ci_low"]], abs=1e-9
    )
    assert effect["effect"] > 1e-4
    assert abs(table["effect"]["nothing"]) < 1e-6
    # Of several changes, the mean.
    assert table["effect"]["two"] == pytest.approx(effect["effect"] / 2, abs=1e-6)
    assert "cosine" in effect["unit"]
    assert "nowhere" not in table.index
    assert "layer 99" in found.left_out["nowhere"]
    assert bare.name not in found.left_out["nowhere"]


def test_of_a_model_that_predicts_it_is_what_is_added_to_its_loss(predicting, corpus):
    table = Effects(predicting, corpus, ARMS).table().set_index("arm")
    plain, changed = (
        measure(predicting, corpus, "masked_token_loss", intervention=change, progress=False)
        for change in (None, QUERY)
    )
    losses = [t["masked_token_loss"]["loss"].iloc[0] for t in (plain, changed)]
    assert table["effect"]["query"] == pytest.approx(losses[1] - losses[0], abs=1e-9)
    assert abs(table["effect"]["nothing"]) < 1e-5
    assert "masked" in table["unit"]["query"]


def test_differences_are_paired_over_texts_and_of_what_both_models_have(bare, predicting, corpus):
    first, other = (
        Effects(bare, corpus, ARMS),
        Effects(bare, corpus, {name: ARMS[name] for name in ("query", "two")}),
    )
    same = other.differences(first)
    assert same["arm"].tolist() == ["query", "two"]
    # The same model on the same texts: nothing is left of the spread of texts.
    assert same["effect"].abs().max() == 0
    # A loss and a cosine have no difference.
    assert Effects(predicting, corpus, ARMS).differences(first).empty


def test_a_network_without_attention_has_effects_too():
    model, processor = tiny.build("resnet-basic")
    digits = load_corpus("digits", limit=8, seed=None)
    arms = {
        "gone": [Replace("residual", layers=2, dimensions=[0, 1], by="zero")],
        "key": [Replace("key")],
    }
    found = Effects(load_model(model.eval(), processor=processor), digits, arms)
    cosines = []
    for item in digits.items:
        pixels = processor(item.load().convert("RGB"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            before = model(pixels).last_hidden_state
            block = model.encoder.stages[0].layers[1]
            handle = block.register_forward_hook(
                lambda _m, _a, out: out * (torch.arange(8) > 1)[:, None, None]
            )
            after = model(pixels).last_hidden_state
            handle.remove()
        cosines.append(torch.cosine_similarity(before, after, dim=1).flatten())
    assert found.table()["effect"].item() == pytest.approx(
        1 - torch.cat(cosines).mean().item(), abs=1e-5
    )
    assert found.table()["effect"].item() > 1e-3
    assert "has no key" in found.left_out["key"]
