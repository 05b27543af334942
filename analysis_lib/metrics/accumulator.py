"""What every metric is: sums over utterances, in float64, that merge; and the tables they give."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import numpy as np
import pandas as pd
from torch import Tensor

from analysis_lib.capture import Activations
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.intervals import jackknife_interval

# Utterance i of a corpus belongs to group i mod GROUPS; the jackknife leaves one group out at a time.
GROUPS = 20
# The spaces whose vectors are compared, in the order of the tables.
VECTOR_SPACES = ("hidden", "query", "key", "value")

Key = tuple[str | int, ...]
Sums = dict[Key, np.ndarray]


class Metric(ABC):
    """An accumulator of sums: ``update`` takes a layer of a batch in, ``merge`` another accumulator, ``table`` ends.

    A subclass says what it needs and how it goes from sums to a table. All state is in ``sums``: an array for
    each key, whose first axis is the jackknife group, or has length 1 where a sum is too large to be kept once a
    group. It does not grow with the corpus.

    Attributes:
        name: of the table.
        needs: the spaces of ``capture.SPACES``, and ``weights``, that ``update`` reads.
        interval: the column whose jackknife interval the table gives as ``ci_low`` and ``ci_high``, if any.
        of_pairs_within_utterances: whether it compares vectors of one utterance.
        on_request: whether it costs so much that ``all`` leaves it out.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    interval: ClassVar[str | None] = None
    of_pairs_within_utterances: ClassVar[bool] = False
    on_request: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sums: Sums = {}

    @abstractmethod
    def update(self, activations: Activations) -> None:
        """Add one layer of one batch."""

    @abstractmethod
    def points(self, sums: Sums) -> pd.DataFrame:
        """The table, without intervals, from sums that have no group axis any more."""

    def fresh(self) -> Self:
        """An empty accumulator of the same metric."""
        return type(self)()

    def merge(self, other: Self) -> None:
        """Add what ``other`` has summed; the result is that of one pass over both corpora."""
        for key, value in other.sums.items():
            if key in self.sums:
                self.sums[key] += value
            else:
                # A copy: the sums of the other must not change with ours.
                self.sums[key] = value.copy()

    def table(self) -> pd.DataFrame:
        """The tidy table of everything summed so far.

        Raises:
            AnalysisError: there is too little to say anything, such as a single token.
        """
        table = self.points(self.total())
        if self.interval is None:
            return table
        point, last = table[self.interval].to_numpy(), table.columns[-1]
        rest = [self.without(group) for group in self.occupied_groups()]
        left_out = np.reshape([part[self.interval] for part in rest], (-1, *point.shape))
        # What a row counts is its last column: a group that takes nothing away from it has no part in it.
        part = np.reshape([part[last] != table[last] for part in rest], left_out.shape)
        low, high = jackknife_interval(point, left_out, part)
        position = table.columns.get_loc(self.interval) + 1
        table.insert(position, "ci_low", low)
        table.insert(position + 1, "ci_high", high)
        return table

    def without(self, group: int) -> pd.DataFrame:
        """The table of the corpus without one group of utterances, and without intervals."""
        rest = {key: value.sum(0) - value[group] for key, value in self.sums.items()}
        # The only utterance of its kind may be in the group: what is left is NaN, and so is its interval.
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.points(rest)

    def total(self) -> Sums:
        """The sums over all groups."""
        if not self.sums:
            raise AnalysisError(f"{self.name}: nothing was measured")
        return {key: value.sum(0) for key, value in self.sums.items()}

    def occupied_groups(self) -> list[int]:
        """The groups that hold an utterance."""
        grouped = [value for value in self.sums.values() if len(value) == GROUPS]
        filled = np.any([value.reshape(GROUPS, -1).any(1) for value in grouped], axis=0)
        return np.flatnonzero(filled).tolist()

    def _add(self, key: Key, values: Tensor, activations: Activations) -> None:
        """Add per-utterance values (first axis) to the sums of their groups."""
        groups = activations.tokens.groups
        flat = values.reshape(len(groups), -1)
        # Sums over the few utterances of a batch may run in float32; those over batches may not.
        part = flat.new_zeros(GROUPS, flat.shape[1]).index_add_(0, groups, flat)
        self._accumulate(key, part.double().reshape(GROUPS, *values.shape[1:]), activations)

    def _add_whole(self, key: Key, values: Tensor, activations: Activations) -> None:
        """Add a sum over all utterances of the batch, which no group can be taken out of again."""
        self._accumulate(key, values.double().unsqueeze(0), activations)

    def _accumulate(self, key: Key, values: Tensor, activations: Activations) -> None:
        part = values.cpu().numpy()
        if not math.isfinite(part.sum()):
            raise AnalysisError(
                f"{self.name}: layer {activations.layer} has vectors that are not finite (NaN or infinity): "
                f"the weights or the precision of this model do not carry this corpus"
            )
        if key in self.sums:
            self.sums[key] += part
        else:
            self.sums[key] = part


def head_column(heads: int | None, rows: int) -> pd.Series:
    """Heads counted from 1, or as missing where the space has none."""
    values = [pd.NA] * rows if heads is None else range(1, heads + 1)
    return pd.Series(values, dtype="Int64")


def space_frame(space: str, layer: int, columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """The rows of one space in one layer: one row per head, or one row for the hidden states.

    ``columns`` holds a value a head (hidden states count as one head).
    """
    rows = len(next(iter(columns.values())))
    head = head_column(None if space == "hidden" else rows, rows)
    return pd.DataFrame({"space": space, "layer": layer, "head": head, **columns})


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows by space (in the order of ``VECTOR_SPACES``), layer and head."""
    rank = table["space"].map({space: i for i, space in enumerate(VECTOR_SPACES)})
    order = table.assign(_rank=rank).sort_values(["_rank", "layer", "head"], kind="stable").index
    return table.loc[order].reset_index(drop=True)
