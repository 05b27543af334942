"""What an untrained block makes of its inputs under a bias of growing norm, and where both are equally long."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Activations, attended_by, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics import Anisotropy, MeanVector
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.godey.untrained_block import DRAW_COLUMNS, Block, Draw, Hidden

# Bins 0.02 wide: in blocks of the size of BERT-base, no score leaves this range up to a bias of norm 50.
SCORE_BINS = np.linspace(-3, 3, 301)

Heads = Float[Tensor, "sequence head token head_dim"]
Scores = Float[Tensor, "head token token"]


def attend(block: Block, hidden: Hidden) -> tuple[Hidden, Heads, Heads, Float[Tensor, "sequence head token token"]]:
    """Run the block on its inputs.

    Returns:
        Its outputs; the queries and the keys, as its attention receives them; and the scores q·k/√d', −∞ where the
        query does not see the key.
    """
    seen = []

    def watch(module, query, key, value, mask, bias, scaling) -> Tensor:
        scores = scaling * query @ key.transpose(2, 3)
        seen.append((query, key, scores if mask is None else scores.masked_fill(~mask, -math.inf)))
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)

    with attended_by({block.attention}, watch):
        output = block(hidden)
    return output, *seen[0]


def attention_statistics(scores: Scores) -> dict[str, Float[Tensor, " head"]]:
    r"""The scores and the attention weights of each head in a sequence.

    The means of s (``score``) and of \|s\| (``score_magnitude``) over the pairs of a query and a key that it sees. For
    a query that sees n keys, with weights p = softmax(s): the largest, the median and the smallest of the n weights
    (``row_max``, ``row_median``, ``row_min``); the entropy H = −Σ p ln p in nats; H / ln n, of rows of at least two
    keys; and how far H falls below its maximum, ln n − H = Σ p ln(n p), the divergence of the row from equal weights;
    each is a mean over rows. ``sequence_max`` and ``sequence_min`` are the extremes of the whole sequence. The median
    of an even number of weights is the mean of the two in the middle.

    Args:
        scores: −∞ where a query does not see a key.
    """
    visible = scores[0].isfinite()
    count = visible.sum(-1)
    # In float64: the entropy of a nearly uniform row, some 6 nats, falls below its maximum by 1e-8.
    exact = scores.double()
    log_sum = exact.logsumexp(-1, keepdim=True)
    log_weights = exact - log_sum
    # A key that is not seen has the weight 0, and adds nothing.
    divergence = (log_weights.exp() * log_weights.masked_fill(~visible, 0)).sum(-1) + count.double().log()
    # Unseen keys come first. NumPy sorts several times faster than PyTorch.
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    ranks = torch.stack([torch.zeros_like(count), (count - 1) // 2, count // 2, count - 1], -1)
    places = (scores.shape[-1] - 1 - ranks).expand(len(scores), -1, -1)
    greatest, upper, lower, least = (ordered.gather(-1, places).double() - log_sum).exp().unbind(-1)
    several = count > 1
    rows = {
        "row_max": greatest,
        "row_median": (upper + lower) / 2,
        "row_min": least,
        "entropy_nats": count.double().log() - divergence,
        "entropy_normalised": 1 - divergence[:, several] / count[several].double().log(),
        "divergence": divergence,
    }
    seen = exact[:, visible]
    means = {"score": seen.mean(-1), "score_magnitude": seen.abs().mean(-1)}
    means |= {name: values.mean(-1) for name, values in rows.items()}
    return means | {"sequence_max": greatest.amax(-1), "sequence_min": least.amin(-1)}


def histogram(scores: Scores, edges: Float[np.ndarray, " edge"]) -> Int[np.ndarray, "head bin"]:
    """How many visible scores of each head fall into bins of equal width; the first and the last bin are open."""
    seen = scores[:, scores[0].isfinite()].numpy().clip(edges[0], edges[-1])
    return np.stack([np.histogram(head, len(edges) - 1, (edges[0], edges[-1]))[0] for head in seen])


def sweep(
    blocks: Iterable[Draw], norms: Sequence[float], edges: np.ndarray | None = SCORE_BINS
) -> dict[str, pd.DataFrame]:
    r"""Run each block on its inputs plus a bias of each norm (Godey et al. 2024, Fig. 6 to 10).

    Args:
        blocks: the draws.
        norms: of the bias, 0 or more.
        edges: of the histograms of scores, see :func:`histogram`; None leaves out ``attention`` and ``scores``.

    Returns:
        Tables whose first columns are architecture, weights_seed, direction_seed and bias_norm:

        - ``vectors``: space (hidden, query, key), layer (0 the input, 1 the output and its attention), head, cosine,
          norm_of_mean, mean_norm, as in the tables ``anisotropy`` and ``mean_vector`` of ``measure``;
        - ``attention``: head; bias_score, the score of the bias alone with itself, which is N² uᵀW_QᵀW_K u/√d' in
          BERT; and the means over sequences of :func:`attention_statistics`;
        - ``scores``: head, low, high, count.

    Raises:
        AnalysisError: no norm of the bias was given, or one that is negative or not finite.
    """
    if not len(norms):
        raise AnalysisError("no norm of the bias was given: give some, such as 0, 10 and 20")
    found = defaultdict(list)
    for draw in blocks:
        block = draw.block()
        for norm in norms:
            labels = pd.DataFrame([{**draw.labels, "bias_norm": float(norm)}])
            for name, table in _tables(block, norm, edges).items():
                found[name].append(labels.merge(table, how="cross"))
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _tables(block: Block, norm: float, edges: np.ndarray | None) -> dict[str, pd.DataFrame]:
    """The tables of a block under one bias."""
    metrics, statistics, counts = [Anisotropy(), MeanVector()], [], 0
    tokens = unpadded(torch.tensor([0]), block.inputs.shape[1])
    for hidden in block.biased(norm):
        output, query, key, scores = attend(block, hidden)
        spaces = {"hidden": hidden.unsqueeze(1)}, {"hidden": output.unsqueeze(1), "query": query, "key": key}
        for layer, parts in enumerate(spaces):
            vectors = {space: Vectors(values, tokens) for space, values in parts.items()}
            for metric in metrics:
                metric.update(Activations(layer, "block", "", tokens, vectors))
        if edges is not None:
            statistics.append(attention_statistics(scores[0]))
            counts = counts + histogram(scores[0], edges)
    cosines, lengths = (metric.points(metric.total()) for metric in metrics)
    tables = {"vectors": cosines.drop(columns="tokens").merge(lengths, on=["space", "layer", "head"])}
    if edges is not None:
        *_, alone = attend(block, (norm * block.direction).view(1, 1, -1))
        head = pd.DataFrame({"head": range(1, len(counts) + 1)})
        means = {name: torch.stack([one[name] for one in statistics]).mean(0).numpy() for name in statistics[0]}
        tables["attention"] = head.assign(bias_score=alone.flatten().double().numpy(), **means)
        bins = pd.DataFrame({"low": edges[:-1], "high": edges[1:]})
        tables["scores"] = head.merge(bins, how="cross").assign(count=counts.ravel())
    return tables


def over_seeds(table: pd.DataFrame, column: str, by: Sequence[str] = ("bias_norm",)) -> pd.DataFrame:
    """The mean of a column over the heads of each draw, then over draws, with its 95 % interval over draws.

    Returns:
        Columns architecture, those of ``by``, then value, ci_low, ci_high.
    """
    by = ["architecture", *by]
    each = table.groupby([*by, *DRAW_COLUMNS[1:]], sort=False)[column].mean()
    rows = [(*keys, *seed_interval(values)) for keys, values in each.groupby(by, sort=False)]
    return pd.DataFrame(rows, columns=[*by, "value", "ci_low", "ci_high"])


def by_norm(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column over the heads of each draw: one row per draw, one column per norm of the bias, ascending.

    Args:
        table: of :func:`sweep`; of ``vectors``, the rows of one space and layer.
        column: one of its columns.
    """
    return table.pivot_table(column, DRAW_COLUMNS, "bias_norm", sort=False).sort_index(axis=1)


# --- The fixed point ----------------------------------------------------------------------------------


def excess_norm(block: Block, norm: float) -> float:
    """The mean norm of the outputs minus that of the inputs, E‖T(x + b)‖ − E‖x + b‖, at a bias of this norm."""
    each = [block(hidden).double().norm(dim=-1) - hidden.double().norm(dim=-1) for hidden in block.biased(norm)]
    return float(torch.cat(each).mean())
