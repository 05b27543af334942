"""Layout of a model, from one pass over an example: its blocks, their attention and their keys.

Nothing is guessed from names. A pass over a few tokens shows which blocks run, in which order,
where they attend, and what every module reads and returns; anything not proven in this way is left
out.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from analysis_lib.errors import AnalysisError
from analysis_lib.models.blocks import find_blocks, is_inside, is_state, is_tokens_first
from analysis_lib.models.calls import first_vectors
from analysis_lib.models.devices import without_gradients
from analysis_lib.models.keys import find_keys
from analysis_lib.models.parts import Attention, Layout, Stack
from analysis_lib.models.probe import (
    Call,
    Trace,
    evaluated,
    example,
    identical,
    is_encoder_decoder,
    kind_of,
    probed,
    same,
    traced,
    traced_with_hidden_states,
)
from analysis_lib.models.rotations import find_rotation

NO_TOKENS = "which stand for no tokens: give another model"


def is_of(layout: Layout, model: PreTrainedModel) -> bool:
    """Whether a listed layout fits a model, rather than another part of the same architecture."""
    modules = dict(model.named_modules())
    if layout.part not in modules and kind_of(model) != layout.kind:
        return False
    paths = dict(modules.get(layout.part, model).named_modules())
    return any(stack.blocks.partition(".*")[0] in paths for stack in layout.stacks)


def model_part(name: str, model: PreTrainedModel, path: str) -> PreTrainedModel:
    """A part of a model that is itself a model.

    Raises:
        AnalysisError: there is no such part at this path.
    """
    parts = _parts(model)
    if path in parts:
        return parts[path]
    known = f"one of {', '.join(parts)}" if parts else "none: it has no part that is a model itself"
    raise AnalysisError(f"{name} has no part {path}: give {known}")


def _parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts that are themselves models, by path."""
    return {
        path: part
        for path, part in model.named_modules()
        if path and isinstance(part, PreTrainedModel)
    }


def find_layout(name: str, model: PreTrainedModel, processor: Callable) -> Layout:
    """The layout of a model, from a pass over a few tokens, an image or a second of sound.

    Args:
        name: the name of the model, for errors.
        model: the model without a head.
        processor: prepares the input of the model.

    Raises:
        AnalysisError: the model cannot read the output of its processor, or no blocks are found
            whose vectors stand for tokens.
    """
    path, trace, padding_matters = _trace_of_part(name, model, processor)
    model = trace.model
    kind = kind_of(trace.model)
    blocks = find_blocks(trace)
    by_path = by_pattern(blocks, trace)
    if not by_path:
        raise AnalysisError(
            f"{name} is a {model.config.model_type} model, in which no transformer block is found"
        )
    stacks = [_stack(name, trace, processor, pattern, alike) for pattern, alike in by_path.items()]
    if all(stack.cross for stack in stacks):
        # Without a stack over tokens of its own, the tokens behind the keys of cross-attention are
        # unknown.
        stacks = [replace(stack, cross=None) for stack in stacks]
    maps = trace.returned(blocks[0]).dim() == 4
    leading = 0
    is_grid = False
    if kind != "text":
        leading, is_grid = _leading_tokens(name, trace, blocks[0])
    if is_grid:
        # The positions of the grid are tokens; attention in windows is not captured.
        maps = False
        stacks = [replace(stack, attention=None, each=(), further=()) for stack in stacks]
    registers = getattr(model.config, "num_register_tokens", 0)
    return Layout(
        tuple(stacks),
        kind,
        path,
        equal_lengths=padding_matters or kind == "audio",
        class_tokens=max(0, leading - registers),
        maps=maps,
        uncaptured=uncaptured(trace, stacks, by_path),
        listed=False,
    )


def by_pattern(blocks: Sequence[nn.Module], trace: Trace) -> dict[str, list[nn.Module]]:
    """Blocks by their paths, in which ``*`` stands for an index."""
    by_path: dict[str, list[nn.Module]] = {}
    for block in blocks:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", trace.names[block])
        by_path.setdefault(pattern, []).append(block)
    return by_path


# --- The example ----------------------------------------------------------------------------------


def _trace_of_part(
    name: str, model: PreTrainedModel, processor: Callable
) -> tuple[str, Trace, bool]:
    """Part that can read an example: its path, its trace, and whether padding changes vectors."""
    reads = "text" if isinstance(processor, PreTrainedTokenizerBase) else kind_of(model)
    paths = [""]
    # One half of an encoder-decoder would be taken for the whole.
    if reads != "text" or not is_encoder_decoder(model):
        paths += [path for path, part in _parts(model).items() if kind_of(part) == reads]
    errors = []
    for path in paths:
        part = model.get_submodule(path)
        try:
            inputs = example(part, processor)
            with evaluated(part), probed(part):
                trace = traced_with_hidden_states(part, inputs)
                padding_matters = kind_of(part) == "text" and _padding_changes(part, inputs)
            return path, trace, padding_matters
        except Exception as error:  # Models and processors fail in many ways.
            errors.append(error)
    raise _unreadable(name, model, processor, errors[0]) from errors[0]


def _unreadable(
    name: str, model: PreTrainedModel, processor: Callable, error: Exception
) -> AnalysisError:
    first_line, *_ = str(error).splitlines() or [""]
    given = (
        "a few token ids"
        if kind_of(model) == "text"
        else f"what its {type(processor).__name__} makes"
    )
    parts = _parts(model)
    remedy = f"one of its parts ({', '.join(parts)}), or " if parts else ""
    return AnalysisError(
        f"{name} is a {model.config.model_type} model, which cannot read {given} alone "
        f"({type(error).__name__}: {first_line}): give {remedy}another model"
    )


def _padding_changes(model: PreTrainedModel, inputs: Mapping[str, Tensor | bool]) -> bool:
    """Whether a text has other vectors in a batch with a longer text than alone."""
    half = inputs["input_ids"].shape[1] // 2
    short = dict(inputs)
    batch = dict(inputs)
    for name, values in inputs.items():
        if isinstance(values, Tensor):
            short[name], rest = values[:, :half], values[:, half:]
            if "mask" in name:
                rest = torch.zeros_like(rest)
            batch[name] = torch.cat([values, torch.cat([short[name], rest], 1)])
    with without_gradients(model):
        alone = first_vectors(model(**short))
        both = first_vectors(model(**batch))
    return not same(both[1:, :half], alone)


def _leading_tokens(name: str, trace: Trace, block: nn.Module) -> tuple[int, bool]:
    """Number of leading tokens of an image or sound, and whether the vectors are a grid of tokens.

    The vectors of leading tokens do not change with the first number of the input. A grid is a
    feature map whose channels come last.

    Raises:
        AnalysisError: there are unknown tokens at the end, a sound has its channels first, or
            passes differ from one another.
    """

    def read(index: int | None) -> Tensor:
        inputs = copy.deepcopy(dict(trace.inputs))
        if index is not None:
            values = next(values for values in inputs.values() if isinstance(values, Tensor))
            values.flatten(1)[:, index] += 1
        return traced(trace.model, inputs).read(block)[0]

    with evaluated(trace.model):
        plain = read(None)
        if not identical(plain, trace.read(block)[0]):
            kind = kind_of(trace.model)
            raise AnalysisError(
                f"{name} makes other vectors of one {kind} each time: switch its masking off"
            )
        by_first = read(0) != plain
        by_last = read(-1) != plain
    # In a grid, the first number changes all channels of a few positions.
    positions = by_first.flatten(1).any(1).float().mean()
    channels = by_first.flatten(0, -2).any(0).float().mean()
    if plain.dim() == 3:
        return 0, bool(positions < channels)
    if positions > channels:
        raise AnalysisError(f"{name} has vectors with channels first, {NO_TOKENS}")
    first = by_first.any(-1).nonzero().flatten()
    last = by_last.any(-1).nonzero().flatten()
    detection = getattr(trace.model.config, "num_detection_tokens", 0)
    if len(last) and last.max() + 1 + detection < len(plain):
        raise AnalysisError(
            f"{name} reads further tokens behind those of its input: give another model"
        )
    return int(first[0]) if len(first) else 0, False


# --- A stack --------------------------------------------------------------------------------------


def _stack(
    name: str, trace: Trace, processor: Callable, pattern: str, blocks: list[nn.Module]
) -> Stack:
    """The stack of the blocks that share a path."""
    model = trace.model
    kind = kind_of(trace.model)
    tokens_first = _reads_tokens_first(blocks[0], trace)
    vectors = trace.returned(blocks[0])
    if tokens_first:
        vectors = vectors.transpose(0, 1)
    is_decoder = is_encoder_decoder(model) and "decoder" in pattern
    sides = ("decoder",) if is_decoder else ("encoder", "decoder")
    label = next((side for side in sides if side in pattern), pattern.partition(".")[0])
    is_padded = False
    if kind == "text":
        ids = trace.inputs["decoder_input_ids" if is_decoder else "input_ids"]
        is_padded = vectors.dim() == 3 and _is_cut_behind(blocks, trace, ids.shape[1])
        _refuse_strange_text(name, model, pattern, vectors, ids, is_padded)
    elif len(vectors) != 1 or vectors.dim() not in (3, 4):
        raise AnalysisError(
            f"{name} is a {model.config.model_type} model: in {pattern}, the vectors of {kind}s "
            f"are of shape {tuple(vectors.shape)}, {NO_TOKENS}"
        )
    own: list[list[Attention]] = [[] for _ in blocks]
    if not is_padded:
        # Padded vectors are excluded, since attention reads the padding, too.
        own = [
            attentions_of(block, trace, is_stage=kind != "text", tokens_first=tokens_first)
            for block in blocks
        ]
    cross = ()
    if is_decoder:
        cross = _common([tuple(attentions_of(block, trace, cross=True)) for block in blocks])
    stack = Stack(
        pattern,
        name=label,
        tokens=_token_kind(kind, is_decoder, processor, vectors),
        cross=next((attention for attention in cross if attention.key), None),
        further=_common([tuple(attentions[1:]) for attentions in own]),
        # BigBird pads long texts.
        padded=is_padded
        or any(hasattr(module, "set_attention_type") for module in model.modules()),
        tokens_first=tokens_first,
    )
    return completed(stack, trace, blocks, own)


def completed(
    stack: Stack, trace: Trace, blocks: Sequence[nn.Module], own: Sequence[Sequence[Attention]]
) -> Stack:
    """A stack with the attention of its blocks, and with the blocks that do not run.

    Args:
        own: the attentions of each block; the first is that of the stack.
    """
    each = tuple(attentions[0] if attentions else None for attentions in own)
    counts = Counter(attention for attention in each if attention)
    most_common = counts.most_common(1)[0][0] if counts else None
    if len({*each}) < 2:
        each = ()
    # Some blocks do not run in the example, such as those that read an image beside a text.
    ran = {trace.names[block] for block in blocks}
    unused = [path for path in trace.names.values() if stack.holds(path) and path not in ran]
    return replace(stack, attention=most_common, each=each, unused=tuple(unused))


def _common(attentions: Sequence[tuple[Attention, ...]]) -> tuple[Attention, ...]:
    """Attentions that all blocks share; empty if blocks differ."""
    different = {*attentions}
    return different.pop() if len(different) == 1 else ()


def _reads_tokens_first(block: nn.Module, trace: Trace) -> bool:
    """Whether a first block reads token x utterance x width."""
    read = trace.read(block)
    if read is None:
        return False
    return any(
        is_tokens_first(read, states[0]) and is_state(read, states[0]) for states in trace.hidden
    )


def _token_kind(kind: str, is_decoder: bool, processor: Callable, vectors: Tensor) -> str:
    """Kind of tokens behind vectors, see :class:`~analysis_lib.models.parts.Stack`."""
    if kind == "text":
        return "shifted" if is_decoder else "text"
    if kind == "image":
        return "patches"
    # Whisper's processor pads a sound to a window in which each vector stands for two steps.
    window = getattr(processor, "n_samples", None)
    return (
        "windows" if window and window == 2 * processor.hop_length * vectors.shape[1] else "frames"
    )


def _refuse_strange_text(
    name: str, model: PreTrainedModel, pattern: str, vectors: Tensor, ids: Tensor, is_padded: bool
) -> None:
    if vectors.dim() == 3 and (is_padded or vectors.shape[:2] == ids.shape):
        return
    raise AnalysisError(
        f"{name} is a {model.config.model_type} model: {ids.shape[1]} tokens of a text become "
        f"vectors of shape {tuple(vectors.shape)} in {pattern}, {NO_TOKENS}"
    )


def _is_cut_behind(blocks: Sequence[nn.Module], trace: Trace, tokens: int) -> bool:
    """Whether a model pads its vectors to a window, and later drops those after its tokens.

    Its hidden states are then shorter than the input of its first block, or a later module reads
    fewer vectors than its last block returns.
    """
    first = trace.read(blocks[0])
    last = trace.returned(blocks[-1])
    if last.shape[1] <= tokens:
        return False
    if any(states[0].shape[1] == tokens and is_state(first, states[0]) for states in trace.hidden):
        return True
    for runs in trace.runs.values():
        for run in runs:
            is_short = run.read is not None and run.read.dim() == 3 and run.read.shape[1] == tokens
            if is_short and is_state(last, run.read):
                return True
    return False


# --- Attention ------------------------------------------------------------------------------------


def attentions_of(
    block: nn.Module,
    trace: Trace,
    is_stage: bool = False,
    cross: bool = False,
    tokens_first: bool = False,
) -> list[Attention]:
    """The attentions of a block: modules in it that attend once, with one query per token.

    Args:
        block: the block to search.
        trace: a trace of its model.
        is_stage: whether the block may be a stage of several blocks, so that it must attend only
            once.
        cross: whether to search for attention to another stack, which has as many tokens as there
            are keys.
        tokens_first: whether the block returns token x utterance x width.
    """
    run = trace.runs[block][-1]
    vectors = run.returned.transpose(0, 1) if tokens_first else run.returned
    if vectors.dim() == 2:
        # The tokens of one image, without an axis of images.
        vectors = vectors.unsqueeze(0)
    tokens = vectors.shape[1] if vectors.dim() == 3 else vectors[0, 0].numel()
    calls = _joined([trace.calls[index] for index in run.calls], tokens)
    if cross:
        calls = [call for call in calls if call.key.shape[2] != tokens]
    if is_stage and len(calls) > 1:
        return []
    paths = {module: path for path, module in block.named_modules()}
    times = Counter(call.module for call in calls)
    attentions = []
    for call in calls:
        has_all_queries = call.query.shape[0] == len(vectors) and call.query.shape[2] == tokens
        is_cross = call.key.shape[2] != tokens
        if (
            has_all_queries
            and is_cross == cross
            and times[call.module] == 1
            and call.module in paths
        ):
            keys = find_keys(call, trace)
            rotation = find_rotation(call, trace, keys)
            attentions.append(Attention(paths[call.module], **keys, **rotation, own=call.own))
    return attentions


def _joined(calls: Sequence[Call], tokens: int) -> list[Call]:
    """Calls of attention, where those of one module in windows of an image are one call."""
    of_module: dict[nn.Module, list[Call]] = {}
    for call in calls:
        of_module.setdefault(call.module, []).append(call)
    joined = []
    for module, own in of_module.items():
        counts = [call.query.shape[2] for call in own]
        are_windows = counts == [call.key.shape[2] for call in own] and sum(counts) == tokens
        if len(own) > 1 and are_windows and all(call.is_plain for call in own):
            query = torch.cat([call.query for call in own], 2)
            key = torch.cat([call.key for call in own], 2)
            own = [Call(module, query, key)]
        joined += own
    return joined


def uncaptured(
    trace: Trace, stacks: Sequence[Stack], blocks: Mapping[str, Sequence[nn.Module]]
) -> tuple[str, ...]:
    """The paths of the modules that attend, and whose attention is not captured.

    They call the interface or take a softmax of products. If none does, and no attention is
    captured, they are the modules with "attention" in their name: some have no softmax.
    """
    captured: set[nn.Module] = set()
    for stack in stacks:
        for index, block in enumerate(blocks[stack.blocks]):
            for attention in (stack.attention_of(index), stack.cross, *stack.further):
                if attention:
                    # The softmax may be in a submodule.
                    captured.update(block.get_submodule(attention.module).modules())
    attending = {*trace.softmaxes, *(call.module for call in trace.calls)}
    if not attending and not captured:
        named = [module for module in trace.runs if "attention" in type(module).__name__.lower()]
        # Only innermost modules.
        for module in named:
            if not any(is_inside(other, [module]) for other in named):
                attending.add(module)
    return tuple(path for module, path in trace.names.items() if module in attending - captured)
