"""Matrix-based entropy: over how many directions the vectors of one text are spread."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import Activations, Vectors
from analysis_lib.metrics.accumulator import (
    Columns,
    LayerSums,
    Metric,
    chosen_spaces,
    means_of,
)


class TextEntropy(Metric):
    r"""Entropy of the eigenvalues of a text's Gram matrix, mean over texts.

    With the vectors of a text in the rows of X, as they are, and the Gram matrix K = X Xᵀ, the
    eigenvalues of K / tr K are shares p of the squared lengths. Their entropy −Σ p ln p is that of
    Skean et al. 2025 and of Queipo-de-Llano et al. 2025, who call a layer where it is low
    compressed; the entropy of order 2, −ln Σ p² = −ln(tr K² / (tr K)²), is at most as large, and a
    sum over pairs of tokens. One long vector makes both small. Columns: space, layer, head
    (missing for hidden and final), entropy_nats; entropy_normalised in [0, 1], the entropy over
    ln n, its largest value for the n vectors of a text, with its 95 % interval; order_2_nats; and
    utterances, the number of texts: those of at least two vectors, not all of them zero. Made on
    request, because each text has an eigenvalue problem of its own.

    Args:
        spaces: the spaces to measure, from hidden, final, query, key, value, query_unrotated and
            key_unrotated.
        bins: see :class:`~analysis_lib.metrics.accumulator.Metric`.
    """

    name = "text_entropy"
    needs: frozenset[str] = frozenset({"hidden"})
    axes = ("head",)
    by_space = True
    interval = "entropy_normalised"
    limits = (0, 1)
    counts = "utterances"
    of_pairs_within_utterances = True
    on_request = True

    def __init__(self, spaces: Sequence[str] = ("hidden",), bins: str | None = None) -> None:
        super().__init__(bins=bins)
        self.needs = chosen_spaces(spaces)

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            counts = vectors.counts.unsqueeze(1).expand_as(vectors.nonzero)
            parts = (_smaller_moment(vectors), counts)
            self.add(("entropies", space, layer), parts, activations, _entropies)

    def rows(self, sums: LayerSums) -> Columns:
        entropies = sums["entropies"]
        utterances = entropies[..., 3]
        return {
            "entropy_nats": means_of(entropies[..., 0], utterances),
            "entropy_normalised": means_of(entropies[..., 1], utterances),
            "order_2_nats": means_of(entropies[..., 2], utterances),
            "utterances": utterances.astype(int),
        }


def _smaller_moment(vectors: Vectors) -> Float[Tensor, "utterance head size size"]:
    """X Xᵀ or Xᵀ X of each text, whichever is smaller: the same eigenvalues, but for zeros."""
    counted = vectors.tokens.counted[:, None, :, None]
    values = torch.where(counted, vectors.values, 0).double()
    tokens, dimensions = values.shape[-2:]
    if tokens <= dimensions:
        return values @ values.mT
    return values.mT @ values


def _entropies(
    moment: Float[Tensor, "*batch size size"],
    counts: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch 4"]:
    """The three entropies of each text, and 1; zeros for a text that has none."""
    eigenvalues = torch.linalg.eigvalsh(moment).clamp_min(0)
    total = eigenvalues.sum(-1, keepdim=True)
    shares = eigenvalues / torch.where(total != 0, total, 1)
    nats = torch.special.entr(shares).sum(-1)
    normalised = nats / counts.clamp_min(2).log()
    has_entropy = (counts > 1) & (total.squeeze(-1) != 0)
    concentration = shares.square().sum(-1)
    order_2 = -torch.where(has_entropy, concentration, 1).log()
    entropies = torch.stack([nats, normalised, order_2, torch.ones_like(nats)], -1)
    return torch.where(has_entropy.unsqueeze(-1), entropies, 0)
