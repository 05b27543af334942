"""Base class of the metrics: float64 sums over utterances that merge, and the table they give.

A metric adds sums in ``update`` and turns those of one layer into columns in ``rows``. The base
class takes care of heads, types of keys, the order of rows and intervals.
"""

import copy
import functools
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import pandas as pd
from torch import Tensor

from analysis_lib.capture import UNROTATED, VECTORS_OF, Activations, Owners, Vectors
from analysis_lib.corpora.token_types import ALL_TYPES, TOKEN_TYPES
from analysis_lib.errors import AnalysisError, in_order, require_choice, require_known
from analysis_lib.metrics.bins import BINS, SumsOfBin, joined
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.metrics.sums import OF_ALL, WHOLE, Groups, GroupSums, Key, Maxima, Sums

# Number of groups of the jackknife, which leaves out one at a time, see ``Corpus.groups``.
GROUPS = 20
# Spaces whose vectors are compared, in table order.
VECTOR_SPACES = ("hidden", "final", "query", "key", "value", *UNROTATED)
# Spaces that have no heads.
WHOLE_SPACES = ("hidden", "final")
# Types of keys, in table order.
KEY_TYPES = ("all", *ALL_TYPES, "sink")

# A key without its space and its layer; a key of one word is that word.
Name = str | Key
Columns = dict[str, np.ndarray]


class LayerSums(Mapping[Name, np.ndarray]):
    """The sums of one layer, or of one space of it, as :meth:`Metric.rows` receives them.

    ``sums["tokens"]`` is the sum that was added with the key ``("tokens", layer)``, or with
    ``("tokens", space, layer)``; ``sums["sum", 3]`` is that of ``("sum", 3, layer)``. The first
    axis runs over replicates: the whole corpus, or the corpus without one of its groups. It has
    length 1 in sums that are kept over all groups at once.

    Attributes:
        layer: the number of the layer.
        space: of ``VECTOR_SPACES``; empty where keys name none.
        whole: by name, the sums over the whole corpus, without an axis of replicates.
        left_out: for each replicate, the groups left out of it; none for the whole corpus.
    """

    def __init__(self, layer: int, space: str, sums: dict[Name, GroupSums]) -> None:
        self.layer = layer
        self.space = space
        self.whole: Columns = {}
        for name, (_, values) in sums.items():
            self.whole[name] = values.sum(0)
        self.left_out: list[Groups] = [()]
        self._sums = sums

    def replicated(self, left_out: list[Groups]) -> Self:
        """The same sums with other replicates."""
        other = copy.copy(self)
        other.left_out = left_out
        return other

    def __getitem__(self, name: Name) -> np.ndarray:
        sums = self._sums[name]
        total = self.whole[name]
        if sums.groups == (WHOLE,):
            return total[None]
        shape = len(self.left_out), *total.shape
        replicates = np.empty(shape)
        replicates[:] = total
        for index, groups in enumerate(self.left_out):
            without = sums.of(groups)
            if without:
                replicates[index] -= functools.reduce(operator.add, without)
        return replicates

    def __iter__(self) -> Iterator[Name]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def parts(self, name: str) -> list[str | int]:
        """Second words of keys that begin with ``name``: 3 and 4 for ("sum", 3), ("sum", 4)."""
        parts = []
        for key in self:
            if isinstance(key, tuple) and key[0] == name:
                parts.append(key[1])
        return parts


class Metric(ABC):
    """An accumulator of sums over utterances, and the table that they give.

    A measurement calls ``update`` for every layer of every batch, on a copy of the metric per
    worker, joins the copies with ``merge``, and calls ``table``. A metric of your own is a subclass
    that declares what it needs, adds to its sums in ``update``, and turns the sums of a layer into
    columns in ``rows``:

    >>> class LongVectors(Metric):
    ...     name, needs = "long_vectors", frozenset({"hidden"})
    ...     interval, counts = "share", "tokens"
    ...     def __init__(self, norm: float = 1.0):
    ...         super().__init__()
    ...         self.norm = norm
    ...     def update(self, activations):
    ...         hidden, layer = activations.spaces["hidden"], activations.layer
    ...         self.add(("long", layer), (hidden.norms > self.norm).sum((1, 2)), activations)
    ...         self.add(("tokens", layer), hidden.counts, activations)
    ...     def rows(self, sums):
    ...         tokens = sums["tokens"]
    ...         return {"share": sums["long"] / tokens, "tokens": tokens.astype(int)}
    >>> LongVectors(norm=10).fresh().norm
    10

    Its table has the columns layer, share, ci_low, ci_high and tokens. ``measure(model, corpus,
    [LongVectors(norm=10)])`` measures it, with any number of workers or on a cluster. For
    ``activations``, see :class:`~analysis_lib.capture.Activations` and
    :class:`~analysis_lib.capture.Vectors`, whose ``values`` are utterance x head x token x dim,
    ``norms`` utterance x head x token and ``counts`` utterance; hidden states have one head.

    The state is in ``sums``: for each key, the sums of the jackknife groups (or of all utterances
    at once, see :meth:`add_whole`). Their size does not depend on the corpus. A key is a tuple: a
    name, then the space if there are several (``by_space``), and last the layer. Other attributes
    are parameters: set in ``__init__``, never changed, and part of the key of stored tables.

    Args:
        vectors_of: of a metric of vectors, which vectors: that of each ``token``, or one for each
            text, that of its ``first`` or ``last`` token or the ``mean``, of the tokens that count.
            The columns of a metric of tokens are then over texts.
        bins: ``position`` for a table of each bin of positions, which count from 1 in each
            utterance (a window of a long text is one): 1, 2, 3 to 4, 5 to 8, 9 to 16, ..., in a
            first column ``positions``; ``type`` for one of each type of token, such as the roles
            of a conversation, in a first column ``type``.

            The rows of a bin are those of a measurement in which only its tokens count, as vectors
            and as queries; all tokens take part as keys. Bins without tokens have no rows; what
            takes two vectors is missing in a bin of one. ``measure(..., bins="position")`` sets it
            for all metrics, those of your own as well.

    Attributes:
        name: the name of the table.
        version: raise it in the commit that changes numbers of the table, see
            :mod:`~analysis_lib.measurement.versions`.
        needs: the spaces of ``capture.SPACES`` that ``update`` reads; ``weights`` for the entropy
            of attention rows and their mass by type of key, ``blocks`` for the weights themselves
            (``activations.attention.reduce``), ``scores`` for sums of scores, ``embeddings`` for
            the output vectors of images and texts in a model that compares them.
        axes: names of the axes of the columns, after that of replicates. Each becomes a column of
            the table, of numbers from 0 or of the labels that ``rows`` returns by its name. Heads
            count from 1, and are missing for hidden vectors.
        order: the columns that come first, after ``space``; the layer and the axes by default.
        optional: columns of numbers in which 0 means "none" and becomes a missing value.
        interval: the column whose jackknife interval the table gives as ``ci_low`` and ``ci_high``,
            if any. Without one, ``rows`` gets one replicate at a time.
        by_space: whether the second word of every key is a space; the table then has one, too.
        limits: the range of that column, to which its interval is cut; arrays if it differs along
            the last axis.
        smooth: whether that column changes gradually when utterances are left out, as a mean or a
            cosine does and a median does not: see
            :func:`~analysis_lib.metrics.intervals.jackknife_interval`.
        counts: the column with the number of vectors or utterances behind a row. A group of
            utterances that adds nothing to it is left out of the interval of the row; without such
            a column, all groups are used.
        of_pairs_within_utterances: whether the metric compares vectors of the same utterance.
        on_request: whether the metric is too expensive for ``all``.
        no_bins: why the metric cannot have ``bins``; empty if it can.
        reason_for_none: the error where no layer has added anything.
        types: the types that tokens of the corpus can have, in the order of an axis of types; set
            by ``measure``.
        state: what the values of ``update`` are added to: ``Sums``, or ``Maxima`` for running
            maxima, which have no jackknife groups.

    Raises:
        AnalysisError: an unknown ``vectors_of``, or one for a metric that does not read vectors, or
            compares those of one text; unknown ``bins``, or some for a metric that has none.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]]
    axes: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ("head",)
    by_space: ClassVar[bool] = False
    interval: ClassVar[str | None] = None
    limits: ClassVar[tuple[float | np.ndarray, float | np.ndarray] | None] = None
    smooth: ClassVar[bool] = True
    counts: ClassVar[str | None] = None
    of_pairs_within_utterances: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    reason_for_none: ClassVar[str] = "nothing was measured"
    no_bins: ClassVar[str] = ""
    vectors_of: str = "token"
    types: tuple[str, ...] = TOKEN_TYPES
    binned_by: str | None = None
    state: ClassVar[type[Sums | Maxima]] = Sums

    def __init__(self, vectors_of: str = "token", bins: str | None = None) -> None:
        self.sums = self.state()
        require_choice("vectors_of", vectors_of, VECTORS_OF)
        # No parameters by default: tables that were stored without them stay valid.
        if vectors_of != "token":
            self._take_vectors_of(vectors_of)
        if bins is not None:
            self._divide(bins)

    def _take_vectors_of(self, vectors_of: str) -> None:
        if not self.needs <= {*VECTOR_SPACES} or self.of_pairs_within_utterances:
            raise AnalysisError(
                f"{self.name} has no vector for each text: leave vectors_of={vectors_of!r} out"
            )
        self.vectors_of = vectors_of

    def _divide(self, bins: str) -> None:
        require_choice("bins", bins, BINS)
        reason = self.no_bins
        if self.vectors_of != "token":
            reason = f"the {self.vectors_of} vector of a text is in no bin"
        if reason:
            raise AnalysisError(f"{self.name} has no bins: {reason}; leave bins out")
        self.binned_by = bins

    def in_bins(self, bins: str | None) -> Self:
        """A new, empty accumulator with the given ``bins``; with its own if they are None."""
        other = self.fresh()
        if bins is not None:
            other._divide(bins)
        return other

    def receive(self, activations: Activations) -> None:
        """Add the sums of one layer of one batch with ``update``, for each bin if there are any."""
        if self.binned_by is None:
            self.update(activations)
            return
        for index, activations_of_bin in enumerate(activations.in_bins(self.binned_by)):
            of_bin = copy.copy(self)
            of_bin.sums = SumsOfBin(self.sums, index)
            of_bin.update(activations_of_bin)

    @abstractmethod
    def update(self, activations: Activations) -> None:
        """Add the sums of one layer of one batch."""

    @abstractmethod
    def rows(self, sums: LayerSums) -> Columns:
        """The columns of one layer, from its sums.

        Returns:
            By name, arrays of shape replicate x ``axes``, or that broadcast to it; an array named
            like an axis is one-dimensional and holds its labels. The rows must not depend on the
            replicate: a type of token has some if it occurs in ``sums.whole``.
        """

    def fresh(self, sums: Mapping[Key, GroupSums] | None = None) -> Self:
        """A new accumulator with the same parameters, empty or with the given sums."""
        other = copy.copy(self)
        other.sums = self.state(sums)
        return other

    def for_types(self, types: tuple[str, ...]) -> Self:
        """This metric, or an empty copy of it for a corpus with other types of tokens."""
        if types == self.types:
            return self
        other = self.fresh()
        other.types = types
        return other

    def merge(self, other: Self) -> None:
        """Add the sums of ``other``; the result is that of one pass over both corpora."""
        owners = functools.cache(Owners)
        for key, (groups, values) in other.sums.items():
            self.sums.add(key, values, owners(groups))
        self.sums.settle()

    def table(self) -> pd.DataFrame:
        """The tidy table of everything summed so far.

        Raises:
            AnalysisError: the sums are of too little data, such as a single token.
        """
        if self.binned_by is not None:
            tables = {index: part.whole_table() for index, part in self.by_bin().items()}
            return joined(tables, self.binned_by, self.types, KEY_TYPES)
        return self.whole_table()

    def by_bin(self) -> dict[int, Self]:
        """By the number of the bin, an accumulator without bins that has its sums.

        A layer, or a space of it, in which nothing of a bin was summed is left out.
        """
        by_layer = defaultdict(dict)
        for (*words, index, layer), sums in self.arrays().items():
            space = words[1] if self.by_space else ""
            by_layer[index, layer, space][(*words, layer)] = sums
        by_bin = defaultdict(dict)
        for (index, *_), sums in by_layer.items():
            if any(values.any() for _, values in sums.values()):
                by_bin[index] |= sums
        if not by_bin:
            raise AnalysisError(f"{self.name}: {self.reason_for_none}")
        parts = {index: self.fresh(sums) for index, sums in by_bin.items()}
        for part in parts.values():
            del part.binned_by
        return parts

    def whole_table(self) -> pd.DataFrame:
        """The table of a metric without bins, of however little data."""
        with_interval = self.interval is not None
        left_out: list[Groups] = [()]
        if with_interval:
            left_out += [(group,) for group in self.occupied_groups()]
        return self._table(self.layers(), left_out, with_interval)

    def without(self, *groups: int) -> pd.DataFrame:
        """The table of the corpus without some groups of utterances, and without intervals."""
        return self.leaving_out()(*groups)

    def leaving_out(self) -> Callable[..., pd.DataFrame]:
        """:meth:`without` bound to the sums as they are now, for many tables of them."""
        if self.binned_by is not None:
            parts = {index: part.leaving_out() for index, part in self.by_bin().items()}

            def without(*groups: int) -> pd.DataFrame:
                tables = {index: make(*groups) for index, make in parts.items()}
                return joined(tables, self.binned_by, self.types, KEY_TYPES)

            return without
        layers = self.layers()
        return lambda *groups: self._table(layers, [groups], with_interval=False)

    def layers(self) -> list[LayerSums]:
        """The sums of each layer, in table order: by space, then by layer."""
        arrays = self.arrays()
        if not arrays:
            raise AnalysisError(f"{self.name}: {self.reason_for_none}")
        by_layer = defaultdict(dict)
        for (*words, layer), sums in arrays.items():
            space = words.pop(1) if self.by_space else ""
            rank = VECTOR_SPACES.index(space or "hidden")
            name = words[0] if len(words) == 1 else tuple(words)
            by_layer[rank, layer, space][name] = sums
        layers = []
        for key in sorted(by_layer):
            _, layer, space = key
            layers.append(LayerSums(layer, space, by_layer[key]))
        return layers

    def _table(
        self,
        layers: list[LayerSums],
        left_out: list[Groups],
        with_interval: bool,
    ) -> pd.DataFrame:
        """The table of the first replicate, with the interval from the others."""
        parts = []
        # The group that is left out may hold the only utterance of its kind: the rest then gives
        # NaN.
        with np.errstate(invalid="ignore", divide="ignore"):
            for layer in layers:
                sums = layer.replicated(left_out)
                parts.append(self._columns(sums, with_interval))
        columns = {}
        for name in [*parts[0]]:
            # A column at a time, so that a table of millions of rows is never there twice.
            values = np.concatenate([part.pop(name) for part in parts])
            columns[name] = _typed(name, values, name in self.optional)
        # ``copy=False``: a copy of millions of rows would double the memory.
        return pd.DataFrame(columns, copy=False)

    def _columns(self, sums: LayerSums, with_interval: bool) -> Columns:
        """The columns of a layer in table order, each one-dimensional."""
        columns = {}
        for name, values in self.rows(sums).items():
            columns[name] = _as_cells(name, values)
        shape = self._shape(columns, len(sums.left_out))
        columns |= self._labels(columns, shape[1:], sums.space)
        columns["layer"] = np.array(sums.layer)
        first = self.order or ("layer", *self.axes)
        if sums.space:
            columns["space"] = np.array(sums.space, object)
            first = ("space", *first)
        table = {}
        for name in dict.fromkeys((*first, *columns)):
            replicates = np.broadcast_to(columns[name], shape)
            # A copy, as a view would keep all replicates in memory.
            table[name] = replicates[0].flatten()
            if name == self.interval and with_interval:
                low, high = self._interval(columns, shape)
                table["ci_low"] = low.ravel()
                table["ci_high"] = high.ravel()
        return table

    def _shape(self, columns: Columns, replicates: int) -> tuple[int, ...]:
        """The shape of the columns, replicate x axes.

        Raises:
            AnalysisError: a column does not broadcast to it.
        """
        axes = ("replicate", *self.axes)
        shapes = {}
        for name, values in columns.items():
            if name not in self.axes:
                shapes[name] = values.shape
        smallest = replicates, *(1 for _ in self.axes)
        try:
            shape = np.broadcast_shapes(smallest, *shapes.values())
        except ValueError:
            shape = ()
        if len(shape) != len(axes) or shape[0] != replicates:
            raise AnalysisError(
                f"{self.name}: its columns have the shapes {shapes}: let rows give arrays of "
                f"{' x '.join(axes)}, of which there are {replicates} replicates"
            )
        return shape

    def _labels(self, columns: Columns, shape: tuple[int, ...], space: str) -> Columns:
        """Labels along each axis, in arrays that broadcast to the columns."""
        labels = {}
        further = len(shape)
        for axis, size in zip(self.axes, shape, strict=True):
            numbers = np.arange(size)
            # Hidden vectors have a single head: 0, which becomes a missing value.
            if axis == "head" and space not in WHOLE_SPACES:
                numbers += 1
            further -= 1
            along = -1, *(1 for _ in range(further))
            labels[axis] = columns.get(axis, numbers).reshape(along)
        return labels

    def _interval(
        self,
        columns: Columns,
        shape: tuple[int, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper ends of the intervals of a layer's rows."""
        replicates = np.broadcast_to(columns[self.interval], shape)
        point, *parts = map(np.asarray, replicates)
        if self.counts is not None:
            of_all, *counts = np.broadcast_to(columns[self.counts], shape)
            for index, count in enumerate(counts):
                # The group that is left out adds nothing to these rows.
                has_no_part = count == of_all
                if has_no_part.any():
                    parts[index] = np.ma.array(parts[index], mask=has_no_part)
        low, high = jackknife_interval(point, parts, self.smooth)
        if self.limits is not None:
            low = low.clip(*self.limits)
            high = high.clip(*self.limits)
        return low, high

    def arrays(self) -> dict[Key, GroupSums]:
        """The sums as arrays in main memory.

        Raises:
            AnalysisError: a sum is not finite; the message names the first such layer.
        """
        arrays = self.sums.arrays()
        bad = [key[-1] for key, (_, array) in arrays.items() if not math.isfinite(array.sum())]
        if bad:
            raise AnalysisError(
                f"{self.name}: layer {min(bad)} has vectors that are not finite (NaN or infinity): "
                "the weights or the precision of this model do not carry this corpus"
            )
        return arrays

    def occupied_groups(self) -> list[int]:
        """The groups that have a token that counts; the sums of the others are zero."""
        occupied = set()
        for groups, values in self.sums.values():
            is_occupied = values.reshape(len(groups), -1).any(1)
            occupied.update(itertools.compress(groups, is_occupied.tolist()))
        return sorted(occupied - {WHOLE})

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """Spaces that the metric needs and the layer has, with their vectors, in table order.

        They are the vectors of tokens or of texts, as ``vectors_of`` says.
        """
        for space in VECTOR_SPACES:
            if space in self.needs and space in activations.spaces:
                yield space, activations.spaces[space].of_texts(self.vectors_of)

    def add(
        self,
        key: Key,
        values: Tensor | Sequence[Tensor],
        activations: Activations,
        of: Callable[..., Tensor] | None = None,
    ) -> None:
        """Add values, whose first axis is the batch's utterances, to the sums of their groups.

        Args:
            of: gives what is summed if ``values`` are its arguments. It is called once at the end
                of a batch, with the values of several keys stacked along a second axis, and saves
                a GPU many small operations.
        """
        self.sums.add(key, values, activations.tokens.owners, of)

    def add_runs(self, key: Key, values: Tensor, activations: Activations) -> None:
        """Add values that are summed over each run already: their first axis is ``tokens.runs``."""
        self.sums.add(key, values, activations.tokens.owners_of_runs)

    def add_whole(self, key: Key, values: Tensor) -> None:
        """Add a sum too large to keep once per group; columns made from it have no interval."""
        self.sums.add(key, values.unsqueeze(0), OF_ALL)


def _as_cells(name: str, values: np.ndarray) -> np.ndarray:
    """The values as table cells.

    Object dtype stores each distinct string once; types of keys become codes.
    """
    cells = np.asarray(values)
    if name == "key_type":
        codes = [KEY_TYPES.index(word) for word in cells]
        return np.array(codes, np.int8)
    if cells.dtype.kind == "U":
        return cells.astype(object)
    return cells


def _typed(name: str, values: np.ndarray, is_optional: bool) -> object:
    """The column in its pandas type."""
    if is_optional:
        return pd.arrays.IntegerArray(values, values == 0)
    if name == "key_type":
        occur = np.bincount(values, minlength=len(KEY_TYPES)) > 0
        # The same as ``remove_unused_categories``, which would sort all rows.
        codes = np.cumsum(occur) - 1
        types = np.array(KEY_TYPES)[occur]
        return pd.Categorical.from_codes(codes[values], types, ordered=True)
    return values


def chosen_spaces(spaces: Sequence[str]) -> frozenset[str]:
    """The spaces that a metric reads, from its parameter ``spaces``.

    Raises:
        AnalysisError: none is given, or one is unknown.
    """
    wanted = f"some of {', '.join(VECTOR_SPACES)}, in a list"
    chosen = in_order("spaces", spaces, wanted)
    require_known("space", chosen, VECTOR_SPACES)
    if not chosen:
        raise AnalysisError(f"spaces is empty: give {wanted}")
    return frozenset(chosen)


def means_of(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums divided by counts; NaN where the count is 0."""
    return totals / np.where(counts > 0, counts, np.nan)


def type_means(
    totals: np.ndarray,
    counts: np.ndarray,
    occur: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Means over all tokens (or pairs), and over those of each type that occurs.

    Args:
        totals: sums by type that occurs, of shape replicate x ... x kind x width.
        counts: the number of tokens or pairs of each type, of shape replicate x type.
        occur: for each type, whether it occurs in the whole corpus and so has a row.

    Returns:
        The means, of shape replicate x ... x kind x width, and the counts of each kind, of shape
        replicate x 1 ... x kind x 1; ``all`` is the first kind.
    """
    of_all = totals.sum(-2, keepdims=True)
    totals = np.concatenate([of_all, totals], axis=-2)
    number = counts.sum(-1, keepdims=True)
    counts = np.concatenate([number, counts[:, occur]], axis=-1)
    between = [1] * (totals.ndim - 3)
    counts = counts.reshape(len(counts), *between, -1, 1)
    return means_of(totals, counts), counts.astype(int)


def kinds_of(occur: np.ndarray, types: Sequence[str]) -> np.ndarray:
    """``all``, followed by the types that occur."""
    return np.array(["all", *itertools.compress(types, occur)])
