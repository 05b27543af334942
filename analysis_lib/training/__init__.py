"""Models trained here: the small ones of the book, pretraining with checkpoints, and classifiers of texts."""

from analysis_lib.training.classification import accuracy, finetune, predict, self_attention
from analysis_lib.training.pretraining import Pretraining, pretrain
from analysis_lib.training.recipes import RECIPES, Recipe, fingerprint, recipe_of, trained
from analysis_lib.training.runs import (
    RUNS,
    Checkpoint,
    checkpoints,
    losses,
    run_fingerprint,
)
from analysis_lib.training.scores import scores

__all__ = [
    "RECIPES",
    "RUNS",
    "Checkpoint",
    "Pretraining",
    "Recipe",
    "accuracy",
    "checkpoints",
    "finetune",
    "fingerprint",
    "losses",
    "predict",
    "pretrain",
    "recipe_of",
    "run_fingerprint",
    "scores",
    "self_attention",
    "trained",
]
