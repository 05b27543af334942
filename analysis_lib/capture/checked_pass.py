"""A captured forward pass, run only after a check of the capture against the plain forward pass."""

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from analysis_lib.capture import proof
from analysis_lib.capture.activations import (
    LOSS,
    MASKED,
    OF_ATTENTION,
    SCORES,
    SPACES,
    WEIGHTS,
    Activations,
    Receive,
)
from analysis_lib.capture.batching import batches
from analysis_lib.capture.forward_pass import NotCaptured, captured_pass, given_out
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.memory import memory_errors
from analysis_lib.capture.projections import NotLinear, is_plain
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.devices import unpacked, without_gradients
from analysis_lib.models.loading import lacks_head
from analysis_lib.models.outer import answer, is_activated_by_tokens, is_plain_head
from analysis_lib.models.probe import evaluated

# Largest difference between captured and plain output, as a share of the largest activation. In
# float32 it allows some rounding; in float64 half of the digits must agree.
ROUNDING = 128 * torch.finfo(torch.float32).eps
AGREEMENT = torch.finfo(torch.float64).eps ** 0.5
# Number of tokens of a text for which the two are compared.
CHECKED = 128
# Attributes of a tensor, and what says as little of its numbers.
DESCRIPTIONS = ("__get__", "is_floating_point")
# Functions of tensors that change their first argument and do not end in an underscore.
CHANGES = ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def run(
    loaded: LoadedModel,
    batch: Batch,
    needs: frozenset[str],
    receive: Receive,
    maps: str = "flatten",
    changes: Changes | None = None,
) -> None:
    """One forward pass of a batch, with ``receive`` called for each layer in turn.

    Args:
        needs: the activations to capture, see ``activations.py``.
        receive: called with the :class:`Activations` of layer 0, 1, ...
        maps: ``flatten`` or ``positions``, see :class:`Settings`.
        changes: the interventions.

    Raises:
        OutOfMemory: the batch does not fit.
        AnalysisError: the attention of a block was not captured, or not exactly.
    """
    check(loaded, batch)
    memory = memory_errors(loaded, batch)
    with loaded.lock, evaluated(loaded.outer), _full_precision(loaded), memory:
        # A metric of several spaces leaves out those that the model does not support.
        needs = needs.difference(loaded.unsupported)
        captured_pass(loaded, batch, needs, receive, maps, changes)


def check(loaded: LoadedModel, batch: Batch) -> None:
    """Compare the captured forward pass of a model with the plain one, unless that has been done.

    A proof is kept, see ``proof.py``: later processes do not repeat it.

    Raises:
        AnalysisError: they differ by more than rounding.
    """
    with loaded.lock:
        if not getattr(loaded, "_checked", False):
            if is_activated_by_tokens(loaded.outer):
                loaded.unsupported[SCORES] = "its adapter acts on some tokens of a text alone"
            if proof.restore(loaded):
                loaded._checked = True
                return
            with evaluated(loaded.outer):
                _leave_out_plain_head(loaded, batch.head(2).beginning(CHECKED))
                _check(loaded, batch)
            if loaded._checked:
                proof.keep(loaded)


def _leave_out_plain_head(loaded: LoadedModel, batch: Batch) -> None:
    """Run the body alone if a plain head of transformers does not change what it computes.

    Such a head costs time and memory, and may have needs that the body does not, such as a padding
    token.
    """
    if loaded.outer is loaded.model or not is_plain_head(loaded.model, loaded.outer):
        return
    with without_gradients(loaded.outer), _full_precision(loaded):
        try:
            alone = given_out(answer(loaded.name, loaded.model, loaded.model, batch.inputs).body)
            inside = given_out(loaded.answer(batch.inputs).body)
            is_same = torch.equal(alone, inside)
        except Exception:  # Of the head; the check below reports errors of the body.
            is_same = True
    if is_same:
        loaded.outer = loaded.model


def lacking(loaded: LoadedModel, items: Sequence, settings: Settings) -> dict[str, str]:
    """Inputs of metrics that cannot be captured from a model, with the reason.

    A few items are read only in case of doubt: in a listed architecture, keys are a linear function
    of their input if their projection has nothing but weight and bias.
    """
    specs = [*loaded.attending]
    if any(spec.key is None for _, spec in specs):
        kinds = {
            type(block.get_submodule(spec.module)).__name__
            for block, spec in specs
            if spec.key is None
        }
        reason = f"what the keys of a {min(kinds)} are made from could not be shown"
        loaded.unsupported.update(dict.fromkeys((SCORES, "attention_input"), reason))
    plain = (
        is_plain(block.get_submodule(f"{spec.module}.{spec.key}"))
        for block, spec in specs
        if spec.key
    )
    if not loaded.layout.listed or not all(plain):
        for batch in itertools.islice(
            batches(loaded, items, [0] * len(items), settings, Reading()), 1
        ):
            check(loaded, batch)
    for need, objective in ((LOSS, "next"), (MASKED, "masked")):
        if reason := lacks_head(loaded, objective):
            loaded.unsupported[need] = reason
    return loaded.unsupported


def _check(loaded: LoadedModel, batch: Batch) -> None:
    """Compare the captured forward pass of two utterances with the plain one.

    Of long texts, the beginning is read.

    The two are rounded differently, more so for larger scores, and differently on each processor.
    Where they differ by more than ``ROUNDING``, both are repeated in float64: an error of the
    capture is as large there, whereas rounding shrinks by eight orders of magnitude.

    Raises:
        AnalysisError: the model cannot read the batch; they differ by more than rounding, so that
            no measurement could be trusted; or float64 is needed to decide and cannot be had.
    """
    few = batch.head(2).beginning(CHECKED)
    try:
        difference = _difference(loaded, few)
    except NotLinear as error:
        loaded.unsupported[SCORES] = str(error)
        difference = _difference(loaded, few)
    except NotCaptured as error:
        if not any(spec.own for _, spec in loaded.attending):
            raise
        reason = str(error).removeprefix(f"{loaded.name}: ")
        loaded.unsupported.update(dict.fromkeys(OF_ATTENTION, reason))
        difference = _difference(loaded, few)
    decided_in_double, difference = _decided(loaded, few, difference)
    computed = any(spec.own for _, spec in loaded.attending)
    if decided_in_double and difference > AGREEMENT and computed:
        # A module that computes attention by itself and is not captured runs unchanged.
        reason = "its attention, which its modules compute by themselves, is not captured exactly"
        loaded.unsupported.update(dict.fromkeys(OF_ATTENTION, reason))
        decided_in_double, difference = _decided(loaded, few, _difference(loaded, few))
    if decided_in_double and difference > AGREEMENT:
        raise AnalysisError(
            f"{loaded.name}: the captured forward pass differs from the plain one by "
            f"{difference:.1e} of the largest activation in float64, where rounding stays below "
            f"{AGREEMENT:.1e}: the attention of this architecture is not captured exactly, so it "
            "cannot be measured; give another model"
        )
    # If activations are not finite, the shard that follows raises an error that names the first
    # such layer.
    loaded._checked = not math.isnan(difference)


def _decided(loaded: LoadedModel, batch: Batch, difference: float) -> tuple[bool, float]:
    """Whether the difference was measured in float64, and its size, measured there if in doubt."""
    if loaded.model.dtype == torch.float64:
        return True, difference
    if difference > ROUNDING:
        return True, _difference_in_double(loaded, batch)
    return False, difference


def _difference(loaded: LoadedModel, batch: Batch, dtype: torch.dtype | None = None) -> float:
    """Largest difference between captured and plain output, as a share of the largest activation.

    NaN if the plain output is not finite.

    Args:
        dtype: what is computed in; the precision of the weights by default.
    """
    needs = frozenset({*SPACES, WEIGHTS, SCORES}).difference(loaded.unsupported)
    with without_gradients(loaded.outer), _full_precision(loaded):
        try:
            with memory_errors(loaded, batch):
                plain = given_out(loaded.answer(batch.inputs).body)
        except AnalysisError:
            raise
        except Exception as error:
            raise AnalysisError(
                f"{loaded.name} cannot read what its {type(loaded.processor).__name__} makes of "
                f"the data ({type(error).__name__}: {error}): give the one that belongs to it, or "
                "other data"
            ) from error
        within = torch.finfo(dtype or loaded.model.dtype).eps ** 0.5
        with memory_errors(loaded, batch):
            captured = captured_pass(loaded, batch, needs, partial(_prove_scores, within))
    if not plain.isfinite().all():
        return math.nan
    tokens = batch.shifted or batch.tokens
    if tokens is not None and plain.dim() == 3 and plain.shape[:2] == tokens.mask.shape:
        mask = tokens.on(plain.device).mask
        captured = captured[mask]
        plain = plain[mask]
    difference = (captured - plain).abs().max().nan_to_num(math.inf).item()
    return difference / plain.abs().max().item() if difference else 0.0


def _prove_scores(within: float, activations: Activations) -> None:
    """Check that the terms of a layer's scores add up to the scores, over all pairs.

    Args:
        within: the rounding allowed, as a share of the scores.

    Raises:
        NotLinear: they differ by more.
    """
    if (scores := activations.scores) is None:
        return
    key = activations.spaces["key"].values
    key = key.repeat_interleave(scores.query.shape[1] // key.shape[1], 1)
    counted = scores.visibility.queries.counted[:, None, :, None]
    queries = scores.visibility.over_queries(scores.query * counted)
    if scores.by_distance is not None:
        queries = queries + scores.by_distance
    by_key = key * queries
    expected, size = (
        scores.by_type(part.sum(-1, keepdim=True)).squeeze(-1) for part in (by_key, by_key.abs())
    )
    total = sum(term for name, term in scores.terms.items() if name != "position")
    if ((total - expected).abs() > within * size).any():
        raise NotLinear("what its scores are made of does not add up to them")


class _DoublePrecision(TorchFunctionMode):
    """A context in which everything is computed in float64, whatever the weights of a model are.

    Each operation gets its operands in float64, so that a weight is converted when it is used, and
    no second copy of the model is ever in memory. transformers converts some norms, rotations and
    masks to float32 by itself: these stay in float64, too.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return unpacked(args[0]).double()
        if function is Tensor.view:  # Bytes of a file, which keep their type.
            return function(*args, **kwargs)
        if function is torch.full and "dtype" not in kwargs:
            # XGLM turns the lowest float64 number into a float32 number.
            value = args[1] if len(args) > 1 else kwargs["fill_value"]
            kwargs = {**kwargs, "dtype": torch.float64 if isinstance(value, float) else None}
        if function is functional.embedding:
            # Of a large vocabulary, the words that are read alone.
            return _in_double(function(*args, **kwargs))
        name = getattr(function, "__name__", "")
        if name in DESCRIPTIONS:
            # A weight is not converted to ask for its type.
            return _in_double(function(*args, **kwargs))
        changed = []
        if args and (name in CHANGES or (name.endswith("_") and not name.endswith("__"))):
            # What is changed in place cannot be replaced by a copy.
            changed, args = args[:1], args[1:]
            if isinstance(changed[0], Tensor) and changed[0].dtype != torch.float64:
                return function(*changed, *args, **kwargs)
        args = [_in_double(value) for value in args]
        kwargs = {name: _in_double(value) for name, value in kwargs.items()}
        return function(*changed, *args, **kwargs)


def _in_double(value: object) -> object:
    """The value with all floating-point tensors and types of them in float64.

    A quantised tensor is dequantised.
    """
    if isinstance(value, Tensor):
        is_converted = value.is_floating_point() and value.dtype != torch.float64
        return unpacked(value).double() if is_converted else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if type(value) in (list, tuple):
        return type(value)(_in_double(part) for part in value)
    return value


def _full_precision(loaded: LoadedModel) -> AbstractContextManager:
    """A context in which a model in float64 computes everything in float64; no effect on others."""
    return _DoublePrecision() if loaded.model.dtype == torch.float64 else nullcontext()


def _difference_in_double(loaded: LoadedModel, batch: Batch) -> float:
    """:func:`_difference` in float64.

    Raises:
        AnalysisError: the device has no float64, or no memory for it.
    """
    try:
        inputs = {name: _in_double(value) for name, value in batch.inputs.items()}
        torch.zeros((), dtype=torch.float64, device=batch.device)
    except (RuntimeError, TypeError) as error:
        raise AnalysisError(
            f"{loaded.name}: whether the captured forward pass equals the plain one is in doubt, "
            f"and float64, which would decide it, cannot be had on {loaded.device} "
            f"({str(error).splitlines()[0]}): give another device, or free some memory"
        ) from error
    with _DoublePrecision():
        return _difference(loaded, replace(batch, inputs=inputs), torch.float64)
