"""Attention by blocks of rows: output, entropy and masses of rows, and reductions of them.

The weights of a layer are never in memory at once: a few rows are computed at a time, and none is
kept.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.long_sums import sum_type
from analysis_lib.capture.masks import Band, rows_of
from analysis_lib.capture.tokens import Bin, Visibility

# Number of scores computed at once: what fits the cache of a processor, or a small part of a GPU's
# memory.
SCORES_AT_ONCE, SCORES_AT_ONCE_ON_GPU = 2**19, 2**24
# Number of rows of causal attention computed at once on a processor: scores of keys after the last
# of them are not computed.
CAUSAL_ROWS = 64

# Slices of utterances, heads and queries.
Part = tuple[slice, slice, slice]


@dataclass(eq=False)
class Softmax:
    """The attention of a layer, from which blocks of its weights are computed.

    With scores s = scaling · q·k + bias and weights p = softmax(s) over the keys that a query sees,
    the entropy of a row is −Σ p ln p, in nats, in [0, ln keys].

    Attributes:
        query, key: queries and keys after any rotation, with equal numbers of heads.
        scaling: the factor of the products.
        bias: the term added to the scores, if any.
        hidden: True where a query does not see a key; every query must see one.
        causal: whether no query sees a later key; ``hidden`` must agree.
        softcap: c, if scaled scores are capped to c tanh(s / c) before ``bias``.
        sinks: a learnt logit per head beside its scores, which takes weight and gives no value.
        bands: the rows whose part of ``hidden`` is made at once, and the keys that they see; all
            rows and keys if there are none.
    """

    query: Float[Tensor, "utterance head token head_dim"]
    key: Float[Tensor, "utterance head key head_dim"]
    scaling: float
    bias: Float[Tensor, "#utterance #head #token key"] | None = None
    hidden: Bool[Tensor, "#utterance #head #token key"] | None = None
    causal: bool = False
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    bands: Sequence[Band] = ()
    # The block of all rows, if one has room for them, since several metrics read it.
    _only: "Block | None" = field(default=None, init=False, repr=False)

    def blocks(self) -> Iterator["Block"]:
        """Blocks of rows that together cover all rows."""
        if self._only is not None:
            yield self._only
            return
        every = slice(0, len(self.query)), slice(0, self.query.shape[1])
        all_rows = (*every, slice(0, self.query.shape[2]))
        for logits in self.logits():
            block = self._block(logits)
            if block.part == all_rows:
                self._only = block
            yield block

    def logits(self) -> Iterator["Logits"]:
        """The scores of blocks of rows that together cover all rows, before the softmax."""
        every = Band(slice(0, self.query.shape[2]), slice(0, self.key.shape[2]))
        for band in self.bands or [every]:
            yield from self._logits_of_band(band)

    def _logits_of_band(self, band: Band) -> Iterator["Logits"]:
        key_count = self.key.shape[2]
        shape = (*self.query.shape[:3], key_count)
        bias = None if self.bias is None else self.bias.expand(shape)
        hidden = None
        if self.hidden is not None:
            rows = band.queries.stop - band.queries.start
            hidden = rows_of(self.hidden, band.queries).expand(*shape[:2], rows, key_count)
        lowest = lowest_score(self.query.dtype)
        for part in parts(self.query, band, self.causal):
            utterances, heads, queries = part
            seen = band.keys
            if self.causal:
                seen = slice(seen.start, min(queries.stop, seen.stop))
            key = self.key[utterances, heads, seen]
            scores = self.query[part] @ key.transpose(2, 3)
            scores.mul_(self.scaling)
            if self.softcap is not None:
                scores.div_(self.softcap).tanh_().mul_(self.softcap)
            if bias is not None:
                scores += bias[part][..., seen]
            if hidden is not None:
                first = band.queries.start
                rows = slice(queries.start - first, queries.stop - first)
                scores.masked_fill_(hidden[utterances, heads, rows, seen], lowest)
            yield Logits(part, scores, seen)

    def _block(self, logits: "Logits") -> "Block":
        """The weights of some rows; their scores are overwritten."""
        scores = logits.scores
        largest = scores.amax(-1, keepdim=True)
        # ``softmax`` takes several times as long over rows of fewer than sixteen keys.
        shifted = scores.sub_(largest)
        powers = shifted.exp()
        total = powers.sum(-1, keepdim=True)
        kept = None
        if self.sinks is not None:
            of_keys = (total.log() + largest).squeeze(-1)
            sinks = self.sinks[logits.part[1]].unsqueeze(-1)
            kept = torch.sigmoid(of_keys - sinks)
        first_key = logits.keys.start
        return Block(logits.part, self.key.shape[2], powers, shifted, total, kept, first_key)


@dataclass(eq=False)
class Logits:
    """Some rows of the scores of a layer as they enter the softmax.

    They are scaled, capped where the model caps them, and have their bias.

    Attributes:
        part: the slices of utterances, heads and queries.
        scores: the scores; :func:`lowest_score` where a query does not see a key.
        keys: the slice of the keys; queries of the block see no others.
    """

    part: Part
    scores: Float[Tensor, "utterance head query seen"]
    keys: slice


@dataclass(eq=False)
class Block:
    """Some rows of the attention weights of a layer.

    Attributes:
        part: the slices of utterances, heads and queries.
        key_count: the number of keys.
        powers: e = exp(s − max s); the weights are e / Σ e.
        shifted: s − max s; None once :func:`attend` has used it, or if the model provides the
            weights.
        total: the sum Z = Σ e; None if the model provides the weights.
        kept: the share of weight that a learnt sink leaves to the keys; None without a sink.
        first_key: the first key that queries of the block see; earlier keys have weight 0.
    """

    part: Part
    key_count: int
    powers: Float[Tensor, "utterance head query seen"]
    shifted: Float[Tensor, "utterance head query seen"] | None = None
    total: Float[Tensor, "utterance head query 1"] | None = None
    kept: Float[Tensor, "utterance head query"] | None = None
    first_key: int = 0

    @property
    def weights(self) -> Float[Tensor, "utterance head query key"]:
        """The attention weights; rows of padding have weights, too."""
        weights = self.powers
        if self.total is not None:
            weights = weights / self.total
        if self.kept is not None:
            weights = weights * self.kept.unsqueeze(-1)
        return self._of_all_keys(weights)

    @property
    def query_positions(self) -> Int[Tensor, " query"]:
        """The positions of the queries."""
        _, _, queries = self.part
        return torch.arange(queries.start, queries.stop, device=self.powers.device)

    @property
    def key_positions(self) -> Int[Tensor, " key"]:
        """The positions of the keys."""
        return torch.arange(self.key_count, device=self.powers.device)

    def of_queries(
        self,
        numbers: Shaped[Tensor, "all token"],
    ) -> Float[Tensor, "utterance 1 query"]:
        """Values of the block's queries, from values of all queries of the batch."""
        utterances, _, queries = self.part
        chosen = numbers[utterances, queries].to(self.powers.dtype)
        return chosen.unsqueeze(1)

    def average(
        self,
        values: Shaped[Tensor, "query key"],
    ) -> Float[Tensor, "utterance head query"]:
        """Mean of ``values`` over the keys of each query, weighted by attention.

        It is Σ_n p_mn v_mn / Σ_n p_mn; the weight of a sink cancels.
        """
        end = self.first_key + self.powers.shape[-1]
        weighted = self.powers * values[:, self.first_key : end]
        if self.total is None:
            return weighted.sum(-1) / self.powers.sum(-1)
        return weighted.sum(-1) / self.total.squeeze(-1)

    def received(
        self,
        numbers: Shaped[Tensor, "all token"],
    ) -> Float[Tensor, "utterance head key"]:
        """Σ_m a_m p_mn for each key n, where a has a value for every query of the batch."""
        given = self.of_queries(numbers)
        if self.kept is not None:
            given = given * self.kept
        if self.total is not None:
            given = given / self.total.squeeze(-1)
        sums = (given.unsqueeze(2) @ self.powers).squeeze(2)
        return self._of_all_keys(sums)

    def _of_all_keys(
        self,
        values: Float[Tensor, "*batch seen"],
    ) -> Float[Tensor, "*batch key"]:
        """The values of the visible keys, extended by 0 at keys that no query of the block sees."""
        after = self.key_count - self.first_key - values.shape[-1]
        if after == self.first_key == 0:
            return values
        return functional.pad(values, (self.first_key, after))


@dataclass(eq=False)
class AttentionWeights:
    """The attention weights of a layer: entropy and masses of its rows, and reductions of them.

    Attributes:
        visibility: the tokens of the queries and of the keys, and the visible pairs.
        heads: the number of heads of queries.
        blocks: returns the weights, block by block.
        entropy: −Σ p ln p of each row, in nats, in [0, ln keys]; None unless ``weights`` are
            needed.
        mass: the weight that each query gives to the keys of each type; None likewise.
        logits: returns the scores before the softmax, block by block; None where the model gives
            its weights alone.
        has_sink: whether a learnt sink, a logit beside the scores, takes weight and gives no value.
            It is the last type, and a key of each query.
    """

    visibility: Visibility
    heads: int
    blocks: Callable[[], Iterable[Block]]
    entropy: Float[Tensor, "utterance head token"] | None = None
    mass: Float[Tensor, "utterance head token type"] | None = None
    logits: Callable[[], Iterable[Logits]] | None = None
    has_sink: bool = False

    def of_bin(self, bin: Bin) -> "AttentionWeights":
        """The same weights, where only queries in a bin count."""
        return replace(self, visibility=self.visibility.of_bin(bin))

    def reduce(self, function: Callable[[Block], Tensor]) -> Tensor:
        """The sum over all blocks of a function of each block.

        The weights are computed once more for it: some rows of some heads and utterances at a time.

        Args:
            function: maps a :class:`Block` to values of shape utterance x head x ..., those of its
                utterances and heads.

        Returns:
            Values of shape utterance x head x ..., summed over the queries.
        """
        utterances, queries = self.counted.shape
        every = (slice(0, utterances), slice(0, self.heads), slice(0, queries))
        sums = None
        for block in self.blocks():
            values = function(block)
            if block.part == every:
                return values
            if sums is None:
                shape = len(self.counted), self.heads, *values.shape[2:]
                sums = values.new_zeros(shape, dtype=sum_type(queries, values.dtype))
            utterances, heads, _ = block.part
            sums[utterances, heads] += values
        return sums

    def by_query_head(
        self, values: Float[Tensor, "utterance key_head key dim"]
    ) -> Float[Tensor, "utterance head key dim"]:
        """Vectors of keys for each head of queries: with grouped queries, a group shares them."""
        return values.repeat_interleave(self.heads // values.shape[1], 1)

    @property
    def is_to_itself(self) -> bool:
        """Whether the keys are the tokens of the queries."""
        return self.visibility.queries is self.visibility.keys

    @property
    def counted(self) -> Bool[Tensor, "utterance token"]:
        """True at the queries that count."""
        return self.visibility.queries.counted

    @property
    def key_counts(self) -> Float[Tensor, "utterance token"]:
        """Number of keys that each query may see."""
        return self._of_pairs[0]

    @property
    def pairs(self) -> Float[Tensor, "utterance type"]:
        """Number of pairs of a counted query and a visible key, by the type of the key."""
        return self._of_pairs[1]

    @property
    def uniform(self) -> Float[Tensor, "utterance type"]:
        """Mass over counted queries if attention were spread evenly over visible keys."""
        return self._of_pairs[2]

    @property
    def _of_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        visibility = self.visibility
        if self.has_sink:
            return visibility.with_sink
        return visibility.seen, visibility.pairs, visibility.uniform


def attend(
    softmax: Softmax,
    value: Float[Tensor, "utterance head key value_dim"],
    type_masks: Float[Tensor, "utterance type key"],
) -> tuple[
    Float[Tensor, "utterance head token value_dim"],
    Float[Tensor, "utterance head token"],
    Float[Tensor, "utterance head token kind"],
]:
    """The output of attention, the entropy of its rows, and their weight by type of key.

    With e = exp(s − max s) and Z = Σ e, weights are e / Z and the entropy is
    ln Z − Σ e (s − max s) / Z: no logarithm of every weight is taken. One product of e with the
    values [v, type indicators] gives the output and the weight of each type, which are then
    divided by Z.

    With a sink of logit s₀, all weights shrink by a = 1 / (1 + exp(s₀ − log Σ exp s)), the sink has
    1 − a, and the entropy becomes a times that of the row plus −a ln a − (1 − a) ln(1 − a).

    Args:
        type_masks: 1 where a key has a type, else 0.

    Returns:
        The output; the entropy of each row; the weight by utterance, head, query and type, the
        sink last.
    """
    query = softmax.query
    rows = query.shape[:3]
    indicators = type_masks.transpose(1, 2).unsqueeze(1)
    indicators = indicators.expand(-1, rows[1], -1, -1)
    values = torch.cat([value, indicators], -1)
    mixed = query.new_empty(*rows, values.shape[-1])
    entropy = query.new_empty(rows)
    kept = query.new_empty(rows)
    for block in softmax.blocks():
        part = block.part
        utterances, heads, _ = part
        end = block.first_key + block.powers.shape[-1]
        seen = values[utterances, heads, block.first_key : end]
        torch.div(block.powers @ seen, block.total, out=mixed[part])
        total = block.total.squeeze(-1)
        # In place: the array is as large as all weights of the block, and not needed again.
        spread = block.shifted.mul_(block.powers).sum(-1)
        torch.addcdiv(total.log(), spread, total, value=-1, out=entropy[part])
        block.shifted = None
        if block.kept is not None:
            kept[part] = block.kept
    if softmax.sinks is not None:
        lost = 1 - kept
        entropy = kept * entropy + torch.special.entr(kept)
        entropy = entropy + torch.special.entr(lost)
        mixed = mixed * kept.unsqueeze(-1)
        mixed = torch.cat([mixed, lost.unsqueeze(-1)], -1)
    width = value.shape[-1]
    return mixed[..., :width], entropy.clamp_min(0), mixed[..., width:]


def parts(query: Tensor, band: Band, causal: bool) -> Iterator[Part]:
    """Parts computed at once: several utterances, or some heads of one, or some rows of a head."""
    on_cpu = query.device.type == "cpu"
    room = SCORES_AT_ONCE if on_cpu else SCORES_AT_ONCE_ON_GPU
    utterances, heads, _, _ = query.shape
    tokens = band.queries.stop - band.queries.start
    keys = band.keys.stop - band.keys.start
    most = [room // (heads * tokens * keys), room // (tokens * keys), room // keys]
    if causal and on_cpu:
        most[2] = min(most[2], CAUSAL_ROWS)
    ranges = []
    every = slice(0, utterances), slice(0, heads), band.queries
    for whole, size in zip(every, most, strict=True):
        size = max(1, size)
        starts = range(whole.start, whole.stop, size)
        ranges.append([slice(start, min(start + size, whole.stop)) for start in starts])
    yield from itertools.product(*ranges)


def lowest_score(dtype: torch.dtype) -> float:
    """The score of a hidden key, whose weight is then 0.

    It is finite, since :func:`attend` multiplies it by that weight.
    """
    return torch.finfo(dtype).min / 2
