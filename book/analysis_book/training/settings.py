"""Named settings of trainings, and the folder of a training. It imports no torch."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from analysis_lib import corpora, files
from analysis_lib.errors import (
    AnalysisError,
    decimal_number,
    near_names,
    require_flag,
    require_number,
    require_seed,
    require_text,
    require_whole,
    shown,
    whole_number,
)
from analysis_lib.models.folders import weights_identity

# They count changes of how models are trained that the settings do not show.
PRETRAINING = 2
RECIPE = 2
# Of a vocabulary of word pieces, in their order.
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Settings = TypeVar("Settings")


# --- Settings -------------------------------------------------------------------------------------


def named_settings(name: str, known: Mapping[str, Settings]) -> Settings | None:
    """The settings that a name stands for: ``digits-vit@steps=50`` is ``digits-vit`` with 50 steps.

    They are None if the name is not a known one. A name may change the settings that are numbers.
    """
    base, *changes = name.split("@")
    if base not in known:
        return None
    fields = dataclasses.fields(known[base])
    choices = [setting.name for setting in fields if setting.type in (int, float)]
    given = {}
    for change in changes:
        setting, _, value = change.partition("=")
        if setting not in choices:
            raise AnalysisError(f"{base} has no setting {setting}: {near_names(setting, choices)}")
        if setting in given:
            raise AnalysisError(f"{name} sets {setting} twice: give it once")
        try:
            read = decimal_number if "." in value or "e" in value else whole_number
            given[setting] = read(value)
        except ValueError:
            raise AnalysisError(
                f"{name}: {change!r} is not a setting: write {base}@steps=50@seed=1"
            ) from None
    return dataclasses.replace(known[base], **given)


def require_sizes(settings: object, **least: int) -> None:
    """Refuse settings that are not whole numbers, or lie below the least that makes sense."""
    for name, bound in least.items():
        size = require_whole(name, getattr(settings, name), bound)
        # As a number of Python's own, which JSON can hold; most settings are frozen.
        object.__setattr__(settings, name, size)


def require_rates(settings: object) -> None:
    """Refuse a learning rate, or a weight decay, with which nothing can be trained."""
    require_number("learning_rate", settings.learning_rate, above=0)
    require_number("weight_decay", settings.weight_decay, least=0)


def versions() -> dict[str, str]:
    """The versions of the packages on which the weights depend."""
    return {
        name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")
    }


@dataclass(frozen=True)
class Recipe:
    """The settings of a small model.

    Attributes:
        description: a line for the reader.
        task: what it learns, a class of :mod:`analysis_book.training.tasks`.
        data: the corpus to train on, as ``load_corpus`` takes it.
        model_type: the architecture, as transformers names it.
        configuration: changes to its defaults, besides those that the data decide.
        steps: number of batches.
        batch: items per batch.
        learning_rate: the peak of AdamW's; it rises over the first tenth of the steps and falls
            along a cosine.
        weight_decay: of matrices; biases and norms have none.
        seed: of the initial weights, the order of the data, and dropout.
        task_options: arguments of the task.
    """

    description: str
    task: str
    data: str
    model_type: str
    configuration: dict
    steps: int = 600
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    task_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_sizes(self, steps=1, batch=1)
        require_sizes(self, seed=0)
        require_rates(self)

    def settings(self) -> dict:
        """All that decides the weights, except data and versions."""
        settings = dataclasses.asdict(self)
        del settings["description"]
        del settings["data"]
        return {**settings, "version": RECIPE}


@dataclass(frozen=True)
class Pretraining:
    """All that decides the weights of a run, except its seed.

    Attributes:
        data: a corpus of texts, as ``load_corpus`` takes it.
        configuration: changes to transformers' defaults of the architecture; those of ``bert`` are
            BERT-base's.
        model_type: the architecture, as transformers names it: ``bert``, or another masked language
            model.
        vocabulary: the most word pieces.
        cased: whether capital letters, and accents, are kept.
        tokenizer: the name or folder of a model whose tokenizer is taken; where none is given, one
            is learned.
        length: tokens of a sequence, [CLS] and [SEP] included.
        steps: number of batches.
        batch: sequences per batch.
        learning_rate: the peak of AdamW's; it rises and falls linearly, as BERT's does.
        warmup: the share of the steps in which the rate rises.
        weight_decay: of matrices; biases and norms have none.
        also_kept: steps at which the weights are kept besides those of :func:`spread`; those
            beyond the last step are none.
    """

    data: str = "wikipedia:paragraphs"
    configuration: dict = field(default_factory=dict)
    model_type: str = "bert"
    vocabulary: int = 8000
    cased: bool = False
    tokenizer: str = ""
    length: int = 64
    steps: int = 2000
    batch: int = 32
    learning_rate: float = 5e-4
    warmup: float = 0.05
    weight_decay: float = 0.01
    also_kept: Sequence[int] = ()

    def __post_init__(self) -> None:
        require_text("data", self.data, "a name of `datasets`, file.csv:COLUMN or lines.txt")
        require_text("model_type", self.model_type, "an architecture, as transformers names it")
        if not isinstance(self.configuration, Mapping):
            given = shown(self.configuration)
            raise AnalysisError(
                f'configuration is {given}: give settings, as in {{"hidden_size": 192}}'
            )
        if not isinstance(self.tokenizer, str):
            raise AnalysisError(
                f"tokenizer is {shown(self.tokenizer)}: give a name or folder, or leave it out"
            )
        require_flag("cased", self.cased)
        for name in ("vocabulary", "cased"):
            if self.tokenizer and getattr(self, name) != getattr(Pretraining, name):
                raise AnalysisError(
                    f"{name} is of a tokenizer that is learned, and {self.tokenizer} has one: "
                    "leave it out"
                )
        require_sizes(self, steps=1, batch=1, length=8, vocabulary=len(SPECIAL))
        require_rates(self)
        if not isinstance(self.also_kept, Sequence) or isinstance(self.also_kept, str):
            raise AnalysisError(
                f"also_kept is {shown(self.also_kept)}: give a list of steps, as in [1, 2, 5]"
            )
        for step in self.also_kept:
            require_whole("a step of also_kept", step, 1)
        if require_number("warmup", self.warmup, least=0) >= 1:
            raise AnalysisError(
                f"warmup is {self.warmup}: give a share of the steps, from 0 to below 1"
            )

    @property
    def checkpoints(self) -> list[int]:
        """The steps at which the weights are kept, in order."""
        further = {step for step in self.also_kept if step <= self.steps}
        return sorted(further.union(spread(self.steps)))

    def identity(self) -> dict:
        """All that decides the weights of a run, except its seed: settings, data and versions."""
        settings = dataclasses.asdict(self)
        # Settings of a later version: at their defaults, a run is what it was without them.
        for name in ("cased", "tokenizer"):
            if not settings[name]:
                del settings[name]
        del settings["also_kept"]
        settings["checkpoints"] = self.checkpoints
        settings["version"] = PRETRAINING
        identity = {"settings": settings, "data": corpora.data_identity(self.data)}
        if self.tokenizer:
            identity["tokenizer"] = weights_identity(self.tokenizer)
        identity["versions"] = versions()
        return identity


def spread(steps: int) -> list[int]:
    """The steps at which a run keeps its weights: dense early, like those of the MultiBERTs.

    They are the start, every hundredth of the run up to a tenth of it, and every twentieth after
    that (Sellam et al. 2022: of 2 million steps every 20,000, and every 100,000 after 200,000).

    >>> spread(200)[:13]
    [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40]
    """
    percents = [*range(11), *range(15, 101, 5)]
    return sorted({round(steps * percent / 100) for percent in percents})


RECIPES = files.entries("recipes.yml", Recipe)
RUNS = files.entries("runs.yml", Pretraining)


# --- Folders --------------------------------------------------------------------------------------

# Of a model of a recipe.
RECORD = "training.json"
# Of a pretraining run: what it was made from, the columns of its losses, and the losses of
# counting.
DESCRIPTION = "pretraining.json"
COLUMNS = ("step", "tokens", "learning_rate", "loss", "held_out")
BASELINES = "baselines.csv"


def table_path(folder: Path, seed: int) -> Path:
    """The losses of a seed of the run in the folder."""
    return folder / f"seed_{seed}.csv"


def left_by(seed: int, steps: Iterable[int]) -> list[str]:
    """Files of a seed of a run, of which one is in every folder; the losses come first."""
    configurations = [f"seed_{seed}-step_{step}/config.json" for step in steps]
    return [f"seed_{seed}.csv", *configurations]


def holds(description: Path, identity: dict) -> bool:
    """True if the folder of a description holds the training with this identity.

    If it does not, the folder is empty but for hidden files, or does not exist.
    """
    folder = description.parent
    if folder.exists() and not folder.is_dir():
        raise AnalysisError(f"{folder} is a file: give a folder")
    if not description.is_file():
        visible = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
        if visible:
            raise AnalysisError(
                f"{folder} holds {min(visible)} and no training: give an empty folder, or a new one"
            )
        return False
    import pandas as pd

    def flat(nested: dict) -> dict:
        # Settings by their path, as in settings.steps.
        (row,) = pd.json_normalize(nested).to_dict("records")
        return row

    theirs = flat(files.read_json(description, "give another folder"))
    ours = flat(json.loads(json.dumps(identity)))
    for name in ours | theirs:
        if theirs.get(name) != ours.get(name):
            raise AnalysisError(
                f"{folder} holds a training whose {name} is {theirs.get(name)}, not "
                f"{ours.get(name)}: give another folder"
            )
    return True


def finished(table: Path) -> bool:
    """True if the training that writes this table has come to its end."""
    return table.exists() and not state_path(table).exists()


def seal_path(folder: Path, name: str) -> Path:
    """The hidden file of a seal of a training, see :func:`analysis_lib.store.seal`."""
    return folder / f".{name}.sha256"


def state_path(table: Path) -> Path:
    """The hidden file from which the training that writes this table resumes."""
    return table.with_name(f".{table.stem}.pt")


def require_seeds(name: str, values: object) -> list[int]:
    """One or more distinct seeds, in order."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise AnalysisError(
            f"{name} is {shown(values)}: give a list of whole numbers, as in [0, 1]"
        )
    seeds = [require_seed(f"one of {name}", seed) for seed in values]
    if not seeds:
        raise AnalysisError(f"{name} is empty: give one whole number or more")
    return list(dict.fromkeys(seeds))
