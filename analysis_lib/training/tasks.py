"""What the models of the recipes learn: data, inputs with labels, and a score on held-out data."""

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
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
from analysis_lib.corpora import load_corpus
from analysis_lib.metrics.intervals import ratio_interval, wilson

IGNORED = -100
PREDICTED = 0.15
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class HeldOutScore:
    """How well a model does on held-out images, words or sentences, with its 95 % interval over these items."""

    metric: str  # ``accuracy`` (share of items), ``bits_per_byte`` of a text or ``bits_per_masked_token``
    value: float
    ci_low: float
    ci_high: float
    items: int
    baseline: float  # the score of always predicting the most frequent class, or the frequencies of single tokens


class Task(ABC):
    """Training data as a model reads it, and the score on held-out data."""

    data: ClassVar[str]  # the corpus to train on, as ``load_corpus`` takes it
    head: ClassVar[type]  # the transformers class that builds the model with its head from a configuration
    sizes: dict  # the part of the configuration that the data decide
    preprocessor: object  # the tokenizer, image processor or feature extractor that is saved with the model
    train: list
    test: list  # held out
    lengths: Int[Tensor, " example"]  # of each training example, in the unit that decides the cost of a batch

    @classmethod
    def data_identity(cls) -> str:
        """A short text that changes when the data would. Neither reads nor makes them."""
        return corpora.data_identity(cls.data)

    @abstractmethod
    def inputs(self, examples: Sequence) -> dict[str, Tensor]:
        """The inputs of the model for these examples, labels included."""

    @abstractmethod
    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        """The score of the model on the held-out examples."""

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of about ``size`` examples of similar length, epoch after epoch, each in a new order."""
        while True:
            chunks = []
            for pool in torch.randperm(len(self.lengths)).split(32 * size):
                like = pool[self.lengths[pool].argsort(stable=True)]
                # Even parts: a last batch of one image would upset batch normalisation.
                chunks += like.tensor_split(math.ceil(len(like) / size))
            for i in torch.randperm(len(chunks)):
                yield self.inputs([self.train[example] for example in chunks[i]])

    @torch.inference_mode()
    def predictions(self, model: transformers.PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of the held-out examples, batch by batch. Leaves the model in evaluation mode."""
        model.eval()
        for start in range(0, len(self.test), EVALUATION_BATCH):
            inputs = self.inputs(self.test[start : start + EVALUATION_BATCH])
            labels = inputs.pop("labels")
            yield model(**inputs).logits, labels


# --- Classes --------------------------------------------------------------------------------------


class Classes(Task):
    """Which class an example has. Examples are pairs of what ``read`` keeps of an item of the corpus, and a class."""

    held_out: ClassVar[str]

    def __init__(self) -> None:
        self.train, self.test = (
            [(self.read(item), label) for item, label in zip(corpus.items, corpus.labels, strict=True)]
            for corpus in (load_corpus(self.data), load_corpus(self.held_out))
        )
        self.lengths = torch.tensor([len(content) for content, _ in self.train])

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        correct = sum(int((logits.argmax(1) == labels).sum()) for logits, labels in self.predictions(model))
        most, items = Counter(label for _, label in self.test).most_common(1)[0][1], len(self.test)
        return HeldOutScore("accuracy", correct / items, *wilson(correct, items), items, most / items)


class Digits(Classes):
    """Which digit an image of scikit-learn's handwritten digits shows.

    The 8x8 pixels are scaled up to 32x32, so that networks whose first layers divide height and width by four
    (ResNet, ConvNeXt) begin with maps of 8x8. In training every image is turned, scaled and shifted a little.
    """

    data, held_out = "digits:train", "digits:test"
    head = transformers.AutoModelForImageClassification
    sizes: ClassVar = {"num_labels": 10, "num_channels": 1}
    SIDE = 32
    TURN, SCALE, SHIFT = math.radians(10), 0.1, 0.125  # at most; the shift in half sides

    def __init__(self) -> None:
        side = {"height": self.SIDE, "width": self.SIDE}
        self.preprocessor = transformers.ViTImageProcessorPil(size=side, image_mean=[0.5], image_std=[0.5])
        super().__init__()

    def read(self, item: object) -> Float[Tensor, "channel side side"]:
        return self.preprocessor(item.load(), return_tensors="pt")["pixel_values"][0]

    def inputs(self, examples: Sequence) -> dict[str, Tensor]:
        images, labels = zip(*examples, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for inputs in super().batches(size):
            yield {**inputs, "pixel_values": self._moved(inputs["pixel_values"])}

    def _moved(self, images: Float[Tensor, "image channel side side"]) -> Float[Tensor, "image channel side side"]:
        def uniform(bound: float) -> Tensor:
            return (2 * torch.rand(len(images)) - 1) * bound

        turn, scale = uniform(self.TURN), 1 + uniform(self.SCALE)
        cos, sin = scale * turn.cos(), scale * turn.sin()
        rows = [torch.stack([cos, -sin, uniform(self.SHIFT)], 1), torch.stack([sin, cos, uniform(self.SHIFT)], 1)]
        grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


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
    """The inputs of a model: token ids of one length, ``pad`` after their end, and a mask that is 0 there."""
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

    data = "wikipedia:sentences"
    LONGEST, STRETCH, HELD_OUT = 256, 2000, 50
    # Where special tokens stand around a sentence, and how many positions ahead a token is predicted.
    special: ClassVar[dict[str, str]]
    frame: ClassVar[str]
    ahead = 0
    metric: ClassVar[str]

    def __init__(self, vocabulary: int) -> None:
        sentences = [text for text in load_corpus(self.data).texts if len(text.encode()) <= self.LONGEST]
        held_out = np.arange(len(sentences)) % self.STRETCH >= self.STRETCH - self.HELD_OUT
        train, test = (list(itertools.compress(sentences, chosen)) for chosen in (~held_out, held_out))
        self.preprocessor = byte_pairs(train, vocabulary, self.special, self.frame)
        self.train, self.test = (
            [torch.tensor(ids) for ids in self.preprocessor(s)["input_ids"]] for s in (train, test)
        )
        # By length, so that there is little padding.
        pairs = sorted(zip(self.test, test, strict=True), key=lambda pair: len(pair[0]))
        self.test = [ids for ids, _ in pairs]
        self.test_bytes = np.array([float(len(text.encode())) for _, text in pairs])
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

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        with torch.random.fork_rng(devices=[]):
            # The same masks every time.
            torch.default_generator.manual_seed(0)
            found = torch.cat([self._bits(*batch) for batch in self.predictions(model)], 1)
        bits, unigrams, predicted = found.numpy()
        units = self.test_bytes if self.metric == "bits_per_byte" else predicted
        baseline = float(unigrams.sum() / units.sum())
        return HeldOutScore(self.metric, *ratio_interval(bits, units), len(bits), baseline)

    def _bits(self, logits: Tensor, labels: Tensor) -> Float[Tensor, "measure sentence"]:
        """For each sentence: bits of the model, bits of the unigrams, number of predicted tokens."""
        logits, labels = logits[:, : logits.shape[1] - self.ahead], labels[:, self.ahead :]
        predicted = labels != IGNORED
        nats = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        unigrams = self.unigrams[labels.clamp(min=0)].where(predicted, 0)
        return torch.stack([nats.double().sum(1) / math.log(2), unigrams.double().sum(1), predicted.double().sum(1)])


class NextToken(Sentences):
    """Each token from those before it."""

    head = transformers.AutoModelForCausalLM
    ahead = 1
    metric = "bits_per_byte"
    special: ClassVar = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}
    frame = "<|endoftext|> $A"

    def inputs(self, examples: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(examples, self.preprocessor.pad_token_id)
        return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)}


class MaskedTokens(Sentences):
    """Masked tokens from those around them, see :func:`mask_tokens`."""

    head = transformers.AutoModelForMaskedLM
    metric = "bits_per_masked_token"
    special: ClassVar = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    frame = "[CLS] $A [SEP]"

    def inputs(self, examples: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded(examples, self.preprocessor.pad_token_id)
        ids = inputs["input_ids"]
        ids, labels = mask_tokens(ids, len(self.special), len(self.preprocessor), self.preprocessor.mask_token_id)
        return {**inputs, "input_ids": ids, "labels": labels}
