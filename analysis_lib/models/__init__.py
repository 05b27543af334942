"""A model by name, folder, hub id or object, and where its architecture keeps its parts.

``names`` takes a name apart, ``folders`` gives its files, ``loading`` the model. ``layouts`` finds
the blocks of a model, their attention and their keys in one traced pass (``probe``, ``blocks``,
``keys``). An architecture that cannot be found so is an entry of ``data/architectures.yml``, and
one that transformers lacks is a file in ``architectures/``, or a plug-in, see there. A tiny random
model of it in ``tests/tiny.py``, with its entry of ``FAMILIES`` in ``tests/reference.py``, is then
checked in every way that the others are. A model known by name is a row of ``data/models.csv``.
"""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.models.folders import weights_identity
    from analysis_lib.models.loaded import TOKEN_TYPES, LoadedModel, ModelSpec
    from analysis_lib.models.loading import load_model
    from analysis_lib.models.names import (
        MULTIBERTS_SEEDS,
        MULTIBERTS_STEPS,
        Maker,
        ModelName,
        known_models,
        multibert,
        title,
    )

__getattr__, __dir__ = lazily(__name__)
