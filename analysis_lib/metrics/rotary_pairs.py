"""What a rotation by position leaves of the mean direction of each pair of dimensions."""

import math

import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor

from analysis_lib.capture import UNROTATED, Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of
from analysis_lib.models.rotations import pairs_of


class RotaryPairs(Metric):
    """Resultant lengths of queries and keys in each rotated pair of dimensions.

    Rotary models turn pairs of dimensions of each query and key by angles of its position (Su et
    al. 2024). As complex numbers, the pair z_n of token n becomes w_n z_n, and w_n has the angle
    θ n. Its mean resultant length is R = |mean of z_n / |z_n||: 1 where all tokens have one
    direction, near 0 where directions are spread evenly (Mardia & Jupp 2000, sec. 2.3). Where
    queries have one direction before rotation, as a constant bias gives them, R is 1, and after it
    |mean of exp(iθn)|: near 0 for fast pairs.

    Columns: layer, head (of queries), pair (from 0), frequency in [0, π], the angle in radians by
    which a pair turns from a token to the next, mean over the tokens: θ in a text;
    query_resultant, key_resultant, query_resultant_rotated and key_resultant_rotated in [0, 1],
    over all tokens, before and after rotation; and alignment in [−1, 1], the cosine of the angle
    between the mean directions of queries and keys before rotation, with its 95 % interval.
    Queries that share a key have its numbers. A pair of zeros has no direction and does not count.
    Made on request.
    """

    name = "rotary_pairs"
    needs = frozenset(UNROTATED)
    axes = ("head", "pair")
    interval = "alignment"
    limits = (-1, 1)
    on_request = True
    reason_for_none = "no layer rotates queries and keys: leave it out"

    def update(self, activations: Activations) -> None:
        rotation = activations.rotation
        layer = activations.layer
        if rotation is None:
            return
        turn = activations.turn
        for space in UNROTATED:
            vectors = activations.spaces[space]
            counted = vectors.tokens.counted
            directions = pairs_of(vectors.values, rotation).sgn()
            self.add((space, layer), _sum(directions, counted), activations)
            rotated = directions * turn.sgn()
            self.add((f"{space} rotated", layer), _sum(rotated, counted), activations)
            has_direction = (directions != 0) & counted[:, None, :, None]
            self.add((f"{space} count", layer), has_direction.sum(2), activations)
        # Both tokens must count, so that steps over padding do not.
        both = counted[:, 1:] & counted[:, :-1]
        steps = _steps(turn).squeeze(1) * both.unsqueeze(-1)
        self.add(("steps", layer), steps.sum(1), activations)
        self.add(("step count", layer), both.sum(1), activations)

    def rows(self, sums: LayerSums) -> Columns:
        means = {}
        for space in UNROTATED:
            count = sums[f"{space} count"]
            for name in (space, f"{space} rotated"):
                parts = sums[name]
                means[name] = means_of(parts[..., 0] + 1j * parts[..., 1], count)
        query, key = (means[space] for space in UNROTATED)
        shared_by = query.shape[1] // key.shape[1]
        lengths = {}
        for name, mean in means.items():
            times = query.shape[1] // mean.shape[1]
            lengths[name] = np.repeat(np.abs(mean), times, axis=1)
        key = np.repeat(key, shared_by, axis=1)
        product = (query * key.conj()).real
        frequency = sums["steps"] / sums["step count"][:, None]
        return {
            "frequency": frequency[:, None],
            "query_resultant": lengths["query_unrotated"],
            "key_resultant": lengths["key_unrotated"],
            "query_resultant_rotated": lengths["query_unrotated rotated"],
            "key_resultant_rotated": lengths["key_unrotated rotated"],
            "alignment": means_of(product, np.abs(query) * np.abs(key)),
        }


def _sum(
    pairs: Complex[Tensor, "utterance head token pair"], counted: Tensor
) -> Float[Tensor, "utterance head pair 2"]:
    """The sum over the tokens that count, as real and imaginary parts."""
    return torch.view_as_real((pairs * counted[:, None, :, None]).sum(2))


def _steps(
    turn: Complex[Tensor, "#utterance 1 token pair"],
) -> Float[Tensor, "#utterance 1 step pair"]:
    """The size of the angle from each token to the next, at most π."""
    step = turn.angle().diff(dim=2)
    return (torch.remainder(step + math.pi, 2 * math.pi) - math.pi).abs()
