"""A naive reference for any model: as its documentation runs it, one input at a time, eagerly, in
float64.

Queries, keys, values and weights are those of the model's own eager attention; hidden states are
what ``output_hidden_states`` gives; every pair is formed; the contribution of a dimension is its
value times the derivative of the scores, by autograd. Of the library it takes the path of the
projection of keys alone, which it thereby tests.
"""

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import numpy as np
import torch
from reference import DoublePrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# What the attention of a decoder to an encoder is called.
ATTENTIONS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
CROSS = ("encoder_attn", "cross", "EncDec", "encdec", "crossattention", "encoder_decoder")


@dataclass
class Attended:
    """One call of eager attention, without its utterance axis: head x token x dim, head x query x
    key.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weights: np.ndarray
    pairs: int  # of a query and a key that it sees
    sink: np.ndarray | None
    contributions: (
        np.ndarray | None
    )  # head x key x dimension, summed over the queries that see the key


@dataclass
class Text:
    """What a model makes of a text.

    Attributes:
        hidden: what ``output_hidden_states`` gives: of each stack, what its first block reads, and
            what each block gives, but for the last one, after which a norm may follow. Where it
            gives those of stages, or leaves the first out, what blocks were seen to read and give.
        attended: the self-attentions, in order, and then the attentions of a decoder to an encoder.
    """

    hidden: list[np.ndarray] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)


def in_double(model: nn.Module) -> nn.Module:
    """A copy in float64 that attends eagerly."""
    double = copy.deepcopy(model).double().eval()
    double.set_attn_implementation("eager")
    # Some that compute attention by themselves refuse to be asked, and ask their configuration.
    double.config._attn_implementation = "eager"
    # Of mixtures of experts, the fast ways have no float64.
    double.set_experts_implementation("eager")
    return double


def read(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    projections: Mapping[str, tuple[str, Sequence[str]]],
    blocks: Sequence[nn.Module] = (),
    real: np.ndarray | None = None,
    own: bool = False,
) -> Text:
    """Run a model on a text.

    Args:
        model: as of :func:`in_double`.
        inputs: what its tokenizer gives.
        projections: by the path of an attention module, the paths below it of the projection of its
            keys and of their norm, for contributions.
        blocks: those of one stack.
        real: True at the vectors that count where a model also attends to padding, which nothing
            masks.
        own: whether some modules compute attention by themselves: weights then are what
            ``output_attentions`` gives.
    """
    found, given, seen = Text(), dict(inputs), []
    hooks = [
        block.register_forward_hook(partial(_seen, seen), with_kwargs=True) for block in blocks
    ]
    if getattr(model.config, "is_encoder_decoder", False) and "input_ids" in given:
        ids, start = (
            given["input_ids"].roll(1, 1),
            getattr(model.config, "decoder_start_token_id", None),
        )
        if start is not None:
            ids[:, 0] = start
        given["decoder_input_ids"] = ids
    products = _Products()
    with (
        DoublePrecision(),
        _recorded(model, projections) as calls,
        products if own else contextlib.nullcontext(),
    ):
        cache = {"use_cache": False} if "input_ids" in given else {}
        asked = {"output_hidden_states": True, **({"output_attentions": True} if own else {})}
        output = model(**given, **asked, **cache)
    for hook in hooks:
        hook.remove()
    stacks = (
        ("encoder_hidden_states", "decoder_hidden_states")
        if "decoder_input_ids" in given
        else ("hidden_states",)
    )
    for name in stacks:
        # These give nothing of what their first block reads.
        late = model.config.model_type in ("mamba", "mamba2", "falcon_mamba")
        found.hidden += (
            [None] * late
            + [layer[0].detach().numpy() for layer in output[name][:-1]]
            + [None] * (not late)
        )
    first = seen[0][0] if seen else None
    if seen and (len(found.hidden) != len(seen) + 1 or not np.array_equal(first, found.hidden[0])):
        found.hidden = [first, *(gave for _, gave in seen)]
    calls.sort(key=lambda call: any(part in call[0] for part in CROSS))
    kept = given.get("attention_mask")
    if "input_ids" not in given and kept is not None and kept.shape[1] == found.hidden[0].shape[0]:
        # What pads a spectrogram is no vector.
        found.hidden = [
            layer if layer is None else layer[kept[0].bool().numpy()] for layer in found.hidden
        ]
        calls = [
            (*call[:5], (call[5] > 0) & kept.bool()[:, None, :, None], call[6]) for call in calls
        ]
    else:
        kept = None
    if own:
        weights = [part for name in ATTENTIONS for part in output.get(name) or ()]
        weights = [part for part in weights if isinstance(part, Tensor)] or products.softmaxes
        # By windows, or of fewer keys, there are other rows; a later stage of an image has fewer
        # tokens.
        lengths = {len(layer) for layer in found.hidden if layer is not None and layer.ndim == 2}
        lengths |= {
            layer[0].size for layer in found.hidden if layer is not None and layer.ndim == 3
        }
        weights = [part for part in weights if part.shape[-2] == part.shape[-1] in lengths]
        by_eager = {call[4].detach().numpy().tobytes(): call for call in calls}
        known = [by_eager.get(part.detach().numpy().tobytes()) for part in weights]
        found.attended = [
            products.attended(w, model, projections) if call is None else _attended(*call, None)
            for w, call in zip(weights, known, strict=True)
        ]
        return found
    found.attended = [
        _attended(*call, None if kept is None else kept[0].bool().numpy()) for call in calls
    ]
    if real is not None:
        found.hidden = [layer if layer is None else layer[real] for layer in found.hidden]
        calls = [(*call[:5], call[5] * torch.from_numpy(real)[:, None], call[6]) for call in calls]
        found.attended = [_of_real(_attended(*call, None), real) for call in calls]
    return found


def _of_real(attended: Attended, real: np.ndarray) -> Attended:
    """What the vectors that count attend to: padding as well, as keys."""
    parts = {
        name: getattr(attended, name)[:, real] for name in ("query", "key", "value", "weights")
    }
    return replace(attended, **parts)


def _seen(seen: list, _block: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> None:
    """Note what a block reads and gives."""
    read, gave = [*args, *kwargs.values()][0], output[0] if isinstance(output, tuple) else output
    seen.append((read[0].detach().numpy(), gave[0].detach().numpy()))


@contextlib.contextmanager
def _recorded(
    model: nn.Module, projections: Mapping[str, tuple[str, Sequence[str]]]
) -> Iterator[list]:
    """Inside it eager attention notes what it computes, and the inputs of key projections have
    gradients.
    """
    names, calls, leaves = {module: path for path, module in model.named_modules()}, [], {}
    with contextlib.ExitStack() as stack:
        for path, (key, norms) in projections.items():

            def leaf(_module: nn.Module, args: tuple, path: str = path) -> tuple:
                leaves[path] = args[0].detach().requires_grad_()
                return (leaves[path], *args[1:])

            def constant(norm: nn.Module, args: tuple, output: Tensor) -> Tensor:
                centred, (read, *_) = isinstance(norm, nn.LayerNorm), args
                read, added = (
                    (read - read.mean(-1, keepdim=True), norm.bias) if centred else (read, 0)
                )
                return read * ((output - added) / read).detach() + added

            module = model.get_submodule(path)
            stack.callback(module.get_submodule(key).register_forward_pre_hook(leaf).remove)
            for norm in norms:
                stack.callback(module.get_submodule(norm).register_forward_hook(constant).remove)
        for source in {sys.modules[type(module).__module__] for module in model.modules()}:
            named = [name for name in vars(source) if name.endswith("eager_attention_forward")]
            for name in named:
                eager = getattr(source, name)

                def noting(module, query, key, value, *args, _eager=eager, **kwargs):
                    output, weights = _eager(module, query, key, value, *args, **kwargs)
                    sinks = kwargs.get("s_aux")
                    if sinks is not None and (weights.sum(-1) > 1 - 1e-9).all():
                        # Granite gives the weights as they were before the sink took its part.
                        scores = query @ key.repeat_interleave(
                            query.shape[1] // key.shape[1], 1
                        ).transpose(2, 3)
                        total = (
                            (kwargs["scaling"] * scores)
                            .masked_fill(weights == 0, -torch.inf)
                            .logsumexp(-1)
                        )
                        weights = weights * torch.sigmoid(total - sinks[:, None]).unsqueeze(-1)
                    path = names.get(module, "?")
                    if kwargs.get("scaling") == 1 != getattr(module, "scaling", 1):
                        query = (
                            query / module.scaling
                        )  # Scaled beforehand: the tables are before scaling.
                    mask = kwargs.get("attention_mask", args[0] if args else None)
                    seen = (
                        torch.ones_like(weights)
                        if mask is None
                        else (mask > torch.finfo(mask.dtype).min / 2)
                    )
                    calls.append((path, query, key, value, weights, seen, leaves.get(path)))
                    return output, weights

                stack.enter_context(mock.patch.object(source, name, noting))
        yield calls


class _Products(TorchDispatchMode):
    """Inside it every product of two stacks of matrices is noted, as PyTorch's kernels compute
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmaxes: list[Tensor] = []
        self.made: list[tuple[Tensor, Tensor]] = []
        self.linear: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._softmax.default and made.dim() == 4:
            self.softmaxes.append(made.clone())
        if function is torch.ops.aten.bmm.default:
            self.made.append((args[0].clone(), args[1].clone()))
        if function is torch.ops.aten.baddbmm.default:
            self.made.append((args[1].clone(), args[2].clone()))
        if function is torch.ops.aten.mm.default:
            self.linear.append((args[0].clone(), args[1].clone(), made.clone()))
        if function is torch.ops.aten.addmm.default:
            self.linear.append((args[1].clone(), args[2].clone(), made.clone()))
        return made

    def attended(
        self, weights: Tensor, model: nn.Module, projections: Mapping[str, tuple]
    ) -> Attended:
        """What a module has computed by itself, told by its weights, 1 x head x query x key."""
        heads, queries, keys = weights.shape[1:]
        place = next(
            place
            for place, (left, _) in enumerate(self.made)
            if left.numel() == weights.numel()
            and torch.equal(left.reshape(weights.shape[1:]), weights[0])
        )
        value = self.made[place][1]
        rows = heads * queries
        query, key = next(
            (left, right)
            for left, right in reversed(self.made[:place])
            if left[..., 0].numel() == rows and right.shape[-1] == keys
        )
        query, key = query.reshape(heads, queries, -1), key.transpose(1, 2)
        counted = (weights[0] > 0).to(query.dtype)
        scalings = {module.scaling for module in model.modules() if hasattr(module, "scaling")} - {
            1
        }
        if len(scalings) == 1 and torch.allclose(
            weights[0], _softmax(query @ key.transpose(1, 2), counted)
        ):
            query = query / scalings.pop()  # Scaled beforehand: the tables are before scaling.
        if all(torch.equal(part, part[:1].expand_as(part)) for part in (key, value)):
            key, value = key[:1], value[:1]
        of_columns = self._contributions(query, key, counted)
        arrays = [part.numpy() for part in (query, key, value, weights[0].detach())]
        return Attended(*arrays, int(counted[0].sum()), None, of_columns)

    def _contributions(self, query: Tensor, key: Tensor, counted: Tensor) -> np.ndarray | None:
        """Of the dimensions of what keys are made from, if each number of a key is one of a
        projection.
        """
        asked = torch.einsum("hqk,hqd->hkd", counted, query)
        for read, weight, gave in self.linear:
            if len(gave) != key.shape[1]:
                continue
            columns = [
                [_place(gave, key[head, :, dim]) for dim in range(key.shape[2])]
                for head in range(len(key))
            ]
            if all(place is not None for of_head in columns for place in of_head):
                of_heads = [
                    of_query @ weight[:, columns[head * len(columns) // len(asked)]].T * read
                    for head, of_query in enumerate(asked)
                ]
                return torch.stack(of_heads).numpy()
        return None


def _softmax(scores: Tensor, counted: Tensor) -> Tensor:
    return scores.masked_fill(counted == 0, -torch.inf).softmax(-1)


def _place(gave: Tensor, wanted: Tensor) -> int | None:
    """The column of what a projection gives that is wanted."""
    same = torch.isclose(gave, wanted.unsqueeze(1), rtol=1e-12, atol=1e-12).all(0).nonzero()
    return int(same[0]) if len(same) else None


def _attended(
    _path: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    seen: Tensor,
    leaf: Tensor | None,
    kept: np.ndarray | None,
) -> Attended:
    """One call, with the contributions of the dimensions of what its keys are made from; of the
    tokens that count.
    """
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    contributions = None
    if leaf is not None:
        by_head = key.repeat_interleave(shared, 1)
        scores = (query.detach() @ by_head.transpose(2, 3)) * seen
        of_heads = [
            torch.autograd.grad(scores[0, h].sum(), leaf, retain_graph=True)[0]
            for h in range(heads)
        ]
        contributions = np.stack([(leaf * grad)[0].detach().numpy() for grad in of_heads])
    arrays = [part[0].detach().numpy() for part in (query, key, value, weights)]
    if kept is not None:
        arrays = [part[:, kept] for part in arrays]
        arrays[3] = arrays[3][:, :, kept]
    found = Attended(*arrays, int(seen[0, 0].sum()), None, contributions)
    lost = 1 - found.weights.sum(-1)
    found.sink = lost if lost.max() > 1e-6 else None
    return found


# --- Tables ---------------------------------------------------------------------------------------


def cosine(vectors: Sequence[np.ndarray]) -> float:
    """The mean cosine of all pairs of distinct vectors, token x dim of each text; every pair is
    formed.
    """
    units = np.concatenate(vectors)
    units = units / np.linalg.norm(units, axis=-1, keepdims=True)
    cosines = units @ units.T
    return (cosines.sum() - np.trace(cosines)) / (len(units) * (len(units) - 1))


def entropies(attended: Sequence[Attended], head: int) -> np.ndarray:
    """The entropy of each row of a head, in nats; a sink is a key."""
    found = []
    for one in attended:
        rows = (
            one.weights[head]
            if one.sink is None
            else np.concatenate([one.weights, one.sink[..., None]], -1)[head]
        )
        found += [-sum(p * np.log(p) for p in row if p > 0) for row in rows]
    return np.array(found)


def assert_attention_agrees(tables, layer: int, of_texts: Sequence, tolerance: float) -> None:
    """Cosines of queries, keys and values, and the entropies of attention rows, of one layer."""
    for space in ("query", "key", "value"):
        rows = tables["anisotropy"]
        rows = rows[(rows["space"] == space) & (rows["layer"] == layer)]
        wanted = [
            cosine([getattr(one, space)[head] for one in of_texts])
            for head in range(len(getattr(of_texts[0], space)))
        ]
        np.testing.assert_allclose(rows["cosine"], wanted, atol=tolerance)
    rows = tables["attention_entropy"]
    rows = rows[rows["layer"] == layer]
    wanted = [entropies(of_texts, head).mean() for head in range(len(rows))]
    np.testing.assert_allclose(rows["entropy_nats"], wanted, atol=tolerance)
