"""Finished shards on disk, from which an interrupted measurement goes on."""

import hashlib
import importlib.metadata
import json
import os
import uuid
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shards
from analysis_lib.measurement.definitions import definition_hash
from analysis_lib.measurement.shards import Result
from analysis_lib.measurement.sources import source_hash
from analysis_lib.measurement.tables import Report, writing
from analysis_lib.metrics.accumulator import GROUPS, Metric
from analysis_lib.models import LoadedModel


class StoredShards:
    """Finished shards in a folder, each written whole or not at all; without a folder, nothing is kept.

    Attributes:
        folder: named after all that the shards depend on, in the folder that was given.
    """

    def __init__(
        self, folder: Path | str | None, model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings
    ):
        self.names = [metric.name for metric in metrics]
        self.folder = None
        if folder is not None:
            self.folder = Path(folder) / f".unfinished-{_key(model, corpus, metrics, settings)[:16]}"
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
            by_metric, report = result
            # numpy takes no tuples as names: keys are written as JSON.
            arrays = {json.dumps([name, *key]): a for name, sums in by_metric.items() for key, a in sums.items()}
            scratch = self.folder / f"{uuid.uuid4().hex}.tmp"
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    with scratch.open("wb") as file:
                        np.savez(file, report=json.dumps(asdict(report)), **arrays)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(scratch, self._path(index))
                finally:
                    scratch.unlink(missing_ok=True)
        return result

    def load(self, index: int) -> Result:
        """What ``keep`` has written."""
        by_metric = {name: {} for name in self.names}
        with np.load(self._path(index)) as stored:
            for name in stored.files:
                if name != "report":
                    metric, *key = json.loads(name)
                    by_metric[metric][tuple(key)] = stored[name]
            report = Report(**json.loads(str(stored["report"])))
        return by_metric, report


def _key(model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings) -> str:
    """All that a stored shard depends on: another model, text, setting, metric or version starts afresh."""
    code = {shards.__name__, *(type(part).__module__ for part in (model.model, *metrics, *corpus.items))}
    parts = [
        model.revision,
        str(model.model.dtype),
        repr(model.layout),
        corpus.sha256,
        asdict(settings),
        [[metric.name, sorted(metric.needs), definition_hash(metric)] for metric in metrics],
        [shards.UTTERANCES_PER_SHARD, GROUPS, corpus.units],
        source_hash(code),
        [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
