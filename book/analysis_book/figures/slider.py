"""Figures behind a slider, in one piece of HTML that needs no server, no network and no library."""

import base64
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from analysis_book.figures.page import page, write
from analysis_lib.errors import AnalysisError

# Handlers stand in the elements and find their own figure: a page may have any number of sliders,
# and no global name.
_SHOW = """
const figure = this.closest('figure'), frames = figure.querySelectorAll('.frame');
frames.forEach((frame, i) => frame.style.display = i == this.value ? '' : 'none');
const label = frames[this.value].dataset.label;
figure.querySelector('output').textContent = label;
this.setAttribute('aria-valuetext', label);
"""
_PLAY = """
const figure = this.closest('figure'), range = figure.querySelector('input');
const step = () => { range.value = (+range.value + 1) % (+range.max + 1); range.dispatchEvent(new Event('input')); };
figure.playing = figure.playing ? clearInterval(figure.playing) : setInterval(step, 800);
this.textContent = figure.playing ? 'Pause' : 'Play';
"""  # noqa: E501
# Of a figure as PNG.
COLOURS = 128
# The book takes the ground away, where frames have a rendering for dark pages.
_FRAME = "background: white"
_IMAGE = "width: 100%; height: auto"
_CONTROLS = "display: flex; gap: 0.6em; align-items: center; margin: 0.4em 0"


class Slider:
    """Figures of one size, of which a slider shows one at a time, and a button one after the other.

    Without JavaScript the last one shows.

    Args:
        frames: the figures in order, by what is said of each, such as ``20``.
        label: what the slider moves along, such as ``norm of the bias``.
        name: the id of the figure on its page.
        caption: a sentence below it.
        alt: what the figures show, for readers who cannot see them.

    Raises:
        AnalysisError: no figure, or figures of different sizes.
    """

    def __init__(
        self,
        frames: Mapping[str, Figure],
        label: str,
        name: str,
        caption: str,
        alt: str,
    ):
        sizes = {tuple(figure.get_size_inches() * figure.dpi) for figure in frames.values()}
        if len(sizes) != 1:
            raise AnalysisError(
                f"a slider shows figures of one size, and these {len(frames)} have {len(sizes)}"
            )
        self.frames = frames
        self.label = label
        self.name = name
        self.caption = caption
        self.alt = alt

    def __repr__(self) -> str:
        return f"<{self.name}: {self.caption} As a page: .save('{self.name}.html')>"

    def save(self, path: Path | str) -> None:
        """Write the slider as a page that opens alone.

        Raises:
            AnalysisError: the file has another ending than ``.html``, or cannot be written.
        """
        path = Path(path)
        if path.suffix != ".html":
            raise AnalysisError(f"a slider is saved as .html, not as {path.name}")
        write(path, page(self.name.removeprefix("slider-"), self._repr_html_()))

    def _repr_html_(self) -> str:
        last = len(self.frames) - 1
        spoken = [escape(f"{self.label}: {key}") for key in self.frames]
        # Not cut to what is drawn, as single figures are: frames of one size do not jump.
        images = []
        for i, (words, figure) in enumerate(zip(spoken, self.frames.values(), strict=True)):
            style = _FRAME if i == last else f"{_FRAME}; display: none"
            picture = base64.b64encode(svg(figure).encode()).decode()
            images.append(
                f'<div class="frame" data-label="{words}" style="{style}">'
                f'<img src="data:image/svg+xml;base64,{picture}" '
                f'alt="{escape(self.alt)} {words}" style="{_IMAGE}"></div>'
            )
        lines = "\n".join(images)
        return f"""<figure id="{escape(self.name)}" class="slider">
<output aria-live="polite" style="display: block; text-align: center; font-weight: bold">{spoken[-1]}</output>
{lines}
<div class="slider-controls" style="{_CONTROLS}">
<button type="button" style="width: 4.5em" onclick="{escape(_PLAY)}">Play</button>
<input type="range" min="0" max="{last}" value="{last}" step="1" style="flex: 1; min-width: 5em"
  aria-label="{escape(self.label)}" aria-valuetext="{spoken[-1]}" oninput="{escape(_SHOW)}">
</div>
<noscript><style>.slider-controls {{ display: none !important }}</style></noscript>
<figcaption style="color: inherit">{escape(self.caption)}</figcaption>
</figure>"""  # noqa: E501


def svg(figure: Figure) -> str:
    """A figure as SVG, the same whenever it is written."""
    picture = io.StringIO()
    with rc_context({"svg.hashsalt": "analysis_lib", "svg.fonttype": "none"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def png(figure: Figure, **options: object) -> str:
    """A figure on white, as a PNG in base64; ``options`` as ``Figure.savefig`` takes them.

    A site holds hundreds of them, and figures few colours: a palette halves their size.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white", **options)
    drawn = Image.open(buffer).convert("RGB")
    small = io.BytesIO()
    drawn.quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()
