"""One forward pass, and what passes through the blocks of a model on the way.

transformers lets a program register an attention function that every model on its attention interface calls
with the queries, keys and values after the split into heads and after any rotation. The one registered here hands
them to the capture that is under way, if any. The few architectures that keep their own attention are reached by
hooks on their projections. Hidden states come from forward hooks on the blocks. Nothing is kept: a layer's
activations are received while the pass goes on, and let go.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from analysis_lib.capture.attention import AttentionRows, Scores, Visibility, attend_with_rows
from analysis_lib.capture.inputs import Batch, Tokens, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.models.loading import LoadedModel
from analysis_lib.models.parts import Attention, Stack

IMPLEMENTATION = "analysis_lib"
# What a metric can ask for.
SPACES = ("hidden", "attention_input", "query", "key", "value")
WEIGHTS = "weights"
SCORES = "scores"
# Arguments of an attention function that change its scores in ways that are not accounted for here.
NOT_ACCOUNTED_FOR = ("softcap", "s_aux")


@dataclass(eq=False)
class Activations:
    """What one layer did with one batch.

    Attributes:
        layer: 0 for the input of the first block, l for block l; a second stack numbers on.
        stack: the stack that the layer belongs to.
        part: the path of the block below the model; empty for a layer that is no block's output.
        tokens: what the queries stand for, and the hidden vectors but for those of a map of features.
        spaces: the vectors asked for, of ``SPACES``: ``hidden`` is the output of the layer, the others belong to its
            attention, which reads ``attention_input``: what its projection of keys is given. Hidden vectors have one
            "head".
        rows: the attention rows, where a metric asked for ``weights``.
        scores: what the scores are made of, where a metric asked for ``scores``.
        attended: whether the layer's attention was seen.
    """

    layer: int
    stack: str
    part: str
    tokens: Tokens
    spaces: dict[str, Vectors] = field(default_factory=dict)
    rows: AttentionRows | None = None
    scores: Scores | None = None
    attended: bool = False


Receive = Callable[[Activations], None]


# --- What the tokens of a stack are ---------------------------------------------------------------


def _molecules(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """CANINE's deep encoder reads [CLS], then a vector of every four characters or so."""
    return unpadded(batch.groups, count, 1, batch.special_tokens)


def _blocks(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """MANTa's encoder reads as many blocks as it finds in a text, and says so in its attention mask."""
    tokens = unpadded(batch.groups, count, 0, batch.special_tokens)
    if args[1] is not None:
        tokens.mask = args[1][:, 0].any(1).expand(len(batch.groups), -1)
    return tokens


def _patches(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    return unpadded(batch.groups, count, loaded.layout.class_tokens, batch.special_tokens)


def _windows(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """Whisper pads a sound with silence to its window; a vector is there for two hops of the spectrogram."""
    tokens = unpadded(batch.groups, count)
    ends = -(-batch.lengths // (2 * loaded.processor.hop_length))
    tokens.silent = torch.arange(count, device=ends.device) >= ends.unsqueeze(1)
    return tokens


TOKEN_RULES: dict[str, Callable[[LoadedModel, Batch, int, tuple], Tokens]] = {
    "text": lambda _, batch, *__: batch.tokens,
    "shifted": lambda _, batch, *__: batch.shifted,
    "molecules": _molecules,
    "blocks": _blocks,
    "patches": _patches,
    "frames": lambda _, batch, count, __: unpadded(batch.groups, count),
    "windows": _windows,
}


# --- A pass under way -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Attending:
    """What has been seen of one run of an attention module."""

    arguments: dict[str, object] = field(default_factory=dict)
    key_input: Tensor | None = None
    normalised: Tensor | None = None
    projected: dict[str, Tensor] = field(default_factory=dict)


class _Capture:
    """A forward pass under way: collects a layer's activations and hands them on when its block is done."""

    def __init__(self, loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive, maps: str):
        self.loaded = loaded
        self.batch = batch
        self.needs = needs
        self.receive = receive
        self.maps = maps
        self.layer = -1
        self.begun: set[str] = set()
        self.pending: Activations | None = None
        self.previous: Vectors | None = None
        self.missed: list[str] = []
        self.attending = _Attending()
        self.windows: list[Window] = []
        self.tokens: dict[tuple[str, int], Tokens] = {}
        self.visibilities: dict[tuple, tuple[Tensor | None, Visibility, Tensor | None]] = {}
        # The attention modules whose scores are measured: not those that look from a decoder to an encoder.
        self.own: dict[nn.Module, Attention] = {}
        # First blocks whose output another module changes before the second reads it.
        self.amended: set[nn.Module] = set()

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Put the hooks on; every handle has to be removed."""
        names = {module: name for name, module in self.loaded.model.named_modules()}
        for stack, blocks in self.loaded.stacks.items():
            for block in blocks:
                # Before each block, not only the first: blocks of shared weights run in any order.
                yield block.register_forward_pre_hook(partial(self._before, stack, names[block]), with_kwargs=True)
                yield block.register_forward_hook(partial(self._after, stack), with_kwargs=True)
                if stack.attention is not None:
                    yield from self._attention_hooks(stack.attention, block)
            for module, name in names.items():
                if name == stack.amended:
                    self.amended.add(blocks[0])
                    yield module.register_forward_hook(partial(self._after, stack), with_kwargs=True)

    def _attention_hooks(self, spec: Attention, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        module = block.get_submodule(spec.module)
        self.own[module] = spec
        yield module.register_forward_pre_hook(self._attention_begins, with_kwargs=True)
        yield module.get_submodule(spec.key).register_forward_hook(partial(self._projected, "key"))
        if spec.key_norm:
            yield module.get_submodule(spec.key_norm).register_forward_hook(self._normalised)
        if spec.hooked:
            for space in ("query", "value"):
                if (path := getattr(spec, space)) is not None:
                    yield module.get_submodule(path).register_forward_hook(partial(self._projected, space))
            hook = partial(self._weighted, module, spec)
            yield module.get_submodule(spec.weights).register_forward_pre_hook(hook)

    # Blocks

    def _before(self, stack: Stack, name: str, _block: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else next(kwargs[k] for k in ("hidden_states", "hidden_state") if k in kwargs)
        if stack.name not in self.begun:
            self.begun.add(stack.name)
            self._begin(stack, "", hidden, args)
            self._hand_on(stack, hidden, args)
        self._begin(stack, name, hidden, args)

    def _begin(self, stack: Stack, name: str, hidden: Tensor, args: tuple) -> None:
        self.layer += 1
        self.pending = Activations(self.layer, stack.name, name, self._tokens(stack, hidden, args))

    def _after(self, stack: Stack, module: nn.Module, args: tuple, _kwargs: dict, output: Tensor | tuple) -> None:
        if module in self.amended:
            return  # The second block reads what comes next.
        self._hand_on(stack, output[0] if isinstance(output, tuple) else output, args)

    def _tokens(self, stack: Stack, hidden: Tensor, args: tuple) -> Tokens:
        if self.loaded.layout.maps:
            # A map's attention, where it has one, reads it position by position.
            count = hidden.shape[1] if hidden.dim() == 3 else hidden[0, 0].numel()
            return self._unpadded(count, count - args[1] * args[2] if hidden.dim() == 3 else 0)
        key = (stack.name, hidden.shape[1])
        if key not in self.tokens:
            self.tokens[key] = TOKEN_RULES[stack.tokens](self.loaded, self.batch, hidden.shape[1], args)
        return self.tokens[key]

    def _unpadded(self, count: int, class_tokens: int = 0) -> Tokens:
        key = ("unpadded", count, class_tokens)
        if key not in self.tokens:
            self.tokens[key] = unpadded(self.batch.groups, count, class_tokens, self.batch.special_tokens)
        return self.tokens[key]

    def _hand_on(self, stack: Stack, hidden: Tensor, args: tuple) -> None:
        expected = stack.attention is not None and self.pending.part
        if expected and not self.pending.attended:
            self.missed.append(self.pending.part)
        tokens = self.pending.tokens
        if self.loaded.layout.maps:
            # The vectors of a map are not the tokens of its attention.
            hidden, tokens = self._map_vectors(hidden, args)
        if "hidden" in self.needs:
            self.pending.spaces["hidden"] = self._vectors(hidden, tokens)
        self.receive(self.pending)

    def _map_vectors(self, hidden: Tensor, args: tuple) -> tuple[Tensor, Tokens]:
        """The vectors of a map of features, as sequences: one an image or one a position."""
        if hidden.dim() == 3:
            # A sequence of positions, after a class token in some stages: that is no position.
            positions = hidden[:, hidden.shape[1] - args[1] * args[2] :]
        else:
            positions = hidden.flatten(2).transpose(1, 2)
        vectors = positions if self.maps == "positions" else positions.flatten(1).unsqueeze(1)
        return vectors, self._unpadded(vectors.shape[1])

    def _vectors(self, values: Tensor, tokens: Tokens) -> Vectors:
        # The attention of a block after a norm reads its input as it is: its sums need no second computation.
        known = self.previous
        if known is None or known.tokens is not tokens or known.values.data_ptr() != values.data_ptr():
            self.previous = Vectors(values.unsqueeze(1), tokens)
        return self.previous

    # Attention

    def _attention_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self.attending = _Attending({**arguments, **arguments.pop("kwargs", {})})

    def _projected(self, space: str, _module: nn.Module, args: tuple, output: Tensor) -> None:
        # The first time only: DeBERTa may project its relative positions with the same weights.
        if space not in self.attending.projected:
            self.attending.projected[space] = output
            if space == "key":
                self.attending.key_input = args[0]

    def _normalised(self, norm: nn.Module, args: tuple, _output: Tensor) -> None:
        self.attending.normalised = args[0]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        scaling: float,
    ) -> Float[Tensor, "utterance head token value_dim"]:
        """Attention of a module on the interface: what it computes, and what is captured of it."""
        spec = self.own[module]
        visibility, mask = self._visibility(mask, query.shape[2], key.shape[2])
        self._take(query, key, value, visibility.keys)
        if SCORES in self.needs:
            position = None if bias is None else bias / scaling
            self.pending.scores = self._scores(module, spec, query, key.shape[1], visibility, position)
        groups = query.shape[1] // key.shape[1]
        key, value = (values.repeat_interleave(groups, 1) if groups > 1 else values for values in (key, value))
        if WEIGHTS not in self.needs:
            return functional.scaled_dot_product_attention(query, key, value, _joined(mask, bias), scale=scaling)
        tokens, keys = self.pending.tokens, visibility.keys
        indicators = keys.type_masks.to(query.dtype)
        output, entropy, mass = attend_with_rows(query, key, value, mask, scaling, indicators, tokens.counted, bias)
        self.pending.rows = AttentionRows(entropy, mass, visibility.seen, visibility.pairs)
        return output

    def _take(self, query: Tensor, key: Tensor, value: Tensor, keys: Tokens) -> None:
        """The spaces of a layer's attention, of what is needed."""
        spaces = self.pending.spaces
        for name, values in (("query", query), ("key", key), ("value", value)):
            if name in self.needs:
                spaces[name] = Vectors(values, self.pending.tokens if name == "query" else keys)
        if "attention_input" in self.needs:
            spaces["attention_input"] = self._vectors(self.attending.key_input, keys)
        self.pending.attended = True

    def _visibility(self, mask: Tensor | None, queries: int, keys: int) -> tuple[Visibility, Tensor | None]:
        """Who sees whom, and a mask without empty rows, worked out once for a mask that all layers share."""
        key = (id(mask), id(self.pending.tokens), keys)
        if key not in self.visibilities:
            # A padded query of a local layer may see no key at all, and a softmax of nothing is no number.
            filled = None if mask is None else mask | ~mask.any(-1, keepdim=True)
            # The mask is kept with them: its id is its own only as long as it lives.
            self.visibilities[key] = (mask, self._look(mask, queries, keys), filled)
        return self.visibilities[key][1:]

    def _look(self, mask: Tensor | None, queries: int, keys: int) -> Visibility:
        tokens = self.pending.tokens
        seen = tokens if keys == queries else self._unpadded(keys)
        if mask is None or (mask & tokens.mask[:, None, :, None] == _padding(tokens, seen)).all():
            return Visibility(tokens, seen)
        if queries == keys and (mask & tokens.mask[:, None, :, None] == _padding(tokens, seen).tril()).all():
            return Visibility(tokens, seen, causal=True)
        return Visibility(tokens, seen, seen_by=mask[:, 0].expand(len(tokens.mask), -1, -1).float())

    def _scores(
        self,
        module: nn.Module,
        spec: Attention,
        query: Tensor,
        key_heads: int,
        visibility: Visibility,
        position: Tensor | None,
        position_query: Tensor | None = None,
    ) -> Scores:
        weight, bias = key_projection(module, spec, key_heads)
        groups = query.shape[1] // key_heads
        weight = weight.repeat_interleave(groups, 0)
        bias = None if bias is None else bias.repeat_interleave(groups, 0)
        back = self._back(module, spec, groups, visibility.keys.mask.shape[1])
        inputs = self._vectors(self.attending.key_input, visibility.keys)
        return Scores(query, inputs, weight, bias, visibility, back, position, position_query)

    def _back(self, module: nn.Module, spec: Attention, groups: int, keys: int) -> Callable[[Tensor], Tensor] | None:
        """What carries vectors from a finished key back to its projection: the reverse of rotation and norm."""
        steps = []
        if (rotation := self.attending.arguments.get("position_embeddings")) is not None:
            cos, sin = rotation
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            # A rotation by −θ is the transpose of that by θ, scaled alike where the model scales it.
            steps.append(lambda vectors: rotate(vectors, vectors, cos, -sin)[0])
        if spec.key_norm:
            norm, raw = module.get_submodule(spec.key_norm), self.attending.normalised
            scale = raw.square().mean(-1, keepdim=True).add(norm.variance_epsilon).rsqrt() * norm.weight
            scale = scale.transpose(1, 2).repeat_interleave(groups, 1)
            steps.append(lambda vectors: vectors * scale)
        if not steps:
            return None

        def back(vectors: Tensor) -> Tensor:
            vectors = vectors.expand(-1, -1, keys, -1)
            for step in steps:
                vectors = step(vectors)
            return vectors

        return back

    # Attention that is reached by hooks

    def _weighted(self, module: nn.Module, spec: Attention, _dropout: nn.Module, args: tuple) -> None:
        """The weights of a module with an attention of its own, as its dropout gets them; by then all else is seen."""
        heads = getattr(module, spec.heads)
        projected = _split(module, spec, self.attending.projected, heads)
        weights = args[0].view(*projected[0].shape[:3], -1)
        self.windows.append((*projected, self.attending.key_input, weights))
        if sum(window[0].shape[2] for window in self.windows) < self.pending.tokens.mask.shape[1]:
            return  # CANINE's local attention runs window by window.
        windows, self.windows = self.windows, []
        if len(windows) == 1:
            query, key, value, self.attending.key_input, weights = windows[0]
            keys = self._reduced(query.shape[2], key.shape[2])
            visibility, rows = Visibility(self.pending.tokens, keys), [(weights, keys.type_masks)]
        else:
            joined, visibility, rows = _joined_windows(windows, self.pending.tokens)
            query, key, value, self.attending.key_input = joined
        self._take(query, key, value, visibility.keys)
        if SCORES in self.needs:
            position, position_query = _position_terms(module, self.attending.arguments, query, self.pending.tokens)
            self.pending.scores = self._scores(module, spec, query, heads, visibility, position, position_query)
        if WEIGHTS in self.needs:
            self.pending.rows = _rows_of_weights(rows, visibility)

    def _reduced(self, queries: int, keys: int) -> Tokens:
        if queries == keys:
            return self.pending.tokens
        class_tokens = int((self.pending.tokens.types[0] == 0).sum())
        return self._unpadded(keys, class_tokens)


Window = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _joined_windows(
    windows: list[Window], tokens: Tokens
) -> tuple[tuple[Tensor, ...], Visibility, list[tuple[Tensor, Tensor]]]:
    """CANINE's local attention as one: the queries of each window see the keys of that window."""
    sizes = [window[0].shape[2] for window in windows]
    queries, keys, values, inputs, weights = zip(*windows, strict=True)
    local = torch.block_diag(*(torch.ones(size, size, device=tokens.mask.device) for size in sizes))
    visibility = Visibility(tokens, tokens, seen_by=local.expand(len(tokens.mask), -1, -1))
    joined = (*(torch.cat(parts, 2) for parts in (queries, keys, values)), torch.cat(inputs, 1))
    return joined, visibility, list(zip(weights, tokens.type_masks.split(sizes, 2), strict=True))


def _rows_of_weights(rows: list[tuple[Tensor, Tensor]], visibility: Visibility) -> AttentionRows:
    """What is kept of formed weights; ``rows`` are those of a window of queries, with the type masks of its keys."""
    entropy = torch.cat([torch.special.entr(weights).sum(-1) for weights, _ in rows], 2)
    mass = torch.cat([w @ masks.to(w.dtype).transpose(1, 2).unsqueeze(1) for w, masks in rows], 2)
    queries = visibility.queries.counted.to(mass.dtype)[:, None, None]
    return AttentionRows(entropy, (queries @ mass).squeeze(2), visibility.seen, visibility.pairs)


def _padding(queries: Tokens, keys: Tokens) -> Tensor:
    return queries.mask[:, None, :, None] & keys.mask[:, None, None, :]


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def key_projection(
    module: nn.Module, spec: Attention, heads: int
) -> tuple[Float[Tensor, "head head_dim width"], Float[Tensor, "head head_dim"] | None]:
    """W_K and b_K (or None) of each head of keys: k = W_K x + b_K, before any rotation or norm."""
    projection = module.get_submodule(spec.key)
    weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight
    parts = [weight] if projection.bias is None else [weight, projection.bias.unsqueeze(-1)]
    if spec.fused == "by_head":
        parts = [part.view(heads, 3, -1, part.shape[-1])[:, 1] for part in parts]
    elif spec.fused == "stacked":
        parts = [part.chunk(3)[1].reshape(heads, -1, part.shape[-1]) for part in parts]
    else:
        parts = [part.view(heads, -1, part.shape[-1]) for part in parts]
    return parts[0], parts[1].squeeze(-1) if len(parts) > 1 else None


def _split(module: nn.Module, spec: Attention, projected: dict[str, Tensor], heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values by head, from the outputs of their projections."""
    if spec.fused:
        parts = projected["key"].unflatten(-1, (heads, 3, -1)).unbind(-2)
        # DeBERTa adds the biases of queries and values after its one projection, and has none for keys.
        bias = (module.q_bias, 0, module.v_bias)
        parts = [p + (b if isinstance(b, int) else b.view(heads, -1)) for p, b in zip(parts, bias, strict=True)]
    else:
        parts = [projected[space].unflatten(-1, (heads, -1)) for space in ("query", "key", "value")]
    return tuple(part.transpose(1, 2) for part in parts)


def _position_terms(
    module: nn.Module, arguments: dict[str, object], query: Tensor, tokens: Tokens
) -> tuple[Tensor | None, Tensor | None]:
    """What a score owes to positions: a bias per pair, and the vectors that positions put in the query's place.

    Both before scaling: MPNet adds its bias to scaled scores; DeBERTa's terms are scaled as its scores are.
    """
    if arguments.get("position_bias") is not None:
        return arguments["position_bias"] * query.shape[-1] ** 0.5, None
    if arguments.get("rel_embeddings") is not None:
        return _disentangled(module, arguments, query, tokens)
    return None, None


def _disentangled(
    module: nn.Module, arguments: dict[str, object], query: Tensor, tokens: Tokens
) -> tuple[Tensor | None, Tensor | None]:
    """DeBERTa's content-to-position scores q_m · r^K(m − n), and Σ_m r^Q(n − m), which meets the key's content."""
    count, relative = query.shape[2], arguments["relative_pos"]
    embeddings = arguments["rel_embeddings"]
    if hasattr(module, "pos_ebd_size"):
        span = module.pos_ebd_size
        embeddings = embeddings[: 2 * span]
        names = ("key_proj", "query_proj") if module.share_att_key else ("pos_key_proj", "pos_query_proj")
    else:
        span = min(count, module.max_relative_positions)
        embeddings = embeddings[module.max_relative_positions - span : module.max_relative_positions + span]
        names = ("pos_proj", "pos_q_proj")
    relative = relative.reshape(-1, count, count)[0].long()
    heads = query.shape[1]
    # 2 span x heads x head_dim -> head, distance, head_dim
    by_distance = {
        kind: getattr(module, name)(embeddings).unflatten(-1, (heads, -1)).transpose(0, 1)
        for kind, name in zip(("c2p", "p2c"), names, strict=True)
        if kind in module.pos_att_type
    }
    position = position_query = None
    if "c2p" in by_distance:
        index = (relative + span).clamp(0, 2 * span - 1)
        position = (query @ by_distance["c2p"].transpose(1, 2)).gather(-1, index.expand(*query.shape[:2], -1, -1))
    if "p2c" in by_distance:
        # Row n: the distance at which each query m meets key n. How often each distance occurs is enough.
        index = (-relative + span).clamp(0, 2 * span - 1).expand(len(query), -1, -1)
        occurs = query.new_zeros(len(query), count, 2 * span)
        occurs.scatter_add_(2, index, tokens.counted.to(query.dtype).unsqueeze(1).expand(-1, count, -1))
        position_query = occurs.unsqueeze(1) @ by_distance["p2c"]
    return position, position_query


# --- The attention function -----------------------------------------------------------------------


@runtime_checkable
class Attends(Protocol):
    """Who computes the attention of some modules, in place of the plain function.

    Attributes:
        own: the modules.
    """

    own: Collection[nn.Module]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        scaling: float,
    ) -> Tensor:
        """The attention output, head by head; the arguments are those of ``attend_with_rows``."""


_under_way: ContextVar[Attends | None] = ContextVar("_under_way", default=None)


@contextmanager
def attended_by(other: Attends) -> Iterator[None]:
    """Inside it, modules that are ``other``'s own and run with ``IMPLEMENTATION`` leave their attention to it."""
    token = _under_way.set(other)
    try:
        yield
    finally:
        _under_way.reset(token)


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention module."""
    unknown = sorted(name for name in NOT_ACCOUNTED_FOR if kwargs.get(name) is not None)
    if unknown:
        raise AnalysisError(f"{type(module).__name__} adds {', '.join(unknown)} to its scores, which is not measured")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if scaling == 1 != getattr(module, "scaling", 1):
        # Whisper scales its queries first: what is measured is a query before scaling, as everywhere.
        scaling = module.scaling
        query = query / scaling
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    capture = _under_way.get()
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if capture is not None and module in capture.own:
        output = capture.attend(module, query, key, value, mask, bias, scaling)
    else:
        grouped = query.shape[1] != key.shape[1]
        output = functional.scaled_dot_product_attention(
            query, key, value, _joined(mask, bias), dropout, scale=scaling, enable_gqa=grouped
        )
    return output.transpose(1, 2).contiguous(), None


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which pairs are allowed, and what is added to their scores: models hand both over as one or apart."""
    if mask is not None and mask.dtype != torch.bool:
        # Masked pairs hold the lowest number there is, or −∞; BEiT's biases come this way too.
        allowed = mask > torch.finfo(mask.dtype).min / 2
        added = None if (mask[allowed.expand_as(mask)] == 0).all() else torch.where(allowed, mask, 0)
        bias = added if bias is None else bias if added is None else bias + added
        mask = None if allowed.all() else allowed
    if mask is not None and mask.shape[1] != 1:
        raise AnalysisError("this model masks each attention head in its own way, which is not measured")
    # T5 hands over a bias of zeros in the layers that have none.
    return mask, bias


def _whole_mask(*args, **kwargs) -> Tensor | None:
    """transformers' mask for fused attention, spelt out where it is causal: what is not said cannot be captured."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(IMPLEMENTATION, _attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, _whole_mask)


# --- A pass ---------------------------------------------------------------------------------------


def run(loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive, maps: str = "flatten") -> None:
    """One forward pass of a batch; ``receive`` gets the :class:`Activations` of layer 0, 1, ... as they come.

    Args:
        needs: which of ``SPACES``, ``weights`` and ``scores`` to capture.
        maps: ``flatten`` or ``positions``, see ``inputs.Settings``.

    Raises:
        AnalysisError: the attention of some block was not seen.
    """
    _check(loaded, batch)
    _run(loaded, batch, needs, receive, maps)


def _run(loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive, maps: str = "flatten") -> Tensor:
    capture = _Capture(loaded, batch, needs, receive, maps)
    with loaded.lock, torch.inference_mode(), _precision(loaded), _capturing(capture):
        output = loaded.model(**batch.inputs).last_hidden_state
    if capture.missed:
        blocks = sum(len(blocks) for blocks in loaded.stacks.values())
        raise AnalysisError(
            f"{loaded.name}: attention was captured in {blocks - len(set(capture.missed))} of {blocks} layers: "
            f"this model does not call transformers' attention interface in {capture.missed[0]}"
        )
    return output


class _DoublePrecision(TorchFunctionMode):
    """Inside it nothing falls back to single precision, as transformers lets some norms, rotations and masks do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _precision(loaded: LoadedModel) -> AbstractContextManager:
    return _DoublePrecision() if loaded.model.dtype == torch.float64 else nullcontext()


@contextmanager
def _capturing(capture: _Capture) -> Iterator[None]:
    loaded = capture.loaded
    before = loaded.model.config._attn_implementation
    on_interface = any(stack.attention and not stack.attention.hooked for stack in loaded.stacks)
    hooks = []
    try:
        hooks.extend(capture.hooks())
        if on_interface:
            loaded.model.set_attn_implementation(IMPLEMENTATION)
        with attended_by(capture):
            yield
    finally:
        if on_interface:
            loaded.model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def _check(loaded: LoadedModel, batch: Batch) -> None:
    """Once a model: the captured forward pass gives the same hidden states as the plain one.

    Raises:
        AnalysisError: it does not, so that nothing measured could be trusted.
    """
    if getattr(loaded, "_checked", False):
        return
    few = batch.head(2)
    captured = _run(loaded, few, frozenset({*SPACES, WEIGHTS, SCORES}), lambda _: None)
    with torch.inference_mode(), _precision(loaded):
        plain = loaded.model(**few.inputs).last_hidden_state
    if not torch.isfinite(plain).all():
        return  # The measurement that follows stops at the layer where this begins, and names it.
    difference = (captured - plain).abs()
    last = few.shifted or few.tokens
    if last is not None and difference.dim() == 3 and difference.shape[1] == last.mask.shape[1]:
        difference = difference * last.mask.unsqueeze(-1)
    if not difference.max().item() <= 1e-4 * max(1.0, plain.abs().max().item()):
        raise AnalysisError(
            f"{loaded.name}: the captured forward pass differs from the plain one by {difference.max().item():.1e}: "
            f"this architecture's attention is not captured exactly"
        )
    loaded._checked = True
