"""Where a model keeps its blocks, its attention and its keys, and the architectures that cannot say
so themselves.

These are the entries of ``data/architectures.yml``; ``layouts`` finds what all others show.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES

from analysis_lib.errors import AnalysisError
from analysis_lib.files import entries

# The name that most models give the function that rotates queries and keys.
ROTATION = "apply_rotary_pos_emb"
# Those whose texts are padded to their length, with nothing that masks the padding: so they were
# trained, and so their documentation says that they are to be used.
PADDED_TEXTS = frozenset({"siglip_text_model", "siglip2_text_model"})
# By a part of the name of a setting, its largest value.
MOST = {"layers": 10_000, "num_labels": 1_000_000}


@dataclass(frozen=True)
class Attention:
    """Self-attention inside a block.

    Attributes:
        module: its path below the block.
        key: the path, below that module, of what projects keys; what it reads is the attention
            input. None where that is not known.
        fused: how one projection holds more than keys: ``stacked`` (all queries, then all keys,
            then all values), ``by_head`` (the queries that share a key, that key and its value side
            by side), ``before_values`` (all keys, then all values), or None where keys have their
            own.
        key_norm: the path of the norm that keys go through before they are rotated.
        heads_first: whether that norm reads heads before tokens.
        rotary: how many dimensions of a key each angle that the module is given stands for; 0 where
            keys are not rotated.
        centred: whether that norm takes the mean off, as a LayerNorm does, and not the root mean
            square alone.
        norm_last: whether keys are rotated before that norm.
        rotation: the function that rotates them, in the source of the module.
        tokens_first: whether that function reads tokens before heads.
        latent: of latent attention, the paths of the norm and of the projection that make the first
            dimensions of all keys from the first numbers that ``key`` gives. The others are one key
            that all heads share, for their further dimensions.
        tiled: how many times the heads of keys are repeated, all of them each time.
        factor: the attribute of the module by which keys are multiplied last.
        query: the path of the query projection. Set only where the module does not call the
            attention interface, as are the next four.
        value: the path of the value projection.
        weights: the path of the dropout that the attention weights pass through.
        heads: the attribute that holds the number of heads.
        seen: the argument, added to scores, or else the attribute, that says which keys a query
            sees if not all.
        own: whether the module computes attention by itself, which is known by its softmax.
    """

    module: str
    key: str | None
    fused: str | None = None
    key_norm: str | None = None
    heads_first: bool = False
    rotary: int = 1
    centred: bool = False
    norm_last: bool = False
    rotation: str = ROTATION
    tokens_first: bool = False
    latent: tuple[str, str] | None = None
    tiled: int = 1
    factor: str | None = None
    query: str | None = None
    value: str | None = None
    weights: str | None = None
    heads: str = "num_attention_heads"
    seen: str | None = None
    own: bool = False

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
        tokens: what its vectors stand for: ``text``, ``shifted`` (a decoder's text), ``patches``,
            ``frames``, ``windows`` (a sound padded with silence), or CANINE's ``molecules`` and
            MANTa's ``blocks``.
        amended: the path of a module that changes the output of the first block before the second
            reads it, where the model has one.
        each: the attention of each block, where they differ, as in hybrids.
        cross: the attention of each block to another stack, whose outputs its keys are made from.
        further: the further attentions of each block to its own tokens, in order, where it has
            several.
        padded: whether the model pads its vectors behind those of its tokens, which its hidden
            states leave out.
        tokens_first: whether its blocks read and give token x utterance x width.
        unused: the paths of blocks that are not run, such as those that read an image beside a
            text.
    """

    blocks: str
    attention: Attention | None = None
    name: str = "blocks"
    tokens: str = "text"
    amended: str | None = None
    each: tuple[Attention | None, ...] = ()
    cross: Attention | None = None
    further: tuple[Attention, ...] = ()
    padded: bool = False
    tokens_first: bool = False
    unused: tuple[str, ...] = ()

    def holds(self, path: str) -> bool:
        """Whether a path is that of one of its blocks."""
        pattern = re.escape(self.blocks).replace(r"\*", r"\d+")
        return path not in self.unused and re.fullmatch(pattern, path) is not None

    def attention_of(self, index: int) -> Attention | None:
        """Attention of block ``index``, counted from 0."""
        return self.each[index] if self.each else self.attention


@dataclass(frozen=True)
class Layout:
    """One architecture.

    Attributes:
        stacks: in the order in which they run.
        kind: what it reads: ``text``, ``image`` or ``audio``.
        part: the path of the part of the model that is measured; empty for all of it.
        equal_lengths: whether padding would change what it computes, so that a batch holds one
            length only.
        class_tokens: how many tokens stand before the patches of an image.
        maps: whether a hidden state is a map of features over an image, as in convolutional
            networks.
        uncaptured: the paths of modules whose attention is not captured.
        listed: whether an entry says so; else the model did, by what it does with an example.
    """

    stacks: tuple[Stack, ...]
    kind: str = "text"
    part: str = ""
    equal_lengths: bool = False
    class_tokens: int = 0
    maps: bool = False
    uncaptured: tuple[str, ...] = ()
    listed: bool = True

    @property
    def reads_texts_too(self) -> bool:
        """Whether a decoder reads the text of a sound."""
        return self.kind == "audio" and any(stack.tokens == "shifted" for stack in self.stacks)

    @property
    def has_attention(self) -> bool:
        return any(stack.attention for stack in self.stacks)


def _layout(stacks: list[dict], **settings) -> Layout:
    return Layout(tuple(_stack(**row) for row in stacks), **settings)


def _stack(**row) -> Stack:
    for name in {"attention", "cross"} & {*row}:
        row[name] = Attention(**row[name])
    return Stack(**row)


MODEL_LAYOUTS = entries("architectures.yml", _layout)


def listed_layout(model_type: str, part: str = "") -> Layout | None:
    """The entry of an architecture, or of a part of it that is read with the rest."""
    return MODEL_LAYOUTS.get(f"{model_type}@{part}") or MODEL_LAYOUTS.get(model_type)


def expected_layout(model_type: str) -> Layout:
    """Layout assumed before loading; unlisted types are taken to have attention and no feature
    maps.
    """
    if listed := MODEL_LAYOUTS.get(model_type):
        return listed
    kind = "image" if model_type in MODEL_FOR_IMAGE_MAPPING_NAMES else "text"
    return Layout((Stack("*", Attention("*", None)),), kind, listed=False)


def refuse_too_large(name: str, settings: Mapping[str, object]) -> None:
    """Refuse sizes of a configuration that would take minutes, and all memory, before it is known
    what they make.
    """
    for setting, value in settings.items():
        for part, most in MOST.items():
            if part in setting and isinstance(value, int | float) and value > most:
                raise AnalysisError(f"{name}: {setting} is {value}: give {most} or fewer")


def is_encoder_alone(config: PreTrainedConfig) -> bool:
    """Whether these are the sizes of the encoder of an encoder-decoder, such as a
    ``T5EncoderModel``.
    """
    return any(architecture.endswith("EncoderModel") for architecture in config.architectures or ())
