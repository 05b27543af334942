"""Kept measurements: finished ones, and the sums from which an interrupted one resumes."""

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
from analysis_lib.measurement.versions import metric_identity
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelName, ModelSpec, devices
from analysis_lib.models.loading import revision_of

# Seconds of merged work that a killed measurement may lose, approximately.
SECONDS_AT_RISK = 60
# Length of the hash in the name of a measurement's folder.
DIGITS = 16


class StoredMeasurements:
    """The finished measurements of a corpus under a model, one file per metric, for later calls.

    They lie in the folder ``measurements`` beside the pinned packages, or in the folder named by
    ``ANALYSIS_LIB_MEASUREMENTS``. Nothing is kept if that variable is empty, or for a model that
    exists only in this process. Results do not depend on which call measured them, up to rounding:
    other metrics in the same pass can lead to other kernels.

    Attributes:
        entries: folders named after model and corpus, with a hash of all that the measurement
            depends on except the metric. For a network with feature maps, the hash includes
            ``maps``; whether a network has maps is known only once it is loaded.
        report: the report of the metrics filled so far.
        run: the description of the first metric filled, as in ``run.json``.
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
        """The measurements of a loaded model."""
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
        """The measurements of the model that ``load_model`` gives for a name, without loading."""
        model = ModelName.parse(name)
        spec = ModelSpec(model.without_dtype, None, model.dtype or dtype, devices.usable(device))
        return cls(spec, revision_of(name, processor), corpus, settings)

    @contextmanager
    def alone(self) -> Iterator[Self]:
        """A context in which other processes with the same measurement wait.

        They then find it measured, if it is kept.
        """
        with ExitStack() as held:
            held.enter_context(store.in_use())
            for entry in self.entries[:1]:
                held.enter_context(entry.alone())
            yield self

    def fill(self, metric: Metric) -> bool:
        """Fill an empty metric from kept sums; returns whether there are any."""
        for entry in self.entries:
            # A metric whose parameters cannot be hashed is not kept.
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
        """Keep the measured sums, except of metrics that cannot be hashed, or if writing fails."""
        about = json.dumps(run)
        for metric in metrics:
            sums = {metric.name: metric.arrays()}
            for entry in self.entries:
                with suppress(AnalysisError):
                    _write(entry, _file(metric), sums, self.report, run=about)

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array with the result of ``make``, kept under a name.

        The name must change with all that the array depends on.
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
    """A context in which a Ctrl-C without a message says whether finished work is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or (CONTINUES if kept else "")) from None


class Progress:
    """The merged sums of an interrupted measurement, in one file that is written now and then.

    Attributes:
        path: the file, named after all that the sums depend on, in the given folder; None without a
            folder.
        merged: number of shards of the measurement in the file.
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
            known += [
                shards.UTTERANCES_PER_SHARD,
                shards.FIRST_PARTS,
                shards.BATCHES_PER_PART,
                SHARDS_PER_BRANCH,
            ]
            key = store.key(*known)[:DIGITS]
            self._entry = store.Entry(Path(folder))
            self.path = self._entry.folder / f".unfinished-{key}.npz"
            # Fail before the work begins if the folder cannot be written.
            with files.writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, metrics: list[Metric]) -> Merging:
        """Fill empty metrics from the file; a damaged file counts as missing."""
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
        """Write the merged sums if ``now``, or if enough time has passed since the last time."""
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
        # The file of a large model is large: the interval grows so that writing takes a small share
        # of the time.
        self._next = time.monotonic() + SECONDS_AT_RISK * (1 + time.monotonic() - started)


class _Stored(NamedTuple):
    """The content of a file: sums by metric, the report, and further entries by name."""

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
    # numpy accepts no tuples as names, so keys are written as JSON.
    arrays = {}
    for metric, of_metric in sums.items():
        for key, (groups, values) in of_metric.items():
            arrays[json.dumps([metric, groups, *key])] = values
    more["report"] = json.dumps(asdict(report))
    more["metrics"] = json.dumps([*sums])
    more["arrays"] = len(arrays)
    entry.write(name, lambda path: np.savez(path, **more, **arrays))


def _read(path: Path) -> _Stored:
    """Read a file that :func:`_write` has written."""
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


def _common(corpus: Corpus, settings: dict) -> list:
    """Inputs of a measurement besides model and metrics; a change of any of them starts afresh."""
    return [corpus.sha256, corpus.groups(GROUPS), settings, *store.computing_versions()]
