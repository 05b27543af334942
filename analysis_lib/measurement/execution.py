"""Execution of shards: in this process, in processes beside it, or on a Dask cluster."""

import asyncio
import itertools
import logging
import pickle
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from analysis_lib.capture.source import Source
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import processes
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH, Merging
from analysis_lib.measurement.shards import Result, Shard, measure_shard, measure_shards
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.models import devices

if TYPE_CHECKING:
    import distributed

# Folders of Python and of installed packages, whose modules every worker machine has.
_INSTALLED = [
    Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
]
# Seconds that a scheduler has to identify itself.
SECONDS_TO_ANSWER = 10
# Above this number of shards, a worker of a cluster takes a whole branch and sends one result.
MANY_SHARDS = 1000


class Workers(NamedTuple):
    """Workers of a measurement: processes of this machine, or a Dask cluster.

    Attributes:
        count: number of processes, including this one.
        scheduler: the address of a Dask scheduler; None without a cluster.
        timeout: seconds without any work in progress after which a cluster is given up.
    """

    count: int = 1
    scheduler: str | None = None
    timeout: float = 60


# Merged result of the next shards, and their number: one, or all of a branch.
Part = tuple[int, Result]


def results(
    shards: list[Shard],
    source: Source,
    workers: Workers,
    kept: str = "",
) -> Iterator[Part]:
    """The results of the shards, in order.

    Args:
        kept: the end of error messages, which tells whether finished work is kept.
    """
    if (workers.count > 1 or workers.scheduler) and source.model.spec is None and shards:
        raise AnalysisError(
            f"{source.model.name} lives in this process alone: save it to a folder to measure it "
            "with workers"
        )
    if workers.scheduler is not None and shards:
        return _on_cluster(shards, workers, kept)
    if workers.count > 1 and len(shards) > 1:
        return _beside_others(shards, source, min(workers.count, len(shards)), kept)
    return ((1, result) for result in measure_shards(shards, source))


def _beside_others(shards: list[Shard], source: Source, workers: int, kept: str) -> Iterator[Part]:
    """Results of shards measured in this process and in others, each on the next device.

    A worker that is killed breaks its pool; up to two new pools are tried.
    """

    def here(tasks: Sequence[Shard]) -> Part:
        return len(tasks), measure_shard(*tasks, source)

    others = workers - 1
    spec = source.model.spec
    places = []
    if spec.device_map is None:
        _, *places = devices.for_workers(spec.device, source.model.device, workers)
    if {*places} == {spec.device}:
        places = []
    handed_on = 0
    for attempts_left in (2, 1, 0):
        try:
            with processes.pool(others, shards[0].threads, places) as pool:
                tasks = [[shard] for shard in shards[handed_on:]]
                for part in in_order(pool, tasks, lambda: 2 * others, here):
                    handed_on += 1
                    yield part
            return
        except BrokenProcessPool:
            if not attempts_left:
                raise AnalysisError(
                    f"worker processes died three times (out of memory?): use fewer --workers{kept}"
                ) from None


def in_order(
    executor: futures.Executor,
    tasks: Iterable[Sequence[Shard]],
    places: Callable[[], int],
    here: Callable[[Sequence[Shard]], Part] | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[Part]:
    """Results of tasks in their order, of which only a limited number waits for its turn.

    The number of results that wait and tasks that run is at most about twice the number of running
    tasks.

    Args:
        places: returns the number of tasks that the executor may have at a time.
        here: measures a task in this process, which has the model already, while others start and
            work.
        idle: called after every second in which no task has ended.
    """
    waiting = deque(enumerate(tasks))
    running: dict[futures.Future, int] = {}
    done: dict[int, Part] = {}
    for turn in range(len(waiting)):
        while turn not in done:
            most = places()
            window = most + 2 if here else 2 * most
            mine = None
            if here and waiting and len(running) + len(done) < window:
                mine = waiting.popleft()
            while waiting and len(running) < most:
                if len(running) + len(done) + bool(mine) >= window:
                    break
                number, task = waiting.popleft()
                running[executor.submit(measure_packed, packed(task, task[0].metrics))] = number
            if mine:
                number, task = mine
                done[number] = here(task)
            seconds = 0 if mine else 1
            ended = futures.wait(running, seconds, futures.FIRST_COMPLETED).done
            for future in ended:
                done[running.pop(future)] = future.result()
            if not ended and not mine:
                idle()
        yield done.pop(turn)


# --- A Dask cluster -------------------------------------------------------------------------------


def _on_cluster(shards: list[Shard], workers: Workers, kept: str) -> Iterator[Part]:
    import distributed
    from distributed.client import ClosedClientError

    address = workers.scheduler
    start_workers = f"start some with `dask worker {address}`"
    with _silent("distributed.client"), _client(address) as client:
        gone = AnalysisError(
            f"the Dask scheduler at {address} is gone: start one with `dask scheduler`{kept}"
        )
        idle_seconds = itertools.count()

        def answer(question: Callable, **given: object) -> dict:
            try:
                return client.sync(question, **given)
            except OSError:
                raise gone from None

        def cores() -> int:
            return sum(answer(client.scheduler.ncores).values())

        def idle() -> None:
            nonlocal idle_seconds
            # The list of workers is no help, since it includes those that retire; a slow worker
            # still holds its shard.
            held = answer(client.scheduler.processing, workers=None, callback_timeout=60)
            if any(held.values()):
                idle_seconds = itertools.count()
            if next(idle_seconds) > workers.timeout:
                idled = (
                    f"no worker of the Dask scheduler at {address} has worked for "
                    f"{workers.timeout:g} seconds"
                )
                raise AnalysisError(f"{idled}: {start_workers}{kept}")

        if not cores():
            raise AnalysisError(f"the Dask scheduler at {address} has no workers: {start_workers}")
        try:
            # ``pure=False``: shards are not reused, and hashing their texts would cost more than it
            # saves.
            executor = client.get_executor(pure=False, retries=2)
            yield from in_order(executor, _tasks(shards), lambda: 2 * max(cores(), 1), idle=idle)
        except distributed.KilledWorker as error:
            died = (
                f"one worker after another of the Dask scheduler at {address} died of the same "
                "shard"
            )
            raise AnalysisError(f"{died} (out of memory?): give them more memory{kept}") from error
        except (futures.CancelledError, ClosedClientError):
            raise gone from None


def _tasks(shards: list[Shard]) -> Iterator[list[Shard]]:
    """Tasks for a worker: single shards, or whole branches if there are many shards."""
    for _, branch in itertools.groupby(shards, lambda shard: shard.index // SHARDS_PER_BRANCH):
        branch = list(branch)
        # The rest of a branch begun earlier is merged in this process with its beginning.
        is_whole = branch[0].index % SHARDS_PER_BRANCH == 0
        if is_whole and len(shards) > MANY_SHARDS:
            yield branch
        else:
            yield from ([shard] for shard in branch)


@contextmanager
def _client(address: str) -> Iterator["distributed.Client"]:
    import distributed

    try:
        # The client would wait forever for a listener that is not a scheduler. In a thread, because
        # a notebook has an event loop of its own.
        with futures.ThreadPoolExecutor(1) as executor:
            executor.submit(
                asyncio.run, asyncio.wait_for(_greeting(address), SECONDS_TO_ANSWER)
            ).result()
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except Exception as error:  # Other servers answer with arbitrary errors.
        raise AnalysisError(
            f"no Dask scheduler answers at {address}: start one with `dask scheduler`"
        ) from error
    try:
        yield client
    finally:
        # A scheduler that hangs does not answer the goodbye.
        with suppress(TimeoutError):
            client.close()


async def _greeting(address: str) -> None:
    """Raise an error unless a Dask scheduler answers at the address."""
    from distributed.comm import connect
    from distributed.security import Security

    comm = await connect(
        address, timeout=SECONDS_TO_ANSWER, **Security().get_connection_args("client")
    )
    try:
        await comm.write({"op": "identity", "reply": True})
        if (await comm.read())["type"] != "Scheduler":
            raise ValueError("it is no scheduler")
    finally:
        comm.abort()


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """A context in which a logger is silent.

    The client logs tracebacks when its scheduler is gone.
    """
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


# --- Pickles for other processes ------------------------------------------------------------------


def packed(work: object, metrics: Iterable[Metric]) -> bytes:
    """Work for another process, pickled with the code of metrics that are not the library's."""
    # The user's modules are sent in full, since workers on other machines cannot import them.
    names = {type(metric).__module__ for metric in metrics} - {"__main__"}
    modules = [sys.modules[name] for name in names if name in sys.modules and _is_users(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(work)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        names = ", ".join(metric.name for metric in metrics)
        raise AnalysisError(
            f"{names}: a metric cannot be sent to other processes ({error}): give it plain "
            "parameters, or one worker"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def measure_packed(task: bytes) -> Part:
    """Merged result of the shards of a task, computed in another process."""
    shards = _unpacked(task)
    if len(shards) == 1:
        return 1, measure_shard(*shards)
    merging = Merging([metric.fresh() for metric in shards[0].metrics])
    for shard in shards:
        merging.add(1, measure_shard(shard))
    merging.close()
    sums = {metric.name: metric.arrays() for metric in merging.metrics}
    return len(shards), (sums, merging.report)


def _unpacked(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except (ImportError, AttributeError) as error:
        raise AnalysisError(
            f"a worker cannot load a metric ({error}): put what the metric uses in one module with "
            "it, or where the workers can import it"
        ) from error


def _is_users(module: str) -> bool:
    """Whether a module is the user's: not the library's, an installed package's or Python's."""
    if module.partition(".")[0] in (__name__.partition(".")[0], *sys.builtin_module_names):
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
