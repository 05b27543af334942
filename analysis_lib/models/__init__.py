"""A model by name, folder, hub id or object, and where its architecture keeps its parts.

Most architectures of transformers show where their parts are (``layouts``); one that does not is an entry of
``data/architectures.yml``, and one that transformers lacks is a file in ``architectures/``, or a plug-in, see there.
A tiny random model of it in
``tests/tiny.py``, with its entry of ``FAMILIES`` in ``tests/reference.py``, is then checked in every way that the
others are. A model known by name is a row of ``data/models.csv``.
"""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.models.loaded import TOKEN_TYPES, LoadedModel, ModelSpec
    from analysis_lib.models.loading import load_model
    from analysis_lib.models.names import (
        MULTIBERTS_SEEDS,
        MULTIBERTS_STEPS,
        UNTRAINED,
        Maker,
        known_models,
        multibert,
        split_dtype,
        split_twin,
        title,
        weights_identity,
    )

__getattr__, __dir__ = lazily(__name__)
