"""A BERT pretrained here, with checkpoints along the way: ``pretrain("runs/mine", steps=2000)``."""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pandas as pd
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from analysis_lib import corpora
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measurement import processes
from analysis_lib.models import devices
from analysis_lib.training.loop import alone, drawn_seed, one_thread, optimizer, save_state, versions, write
from analysis_lib.training.tasks import IGNORED, mask_tokens
from analysis_lib.training.wordpiece import SPECIAL, word_pieces

# Counts changes of how models are trained that the settings do not show.
VERSION = 1
# Of every 40 texts the last is held out, and as many sequences of them are looked at as this.
HELD_OUT_EVERY, HELD_OUT_SEQUENCES = 40, 256
# How much work a kill can undo.
SECONDS_BETWEEN_STATES = 60
DESCRIPTION = "pretraining.json"
# What can be chosen of a BERT; the rest of its configuration follows from the tokenizer, or decides nothing.
CHOICES = (
    "attention_probs_dropout_prob",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "tie_word_embeddings",
    "type_vocab_size",
)


@dataclass(frozen=True)
class Pretraining:
    """All that decides the weights of a run but its seed.

    Attributes:
        data: a corpus of texts, as ``load_corpus`` takes it.
        configuration: how the BERT differs from transformers' ``BertConfig``, whose defaults are BERT-base, in
            any of ``CHOICES``.
        vocabulary: word pieces, at most.
        length: tokens of a sequence, [CLS] and [SEP] included.
        steps: how many batches it is trained on.
        batch: sequences of a batch.
        learning_rate: of AdamW at its peak; it rises and falls along straight lines, as BERT's does.
        warmup: the share of the steps in which it rises.
        weight_decay: of matrices; biases and norms have none.
        checkpoints: the steps that are kept; as the MultiBERTs' unless told, see :func:`spread`.
    """

    data: str = "wikipedia:paragraphs"
    configuration: dict = field(default_factory=dict)
    vocabulary: int = 8000
    length: int = 64
    steps: int = 2000
    batch: int = 32
    learning_rate: float = 5e-4
    warmup: float = 0.05
    weight_decay: float = 0.01
    checkpoints: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("length", 8), ("vocabulary", len(SPECIAL))):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise AnalysisError(f"{name} is {value}: give a whole number, {least} or more")
        if not (0 < self.learning_rate < math.inf and 0 <= self.warmup < 1 and 0 <= self.weight_decay < math.inf):
            raise AnalysisError(
                f"learning_rate {self.learning_rate}, warmup {self.warmup}, weight_decay {self.weight_decay}: "
                f"give a rate above 0, a share of the steps below 1, and a decay of 0 or more"
            )
        if wrong := [step for step in self.kept if not 0 <= step <= self.steps]:
            raise AnalysisError(f"checkpoint {wrong[0]} lies outside of the run: give steps from 0 to {self.steps}")

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps whose weights are kept, in order."""
        return spread(self.steps) if self.checkpoints is None else tuple(sorted(set(self.checkpoints)))

    def told(self) -> dict:
        """All that decides the weights, as JSON has it."""
        settings = {**dataclasses.asdict(self), "checkpoints": list(self.kept), "version": VERSION}
        return json.loads(
            json.dumps({"settings": settings, "data": corpora.fingerprint(self.data), "versions": versions()})
        )


def spread(steps: int) -> tuple[int, ...]:
    """Steps spread as the MultiBERTs' intermediate checkpoints are: dense early.

    The start, every hundredth of the run up to a tenth of it, then every twentieth (Sellam et al. 2022: every
    20,000 of 2 million steps, and every 100,000 after 200,000).

    >>> spread(200)[:13]
    (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40)
    """
    percents = [*range(11), *range(15, 101, 5)]
    return tuple(sorted({round(steps * percent / 100) for percent in percents}))


def checkpoint_name(seed: int | str, step: int | str) -> str:
    """The name of a checkpoint, after those of the MultiBERTs.

    >>> checkpoint_name(0, 200)
    'seed_0-step_200'
    """
    return f"seed_{seed}-step_{step}"


def trained_whole(folder: Path, seed: int) -> bool:
    """Whether the seed of the run in the folder has reached its last step."""
    return _table(folder, seed).exists() and not _state(folder, seed).exists()


def _table(folder: Path, seed: int) -> Path:
    return folder / f"seed_{seed}.csv"


def _state(folder: Path, seed: int) -> Path:
    return folder / f".seed_{seed}.pt"


def pretrain(
    folder: Path | str,
    settings: Pretraining | None = None,
    *,
    seeds: Sequence[int] = (0,),
    workers: int = 1,
    device: str | None = None,
    progress: bool = True,
) -> Path:
    """Pretrain a BERT by masked language modelling, once a seed, and keep checkpoints along the way.

    The tokenizer is trained on the corpus first. Texts follow one another, [SEP] between them, and are cut into
    sequences of one length, so that none is padded. A step's batch, masks and dropout depend on the seed and the
    number of the step alone: a run that was interrupted, or killed, goes on where it was and ends with the same
    weights as one that was not. On a CPU each seed runs on one thread; on a GPU that has it, in bfloat16.

    The folder then holds, for each seed s and each step t that is kept, a model ``seed_s-step_t`` (configuration,
    safetensors and tokenizer) that ``load_model`` reads; ``seed_s.csv``, with columns step, tokens (read until then),
    learning_rate, loss (nats a masked token, of the batch; missing where none is masked) and held_out (the same of
    texts held out, at the steps kept); and ``pretraining.json``: settings, data and versions.

    Args:
        folder: where the run is, or is to be; a run that is done is not trained again.
        settings: of the run.
        seeds: of the initial weights, the order of the data, masks and dropout.
        workers: how many seeds are trained at once, each in a process of its own.
        device: ``cpu``, ``cuda``, ...; a GPU where there is one, unless told.
        progress: whether to show a bar with the loss and tokens per second, on a terminal.

    Returns:
        The folder.

    Raises:
        AnalysisError: the folder holds a run with other settings, data or versions; there is too little text; the
            loss is not finite any more.
    """
    folder, settings = Path(folder), settings or Pretraining()
    if not seeds or min(seeds) < 0 or workers < 1:
        raise AnalysisError(f"seeds {list(seeds)} and workers {workers}: give one seed or more, and one worker or more")
    device = devices.usable(device)
    _configuration(settings, settings.vocabulary)
    told = settings.told()
    # Nothing is written before all that can be refused is known: of the data, how much text there is.
    tokenizer = None if _holds(folder, told) else _tokenizer(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnalysisError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    with alone(_lock(folder, "pretraining")):
        if not _holds(folder, told):
            tokenizer.save_pretrained(folder / ".tokenizer")
            write(folder / DESCRIPTION, json.dumps(told, indent=1) + "\n")
    work = [(folder, settings, seed, device, progress) for seed in dict.fromkeys(seeds)]
    if workers == 1 or len(work) == 1:
        for arguments in work:
            _train(*arguments)
    else:
        try:
            with processes.pool(min(workers, len(work)), threads=1) as pool:
                for training in [pool.submit(_train, *arguments) for arguments in work]:
                    training.result()
        except BrokenProcessPool:
            raise AnalysisError(
                "a worker died (out of memory?): use fewer workers; what is finished is kept, and the same call goes on"
            ) from None
    return folder


def _lock(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock"


def _holds(folder: Path, told: dict) -> bool:
    """Whether the run is in the folder; the folder is empty otherwise.

    Raises:
        AnalysisError: it is not, or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise AnalysisError(f"{folder} is a file: give a folder")
    if (folder / DESCRIPTION).is_file():
        try:
            theirs = _flat(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AnalysisError(f"{folder / DESCRIPTION} is damaged: give another folder") from error
        for name, value in _flat(told).items():
            if value != theirs.get(name):
                raise AnalysisError(
                    f"{folder} holds a run with another {name} ({theirs.get(name)}, not {value}): give another folder"
                )
        return True
    left = sorted(path.name for path in folder.glob("*") if not path.name.startswith("."))
    if left:
        raise AnalysisError(f"{folder} holds {left[0]} and no run: give an empty folder, or a new one")
    return False


def _flat(told: dict) -> dict:
    return {**told["settings"], "content of data": told["data"], **told["versions"]}


def _tokenizer(settings: Pretraining) -> transformers.BertTokenizer:
    tokenizer = word_pieces(_texts(settings.data), settings.vocabulary)
    _sequences(tokenizer, settings)
    return tokenizer


def _texts(data: str) -> list[str]:
    corpus = corpora.load_corpus(data)
    if corpus.kind != "text":
        raise AnalysisError(f"{data} holds {corpora.PLURAL[corpus.kind]}: give texts to pretrain on")
    return corpus.texts


def _sequences(
    tokenizer: transformers.BertTokenizer, settings: Pretraining
) -> tuple[Int[Tensor, "sequence token"], Int[Tensor, "sequence token"]]:
    """The texts in sequences of one length, those to train on and those held out."""
    texts = tokenizer(_texts(settings.data), add_special_tokens=False)["input_ids"]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train, held_out = (_cut(part, tokenizer, settings.length) for part in (texts, held_out))
    if len(train) < settings.batch or not len(held_out):
        raise AnalysisError(
            f"{settings.data} makes {len(train)} sequences of {settings.length} tokens to train on and {len(held_out)} "
            f"to hold out: give more text, shorter sequences, or a batch below {settings.batch}"
        )
    return train, held_out[:HELD_OUT_SEQUENCES]


def _cut(texts: list[list[int]], tokenizer: transformers.BertTokenizer, length: int) -> Int[Tensor, "sequence token"]:
    stream = [token for text in texts for token in (*text, tokenizer.sep_token_id)]
    inside = length - 2
    rows = torch.tensor(stream[: len(stream) // inside * inside]).reshape(-1, inside)
    edge = rows.new_ones(len(rows), 1)
    return torch.cat([edge * tokenizer.cls_token_id, rows, edge * tokenizer.sep_token_id], 1)


class _Data:
    """The batches of a run: of every step, whatever came before it."""

    def __init__(self, folder: Path, settings: Pretraining, seed: int):
        self.tokenizer = transformers.BertTokenizer.from_pretrained(folder / ".tokenizer")
        self.train, self.held_out = _sequences(self.tokenizer, settings)
        self.batch, self.seed = settings.batch, seed
        self.order = lru_cache(1)(self._order)

    def _order(self, epoch: int) -> Int[Tensor, " sequence"]:
        return torch.randperm(len(self.train), generator=torch.Generator().manual_seed(drawn_seed(self.seed, 1, epoch)))

    def step(self, step: int) -> Int[Tensor, "sequence token"]:
        """The sequences of a step, counted from 1; what does not fill a batch waits for another epoch."""
        epoch, place = divmod(step - 1, len(self.train) // self.batch)
        return self.train[self.order(epoch)[place * self.batch : (place + 1) * self.batch]]

    def masked(self, ids: Int[Tensor, "sequence token"]) -> tuple[Tensor, Tensor]:
        return mask_tokens(ids, len(SPECIAL), len(self.tokenizer), self.tokenizer.mask_token_id)


def _train(folder: Path, settings: Pretraining, seed: int, device: str, progress: bool) -> None:
    with alone(_lock(folder, f"seed_{seed}")):
        if not trained_whole(folder, seed):
            transformers.utils.logging.disable_progress_bar()
            with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), one_thread():
                _Run(folder, settings, seed, device, progress).go()


def _configuration(settings: Pretraining, words: int) -> transformers.BertConfig:
    """Of the model; as many positions as are trained, unless told: the embedding of a later one would stay random.

    Raises:
        AnalysisError: a name that is none of ``CHOICES``, or values that make no BERT.
    """
    told = {"max_position_embeddings": settings.length, **settings.configuration}
    for name, value in told.items():
        if name not in CHOICES:
            raise AnalysisError(f"{name} of a BERT cannot be chosen: {near_names(name, CHOICES)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise AnalysisError(f"{name} is {value}: give a number")
    try:
        config = transformers.BertConfig(vocab_size=words, pad_token_id=SPECIAL.index("[PAD]"), **told)
        # Without memory for its weights.
        with torch.device("meta"):
            transformers.BertForMaskedLM(config)
    except Exception as error:
        # Configurations and layers validate themselves, each with errors of its own.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AnalysisError(
            f"the configuration {settings.configuration} makes no BERT ({reason}): change it"
        ) from error
    if config.num_hidden_layers < 1:
        raise AnalysisError(f"num_hidden_layers is {config.num_hidden_layers}: give 1 or more")
    if config.max_position_embeddings < settings.length:
        raise AnalysisError(
            f"max_position_embeddings {config.max_position_embeddings} is below length {settings.length}: "
            f"leave it out of the configuration, or give shorter sequences"
        )
    return config


class _Run:
    """One seed of a run: its model, its optimizer and how far they are."""

    def __init__(self, folder: Path, settings: Pretraining, seed: int, device: str, progress: bool):
        self.folder, self.settings, self.seed, self.device, self.progress = folder, settings, seed, device, progress
        self.state, self.table = _state(folder, seed), _table(folder, seed)
        self.log: list[list[float | None]] = []  # The rows of the table.

    def go(self) -> None:
        self._start()
        size = self.settings.batch * self.settings.length
        done, saved = int(self.log[-1][0]), time.monotonic()
        shown = None if self.progress else True  # With None, no bar where nobody looks at a terminal.
        counts = {"initial": done * size, "total": self.settings.steps * size, "unit": "token", "unit_scale": True}
        with tqdm(desc=f"seed {self.seed}", disable=shown, **counts) as bar:
            for step in range(done + 1, self.settings.steps + 1):
                self._step(step)
                bar.set_postfix(step=step, loss=self.log[-1][3], refresh=False)
                bar.update(size)
                if step in self.settings.kept:
                    self._keep(step)
                if step in self.settings.kept or time.monotonic() - saved > SECONDS_BETWEEN_STATES:
                    self._save()
                    saved = time.monotonic()
        self._save()
        self.state.unlink()

    def _start(self) -> None:
        for left in self.folder.glob(f".unfinished-seed_{self.seed}-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        self.data = _Data(self.folder, self.settings, self.seed)
        torch.manual_seed(drawn_seed(self.seed, 0))
        self.model = transformers.BertForMaskedLM(_configuration(self.settings, len(self.data.tokenizer))).to(
            self.device
        )
        self.adam = optimizer(self.model, self.settings.learning_rate, self.settings.weight_decay)
        rising = round(self.settings.warmup * self.settings.steps)
        # One beyond the last step, so that this one, too, has a rate above zero.
        self.schedule = transformers.get_linear_schedule_with_warmup(self.adam, rising, self.settings.steps + 1)
        if self.state.is_file():
            state = torch.load(self.state, map_location=self.device, weights_only=True)
            self.log = state["log"]
            for part in ("model", "adam", "schedule"):
                getattr(self, part).load_state_dict(state[part])
        else:
            self.log = [[0, 0, 0.0, None, None]]
            if 0 in self.settings.kept:
                self._keep(0)

    def _step(self, step: int) -> None:
        torch.manual_seed(drawn_seed(self.seed, 2, step))
        rate = self.schedule.get_last_lr()[0]
        losses = self._losses(self.data.step(step))
        value = self._mean(losses, step)
        self.adam.zero_grad()
        (losses.sum() / max(len(losses), 1)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.schedule.step()
        self.log.append([step, step * self.settings.batch * self.settings.length, rate, value, None])

    def _losses(self, sequences: Int[Tensor, "sequence token"]) -> Float[Tensor, " predicted"]:
        """Cross-entropy of each masked token, in nats; the vocabulary is reached at these alone."""
        ids, labels = (part.to(self.device) for part in self.data.masked(sequences))
        predicted = labels != IGNORED
        bfloat16 = self.device.startswith("cuda") and torch.cuda.is_bf16_supported()
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=bfloat16):
            hidden = self.model.bert(input_ids=ids).last_hidden_state
            logits = self.model.cls(hidden[predicted])
        return functional.cross_entropy(logits.float(), labels[predicted], reduction="none")

    def _mean(self, losses: Float[Tensor, " predicted"], step: int) -> float | None:
        """Their mean; None where nothing was masked, which may be in a very small batch."""
        if not len(losses):
            return None
        if not math.isfinite(value := losses.mean().item()):
            raise AnalysisError(
                f"the loss of step {step} is {value}: give another folder and a learning rate below "
                f"{self.settings.learning_rate:g}"
            )
        return value

    def _keep(self, step: int) -> None:
        """Keep the model as it is; see how well it does on the texts held out, with the same masks at every step."""
        self.model.eval()
        torch.manual_seed(0)
        with torch.inference_mode():
            losses = [self._losses(part) for part in self.data.held_out.split(self.settings.batch)]
        self.model.train()
        self.log[-1][-1] = self._mean(torch.cat(losses), step)
        if not (whole := self.folder / checkpoint_name(self.seed, step)).is_dir():
            unfinished = self.folder / f".unfinished-{whole.name}"
            self.model.save_pretrained(unfinished)
            self.data.tokenizer.save_pretrained(unfinished)
            unfinished.rename(whole)

    def _save(self) -> None:
        """From here a run that is killed goes on."""
        parts = {part: getattr(self, part).state_dict() for part in ("model", "adam", "schedule")}
        save_state(self.state, {"log": self.log, **parts})
        rows = pd.DataFrame(self.log, columns=["step", "tokens", "learning_rate", "loss", "held_out"])
        write(self.table, rows.to_csv(index=False))
