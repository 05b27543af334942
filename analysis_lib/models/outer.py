"""The outermost model of a user: it is what runs in a pass, and its body is captured inside it."""

import inspect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from analysis_lib.errors import AnalysisError
from analysis_lib.models.calls import first_vectors, with_first


class Answer(NamedTuple):
    """The outputs of one pass.

    Attributes:
        body: the output of the body.
        outer: the output of the outermost model.
        module: what gave out ``body``: the body, or a part of it that a head calls.
    """

    body: ModelOutput
    outer: object
    module: nn.Module


def answer(
    name: str,
    body: PreTrainedModel,
    outer: nn.Module,
    inputs: Mapping[str, object],
    predicting: bool = False,
    shortened: nn.Module | None = None,
) -> Answer:
    """One pass of the outermost model.

    Args:
        name: the name of the model, for errors.
        body: the model that is measured, inside ``outer``.
        outer: the model that is called.
        inputs: the arguments, by name.
        predicting: whether the predictions of all tokens are needed.
        shortened: a module of which the rest of ``outer`` reads the output for the first token
            alone, since nothing else is needed of it.

    Raises:
        AnalysisError: the body runs several times in a pass, or never.
    """
    if outer is body:
        output = body(**inputs)
        return Answer(output, output, body)
    outputs: list[tuple[nn.Module, ModelOutput]] = []

    def keep(module: nn.Module, _args: tuple, output: ModelOutput) -> ModelOutput | None:
        outputs.append((module, output))
        return of_tokens(output, slice(1)) if module is shortened else None

    handles = []
    try:
        for part in body.modules():
            if isinstance(part, PreTrainedModel):
                handles.append(part.register_forward_hook(keep))
        given = outer(**accepted(outer, inputs, predicting))
    finally:
        for handle in handles:
            handle.remove()
    module, output = _body_output(name, body, outer, outputs)
    return Answer(output, given, module)


def of_tokens(output: ModelOutput, tokens: slice) -> ModelOutput:
    """The output of a body with the vectors of some tokens in place of those of all."""
    return with_first(output, first_vectors(output)[:, tokens])


def _body_output(
    name: str, body: PreTrainedModel, outer: nn.Module, outputs: list[tuple[nn.Module, ModelOutput]]
) -> tuple[nn.Module, ModelOutput]:
    """The body and its output, or those of its parts if a head calls them one by one."""
    ran = [module for module, _ in outputs]
    # A body that runs as a whole ends last.
    last = body if body in ran or not ran else ran[-1]
    if ran.count(last) != 1:
        raise AnalysisError(
            f"{name}: a pass of its {type(outer).__name__} runs its {type(last).__name__} "
            f"{ran.count(last)} times, and one time can be measured: give a model that runs it "
            f"once, or the {type(last).__name__} itself"
        )
    given = dict(outputs)
    output = given[last]
    encoder = getattr(body, "encoder", None)
    if last is not body and encoder is not last and encoder in given:
        output["encoder_last_hidden_state"] = given[encoder].last_hidden_state
    return last, output


def accepted(outer: nn.Module, inputs: Mapping[str, object], predicting: bool) -> dict[str, object]:
    """The arguments that a model accepts, by name, as ``transformers.Trainer`` selects them."""
    taken = parameters_of(outer)
    known = {name: value for name, value in inputs.items() if name in taken or takes_all(taken)}
    base = without_adapters(outer)
    if not predicting and "logits_to_keep" in parameters_of(base):
        # Over a large vocabulary, the predictions of all tokens would need more memory than all the
        # rest.
        known["logits_to_keep"] = 1
    return known


def without_adapters(outer: nn.Module) -> nn.Module:
    """The model around which peft has put its adapters, or the model itself if it has none."""
    return outer.get_base_model() if hasattr(outer, "get_base_model") else outer


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of the forward pass of a model."""
    return inspect.signature(model.forward).parameters


def takes_all(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function takes arguments of any name."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())


def is_plain_head(body: PreTrainedModel, outer: nn.Module) -> bool:
    """Whether all modules around a body are code of transformers, without hooks."""
    return all(
        type(module).__module__.startswith("transformers.")
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
        for module in _around(body, outer)
    )


def _around(body: PreTrainedModel, outer: nn.Module) -> Iterator[nn.Module]:
    """The modules that contain a body, or parts of it."""
    inside = {*body.modules()}
    for module in outer.modules():
        if module not in inside and not inside.isdisjoint(module.modules()):
            yield module


def is_activated_by_tokens(outer: nn.Module) -> bool:
    """Whether a model has an adapter that acts from some tokens on (activated LoRA)."""
    settings = getattr(outer, "peft_config", None) or {}
    return any(getattr(each, "alora_invocation_tokens", None) for each in settings.values())
