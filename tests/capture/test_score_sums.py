"""Which keys a query sees, and what scores are made of: against loops over pairs."""

import itertools

import numpy as np
import pytest
import tiny
import torch
from clouds import repeatable, seeds, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from passes import EVERYTHING, first_batch

from analysis_lib import load_model
from analysis_lib.capture import Activations, ScoreSums, Settings, Tokens, Vectors, Visibility, run
from analysis_lib.models import TOKEN_TYPES


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "mpnet",
        "modernbert-biases",
        "mistral",
        "gpt_neox",
        "qwen3",
        "t5",
        "canine",
        "whisper",
        "cvt",
    ],
)
@pytest.mark.parametrize("special_tokens", [True, False])
def test_terms_add_up_to_the_scores_of_the_pairs_that_are_seen(name, special_tokens, tiny_folder):
    """Queries and keys as they meet, after rotation and norm; local, causal and reduced
    attention.
    """
    loaded = load_model(str(tiny_folder(name)), dtype="float64")
    batch = first_batch(loaded, tiny.items(name), Settings(special_tokens=special_tokens))
    run(loaded, batch, EVERYTHING, assert_terms_add_up)


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
        position = torch.einsum(
            "bhmn,bmn,btn->bht", scores.position.expand_as(query @ key.mT), seen, kinds
        )
        torch.testing.assert_close(terms.pop("position"), position)
    torch.testing.assert_close(sum(terms.values()), expected, rtol=1e-9, atol=1e-9)
    contributions = scores.visibility.keys.of_types(scores.contributions)
    torch.testing.assert_close(contributions.sum(-1), terms["content"], rtol=1e-9, atol=1e-9)


def random_tokens(
    rng: np.random.Generator, utterances: int, longest: int, special_tokens: bool = True
) -> Tokens:
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
    seen_by = torch.as_tensor(rng.integers(0, 2, (3, 1, count, count))).bool()
    return Visibility(queries, queries, seen_by=seen_by)


def sees(visibility: Visibility, b: int, m: int, n: int) -> bool:
    """Whether a query sees a key, padding apart."""
    if visibility.causal:
        return n <= m
    return visibility.seen_by is None or bool(visibility.seen_by[b, 0, m, n])


def seen_pairs(visibility: Visibility) -> torch.Tensor:
    """1 at every pair of a counted query and a key that it sees."""
    allowed = torch.ones(
        visibility.queries.mask.shape[1], visibility.keys.mask.shape[1], dtype=torch.float64
    )
    if visibility.causal:
        allowed = allowed.tril()
    elif visibility.seen_by is not None:
        allowed = visibility.seen_by.squeeze(1).double()
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
        pair = (
            bool(visibility.queries.counted[b, m])
            and bool(real[b, n])
            and sees(visibility, b, m, n)
        )
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
@given(
    seeds,
    kinds_of_visibility,
    st.booleans(),
    st.sets(st.sampled_from(["back", "bias", "offset", "position", "relative"])).filter(
        lambda parts: not {"bias", "offset"} <= parts
    ),
)
def test_scores_are_the_sums_of_a_loop_over_pairs(seed, kind, special_tokens, parts):
    """With any of: a rotation and a gain of each key; a key bias; what is added to each key last; a
    bias of each pair; vectors that replace queries.
    """
    rng = np.random.default_rng(seed)
    visibility = random_visibility(rng, kind, special_tokens)
    queries, keys = visibility.queries.mask.shape[1], visibility.keys.mask.shape[1]
    heads, head_dim, width = 2, 4, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.as_tensor(rng.normal(size=shape))

    query, inputs, weight = (
        normal(3, heads, queries, head_dim),
        normal(3, keys, width),
        normal(heads, head_dim, width),
    )
    bias = normal(heads, head_dim) if "bias" in parts else None
    offset = normal(3, heads, keys, head_dim) if "offset" in parts else None
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

    scores = ScoreSums(
        query,
        Vectors(inputs.unsqueeze(1), visibility.keys),
        weight,
        bias,
        visibility,
        back if "back" in parts else None,
        position,
        (lambda _: relative_sums) if "relative" in parts else None,
        offset,
    )

    kinds = len(TOKEN_TYPES)
    contributions = torch.zeros(3, heads, kinds, width).double()
    totals = torch.zeros(3, heads, kinds).double()
    terms = {
        name: torch.zeros(3, heads, kinds).double()
        for name, part in (
            ("position_query", "relative"),
            ("key_bias", "bias"),
            ("key_bias", "offset"),
            ("position", "position"),
        )
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
        if "offset" in parts:
            terms["key_bias"][at] += query[b, h, m] @ offset[b, h, n]
            score = score + query[b, h, m] @ offset[b, h, n]
        if "relative" in parts:
            score = score + relative[b, h, m, n] @ key
        if position is not None:
            terms["position"][at] += position[b, h, m, n]
            score = score + position[b, h, m, n]
        totals[at] += score
    torch.testing.assert_close(scores.visibility.keys.of_types(scores.contributions), contributions)
    assert set(scores.terms) == set(terms)
    for name, expected in terms.items():
        torch.testing.assert_close(scores.terms[name], expected)
    torch.testing.assert_close(sum(scores.terms.values()), totals)
