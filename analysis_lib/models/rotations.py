"""Rotation of queries and keys by position: how a module rotates, and the way back.

A rotary model turns pairs of dimensions of each query and key by angles of the token's position.
Attention receives the rotated vectors. Those before are taken back from them, by the very angles
that the module is called with. The way back is proven on an example: what it gives must be the
output of a module inside the attention, such as the projection or a norm after it.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.models.calls import angles_of
from analysis_lib.models.parts import Rotation
from analysis_lib.models.probe import ROUNDING, Call, Trace

Turn = Complex[Tensor, "#utterance 1 token pair"]


def turn_of(angles: Sequence[Tensor], rotation: Rotation, like: Tensor) -> Turn:
    """The factor w by which the module multiplies each pair of dimensions, as a complex number.

    |w| is 1, or the attention scaling of extended contexts, such as that of YaRN.

    Args:
        angles: the angles in the module's arguments, as of
            :func:`~analysis_lib.models.calls.angles_of`.
        rotation: how the module rotates.
        like: queries or keys of the call, utterance x head x token x head_dim, which give the
            precision and the number of tokens.
    """
    if angles[0].is_complex():
        angles = torch.view_as_real(angles[0]).unbind(-1)
    cos, sin = (_by_pair(part, rotation).to(like.dtype) for part in angles)
    if rotation.backwards:
        sin = -sin
    turn = torch.complex(*torch.broadcast_tensors(cos, sin))
    # The first tokens of an image, such as [CLS], have no position and are not rotated.
    without_position = like.shape[2] - turn.shape[2]
    return functional.pad(turn, (0, 0, without_position, 0), value=1) if without_position else turn


def _by_pair(part: Tensor, rotation: Rotation) -> Float[Tensor, "#utterance 1 token pair"]:
    """Cosines or sines of each pair."""
    if rotation.angles == "halves":
        part = part[..., : rotation.pairs]
    elif rotation.angles == "neighbours":
        part = part[..., ::2]
    if part.dim() == 2:
        part = part.unsqueeze(0)
    if part.dim() == 3:
        return part.unsqueeze(1)
    return part.transpose(1, 2) if part.shape[2] == 1 else part


def pairs_of(
    vectors: Float[Tensor, "utterance head token dim"], rotation: Rotation
) -> Complex[Tensor, "utterance head token pair"]:
    """The pairs of dimensions that a rotation turns, as complex numbers."""
    part = vectors[..., rotation.first : rotation.first + 2 * rotation.pairs]
    if rotation.interleaved:
        return torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
    return torch.complex(*part.split(rotation.pairs, -1))


def unrotated(
    vectors: Float[Tensor, "utterance head token dim"], turn: Turn, rotation: Rotation
) -> Float[Tensor, "utterance head token dim"]:
    """Queries or keys before their rotation, in the order of dimensions that attention receives."""
    before = _in_order(pairs_of(vectors, rotation) / turn, rotation.interleaved)
    end = rotation.first + before.shape[-1]
    if before.shape[-1] == vectors.shape[-1]:
        return before
    return torch.cat([vectors[..., : rotation.first], before, vectors[..., end:]], -1)


def rotated(
    vectors: Float[Tensor, "utterance head token dim"], turn: Turn, rotation: Rotation
) -> Float[Tensor, "utterance head token dim"]:
    """Queries or keys after their rotation; the inverse of :func:`unrotated`."""
    return unrotated(vectors, 1 / turn, rotation)


def _in_order(
    pairs: Complex[Tensor, "*batch pair"], interleaved: bool
) -> Float[Tensor, "*batch dim"]:
    if interleaved:
        return torch.view_as_real(pairs).flatten(-2)
    return torch.cat([pairs.real, pairs.imag], -1)


# --- How a module rotates -------------------------------------------------------------------------


def find_rotation(call: Call, trace: Trace, keys: Mapping[str, object]) -> dict[str, object]:
    """Fields of ``Attention`` that describe how queries and keys of a call are rotated.

    Args:
        call: a call of an attention module.
        trace: the pass that it belongs to.
        keys: what :func:`~analysis_lib.models.keys.find_keys` has found.
    """
    # A rotation would turn the keys, too.
    without_rotation = keys["key"] is not None and not keys["rotary"]
    if call.query.shape[2] != call.key.shape[2] or without_rotation:
        return {}
    outputs = [*_outputs_inside(call, trace)]
    angles = angles_of(trace.runs[call.module][-1].arguments)
    # Few functions take complex numbers in half precision.
    wide = call.query.float(), call.key.float()
    for rotation in _candidates(call, angles):
        turn = turn_of(angles, rotation, wide[0])
        if all(_is_proven(part, turn, rotation, outputs) for part in wide):
            return {"rotates": rotation}
    if keys["key"] is not None:
        return {"may_rotate": True}
    speaks_of_it = bool(angles) or _names_rotations(call.module)
    return {"may_rotate": speaks_of_it and not _is_made_inside(call.key, outputs)}


def _names_rotations(module: nn.Module) -> bool:
    """Whether the source of a module speaks of rotary positions."""
    names = {*vars(sys.modules[type(module).__module__]), *dir(module)}
    return any("rotary" in name.lower() for name in names)


def _candidates(call: Call, angles: Sequence[Tensor]) -> Iterator[Rotation]:
    """Rotations by some angles that fit the size of the heads, the usual ones first."""
    if not angles:
        return
    part = angles[-1]
    width = part.shape[-1]
    layout = "once"
    pairs = width
    if not part.is_complex() and width % 2 == 0:
        if torch.equal(part[..., : width // 2], part[..., width // 2 :]):
            layout, pairs = "halves", width // 2
        elif torch.equal(part[..., ::2], part[..., 1::2]):
            layout, pairs = "neighbours", width // 2
    size = call.key.shape[-1]
    rotation = Rotation(pairs, angles=layout)
    if 2 * pairs > size or call.query.shape[-1] != size:
        return
    starts = dict.fromkeys((0, size - 2 * pairs))
    for backwards, first, interleaved in itertools.product((False, True), starts, (False, True)):
        yield replace(rotation, first=first, interleaved=interleaved, backwards=backwards)


def _is_proven(vectors: Tensor, turn: Tensor, rotation: Rotation, outputs: list[Tensor]) -> bool:
    """Whether vectors without their rotation are outputs of a module inside the attention.

    Some models reorder the dimensions when they rotate.
    """
    before = pairs_of(vectors, rotation) / turn
    orders = (rotation.interleaved, not rotation.interleaved)
    return any(_is_made_inside(_in_order(before, order), outputs) for order in orders)


def _outputs_inside(call: Call, trace: Trace) -> Iterator[Tensor]:
    """Outputs of the modules inside an attention module, token x width."""
    tokens = call.key.shape[2]
    for module in call.module.modules():
        if module is call.module or module not in trace.runs:
            continue
        for run in trace.runs[module]:
            returned = run.returned
            if returned is None or returned.numel() % tokens:
                continue
            yield returned.reshape(tokens, -1)
            if returned.dim() == 4 and returned.shape[2] == tokens:
                yield returned[0].transpose(0, 1).reshape(tokens, -1)


def _is_made_inside(vectors: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether each head of vectors, 1 x head x token x dim, is part of an output.

    Norms without gains, and factors, change the length of a vector alone: directions are compared.
    """
    unit = functional.normalize(vectors[0].float(), dim=-1)
    size = unit.shape[-1]
    is_made = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    for output in outputs:
        if output.shape[-1] < size:
            continue
        # The last token shows where a head would be.
        windows = functional.normalize(output[-1].float().unfold(0, size, 1), dim=-1)
        starts = (unit[:, -1] @ windows.T).argmax(-1)
        dimensions = starts[:, None] + torch.arange(size, device=starts.device)
        of_heads = functional.normalize(output[:, dimensions].float(), dim=-1)
        difference = (of_heads.transpose(0, 1) - unit).norm(dim=-1)
        tolerance = max(ROUNDING, 8 * torch.finfo(output.dtype).eps)
        is_made |= difference.amax(-1) <= tolerance
    return bool(is_made.all())
