"""What every metric is: sums over utterances, in float64, that merge; and the tables they give."""

import copy
import functools
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
Columns = dict[str, np.ndarray]
# A table, or the columns of one that are read.
Points = pd.DataFrame | Columns


class GroupSums(NamedTuple):
    """A sum over the utterances of each of some jackknife groups, in float64.

    Attributes:
        groups: those that have utterances so far, or ``WHOLE`` alone.
        values: of shape group x ..., on the device that summed them; or as arrays.
    """

    groups: tuple[int, ...]
    values: Tensor | np.ndarray


@dataclass(frozen=True)
class Layers:
    """Sums of neighbouring layers that have the same, so that a table is computed of all of them at once.

    Attributes:
        numbers: of the layers.
        sums: of shape layer x ..., by their key without its layer; of one text, by that.
        occur: of the counts that ``Metric.kinds`` names, which are above 0 in the whole corpus.
    """

    numbers: tuple[int, ...]
    sums: dict[Key, np.ndarray]
    occur: np.ndarray | None = None

    def __getitem__(self, name: Key | str) -> np.ndarray:
        return self.sums[(name,) if isinstance(name, str) else name]

    def apart(self) -> Iterator[Self]:
        """Each layer by itself."""
        for place, number in enumerate(self.numbers):
            of_one = {name: values[place : place + 1] for name, values in self.sums.items()}
            yield replace(self, numbers=(number,), sums=of_one)


class Sums(Mapping[Key, np.ndarray]):
    """Sums over groups, by key.

    Attributes:
        layers: the same, with what neighbouring layers have alike in one array.
        read: the columns of their table that are read, where these are few.
    """

    def __init__(self, layers: Iterable[Layers], read: frozenset[str] = frozenset()) -> None:
        self.layers, self.read = [*layers], read

    @classmethod
    def of(cls, sums: Mapping[Key, np.ndarray], kinds: str | None) -> Self:
        """The sums by key; ``kinds`` as of :class:`Metric`."""
        by_layer: dict[int, dict[Key, np.ndarray]] = {}
        for (*name, layer), values in sums.items():
            by_layer.setdefault(layer, {})[tuple(name)] = values
        occur = {} if kinds is None else {layer: found[kinds,] > 0 for layer, found in by_layer.items()}

        def alike(layer: int) -> tuple:
            return {name: values.shape for name, values in by_layer[layer].items()}, [*occur.get(layer, ())]

        found = []
        # Attentions to another stack come between the layers, and have numbers after them.
        for _, neighbours in itertools.groupby(sorted(by_layer), alike):
            numbers = tuple(neighbours)
            stacks = {name: np.stack([by_layer[number][name] for number in numbers]) for name in by_layer[numbers[0]]}
            found.append(Layers(numbers, stacks, occur.get(numbers[0])))
        return cls(found)

    def __getitem__(self, key: Key) -> np.ndarray:
        *name, number = key
        for layers in self.layers:
            if number in layers.numbers and tuple(name) in layers.sums:
                return layers.sums[*name][layers.numbers.index(number)]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Key]:
        return ((*name, number) for layers in self.layers for number in layers.numbers for name in layers.sums)

    def __len__(self) -> int:
        return sum(len(layers.numbers) * len(layers.sums) for layers in self.layers)

    def apart(self) -> Self:
        """The same, with each layer by itself."""
        return type(self)((one for layers in self.layers for one in layers.apart()), self.read)


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
        version: raised in the commit that changes numbers of the table, see
            :mod:`~analysis_lib.measurement.versions`.
        needs: the spaces of ``capture.SPACES``, and ``weights`` or ``scores``, that ``update`` reads.
        interval: the column whose jackknife interval the table gives as ``ci_low`` and ``ci_high``, if any.
        limits: the range of that column, which its interval does not leave.
        smooth: whether that column changes little by little where utterances are left out, as a mean or a cosine does
            and a median does not: see :func:`~analysis_lib.metrics.intervals.jackknife_interval`.
        counts: the column that says how many vectors or utterances a row rests on. A group of utterances that adds
            nothing to it has no part in the interval of the row; without such a column, every group has.
        kinds: the sum that counts tokens, or pairs, by type, if rows are by type. Which types have a row in a layer is
            decided by what occurs in the whole corpus, so that a table without a group of utterances has the same rows.
        of_pairs_within_utterances: whether it compares vectors of one utterance.
        on_request: whether it costs so much that ``all`` leaves it out.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]]
    interval: ClassVar[str | None] = None
    limits: ClassVar[tuple[float, float] | None] = None
    smooth: ClassVar[bool] = True
    counts: ClassVar[str | None] = None
    kinds: ClassVar[str | None] = None
    of_pairs_within_utterances: ClassVar[bool] = False
    on_request: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sums: dict[Key, GroupSums] = {}

    @abstractmethod
    def update(self, activations: Activations) -> None:
        """Add one layer of one batch."""

    @abstractmethod
    def points(self, sums: Sums) -> Points:
        """The table, without intervals, from sums over groups, as arrays; only the columns ``sums.read`` are needed."""

    def fresh(self, sums: dict[Key, GroupSums] | None = None) -> Self:
        """An accumulator with the same parameters that is empty, or holds these sums."""
        other = copy.copy(self)
        other.sums = sums or {}
        return other

    def merge(self, other: Self) -> None:
        """Add what ``other`` has summed; the result is that of one pass over both corpora."""
        owners = functools.cache(Owners)
        for key, (groups, values) in other.sums.items():
            values = torch.as_tensor(values)
            if key in self.sums:
                self._accumulate(key, values, owners(groups))
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
        every = {name: table[name].to_numpy() for name in read}

        def no_part(part: Points) -> np.ndarray | bool:
            return self.counts is not None and np.asarray(part[self.counts]) == every[self.counts]

        left_out = (np.ma.array(part[self.interval], mask=no_part(part)) for part in parts)
        low, high = jackknife_interval(every[self.interval], left_out, self.smooth)
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
    ) -> Points:
        rest = []
        for layers in total.layers:
            sums = {name: values.copy() for name, values in layers.sums.items()}
            for name, values in sums.items():
                for place, number in enumerate(layers.numbers):
                    groups, of_groups = arrays[*name, number]
                    gone = [of_groups[groups.index(group)] for group in left_out if group in groups]
                    if gone:
                        values[place] -= functools.reduce(operator.add, gone)
            rest.append(replace(layers, sums=sums))
        # The only utterance of its kind may be in the group: what is left is NaN, and so is its interval.
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.points(Sums(rest, read))

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
        return Sums.of({key: values.sum(0) for key, (_, values) in arrays.items()}, self.kinds)

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


def tabulated(sums: Sums, quantity: str, rows: Callable[..., Columns]) -> Points:
    """The rows of all layers, or spaces and layers, of which ``quantity`` was summed, below each other.

    With spaces, rows are ordered by space (as in ``VECTOR_SPACES``), layer and head. A head of 0 is none, and missing
    in the table. Types of keys become categories in the order of ``TOKEN_TYPES``, after ``all``, which legends and
    groups then follow.

    Args:
        rows: of neighbouring layers, and of what stands in keys between ``quantity`` and the layer.

    Returns:
        The table; where only some of its columns are read, these as arrays: the jackknife asks twenty times.
    """
    places = [(layers, *between) for layers in sums.layers for name, *between in layers.sums if name == quantity]
    places.sort(key=lambda place: VECTOR_SPACES.index(place[1]) if place[-1] in VECTOR_SPACES else 0)
    parts = [rows(*place) for place in places]
    columns = {name: np.concatenate([part[name].ravel() for part in parts]) for name in sums.read or parts[0]}
    if sums.read:
        return columns
    if "head" in columns:
        columns["head"] = pd.arrays.IntegerArray(columns["head"], columns["head"] == 0)
    if "key_type" in columns:
        # As ``remove_unused_categories`` does, which would sort all rows.
        occur = np.bincount(columns["key_type"], minlength=len(KEY_TYPES)) > 0
        codes, kinds = (np.cumsum(occur) - 1)[columns["key_type"]], itertools.compress(KEY_TYPES, occur)
        columns["key_type"] = pd.Categorical.from_codes(codes, [*kinds], ordered=True)
    # As they are: copies of millions of rows would take as much memory again.
    return pd.DataFrame(columns, copy=False)


def head_rows(layers: Layers, columns: Columns, space: str | None = None) -> Columns:
    """The rows of neighbouring layers, or of one of their spaces, from columns of shape layer x head.

    Heads count from 1. ``WHOLE_SPACES`` have none.
    """
    count = next(iter(columns.values())).shape[1]
    heads = [0] if space in WHOLE_SPACES else range(1, count + 1)
    found = crossed(layers, {"head": heads}, **columns)
    return found if space is None else {"space": np.broadcast_to(np.array(space, object), found["head"].shape)} | found


def crossed(layers: Layers, axes: Mapping[str, Sequence], **values: np.ndarray) -> Columns:
    """The rows of neighbouring layers, one for each cell of arrays of shape layer x ..., whose other axes are named.

    Columns are arrays of as many dimensions, which are views: few may be read. Types of keys are numbers, their places
    in ``KEY_TYPES``: there are many rows, and words take ten times as long.
    """
    ends = [np.array([*map(KEY_TYPES.index, axis)] if name == "key_type" else axis) for name, axis in axes.items()]
    # Words as objects: each is there once.
    ends = [np.array(layers.numbers), *(end.astype(object) if end.dtype.kind == "U" else end for end in ends)]
    places = dict(zip(["layer", *axes], np.meshgrid(*ends, indexing="ij", sparse=True), strict=True))
    shape = [len(end) for end in ends]
    return {name: np.broadcast_to(cells, shape) for name, cells in {**places, **values}.items()}


def type_means(
    totals: np.ndarray, counts: np.ndarray, occur: np.ndarray, types: Sequence[str] = TOKEN_TYPES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The means over all tokens, or pairs, and over those of each type that occurs.

    Args:
        totals: sums by type that has a row, of shape layer x ... x kind x width.
        counts: how many tokens or pairs of each type there are, of shape layer x type.
        occur: which types have a row, whether there are any here or not: see :class:`Layers`.

    Returns:
        The means, of shape layer x ... x kind x width; how many there are of each kind, of shape layer x ... x kind x
        1; and the kinds, ``all`` first.
    """
    rows = np.array([True, *occur])
    totals = np.concatenate([totals.sum(-2, keepdims=True), totals], axis=-2)
    counts = np.concatenate([counts.sum(-1, keepdims=True), counts], axis=-1)[:, rows]
    counts = counts.reshape(len(counts), *(1 for _ in totals.shape[1:-2]), -1, 1)
    return totals / np.where(counts > 0, counts, np.nan), counts.astype(int), np.array(["all", *types])[rows]
