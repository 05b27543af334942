"""Files: read with errors of one line, written whole or not at all, locked; and the folders that
commands write into.

In each of these folders a seal says which files are ours; everything else stays as it is.
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
    """The pins, published tables, claims and measurements: ``data/`` in a clone,
    ``analysis_lib/data`` in a wheel.
    """
    return _INSTALLED if _INSTALLED.is_dir() else _CLONE


def package_directory() -> Path:
    """Where packages are downloaded to, and what is made from them is kept.

    The folder ``packages`` in ``data/`` of a clone, or in the user's cache folder
    (``~/.cache/analysis_lib``) where the library is installed; or in the folder that
    ``ANALYSIS_LIB_DATA`` names.
    """
    home = data_directory()
    if home == _INSTALLED:
        # As the hub of transformers has it.
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(caches).expanduser() / "analysis_lib"
    return Path(os.environ.get("ANALYSIS_LIB_DATA") or home) / "packages"


# --- Reading --------------------------------------------------------------------------------------


def entries(file: str, make: Callable[..., Entry]) -> dict[str, Entry]:
    """What ``make`` makes of the fields of each entry of a YAML file in ``data/``, by name.

    Raises:
        AnalysisError: the file, or an entry of it, is not as ``make`` wants it.
    """
    path = data_directory() / file
    try:
        return {
            name: make(**fields)
            for name, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items()
        }
    except Exception as error:  # Of the parser, of whoever makes the entry, or of Python.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AnalysisError(
            f"{path} cannot be used ({reason}): mend the entry, or the file"
        ) from error


def read(path: Path, how: Callable[[Path], Entry], remedy: str = "copy or make it again") -> Entry:
    """What is read from a file.

    Raises:
        AnalysisError: whatever goes wrong, in one line that names the file.
    """
    if path.exists() and not path.is_file():
        raise AnalysisError(f"{path} is no regular file: {remedy}")
    try:
        return how(path)
    except Exception as error:  # Each format has its own.
        raise AnalysisError(
            f"{path} cannot be read ({what_failed(error)[:200]}): {remedy}"
        ) from error


def read_json(path: Path, remedy: str = "copy or make it again") -> dict:
    """The object that a JSON file holds; what is said of :func:`read` holds for all else."""

    def load(path: Path) -> dict:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        return content

    return read(path, load, remedy)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a name that stands twice in one mapping, of which YAML's own loader takes the last
    without a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name} stands twice in it")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, remedy: str) -> object:
    """What a YAML file holds; what is said of :func:`read` holds for all else."""
    return read(
        path, lambda path: yaml.load(path.read_text(encoding="utf-8"), _StrictLoader), remedy
    )


def file_hash(path: Path) -> str:
    """sha256 of a file. A process reads it once, unless it changes."""
    state = path.stat()
    return _file_hash(path, state.st_mtime_ns, state.st_size)


@cache
def _file_hash(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, patterns: Iterable[str] = ("**/*",)) -> dict[str, str]:
    """The SHA-256 of the files of a folder that match one of some patterns, by their paths in
    it.
    """
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for path in sorted(paths)
        if path.is_file()
    }


# --- Locks, and files that are written whole ------------------------------------------------------

# How a file is locked, or else left at once.
AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
# Nothing of ours is at work for so long: in seconds, thirty days.
FORGOTTEN = 30 * 24 * 3600
# In a scratch folder: what its process holds locked while it lives, and what is yielded.
_LOCK, _CONTENT = "lock", "content"


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A new folder below one whose name begins so; it goes when the block ends.

    What killed processes have left goes as well. A process id says nothing of the processes of
    another machine, or of another container, that share the disk. Therefore each scratch folder is
    named after the machine and its start, and its process holds a lock in it: on the same machine,
    whatever is not locked is left over. What another machine has made, or this one before it was
    started anew, is left over after thirty days.
    """
    for folder in parent.glob(f"{glob.escape(name)}-*"):
        if _is_left_over(folder, name):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{name}-{_machine()}-") as made:
        folder = Path(made)
        with (folder / ".lock").open("w") as lock:
            if lock_file(lock):
                # Nobody finds it before it is locked.
                os.rename(folder / ".lock", folder / _LOCK)
            (folder / _CONTENT).mkdir()
            yield folder / _CONTENT


@cache
def _machine() -> str:
    """This machine since its start: containers on it share it, and no other machine does."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        known = platform.node()
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _is_left_over(folder: Path, name: str) -> bool:
    """Whether a folder is a scratch folder of this name, of a process that has ended."""
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
        # It is at work, has just gone, or cannot be locked here.
        return False


def lock_file(file: IO, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file; False, with a note, where the file system has no locks.

    Raises:
        BlockingIOError: another process has locked it, and ``kind`` says not to wait.
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
    """Hold the lock; other processes wait. The lock of a process that is killed ends with it.

    Args:
        waiting: what to say on standard error where another process holds it.
    """
    with ExitStack() as held:
        with writing(lock.parent):
            lock.parent.mkdir(parents=True, exist_ok=True)
            # What is in a file of this name stays.
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
    """Inside it, a failure to write is an AnalysisError that names the path, or else the file that
    could not be.
    """
    try:
        yield
    except AnalysisError:
        raise
    except Exception as error:
        # The writers of tokenizers and safetensors have errors of their own for a full disk.
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
    """Write a file whole, or leave it as it was; safe with two writers, of whom the last one is
    read.

    Args:
        content: a text, or what writes the file whose path it is given.

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
            # A power cut would else leave the name and not the content.
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)


# --- The folders that commands write into ---------------------------------------------------------

PROGRAM = "analysis-lib"
SEAL, LOCK = ".analysis-lib.json", ".analysis-lib.lock"
# By name, the SHA-256 of each content that a file may have.
Sealed = dict[str, list[str]]


@dataclass(frozen=True)
class Output:
    """The folder that a command writes into.

    The hidden file ``.analysis-lib.json`` is its seal. It names this program, the command, what the
    command was given, and every file that the command wrote, with the SHA-256 of its content. The
    same command on the same inputs replaces these files, and removes those that it no longer
    writes. It touches nothing else: neither files that the seal does not list, nor those that have
    been changed since. The folder of another command, or of other inputs, is refused.

    Attributes:
        folder: it need not exist. A symbolic link is followed.
        command: such as ``measure``.
        inputs: names or paths of the models and data that the command was given.
        last: the file that describes the others. It is there only where all of them are.
    """

    folder: Path
    command: str
    inputs: tuple[str, ...]
    last: str

    def check(self, files: Iterable[str] = ()) -> Sealed:
        """What the seal lists; nothing where there is no seal.

        Args:
            files: names of what is to be written.

        Raises:
            AnalysisError: the folder is that of another command, or of other inputs; a file has
                been changed since it was written; or a file, or folder, of the user's is in the way
                of what is to be written.
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
        """Put all files below the folder ``new`` in the place of those that the seal lists.

        Whoever is killed on the way leaves a seal that lists old and new files, so that the next
        one can go on.

        Args:
            new: on the same disk, such as :meth:`scratch`.

        Raises:
            AnalysisError: what :meth:`check` raises.
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
        """A folder to be filled; where the block ends well, :meth:`replace` takes the files in
        it.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with scratch(self.folder, ".unfinished-files") as new:
                yield new
                self.replace(new)

    def seal(self, *files: str) -> None:
        """Seal files that the command has written into the folder by itself."""
        with writing(self.folder), scratch(self.folder, ".unfinished-files") as new:
            self._seal({name: [file_hash(self.folder / name)] for name in files}, new)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it, no other process writes into the folder, which is there.

        Raises:
            AnalysisError: another process is at it.
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
                # One that has just ended may have removed the file before it was locked here.
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
            # The files are nobody's without it.
            os.fsync(file.fileno())
        os.replace(scratch / SEAL, self.folder / SEAL)

    @property
    def _shown(self) -> list[str]:
        """The inputs without their folders, whose names are nobody's business where a report is
        published.
        """
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
    """A hash of names; paths are taken as they lie to the folder, so that all may be moved
    together.
    """
    home = os.path.realpath(folder)
    places = [_place(name, home) for name in inputs]
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]


def _place(name: str, home: str) -> str:
    """A name as it is; of a path, such as ``table.csv`` in ``table.csv:text``, where it lies as
    seen from ``home``.
    """
    ends = [len(name), *(mark.start() for mark in re.finditer("[:@+]", name))]
    for end in sorted(ends, reverse=True):
        if os.path.exists(name[:end]):
            return os.path.relpath(os.path.realpath(name[:end]), home) + name[end:]
    return name
