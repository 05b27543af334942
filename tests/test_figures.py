"""Figures are asserted on planted tables: what is drawn, not that something is."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile


@pytest.fixture
def anisotropy() -> pd.DataFrame:
    layers = np.arange(4)
    hidden = pd.DataFrame({"space": "hidden", "layer": layers, "head": pd.NA, "cosine": 0.1 * layers})
    heads = pd.DataFrame(
        [
            {"space": space, "layer": layer, "head": head, "cosine": 0.1 * head}
            for space in ("query", "key", "value")
            for layer in (1, 2, 3)
            for head in (1, 2)
        ]
    )
    table = pd.concat([hidden, heads], ignore_index=True).astype({"head": "Int64"})
    return table.assign(ci_low=table["cosine"] - 0.01, ci_high=table["cosine"] + 0.02, tokens=10)


def curves(figure, panel=0) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in figure.axes[panel].get_lines()}


def test_anisotropy_by_layer_draws_the_curve_its_interval_and_isotropy(anisotropy):
    figure = figures.anisotropy_by_layer(anisotropy, width=100)
    drawn = curves(figure)
    np.testing.assert_allclose(drawn["average cosine"], [0, 0.1, 0.2, 0.3])
    assert drawn["isotropic, 95th percentile (d = 100)"][0] == isotropic_cosine_quantile(100)
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(-0.01)
    assert band.max() == pytest.approx(0.32)
    assert figure.axes[0].get_ylim()[0] <= -0.01


def test_anisotropy_by_head_draws_a_point_a_head(anisotropy):
    figure = figures.anisotropy_by_head(anisotropy, width=32)
    assert [axes.get_title() for axes in figure.axes] == ["queries", "keys", "values"]
    for axes in figure.axes:
        points = axes.get_lines()[0].get_xydata()
        assert axes.get_lines()[-1].get_ydata()[0] == isotropic_cosine_quantile(32)
        np.testing.assert_allclose(points[:, 1], [0.1, 0.2] * 3)
        # Heads lie side by side around their layer, and never nearer to another one.
        np.testing.assert_array_equal(points[:, 0].round(), [1, 1, 2, 2, 3, 3])


def test_dimension_means_name_the_outlier_and_every_layer():
    rows = [(layer, dimension, "all", 5.0 if dimension == 7 else 0.1) for layer in range(5) for dimension in range(20)]
    table = pd.DataFrame(rows, columns=["layer", "dimension", "token_type", "mean"])
    outliers = pd.DataFrame({"dimension": [7]})
    figure = figures.dimension_means(table, outliers)
    drawn = curves(figure)
    assert list(drawn) == ["0", "1", "2", "3", "4"]
    assert all(values.argmax() == 7 for values in drawn.values())
    assert [text.get_text() for text in figure.axes[0].texts] == ["7"]


def test_outlier_values_draw_a_line_a_type():
    rows = [(layer, 7, kind, i + layer) for layer in range(3) for i, kind in enumerate(("all", "cls", "other"))]
    table = pd.DataFrame(rows, columns=["layer", "dimension", "token_type", "mean"])
    figure = figures.outlier_values(table, [7])
    drawn = curves(figure)
    assert set(drawn) == {"[CLS]", "other"}
    np.testing.assert_array_equal(drawn["[CLS]"], [1, 2, 3])
    assert figure.axes[0].get_title() == "dimension 7"


def test_attention_by_token_type_averages_heads_and_tells_types_by_marker():
    rows = [
        (layer, head, kind, 0.1 * head, 0.2 * head) for layer in (1, 2) for head in (1, 3) for kind in ("cls", "other")
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "key_type", "mass", "weight"])
    weight = figures.attention_by_token_type(table, "weight")
    np.testing.assert_allclose(curves(weight)["[CLS]"], [0.4, 0.4])
    mass = figures.attention_by_token_type(table, "mass")
    np.testing.assert_allclose(curves(mass)["other"], [0.2, 0.2])
    markers = {line.get_marker() for line in weight.axes[0].get_lines()}
    assert len(markers) == 2


@pytest.fixture
def contribution_table() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [
        (layer, head, d, "all", 4.0 if d == 7 else 2.0 if d == 12 else 0.01, 1)
        for layer in (1, 2)
        for head in (1, 2)
        for d in range(20)
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "dimension", "key_type", "contribution", "pairs"])
    return table, pd.DataFrame({"layer": [0], "dimension": [7], "mean": [4.0], "zscore": [5.0]})


def test_contributions_mark_outliers_of_the_layer_that_is_read(contribution_table):
    table, outliers = contribution_table
    figure = figures.contributions(table, [1, 2], outliers, named=2)
    names = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    # Dimension 7 is an outlier of hidden layer 0, which attention layer 1 reads; layer 2 reads layer 1.
    assert names == [["7*", "12"], ["7", "12"]]
    heads = {collection.get_label() for collection in figure.axes[0].collections}
    assert heads == {"1", "2"}


def test_contributions_refuse_a_layer_that_is_not_there(contribution_table):
    table, outliers = contribution_table
    with pytest.raises(AnalysisError, match="attention layers 1 to 2"):
        figures.contributions(table, [3], outliers)


def test_a_figure_shows_itself_as_an_image(anisotropy):
    assert figures.anisotropy_by_layer(anisotropy)._repr_png_().startswith(b"\x89PNG")


def test_a_table_is_numbered_myst_and_plain_html():
    frame = pd.DataFrame({"a | b": ["x|y"], "value": [-0.04], "head": pd.array([pd.NA], dtype="Int64")})
    table = figures.Table(frame, "tbl-x", "A caption.", digits=1)
    markdown = table._repr_markdown_()
    assert markdown.startswith(":::{table} A caption.\n:name: tbl-x\n")
    # No minus before a zero, no bar that would end a cell, a dash for what is missing.
    assert r"| x\|y | 0.0 | – |" in markdown
    assert r"a \| b" in markdown
    assert "<table" in table._repr_html_()


def test_published_beside_ours_shows_both():
    comparison = pd.DataFrame(
        {
            "layer": 2,
            "dimension": 308,
            "key_type": "cls",
            "head": [1, 2],
            "published": [11.9, 21.9],
            "ours": [12.0, 21.0],
        }
    )
    markdown = figures.published_beside_ours(comparison, "tbl-p", "c")._repr_markdown_()
    assert "12.0 (11.9) | 21.0 (21.9)" in markdown
