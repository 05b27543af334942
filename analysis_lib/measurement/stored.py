"""Kept measurements: finished ones, and the sums from which an interrupted one resumes."""

import functools
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
                stored = entry.read(_file(metric), read_sums)
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
                    write_sums(entry, _file(metric), sums, self.report, run=about)

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


def identity(
    model: LoadedModel, corpus: Corpus, metrics: Iterable[Metric], settings: Settings
) -> dict[str, str]:
    """Hashes of all that the sums of a measurement depend on, each by what it is."""
    known = {
        "model revision": [model.revision, repr(model.layout)],
        "precision": str(model.model.dtype),
        "kind of device": model.device.type,
        "corpus": corpus.sha256,
        "division into units": corpus.groups(GROUPS),
    }
    for name, value in asdict(settings).items():
        known[f"setting of {name}"] = value
    known["choice of metrics"] = [metric_identity(metric) for metric in metrics]
    known = {name: store.key(value)[:DIGITS] for name, value in known.items()}
    return known | identity_of_library()


def identity_of_library() -> dict[str, str]:
    """Hashes of the versions in use, and of the order in which sums are merged."""
    how_merged = [
        shards.UTTERANCES_PER_SHARD,
        shards.FIRST_PARTS,
        shards.BATCHES_PER_PART,
        SHARDS_PER_BRANCH,
    ]
    known = {"version of analysis_lib": store.key(store.library_hash(), how_merged)[:DIGITS]}
    for name in (*store.COMPUTING, *store.CHOOSING):
        known[f"version of {name}"] = store.installed_version(name) or "none"
    return known


class Progress:
    """The merged sums of an interrupted measurement, in one file that is written now and then.

    Attributes:
        path: the file, named after all that the sums depend on, in the given folder; None without a
            folder.
        merged: number of shards up to which the measurement is in the file.
    """

    def __init__(self, folder: Path | str | None, *known: object):
        self.path = None
        self.merged = 0
        self._next = time.monotonic() + SECONDS_AT_RISK
        if folder is not None:
            self._entry = store.Entry(Path(folder))
            self.path = self._entry.folder / f".unfinished-{store.key(*known)[:DIGITS]}.npz"
            # Fail before the work begins if the folder cannot be written.
            with files.writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, metrics: list[Metric], first: int) -> Merging:
        """The shards from number ``first`` on that are in the file; a damaged file counts as none.

        Args:
            metrics: empty metrics, to be filled.
        """
        merging = None
        if self.path is not None:
            read = functools.partial(merging_of, metrics, first)
            merging = self._entry.read(self.path.name, read)
        if merging is None:
            return Merging(metrics, first)
        self.merged = merging.stop
        return merging

    def keep(self, merging: Merging, *, now: bool = False) -> None:
        """Write the merged sums if ``now``, or if enough time has passed since the last time."""
        due = now or time.monotonic() >= self._next
        is_new = merging.pieces and merging.stop != self.merged
        if self.path is None or not is_new or not due:
            return
        started = time.monotonic()
        write_merging(self._entry, self.path.name, merging)
        self.merged = merging.stop
        # The file of a large model is large: the interval grows so that writing takes a small share
        # of the time.
        self._next = time.monotonic() + SECONDS_AT_RISK * (1 + time.monotonic() - started)

    def remove(self) -> None:
        """Remove the file, once its sums are kept elsewhere."""
        self._entry.remove(self.path.name)


def write_merging(entry: store.Entry, name: str, merging: Merging, **more: str | int) -> None:
    """Keep the sums of each piece, and further entries, in a file."""
    sums = {}
    for piece in merging.pieces:
        for metric in piece.metrics:
            sums[f"{piece.start} {piece.stop} {metric.name}"] = metric.arrays()
    write_sums(entry, name, sums, merging.report, merged=merging.stop, **more)


def merging_of(metrics: list[Metric], first: int, path: Path) -> Merging:
    """The merging in a file that :func:`write_merging` has written."""
    merging = Merging(metrics, first)
    add_stored(merging, read_sums(path))
    return merging


def add_stored(merging: Merging, stored: "Stored") -> None:
    """Add the pieces of a file that :func:`write_merging` has written.

    Raises:
        ValueError: they do not follow those that are there, or the file lacks some.
    """
    pieces: dict[tuple[int, int], dict] = {}
    for name, sums in stored.sums.items():
        start, stop, metric = name.split(" ")
        pieces.setdefault((int(start), int(stop)), {})[metric] = sums
    for (start, stop), sums in pieces.items():
        if start != merging.stop:
            raise ValueError(f"shard {merging.stop} is not in it")
        merging.add(stop - start, (sums, Report()))
    if merging.stop != int(stored.more["merged"]):
        raise ValueError(f"shard {merging.stop} is not in it")
    merging.report.merge(stored.report)


class Stored(NamedTuple):
    """The content of a file: sums by metric, the report, and further entries by name."""

    sums: dict[str, dict[Key, GroupSums]]
    report: Report
    more: dict[str, str]


def write_sums(
    entry: store.Entry,
    name: str,
    sums: Mapping[str, dict[Key, GroupSums]],
    report: Report,
    **more: str | int,
) -> None:
    """Keep sums by metric, a report, and further entries in a file."""
    # numpy accepts no tuples as names, so keys are written as JSON.
    arrays = {}
    for metric, of_metric in sums.items():
        for key, (groups, values) in of_metric.items():
            arrays[json.dumps([metric, groups, *key])] = values
    more["report"] = json.dumps(asdict(report))
    more["metrics"] = json.dumps([*sums])
    more["arrays"] = len(arrays)
    entry.write(name, lambda path: np.savez(path, **more, **arrays))


def read_sums(path: Path) -> Stored:
    """Read a file that :func:`write_sums` has written."""
    more = read_entries(path)
    with np.load(path) as stored:
        names = [name for name in stored if name.startswith("[")]
        if len(names) != int(more["arrays"]):
            raise ValueError("an array is gone")
        sums = {metric: {} for metric in json.loads(more["metrics"])}
        for name in names:
            metric, groups, *key = json.loads(name)
            sums[metric][tuple(key)] = GroupSums(tuple(groups), stored[name])
    report = Report(**json.loads(more["report"]))
    return Stored(sums, report, more)


def read_entries(path: Path) -> dict[str, str]:
    """The entries of a file that :func:`write_sums` has written, without the sums."""
    with np.load(path) as stored:
        return {name: str(stored[name]) for name in stored if not name.startswith("[")}


def _common(corpus: Corpus, settings: dict) -> list:
    """Inputs of a measurement besides model and metrics; a change of any of them starts afresh."""
    return [corpus.sha256, corpus.groups(GROUPS), settings, *store.computing_versions()]
