"""Batches of the tiny models, and forward passes that keep what they capture."""

import numpy as np
import tiny
import torch

from analysis_lib import LoadedModel
from analysis_lib.capture import (
    SCORES,
    SPACES,
    WEIGHTS,
    Activations,
    Batch,
    Reading,
    Settings,
    batches,
    run,
)
from analysis_lib.capture.batching import make_batches
from analysis_lib.corpora import ArrayImage, Sound
from analysis_lib.models.tokenization import encoded

EVERYTHING = frozenset({*SPACES, WEIGHTS, SCORES})
# Utterances of one batch: two lengths, so that there is padding; the longer with many rows or few.
SHORT = tiny.TEXTS[:3]
LONG = (" ".join(tiny.TEXTS * 3), tiny.TEXTS[0])


def first_batch(loaded: LoadedModel, items: tuple, settings: Settings | None = None) -> Batch:
    if loaded.kind == "image":
        items = [ArrayImage(np.asarray(image)) for image in items]
    if loaded.kind == "audio":
        items = [Sound(samples, 16000) for samples in items]
    return next(iter(batches(loaded, items, range(len(items)), settings or Settings(), Reading())))


def batch_of(loaded: LoadedModel, texts: tuple[str, ...], special_tokens: bool = True) -> Batch:
    whole = encoded(loaded.name, loaded.tokenizer, texts, loaded.max_length)
    parts = [text.beginning(loaded.max_length) for text in whole]
    (batch,) = make_batches(
        loaded, parts, range(len(parts)), special_tokens, 10**6, most_padding=10**6
    )
    return batch


def captured(
    loaded: LoadedModel, batch: Batch, needs: frozenset[str] = EVERYTHING
) -> list[Activations]:
    layers: list[Activations] = []
    run(loaded, batch, needs, layers.append)
    return layers


def attentions(loaded: LoadedModel) -> list[torch.nn.Module]:
    """The self-attention module of each block."""
    ((stack, blocks),) = loaded.stacks.items()
    return [block.get_submodule(stack.attention.module) for block in blocks]
