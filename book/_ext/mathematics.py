"""Mathematics as MathML, which browsers set by themselves: a page brings no script and no font for it.

A Sphinx extension (``_config.yml`` names it).
"""

import re
from collections.abc import Callable

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
# An environment that the converter knows by another name only.
RENAMED = {"{aligned}": "{align*}"}
UNKNOWN = re.compile(r">\s*(\\\w+|&)\s*<")


def mathml(latex: str, display: str) -> str:
    """A formula as MathML.

    Raises:
        ValueError: it holds what the converter does not know.
    """
    for old, new in RENAMED.items():
        latex = latex.replace(old, new)
    try:
        converted = convert(latex, display=display)
    except Exception as error:  # Each kind of mistake has a class of its own.
        raise ValueError(f"{type(error).__name__} {error}") from error
    # A bar that stands alone is no taller than what it stands beside.
    converted = re.sub(r"<mo>(&#x02016;|&#x0007C;)</mo>", r'<mo stretchy="false">\1</mo>', converted)
    if unknown := UNKNOWN.search(converted):
        raise ValueError(f"{unknown[1]} is not known")
    return converted


def _visitor(display: str, element: str, **attributes: str) -> Callable[[HTML5Translator, nodes.Element], None]:
    def visit(writer: HTML5Translator, node: nodes.Element) -> None:
        try:
            converted = mathml(node.astext(), display)
        except ValueError as error:
            logger.warning("a formula cannot be set: %s", error, location=node)
            converted = ""
        writer.body.append(writer.starttag(node, element, "", CLASS="math", **attributes) + converted + f"</{element}>")
        raise nodes.SkipNode

    return visit


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    # A long equation scrolls, which keys must reach.
    renderers = ((_visitor("inline", "span"), None), (_visitor("block", "div", tabindex="0"), None))
    app.add_html_math_renderer("mathml", *renderers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
