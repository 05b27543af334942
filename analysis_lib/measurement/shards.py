"""A shard of a corpus, and what is measured of it."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from analysis_lib import capture
from analysis_lib.capture.given import FolderSpec, GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.measurement.memory import keep_freed_memory, release_freed_memory
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelSpec
from analysis_lib.models.loading import load_model

# A shard is what a worker takes at once.
UTTERANCES_PER_SHARD = 512
# After so many, freed memory has piled up, and is given back after every batch. Until then it is not worth the time
# that it takes to fetch it again: for MiniLM, 4 to 8 % of a forward pass.
SHARDS_OF_LITTLE_TEXT = 4
# So many batches are under way at once, at most, if there are twice as many, of models whose weights have at most so
# many bytes: each holds activations and sums of its own, and the threads of one batch serve a large model as well.
MOST_LANES, LARGE = 4, 2**30

# The sums of every metric, by its name, and what was read.
Result = tuple[dict[str, dict[Key, GroupSums]], Report]


@dataclass(frozen=True)
class Shard:
    """A piece of work, whole in itself: any process that can load the model can do it."""

    index: int
    items: Sequence
    groups: tuple[int, ...]  # of each item, the jackknife group
    metrics: tuple[Metric, ...]  # empty
    settings: Settings
    spec: ModelSpec | None  # None of a model that only this process has
    threads: int
    changes: Changes | None = None


def make_shards(
    model: LoadedModel | GivenVectors,
    corpus: Corpus,
    metrics: list[Metric],
    settings: Settings,
    progress: bool = False,
) -> list[Shard]:
    """The shards of a corpus, to be computed with as many threads as PyTorch has here."""
    changes = None
    if settings.intervention or settings.norms_below:
        changes = changes_of(model, corpus, settings, progress)
    # Fresh: what these come to hold meanwhile is not for the workers.
    empty, groups = tuple(metric.fresh() for metric in metrics), corpus.groups(GROUPS)
    common = (empty, settings, model.spec, torch.get_num_threads(), changes)
    parts = [slice(start, start + UTTERANCES_PER_SHARD) for start in range(0, len(corpus), UTTERANCES_PER_SHARD)]
    return [Shard(i, corpus.items[part], tuple(groups[part]), *common) for i, part in enumerate(parts)]


def measure_shard(shard: Shard, model: LoadedModel | GivenVectors | None = None) -> Result:
    """The sums and the report of one shard: a pure function of the shard."""
    if model is None:
        with _LOADING:
            model = _loaded(shard.spec)
    [result] = measure_shards([shard], model)
    return result


def measure_shards(shards: Iterable[Shard], model: LoadedModel | GivenVectors) -> Iterator[Result]:
    """What :func:`measure_shard` gives of each; one begins while the last batches of the one before are computed."""
    crew, under_way = [], None
    with ExitStack() as stack:
        for shard in shards:
            if under_way and len(crew) == 1:
                yield under_way.result()
                under_way = None
            try:
                lanes, ahead, batches, report = begin(shard, model)
            except AnalysisError:
                if under_way:
                    yield under_way.result()
                raise
            if len(crew) != lanes:
                if under_way:
                    yield under_way.result()
                    under_way = None
                stack.close()
                stack.enter_context(processes.threads(shard.threads // lanes))
                if lanes > 1:
                    keep_freed_memory()
                    capture.check(model, ahead[0])
                crew = _crew(model, lanes, stack)
            # What the first lane takes more than the others falls to another thread with each shard.
            turn = shard.index % lanes
            begun = _UnderWay([_Lane(shard, *member) for member in (*crew[turn:], *crew[:turn])], report)
            begun.take(ahead)
            if under_way:
                yield under_way.result()
            under_way = begun
            under_way.take(batches)
        if under_way:
            yield under_way.result()
    # Tables of a large model take much memory, too; after a small one, what comes next finds it.
    if _is_large(model):
        release_freed_memory()


def begin(
    shard: Shard, model: LoadedModel | GivenVectors
) -> tuple[int, list[capture.Batch], Iterator[capture.Batch], Report]:
    """How many batches of a shard are to be computed at once; its first batches, and all others; what is read."""
    report = Report()
    read = model.batches if isinstance(model, GivenVectors) else partial(capture.batches, model)
    batches = read(shard.items, shard.groups, shard.settings, report)
    most = _most_lanes(shard.threads, model)
    ahead = [*itertools.islice(batches, 2 * most if most > 1 else 0)]
    lanes = max(n for n in range(1, most + 1) if shard.threads % n == 0 and (n == 1 or len(ahead) >= 2 * n))
    return lanes, ahead, batches, report


def _most_lanes(threads: int, model: LoadedModel | GivenVectors) -> int:
    """How many batches can be computed at once, each by as many threads as the others.

    Batches that run side by side use the cores better than the threads of one batch, which wait for one another between
    any two of its many small sums.
    """
    # Hooks of a model that a program holds may be anybody's, and a model on several devices moves its weights.
    if isinstance(model, GivenVectors) or model.device.type != "cpu" or model.spec is None or model.spec.device_map:
        return 1
    if _is_large(model):
        return 1
    return max(n for n in range(1, MOST_LANES + 1) if threads % n == 0)


def _is_large(model: LoadedModel | GivenVectors) -> bool:
    return isinstance(model, LoadedModel) and sum(weight.nbytes for weight in model.model.parameters()) > LARGE


def _crew(
    model: LoadedModel | GivenVectors, count: int, stack: ExitStack
) -> list[tuple[LoadedModel | GivenVectors, ThreadPoolExecutor | None]]:
    """For each lane, modules of its own and a thread; this thread computes where there is one lane."""
    if count == 1:
        return [(model, None)]
    executors = [ThreadPoolExecutor(1) for _ in range(count)]
    for executor in executors:
        stack.callback(executor.shutdown, cancel_futures=True)
    return [*zip([model, *(model.replica() for _ in range(count - 1))], executors, strict=True)]


class _UnderWay:
    """A shard whose batches are being computed."""

    def __init__(self, lanes: list["_Lane"], report: Report) -> None:
        self._lanes, self._report = lanes, report

    def take(self, batches: Iterable[capture.Batch]) -> None:
        """Give each batch to the lane that has taken least."""
        for batch in batches:
            min(self._lanes, key=lambda lane: lane.load).take(batch)

    def result(self) -> Result:
        """What all its lanes have summed, once they are done."""
        for lane in self._lanes:
            self._report.merge(lane.finished())
        first, *others = self._lanes
        for lane in others:
            for metric, part in zip(first.metrics, lane.metrics, strict=True):
                metric.merge(part)
        return {metric.name: metric.arrays() for metric in first.metrics}, self._report


class _Lane:
    """Computes batches of a shard one after another, in a thread if others do so beside it, and what it sums.

    Attributes:
        load: the size of what it has taken. What a lane takes depends on nothing else, and so do its sums.
    """

    def __init__(
        self, shard: Shard, model: LoadedModel | GivenVectors, executor: ThreadPoolExecutor | None = None
    ) -> None:
        self.metrics, self.report, self.load = [metric.fresh() for metric in shard.metrics], Report(), 0
        self._shard, self._executor, self._waiting = shard, executor, deque[Future]()
        self._run = model.run if isinstance(model, GivenVectors) else partial(capture.run, model)
        self._needs = frozenset().union(*(metric.needs for metric in self.metrics))

    def take(self, batch: capture.Batch) -> None:
        """Compute a batch, now or when those before are done."""
        if self._executor is None:
            self._compute(batch)
            return
        self.load += max(part.numel() for part in batch.inputs.values() if isinstance(part, torch.Tensor))
        if len(self._waiting) > 1:
            self._waiting.popleft().result()
        self._waiting.append(self._executor.submit(self._compute, batch))

    def finished(self) -> Report:
        """What it has read, once all is computed."""
        for task in self._waiting:
            task.result()
        self.report.close()
        return self.report

    def _compute(self, batch: capture.Batch) -> None:
        self._run(batch, self._needs, self._receive, self._shard.settings.maps, self._shard.changes)
        if self._shard.index >= SHARDS_OF_LITTLE_TEXT:
            release_freed_memory()

    def _receive(self, activations: capture.Activations) -> None:
        for metric in self.metrics:
            # What a model gives out comes alone, after its last layer.
            if activations.output is not None and not metric.needs & {capture.OUTPUT, capture.LOSS, capture.MASKED}:
                continue
            if "final" not in activations.spaces or "final" in metric.needs:
                metric.update(activations)
        if activations.output is None:
            self.report.add(activations)


# The threads of a worker share one model.
_LOADING = threading.Lock()


@lru_cache(maxsize=1)
def _loaded(spec: ModelSpec) -> LoadedModel | GivenVectors:
    return GivenVectors(spec.name) if isinstance(spec, FolderSpec) else load_model(**vars(spec))
