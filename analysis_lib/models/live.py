"""Models that a program holds, such as one in training: they are measured without being changed."""

import hashlib

import torch
import transformers
from torch import nn

from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import weights
from analysis_lib.models.fingerprint import fingerprint
from analysis_lib.models.loaded import LoadedModel
from analysis_lib.models.names import ModelName

# Attributes of wrappers (torch.compile, DistributedDataParallel, FullyShardedDataParallel) that
# hold the model.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "module")


def live_model(model: nn.Module, processor: object, part: str = "") -> LoadedModel:
    """A model object of transformers in this process, with or without a head, ready to be measured.

    Args:
        model: the model, perhaps compiled or wrapped for several devices.
        processor: its tokenizer, image processor or feature extractor.
        part: the path of the part to measure, if any.

    Raises:
        AnalysisError: it is no model of transformers, has no processor, or has no such part.
    """
    outer = _unwrapped(model)
    model = outer
    adapters = ""
    if is_adapted(outer):
        _refuse_prompts(outer)
        adapters = "".join(f"+{name}" for name in outer.active_adapters)
        model = outer.get_base_model()
    if not isinstance(model, transformers.PreTrainedModel):
        raise AnalysisError(
            f"a {type(model).__name__} is no model of transformers: give one, or a name or folder"
        )
    name = (model.config.name_or_path or type(model).__name__) + adapters
    if not callable(processor):
        raise AnalysisError(
            f"{name} comes alone: give the object that prepares its input, as tokenizer= or "
            "processor="
        )
    bare = bare_model(model)
    revision = _revision(outer)
    if part:
        return LoadedModel(str(ModelName(name, part=part)), revision, bare, processor, part=part)
    loaded = LoadedModel(name, revision, bare, processor, outer=outer)
    if predicts_tokens(model):
        loaded.headed = outer
    return loaded


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of compilers and of parallel training."""
    while inner := next(
        (name for name in _WRAPPED if isinstance(getattr(model, name, None), nn.Module)), None
    ):
        if model._forward_hooks or model._forward_pre_hooks:
            raise AnalysisError(
                f"there are hooks on the {type(model).__name__} around a model: put them on the "
                "model"
            )
        model = getattr(model, inner)
    return model


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one of peft."""
    return type(model).__module__.startswith("peft.")


def _refuse_prompts(adapted: nn.Module) -> None:
    if adapted.active_peft_config.is_prompt_learning:
        raise AnalysisError(
            "an adapter that puts vectors before a text is not measured: give one such as LoRA"
        )


def predicts_tokens(model: nn.Module) -> bool:
    """Whether a model is a language model with its head."""
    heads = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MASKED_LM_MAPPING)
    return any(isinstance(model, classes.get(type(model.config), ())) for classes in heads)


def bare_model(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model without its head.

    If the head is beside several parts, as in T5, it is a new model of the same parts.
    """
    known = transformers.MODEL_MAPPING.get(type(model.config), None)
    if isinstance(known, type) and isinstance(model, known):
        # In some architectures, the attribute named like a body is only their encoder.
        return model
    bare = model.base_model
    if bare is not model or not isinstance(known, type):
        return bare
    with torch.device("meta"):
        whole = known(model.config)
    parts = [name for name, part in whole.named_children() if [*part.parameters()]]
    if not all(hasattr(model, name) for name in parts):
        return model
    for name in parts:
        setattr(whole, name, getattr(model, name))
    return whole


def _revision(model: nn.Module) -> str:
    """A hash of the weights, and of adapters and hooks as far as they can be described."""
    digest = hashlib.sha256(f"{type(model).__qualname__} {model.config!r}".encode())
    for name, module in model.named_modules():
        settings = [
            getattr(module, part, None)
            for part in ("scaling", "active_adapters", "disable_adapters")
        ]
        if isinstance(settings[0], dict) or module._forward_hooks or module._forward_pre_hooks:
            digest.update(
                repr([name, settings, module._forward_hooks, module._forward_pre_hooks]).encode()
            )
    digest.update(fingerprint(weights(model)).encode())
    return f"weights sha256:{digest.hexdigest()}"
