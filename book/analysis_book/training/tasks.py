"""Tasks of the small models: data, inputs with labels, and a score on held-out data."""

import dataclasses
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional

from analysis_book.training import loop
from analysis_book.training.settings import RECORD, Recipe, versions
from analysis_lib.corpora import Corpus, load_corpus
from analysis_lib.metrics.intervals import ratio, share
from analysis_lib.models.tokenization import padded
from analysis_lib.progress import bar

IGNORED = -100
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class HeldOutScore:
    """The score of a model on held-out images or sentences, with its 95 % interval over these."""

    metric: str  # ``accuracy`` (share of items) or ``bits_per_byte``
    value: float
    ci_low: float
    ci_high: float
    items: int
    # The score of always predicting the most frequent class, or the frequencies of single tokens.
    baseline: float


class Task(ABC):
    """Training data as a model reads it, and the score on held-out data."""

    # The class of transformers that builds the model with its head from a configuration.
    head: ClassVar[type]
    # The part of the configuration that the data decide.
    sizes: dict
    # The tokenizer or image processor that is saved with the model.
    preprocessor: object
    train: list
    # Held out.
    test: list
    # Of each training example, in the unit that decides the cost of a batch.
    lengths: Int[Tensor, " example"]

    @abstractmethod
    def inputs(self, examples: Sequence) -> dict[str, Tensor]:
        """The inputs of the model for these examples, labels included."""

    @abstractmethod
    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        """The score of the model on the held-out examples."""

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of about ``size`` examples of similar length, each epoch in a new order."""
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
        """Logits and labels of the held-out examples, batch by batch.

        It leaves the model in evaluation mode.
        """
        model.eval()
        for start in range(0, len(self.test), EVALUATION_BATCH):
            inputs = self.inputs(self.test[start : start + EVALUATION_BATCH])
            labels = inputs.pop("labels")
            yield model(**inputs).logits, labels


class Digits(Task):
    """The digit that an image of scikit-learn's handwritten digits shows.

    The 8x8 pixels are scaled up to 32x32, so that networks whose first layers divide height and
    width by four (ResNet, ConvNeXt) begin with maps of 8x8. In training every image is turned,
    scaled and shifted a little.
    """

    HELD_OUT = "digits:test"
    head = transformers.AutoModelForImageClassification
    sizes: ClassVar = {"num_labels": 10, "num_channels": 1}
    SIDE = 32
    # At most; the shift in half sides.
    TURN = math.radians(10)
    SCALE = 0.1
    SHIFT = 0.125

    def __init__(self, data: str) -> None:
        side = {"height": self.SIDE, "width": self.SIDE}
        self.preprocessor = transformers.ViTImageProcessorPil(
            size=side, image_mean=[0.5], image_std=[0.5]
        )
        self.train = self._examples(data)
        self.test = self._examples(self.HELD_OUT)
        self.lengths = torch.ones(len(self.train), dtype=int)

    def _examples(self, data: str) -> list[tuple[Float[Tensor, "channel side side"], int]]:
        corpus = load_corpus(data)
        images = map(self._read, corpus.items)
        return list(zip(images, corpus.labels, strict=True))

    def _read(self, item: object) -> Float[Tensor, "channel side side"]:
        return self.preprocessor(item.load(), return_tensors="pt")["pixel_values"][0]

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        correct = 0
        for logits, labels in self.predictions(model):
            correct += int((logits.argmax(1) == labels).sum())
        counts = Counter(label for _, label in self.test)
        items = len(self.test)
        accuracy = share(correct, items)
        return HeldOutScore("accuracy", *accuracy.row, items, max(counts.values()) / items)

    def inputs(self, examples: Sequence) -> dict[str, Tensor]:
        images, labels = zip(*examples, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for inputs in super().batches(size):
            yield {**inputs, "pixel_values": self._moved(inputs["pixel_values"])}

    def _moved(
        self, images: Float[Tensor, "image channel side side"]
    ) -> Float[Tensor, "image channel side side"]:
        def uniform(bound: float) -> Tensor:
            return (2 * torch.rand(len(images)) - 1) * bound

        turn, scale = uniform(self.TURN), 1 + uniform(self.SCALE)
        cos, sin = scale * turn.cos(), scale * turn.sin()
        rows = [
            torch.stack([cos, -sin, uniform(self.SHIFT)], 1),
            torch.stack([sin, cos, uniform(self.SHIFT)], 1),
        ]
        grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


# Stands before every sentence, and is what the sentences of a batch are padded with.
BOUNDARY = "<|endoftext|>"


class NextToken(Task):
    """Each token of a sentence of Wikipedia from those before it.

    Every sentence is a sequence of its own. The last 50 of every 2,000 sentences are held out: in a
    row, so that few share a paragraph with training. Sentences of more than 256 bytes are left out,
    whatever the vocabulary.

    Args:
        data: the corpus to train on, as ``load_corpus`` takes it.
        vocabulary: number of tokens. With 257, every token is a byte, but for the boundary.
    """

    head = transformers.AutoModelForCausalLM
    LONGEST = 256
    STRETCH = 2000
    HELD_OUT = 50

    def __init__(self, data: str, vocabulary: int) -> None:
        sentences = [text for text in load_corpus(data).texts if len(text.encode()) <= self.LONGEST]
        held_out = np.arange(len(sentences)) % self.STRETCH >= self.STRETCH - self.HELD_OUT
        train = list(itertools.compress(sentences, ~held_out))
        test = list(itertools.compress(sentences, held_out))
        tokenizer = byte_pairs(train, vocabulary)
        self.preprocessor = tokenizer
        # So that there is little padding.
        test.sort(key=lambda text: len(tokenizer.tokenize(text)))
        self.train = [torch.tensor(ids) for ids in tokenizer(train)["input_ids"]]
        self.test = [torch.tensor(ids) for ids in tokenizer(test)["input_ids"]]
        self.test_bytes = np.array([float(len(text.encode())) for text in test])
        self.lengths = torch.tensor([len(ids) for ids in self.train])
        self.sizes = {
            "vocab_size": len(tokenizer),
            # No more than are trained: the embedding of a later position would stay random.
            "max_position_embeddings": int(self.lengths.max()),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }

    def inputs(self, examples: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs = padded([{"input_ids": ids} for ids in examples], self.preprocessor.pad_token_id)
        padding = inputs["attention_mask"] == 0
        return {**inputs, "labels": inputs["input_ids"].masked_fill(padding, IGNORED)}

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        nats = []
        for logits, labels in self.predictions(model):
            by_class = logits[:, :-1].transpose(1, 2)
            # Labels that are ignored, those of the padding, have a loss of 0.
            losses = functional.cross_entropy(by_class, labels[:, 1:], reduction="none")
            nats.append(losses.double().sum(1))
        bits = torch.cat(nats).numpy() / math.log(2)
        predicted = torch.cat([ids[1:] for ids in self.train])
        # One more of each, so that none is impossible.
        counts = predicted.bincount(minlength=len(self.preprocessor)) + 1
        counts[self.preprocessor.pad_token_id] = 0
        unigrams = -(counts / counts.sum()).log2().double()
        baseline = sum(unigrams[ids[1:]].sum().item() for ids in self.test) / self.test_bytes.sum()
        bits_per_byte = ratio(bits, self.test_bytes)
        return HeldOutScore("bits_per_byte", *bits_per_byte.row, len(bits), float(baseline))


def byte_pairs(sentences: Sequence[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of byte pairs learned from the sentences. The boundary is its first token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOUNDARY],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOUNDARY} $A", special_tokens=[(BOUNDARY, 0)]
    )
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), BOUNDARY)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


class Captions(Task):
    """What a picture of a handwritten digit shows, word by word: which digit, and where.

    The words, and two marks around them, are the whole vocabulary. The tokens of the picture stand
    before the caption, as LLaVA reads them.
    """

    HELD_OUT = "captioned-digits:test"
    head = transformers.AutoModelForImageTextToText
    SIDE = 32
    PATCH = 4

    def __init__(self, data: str) -> None:
        train = load_corpus(data)
        tokenizer = _word_tokenizer([item.text for item in train.items])
        side = {"height": self.SIDE, "width": self.SIDE}
        images = transformers.CLIPImageProcessorPil(
            size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        self.preprocessor = transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=self.PATCH,
            # The vector of [CLS] is left out.
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token=IMAGE,
        )
        self.sizes = {"image_token_index": tokenizer.convert_tokens_to_ids(IMAGE)}
        self.train = self._examples(train)
        self.test = self._examples(load_corpus(self.HELD_OUT))
        self.lengths = torch.ones(len(self.train), dtype=int)

    def _examples(self, corpus: Corpus) -> list[tuple[Tensor, Tensor]]:
        """The tokens and the pixels of each picture with its caption; all captions are as long."""
        read = self.preprocessor(
            images=[item.media[0].load().convert("RGB") for item in corpus.items],
            text=[IMAGE + item.text for item in corpus.items],
            return_tensors="pt",
        )
        return list(zip(read["input_ids"], read["pixel_values"], strict=True))

    def inputs(self, examples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        captions, images = zip(*examples, strict=True)
        ids = torch.stack(captions)
        special = torch.tensor(self.preprocessor.tokenizer.all_special_ids)
        labels = ids.masked_fill(torch.isin(ids, special), IGNORED)
        return {"input_ids": ids, "pixel_values": torch.stack(images), "labels": labels}

    def evaluate(self, model: transformers.PreTrainedModel) -> HeldOutScore:
        """The share of captions of which every word is the most likely one after those before."""
        correct = 0
        for logits, labels in self.predictions(model):
            predicted = logits[:, :-1].argmax(-1)
            following = labels[:, 1:]
            is_right = (predicted == following) | (following == IGNORED)
            correct += int(is_right.all(1).sum())
        items = len(self.test)
        counts = Counter(tuple(ids.tolist()) for ids, _ in self.test)
        accuracy = share(correct, items)
        return HeldOutScore("accuracy", *accuracy.row, items, max(counts.values()) / items)


# What stands for a picture in a caption.
IMAGE = "<image>"


def _word_tokenizer(texts: Sequence[str]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the words of texts, which puts a mark before each text."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>"}
    trainer = trainers.WordLevelTrainer(
        special_tokens=[*marks.values(), IMAGE], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **marks, extra_special_tokens={"image_token": IMAGE}
    )


TASKS = {task.__name__: task for task in (Digits, NextToken, Captions)}


def train(recipe: Recipe, identity: dict, folder: Path) -> None:
    """Train the model of a recipe, and write its folder, which also says its score.

    Args:
        recipe: what to train.
        identity: what is recorded with the score.
        folder: to write; it is made where it is not there.
    """
    # Otherwise it warns that GPT-2's loss is the usual one, and shows a bar for the one file that
    # it saves.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = TASKS[recipe.task](recipe.data, **recipe.task_options)
    config = transformers.AutoConfig.for_model(
        recipe.model_type, **recipe.configuration, **task.sizes
    )
    with loop.isolated():
        # Not torch.manual_seed, which also seeds GPUs, whose state is not restored.
        torch.default_generator.manual_seed(recipe.seed)
        model = task.head.from_config(config, dtype=torch.float32)
        adam = loop.optimizer(model, recipe.learning_rate, recipe.weight_decay)
        schedule = transformers.get_cosine_schedule_with_warmup(
            adam, recipe.steps // 10, recipe.steps
        )
        batches = task.batches(recipe.batch)
        shown = bar(range(recipe.steps), identity["recipe"], unit="step")
        for _ in shown:
            loss = model(**next(batches)).loss
            loop.descend(loss, model, schedule)
            shown.set_postfix(loss=loss.item(), refresh=False)
        score = task.evaluate(model)
    model.save_pretrained(folder)
    task.preprocessor.save_pretrained(folder)
    trained_as = {
        "parameters": model.num_parameters(),
        "versions": versions(),
        "score": dataclasses.asdict(score),
    }
    record = {"description": recipe.description, **identity, **trained_as}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
