"""A traced pass of a model over a short example: inputs and outputs of modules, and attention."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from analysis_lib.models.calls import arguments_of, first_of_call, first_vectors, signature_of
from analysis_lib.models.devices import embedded_words, placed, without_gradients
from analysis_lib.models.factors import AttentionSeen, OwnAttention

# Name under which the attention function of a probe is registered.
PROBE = "analysis_lib_probe"
# Number of tokens of an example; a prime number, so that padding to a window is noticed.
TOKENS = 13
# Attribute by which transformers marks a model whose hooks collect hidden states.
_MARK = "_output_capturing_hooks_installed"
KINDS = {
    "input_ids": "text",
    "pixel_values": "image",
    "input_values": "audio",
    "input_features": "audio",
}
# Largest difference between two tensors computed in different ways, as a share of the largest
# number.
ROUNDING = 1e-3


def same(tensor: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if tensor is None or tensor.shape != other.shape:
        return False
    tolerance = max(ROUNDING, 8 * torch.finfo(other.dtype).eps)
    return bool((tensor - other).abs().max() <= tolerance * other.abs().max())


def identical(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in every number."""
    if tensor is None or other is None:
        return False
    return tensor.shape == other.shape and torch.equal(tensor, other)


# --- The example ----------------------------------------------------------------------------------


def kind_of(model: type[PreTrainedModel] | PreTrainedModel) -> str:
    """Kind of a model's input: ``text``, ``image`` or ``audio``."""
    made = model if isinstance(model, type) else type(model)
    # A part of a model may declare the main input of the whole.
    _, first, *_ = signature_of(made).parameters
    return KINDS.get(first) or KINDS.get(model.main_input_name, "text")


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether a model has an encoder and a decoder."""
    return getattr(model.config, "is_encoder_decoder", False)


def example(model: PreTrainedModel, processor: Callable) -> dict[str, Tensor | bool]:
    """A short input: a few tokens, or the processor's output for an image or a sound."""
    kind = kind_of(model)
    if kind == "text":
        made = _some_tokens(model)
    elif kind == "image":
        # Imported late: models of text need no images.
        from PIL import Image

        mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
        image = Image.effect_mandelbrot((256, 256), (-2, -1, 1, 1), 50).convert(mode)
        made = processor(image, return_tensors="pt")
    else:
        rate = processor.sampling_rate
        made = processor(np.sin(np.arange(rate) / 20), sampling_rate=rate, return_tensors="pt")
    inputs = {name: torch.as_tensor(values) for name, values in made.items()}
    if kind == "text" and is_encoder_decoder(model):
        # One token fewer, to tell cross-attention from self-attention.
        inputs |= {f"decoder_{name}": values[:, :-1] for name, values in inputs.items()}
    accepted = signature_of(type(model)).parameters
    given = {name: placed(values, model) for name, values in inputs.items() if name in accepted}
    if getattr(model.config, "use_cache", False):
        given["use_cache"] = False
    return given


def _some_tokens(model: PreTrainedModel) -> dict[str, Tensor]:
    """A few plain tokens: none stands for an image or has another special meaning."""
    config = model.config.get_text_config()
    special = set()
    for name, value in {**model.config.to_dict(), **config.to_dict()}.items():
        if name.endswith(("_token_id", "_token_index")):
            values = value if isinstance(value, list) else [value]
            special.update(values)
    longest = getattr(config, "max_position_embeddings", None)
    count = TOKENS
    if isinstance(longest, int) and longest > 0:
        count = min(TOKENS, longest)
    words = int(min(embedded_words(model), 256))
    plain = [index for index in range(words) if index not in special]
    ids = torch.tensor([[plain[(7 * index + 3) % len(plain)] for index in range(count)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# --- The pass -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One attention: a call of transformers' interface, or (``own``) the module's own code.

    It is plain if every query sees all keys.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    own: bool = False
    is_plain: bool = False


@dataclass(eq=False)
class Run:
    """One run of a module: its input and output, and the range of the attention calls inside it."""

    read: Tensor | None
    arguments: dict[str, object]
    returned: Tensor | None = None
    calls: range = range(0)


@dataclass(eq=False)
class Trace:
    """Record of a pass of a model.

    Attributes:
        model: the model.
        inputs: the arguments of the pass.
        runs: the runs of every module, in the order in which modules first ran.
        calls: the attentions whose queries and keys are known, in order.
        softmaxes: the modules that took a softmax of products.
        output: the output of the model.
    """

    model: PreTrainedModel
    inputs: Mapping[str, object]
    runs: dict[nn.Module, list[Run]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    softmaxes: list[nn.Module] = field(default_factory=list)
    output: object = None

    def __post_init__(self) -> None:
        self._running: list[nn.Module] = []
        # The example is one text, image or sound.
        self.seen = AttentionSeen(1, self._own_attention, self._softmax)

    @cached_property
    def names(self) -> dict[nn.Module, str]:
        """The path of each module in the model."""
        return {module: path for path, module in self.model.named_modules()}

    @cached_property
    def hidden(self) -> list[Sequence[Tensor]]:
        """The hidden states of each stack, as the model returns them."""
        if not isinstance(self.output, Mapping):
            return []
        named = [states for name, states in self.output.items() if name.endswith("hidden_states")]
        return [states for states in named if _are_tensors(states)]

    def read(self, module: nn.Module) -> Tensor | None:
        """Input of a module when it first ran."""
        return self.runs[module][0].read

    def returned(self, module: nn.Module) -> Tensor | None:
        """Output of a module when it last ran."""
        return self.runs[module][-1].returned

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record the start of a module: a forward pre-hook."""
        run = Run(first_of_call(args, kwargs), arguments_of(module, args, kwargs))
        run.calls = range(len(self.calls), len(self.calls))
        self.runs.setdefault(module, []).append(run)
        self._running.append(module)

    def end(self, module: nn.Module, _args: tuple, output: object) -> None:
        """Record the end of a module: a forward hook."""
        run = self.runs[module][-1]
        run.returned = first_vectors(output)
        run.calls = range(run.calls.start, len(self.calls))
        self._running.pop()

    def _softmax(self) -> None:
        self.softmaxes.extend(self._running[-1:])

    def _own_attention(self, attention: OwnAttention) -> None:
        if self._running:
            call = Call(self._running[-1], attention.query, attention.key, own=True)
            self.calls.append(call)


def _are_tensors(states: object) -> bool:
    if not isinstance(states, list | tuple) or not states:
        return False
    return all(isinstance(state, Tensor) for state in states)


def traced(model: PreTrainedModel, inputs: Mapping[str, object], **options: object) -> Trace:
    """Trace of one pass of a model.

    Attention through transformers' interface is recorded only inside :func:`probed`.
    """
    trace = Trace(model, inputs)
    with ExitStack() as undo:
        # Another pass must not meet the hooks of this one: Phi-4 Multimodal fails with them.
        undo.enter_context(_without_new_hooks(model))
        undo.callback(_current.reset, _current.set(trace))
        for module in model.modules():
            undo.callback(module.register_forward_pre_hook(trace.begin, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(trace.end).remove)
        undo.enter_context(without_gradients(model))
        undo.enter_context(trace.seen)
        trace.output = model(**inputs, **options)
    return trace


def traced_with_hidden_states(model: PreTrainedModel, inputs: Mapping[str, object]) -> Trace:
    """Trace of one pass in which a model returns its hidden states, if it can."""
    with suppress(Exception):  # Models fail in many ways.
        return traced(model, inputs, output_hidden_states=True)
    return traced(model, inputs)


_current: ContextVar[Trace | None] = ContextVar("_current", default=None)


def _traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **given: object,
) -> tuple[Tensor, None]:
    options = {name: given[name] for name in ("dropout", "scaling", "is_causal") if name in given}
    with ExitStack() as undo:
        if (trace := _current.get()) is not None:
            is_plain = attention_mask is None and given.get("is_causal") is False
            trace.calls.append(Call(module, query, key, is_plain=is_plain))
            # PyTorch's own attention inside this call is the same one.
            undo.enter_context(replaced(trace.seen, receive=None))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(PROBE, _traced_attention)
AttentionMaskInterface.register(PROBE, sdpa_mask)


@contextmanager
def probed(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model runs with the attention function of a probe, if it accepts one."""
    with attention_restored(model):
        with suppress(ValueError):
            model.set_attn_implementation(PROBE)
        yield


def with_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A configuration, and those of the parts of its model that it holds."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for part in parts if part is not None)]


@contextmanager
def attention_restored(model: nn.Module) -> Iterator[list[tuple[PreTrainedConfig, str | None]]]:
    """A context on leaving which each part of a model attends as before.

    It gives the configurations of the parts, outer ones first, with their attention
    implementation, which may differ between parts.
    """
    before = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for config in with_parts(module.config):
                before.append((config, config._attn_implementation))
    try:
        yield before
    finally:
        for config, implementation in before:
            # It goes to the parts of this configuration, too, which follow.
            config._attn_implementation = implementation


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """A context that removes the hooks added by transformers to collect hidden states."""
    before = {module: {*module._forward_hooks} for module in model.modules()}
    unmarked = [module for module in before if not hasattr(module, _MARK)]
    try:
        yield
    finally:
        for module, hooks in before.items():
            for number in {*module._forward_hooks} - hooks:
                del module._forward_hooks[number]
        for module in unmarked:
            vars(module).pop(_MARK, None)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode, not compiled, and returns named outputs.

    On leaving it, the model is as before.
    """
    with ExitStack() as undo:
        modules = [*model.modules()]
        for module in modules:
            if module.training or module._compiled_call_impl:
                undo.enter_context(replaced(module, training=False, _compiled_call_impl=None))
            config = getattr(module, "config", None)
            if getattr(config, "return_dict", True) is False:
                undo.enter_context(replaced(config, return_dict=True))
        # Mixtures of experts have no fast implementation in float64.
        doubles = (
            part
            for part in modules
            if isinstance(part, PreTrainedModel) and part.dtype == torch.float64
        )
        if (double := next(doubles, None)) is not None:
            undo.callback(double.set_experts_implementation, double.get_experts_implementation())
            double.set_experts_implementation("eager")
        for module in modules:
            if hasattr(module, "set_attention_type"):
                # BigBird would keep the attention that a short text switches it to.
                undo.callback(module.set_attention_type, module.attention_type)
        yield


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """A context in which attributes have other values; inherited ones are inherited again later."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
