"""Maruta and Matsuzaki (2024): outlier dimensions decide where attention goes."""
