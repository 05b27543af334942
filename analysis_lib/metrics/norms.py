"""Norms of hidden vectors by position and type of token, and the tokens with very long ones."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Activations, Vectors
from analysis_lib.metrics.accumulator import (
    VECTOR_SPACES,
    Columns,
    LayerSums,
    Metric,
    Name,
    kinds_of,
    means_of,
    type_means,
)
from analysis_lib.metrics.slots import slot_positions, slot_types, slots_of, with_all

# Norms are counted in logarithmic bins 1.1 % wide, whose middle is at most 0.55 % off, from 2⁻¹⁶ to
# 2²⁴. Sums are kept by octave, since the norms of a layer fall into few octaves and sums of all
# octaves by group would be too large.
PER_OCTAVE, LOWEST, HIGHEST = 64, -16, 24
BINS = PER_OCTAVE * (HIGHEST - LOWEST)
# Smallest gap of norms below a spike (upper end / lower end of a range without norms).
GAP = 2.0
# Smallest share of the squared norm of spikes for which a dimension is listed.
LEAST_SHARE = 0.05


def separating_bin(
    counts: Int[np.ndarray, " bin"],
) -> int | None:
    """First bin above the widest gap beyond the median, if its ends differ by ``GAP`` or more.

    Args:
        counts: the number of norms in each bin.

    >>> counts = np.zeros(BINS, int)
    >>> counts[[100, 101, 400]] = 5, 5, 1
    >>> separating_bin(counts), separating_bin(counts * (np.arange(BINS) < 400))
    (400, None)
    """
    occupied = np.flatnonzero(counts)
    above = occupied[occupied >= median_bin(counts)]
    widths = np.diff(above)
    # One bin wider than ``GAP``: norms at the near edges of both bins still differ by that factor.
    if not len(widths) or widths.max() <= PER_OCTAVE * np.log2(GAP):
        return None
    return int(above[widths.argmax() + 1])


def median_bin(
    counts: Int[np.ndarray, " bin"],
) -> int:
    """The bin of the median; for an even number of norms, that of the lower middle one."""
    rank = (counts.sum() + 1) // 2
    return int(np.searchsorted(counts.cumsum(), rank))


def median_norm(
    counts: Int[np.ndarray, "*slot bin"],
) -> Float[np.ndarray, "*slot"]:
    """The median of the norms of each slot; NaN where there is none.

    For an even number it is the mean of the two middle norms. The norms of a bin are taken to be
    spread evenly, on a logarithmic scale, so that the median is less than 1.1 % off, and far less
    for many norms. It moves with every norm that is added, as the jackknife requires.

    >>> counts = np.zeros((3, BINS), int)
    >>> counts[:, -8 * PER_OCTAVE] = 1, 3, 1  # From 2**16 on.
    >>> counts[1:, 0] = 2, 1
    >>> places = (np.log2(median_norm(counts)) - 16) * PER_OCTAVE
    >>> # The middle of 1; the first of 3; half of the larger of 2, the other being tiny.
    >>> places.round(6)
    array([  0.5     ,   0.166667, -63.5     ])
    """
    up_to = counts.cumsum(-1)
    norms = up_to[..., -1]
    lower = _norm_of_rank(counts, up_to, (norms + 1) // 2)
    upper = _norm_of_rank(counts, up_to, norms // 2 + 1)
    return (lower + upper) / 2


def _norm_of_rank(
    counts: Int[np.ndarray, "*slot bin"],
    up_to: Int[np.ndarray, "*slot bin"],
    rank: Int[np.ndarray, "*slot"],
) -> Float[np.ndarray, "*slot"]:
    """The norm of a given rank, from the smallest, in each slot; NaN where there is none.

    Args:
        counts: the number of norms in each bin.
        up_to: the number of norms up to and including each bin.
        rank: the rank, from 1.
    """
    reaches = up_to >= rank[..., None]
    bins = reaches.argmax(-1, keepdims=True)
    inside = np.take_along_axis(counts, bins, -1)[..., 0]
    before = np.take_along_axis(up_to, bins, -1)[..., 0] - inside
    share = means_of(rank - 0.5 - before, inside)
    return _norm(bins[..., 0] + share - 0.5)


def _norm(
    bins: np.ndarray | np.integer | int,
) -> np.ndarray:
    """The norm at the middle of a bin."""
    octaves = (np.asarray(bins) + 0.5) / PER_OCTAVE
    return np.asarray(2.0 ** (LOWEST + octaves))


def norm_bins(
    norms: Float[Tensor, "*place"],
) -> Int[Tensor, "*place"]:
    """The bin of each norm."""
    octaves = norms.double().log2() - LOWEST
    bins = (octaves * PER_OCTAVE).nan_to_num(0, BINS - 1, 0)
    return bins.floor().clamp(0, BINS - 1).long()


class TokenNorms(Metric):
    """Norms of hidden vectors, and the tokens whose norm stands apart: massive activations.

    Columns: layer, position (1 for the first token, up to 8; missing in rows over all positions),
    token_type (all, or a type of token); median, of the norms of such tokens, from
    :func:`median_norm`, with its 95 % interval; largest, the largest of them, to within 0.55 %;
    multiple, of the layer: how many times its median norm separates spikes from all other tokens
    (missing without spikes); spikes, the number of these tokens that are spikes; and tokens, their
    number. Spikes lie above the widest gap of norms beyond the median, if its upper end is at least
    twice its lower end; the multiple is the middle of the gap, on a logarithmic scale. Zero vectors
    do not count. Made on request.

    The jackknife of a quantile is consistent if the groups are larger than the square root of the
    sample (Shao & Wu 1989): with 20 groups, from 400 texts on; the interval is rough for fewer. The
    largest norm and the multiple have none: they depend on single tokens, and are those of the
    whole corpus in every replicate.
    """

    name = "token_norms"
    needs = frozenset({"hidden"})
    axes = ("position",)
    optional = ("position",)
    interval = "median"
    limits = (0, np.inf)
    smooth = False
    version = 2
    counts = "tokens"
    on_request = True

    def update(self, activations: Activations) -> None:
        for _, hidden in self.vectors(activations):
            self._update(hidden, activations)

    def _update(self, hidden: Vectors, activations: Activations) -> None:
        layer = activations.layer
        norms = hidden.norms[:, 0]
        slots = hidden.tokens.once(slots_of) * (norms != 0).unsqueeze(1)
        bins = norm_bins(norms)
        octaves, octave_places = (bins // PER_OCTAVE).unique(return_inverse=True)
        slot_numbers = torch.arange(slots.shape[1], device=bins.device)
        where = (
            hidden.tokens.run_numbers.to(bins.device)[:, None, None],
            slot_numbers[:, None],
            octave_places.unsqueeze(1),
            bins.unsqueeze(1) % PER_OCTAVE,
        )
        shape = len(hidden.tokens.runs), slots.shape[1], len(octaves), PER_OCTAVE
        # Counts are integers, so the order of addition does not matter.
        counts = slots.new_zeros(shape).index_put_(where, slots, accumulate=True)
        self.add_runs(("tokens", layer), counts.sum((2, 3)), activations)
        for octave, of_octave in zip(octaves.tolist(), counts.unbind(2), strict=True):
            if of_octave.any():
                self.add_runs(("norms", octave, layer), of_octave, activations)

    def rows(self, sums: LayerSums) -> Columns:
        counts = self._by_bin(sums)
        whole = self._by_bin(sums.whole)
        occur = whole.any(-1)
        counts = counts[:, occur]
        multiple = np.array(np.nan)
        spikes = np.zeros(counts.shape[:2], int)
        # The first slot holds all tokens.
        first = separating_bin(whole[0])
        if first is not None:
            below = np.flatnonzero(whole[0, :first])[-1]
            middle = np.sqrt(_norm(first) * _norm(below))
            multiple = middle / median_norm(whole[:1])
            spikes = counts[..., first:].sum(-1)
        largest = [np.flatnonzero(of_slot)[-1] for of_slot in whole[occur]]
        return {
            "position": slot_positions(self.types)[occur],
            "token_type": slot_types(self.types)[occur],
            "median": median_norm(counts),
            "largest": _norm(np.array(largest, int)),
            "multiple": multiple,
            "spikes": spikes,
            "tokens": counts.sum(-1),
        }

    @staticmethod
    def _by_bin(
        sums: Mapping[Name, np.ndarray],
    ) -> Int[np.ndarray, "*replicate slot bin"]:
        """Number of norms in each bin, for all tokens and for each slot."""
        tokens = sums["tokens"]
        shape = *tokens.shape, BINS // PER_OCTAVE, PER_OCTAVE
        counts = np.zeros(shape, int)
        for name in sums:
            if name != "tokens":
                octave = name[1]
                counts[..., octave, :] = sums[name]
        counts = counts.reshape(*tokens.shape, BINS)
        return with_all(counts, -2)


class NormsByType(Metric):
    """Mean norm of the vectors of each space, by type of token.

    A sink whose value is short adds little to what it is attended for: a "no-op" (Fesser et al.
    2026). Columns: space, layer, head (missing for hidden and final), token_type (all, or a type of
    token), norm, the mean of ‖x‖₂ in the units of the vectors, with its 95 % interval; and tokens,
    their number. Zero vectors count; a type that does not occur has no row. Made on request.
    """

    name = "norms_by_type"
    needs = frozenset(VECTOR_SPACES)
    axes = ("head", "token_type")
    by_space = True
    interval = "norm"
    limits = (0, np.inf)
    counts = "tokens"
    on_request = True

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            masks = vectors.tokens.counted_type_masks
            parts = (vectors.every_norm, masks.unsqueeze(1))
            self.add(("norms", space, layer), parts, activations, _norms_of_types)
            self.add(("tokens", space, layer), vectors.tokens.type_counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["tokens"] > 0
        norms = sums["norms"][..., occur, None]
        means, tokens = type_means(norms, sums["tokens"], occur)
        return {
            "token_type": kinds_of(occur, self.types),
            "norm": means[..., 0],
            "tokens": tokens[..., 0],
        }


def _norms_of_types(norms: Tensor, masks: Tensor) -> Tensor:
    """The norms of the tokens of each type, summed."""
    return (norms.double().unsqueeze(-2) * masks).sum(-1)


class SpikeDimensions(Metric):
    """Dimensions that make the vectors of spikes long, where spikes are those of token_norms.

    Columns: layer, dimension (from 0), share, of the squared norm of the spikes of the layer, and
    rms, the root mean square of its values at these tokens; only dimensions with a share of at
    least 5 %, the largest first. A layer without spikes has no row. Made on request.
    """

    name = "spike_dimensions"
    needs = frozenset({"hidden"})
    axes = ("dimension",)
    on_request = True

    def update(self, activations: Activations) -> None:
        for _, hidden in self.vectors(activations):
            self._update(hidden, activations)

    def _update(self, hidden: Vectors, activations: Activations) -> None:
        layer = activations.layer
        norms = hidden.norms[:, 0]
        counted = (norms != 0).unsqueeze(-1)
        bins = norm_bins(norms)
        tokens = torch.bincount(bins[norms != 0], minlength=BINS)
        octaves = functional.one_hot(bins // PER_OCTAVE, BINS // PER_OCTAVE)
        octaves = octaves.double() * counted
        values = torch.where(counted, hidden.values[:, 0], 0)
        squares = octaves.mT @ values.double().square()
        self.add_whole(("tokens", layer), tokens)
        self.add_whole(("squares", layer), squares.sum(0))

    def rows(self, sums: LayerSums) -> Columns:
        counts = sums.whole["tokens"].astype(int)
        first = separating_bin(counts)
        if first is None:
            nothing = np.zeros(0)
            none = nothing.astype(int)
            return {"dimension": none, "share": nothing, "rms": nothing}
        # A gap as wide as an octave contains the start of an octave, so sums by octave separate
        # spikes from the other tokens.
        squares = sums.whole["squares"][first // PER_OCTAVE :].sum(0)
        share = squares / max(squares.sum(), 1e-300)
        order = np.argsort(-share, kind="stable")
        largest = order[share[order] >= LEAST_SHARE]
        spikes = counts[first:].sum()
        return {
            "dimension": largest,
            "share": share[largest],
            "rms": np.sqrt(squares[largest] / spikes),
        }
