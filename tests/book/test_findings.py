"""What pages found, their figures, and the icons that they load."""

import base64

import nbformat
from findings import found
from icons import subset
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import Drawn, figures

from analysis_lib.figures import Slider


def shown(data: dict, metadata: dict | None = None, **of_cell) -> nbformat.NotebookNode:
    """A cell that has displayed something."""
    return new_code_cell("", outputs=[new_output("display_data", data, metadata=metadata or {})], metadata=of_cell)


def test_what_is_found_is_the_output_of_the_tagged_cell():
    cells = [
        new_markdown_cell("# A"),
        shown({"text/markdown": "other"}),
        shown({"text/markdown": "- one\n- two"}, tags=["found"]),
    ]
    assert found(new_notebook(cells=cells)) == "- one\n- two"
    assert found(new_notebook(cells=cells[:2])) == ""


def test_a_figure_has_its_words_and_its_files():
    picture = {"image/png": base64.b64encode(b"png").decode(), "text/csv": "x\n1\n"}
    about = {"figure": {"name": "fig-a", "caption": "A."}, "image": {"alt": "a line"}}
    (drawn,) = figures(new_notebook(cells=[shown({"text/plain": "x"}), shown(picture, mystnb=about)])).items()
    assert drawn == ("fig-a", Drawn("A.", "a line", {"png": b"png", "csv": b"x\n1\n"}))


def test_a_slider_is_the_figure_that_it_begins_with():
    frames = {"first": Figure((1, 1)), "last": Figure((1, 1))}
    frames["last"].text(0, 0, "last")
    slider = Slider(frames, "step", "slider-a", "A < B.", "a line")
    found = figures(new_notebook(cells=[shown({"text/html": slider._repr_html_()})]))["slider-a"]
    assert (found.caption, found.alt) == ("A < B.", "a line step: last")
    assert f'{base64.b64encode(found.files["png"]).decode()}" alt="a line step: last"' in slider._repr_html_()


def test_icons_are_kept_by_any_of_their_names():
    kept = 'bars:[448,512,["navicon"],"f0c9","M0"],"angle-left":[320,512,[8249],"f104",["M1","M2"]],'
    script = "x={" + kept + 'xmark:[1,2,[],"f0","M3"]},y'
    assert subset(script, {"navicon", "angle-left"}) == "x={" + kept + "},y"
    assert subset(script, set()) == "x={},y"
