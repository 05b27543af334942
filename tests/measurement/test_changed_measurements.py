"""Measurements with an intervention: the same bytes whoever computes them, a place of their own,
and their effects.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import yaml
from safetensors.torch import save_file

from analysis_lib import AnalysisError, LoadedModel, Replace, Tables, load_model, measure, metrics
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import interventions, measuring, shards

CORPUS = Corpus("texts", tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS))
FEW = "anisotropy,attention_entropy,attention_by_token_type"
ARMS = {
    "mean": Replace("key_side", dimensions=(0, 3), by="mean"),
    "principal": Replace("residual", layers=(1,), directions=2, by="noise", of="others"),
    "other": [
        Replace("value", by="other_of_type", seed=3),
        Replace("weights", layers=(2,), tokens=("cls",)),
    ],
}
every_arm = pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)


@pytest.fixture(scope="module")
def model(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder("bert")))


def changed(model: LoadedModel, arm: object = None, **settings) -> Tables:
    return measure(model, CORPUS, FEW, intervention=arm, progress=False, **settings)


def assert_same_bytes(one: Tables, other: Tables) -> None:
    for name in one:
        pd.testing.assert_frame_equal(one[name], other[name], check_exact=True)


def differ(one: Tables, other: Tables) -> bool:
    return not one["attention_entropy"].equals(other["attention_entropy"])


@every_arm
def test_two_workers_and_a_second_run_give_the_same_bytes(model, small_shards, arm, copied_workers):
    expected = changed(model, arm)
    interventions._latest.clear()
    assert_same_bytes(changed(model, arm, workers=2), expected)
    assert_same_bytes(changed(model, arm), expected)
    assert differ(expected, changed(model))


def test_a_cluster_gives_the_same_bytes(model, small_shards, cluster):
    for arm in ARMS.values():
        assert_same_bytes(
            changed(model, arm, scheduler=cluster.scheduler_address), changed(model, arm)
        )


@every_arm
def test_an_interrupted_measurement_goes_on_with_the_same_bytes(
    model, small_shards, tmp_path, monkeypatch, arm
):
    expected, original, done = changed(model, arm), shards.begin, []

    def interrupted(shard, *given):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(shard.index)
        return original(shard, *given)

    with monkeypatch.context() as patch:
        patch.setattr("analysis_lib.measurement.shards.begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            changed(model, arm, checkpoints=tmp_path)
    assert done == [0, 1, 2]
    # A plain measurement does not go on from there.
    assert_same_bytes(changed(model, checkpoints=tmp_path), changed(model))
    interventions._latest.clear()
    measured = []
    monkeypatch.setattr(
        "analysis_lib.measurement.shards.begin",
        lambda shard, *given: measured.append(shard.index) or original(shard, *given),
    )
    assert_same_bytes(changed(model, arm, checkpoints=tmp_path), expected)
    assert measured == [3, 4, 5, 6, 7]


@pytest.fixture
def passes(tmp_path, monkeypatch) -> list[object]:
    """The interventions of every pass, with a store that is empty at first."""
    found, measured = [], measuring._merged
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "store"))

    def spy(model, corpus, wanted, settings, *rest):
        found.append(settings.intervention)
        return measured(model, corpus, wanted, settings, *rest)

    monkeypatch.setattr(measuring, "_merged", spy)
    return found


def test_every_intervention_has_a_place_of_its_own_in_the_store(model, passes):
    base = Replace("key_side", dimensions=(0, 3), by="mean")
    others = [None, *ARMS.values(), Replace("key_side", dimensions=(0, 3), by="mean", of="others")]
    others += [
        Replace("key_side", dimensions=(3, 0), by="zero"),
        Replace("key_side", dimensions=(0,), by="mean"),
    ]
    first = [changed(model, arm) for arm in others]
    assert len(passes) == len(others)
    again = [changed(model, arm) for arm in others]
    assert len(passes) == len(others)
    for one, other in zip(first, again, strict=True):
        assert_same_bytes(one, other)
    assert_same_bytes(changed(model, base), first[1])
    assert len(
        {float(tables["attention_entropy"]["entropy_nats"].sum()) for tables in first}
    ) == len(others)


def test_a_change_of_nothing_is_found_in_the_store_as_none(model, passes):
    plain = changed(model)
    for nothing in (
        [],
        {"layers": []},
        {"tokens": []},
        {"dimensions": []},
        {"directions": []},
        {"by": "nothing"},
    ):
        assert_same_bytes(
            changed(model, {"where": "residual", **nothing} if nothing else nothing), plain
        )
    assert passes == [()]


def test_a_change_of_nothing_gives_the_same_bytes(model):
    for nothing in (Replace("key", by="nothing"), Replace("residual", dimensions=())):
        assert_same_bytes(changed(model, nothing), changed(model))


def test_what_is_gathered_knows_the_units_of_the_texts(model):
    """The same texts in other groups have other halves."""
    arm = Replace("residual", (1,), by="mean", of="others")
    found = []
    for units in (None, [str(n % 7) for n in range(len(CORPUS))]):
        corpus = Corpus("texts", CORPUS.items, units=units)
        found.append(
            measure(model, corpus, [metrics.Anisotropy()], intervention=arm, progress=False)
        )
        interventions._latest.clear()
        fresh = measure(model, corpus, [metrics.Anisotropy()], intervention=arm, progress=False)
        assert_same_bytes(found[-1], fresh)
    assert not found[0]["anisotropy"].equals(found[1]["anisotropy"])


def test_an_effect_has_a_paired_interval(model):
    def mass(tables: Tables) -> float:
        rows = tables["attention_by_token_type"].query("key_type == 'other'")
        return rows["mass"].mean()

    plain, blind = changed(model), changed(model, Replace("weights", tokens=("sep",)))
    effect = plain.interval(lambda before, after: mass(after) - mass(before), blind)
    assert effect.value == pytest.approx(mass(blind) - mass(plain))
    assert 0 < effect.ci_low < effect.value < effect.ci_high
    alone = plain.interval(mass)
    # Paired: what texts have in common, such as their lengths, parts two masses, and not their
    # difference.
    assert effect.ci_high - effect.ci_low < alone.ci_high - alone.ci_low
    # A type that no query sees has no row.
    assert "sep" not in set(blind["attention_by_token_type"]["key_type"])
    # The same change has no effect, and no interval around it.
    again = changed(model, Replace("weights", tokens=("sep",)))
    none = blind.interval(lambda before, after: mass(after) - mass(before), again)
    assert none.value == 0
    assert np.isnan(none.ci_low)


def test_no_dimension_has_a_share_in_keys_that_are_changed_afterwards(model):
    with pytest.raises(
        AnalysisError, match=r"score_contributions makes no sense .* changed after they are made"
    ):
        measure(model, CORPUS, "score_contributions", intervention=Replace("key"), progress=False)
    assert (
        "score_terms"
        in measure(model, CORPUS, intervention=Replace("key"), progress=False).run["left_out"]
    )


# --- On the command line --------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(tiny.TEXTS), encoding="utf-8")
    return path


@pytest.mark.parametrize("several", [False, True])
def test_a_file_says_what_is_changed(model, texts, tmp_path, several):
    given = {"where": "key_side", "dimensions": [0, 3], "by": "mean"}
    given = [given, {"where": "weights", "layers": 2, "tokens": "cls"}] if several else given
    (tmp_path / "changes.yml").write_text(yaml.safe_dump(given))
    arguments = [
        "--data",
        str(texts),
        "--intervention",
        str(tmp_path / "changes.yml"),
        "--metrics",
        "anisotropy",
    ]
    out = tmp_path / "out"
    assert main(["measure", "--model", model.name, *arguments, "--out", str(out)]) == 0
    run = json.loads((out / "run.json").read_text())
    assert [one["where"] for one in run["settings"]["intervention"]] == ["key_side", "weights"][
        : 1 + several
    ]
    assert run["settings"]["intervention"][0]["dimensions"] == [0, 3]
    expected = measure(model, list(tiny.TEXTS), "anisotropy", intervention=given, progress=False)[
        "anisotropy"
    ]
    np.testing.assert_allclose(
        pd.read_parquet(out / "anisotropy.parquet")["cosine"], expected["cosine"], rtol=1e-12
    )
    both = tmp_path / "both"
    assert main(["compare", model.name, *arguments, "--twins", "0", "--out", str(both)]) == 0
    compared = pd.read_parquet(both / "anisotropy.parquet")
    np.testing.assert_allclose(compared["cosine"], expected["cosine"], rtol=1e-12)
    assert (
        json.loads((both / "run.json").read_text())["runs"][0]["settings"]["intervention"][0]["by"]
        == "mean"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("", "is empty: give a mapping"),
        ("where: [", "give a mapping such as"),
        ("residual", "the intervention is 'residual': give Replace"),
        ("- 3", "an intervention is (a int|3)"),
        ("{where: residual, layer: 3}", "an intervention has no 'layer': give where, layers"),
        ("{layers: 3}", "an intervention says where"),
        ("{where: residual, directions: true}", "directions is True: give mean"),
        ("{where: residual, directions: [[a]]}", "directions are .* give mean"),
        ("{where: residual, layers: [99]}", "no residual in layer 99: give layers of 0, 1, 2, 3"),
    ],
)
@pytest.mark.parametrize("command", ["measure", "compare"])
def test_a_bad_file_is_one_line(tiny_folder, texts, tmp_path, capsys, command, content, words):
    path, name = tmp_path / "changes.yml", str(tiny_folder("bert"))
    if content is not None:
        path.write_text(content)
    chosen = ["--model", name] if command == "measure" else [name, "--twins", "0"]
    more = [
        "--data",
        str(texts),
        "--metrics",
        "anisotropy",
        "--out",
        str(tmp_path / "out"),
        "--quiet",
    ]
    # What was said while the model was saved.
    capsys.readouterr()
    assert main([command, *chosen, *more, "--intervention", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line), line
    assert line.startswith("error: ")
    assert not (tmp_path / "out").exists()


WRONG = {
    "where: [residual]": "where is a list: give one of residual",
    "where: residual, by: [mean]": "by is a list",
    "where: residual, layers: 1.5": "layers is 1.5: give whole numbers",
    "where: residual, layers: {1: 2}": "layers is a dict: give whole numbers",
    "where: residual, seed: x": "the seed of an intervention is 'x'",
    "where: residual, but: 3": "but is 3: give True or False",
    "where: residual, directions: 1.5": "directions is 1.5: give mean",
    "where: residual, tokens: 3": "tokens are 3: give types of tokens",
}


def test_values_of_a_wrong_type_are_one_line_each(tiny_folder, texts, tmp_path):
    """In a process of its own, where annotations are not enforced."""
    for place, content in enumerate(WRONG):
        (tmp_path / f"{place}.yml").write_text(f"{{{content}}}")
    code = "import sys\nfrom analysis_lib.cli import main\nfor path in sys.argv[7:]:\n"
    code += "    assert main([*sys.argv[1:7], '--out', path + '-out', '--intervention', path]) == 1"
    given = ["measure", "--model", str(tiny_folder("bert")), "--data", str(texts), "--quiet"]
    paths = [str(tmp_path / f"{place}.yml") for place in range(len(WRONG))]
    done = subprocess.run(
        [sys.executable, "-c", code, *given, *paths], capture_output=True, text=True, check=True
    )
    for line, words in zip(done.stderr.splitlines(), WRONG.values(), strict=True):
        assert line.startswith("error: ")
        assert re.search(words, line), line


def test_vectors_cannot_be_changed(tmp_path, capsys):
    folder = tmp_path / "vectors"
    folder.mkdir()
    save_file({"layer_1": torch.ones(4, 3)}, folder / "vectors.safetensors")
    (tmp_path / "changes.yml").write_text("{where: residual}")
    given = [
        "--vectors",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--intervention",
        str(tmp_path / "changes.yml"),
    ]
    assert main(["measure", *given]) == 1
    assert "leave --intervention out" in capsys.readouterr().err


def test_a_model_in_this_process_alone_needs_no_file():
    live, reads = tiny.build("bert")
    given = {"tokenizer": reads, "progress": False}
    tables = measure(
        live,
        list(tiny.TEXTS),
        "dimension_means",
        intervention=Replace("residual", (1,), by="zero"),
        **given,
    )
    means = (
        tables["dimension_means"].groupby("layer")["mean"].apply(lambda column: (column == 0).all())
    )
    assert means.tolist() == [False, True, False, False]
    with pytest.raises(AnalysisError, match="no residual in layer 7"):
        measure(live, list(tiny.TEXTS), "anisotropy", intervention=Replace("residual", 7), **given)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("site", ["query", "key", "value"])
def test_means_are_as_exact_as_the_model(name, site):
    """In double precision, vectors that all have their mean keep it to the last digits."""
    built, reads = tiny.build(name)
    double = load_model(built.double(), processor=reads)
    means = []
    for intervention in ((), Replace(site, layers=(1,), by="mean")):
        tables = measure(
            double, [*tiny.TEXTS], "head_means", intervention=intervention, progress=False
        )
        means.append(tables["head_means"].query("space == @site and layer == 1")["mean"].to_numpy())
    plain, changed = means
    np.testing.assert_allclose(changed, plain, rtol=0, atol=1e-13 * np.abs(plain).max())
