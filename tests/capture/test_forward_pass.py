"""One forward pass: what is captured is what the model computes, in every architecture."""

import math
import threading

import jaxtyping
import pytest
import tiny
import torch
import transformers
from clouds import tokens_of
from passes import EVERYTHING, LONG, SHORT, attentions, batch_of, captured, first_batch
from reference import DoublePrecision
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from analysis_lib import LoadedModel, load_model
from analysis_lib.capture import (
    SCORES,
    SPACES,
    UNROTATED,
    WEIGHTS,
    Activations,
    Batch,
    Tokens,
    Vectors,
    attention_rows,
    interface,
    run,
)
from analysis_lib.capture.forward_pass import captured_pass

# Reached by hooks, of several stacks, with maps, of other kinds, with blocks that run several
# times.
OTHERS = (
    "mpnet",
    "deberta",
    "deberta-v3",
    "canine",
    "t5",
    "albert",
    "qwen3",
    "whisper",
    "beit",
    "cvt",
    "resnet-basic",
)


@pytest.fixture(params=tiny.ARCHITECTURES)
def loaded(request, tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder(request.param)), dtype="float64")


@pytest.fixture(params=OTHERS)
def other(request, tiny_folder) -> tuple[LoadedModel, Batch]:
    """A model of another kind, and a batch of what it reads."""
    loaded = load_model(str(tiny_folder(request.param)), dtype="float64")
    return loaded, first_batch(loaded, tiny.items(request.param))


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
    assert (batch.tokens.mask.shape[1] > attention_rows.CAUSAL_ROWS) == (texts is LONG)
    expected = eager(loaded, batch)
    layers = captured(loaded, batch)
    assert [activations.layer for activations in layers] == [0, 1, 2, 3]
    assert set(layers[0].spaces) == {"hidden"}
    close = {"rtol": 1e-9, "atol": 1e-9}
    for layer, activations in enumerate(layers):
        assert activations.tokens is batch.tokens
        hidden = activations.spaces["hidden"].values.squeeze(1)
        torch.testing.assert_close(
            hidden[batch.tokens.mask], expected.hidden_states[layer][batch.tokens.mask], **close
        )
    for layer, activations in enumerate(layers[1:], 1):
        assert set(activations.spaces) == {*SPACES} - {"final", *UNROTATED}
        read = activations.spaces["attention_input"].values.squeeze(1)
        torch.testing.assert_close(
            read[batch.tokens.mask], expected.hidden_states[layer - 1][batch.tokens.mask], **close
        )
        weights = expected.attentions[layer - 1]
        torch.testing.assert_close(
            activations.attention.entropy.transpose(1, 2)[batch.tokens.mask],
            torch.special.entr(weights).sum(-1).transpose(1, 2)[batch.tokens.mask],
            **close,
        )
        query, key = (activations.spaces[name].values for name in ("query", "key"))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~batch.tokens.mask[:, None, None], -math.inf)
        torch.testing.assert_close(scores.softmax(-1), weights, **close)
        mass = torch.einsum("bhqk,btk->bhqt", weights, batch.tokens.type_masks.double())
        found = activations.attention.mass
        torch.testing.assert_close(
            found.transpose(1, 2)[batch.tokens.mask], mass.transpose(1, 2)[batch.tokens.mask]
        )
        for block in activations.attention.blocks():
            torch.testing.assert_close(block.weights, weights[block.part], **close)
        of_keys = activations.attention.reduce(
            lambda block: block.received(batch.tokens.mask.double())
        )
        torch.testing.assert_close(
            of_keys, torch.einsum("bhqk,bq->bhk", weights, batch.tokens.mask.double()), **close
        )


def test_queries_keys_and_values_are_those_of_the_projections(loaded):
    """Hooks on the projections see the same vectors, before the split into heads."""
    batch = batch_of(loaded, SHORT)
    distilbert = loaded.model.config.model_type == "distilbert"
    names = {
        space: f"{space[0]}_lin" if distilbert else space for space in ("query", "key", "value")
    }
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
        bias = getattr(attentions(loaded)[activations.layer - 1], name).bias.view(2, 1, -1)
        read = activations.spaces["attention_input"].values
        torch.testing.assert_close(key, read @ activations.scores.weight.transpose(1, 2) + bias)


def test_the_captured_pass_is_the_plain_one(loaded):
    batch = batch_of(loaded, SHORT)
    with torch.no_grad():
        plain = loaded.model(**batch.inputs).last_hidden_state
    last = captured(loaded, batch)[-1].spaces["hidden"].values.squeeze(1)
    torch.testing.assert_close(last[batch.tokens.mask], plain[batch.tokens.mask])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_keeps_the_precision_of_the_model(dtype, tiny_folder):
    """To the bit: the kernel, its precision and the way in which attention is causal are the same."""
    loaded = load_model(str(tiny_folder("qwen3")), dtype=dtype)
    batch = batch_of(loaded, LONG[:1])
    with torch.no_grad():
        plain = loaded.model(**batch.inputs, output_hidden_states=True).hidden_states
    layers = captured(loaded, batch, frozenset({"hidden", "query", "value"}))
    for hidden, activations in zip(plain[:-1], layers, strict=False):
        assert torch.equal(activations.spaces["hidden"].values.squeeze(1), hidden.float())


@pytest.mark.parametrize("name", OTHERS)
def test_the_captured_pass_of_other_models_is_the_plain_one(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)), dtype="float64")
    batch = first_batch(loaded, tiny.items(name))
    with torch.no_grad(), DoublePrecision():
        plain = loaded.model(**batch.inputs).last_hidden_state
        found = captured_pass(loaded, batch, EVERYTHING, lambda _: None)
    last = batch.shifted or batch.tokens
    if last is not None and plain.shape[1] == last.mask.shape[1]:
        found, plain = found[last.mask], plain[last.mask]
    assert plain.isfinite().all()
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)


def test_nothing_is_left_behind(loaded):
    """No hook, no attention function, no memory of the run: the model is as it was."""
    assert_left_as_it_was(loaded, batch_of(loaded, SHORT))
    assert loaded.model.config._attn_implementation == "sdpa"


def test_nothing_is_left_behind_in_other_models(other):
    assert_left_as_it_was(*other)


def test_threads_do_not_meet_in_a_model():
    """Another thread's plain pass, with which it checks the capture, would run through the hooks of
    this one.
    """
    loaded, other = LoadedModel("shared", "seed 0", *tiny.build("bert")), []
    heard: set[int] = set()

    def receive(activations: Activations) -> None:
        heard.add(threading.get_ident())
        if not other:
            loaded._checked = False
            arguments = loaded, batch_of(loaded, LONG), EVERYTHING, lambda _: None
            other.append(threading.Thread(target=run, args=arguments))
            other[0].start()
            # Long enough for a whole pass, if nothing held it back.
            other[0].join(0.5)

    run(loaded, batch_of(loaded, SHORT), EVERYTHING, receive)
    other[0].join()
    assert heard == {threading.get_ident()}


def assert_left_as_it_was(loaded: LoadedModel, batch: Batch) -> None:
    before, implementation = hooks_of(loaded), loaded.model.config._attn_implementation
    layers = len(captured(loaded, batch))
    for module in loaded.stacks:
        assert module.attention is None or layers > len(loaded.stacks)
    for needs in (EVERYTHING, frozenset({"hidden"})):
        with pytest.raises(RuntimeError, match="on purpose"):
            run(loaded, batch, needs, _raise)
        assert hooks_of(loaded) == before
        assert loaded.model.config._attn_implementation == implementation
        assert not loaded.lock.locked()
        assert interface._under_way.get() == ((), None, ())
    assert len(captured(loaded, batch)) == layers
    assert hooks_of(loaded) == before


def hooks_of(loaded: LoadedModel) -> list[tuple]:
    return [
        (tuple(m._forward_hooks.values()), tuple(m._forward_pre_hooks.values()))
        for m in loaded.model.modules()
    ]


def _raise(_: Activations) -> None:
    raise RuntimeError("on purpose")


def test_only_what_is_needed_is_captured(loaded):
    batch = batch_of(loaded, SHORT)
    layers = captured(loaded, batch, frozenset({"hidden"}))
    assert [set(activations.spaces) for activations in layers] == [{"hidden"}] * 4
    assert all(activations.attention is None for activations in layers)
    layers = captured(loaded, batch, frozenset({"key", WEIGHTS}))
    assert [set(activations.spaces) for activations in layers] == [set()] + [{"key"}] * 3
    assert all(activations.attention is not None for activations in layers[1:])
    assert all(activations.scores is None for activations in layers)


def test_only_what_is_needed_is_captured_of_other_models(other):
    loaded, batch = other
    # What the model gives out comes alone.
    every = [
        activations for activations in captured(loaded, batch) if "final" not in activations.spaces
    ]
    attending = [bool(activations.attended) for activations in every]
    layers = captured(loaded, batch, frozenset({"key", SCORES}))
    assert [set(activations.spaces) for activations in layers] == [
        {"key"} if a else set() for a in attending
    ]
    assert [activations.scores is not None for activations in layers] == attending
    assert all(activations.attention is None for activations in layers)
    assert any(attending) == loaded.layout.has_attention


def test_layers_of_several_stacks_number_on(tiny_folder):
    """An encoder of two blocks and a decoder of three, each after its own input; the decoder reads
    one token later.
    """
    loaded = load_model(str(tiny_folder("t5")), dtype="float64")
    batch = batch_of(loaded, SHORT)
    every = captured(loaded, batch)
    crossing = [activations for activations in every if activations.stack == "cross"]
    assert [a.layer for a in crossing] == [7, 8, 9]
    *layers, encoded, decoded = (
        activations for activations in every if activations.stack != "cross"
    )
    assert [a.layer for a in layers] == list(range(7))
    # A norm follows each stack.
    assert [(a.layer, a.stack, {*a.spaces}) for a in (encoded, decoded)] == [
        (2, "encoder", {"final"}),
        (6, "decoder", {"final"}),
    ]
    assert [a.stack for a in layers] == ["encoder"] * 3 + ["decoder"] * 4
    assert [bool(a.part) for a in layers] == [False, True, True, False, True, True, True]
    assert [a.part for a in layers if a.part] == [f"encoder.block.{i}" for i in range(2)] + [
        f"decoder.block.{i}" for i in range(3)
    ]
    assert all(a.tokens is batch.tokens for a in layers[:3])
    assert all(a.tokens is batch.shifted for a in layers[3:])
    assert [bool(a.scores and a.scores.visibility.causal) for a in layers] == [False] * 4 + [
        True
    ] * 3
    ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
    assert torch.equal(shifted[:, 1:], ids[:, :-1])
    assert shifted[:, 0].eq(loaded.model.config.decoder_start_token_id).all()


def test_a_bert_that_is_a_decoder_is_measured_over_the_pairs_that_it_allows():
    transformer, words = tiny.build("bert", is_decoder=True)
    loaded = LoadedModel("decoder", "seed 0", transformer.double(), words)
    for texts in (SHORT, LONG):
        batch = batch_of(loaded, texts)
        real = batch.tokens.mask
        lower = (
            torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril()
            & real[:, None]
            & real[:, :, None]
        )
        for layer, activations in enumerate(captured(loaded, batch)[1:]):
            weights = eager(loaded, batch).attentions[layer] * real[:, None, :, None]
            assert (weights > 0).equal(lower[:, None].expand_as(weights))
            assert activations.scores.visibility.causal
            rows = activations.attention
            torch.testing.assert_close(rows.key_counts[real], lower.sum(-1)[real].double())
            kinds = batch.tokens.type_masks.double()
            torch.testing.assert_close(
                rows.pairs, torch.einsum("bmn,btn->bt", lower.double(), kinds)
            )
            torch.testing.assert_close(
                rows.entropy.transpose(1, 2)[real],
                torch.special.entr(weights).sum(-1).transpose(1, 2)[real],
            )
            mass = torch.einsum("bhmn,btn->bhmt", weights, kinds).transpose(1, 2)
            torch.testing.assert_close(rows.mass.transpose(1, 2)[real], mass[real])
            query, key = (activations.spaces[name].values for name in ("query", "key"))
            scores = torch.einsum("bhme,bhne,bmn,btn->bht", query, key, lower.double(), kinds)
            torch.testing.assert_close(sum(activations.scores.terms.values()), scores)


def test_shapes_are_enforced_while_tests_run():
    values = torch.zeros(2, 1, 3, 4)
    with pytest.raises(jaxtyping.TypeCheckError):
        Vectors(values[0], tokens_of([[3, 3, 3]]))
    with pytest.raises(jaxtyping.TypeCheckError):
        attention_rows.attend(
            attention_rows.Softmax(values, values, 0.5), values, torch.zeros(2, 4, 5)
        )
    with pytest.raises(jaxtyping.TypeCheckError):
        Tokens(torch.ones(2, 3) > 0, torch.zeros(2, 4).long(), (0, 0))


class _Marked(torch.nn.Module):
    """An attention module that is marked as causal."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.PreTrainedConfig()
        self.eval()


def test_a_module_marked_as_causal_attends_as_by_sdpa():
    module = _Marked()
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=generator)
    biases = torch.randn(1, 2, 5, 5, generator=generator)
    attend = transformers.AttentionInterface()[interface.IMPLEMENTATION]
    for mask in (None, biases):
        wanted, _ = sdpa_attention_forward(module, query, key, value, mask)
        torch.testing.assert_close(attend(module, query, key, value, mask)[0], wanted)


def test_without_a_mask_eager_attention_hides_nothing():
    # sdpa hides later keys: see ``findings/transformers-phi4-pictures.sh``.
    module = _Marked()
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    attend = transformers.AttentionInterface()[interface.IMPLEMENTATION]
    with interface.attended_by((), interface.attend, {id(module.config)}):
        output, _ = attend(module, query, key, value, None)
    wanted, _ = eager_attention_forward(module, query, key, value, None, scaling=0.5)
    torch.testing.assert_close(output, wanted)
