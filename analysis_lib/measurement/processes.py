"""Worker processes and threads on this machine: joblib's processes, PyTorch's threads."""

import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import IO

import torch
from joblib.externals.loky import ProcessPoolExecutor
from tqdm import tqdm

from analysis_lib.errors import AnalysisError, undisturbed
from analysis_lib.files import AT_ONCE, lock_file
from analysis_lib.models import ModelSpec

# Idle OpenMP threads would keep cores busy, and workers may have more threads than there are cores.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@contextmanager
def mapped(workers: int) -> Iterator[Callable]:
    """A ``map`` for functions of this library, in single-threaded processes if workers > 1."""
    if workers < 2:
        yield map
        return
    try:
        with pool(workers, threads=1) as executor:

            def submitted(function: Callable, *given: Iterable) -> Iterator:
                tasks = [
                    executor.submit(function, *arguments) for arguments in zip(*given, strict=True)
                ]
                return (task.result() for task in tasks)

            yield submitted
    except BrokenProcessPool:
        raise AnalysisError(
            "a worker died (out of memory?): use fewer workers; the same call resumes what was "
            "left unfinished"
        ) from None


@contextmanager
def pool(workers: int, threads: int, devices: Sequence[str] = ()) -> Iterator[Executor]:
    """A pool of processes with ``threads`` threads each.

    They are stopped when the context ends, and when this process ends.

    Args:
        devices: the device of each process, if it is to load models on a device of its own, see
            :func:`on_own_device`.
    """
    environment = {name: os.environ.get(name, value) for name, value in PATIENT.items()}
    locks = tempfile.TemporaryDirectory(prefix="analysis-lib-") if devices else None
    given = (threads, os.getpid(), locks and locks.name, devices)
    # joblib.Parallel has no pool of one process, which is needed: this process works beside it.
    executor = ProcessPoolExecutor(workers, initializer=_start, initargs=given, env=environment)
    try:
        with undisturbed():
            executor.submit(int)
        with warnings.catch_warnings():
            # A worker whose memory has grown by 300 MB is replaced; the user need not know.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs")
            yield executor
    finally:
        _stop(executor)
        if locks:
            locks.cleanup()


def _stop(executor: ProcessPoolExecutor) -> None:
    """Kill the processes, even in the middle of a task."""
    for process in list(executor._processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    # A process killed in the middle of a result leaves its reader waiting until the pipe is closed.
    # A pool that is broken closes it at the same time.
    with suppress(OSError):
        executor._result_queue._writer.close()
    executor.shutdown(kill_workers=True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context with another number of PyTorch threads, which decides the order of its sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_own_device(spec: ModelSpec) -> ModelSpec:
    """How this process loads a model: as described, but for the device of a worker in a pool."""
    return replace(spec, device=_device) if _device else spec


def _start(threads: int, parent: int, locks: str | None, devices: Sequence[str]) -> None:
    torch.set_num_threads(threads)
    if devices:
        _take_device(Path(locks), devices)
    above = os.getppid()

    def wait() -> None:
        # The parent may have ended before this process began.
        with suppress(ProcessLookupError):
            while os.getppid() == above:
                os.kill(parent, 0)
                time.sleep(1)

    _end_after(wait)


# The device of this worker, and its lock, which is open as long as the worker lives.
_device: str | None = None
_lock: IO | None = None


def _take_device(locks: Path, devices: Sequence[str]) -> None:
    """Take the first device that no other living worker of the pool has.

    A worker that is replaced leaves its device to the next one.
    """
    global _device, _lock
    while _device is None:
        for index, device in enumerate(devices):
            _lock = (locks / str(index)).open("w")
            # Held by another worker.
            with suppress(BlockingIOError):
                lock_file(_lock, AT_ONCE)
                _device = device
                return
            _lock.close()
        # The one that is replaced has not ended yet.
        time.sleep(0.1)


def end_with_parent() -> None:
    """End this multiprocessing process with its parent, even if the parent is killed."""
    _end_after(parent_process().join)


def _end_after(wait: Callable[[], object]) -> None:
    """End this process once ``wait`` returns; it may also be stopped at any time."""
    # Progress bars are not shared with other processes, and a lock for that would be left behind.
    tqdm.set_lock(threading.RLock())

    def end() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
