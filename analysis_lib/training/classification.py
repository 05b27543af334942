"""Classifiers of texts: an encoder fine-tuned, or self-attention alone (Fosse et al. 2023, sec. 2.2 and 2.3)."""

import copy
import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
import transformers
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from analysis_lib.corpora import packages
from analysis_lib.corpora.loading import Corpus, Pair
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.metrics.intervals import wilson
from analysis_lib.models import devices
from analysis_lib.models.architectures import SelfAttentionConfig, SelfAttentionForSequenceClassification
from analysis_lib.models.tokenization import Tokenizer, text_frame, token_ids
from analysis_lib.training.loop import alone, drawn_seed, one_thread, save_state, versions, write
from analysis_lib.training.tasks import padded
from analysis_lib.training.wordpiece import word_pieces

if TYPE_CHECKING:
    from analysis_lib.models.loading import LoadedModel

# Counts changes of how classifiers are trained that the settings do not show.
VERSION = 2
DESCRIPTION = "classifier.json"
STATE = ".state.pt"
EVALUATION_BATCH = 128


@dataclass(frozen=True)
class Classification:
    """How a classifier is trained; the paper's values are the defaults, where it gives any.

    Attributes:
        learning_rate: of Adam.
        batch: texts of a batch.
        epochs: passes over the corpus, at most.
        patience: after so many epochs that do not raise the accuracy on the validation corpus, training stops.
        longest: tokens of a text that are read, special tokens included.
        seed: of the initial weights, the order of the texts and dropout.
    """

    learning_rate: float
    batch: int = 32
    epochs: int = 50
    patience: int = 5
    longest: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("epochs", 1), ("patience", 1), ("longest", 4), ("seed", 0)):
            if getattr(self, name) < least:
                raise AnalysisError(f"{name} is {getattr(self, name)}: give {least} or more")
        if not 0 < self.learning_rate < math.inf:
            raise AnalysisError(f"the learning rate is {self.learning_rate}: give a number above 0")


def finetune(
    model: "LoadedModel",
    train: Corpus,
    validation: Corpus,
    folder: Path | str | None = None,
    *,
    device: str | None = None,
    **settings,
) -> Path:
    """Fine-tune an encoder, all of its weights, with a dense layer on [CLS].

    The dense layer is that of ``AutoModelForSequenceClassification``, whose weights are drawn anew. The encoder's own
    come from ``model``, which is left as it is.

    Args:
        model: from ``load_model``.
        train: with classes.
        validation: with the same classes, or some of them.
        folder: where to keep the classifier; a folder of the library's own unless told.
        device: ``cpu``, ``cuda``, ...; a GPU where there is one, unless told. Another kind gives other weights, if
            near ones, and is another classifier.
        settings: of :class:`Classification`; the learning rate is 5e-5 unless told.

    Returns:
        The folder of the state that did best on the validation corpus: configuration, safetensors and tokenizer, as
        ``save_pretrained`` makes it, which ``load_model`` reads; ``epochs.csv`` with columns epoch, loss and accuracy
        (of the validation corpus); and ``classifier.json``: settings, data and versions. It is trained once; an
        interrupted training goes on after its last whole epoch.

    Raises:
        AnalysisError: no classes, one class alone, a class with a single example, classes in the validation corpus
            that the training corpus lacks; a folder with another classifier; a model without [CLS] or without a head
            for classes; a device that cannot be used.
    """
    rules = Classification(**{"learning_rate": 5e-5, **settings})
    headed = type(model.model.config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not headed or model.tokenizer.cls_token is None:
        raise AnalysisError(f"{model.name} has no head for classes on [CLS]: give an encoder such as BERT")

    def build(classes: Sequence[str]) -> tuple[transformers.PreTrainedModel, Tokenizer]:
        config = copy.deepcopy(model.model.config)
        config.num_labels, config.problem_type = len(classes), "single_label_classification"
        config.pad_token_id = model.tokenizer.pad_token_id
        classifier = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        classifier.base_model.load_state_dict(model.model.state_dict(), strict=False)
        return classifier, model.tokenizer

    return _trained(f"finetuned {model.revision}", build, train, validation, rules, folder, device)


# The block's own settings: of SelfAttentionConfig, and the size of the vocabulary.
BLOCK_SETTINGS = ("hidden_size", "embedding_std", "initializer_range", "bias", "entropy_weight")


def self_attention(
    train: Corpus,
    validation: Corpus,
    folder: Path | str | None = None,
    *,
    layers: int = 1,
    vocabulary: int = 8000,
    block: dict | None = None,
    device: str | None = None,
    **settings,
) -> Path:
    """Train a classifier of self-attention alone: blocks of one head over the whole width, then a dense layer on [CLS].

    Args:
        train: with classes; its word pieces are learned from it, too.
        validation: with the same classes, or some of them.
        folder: where to keep the classifier; a folder of the library's own unless told.
        layers: how many blocks; the paper has 1 to 5.
        vocabulary: word pieces, at most.
        block: what differs from the defaults of :class:`SelfAttentionConfig`: any of ``BLOCK_SETTINGS``, such as
            ``{"entropy_weight": 0.01}``.
        device: as of :func:`finetune`.
        settings: of :class:`Classification`; the learning rate is 1e-3 and the batch 64 unless told.

    Returns:
        The folder, as of :func:`finetune`.

    Raises:
        AnalysisError: as :func:`finetune`; an unknown setting of the block.
    """
    rules, block = Classification(**{"learning_rate": 1e-3, "batch": 64, **settings}), block or {}
    if wrong := [name for name in block if name not in BLOCK_SETTINGS]:
        raise AnalysisError(f"a block has no {wrong[0]}: {near_names(wrong[0], BLOCK_SETTINGS)}")
    if layers < 1 or block.get("hidden_size", 1) < 1 or not 0 <= block.get("entropy_weight", 0) < math.inf:
        raise AnalysisError(f"layers {layers}, block {block}: give a layer or more, a width, and no negative weight")

    def build(classes: Sequence[str]) -> tuple[transformers.PreTrainedModel, Tokenizer]:
        tokenizer = word_pieces([text for item in train.items for text in _sides(item)], vocabulary)
        config = SelfAttentionConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            num_labels=len(classes),
            pad_token_id=tokenizer.pad_token_id,
            **block,
        )
        return SelfAttentionForSequenceClassification(config), tokenizer

    key = json.dumps(["self-attention", layers, vocabulary, block], sort_keys=True)
    return _trained(key, build, train, validation, rules, folder, device)


def _sides(item: str | Pair) -> tuple[str, ...]:
    return item if isinstance(item, Pair) else (item,)


Build = Callable[[Sequence[str]], tuple[transformers.PreTrainedModel, Tokenizer]]


def _trained(
    what: str,
    build: Build,
    train: Corpus,
    validation: Corpus,
    rules: Classification,
    folder: Path | str | None,
    device: str | None,
) -> Path:
    _refuse_classes(train, validation)
    device = devices.usable(device)
    told = {
        "classifier": what,
        "settings": {**dataclasses.asdict(rules), "version": VERSION},
        "train": train.sha256,
        "classes": [list(corpus.classes) for corpus in (train, validation)],
        "labels": hashlib.sha256(repr((train.labels, validation.labels)).encode()).hexdigest(),
        "validation": validation.sha256,
        "versions": versions(),
    }
    if (kind := torch.device(device).type) != "cpu":
        told["device"] = kind
    if folder is None:
        folder = packages.derived_folder(json.dumps(told, sort_keys=True), "classifier")
    folder = Path(folder)
    description, state = folder / DESCRIPTION, folder / STATE
    with alone(folder / ".classifier.lock"):
        if description.is_file():
            _refuse_another(folder, json.loads(description.read_text(encoding="utf-8")), told)
            state.unlink(missing_ok=True)  # Left by a process that was killed at its very end.
            return folder
        left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        # With a state, they are those of a classifier that was being written when its process was killed.
        if left and not state.is_file():
            raise AnalysisError(f"{folder} holds {left[0]} and no classifier: give an empty folder, or a new one")
        transformers.utils.logging.disable_progress_bar()
        with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), one_thread():
            _Training(folder, told, build, train, validation, rules, device).go()
    return folder


def _refuse_another(folder: Path, found: dict, told: dict) -> None:
    if differs := [name for name in told | found if found.get(name) != told.get(name)]:
        raise AnalysisError(f"{folder} holds a classifier with other {differs[0]}: give another folder")


def _refuse_classes(train: Corpus, validation: Corpus) -> None:
    for corpus in (train, validation):
        if corpus.kind != "text" or corpus.labels is None:
            raise AnalysisError(f"{corpus.name} has no classes: give texts with them, as in reviews.csv:text:label")
    counts = Counter(train.classes[label] for label in train.labels)
    if len(counts) < 2:
        raise AnalysisError(f"{train.name} has one class alone, {next(iter(counts))}: give two or more")
    if single := [name for name, count in counts.items() if count < 2]:
        raise AnalysisError(f"{train.name} has one example of the class {single[0]}: give two or more, or leave it out")
    if unknown := sorted({validation.classes[label] for label in validation.labels} - set(counts)):
        raise AnalysisError(f"{validation.name} has the class {unknown[0]}, which {train.name} lacks: leave it out")


class _Training:
    """A classifier, its optimizer and how far they are."""

    def __init__(
        self,
        folder: Path,
        told: dict,
        build: Build,
        train: Corpus,
        validation: Corpus,
        rules: Classification,
        device: str,
    ):
        self.folder, self.told, self.rules, self.device, self.state = folder, told, rules, device, folder / STATE
        torch.manual_seed(drawn_seed(rules.seed, 0))
        self.model, self.tokenizer = build(train.classes)
        self.model.to(device)
        self.model.config.id2label = dict(enumerate(train.classes))
        self.model.config.label2id = {name: label for label, name in enumerate(train.classes)}
        self.adam = torch.optim.Adam(self.model.parameters(), lr=rules.learning_rate, fused=True)
        longest = _readable(self.model, rules.longest)
        self.train, self.validation = (encode(corpus, self.tokenizer, longest) for corpus in (train, validation))
        # A split without one of the classes numbers the others in its own way.
        numbers = torch.tensor([train.classes.index(name) for name in validation.classes])
        self.validation.labels = numbers[self.validation.labels]
        self.log: list[list[float]] = []
        self.best: dict[str, Tensor] = {}

    def go(self) -> None:
        self._resume()
        bar = tqdm(total=self.rules.epochs, initial=len(self.log), unit="epoch", desc="classifier", disable=None)
        with bar:
            while len(self.log) < self.rules.epochs and not self._stopped():
                epoch = len(self.log) + 1
                torch.manual_seed(drawn_seed(self.rules.seed, 1, epoch))
                loss = self._epoch()
                right = (predict_encoded(self.model, self.validation) == self.validation.labels).double().mean().item()
                if right > max((accuracy for _, _, accuracy in self.log), default=-1.0):
                    self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.log.append([epoch, loss, right])
                self._save()
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{right:.3f}")
                bar.update()
        self._finish()

    def _stopped(self) -> bool:
        """Whether the last epochs brought no gain."""
        accuracies = [accuracy for _, _, accuracy in self.log]
        return bool(accuracies) and len(accuracies) - 1 - accuracies.index(max(accuracies)) >= self.rules.patience

    def _epoch(self) -> float:
        """One pass over the training corpus; the mean loss of its batches."""
        self.model.train()
        losses = []
        for batch in self.train.batches(self.rules.batch):
            labels = self.train.labels[batch].to(self.device)
            loss = self.model(**self.train.inputs(batch, self.device), labels=labels).loss
            if not math.isfinite(value := loss.item()):
                raise AnalysisError(f"the loss is {value}: give a learning rate below {self.rules.learning_rate:g}")
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
            losses.append(value)
        self.model.eval()
        return sum(losses) / len(losses)

    def _resume(self) -> None:
        if self.state.is_file():
            state = torch.load(self.state, map_location=self.device, weights_only=True)
            _refuse_another(self.folder, state["told"], self.told)
            self.log, self.best = state["log"], state["best"]
            self.model.load_state_dict(state["model"])
            self.adam.load_state_dict(state["adam"])

    def _save(self) -> None:
        parts = {part: getattr(self, part).state_dict() for part in ("model", "adam")}
        save_state(self.state, {"told": self.told, "log": self.log, "best": self.best, **parts})

    def _finish(self) -> None:
        """Write the classifier: what tells that it is whole comes last."""
        self.model.load_state_dict(self.best)
        unfinished = self.folder / ".unfinished"
        self.model.save_pretrained(unfinished)
        self.tokenizer.save_pretrained(unfinished)
        log = pd.DataFrame(self.log, columns=["epoch", "loss", "accuracy"])
        (unfinished / "epochs.csv").write_text(log.to_csv(index=False), encoding="utf-8")
        for path in unfinished.iterdir():
            path.rename(self.folder / path.name)
        unfinished.rmdir()
        write(self.folder / DESCRIPTION, json.dumps(self.told, indent=1) + "\n")
        self.state.unlink()


@dataclass(eq=False)
class Encoded:
    """The texts of a corpus as token ids, with their classes.

    Attributes:
        ids: of each text, special tokens included.
        labels: of each text.
        pad: the id of padding.
    """

    ids: list[Int[Tensor, " token"]]
    labels: Int[Tensor, " text"]
    pad: int

    def batches(self, size: int) -> Iterator[Int[Tensor, " text"]]:
        """All texts once, ``size`` of like length at a time, in an order drawn from torch's random numbers."""
        lengths = torch.tensor([len(ids) for ids in self.ids])
        chunks = []
        for pool in torch.randperm(len(lengths)).split(32 * size):
            chunks += pool[lengths[pool].argsort(stable=True)].split(size)
        return iter([chunks[i] for i in torch.randperm(len(chunks))])

    def inputs(self, texts: Int[Tensor, " text"], device: str | torch.device) -> dict[str, Tensor]:
        """What a model on a device is called with for these texts."""
        return {name: part.to(device) for name, part in padded([self.ids[i] for i in texts], self.pad).items()}


def encode(corpus: Corpus, tokenizer: Tokenizer, longest: int) -> Encoded:
    """The texts as the classifier reads them, cut after ``longest`` tokens."""
    prefix, suffix = text_frame(tokenizer)
    room = longest - len(prefix) - len(suffix)
    ids = [torch.tensor([*prefix, *body[:room], *suffix]) for body in token_ids(tokenizer, corpus.items)]
    return Encoded(ids, torch.tensor(corpus.labels), tokenizer.pad_token_id or 0)


def _readable(model: transformers.PreTrainedModel, longest: int) -> int:
    """How many tokens of a text are read: fewer where the model has fewer positions."""
    return min(longest, getattr(model.config, "max_position_embeddings", None) or longest)


def predict_encoded(model: transformers.PreTrainedModel, texts: Encoded) -> Int[Tensor, " text"]:
    """The class that the model gives to each text."""
    predicted = torch.empty_like(texts.labels)
    order = torch.tensor([len(ids) for ids in texts.ids]).argsort(stable=True)
    with torch.inference_mode():
        for part in order.split(EVALUATION_BATCH):
            predicted[part] = model(**texts.inputs(part, model.device)).logits.argmax(-1).cpu()
    return predicted


def predict(
    folder: Path | str, corpus: Corpus, longest: int = Classification.longest, device: str | None = None
) -> pd.DataFrame:
    """What a classifier makes of the texts of a corpus.

    Args:
        folder: of the classifier, from :func:`finetune` or :func:`self_attention`.
        corpus: with classes.
        longest: tokens of a text that are read.
        device: ``cpu``, ``cuda``, ...; a GPU where there is one, unless told.

    Returns:
        A row a text: label and predicted, both names of classes.

    Raises:
        AnalysisError: a class of the corpus that the classifier does not know, or no classes; a device that cannot be
            used.
    """
    device = devices.usable(device)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    names = [model.config.id2label[label] for label in range(model.config.num_labels)]
    if corpus.labels is None:
        raise AnalysisError(f"{corpus.name} has no classes: give texts with them, as in reviews.csv:text:label")
    if unknown := sorted(set(corpus.classes) - set(names)):
        raise AnalysisError(f"{corpus.name} has the class {unknown[0]}, unknown to the classifier: leave it out")
    texts = encode(corpus, tokenizer, _readable(model, longest))
    predicted = predict_encoded(model.eval().to(device), texts)
    labels = [corpus.classes[label] for label in corpus.labels]
    return pd.DataFrame({"label": labels, "predicted": [names[label] for label in predicted]})


def accuracy(predictions: pd.DataFrame) -> dict[str, float]:
    """The share of texts whose class was found, with its 95 % interval after Wilson: accuracy, ci_low, ci_high."""
    right = int((predictions["label"] == predictions["predicted"]).sum())
    low, high = wilson(right, len(predictions))
    return {"accuracy": right / len(predictions), "ci_low": low, "ci_high": high}
