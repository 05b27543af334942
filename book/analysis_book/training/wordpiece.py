"""A WordPiece vocabulary learned from texts, the same every time."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from analysis_book.training.settings import SPECIAL
from analysis_lib.errors import AnalysisError

# As in BERT: rarer characters make a word unknown.
ALPHABET = 1000
# Marks where a word begins while pairs are merged; of Unicode's private use, so that no text holds
# it.
_START = "\ue000"


def word_pieces(
    texts: Iterable[str], vocabulary: int, cased: bool = False
) -> transformers.BertTokenizer:
    """A BERT tokenizer whose word pieces are learned from the texts.

    It lower-cases unless it is to be cased. Words are cut as BERT cuts them, and the most frequent
    pair of pieces is merged again and again, which is what the trainers of WordPiece in use do. Not
    by tokenizers' own trainer of word pieces, which finds others from run to run (its issue 1794):
    its trainer of byte pairs does not, as long as no piece has a prefix. So the beginning of a word
    is marked by a character instead, and what does not begin with it becomes a ``##`` piece
    afterwards.

    Args:
        vocabulary: how many pieces there are at most, special tokens included.

    Raises:
        AnalysisError: the vocabulary has no room for the characters of the texts.

    >>> tokenizer = word_pieces(["low lower lowest", "low slow"], 22)
    >>> tokenizer.tokenize("Lower slow")
    ['low', '##e', '##r', 's', '##low']
    """
    learned = {piece: i for i, piece in enumerate(_learned((*texts,), vocabulary, cased))}
    return transformers.BertTokenizer(vocab=learned, do_lower_case=not cased)


# Classifiers of the same texts, which differ in width or seed, are trained one after the other.
@lru_cache(maxsize=4)
def _learned(texts: tuple[str, ...], vocabulary: int, cased: bool) -> list[str]:
    normalizer = normalizers.BertNormalizer(lowercase=not cased)
    splitter = pre_tokenizers.BertPreTokenizer()
    words = Counter()
    for text in texts:
        parts = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        words.update(word for word, _ in parts)
    letters = Counter(letter for word in words.elements() for letter in word)
    alphabet = sorted(sorted(letters), key=lambda letter: -letters[letter])[:ALPHABET]
    pieces = dict.fromkeys([*SPECIAL, *alphabet, *(f"##{letter}" for letter in alphabet)])
    if len(pieces) > vocabulary:
        raise AnalysisError(
            f"a vocabulary of {vocabulary} has no room for the {len(alphabet)} characters of the "
            f"texts: give {len(pieces)} or more"
        )
    known = set(alphabet)
    lines = (
        " ".join([_START + word] * count) for word, count in words.items() if known.issuperset(word)
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The trainer makes room for all it is allowed, and every merge shortens a word: there are no
    # more than letters.
    most = min(vocabulary, sum(len(word) + 1 for word in words)) + len(alphabet)
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=most, show_progress=False))
    # A vocabulary by number is in the order of the merges.
    learned = sorted(trained.get_vocab().items(), key=lambda piece: piece[1])
    for piece, _ in learned:
        begins = piece.startswith(_START)
        name = piece.removeprefix(_START) if begins else f"##{piece}"
        if name and len(pieces) < vocabulary:
            pieces.setdefault(name)
    return [*pieces]
