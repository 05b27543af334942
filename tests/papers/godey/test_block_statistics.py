"""The numbers that decide claims on untrained blocks, on planted tables."""

import math

import pandas as pd
import pytest
from planted import run_cells

from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers import claims
from analysis_lib.papers.godey import untrained_block
from analysis_lib.papers.godey.untrained_block import DRAW_COLUMNS


def test_over_seeds_averages_heads_first_and_gives_students_interval():
    rows = [("bert", seed, seed, 1.0, h, value) for seed, pair in enumerate([(0, 2), (2, 2), (1, 5), (3, 5), (5, 5)])
            for h, value in enumerate(pair)]  # fmt: skip
    table = pd.DataFrame(rows, columns=[*DRAW_COLUMNS, "bias_norm", "head", "score"])
    (row,) = untrained_block.over_seeds(table, "score").itertuples()
    assert (row.architecture, row.bias_norm, row.value) == ("bert", 1.0, 3.0)
    # The draws have 1 to 5: t = 2.776 with four degrees of freedom, s/√n = √2.5/√5.
    assert row.ci_high - row.value == pytest.approx(2.7764 * math.sqrt(0.5), rel=1e-4)
    assert row.value - row.ci_low == pytest.approx(row.ci_high - row.value)


def planted(norms, **by_norm) -> pd.DataFrame:
    """A table of five draws and one head, from the values of each column by norm."""
    rows = [
        {"architecture": "bert", "weights_seed": seed, "direction_seed": seed, "head": 1, "bias_norm": norm}
        | {name: values[i] * (1 + 0.01 * seed) for name, values in by_norm.items()}
        for seed in range(5)
        for i, norm in enumerate(norms)
    ]
    return pd.DataFrame(rows)


def on_fixed_point_page(vectors: pd.DataFrame, points: pd.DataFrame) -> dict:
    hidden = {
        side: vectors.query("space == 'hidden' and layer == @layer") for side, layer in (("inputs", 0), ("outputs", 1))
    }
    trained = pd.DataFrame({"norm_over_root": [2.0, 2.0]})
    return run_cells("untrained/fixed-point", "statistics = {", **hidden, fixed=points, trained=trained, width=16)


def on_attention_page(vectors: pd.DataFrame, attention: pd.DataFrame) -> dict:
    spaces = dict(iter(vectors.groupby("space")))
    names = {"attention": attention, "spaces": spaces, "width": 128, "heads": 2}
    return run_cells("untrained/attention", "def growth", "tenth = ", "statistics = {", **names)


def spaces(layers: dict[tuple[str, int], dict[str, list[float]]]) -> pd.DataFrame:
    parts = [planted([0.0, 10.0], **c).assign(space=space, layer=layer) for (space, layer), c in layers.items()]
    return pd.concat(parts)


def fixed(excess: float, at_highest: float, point: float) -> pd.DataFrame:
    numbers = {"fixed_point": point, "excess": excess, "excess_at_highest": at_highest}
    return pd.DataFrame([dict(zip(DRAW_COLUMNS, ("bert", s, s), strict=True)) | numbers for s in range(5)])


@pytest.mark.parametrize(
    ("outputs", "norms_of_mean", "points", "expected"),
    [
        ([0.15, 0.85], [1.0, 2.0], fixed(5.0, -5.0, 8.0), ["holds"] * 5),
        ([0.15, 0.7], [1.0, 2.0], fixed(5.0, -5.0, 8.0), ["does not hold", *["holds"] * 4]),
        ([0.3, 0.85], [1.0, 2.0], fixed(5.0, -5.0, 8.0), ["holds", "does not hold", *["holds"] * 3]),
        ([0.15, 0.85], [2.0, 1.0], fixed(5.0, -5.0, 80.0), [*["holds"] * 2, "does not hold", "holds", "does not hold"]),
        ([0.15, 0.85], [1.0, 2.0], fixed(5.0, 5.0, math.nan), [*["holds"] * 3, "does not hold", "undecided"]),
    ],
)
def test_claims_on_norms(outputs, norms_of_mean, points, expected):
    inputs = {"cosine": [0.1, 0.8], "norm_of_mean": [0.0, 10.0]}
    vectors = spaces({("hidden", 0): inputs, ("hidden", 1): {"cosine": outputs, "norm_of_mean": norms_of_mean}})
    assert on_fixed_point_page(vectors, points)["verdicts"]["verdict"].tolist() == expected


@pytest.mark.parametrize("rises", [True, False])
def test_claims_on_attention(rises):
    def along(*values: float) -> list[float]:
        return [*values] if rises else [*values][::-1]

    # Where it rises, as the square of the bias: a tenth of it makes a hundredth.
    norms = [0.0, 1.0, 10.0]
    attention = planted(
        norms,
        score_magnitude=along(0.1, 0.2, 1.0),
        row_max=along(0.52, 0.53, 0.8),
        row_median=[0.5, 0.5, 0.5],
        row_min=along(0.49, 0.48, 0.2),
        sequence_max=along(0.52, 0.53, 0.9),
        sequence_min=along(0.48, 0.47, 0.1),
        divergence=along(0.01, 0.02, 1.0),
    )
    vectors = pd.concat(
        planted(norms, mean_norm=along(1.0, 2.0, 9.0), cosine=[0.9 if rises else 0.0, 0.9, 0.9]).assign(
            space=space, layer=1
        )
        for space in ("query", "key")
    )
    expected = ["holds" if rises else "does not hold"] * 7
    assert on_attention_page(vectors, attention)["verdicts"]["verdict"].tolist() == expected


@pytest.mark.parametrize(
    ("rising", "expected"),
    [([1, -1, 1, -1, 1, -1], "holds"), ([1, 1, 1, 1, 1, -1], "undecided"), ([1] * 60, "does not hold")],
)
def test_some_draws_raise_the_scores_and_others_lower_them(rising, expected):
    columns = [*DRAW_COLUMNS, "bias_norm", "head", "score"]
    draws = [("bert", s, s, norm, 1, sign * norm) for s, sign in enumerate(rising) for norm in (0.0, 10.0)]
    before = pd.DataFrame({"id": [], "verdict": []})
    names = {"attention": pd.DataFrame(draws, columns=columns), "verdicts": before, "display": lambda _: None}
    shown = run_cells("untrained/attention", "both = {}", **names)
    (row,) = shown["both"]["bert"].itertuples()
    assert row.verdict == expected
    assert row.value == pytest.approx(min(rising.count(1), rising.count(-1)) / len(rising))


def test_a_verdict_on_blocks_is_on_the_mean_over_seeds():
    score = untrained_block.by_norm(planted([1.0, 0.0], score=[1.0, 2.0]), "score")
    assert score.columns.tolist() == [0.0, 1.0]
    numbers = score.sum(axis=1).rename("godey-scores-leave-zero").droplevel("direction_seed").to_frame()
    (row,) = claims.verdicts_over_seeds(numbers).itertuples()
    assert (row.architecture, row.verdict) == ("bert", "holds")
    assert row.value == pytest.approx(3.06)
    assert (row.ci_low, row.ci_high) == pytest.approx(seed_interval([3.0, 3.03, 3.06, 3.09, 3.12])[1:])


def test_the_numbers_are_those_of_the_formulas():
    inputs = {"cosine": [0.1, 0.8], "norm_of_mean": [0.0, 10.0]}
    outputs = {"cosine": [0.2, 0.9], "norm_of_mean": [1.0, 2.0]}
    vectors = spaces({("hidden", 0): inputs, ("hidden", 1): outputs})
    found = on_fixed_point_page(vectors, fixed(5.0, -3.0, 80.0))["statistics"]
    assert found["godey-block-narrows-cone"].iloc[0] == pytest.approx(0.9 / 0.8)
    # The farther of 0.2 − 0.1 and 0.9 − 0.8 is no more than a tenth.
    assert found["godey-block-narrows-slightly"].iloc[0] == pytest.approx(0)
    assert found["godey-mean-output-grows"].iloc[0] == pytest.approx(1)
    assert found["godey-fixed-point-exists"].tolist() == [3] * 5
    # The trained norm is 2 √16, a tenth of the fixed point.
    assert found["godey-fixed-point-of-trained-size"].tolist() == pytest.approx([-0.5] * 5)
    columns = {"row_max": [0.6, 0.9], "row_median": [0.5, 0.5], "row_min": [0.4, 0.0], "score_magnitude": [0.1, 10.0]}
    columns |= {"sequence_max": [0.6, 0.9], "sequence_min": [0.4, 0.0], "divergence": [1.0, 3.0]}
    attention = planted([0.0, 10.0], **columns)
    vectors = spaces({(space, 1): {"cosine": [0.5, 0.5], "mean_norm": [1.0, 10.0]} for space in ("query", "key")})
    found = {name: draws.iloc[0] for name, draws in on_attention_page(vectors, attention)["statistics"].items()}
    assert found["godey-scores-leave-zero"] == pytest.approx(2)
    assert found["godey-queries-and-keys-lengthen"] == pytest.approx(1)
    # The 95th percentile in 64 dimensions is 0.206.
    assert found["godey-queries-and-keys-anisotropic-without-bias"] == pytest.approx(0.5 - 0.206, abs=1e-3)
    # The largest moves from 0.1 to 0.4 above the median, the smallest from 0.1 to 0.5 below it.
    assert found["godey-rows-spread"] == pytest.approx(math.log10(4))
    assert found["godey-sequences-spread"] == pytest.approx(math.log10(4))
    assert found["godey-block-attention-sharpens"] == pytest.approx(math.log10(3))
    assert found["godey-small-effect-of-low-bias"] == pytest.approx(0, abs=1e-12)
