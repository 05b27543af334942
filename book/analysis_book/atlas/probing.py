"""What transformers returns of one model: every fact of the atlas, from calls of that model alone.

Nothing here uses how the library measures, so that it can be compared with it.
"""

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as of_transformers

from analysis_book.atlas.conventions import (
    OF_WEIGHTS,
    USUAL_SCALE,
    VECTORS,
    attention_kind,
    dropout_side,
    in_symbols,
    is_scaled_before,
    rotation_bases,
    rotation_kind,
    row_sums,
    scale_in_words,
)
from analysis_book.atlas.small import reason_of
from analysis_book.atlas.states import (
    Stack,
    between_in_words,
    first_in_words,
    last_in_words,
    number_in_words,
    stacks_of,
    tuples_of,
)
from analysis_book.atlas.tracing import (
    NOTING,
    AttentionCall,
    Rotation,
    Trace,
    first_tensor,
    traced,
)

# How many [PAD] stand before a text to see what they change.
PADS = 3
# Positions at which a text may begin: behind that of [PAD] in the family of RoBERTa.
FIRST_POSITIONS = (0, 1, 2)
# The largest difference between numbers that are the same up to rounding, by the largest of them.
ROUNDING = 1e-3
ASKED = {"output_hidden_states": True, "output_attentions": True}


def probe(model: PreTrainedModel, inputs: Mapping[str, object]) -> dict[str, str]:
    """The facts of the atlas on one model, each as words; what cannot be had says why.

    Args:
        model: a model without a head, in evaluation mode; it is as before afterwards.
        inputs: the arguments of a call of it that works.
    """
    facts = {}
    with quiet():
        facts["default_attention"] = _default_attention(model)
        by_default = _called(model, inputs, ASKED)
        trace, reason = _traced(model, inputs, "eager")
        eager = model
        if _has_empty_attentions(trace.output) and _chooses_when_built(model):
            eager = _built_eagerly(model)
            trace, reason = _traced(eager, inputs, "eager")
        of_states = eager, trace
        if _is_nan(trace.output):
            by_itself, _ = _traced(model, inputs, facts["default_attention"])
            of_states = model, by_itself
        facts |= facts_of_states(*of_states, inputs)
        facts |= facts_of_attentions(eager, trace, inputs)
        facts["attentions_by_default"] = beside_eager(by_default, trace.output)
        if reason:
            facts["attentions"] = f"eager attention fails: {reason}"
        facts |= facts_of_interface(_traced(model, inputs, NOTING)[0])
        facts |= facts_of_padding(model, inputs)
        facts["two_calls"] = two_calls(model, inputs)
    return facts


# --- Calls ----------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """A context without warnings and progress bars of transformers."""
    before = of_transformers.get_verbosity()
    bars = of_transformers.is_progress_bar_enabled()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            of_transformers.set_verbosity(before)
            if bars:
                of_transformers.enable_progress_bar()


def _default_attention(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_attn_implementation", None))


@contextmanager
def chosen_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """A context in which a model attends by another function, if it has a choice."""
    before = getattr(model.config, "_attn_implementation", None)
    with suppress(Exception):  # Some that compute attention by themselves refuse to be asked.
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        with suppress(Exception):
            model.set_attn_implementation(before)


def _has_empty_attentions(output: object) -> bool:
    """Whether some of the attentions of an output are missing."""
    for _, _, entries in tuples_of(output, "attentions"):
        if not entries or any(entry is None for entry in entries):
            return True
    return False


def _chooses_when_built(model: PreTrainedModel) -> bool:
    """Whether the classes of modules that attend are chosen when the model is made."""
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    names = {name for source in sources for name in vars(source)}
    return any(name.endswith("_ATTENTION_CLASSES") for name in names)


def _built_eagerly(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, made with eager attention."""
    config = copy.deepcopy(model.config)
    made = type(model)._from_config(config, attn_implementation="eager")
    made.load_state_dict(model.state_dict())
    return made.float().eval()


def _traced(
    model: PreTrainedModel, inputs: Mapping[str, object], attention: str
) -> tuple[Trace, str]:
    """A call that returns hidden states and attentions, or whichever of them it can.

    Returns:
        What was seen in it, and why the model does not attend as was asked, if it does not.
    """
    hidden, attentions = ({name: True} for name in ASKED)
    reason = ""
    with chosen_attention(model, attention):
        for options in (ASKED, hidden, attentions, {}):
            try:
                return traced(model, inputs, **options), ""
            except Exception as error:
                reason = reason_of(error)
    for options in (ASKED, hidden, {}):
        with suppress(Exception):
            return traced(model, inputs, **options), reason
    raise RuntimeError(reason)


@torch.no_grad()
def _called(
    model: PreTrainedModel, inputs: Mapping[str, object], options: Mapping[str, bool]
) -> object:
    """The output of a call, or the error."""
    try:
        return model(**inputs, **options)
    except Exception as error:
        return error


def _is_nan(output: object) -> bool:
    """Whether the last hidden states are no numbers, as where every key of a query is hidden."""
    last = first_tensor(output)
    return last is not None and bool(last.isnan().any())


def joined(by_stack: Mapping[str, str]) -> str:
    """What holds of several stacks, once if it is the same.

    >>> joined({"encoder": "1", "decoder": "1"}), joined({"encoder": "1", "decoder": "2"})
    ('1', 'encoder: 1; decoder: 2')
    """
    words = dict.fromkeys(by_stack.values())
    if len(words) <= 1:
        return next(iter(words), "")
    return "; ".join(f"{label or 'model'}: {word}" for label, word in by_stack.items())


# --- Hidden states --------------------------------------------------------------------------------


def sizes_of(inputs: Mapping[str, object], read: Tensor | None) -> dict[int, str]:
    """The names of axes by their sizes, of an input and of what its first block reads."""
    sizes = {}
    if read is not None and read.dim() in (2, 3):
        sizes[read.shape[-2]] = "token"
    for name, axis in (("decoder_input_ids", "decoder token"), ("input_ids", "token")):
        if isinstance(inputs.get(name), Tensor):
            sizes[inputs[name].shape[1]] = axis
    return sizes


def _batch(inputs: Mapping[str, object]) -> int | None:
    """How many texts, images or sounds an input has; none if it packs them into one sequence."""
    if "grid_thw" in inputs:
        return None
    return next(value for value in inputs.values() if isinstance(value, Tensor)).shape[0]


def facts_of_states(
    model: PreTrainedModel, trace: Trace, inputs: Mapping[str, object]
) -> dict[str, str]:
    """The facts on hidden states."""
    names = ("hidden_states", "first_state", "states_between", "last_state", "state_axes")
    stacks = stacks_of(model, trace)
    if not stacks:
        return dict.fromkeys((*names, "blocks"), "none")
    facts: dict[str, dict[str, str]] = {name: {} for name in names}
    for stack in stacks:
        label = stack.label
        facts["hidden_states"][label] = number_in_words(len(stack.states), len(stack.runs))
        facts["first_state"][label] = first_in_words(stack, trace)
        facts["states_between"][label] = between_in_words(stack)
        facts["last_state"][label] = last_in_words(stack, trace)
        facts["state_axes"][label] = _axes_of_states(stack, inputs)
    facts["blocks"] = {stack.label: _path_of_blocks(stack) for stack in stacks}
    return {name: joined(by_stack) for name, by_stack in facts.items()}


def _path_of_blocks(stack: Stack) -> str:
    """Where the model keeps the list of the blocks of a stack, or of the norms that end them."""
    if not stack.runs:
        return "not recognised"
    path = stack.runs[0].path.rpartition(".")[0]
    return f"{path} (norms that end blocks)" if stack.ends_in_norms else path


def _axes_of_states(stack: Stack, inputs: Mapping[str, object]) -> str:
    state = stack.states[0]
    read = stack.runs[0].read if stack.runs else state
    batch = _batch(inputs)
    if state.dim() == 2:
        # All tokens of a batch in one sequence.
        return "token × width"
    sizes = sizes_of(inputs, read)
    if state.dim() == 3 and state.shape[0] == batch:
        # By their order, since two sizes may be equal by chance.
        return f"batch × {sizes.get(state.shape[1], 'token')} × width"
    if state.dim() == 3 and state.shape[0] == 1:
        return "1 × token × width"
    if "input_ids" in inputs:
        return in_symbols(state.shape, {**sizes, state.shape[-1]: "width"}, batch)
    if state.dim() == 4 and state.shape[0] == batch:
        _, first, second, third = state.shape
        if second == third:
            return "batch × channel × row × column"
        if first == second:
            return "batch × row × column × channel"
    return in_symbols(state.shape, {}, batch)


# --- Attentions -----------------------------------------------------------------------------------


def facts_of_attentions(
    model: PreTrainedModel, trace: Trace, inputs: Mapping[str, object]
) -> dict[str, str]:
    """The facts on attentions, under eager attention."""
    names = ("attentions", "attention_kind", "attention_axes", "row_sums", "dropout")
    stacks = {stack.label: stack for stack in stacks_of(model, trace)}
    facts: dict[str, dict[str, str]] = {name: {} for name in names}
    given = [*tuples_of(trace.output, "attentions")]
    # That of another stack is empty where there is none.
    for label, _, entries in [each for each in given if each[2]] or given:
        side = label.replace("cross", "decoder").strip()
        stack = stacks.get(side) or stacks.get("")
        sizes = sizes_of(inputs, _first_read(stack))
        if label.startswith("cross") and _first_read(stacks.get("encoder")) is not None:
            sizes.setdefault(_first_read(stacks["encoder"]).shape[-2], "token")
        of_label = _facts_of_entries(model, trace, sizes, _batch(inputs), entries, stack)
        for name, words in of_label.items():
            facts[name][label] = words
    if not facts["attentions"]:
        return dict.fromkeys(names, "none")
    return {name: joined(by_stack) for name, by_stack in facts.items()}


def _first_read(stack: Stack | None) -> Tensor | None:
    return stack.runs[0].read if stack and stack.runs else None


def _facts_of_entries(
    model: PreTrainedModel,
    trace: Trace,
    sizes: Mapping[int, str],
    batch: int | None,
    entries: object,
    stack: Stack | None,
) -> dict[str, str]:
    if entries is None or not isinstance(entries, list | tuple) or not entries:
        word = {None: "None"}.get(entries, "empty") if not entries else type(entries).__name__
        return {"attentions": word, "attention_kind": "none"}
    blocks = len(stack.runs) if stack else 0
    if stack and stack.ends_in_norms and len(entries) != blocks:
        # A norm may end several blocks, and be none of those that attend.
        blocks = 0
    tokens = [size for size, name in sizes.items() if name == "token"]
    has_sink = any("sink" in name for name, _ in model.named_parameters())
    kinds = [attention_kind(each, trace, has_sink, tokens) for each in entries]
    tensors = [each for each in entries if isinstance(each, Tensor) and each.dim() > 1]
    facts = {"attentions": attention_number(len(entries), blocks)}
    facts["attention_kind"] = listed(Counter(kinds))
    weights = [each for each, kind in zip(entries, kinds, strict=True) if kind in OF_WEIGHTS]
    facts["row_sums"] = row_sums(weights) if weights else "no weights"
    if tensors:
        heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
        if isinstance(heads, int):
            sizes = {heads: "head", **sizes}
        axes = Counter()
        for each, kind in zip(entries, kinds, strict=True):
            if isinstance(each, Tensor) and each.dim() > 1:
                axes[_axes_of_attention(each, kind, sizes, batch)] += 1
        facts["attention_axes"] = listed(axes)
        facts["dropout"] = listed(Counter(dropout_side(each, trace) for each in tensors))
    return facts


def _axes_of_attention(
    attention: Tensor, kind: str, sizes: Mapping[int, str], batch: int | None
) -> str:
    shape = attention.shape
    if kind == VECTORS and attention.dim() == 2:
        return "token × width"
    if kind == VECTORS and attention.dim() == 3:
        return "batch × token × width"
    if attention.dim() == 4 and shape[0] == batch and shape[-1] in sizes:
        # Heads may be as many as anything else.
        sizes = {size: name for size, name in sizes.items() if name != "head"}
        return f"batch × head × {in_symbols(shape[2:], sizes)}"
    return in_symbols(shape, sizes, batch)


def attention_number(count: int, blocks: int) -> str:
    """How many attentions there are, beside the blocks that ran."""
    if count == blocks:
        return "one per block"
    if not blocks:
        return str(count)
    return f"{count} for {blocks} blocks" if count < blocks else f"{count} from {blocks} blocks"


def listed(counts: Mapping[str, int]) -> str:
    """Words with how often each holds, if not always the same one does."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} ({count})" for word, count in counts.items())


def beside_eager(by_default: object, eager: object) -> str:
    """What ``attentions`` hold under the default attention, beside those under eager attention."""
    if isinstance(by_default, Exception):
        return f"error: {reason_of(by_default)}"
    words = {}
    wanted = {label: entries for label, _, entries in tuples_of(eager, "attentions")}
    for label, _, entries in tuples_of(by_default, "attentions"):
        if label in wanted and not wanted[label] and any(wanted.values()):
            continue
        words[label] = _beside(entries, wanted.get(label))
    return joined(words) or "none"


def _beside(entries: object, wanted: object) -> str:
    if entries is None:
        return "None"
    if not isinstance(entries, list | tuple):
        return f"a {type(entries).__name__}"
    if not entries:
        return "an empty tuple"
    if all(each is None for each in entries):
        return "a tuple of None"
    if not isinstance(wanted, list | tuple) or len(wanted) != len(entries):
        return f"{len(entries)} instead of {len(wanted or ())} entries"
    same = [_same(each, other) for each, other in zip(entries, wanted, strict=True)]
    return "as under eager" if all(same) else "other numbers than under eager"


def _same(tensor: object, other: object) -> bool:
    """Whether two entries are the same up to rounding."""
    if not isinstance(tensor, Tensor) or not isinstance(other, Tensor):
        return type(tensor) is type(other)
    if tensor.shape != other.shape:
        return False
    if torch.equal(tensor, other):
        return True
    difference = (tensor.float() - other.float()).abs().max()
    return bool(difference <= ROUNDING * other.float().abs().max())


# --- The attention function -----------------------------------------------------------------------


def facts_of_interface(trace: Trace) -> dict[str, str]:
    """The facts on rotations, and on what modules give to the attention function."""
    calls = trace.attentions
    unseen = "no attention"
    if trace.softmaxes:
        unseen = "not seen: it computes attention by itself"
    names = ("key_groups", "scale", "cap", "window")
    facts = dict.fromkeys(names, unseen)
    if calls:
        facts |= {
            "key_groups": listed(Counter(_groups(each) for each in calls)),
            "scale": listed(Counter(_scale(each, trace) for each in calls)),
            "cap": listed(Counter(_cap(each) for each in calls)),
            "window": listed(Counter(_window(each) for each in calls)),
        }
    facts["rotation"] = "none"
    facts["rotation_bases"] = "none"
    if trace.rotations:
        facts["rotation"] = _rotations(trace)
        facts["rotation_bases"] = rotation_bases(_of_attention(trace.rotations))
    return facts


def _rotations(trace: Trace) -> str:
    """How queries and keys are rotated, by the modules that attend."""
    if not trace.attentions:
        return rotation_kind(_of_attention(trace.rotations), None)
    counts = Counter()
    module, before, rotations = None, 0, []
    for call in trace.attentions:
        # Some attend twice with the same queries and keys.
        if call.rotations > before or call.module is not module:
            rotations = _of_attention(trace.rotations[before : call.rotations])
        counts[rotation_kind(rotations, call.queries[-1])] += 1
        module, before = call.module, call.rotations
    return listed(counts)


def _of_attention(rotations: Sequence[Rotation]) -> list[Rotation]:
    """Those of queries and keys; what chooses keys to attend to has vectors of its own."""
    kinds = [type(each.module).__name__ for each in rotations]
    return [
        each for each, kind in zip(rotations, kinds, strict=True) if not kind.endswith("Indexer")
    ]


def _groups(call: AttentionCall) -> str:
    queries, keys = call.queries[1], call.keys[1]
    if queries == keys:
        return "a key for each query head"
    return f"{queries} query heads, {keys} key head{'s' * (keys > 1)}"


def _scale(call: AttentionCall, trace: Trace) -> str:
    width = call.queries[-1]
    scaling = call.options.get("scaling")
    words = scale_in_words(scaling, width)
    if words != USUAL_SCALE and scaling and is_scaled_before(call, trace):
        return f"{USUAL_SCALE}, already in queries and keys"
    return words


def _cap(call: AttentionCall) -> str:
    cap = call.options.get("softcap")
    return "none" if cap is None else f"{cap:g}"


def _window(call: AttentionCall) -> str:
    """The window that a module gives to the attention function, or the chunks of its mask."""
    window = call.options.get("sliding_window")
    if window is not None:
        # Looking back it counts the token itself; both ways, types count in three ways.
        return f"{window:g}, both ways" if call.sees_later else f"{window:g}"
    config = getattr(call.module, "config", None)
    kinds = getattr(config, "layer_types", None) or []
    layer = getattr(call.module, "layer_idx", None)
    # Chunks stand in the mask alone.
    if layer is not None and layer < len(kinds) and kinds[layer] == "chunked_attention":
        return f"chunks of {config.attention_chunk_size}"
    return "none"


# --- Padding --------------------------------------------------------------------------------------


def facts_of_padding(model: PreTrainedModel, inputs: Mapping[str, object]) -> dict[str, str]:
    """Whether [PAD] before or behind a text, which the mask hides, change its real tokens."""
    names = ("left_padding", "left_padding_with_positions", "right_padding", "pad_positions")
    accepted = inspect.signature(model.forward).parameters
    if not {"input_ids", "attention_mask"} <= inputs.keys():
        reason = "no text"
        if "input_ids" in inputs:
            reason = "it takes no mask"
            if "attention_mask" in accepted:
                reason = "not tried: the small model runs without a mask alone"
        return dict.fromkeys(names, reason)
    if "attention_mask" not in accepted and not _mask_tells(model, inputs):
        return dict.fromkeys(names, "it takes no mask")
    try:
        alone = traced(model, inputs)
        padded = traced(model, padded_input(model, inputs, left=True))
        behind = traced(model, padded_input(model, inputs, left=False))
    except Exception as error:
        return dict.fromkeys(names, f"error: {reason_of(error)}")
    facts = {
        "left_padding": _change(alone, padded, left=True),
        "right_padding": _change(alone, behind, left=False),
        "left_padding_with_positions": "it takes no position_ids",
    }
    count = inputs["input_ids"].shape[1]
    facts["pad_positions"] = positions_in_words(positions_seen(padded, count + PADS))
    # What passes a mask on passes positions on.
    if "position_ids" in accepted or "attention_mask" not in accepted:
        facts["left_padding_with_positions"] = _with_positions(model, inputs, alone)
    return facts


def _mask_tells(model: PreTrainedModel, inputs: Mapping[str, object]) -> bool:
    """Whether the last token changes once a mask hides the first, which all kinds of models see."""
    hidden = inputs["attention_mask"].clone()
    hidden[:, 0] = 0
    last = []
    for mask in (inputs["attention_mask"], hidden):
        vectors = vectors_of(_called(model, {**inputs, "attention_mask": mask}, {}))
        if vectors is not None:
            vectors = vectors[:, -1]
        last.append(vectors)
    return not _same(*last)


def _with_positions(model: PreTrainedModel, inputs: Mapping[str, object], alone: Trace) -> str:
    """Whether real tokens change behind [PAD] if they are given the positions that they had."""
    count = inputs["input_ids"].shape[1]
    kept = positions_seen(alone, count) or _positions_tried(model, inputs, alone)
    if kept is None:
        return "not tried: its positions are unknown"
    given = padded_input(model, inputs, left=True)
    given["position_ids"] = _rows_of([kept[0]] * PADS + kept, inputs)
    try:
        return _change(alone, traced(model, given), left=True)
    except Exception as error:  # Models fail in many ways.
        return f"error: {reason_of(error)}"


def _positions_tried(
    model: PreTrainedModel, inputs: Mapping[str, object], alone: Trace
) -> list[int] | None:
    """The positions of a text, of which a table was not seen: those that give the same vectors."""
    wanted = vectors_of(alone.output)
    count = inputs["input_ids"].shape[1]
    for start in FIRST_POSITIONS:
        kept = [*range(start, start + count)]
        with suppress(Exception):
            given = {**inputs, "position_ids": _rows_of(kept, inputs)}
            if _same(vectors_of(_called(model, given, {})), wanted):
                return kept
    return None


def _rows_of(positions: Sequence[int], inputs: Mapping[str, object]) -> Tensor:
    return torch.tensor(positions).repeat(_batch(inputs), 1)


def padded_input(
    model: PreTrainedModel, inputs: Mapping[str, object], left: bool
) -> dict[str, object]:
    """An input with [PAD] before or behind its texts, which the mask hides."""
    index = getattr(model.config.get_text_config(), "pad_token_id", None)
    fill = {"input_ids": index if isinstance(index, int) and index >= 0 else 0}
    padded = dict(inputs)
    for name in ("input_ids", "attention_mask", "bbox"):
        values = inputs.get(name)
        if isinstance(values, Tensor):
            shape = (values.shape[0], PADS, *values.shape[2:])
            pads = torch.full(shape, fill.get(name, 0), dtype=values.dtype, device=values.device)
            parts = [pads, values] if left else [values, pads]
            padded[name] = torch.cat(parts, 1)
    return padded


def _change(alone: Trace, padded: Trace, left: bool) -> str:
    """Whether the vectors of real tokens change."""
    wanted, given = vectors_of(alone.output), vectors_of(padded.output)
    if wanted is None or given is None or wanted.dim() < 3:
        return "it returns no vectors of tokens"
    axis = 1 if wanted.dim() == 3 else wanted.dim() - 2
    count = wanted.shape[axis]
    if given.shape[axis] != count + PADS:
        return "its vectors stand for no tokens"
    start = PADS if left else 0
    real = given.narrow(axis, start, count).float()
    wanted = wanted.float()
    difference = (real - wanted).norm() / wanted.norm()
    if not torch.isfinite(difference):
        return "vectors become NaN"
    return "real tokens keep" if difference <= ROUNDING else "real tokens change"


def vectors_of(output: object) -> Tensor | None:
    """The vectors of the tokens of a text: those of its encoder, if there is one."""
    for name in ("encoder_last_hidden_state", "last_hidden_state"):
        if isinstance(output, Mapping) and isinstance(output.get(name), Tensor):
            return output[name]
    if isinstance(output, Mapping) and isinstance(output.get("text_model_output"), Mapping):
        return vectors_of(output["text_model_output"])
    return first_tensor(output)


def positions_seen(trace: Trace, count: int) -> list[int] | None:
    """The positions of the tokens of a text that a table or a rotation read."""
    for each in trace.positions:
        row = each.reshape(-1, each.shape[-1])[0].tolist()
        steps = [after - before for before, after in zip(row[PADS:], row[PADS + 1 :], strict=False)]
        is_square = each.dim() > 1 and each.shape[-2] == count
        if len(row) == count and not is_square and steps and set(steps) == {1}:
            return row
    return None


def positions_in_words(row: Sequence[int] | None) -> str:
    """Positions of a text behind [PAD]."""
    if row is None:
        return "no positions seen"
    pads = " ".join(map(str, row[:PADS]))
    return f"[PAD] {pads}, then {row[PADS]}"


# --- Two calls ------------------------------------------------------------------------------------


def two_calls(model: PreTrainedModel, inputs: Mapping[str, object]) -> str:
    """Whether two calls with the same input give the same vectors."""
    outputs = [_called(model, inputs, {}) for _ in range(2)]
    first, second = (first_tensor(output) for output in outputs)
    if first is None or second is None:
        return "it returns no vectors"
    if first.shape == second.shape and torch.equal(first, second):
        return "same"
    return "same up to rounding" if _same(first, second) else "differ"


def dtypes_of(model: nn.Module) -> str:
    """The precisions of the weights of a model."""
    counts = Counter(str(each.dtype).removeprefix("torch.") for each in model.parameters())
    return listed(counts)
