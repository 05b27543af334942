"""Given vectors, in memory or in a folder, in place of a model."""

import bisect
import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from analysis_lib import files
from analysis_lib.capture.activations import Activations, Receive
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.source import NEEDS, Source
from analysis_lib.capture.tokens import unpadded
from analysis_lib.capture.vector_files import (
    DESCRIPTIONS,
    STATES,
    Arrays,
    Column,
    StateFile,
    arrays_in,
    has_states,
    state_files,
)
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.errors import AnalysisError, in_order, require_path, shown
from analysis_lib.models import ModelSpec
from analysis_lib.models.parts import Layout

# Name of vectors: the space and the number of the layer; without a space, they are hidden.
_NAME = re.compile(r"(?:(layer|hidden|final|query|key|value)_)?([0-9]{1,6})")
# Ending of a file name with the number of a part.
_PART = re.compile(r"-part_[0-9]+$")
# Precisions, by their names in safetensors files.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Number of rows hashed at once.
ROWS = 4096


class Text(NamedTuple):
    """The vectors of a text: ``length`` of them, from ``start`` on.

    If they are given by a mask, ``kept`` holds their indices in the row of the text.
    """

    number: int
    start: int
    length: int
    kept: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """Bytes that identify the text: its length, and the indices of its vectors."""
        return struct.pack("<q", self.length) + np.array(self.kept, "<i8").tobytes()

    @property
    def end(self) -> int:
        """Number of vectors of the text's row that need to be read."""
        return self.kept[-1] + 1 if self.kept else self.length


@dataclass(frozen=True)
class Part:
    """An array of vectors, of which some rows are read at a time.

    Attributes:
        name: the name of the file, or of the array in memory.
        opened: opens the array, or an object that can be sliced like one.
        lengths: lengths of the texts in it; empty if they are not known, None if it is one text.
    """

    name: str
    opened: Callable[[], Any]
    lengths: list[int] | None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        array = self.opened()
        shape = getattr(array, "shape", ())
        if hasattr(array, "get_shape"):
            shape = array.get_shape()
        return tuple(shape)

    @cached_property
    def dtype(self) -> str:
        """The precision by torch's name, or else by its own."""
        array = self.opened()
        dtype = getattr(array, "dtype", type(array).__name__)
        if hasattr(array, "get_dtype"):
            dtype = array.get_dtype()
        return FLOATS.get(dtype, getattr(dtype, "name", str(dtype).removeprefix("torch.")))

    def rows(self, *which: slice) -> Tensor:
        # A sparse array accepts no tuple of one slice.
        chosen = which[0] if len(which) == 1 else which
        values = self.opened()[chosen]
        if isinstance(values, Tensor):
            return values.detach()
        if hasattr(values, "toarray"):
            return torch.from_numpy(values.toarray())
        if self.dtype == "bfloat16":
            # JAX's bfloat16, of which torch can read only the bits.
            return torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(values, self.dtype))


class LayerVectors:
    """The vectors of one space in one layer, in consecutive parts.

    Attributes:
        padded: whether a row is a text, with padding at its end, rather than a vector.
        bounds: the first row of each part, and the total number of rows.
        lengths: the lengths of the texts; empty unless they are known for all parts.
    """

    def __init__(self, layer: int, space: str, parts: Sequence[Part]):
        self.layer = layer
        self.space = space
        self.parts = parts
        self.name = f"layer {layer} ({space})"
        form = "token x width" if space in ("hidden", "final") else "token x head x dim"
        axes = len(form.split(" x "))
        first = parts[0]
        for part in parts:
            if part.dtype not in FLOATS.values():
                raise AnalysisError(
                    f"{part.name} holds {part.dtype}: give vectors as {', '.join(FLOATS.values())}"
                )
            if len(part.shape) not in (axes, axes + 1):
                raise AnalysisError(
                    f"{part.name} has the shape {part.shape}: give {form}, or utterance x {form}"
                )
            if (len(part.shape), part.shape[1 - axes :]) != (
                len(first.shape),
                first.shape[1 - axes :],
            ):
                both = f"{part.name} has the shape {part.shape}, and {first.name} {first.shape}"
                raise AnalysisError(
                    f"{both}, and both are of {self.name}: give one width, and one form"
                )
        self.padded = len(first.shape) > axes
        self.bounds = [0, *itertools.accumulate(part.shape[0] for part in parts)]
        known = [self._lengths_of(part) for part in parts]
        self.lengths = [*itertools.chain(*known)] if all(known) else []

    def _lengths_of(self, part: Part) -> list[int]:
        """The lengths of the texts in a part; empty if they are not known."""
        if part.lengths:
            return part.lengths
        if self.padded:
            # A padded row is taken to be full.
            return [part.shape[1]] * part.shape[0]
        is_one_text = part.lengths is None
        return [part.shape[0]] if is_one_text else []

    def part_of(self, row: int) -> int:
        """The index of the part that holds a row."""
        return bisect.bisect(self.bounds, row) - 1

    def refuse_other(self, lengths: list[int]) -> None:
        """Raise an AnalysisError unless ``lengths`` fits the texts."""
        wanted, unit = (len(lengths), "texts") if self.padded else (sum(lengths), "vectors")
        if self.bounds[-1] != wanted:
            others = f" and {len(self.parts) - 1} more" * (len(self.parts) > 1)
            raise AnalysisError(
                f"{self.name} has {self.bounds[-1]} {unit}, in {self.parts[0].name}{others}, and "
                f"the lengths of the {len(lengths)} texts make {wanted}: give the lengths of all, "
                "and names by their layer, as layer_3"
            )
        for part, start in zip(self.parts, self.bounds, strict=False):
            if (
                self.padded
                and max(lengths[start : start + part.shape[0]], default=0) > part.shape[1]
            ):
                raise AnalysisError(
                    f"{part.name} has {part.shape[1]} vectors a text, and some length is above: "
                    "mend it"
                )

    def refuse_mask(self, rows: Sequence[np.ndarray]) -> None:
        """Raise an AnalysisError unless the rows of a mask fit the vectors."""
        if not self.padded:
            raise AnalysisError(
                f"{self.name} has no padding: leave mask= out, or give utterance x token x width"
            )
        if self.bounds[-1] != len(rows):
            raise AnalysisError(
                f"{self.name} has {self.bounds[-1]} texts, and the mask {len(rows)}: give one of "
                "each"
            )
        for part, start in zip(self.parts, self.bounds, strict=False):
            for row in rows[start : start + part.shape[0]]:
                if len(row) != part.shape[1]:
                    raise AnalysisError(
                        f"{part.name} has {part.shape[1]} vectors a text, and its mask {len(row)}: "
                        "give one for each"
                    )

    def read(self, texts: Sequence[Text]) -> Tensor:
        """The vectors of neighbouring texts, utterance x head x token x dim, padded with zeros."""
        lengths = [text.length for text in texts]
        first = texts[0]
        last = texts[-1]
        start, end = (
            (first.number, last.number + 1)
            if self.padded
            else (first.start, last.start + last.length)
        )
        pieces = []
        longest = slice(max(text.end for text in texts))
        for index in range(self.part_of(start), self.part_of(end - 1) + 1):
            part = self.parts[index]
            begin = self.bounds[index]
            which = [slice(max(start - begin, 0), min(end - begin, part.shape[0]))]
            if self.padded:
                which.append(longest)
            pieces.append(part.rows(*which))
        if self.padded:
            kept = [[*text.kept] or slice(text.length) for text in texts]
            each = [row[which] for row, which in zip(itertools.chain(*pieces), kept, strict=True)]
        else:
            each = torch.cat(pieces).split(lengths)
        values = wide(pad_sequence(each, batch_first=True))
        # A sum is ten times as fast as checking each number; the sum of large ones may be infinite,
        # too.
        if not values.sum().isfinite():
            self._refuse_infinite(values, texts)
        return values.unsqueeze(1) if values.dim() == 3 else values.transpose(1, 2)

    def _refuse_infinite(self, values: Tensor, texts: Sequence[Text]) -> None:
        for utterance, token, *_ in (~values.isfinite()).nonzero()[:1].tolist():
            text = texts[utterance]
            row = text.number if self.padded else text.start + token
            part = self.parts[self.part_of(row)]
            raise AnalysisError(
                f"{part.name}: {self.name} has NaN or infinity in text {text.number + 1}: make its "
                "vectors again, in a precision that carries them, or leave the text out"
            )


@dataclass(frozen=True)
class FolderSpec(ModelSpec):
    """The folder, as another process needs it to open the vectors, with the layers in its files."""

    layers: tuple[str, ...] | None = None


class GivenVectors(Source):
    """Given vectors, as a source of activations in place of a model.

    Attributes:
        name: the folder, or ``vectors``.
        layers: the vectors of each space in each layer, in order of layers.
        stored: the lengths of the texts, and the unit of each text, if files hold them.
        spec: None for vectors in memory.
    """

    kind = "text"
    layout = Layout(())
    device = torch.device("cpu")

    def __init__(
        self, vectors: Mapping | Sequence | Path, layers: Sequence[int | str] | None = None
    ):
        self.name = "vectors"
        self.spec = None
        self.stored = {name: [] for name in DESCRIPTIONS}
        self._paths = {}
        self._layers = None if layers is None else layer_names(layers)
        if isinstance(vectors, Path | str):
            require_path("the folder of vectors", vectors)
            self.name = str(vectors)
            path = str(Path(vectors).resolve())
            self.spec = FolderSpec(path, None, "as stored", "cpu", layers=self._layers)
            named = self._in_folder(vectors)
        elif layers is None:
            named = _in_memory(vectors)
        else:
            raise AnalysisError(
                "layers are given for vectors in memory: name these by their layer, as in "
                "{3: vectors}, and leave layers out"
            )
        parts: dict[tuple[int, str], list[Part]] = {}
        names: dict[tuple[int, str], str] = {}
        for name, part in named:
            layer, space = _layer_and_space(name, part.name)
            first = names.setdefault((layer, space), name)
            if first != name:
                raise AnalysisError(
                    f"{first} and {name} are both taken for layer {layer} ({space}): give them "
                    "apart"
                )
            parts.setdefault((layer, space), []).append(part)
        if not parts:
            raise AnalysisError(
                f"{self.name}: there are no vectors: give {{layer: vectors}}, or files of them "
                "named as in layer_3"
            )
        self.layers = [LayerVectors(*key, parts[key]) for key in sorted(parts)]

    def _in_folder(self, folder: Path | str) -> Iterator[tuple[str, Part]]:
        """The arrays of the files with their names, ordered by the numbers in file names."""
        read = arrays_in(folder)
        self._paths = {path.name: path for path in read}
        if self._layers is not None or any(map(has_states, read.values())):
            texts = state_files(folder, read)
            refuse_other_layers(self.name, texts, self._layers)
            for arrays in read.values():
                self._take_descriptions(arrays)
            yield from _of_texts(texts, self._layers)
            return
        for path, arrays in read.items():
            lengths = self._take_descriptions(arrays)
            name = _PART.sub("", path.stem)
            if len(arrays) == 1 and _NAME.fullmatch(name):
                (opened,) = arrays.values()
                yield name, Part(str(path), opened, lengths)
                continue
            for array, opened in arrays.items():
                yield array, Part(f"{path} ({array})", opened, lengths)

    def _take_descriptions(self, arrays: Arrays) -> list[int]:
        """Remove the arrays that describe texts; returns the lengths of the texts in the file."""
        own = {}
        for name in DESCRIPTIONS:
            if name in arrays:
                own[name] = np.asarray(arrays.pop(name)()[:]).tolist()
        lengths = own.get("lengths", [])
        self.stored["units"] += own.get("units", [])
        if not arrays:
            # Lengths in a file with vectors are those of its texts; otherwise they are of all
            # texts.
            self.stored["lengths"] += lengths
        return lengths

    @property
    def model(self) -> "GivenVectors":
        """The vectors themselves; a measurement reads their precision."""
        return self

    def unsupported(self, items: Sequence[Text], settings: Settings) -> dict[str, str]:
        """Inputs of metrics that need a model, or spaces without vectors, with the reason."""
        spaces = {vectors.space for vectors in self.layers}
        reason = f"it needs more than the {', '.join(sorted(spaces))} vectors that are given"
        return dict.fromkeys(NEEDS - spaces, reason)

    def refuse_unreadable(self, items: Sequence[Text]) -> None:
        """Does nothing: vectors are checked as they are read."""

    @property
    def dtype(self) -> str:
        parts = itertools.chain.from_iterable(vectors.parts for vectors in self.layers)
        return ", ".join(sorted({part.dtype for part in parts}))

    @cached_property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file, by its path in the folder."""
        return {name: files.file_hash(path) for name, path in self._paths.items()}

    @cached_property
    def revision(self) -> str:
        """The hash of the files and the layers in them, or of the vectors in memory."""
        digest = hashlib.sha256(json.dumps(self.files).encode())
        if self._layers is not None:
            digest.update(json.dumps(self._layers).encode())
        for vectors in () if self.files else self.layers:
            for part in vectors.parts:
                digest.update(repr([vectors.name, part.shape, part.dtype]).encode())
                for start in range(0, part.shape[0], ROWS):
                    rows = part.rows(slice(start, start + ROWS)).cpu().contiguous()
                    digest.update(rows.flatten().view(torch.uint8).numpy())
        return f"vectors sha256:{digest.hexdigest()}"

    def texts(
        self,
        lengths: Sequence[int] | np.ndarray | Tensor | None = None,
        mask: Sequence | np.ndarray | Tensor | None = None,
    ) -> list[Text]:
        """The texts, with the given lengths or mask, or with the lengths known from the vectors.

        Raises:
            AnalysisError: lengths are not known, or do not add up to the vectors of each layer.
        """
        if mask is not None:
            if lengths is not None:
                raise AnalysisError(
                    f"{self.name}: both lengths and mask are given: leave one of them out"
                )
            return self._masked_texts(_mask_rows(mask))
        if lengths is None and not (lengths := self.stored["lengths"]):
            known = [vectors for vectors in self.layers if vectors.lengths]
            lengths = known[0].lengths if known else []
            for vectors in known:
                if vectors.lengths != lengths:
                    raise AnalysisError(
                        f"{vectors.name} tells other lengths than {known[0].name}: give lengths of "
                        "all"
                    )
        if isinstance(lengths, Tensor):
            lengths = lengths.cpu()
        lengths = np.asarray(lengths)
        if not lengths.size:
            raise AnalysisError(
                f"{self.name}: how many vectors each text has is not known: give lengths, in a "
                "folder as lengths.npy; 1 for each where a vector stands for a whole text"
            )
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            form = f"{lengths.dtype} of the shape {lengths.shape}"
            raise AnalysisError(
                f"{self.name}: the lengths of the texts are {form}: give a whole number for each"
            )
        for number in np.flatnonzero(lengths < 1)[:1]:
            raise AnalysisError(
                f"{self.name}: text {number + 1} has the length {lengths[number]}: leave it out"
            )
        lengths = lengths.tolist()
        for vectors in self.layers:
            vectors.refuse_other(lengths)
        return [*map(Text, itertools.count(), itertools.accumulate(lengths, initial=0), lengths)]

    def _masked_texts(self, rows: Sequence[np.ndarray]) -> list[Text]:
        """The texts of padded vectors, each with the indices at which its row of the mask is 1."""
        for vectors in self.layers:
            vectors.refuse_mask(rows)
        texts = []
        start = 0
        for number, row in enumerate(rows):
            kept = tuple(np.flatnonzero(row).tolist())
            if not kept:
                raise AnalysisError(
                    f"{self.name}: the mask of text {number + 1} has no token: leave the text out"
                )
            texts.append(Text(number, start, len(kept), kept))
            start += len(kept)
        return texts

    def batches(
        self, texts: Sequence[Text], groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[tuple[Sequence[Text], tuple[int, ...]]]:
        """Neighbouring texts and their groups, in batches of at most ``tokens_per_batch`` vectors.

        Padding is included.
        """
        reading.utterances += len(texts)
        start = longest = 0
        for number, text in enumerate(texts):
            longest = max(longest, text.length)
            if number > start and (number + 1 - start) * longest > settings.tokens_per_batch:
                yield texts[start:number], tuple(groups[start:number])
                start = number
                longest = text.length
        yield texts[start:], tuple(groups[start:])

    def check(self, batch: Batch) -> None:
        """Does nothing: no model computes the vectors."""

    def run(
        self,
        batch: tuple[Sequence[Text], tuple[int, ...]],
        needs: frozenset[str],
        receive: Receive,
        maps: str = "flatten",
        changes: Changes | None = None,
    ) -> None:
        """Read a batch and call ``receive`` with the :class:`Activations` of each layer in turn."""
        texts, groups = batch
        lengths = torch.tensor([text.length for text in texts])
        tokens = unpadded(groups, int(lengths.max()))
        tokens.mask &= torch.arange(tokens.mask.shape[1]) < lengths[:, None]
        for layer, spaces_of_layer in itertools.groupby(self.layers, lambda vectors: vectors.layer):
            spaces = {}
            for vectors in spaces_of_layer:
                if vectors.space in needs:
                    values = vectors.read(texts)
                    spaces[vectors.space] = Vectors(values, tokens.on(values.device))
            final = spaces.pop("final", None)
            receive(Activations(layer, "vectors", "", tokens, spaces))
            if final is not None:
                receive(Activations(layer, "vectors", "", tokens, {"final": final}))


def layer_names(layers: Sequence[int | str]) -> tuple[str, ...]:
    """The layers in the files of vLLM, in order, such as ``hidden_1`` for 1.

    Raises:
        AnalysisError: they are neither numbers nor such as ``final_3``, or one is there twice.
    """
    names = []
    for layer in in_order("layers", layers, "a number for each, as in [1, 2, 3]"):
        known = _NAME.fullmatch(str(layer))
        if known is None or known[1] not in (None, "layer", "hidden", "final"):
            raise AnalysisError(
                f"layers has {shown(layer)}: give numbers, as in 1,2,3, or final_3 for what is "
                "behind the last norm"
            )
        space = "final" if known[1] == "final" else "hidden"
        name = f"{space}_{int(known[2])}"
        if name in names:
            raise AnalysisError(f"layers has {layer} twice: give each once, in their order")
        names.append(name)
    return tuple(names)


def refuse_other_layers(
    name: str, texts: Sequence[StateFile], layers: Sequence[str] | None
) -> None:
    """Raise an AnalysisError unless there is a name for each layer in the files of vLLM."""
    count = texts[0].shape[1]
    if layers is not None and len(layers) == count:
        return
    given = "which these are is not known"
    if layers is not None:
        given = f"{len(layers)} are given"
    raise AnalysisError(
        f"{name}: its files have {STATES} of {count} layers, and {given}: give layers (--layers), "
        "a number for each in their order, as in 1,2,3"
    )


def _of_texts(texts: Sequence[StateFile], layers: Sequence[str]) -> Iterator[tuple[str, Part]]:
    """The vectors of each layer, a part for each text, with the name of the layer."""
    for index, layer in enumerate(layers):
        for text in texts:
            yield layer, Part(f"{text.path} ({layer})", partial(Column, text, index), None)


def _in_memory(vectors: Mapping | Sequence) -> Iterator[tuple[str, Part]]:
    """The arrays, each with the name of its layer.

    Each array of a list is a text, or several texts with padding.
    """
    if not isinstance(vectors, Mapping | Sequence):
        raise AnalysisError(
            f"the vectors are a {type(vectors).__name__}: give {{layer: vectors}}, or a folder"
        )
    if not isinstance(vectors, Mapping):
        _refuse_steps(vectors)
    for key, given in vectors.items() if isinstance(vectors, Mapping) else enumerate(vectors):
        if isinstance(given, list | tuple):
            for number, array in enumerate(given, 1):
                name = f"vectors[{key!r}], array {number}"
                yield str(key), Part(name, partial(_array, name, array), None)
        else:
            name = f"vectors[{key!r}]"
            yield str(key), Part(name, partial(_array, name, given), [])


def _array(name: str, given: Any) -> Any:
    """An array of which rows can be read; a sparse matrix becomes one that is sliced by rows."""
    if isinstance(given, np.ma.MaskedArray):
        raise AnalysisError(
            f"{name} is a masked array: give its data, and which tokens are none as mask="
        )
    if isinstance(given, Tensor) and given.layout != torch.strided:
        return _sparse_rows(given.detach())
    return given.tocsr() if hasattr(given, "tocsr") else given


@lru_cache(maxsize=256)
def _sparse_rows(given: Tensor) -> Any:
    """A sparse tensor as a scipy array, which can read single rows."""
    import scipy.sparse

    if given.dim() != 2:
        return given.to_dense()
    entries = given.cpu().to_sparse_coo().coalesce()
    values = wide(entries.values()).numpy()
    return scipy.sparse.csr_matrix((values, entries.indices().numpy()), shape=tuple(given.shape))


def _refuse_steps(vectors: Sequence) -> None:
    """Raise an AnalysisError for the ``hidden_states`` of ``generate``.

    These are steps of layers, not layers of texts.
    """
    shapes = []
    for step in vectors:
        shapes_of_step = set()
        if isinstance(step, tuple):
            shapes_of_step = {tuple(getattr(array, "shape", ())) for array in step}
        if len(shapes_of_step) != 1:
            return
        shapes += shapes_of_step
    # Each step after the prompt has one token.
    is_token = [len(shape) == 3 and shape[1] == 1 for shape in shapes[1:]]
    if is_token and all(is_token) and len(shapes[0]) == 3:
        raise AnalysisError(
            "the vectors are tuples of arrays of one token, as the hidden_states of generate are, "
            "which holds layers in steps: give {layer: torch.cat([step[layer] for step in "
            "hidden_states], 1)} of each layer, with mask= where prompts are padded; or lists of "
            "arrays, if each is of a text"
        )


def _mask_rows(mask: Sequence | np.ndarray | Tensor) -> list[np.ndarray]:
    """The rows of a mask, or of a list of masks, one for each array."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    rows = []
    for part in parts:
        array = np.asarray(part.cpu()) if isinstance(part, Tensor) else np.asarray(part)
        rows += [*array] if array.ndim == 2 else [array]
    for row in rows:
        if row.ndim != 1 or row.dtype.kind not in "biuf" or not np.isin(row, (0, 1)).all():
            raise AnalysisError(
                f"the mask holds {row.dtype} of the shape {row.shape}: give utterance x token, 1 "
                "at each token and 0 at padding"
            )
    return rows


def _layer_and_space(name: str, origin: str) -> tuple[int, str]:
    """The layer and the space of vectors named ``layer_3``, ``key_3`` or ``3``."""
    known = _NAME.fullmatch(name)
    if known is None:
        raise AnalysisError(
            f"{origin}: name its vectors as in layer_3, query_3, key_3, value_3 or final_3"
        )
    space, layer = known.groups("hidden")
    return int(layer), "hidden" if space == "layer" else space
