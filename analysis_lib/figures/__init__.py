"""Tidy tables -> figures and numbered tables. Every function takes a table and returns what a cell can show."""

from analysis_lib.figures.base import PageFigure
from analysis_lib.figures.contributions import contribution_peaks
from analysis_lib.figures.finetuning import (
    TextTable,
    cones,
    cosines_by_class,
    similarity_before_and_after,
    validation_accuracy,
)
from analysis_lib.figures.open_questions import accuracy_by_width, circle, directions_by_count, shares_of_the_largest
from analysis_lib.figures.slider import Slider
from analysis_lib.figures.tables import Table, verdict_table
from analysis_lib.figures.theme import band, theme
from analysis_lib.figures.training import (
    alignment_against_chance,
    alignment_along_training,
    alignment_by_seed,
    dots_along_training,
    entropy_along_training,
    half_way_steps,
    losses_along_training,
    mean_paths,
    quantities_along_training,
    query_key_clouds,
    runs_table,
    share_outside_chance,
)
from analysis_lib.figures.trials import by_entropy_weight, similarity_by_depth, similarity_by_variant, trials_table
from analysis_lib.figures.untrained import (
    block_cosines,
    block_norms,
    divergence_by_bias,
    fixed_point_beside_layers,
    queries_and_keys,
    score_histograms,
    score_of_the_bias,
    scores_by_head,
    softmax_extremes,
)

__all__ = [
    "PageFigure",
    "Slider",
    "Table",
    "TextTable",
    "accuracy_by_width",
    "alignment_against_chance",
    "alignment_along_training",
    "alignment_by_seed",
    "band",
    "block_cosines",
    "block_norms",
    "by_entropy_weight",
    "circle",
    "cones",
    "contribution_peaks",
    "cosines_by_class",
    "directions_by_count",
    "divergence_by_bias",
    "dots_along_training",
    "entropy_along_training",
    "fixed_point_beside_layers",
    "half_way_steps",
    "losses_along_training",
    "mean_paths",
    "quantities_along_training",
    "queries_and_keys",
    "query_key_clouds",
    "runs_table",
    "score_histograms",
    "score_of_the_bias",
    "scores_by_head",
    "share_outside_chance",
    "shares_of_the_largest",
    "similarity_before_and_after",
    "similarity_by_depth",
    "similarity_by_variant",
    "softmax_extremes",
    "theme",
    "trials_table",
    "validation_accuracy",
    "verdict_table",
]
