"""Sounds -> batches: resampled, cut or split into windows, and sorted by length."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy import signal
from torch import Tensor

from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.errors import AnalysisError

# In seconds, unless the processor has a limit of its own: what Whisper reads at once.
LONGEST_SOUND = 30.0
# How many sounds are prepared together, so that those of one length share a batch.
SOUNDS_AT_ONCE = 64


@dataclass(eq=False)
class _Piece:
    """A stretch of sound, prepared for the model.

    Attributes:
        features: samples or a spectrogram, as the model reads them.
        samples: how many samples it has, without padding.
        group: its jackknife group.
    """

    features: Tensor
    samples: int
    group: int


def sound_batches(loaded, sounds, groups, settings: Settings, reading: Reading) -> Iterator[Batch]:
    """Batches of sounds of one length; see :func:`batching.batches`."""
    name = loaded.processor.model_input_names[0]
    for start in range(0, len(sounds), SOUNDS_AT_ONCE):
        end = start + SOUNDS_AT_ONCE
        pieces = [
            piece
            for sound, group in zip(sounds[start:end], groups[start:end], strict=True)
            for piece in _pieces(loaded, sound, group, settings, reading)
        ]
        pieces.sort(key=lambda piece: piece.features.shape[-1])
        for _, same in itertools.groupby(pieces, key=lambda piece: piece.features.shape[-1]):
            for chunk in _chunks(list(same), settings.tokens_per_batch, loaded.processor.sampling_rate):
                features, owners = [piece.features for piece in chunk], [piece.group for piece in chunk]
                batch = Batch.stacked(loaded.model, name, features, owners, settings)
                batch.lengths = torch.tensor([piece.samples for piece in chunk], device=loaded.device)
                yield batch


def longest_sound(loaded) -> float:
    """How many seconds of sound the model reads at once."""
    return float(getattr(loaded.processor, "chunk_length", LONGEST_SOUND))


def _chunks(pieces: list[_Piece], tokens_per_batch: int, rate: int) -> Iterator[list[_Piece]]:
    # Speech models make one vector per 20 ms; Whisper pads every sound to its window.
    tokens = max(pieces[0].samples, pieces[0].features.shape[-1]) * 50 // rate + 1
    size = max(1, tokens_per_batch // tokens)
    return (pieces[i : i + size] for i in range(0, len(pieces), size))


def _pieces(loaded, sound, group: int, settings: Settings, reading: Reading) -> Iterator[_Piece]:
    recorded = sound.load()
    rate = loaded.processor.sampling_rate
    samples = _resampled(recorded.samples, recorded.rate, rate)
    shortest = _shortest(loaded)
    if len(samples) < shortest:
        raise AnalysisError(
            f"{sound} lasts {1000 * len(samples) / rate:.0f} ms: this model reads {1000 * shortest / rate:.0f} ms "
            f"or more; leave it out"
        )
    for part in reading.split(len(samples), int(rate * longest_sound(loaded)), settings.long_texts == "window"):
        piece = samples[part]
        # What remains of a sound after its last whole window may be too short to make a vector.
        if len(piece) >= shortest:
            features = loaded.processor(piece, sampling_rate=rate, return_tensors="pt")
            yield _Piece(features[loaded.processor.model_input_names[0]], len(piece), group)
            reading.utterances += 1


def _shortest(loaded) -> int:
    """How many samples the model needs to make one vector."""
    config, length = loaded.model.config, 1
    if not hasattr(config, "conv_kernel"):
        return loaded.processor.hop_length
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        length = (length - 1) * stride + kernel
    return length


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    return signal.resample_poly(samples, wanted // common, rate // common).astype(np.float32)
