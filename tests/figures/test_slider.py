"""The slider of figures in a real browser, from the file system and without a network."""

import base64
import io
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis_book import figures
from analysis_book.figures.slider import png
from analysis_lib.errors import AnalysisError

HIDDEN = "display: none"


def frame(level: float, width: float = 2.0) -> Figure:
    figure = Figure(figsize=(width, 1), dpi=50)
    figure.subplots().axhline(level)
    return figure


def slider(name: str = "slider-first") -> figures.Slider:
    frames = {"0": frame(0), "10": frame(1), "<20>": frame(2)}
    return figures.Slider(frames, "norm of the bias", name, "Three lines.", "A line that")


def images(html: str) -> list[str]:
    return re.findall(r'<div class="frame"[^>]*><img[^>]*>', html)


def test_it_holds_every_frame_and_shows_the_last():
    html = slider()._repr_html_()
    found = images(html)
    assert [HIDDEN in image for image in found] == [True, True, False]
    for image in found:
        svg = base64.b64decode(re.search(r"base64,([^\"]+)", image)[1]).decode()
        assert 'width="144pt" height="72pt"' in svg
    assert len({re.search(r"base64,([^\"]+)", image)[1] for image in found}) == 3
    assert 'alt="A line that norm of the bias: &lt;20&gt;"' in found[2]
    assert "http" not in html


@pytest.mark.parametrize(
    ("frames", "said"),
    [({}, "these 0 have 0"), ({"a": frame(0), "b": frame(0, width=3)}, "these 2 have 2")],
)
def test_frames_of_no_size_or_of_two_are_refused(frames, said):
    with pytest.raises(AnalysisError, match=said):
        figures.Slider(frames, "N", "slider-x", "", "")


def test_a_figure_as_png_is_what_it_draws_in_a_few_colours():
    figure, buffer = frame(1), io.BytesIO()
    figure.savefig(buffer, format="png")
    drawn = np.asarray(Image.open(buffer).convert("RGB"), dtype=int)
    shown = base64.b64decode(png(figure))
    assert (
        np.abs(np.asarray(Image.open(io.BytesIO(shown)).convert("RGB"), dtype=int) - drawn).max()
        < 16
    )
    assert len(shown) < len(buffer.getvalue())


@pytest.fixture
def opened(page, tmp_path):
    """A page with two sliders, opened in the browser; what goes wrong on it is listed."""
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:")) or page.troubles.append(request.url)
        ),
    )
    path = tmp_path / "page.html"
    path.write_text(
        f"<!doctype html><body>{slider()._repr_html_()}{slider('slider-second')._repr_html_()}"
    )
    page.goto(path.as_uri())
    yield page
    assert page.troubles == []


def shown(page, name: str = "slider-first") -> list[int]:
    return [
        i for i, image in enumerate(page.locator(f"#{name} .frame").all()) if image.is_visible()
    ]


@pytest.mark.browser
def test_the_keyboard_moves_it_and_words_follow(opened):
    control = opened.locator("#slider-first").get_by_role("slider", name="norm of the bias")
    control.focus()
    assert shown(opened) == [2]
    opened.keyboard.press("Home")
    assert shown(opened) == [0]
    opened.keyboard.press("ArrowRight")
    assert shown(opened) == [1]
    assert control.get_attribute("aria-valuetext") == "norm of the bias: 10"
    assert opened.locator("#slider-first output").inner_text() == "norm of the bias: 10"
    assert opened.locator("#slider-first output").get_attribute("aria-live") == "polite"
    assert shown(opened, "slider-second") == [2]


@pytest.mark.browser
def test_the_button_plays_and_pauses(opened):
    # Its clock stands still but for what it is given.
    opened.clock.install(time=0)
    opened.clock.pause_at(1)
    button = opened.locator("#slider-second").get_by_role("button", name="Play")
    button.press("Enter")
    opened.clock.run_for(1000)
    assert shown(opened, "slider-second") == [0]
    opened.clock.run_for(800)
    assert shown(opened, "slider-second") == [1]
    opened.locator("#slider-second").get_by_role("button", name="Pause").press("Space")
    opened.clock.run_for(8000)
    assert shown(opened, "slider-second") == [1]
    assert shown(opened) == [2]


@pytest.mark.browser
def test_it_fits_a_phone(opened):
    opened.set_viewport_size({"width": 400, "height": 700})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 400
    for role in ("button", "slider"):
        assert opened.locator("#slider-first").get_by_role(role).is_visible()


@pytest.mark.browser
def test_without_javascript_the_last_frame_shows_and_no_control_that_does_nothing(
    browser, tmp_path
):
    path = tmp_path / "page.html"
    path.write_text(slider()._repr_html_())
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(path.as_uri())
        assert shown(page) == [2]
        assert not page.locator(".slider-controls").is_visible()


def test_a_script_prints_the_line_that_saves_it_as_a_page(tmp_path):
    shown = slider()
    assert repr(shown) == "<slider-first: Three lines. As a page: .save('slider-first.html')>"
    shown.save(tmp_path / "slider-first.html")
    saved = (tmp_path / "slider-first.html").read_text(encoding="utf-8")
    assert "<title>first</title>" in saved
    assert shown._repr_html_() in saved
    with pytest.raises(AnalysisError, match=r"saved as \.html, not as first\.png"):
        shown.save(tmp_path / "first.png")
    with pytest.raises(AnalysisError, match="cannot be written"):
        shown.save(tmp_path / "absent" / "first.html")
