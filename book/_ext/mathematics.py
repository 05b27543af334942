"""Mathematics as MathML, which browsers set by themselves, without a script or a font.

A Sphinx extension (``_config.yml`` names it).
"""

import re
from collections.abc import Callable

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

# What the converter hands on as it is.
UNKNOWN = re.compile(r">\s*(\\\w+|&)\s*<")


def _visitor(
    display: str, element: str, **attributes: str
) -> Callable[[HTML5Translator, nodes.Element], None]:
    def visit(writer: HTML5Translator, node: nodes.Element) -> None:
        try:
            converted = convert(node.astext(), display=display)
            unknown = UNKNOWN.search(converted)
            problem = f"{unknown[1]} is not known" if unknown else ""
        except Exception as error:  # Each kind of mistake has a class of its own.
            converted = ""
            problem = f"{type(error).__name__} {error}"
        if problem:
            logging.getLogger(__name__).warning(
                "a formula cannot be set: %s", problem, location=node
            )
        # A bar that stands alone is no taller than what it stands beside.
        converted = re.sub(
            r"<mo>(&#x02016;|&#x0007C;)</mo>", r'<mo stretchy="false">\1</mo>', converted
        )
        start = writer.starttag(node, element, "", CLASS="math", **attributes)
        writer.body.append(f"{start}{converted}</{element}>")
        raise nodes.SkipNode

    return visit


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    inline = _visitor("inline", "span")
    # A long equation scrolls, which keys must reach.
    block = _visitor("block", "div", tabindex="0")
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
