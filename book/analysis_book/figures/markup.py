"""Names, titles, texts and units of others, shown as they are wherever they enter a page.

In HTML it is ``html.escape`` that does this.
"""

import re
from urllib.parse import quote

import pandas as pd

# All that can be markup: that of ASCII.
PUNCTUATION = r"[!-/:-@\[-`{-~]"


def plain(text: str | pd.Series) -> str | pd.Series:
    r"""Markdown that shows a text, or each of a Series, as it is: nothing in it is markup.

    >>> print(plain("a_b $1"))
    a\_b \$1
    """
    if isinstance(text, pd.Series):
        return text.map(plain)
    return re.sub(PUNCTUATION, r"\\\g<0>", " ".join(text.split()))


def entities(text: str) -> str:
    """HTML that shows a text as it is, also in markdown, which would read its punctuation.

    >>> print(entities("a_b <c>"))
    a&#95;b &#60;c&#62;
    """
    return re.sub(PUNCTUATION, lambda mark: f"&#{ord(mark[0])};", text)


def code(text: str) -> str:
    """A text as code in a line of markdown, also of a table: its bars must not end a cell.

    >>> print(code("a|b"), code("`c`"))
    `a\\|b` `` `c` ``
    """
    line = " ".join(text.split()).replace("|", r"\|")
    fence = "`" * (1 + _longest_run(line))
    # Blanks part what begins or ends with a backtick from the fence, and are not shown.
    edge = " " if line[:1] in ("`", "") or line[-1:] == "`" else ""
    return f"{fence}{edge}{line}{edge}{fence}"


def code_block(text: str, language: str = "") -> str:
    """A text of several lines as code in markdown, whatever backticks it holds."""
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}{language}\n{text}\n{fence}"


def address(*parts: str) -> str:
    """The relative address of a file, by the names of its folders and its own.

    No name can be a scheme.

    >>> address("javascript:alert(1)", "100 %.html")
    'javascript%3Aalert%281%29/100%20%25.html'
    """
    return "/".join(quote(part, safe="") for part in parts)


def _longest_run(text: str) -> int:
    """The length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
