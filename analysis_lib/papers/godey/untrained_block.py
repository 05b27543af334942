"""One transformer block before training, under inputs that drift (Godey et al. 2024, sec. 4).

An embedding table and a block of the size of BERT-base are drawn as the architecture initialises them. Sequences x are
drawn uniformly from the table, a bias b of norm N in a random direction is added to every vector, and the block T is
run on x + b as N grows. What is measured has the names of ``measure``: layer 0 is the input x + b, layer 1 the output
T(x + b), and the attention is that of layer 1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.capture import IMPLEMENTATION, Activations, attended_by, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.metrics import Anisotropy, MeanVector
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.models.parts import MODEL_LAYOUTS

# The type of the model, as transformers names it, whose first block it is.
ARCHITECTURES = {"bert": "bert", "bert-pytorch": "bert", "gpt2": "gpt2", "vit": "vit"}
DRAW_COLUMNS = ["architecture", "weights_seed", "direction_seed"]

Hidden = Float[Tensor, "sequence token width"]


@dataclass(frozen=True)
class Draw:
    """A random draw: what determines a block, its inputs and the direction of their drift.

    Attributes:
        architecture: a name of ``ARCHITECTURES``. In ``bert-pytorch``, linear layers keep the weights and biases that
            PyTorch draws, uniform in ±1/√d, as in a block made by calling its class: transformers only initialises
            whole models.
        weights_seed: of the block, the embedding table and the sequences.
        direction_seed: of the direction of the bias.
        sequences: how many are drawn.
        length: tokens of a sequence.
        vocabulary: rows of the embedding table.
        width: of the hidden states; the feed-forward layer is four times as wide.
        heads: of attention.

    Raises:
        AnalysisError: an unknown architecture (with the nearest names), or a size that makes no block.
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
                f"there is no untrained block {self.architecture!r}: {near_names(self.architecture, ARCHITECTURES)}"
            )
        for field in fields(self)[1:]:
            value, least = getattr(self, field.name), 0 if field.name.endswith("seed") else 1
            if value != int(value) or value < least:
                raise AnalysisError(f"{field.name} is {value}: give a whole number of at least {least}")
        if self.sequences * self.length < 2:
            raise AnalysisError("a cosine needs two vectors, and one sequence of one token has one: give more")
        if self.width % self.heads:
            raise AnalysisError(f"{self.heads} heads do not share a width of {self.width}: give a divisor of it")

    @property
    def labels(self) -> dict[str, str | int]:
        """What identifies the draw in every row of a table: the values of ``DRAW_COLUMNS``."""
        return {name: getattr(self, name) for name in DRAW_COLUMNS}

    def block(self) -> "Block":
        """Draw the block and its inputs: the same seeds give the same numbers."""
        model_type = ARCHITECTURES[self.architecture]
        sizes = {"hidden_size": self.width, "num_attention_heads": self.heads}
        inner = "n_inner" if model_type == "gpt2" else "intermediate_size"
        config = transformers.AutoConfig.for_model(model_type, **sizes, **{inner: 4 * self.width})
        # A whole model without memory: GPT-2 scales the weights of a block by the depth of the model.
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config).eval()
        model.set_attn_implementation(IMPLEMENTATION)
        stack = MODEL_LAYOUTS[model_type].stacks[0]
        module = model.get_submodule(stack.blocks.replace("*", "0")).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.weights_seed)
            module.apply(model._init_weights)
            if self.architecture == "bert-pytorch":
                for linear in module.modules():
                    if isinstance(linear, nn.Linear):
                        linear.reset_parameters()
            # Of the table of embeddings, only the rows that occur: the whole takes longer than the block.
            drawn = torch.randint(self.vocabulary, (self.sequences, self.length))
            occurring, places = drawn.unique(return_inverse=True)
            inputs = config.initializer_range * torch.randn(len(occurring), self.width)[places]
        # Another generator: with one, equal seeds would make the direction a row of the first weights.
        direction = np.random.default_rng(self.direction_seed).standard_normal(self.width)
        direction = torch.from_numpy(direction / np.linalg.norm(direction)).float()
        return Block(module.requires_grad_(False), module.get_submodule(stack.attention.module), inputs, direction)


@dataclass(eq=False)
class Block:
    """A block with its attention, its inputs x and the direction b / N of their drift, a unit vector."""

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
            raise AnalysisError(f"{norm} cannot be the norm of a bias: give finite numbers of 0 or more")
        for inputs in self.inputs.split(1):
            yield inputs + norm * self.direction


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
    blocks: Sequence[Draw], norms: Sequence[float], edges: np.ndarray | None = SCORE_BINS
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
        AnalysisError: no block or no norm of the bias was given, or one that is negative or not finite.
    """
    if not len(blocks) or not len(norms):
        raise AnalysisError(
            f"{len(blocks)} blocks and {len(norms)} norms of the bias were given: give one architecture and seed or "
            f"more, and norms such as 0, 10 and 20"
        )
    found = defaultdict(list)
    for draw in blocks:
        block = draw.block()
        for norm in norms:
            labels = pd.DataFrame([{**draw.labels, "bias_norm": float(norm)}])
            for name, table in _tables(block, norm, edges).items():
                found[name].append(labels.merge(table, how="cross"))
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _tables(block: Block, norm: float, edges: np.ndarray | None) -> dict[str, pd.DataFrame]:
    metrics, statistics, counts = [Anisotropy(), MeanVector()], [], 0
    tokens = unpadded((0,), block.inputs.shape[1])
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
    rows = [(*keys, *seed_interval(values).row) for keys, values in each.groupby(by, sort=False)]
    return pd.DataFrame(rows, columns=[*by, "value", "ci_low", "ci_high"])


def by_norm(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column over the heads of each draw: one row per draw, one column per norm of the bias, ascending.

    Args:
        table: of :func:`sweep`; of ``vectors``, the rows of one space and layer.
        column: one of its columns.
    """
    return table.pivot_table(column, DRAW_COLUMNS, "bias_norm", sort=False).sort_index(axis=1)
