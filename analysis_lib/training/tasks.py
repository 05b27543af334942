"""What the models of the recipes learn: data, inputs with labels, and a score on held-out data."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional

from analysis_lib import corpora
from analysis_lib.corpora import load_corpus, speech
from analysis_lib.corpora.speech import RATE, WORDS, spoken_digits
from analysis_lib.metrics.intervals import ratio_interval, wilson

IGNORED = -100
PREDICTED = 0.15
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class HeldOutScore:
    """How well a model does on held-out data.

    Attributes:
        metric: ``accuracy`` (share of items), ``bits_per_byte`` of a text or ``bits_per_masked_token``.
        value: the score; ci_low and ci_high bound its 95 % interval over items.
        items: number of images, words or sentences.
        baseline: the score of always predicting the most frequent class, or the frequencies of single tokens.
    """

    metric: str
    value: float
    ci_low: float
    ci_high: float
    items: int
    baseline: float


class Task(ABC):
    """Training data as a model reads it, and the score on held-out data.

    Attributes:
        head: the transformers class that builds the model with its head from a configuration.
        sizes: the part of the configuration that the data decide.
        preprocessor: the tokenizer, image processor or feature extractor that is saved with the model.
        lengths: of each training item, in the unit that decides the cost of a batch.
    """

    head: type
    sizes: dict
    preprocessor: object
    lengths: Int[Tensor, " item"]

    @staticmethod
    @abstractmethod
    def data_identity() -> str:
        """A short text that changes when the data would. Neither reads nor makes them."""

    @abstractmethod
    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        """The inputs of the model for these training items, labels included."""

    @abstractmethod
    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        """The score of a model in evaluation mode."""

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of about ``size`` items of similar length, epoch after epoch, each in a new order."""
        while True:
            chunks = []
            for pool in torch.randperm(len(self.lengths)).split(32 * size):
                like = pool[self.lengths[pool].argsort(stable=True)]
                # Even parts: a last batch of one image would upset batch normalisation.
                chunks += like.tensor_split(math.ceil(len(like) / size))
            for i in torch.randperm(len(chunks)):
                yield self.inputs(chunks[i])


# --- Classes --------------------------------------------------------------------------------------


def _accuracy(right: Tensor, labels: Tensor) -> HeldOutScore:
    correct, items = int(right.sum()), len(labels)
    low, high = wilson(correct, items)
    return HeldOutScore("accuracy", correct / items, low, high, items, int(labels.bincount().max()) / items)


def _evaluation(items: int) -> Iterator[Tensor]:
    return iter(torch.arange(items).split(EVALUATION_BATCH))


class Digits(Task):
    """Which digit an image of scikit-learn's handwritten digits shows.

    The 8x8 pixels are scaled up to 32x32, so that networks whose first layers divide height and width by four
    (ResNet, ConvNeXt) begin with maps of 8x8. In training every image is turned, scaled and shifted a little.
    """

    head = transformers.AutoModelForImageClassification
    SIDE = 32
    TURN, SCALE, SHIFT = math.radians(10), 0.1, 0.125  # at most; the shift in half sides

    def __init__(self) -> None:
        self.preprocessor = transformers.ViTImageProcessorPil(
            size={"height": self.SIDE, "width": self.SIDE}, image_mean=[0.5], image_std=[0.5]
        )
        self.images, self.labels = self._read("digits:train")
        self.test_images, self.test_labels = self._read("digits:test")
        self.lengths = torch.ones(len(self.labels))
        self.sizes = {"num_labels": int(self.labels.max()) + 1, "num_channels": 1}

    @staticmethod
    def data_identity() -> str:
        return corpora.data_identity("digits:train")

    def _read(self, spec: str) -> tuple[Tensor, Tensor]:
        corpus = load_corpus(spec)
        images = [image.load() for image in corpus.items]
        pixels = torch.cat([self.preprocessor(image, return_tensors="pt")["pixel_values"] for image in images])
        return pixels, torch.tensor(corpus.labels)

    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        def uniform(bound: float) -> Tensor:
            return (2 * torch.rand(len(items)) - 1) * bound

        turn, scale = uniform(self.TURN), 1 + uniform(self.SCALE)
        cos, sin = scale * turn.cos(), scale * turn.sin()
        rows = [torch.stack([cos, -sin, uniform(self.SHIFT)], 1), torch.stack([sin, cos, uniform(self.SHIFT)], 1)]
        images = self.images[items]
        grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        moved = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
        return {"pixel_values": moved, "labels": self.labels[items]}

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        guesses = [model(self.test_images[part]).logits.argmax(1) for part in _evaluation(len(self.test_labels))]
        return _accuracy(torch.cat(guesses) == self.test_labels, self.test_labels)


class SpokenDigits(Task):
    """Which digit a synthetic voice says. The voices of the test are not heard in training."""

    head = transformers.AutoModelForAudioClassification

    def __init__(self) -> None:
        self.preprocessor = transformers.Wav2Vec2FeatureExtractor(
            sampling_rate=RATE, do_normalize=True, return_attention_mask=True
        )
        self.train, self.test = spoken_digits("train"), spoken_digits("test")
        self.lengths = torch.tensor([len(samples) for samples, _, _ in self.train])
        self.sizes = {"num_labels": len(WORDS)}

    @staticmethod
    def data_identity() -> str:
        return speech.digits_identity()

    def _inputs(self, words: Sequence[tuple[np.ndarray, int, int]]) -> dict[str, Tensor]:
        sounds = [samples for samples, _, _ in words]
        inputs = self.preprocessor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt")
        return {**inputs, "labels": torch.tensor([label for _, _, label in words])}

    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        return self._inputs([self.train[i] for i in items])

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        right, labels = [], []
        for part in _evaluation(len(self.test)):
            inputs = self._inputs([self.test[i] for i in part])
            labels.append(inputs.pop("labels"))
            right.append(model(**inputs).logits.argmax(1) == labels[-1])
        return _accuracy(torch.cat(right), torch.cat(labels))


# --- Text -----------------------------------------------------------------------------------------


def byte_pairs(
    sentences: Sequence[str], vocabulary: int, special: dict[str, str], frame: str
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of byte pairs learned from the sentences.

    Not of word pieces, since the ones that tokenizers' trainer finds change from run to run (its issue 1794).

    Args:
        special: the special tokens by their role, such as ``pad`` or ``mask``. They come first in the vocabulary.
        frame: where they stand around a sentence, which is ``$A``.
    """
    names = list(dict.fromkeys(special.values()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[(token, tokenizer.token_to_id(token)) for token in names]
    )
    parts = {f"{part}_token": token for part, token in special.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **parts)


def padded(sequences: Sequence[Int[Tensor, " token"]], pad: int) -> dict[str, Tensor]:
    """The inputs of a model: token ids of one length, and a mask that is 0 at padding.

    Args:
        pad: the id of padding.
    """
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()}


def mask_tokens(
    ids: Int[Tensor, "sequence token"], special: int, vocabulary: int, mask: int
) -> tuple[Int[Tensor, "sequence token"], Int[Tensor, "sequence token"]]:
    """The inputs and labels of masked language modelling, drawn from torch's random numbers.

    As in BERT (Devlin et al. 2019, sec. 3.1), 15 % of the tokens are predicted: 80 % of these are masked, 10 % are
    replaced by a random token and 10 % stay.

    Args:
        special: number of special tokens, which come first in the vocabulary and are never predicted.
        vocabulary: number of tokens.
        mask: the id of the mask.

    Returns:
        The ids that the model reads, and the labels: ``IGNORED`` where nothing is predicted.
    """
    words = ids >= special
    draws = torch.rand(ids.shape)
    labels = ids.masked_fill(~words | (draws >= PREDICTED), IGNORED)
    other = torch.randint(special, vocabulary, ids.shape)
    read = torch.where(words & (draws < 0.8 * PREDICTED), mask, ids)
    read = torch.where(words & (draws >= 0.9 * PREDICTED) & (draws < PREDICTED), other, read)
    return read, labels


class Sentences(Task):
    """Sentences of Wikipedia, each a sequence of its own.

    The last 50 of every 2,000 sentences are held out: in a row, so that few share a paragraph with training. Sentences
    of more than 256 bytes are left out, whatever the vocabulary.

    Args:
        vocabulary: number of tokens. With 256 and the special tokens, every token is a byte.
    """

    LONGEST, STRETCH, HELD_OUT = 256, 2000, 50
    # The special tokens, where they stand around a sentence, and how many positions ahead a token is predicted.
    special: ClassVar[dict[str, str]]
    frame: str
    ahead = 0

    def __init__(self, vocabulary: int) -> None:
        corpus = load_corpus("wikipedia:sentences").texts
        sentences = [text for text in corpus if len(text.encode()) <= self.LONGEST]
        held_out = np.arange(len(sentences)) % self.STRETCH >= self.STRETCH - self.HELD_OUT
        train, test = ([sentences[i] for i in np.flatnonzero(chosen)] for chosen in (~held_out, held_out))
        self.preprocessor = byte_pairs(train, vocabulary, self.special, self.frame)
        self.train, self.test = (
            [torch.tensor(ids) for ids in self.preprocessor(s)["input_ids"]] for s in (train, test)
        )
        self.test_bytes = np.array([float(len(text.encode())) for text in test])
        self.lengths = torch.tensor([len(ids) for ids in self.train])
        self.sizes = {
            "vocab_size": len(self.preprocessor),
            # No more than are trained: the embedding of a later position would stay random.
            "max_position_embeddings": int(self.lengths.max()),
            **{f"{name}_token_id": getattr(self.preprocessor, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        }
        counts = torch.cat(self.train).bincount(minlength=len(self.preprocessor)) + 1
        counts[: len(set(self.special.values()))] = 0  # They are never predicted.
        self.unigrams = -(counts / counts.sum()).log2()

    @staticmethod
    def data_identity() -> str:
        return corpora.data_identity("wikipedia:sentences")

    @abstractmethod
    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        """The model's inputs, with labels that are ``IGNORED`` where nothing is predicted."""

    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        return self.make_inputs([self.train[i] for i in items])

    def bits(self, model: transformers.PreTrainedModel) -> Float[np.ndarray, "measure sentence"]:
        """For each held-out sentence: bits of the model, bits of the unigrams, number of predicted tokens."""
        rows = []
        # By length, so that there is little padding; put back in order at the end.
        order = torch.tensor([len(ids) for ids in self.test]).argsort(stable=True)
        with torch.random.fork_rng(devices=[]):
            # The same masks every time.
            torch.default_generator.manual_seed(0)
            for part in order.split(EVALUATION_BATCH):
                inputs = self.make_inputs([self.test[i] for i in part])
                labels = inputs.pop("labels")
                rows.append(self._bits(model(**inputs).logits, labels))
        return torch.cat(rows, 1)[:, order.argsort()].numpy()

    def _bits(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits[:, : logits.shape[1] - self.ahead], labels[:, self.ahead :]
        predicted = labels != IGNORED
        nats = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        unigrams = self.unigrams[labels.clamp(min=0)].where(predicted, 0)
        return torch.stack([nats.double().sum(1) / math.log(2), unigrams.double().sum(1), predicted.double().sum(1)])


def _per_unit(metric: str, bits: np.ndarray, unigrams: np.ndarray, units: np.ndarray) -> HeldOutScore:
    value, low, high = ratio_interval(bits, units)
    return HeldOutScore(metric, value, low, high, len(bits), float(unigrams.sum() / units.sum()))


class NextToken(Sentences):
    """Each token from those before it."""

    head = transformers.AutoModelForCausalLM
    ahead = 1
    special: ClassVar = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}
    frame = "<|endoftext|> $A"

    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(sentences, self.preprocessor.pad_token_id)
        return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)}

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        bits, unigrams, _ = self.bits(model)
        return _per_unit("bits_per_byte", bits, unigrams, self.test_bytes)


class MaskedTokens(Sentences):
    """Masked tokens from those around them, see :func:`mask_tokens`."""

    head = transformers.AutoModelForMaskedLM
    special: ClassVar = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    frame = "[CLS] $A [SEP]"

    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(sentences, self.preprocessor.pad_token_id)
        ids = inputs["input_ids"]
        ids, labels = mask_tokens(ids, len(self.special), len(self.preprocessor), self.preprocessor.mask_token_id)
        return {**inputs, "input_ids": ids, "labels": labels}

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        bits, unigrams, predicted = self.bits(model)
        return _per_unit("bits_per_masked_token", bits, unigrams, predicted)
