"""One forward pass: what is captured is what the model computes, in every architecture."""

import math
import types

import pytest
import tiny
import torch
from torch.nn import functional

from analysis_lib import AnalysisError, LoadedModel, attention, extraction, load_model
from analysis_lib.extraction import SCORES, SPACES, WEIGHTS, Activations
from analysis_lib.inputs import Batch, make_batches
from analysis_lib.models import TOKEN_TYPES

EVERYTHING = frozenset({*SPACES, WEIGHTS, SCORES})
# Utterances of one batch: two lengths, so that there is padding; the longer with rows for the fused kernel or not.
SHORT = tiny.TEXTS[:3]
LONG = (" ".join(tiny.TEXTS * 3), tiny.TEXTS[0])


@pytest.fixture(params=tiny.ARCHITECTURES)
def loaded(request, tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder(request.param)), dtype="float64")


def batch_of(loaded: LoadedModel, texts: tuple[str, ...], special_tokens: bool = True) -> Batch:
    ids = loaded.tokenizer(list(texts), truncation=True, max_length=loaded.max_length)["input_ids"]
    (batch,) = make_batches(loaded, ids, range(len(ids)), special_tokens, 10**6)
    return batch


def captured(loaded: LoadedModel, batch: Batch, needs: frozenset[str] = EVERYTHING) -> list[Activations]:
    layers: list[Activations] = []
    extraction.run(loaded, batch, needs, layers.append)
    return layers


def attentions(loaded: LoadedModel) -> list[torch.nn.Module]:
    """The self-attention module of each block."""
    ((stack, blocks),) = loaded.stacks.items()
    return [block.get_submodule(stack.attention.module) for block in blocks]


def eager(loaded: LoadedModel, batch: Batch):
    """The model's own hidden states and attention weights."""
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return loaded.model(
                **batch.inputs,
                output_hidden_states=True,
                output_attentions=True,
            )
    finally:
        loaded.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("texts", [SHORT, LONG], ids=["short", "long"])
def test_what_is_captured_is_what_the_model_computes(loaded, texts):
    batch = batch_of(loaded, texts)
    assert not batch.tokens.mask.all()
    assert (batch.tokens.mask.shape[1] > attention.LONGEST_FORMED_ROW) == (texts is LONG)
    expected = eager(loaded, batch)
    layers = captured(loaded, batch)
    assert [activations.layer for activations in layers] == [0, 1, 2, 3]
    assert set(layers[0].spaces) == {"hidden"}
    close = {"rtol": 1e-9, "atol": 1e-9}
    for layer, activations in enumerate(layers):
        assert activations.tokens is batch.tokens
        hidden = activations.spaces["hidden"].values.squeeze(1)
        torch.testing.assert_close(hidden[batch.tokens.mask], expected.hidden_states[layer][batch.tokens.mask], **close)
    for layer, activations in enumerate(layers[1:], 1):
        assert set(activations.spaces) == set(SPACES)
        read = activations.spaces["attention_input"].values.squeeze(1)
        torch.testing.assert_close(
            read[batch.tokens.mask], expected.hidden_states[layer - 1][batch.tokens.mask], **close
        )
        weights = expected.attentions[layer - 1]
        torch.testing.assert_close(
            activations.rows.entropy.transpose(1, 2)[batch.tokens.mask],
            torch.special.entr(weights).sum(-1).transpose(1, 2)[batch.tokens.mask],
            **close,
        )
        query, key = (activations.spaces[name].values for name in ("query", "key"))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~batch.tokens.mask[:, None, None], -math.inf)
        torch.testing.assert_close(scores.softmax(-1), weights, **close)
        mass = torch.einsum("bhqk,btk,bq->bht", weights, batch.tokens.type_masks.double(), batch.tokens.mask.double())
        torch.testing.assert_close(activations.rows.type_mass, mass, **close)


def test_queries_keys_and_values_are_those_of_the_projections(loaded):
    """Hooks on the projections see the same vectors, before the split into heads."""
    batch = batch_of(loaded, SHORT)
    distilbert = loaded.model.config.model_type == "distilbert"
    names = {space: f"{space[0]}_lin" if distilbert else space for space in ("query", "key", "value")}
    seen: dict[tuple[str, int], torch.Tensor] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda _module, _args, output, at=(space, layer): seen.update({at: output})
        )
        for layer, attention in enumerate(attentions(loaded), 1)
        for space, name in names.items()
    ]
    layers = captured(loaded, batch)
    for hook in hooks:
        hook.remove()
    for activations in layers[1:]:
        for space in names:
            merged = activations.spaces[space].values.transpose(1, 2).flatten(2)
            torch.testing.assert_close(merged, seen[space, activations.layer], rtol=0, atol=0)
        key = activations.spaces["key"].values
        name = names["key"]
        bias = getattr(attentions(loaded)[activations.layer - 1], name).bias.view(loaded.heads, 1, -1)
        read = activations.spaces["attention_input"].values
        torch.testing.assert_close(key, read @ activations.scores.weight.transpose(1, 2) + bias)


def test_the_captured_pass_is_the_plain_one(loaded):
    batch = batch_of(loaded, SHORT)
    with torch.no_grad():
        plain = loaded.model(**batch.inputs).last_hidden_state
    last = captured(loaded, batch)[-1].spaces["hidden"].values.squeeze(1)
    torch.testing.assert_close(last[batch.tokens.mask], plain[batch.tokens.mask])


def test_nothing_is_left_behind(loaded):
    """No hook, no attention function, no memory of the run: the model is as it was."""
    batch = batch_of(loaded, SHORT)
    captured(loaded, batch)
    assert loaded.model.config._attn_implementation == "sdpa"
    for module in loaded.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with pytest.raises(RuntimeError, match="on purpose"):
        extraction.run(loaded, batch, EVERYTHING, _raise)
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())
    assert len(captured(loaded, batch)) == 4


def _raise(_: Activations) -> None:
    raise RuntimeError("on purpose")


def test_only_what_is_needed_is_captured(loaded):
    batch = batch_of(loaded, SHORT)
    layers = captured(loaded, batch, frozenset({"hidden"}))
    assert [set(activations.spaces) for activations in layers] == [{"hidden"}] * 4
    assert all(activations.rows is None for activations in layers)
    layers = captured(loaded, batch, frozenset({"key", WEIGHTS}))
    assert [set(activations.spaces) for activations in layers] == [set()] + [{"key"}] * 3
    assert all(activations.rows is not None for activations in layers[1:])


# --- Models that cannot be captured ---------------------------------------------------------------


def _own_attention(self, hidden_states, attention_mask=None, *args, **kwargs):
    """An attention that computes by itself what BERT's does, without the interface."""
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query, key, value = (
        getattr(self, name)(hidden_states).view(shape).transpose(1, 2) for name in ("query", "key", "value")
    )
    output = functional.scaled_dot_product_attention(query, key, value, attention_mask)
    return output.transpose(1, 2).flatten(2), None


@pytest.mark.parametrize("layers", [[0, 1, 2], [1]], ids=["all", "one"])
def test_a_model_that_does_not_call_the_interface_is_refused(layers):
    model, words = tiny.build("bert")
    loaded = LoadedModel("by itself", "seed 0", model, words)
    for layer in layers:
        attentions(loaded)[layer].forward = types.MethodType(_own_attention, attentions(loaded)[layer])
    with pytest.raises(AnalysisError, match=rf"by itself.*{3 - len(layers)} of 3 layers"):
        captured(loaded, batch_of(loaded, SHORT))


def test_a_model_whose_captured_pass_differs_is_refused(monkeypatch):
    model, words = tiny.build("bert")
    loaded = LoadedModel("different", "seed 0", model, words)
    right = attention._formed_rows
    monkeypatch.setattr(attention, "_formed_rows", lambda *args: tuple(part * 1.01 for part in right(*args)))
    with pytest.raises(AnalysisError, match="different: the captured forward pass differs"):
        captured(loaded, batch_of(loaded, SHORT))


@pytest.mark.parametrize("extra", ["softcap", "s_aux"])
def test_scores_with_more_than_queries_and_keys_are_refused(extra):
    zeros = torch.zeros(1, 1, 2, 2)
    with pytest.raises(AnalysisError, match=extra):
        extraction._attention_function(torch.nn.Identity(), zeros, zeros, zeros, None, **{extra: 1.0})


# --- Rows of attention without the weights --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_fused_rows_are_formed_rows(dtype, masked, sharpness):
    generator = torch.Generator().manual_seed(0)
    utterances, heads, tokens, head_dim = 3, 2, 40, 8
    query, key, value = (
        torch.randn(utterances, heads, tokens, head_dim, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    query = query * sharpness
    lengths = torch.tensor([40, 23, 2]) if masked else torch.full((3,), 40)
    real = torch.arange(tokens) < lengths.unsqueeze(1)
    mask = real[:, None, None].expand(-1, 1, tokens, -1) if masked else None
    kinds = functional.one_hot(torch.randint(len(TOKEN_TYPES), (utterances, tokens), generator=generator), 4)
    indicators = (kinds * real.unsqueeze(-1)).transpose(1, 2).double()
    arguments = (query, key, value, mask, head_dim**-0.5, indicators)

    scores = query @ key.transpose(2, 3) * head_dim**-0.5
    weights = scores.masked_fill(~real[:, None, None], -math.inf).softmax(-1)
    exact = (weights @ value, torch.special.entr(weights).sum(-1), weights @ indicators.transpose(1, 2).unsqueeze(1))

    cast = tuple(a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    for rows in (attention._formed_rows(*cast), attention._fused_rows(*cast)):
        for found, expected in zip(rows, exact, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_formed_rows_in_chunks_are_formed_rows_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 11, 4, generator=generator) for _ in range(3))
    mask = (torch.arange(11) < torch.tensor([[11], [6]]))[:, None, None].expand(-1, 1, 11, -1)
    arguments = (query, key, value, mask, 0.5, torch.ones(2, 4, 11))
    at_once = attention._formed_rows(*arguments)
    monkeypatch.setattr(attention, "FORMED_ELEMENTS", 2 * 3 * 11 * 3)
    for found, expected in zip(attention._formed_rows(*arguments), at_once, strict=True):
        torch.testing.assert_close(found, expected)


def test_attend_with_rows_chooses_by_length(monkeypatch):
    monkeypatch.setattr(attention, "_fused_rows", lambda *_: pytest.fail("formed rows were wanted"))
    attention.attend_with_rows(*_attention(attention.LONGEST_FORMED_ROW))
    monkeypatch.undo()
    monkeypatch.setattr(attention, "_formed_rows", lambda *_: pytest.fail("fused rows were wanted"))
    attention.attend_with_rows(*_attention(attention.LONGEST_FORMED_ROW + 1))


def _attention(tokens: int) -> tuple:
    vectors = torch.randn(1, 1, tokens, 4, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(1, tokens, dtype=torch.bool)
    return vectors, vectors, vectors, None, 0.5, torch.ones(1, 4, tokens), counted


# --- Batches --------------------------------------------------------------------------------------


def test_batches_hold_every_utterance_once_within_the_budget(tiny_folder):
    loaded = load_model(str(tiny_folder("bert")))
    lengths = [3, 9, 4, 4, 30, 12, 2, 5, 5]
    ids = [[7 + i] * length for i, length in enumerate(lengths)]
    groups = list(range(len(ids)))
    for budget in (1, 10, 24, 10**6):
        batches = make_batches(loaded, ids, groups, True, budget)
        found = {}
        for batch in batches:
            assert batch.tokens.mask.numel() <= budget or len(batch.tokens.mask) == 1
            for row, real, group in zip(batch.inputs["input_ids"], batch.tokens.mask, batch.groups, strict=True):
                found[int(group)] = row[real].tolist()
                assert (row[~real] == loaded.tokenizer.pad_token_id).all()
        assert found == dict(enumerate(ids))
    assert len(make_batches(loaded, ids, groups, True, 10**6)) == 1
    assert len(make_batches(loaded, ids, groups, True, 1)) == len(ids)


def test_special_tokens_count_or_not(tiny_folder):
    loaded = load_model(str(tiny_folder("bert")))
    batch = batch_of(loaded, ("Hi", "Attention, attention!"), special_tokens=True)
    assert batch.tokens.counts.tolist() == batch.tokens.mask.sum(1).tolist() == [3, 6]
    batch = batch_of(loaded, ("Hi", "Attention, attention!"), special_tokens=False)
    assert batch.tokens.counts.tolist() == [1, 4]
    assert batch.tokens.mask.sum(1).tolist() == [3, 6]
    assert batch.tokens.type_masks.sum(-1).tolist() == [[1, 1, 0, 1], [1, 1, 1, 3]]
