"""One transformer block before training, under inputs that drift (Godey et al. 2024, sec. 4).

An embedding table and a block of the size of BERT-base are drawn as the architecture initialises them. Sequences x are
drawn uniformly from the table, a bias b of norm N in a random direction is added to every vector, and the block T is
run on x + b as N grows. What is measured has the names of ``measure``: layer 0 is the input x + b, layer 1 the output
T(x + b), and the attention is that of layer 1.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import torch
import transformers
from jaxtyping import Bool, Float, Int
from scipy import optimize
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.capture import IMPLEMENTATION, Activations, attended_by, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.metrics import Anisotropy, MeanVector
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.models.parts import LAYOUTS


@dataclass(frozen=True)
class Architecture:
    """How a block is drawn.

    Attributes:
        model_type: whose first block it is, as transformers names it.
        own_linear: whether linear layers keep the weights and biases that PyTorch draws, uniform in ±1/√d, as in a
            block that is made by its class alone: transformers initialises whole models.
    """

    model_type: str
    own_linear: bool = False


ARCHITECTURES = {
    "bert": Architecture("bert"),
    "bert-pytorch": Architecture("bert", own_linear=True),
    "gpt2": Architecture("gpt2"),
    "vit": Architecture("vit"),
}
# 0.02 wide: of sizes as in BERT-base, no score of a block leaves the range up to a bias of norm 50.
SCORE_BINS = np.linspace(-3, 3, 301)
DRAW = ["architecture", "weights_seed", "direction_seed"]

Hidden = Float[Tensor, "sequence token width"]


# --- A block and its inputs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What determines a block, its inputs and the direction of their drift.

    Attributes:
        architecture: a name of ``ARCHITECTURES``.
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
        """What stands in front of every row that is measured of it."""
        return {name: getattr(self, name) for name in DRAW}

    def block(self) -> "Block":
        """Draw it: the same seeds give the same numbers."""
        kind = ARCHITECTURES[self.architecture]
        sizes = {"hidden_size": self.width, "num_attention_heads": self.heads}
        inner = "n_inner" if kind.model_type == "gpt2" else "intermediate_size"
        config = transformers.AutoConfig.for_model(kind.model_type, **sizes, **{inner: 4 * self.width})
        # A whole model without memory: GPT-2 scales the weights of a block by the depth of the model.
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config).eval()
        model.set_attn_implementation(IMPLEMENTATION)
        stack = LAYOUTS[kind.model_type].stacks[0]
        module = model.get_submodule(stack.blocks.replace("*", "0")).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.weights_seed)
            module.apply(model._init_weights)
            if kind.own_linear:
                for linear in module.modules():
                    if isinstance(linear, nn.Linear):
                        linear.reset_parameters()
            table = config.initializer_range * torch.randn(self.vocabulary, self.width)
            inputs = table[torch.randint(self.vocabulary, (self.sequences, self.length))]
        # Another generator: with one, equal seeds would make the direction a row of the first weights.
        direction = np.random.default_rng(self.direction_seed).standard_normal(self.width)
        direction = torch.from_numpy(direction / np.linalg.norm(direction)).float()
        return Block(module.requires_grad_(False), module.get_submodule(stack.attention.module), inputs, direction)


def draws(architectures: Sequence[str], seeds: int, **sizes: int) -> list[Draw]:
    """Blocks to compare: ``seeds`` of each architecture, each with weights and a direction of its own.

    Args:
        sizes: of the other attributes of ``Draw``.

    >>> [draw.direction_seed for draw in draws(["bert"], 3)]
    [0, 1, 2]
    """
    if not architectures or seeds < 1:
        raise AnalysisError(
            f"{len(architectures)} architectures and {seeds} seeds were given: give one or more of each"
        )
    return [Draw(name, seed, seed, **sizes) for name in architectures for seed in range(seeds)]


@dataclass(eq=False)
class Block:
    """A block with its inputs and the direction of their drift.

    Attributes:
        module: the block.
        attention: the attention inside it.
        inputs: x.
        direction: b / N, a unit vector.
    """

    module: nn.Module
    attention: nn.Module
    inputs: Hidden
    direction: Float[Tensor, " width"]

    def __call__(self, hidden: Hidden) -> Hidden:
        """T(hidden), without dropout."""
        with torch.inference_mode():
            output = self.module(hidden)
        return output[0] if isinstance(output, tuple) else output

    def biased(self, norm: float, batch: int = 1) -> Iterator[Hidden]:
        """x + b, at most ``batch`` sequences at a time."""
        for inputs in self.inputs.split(batch):
            yield inputs + norm * self.direction


# --- What passes through it -----------------------------------------------------------------------


@dataclass(eq=False)
class Attended:
    """The queries and keys of a block, as its attention gets them.

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
    """What the registered attention function asks when it is called by the block's attention."""

    def __init__(self, attention: nn.Module):
        self.own = {attention}
        self.seen: list[Attended] = []

    def attend(self, module, query, key, value, mask, bias, scaling) -> Tensor:
        self.seen.append(Attended(query, key, mask, scaling))
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)


@contextmanager
def watching(block: Block) -> Iterator[list[Attended]]:
    """Inside it, every run of the block adds what its attention gets to the list."""
    watch = _Watch(block.attention)
    with attended_by(watch):
        yield watch.seen


# --- Statistics of scores and weights -------------------------------------------------------------


def weight_statistics(
    scores: Float[Tensor, "sequence head token token"], visible: Bool[Tensor, "token token"]
) -> dict[str, Float[Tensor, " head"]]:
    r"""What the softmax of each head makes of its scores: sums over the rows, or sequences, that the names say.

    For a query that sees n keys, with weights p = softmax(s): the largest, the median and the smallest of the n
    weights; the entropy H = −Σ p ln p in nats; H / ln n, of the rows of two keys or more; and what H lacks to its
    largest value, ln n − H = Σ p ln(n p), the divergence of the row from equal weights. And the largest and the
    smallest weight of a whole sequence. The median of an even number is the mean of the two in the middle.

    Args:
        scores: −∞ where a query does not see a key.
    """
    count = visible.sum(-1)
    # In float64: an almost equal row lacks 1e-8 nats of its entropy of 6.
    exact = scores.double()
    log_sum = exact.logsumexp(-1, keepdim=True)
    log_weights = exact - log_sum
    # A key that is not seen has the weight 0, and adds nothing.
    divergence = (log_weights.exp() * log_weights.masked_fill(~visible, 0)).sum(-1) + count.double().log()
    # Unseen keys come first. NumPy sorts several times faster than PyTorch.
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1))

    def ranked(rank: Int[Tensor, " token"]) -> Float[Tensor, "sequence head token"]:
        """The weight of each row that has so many larger ones."""
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
    """How many visible scores of each head fall between edges of equal distance; the outer two bins are open."""
    bins, heads = len(edges) - 1, scores.shape[1]
    seen = scores.transpose(0, 1)[:, :, visible].reshape(heads, -1)
    found = ((seen - edges[0]) * (bins / (edges[-1] - edges[0]))).floor().clamp(0, bins - 1).long()
    found += bins * torch.arange(heads).unsqueeze(1)
    return torch.bincount(found.flatten(), minlength=heads * bins).view(heads, bins).numpy()


class _Sums:
    """Sums over the sequences of a block under one bias, and the tables they give."""

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
        norms: of the bias, 0 or more.
        edges: of the histograms of scores, see :func:`histogram`; None leaves out ``attention`` and ``scores``.
        batch: sequences at a time. The numbers do not depend on it but for rounding.

    Returns:
        Tables whose first columns are architecture, weights_seed, direction_seed and bias_norm:

        - ``vectors``: space (hidden, query, key), layer (0 the input, 1 the output and its attention), head, cosine,
          norm_of_mean, mean_norm, as in the tables ``anisotropy`` and ``mean_vector`` of ``measure``;
        - ``attention``: head; bias_score, the score of the bias alone with itself, which is N² uᵀW_QᵀW_K u/√d' in
          BERT; score and score_magnitude, the means of s and of \|s\| over pairs; and the means of what
          :func:`weight_statistics` finds. Sequence extremes are means over sequences;
        - ``scores``: head, low, high, count.

    Raises:
        AnalysisError: no norm, or one that is negative or not finite.
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
        raise AnalysisError(f"{wrong[0]} is no norm of a bias: give numbers of 0 or more")


# --- The fixed point ------------------------------------------------------------------------------


def excess_norm(block: Block, norm: float, batch: int = 1) -> float:
    """The mean norm of the outputs minus that of the inputs, E‖T(x + b)‖ − E‖x + b‖, at a bias of this norm."""
    excess = torch.tensor(0.0, dtype=torch.float64)
    for hidden in block.biased(norm, batch):
        excess += (block(hidden).double().norm(dim=-1) - hidden.double().norm(dim=-1)).sum()
    return float(excess) / block.inputs[..., 0].numel()


def fixed_points(blocks: Iterable[Draw], highest: float, batch: int = 1) -> pd.DataFrame:
    """The bias norm N* at which inputs and outputs are equally long on average (Godey et al. 2024, sec. 4.2).

    E‖x + b‖ = E‖T(x + b)‖ is solved on the block itself, by bracketing (Brent's method) between 0 and ``highest``, to
    five digits.

    Returns:
        Columns architecture, weights_seed, direction_seed; fixed_point, NaN where the difference has the same sign at
        both ends; excess and excess_at_highest, the mean norm of outputs minus that of inputs without bias and with
        the largest.

    Raises:
        AnalysisError: ``highest`` is not a positive number.
    """
    if not (math.isfinite(highest) and highest > 0):
        raise AnalysisError(f"the search for a fixed point was told to end at {highest}: give a positive norm")
    rows = []
    for draw in blocks:
        block = draw.block()
        ends = [excess_norm(block, norm, batch) for norm in (0.0, highest)]
        crosses = ends[0] * ends[1] < 0
        root = _root(lambda norm, b=block: excess_norm(b, norm, batch), highest) if crosses else math.nan
        rows.append({**draw.labels, "fixed_point": root, "excess": ends[0], "excess_at_highest": ends[1]})
    return pd.DataFrame(rows)


def _root(difference: Callable[[float], float], highest: float) -> float:
    return optimize.brentq(difference, 0.0, highest, xtol=1e-6 * highest, rtol=1e-6)


# --- Over seeds -----------------------------------------------------------------------------------


def of_draw(table: pd.DataFrame, draw: Sequence[str | int]) -> pd.DataFrame:
    """The rows of one draw, given as architecture, weights_seed, direction_seed."""
    return table[(table[DRAW] == [*draw]).all(axis=1)]


def over_seeds(table: pd.DataFrame, column: str, by: Sequence[str] = ("bias_norm",)) -> pd.DataFrame:
    """The mean of a column over draws, after that over the heads of each, with its interval over draws.

    Returns:
        Columns architecture, those of ``by``, then value, ci_low, ci_high.
    """
    by = ["architecture", *by]
    each = table.groupby([*by, *DRAW[1:]], sort=False)[column].mean()
    rows = [(*keys, *seed_interval(values)) for keys, values in each.groupby(by, sort=False)]
    return pd.DataFrame(rows, columns=[*by, "value", "ci_low", "ci_high"])
