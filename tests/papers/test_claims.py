"""Claims are data; a planted number gives the verdict that was planted."""

import dataclasses
import importlib
import math
import re

import numpy as np
import pandas as pd
import pytest
from planted import Planted

from analysis_lib.corpora.packages import data_directory
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Comparison
from analysis_lib.papers import claims

SPEECH, DRIFT = "godey-speech-cosine", "godey-drift-spearman"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.6, 0.7, "holds"),
        (0.4, 0.6, "undecided"),
        (0.3, 0.4, "does not hold"),
        (0.5, 0.5, "does not hold"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_the_interval_decides(low, high, expected):
    assert claims.verdict(low, high, 0.5) == expected
    # On the other side everything is reversed.
    assert claims.verdict(-high, -low, -0.5, "below") == expected


def test_a_claim_may_hold_below_its_bound(monkeypatch):
    below = dataclasses.replace(claims.claim(SPEECH), direction="below")
    monkeypatch.setattr(claims, "claim", lambda name: below)
    for cosine, verdict, words in ((0.1, "holds", "below 0.2"), (0.3, "does not hold", "below 0.2")):
        found = claims.verdicts({SPEECH: least}, hidden(cosine))
        assert found["verdict"].tolist() == [verdict]
        assert claims.verdict_table(found, "tbl-x", "X").frame.iloc[0, 3].startswith(words)


def test_unknown_published_table_offers_the_nearest():
    with pytest.raises(AnalysisError, match="maruta_table1_contributions"):
        claims.published("maruta_table1")


def least(tables) -> float:
    return tables["anisotropy"]["cosine"].min()


def hidden(*cosines: float, reach: float = 0.0) -> Planted:
    return Planted(reach=reach, anisotropy=pd.DataFrame({"space": "hidden", "cosine": cosines}))


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_claim_of_a_paper_is_whole(paper):
    for name, claim in claims.load(paper).items():
        assert name.startswith(f"{paper}-")
        assert claim.limits[0] <= claim.bound <= claim.limits[1]
        assert claim.direction in ("above", "below")
        if claim.statistic != "cell":
            module, _, function = claim.statistic.rpartition(".")
            assert callable(getattr(importlib.import_module(module), function))


def test_an_unknown_claim_offers_the_nearest():
    with pytest.raises(AnalysisError, match=SPEECH):
        claims.claim("godey-speech-cosin")
    with pytest.raises(AnalysisError, match="no claims of a paper nobody"):
        claims.claim("nobody-first")


def test_each_model_has_verdicts_of_its_own_and_its_twin_none():
    low, high = hidden(0.1, 0.9), hidden(0.3, 0.9)
    runs = {("low", None): low, ("low", 0): hidden(0.9), ("high", None): high}
    found = claims.verdicts_by_model(Comparison(runs), {SPEECH: least})
    assert found["model"].tolist() == ["low", "high"]
    assert found["verdict"].tolist() == ["does not hold", "holds"]
    alone = claims.verdicts({SPEECH: least}, high)
    pd.testing.assert_frame_equal(found.iloc[[1]].drop(columns="model").reset_index(drop=True), alone)
    # What is computed may depend on the model.
    by_table = claims.verdicts_by_model(Comparison(runs), lambda tables: {SPEECH: least} if tables is high else {})
    assert by_table["model"].tolist() == ["high"]
    shown = claims.verdict_table(found, "tbl-x", "X").frame
    assert shown["model"].tolist() == found["model"].tolist()
    assert "model" not in claims.verdict_table(alone, "tbl-x", "X").frame


def test_a_table_of_verdicts_shows_the_model_and_what_tells_its_rows_apart():
    """What is alike in all rows is left to the caption and the ledger, which reads it from the metadata."""
    found = claims.verdicts_of_estimates({SPEECH: (0.3, 0.3, 0.3)})
    one = found.assign(model="m", dataset="news", variant="by position")
    two = pd.concat([one, one.assign(variant="flattened")], ignore_index=True)
    first = [list(claims.verdict_table(rows, "tbl-x", "X").frame) for rows in (one, two, one.drop(columns="model"))]
    assert [names[: names.index("verdict")] for names in first] == [["model"], ["variant", "model"], ["dataset"]]
    (kept,) = claims.verdict_table(one, "tbl-x", "X").metadata["verdicts"]
    assert [kept[name] for name in ("model", "dataset", "variant")] == ["m", "news", "by position"]


def test_an_interval_does_not_leave_what_the_number_can_be():
    found = claims.verdicts({SPEECH: least}, hidden(0.9, reach=0.5))
    np.testing.assert_allclose(found[["ci_low", "ci_high"]], [[0.4, 1.0]])
    assert claims.verdicts({SPEECH: least}, hidden(0.4, reach=0.5))["verdict"].tolist() == ["undecided"]


def test_claims_with_and_without_an_interval_stand_in_one_table():
    alone = "godey-first-direction-holds-the-drift", "godey-directions-of-one-space"
    nothing = (math.nan, math.nan)
    estimates = {alone[0]: (0.6, *nothing), SPEECH: (0.3, 0.3, 0.3), alone[1]: (-0.01, *nothing)}
    found = claims.verdicts_of_estimates(estimates)
    assert found["verdict"].tolist() == ["undecided", "holds", "undecided"]
    assert found["ci_low"].notna().tolist() == [False, True, False]
    assert found["ci_low"][1] == pytest.approx(0.3)


def test_a_verdict_after_holm_counts_all_rows_and_is_shown_where_it_differs():
    """Five numbers lie 2.1 standard errors above their bound, and one 10: alone all hold, together one does."""
    near = dict.fromkeys([SPEECH], (0.2 + 0.21, 0.2 + 0.21 - 0.196, 1.0))
    rows = [claims.verdicts_of_estimates(near).assign(model=str(i)) for i in range(5)]
    far = claims.verdicts_of_estimates({SPEECH: (1.2, 1.2 - 0.196, 1.0)}).assign(model="far")
    verdicts = pd.concat([*rows, far], ignore_index=True)
    assert set(verdicts["verdict"]) == {"holds"}
    assert claims.corrected(verdicts).tolist() == [*5 * ["undecided"], "holds"]
    table = claims.verdict_table(verdicts, "tbl-x", "X.")
    assert table.frame["verdict"].tolist() == [*5 * ["**holds** after Holm: **undecided**"], "**holds**"]
    # Six times 2.5 %.
    assert "Of 6 claims with an interval, 0.15 would hold by chance" in table.caption


@pytest.mark.parametrize(
    ("draws", "words"), [([5], "[0.300, 0.500] over 5: "), ([8], "[0.300, 0.500]: "), ([], "0.500]: ")]
)
def test_an_interval_over_few_units_says_so(draws, words):
    estimate = (0.4, 0.3, 0.5, *draws)
    shown = claims.verdict_table(claims.verdicts_of_estimates({SPEECH: estimate}), "tbl-x", "X.").frame
    assert words in shown.iloc[0, 1]


def test_every_bound_says_why_and_when_it_was_set():
    for paper in claims.PAPERS:
        for claim in claims.load(paper).values():
            assert len(claim.rationale.split()) >= 5, claim.id
            when = r"([Ss]et|[Ww]ritten down|Added) (before|after|in|when)|not on record|paper gives the number"
            assert re.search(when, claim.rationale), claim.id


SHIPPED = sorted((data_directory() / "measurements").glob("*/verdicts.csv"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_recorded_verdicts_are_those_that_their_pages_gave(path):
    """Bounds and limits may change after a record: then it is made again."""
    written, found = pd.read_csv(path), claims.recorded(path.parent.name)
    assert found["verdict"].tolist() == written["verdict"].tolist()
    assert found["p"].notna().tolist() == written["p"].notna().tolist()
    np.testing.assert_allclose(found["p"], written["p"], rtol=1e-3, atol=1e-6)
    assert set(found["model"]) == {path.parent.name}
