"""Maruta and Matsuzaki (2024): outlier dimensions decide where attention goes."""

from analysis_lib.papers.maruta.outliers import late_rise, tested_layers, weight_margin

__all__ = ["late_rise", "tested_layers", "weight_margin"]
