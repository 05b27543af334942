"""An independent reference for interventions: plain models, one text at a time, in float64, with
eager attention.

What is seen or changed at a site is given to a function by hooks of PyTorch and by a wrapper around
the eager attention of the architecture. Of the library, nothing is used.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import naive
import torch
from reference import DoublePrecision
from torch import Tensor, nn

# By architecture: the blocks of each stack, the attention of a block, and its projections of
# queries, keys and values.
PLACES = {
    "bert": (["encoder.layer"], "attention.self", ("query", "key", "value")),
    "gpt2": (["h"], "attn", "c_attn"),
    "llama": (["layers"], "self_attn", ("q_proj", "k_proj", "v_proj")),
    "gemma2": (["layers"], "self_attn", ("q_proj", "k_proj", "v_proj")),
    "gpt_oss": (["layers"], "self_attn", ("q_proj", "k_proj", "v_proj")),
    "mpnet": (["encoder.layer"], "attention.attn", ("q", "k", "v")),
    "vit": (["layers"], "attention", ("q_proj", "k_proj", "v_proj")),
    "t5": (["encoder.block", "decoder.block"], "layer.0.SelfAttention", ("q", "k", "v")),
}
SPACES = ("query", "key", "value")
TYPES = ("cls", "sep", "register", "detection", "first", "punct", "other")
# Is given a site, a layer, and the vectors there, token x width or head x token x dim; gives
# others, or None.
Visit = Callable[[str, int, Tensor], Tensor | None]


@dataclass
class Ran:
    """What a text became: hidden states and weights by layer, and the type of each token by
    layer.
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)


class Plain:
    """A plain model, and where what can be changed in it is."""

    def __init__(self, model: nn.Module, reads: object):
        self.model, self.reads = naive.in_double(model), reads
        stacks, self.path, self.names = PLACES[model.config.model_type]
        self.module = sys.modules[type(model).__module__]
        # By stack, its blocks and the number of the layer that its first block reads.
        self.stacks, count = [], 0
        for path in stacks:
            self.stacks.append((count, list(self.model.get_submodule(path))))
            count += 1 + len(self.stacks[-1][1])

    def inputs(self, item: object) -> tuple[dict, list[list[str]]]:
        """What the model reads of an item, and the types of its tokens in each stack."""
        if not isinstance(item, str):
            given = self.reads(item.convert("RGB"), return_tensors="pt")
            return {"pixel_values": given["pixel_values"].double()}, [["cls"] + ["other"] * 16]
        given = self.reads(item, return_tensors="pt")
        ids = given["input_ids"]
        types = [self._types(ids[0].tolist())]
        given = {name: given[name] for name in ("input_ids", "attention_mask")}
        if len(self.stacks) == 2:
            shifted = torch.cat(
                [torch.tensor([[self.model.config.decoder_start_token_id]]), ids[:, :-1]], 1
            )
            given["decoder_input_ids"] = shifted
            types.append(["first", *self._types([-1, *shifted[0, 1:].tolist()])[1:]])
        return given | (
            {} if self.model.config.model_type in ("bert", "mpnet") else {"use_cache": False}
        ), types

    def _types(self, ids: list[int]) -> list[str]:
        words = self.reads
        begins, ends = (
            {getattr(words, f"{name}_token_id") for name in names} - {None}
            for names in (("cls", "bos"), ("sep", "eos"))
        )
        found = []
        for place, one in enumerate(ids):
            if place == 0 and one in begins:
                found.append("cls")
            elif place == 0:
                found.append("first")
            elif (
                place == len(ids) - 1
                and one in ends
                and self.model.config.model_type in ("bert", "mpnet", "t5")
            ):
                found.append("sep")
            else:
                found.append("punct" if words.decode([one]).strip() in (",", ".") else "other")
        return found

    def types_of(self, layer: int, types: list[list[str]]) -> list[str]:
        stack = max(place for place, (first, _) in enumerate(self.stacks) if first <= layer)
        return types[stack]

    def run(self, given: Mapping[str, Tensor], visit: Visit) -> Ran:
        found = Ran()
        with torch.no_grad(), DoublePrecision(), self._visited(visit, found):
            wanted = {"output_attentions": True} if self.model.config.model_type == "mpnet" else {}
            output = self.model(**given, **wanted)
            found.weights |= (
                dict(enumerate((w[0] for w in output.get("attentions") or ()), 1)) if wanted else {}
            )
        return found

    @contextmanager
    def _visited(self, visit: Visit, found: Ran) -> Iterator[None]:
        def ask(site: str, layer: int, values: Tensor) -> Tensor:
            new = visit(site, layer, values[0])
            return values if new is None else new.unsqueeze(0)

        def begin(layer: int, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            args, kwargs = _in_call(functools.partial(ask, "residual", layer), args, kwargs)
            _in_call(lambda x: found.hidden.update({layer: x[0]}) or x, args, kwargs)
            return args, kwargs

        def end(
            layer: int, _module: nn.Module, _args: tuple, output: Tensor | tuple
        ) -> Tensor | tuple:
            hidden = output if isinstance(output, Tensor) else output[0]
            found.hidden[layer] = (new := ask("residual", layer, hidden))[0]
            return new if isinstance(output, Tensor) else (new, *output[1:])

        def read(layer: int, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return _in_call(functools.partial(ask, "attention_input", layer), args, kwargs)

        def fused(layer: int, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            parts = list(output.chunk(3, -1))
            for place, space in enumerate(SPACES):
                new = visit(f"{space}_side", layer, args[0][0])
                if new is not None:
                    parts[place] = module.forward(new.unsqueeze(0)).chunk(3, -1)[place]
            return torch.cat(parts, -1)

        numbers = {}
        with ExitStack() as handles:
            for first, blocks in self.stacks:
                hooks = [
                    blocks[0].register_forward_pre_hook(
                        functools.partial(begin, first), with_kwargs=True
                    )
                ]
                for layer, block in enumerate(blocks, first + 1):
                    attention = block.get_submodule(self.path)
                    numbers[attention] = layer
                    hooks.append(block.register_forward_hook(functools.partial(end, layer)))
                    hook = functools.partial(read, layer)
                    hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
                    if isinstance(self.names, str):
                        one = attention.get_submodule(self.names)
                        hooks.append(one.register_forward_hook(functools.partial(fused, layer)))
                        continue
                    for space, name in zip(SPACES, self.names, strict=True):
                        side = functools.partial(ask, f"{space}_side", layer)
                        one = attention.get_submodule(name)
                        hooks.append(
                            one.register_forward_pre_hook(
                                lambda _, args, side=side: (side(args[0]),)
                            )
                        )
                for hook in hooks:
                    handles.callback(hook.remove)
            eager = getattr(self.module, "eager_attention_forward", None)

            def attend(
                module: nn.Module,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                mask: object,
                *more,
                **given,
            ):
                if (layer := numbers.get(module)) is None:
                    return eager(module, query, key, value, mask, *more, **given)
                parts = zip(SPACES, (query, key, value), strict=True)
                query, key, value = (ask(space, layer, values) for space, values in parts)
                hidden = visit("weights", layer, key[0])
                if hidden is not None:
                    count = query.shape[2], key.shape[2]
                    before = (
                        torch.zeros(1, 1, *count, dtype=query.dtype)
                        if mask is None
                        else mask.expand(1, 1, *count)
                    )
                    seen = before > torch.finfo(before.dtype).min / 2
                    left = seen & ~hidden
                    mask = before.masked_fill(seen & ~left & left.any(-1, keepdim=True), -math.inf)
                output, weights = eager(module, query, key, value, mask, *more, **given)
                found.weights[layer] = weights[0]
                return output, weights

            if eager is not None:
                handles.enter_context(
                    mock.patch.object(self.module, "eager_attention_forward", attend)
                )
            yield


def _in_call(change: Callable[[Tensor], Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a call with other hidden states, which are the first of them."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states"
    return args, kwargs | {name: change(kwargs[name])}


class Arm:
    """An intervention, computed by loops over the texts: its means and directions are of these."""

    def __init__(self, plain: Plain, items: list, replace: object):
        self.plain, self.replace = plain, replace
        self.given = [plain.inputs(item) for item in items]
        # By layer: the vectors of the site, head x token x dim, and the types of all tokens.
        self.seen: dict[int, list[Tensor]] = {}
        self.types: dict[int, list[str]] = {}
        for given, types in self.given:
            plain.run(given, functools.partial(self._see, types))

    def _see(self, types: list[list[str]], site: str, layer: int, values: Tensor) -> None:
        if site == self.replace.where:
            self.seen.setdefault(layer, []).append(
                values if values.dim() == 3 else values.unsqueeze(0)
            )
            self.types.setdefault(layer, []).extend(self.plain.types_of(layer, types))

    def ran(self, replace: object = None) -> list[Ran]:
        """What each text becomes; of another intervention at the same site, if one is given."""
        self.replace = replace or self.replace
        return [
            self.plain.run(given, functools.partial(self._change, types))
            for given, types in self.given
        ]

    def _change(
        self, types: list[list[str]], site: str, layer: int, values: Tensor
    ) -> Tensor | None:
        replace = self.replace
        if site != replace.where or (replace.layers is not None and layer not in replace.layers):
            return None
        types = self.plain.types_of(layer, types)
        wanted = replace.tokens or TYPES
        chosen = torch.tensor(
            [
                kind in wanted or (place == 0 and "first" in wanted)
                for place, kind in enumerate(types)
            ]
        )
        if site == "weights":
            return chosen
        every = torch.cat(self.seen[layer], 1)
        heads = values if values.dim() == 3 else values.unsqueeze(0)
        found = torch.stack(
            [self._changed(layer, *pair, types) for pair in zip(heads, every, strict=True)]
        )
        found = torch.where(chosen[:, None], found, heads)
        return found if values.dim() == 3 else found[0]

    def _changed(self, layer: int, values: Tensor, every: Tensor, types: list[str]) -> Tensor:
        """Of one head: token x dim."""
        replace, mean = self.replace, every.mean(0)
        basis = torch.eye(every.shape[1], dtype=every.dtype)
        if replace.dimensions is not None:
            basis = basis[list(replace.dimensions)]
        elif replace.directions == "mean":
            basis = (mean / mean.norm()).unsqueeze(0)
        elif isinstance(replace.directions, int):
            centred = every - mean
            basis = torch.linalg.svd(centred, full_matrices=False)[2][: replace.directions]
        elif replace.directions is not None:
            basis = torch.linalg.qr(torch.tensor(replace.directions, dtype=every.dtype).T)[0].T
        if replace.by == "type_mean":
            of_type = {
                kind: every[[other == kind for other in self.types[layer]]].mean(0)
                for kind in {*types}
            }
            new = torch.stack([of_type[kind] for kind in types])
        else:
            new = {"zero": 0 * values, "mean": mean.expand_as(values), "centre": values - mean}[
                replace.by
            ]
        moved = (new - values) @ basis.T @ basis
        return new - moved if replace.but else values + moved
