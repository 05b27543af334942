"""What counting predicts: by hand, and against the same formulas written with dictionaries."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from analysis_book.training import Pretraining, pretrain
from analysis_book.training.baselines import n_gram_losses


def losses(train, held_out, predicted, special, vocabulary) -> dict[str, float]:
    arrays = np.array(train), np.array(held_out), np.array(predicted, bool)
    return (
        n_gram_losses(*arrays, np.arange(special, vocabulary), vocabulary)
        .set_index("baseline")["loss"]
        .to_dict()
    )


def test_by_hand():
    # Token 0 is special. 1 is always followed by 2; the counts of 1 and 2 with one added are 3 and
    # 3 of 9.
    found = losses([[0, 1, 2, 0], [0, 1, 2, 0]], [[0, 1, 2, 0]], [[0, 0, 1, 0]], 1, 3)
    # Two pairs begin with 1, of one kind: (2 + 1 / 3) / 3 for 2, (0 + 1 / 3) / 3 for 1.
    words = np.array([5, 3, 3]) / 11
    after = (np.array([0, 2]) + words[1:]) / 3
    before = (np.array([0 + words[0], 2 + words[0]])) / 3
    assert found["unigram"] == pytest.approx(math.log(2))
    assert found["bigram"] == pytest.approx(-math.log(after[1] / after.sum()))
    both = after * before
    assert found["neighbours"] == pytest.approx(-math.log(both[1] / both.sum()))


def test_against_dictionaries():
    draw = np.random.default_rng(0)
    special, size = 2, 9
    train = np.where(draw.random((40, 12)) < 0.1, 1, draw.integers(special, size, (40, 12)))
    train[:, 1::2] = np.where(
        train[:, 1::2] > 1, np.maximum(train[:, ::2], special), 1
    )  # pairs say something
    held_out, predicted = train[:8], np.zeros((8, 12), bool)
    predicted[:, 1:-1] = (held_out[:, 1:-1] >= special) & (draw.random((8, 10)) < 0.5)
    found = losses(train[8:], held_out, predicted, special, size)

    words = Counter(train[8:].ravel().tolist())
    unigram = {w: (words[w] + 1) / (train[8:].size + size) for w in range(size)}
    pairs = Counter((a, b) for row in train[8:].tolist() for a, b in itertools.pairwise(row))

    def follows(left, word):
        begun = {b: count for (a, b), count in pairs.items() if a == left}
        return (begun.get(word, 0) + len(begun) * unigram[word]) / (
            sum(begun.values()) + len(begun)
        )

    expected = {"unigram": [], "bigram": [], "neighbours": []}
    for row, place in np.argwhere(predicted):
        left, word, right = held_out[row, place - 1 : place + 2].tolist()
        for name, likely in {
            "unigram": unigram.get,
            "bigram": lambda w, left=left: follows(left, w),
            "neighbours": lambda w, left=left, right=right: follows(left, w) * follows(w, right),
        }.items():
            expected[name].append(-math.log(likely(word) / sum(map(likely, range(special, size)))))
    assert found == pytest.approx(
        {name: np.mean(values) for name, values in expected.items()}, rel=1e-12
    )
    assert found["neighbours"] < found["bigram"] < found["unigram"]


def test_a_run_keeps_them_at_the_tokens_that_its_held_out_loss_counts(tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text(
        "\n".join("the cat sees a dog and the dog sees a cat." for _ in range(200)),
        encoding="utf-8",
    )
    tiny = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 16,
    }
    for kind in ("bert", "modernbert"):
        special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
        configuration = tiny | (special if kind == "modernbert" else {})
        settings = Pretraining(
            str(text), configuration, kind, vocabulary=60, length=16, steps=2, batch=4
        )
        folder = pretrain(tmp_path / kind, settings)
        rows = np.genfromtxt(
            folder / "baselines.csv", delimiter=",", names=True, dtype=None, encoding="utf-8"
        )
        assert rows["baseline"].tolist() == ["unigram", "bigram", "neighbours"]
        assert rows["loss"][0] > rows["loss"][1] > 0
        assert rows["loss"][0] < math.log(60)
