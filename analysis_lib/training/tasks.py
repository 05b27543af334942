"""What the models of the recipes learn: data, inputs with labels, and a score on data held out."""

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

from analysis_lib.corpora.loading import load_corpus
from analysis_lib.corpora.speech import RATE, WORDS, spoken_digits
from analysis_lib.metrics.intervals import ratio_interval, wilson

IGNORED = -100
PREDICTED = 0.15
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Score:
    """How well a model does on data held out.

    Attributes:
        metric: ``accuracy`` (share of items), ``bits_per_byte`` of a text or ``bits_per_masked_token``.
        value: its value; ci_low and ci_high bound the 95 % interval over items.
        items: how many images, words or sentences it is over.
        baseline: of a model that always gives the most frequent class, or the frequencies of single tokens.
    """

    metric: str
    value: float
    ci_low: float
    ci_high: float
    items: int
    baseline: float


class Task(ABC):
    """Training data as a model reads it, and the score on the data held out.

    Attributes:
        head: the transformers class that builds the model with its head from a configuration.
        sizes: what the data decide of the configuration.
        preprocessor: the tokenizer, image processor or feature extractor that is saved beside the model.
        lengths: of each training item, in whatever unit decides the cost of a batch.
    """

    head: type
    sizes: dict
    preprocessor: object
    lengths: Int[Tensor, " item"]

    @abstractmethod
    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        """What the model is called with for these training items, labels among it."""

    @abstractmethod
    def score(self, model: transformers.PreTrainedModel) -> Score:
        """Of a model in evaluation mode."""

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of about ``size`` items of like length, epoch after epoch, each in an order of its own."""
        while True:
            chunks = []
            for pool in torch.randperm(len(self.lengths)).split(32 * size):
                like = pool[self.lengths[pool].argsort(stable=True)]
                # Even parts: a last batch of one image would upset batch normalisation.
                chunks += like.tensor_split(math.ceil(len(like) / size))
            for i in torch.randperm(len(chunks)):
                yield self.inputs(chunks[i])


# --- Classes --------------------------------------------------------------------------------------


def _accuracy(right: Tensor, labels: Tensor) -> Score:
    correct, items = int(right.sum()), len(labels)
    low, high = wilson(correct, items)
    return Score("accuracy", correct / items, low, high, items, int(labels.bincount().max()) / items)


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

    def score(self, model: transformers.PreTrainedModel) -> Score:
        guesses = [model(self.test_images[part]).logits.argmax(1) for part in _evaluation(len(self.test_labels))]
        return _accuracy(torch.cat(guesses) == self.test_labels, self.test_labels)


class SpokenDigits(Task):
    """Which digit a synthetic voice says; the voices of the test are never heard in training."""

    head = transformers.AutoModelForAudioClassification

    def __init__(self) -> None:
        self.preprocessor = transformers.Wav2Vec2FeatureExtractor(
            sampling_rate=RATE, do_normalize=True, return_attention_mask=True
        )
        self.train, self.test = spoken_digits("train"), spoken_digits("test")
        self.lengths = torch.tensor([len(samples) for samples, _, _ in self.train])
        self.sizes = {"num_labels": len(WORDS)}

    def _inputs(self, words: Sequence[tuple[np.ndarray, int, int]]) -> dict[str, Tensor]:
        sounds = [samples for samples, _, _ in words]
        padded = self.preprocessor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt")
        return {**padded, "labels": torch.tensor([label for _, _, label in words])}

    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        return self._inputs([self.train[i] for i in items])

    def score(self, model: transformers.PreTrainedModel) -> Score:
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

    Not of word pieces: which ones tokenizers' trainer finds changes from run to run (its issue 1794).

    Args:
        special: the special tokens by their part, as ``pad`` or ``mask``; they come first in the vocabulary.
        frame: where they stand in a sentence, which is ``$A``.
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
    """Token ids of one length, and where they are no padding: what a model is called with.

    Args:
        pad: the id of padding.
    """
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()}


def mask_tokens(
    ids: Int[Tensor, "sequence token"], special: int, vocabulary: int, mask: int
) -> tuple[Int[Tensor, "sequence token"], Int[Tensor, "sequence token"]]:
    """What masked language modelling reads and what it predicts, drawn from torch's random numbers.

    As in BERT (Devlin et al. 2019, sec. 3.1): 15 % of the tokens are predicted, of which 80 % are masked, 10 % are
    other tokens and 10 % stay.

    Args:
        special: how many special tokens there are; they come first in the vocabulary and are never predicted.
        vocabulary: how many tokens there are.
        mask: the id of the mask.

    Returns:
        The ids as the model reads them, and the labels: ``IGNORED`` where nothing is predicted.
    """
    words = ids >= special
    draws = torch.rand(ids.shape)
    labels = ids.masked_fill(~words | (draws >= PREDICTED), IGNORED)
    other = torch.randint(special, vocabulary, ids.shape)
    read = torch.where(words & (draws < 0.8 * PREDICTED), mask, ids)
    read = torch.where(words & (draws >= 0.9 * PREDICTED) & (draws < PREDICTED), other, read)
    return read, labels


class Sentences(Task):
    """Sentences of Wikipedia, each a sequence of its own: the next token, or those that are masked.

    Of every 2,000 sentences the last 50 are held out, in a row so that few share a paragraph with training.
    Sentences of more than 256 bytes are left out, the same for every vocabulary.

    Args:
        vocabulary: how many tokens there are; 256 beside the special ones are the bytes alone.
    """

    LONGEST, STRETCH, HELD_OUT = 256, 2000, 50
    # Its special tokens, where they stand in a sentence, and how far beyond its position a token is predicted.
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
            # No more than have been seen: the embedding of a later position would stay random.
            "max_position_embeddings": int(self.lengths.max()),
            **{f"{name}_token_id": getattr(self.preprocessor, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        }
        counts = torch.cat(self.train).bincount(minlength=len(self.preprocessor)) + 1
        counts[: len(set(self.special.values()))] = 0  # They are never predicted.
        self.unigrams = -(counts / counts.sum()).log2()

    @abstractmethod
    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        """The model's inputs; the labels are ``IGNORED`` where nothing is predicted."""

    def inputs(self, items: Int[Tensor, " item"]) -> dict[str, Tensor]:
        return self.make_inputs([self.train[i] for i in items])

    def bits(self, model: transformers.PreTrainedModel) -> Float[np.ndarray, "measure sentence"]:
        """Of each held-out sentence: bits of the model, bits of the unigrams, tokens predicted."""
        rows = []
        # By length, so that little is padding; put back in order at the end.
        order = torch.tensor([len(ids) for ids in self.test]).argsort(stable=True)
        with torch.random.fork_rng(devices=[]):
            # The same masks whenever the score is taken.
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


class NextToken(Sentences):
    """Each token from those before it."""

    head = transformers.AutoModelForCausalLM
    ahead = 1
    special: ClassVar = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}
    frame = "<|endoftext|> $A"

    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(sentences, self.preprocessor.pad_token_id)
        return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)}

    def score(self, model: transformers.PreTrainedModel) -> Score:
        bits, unigrams, _ = self.bits(model)
        value, low, high = ratio_interval(bits, self.test_bytes)
        return Score("bits_per_byte", value, low, high, len(bits), float(unigrams.sum() / self.test_bytes.sum()))


class MaskedTokens(Sentences):
    """Masked tokens from those around them.

    As in BERT, see :func:`mask_tokens`.
    """

    head = transformers.AutoModelForMaskedLM
    special: ClassVar = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    frame = "[CLS] $A [SEP]"

    def make_inputs(self, sentences: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(sentences, self.preprocessor.pad_token_id)
        ids = inputs["input_ids"]
        ids, labels = mask_tokens(ids, len(self.special), len(self.preprocessor), self.preprocessor.mask_token_id)
        return {**inputs, "input_ids": ids, "labels": labels}

    def score(self, model: transformers.PreTrainedModel) -> Score:
        bits, unigrams, predicted = self.bits(model)
        value, low, high = ratio_interval(bits, predicted)
        return Score("bits_per_masked_token", value, low, high, len(bits), float(unigrams.sum() / predicted.sum()))
