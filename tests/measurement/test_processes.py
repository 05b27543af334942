"""The pool of processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from multiprocessing import connection

import psutil
from waiting import PATIENCE, wait_until

from analysis_lib.measurement import processes


def stop_in_the_middle_of_a_result() -> None:
    """In a worker: what it returns is sent by halves, and the second half never comes."""

    def send(self, message, *_) -> None:
        os.write(self._handle, bytes(message)[: len(message) // 2])
        time.sleep(10 * PATIENCE)

    connection.Connection._send = send


def test_a_worker_stopped_in_the_middle_of_a_result_keeps_nobody_waiting(copied_workers):
    before = {*threading.enumerate()}
    with processes.pool(1, threads=1) as pool:
        assert pool.submit(abs, -1).result() == 1
        half = pool.submit(stop_in_the_middle_of_a_result)
        (manager,) = {
            t for t in threading.enumerate() if t.name == "ExecutorManagerThread"
        } - before
        assert not futures.wait([half], 3).done
    manager.join(PATIENCE)
    assert not manager.is_alive()


POOL = """
import os, time
from analysis_lib.measurement import processes

with processes.pool(1, threads=1) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(1000)
"""


def test_workers_end_with_a_process_that_is_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", POOL], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    worker = int(process.stdout.readline())
    assert psutil.pid_exists(worker)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not psutil.pid_exists(worker))


def test_a_worker_that_is_replaced_leaves_its_device_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_lock", None)
    taken = {}

    def start() -> str:
        """The device of a worker, whose lock is open as long as it lives."""
        monkeypatch.setattr(processes, "_device", None)
        processes._take_device(tmp_path, ["cuda:1", "cuda:2", "cuda:3"])
        taken[processes._device] = processes._lock
        return processes._device

    assert [start(), start(), start()] == ["cuda:1", "cuda:2", "cuda:3"]
    taken["cuda:2"].close()
    assert start() == "cuda:2"
    # The next one waits for a worker that is about to end.
    threading.Timer(0.3, taken["cuda:1"].close).start()
    assert start() == "cuda:1"
    assert taken["cuda:3"].closed is False
