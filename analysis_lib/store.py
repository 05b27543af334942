"""The one memory: what is kept between calls, known by a key of all that it depends on.

Whatever is kept is written whole or not at all, is made again where it is damaged, and is safe with
two writers. Folders of what the library makes for itself lie beside the pinned packages, in
``derived`` and ``measurements``, which ``analysis-lib cache`` lists and clears.
"""

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from analysis_lib import files
from analysis_lib.errors import AnalysisError

Content = TypeVar("Content")
# In a folder that is made at once, the seal of its files.
SEAL = ".hashes"
# The names of what is kept: its folders end in a hash, and locks and scratch folders are named
# after them.
KEPT = re.compile(r".+-[0-9a-f]{12}([0-9a-f]{4})?(\.lock|-\w{8})?")


def key(*parts: object) -> str:
    """The SHA-256 of all that something depends on, which JSON can hold, or text can say."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


# --- A folder of files, each kept by itself -------------------------------------------------------


class Entry:
    """A folder of what is kept under one key, a file for each part of it. It need not exist.

    >>> import tempfile
    >>> entry = Entry(Path(tempfile.mkdtemp()) / "text-0123456789ab")
    >>> entry.read("a.txt", Path.read_text) is None
    True
    >>> entry.write("a.txt", "whole")
    >>> entry.read("a.txt", Path.read_text)
    'whole'
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, name: str, how: Callable[[Path], Content]) -> Content | None:
        """What a file holds; None where it is not there, or damaged."""
        try:
            return how(self.folder / name)
        except Exception:
            # Whatever a format makes of a damaged file, or of one of another version: it is made
            # again.
            return None

    def write(self, name: str, content: str | Callable[[Path], object]) -> None:
        """Keep a file, whole or not at all.

        Raises:
            AnalysisError: it cannot be written.
        """
        files.write(self.folder / name, content)

    def remove(self, name: str) -> None:
        """Keep a file no longer."""
        (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it, other processes that want to make the same wait, and find it made; if a lock
        can be had.
        """
        with ExitStack() as held:
            with suppress(AnalysisError):
                held.enter_context(files.alone(self.folder / ".lock"))
            yield


# --- A folder that is made at once ----------------------------------------------------------------


def derived_folder(identity: str, label: str) -> Path:
    """The folder that :func:`derived` fills, whether it is there or not."""
    name = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return files.package_directory() / "derived" / name


def derived(identity: str, label: str, fill: Callable[[Path], None]) -> Path:
    """A folder beside the packages, under ``derived``, that ``fill`` has filled; made whole or not
    at all.

    Another ``identity``, which is hashed, is another folder, whose name the ``label`` begins. A
    damaged one is made again.
    """
    folder = derived_folder(identity, label)
    if is_whole(folder):
        return folder
    with files.writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.scratch(folder.parent, f"unfinished-{folder.name}") as home:
            unfinished = home / folder.name
            unfinished.mkdir()
            fill(unfinished)
            seal(unfinished / SEAL)
            try:
                # Another process may have finished the same folder first; its content is the same.
                if not is_whole(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(unfinished, folder)
            except OSError:
                if not is_whole(folder):
                    raise
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a derived folder is there, and its files are as they were written."""
    return (folder / SEAL).is_file() and not lost(folder / SEAL)


def seal(path: Path, *patterns: str) -> None:
    """Record the SHA-256 of files of a folder, all unless patterns are given, in a hidden file of
    it.

    :func:`lost` then tells whether they are whole: a power cut can leave some empty, a disk can
    change some.
    """
    hashes = files.hashes_of(path.parent, patterns or ("**/*",))
    hashes.pop(path.name, None)
    files.write(path, json.dumps(hashes, indent=1) + "\n")


def lost(path: Path, *wanted: str) -> list[Path]:
    """What is gone or has changed since :func:`seal`, and what is wanted, sealed or not, but is not
    there.
    """
    folder = path.parent
    try:
        sealed = json.loads(path.read_bytes())
    except FileNotFoundError:  # What has not ended, or was made by a version that sealed nothing.
        sealed = {}
    except (ValueError, RecursionError):
        return [path]
    if not isinstance(sealed, dict):
        return [path]
    known = dict.fromkeys(wanted) | sealed
    there = files.hashes_of(folder, map(glob.escape, known))
    return [
        folder / name
        for name in known
        if name not in there or known[name] not in (None, there[name])
    ]


# --- All of it ------------------------------------------------------------------------------------


def measurements_directory() -> Path | None:
    """Where finished measurements are kept; None where they are not."""
    chosen = os.environ.get("ANALYSIS_LIB_MEASUREMENTS")
    if chosen is None:
        return files.package_directory() / "measurements"
    return Path(chosen) if chosen else None


@contextmanager
def in_use() -> Iterator[None]:
    """Inside it, nothing that is kept is cleared: see :func:`cleared`."""
    with ExitStack() as held:
        # Where nothing can be kept, nothing need be.
        with suppress(OSError):
            files.package_directory().mkdir(parents=True, exist_ok=True)
            file = held.enter_context((files.package_directory() / ".in-use").open("w"))
            files.lock_file(file, fcntl.LOCK_SH)
        yield


def cleared(name: str) -> list[str]:
    """Remove what is kept in one of the folders beside the packages.

    Returns:
        The names of what is there and is nothing that the library keeps: it stays.

    Raises:
        AnalysisError: a process uses what is kept, or it cannot be removed.
    """
    home = files.package_directory() / name
    with files.writing(home), (files.package_directory() / ".in-use").open("w") as file:
        try:
            files.lock_file(file, files.AT_ONCE)
        except BlockingIOError:
            raise AnalysisError(
                f"another process uses what is in {home}: clear it once that has ended"
            ) from None
        left = []
        for path in sorted(home.iterdir()):
            if not KEPT.fullmatch(path.name):
                left.append(path.name)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not left:
            home.rmdir()
        return left
