"""The hidden states that a model returns, beside what its blocks read and gave."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from analysis_book.atlas.tracing import Run, Trace, alike

# What gives its input back.
_PASSES = (nn.Dropout, nn.Identity)


@dataclass(eq=False)
class Stack:
    """One stack of blocks, such as the encoder, and the hidden states that the model returns of it.

    Attributes:
        label: its name, empty where there is one stack.
        states: the hidden states.
        runs: the runs of its blocks, in order; a block that runs twice has two.
        last: the ``last_hidden_state`` of the stack, if the model returns one.
    """

    label: str
    states: Sequence[Tensor]
    runs: list[Run] = field(default_factory=list)
    last: Tensor | None = None

    @property
    def ends_in_norms(self) -> bool:
        """Whether what stands for its blocks are norms, each of which ends one."""
        return bool(self.runs) and all(is_norm(run.module) for run in self.runs)


def stacks_of(model: nn.Module, trace: Trace) -> list[Stack]:
    """The stacks whose hidden states a model returned."""
    stacks = []
    for label, owner, states in tuples_of(trace.output, "hidden_states"):
        if not states or not all(isinstance(state, Tensor) for state in states):
            continue
        stack = Stack(label, states)
        stack.runs = _runs_of_stack(model, trace, states)
        last = None
        if label in ("encoder", "decoder"):
            last = owner.get(f"{label}_last_hidden_state")
        if last is None and label != "encoder":
            last = owner.get("last_hidden_state")
        stack.last = last if isinstance(last, Tensor) else None
        stacks.append(stack)
    return stacks


def _runs_of_stack(model: nn.Module, trace: Trace, states: Sequence[Tensor]) -> list[Run]:
    """The runs of the list of modules that explains hidden states best."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [
            module for module in model.modules() if isinstance(module, kind) and _has_blocks(module)
        ]
        candidates = [_runs_of_list(trace, each) for each in lists]
        candidates = [runs for runs in candidates if runs and _agreement(runs, states)[0] >= 0]
        if candidates:
            return max(candidates, key=lambda runs: _agreement(runs, states))
    return []


def _has_blocks(modules: Iterable[nn.Module]) -> bool:
    """Whether some of these modules have weights; without any, they may give what they read."""
    return any(True for module in modules for _ in module.parameters())


def tuples_of(output: object, ending: str, path: str = "") -> Iterator[tuple[str, Mapping, object]]:
    """The entries of an output, and of outputs inside it, that end so: label, owner, entry."""
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        if name.endswith(ending) and not isinstance(value, Tensor):
            label = f"{path} {name.removesuffix(ending).strip('_')}".strip()
            yield label, output, value
        elif isinstance(value, Mapping):
            part = re.sub("_?(model)?_?outputs?$", "", name)
            yield from tuples_of(value, ending, f"{path} {part}".strip())


def _runs_of_list(trace: Trace, blocks: Iterable[nn.Module]) -> list[Run]:
    inside = {*blocks}
    return [run for run in trace.runs if run.module in inside and run.gave is not None]


def _agreement(runs: list[Run], states: Sequence[Tensor]) -> tuple[int, int, int]:
    """How well runs explain hidden states: by how many of them, and then by their number."""
    explained = 0
    for state in states:
        explained += any(alike(run.gave, state) for run in runs)
    same_shape = sum(run.gave.shape == states[0].shape for run in runs)
    if len(runs) > len(states) > explained:
        # More than there is to give, and yet not all of it.
        return -1, 0, 0
    # Parts of a block may give what it gives, and have the longer path.
    return explained or -(not same_shape), -runs[0].path.count("."), same_shape


def number_in_words(count: int, runs: int) -> str:
    """How many hidden states there are, beside the blocks that ran."""
    if not runs:
        return str(count)
    difference = count - runs
    if difference == 0:
        return "as many as blocks"
    if difference > 0:
        return f"blocks + {difference}"
    return f"{count} of {runs} blocks"


def first_in_words(stack: Stack, trace: Trace) -> str:
    """What the first hidden state is."""
    first, *_ = stack.states
    if not stack.runs:
        return "not recognised: no list of modules ran as blocks"
    block = stack.runs[0]
    if alike(block.read, first):
        return "embeddings after a norm" if _from_norm(first, trace) else "embeddings"
    if alike(block.gave, first):
        return "output of block 1"
    index = trace.runs.index(block)
    if any(alike(run.gave, first) for run in trace.runs[:index]):
        if stack.ends_in_norms:
            # What the norm of a block reads is no embedding.
            return "embeddings after a norm" if _from_norm(first, trace) else "embeddings"
        return "embeddings, changed before block 1 reads them"
    if any(alike(run.gave, first) for run in trace.runs):
        return "output of another module"
    return "not recognised: no module gave it"


def _from_norm(state: Tensor, trace: Trace) -> bool:
    """Whether the first module that gave a state, but for those that pass it on, is a norm."""
    for run in trace.runs:
        if alike(run.gave, state) and not isinstance(run.module, _PASSES):
            return is_norm(run.module)
    return False


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def last_in_words(stack: Stack, trace: Trace) -> str:
    """What the last hidden state is."""
    return _last(stack, trace) + _other_width(stack)


def _last(stack: Stack, trace: Trace) -> str:
    state = stack.states[-1]
    if not stack.runs:
        return "not recognised: no list of modules ran as blocks"
    gave = stack.runs[-1].gave
    if alike(gave, state):
        if stack.last is None or alike(gave, stack.last):
            return "output of the last block (no norm follows)"
        norms = [run for run in trace.runs if is_norm(run.module) and alike(run.read, gave)]
        if norms:
            return "output of the last block, before the final norm"
        return "output of the last block, which is not last_hidden_state"
    for run in trace.runs:
        if is_norm(run.module) and alike(run.gave, state):
            return "after the final norm"
    if len(stack.runs) > 1 and alike(stack.runs[-1].read, state):
        return "what the last block reads"
    if alike(stack.last, state):
        return "last_hidden_state, changed after the last block"
    if any(alike(run.gave, state) for run in trace.runs):
        return "output of another module"
    return "not recognised: no module gave it"


def _other_width(stack: Stack) -> str:
    first, last = stack.states[0], stack.states[-1]
    if first.dim() == last.dim() == 3 and first.shape[-1] != last.shape[-1]:
        return f"; {last.shape[-1]} wide, the first {first.shape[-1]}"
    return ""


def between_in_words(stack: Stack) -> str:
    """What the hidden states between the first and the last are."""
    between = stack.states[1:-1]
    if not between:
        return "none"
    count = 0
    for state in between:
        count += any(alike(run.gave, state) for run in stack.runs)
    if count == len(between):
        return "outputs of blocks"
    return f"{count} of {len(between)} are outputs of blocks"
