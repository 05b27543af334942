"""The blocks of a model, found in a trace: the modules whose outputs are its hidden states."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from analysis_lib.models.probe import Run, Trace, identical, is_encoder_decoder, kind_of

Modules = list[nn.Module]


def find_blocks(trace: Trace) -> Modules:
    """The blocks of all stacks of a model, in the order in which they first ran."""
    lists = _lists_that_ran(trace)
    blocks = _with_what_stands_around(_declared(trace), trace) or _chained(lists, trace)
    if kind_of(trace.model) == "text":
        # In image models, stages look like further stacks.
        blocks += _of_further_stacks(blocks, lists, trace)
    if is_encoder_decoder(trace.model):
        # Some models return only the hidden states of their decoder.
        for side in ("encoder", "decoder"):
            if not any(side in trace.names[block] for block in blocks):
                on_side = [
                    modules for modules in lists if trace.names[modules[0]].startswith(f"{side}.")
                ]
                blocks += _chained(on_side, trace)
    outermost = {block for block in blocks if not is_inside(block, blocks)}
    return [
        module
        for module in trace.runs
        if module in outermost and trace.returned(module) is not None
    ]


def chains_beside(blocks: Sequence[nn.Module], trace: Trace) -> Modules:
    """Modules of lists that attend by the interface, and lie neither in blocks nor around any.

    Of a model of several parts, some may not declare their blocks.
    """
    beside = []
    for modules in _lists_that_ran(trace):
        parts = {part for module in modules for part in module.modules()}
        is_apart = not parts.intersection(blocks) and not is_inside(modules[0], blocks)
        if is_apart and _all_attend(modules, trace) and len({*map(type, modules)}) == 1:
            beside.append(modules)
    outermost = [
        modules for modules in beside if not is_inside(modules[0], [*itertools.chain(*beside)])
    ]
    return [*itertools.chain(*outermost)]


def is_inside(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    """Whether a module is a part of one of some others."""
    return any(module is not other and module in {*other.modules()} for other in others)


def _lists_that_ran(trace: Trace) -> list[Modules]:
    lists = []
    for module in trace.model.modules():
        if isinstance(module, nn.ModuleList):
            ran = [part for part in module if part in trace.runs]
            if ran:
                lists.append(ran)
    return lists


# --- Declared modules -----------------------------------------------------------------------------


def _declared(trace: Trace) -> Modules:
    """The modules that a model, or a part of it, declares to return its hidden states."""
    declared: dict[nn.Module, None] = {}
    for part in trace.model.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("hidden_states", ())
        if not isinstance(recorders, list | tuple):
            recorders = [recorders]
        for recorder in recorders:
            made = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
            if isinstance(made, type):
                declared |= dict.fromkeys(
                    module for module in part.modules() if isinstance(module, made)
                )
    return [module for module in declared if module in trace.runs]


def _with_what_stands_around(declared: Modules, trace: Trace) -> Modules:
    """Declared modules, each replaced by the block around it, if there is one.

    Such a block has the input and output of the module in it, and either attends outside that
    module or is in a list with other declared modules.
    """
    known = {*declared}
    around = {}
    for blocks in trace.model.modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        is_mixed = any(block in known for block in blocks)
        for block in blocks:
            if block not in trace.runs or block in known:
                continue
            run = trace.runs[block][-1]
            for part in declared:
                inner = trace.runs[part][-1]
                attends = len(run.calls) > len(inner.calls)
                if (is_mixed or attends) and is_inside(part, [block]) and _do_the_same(run, inner):
                    around[part] = block
    return [*dict.fromkeys(around.get(part, part) for part in declared)]


def _do_the_same(run: Run, other: Run) -> bool:
    return identical(run.read, other.read) and identical(run.returned, other.returned)


# --- Chains of modules ----------------------------------------------------------------------------


def _chained(lists: Sequence[Modules], trace: Trace) -> Modules:
    """Modules of the lists that call the attention interface; otherwise the longest chains."""
    alike = [modules for modules in lists if len({*map(type, modules)}) == 1]
    attending = [modules for modules in alike if _all_attend(modules, trace)]
    chosen = [modules for modules in attending if not _holds_one_of(modules, attending)]
    if not chosen:
        chains = [modules for modules in alike if len(modules) > 1 and _is_chain(modules, trace)]
        longest = max(map(len, chains), default=0)
        chosen = [modules for modules in chains if len(modules) == longest]
    return [*itertools.chain(*chosen)]


def _all_attend(modules: Modules, trace: Trace) -> bool:
    """Whether every run of some modules calls the attention interface."""
    for run in itertools.chain(*map(trace.runs.get, modules)):
        calls = [trace.calls[index] for index in run.calls]
        if all(call.own for call in calls):
            return False
    return True


def _holds_one_of(modules: Modules, lists: Sequence[Modules]) -> bool:
    """Whether all modules of one of some lists are inside these modules."""
    return any(_are_inside(others, modules) for others in lists)


def _are_inside(modules: Modules, others: Modules) -> bool:
    return all(is_inside(module, others) for module in modules)


def _is_chain(modules: Modules, trace: Trace) -> bool:
    """Whether each module reads what the one before returned."""
    pairs = itertools.pairwise(modules)
    return all(
        identical(trace.runs[before][0].returned, trace.read(after)) for before, after in pairs
    )


# --- Hidden states --------------------------------------------------------------------------------


def _of_further_stacks(blocks: Modules, lists: Sequence[Modules], trace: Trace) -> Modules:
    """The modules of lists that make hidden states which none of the blocks reads."""
    missing = []
    for states in trace.hidden:
        if not any(is_state(trace.read(block), states[0]) for block in blocks):
            missing.append(states)
    further = []
    for modules in lists:
        if any(_makes(modules, states, trace) for states in missing):
            further += modules
    return further


def _makes(modules: Modules, states: Sequence[Tensor], trace: Trace) -> bool:
    """Whether modules read the hidden states of a stack, from the first on, and return the next."""
    if len(modules) >= len(states):
        return False
    for index, module in enumerate(modules):
        returned = trace.runs[module][0].returned
        if not is_state(trace.read(module), states[index]):
            return False
        if module is not modules[-1] and not is_state(returned, states[index + 1]):
            return False
    # A norm may follow the last module.
    return returned is not None and returned.shape == trace.read(modules[-1]).shape


def is_state(vectors: Tensor | None, state: Tensor) -> bool:
    """Whether vectors are a hidden state, except for padding after it."""
    if vectors is None or vectors.dim() != state.dim():
        return False
    if is_tokens_first(vectors, state):
        vectors = vectors.transpose(0, 1)
    if vectors.dim() == 3:
        vectors = vectors[:, : state.shape[1]]
    return identical(vectors, state)


def is_tokens_first(vectors: Tensor, state: Tensor) -> bool:
    """Whether vectors are token x utterance x width, for the hidden state of one text."""
    return vectors.dim() == 3 and vectors.shape[1] == len(state) == 1 < len(vectors)
