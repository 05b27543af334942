"""Batches of utterances, and the settings that decide how items become batches."""

import functools
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from analysis_lib.capture.interventions import interventions
from analysis_lib.capture.tokens import Tokens, unpadded
from analysis_lib.corpora.token_types import TOKEN_TYPES
from analysis_lib.errors import (
    AnalysisError,
    require_choice,
    require_flag,
    require_text,
    require_whole,
    shown,
)
from analysis_lib.models import LoadedModel
from analysis_lib.models.devices import placed
from analysis_lib.models.outer import parameters_of, takes_all
from analysis_lib.models.sounds import Steps


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement besides model, corpus and metrics.

    Attributes:
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries; as keys they always
            do.
        long_texts: ``cut`` reads only the beginning of a text or sound that is longer than the
            model's limit; ``window`` reads all of it, in windows of that length, each an utterance
            of its own.
        tokens_per_batch: the number of tokens in a batch, padding included.
        maps: what counts as a vector in a convolutional network: ``flatten``, the whole feature map
            of an image, as in Godey et al. (2024, sec. 3.2), or ``positions``, the features at one
            position of the map.
        intervention: changes inside the model: a tuple of :class:`Replace`, from the argument of
            ``measure``.
        chat_template: the template of conversations, in place of the tokenizer's.
        max_length: the number of tokens of a text that are read at once, special tokens included,
            in place of the model's own limit; None for that one. A model that computes positions,
            such as a rotary one, may read more than it was trained on.
        tokens: ``all``, or a limit such as ``norm<10x``: only tokens whose hidden vector is shorter
            than 10 times the median norm of its layer, which is that of ``token_norms``, accurate
            to 1.1 %. The queries, keys and values of a token count in a layer if the input of that
            layer does. All tokens take part as keys.

    Raises:
        AnalysisError: a value that is not allowed.
    """

    special_tokens: bool = True
    long_texts: str = "cut"
    tokens_per_batch: int = 2048
    maps: str = "flatten"
    intervention: object = ()
    tokens: str = "all"
    chat_template: str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        require_choice("long_texts", self.long_texts, ("cut", "window"))
        require_choice("maps", self.maps, ("flatten", "positions"))
        require_flag("special_tokens", self.special_tokens)
        object.__setattr__(self, "intervention", interventions(self.intervention))
        if self.chat_template is not None:
            require_text(
                "chat_template", self.chat_template, "a template in Jinja, or leave it out"
            )
        tokens_wanted = "all, or a multiple of the median norm as in 'norm<10x'"
        require_text("tokens", self.tokens, tokens_wanted)
        if self.tokens != "all" and not (self.norms_below or 0) > 0:
            raise AnalysisError(f"tokens is {shown(self.tokens)}: give {tokens_wanted}")
        object.__setattr__(
            self, "tokens_per_batch", require_whole("tokens_per_batch", self.tokens_per_batch, 1)
        )
        if self.max_length is not None:
            longest = require_whole("max_length", self.max_length, 1)
            object.__setattr__(self, "max_length", longest)

    def described(self) -> dict[str, object]:
        """The settings by name, as ``run.json`` has them: what may be given, only if it is."""
        settings = asdict(self)
        for name in ("chat_template", "max_length"):
            if settings[name] is None:
                del settings[name]
        return settings

    @property
    def norms_below(self) -> float | None:
        """The multiple of the median norm below which tokens count; None if all count."""
        multiple = re.fullmatch(r"norm<([0-9]+\.?[0-9]*|\.[0-9]+)x", self.tokens)
        return float(multiple[1]) if multiple else None


@dataclass
class Reading:
    """Counts of the items of a corpus as they were read.

    Attributes:
        utterances: sequences that went through the model; each window is one.
        empty: texts without a token, which are left out.
        cut: items longer than the model's limit, of which only the beginning was read.
        windowed: items longer than the model's limit that were read in windows.
        unknown: tokens that stand for unknown words or characters.
        spelt: special tokens that are spelt out in a text, and are tokens of that text.
        doubled: texts that begin with the token that the tokenizer puts before them anyway.
        without_text: sounds without a text for the decoder.
        unanswered: conversations whose last message is not the assistant's.
        halved: parts of the corpus whose batches did not fit the memory, and were made smaller.
    """

    utterances: int = 0
    empty: int = 0
    cut: int = 0
    windowed: int = 0
    unknown: int = 0
    spelt: int = 0
    doubled: int = 0
    without_text: int = 0
    unanswered: int = 0
    halved: int = 0

    def split(self, length: int, limit: int, windows: bool) -> list[slice]:
        """The parts of an item to read: all of it if it fits; else its beginning, or every window.

        The item is counted as cut or windowed.
        """
        parts = [slice(start, start + limit) for start in range(0, max(length, 1), limit)]
        if len(parts) == 1:
            return parts
        if windows:
            self.windowed += 1
            return parts
        self.cut += 1
        return parts[:1]


def refuse_untaken(loaded: LoadedModel, inputs: Iterable[str]) -> None:
    """Raise an AnalysisError if the model has no argument for one of the inputs."""
    # Like transformers.Trainer, a pass leaves out what a head does not accept.
    taken = parameters_of(loaded.model)
    if takes_all(taken):
        return
    for name in inputs:
        if name not in taken and name not in parameters_of(loaded.outer):
            raise AnalysisError(
                f"{loaded.name}: its {type(loaded.processor).__name__} gives {name}, which a "
                f"{type(loaded.model).__name__} does not take: give the one that belongs to it"
            )


def _bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(eq=False)
class Batch:
    """Utterances that go through the model at once.

    Attributes:
        inputs: the arguments of the model, by name.
        groups: the jackknife group of each utterance.
        special_tokens: see :class:`Settings`.
        type_names: the types that tokens of the corpus can have, see ``Corpus.token_types``.
        tokens: the tokens of texts; those of images and sounds are known only inside the model.
        shifted: the decoder's input in an encoder-decoder: the same text, one token later.
        lengths: the length of each sound, in samples.
        steps: for sounds that a processor has padded to one length, the sample where each vector
            begins.
    """

    inputs: dict[str, Tensor | bool]
    groups: tuple[int, ...]
    special_tokens: bool = True
    tokens: Tokens | None = None
    shifted: Tokens | None = None
    lengths: Int[Tensor, " utterance"] | None = None
    steps: Steps | None = None
    type_names: tuple[str, ...] = TOKEN_TYPES

    @classmethod
    def stacked(
        cls,
        loaded: LoadedModel,
        prepared: Sequence[Mapping[str, Tensor]],
        groups: Sequence[int],
        settings: Settings,
        lengths: Sequence[int] | None = None,
        steps: Steps | None = None,
    ) -> "Batch":
        """A batch of images or sounds of one shape, from the outputs of their processor.

        Raises:
            AnalysisError: the model has no argument for one of the outputs.
        """
        inputs = {}
        for name in prepared[0]:
            values = torch.cat([item[name] for item in prepared])
            inputs[name] = placed(values, loaded.model)
        refuse_untaken(loaded, inputs)
        lengths = None if lengths is None else torch.tensor(lengths, device=loaded.device)
        return cls(inputs, tuple(groups), settings.special_tokens, lengths=lengths, steps=steps)

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return next(value.device for value in self.inputs.values() if isinstance(value, Tensor))

    @cached_property
    def checksum(self) -> int:
        """A number that stands for the texts, as part of the seed of random draws."""
        parts = (value for _, value in sorted(self.inputs.items()) if isinstance(value, Tensor))
        return functools.reduce(lambda sum, p: zlib.crc32(_bytes(p), sum), parts, 0)

    def unpadded(self, count: int, leading: Sequence[str] = (), sequences: int = 1) -> Tokens:
        """Tokens of utterances that all have ``count`` tokens.

        See :func:`~analysis_lib.capture.tokens.unpadded`.

        Args:
            sequences: the number of sequences of each utterance.
        """
        groups = tuple(group for group in self.groups for _ in range(sequences))
        tokens = unpadded(groups, count, leading, self.special_tokens, self.type_names)
        return tokens.on(self.device)

    def beginning(self, tokens: int) -> "Batch":
        """The first tokens of each text; the same batch if its inputs cannot be cut by themselves.

        Texts must begin where the batch does, and be nothing but tokens.
        """
        texts = self.tokens
        cuttable = {"input_ids", "attention_mask", "token_type_ids", "use_cache"}
        if texts is None or self.shifted is not None or not self.inputs.keys() <= cuttable:
            return self
        shapes = {value.shape for value in self.inputs.values() if isinstance(value, Tensor)}
        if shapes != {texts.mask.shape} or not texts.mask[:, 0].all():
            return self
        inputs = dict(self.inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = value[:, :tokens]
        return replace(self, inputs=inputs, tokens=texts.head(len(texts.mask), tokens))

    def head(self, utterances: int) -> "Batch":
        """The first ``utterances`` utterances of the batch."""
        if utterances >= len(self.groups):
            return self
        inputs = {n: v[:utterances] if isinstance(v, Tensor) else v for n, v in self.inputs.items()}
        tokens, shifted = (part and part.head(utterances) for part in (self.tokens, self.shifted))
        lengths = None if self.lengths is None else self.lengths[:utterances]
        return replace(
            self,
            inputs=inputs,
            groups=self.groups[:utterances],
            tokens=tokens,
            shifted=shifted,
            lengths=lengths,
        )
