"""Finished measurements are kept, and found by what they depend on."""

import json
import threading

import numpy as np
import pandas as pd
import pytest

from analysis_lib import Corpus, LoadedModel, compare, load_corpus, load_model, measure, metrics
from analysis_lib.measurement import comparison, measuring, shipped
from analysis_lib.store import measurements_directory

SILENT = {"progress": False}


@pytest.fixture
def corpus() -> Corpus:
    return load_corpus("news", limit=6, seed=0)


@pytest.fixture
def passes(tmp_path, monkeypatch) -> list[list[str]]:
    """The metrics of every pass over a corpus, with a store that is empty at first."""
    found, measured = [], measuring._merged
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "store"))

    def spy(model, corpus, wanted, *rest):
        found.append([metric.name for metric in wanted])
        return measured(model, corpus, wanted, *rest)

    monkeypatch.setattr(measuring, "_merged", spy)
    return found


def test_only_what_is_missing_is_measured(minilm, corpus, passes):
    first = measure(minilm, corpus, "anisotropy,dimension_means", **SILENT)
    both = measure(minilm, corpus, "anisotropy,attention_entropy", **SILENT)
    again = measure(minilm, corpus, "attention_entropy,anisotropy", **SILENT)
    assert passes == [["anisotropy", "dimension_means"], ["attention_entropy"]]
    pd.testing.assert_frame_equal(first["anisotropy"], again["anisotropy"])
    pd.testing.assert_frame_equal(both["attention_entropy"], again["attention_entropy"])
    # Jackknife intervals need the sums by group.
    statistic = np.mean(first["anisotropy"]["cosine"])
    assert again.interval(lambda t: t["anisotropy"]["cosine"].mean()).value == pytest.approx(
        statistic
    )


def test_what_was_read_is_known_from_both_passes(minilm, corpus, passes):
    measure(minilm, corpus, "dimension_means", **SILENT)
    joined = measure(minilm, corpus, "dimension_means,qk_alignment", **SILENT)
    at_once = measure(minilm, corpus, "anisotropy", **SILENT)
    assert passes == [["dimension_means"], ["qk_alignment"], ["anisotropy"]]
    assert joined.report.tokens == at_once.report.tokens > 0
    assert joined.layers["width"].tolist() == [384] * 7
    assert joined.layers["heads"].dropna().tolist() == [12] * 6


@pytest.mark.parametrize("change", ["corpus", "setting", "length", "parameter", "dtype", "unit"])
def test_another_corpus_setting_parameter_or_model_is_measured_anew(
    minilm, minilm64, corpus, passes, change
):
    measure(minilm, corpus, [metrics.Isotropy(["query"])], **SILENT)
    model, other, metric, settings = minilm, corpus, metrics.Isotropy(["query"]), {}
    match change:
        case "corpus":
            other = corpus.take(range(5))
        case "setting":
            settings = {"special_tokens": False}
        case "length":
            settings = {"max_length": 8}
        case "parameter":
            metric = metrics.Isotropy(["key"])
        case "dtype":
            model = minilm64
        case "unit":
            other = Corpus(
                corpus.name, corpus.items, units=["one", "one", "two", "two", "three", "three"]
            )
    measure(model, other, [metric], **settings, **SILENT)
    assert len(passes) == 2


def test_two_that_measure_the_same_at_once_measure_once(minilm, corpus, passes):
    others = [load_model("minilm") for _ in range(2)]
    threads = [
        threading.Thread(target=measure, args=(model, corpus, "anisotropy"), kwargs=SILENT)
        for model in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passes == [["anisotropy"]]


def test_a_damaged_file_is_measured_again(minilm, corpus, passes):
    measure(minilm, corpus, "anisotropy", **SILENT)
    (path,) = measurements_directory().glob("minilm-on-news-*/anisotropy-*.npz")
    path.write_bytes(path.read_bytes()[:1000])
    measure(minilm, corpus, "anisotropy", **SILENT)
    measure(minilm, corpus, "anisotropy", **SILENT)
    assert len(passes) == 2


def test_a_model_of_this_process_alone_is_never_taken_from_the_store(minilm, corpus, passes):
    live = LoadedModel("mine", "", minilm.model, minilm.processor)
    for _ in range(2):
        measure(live, corpus, "anisotropy", **SILENT)
    assert len(passes) == 2
    assert not measurements_directory().exists()


def test_an_empty_name_switches_the_store_off(minilm, corpus, passes, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    for _ in range(2):
        measure(minilm, corpus, "anisotropy", **SILENT)
    assert len(passes) == 2


def test_a_measurement_that_ships_is_the_one_that_its_run_describes():
    found = shipped("mpnet-base")
    assert (found.run["model"], found.run["texts"], found.run["seed"]) == ("mpnet-base", 1500, 0)
    assert {name: len(found[name]) for name in found} == found.run["tables"]
    assert found.layers["width"].tolist() == [768] * 13


def test_shipped_tables_warn_where_the_code_has_changed(monkeypatch):
    found = shipped("mpnet-base")
    assert found.code_warning == ""
    found.run = json.loads(json.dumps(found.run))
    found.run["formulas"]["metrics"]["anisotropy"]["version"] += 1
    assert "The tables of MPNet were recorded by another version of the code" in found.code_warning


def test_a_comparison_loads_no_model_whose_measurements_are_kept(minilm, passes, monkeypatch):
    models = {"news": ["minilm"], "digits": ["digits-resnet", "digits-vit"]}
    asked = {"metrics": "anisotropy", "limit": 6, "seed": 0, "maps": "positions", **SILENT}
    first = compare(models, **asked)
    assert len(passes) == 6
    monkeypatch.setattr(comparison, "load_model", None)
    again = compare(models, **asked)
    pd.testing.assert_frame_equal(first["anisotropy"], again["anisotropy"])
    assert again.trained["MiniLM"].run["model"] == "minilm"
    assert again.trained["MiniLM"].layers.equals(first.trained["MiniLM"].layers)
    # What is no map is the same for every reading of maps.
    text = compare({"news": ["minilm"]}, **asked | {"maps": "flatten"})
    assert (
        text["anisotropy"]["cosine"].tolist()
        == first["anisotropy"].query("model == 'MiniLM'")["cosine"].tolist()
    )
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        compare({"digits": ["digits-resnet"]}, **asked | {"maps": "flatten"})
