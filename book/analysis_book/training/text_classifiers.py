"""Text classifiers: a fine-tuned encoder, or blocks of self-attention only.

Source: Fosse et al. 2023, sec. 2.2 and 2.3.
"""

import copy
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers
from jaxtyping import Int
from torch import Tensor

from analysis_book.training import loop
from analysis_book.training.settings import finished, holds, require_sizes, versions
from analysis_book.training.wordpiece import word_pieces
from analysis_lib import files, store
from analysis_lib.corpora import Corpus, Pair
from analysis_lib.errors import (
    AnalysisError,
    require_flag,
    require_known,
    require_number,
    require_path,
    require_whole,
    shown,
)
from analysis_lib.files import Output
from analysis_lib.metrics.intervals import share
from analysis_lib.models import LoadedModel, devices
from analysis_lib.models.architectures import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)
from analysis_lib.models.loading import LOCALLY, reading
from analysis_lib.models.tokenization import Encoded, Tokenizer, encoded, padded

# Counts changes of how classifiers are trained that the settings do not show.
VERSION = 4
DESCRIPTION = "classifier.json"
TABLE = "epochs.csv"
COLUMNS = ("epoch", "loss", "accuracy")
# Folders of a classifier of self-attention before its first epoch, and after its last.
INITIAL = "initial"
LAST = "last"
# Of similar length: in larger batches a few long texts make padding half of the work.
EVALUATION_BATCH = 32


@dataclass(frozen=True)
class Classification:
    """The settings of a classifier; the defaults are the paper's values where it gives any.

    Attributes:
        learning_rate: of Adam.
        batch: texts per batch.
        epochs: the most passes over the corpus.
        patience: training stops after this many epochs without a better accuracy on the validation
            corpus.
        longest: the most tokens of a text that are read, special tokens included.
        seed: of the initial weights, the order of the texts and dropout.
    """

    learning_rate: float
    batch: int = 32
    epochs: int = 50
    patience: int = 5
    longest: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_sizes(self, batch=1, epochs=1, patience=1, longest=4, seed=0)
        rate = require_number("the learning rate", self.learning_rate, above=0)
        object.__setattr__(self, "learning_rate", rate)


def finetune(
    model: LoadedModel,
    train: Corpus,
    validation: Corpus,
    folder: Path | str | None = None,
    *,
    device: str | None = None,
    **settings,
) -> Path:
    """Fine-tune all weights of an encoder, with a dense layer on [CLS].

    The dense layer is that of ``AutoModelForSequenceClassification``, with new random weights. The
    encoder starts from the weights of ``model``, which does not change.

    Args:
        model: from ``load_model``.
        train: with classes.
        validation: with the same classes, or some of them.
        folder: where to keep the classifier; one of the library's own unless given.
        device: ``cpu``, ``cuda``, ...; unless given, a GPU if there is one. Another kind of device
            gives slightly different weights, and counts as another classifier.
        settings: of :class:`Classification`. The learning rate is 5e-5 unless given.

    Returns:
        The folder. It holds the model that did best on the validation corpus (configuration,
        safetensors and tokenizer), which ``load_model`` reads; ``epochs.csv`` with columns epoch,
        loss and accuracy (on the validation corpus); and ``classifier.json`` with settings, data
        and versions. A classifier is trained once; an interrupted training resumes.

    Raises:
        AnalysisError: a corpus without classes, with only one, or with a single example of a class;
            classes in the validation corpus that the training corpus lacks; a folder with another
            classifier; a model without [CLS] or without a head for classes; a device that cannot be
            used.
    """
    chosen = _chosen(settings, learning_rate=5e-5)
    if not isinstance(model, LoadedModel):
        raise AnalysisError(f"the model is {shown(model)}: give one that load_model has loaded")
    headed = type(model.model.config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not headed or getattr(model.tokenizer, "cls_token", None) is None:
        raise AnalysisError(
            f"{model.name} has no head for classes on [CLS]: give an encoder such as BERT"
        )

    def build(classes: Sequence[str]) -> tuple[transformers.PreTrainedModel, Tokenizer]:
        config = copy.deepcopy(model.model.config)
        config.num_labels = len(classes)
        config.problem_type = "single_label_classification"
        config.pad_token_id = model.tokenizer.pad_token_id
        classifier = transformers.AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32
        )
        classifier.base_model.load_state_dict(model.model.state_dict(), strict=False)
        return classifier, model.tokenizer

    return _trained(f"finetuned {model.revision}", build, train, validation, chosen, folder, device)


# A deeper stack of attention alone would take a day to build, and learns nothing.
MOST_LAYERS = 100
# The three matrices of a wider block take more than a gigabyte.
MOST_WIDTH = 8192
# Of SelfAttentionConfig.
BLOCK_SETTINGS = (
    "hidden_size",
    "embedding_std",
    "initializer_range",
    "attention_gain",
    "bias",
    "entropy_weight",
)


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
    """Train a classifier of self-attention only, with a dense layer on [CLS].

    A block has one head over the whole width, and nothing else. What is not said here is as for
    :func:`finetune`. The folder also holds the model before the first epoch, in ``initial``, and
    after the last, in ``last``.

    Args:
        train: with classes. The word pieces are learned from it, too.
        layers: number of blocks; the paper has 1 to 5.
        vocabulary: the most word pieces.
        block: changes to the defaults of :class:`SelfAttentionConfig`, any of ``BLOCK_SETTINGS``,
            such as ``{"entropy_weight": 0.01}``.
        settings: of :class:`Classification`. The learning rate is 1e-3 and the batch 64 unless
            given.
    """
    chosen = _chosen(settings, learning_rate=1e-3, batch=64)
    layers = require_whole("layers", layers, 1, MOST_LAYERS)
    vocabulary = require_whole("vocabulary", vocabulary, 1)
    block = _checked_block(block)

    def build(classes: Sequence[str]) -> tuple[transformers.PreTrainedModel, Tokenizer]:
        texts = []
        for item in train.items:
            texts += item if isinstance(item, Pair) else [item]
        tokenizer = word_pieces(texts, vocabulary)
        config = SelfAttentionConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            num_labels=len(classes),
            pad_token_id=tokenizer.pad_token_id,
            **block,
        )
        return SelfAttentionForSequenceClassification(config), tokenizer

    key = json.dumps(["self-attention", layers, vocabulary, block], sort_keys=True)
    return _trained(key, build, train, validation, chosen, folder, device, ends=True)


def _chosen(settings: Mapping[str, object], **defaults: float) -> Classification:
    """The settings of a training, over the defaults of its kind."""
    names = [field.name for field in dataclasses.fields(Classification)]
    require_known("setting of a classifier", settings, names)
    return Classification(**{**defaults, **settings})


def _checked_block(block: Mapping | None) -> dict:
    """The settings of a block, or an AnalysisError."""
    if not isinstance(block, Mapping | None):
        raise AnalysisError(
            f'the block is {shown(block)}: give its settings, as in {{"entropy_weight": 0.01}}'
        )
    block = dict(block or {})
    require_known("setting of a block", block, BLOCK_SETTINGS)
    for name, value in block.items():
        if name == "hidden_size":
            block[name] = require_whole(name, value, 1, MOST_WIDTH)
        elif name == "bias":
            require_flag(name, value)
        elif name != "initializer_range" or value is not None:
            block[name] = require_number(name, value, least=0)
    return block


def _trained(
    architecture: str,
    build: Callable[[Sequence[str]], tuple[transformers.PreTrainedModel, Tokenizer]],
    train: Corpus,
    validation: Corpus,
    settings: Classification,
    folder: Path | str | None,
    device: str | None,
    ends: bool = False,
) -> Path:
    _refuse_classes(train, validation)
    device = devices.usable(device)
    if folder is not None:
        folder = require_path("folder", folder)
    identity = {
        "classifier": architecture,
        "settings": {**dataclasses.asdict(settings), "version": VERSION},
        "train": train.sha256,
        "classes": [list(train.classes), list(validation.classes)],
        "labels": hashlib.sha256(repr((train.labels, validation.labels)).encode()).hexdigest(),
        "validation": validation.sha256,
        "versions": versions(),
    }
    kind = torch.device(device).type
    if kind != "cpu":
        identity["device"] = kind
    if folder is None:
        folder = store.derived_folder(json.dumps(identity, sort_keys=True), "classifier")
    with files.alone(folder / ".classifier.lock"), files.writing(folder), loop.isolated(device):
        if not (holds(folder / DESCRIPTION, identity) and finished(folder / TABLE)):
            transformers.utils.logging.disable_progress_bar()
            torch.manual_seed(loop.drawn_seed(settings.seed, 0))
            model, tokenizer = build(train.classes)
            model.config.id2label = dict(enumerate(train.classes))
            model.config.label2id = {name: label for label, name in enumerate(train.classes)}
            longest = _longest_read(model, settings.longest)
            examples = []
            for corpus in (train, validation):
                # By name: a split that lacks a class numbers the others differently.
                labels = [train.classes.index(corpus.classes[label]) for label in corpus.labels]
                examples.append((encode(corpus, tokenizer, longest), labels))
            # Only now, since a classifier that cannot be built leaves the folder to another one.
            files.write(folder / DESCRIPTION, json.dumps(identity, indent=1) + "\n")
            output = Output(folder, "classifier", (train.name, validation.name), DESCRIPTION)
            output.seal(DESCRIPTION)
            tokenizer.save_pretrained(folder)
            if ends:
                tokenizer.save_pretrained(folder / INITIAL)
                tokenizer.save_pretrained(folder / LAST)
                # A training that resumes has built the same model again.
                model.save_pretrained(folder / INITIAL)
            log = _fit(folder, model.to(device), *examples, settings)
            if ends:
                model.save_pretrained(folder / LAST)
            log.finish()
    return folder


def _refuse_classes(train: Corpus, validation: Corpus) -> None:
    for corpus in (train, validation):
        if not isinstance(corpus, Corpus):
            raise AnalysisError(
                f"the texts are {shown(corpus)}: give a corpus with classes, from load_corpus"
            )
        if corpus.kind != "text" or corpus.labels is None:
            raise AnalysisError(
                f"{corpus.name} has no classes: give texts with them, as in reviews.csv:text:label"
            )
    counts = Counter(train.classes[label] for label in train.labels)
    if len(counts) < 2:
        raise AnalysisError(
            f"{train.name} has only one class, {next(iter(counts))}: give two or more"
        )
    if single := [name for name, count in counts.items() if count < 2]:
        raise AnalysisError(
            f"{train.name} has only one example of {single[0]}: give two or more, or leave the "
            "class out"
        )
    if unknown := sorted({validation.classes[label] for label in validation.labels} - set(counts)):
        raise AnalysisError(
            f"{validation.name} has the class {unknown[0]}, which {train.name} lacks: leave it out"
        )


# The texts, and the class of each.
Examples = tuple[list[Encoded], list[int]]


def _fit(
    folder: Path,
    model: transformers.PreTrainedModel,
    train: Examples,
    validation: Examples,
    settings: Classification,
) -> loop.TrainingLog:
    """Train the model, and write its best state; what is returned has yet to be finished."""
    texts, labels = train
    unseen_texts, unseen_labels = validation
    unseen_labels = torch.tensor(unseen_labels)
    adam = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)
    best = copy.deepcopy(model)
    log = loop.TrainingLog(
        folder / TABLE, COLUMNS, str(model.device), model=model, adam=adam, best=best
    )
    for epoch in log.remaining(settings.epochs, "classifier"):
        torch.manual_seed(loop.drawn_seed(settings.seed, 1, epoch))
        losses = []
        model.train()
        for batch in batches(texts, settings.batch):
            wanted = torch.tensor([labels[i] for i in batch], device=model.device)
            loss = model(**inputs(model, texts, batch), labels=wanted).loss
            losses.append(loop.require_finite(loss.item(), "a batch", settings.learning_rate))
            adam.zero_grad()
            loss.backward()
            adam.step()
        predicted = predict_encoded(model.eval(), unseen_texts)
        right = (predicted == unseen_labels).double().mean().item()
        log.rows.append([epoch, sum(losses) / len(losses), right])
        accuracies = [accuracy for _, _, accuracy in log.rows]
        since_best = len(accuracies) - 1 - accuracies.index(max(accuracies))
        if since_best == 0:
            best.load_state_dict(model.state_dict())
        if since_best >= settings.patience:
            break
    best.save_pretrained(folder)
    return log


def batches(texts: Sequence[Sequence], size: int) -> list[list[int]]:
    """All texts once, ``size`` of similar length at a time.

    Their order is drawn from torch's random numbers.
    """
    lengths = torch.tensor([*map(len, texts)])
    chunks = []
    size = min(size, len(lengths))
    for pool in torch.randperm(len(lengths)).split(32 * size):
        chunks += pool[lengths[pool].argsort(stable=True)].split(size)
    return [chunks[i].tolist() for i in torch.randperm(len(chunks))]


def inputs(
    model: transformers.PreTrainedModel, texts: Sequence[Encoded], chosen: Sequence[int]
) -> dict[str, Tensor]:
    """The inputs of a model for some of the texts, on its device."""
    parts = padded([texts[i].columns for i in chosen], model.config.pad_token_id or 0)
    return {name: part.to(model.device) for name, part in parts.items()}


def encode(corpus: Corpus, tokenizer: Tokenizer, longest: int) -> list[Encoded]:
    """The texts as the classifier reads them: no more than ``longest`` tokens of each."""
    texts = []
    for whole in encoded(corpus.name, tokenizer, corpus.items, longest, cut=True):
        text = whole.beginning(longest)
        # As tensors now, and not in every batch of every epoch.
        tensors = {name: torch.tensor(column) for name, column in text.columns.items()}
        texts.append(dataclasses.replace(text, columns=tensors))
    return texts


def _longest_read(model: transformers.PreTrainedModel, longest: int) -> int:
    return min(longest, getattr(model.config, "max_position_embeddings", None) or longest)


def predict_encoded(
    model: transformers.PreTrainedModel, texts: Sequence[Encoded]
) -> Int[Tensor, " text"]:
    """The class that the model predicts for each text."""
    predicted = torch.empty(len(texts), dtype=torch.long)
    by_length = torch.tensor([*map(len, texts)]).argsort(stable=True)
    with torch.inference_mode():
        for part in by_length.split(EVALUATION_BATCH):
            predicted[part] = model(**inputs(model, texts, part)).logits.argmax(-1).cpu()
    return predicted


def classifier(folder: Path | str) -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """The classifier of a folder, with its head, and its tokenizer.

    Raises:
        AnalysisError: the folder holds none.
    """
    if not (Path(folder) / "config.json").is_file():
        raise AnalysisError(
            f"{folder} holds no classifier: give a folder of finetune or self_attention"
        )
    with reading(f"{folder} holds no classifier that can be read", Path(folder)):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **LOCALLY)
        return model, transformers.AutoTokenizer.from_pretrained(folder, **LOCALLY)


def predict(
    folder: Path | str,
    corpus: Corpus,
    longest: int = Classification.longest,
    device: str | None = None,
) -> pd.DataFrame:
    """The classes that a classifier predicts for the texts of a corpus.

    Args:
        folder: of the classifier, from :func:`finetune` or :func:`self_attention`.
        corpus: with classes.
        longest: the most tokens of a text that are read.
        device: ``cpu``, ``cuda``, ...; unless given, a GPU if there is one.

    Returns:
        One row per text: label and predicted, both names of classes.

    Raises:
        AnalysisError: a corpus without classes, or with one that the classifier does not know; a
            device that cannot be used.
    """
    device, longest = devices.usable(device), require_whole("longest", longest, 4)
    if not isinstance(corpus, Corpus):
        raise AnalysisError(
            f"the texts are {shown(corpus)}: give a corpus with classes, from load_corpus"
        )
    model, tokenizer = classifier(require_path("the folder", folder))
    names = [model.config.id2label[label] for label in range(model.config.num_labels)]
    if corpus.labels is None:
        raise AnalysisError(
            f"{corpus.name} has no classes: give texts with them, as in reviews.csv:text:label"
        )
    if unknown := sorted(set(corpus.classes) - set(names)):
        raise AnalysisError(
            f"{corpus.name} has the class {unknown[0]}, unknown to the classifier: leave it out"
        )
    texts = encode(corpus, tokenizer, _longest_read(model, longest))
    predicted = predict_encoded(model.eval().to(device), texts)
    labels = [corpus.classes[label] for label in corpus.labels]
    return pd.DataFrame({"label": labels, "predicted": [names[label] for label in predicted]})


def accuracy(predictions: pd.DataFrame) -> dict[str, float]:
    """The share of texts whose class is predicted, with Wilson's 95 % interval.

    Returns:
        accuracy, ci_low and ci_high.
    """
    is_table = isinstance(predictions, pd.DataFrame) and {"label", "predicted"} <= {*predictions}
    if not is_table or predictions.empty:
        raise AnalysisError(f"the predictions are {shown(predictions)}: give the table of predict")
    right = int((predictions["label"] == predictions["predicted"]).sum())
    estimate = share(right, len(predictions))
    return {"accuracy": estimate.value, "ci_low": estimate.ci_low, "ci_high": estimate.ci_high}
