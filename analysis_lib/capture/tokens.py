"""Tokens behind the vectors of a layer, and the keys that each query may see."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.long_sums import is_chunked, weighted_sums
from analysis_lib.capture.masks import Band, bands, is_earlier, rows_of
from analysis_lib.corpora.token_types import TOKEN_TYPES, special_count

T = TypeVar("T")


class Bin(NamedTuple):
    """Some of the tokens of each utterance.

    Attributes:
        by: ``position`` or ``type``, what tokens are divided by.
        index: which: of positions as :func:`bins_of` counts them, or of ``Tokens.type_names``.
    """

    by: str
    index: int


class Owners:
    """Jackknife groups of the entries of a tensor's first axis."""

    def __init__(self, groups: Iterable[int]):
        self.groups = tuple(groups)
        # Cached by the groups of the sums: for each entry, the index of the sum it joins; on a GPU,
        # its :func:`_membership`.
        self._joins: dict[tuple[int, ...], Tensor] = {}

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """The groups that occur, without repetition and in order."""
        return tuple(sorted(set(self.groups)))

    def not_in(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """The groups that occur and are not in ``groups``."""
        return (
            ()
            if groups in self._joins
            else tuple(group for group in self.distinct if group not in groups)
        )

    def add_to(
        self, sums: Float[Tensor, "group *rest"], groups: tuple[int, ...], values: Tensor
    ) -> None:
        """Add each entry of ``values`` to the sum of its group, in the precision of the sums.

        Args:
            sums: one sum for each of ``groups``, which must contain the groups of all entries.
        """
        on_cpu = sums.device.type == "cpu"
        values = values.to(sums.dtype)
        if groups not in self._joins:
            places = torch.tensor([groups.index(group) for group in self.groups])
            self._joins[groups] = places if on_cpu else _membership(places, sums)
        if on_cpu:
            sums.index_add_(0, self._joins[groups], values)
        else:
            _add_in_order(sums, self._joins[groups], values)


def _membership(
    places: Int[Tensor, " entry"], sums: Float[Tensor, "group *rest"]
) -> Float[Tensor, "group entry"]:
    """where an entry joins a sum, else 0."""
    return functional.one_hot(places, len(sums)).T.to(sums.device, sums.dtype)


def _add_in_order(sums: Tensor, members: Float[Tensor, "group entry"], values: Tensor) -> None:
    """Add each entry to the sum of its group, always in the same order.

    On a GPU, ``index_add_`` adds in any order, so that two runs would differ in their last digits.
    """
    sums.view(len(sums), -1).addmm_(members, values.reshape(len(values), -1))


@dataclass(eq=False)
class Tokens:
    """The tokens of each utterance of a batch.

    A token counts if its vectors and queries enter the tables. Every token except padding is a key,
    whether it counts or not.

    Attributes:
        mask: True at a token, False at padding.
        types: the type of each token, an index into ``type_names``; meaningless at padding.
        groups: the jackknife group of each utterance.
        special_tokens: whether tokens of ``SPECIAL_TYPES``, the first of the types, count.
        silent: True at tokens that the model attends to but that are not part of the item, such as
            the silence that Whisper appends to a short sound; these do not count.
        long: True at tokens that do not count because their vectors are too long; see
            :meth:`shorter_than`.
        ids: what the model reads of each token, of a word of characters those of its characters;
            None for tokens that have none, such as patches; meaningless at padding.
        type_names: the types that tokens of the corpus can have, see ``Corpus.token_types``.
        grid: rows and columns of the patches of a picture, all of which are among the tokens; None
            if there is no picture, or its grid is not known.
    """

    mask: Bool[Tensor, "utterance token"]
    types: Int[Tensor, "utterance token"]
    groups: tuple[int, ...]
    special_tokens: bool = True
    silent: Bool[Tensor, "utterance token"] | None = None
    long: Bool[Tensor, "utterance token"] | None = None
    ids: Int[Tensor, "utterance token *character"] | None = None
    type_names: tuple[str, ...] = TOKEN_TYPES
    grid: tuple[int, int] | None = None
    _elsewhere: dict[torch.device, "Tokens"] = field(default_factory=dict, init=False, repr=False)
    _results: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> "Tokens":
        """The same tokens on another device; copied to each device once."""
        if device == self.mask.device:
            return self
        if device not in self._elsewhere:
            parts = {}
            for name in ("mask", "types", "silent", "long", "ids"):
                part = getattr(self, name)
                if part is not None:
                    parts[name] = part.to(device)
            self._elsewhere[device] = replace(self, **parts)
        return self._elsewhere[device]

    @cached_property
    def type_masks(self) -> Float[Tensor, "utterance type token"]:
        """where a token has a type, else 0; 0 at padding for every type."""
        masks = functional.one_hot(self.types.long(), len(self.type_names))
        masks = masks * self.mask.unsqueeze(-1)
        return masks.transpose(1, 2).to(torch.get_default_dtype())

    @cached_property
    def kinds(self) -> list[int]:
        """Indices in ``type_names`` of the types that occur.

        On a GPU these are all types, since finding those that occur would need a synchronisation.
        """
        if self.mask.device.type != "cpu":
            return [*range(len(self.type_names))]
        return self.type_masks.any(0).any(-1).nonzero().squeeze(-1).tolist()

    @cached_property
    def kind_masks(self) -> Float[Tensor, "utterance kind token"]:
        """Rows of ``type_masks`` for the types that occur."""
        return (
            self.type_masks
            if len(self.kinds) == len(self.type_names)
            else self.type_masks[:, self.kinds]
        )

    @cached_property
    def _bags(self) -> tuple[Int[Tensor, " place"], Int[Tensor, " bag"]]:
        """Indices of all tokens ordered by run and type, and where each run and type begins.

        Padding comes last.
        """
        kind = self.kind_masks.argmax(1)
        count = len(self.kinds)
        last = len(self.runs) * count
        runs = self.run_numbers.to(kind.device)
        runs = runs.unsqueeze(1)
        bags = torch.where(self.mask, runs * count + kind, last)
        bags, order = bags.flatten().sort(stable=True)
        numbers = torch.arange(last + 1, device=bags.device)
        return order, torch.searchsorted(bags, numbers)

    def in_bags(self, values: Float[Tensor, "place dim"]) -> Float[Tensor, "run kind dim"]:
        """Values of all tokens in one sequence, summed by run and by type that occurs."""
        if is_chunked(self.mask.shape[1]):
            of_utterances = values.unflatten(0, self.mask.shape)
            sums = weighted_sums(self.kind_masks.to(values.dtype), of_utterances)
            return self.by_run(sums)
        order, begins = self._bags
        sums = functional.embedding_bag(order, values, begins, mode="sum")
        return sums[:-1].unflatten(0, (len(self.runs), len(self.kinds)))

    def of_types(
        self, values: Shaped[Tensor, "_ head kind dim"]
    ) -> Shaped[Tensor, "_ head type dim"]:
        """Values by all types, from values by the types that occur; the others get 0."""
        if len(self.kinds) == len(self.type_names):
            return values
        every = values.new_zeros(*values.shape[:2], len(self.type_names), values.shape[3])
        every[:, :, self.kinds] = values
        return every

    @cached_property
    def patches(self) -> Int[Tensor, "utterance token"]:
        """The index of each token among the patches of its picture, row by row; -1 for others."""
        name = "image" if "image" in self.type_names else "other"
        is_patch = self.mask & (self.types == self.type_names.index(name))
        return torch.where(is_patch, is_patch.cumsum(1) - 1, -1)

    @property
    def specials(self) -> int:
        """The number of special types, which come before the others."""
        return special_count(self.type_names)

    @cached_property
    def counted(self) -> Bool[Tensor, "utterance token"]:
        """True at the tokens that count."""
        mask = self.mask if self.special_tokens else self.mask & (self.types >= self.specials)
        return mask if self.silent is None else mask & ~self.silent

    @cached_property
    def runs(self) -> list[tuple[int, slice]]:
        """Runs of neighbouring utterances of one jackknife group.

        Returns:
            For each run its group, and the slice of its utterances in the batch.
        """
        runs = []
        start = 0
        for group, same in itertools.groupby(self.groups):
            end = start + len([*same])
            runs.append((group, slice(start, end)))
            start = end
        return runs

    @cached_property
    def run_numbers(self) -> Int[Tensor, " utterance"]:
        """The index in :attr:`runs` of each utterance, in memory."""
        lengths = torch.tensor([rows.stop - rows.start for _, rows in self.runs])
        numbers = torch.arange(len(self.runs))
        return numbers.repeat_interleave(lengths, output_size=len(self.groups))

    @cached_property
    def owners(self) -> Owners:
        """Jackknife groups of the utterances."""
        return Owners(self.groups)

    @cached_property
    def owners_of_runs(self) -> Owners:
        """Jackknife groups of the runs."""
        return Owners(group for group, _ in self.runs)

    def by_run(self, values: Float[Tensor, "utterance *rest"]) -> Float[Tensor, "run *rest"]:
        """Values of the utterances, summed over each run."""
        if len(self.runs) == len(self.groups):
            return values
        if values.device.type != "cpu":
            # Not ``index_add_``, see :func:`_add_in_order`.
            members = self._run_members(values.dtype)
            return (members @ values.flatten(1)).unflatten(1, values.shape[1:])
        sums = values.new_zeros(len(self.runs), *values.shape[1:])
        return sums.index_add_(0, self.run_numbers, values)

    def _run_members(self, dtype: torch.dtype) -> Float[Tensor, "run utterance"]:
        """1 where an utterance is in a run, else 0."""
        if ("runs", dtype) not in self._results:
            members = functional.one_hot(self.run_numbers, len(self.runs)).T
            self._results["runs", dtype] = members.to(self.mask.device, dtype)
        return self._results["runs", dtype]

    @cached_property
    def counts(self) -> Float[Tensor, " utterance"]:
        """Number of tokens of each utterance that count."""
        return self.counted.sum(1).double()

    @cached_property
    def counted_type_masks(self) -> Float[Tensor, "utterance type token"]:
        """1 where a token has a type and counts, else 0."""
        return self.type_masks * self.counted.unsqueeze(1)

    @cached_property
    def type_counts(self) -> Float[Tensor, "utterance type"]:
        """Number of tokens of each utterance and type that count."""
        return self.counted_type_masks.sum(-1)

    def chosen(self, vectors_of: str) -> Int[Tensor, " utterance"]:
        """The index of the ``first`` or ``last`` token of each utterance that counts."""
        counted = self.counted.int()
        if vectors_of == "first":
            return counted.argmax(1)
        return counted.shape[1] - 1 - counted.flip(1).argmax(1)

    def of_texts(self, vectors_of: str) -> "Tokens":
        """One token for each utterance, which counts if any of its tokens does.

        Args:
            vectors_of: ``first`` or ``last``, whose type it has, or ``mean``, which is ``other``.
        """
        if vectors_of not in self._results:
            other = self.type_names.index("other")
            types = self.types.new_full((len(self.types), 1), other)
            if vectors_of != "mean":
                types = self.types.gather(1, self.chosen(vectors_of).unsqueeze(1))
            mask = self.counted.any(1, keepdim=True)
            self._results[vectors_of] = Tokens(
                mask, types, self.groups, self.special_tokens, type_names=self.type_names
            )
        return self._results[vectors_of]

    def summing_weights(
        self, heads: int, dtype: torch.dtype
    ) -> Float[Tensor, "utterance head 2 token"]:
        """Weights of two sums over tokens: those of the caller, and 1 where a token counts.

        All layers use the same memory.
        """
        if (heads, dtype) not in self._results:
            weights = self.counted.to(dtype)[:, None, None].repeat(1, heads, 2, 1)
            self._results[heads, dtype] = weights
        return self._results[heads, dtype]

    def once(self, function: Callable[["Tokens"], T]) -> T:
        """The result of a function of these tokens, computed once for all layers that have them."""
        if function not in self._results:
            self._results[function] = function(self)
        return self._results[function]

    @property
    def counted_types(self) -> slice:
        """The range of types whose tokens count."""
        return slice(None) if self.special_tokens else slice(self.specials, None)

    def shorter_than(self, limit: float, hidden: Float[Tensor, "utterance token dim"]) -> "Tokens":
        """The same tokens, where those with a long hidden vector do not count.

        Args:
            limit: the norm from which on a vector is long.
        """
        norms = torch.linalg.vector_norm(hidden, dim=-1)
        is_short = norms < limit
        long = self.mask & ~is_short
        silent = long if self.silent is None else self.silent | long
        return replace(self, silent=silent, long=long)

    def in_bin(self, bin: Bin) -> Bool[Tensor, "utterance token"]:
        """True at tokens in a bin."""
        if bin.by == "type":
            return self.types == bin.index
        last = 2**bin.index
        first = last // 2 + 1
        position = self.mask.cumsum(1)
        is_before_next = position <= last
        return (position >= first) & is_before_next

    def of_bin(self, bin: Bin) -> "Tokens":
        """The same tokens, where only those in a bin count."""
        if bin not in self._results:
            silent = ~self.in_bin(bin)
            if self.silent is not None:
                silent |= self.silent
            self._results[bin] = replace(self, silent=silent)
        return self._results[bin]

    def head(self, utterances: int, tokens: int | None = None) -> "Tokens":
        """The first ``tokens`` tokens of the first ``utterances`` utterances."""
        part = slice(utterances), slice(tokens)
        silent = None if self.silent is None else self.silent[part]
        ids = None if self.ids is None else self.ids[part]
        return replace(
            self,
            mask=self.mask[part],
            types=self.types[part],
            groups=self.groups[:utterances],
            silent=silent,
            long=None,
            ids=ids,
        )


def bins_of(count: int) -> int:
    """The number of bins of ``count`` positions, which count from 1 in each utterance.

    Bin 0 is position 1, and bin b has the positions 2^(b−1) + 1 to 2^b: 2, 3 to 4, 5 to 8, ....

    >>> bins_of(1), bins_of(2), bins_of(4), bins_of(5)
    (1, 2, 3, 4)
    """
    return 1 + (count - 1).bit_length()


def unpadded(
    groups: tuple[int, ...],
    count: int,
    leading: Sequence[str] = (),
    special_tokens: bool = True,
    type_names: tuple[str, ...] = TOKEN_TYPES,
) -> Tokens:
    """``count`` tokens per utterance, without padding.

    Args:
        leading: types of the first tokens; all others are ``other``.
    """
    other = type_names.index("other")
    types = torch.full((len(groups), count), other)
    for position, name in enumerate(leading):
        types[:, position] = type_names.index(name)
    mask = torch.ones_like(types, dtype=torch.bool)
    return Tokens(mask, types, groups, special_tokens, type_names=type_names)


@dataclass(eq=False)
class Visibility:
    """Pairs of a query and a key that it may see. No query sees padding.

    Attributes:
        queries: the tokens of the queries.
        keys: the tokens of the keys.
        causal: whether query m sees the keys n ≤ m only.
        seen_by: True where a query sees a key; None if each sees all keys, or if attention is
            causal.
        hidden: True where the softmax leaves out a key, once a layer has needed it.
        bands: the queries whose rows are made at once, and the keys that they see.
        plain: whether ``causal`` alone says which keys a query sees, since no padding comes before
            a token.
    """

    queries: Tokens
    keys: Tokens
    causal: bool = False
    seen_by: Bool[Tensor, "#utterance 1 #token #key"] | None = None
    hidden: Bool[Tensor, "#utterance 1 #token #key"] | None = None
    bands: Sequence[Band] = ()
    plain: bool = False
    _factors: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)
    _of_bins: dict[Bin, "Visibility"] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.bands:
            self.bands = bands(self.shape, self.queries.mask.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a mask of all pairs: utterance x 1 x query x key."""
        utterances, queries = self.queries.mask.shape
        keys = self.keys.mask.shape[1]
        return utterances, 1, queries, keys

    @classmethod
    def from_mask(
        cls, mask: Bool[Tensor, "#utterance 1 #token #key"] | None, queries: Tokens, keys: Tokens
    ) -> "Visibility":
        """The visibility that an attention mask allows; without a mask, all pairs are visible."""
        if mask is None:
            return cls(queries, keys)
        count = keys.mask.shape[1]
        length = queries.mask.shape[1]
        shape = len(queries.mask), 1, length, count
        some = bands(shape, mask.device)
        is_long = len(some) > 1
        is_everyone = []
        is_causal = []
        ends = []
        for band in some:
            real = queries.mask[:, None, band.queries, None]
            pairs = real & keys.mask[:, None, None, :]
            seen = rows_of(mask, band.queries) & real
            earlier = is_earlier(band.queries, count, mask.device)
            is_everyone.append((seen == pairs).all())
            is_causal.append((seen == (pairs & earlier)).all())
            if is_long:
                is_key = seen.flatten(0, 2).any(0).int()
                first = is_key.argmax()
                last = is_key.flip(0).argmax()
                ends += [first, count - last]
        is_padding_last = keys.mask[:, 1:] <= keys.mask[:, :-1]
        # In one transfer: each would wait for all pending work of the device.
        answers = torch.stack([is_padding_last.all(), *is_everyone, *is_causal, *ends]).tolist()
        answers = iter(answers)
        plain = bool(next(answers))
        everyone = all([*itertools.islice(answers, len(some))])
        causal = all([*itertools.islice(answers, len(some))])
        if is_long:
            some = [Band(band.queries, slice(next(answers), next(answers))) for band in some]
        if everyone:
            return cls(queries, keys, bands=some)
        if causal and length == count:
            return cls(queries, keys, True, bands=some, plain=plain)
        return cls(queries, keys, seen_by=mask, bands=some)

    def of_bin(self, bin: Bin) -> "Visibility":
        """The same pairs, where only queries in a bin count."""
        if bin not in self._of_bins:
            queries = self.queries.of_bin(bin)
            keys = self.keys.of_bin(bin)
            of_bin = replace(self, queries=queries, keys=keys)
            of_bin._factors = self._factors
            self._of_bins[bin] = of_bin
        return self._of_bins[bin]

    @property
    def everyone(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.seen_by is None

    def over_queries(
        self, values: Float[Tensor, "*batch token dim"]
    ) -> Float[Tensor, "*batch key dim"]:
        """Sum of ``values`` over the queries m that see key n, for each key n: Σ_m values_m.

        If every query sees every key, the sum is the same for all keys, and the key axis has length
        1. In causal attention it is the sum over m ≥ n, a cumulative sum from the end.
        """
        if self.everyone:
            return values.sum(-2, keepdim=True)
        if self.causal:
            from_the_end = values.flip(-2)
            sums = from_the_end.cumsum(-2)
            return sums.flip(-2)
        if values.dim() == 3:
            by_head = values.unsqueeze(1)
            return self.over_queries(by_head).squeeze(1)
        if len(self.bands) == 1:
            seen = self._seen(self.bands[0], values.dtype)
            return seen.mT @ values
        utterances, heads, _, dim = values.shape
        sums = values.new_zeros(utterances, heads, self.shape[3], dim)
        for band in self.bands:
            seen = self._seen(band, values.dtype)
            of_band = values[:, :, band.queries]
            sums[:, :, band.keys] += seen.mT @ of_band
        return sums

    def _seen(self, band: Band, dtype: torch.dtype) -> Float[Tensor, "utterance 1 query key"]:
        """1 where a query of a band sees a key of it, else 0; kept if there is one band."""
        if dtype in self._factors:
            return self._factors[dtype]
        rows = rows_of(self.seen_by, band.queries)
        utterances, _, _, keys = self.shape
        count = band.queries.stop - band.queries.start
        rows = rows.expand(utterances, 1, count, keys)
        rows = rows[..., band.keys]
        seen = rows.to(dtype)
        if len(self.bands) == 1:
            self._factors[dtype] = seen
        return seen

    @cached_property
    def seen(self) -> Float[Tensor, "utterance token"]:
        """Number of keys that each query sees."""
        real = self.keys.mask.double()
        if self.everyone:
            return real.sum(1, keepdim=True).expand(-1, self.queries.mask.shape[1])
        if self.causal:
            return real.cumsum(1)
        counts = []
        for band in self.bands:
            seen = self._seen(band, torch.float64).squeeze(1)
            counts.append(seen @ real[:, band.keys, None])
        return torch.cat(counts, 1).squeeze(-1)

    @cached_property
    def query_counts(self) -> Float[Tensor, "utterance #key"]:
        """Number of counted queries that see each key: one number where all see every key."""
        counted = self.queries.counted.double()
        return self.over_queries(counted.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def pairs(self) -> Float[Tensor, "utterance type"]:
        """Number of pairs of a counted query and a key that it sees, by the type of the key."""
        return self._by_type(self.queries.counted.double())

    @cached_property
    def uniform(self) -> Float[Tensor, "utterance type"]:
        """Weight by type of key, if attention is spread evenly over visible keys.

        It is summed over counted queries.
        """
        return self._by_type(self.queries.counted / self.seen.clamp_min(1))

    @cached_property
    def with_sink(self) -> tuple[Tensor, Tensor, Tensor]:
        """``seen``, ``pairs`` and ``uniform`` if each query also sees a sink.

        The sink is the last of the types.
        """
        counted = self.queries.counted.double()
        seen = self.seen + 1
        of_sink = counted.sum(1, keepdim=True)
        pairs = torch.cat([self.pairs, of_sink], 1)
        weights = counted / seen
        of_types = self._by_type(weights)
        of_sink = weights.sum(1, keepdim=True)
        uniform = torch.cat([of_types, of_sink], 1)
        return seen, pairs, uniform

    def _by_type(self, values: Float[Tensor, "utterance token"]) -> Float[Tensor, "utterance type"]:
        """Values of queries, summed over their visible keys by the type of the key."""
        count = self.keys.mask.shape[1]
        of_key = self.over_queries(values.unsqueeze(-1))
        of_key = of_key.expand(-1, count, -1)
        masks = self.keys.type_masks.double()
        return (masks @ of_key).squeeze(-1)
