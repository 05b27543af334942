"""Vectors that someone has already, in memory or in a folder, in the place of a model."""

import bisect
import hashlib
import itertools
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from analysis_lib.capture.activations import Activations, Receive
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.capture.tokens import unpadded
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError
from analysis_lib.models import ModelSpec
from analysis_lib.models.parts import Layout

# The beginnings of words of a name that say what its vectors are; those of other names are hidden.
SPACES = {"final": "final", "quer": "query", "key": "key", "value": "value"}
# By their names in safetensors files.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# So many rows are hashed at once.
ROWS = 4096
ENDINGS = (".safetensors", ".npy", ".npz")
# What of a file is no vectors.
TOLD = ("lengths", "units")
# Words of a name before the number of a layer, the surest first; else it is a number that stands alone, or the first.
LAYER_NUMBERS = (
    re.compile(r"layers?[^a-z0-9]*(\d+)"),
    re.compile(r"(?<![a-z])(?:blocks?|h)[^a-z0-9]*(\d+)"),
    re.compile(r"(?<![a-z0-9-])(\d+)(?![a-z0-9])"),
    re.compile(r"(?<!-)(\d+)"),
)
# Numbers of a name by which vectors are others, not those of further texts.
APART = re.compile(r"(layers?|blocks?|(?<![a-z])h|checkpoint|step|epoch|seed)[^a-z0-9]*\d+")


class Text(NamedTuple):
    """Which of the vectors are those of a text: ``length`` of them, from ``start`` on.

    Where they are known by a mask, ``kept`` are their places in the row of the text.
    """

    number: int
    start: int
    length: int
    kept: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """What tells it from other texts, as far as vectors do."""
        return struct.pack("<q", self.length) + np.array(self.kept, "<i8").tobytes()

    @property
    def end(self) -> int:
        """How many vectors of its row need be read."""
        return self.kept[-1] + 1 if self.kept else self.length


@dataclass(frozen=True)
class Part:
    """An array of vectors, of which some rows are read at a time.

    Attributes:
        name: of the file, or what it was given as.
        opened: gives the array, or what is sliced like one.
        lengths: of the texts in it; empty where that is not told, None where it is one text.
    """

    name: str
    opened: Callable[[], Any]
    lengths: list[int] | None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        array = self.opened()
        return tuple(array.get_shape() if hasattr(array, "get_shape") else getattr(array, "shape", ()))

    @cached_property
    def dtype(self) -> str:
        """As torch names it; what else there is, as it is named."""
        array = self.opened()
        found = array.get_dtype() if hasattr(array, "get_dtype") else getattr(array, "dtype", type(array).__name__)
        return FLOATS.get(found, getattr(found, "name", str(found).removeprefix("torch.")))

    def rows(self, *which: slice) -> Tensor:
        found = self.opened()[which[0] if len(which) == 1 else which]
        if isinstance(found, Tensor):
            return found.detach()
        if hasattr(found, "toarray"):
            return torch.from_numpy(found.toarray())
        if self.dtype == "bfloat16":
            # As JAX has it, of which torch knows the bits alone.
            return torch.from_numpy(np.array(found).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(found, self.dtype))


class Source:
    """The vectors of one space in one layer, in parts that follow one another.

    Attributes:
        padded: whether a row is a text, with padding at its end, rather than a vector.
        bounds: before how many rows each part begins, and the number of all.
        lengths: of the texts; empty unless all parts tell them.
    """

    def __init__(self, layer: int, space: str, parts: Sequence[Part]):
        self.layer, self.space, self.parts = layer, space, parts
        self.name = f"layer {layer} ({space})"
        form = "token x width" if space in ("hidden", "final") else "token x head x dim"
        axes, first = len(form.split(" x ")), parts[0]
        for part in parts:
            if part.dtype not in FLOATS.values():
                raise AnalysisError(f"{part.name} holds {part.dtype}: give vectors as {', '.join(FLOATS.values())}")
            if len(part.shape) not in (axes, axes + 1):
                raise AnalysisError(f"{part.name} has the shape {part.shape}: give {form}, or utterance x {form}")
            if (len(part.shape), part.shape[1 - axes :]) != (len(first.shape), first.shape[1 - axes :]):
                both = f"{part.name} has the shape {part.shape}, and {first.name} {first.shape}"
                raise AnalysisError(f"{both}, and both are of {self.name}: give one width, and one form")
        self.padded = len(first.shape) > axes
        self.bounds = [0, *itertools.accumulate(part.shape[0] for part in parts)]
        # A part that is one text is as long as it is; a row of a padded one may be as long as there is room.
        told = [
            p.lengths or ([p.shape[1]] * p.shape[0] if self.padded else p.shape[: p.lengths is None]) for p in parts
        ]
        self.lengths = [*itertools.chain(*told)] if all(told) else []

    def part_of(self, row: int) -> int:
        """The place of the part that holds a row."""
        return bisect.bisect(self.bounds, row) - 1

    def refuse_other(self, lengths: list[int]) -> None:
        """Raise an AnalysisError if these are not the lengths of its texts."""
        wanted, unit = (len(lengths), "texts") if self.padded else (sum(lengths), "vectors")
        if self.bounds[-1] != wanted:
            others = f" and {len(self.parts) - 1} more" * (len(self.parts) > 1)
            raise AnalysisError(
                f"{self.name} has {self.bounds[-1]} {unit}, in {self.parts[0].name}{others}, and the lengths of the "
                f"{len(lengths)} texts make {wanted}: give the lengths of all, and names by their layer, as layer_3"
            )
        for part, start in zip(self.parts, self.bounds, strict=False):
            if self.padded and max(lengths[start : start + part.shape[0]], default=0) > part.shape[1]:
                raise AnalysisError(
                    f"{part.name} has {part.shape[1]} vectors a text, and some length is above: mend it"
                )

    def refuse_mask(self, rows: Sequence[np.ndarray]) -> None:
        """Raise an AnalysisError if a mask with these rows is of other vectors."""
        if not self.padded:
            raise AnalysisError(f"{self.name} has no padding: leave mask= out, or give utterance x token x width")
        if self.bounds[-1] != len(rows):
            raise AnalysisError(f"{self.name} has {self.bounds[-1]} texts, and the mask {len(rows)}: give one of each")
        for part, start in zip(self.parts, self.bounds, strict=False):
            for row in rows[start : start + part.shape[0]]:
                if len(row) != part.shape[1]:
                    raise AnalysisError(
                        f"{part.name} has {part.shape[1]} vectors a text, and its mask {len(row)}: give one for each"
                    )

    def read(self, texts: Sequence[Text]) -> Tensor:
        """The vectors of neighbouring texts, utterance x head x token x dim, with zeros after the end of a text."""
        lengths = [text.length for text in texts]
        first, last = texts[0], texts[-1]
        start, end = (first.number, last.number + 1) if self.padded else (first.start, last.start + last.length)
        pieces = []
        for place in range(self.part_of(start), self.part_of(end - 1) + 1):
            part, begin = self.parts[place], self.bounds[place]
            rows = slice(max(start - begin, 0), min(end - begin, part.shape[0]))
            pieces.append(part.rows(rows, *[slice(max(text.end for text in texts))] * self.padded))
        if self.padded:
            kept = [[*text.kept] or slice(text.length) for text in texts]
            each = [row[which] for row, which in zip(itertools.chain(*pieces), kept, strict=True)]
        else:
            each = torch.cat(pieces).split(lengths)
        values = wide(pad_sequence(each, batch_first=True))
        # A sum is ten times as fast as a look at each; that of large numbers may be infinite, too.
        for utterance, token, *_ in [] if values.sum().isfinite() else (~values.isfinite()).nonzero()[:1].tolist():
            text = texts[utterance]
            part = self.parts[self.part_of(text.number if self.padded else text.start + token)]
            raise AnalysisError(
                f"{part.name}: {self.name} has NaN or infinity in text {text.number + 1}: make its vectors again, in a "
                f"precision that carries them, or leave the text out"
            )
        return values.unsqueeze(1) if values.dim() == 3 else values.transpose(1, 2)


@dataclass(frozen=True)
class FolderSpec(ModelSpec):
    """What another process needs to open the same folder."""


class GivenVectors:
    """Vectors of which a measurement asks what it asks of a :class:`~analysis_lib.models.LoadedModel`.

    Attributes:
        name: the folder, or ``vectors``.
        sources: by layer.
        told: the lengths of the texts, and the unit that each is a part of, if files say so.
        spec: None of what is in memory.
    """

    kind, layout, device = "text", Layout(()), torch.device("cpu")

    def __init__(self, vectors: Mapping | Sequence | Path):
        self.name, self.spec, self._paths, self.told = "vectors", None, {}, {name: [] for name in TOLD}
        if isinstance(vectors, Path | str):
            self.name, self.spec = str(vectors), FolderSpec(str(Path(vectors).resolve()), None, "as stored", "cpu")
            named = self._in_folder(Path(vectors))
        else:
            named = _in_memory(vectors)
        parts: dict[tuple[int, str], list[Part]] = {}
        names: dict[tuple[int, str], tuple[str, str]] = {}
        for name, part in named:
            place = _place(name, part.name)
            # In files, the same name with other numbers is of further texts; in memory, each layer has one name.
            alike = _without_numbers(name) if self._paths else name
            known, first = names.setdefault(place, (alike, part.name))
            if known != alike:
                raise AnalysisError(
                    f"{first} and {part.name} are both taken for layer {place[0]} ({place[1]}): name each by its "
                    f"layer, as layer_3, or give them apart"
                )
            parts.setdefault(place, []).append(part)
        if not parts:
            raise AnalysisError(f"{self.name}: there are no vectors: give {{layer: vectors}}, or files of them")
        self.sources = [Source(*place, parts[place]) for place in sorted(parts)]

    def _in_folder(self, folder: Path) -> Iterator[tuple[str, Part]]:
        """The arrays of the files, in the order of the numbers in their names, each by what says its layer."""
        if not folder.is_dir():
            raise AnalysisError(f"there is no folder {folder}: give one of {', '.join(ENDINGS)} files")
        for path in sorted(folder.rglob("*"), key=_in_order):
            name = path.relative_to(folder)
            # What is hidden may be of a measurement under way.
            if path.suffix not in ENDINGS or any(part.startswith(".") for part in name.parts):
                continue
            self._paths[str(name)] = path
            arrays = packages.read(path, _arrays, "make it again with safetensors, np.save or np.savez")
            own = {key: np.asarray(arrays.pop(key)()[:]).tolist() for key in TOLD if key in arrays}
            for key in own:
                # Lengths beside vectors are of the texts in that file.
                self.told[key] += own[key] if key == "units" or not arrays else []
            for array, opened in arrays.items():
                by_array = len(arrays) > 1 or not re.search(r"\d", name.stem)
                part = Part(f"{path} ({array})" if by_array else str(path), opened, own.get("lengths", []))
                yield array if by_array else str(name.with_suffix("")), part

    @property
    def model(self) -> "GivenVectors":
        """Themselves: a measurement asks for the precision."""
        return self

    @property
    def dtype(self) -> str:
        return ", ".join(sorted({part.dtype for source in self.sources for part in source.parts}))

    @cached_property
    def files(self) -> dict[str, str]:
        """sha256 of each file, by its path in the folder."""
        return {name: packages.file_hash(path) for name, path in self._paths.items()}

    @cached_property
    def revision(self) -> str:
        """The hash of the files, or of what is in memory."""
        digest = hashlib.sha256(json.dumps(self.files).encode())
        for source in () if self.files else self.sources:
            for part in source.parts:
                digest.update(repr([source.name, part.shape, part.dtype]).encode())
                for start in range(0, part.shape[0], ROWS):
                    rows = part.rows(slice(start, start + ROWS)).cpu().contiguous()
                    digest.update(rows.flatten().view(torch.uint8).numpy())
        return f"vectors sha256:{digest.hexdigest()}"

    def texts(
        self,
        lengths: Sequence[int] | np.ndarray | Tensor | None = None,
        mask: Sequence | np.ndarray | Tensor | None = None,
    ) -> list[Text]:
        """The texts, of these lengths or with this mask, or of the lengths that the vectors tell.

        Raises:
            AnalysisError: they are not known, or do not add up to the vectors of each layer.
        """
        if mask is not None:
            if lengths is not None:
                raise AnalysisError(f"{self.name}: both lengths and mask are given: leave one of them out")
            return self._masked_texts(_mask_rows(mask))
        if lengths is None and not (lengths := self.told["lengths"]):
            known = [source for source in self.sources if source.lengths]
            lengths = known[0].lengths if known else []
            for source in known:
                if source.lengths != lengths:
                    raise AnalysisError(f"{source.name} tells other lengths than {known[0].name}: give lengths of all")
        lengths = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
        if not lengths.size:
            raise AnalysisError(
                f"{self.name}: how many vectors each text has is not known: give lengths, in a folder as lengths.npy; "
                f"1 for each where a vector stands for a whole text"
            )
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            found = f"{lengths.dtype} of the shape {lengths.shape}"
            raise AnalysisError(f"{self.name}: the lengths of the texts are {found}: give a whole number for each")
        for number in np.flatnonzero(lengths < 1)[:1]:
            raise AnalysisError(f"{self.name}: text {number + 1} has the length {lengths[number]}: leave it out")
        lengths = lengths.tolist()
        for source in self.sources:
            source.refuse_other(lengths)
        return [*map(Text, itertools.count(), itertools.accumulate(lengths, initial=0), lengths)]

    def _masked_texts(self, rows: Sequence[np.ndarray]) -> list[Text]:
        """The texts of padded vectors, each with the places at which its row of a mask is 1."""
        for source in self.sources:
            source.refuse_mask(rows)
        texts, start = [], 0
        for number, row in enumerate(rows):
            kept = tuple(np.flatnonzero(row).tolist())
            if not kept:
                raise AnalysisError(f"{self.name}: the mask of text {number + 1} has no token: leave the text out")
            texts.append(Text(number, start, len(kept), kept))
            start += len(kept)
        return texts

    def batches(
        self, texts: Sequence[Text], groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[tuple[Sequence[Text], tuple[int, ...]]]:
        """Neighbouring texts and their groups, of at most ``tokens_per_batch`` vectors, padding included."""
        reading.utterances += len(texts)
        start = longest = 0
        for place, text in enumerate(texts):
            longest = max(longest, text.length)
            if place > start and (place + 1 - start) * longest > settings.tokens_per_batch:
                yield texts[start:place], tuple(groups[start:place])
                start, longest = place, text.length
        yield texts[start:], tuple(groups[start:])

    def run(
        self,
        batch: tuple[Sequence[Text], tuple[int, ...]],
        needs: frozenset[str],
        receive: Receive,
        _maps: str,
        _changes: None,
    ) -> None:
        """Read a batch; ``receive`` is called with the :class:`Activations` of each layer in turn."""
        texts, groups = batch
        lengths = torch.tensor([text.length for text in texts])
        tokens = unpadded(groups, int(lengths.max()))
        tokens.mask &= torch.arange(tokens.mask.shape[1]) < lengths[:, None]
        for layer, sources in itertools.groupby(self.sources, lambda source: source.layer):
            read = {source.space: source.read(texts) for source in sources if source.space in needs}
            spaces = {space: Vectors(values, tokens.on(values.device)) for space, values in read.items()}
            final = spaces.pop("final", None)
            receive(Activations(layer, "vectors", "", tokens, spaces))
            if final is not None:
                receive(Activations(layer, "vectors", "", tokens, {"final": final}))


def _in_memory(vectors: Mapping | Sequence) -> Iterator[tuple[str, Part]]:
    """The arrays, each with the name of its layer. Each array of a list is a text, or several with padding."""
    if not isinstance(vectors, Mapping | Sequence):
        raise AnalysisError(f"the vectors are a {type(vectors).__name__}: give {{layer: vectors}}, or a folder")
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
    """An array of which rows can be read: one that is sparse by its rows, if it has no further axis."""
    if isinstance(given, np.ma.MaskedArray):
        raise AnalysisError(f"{name} is a masked array: give its data, and which tokens are none as mask=")
    if isinstance(given, Tensor) and given.layout != torch.strided:
        return _sparse_rows(given.detach())
    return given.tocsr() if hasattr(given, "tocsr") else given


@lru_cache(maxsize=256)
def _sparse_rows(given: Tensor) -> Any:
    """A sparse tensor as scipy has it, which reads rows of it without the others."""
    import scipy.sparse

    if given.dim() != 2:
        return given.to_dense()
    entries = given.cpu().to_sparse_coo().coalesce()
    values = wide(entries.values()).numpy()
    return scipy.sparse.csr_matrix((values, entries.indices().numpy()), shape=tuple(given.shape))


def _refuse_steps(vectors: Sequence) -> None:
    """Raise an AnalysisError for the ``hidden_states`` of ``generate``: steps of layers, not layers of texts."""
    shapes = [{tuple(getattr(array, "shape", ())) for array in step} for step in vectors if isinstance(step, tuple)]
    if len(shapes) < 2 or len(shapes) != len(vectors) or any(len(of_step) != 1 for of_step in shapes):
        return
    forms = [next(iter(of_step)) for of_step in shapes]
    # Each step after the prompt makes one token.
    if all(len(form) == 3 and form[1] == 1 for form in forms[1:]) and len(forms[0]) == 3:
        raise AnalysisError(
            "the vectors are tuples of arrays of one token, as the hidden_states of generate are, which holds layers "
            "in steps: give {layer: torch.cat([step[layer] for step in hidden_states], 1)} of each layer, with mask= "
            "where prompts are padded; or lists of arrays, if each is of a text"
        )


def _mask_rows(mask: Sequence | np.ndarray | Tensor) -> list[np.ndarray]:
    """The rows of a mask, or of a list of masks, one for each array."""
    parts = mask if isinstance(mask, list | tuple) else [mask]
    arrays = [np.asarray(part.cpu() if isinstance(part, Tensor) else part) for part in parts]
    rows = [row for array in arrays for row in (array if array.ndim == 2 else [array])]
    for row in rows:
        if row.ndim != 1 or row.dtype.kind not in "biuf" or not np.isin(row, (0, 1)).all():
            raise AnalysisError(
                f"the mask holds {row.dtype} of the shape {row.shape}: give utterance x token, 1 at each token and 0 "
                f"at padding"
            )
    return rows


def _place(name: str, origin: str) -> tuple[int, str]:
    """The layer and the space of vectors, by what they are called."""
    layer = next(filter(None, (pattern.search(name.lower()) for pattern in LAYER_NUMBERS)), None)
    if layer is None:
        raise AnalysisError(f"{origin}: no number says of which layer its vectors are: name them as in layer_3")
    word = re.search(rf"(?<![a-z])({'|'.join(SPACES)})", name.lower())
    return int(layer[1]), SPACES[word[1]] if word else "hidden"


def _without_numbers(name: str) -> str:
    """A name without the numbers that count further texts, such as those of parts and batches."""
    kept = [match.group() for match in APART.finditer(name.lower())]
    return " ".join([*re.findall("[a-z]+", name.lower()), *kept])


def _in_order(path: Path) -> list[tuple[int, str]]:
    """What sorts files by the numbers in their names: part 10 comes after part 9."""
    return [(int(number or -1), word) for number, word in re.findall(r"(\d+)|(\D+)", str(path))]


def _arrays(path: Path) -> dict[str, Callable[[], Any]]:
    """What opens each array of a file, by its name, without reading it."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            names = file.keys()
        found = {name: partial(_tensor, path, name) for name in names}
    elif path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            found = {
                member.filename.removesuffix(".npy"): partial(_mapped, path, member) for member in archive.filelist
            }
    else:
        found = {path.stem: partial(np.load, path, mmap_mode="r", allow_pickle=False)}
    for opened in found.values():
        opened()
    return found


def _tensor(path: Path, name: str) -> Any:
    with safe_open(path, "pt") as file:
        return file.get_slice(name)


def _mapped(path: Path, member: zipfile.ZipInfo) -> np.ndarray:
    """An array of an archive, as ``np.load`` maps one that is alone."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed, so that no part of it can be read")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")
