"""Sliders as figures: with a number, a name to refer to, files below them, and frames that are not in the page.

A Sphinx extension (``_config.yml`` names it).
"""

import base64
import html
import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from docutils import nodes
from pages import CAPTION, FRAME, SLIDER, keep
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

FOLDER = Path("_static", "frames")


class Number(SphinxTransform):
    """Put every slider, which a notebook shows as HTML, into a figure of the page, before labels are collected."""

    default_priority = 800

    def apply(self) -> None:
        for node in list(self.document.findall(nodes.raw)):
            if slider := SLIDER.search(node.astext()):
                name, caption = slider["name"], html.unescape(CAPTION.search(slider["inner"])["caption"])
                caption, inner = nodes.caption("", caption), CAPTION.sub("", slider["inner"])
                inner = nodes.raw("", FRAME.sub(partial(self._filed, name, itertools.count()), inner), format="html")
                figure = nodes.figure("", inner, caption, ids=[name], names=[name], classes=["slider"])
                self.document.note_explicit_target(figure)
                node.replace_self(figure)

    def _filed(self, name: str, numbers: Iterator[int], frame: re.Match) -> str:
        """The frame in a file, which a browser asks for when it is to be shown."""
        address = keep(self.env, FOLDER / f"{name}-{next(numbers)}.png", base64.b64decode(frame["picture"]))
        return f'<img loading="lazy" src="{address}" alt="{frame["alt"]}"'


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_transform(Number)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
