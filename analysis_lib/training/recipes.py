"""Small models trained on this machine, each in a minute or two, and kept: ``trained("digits-vit")`` is a folder."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from tqdm import tqdm

from analysis_lib import corpora
from analysis_lib.corpora import packages, speech
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import Maker, register
from analysis_lib.training.loop import alone, one_thread, optimizer, split_settings, versions
from analysis_lib.training.tasks import Digits, MaskedTokens, NextToken, Score, SpokenDigits, Task

# Counts changes of how models are trained that the settings do not show.
VERSION = 2
# How often the curve takes the held-out score, the start and the end apart.
CURVE_POINTS = 4


Made = TypeVar("Made")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        description: a line for the reader.
        task: what it learns.
        data: identifies the data; neither reads nor makes them.
        model_type: the architecture, as transformers names it.
        configuration: what differs from its defaults, beside what the data decide.
        steps: how many batches it is trained on.
        batch: items of a batch.
        learning_rate: of AdamW at its peak; it rises over the first tenth and falls along a cosine.
        weight_decay: of matrices; biases and norms have none.
        seed: of the initial weights, the order of the data, dropout and masks.
        task_options: what the task is made with.
    """

    description: str
    task: type[Task]
    data: Callable[[], str]
    model_type: str
    configuration: dict
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 0.01
    seed: int = 0
    task_options: dict = field(default_factory=dict)

    def settings(self) -> dict:
        """All that decides the weights but the data and the versions, as JSON has it."""
        kept = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("description", "data")}
        return {**kept, "task": self.task.__name__, "version": VERSION}


SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "seed")


def trained(name: str, **settings: float) -> Path:
    """The folder of a trained model; the first call trains it, with a progress bar on a terminal.

    The folder is as ``save_pretrained`` makes it: configuration, safetensors weights and tokenizer, image processor
    or feature extractor. ``training.json`` beside them tells how it was trained, and its score on held-out data with
    a 95 % interval. The same settings and versions give the same weights on one machine. Of several processes
    that ask for a model at once, one trains it; the random numbers of the caller are left as they are.

    Args:
        name: one of ``RECIPES``.
        settings: any of ``steps``, ``batch``, ``learning_rate``, ``weight_decay`` and ``seed``, to differ from the
            recipe's.

    Raises:
        AnalysisError: there is no such recipe or setting, or the data are not there.
    """
    recipe = _recipe(name, settings)
    key = _key(name, recipe)
    folder = packages.derived_folder(key, name)
    if folder.is_dir():
        return folder
    with _alone(folder):
        return packages.derived(key, name, lambda unfinished: _train(name, recipe, unfinished))


def recipe_of(name: str) -> tuple[str, dict[str, float]] | None:
    """The recipe that a model's name means, and how it differs: of ``digits-vit@steps=50``, 50 steps.

    None where the model is not trained here.

    Raises:
        AnalysisError: a difference that is not a setting and a number.

    >>> recipe_of("digits-vit@steps=50@seed=1")
    ('digits-vit', {'steps': 50, 'seed': 1})
    """
    recipe, settings = split_settings(name)
    return (recipe, settings()) if recipe in RECIPES else None


def fingerprint(name: str, **settings: float) -> str:
    """A short text that changes when the model of ``trained(name, ...)`` would; trains nothing.

    Raises:
        AnalysisError: as ``trained``.
    """
    return f"{name}@{hashlib.sha256(_key(name, _recipe(name, settings)).encode()).hexdigest()[:12]}"


def _recipe(name: str, settings: dict[str, float]) -> Recipe:
    if name not in RECIPES:
        raise AnalysisError(f"there is no recipe named {name}: {near_names(name, RECIPES)}")
    for setting, value in settings.items():
        if setting not in SETTINGS:
            raise AnalysisError(f"a recipe has no setting {setting}: {near_names(setting, SETTINGS)}")
        if setting in ("steps", "batch") and value < 1:
            raise AnalysisError(f"{setting} is {value}: give 1 or more")
    return dataclasses.replace(RECIPES[name], **settings)


def _key(name: str, recipe: Recipe) -> str:
    return json.dumps([name, recipe.settings(), recipe.data(), versions()], sort_keys=True)


def _of_name(function: Callable[..., Made]) -> Callable[[str], Made]:
    """A function of a recipe and its settings as one of a name that says both."""

    def of_name(name: str) -> Made:
        recipe, settings = recipe_of(name)
        return function(recipe, **settings)

    return of_name


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While this process alone trains the model; others wait."""
    with alone(folder.with_name(f"{folder.name}.lock")):
        for left in folder.parent.glob(f"unfinished-{folder.name}-*"):  # by a training that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _train(name: str, recipe: Recipe, folder: Path) -> None:
    # It would warn that GPT-2's loss is the usual one, and count one file as it is saved.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = recipe.task(**recipe.task_options)
    config = transformers.AutoConfig.for_model(recipe.model_type, **recipe.configuration, **task.sizes)
    with torch.random.fork_rng(devices=[]), one_thread():
        # Not torch.manual_seed, which seeds GPUs, too: their state is not put back.
        torch.default_generator.manual_seed(recipe.seed)
        model = task.head.from_config(config, dtype=torch.float32)
        start = time.perf_counter()
        curve = _fit(name, model, task, recipe)
    model.save_pretrained(folder)
    task.preprocessor.save_pretrained(folder)
    score: Score = curve[-1][1]
    told = {
        "recipe": name,
        "description": recipe.description,
        "settings": recipe.settings(),
        "data": recipe.data(),
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions(),
        "score": dataclasses.asdict(score),
        "curve": [{"step": step, score.metric: at.value} for step, at in curve],
    }
    (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _fit(name: str, model: transformers.PreTrainedModel, task: Task, recipe: Recipe) -> list[tuple[int, Score]]:
    """Train the model in place; the held-out score at a few steps, the last one after training."""
    adam = optimizer(model, recipe.learning_rate, recipe.weight_decay)
    schedule = transformers.get_cosine_schedule_with_warmup(adam, recipe.steps // 10, recipe.steps)
    looked_at = {recipe.steps * i // CURVE_POINTS for i in range(1, CURVE_POINTS)}
    curve = [(0, _score(task, model))]
    batches = task.batches(recipe.batch)
    # With None, no bar where nobody looks at a terminal.
    for step in tqdm(range(1, recipe.steps + 1), desc=name, unit="step", disable=None):
        loss = model(**next(batches)).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        if step in looked_at or step == recipe.steps:
            curve.append((step, _score(task, model)))
    return curve


def _score(task: Task, model: transformers.PreTrainedModel) -> Score:
    model.eval()
    with torch.inference_mode():
        score = task.score(model)
    model.train()
    return score


def _wikipedia() -> str:
    return corpora.fingerprint("wikipedia:sentences")


def _digits() -> str:
    return corpora.fingerprint("digits:train")


# In one epoch over the text no sentence comes twice: there is nothing for dropout to keep from being learned by heart.
_BERT = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "n_embd": 96,
    "n_layer": 6,
    "n_head": 4,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
RECIPES = {
    "text-bert": Recipe(
        "a BERT of 6 blocks that fills in masked tokens of Wikipedia, with a vocabulary of 2,000 byte pairs",
        MaskedTokens,
        _wikipedia,
        "bert",
        _BERT,
        steps=1000,
        batch=16,
        learning_rate=2e-3,
        task_options={"vocabulary": 2000},
    ),
    "text-gpt2": Recipe(
        "a GPT-2 of 6 blocks that continues sentences of Wikipedia, with a vocabulary of 2,000 byte pairs",
        NextToken,
        _wikipedia,
        "gpt2",
        _GPT2,
        steps=1000,
        batch=16,
        learning_rate=2e-3,
        task_options={"vocabulary": 2000},
    ),
    "bytes-gpt2": Recipe(
        "a GPT-2 of 6 blocks that continues sentences of Wikipedia byte by byte",
        NextToken,
        _wikipedia,
        "gpt2",
        _GPT2,
        steps=800,
        batch=8,
        learning_rate=2e-3,
        task_options={"vocabulary": 257},
    ),
    "speech-wav2vec2": Recipe(
        "a wav2vec 2.0 of 6 blocks that hears which digit a synthetic voice says",
        SpokenDigits,
        speech.fingerprint,
        "wav2vec2",
        {
            "hidden_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 384,
            "conv_dim": [16, 32, 64, 64, 64, 64, 64],
            "feat_extract_norm": "layer",
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 8,
            "classifier_proj_size": 96,
            # Both draw from numpy's random numbers, not torch's.
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
        steps=400,
        batch=16,
        learning_rate=1e-3,
    ),
    "digits-vit": Recipe(
        "a ViT of 6 blocks that reads handwritten digits",
        Digits,
        _digits,
        "vit",
        {
            "image_size": Digits.SIDE,
            "patch_size": 8,
            "hidden_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 384,
        },
        steps=600,
        batch=64,
        learning_rate=1e-3,
    ),
    "digits-resnet": Recipe(
        "a ResNet of 6 blocks that reads handwritten digits",
        Digits,
        _digits,
        "resnet",
        {"layer_type": "basic", "embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2]},
        steps=600,
        batch=64,
        learning_rate=1e-3,
    ),
    "digits-convnext": Recipe(
        "a ConvNeXt of 6 blocks, with layer norm, that reads handwritten digits",
        Digits,
        _digits,
        "convnext",
        {"hidden_sizes": [40, 80, 160], "depths": [2, 2, 2], "num_stages": 3, "patch_size": 4},
        steps=600,
        batch=64,
        learning_rate=1e-3,
    ),
}

register(
    Maker(
        {name: f"{recipe.description} (trained here, once)" for name, recipe in RECIPES.items()},
        lambda name: recipe_of(name) is not None,
        _of_name(trained),
        _of_name(fingerprint),
    )
)
