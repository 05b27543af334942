"""One forward pass: what is captured is what the model computes, in every architecture."""

import itertools
import math
import types

import jaxtyping
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DoublePrecision
from test_metrics import repeatable, seeds, tokens_of
from torch.nn import functional

from analysis_lib import AnalysisError, LoadedModel, load_model
from analysis_lib.capture import attention, extraction
from analysis_lib.capture.attention import Scores, Visibility
from analysis_lib.capture.extraction import SCORES, SPACES, WEIGHTS, Activations
from analysis_lib.capture.inputs import Batch, Reading, Settings, Tokens, batches, make_batches
from analysis_lib.capture.vectors import Vectors
from analysis_lib.corpora.loading import ArrayImage, Sound
from analysis_lib.models.loading import TOKEN_TYPES

EVERYTHING = frozenset({*SPACES, WEIGHTS, SCORES})
# Utterances of one batch: two lengths, so that there is padding; the longer with rows for the fused kernel or not.
SHORT = tiny.TEXTS[:3]
LONG = (" ".join(tiny.TEXTS * 3), tiny.TEXTS[0])


# Reached by hooks, of several stacks, with maps, of other kinds, with blocks that run several times.
OTHERS = ("mpnet", "deberta", "deberta-v3", "canine", "t5", "albert", "qwen3", "whisper", "beit", "cvt", "resnet-basic")


@pytest.fixture(params=tiny.ARCHITECTURES)
def loaded(request, tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder(request.param)), dtype="float64")


@pytest.fixture(params=OTHERS)
def other(request, tiny_folder) -> tuple[LoadedModel, Batch]:
    """A model of another kind, and a batch of what it reads."""
    loaded = load_model(str(tiny_folder(request.param)), dtype="float64")
    return loaded, first_batch(loaded, tiny.items(request.param))


def first_batch(loaded: LoadedModel, items: tuple, settings: Settings | None = None) -> Batch:
    if loaded.kind == "image":
        items = [ArrayImage(np.asarray(image)) for image in items]
    if loaded.kind == "audio":
        items = [Sound(samples, 16000) for samples in items]
    return next(iter(batches(loaded, items, range(len(items)), settings or Settings(), Reading())))


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
        bias = getattr(attentions(loaded)[activations.layer - 1], name).bias.view(2, 1, -1)
        read = activations.spaces["attention_input"].values
        torch.testing.assert_close(key, read @ activations.scores.weight.transpose(1, 2) + bias)


def test_the_captured_pass_is_the_plain_one(loaded):
    batch = batch_of(loaded, SHORT)
    with torch.no_grad():
        plain = loaded.model(**batch.inputs).last_hidden_state
    last = captured(loaded, batch)[-1].spaces["hidden"].values.squeeze(1)
    torch.testing.assert_close(last[batch.tokens.mask], plain[batch.tokens.mask])


@pytest.mark.parametrize("name", OTHERS)
def test_the_captured_pass_of_other_models_is_the_plain_one(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)), dtype="float64")
    batch = first_batch(loaded, tiny.items(name))
    with torch.no_grad(), DoublePrecision():
        plain = loaded.model(**batch.inputs).last_hidden_state
    found = extraction._run(loaded, batch, EVERYTHING, lambda _: None)
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


def assert_left_as_it_was(loaded: LoadedModel, batch: Batch) -> None:
    before, implementation = hooks_of(loaded), loaded.model.config._attn_implementation
    layers = len(captured(loaded, batch))
    for module in loaded.stacks:
        assert module.attention is None or layers > len(loaded.stacks)
    for needs in (EVERYTHING, frozenset({"hidden"})):
        with pytest.raises(RuntimeError, match="on purpose"):
            extraction.run(loaded, batch, needs, _raise)
        assert hooks_of(loaded) == before
        assert loaded.model.config._attn_implementation == implementation
        assert not loaded.lock.locked()
        assert extraction._under_way.get() is None
    assert len(captured(loaded, batch)) == layers
    assert hooks_of(loaded) == before


def hooks_of(loaded: LoadedModel) -> list[tuple]:
    return [(tuple(m._forward_hooks.values()), tuple(m._forward_pre_hooks.values())) for m in loaded.model.modules()]


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
    assert all(activations.scores is None for activations in layers)


def test_only_what_is_needed_is_captured_of_other_models(other):
    loaded, batch = other
    attending = [bool(activations.attended) for activations in captured(loaded, batch)]
    layers = captured(loaded, batch, frozenset({"key", SCORES}))
    assert [set(activations.spaces) for activations in layers] == [{"key"} if a else set() for a in attending]
    assert [activations.scores is not None for activations in layers] == attending
    assert all(activations.rows is None for activations in layers)
    assert any(attending) == loaded.layout.has_attention


def test_layers_of_several_stacks_number_on(tiny_folder):
    """An encoder of two blocks and a decoder of three, each after its own input; the decoder reads one token later."""
    loaded = load_model(str(tiny_folder("t5")), dtype="float64")
    batch = batch_of(loaded, SHORT)
    layers = captured(loaded, batch)
    assert [a.layer for a in layers] == list(range(7))
    assert [a.stack for a in layers] == ["encoder"] * 3 + ["decoder"] * 4
    assert [bool(a.part) for a in layers] == [False, True, True, False, True, True, True]
    assert [a.part for a in layers if a.part] == [f"encoder.block.{i}" for i in range(2)] + [
        f"decoder.block.{i}" for i in range(3)
    ]
    assert all(a.tokens is batch.tokens for a in layers[:3])
    assert all(a.tokens is batch.shifted for a in layers[3:])
    assert [bool(a.scores and a.scores.visibility.causal) for a in layers] == [False] * 4 + [True] * 3
    ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
    assert torch.equal(shifted[:, 1:], ids[:, :-1])
    assert shifted[:, 0].eq(loaded.model.config.decoder_start_token_id).all()


def test_a_bert_that_is_a_decoder_is_measured_over_the_pairs_that_it_allows():
    transformer, words = tiny.build("bert", is_decoder=True)
    loaded = LoadedModel("decoder", "seed 0", transformer.double(), words)
    for texts in (SHORT, LONG):
        batch = batch_of(loaded, texts)
        real = batch.tokens.mask
        lower = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril() & real[:, None] & real[:, :, None]
        for layer, activations in enumerate(captured(loaded, batch)[1:]):
            weights = eager(loaded, batch).attentions[layer] * real[:, None, :, None]
            assert (weights > 0).equal(lower[:, None].expand_as(weights))
            assert activations.scores.visibility.causal
            rows = activations.rows
            torch.testing.assert_close(rows.keys[real], lower.sum(-1)[real].double())
            kinds = batch.tokens.type_masks.double()
            torch.testing.assert_close(rows.pairs, torch.einsum("bmn,btn->bt", lower.double(), kinds))
            torch.testing.assert_close(
                rows.entropy.transpose(1, 2)[real], torch.special.entr(weights).sum(-1).transpose(1, 2)[real]
            )
            torch.testing.assert_close(rows.type_mass, torch.einsum("bhmn,btn->bht", weights, kinds))
            query, key = (activations.spaces[name].values for name in ("query", "key"))
            scores = torch.einsum("bhme,bhne,bmn,btn->bht", query, key, lower.double(), kinds)
            torch.testing.assert_close(sum(activations.scores.terms.values()), scores)


@pytest.mark.parametrize(
    "name", ["bert", "mpnet", "modernbert-biases", "mistral", "gpt_neox", "qwen3", "t5", "canine", "whisper", "cvt"]
)
@pytest.mark.parametrize("special_tokens", [True, False])
def test_terms_add_up_to_the_scores_of_the_pairs_that_are_seen(name, special_tokens, tiny_folder):
    """Queries and keys as they meet, after rotation and norm; local, causal and reduced attention."""
    loaded = load_model(str(tiny_folder(name)), dtype="float64")
    batch = first_batch(loaded, tiny.items(name), Settings(special_tokens=special_tokens))
    extraction.run(loaded, batch, EVERYTHING, assert_terms_add_up)


def assert_terms_add_up(activations: Activations) -> None:
    scores = activations.scores
    assert (scores is not None) == activations.attended
    if scores is None:
        return
    query, key = (activations.spaces[space].values for space in ("query", "key"))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    seen = seen_pairs(scores.visibility)
    kinds = scores.visibility.keys.type_masks.double()
    expected = torch.einsum("bhme,bhne,bmn,btn->bht", query, key, seen, kinds)
    terms = {**scores.terms}
    if scores.position is not None:
        position = torch.einsum("bhmn,bmn,btn->bht", scores.position.expand_as(query @ key.mT), seen, kinds)
        torch.testing.assert_close(terms.pop("position"), position)
    torch.testing.assert_close(sum(terms.values()), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores.contributions.sum(-1), terms["content"], rtol=1e-9, atol=1e-9)


# --- Who sees whom, and what scores are made of, against loops ------------------------------------


def random_tokens(rng: np.random.Generator, utterances: int, longest: int, special_tokens: bool = True) -> Tokens:
    lengths = [longest, *rng.integers(1, longest + 1, utterances - 1)]
    kinds = [rng.integers(0, len(TOKEN_TYPES), length).tolist() for length in lengths]
    return tokens_of(kinds, special_tokens=special_tokens)


def random_visibility(rng: np.random.Generator, kind: str, special_tokens: bool) -> Visibility:
    queries = random_tokens(rng, 3, int(rng.integers(1, 8)), special_tokens)
    if kind == "all":
        return Visibility(queries, queries)
    if kind == "other keys":
        return Visibility(queries, random_tokens(rng, 3, int(rng.integers(1, 8))))
    if kind == "causal":
        return Visibility(queries, queries, causal=True)
    count = queries.mask.shape[1]
    return Visibility(queries, queries, seen_by=torch.as_tensor(rng.integers(0, 2, (3, count, count))).float())


def sees(visibility: Visibility, b: int, m: int, n: int) -> bool:
    """Whether a query sees a key, padding apart."""
    if visibility.causal:
        return n <= m
    return visibility.seen_by is None or bool(visibility.seen_by[b, m, n])


def seen_pairs(visibility: Visibility) -> torch.Tensor:
    """1 at every pair of a counted query and a key that it sees."""
    allowed = torch.ones(visibility.queries.mask.shape[1], visibility.keys.mask.shape[1], dtype=torch.float64)
    if visibility.causal:
        allowed = allowed.tril()
    elif visibility.seen_by is not None:
        allowed = visibility.seen_by.double()
    return visibility.queries.counted.unsqueeze(2) * visibility.keys.mask.unsqueeze(1) * allowed


kinds_of_visibility = st.sampled_from(["all", "other keys", "causal", "seen by"])


@repeatable
@given(seeds, kinds_of_visibility, st.booleans())
def test_visibility_counts_the_pairs_of_a_loop(seed, kind, special_tokens):
    rng = np.random.default_rng(seed)
    visibility = random_visibility(rng, kind, special_tokens)
    assert visibility.everyone == (kind in ("all", "other keys"))
    real = visibility.keys.mask
    queries, keys = visibility.queries.mask.shape[1], real.shape[1]
    for b, m in itertools.product(range(3), range(queries)):
        if visibility.queries.mask[b, m]:
            expected = sum(bool(real[b, n]) and sees(visibility, b, m, n) for n in range(keys))
            assert visibility.seen[b, m] == expected
    expected = torch.zeros(3, len(TOKEN_TYPES)).double()
    for b, m, n in itertools.product(range(3), range(queries), range(keys)):
        pair = bool(visibility.queries.counted[b, m]) and bool(real[b, n]) and sees(visibility, b, m, n)
        expected[b, visibility.keys.types[b, n]] += pair
        assert seen_pairs(visibility)[b, m, n] == pair
    assert torch.equal(visibility.pairs, expected)

    for shape in ((3, queries, 5), (3, 2, queries, 5)):
        values = torch.as_tensor(rng.normal(size=shape))
        expected = torch.zeros(*shape[:-2], keys, 5).double()
        for b, m, n in itertools.product(range(3), range(queries), range(keys)):
            if sees(visibility, b, m, n):
                expected[b, ..., n, :] += values[b, ..., m, :]
        found = visibility.over_queries(values)
        assert found.shape[-2] == (1 if visibility.everyone else keys)
        torch.testing.assert_close(found.expand_as(expected), expected)


@repeatable
@given(seeds, kinds_of_visibility, st.booleans(), st.sets(st.sampled_from(["back", "bias", "position", "relative"])))
def test_scores_are_the_sums_of_a_loop_over_pairs(seed, kind, special_tokens, parts):
    """With any of: a rotation and a gain of each key; a key bias; a bias of each pair; vectors that replace queries."""
    rng = np.random.default_rng(seed)
    visibility = random_visibility(rng, kind, special_tokens)
    queries, keys = visibility.queries.mask.shape[1], visibility.keys.mask.shape[1]
    heads, head_dim, width = 2, 4, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.as_tensor(rng.normal(size=shape))

    query, inputs, weight = normal(3, heads, queries, head_dim), normal(3, keys, width), normal(heads, head_dim, width)
    bias = normal(heads, head_dim) if "bias" in parts else None
    position = normal(3, heads, queries, keys) if "position" in parts else None
    relative = normal(3, heads, queries, keys, head_dim)
    # T of each key: its own rotation after its own gain.
    turn = torch.linalg.qr(normal(keys, head_dim, head_dim))[0] @ torch.diag_embed(
        torch.as_tensor(rng.uniform(0.5, 2, (3, heads, keys, head_dim)))
    )
    seen = seen_pairs(visibility)
    relative_sums = torch.einsum("bmn,bhmne->bhne", seen, relative)

    def back(vectors: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhnfe,bhnf->bhne", turn, vectors.expand(-1, -1, keys, -1))

    scores = Scores(
        query,
        Vectors(inputs.unsqueeze(1), visibility.keys),
        weight,
        bias,
        visibility,
        back if "back" in parts else None,
        position,
        relative_sums if "relative" in parts else None,
    )

    kinds = len(TOKEN_TYPES)
    contributions = torch.zeros(3, heads, kinds, width).double()
    totals = torch.zeros(3, heads, kinds).double()
    terms = {
        name: torch.zeros(3, heads, kinds).double()
        for name, part in (("position_query", "relative"), ("key_bias", "bias"), ("position", "position"))
        if part in parts
    } | {"content": torch.zeros(3, heads, kinds).double()}
    for (b, m, n), h in itertools.product(seen.nonzero().tolist(), range(heads)):
        at = (b, h, visibility.keys.types[b, n])
        bare = weight[h] @ inputs[b, n]
        transform = turn[b, h, n] if "back" in parts else torch.eye(head_dim).double()
        meets = transform.T @ query[b, h, m]
        terms["content"][at] += meets @ bare
        if "relative" in parts:
            meets = meets + relative[b, h, m, n]
            terms["position_query"][at] += relative[b, h, m, n] @ bare
        contributions[at] += (meets @ weight[h]) * inputs[b, n]
        key = bare
        if bias is not None:
            terms["key_bias"][at] += meets @ bias[h]
            key = bare + bias[h]
        score = query[b, h, m] @ (transform @ key)
        if "relative" in parts:
            score = score + relative[b, h, m, n] @ key
        if position is not None:
            terms["position"][at] += position[b, h, m, n]
            score = score + position[b, h, m, n]
        totals[at] += score
    torch.testing.assert_close(scores.contributions, contributions)
    assert set(scores.terms) == set(terms)
    for name, expected in terms.items():
        torch.testing.assert_close(scores.terms[name], expected)
    torch.testing.assert_close(sum(scores.terms.values()), totals)


def test_shapes_are_enforced_while_tests_run():
    values = torch.zeros(2, 1, 3, 4)
    with pytest.raises(jaxtyping.TypeCheckError):
        Vectors(values[0], tokens_of([[3, 3, 3]]))
    with pytest.raises(jaxtyping.TypeCheckError):
        attention.attend_with_rows(values, values, values, None, 0.5, torch.zeros(2, 4, 5), torch.ones(2, 3) > 0)
    with pytest.raises(jaxtyping.TypeCheckError):
        Tokens(torch.ones(2, 3) > 0, torch.zeros(2, 4).long(), torch.zeros(2).long())


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


def test_rows_with_a_bias_are_formed_in_chunks_or_not(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 11, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.arange(11) < torch.tensor([[11], [6]]))[:, None, None].expand(-1, 1, 11, -1)
    bias = torch.randn(1, 3, 11, 11, generator=generator, dtype=torch.float64)
    kinds = torch.rand(2, 4, 11, generator=generator, dtype=torch.float64)
    counted = torch.rand(2, 11, generator=generator) < 0.7
    weights = (0.5 * query @ key.mT + bias).masked_fill(~mask, -math.inf).softmax(-1)
    exact = (
        weights @ value,
        torch.special.entr(weights).sum(-1),
        torch.einsum("bhmn,btn,bm->bht", weights, kinds, counted.double()),
    )
    before = bias.clone()
    for elements in (attention.FORMED_ELEMENTS, 2 * 3 * 11 * 2):
        monkeypatch.setattr(attention, "FORMED_ELEMENTS", elements)
        found = attention.attend_with_rows(query, key, value, mask, 0.5, kinds, counted, bias)
        for one, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(one, expected)
    assert torch.equal(bias, before)


def test_attend_with_rows_chooses_by_length(monkeypatch):
    monkeypatch.setattr(attention, "_fused_rows", lambda *_: pytest.fail("formed rows were wanted"))
    attention.attend_with_rows(*_attention(attention.LONGEST_FORMED_ROW))
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_formed_rows", lambda *_: pytest.fail("fused rows were wanted"))
        attention.attend_with_rows(*_attention(attention.LONGEST_FORMED_ROW + 1))
    # A bias needs each weight.
    monkeypatch.setattr(attention, "_fused_rows", lambda *_: pytest.fail("formed rows were wanted"))
    long = _attention(attention.LONGEST_FORMED_ROW + 1)
    attention.attend_with_rows(*long, bias=torch.zeros(1, 1, 1, attention.LONGEST_FORMED_ROW + 1))


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
