"""Projections of an attention module: hooks on them, the weights of the keys' projection, and the way back through it.

Keys reach the attention interface finished. What their projection read, and what they were before a norm, are seen by
hooks on the projection and the norm; modules that do not call the interface have hooks on all their projections.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Visibility
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.models.parts import Attention


@dataclass(eq=False)
class AttentionCall:
    """What the hooks have seen of one call of an attention module.

    Attributes:
        arguments: the arguments of the call, by name.
        projected: the output of the projection of ``query``, ``key`` and ``value``, where there is a hook on it.
        key_input: what the projection of keys read, x_n.
        unnormalised: the projected keys, where a norm follows: utterance x token x head x head_dim.
    """

    arguments: dict[str, object] = field(default_factory=dict)
    projected: dict[str, Tensor] = field(default_factory=dict)
    key_input: Tensor | None = None
    unnormalised: Tensor | None = None


class ProjectionHooks:
    """Hooks on attention modules and their projections; ``call`` is the latest call that they have seen."""

    def __init__(self) -> None:
        self.call = AttentionCall()

    def attach(self, module: nn.Module, spec: Attention) -> Iterator[RemovableHandle]:
        """Attach the hooks of an attention module; the caller removes the handles."""
        yield module.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield module.get_submodule(spec.key).register_forward_hook(partial(self._project, "key"))
        if spec.key_norm:
            yield module.get_submodule(spec.key_norm).register_forward_hook(self._normalise)
        if spec.hooked:
            for space in ("query", "value"):
                if (path := getattr(spec, space)) is not None:
                    yield module.get_submodule(path).register_forward_hook(partial(self._project, space))

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = _signature(type(module)).bind(module, *args, **kwargs).arguments
        arguments.pop("self")
        self.call = AttentionCall({**arguments, **arguments.pop("kwargs", {})})

    def _project(self, space: str, _module: nn.Module, args: tuple, output: Tensor) -> None:
        # Only the first time: DeBERTa may project its relative positions with the same weights.
        if space not in self.call.projected:
            self.call.projected[space] = wide(output)
            if space == "key":
                self.call.key_input = args[0]

    def _normalise(self, _norm: nn.Module, args: tuple, _output: Tensor) -> None:
        self.call.unnormalised = wide(args[0])


@cache
def _signature(module: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(module.forward)


def key_projection(
    module: nn.Module, spec: Attention, heads: int
) -> tuple[Float[Tensor, "head head_dim width"], Float[Tensor, "head head_dim"] | None]:
    """W_K and b_K (or None) of each head of keys: k = W_K x + b_K, before any norm or rotation."""
    projection = module.get_submodule(spec.key)
    with align_module_device(projection):
        weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight
        parts = [*map(wide, [weight] if projection.bias is None else [weight, projection.bias.unsqueeze(-1)])]
    if spec.fused == "by_head":
        parts = [part.view(heads, 3, -1, part.shape[-1])[:, 1] for part in parts]
    elif spec.fused == "stacked":
        parts = [part.chunk(3)[1].reshape(heads, -1, part.shape[-1]) for part in parts]
    else:
        parts = [part.view(heads, -1, part.shape[-1]) for part in parts]
    return parts[0], parts[1].squeeze(-1) if len(parts) > 1 else None


def projected_by_head(
    module: nn.Module, spec: Attention, projected: dict[str, Tensor], heads: int
) -> tuple[Float[Tensor, "utterance head token head_dim"], ...]:
    """Queries, keys and values of a module with hooks on its projections, from the outputs of these."""
    if spec.fused:
        parts = projected["key"].unflatten(-1, (heads, 3, -1)).unbind(-2)
        # DeBERTa adds biases to queries and values after its one projection, and has none for keys.
        bias = (module.q_bias, 0, module.v_bias)
        parts = [p + (b if isinstance(b, int) else b.view(heads, -1)) for p, b in zip(parts, bias, strict=True)]
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
    position_query: Tensor | None = None,
) -> ScoreSums:
    """The sums of scores of a module, which may share each head of keys between several heads of queries."""
    weight, bias = key_projection(module, spec, key_heads)
    shared_by = query.shape[1] // key_heads
    weight = weight.repeat_interleave(shared_by, 0)
    bias = None if bias is None else bias.repeat_interleave(shared_by, 0)
    back = _back_through_key(module, spec, call, shared_by, visibility.keys.mask.shape[1])
    return ScoreSums(query, inputs, weight, bias, visibility, back, position, position_query)


def _back_through_key(
    module: nn.Module, spec: Attention, call: AttentionCall, shared_by: int, keys: int
) -> Callable[[Tensor], Tensor] | None:
    """T_nᵀ of :class:`ScoreSums`: the transpose of the rotation and the norm that a key goes through, or None."""
    steps = []
    if (rotation := call.arguments.get("position_embeddings")) is not None:
        cos, sin = rotation
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        # The rotation by −θ is the transpose of that by θ; if the model scales it, both are scaled alike.
        steps.append(lambda vectors: rotate(vectors, vectors, cos, -sin)[0])
    if spec.key_norm:
        norm, raw = module.get_submodule(spec.key_norm), call.unnormalised
        with align_module_device(norm):
            scale = raw.square().mean(-1, keepdim=True).add(norm.variance_epsilon).rsqrt() * norm.weight
        scale = scale.transpose(1, 2).repeat_interleave(shared_by, 1)
        steps.append(lambda vectors: vectors * scale)
    if not steps:
        return None

    def back(vectors: Tensor) -> Tensor:
        vectors = vectors.expand(-1, -1, keys, -1)
        for step in steps:
            vectors = step(vectors)
        return vectors

    return back
