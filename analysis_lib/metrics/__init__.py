"""Metrics: quantities that accumulate over batches and merge across workers.

To add one, write a module here with a subclass of :class:`Metric`; it is then listed and can be
measured by name, with no change elsewhere. ``tests/reference.py`` computes the same table naively,
in a method of that name; ``book/notation.md`` explains it. CONTRIBUTING.md has the recipe.
"""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily
from analysis_lib.metrics.listing import catalogue

if TYPE_CHECKING:
    from analysis_lib.metrics.accumulator import Metric
    from analysis_lib.metrics.registry import METRICS, resolve

_CLASSES = {entry.kind: entry.module for entry in catalogue().values()}
__getattr__, __dir__ = lazily(__name__, _CLASSES)
