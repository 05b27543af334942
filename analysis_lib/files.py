"""The folders that commands write into. A seal in each says which files are ours; everything else stays as it is."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError

PROGRAM = "analysis-lib"
SEAL, LOCK = ".analysis-lib.json", ".analysis-lib.lock"
# By name, the SHA-256 of each content that a file may have.
Sealed = dict[str, list[str]]


@dataclass(frozen=True)
class Output:
    """The folder that a command writes into.

    The hidden file ``.analysis-lib.json`` is its seal. It names this program, the command, what the command was given,
    and every file that the command wrote, with the SHA-256 of its content. The same command on the same inputs
    replaces these files, and removes those that it no longer writes. It touches nothing else: neither files that the
    seal does not list, nor those that have been changed since. The folder of another command, or of other inputs, is
    refused.

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
            AnalysisError: the folder is that of another command, or of other inputs; a file has been changed since it
                was written; or a file, or folder, of the user's is in the way of what is to be written.
        """
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise AnalysisError(f"{self.folder} cannot be written (it is a file): give another folder")
        sealed = self._sealed()
        for name in {**sealed, **dict.fromkeys(files)}:
            path = self.folder / name
            self._refuse_in_the_way(path)
            if name in sealed and _is_changed(path, sealed[name]):
                raise AnalysisError(
                    f"{path} has been changed since {PROGRAM} wrote it: move it, or give another folder"
                )
            if name not in sealed and os.path.lexists(path):
                raise AnalysisError(f"{path} was not written by {PROGRAM}: move it, or give another folder")
        return sealed

    def replace(self, new: Path) -> None:
        """Put all files below the folder ``new`` in the place of those that the seal lists.

        Whoever is killed on the way leaves a seal that lists old and new files, so that the next one can go on.

        Args:
            new: on the same disk, such as :meth:`scratch`.

        Raises:
            AnalysisError: what :meth:`check` raises.
        """
        hashes = _hashes(new)
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
        """A folder to be filled; where the block ends well, :meth:`replace` takes the files in it."""
        with packages.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with packages.scratch(self.folder, ".unfinished-files") as new:
                yield new
                self.replace(new)

    def seal(self, *files: str) -> None:
        """Seal files that the command has written into the folder by itself."""
        with packages.writing(self.folder), packages.scratch(self.folder, ".unfinished-files") as new:
            self._seal({name: [packages.file_hash(self.folder / name)] for name in files}, new)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it, no other process writes into the folder, which is there.

        Raises:
            AnalysisError: another process is at it.
        """
        path = self.folder / LOCK
        while True:
            with packages.writing(self.folder):
                lock = path.open("a")
            with lock:
                try:
                    packages.lock_file(lock, packages.AT_ONCE)
                except BlockingIOError:
                    raise AnalysisError(
                        f"another run is writing to {self.folder}: wait for it, or give another folder"
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
        seal = packages.read_json(path, remedy)
        sealed = seal.get("files")
        if seal.get("program") != PROGRAM or not _is_list_of_files(sealed):
            raise AnalysisError(f"{path} is no seal of {PROGRAM}: {remedy}")
        if (seal.get("command"), seal.get("key")) != (self.command, self._key):
            inputs = seal.get("inputs")
            shown = ", ".join(map(str, inputs)) if isinstance(inputs, list) else ""
            same_names = seal.get("command") == self.command and inputs == self._shown
            other = " other inputs, called" if same_names else ""
            raise AnalysisError(
                f"{self.folder} holds what {PROGRAM} {seal.get('command')} wrote of{other} {shown}: give another folder"
            )
        return sealed

    def _seal(self, sealed: Sealed, scratch: Path) -> None:
        about = {"program": PROGRAM, "command": self.command, "inputs": self._shown, "key": self._key}
        text = json.dumps({**about, "files": sealed}, indent=1)
        with (scratch / SEAL).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            # The files are nobody's without it.
            os.fsync(file.fileno())
        os.replace(scratch / SEAL, self.folder / SEAL)

    @property
    def _shown(self) -> list[str]:
        """The inputs without their folders, whose names are nobody's business where a report is published."""
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
    if not isinstance(sealed, dict) or not all(isinstance(hashes, list) for hashes in sealed.values()):
        return False
    paths = [PurePosixPath(name) for name in sealed]
    return not any(path.is_absolute() or ".." in path.parts for path in paths)


def _is_changed(path: Path, hashes: list[str]) -> bool:
    return path.exists() and packages.file_hash(path) not in hashes


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder but its own seal, by path."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: packages.file_hash(path) for name, path in names.items() if name != SEAL}


def inputs_key(inputs: Iterable[str], folder: Path) -> str:
    """A hash of names; paths are taken as they lie to the folder, so that all may be moved together."""
    home = os.path.realpath(folder)
    places = [_place(name, home) for name in inputs]
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]


def _place(name: str, home: str) -> str:
    """A name as it is; of a path, such as ``table.csv`` in ``table.csv:text``, where it lies as seen from ``home``."""
    ends = [len(name), *(mark.start() for mark in re.finditer("[:@+]", name))]
    for end in sorted(ends, reverse=True):
        if os.path.exists(name[:end]):
            return os.path.relpath(os.path.realpath(name[:end]), home) + name[end:]
    return name
