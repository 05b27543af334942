"""Figures carry what they are drawn from, and the files that readers take along are these."""

import base64
import io
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import seaborn as sns
from matplotlib.figure import Figure

from analysis_book import figures
from analysis_book.build import recording
from analysis_book.build.recording import _noting, drawn, of_figure, of_frames

TABLE = pd.DataFrame({"x": [1, 2, 3], "y": [2.0, 4.0, 3.5], "model": list("aab")})


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def read(figure) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(drawn(figure).to_csv(index=False)))


@pytest.mark.parametrize("draw", [sns.lineplot, sns.scatterplot, sns.relplot, sns.catplot])
def test_a_figure_has_the_table_that_seaborn_drew(draw):
    pd.testing.assert_frame_equal(
        read(_noting(draw)(TABLE, x="x", y="y", hue="model").figure), TABLE
    )


def test_tables_of_one_figure_stand_below_each_other_and_a_named_index_is_a_column():
    line = _noting(sns.lineplot)
    axes = line(data=TABLE.set_index("model"), x="x", y="y")
    line(data=TABLE.assign(z=0), x="x", y="y", ax=axes)
    found = read(axes.figure)
    assert found["table"].tolist() == [0, 0, 0, 1, 1, 1]
    assert set(found) == {"table", "x", "y", "model", "z"}
    assert found["z"].isna().tolist() == [True] * 3 + [False] * 3


def test_a_table_drawn_twice_is_there_once():
    line = _noting(sns.lineplot)
    axes = line(TABLE, x="x", y="y")
    line(TABLE, x="x", y="y", ax=axes)
    assert len(read(axes.figure)) == 3


def test_an_output_says_what_its_csv_does_not(monkeypatch):
    """Which variables its tables were, and how a table is made of it that draws the same."""
    table = TABLE.assign(size=list("132"), kind=pd.Categorical(list("aab"), ["b", "a"]))
    shell = SimpleNamespace(user_ns={"table": table, "_1": table, "other": TABLE})
    monkeypatch.setattr(recording, "get_ipython", lambda: shell)
    line = _noting(sns.lineplot)
    axes = line(table, x="x", y="y")
    line(TABLE.set_index("model"), x="x", y="y", ax=axes)
    _, metadata = of_figure(axes.figure)
    first = {"names": ["table"], "columns": [*table], "index": []}
    first |= {"texts": ["size"], "orders": {"kind": ["b", "a"]}}
    second = {"names": [], "columns": ["model", "x", "y"], "index": ["model"]}
    second |= {"texts": [], "orders": {}}
    assert metadata == {"tables": [first, second]}


def test_without_seaborn_there_are_the_points_of_lines_or_nothing():
    figure, axes = plt.subplots()
    assert drawn(figure) is None
    assert of_figure(figure)[1] == {}
    axes.plot([1, 2], [3, 4], label="a")
    assert read(figure).to_numpy().tolist() == [["a", 1, 3], ["a", 2, 4]]


def test_a_slider_has_the_tables_of_its_frames():
    """Also where these have a column of what the slider moves along."""
    frames = {
        str(step): _noting(sns.scatterplot)(TABLE, x="x", y="y", ax=Figure().subplots()).figure
        for step in (1, 2)
    }
    shown = of_frames(figures.Slider(frames, "x", "slider-a", "A.", "dots"))
    found = pd.read_csv(io.StringIO(shown["text/csv"]))
    assert found["frame"].tolist() == [1, 1, 1, 2, 2, 2]
    assert found[list(TABLE)].to_numpy().tolist() == 2 * TABLE.to_numpy().tolist()


def test_a_slider_has_the_picture_that_it_begins_with_as_svg_and_png():
    frames = {"1": Figure(), "2": Figure()}
    frames["2"].text(0, 0, "the last")
    shown = of_frames(figures.Slider(frames, "step", "slider-a", "A.", "text"))
    assert [*shown] == ["image/svg+xml", "image/png"]
    assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert "the last" in shown["image/svg+xml"]
    assert ElementTree.fromstring(shown["image/svg+xml"]).tag == "{http://www.w3.org/2000/svg}svg"
