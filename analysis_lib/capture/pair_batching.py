"""Batches of images or sounds with texts: each pair alone, as the model's processor prepares it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.tokens import Tokens
from analysis_lib.corpora import Captioned
from analysis_lib.errors import AnalysisError
from analysis_lib.models import TOKEN_TYPES, LoadedModel
from analysis_lib.models.loaded import ENDS
from analysis_lib.models.pairs import PAIR_TYPES, PairReader, arguments


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
    # Until tables have types of their own for pairs.
    types = _of_texts(_types(loaded, reader, ids, item.text))
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    common = {"groups": (group,), "special_tokens": settings.special_tokens}
    tokens = Tokens(mask, types, ids=ids, **common)
    shifted = None
    if (read := inputs.get("decoder_input_ids")) is not None:
        types = loaded.token_types(read, _is_special(reader, read))
        shifted = Tokens(torch.ones_like(read, dtype=torch.bool), types, ids=read, **common)
    return Batch(inputs, (group,), settings.special_tokens, tokens, shifted)


def _is_special(reader: PairReader, ids: Tensor) -> Tensor:
    return torch.isin(ids, torch.tensor(reader.tokenizer.all_special_ids, device=ids.device))


def _of_texts(types: Tensor) -> Tensor:
    names = [name if name in TOKEN_TYPES else "other" for name in PAIR_TYPES]
    return torch.tensor([TOKEN_TYPES.index(name) for name in names], device=types.device)[types]


def _types(loaded: LoadedModel, reader: PairReader, ids: Tensor, text: str) -> Tensor:
    """The type of every token, as an index into ``PAIR_TYPES``.

    Tokens of the image or sound are those that its features replace. What the processor puts
    between and around them, and special tokens beside them, are ``image_special``.
    """
    types = loaded.token_types(ids, _is_special(reader, ids))
    index = [PAIR_TYPES.index(name) for name in TOKEN_TYPES]
    types = torch.tensor(index, device=ids.device)[types]
    is_medium = torch.isin(ids, torch.tensor(reader.medium_ids, device=ids.device))
    is_added = _added(reader, ids, text) & ~is_medium
    name = "image" if reader.medium == "image" else "sound"
    types[is_added] = PAIR_TYPES.index("image_special")
    types[is_medium] = PAIR_TYPES.index(name)
    return types


def _added(reader: PairReader, ids: Tensor, text: str) -> Tensor:
    """True at the tokens that the processor puts in place of a placeholder, and at special tokens
    beside them.
    """
    plain = reader.tokenizer(reader.prompt(text), add_special_tokens=False)["input_ids"]
    own = ids[0].tolist()
    ends = {
        getattr(reader.tokenizer, f"{name}_token_id", None)
        for names in ENDS.values()
        for name in names
    }
    special = {*reader.tokenizer.all_special_ids} - ends
    before = _common(own, plain, ends)
    after = _common(own[::-1], plain[::-1], ends)
    stop = max(before, len(own) - after)
    while before > 0 and own[before - 1] in special:
        before -= 1
    while stop < len(own) and own[stop] in special:
        stop += 1
    added = torch.zeros_like(ids, dtype=torch.bool)
    added[:, before:stop] = True
    known = torch.tensor([index for index in ends if index is not None], device=ids.device)
    added &= ~torch.isin(ids, known)
    return added


def _common(own: Sequence[int], plain: Sequence[int], ends: set[int]) -> int:
    """Number of first tokens that a text has without its image, and the tokens around a text."""
    index = 0
    plain = iter(plain)
    expected = next(plain, None)
    for token in own:
        if token == expected:
            expected = next(plain, None)
        elif token not in ends:
            break
        index += 1
    return index
