"""Types of the tokens of an image or a sound with its text."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from analysis_lib.models.loaded import ENDS, TOKEN_TYPES, LoadedModel
from analysis_lib.models.pairs import PAIR_TYPES, PairReader


def pair_types(
    loaded: LoadedModel, ids: Int[Tensor, "1 token"], text: str
) -> Int[Tensor, "1 token"]:
    """The type of every token of a pair, as an index into ``PAIR_TYPES``.

    Tokens of the image or sound are those whose vectors its features replace. What the processor
    puts between and around them, and special tokens beside them, are ``image_special``.

    Args:
        ids: the ids of the tokens, as the processor gives them.
        text: the text of the pair.
    """
    reader = loaded.processor
    types = loaded.token_types(ids, is_special(reader, ids))
    index = [PAIR_TYPES.index(name) for name in TOKEN_TYPES]
    types = torch.tensor(index, device=ids.device)[types]
    medium_ids = torch.tensor(reader.medium_ids, device=ids.device)
    is_medium = torch.isin(ids, medium_ids)
    is_added = _is_added(reader, ids, text) & ~is_medium
    types[is_added] = PAIR_TYPES.index("image_special")
    name = "image" if reader.medium == "image" else "sound"
    types[is_medium] = PAIR_TYPES.index(name)
    return types


def is_special(
    reader: PairReader, ids: Int[Tensor, "utterance token"]
) -> Bool[Tensor, "utterance token"]:
    """True at special tokens of the tokenizer."""
    special = torch.tensor(reader.tokenizer.all_special_ids, device=ids.device)
    return torch.isin(ids, special)


def _is_added(
    reader: PairReader, ids: Int[Tensor, "1 token"], text: str
) -> Bool[Tensor, "1 token"]:
    """True at tokens that the processor puts in place of a placeholder, and special ones beside."""
    tokenizer = reader.tokenizer
    plain = tokenizer(reader.prompt(text), add_special_tokens=False)["input_ids"]
    own = ids[0].tolist()
    ends = set()
    for names in ENDS.values():
        ends |= {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    special = {*tokenizer.all_special_ids} - ends
    start = _count_common(own, plain, ends)
    after = _count_common(own[::-1], plain[::-1], ends)
    stop = max(start, len(own) - after)
    while start > 0 and own[start - 1] in special:
        start -= 1
    while stop < len(own) and own[stop] in special:
        stop += 1
    is_added = [start <= index < stop and token not in ends for index, token in enumerate(own)]
    return torch.tensor([is_added], device=ids.device)


def _count_common(own: Sequence[int], plain: Sequence[int], ends: set[int | None]) -> int:
    """Number of first tokens that a text has without its image, with the tokens around a text."""
    left = iter(plain)
    expected = next(left, None)
    count = 0
    for token in own:
        if token == expected:
            expected = next(left, None)
        elif token not in ends:
            break
        count += 1
    return count
