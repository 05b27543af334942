"""Corpus x model x metrics -> tables."""

from analysis_lib.measurement.comparison import Comparison, compare
from analysis_lib.measurement.measuring import measure
from analysis_lib.measurement.shipped import shipped
from analysis_lib.measurement.tables import Tables, grouped

__all__ = ["Comparison", "Tables", "compare", "grouped", "measure", "shipped"]
