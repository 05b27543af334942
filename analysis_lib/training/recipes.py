"""Small models trained on this machine in a minute or two each, and kept: ``trained("digits-vit")`` is a folder."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm import tqdm

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import Maker, register
from analysis_lib.training import loop, tasks

# Counts changes of how models are trained that the settings do not show.
VERSION = 2
SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "seed")


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
        seed: of the initial weights, the order of the data, dropout and masks.
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
    """The folder of a trained model. The first call trains it, with a progress bar on a terminal.

    The folder is what ``save_pretrained`` makes: configuration, safetensors weights, and a tokenizer, image processor
    or feature extractor. In it, ``training.json`` says how the model was trained, and its score on held-out data with
    a 95 % interval. The same settings and versions give the same weights on one machine. If several processes ask for
    a model at once, one trains it. The caller's random numbers do not change.

    Args:
        name: one of ``RECIPES``, with any of ``SETTINGS`` changed as in ``digits-vit@steps=50@seed=1``.

    Raises:
        AnalysisError: there is no such recipe or setting, or the data are missing.
    """
    base, recipe, key = _recipe(name)
    folder = packages.derived_folder(key, base)
    if folder.is_dir():
        return folder
    with loop.alone(folder.with_name(f"{folder.name}.lock")):
        for left in folder.parent.glob(f"unfinished-{folder.name}-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        return packages.derived(key, base, lambda unfinished: _train(base, recipe, unfinished))


def model_identity(name: str) -> str:
    """A short text that changes when the model of ``trained(name)`` would. Trains nothing."""
    base, _, key = _recipe(name)
    return f"{base}@{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def held_out_scores(names: Iterable[str]) -> pd.DataFrame:
    """How well each model trained here does on held-out data. Trains those that have not been trained yet.

    Args:
        names: as ``load_model`` takes them; models that are not trained here have no row.

    Returns:
        Columns model, parameters (their number), steps (of training), metric, score, ci_low, ci_high and baseline, see
        :class:`HeldOutScore`.
    """
    columns = ["model", "parameters", "steps", "metric", "score", "ci_low", "ci_high", "baseline"]
    rows = []
    for name in filter(_is_recipe, names):
        record = json.loads((trained(name) / "training.json").read_text(encoding="utf-8"))
        score, steps = record["score"], record["settings"]["steps"]
        shown = {"score": score["value"], "metric": score["metric"].replace("_", " ")}
        rows.append({"model": name, "parameters": record["parameters"], "steps": steps, **score, **shown})
    return pd.DataFrame(rows, columns=columns)


def _is_recipe(name: str) -> bool:
    return name.partition("@")[0] in RECIPES


def _recipe(name: str) -> tuple[str, Recipe, str]:
    """The recipe's own name, the recipe with its changes, and all that decides the weights."""
    base = name.partition("@")[0]
    if not (recipe := loop.named_settings(name, RECIPES, SETTINGS)):
        raise AnalysisError(f"there is no recipe named {name}: {near_names(name, RECIPES)}")
    data = getattr(tasks, recipe.task).data_identity()
    return base, recipe, json.dumps([base, recipe.settings(), data, loop.versions()], sort_keys=True)


def _train(name: str, recipe: Recipe, folder: Path) -> None:
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
        # With None, tqdm shows a bar on a terminal only.
        for _ in tqdm(range(recipe.steps), name, unit="step", disable=None):
            loop.descend(model(**next(batches)).loss, model, schedule)
        score = task.evaluate(model)
    model.save_pretrained(folder)
    task.preprocessor.save_pretrained(folder)
    record = {
        "recipe": name,
        "description": recipe.description,
        "settings": recipe.settings(),
        "data": task.data_identity(),
        "parameters": model.num_parameters(),
        "versions": loop.versions(),
        "score": dataclasses.asdict(score),
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


RECIPES = loop.shipped_settings("recipes.yml", Recipe)

_DESCRIPTIONS = {name: f"{recipe.description} (trained here, once)" for name, recipe in RECIPES.items()}
register(Maker(_DESCRIPTIONS, _is_recipe, trained, model_identity))
