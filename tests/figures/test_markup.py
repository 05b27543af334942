"""What is not ours, as text: read back by the parsers that pages and cards are read with."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.substitution import substitution_plugin

from analysis_book.figures import Finding, Markdown, enumeration
from analysis_book.figures.markup import address, code, code_block, entities, plain

# All that markdown, MyST and HTML give a meaning, with a few letters between.
TEXTS = st.text("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \n1ax漢\u00e9")
NAMES = [
    "<b>x</b>",
    "{{x}}",
    "[a](b)",
    "a|b",
    "$a$ and $b$",
    "`c`",
    "# not a title",
    "1. one",
    "&amp;",
    "a__b__",
    "\\",
]
MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin).use(substitution_plugin)


class Words(HTMLParser):
    """The words of a page, and the tags that it is made of."""

    def __init__(self, html: str):
        super().__init__()
        self.words, self.tags = "", []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def shown(markdown: str) -> tuple[str, list[str]]:
    read = Words(MARKDOWN.render(markdown))
    return " ".join(read.words.split()), read.tags


def in_a_line(text: str) -> str:
    return " ".join(text.split())


@given(TEXTS)
@pytest.mark.parametrize("escape", [plain, lambda text: entities(in_a_line(text))])
def test_a_text_in_a_sentence_is_shown_as_it_is(escape, text):
    assert shown(f"See {escape(text)}.") == (in_a_line(f"See {in_a_line(text)}."), ["p"])


@given(TEXTS)
def test_a_text_in_a_table_is_one_cell(text):
    cells = f"| {plain(text)} | {code(text) if text.split() else 'none'} |"
    words, tags = shown(f"| one | two |\n|---|---|\n{cells}\n")
    assert words == in_a_line(f"one two {in_a_line(text)} {in_a_line(text) or 'none'}")
    assert tags.count("td") == 2
    assert {*tags} <= {"table", "thead", "tbody", "tr", "th", "td", "code"}


@given(TEXTS)
def test_a_script_prints_what_a_page_shows(text):
    assert str(Markdown(f"See {plain(text)}, **0.5**.")) == f"See {in_a_line(text)}, 0.5."


@given(TEXTS)
def test_code_is_what_it_was(text):
    block = MARKDOWN.parse(code_block(text, "bash"))
    assert [token.type for token in block] == ["fence"]
    assert block[0].content == f"{text}\n"


@pytest.mark.parametrize("name", NAMES)
def test_names_begin_a_line(name):
    assert shown(plain(name)) == (name, ["p"])


@given(
    st.text(min_size=1).filter(
        lambda name: name not in (".", "..") and "/" not in name and name.isprintable()
    )
)
def test_an_address_is_that_of_a_file_in_the_folder(name):
    link = address(name, "index.html")
    assert re.fullmatch(r"[\w.~%-]+/index\.html", link)
    assert (
        unquote(urljoin("file:///reports/index.html", link)) == f"file:///reports/{name}/index.html"
    )


def test_a_name_cannot_be_a_scheme():
    assert urljoin("file:///reports/index.html", address("javascript:alert(1)")).startswith(
        "file:///reports/java"
    )


def test_a_finding_says_over_how_many_units_it_is():
    assert Finding("So. ", texts=1500)._repr_markdown_() == "So. Over 1,500 texts."
    shown = Finding("So.", trainings=1, test_texts=300, images=2)
    assert repr(shown) == "So. Over 1 training, 300 test texts and 2 images."


def test_names_are_listed_as_in_a_sentence():
    assert enumeration(["a"]) == "a"
    assert enumeration(["a", "b"]) == "a and b"
    assert enumeration("abc") == "a, b and c"
