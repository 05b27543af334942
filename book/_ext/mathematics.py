"""MathJax out of its wheel: no address outside the site is loaded.

A Sphinx extension (``_config.yml`` names it).
"""

import shutil

from sphinx.application import Sphinx

from analysis_lib.corpora import packages

# What no browser asks MathJax for here: other inputs and outputs.
WITHOUT = shutil.ignore_patterns("adaptors", "asciimath*", "mml*", "*svg*", "tex-chtml*", "node-main.js")


def _copy(app: Sphinx, error: Exception | None) -> None:
    mathjax = packages.extracted("django-static-mathjax", "mathjax/static/mathjax/es5/")
    shutil.copytree(mathjax, app.outdir / "_static" / "mathjax", ignore=WITHOUT, dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
