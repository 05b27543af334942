"""Kinds of attentions and of rotations, told from their numbers, in words."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis_book.atlas.tracing import AttentionCall, Rotation, Trace, alike

# Rows of weights add up to 1 within this.
NEAR = 1e-3
# Smaller angles between two tokens are not told from rounding.
LEAST_ANGLE = 2e-5
WEIGHTS = "weights"
WITH_SINK = "weights beside a sink"
BEFORE_SINK = "weights before a sink takes its part"
ACROSS = "weights over queries"
OVER_TWO = "weights over the last two axes"
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


def attention_kind(attention: object, trace: Trace, has_sink: bool, tokens: Collection[int]) -> str:
    """What an entry of ``attentions`` is.

    Args:
        attention: the entry.
        trace: of the call that returned it.
        has_sink: whether the module that attends has a learned sink.
        tokens: how many tokens there are; with those that a model adds, too.
    """
    if attention is None:
        return "none"
    if not isinstance(attention, Tensor):
        return f"a {type(attention).__name__}"
    values = attention.detach().float()
    if values.isnan().any():
        return "NaN"
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
    if not {*tokens} & {*values.shape[-2:]}:
        return STATE
    return OTHER


def _beside_softmax(values: Tensor, scores: Tensor, weights: Tensor) -> str:
    """What numbers are of a softmax, if anything."""
    if values.numel() == weights.numel():
        if torch.equal(values.reshape(-1), weights.reshape(-1)):
            if _adds_up(values.sum(-1)):
                return WEIGHTS
            return OVER_TWO if _adds_up(values.sum((-2, -1))) else ACROSS
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


def _adds_up(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones(()), atol=NEAR)


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
    given = [run.gave for run in trace.runs[: call.runs] if run.module in inside]
    for shape in (call.queries, call.keys):
        count = math.prod(shape)
        same = [each for each in given if each is not None and each.numel() == count]
        norms.append([each.norm().item() for each in same])
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


@dataclass(frozen=True, eq=False)
class Angles:
    """How far each pair of dimensions turns from a token to the next.

    Attributes:
        steps: the angle of each pair that turns.
        pairs: how many pairs the table of angles is made for, some of which may not turn.
    """

    steps: Tensor
    pairs: int


def rotation_kind(rotations: Sequence[Rotation], head: int | None) -> str:
    """How queries and keys are rotated.

    Args:
        rotations: those of one module that attends.
        head: the width of its heads, if it is known.
    """
    kinds = [_rotation(rotation, head)[0] for rotation in rotations]
    for index, rotation in enumerate(rotations):
        first = index - rotation.parts
        if first < index and kinds[index].startswith("not recognised"):
            of_parts = dict.fromkeys(_rotation(part, None)[0] for part in rotations[first:index])
            kind = f"{' or '.join(of_parts)} of each of {rotation.parts} parts"
            kinds[first : index + 1] = [kind] * (rotation.parts + 1)
    return "; ".join(dict.fromkeys(kinds)) or "none"


def rotation_bases(rotations: Sequence[Rotation]) -> str:
    """The base of each table of angles by which vectors are rotated."""
    tables: list[Angles] = []
    for rotation in rotations:
        _, angles = _rotation(rotation, None)
        if angles is not None and not any(_same_angles(angles, each) for each in tables):
            tables.append(angles)
    # Along a row of an image, what stands for the row does not turn.
    turning = [angles for angles in tables if bool((angles.steps > LEAST_ANGLE).any())]
    return ", ".join(dict.fromkeys(map(_base_in_words, turning or tables)))


def _rotation(rotation: Rotation, head: int | None) -> tuple[str, Angles | None]:
    """The kind of one rotation, and its angles."""
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
    # With a gap behind each half, the table is made for the whole vector.
    pairs = width // 2
    if turned[-1] - turned[0] >= width:
        pairs = before.shape[-1] // 2
    old, new = before[:, turned], after[:, turned]
    read, gave = (_in_halves(old), _in_pairs(old)), (_in_halves(new), _in_pairs(new))
    for name, plain, rotated in (
        ("halves", read[0], gave[0]),
        ("interleaved", read[1], gave[1]),
        ("interleaved, returned in halves", read[1], gave[0]),
    ):
        # Some tables of angles also scale (YaRN).
        factor = rotated.norm() / plain.norm()
        if torch.allclose(factor * plain.abs(), rotated.abs(), rtol=1e-3, atol=1e-5):
            steps = _steps(torch.angle(rotated / plain), rotation.before)
            return f"{name}{share}", Angles(steps, pairs)
    return f"not recognised{share}", None


def _in_halves(vectors: Tensor) -> Tensor:
    """Pairs of a dimension of the first half and one of the second, as complex numbers."""
    first, second = vectors.chunk(2, -1)
    return torch.complex(first, second)


def _in_pairs(vectors: Tensor) -> Tensor:
    """Pairs of neighbouring dimensions, as complex numbers."""
    return torch.complex(vectors[:, 0::2], vectors[:, 1::2])


def _steps(turns: Tensor, vectors: Tensor) -> Tensor:
    """How far each pair turns from a token to the next."""
    width = turns.shape[-1]
    by_token = turns.reshape(*vectors.shape[:-1], width)
    steps = [turns.new_zeros(width)]
    for axis in range(by_token.dim() - 1):
        if by_token.shape[axis] > 1:
            step = by_token.select(axis, 1) - by_token.select(axis, 0)
            step = torch.remainder(step + math.pi, 2 * math.pi) - math.pi
            steps.append(step.reshape(-1, width).median(0).values.abs())
    # All texts and all heads turn alike, so that only tokens differ.
    return max(steps, key=lambda step: step.max().item())


def _same_angles(angles: Angles, other: Angles) -> bool:
    if angles.steps.shape != other.steps.shape:
        return False
    return torch.allclose(angles.steps, other.steps, rtol=1e-2, atol=1e-5)


def _base_in_words(angles: Angles) -> str:
    """The base of a table in which each angle is the same share of the one before."""
    turning = angles.steps > LEAST_ANGLE
    seen = int(turning.sum())
    share = _share(angles.steps[turning])
    if share is None:
        return "no single base"
    # So many of them are not too small to be seen.
    most = 1 + math.floor(math.log(LEAST_ANGLE) / math.log(share))
    pairs, axes = angles.pairs, ""
    if not bool(turning[:seen].all()) or seen < min(len(turning), most) - 1:
        # Along a row of an image, the pairs that stand for its columns alone turn.
        axes = ", by row and column"
        pairs = pairs // 2 if seen >= most - 1 else seen
    return f"{float(f'{share**-pairs:.3g}'):,.0f}{axes}"


def _share(steps: Tensor) -> float | None:
    """What share of an angle the next one is, if they begin at 1 and all have the same."""
    if len(steps) < 2 or abs(steps[0].item() - 1) > 0.02:
        return None
    logarithms = steps.log()
    slope = (logarithms[-1] - logarithms[0]) / (len(steps) - 1)
    expected = slope * torch.arange(len(steps), dtype=steps.dtype)
    if not torch.allclose(logarithms - logarithms[0], expected, atol=0.02, rtol=0.01):
        return None
    return math.exp(slope.item())
