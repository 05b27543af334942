"""Images and sounds as items of a corpus: small objects that know where their content lies and read it when asked."""

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from analysis_lib.errors import AnalysisError

if TYPE_CHECKING:
    from PIL.Image import Image
    from pyarrow import ChunkedArray
    from pyarrow.parquet import ParquetFile


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording, and so an item that is in memory already.

    Attributes:
        samples: of one channel, float32 in [-1, 1], shape (samples,).
        rate: samples per second.
        text: what is said, where that is known; decoders read it.
    """

    samples: np.ndarray
    rate: int
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.rate, int) or self.rate < 1:
            raise AnalysisError(f"the rate of a sound is {self.rate!r}: give a whole number of samples per second")
        _refuse_samples("a sound", self.samples)

    def load(self) -> "Sound":
        """The recording itself."""
        return self

    def digest(self) -> bytes:
        """sha256 of the rate, the samples and the text."""
        return hashlib.sha256(repr(self.rate).encode() + self.samples.tobytes() + self.text.encode()).digest()


@dataclass(frozen=True, eq=False, slots=True)
class ArrayImage:
    """A small image in memory: uint8, shape (height, width) if it is grey, (height, width, 3) if not."""

    pixels: np.ndarray

    def __post_init__(self) -> None:
        shape, kind = self.pixels.shape, self.pixels.dtype
        if kind != np.uint8 or not self.pixels.size or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)):
            raise AnalysisError(f"an image of {kind}, {shape}: give uint8, of height x width or height x width x 3")

    def load(self) -> "Image":
        """The image in mode L or RGB."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def digest(self) -> bytes:
        """sha256 of the shape and the pixels."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).digest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; an AnalysisError if it cannot be read."""
    if path.exists() and (not path.is_file() or path.resolve().is_relative_to("/proc")):
        # Pipes, and what the kernel shows as files, may be waited for for ever.
        raise AnalysisError(f"{path} is no regular file: give one, or pipe lines of text into -")
    try:
        return path.read_bytes()
    except OSError as error:
        raise AnalysisError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a sound in a file of its own, or in a larger one.

    Attributes:
        kind: image or audio.
        path: the file.
        part: which part of a larger file it is, for errors.
        read: reads it as it is stored, from the path and ``at``, where in the file it lies.
        text: what is said in a sound, where that is known.
    """

    kind: str
    path: Path
    part: str = ""
    read: Callable[..., bytes] = read_bytes
    at: tuple = ()
    text: str = ""

    def __str__(self) -> str:
        return f"{self.part} in {self.path}" if self.part else str(self.path)

    def content(self) -> bytes:
        """The image or sound as it is stored."""
        return self.read(self.path, *self.at)

    def load(self) -> "Image | Sound":
        """The image, upright, in mode L if it is grey and in mode RGB if not; or the sound at its own rate, in [-1, 1].

        Transparency is dropped, and several channels of a sound are averaged. What a lossy format decodes to beyond
        [-1, 1] is cut off there, as it is when played.

        Raises:
            AnalysisError: the file is not there, is no image or sound, is empty or cut short; or a sound has samples
                that are not finite or not scaled to [-1, 1].
        """
        found = decoded(self.kind, self.content(), str(self))
        return replace(found, text=self.text) if self.text else found

    def digest(self) -> bytes:
        """sha256 of the content, and of what is said."""
        return hashlib.sha256(self.content() + self.text.encode()).digest()


def decoded(kind: str, content: bytes, place: str) -> "Image | Sound":
    """An image or a sound out of its file's content; ``place`` says for errors where that lies."""
    return {"image": _image, "audio": _sound}[kind](io.BytesIO(content), place)


# Rows are read in order, and Parquet unpacks a group of them (a hundred images or so) at a time.
@lru_cache(maxsize=1)
def row_group(path: Path, group: int, column: str) -> "ChunkedArray":
    with parquet_file(path) as file:
        return file.read_row_group(group, columns=[column])[column]


@contextmanager
def parquet_file(path: Path) -> Iterator["ParquetFile"]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, ArrowException) as error:
        raise AnalysisError(f"{path} cannot be read ({str(error).splitlines()[0]}): fetch it again") from error


def _image(file: BinaryIO, name: str) -> "Image":
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except UnidentifiedImageError as error:
        raise AnalysisError(f"{name} is no image, or of a format that cannot be read: mend or remove it") from error
    except Exception as error:  # Whatever a decoder of Pillow meets in a damaged file.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AnalysisError(f"{name} is an image that cannot be read ({reason}): mend or remove it") from error
    if image.mode.startswith("I;16"):  # Pillow would cut sixteen bits off at 255, not scale them.
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise AnalysisError(f"{name} has 32-bit pixels of an unknown range: save it with 8 or 16 bits a channel")
    if image.mode == "P":  # Straight to RGB, a palette with transparency gives a warning.
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


# libsndfile plays what is left of a WAV file that was cut short; only its log tells.
_CUT_SHORT = re.compile(r"^data : (\d+) \(should be (\d+)\)$", re.MULTILINE)
# Programs that write to a pipe cannot know the length and declare about the largest there is.
_UNKNOWN_LENGTH = 0x7FFF0000
_MPEG_FRAME = 1152


def _sound(file: BinaryIO, name: str) -> Sound:
    import soundfile

    try:
        with soundfile.SoundFile(file) as sound:
            # In blocks: a damaged header may declare more samples than memory holds.
            blocks = [np.zeros(0, np.float32)]
            while len(block := sound.read(2**20, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
            samples = np.concatenate(blocks)
            rate, frames, stored, log = sound.samplerate, sound.frames, sound.subtype, sound.extra_info
    except soundfile.SoundFileError as error:
        raise AnalysisError(
            f"{name} is no sound, or is damaged or of a format that cannot be read: mend or remove it"
        ) from error
    declared = _CUT_SHORT.search(log)
    lost = declared is not None and int(declared[2]) < int(declared[1]) < _UNKNOWN_LENGTH
    # Encoders of MP3 disagree about the padding of the last frame.
    if lost or len(samples) + _MPEG_FRAME < frames:
        raise AnalysisError(f"{name} is cut short: it holds less sound than its header says, so copy it again")
    if not len(samples):
        raise AnalysisError(f"{name} holds no sound: remove it")
    # Whole numbers, and what lossy formats decode to, lie within a few bits of 1.
    _refuse_samples(name, samples if stored in ("FLOAT", "DOUBLE") else samples.clip(-1, 1))
    return Sound(samples.clip(-1, 1), rate)


def _refuse_samples(name: str, samples: np.ndarray) -> None:
    if samples.ndim != 1 or not len(samples) or samples.dtype.kind != "f":
        raise AnalysisError(
            f"{name} has samples of {samples.dtype} and shape {samples.shape}: give those of one channel, float32"
        )
    if not np.isfinite(samples).all():
        raise AnalysisError(f"{name} has samples that are not finite numbers: mend or remove it")
    if (peak := np.abs(samples).max()) > 2:
        raise AnalysisError(f"{name} has samples up to {peak:.6g}: scale them to lie between -1 and 1")
