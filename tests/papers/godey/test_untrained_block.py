"""The untrained block against naive float64 computations written from the formulas, at tiny
sizes.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_cells
from torch.nn import functional

from analysis_book.papers.godey import untrained_block
from analysis_lib.errors import AnalysisError

TINY = {"sequences": 3, "length": 8, "vocabulary": 50, "width": 32, "heads": 2}
HEADS, HEAD_WIDTH = 2, 16
NORM = 4.0
ARCHITECTURES = list(untrained_block.ARCHITECTURES)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def tiny(architecture: str = "bert", seed: int = 0, **sizes) -> untrained_block.Draw:
    return untrained_block.Draw(architecture, seed, seed + 100, **{**TINY, **sizes})


# --- A naive block --------------------------------------------------------------------------------


def weights_of(block: untrained_block.Block) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in block.module.state_dict().items()}


def normalised(x: torch.Tensor, weights: dict, name: str, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict:
    """Head by head and pair by pair, for one sequence."""
    heads, scores, rows = [], {}, {}
    for h in range(HEADS):
        part = slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH)
        mixed = []
        for m in range(len(q)):
            seen = range(m + 1 if causal else len(q))
            row = torch.stack([q[m, part] @ k[n, part] / HEAD_WIDTH**0.5 for n in seen])
            scores[h, m] = row
            rows[h, m] = row.exp() / row.exp().sum()
            mixed.append(sum(p * v[n, part] for p, n in zip(rows[h, m], seen, strict=True)))
        heads.append(torch.stack(mixed))
    return {"q": q, "k": k, "scores": scores, "rows": rows, "mixed": torch.cat(heads, -1)}


def linear(x: torch.Tensor, weights: dict, name: str, transposed: bool = False) -> torch.Tensor:
    weight = weights[f"{name}.weight"]
    return x @ (weight if transposed else weight.T) + weights[f"{name}.bias"]


def naive_bert(x: torch.Tensor, w: dict) -> tuple[torch.Tensor, dict]:
    q, k, v = (linear(x, w, f"attention.self.{name}") for name in ("query", "key", "value"))
    seen = attention(q, k, v, causal=False)
    x = normalised(
        x + linear(seen["mixed"], w, "attention.output.dense"),
        w,
        "attention.output.LayerNorm",
        1e-12,
    )
    inner = functional.gelu(linear(x, w, "intermediate.dense"))
    return normalised(x + linear(inner, w, "output.dense"), w, "output.LayerNorm", 1e-12), seen


def naive_vit(x: torch.Tensor, w: dict) -> tuple[torch.Tensor, dict]:
    read = normalised(x, w, "layernorm_before", 1e-12)
    q, k, v = (linear(read, w, f"attention.{name}_proj") for name in "qkv")
    seen = attention(q, k, v, causal=False)
    x = x + linear(seen["mixed"], w, "attention.o_proj")
    inner = functional.gelu(linear(normalised(x, w, "layernorm_after", 1e-12), w, "mlp.fc1"))
    return x + linear(inner, w, "mlp.fc2"), seen


def naive_gpt2(x: torch.Tensor, w: dict) -> tuple[torch.Tensor, dict]:
    read = normalised(x, w, "ln_1", 1e-5)
    seen = attention(*linear(read, w, "attn.c_attn", transposed=True).chunk(3, -1), causal=True)
    x = x + linear(seen["mixed"], w, "attn.c_proj", transposed=True)
    inner = functional.gelu(
        linear(normalised(x, w, "ln_2", 1e-5), w, "mlp.c_fc", transposed=True), approximate="tanh"
    )
    return x + linear(inner, w, "mlp.c_proj", transposed=True), seen


NAIVE = {"bert": naive_bert, "bert-pytorch": naive_bert, "gpt2": naive_gpt2, "vit": naive_vit}


def pair_cosine(vectors: torch.Tensor) -> float:
    """The mean over all pairs of distinct vectors, by a double loop."""
    pairs = [(i, j) for i in range(len(vectors)) for j in range(len(vectors)) if i != j]
    return np.mean(
        [functional.cosine_similarity(vectors[i], vectors[j], 0).item() for i, j in pairs]
    )


def naive_tables(draw: untrained_block.Draw, norm: float) -> dict[str, dict]:
    """What ``sweep`` has to find, from the formulas: by space and layer, and by head."""
    block = draw.block()
    weights, naive = weights_of(block), NAIVE[draw.architecture]
    inputs = block.inputs.double() + norm * block.direction.double()
    outputs, seen = zip(*(naive(x, weights) for x in inputs), strict=True)
    clouds = {("hidden", 0, None): inputs.flatten(0, 1), ("hidden", 1, None): torch.cat(outputs)}
    for h in range(HEADS):
        part = slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH)
        clouds["query", 1, h + 1] = torch.cat([s["q"][:, part] for s in seen])
        clouds["key", 1, h + 1] = torch.cat([s["k"][:, part] for s in seen])
    vectors = {
        key: (pair_cosine(cloud), cloud.mean(0).norm().item(), cloud.norm(dim=-1).mean().item())
        for key, cloud in clouds.items()
    }
    _, alone = naive((norm * block.direction.double()).view(1, -1), weights)
    heads = {
        h + 1: naive_head(seen, h) | {"bias_score": alone["scores"][h, 0].item()}
        for h in range(HEADS)
    }
    return {"vectors": vectors, "attention": heads}


def naive_head(seen: tuple[dict, ...], h: int) -> dict[str, float]:
    scores = torch.cat([s["scores"][h, m] for s in seen for m in range(TINY["length"])])
    rows = [s["rows"][h, m].numpy() for s in seen for m in range(TINY["length"])]
    entropies = np.array([-(row * np.log(row)).sum() for row in rows])
    highest = np.array([np.log(len(row)) for row in rows])
    several = highest > 0
    by_sequence = [[s["rows"][h, m] for m in range(TINY["length"])] for s in seen]
    return {
        "score": scores.mean().item(),
        "score_magnitude": scores.abs().mean().item(),
        "row_max": np.mean([row.max() for row in rows]),
        "row_median": np.mean([np.median(row) for row in rows]),
        "row_min": np.mean([row.min() for row in rows]),
        "entropy_nats": entropies.mean(),
        "entropy_normalised": (entropies[several] / highest[several]).mean(),
        "divergence": (highest - entropies).mean(),
        "sequence_max": np.mean([max(row.max().item() for row in rows) for rows in by_sequence]),
        "sequence_min": np.mean([min(row.min().item() for row in rows) for rows in by_sequence]),
    }


# --- Against it -----------------------------------------------------------------------------------


@every_architecture
@pytest.mark.parametrize("norm", [0.0, NORM])
def test_a_sweep_is_what_the_formulas_say(architecture, norm):
    draw = tiny(architecture)
    tables, naive = untrained_block.sweep([draw], [norm]), naive_tables(draw, norm)
    found = {
        (r.space, r.layer, None if pd.isna(r.head) else r.head): r
        for r in tables["vectors"].itertuples()
    }
    assert found.keys() == naive["vectors"].keys()
    for key, expected in naive["vectors"].items():
        row = found[key]
        numbers = (row.cosine, row.norm_of_mean, row.mean_norm)
        np.testing.assert_allclose(numbers, expected, rtol=2e-5, atol=2e-6, err_msg=str(key))
    for _, row in tables["attention"].iterrows():
        for name, expected in naive["attention"][row["head"]].items():
            # What is small is a difference of scores, known to single precision.
            assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-8), name


@every_architecture
def test_the_block_without_bias_is_the_models_own_block_on_the_embeddings(architecture):
    block = tiny(architecture).block()
    ours = torch.cat([block(hidden) for hidden in block.biased(0.0)])
    expected = torch.stack(
        [NAIVE[architecture](x, weights_of(block))[0] for x in block.inputs.double()]
    )
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    # And what transformers computes where nothing of this library is in its way.
    config = block.attention.config
    config._attn_implementation = "sdpa"
    output = block.module(block.inputs)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(output, ours, rtol=1e-5, atol=1e-6)


@every_architecture
def test_histograms_count_every_visible_pair_in_its_bin(architecture):
    draw = tiny(architecture)
    edges = np.linspace(-0.02, 0.02, 9)
    counted = untrained_block.sweep([draw], [NORM], edges)["scores"]
    length = TINY["length"]
    visible = length * (length + 1) // 2 if architecture == "gpt2" else length**2
    assert (counted.groupby("head")["count"].sum() == TINY["sequences"] * visible).all()
    block = draw.block()
    scores = torch.cat(
        [untrained_block.attend(block, hidden)[-1] for hidden in block.biased(NORM)]
    ).numpy()
    for head, part in counted.groupby("head"):
        finite = scores[:, head - 1][np.isfinite(scores[:, head - 1])]
        expected = np.histogram(finite.clip(-0.0199999, 0.0199999), edges)[0]
        # A score on an edge may fall to either side of it in single precision.
        assert np.abs(part["count"].to_numpy() - expected).sum() <= 2
        np.testing.assert_allclose(part["low"], edges[:-1])
        np.testing.assert_allclose(part["high"], edges[1:])


def test_a_histogram_puts_scores_where_numpy_does_and_keeps_what_is_outside():
    scores, edges = torch.tensor([[[-9.0, -0.9], [0.1, 9.0]]]), np.array([-1.0, 0.0, 1.0])
    np.testing.assert_array_equal(untrained_block.histogram(scores, edges), [[2, 2]])
    causal = scores.masked_fill(~torch.ones(2, 2, dtype=torch.bool).tril(), -math.inf)
    np.testing.assert_array_equal(untrained_block.histogram(causal, edges), [[1, 2]])


@every_architecture
def test_the_same_seeds_give_the_same_numbers_and_each_seed_draws_what_it_says(architecture):
    torch.manual_seed(1)
    first = tiny(architecture).block()
    torch.manual_seed(2)
    again = tiny(architecture).block()
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.direction, again.direction)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.module.parameters(), again.module.parameters(), strict=True)
    )
    other = untrained_block.Draw(architecture, 0, 7, **TINY).block()
    assert torch.equal(first.inputs, other.inputs)
    assert not torch.equal(first.direction, other.direction)
    different = untrained_block.Draw(architecture, 7, 100, **TINY).block()
    assert not torch.equal(first.inputs, different.inputs)
    assert torch.equal(first.direction, different.direction)
    assert first.direction.norm().item() == pytest.approx(1)


@every_architecture
def test_the_direction_is_independent_of_weights_and_inputs_of_the_same_seed(architecture):
    block = untrained_block.Draw(architecture, 3, 3, **{**TINY, "width": 256, "heads": 4}).block()
    rows = [p for p in block.module.parameters() if p.dim() == 2]
    rows = torch.cat(
        [block.inputs.flatten(0, 1), *(w for p in rows for w in (p, p.T) if w.shape[1] == 256)]
    )
    # Of so many random directions in 256 dimensions, the nearest lies five standard deviations of
    # 1/16 away.
    assert functional.cosine_similarity(rows, block.direction, dim=1).abs().max() < 0.4


def test_a_block_leaves_the_random_numbers_of_its_caller_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny().block()
    assert torch.equal(torch.rand(1), expected)


def test_weights_are_drawn_as_the_architecture_says():
    wide = {"width": 256, "heads": 4, "vocabulary": 2000, "sequences": 1}
    found = {name: weights_of(untrained_block.Draw(name, **wide).block()) for name in ARCHITECTURES}
    assert found["bert"]["attention.self.query.weight"].std().item() == pytest.approx(
        0.02, rel=0.02
    )
    assert not found["bert"]["attention.self.query.bias"].any()
    # PyTorch's own: uniform in ±1/√d, whose standard deviation is 1/√(3d), biases too.
    for part in ("weight", "bias"):
        drawn = found["bert-pytorch"][f"attention.self.query.{part}"]
        assert drawn.abs().max() <= 1 / 16
        assert drawn.std().item() == pytest.approx(1 / (16 * math.sqrt(3)), rel=0.1)
    assert found["gpt2"]["attn.c_proj.weight"].std().item() == pytest.approx(
        0.02 / math.sqrt(24), rel=0.02
    )
    inputs = untrained_block.Draw("vit", **wide).block().inputs
    assert inputs.std().item() == pytest.approx(0.02, rel=0.02)


# --- The fixed point ------------------------------------------------------------------------------


def excess(block: untrained_block.Block, norm: float) -> float:
    """By how much outputs are longer than inputs, on average, from the naive blocks' own
    sequences.
    """
    lengths = [
        (block(x).double().norm(dim=-1) - x.double().norm(dim=-1)).mean()
        for x in block.biased(norm)
    ]
    return float(np.mean(lengths))


def test_the_fixed_point_is_where_a_dense_grid_crosses():
    draw = tiny("bert", sequences=1)
    block = draw.block()
    (found,) = untrained_block.fixed_points([draw], 20.0)["fixed_point"]
    grid = np.linspace(5, 6.5, 3001)
    crossing = grid[np.flatnonzero(np.diff(np.sign([excess(block, norm) for norm in grid])))]
    assert len(crossing) == 1
    assert found == pytest.approx(crossing[0], abs=1e-3)
    # After a layer norm of gain 1 every vector is √d long, and so the inputs have to be.
    inputs = block.inputs + found * block.direction
    assert inputs.norm(dim=-1).mean().item() == pytest.approx(math.sqrt(32), rel=1e-5)


@every_architecture
def test_excess_is_the_mean_length_of_outputs_minus_that_of_inputs(architecture):
    draw = tiny(architecture, sequences=1)
    vectors = untrained_block.sweep([draw], [0.0, NORM], edges=None)["vectors"].query(
        "space == 'hidden'"
    )
    lengths = vectors.pivot(index="bias_norm", columns="layer", values="mean_norm")
    (found,) = untrained_block.fixed_points([draw], NORM).itertuples()
    expected = (lengths[1] - lengths[0]).tolist()
    assert [found.excess, found.excess_at_highest] == pytest.approx(expected, abs=1e-5)


def test_a_block_whose_outputs_are_always_longer_has_no_fixed_point():
    found = untrained_block.fixed_points([tiny("vit", seed) for seed in range(4)], 5.0)
    longer = (found["excess"] > 0) & (found["excess_at_highest"] > 0)
    assert longer.any()
    assert found.loc[longer, "fixed_point"].isna().all()
    assert found.loc[~longer, "fixed_point"].notna().all()


def test_directions_are_those_of_their_seeds_and_each_has_its_own_fixed_point():
    draw = tiny("gpt2", sequences=1)
    found = untrained_block.fixed_points([draw], 200.0, directions=6)
    alone = [replace(draw, direction_seed=int(seed)) for seed in found["direction_seed"]]
    pd.testing.assert_frame_equal(
        found, untrained_block.fixed_points(alone, 200.0), check_exact=False, rtol=1e-4
    )
    assert 0 < found["fixed_point"].count() < 6
    scores = untrained_block.mean_scores([draw], [0.0, NORM], 6)
    for turned, means in zip(alone, scores.to_numpy(), strict=True):
        attention = untrained_block.sweep([turned], [0.0, NORM])["attention"]
        np.testing.assert_allclose(
            means, attention.groupby("bias_norm")["score"].mean(), rtol=1e-4, atol=1e-8
        )


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_turning_the_sign_of_the_keys_turns_that_of_every_score(architecture):
    block = tiny(architecture).block()
    hidden = block.inputs[:1] + NORM * block.direction
    before = untrained_block.attend(block, hidden)[-1]
    if architecture == "bert":
        block.module.attention.self.key.weight.neg_()
    else:
        block.module.attn.c_attn.weight[:, 32:64].neg_()
    after = untrained_block.attend(block, hidden)[-1]
    seen = before.isfinite()
    torch.testing.assert_close(after[seen], -before[seen])


def test_a_block_is_applied_to_its_own_outputs():
    draw = tiny("vit", sequences=1)
    block = draw.block()
    hidden = block.inputs + NORM * block.direction
    lengths = [hidden.norm(dim=-1).mean().item()]
    for _ in range(3):
        hidden = block(hidden)
        lengths.append(hidden.norm(dim=-1).mean().item())
    found = untrained_block.repeated([draw], [NORM], times=3)
    assert found["times"].tolist() == [0, 1, 2, 3]
    assert found["mean_norm"].tolist() == pytest.approx(lengths, rel=1e-5)


# --- Tables ---------------------------------------------------------------------------------------


def test_a_sweep_labels_every_row_and_leaves_out_what_was_not_asked_for():
    blocks = [
        untrained_block.Draw(name, seed, seed, **TINY)
        for name in ("bert", "vit")
        for seed in range(2)
    ]
    tables = untrained_block.sweep(blocks, [0, NORM], edges=None)
    assert list(tables) == ["vectors"]
    rows = tables["vectors"].groupby([*untrained_block.DRAW_COLUMNS, "bias_norm"]).size()
    assert (rows == 2 + 2 * HEADS).all()
    assert len(rows) == 2 * 2 * 2


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"architecture": "brt"}, "did you mean bert"),
        ({"sequences": 0}, "sequences is 0"),
        ({"length": -1}, "length is -1"),
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"weights_seed": -1}, "weights_seed is -1"),
        ({"direction_seed": 0.5}, "direction_seed is 0.5"),
        ({"width": 30, "heads": 4}, "4 heads do not share a width of 30"),
        ({"sequences": 1, "length": 1}, "two vectors"),
    ],
)
def test_what_makes_no_block_is_refused(wrong, said):
    with pytest.raises(AnalysisError, match=said):
        untrained_block.Draw(**wrong)


@pytest.mark.parametrize(
    ("norms", "said"),
    [([], "0 norms"), ([1, -2], "-2"), ([math.nan], "nan"), ([0, math.inf], "inf")],
)
def test_what_is_no_norm_is_refused(norms, said):
    with pytest.raises(AnalysisError, match=said):
        untrained_block.sweep([tiny()], norms)


@pytest.mark.parametrize("highest", [-1.0, 0.0, math.nan, math.inf])
def test_a_search_needs_an_end(highest):
    with pytest.raises(AnalysisError, match="cannot be the highest norm of a bias"):
        untrained_block.fixed_points([tiny()], highest)


@pytest.mark.parametrize(("architectures", "seeds"), [([], 3), (["bert"], 0)])
def test_nothing_to_draw_is_refused(architectures, seeds):
    names = {
        "architectures": architectures,
        "seeds": seeds,
        "sequences": 1,
        "length": 8,
        "norms": [0],
    }
    with pytest.raises(AnalysisError, match="0 blocks"):
        run_cells("untrained/fixed-point", "blocks = ", **names)
