"""The layout that a model gives by itself: where its blocks, attention and keys are, each shown and not guessed.

A pass of a few tokens shows which blocks run, in which order, which modules call transformers' attention interface, and
what every module reads and gives: the projection of keys is the module whose output, split into heads, normalised and
rotated as the model does it, *is* the key that the interface receives. What is not shown so is left out.
"""

import copy
import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import OutputRecorder

from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import device_of, embedded_words, without_gradients
from analysis_lib.models.factors import AttentionSeen, OwnAttention
from analysis_lib.models.parts import ROTATION, Attention, Layout, Stack

# The name under which the attention function of a probe is registered.
PROBE = "analysis_lib_probe"
# How far the key of a candidate may be from the key that attention receives, as a share of the largest.
ROUNDING = 1e-3
# How a projection may hold the keys of the heads: alone; after all queries; after the queries that share a key; before
# all values.
ORDERS = (None, "stacked", "by_head", "before_values")
# How many tokens a model of texts reads to show its layout; a prime, so that what is padded to a window is told.
TOKENS = 13
# By this attribute transformers knows that a model has the hooks that give its hidden states.
_MARK = "_output_capturing_hooks_installed"
KINDS = {"input_ids": "text", "pixel_values": "image", "input_values": "audio", "input_features": "audio"}


@dataclass(eq=False)
class _Call:
    """One attention: a call of the interface, or what a module has computed by itself."""

    module: nn.Module
    query: Tensor
    key: Tensor
    own: bool = False


@dataclass(eq=False)
class _Run:
    """One run of a module: the vectors it reads and gives, and the calls of the interface inside it."""

    read: Tensor | None
    arguments: dict[str, object]
    gave: Tensor | None = None
    calls: range = range(0)


@dataclass(eq=False)
class _Probe:
    """What the attentions of a pass have received, as they come.

    Attributes:
        calls: those whose queries and keys are known.
        running: the modules that run at present, the innermost last.
        attending: those that have taken a softmax of products, with each.
        seen: what sees the attention that modules compute by themselves.
    """

    calls: list[_Call] = field(default_factory=list)
    running: list[nn.Module] = field(default_factory=list)
    attending: list[nn.Module] = field(default_factory=list)
    seen: AttentionSeen = field(init=False)

    def __post_init__(self) -> None:
        # An example is one text, one image or one sound.
        self.seen = AttentionSeen(1, self._computed, self._softmax)

    def clear(self) -> None:
        """Begin anew."""
        for known in (self.calls, self.running, self.attending):
            known.clear()
        self.seen.end()
        self.seen.begin(self._computed)

    def _softmax(self) -> None:
        self.attending.extend(self.running[-1:])

    def _computed(self, attention: OwnAttention) -> None:
        if self.running:
            self.calls.append(_Call(self.running[-1], attention.query, attention.key, own=True))


_probe_under_way: ContextVar[_Probe] = ContextVar("_probe_under_way")


def _probing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **given: object
) -> tuple[Tensor, None]:
    probe = _probe_under_way.get()
    probe.calls.append(_Call(module, query, key))
    known = {name: given[name] for name in ("dropout", "scaling", "is_causal") if name in given}
    # What the interface computes is known.
    with _unseen(probe):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **known)


@contextmanager
def _unseen(probe: _Probe) -> Iterator[None]:
    receive, probe.seen.receive = probe.seen.receive, None
    try:
        yield
    finally:
        probe.seen.receive = receive


AttentionInterface.register(PROBE, _probing)
AttentionMaskInterface.register(PROBE, sdpa_mask)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Inside it a model is in evaluation mode, not compiled, and gives what it gives by name; then it is as it was."""
    modules = [*model.modules()]
    states = ((module, module.training, module._compiled_call_impl) for module in modules)
    before = [(module, training, compiled) for module, training, compiled in states if training or compiled]
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    tuples = [config for config in configs.values() if getattr(config, "return_dict", True) is False]
    switching = [(module, module.attention_type) for module in modules if hasattr(module, "set_attention_type")]
    # Of mixtures of experts, the fast ways have no float64.
    doubles = [part for part in modules if isinstance(part, PreTrainedModel) and part.dtype == torch.float64][:1]
    experts = [(model, model.get_experts_implementation()) for model in doubles]
    try:
        for part, _ in experts:
            part.set_experts_implementation("eager")
        for config in tuples:
            config.return_dict = True
        for module, *_ in before:
            module.training, module._compiled_call_impl = False, None
        yield
    finally:
        # BigBird reads all that follows a short text as it has read that.
        for module, kind in switching:
            module.set_attention_type(kind)
        for part, implementation in experts:
            part.set_experts_implementation(implementation)
        for config in tuples:
            config.return_dict = False
        for module, training, compiled in before:
            module.training, module._compiled_call_impl = training, compiled


def kind_of(model: type[PreTrainedModel] | PreTrainedModel) -> str:
    """What a model reads: ``text``, ``image`` or ``audio``."""
    # Not every part says what it reads.
    first = list(_signature(model if isinstance(model, type) else type(model)).parameters)[1]
    return KINDS.get(first, KINDS.get(model.main_input_name, "text"))


def split_keys(projected: Tensor, order: str | None, heads: int, key_heads: int) -> Tensor | None:
    """The keys of each head, * x head x head_dim, in what a projection gives; None if it does not fit.

    Args:
        projected: its output, * x width, or its weights, transposed.
        order: one of ``ORDERS``.
        heads: of queries.
        key_heads: of keys, which several heads of queries may share.
    """
    width, shared = projected.shape[-1], heads // key_heads
    parts = {None: key_heads, "stacked": heads + 2 * key_heads, "by_head": (shared + 2) * key_heads}
    count = parts.get(order, 2 * key_heads)
    if width % count:
        return None
    size = width // count
    if order == "by_head":
        return projected.unflatten(-1, (key_heads, shared + 2, size))[..., -2, :]
    first = {"stacked": heads * size}.get(order, 0)
    return projected[..., first : first + key_heads * size].unflatten(-1, (key_heads, size))


def angles_of(arguments: Mapping[str, object]) -> tuple[Tensor, ...]:
    """The angles that an attention module is called with: cosines and sines, complex numbers, or none."""
    angles = arguments.get("position_embeddings")
    if isinstance(angles, Tensor):
        return (angles,) if angles.is_complex() else ()
    return tuple(angles) if isinstance(angles, tuple | list) and len(angles) == 2 else ()


def rotated(
    module: nn.Module,
    vectors: Tensor,
    angles: Sequence[Tensor],
    each: int = 1,
    rotation: str = ROTATION,
    tokens_first: bool = False,
) -> Tensor:
    """Vectors of heads, utterance x head x token x head_dim, rotated as the model of an attention module does it.

    Each angle stands for one dimension, or for two. Dimensions beyond those of the angles are left as they are.
    The others are arguments of :class:`~analysis_lib.models.parts.Attention`.
    """
    rotate, width = getattr(sys.modules[type(module).__module__], rotation), each * angles[0].shape[-1]
    part = vectors[..., :width].transpose(1, 2) if tokens_first else vectors[..., :width]
    if _arguments(rotate) == 1 + len(angles):
        turned = rotate(part, *angles)
    else:
        # Queries and keys in one call: nobody needs those keys, which may have fewer heads, so that one will do.
        turned = rotate(part, part.narrow(2 if tokens_first else 1, 0, 1), *angles)[0]
    turned = turned.transpose(1, 2) if tokens_first else turned
    return turned if width == vectors.shape[-1] else torch.cat([turned, vectors[..., width:]], -1)


@cache
def _arguments(function: Callable) -> int:
    """How many a function needs."""
    return sum(one.default is one.empty for one in inspect.signature(function).parameters.values())


def is_of(layout: Layout, model: PreTrainedModel) -> bool:
    """Whether a listed layout is that of a model, and not of another part of the same architecture."""
    inside = dict(model.named_modules())
    if layout.part not in inside and kind_of(model) != layout.kind:
        return False
    part = inside.get(layout.part, model)
    paths = dict(part.named_modules())
    return any(stack.blocks.partition(".*")[0] in paths for stack in layout.stacks)


def found_layout(name: str, model: PreTrainedModel, processor: Callable) -> Layout:
    """The layout of a model, told by what it does with a few tokens, or an image, or a second of sound.

    Args:
        name: the model's, for errors.
        model: without a head.
        processor: what prepares its input.

    Raises:
        AnalysisError: it cannot read what its processor makes, or no blocks are found whose vectors stand for tokens.
    """
    fault, whole = None, model
    reads = "text" if isinstance(processor, PreTrainedTokenizerBase) else kind_of(whole)
    # A part may be all that a text is read by, or an image or a sound alone.
    # Half of an encoder-decoder would pass for all of it.
    halves = reads == "text" and getattr(whole.config, "is_encoder_decoder", False)
    parts = {} if halves else _parts(whole)
    for path in ("", *(path for path, part in parts.items() if kind_of(part) == reads)):
        model = whole.get_submodule(path)
        try:
            inputs = example(model, processor)
            with evaluated(model), _probed(model) as probe:
                runs, hidden = _runs_and_hidden_states(model, inputs, probe)
                alone = kind_of(model) == "text" and _padding_changes(model, inputs)
            break
        except Exception as error:  # Of any model, and its processor.
            fault = fault or error
    else:
        first = str(fault).splitlines()[0] if str(fault) else ""
        read = "a few token ids" if kind_of(whole) == "text" else f"what its {type(processor).__name__} makes"
        remedy = f"one of its parts ({', '.join(parts)}), or " if (parts := _parts(whole)) else ""
        raise AnalysisError(
            f"{name} is a {whole.config.model_type} model, which cannot read {read} alone "
            f"({type(fault).__name__}: {first}): give {remedy}another model"
        ) from fault
    blocks = _blocks(model, runs, hidden, probe.calls)
    names = {module: path for path, module in model.named_modules()}
    patterns: dict[str, list[nn.Module]] = {}
    for block in blocks:
        patterns.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", names[block]), []).append(block)
    if not patterns:
        raise AnalysisError(f"{name} is a {model.config.model_type} model, in which no transformer block is found")
    stacks = [_stack(name, model, processor, *found, runs, hidden, probe.calls, inputs) for found in patterns.items()]
    stacks = [replace(stack, unused=_unused(stack, patterns[stack.blocks], names)) for stack in stacks]
    if all(stack.cross for stack in stacks):
        # What their keys stand for is not known.
        stacks = [replace(stack, cross=None) for stack in stacks]
    kind, maps, leading, grid = kind_of(model), runs[blocks[0]][-1].gave.dim() == 4, 0, False
    if kind != "text":
        with evaluated(model):
            leading, grid = _leading(name, model, runs, blocks[0], inputs)
    if grid:
        # Its positions are tokens; their attention, in windows, is not captured.
        maps, stacks = False, [replace(stack, attention=None, each=(), further=()) for stack in stacks]
    leading = max(0, leading - getattr(model.config, "num_register_tokens", 0))
    uncaptured = _uncaptured(names, runs, probe, stacks, patterns)
    return Layout(tuple(stacks), kind, path, alone or kind == "audio", leading, maps, uncaptured, listed=False)


def _unused(stack: Stack, blocks: list[nn.Module], names: Mapping[nn.Module, str]) -> tuple[str, ...]:
    """The paths of blocks that did not run, as those that read an image beside the text."""
    ran = {names[block] for block in blocks}
    return tuple(path for path in names.values() if stack.holds(path) and path not in ran)


def _uncaptured(
    names: Mapping[nn.Module, str],
    runs: Mapping[nn.Module, list[_Run]],
    probe: _Probe,
    stacks: Sequence[Stack],
    patterns: Mapping[str, list[nn.Module]],
) -> tuple[str, ...]:
    """The paths of the modules that attend, and whose attention is not captured.

    They have called the interface, or taken a softmax of products. Where none has, and no attention is captured, they
    are those that are called so: some have no softmax.
    """
    captured: set[nn.Module] = set()
    for stack in stacks:
        for place, block in enumerate(patterns[stack.blocks]):
            specs = (stack.attention_of(place), stack.cross, *stack.further)
            for spec in specs:
                if spec:
                    # The softmax may be a module of its own.
                    captured.update(block.get_submodule(spec.module).modules())
    attending = {*probe.attending, *(call.module for call in probe.calls)}
    if not attending and not captured:
        called = [module for module in runs if "attention" in type(module).__name__.lower()]
        attending = {module for module in called if not any(_inside([other], [module]) for other in called)}
    return tuple(path for module, path in names.items() if module in attending - captured)


def _parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts that are models themselves, by their paths."""
    return {path: part for path, part in model.named_modules() if path and isinstance(part, PreTrainedModel)}


def model_part(name: str, model: PreTrainedModel, path: str) -> PreTrainedModel:
    """A part of a model that is a model itself.

    Raises:
        AnalysisError: it has none of this path.
    """
    if (part := (parts := _parts(model)).get(path)) is None:
        known = f"one of {', '.join(parts)}" if parts else "none: it has no part that is a model itself"
        raise AnalysisError(f"{name} has no part {path}: give {known}")
    return part


def _padding_changes(model: PreTrainedModel, inputs: Mapping[str, Tensor | bool]) -> bool:
    """Whether a short text beside a longer one gives other vectors than alone."""
    count = inputs["input_ids"].shape[1]
    half = count // 2
    alone = {name: v[:, :half] if isinstance(v, Tensor) else v for name, v in inputs.items()}
    beside = {
        name: torch.cat([v, torch.cat([v[:, :half], v[:, half:] * ("mask" not in name)], 1)])
        if isinstance(v, Tensor)
        else v
        for name, v in inputs.items()
    }
    with without_gradients(model):
        one, both = first_vectors(model(**alone)), first_vectors(model(**beside))
    return not _same(both[1:, :half], one)


def example(model: PreTrainedModel, processor: Callable) -> dict[str, Tensor]:
    """A short input: a few tokens, or what the processor of a model makes of an image or a sound."""
    kind = kind_of(model)
    if kind == "text":
        made = _some_tokens(model)
    elif kind == "image":
        # Imported here: a model of texts needs no pictures.
        from PIL import Image

        mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
        made = processor(Image.effect_mandelbrot((256, 256), (-2, -1, 1, 1), 50).convert(mode), return_tensors="pt")
    else:
        rate = processor.sampling_rate
        made = processor(np.sin(np.arange(rate) / 20), sampling_rate=rate, return_tensors="pt")
    inputs = {name: torch.as_tensor(values) for name, values in made.items()}
    if kind == "text" and getattr(model.config, "is_encoder_decoder", False):
        # Fewer, so that attention to the other stack is told from attention to the own.
        inputs |= {f"decoder_{name}": values[:, :-1] for name, values in inputs.items()}
    taken = _signature(type(model)).parameters
    inputs = {name: values for name, values in inputs.items() if name in taken}
    inputs = {n: v.to(device_of(model), model.dtype if v.is_floating_point() else None) for n, v in inputs.items()}
    return inputs | ({"use_cache": False} if getattr(model.config, "use_cache", False) else {})


def _some_tokens(model: PreTrainedModel) -> dict[str, Tensor]:
    """A few tokens, none of which stands for something else in the model, such as an image."""
    config = model.config.get_text_config()
    every = {**model.config.to_dict(), **config.to_dict()}
    named = [every[name] for name in every if name.endswith(("_token_id", "_token_index"))]
    special = {*itertools.chain(*(value if isinstance(value, list) else [value] for value in named))}
    words = embedded_words(model)
    most = getattr(config, "max_position_embeddings", None)
    count = min(TOKENS, most) if isinstance(most, int) and most > 0 else TOKENS
    plain = [index for index in range(int(min(words, 256))) if index not in special]
    ids = torch.tensor([[plain[(7 * place + 3) % len(plain)] for place in range(count)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Inside it transformers may hang hooks on a model, which it does where its hidden states are asked for."""
    modules = [*model.modules()]
    before = {module: {*module._forward_hooks} for module in modules}
    marked = [module for module in modules if not hasattr(module, _MARK)]
    try:
        yield
    finally:
        for module, known in before.items():
            for number in {*module._forward_hooks} - known:
                del module._forward_hooks[number]
        for module in marked:
            vars(module).pop(_MARK, None)


@contextmanager
def _probed(model: PreTrainedModel) -> Iterator[_Probe]:
    """Inside it the model runs with our attention function, if it takes one; gives its attentions, as they come."""
    before, probe = model.config._attn_implementation, _Probe()
    token = _probe_under_way.set(probe)
    # A model that takes none says so.
    with suppress(ValueError):
        model.set_attn_implementation(PROBE)
    try:
        with probe.seen:
            probe.clear()
            yield probe
    finally:
        model.set_attn_implementation(before)
        _probe_under_way.reset(token)


def first_vectors(values: object) -> Tensor | None:
    """The first tensor of numbers among values, which may be nested; what a block reads, or gives."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.dim() >= 2 else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((found for value in values if (found := first_vectors(value)) is not None), None)


def first_of_call(args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
    """The vectors that a module is called with."""
    found = first_vectors(args)
    return first_vectors(kwargs) if found is None else found


def with_first(values: object, vectors: Tensor) -> object:
    """Values, which may be nested, with other vectors in place of the :func:`first_vectors` among them."""
    if isinstance(values, Tensor):
        return vectors
    if isinstance(values, Mapping):
        name = next(name for name, value in values.items() if first_vectors(value) is not None)
        changed = copy.copy(values)
        changed[name] = with_first(values[name], vectors)
        return changed
    place = next(place for place, value in enumerate(values) if first_vectors(value) is not None)
    changed = [*values[:place], with_first(values[place], vectors), *values[place + 1 :]]
    return type(values)(*changed) if hasattr(values, "_fields") else type(values)(changed)


def call_with_first(args: tuple, kwargs: dict, vectors: Tensor) -> tuple[tuple, dict]:
    """The arguments of a call with other vectors in place of :func:`first_of_call`."""
    if first_vectors(args) is None:
        return args, with_first(kwargs, vectors)
    return with_first(args, vectors), kwargs


def arguments_of(module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call of a module by name."""
    arguments = _signature(type(module)).bind_partial(module, *args, **kwargs).arguments
    arguments.pop("self", None)
    return {**arguments, **arguments.pop("kwargs", {})}


@cache
def _signature(module: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(module.forward)


def _runs_and_hidden_states(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], probe: _Probe
) -> tuple[dict[nn.Module, list[_Run]], list[Sequence[Tensor]]]:
    """The runs of every module, as of :func:`_run`, and the hidden states of each stack, as the model gives them."""
    with _without_new_hooks(model):
        try:
            runs, output = _run(model, {**inputs, "output_hidden_states": True}, probe)
        except Exception:  # Not every model can be asked for them.
            probe.clear()
            runs, output = _run(model, inputs, probe)
    given = output.items() if isinstance(output, Mapping) else ()
    hidden = [states for name, states in given if name.endswith("hidden_states") and isinstance(states, list | tuple)]
    return runs, [states for states in hidden if states and all(isinstance(state, Tensor) for state in states)]


def _run(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], probe: _Probe | None = None
) -> tuple[dict[nn.Module, list[_Run]], object]:
    """The runs of every module while a model reads an example, in the order in which they first ran; its output."""
    runs: dict[nn.Module, list[_Run]] = {}
    probe = probe or _Probe()
    calls = probe.calls

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read = first_vectors(args)
        given = arguments_of(module, args, kwargs)
        runs.setdefault(module, []).append(_Run(first_vectors(kwargs) if read is None else read, given))
        runs[module][-1].calls = range(len(calls), len(calls))
        probe.running.append(module)

    def end(module: nn.Module, _args: tuple, output: object) -> None:
        run = runs[module][-1]
        run.gave, run.calls = first_vectors(output), range(run.calls.start, len(calls))
        probe.running.pop()

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
        with without_gradients(model):
            output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return runs, output


def _leading(
    name: str,
    model: PreTrainedModel,
    runs: Mapping[nn.Module, list[_Run]],
    block: nn.Module,
    inputs: Mapping[str, Tensor],
) -> tuple[int, bool]:
    """How many tokens stand before those of an image or sound: they do not change with its first number.

    And whether what the blocks read is a map of features with its channels last: a grid of tokens.

    Raises:
        AnalysisError: unknown ones stand behind them, a sound has its channels first, or each pass is another.
    """

    def read(place: int | None) -> Tensor:
        changed = {key: v.clone() if isinstance(v, Tensor) else v for key, v in inputs.items()}
        if place is not None:
            next(v for v in changed.values() if isinstance(v, Tensor)).flatten(1)[:, place] += 1
        return _run(model, changed)[0][block][0].read[0]

    plain = read(None)
    before = runs[block][0].read[0]
    if plain.shape != before.shape or not torch.equal(plain, before):
        raise AnalysisError(f"{name} makes other vectors of one {kind_of(model)} each time: switch its masking off")
    first, last = (read(place) != plain for place in (0, -1))
    # The first number changes all channels of a few positions.
    along_first, along_last = (
        float(part.float().mean()) for part in (first.flatten(1).any(1), first.flatten(0, -2).any(0))
    )
    if plain.dim() == 3:
        return 0, along_first < along_last
    if along_first > along_last:
        raise AnalysisError(f"{name} has vectors with channels first, which stand for no tokens: give another model")
    first, last = (part.any(-1).nonzero().flatten() for part in (first, last))
    known = getattr(model.config, "num_detection_tokens", 0)
    if len(last) and last.max() + 1 + known < len(plain):
        raise AnalysisError(f"{name} reads further tokens behind those of its input: give another model")
    return (int(first.min()) if len(first) else 0), False


# --- Blocks ---------------------------------------------------------------------------------------


def _blocks(
    model: PreTrainedModel,
    runs: Mapping[nn.Module, list[_Run]],
    hidden: Sequence[Sequence[Tensor]],
    calls: Sequence[_Call],
) -> list[nn.Module]:
    """The modules whose outputs are the hidden states, in the order in which they first ran."""
    lists = [[part for part in of if part in runs] for of in model.modules() if isinstance(of, nn.ModuleList)]
    lists = [of for of in lists if of]
    ran = _whole(model, [module for module in _declared(model) if module in runs], runs)
    ran = ran or _longest(lists, runs, calls)
    # Those of stacks whose blocks are not among them that read its hidden states. Of images, stages do so, too.
    texts = hidden if kind_of(model) == "text" else ()
    left = [states for states in texts if not any(_agree(runs[block][0].read, states[0]) for block in ran)]
    ran = ran + [part for of in lists if any(_reads(runs, of, states) for states in left) for part in of]
    if getattr(model.config, "is_encoder_decoder", False):
        # Some give the hidden states of their decoder alone.
        names = {module: path for path, module in model.named_modules()}
        for side in ("encoder", "decoder"):
            if not any(side in names[block] for block in ran):
                ran = ran + _longest([of for of in lists if names[of[0]].startswith(f"{side}.")], runs, calls)
    ran = [part for part in dict.fromkeys(ran) if not any(_inside([part], [other]) for other in ran)]
    order = {module: place for place, module in enumerate(runs)}
    return sorted((part for part in ran if runs[part][-1].gave is not None), key=order.get)


def _longest(
    lists: Sequence[list[nn.Module]], runs: Mapping[nn.Module, list[_Run]], calls: Sequence[_Call]
) -> list[nn.Module]:
    """The modules of those lists that call the interface; where none do, of the longest that are chains."""

    def attends(part: nn.Module) -> bool:
        return all(any(not calls[place].own for place in run.calls) for run in runs[part])

    alike = [of for of in lists if len({type(part) for part in of}) == 1]
    attending = [of for of in alike if all(map(attends, of))]
    inner = [of for of in attending if not any(_inside(other, of) for other in attending)]
    # Of modules of which each reads what the one before it gave.
    chained = [of for of in alike if len(of) > 1 and all(map(_follows(runs), of, of[1:]))]
    longest = max(map(len, chained), default=0)
    return [part for of in inner or [of for of in chained if len(of) == longest] for part in of]


def _cut_behind(
    blocks: Sequence[nn.Module],
    runs: Mapping[nn.Module, list[_Run]],
    hidden: Sequence[Sequence[Tensor]],
    tokens: int,
) -> bool:
    """Whether a model leaves out what stands behind the vectors of its tokens, which it has padded to a window.

    Its hidden states then are shorter than the vectors that its first block reads, or what it does with those that its
    last block gives.
    """
    first, last = runs[blocks[0]][0].read, runs[blocks[-1]][-1].gave
    if last.shape[1] <= tokens:
        return False
    if any(states[0].shape[1] == tokens and _agree(first, states[0]) for states in hidden):
        return True
    later = (run.read for of in runs.values() for run in of if run.read is not None and run.read.dim() == 3)
    return any(read.shape[1] == tokens and _agree(last, read) for read in later)


def _agree(vectors: Tensor | None, state: Tensor) -> bool:
    """Whether vectors are a hidden state, but for what may be padded behind it."""
    if vectors is None or vectors.dim() != state.dim():
        return False
    if _is_turned(vectors, state):
        vectors = vectors.transpose(0, 1)
    if vectors.dim() == 3 and vectors.shape[1] > state.shape[1]:
        vectors = vectors[:, : state.shape[1]]
    return vectors.shape == state.shape and torch.equal(vectors, state)


def _is_turned(vectors: Tensor, state: Tensor) -> bool:
    """Whether vectors are token x utterance x width, and a hidden state of one text is utterance x token x width."""
    return vectors.dim() == 3 and vectors.shape[1] == len(state) == 1 < len(vectors)


def _reads(runs: Mapping[nn.Module, list[_Run]], parts: Sequence[nn.Module], states: Sequence[Tensor]) -> bool:
    """Whether modules read the hidden states of a stack from the first on, one each, and give the next."""
    if len(parts) >= len(states):
        return False
    read = all(_agree(runs[part][0].read, state) for part, state in zip(parts, states, strict=False))
    # A norm may follow the last.
    gave = all(_agree(runs[part][0].gave, state) for part, state in zip(parts[:-1], states[1:], strict=False))
    shape = runs[parts[-1]][0].gave
    return read and gave and shape is not None and shape.shape == runs[parts[-1]][0].read.shape


def _whole(model: PreTrainedModel, declared: list[nn.Module], runs: Mapping[nn.Module, list[_Run]]) -> list[nn.Module]:
    """The blocks of which some declared modules are a part, in place of these.

    Such a block reads and gives what the module in it does; it attends beside it, or it stands in a list with modules
    that are declared themselves.
    """
    known, whole = {*declared}, {}
    for blocks in (of for of in model.modules() if isinstance(of, nn.ModuleList)):
        mixed = any(block in known for block in blocks)
        for block in (block for block in blocks if block in runs and block not in known):
            for part in (part for part in declared if part is not block and _inside([part], [block])):
                run, of_part = runs[block][-1], runs[part][-1]
                same = all(_identical(getattr(run, side), getattr(of_part, side)) for side in ("read", "gave"))
                if same and (mixed or len(run.calls) > len(of_part.calls)):
                    whole[part] = block
    return [*dict.fromkeys(whole.get(part, part) for part in declared)]


def _identical(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


def _declared(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that a model, or a part of it, declares to give its hidden states."""
    found: dict[nn.Module, None] = {}
    for part in model.modules():
        given = (getattr(part, "_can_record_outputs", None) or {}).get("hidden_states", ())
        for one in given if isinstance(given, list | tuple) else [given]:
            made = one.target_class if isinstance(one, OutputRecorder) else one
            if isinstance(made, type):
                found |= dict.fromkeys(module for module in part.modules() if isinstance(module, made))
    return [*found]


def _inside(inner: list[nn.Module], outer: list[nn.Module]) -> bool:
    """Whether modules lie inside others."""
    within = {module for part in outer for module in part.modules() if module is not part}
    return bool(inner) and all(part in within for part in inner)


def _follows(runs: Mapping[nn.Module, list[_Run]]) -> Callable[[nn.Module, nn.Module], bool]:
    def follows(one: nn.Module, other: nn.Module) -> bool:
        gave, read = runs[one][0].gave, runs[other][0].read
        return gave is not None and read is not None and gave.shape == read.shape and torch.equal(gave, read)

    return follows


def _stack(
    name: str,
    model: PreTrainedModel,
    processor: Callable,
    pattern: str,
    blocks: list[nn.Module],
    runs: Mapping[nn.Module, list[_Run]],
    hidden: Sequence[Sequence[Tensor]],
    calls: list[_Call],
    inputs: Mapping[str, Tensor],
) -> Stack:
    """The blocks of one path, as a stack."""
    first, gave = runs[blocks[0]][0].read, runs[blocks[0]][-1].gave
    turned = any(_is_turned(first, states[0]) and _agree(first, states[0]) for states in hidden if first is not None)
    shape = tuple((gave.transpose(0, 1) if turned else gave).shape)
    decoder = getattr(model.config, "is_encoder_decoder", False) and "decoder" in pattern
    sides = ("decoder",) if decoder else ("encoder", "decoder")
    label = next((part for part in sides if part in pattern), pattern.partition(".")[0])
    kind, padded_behind = kind_of(model), False
    # Whisper's processor pads a sound to a window, of which each vector stands for two steps.
    padded = getattr(processor, "n_samples", None)
    sound = "windows" if padded and padded == 2 * processor.hop_length * shape[1] else "frames"
    tokens = {"text": "shifted" if decoder else "text", "image": "patches", "audio": sound}[kind]
    if kind == "text":
        read = tuple(inputs["decoder_input_ids" if decoder else "input_ids"].shape)
        padded_behind = len(shape) == 3 and _cut_behind(blocks, runs, hidden, read[1])
        if (shape[:2] != read and not padded_behind) or len(shape) != 3:
            raise AnalysisError(
                f"{name} is a {model.config.model_type} model: {read[1]} tokens of a text become vectors of shape "
                f"{shape} in {pattern}, which stand for no tokens: give another model"
            )
    elif shape[0] != 1 or len(shape) not in (3, 4):
        raise AnalysisError(
            f"{name} is a {model.config.model_type} model: in {pattern}, the vectors of {kind}s are of shape {shape}, "
            f"which stand for no tokens: give another model"
        )
    every = [_attentions(block, runs, calls, only=kind != "text", turned=turned) for block in blocks]
    if padded_behind:
        # Its attention reads what is padded, too.
        every = [[] for _ in blocks]
    each = tuple(attentions[0] if attentions else None for attentions in every)
    further = {tuple(attentions[1:]) for attentions in every}
    crossed = {tuple(_attentions(block, runs, calls, cross=True)) for block in blocks} if decoder else {()}
    cross = next(iter(crossed)) if len(crossed) == 1 else ()
    known = [attention for attention in each if attention]
    common = Counter(known).most_common(1)[0][0] if known else None
    return Stack(
        pattern,
        common,
        label,
        tokens,
        each=() if len({*each}) == 1 else each,
        cross=next((attention for attention in cross if attention.key), None),
        further=next(iter(further)) if len(further) == 1 else (),
        # Of BigBird, long texts alone are padded.
        padded=padded_behind or any(hasattr(module, "set_attention_type") for module in model.modules()),
        tokens_first=turned,
    )


# --- Attention ------------------------------------------------------------------------------------


def _attentions(
    block: nn.Module,
    runs: Mapping[nn.Module, list[_Run]],
    calls: list[_Call],
    only: bool = False,
    cross: bool = False,
    turned: bool = False,
) -> list[Attention]:
    """The attentions of a block: the modules in it that attend once, with a query for each token.

    Args:
        only: whether there must be one only, as where a block is a stage of several.
        cross: whether to find those to another stack, whose tokens are as many as its keys.
        turned: whether what the block gives is token x utterance x width.
    """
    inside, gave = [calls[place] for place in runs[block][-1].calls], runs[block][-1].gave
    gave = gave.transpose(0, 1) if turned else gave
    tokens = gave.shape[1] if gave.dim() == 3 else gave[0, 0].numel()
    inside = [call for call in inside if not cross or call.key.shape[2] != tokens]
    if only and len(inside) > 1:
        return []
    names = {module: path for path, module in block.named_modules()}
    times = Counter(call.module for call in inside)
    found = []
    for call in inside:
        of_tokens = call.query.shape[0] == len(gave) and call.query.shape[2] == tokens
        if times[call.module] == 1 and of_tokens and (call.key.shape[2] == tokens) != cross and call.module in names:
            made = next(_key_projections(call, runs), {"key": None})
            found.append(Attention(names[call.module], **made, own=call.own))
    return found


def _key_projections(call: _Call, runs: Mapping[nn.Module, list[_Run]]) -> Iterator[dict]:
    """The ways in which the key of a call can be made that give it."""
    inside = {path: runs[part][-1] for path, part in call.module.named_modules() if path and part in runs}
    inside = {path: run for path, run in inside.items() if run.gave is not None and run.read is not None}
    angles = angles_of(runs[call.module][-1].arguments)
    factors = {None: 1.0, **{name: value for name, value in vars(call.module).items() if isinstance(value, float)}}
    for path in inside:
        for split, raw in (*_split(path, inside, call), *_latent(path, inside, call)):
            wanted = call.key[..., -raw.shape[-1] :]
            for norm, normed in (({}, raw), *_norms_of(raw, inside)):
                for turn, turned in _turns(call.module, normed.transpose(1, 2), angles):
                    after = _norms_of(turned.transpose(1, 2), inside) if turn["rotary"] and not norm else ()
                    for last, key in (({}, turned), *(({**n, "norm_last": True}, k.transpose(1, 2)) for n, k in after)):
                        key = key.repeat(1, split["tiled"], 1, 1)
                        for factor, value in factors.items():
                            if _same(value * key, wanted):
                                yield {"key": path, **split, **norm, **turn, **last, "factor": factor}


def _split(path: str, inside: Mapping[str, _Run], call: _Call) -> Iterator[tuple[dict, Tensor]]:
    """The keys, utterance x token x head x head_dim, that what a module gives may hold, and how it holds them."""
    (utterances, key_heads, tokens, size), heads = call.key.shape, call.query.shape[1]
    for tiled in (count for count in range(1, key_heads + 1) if key_heads % count == 0):
        for order in ORDERS:
            raw = split_keys(inside[path].gave, order, heads, key_heads // tiled)
            if raw is not None and raw.shape[-1] == size and raw.numel() * tiled == call.key.numel():
                yield {"fused": order, "tiled": tiled}, raw.reshape(utterances, tokens, -1, size)


def _latent(path: str, inside: Mapping[str, _Run], call: _Call) -> Iterator[tuple[dict, Tensor]]:
    """The one key that all heads share, where another projection makes the first dimensions of theirs; and which."""
    (utterances, heads, tokens, size), gave = call.key.shape, inside[path].gave
    for up, run in inside.items():
        rank = run.read.shape[-1]
        own = size + rank - gave.shape[-1]
        alike = gave.shape[:-1] == (utterances, tokens) and 0 < own < size
        if not alike or run.read.numel() != utterances * tokens * rank or run.gave.shape[-1] % heads:
            continue
        made = run.gave.reshape(utterances, tokens, heads, -1)[..., :own]
        if not _same(made.transpose(1, 2), call.key[..., :own]):
            continue
        for norm, normed in _norms_of(gave[..., None, :rank], inside):
            read = run.read.reshape(normed.shape)
            # Some multiply what the norm gives.
            if not norm["centred"] and _same(normed * (read.norm() / normed.norm()), read):
                yield {"latent": (norm["key_norm"], up), "fused": None, "tiled": heads}, gave[..., None, rank:]


def _norms_of(keys: Tensor, inside: Mapping[str, _Run]) -> Iterator[tuple[dict, Tensor]]:
    """The norms that read the keys, and what they give.

    A root-mean-square norm of each head, or of all together, or a LayerNorm of each head.

    Args:
        keys: utterance x token x head x head_dim.
    """
    for path, run in inside.items():
        if run.read.numel() != keys.numel() or run.gave.numel() != keys.numel():
            continue
        swapped = run.read.shape == keys.transpose(1, 2).shape and not _same(run.read.reshape(keys.shape), keys)
        read, gave = (part.transpose(1, 2) if swapped else part.reshape(keys.shape) for part in (run.read, run.gave))
        if not _same(read, keys):
            continue
        for dims, centred in (((-1,), False), ((-2, -1), False), ((-1,), True)):
            unit = read - read.mean(-1, keepdim=True) if centred else read
            unit = unit / unit.square().mean(dims, keepdim=True).sqrt()
            # The gains, told by the first token, or by how all differ.
            mean, shift = (part.mean(1, keepdim=True) if centred else 0 for part in (unit, gave))
            some = slice(None) if centred else slice(1)
            of, to = (unit - mean)[:, some], (gave - shift)[:, some]
            gains = (of * to).sum(1, keepdim=True) / of.square().sum(1, keepdim=True)
            if _same(gains * (unit - mean) + shift, gave):
                yield {"key_norm": path, "heads_first": swapped, "centred": centred}, gave
                break


def _turns(module: nn.Module, keys: Tensor, angles: Sequence[Tensor]) -> Iterator[tuple[dict, Tensor]]:
    """The ways in which a model may rotate keys, utterance x head x token x head_dim, and what they give."""
    yield {"rotary": 0}, keys
    names = [name for name in vars(sys.modules[type(module).__module__]) if name.startswith("apply_rotary")]
    for name in sorted(names, key=ROTATION.__ne__) if angles else ():
        # That of the usual name has cosines and sines, and heads first.
        for each, tokens_first in itertools.product((1, 2), (False, True)):
            if name == ROTATION and (tokens_first or len(angles) == 1):
                continue
            with suppress(AttributeError, RuntimeError, TypeError, ValueError):
                turned = rotated(module, keys, angles, each, name, tokens_first)
                yield {"rotary": each, "rotation": name, "tokens_first": tokens_first}, turned


def _same(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.shape != other.shape:
        return False
    within = max(ROUNDING, 8 * torch.finfo(other.dtype).eps)
    return bool((one - other).abs().max() <= within * other.abs().max())
