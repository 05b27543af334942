"""Devices of models, and weights that lie elsewhere until they are used."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from analysis_lib.errors import AnalysisError, shown

# Use large pages for large tensors: clearing memory 4 kB at a time takes a tenth of a measurement.
# PyTorch reads this variable with its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def usable(device: str | torch.device | None) -> str:
    """The given device; by default, a GPU if there is one, else the CPU.

    Raises:
        AnalysisError: the device cannot be used.

    >>> usable("cpu")
    'cpu'
    """
    known = "cpu, cuda" if torch.cuda.is_available() else "cpu"
    if device is None:
        return known.rpartition(", ")[2]
    unusable = AnalysisError(f"the device {shown(device)} cannot be used here: give one of {known}")
    if not isinstance(device, str | torch.device):
        raise unusable
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise unusable from error
    # torch accepts any index of a CPU, of which there is one.
    if chosen.type == "cpu" and chosen.index and str(chosen) not in of_kind("cpu"):
        raise unusable
    return str(device)


def of_kind(kind: str) -> list[str]:
    """The names of all devices of a kind that this process sees.

    Of GPUs, it sees those that CUDA_VISIBLE_DEVICES names.

    >>> of_kind("cpu")
    ['cpu']
    """
    count = torch.get_device_module(kind).device_count()
    return [kind] if count == 1 else [f"{kind}:{index}" for index in range(count)]


def for_workers(device: str, first: torch.device, count: int) -> list[str]:
    """The device of each of ``count`` workers on this machine.

    Workers take the devices of a kind in turn. A device with a number is that of all of them.

    Args:
        device: as the user chose it, such as ``cuda``.
        first: the device of the first worker, which is this process.

    >>> for_workers("cpu", torch.device("cpu"), 2)
    ['cpu', 'cpu']
    """
    if torch.device(device).index is not None:
        return [device] * count
    names = of_kind(first.type)
    begin = names.index(str(first)) if str(first) in names else 0
    return [names[(begin + worker) % len(names)] for worker in range(count)]


def used(model: nn.Module) -> list[str]:
    """The names of the devices on which a model computes: several with a device map."""
    names = {str(device) for module in model.modules() for device in _computing(module)}
    return sorted(names) or [str(model.device)]


def placed(values: Tensor, model: nn.Module) -> Tensor:
    """Values on the device of a model and, if they are no integers, in its precision."""
    dtype = model.dtype if values.is_floating_point() else values.dtype
    return values.to(device_of(model), dtype)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs."""
    device = model.device
    if device.type == "meta":  # The first weights lie elsewhere until they are used.
        for module in model.modules():
            for device in _computing(module):
                return device
    return device


def _computing(module: nn.Module) -> Iterator[torch.device]:
    """Device on which accelerate runs a module, if it moves the weights of the module."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            yield torch.device(device)


def in_place(module: nn.Module) -> AbstractContextManager:
    """A context in which the weights of a module are on the device that computes.

    With a device map, they lie elsewhere until they are used.
    """
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, one module at a time: a device map may keep them on disk.

    The packed weights of quantised layers are unpacked.
    """
    for path, module in model.named_modules():
        with in_place(module):
            packed = getattr(module, "weight", None)
            tensors = {"weight": packed().dequantize()} if callable(packed) else {}
            tensors |= dict(module.named_parameters(recurse=False))
            tensors |= dict(module.named_buffers(recurse=False))
            for name, tensor in tensors.items():
                if tensor.is_meta:
                    raise AnalysisError(
                        f"{path}.{name} has no values, on torch's meta device: load the weights"
                    )
                yield f"{path}.{name}".removeprefix("."), unpacked(tensor)


def unpacked(tensor: Tensor) -> Tensor:
    """The dequantised values of a quantised tensor; any other tensor as it is."""
    return tensor.dequantize() if _is_packed(tensor) else tensor


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is quantised; torchao and quanto have tensor classes of their own."""
    return tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize


def without_gradients(model: nn.Module) -> AbstractContextManager:
    """A context in which a model keeps nothing for gradients.

    This is PyTorch's inference mode, or for packed weights of quanto, which cannot be unpacked in
    it, the slightly slower ``no_grad``.
    """
    packed = any(map(_is_packed, model.parameters()))
    return torch.no_grad() if packed else torch.inference_mode()


def embedded_words(model: nn.Module) -> int | float:
    """Number of token ids that a model embeds; infinite if it hashes them or reads no text."""
    embeddings = input_embeddings(model)
    # Embeddings may be wrapped by adapters, or quantised.
    for module in [] if embeddings is None else embeddings.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return len(weight)
    return math.inf


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The embeddings of token ids, if a model has any: CANINE embeds hashes."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None
