"""Items of a corpus -> batches that a model reads: token ids, pixels or samples, and what each token is."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import signal
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.errors import AnalysisError
from analysis_lib.models.loading import TOKEN_TYPES, LoadedModel
from analysis_lib.models.tokenization import text_frame, token_ids

LONG_TEXTS = ("cut", "window")
MAPS = ("flatten", "positions")
# The leading entries of TOKEN_TYPES.
SPECIAL_TYPES = ("cls", "sep")
# Sounds are read in pieces of at most so many seconds, which is what Whisper reads at once.
LONGEST_SOUND = 30.0
# An image of so many pixels counts as one token of a batch's budget.
PIXELS_PER_TOKEN = 256
# So many sounds are prepared at a time, to be batched with others of their length.
SOUNDS_AT_ONCE = 64


@dataclass(eq=False)
class Tokens:
    """What the vectors of a layer stand for, utterance by utterance.

    Attributes:
        mask: True at a token, False at padding.
        types: the type of each token, an index into ``TOKEN_TYPES``; meaningless at padding.
        groups: the jackknife group of each utterance.
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries. As keys they always do.
        silent: True at tokens that are there for attention and yet no part of the item, such as Whisper's silence
            after a short sound: they count neither as vectors nor as queries.
    """

    mask: Bool[Tensor, "utterance token"]
    types: Int[Tensor, "utterance token"]
    groups: Int[Tensor, " utterance"]
    special_tokens: bool = True
    silent: Bool[Tensor, "utterance token"] | None = None

    @cached_property
    def type_masks(self) -> Float[Tensor, "utterance type token"]:
        """1 where a token is of a type, for each type."""
        masks = functional.one_hot(self.types.long(), len(TOKEN_TYPES)) * self.mask.unsqueeze(-1)
        return masks.transpose(1, 2).to(torch.get_default_dtype())

    @cached_property
    def counted(self) -> Bool[Tensor, "utterance token"]:
        """True at the tokens that count as vectors and as queries."""
        mask = self.mask if self.special_tokens else self.mask & (self.types >= len(SPECIAL_TYPES))
        return mask if self.silent is None else mask & ~self.silent

    @cached_property
    def counts(self) -> Float[Tensor, " utterance"]:
        """How many tokens of each utterance count."""
        return self.counted.sum(1).double()

    def head(self, utterances: int) -> "Tokens":
        """The first few utterances."""
        silent = None if self.silent is None else self.silent[:utterances]
        parts = (part[:utterances] for part in (self.mask, self.types, self.groups))
        return Tokens(*parts, self.special_tokens, silent)

    @property
    def counted_types(self) -> slice:
        """The types whose tokens count."""
        return slice(None) if self.special_tokens else slice(len(SPECIAL_TYPES), None)


def unpadded(groups: Tensor, count: int, class_tokens: int = 0, special_tokens: bool = True) -> Tokens:
    """Tokens of utterances of one length: ``class_tokens`` of type cls, then others."""
    types = torch.full((len(groups), count), TOKEN_TYPES.index("other"), device=groups.device)
    types[:, :class_tokens] = TOKEN_TYPES.index("cls")
    return Tokens(torch.ones_like(types, dtype=torch.bool), types, groups, special_tokens)


@dataclass(eq=False)
class Batch:
    """Utterances that go through the model at once.

    Attributes:
        inputs: what the model is called with, by name.
        groups: the jackknife group of each utterance.
        special_tokens: see :class:`Tokens`.
        tokens: of a text; the tokens of images and sounds are known when the model has made them.
        shifted: what the decoder of an encoder-decoder reads: the same text, one token later.
        lengths: how many samples each sound has.
    """

    inputs: dict[str, Tensor]
    groups: Int[Tensor, " utterance"]
    special_tokens: bool = True
    tokens: Tokens | None = None
    shifted: Tokens | None = None
    lengths: Int[Tensor, " utterance"] | None = None

    def head(self, utterances: int) -> "Batch":
        """The first few utterances."""
        inputs = {n: v[:utterances] if isinstance(v, Tensor) else v for n, v in self.inputs.items()}
        tokens, shifted = (part and part.head(utterances) for part in (self.tokens, self.shifted))
        lengths = None if self.lengths is None else self.lengths[:utterances]
        return Batch(inputs, self.groups[:utterances], self.special_tokens, tokens, shifted, lengths)


@dataclass
class Reading:
    """How the items of a corpus were read.

    Attributes:
        utterances: sequences that went through the model (windows count apart).
        cut: items longer than the model reads, of which only the beginning was read.
        windowed: such items that were read whole, in windows.
    """

    utterances: int = 0
    cut: int = 0
    windowed: int = 0


@dataclass(frozen=True)
class Settings:
    """What a measurement depends on besides model, corpus and metrics.

    Attributes:
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries; as keys they always do.
        long_texts: ``cut`` reads the beginning of a text or sound longer than the model reads, ``window`` reads it
            whole, as windows of that length, each an utterance of its own.
        tokens_per_batch: how many tokens, padding included, go through the model at once.
        maps: what a vector of a convolutional network is: ``flatten``, the whole map of an image, as in Godey et
            al. (2024, sec. 3.2), or ``positions``, the features at one position of the map.
    """

    special_tokens: bool = True
    long_texts: str = "cut"
    tokens_per_batch: int = 2048
    maps: str = "flatten"

    def __post_init__(self) -> None:
        for name, choices in (("long_texts", LONG_TEXTS), ("maps", MAPS)):
            if getattr(self, name) not in choices:
                raise AnalysisError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        if self.tokens_per_batch < 1:
            raise AnalysisError(f"tokens_per_batch is {self.tokens_per_batch}: give 1 or more")


def batches(
    loaded: LoadedModel, items: Sequence, groups: Sequence[int], settings: Settings, reading: Reading
) -> Iterator[Batch]:
    """The items as batches, in an order of their own; ``reading`` is told what was read.

    Args:
        items: texts; or images or sounds with a ``load()``.
        groups: the jackknife group of each item.

    Raises:
        AnalysisError: an item that cannot be read or is too short for the model.
    """
    make = {"text": _texts, "image": _images, "audio": _sounds}[loaded.kind]
    return make(loaded, items, groups, settings, reading)


def longest(loaded: LoadedModel) -> str:
    """How much of an item the model reads at once, in words."""
    if loaded.kind == "text":
        return f"{loaded.max_length} tokens"
    return f"{_longest_sound(loaded):g} seconds"


# --- Texts ----------------------------------------------------------------------------------------


def _texts(loaded, texts, groups, settings, reading) -> Iterator[Batch]:
    prefix, suffix = text_frame(loaded.tokenizer)
    size = loaded.max_length - len(prefix) - len(suffix)
    ids, owners = [], []
    for body, group in zip(token_ids(loaded.tokenizer, texts), groups, strict=True):
        parts = _parts(len(body), size, settings.long_texts == "window", reading)
        sequences = [[*prefix, *body[part], *suffix] for part in parts]
        ids += [sequence for sequence in sequences if sequence]
        owners += [group] * (len(ids) - len(owners))
    reading.utterances += len(ids)
    yield from make_batches(loaded, ids, owners, settings.special_tokens, settings.tokens_per_batch)


def _parts(length: int, size: int, windows: bool, reading: Reading) -> list[slice]:
    """Where an item is cut: the beginning alone, or window after window."""
    parts = [slice(start, start + size) for start in range(0, max(length, 1), size)]
    if len(parts) == 1:
        return parts
    if windows:
        reading.windowed += 1
        return parts
    reading.cut += 1
    return parts[:1]


def make_batches(
    loaded: LoadedModel,
    token_ids: Sequence[list],
    groups: Sequence[int],
    special_tokens: bool,
    tokens_per_batch: int,
) -> list[Batch]:
    """Batches of texts of like length, each of at most ``tokens_per_batch`` tokens, padding included.

    Where padding would change what the model computes, a batch holds texts of one length.
    """
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    chunks: list[list[int]] = [[]]
    for i in order:
        full = (len(chunks[-1]) + 1) * len(token_ids[i]) > tokens_per_batch
        longer = chunks[-1] and len(token_ids[i]) > len(token_ids[chunks[-1][0]])
        if chunks[-1] and (full or (longer and loaded.layout.equal_lengths)):
            chunks.append([])
        chunks[-1].append(i)
    return [_pad(loaded, [token_ids[i] for i in c], [groups[i] for i in c], special_tokens) for c in chunks if c]


def _pad(loaded: LoadedModel, token_ids: list[list], groups: list[int], special_tokens: bool) -> Batch:
    pad = getattr(loaded.tokenizer, "pad_token_id", None)
    # A word of characters is padded with zeros; some causal models have no padding, and none is read.
    pad = pad if isinstance(pad, int) else 0
    rows = [torch.tensor(ids) for ids in token_ids]
    input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad).to(loaded.device)
    lengths = torch.tensor([len(ids) for ids in token_ids])
    mask = (torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)).to(loaded.device)
    owners = torch.tensor(groups, device=loaded.device)
    inputs = {"input_ids": input_ids, "attention_mask": mask.long()}
    batch = Batch(inputs, owners, special_tokens)
    batch.tokens = Tokens(mask, loaded.token_types(input_ids), owners, special_tokens)
    if any(stack.tokens == "shifted" for stack in loaded.layout.stacks):
        shifted = loaded.model._shift_right(input_ids)
        inputs |= {"decoder_input_ids": shifted, "decoder_attention_mask": mask.long()}
        batch.shifted = Tokens(mask, loaded.token_types(shifted), owners, special_tokens)
    if getattr(loaded.model.config, "use_cache", False):
        inputs["use_cache"] = False
    return batch


# --- Images ---------------------------------------------------------------------------------------


def _images(loaded, images, groups, settings, reading) -> Iterator[Batch]:
    mode = "L" if getattr(loaded.model.config, "num_channels", 3) == 1 else "RGB"
    waiting, owners = [], []
    for image, group in zip(images, groups, strict=True):
        pixels = loaded.processor(images=image.load().convert(mode), return_tensors="pt")["pixel_values"]
        # Processors that keep an image's proportions give it a size of its own.
        if waiting and (waiting[-1].shape != pixels.shape or _full(pixels, waiting, settings)):
            yield _stack(loaded, "pixel_values", waiting, owners, settings)
            waiting, owners = [], []
        waiting.append(pixels)
        owners.append(group)
        reading.utterances += 1
    if waiting:
        yield _stack(loaded, "pixel_values", waiting, owners, settings)


def _full(pixels: Tensor, waiting: list[Tensor], settings: Settings) -> bool:
    size = pixels.shape[-1] * pixels.shape[-2]
    return (len(waiting) + 1) * size > settings.tokens_per_batch * PIXELS_PER_TOKEN


def _stack(loaded, name: str, rows: list[Tensor], owners: list[int], settings: Settings) -> Batch:
    inputs = {name: torch.cat(rows).to(loaded.device, loaded.model.dtype)}
    return Batch(inputs, torch.tensor(owners, device=loaded.device), settings.special_tokens)


# --- Sounds ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Piece:
    """A stretch of sound, prepared."""

    features: Tensor
    samples: int
    group: int = field(default=0)


def _sounds(loaded, sounds, groups, settings, reading) -> Iterator[Batch]:
    for start in range(0, len(sounds), SOUNDS_AT_ONCE):
        end = start + SOUNDS_AT_ONCE
        pieces = [
            piece
            for sound, group in zip(sounds[start:end], groups[start:end], strict=True)
            for piece in _pieces(loaded, sound, group, settings, reading)
        ]
        pieces.sort(key=lambda piece: piece.features.shape[-1])
        for _, same in itertools.groupby(pieces, key=lambda piece: piece.features.shape[-1]):
            for chunk in _chunks(list(same), settings.tokens_per_batch, loaded.processor.sampling_rate):
                name = loaded.processor.model_input_names[0]
                batch = _stack(loaded, name, [p.features for p in chunk], [p.group for p in chunk], settings)
                batch.lengths = torch.tensor([p.samples for p in chunk], device=loaded.device)
                yield batch


def _chunks(pieces: list[_Piece], tokens_per_batch: int, rate: int) -> Iterator[list[_Piece]]:
    # Speech models make a vector of 20 ms; Whisper pads every sound to its window.
    tokens = max(pieces[0].samples, pieces[0].features.shape[-1]) * 50 // rate + 1
    size = max(1, tokens_per_batch // tokens)
    return (pieces[i : i + size] for i in range(0, len(pieces), size))


def _pieces(loaded, sound, group: int, settings: Settings, reading: Reading) -> Iterator[_Piece]:
    read = sound.load()
    rate = loaded.processor.sampling_rate
    samples = _resampled(read.samples, read.rate, rate)
    longest = int(rate * _longest_sound(loaded))
    shortest = _shortest(loaded)
    if len(samples) < shortest:
        raise AnalysisError(
            f"{sound} lasts {1000 * len(samples) / rate:.0f} ms: this model reads {1000 * shortest / rate:.0f} ms "
            f"or more; leave it out"
        )
    for part in _parts(len(samples), longest, settings.long_texts == "window", reading):
        piece = samples[part]
        # What is left of a sound after its last whole window may be too short to make a vector.
        if len(piece) >= shortest:
            features = loaded.processor(piece, sampling_rate=rate, return_tensors="pt")
            yield _Piece(features[loaded.processor.model_input_names[0]], len(piece), group)
            reading.utterances += 1


def _longest_sound(loaded: LoadedModel) -> float:
    return float(getattr(loaded.processor, "chunk_length", LONGEST_SOUND))


def _shortest(loaded: LoadedModel) -> int:
    """How many samples make a vector."""
    config, length = loaded.model.config, 1
    if not hasattr(config, "conv_kernel"):
        return loaded.processor.hop_length
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        length = (length - 1) * stride + kernel
    return length


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    return signal.resample_poly(samples, wanted // common, rate // common).astype(np.float32)
