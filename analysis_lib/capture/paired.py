"""Two models that read the same items, as one source of activations.

Their vectors are paired: by token where both read the same tokens, else by word, else by item.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture.activations import BESIDE, Activations, Receive
from analysis_lib.capture.batching import tokenised
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.source import NEEDS, ModelSource, Source
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import Vectors
from analysis_lib.corpora.token_types import TOKEN_TYPES
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel, ModelSpec
from analysis_lib.models.parts import Layout
from analysis_lib.models.tokenization import Encoded

# What two vectors that are compared stand for.
TOKEN, WORD, ITEM = "token", "word", "item"
WORDS = re.compile(r"\S+")
# Number of texts that are tokenised at once to find out whether two models read the same tokens.
COMPARED_AT_ONCE = 1024


@dataclass(frozen=True)
class PairSpec(ModelSpec):
    """The first model of a pair, with the second one, as another process needs them."""

    other: ModelSpec | None = None
    level: str = TOKEN

    @property
    def specs(self) -> tuple[ModelSpec, ModelSpec]:
        """Both models, on the device of the first."""
        own = {name: getattr(self, name) for name in ModelSpec.__dataclass_fields__}
        return ModelSpec(**own), replace(self.other, device=self.device)


class ModelPair:
    """Two models that read the same kind of items.

    Attributes:
        first, other: the models.
        level: what their vectors stand for: ``token``, ``word`` or ``item``.
    """

    def __init__(self, first: LoadedModel, other: LoadedModel, level: str) -> None:
        self.first = first
        self.other = other
        self.level = level
        self.name = f"{first.name} and {other.name}"
        self.revision = f"{first.revision} and {other.revision} ({other.model.dtype}), by {level}"
        self.kind = first.kind
        self.device = first.device
        prefixed = {f"{other.name}/{name}": known for name, known in other.files.items()}
        self.files = first.files | prefixed
        # What a measurement reads of a model besides.
        self.model = SimpleNamespace(dtype=first.model.dtype)

    @property
    def spec(self) -> PairSpec | None:
        """Arguments with which another process loads both; None if it cannot load one of them."""
        first = self.first.spec
        other = self.other.spec
        if first is None or other is None:
            return None
        return PairSpec(**vars(first), other=other, level=self.level)

    @property
    def layout(self) -> Layout:
        return self.first.layout

    @property
    def shortest(self) -> LoadedModel:
        """The model that reads less of a long text."""
        if self.kind == "text" and self.other.max_length < self.first.max_length:
            return self.other
        return self.first


@dataclass(eq=False)
class PairBatch:
    """A batch of the first model, and the same items in batches of the other one.

    Attributes:
        first: a batch whose "groups" are the numbers of its items.
        others: batches of the other model, with the numbers of items likewise.
        items: the items, by number.
        groups: the jackknife group of each item of ``first``, in its order.
    """

    first: Batch
    others: list[Batch]
    items: dict[int, object]
    groups: tuple[int, ...]


class PairSource(Source):
    """Two models as one source: the layers of the first, each beside all layers of the other.

    Batches run one after another, since the sums of each take gigabytes; the products of large
    matrices that they are made of occupy all threads.
    """

    def __init__(self, pair: ModelPair) -> None:
        self.model = pair
        self.first = ModelSource(pair.first)
        self.other = ModelSource(pair.other)

    @property
    def devices(self) -> list[str]:
        return [*dict.fromkeys(self.first.devices + self.other.devices)]

    def check(self, batch: PairBatch) -> None:
        self.first.check(batch.first)
        for other in batch.others[:1]:
            self.other.check(other)

    def unsupported(self, items: Sequence, settings: Settings) -> dict[str, str]:
        for source in (self.first, self.other):
            # What cannot be captured of a model is not asked for when its pass is checked.
            source.unsupported(items, settings)
        return dict.fromkeys(NEEDS - {BESIDE}, "two models are compared by hidden states alone")

    def refuse_unreadable(self, items: Sequence) -> None:
        self.first.refuse_unreadable(items)
        self.other.refuse_unreadable(items)

    def batches(
        self, items: Sequence, groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[PairBatch]:
        numbers = range(len(items))
        for batch in self.first.batches(items, numbers, settings, reading):
            some = {number: items[number] for number in batch.groups}
            read = self.other.batches([*some.values()], [*some], settings, Reading())
            yield PairBatch(batch, [*read], some, tuple(groups[number] for number in some))

    def run(
        self,
        batch: PairBatch,
        needs: frozenset[str],
        receive: Receive,
        maps: str = "flatten",
        changes: Changes | None = None,
    ) -> None:
        units = _Units(self.model, batch)
        beside: dict[int, Tensor] = {}

        def keep(activations: Activations, part: Batch) -> None:
            values = units.of_other(activations, part)
            if values is None:
                return
            layer = activations.layer
            if layer not in beside:
                shape = *units.tokens.mask.shape, values.shape[-1]
                beside[layer] = values.new_zeros(shape)
            beside[layer][units.rows(part)] = values

        def pass_on(activations: Activations) -> None:
            values = units.of_first(activations)
            if values is not None:
                own = Vectors(values.unsqueeze(1), units.tokens)
                spaces = {"hidden": own}
                paired = replace(activations, tokens=units.tokens, spaces=spaces, beside=vectors)
                receive(paired)

        hidden = frozenset({"hidden"})
        for part in batch.others:
            self.other.run(part, hidden, lambda activations, part=part: keep(activations, part))
        vectors = {}
        for layer, values in beside.items():
            vectors[layer] = Vectors(values.unsqueeze(1), units.tokens)
        self.first.run(batch.first, hidden, pass_on)


class _Units:
    """The tokens, words or items of a batch for which both models have vectors."""

    def __init__(self, pair: ModelPair, batch: PairBatch) -> None:
        self.pair = pair
        self.batch = batch
        self._row = {number: row for row, number in enumerate(batch.items)}
        self._of_first = self._members(pair.first, batch.first)
        self._of_other = {}
        for part in batch.others:
            self._of_other |= self._members(pair.other, part)
        counts = []
        for number in batch.items:
            self._keep_common(number)
            counts.append(len(self._of_first[number]))
        longest = max(counts)
        lengths = torch.tensor(counts)
        mask = torch.arange(longest) < lengths[:, None]
        types = torch.full(mask.shape, TOKEN_TYPES.index("other"))
        tokens = Tokens(mask, types, batch.groups)
        self.tokens = tokens.on(pair.device)

    def rows(self, part: Batch) -> list[int]:
        """Rows of the pair's batch that are those of a batch of the other model."""
        return [self._row[number] for number in part.groups]

    def of_first(self, activations: Activations) -> Float[Tensor, "item unit dim"] | None:
        """Vectors of the units in a layer of the first model; None where it has none."""
        return self._pooled(self.pair.first, activations, self.batch.first, self._of_first)

    def of_other(
        self, activations: Activations, part: Batch
    ) -> Float[Tensor, "item unit dim"] | None:
        """The same of the other model, for one of its batches."""
        return self._pooled(self.pair.other, activations, part, self._of_other)

    def _members(self, loaded: LoadedModel, part: Batch) -> dict[int, dict[int, list[int]]]:
        """For each item, the positions of the tokens of each of its units.

        Items as units have none: their tokens are known only inside the model.
        """
        if self.pair.level == ITEM:
            return {number: {0: []} for number in part.groups}
        if self.pair.level == WORD:
            texts = [self.batch.items[number] for number in part.groups]
            words = word_numbers(loaded, texts)
        members = {}
        for row, number in enumerate(part.groups):
            counted = part.tokens.counted[row]
            positions = counted.nonzero().flatten().tolist()
            if self.pair.level == WORD:
                members[number] = _by_word(positions, words[row])
            else:
                members[number] = {unit: [position] for unit, position in enumerate(positions)}
        return members

    def _keep_common(self, number: int) -> None:
        """Leave out units that only one of the models has."""
        first = self._of_first.get(number, {})
        other = self._of_other.get(number, {})
        common = [unit for unit in first if unit in other]
        for members in (self._of_first, self._of_other):
            own = members.get(number, {})
            members[number] = {unit: own[unit] for unit in common}

    def _pooled(
        self,
        loaded: LoadedModel,
        activations: Activations,
        part: Batch,
        members: dict[int, dict[int, list[int]]],
    ) -> Float[Tensor, "item unit dim"] | None:
        hidden = activations.spaces.get("hidden")
        if hidden is None:
            return None
        values = hidden.values[:, 0]
        if not values.sum().isfinite():
            raise AnalysisError(
                f"{loaded.name}: layer {activations.layer} has vectors that are not finite (NaN or "
                "infinity): its weights or its precision do not carry this corpus"
            )
        if self.pair.level == ITEM:
            counted = hidden.tokens.counted.to(values)
            mean = counted / counted.sum(1, keepdim=True).clamp_min(1)
            return mean.unsqueeze(1) @ values
        if hidden.tokens is not part.tokens.on(values.device):
            # A decoder reads the text one token later, and some stacks read characters.
            return None
        weights = self._weights(part, members).to(values)
        return weights @ values

    def _weights(
        self, part: Batch, members: dict[int, dict[int, list[int]]]
    ) -> Float[Tensor, "item unit token"]:
        """Weights with which the vectors of tokens make those of units: their mean."""
        units = self.tokens.mask.shape[1]
        weights = torch.zeros(len(part.groups), units, part.tokens.mask.shape[1])
        for row, number in enumerate(part.groups):
            for unit, positions in enumerate(members[number].values()):
                weights[row, unit, positions] = 1 / len(positions)
        return weights


def _by_word(positions: list[int], words: Sequence[int]) -> dict[int, list[int]]:
    """Positions of the tokens of each word; tokens outside of words are left out."""
    members: dict[int, list[int]] = {}
    for position in positions:
        word = words[position]
        if word >= 0:
            members.setdefault(word, []).append(position)
    return members


def word_numbers(loaded: LoadedModel, texts: Sequence[str]) -> list[list[int]]:
    """For each text, the number of the word in which each of its tokens begins.

    Words are what white space divides; a token of white space, or put around the text by the
    tokenizer, is in none, and has -1.
    """
    tokenised = loaded.tokenizer(
        [*texts], return_offsets_mapping=True, return_special_tokens_mask=True
    )
    numbers = []
    for index, text in enumerate(texts):
        special = [*map(bool, tokenised["special_tokens_mask"][index])]
        columns = {
            "input_ids": tokenised["input_ids"][index],
            "span": tokenised["offset_mapping"][index],
        }
        read = Encoded(columns, special).beginning(loaded.max_length)
        word_at = [-1] * len(text)
        for number, word in enumerate(WORDS.finditer(text)):
            word_at[slice(*word.span())] = [number] * len(word[0])
        of_tokens = []
        for span, is_special in zip(read.columns["span"], read.special, strict=True):
            inside = [] if is_special else word_at[slice(*span)]
            of_tokens.append(next((word for word in inside if word >= 0), -1))
        numbers.append(of_tokens)
    return numbers


def common_level(first: LoadedModel, other: LoadedModel, items: Sequence) -> str:
    """What the vectors of two models can be paired by: ``token``, ``word`` or ``item``.

    Raises:
        AnalysisError: the models read different kinds of items.
    """
    if first.kind != other.kind:
        raise AnalysisError(
            f"{first.name} reads {first.kind} and {other.name} {other.kind}: give two models that "
            "read the same"
        )
    if first.kind != "text":
        return ITEM
    if all(itertools.starmap(_are_alike, _encoded_by_both(first, other, items))):
        return TOKEN
    is_fast = (getattr(model.tokenizer, "is_fast", False) for model in (first, other))
    are_texts = all(isinstance(item, str) for item in items)
    return WORD if all(is_fast) and are_texts else ITEM


def _encoded_by_both(
    first: LoadedModel, other: LoadedModel, items: Sequence
) -> Iterator[tuple[Encoded, Encoded]]:
    for start in range(0, len(items), COMPARED_AT_ONCE):
        some = items[start : start + COMPARED_AT_ONCE]
        both = []
        for model in (first, other):
            read = tokenised(model, some, Settings(), Reading())
            both.append([text.beginning(model.max_length) for text in read])
        yield from zip(*both, strict=True)


def _are_alike(first: Encoded, other: Encoded) -> bool:
    return first.ids == other.ids and first.special == other.special
