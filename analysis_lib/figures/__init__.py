"""Tidy tables -> figures and numbered tables. Every function takes a table and returns what a cell can show."""

from analysis_lib.figures.anisotropy import (
    anisotropy_by_head,
    anisotropy_by_layer,
    anisotropy_by_model,
    cosine_against_dimension,
    dimensions_in_use,
    drift_pvalues,
    drift_scatter,
    isotropic_density,
    isotropy_by_model,
)
from analysis_lib.figures.base import PageFigure
from analysis_lib.figures.finetuning import (
    TextTable,
    cones,
    cosines_by_class,
    similarity_before_and_after,
    validation_accuracy,
)
from analysis_lib.figures.open_questions import accuracy_by_width, circle, directions_by_count, shares_of_the_largest
from analysis_lib.figures.outliers import (
    attention_by_token_type,
    contributions,
    dimension_means,
    outlier_values,
    published_beside_ours,
)
from analysis_lib.figures.queries_and_keys import mean_paths, query_key_clouds
from analysis_lib.figures.slider import Slider
from analysis_lib.figures.steps import step_axis
from analysis_lib.figures.tables import Table, verdict_table
from analysis_lib.figures.theme import band, theme
from analysis_lib.figures.trials import by_entropy_weight, similarity_by_depth, similarity_by_variant, trials_table

__all__ = [
    "PageFigure",
    "Slider",
    "Table",
    "TextTable",
    "accuracy_by_width",
    "anisotropy_by_head",
    "anisotropy_by_layer",
    "anisotropy_by_model",
    "attention_by_token_type",
    "band",
    "by_entropy_weight",
    "circle",
    "cones",
    "contributions",
    "cosine_against_dimension",
    "cosines_by_class",
    "dimension_means",
    "dimensions_in_use",
    "directions_by_count",
    "drift_pvalues",
    "drift_scatter",
    "isotropic_density",
    "isotropy_by_model",
    "mean_paths",
    "outlier_values",
    "published_beside_ours",
    "query_key_clouds",
    "shares_of_the_largest",
    "similarity_before_and_after",
    "similarity_by_depth",
    "similarity_by_variant",
    "step_axis",
    "theme",
    "trials_table",
    "validation_accuracy",
    "verdict_table",
]
