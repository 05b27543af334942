"""The activations of one layer for one batch: what a metric can ask for, and how it is gathered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from analysis_lib.capture.attention_rows import AttentionWeights
from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.masks import changed
from analysis_lib.capture.outputs import Output
from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Bin, Tokens, Visibility, bins_of
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.models.parts import Rotation
from analysis_lib.models.rotations import turn_of, unrotated

# Inputs of metrics: the vectors of a space; the entropy of attention rows and their weight by type
# of key; blocks of the weights themselves, or of the scores before the softmax; or sums of scores.
UNROTATED = ("query_unrotated", "key_unrotated")
SPACES = ("hidden", "final", "attention_input", "query", "key", "value", *UNROTATED)
WEIGHTS = "weights"
BLOCKS = "blocks"
LOGITS = "logits"
SCORES = "scores"
# Inputs that only attention has.
OF_ATTENTION = frozenset({*SPACES, WEIGHTS, BLOCKS, LOGITS, SCORES} - {"hidden", "final"})
# Outputs of the model, compared with those without changes: vectors, predictions of the next token,
# and predictions of masked tokens in a separate pass.
OUTPUT, LOSS, MASKED = "output", "loss", "masked"
# The vectors of an image or a sound and of its text in a model that compares them.
EMBEDDINGS = "embeddings"
# Hidden vectors of a second model for the same items, see ``paired.py``.
BESIDE = "beside"
# The stack of cross-attention, and the stack of the further attentions of a block.
CROSS = "cross"
FURTHER = ("second", "third", "fourth")
# More than the number of masks that the layers of any model share at a time.
MASKS_KEPT = 4


@dataclass(eq=False)
class Activations:
    """The activations of one layer for one batch.

    Attributes:
        layer: 0 for the input of the first block, l for the output of block l. A second stack
            continues the count, and so do, after all stacks, cross-attention and the further
            attentions of a block.
        stack: the name of the layer's stack; ``cross`` where a decoder attends to an encoder,
            ``second`` for the second attention of a block.
        part: the path of the block below the model; empty for the input of a stack.
        tokens: the tokens of the queries, and of the hidden vectors unless those are vectors of a
            feature map.
        spaces: the requested vectors, by their name in ``SPACES``. ``hidden`` is the output of the
            layer (one head); ``final`` is the output of the model, if a norm follows its last block
            (one head): it arrives separately, after the last layer of its stack and with that
            layer's number; ``attention_input`` is the input of the projection of keys (one head);
            ``query``, ``key`` and ``value`` are by head, as they enter attention: after bias,
            normalisation and rotation. ``query_unrotated`` and ``key_unrotated`` are those before
            rotation; a layer that does not rotate them has none.
        rotation: how the layer rotates queries and keys, if their vectors before rotation are
            needed.
        turn: the factor of each pair of dimensions, see
            :func:`~analysis_lib.models.rotations.turn_of`.
        attention: the attention weights, if a metric needs ``weights``, ``blocks`` or ``logits``.
        scores: sums of the attention scores, if a metric needs ``scores``.
        attended: whether the layer's attention was captured.
        output: the output of the model, if a metric needs it or its predictions; it arrives
            separately, last.
        embeddings: the vectors of images or sounds and those of their texts, each utterance x dim,
            if a metric needs them; they arrive separately, last.
        beside: the hidden vectors of a second model, by layer, if two are compared; they are in the
            order of those of the first.
    """

    layer: int
    stack: str
    part: str
    tokens: Tokens
    spaces: dict[str, Vectors] = field(default_factory=dict)
    rotation: Rotation | None = None
    turn: Tensor | None = None
    attention: AttentionWeights | None = None
    scores: ScoreSums | None = None
    attended: bool = False
    output: Output | None = None
    embeddings: tuple[Tensor, Tensor] | None = None
    beside: dict[int, Vectors] = field(default_factory=dict)
    _in_bins: "dict[str, list[Activations]]" = field(default_factory=dict, init=False, repr=False)

    def in_bins(self, by: str) -> "list[Activations]":
        """The same activations once for each bin, whose tokens alone count in them.

        Args:
            by: ``position`` or ``type``, see :class:`~analysis_lib.capture.tokens.Bin`.
        """
        if by not in self._in_bins:
            self._in_bins[by] = [self._of_bin(Bin(by, index)) for index in range(self._bins(by))]
        return self._in_bins[by]

    def _bins(self, by: str) -> int:
        """The number of bins."""
        if by == "type":
            return len(self.tokens.type_names)
        longest = self.tokens.mask.shape[1]
        for vectors in self.spaces.values():
            count = vectors.tokens.mask.shape[1]
            longest = max(longest, count)
        return bins_of(longest)

    def _of_bin(self, bin: Bin) -> "Activations":
        spaces = {}
        for name, vectors in self.spaces.items():
            spaces[name] = vectors.of_bin(bin)
        parts = {"tokens": self.tokens.of_bin(bin), "spaces": spaces}
        for name in ("attention", "scores", "output"):
            part = getattr(self, name)
            if part is not None:
                parts[name] = part.of_bin(bin)
        return replace(self, **parts)


Receive = Callable[[Activations], None]


class CurrentLayer:
    """The layer that the forward pass is computing.

    Tokens, visibility and sums that layers share are computed once.

    Attributes:
        batch: the input of the pass.
        changes: the interventions.
        needs: the inputs that the metrics need.
        activations: those of the current layer, so far.
        encoded: the tokens of the latest stack without cross-attention.
    """

    def __init__(
        self,
        batch: Batch,
        needs: frozenset[str],
        changes: Changes | None = None,
    ):
        self.batch = batch
        self.changes = Changes(()) if changes is None else changes
        self.needs = needs
        self.activations: Activations | None = None
        self.encoded: Tokens | None = None
        self._previous: Vectors | None = None
        self._unpadded: dict[tuple[int, tuple[str, ...]], Tokens] = {}
        self._turns: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._visibilities: dict[tuple, tuple[Tensor | None, Visibility, Tensor | None]] = {}

    def changed(
        self,
        where: str,
        values: Tensor,
        tokens: Tokens | None = None,
    ) -> Tensor:
        """The vectors of a site of the current layer, after interventions.

        Args:
            tokens: the tokens of the vectors, if not those of the layer.
        """
        tokens = tokens or self.activations.tokens
        if values.dim() == 2:
            # The tokens of one image, without an axis of images.
            return self.changed(where, values.unsqueeze(0), tokens).squeeze(0)
        return self.changes.apply(
            where,
            self.activations.layer,
            values,
            tokens.on(values.device),
            lambda: self.batch.checksum,
        )

    def tokens_of(self, count: int) -> Tokens:
        """Tokens behind the layer's ``count`` keys or output vectors."""
        if self.activations.stack == CROSS:
            return self.encoded
        tokens = self.activations.tokens
        if count == tokens.mask.shape[1]:
            return tokens
        return self.unpadded(count)

    def unpadded(self, count: int, leading: Sequence[str] = ()) -> Tokens:
        """Tokens without padding; the same object for the same arguments."""
        key = (count, tuple(leading))
        if key not in self._unpadded:
            self._unpadded[key] = self.batch.unpadded(count, leading)
        return self._unpadded[key]

    def vectors(self, values: Tensor, tokens: Tokens) -> Vectors:
        """Hidden vectors, of shape utterance x token x width, as vectors with one head."""
        # Post-norm attention reads the hidden vectors of the layer before, whose sums are already
        # known.
        known = self._previous
        is_known = known is not None and known.tokens is tokens
        if not is_known or known.values.data_ptr() != values.data_ptr():
            one_head = wide(values).unsqueeze(1)
            self._previous = Vectors(one_head, tokens)
        return self._previous

    def take(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_input: Tensor | None,
        visibility: Visibility,
        rotation: Rotation | None = None,
        angles: Sequence[Tensor] = (),
    ) -> None:
        """Record those vectors of the layer's attention that the metrics need.

        Args:
            key_input: the input of the projection of keys, if known.
            rotation: how queries and keys are rotated, if they are.
            angles: the angles that the attention is called with.
        """
        spaces = self.activations.spaces
        keys = visibility.keys
        given = {"query": query, "key": key, "value": value}
        if rotation is not None and self.needs.intersection(UNROTATED):
            self.activations.rotation = rotation
            turn = self.activations.turn = self.turn(rotation, angles, query)
            before = unrotated(torch.cat([query, key], 1), turn, rotation)
            heads = query.shape[1], key.shape[1]
            given |= dict(zip(UNROTATED, before.split(heads, 1), strict=True))
        wanted = {name: values for name, values in given.items() if name in self.needs}
        if "query" in wanted and visibility.queries is not keys:
            spaces["query"] = Vectors(wanted.pop("query"), visibility.queries)
        for name, values in wanted.items():
            spaces[name] = Vectors(values, keys)
        if "attention_input" in self.needs and key_input is not None:
            spaces["attention_input"] = self.vectors(key_input, keys)
        self.activations.attended = True

    def turn(self, rotation: Rotation, angles: Sequence[Tensor], like: Tensor) -> Tensor:
        """The factors of a rotation; computed once for the layers that share angles."""
        key = (*map(id, angles), rotation, like.dtype, like.shape[2])
        if key not in self._turns:
            # The angles are kept because their ids may be given to others once they are freed.
            self._turns[key] = angles, turn_of(angles, rotation, like)
        return self._turns[key][1]

    def visibility(
        self,
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
    ) -> tuple[Visibility, Tensor | None]:
        """Visible pairs, and the mask without empty rows; computed once per mask that layers share.

        If a model lies on several devices, all layers but those on the first have masks of their
        own.
        """
        tokens = self.activations.tokens.on(query.device)
        keys = self.tokens_of(key.shape[2]).on(query.device)
        mask_and_tokens = (id(mask), id(tokens), id(keys))
        if mask_and_tokens not in self._visibilities:
            filled = mask
            if mask is not None:
                # In local attention a padded query may see no key at all, and the softmax of an
                # empty row is NaN.
                filled = changed(mask, lambda rows: rows | ~rows.any(-1, keepdim=True))
            visibility = Visibility.from_mask(mask, tokens, keys)
            if len(self._visibilities) == MASKS_KEPT:
                del self._visibilities[next(iter(self._visibilities))]
            # The mask is kept because its id may be given to another mask once it is freed.
            self._visibilities[mask_and_tokens] = (mask, visibility, filled)
        return self._visibilities[mask_and_tokens][1:]
