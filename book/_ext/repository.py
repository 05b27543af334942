"""Links to the repository, and launch buttons: they appear once ``_config.yml`` has its address.

Without one, Jupyter Book refuses the link, and its theme the buttons.
"""

from sphinx.application import Sphinx
from sphinx.config import Config


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("config-inited", _show_or_hide)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _show_or_hide(app: Sphinx, config: Config) -> None:
    options = config.html_theme_options
    options["use_repository_button"] = bool(options.get("repository_url"))
    if not options.get("repository_url"):
        options["launch_buttons"] = {}
