"""What pages found, and their figures."""

import base64
import re

import altair as alt
import nbformat
import pandas as pd
from copying import csv_of
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebooks import Drawn, figures, finding, lead

from analysis_book.figures import Slider, View, plain
from analysis_book.figures.style import themed
from analysis_book.figures.view import Control

NUMBER = re.compile(r"\d*\.?\d+")
PICTURE = {"image/png": base64.b64encode(b"png").decode()}


def shown(*data: dict, **of_cell) -> nbformat.NotebookNode:
    """A cell that has displayed something."""
    return new_code_cell(
        "", outputs=[new_output("display_data", one) for one in data], metadata=of_cell
    )


def figure(name: str, data: dict, **of_cell) -> nbformat.NotebookNode:
    about = {"figure": {"name": name, "caption": "A."}, "image": {"alt": "A line."}}
    return shown(data, mystnb=about, **of_cell)


def test_the_finding_is_what_the_tagged_cell_displays():
    cells = [
        new_markdown_cell("# A"),
        shown({"text/markdown": "other"}),
        shown(
            {"text/plain": "1"}, {"text/markdown": "It is **so**."}, tags=["hide-input", "found"]
        ),
    ]
    assert finding(new_notebook(cells=cells)) == "It is **so**."
    assert finding(new_notebook(cells=cells[:2])) == ""


def test_a_large_table_is_a_compressed_file_that_pandas_and_scripts_read(tmp_path):
    large = "x,y\n" + "1.2345,0.5\n" * 50_000
    cell = figure("fig-a", PICTURE | {"text/csv": large})
    ((name, drawn),) = figures(new_notebook(cells=[cell])).items()
    assert csv_of(cell) == f"{name}.csv.gz"
    (tmp_path / csv_of(cell)).write_bytes(drawn.files["csv.gz"])
    table = pd.read_csv((tmp_path / csv_of(cell)).as_uri())
    assert table.shape == (50_000, 2)
    small = figure("fig-a", PICTURE | {"text/csv": "x\n1\n"})
    assert csv_of(small) == "fig-a.csv"


def test_a_figure_has_its_words_and_its_files():
    notebook = new_notebook(
        cells=[shown({"text/plain": "x"}), figure("fig-a", PICTURE | {"text/csv": "x\n1\n"})]
    )
    assert figures(notebook) == {
        "fig-a": Drawn("A.", "A line.", False, {"png": b"png", "csv": b"x\n1\n"})
    }


def test_one_figure_leads_its_page_and_what_drew_nothing_is_none():
    cells = [
        figure("fig-a", PICTURE),
        figure("fig-b", PICTURE, tags=["lead"]),
        figure("fig-c", {"text/plain": "x"}),
    ]
    assert {name: drawn.leads for name, drawn in figures(new_notebook(cells=cells)).items()} == {
        "fig-a": False,
        "fig-b": True,
    }


def test_the_lead_is_the_tagged_figure_or_the_first_and_a_page_of_tables_has_none():
    table = shown({"text/markdown": "a table"})
    first, second = figure("fig-a", PICTURE), figure("fig-b", PICTURE)
    assert lead(new_notebook(cells=[table, first, second])) == first
    second.metadata["tags"] = ["lead"]
    assert lead(new_notebook(cells=[table, first, second])) == second
    assert lead(new_notebook(cells=[table])) is None


def test_a_slider_is_the_figure_that_it_begins_with():
    frames = {"first": Figure((1, 1)), "last": Figure((1, 1))}
    frames["last"].text(0, 0, "last")
    slider = Slider(frames, "step", "slider-a", "A < B.", "a line")
    found = figures(new_notebook(cells=[shown({"text/html": slider._repr_html_()})]))["slider-a"]
    assert (found.caption, found.alt) == (plain("A < B."), "a line step: last")
    assert found.files["png"].startswith(b"\x89PNG")


def test_a_view_is_the_picture_that_stands_for_it():
    rows = pd.DataFrame({"x": [1, 2], "y": [3, 4]})
    panel = alt.Chart(alt.NamedData("rows")).mark_point().encode(x="x:Q", y="y:Q")
    controls = [Control("place", "Place", None, 1)]
    said = [("rows", "datum.x == place", "datum.y")]
    panels = [panel.properties(description="Two points")]
    view = View("fig-points", "A < B.", {"rows": rows}, [], panels, controls, said)
    found = figures(new_notebook(cells=[shown(view._repr_mimebundle_(), tags=["lead"])]))[
        "fig-points"
    ]
    assert (found.caption, found.alt, found.leads) == (plain("A < B."), view.alt, True)
    assert view.alt == "Two points"
    drawn, kept = themed(view.svg), found.files["svg"].decode()
    assert len(kept) < len(drawn)
    assert NUMBER.sub("", kept) == NUMBER.sub("", drawn)
    for exact, cut in zip(NUMBER.findall(drawn), NUMBER.findall(kept), strict=True):
        assert abs(float(exact) - float(cut)) < 0.01
    assert found.files["png"].startswith(b"\x89PNG")
    assert found.files["csv"].startswith(b"x,y\n1,")
