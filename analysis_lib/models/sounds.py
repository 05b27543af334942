"""What a processor makes of a sound that is shorter or longer than the model reads at once, and
what vectors stand for.

Some processors, such as those of Whisper and AST, pad every sound to one length and cut it there,
without a warning. Giving them sounds shows what they do; names of models play no part.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import device_of
from analysis_lib.models.loaded import LoadedModel
from analysis_lib.models.probe import evaluated

# In seconds: two sounds that every processor reads, and of which the second has so many frames more
# that the time between two frames follows.
SHORT, LONGER = 0.1, 0.2
# What is added to frames to see which vectors change, in any precision.
CHANGE = 16.0
# The steps of models that are in use.
_KNOWN: "WeakKeyDictionary[LoadedModel, Steps | None]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Window:
    """The one length to which a processor brings all sounds.

    Attributes:
        frames: how many numbers, or steps of a spectrogram, it makes of a sound.
        axis: along which they lie.
        hop: how many samples lie between the beginnings of two of them.
        least: how many samples of a sound, from its beginning on, make a frame; with fewer, padding
            stands there.
    """

    frames: int
    axis: int
    hop: int
    least: int = 1

    @property
    def samples(self) -> int:
        """How many samples of a sound fill the window."""
        return self.frames * self.hop


@lru_cache(maxsize=16)
def window_of(processor: Callable) -> Window | None:
    """The window of a processor; None where longer sounds give it more to read, or it repeats short
    ones.

    It pads with frames that are all alike, which those of noise are not.
    """
    short = int(SHORT * processor.sampling_rate)
    longer = int(LONGER * processor.sampling_rate)
    noise = np.random.default_rng(0).normal(scale=0.1, size=longer).astype(np.float32)
    try:
        first = _first(processor, noise[:short])
        second = _first(processor, noise)
    except Exception:  # Whatever it meets; it says so when it is given a sound of the corpus.
        return None
    if first.shape != second.shape:
        return None
    axis = max(range(1, first.dim()), key=lambda axis: _padding(first, axis))
    count = _frames(first, axis)
    more = _frames(second, axis) - count
    if more < 1:
        return None
    hop = getattr(processor, "hop_length", 0)
    if not hop or round((longer - short) / hop) != more:
        hop = round((longer - short) / more)
    if count * hop >= short:
        return Window(first.shape[axis], axis, hop)
    # The processor makes no frame of a rest of a sound that does not fill one.
    too_few = (count - 1) * hop
    enough = short
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _frames(_first(processor, noise[:middle]), axis) == count:
            enough = middle
        else:
            too_few = middle
    return Window(first.shape[axis], axis, hop, enough - (count - 1) * hop)


def _first(processor: Callable, samples: np.ndarray) -> Tensor:
    """The numbers, or the spectrogram, that a processor makes of a sound."""
    made = processor(samples, sampling_rate=processor.sampling_rate, return_tensors="pt")
    return torch.as_tensor(next(iter(made.values())))


def _frames(values: Tensor, axis: int) -> int:
    """How many slices there are before padding."""
    return values.shape[axis] - _padding(values, axis)


def _padding(values: Tensor, axis: int) -> int:
    """How many slices at the end are all the same."""
    slices = values.transpose(0, axis).flatten(1)
    differs = (slices != slices[-1]).any(1).nonzero().flatten()
    if not len(differs):
        return len(slices)
    return len(slices) - 1 - int(differs.max())


@dataclass(frozen=True)
class Steps:
    """With which sample of a window each vector begins.

    Attributes:
        samples: from one step of time to the next.
        rows: how many vectors begin together, one in each band of frequencies.
        by_row: whether the vectors of a band follow one another, and not those that begin together.
        leading: how many vectors before them stand for no stretch of the sound.
        least: how many samples of the sound, from there on, a vector needs so as not to stand for
            padding alone.
    """

    samples: int
    rows: int = 1
    by_row: bool = False
    leading: int = 0
    least: int = 1

    def padding(self, count: int, lengths: Int[Tensor, " sound"]) -> Bool[Tensor, "sound vector"]:
        """Which of ``count`` vectors stand for padding alone, where sounds have so many samples."""
        indices = torch.arange(count - self.leading, device=lengths.device)
        per_row = max(1, len(indices) // self.rows)
        steps = indices % per_row if self.by_row else indices // self.rows
        ends = steps * self.samples + self.least
        return functional.pad(ends > lengths.unsqueeze(1), (self.leading, 0))


def steps_of(loaded: LoadedModel) -> Steps | None:
    """The steps of the vectors of a model whose processor has a window; None where it has none.

    More and more of the first frames are changed, to see which vectors change that the first block
    reads.

    Raises:
        AnalysisError: the vectors do not follow one another in time.
    """
    if loaded not in _KNOWN:
        window = window_of(loaded.processor)
        _KNOWN[loaded] = None if window is None else _steps(loaded, window)
    return _KNOWN[loaded]


def _steps(loaded: LoadedModel, window: Window) -> Steps:
    rate = loaded.processor.sampling_rate
    silence = np.zeros(int(LONGER * rate), np.float32)
    made = loaded.processor(silence, sampling_rate=rate, return_tensors="pt")
    inputs = {
        name: torch.as_tensor(values).to(device_of(loaded.model)) for name, values in made.items()
    }
    name, frames = next(iter(inputs.items()))
    frames = frames.to(loaded.model.dtype)
    block = next(iter(loaded.stacks.values()))[0]

    def read(changed: int) -> Tensor:
        values = frames.clone()
        values.narrow(window.axis, 0, changed).add_(CHANGE)
        return _read_by(loaded.model, block, inputs | {name: values})

    def changing(count: int) -> list[int]:
        return (read(count) != plain).any(-1).nonzero().flatten().tolist()

    # Another thread may be at its own pass.
    with loaded.lock, evaluated(loaded.model):
        plain = read(0)
        first = changing(1)
        second = _more(changing, 1, len(first), window.frames)
        if second is None:
            # The whole window is one step.
            return Steps(
                window.samples,
                max(1, len(first)),
                leading=min(first, default=0),
                least=window.least,
            )
        after_second = changing(second)
        third = _more(changing, second, len(after_second), window.frames)
        after_third = after_second if third is None else changing(third)
    in_second = sorted({*after_second} - {*first})
    in_third = sorted({*after_third} - {*after_second})
    if third is None:
        frames_per_step = second - 1
    elif _follow_evenly(in_second, in_third):
        frames_per_step = third - second
    else:
        reader = type(loaded.processor).__name__
        seconds = window.samples / rate
        raise AnalysisError(
            f"{loaded.name}: its {reader} pads every sound to {seconds:g} seconds, and which "
            "vectors stand for padding cannot be told: give another model"
        )
    by_row = len(in_second) > 1 and in_second[1] - in_second[0] > 1
    return Steps(frames_per_step * window.hop, len(in_second), by_row, min(first), window.least)


def _follow_evenly(vectors: Sequence[int], later: Sequence[int]) -> bool:
    """Whether the vectors of a step follow those of the step before, side by side or as a block."""
    distances = {after - before for before, after in zip(vectors, later, strict=False)}
    return len(vectors) == len(later) and distances in ({1}, {len(vectors)})


def _more(changing: Callable[[int], list[int]], after: int, known: int, most: int) -> int | None:
    """The least number of changed frames, above ``after``, that changes more than ``known``
    vectors.
    """
    low = after
    high = min(2 * after, most)
    while len(changing(high)) <= known:
        if high == most:
            return None
        low = high
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if len(changing(middle)) > known:
            high = middle
        else:
            low = middle
    return high


class _Reached(Exception):
    """The block has been reached, and no more need be computed."""


def _read_by(model: nn.Module, block: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The vectors, vector x width, that a block reads first."""
    read = []

    def keep(_block: nn.Module, args: tuple, kwargs: dict) -> None:
        values = args[0] if args else next(iter(kwargs.values()))
        read.append(values.detach().clone())
        raise _Reached

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.inference_mode(), suppress(_Reached):
            model(**inputs)
    finally:
        handle.remove()
    return read[0][0].flatten(0, -2)
