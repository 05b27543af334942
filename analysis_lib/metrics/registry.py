"""The accumulators of a measurement, from the names of their metrics."""

import importlib
from collections.abc import Iterable

from analysis_lib.errors import AnalysisError, in_order, near_names, shown
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.listing import catalogue

METRICS: dict[str, type[Metric]] = {}
for _name, _entry in catalogue().items():
    METRICS[_name] = getattr(importlib.import_module(_entry.module), _entry.kind)

WANTED = "names, or accumulators in a list, as in [metrics.Anisotropy()]"


def resolve(metrics: str | Iterable[str | Metric], bins: str | None = None) -> list[Metric]:
    """Empty accumulators from metric names (comma-separated or listed), accumulators, or ``all``.

    ``all`` leaves out expensive metrics, those made ``on_request``, such as ``isotropy``.

    Args:
        bins: those of all metrics, see :class:`~analysis_lib.metrics.accumulator.Metric`; None
            leaves each its own.

    Raises:
        AnalysisError: an unknown name (with the nearest), two accumulators of one name, no metric
            at all, or one that has no bins.

    >>> [metric.name for metric in resolve("anisotropy,qk_alignment")]
    ['anisotropy', 'qk_alignment']
    """
    if isinstance(metrics, str):
        common = [name for name, metric in METRICS.items() if not metric.on_request]
        metrics = common if metrics == "all" else [name.strip() for name in metrics.split(",")]
    accumulators: dict[str, Metric] = {}
    named = set()
    for metric in in_order("metrics", metrics, WANTED):
        if isinstance(metric, type) and issubclass(metric, Metric):
            raise AnalysisError(
                f"{metric.__name__} is a class: give an accumulator of it, {metric.__name__}()"
            )
        if not isinstance(metric, str | Metric):
            raise AnalysisError(f"a metric is {shown(metric)}: give {WANTED}")
        if isinstance(metric, str):
            if metric == "all":
                raise AnalysisError(
                    "all stands by itself: give it alone, or the names of the metrics"
                )
            if metric not in METRICS:
                raise AnalysisError(f"there is no metric {metric!r}: {near_names(metric, METRICS)}")
            if metric in named:
                continue
            named.add(metric)
            metric = METRICS[metric]()
        if metric.name in accumulators:
            raise AnalysisError(
                f"two metrics are called {metric.name}: give each a name of its own"
            )
        if not metric.name.isidentifier():
            raise AnalysisError(
                f"a metric is called {metric.name!r}, as is its table: give letters, digits and _"
            )
        accumulators[metric.name] = metric.in_bins(bins)
    if not accumulators:
        raise AnalysisError(f"no metric was asked for: give some of {', '.join(METRICS)}, or all")
    return list(accumulators.values())
