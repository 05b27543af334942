"""Who measures the shards: this process, processes beside it, or a Dask cluster."""

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
from analysis_lib.measurement.merging import SHARDS_PER_BRANCH, merge
from analysis_lib.measurement.shards import Result, Shard, measure_shard, measure_shards
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.accumulator import Metric

if TYPE_CHECKING:
    import distributed

# Where Python and packages are installed: their modules are on every machine that can work.
_INSTALLED = [
    Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
]
# How long a scheduler may take to say who it is.
SECONDS_TO_ANSWER = 10
# Of more shards than these, a worker of a cluster takes a branch at once, and sends one result of
# all of it.
MANY_SHARDS = 1000


class Workers(NamedTuple):
    """What measures: processes of this machine, or those of a Dask cluster.

    Attributes:
        count: how many processes, this one among them.
        scheduler: the address of a Dask scheduler; None without a cluster.
        timeout: after so many seconds in which nothing is worked on, a cluster is given up.
    """

    count: int = 1
    scheduler: str | None = None
    timeout: float = 60


# What the next shards gave, merged, and how many they are: one, or all of a branch.
Part = tuple[int, Result]


def results(
    shards: list[Shard],
    source: Source,
    workers: Workers,
    kept: str = "",
) -> Iterator[Part]:
    """The results of the shards, in their order.

    Args:
        kept: what to add to an error: that what there was is kept.
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
    """Shards in this process and in others. One that is killed breaks its pool: another is
    tried.
    """

    def here(tasks: Sequence[Shard]) -> Part:
        return len(tasks), measure_shard(*tasks, source)

    others = workers - 1
    handed_on = 0
    for attempts_left in (2, 1, 0):
        try:
            with processes.pool(others, shards[0].threads) as pool:
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
    """What tasks give, in their order; of what waits for its turn there is as much as is under way,
    at most.

    Args:
        places: how many tasks others may have.
        here: measures in this process, too, while others work and while they start: it has the
            model already.
        idle: called after every second in which nothing has ended.
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
            # Not the workers that there are: those that retire are among them. A slow one holds its
            # shard.
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
            # pure=False: a shard is no cache key, and hashing its texts would cost more than it
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
    """What a worker takes at once: a shard, or of many shards a branch, of which it sends one
    result.
    """
    for _, branch in itertools.groupby(shards, lambda shard: shard.index // SHARDS_PER_BRANCH):
        branch = list(branch)
        # What is left of a branch that was begun before is merged with its beginning, here.
        is_whole = branch[0].index % SHARDS_PER_BRANCH == 0
        if is_whole and len(shards) > MANY_SHARDS:
            yield branch
        else:
            yield from ([shard] for shard in branch)


@contextmanager
def _client(address: str) -> Iterator["distributed.Client"]:
    import distributed

    try:
        # The client would wait for ever for what listens there and is no scheduler. In a thread: a
        # notebook has a loop.
        with futures.ThreadPoolExecutor(1) as executor:
            executor.submit(
                asyncio.run, asyncio.wait_for(_greeting(address), SECONDS_TO_ANSWER)
            ).result()
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except Exception as error:  # Whatever else may speak there.
        raise AnalysisError(
            f"no Dask scheduler answers at {address}: start one with `dask scheduler`"
        ) from error
    try:
        yield client
    finally:
        # A scheduler that hangs takes no leave.
        with suppress(TimeoutError):
            client.close()


async def _greeting(address: str) -> None:
    """Ask a scheduler who it is."""
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
    """Inside it, a logger is silent: the client's own words on a scheduler that is gone are
    tracebacks.
    """
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


# --- What is sent to other processes --------------------------------------------------------------


def packed(work: object, metrics: Iterable[Metric]) -> bytes:
    """What to send to another process, with the code of metrics that are not the library's."""
    # Modules of the user's are sent whole: a worker on another machine cannot import them.
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
    """What the shards of a task give, merged, in another process."""
    shards = _unpacked(task)
    if len(shards) == 1:
        return 1, measure_shard(*shards)
    metrics = [metric.fresh() for metric in shards[0].metrics]
    report = Report()
    merge(metrics, report, map(measure_shard, shards))
    return len(shards), ({metric.name: metric.arrays() for metric in metrics}, report)


def _unpacked(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except (ImportError, AttributeError) as error:
        raise AnalysisError(
            f"a worker cannot load a metric ({error}): put what the metric uses in one module with "
            "it, or where the workers can import it"
        ) from error


def _is_users(module: str) -> bool:
    """Whether a module is the user's: not the library's, nor installed, nor Python's."""
    if module.partition(".")[0] in (__name__.partition(".")[0], *sys.builtin_module_names):
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
