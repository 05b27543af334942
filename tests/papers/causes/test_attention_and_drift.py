"""Dimensions and means taken away: planted rows give the numbers and verdicts that were planted."""

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from planted import run_cells
from sklearn.metrics import roc_auc_score

from analysis_book.papers import causes, recorded
from analysis_lib import load_model, measure
from analysis_lib.capture.interventions import Replace
from analysis_lib.corpora import Corpus
from analysis_lib.models import title

GROUPS = ["all", *map(str, range(4))]


def planted(weights: dict[str, list[float]], quantity: str = "cls") -> pd.DataFrame:
    """Rows of ``layer_by_layer``: a number per arm and layer, and a little more or less without
    each group.
    """
    rows = {(arm, quantity, i): w for arm, ws in weights.items() for i, w in enumerate(ws, 1)}
    steps = np.array([0, -2, -1, 0, 1]) * 1e-4
    values = np.add.outer([*rows.values()], steps) * (1 + steps)
    frame = pd.DataFrame(values, pd.MultiIndex.from_tuples(rows), GROUPS)
    return frame.rename_axis(["arm", "quantity", "layer"])


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus("planted", tiny.TEXTS, units=[*"aabbccdd"])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return load_model(str(tiny.save(tmp_path_factory.mktemp("bert"), "bert")))


def judged(attention: dict[str, list[float]], matched: list[float]) -> dict[str, tuple[float, str]]:
    """The numbers and verdicts of the page on attention."""
    names = {
        "attention": planted(attention),
        "band": planted({"matched 1": matched, "random 1": [0.0, 0.0]}),
    }
    tables = type("Told", (), {"title": "planted"})
    rows = run_cells(
        "causes/attention",
        "def lost(",
        "def statistics(",
        "every = {",
        **names,
        tables=tables,
        corpus=[],
        beside=[],
    )
    rows = rows["verdicts"]
    return {row.id: (row.value, row.verdict) for row in rows.itertuples()}


def test_what_outliers_do_is_judged_on_planted_weights():
    arms = {
        "unchanged": [0.4, 0.8],
        "mean": [0.2, 0.2],
        "only outliers": [0.4, 0.6],
        "other of the type": [0.4, 0.72],
    }
    found = judged(arms, [0.4, 0.64])
    # The parts lost are 0.5 and 0.75, of random ones 0 and 0.2; what is kept 1 and 0.75; lost
    # within types 0 and 0.1.
    assert found["causes-outliers-draw-cls"] == (pytest.approx(0.625 - 0.1), "holds")
    assert found["causes-outliers-are-enough"] == (pytest.approx(0.875), "holds")
    assert found["causes-outliers-are-types"] == (pytest.approx(0.05 / 0.625), "holds")


def test_a_paired_interval_is_of_the_difference():
    rows = planted({"unchanged": [0.4], "query": [0.5]}, "entropy")
    change = (rows.loc["query"] - rows.loc["unchanged"]).mean()
    found = causes.interval(change)
    assert found.value == pytest.approx(0.1)
    # What is added to both is gone; what is left is 0.1 · (1 + step), and Student's quantile has 3
    # degrees of freedom.
    spread = np.sqrt(3 / 4 * 5) * 1e-5
    assert found.ci_high - found.ci_low == pytest.approx(2 * 3.182446 * spread, rel=1e-4)


# By title, the name of a model and what it reads.
READ = {"Planted": ("planted", range(40))}


def test_the_verdicts_on_drift_follow_the_planted_entropy():
    sharper = planted({"unchanged": [0.4, 0.5], "query": [0.5, 0.6], "key": [0.4, 0.5]}, "entropy")
    alike = planted(
        {"unchanged": [0.4, 0.5], "query": [0.399, 0.499], "key": [0.4, 0.5]}, "entropy"
    )
    for trained, untrained, verdicts in (
        (sharper, alike, ["holds"] * 2),
        (alike, sharper, ["does not hold"] * 2),
    ):
        measured = {("Planted", "trained"): trained, ("Planted", "untrained"): untrained}
        names = {"measured": measured, "image_models": [], "title": str, "read": READ}
        rows = run_cells(
            "causes/drift", "every = pd.concat", "effects = means", "rows, judged = ", **names
        )["verdicts"]
        assert rows["verdict"].tolist() == verdicts
        values = (0.1, 0.001) if trained is sharper else (-0.001, 0.1)
        assert rows["value"].tolist() == pytest.approx(values)


def test_the_mean_key_of_a_model_that_rotates_is_judged():
    arms = {"unchanged": [0.4, 0.5], "query_unrotated": [0.5, 0.6], "key_unrotated": [0.46, 0.54]}
    measured = {("Planted", "trained"): planted(arms, "entropy")}
    names = {"measured": measured, "image_models": [], "title": str, "read": READ}
    rows = run_cells(
        "causes/drift", "every = pd.concat", "effects = means", "rows, judged = ", **names
    )["verdicts"]
    assert rows.set_index("id")["value"].to_dict() == {
        "causes-query-drift-sharpens": pytest.approx(0.1),
        "causes-rotary-key-drift-sharpens": pytest.approx(0.05),
    }


def test_even_attention_cannot_fail_and_is_not_judged():
    trained = planted({"unchanged": [0.4, 0.5], "query": [0.5, 0.6]}, "entropy")
    even = planted({"unchanged": [0.996, 0.998], "query": [0.996, 0.998]}, "entropy")
    measured = {("Planted", "trained"): trained, ("Planted", "untrained"): even}
    names = {"measured": measured, "image_models": [], "title": str, "read": READ}
    rows = run_cells(
        "causes/drift", "every = pd.concat", "effects = means", "rows, judged = ", **names
    )["verdicts"]
    assert rows[["id", "model"]].to_numpy().tolist() == [["causes-query-drift-sharpens", "Planted"]]


def test_random_dimensions_are_as_many_and_the_matched_near_in_variance():
    variances = pd.DataFrame({"layer": 1, "dimension": range(60), "variance": 1.1 ** np.arange(60)})
    named = {1: [30, 59]}
    found = causes.random_arms("key_side", named, {"dimension_variances": variances}, 5, by="mean")
    assert [*found] == [f"{kind} {n}" for kind in ("random", "matched") for n in range(1, 6)]
    for name, arm in found.items():
        assert (arm[1].where, arm[1].layers) == ("key_side", (1,))
        assert len({*arm[1].dimensions}) == 2
        if name.startswith("matched"):
            first, second = arm[1].dimensions  # In the order of variance: for 59, then for 30.
            assert 49 <= first <= 58
            assert second in {*range(25, 36)} - {30}
    fewer = causes.random_arms("key_side", named, {"dimension_variances": variances}, 2, by="mean")
    assert fewer.items() <= found.items()


def test_variances_are_those_of_what_attention_reads(bert, corpus):
    table = measure(bert, corpus, [causes.DimensionVariances()], progress=False)[
        "dimension_variances"
    ]
    read = []
    with torch.no_grad():
        for text in corpus.items:
            out = bert.model(**bert.tokenizer(text, return_tensors="pt"), output_hidden_states=True)
            read.append(out.hidden_states[1][0])
    expected = torch.cat(read).double().var(0, unbiased=False)
    np.testing.assert_allclose(table.query("layer == 2")["variance"], expected, rtol=1e-4)


def test_where_keys_rotate_their_mean_before_rotation_is_taken_away(tmp_path, corpus):
    llama = load_model(str(tiny.save(tmp_path / "llama", "llama")))
    found = causes.drift(llama, corpus)
    layers = len([*llama.attending])
    assert [*found.index.unique("arm")] == ["unchanged", "query_unrotated", "key_unrotated"]
    for arm in found.index.unique("arm"):
        assert [*found.loc[arm].index.unique("layer")] == [*range(1, layers + 1)]
    change = found.loc["key_unrotated", "entropy"] - found.loc["unchanged", "entropy"]
    assert change["all"].abs().min() > 1e-6


def test_each_layer_is_changed_alone_and_the_mean_key_moves_nothing(bert, corpus):
    found = causes.drift(bert, corpus)
    key = found.loc["key"] - found.loc["unchanged"].reindex(found.loc["key"].index)
    assert key.abs().max().max() < 1e-6
    # As one measurement says.
    change = Replace("query", layers=(2,), by="centre", of="others")
    table = measure(bert, corpus, "attention_entropy", intervention=(change,), progress=False)[
        "attention_entropy"
    ]
    expected = table.query("layer == 2")["entropy_normalised"].mean()
    assert found.loc[("query", "entropy", 2), "all"] == pytest.approx(expected, abs=1e-12)
    assert found.columns.tolist() == ["all", *map(str, range(4))]


def test_texts_of_one_article_are_told_by_their_mean_vectors(bert, corpus):
    means = []
    with torch.no_grad():
        for text in corpus.items:
            means.append(
                bert.model(**bert.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            )
    unit = torch.nn.functional.normalize(torch.stack(means).double(), dim=1)
    similar, articles = (unit @ unit.T).numpy(), np.array(corpus.units)
    one = [
        roc_auc_score(np.delete(articles == articles[i], i), np.delete(similar[i], i))
        for i in range(len(articles))
    ]
    found = causes.same_article(bert, corpus, Replace("residual", by="nothing"), 1)
    assert found.loc["area", "all"] == pytest.approx(np.mean(one), abs=1e-6)


def test_what_ships_is_read_for_the_same_texts_alone(tmp_path, monkeypatch, corpus):
    monkeypatch.setattr(recorded, "data_directory", lambda: tmp_path)
    (tmp_path / "measurements" / "causes").mkdir(parents=True)
    rows = planted({"mean": [0.1, 0.2]})
    causes.ship(rows, "key-side-some/model", corpus)
    known = causes.shipped("key-side-some/model", corpus)
    pd.testing.assert_frame_equal(known, rows, rtol=1e-5)
    assert causes.shipped("key-side-some/model", corpus.take([0, 1])) is None
    assert causes.shipped("other", corpus) is None


def test_what_single_dimensions_do_is_the_change_of_a_weight_with_an_interval_of_pairs(
    bert, corpus, monkeypatch
):
    monkeypatch.setattr(causes, "outliers", lambda _: {1: [2], 2: [3, 5]})
    found = causes.removed(bert, corpus, [2])
    places = found[["layer", "dimension", "arm"]].drop_duplicates().to_records(index=False).tolist()
    alone = [(layer, 2, "alone") for layer in (1, 2)] + [
        (2, d, arm) for d in (3, 5) for arm in ("alone", "together")
    ]
    assert places == alone
    assert [*found["model"].unique()] == [title(bert.name)]
    found = found.set_index(["layer", "dimension", "arm", "key_type"])
    for dimensions, arm in (((5,), "alone"), ((3, 5), "together")):
        weights = {}
        for by in ("nothing", "mean"):
            change = Replace("key_side", layers=(2,), dimensions=dimensions, by=by, of="others")
            weights[by] = causes.attention(bert, corpus, change, 2).loc["cls"]
        expected = causes.interval(weights["mean"] / weights["nothing"] - 1)
        assert abs(expected.value) > 1e-5
        for dimension in dimensions:
            row = found.loc[2, dimension, arm, "cls"]
            assert row[["effect", "ci_low", "ci_high"]].tolist() == pytest.approx(expected.row)


def test_a_key_without_a_dimension_loses_what_was_recorded_as_its_effect(bert, corpus):
    """The same pass as of ``removed``, with the other sign."""
    lost = causes.without(bert, corpus, 2)
    effects = causes.removed(bert, corpus, [2]).query("dimension == 2 and arm == 'alone'")
    both = lost.merge(effects, on=["layer", "key_type"], suffixes=("", "_of_effect"))
    assert len(both) == len(lost) == len(effects)
    assert set(lost["layer"]) == {1, 2, 3}
    np.testing.assert_allclose(both["lost"], -both["effect"], atol=1e-12)
    np.testing.assert_allclose(both["ci_low"], -both["ci_high_of_effect"], atol=1e-12)


def test_what_is_lost_is_a_part_of_the_weight_before():
    rows = planted({"unchanged": [0.4, 0.8], "mean": [0.1, 1.2]})
    lost = causes.lost(rows, "mean").set_index("layer")
    assert lost["lost"].tolist() == pytest.approx([0.75, -0.5])
    assert (lost["key_type"] == "cls").all()
    assert (lost["ci_low"] <= lost["lost"]).all()
    assert (lost["lost"] <= lost["ci_high"]).all()
    assert (lost["groups"] == 4).all()


def test_effects_are_those_of_the_same_texts_and_models(tmp_path, monkeypatch, corpus):
    monkeypatch.setattr(recorded, "data_directory", lambda: tmp_path)
    (tmp_path / "measurements" / "causes").mkdir(parents=True)
    place = {"layer": 2, "dimension": 99, "arm": "alone", "key_type": "cls"}
    rows = pd.DataFrame([place | {"effect": -0.9, "ci_low": -0.95, "ci_high": -0.85, "groups": 4}])
    named = [
        {"model": name, "texts": texts.sha256[:12]}
        for name, texts in (("minilm", corpus), ("bert-4", corpus))
    ]
    recorded.write(
        causes.REMOVED, [(rows, named[0]), (rows, named[1]), (rows, named[0] | {"texts": "other"})]
    )
    found = causes.effects(["minilm", "path/to/model"], corpus)
    assert found.to_dict("records") == [{"model": "MiniLM", **rows.drop(columns="groups").iloc[0]}]
    assert causes.effects(["minilm"], corpus.take([0, 1])).empty
    assert causes.effects(["minilm"], corpus.take([0, 1]), corpus)["model"].tolist() == ["MiniLM"]


def test_what_the_stream_is_worth_is_a_mean_over_layers():
    areas = planted({"unchanged": [0.9], "mean": [0.8, 0.6]}, "area")
    costs = run_cells("causes/checks", "of_arm =", areas=areas)["costs"]
    assert costs["arm"].tolist() == ["mean"]
    assert costs["area lost"].item().startswith("0.20 [")
