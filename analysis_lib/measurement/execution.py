"""Who measures the shards: this process, a pool of processes, or a Dask cluster."""

import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from unittest import mock

import cloudpickle

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.definitions import is_own
from analysis_lib.measurement.shards import Result, Shard, measure_shard
from analysis_lib.models import LoadedModel


def results(
    shards: list[Shard],
    model: LoadedModel,
    workers: int,
    scheduler: str | None,
    worker_timeout: float,
    kept: bool,
) -> Iterator[Result]:
    """The results of the shards, in their order; where they end early, it is said whether what there was is kept."""
    kept = "; what is finished is kept" if kept else ""
    if (workers > 1 or scheduler) and model.spec is None and shards:
        raise AnalysisError(f"{model.name} lives in this process alone: save it to a folder to measure it with workers")
    if scheduler is not None and shards:
        return _on_cluster(shards, scheduler, worker_timeout, kept)
    if workers > 1 and len(shards) > 1:
        return _in_pool(shards, min(workers, len(shards)), kept)
    return (measure_shard(shard, model) for shard in shards)


def _in_pool(shards: list[Shard], workers: int, kept: str) -> Iterator[Result]:
    """Shards in a pool of processes. A worker that is killed breaks its pool: another is tried for the rest."""
    handed_on = 0
    for attempts_left in (2, 1, 0):
        try:
            with processes.pool(workers, shards[0].threads) as pool:
                for result in in_order(pool, shards[handed_on:], 2 * workers):
                    handed_on += 1
                    yield result
            return
        except BrokenProcessPool:
            if not attempts_left:
                raise AnalysisError(
                    f"worker processes died three times (out of memory?): use fewer --workers{kept}"
                ) from None


def _on_cluster(shards: list[Shard], address: str, worker_timeout: float, kept: str) -> Iterator[Result]:
    from distributed import Client, KilledWorker
    from distributed.client import ClosedClientError

    try:
        client = Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise AnalysisError(f"no Dask scheduler answers at {address}: start one with `dask scheduler`") from error
    gone = AnalysisError(f"the Dask scheduler at {address} is gone: start one with `dask scheduler`{kept}")
    start_workers = f"start some with `dask worker {address}`"

    def wait(running: Iterable[futures.Future]) -> set[futures.Future]:
        idle = 0
        while not (finished := futures.wait(running, 1, futures.FIRST_COMPLETED).done):
            try:
                # Not the workers that there are: those that retire are among them. A slow one holds its shard.
                held = client.sync(client.scheduler.processing, workers=None, callback_timeout=60)
            except OSError:
                raise gone from None
            idle = 0 if any(held.values()) else idle + 1
            if idle > worker_timeout:
                idled = f"no worker of the Dask scheduler at {address} has worked for {worker_timeout:g} seconds"
                raise AnalysisError(f"{idled}: {start_workers}{kept}")
        return finished

    # The client's own words on a scheduler that is gone are tracebacks.
    with mock.patch.object(logging.getLogger("distributed.client"), "disabled", True):
        try:
            if not (cores := sum(client.ncores().values())):
                raise AnalysisError(f"the Dask scheduler at {address} has no workers: {start_workers}")
            # pure=False: a shard is no cache key, and hashing its texts would cost more than it saves.
            yield from in_order(client.get_executor(pure=False, retries=2), shards, 2 * cores, wait)
        except KilledWorker as error:
            died = f"one worker after another of the Dask scheduler at {address} died of the same shard"
            raise AnalysisError(f"{died} (out of memory?): give them more memory{kept}") from error
        except (futures.CancelledError, ClosedClientError):
            raise gone from None
        finally:
            # A scheduler that hangs takes no leave.
            with suppress(TimeoutError):
                client.close()


def in_order(
    executor: futures.Executor,
    shards: list[Shard],
    window: int,
    wait: Callable = lambda running: futures.wait(running, return_when=futures.FIRST_COMPLETED).done,
) -> Iterator[Result]:
    """Results in the order of the shards, with at most ``window`` under way or waiting for their turn."""
    waiting = [*shards]
    running: dict[futures.Future, int] = {}
    done: dict[int, Result] = {}
    for shard in shards:
        while shard.index not in done:
            while waiting and len(running) + len(done) < window:
                following = waiting.pop(0)
                running[executor.submit(measure_packed, packed(following))] = following.index
            for future in wait(running):
                done[running.pop(future)] = future.result()
        yield done.pop(shard.index)


def packed(shard: Shard) -> bytes:
    """A shard to send to another process, with the code of metrics that are not the library's."""
    # Modules of the user's are sent whole: a worker on another machine cannot import them.
    modules = {type(metric).__module__ for metric in shard.metrics} - {"__main__"}
    modules = [sys.modules[name] for name in modules if is_own(name) and name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(shard)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        names = ", ".join(metric.name for metric in shard.metrics)
        raise AnalysisError(
            f"{names}: a metric cannot be sent to other processes ({error}): give it plain parameters, or one worker"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def measure_packed(shard: bytes) -> Result:
    """What ``measure_shard`` returns, in another process."""
    try:
        unpacked = pickle.loads(shard)
    except (ImportError, AttributeError) as error:
        raise AnalysisError(
            f"a worker cannot load a metric ({error}): put what the metric uses in one module with it, or where the "
            f"workers can import it"
        ) from error
    return measure_shard(unpacked)
