"""Kinds of attentions and of rotations, told from their numbers, in words."""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from analysis_book.atlas.tracing import AttentionCall, Rotation, Trace, alike

# Rows of weights add up to 1 within this.
NEAR = 1e-3
WEIGHTS = "weights"
WITH_SINK = "weights beside a sink"
BEFORE_SINK = "weights before a sink takes its part"
ACROSS = "weights over queries"
HALF = "part of a longer softmax"
SCORES = "scores before the softmax"
STATE = "state"
VECTORS = "output of attention"
OTHER = "other"
USUAL_SCALE = "1/√d"
OF_WEIGHTS = (WEIGHTS, WITH_SINK, BEFORE_SINK, ACROSS, HALF)


def in_symbols(shape: Sequence[int], sizes: Mapping[int, str], batch: int | None = None) -> str:
    """A shape with the names of its axes, where their sizes are known.

    Args:
        shape: the shape.
        sizes: the names of axes by their sizes.
        batch: the size of the batch, which is the first axis of that size.

    >>> in_symbols((3, 4, 11, 11), {4: "head", 11: "token"}, batch=3)
    'batch × head × token × token'
    """
    names = [sizes.get(size, str(size)) for size in shape]
    if batch in shape:
        names[list(shape).index(batch)] = "batch"
    # Two sizes may be equal by chance.
    for index, name in enumerate(names):
        if name == "head" and name in names[:index]:
            names[index] = str(shape[index])
    return " × ".join(names)


# --- Attentions -----------------------------------------------------------------------------------


def attention_kind(attention: object, trace: Trace, has_sink: bool, tokens: int) -> str:
    """What an entry of ``attentions`` is.

    Args:
        attention: the entry.
        trace: of the call that returned it.
        has_sink: whether the module that attends has a learned sink.
        tokens: how many tokens there are.
    """
    if attention is None:
        return "none"
    if not isinstance(attention, Tensor):
        return f"a {type(attention).__name__}"
    values = attention.detach().float()
    for scores, weights in trace.softmaxes:
        kind = _beside_softmax(values, scores.float(), weights.float())
        if kind == WEIGHTS and has_sink and not _is_cut(trace, weights):
            return BEFORE_SINK
        if kind:
            return kind
    sums = values.sum(-1)
    if bool((values >= 0).all()) and bool((sums <= 1 + NEAR).all()):
        if bool((sums > 1 - NEAR).all()):
            return WEIGHTS
        if has_sink:
            return WITH_SINK
    # Some record what attention gives in place of its weights.
    if any(alike(run.gave, attention) for run in trace.runs):
        return VECTORS
    if tokens not in values.shape[-2:]:
        return STATE
    return OTHER


def _beside_softmax(values: Tensor, scores: Tensor, weights: Tensor) -> str:
    """What numbers are of a softmax, if anything."""
    if values.numel() == weights.numel():
        if torch.equal(values.reshape(-1), weights.reshape(-1)):
            sums = values.sum(-1)
            return WEIGHTS if torch.allclose(sums, torch.ones(()), atol=NEAR) else ACROSS
        if torch.equal(values.reshape(-1), scores.reshape(-1)):
            return SCORES
    keys = values.shape[-1]
    is_part = weights.shape[-1] > keys and weights[..., 0].numel() == values[..., 0].numel()
    if is_part:
        flat = values.reshape(-1, keys)
        whole = weights.reshape(-1, weights.shape[-1])
        if torch.equal(flat, whole[:, :keys]) or torch.equal(flat, whole[:, -keys:]):
            return WITH_SINK if weights.shape[-1] == keys + 1 else HALF
    return ""


def _is_cut(trace: Trace, weights: Tensor) -> bool:
    """Whether sinks are a further column of a softmax; a layer without that column has no sink."""
    columns = {each.shape[-1] for _, each in trace.softmaxes}
    return weights.shape[-1] + 1 in columns


def row_sums(attentions: Sequence[Tensor]) -> str:
    """The least and largest sum of a row."""
    sums = [attention.detach().float().sum(-1) for attention in attentions]
    least = min(each.min().item() for each in sums)
    largest = max(each.max().item() for each in sums)
    if abs(least - 1) < NEAR and abs(largest - 1) < NEAR:
        return "1"
    return f"{least:.3g} to {largest:.3g}"


def dropout_side(attention: Tensor, trace: Trace) -> str:
    """Whether weights are returned before dropout or after it, by the memory that they share."""
    memory = attention.untyped_storage().data_ptr()
    for _, after in trace.dropouts:
        if after.untyped_storage().data_ptr() == memory:
            return "after dropout"
    for before, _ in trace.dropouts:
        if before.untyped_storage().data_ptr() == memory:
            return "before dropout"
    # Converted or cut on the way: its numbers tell that it went through one, not on which side.
    return "no dropout seen"


def scale_in_words(scaling: float | None, width: int) -> str:
    """The factor of the scores: that of the width of a head, or another."""
    usual = width**-0.5
    if scaling is None or math.isclose(scaling, usual, rel_tol=1e-3):
        return USUAL_SCALE
    if math.isclose(scaling, 1.0):
        return "1"
    return f"{scaling:.4g}, where 1/√d is {usual:.4g}"


def is_scaled_before(call: AttentionCall, trace: Trace) -> bool:
    """Whether 1/√d is what queries and keys were multiplied by before a module attends.

    The norms of what its projections gave tell, beside those of queries and keys.
    """
    inside = {*call.module.modules()}
    norms = []
    for shape in (call.queries, call.keys):
        given = []
        for run in trace.runs[: call.runs]:
            if run.module in inside and run.gave is not None:
                if run.gave.numel() == math.prod(shape):
                    given.append(run.gave.norm().item())
        norms.append(given)
    # Some rotations also scale (YaRN).
    rotated = 1.0
    for rotation in trace.rotations[: call.rotations][-1:]:
        rotated = (rotation.after.norm() / rotation.before.norm()).item()
    product = math.prod(call.norms) * call.options["scaling"] / rotated**2
    usual = call.queries[-1] ** -0.5
    for queries, keys in itertools.product(*norms):
        if math.isclose(product, usual * queries * keys, rel_tol=1e-4):
            return True
    return False


# --- Rotations ------------------------------------------------------------------------------------


def rotation_kinds(rotations: Sequence[Rotation], head: int | None) -> tuple[str, str]:
    """How queries and keys are rotated, and by how many tables of angles.

    Args:
        rotations: those of one call of a model.
        head: the width of a head, if it is known.
    """
    kinds = {}
    tables = []
    for rotation in rotations:
        kind, angles = _rotation(rotation, head)
        kinds[kind] = None
        if angles is not None and not any(_same_angles(angles, each) for each in tables):
            tables.append(angles)
    return "; ".join(kinds), _bases(tables)


def _rotation(rotation: Rotation, head: int | None) -> tuple[str, Tensor | None]:
    """The kind of one rotation, and the angle of each pair of dimensions between two tokens."""
    before = rotation.before.double().reshape(-1, rotation.before.shape[-1])
    after = rotation.after.double().reshape(-1, rotation.after.shape[-1])
    turned = (before != after).any(0).nonzero().flatten()
    width = len(turned)
    if width == 0:
        return "no vector changes", None
    whole = head or before.shape[-1]
    share = "" if width >= whole else f", {width} of {whole} dimensions"
    if width % 2:
        return f"not recognised{share}", None
    old, new = before[:, turned], after[:, turned]
    halves, pairs = (_in_halves(old), _in_pairs(old)), (_in_halves(new), _in_pairs(new))
    for name, read, gave in (
        ("halves", halves[0], pairs[0]),
        ("interleaved", halves[1], pairs[1]),
        ("interleaved, returned in halves", halves[1], pairs[0]),
    ):
        # Some tables of angles also scale (YaRN).
        factor = gave.norm() / read.norm()
        if torch.allclose(factor * read.abs(), gave.abs(), rtol=1e-3, atol=1e-5):
            turns = torch.angle(gave / read)
            return f"{name}{share}", _steps(turns, rotation.before)
    return f"not recognised{share}", None


def _in_halves(vectors: Tensor) -> Tensor:
    """Pairs of a dimension of the first half and one of the second, as complex numbers."""
    first, second = vectors.chunk(2, -1)
    return torch.complex(first, second)


def _in_pairs(vectors: Tensor) -> Tensor:
    """Pairs of neighbouring dimensions, as complex numbers."""
    return torch.complex(vectors[:, 0::2], vectors[:, 1::2])


def _steps(turns: Tensor, vectors: Tensor) -> Tensor:
    """The most that each pair turns from a token to the next, which its table of angles decides."""
    width = turns.shape[-1]
    by_token = turns.reshape(*vectors.shape[:-1], width)
    if by_token.dim() < 2:
        return by_token.abs()
    axis = 1 if by_token.dim() == 3 else 2
    if by_token.dim() == 4 and by_token.shape[1] > by_token.shape[2]:
        axis = 1  # Tokens before heads.
    if by_token.shape[axis] < 2:
        return by_token.reshape(-1, width)[0].abs()
    step = by_token.select(axis, 1) - by_token.select(axis, 0)
    step = torch.remainder(step + math.pi, 2 * math.pi) - math.pi
    return step.reshape(-1, width).median(0).values.abs()


def _same_angles(angles: Tensor, other: Tensor) -> bool:
    return angles.shape == other.shape and torch.allclose(angles, other, rtol=1e-2, atol=1e-5)


def _bases(tables: Sequence[Tensor]) -> str:
    """The base of each table of angles whose logarithms are evenly spaced."""
    words = {}
    for angles in tables:
        base = _base(angles)
        word = "scaled angles"
        if base is not None:
            word = f"{float(f'{base:.3g}'):,.0f}"
        words[word] = None
    return ", ".join(words)


def _base(angles: Tensor) -> float | None:
    count = len(angles)
    if count < 2 or not bool((angles > 0).all()) or abs(angles[0].item() - 1) > 0.02:
        return None
    logarithms = angles.log()
    step = logarithms[1] - logarithms[0]
    expected = step * torch.arange(count, dtype=angles.dtype)
    if not torch.allclose(logarithms, expected, atol=0.05, rtol=0.02):
        return None
    return math.exp(-step.item() * count)
