"""Small models, each trained in a minute or two: ``trained("digits-vit")`` is a folder."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import transformers

from analysis_lib import corpora
from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import Maker, register
from analysis_lib.training import loop, tasks

# Counts changes of how models are trained that the settings do not show.
VERSION = 2
SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "seed")
RECORD = "training.json"
COLUMNS = ("model", "parameters", "steps", "metric", "score", "ci_low", "ci_high", "baseline")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        description: a line for the reader.
        task: what it learns, a class of :mod:`analysis_lib.training.tasks`.
        model_type: the architecture, as transformers names it.
        configuration: changes to its defaults, besides those that the data decide.
        steps: number of batches.
        batch: items per batch.
        learning_rate: the peak of AdamW's; it rises over the first tenth of the steps and falls along a cosine.
        weight_decay: of matrices; biases and norms have none.
        seed: of the initial weights, the order of the data, and dropout.
        task_options: arguments of the task.
    """

    description: str
    task: str
    model_type: str
    configuration: dict
    steps: int = 600
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    task_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        loop.require_whole(self, steps=1, batch=1)

    def settings(self) -> dict:
        """All that decides the weights, except data and versions."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name != "description"}
        return {**kept, "version": VERSION}


def trained(name: str) -> Path:
    """The folder of a trained model: the one in ``data/models``, or else it is trained once and kept.

    The folder is what ``save_pretrained`` makes: configuration, safetensors weights, and a tokenizer or image
    processor. In it, ``training.json`` says how the model was trained, and its score on held-out data with a 95 %
    interval. The same settings and versions give the same weights on one machine. If several processes ask for a model
    at once, one trains it. The caller's random numbers do not change.

    Args:
        name: one of ``RECIPES``, with any of ``SETTINGS`` changed as in ``digits-vit@steps=50@seed=1``.

    Raises:
        AnalysisError: there is no such recipe or setting, or the data are missing.
    """
    recipe, identity, shipped = _recipe(name)
    key, base = _key(identity), identity["recipe"]
    folder = shipped or packages.derived_folder(key, base)
    if folder.is_dir():
        return folder
    with loop.alone(folder.with_name(f"{folder.name}.lock")):
        for left in folder.parent.glob(f"unfinished-{folder.name}-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        return packages.derived(key, base, lambda unfinished: _train(recipe, identity, unfinished))


def train(name: str, folder: Path) -> pd.DataFrame:
    """Train a model anew and write its folder, which must be new or empty, whole or not at all.

    Returns:
        As :func:`held_out_scores`: its score, and that of the shipped model of the recipe.

    Raises:
        AnalysisError: what :func:`trained` raises; or the folder is not empty, or cannot be written.
    """
    recipe, identity, _ = _recipe(name)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise AnalysisError(f"{folder} is there already, and is no empty folder: give another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as scratch:
            _train(recipe, identity, unfinished := Path(scratch) / "model")
            unfinished.rename(folder)
    except OSError as error:
        raise AnalysisError(f"{folder} cannot be written ({error.strerror or error}): give another folder") from error
    base = identity["recipe"]
    return _scores({name: folder, f"{base} (shipped)": packages.data_directory() / "models" / base})


def model_identity(name: str) -> str:
    """A short text that changes when the model of ``trained(name)`` would. Trains nothing."""
    _, identity, shipped = _recipe(name)
    hashed = loop.files_hash(shipped) if shipped else hashlib.sha256(_key(identity).encode()).hexdigest()[:12]
    return f"{identity['recipe']}@{hashed}"


def held_out_scores(names: Iterable[str]) -> pd.DataFrame:
    """How well each model trained here does on held-out data. Trains those that have not been trained yet.

    Args:
        names: as ``load_model`` takes them; models that are not trained here have no row.

    Returns:
        Columns model, parameters (their number), steps (of training), metric, score, ci_low, ci_high and baseline, see
        :class:`HeldOutScore`.
    """
    return _scores({name: trained(name) for name in filter(_is_recipe, names)})


def _scores(folders: dict[str, Path]) -> pd.DataFrame:
    rows = []
    for name, record in ((name, _record(folder)) for name, folder in folders.items() if (folder / RECORD).is_file()):
        score = {**record["score"], "score": record["score"]["value"]}
        score["metric"] = score["metric"].replace("_", " ")
        rows.append({"model": name, "parameters": record["parameters"], "steps": record["settings"]["steps"], **score})
    return pd.DataFrame(rows, columns=COLUMNS)


def _record(folder: Path) -> dict:
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def _is_recipe(name: str) -> bool:
    return name.partition("@")[0] in RECIPES


def _recipe(name: str) -> tuple[Recipe, dict, Path | None]:
    """The recipe with its changes; all that decides the weights but the versions; the folder if that is shipped."""
    if not (recipe := loop.named_settings(name, RECIPES, SETTINGS)):
        raise AnalysisError(f"there is no recipe named {name}: {near_names(name, RECIPES)}")
    base, data = name.partition("@")[0], corpora.data_identity(getattr(tasks, recipe.task).data)
    identity = {"recipe": base, "settings": recipe.settings(), "data": data}
    folder = packages.data_directory() / "models" / base
    shipped = (folder / RECORD).is_file() and identity.items() <= _record(folder).items()
    return recipe, identity, folder if shipped else None


def _key(identity: dict) -> str:
    return json.dumps([identity, loop.versions()], sort_keys=True)


def _train(recipe: Recipe, identity: dict, folder: Path) -> None:
    # Otherwise it warns that GPT-2's loss is the usual one, and shows a bar for the one file that it saves.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = getattr(tasks, recipe.task)(**recipe.task_options)
    config = transformers.AutoConfig.for_model(recipe.model_type, **recipe.configuration, **task.sizes)
    with loop.isolated():
        # Not torch.manual_seed, which also seeds GPUs, whose state is not restored.
        torch.default_generator.manual_seed(recipe.seed)
        model = task.head.from_config(config, dtype=torch.float32)
        adam = loop.optimizer(model, recipe.learning_rate, recipe.weight_decay)
        schedule = transformers.get_cosine_schedule_with_warmup(adam, recipe.steps // 10, recipe.steps)
        batches = task.batches(recipe.batch)
        for _ in (bar := loop.bar(range(recipe.steps), identity["recipe"])):
            loss = model(**next(batches)).loss
            loop.descend(loss, model, schedule)
            bar.set_postfix(loss=loss.item(), refresh=False)
        score = task.evaluate(model)
    model.save_pretrained(folder)
    task.preprocessor.save_pretrained(folder)
    trained_as = {"parameters": model.num_parameters(), "versions": loop.versions(), "score": dataclasses.asdict(score)}
    record = {"description": recipe.description, **identity, **trained_as}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


RECIPES = loop.shipped_settings("recipes.yml", Recipe)

_DESCRIPTIONS = {name: f"{recipe.description} (trained here, shipped)" for name, recipe in RECIPES.items()}
register(Maker(_DESCRIPTIONS, _is_recipe, trained, model_identity))
