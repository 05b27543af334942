"""Finished measurements on disk, and the sums from which an interrupted one goes on."""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import torch

from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora import Corpus, packages
from analysis_lib.errors import CONTINUES, AnalysisError
from analysis_lib.measurement import shards
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH, Merging
from analysis_lib.measurement.shards import Result
from analysis_lib.measurement.tables import Report
from analysis_lib.measurement.versions import library_hash, metric_identity
from analysis_lib.metrics.accumulator import GROUPS, GroupSums, Key, Metric
from analysis_lib.models import LoadedModel, ModelName, ModelSpec, devices
from analysis_lib.models.loading import revision_of

# About how many seconds of merged work a killed measurement may lose.
SECONDS_AT_RISK = 60
# What a file can raise that is not there, damaged, or in a form of another version.
UNREADABLE = (OSError, ValueError, TypeError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile)


class StoredMeasurements:
    """The finished measurements of a corpus under a model, a file per metric, which every later one can use.

    They lie in the folder ``measurements`` beside the pinned packages, or in the one that
    ``ANALYSIS_LIB_MEASUREMENTS`` names; where that is empty, and of a model that lives in this process alone, nothing
    is kept. What is found does not depend on who measured it, to rounding: other metrics in the same pass can call for
    other kernels.

    Attributes:
        folders: named after model and corpus, and all that the measurement depends on but the metric. Those of a
            network of maps are known by what a vector of it is; which networks have maps only their loading tells.
    """

    def __init__(self, spec: ModelSpec | None, revision: str, corpus: Corpus, settings: Settings):
        self.folders = []
        if spec is not None and (home := measurements_directory()):
            name = re.sub(r"[^\w.@=:+-]+", "_", f"{Path(spec.name).name}-on-{Path(corpus.name).name}")[:80]
            known = [revision, spec.dtype, torch.device(spec.device).type]
            for maps in (None, settings.maps):
                parts = [*known, *_common(corpus, {**asdict(settings), "maps": maps})]
                self.folders.append(home / f"{name}-{_digest(parts)}")

    @classmethod
    def of_model(cls, model: LoadedModel, corpus: Corpus, settings: Settings) -> Self:
        """Those of a model that is loaded."""
        found = cls(model.spec, model.revision, corpus, settings)
        found.folders = found.folders[bool(model.layout.maps) :][:1]
        return found

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
    def alone(self) -> Iterator[None]:
        """Inside it, other processes that want to measure the same wait; they find it measured, if it is kept."""
        with ExitStack() as held:
            with suppress(AnalysisError):
                for folder in self.folders[:1]:
                    held.enter_context(packages.alone(folder / ".lock"))
            yield

    def load(self, metric: Metric) -> tuple[Report, dict] | None:
        """Fill an empty metric with what was measured; what was read then, and ``run.json``; or None."""
        for folder in self.folders:
            try:
                with np.load(folder / _file(metric)) as stored:
                    (sums, report), run = _read(stored), json.loads(str(stored["run"]))
                metric.merge(metric.fresh(sums[metric.name]))
                return report, run
            except (*UNREADABLE, AnalysisError):
                # Or with a parameter that has no lasting form.
                continue
        return None

    def keep(self, metric: Metric, report: Report, run: dict) -> None:
        """Keep what was measured, unless it cannot be known again."""
        for folder in self.folders:
            with suppress(AnalysisError):
                _write(folder / _file(metric), {metric.name: metric.arrays()}, report, run=json.dumps(run))

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What ``make`` gives of each text, if it is not kept yet under a name that changes with all it depends on."""
        path = next((folder / f"{name}.npy" for folder in self.folders), None)
        if path is None:
            return make()
        with self.alone():
            with suppress(*UNREADABLE):
                return np.load(path)
            array = make()
            with suppress(AnalysisError), packages.writing(path.parent), packages.scratch(path.parent, name) as scratch:
                np.save(scratch / path.name, array)
                os.replace(scratch / path.name, path)
            return array


def _file(metric: Metric) -> str:
    return f"{metric.name}-{_digest(metric_identity(metric))}.npz"


def measurements_directory() -> Path | None:
    """Where finished measurements are kept; None where they are not."""
    chosen = os.environ.get("ANALYSIS_LIB_MEASUREMENTS")
    return packages.package_directory() / "measurements" if chosen is None else Path(chosen) if chosen else None


@contextmanager
def interruption(kept: bool) -> Iterator[None]:
    """Inside it, a Ctrl-C that says nothing of its own says whether something is kept of what came before it."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or (CONTINUES if kept else "")) from None


class MergedSums:
    """What an interrupted measurement has merged: one file in a folder, written now and then, whole or not at all.

    Attributes:
        path: named after all that the sums depend on, in the folder that was given; None without one: nothing is kept.
        merged: how many shards of the measurement are in the file.
    """

    def __init__(
        self, folder: Path | str | None, model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings
    ):
        self.path, self.merged, self._next = None, 0, time.monotonic() + SECONDS_AT_RISK
        if folder is not None:
            known = [model.revision, str(model.model.dtype), model.device.type, repr(model.layout)]
            known += _common(corpus, asdict(settings))
            parts = [*known, *map(metric_identity, metrics), shards.UTTERANCES_PER_SHARD, SHARDS_PER_BRANCH]
            self.path = Path(folder) / f".unfinished-{_digest(parts)}.npz"
            # Tried before the work begins.
            with packages.writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, metrics: list[Metric]) -> Merging:
        """Fill empty metrics with what is there; a damaged file is none."""
        sums, merging = {}, Merging(metrics)
        with suppress(*UNREADABLE):
            if self.path is not None:
                with np.load(self.path) as stored:
                    (sums, merging.report), merging.shards = _read(stored), int(stored["merged"])
        for place, held in merging.places.items():
            for metric in held:
                metric.merge(metric.fresh(sums.get(f"{place} {metric.name}")))
        self.merged = merging.shards
        return merging

    def keep(self, merging: Merging, *, now: bool = False) -> None:
        """Write what is merged ``now``, or if so much time has passed that its loss would hurt."""
        due = now or time.monotonic() >= self._next
        if self.path is None or merging.shards == self.merged or not due:
            return
        started, places = time.monotonic(), merging.places.items()
        sums = {f"{place} {metric.name}": metric.arrays() for place, held in places for metric in held}
        _write(self.path, sums, merging.report, merged=merging.shards)
        self.merged = merging.shards
        # Of a large model the file is large, too: writing it takes a small share of the time.
        self._next = time.monotonic() + SECONDS_AT_RISK * (1 + time.monotonic() - started)


def _write(path: Path, sums: Mapping[str, dict[Key, GroupSums]], report: Report, **more: str | int) -> None:
    """Write sums by metric, and what was read, whole or not at all."""
    # numpy takes no tuples as names: keys are written as JSON.
    arrays = {
        json.dumps([name, groups, *key]): values
        for name, of_metric in sums.items()
        for key, (groups, values) in of_metric.items()
    }
    more["arrays"] = len(arrays)
    with packages.writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with packages.scratch(path.parent, path.stem) as scratch:
            with (scratch / path.name).open("wb") as file:
                np.savez(file, report=json.dumps(asdict(report)), metrics=json.dumps([*sums]), **more, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch / path.name, path)


def _read(stored: Mapping[str, np.ndarray]) -> Result:
    """What :func:`_write` has written."""
    found = {name: {} for name in json.loads(str(stored["metrics"]))}
    names = [name for name in stored if name.startswith("[")]
    if len(names) != int(stored["arrays"]):
        raise ValueError("an array is gone")
    for name in names:
        metric, groups, *key = json.loads(name)
        found[metric][tuple(key)] = GroupSums(tuple(groups), stored[name])
    return found, Report(**json.loads(str(stored["report"])))


# Read once: a page may measure a hundred times.
installed_version = functools.cache(importlib.metadata.version)


def _common(corpus: Corpus, settings: dict) -> list:
    """What a measurement depends on besides model and metrics; another text, setting or version starts afresh."""
    return [
        *(corpus.sha256, corpus.groups(GROUPS), settings),
        library_hash(),
        [installed_version(name) for name in ("torch", "transformers", "tokenizers", "numpy")],
    ]


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
