"""Sums of a corpus merged from those of its shards, in an order independent of the workers."""

from dataclasses import dataclass

from analysis_lib.measurement.shards import Result
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import Metric

# Number of consecutive shards that are merged into a branch, and of consecutive branches that are
# merged into a limb, before these are merged with others.
SHARDS_PER_BRANCH = 32
UNITS = (1, SHARDS_PER_BRANCH, SHARDS_PER_BRANCH**2)


@dataclass
class Piece:
    """The sums of consecutive shards, from number ``start`` up to ``stop``, in metrics."""

    start: int
    stop: int
    metrics: list[Metric]

    @property
    def unit(self) -> int:
        """Number of shards in a shard, branch or limb, whichever the piece consists of."""
        return max(unit for unit in UNITS if unit <= self.stop - self.start)

    def can_take(self, following: "Piece") -> bool:
        """Whether the piece that follows is the next unit of a branch, limb or corpus begun here.

        Then their sums can be merged at once; otherwise this is the turn of other pieces.
        """
        if self.unit != following.unit:
            return False
        if self.unit == UNITS[-1]:
            return self.start == 0
        return self.start % (self.unit * SHARDS_PER_BRANCH) == 0

    def take(self, following: "Piece") -> None:
        """Merge the piece that follows."""
        for metric, more in zip(self.metrics, following.metrics, strict=True):
            metric.merge(more)
        self.stop = following.stop


class Merging:
    """The shards merged so far: as few pieces as the order of merging allows.

    From the beginning of the corpus, there are at most three: whole limbs, whole branches after
    them, and the shards of the next branch. A part of the corpus can begin with shards whose branch
    began earlier, and with branches whose limb did: these stay pieces of their own. The same order
    thus results from pieces of parts that are added one after another.

    Attributes:
        metrics: empty metrics, to be filled by :meth:`close`.
        pieces: the sums of consecutive shards.
        report: the report of all of them.
        stop: the number of the shard that comes next.
    """

    def __init__(self, metrics: list[Metric], start: int = 0):
        self.metrics = metrics
        self.pieces: list[Piece] = []
        self.report = Report()
        self.stop = start

    def add(self, shards: int, result: Result) -> None:
        """Add the sums of the next shards: of one, of a branch that a worker merged, of a piece."""
        sums, read = result
        # The sums are taken as they are, since they may be too large to copy.
        filled = [metric.fresh(sums[metric.name]) for metric in self.metrics]
        self._append(Piece(self.stop, self.stop + shards, filled))
        self.stop += shards
        self.report.merge(read)

    def _append(self, piece: Piece) -> None:
        if not self.pieces or not self.pieces[-1].can_take(piece):
            self.pieces.append(piece)
            return
        last = self.pieces.pop()
        last.take(piece)
        # It may have become a whole branch or limb, which the piece before it can take.
        self._append(last)

    def close(self) -> None:
        """Fill the metrics with the sums of all pieces, at the end of the corpus."""
        while len(self.pieces) > 1:
            last = self.pieces.pop()
            self.pieces[-1].take(last)
        for piece in self.pieces:
            for metric, filled in zip(self.metrics, piece.metrics, strict=True):
                metric.sums = filled.sums
