"""Images and sounds with texts as a model reads them: through its own processor.

A processor of transformers puts the tokens of an image or a sound at a placeholder in the text.
Which placeholder it is, or whether a chat template puts it there, is tried out on an example.
"""

import base64
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import scipy
import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.utils import is_mistral_common_available, is_torchvision_available

from analysis_lib.errors import AnalysisError, require_extra
from analysis_lib.models.calls import signature_of
from analysis_lib.models.devices import placed
from analysis_lib.models.parts import reads_padding
from analysis_lib.models.probe import is_encoder_decoder, replaced
from analysis_lib.models.reading import first_line
from analysis_lib.models.tokenization import Tokenizer, shifted

if TYPE_CHECKING:
    from PIL.Image import Image

# For each kind of item: the word for its file in chat templates, and the parts of a processor that
# read it.
MEDIA = {"image+text": "image", "audio+text": "audio"}
_READERS = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
# Attributes of a processor or its tokenizer that may hold the placeholder in a text.
_PLACEHOLDERS = {
    "image": ("image_token", "image_placeholder_token", "boi_token", "image_start_token"),
    "audio": ("audio_token", "audio_start_token", "boa_token"),
}
# The text of an example: a prime number of short words, so that padding to a window is noticed.
_EXAMPLE = "some of the words of an example are a few, and here they are"
_SIDE = 64


def is_composite(processor: object) -> bool:
    """Whether a processor reads images or sounds together with texts."""
    return isinstance(processor, ProcessorMixin) and bool(pair_kinds(processor))


def pair_kinds(processor: ProcessorMixin) -> list[str]:
    """The kinds of pairs that a processor reads: image+text, audio+text, both or none."""
    if getattr(processor, "tokenizer", None) is None:
        return []
    return [kind for kind in MEDIA if _reader(processor, MEDIA[kind]) is not None]


def _reader(processor: ProcessorMixin, medium: str) -> object:
    parts = (getattr(processor, name, None) for name in _READERS[medium])
    return next((part for part in parts if part is not None), None)


def part_of(processor: ProcessorMixin, kind: str) -> object:
    """The part of a processor that reads texts, images or sounds alone."""
    if kind == "text":
        return processor.tokenizer
    return _reader(processor, kind) or processor


@dataclass(frozen=True, eq=False)
class PairReader:
    """A processor with the way in which it is given a file and its text.

    Attributes:
        processor: the processor.
        kind: image+text or audio+text.
        placeholder: what stands before a text; None if the chat template puts it there.
        medium_ids: the ids of the tokens that the features of a file replace.
    """

    processor: ProcessorMixin
    kind: str
    placeholder: str | None = None
    medium_ids: tuple[int, ...] = ()

    @property
    def medium(self) -> str:
        """Image or audio."""
        return MEDIA[self.kind]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer

    @cached_property
    def sampling_rate(self) -> int:
        """Samples per second of the sounds that it reads; 1 for images."""
        return getattr(_reader(self.processor, self.medium), "sampling_rate", 1)

    def prompt(self, text: str, count: int = 1) -> str:
        """A text with the placeholders of its images or its sound, as the processor reads it.

        Args:
            count: the number of images or sounds, which come before the text.
        """
        if self.placeholder is not None:
            return self.placeholder * count + text
        content = [{"type": self.medium}] * count + [{"type": "text", "text": text}]
        return self.processor.apply_chat_template([{"role": "user", "content": content}])

    def __call__(
        self, media: "Sequence[Image | np.ndarray]", text: str, length: int | None = None
    ) -> dict[str, Tensor]:
        """The arguments of a model for images, or for samples at the rate it reads, and a text.

        Args:
            media: the images, or the samples of one sound.
            length: the number of tokens to which the text is padded; None for that of the
                processor.

        Raises:
            AnalysisError: the processor or its chat template fails; the text holds a placeholder.
        """
        if self.placeholder and self.placeholder in text:
            raise AnalysisError(
                f"its text holds {self.placeholder}, which is put before it for each "
                f"{self.medium}: leave it out"
            )
        try:
            made = self._made(media, text, length)
            return {name: _tensor(values) for name, values in made.items()}
        except Exception as error:  # Processors and templates fail in many ways.
            raise AnalysisError(
                f"its {type(self.processor).__name__} cannot read it ({first_line(error)}): leave "
                f"it out, or give another {self.medium}"
            ) from error

    def _made(
        self, media: "Sequence[Image | np.ndarray]", text: str, length: int | None
    ) -> Mapping[str, object]:
        """What the processor makes of images, or of samples, and a text."""
        prompt = self.prompt(text, len(media))
        # One image as it is, which every processor reads.
        content = media[0] if len(media) == 1 else [*media]
        options = {"return_tensors": "pt"}
        if length is not None:
            options |= {"padding": "max_length", "max_length": length}
        start = getattr(self.tokenizer, "bos_token", None)
        if start and self.placeholder is None and prompt.startswith(start):
            # The template has put it there already.
            options["add_special_tokens"] = False
        if self.medium == "image":
            return self.processor(images=content, text=prompt, **options)
        rate = self.sampling_rate
        return self.processor(audio=content, text=prompt, sampling_rate=rate, **options)

    def plain_ids(self, text: str, count: int) -> list[int]:
        """The tokens of a text with placeholders, before the processor puts others in their place.

        Args:
            count: the number of images or sounds.
        """
        prompt = self.prompt(text, count)
        return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def example(self) -> tuple[list["Image | np.ndarray"], str]:
        """An image or the samples of a sound, in a list, and a text."""
        if self.medium == "audio":
            return [np.sin(np.arange(self.sampling_rate) / 20).astype(np.float32)], self._text
        require_extra("packages", "PIL")
        # Imported late: models of text need no images.
        from PIL import Image

        mandelbrot = Image.effect_mandelbrot((_SIDE, _SIDE), (-2, -1, 1, 1), 50)
        return [mandelbrot.convert("RGB")], self._text

    def first_and_last(self) -> tuple[int, int]:
        """The ids of the first and of the last token of the text of an example, which differ."""
        ids = self.tokenizer(self._text, add_special_tokens=False)["input_ids"]
        return ids[0], ids[-1]

    @cached_property
    def _text(self) -> str:
        """The text of an example, in words that the tokenizer knows."""
        ids = self.tokenizer(_EXAMPLE, add_special_tokens=False)["input_ids"]
        if ids[0] != ids[-1]:
            return _EXAMPLE
        vocabulary = {*self.tokenizer.get_vocab().values()}
        known = sorted(vocabulary - {*self.tokenizer.all_special_ids})
        return self.tokenizer.decode([known[index % len(known)] for index in range(len(ids))])


class MessageReader(PairReader):
    """A processor that reads a sound in a message only, as Voxtral's does through mistral-common.

    It is given the sound as a WAV file of floating-point samples, in base64.
    """

    def _made(
        self, media: Sequence[np.ndarray], text: str, length: int | None
    ) -> Mapping[str, object]:
        content = []
        for samples in media:
            file = io.BytesIO()
            scipy.io.wavfile.write(file, self.sampling_rate, samples)
            content.append({"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()})
        content.append({"type": "text", "text": text})
        return self.processor.apply_chat_template([{"role": "user", "content": content}])

    def plain_ids(self, text: str, count: int) -> list[int]:
        """The tokens of a message with the text alone."""
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}])["input_ids"]


def _reads_messages(processor: ProcessorMixin, kind: str) -> bool:
    """Whether a processor reads a text when it is called, and its images or sounds elsewhere."""
    arguments = inspect.signature(type(processor).__call__).parameters
    argument = {"image": "images", "audio": "audio"}[MEDIA[kind]]
    return "text" in arguments and argument not in arguments


def _tensor(values: object) -> Tensor:
    """A tensor of what a processor returns, which may be an array or a list."""
    if isinstance(values, list) and values and isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.as_tensor(values)


def readers(processor: ProcessorMixin, kind: str) -> Iterator[PairReader]:
    """The ways of giving a processor a file and its text, the documented one first.

    A chat template comes first: there is no other way if it is the processor's own. A tokenizer's
    may be for texts alone. Then come the placeholders that the processor and its tokenizer name,
    and the text alone, before which some processors put the placeholder themselves.

    Raises:
        AnalysisError: it reads sounds through mistral-common, which is not installed.
    """
    if _reads_messages(processor, kind):
        if not is_mistral_common_available():
            raise AnalysisError(
                f"a {type(processor).__name__} reads sounds through mistral-common: run pip "
                'install "mistral-common[audio]"'
            )
        yield MessageReader(processor, kind)
        return
    own = getattr(processor, "chat_template", None)
    if own or getattr(processor.tokenizer, "chat_template", None):
        yield PairReader(processor, kind)
    if own:
        return
    placeholders = []
    for name in _PLACEHOLDERS[MEDIA[kind]]:
        for owner in (processor, processor.tokenizer):
            token = getattr(owner, name, None)
            if token is not None:
                placeholders.append(str(token))
    for placeholder in dict.fromkeys([*placeholders, ""]):
        yield PairReader(processor, kind, placeholder)


def arguments(
    reader: PairReader, model: PreTrainedModel, media: "Sequence[Image | np.ndarray]", text: str
) -> dict[str, Tensor | bool]:
    """The arguments of a model for a pair, on its device, in its precision, without a cache.

    A decoder behind an encoder reads the text as it does without an image: one token later.

    Args:
        media: images, or the samples of one sound at the rate that the processor reads.

    Raises:
        AnalysisError: the processor fails, or makes no tokens of the text.
    """
    of_text = model.config.get_text_config()
    length = of_text.max_position_embeddings if reads_padding(of_text) else None
    inputs = reader(media, text, length)
    if "input_ids" not in inputs:
        raise AnalysisError(f"its {type(reader.processor).__name__} makes no tokens of the text")
    accepted = signature_of(type(model)).parameters
    if is_encoder_decoder(model) and "decoder_input_ids" in accepted:
        ids = reader.tokenizer(text, return_tensors="pt")["input_ids"]
        are_tokens = torch.ones_like(ids, dtype=torch.bool)
        inputs["decoder_input_ids"] = shifted(ids, are_tokens, _start_of(model))
    made = {name: placed(values, model) for name, values in inputs.items()}
    takes_all = any(part.kind is part.VAR_KEYWORD for part in accepted.values())
    keeps = getattr(of_text, "use_cache", False)
    if "use_cache" in accepted or (takes_all and keeps and not is_encoder_decoder(model)):
        made["use_cache"] = False
    return made


def _start_of(model: PreTrainedModel) -> int | None:
    """The start token of a decoder; None if it starts with the last token of the text."""
    for config in (model.config, model.config.get_text_config()):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    return None


@contextmanager
def without_videos() -> Iterator[None]:
    """A context in which a processor is made without its part for videos, if torchvision is absent.

    That part alone needs it, and transformers would make none of the others.
    """
    if is_torchvision_available():
        yield
        return
    check = ProcessorMixin.check_argument_for_proper_class

    def checked(self: ProcessorMixin, name: str, argument: object) -> object:
        return None if argument is None else check(self, name, argument)

    class_method = classmethod(lambda *_args, **_options: None)
    with (
        replaced(ProcessorMixin, check_argument_for_proper_class=checked),
        replaced(AutoVideoProcessor, from_pretrained=class_method),
    ):
        yield
