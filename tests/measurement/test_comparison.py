"""Several models side by side: whose rows are whose."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import AnalysisError, load_corpus, load_model, measure, metrics
from analysis_lib.capture.inputs import Settings
from analysis_lib.measurement import shipping
from analysis_lib.measurement.comparison import compare
from analysis_lib.measurement.shipping import Shipped, shipped_twin
from analysis_lib.models import title


def test_each_model_and_its_twin_are_measured_on_the_corpus_of_their_kind(tiny_folder, tmp_path):
    (tmp_path / "lines.txt").write_text(
        "One sentence.\nAnother one, longer.\nA third.\n", encoding="utf-8"
    )
    text, image, data = (
        str(tiny_folder("bert")),
        str(tiny_folder("resnet-basic")),
        str(tmp_path / "lines.txt"),
    )
    comparison = compare(
        {data: [text], "digits:test": [image]}, "anisotropy", limit=3, twins=2, progress=False
    )
    assert list(comparison.runs) == [
        (name, twin) for name in (text, image) for twin in (None, 0, 1)
    ]
    table = comparison["anisotropy"]
    for (model, twin), tables in comparison.runs.items():
        rows = table[
            (table["model"] == title(model))
            & (table["twin"].fillna(-1) == (-1 if twin is None else twin))
        ]
        assert (rows["trained"] == (twin is None)).all()
        np.testing.assert_array_equal(rows["cosine"], tables["anisotropy"]["cosine"])
        widths = tables.layers.set_index("layer")["width"]
        assert rows["width"].tolist() == widths[rows["layer"]].tolist()
    assert not table["cosine"].isna().any()
    alone = measure(load_model(text), load_corpus(data, 3), "anisotropy", progress=False)
    np.testing.assert_array_equal(
        comparison.trained[title(text)]["anisotropy"]["cosine"], alone["anisotropy"]["cosine"]
    )


def test_a_twin_has_no_twin_and_none_is_measured_where_none_is_wanted(tiny_folder):
    resnet = str(tiny_folder("resnet-basic"))
    twin = f"{resnet}:untrained"
    assert list(compare({"digits:test": [twin]}, "anisotropy", limit=2).runs) == [(twin, None)]
    assert list(compare({"digits:test": [resnet]}, "anisotropy", limit=2, twins=0).runs) == [
        (resnet, None)
    ]


def test_untrained_twins_are_one_line_with_an_interval_over_draws_of_the_weights(tiny_folder):
    bert = str(tiny_folder("bert"))
    comparison = compare({"news": [bert]}, "anisotropy", limit=6, twins=5, progress=False)
    lines = comparison.by_weights("anisotropy", "cosine").set_index(["weights", "layer"])
    rows = comparison["anisotropy"].query("space == 'hidden'").set_index("layer")
    own = rows[rows["trained"]]
    np.testing.assert_array_equal(lines.loc["trained", "cosine"], own["cosine"])
    np.testing.assert_array_equal(lines.loc["trained", "ci_low"], own["ci_low"])
    twins = rows[~rows["trained"]].groupby("layer")
    np.testing.assert_allclose(lines.loc["untrained", "cosine"], twins["cosine"].mean())
    # Student's over five draws (2.776), and the mean half-width over texts, in quadrature.
    over_draws = 2.7764451 * twins["cosine"].std() / np.sqrt(5)
    over_texts = (twins["ci_high"].mean() - twins["ci_low"].mean()) / 2
    reach = lines.loc["untrained", "ci_high"] - lines.loc["untrained", "ci_low"]
    np.testing.assert_allclose(reach, 2 * np.hypot(over_draws, over_texts), rtol=1e-6)
    alone = compare({"news": [bert]}, "anisotropy", limit=6, twins=0, progress=False)
    assert set(alone.by_weights("anisotropy", "cosine")["weights"]) == {"trained"}


@pytest.mark.parametrize(
    ("models", "message"), [({"news": []}, "no model"), ({"news": ["a", "a"]}, "a was given twice")]
)
def test_what_cannot_be_compared_is_refused(models, message):
    with pytest.raises(AnalysisError, match=message):
        compare(models, "anisotropy")


def test_a_twin_that_comes_with_the_book_is_as_measured_now(monkeypatch, tmp_path):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path))
    asked = {"metrics": "anisotropy,isotropy", "limit": 1500, "seed": 0, "progress": False}
    twin = compare({"wikipedia": ["text-gpt2"]}, **asked).runs["text-gpt2", 0]
    assert isinstance(twin, Shipped)
    assert not twin.code_warning
    corpus = load_corpus("wikipedia", 1500, 0)
    now = measure(load_model("text-gpt2:untrained"), corpus, asked["metrics"], progress=False)
    for name, table in now.items():
        pd.testing.assert_frame_equal(twin[name], table, rtol=1e-3, atol=1e-5)
    pd.testing.assert_frame_equal(twin.layers, now.layers, check_dtype=False)


def test_a_twin_of_other_texts_weights_settings_or_code_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path))
    corpus = load_corpus("wikipedia", 1500, 0)
    known = ("text-gpt2:untrained@seed=1", corpus, "anisotropy", Settings())
    assert shipped_twin(*known) is not None
    # Text has no maps, whatever is asked.
    assert shipped_twin(*known[:3], Settings(maps="positions")) is not None
    assert shipped_twin("digits-vit:untrained@seed=1", *known[1:]) is None
    assert shipped_twin(known[0], load_corpus("wikipedia", 1499, 0), *known[2:]) is None
    assert shipped_twin(*known[:2], "anisotropy,head_means", known[3]) is None
    assert shipped_twin(*known[:3], Settings(special_tokens=False)) is None
    assert shipped_twin(*known[:2], [metrics.Isotropy(["query"])], known[3]) is None
    monkeypatch.setattr(metrics.Anisotropy, "version", metrics.Anisotropy.version + 1)
    assert shipped_twin(*known) is None


def test_every_twin_that_comes_with_the_book_is_up_to_date():
    folders = sorted(path.parent for path in shipping.home().glob("untrained/*/run.json"))
    assert folders
    assert [folder.name for folder in folders if shipping.Shipped(folder).code_warning] == []


def test_differences_are_paired_over_texts(tiny_folder):
    """By hand: the same group of texts is left out of both models at a time."""
    names = [str(tiny_folder(name)) for name in ("bert", "roberta")]
    asked = {"limit": 12, "seed": 0, "twins": 0, "progress": False}
    found = compare({"news": names}, "anisotropy,attention_entropy,dimension_means", **asked)
    first, other = found.trained.values()
    row = (
        found.differences("anisotropy")
        .query("space == 'query' and layer == 2 and head == 1")
        .iloc[0]
    )
    assert (row["model"], row["compared_with"], row["quantity"]) == (
        *reversed([*found.trained]),
        "cosine",
    )

    def cosine(table: pd.DataFrame) -> float:
        return table.query("space == 'query' and layer == 2 and head == 1")["cosine"].item()

    estimate = first.interval(lambda a, b: cosine(b["anisotropy"]) - cosine(a["anisotropy"]), other)
    assert row[["difference", "ci_low", "ci_high"]].tolist() == pytest.approx(
        [*estimate.row], rel=1e-9
    )
    entropies = found.differences("attention_entropy")
    assert {*entropies["quantity"]} == {"entropy_nats", "entropy_normalised"}
    assert len(entropies) == 2 * len(first["attention_entropy"])
    means = found.differences("dimension_means")
    # What has no [SEP] of its own kind is compared in what both have.
    assert {*means["token_type"]} == {*first["dimension_means"]["token_type"].unique()} & {
        *other["dimension_means"]["token_type"].unique()
    }


def test_models_of_other_sizes_are_compared_where_both_have_something(tiny_folder):
    names = [str(tiny_folder(name)) for name in ("bert", "gpt2")]
    found = compare(
        {"news": names}, "anisotropy,outlier_dimensions", limit=5, twins=0, progress=False
    )
    rows = found.differences("anisotropy")
    depth = min(tables["anisotropy"]["layer"].max() for tables in found.trained.values())
    assert rows["layer"].max() == depth
    assert found.differences("outlier_dimensions").empty
    assert (
        compare({"news": names[:1]}, "anisotropy", limit=5, twins=0).differences("anisotropy").empty
    )


def test_two_precisions_of_one_model_stand_side_by_side(tiny_folder):
    bert = str(tiny_folder("bert"))
    found = compare(
        {"news": [bert, f"{bert}@dtype=bfloat16"]}, "anisotropy", limit=8, twins=1, progress=False
    )
    assert [*found.trained] == [title(bert), f"{title(bert)} (bfloat16)"]
    assert [tables.run["dtype"] for tables in found.runs.values()] == [
        "float32",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    rows = found.differences("anisotropy")
    assert 0 < rows["difference"].abs().max() < 0.02
