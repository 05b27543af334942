"""Texts and pairs of texts as token ids, and the special tokens around and between them."""

from collections.abc import Sequence

import transformers

from analysis_lib.corpora import Pair
from analysis_lib.errors import AnalysisError
from analysis_lib.models.architectures import CharacterBertTokenizer

Tokenizer = transformers.PreTrainedTokenizerBase | CharacterBertTokenizer


def text_frame(tokenizer: Tokenizer) -> tuple[list, list]:
    """The ids of the special tokens that the tokenizer puts before and after a text."""
    bare, framed = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    start = next(i for i in range(len(framed) + 1) if framed[i : i + len(bare)] == bare)
    return framed[:start], framed[start + len(bare) :]


def _separator(tokenizer: Tokenizer) -> list:
    """The ids of the special tokens between the two texts of a pair; its separator if it does not know pairs."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    prefix, suffix = text_frame(tokenizer)
    framed = tokenizer("a", "a")["input_ids"]
    between = framed[len(prefix) + len(bare) : len(framed) - len(suffix) - len(bare)]
    if not between and (separator := getattr(tokenizer, "sep_token_id", None)) is not None:
        return [separator]
    if not between:
        raise AnalysisError(
            f"a {type(tokenizer).__name__} puts no separator between the texts of a pair: give a model that has one"
        )
    return between


def token_ids(tokenizer: Tokenizer, texts: Sequence[str | Pair]) -> list[list]:
    """The ids of texts, and of pairs with the tokenizer's own separator in between, without what frames them.

    Raises:
        AnalysisError: a pair, and a tokenizer that has no separator.
    """
    if not any(isinstance(text, Pair) for text in texts):
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    firsts, seconds = (tokenizer([pair[i] for pair in texts], add_special_tokens=False)["input_ids"] for i in range(2))
    separator = _separator(tokenizer)
    return [[*first, *separator, *second] for first, second in zip(firsts, seconds, strict=True)]
