"""Of the theme's two thousand icons, those that the pages show: each page loads all that there are.

A Sphinx extension (``_config.yml`` names it).
"""

import re

from sphinx.application import Sphinx

# name:[width,height,[other names],"code point",path or paths]
ICON = re.compile(r'"?([\w-]+)"?:\[\d+,\d+,(\[[^\]]*\]),"[0-9a-f]+",(?:"[^"]*"|\[[^\]]*\])\],?')


def subset(script: str, used: set[str]) -> str:
    """Font Awesome's script with no other icons than those that are used, by whichever of their names."""

    def keep(icon: re.Match) -> str:
        return icon[0] if used & {icon[1], *re.findall(r'"([\w-]+)"', icon[2])} else ""

    return ICON.sub(keep, script)


def _take_out(app: Sphinx, error: Exception | None) -> None:
    path = app.outdir / "_static" / "scripts" / "fontawesome.js"
    if error is None and path.is_file():
        pages = [
            *app.outdir.rglob("*.html"),
            *app.outdir.glob("_static/*.js"),
            *app.outdir.glob("_static/scripts/*.js"),
        ]
        texts = (page.read_text(encoding="utf-8") for page in pages if page != path)
        used = {name for text in texts for name in re.findall(r"\bfa-([a-z0-9-]+)", text)}
        path.write_text(subset(path.read_text(encoding="utf-8"), used), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("build-finished", _take_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
