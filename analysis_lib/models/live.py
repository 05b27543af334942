"""Models that a program holds, such as one in training: what to measure of them, and how they stay as they are."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import nn

from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import weights
from analysis_lib.models.loaded import LoadedModel

# Where what wraps a model (torch.compile, DistributedDataParallel) keeps it.
_WRAPPED = ("_orig_mod", "module")


def live_model(model: nn.Module, processor: object) -> LoadedModel:
    """A model of transformers that lives in this process, with or without a head, as what can be measured.

    Args:
        model: it, perhaps compiled or wrapped for several devices.
        processor: its tokenizer, image processor or feature extractor.

    Raises:
        AnalysisError: it is no model of transformers, or comes without a processor.
    """
    while wrapper := next((name for name in _WRAPPED if isinstance(getattr(model, name, None), nn.Module)), None):
        model = getattr(model, wrapper)
    if not isinstance(model, transformers.PreTrainedModel):
        raise AnalysisError(f"a {type(model).__name__} is no model of transformers: give one, or a name or folder")
    name = model.config.name_or_path or type(model).__name__
    if not callable(processor):
        raise AnalysisError(f"{name} comes alone: give the object that prepares its input, as tokenizer= or processor=")
    bare = model.base_model
    if bare is model and "ForConditionalGeneration" in type(model).__name__:
        # T5 and its like: the head stands beside encoder and decoder, and not on a model without one.
        with torch.device("meta"):
            bare = transformers.AutoModel.from_config(model.config)
        for part, module in model.named_children():
            if hasattr(bare, part):
                setattr(bare, part, module)
    return LoadedModel(name, _weights_hash(bare), bare, processor)


def _weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256(repr(model.config).encode())
    for name, weight in weights(model):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"weights sha256:{digest.hexdigest()}"


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Inside it a model is in evaluation mode and not compiled; afterwards each of its modules is as it was."""
    states = ((module, module.training, module._compiled_call_impl) for module in model.modules())
    before = [(module, training, compiled) for module, training, compiled in states if training or compiled]
    try:
        for module, *_ in before:
            module.training, module._compiled_call_impl = False, None
        yield
    finally:
        for module, training, compiled in before:
            module.training, module._compiled_call_impl = training, compiled
