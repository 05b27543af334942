"""Logits of some tokens at a time, against those that transformers computes of all at once."""

import numpy as np
import pytest
import reference
import tiny
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from analysis_lib import load_model, measure
from analysis_lib.capture import outputs
from analysis_lib.capture.interventions import Replace

# More than the width of any vector, and no other size.
WORDS = 397
CHUNK = 48
SIZE = {
    "vocab_size": WORDS,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 160,
}
# What follows the head in the class is no module: bounds, factors. OPT's head calls a part.
CAUSAL = {
    "llama": {},
    "gemma2": {"head_dim": 12, "num_key_value_heads": 1, "final_logit_softcapping": 1.5},
    "gpt2": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 24},
}
TEXTS = (" ".join(tiny.TEXTS), *tiny.TEXTS[:4], " ".join(tiny.TEXTS[::-1]))
CUT = Replace("residual", layers=[1], dimensions=[2, 5], by="zero")
UNCHANGED = Replace("residual", by="nothing")
MEASURED = {"max_length": 150, "tokens_per_batch": 10**6, "progress": False}


class LargestLogits(TorchDispatchMode):
    """The largest number of tokens that an operation has made something for each word of."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if type(made) is torch.Tensor and made.dim() and made.shape[-1] == WORDS:
            self.tokens = max(self.tokens, made.numel() // WORDS)
        return made


def causal(name: str) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(name, **SIZE, **CAUSAL[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    tiny.randomise(model)
    return model.eval()


def cut(_module, _args, output):
    hidden = output if isinstance(output, torch.Tensor) else output[0]
    hidden = hidden.clone()
    hidden[..., [2, 5]] = 0
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


def predictions(model: transformers.PreTrainedModel, ids: torch.Tensor, change: bool):
    """ln p of every word by token, from one pass over one text; perhaps with two dimensions cut."""
    name = "decoder.layers.0" if model.config.model_type == "opt" else "layers.0"
    names = {"gpt2": "h.0", "bert": "encoder.layer.0"}
    first = model.base_model.get_submodule(names.get(model.config.model_type, name))
    handle = first.register_forward_hook(cut) if change else None
    with torch.no_grad(), reference.DoublePrecision():
        logits = model(input_ids=ids[None]).logits[0]
    if handle:
        handle.remove()
    return logits.log_softmax(-1)


def by_bins(model: transformers.PreTrainedModel, reads: object, change: bool) -> dict:
    """Loss and divergence, by bins of positions that end at powers of two, of every text."""
    values: dict[str, list] = {}
    for text in TEXTS:
        ids = torch.tensor(reads(text)["input_ids"][:150])
        plain, changed = (predictions(model, ids, with_cut) for with_cut in (False, change))
        loss = functional.nll_loss(changed[:-1], ids[1:], reduction="none")
        kl = (plain.exp() * (plain - changed)).sum(-1)
        for position in range(1, len(ids)):
            end = 1 << (position - 1).bit_length()
            both = [loss[position - 1], kl[position - 1]]
            values.setdefault(str(end), []).append(both)
    return {end: np.mean(of_bin, 0) for end, of_bin in values.items()}


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_next_tokens_are_predicted_in_parts(name, change, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK", CHUNK)
    model, reads = causal(name), tiny.tokenizer("gpt2")
    expected = by_bins(model, reads, change)
    loaded = load_model(model, processor=reads)
    with LargestLogits() as largest:
        tables = measure(
            loaded,
            list(TEXTS),
            "next_token_loss",
            bins="position",
            intervention=CUT if change else UNCHANGED,
            **MEASURED,
        )
    table = tables["next_token_loss"]
    ends = table["positions"].astype(str).str.split("-").str[-1]
    assert [*ends] == [*expected]
    assert len(ends) > 7
    found = table[["loss", "kl"]].to_numpy()
    np.testing.assert_allclose(found, np.stack([*expected.values()]), rtol=1e-12, atol=1e-12)
    assert (table["kl"].max() > 1e-3) == change
    tokens = sum(min(150, len(reads(text)["input_ids"])) for text in TEXTS)
    assert 2 * len(TEXTS) <= largest.tokens <= CHUNK < tokens / 4


@pytest.mark.parametrize("change", [False, True])
def test_masked_tokens_are_predicted_in_parts(change, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK", CHUNK)
    monkeypatch.setattr(outputs, "CHUNK", CHUNK)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)).double().eval()
    tiny.randomise(model)
    reads = tiny.tokenizer("wordpiece")
    text = " ".join(2 * TEXTS[:1])
    ids = torch.tensor(reads(text)["input_ids"][:150])
    loaded = load_model(model, processor=reads)
    # Where a live model is checked, its head reads up to 256 tokens at once.
    measure(loaded, [text], "anisotropy", **MEASURED)
    seen = []
    words = model.bert.embeddings.word_embeddings
    words.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0]))
    with LargestLogits() as largest:
        tables = measure(
            loaded,
            [text],
            "masked_token_loss",
            intervention=CUT if change else UNCHANGED,
            **MEASURED,
        )
    masked = next(one for one in seen if len(one) == len(ids) and (one != ids).any())
    where = masked != ids
    plain, changed = (predictions(model, masked, with_cut) for with_cut in (False, change))
    loss = functional.nll_loss(changed[where], ids[where])
    kl = (plain.exp() * (plain - changed)).sum(-1)[where].mean()
    row = tables["masked_token_loss"].iloc[0]
    np.testing.assert_allclose([row["loss"], row["kl"]], [loss, kl], rtol=1e-12, atol=1e-12)
    assert row["tokens"] == where.sum() == round(0.15 * (len(ids) - 2))
    assert largest.tokens <= CHUNK < len(ids) / 2


class Mixed(nn.Module):
    """A head whose logits depend on the tokens before."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden.cumsum(1))


class Doubled(nn.Module):
    """A hook of a user on a body, which acts each time that the body is called."""

    def __call__(self, _module, _args, output):
        output.last_hidden_state = 2 * output.last_hidden_state
        return output


@pytest.mark.parametrize("kind", ["head", "hook"])
def test_what_is_not_predicted_token_by_token_is_predicted_whole(kind, monkeypatch):
    monkeypatch.setattr(outputs, "CHUNK", CHUNK)
    model, reads = causal("llama"), tiny.tokenizer("gpt2")
    if kind == "head":
        model.lm_head = Mixed(model.lm_head)
    else:
        model.model.register_forward_hook(Doubled())
    expected = by_bins(model, reads, False)
    loaded = load_model(model, processor=reads)
    table = measure(loaded, list(TEXTS), "next_token_loss", bins="position", **MEASURED)
    found = table["next_token_loss"]["loss"]
    np.testing.assert_allclose(found, [loss for loss, _ in expected.values()], rtol=1e-12)
    assert loaded.body_path == ""


def test_a_model_is_left_as_it_was():
    model, reads = causal("gpt2"), tiny.tokenizer("gpt2")
    loaded = load_model(model, processor=reads)
    measure(loaded, list(TEXTS), "next_token_loss", **MEASURED)
    assert loaded.body_path == "transformer"
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks


def test_a_single_token_proves_nothing():
    model, reads = causal("llama"), tiny.tokenizer("gpt2")
    model.lm_head = Mixed(model.lm_head)
    loaded = load_model(model, processor=reads)
    measure(loaded, ["a"], "next_token_loss", **MEASURED)
    assert loaded.body_path is None
    measure(loaded, list(TEXTS), "next_token_loss", **MEASURED)
    assert loaded.body_path == ""
