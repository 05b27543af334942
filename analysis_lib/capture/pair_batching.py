"""Batches of images or sounds with texts: each pair alone, as the model's processor prepares it."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from analysis_lib.capture.grids import grid_of_tokens
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.tokens import Tokens
from analysis_lib.corpora import Captioned
from analysis_lib.corpora.token_types import PAIR_TYPES, TOKEN_TYPES
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.pairs import PairReader, arguments
from analysis_lib.models.parts import reads_padding
from analysis_lib.models.reading import first_line


def pair_batches(
    loaded: LoadedModel,
    items: Sequence[Captioned],
    groups: Sequence[int],
    settings: Settings,
    reading: Reading,
) -> Iterator[Batch]:
    """The pairs, each a batch of its own: images of several sizes have other numbers of tokens.

    Raises:
        AnalysisError: a pair cannot be read, or is too long for the model and cannot be cut.
    """
    reads_several = False
    for item, group in zip(items, groups, strict=True):
        if len(item.media) > 1 and not reads_several:
            _refuse_several(loaded, item)
            reads_several = True
        yield _batch(loaded, item, group, settings, reading)
        reading.utterances += 1


def _refuse_several(loaded: LoadedModel, item: Captioned) -> None:
    """Raise an AnalysisError unless a model has tokens of each image of a text with several."""
    inputs = _arguments(loaded, item)
    alone = _arguments(loaded, Captioned(item.media[:1], item.text))
    reason = "it has no more tokens for them than for one"
    of_all, of_one = (_of_medium(loaded.processor, each["input_ids"]) for each in (inputs, alone))
    if of_all.sum() > of_one.sum():
        try:
            with torch.inference_mode():
                loaded.model(**inputs)
            return
        except Exception as error:  # Models fail in many ways.
            reason = first_line(error)
    raise AnalysisError(
        f"{loaded.name} cannot read several images with a text, as in {item} ({reason}): "
        "give one with each text"
    )


def _of_medium(reader: PairReader, ids: Tensor) -> Tensor:
    """True at the tokens that the features of images or sounds replace."""
    return torch.isin(ids, torch.tensor(reader.medium_ids, device=ids.device))


def _arguments(loaded: LoadedModel, item: Captioned) -> dict[str, Tensor | bool]:
    """The arguments of the model for the images, or for the sound, and their text."""
    reader = loaded.processor
    if reader.medium == "image":
        media = [image.convert("RGB") for image in item.load()]
    else:
        media = [sound.at_rate(reader.sampling_rate) for sound in item.load()]
    try:
        return arguments(reader, loaded.model, media, item.text)
    except AnalysisError as error:
        raise AnalysisError(f"{loaded.name}: {item}: {error}") from error


def _batch(
    loaded: LoadedModel, item: Captioned, group: int, settings: Settings, reading: Reading
) -> Batch:
    reader = loaded.processor
    inputs = _arguments(loaded, item)
    ids = inputs["input_ids"]
    types = _types(loaded, reader, ids, item)
    count = ids.shape[1]
    if count > loaded.max_length:
        if remedy := _uncuttable(loaded, inputs, types, settings):
            raise AnalysisError(
                f"{loaded.name} reads {loaded.max_length} tokens at once, and {item} has "
                f"{count} tokens: {remedy}"
            )
        kept = _beginning(loaded, ids)
        inputs = {name: _at(kept, values, count) for name, values in inputs.items()}
        ids = inputs["input_ids"]
        types = types[:, kept]
        reading.cut += 1
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    silent = _padding(loaded, inputs, item.text)
    if silent is not None:
        types[silent] = PAIR_TYPES.index("other")
    common = {
        "groups": (group,),
        "special_tokens": settings.special_tokens,
        "type_names": PAIR_TYPES,
    }
    is_image = types[0] == PAIR_TYPES.index("image")
    # Several pictures have no common grid.
    grid = grid_of_tokens(inputs, is_image) if len(item.media) == 1 else None
    tokens = Tokens(mask, types, silent=silent, ids=ids, grid=grid, **common)
    shifted = None
    if (read := inputs.get("decoder_input_ids")) is not None:
        types = _of_pairs(loaded.token_types(read, _is_special(reader, read)))
        shifted = Tokens(torch.ones_like(read, dtype=torch.bool), types, ids=read, **common)
    return Batch(inputs, tokens=tokens, shifted=shifted, **common)


def _end(loaded: LoadedModel, ids: Tensor) -> int:
    """Number of special tokens that end a text."""
    is_end = torch.isin(ids[0], torch.tensor(loaded.end_ids, device=ids.device))
    return int(is_end.flip(0).cumprod(0).sum())


def _beginning(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Indices of as many first tokens as the model reads, with the special tokens at the end."""
    index = torch.arange(ids.shape[1], device=ids.device)
    end = _end(loaded, ids)
    return torch.cat([index[: loaded.max_length - end], index[len(index) - end :]])


def _uncuttable(
    loaded: LoadedModel, inputs: Mapping[str, object], types: Tensor, settings: Settings
) -> str:
    """What to do about a pair that is too long, if its text cannot be cut."""
    if "decoder_input_ids" in inputs:
        return "shorten its text"
    if settings.long_texts == "window":
        return "shorten its text, or leave long_texts out, so that it is cut"
    ids = inputs["input_ids"]
    lost = torch.ones_like(types)
    lost[:, _beginning(loaded, ids)] = 0
    of_medium = [PAIR_TYPES.index(name) for name in ("image", "image_special", "sound")]
    is_lost = lost.bool() & torch.isin(types, torch.tensor(of_medium, device=types.device))
    if is_lost.any():
        smaller = "smaller image" if loaded.processor.medium == "image" else "shorter sound"
        return f"give a {smaller}, or a model that reads more"
    return ""


def _at(kept: Tensor, values: object, count: int) -> object:
    """The values at some of ``count`` tokens; others than those of tokens are left as they are."""
    if isinstance(values, Tensor) and values.shape == (1, count) and not values.is_floating_point():
        return values[:, kept]
    return values


def _padding(loaded: LoadedModel, inputs: Mapping[str, object], text: str) -> Tensor | None:
    """True at padding that the model attends to, as SigLIP does; None for other models."""
    config = loaded.model.config.get_text_config()
    if "attention_mask" in inputs or not reads_padding(config):
        return None
    reader = loaded.processor
    ids = inputs["input_ids"]
    length = len(reader.tokenizer(reader.prompt(text))["input_ids"])
    index = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    if reader.tokenizer.padding_side == "left":
        index = index.flip(1)
    return index >= length


def _is_special(reader: PairReader, ids: Tensor) -> Tensor:
    return torch.isin(ids, torch.tensor(reader.tokenizer.all_special_ids, device=ids.device))


def _of_pairs(types: Tensor) -> Tensor:
    """Indices into ``PAIR_TYPES`` in place of those into ``TOKEN_TYPES``."""
    indices = [PAIR_TYPES.index(name) for name in TOKEN_TYPES]
    return torch.tensor(indices, device=types.device)[types]


def _types(loaded: LoadedModel, reader: PairReader, ids: Tensor, item: Captioned) -> Tensor:
    """The type of every token, as an index into ``PAIR_TYPES``.

    Tokens of the image or sound are those that its features replace. What the processor puts
    between and around them, and special tokens beside them, are ``image_special``.
    """
    types = _of_pairs(loaded.token_types(ids, _is_special(reader, ids)))
    is_medium = _of_medium(reader, ids)
    is_added = _added(reader, ids, item, loaded.end_ids) & ~is_medium
    name = "image" if reader.medium == "image" else "sound"
    types[is_added] = PAIR_TYPES.index("image_special")
    types[is_medium] = PAIR_TYPES.index(name)
    return types


def _added(reader: PairReader, ids: Tensor, item: Captioned, ends: Sequence[int]) -> Tensor:
    """True at the tokens that the processor puts in place of placeholders, and at special tokens
    beside them.

    Args:
        ends: the special tokens around a text, which are none of them.
    """
    plain = reader.plain_ids(item.text, len(item.media))
    own = ids[0].tolist()
    special = {*reader.tokenizer.all_special_ids}.difference(ends)
    before = _common(own, plain, ends)
    after = _common(own[::-1], plain[::-1], ends)
    stop = max(before, len(own) - after)
    while before > 0 and own[before - 1] in special:
        before -= 1
    while stop < len(own) and own[stop] in special:
        stop += 1
    added = torch.zeros_like(ids, dtype=torch.bool)
    added[:, before:stop] = True
    added &= ~torch.isin(ids, torch.tensor(ends, device=ids.device))
    return added


def _common(own: Sequence[int], plain: Sequence[int], ends: Sequence[int]) -> int:
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
