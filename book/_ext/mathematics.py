"""Mathematics as MathML, which browsers set by themselves: a page brings no script and no font for it.

A Sphinx extension (``_config.yml`` names it).
"""

from collections.abc import Callable

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def _visitor(element: str, **attributes: str) -> Callable[[HTML5Translator, nodes.Element], None]:
    def visit(writer: HTML5Translator, node: nodes.Element) -> None:
        try:
            converted = tex2mathml(node.astext(), as_block=element == "div")
        except MathError as error:
            logger.warning("a formula cannot be set: %s", error, location=node)
            converted = ""
        # A bar that stands alone is no taller than what it stands beside.
        converted = converted.replace("<mo>‖", '<mo stretchy="false">‖')
        writer.body.append(writer.starttag(node, element, "", CLASS="math", **attributes) + converted + f"</{element}>")
        raise nodes.SkipNode

    return visit


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    # A long equation scrolls, which keys must reach.
    app.add_html_math_renderer("mathml", (_visitor("span"), None), (_visitor("div", tabindex="0"), None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
