"""What is kept on disk: finished measurements, and the finished shards from which an interrupted one goes on."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora import Corpus, packages
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import shards
from analysis_lib.measurement.definitions import definition_hash
from analysis_lib.measurement.shards import Result
from analysis_lib.measurement.sources import source_hash
from analysis_lib.measurement.tables import Report, writing
from analysis_lib.metrics.accumulator import GROUPS, Metric, Sums
from analysis_lib.models import LoadedModel


class StoredMeasurements:
    """The finished measurements of a corpus under a model, a file per metric, which every later one can use.

    They lie in the folder ``measurements`` beside the pinned packages, or in the one that
    ``ANALYSIS_LIB_MEASUREMENTS`` names; where that is empty, and of a model that lives in this process alone, nothing
    is kept. What is found does not depend on who measured it, to rounding: other metrics in the same pass can call for
    other kernels.

    Attributes:
        folder: named after model and corpus, and all that the measurement depends on but the metric.
    """

    def __init__(self, model: LoadedModel, corpus: Corpus, settings: Settings):
        self.folder = None
        if model.spec is not None and (home := measurements_directory()):
            name = re.sub(r"[^\w.@=:+-]+", "_", f"{Path(model.name).name}-on-{Path(corpus.name).name}")[:80]
            self.folder = home / f"{name}-{_digest(_common(model, corpus, settings))}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Other processes that want to measure the same wait, and find it measured."""
        if self.folder is None:
            yield
            return
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def load(self, metric: Metric) -> Report | None:
        """Fill an empty metric with what was measured; what was read then, or None where there is nothing to find."""
        try:
            with np.load(self._path(metric)) as stored:
                sums, report = _read(stored)
        except (OSError, ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile):
            # Not there, damaged, or in a form of another version.
            return None
        metric.sums = sums[metric.name]
        return report

    def keep(self, metric: Metric, report: Report) -> None:
        """Keep what was measured, unless it cannot be known again."""
        if path := self._path(metric):
            _write(path, {metric.name: metric.sums}, report)

    def _path(self, metric: Metric) -> Path | None:
        try:
            return self.folder and self.folder / f"{metric.name}-{_digest(_metric(metric))}.npz"
        except AnalysisError:
            # A parameter has no lasting form.
            return None


def measurements_directory() -> Path | None:
    """Where finished measurements are kept; None where they are not."""
    chosen = os.environ.get("ANALYSIS_LIB_MEASUREMENTS")
    return packages.package_directory() / "measurements" if chosen is None else Path(chosen) if chosen else None


class StoredShards:
    """Finished shards in a folder, each written whole or not at all; without a folder, nothing is kept.

    Attributes:
        folder: named after all that the shards depend on, in the folder that was given.
    """

    def __init__(
        self, folder: Path | str | None, model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings
    ):
        self.folder = None
        if folder is not None:
            parts = [*_common(model, corpus, settings), *map(_metric, metrics), shards.UTTERANCES_PER_SHARD]
            self.folder = Path(folder) / f".unfinished-{_digest(parts)}"
            # Scratch files of a run that was killed.
            for scratch in self.folder.glob("*.tmp"):
                scratch.unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self.folder / f"shard-{index:06d}.npz"

    def has(self, index: int) -> bool:
        """Whether the shard is there and readable; a damaged one is measured again."""
        if self.folder is None or not self._path(index).is_file():
            return False
        try:
            with np.load(self._path(index)) as stored:
                return "report" in stored
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return False

    def keep(self, index: int, result: Result) -> Result:
        """Write the result of a shard, and return it."""
        if self.folder is not None:
            _write(self._path(index), *result)
        return result

    def load(self, index: int) -> Result:
        """What ``keep`` has written."""
        with np.load(self._path(index)) as stored:
            return _read(stored)


def _write(path: Path, sums: Mapping[str, Sums], report: Report) -> None:
    """Write sums by metric, and what was read, whole or not at all."""
    # numpy takes no tuples as names: keys are written as JSON.
    arrays = {json.dumps([name, *key]): array for name, of_metric in sums.items() for key, array in of_metric.items()}
    scratch = path.with_name(f"{uuid.uuid4().hex}.tmp")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with scratch.open("wb") as file:
                np.savez(file, report=json.dumps(asdict(report)), metrics=json.dumps([*sums]), **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def _read(stored: Mapping[str, np.ndarray]) -> Result:
    """What :func:`_write` has written."""
    found = {name: {} for name in json.loads(str(stored["metrics"]))}
    for name in stored:
        if name not in ("report", "metrics"):
            metric, *key = json.loads(name)
            found[metric][tuple(key)] = stored[name]
    return found, Report(**json.loads(str(stored["report"])))


def measuring_code(metrics: Iterable[Metric]) -> str:
    """The hash of the code that measures: the metrics, and all that they and a shard need."""
    return source_hash({shards.__name__, *(type(metric).__module__ for metric in metrics)})[:16]


def _common(model: LoadedModel, corpus: Corpus, settings: Settings) -> list:
    """All that a measurement depends on but its metrics: another model, text, setting or version starts afresh."""
    parts = {type(part).__module__ for part in (model.model, *corpus.items)}
    settings = asdict(settings) if model.layout.maps else {**asdict(settings), "maps": None}
    return [
        *(model.revision, str(model.model.dtype), model.device.type, repr(model.layout)),
        *(corpus.sha256, GROUPS, corpus.units),
        settings,
        source_hash({shards.__name__, *parts}),
        [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")],
    ]


def _metric(metric: Metric) -> list:
    return [metric.name, sorted(metric.needs), definition_hash(metric), source_hash({type(metric).__module__})]


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
