"""What the theme loads on every page and few pages need: icons that none shows, and the index of the search.

A Sphinx extension (``_config.yml`` names it).
"""

import re
from pathlib import Path

from fontTools.subset import Options, Subsetter, load_font, save_font
from sphinx.application import Sphinx

# name:[width,height,[other names],"code point",path or paths]
ICON = re.compile(r'"?([\w-]+)"?:\[\d+,\d+,(\[[^\]]*\]),"([0-9a-f]+)",(?:"[^"]*"|\[[^\]]*\])\],?')
# An icon that a stylesheet shows by the font, as it is or escaped; not the rule that gives an icon its class.
STYLED = re.compile(r'"(?:\\([0-9a-f]{4})|([\ue000-\uf8ff]))"')
CLASS = re.compile(r"\.fa-[^{}]*\{[^{}]*\}")

# For a search while one types, which is not switched on; the search page has them in another place.
SEARCH = re.compile(r'\s*<script src="[./]*(_static/searchtools|_static/language_data|searchindex)\.js"></script>')


def subset(script: str, used: set[str]) -> str:
    """Font Awesome's script with no other icons than those that are used, by whichever of their names."""

    def keep(icon: re.Match) -> str:
        return icon[0] if used & {icon[1], *re.findall(r'"([\w-]+)"', icon[2])} else ""

    return ICON.sub(keep, script)


def cut_font(path: Path, characters: set[int]) -> None:
    """Leave no other characters in a font than these."""
    options = Options(flavor="woff2", layout_features=[])
    font, subsetter = load_font(path, options), Subsetter(options)
    subsetter.populate(unicodes=characters)
    subsetter.subset(font)
    save_font(font, path, options)


def _lighten(app: Sphinx, error: Exception | None) -> None:
    static = app.outdir / "_static"
    path = static / "scripts" / "fontawesome.js"
    if error is not None or not path.is_file():
        return
    pages = [*app.outdir.rglob("*.html")]
    for page in pages:
        if page.name != "search.html":
            page.write_text(SEARCH.sub("", page.read_text(encoding="utf-8")), encoding="utf-8")
    scripts = [file for file in (*static.glob("*.js"), *static.glob("scripts/*.js")) if file != path]
    texts = (file.read_text(encoding="utf-8") for file in (*pages, *scripts))
    used = {name for text in texts for name in re.findall(r"\bfa-([a-z0-9-]+)", text)}
    path.write_text(icons := subset(path.read_text(encoding="utf-8"), used), encoding="utf-8")
    styles = (CLASS.sub("", style.read_text(encoding="utf-8")) for style in static.rglob("*.css"))
    styled = (int(code, 16) if code else ord(sign) for style in styles for code, sign in STYLED.findall(style))
    codes = {*styled, *(int(icon[3], 16) for icon in ICON.finditer(icons))}
    cut_font(static / "vendor" / "fontawesome" / "webfonts" / "fa-solid-900.woff2", codes)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("build-finished", _lighten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
