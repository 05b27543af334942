"""Windows of sound processors, and the stretch of sound behind each vector.

Some processors, such as those of Whisper and AST, pad every sound to one length and cut it there,
without a warning. Test sounds reveal this; names of models play no part.
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

# Two lengths of sound, in seconds, that every processor reads; the second gives enough further
# frames to find the time between two frames.
SHORT, LONGER = 0.1, 0.2
# Change of frames that shows in any precision which vectors depend on them.
CHANGE = 16.0
# Cached steps of models in use.
_KNOWN: "WeakKeyDictionary[LoadedModel, Steps | None]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Window:
    """The fixed length to which a processor pads and cuts all sounds.

    Attributes:
        frames: the number of samples, or of steps of a spectrogram, in its output.
        axis: their axis.
        hop: the number of samples between the starts of two frames.
        least: the number of samples that a frame needs, from its start; with fewer there is
            padding.
    """

    frames: int
    axis: int
    hop: int
    least: int = 1

    @property
    def samples(self) -> int:
        """Number of samples of a sound that fill the window."""
        return self.frames * self.hop


@lru_cache(maxsize=16)
def window_of(processor: Callable) -> Window | None:
    """The window of a processor; None if its output grows with a sound, or repeats short ones.

    It is recognised by its padding: frames that are all alike, unlike those of noise.
    """
    short = int(SHORT * processor.sampling_rate)
    longer = int(LONGER * processor.sampling_rate)
    noise = np.random.default_rng(0).normal(scale=0.1, size=longer).astype(np.float32)
    try:
        first = _first(processor, noise[:short])
        second = _first(processor, noise)
    except Exception:  # The processor reports its error again with a sound of the corpus.
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
    # The processor makes no frame of an incomplete rest of a sound.
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
    """The samples, or the spectrogram, that a processor makes of a sound."""
    made = processor(samples, sampling_rate=processor.sampling_rate, return_tensors="pt")
    return torch.as_tensor(next(iter(made.values())))


def _frames(values: Tensor, axis: int) -> int:
    """Number of slices before padding."""
    return values.shape[axis] - _padding(values, axis)


def _padding(values: Tensor, axis: int) -> int:
    """Number of slices at the end that are all the same."""
    slices = values.transpose(0, axis).flatten(1)
    differs = (slices != slices[-1]).any(1).nonzero().flatten()
    if not len(differs):
        return len(slices)
    return len(slices) - 1 - int(differs.max())


@dataclass(frozen=True)
class Steps:
    """First sample of a window behind each vector.

    Attributes:
        samples: the number of samples from one step of time to the next.
        rows: the number of vectors per step, one for each band of frequencies.
        by_row: whether vectors are ordered by band, then by step, and not the other way round.
        leading: the number of vectors before them that stand for no stretch of the sound.
        least: the number of samples that a vector needs, from its first sample on, to stand for
            more than padding.
    """

    samples: int
    rows: int = 1
    by_row: bool = False
    leading: int = 0
    least: int = 1

    def padding(self, count: int, lengths: Int[Tensor, " sound"]) -> Bool[Tensor, "sound vector"]:
        """True at those of ``count`` vectors that stand for padding alone, by sound.

        Args:
            lengths: the lengths of the sounds, in samples.
        """
        indices = torch.arange(count - self.leading, device=lengths.device)
        per_row = max(1, len(indices) // self.rows)
        steps = indices % per_row if self.by_row else indices // self.rows
        ends = steps * self.samples + self.least
        return functional.pad(ends > lengths.unsqueeze(1), (self.leading, 0))


def steps_of(loaded: LoadedModel) -> Steps | None:
    """The steps of the vectors of a model whose processor has a window; None without a window.

    A growing number of the first frames is changed, to see which input vectors of the first block
    change.

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

    # Another thread may be in a pass of its own.
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
    """Least number of changed frames, above ``after``, that changes more than ``known`` vectors."""
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
    """Raised when the block has been reached, to end the pass."""


def _read_by(model: nn.Module, block: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The first input vectors of a block, vector x width."""
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
