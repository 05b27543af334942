"""Cells of the atlas by other means: transformers alone, and no code of the book but that which
builds the small model.

Where the atlas compares what is returned with what every module gave, this knows the usual parts of
a model by their names, counts, adds up and calls again.
"""

import copy
import inspect
import re
import sys

import torch
from torch import Tensor, nn

NORMS = ("norm", "ln_f", "final_layer_norm", "layernorm", "final_layernorm", "post_layernorm", "norm_f", "layer_norm", "final_norm", "ln_final")  # fmt: skip
PADS = 3


class NotKnownError(Exception):
    """The plain way does not know this model."""


def call(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options)


def eager(model):
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def blocks_of(model) -> nn.ModuleList:
    """The only list of as many modules as the configuration has layers, outside of which no list is."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {path: part for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [
        part
        for path, part in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
    ]
    fitting = [part for part in outer if len(part) == count]
    if len(fitting) != 1:
        raise NotKnownError("blocks")
    return fitting[0]


def first(given):
    return given if isinstance(given, Tensor) else given[0]


def around_blocks(model, inputs) -> tuple[list, list]:
    """What each block reads and gives."""
    read, gave, hooks = [], [], []
    for block in blocks_of(model):
        hooks.append(
            block.register_forward_pre_hook(
                lambda _, args, kwargs: read.append(first([*args, *kwargs.values()])),
                with_kwargs=True,
            )
        )
        hooks.append(
            block.register_forward_hook(lambda _, args, output: gave.append(first(output)))
        )
    output = call(model, inputs, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    of_stacks = [name for name in output if name.endswith("hidden_states")]
    if of_stacks != ["hidden_states"]:
        raise NotKnownError("stacks")
    return output, read, gave


def hidden_states(model, inputs):
    output, _, gave = around_blocks(model, inputs)
    difference = len(output.hidden_states) - len(gave)
    return f"blocks + {difference}" if difference else "as many as blocks"


def first_state(model, inputs):
    output, read, gave = around_blocks(model, inputs)
    state = output.hidden_states[0]
    if torch.equal(state, gave[0]):
        return "output of block 1"
    if not torch.equal(state, read[0]):
        raise NotKnownError("first")
    # Behind a norm with gain and bias, what is divided by them has one mean and one variance per token.
    for name, norm in model.named_modules():
        if "norm" not in name.lower() or any(
            norm in {*block.modules()} for block in blocks_of(model)
        ):
            continue
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if weight is None or weight.shape != state.shape[-1:]:
            continue
        plain = (state - (0 if bias is None else bias)) / weight
        if (plain.square().mean(-1) - 1).abs().max() < 1e-2:
            return "embeddings after a norm"
    return "embeddings"


def last_state(model, inputs):
    output, _, gave = around_blocks(model, inputs)
    state = output.hidden_states[-1]
    norms = [part for name, part in model.named_modules() if name.rpartition(".")[2] in NORMS]
    norms = [
        norm for norm in norms if not any(norm in {*block.modules()} for block in blocks_of(model))
    ]
    if torch.equal(state, gave[-1]):
        if torch.equal(output.last_hidden_state, state):
            return "output of the last block (no norm follows)"
        return "output of the last block, before the final norm"
    with torch.no_grad():
        for norm in norms:
            try:
                if torch.allclose(norm(gave[-1]), state, atol=1e-5):
                    return "after the final norm"
            except (TypeError, RuntimeError):
                continue
    raise NotKnownError("last")


def weights_of(model, inputs):
    output = call(eager(model), inputs, output_attentions=True)
    if not isinstance(output.get("attentions"), tuple) or not output["attentions"]:
        raise NotKnownError("attentions")
    return output["attentions"]


def attentions(model, inputs):
    count, blocks = len(weights_of(model, inputs)), len(blocks_of(model))
    return "one per block" if count == blocks else f"{count} for {blocks} blocks"


def row_sums(model, inputs):
    every = torch.cat([each.sum(-1).flatten() for each in weights_of(model, inputs)])
    least, largest = every.min().item(), every.max().item()
    if max(abs(least - 1), abs(largest - 1)) < 1e-3:
        return "1"
    if least < 0 or largest > 1.001:
        return "no weights"
    return f"{least:.3g} to {largest:.3g}"


def attention_kind(model, inputs):
    sums = row_sums(model, inputs)
    if sums == "1" and all((each >= 0).all() for each in weights_of(model, inputs)):
        return "weights"
    if sums != "no weights" and any("sink" in name for name, _ in model.named_parameters()):
        return "weights beside a sink"
    raise NotKnownError("kind")


def default_attention(model, inputs):
    return type(model)(copy.deepcopy(model.config)).config._attn_implementation


def attentions_by_default(model, inputs):
    output = call(model, inputs, output_attentions=True)
    given = output.get("attentions", "missing")
    if given == "missing":
        raise NotKnownError("by default")
    if given is None:
        return "None"
    if given == ():
        return "an empty tuple"
    wanted = weights_of(model, inputs)
    if len(given) == len(wanted) and all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(given, wanted, strict=True)
    ):
        return "as under eager"
    raise NotKnownError("by default")


def vectors(output):
    return output.get("encoder_last_hidden_state", output.get("last_hidden_state"))


def padding(model, inputs, left, **more):
    if not {"input_ids", "attention_mask"} <= {*inputs}:
        raise NotKnownError("no text")
    pad = model.config.get_text_config().pad_token_id
    fill = {"input_ids": pad if isinstance(pad, int) and pad >= 0 else 0, "attention_mask": 0}
    given = {**inputs, **more}
    size = (PADS, 0) if left else (0, PADS)
    for name, value in fill.items():
        given[name] = nn.functional.pad(inputs[name], size, value=value)
    wanted, padded = vectors(call(model, inputs)), vectors(call(model, given))
    if wanted is None or wanted.dim() != 3:
        raise NotKnownError("vectors")
    count = wanted.shape[1]
    real = padded[:, -count:] if left else padded[:, :count]
    cosine = nn.functional.cosine_similarity(real.flatten().double(), wanted.flatten().double(), 0)
    return "real tokens keep" if 1 - cosine < 1e-6 else "real tokens change"


def left_padding(model, inputs):
    return padding(model, inputs, left=True)


def right_padding(model, inputs):
    return padding(model, inputs, left=False)


def rotation(model, inputs):
    """By the source: whether pairs are taken apart at every second dimension, or in the middle."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder or len({*(getattr(config, "layer_types", None) or [])}) > 1:
        raise NotKnownError("some layers may do without")
    source = inspect.getsource(sys.modules[type(model).__module__])
    functions = re.findall(
        r"def (?:apply_rotary|rotate_)\w*\(.*?(?=\n(?:def|class|@)|\Z)", source, re.DOTALL
    )
    text = "".join(functions)
    if not text:
        if "rotary" in source.lower() or "rope" in source.lower():
            raise NotKnownError("rotation")
        return "none"
    if "::2" in text and "// 2" not in text:
        return "interleaved"
    if "::2" not in text and "// 2" in text and ".view(" not in text and "reshape(" not in text:
        return "halves"
    raise NotKnownError("rotation")


def key_groups(model, inputs):
    config = model.config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if not isinstance(keys, int):
        raise NotKnownError("groups")
    if heads == keys:
        return "a key for each query head"
    return "all query heads share a key" if keys == 1 else "groups of query heads can share a key"


def two_calls(model, inputs):
    once, again = (call(model, inputs).last_hidden_state for _ in range(2))
    return "same" if (once == again).all() else "differ"


# By column.
WAYS = {
    way.__name__: way
    for way in (hidden_states, first_state, last_state, attentions, row_sums, attention_kind, default_attention, attentions_by_default, left_padding, right_padding, rotation, key_groups, two_calls)
}  # fmt: skip


def cell(column, model, inputs):
    """A cell, computed plainly.

    Raises:
        NotKnownError: the plain way does not know this model.
    """
    try:
        return WAYS[column](copy.deepcopy(model), inputs)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise NotKnownError(str(error)) from error
