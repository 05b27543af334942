"""What ends a command before its end: the one error type of the library, what its messages need, and Ctrl-C."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


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


def whole_number(text: str) -> int:
    """The number that plain digits stand for; a ValueError for all else that Python takes, such as ``1_0``.

    >>> whole_number("-12")
    -12
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """The number that plain digits stand for, with a point or a power of ten; a ValueError for all else.

    >>> decimal_number("1e-3")
    0.001
    """
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,3})?", text, re.IGNORECASE):
        raise ValueError(f"{text!r} is no number")
    return float(text)


# --- Ctrl-C on the command line: one line and status 130, from the first import on. Elsewhere Python's own is left. ---

# Of a command that keeps what it finishes; of one that does not; and where it is not known what was under way.
CONTINUES = "interrupted: what was finished is kept, and the same command continues from there"
BEGINS_ANEW = "interrupted: nothing was written, and the same command begins anew"
INTERRUPTED = "interrupted: the same command begins anew, but for what was finished and kept"


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


def one_line(error: BaseException) -> str:
    """An error as the command line says it."""
    if isinstance(error, OSError) and error.filename:
        error = AnalysisError(f"{error.filename} cannot be used ({error.strerror}): give another file or folder")
    hint = "start Python without -OO, by which transformers fails" if sys.flags.optimize > 1 else "--debug shows where"
    unexpected = f"{type(error).__name__}: {error} ({hint})"
    return f"error: {error if isinstance(error, AnalysisError) else ' '.join(unexpected.split())}"


def _failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What fails before a command is at work, such as a file that the library reads when it is imported."""
    if "--debug" in sys.argv or not issubclass(kind, Exception):
        sys.__excepthook__(kind, error, trace)
    else:
        print(one_line(error), file=sys.stderr)


# What Python was started with, before it gives a module that it runs the name of its file.
if {os.path.basename(name) for name in sys.orig_argv[-len(sys.argv) :][:1]} & {"analysis_lib", "analysis-lib"}:
    signal.signal(signal.SIGINT, _interrupt)
    sys.excepthook = _failed
