"""What ends a command before its end: the one error type of the library, near names for its messages, and Ctrl-C."""

import difflib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


class AnalysisError(Exception):
    """An error whose message is one line that says what was given, what was wanted, and what to do.

    What fails for reasons of its own, such as a notebook, is reported in several, an argument each.
    """

    def __str__(self) -> str:
        # Names and files may hold what ends a line, or moves the cursor of a terminal.
        shown = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(line)) for line in self.args)
        return "\n".join(shown)


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause that offers the known names nearest to ``name``, or all of them if none is near.

    >>> near_names("minilmm", ["minilm", "bert-base-uncased"])
    'did you mean minilm?'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}"


# --- Ctrl-C on the command line: one line and status 130, from the first import on. Elsewhere Python's own is left. ---

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
