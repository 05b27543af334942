"""Who measures the shards: this process, a pool of processes, or a Dask cluster."""

import asyncio
import functools
import logging
import pickle
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH, merge
from analysis_lib.measurement.shards import Result, Shard, measure_shard, measure_shards
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.models import LoadedModel

# Where Python and packages are installed: their modules are on every machine that can work.
_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
# How long a scheduler may take to say who it is.
SECONDS_TO_ANSWER = 10
# What the next shards gave, merged, and how many they are: one, or all of a branch.
Part = tuple[int, Result]


def results(
    shards: list[Shard],
    model: LoadedModel,
    workers: int,
    scheduler: str | None,
    worker_timeout: float,
    due: Callable[[], bool] | None,
) -> Iterator[Part]:
    """The results of the shards, in their order; where they end early, it is said whether what there was is kept.

    Args:
        due: whether what is merged is to be kept now; None where nothing is.
    """
    kept = "" if due is None else "; what is finished is kept"
    if (workers > 1 or scheduler) and model.spec is None and shards:
        raise AnalysisError(f"{model.name} lives in this process alone: save it to a folder to measure it with workers")
    if scheduler is not None and shards:
        return _on_cluster(shards, scheduler, worker_timeout, due, kept)
    if workers > 1 and len(shards) > 1:
        return _in_pool(shards, model, min(workers, len(shards)), kept)
    return ((1, result) for result in measure_shards(shards, model))


def _in_pool(shards: list[Shard], model: LoadedModel, workers: int, kept: str) -> Iterator[Part]:
    """Shards in this process and a pool of others. A worker that is killed breaks its pool: another is tried."""
    handed_on = 0
    for attempts_left in (2, 1, 0):
        try:
            with processes.pool(workers - 1, shards[0].threads) as pool:
                for part in in_order(pool, model, shards[handed_on:], 2 * workers):
                    handed_on += 1
                    yield part
            return
        except BrokenProcessPool:
            if not attempts_left:
                raise AnalysisError(
                    f"worker processes died three times (out of memory?): use fewer --workers{kept}"
                ) from None


def _on_cluster(
    shards: list[Shard], address: str, worker_timeout: float, due: Callable[[], bool] | None, kept: str
) -> Iterator[Part]:
    import distributed
    from distributed.client import ClosedClientError

    try:
        # The client would wait for ever for what listens there and is no scheduler. In a thread: a notebook has a loop.
        with futures.ThreadPoolExecutor(1) as executor:
            executor.submit(asyncio.run, asyncio.wait_for(_greeting(address), SECONDS_TO_ANSWER)).result()
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except Exception as error:  # Whatever else may speak there.
        raise AnalysisError(f"no Dask scheduler answers at {address}: start one with `dask scheduler`") from error
    gone = AnalysisError(f"the Dask scheduler at {address} is gone: start one with `dask scheduler`{kept}")
    start_workers = f"start some with `dask worker {address}`"

    def ask(call: Callable, **given) -> dict:
        try:
            return client.sync(call, **given)
        except OSError:
            raise gone from None

    def cores() -> int:
        return sum(ask(client.scheduler.ncores).values())

    def wait(running: set[distributed.Future]) -> set[distributed.Future]:
        idle = 0
        while True:
            with suppress(TimeoutError), client.as_current():
                return distributed.wait(running, 1, distributed.client.FIRST_COMPLETED).done
            # Not the workers that there are: those that retire are among them. A slow one holds its shard.
            held = ask(client.scheduler.processing, workers=None, callback_timeout=60)
            idle = 0 if any(held.values()) else idle + 1
            if idle > worker_timeout:
                idled = f"no worker of the Dask scheduler at {address} has worked for {worker_timeout:g} seconds"
                raise AnalysisError(f"{idled}: {start_workers}{kept}")

    # The client's own words on a scheduler that is gone are tracebacks.
    with mock.patch.object(logging.getLogger("distributed.client"), "disabled", True):
        try:
            if not cores():
                raise AnalysisError(f"the Dask scheduler at {address} has no workers: {start_workers}")
            # pure=False: a shard is no cache key, and hashing its texts would cost more than it saves.
            submit = functools.partial(client.submit, pure=False, retries=2)
            yield from _in_branches(shards, submit, cores, wait, due)
        except distributed.KilledWorker as error:
            died = f"one worker after another of the Dask scheduler at {address} died of the same shard"
            raise AnalysisError(f"{died} (out of memory?): give them more memory{kept}") from error
        except (futures.CancelledError, ClosedClientError):
            raise gone from None
        finally:
            # A scheduler that hangs takes no leave.
            with suppress(TimeoutError):
                client.close()


async def _greeting(address: str) -> None:
    """Ask a scheduler who it is."""
    from distributed.comm import connect
    from distributed.security import Security

    comm = await connect(address, timeout=SECONDS_TO_ANSWER, **Security().get_connection_args("client"))
    try:
        await comm.write({"op": "identity", "reply": True})
        if (await comm.read())["type"] != "Scheduler":
            raise ValueError("it is no scheduler")
    finally:
        comm.abort()


def _in_branches(
    shards: list[Shard], submit: Callable, cores: Callable[[], int], wait: Callable, due: Callable[[], bool] | None
) -> Iterator[Part]:
    """Branches that the workers merge, in order; where sums are due to be kept, the shards of the first one."""
    waiting, running, branches = deque(shards), set(), deque()
    metrics = packed(shards[0].metrics, shards[0].metrics)
    while waiting or branches:
        # A slow shard holds up its branch. What the others finish meanwhile stays with the workers, and is bounded.
        ahead = 2 * (max(cores(), 1) + SHARDS_PER_BRANCH)
        while waiting and len(running) < ahead - 2 * SHARDS_PER_BRANCH and sum(map(len, branches)) < ahead:
            shard = waiting.popleft()
            if shard.index % SHARDS_PER_BRANCH == 0 or not branches:
                branches.append(_Branch())
                # What is left of a branch that was begun before is merged with its beginning, here.
                branches[-1].one_by_one = shard.index % SHARDS_PER_BRANCH > 0
            branches[-1].append(submit(measure_packed, packed(shard, shard.metrics)))
            running.add(branches[-1][-1])
            if (shard.index + 1) % SHARDS_PER_BRANCH == 0 or not waiting:
                branches[-1].merged = submit(merge_packed, metrics, list(branches[-1]))
        first = branches[0]
        if not first.one_by_one and first.merged is not None and first.merged.done():
            running.difference_update(branches.popleft())
            yield len(first), first.merged.result()
            continue
        first.one_by_one |= due is not None and due()
        while first.one_by_one and first and first[0].done():
            running.discard(ended := first.popleft())
            yield 1, ended.result()
        if first:
            for future in wait({*running, *([first.merged] if first.merged and not first.one_by_one else ())}):
                running.discard(future)
                if future.status == "error":
                    future.result()
        elif first.merged is not None:
            branches.popleft()


class _Branch(deque):
    """What the workers measure of the shards of a branch.

    Attributes:
        merged: what they merge of them, once all are under way.
        one_by_one: whether it is merged here instead.
    """

    merged, one_by_one = None, False


def in_order(executor: futures.Executor, model: LoadedModel, shards: list[Shard], window: int) -> Iterator[Part]:
    """Shards in their order, with at most ``window`` under way or waiting for their turn.

    While the others work, and while they start, this process measures too: it has the model already.
    """
    waiting = deque(shards)
    running: dict[futures.Future, int] = {}
    done: dict[int, Result] = {}
    for shard in shards:
        while shard.index not in done:
            here = waiting.popleft() if waiting and len(running) + len(done) < window else None
            # The window has two places for each process, and those of this one are not for the others.
            while waiting and len(running) < min(window - 2, window - 1 - len(done)):
                following = waiting.popleft()
                running[executor.submit(measure_packed, packed(following, following.metrics))] = following.index
            if here is not None:
                done[here.index] = measure_shard(here, model)
            for future in futures.wait(running, 0 if here else None, futures.FIRST_COMPLETED).done:
                done[running.pop(future)] = future.result()
        yield 1, done.pop(shard.index)


def packed(work: object, metrics: Iterable[Metric]) -> bytes:
    """What to send to another process, with the code of metrics that are not the library's."""
    # Modules of the user's are sent whole: a worker on another machine cannot import them.
    modules = {type(metric).__module__ for metric in metrics} - {"__main__"}
    modules = [sys.modules[name] for name in modules if name in sys.modules and _is_users(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(work)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        names = ", ".join(metric.name for metric in metrics)
        raise AnalysisError(
            f"{names}: a metric cannot be sent to other processes ({error}): give it plain parameters, or one worker"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def measure_packed(shard: bytes) -> Result:
    """What ``measure_shard`` returns, in another process."""
    return measure_shard(_unpacked(shard))


def merge_packed(packed_metrics: bytes, results: list[Result]) -> Result:
    """The sum of results, in another process."""
    metrics, report = _unpacked(packed_metrics), Report()
    merge(metrics, report, results)
    return {metric.name: metric.arrays() for metric in metrics}, report


def _unpacked(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except (ImportError, AttributeError) as error:
        raise AnalysisError(
            f"a worker cannot load a metric ({error}): put what the metric uses in one module with it, or where the "
            f"workers can import it"
        ) from error


def _is_users(module: str) -> bool:
    """Whether a module is the user's: not the library's, nor installed, nor Python's."""
    if module.partition(".")[0] in (__name__.partition(".")[0], *sys.builtin_module_names):
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
