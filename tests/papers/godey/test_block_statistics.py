"""The numbers that decide claims on untrained blocks, on planted tables."""

import math

import pandas as pd
import pytest
from planted import run_cells

from analysis_book.papers import claims
from analysis_book.papers.godey import untrained_block
from analysis_book.papers.godey.untrained_block import DRAW_COLUMNS
from analysis_lib.metrics.intervals import seed_interval, share


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
        {
            "architecture": "bert",
            "weights_seed": seed,
            "direction_seed": seed,
            "head": 1,
            "bias_norm": norm,
        }
        | {
            name: values[i] * (1 + 0.01 * seed * (i + 1) / len(norms))
            for name, values in by_norm.items()
        }
        for seed in range(5)
        for i, norm in enumerate(norms)
    ]
    return pd.DataFrame(rows)


def spaces(layers: dict[tuple[str, int], dict[str, list[float]]]) -> pd.DataFrame:
    parts = [
        planted([0.0, 10.0], **c).assign(space=space, layer=layer)
        for (space, layer), c in layers.items()
    ]
    return pd.concat(parts)


def draws(**columns: list) -> pd.DataFrame:
    """A table of draws of one block, which differ in the direction of the bias."""
    rows = pd.DataFrame(columns)
    return pd.DataFrame(
        {"architecture": "bert", "weights_seed": 0, "direction_seed": rows.index}
    ).join(rows)


# --- Norms ----------------------------------------------------------------------------------------


def on_fixed_point_page(vectors: pd.DataFrame, points: pd.DataFrame, ends: pd.DataFrame) -> dict:
    hidden = {
        side: vectors.query("space == 'hidden' and layer == @layer")
        for side, layer in (("inputs", 0), ("outputs", 1))
    }
    cells = ("pairs = inputs", "statistics = {", "shares = {", "rows = []", "verdicts = pd.concat")
    return run_cells(
        "untrained/fixed-point", *cells, **hidden, points=points, later=ends.assign(times=12)
    )


NORMS = {"inputs": {"cosine": [0.1, 0.8], "norm_of_mean": [0.0, 10.0]}}


@pytest.mark.parametrize(
    ("outputs", "norms_of_mean", "expected"),
    [
        ([0.15, 0.85], [1.0, 2.0], ["holds"] * 3),
        ([0.15, 0.7], [1.0, 2.0], ["does not hold", "holds", "holds"]),
        ([0.3, 0.85], [1.0, 2.0], ["holds", "does not hold", "holds"]),
        ([0.15, 0.85], [2.0, 1.0], ["holds", "holds", "does not hold"]),
    ],
)
def test_claims_on_outputs(outputs, norms_of_mean, expected):
    given = {
        ("hidden", 0): NORMS["inputs"],
        ("hidden", 1): {"cosine": outputs, "norm_of_mean": norms_of_mean},
    }
    points = draws(fixed_point=[27.7] * 40)
    ends = draws(mean_norm=[27.7] * 40)
    found = on_fixed_point_page(spaces(given), points, ends)["verdicts"]
    assert found["verdict"].tolist() == [*expected, "holds", "holds"]


@pytest.mark.parametrize(
    ("fixed", "settled", "expected"),
    [
        (100, 100, ["holds", "holds"]),
        # Of a coin, half of the draws.
        (50, 50, ["does not hold", "does not hold"]),
        (100, 50, ["holds", "does not hold"]),
        (92, 92, ["undecided", "undecided"]),
    ],
)
def test_a_fixed_point_is_a_share_of_draws_and_vectors_settle_within_a_tenth_of_it(
    fixed, settled, expected
):
    outputs = {"cosine": [0.15, 0.85], "norm_of_mean": [1.0, 2.0]}
    points = draws(fixed_point=[27.7] * fixed + [math.nan] * (100 - fixed))
    ends = draws(mean_norm=[27.7 * 1.09] * settled + [27.7 * 1.11] * (100 - settled))
    # From another start all settle: one of two starts is not enough.
    ends = pd.concat([ends, draws(mean_norm=[27.7] * 100)])
    found = on_fixed_point_page(
        spaces({("hidden", 0): NORMS["inputs"], ("hidden", 1): outputs}), points, ends
    )
    rows = found["verdicts"].iloc[3:]
    assert rows["verdict"].tolist() == expected
    assert rows["value"].tolist() == [fixed / 100, min(fixed, settled) / 100]
    assert rows["ci_low"].iloc[0] == pytest.approx(share(fixed, 100).ci_low)


@pytest.mark.parametrize(
    ("point", "expected"), [(8.0, "holds"), (40.0, "does not hold"), (math.nan, "not applicable")]
)
def test_the_fixed_point_is_of_the_size_of_trained_vectors(point, expected):
    points = pd.DataFrame({"architecture": "bert", "weights_seed": range(5)})
    points["norm_over_root"] = [point * (1 + 0.01 * seed) for seed in range(5)]
    trained = pd.DataFrame({"norm_over_root": [3.0, 5.0]})
    tables = type("Tables", (), {"run": {"texts": 40}})
    (row,) = run_cells(
        "untrained/checks",
        "statistics = {",
        points=points,
        trained=trained,
        tables=tables,
        directions=1,
    )["verdicts"].itertuples()
    assert row.verdict == expected
    if not math.isnan(point):
        assert row.value == pytest.approx(0.5 - math.log10(1.02 * point / 4), abs=1e-3)


# --- Scores ---------------------------------------------------------------------------------------


def on_scores_page(vectors: pd.DataFrame, attention: pd.DataFrame) -> dict:
    names = {"attention": attention, "spaces": dict(iter(vectors.groupby("space")))}
    return run_cells("untrained/scores", "def growth", "statistics = {", **names)


def queries_and_keys(norms, key=None, **columns) -> pd.DataFrame:
    both = {"query": columns, "key": columns | (key or {})}
    return pd.concat(planted(norms, **c).assign(space=space, layer=1) for space, c in both.items())


@pytest.mark.parametrize("rises", [True, False])
def test_claims_on_scores(rises):
    def along(*values: float) -> list[float]:
        return [*values] if rises else [*values][::-1]

    norms = [0.0, 1.0, 10.0]
    attention = planted(norms, score_magnitude=along(0.1, 0.2, 1.0))
    cosine = [0.5, 0.7, 0.9] if rises else [0.1, 0.7, 0.6]
    vectors = queries_and_keys(norms, mean_norm=along(1.0, 2.0, 9.0), cosine=cosine)
    found = on_scores_page(vectors, attention)["verdicts"]
    assert found["verdict"].tolist() == ["holds" if rises else "does not hold"] * 4


def test_queries_and_keys_both_have_to_do_what_is_claimed():
    norms = [0.0, 1.0, 10.0]
    attention = planted(norms, score_magnitude=[0.1, 0.2, 1.0])
    keys = {"mean_norm": [1.0, 1.0, 0.9], "cosine": [0.1, 0.9, 0.8]}
    vectors = queries_and_keys(norms, keys, mean_norm=[1.0, 2.0, 9.0], cosine=[0.5, 0.7, 0.9])
    found = on_scores_page(vectors, attention)["verdicts"]
    assert found["verdict"].tolist() == ["holds", *["does not hold"] * 3]
    assert found["value"].tolist()[1:3] == pytest.approx([-0.046, -0.1], abs=0.01)


def test_what_grows_without_doubling_holds_a_little():
    norms = [0.0, 1.0, 10.0]
    attention = planted(norms, score_magnitude=[0.1, 0.12, 0.15])
    vectors = queries_and_keys(norms, mean_norm=[1.0, 1.2, 1.5], cosine=[0.5, 0.7, 0.9])
    found = on_scores_page(vectors, attention)["verdicts"]
    assert found["verdict"].tolist() == ["holds, small"] * 2 + ["holds"] * 2


@pytest.mark.parametrize(
    ("rising", "expected"), [(20, "holds"), (35, "undecided"), (40, "does not hold")]
)
def test_some_draws_raise_the_scores_and_others_lower_them(rising, expected):
    changes = draws(up=[True] * rising + [False] * (40 - rising))
    before = pd.DataFrame({"id": [], "verdict": []})
    show = type("claims", (), {"judged": claims.judged, "show": lambda _: None})
    found = run_cells(
        "untrained/scores", "godey-scores-either-way", drawn=changes, verdicts=before, claims=show
    )
    (row,) = found["verdicts"].itertuples()
    assert row.verdict == expected
    assert row.value == pytest.approx(1 - max(rising, 40 - rising) / 40)
    assert row.ci_high <= 0.5


# --- Weights --------------------------------------------------------------------------------------


def on_sharpness_page(attention: pd.DataFrame) -> dict:
    return run_cells(
        "untrained/sharpness", "def growth", "statistics = {", "sample = ", attention=attention
    )


@pytest.mark.parametrize("rises", [True, False])
def test_claims_on_weights(rises):
    def along(*values: float) -> list[float]:
        return [*values] if rises else [*values][::-1]

    # Where it rises, as the square of the bias: a tenth of it makes a hundredth.
    attention = planted(
        [0.0, 1.0, 10.0],
        row_max=along(0.52, 0.53, 0.8),
        row_median=[0.5, 0.5, 0.5],
        row_min=along(0.49, 0.48, 0.2),
        sequence_max=along(0.52, 0.53, 0.9),
        sequence_min=along(0.48, 0.47, 0.1),
        divergence=along(0.01, 0.02, 1.0),
        lost=along(0.01, 0.02, 0.5),
    )
    expected = ["holds" if rises else "does not hold"] * 5
    assert on_sharpness_page(attention)["verdicts"]["verdict"].tolist() == expected


def test_a_doubling_of_next_to_nothing_sharpens_attention_in_direction_alone():
    same = {name: [0.5, 0.5] for name in ("row_median",)}
    ends = {
        "row_max": [0.6, 0.9],
        "row_min": [0.4, 0.0],
        "sequence_max": [0.6, 0.9],
        "sequence_min": [0.4, 0.0],
    }
    attention = planted([0.0, 10.0], divergence=[1e-8, 1e-5], lost=[1e-9, 1e-6], **same, **ends)
    found = on_sharpness_page(attention)["verdicts"].set_index("id")["verdict"]
    assert found["godey-block-attention-sharpens"] == "holds"
    assert found["godey-block-attention-sharpens-visibly"] == "does not hold"


# --- The numbers ----------------------------------------------------------------------------------


def test_a_verdict_on_blocks_is_on_the_mean_over_seeds():
    score = untrained_block.by_norm(planted([1.0, 0.0], score=[1.0, 2.0]), "score")
    assert score.columns.tolist() == [0.0, 1.0]
    (row,) = claims.verdicts_over_seeds({"godey-scores-leave-zero": score.sum(axis=1)}).itertuples()
    assert (row.model, row.verdict) == ("bert", "holds")
    assert row.value == pytest.approx(3.05)
    assert (row.ci_low, row.ci_high) == pytest.approx(
        seed_interval([3.0, 3.025, 3.05, 3.075, 3.1]).row[1:]
    )


def test_the_numbers_are_those_of_the_formulas():
    outputs = {"cosine": [0.2, 0.9], "norm_of_mean": [1.0, 2.0]}
    vectors = spaces({("hidden", 0): NORMS["inputs"], ("hidden", 1): outputs})
    points, ends = draws(fixed_point=[8.0]), draws(mean_norm=[8.0])
    found = on_fixed_point_page(vectors, points, ends)["statistics"]
    first = {name: numbers.iloc[0].tolist() for name, numbers in found.items()}
    assert first["godey-block-narrows-cone"] == pytest.approx([0.9 / 0.8, 0.2 / 0.1])
    assert first["godey-block-narrows-slightly"] == pytest.approx([0, 0])
    assert first["godey-mean-output-grows"] == pytest.approx([1])
    columns = {
        "row_max": [0.6, 0.9],
        "row_median": [0.5, 0.5],
        "row_min": [0.4, 0.0],
        "lost": [0.1, 0.3],
    }
    columns |= {"sequence_max": [0.6, 0.9], "sequence_min": [0.4, 0.0], "divergence": [1.0, 3.0]}
    found = on_sharpness_page(planted([0.0, 10.0], **columns))["statistics"]
    # The largest moves from 0.1 to 0.4 above the median, the smallest from 0.1 to 0.5 below it.
    for name in ("godey-rows-spread", "godey-sequences-spread"):
        assert found[name].iloc[0].tolist() == pytest.approx([math.log10(4), math.log10(5)])
    assert found["godey-block-attention-sharpens"].iloc[0] == pytest.approx(math.log10(3))
    assert found["godey-block-attention-sharpens-visibly"].iloc[0] == pytest.approx(0.2)
    assert found["godey-small-effect-of-low-bias"].iloc[0] == pytest.approx(0, abs=1e-12)
    attention = planted([0.0, 10.0], score_magnitude=[0.1, 10.0])
    vectors = queries_and_keys([0.0, 10.0], cosine=[0.5, 0.6], mean_norm=[1.0, 10.0])
    found = on_scores_page(vectors, attention)["statistics"]
    assert found["godey-scores-leave-zero"].iloc[0] == pytest.approx(2)
    assert found["godey-queries-and-keys-lengthen"].iloc[0].tolist() == pytest.approx([1, 1])
    assert found["godey-query-and-key-cosines-rise"].iloc[0].tolist() == pytest.approx([0.1, 0.1])
    # The 95th percentile in 64 dimensions is 0.206.
    without = found["godey-queries-and-keys-anisotropic-without-bias"].iloc[0]
    assert without.tolist() == pytest.approx([0.5 - 0.206] * 2, abs=1e-3)
