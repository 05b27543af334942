"""The model that runs in a page, in a real browser: its tokens against transformers, its numbers
against the library with the same weights.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis_book.figures import weights
from analysis_book.figures.weights import LONGEST, as_in_page, dequantised, levels, weights_script
from analysis_lib import AnalysisError, LoadedModel, load_corpus, load_model, measure

FIGURES = Path(weights.__file__).parent
# Other scripts, accents in one sign or two, signs that BERT drops, blanks
# of all kinds, names of special tokens, a word that is too long.
ODD = [
    *("", " ", "\t\n\r", "\u00a0\u2003\u3000x", "[CLS]", "[MASK][MASK]", "[cls] [SEP", "a[SEP]b"),
    *(
        "naïve Café",
        "naive\u0308",
        "İstanbul ıI",
        "ΣΊΣΥΦΟΣ ΟΔΟΣ",
        "Straße ẞ",
        "ﬁne ﬂow",
        "Ǆ ǅ",
        "ЙЁ й",
    ),
    *(
        "東京都 に",
        "한국어 텍스트",
        "ไทยดี",
        "नमस्ते",
        "שָׁלוֹם",
        "مرحبا",
        "𠀀𝒳𝔸",
        "👩‍👩‍👧 👍🏽",
        "ⅷ ½ ①",
    ),
    *("a\u200bb\u00adc\ufeff", "\x00\x07\x7f\x85x", "\ufffd?", "\ue000", "a\u0301\u0327\u0489"),
    *(
        "don't 'quoted' ``x''",
        "$5.00 + 3^2 = ~14 `|<>",
        "…—‘’“”«»¿¡‽",
        "e.g. U.S.A.",
        "@user #tag http://x.y/z?q=1",
    ),
    *("x" * 100, "x" * 101, "ß" * 101, "zzzzqqqq", "##ing", "unaffable", "a" * 40 + " b" * 80),
]
DRAWN = "aZé\u0301ßΣσſ İ.,!?-'\"[]#@ \t\u00a0\u200d\u3000中한ไא3½①👍𝒳ЖйǅﬁŁøþ~^$|\u00ad"


def odd_texts() -> list[str]:
    """300 strings, those above and drawn ones."""
    draw = random.Random(0)
    drawn = ["".join(draw.choices(DRAWN, k=draw.randint(1, 30))) for _ in range(300 - len(ODD))]
    return ODD + drawn


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(load_corpus("wikipedia:short", limit=50, seed=1).texts)


@pytest.fixture(scope="module")
def rounded(minilm) -> LoadedModel:
    return as_in_page(minilm)


@pytest.fixture(scope="module")
def window(browser, minilm, tmp_path_factory):
    """A page of a file in which the model is loaded, as ``bert``."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "weights.js").write_bytes(weights_script(minilm))
    scripts = [
        f'<script src="{(FIGURES / name).as_uri()}"></script>'
        for name in ("wordpiece.js", "bert.js")
    ]
    (folder / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{"".join(scripts)}')
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto((folder / "page.html").as_uri())
        page.evaluate("async () => { window.bert = await Bert.load('weights.js'); }")
        yield page


def read(model: LoadedModel, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers gives them out: hidden states, and weights of attention, of each layer."""
    encoded = model.tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        given = model.model(**encoded, output_hidden_states=True, output_attentions=True)
    return torch.cat(given.hidden_states), torch.cat(given.attentions)


def cosines(hidden: torch.Tensor) -> list[float]:
    """The average cosine of two tokens of a text by layer, from all pairs."""
    by_layer = []
    for states in hidden.double():
        pairs = torch.nn.functional.cosine_similarity(states[:, None], states[None], dim=-1)
        off_diagonal = ~torch.eye(len(states), dtype=torch.bool)
        by_layer.append(pairs[off_diagonal].mean().item())
    return by_layer


@pytest.mark.browser
def test_ids_are_those_of_transformers(window, minilm):
    some = odd_texts()
    assert len(some) == 300
    expected = minilm.tokenizer(some, truncation=True, max_length=LONGEST, padding=False)[
        "input_ids"
    ]
    found = window.evaluate("(texts) => texts.map((text) => bert.encode(text))", some)
    wrong = [pair for pair in zip(some, expected, found, strict=True) if pair[1] != pair[2]]
    assert not wrong


@pytest.mark.browser
def test_hidden_states_and_attention_are_those_of_transformers_with_these_weights(
    window, rounded, texts
):
    for text in texts:
        hidden, attention = read(rounded, text)
        found = window.evaluate(
            """(text) => {
              const { hidden, layers } = bert.run(bert.encode(text));
              return [hidden.map((states) => [...states]), layers.map(({ weights }) => weights)];
            }""",
            text,
        )
        np.testing.assert_allclose(found[0], hidden.flatten(1), atol=1e-3, rtol=0)
        np.testing.assert_allclose(found[1], attention, atol=1e-3, rtol=0)


@pytest.mark.browser
def test_contributions_are_those_of_the_library(window, rounded, texts):
    """Their means over the pairs of a query and a key, of one head of each layer."""
    few = texts[:3]
    table = measure(rounded, load_corpus(few), "score_contributions", progress=False)[
        "score_contributions"
    ]
    expected = table.query("key_type == 'all' and head == layer * 2").pivot(
        index="layer", columns="dimension", values="contribution"
    )
    sums = window.evaluate(
        """(texts) => Array.from({ length: bert.layers }, (_, layer) => {
          const total = new Array(bert.width).fill(0);
          let pairs = 0;
          for (const text of texts) {
            const ids = bert.encode(text), of = bert.run(ids).layers[layer];
            for (const [query] of ids.entries()) for (const [key] of ids.entries()) {
              bert.contributions(of, layer, 2 * layer + 1, query, key).forEach((value, i) => (total[i] += value));
              pairs++;
            }
          }
          return total.map((sum) => sum / pairs);
        })""",
        few,
    )
    assert expected.abs().to_numpy().max() > 1
    np.testing.assert_allclose(sums, expected, atol=1e-3, rtol=0)


def test_rounding_moves_little(minilm, rounded, texts):
    """What the page says of it: of cosines and of weights of attention."""
    moved = []
    for text in texts[:10]:
        (hidden, attention), (hidden_rounded, attention_rounded) = (
            read(minilm, text),
            read(rounded, text),
        )
        cosine = np.abs(np.subtract(cosines(hidden), cosines(hidden_rounded))).max()
        moved.append((cosine, (attention - attention_rounded).abs().mean().item()))
    cosine, weight = np.max(moved, 0)
    assert 0 < cosine < 0.01
    assert 0 < weight < 0.004


@pytest.mark.parametrize("name", [weights.WORDS, "encoder.layer.0.output.dense.weight"])
def test_a_weight_moves_by_half_a_level_at_most(name):
    matrix = np.random.default_rng(0).normal(size=(7, 384)).astype(np.float32)
    matrix[3] = 0
    per, count = levels(name)
    moved = np.abs(dequantised(name, matrix) - matrix).reshape(-1, weights.GROUP * per)
    largest = np.abs(matrix).reshape(moved.shape).max(1)
    # A scale is a float16, with a precision of 2⁻¹¹.
    assert (moved.max(1) <= largest * (0.5 / (count // 2) + 2**-11)).all()
    assert (moved[:, 0] > 0).any()


def test_a_model_that_the_page_cannot_run_is_refused():
    with pytest.raises(
        AnalysisError, match=re.escape("mpnet-base does not run in a page: give a BERT")
    ):
        weights_script(load_model("mpnet-base"))
