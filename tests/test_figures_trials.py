"""Figures of classifiers of self-attention: what is drawn is what was measured and what was published."""

import pandas as pd
import pytest

from analysis_lib import figures

SEEDS = (0, 1, 2)


def row(dataset, quantity, value, layers=1, layer=1, weight=0.0):
    about = {"dataset": dataset, "layers": layers, "entropy_weight": weight, "quantity": quantity, "layer": layer}
    return [{**about, "seed": seed, "value": value + 0.1 * (seed - 1)} for seed in SEEDS]


def table(*parts) -> pd.DataFrame:
    return pd.DataFrame([line for part in parts for line in part]).astype({"layer": "Int64"})


def points(axes) -> set[tuple[float, float]]:
    """What the lines of a panel with markers go through, but for the ends of bars."""
    lines = [line for line in axes.get_lines() if line.get_marker() not in ("", "None", "_", "|")]
    return {(round(x), round(float(y), 3)) for line in lines for x, y in zip(*line.get_data(), strict=True)}


DEPTHS = table(
    row("a", "key", 0.4), row("a", "key", 0.3, 2, 1), row("a", "key", 0.8, 2, 2), row("a", "value", 0.6),
    row("a", "value", 0.5, 2, 1), row("a", "value", 0.9, 2, 2), row("b", "key", 0.2), row("b", "value", 0.1),
)  # fmt: skip
PUBLISHED = pd.DataFrame(
    {"dataset": ["a", "c"], "layers": [2, 1], "layer": [2, 1], "quantity": ["key", "key"], "published": [0.7, 0.1]}
)


def test_similarity_by_depth_has_a_row_a_dataset_and_the_published_numbers():
    figure = figures.similarity_by_depth(DEPTHS, PUBLISHED)
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["a: keys", "a: values", "b: keys", "b: values"]
    assert points(panels["a: keys"]) == {(1, 0.4), (1, 0.3), (2, 0.8), (2, 0.7)}
    assert points(panels["b: values"]) == {(1, 0.1)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 layer", "2 layers", "published"]


def test_without_published_numbers_the_legend_promises_none():
    figure = figures.similarity_by_depth(DEPTHS, PUBLISHED[PUBLISHED["dataset"] == "c"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 layer", "2 layers"]


def test_by_entropy_weight_has_a_panel_a_quantity():
    values = {"entropy": (0.9, 0.2), "key": (0.7, 0.6), "value": (0.3, 0.5), "key_norm": (1.0, 8.0)}
    found = table(*(row("a", q, v, weight=w) for q, of in values.items() for w, v in zip((0.0, 0.01), of, strict=True)))
    deeper = table(row("a", "entropy", 0.5, layers=2))
    told = pd.DataFrame({"dataset": "a", "entropy_weight": [0.01, 0.1], "quantity": "entropy", "published": [0.4, 0.3]})
    figure = figures.by_entropy_weight(pd.concat([found, deeper]), told)
    entropy, _, _, norm = figure.axes
    # What was published for a weight that was not run has no place.
    assert points(entropy) == {(0, 0.9), (1, 0.2), (1, 0.4)}
    assert points(norm) == {(0, 1.0), (1, 8.0)}
    assert norm.get_ylim()[0] == 0
    assert [label.get_text() for label in norm.get_xticklabels()] == ["0", "0.01"]


def test_similarity_by_variant_shows_before_and_after():
    def stage(name, variant, key, value):
        return table(row("a", "key", key), row("a", "value", value)).assign(stage=name, variant=variant)

    found = pd.concat(
        [
            stage(name, variant, *of)
            for (name, variant), of in {
                ("trained", "as here"): (0.5, 0.6),
                ("untrained", "as here"): (0.8, 0.9),
                ("trained", "no biases"): (0.1, 0.2),
                ("untrained", "no biases"): (0.0, 0.3),
            }.items()
        ]
    )
    told = pd.DataFrame({"quantity": ["key"], "layer": [1], "published": [0.75]})
    figure = figures.similarity_by_variant(found, told)
    keys, values = figure.axes
    drawn = [tuple(line.get_xdata()) for line in keys.get_lines() if line.get_marker() in "os"]
    assert sorted(round(float(x), 3) for line in drawn for x in line) == [0.0, 0.1, 0.5, 0.8]
    assert [label.get_text() for label in keys.get_yticklabels()] == ["as here", "no biases"]
    assert [line.get_xdata()[0] for line in keys.get_lines() if line.get_linestyle() == "--"] == [0.75]
    assert not [line for line in values.get_lines() if line.get_linestyle() == "--"]


def test_the_table_counts_the_difference_in_spreads():
    shown = figures.trials_table(DEPTHS, PUBLISHED, ["dataset", "quantity", "layers", "layer"], "tbl-x", "A table.")
    line = shown.frame.query("dataset == 'a' and quantity == 'key' and layers == 2 and layer == 2").iloc[0]
    assert line["mean"] == pytest.approx(0.8)
    assert line["spread over seeds"] == pytest.approx(0.1)
    assert line["difference in spreads"] == "+1.0"
    assert "seeds" not in shown.frame
