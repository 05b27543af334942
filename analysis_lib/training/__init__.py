"""Models trained in the book: small, on data that need no network, each in a minute or two."""

from analysis_lib.training.recipes import RECIPES, Recipe, fingerprint, trained
from analysis_lib.training.speech import spoken_digits

__all__ = ["RECIPES", "Recipe", "fingerprint", "spoken_digits", "trained"]
