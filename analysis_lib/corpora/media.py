"""Images and sounds as items of a corpus: small objects that read their content on request."""

import hashlib
import io
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from analysis_lib.corpora.containers import is_cut_short, recordings, with_length
from analysis_lib.corpora.reading import read_bytes, translated
from analysis_lib.errors import AnalysisError, require_extra, require_whole, shown

if TYPE_CHECKING:
    from PIL.Image import Image
    from pyarrow import ChunkedArray
    from pyarrow.parquet import ParquetFile


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording, as an item in memory.

    Attributes:
        samples: the samples of one channel, float32 with a full scale of 1, shape (samples,).
        rate: samples per second.
        text: the words spoken, if known; decoders read them.
    """

    samples: np.ndarray
    rate: int
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "rate", require_whole("the rate of a sound, in samples per second,", self.rate, 1)
        )
        if not isinstance(self.text, str):
            raise AnalysisError(
                f"the text of a sound is {shown(self.text)}: give what is said, or leave it out"
            )
        if not isinstance(self.samples, np.ndarray):
            raise AnalysisError(
                f"the samples of a sound are {shown(self.samples)}: give an array of numpy"
            )
        _refuse_samples("a sound", self.samples)

    def __str__(self) -> str:
        return f"a sound of {len(self.samples)} samples"

    def load(self) -> "Sound":
        """The recording itself."""
        return self

    def at_rate(self, rate: int) -> np.ndarray:
        """The samples at another rate, float32, of shape (samples,)."""
        if rate == self.rate:
            return self.samples
        # Imported here: it takes a while, and texts do not need it.
        import scipy

        common = math.gcd(self.rate, rate)
        resampled = scipy.signal.resample_poly(self.samples, rate // common, self.rate // common)
        return resampled.astype("float32")

    def digest(self) -> bytes:
        """SHA-256 of the rate, the samples and the text."""
        return hashlib.sha256(
            repr(self.rate).encode() + self.samples.tobytes() + self.text.encode()
        ).digest()


@dataclass(frozen=True, eq=False, slots=True)
class ArrayImage:
    """A small image in memory: uint8, of shape (height, width) if grey, else (height, width, 3)."""

    pixels: np.ndarray

    def __post_init__(self) -> None:
        if not isinstance(self.pixels, np.ndarray):
            raise AnalysisError(
                f"the pixels of an image are {shown(self.pixels)}: give an array of numpy"
            )
        shape = self.pixels.shape
        kind = self.pixels.dtype
        if (
            kind != np.uint8
            or not self.pixels.size
            or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3))
        ):
            raise AnalysisError(
                f"an image of {kind}, {shape}: give uint8, of height x width or height x width x 3"
            )

    def __str__(self) -> str:
        height, width = self.pixels.shape[:2]
        return f"an image of {height} x {width} pixels"

    def load(self) -> "Image":
        """The image in mode L or RGB."""
        require_extra("packages", "PIL")
        from PIL import Image

        return Image.fromarray(self.pixels)

    def digest(self) -> bytes:
        """SHA-256 of the shape and the pixels."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).digest()


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a sound in a file of its own, or in a larger one.

    Attributes:
        kind: image or audio.
        path: the file.
        part: the part of a larger file, for errors.
        read: reads it as it is stored, from the path and the position ``at`` in the file.
        text: the words spoken in a sound, if known.
        page: the index of a picture in an image file with several: a page of a TIFF, a frame of an
            animation.
    """

    kind: str
    path: Path
    part: str = ""
    read: Callable[..., bytes] = read_bytes
    at: tuple = ()
    text: str = ""
    page: int = 0

    def __str__(self) -> str:
        part = self.part or (f"picture {self.page + 1}" if self.page else "")
        return f"{part} in {self.path}" if part else str(self.path)

    def content(self) -> bytes:
        """The image or sound as it is stored."""
        return self.read(self.path, *self.at)

    def load(self) -> "Image | Sound":
        """The image, upright, in mode L if it is grey, else in RGB; or the sound at its own rate.

        Transparency is dropped, and several channels of a sound are averaged. Samples are those of
        soundfile: full scale is 1, which floats and decoded lossy formats may exceed. Recordings
        joined in one file, as OGG and MP3 allow, are one sound.

        Raises:
            AnalysisError: the file is missing, no image or sound, empty or cut short; or a sound
                has samples that are not finite or not scaled to a full scale of 1.
        """
        item = decoded(self.kind, self.content(), str(self), self.page)
        return replace(item, text=self.text) if self.text else item

    def digest(self) -> bytes:
        """SHA-256 of the content and of the text or the page."""
        page = f"picture {self.page}" if self.page else ""
        return hashlib.sha256(self.content() + self.text.encode() + page.encode()).digest()


@dataclass(frozen=True, slots=True)
class Captioned:
    """One or several images, or a sound, with a text, which a model reads together.

    Attributes:
        media: the images, in order, or the sound.
        text: the text.
    """

    media: tuple[MediaFile | ArrayImage | Sound, ...]
    text: str

    def __str__(self) -> str:
        first, *others = self.media
        more = f" and {len(others)} more" if others else ""
        return f"{first}{more} with its text"

    def load(self) -> "list[Image | Sound]":
        """The images, or the sound."""
        return [each.load() for each in self.media]

    def digest(self) -> bytes:
        """SHA-256 of the images or the sound and of the text."""
        digests = b"".join(each.digest() for each in self.media)
        return hashlib.sha256(digests + self.text.encode()).digest()


def decoded(kind: str, content: bytes, name: str, page: int = 0) -> "Image | Sound":
    """An image or a sound from the content of its file.

    Args:
        name: the name of the file, for errors.
    """
    if kind == "image":
        return _image(io.BytesIO(content), name, page)
    return _sound(content, name)


# Formats of Pillow with several pictures in a file. In other formats, further pictures (the preview
# of a photograph, the layers of a drawing, the sizes of an icon) show the first one again.
_SEVERAL = {"TIFF", "GIF", "PNG", "WEBP", "AVIF", "FLI", "DCX", "IM"}
# In a TIFF: the tag that tells whether a page is a reduced copy of another, or a mask of it.
_SUBFILE_TYPE, _REDUCED, _MASK = 254, 1, 4


def parts_of(item: MediaFile) -> list[MediaFile]:
    """The pictures of an image file, each as an item.

    A file that cannot be read is one item, whose ``load()`` raises the error.
    """
    from PIL import Image

    if item.kind != "image" or Image.EXTENSION.get(item.path.suffix.lower()) not in _SEVERAL:
        return [item]
    try:
        with Image.open(item.path) as opened:
            count = getattr(opened, "n_frames", 1)
            pages = [page for page in range(count) if count == 1 or not _is_copy(opened, page)]
    except Exception:  # Decoders of Pillow raise many errors for damaged files.
        return [item]
    if len(pages) < count:
        note = (
            "note: of the %d pictures of %s, %d are reduced copies or masks of others, and are "
            "left out"
        )
        logging.getLogger(__name__).warning(note, count, item.path, count - len(pages))
    return [replace(item, page=page) for page in pages] or [item]


def _is_copy(opened: "Image", page: int) -> bool:
    """Whether a page of a TIFF is a reduced copy or a mask of another."""
    if opened.format != "TIFF":
        return False
    opened.seek(page)
    return bool(opened.tag_v2.get(_SUBFILE_TYPE, 0) & (_REDUCED | _MASK))


# Cached, since rows are read in order, and Parquet unpacks a group of about a hundred images at a
# time.
@lru_cache(maxsize=1)
def row_group(path: Path, group: int, column: str) -> "ChunkedArray":
    with parquet_file(path) as file:
        return file.read_row_group(group, columns=[column])[column]


@contextmanager
def parquet_file(path: Path) -> Iterator["ParquetFile"]:
    from pyarrow import parquet

    with (
        translated(path, "is no Parquet file or cannot be read"),
        parquet.ParquetFile(path) as file,
    ):
        yield file


def _image(file: BinaryIO, name: str, page: int) -> "Image":
    require_extra("packages", "PIL")
    from PIL import Image, ImageOps

    with translated(name, "is no image or cannot be read"), Image.open(file) as opened:
        form = opened.format
        if page:
            opened.seek(page)
        opened.load()
        image = ImageOps.exif_transpose(opened)
    # Pillow would clip 16-bit values at 255 instead of scaling them. It returns those of a PGM in
    # 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and form in ("PPM", "PNG")):
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise AnalysisError(
            f"{name} has 32-bit pixels of an unknown range: save it with 8 or 16 bits a channel"
        )
    if image.mode == "P":  # Directly to RGB, a palette with transparency gives a warning.
        image = image.convert("RGBA")
    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    return image.convert(mode)


_MPEG_FRAME = 1152
_LOUDEST = 16


def _sound(content: bytes, name: str) -> Sound:
    """The recordings of a file, one after another, as one sound."""
    starts = recordings(content)
    sounds = [
        _recording(content[start:end], name) for start, end in pairwise([*starts, len(content)])
    ]
    rates = {sound.rate for sound in sounds}
    if len(rates) > 1:
        raise AnalysisError(
            f"{name} joins recordings of {' and '.join(map(str, sorted(rates)))} Hz: take them "
            "apart"
        )
    samples = (
        np.concatenate([sound.samples for sound in sounds])
        if len(sounds) > 1
        else sounds[0].samples
    )
    return Sound(samples, sounds[0].rate)


def _recording(content: bytes, name: str) -> Sound:
    require_extra("packages", "soundfile")
    import soundfile

    file = io.BytesIO(with_length(content))
    with translated(name, "is no sound or cannot be read"), soundfile.SoundFile(file) as sound:
        # In blocks, since a damaged header may declare more samples than fit in memory.
        blocks = [np.zeros(0, np.float32)]
        while len(block := sound.read(2**20, dtype="float32", always_2d=True)):
            blocks.append(block.mean(axis=1))
        samples = np.concatenate(blocks)
        rate = sound.samplerate
        frames = sound.frames
        log = sound.extra_info
    # Encoders of MP3 disagree about the padding of the last frame.
    if is_cut_short(log) or len(samples) + _MPEG_FRAME < frames:
        raise AnalysisError(
            f"{name} is cut short: it holds less sound than its header says, so copy it again"
        )
    if not len(samples):
        raise AnalysisError(f"{name} holds no sound: remove it")
    _refuse_samples(name, samples)
    return Sound(samples, rate)


def _refuse_samples(name: str, samples: np.ndarray) -> None:
    if samples.ndim != 1 or not len(samples) or samples.dtype.kind != "f":
        raise AnalysisError(
            f"{name} has samples of {samples.dtype} and shape {samples.shape}: give those of one "
            "channel, float32"
        )
    if not np.isfinite(samples).all():
        raise AnalysisError(f"{name} has samples that are not finite numbers: mend or remove it")
    # Floats may exceed full scale slightly; integers that were not scaled exceed it by far.
    if (peak := np.abs(samples).max()) > _LOUDEST:
        raise AnalysisError(
            f"{name} has samples up to {peak:.6g}: scale them to lie between -1 and 1"
        )
