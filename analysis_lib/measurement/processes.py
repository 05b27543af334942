"""Other processes of this machine that work for this one, and threads: joblib's processes,
PyTorch's threads.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import parent_process

import torch
from joblib.externals.loky import ProcessPoolExecutor
from tqdm import tqdm

from analysis_lib.errors import AnalysisError, undisturbed

# Idle OpenMP threads would spin, and keep the cores busy: together, workers may have more threads
# than there are cores.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@contextmanager
def mapped(workers: int) -> Iterator[Callable]:
    """``map`` of a function of this library, in processes of one thread each if there are to be
    several.
    """
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
def pool(workers: int, threads: int) -> Iterator[Executor]:
    """Processes with so many threads each; they are stopped when the block is left, and when this
    process ends.
    """
    environment = {name: os.environ.get(name, value) for name, value in PATIENT.items()}
    # Not joblib.Parallel, which has no pool of one process: this process measures beside it.
    executor = ProcessPoolExecutor(
        workers, initializer=_start, initargs=(threads, os.getpid()), env=environment
    )
    try:
        with undisturbed():
            executor.submit(int)
        with warnings.catch_warnings():
            # One whose memory has grown by 300 MB is replaced by another one, which is nobody's
            # concern.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs")
            yield executor
    finally:
        _stop(executor)


def _stop(executor: ProcessPoolExecutor) -> None:
    """Stop the processes, whatever they are at: nobody wants their work any more."""
    for process in list(executor._processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    # One that was stopped in the middle of a result leaves its reader waiting for the rest while
    # there is a sender.
    executor._result_queue._writer.close()
    executor.shutdown(kill_workers=True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside it, PyTorch computes with so many threads: their number decides the order of its
    sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(threads: int, parent: int) -> None:
    torch.set_num_threads(threads)
    above = os.getppid()

    def wait() -> None:
        # The one that ends may have been gone before this one began.
        with suppress(ProcessLookupError):
            while os.getppid() == above:
                os.kill(parent, 0)
                time.sleep(1)

    _end_after(wait)


def end_with_parent() -> None:
    """Let a process of multiprocessing end when the one that started it does, even if that one is
    killed.
    """
    _end_after(parent_process().join)


def _end_after(wait: Callable[[], object]) -> None:
    """Let this process, which may also be stopped at any time, end once a wait is over."""
    # No bar is shared with other processes; the lock for that would be left behind.
    tqdm.set_lock(threading.RLock())

    def end() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
