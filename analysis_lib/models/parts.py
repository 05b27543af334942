"""Where each architecture keeps its blocks, its attention and its keys: the entries of ``data/architectures.yml``."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from analysis_lib.corpora.packages import entries
from analysis_lib.errors import AnalysisError

# By a part of the name of a setting, its largest value.
MOST = {"layers": 10_000, "num_labels": 1_000_000}


@dataclass(frozen=True)
class Attention:
    """Self-attention inside a block.

    Attributes:
        module: its path below the block.
        key: the path, below that module, of what projects keys; what it reads is the attention input.
        fused: how one projection holds queries, keys and values: ``stacked`` (all queries, then all keys, then all
            values), ``by_head`` (the three of a head side by side), or None where each has its own.
        key_norm: the path of the root-mean-square norm that each head's keys go through before they are rotated.
        query: the path of the query projection. Set only where the module does not call the attention interface, as
            are the next three.
        value: the path of the value projection.
        weights: the path of the dropout that the attention weights pass through.
        heads: the attribute that holds the number of heads.
    """

    module: str
    key: str
    fused: str | None = None
    key_norm: str | None = None
    query: str | None = None
    value: str | None = None
    weights: str | None = None
    heads: str = "num_attention_heads"

    @property
    def hooked(self) -> bool:
        """Whether it is reached by hooks, not by the attention interface."""
        return self.weights is not None


@dataclass(frozen=True)
class Stack:
    """Blocks that follow one another.

    Attributes:
        blocks: their path below the model; ``*`` stands for an index.
        attention: None where blocks have none.
        name: what the stack is called where a model has several.
        tokens: what its vectors stand for: ``text``, ``shifted`` (a decoder's text), ``patches``, ``frames``,
            ``windows`` (a sound padded with silence), or CANINE's ``molecules`` and MANTa's ``blocks``.
        amended: the path of a module that changes the output of the first block before the second reads it, where
            the model has one.
    """

    blocks: str
    attention: Attention | None = None
    name: str = "blocks"
    tokens: str = "text"
    amended: str | None = None


@dataclass(frozen=True)
class Layout:
    """One architecture.

    Attributes:
        stacks: in the order in which they run.
        kind: what it reads: ``text``, ``image`` or ``audio``.
        part: the path of the part of the model that is measured; empty for all of it.
        equal_lengths: whether padding would change what it computes, so that a batch holds one length only.
        class_tokens: how many tokens stand before the patches of an image.
        maps: whether a hidden state is a map of features over an image, as in convolutional networks.
    """

    stacks: tuple[Stack, ...]
    kind: str = "text"
    part: str = ""
    equal_lengths: bool = False
    class_tokens: int = 0
    maps: bool = False

    @property
    def has_attention(self) -> bool:
        return any(stack.attention for stack in self.stacks)


def _stack(attention: dict | None = None, **row) -> Stack:
    return Stack(attention=attention and Attention(**attention), **row)


def _layout(stacks: list[dict], **settings) -> Layout:
    return Layout(tuple(_stack(**row) for row in stacks), **settings)


MODEL_LAYOUTS = entries("architectures.yml", _layout)


def layout_for(name: str, config: PreTrainedConfig) -> Layout:
    """The layout of an architecture; ``name`` is the model's, for the error.

    Raises:
        AnalysisError: models of this architecture are not measured.
    """
    if config.model_type not in MODEL_LAYOUTS:
        raise AnalysisError(
            f"{name} is a {config.model_type} model, which is not measured: give one of {', '.join(MODEL_LAYOUTS)}"
        )
    return MODEL_LAYOUTS[config.model_type]


def refuse_too_large(name: str, settings: Mapping[str, object]) -> None:
    """Refuse sizes of a configuration that would take minutes, and all memory, before it is known what they make."""
    for setting, value in settings.items():
        for part, most in MOST.items():
            if part in setting and isinstance(value, int | float) and value > most:
                raise AnalysisError(f"{name}: {setting} is {value}: give {most} or fewer")


def is_encoder_alone(config: PreTrainedConfig) -> bool:
    """Whether these are the sizes of the encoder of an encoder-decoder, such as a ``T5EncoderModel``."""
    return any(architecture.endswith("EncoderModel") for architecture in config.architectures or ())
