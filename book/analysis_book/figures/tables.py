"""Numbered tables, which the book can refer to, a notebook shows and a script prints."""

from collections.abc import Collection

import numpy as np
import pandas as pd

from analysis_book.figures.markup import plain

# Types of tokens as a reader would write them, in the order of legends: ``.replace(TYPE_NAMES)``.
TYPE_NAMES = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "first": "first token",
    "punct": "punctuation",
    "other": "other tokens",
    "all": "all tokens",
}
# Types of the tokens of conversations, answers and pictures, in the same way.
OTHER_NAMES = {
    "template": "template",
    "system": "system message",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "prompt": "prompt",
    "answer": "answer",
    "image": "image",
    "image_special": "marks of the image",
    "sound": "sound",
    "register": "register",
    "detection": "detection token",
}


class Table:
    """A numbered table: MyST for the book, HTML in a notebook, text elsewhere.

    ``{numref}`` reaches it by its name. Texts are shown as they are: what would be markup in them
    is not.

    Args:
        frame: what it shows, without its index.
        name: the label, such as ``tbl-verdicts``.
        caption: a sentence below its number.
        digits: decimals of the numbers.
        metadata: kept with the table where a notebook shows it.
        markup: the columns whose texts are markdown, which they are shown as.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        name: str,
        caption: str,
        digits: int = 2,
        metadata: dict | None = None,
        markup: Collection[str] = (),
    ):
        self.frame = frame
        self.name = name
        self.caption = caption
        self.digits = digits
        self.metadata = metadata or {}
        self.markup = markup

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        return {}, self.metadata

    def _cell(self, value: object) -> str:
        if value is pd.NA or (isinstance(value, float) and np.isnan(value)):
            return "–"
        if isinstance(value, float):
            return f"{value:z.{self.digits}f}"  # z: no minus before a zero
        return plain(str(value))

    def __repr__(self) -> str:
        text = self.frame.to_string(index=False, float_format=f"%.{self.digits}f", na_rep="–")
        return f"{self.caption}\n{text}"

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, float_format=f"%.{self.digits}f", na_rep="–")

    def _repr_markdown_(self) -> str:
        header = " | ".join(plain(str(column)) for column in self.frame.columns)
        rules = []
        for kind in self.frame.dtypes:
            # Numbers are read column-wise: they align on the right.
            is_number = pd.api.types.is_numeric_dtype(kind)
            align = "---:" if is_number else ":---"
            rules.append(align)
        lines = [header]
        for row in self.frame.itertuples(index=False):
            cells = []
            for column, value in zip(self.frame.columns, row, strict=True):
                cell = value if column in self.markup else self._cell(value)
                cells.append(cell)
            lines.append(" | ".join(cells))
        body = "\n".join(f"| {line} |" for line in lines)
        first, _, rest = body.partition("\n")
        rule = "|".join(rules)
        return (
            f":::{{table}} {self.caption}\n:name: {self.name}\n\n{first}\n|{rule}|\n{rest}\n:::\n"
        )
