"""The look of figures: ink for dark pages, one colour for each type of token, bands."""

import ast
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import seaborn as sns
from matplotlib.colors import to_rgb

from analysis_book import figures
from analysis_book.figures import exploring, style
from analysis_book.figures.tables import TYPE_NAMES
from analysis_lib.corpora.token_types import (
    ANSWER_TYPES,
    CONVERSATION_TYPES,
    PAIR_TYPES,
    TOKEN_TYPES,
)

BOOK = Path(__file__).resolve().parents[2] / "book"
# Columns whose values are types of tokens.
TYPE_COLUMNS = {"key_type", "token_type", "type"}
# What the theme of the site has on a dark page.
GROUND = "#14181e"


@pytest.fixture(autouse=True)
def _theme():
    with plt.rc_context():
        figures.theme()
        yield
        plt.close("all")


def contrast(colour: str, ground: str) -> float:
    """The ratio of WCAG 2, from 1 to 21."""

    def luminance(name: str) -> float:
        parts = []
        for value in to_rgb(name):
            parts.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
        red, green, blue = parts
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(colour), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


def svg(figure: plt.Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    return file.getvalue()


def dark_inks(picture: str) -> dict[tuple[str, str], str]:
    """What stands for a fill or a stroke on a dark page, by the rules of a picture."""
    rule = r'#dark:target \[style\*="(\w+): (#\w+)"\] \{ (\w+): (#\w+) !important \}'
    rules = re.findall(rule, picture)
    assert all(inked == changed for inked, _, changed, _ in rules)
    return {(inked, ink): light for inked, ink, _, light in rules}


def test_on_a_dark_page_ink_is_light_and_colours_stay():
    table = pd.DataFrame({"x": [0, 1, 0, 1], "y": [0, 1, 1, 0], "kind": list("aabb")})
    axes = sns.lineplot(table, x="x", y="y", hue="kind", style="kind", markers=True)
    axes.axhline(0.5, color="black", linestyle=":")
    picture = figures.themed(svg(axes.figure))
    inks = dark_inks(picture)
    for colour in ("#0173b2", "#de8f05"):
        assert colour in picture
        assert not {("fill", colour), ("stroke", colour)} & inks.keys()
        assert contrast(colour, GROUND) > 3
    letters = re.findall(r"<text[^>]*fill: (#\w+)", picture)
    assert len(letters) > 4
    assert min(contrast(inks["fill", ink], GROUND) for ink in letters) > 7
    # What has no colour is black where the root has none.
    assert contrast(re.search(r"#dark:target \{ fill: (#\w+)", picture)[1], GROUND) > 7
    assert "stroke: #000000" in picture
    assert contrast(inks["stroke", "#000000"], GROUND) > 7
    # The edge of a marker parts it from its line, as the ground does; where it is drawn has it.
    assert inks["stroke", "#ffffff"] == GROUND
    assert re.search(r"<use [^>]*stroke: #ffffff", picture)
    assert not re.search(r'<path id="[^>]*stroke: #', picture)


def test_a_heat_map_and_its_numbers_are_as_they_were_on_a_dark_page():
    table = pd.DataFrame([[0.0, 0.5], [0.7, 1.0]])
    axes = sns.heatmap(table, cmap="cividis", annot=True, cbar=False)
    picture = figures.themed(svg(axes.figure))
    inks = dark_inks(picture)
    cells = re.search(r'<g id="QuadMesh_1">.*?</g>', picture, re.DOTALL)[0]
    numbers = re.findall(r"<text[^>]*fill: (#\w+)[^>]*>(\d\.?\d*)</text>", picture)
    inside = [ink for ink, number in numbers if number in ("0.5", "0.7")]
    assert len(inside) == 2
    for kind, ink in inks:
        assert f"{kind}: {ink}" not in cells
    assert not any(("fill", ink) in inks for ink in inside)


def test_each_type_of_token_has_a_colour_of_its_own_by_either_name():
    colours = figures.TYPE_COLOURS
    assert len({colours[kind] for kind in TYPE_NAMES}) == len(TYPE_NAMES)
    for kind, name in TYPE_NAMES.items():
        assert colours[kind] == colours[name]
        assert contrast(colours[kind], "white") > 3
        dark = style.DARK_INKS.get(f"stroke: {colours[kind]}", colours[kind])
        assert contrast(dark, "black") > 3


def other_palettes(code: str) -> list[str]:
    """The calls that draw types of tokens in other colours than those of the book."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    others = []
    for call in calls:
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        column = words.get("hue", "").strip("'")
        if column in TYPE_COLUMNS and words.get("palette") != "figures.TYPE_COLOURS":
            others.append(ast.unparse(call))
    return others


def test_other_palettes_are_seen():
    assert other_palettes('sns.barplot(table, hue="key_type")')
    assert other_palettes('sns.barplot(table, hue="type", palette="colorblind")')
    assert not other_palettes('sns.barplot(table, hue="type", palette=figures.TYPE_COLOURS)')
    assert not other_palettes('sns.barplot(table, hue="model")')


def test_every_notebook_draws_types_of_tokens_in_their_colours():
    drawn, others = 0, []
    for path in BOOK.rglob("*.ipynb"):
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code" and not cell.source.startswith("%"):
                drawn += cell.source.count("palette=figures.TYPE_COLOURS")
                others += [(path.stem, call) for call in other_palettes(cell.source)]
    assert not others
    assert drawn > 10


def test_views_draw_types_of_tokens_in_the_colours_of_figures():
    colours = dict(zip(TYPE_NAMES, exploring.LOOKS[0], strict=True))
    # The ink of the page in place of black.
    assert colours.pop("all") == "currentColor"
    assert colours == {kind: figures.TYPE_COLOURS[kind] for kind in colours}


@pytest.mark.parametrize("palette", [None, {"b": "#ff0000", "a": "#00ff00"}])
def test_a_band_has_the_colour_of_its_line(palette):
    table = pd.DataFrame({"x": [0, 1, 0, 1], "y": [0, 1, 1, 0], "kind": list("aabb")})
    table["ci_low"], table["ci_high"] = table["y"] - 1, table["y"] + 1
    axes = sns.lineplot(table, x="x", y="y", hue="kind", palette=palette, errorbar=None)
    figures.band("x", data=table, hue="kind", palette=palette)
    lines = [to_rgb(line.get_color()) for line in axes.lines[:2]]
    bands = [tuple(part.get_facecolor()[0][:3]) for part in axes.collections]
    assert bands == lines


@pytest.mark.parametrize("types", [TOKEN_TYPES, CONVERSATION_TYPES, ANSWER_TYPES, PAIR_TYPES])
def test_types_of_one_table_have_colours_of_their_own(types):
    colours = [figures.TYPE_COLOURS[kind] for kind in types]
    assert len({*colours}) == len(types)
    assert all(contrast(colour, "white") > 3 for colour in colours)
