"""A masked language model pretrained here, with checkpoints along the way."""

import itertools
import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from analysis_book.training import loop
from analysis_book.training.baselines import n_gram_losses
from analysis_book.training.settings import (
    BASELINES,
    COLUMNS,
    DESCRIPTION,
    SPECIAL,
    Pretraining,
    finished,
    holds,
    left_by,
    require_seeds,
    require_sizes,
    seal_path,
    state_path,
    table_path,
)
from analysis_book.training.tasks import IGNORED
from analysis_book.training.wordpiece import word_pieces
from analysis_lib import corpora, files, store
from analysis_lib.capture.outputs import PREDICTED
from analysis_lib.corpora.hub import MODEL_FILES
from analysis_lib.errors import (
    CONTINUES,
    AnalysisError,
    near_names,
    require_path,
    require_whole,
    shown,
)
from analysis_lib.files import Output
from analysis_lib.measurement import processes
from analysis_lib.models import devices
from analysis_lib.models.folders import located
from analysis_lib.models.loading import LOCALLY, read_processor
from analysis_lib.models.parts import refuse_too_large
from analysis_lib.models.tokenization import Tokenizer

# The encoders that are pretrained: those whose sizes have the names of BERT's.
ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
    "distilbert",
    "albert",
    "mpnet",
    "deberta",
    "deberta-v2",
    "modernbert",
)
# Of the texts that are held out, the first sequences: the loss is theirs.
HELD_OUT_SEQUENCES = 256
# A model of more parameters takes half a minute and more to begin with.
LARGE = 50_000_000


def pretrain(
    folder: Path | str,
    settings: Pretraining | None = None,
    *,
    seeds: Sequence[int] = (0,),
    workers: int = 1,
    device: str | None = None,
) -> Path:
    """Pretrain a BERT, or its like, by masked language modelling, once per seed.

    Checkpoints are kept along the way. The tokenizer is trained on the corpus first. Texts are
    joined by [SEP] and cut into sequences of one length, so that nothing is padded. Batch, masks
    and dropout of a step depend only on the seed and the number of the step: a run that was
    interrupted, or killed, resumes and ends with the same weights as one that was not. On a CPU
    each seed runs on one thread; on a GPU that supports it, in bfloat16.

    For each seed s and each step t that is kept, the folder then holds a model ``seed_s-step_t``
    (configuration, safetensors and tokenizer) that ``load_model`` reads. ``seed_s.csv`` has the
    columns step, tokens (read so far), learning_rate, loss (nats per masked token of the batch;
    missing if none is masked) and held_out (the same for held-out texts, at the steps that are
    kept). ``baselines.csv`` has what counting gives at the same held-out tokens, see
    :func:`n_gram_losses`, and ``pretraining.json`` settings, data and versions.

    Args:
        folder: of the run. A run that is finished is not trained again, unless a file of it is
            missing or damaged.
        settings: of the run.
        seeds: of the initial weights, the order of the data, masks and dropout.
        workers: number of seeds trained at the same time, each in its own process.
        device: ``cpu``, ``cuda``, ...; unless given, a GPU if there is one.

    Returns:
        The folder.

    Raises:
        AnalysisError: the folder holds a run with other settings, data or versions; there is too
            little text; the loss is no longer finite.
        KeyboardInterrupt: its message says so where a state is kept, as it is about every minute.
    """
    folder = require_path("folder", folder)
    if settings is None:
        settings = Pretraining()
    if not isinstance(settings, Pretraining):
        raise AnalysisError(f"the settings are {shown(settings)}: give Pretraining(...)")
    seeds = require_seeds("seeds", seeds)
    require_whole("workers", workers, 1)
    device = devices.usable(device)
    _configuration(settings)
    description = folder / DESCRIPTION
    identity = settings.identity()
    seal = seal_path(folder, "run")
    # Whatever can be refused is refused before anything is written, too little text included.
    untokenized = partial(store.lost, seal, ".tokenizer/tokenizer.json")
    if not holds(description, identity) or untokenized():
        corpus = corpora.load_corpus(settings.data)
        if corpus.kind != "text":
            raise AnalysisError(
                f"{settings.data} holds {corpora.PLURAL[corpus.kind]}: give texts to pretrain on"
            )
        tokenizer = _tokenizer(corpus, settings)
        _sequences(tokenizer, settings)
        _configuration(settings, tokenizer)
    with files.alone(folder / ".pretraining.lock"), files.writing(folder):
        if not holds(description, identity) or untokenized():
            tokenizer.save_pretrained(folder / ".tokenizer")
            files.write(description, json.dumps(identity, indent=1) + "\n")
            Output(folder, "pretrain", (settings.data,), DESCRIPTION).seal(DESCRIPTION)
    try:
        with processes.mapped(min(workers, len(seeds))) as mapped:
            deque(mapped(partial(_train, folder, settings, device), seeds), 0)
    except KeyboardInterrupt:
        tables = [table_path(folder, seed) for seed in seeds]
        kept = any(finished(table) or state_path(table).is_file() for table in tables)
        message = CONTINUES if kept else ""
        raise KeyboardInterrupt(message) from None
    with files.alone(folder / ".pretraining.lock"), files.writing(folder):
        if store.lost(seal, BASELINES):
            files.write(folder / BASELINES, _baselines(folder, settings).to_csv(index=False))
            seal.unlink(missing_ok=True)
        if not seal.is_file():
            store.seal(seal, BASELINES, ".tokenizer/*")
    return folder


def _tokenizer(corpus: corpora.Corpus, settings: Pretraining) -> Tokenizer:
    """The tokenizer that the settings name, or one that is learned from the texts."""
    if not settings.tokenizer:
        return word_pieces(corpus.texts, settings.vocabulary, settings.cased)
    tokenizer = read_processor(settings.tokenizer, [located(settings.tokenizer, None)[0]], "text")
    for token in ("mask", "cls", "sep", "pad"):
        if getattr(tokenizer, f"{token}_token_id", None) is None:
            raise AnalysisError(
                f"the tokenizer of {settings.tokenizer} has no {token} token: give one of BERT's "
                "kind"
            )
    return tokenizer


def _ordinary(tokenizer: Tokenizer) -> Int[Tensor, " word"]:
    """The ids of all tokens but special ones, in order."""
    return torch.tensor(sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids}))


def _baselines(folder: Path, settings: Pretraining) -> pd.DataFrame:
    """The losses of counting, at the tokens of which ``held_out`` is the loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / ".tokenizer", **LOCALLY)
    train, held_out = _sequences(tokenizer, settings)
    ordinary = _ordinary(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        masked = [
            mask_tokens(part, ordinary, tokenizer.mask_token_id)
            for part in held_out.split(settings.batch)
        ]
    predicted = torch.cat([labels for _, labels in masked]) != IGNORED
    read = (train.numpy(), held_out.numpy(), predicted.numpy())
    return n_gram_losses(*read, ordinary.numpy(), len(tokenizer))


def _sequences(
    tokenizer: Tokenizer, settings: Pretraining
) -> tuple[Int[Tensor, "sequence token"], Int[Tensor, "sequence token"]]:
    """The texts as sequences of one length: those to train on, and those held out."""
    corpus = corpora.load_corpus(settings.data)
    texts = tokenizer(list(corpus.texts), add_special_tokens=False)["input_ids"]
    outside = corpora.held_out(corpus.units, len(texts))
    parts = (itertools.compress(texts, chosen) for chosen in (~outside, outside))
    train, held_out = (_cut([*part], tokenizer, settings.length) for part in parts)
    if len(train) < settings.batch or not len(held_out):
        raise AnalysisError(
            f"{settings.data} makes {len(train)} sequences of {settings.length} tokens to train on "
            f"and {len(held_out)} "
            f"to hold out: give more text, shorter sequences, or a batch below {settings.batch}"
        )
    return train, held_out[:HELD_OUT_SEQUENCES]


def _cut(
    texts: list[list[int]], tokenizer: Tokenizer, length: int
) -> Int[Tensor, "sequence token"]:
    stream = [token for text in texts for token in (*text, tokenizer.sep_token_id)]
    inside = length - 2
    rows = torch.tensor(stream[: len(stream) // inside * inside]).reshape(-1, inside)
    edge = rows.new_ones(len(rows), 1)
    return torch.cat([edge * tokenizer.cls_token_id, rows, edge * tokenizer.sep_token_id], 1)


def _batch(
    sequences: Int[Tensor, "sequence token"], size: int, seed: int, step: int
) -> Int[Tensor, "sequence token"]:
    """The sequences of a step, counted from 1.

    Those left over at the end of an epoch wait for another one.
    """
    epoch, index = divmod(step - 1, len(sequences) // size)
    generator = torch.Generator().manual_seed(loop.drawn_seed(seed, 1, epoch))
    order = torch.randperm(len(sequences), generator=generator)
    return sequences[order[index * size : (index + 1) * size]]


def _train(folder: Path, settings: Pretraining, device: str, seed: int) -> None:
    table = table_path(folder, seed)
    sealed = seal_path(folder, table.stem)
    wanted = left_by(seed, settings.checkpoints)
    with files.alone(folder / f".seed_{seed}.lock"), files.writing(folder), loop.isolated(device):
        # Once more if a checkpoint from before an interruption turns out to be gone.
        while (gone := store.lost(sealed, *wanted)) or not finished(table):
            if finished(table):
                said = "note: %s is missing or damaged: seed %s is trained again"
                logging.getLogger(__name__).warning(said, gone[0], seed)
            # Delete the seal last: an interrupted clean-up must not look complete.
            for path in gone:
                path.unlink(missing_ok=True)
                # The whole checkpoint is kept anew.
                if path.parent != folder:
                    (path.parent / "config.json").unlink(missing_ok=True)
            sealed.unlink(missing_ok=True)
            transformers.utils.logging.disable_progress_bar()
            _Run(folder, settings, device, seed).train()
        if not sealed.is_file():
            # Not what a user has put beside them.
            checkpoints = [f"{table.stem}-step_*/{pattern}" for pattern in MODEL_FILES]
            store.seal(sealed, table.name, *checkpoints)


def _configuration(
    settings: Pretraining, tokenizer: Tokenizer | None = None
) -> transformers.PreTrainedConfig:
    """The configuration of the model, which is refused if it makes none or one that is too large.

    Args:
        tokenizer: the model's; before there is one, what does not depend on it is refused.
    """
    kind = settings.model_type
    _refuse_configuration(kind, settings.configuration)
    # No more positions than are trained: the embedding of a later one would stay random.
    chosen = {"max_position_embeddings": settings.length, **_token_ids(kind, tokenizer)}
    chosen |= settings.configuration
    try:
        model = _on_paper(kind, chosen)
        # Some count their positions from the padding on.
        begins = [
            part.padding_idx + 1
            for name, part in model.named_modules()
            if _counts_from_padding(name, part)
        ]
        if begins and "max_position_embeddings" not in settings.configuration:
            chosen["max_position_embeddings"] += max(begins)
            model = _on_paper(kind, chosen)
    except Exception as error:
        # Configurations and layers validate themselves, each with errors of its own.
        line = " ".join(f"{type(error).__name__}: {error}".split())
        reason = line.partition(" Exception raised from")[0]
        raise AnalysisError(
            f"the configuration {settings.configuration} makes no {kind} ({reason}): change it"
        ) from error
    config = model.config
    parameters = model.num_parameters()
    least = {"num_hidden_layers": 1, "max_position_embeddings": settings.length}
    if hasattr(config, "num_attention_heads"):
        least["num_attention_heads"] = 1
    require_sizes(config, **least)
    # Weights, gradients and two moments of Adam's, in single precision, and the rows of the losses.
    needed = 16 * parameters + 200 * settings.steps
    memory = psutil.virtual_memory().total
    if needed > memory:
        raise AnalysisError(
            f"{settings.steps} steps of a {kind} with {parameters} parameters need "
            f"{needed / 1e9:.0f} GB of memory, and this machine has {memory / 1e9:.0f}: "
            f"give smaller sizes in {settings.configuration}, a shorter length or fewer steps"
        )
    if tokenizer is not None and parameters > LARGE:
        said = (
            "note: a %s of %d million parameters takes a while to begin with: --config makes "
            "it smaller"
        )
        logging.getLogger(__name__).warning(said, kind, parameters / 1e6)
    return config


def _refuse_configuration(kind: str, configuration: Mapping[str, object]) -> None:
    """Refuse an architecture, or settings of it, of which no model can be built."""
    if kind not in ENCODERS:
        raise AnalysisError(
            f"there is no masked language model {kind!r} that is trained: "
            f"{near_names(kind, ENCODERS)}"
        )
    defaults = transformers.AutoConfig.for_model(kind).to_dict()
    for name in configuration:
        if name not in defaults:
            raise AnalysisError(f"a {kind} has no setting {name}: {near_names(name, defaults)}")
    if {"vocab_size", "pad_token_id"} & configuration.keys():
        raise AnalysisError(
            "vocab_size and pad_token_id are those of the tokenizer: leave them out"
        )
    for name, value in configuration.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise AnalysisError(f"{name} is {value}: give a number")
    refuse_too_large(kind, configuration)


def _token_ids(kind: str, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The settings of an architecture that the tokenizer decides: size, and ids of tokens."""
    if tokenizer is None:
        return {"vocab_size": len(SPECIAL), "pad_token_id": 0}
    words = len(tokenizer)
    chosen = {"vocab_size": words, "pad_token_id": tokenizer.pad_token_id}
    defaults = transformers.AutoConfig.for_model(kind).to_dict()
    ends = {
        "bos": tokenizer.cls_token_id,
        "cls": tokenizer.cls_token_id,
        "eos": tokenizer.sep_token_id,
        "sep": tokenizer.sep_token_id,
    }
    for end, index in ends.items():
        # The default lies beyond the vocabulary.
        if (defaults.get(f"{end}_token_id") or 0) >= words:
            chosen[f"{end}_token_id"] = index
    return chosen


def _on_paper(kind: str, chosen: Mapping[str, object]) -> transformers.PreTrainedModel:
    """A model without memory for its weights."""
    config = transformers.AutoConfig.for_model(kind, **chosen)
    with torch.device("meta"):
        return transformers.AutoModelForMaskedLM.from_config(config)


def _counts_from_padding(name: str, part: nn.Module) -> bool:
    return name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None


def mask_tokens(
    ids: Int[Tensor, "sequence token"], ordinary: Int[Tensor, " word"], mask: int
) -> tuple[Int[Tensor, "sequence token"], Int[Tensor, "sequence token"]]:
    """The inputs and labels of masked language modelling, drawn from torch's random numbers.

    As in BERT (Devlin et al. 2019, sec. 3.1), 15 % of the tokens are predicted: 80 % of these are
    masked, 10 % are replaced by a random token and 10 % stay.

    Args:
        ordinary: the ids that may be predicted: all but those of special tokens.
        mask: the id of the mask.

    Returns:
        The ids that the model reads, and the labels: ``IGNORED`` where nothing is predicted.
    """
    words = torch.isin(ids, ordinary)
    draws = torch.rand(ids.shape)
    labels = ids.masked_fill(~words | (draws >= PREDICTED), IGNORED)
    other = ordinary[torch.randint(len(ordinary), ids.shape)]
    read = torch.where(words & (draws < 0.8 * PREDICTED), mask, ids)
    read = torch.where(words & (draws >= 0.9 * PREDICTED) & (draws < PREDICTED), other, read)
    return read, labels


@torch.inference_mode()
def _head(model: transformers.PreTrainedModel) -> nn.Module | None:
    """The modules after the base model, in a row; None if they do not give the logits."""
    base = model.base_model_prefix
    head = nn.Sequential(*(part for name, part in model.named_children() if name != base))
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)
    training = model.training
    model.eval()
    try:
        hidden = model.base_model(input_ids=ids).last_hidden_state
        alike = torch.allclose(head(hidden), model(input_ids=ids).logits)
    except (TypeError, RuntimeError, AttributeError):
        alike = False
    model.train(training)
    return head if alike else None


class _Run:
    def __init__(self, folder: Path, settings: Pretraining, device: str, seed: int):
        self.folder = folder
        self.settings = settings
        self.seed = seed
        self.device = device
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / ".tokenizer", **LOCALLY
        )
        self.ordinary = _ordinary(self.tokenizer)
        self.train_on, self.held_out = _sequences(self.tokenizer, settings)
        torch.manual_seed(loop.drawn_seed(seed, 0))
        config = _configuration(settings, self.tokenizer)
        self.model = transformers.AutoModelForMaskedLM.from_config(config).to(device)
        self.head = _head(self.model)
        self.adam = loop.optimizer(self.model, settings.learning_rate, settings.weight_decay)
        # One beyond the last step, so that its rate, too, is above zero.
        self.schedule = transformers.get_linear_schedule_with_warmup(
            self.adam, round(settings.warmup * settings.steps), settings.steps + 1
        )

    def train(self) -> None:
        # By a process that was killed.
        for left in self.folder.glob(f".unfinished-seed_{self.seed}-*"):
            shutil.rmtree(left, ignore_errors=True)
        parts = {"model": self.model, "adam": self.adam, "schedule": self.schedule}
        log = loop.TrainingLog(table_path(self.folder, self.seed), COLUMNS, self.device, **parts)
        kept = self.settings.checkpoints
        size = self.settings.batch * self.settings.length
        for step in log.remaining(self.settings.steps, f"seed {self.seed}", first=0):
            rate = self.schedule.get_last_lr()[0] if step else 0.0
            loss = self._step(step) if step else None
            held_out = self._keep(step) if step in kept else None
            log.rows.append([step, step * size, rate, loss, held_out])
        log.finish()

    def _step(self, step: int) -> float | None:
        torch.manual_seed(loop.drawn_seed(self.seed, 2, step))
        losses = self._losses(_batch(self.train_on, self.settings.batch, self.seed, step))
        value = self._mean(losses, step)
        loop.descend(losses.sum() / max(len(losses), 1), self.model, self.schedule)
        return value

    def _losses(self, sequences: Int[Tensor, "sequence token"]) -> Float[Tensor, " predicted"]:
        """Cross-entropy of each masked token, in nats.

        Where it can be, the output layer is computed for these only.
        """
        masked = mask_tokens(sequences, self.ordinary, self.tokenizer.mask_token_id)
        ids, labels = (part.to(self.device) for part in masked)
        predicted = labels != IGNORED
        bfloat16 = self.device.startswith("cuda") and torch.cuda.is_bf16_supported()
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=bfloat16):
            if self.head is None:
                logits = self.model(input_ids=ids).logits[predicted]
            else:
                hidden = self.model.base_model(input_ids=ids).last_hidden_state
                logits = self.head(hidden[predicted])
        return functional.cross_entropy(logits.float(), labels[predicted], reduction="none")

    def _mean(self, losses: Float[Tensor, " predicted"], step: int) -> float | None:
        """The mean; None if nothing was masked, as may happen in a very small batch."""
        if not len(losses):
            return None
        return loop.require_finite(
            losses.mean().item(), f"step {step}", self.settings.learning_rate
        )

    def _keep(self, step: int) -> float | None:
        """Keep the model as it is; its held-out loss, with the same masks at every step."""
        self.model.eval()
        torch.manual_seed(0)
        with torch.inference_mode():
            losses = [self._losses(part) for part in self.held_out.split(self.settings.batch)]
        self.model.train()
        held_out = self._mean(torch.cat(losses), step)
        # Named in the style of the MultiBERTs.
        whole = self.folder / f"seed_{self.seed}-step_{step}"
        if not (whole / "config.json").is_file():
            unfinished = self.folder / f".unfinished-{whole.name}"
            self.model.save_pretrained(unfinished)
            self.tokenizer.save_pretrained(unfinished)
            whole.mkdir(exist_ok=True)
            # Beside what a user may have put there. The configuration last: it says that all are
            # there.
            for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, whole / path.name)
            unfinished.rmdir()
        return held_out
