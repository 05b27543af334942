"""Where each architecture keeps its blocks, its attention and its keys: one row per model type, no class per model.

Almost all of them call transformers' attention interface, and need no more than the paths of their blocks and of
the module that projects keys. The few that do not are reached by hooks on their projections.
"""

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from analysis_lib.errors import AnalysisError


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
        name: what the stack is called where a model has several.
        blocks: their path below the model; ``*`` stands for an index.
        attention: None where blocks have none.
        tokens: what its vectors stand for; ``capture`` has a rule for each.
        amended: the path of a module that changes the output of the first block before the second reads it, where
            the model has one.
    """

    name: str
    blocks: str
    attention: Attention | None
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


def _one(blocks: str, attention: Attention | None, tokens: str = "text", **settings) -> Layout:
    return Layout((Stack("blocks", blocks, attention, tokens),), **settings)


def _vision(blocks: str, **settings) -> Layout:
    return _one(blocks, Attention("attention", "k_proj"), "patches", kind="image", **settings)


def _maps(blocks: str, attention: Attention | None = None) -> Layout:
    return _one(blocks, attention, "patches", kind="image", maps=True)


def _encoder_decoder(blocks: str, tokens: str) -> Layout:
    """As in T5; ``blocks`` and ``tokens`` are those of the encoder."""
    attention = Attention("layer.0.SelfAttention", "k")
    return Layout(
        (Stack("encoder", blocks, attention, tokens), Stack("decoder", "decoder.block.*", attention, "shifted"))
    )


_BERT = _one("encoder.layer.*", Attention("attention.self", "key"))
_LLAMA = _one("layers.*", Attention("self_attn", "k_proj"))
_T5 = _encoder_decoder("encoder.block.*", "text")
_CANINE_ATTENTION = Attention("attention.self", "key", query="query", value="value", weights="dropout")
_SPEECH = _one("encoder.layers.*", Attention("attention", "k_proj"), "frames", kind="audio", equal_lengths=True)
_DINO = _vision("encoder.layer.*", class_tokens=1)

MODEL_LAYOUTS: dict[str, Layout] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": _one("transformer.layer.*", Attention("attention", "k_lin")),
    "albert": _one("encoder.albert_layer_groups.*.albert_layers.*", Attention("attention", "key")),
    "mpnet": _one("encoder.layer.*", Attention("attention.attn", "k", query="q", value="v", weights="dropout")),
    "deberta": _one("encoder.layer.*", Attention("attention.self", "in_proj", fused="by_head", weights="dropout")),
    "deberta-v2": Layout(
        (
            Stack(
                "blocks",
                "encoder.layer.*",
                Attention("attention.self", "key_proj", query="query_proj", value="value_proj", weights="dropout"),
                amended="encoder.conv",
            ),
        )
    ),
    "modernbert": _one("layers.*", Attention("attn", "Wqkv", fused="stacked")),
    "gpt2": _one("h.*", Attention("attn", "c_attn", fused="stacked")),
    "gpt_neox": _one("layers.*", Attention("attention", "query_key_value", fused="by_head")),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _one("layers.*", Attention("self_attn", "k_proj", key_norm="k_norm")),
    "t5": _T5,
    "mt5": _T5,
    "canine": Layout(
        (
            Stack("initial", "initial_char_encoder.layer.*", _CANINE_ATTENTION),
            Stack("deep", "encoder.layer.*", _CANINE_ATTENTION, "molecules"),
            Stack("final", "final_char_encoder.layer.*", _CANINE_ATTENTION),
        ),
        equal_lengths=True,
    ),
    "character_bert": _BERT,
    "manta": _encoder_decoder("encoder.t5_encoder.block.*", "blocks"),
    "self_attention": _one("layers.*", Attention("attention", "key")),
    "wav2vec2": _SPEECH,
    "hubert": _SPEECH,
    "whisper": _one(
        "layers.*", Attention("self_attn", "k_proj"), "windows", kind="audio", part="encoder", equal_lengths=True
    ),
    "vit": _vision("layers.*", class_tokens=1),
    "beit": _vision("layers.*", class_tokens=1),
    "deit": _vision("layers.*", class_tokens=2),
    "dinov2": _DINO,
    "dinov2_with_registers": _DINO,
    "segformer": _vision("stages.*.blocks.*"),
    "resnet": _maps("encoder.stages.*.layers.*"),
    "efficientnet": _maps("encoder.blocks.*"),
    "efficientnet_lite": _maps("_blocks.*"),
    "convnext": _maps("encoder.stages.*.layers.*"),
    "convnextv2": _maps("encoder.stages.*.layers.*"),
    "van": _maps("encoder.stages.*.layers.*"),
    "cvt": _maps(
        "encoder.stages.*.layers.*",
        Attention(
            "attention.attention",
            "projection_key",
            query="projection_query",
            value="projection_value",
            weights="dropout",
            heads="num_heads",
        ),
    ),
}


def layout_for(name: str, config: PreTrainedConfig) -> Layout:
    """The layout of an architecture; ``name`` is the model's, for the error.

    Raises:
        AnalysisError: models of this architecture are not measured.
    """
    if config.model_type not in MODEL_LAYOUTS:
        raise AnalysisError(
            f"{name} is a {config.model_type} model, which is not measured: give one of {', '.join(MODEL_LAYOUTS)}"
        )
    layout = MODEL_LAYOUTS[config.model_type]
    return replace(layout, stacks=layout.stacks[:1]) if is_encoder_alone(config) else layout


def is_encoder_alone(config: PreTrainedConfig) -> bool:
    """Whether these are the sizes of the encoder of an encoder-decoder, such as a ``T5EncoderModel``."""
    return any(architecture.endswith("EncoderModel") for architecture in config.architectures or ())
