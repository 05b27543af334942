"""Batches of images or sounds with texts: each pair alone, as the model's processor prepares it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from analysis_lib.capture.grids import cells_of, grid_of_tokens
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.tokens import Tokens
from analysis_lib.corpora import Captioned
from analysis_lib.errors import AnalysisError
from analysis_lib.models import TOKEN_TYPES, LoadedModel
from analysis_lib.models.pair_tokens import is_special, pair_types
from analysis_lib.models.pairs import PAIR_TYPES, arguments


def pair_batches(
    loaded: LoadedModel,
    items: Sequence[Captioned],
    groups: Sequence[int],
    settings: Settings,
    reading: Reading,
) -> Iterator[Batch]:
    """The pairs, each a batch of its own: images of several sizes have other numbers of tokens.

    Raises:
        AnalysisError: a pair cannot be read, or is too long for the model.
    """
    for item, group in zip(items, groups, strict=True):
        yield _batch(loaded, item, group, settings)
        reading.utterances += 1


def _batch(loaded: LoadedModel, item: Captioned, group: int, settings: Settings) -> Batch:
    reader = loaded.processor
    content = item.load()
    if reader.medium == "image":
        content = content.convert("RGB")
    else:
        content = content.at_rate(reader.sampling_rate)
    try:
        inputs = arguments(reader, loaded.model, content, item.text)
    except AnalysisError as error:
        raise AnalysisError(f"{loaded.name}: {item}: {error}") from error
    ids = inputs["input_ids"]
    if ids.shape[1] > loaded.max_length:
        raise AnalysisError(
            f"{loaded.name} reads {loaded.max_length} tokens at once, and {item} has "
            f"{ids.shape[1]} tokens: shorten it"
        )
    types = pair_types(loaded, ids, item.text)
    is_image = types == PAIR_TYPES.index("image")
    grid = grid_of_tokens(inputs, is_image[0])
    cells = None
    if grid is not None:
        cells = cells_of(is_image)
    # Until tables have types of their own for pairs.
    types = _of_texts(types)
    every = torch.ones_like(ids)
    mask = inputs.get("attention_mask", every).bool()
    groups = (group,)
    common = {"groups": groups, "special_tokens": settings.special_tokens}
    of_image = {"cells": cells, "grid": grid or (0, 0)}
    tokens = Tokens(mask, types, ids=ids, **of_image, **common)
    shifted = None
    read = inputs.get("decoder_input_ids")
    if read is not None:
        types = loaded.token_types(read, is_special(reader, read))
        mask = torch.ones_like(read, dtype=torch.bool)
        shifted = Tokens(mask, types, ids=read, **common)
    return Batch(inputs, groups, settings.special_tokens, tokens, shifted)


def _of_texts(types: Tensor) -> Tensor:
    """Types of pairs as types of texts."""
    index = []
    for name in PAIR_TYPES:
        known = name if name in TOKEN_TYPES else "other"
        index.append(TOKEN_TYPES.index(known))
    return torch.tensor(index, device=types.device)[types]
