"""What pages found, their figures, and the icons that they load."""

import base64

import nbformat
from findings import found, headline
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


def test_a_finding_is_a_bold_sentence_and_its_numbers():
    assert headline("- **It is so.** In `a`, **1.0**.\n- more") == ("It is so", "In `a`, **1.0**.")
    assert headline("- In `a`, it is **so**.") == ("", "In `a`, it is **so**.")


def test_words_for_who_cannot_see_a_figure_end_with_what_is_seen():
    picture = {"image/png": base64.b64encode(b"png").decode()}
    about = [{"figure": {"name": f"fig-{n}", "caption": "A."}, "image": {"alt": "A line."}} for n in "abc"]
    said = {"text/markdown": "In {numref}`fig-a`, `x` rises\nto **2**, \\[CLS\\] to $3$."}
    cells = [shown(picture, mystnb=about[0]), shown({"text/markdown": "no"}), shown(said, tags=["seen"])]
    cells += [shown(picture, mystnb=about[1], tags=["lead"]), shown(picture, mystnb=about[2])]
    notebook = new_notebook(cells=cells)
    found = figures(notebook)
    assert found["fig-a"].alt == "A line. In fig-a, x rises to 2, [CLS] to 3."
    assert [found[f"fig-{n}"].alt for n in "bc"] == ["A line.", "A line."]
    assert [found[f"fig-{n}"].leads for n in "abc"] == [False, True, False]
    assert notebook.cells[0].metadata["mystnb"]["image"]["alt"] == "A line."


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
