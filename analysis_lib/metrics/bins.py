"""Bins of tokens: what a metric keeps of each, and their tables as one."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis_lib.metrics.sums import Key, Maxima, Sums

# What tokens can be divided by, see ``capture.tokens.Bin``, and the column that says it.
BINS = {"position": "positions", "type": "type"}


def label(index: int) -> str:
    """The positions of a bin, which count from 1.

    >>> [label(index) for index in range(4)]
    ['1', '2', '3-4', '5-8']
    """
    first = 2**index // 2 + 1
    last = 2**index
    return str(last) if first == last else f"{first}-{last}"


class SumsOfBin:
    """The sums of a bin, which are kept among those of its metric: its number precedes the layer.

    Attributes:
        sums: those of the metric.
        index: the number of the bin.
    """

    def __init__(self, sums: Sums | Maxima, index: int) -> None:
        self.sums = sums
        self.index = index

    def add(self, key: Key, *values: object) -> None:
        """Add values to a sum of the bin."""
        *words, layer = key
        self.sums.add((*words, self.index, layer), *values)


def joined(
    tables: Mapping[int, pd.DataFrame], by: str, names: Sequence[str], types: Sequence[str]
) -> pd.DataFrame:
    """The tables of bins, one below the other, with a first column ``positions`` or ``type``.

    Args:
        tables: at least one, by the number of its bin.
        by: of ``BINS``.
        names: the types that tokens can have.
        types: all categories of the other columns, in order; those that occur are kept.
    """
    filled = {index: table for index, table in tables.items() if len(table)} or tables
    column = BINS[by]
    labels = [label(index) if by == "position" else names[index] for index in sorted(filled)]
    frames = []
    for code, index in enumerate(sorted(filled)):
        table = filled[index]
        bins = pd.Categorical.from_codes([code] * len(table), labels, ordered=True)
        table.insert(0, column, bins)
        frames.append(table)
    for name in frames[0].select_dtypes("category").columns.drop(column):
        occur = {kind for table in frames for kind in table[name].cat.categories}
        categories = [kind for kind in types if kind in occur]
        for table in frames:
            table[name] = table[name].cat.set_categories(categories)
    return pd.concat(frames, ignore_index=True)
