"""A model by name, folder, hub id or object, and where its architecture keeps its parts."""

from analysis_lib.models.loading import (
    MULTIBERTS_SEEDS,
    MULTIBERTS_STEPS,
    TOKEN_TYPES,
    UNTRAINED,
    LoadedModel,
    Maker,
    ModelSpec,
    fingerprint,
    known_models,
    load_model,
    multibert,
    register,
)

__all__ = [
    "MULTIBERTS_SEEDS",
    "MULTIBERTS_STEPS",
    "TOKEN_TYPES",
    "UNTRAINED",
    "LoadedModel",
    "Maker",
    "ModelSpec",
    "fingerprint",
    "known_models",
    "load_model",
    "multibert",
    "register",
]
