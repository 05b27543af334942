"""Stable rank of the outputs of a head over a text."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import BLOCKS, Activations, Block
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of


class OutputRank(Metric):
    r"""Stable rank of the outputs of a head, mean over texts.

    The outputs of a head for the queries of a text are the rows o_m = Σ_n α_mn v_n of a matrix O,
    before the output projection. Its stable rank ‖O‖_F² / σ₁² = Σ σ_i² / σ₁², of its singular
    values σ, is 1 where all outputs lie on one line, as where every query reads one key alone, and
    at most the rank of O. Fesser et al. 2026 tell a sink that broadcasts by outputs of low rank;
    they take the stable rank after the output projection. Columns: layer, head, stable_rank, at
    least 1, with its 95 % interval; and utterances, the number of texts: those of at least two
    queries that count, not all outputs of them zero. Made on request, because attention weights are
    computed once more, and each head of each text has an eigenvalue problem of its own.

    Args:
        bins: see :class:`~analysis_lib.metrics.accumulator.Metric`.
    """

    name = "output_rank"
    needs = frozenset({BLOCKS, "value"})
    axes = ("head",)
    interval = "stable_rank"
    limits = (1, math.inf)
    counts = "utterances"
    on_request = True

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        if attention is None:
            return
        value = attention.by_query_head(activations.spaces["value"].values)

        def moment(block: Block) -> Tensor:
            utterances, heads, _ = block.part
            counted = block.of_queries(attention.counted)
            outputs = block.weights @ value[utterances, heads] * counted[..., None]
            outputs = outputs.double()
            return outputs.mT @ outputs

        queries = attention.visibility.queries.counts
        counts = queries.unsqueeze(1).expand(-1, attention.heads)
        parts = (attention.reduce(moment), counts)
        self.add(("ranks", activations.layer), parts, activations, _ranks)

    def rows(self, sums: LayerSums) -> Columns:
        ranks = sums["ranks"]
        utterances = ranks[..., 1]
        return {
            "stable_rank": means_of(ranks[..., 0], utterances),
            "utterances": utterances.astype(int),
        }


def _ranks(
    moment: Float[Tensor, "*batch size size"],
    counts: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch 2"]:
    """The stable rank of each text, and 1; zeros for a text that has none."""
    eigenvalues = torch.linalg.eigvalsh(moment).clamp_min(0)
    largest = eigenvalues[..., -1]
    has_rank = (counts > 1) & (largest > 0)
    ranks = eigenvalues.sum(-1) / torch.where(has_rank, largest, 1)
    return torch.where(has_rank.unsqueeze(-1), torch.stack([ranks, has_rank.to(ranks)], -1), 0)
