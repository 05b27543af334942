#!/bin/sh
# tokenizers 0.23.3: where a pair of texts is truncated, what is cut off is made into encodings whether or not anybody
# asks for it, and their number grows with the square of the length.
#
# A pair of 800 words each, cut to 32 tokens, brings 2,499 further encodings with 79,968 tokens, of 1,600 words: each
# overflowing piece of the first text stands beside each of the second. Twice the length, four times as many. A single
# text has as many pieces as it is long. There is no option to leave them out, and a tokenizer of transformers, which
# drops them unless `return_overflowing_tokens` is given, waits for them as well: scoring long pairs with a
# cross-encoder can take longer to tokenize than to run. Cut both texts before they are encoded.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

print("tokenizers", tokenizers.__version__)
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def further(words, *, pair):
    """How many encodings come with the one that is wanted, and how many tokens they have."""
    text = "word " * words
    tokenizer.enable_truncation(32, strategy="longest_first")
    started = time.perf_counter()
    encoding = tokenizer.encode(text, text if pair else None)
    milliseconds = 1000 * (time.perf_counter() - started)
    assert len(encoding.ids) == 32
    rest = encoding.overflowing
    tokens = sum(len(part.ids) for part in rest)
    kind = "two texts" if pair else "one text"
    print(f"{kind} of {words} words: {len(rest)} encodings, {tokens} tokens ({milliseconds:.1f} ms)")
    return len(rest)


pairs = [further(words, pair=True) for words in (200, 400, 800)]
single = [further(words, pair=False) for words in (200, 400, 800)]
assert pairs == [168, 624, 2499]
assert single == [6, 12, 24]
PYTHON
