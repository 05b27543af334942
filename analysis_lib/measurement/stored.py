"""What is kept of measurements: finished ones, and the sums from which an interrupted one goes
on.
"""

import functools
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from analysis_lib import files, store
from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora import Corpus
from analysis_lib.errors import CONTINUES, AnalysisError
from analysis_lib.measurement import shards
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH, Merging
from analysis_lib.measurement.tables import Report
from analysis_lib.measurement.versions import library_hash, metric_identity
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelName, ModelSpec, devices
from analysis_lib.models.loading import revision_of

# About how many seconds of merged work a killed measurement may lose.
SECONDS_AT_RISK = 60
# How many characters of the hash of all that a measurement depends on are in the name of its
# folder.
DIGITS = 16


class StoredMeasurements:
    """The finished measurements of a corpus under a model, a file per metric, which every later one
    can use.

    They lie in the folder ``measurements`` beside the pinned packages, or in the one that
    ``ANALYSIS_LIB_MEASUREMENTS`` names; where that is empty, and of a model that lives in this
    process alone, nothing is kept. What is found does not depend on who measured it, to rounding:
    other metrics in the same pass can call for other kernels.

    Attributes:
        entries: named after model and corpus, and all that the measurement depends on but the
            metric. Those of a network of maps are known by what a vector of it is; which networks
            have maps only their loading tells.
        report: what was read when what has been filled was measured.
        run: how that was measured, as ``run.json`` has it, of the first metric that was filled.
    """

    def __init__(self, spec: ModelSpec | None, revision: str, corpus: Corpus, settings: Settings):
        self.entries: list[store.Entry] = []
        self.report = Report()
        self.run = None
        home = store.measurements_directory()
        if spec is not None and home is not None:
            name = f"{Path(spec.name).name}-on-{Path(corpus.name).name}"
            label = re.sub(r"[^\w.@=:+-]+", "_", name)[:80]
            device = torch.device(spec.device).type
            for maps in (None, settings.maps):
                read_so = {**asdict(settings), "maps": maps}
                key = store.key(revision, spec.dtype, device, *_common(corpus, read_so))
                self.entries.append(store.Entry(home / f"{label}-{key[:DIGITS]}"))

    @classmethod
    def of_model(cls, model: LoadedModel, corpus: Corpus, settings: Settings) -> Self:
        """Those of a model that is loaded."""
        kept = cls(model.spec, model.revision, corpus, settings)
        if model.layout.maps:
            kept.entries = kept.entries[1:]
        kept.entries = kept.entries[:1]
        return kept

    @classmethod
    def of_name(
        cls,
        name: str,
        corpus: Corpus,
        settings: Settings,
        dtype: str = "float32",
        processor: str | None = None,
        device: str | None = None,
    ) -> Self:
        """Those of the model that ``load_model`` gives for a name, which need not be loaded."""
        model = ModelName.parse(name)
        spec = ModelSpec(model.without_dtype, None, model.dtype or dtype, devices.usable(device))
        return cls(spec, revision_of(name, processor), corpus, settings)

    @contextmanager
    def alone(self) -> Iterator[Self]:
        """Inside it, other processes that want to measure the same wait; they find it measured, if
        it is kept.
        """
        with ExitStack() as held:
            held.enter_context(store.in_use())
            for entry in self.entries[:1]:
                held.enter_context(entry.alone())
            yield self

    def fill(self, metric: Metric) -> bool:
        """Fill an empty metric with what was measured, if that is kept."""
        for entry in self.entries:
            # A parameter may have no lasting form.
            with suppress(AnalysisError):
                stored = entry.read(_file(metric), _read)
                if stored is None:
                    continue
                metric.merge(metric.fresh(stored.sums[metric.name]))
                self.report = self.report.joined(stored.report)
                self.run = self.run or json.loads(stored.more["run"])
                return True
        return False

    def write(self, metrics: Iterable[Metric], run: dict) -> None:
        """Keep what was measured, unless it cannot be known again, or written."""
        about = json.dumps(run)
        for metric in metrics:
            sums = {metric.name: metric.arrays()}
            for entry in self.entries:
                with suppress(AnalysisError):
                    _write(entry, _file(metric), sums, self.report, run=about)

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What ``make`` gives of each text, if it is not kept yet under a name that changes with
        all it depends on.
        """
        if not self.entries:
            return make()
        entry = self.entries[0]
        with entry.alone():
            array = entry.read(f"{name}.npy", np.load)
            if array is None:
                array = make()
                with suppress(AnalysisError):
                    entry.write(f"{name}.npy", lambda path: np.save(path, array))
            return array


def _file(metric: Metric) -> str:
    return f"{metric.name}-{store.key(*metric_identity(metric))[:DIGITS]}.npz"


@contextmanager
def interruption(kept: bool) -> Iterator[None]:
    """Inside it, a Ctrl-C that says nothing of its own says whether something is kept of what came
    before it.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or (CONTINUES if kept else "")) from None


class Progress:
    """What an interrupted measurement has merged: one file in a folder, written now and then.

    Attributes:
        path: named after all that the sums depend on, in the folder that was given; None without
            one: nothing is kept.
        merged: how many shards of the measurement are in the file.
    """

    def __init__(
        self,
        folder: Path | str | None,
        model: LoadedModel,
        corpus: Corpus,
        metrics: list[Metric],
        settings: Settings,
    ):
        self.path = None
        self.merged = 0
        self._next = time.monotonic() + SECONDS_AT_RISK
        if folder is not None:
            known = [model.revision, str(model.model.dtype), model.device.type, repr(model.layout)]
            known += _common(corpus, asdict(settings))
            known += map(metric_identity, metrics)
            known += [shards.UTTERANCES_PER_SHARD, shards.BATCHES_PER_PART, SHARDS_PER_BRANCH]
            key = store.key(*known)[:DIGITS]
            self._entry = store.Entry(Path(folder))
            self.path = self._entry.folder / f".unfinished-{key}.npz"
            # Tried before the work begins.
            with files.writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, metrics: list[Metric]) -> Merging:
        """Fill empty metrics with what is there; a damaged file is none."""
        merging = Merging(metrics)
        stored = None
        if self.path is not None:
            stored = self._entry.read(self.path.name, _read)
        if stored is not None:
            merging.report = stored.report
            merging.shards = self.merged = int(stored.more["merged"])
            for name, part in merging.parts.items():
                for metric in part:
                    sums = stored.sums.get(f"{name} {metric.name}")
                    metric.merge(metric.fresh(sums))
        return merging

    def keep(self, merging: Merging, *, now: bool = False) -> None:
        """Write what is merged ``now``, or if so much time has passed that its loss would hurt."""
        due = now or time.monotonic() >= self._next
        if self.path is None or merging.shards == self.merged or not due:
            return
        started = time.monotonic()
        sums = {}
        for name, part in merging.parts.items():
            for metric in part:
                sums[f"{name} {metric.name}"] = metric.arrays()
        _write(self._entry, self.path.name, sums, merging.report, merged=merging.shards)
        self.merged = merging.shards
        # Of a large model the file is large, too: writing it takes a small share of the time.
        self._next = time.monotonic() + SECONDS_AT_RISK * (1 + time.monotonic() - started)


class _Stored(NamedTuple):
    """What a file holds: sums by metric, what was read, and more, by name."""

    sums: dict[str, dict[Key, GroupSums]]
    report: Report
    more: dict[str, str]


def _write(
    entry: store.Entry,
    name: str,
    sums: Mapping[str, dict[Key, GroupSums]],
    report: Report,
    **more: str | int,
) -> None:
    # numpy takes no tuples as names: keys are written as JSON.
    arrays = {}
    for metric, of_metric in sums.items():
        for key, (groups, values) in of_metric.items():
            arrays[json.dumps([metric, groups, *key])] = values
    more["report"] = json.dumps(asdict(report))
    more["metrics"] = json.dumps([*sums])
    more["arrays"] = len(arrays)
    entry.write(name, lambda path: np.savez(path, **more, **arrays))


def _read(path: Path) -> _Stored:
    """What :func:`_write` has written."""
    with np.load(path) as stored:
        names = [name for name in stored if name.startswith("[")]
        more = {name: str(stored[name]) for name in {*stored} - {*names}}
        if len(names) != int(more["arrays"]):
            raise ValueError("an array is gone")
        sums = {metric: {} for metric in json.loads(more["metrics"])}
        for name in names:
            metric, groups, *key = json.loads(name)
            sums[metric][tuple(key)] = GroupSums(tuple(groups), stored[name])
    report = Report(**json.loads(more["report"]))
    return _Stored(sums, report, more)


# Read once: a page may measure a hundred times.
installed_version = functools.cache(importlib.metadata.version)


def _common(corpus: Corpus, settings: dict) -> list:
    """What a measurement depends on besides model and metrics; another text, setting or version
    starts afresh.
    """
    versions = [
        installed_version(name) for name in ("torch", "transformers", "tokenizers", "numpy")
    ]
    return [corpus.sha256, corpus.groups(GROUPS), settings, library_hash(), versions]
