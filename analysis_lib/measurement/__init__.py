"""Measurements: tables of metrics for a corpus under a model."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.measurement.comparison import Comparison, compare
    from analysis_lib.measurement.generation import Generated, generate, save_answers
    from analysis_lib.measurement.layer_check import LayerCheck, check_layers
    from analysis_lib.measurement.measuring import measure, measure_vectors
    from analysis_lib.measurement.model_similarity import similarity
    from analysis_lib.measurement.parts import merge_parts
    from analysis_lib.measurement.shipping import Shipped, shipped, shipped_runs, with_shipped
    from analysis_lib.measurement.tables import (
        Chosen,
        Plain,
        Ratio,
        Tables,
        TableSet,
        grouped,
        largest,
    )

__getattr__, __dir__ = lazily(__name__)
