"""Figures are asserted on planted tables: what is drawn, not that something is."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.anisotropy import isotropic_cosine_density, isotropic_cosine_quantile
from analysis_lib.metrics.isotropy import against_isoscore
from analysis_lib.papers.godey.drift import drift_correlation


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


@pytest.fixture
def models() -> pd.DataFrame:
    """Two models and the untrained twin of one; the other has an encoder and a decoder of three layers each."""
    rows = [
        *(("bert", layer, 0.1 * layer, True, "encoder", 768) for layer in range(5)),
        *(("bert", layer, 0.05, False, "encoder", 768) for layer in range(5)),
        *(("t5", layer, 0.3, True, "encoder" if layer < 3 else "decoder", 64) for layer in range(6)),
    ]
    table = pd.DataFrame(rows, columns=["model", "layer", "cosine", "trained", "stack", "dimensions"])
    return table.assign(ci_low=table["cosine"] - 0.01, ci_high=table["cosine"] + 0.02)


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_anisotropy_by_model_pairs_twins_and_breaks_between_stacks(models):
    figure = figures.anisotropy_by_model(models)
    trained, twin, encoder, decoder = figure.axes[0].get_lines()
    np.testing.assert_allclose(trained.get_ydata(), [0, 0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(twin.get_ydata(), 0.05)
    # The twin is told from its model by the line and an open marker, not by its shade alone.
    assert trained.get_color() == twin.get_color() != encoder.get_color()
    assert trained.get_marker() == twin.get_marker() != encoder.get_marker()
    assert (trained.get_linestyle(), twin.get_linestyle()) == ("-", "--")
    assert twin.get_markerfacecolor() == "white"
    assert twin.get_alpha() < 1
    # No line joins the last layer of the encoder to the first of the decoder.
    assert (encoder.get_xdata().tolist(), decoder.get_xdata().tolist()) == ([0, 1, 2], [3, 4, 5])
    assert encoder.get_color() == decoder.get_color()
    assert legend_of(figure) == ["bert", "t5", "the same, untrained"]
    bands = [band.get_paths()[0].vertices[:, 1] for band in figure.axes[0].collections]
    assert bands[0].min() == pytest.approx(-0.01)
    assert bands[0].max() == pytest.approx(0.42)
    assert figure.axes[0].get_ylim()[0] <= -0.01


def test_anisotropy_by_model_against_depth_ends_every_model_at_one(models):
    figure = figures.anisotropy_by_model(models.drop(columns="stack"), x="depth")
    ends = [line.get_xdata()[[0, -1]].tolist() for line in figure.axes[0].get_lines()]
    assert ends == [[0, 1]] * 3
    with pytest.raises(AnalysisError, match="layer or depth"):
        figures.anisotropy_by_model(models, x="width")


def test_anisotropy_by_model_without_a_model_says_so(models):
    (axes,) = figures.anisotropy_by_model(models.head(0)).axes
    assert [text.get_text() for text in axes.texts] == ["no model of this kind was given"]
    assert not axes.get_lines()


def test_many_models_have_a_colour_and_a_marker_of_their_own():
    table = pd.DataFrame({"model": [f"m{i}" for i in range(40)], "layer": 0, "cosine": 0.1, "trained": True})
    figure = figures.anisotropy_by_model(table.assign(ci_low=0.1, ci_high=0.1))
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines()}
    assert len(looks) == 40


def test_isotropic_density_marks_the_percentile_of_each_dimension():
    figure = figures.isotropic_density([2, 16, 256])
    lines = figure.axes[0].get_lines()
    for d, curve, mark in zip([2, 16, 256], lines[::2], lines[1::2], strict=True):
        x, y = curve.get_data()
        inside = np.abs(x) < 1
        np.testing.assert_allclose(y[inside], isotropic_cosine_density(x[inside], d))
        assert mark.get_xdata()[0] == isotropic_cosine_quantile(d)
    assert np.isfinite(figure.axes[0].get_ylim()).all()
    assert legend_of(figure) == ["d = 2", "d = 16", "d = 256"]


def test_cosine_against_dimension_draws_the_percentile_and_every_layer(models):
    figure = figures.cosine_against_dimension(models)
    axes = figure.axes[0]
    drawn = curves(figure)
    isotropic = axes.get_lines()[0]
    for d, quantile in zip(*isotropic.get_data(), strict=True):
        assert quantile == isotropic_cosine_quantile(int(d))
    assert isotropic.get_xdata()[0] < 64 < 768 < isotropic.get_xdata()[-1]
    np.testing.assert_allclose(drawn["bert"], [0, 0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(drawn["bert, untrained"], 0.05)
    places = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    np.testing.assert_allclose(places["t5"], 64, rtol=0.2)
    np.testing.assert_allclose(places["bert"], 768, rtol=0.2)
    assert places["bert"][0] != places["bert, untrained"][0]
    assert axes.get_xscale() == "log"
    assert legend_of(figure) == ["isotropic, 95th percentile", "bert", "t5", "the same, untrained"]


@pytest.fixture
def isotropy() -> pd.DataFrame:
    """A model of three layers in 101 dimensions and its untrained twin."""
    rows = [
        *(("bert", True, layer, 101, layer + 1.0, 10.1 * (layer + 1), 0.1 * (layer + 1)) for layer in range(3)),
        *(("bert", False, layer, 101, 9.0, np.inf, 0.01) for layer in range(3)),
    ]
    columns = ["model", "trained", "layer", "dimensions", "deviations", "effective_dimension", "isoscore"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(ci_low=table["deviations"] - 0.5, ci_high=table["deviations"] + 0.5)


def test_isotropy_by_model_draws_a_panel_a_measure_and_what_isotropy_has(isotropy):
    figure = figures.isotropy_by_model(isotropy)
    deviations, share, score = (curves(figure, panel) for panel in range(3))
    assert [panel["isotropic"][0] for panel in (deviations, share, score)] == [0, 1, 1]
    np.testing.assert_allclose(deviations["bert"], [1, 2, 3])
    np.testing.assert_allclose(share["bert"], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(score["bert"], [0.1, 0.2, 0.3])
    # Orthogonal vectors have no effective dimension: nothing is drawn, and no axis reaches to infinity.
    assert np.isnan(share["bert, untrained"]).all()
    assert figure.axes[1].get_ylim()[1] < 2
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log", "log"]
    np.testing.assert_allclose(figure.axes[0].get_lines()[1].get_xdata(), [0, 0.5, 1])
    # Only the deviations have an interval.
    assert [len(axes.collections) for axes in figure.axes] == [2, 0, 0]
    assert legend_of(figure) == ["isotropic", "bert", "the same, untrained"]


def test_dimensions_in_use_compare_the_origin_with_the_mean(isotropy):
    figure = figures.dimensions_in_use(against_isoscore(isotropy))
    trained, twin, diagonal = figure.axes[0].get_lines()
    np.testing.assert_allclose(trained.get_xydata(), [[10.1, 11], [20.2, 21], [30.3, 31]])
    np.testing.assert_allclose(twin.get_ydata(), 2)
    assert (trained.get_markerfacecolor() == "white", twin.get_markerfacecolor() == "white") == (False, True)
    assert (diagonal.get_xy1(), diagonal.get_xy2()) == ((1, 1), (2, 2))
    assert legend_of(figure) == ["as many", "bert", "the same, untrained"]


@pytest.fixture
def drift() -> pd.DataFrame:
    """A model whose cosine rises with its drift, one that has too few layers, and one with a constant cosine."""
    norms = {"rising": [1.0, 2, 3, 4, 5, 6], "short": [1.0, 2, 3, 4], "constant": [1.0, 2, 3, 4, 5]}
    rows = [
        (model, layer, norm, 0.5 if model == "constant" else norm / 10)
        for model, values in norms.items()
        for layer, norm in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["model", "layer", "norm_of_mean", "cosine"])


@pytest.mark.parametrize(("test", "p"), [("spearman", [2 / 720, 2 / 24]), ("pearson", [1e-12, 1e-12])])
def test_drift_pvalues_say_who_has_too_few_layers(drift, test, p):
    figure = figures.drift_pvalues(drift_correlation(drift), test)
    axes = figure.axes[0]
    line, rising, short = axes.get_lines()
    assert line.get_xdata() == [0.05, 0.05]
    assert (line.get_color(), line.get_linestyle()) == ("red", "--")
    # A perfect linear correlation has a p of 0, which is drawn at the border, with an arrow.
    assert [rising.get_xdata()[0], short.get_xdata()[0]] == pytest.approx(p)
    assert rising.get_marker() == ("o" if test == "spearman" else "<")
    assert (rising.get_markerfacecolor() == "white", short.get_markerfacecolor() == "white") == (False, True)
    assert [text.get_text() for text in axes.texts] == ["the cosine is the same in every layer"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rising (6)", "short (4)", "constant (5)"]
    assert axes.get_xscale() == "log"
    assert axes.get_xlim()[0] < min(p)


def test_drift_pvalues_refuse_another_test(drift):
    with pytest.raises(AnalysisError, match="spearman or pearson"):
        figures.drift_pvalues(drift_correlation(drift), "kendall")


def test_drift_scatter_draws_a_panel_a_model(drift):
    figure = figures.drift_scatter(drift.sample(frac=1, random_state=0).sort_values("model", ascending=False))
    assert [axes.get_title() for axes in figure.axes] == ["short: ρ = 1.00", "rising: ρ = 1.00", "constant"]
    points = figure.axes[1].collections[0].get_offsets()
    np.testing.assert_allclose(points, [[norm, norm / 10] for norm in range(1, 7)])
    assert [text.get_text() for text in figure.axes[1].texts] == ["0", "5"]


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
