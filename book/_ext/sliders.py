"""Sliders as figures: with a number, a name to refer to, and files below them, as the others have.

A Sphinx extension (``_config.yml`` names it).
"""

import html

from docutils import nodes
from pages import CAPTION, SLIDER
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class Number(SphinxTransform):
    """Put every slider, which a notebook shows as HTML, into a figure of the page, before labels are collected."""

    default_priority = 800

    def apply(self) -> None:
        for node in list(self.document.findall(nodes.raw)):
            if slider := SLIDER.search(node.astext()):
                caption = nodes.caption("", html.unescape(CAPTION.search(slider["inner"])["caption"]))
                inner, name = nodes.raw("", CAPTION.sub("", slider["inner"]), format="html"), slider["name"]
                figure = nodes.figure("", inner, caption, ids=[name], names=[name], classes=["slider"])
                self.document.note_explicit_target(figure)
                node.replace_self(figure)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_transform(Number)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
