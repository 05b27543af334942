"""One call of a model, watched from outside: modules, softmaxes, dropouts, rotations, positions."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from analysis_lib.models.probe import replaced

# Name under which the attention function that notes its arguments is registered.
NOTING = "analysis_book_atlas"


@dataclass(eq=False)
class Run:
    """One run of a module: copies of the first tensor that it read, and of the first it gave."""

    module: nn.Module
    path: str
    read: Tensor | None
    gave: Tensor | None = None


@dataclass(eq=False)
class Rotation:
    """The vectors of one call of a function that rotates.

    Attributes:
        before: the vectors before it.
        after: the vectors after it.
        module: where it was called.
        parts: how many rotations before this one were made inside it, of parts of the vectors.
    """

    before: Tensor
    after: Tensor
    module: nn.Module | None = None
    parts: int = 0


@dataclass(eq=False)
class AttentionCall:
    """What a module gave to the attention function of transformers.

    Attributes:
        module: the module that attends.
        queries: the shape of its queries.
        keys: that of its keys.
        norms: the norm of all queries, and of all keys.
        options: its further arguments.
        sees_later: whether its mask shows the first token the second one.
        runs: how many modules had run before.
        rotations: how many tensors had been rotated before.
    """

    module: nn.Module
    queries: torch.Size
    keys: torch.Size
    norms: tuple[float, float]
    options: dict[str, object]
    sees_later: bool
    runs: int
    rotations: int


@dataclass(eq=False)
class Trace:
    """What was seen in one call of a model.

    Attributes:
        output: the output of the model.
        runs: the runs of its modules, in the order in which they ended.
        softmaxes: input and output of each softmax, copies.
        dropouts: input and output of each dropout, the tensors themselves: what is returned is
            compared with them by its memory.
        rotations: queries and keys before and after they were rotated.
        positions: the whole numbers that modules of positions read.
        attentions: the calls of the attention function of transformers.
        running: the runs that have not ended, the innermost last.
    """

    output: object = None
    runs: list[Run] = field(default_factory=list)
    softmaxes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dropouts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rotations: list[Rotation] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)

    def runs_of(self, module: nn.Module) -> list[Run]:
        """All runs of a module."""
        return [run for run in self.runs if run.module is module]


@torch.no_grad()
def traced(model: PreTrainedModel, inputs: Mapping[str, object], **options: object) -> Trace:
    """One call of a model, and what was seen in it."""
    trace = Trace()
    with ExitStack() as undo:
        undo.enter_context(_modules_seen(model, trace))
        undo.enter_context(_Softmaxes(trace))
        undo.enter_context(replaced(functional, dropout=_dropout_noted(trace)))
        undo.enter_context(_rotations_seen(model, trace))
        _current.append(trace)
        undo.callback(_current.pop)
        trace.output = model(**inputs, **options)
    return trace


# --- Modules --------------------------------------------------------------------------------------


def first_tensor(given: object) -> Tensor | None:
    """The first tensor of numbers in what a module reads or gives."""
    if isinstance(given, Tensor):
        return given if given.is_floating_point() else None
    values = given.values() if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping | list | tuple):
        return None
    return next((value for value in map(first_tensor, values) if value is not None), None)


def alike(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors have the same numbers, perhaps with other or exchanged axes.

    Args:
        tensor: what a module read or gave.
        other: what the model returned of it.
    """
    if tensor is None or other is None:
        return False
    is_longer = tensor.dim() == other.dim() == 3 and tensor.shape[1] > other.shape[1]
    if is_longer and tensor.shape[::2] == other.shape[::2]:
        # Some cut off tokens that they put before or behind a text.
        count = other.shape[1]
        ends = (tensor[:, :count], tensor[:, -count:])
        return any(torch.equal(each, other) for each in ends)
    if tensor.numel() != other.numel():
        return False
    if torch.equal(tensor.reshape(-1), other.reshape(-1)):
        return True
    if min(tensor.dim(), other.dim()) < 3:
        return False
    if torch.equal(tensor.transpose(0, 1).reshape(-1), other.reshape(-1)):
        return True
    # Maps of features, with their channels last.
    return torch.equal(tensor.flatten(1, -2).transpose(1, 2).reshape(-1), other.reshape(-1)) or (
        torch.equal(tensor.reshape(-1), other.flatten(1, -2).transpose(1, 2).reshape(-1))
    )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@contextmanager
def _modules_seen(model: nn.Module, trace: Trace) -> Iterator[None]:
    paths = {module: path for path, module in model.named_modules()}

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read = first_tensor([*args, *kwargs.values()])
        trace.running.append(Run(module, paths[module], _copy(read)))
        _note_positions(module, args, kwargs, trace)

    def end(module: nn.Module, _args: tuple, output: object) -> None:
        run = trace.running.pop()
        run.gave = _copy(first_tensor(output))
        trace.runs.append(run)

    handles = []
    for module in paths:
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end))

    def noting(module: nn.Module) -> Callable:
        """Its ``forward``, which some call by itself, without the hooks."""
        plain = module.forward

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            if trace.running and trace.running[-1].module is module:
                return plain(*args, **kwargs)
            begin(module, args, kwargs)
            output = plain(*args, **kwargs)
            end(module, args, output)
            return output

        return forward

    with ExitStack() as undo:
        for module in paths:
            undo.enter_context(replaced(module, forward=noting(module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _note_positions(module: nn.Module, args: tuple, kwargs: dict, trace: Trace) -> None:
    """Note the whole numbers that a table of vectors, or a module of rotations, reads."""
    values = [kwargs.get("position_ids")]
    if isinstance(module, nn.Embedding) or "rotary" in type(module).__name__.lower():
        values += [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dim():
            trace.positions.append(value.detach().clone())


# --- Functions ------------------------------------------------------------------------------------


class _Softmaxes(TorchDispatchMode):
    """Inside it every softmax is noted."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._softmax.default and result.dim() >= 3:
            self.trace.softmaxes.append((args[0].detach().clone(), result.detach().clone()))
        return result


def _dropout_noted(trace: Trace) -> Callable:
    """A dropout that gives a copy, so that what was returned can be told from what it read."""
    plain = functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        if training:
            return plain(input, p, training, inplace)
        output = input.clone()
        trace.dropouts.append((input, output))
        return output

    return dropout


@contextmanager
def _rotations_seen(model: nn.Module, trace: Trace) -> Iterator[None]:
    """A context in which functions that apply rotary positions note what they read and give."""
    with ExitStack() as undo:
        for owner, name in _rotating(model):
            plain = inspect.getattr_static(owner, name)
            function = getattr(plain, "__func__", plain)
            noting = _noting_rotation(function, trace)
            if isinstance(plain, staticmethod):
                noting = staticmethod(noting)
            undo.enter_context(replaced(owner, **{name: noting}))
        yield


def _rotating(model: nn.Module) -> list[tuple[object, str]]:
    """The functions that rotate, by name, in the sources of the modules and in their classes."""
    owners = {}
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        if source.__name__.startswith("transformers."):
            owners[source] = None
            owners[type(module)] = None
    functions = []
    for owner in owners:
        for name, value in vars(owner).items():
            is_applied = name.startswith(("apply_", "_apply_"))
            is_rotary = any(word in name for word in ("rotary", "rope", "rotation"))
            if is_applied and is_rotary and callable(getattr(value, "__func__", value)):
                functions.append((owner, name))
    return functions


def _noting_rotation(function: Callable, trace: Trace) -> Callable:
    def noting(*args: object, **kwargs: object) -> object:
        noted = len(trace.rotations)
        result = function(*args, **kwargs)
        parts = len(trace.rotations) - noted
        read = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        gave = [result] if isinstance(result, Tensor) else list(result)
        for after in gave:
            before = next((each for each in read if each.shape == after.shape), None)
            if before is None:
                continue
            # The next one of the same shape, such as the keys, is another one.
            read = [each for each in read if each is not before]
            module = trace.running[-1].module if trace.running else None
            vectors = (before.detach().clone(), after.detach().clone())
            trace.rotations.append(Rotation(*vectors, module, parts))
        return result

    return noting


# --- The attention function -----------------------------------------------------------------------

_current: list[Trace] = []


def _noting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    if _current:
        trace = _current[-1]
        norms = (query.norm().item(), key.norm().item())
        before = (len(trace.runs), len(trace.rotations))
        sees_later = attention_mask is None or bool(_shown(attention_mask)[..., 0, 1:2].any())
        call = AttentionCall(module, query.shape, key.shape, norms, options, sees_later, *before)
        trace.attentions.append(call)
    source = sys.modules[type(module).__module__]
    eager = getattr(source, "eager_attention_forward", sdpa_attention_forward)
    return eager(module, query, key, value, attention_mask, **options)


def _shown(mask: Tensor) -> Tensor:
    """Where a mask, of truth values or of what is added to scores, shows a key to a query."""
    return mask if mask.dtype == torch.bool else mask == 0


AttentionInterface.register(NOTING, _noting_attention)
AttentionMaskInterface.register(NOTING, eager_mask)
