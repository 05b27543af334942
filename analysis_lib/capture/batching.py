"""Batches of texts, images and sounds as a model reads them, from the items of a corpus."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.inputs import Batch, Reading, Settings, refuse_untaken
from analysis_lib.capture.pair_batching import pair_batches
from analysis_lib.capture.tokens import Tokens
from analysis_lib.corpora import Answered, Conversation, Sound
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.chat import answers, conversations
from analysis_lib.models.devices import embedded_words
from analysis_lib.models.pairs import MEDIA
from analysis_lib.models.parts import reads_padding
from analysis_lib.models.sounds import steps_of, window_of
from analysis_lib.models.tokenization import Encoded, encoded, padded, shifted

# Padding tokens allowed in a batch of texts: about as many as take the time of one more batch.
MOST_PADDING = 64
# Pixels of an image that count as one token of a batch.
PIXELS_PER_TOKEN = 256
# Longest sound in seconds, unless the processor has a limit of its own: the window of Whisper.
LONGEST_SOUND = 30.0
# Part of a second (1/10) by which a spectrogram may look beyond the end of a window.
BEYOND = 10
# Number of sounds that are prepared together, so that those of one length share a batch.
SOUNDS_AT_ONCE = 64


def batches(
    loaded: LoadedModel,
    items: Sequence,
    groups: Sequence[int],
    settings: Settings,
    reading: Reading,
) -> Iterator[Batch]:
    """The items as batches, not necessarily in their order.

    Args:
        items: texts; or images or sounds, each with a ``load()``.
        groups: the jackknife group of each item.
        reading: counts the items as they are read.

    Raises:
        AnalysisError: an item cannot be read, or is too short for the model.
    """
    if loaded.kind in MEDIA:
        return pair_batches(loaded, items, groups, settings, reading)
    make = {"text": _text_batches, "image": _image_batches, "audio": _sound_batches}[loaded.kind]
    return make(loaded, items, groups, settings, reading)


def unreadable(loaded: LoadedModel, items: Sequence) -> list[str]:
    """Messages about images and sounds that cannot be read or are too short or too long."""
    if loaded.kind == "text":
        return []

    def fault(item: object) -> str | None:
        try:
            content = item.load()
            if loaded.kind == "audio":
                _refuse_length(loaded, item, content)
        except AnalysisError as error:
            return str(error)

    # Threads help, since decoders of images and sounds release the lock of the interpreter.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return [words for words in pool.map(fault, items) if words is not None]


def longest(loaded: LoadedModel, settings: Settings) -> str:
    """Longest text or sound that is read at once: ``512 tokens`` or ``30 seconds``."""
    if loaded.kind == "text" or loaded.kind in MEDIA:
        return f"{_limit(loaded, settings)} tokens"
    return f"{_longest_sound(loaded):g} seconds"


# --- Texts ----------------------------------------------------------------------------------------


def _limit(loaded: LoadedModel, settings: Settings) -> int:
    """Number of tokens of a text that are read at once."""
    return settings.max_length or loaded.max_length


def _text_batches(loaded, texts, groups, settings: Settings, reading: Reading) -> Iterator[Batch]:
    tokenizer = loaded.tokenizer
    limit = _limit(loaded, settings)
    unknown = getattr(tokenizer, "unk_token_id", None)
    special = {*getattr(tokenizer, "all_special_ids", ())} - {unknown}
    sequences = []
    owners = []
    windows = settings.long_texts == "window"
    read = tokenised(loaded, texts, settings, reading)
    for text, group in zip(read, groups, strict=True):
        if all(text.special):
            reading.empty += 1
            continue
        parts = text.windows(limit) if windows else [text.beginning(limit)]
        reading.windowed += windows and len(text) > limit
        reading.cut += not windows and len(text) > limit
        for part in parts:
            own = [
                index for index, framing in zip(part.ids, part.special, strict=True) if not framing
            ]
            reading.unknown += own.count(unknown)
            if part.types is None:
                reading.spelt += sum(own.count(index) for index in special)
        start = text.body.start
        reading.doubled += start > 0 and text.ids[start - 1] == text.ids[start]
        sequences += parts
        owners += [group] * len(parts)
    reading.utterances += len(sequences)
    yield from make_batches(
        loaded, sequences, owners, settings.special_tokens, settings.tokens_per_batch
    )


def tokenised(
    loaded: LoadedModel, items: Sequence, settings: Settings, reading: Reading
) -> Iterable[Encoded]:
    """The tokens of texts, pairs of texts, conversations or answers.

    Raises:
        AnalysisError: the tokenizer or its chat template cannot read them.
    """
    name = loaded.name
    tokenizer = loaded.tokenizer
    match items[0]:
        case Conversation():
            reading.unanswered += sum(item.roles[-1:] != ["assistant"] for item in items)
            return conversations(name, tokenizer, items, settings.chat_template)
        case Answered():
            return answers(name, tokenizer, items, embedded_words(loaded.model))
    is_cut = settings.long_texts != "window"
    return encoded(name, tokenizer, items, _limit(loaded, settings), cut=is_cut)


def make_batches(
    loaded: LoadedModel,
    texts: Sequence[Encoded],
    groups: Sequence[int],
    special_tokens: bool,
    tokens_per_batch: int,
    most_padding: int = MOST_PADDING,
) -> Iterator[Batch]:
    """Batches of texts of similar length, each of at most ``tokens_per_batch`` tokens with padding.

    If padding would change what the model computes, all texts of a batch have the same length; if
    the model computes long texts in another way, they are not batched with shorter ones. A text
    that is longer than ``tokens_per_batch`` is a batch of its own. Texts of one group are
    neighbours in their batch.
    """
    if loaded.layout.equal_lengths:
        most_padding = 0
    elif loaded.device.type != "cpu":
        # On a GPU, a further batch costs more than any padding.
        most_padding = tokens_per_batch
    chunks: list[list[int]] = []
    tokens = 0
    is_padded = reads_padding(loaded.model.config)
    lengths = [loaded.max_length if is_padded else len(text) for text in texts]
    for i in sorted(range(len(texts)), key=lengths.__getitem__):
        length = lengths[i]
        tokens += length
        size = (len(chunks[-1]) + 1) * length if chunks else 0
        apart = chunks and any(
            lengths[chunks[-1][0]] <= end < length for end in loaded.length_boundaries
        )
        if not chunks or apart or size > tokens_per_batch or size - tokens > most_padding:
            chunks.append([])
            tokens = length
        chunks[-1].append(i)
    for chunk in chunks:
        chunk.sort(key=lambda i: groups[i])
        yield _pad(
            loaded, [texts[i] for i in chunk], tuple(groups[i] for i in chunk), special_tokens
        )


def _rows(loaded: LoadedModel, texts: Sequence[Encoded]) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of the model for texts padded to one length, and a mask of their framing tokens."""
    rows = padded([{**text.columns, "special": text.special} for text in texts], loaded.pad_id)
    special = rows.pop("special")
    return rows, special


def _pad(
    loaded: LoadedModel, texts: list[Encoded], groups: tuple[int, ...], special_tokens: bool
) -> Batch:
    inputs, special = _rows(loaded, texts)
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"].bool()
    read = [(ids, special)]
    if any(stack.tokens == "shifted" for stack in loaded.layout.stacks):
        # The decoder's start token stands for no token of a text.
        # mBART's decoder starts with the last token of the text, which names its language.
        start = getattr(loaded.model.config, "decoder_start_token_id", None)
        read.append((shifted(ids, mask, start), functional.pad(special[:, :-1], (1, 0))))
        inputs |= {
            "decoder_input_ids": read[1][0],
            "decoder_attention_mask": inputs["attention_mask"],
        }
    types = _types(loaded, texts, read)
    silent = None
    if reads_padding(loaded.model.config):
        other = texts[0].type_names.index("other")
        types = [_to_length(loaded, types[0], mask, other)]
        fill = {"input_ids": loaded.pad_id}
        inputs = {
            name: _to_length(loaded, part, mask, fill.get(name, 0)) for name, part in inputs.items()
        }
        # The model attends to padding, as it does to the silence after a sound.
        silent = ~inputs.pop("attention_mask").bool()
        mask = torch.ones_like(silent)
    tokens = []
    for name, part in zip(("input_ids", "decoder_input_ids"), types, strict=False):
        read_by_stack = Tokens(
            mask,
            part,
            groups,
            special_tokens,
            silent,
            ids=inputs[name],
            type_names=texts[0].type_names,
        )
        tokens.append(read_by_stack.on(loaded.device))
    refuse_untaken(loaded, inputs)
    inputs = {name: values.to(loaded.device) for name, values in inputs.items()}
    if getattr(loaded.model.config, "use_cache", False):
        inputs["use_cache"] = False
    return Batch(inputs, groups, special_tokens, *tokens, type_names=texts[0].type_names)


def _types(
    loaded: LoadedModel, texts: list[Encoded], read: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """The types of the tokens that each stack reads: the texts', and the decoder's if there is one.

    Args:
        read: what each stack reads, and which tokens of it frame a text.
    """
    if texts[0].types is None:
        return [loaded.token_types(*part) for part in read]
    rows = [{"input_ids": text.types} for text in texts]
    types = padded(rows, 0)["input_ids"]
    start = texts[0].type_names.index("first")
    return [types, functional.pad(types[:, :-1], (1, 0), value=start)][: len(read)]


def _to_length(loaded: LoadedModel, rows: Tensor, mask: Tensor, fill: int) -> Tensor:
    """Rows of tokens, padded to the model's length on the side where its tokenizer pads.

    Args:
        rows: rows with padding at their end.
        mask: True at a token, False at that padding.
        fill: the value at padding.
    """
    more = loaded.max_length - mask.shape[1]
    filled = functional.pad(rows.masked_fill(~mask, fill), (0, more), value=fill)
    if loaded.tokenizer.padding_side != "left":
        return filled
    places = torch.arange(loaded.max_length) + mask.sum(1, keepdim=True)
    return filled.gather(1, places % loaded.max_length)


def _prepared(loaded: LoadedModel, item: object, **given: object) -> Mapping[str, Tensor]:
    """The arguments of the model for an image or a sound, from its processor."""
    try:
        inputs = loaded.processor(item, return_tensors="pt", **given)
        return {name: torch.as_tensor(values) for name, values in inputs.items()}
    except Exception as error:  # Settings of processors are not checked beforehand.
        raise AnalysisError(
            f"{loaded.name}: its {type(loaded.processor).__name__} fails ({type(error).__name__}: "
            f"{error}): mend its preprocessor_config.json"
        ) from error


# --- Images ---------------------------------------------------------------------------------------


def _image_batches(loaded, images, groups, settings: Settings, reading: Reading) -> Iterator[Batch]:
    mode = "L" if getattr(loaded.model.config, "num_channels", 3) == 1 else "RGB"
    waiting = []
    owners = []
    for image, group in zip(images, groups, strict=True):
        prepared = _prepared(loaded, image.load().convert(mode))
        # Processors that keep proportions give each image its own size.
        pixels = prepared["pixel_values"]
        full = (len(waiting) + 1) * pixels[
            0, 0
        ].numel() > settings.tokens_per_batch * PIXELS_PER_TOKEN
        if waiting and (full or waiting[-1]["pixel_values"].shape != pixels.shape):
            yield Batch.stacked(loaded, waiting, owners, settings)
            waiting = []
            owners = []
        waiting.append(prepared)
        owners.append(group)
        reading.utterances += 1
    if waiting:
        yield Batch.stacked(loaded, waiting, owners, settings)


# --- Sounds ---------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A stretch of sound as the model reads it, with its length in samples, group and text."""

    prepared: Mapping[str, Tensor]
    samples: int
    group: int
    text: str = ""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the prepared arrays: samples or a spectrogram, and perhaps a mask."""
        return tuple(tuple(values.shape) for values in self.prepared.values())


def _sound_batches(loaded, sounds, groups, settings: Settings, reading: Reading) -> Iterator[Batch]:
    for start in range(0, len(sounds), SOUNDS_AT_ONCE):
        end = start + SOUNDS_AT_ONCE
        pieces = [
            piece
            for sound, group in zip(sounds[start:end], groups[start:end], strict=True)
            for piece in _pieces(loaded, sound, group, settings, reading)
        ]
        pieces.sort(key=lambda piece: (piece.shapes[0][-1], piece.shapes))
        for shapes, group in itertools.groupby(pieces, key=lambda piece: piece.shapes):
            same = list(group)
            window = window_of(loaded.processor)
            # Speech models make one vector per 20 ms.
            length = same[0].samples if window is None else window.samples
            tokens = max(length, shapes[0][-1]) * 50 // loaded.processor.sampling_rate + 1
            size = max(1, settings.tokens_per_batch // tokens)
            for first in range(0, len(same), size):
                prepared, samples, owners, texts = zip(*same[first : first + size], strict=True)
                batch = Batch.stacked(loaded, prepared, owners, settings, samples, steps_of(loaded))
                if loaded.layout.reads_texts_too:
                    _add_texts(loaded, batch, texts)
                yield batch


def _add_texts(loaded: LoadedModel, batch: Batch, texts: Sequence[str]) -> None:
    """Add the decoder's input to a batch of sounds: start tokens, then the text of each sound."""
    config = loaded.model.config
    limit = config.max_target_positions
    end = getattr(loaded.tokenizer, "eos_token_id", None)
    rows = []
    for text in encoded(loaded.name, loaded.tokenizer, texts, limit, cut=True):
        # Whisper's tokenizer puts the start tokens before a text; the end token is predicted, not
        # read.
        starts = text.special[:1] == [True] and text.ids[0] != end
        start = [] if starts else [config.decoder_start_token_id]
        ends = text.ids[-1:] == [end]
        kept = text.take(range(len(text) - ends))
        ids = [*start, *kept.ids]
        special = [True] * len(start) + kept.special
        rows.append(Encoded({"input_ids": ids}, special).beginning(limit))
    read, special = _rows(loaded, rows)
    types = loaded.token_types(read["input_ids"], special)
    mask = read["attention_mask"].bool()
    shifted = Tokens(mask, types, batch.groups, batch.special_tokens, ids=read["input_ids"])
    batch.shifted = shifted.on(loaded.device)
    batch.inputs |= {f"decoder_{name}": values.to(loaded.device) for name, values in read.items()}
    batch.inputs["use_cache"] = False


def _longest_sound(loaded) -> float:
    """Length in seconds of the longest sound that the model reads at once."""
    window = window_of(loaded.processor)
    if window is not None:
        return window.samples / loaded.processor.sampling_rate
    return float(getattr(loaded.processor, "chunk_length", LONGEST_SOUND))


def _pieces(loaded, sound, group: int, settings: Settings, reading: Reading) -> Iterator[_Piece]:
    recorded = sound.load()
    _refuse_length(loaded, sound, recorded)
    rate = loaded.processor.sampling_rate
    samples = recorded.at_rate(rate)
    reading.without_text += loaded.layout.reads_texts_too and not recorded.text.strip()
    shortest = _shortest(loaded)
    longest = int(rate * _longest_sound(loaded))
    # A processor that cuts sounds may look slightly beyond the end of its window, for the last
    # steps of its spectrogram.
    beyond = 0 if window_of(loaded.processor) is None else rate // BEYOND
    for part in reading.split(len(samples), longest, settings.long_texts == "window"):
        length = len(samples[part])
        # The rest of a sound after its last whole window may be too short for a vector.
        if length >= shortest:
            read = samples[part.start : part.stop + beyond]
            yield _Piece(_prepared(loaded, read, sampling_rate=rate), length, group, recorded.text)
            reading.utterances += 1


def _refuse_length(loaded: LoadedModel, sound: object, recorded: Sound) -> None:
    """Raise an AnalysisError for a sound that the model cannot read.

    It is too short for a vector, or it has a text and is too long for the model: the text cannot be
    cut together with it.
    """
    rate = loaded.processor.sampling_rate
    shortest = _shortest(loaded)
    # Number of samples after resampling to the model's rate.
    samples = math.ceil(len(recorded.samples) * rate / recorded.rate)
    if samples < shortest:
        raise AnalysisError(
            f"{sound} lasts {1000 * samples / rate:.0f} ms: this model reads "
            f"{1000 * shortest / rate:.0f} ms or more; leave it out"
        )
    longest = int(rate * _longest_sound(loaded))
    if recorded.text and loaded.layout.reads_texts_too and samples > longest:
        raise AnalysisError(
            f"{sound} is longer than the {longest / rate:g} seconds that this model reads at once, "
            "and its text cannot be cut where it is: give its parts, each with its text"
        )


def _shortest(loaded) -> int:
    """Number of samples that the model needs for one vector."""
    config = loaded.model.config
    length = 1
    if not hasattr(config, "conv_kernel"):
        # A spectrogram needs one step. Processors that do not give its length use steps of 10 ms,
        # in windows of 25 ms.
        return getattr(loaded.processor, "hop_length", loaded.processor.sampling_rate // 40)
    for kernel, stride in zip(
        reversed(config.conv_kernel), reversed(config.conv_stride), strict=True
    ):
        length = (length - 1) * stride + kernel
    return length
