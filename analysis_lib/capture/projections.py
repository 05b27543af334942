"""Projections of attention modules: hooks on them, weights of keys, and the way back through them.

Keys reach the attention interface after all steps. Hooks on the projection see its input, and hooks
on the norm see keys before it. Modules that do not call the interface have hooks on all their
projections.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from analysis_lib.capture.activations import CurrentLayer
from analysis_lib.capture.interventions import SIDES
from analysis_lib.capture.memory import is_out_of_memory
from analysis_lib.capture.score_sums import PositionQuery, ScoreSums
from analysis_lib.capture.tokens import Visibility
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models.calls import (
    angles_of,
    arguments_of,
    call_with_first,
    first_of_call,
    first_vectors,
)
from analysis_lib.models.devices import in_place, unpacked
from analysis_lib.models.keys import rotated, split_keys
from analysis_lib.models.parts import Attention

# Modules that compute exactly y = W x + b.
PLAIN = (nn.Linear, Conv1D)
# Length of the vectors that probe other projections for their weights; a power of two is exact.
UNIT = 256.0


class NotLinear(AnalysisError):
    """Keys that are not a linear function of their input."""


@dataclass(eq=False)
class AttentionCall:
    """Inputs and outputs that the hooks have seen in one call of an attention module.

    Attributes:
        arguments: the arguments of the call, by name.
        projected: the output of the projection of ``query``, ``key`` and ``value``, where there is
            a hook on it.
        key_input: the input of the projection of keys, x_n.
        normalised: the input and the output of the norm of keys, if there is one.
        latent: the input of the norm of latent keys, and that of the projection after it.
    """

    arguments: dict[str, object] = field(default_factory=dict)
    projected: dict[str, Tensor] = field(default_factory=dict)
    key_input: Tensor | None = None
    normalised: tuple[Tensor, Tensor] | None = None
    latent: tuple[Tensor, ...] = ()


class ProjectionHooks:
    """Hooks on attention modules and their projections.

    ``call`` is the latest call that they have seen. Where only queries, keys or values are to be
    made from a changed input, the module first runs on that input; ``sides`` keeps the query, key
    or value that it passes to the attention interface, to replace the original one in the main run.
    """

    def __init__(self, layer: CurrentLayer) -> None:
        self.layer = layer
        self.call = AttentionCall()
        self.sides: dict[str, tuple[Tensor, AttentionCall]] = {}
        self.gathering: str | None = None

    def attach(
        self, module: nn.Module, spec: Attention, changing: bool = True
    ) -> Iterator[RemovableHandle]:
        """Attach the hooks of an attention module; the caller removes the handles.

        Args:
            changing: whether the interventions of the layer apply to this module.
        """
        yield module.register_forward_pre_hook(
            partial(self._begin, spec, changing), with_kwargs=True
        )
        if spec.key is None:
            return
        # Before and after all other hooks of the module.
        yield module.get_submodule(spec.key).register_forward_pre_hook(
            partial(self._read, spec), prepend=True
        )
        yield module.get_submodule(spec.key).register_forward_hook(partial(self._project, "key"))
        if spec.key_norm:
            yield module.get_submodule(spec.key_norm).register_forward_hook(self._normalise)
        for path in spec.latent or ():
            yield module.get_submodule(path).register_forward_pre_hook(self._pass_on)
        if spec.latent:
            yield module.get_submodule(spec.latent[1]).register_forward_hook(
                partial(self._project, "up")
            )
        if spec.hooked:
            for space in ("query", "value"):
                if (path := getattr(spec, space)) is not None:
                    yield module.get_submodule(path).register_forward_pre_hook(
                        partial(self._side, f"{space}_side")
                    )
                    yield module.get_submodule(path).register_forward_hook(
                        partial(self._project, space)
                    )

    def _begin(
        self, spec: Attention, changing: bool, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        changed = None
        self.sides = {}
        layer = self.layer
        number = self.layer.activations.layer
        if changing and ("attention_input", number) in layer.changes:
            args, kwargs = changed = call_with_first(
                args, kwargs, layer.changed("attention_input", first_of_call(args, kwargs))
            )
        for side, self.gathering in SIDES.items() if changing and not spec.hooked else ():
            if (side, number) in layer.changes:
                other = call_with_first(
                    args, kwargs, layer.changed(side, first_of_call(args, kwargs))
                )
                self.call = AttentionCall(arguments_of(module, *other))
                # ``forward`` bypasses the hooks of the module, not those of its projections.
                module.forward(*other[0], **other[1])
        self.gathering = None
        self.call = AttentionCall(arguments_of(module, args, kwargs))
        return changed

    def _read(self, spec: Attention, module: nn.Module, args: tuple) -> tuple | None:
        # Only the first call: DeBERTa may project its relative positions with the same weights.
        if "key" in self.call.projected:
            return None
        changed = self._side("key_side", module, args) if spec.hooked and not spec.fused else None
        read = (changed or args)[0]
        # The tokens of one image may come without an axis of images.
        self.call.key_input = read.unsqueeze(0) if read.dim() == 2 else read
        return changed

    def _side(self, side: str, _module: nn.Module, args: tuple) -> tuple | None:
        # Only the first call, as for keys.
        new = SIDES[side] not in self.call.projected
        if new and (side, self.layer.activations.layer) in self.layer.changes:
            return (self.layer.changed(side, args[0]), *args[1:])
        return None

    def _project(
        self, space: str, _module: nn.Module, _args: tuple, output: Tensor | tuple
    ) -> None:
        # I-BERT's projections also return the scale of their quantised numbers.
        self.call.projected.setdefault(space, wide(first_vectors(output)))

    def _normalise(self, _norm: nn.Module, args: tuple, output: Tensor) -> None:
        self.call.normalised = args[0], output

    def _pass_on(self, _module: nn.Module, args: tuple) -> None:
        self.call.latent += (args[0],)


def key_projection(
    projection: nn.Module,
    fused: str | None,
    heads: int,
    key_heads: int,
    inputs: Tensor | None = None,
    outputs: Tensor | None = None,
) -> tuple[Float[Tensor, "head head_dim width"], Float[Tensor, "head head_dim"] | None]:
    """W_K and b_K (or None) of each head of keys: k = W_K x + b_K, before any norm or rotation.

    Args:
        projection: the projection of keys.
        fused: how it holds the heads of keys, see :class:`~analysis_lib.models.parts.Attention`.
        heads: the number of heads of queries.
        key_heads: the number of heads of keys.
        inputs: an input of the projection, for one whose weights only its outputs reveal.
        outputs: the output for ``inputs``.
    """
    if is_plain(projection):
        weight, bias = _weights(projection)
    else:
        weight, bias = _applied(projection, inputs, outputs)
    of_heads = split_keys(wide(weight).T, fused, heads, key_heads).permute(1, 2, 0)
    return of_heads, None if bias is None else split_keys(wide(bias), fused, heads, key_heads)


def is_plain(projection: nn.Module) -> bool:
    """Whether a projection is its weight and bias alone, without adapter, hook or quantisation."""
    hooks = (*projection._forward_hooks.values(), *projection._forward_pre_hooks.values())
    owners = (getattr(getattr(hook, "func", hook), "__self__", None) for hook in hooks)
    replaced = "forward" in vars(projection) and not hasattr(projection, "_hf_hook")
    if type(projection) not in PLAIN or unpacked(projection.weight) is not projection.weight:
        return False
    return not replaced and all(isinstance(owner, ProjectionHooks) for owner in owners)


def _weights(
    projection: nn.Module,
) -> tuple[Float[Tensor, "output width"], Float[Tensor, " output"] | None]:
    with in_place(projection):
        weight = unpacked(projection.weight)
        return weight.T if isinstance(projection, Conv1D) else weight, projection.bias


def _applied(
    projection: nn.Module, inputs: Tensor, outputs: Tensor
) -> tuple[Float[Tensor, "output width"], Float[Tensor, " output"] | None]:
    """W and b (or None) of y = W x + b, from the outputs of a projection.

    b is the output for zero; the columns of W are the outputs for unit vectors, minus b.

    Raises:
        NotLinear: ``outputs`` is not W x + b.
    """

    def error(weight: Tensor, bias: Tensor | None) -> Tensor:
        """Largest deviation of W x + b from the outputs, as a share of the largest output."""
        made = wide(inputs) @ wide(weight).T
        if bias is not None:
            made = made + wide(bias)
        return (made - outputs).abs().max() / outputs.abs().max()

    within = torch.finfo(inputs.dtype).eps ** 0.5
    # Hooks that change nothing leave the weights valid.
    if type(projection) in PLAIN and error(*(own := _weights(projection))) <= within:
        return own
    width = inputs.shape[-1]
    units = inputs.new_zeros(1, width + 1, width)
    # Long probes, because b may be larger than the effect of a unit vector.
    units[0, 1:].fill_diagonal_(UNIT)
    try:
        answers = wide(first_vectors(projection(units)))[0]
    except (RuntimeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        name = type(projection).__name__
        raise NotLinear(
            f"its keys come from a {name} that answers to no other vectors ({error})"
        ) from error
    bias, columns = answers.split([1, width])
    weight = (columns - bias).T / UNIT
    bias = bias[0]
    # A NaN passes here; the sums refuse it later.
    if (share := error(weight, bias)) > within:
        raise NotLinear(
            f"its keys come from a {type(projection).__name__} that is not linear (by {share:.1e} "
            "of the largest), so that no dimension has a share of its own in a score"
        )
    return weight, bias if bias.any() else None


def projected_by_head(
    module: nn.Module, spec: Attention, projected: dict[str, Tensor], heads: int
) -> tuple[Float[Tensor, "utterance head token head_dim"], ...]:
    """Queries, keys and values by head, from the outputs of the hooked projections."""
    if spec.fused:
        sizes, axis = ((heads, 3, -1), -2) if spec.fused == "by_head" else ((3, heads, -1), -3)
        parts = [*projected["key"].unflatten(-1, sizes).unbind(axis)]
        # DeBERTa adds biases to queries and values after its fused projection, and none to keys.
        for part, name in ((0, "q_bias"), (2, "v_bias")):
            if hasattr(module, name):
                parts[part] = parts[part] + getattr(module, name).view(heads, -1)
    else:
        parts = [projected[space].unflatten(-1, (heads, -1)) for space in ("query", "key", "value")]
    return tuple(part.transpose(1, 2) for part in parts)


def score_sums(
    module: nn.Module,
    spec: Attention,
    call: AttentionCall,
    query: Float[Tensor, "utterance head token head_dim"],
    key_heads: int,
    inputs: Vectors,
    visibility: Visibility,
    position: Tensor | None,
    position_query: PositionQuery | None = None,
) -> ScoreSums:
    """The sums of scores of a module; several heads of queries may share a head of keys."""
    heads = query.shape[1]
    of_keys = key_heads // spec.tiled
    keys = visibility.keys.mask.shape[1]
    seen = call.key_input, call.projected["key"]
    weight, bias = key_projection(module.get_submodule(spec.key), spec.fused, heads, of_keys, *seen)
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if of_keys < heads or spec.key_norm:
        # Index of the head of keys that belongs to each head of queries.
        meets = torch.arange(heads, device=query.device) // (heads // key_heads) % of_keys
    if of_keys < heads:
        weight = weight.index_select(0, meets)
        if bias is not None:
            bias = bias.index_select(0, meets)
    is_rotated = spec.rotary and angles_of(call.arguments)
    if not is_rotated and not spec.key_norm and not spec.latent and not spec.factor:
        return ScoreSums(query, inputs, weight, bias, visibility, None, position, position_query)
    norm = []
    if spec.key_norm:
        parts = _norm_of_keys(module, spec, call, (len(query), keys, of_keys))
        norm = [part.index_select(1, meets) for part in parts]
    projected = weight.new_zeros(len(query), heads, keys, weight.shape[1])
    is_affine = spec.centred or spec.latent
    if is_affine and bias is not None:
        projected = projected + bias.unsqueeze(1)
        bias = None
    # Tᵀ is the transpose of the derivative of T. If T_n is affine, its value at b_K is the part of
    # a key that does not depend on x_n.
    made, back = torch.func.vjp(_chain(module, spec, call, norm, query), projected)
    offset = made if is_affine and made.any() else None
    return ScoreSums(
        query,
        inputs,
        weight,
        bias,
        visibility,
        lambda vectors: back(vectors.expand_as(made))[0],
        position,
        position_query,
        offset,
    )


def _scale(norm: nn.Module, read: Tensor, gave: Tensor, centred: bool = False) -> list[Tensor]:
    """Factors by which a norm multiplies each component: its gains over a size held constant.

    If the norm is centred, the shift that it adds comes second.

    Args:
        norm: the norm.
        read: its input.
        gave: its output.
        centred: whether it subtracts the mean first, and adds a shift last.
    """
    # ``forward`` bypasses hooks. The output for a long vector of equal components is the gains; a
    # centred norm needs components of alternating sign.
    long = torch.full_like(read[:1, :1], UNIT)
    read = wide(read)
    gave = wide(gave)
    if centred:
        shift = wide(norm.forward(torch.zeros_like(long)))
        read = read - read.mean(-1, keepdim=True)
        gave = gave - shift
        long[..., 1::2] *= -1
    gains = (
        (wide(norm.forward(long)) - shift) * long.sign() if centred else wide(norm.forward(long))
    )
    inverse = torch.where(gains != 0, gains.reciprocal(), 0)
    # Norms of whole vectors, which rounding in half precision changes less than single components.
    sizes = (
        torch.linalg.vector_norm(part, dim=-1, keepdim=True)
        for part in (read * (gains != 0), gave * inverse)
    )
    before, after = sizes
    scale = gains * torch.where(before != 0, after / before, 0)
    return [scale, shift.expand_as(scale)] if centred else [scale]


def _norm_of_keys(
    module: nn.Module, spec: Attention, call: AttentionCall, sizes: tuple[int, int, int]
) -> list[Tensor]:
    """The factors of :func:`_scale` for the norm of keys, utterance x head x key x head_dim.

    A centred norm has its shift as well.

    Args:
        sizes: the numbers of utterances, keys and heads of keys; some norms read the keys of all
            texts in one row.
    """
    parts = _scale(module.get_submodule(spec.key_norm), *call.normalised, spec.centred)
    if spec.heads_first:
        return parts
    return [part.reshape(*sizes, -1).transpose(1, 2) for part in parts]


def _chain(
    module: nn.Module, spec: Attention, call: AttentionCall, norm: list[Tensor], query: Tensor
) -> Callable[
    [Float[Tensor, "utterance head key width"]], Float[Tensor, "utterance head key head_dim"]
]:
    """T_n of :class:`ScoreSums`, as a function of the output of the projection of keys."""
    angles = angles_of(call.arguments)
    heads = query.shape[1]
    rank = 0
    if spec.latent:
        latent_norm, up = (module.get_submodule(path) for path in spec.latent)
        read, gave = call.latent
        rank, (scale,) = read.shape[-1], _scale(latent_norm, read, gave.reshape(read.shape))
        weight, bias = key_projection(up, None, heads, heads, gave, call.projected["up"])

    def normed(keys: Tensor) -> Tensor:
        if not spec.centred:
            return keys * norm[0]
        return (keys - keys.mean(-1, keepdim=True)) * norm[0] + norm[1]

    def chain(keys: Tensor) -> Tensor:
        latent = keys[..., :rank]
        keys = keys[..., rank:]
        if spec.key_norm and not spec.norm_last:
            keys = normed(keys)
        if spec.rotary and angles:
            keys = rotated(module, keys, angles, spec.rotary, spec.rotation, spec.tokens_first)
        if spec.norm_last:
            keys = normed(keys)
        if spec.latent:
            own = query.shape[-1] - keys.shape[-1]
            made = torch.einsum("bhne,hde->bhnd", latent * scale.unsqueeze(1), weight[:, :own])
            keys = torch.cat([made if bias is None else made + bias[:, None, :own], keys], -1)
        return keys * getattr(module, spec.factor) if spec.factor else keys

    return chain
