"""Figures, tables and verdicts on runs of training: what is drawn of a run that was planted."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures, papers
from analysis_lib.errors import AnalysisError
from analysis_lib.papers.godey import dynamics as runs
from analysis_lib.papers.godey.dynamics import QUANTITIES, Dynamics

STEPS = (0, 10, 100, 1000)
LAYERS, HEADS, WIDTH = 6, 3, 8
# Layers 1 and 2 are the first third, 5 and 6 the last.
THIRDS = {1: "first third", 2: "first third", 5: "last third", 6: "last third"}


def planted(
    cosine: Callable[[int, int, float, int], float] = lambda layer, head, way, seed: way * 0.9,
    entropy: Callable[[int, float], float] = lambda layer, way: 3 - way + 0.1 * layer,
    anisotropy: Callable[[int, float], float] = lambda layer, way: 0.2 + 0.3 * way,
    dot: Callable[[float, float], float] = lambda cosine, way: cosine * (1 + way),
    seeds: tuple[int, ...] = (0,),
    steps: tuple[int, ...] = STEPS,
) -> Dynamics:
    """A run whose quantities are given functions of the way, from 0 at the start to 1 at the last checkpoint.

    A mean query points along dimension 0 and its mean key lies in the plane of dimensions 0 and 1. Of the first seed,
    nine queries and nine keys are sampled around them in each head that is shown.
    """
    alignment, means, entropies, hidden = [], [], [], []
    for seed in seeds:
        for step in steps:
            way = step / steps[-1]
            for layer in range(1, LAYERS + 1):
                hidden.append((seed, step, "hidden", layer - 1, pd.NA, anisotropy(layer, way)))
                for head in range(1, HEADS + 1):
                    c = cosine(layer, head, way, seed)
                    alignment.append((seed, step, layer, head, c, dot(c, way)))
                    nats = entropy(layer, way)
                    entropies.append((seed, step, layer, head, nats + 0.01 * head, nats / 5))
                    for space, vector in (("query", (1, 0)), ("key", (c, math.sqrt(1 - c**2)))):
                        values = (*vector, *[0.0] * (WIDTH - 2))
                        means += [(seed, step, space, layer, head, d, (1 + way) * v) for d, v in enumerate(values)]
    front = ["seed", "step"]
    tables = {
        "qk_alignment": pd.DataFrame(alignment, columns=[*front, "layer", "head", "cosine", "dot"]),
        "head_means": pd.DataFrame(means, columns=[*front, "space", "layer", "head", "dimension", "mean"]),
        "attention_entropy": pd.DataFrame(
            entropies, columns=[*front, "layer", "head", "entropy_nats", "entropy_normalised"]
        ),
        "anisotropy": pd.DataFrame(hidden, columns=[*front, "space", "layer", "head", "cosine"]),
        "losses": pd.DataFrame(
            [(s, t, 64 * t, 1e-3, 5 - t / 1000 if t else math.nan, 6 - t / 500) for s in seeds for t in steps],
            columns=[*front, "tokens", "learning_rate", "loss", "held_out"],
        ),
    }
    shown = set(runs.heads_shown(tables["qk_alignment"]).values())
    tables["vectors"] = _sampled(tables["head_means"], shown, seeds[0])
    return Dynamics(tables, {"run": "planted", "seeds": list(seeds)})


def _sampled(means: pd.DataFrame, heads: set[tuple[int, int]], seed: int) -> pd.DataFrame:
    noise = np.random.default_rng(0).normal(scale=0.1, size=(9, WIDTH))
    noise -= noise.mean(0)
    frames = []
    for (found, step, space, layer, head), part in means.groupby(["seed", "step", "space", "layer", "head"]):
        if found == seed and (layer, head) in heads:
            values = pd.DataFrame(part["mean"].to_numpy() + noise, columns=[str(d) for d in range(WIDTH)])
            about = {"seed": seed, "step": step, "layer": layer, "head": head, "space": space}
            frames.append(pd.concat([pd.DataFrame(about, values.index), values], axis=1))
    return pd.concat(frames, ignore_index=True)


def unpublished() -> Dynamics:
    found = planted()
    return Dynamics({**found, "losses": found["losses"].iloc[:0]}, found.about)


def thirds_apart(layer: int, head: int, way: float, seed: int) -> float:
    """Heads of the first third end similar, those of the last third opposite, the others at right angles."""
    end = {"first third": 0.9, "last third": -0.9}.get(THIRDS.get(layer), 0.0)
    return way * (end - 0.02 * head * np.sign(end))


def curves(axes) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def ticks(axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def titles(figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def test_clouds_draw_the_sample_and_its_mean_on_the_axes_of_all_steps():
    found = planted(thirds_apart)
    clouds = {name: runs.cloud(found, name) for name in ("similar", "opposite")}
    figure = figures.query_key_clouds(clouds, [0, 1000])
    assert titles(figure) == ["similar", "opposite", "", ""]
    for row, step in enumerate((0, 1000)):
        for column, cloud in enumerate(clouds.values()):
            axes = figure.axes[2 * row + column]
            for points, space in zip(axes.collections, ("query", "key"), strict=True):
                part = cloud[(cloud["step"] == step) & (cloud["space"] == space)]
                np.testing.assert_allclose(points.get_offsets(), part[["x", "y"]])
                label = {"query": "queries", "key": "keys"}[space]
                np.testing.assert_allclose(curves(axes)[label], [part[["x", "y"]].mean()])
            # The longest vectors come last, and the first panel has room for them.
            (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
            assert left < cloud["x"].min()
            assert right > cloud["x"].max()
            assert low < cloud["y"].min()
            assert high > cloud["y"].max()
    with pytest.raises(AnalysisError, match="no step 7: give some of 0, 10, 100, 1000"):
        figures.query_key_clouds(clouds, [7])


def test_the_clouds_of_keys_that_turn_against_the_queries_part():
    """The planted direction is dimension 0: queries at 2, opposite keys at -2 times 0.84."""
    cloud = runs.cloud(planted(thirds_apart), "opposite")
    last = cloud[cloud["step"] == 1000].groupby("space")["x"].mean()
    assert last["key"] > 0 > last["query"]
    assert abs(last["query"]) == pytest.approx(2, abs=0.2)


def test_paths_draw_an_arrow_from_each_checkpoint_to_the_next():
    found = planted(thirds_apart)
    paths = {name: runs.mean_path(found, name) for name in ("similar", "opposite")}
    figure = figures.mean_paths(paths)
    assert titles(figure) == ["similar", "opposite"]
    for axes, path in zip(figure.axes, paths.values(), strict=True):
        for arrows, space in zip(axes.collections, ("query", "key"), strict=True):
            points = path.loc[path["space"] == space, ["x", "y"]].to_numpy()
            assert len(points) == len(STEPS)
            np.testing.assert_allclose(arrows.XY, points[:-1])
            np.testing.assert_allclose(arrows.XY + np.stack([arrows.U, arrows.V], 1), points[1:])
        for low, high, values in zip(*zip(axes.get_xlim(), axes.get_ylim(), strict=True), ("x", "y"), strict=True):
            assert low < path[values].min()
            assert high > path[values].max()


def test_alignment_draws_a_line_a_head_and_the_band_of_chance():
    found = planted(thirds_apart, seeds=(3, 4))
    figure = figures.alignment_along_training(found["qk_alignment"], [1, 3, 6], WIDTH)
    assert titles(figure) == ["layer 1", "layer 3", "layer 6"]
    for axes, layer in zip(figure.axes, (1, 3, 6), strict=True):
        drawn = curves(axes)
        assert list(drawn) == ["1", "2", "3"]
        for head in (1, 2, 3):
            expected = [thirds_apart(layer, head, step / 1000, 3) for step in STEPS]
            np.testing.assert_allclose(drawn[str(head)], np.transpose([STEPS, expected]))
        band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
        assert (band.y0, band.y1) == pytest.approx((-runs.chance_band(WIDTH), runs.chance_band(WIDTH)))
    # Panels share the axis of the steps, and the lowest ones have its numbers.
    assert [ticks(axes) for axes in figure.axes] == [[], *[["0", "10", "100", "1000"]] * 2]
    with pytest.raises(AnalysisError, match="no layer 7: give some of 1, 2, 3, 4, 5, 6"):
        figures.alignment_along_training(found["qk_alignment"], [7], WIDTH)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((0, 1, 4), ["0", "1", "4"]),
        ((0, 8, 16, 80, 800), ["0", "8", "80", "800"]),
        ((0, 20_000, 200_000, 2_000_000), ["0", "20k", "200k", "2M"]),
        ((0,), ["0", "1"]),
    ],
)
def test_steps_have_readable_ticks(steps, expected):
    entropy = pd.DataFrame({"seed": 0, "step": steps, "layer": 1, "head": 1, "entropy_nats": 1.0})
    assert ticks(figures.entropy_along_training(entropy).axes[0]) == expected


def test_alignment_by_seed_draws_the_concatenated_heads():
    found = planted(lambda layer, head, way, seed: way * (0.5 if seed else -0.5), seeds=(0, 1))
    figure = figures.alignment_by_seed(runs.cosine_of_layers(found), [2], HEADS * WIDTH)
    drawn = curves(figure.axes[0])
    np.testing.assert_allclose(drawn["0"][:, 1], [0, -0.005, -0.05, -0.5])
    np.testing.assert_allclose(drawn["1"][:, 1], [0, 0.005, 0.05, 0.5])
    band = figure.axes[0].patches[0].get_extents().transformed(figure.axes[0].transData.inverted())
    assert band.y1 == pytest.approx(runs.chance_band(HEADS * WIDTH))


def test_dots_part_the_heads_that_end_similar_from_those_that_end_opposite():
    figure = figures.dots_along_training(planted(thirds_apart)["qk_alignment"], WIDTH)
    assert titles(figure) == ["heads that end similar: 6 of 18", "heads that end opposite: 6 of 18"]
    for axes, layers, sign in zip(figure.axes, ({"1", "2"}, {"5", "6"}), (1, -1), strict=True):
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) == len(STEPS)]
        assert {line.get_label() for line in lines} == layers
        assert len(lines) == 6
        assert all(sign * line.get_ydata()[-1] > 1.6 for line in lines)
        # The most similar and the most opposite are head 1 of layer 1 and of layer 5.
        (thick,) = [line for line in lines if line.get_linewidth() > 3]
        assert thick.get_ydata()[-1] == pytest.approx(sign * 2 * 0.88)


def test_entropy_draws_the_mean_of_the_heads_of_each_layer():
    (axes,) = figures.entropy_along_training(planted(seeds=(0, 1))["attention_entropy"]).axes
    drawn = curves(axes)
    assert list(drawn) == [str(layer) for layer in range(1, LAYERS + 1)]
    for layer in range(1, LAYERS + 1):
        expected = [3 - step / 1000 + 0.1 * layer + 0.02 for step in STEPS]
        np.testing.assert_allclose(drawn[str(layer)][:, 1], expected)


def test_chance_is_the_law_of_independent_directions():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 4000, WIDTH))
    cosine = (q * k).sum(1) / np.linalg.norm(q, axis=1) / np.linalg.norm(k, axis=1)
    table = pd.DataFrame({"step": [0] * 4000 + [7] * 4, "cosine": [*cosine, 0.2, -0.4, 0.6, 0.9]})
    (axes,) = figures.alignment_against_chance(table, WIDTH).axes
    drawn = curves(axes)
    x, below = drawn["step 0"].T
    chance = drawn["independent directions"]
    assert np.abs(np.interp(x, *chance.T) - below).max() < 0.03  # four standard errors and more
    np.testing.assert_allclose(drawn["step 7"], [[0.2, 0.25], [0.4, 0.5], [0.6, 0.75], [0.9, 1.0]])
    # The simulated share agrees with the exact probability, and the band holds 99 % of it.
    assert (np.abs(cosine) >= 0.5).mean() == pytest.approx(runs.chance_of(np.array(0.5), WIDTH), abs=0.03)
    assert runs.chance_of(np.array(-runs.chance_band(WIDTH)), WIDTH) == pytest.approx(0.01)


def test_share_outside_chance_draws_each_part_and_seed_and_one_interval():
    found = planted(thirds_apart, seeds=(0, 1))
    figure = figures.share_outside_chance(runs.outside_chance(found))
    assert titles(figure) == [
        "first third: 6 heads",
        "middle third: 6 heads",
        "last third: 6 heads",
        "all layers: 18 heads",
    ]
    for axes, last in zip(figure.axes, (1, 0, 1, 2 / 3), strict=True):
        drawn = curves(axes)
        np.testing.assert_allclose(drawn["0"][:, 1], [0, 0, 0, last])
        np.testing.assert_allclose(drawn["1"], drawn["0"])
        (band,) = axes.collections
        assert band.get_paths()[0].vertices[:, 1].max() <= 1


def test_quantities_are_scaled_from_their_start_to_their_farthest_point():
    """Anisotropy rises and comes back, alignment rises, and attention is sharper half-way than at the end."""
    hump = {0: 0.0, 0.01: 0.2, 0.1: 0.4, 1: -0.1}
    found = planted(anisotropy=lambda layer, way: 0.3 + hump[way], entropy=lambda layer, way: 3 - 2 * hump[way])
    figure = figures.quantities_along_training(runs.time_axis(found))
    assert titles(figure) == [f"layer {layer}" for layer in range(1, LAYERS + 1)]
    for axes in figure.axes:
        drawn = {label: xy[:, 1] for label, xy in curves(axes).items()}
        np.testing.assert_allclose(drawn[QUANTITIES[0]], [0, 0.5, 1, -0.25])
        np.testing.assert_allclose(drawn[QUANTITIES[1]], [0, 0.01, 0.1, 1])
        np.testing.assert_allclose(drawn[QUANTITIES[2]], [0, 0.5, 1, -0.25])


def test_half_way_steps_are_drawn_on_the_row_of_their_layer():
    found = planted(anisotropy=lambda layer, way: min(1.0, 10 * way * layer), seeds=(0, 1))
    half = runs.half_way(runs.time_axis(found))
    (axes,) = figures.half_way_steps(half, found.steps).axes
    drawn = curves(axes)
    for quantity in QUANTITIES:
        part = half[half["quantity"] == quantity]
        np.testing.assert_allclose(drawn[quantity][:, 0], part["step"])
        np.testing.assert_array_equal(drawn[quantity][:, 1].round(), part["layer"])
    assert axes.yaxis_inverted()


def test_losses_are_those_of_the_batches_and_of_the_texts_held_out():
    unknown = unpublished()
    figure = figures.losses_along_training({"mine": planted(seeds=(0, 5)), "theirs": unknown})
    assert titles(figure) == ["mine", "theirs"]
    drawn = curves(figure.axes[0])
    np.testing.assert_allclose(drawn["held out, seed 5"][:, 1], [6, 5.98, 5.8, 4])
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata()[1:], [4.99, 4.9, 4])
    assert figure.axes[1].texts[0].get_text() == "the losses of this run were not published"


def test_the_table_of_runs_tells_size_length_and_loss():
    unknown = unpublished()
    table = figures.runs_table({"mine": planted(seeds=(0, 5)), "theirs": unknown}, "tbl-runs", "Runs.").frame
    assert table["mine"].tolist() == ["6", "3", "8", "0, 5", "4", "1,000", "0.064", "0.001", "6.00", "4.00"]
    assert table["theirs"].tolist() == ["6", "3", "8", "0", "4", "1,000", "–", "–", "–", "–"]


def test_how_much_the_directions_hold_follows_the_planted_drift():
    """The mean query moves from 1 to 2 along dimension 0, the mean key from (0, 1) to 2·(-0.88, 0.47)."""
    found = planted(thirds_apart)
    drift = runs.drift_along(found, "opposite").set_index("of")
    assert drift.index.tolist() == ["both", "key", "query"]
    vectors = found["vectors"][lambda table: (table["layer"] == 5) & (table["head"] == 1)]
    sample = {"both": vectors, "key": vectors[vectors["space"] == "key"], "query": vectors[vectors["space"] == "query"]}
    dimensions = [str(d) for d in range(WIDTH)]
    everything = vectors[dimensions].to_numpy()
    first = {of: np.linalg.svd(part[dimensions].to_numpy())[2] for of, part in sample.items()}
    key_move = np.array([2 * -0.88, 2 * math.sqrt(1 - 0.88**2) - 1, *[0] * (WIDTH - 2)])
    for of, directions in first.items():
        row = drift.loc[of]
        held = np.square(everything @ directions[:2].T).sum(0) / np.square(everything).sum()
        assert row["first"] == pytest.approx(held[0])
        assert row["first_two"] == pytest.approx(held.sum())
        cosine = abs(directions[0] @ first["both"][0])
        assert row["angle"] == pytest.approx(math.degrees(math.acos(min(1, cosine))), abs=1e-4)
        assert abs(row["query"]) == pytest.approx(abs(directions[0, 0]))
        assert row["query_share"] == pytest.approx(directions[0, 0] ** 2)
        assert abs(row["key"]) == pytest.approx(abs(directions[0] @ key_move))
        assert row["key_share"] == pytest.approx((directions[0] @ key_move) ** 2 / (key_move @ key_move))
    # Opposite drifts: the two means move to opposite sides.
    assert drift.loc["both", "query"] * drift.loc["both", "key"] < 0


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({0: 0.0, 0.01: 0.9, 0.1: 0.9, 1: 0.9}, 10),
        ({0: 0.0, 0.01: 0.9, 0.1: 0.1, 1: -0.9}, 1000),
        ({0: 0.9, 0.01: 0.9, 0.1: -0.9, 1: 0.9}, 0),
        ({0: 0.0, 0.01: 0.9, 0.1: 0.9, 1: 0.1}, None),
    ],
)
def test_aligned_since_the_checkpoint_after_the_last_one_within_the_band(ways, expected):
    found = runs.aligned_since(planted(lambda layer, head, way, seed: ways[way]))
    assert len(found) == LAYERS * HEADS
    assert found["cosine"].eq(ways[1]).all()
    assert found["step"].isna().all() if expected is None else found["step"].eq(expected).all()


def test_orders_count_the_layers_in_which_the_first_is_earlier():
    """Anisotropy is half-way at step 5 in layers 1 to 4, and does not change in layers 5 and 6."""
    found = planted(
        anisotropy=lambda layer, way: 0.5 if layer > 4 else float(way > 0),
        entropy=lambda layer, way: 3 - (way**2 if layer > 1 else way**0.5),
    )
    table = runs.orders(runs.half_way(runs.time_axis(found))).set_index(["first", "second"])
    row = table.loc[QUANTITIES[0], QUANTITIES[2]]
    assert (row["earlier"], row["layers"], row["share"]) == (4, 4, 1.0)
    assert (row["first_step"], row["second_step"]) == pytest.approx((5, 100 + 900 * 0.49 / 0.99))
    assert 0.5 < row["ci_low"] < 0.6
    assert row["ci_high"] == pytest.approx(1)
    # Only in layer 1 is attention sharp before queries and keys align.
    assert table.loc[(QUANTITIES[1], QUANTITIES[2]), ["earlier", "layers"]].tolist() == [5, 6]
    still = runs.orders(runs.half_way(runs.time_axis(planted(anisotropy=lambda layer, way: 0.5))))
    assert still.loc[0, "layers"] == 0
    assert math.isnan(still.loc[0, "share"])


def test_steps_shown_are_those_nearest_to_the_shares_of_the_run():
    assert runs.steps_shown([0, 20, 40, 60, 200, 2000]) == [0, 40, 200, 2000]
    assert runs.steps_shown([0, 1, 2, 3, 4]) == [0, 4]
    assert runs.steps_shown([0, 1, 2, 3, 4], shares=(0, 0.5, 1)) == [0, 2, 4]


@pytest.mark.parametrize("figure", [13, 23])
@pytest.mark.parametrize("depth", [1, 2, 4, 6, 12, 24])
def test_layers_of_figures_exist_in_any_depth(figure, depth):
    layers = papers.layers_of_figure(figure, depth)
    assert layers[0] == 1
    assert layers[-1] == depth
    assert layers == sorted(set(layers))
    if depth == 12:
        assert [layer - 1 for layer in layers] == {13: [0, 4, 9, 11], 23: [0, 2, 6, 11]}[figure]


def verdicts_of(found: Dynamics) -> list[str]:
    return papers.godey_training_verdicts(found)["verdict"].tolist()


def test_verdicts_hold_on_the_run_of_the_paper_and_fail_on_its_reverse():
    paper = planted(thirds_apart, seeds=(0, 1))
    table = papers.godey_training_verdicts(paper)
    assert table["verdict"].tolist() == ["does not hold"] + ["holds"] * 7
    # The heads of the middle third have no scalar product: it grows in two thirds of 36 heads.
    assert table["value"].iloc[:6].tolist() == pytest.approx([2 / 3, 1, 0.86, 0.86, 2 / 3, 1])
    # Layers 5 and 6 end 0.4 nats above layers 1 and 2.
    assert table["value"].iloc[6] == pytest.approx(0.4)
    assert table["value"].iloc[7] == pytest.approx(1)
    reverse = planted(
        lambda layer, head, way, seed: (-1 if seed else 1) * (0.1 - 0.2 * (layer <= 3)) * way * (1 + 0.1 * head),
        entropy=lambda layer, way: 3 + way - 0.1 * layer * way,
        dot=lambda cosine, way: 1 - way + 1e-3 * cosine,
        seeds=(0, 1),
    )
    found = verdicts_of(reverse)
    assert [found[i] for i in (0, 1, 4, 6, 7)] == ["does not hold"] * 5
    # Half of the seeds drift in common and half in opposite directions.
    assert found[2:4] == ["undecided"] * 2
    apart = planted(lambda *about: -thirds_apart(*about), entropy=lambda layer, way: 3 + way)
    assert verdicts_of(apart)[2:4] == ["does not hold"] * 2
    assert verdicts_of(apart)[5] == "does not hold"


def test_one_seed_says_nothing_about_seeds():
    table = papers.godey_training_verdicts(planted(thirds_apart))
    assert len(table) == 7
    assert not table["source"].str.contains("app. D").any()


def test_two_heads_in_a_third_decide_no_share():
    """Alike in all of few heads is not yet more than half of the heads: Wilson's interval says so."""
    found = planted(thirds_apart)
    # The layers 1, 3 and 5 are all there are, with two heads each.
    few = {name: found[name].query("layer in (1, 3, 5)") for name in ("qk_alignment", "head_means")}
    few["attention_entropy"] = found["attention_entropy"].query("layer in (1, 3, 5)")
    few = {name: table.replace({"layer": {3: 2, 5: 3}}).query("head < 3") for name, table in few.items()}
    table = papers.godey_training_verdicts(Dynamics(few, found.about))
    assert table["value"].iloc[1] == 1
    assert table["verdict"].iloc[1] == "undecided"


def test_the_claims_on_directions_follow_the_planted_drift():
    """Queries and keys that drift along one line hold both; keys at right angles to the queries hold neither."""
    together = papers.godey_direction_verdicts(planted(lambda layer, head, way, seed: 0.9999 * (-1) ** (head == 2)))
    assert together["verdict"].tolist() == ["holds"] * 2
    assert together["value"].tolist() == pytest.approx([1, 1], abs=0.01)
    across = papers.godey_direction_verdicts(planted(lambda layer, head, way, seed: 1e-3 * (-1) ** (head == 2)))
    assert across["verdict"].tolist() == ["does not hold"] * 2
    assert across["bound"].tolist() == [0.5, runs.chance_band(WIDTH) ** 2]
    assert across["ci_low"].isna().all()


def test_verdicts_of_runs_can_be_shown():
    table = papers.godey_training_verdicts(planted(thirds_apart)).assign(model="mine")
    shown = figures.verdict_table(table, "tbl-x", "Verdicts.").frame
    assert shown["model"].eq("mine").all()
    assert "Godey et al. 2024, sec. 5" in shown["claim"].iloc[0]
