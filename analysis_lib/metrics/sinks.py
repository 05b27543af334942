"""Which keys draw attention to themselves, and which tokens have long vectors: by position, and by type of token."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import RECEIVED, Activations, Tokens
from analysis_lib.metrics.accumulator import KEY_TYPES, Columns, Layers, Metric, Points, Sums, crossed, tabulated
from analysis_lib.models import TOKEN_TYPES

# How much attention makes a key a sink, on average over the queries that see it (Gu et al. 2025, sec. 3.1).
SINK = 0.3
# From the first token on.
POSITIONS = 8
# Norms are counted by their logarithm: bins of 1.1 %, whose middle is at most 0.55 % off, from 2⁻¹⁶ to 2²⁴. Sums are
# kept by octave, of which the norms of a layer reach into few: those of all octaves by group would be too large.
PER_OCTAVE, LOWEST, HIGHEST = 64, -16, 24
BINS = PER_OCTAVE * (HIGHEST - LOWEST)
# What spikes have at least between them and all other tokens: no norm in a range whose ends differ by this factor.
GAP = 2.0
# Of the squared norm of spikes, the part from which a dimension is named.
LEAST_SHARE = 0.05


def _slots(tokens: Tokens) -> Float[Tensor, "utterance slot token"]:
    """1 where a token is at one of the first positions, or of a type, in this order; else 0."""
    place = functional.one_hot((tokens.mask.cumsum(1) * tokens.mask).clamp_max(POSITIONS + 1), POSITIONS + 2)
    return torch.cat([place[..., 1:-1].transpose(1, 2).double(), tokens.type_masks.double()], 1)


def _with_all(sums: np.ndarray, axis: int = -1) -> np.ndarray:
    """The sums by slot, after those over all tokens, whatever their type."""
    of_types = np.take(sums, range(POSITIONS, sums.shape[axis]), axis)
    return np.concatenate([of_types.sum(axis, keepdims=True), sums], axis)


def _places() -> tuple[np.ndarray, np.ndarray]:
    """Of all tokens and of each slot, the position (0 for any) and the type, as its place in ``KEY_TYPES``."""
    types = [0] * (1 + POSITIONS) + [KEY_TYPES.index(name) for name in TOKEN_TYPES]
    return np.array([0, *range(1, POSITIONS + 1), *(0 for _ in TOKEN_TYPES)]), np.array(types)


def _of_slots(sums: Sums, quantity: str, rows: Callable[[Layers], Columns]) -> Points:
    """The rows of every layer; a position of 0 is none, and missing in the table."""
    table = tabulated(sums, quantity, rows)
    if sums.read:
        return table
    places = table["position"].to_numpy()
    return table.assign(position=pd.arrays.IntegerArray(places, places == 0))


class AttentionReceived(Metric):
    """The attention that a key receives: its weight, averaged over the queries that see it (Gu et al. 2025, sec. 3.1).

    Columns: layer, head, position (1 for the first token, up to 8; missing where it does not matter), key_type (all, or
    a type of token), received in [0, 1], mean over such keys, with its 95 % interval; sink_rate in [0, 1], the share of
    them that receive more than 0.3; and keys, how many there are. A key that no counted query sees is none. Made on
    request.
    """

    name = "attention_received"
    needs = frozenset({RECEIVED})
    interval = "received"
    limits = (0, 1)
    counts = kinds = "keys"
    on_request = True

    def update(self, activations: Activations) -> None:
        if activations.rows is None or (found := activations.rows.received) is None:
            return
        layer, queries = activations.layer, found.queries.expand(found.weights.shape[::2])
        share = found.weights.double() / queries.clamp_min(1).unsqueeze(1)
        slots = (_slots(found.keys) * (queries > 0).unsqueeze(1)).transpose(1, 2)
        self.add(("received", layer), share @ slots, activations)
        self.add(("sinks", layer), (share > SINK).double() @ slots, activations)
        self.add(("keys", layer), slots.sum(1), activations)

    def points(self, sums: Sums) -> Points:
        position, types = _places()

        def rows(layers: Layers) -> Columns:
            occur = _with_all(layers.occur) > 0
            received, sinks, keys = (_with_all(layers[name])[..., occur] for name in ("received", "sinks", "keys"))
            keys = keys[:, None]
            several = np.where(keys > 0, keys, np.nan)
            axes = {"head": range(1, received.shape[1] + 1), "place": np.flatnonzero(occur)}
            shares = {"received": received / several, "sink_rate": sinks / several}
            columns = crossed(layers, axes, **shares, keys=keys.astype(int))
            place = columns.pop("place")
            columns |= {"position": position[place], "key_type": types[place]}
            return {name: columns[name] for name in ("layer", "head", "position", "key_type", *columns)}

        return _of_slots(sums, "received", rows)


def separating_bin(counts: Int[np.ndarray, " bin"]) -> int | None:
    """The first bin after the widest range above the median that holds no norm, if its ends differ by ``GAP``.

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
    wide = len(widths) > 0 and widths.max() > PER_OCTAVE * np.log2(GAP)
    return int(above[widths.argmax() + 1]) if wide else None


def median_bin(counts: Int[np.ndarray, " bin"]) -> int:
    """The bin of the median, of an even number the lower one."""
    return int(np.searchsorted(counts.cumsum(), (counts.sum() + 1) // 2))


def median_norm(counts: Int[np.ndarray, "slot bin"]) -> Float[np.ndarray, " slot"]:
    """The median of the norms in each row, NaN of none: of an even number, the mean of the two in the middle.

    The norms of a bin are taken to lie evenly over the logarithms in it, so that the median is less than 1.1 % off, and
    by far less of many norms. It moves with every norm that is added, as a jackknife needs.

    >>> counts = np.zeros((3, BINS), int)
    >>> counts[:, -8 * PER_OCTAVE] = 1, 3, 1  # From 2**16 on.
    >>> counts[1:, 0] = 2, 1
    >>> places = (np.log2(median_norm(counts)) - 16) * PER_OCTAVE
    >>> places.round(6)  # The middle of 1; the first of 3; half of the larger of 2, the other being tiny.
    array([  0.5     ,   0.166667, -63.5     ])
    """
    norms = counts.sum(1)
    return (_norm_of_rank(counts, (norms + 1) // 2) + _norm_of_rank(counts, norms // 2 + 1)) / 2


def _norm_of_rank(counts: Int[np.ndarray, "slot bin"], rank: Int[np.ndarray, " slot"]) -> Float[np.ndarray, " slot"]:
    """In each row, the norm that so many, itself among them, do not exceed; NaN of none."""
    up_to = counts.cumsum(1)
    rows, place = np.arange(len(counts)), (up_to >= rank[:, None]).argmax(1)
    inside = counts[rows, place]
    before = up_to[rows, place] - inside
    share = (rank - 0.5 - before) / np.where(inside > 0, inside, np.nan)
    return _norm(place + share - 0.5)


def _norm(place: np.ndarray | np.integer | int) -> np.ndarray:
    """The middle of a bin."""
    return np.asarray(2.0 ** (LOWEST + (np.asarray(place) + 0.5) / PER_OCTAVE))


def norm_bins(norms: Float[Tensor, "*place"]) -> Int[Tensor, "*place"]:
    """The bins in which norms are counted."""
    place = (norms.double().log2() - LOWEST) * PER_OCTAVE
    return place.nan_to_num(0, BINS - 1, 0).floor().clamp(0, BINS - 1).long()


class TokenNorms(Metric):
    """Norms of hidden vectors, and the tokens whose norm stands apart: spikes, or massive activations.

    Columns: layer, position (1 for the first token, up to 8; missing where it does not matter), token_type (all, or a
    type of token); median, of the norms of such tokens, as :func:`median_norm` finds it, with its 95 % interval;
    largest of them, to 0.55 %; multiple, of the layer: how many times its median norm separates spikes from all other
    tokens (missing where nothing does); spikes, how many of these tokens are spikes; and tokens, how many there are.
    Spikes lie above the widest range of norms beyond the median that holds no token, if its upper end is at least twice
    its lower one; the multiple is its middle, on a logarithmic scale. Vectors of zeros do not count. Made on request.

    The jackknife of a quantile is consistent if what is left out at a time is larger than the square root of the sample
    (Shao & Wu 1989): with 20 groups, from 400 texts on; the interval is rough for fewer. There is none of the largest
    norm or of the multiple: these hang on single tokens, and are those of the whole corpus whatever is left out.
    """

    name = "token_norms"
    needs = frozenset({"hidden"})
    interval = "median"
    limits = (0, np.inf)
    smooth = False
    version = 2
    counts = "tokens"
    on_request = True

    def update(self, activations: Activations) -> None:
        if (hidden := activations.spaces.get("hidden")) is None:
            return
        norms, runs, layer = hidden.norms[:, 0], hidden.tokens.runs, activations.layer
        bins, slots = norm_bins(norms), _slots(hidden.tokens) * (norms != 0).unsqueeze(1)
        octaves, place = (bins // PER_OCTAVE).unique(return_inverse=True)
        run = torch.tensor([i for i, (_, rows) in enumerate(runs) for _ in range(rows.start, rows.stop)])
        where = run.to(bins.device)[:, None, None], torch.arange(slots.shape[1], device=bins.device)[:, None]
        where += place.unsqueeze(1), bins.unsqueeze(1) % PER_OCTAVE
        # Sums of ones are the same in any order.
        counts = slots.new_zeros(len(runs), slots.shape[1], len(octaves), PER_OCTAVE)
        counts.index_put_(where, slots, accumulate=True)
        self.add_runs(("tokens", layer), counts.sum((2, 3)), activations)
        for i, octave in enumerate(octaves.tolist()):
            if counts[:, :, i].any():
                self.add_runs(("norms", octave, layer), counts[:, :, i], activations)

    @staticmethod
    def _by_bin(layer: Layers) -> Int[np.ndarray, "slot bin"]:
        """The counts of a layer, of all tokens and of each slot."""
        counts = np.zeros((layer["tokens"].shape[1], BINS // PER_OCTAVE, PER_OCTAVE), int)
        for quantity, *octave in layer.sums:
            if quantity == "norms":
                counts[:, octave[0]] = layer["norms", *octave][0]
        return _with_all(counts.reshape(-1, BINS), 0)

    def points(self, sums: Sums) -> Points:
        position, types = _places()
        everything = {layer.numbers: layer for layer in self.total().apart().layers}

        def rows(layer: Layers) -> Columns:
            counts, whole = self._by_bin(layer), self._by_bin(everything[layer.numbers])
            occur = whole.any(1)
            counts, first = counts[occur], separating_bin(whole[0])
            multiple, spikes = np.nan, np.zeros(len(counts), int)
            if first is not None:
                below = np.flatnonzero(whole[0][:first])[-1]
                multiple = np.sqrt(_norm(first) * _norm(below)) / median_norm(whole[:1]).item()
                spikes = counts[:, first:].sum(1).astype(int)
            last = np.array([np.flatnonzero(of_slot)[-1] for of_slot in whole[occur]])
            columns = {"position": position[occur], "token_type": np.array(KEY_TYPES, object)[types[occur]]}
            columns |= {"median": median_norm(counts), "largest": _norm(last), "multiple": np.full(len(last), multiple)}
            columns |= {"spikes": spikes, "tokens": counts.sum(1).astype(int)}
            return {"layer": np.repeat(layer.numbers, len(last)), **columns}

        return _of_slots(sums.apart(), "tokens", rows)


class SpikeDimensions(Metric):
    """The dimensions that make the spikes of :class:`TokenNorms` long.

    Columns: layer, dimension (from 0), share, of the squared norm of the spikes of the layer, and rms, the root mean
    square of its values at these tokens; those with a share of 5 % or more, the largest first. A layer without spikes
    has no row. Made on request.
    """

    name = "spike_dimensions"
    needs = frozenset({"hidden"})
    on_request = True

    def update(self, activations: Activations) -> None:
        if (hidden := activations.spaces.get("hidden")) is None:
            return
        bins, counted = norm_bins(hidden.norms[:, 0]), hidden.norms[:, 0] != 0
        octaves = functional.one_hot(bins // PER_OCTAVE, BINS // PER_OCTAVE).double()
        squares = torch.where(counted.unsqueeze(-1), hidden.values[:, 0], 0).double().square()
        self.add_whole(("tokens", activations.layer), torch.bincount(bins[counted], minlength=BINS))
        self.add_whole(("squares", activations.layer), ((octaves * counted.unsqueeze(-1)).mT @ squares).sum(0))

    def points(self, sums: Sums) -> Points:
        def rows(layer: Layers) -> Columns:
            counts = layer["tokens"][0].astype(int)
            first = separating_bin(counts)
            # A range as wide as an octave holds the beginning of one: sums by octave tell the spikes from the others.
            squares = np.zeros(0) if first is None else layer["squares"][0, first // PER_OCTAVE :].sum(0)
            share, tokens = squares / max(squares.sum(), 1e-300), counts[first:].sum()
            order = np.argsort(-share, kind="stable")
            found = order[share[order] >= LEAST_SHARE]
            columns = {"dimension": found, "share": share[found], "rms": np.sqrt(squares[found] / tokens)}
            return {"layer": np.repeat(layer.numbers, len(found)), **columns}

        return tabulated(sums.apart(), "squares", rows)
