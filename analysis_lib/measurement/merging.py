"""Sums of a corpus merged from those of its shards, in an order independent of the workers."""

from collections.abc import Iterable

from analysis_lib.measurement.shards import Result
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import Metric

# Number of consecutive shards that are merged into a branch before the branch is merged.
SHARDS_PER_BRANCH = 32


class Merging:
    """The shards merged so far: whole branches, and the beginning of the next one.

    Attributes:
        metrics: metrics with the sums of whole branches.
        branch: metrics with the sums of the shards after these.
        report: the report of all of them.
        shards: the number of shards merged.
    """

    def __init__(self, metrics: list[Metric]):
        self.metrics = metrics
        self.branch = _fresh(metrics)
        self.report = Report()
        self.shards = 0

    @property
    def parts(self) -> dict[str, list[Metric]]:
        """The metrics that hold sums, by the name of the attribute."""
        return {"metrics": self.metrics, "branch": self.branch}

    def add(self, shards: int, result: Result) -> None:
        """Add the next shard, or all shards of the next branch, which a worker has merged."""
        into = self.branch if shards == 1 else self.metrics
        merge(into, self.report, [result])
        self.shards += shards
        if self.shards % SHARDS_PER_BRANCH == 0:
            self.close()

    def close(self) -> None:
        """End a branch, when it is full or at the end of the corpus."""
        for metric, part in zip(self.metrics, self.branch, strict=True):
            _take_over(metric, part)
        self.branch = _fresh(self.metrics)


def merge(metrics: list[Metric], report: Report, results: Iterable[Result]) -> None:
    """Add results, in their order, to metrics and a report."""
    for sums, read in results:
        for metric in metrics:
            _take_over(metric, metric.fresh(sums[metric.name]))
        report.merge(read)


def _take_over(metric: Metric, part: Metric) -> None:
    """Merge a part that is not used elsewhere.

    If the metric is empty it takes the sums as they are, since they may be too large to copy.
    """
    if metric.sums:
        metric.merge(part)
        return
    metric.sums = part.sums


def _fresh(metrics: Iterable[Metric]) -> list[Metric]:
    return [metric.fresh() for metric in metrics]
