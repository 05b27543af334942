"""The store of data kept between calls, by a key of all that they depend on.

Data are written completely or not at all, are made again if damaged, and are safe with two writers.
The library's own folders lie beside the pinned packages, in ``derived`` and ``measurements``, which
``analysis-lib cache`` lists and clears.
"""

import fcntl
import functools
import glob
import hashlib
import importlib.metadata
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
# Seal of the files in a folder that is made in one step.
SEAL = ".hashes"
LIBRARY = Path(__file__).parent
# Files of the library that decide numbers or pictures.
SUFFIXES = (".py", ".mplstyle", ".js", ".css")
# Files of the data folder that decide how models and corpora are read.
READ_BY_LIBRARY = ("architectures.yml", "folders.yml")
# Packages whose versions decide numbers.
COMPUTING = ("torch", "transformers", "tokenizers", "numpy")
# Others that decide, where they are installed, how transformers reads and computes.
CHOOSING = (
    *("torchvision", "torchaudio", "timm", "mistral_common", "kernels"),
    *("flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm"),
)
# Names of stored data: folders end in a hash; locks and scratch folders are named after them.
KEPT = re.compile(r".+-[0-9a-f]{12}([0-9a-f]{4})?(\.lock|-\w{8})?")


def key(*parts: object) -> str:
    """The SHA-256 of values that JSON, or else ``str``, can represent."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


# Cached, since a page may measure a hundred times.
@functools.cache
def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def library_hash() -> str:
    """SHA-256 of every source file of the library, computed once per process."""
    paths = [path for path in sorted(LIBRARY.rglob("*")) if path.suffix in SUFFIXES]
    paths += [files.data_directory() / name for name in READ_BY_LIBRARY]
    whole = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.name} {content}\n".encode())
    return whole.hexdigest()


def computing_versions() -> list[str | None]:
    """The hash of the library, and the versions of the packages that compute or choose how."""
    return [library_hash(), *map(installed_version, (*COMPUTING, *CHOOSING))]


# --- Folders of separate files --------------------------------------------------------------------


class Entry:
    """A folder of data under one key, one file for each part. It need not exist.

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
        """The content of a file; None if it is missing or damaged."""
        try:
            return how(self.folder / name)
        except Exception:
            # Formats raise many errors for files that are damaged or of another version: they are
            # made again.
            return None

    def write(self, name: str, content: str | Callable[[Path], object]) -> None:
        """Keep a file, completely or not at all.

        Raises:
            AnalysisError: it cannot be written.
        """
        files.write(self.folder / name, content)

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which other processes that would make the same data wait for them.

        Without effect if locks are not available.
        """
        with ExitStack() as held:
            with suppress(AnalysisError):
                held.enter_context(files.alone(self.folder / ".lock"))
            yield


# --- Folders made in one step ---------------------------------------------------------------------


def derived_folder(identity: str, label: str) -> Path:
    """The folder that :func:`derived` fills, whether or not it exists."""
    name = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return files.package_directory() / "derived" / name


def derived(identity: str, label: str, fill: Callable[[Path], None]) -> Path:
    """A folder in ``derived``, beside the packages, filled by ``fill``, completely or not at all.

    Another ``identity``, which is hashed, gives another folder; its name begins with ``label``. A
    damaged folder is made again.
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
    """Whether a derived folder exists, with its files as they were written."""
    return (folder / SEAL).is_file() and not lost(folder / SEAL)


def seal(path: Path, *patterns: str) -> None:
    """Record the SHA-256 of files of a folder, by default all, in a hidden file.

    :func:`lost` then tells whether they are intact: a power cut can leave some empty, a disk can
    change some.
    """
    hashes = files.hashes_of(path.parent, patterns or ("**/*",))
    hashes.pop(path.name, None)
    files.write(path, json.dumps(hashes, indent=1) + "\n")


def lost(path: Path, *wanted: str) -> list[Path]:
    """Files that are missing or changed since :func:`seal`, or that are wanted and missing."""
    folder = path.parent
    try:
        sealed = json.loads(path.read_bytes())
    except FileNotFoundError:  # Not finished, or made by a version without seals.
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


# --- The whole store ------------------------------------------------------------------------------


def measurements_directory() -> Path | None:
    """The folder of finished measurements; None if they are not kept."""
    chosen = os.environ.get("ANALYSIS_LIB_MEASUREMENTS")
    if chosen is None:
        return files.package_directory() / "measurements"
    return Path(chosen) if chosen else None


@contextmanager
def in_use() -> Iterator[None]:
    """A context in which stored data are not cleared: see :func:`cleared`."""
    with ExitStack() as held:
        # If nothing can be stored, there is nothing to protect.
        with suppress(OSError):
            files.package_directory().mkdir(parents=True, exist_ok=True)
            file = held.enter_context((files.package_directory() / ".in-use").open("w"))
            files.lock_file(file, fcntl.LOCK_SH)
        yield


def cleared(name: str) -> list[str]:
    """Remove the stored data in one of the folders beside the packages.

    Returns:
        The names of other files there, which stay.

    Raises:
        AnalysisError: a process uses the data, or they cannot be removed.
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
