"""What an untrained block makes of its inputs, and how its attention falls, under a bias of growing norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.capture import Activations, attended_by, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics import Anisotropy, MeanVector
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.papers.godey.untrained_block import Block, Draw, Hidden

# Bins 0.02 wide: in blocks of the size of BERT-base, no score leaves this range up to a bias of norm 50.
SCORE_BINS = np.linspace(-3, 3, 301)


@dataclass(eq=False)
class Attended:
    """The queries and keys of a block, as its attention receives them.

    Attributes:
        mask: True where a query sees a key; None where all see all.
        scaling: 1/√d' of the scores.
    """

    query: Float[Tensor, "sequence head token head_dim"]
    key: Float[Tensor, "sequence head token head_dim"]
    mask: Bool[Tensor, "1 1 token token"] | None
    scaling: float

    @property
    def visible(self) -> Bool[Tensor, "token token"]:
        """True where a query sees a key."""
        tokens = self.query.shape[2]
        return torch.ones(tokens, tokens, dtype=torch.bool) if self.mask is None else self.mask[0, 0]

    @property
    def scores(self) -> Float[Tensor, "sequence head token token"]:
        """q·k/√d', −∞ where the query does not see the key."""
        scores = self.scaling * self.query @ self.key.transpose(2, 3)
        return scores if self.mask is None else scores.masked_fill(~self.mask, -math.inf)


class _Watch:
    """Keeps what the registered attention function receives from the block's attention."""

    def __init__(self, attention: nn.Module):
        self.own = {attention}
        self.seen: list[Attended] = []

    def attend(self, module, query, key, value, mask, bias, scaling) -> Tensor:
        self.seen.append(Attended(query, key, mask, scaling))
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)


@contextmanager
def watching(block: Block) -> Iterator[list[Attended]]:
    """Within this context, every run of the block adds what its attention receives to the list."""
    watch = _Watch(block.attention)
    with attended_by(watch.own, watch.attend):
        yield watch.seen


def weight_statistics(
    scores: Float[Tensor, "sequence head token token"], visible: Bool[Tensor, "token token"]
) -> dict[str, Float[Tensor, " head"]]:
    r"""The attention weights that each head gives: their extremes and entropy, summed over rows or sequences.

    For a query that sees n keys, with weights p = softmax(s): the largest, the median and the smallest of the n
    weights (``row_max``, ``row_median``, ``row_min``); the entropy H = −Σ p ln p in nats; H / ln n, of rows of at least
    two keys; and how far H falls below its maximum, ln n − H = Σ p ln(n p), the divergence of the row from equal
    weights. ``sequence_max`` and ``sequence_min`` are the extremes of a whole sequence. The median of an even number of
    weights is the mean of the two in the middle.

    Args:
        scores: −∞ where a query does not see a key.
        visible: True where a query sees a key.
    """
    count = visible.sum(-1)
    # In float64: the entropy of a nearly uniform row, some 6 nats, falls below its maximum by 1e-8.
    exact = scores.double()
    log_sum = exact.logsumexp(-1, keepdim=True)
    log_weights = exact - log_sum
    # A key that is not seen has the weight 0, and adds nothing.
    divergence = (log_weights.exp() * log_weights.masked_fill(~visible, 0)).sum(-1) + count.double().log()
    # Unseen keys come first. NumPy sorts several times faster than PyTorch.
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1))

    def ranked(rank: Int[Tensor, " token"]) -> Float[Tensor, "sequence head token"]:
        """The weight of each row that this many others exceed."""
        place = (scores.shape[-1] - 1 - rank).view(-1, 1)
        chosen = ordered.gather(-1, place.expand(*scores.shape[:2], -1, 1))
        return (chosen.double() - log_sum).exp().squeeze(-1)

    greatest, least = ranked(torch.zeros_like(count)), ranked(count - 1)
    several = count > 1
    rows = {
        "row_max": greatest,
        "row_median": (ranked((count - 1) // 2) + ranked(count // 2)) / 2,
        "row_min": least,
        "entropy_nats": count.double().log() - divergence,
        "entropy_normalised": 1 - divergence[..., several] / count[several].double().log(),
        "divergence": divergence,
    }
    extremes = {"sequence_max": greatest.amax(-1), "sequence_min": least.amin(-1)}
    return {name: values.sum((0, 2)) for name, values in rows.items()} | {n: v.sum(0) for n, v in extremes.items()}


def histogram(
    scores: Float[Tensor, "sequence head token token"],
    visible: Bool[Tensor, "token token"],
    edges: Float[np.ndarray, " edge"],
) -> Int[np.ndarray, "head bin"]:
    """How many visible scores of each head fall into bins of equal width; the first and the last bin are open."""
    bins, heads = len(edges) - 1, scores.shape[1]
    seen = scores.transpose(0, 1)[:, :, visible].reshape(heads, -1)
    found = ((seen - edges[0]) * (bins / (edges[-1] - edges[0]))).floor().clamp(0, bins - 1).long()
    found += bins * torch.arange(heads).unsqueeze(1)
    return torch.bincount(found.flatten(), minlength=heads * bins).view(heads, bins).numpy()


class _Sums:
    """Sums over the sequences of a block under one bias, and the tables made of them."""

    def __init__(self, edges: np.ndarray | None):
        self.metrics = [Anisotropy(), MeanVector()]
        self.edges = edges
        self.counts: np.ndarray | int = 0
        self.sums: dict[str, Tensor] = {}
        self.divisors: dict[str, int] = {}
        self.sequences = 0

    def add(self, hidden: Hidden, output: Hidden, attended: Attended) -> None:
        groups = torch.arange(self.sequences, self.sequences + len(hidden)) % GROUPS
        tokens = unpadded(groups, hidden.shape[1])
        self.sequences += len(hidden)
        spaces = {"hidden": output.unsqueeze(1), "query": attended.query, "key": attended.key}
        for layer, parts in enumerate(({"hidden": hidden.unsqueeze(1)}, spaces)):
            vectors = {space: Vectors(values, tokens) for space, values in parts.items()}
            for metric in self.metrics:
                metric.update(Activations(layer, "block", "", tokens, vectors))
        if self.edges is not None:
            self._add_scores(attended.scores, attended.visible)

    def _add_scores(self, scores: Tensor, visible: Tensor) -> None:
        sequences, pairs = len(scores), int(visible.sum())
        seen = scores.masked_fill(~visible, 0).double()
        sums = {"score": seen.sum((0, 2, 3)), "score_magnitude": seen.abs().sum((0, 2, 3))}
        sums |= weight_statistics(scores, visible)
        rows, several = len(visible), int((visible.sum(-1) > 1).sum())
        terms = dict.fromkeys(sums, rows) | {"score": pairs, "score_magnitude": pairs}
        terms |= {"entropy_normalised": several, "sequence_max": 1, "sequence_min": 1}
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
            self.divisors[name] = self.divisors.get(name, 0) + sequences * terms[name]
        self.counts = self.counts + histogram(scores, visible, self.edges)

    def tables(self, bias_scores: Tensor) -> dict[str, pd.DataFrame]:
        cosines, norms = (metric.points(metric.total()) for metric in self.metrics)
        tables = {"vectors": cosines.drop(columns="tokens").merge(norms, on=["space", "layer", "head"])}
        if self.edges is not None:
            head = pd.Series(range(1, len(bias_scores) + 1), name="head")
            means = {name: (value / self.divisors[name]).numpy() for name, value in self.sums.items()}
            tables["attention"] = pd.DataFrame({"head": head, "bias_score": bias_scores.double().numpy(), **means})
            bins = pd.DataFrame({"low": self.edges[:-1], "high": self.edges[1:]})
            tables["scores"] = pd.DataFrame({"head": head}).merge(bins, how="cross").assign(count=self.counts.ravel())
        return tables


def sweep(
    blocks: Iterable[Draw], norms: Sequence[float], edges: np.ndarray | None = SCORE_BINS, batch: int = 1
) -> dict[str, pd.DataFrame]:
    r"""Run each block on its inputs plus a bias of each norm (Godey et al. 2024, Fig. 6 to 10).

    Args:
        blocks: the draws.
        norms: of the bias, 0 or more.
        edges: of the histograms of scores, see :func:`histogram`; None leaves out ``attention`` and ``scores``.
        batch: sequences at a time; it changes the numbers by rounding alone.

    Returns:
        Tables whose first columns are architecture, weights_seed, direction_seed and bias_norm:

        - ``vectors``: space (hidden, query, key), layer (0 the input, 1 the output and its attention), head, cosine,
          norm_of_mean, mean_norm, as in the tables ``anisotropy`` and ``mean_vector`` of ``measure``;
        - ``attention``: head; bias_score, the score of the bias alone with itself, which is N² uᵀW_QᵀW_K u/√d' in
          BERT; score and score_magnitude, the means of s and of \|s\| over pairs; and the means of the statistics of
          :func:`weight_statistics` over rows, or over sequences;
        - ``scores``: head, low, high, count.

    Raises:
        AnalysisError: no norm of the bias was given, or one that is negative or not finite.
    """
    _check_norms(norms)
    found: dict[str, list[pd.DataFrame]] = {}
    for draw in blocks:
        block = draw.block()
        for norm in norms:
            sums = _Sums(edges)
            for hidden in block.biased(norm, batch):
                with watching(block) as seen:
                    output = block(hidden)
                sums.add(hidden, output, seen[0])
            with watching(block) as seen:
                block((norm * block.direction).view(1, 1, -1))
            for name, table in sums.tables(seen[0].scores.flatten()).items():
                labels = {**draw.labels, "bias_norm": float(norm)}
                labelled = pd.DataFrame({n: [v] * len(table) for n, v in labels.items()}).join(table)
                found.setdefault(name, []).append(labelled)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _check_norms(norms: Sequence[float]) -> None:
    if not len(norms):
        raise AnalysisError("no norm of the bias was given: give some, such as 0, 10 and 20")
    if wrong := [norm for norm in norms if not (math.isfinite(norm) and norm >= 0)]:
        raise AnalysisError(f"{wrong[0]} cannot be the norm of a bias: give finite numbers of 0 or more")
