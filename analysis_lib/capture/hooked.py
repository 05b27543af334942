"""Attention that does not call transformers' interface, captured by hooks: DeBERTa, CANINE, CvT ...

Hooks on the projections see queries, keys and values; a hook on the dropout of the attention
weights sees the weights. MPNet and BLOOM belong here, too. :func:`_position_terms` computes the
terms that these models add to q·k. CANINE's local attention runs window by window; the windows are
captured as one attention over all tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from analysis_lib.capture import masks
from analysis_lib.capture.activations import BLOCKS, SCORES, WEIGHTS, CurrentLayer
from analysis_lib.capture.attention_rows import AttentionWeights, Block
from analysis_lib.capture.projections import ProjectionHooks, projected_by_head, score_sums
from analysis_lib.capture.score_sums import PositionQuery
from analysis_lib.capture.tokens import Tokens, Visibility
from analysis_lib.capture.vectors import wide
from analysis_lib.models.parts import Attention


@dataclass(eq=False)
class HookedAttention:
    """Captures the attention of modules that do not call the interface."""

    layer: CurrentLayer
    projections: ProjectionHooks
    windows: list["Window"] = field(default_factory=list)

    def attach(self, module: nn.Module, spec: Attention) -> RemovableHandle:
        """Attach the hook on the attention weights of a module; the caller removes the handle."""
        dropout = module.get_submodule(spec.weights)
        return dropout.register_forward_pre_hook(partial(self._capture, module, spec))

    def _capture(
        self,
        module: nn.Module,
        spec: Attention,
        _dropout: nn.Module,
        args: tuple,
    ) -> None:
        """Capture an attention when its weights enter dropout.

        By then, the hooks on projections have seen queries, keys and values.
        """
        layer = self.layer
        call = self.projections.call
        heads = getattr(module, spec.heads)
        query, key, value = projected_by_head(module, spec, call.projected, heads)
        weights = wide(args[0]).view(*query.shape[:3], -1)
        window = Window(query, key, value, call.key_input, weights)
        self.windows.append(window)
        tokens = layer.activations.tokens.on(query.device)
        captured = sum(window.query.shape[2] for window in self.windows)
        if captured < tokens.mask.shape[1]:
            return  # CANINE's local attention has more windows to come.
        windows = self.windows
        self.windows = []
        query, key, value, key_input = joined(windows)
        keys = tokens
        if key.shape[2] != query.shape[2]:  # CvT reduces the map that keys are projected from.
            is_cls = tokens.types[0] == tokens.type_names.index("cls")
            leading = ["cls"] * int(is_cls.sum())
            keys = layer.unpadded(key.shape[2], leading).on(key.device)
        if spec.seen is None:
            visibility = visibility_of_windows(windows, tokens, keys)
        else:
            seen = _seen(module, spec.seen, call.arguments, query.shape[2])
            visibility, _ = layer.visibility(seen, query, key)
        layer.take(query, key, value, key_input, visibility)
        if SCORES in layer.needs:
            position, position_query = _position_terms(module, call.arguments, query)
            inputs = layer.vectors(key_input, visibility.keys)
            layer.activations.scores = score_sums(
                module,
                spec,
                call,
                query,
                heads,
                inputs,
                visibility,
                position,
                position_query,
            )
        if layer.needs & {WEIGHTS, BLOCKS}:
            layer.activations.attention = attention_of_windows(windows, visibility)


def _seen(
    module: nn.Module,
    name: str,
    arguments: dict[str, object],
    count: int,
) -> Tensor:
    """The pairs that are visible.

    They come from a mask in the arguments of the call, additive with low values at hidden pairs, or
    else from an attribute of the module.
    """
    mask = arguments.get(name)
    if mask is not None:
        return mask > torch.finfo(mask.dtype).min / 2
    mask = getattr(module, name)
    return mask[..., :count, :count].bool()


def _position_terms(
    module: nn.Module,
    arguments: dict[str, object],
    query: Tensor,
) -> tuple[Tensor | None, PositionQuery | None]:
    """``position`` and ``position_query`` of :class:`ScoreSums`, before scaling."""
    utterances, heads, count, head_dim = query.shape
    if arguments.get("position_bias") is not None:
        # MPNet adds its bias after scaling by 1/√head_dim.
        bias = wide(arguments["position_bias"])
        return bias * head_dim**0.5, None
    if arguments.get("alibi") is not None:
        # BLOOM, too, adds its bias after scaling; it is the same for all queries of a key.
        bias = wide(arguments["alibi"]).view(utterances, heads, 1, -1)
        bias = bias * head_dim**0.5
        return bias.expand(-1, -1, count, -1), None
    if arguments.get("rel_embeddings") is not None:
        return disentangled_terms(module, arguments, query)
    return None, None


def disentangled_terms(
    module: nn.Module,
    arguments: dict[str, object],
    query: Float[Tensor, "utterance head token head_dim"],
) -> tuple[Float[Tensor, "utterance head token token"] | None, PositionQuery | None]:
    """DeBERTa's scores between contents and relative positions, before scaling (He et al. 2021).

    They are added to q_m · k_n in its disentangled attention.

    Args:
        module: the attention module of DeBERTa or DeBERTa-v2.
        arguments: the arguments of its call, by name.

    Returns:
        The content-to-position score of each pair, q_m · r^K(m − n); and a function that gives, for
        each key n, Σ_m r^Q(n − m) over the counted queries m: the position-to-content score of a
        pair is r^Q(n − m) · k_n. None for a term that the model lacks.
    """
    count = query.shape[2]
    relative = arguments["relative_pos"]
    embeddings = arguments["rel_embeddings"]
    if hasattr(module, "pos_ebd_size"):
        span = module.pos_ebd_size
        embeddings = embeddings[: 2 * span]
        names = (
            ("key_proj", "query_proj")
            if module.share_att_key
            else ("pos_key_proj", "pos_query_proj")
        )
    else:
        span = min(count, module.max_relative_positions)
        embeddings = embeddings[
            module.max_relative_positions - span : module.max_relative_positions + span
        ]
        names = ("pos_proj", "pos_q_proj")
    relative = relative.reshape(-1, count, count)[0].long()
    heads = query.shape[1]
    # Each has shape head x distance x head_dim, for 2 span distances.
    by_distance = {}
    for kind, name in zip(("c2p", "p2c"), names, strict=True):
        if kind in module.pos_att_type:
            projection = getattr(module, name)
            projected = wide(projection(embeddings))
            by_distance[kind] = projected.unflatten(-1, (heads, -1)).transpose(0, 1)
    position = position_query = None
    if "c2p" in by_distance:
        index = (relative + span).clamp(0, 2 * span - 1)
        index = index.expand(len(query), heads, -1, -1)
        scores = query @ by_distance["c2p"].transpose(1, 2)
        position = scores.gather(-1, index)
    if "p2c" in by_distance:
        # Row n holds the distance at which each query m meets key n: counting how often each
        # distance occurs is enough.
        index = (-relative + span).clamp(0, 2 * span - 1)
        index = index.expand(len(query), -1, -1)

        def position_query(tokens: Tokens) -> Tensor:
            counted = tokens.counted.to(query.dtype).unsqueeze(1)
            occurs = query.new_zeros(len(query), count, 2 * span)
            occurs.scatter_add_(2, index, counted.expand(-1, count, -1))
            return occurs.unsqueeze(1) @ by_distance["p2c"]

    return position, position_query


class Window(NamedTuple):
    """Inputs and weights of one run of an attention module, over all tokens or a window of them."""

    query: Float[Tensor, "utterance head token head_dim"]
    key: Float[Tensor, "utterance head key head_dim"]
    value: Float[Tensor, "utterance head key value_dim"]
    key_input: Float[Tensor, "utterance key width"]
    weights: Float[Tensor, "utterance head token key"]


def joined(windows: list[Window]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and key inputs of all windows, in token order."""
    if len(windows) == 1:
        window = windows[0]
        return window.query, window.key, window.value, window.key_input
    query = torch.cat([window.query for window in windows], 2)
    key = torch.cat([window.key for window in windows], 2)
    value = torch.cat([window.value for window in windows], 2)
    key_input = torch.cat([window.key_input for window in windows], 1)
    return query, key, value, key_input


def visibility_of_windows(
    windows: list[Window],
    queries: Tokens,
    keys: Tokens,
) -> Visibility:
    """Visibility of windows: each query sees the keys of its own window."""
    if len(windows) == 1:
        return Visibility(queries, keys)
    device = queries.mask.device
    sizes = torch.tensor([window.weights.shape[2:] for window in windows], device=device)
    numbers = torch.arange(len(windows), device=device)
    of_queries, of_keys = (numbers.repeat_interleave(size) for size in sizes.unbind(1))

    def rows(some: slice) -> Tensor:
        return (of_queries[some, None] == of_keys)[None, None]

    shape = len(queries.mask), 1, len(of_queries), len(of_keys)
    return Visibility(queries, keys, seen_by=masks.made(shape, device, rows))


def attention_of_windows(windows: list[Window], visibility: Visibility) -> AttentionWeights:
    """Attention weights of all windows as one attention."""
    entropies = []
    masses = []
    key_counts = [window.weights.shape[3] for window in windows]
    type_masks = visibility.keys.type_masks.split(key_counts, 2)
    for window, of_types in zip(windows, type_masks, strict=True):
        weights = window.weights
        entropy = torch.special.entr(weights).sum(-1)
        entropies.append(entropy)
        indicators = of_types.to(weights.dtype).transpose(1, 2)
        masses.append(weights @ indicators.unsqueeze(1))
    return AttentionWeights(
        visibility,
        windows[0].weights.shape[1],
        partial(_blocks_of_windows, windows, sum(key_counts)),
        torch.cat(entropies, 2),
        torch.cat(masses, 2),
    )


def _blocks_of_windows(
    windows: list[Window],
    key_count: int,
) -> Iterator[Block]:
    first_query = first_key = 0
    for window in windows:
        utterances, heads, queries, keys = window.weights.shape
        next_query = first_query + queries
        part = slice(utterances), slice(heads), slice(first_query, next_query)
        yield Block(part, key_count, window.weights, first_key=first_key)
        first_query = next_query
        first_key += keys
