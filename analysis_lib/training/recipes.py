"""Small models trained on this machine in a minute or two each, and kept: ``trained("digits-vit")`` is a folder."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm import tqdm

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import Maker, register
from analysis_lib.training.loop import alone, isolated, named_settings, optimizer, require_whole, versions
from analysis_lib.training.tasks import Digits, HeldOutScore, MaskedTokens, NextToken, SpokenDigits, Task

# Counts changes of how models are trained that the settings do not show.
VERSION = 2
# The held-out score is measured at this many steps besides the start: evenly spread, the end included.
CURVE_POINTS = 4
SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "seed")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        description: a line for the reader.
        task: what it learns.
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
    task: type[Task]
    model_type: str
    configuration: dict
    steps: int = 600
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    task_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole(self, steps=1, batch=1)

    def settings(self) -> dict:
        """All that decides the weights, except data and versions."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name != "description"}
        return {**kept, "task": self.task.__name__, "version": VERSION}


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
    base, recipe = _recipe(name)
    key = _key(base, recipe)
    folder = packages.derived_folder(key, base)
    if folder.is_dir():
        return folder
    with _alone(folder):
        return packages.derived(key, base, lambda unfinished: _train(base, recipe, unfinished))


def model_identity(name: str) -> str:
    """A short text that changes when the model of ``trained(name)`` would. Trains nothing.

    Raises:
        AnalysisError: as ``trained``.
    """
    base, recipe = _recipe(name)
    return f"{base}@{hashlib.sha256(_key(base, recipe).encode()).hexdigest()[:12]}"


def held_out_scores(names: Iterable[str]) -> pd.DataFrame:
    """How well each model trained here does on held-out data. Trains those that have not been trained yet.

    Args:
        names: as ``load_model`` takes them; models that are not trained here have no row.

    Returns:
        Columns model, parameters (their number), steps (of training), metric, score, ci_low, ci_high and baseline, see
        :class:`HeldOutScore`.

    Raises:
        AnalysisError: as ``trained``.
    """
    rows = []
    for name in filter(_is_recipe, names):
        record = json.loads((trained(name) / "training.json").read_text(encoding="utf-8"))
        score = record["score"]
        numbers = [score[part] for part in ("value", "ci_low", "ci_high", "baseline")]
        metric = score["metric"].replace("_", " ")
        rows.append((name, record["parameters"], record["settings"]["steps"], metric, *numbers))
    columns = ["model", "parameters", "steps", "metric", "score", "ci_low", "ci_high", "baseline"]
    return pd.DataFrame(rows, columns=columns)


def _is_recipe(name: str) -> bool:
    return name.partition("@")[0] in RECIPES


def _recipe(name: str) -> tuple[str, Recipe]:
    if (found := named_settings(name, RECIPES, SETTINGS)) is None:
        raise AnalysisError(f"there is no recipe named {name}: {near_names(name, RECIPES)}")
    return found


def _key(name: str, recipe: Recipe) -> str:
    return json.dumps([name, recipe.settings(), recipe.task.data_identity(), versions()], sort_keys=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Train the model in this process only; others wait."""
    with alone(folder.with_name(f"{folder.name}.lock")):
        for left in folder.parent.glob(f"unfinished-{folder.name}-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _train(name: str, recipe: Recipe, folder: Path) -> None:
    # Otherwise it warns that GPT-2's loss is the usual one, and shows a bar for the one file that it saves.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = recipe.task(**recipe.task_options)
    config = transformers.AutoConfig.for_model(recipe.model_type, **recipe.configuration, **task.sizes)
    with isolated():
        # Not torch.manual_seed, which also seeds GPUs, whose state is not restored.
        torch.default_generator.manual_seed(recipe.seed)
        model = task.head.from_config(config, dtype=torch.float32)
        start = time.perf_counter()
        curve = _fit(name, model, task, recipe)
    model.save_pretrained(folder)
    task.preprocessor.save_pretrained(folder)
    _, score = curve[-1]
    record = {
        "recipe": name,
        "description": recipe.description,
        "settings": recipe.settings(),
        "data": task.data_identity(),
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions(),
        "score": dataclasses.asdict(score),
        "curve": [{"step": step, score.metric: at.value} for step, at in curve],
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _fit(name: str, model: transformers.PreTrainedModel, task: Task, recipe: Recipe) -> list[tuple[int, HeldOutScore]]:
    """Train the model in place; the held-out score at a few steps, the last one after training."""
    adam = optimizer(model, recipe.learning_rate, recipe.weight_decay)
    schedule = transformers.get_cosine_schedule_with_warmup(adam, recipe.steps // 10, recipe.steps)
    evaluated = {recipe.steps * i // CURVE_POINTS for i in range(1, CURVE_POINTS + 1)}
    curve = [(0, _evaluated(task, model))]
    batches = task.batches(recipe.batch)
    # With None, tqdm shows a bar on a terminal only.
    for step in tqdm(range(1, recipe.steps + 1), desc=name, unit="step", disable=None):
        loss = model(**next(batches)).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        if step in evaluated:
            curve.append((step, _evaluated(task, model)))
    return curve


def _evaluated(task: Task, model: transformers.PreTrainedModel) -> HeldOutScore:
    model.eval()
    with torch.inference_mode():
        score = task.evaluate(model)
    model.train()
    return score


_SIZES = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 384}
# No dropout: within one epoch no sentence comes twice, so that none can be learned by heart.
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 96, "n_layer": 6, "n_head": 4, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
_WAV2VEC2 = {
    **_SIZES,
    "conv_dim": [16, 32, 64, 64, 64, 64, 64],
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 8,
    "classifier_proj_size": 96,
    # Both draw from numpy's random numbers, not torch's.
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
_VIT = {"image_size": Digits.SIDE, "patch_size": 8, **_SIZES}
_RESNET = {"layer_type": "basic", "embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2]}
_CONVNEXT = {"hidden_sizes": [40, 80, 160], "depths": [2, 2, 2], "num_stages": 3, "patch_size": 4}


_TEXT = {"steps": 1000, "batch": 16, "learning_rate": 2e-3, "task_options": {"vocabulary": 2000}}

RECIPES = {
    "text-bert": Recipe(
        "a BERT of 6 blocks that fills in masked tokens of Wikipedia, with a vocabulary of 2,000 byte pairs",
        MaskedTokens,
        "bert",
        _BERT,
        **_TEXT,
    ),
    "text-gpt2": Recipe(
        "a GPT-2 of 6 blocks that continues sentences of Wikipedia, with a vocabulary of 2,000 byte pairs",
        NextToken,
        "gpt2",
        _GPT2,
        **_TEXT,
    ),
    "bytes-gpt2": Recipe(
        "a GPT-2 of 6 blocks that continues sentences of Wikipedia byte by byte",
        NextToken,
        "gpt2",
        _GPT2,
        **{**_TEXT, "steps": 800, "batch": 8, "task_options": {"vocabulary": 257}},
    ),
    "speech-wav2vec2": Recipe(
        "a wav2vec 2.0 of 6 blocks that hears which digit a synthetic voice says",
        SpokenDigits,
        "wav2vec2",
        _WAV2VEC2,
        steps=400,
        batch=16,
    ),
    "digits-vit": Recipe("a ViT of 6 blocks that reads handwritten digits", Digits, "vit", _VIT),
    "digits-resnet": Recipe("a ResNet of 6 blocks that reads handwritten digits", Digits, "resnet", _RESNET),
    "digits-convnext": Recipe(
        "a ConvNeXt of 6 blocks, with layer norm, that reads handwritten digits", Digits, "convnext", _CONVNEXT
    ),
}

_DESCRIPTIONS = {name: f"{recipe.description} (trained here, once)" for name, recipe in RECIPES.items()}
register(Maker(_DESCRIPTIONS, _is_recipe, trained, model_identity))
