"""Which keys draw attention to themselves, and which tokens have long vectors: by position, and by type of token."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import RECEIVED, Activations, Tokens
from analysis_lib.metrics.accumulator import KEY_TYPES, Columns, Metric, Sums, tabulated
from analysis_lib.models import TOKEN_TYPES

# How much attention makes a key a sink, on average over the queries that see it (Gu et al. 2025, sec. 3.1).
SINK = 0.3
# From the first token on.
POSITIONS = 8
# Norms are counted by their logarithm: bins of 1.1 %, whose middle is at most 0.55 % off, from 2⁻¹⁶ to 2²⁴.
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


def _with_all(sums: np.ndarray, axis: int) -> np.ndarray:
    """The sums by slot, after those over all tokens, whatever their type."""
    of_types = np.take(sums, range(POSITIONS, sums.shape[axis]), axis)
    return np.concatenate([of_types.sum(axis, keepdims=True), sums], axis)


def _places() -> tuple[np.ndarray, np.ndarray]:
    """Of all tokens and of each slot, the position (0 for any) and the type, as its place in ``KEY_TYPES``."""
    types = [0] * (1 + POSITIONS) + [KEY_TYPES.index(name) for name in TOKEN_TYPES]
    return np.array([0, *range(1, POSITIONS + 1), *(0 for _ in TOKEN_TYPES)]), np.array(types)


def _of_slots(sums: Sums, quantity: str, rows: Callable[[int], Columns]) -> pd.DataFrame:
    """The rows of every layer; a position of 0 is none, and missing in the table."""
    table = tabulated(sums, quantity, rows, needed=frozenset({"position"}))
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
    counts = "keys"
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

    def points(self, sums: Sums) -> pd.DataFrame:
        position, types = _places()

        def rows(layer: int) -> Columns:
            occur = _with_all(self.occur("keys", layer), 0) > 0
            keys = _with_all(sums["keys", layer], 0)[occur]
            received, sinks = (_with_all(sums[name, layer], 1)[:, occur] for name in ("received", "sinks"))
            several, heads = np.where(keys > 0, keys, np.nan), len(received)
            head, place = np.meshgrid(np.arange(1, heads + 1), np.flatnonzero(occur), indexing="ij")
            columns = {"head": head, "position": position[place], "key_type": types[place]}
            columns |= {"received": received / several, "sink_rate": sinks / several}
            columns |= {"keys": np.broadcast_to(keys.astype(int), head.shape)}
            return {"layer": np.full(head.size, layer)} | {name: cells.ravel() for name, cells in columns.items()}

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


def _norm(place: np.ndarray | np.integer | int) -> np.ndarray:
    """The middle of a bin."""
    return np.asarray(2.0 ** (LOWEST + (np.asarray(place) + 0.5) / PER_OCTAVE))


class TokenNorms(Metric):
    """Norms of hidden vectors, and the tokens whose norm stands apart: spikes, or massive activations.

    Columns: layer, position (1 for the first token, up to 8; missing where it does not matter), token_type (all, or a
    type of token), median and largest, of the norms of such tokens, to 0.55 %; multiple, of the layer: how many times
    its median norm separates spikes from all other tokens (missing where nothing does); spikes, how many of these
    tokens are spikes; and tokens, how many there are. Spikes lie above the widest range of norms beyond the median that
    holds no token, if its upper end is at least twice its lower one; the multiple is its middle, on a logarithmic
    scale. Vectors of zeros do not count. Made on request.
    """

    name = "token_norms"
    needs = frozenset({"hidden"})
    on_request = True

    def update(self, activations: Activations) -> None:
        if (hidden := activations.spaces.get("hidden")) is None:
            return
        bins, layer = self._bins(hidden.norms[:, 0]), activations.layer
        counted = hidden.norms[:, 0] != 0
        slots = _slots(hidden.tokens) * counted.unsqueeze(1)
        number = torch.arange(slots.shape[1], device=bins.device)[None, :, None] * BINS + bins.unsqueeze(1)
        # Sums of ones are the same in any order.
        counts = torch.zeros(slots.shape[1] * BINS, dtype=slots.dtype, device=slots.device)
        counts.index_add_(0, number.flatten(), slots.flatten())
        self.add_whole(("tokens", layer), counts.view(slots.shape[1], BINS))

    @staticmethod
    def _bins(norms: Tensor) -> Tensor:
        place = (norms.double().log2() - LOWEST) * PER_OCTAVE
        return place.nan_to_num(0, BINS - 1, 0).floor().clamp(0, BINS - 1).long()

    def points(self, sums: Sums) -> pd.DataFrame:
        position, types = _places()

        def rows(layer: int) -> Columns:
            counts = _with_all(sums["tokens", layer], 0).astype(int)
            occur = counts.sum(1) > 0
            first = separating_bin(counts[0])
            median = _norm(np.array([median_bin(of_slot) for of_slot in counts[occur]]))
            last = np.array([np.flatnonzero(of_slot)[-1] for of_slot in counts[occur]])
            multiple, spikes = np.nan, np.zeros(occur.sum(), int)
            if first is not None:
                below = np.flatnonzero(counts[0][:first])[-1]
                multiple = np.sqrt(_norm(first) * _norm(below)) / median[0]
                spikes = counts[occur][:, first:].sum(1)
            columns = {"position": position[occur], "token_type": np.array(KEY_TYPES, object)[types[occur]]}
            columns |= {"median": median, "largest": _norm(last), "multiple": np.full(len(median), multiple)}
            columns |= {"spikes": spikes, "tokens": counts[occur].sum(1)}
            return {"layer": np.full(len(median), layer), **columns}

        return _of_slots(sums, "tokens", rows)


class SpikeDimensions(TokenNorms):
    """The dimensions that make the spikes of :class:`TokenNorms` long.

    Columns: layer, dimension (from 0), share, of the squared norm of the spikes of the layer, and rms, the root mean
    square of its values at these tokens; those with a share of 5 % or more, the largest first. A layer without spikes
    has no row. Made on request.
    """

    name = "spike_dimensions"

    def update(self, activations: Activations) -> None:
        super().update(activations)
        if (hidden := activations.spaces.get("hidden")) is None:
            return
        octaves = functional.one_hot(self._bins(hidden.norms[:, 0]) // PER_OCTAVE, BINS // PER_OCTAVE).double()
        counted = (hidden.norms[:, 0] != 0).unsqueeze(-1)
        squares = torch.where(counted, hidden.values[:, 0], 0).double().square()
        self.add_whole(("squares", activations.layer), ((octaves * counted).mT @ squares).sum(0))

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> Columns:
            counts = _with_all(sums["tokens", layer], 0)[0].astype(int)
            first = separating_bin(counts)
            # A range as wide as an octave holds the beginning of one: sums by octave tell the spikes from the others.
            squares = np.zeros(0) if first is None else sums["squares", layer][first // PER_OCTAVE :].sum(0)
            share, tokens = squares / max(squares.sum(), 1e-300), counts[first:].sum()
            order = np.argsort(-share, kind="stable")
            found = order[share[order] >= LEAST_SHARE]
            columns = {"dimension": found, "share": share[found], "rms": np.sqrt(squares[found] / tokens)}
            return {"layer": np.full(len(found), layer), **columns}

        return tabulated(sums, "squares", rows)
