"""Capture of attention that calls transformers' attention interface.

Every model on that interface calls the function registered here with queries, keys and values after
the split into heads and after any rotation. The function lets the code that called
:func:`attended_by` compute the output.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from analysis_lib.capture import masks
from analysis_lib.capture.activations import (
    BLOCKS,
    LOGITS,
    OF_ATTENTION,
    SCORES,
    UNROTATED,
    WEIGHTS,
    Activations,
    CurrentLayer,
    Receive,
)
from analysis_lib.capture.attention_rows import AttentionWeights, Softmax, attend, lowest_score
from analysis_lib.capture.interventions import SIDES
from analysis_lib.capture.masks import LongMask
from analysis_lib.capture.projections import ProjectionHooks, score_sums
from analysis_lib.capture.tokens import Tokens, Visibility
from analysis_lib.capture.vectors import wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models.calls import angles_of
from analysis_lib.models.factors import AttentionSeen, OwnAttention
from analysis_lib.models.parts import Attention
from analysis_lib.models.rotations import rotated, unrotated

# Name under which the attention function is registered.
IMPLEMENTATION = "analysis_lib"
# Function that computes the output of attention by head, from module, query, key, value, mask, bias
# and scaling.
Attend = Callable[..., Tensor]
_under_way: ContextVar[tuple[Collection[nn.Module], Attend | None, Collection[int]]] = ContextVar(
    "_under_way", default=((), None, ())
)


@contextmanager
def attended_by(
    modules: Collection[nn.Module], attend: Attend, eager: Collection[int] = ()
) -> Iterator[None]:
    """Let ``attend`` compute the attention of modules that run with ``IMPLEMENTATION``.

    Args:
        eager: the ids of the configurations of parts that attend eagerly otherwise.
    """
    token = _under_way.set((modules, attend, eager))
    try:
        yield
    finally:
        _under_way.reset(token)


@dataclass(eq=False)
class InterfaceAttention:
    """Captures the attention of modules that call the interface.

    Attributes:
        receive: receives the activations of the attentions in ``beside``.
        own: the modules whose attention is measured.
        windows: queries, keys and values of the windows of an image that the current module has
            attended in so far.
        beside: the modules that are not the first self-attention of a block, with the number of
            their layer and the name of their stack.
    """

    layer: CurrentLayer
    projections: ProjectionHooks
    receive: Receive
    own: dict[nn.Module, Attention] = field(default_factory=dict)
    windows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    beside: dict[nn.Module, tuple[int, str]] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *given: Tensor | float | None,
    ) -> Float[Tensor, "utterance head token value_dim"]:
        """The output of a module's attention; activations that the metrics need are captured.

        Args:
            given: the further arguments of :meth:`_captured`.
        """
        beside = self.beside.get(module)
        layer = self.layer
        if beside is None:
            if (space := self.projections.gathering) is not None:
                self.projections.sides[space] = (
                    {"query": query, "key": key, "value": value}[space],
                    self.projections.call,
                )
                return query.new_zeros(*query.shape[:3], value.shape[-1])
            if query.shape[2] < layer.activations.tokens.mask.shape[1] and mask is None:
                return self._window(module, query, key, value, *given)
            changed = self._changed(module, query, key, value, mask)
            return self._captured(module, *changed, *given)
        block = layer.activations
        number, stack = beside
        tokens = block.tokens.on(query.device)
        layer.activations = Activations(number, stack, block.part, tokens)
        try:
            output = self._captured(module, query, key, value, mask, *given)
            self.receive(layer.activations)
        finally:
            layer.activations = block
        return output

    def _window(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *given: object
    ) -> Tensor:
        """The output of a window of an image, in which a module attends apart from the others.

        With the last window, all of them are captured as one attention, in which each query sees
        the keys of its window.

        Raises:
            AnalysisError: an intervention changes this attention.
        """
        layer = self.layer
        number = layer.activations.layer
        sites = *SIDES, *SIDES.values(), *UNROTATED, "weights"
        if any((site, number) in layer.changes for site in sites):
            raise AnalysisError(
                f"the attention of layer {number} is computed in windows of an image, which no "
                "intervention changes: name other layers or another site"
            )
        self.windows.append((query, key, value))
        queries, keys, values = (torch.cat(part, 2) for part in zip(*self.windows, strict=True))
        if queries.shape[2] < layer.activations.tokens.mask.shape[1]:
            bias, scaling, *_ = given
            return _fused(query, key, value, bias, scaling)
        sizes = torch.tensor([window.shape[2] for window, *_ in self.windows], device=query.device)
        self.windows = []
        numbers = torch.arange(len(sizes), device=query.device).repeat_interleave(sizes)

        def rows(some: slice) -> Tensor:
            return (numbers[some, None] == numbers)[None, None]

        shape = 1, 1, len(numbers), len(numbers)
        mask = masks.made(shape, query.device, rows)
        output = self._captured(module, queries, keys, values, mask, *given)
        return output[:, :, -query.shape[2] :]

    def attach(self, module: nn.Module, seen: AttentionSeen) -> Iterator[RemovableHandle]:
        """Attach the hooks of a module with its own attention; the caller removes the handles."""

        def begin(*_: object) -> None:
            seen.begin(lambda attention: self._attend_in_place(module, attention))

        yield module.register_forward_pre_hook(begin)
        yield module.register_forward_hook(lambda *_: seen.end(), always_call=True)

    def _attend_in_place(self, module: nn.Module, attention: OwnAttention) -> Tensor | None:
        """The output of attention that a module computes by itself; None to leave it as it is."""
        layer = self.layer
        if not layer.needs & OF_ATTENTION and not layer.changes.reads:
            return None
        if attention.query.shape[2] != layer.activations.tokens.mask.shape[1]:
            # Only some of the tokens, as in a long text that is read by blocks.
            return None
        _refuse_masks_of_heads(attention.mask)
        query, scaling = _unscaled(module, attention.query, attention.scaling)
        return self.attend(
            module,
            query,
            attention.key,
            attention.value,
            attention.mask,
            attention.bias,
            scaling,
        )

    def _changed(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and mask of attention, after interventions."""
        layer = self.layer
        sides = self.projections.sides
        changed = []
        keys = layer.tokens_of(key.shape[2])
        for space, values in (("query", query), ("key", key), ("value", value)):
            if space in sides:
                values, call = sides[space]
                if space == "key":
                    arguments = self.projections.call.arguments
                    self.projections.call = replace(call, arguments=arguments)
            tokens = None if space == "query" else keys
            values = self._changed_before_rotation(module, space, values, tokens)
            changed.append(layer.changed(space, values, tokens))
        hidden = layer.changes.masked(layer.activations.layer, keys.on(query.device))
        if hidden is not None:
            mask = _without(hidden, mask, query.shape[2])
        return (*changed, mask)

    def _changed_before_rotation(
        self, module: nn.Module, space: str, values: Tensor, tokens: Tokens | None
    ) -> Tensor:
        """Queries or keys after interventions on their vectors before rotation."""
        layer = self.layer
        site = f"{space}_unrotated"
        rotation = self.own[module].rotates
        if rotation is None or (site, layer.activations.layer) not in layer.changes:
            return values
        vectors = wide(values)
        turn = layer.turn(rotation, angles_of(self.projections.call.arguments), vectors)
        before = unrotated(vectors, turn, rotation)
        # What does not change keeps its bits.
        change = layer.changed(site, before, tokens) - before
        return values + rotated(change, turn, rotation).to(values.dtype)

    def _captured(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        layer = self.layer
        call = self.projections.call
        dtype = query.dtype
        visibility, mask = layer.visibility(mask, query, key)
        # The fused kernel computes as the model does, in its precision, and is fastest on the given
        # layout (tokens before heads); everything else wants single precision, and heads first.
        fused = partial(_fused, query, key, value, scaling=scaling)
        if bias is None:
            fused = partial(fused, mask, visibility=visibility)
        else:
            fused = partial(fused, _joined(mask, bias.to(dtype)))
            bias = wide(bias)
        query, key, value = (wide(values).contiguous() for values in (query, key, value))
        angles = angles_of(call.arguments)
        rotation = self.own[module].rotates
        layer.take(query, key, value, call.key_input, visibility, rotation, angles)
        if SCORES in layer.needs:
            position = None if bias is None else bias / scaling
            inputs = layer.vectors(call.key_input, visibility.keys)
            layer.activations.scores = score_sums(
                module,
                self.own[module],
                call,
                query,
                key.shape[1],
                inputs,
                visibility,
                position,
            )
        plain = softcap is None and sinks is None
        if plain and not layer.needs & {WEIGHTS, BLOCKS, LOGITS}:
            return fused()
        shared_by = query.shape[1] // key.shape[1]
        if shared_by > 1:
            key = key.repeat_interleave(shared_by, 1)
            value = value.repeat_interleave(shared_by, 1)
        sinks = None if sinks is None else wide(sinks)
        # Layers share masks.
        if mask is not None and visibility.hidden is None:
            visibility.hidden = masks.changed(mask, torch.logical_not)
        softmax = Softmax(
            query,
            key,
            scaling,
            bias,
            visibility.hidden,
            visibility.causal,
            softcap,
            sinks,
            visibility.bands,
        )
        has_sink = sinks is not None
        attention = AttentionWeights(
            visibility,
            query.shape[1],
            softmax.blocks,
            logits=softmax.logits,
            has_sink=has_sink,
        )
        layer.activations.attention = attention
        if plain and WEIGHTS not in layer.needs:
            return fused()
        indicators = visibility.keys.type_masks.to(query.dtype)
        output, attention.entropy, attention.mass = attend(softmax, value, indicators)
        return output.to(dtype)


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every attention module."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    query, scaling = _unscaled(module, query, scaling)
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    modules, attend, eager = _under_way.get()
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    # Without a mask, eager attention hides nothing.
    causal = causal and id(getattr(module, "config", None)) not in eager
    if attention_mask is None and causal and query.shape[2] > 1:
        mask = masks.causal(query.shape[2], key.shape[2], query.device)
    if module in modules:
        output = attend(module, query, key, value, mask, bias, scaling, softcap, s_aux)
    elif softcap is not None or s_aux is not None:
        output = _unmeasured(query, key, value, mask, bias, scaling, softcap, s_aux)
    else:
        output = _fused(query, key, value, _joined(mask, bias), scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def _without(
    hidden: Bool[Tensor, "utterance key"], mask: Tensor | None, queries: int
) -> Bool[Tensor, "utterance 1 query key"]:
    """A mask without some keys, but for queries that would see none."""
    hidden = hidden[:, None, None, :]
    utterances, _, _, keys = hidden.shape

    def rows(some: slice) -> Tensor:
        if mask is None:
            count = some.stop - some.start
            allowed = torch.ones_like(hidden).expand(-1, -1, count, -1)
        else:
            allowed = masks.rows_of(mask, some)
        left = allowed & ~hidden
        return torch.where(left.any(-1, keepdim=True), left, allowed)

    return masks.made((utterances, 1, queries, keys), hidden.device, rows)


def _unscaled(module: nn.Module, query: Tensor, scaling: float) -> tuple[Tensor, float]:
    """Queries before scaling, and the factor of the scores; Whisper scales queries beforehand."""
    own = getattr(module, "scaling", 1)
    if scaling == 1 != own:
        return query / own, own
    return query, scaling


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    visibility: Visibility | None = None,
    dropout: float = 0,
) -> Tensor:
    """The output of attention from the fused kernel of PyTorch.

    Args:
        visibility: what is known of the mask.
    """
    attend = partial(
        functional.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if visibility is not None and visibility.plain and visibility.causal:
        return attend(query, key, value, is_causal=True)
    if not isinstance(mask, LongMask):
        return attend(query, key, value, mask)
    bands = masks.bands(mask.shape, mask.device) if visibility is None else visibility.bands
    outputs = []
    for band in bands:
        rows = mask.rows(band.queries)[..., band.keys]
        seen = key[:, :, band.keys], value[:, :, band.keys]
        outputs.append(attend(query[:, :, band.queries], *seen, rows))
    return torch.cat(outputs, 2)


def _unmeasured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores or sinks, without capture; the fused kernel has neither."""
    shared_by = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared_by, 1) for part in (key, value))
    no_types = query.new_zeros(len(query), 0, key.shape[2])
    hidden = None if mask is None else masks.changed(mask, torch.logical_not)
    shape = len(query), 1, query.shape[2], key.shape[2]
    bands = masks.bands(shape, query.device)
    softmax = Softmax(query, key, scaling, bias, hidden, softcap=softcap, sinks=sinks, bands=bands)
    return attend(softmax, value, no_types)[0]


def _mask_and_bias(
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The visible pairs, and the bias of their scores; some models pass both in one tensor.

    Raises:
        AnalysisError: each head has a mask of its own.
    """
    if mask is not None and mask.dtype != torch.bool:
        # Hidden pairs hold the lowest finite number or −∞; BEiT passes its biases in this tensor,
        # too.
        allowed = mask > torch.finfo(mask.dtype).min / 2
        added = (
            None if (mask[allowed.expand_as(mask)] == 0).all() else torch.where(allowed, mask, 0)
        )
        bias = added if bias is None else bias if added is None else bias + added
        mask = None if allowed.all() else allowed
    _refuse_masks_of_heads(mask)
    return mask, bias


def _refuse_masks_of_heads(mask: Tensor | None) -> None:
    if mask is not None and mask.shape[1] != 1:
        raise AnalysisError(
            "this model has a mask for each attention head, which is not measured: give another "
            "model"
        )


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Mask and bias in one tensor, as the fused kernel takes them."""
    if mask is None or bias is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, lowest_score(bias.dtype))


def _explicit_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, **kwargs
) -> Tensor | None:
    """transformers' mask for fused attention, always as a tensor, but of long texts by rows.

    Visibility cannot be read from a causal mask that is left implicit.
    """
    kwargs["allow_is_causal_skip"] = False

    def rows(queries: slice) -> Tensor | None:
        count, offset = queries.stop - queries.start, q_offset + queries.start
        return sdpa_mask(batch_size, count, kv_length, offset, **kwargs)

    shape, device = (batch_size, 1, q_length, kv_length), torch.device(kwargs["device"])
    if not masks.is_long(shape, device):
        return rows(slice(0, q_length))
    # Without padding, attention in both directions has no mask.
    if rows(slice(0, 1)) is None:
        return None
    return LongMask(shape, device, rows)


AttentionInterface.register(IMPLEMENTATION, _attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, _explicit_mask)
