"""Of a text that is cut, only the beginning is tokenised, and it is read as if the whole had
been.
"""

import random
from functools import cache

import pytest
import tiny
import tokenizers
import transformers
from tokenizers import models

from analysis_book.architectures import CharacterBertTokenizer
from analysis_lib import AnalysisError, load_corpus
from analysis_lib.corpora.corpus import Pair
from analysis_lib.models.tokenization import LETTERS_PER_TOKEN, encoded

KINDS = ("wordpiece", "bpe", "unigram")
WITHOUT_VOCABULARY = (
    transformers.ByT5Tokenizer,
    transformers.CanineTokenizer,
    CharacterBertTokenizer,
)
LENGTHS = (9, 64)


def runs_on() -> transformers.PreTrainedTokenizerFast:
    """BPE whose tokens span words, as in some models: nothing cuts a text before it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator([article()], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@cache
def article() -> str:
    return " ".join(load_corpus("wikipedia", limit=200).texts)[:6000]


@cache
def long_texts() -> dict[str, str]:
    draws = random.Random(0)
    chinese = "".join(draws.choices("注意力幾何學研究語言模型的向量。", k=3000))
    return {
        "an article": article(),
        "blanks before it": " \t\n" * 1000 + article(),
        "no blanks": article().replace(" ", ""),
        "one letter": "a" * 3000,
        "Chinese": chinese,
        "accents taken apart": "e\u0301t\u00e9 nai\u0308ve " * 200,
        "special tokens spelt out": "[SEP] <s> a girl [MASK] " * 100,
    }


@pytest.fixture(scope="module", params=[*KINDS, *WITHOUT_VOCABULARY, runs_on])
def tokenizer(request):
    return tiny.tokenizer(request.param) if request.param in KINDS else request.param()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", long_texts())
def test_the_beginning_is_that_of_the_whole(tokenizer, name, length):
    text = long_texts()[name]
    (whole,) = encoded("it", tokenizer, [text], length)
    (begun,) = encoded("it", tokenizer, [text], length, cut=True)
    assert begun.beginning(length) == whole.beginning(length)
    assert (len(begun) > length) == (len(whole) > length)


class Counting:
    """A tokenizer that counts the letters that it is given."""

    def __init__(self, inner):
        self.inner, self.letters = inner, 0

    def __call__(self, *sides, **given):
        for side in sides:
            self.letters += len(side) if isinstance(side, str) else sum(map(len, side))
        return self.inner(*sides, **given)


def test_what_comes_long_after_is_not_tokenised():
    counting, text = Counting(tiny.tokenizer("wordpiece")), "a girl is styling her hair " * 10_000
    (begun,) = encoded("it", counting, [text], 64, cut=True)
    assert len(begun.beginning(64)) == 64
    # Once to see that it is enough, once with all texts, once for the frame of a text.
    assert counting.letters <= 3 * LETTERS_PER_TOKEN * 64


def test_a_short_text_is_tokenised_once():
    counting = Counting(tiny.tokenizer("wordpiece"))
    encoded("it", counting, ["a girl", "her hair"], 64, cut=True)
    assert counting.letters == len("a girl" + "her hair" + "a girl")


@pytest.mark.parametrize("length", [33, 34])
@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_a_pair_is_that_of_the_whole(kind, length):
    """Above all where both texts are cut: with room for an odd number of tokens, the longer one has
    one more.
    """
    tokenizer, words = tiny.tokenizer(kind), article().split()
    texts = [" ".join(words[:count]) for count in (2, 65, 250, 251)]
    texts += ["a girl " * 250, "[SEP] <s> a girl [MASK] " * 50]
    pairs = [Pair(first, second) for first in texts for second in texts]
    whole, begun = (encoded("it", tokenizer, pairs, length, cut=cut) for cut in (False, True))
    for pair, part, all_of_it in zip(pairs, begun, whole, strict=True):
        sizes = [len(text) for text in pair]
        assert part.beginning(length) == all_of_it.beginning(length), sizes
        assert (len(part) > length) == (len(all_of_it) > length), sizes
        given = tokenizer(*pair, truncation="longest_first", max_length=length)["input_ids"]
        assert part.beginning(length).ids == given, sizes


@pytest.mark.parametrize("length", [63, 64])
def test_what_comes_long_after_in_a_pair_is_not_tokenised(length):
    long, short = "a girl is styling her hair " * 10_000, "the men are at work " * 50
    # Of two long ones, that is known without their ends only where either has as much.
    pairs = [Pair(long, short), Pair(short, long), Pair(long, "the men")]
    pairs += [Pair(long, long)] if (length - 3) % 2 == 0 else []
    for pair in pairs:
        counting = Counting(tiny.tokenizer("wordpiece"))
        (begun,) = encoded("it", counting, [pair], length, cut=True)
        assert len(begun.beginning(length)) == length
        assert counting.letters <= 0.2 * len(long)


def test_a_tokenizer_that_fails_on_the_beginning_is_told_in_one_line():
    def fails(*_, **__):
        raise KeyError("no\nsuch piece")

    with pytest.raises(AnalysisError, match=r"^it: its tokenizer cannot read these texts"):
        encoded("it", fails, ["a " * 500], 8, cut=True)
