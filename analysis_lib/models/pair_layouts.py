"""Layout of a model that reads images or sounds with texts, from passes over an example.

The tower of the image or sound and the language model are stacks of their own. The vectors of a
language model stand for the tokens of its text, with those of the image or sound among them: they
change with the last token of the text, and the vectors of a tower do not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, ProcessorMixin

from analysis_lib.errors import AnalysisError
from analysis_lib.models.blocks import chains_beside, find_blocks
from analysis_lib.models.layouts import attentions_of, by_pattern, completed, uncaptured
from analysis_lib.models.pairs import MEDIA, PairReader, arguments, pair_kinds, readers
from analysis_lib.models.parts import Layout, Stack
from analysis_lib.models.probe import (
    Trace,
    evaluated,
    identical,
    is_encoder_decoder,
    probed,
    traced,
    traced_with_hidden_states,
)
from analysis_lib.models.reading import first_line

# Kinds of tokens of a stack whose model puts an image or a sound before its text or after it.
BESIDE = ("before", "after")
# Names of the arguments that hold an image or a sound.
FILES = {
    "pixel_values",
    "image_pixel_values",
    "input_values",
    "input_features",
    "audio_input_features",
}
# Outputs of models with two towers that hold the vector of a text.
_OF_TEXTS = ("text_embeds", "text_audio_embeds")


def find_pair_layout(
    name: str, model: PreTrainedModel, processor: ProcessorMixin, kind: str
) -> tuple[Layout, PairReader]:
    """The layout of a model for images or sounds with texts, and the reader of its input.

    Args:
        name: the name of the model, for errors.
        model: the model without a head.
        processor: its processor.
        kind: image+text or audio+text.

    Raises:
        AnalysisError: its processor reads none, the model cannot read what it makes of an example,
            or no blocks are found whose vectors stand for tokens.
    """
    if kind not in pair_kinds(processor):
        raise AnalysisError(
            f"{name}: its {type(processor).__name__} reads no {MEDIA[kind]}s with texts: give "
            "another model"
        )
    errors = []
    for reader in readers(processor, kind):
        try:
            with evaluated(model), probed(model):
                inputs = arguments(reader, model, *reader.example())
                trace = traced_with_hidden_states(model, inputs)
                layout = _layout(name, trace, reader)
                medium_ids = _medium_ids(name, trace, layout)
            return layout, replace(reader, medium_ids=medium_ids)
        except Exception as error:  # Models and processors fail in many ways.
            errors.append(error)
    # Of those that the processor reads: a placeholder that it does not know says nothing.
    read = [error for error in errors if not isinstance(error, AnalysisError)]
    error = (read or errors)[0]
    error = error.__cause__ or error
    raise AnalysisError(
        f"{name} is a {model.config.model_type} model, which cannot read an {kind} pair as its "
        f"{type(processor).__name__} prepares it ({first_line(error)}): give another model"
    ) from error


def _layout(name: str, trace: Trace, reader: PairReader) -> Layout:
    model = trace.model
    kind = reader.kind
    blocks = find_blocks(trace)
    blocks += chains_beside(blocks, trace)
    patterns = by_pattern(blocks, trace)
    _refuse_alternating(name, patterns, trace)
    reads_text = {*_reading_text(patterns, trace, reader)}
    stacks = []
    leading = 0
    for pattern, alike in patterns.items():
        stack = _stack(trace, reader, pattern, alike, pattern in reads_text, [*patterns])
        if stack is None:
            continue
        stacks.append(stack)
        if stack.tokens == "patches":
            leading = max(leading, _leading(trace, alike[0]))
    if not any(stack.tokens in ("text", "shifted", *BESIDE) for stack in stacks):
        raise AnalysisError(
            f"{name} is a {model.config.model_type} model, in which no block is found whose "
            "vectors stand for the tokens of a text"
        )
    vision = getattr(model.config, "vision_config", None)
    registers = getattr(vision, "num_register_tokens", 0)
    kept = {stack.blocks: patterns[stack.blocks] for stack in stacks}
    return Layout(
        tuple(stacks),
        kind,
        equal_lengths=True,
        class_tokens=max(0, leading - registers),
        uncaptured=uncaptured(trace, stacks, kept),
        listed=False,
        embeddings=_embeddings(trace, reader),
    )


def _embeddings(trace: Trace, reader: PairReader) -> tuple[str, ...]:
    """The outputs with a vector of the image or sound and one of the text, if there are both."""
    output = trace.output if isinstance(trace.output, Mapping) else {}
    of_file = output.get(f"{reader.medium}_embeds")
    for name in _OF_TEXTS:
        of_text = output.get(name)
        if of_file is None or of_text is None:
            continue
        if of_file.dim() == 2 and of_file.shape == of_text.shape:
            return f"{reader.medium}_embeds", name
    return ()


def _refuse_alternating(
    name: str, patterns: Mapping[str, Sequence[nn.Module]], trace: Trace
) -> None:
    """Raise an AnalysisError if blocks of two stacks alternate, so that none is a stack."""
    owner = {block: pattern for pattern, blocks in patterns.items() for block in blocks}
    order = [pattern for pattern, _ in itertools.groupby(filter(None, map(owner.get, trace.runs)))]
    for pattern in order:
        if order.count(pattern) > 1:
            other = order[order.index(pattern) + 1]
            raise AnalysisError(
                f"{name} is a {trace.model.config.model_type} model, in which blocks of {pattern} "
                f"and of {other} alternate"
            )


def _stack(
    trace: Trace,
    reader: PairReader,
    pattern: str,
    blocks: Sequence[nn.Module],
    reads_text: bool,
    patterns: Sequence[str],
) -> Stack | None:
    """The stack of the blocks that share a path; None if their vectors stand for no tokens."""
    vectors = trace.returned(blocks[0])
    if vectors.dim() not in (2, 3):
        return None
    is_decoder = is_encoder_decoder(trace.model) and "decoder" in pattern
    tokens = "patches" if reader.medium == "image" else "frames"
    if reads_text:
        tokens = _tokens(trace, blocks[0], reader, is_decoder)
    own = [attentions_of(block, trace) for block in blocks]
    stack = Stack(pattern, name=_label(pattern, patterns), tokens=tokens)
    return completed(stack, trace, blocks, own)


def _tokens(trace: Trace, block: nn.Module, reader: PairReader, is_decoder: bool) -> str:
    """The kind of tokens behind the vectors that a block reads, if these change with the text.

    Each word of a text must change one vector: then the first vectors are those of the text, or of
    an image or a sound before it.
    """
    name = "decoder_input_ids" if is_decoder else "input_ids"
    plain = trace.read(block)
    ids = trace.inputs[name]
    if len(plain) != 1 or plain.dim() != 3:
        return "queries"
    words = reader.first_and_last()
    offsets = set()
    for word, other in (words, words[::-1]):
        index = int((ids[0] == word).nonzero()[0])
        changed = ids.clone()
        changed[0, index] = other
        read = traced(trace.model, {**trace.inputs, name: changed}).read(block)
        where = (read != plain).any(-1)[0].nonzero().flatten().tolist()
        offsets |= {position - index for position in where}
    count = plain.shape[1] - ids.shape[1]
    if count == 0 and 0 in offsets:
        return "shifted" if is_decoder else "text"
    return {(0,): "after", (count,): "before"}.get(tuple(offsets), "queries")


def _label(pattern: str, patterns: Sequence[str]) -> str:
    """The name of a stack: the first part of its path by which it differs from the others."""
    parts = pattern.split(".")
    others = [other.split(".") for other in patterns if other != pattern]
    for index, part in enumerate(parts):
        others = [other for other in others if other[index : index + 1] == [part]]
        if not others:
            return part
    return pattern


def _reading_text(
    patterns: Mapping[str, Sequence[nn.Module]], trace: Trace, reader: PairReader
) -> Iterator[str]:
    """The stacks whose vectors change with the last word of the text."""
    first, last = reader.first_and_last()
    inputs = dict(trace.inputs)
    for name in {"input_ids", "decoder_input_ids", "qformer_input_ids"} & inputs.keys():
        ids = inputs[name].clone()
        where = (ids[0] == last).nonzero().flatten()
        if len(where):
            ids[0, where[-1]] = first
        inputs[name] = ids
    other = traced(trace.model, inputs)
    for pattern, blocks in patterns.items():
        if not identical(trace.returned(blocks[-1]), other.returned(blocks[-1])):
            yield pattern


def _medium_ids(name: str, trace: Trace, layout: Layout) -> tuple[int, ...]:
    """The ids of the tokens whose first vectors change with the image or sound.

    Raises:
        AnalysisError: the output of the model does not change with it.
    """
    ids = trace.inputs["input_ids"]
    inputs = dict(trace.inputs)
    for medium in FILES & inputs.keys():
        inputs[medium] = inputs[medium].flip(-1) + 1
    other = traced(trace.model, inputs)
    if all(map(identical, *map(_tensors, (trace.output, other.output)))):
        raise AnalysisError(f"{name} does not read its {' or '.join(MEDIA.values())}")
    for stack in layout.stacks:
        if stack.tokens == "text":
            block = next(block for block, path in trace.names.items() if stack.holds(path))
            before, after = trace.read(block), other.read(block)
            if before.shape == after.shape:
                changed = (before != after).any(-1)
                return tuple(ids[changed].unique().tolist())
    return ()


def _tensors(output: object) -> list[Tensor]:
    """The tensors of a model's output."""
    return [values for values in tree_leaves(output) if isinstance(values, Tensor)]


def _leading(trace: Trace, block: nn.Module) -> int:
    """Number of tokens before those of the patches: they do not change with the first pixel."""
    name = next(iter(FILES & trace.inputs.keys()), None)
    if name is None:
        return 0
    values = trace.inputs[name].clone()
    values.flatten()[0] += 1
    changed = traced(trace.model, {**trace.inputs, name: values}).read(block)
    before = trace.read(block)
    if before.dim() == 2:
        before, changed = before.unsqueeze(0), changed.unsqueeze(0)
    which = (before != changed).any(-1).any(0).nonzero().flatten()
    return int(which[0]) if len(which) else 0
