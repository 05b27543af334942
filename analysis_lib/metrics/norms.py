"""Which tokens have long vectors: by position, and by type of token."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, Name, means_of
from analysis_lib.metrics.slots import SLOT_POSITIONS, SLOT_TYPES, slots_of, with_all

# Norms are counted by their logarithm: bins of 1.1 %, whose middle is at most 0.55 % off, from 2⁻¹⁶
# to 2²⁴. Sums are kept by octave, of which the norms of a layer reach into few: those of all
# octaves by group would be too large.
PER_OCTAVE, LOWEST, HIGHEST = 64, -16, 24
BINS = PER_OCTAVE * (HIGHEST - LOWEST)
# What spikes have at least between them and all other tokens: no norm in a range whose ends differ
# by this factor.
GAP = 2.0
# Of the squared norm of spikes, the part from which a dimension is named.
LEAST_SHARE = 0.05


def separating_bin(
    counts: Int[np.ndarray, " bin"],
) -> int | None:
    """The first bin after the widest range above the median that holds no norm, if its ends differ
    by ``GAP``.

    Args:
        counts: how many norms each bin holds.

    >>> counts = np.zeros(BINS, int)
    >>> counts[[100, 101, 400]] = 5, 5, 1
    >>> separating_bin(counts), separating_bin(counts * (np.arange(BINS) < 400))
    (400, None)
    """
    occupied = np.flatnonzero(counts)
    above = occupied[occupied >= median_bin(counts)]
    widths = np.diff(above)
    # One bin wider: norms at the near ends of both bins are as far apart.
    if not len(widths) or widths.max() <= PER_OCTAVE * np.log2(GAP):
        return None
    return int(above[widths.argmax() + 1])


def median_bin(
    counts: Int[np.ndarray, " bin"],
) -> int:
    """The bin of the median, of an even number the lower one."""
    rank = (counts.sum() + 1) // 2
    return int(np.searchsorted(counts.cumsum(), rank))


def median_norm(
    counts: Int[np.ndarray, "*slot bin"],
) -> Float[np.ndarray, "*slot"]:
    """The median of the norms of each slot, NaN of none.

    Of an even number it is the mean of the two in the middle. The norms of a bin are taken to lie
    evenly over the logarithms in it, so that the median is less than 1.1 % off, and by far less of
    many norms. It moves with every norm that is added, as a jackknife needs.

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
    """In each slot, the norm that so many, itself among them, do not exceed; NaN of none.

    Args:
        up_to: how many norms there are up to each bin.
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
    """The middle of a bin."""
    octaves = (np.asarray(bins) + 0.5) / PER_OCTAVE
    return np.asarray(2.0 ** (LOWEST + octaves))


def norm_bins(
    norms: Float[Tensor, "*place"],
) -> Int[Tensor, "*place"]:
    """The bins in which norms are counted."""
    octaves = norms.double().log2() - LOWEST
    bins = (octaves * PER_OCTAVE).nan_to_num(0, BINS - 1, 0)
    return bins.floor().clamp(0, BINS - 1).long()


class TokenNorms(Metric):
    """Norms of hidden vectors, and the tokens whose norm stands apart: massive activations.

    Columns: layer, position (1 for the first token, up to 8; missing where it does not matter),
    token_type (all, or a type of token); median, of the norms of such tokens, as
    :func:`median_norm` finds it, with its 95 % interval; largest of them, to 0.55 %; multiple, of
    the layer: how many times its median norm separates spikes from all other tokens (missing where
    nothing does); spikes, how many of these tokens are spikes; and tokens, how many there are.
    Spikes lie above the widest range of norms beyond the median that holds no token, if its upper
    end is at least twice its lower one; the multiple is its middle, on a logarithmic scale. Vectors
    of zeros do not count. Made on request.

    The jackknife of a quantile is consistent if what is left out at a time is larger than the
    square root of the sample (Shao & Wu 1989): with 20 groups, from 400 texts on; the interval is
    rough for fewer. There is none of the largest norm or of the multiple: these hang on single
    tokens, and are those of the whole corpus whatever is left out.
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
        hidden = activations.spaces.get("hidden")
        layer = activations.layer
        if hidden is None:
            return
        norms = hidden.norms[:, 0]
        slots = slots_of(hidden.tokens) * (norms != 0).unsqueeze(1)
        bins = norm_bins(norms)
        octaves, octave_places = (bins // PER_OCTAVE).unique(return_inverse=True)
        sizes = [rows.stop - rows.start for _, rows in hidden.tokens.runs]
        run_of_text = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        slot_numbers = torch.arange(slots.shape[1], device=bins.device)
        where = (
            run_of_text.to(bins.device)[:, None, None],
            slot_numbers[:, None],
            octave_places.unsqueeze(1),
            bins.unsqueeze(1) % PER_OCTAVE,
        )
        shape = len(sizes), slots.shape[1], len(octaves), PER_OCTAVE
        # Sums of ones are the same in any order.
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
        # All tokens are the first slot.
        first = separating_bin(whole[0])
        if first is not None:
            below = np.flatnonzero(whole[0, :first])[-1]
            middle = np.sqrt(_norm(first) * _norm(below))
            multiple = middle / median_norm(whole[:1])
            spikes = counts[..., first:].sum(-1)
        largest = [np.flatnonzero(of_slot)[-1] for of_slot in whole[occur]]
        return {
            "position": SLOT_POSITIONS[occur],
            "token_type": SLOT_TYPES[occur],
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
        """How many norms each bin holds, of all tokens and of each slot."""
        tokens = sums["tokens"]
        shape = *tokens.shape, BINS // PER_OCTAVE, PER_OCTAVE
        counts = np.zeros(shape, int)
        for name in sums:
            if name != "tokens":
                octave = name[1]
                counts[..., octave, :] = sums[name]
        counts = counts.reshape(*tokens.shape, BINS)
        return with_all(counts, -2)


class SpikeDimensions(Metric):
    """The dimensions that make the spikes of :class:`TokenNorms` long.

    Columns: layer, dimension (from 0), share, of the squared norm of the spikes of the layer, and
    rms, the root mean square of its values at these tokens; those with a share of 5 % or more, the
    largest first. A layer without spikes has no row. Made on request.
    """

    name = "spike_dimensions"
    needs = frozenset({"hidden"})
    axes = ("dimension",)
    on_request = True

    def update(self, activations: Activations) -> None:
        hidden = activations.spaces.get("hidden")
        layer = activations.layer
        if hidden is None:
            return
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
        # A range as wide as an octave holds the beginning of one: sums by octave tell the spikes
        # from the others.
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
