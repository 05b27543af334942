"""The precision of a forward pass: float64 throughout, and a copy of a model in float64."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from analysis_lib.capture.inputs import Batch
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel


class _DoublePrecision(TorchFunctionMode):
    """Inside it nothing is computed in float32, to which transformers converts some norms, rotations and masks."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def full_precision(loaded: LoadedModel) -> AbstractContextManager:
    """Inside it a model in float64 computes everything in float64; others run as they are."""
    return _DoublePrecision() if loaded.model.dtype == torch.float64 else nullcontext()


def in_double(loaded: LoadedModel, batch: Batch) -> tuple[LoadedModel, Batch]:
    """A copy of a model and of a batch in float64; weights are converted one by one, to keep the memory small.

    Raises:
        AnalysisError: there is no memory for the copy, or the device has no float64.
    """
    double = copy.copy(loaded)
    vars(double).pop("stacks", None)
    try:
        memo = {id(p): nn.Parameter(p.detach().double(), requires_grad=False) for p in loaded.model.parameters()}
        memo |= {id(b): b.double() for b in loaded.model.buffers() if b.is_floating_point()}
        double.model = copy.deepcopy(loaded.model, memo)
        inputs = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.inputs.items()
        }
    except (RuntimeError, TypeError) as error:
        raise AnalysisError(
            f"{loaded.name}: whether the captured forward pass equals the plain one is in doubt, and a copy of the "
            f"model in float64, which would decide it, cannot be made on {loaded.device} "
            f"({str(error).splitlines()[0]}): give another device, or free some memory"
        ) from error
    return double, replace(batch, inputs=inputs)
