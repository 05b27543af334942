"""Claims are data; a planted number gives the verdict that was planted."""

import importlib
import math
import re
from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd
import pytest
from planted import Planted, shown

from analysis_book.figures.verdicts import claim_line
from analysis_book.papers import claims
from analysis_book.papers.claims import FAILS, HOLDS, NO_INTERVAL, NOT_APPLICABLE, UNDECIDED
from analysis_lib.errors import AnalysisError
from analysis_lib.files import data_directory
from analysis_lib.measurement import Ratio, Shipped, largest
from analysis_lib.metrics.intervals import Estimate, least, seed_interval, share

# Planted, so that no edit of the book's claims changes what is tested here: their bounds are 0.2
# and 0.
COSINE, LEAD = "godey-cosine", "maruta-lead"


@pytest.fixture(autouse=True)
def planted(request, monkeypatch) -> None:
    if "paper" in request.fixturenames or "path" in request.fixturenames:
        return
    about = {
        "place": "sec. 1",
        "setting": "BERT, on news",
        "statistic": "cell",
        "page": "part/page",
    }
    about |= {"sentence": "Cosines are <high>.", "rationale": "Set before the first measurement."}
    cosine = claims.Claim(
        id=COSINE, quantity="least cosine", bound=0.2, limits=(-1.0, 1.0), **about
    )
    lead = claims.Claim(id=LEAD, quantity="lead", figures=["fig-a"], **about)
    planted = {"godey": {COSINE: cosine}, "maruta": {LEAD: lead}}
    monkeypatch.setattr(
        claims, "load", lambda paper, load=claims.load: planted.get(paper) or load(paper)
    )


def below(monkeypatch) -> None:
    """Let the claim on cosines hold below its bound."""
    turned = replace(claims.claim(COSINE), direction="below")
    monkeypatch.setattr(claims, "load", {"godey": {COSINE: turned}}.__getitem__)


def hidden(*cosines: float, reach: float = 0.01) -> Planted:
    return Planted(reach=reach, anisotropy=pd.DataFrame({"cosine": cosines}))


def every(tables) -> pd.Series:
    return tables["anisotropy"]["cosine"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.6, 0.7, HOLDS),
        (0.4, 0.6, UNDECIDED),
        (0.3, 0.4, FAILS),
        (0.3, 0.5, FAILS),
        (0.6, 0.6, NO_INTERVAL),
        (math.nan, math.nan, NO_INTERVAL),
    ],
)
def test_the_interval_decides(low, high, expected):
    found = Estimate(0.5 if math.isnan(low) else (low + high) / 2, low, high)
    assert claims.verdict(found, 0.5) == expected
    # On the other side everything is reversed.
    assert claims.verdict(found, 0.5, "below") == {HOLDS: FAILS, FAILS: HOLDS}.get(
        expected, expected
    )


def test_without_a_number_a_claim_is_not_applicable():
    assert claims.verdict(Estimate(math.nan, 0.1, 0.2), 0.0) == NOT_APPLICABLE
    found = claims.verdicts({COSINE: lambda t: math.nan, LEAD: lambda t: []}, hidden(0.5))
    assert found["verdict"].tolist() == 2 * [NOT_APPLICABLE]
    assert found["p"].isna().all()


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        ((0.9, 0.3), HOLDS),
        ((0.9, 0.2), UNDECIDED),
        ((0.9, 0.1), FAILS),
        ((0.1, 0.1), FAILS),
        ((0.9, math.nan), NOT_APPLICABLE),
    ],
)
def test_of_several_numbers_all_have_to_lie_beyond_the_bound(cosines, expected):
    (found,) = claims.verdicts({COSINE: every}, hidden(*cosines)).to_dict("records")
    assert found["verdict"] == expected
    assert found["value"] == pytest.approx(
        min(cosines) if expected != NOT_APPLICABLE else math.nan, nan_ok=True
    )


@pytest.mark.parametrize(
    ("cosines", "expected"), [((-0.9, 0.1), HOLDS), ((0.1, 0.2), UNDECIDED), ((0.1, 0.9), FAILS)]
)
def test_below_a_bound_too(cosines, expected, monkeypatch):
    below(monkeypatch)
    (found,) = claims.verdicts({COSINE: every}, hidden(*cosines)).to_dict("records")
    assert (found["verdict"], found["direction"]) == (expected, "below")
    assert found["value"] == cosines[1]
    assert found["ci_low"] < cosines[1] < found["ci_high"]
    assert (found["p"] < 0.05) == (expected != UNDECIDED)
    assert "the claim holds below 0.2" in shown(pd.DataFrame([found]))._repr_html_()


def test_the_p_of_a_share_says_what_its_interval_does_below_a_bound_too(monkeypatch):
    below(monkeypatch)
    rows = [claims.judged(COSINE, share(right, 50)) for right in (1, 9, 30)]
    assert [row["verdict"] for row in rows] == [HOLDS, UNDECIDED, FAILS]
    assert [row["p"] for row in rows] == [share(right, 50).p(0.2) for right in (1, 9, 30)]


def test_some_layer_is_enough_where_the_claim_says_so():
    assert claims.verdicts({COSINE: largest(every)}, hidden(0.1, 0.3))["verdict"].tolist() == [
        HOLDS
    ]
    assert claims.verdicts({COSINE: largest(every)}, hidden(0.1, 0.1))["verdict"].tolist() == [
        FAILS
    ]


def test_a_ratio_over_nearly_nothing_is_not_applicable():
    for under, expected in ((0.5, HOLDS), (0.005, NOT_APPLICABLE)):
        assert claims.verdicts({LEAD: Ratio(every)}, hidden(0.5, under))["verdict"].tolist() == [
            expected
        ]


def test_unknown_names_offer_the_nearest():
    with pytest.raises(AnalysisError, match=COSINE):
        claims.claim("godey-cosin")
    with pytest.raises(AnalysisError, match="maruta_table1_contributions"):
        claims.published("maruta_table1")
    with pytest.raises(AnalysisError, match="no claims of a paper 'nobody'"):
        claims.claim("nobody-first")


def test_each_model_has_verdicts_of_its_own():
    low, high = hidden(0.1, 0.9), hidden(0.3, 0.9)
    found = claims.verdicts({COSINE: every}, {"low": low, "high": high})
    assert found["model"].tolist() == ["low", "high"]
    assert found["verdict"].tolist() == [FAILS, HOLDS]
    alone = claims.verdicts({COSINE: every}, high)
    assert alone["model"].tolist() == ["planted"]
    pd.testing.assert_frame_equal(
        found.iloc[[1]].drop(columns="model").reset_index(drop=True), alone.drop(columns="model")
    )
    assert set(found["sample"]) == {"40 texts of texts"}
    assert set(found["source"]) == {"Godey et al. 2024, sec. 1; BERT, on news"}


def test_a_measurement_that_comes_with_the_book_brings_its_verdicts(tmp_path, monkeypatch):
    folder = tmp_path / "measurements" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        '{"model": "mine", "data": "news", "texts": 2000, "tables": {}, "layers": []}'
    )
    recorded = claims.verdicts({COSINE: every, LEAD: every}, hidden(0.3, 0.9))
    recorded.to_csv(folder / "verdicts.csv", index=False)
    monkeypatch.setattr(claims, "data_directory", lambda: tmp_path)
    found = claims.verdicts({COSINE: None}, Shipped(folder))
    assert found[["model", "id", "sample"]].to_numpy().tolist() == [
        ["mine", COSINE, "2,000 texts of news"]
    ]
    numbers = ["value", "ci_low", "ci_high", "draws", "p", "bound", "verdict"]
    pd.testing.assert_frame_equal(found[numbers], recorded[numbers].iloc[[0]])
    with pytest.raises(AnalysisError, match="no verdicts on other come"):
        claims.recorded("other")


def test_an_interval_does_not_leave_what_the_number_can_be():
    found = claims.verdicts({COSINE: every, LEAD: every}, hidden(0.9, reach=0.5))
    np.testing.assert_allclose(found[["ci_low", "ci_high"]], [[0.4, 1.0], [0.4, 1.4]])


def test_over_seeds_the_mean_decides_for_each_model():
    numbers = {"a": [0.5, 0.6, 0.7, 0.6, 0.5], "b": [0.1, 0.9, 0.1, 0.2, 0.1]}
    index = pd.MultiIndex.from_product([numbers, range(5)], names=["model", "seed"])
    values = pd.Series([v for many in numbers.values() for v in many], index)
    found = claims.verdicts_over_seeds({COSINE: values}, "2 epochs, 5 seeds")
    assert found[["model", "verdict", "sample"]].to_numpy().tolist() == [
        ["a", HOLDS, "2 epochs, 5 seeds"],
        ["b", UNDECIDED, "2 epochs, 5 seeds"],
    ]
    wanted = [seed_interval(many) for many in numbers.values()]
    np.testing.assert_allclose(found[["value", "ci_low", "ci_high"]], [one.row for one in wanted])
    np.testing.assert_allclose(found["p"], [one.p(0.2) for one in wanted])
    # Four seeds are too few.
    few = claims.verdicts_over_seeds({COSINE: values[values.index.get_level_values("seed") < 4]})
    assert set(few["verdict"]) == {NO_INTERVAL}


def test_seeds_on_the_same_texts_have_the_interval_over_texts_added():
    values = pd.Series([0.3, 0.31, 0.32, 0.33, 0.34], pd.Index(range(5), name="seed"))
    estimates = values.map(lambda value: Estimate(value, value - 0.2, value + 0.2))
    (alone,) = claims.verdicts_over_seeds({COSINE: values}).itertuples()
    (both,) = claims.verdicts_over_seeds({COSINE: estimates}).itertuples()
    assert (alone.verdict, both.verdict) == (HOLDS, UNDECIDED)
    assert both.value == alone.value
    reach = (alone.ci_high - alone.ci_low) / 2
    assert (both.ci_high - both.ci_low) / 2 == pytest.approx(math.hypot(reach, 0.2))


def test_the_sample_says_how_few_units_there_are():
    few, many = hidden(0.5), hidden(0.5)
    few.run = few.run | {"units": 7}
    many.run = many.run | {"units": 30}
    assert (
        claims.verdicts({COSINE: every}, few)["sample"].item() == "40 texts of texts, 7 independent"
    )
    assert claims.verdicts({COSINE: every}, many)["sample"].item() == "40 texts of texts"


def test_over_seeds_each_column_has_to_lie_beyond_the_bound():
    seeds = pd.RangeIndex(5, name="seed")
    frame = pd.DataFrame(
        {"one": [0.5, 0.6, 0.7, 0.6, 0.5], "two": [0.1, 0.11, 0.1, 0.12, 0.1]}, seeds
    )
    found = claims.verdicts_over_seeds({COSINE: frame})
    assert found["verdict"].tolist() == [FAILS]
    wanted = least([seed_interval(frame[column]) for column in frame])
    np.testing.assert_allclose(found[["value", "ci_low", "ci_high"]], [wanted.row])
    assert claims.verdicts_over_seeds({COSINE: frame["one"]})["verdict"].tolist() == [HOLDS]


def near(models: int) -> pd.DataFrame:
    """A number 2.1 standard errors above its bound for so many models, and one that is 10 above for
    a last one.
    """
    rows = [
        claims.judged(COSINE, Estimate(0.41, 0.41 - 0.196, 0.41 + 0.196)) | {"model": str(i)}
        for i in range(models)
    ]
    return pd.DataFrame(
        [*rows, claims.judged(COSINE, Estimate(0.9, 0.86, 0.94)) | {"model": "far"}]
    )


def test_after_holm_a_claim_holds_for_fewer_models_at_once():
    verdicts = near(5)
    assert set(verdicts["verdict"]) == {HOLDS}
    assert claims.corrected(verdicts).tolist() == [*5 * [UNDECIDED], HOLDS]
    # For one claim at a time: another has its own models.
    other = pd.DataFrame(
        [claims.judged(LEAD, Estimate(0.21, 0.21 - 0.196, 0.21 + 0.196)) | {"model": "far"}]
    )
    assert claims.corrected(pd.concat([verdicts, other], ignore_index=True)).tolist()[-1] == HOLDS
    # What has no interval, or none of the numbers, is as it was.
    without = [claims.judged(COSINE, Estimate(value)) | {"model": "x"} for value in (0.5, math.nan)]
    assert claims.corrected(pd.concat([verdicts, pd.DataFrame(without)])).tolist()[-2:] == [
        NO_INTERVAL,
        NOT_APPLICABLE,
    ]


def test_the_words_for_a_verdict_are_those_after_the_correction():
    words = {HOLDS: "yes", FAILS: "no", UNDECIDED: "perhaps"}
    assert claims.said(near(5), COSINE, words) == "perhaps"
    assert claims.said(near(0), COSINE, words) == "yes"
    assert claims.said(near(0), LEAD, words | {NOT_APPLICABLE: "none"}) == "none"
    assert claims.said(near(0), LEAD, words) == "perhaps"


def test_verdicts_are_shown_as_a_line_for_each_claim_and_a_chip_for_each_model():
    rows = near(2)
    rows.loc[:, "model"] = ["a", "<b>", "far"]
    data, metadata = shown(rows)._repr_mimebundle_()
    text = data["text/html"]
    assert text.count("<details") == 1
    assert re.findall(r'<span class="chip ([^"]*)">([^<]*)</span>', text) == [
        ("holds lost", "a: holds"),
        ("holds lost", "&lt;b&gt;: holds"),
        ("holds", "far: holds"),
    ]
    assert text.count(f"holds (corrected: {UNDECIDED})") == 2
    assert escape("Cosines are <high>.") in text
    assert "<td>&lt; 0.0001</td>" in text
    assert "0.410 [0.214, 0.606]" in text
    assert "the claim holds above 0.2. Set before the first measurement." in text
    # Whoever gathers verdicts has the numbers in full.
    np.testing.assert_allclose([row["p"] for row in metadata["verdicts"]], rows["p"], rtol=1e-12)
    assert [row["after"] for row in metadata["verdicts"]] == [UNDECIDED, UNDECIDED, HOLDS]
    assert data["text/plain"].count("holds") == 3


def test_the_interval_is_drawn_on_one_scale_with_its_bound():
    """From 0.2, the bound, to 0.94: 76 units wide, 4 from the edge."""
    line = claim_line(shown(near(1)).rows)
    drawn = [[*map(float, ends)] for ends in re.findall(r"M([\d.]+) 7H([\d.]+)", line)]
    ends = 4 + 76 * (np.array([[0.214, 0.606], [0.86, 0.94]]) - 0.2) / 0.74
    np.testing.assert_allclose(drawn, ends, atol=0.06)
    assert line.count('<path d="M4.0 0v14"') == 2
    # Each beside its verdict.
    assert (
        len(re.findall(r'<span class="verdict"><span class="chip [^>]*>[^<]*</span><svg', line))
        == 2
    )


def test_rows_say_in_what_they_differ():
    """What is alike in all is left out, but for the model; who reads the metadata has all of it."""
    one = pd.DataFrame([claims.judged(COSINE, Estimate(0.3, 0.25, 0.35))])
    two = pd.concat(
        [one.assign(model="m", dataset="news", variant=name) for name in ("by position", "flat")]
    )
    chips = [
        re.findall(r'class="chip [^"]*">([^<]*)<', shown(rows)._repr_html_()) for rows in (two, one)
    ]
    assert chips == [["m, by position: holds", "m, flat: holds"], ["holds"]]
    _, metadata = shown(two)._repr_mimebundle_()
    assert [row["dataset"] for row in metadata["verdicts"]] == ["news", "news"]


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_claim_of_a_paper_is_whole(paper):
    for name, claim in claims.load(paper).items():
        assert name.startswith(f"{paper}-")
        assert claim.limits[0] <= claim.bound <= claim.limits[1], name
        assert claim.direction in ("above", "below"), name
        assert len(claim.sentence.split()) <= 20, name
        assert "utterance" not in claim.sentence + claim.quantity, name
        if claim.statistic != "cell":
            module, _, function = claim.statistic.rpartition(".")
            assert callable(getattr(importlib.import_module(module), function)), name


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_bound_says_why_it_was_set(paper):
    """When is said where it is known; the notation says so of the others, once."""
    for claim in claims.load(paper).values():
        assert len(claim.rationale.split()) >= 5, claim.id
        assert "on record" not in claim.rationale, claim.id


SHIPPED = sorted((data_directory() / "measurements").glob("*/verdicts.csv"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_recorded_verdicts_are_those_that_their_pages_gave(path):
    """Bounds and limits may change after a record: then it is made again."""
    written, found = pd.read_csv(path), claims.recorded(path.parent.name)
    assert found["verdict"].tolist() == written["verdict"].tolist()
    assert found["p"].notna().tolist() == written["p"].notna().tolist()
    np.testing.assert_allclose(found["p"], written["p"], rtol=1e-3, atol=1e-6)
