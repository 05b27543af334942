"""Whole measurements: the same bytes however they are run, resumed after any interruption, and
saved whole.
"""

import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from multiprocessing import Process
from pathlib import Path
from types import SimpleNamespace

import copies
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from conftest import SHARED
from distributed import Client, LocalCluster
from eager import EAGER, wait_until_stopped
from reference import COLUMNS, OF_HIDDEN_STATES, Reference, assert_agree
from safetensors.torch import load_file, save_file
from sklearn.metrics.pairwise import cosine_similarity
from waiting import PATIENCE, wait_until

from analysis_lib import (
    AnalysisError,
    LoadedModel,
    Tables,
    load_corpus,
    load_model,
    measure,
    metrics,
)
from analysis_lib.capture import Owners, source
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.source import as_source
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import execution, merging, shards
from analysis_lib.measurement.tables import Report
from analysis_lib.models.live import live_model

ROOT = Path(__file__).resolve().parents[2]
TEXTS = tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS)
CORPUS = Corpus("texts", TEXTS)
FEW = "anisotropy,attention_entropy"
OF_ATTENTION = [name for name in COLUMNS if name not in OF_HIDDEN_STATES]


@pytest.fixture(scope="module")
def model(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder("bert")))


def merged(folder: Path) -> int:
    """How many shards the file holds from which a measurement would go on."""
    for path in folder.glob(".unfinished-*.npz"):
        with np.load(path) as kept:
            return int(kept["merged"])
    return 0


def assert_same_bytes(
    found: Mapping[str, pd.DataFrame], expected: Mapping[str, pd.DataFrame]
) -> None:
    assert list(found) == list(expected)
    for name in expected:
        pd.testing.assert_frame_equal(found[name], expected[name], check_exact=True)


# --- One pass, whoever does it --------------------------------------------------------------------


def test_shards_and_batches_do_not_change_the_result(model, small_shards, monkeypatch):
    tables = measure(model, CORPUS, progress=False)
    assert (tables.report.utterances, set(tables)) == (64, set(COLUMNS))
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 512)
    one = measure(model, CORPUS, tokens_per_batch=100, progress=False)
    for name in tables:
        pd.testing.assert_frame_equal(tables[name], one[name], rtol=1e-4, atol=1e-5)
    assert tables.report == one.report


@pytest.fixture(scope="module")
def news() -> Corpus:
    """A long text, of whose sums the order shows, and short ones."""
    return Corpus("news", (*load_corpus("news:articles").texts[:1], *load_corpus("news").texts[:3]))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of PyTorch's threads, which is as before in the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_more_workers_give_the_same_bytes(minilm, news, threads, monkeypatch, copied_workers):
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 1)
    threads(2)
    expected = measure(minilm, news, progress=False)
    for workers in (2, 3):
        assert_same_bytes(measure(minilm, news, workers=workers, progress=False), expected)
    assert expected.run["threads"] == torch.get_num_threads() == 2


def test_a_shard_is_computed_with_its_threads_and_no_others(model, threads, monkeypatch):
    seen = []

    class Watching(metrics.Anisotropy):
        def update(self, activations):
            seen.append(torch.get_num_threads())
            super().update(activations)

    threads(2)
    (shard,) = shards.make_shards(
        as_source(model), CORPUS, [Watching()], Settings(tokens_per_batch=1)
    )
    # Two parts are computed at a time, each by one of the threads.
    shards.measure_shard(shard, as_source(model))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    seen.clear()
    threads(1)
    monkeypatch.setattr(source, "LARGE", 0)
    shards.measure_shard(shard, as_source(model))
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1


class Recording(metrics.Anisotropy):
    """Notes which thread computes how many tokens with which weights."""

    name, seen = "recording", []

    def update(self, activations):
        if activations.layer == 0:
            self.seen.append((threading.get_ident(), len(activations.tokens.mask)))
        super().update(activations)


def test_parts_side_by_side_give_the_bytes_of_one_after_another(model, threads):
    threads(1)
    settings = {"progress": False, "tokens_per_batch": 12}
    every = [name for name, metric in metrics.METRICS.items() if not metric.on_request]
    alone = measure(model, CORPUS, every, **settings)
    Recording.seen.clear()
    threads(2)
    beside = measure(model, CORPUS, [*every, Recording()], **settings)
    used = (
        pd.DataFrame(Recording.seen, columns=["thread", "texts"]).groupby("thread")["texts"].sum()
    )
    assert len(used) == 2
    assert used.min() > 0.25 * used.sum()
    assert_same_bytes({name: beside[name] for name in alone}, alone)
    threads(3)
    assert_same_bytes(measure(model, CORPUS, every, **settings), alone)


def test_threads_share_a_corpus_of_few_batches(model, threads):
    class Slow(Recording):
        def update(self, activations):
            time.sleep(0.05)
            super().update(activations)

    threads(2)
    Recording.seen.clear()
    measure(model, Corpus("few", TEXTS[:6]), [Slow()], progress=False, tokens_per_batch=12)
    assert 3 <= len(Recording.seen) <= 6
    assert len({thread for thread, _ in Recording.seen}) == 2


def test_threads_that_measure_one_model_have_its_weights_and_hooks_of_their_own(model):
    replica = model.replica()
    assert replica.model is not model.model
    for (name, weight), (_, other) in zip(
        model.model.named_parameters(), replica.model.named_parameters(), strict=True
    ):
        assert weight is other, name
    for blocks, others in zip(model.stacks.values(), replica.stacks.values(), strict=True):
        assert not {*map(id, blocks)} & {*map(id, others)}
    with replica.lock:
        assert not model.lock.locked()


def test_what_a_thread_meets_ends_the_measurement(model, threads):
    class Failing(metrics.Anisotropy):
        def update(self, activations):
            if threading.current_thread() is not threading.main_thread() and activations.layer == 1:
                raise AnalysisError("a thread met this")
            super().update(activations)

    threads(2)
    before = threading.active_count()
    with pytest.raises(AnalysisError, match="a thread met this"):
        measure(model, CORPUS, [Failing()], progress=False, tokens_per_batch=12)
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_a_model_that_a_program_holds_runs_alone(model, threads):
    threads(2)
    live = live_model(model.model, model.tokenizer)
    Recording.seen.clear()
    measure(live, CORPUS, [Recording()], progress=False, tokens_per_batch=12)
    assert {thread for thread, _ in Recording.seen} == {threading.get_ident()}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", (4e-4, 2e-6)), ("float64", (2e-9, 2e-12))]
)
def test_other_threads_agree_to_the_tolerance_that_is_promised(
    dtype, tolerance, minilm, minilm64, news, threads
):
    model = minilm if dtype == "float32" else minilm64
    threads(1)
    expected = measure(model, news, progress=False)
    threads(2)
    assert_agree(measure(model, news, progress=False), expected, tolerance)


@pytest.fixture(scope="module")
def lines(news, tmp_path_factory) -> Path:
    """A file of the same texts."""
    path = tmp_path_factory.mktemp("news") / "lines.txt"
    path.write_text("\n".join(text.replace("\n", " ") for text in news.texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tables_of_lines(minilm, lines) -> Tables:
    return measure(minilm, load_corpus(str(lines)), progress=False)


@pytest.mark.parametrize(
    "processor",
    [
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    ],
    ids=["avx2", "default"],
)
def test_other_processors_agree_to_the_tolerance_that_is_promised(
    lines, tables_of_lines, processor, tmp_path
):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "analysis_lib",
            "measure",
            "--model",
            "minilm",
            "--data",
            lines,
            "--out",
            "out",
        ],
        cwd=tmp_path,
        env={**os.environ, **processor, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    found = {name: pd.read_parquet(tmp_path / "out" / f"{name}.parquet") for name in COLUMNS}
    assert_agree(found, tables_of_lines, (4e-4, 2e-6))


def test_a_killed_worker_process_changes_nothing(model, small_shards, tmp_path, copied_workers):
    # Slow enough to be half-way: many shards, one text at a time.
    corpus = Corpus("long", TEXTS * 4)
    expected = measure(model, corpus, FEW, tokens_per_batch=1, progress=False)
    done: list[int] = []

    def kill_one() -> None:
        wait_until(lambda: merged(tmp_path))
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        done.append(merged(tmp_path))

    killer = threading.Thread(target=kill_one)
    killer.start()
    tables = measure(
        model, corpus, FEW, tokens_per_batch=1, workers=2, checkpoints=tmp_path, progress=False
    )
    killer.join()
    assert done
    assert done[0] < len(corpus) // small_shards
    assert_same_bytes(tables, expected)
    assert tables.report == expected.report


def test_workers_that_keep_dying_are_an_error(model, small_shards, monkeypatch, copied_workers):
    monkeypatch.setattr(execution, "measure_packed", _die)
    with pytest.raises(AnalysisError, match="worker processes died three times") as caught:
        measure(model, CORPUS, workers=2, progress=False)
    assert "\n" not in str(caught.value)


def _die(_: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("late", [0, 1])  # 0 is measured in this process, 1 in another
def test_what_waits_for_its_turn_is_bounded(late, monkeypatch):
    """While a slow shard holds up the others, they must not pile up: memory would grow with the
    corpus.
    """
    started: list[int] = []
    slow = threading.Event()

    def measured(tasks) -> execution.Part:
        started.append(tasks[0].index)
        if tasks[0].index == late:
            slow.wait(PATIENCE)
        return 1, ({}, Report())

    monkeypatch.setattr(execution, "packed", lambda task, _: task)
    monkeypatch.setattr(execution, "measure_packed", measured)
    many = [[SimpleNamespace(index=index, metrics=())] for index in range(32)]
    with futures.ThreadPoolExecutor(2) as executor:
        results = execution.in_order(executor, many, lambda: 2, measured)
        threading.Timer(0.5, slow.set).start()
        for _ in range(late + 1):
            next(results)
        assert len(started) <= late + 5
        assert len(list(results)) == 31 - late


def test_workers_need_a_model_that_others_can_load():
    transformer, words = tiny.build("bert")
    alone = LoadedModel("alone", "seed 0", transformer, words)
    for elsewhere in ({"workers": 2}, {"scheduler": "tcp://127.0.0.1:1"}):
        with pytest.raises(AnalysisError, match=r"alone.*save it to a folder"):
            measure(alone, CORPUS, progress=False, **elsewhere)
    with pytest.raises(AnalysisError, match="workers is 0"):
        measure(alone, CORPUS, workers=0)


def test_a_worker_loads_the_untrained_twin_too(tiny_folder, small_shards):
    twin = load_model(f"{tiny_folder('bert')}:untrained")
    (shard, *_) = shards.make_shards(as_source(twin), CORPUS, metrics.resolve(FEW), Settings())
    shards._loaded.cache_clear()
    (here, _), (there, _) = (
        shards.measure_shard(shard, as_source(twin)),
        shards.measure_shard(shard),
    )
    assert list(here) == FEW.split(",")
    for name, sums in here.items():
        assert list(sums) == list(there[name])
        for key, (groups, values) in sums.items():
            assert sorted(groups) == [*range(3)]
            assert groups == there[name][key].groups
            assert (values == there[name][key].values).all()


# --- A metric of one's own ------------------------------------------------------------------------


class Share(metrics.Metric):
    """The share of hidden vectors that are longer than ``norm``, times ``scale``."""

    name, needs, interval, counts = "share", frozenset({"hidden"}), "share", "tokens"

    def __init__(self, norm: float, scale: float = 1.0):
        super().__init__()
        self.norm, self.scale = norm, scale

    def update(self, activations):
        hidden, layer = activations.spaces["hidden"], activations.layer
        self.add(("long", layer), (hidden.norms > self.norm).sum((1, 2)) * _unit(), activations)
        self.add(("tokens", layer), hidden.counts, activations)

    def rows(self, sums):
        tokens = sums["tokens"]
        # What counts is not the last column.
        return {"tokens": tokens, "share": self.scale * sums["long"] / tokens}


def _unit() -> float:
    return 1.0


def lengths_of(model: LoadedModel) -> np.ndarray:
    """The norms of the last hidden states of ``CORPUS``, token by token."""
    with torch.no_grad():
        states = [
            model.model(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            for text in TEXTS
        ]
    return torch.cat(states).norm(dim=-1).numpy()


def test_a_metric_with_a_parameter_is_measured_by_workers_and_resumed(
    model, small_shards, tmp_path, measured_shards, copied_workers
):
    lengths = lengths_of(model)
    norm = float(np.median(lengths))
    settings = {"checkpoints": tmp_path, "progress": False}
    tables = measure(model, CORPUS, [Share(norm, scale=100)], workers=2, **settings)
    last = tables["share"].iloc[-1]
    assert (last["tokens"], last["share"]) == (
        len(lengths),
        pytest.approx(100 * (lengths > norm).mean(), abs=0.5),
    )
    assert last["ci_low"] < last["share"] < last["ci_high"]
    # This process takes its share, and only that.
    assert 0 < len(measured_shards) < 8
    measured_shards.clear()
    assert_same_bytes(measure(model, CORPUS, [Share(norm, scale=100)], **settings), tables)
    assert measured_shards == []
    # Another parameter.
    other = measure(model, CORPUS, [Share(norm / 2, scale=100)], **settings)
    assert len(measured_shards) == 8
    assert other["share"]["share"].iloc[-1] > 60


LENGTHS = """
from analysis_lib import metrics

class Lengths(metrics.Metric):
    name, needs = "lengths", frozenset({"hidden"})
    def update(self, activations):
        self.add(("tokens", activations.layer), FACTOR * activations.tokens.counts, activations)
    def rows(self, sums):
        return {"tokens": sums["tokens"]}

FACTOR = 1
"""


def test_changed_code_of_a_metric_is_measured_again(
    model, small_shards, tmp_path, measured_shards, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"checkpoints": tmp_path / "kept", "progress": False}
    counted = []
    for module, code in (
        ("lengths_one", LENGTHS),
        ("lengths_two", LENGTHS.replace("FACTOR = 1", "FACTOR = 100")),
    ):
        (tmp_path / f"{module}.py").write_text(code)
        measured_shards.clear()
        metric = importlib.import_module(module).Lengths()
        counted.append(measure(model, CORPUS, [metric], **settings)["lengths"]["tokens"])
        assert len(measured_shards) == 8
    np.testing.assert_allclose(counted[1], 100 * counted[0])
    # The first one is found again.
    measured_shards.clear()
    again = measure(model, CORPUS, [importlib.import_module("lengths_one").Lengths()], **settings)
    assert again["lengths"]["tokens"].tolist() == counted[0].tolist()
    assert not measured_shards


SCRIPT = """
import sys
from analysis_lib import load_model, measure, metrics
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shards

class Count(metrics.Metric):
    name, needs = "count", frozenset({"hidden"})
    def __init__(self, times):
        super().__init__()
        self.times = times
    def update(self, activations):
        count = TIMES * self.times * activations.tokens.counts
        self.add(("count", activations.layer), count, activations)
    def rows(self, sums):
        return {"count": sums["count"]}

TIMES = 10
shards.UTTERANCES_PER_SHARD = 1
corpus = Corpus("two", ["One.", "Two."])
found = [measure(load_model(sys.argv[1]), corpus, [Count(7)], workers=w, progress=False)["count"] for w in (1, 2)]
print(found[0].equals(found[1]), found[0]["count"].max() % 70)
"""


def test_a_metric_of_a_script_without_a_guard_is_measured_by_workers(tiny_folder, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", tiny_folder("bert")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert found.stdout.split() == ["True", "0.0"]


def test_a_metric_that_cannot_be_sent_is_one_line(model, small_shards):
    unsendable = Share(1.0)
    unsendable.lock = threading.Lock()
    with pytest.raises(
        AnalysisError, match=r"share: a metric cannot be sent.*one worker"
    ) as caught:
        measure(model, CORPUS, [unsendable], workers=2, progress=False)
    assert "\n" not in str(caught.value)


# --- On a cluster ---------------------------------------------------------------------------------


def test_a_cluster_gives_the_same_bytes(model, small_shards, cluster, measured_shards):
    chosen = ["anisotropy", "score_contributions", Share(1.0, scale=3)]
    tables = measure(model, CORPUS, chosen, scheduler=cluster.scheduler_address, progress=False)
    assert measured_shards == []
    assert_same_bytes(tables, measure(model, CORPUS, chosen, progress=False))


def test_a_killed_worker_of_a_cluster_changes_nothing(model, small_shards, cluster, tmp_path):
    corpus = Corpus("long", TEXTS * 4)
    expected = measure(model, corpus, FEW, tokens_per_batch=1, progress=False)
    done: list[int] = []
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        wait_until(lambda: len(client.ncores()) == 2)
        processes = list(client.run(os.getpid).values())

    def kill_one() -> None:
        wait_until(lambda: merged(tmp_path))
        os.kill(processes[0], signal.SIGKILL)
        done.append(merged(tmp_path))

    killer = threading.Thread(target=kill_one)
    killer.start()
    address = cluster.scheduler_address
    settings = {"tokens_per_batch": 1, "checkpoints": tmp_path, "progress": False}
    tables = measure(model, corpus, FEW, scheduler=address, **settings)
    killer.join()
    assert done
    assert done[0] < len(corpus) // small_shards
    assert_same_bytes(tables, expected)


def test_workers_with_several_threads_give_the_same_bytes(model, small_shards):
    """Dask gives a worker one thread per core by default: two shards then run in one process at
    once.
    """
    corpus = Corpus("long", TEXTS * 4)
    expected = measure(model, corpus, FEW, tokens_per_batch=1, progress=False)
    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
    ) as threads:
        address = threads.scheduler_address
        tables = measure(model, corpus, FEW, tokens_per_batch=1, scheduler=address, progress=False)
    assert_same_bytes(tables, expected)


class Slow(Share):
    """Takes a while for every layer of a batch."""

    def update(self, activations):
        time.sleep(self.scale)
        super().update(activations)


def test_a_worker_that_takes_longer_than_the_timeout_is_waited_for(model, cluster):
    few = Corpus("few", TEXTS[:4])
    slow = measure(
        model,
        few,
        [Slow(1.0, 1.0)],
        scheduler=cluster.scheduler_address,
        worker_timeout=1,
        progress=False,
    )
    assert len(slow["share"]) == 4


class _Dask:
    """A scheduler and a worker in processes of their own, and how to measure with them while
    something happens.
    """

    def __init__(self, address: str):
        self.address, self.started = address, []
        self.scheduler = self.start("scheduler", "--host", address, "--no-dashboard")
        self.worker = self.start_worker()

    def start(self, *arguments: str) -> Process:
        self.started.append(copies.start_dask(*arguments))
        return self.started[-1]

    def start_worker(self) -> Process:
        return self.start("worker", self.address, "--no-nanny", "--nthreads", "1", "--no-dashboard")

    def measure(
        self, meanwhile: Callable[[], object], model: LoadedModel, folder: Path, timeout: float
    ) -> Tables:
        """``measure``, during which something happens once a shard is there; at last the scheduler
        is killed.
        """
        over = threading.Event()

        def happen() -> None:
            wait_until(lambda: merged(folder) or over.is_set())
            meanwhile()
            over.wait(PATIENCE)
            self.scheduler.kill()

        with Client(self.address, timeout=PATIENCE, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=PATIENCE)
        other = threading.Thread(target=happen)
        other.start()
        settings = {
            "scheduler": self.address,
            "worker_timeout": timeout,
            "checkpoints": folder,
            "progress": False,
        }
        try:
            return measure(model, CORPUS, [Slow(1.0, 0.1)], **settings)
        finally:
            over.set()
            other.join()


@pytest.fixture
def dask() -> Iterator[_Dask]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dask = _Dask(f"tcp://127.0.0.1:{port}")
    yield dask
    for process in dask.started:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("killed", "said"),
    [
        ("worker", "no worker of the Dask scheduler at tcp.* has worked for 2 seconds"),
        ("scheduler", "is gone"),
    ],
)
def test_a_cluster_that_dies_is_one_line(killed, said, dask, model, small_shards, tmp_path, caplog):
    with pytest.raises(AnalysisError, match=f"{said}.*what is finished is kept") as caught:
        dask.measure(getattr(dask, killed).kill, model, tmp_path, timeout=2)
    assert "\n" not in str(caught.value)
    assert not [record for record in caplog.records if record.name == "distributed.client"]
    assert 1 <= merged(tmp_path) < 8


def test_a_worker_that_joins_in_time_goes_on(dask, model, small_shards, tmp_path):
    def replace() -> None:
        dask.worker.kill()
        dask.start_worker()

    found = dask.measure(replace, model, tmp_path, timeout=PATIENCE)
    assert_same_bytes(found, measure(model, CORPUS, [Slow(1.0, 0.1)], progress=False))


MANY = Corpus("many", TEXTS * 4)


@pytest.fixture
def four_branches(monkeypatch) -> list[int]:
    """``MANY`` has four branches of shards; of how many shards each part is that this process
    merges.
    """
    monkeypatch.setattr(
        shards, "UTTERANCES_PER_SHARD", len(MANY) // (4 * merging.SHARDS_PER_BRANCH)
    )
    monkeypatch.setattr(execution, "MANY_SHARDS", 0)
    parts, add = [], merging.Merging.add

    def recording(self, count, result):
        parts.append(count)
        add(self, count, result)

    monkeypatch.setattr(merging.Merging, "add", recording)
    return parts


def test_workers_merge_branches_whatever_happens_to_them(dask, model, four_branches):
    """Three workers, of which one is killed, one is slow, and another joins them."""
    chosen = [Slow(1.0, 0.01)]
    expected = measure(model, MANY, chosen, progress=False)
    assert four_branches == [1] * 128
    four_branches.clear()
    dask.start_worker()
    slow = dask.start_worker()

    def tasks(dask_scheduler) -> int:
        return sum(task.state == "memory" for task in dask_scheduler.tasks.values())

    def happen() -> None:
        with Client(dask.address, timeout=PATIENCE, set_as_default=False) as client:
            wait_until(lambda: client.run_on_scheduler(tasks) > 0)
        dask.worker.kill()
        os.kill(slow.pid, signal.SIGSTOP)
        dask.start_worker()
        time.sleep(3)
        os.kill(slow.pid, signal.SIGCONT)

    with Client(dask.address, timeout=PATIENCE, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=PATIENCE)
    other = threading.Thread(target=happen)
    other.start()
    found = measure(model, MANY, chosen, scheduler=dask.address, progress=False)
    other.join()
    assert_same_bytes(found, expected)
    assert found.report == expected.report
    assert four_branches == [32] * 4


def test_a_shard_carries_no_sums(model, small_shards):
    filled = metrics.resolve(FEW)
    for metric in filled:
        metric.sums.add(("cosine", 0), [torch.ones(1, 1)], Owners([0]))
    for shard in shards.make_shards(as_source(model), CORPUS, filled, Settings()):
        assert [dict(metric.sums) for metric in shard.metrics] == [{}, {}]


def test_a_branch_that_was_begun_elsewhere_is_ended_here(
    model, cluster, four_branches, tmp_path, monkeypatch
):
    expected = measure(model, MANY, FEW, progress=False)
    original = shards.begin

    def failing(shard, *args):
        if shard.index == 37:
            raise KeyboardInterrupt
        return original(shard, *args)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "begin", failing)
        with pytest.raises(KeyboardInterrupt):
            measure(model, MANY, FEW, checkpoints=tmp_path, progress=False)
    assert merged(tmp_path) == 37
    four_branches.clear()
    address = cluster.scheduler_address
    found = measure(model, MANY, FEW, checkpoints=tmp_path, scheduler=address, progress=False)
    # What was kept, the rest of its branch, and two branches.
    assert four_branches == [32, 5] + [1] * 27 + [32, 32]
    assert_same_bytes(found, expected)
    assert found.report == expected.report


@pytest.mark.parametrize("begun", [0, 37])
def test_of_many_shards_a_worker_takes_a_branch(begun, monkeypatch):
    left = [SimpleNamespace(index=index) for index in range(begun, 100)]
    assert [len(task) for task in execution._tasks(left)] == [1] * len(left)
    monkeypatch.setattr(execution, "MANY_SHARDS", 0)
    whole = [32, 32, 32, 4]
    assert [len(task) for task in execution._tasks(left)] == (
        whole if not begun else [1] * 27 + whole[2:]
    )


@pytest.mark.parametrize("address", ["nonsense://127.0.0.1:1", "tcp://127.0.0.1:9"])
def test_a_scheduler_that_does_not_answer(model, address, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS_TO_ANSWER", 1)
    with pytest.raises(AnalysisError, match="no Dask scheduler answers at") as caught:
        measure(model, CORPUS, scheduler=address, progress=False)
    assert "\n" not in str(caught.value)


# --- Interrupted and resumed ----------------------------------------------------------------------


def test_an_interrupted_run_measures_only_what_is_missing(
    model, small_shards, tmp_path, monkeypatch, measured_shards
):
    expected = measure(model, CORPUS, progress=False)
    recording = shards.begin

    def failing(shard, *args):
        if shard.index == 3:
            raise KeyboardInterrupt
        return recording(shard, *args)

    monkeypatch.setattr(shards, "begin", failing)
    with pytest.raises(KeyboardInterrupt):
        measure(model, CORPUS, checkpoints=tmp_path, progress=False)
    monkeypatch.setattr(shards, "begin", recording)
    measured_shards.clear()
    tables = measure(model, CORPUS, checkpoints=tmp_path, progress=False)
    assert measured_shards == [3, 4, 5, 6, 7]
    assert_same_bytes(tables, expected)
    assert tables.report == expected.report
    # Everything is there now.
    measured_shards.clear()
    assert_same_bytes(measure(model, CORPUS, checkpoints=tmp_path, progress=False), expected)
    assert measured_shards == []


def test_what_is_interrupted_while_a_shard_is_merged_counts_it_once(
    model, small_shards, tmp_path, monkeypatch
):
    expected = measure(model, CORPUS, FEW, progress=False)
    merge, calls = metrics.AttentionEntropy.merge, []

    def failing(self, other):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        merge(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.AttentionEntropy, "merge", failing)
        with pytest.raises(KeyboardInterrupt):
            measure(model, CORPUS, FEW, checkpoints=tmp_path, progress=False)
    assert merged(tmp_path) >= 1
    tables = measure(model, CORPUS, FEW, checkpoints=tmp_path, progress=False)
    assert_same_bytes(tables, expected)
    assert tables.report == expected.report


def test_a_group_without_anything_that_counts_has_no_part_in_an_interval(model):
    corpus = Corpus("one of nothing", [*tiny.TEXTS[:4], "\ufffd"])
    tables = measure(model, corpus, [Share(1.0)], special_tokens=False, progress=False)
    assert len(tables.groups) == 4
    for group in range(5):
        assert tables._parts["share"].without(group)["tokens"].notna().all()


@pytest.mark.parametrize("changed", ["text", "setting", "metrics", "weights", "dtype", "training"])
def test_sums_of_something_else_are_not_taken(
    changed, model, small_shards, tmp_path, tiny_folder, measured_shards
):
    # As a user would make one: only load_corpus knows the hash of its texts.
    corpus = Corpus("mine", TEXTS)
    measure(model, corpus, "anisotropy", checkpoints=tmp_path, progress=False)
    measured_shards.clear()
    settings, chosen = {}, "anisotropy"
    if changed == "text":
        corpus = Corpus("mine", (*TEXTS[:-1], "Something else, at last."))
    elif changed == "setting":
        settings = {"special_tokens": False}
    elif changed == "metrics":
        chosen = "anisotropy,mean_vector"
    elif changed == "weights":
        model = load_model(str(tiny.save(tmp_path / "other", "bert", seed=1)))
    elif changed == "training":
        model = load_model(f"{tiny_folder('bert')}:untrained")
    else:
        model = load_model(str(tiny_folder("bert")), dtype="float64")
    found = measure(model, corpus, chosen, checkpoints=tmp_path, progress=False, **settings)
    assert len(measured_shards) == 8
    assert_same_bytes(found, measure(model, corpus, chosen, progress=False, **settings))


def test_a_command_that_was_killed_goes_on_from_there(tiny_folder, tmp_path, measured_shards):
    lines, out = tmp_path / "lines.txt", tmp_path / "out"
    lines.write_text("\n".join(TEXTS * 17), encoding="utf-8")
    options = ["--model", str(tiny_folder("bert")), "--data", str(lines), "--out", str(out)]
    options += ["--metrics", "anisotropy,attention_entropy", "--tokens-per-batch", "100"]
    command = subprocess.Popen(
        [*EAGER, "measure", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_stopped(command)
    command.kill()
    printed, said = command.communicate(timeout=PATIENCE)
    assert command.returncode == -signal.SIGKILL, said
    assert printed == ""
    assert not list(out.glob("*.parquet"))
    assert not (out / "run.json").exists()
    finished = merged(out)
    assert 1 <= finished < 3

    assert main(["measure", *options]) == 0
    assert len(measured_shards) == 3 - finished
    expected = measure(
        load_model(str(tiny_folder("bert"))),
        load_corpus(str(lines)),
        "anisotropy,attention_entropy",
        tokens_per_batch=100,
        progress=False,
    )
    assert {path.name for path in out.iterdir()} == {
        ".analysis-lib.json",
        "anisotropy.parquet",
        "attention_entropy.parquet",
        "run.json",
    }
    assert_same_bytes(
        {name: pd.read_parquet(out / f"{name}.parquet") for name in expected}, expected
    )


# --- Tables ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(model) -> Tables:
    return measure(model, CORPUS, progress=False)


def test_tables_have_the_names_and_columns_of_the_design(tables):
    assert {name: list(table.columns) for name, table in tables.items()} == COLUMNS


def test_layers_heads_and_dimensions_count_as_the_design_says(tables):
    hidden = tables["anisotropy"].query("space == 'hidden'")
    assert hidden["layer"].tolist() == [0, 1, 2, 3]
    assert hidden["head"].isna().all()
    for space in ("query", "key", "value"):
        rows = tables["anisotropy"][tables["anisotropy"]["space"] == space]
        assert list(zip(rows["layer"], rows["head"], strict=True)) == [
            (i, j) for i in (1, 2, 3) for j in (1, 2)
        ]
    assert sorted(tables["dimension_means"]["dimension"].unique()) == list(range(24))
    assert set(tables["dimension_means"]["layer"]) == {0, 1, 2, 3}
    assert set(tables["score_contributions"]["layer"]) == {1, 2, 3}
    assert set(tables["dimension_means"]["token_type"]) == {"all", "cls", "sep", "punct", "other"}
    assert set(tables["score_contributions"]["key_type"]) == {"all", "cls", "sep", "punct", "other"}


SIZES = ["width", "heads", "key_heads", "head_width"]


def test_layers_are_told_apart(tables, tiny_folder):
    assert list(tables.layers.columns) == ["layer", "stack", "part", *SIZES]
    assert tables.layers["layer"].tolist() == [0, 1, 2, 3]
    assert tables.layers["part"].tolist() == ["", *(f"encoder.layer.{i}" for i in range(3))]
    assert tables.layers["stack"].nunique() == 1
    assert rows_of(tables.layers) == [(24, None, None, None), *[(24, 2, 2, 12)] * 3]
    # Grouped keys; two stacks; blocks that share weights; width from stage to stage.
    expected = {
        "qwen3": [(24, None, None, None), *[(24, 4, 2, 8)] * 2],
        # Encoder, decoder, and the decoder's attention to the encoder, which has no vectors of its
        # own.
        "t5": [
            *[(24, None, None, None), *[(24, 2, 2, 8)] * 2],
            *[(24, None, None, None), *[(24, 2, 2, 8)] * 3],
            *[(None, 2, 2, 8)] * 3,
        ],
        "albert": [(24, None, None, None), *[(24, 2, 2, 12)] * 4],
    }
    for name, sizes in expected.items():
        loaded = load_model(str(tiny_folder(name)))
        layers = measure(loaded, Corpus("few", TEXTS[:3]), progress=False).layers
        assert layers["layer"].tolist() == list(range(len(sizes)))
        assert rows_of(layers) == sizes
        modules = dict(loaded.model.named_modules())
        blocks = [modules[part] for part in layers["part"] if part]
        assert set(blocks) == {block for blocks in loaded.stacks.values() for block in blocks}
    assert (
        measure(loaded, Corpus("few", TEXTS[:3]), "qk_alignment", progress=False)
        .layers["width"]
        .isna()
        .all()
    )


def rows_of(layers: pd.DataFrame) -> list[tuple]:
    sizes = layers[SIZES].astype(object)
    return list(sizes.where(sizes.notna(), None).itertuples(index=False, name=None))


def test_the_layers_are_in_run_json(tables, tmp_path):
    tables.save(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert [layer["part"] for layer in run["layers"]] == tables.layers["part"].tolist()
    assert [layer["heads"] for layer in run["layers"]] == [None, 2, 2, 2]
    assert "layers" not in run["report"]


def test_tables_are_saved_whole_and_read_back(tables, tmp_path):
    folder = tmp_path / "new" / "folder"
    tables.save(folder)
    assert {path.name for path in folder.glob("[!.]*")} == {
        "run.json",
        *(f"{name}.parquet" for name in tables),
    }
    assert_same_bytes(
        {name: pd.read_parquet(folder / f"{name}.parquet") for name in tables}, tables
    )
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert run["tables"] == {name: len(table) for name, table in tables.items()}
    assert run["model_revision"].startswith("sha256:")
    assert run["data_sha256"] == CORPUS.sha256
    assert run["texts"] == run["report"]["utterances"] == 64
    assert run["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"special_tokens": True, "long_texts": "cut"}.items() <= run["settings"].items()
    assert run["seconds"] > 0
    # Again, over what is there.
    tables.save(folder)
    assert json.loads((folder / "run.json").read_text(encoding="utf-8")) == run


@pytest.mark.parametrize("where", ["out", "out/below"])
def test_a_file_in_the_way_of_the_folder(model, tables, tmp_path, where):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(AnalysisError, match="cannot be written"):
        tables.save(tmp_path / where)
    with pytest.raises(AnalysisError, match="cannot be written"):
        measure(model, CORPUS, checkpoints=tmp_path / where, progress=False)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_table_that_cannot_be_made_leaves_nothing(model, tmp_path):
    tables = measure(
        model, Corpus("one", ["Hi"]), "mean_vector,anisotropy", special_tokens=False, progress=False
    )
    with pytest.raises(AnalysisError, match="two"):
        tables.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_any_statistic_has_an_interval(model):
    """Twenty texts make a group each: leaving one out is measuring the other nineteen."""
    texts = TEXTS[:20]

    def statistic(tables: Mapping[str, pd.DataFrame]) -> float:
        similarity = tables["utterance_similarity"].query("space == 'key'")["similarity"].mean()
        return similarity + 2 * tables["attention_entropy"]["entropy_nats"].max()

    chosen = "utterance_similarity,attention_entropy"
    found = measure(model, Corpus("twenty", texts), chosen, progress=False).interval(statistic)
    assert found.value == statistic(measure(model, Corpus("twenty", texts), chosen, progress=False))
    assert found.draws == 20
    left_out = [
        statistic(
            measure(model, Corpus("nineteen", texts[:i] + texts[i + 1 :]), chosen, progress=False)
        )
        for i in range(20)
    ]
    # Student's t with 19 degrees of freedom, from a printed table.
    error = math.sqrt(19 / 20 * np.sum((np.array(left_out) - np.mean(left_out)) ** 2))
    reach, centre = 2.0930 * error, 20 * found.value - 19 * np.mean(left_out)
    assert reach > 1e-3
    assert abs(centre - found.value) < error
    assert found.row[1:] == pytest.approx((centre - reach, centre + reach), rel=1e-5)


def test_several_statistics_have_intervals_at_once(tables):
    def both(t: Mapping[str, pd.DataFrame]) -> list[float]:
        return t["anisotropy"]["cosine"].iloc[2:5].tolist()

    rows = tables["anisotropy"].iloc[2:5]
    found = tables.intervals({"both": both, "last": lambda t: both(t)[-1]})
    np.testing.assert_allclose(
        [one.row for one in found["both"]], rows[["cosine", "ci_low", "ci_high"]]
    )
    assert found["last"] == found["both"][-1]


def test_the_interval_of_a_column_is_that_of_its_table(tables):
    row = tables["anisotropy"].iloc[2]
    found = tables.interval(lambda t: t["anisotropy"]["cosine"].iloc[2])
    assert found.row == pytest.approx((row["cosine"], row["ci_low"], row["ci_high"]))


# --- What makes sense for a model -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet-basic", "efficientnet", "convnext", "van"])
def test_attention_of_a_convolutional_network_is_refused_by_name(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)))
    for metric in OF_ATTENTION:
        # Alone or among others.
        for chosen in (metric, f"anisotropy,{metric}", [metrics.MeanVector(), metric]):
            with pytest.raises(
                AnalysisError, match=f"{metric} makes no sense for .*no attention; leave it out"
            ):
                measure(loaded, tiny.corpus(name), chosen, progress=False)
    for maps in ("flatten", "positions"):
        tables = measure(loaded, tiny.corpus(name), maps=maps, progress=False)
        flat = {"utterance_similarity"} if maps == "flatten" else set()
        assert set(tables) == set(COLUMNS) - set(OF_ATTENTION) - flat
        assert all(
            set(tables[table]["space"]) == {"hidden"} for table in ("anisotropy", "mean_vector")
        )
        assert tables.layers[["heads", "key_heads", "head_width"]].isna().all(axis=None)


def test_a_map_is_one_vector_or_one_a_position(tiny_folder):
    loaded = load_model(str(tiny_folder("resnet-basic")), dtype="float64")
    corpus, seen = tiny.corpus("resnet-basic"), {}
    pixels = [
        loaded.processor(images=item.load().convert("RGB"), return_tensors="pt")
        for item in corpus.items
    ]
    with torch.no_grad():
        states = [
            loaded.model(**p.to(torch.float64), output_hidden_states=True).hidden_states
            for p in pixels
        ]
    for maps in ("flatten", "positions"):
        tables = measure(loaded, corpus, "anisotropy,mean_vector", maps=maps, progress=False)
        seen[maps] = tables
        # Of two stages of two blocks, transformers hands out the stages' ends.
        for layer, stage in ((0, 0), (2, 1), (4, 2)):
            images = [state[stage][0] for state in states]
            if maps == "flatten":
                vectors = np.stack([image.flatten().numpy() for image in images])
            else:
                vectors = np.concatenate([image.flatten(1).T.numpy() for image in images])
            row = tables["anisotropy"].query(f"layer == {layer}").iloc[0]
            cosines = cosine_similarity(vectors)[~np.eye(len(vectors), dtype=bool)]
            assert row["cosine"] == pytest.approx(cosines.mean(), abs=1e-9)
            assert row["tokens"] == len(vectors)
            assert tables.layers["width"][layer] == vectors.shape[1]
            row = tables["mean_vector"].query(f"layer == {layer}").iloc[0]
            assert row["norm_of_mean"] == pytest.approx(np.linalg.norm(vectors.mean(0)))
        assert tables.run["settings"]["maps"] == maps
    assert seen["flatten"].report.utterances == seen["positions"].report.utterances == len(corpus)


def test_vectors_within_an_image_are_compared_only_where_it_has_several(tiny_folder):
    for name in ("resnet-basic", "cvt"):
        loaded = load_model(str(tiny_folder(name)))
        with pytest.raises(
            AnalysisError, match=r"utterance_similarity makes no sense.*unless maps is positions"
        ):
            measure(loaded, tiny.corpus(name), "utterance_similarity", progress=False)
        table = measure(
            loaded, tiny.corpus(name), "utterance_similarity", maps="positions", progress=False
        )
        assert table["utterance_similarity"]["similarity"].between(-1, 1).all()
    # A convolutional network with attention has its tables, too.
    assert set(measure(loaded, tiny.corpus("cvt"), progress=False)) == set(COLUMNS) - {
        "utterance_similarity",
        "attention_distance",
    }


@pytest.mark.parametrize("model_name", ["bert", "vit", "wav2vec2"])
@pytest.mark.parametrize("items", ["bert", "vit", "wav2vec2"])
def test_a_corpus_of_another_kind_is_refused(model_name, items, tiny_folder):
    loaded, corpus = load_model(str(tiny_folder(model_name))), tiny.corpus(items)
    if model_name == items:
        assert measure(loaded, corpus, "mean_vector", progress=False).report.utterances == len(
            corpus
        )
        return
    plural = {"bert": "texts", "vit": "images", "wav2vec2": "sounds"}
    with pytest.raises(AnalysisError) as caught:
        measure(loaded, corpus, "anisotropy", progress=False)
    message = str(caught.value)
    assert f"reads {plural[model_name]} and {corpus.name} holds {plural[items]}" in message
    assert f"give {plural[model_name]}" in message
    assert "\n" not in message


def test_a_bert_that_is_a_decoder_is_measured_over_the_pairs_that_it_allows(tmp_path):
    folder = tiny.save(tmp_path, "bert", is_decoder=True)
    loaded = load_model(str(folder), dtype="float64")
    expected = Reference(folder, tiny.TEXTS).tables()
    for tokens_per_batch in (1, 10**6):
        tables = measure(
            loaded, Corpus("texts", tiny.TEXTS), tokens_per_batch=tokens_per_batch, progress=False
        )
        assert_agree(tables, expected, (1e-9, 1e-11))
    lengths = [len(ids) for ids in loaded.tokenizer(list(tiny.TEXTS))["input_ids"]]
    contributions = tables["score_contributions"].query("key_type == 'all'")
    assert set(contributions["pairs"]) == {sum(n * (n + 1) // 2 for n in lengths)}


# --- Little text, long text, bad vectors ----------------------------------------------------------


def test_a_corpus_of_one_utterance_has_values_without_intervals(model, tmp_path):
    tables = measure(model, Corpus("one", ["A girl is styling her hair, slowly."]), progress=False)
    for name, column in (("anisotropy", "cosine"), ("utterance_similarity", "similarity")):
        assert tables[name][column].notna().all()
        assert tables[name][["ci_low", "ci_high"]].isna().all(axis=None)
    found = tables.interval(lambda t: t["attention_entropy"]["entropy_nats"].mean())
    assert found.value == tables["attention_entropy"]["entropy_nats"].mean()
    assert np.isnan(found.row[1:]).all()
    # Without its only utterance there are no rows: a statistic that needs some is not asked.
    first = tables["attention_entropy"]["entropy_nats"].iloc[0]
    found = tables.interval(lambda t: t["attention_entropy"]["entropy_nats"].iloc[0] * np.ones(2))
    assert [one.value for one in found] == [first, first]
    assert np.isnan([one.row[1:] for one in found]).all()
    tables.save(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.parquet")} == set(COLUMNS)


def test_a_text_of_one_token(model):
    """It is three with [CLS] and [SEP]; without them there is no pair."""
    tables = measure(model, Corpus("one", ["Hi"]), progress=False)
    assert tables.report.tokens == 3
    assert set(tables["anisotropy"]["tokens"]) == {3}
    tables = measure(model, Corpus("one", ["Hi"]), special_tokens=False, progress=False)
    assert tables["attention_entropy"]["entropy_nats"].between(0, math.log(3)).all()
    np.testing.assert_allclose(
        tables["mean_vector"]["mean_norm"], tables["mean_vector"]["norm_of_mean"], rtol=1e-6
    )
    pairs = {"anisotropy", "utterance_similarity"}
    assert tables.run["left_out"].keys() == pairs
    assert not pairs & {*tables}
    named = measure(
        model, Corpus("one", ["Hi"]), sorted(pairs), special_tokens=False, progress=False
    )
    for name in pairs:
        with pytest.raises(AnalysisError, match=name):
            named[name]


def test_texts_that_are_no_tokens_at_all(model):
    """A character that the tokenizer drops is no token: nothing can be said without [CLS] and
    [SEP].
    """
    with pytest.raises(AnalysisError, match="no token that counts"):
        measure(model, Corpus("none", ["\ufffd"]), special_tokens=False, progress=False)


def test_long_texts_are_counted(model, capsys):
    long = " ".join(tiny.TEXTS * 12)
    corpus = Corpus("long", ["Hi", long, "Attention, attention!", long])
    tokens = len(model.tokenizer(long)["input_ids"])
    assert tokens > 2 * 160
    cut = measure(model, corpus, "anisotropy", progress=False).report
    assert (cut.cut, cut.windowed, cut.utterances, cut.tokens) == (2, 0, 4, 3 + 6 + 2 * 160)
    windowed = measure(model, corpus, "anisotropy", long_texts="window", progress=False).report
    windows = math.ceil((tokens - 2) / 158)
    assert (windowed.cut, windowed.windowed, windowed.utterances) == (0, 2, 2 + 2 * windows)
    assert windowed.tokens == 3 + 6 + 2 * (tokens - 2 + 2 * windows)
    exact = " ".join(["hair"] * 158)
    for long_texts in ("cut", "window"):
        report = measure(
            model, Corpus("exact", [exact]), "anisotropy", long_texts=long_texts, progress=False
        ).report
        assert (report.cut, report.windowed, report.utterances, report.tokens) == (0, 0, 1, 160)
    assert capsys.readouterr().err == ""


def test_settings_that_make_no_sense(model):
    with pytest.raises(AnalysisError, match="long_texts"):
        measure(model, CORPUS, long_texts="fold")
    with pytest.raises(AnalysisError, match="tokens_per_batch is 0"):
        measure(model, CORPUS, tokens_per_batch=0)
    with pytest.raises(AnalysisError, match=r"maps is 'flat'.*flatten, positions"):
        measure(model, CORPUS, maps="flat")
    with pytest.raises(AnalysisError, match="did you mean anisotropy"):
        measure(model, CORPUS, "anisotropi")


def test_vectors_that_overflow_name_their_layer():
    """Finite weights whose products are not."""
    transformer, words = tiny.build("bert")
    with torch.no_grad():
        transformer.encoder.layer[1].intermediate.dense.weight.fill_(1e38)
    overflowing = LoadedModel("overflowing", "seed 0", transformer, words)
    with pytest.raises(AnalysisError, match="layer 2"):
        measure(overflowing, CORPUS, progress=False)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
def test_bundled_model_shows_what_the_paper_says(minilm):
    """On STS-B dev, layers 2 to 5 give more than half of their attention to [CLS], and dimension
    223 is an outlier.
    """
    corpus = load_corpus(f"{SHARED / 'stsb' / 'stsb-en-dev.csv'}:sentence1", limit=200, seed=0)
    tables = measure(minilm, corpus, "attention_by_token_type,outlier_dimensions", progress=False)
    by_layer = (
        tables["attention_by_token_type"].query("key_type == 'cls'").groupby("layer")["mass"].mean()
    )
    assert (by_layer.loc[2:5] > 0.5).all()
    outliers = tables["outlier_dimensions"].query("dimension == 223")
    assert {2, 3, 4, 5} <= set(outliers["layer"])


def test_special_tokens_are_kept_or_not():
    settings = Settings()
    # Given at once, beartype would refuse it, which only tests have.
    vars(settings)["special_tokens"] = "no"
    with pytest.raises(AnalysisError, match="special_tokens is 'no': give True or False"):
        settings.__post_init__()


def test_a_model_of_zeros_is_no_average(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("bert"), tmp_path / "zeros")
    weights = load_file(folder / "model.safetensors")
    zeros = {
        name: values * 0 if ".layer.1." in name else values for name, values in weights.items()
    }
    save_file(zeros, folder / "model.safetensors", {"format": "pt"})
    tables = measure(str(folder), ["a girl is styling", "her hair"], progress=False)
    assert {"anisotropy", "utterance_similarity"} <= {*tables.run["left_out"]}
    for name in ("anisotropy", "utterance_similarity"):
        assert re.search(r"layer [23] has (0|none)\b.* not zero", tables.run["left_out"][name])
    tokens = tables.report.tokens
    assert tables.report.zero_vectors["hidden 2"] == tokens
    assert tables["mean_vector"].query("space == 'hidden' and layer == 2")[
        "mean_norm"
    ].tolist() == [0]
