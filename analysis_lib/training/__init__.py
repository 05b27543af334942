"""Models trained in the book: small, on data that need no network, each in a minute or two."""

from analysis_lib.training.recipes import RECIPES, Recipe, fingerprint, recipe_of, trained
from analysis_lib.training.scores import scores

__all__ = ["RECIPES", "Recipe", "fingerprint", "recipe_of", "scores", "trained"]
