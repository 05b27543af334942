"""Word pieces: the same in every process, and cut as WordPiece cuts."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis_book.training.wordpiece import SPECIAL, word_pieces
from analysis_lib import AnalysisError, load_corpus


def test_word_pieces_are_the_same_in_every_process():
    program = (
        "from analysis_lib import load_corpus; from analysis_book.training.wordpiece import "
        "word_pieces;"
        "pieces = word_pieces(load_corpus('news:sentences').texts[:1500], 2500).get_vocab();"
        "print(sorted(pieces, key=pieces.get))"
    )
    other = os.environ | {
        "PYTHONHASHSEED": "7",
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": "4",
    }
    found = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=other, check=True
    )
    pieces = word_pieces(load_corpus("news:sentences").texts[:1500], 2500).get_vocab()
    assert len(pieces) == 2500
    assert found.stdout.strip() == str(sorted(pieces, key=pieces.get))


def longest_first(word: str, pieces: set[str]) -> list[str]:
    found, start = [], 0
    while start < len(word):
        mark = "##" if start else ""
        fitting = [
            end for end in range(start + 1, len(word) + 1) if mark + word[start:end] in pieces
        ]
        if not fitting:
            return ["[UNK]"]
        found.append(mark + word[start : max(fitting)])
        start = max(fitting)
    return found


@given(
    st.lists(st.text("abcd", min_size=1, max_size=8), min_size=1, max_size=20), st.integers(13, 60)
)
def test_a_word_is_cut_into_the_longest_pieces_first(words, vocabulary):
    tokenizer = word_pieces([" ".join(words)], vocabulary)
    pieces = tokenizer.get_vocab()
    assert len(pieces) <= vocabulary
    assert sorted(pieces.values()) == list(range(len(pieces)))
    assert tuple(sorted(pieces, key=pieces.get)[:5]) == SPECIAL
    for word in words:
        assert tokenizer.tokenize(word) == longest_first(word, set(pieces)) != ["[UNK]"]


def test_every_word_is_a_piece_where_there_is_room():
    words = ["straße", "ÉTÉ", "注", "naïve", "don"]
    tokenizer = word_pieces([" ".join(words)], 10**15)
    assert tokenizer.tokenize("Straße été naive DON 注!") == [
        "straße",
        "ete",
        "naive",
        "don",
        "注",
        "[UNK]",
    ]


def test_too_small_a_vocabulary_says_what_is_needed():
    with pytest.raises(AnalysisError, match="the 3 characters of the texts: give 11 or more"):
        word_pieces(["abc"], 10)
    assert len(word_pieces(["abc"], 11)) == 11
    assert len(word_pieces(["", " "], 5)) == 5
