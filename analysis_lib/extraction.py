"""One forward pass, and what passes through attention on the way.

transformers lets a program register an attention function that every model on its attention interface calls
with the queries, keys and values after the split into heads. The one registered here hands them to the
capture that is under way, if any. Hidden states come from forward hooks on the blocks. Nothing is kept: a
layer's activations are received while the pass goes on, and let go.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from analysis_lib.errors import AnalysisError
from analysis_lib.models import TOKEN_TYPES, LoadedModel

IMPLEMENTATION = "analysis_lib"
# What a metric can ask for.
SPACES = ("hidden", "attention_input", "query", "key", "value")
WEIGHTS = "weights"
# Rows of attention longer than this go through the fused kernel, shorter ones are formed (benchmarks/).
LONGEST_FORMED_ROW = 96
# Where only formed rows are at hand, so many of their elements are held at once.
FORMED_ELEMENTS = 2**24


@dataclass(eq=False)
class Batch:
    """Utterances of about the same length, padded to the longest.

    Attributes:
        input_ids: token ids.
        mask: True at a token, False at padding.
        types: the type of each token, an index into ``TOKEN_TYPES``; meaningless at padding.
        groups: the jackknife group of each utterance.
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries. As keys they always do.
    """

    input_ids: Int[Tensor, "utterance token"]
    mask: Bool[Tensor, "utterance token"]
    types: Int[Tensor, "utterance token"]
    groups: Int[Tensor, " utterance"]
    special_tokens: bool = True

    @cached_property
    def type_masks(self) -> Float[Tensor, "utterance type token"]:
        """1 where a token is of a type, for each type."""
        masks = functional.one_hot(self.types.long(), len(TOKEN_TYPES)) * self.mask.unsqueeze(-1)
        return masks.transpose(1, 2).to(torch.get_default_dtype())

    @cached_property
    def counted(self) -> Bool[Tensor, "utterance token"]:
        """True at the tokens that count as vectors and as queries."""
        return self.mask if self.special_tokens else self.mask & (self.types >= len(SPECIAL_TYPES))

    @cached_property
    def counts(self) -> Float[Tensor, " utterance"]:
        """How many tokens of each utterance count."""
        return self.counted.sum(1).double()

    @cached_property
    def lengths(self) -> Float[Tensor, " utterance"]:
        """How many tokens each utterance has: the keys of its attention rows."""
        return self.mask.sum(1).double()

    @property
    def counted_types(self) -> slice:
        """The types whose tokens count."""
        return slice(None) if self.special_tokens else slice(len(SPECIAL_TYPES), None)


# The leading entries of TOKEN_TYPES.
SPECIAL_TYPES = ("cls", "sep")


class Vectors:
    """The vectors of one space in one layer of a batch, with the sums over tokens that metrics share.

    Each sum is computed when first asked for, and once. They run over the tokens of one utterance, at most
    a few hundred terms, in the model's precision; the sums over utterances are in float64.
    """

    def __init__(self, values: Float[Tensor, "utterance head token dim"], batch: Batch):
        self.values = values
        self.batch = batch

    @cached_property
    def norms(self) -> Float[Tensor, "utterance head token"]:
        """The Euclidean norm of every vector, 0 where the token does not count."""
        return torch.linalg.vector_norm(self.values, dim=-1) * self.batch.counted.unsqueeze(1)

    @cached_property
    def nonzero(self) -> Float[Tensor, "utterance head"]:
        """How many vectors that count have a direction: a zero vector has none, and is left out of cosines."""
        # Not "> 0", which would take a NaN for a zero and drop it.
        return (self.norms != 0).sum(-1).double()

    @cached_property
    def zeros(self) -> int:
        """How many vectors that count are zero."""
        return int((self.batch.counts.unsqueeze(1) - self.nonzero).sum())

    @cached_property
    def unit_sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x / ‖x‖ over the tokens that count."""
        inverse = torch.where(self.norms != 0, self.norms.reciprocal(), 0)
        return (inverse.unsqueeze(-2) @ self.values).squeeze(-2)

    @cached_property
    def type_sums(self) -> Float[Tensor, "utterance head type dim"]:
        """Σ x over the tokens of each type, special tokens included."""
        masks = self.batch.type_masks.to(self.values.dtype)
        return masks.unsqueeze(1) @ self.values

    @cached_property
    def sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x over the tokens that count."""
        return self.type_sums[:, :, self.batch.counted_types].sum(2)


@dataclass(eq=False)
class AttentionRows:
    """What is known of the attention weights of a layer without keeping them.

    Attributes:
        entropy: of each row, in nats.
        type_mass: the weight that each utterance's counted queries together give to the keys of each type.
    """

    entropy: Float[Tensor, "utterance head token"]
    type_mass: Float[Tensor, "utterance head type"]


@dataclass(eq=False)
class Activations:
    """What one layer did with one batch.

    Attributes:
        layer: 0 for the embedding output, l for block l.
        batch: the tokens.
        spaces: the vectors asked for, of ``SPACES``: ``hidden`` is the output of the layer, the others
            belong to its attention, which reads ``attention_input``. Hidden vectors have one "head".
        rows: the attention rows, where a metric asked for ``weights``.
        key_projection: W_K of each head; None in layer 0.
    """

    layer: int
    batch: Batch
    spaces: dict[str, Vectors] = field(default_factory=dict)
    rows: AttentionRows | None = None
    key_projection: Float[Tensor, "head head_dim width"] | None = None


Receive = Callable[[Activations], None]


class _Capture:
    """A forward pass under way: collects a layer's activations and hands them on when its block is done."""

    def __init__(self, loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive):
        self.loaded = loaded
        self.batch = batch
        self.needs = needs
        self.receive = receive
        self.layer = 0
        self.pending = Activations(0, batch)
        self.previous: Vectors | None = None
        self.attended = 0

    def _vectors(self, values: Tensor) -> Vectors:
        # A block's input is the previous block's output: its sums need no second computation.
        if self.previous is None or self.previous.values.data_ptr() != values.data_ptr():
            self.previous = Vectors(values.unsqueeze(1), self.batch)
        return self.previous

    def embeddings(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._finish_layer(args[0] if args else kwargs["hidden_states"])

    def attention_input(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        if "attention_input" in self.needs:
            values = args[0] if args else kwargs["hidden_states"]
            self.pending.spaces["attention_input"] = self._vectors(values)

    def block(self, _module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
        self._finish_layer(output[0] if isinstance(output, tuple) else output)

    def _finish_layer(self, hidden: Tensor) -> None:
        if "hidden" in self.needs:
            self.pending.spaces["hidden"] = self._vectors(hidden)
        self.receive(self.pending)
        self.layer += 1
        self.pending = Activations(self.layer, self.batch)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Float[Tensor, "utterance head token head_dim"]:
        self.attended += 1
        self.pending.key_projection = self.loaded.key_projection(self.layer)
        for name, values in (("query", query), ("key", key), ("value", value)):
            if name in self.needs:
                self.pending.spaces[name] = Vectors(values, self.batch)
        if WEIGHTS not in self.needs:
            return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
        output, entropy, mass = attend_with_rows(
            query, key, value, mask, scaling, self.batch.type_masks.to(query.dtype), self.batch.counted
        )
        self.pending.rows = AttentionRows(entropy, mass)
        return output


_under_way: ContextVar[_Capture | None] = ContextVar("_under_way", default=None)


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention module."""
    unknown = sorted(name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None)
    if unknown:
        raise AnalysisError(f"{type(module).__name__} adds {', '.join(unknown)} to its scores, which is not measured")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    capture = _under_way.get()
    if capture is None:
        output = functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    else:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = capture.attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def run(loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive) -> None:
    """One forward pass of a batch; ``receive`` gets the :class:`Activations` of layer 0, 1, ... as they come.

    Args:
        needs: which of ``SPACES`` and ``weights`` to capture.

    Raises:
        AnalysisError: the model did not call the registered attention function in every layer.
    """
    _check(loaded)
    _run(loaded, batch, needs, receive)


def _run(loaded: LoadedModel, batch: Batch, needs: frozenset[str], receive: Receive) -> Tensor:
    capture = _Capture(loaded, batch, needs, receive)
    with loaded.lock, torch.inference_mode(), _capturing(capture):
        output = loaded.model(input_ids=batch.input_ids, attention_mask=batch.mask.long()).last_hidden_state
    if capture.attended != len(loaded.blocks):
        raise AnalysisError(
            f"{loaded.name}: attention was captured in {capture.attended} of {len(loaded.blocks)} layers: "
            f"this architecture does not call transformers' attention interface"
        )
    return output


@contextmanager
def _capturing(capture: _Capture) -> Iterator[None]:
    loaded = capture.loaded
    before = loaded.model.config._attn_implementation
    hooks = [loaded.blocks[0].register_forward_pre_hook(capture.embeddings, with_kwargs=True)]
    hooks += [m.register_forward_pre_hook(capture.attention_input, with_kwargs=True) for m in loaded.attentions]
    hooks += [block.register_forward_hook(capture.block) for block in loaded.blocks]
    token = _under_way.set(capture)
    loaded.model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(before)
        _under_way.reset(token)
        for hook in hooks:
            hook.remove()


def _check(loaded: LoadedModel) -> None:
    """Once a model: the captured forward pass gives the same hidden states as the plain one.

    Raises:
        AnalysisError: it does not, so that nothing measured could be trusted.
    """
    if getattr(loaded, "_checked", False):
        return
    ids = [loaded.tokenizer(text)["input_ids"] for text in ("Anisotropy, in short.", "Attention")]
    batch = make_batches(loaded, ids, [0, 0], True, 10**6)[0]
    captured = _run(loaded, batch, frozenset({*SPACES, WEIGHTS}), lambda _: None)
    with torch.inference_mode():
        plain = loaded.model(input_ids=batch.input_ids, attention_mask=batch.mask.long()).last_hidden_state
    if not torch.isfinite(plain).all():
        return  # The measurement that follows stops at the layer where this begins, and names it.
    difference = ((captured - plain).abs() * batch.mask.unsqueeze(-1)).max().item()
    if not difference <= 1e-4 * max(1.0, plain.abs().max().item()):
        raise AnalysisError(
            f"{loaded.name}: the captured forward pass differs from the plain one by {difference:.1e}: "
            f"this architecture's attention is not captured exactly"
        )
    loaded._checked = True


def make_batches(
    loaded: LoadedModel,
    token_ids: Sequence[list[int]],
    groups: Sequence[int],
    special_tokens: bool,
    tokens_per_batch: int,
) -> list[Batch]:
    """Batches of utterances of like length, each of at most ``tokens_per_batch`` tokens, padding included."""
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    chunks: list[list[int]] = [[]]
    for i in order:
        if chunks[-1] and (len(chunks[-1]) + 1) * len(token_ids[i]) > tokens_per_batch:
            chunks.append([])
        chunks[-1].append(i)
    return [_pad(loaded, [token_ids[i] for i in c], [groups[i] for i in c], special_tokens) for c in chunks]


def _pad(loaded: LoadedModel, token_ids: list[list[int]], groups: list[int], special_tokens: bool) -> Batch:
    pad = loaded.tokenizer.pad_token_id or 0
    input_ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(ids) for ids in token_ids])
    mask = torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)
    types = loaded.token_types[input_ids]
    device = loaded.device
    return Batch(
        input_ids.to(device),
        mask.to(device),
        types.to(device),
        torch.tensor(groups, device=device),
        special_tokens,
    )


# --- Attention rows without keeping the weights ---------------------------------------------------


def attend_with_rows(
    query: Float[Tensor, "utterance head token head_dim"],
    key: Float[Tensor, "utterance head token head_dim"],
    value: Float[Tensor, "utterance head token head_dim"],
    mask: Bool[Tensor, "utterance 1 token token"] | None,
    scaling: float,
    type_masks: Float[Tensor, "utterance type token"],
    counted: Bool[Tensor, "utterance token"],
) -> tuple[
    Float[Tensor, "utterance head token head_dim"],
    Float[Tensor, "utterance head token"],
    Float[Tensor, "utterance head type"],
]:
    """The output of attention, the entropy of its rows, and the weight that goes to each type of key.

    With scores s = scaling · q·k and weights p = softmax(s), the entropy of a row is −Σ p ln p, in nats and in
    [0, ln of the number of keys]. The weight is summed over the counted queries of an utterance. Short rows are
    formed. Long ones are not: their entropy is ln Σ exp s − scaling · q·(Σ p k), and one fused call with the
    values [v, k, type indicators] gives the output, Σ p k and the weight per type at once.
    """
    if query.shape[2] > LONGEST_FORMED_ROW and query.device.type == "cpu":
        output, entropy, mass = _fused_rows(query, key, value, mask, scaling, type_masks)
    else:
        output, entropy, mass = _formed_rows(query, key, value, mask, scaling, type_masks)
    queries = counted.to(mass.dtype)[:, None, None]
    return output, entropy, (queries @ mass).squeeze(2)


def _formed_rows(query, key, value, mask, scaling, type_masks) -> tuple[Tensor, Tensor, Tensor]:
    utterances, heads, tokens, _ = query.shape
    chunk = max(1, FORMED_ELEMENTS // (utterances * heads * tokens))
    keys, indicators = key.transpose(2, 3), type_masks.transpose(1, 2).unsqueeze(1)
    parts = []
    for start in range(0, tokens, chunk):
        scores = (query[:, :, start : start + chunk] * scaling) @ keys
        if mask is not None:
            allowed = mask.expand(-1, -1, tokens, -1)[:, :, start : start + chunk]
            scores.masked_fill_(~allowed, -math.inf)
        weights = scores.softmax(-1)
        parts.append((weights @ value, torch.special.entr(weights).sum(-1), weights @ indicators))
    return tuple(torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))


def _fused_rows(query, key, value, mask, scaling, type_masks) -> tuple[Tensor, Tensor, Tensor]:
    heads, head_dim, types = query.shape[1], query.shape[3], type_masks.shape[1]
    indicators = type_masks.transpose(1, 2).unsqueeze(1).expand(-1, heads, -1, -1)
    values = torch.cat([value, key, indicators], -1)
    # The kernel wants queries, keys and values of one width; zeros add nothing to a score.
    padding = (0, values.shape[-1] - head_dim)
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    # The public function keeps the log-sum-exp of the rows to itself; this is what it calls on a CPU.
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(query, padding),
        functional.pad(key, padding),
        values,
        0.0,
        False,
        attn_mask=bias,
        scale=scaling,
    )
    output, keys, mass = mixed.split([head_dim, head_dim, types], -1)
    entropy = log_sum - scaling * (query * keys).sum(-1)
    return output, entropy.clamp_min(0), mass
