"""The pool of processes."""

import os
import threading
import time
from concurrent import futures
from multiprocessing import connection

from waiting import PATIENCE

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
        (manager,) = {t for t in threading.enumerate() if t.name == "ExecutorManagerThread"} - before
        assert not futures.wait([half], 3).done
    manager.join(PATIENCE)
    assert not manager.is_alive()
