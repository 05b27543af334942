"""Corpus x model x metrics -> tidy tables, in this process, in a pool of processes or on a Dask cluster."""

import ctypes
import errno
import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from analysis_lib import capture
from analysis_lib.capture import SCORES, WEIGHTS, Reading, Settings
from analysis_lib.corpora.loading import PLURAL, Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.metrics import METRICS, Metric, resolve
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models.loading import LoadedModel, ModelSpec, load_model

# A shard is what an interrupted run can lose, and what a worker takes at once.
UTTERANCES_PER_SHARD = 512


@dataclass
class Report(Reading):
    """What was read, and what was not.

    Attributes:
        tokens: of all utterances at layer 0, special tokens included.
        counted: those that count as vectors and as queries.
        zero_vectors: by "space layer", how many vectors had no direction and were left out of cosines.
        layers: of each layer, in order, what :attr:`Tables.layers` tells.
    """

    tokens: int = 0
    counted: int = 0
    zero_vectors: dict[str, int] = field(default_factory=dict)
    layers: list[dict] = field(default_factory=list)

    def merge(self, other: "Report") -> None:
        for name in ("utterances", "cut", "windowed", "tokens", "counted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, count in other.zero_vectors.items():
            self.zero_vectors[key] = self.zero_vectors.get(key, 0) + count
        self.layers = self.layers or other.layers

    def add(self, activations: capture.Activations) -> None:
        """Take note of a layer of a batch."""
        if activations.layer == 0:
            hidden = activations.spaces.get("hidden")
            tokens = activations.tokens if hidden is None else hidden.tokens
            self.tokens += int(tokens.mask.sum())
            self.counted += int(tokens.counts.sum())
        if activations.layer == len(self.layers):
            self.layers.append(_layer(activations))
        for space, vectors in activations.spaces.items():
            # Only where a metric asked for the norms: counting would compute them.
            if space != "attention_input" and "norms" in vars(vectors) and vectors.zeros:
                key = f"{space} {activations.layer}"
                self.zero_vectors[key] = self.zero_vectors.get(key, 0) + vectors.zeros


def _layer(activations: capture.Activations) -> dict:
    sizes = {space: vectors.values.shape for space, vectors in activations.spaces.items()}
    return {
        "layer": activations.layer,
        "stack": activations.stack,
        "part": activations.part,
        "width": sizes["hidden"][-1] if "hidden" in sizes else None,
        "heads": sizes["query"][1] if "query" in sizes else None,
        "key_heads": sizes["key"][1] if "key" in sizes else None,
        "head_width": sizes["query"][-1] if "query" in sizes else None,
    }


_SIZES = ("width", "heads", "key_heads", "head_width")


def grouped(frames: Mapping[str, pd.DataFrame], column: str) -> pd.DataFrame:
    """Tables of one kind below each other, what each is of in a column in front."""
    return pd.concat(frames, names=[column]).reset_index(column).reset_index(drop=True)


class Tables(Mapping[str, pd.DataFrame]):
    """The tables of a measurement by name, made when first asked for.

    Attributes:
        report: what was read.
        layers: a row a layer: layer, stack (encoder, decoder, ...), part (the path of its block), width (dimensions
            of its hidden vectors), heads, key_heads and head_width (missing where it has no attention, or where no
            metric asked for it).
        run: parameters, model, data, versions and duration, as in ``run.json``.
        checkpoints: the folder of this measurement's finished shards, if they were kept; it may go once the tables
            are saved.
    """

    def __init__(self, metrics: Iterable[Metric], report: Report, run: dict, checkpoints: Path | None = None):
        self._metrics = {metric.name: metric for metric in metrics}
        self._tables: dict[str, pd.DataFrame] = {}
        self.report = report
        self.layers = pd.DataFrame(report.layers).astype(dict.fromkeys(_SIZES, "Int64"))
        self.run = run
        self.checkpoints = checkpoints

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._tables:
            self._tables[name] = self._metrics[name].table()
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def interval(
        self, statistic: Callable[[Mapping[str, pd.DataFrame]], float | Sequence[float]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Any number computed from the tables, or several, with 95 % jackknife intervals over utterances.

        ``statistic`` is called on the tables, and on the tables of the corpus without each of its groups of
        utterances in turn (there without the interval columns).

        Returns:
            The value, the lower and the upper bound, of the shape that ``statistic`` gives; the bounds are NaN for
            a corpus of one utterance.

        >>> tables.interval(lambda t: t["attention_entropy"]["entropy_nats"].mean())  # doctest: +SKIP
        (array(1.58), array(1.57), array(1.59))
        """
        value, left_out = self.left_out(statistic)
        return value, *jackknife_interval(value, left_out)

    def left_out(
        self, statistic: Callable[[Mapping[str, pd.DataFrame]], float | Sequence[float]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The value of ``interval``, and what it is without each group of utterances, a row a group.

        For numbers that depend on several tables of the same corpus: their groups are the same.
        """
        value = np.asarray(statistic(self), dtype=float)
        groups = sorted({group for metric in self._metrics.values() for group in metric.occupied_groups()})
        return value, np.array([statistic(_Without(self._metrics, group)) for group in groups], dtype=float)

    def save(self, folder: Path | str) -> None:
        """Write a Parquet file a table, then ``run.json``.

        Each file is replaced whole, and ``run.json`` comes last: where it lies, everything it lists does.
        """
        folder = Path(folder)
        tables = {name: self[name] for name in self}
        run = {**self.run, "tables": {name: len(table) for name, table in tables.items()}}
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in (*_files_of(tables), "run.json"):
                if (folder / name).is_dir():
                    raise AnalysisError(f"{folder / name} is a folder: move it, or give another folder")
            with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-tables-") as scratch:
                unfinished = Path(scratch)
                for name, table in tables.items():
                    table.to_parquet(unfinished / f"{name}.parquet", index=False)
                text = json.dumps(run, indent=2, ensure_ascii=False) + "\n"
                (unfinished / "run.json").write_text(text, encoding="utf-8", errors="backslashreplace")
                stale = _files_of(_listed(folder / "run.json")) - _files_of(tables)
                (folder / "run.json").unlink(missing_ok=True)
                # The folder holds one run: a table that only the previous one wrote would seem to be ours.
                for name in stale:
                    (folder / name).unlink(missing_ok=True)
                for name in (*_files_of(tables), "run.json"):
                    os.replace(unfinished / name, folder / name)


def _files_of(tables: Iterable[str]) -> set[str]:
    return {f"{name}.parquet" for name in tables}


def _listed(run: Path) -> list[str]:
    """The tables that a ``run.json`` lists; none where there is no readable one."""
    try:
        return [name for name in json.loads(run.read_text(encoding="utf-8"))["tables"] if name in METRICS]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class _Without(Mapping[str, pd.DataFrame]):
    """The tables without one group of utterances."""

    def __init__(self, metrics: Mapping[str, Metric], group: int):
        self._metrics, self._group = metrics, group
        self._tables: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._tables:
            self._tables[name] = self._metrics[name].without(self._group)
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def measure(
    model: LoadedModel,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric] = "all",
    *,
    special_tokens: bool = True,
    long_texts: str = "cut",
    tokens_per_batch: int = Settings.tokens_per_batch,
    maps: str = Settings.maps,
    workers: int = 1,
    scheduler: str | None = None,
    checkpoints: Path | str | None = None,
    progress: bool = True,
) -> Tables:
    """Every metric of a corpus under a model, in one pass.

    Args:
        model: from ``load_model``.
        corpus: from ``load_corpus``.
        metrics: names, comma-separated or listed, accumulators, or ``all``.
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries; as keys they always do.
        long_texts: ``cut`` or ``window``, see :class:`Settings`.
        tokens_per_batch: how many tokens, padding included, go through the model at once.
        maps: of a convolutional network, ``flatten`` or ``positions``, see :class:`Settings`.
        workers: processes on this machine; the result is the same for every number.
        scheduler: the address of a Dask scheduler (``tcp://...``), instead of ``workers``.
        checkpoints: a folder for finished shards; a run that was interrupted goes on from there.
        progress: whether to show a bar.

    Returns:
        The tables by name, such as ``tables["anisotropy"]``.

    Raises:
        AnalysisError: a model that cannot be captured, vectors that are not finite (the layer is named), too
            little text, workers that died, a scheduler that does not answer.
    """
    started = time.monotonic()
    settings = Settings(special_tokens, long_texts, tokens_per_batch, maps)
    empty = _applicable(resolve(metrics), metrics == "all", model, corpus, settings)
    if workers < 1:
        raise AnalysisError(f"the number of workers is {workers}: give 1 or more")
    tasks = _shards(model, corpus, empty, settings)
    store = _Checkpoints(checkpoints, _key(model, corpus, empty, settings))
    report = Report()
    # One by one in the order of the shards, whichever finished first: the bytes do not depend on who did what.
    with tqdm(total=len(corpus), unit=model.kind, desc=f"{model.name} on {corpus.name}", disable=not progress) as bar:
        for task, (sums, shard_report) in zip(tasks, _results(tasks, model, store, workers, scheduler), strict=True):
            for metric in empty:
                metric.merge(sums[metric.name])
            report.merge(shard_report)
            bar.update(len(task.items))
    if not report.counted:
        raise AnalysisError(f"{corpus.name} has no token that counts: keep the special tokens or give other text")
    run = _describe(model, corpus, settings, report, time.monotonic() - started)
    return Tables(empty, report, run, store.folder)


def _applicable(
    metrics: list[Metric], whatever: bool, model: LoadedModel, corpus: Corpus, settings: Settings
) -> list[Metric]:
    """The metrics that make sense for the model; those that do not are refused, or left out where all were asked for.

    Raises:
        AnalysisError: one that does not, named; or a corpus of another kind than the model reads.
    """
    if model.kind != corpus.kind:
        raise AnalysisError(
            f"{model.name} reads {PLURAL[model.kind]} and {corpus.name} holds {PLURAL[corpus.kind]}: "
            f"give {PLURAL[model.kind]}, or a model that reads {PLURAL[corpus.kind]}"
        )
    lacking = set() if model.layout.has_attention else {*capture.SPACES, WEIGHTS, SCORES} - {"hidden"}
    whole_maps = model.layout.maps and settings.maps == "flatten"
    senseless = {m.name: "it has no attention" for m in metrics if m.needs <= lacking}
    if whole_maps:
        one = "an image is one vector there, unless maps is positions"
        senseless |= {m.name: one for m in metrics if m.of_pairs_within_utterances}
    if senseless and not whatever:
        name, reason = next(iter(senseless.items()))
        raise AnalysisError(f"{name} makes no sense for {model.name}: {reason}; leave it out")
    return [metric for metric in metrics if metric.name not in senseless]


# --- A shard --------------------------------------------------------------------------------------

Result = tuple[dict[str, Metric], Report]


@dataclass(frozen=True)
class Shard:
    """A piece of work, whole in itself: it can run in any process that can load the model."""

    index: int
    first: int
    items: tuple
    metrics: tuple[Metric, ...]
    settings: Settings
    spec: ModelSpec | None


def _shards(model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings) -> list[Shard]:
    size = UTTERANCES_PER_SHARD
    return [
        Shard(
            index,
            start,
            tuple(corpus.items[start : start + size]),
            tuple(metric.fresh() for metric in metrics),
            settings,
            model.spec,
        )
        for index, start in enumerate(range(0, len(corpus), size))
    ]


def measure_shard(shard: Shard, model: LoadedModel | None = None) -> Result:
    """The accumulators and the report of one shard: a pure function of what the shard says."""
    model = model or _model_of(shard.spec)
    metrics = {metric.name: metric.fresh() for metric in shard.metrics}
    report = Report()
    needs = frozenset().union(*(metric.needs for metric in metrics.values()))
    groups = [(shard.first + i) % GROUPS for i in range(len(shard.items))]

    def receive(activations: capture.Activations) -> None:
        for metric in metrics.values():
            metric.update(activations)
        report.add(activations)

    for batch in capture.batches(model, shard.items, groups, shard.settings, report):
        capture.run(model, batch, needs, receive, shard.settings.maps)
        release_freed_memory()
    return metrics, report


def release_freed_memory() -> None:
    """Give what is freed back to the system.

    Every batch has another shape, so the pieces that glibc keeps for the next one rarely fit it: without this, a
    process grows by a third over ten thousand sentences although nothing is kept.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


_C_LIBRARY = ctypes.CDLL(None)
# Other C libraries have no such function, and no such habit.
_MALLOC_TRIM = getattr(_C_LIBRARY, "malloc_trim", None)
if _MALLOC_TRIM is not None:
    # M_MMAP_THRESHOLD: the largest pieces come from the system and go back to it at once, in every process alike.
    _C_LIBRARY.mallopt(-3, 4 * 2**20)


@lru_cache(maxsize=1)
def _model_of(spec: ModelSpec) -> LoadedModel:
    return load_model(spec.name, spec.revision, dtype=spec.dtype, device=spec.device)


# --- Who does the work ----------------------------------------------------------------------------


def _results(
    shards: list[Shard], model: LoadedModel, store: "_Checkpoints", workers: int, scheduler: str | None
) -> Iterator[Result]:
    """The results of the shards, in their order."""
    kept = {shard.index for shard in shards if store.has(shard.index)}
    todo = [shard for shard in shards if shard.index not in kept]
    if (workers > 1 or scheduler) and model.spec is None and todo:
        raise AnalysisError(f"{model.name} lives in this process alone: save it to a folder to measure it with workers")
    if scheduler is not None:
        fresh = _on_cluster(todo, scheduler, store)
    elif workers > 1 and len(todo) > 1:
        fresh = _in_pool(todo, min(workers, len(todo)), store)
    else:
        fresh = (store.keep(shard, measure_shard(shard, model)) for shard in todo)
    for shard in shards:
        yield store.load(shard) if shard.index in kept else next(fresh)


def _in_pool(shards: list[Shard], workers: int, store: "_Checkpoints") -> Iterator[Result]:
    """Shards in a pool of processes. A worker that is killed breaks its pool: one more is tried for the rest."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    done: dict[int, Result | None] = {}
    for attempts_left in (2, 1, 0):
        try:
            with processes.pool(workers, threads) as pool:
                yield from _in_order(pool, shards, 2 * workers, store, done)
            return
        except BrokenProcessPool:
            shards = [shard for shard in shards if shard.index not in done or done[shard.index] is not None]
            if not attempts_left:
                raise AnalysisError(
                    "worker processes died three times (out of memory?): use fewer --workers; what is finished is kept"
                ) from None


def _on_cluster(shards: list[Shard], address: str, store: "_Checkpoints") -> Iterator[Result]:
    from distributed import Client

    try:
        client = Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise AnalysisError(f"no Dask scheduler answers at {address}: start one with `dask scheduler`") from error
    with client:
        if not client.ncores():
            raise AnalysisError(
                f"the Dask scheduler at {address} has no workers: start some with `dask worker {address}`"
            )
        window = 2 * max(1, sum(client.ncores().values()))
        # pure=False: a shard is no cache key, and hashing its texts would cost more than it saves.
        yield from _in_order(client.get_executor(pure=False, retries=2), shards, window, store, {})


def _in_order(
    executor: futures.Executor,
    shards: list[Shard],
    window: int,
    store: "_Checkpoints",
    done: dict[int, Result | None],
) -> Iterator[Result]:
    """Results in the order of the shards, with at most ``window`` under way or waiting for their turn.

    ``done`` remembers, across a broken pool, what has finished; None marks what was handed on.
    """
    waiting = [shard for shard in shards if shard.index not in done]
    running: dict[futures.Future, Shard] = {}
    for shard in shards:
        while done.get(shard.index) is None:
            while waiting and len(running) + sum(result is not None for result in done.values()) < window:
                nxt = waiting.pop(0)
                running[executor.submit(measure_shard, nxt)] = nxt
            finished, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
            for future in finished:
                finished_shard = running.pop(future)
                done[finished_shard.index] = store.keep(finished_shard, future.result())
        result, done[shard.index] = done[shard.index], None
        yield result


# --- Finished shards on disk ----------------------------------------------------------------------


class _Checkpoints:
    """Finished shards in a folder, each written whole or not at all; without a folder, nothing is kept."""

    def __init__(self, folder: Path | str | None, key: str):
        self.folder = Path(folder) / f".unfinished-{key[:16]}" if folder is not None else None
        if self.folder is not None:
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

    def keep(self, shard: Shard, result: Result) -> Result:
        if self.folder is not None:
            metrics, report = result
            # numpy keeps no tuples as names: keys travel as JSON.
            arrays = {json.dumps([n, *key]): a for n, metric in metrics.items() for key, a in metric.sums.items()}
            scratch = self.folder / f"{uuid.uuid4().hex}.tmp"
            with _writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    with scratch.open("wb") as file:
                        np.savez(file, report=json.dumps(asdict(report)), **arrays)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(scratch, self._path(shard.index))
                finally:
                    scratch.unlink(missing_ok=True)
        return result

    def load(self, shard: Shard) -> Result:
        metrics = {metric.name: metric.fresh() for metric in shard.metrics}
        with np.load(self._path(shard.index)) as stored:
            for name in stored.files:
                if name != "report":
                    metric, *key = json.loads(name)
                    metrics[metric].sums[tuple(key)] = stored[name]
            report = Report(**json.loads(str(stored["report"])))
        return metrics, report


def _key(model: LoadedModel, corpus: Corpus, metrics: list[Metric], settings: Settings) -> str:
    """What a stored shard depends on; another model, text, setting or version of the code starts afresh."""
    parts = [
        model.revision,
        str(model.model.dtype),
        corpus.sha256,
        asdict(settings),
        [[metric.name, sorted(metric.needs)] for metric in metrics],
        [UTTERANCES_PER_SHARD, GROUPS],
        _sources(),
        [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_SOURCES = ("corpora", "models", "capture", "metrics", "measurement")


def _sources() -> str:
    """sha256 over the code that a shard's result depends on."""
    home = Path(__file__).parents[1]
    files = sorted(path for name in _SOURCES for path in (home / name).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "free some space and run again" if error.errno == errno.ENOSPC else "give another folder"
        raise AnalysisError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error


def _describe(
    model: LoadedModel, corpus: Corpus, settings: Settings, report: Report, seconds: float
) -> dict[str, object]:
    versions = ("torch", "transformers", "tokenizers", "numpy", "pandas", "scipy")
    return {
        "model": model.name,
        "model_revision": model.revision,
        "model_files": model.files,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "data": corpus.name,
        "data_sha256": corpus.sha256,
        "texts": len(corpus),
        "blank_left_out": corpus.blank,
        "settings": asdict(settings),
        "report": {name: value for name, value in asdict(report).items() if name != "layers"},
        "layers": report.layers,
        "versions": {name: importlib.metadata.version(name) for name in versions},
        "seconds": round(seconds, 3),
    }
