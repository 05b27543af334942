"""Of a text that is cut, only the beginning is tokenised, and it is read as if the whole had been."""

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
WITHOUT_VOCABULARY = (transformers.ByT5Tokenizer, transformers.CanineTokenizer, CharacterBertTokenizer)
LENGTHS = (9, 64)


def runs_on() -> transformers.PreTrainedTokenizerFast:
    """BPE whose tokens span words, as in some models: nothing cuts a text before it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
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


def test_a_pair_is_read_whole():
    text, tokenizer = "a girl is styling her hair " * 100, tiny.tokenizer("wordpiece")
    pairs = [Pair(text, "the men"), Pair("the men", text), Pair(text, text)]
    whole, begun = (encoded("it", tokenizer, pairs, 33, cut=cut) for cut in (False, True))
    assert [pair.beginning(33) for pair in begun] == [pair.beginning(33) for pair in whole]


def test_a_tokenizer_that_fails_on_the_beginning_is_told_in_one_line():
    def fails(*_, **__):
        raise KeyError("no\nsuch piece")

    with pytest.raises(AnalysisError, match=r"^it: its tokenizer cannot read these texts"):
        encoded("it", fails, ["a " * 500], 8, cut=True)
