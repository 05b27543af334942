"""The words of a cell: Markdown on a page, which a script prints without its marks."""

import html
import re
from collections.abc import Iterable

# In the order in which they are taken away: fences, roles, tags of HTML, links, marks of code and
# of bold print.
_MARKS = (
    (re.compile(r"^:::.*$\n?", re.MULTILINE), ""),
    (re.compile(r"\{[a-z:]+\}`([^`<]*?)(?: <[^`>]*>)?`"), r"\1"),
    (re.compile(r"(?<!\\)</?[a-z][^>]*>"), ""),
    (re.compile(r"(?<!\\)\[([^\]]*)\]\([^)\s]*\)"), r"\1"),
    (re.compile(r"(?<!\\)(\*\*|`)"), ""),
    (re.compile(r"\\([!-/:-@\[-`{-~])"), r"\1"),
)


class Markdown:
    """A text in MyST's Markdown, as a notebook and the book show it; printed, it is plain words.

    >>> Markdown("The cosine is **0.72**, of `[CLS]` 0.9.")
    The cosine is 0.72, of [CLS] 0.9.
    """

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text
        for mark, words in _MARKS:
            text = mark.sub(words, text)
        return html.unescape(text).strip()


def enumeration(names: Iterable[str]) -> str:
    """Names as a sentence has them: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


class Finding(Markdown):
    """What a page found, and over how many: ``trainings=5, texts=300``.

    >>> Finding("Two tokens have a cosine of **0.35**.", texts=1500)
    Two tokens have a cosine of 0.35. Over 1,500 texts.

    Args:
        text: whole sentences, in MyST's Markdown.
        counts: how many of each unit, by its name in the plural.
    """

    def __init__(self, text: str, **counts: int):
        units = []
        for unit, count in counts.items():
            name = unit.replace("_", " ")
            units.append(f"{count:,} {name if count != 1 else name.removesuffix('s')}")
        super().__init__(f"{text.rstrip()} Over {enumeration(units)}.")
