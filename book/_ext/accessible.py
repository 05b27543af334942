"""What other extensions write, in the words of WAI-ARIA 1.2.

A Sphinx extension (``_config.yml`` names it).
"""

from docutils import nodes
from sphinx.application import Sphinx

# Docutils gives a reference a role that is deprecated, and unknown to the list around it.
ROLES = {'role="doc-biblioentry"': 'role="listitem"'}


def _mend(app: Sphinx, name: str, template: str, context: dict, page: nodes.document | None) -> None:
    for old, new in ROLES.items():
        context["body"] = context.get("body", "").replace(old, new)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("html-page-context", _mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
