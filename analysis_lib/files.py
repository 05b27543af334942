"""Files: read with errors of one line, written atomically, locked; and output folders of commands.

In each output folder a seal lists the files of the library; all others stay as they are.
"""

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

import yaml

from analysis_lib.errors import AnalysisError, what_failed

Entry = TypeVar("Entry")
_CLONE, _INSTALLED = (Path(__file__).resolve().parents[above] / "data" for above in (1, 0))


def data_directory() -> Path:
    """The folder of pins, published tables, claims and measurements.

    It is ``data/`` in a clone and ``analysis_lib/data`` in a wheel.
    """
    return _INSTALLED if _INSTALLED.is_dir() else _CLONE


def package_directory() -> Path:
    """The folder of downloaded packages, and of data made from them.

    It is ``packages`` in ``data/`` of a clone, or in the user's cache folder
    (``~/.cache/analysis_lib``) if the library is installed; or the folder named by
    ``ANALYSIS_LIB_DATA``.
    """
    home = data_directory()
    if home == _INSTALLED:
        # The same rule as that of transformers' hub.
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(caches).expanduser() / "analysis_lib"
    return Path(os.environ.get("ANALYSIS_LIB_DATA") or home) / "packages"


# --- Reading --------------------------------------------------------------------------------------


def entries(file: str, make: Callable[..., Entry]) -> dict[str, Entry]:
    """Entries of a YAML file in ``data/``, each made by ``make`` from its fields, by name.

    Raises:
        AnalysisError: the file, or an entry of it, is not as ``make`` requires.
    """
    path = data_directory() / file
    try:
        return {
            name: make(**fields)
            for name, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items()
        }
    except Exception as error:  # Errors of the parser, of ``make``, or of Python.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AnalysisError(
            f"{path} cannot be used ({reason}): mend the entry, or the file"
        ) from error


def read(path: Path, how: Callable[[Path], Entry], remedy: str = "copy or make it again") -> Entry:
    """The content of a file, as ``how`` reads it.

    Raises:
        AnalysisError: it cannot be read; the one-line message names the file.
    """
    if path.exists() and not path.is_file():
        raise AnalysisError(f"{path} is no regular file: {remedy}")
    try:
        return how(path)
    except Exception as error:  # Each format has errors of its own.
        raise AnalysisError(
            f"{path} cannot be read ({what_failed(error)[:200]}): {remedy}"
        ) from error


def read_json(path: Path, remedy: str = "copy or make it again") -> dict:
    """The object in a JSON file; errors as in :func:`read`."""

    def load(path: Path) -> dict:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        return content

    return read(path, load, remedy)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate names in a mapping.

    YAML's own loader would silently take the last one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name} stands twice in it")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, remedy: str) -> object:
    """The content of a YAML file; errors as in :func:`read`."""
    return read(
        path, lambda path: yaml.load(path.read_text(encoding="utf-8"), _StrictLoader), remedy
    )


def file_hash(path: Path) -> str:
    """SHA-256 of a file, cached until the file changes."""
    state = path.stat()
    return _file_hash(path, state.st_mtime_ns, state.st_size)


@cache
def _file_hash(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, patterns: Iterable[str] = ("**/*",)) -> dict[str, str]:
    """SHA-256 of the files of a folder that match some patterns, by their paths in it."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for path in sorted(paths)
        if path.is_file()
    }


# --- Locks, and atomic writing --------------------------------------------------------------------

# Flags of a lock that does not wait.
AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
# Age in seconds (thirty days) at which a folder of another machine counts as abandoned.
FORGOTTEN = 30 * 24 * 3600
# In a scratch folder: the file that its process locks while it lives, and the folder for the user.
_LOCK, _CONTENT = "lock", "content"


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in ``parent`` whose name begins with ``name``, removed when the context ends.

    Folders left by killed processes are removed as well. A process id says nothing of processes on
    another machine, or in another container, that share the disk. Therefore the name of each
    scratch folder includes the machine and its start, and its process holds a lock in it: on the
    same machine, a folder without a held lock is abandoned. A folder of another machine, or of this
    one before a restart, counts as abandoned after thirty days.
    """
    for folder in parent.glob(f"{glob.escape(name)}-*"):
        if _is_left_over(folder, name):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{name}-{_machine()}-") as made:
        folder = Path(made)
        with (folder / ".lock").open("w") as lock:
            if lock_file(lock):
                # Renamed only now, so that no other process finds an unlocked file.
                os.rename(folder / ".lock", folder / _LOCK)
            (folder / _CONTENT).mkdir()
            yield folder / _CONTENT


@cache
def _machine() -> str:
    """Identity of this machine since its start, shared by its containers."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        known = platform.node()
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _is_left_over(folder: Path, name: str) -> bool:
    """Whether a folder is a scratch folder of this name that was abandoned."""
    made = re.fullmatch(rf"{re.escape(name)}-([0-9a-f]{{12}})-\w{{8}}", folder.name)
    if made is None:
        return False
    try:
        if made[1] != _machine():
            return folder.stat().st_mtime < time.time() - FORGOTTEN
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, AT_ONCE)
        return True
    except OSError:
        # It is in use, has just been removed, or cannot be locked here.
        return False


def lock_file(file: IO, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file; returns False, with a note, if the file system has no locks.

    Raises:
        BlockingIOError: another process has locked it, and ``kind`` is not to wait.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        said = "note: files in %s cannot be locked: let no second process write there"
        logging.getLogger(__name__).warning(said, Path(file.name).parent)
        return False
    return True


@contextmanager
def alone(lock: Path, waiting: str = "") -> Iterator[None]:
    """A context that holds a lock, for which other processes wait; it ends with a killed process.

    Args:
        waiting: the message on standard error if another process holds the lock.
    """
    with ExitStack() as held:
        with writing(lock.parent):
            lock.parent.mkdir(parents=True, exist_ok=True)
            # Opened for appending, so that the content of an existing file stays.
            file = held.enter_context(lock.open("a"))
        try:
            lock_file(file, AT_ONCE)
        except BlockingIOError:
            if waiting:
                print(waiting, file=sys.stderr)
            lock_file(file)
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which a failure to write is an AnalysisError that names the path or the file."""
    try:
        yield
    except AnalysisError:
        raise
    except Exception as error:
        # Writers of tokenizers and safetensors have errors of their own for a full disk.
        full = os.strerror(errno.ENOSPC) in str(error)
        if not full and not isinstance(error, OSError):
            raise
        file = getattr(error, "filename", None)
        path = path if not file or Path(file).is_relative_to(path) else file
        remedy = "give another folder"
        if Path(path).is_relative_to(package_directory()):
            remedy = "let ANALYSIS_LIB_DATA name another folder"
        remedy = "free some space and run again" if full else remedy
        raise AnalysisError(
            f"{path} cannot be written ({getattr(error, 'strerror', '') or error}): {remedy}"
        ) from error


def write(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file completely, or leave it as it was; of two writers at once, the last one wins.

    Args:
        content: a text, or a function that writes the file at a given path.

    Raises:
        AnalysisError: the file cannot be written.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch(path.parent, f".unfinished-{path.name}") as folder:
            unfinished = folder / path.name
            if isinstance(content, str):
                unfinished.write_text(content, encoding="utf-8")
            else:
                content(unfinished)
            # Otherwise a power cut could leave the name without the content.
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)


# --- Output folders -------------------------------------------------------------------------------

PROGRAM = "analysis-lib"
SEAL, LOCK = ".analysis-lib.json", ".analysis-lib.lock"
# By name, the SHA-256 of each content that a file may have.
Sealed = dict[str, list[str]]


@dataclass(frozen=True)
class Output:
    """The output folder of a command.

    The hidden file ``.analysis-lib.json`` is its seal. It names this program, the command, its
    inputs, and every file that the command wrote, with the SHA-256 of its content. The same command
    on the same inputs replaces these files, and removes those that it no longer writes. It touches
    nothing else: neither files that the seal does not list, nor those that have been changed since.
    A folder of another command, or of other inputs, is refused.

    Attributes:
        folder: the folder, which need not exist. A symbolic link is followed.
        command: the name of the command, such as ``measure``.
        inputs: names or paths of the models and data that the command was given.
        last: the file that describes the others. It exists only if all of them do.
    """

    folder: Path
    command: str
    inputs: tuple[str, ...]
    last: str

    def check(self, files: Iterable[str] = ()) -> Sealed:
        """The content of the seal; empty if there is no seal.

        Args:
            files: names of files to be written.

        Raises:
            AnalysisError: the folder belongs to another command, or to other inputs; a file has
                been changed since it was written; or a file or folder of the user is in the way.
        """
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise AnalysisError(
                f"{self.folder} cannot be written (it is a file): give another folder"
            )
        sealed = self._sealed()
        for name in {**sealed, **dict.fromkeys(files)}:
            path = self.folder / name
            self._refuse_in_the_way(path)
            if name in sealed and _is_changed(path, sealed[name]):
                raise AnalysisError(
                    f"{path} has been changed since {PROGRAM} wrote it: move it, or give another "
                    "folder"
                )
            if name not in sealed and os.path.lexists(path):
                raise AnalysisError(
                    f"{path} was not written by {PROGRAM}: move it, or give another folder"
                )
        return sealed

    def replace(self, new: Path) -> None:
        """Replace the files in the seal by all files in the folder ``new``.

        A process killed halfway leaves a seal that lists old and new files, so that the next one
        can continue.

        Args:
            new: a folder on the same disk, such as that of :meth:`scratch`.

        Raises:
            AnalysisError: the errors of :meth:`check`.
        """
        hashes = hashes_of(new)
        hashes.pop(SEAL, None)
        sealed = self.check(hashes)
        both = {name: [*sealed.get(name, ())] for name in {**sealed, **hashes}}
        for name, digest in hashes.items():
            both[name].append(digest)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._seal(both, new)
        (self.folder / self.last).unlink(missing_ok=True)
        for name in sealed.keys() - hashes.keys():
            self._remove(name)
        for name in sorted(hashes, key=lambda name: name == self.last):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, self.folder / name)
        self._seal({name: [digest] for name, digest in hashes.items()}, new)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A context with a folder to fill; :meth:`replace` takes its files if there is no error."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with scratch(self.folder, ".unfinished-files") as new:
                yield new
                self.replace(new)

    def seal(self, *files: str) -> None:
        """Seal files that the command has written into the folder directly."""
        with writing(self.folder), scratch(self.folder, ".unfinished-files") as new:
            self._seal({name: [file_hash(self.folder / name)] for name in files}, new)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other process writes into the folder, which must exist.

        Raises:
            AnalysisError: another process is writing into it.
        """
        path = self.folder / LOCK
        while True:
            with writing(self.folder):
                lock = path.open("a")
            with lock:
                try:
                    lock_file(lock, AT_ONCE)
                except BlockingIOError:
                    raise AnalysisError(
                        f"another run is writing to {self.folder}: wait for it, or give another "
                        "folder"
                    ) from None
                # A process that has just ended may have removed the file before it was locked here.
                if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    continue
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

    def _sealed(self) -> Sealed:
        path = self.folder / SEAL
        if not os.path.lexists(path):
            return {}
        remedy = f"move what is in {self.folder}, or give another folder"
        seal = read_json(path, remedy)
        sealed = seal.get("files")
        if seal.get("program") != PROGRAM or not _is_list_of_files(sealed):
            raise AnalysisError(f"{path} is no seal of {PROGRAM}: {remedy}")
        if (seal.get("command"), seal.get("key")) != (self.command, self._key):
            inputs = seal.get("inputs")
            shown = ", ".join(map(str, inputs)) if isinstance(inputs, list) else ""
            same_names = seal.get("command") == self.command and inputs == self._shown
            other = " other inputs, called" if same_names else ""
            raise AnalysisError(
                f"{self.folder} holds what {PROGRAM} {seal.get('command')} wrote of{other} "
                f"{shown}: give another folder"
            )
        return sealed

    def _seal(self, sealed: Sealed, scratch: Path) -> None:
        about = {
            "program": PROGRAM,
            "command": self.command,
            "inputs": self._shown,
            "key": self._key,
        }
        text = json.dumps({**about, "files": sealed}, indent=1)
        with (scratch / SEAL).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            # Without the seal, the files would count as the user's.
            os.fsync(file.fileno())
        os.replace(scratch / SEAL, self.folder / SEAL)

    @property
    def _shown(self) -> list[str]:
        """The inputs without their folders, whose names should not appear in a published report."""
        return [PurePosixPath(name).name for name in self.inputs]

    @property
    def _key(self) -> str:
        return inputs_key(self.inputs, self.folder)

    def _refuse_in_the_way(self, path: Path) -> None:
        if os.path.isdir(path):
            raise AnalysisError(f"{path} is a folder: move it, or give another folder")
        for above in path.parents[: len(path.relative_to(self.folder).parts) - 1]:
            if os.path.lexists(above) and not os.path.isdir(above):
                raise AnalysisError(f"{above} is a file: move it, or give another folder")

    def _remove(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        with suppress(OSError):
            for above in path.parents[: len(PurePosixPath(name).parts) - 1]:
                above.rmdir()


def _is_list_of_files(sealed: object) -> bool:
    """Whether a seal lists files, all of them inside its folder."""
    if not isinstance(sealed, dict) or not all(
        isinstance(hashes, list) for hashes in sealed.values()
    ):
        return False
    paths = [PurePosixPath(name) for name in sealed]
    return not any(path.is_absolute() or ".." in path.parts for path in paths)


def _is_changed(path: Path, hashes: list[str]) -> bool:
    return path.exists() and file_hash(path) not in hashes


def inputs_key(inputs: Iterable[str], folder: Path) -> str:
    """A hash of names; paths are relative to the folder, so that all may be moved together."""
    home = os.path.realpath(folder)
    places = [_place(name, home) for name in inputs]
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]


def _place(name: str, home: str) -> str:
    """A name as it is; a path, also in ``table.csv:text``, relative to ``home``."""
    ends = [len(name), *(mark.start() for mark in re.finditer("[:@+]", name))]
    for end in sorted(ends, reverse=True):
        if os.path.exists(name[:end]):
            return os.path.relpath(os.path.realpath(name[:end]), home) + name[end:]
    return name
