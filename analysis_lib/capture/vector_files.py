"""Files of vectors in a folder: their arrays, opened without being read.

vLLM writes the hidden states of several layers into one file per text
(``ExampleHiddenStatesConnector``, for its method ``extract_hidden_states``): the tensors
``hidden_states``, token x layer x width, and ``token_ids``, the tokens that the model read. The
file is named after the request. Which layers these are is not in it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from analysis_lib import files
from analysis_lib.capture.vectors import wide
from analysis_lib.errors import AnalysisError, refuse_all, require_path

ENDINGS = (".safetensors", ".npy")
# Arrays of a file that describe the texts and are not vectors.
DESCRIPTIONS = ("lengths", "units")
# Tensors of a file of vLLM.
STATES, IDS = "hidden_states", "token_ids"

# By the name of an array, a function that opens it, or an object that can be sliced like one.
Arrays = dict[str, Callable[[], Any]]


def arrays_in(folder: Path | str) -> dict[Path, Arrays]:
    """The arrays of the files of a folder, ordered by the numbers in file names.

    Raises:
        AnalysisError: there is no such folder, or some files cannot be read.
    """
    folder = require_path("the folder of vectors", folder)
    if not folder.is_dir():
        raise AnalysisError(f"there is no folder {folder}: give one of {', '.join(ENDINGS)} files")
    read = {}
    faults = []
    for path in sorted(folder.iterdir(), key=_natural_order):
        # Hidden files may belong to a measurement in progress.
        if path.suffix not in ENDINGS or path.name.startswith("."):
            continue
        try:
            read[path] = files.read(path, _arrays, "make it again with safetensors or np.save")
        except AnalysisError as error:
            faults.append(str(error))
    refuse_all(faults)
    return read


def _natural_order(path: Path) -> list[int | str]:
    """A sort key that orders files by the numbers in their names: part 10 comes after part 9."""
    pieces = re.split(r"([0-9]+)", path.stem)
    return [int(piece) if piece.isdecimal() else piece for piece in pieces]


def _arrays(path: Path) -> Arrays:
    """Functions that open the arrays of a file without reading them, by the name of the array."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            names = file.keys()
        arrays = {name: partial(_tensor, path, name) for name in names}
    else:
        arrays = {path.stem: partial(np.load, path, mmap_mode="r", allow_pickle=False)}
    for opened in arrays.values():
        opened()
    return arrays


def _tensor(path: Path, name: str) -> Any:
    with safe_open(path, "pt") as file:
        return file.get_slice(name)


@dataclass(frozen=True)
class StateFile:
    """A file of vLLM: the hidden states of one text in several layers.

    Attributes:
        shape: token x layer x width.
        dtype: the precision, by its name in safetensors files.
    """

    path: Path
    shape: tuple[int, int, int]
    dtype: str

    @classmethod
    def of(cls, path: Path, arrays: Arrays) -> Self:
        """The file with some arrays, once they have been checked.

        Raises:
            AnalysisError: it lacks one of the two, or their shapes do not fit each other.
        """
        for name in (STATES, IDS):
            if name not in arrays:
                raise AnalysisError(
                    f"{path} has no {name}, and each file that vLLM writes has: move it, or leave "
                    "layers out"
                )
        states = arrays[STATES]()
        ids = arrays[IDS]()
        shape = tuple(states.get_shape())
        if len(shape) != 3 or 0 in shape:
            raise AnalysisError(
                f"{path}: its {STATES} have the shape {shape}: give token x layer x width, of one "
                "token or more, or leave the text out"
            )
        form = tuple(ids.get_shape())
        if form != shape[:1] or not ids.get_dtype().startswith(("I", "U")):
            raise AnalysisError(
                f"{path}: its {IDS} are {ids.get_dtype()} of the shape {form}, and its {STATES} of "
                f"{shape[0]} tokens: give a whole number for each token"
            )
        return cls(path, shape, states.get_dtype())

    def beginning(self, tokens: int) -> tuple[list[int], Float[Tensor, "token layer width"]]:
        """The ids and the hidden states of the first tokens.

        Raises:
            AnalysisError: a hidden state is not finite.
        """
        ids = _tensor(self.path, IDS)[:tokens].tolist()
        states = wide(_tensor(self.path, STATES)[:tokens])
        if not states.isfinite().all():
            raise AnalysisError(
                f"{self.path}: its {STATES} have NaN or infinity: make them again, in a precision "
                "that carries them, or leave the text out"
            )
        return ids, states


@dataclass(frozen=True)
class Column:
    """The vectors of one layer in a file of vLLM, token x width, which can be sliced by rows."""

    file: StateFile
    index: int

    @property
    def shape(self) -> tuple[int, int]:
        tokens, _, width = self.file.shape
        return tokens, width

    @property
    def dtype(self) -> str:
        return self.file.dtype

    def __getitem__(self, rows: slice) -> Tensor:
        return _tensor(self.file.path, STATES)[rows, self.index]


def has_states(arrays: Arrays) -> bool:
    """Whether a file is one that vLLM writes."""
    return {STATES, IDS} <= arrays.keys()


def state_files(folder: Path | str, read: Mapping[Path, Arrays]) -> list[StateFile]:
    """The files of vLLM in a folder, one per text, in order.

    Args:
        read: the arrays of each file.

    Raises:
        AnalysisError: there are none, there are others, or they differ in layers or width.
    """
    texts = []
    for path, arrays in read.items():
        if arrays.keys() - {*DESCRIPTIONS}:
            texts.append(StateFile.of(path, arrays))
    if not texts:
        raise AnalysisError(
            f"{folder}: there are no vectors: give a folder of the files that vLLM writes, with "
            f"{STATES} and {IDS}"
        )
    first = texts[0]
    for text in texts:
        if text.shape[1:] != first.shape[1:]:
            raise AnalysisError(
                f"{text.path} has {STATES} of the shape {text.shape}, and {first.path} of "
                f"{first.shape}: give texts of the same layers of one model"
            )
    return texts
