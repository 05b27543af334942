"""Models trained in the book: small, on data that need no network, each in a minute or two; and pretraining."""

from analysis_lib.training.pretraining import Pretraining, pretrain
from analysis_lib.training.recipes import RECIPES, Recipe, fingerprint, recipe_of, trained
from analysis_lib.training.runs import (
    MULTIBERTS,
    MULTIBERTS_SEEDS,
    MULTIBERTS_STEPS,
    RUNS,
    Checkpoint,
    checkpoints,
    losses,
    multibert,
    run_fingerprint,
)
from analysis_lib.training.scores import scores

__all__ = [
    "MULTIBERTS",
    "MULTIBERTS_SEEDS",
    "MULTIBERTS_STEPS",
    "RECIPES",
    "RUNS",
    "Checkpoint",
    "Pretraining",
    "Recipe",
    "checkpoints",
    "fingerprint",
    "losses",
    "multibert",
    "pretrain",
    "recipe_of",
    "run_fingerprint",
    "scores",
    "trained",
]
