"""Ctrl-C on the command line: one line and status 130, from the first import on. Elsewhere Python's own is left."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted: what was finished is kept, and the same command continues from there"


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Let a command that is at work clean up; end at once before it, after it and within an import.

    What is raised within an import may be swallowed there, or come out with a traceback of someone else's.
    """
    calls = set()
    while frame:
        calls.add(frame.f_code.co_name)
        frame = frame.f_back
    if "carry_out" in calls and "_find_and_load" not in calls:
        raise KeyboardInterrupt
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


def leave_to_asyncio() -> None:
    """Give a Ctrl-C back to Python: only then asyncio takes it, and cancels what it runs in good order."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Processes that are started here never get a Ctrl-C, which would break into their imports with a traceback."""
    from multiprocessing import resource_tracker

    # Its start would let the signal through again.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# What Python was started with, before it gives a module that it runs the name of its file.
if {os.path.basename(name) for name in sys.orig_argv[-len(sys.argv) :][:1]} & {"analysis_lib", "analysis-lib"}:
    signal.signal(signal.SIGINT, _interrupt)
