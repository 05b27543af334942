"""Shards of a corpus, and their measurement."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from queue import SimpleQueue
from typing import NamedTuple

import torch

from analysis_lib import capture
from analysis_lib.capture.given import FolderSpec, GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.joining import Joining
from analysis_lib.capture.paired import ModelPair, PairSource, PairSpec
from analysis_lib.capture.source import OF_OUTPUTS, ModelSource, Source
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import ModelSpec
from analysis_lib.models.loading import load_model

# Size of a shard, the unit of work of a worker.
UTTERANCES_PER_SHARD = 512
# Numbers of consecutive batches that are summed separately and then merged. The first parts are
# small, so that several threads have work where a shard has few batches.
FIRST_PARTS = (1, 1, 2, 2)
BATCHES_PER_PART = 6
# Largest number of parts computed at once: each holds activations and sums of its own.
MOST_AT_ONCE = 8

# The sums of every metric, by its name, and the report.
Result = tuple[dict[str, dict[Key, GroupSums]], Report]


@dataclass(frozen=True)
class Shard:
    """A self-contained piece of work: any process that can load the model can do it."""

    index: int
    items: Sequence
    groups: tuple[int, ...]  # the jackknife group of each item
    metrics: tuple[Metric, ...]  # without sums
    settings: Settings
    spec: ModelSpec | None  # None for a model that exists only in this process
    kind: str  # of the items
    threads: int
    changes: Changes | None = None


def make_shards(
    source: Source,
    corpus: Corpus,
    metrics: list[Metric],
    settings: Settings,
    progress: bool = False,
) -> list[Shard]:
    """The shards of a corpus, to be computed with as many threads as PyTorch has here."""
    changes = None
    if settings.intervention or settings.norms_below:
        changes = changes_of(source.model, corpus, settings, progress)
    # Fresh copies, since workers must not receive sums that these metrics acquire meanwhile.
    empty = tuple(metric.fresh() for metric in metrics)
    common = (empty, settings, source.model.spec, corpus.kind, torch.get_num_threads(), changes)
    groups = corpus.groups(GROUPS)
    shards = []
    for index, start in enumerate(range(0, len(corpus), UTTERANCES_PER_SHARD)):
        part = slice(start, start + UTTERANCES_PER_SHARD)
        shards.append(Shard(index, corpus.items[part], tuple(groups[part]), *common))
    return shards


def measure_shard(shard: Shard, source: Source | None = None) -> Result:
    """The sums and the report of one shard: a pure function of the shard."""
    if source is None:
        with _LOADING:
            source = _loaded(processes.on_own_device(shard.spec), shard.kind)
    [result] = measure_shards([shard], source)
    return result


def measure_shards(shards: Sequence[Shard], source: Source) -> Iterator[Result]:
    """The results of several shards, in order; the next shard begins before the last one has ended.

    If shards are cut into parts, the sums do not depend on the number of threads. A shard with
    a batch that does not fit the memory is measured anew with batches of half the size, and so are
    those after it.

    Raises:
        OutOfMemory: a single utterance does not fit.
    """
    left = deque(shards)
    is_halved = False
    while left:
        try:
            for sums, report in _measure_in_order(left, source):
                report.halved = int(is_halved)
                left.popleft()
                yield sums, report
        except capture.OutOfMemory as error:
            if not error.several:
                raise
            is_halved = True
            left = deque(_halved(shard) for shard in left)
            torch.cuda.empty_cache()


def _halved(shard: Shard) -> Shard:
    tokens = max(1, shard.settings.tokens_per_batch // 2)
    return replace(shard, settings=replace(shard.settings, tokens_per_batch=tokens))


def _measure_in_order(shards: Sequence[Shard], source: Source) -> Iterator[Result]:
    at_once = 1
    threads = shards[0].threads
    if source.runs_side_by_side:
        at_once = min(threads, MOST_AT_ONCE)
        threads = 1
    sums = None
    report = Report()
    measured = _side_by_side(_parts([*shards], source), source, at_once)
    with processes.threads(threads), closing(measured):
        for part, metrics, read in measured:
            if sums is None:
                sums = metrics
            else:
                for metric, more in zip(sums, metrics, strict=True):
                    metric.merge(more)
            report.merge(read)
            if part.is_last:
                yield {metric.name: metric.arrays() for metric in sums}, report
                sums = None
                report = Report()


class _Part(NamedTuple):
    """Consecutive batches of a shard, or all of them.

    Attributes:
        is_last: whether these are the last batches of the shard.
        report: counts the items as they are read; it is complete once the last batch has been made,
            and belongs to the last part.
    """

    shard: Shard
    batches: Iterable[capture.Batch]
    is_last: bool
    report: Report


def _parts(shards: Iterable[Shard], source: Source) -> Iterator[_Part]:
    for shard in shards:
        try:
            batches, report = begin(shard, source)
            if not source.runs_side_by_side:
                yield _Part(shard, batches, True, report)
                continue
            sizes = itertools.chain(FIRST_PARTS, itertools.repeat(BATCHES_PER_PART))
            some = [*itertools.islice(batches, next(sizes))]
            while following := [*itertools.islice(batches, next(sizes))]:
                yield _Part(shard, some, False, Report())
                some = following
            yield _Part(shard, some, True, report)
        except AnalysisError as error:
            # Raised when it is the turn of this part, after the results of earlier shards.
            yield _Part(shard, _failing(error), True, Report())


def _failing(error: AnalysisError) -> Iterator[capture.Batch]:
    raise error
    yield


def begin(shard: Shard, source: Source) -> tuple[Iterator[capture.Batch], Report]:
    """The batches of a shard, and its report, which is complete once all batches are made."""
    report = Report(devices=source.devices)
    return iter(source.batches(shard.items, shard.groups, shard.settings, report)), report


# A part, its sums, and its report.
Measured = tuple[_Part, list[Metric], Report]


def _side_by_side(parts: Iterator[_Part], source: Source, threads: int) -> Iterator[Measured]:
    """Results of parts in their order, computed by ``threads`` threads."""
    if threads == 1:
        for part in parts:
            yield _measure_part(source, part)
        return
    first = [*itertools.islice(parts, threads)]
    threads = len(first)
    for batch in itertools.islice(first[0].batches, 1):
        # Checked once on the first batch, not by every replica.
        source.check(batch)
    free = SimpleQueue()
    free.put(source)
    for _ in range(threads - 1):
        free.put(source.replica())

    def measured(part: _Part) -> Measured:
        replica = free.get()
        try:
            return _measure_part(replica, part)
        finally:
            free.put(replica)

    under_way = deque()
    executor = ThreadPoolExecutor(threads)
    try:
        for part in itertools.chain(first, parts):
            under_way.append(executor.submit(measured, part))
            if len(under_way) > threads + 2:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


class Summing:
    """Adds the activations of batches to the sums of metrics, and counts them in a report.

    Metrics of vectors alone receive several layers at a time, see :class:`Joining`.

    Attributes:
        needs: the inputs that the metrics need.
    """

    def __init__(self, metrics: Sequence[Metric], report: Report) -> None:
        self._metrics = metrics
        self._report = report
        self.needs = frozenset().union(*(metric.needs for metric in metrics))
        self._of_vectors = [metric for metric in metrics if metric.needs <= {*capture.SPACES}]
        self._others = [metric for metric in metrics if not metric.needs <= {*capture.SPACES}]
        self._joining = Joining(self._receive_vectors)

    def receive(self, activations: capture.Activations) -> None:
        """Add one layer of a batch, or the model's output, which arrives after the last layer."""
        if activations.output is not None or activations.embeddings is not None:
            of_outputs = [metric for metric in self._others if metric.needs & OF_OUTPUTS]
            _receive(of_outputs, activations)
            return
        if self._of_vectors:
            activations = self._joining.add(activations)
        _receive(self._others, activations)
        if not self._of_vectors:
            self._report.add(activations)

    def _receive_vectors(self, activations: capture.Activations) -> None:
        _receive(self._of_vectors, activations)
        self._report.add(activations)

    def settle(self) -> None:
        """End a batch."""
        self._joining.flush()
        for metric in self._metrics:
            metric.sums.settle()
        self._report.settle()


def _receive(metrics: Sequence[Metric], activations: capture.Activations) -> None:
    """Give metrics the activations of a layer; the final vectors arrive apart from the others."""
    for metric in metrics:
        if "final" not in activations.spaces or "final" in metric.needs:
            metric.receive(activations)


def _measure_part(source: Source, part: _Part) -> Measured:
    metrics = [metric.fresh() for metric in part.shard.metrics]
    summing = Summing(metrics, part.report)
    settings = part.shard.settings
    for batch in part.batches:
        source.run(batch, summing.needs, summing.receive, settings.maps, part.shard.changes)
        summing.settle()
    part.report.close()
    return part, metrics, part.report


# The threads of a worker share one model.
_LOADING = threading.Lock()


@lru_cache(maxsize=1)
def _loaded(spec: ModelSpec, kind: str) -> Source:
    if isinstance(spec, FolderSpec):
        return GivenVectors(spec.name, spec.layers)
    if isinstance(spec, PairSpec):
        first, other = (load_model(**vars(each)) for each in spec.specs)
        return PairSource(ModelPair(first, other, spec.level))
    return ModelSource(load_model(**vars(spec)).reading(kind))
