"""One transformer block before training, under inputs that drift (Godey et al. 2024, sec. 4).

An embedding table and a block of the size of BERT-base are drawn as the architecture initialises
them. Sequences x are drawn uniformly from the table, a bias b of norm N in a random direction is
added to every vector, and the block T is run on x + b as N grows. What is measured has the names of
``measure``: layer 0 is the input x + b, layer 1 the output T(x + b), and the attention is that of
layer 1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
import transformers
from jaxtyping import Float, Int
from scipy.optimize import elementwise
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.capture import IMPLEMENTATION, Activations, attended_by, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.metrics import Anisotropy, MeanVector
from analysis_lib.metrics.intervals import seed_interval

# The type of the model, as transformers names it, whose first block it is.
ARCHITECTURES = {"bert": "bert", "bert-pytorch": "bert", "gpt2": "gpt2", "vit": "vit"}
# Where each keeps its first block, and in it its attention.
SUBMODULES = {
    "bert": ("encoder.layer.0", "attention.self"),
    "gpt2": ("h.0", "attn"),
    "vit": ("layers.0", "attention"),
}
# What tables and figures call them.
TITLES = {
    "bert": "BERT block",
    "bert-pytorch": "BERT block (PyTorch)",
    "gpt2": "GPT-2 block",
    "vit": "ViT block",
}
DRAW_COLUMNS = ["architecture", "weights_seed", "direction_seed"]

Hidden = Float[Tensor, "sequence token width"]


@dataclass(frozen=True)
class Draw:
    """A random draw: what determines a block, its inputs and the direction of their drift.

    Attributes:
        architecture: a name of ``ARCHITECTURES``. In ``bert-pytorch``, linear layers keep the
            weights and biases that PyTorch draws, uniform in ±1/√d, as in a block made by calling
            its class: transformers only initialises whole models.
        weights_seed: of the block, the embedding table and the sequences.
        direction_seed: of the direction of the bias.
        sequences: how many are drawn.
        length: tokens of a sequence.
        vocabulary: rows of the embedding table.
        width: of the hidden states; the feed-forward layer is four times as wide.
        heads: of attention.

    Raises:
        AnalysisError: an unknown architecture (with the nearest names), or a size that makes no
            block.
    """

    architecture: str = "bert"
    weights_seed: int = 0
    direction_seed: int = 0
    sequences: int = 16
    length: int = 512
    vocabulary: int = 30522
    width: int = 768
    heads: int = 12

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise AnalysisError(
                f"there is no untrained block {self.architecture!r}: "
                f"{near_names(self.architecture, ARCHITECTURES)}"
            )
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("seed") else 1
            if value != int(value) or value < least:
                raise AnalysisError(
                    f"{field.name} is {value}: give a whole number of at least {least}"
                )
        if self.sequences * self.length < 2:
            raise AnalysisError(
                "a cosine needs two vectors, and one sequence of one token has one: give more"
            )
        if self.width % self.heads:
            raise AnalysisError(
                f"{self.heads} heads do not share a width of {self.width}: give a divisor of it"
            )

    @property
    def labels(self) -> dict[str, str | int]:
        """The values of ``DRAW_COLUMNS``, which identify the draw in the rows of a table."""
        return {
            "architecture": TITLES[self.architecture],
            "weights_seed": self.weights_seed,
            "direction_seed": self.direction_seed,
        }

    def block(self) -> "Block":
        """Draw the block and its inputs: the same seeds give the same numbers."""
        model_type = ARCHITECTURES[self.architecture]
        inner = "n_inner" if model_type == "gpt2" else "intermediate_size"
        sizes = {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            inner: 4 * self.width,
        }
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        # A whole model without memory: GPT-2 scales the weights of a block by the depth of the
        # model.
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config).eval()
        model.set_attn_implementation(IMPLEMENTATION)
        block, attention = SUBMODULES[model_type]
        module = model.get_submodule(block).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.weights_seed)
            module.apply(model._init_weights)
            if self.architecture == "bert-pytorch":
                for linear in module.modules():
                    if isinstance(linear, nn.Linear):
                        linear.reset_parameters()
            # Of the table of embeddings, only the rows that occur: the whole takes longer than the
            # block.
            drawn = torch.randint(self.vocabulary, (self.sequences, self.length))
            occurring, indices = drawn.unique(return_inverse=True)
            table = torch.randn(len(occurring), self.width)
            inputs = config.initializer_range * table[indices]
        module.requires_grad_(False)
        attention = module.get_submodule(attention)
        towards = direction(self.direction_seed, self.width)
        return Block(module, attention, inputs, towards)


def draws(
    architectures: Sequence[str],
    seeds: int,
    **sizes: int,
) -> list[Draw]:
    """So many draws of each architecture, with one seed for weights and direction of the bias."""
    return [Draw(name, seed, seed, **sizes) for name in architectures for seed in range(seeds)]


def direction(seed: int, width: int) -> Float[Tensor, " width"]:
    """A random direction: a unit vector."""
    # Another generator than that of the weights: with one, equal seeds would make it a row of the
    # first of them.
    drawn = np.random.default_rng(seed).standard_normal(width)
    return torch.from_numpy(drawn / np.linalg.norm(drawn)).float()


@dataclass(eq=False)
class Block:
    """A block with its attention, its inputs x and the unit direction b / N of their drift."""

    module: nn.Module
    attention: nn.Module
    inputs: Hidden
    direction: Float[Tensor, " width"]

    def __call__(self, hidden: Hidden) -> Hidden:
        """T(hidden), without dropout."""
        with torch.inference_mode():
            output = self.module(hidden)
        return output[0] if isinstance(output, tuple) else output

    def biased(self, norm: float) -> Iterator[Hidden]:
        """x + b, one sequence at a time.

        Raises:
            AnalysisError: the norm is negative or not finite.
        """
        if not (math.isfinite(norm) and norm >= 0):
            raise AnalysisError(
                f"{norm} cannot be the norm of a bias: give finite numbers of 0 or more"
            )
        for inputs in self.inputs.split(1):
            yield inputs + norm * self.direction


# Bins 0.02 wide: in blocks of the size of BERT-base, no score leaves this range up to a bias of
# norm 50.
SCORE_BINS = np.linspace(-3, 3, 301)

Heads = Float[Tensor, "sequence head token head_dim"]
Scores = Float[Tensor, "head token token"]


def attend(
    block: Block, hidden: Hidden
) -> tuple[Hidden, Heads, Heads, Float[Tensor, "sequence head token token"]]:
    """Run the block on its inputs.

    Returns:
        Its outputs; the queries and the keys, as its attention receives them; and the scores
        q·k/√d', −∞ where the query does not see the key.
    """
    seen = []

    def watch(module, query, key, value, mask, bias, scaling, *_) -> Tensor:
        scores = scaling * query @ key.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        seen.append((query, key, scores))
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)

    with attended_by({block.attention}, watch):
        output = block(hidden)
    return output, *seen[0]


def attention_statistics(scores: Scores) -> dict[str, Float[Tensor, " head"]]:
    r"""The scores and the attention weights of each head in a sequence.

    The means of s (``score``) and of \|s\| (``score_magnitude``) over the pairs of a query and a
    key that it sees. For a query that sees n keys, with weights p = softmax(s): the largest, the
    median and the smallest of the n weights (``row_max``, ``row_median``, ``row_min``); the entropy
    H = −Σ p ln p in nats; H / ln n, of rows of at least two keys; and how far H falls below its
    maximum, ln n − H = Σ p ln(n p), the divergence of the row from equal weights; each is a mean
    over rows. ``sequence_max`` and ``sequence_min`` are the extremes of the whole sequence. The
    median of an even number of weights is the mean of the two in the middle.

    Args:
        scores: −∞ where a query does not see a key.
    """
    visible = scores[0].isfinite()
    count = visible.sum(-1)
    # In float64: the entropy of a nearly uniform row, some 6 nats, falls below its maximum by 1e-8.
    exact = scores.double()
    log_sum = exact.logsumexp(-1, keepdim=True)
    log_weights = exact - log_sum
    log_count = count.double().log()
    # A key that is not seen has the weight 0, and adds nothing.
    products = log_weights.exp() * log_weights.masked_fill(~visible, 0)
    divergence = products.sum(-1) + log_count
    # Unseen keys come first. NumPy sorts several times faster than PyTorch.
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    first = torch.zeros_like(count)
    ranks = torch.stack([first, (count - 1) // 2, count // 2, count - 1], -1)
    indices = scores.shape[-1] - 1 - ranks
    of_ranks = ordered.gather(-1, indices.expand(len(scores), -1, -1))
    weights = (of_ranks.double() - log_sum).exp()
    greatest, upper, lower, least = weights.unbind(-1)
    several = count > 1
    rows = {
        "row_max": greatest,
        "row_median": (upper + lower) / 2,
        "row_min": least,
        "entropy_nats": log_count - divergence,
        "entropy_normalised": 1 - divergence[:, several] / log_count[several],
        "divergence": divergence,
    }
    seen = exact[:, visible]
    means = {"score": seen.mean(-1), "score_magnitude": seen.abs().mean(-1)}
    means |= {name: values.mean(-1) for name, values in rows.items()}
    return means | {"sequence_max": greatest.amax(-1), "sequence_min": least.amin(-1)}


def histogram(scores: Scores, edges: Float[np.ndarray, " edge"]) -> Int[np.ndarray, "head bin"]:
    """How many visible scores of each head fall into bins of equal width.

    The first and the last bin are open.
    """
    visible = scores[0].isfinite()
    lowest = edges[0]
    highest = edges[-1]
    counts = []
    for head in scores[:, visible].numpy().clip(lowest, highest):
        of_head, _ = np.histogram(head, len(edges) - 1, (lowest, highest))
        counts.append(of_head)
    return np.stack(counts)


def sweep(
    blocks: Sequence[Draw],
    norms: Sequence[float],
    edges: np.ndarray | None = SCORE_BINS,
) -> dict[str, pd.DataFrame]:
    r"""Run each block on its inputs plus a bias of each norm (Godey et al. 2024, Fig. 6 to 10).

    Args:
        blocks: the draws.
        norms: of the bias, 0 or more.
        edges: of the histograms of scores, see :func:`histogram`; None leaves out ``attention`` and
            ``scores``.

    Returns:
        Tables whose first columns are architecture, weights_seed, direction_seed and bias_norm:

        - ``vectors``: space (hidden, query, key), layer (0 the input, 1 the output and its
          attention), head, cosine, norm_of_mean, mean_norm, as in the tables ``anisotropy`` and
          ``mean_vector`` of ``measure``;
        - ``attention``: head; bias_score, the score of the bias alone with itself, which is N²
          uᵀW_QᵀW_K u/√d' in BERT; and the means over sequences of :func:`attention_statistics`;
        - ``scores``: head, low, high, count.

    Raises:
        AnalysisError: no block or no norm of the bias was given, or one that is negative or not
            finite.
    """
    if not len(blocks) or not len(norms):
        raise AnalysisError(
            f"{len(blocks)} blocks and {len(norms)} norms of the bias were given: give one "
            "architecture and seed or "
            f"more, and norms such as 0, 10 and 20"
        )
    parts = defaultdict(list)
    for draw in blocks:
        block = draw.block()
        for norm in norms:
            labels = pd.DataFrame([{**draw.labels, "bias_norm": float(norm)}])
            for name, table in _tables(block, norm, edges).items():
                labelled = labels.merge(table, how="cross")
                parts[name].append(labelled)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in parts.items()}


def _tables(
    block: Block,
    norm: float,
    edges: np.ndarray | None,
) -> dict[str, pd.DataFrame]:
    anisotropy = Anisotropy()
    drift = MeanVector()
    statistics = []
    counts = 0
    tokens = unpadded((0,), block.inputs.shape[1])
    for hidden in block.biased(norm):
        output, query, key, scores = attend(block, hidden)
        at_input = {"hidden": hidden.unsqueeze(1)}
        at_output = {"hidden": output.unsqueeze(1), "query": query, "key": key}
        for layer, spaces in enumerate((at_input, at_output)):
            vectors = {space: Vectors(values, tokens) for space, values in spaces.items()}
            activations = Activations(layer, "block", "", tokens, vectors)
            anisotropy.update(activations)
            drift.update(activations)
        if edges is not None:
            statistics.append(attention_statistics(scores[0]))
            counts = counts + histogram(scores[0], edges)
    cosines = anisotropy.without().drop(columns="tokens")
    lengths = drift.without()
    tables = {"vectors": cosines.merge(lengths, on=["space", "layer", "head"])}
    if edges is None:
        return tables
    bias = (norm * block.direction).view(1, 1, -1)
    *_, bias_scores = attend(block, bias)
    head = pd.DataFrame({"head": range(1, len(counts) + 1)})
    means = {}
    for name in statistics[0]:
        of_sequences = torch.stack([sequence[name] for sequence in statistics])
        means[name] = of_sequences.mean(0).numpy()
    bias_score = bias_scores.flatten().double().numpy()
    tables["attention"] = head.assign(bias_score=bias_score, **means)
    bins = pd.DataFrame({"low": edges[:-1], "high": edges[1:]})
    histograms = head.merge(bins, how="cross")
    tables["scores"] = histograms.assign(count=counts.ravel())
    return tables


def over_seeds(
    table: pd.DataFrame,
    column: str,
    by: Sequence[str] = ("bias_norm",),
) -> pd.DataFrame:
    """The mean of a column over heads, then over draws, with its 95 % interval over draws.

    Returns:
        Columns architecture, those of ``by``, then value, ci_low, ci_high.
    """
    by = ["architecture", *by]
    of_draw = [*by, "weights_seed", "direction_seed"]
    means = table.groupby(of_draw, sort=False)[column].mean()
    rows = []
    for keys, values in means.groupby(by, sort=False):
        estimate = seed_interval(values)
        rows.append((*keys, *estimate.row))
    return pd.DataFrame(rows, columns=[*by, "value", "ci_low", "ci_high"])


def by_norm(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column over the heads of each block: a column per norm of the bias, ascending.

    Args:
        table: of :func:`sweep`; of ``vectors``, the rows of one space and layer.
        column: one of its columns.

    Returns:
        One row per block, by model (the architecture) and seed (of the weights), as
        ``claims.verdicts_over_seeds`` takes it.
    """
    named = table.rename(columns={"architecture": "model", "weights_seed": "seed"})
    means = named.pivot_table(column, ["model", "seed"], "bias_norm", sort=False)
    return means.sort_index(axis=1)


def mean_scores(
    blocks: Sequence[Draw],
    norms: Sequence[float],
    directions: int,
) -> pd.DataFrame:
    """The mean score over heads and pairs of tokens, for several directions of the bias.

    Args:
        blocks: of whose sequences the first is run.
        norms: of the bias.
        directions: how many in each block; the first is that of the draw.

    Returns:
        One row per draw of a block and a direction, with ``DRAW_COLUMNS`` as index; one column per
        norm.
    """
    tables = []
    for block, draws, towards in _turned(blocks, directions):
        means = {}
        for norm in norms:
            hidden = block.inputs[:1] + norm * towards
            *_, scores = attend(block, hidden)
            scores = scores.double().flatten(1)
            visible = scores.masked_fill(scores.isinf(), math.nan)
            means[norm] = visible.nanmean(1).numpy()
        tables.append(pd.DataFrame(means, draws))
    return pd.concat(tables)


def fixed_points(
    blocks: Sequence[Draw],
    highest: float,
    directions: int = 1,
) -> pd.DataFrame:
    r"""The norm N* of the bias at which outputs are as long as inputs, E‖x + b‖ = E‖T(x + b)‖.

    Godey et al. 2024, 4.2.

    Args:
        blocks: of whose sequences the first is run.
        highest: norm of the bias to search, to a ten-millionth of it.
        directions: of the bias, in each block; the first is that of the draw.

    Returns:
        One row per draw of a block and a direction: ``DRAW_COLUMNS``, ``fixed_point`` (missing
        where outputs are longer than inputs, or shorter, both without bias and at the highest
        norm), and by how much they are longer at these two, ``excess`` and ``excess_at_highest``.

    Raises:
        AnalysisError: the highest norm is not positive and finite.
    """
    if not (math.isfinite(highest) and highest > 0):
        raise AnalysisError(
            f"{highest} cannot be the highest norm of a bias: give a finite number above 0"
        )
    tables = []
    for block, draws, towards in _turned(blocks, directions):
        excess = partial(_excess, block, towards)
        lowest = np.zeros(directions)
        # By Chandrupatla's method; where both ends have one sign it stops at once, without success.
        root = elementwise.find_root(
            excess,
            (lowest, lowest + highest),
            args=(np.arange(directions),),
            tolerances={"xatol": highest * 1e-7},
        )
        every = np.arange(directions)
        start = excess(lowest, every)
        end = excess(lowest + highest, every)
        columns = {
            "fixed_point": np.where(start * end < 0, root.x, math.nan),
            "excess": start,
            "excess_at_highest": end,
        }
        tables.append(pd.DataFrame(columns, draws))
    return pd.concat(tables).reset_index()


def _excess(
    block: Block,
    towards: Hidden,
    norms: Float[np.ndarray, " draw"],
    draws: Float[np.ndarray, " draw"],
) -> Float[np.ndarray, " draw"]:
    """E‖T(x + b)‖ − E‖x + b‖ at a norm of the bias for each of some directions, by their index."""
    bias = torch.tensor(norms).float()[:, None, None] * towards[draws.astype(int)]
    hidden = block.inputs[:1] + bias
    excess = _mean_norm(block(hidden)) - _mean_norm(hidden)
    return excess.numpy()


def _mean_norm(hidden: Hidden) -> Float[Tensor, " sequence"]:
    return hidden.double().norm(dim=-1).mean(-1)


def repeated(
    blocks: Sequence[Draw],
    norms: Sequence[float],
    times: int,
    directions: int = 1,
) -> pd.DataFrame:
    """The mean norm of the vectors as a block is applied to its own outputs again and again.

    Args:
        blocks: of whose sequences the first is run.
        norms: of the bias on the first inputs.
        times: how often the block is applied.
        directions: of the bias, in each block; the first is that of the draw.

    Returns:
        One row per draw of a block and a direction, norm and time: ``DRAW_COLUMNS``, ``bias_norm``,
        ``times`` (0 for the inputs), ``mean_norm``.
    """
    tables = []
    for block, draws, towards in _turned(blocks, directions):
        for norm in norms:
            hidden = block.inputs[:1] + norm * towards
            for time in range(times + 1):
                if time:
                    hidden = block(hidden)
                columns = {
                    "bias_norm": float(norm),
                    "times": time,
                    "mean_norm": _mean_norm(hidden).numpy(),
                }
                tables.append(pd.DataFrame(columns, draws))
    return pd.concat(tables).reset_index()


def _turned(
    blocks: Sequence[Draw], directions: int
) -> Iterator[tuple[Block, pd.MultiIndex, Float[Tensor, "direction 1 width"]]]:
    """Each block, its draws with several directions of the bias, and these directions."""
    for draw in blocks:
        labels = []
        towards = []
        for number in range(directions):
            seed = draw.direction_seed + 1000 * number
            labels.append(replace(draw, direction_seed=seed).labels)
            towards.append(direction(seed, draw.width))
        index = pd.MultiIndex.from_frame(pd.DataFrame(labels))
        yield draw.block(), index, torch.stack(towards).unsqueeze(1)
