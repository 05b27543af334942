"""Code with fewer marks, so that pages get lighter.

A Sphinx extension (``_config.yml`` names it). Names and punctuation, most of the pieces of a cell, have the colour of
plain code (``custom.css``), and no element of their own.
"""

from typing import ClassVar

from pygments.formatters import HtmlFormatter
from pygments.token import Name, Punctuation, Whitespace
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge


class Lighter(HtmlFormatter):
    """The formatter of Pygments, without elements for what is plain."""

    plain: ClassVar = {Name, Punctuation, Whitespace}

    def _get_css_class(self, ttype):
        return "" if ttype in self.plain else super()._get_css_class(ttype)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    PygmentsBridge.html_formatter = Lighter
    return {"parallel_read_safe": True, "parallel_write_safe": True}
