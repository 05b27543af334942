"""Where tensors are computed, and the weights that lie elsewhere until they are used."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from analysis_lib.errors import AnalysisError, shown

# Large tensors lie on large pages: a system that clears memory 4 kB at a time takes a tenth of a
# measurement for it. PyTorch reads this with its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def usable(device: str | torch.device | None) -> str:
    """The given device; without one, a GPU where there is one, else the CPU.

    Raises:
        AnalysisError: nothing can be computed there.

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
    # torch takes any number of a processor, of which there is one.
    if chosen.type == "cpu" and chosen.index:
        raise unusable
    return str(device)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs."""
    device = model.device
    if device.type == "meta":  # Its first weights lie elsewhere until they are used.
        for module in model.modules():
            for device in _computing(module):
                return device
    return device


def _computing(module: nn.Module) -> Iterator[torch.device]:
    """Where accelerate lets a module compute, if it is one of those whose weights it moves."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            yield torch.device(device)


def in_place(module: nn.Module) -> AbstractContextManager:
    """Inside it the weights of a module are where it computes: with a device map, they lie
    elsewhere until then.
    """
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers by name, one module at a time: with a device map, some lie on disk
    until then.

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
    """The numbers that the tensor of a quantised layer stands for; any other is itself."""
    return tensor.dequantize() if _is_packed(tensor) else tensor


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is one of a quantised layer; those of torchao and quanto are classes of
    their own.
    """
    return tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize


def without_gradients(model: nn.Module) -> AbstractContextManager:
    """Inside it a model computes and keeps nothing for gradients.

    Packed weights of quanto cannot be unpacked in PyTorch's inference mode, which is a little
    faster.
    """
    packed = any(map(_is_packed, model.parameters()))
    return torch.no_grad() if packed else torch.inference_mode()


def embedded_words(model: nn.Module) -> int | float:
    """How many token ids a model embeds; infinitely many where they are hashed, or no text is
    read.
    """
    embeddings = input_embeddings(model)
    # Adapters wrap them, and others are quantised.
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
