"""Repairs of the theme and other extensions: words of WAI-ARIA 1.2, buttons that lead nowhere.

A Sphinx extension (``_config.yml`` names it).
"""

from collections.abc import Callable
from functools import partial

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

# Docutils gives a reference a role that is deprecated, and unknown to the list around it.
ROLE = ('role="doc-biblioentry"', 'role="listitem"')
# The theme gives what folds a part in the sidebar a picture and no words.
FOLDS = ("<summary>", '<summary aria-label="Pages of this part">')


def _mend(
    app: Sphinx, name: str, template: str, context: dict, page: nodes.document | None
) -> None:
    context["body"] = context.get("body", "").replace(*ROLE)
    if make := context.get("generate_toctree_html"):
        context["generate_toctree_html"] = partial(_with_words, make)


def _with_words(make: Callable, kind: str, **options: object) -> object:
    made = make(kind, **options)
    return str(made).replace(*FOLDS) if kind == "sidebar" else made


def _link_to_the_repository(app: Sphinx, config: Config) -> None:
    # Without an address, Jupyter Book refuses the link, and its theme the buttons.
    options = config.html_theme_options
    options["use_repository_button"] = bool(options.get("repository_url"))
    if not options.get("repository_url"):
        options["launch_buttons"] = {}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("config-inited", _link_to_the_repository)
    # After the theme.
    app.connect("html-page-context", _mend, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
