"""Numbered tables, which the book can refer to, a notebook shows and a script prints."""

import re

import numpy as np
import pandas as pd

# Types of tokens as a reader would write them, in the order of legends: ``.replace(NAMES)``.
NAMES = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "first": "first token",
    "punct": "punctuation",
    "other": "other tokens",
    "all": "all tokens",
}


def plain(text: str | pd.Series) -> str | pd.Series:
    r"""Markdown that shows a text, or each of a Series, as it is: what would be markup in it is not.

    >>> print(plain("a_b $1"))
    a\_b \$1
    """
    if isinstance(text, pd.Series):
        return text.map(plain)
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split()))


class Table:
    """A numbered table: MyST for the book, where ``{numref}`` reaches its name, HTML in a notebook, text elsewhere.

    Args:
        frame: what it shows, without its index.
        name: the label, such as ``tbl-verdicts``.
        caption: a sentence below its number.
        digits: decimals of the numbers.
        metadata: kept with the table where a notebook shows it.
    """

    def __init__(self, frame: pd.DataFrame, name: str, caption: str, digits: int = 3, metadata: dict | None = None):
        self.frame, self.name, self.caption = frame, name, caption
        self.digits, self.metadata = digits, metadata or {}

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        return {}, self.metadata

    def _cell(self, value: object) -> str:
        if value is pd.NA or (isinstance(value, float) and np.isnan(value)):
            return "–"
        if isinstance(value, float):
            return f"{value:z.{self.digits}f}"  # z: no minus before a zero
        return str(value).replace("|", r"\|")

    def __repr__(self) -> str:
        text = self.frame.to_string(index=False, float_format=f"%.{self.digits}f", na_rep="–")
        return f"{self.caption}\n{text}"

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, float_format=f"%.{self.digits}f", na_rep="–")

    def _repr_markdown_(self) -> str:
        header = " | ".join(self._cell(column) for column in self.frame.columns)
        # Numbers are read column-wise: they align on the right.
        rule = "|".join("---:" if pd.api.types.is_numeric_dtype(t) else ":---" for t in self.frame.dtypes)
        rows = [" | ".join(self._cell(v) for v in row) for row in self.frame.itertuples(index=False)]
        body = "\n".join(f"| {line} |" for line in (header, *rows))
        first, _, rest = body.partition("\n")
        return f":::{{table}} {self.caption}\n:name: {self.name}\n\n{first}\n|{rule}|\n{rest}\n:::\n"


class TextTable(Table):
    """A numbered table that prints texts of a corpus as they are: what would be markup in them is not."""

    def _cell(self, value: object) -> str:
        if isinstance(value, str):
            return plain(value)
        return super()._cell(value)
