"""What a verdict is about: the claims of the book, on models and corpora of the papers and others."""

import pandas as pd
import pytest
from planted import shown

from analysis_book.papers import claims
from analysis_book.papers.claims import FAILS, HOLDS, SMALL, UNDECIDED
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.intervals import Estimate

GAIN, HIGH, CLASS = "fosse-keys-converge", "fosse-own-class-high", "fosse-direction-is-class"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.12, 0.2), HOLDS),
        ((0.02, 0.08), SMALL),
        # Above the turn, and not shown beyond our bound.
        ((0.05, 0.15), SMALL),
        ((-0.02, 0.08), UNDECIDED),
        ((-0.02, 0.2), UNDECIDED),
        ((-0.2, -0.02), FAILS),
    ],
)
def test_a_gain_short_of_a_bound_of_ours_is_a_small_one(ends, expected):
    """Keys converge where they are more alike than before: our bound is a tenth."""
    assert (claims.claim(GAIN).bound, claims.claim(GAIN).turn) == (0.1, 0)
    estimate = Estimate(sum(ends) / 2, *ends, 5)
    row = claims.judged(GAIN, estimate)
    assert row["verdict"] == expected
    # Of the number that decides.
    at = 0.1 if expected == HOLDS else 0
    assert row["p"] == estimate.p(at)
    assert (row["p"] < 0.05) == (expected != UNDECIDED)


def test_what_holds_a_little_is_lost_by_correction_like_all_that_is_decided():
    weak = claims.judged(GAIN, Estimate(0.03, 0.001, 0.059, 5))
    rows = pd.DataFrame([weak | {"model": name} for name in "ab"])
    assert rows["verdict"].tolist() == 2 * [SMALL]
    assert claims.corrected(rows).tolist() == 2 * [UNDECIDED]
    words = {HOLDS: "yes", UNDECIDED: "perhaps"}
    assert claims.said(rows, GAIN, words) == "perhaps"
    assert claims.said(rows[:1], GAIN, words) == "yes"
    assert claims.said(rows[:1], GAIN, words | {SMALL: "a little"}) == "a little"
    chip = shown(rows)._repr_html_()
    assert chip.count('class="chip holds-small lost"') == 2
    assert "between 0 and that, it holds, but less than we asked for" in chip


@pytest.mark.parametrize(
    ("claim", "model", "dataset", "expected"),
    [
        ("maruta-early-cls", "BERT-base", None, "paper"),
        ("maruta-early-cls", "MiniLM", None, "elsewhere"),
        ("maruta-middle-typed-gap", "BERT-base", None, "ours"),
        ("causes-spike-costs", "SmolLM2", None, "ours"),
        # Of a model on the corpora of the paper, both have to be the paper's.
        ("fosse-direction-is-class", "BERT-base", "YelpHat", "paper"),
        ("fosse-direction-is-class", "BERT-base", "reviews", "elsewhere"),
        ("fosse-direction-is-class", "MiniLM", "YelpHat", "elsewhere"),
        # Classifiers that the paper trains itself are known by their corpus.
        ("fosse-values-lead", None, "HateXplain", "paper"),
        ("fosse-values-lead", None, "reviews", "elsewhere"),
        # A statement on an equation is about every model.
        ("fosse-queries-align", "MiniLM", None, "paper"),
        ("godey-speech-cosine", "Whisper base", None, "paper"),
        ("godey-block-narrows-cone", "GPT-2 block", None, "elsewhere"),
    ],
)
def test_a_claim_is_the_paper_s_own_on_its_models_and_corpora(claim, model, dataset, expected):
    assert claims.claim(claim).judged_on(model, dataset) == expected


def test_a_claim_of_ours_says_whose_it_is_after():
    assert claims.claim("maruta-middle-typed-gap").source.startswith("after Maruta and Matsuzaki")
    assert claims.claim("maruta-middle-typed-gap").paper == "this book"
    assert claims.claim("causes-spike-costs").source.startswith("this book, ")
    assert claims.claim("maruta-early-cls").paper == "Maruta and Matsuzaki 2024"


def test_a_sentence_about_one_corpus_is_judged_there_alone():
    rows = [claims.judged(name, Estimate(0.9, 0.8, 1.0, 5)) for name in (HIGH, CLASS)]
    table = pd.DataFrame([row | {"dataset": d} for d in ("YelpHat", "reviews") for row in rows])
    kept = claims.on_their_corpora(table)
    assert kept[["id", "dataset"]].to_numpy().tolist() == [
        [HIGH, "YelpHat"],
        [CLASS, "YelpHat"],
        [CLASS, "reviews"],
    ]


def test_a_claim_without_models_is_refused(monkeypatch, tmp_path):
    (tmp_path / "claims").mkdir()
    fields = (
        "place: p, setting: s, sentence: s, quantity: q, statistic: cell, page: p, rationale: r"
    )
    (tmp_path / "claims" / "godey.yml").write_text(f"- {{id: godey-a, {fields}}}")
    monkeypatch.setattr(claims, "data_directory", lambda: tmp_path)
    with pytest.raises(AnalysisError, match="godey-a says neither its models nor that it is ours"):
        claims.load.__wrapped__("godey")
