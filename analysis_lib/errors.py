"""The error type of the library, checks of arguments, and the handling of Ctrl-C."""

import difflib
import importlib.util
import math
import os
import re
import reprlib
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import FrameType, TracebackType


class AnalysisError(Exception):
    """An error whose one-line message says what was given, what was wanted, and what to do.

    Failures with messages of their own, such as those of a notebook, take several lines, one per
    argument.
    """

    def __str__(self) -> str:
        # Names and files may contain line ends, or characters that move the cursor of a terminal.
        return "\n".join(_printable(str(line)) for line in self.args)


def _printable(text: str) -> str:
    """A text in which unprintable characters, such as line ends, are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class UnknownNameError(AnalysisError, KeyError):
    """An unknown name in a mapping.

    It is a ``KeyError`` as well, for code that tests whether the name is there.
    """


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause that suggests the known names nearest to ``name``, or all of them if none is near.

    >>> near_names("minilmm", ["minilm", "bert-base-uncased"])
    'did you mean minilm?'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}"


def whole_number(text: str) -> int:
    """The number in plain digits; a ValueError for other forms of Python, such as ``1_0``.

    >>> whole_number("-12")
    -12
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """The number in plain digits, with a point or a power of ten; a ValueError for other forms.

    >>> decimal_number("1e-3")
    0.001
    """
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,3})?", text, re.IGNORECASE):
        raise ValueError(f"{text!r} is no number")
    return float(text)


def require_extra(extra: str, *modules: str) -> None:
    """Check that the packages of an extra of the library are installed, without importing them.

    Args:
        extra: an extra in ``pyproject.toml``, such as ``adapters``.
        modules: the modules of its packages, such as ``peft``.

    Raises:
        AnalysisError: a module is not installed; the message names the extra.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise AnalysisError(
                f'{module} is not installed: run pip install "analysis_lib[{extra}]"'
            )


# --- Arguments of public functions are checked where they come in. ---

# Largest integer of torch and Arrow.
LARGEST = 2**63 - 1
# Longest path that a file system accepts.
LONGEST_PATH = 4096


def shown(value: object) -> str:
    """A value as a message shows it: a text or a number, shortened if long; otherwise its type.

    >>> shown("2"), shown(1.5), shown(["a"])
    ("'2'", '1.5', 'a list')
    """
    if value is None or isinstance(value, str | bytes | bool | Real):
        try:
            return reprlib.repr(value)
        except ValueError:
            return "a number of thousands of digits"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    article = "an" if name[0] in "AEIOaeio" else "a"
    return f"{article} {name}"


def require_whole(name: str, value: object, least: int = 0, most: int = LARGEST) -> int:
    """A whole number within bounds, as Python's ``int``.

    Raises:
        AnalysisError: the value is another one, or a bool.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        is_large = is_whole and value > most
        bounds = f"{most} or less" if is_large else f"{least} or more"
        raise AnalysisError(f"{name} is {shown(value)}: give a whole number, {bounds}")
    return int(value)


def require_seed(name: str, value: object) -> int:
    """A seed of random numbers, as Python's ``int``."""
    return require_whole(name, value)


def require_number(
    name: str, value: object, above: float | None = None, least: float | None = None
) -> float:
    """A finite number above a bound, or not below one, as Python's ``float``."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    too_low = is_number and (
        (above is not None and value <= above) or (least is not None and value < least)
    )
    if not is_number or too_low:
        bounds = (
            f" above {above:g}"
            if above is not None
            else f", {least:g} or more"
            if least is not None
            else ""
        )
        raise AnalysisError(f"{name} is {shown(value)}: give a number{bounds}")
    return float(value)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number that is too large for a float.
        return False


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise an AnalysisError unless the value is one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise AnalysisError(f"{name} is {shown(value)}: give one of {', '.join(choices)}")


def require_flag(name: str, value: object) -> None:
    """Raise an AnalysisError unless the value is a bool: a word like ``"no"`` would be true."""
    if not isinstance(value, bool):
        raise AnalysisError(f"{name} is {shown(value)}: give True or False")


def require_text(name: str, value: object, wanted: str) -> None:
    """Raise an AnalysisError unless the value is a text, not blank and not too long.

    Args:
        wanted: what to give instead, for the message.
    """
    is_text = isinstance(value, str) and value.strip()
    if not is_text or "\0" in value or len(value) > LONGEST_PATH:
        raise AnalysisError(f"{name} is {shown(value)}: give {wanted}")


def require_path(name: str, value: object, wanted: str = "the path of a folder") -> Path:
    """A path that a file system accepts."""
    is_path = isinstance(value, str | Path) and str(value).strip()
    if not is_path or "\0" in str(value) or len(str(value)) > LONGEST_PATH:
        raise AnalysisError(f"{name} is {shown(value)}: give {wanted}")
    return Path(value)


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise an AnalysisError for unknown names, with the nearest known ones.

    Args:
        kind: the kind of name, as in "setting of measure".
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise AnalysisError(f"{shown(name)} is no {kind}: {near_names(str(name), known)}")


def refuse_all(faults: Sequence[str], most: int = 20) -> None:
    """Raise an AnalysisError with all faults, so that they can be corrected at once."""
    if faults:
        others = f"; and {len(faults) - most} more" if len(faults) > most else ""
        raise AnalysisError("; ".join(faults[:most]) + others)


def in_order(name: str, values: object, wanted: str) -> list:
    """Several values as a list; an AnalysisError for a set, whose order varies by process."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise AnalysisError(f"{name} is {shown(values)}: give {wanted}")
    if isinstance(values, set | frozenset):
        raise AnalysisError(
            f"{name} is a set, whose order is another in every process: give sorted(...)"
        )
    return list(values)


# --- Ctrl-C on the command line: one line and status 130, from the first import on. Elsewhere
# Python's own handler is left. ---

# Messages of a command that keeps finished work, of one that does not, and of an unknown one.
CONTINUES = "interrupted: what was finished is kept, and the same command continues from there"
BEGINS_ANEW = "interrupted: nothing was written, and the same command begins anew"
INTERRUPTED = "interrupted: the same command begins anew, but for what was finished and kept"


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Let a command at work clean up; exit at once before it, after it and within an import.

    An exception raised within an import may be swallowed, or end in a traceback of other code.
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
    """Restore Python's handler of Ctrl-C, with which asyncio cancels its tasks in good order."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context whose child processes never receive a Ctrl-C.

    It would interrupt their imports with a traceback.
    """
    from multiprocessing import resource_tracker

    # Started beforehand, since its start would let the signal through.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def what_failed(error: BaseException) -> str:
    """Description of an error of another library, or of Python, as a part of a line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())


def one_line(error: BaseException) -> str:
    """An error as the command line prints it."""
    if isinstance(error, OSError) and error.filename:
        error = AnalysisError(
            f"{error.filename} cannot be used ({error.strerror}): give another file or folder"
        )
    hint = (
        "start Python without -OO, by which transformers fails"
        if sys.flags.optimize > 1
        else "--debug shows where"
    )
    unexpected = f"{type(error).__name__}: {error} ({hint})"
    return f"error: {error if isinstance(error, AnalysisError) else ' '.join(unexpected.split())}"


def _failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error raised before a command is at work, such as for a file read on import."""
    if "--debug" in sys.argv or not issubclass(kind, Exception):
        sys.__excepthook__(kind, error, trace)
    else:
        print(one_line(error), file=sys.stderr)


# The program that Python was started with, before Python replaces it by the file of the module.
if {os.path.basename(name) for name in sys.orig_argv[-len(sys.argv) :][:1]} & {
    "analysis_lib",
    "analysis-lib",
}:
    signal.signal(signal.SIGINT, _interrupt)
    sys.excepthook = _failed
