"""Maruta and Matsuzaki (2024): outlier dimensions decide where attention goes."""

from analysis_lib.papers.maruta.outliers import (
    compare_table1,
    dominated_heads,
    dominated_share,
    explained_gap,
    explained_share,
    growth_after_layer_1,
    is_published_model,
    late_rise,
    persistent_zscore,
    tested_layers,
    type_distance,
    weight_margin,
)

__all__ = [
    "compare_table1",
    "dominated_heads",
    "dominated_share",
    "explained_gap",
    "explained_share",
    "growth_after_layer_1",
    "is_published_model",
    "late_rise",
    "persistent_zscore",
    "tested_layers",
    "type_distance",
    "weight_margin",
]
