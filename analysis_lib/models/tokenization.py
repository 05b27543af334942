"""Texts and pairs of texts as a model reads them: tokens, with special tokens around them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Protocol, runtime_checkable

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor

from analysis_lib.corpora import Pair
from analysis_lib.corpora.token_types import TOKEN_TYPES
from analysis_lib.errors import AnalysisError

# Number of letters that take about a minute to tokenise.
MANY_LETTERS = 5_000_000
# Letters of a text that are tokenised at first for each token to read, if the text is cut.
LETTERS_PER_TOKEN = 16


@runtime_checkable
class WordTokenizer(Protocol):
    """A tokenizer of whole words, each a list of character ids: it has no vocabulary."""

    def word_ids(self, word: str) -> list[int]:
        """The character ids of a word."""


Tokenizer = transformers.PreTrainedTokenizerBase | WordTokenizer


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text, of a pair of texts, or of a part of one.

    Attributes:
        columns: the model's arguments with a value per token, by name: ``input_ids``, and others of
            the tokenizer, such as ``token_type_ids``.
        special: for each token, whether the tokenizer has put it around or between the texts. A
            special token that is spelt out in a text is a token of that text.
        types: the type of each token, an index into ``type_names``; None where types are read off
            the tokens themselves.
        type_names: the types that tokens of the corpus can have.
    """

    columns: Mapping[str, Sequence]
    special: Sequence[bool]
    types: Sequence[int] | None = None
    type_names: tuple[str, ...] = TOKEN_TYPES

    @property
    def ids(self) -> Sequence:
        """The token ids, or the character ids of each word."""
        return self.columns["input_ids"]

    def __len__(self) -> int:
        return len(self.special)

    @property
    def body(self) -> range:
        """Indices between the special tokens that frame a text, with the separator of a pair."""
        before, after = (
            len([*takewhile(bool, marks)]) for marks in (self.special, reversed(self.special))
        )
        return range(before, max(before, len(self) - after))

    def take(self, indices: Sequence[int]) -> "Encoded":
        """The tokens at some indices."""
        columns = {}
        for name, values in self.columns.items():
            columns[name] = [values[index] for index in indices]
        special = [self.special[index] for index in indices]
        types = self.types
        if types is not None:
            types = [types[index] for index in indices]
        return replace(self, columns=columns, special=special, types=types)

    def windows(self, length: int) -> list["Encoded"]:
        """Windows of ``length`` tokens, each with its frame; a short text is one window."""
        if len(self) <= length:
            return [self]
        body = self.body
        frame = len(self) - len(self.body)
        before = range(body.start)
        after = range(body.stop, len(self))
        room = length - frame
        parts = [body[start : start + room] for start in range(0, len(body), room)]
        return [self.take([*before, *part, *after]) for part in parts]

    def beginning(self, length: int) -> "Encoded":
        """The first ``length`` tokens with their frame; in a pair, the longer text is cut first."""
        if len(self) <= length:
            return self
        runs: list[list[int]] = [[]]
        for index, special in enumerate(self.special):
            if special and runs[-1]:
                runs.append([])
            elif not special:
                runs[-1].append(index)
        runs = [run for run in runs if run]
        room = length - sum(self.special)
        sizes = [room]
        if len(runs) == 2:
            shorter = min(*map(len, runs), room // 2)
            sizes = [shorter, room - shorter]
            if len(runs[0]) > len(runs[1]):
                sizes.reverse()
        kept = {*chain(*(run[:size] for run, size in zip(runs, sizes, strict=True)))}
        return self.take(
            [index for index, special in enumerate(self.special) if special or index in kept]
        )


def encoded(
    name: str, tokenizer: Tokenizer, texts: Sequence[str | Pair], length: int, cut: bool = False
) -> list[Encoded]:
    """The tokens of texts, or of pairs of texts.

    Args:
        name: the name of the model, for errors.
        length: the number of tokens that the model reads at once.
        cut: whether only that many tokens of each text are needed, so that the end of a long text
            need not be tokenised: ``beginning(length)`` is then the same, but the result may be
            shorter.

    Raises:
        AnalysisError: the tokenizer cannot read a text, puts nothing between the texts of a pair,
            or leaves no room for a text.
    """
    pairs = isinstance(texts[0], Pair)
    sides = [[*side] for side in zip(*texts, strict=True)] if pairs else [[*texts]]
    if cut and pairs:
        begun = [_long_enough_pair(name, tokenizer, pair, length) for pair in texts]
        sides = [[*side] for side in zip(*begun, strict=True)]
    elif cut:
        sides = [[_long_enough(name, tokenizer, text, length) for text in sides[0]]]
    if (letters := max(map(len, chain.from_iterable(sides)))) > MANY_LETTERS:
        logging.getLogger(__name__).warning(
            "note: %s: a text of %d letters takes a while to tokenise", name, letters
        )
    with readable(name):
        columns = dict(tokenizer(*sides, return_special_tokens_mask=True))
        alone = sum(tokenizer(sides[0][0], return_special_tokens_mask=True)["special_tokens_mask"])
    special = [[*map(bool, marks)] for marks in columns.pop("special_tokens_mask")]
    # :func:`padded` makes the attention mask.
    columns.pop("attention_mask", None)
    if pairs and sum(special[0]) <= alone:
        raise AnalysisError(
            f"{name}: its tokenizer puts nothing between the texts of a pair: give a model whose "
            "tokenizer does"
        )
    most = max(map(sum, special))
    if most >= length:
        raise AnalysisError(
            f"{name} reads {length} tokens at once, and its tokenizer puts {most} around a text: "
            "give a larger max_length, or mend the length in its tokenizer_config.json"
        )
    every = []
    for index, marks in enumerate(special):
        every.append(Encoded({name: values[index] for name, values in columns.items()}, marks))
    return every


@contextmanager
def readable(name: str) -> Iterator[None]:
    """A context for a tokenizer: any failure, also in Rust, becomes an error of one line."""
    try:
        yield
    except Exception as error:
        raise AnalysisError(
            f"{name}: its tokenizer cannot read these texts ({error}): give text that it knows, or "
            "a tokenizer with an unknown token"
        ) from error


def _long_enough(name: str, tokenizer: Tokenizer, text: str, length: int) -> str:
    """A text, or a beginning of it that has the same first ``length`` tokens.

    The end of a text affects only its last few tokens: the beginning has twice as many tokens as
    are read, and no word is cut in two.
    """
    return _begun(name, tokenizer, text, 2 * length)


def _long_enough_pair(name: str, tokenizer: Tokenizer, pair: Pair, length: int) -> Pair:
    """A pair, or the beginnings of its texts that give the same first ``length`` tokens.

    If both texts are cut and there is room for an odd number of tokens, the longer text gets one
    more: then enough is tokenised to tell which text is longer.
    """
    least = 2 * length
    while True:
        parts = Pair(*(_begun(name, tokenizer, text, least) for text in pair))
        whole = [part for part, text in zip(parts, pair, strict=True) if len(part) == len(text)]
        if len(whole) == 2 or not _is_room_odd(name, tokenizer, pair, length):
            return parts
        tokens = max((_count(name, tokenizer, text) for text in whole), default=4 * least)
        if tokens + length <= least:
            return parts
        least = tokens + length


def _is_room_odd(name: str, tokenizer: Tokenizer, pair: Pair, length: int) -> bool:
    """Whether the texts have room for an odd number of tokens."""
    first, second = (text[:LETTERS_PER_TOKEN] for text in pair)
    with readable(name):
        special = tokenizer(first, second, return_special_tokens_mask=True)["special_tokens_mask"]
    return bool((length - sum(special)) % 2)


def _begun(name: str, tokenizer: Tokenizer, text: str, least: int) -> str:
    """A text, or a beginning of it that has more tokens than ``least``."""
    letters = LETTERS_PER_TOKEN * least // 2
    while letters < len(text):
        beginning = text[:letters]
        *whole_words, _ = beginning.rsplit(maxsplit=1) or [""]
        beginning = whole_words[0] if whole_words else beginning
        if _count(name, tokenizer, beginning) > least:
            return beginning
        letters *= 4
    return text


def _count(name: str, tokenizer: Tokenizer, text: str) -> int:
    """Number of tokens of a text."""
    with readable(name):
        return len(tokenizer(text)["input_ids"])


def shifted(
    ids: Int[Tensor, "utterance token *character"],
    mask: Bool[Tensor, "utterance token"],
    start: int | None,
) -> Int[Tensor, "utterance token *character"]:
    """What the decoder of an encoder-decoder reads: a start token, then the text, one token later.

    Args:
        ids: the tokens of texts, with padding at their end.
        mask: True at a token, False at padding.
        start: the start token; None for the last token of each text.
    """
    later = torch.roll(ids, 1, 1)
    later[:, 0] = ids[torch.arange(len(ids)), mask.sum(1) - 1] if start is None else start
    return later


def padded(texts: Sequence[Mapping[str, Sequence]], pad: int) -> dict[str, Tensor]:
    """The arguments of a model for texts that are padded to one length.

    Args:
        texts: for each text, the values of its tokens, by the name of the argument.
        pad: the token id after the end of a text; other values are 0 there.

    Returns:
        By name, one row for each text; ``attention_mask`` is 1 at a token, 0 at padding.
    """
    lengths = torch.tensor([len(text["input_ids"]) for text in texts])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    arguments = {}
    for name in texts[0]:
        parts = [text[name] for text in texts]
        # All texts at once: a tensor for each would take as long as all the rest.
        values = (
            torch.cat(parts)
            if isinstance(parts[0], Tensor)
            else torch.tensor([*chain.from_iterable(parts)])
        )
        filler = pad if name == "input_ids" else 0
        arguments[name] = values.new_full((*mask.shape, *values.shape[1:]), filler)
        arguments[name][mask] = values
    return arguments | {"attention_mask": mask.long()}
