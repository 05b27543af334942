"""What every metric is: sums over utterances, in float64, that merge; and the tables they give."""

import copy
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis_lib.capture import Activations, Owners, Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models import TOKEN_TYPES

# The jackknife leaves one group of a corpus out at a time, see ``Corpus.groups``.
GROUPS = 20
# The group of sums that are kept over all groups at once.
WHOLE = -1
# The spaces whose vectors are compared, in the order of the tables.
VECTOR_SPACES = ("hidden", "final", "query", "key", "value")
# Of these, spaces without heads.
WHOLE_SPACES = ("hidden", "final")
# In the order of the tables.
KEY_TYPES = ["all", *TOKEN_TYPES, "sink"]

Key = tuple[str | int, ...]
Sums = dict[Key, np.ndarray]
Columns = dict[str, np.ndarray]


class SumsOfPart(Sums):
    """The sums without some groups; of their table, only some columns are read, if these are named."""

    columns: frozenset[str] = frozenset()


class GroupSums(NamedTuple):
    """A sum over the utterances of each of some jackknife groups, in float64.

    Attributes:
        groups: those that have utterances so far, or ``WHOLE`` alone.
        values: of shape group x ..., on the device that summed them; or as arrays.
    """

    groups: tuple[int, ...]
    values: Tensor | np.ndarray


class Metric(ABC):
    """An accumulator of sums over utterances, which gives a table.

    A measurement calls ``update`` for every layer of every batch, on many copies of the metric at once if there are
    many workers, joins them with ``merge``, and asks for the ``table``. A metric of your own is a subclass that says
    what it needs, adds to its sums in ``update``, and goes from sums to rows in ``points``:

    >>> class LongVectors(Metric):
    ...     name, needs, interval, counts = "long_vectors", frozenset({"hidden"}), "share", "tokens"
    ...     def __init__(self, norm: float = 1.0):
    ...         super().__init__()
    ...         self.norm = norm
    ...     def update(self, activations):
    ...         hidden, layer = activations.spaces["hidden"], activations.layer
    ...         self.add(("long", layer), (hidden.norms > self.norm).sum(-1), activations)
    ...         self.add(("tokens", layer), hidden.counts.unsqueeze(1), activations)
    ...     def points(self, sums):
    ...         rows = [(i, float(sums[q, i][0]), float(sums["tokens", i][0])) for q, i in sums if q == "long"]
    ...         table = pd.DataFrame(rows, columns=["layer", "long", "tokens"])
    ...         return table.assign(share=table["long"] / table["tokens"])[["layer", "share", "tokens"]]
    >>> LongVectors(norm=10).fresh().norm
    10

    ``measure(model, corpus, [LongVectors(norm=10)])`` takes it, with any number of workers or on a cluster. What is in
    ``activations`` is described by :class:`~analysis_lib.capture.Activations` and
    :class:`~analysis_lib.capture.Vectors`, whose ``values`` are utterance x head x token x dim, ``norms`` utterance x
    head x token and ``counts`` utterance; hidden states have one head.

    All that changes is in ``sums``: for each key, the sums of the jackknife groups (or of all utterances at once, see
    :meth:`add_whole`). Their size does not depend on the corpus. A key is a tuple of texts and whole numbers; the last
    is the layer. Other attributes are parameters: set in ``__init__``, never changed, and part of what is kept is known
    by.

    Attributes:
        name: of the table.
        needs: the spaces of ``capture.SPACES``, and ``weights`` or ``scores``, that ``update`` reads.
        interval: the column whose jackknife interval the table gives as ``ci_low`` and ``ci_high``, if any.
        limits: the range of that column, which its interval does not leave.
        counts: the column that says how many vectors or utterances a row rests on. A group of utterances that adds
            nothing to it has no part in the interval of the row; without such a column, every group has.
        of_pairs_within_utterances: whether it compares vectors of one utterance.
        on_request: whether it costs so much that ``all`` leaves it out.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    interval: ClassVar[str | None] = None
    limits: ClassVar[tuple[float, float] | None] = None
    counts: ClassVar[str | None] = None
    of_pairs_within_utterances: ClassVar[bool] = False
    on_request: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sums: dict[Key, GroupSums] = {}

    @abstractmethod
    def update(self, activations: Activations) -> None:
        """Add one layer of one batch."""

    @abstractmethod
    def points(self, sums: Sums) -> pd.DataFrame:
        """The table, without intervals, from sums over groups, as arrays."""

    def fresh(self, sums: dict[Key, GroupSums] | None = None) -> Self:
        """An accumulator with the same parameters that is empty, or holds these sums."""
        other = copy.copy(self)
        other.sums = sums or {}
        return other

    def merge(self, other: Self) -> None:
        """Add what ``other`` has summed; the result is that of one pass over both corpora."""
        for key, (groups, values) in other.sums.items():
            values = torch.as_tensor(values)
            if key in self.sums:
                self._accumulate(key, values, Owners(groups))
            else:
                self.sums[key] = GroupSums(groups, values.clone())

    def table(self) -> pd.DataFrame:
        """The tidy table of everything summed so far.

        Raises:
            AnalysisError: there is too little to measure, such as a single token.
        """
        arrays = self.arrays()
        table = self.points(total := self._total(arrays))
        if self.interval is None:
            return table
        read = frozenset({self.interval, self.counts} - {None})
        parts = (self._without([group], arrays, total, read) for group in self.occupied_groups())
        counts = self.counts
        left_out = (
            np.ma.array(part[self.interval], mask=counts is not None and part[counts] == table[counts])
            for part in parts
        )
        low, high = jackknife_interval(table[self.interval].to_numpy(), left_out)
        if self.limits is not None:
            low, high = low.clip(*self.limits), high.clip(*self.limits)
        position = table.columns.get_loc(self.interval) + 1
        table.insert(position, "ci_low", low)
        table.insert(position + 1, "ci_high", high)
        return table

    def without(self, *groups: int) -> pd.DataFrame:
        """The table of the corpus without some groups of utterances, and without intervals."""
        arrays = self.arrays()
        return self._without(groups, arrays, self._total(arrays))

    def _without(
        self, left_out: Collection[int], arrays: dict[Key, GroupSums], total: Sums, read: frozenset[str] = frozenset()
    ) -> pd.DataFrame:
        rest = SumsOfPart()
        rest.columns = read
        for key, (groups, values) in arrays.items():
            gone = [values[place] for place, group in enumerate(groups) if group in left_out]
            rest[key] = total[key] - sum(gone) if gone else total[key]
        # The only utterance of its kind may be in the group: what is left is NaN, and so is its interval.
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.points(rest)

    def arrays(self) -> dict[Key, GroupSums]:
        """The sums as arrays, wherever they were summed.

        Raises:
            AnalysisError: a sum is not finite; the first layer that has such is named.
        """
        found = {key: GroupSums(groups, values.cpu().numpy()) for key, (groups, values) in self.sums.items()}
        bad = [key[-1] for key, (_, values) in found.items() if not math.isfinite(values.sum())]
        if bad:
            raise AnalysisError(
                f"{self.name}: layer {min(bad)} has vectors that are not finite (NaN or infinity): "
                f"the weights or the precision of this model do not carry this corpus"
            )
        return found

    def total(self) -> Sums:
        """The sums over all groups."""
        return self._total(self.arrays())

    def _total(self, arrays: dict[Key, GroupSums]) -> Sums:
        if not arrays:
            raise AnalysisError(f"{self.name}: nothing was measured")
        return {key: values.sum(0) for key, (_, values) in arrays.items()}

    def occur(self, quantity: str, layer: int) -> np.ndarray:
        """Of the counts in a sum of a layer, such as those of tokens by type, which are above 0 in the whole corpus.

        What ``points`` lists is decided by these, so that a table without a group of utterances has the same rows.
        """
        return self.sums[quantity, layer].values.sum(0).cpu().numpy() > 0

    def occupied_groups(self) -> list[int]:
        """The groups that hold an utterance."""
        found = {
            group
            for groups, values in self.sums.values()
            for group, occupied in zip(groups, values.reshape(len(groups), -1).any(1).tolist(), strict=True)
            if occupied
        }
        return sorted(found - {WHOLE})

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """The spaces that the metric needs, in the order of the tables, and their vectors where the layer has them."""
        wanted = self.needs & activations.spaces.keys()
        return ((space, activations.spaces[space]) for space in VECTOR_SPACES if space in wanted)

    def add(self, key: Key, values: Tensor, activations: Activations) -> None:
        """Add values, whose first axis is the utterance of the batch, to the sums of the utterances' groups."""
        self._accumulate(key, values, activations.tokens.owners)

    def add_runs(self, key: Key, values: Tensor, activations: Activations) -> None:
        """Add values that are summed over the utterances of each run already: their first axis is ``tokens.runs``."""
        self._accumulate(key, values, activations.tokens.owners_of_runs)

    def add_whole(self, key: Key, values: Tensor) -> None:
        """Add a sum over all utterances of the batch that is too large to keep once per group: it has no interval."""
        # In memory, whatever the device: it may have no room for what is so large.
        self._accumulate(key, values.cpu().unsqueeze(0), Owners([WHOLE]))

    def _accumulate(self, key: Key, values: Tensor, owners: Owners) -> None:
        groups, sums = self.sums.get(key, ((), None))
        if more := owners.not_in(groups):
            groups += more
            # Sums outlive the forward pass, which runs in inference mode.
            with torch.inference_mode(False):
                rows = torch.zeros(len(more), *values.shape[1:], dtype=torch.float64, device=values.device)
                sums = rows if sums is None else torch.cat([sums, rows])
            self.sums[key] = GroupSums(groups, sums)
        owners.add_to(sums, groups, values)


def tabulated(
    sums: Sums, quantity: str, rows: Callable[..., Columns], needed: frozenset[str] = frozenset()
) -> pd.DataFrame:
    """The rows of every layer, or space and layer, of which ``quantity`` was summed, below each other.

    With spaces, rows are ordered by space (as in ``VECTOR_SPACES``), layer and head. A head of 0 is none, and missing
    in the table. Types of keys become categories in the order of ``TOKEN_TYPES``, after ``all``, which legends and
    groups then follow.

    Args:
        needed: columns that are there in any case; of a part of the sums, others are only where they are read.
    """
    # Attentions to another stack come between the layers, and have numbers after them.
    places = sorted((place for name, *place in sums if name == quantity), key=operator.itemgetter(-1))
    places.sort(key=lambda place: VECTOR_SPACES.index(place[0]) if place[0] in VECTOR_SPACES else 0)
    parts = [rows(*place) for place in places]
    # Arrays are joined before there is a table: the jackknife makes twenty, and a frame per layer is slow.
    read = getattr(sums, "columns", None) or parts[0].keys()
    names = [name for name in parts[0] if name in read or name in needed]
    columns = {name: np.concatenate([part[name].ravel() for part in parts]) for name in names}
    if "head" in columns:
        columns["head"] = pd.arrays.IntegerArray(columns["head"], columns["head"] == 0)
    if "key_type" in columns:
        # As ``remove_unused_categories`` does, which would sort all rows.
        occur = np.bincount(columns["key_type"], minlength=len(KEY_TYPES)) > 0
        codes, kinds = (np.cumsum(occur) - 1)[columns["key_type"]], itertools.compress(KEY_TYPES, occur)
        columns["key_type"] = pd.Categorical.from_codes(codes, [*kinds], ordered=True)
    # As they are: copies of millions of rows would take as much memory again.
    return pd.DataFrame(columns, copy=False)


def head_rows(layer: int, columns: Columns, space: str | None = None) -> Columns:
    """The rows of one layer, or of one of its spaces, from columns of one value per head.

    Heads count from 1. ``WHOLE_SPACES`` have none.
    """
    count = len(next(iter(columns.values())))
    places = {} if space is None else {"space": np.full(count, space, dtype=object)}
    heads = np.zeros(count, int) if space in WHOLE_SPACES else np.arange(1, count + 1)
    return {**places, "layer": np.full(count, layer), "head": heads, **columns}


def crossed(layer: int, axes: Mapping[str, Sequence], **values: np.ndarray) -> Columns:
    """The rows of one layer, one for each cell of arrays; arrays of fewer dimensions lack the first of the axes.

    Columns are arrays of as many dimensions, which are views: few may be read. Types of keys are numbers, their places
    in ``KEY_TYPES``: there are many rows, and words take ten times as long.
    """
    shape = [len(axis) for axis in axes.values()]
    ends = [np.array([*map(KEY_TYPES.index, axis)] if name == "key_type" else axis) for name, axis in axes.items()]
    # Words as objects: each is there once.
    ends = [end.astype(object) if end.dtype.kind == "U" else end for end in ends]
    places = dict(zip(axes, np.meshgrid(*ends, indexing="ij", sparse=True), strict=True))
    columns = {"layer": np.array(layer), **places, **values}
    return {name: np.broadcast_to(cells, shape) for name, cells in columns.items()}


def type_means(
    totals: np.ndarray, counts: np.ndarray, occur: np.ndarray, types: Sequence[str] = TOKEN_TYPES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The means over all tokens, or pairs, and over those of each type that occurs.

    Args:
        totals: sums by type that has a row, of shape ... x kind x width.
        counts: how many tokens or pairs of each type there are.
        occur: which types have a row, whether there are any here or not: see :meth:`Metric.occur`.

    Returns:
        The means, of shape ... x kind x width; how many there are of each kind; and the kinds, ``all`` first.
    """
    totals = np.concatenate([totals.sum(-2, keepdims=True), totals], axis=-2)
    counts, rows = np.array([counts.sum(), *counts]), np.array([True, *occur])
    means = totals / np.where(counts > 0, counts, np.nan)[rows, None]
    return means, counts[rows].astype(int), np.array(["all", *types])[rows]
