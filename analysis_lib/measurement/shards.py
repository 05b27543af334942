"""A shard of a corpus, and what is measured of it."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from analysis_lib import capture
from analysis_lib.capture.given import FolderSpec, GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import processes
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelSpec
from analysis_lib.models.loading import load_model

# A shard is what a worker takes at once.
UTTERANCES_PER_SHARD = 512
# After so many, freed memory has piled up, and is given back after every batch. Until then it is not worth the time
# that it takes to fetch it again: for MiniLM, 4 to 8 % of a forward pass.
SHARDS_OF_LITTLE_TEXT = 4

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
    model: LoadedModel | GivenVectors, corpus: Corpus, metrics: list[Metric], settings: Settings
) -> list[Shard]:
    """The shards of a corpus, to be computed with as many threads as PyTorch has here."""
    changes = changes_of(model, corpus, settings) if settings.intervention or settings.norms_below else None
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
    metrics = [metric.fresh() for metric in shard.metrics]
    report = Report()
    needs = frozenset().union(*(metric.needs for metric in metrics))

    def receive(activations: capture.Activations) -> None:
        for metric in metrics:
            # What a model gives out comes alone, after its last layer.
            if activations.output is not None and not metric.needs & {capture.OUTPUT, capture.LOSS, capture.MASKED}:
                continue
            if "final" not in activations.spaces or "final" in metric.needs:
                metric.update(activations)
        if activations.output is None:
            report.add(activations)

    given = isinstance(model, GivenVectors)
    batches, run = (model.batches, model.run) if given else (partial(f, model) for f in (capture.batches, capture.run))
    with processes.threads(shard.threads):
        for batch in batches(shard.items, shard.groups, shard.settings, report):
            run(batch, needs, receive, shard.settings.maps, shard.changes)
            if shard.index >= SHARDS_OF_LITTLE_TEXT:
                _release_freed_memory()
    _release_freed_memory()
    report.close()
    return {metric.name: metric.arrays() for metric in metrics}, report


def _release_freed_memory() -> None:
    """Give freed memory back to the system.

    Every batch has another shape, and what is kept of each, such as a primitive that oneDNN made for the shape, lies
    between the pieces that are freed. glibc can neither join nor return them: without this, a process grows by a third
    over ten thousand sentences.
    """
    # Other C libraries have no such function, and no such habit.
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


# The threads of a worker share one model.
_LOADING = threading.Lock()


@lru_cache(maxsize=1)
def _loaded(spec: ModelSpec) -> LoadedModel | GivenVectors:
    return GivenVectors(spec.name) if isinstance(spec, FolderSpec) else load_model(**vars(spec))
