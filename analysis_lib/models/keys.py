"""The making of keys in an attention module, proven by making them from a projection's output.

The key projection is the one whose output, split into heads, normalised and rotated as the model
does, *is* the key that attention receives.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor, nn

from analysis_lib.models.calls import angles_of
from analysis_lib.models.parts import ROTATION
from analysis_lib.models.probe import Call, Run, Trace, same

# Layouts of keys in a projection: alone; after all queries; after the queries that share a key;
# before all values.
ORDERS = (None, "stacked", "by_head", "before_values")
# Norms of keys: the dimensions that they average over, and whether they subtract the mean.
NORMS = (((-1,), False), ((-2, -1), False), ((-1,), True))

# Fields of ``Attention``, and the keys that they make.
Made = tuple[dict[str, object], Tensor]


def split_keys(projected: Tensor, order: str | None, heads: int, key_heads: int) -> Tensor | None:
    """Keys of each head, * x head x head_dim, from a projection's output; None if it does not fit.

    Args:
        projected: the output, * x width, or the transposed weights.
        order: one of ``ORDERS``.
        heads: the number of heads of queries.
        key_heads: the number of heads of keys, which several heads of queries may share.
    """
    width = projected.shape[-1]
    group = heads // key_heads
    parts = {
        None: key_heads,
        "stacked": heads + 2 * key_heads,
        "by_head": (group + 2) * key_heads,
        "before_values": 2 * key_heads,
    }[order]
    if width % parts:
        return None
    size = width // parts
    if order == "by_head":
        return projected.unflatten(-1, (key_heads, group + 2, size))[..., -2, :]
    start = heads * size if order == "stacked" else 0
    return projected[..., start : start + key_heads * size].unflatten(-1, (key_heads, size))


def rotated(
    module: nn.Module,
    vectors: Tensor,
    angles: Sequence[Tensor],
    each: int = 1,
    rotation: str = ROTATION,
    tokens_first: bool = False,
) -> Tensor:
    """Vectors of heads, utterance x head x token x head_dim, rotated as in an attention module.

    Dimensions beyond those of the angles stay as they are.

    Args:
        module: the module whose source defines the rotation.
        vectors: the vectors to rotate.
        angles: the angles in the module's arguments.
        each: the number of dimensions for each angle, 1 or 2.
        rotation: the name of the function.
        tokens_first: whether it reads tokens before heads.
    """
    rotate = getattr(sys.modules[type(module).__module__], rotation)
    width = each * angles[0].shape[-1]
    part = vectors[..., :width]
    rest = vectors[..., width:]
    head_axis = 1
    if tokens_first:
        part = part.transpose(1, 2)
        head_axis = 2
    if _required_arguments(rotate) == 1 + len(angles):
        turned = rotate(part, *angles)
    else:
        # The function rotates queries and keys in one call: the second argument does not matter, so
        # one head is enough.
        turned = rotate(part, part.narrow(head_axis, 0, 1), *angles)[0]
    if tokens_first:
        turned = turned.transpose(1, 2)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


@cache
def _required_arguments(function: Callable) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters)


def find_keys(call: Call, trace: Trace) -> dict[str, object]:
    """Fields of ``Attention`` that describe how the key of a call is made.

    ``key`` is None if that is not known.
    """
    module = call.module
    factors = {name: value for name, value in vars(module).items() if isinstance(value, float)}
    for fields, key in _candidates(call, trace):
        target = call.key[..., -key.shape[-1] :]
        for attribute, factor in {None: 1.0, **factors}.items():
            if same(factor * key, target):
                return {**fields, "factor": attribute}
    return {"key": None}


def _candidates(call: Call, trace: Trace) -> Iterator[Made]:
    """Candidate keys, made from the outputs of the modules inside an attention module."""
    inside = {}
    for path, module in call.module.named_modules():
        if path and module in trace.runs:
            run = trace.runs[module][-1]
            if run.read is not None and run.returned is not None:
                inside[path] = run
    angles = angles_of(trace.runs[call.module][-1].arguments)
    for path in inside:
        for split, keys in itertools.chain(_split(path, inside, call), _latent(path, inside, call)):
            for steps, key in _finished(call.module, keys, inside, angles):
                yield {"key": path, **split, **steps}, key.repeat(1, split["tiled"], 1, 1)


def _split(path: str, inside: Mapping[str, Run], call: Call) -> Iterator[Made]:
    """Keys, utterance x token x head x head_dim, for each layout of a projection's output."""
    utterances, key_heads, tokens, size = call.key.shape
    heads = call.query.shape[1]
    divisors = [count for count in range(1, key_heads + 1) if key_heads % count == 0]
    for tiled, order in itertools.product(divisors, ORDERS):
        keys = split_keys(inside[path].returned, order, heads, key_heads // tiled)
        if keys is not None and keys.shape[-1] == size and keys.numel() * tiled == call.key.numel():
            yield {"fused": order, "tiled": tiled}, keys.reshape(utterances, tokens, -1, size)


def _latent(path: str, inside: Mapping[str, Run], call: Call) -> Iterator[Made]:
    """The end of the keys in latent attention: one key that all heads share.

    The beginning is made by another projection.
    """
    utterances, heads, tokens, size = call.key.shape
    returned = inside[path].returned
    if returned.shape[:-1] != (utterances, tokens):
        return
    for up, run in inside.items():
        rank = run.read.shape[-1]
        own = size + rank - returned.shape[-1]
        fits = (
            run.read.numel() == utterances * tokens * rank and run.returned.shape[-1] % heads == 0
        )
        if not 0 < own < size or not fits:
            continue
        beginning = run.returned.reshape(utterances, tokens, heads, -1)[..., :own]
        if not same(beginning.transpose(1, 2), call.key[..., :own]):
            continue
        for norm, normed in _normed(returned[..., None, :rank], inside):
            read = run.read.reshape(normed.shape)
            # Some models multiply the output of the norm.
            scaled = normed * (read.norm() / normed.norm())
            if not norm["centred"] and same(scaled, read):
                fields = {"latent": (norm["key_norm"], up), "fused": None, "tiled": heads}
                yield fields, returned[..., None, rank:]


def _finished(
    module: nn.Module, keys: Tensor, inside: Mapping[str, Run], angles: Sequence[Tensor]
) -> Iterator[Made]:
    """Keys, utterance x head x token x head_dim, after a norm and a rotation.

    Each of the two may be missing, and the norm may come first or last.
    """
    for norm, normed in itertools.chain([({}, keys)], _normed(keys, inside)):
        for turn, turned in _turned(module, normed.transpose(1, 2), angles):
            yield {**norm, **turn}, turned
            if norm or not turn["rotary"]:
                continue
            for last, key in _normed(turned.transpose(1, 2), inside):
                yield {**turn, **last, "norm_last": True}, key.transpose(1, 2)


def _normed(keys: Tensor, inside: Mapping[str, Run]) -> Iterator[Made]:
    """Outputs of the norms that read the keys, utterance x token x head x head_dim.

    A norm is a root-mean-square norm of each head, or of all together, or a LayerNorm of each head.
    """
    for path, run in inside.items():
        if run.read.numel() != keys.numel() or run.returned.numel() != keys.numel():
            continue
        heads_first = run.read.shape == keys.transpose(1, 2).shape and not same(
            run.read.reshape(keys.shape), keys
        )
        if heads_first:
            read = run.read.transpose(1, 2)
            returned = run.returned.transpose(1, 2)
        else:
            read = run.read.reshape(keys.shape)
            returned = run.returned.reshape(keys.shape)
        if not same(read, keys):
            continue
        for dims, centred in NORMS:
            if _is_norm(read, returned, dims, centred):
                yield {"key_norm": path, "heads_first": heads_first, "centred": centred}, returned
                break


def _is_norm(read: Tensor, returned: Tensor, dims: tuple[int, ...], centred: bool) -> bool:
    """Whether all tokens have the same gains and, in a centred norm, the same shift."""
    if centred:
        read = read - read.mean(-1, keepdim=True)
    unit = read / read.square().mean(dims, keepdim=True).sqrt()
    if centred:
        # The shift cancels in differences from the mean token.
        mean = unit.mean(1, keepdim=True)
        shift = returned.mean(1, keepdim=True)
        from_unit = unit - mean
        from_returned = returned - shift
    else:
        # The first token determines the gains.
        mean = 0
        shift = 0
        from_unit = unit[:, :1]
        from_returned = returned[:, :1]
    gains = (from_unit * from_returned).sum(1, keepdim=True) / from_unit.square().sum(
        1, keepdim=True
    )
    return same(gains * (unit - mean) + shift, returned)


def _turned(module: nn.Module, keys: Tensor, angles: Sequence[Tensor]) -> Iterator[Made]:
    """Keys, utterance x head x token x head_dim, as they are and in each rotation of the model."""
    yield {"rotary": 0}, keys
    if not angles:
        return
    names = [
        name
        for name in vars(sys.modules[type(module).__module__])
        if name.startswith("apply_rotary")
    ]
    for name in sorted(names, key=ROTATION.__ne__):
        for each, tokens_first in itertools.product((1, 2), (False, True)):
            # The usual function takes cosines and sines, and heads first.
            # Angles without an axis of utterances meet tokens first.
            swaps = tokens_first and angles[0].dim() > 2
            if name == ROTATION and (swaps or len(angles) == 1):
                continue
            # Other functions of such a name may take other arguments.
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):
                turned = rotated(module, keys, angles, each, name, tokens_first)
                yield {"rotary": each, "rotation": name, "tokens_first": tokens_first}, turned
