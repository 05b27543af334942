"""What ships is what the code measures today: one small table of each kind, measured anew.

A formula that has changed without a new version fails here. Tolerances are those between
processors.
"""

from dataclasses import replace

import pandas as pd
import pytest

from analysis_book.papers import causes
from analysis_book.papers.fosse import trials
from analysis_book.papers.fosse.splits import splits
from analysis_book.training import dynamics, pretrain
from analysis_book.training.dynamics import METRICS, Dynamics
from analysis_book.training.runs import RUNS
from analysis_lib import load_corpus, load_model, measure
from analysis_lib.capture.interventions import Replace
from analysis_lib.measurement import shipped, shipping, with_shipped

CLOSE = {"rtol": 1e-3, "atol": 1e-5}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")


def test_an_untrained_twin():
    corpus = load_corpus("wikipedia", limit=1500, seed=0)
    recorded = shipped("untrained/text-gpt2-3")
    now = measure(load_model("text-gpt2:untrained@seed=3"), corpus, [*recorded], progress=False)
    assert recorded.is_current
    for name, table in now.items():
        pd.testing.assert_frame_equal(recorded[name], table, **CLOSE)


def test_a_training_run_before_its_first_step(tmp_path):
    """The first checkpoint needs no training: its weights depend on the settings and the seed
    alone.
    """
    recorded = Dynamics.load(shipping.home() / "modernbert-12")
    pretrain(tmp_path / "run", replace(RUNS["modernbert-12"], steps=1), seeds=(0,))
    corpus = load_corpus("wikipedia:held-out", limit=128, seed=0)
    now = dynamics._tables(load_model(str(tmp_path / "run" / "seed_0-step_0")), corpus)
    assert recorded.code_warning == ""
    assert recorded.before_rotation
    for name in METRICS:
        first = recorded[name].query("seed == 0 and step == 0").drop(columns=["seed", "step"])
        measured = now[name][first.columns]
        pd.testing.assert_frame_equal(first.reset_index(drop=True), measured, **CLOSE)


def test_measurements_that_ship_stand_beside_those_of_the_same_texts_alone():
    model, texts = load_model("text-gpt2"), load_corpus(["a text", "another one"])
    tables = measure(model, texts, "anisotropy", progress=False)
    assert [*with_shipped(tables, ["smollm2-135m"])] == [tables.title]
    tables.run["data"] = "wikipedia"
    assert [*with_shipped([tables], ["smollm2-135m"])] == [tables.title, "SmolLM2"]
    tables.run["model"] = "smollm2-135m"
    assert [*with_shipped([tables], ["smollm2-135m"])] == [tables.title]


def test_a_trial():
    """One classifier of the shipped ones is trained anew."""
    settings = shipping.descriptions("results.json")["reviews"]["settings"]["trials"]
    train = {name: settings[name] for name in ("epochs", "patience")}
    row = {**trials.DEFAULTS, "data": "reviews"}
    now = trials._trial(row, splits("reviews", settings["limit"]), settings["utterances"], train)
    keys = ["variant", "layers", "entropy_weight", "seed", "stage", "quantity", "layer"]
    both = now.merge(trials._read()["reviews"], on=keys, suffixes=("", "_recorded"))
    assert len(both) == len(now)
    untrained = both["stage"] == "untrained"
    pd.testing.assert_series_equal(
        both.loc[untrained, "value"],
        both.loc[untrained, "value_recorded"],
        check_names=False,
        **CLOSE,
    )


def test_an_experiment_layer_by_layer():
    corpus = load_corpus("photographs", limit=80, seed=0)
    recorded = (
        causes.shipped("drift-vit-s14", corpus).xs(("query", 1), level=("arm", "layer")).dropna()
    )
    change = Replace("query", layers=(1,), by="centre", of="others")
    now = causes.attention(load_model("vit-s14"), corpus, change, 1).dropna()
    pd.testing.assert_frame_equal(recorded, now, check_names=False, **CLOSE)
