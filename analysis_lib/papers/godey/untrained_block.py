"""One transformer block before training, under inputs that drift (Godey et al. 2024, sec. 4).

An embedding table and a block of the size of BERT-base are drawn as the architecture initialises them. Sequences x are
drawn uniformly from the table, a bias b of norm N in a random direction is added to every vector, and the block T is
run on x + b as N grows. What is measured has the names of ``measure``: layer 0 is the input x + b, layer 1 the output
T(x + b), and the attention is that of layer 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn

from analysis_lib.capture import IMPLEMENTATION
from analysis_lib.errors import AnalysisError, near_names
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
            table = config.initializer_range * torch.randn(self.vocabulary, self.width)
            inputs = table[torch.randint(self.vocabulary, (self.sequences, self.length))]
        # Another generator: with one, equal seeds would make the direction a row of the first weights.
        direction = np.random.default_rng(self.direction_seed).standard_normal(self.width)
        direction = torch.from_numpy(direction / np.linalg.norm(direction)).float()
        return Block(module.requires_grad_(False), module.get_submodule(stack.attention.module), inputs, direction)


def draws(architectures: Sequence[str], seeds: int, **sizes: int) -> list[Draw]:
    """Blocks to compare: ``seeds`` of each architecture, each with its own weights and direction.

    Args:
        architectures: names of ``ARCHITECTURES``.
        seeds: how many blocks of each.
        sizes: other attributes of :class:`Draw`.

    Raises:
        AnalysisError: no architecture, no seed, or what :class:`Draw` refuses.

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
