"""The parts of a model: its blocks, their attention and their keys.

``data/architectures.yml`` lists the architectures whose parts a trace cannot find; ``layouts``
finds those of all others.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES

from analysis_lib.errors import AnalysisError
from analysis_lib.files import entries

# Function that rotates queries and keys in most models.
ROTATION = "apply_rotary_pos_emb"
# Models whose texts are padded to the model's length without masking the padding: they were trained
# in this way, and their documentation asks for it.
PADDED_TEXTS = frozenset({"siglip_text_model", "siglip2_text_model"})
# Largest value of a setting, by a part of its name.
MOST = {"layers": 10_000, "num_labels": 1_000_000}


@dataclass(frozen=True)
class Rotation:
    """How attention rotates queries and keys: it turns pairs of dimensions by angles.

    Attributes:
        pairs: the number of pairs.
        first: the first dimension that is rotated; the others stay as they are.
        interleaved: whether neighbouring dimensions are a pair, unlike dimensions that lie half of
            the rotated width apart.
        angles: the layout of the angles that the module is called with: ``halves`` (of all pairs,
            twice), ``neighbours`` (each twice) or ``once``.
        backwards: whether it turns the second dimension of a pair towards the first.
    """

    pairs: int
    first: int = 0
    interleaved: bool = False
    angles: str = "halves"
    backwards: bool = False


@dataclass(frozen=True)
class Attention:
    """Self-attention inside a block.

    Attributes:
        module: its path below the block.
        key: the path, below that module, of the projection of keys; its input is the attention
            input. None if it is not known.
        fused: the layout of a projection that gives more than keys: ``stacked`` (all queries, then
            all keys, then all values), ``by_head`` (the queries that share a key, that key and its
            value side by side), ``before_values`` (all keys, then all values), or None if keys have
            a projection of their own.
        key_norm: the path of the norm of keys.
        heads_first: whether that norm reads heads before tokens.
        rotary: the number of dimensions of a key for each angle passed to the module; 0 if keys are
            not rotated.
        centred: whether that norm subtracts the mean, as a LayerNorm does, unlike a
            root-mean-square norm.
        norm_last: whether keys are rotated before that norm.
        rotation: the function that rotates them, in the source of the module.
        tokens_first: whether that function reads tokens before heads.
        latent: in latent attention, the paths of the norm and of the projection that make the first
            dimensions of all keys from the first outputs of ``key``. The other outputs are one key
            that all heads share, for the further dimensions.
        tiled: the number of times that the heads of keys are repeated as a whole.
        factor: the attribute of the module by which keys are multiplied last.
        query: the path of the query projection. It and the next four are set only if the module
            does not call the attention interface.
        value: the path of the value projection.
        weights: the path of the dropout that the attention weights pass through.
        heads: the attribute that holds the number of heads.
        seen: the argument that is added to scores to hide keys, or else the attribute that marks
            visible keys; None if queries see all keys.
        own: whether the module computes attention by itself, which shows in its softmax.
        rotates: how queries and keys are rotated; None if they are not, or if it was not shown.
        may_rotate: whether they may be rotated in a way that was not shown.
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
    rotates: Rotation | None = None
    may_rotate: bool = False

    @property
    def hooked(self) -> bool:
        """Whether its attention is captured by hooks, not by the attention interface."""
        return self.weights is not None


@dataclass(frozen=True)
class Stack:
    """Blocks that follow one another.

    Attributes:
        blocks: their path below the model; ``*`` stands for an index.
        attention: the attention of the blocks; None if they have none.
        name: the name of the stack in a model with several.
        tokens: the kind of tokens behind its vectors: ``text``, ``shifted`` (a decoder's text),
            ``patches``, ``frames``, ``windows`` (a sound padded with silence), ``before`` and
            ``after`` (a text, with an image before or after it), ``queries`` (that read an image),
            or CANINE's ``molecules`` and MANTa's ``blocks``.
        amended: the path of a module that changes the output of the first block before the second
            one reads it, if there is one.
        each: the attention of each block if blocks differ, as in hybrids.
        cross: the cross-attention of each block, whose keys are made from the output of another
            stack.
        further: the further self-attentions of each block, in order, if it has several.
        padded: whether the model pads its vectors after those of its tokens, which its hidden
            states leave out.
        tokens_first: whether its blocks read and return token x utterance x width.
        unused: the paths of blocks that do not run, such as those that read an image beside a text.
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
    """The layout of one architecture.

    Attributes:
        stacks: its stacks, in the order in which they run.
        kind: the kind of input: ``text``, ``image`` or ``audio``.
        part: the path of the part of the model that is measured; empty for all of it.
        equal_lengths: whether padding would change what it computes, so that a batch must hold
            items of one length.
        class_tokens: the number of tokens before the patches of an image.
        maps: whether a hidden state is a feature map of an image, as in convolutional networks.
        uncaptured: the paths of modules whose attention is not captured.
        listed: whether the layout is an entry of the list; otherwise it was found by a trace.
        embeddings: the outputs of a model with two towers that compare an image or a sound with a
            text, by name: the vector of the one and that of the other.
    """

    stacks: tuple[Stack, ...]
    kind: str = "text"
    part: str = ""
    equal_lengths: bool = False
    class_tokens: int = 0
    maps: bool = False
    uncaptured: tuple[str, ...] = ()
    listed: bool = True
    embeddings: tuple[str, ...] = ()

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
    """The listed layout of an architecture, or of a part of it that is read with the rest."""
    return MODEL_LAYOUTS.get(f"{model_type}@{part}") or MODEL_LAYOUTS.get(model_type)


def expected_layout(model_type: str) -> Layout:
    """Layout assumed before loading.

    Unlisted types are taken to have attention and no feature maps.
    """
    if listed := MODEL_LAYOUTS.get(model_type):
        return listed
    kind = "image" if model_type in MODEL_FOR_IMAGE_MAPPING_NAMES else "text"
    return Layout((Stack("*", Attention("*", None)),), kind, listed=False)


def refuse_too_large(name: str, settings: Mapping[str, object]) -> None:
    """Raise an AnalysisError for sizes in a configuration that would take all time and memory."""
    for setting, value in settings.items():
        for part, most in MOST.items():
            if part in setting and isinstance(value, int | float) and value > most:
                raise AnalysisError(f"{name}: {setting} is {value}: give {most} or fewer")


def reads_padding(config: PreTrainedConfig) -> bool:
    """Whether a model of texts was trained on padded ones, and attends to the padding."""
    return config.model_type in PADDED_TEXTS


def is_encoder_alone(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of an encoder alone, such as a ``T5EncoderModel``."""
    return any(architecture.endswith("EncoderModel") for architecture in config.architectures or ())
