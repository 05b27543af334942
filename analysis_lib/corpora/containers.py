"""Sound files that libsndfile does not fully handle: joined recordings, and missing lengths.

Programs that write to a pipe cannot go back to the header to fill in the length. They leave 0
there, or the largest number that fits.
"""

import re
from typing import Literal, NamedTuple

# First bytes of a recording, in formats whose files may be joined.
_BEGINNINGS = {
    b"fLaC": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    b"RIFF": re.compile(rb"RIFF.{4}WAVE", re.DOTALL),
    b"RF64": re.compile(rb"RF64\xff{4}WAVEds64"),
    b"riff": re.compile(rb"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"),
    b"caff": re.compile(rb"caff\x00\x01\x00\x00desc"),
    b"FORM": re.compile(rb"FORM.{4}AIF[FC]", re.DOTALL),
    # Where the samples begin, their size in bytes, their format, and one of a few dozen encodings.
    b".snd": re.compile(
        rb"\.snd\x00\x00.{2}.{4}\x00\x00\x00[\x01-\x1b]\x00[\x00-\x0f].{2}\x00\x00\x00", re.DOTALL
    ),
}
# An MP3 has no header, but most encoders put a frame before the sound, with Xing or Info after one
# of three numbers of zeros.
_FIRST_OF_MP3 = re.compile(rb"\xff[\xe0-\xff]..(?:\0{9}|\0{17}|\0{32})(?:Xing|Info)", re.DOTALL)
# Mark of an OGG page, and the flag of a page that begins a stream.
_OGG, _OGG_BEGINNING = b"OggS", 2


def recordings(content: bytes) -> list[int]:
    """Offsets of the recordings joined in a file; the first is 0."""
    if content.startswith(_OGG):
        return _ogg_recordings(content)
    if pattern := _BEGINNINGS.get(content[:4]):
        return [match.start() for match in pattern.finditer(content)] or [0]
    is_tagged = content.startswith(b"ID3")
    if not is_tagged and content[:1] != b"\xff":
        return [0]
    # The length of a tag is written in groups of seven bits.
    tag = 0
    if is_tagged:
        tag = 10 + sum(bits << 7 * index for index, bits in enumerate(content[9:5:-1]))
    starts = [match.start() for match in _FIRST_OF_MP3.finditer(content)]
    return [0, *(start for start in starts if content[tag:start].strip(b"\0"))]


def _ogg_recordings(content: bytes) -> list[int]:
    """Offsets of OGG pages that begin a stream after other pages.

    Several streams may begin side by side.
    """
    starts = []
    page = 0
    begins = False
    while content[page : page + 4] == _OGG and page + 27 <= len(content):
        before = begins
        begins = bool(content[page + 5] & _OGG_BEGINNING)
        if begins and not before:
            starts.append(page)
        segments = content[page + 26]
        page += 27 + segments + sum(content[page + 27 : page + 27 + segments])
    return starts or [0]


# --- Files that were cut short --------------------------------------------------------------------

# libsndfile plays the rest of a file that was cut short; only its log reveals it.
_DECLARED = re.compile(
    r"^ *(data|Data Size|SSND|BODY|riff|Riff size) *: (\d+) \(should be (\d+)\)$", re.MULTILINE
)
_TRUNCATED = "Seems to be a truncated file."
# Lengths from here on mean "unknown": for 32 bits, and for 64.
_UNKNOWN, _UNKNOWN_LONG = 0x7FFF0000, 2**62
_LONG = ("riff", "Riff size")


def is_cut_short(log: str) -> bool:
    """Whether a file holds less than its header declares, from the log of libsndfile."""
    for name, declared, actual in _DECLARED.findall(log):
        unknown = _UNKNOWN_LONG if name in _LONG else _UNKNOWN
        if int(actual) < int(declared) < unknown:
            return True
    return _TRUNCATED in log


# --- Headers without a length ---------------------------------------------------------------------


class _Chunks(NamedTuple):
    """The layout of a format's chunks: each has a name of four letters, its size, and its bytes."""

    order: Literal["little", "big"]
    first: int
    width: int
    padded: bool


_CHUNKS = {
    b"RIFF": _Chunks("little", 12, 4, True),
    b"RIFX": _Chunks("big", 12, 4, True),
    b"RF64": _Chunks("little", 12, 4, True),
    b"caff": _Chunks("big", 8, 8, False),
}
# Position of the size of the sound in an RF64.
_RF64_SIZE = slice(28, 36)
# Position of the size of the sound in an AU, and its value for "unknown".
_AU_SIZE, _AU_UNKNOWN = slice(8, 12), b"\xff" * 4


def with_length(content: bytes) -> bytes:
    """A recording with its true length, if the header has none that libsndfile understands.

    Other recordings are returned as they are.
    """
    form = content[:4]
    if form == b"fLaC":
        return _flac_with_length(content)
    if form in (b".snd", b"dns."):
        return _replaced(content, _AU_SIZE, _AU_UNKNOWN) if not any(content[_AU_SIZE]) else content
    if form not in _CHUNKS:
        return content
    order, _, width, _ = _CHUNKS[form]
    begin = _sound_of_chunks(content, _CHUNKS[form])
    rest = len(content) - begin
    field = _RF64_SIZE if form == b"RF64" else slice(begin - width, begin)
    size = int.from_bytes(content[field], order)
    if form == b"caff" or form == b"RF64":
        is_unknown = size in (0, 2**64 - 1)
    else:
        # In an empty recording, another chunk or nothing follows.
        is_unknown = size == 0 and not _is_chunk(content[begin:], order)
    if not is_unknown or rest <= 0:
        return content
    return _replaced(content, field, rest.to_bytes(field.stop - field.start, order))


def _replaced(content: bytes, field: slice, value: bytes) -> bytes:
    return content[: field.start] + value + content[field.stop :]


def _sound_of_chunks(content: bytes, chunks: _Chunks) -> int:
    """Offset of the samples, after the name and size of their chunk; the end if there are none."""
    chunk = chunks.first
    while (begin := chunk + 4 + chunks.width) <= len(content):
        if content[chunk : chunk + 4] == b"data":
            return begin
        size = int.from_bytes(content[chunk + 4 : begin], chunks.order)
        padding = size % 2 if chunks.padded else 0
        chunk = begin + size + padding
    return len(content)


def _is_chunk(content: bytes, order: Literal["little", "big"]) -> bool:
    name = content[:4]
    size = int.from_bytes(content[4:8], order)
    return name.isascii() and name.decode("ascii").isprintable() and size <= len(content) - 8


# --- FLAC -----------------------------------------------------------------------------------------

# Mark of FLAC frames (RFC 9639, section 9.1); its last bit tells whether frames differ in size.
_FRAME = re.compile(rb"\xff[\xf8\xf9]")
# Positions of the least number of samples per frame, and of their total, which has 36 bits.
_FRAME_SIZE, _TOTAL = slice(8, 10), slice(21, 26)
_TOTAL_BITS = 2**36 - 1
# In bytes: the longest header of a frame, and more than a frame of common encoders.
_HEADER, _LONGEST_FRAME = 16, 2**18


def _flac_with_length(content: bytes) -> bytes:
    """A FLAC whose header has 0 samples, with the true number, from its last frame."""
    total = int.from_bytes(content[_TOTAL], "big")
    if total & _TOTAL_BITS:
        return content
    tail = max(0, len(content) - _LONGEST_FRAME)
    for match in reversed([*_FRAME.finditer(content, tail)]):
        start = match.start()
        samples = _end_of_frame(
            content[start : start + _HEADER], int.from_bytes(content[_FRAME_SIZE], "big")
        )
        if samples is not None and _remainder(content[start:], 0x8005, 16) == 0:
            return _replaced(content, _TOTAL, (total | samples).to_bytes(5, "big"))
    return content


def _end_of_frame(frame: bytes, frame_size: int) -> int | None:
    """Number of samples up to the end of the frame with this header; None if it is not a header."""
    if len(frame) < 6:
        return None
    code = frame[2] >> 4
    rate = frame[2] & 15
    # Numbers are coded as in UTF-8: the leading ones of the first byte give the number of bytes.
    length = 8 - (frame[4] ^ 0xFF).bit_length()
    number = frame[4] & (0x7F >> length)
    for byte in frame[5 : 4 + max(1, length)]:
        number = number << 6 | byte & 0x3F
    end = 4 + max(1, length)
    sizes = {
        1: 192,
        **{n: 576 << (n - 2) for n in range(2, 6)},
        **{n: 256 << (n - 8) for n in range(8, 16)},
    }
    size = sizes.get(code)
    if code in (6, 7):
        size = 1 + int.from_bytes(frame[end : end + code - 5], "big")
        end += code - 5
    end += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if size is None or _remainder(frame[: end + 1], 0x07, 8):
        return None
    # Frames of equal size carry their index, others the index of their first sample.
    return size + (number if frame[1] & 1 else number * frame_size)


def _remainder(content: bytes, polynomial: int, bits: int) -> int:
    """Remainder of the cyclic redundancy check; 0 if the bytes end in their own checksum."""
    value = 0
    top = 1 << (bits - 1)
    mask = (1 << bits) - 1
    for byte in content:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ (polynomial if value & top else 0)) & mask
    return value
