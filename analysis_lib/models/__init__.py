"""Models by name, folder, hub id or object, and the parts of their architectures.

``names`` parses a name, ``folders`` gives its files, ``loading`` the model. ``layouts`` finds the
blocks of a model, their attention and their keys in one traced pass (``probe``, ``blocks``,
``keys``). An architecture that a trace cannot resolve is an entry of ``data/architectures.yml``,
and one that transformers lacks is a file in ``architectures/``, or a plug-in, see there. With a
tiny random model of it in ``tests/tiny.py`` and an entry of ``FAMILIES`` in ``tests/reference.py``,
it goes through all checks of the others. A model known by name is a row of ``data/models.csv``.
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
