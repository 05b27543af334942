"""A shard of a corpus, and what is measured of it."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from analysis_lib import capture
from analysis_lib.capture.given import FolderSpec, GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelSpec
from analysis_lib.models.loading import load_model

# A shard is what a worker takes at once.
UTTERANCES_PER_SHARD = 512
# So many batches in a row are summed by themselves, and then merged with those before.
BATCHES_PER_PART = 6
# So many parts are computed at once, at most, of models whose weights have at most so many bytes: each holds
# activations and sums of its own, and the threads of one batch serve a large model as well.
MOST_AT_ONCE, LARGE = 8, 2**30

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


def measure_shards(shards: Sequence[Shard], model: LoadedModel | GivenVectors) -> Iterator[Result]:
    """What :func:`measure_shard` gives of each; one begins while the last parts of the one before are computed.

    Where shards are cut into parts, the sums do not depend on how many threads compute these.
    """
    if not shards:
        return
    at_once, threads, size = 1, shards[0].threads, None
    if _is_cut(model):
        at_once, threads, size = min(threads, MOST_AT_ONCE), 1, BATCHES_PER_PART
    sums, report = None, Report()
    measured = _side_by_side(_parts(shards, model, size), model, at_once)
    with processes.threads(threads), closing(measured):
        for part, metrics, read in measured:
            if sums is None:
                sums = metrics
            else:
                for metric, more in zip(sums, metrics, strict=True):
                    metric.merge(more)
            report.merge(read)
            if part.report is not None:
                yield {metric.name: metric.arrays() for metric in sums}, report
                sums, report = None, Report()


def _is_cut(model: LoadedModel | GivenVectors) -> bool:
    """Whether shards are cut into parts, which are computed side by side, each by one thread.

    Small models use the cores better so than by threads that wait for one another between any two of many small
    operations. Hooks of a model that a program holds may be anybody's, and a model on several devices moves its
    weights; each part has sums of its own, and the threads of one batch serve a large model as well.
    """
    if isinstance(model, GivenVectors) or model.device.type != "cpu" or model.spec is None or model.spec.device_map:
        return False
    return sum(weight.nbytes for weight in model.model.parameters()) <= LARGE


class _Part(NamedTuple):
    """Some batches of a shard in a row, or all of them; and what was read of the shard, where this is its last part."""

    shard: Shard
    batches: Iterable[capture.Batch]
    report: Report | None = None


def _parts(shards: Iterable[Shard], model: LoadedModel | GivenVectors, size: int | None) -> Iterator[_Part]:
    for shard in shards:
        try:
            batches, report = begin(shard, model)
            if size is None:
                yield _Part(shard, batches, report)
                continue
            some = [*itertools.islice(batches, size)]
            while following := [*itertools.islice(batches, size)]:
                yield _Part(shard, some)
                some = following
            yield _Part(shard, some, report)
        except AnalysisError as error:
            # In its turn: what was read before is good.
            yield _Part(shard, _failing(error))


def _failing(error: AnalysisError) -> Iterator[capture.Batch]:
    raise error
    yield


def begin(shard: Shard, model: LoadedModel | GivenVectors) -> tuple[Iterator[capture.Batch], Report]:
    """The batches of a shard, and what is read of it, which is whole once they are."""
    report = Report()
    read = model.batches if isinstance(model, GivenVectors) else partial(capture.batches, model)
    return iter(read(shard.items, shard.groups, shard.settings, report)), report


# A part, its sums, and what was read.
Measured = tuple[_Part, list[Metric], Report]


def _side_by_side(parts: Iterator[_Part], model: LoadedModel | GivenVectors, threads: int) -> Iterator[Measured]:
    """What parts give, in their order, computed by so many threads."""
    if threads == 1:
        yield from map(partial(_measure_part, model), parts)
        return
    first = [*itertools.islice(parts, threads)]
    threads = len(first)
    for batch in itertools.islice(first[0].batches, 1):
        # Once, and not by every replica.
        capture.check(model, batch)
    free = SimpleQueue()
    free.put(model)
    for _ in range(threads - 1):
        free.put(model.replica())

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


def _measure_part(model: LoadedModel | GivenVectors, part: _Part) -> Measured:
    metrics, report = [metric.fresh() for metric in part.shard.metrics], part.report or Report()
    needs = frozenset().union(*(metric.needs for metric in metrics))
    run = model.run if isinstance(model, GivenVectors) else partial(capture.run, model)

    def receive(activations: capture.Activations) -> None:
        for metric in metrics:
            # What a model gives out comes alone, after its last layer.
            if activations.output is not None and not metric.needs & {capture.OUTPUT, capture.LOSS, capture.MASKED}:
                continue
            if "final" not in activations.spaces or "final" in metric.needs:
                metric.update(activations)
        if activations.output is None:
            report.add(activations)

    for batch in part.batches:
        run(batch, needs, receive, part.shard.settings.maps, part.shard.changes)
    report.close()
    return part, metrics, report


# The threads of a worker share one model.
_LOADING = threading.Lock()


@lru_cache(maxsize=1)
def _loaded(spec: ModelSpec) -> LoadedModel | GivenVectors:
    return GivenVectors(spec.name) if isinstance(spec, FolderSpec) else load_model(**vars(spec))
