"""Layer norms before and after attention: the sink and the spike of models that are trained
here.
"""

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers
from planted import run_cells
from torch.nn import functional

from analysis_book.papers import spikes
from analysis_book.training.recipes import RECIPES
from analysis_lib import Corpus, load_corpus

CORPUS = Corpus("texts", tiny.TEXTS)


def test_the_twins_differ_in_the_place_of_their_norms_alone():
    before, after = (RECIPES[f"bytes-{place}norm"].settings() for place in ("pre", "post"))
    assert after["configuration"].pop("do_layer_norm_before") is False
    assert before == after


def test_numbers_are_those_of_transformers(tmp_path):
    base, tokenizer = tiny.build("gpt2")
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(base.config)
    model.transformer.load_state_dict(base.state_dict())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    found = spikes.first_tokens(str(tmp_path), CORPUS).set_index("layer")
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        .double()
        .eval()
    )
    heights, received, losses = [], [], []
    for text in tiny.TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            given = model(ids, output_hidden_states=True, output_attentions=True)
        # The last of transformers' hidden states is behind the final norm.
        layers = [hidden[0].abs() for hidden in given.hidden_states[:-1]]
        heights.append([(one[0].max() / one.flatten().median()).item() for one in layers])
        received.append(torch.stack([one[0, :, :, 0].mean(-1) for one in given.attentions]))
        losses.append(functional.cross_entropy(given.logits[0, :-1], ids[0, 1:], reduction="none"))
    by_head = torch.stack(received).mean(0)
    np.testing.assert_allclose(found["height"].iloc[: len(layers)], np.mean(heights, 0), rtol=1e-4)
    np.testing.assert_allclose(found["received"].iloc[1:], by_head.mean(1), rtol=1e-4)
    np.testing.assert_allclose(found["most"].iloc[1:], by_head.amax(1), rtol=1e-4)
    np.testing.assert_allclose(found["loss"], torch.cat(losses).mean().item(), rtol=1e-4)
    assert np.isnan(found["received"].iloc[0])


def test_what_comes_with_the_book_is_of_the_models_and_texts_of_its_page(monkeypatch):
    given = run_cells("causes/checks")
    corpus = load_corpus(given["norm_data"], limit=given["norm_limit"], seed=given["seed"])
    monkeypatch.setattr(spikes, "_first_tokens", lambda *_: pytest.fail("it is measured"))
    for model in given["norm_models"]:
        for draw in range(given["trainings"]):
            found = spikes.first_tokens(f"{model}@seed={draw}", corpus)
            assert found["layer"].tolist() == [*range(7)]
            assert found["received"].dropna().between(0, 1).all()
            assert (found["most"] >= found["received"]).iloc[1:].all()


@pytest.mark.parametrize(
    ("received", "height", "told"), [(0.6, 20, "holds"), (0.1, 400, "does not hold")]
)
def test_verdicts_of_the_page(received, height, told):
    draws = pd.MultiIndex.from_product(
        [["bytes-prenorm", "bytes-postnorm"], range(5)], names=["model", "training"]
    )
    noise = 1 + np.array([-0.01, 0.0, 0.01, 0.0, 0.0] * 2)
    most = pd.DataFrame(
        {"received": received * noise, "height": height * noise, "loss": 1.0}, draws
    )
    names = {"most": most, "sentences": CORPUS, "norm_data": "texts", "trainings": 5}
    rows = run_cells("causes/checks", "statistics[f", **names)["verdicts"]
    verdicts = rows.set_index("id")["verdict"]
    assert verdicts["causes-postnorm-sinks"] == verdicts["causes-prenorm-sinks"] == told
    assert verdicts["causes-postnorm-no-spike"] == told
    assert verdicts["causes-prenorm-spikes"] == ("does not hold" if told == "holds" else "holds")
