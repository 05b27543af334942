"""Queries and keys along training, against loops over transformers' own hidden states and linear
layers in float64.
"""

import hashlib
import json
import math
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from huggingface_hub import constants
from tiny import WORDS

from analysis_book.training import Pretraining, checkpoints, pretrain, runs
from analysis_book.training import dynamics as module
from analysis_book.training import settings as run_settings
from analysis_book.training.dynamics import (
    Dynamics,
    dynamics,
    heads_shown,
    load_runs,
    sample_vectors,
)
from analysis_lib import (
    AnalysisError,
    Corpus,
    files,
    load_corpus,
    load_model,
    measure,
    metrics,
    store,
)
from analysis_lib.corpora import data_identity, hub

SHIPPED = files.data_directory() / "measurements"

LAYERS, HEADS, WIDTH = 3, 2, 16
TINY = {
    "hidden_size": HEADS * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "initializer_range": 0.2,
}
LENGTH, LIMIT, SEED = 16, 12, 5


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a text file, a run of two seeds, and what is derived."""
    folder = tmp_path_factory.mktemp("home")
    draw = random.Random(0)
    lines = "\n".join(
        " ".join(draw.choices(WORDS, k=draw.randint(2, 11))) + "." for _ in range(200)
    )
    (folder / "lines.txt").write_text(lines, encoding="utf-8")
    settings = Pretraining(
        str(folder / "lines.txt"), TINY, vocabulary=80, length=LENGTH, steps=9, batch=4, learning_rate=1e-2,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_settings, "spread", lambda _: [0, 3, 9])
        pretrain(folder / "run", settings, seeds=(0, 1))
    return folder


@pytest.fixture(autouse=True)
def apart(home, monkeypatch) -> None:
    """What is measured lies apart from the reader's."""
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(home / "data"))


@pytest.fixture
def asked(home) -> dict:
    return {
        "run": str(home / "run"),
        "data": str(home / "lines.txt"),
        "limit": LIMIT,
        "seed": SEED,
        "seeds": [1, 0],
    }


@pytest.fixture
def found(asked) -> Dynamics:
    """Measured by the first test that asks, and read by the others."""
    return dynamics(**asked)


def texts(home: Path) -> list[str]:
    return load_corpus(str(home / "lines.txt"), LIMIT, SEED).texts


def naive(folder: str, lines: list[str]) -> dict[tuple[str, int, int], np.ndarray]:
    """Every query, key and value by space, layer and head, one row per token: line by line, without
    padding.
    """
    model = transformers.BertModel.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows: dict[tuple[str, int, int], list[np.ndarray]] = {}
    for line in lines:
        with torch.inference_mode():
            read = tokenizer(line, truncation=True, max_length=LENGTH, return_tensors="pt")
            hidden = model(**read, output_hidden_states=True).hidden_states
            for layer, block in enumerate(model.encoder.layer, 1):
                for space in ("query", "key", "value"):
                    vectors = getattr(block.attention.self, space)(hidden[layer - 1])[0]
                    for head in range(1, HEADS + 1):
                        part = vectors[:, (head - 1) * WIDTH : head * WIDTH].numpy()
                        rows.setdefault((space, layer, head), []).append(part)
    return {key: np.concatenate(parts) for key, parts in rows.items()}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


# --- What is measured -----------------------------------------------------------------------------


def test_the_means_are_those_of_a_loop(found, home):
    assert found.seeds == [1, 0]
    assert (found.steps, found.layers, found.head_width) == ([0, 3, 9], LAYERS, WIDTH)
    means = found["head_means"].set_index(["seed", "step", "space", "layer", "head", "dimension"])[
        "mean"
    ]
    means = means.sort_index()
    alignment = found["qk_alignment"].set_index(["seed", "step", "layer", "head"]).sort_index()
    assert len(means) == 2 * 3 * 3 * LAYERS * HEADS * WIDTH
    for at in checkpoints(str(home / "run"), (0, 1)):
        expected = {key: rows.mean(0) for key, rows in naive(at.model, texts(home)).items()}
        for (space, layer, head), mean in expected.items():
            ours = means.loc[at.seed, at.step, space, layer, head]
            np.testing.assert_allclose(ours, mean, rtol=1e-4, atol=1e-6)
        for layer, head in alignment.loc[at.seed, at.step].index:
            q, k = (expected[space, layer, head] for space in ("query", "key"))
            row = alignment.loc[(at.seed, at.step, layer, head)]
            assert row["cosine"] == pytest.approx(cosine(q, k), abs=1e-5)
            assert row["dot"] == pytest.approx(q @ k, abs=1e-5)


def test_what_one_seed_gives_does_not_depend_on_the_others(found, asked):
    alone = dynamics(**{**asked, "seeds": [0]})
    for name in (*module.METRICS, "losses"):
        of_both = found[name][found[name]["seed"] == 0].reset_index(drop=True)
        pd.testing.assert_frame_equal(alone[name], of_both)
    assert found["vectors"]["seed"].unique().tolist() == [1]


def drawn(table: pd.DataFrame, rows: np.ndarray) -> list[int]:
    """Which of the rows each vector of a table is."""
    values = table[[str(i) for i in range(rows.shape[1])]].to_numpy(np.float64)
    distances = np.abs(values[:, None] - rows[None]).max(-1)
    assert distances.min(1).max() < 1e-2 * np.abs(rows).max()
    return distances.argmin(1).tolist()


def test_the_same_tokens_are_sampled_at_every_step(home):
    corpus, share = load_corpus(str(home / "lines.txt"), LIMIT, SEED), 0.25
    chosen = []
    for at in checkpoints(str(home / "run")):
        table = sample_vectors(load_model(at.model), corpus, {(2, 1), (3, 2)}, share, 0)
        rows = naive(at.model, corpus.texts)
        for (layer, head, space), part in table.groupby(["layer", "head", "space"]):
            chosen.append(drawn(part, rows[space, layer, head]))
    tokens = len(rows["query", 2, 1])
    assert all(places == chosen[0] for places in chosen)
    assert len(chosen) == 3 * 2 * 2
    assert len(chosen[0]) == len(set(chosen[0])) == round(share * tokens)


def test_tokens_are_sampled_uniformly(home):
    (last,) = checkpoints(str(home / "run"))[-1:]
    model, corpus = (
        load_model(last.model),
        Corpus("two", load_corpus(str(home / "lines.txt"), 3, 0).texts),
    )
    rows = naive(last.model, corpus.texts)["query", 2, 1]
    times, share = 150, 0.3
    counts = np.zeros(len(rows))
    for seed in range(times):
        table = sample_vectors(model, corpus, {(2, 1)}, share, seed)
        counts[drawn(table[table["space"] == "query"], rows)] += 1
    expected = round(share * len(rows)) / len(rows)
    deviation = np.abs(counts / times - expected) / math.sqrt(expected * (1 - expected) / times)
    assert counts.sum() == times * round(share * len(rows))
    assert deviation.max() < 4


def test_one_vector_is_sampled_at_least(home):
    corpus = Corpus("one", ["a cat"])
    table = sample_vectors(
        load_model(checkpoints(str(home / "run"))[0].model), corpus, {(1, 1)}, 0.01, 0
    )
    assert table["space"].tolist() == ["key", "query"]


def test_queries_and_keys_of_grouped_heads(tiny_folder):
    """Two queries share a key; queries and keys are those before the rotary embedding."""
    loaded = load_model(str(tiny_folder("llama")))
    corpus = Corpus("tiny", ["Keys answer queries.", "Hi", "The cone of vectors points one way."])
    model = transformers.LlamaModel.from_pretrained(tiny_folder("llama")).double().eval()
    rows: dict[tuple[str, int, int], list[np.ndarray]] = {}
    for line in corpus.texts:
        given = loaded.tokenizer(line, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            hidden = model(input_ids=given, output_hidden_states=True).hidden_states
            for layer, block in enumerate(model.layers, 1):
                read = block.input_layernorm(hidden[layer - 1])
                split = [
                    getattr(block.self_attn, f"{x}_proj")(read)[0]
                    .unflatten(-1, (-1, 8))
                    .transpose(0, 1)[None]
                    for x in "qk"
                ]
                for space, vectors in zip(("query", "key"), split, strict=True):
                    for head in range(1, 5):
                        shared = head - 1 if space == "query" else (head - 1) // 2
                        rows.setdefault((space, layer, head), []).append(vectors[0, shared].numpy())
    table = sample_vectors(loaded, corpus, {(1, 3), (2, 2), (2, 4)}, 1.0, 0)
    for (layer, head, space), part in table.groupby(["layer", "head", "space"]):
        expected = np.concatenate(rows[space, layer, head])
        # Each vector is one of the model's, and the other way round: the first token is the same in
        # all texts.
        assert len(drawn(part, expected)) == len(expected)
        drawn(
            pd.DataFrame(expected, columns=[str(i) for i in range(8)]),
            part[[str(i) for i in range(8)]].to_numpy(float),
        )


def test_tables_take_queries_and_keys_before_rotation(tiny_folder):
    """Of a model that rotates; one that does not has the same tables, and says so."""
    corpus = Corpus("tiny", ["Keys answer queries.", "Hi", "The cone of vectors points one way."])
    tables = {}
    for name in ("llama", "gpt2"):
        tables[name] = module._tables(load_model(str(tiny_folder(name))), corpus)
        assert {*tables[name]} == {*module.METRICS}
        rows = tables[name]["head_means"]
        assert {*rows["space"]} == {"query", "key", "value"}
        means = rows.pivot(index=["layer", "head"], columns=["space", "dimension"], values="mean")
        alignment = tables[name]["qk_alignment"]
        for row in alignment.itertuples():
            shared = row.head if name == "gpt2" else (row.head + 1) // 2
            query, key = (
                means.loc[row.layer, row.head]["query"],
                means.loc[row.layer, shared]["key"],
            )
            assert row.dot == pytest.approx(query @ key, rel=1e-4, abs=1e-6)
        assert Dynamics(tables[name], {}).before_rotation == (name == "llama")
    plain = measure(str(tiny_folder("llama")), corpus, "qk_alignment", progress=False)
    after = plain["qk_alignment"]["dot"]
    assert (after - tables["llama"]["qk_alignment"]["dot"]).abs().max() > 0.1
    old = {"qk_alignment": plain["qk_alignment"]}
    assert not Dynamics(old, {}).before_rotation


# --- What is kept ---------------------------------------------------------------------------------


def frames(found: Dynamics) -> dict[str, bytes]:
    return {name: hashlib.sha256(table.to_csv().encode()).digest() for name, table in found.items()}


def test_what_is_saved_is_read_again(found, tmp_path):
    found.save(tmp_path / "out")
    again = Dynamics.load(tmp_path / "out")
    assert again.about == {
        **found.about,
        "tables": {name: len(table) for name, table in found.items()},
    }
    assert set(again) == set(found) == {*module.METRICS, "baselines", "losses", "vectors"}
    for name, table in found.items():
        pd.testing.assert_frame_equal(again[name], table)
    written = {path.name for path in (tmp_path / "out").glob("[!.]*")}
    assert written == {*(f"{name}.parquet" for name in found), "dynamics.json"}


def test_a_save_that_fails_leaves_what_was_there(found, tmp_path, monkeypatch):
    found.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(
        pd.DataFrame, "to_parquet", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(AnalysisError, match="cannot be written"):
        found.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_is_measured_once(found, asked, monkeypatch):
    monkeypatch.setattr(module, "measure", None)
    assert frames(dynamics(**asked)) == frames(found)


def test_an_interrupted_measurement_goes_on_where_it_was(found, asked, home, monkeypatch, tmp_path):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    real, measured = module.measure, []

    def interrupted(model, *arguments, **options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(model.name)
        return real(model, *arguments, **options)

    monkeypatch.setattr(module, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dynamics(**asked)
    first = measured.copy()
    # The last step of the first seed decides which heads are shown.
    assert Path(first[0]).name == "seed_1-step_9"
    monkeypatch.setattr(
        module,
        "measure",
        lambda model, *a, **o: measured.append(model.name) or real(model, *a, **o),
    )
    again = dynamics(**asked)
    assert len(set(measured)) == len(measured) == 6
    assert frames(again) == frames(found)
    assert not [*store.derived_folder("", "").parent.glob("unfinished*")]


def test_other_code_or_another_run_are_measured_anew(found, asked, monkeypatch):
    monkeypatch.setattr(
        module, "measure", lambda *_, **__: (_ for _ in ()).throw(AnalysisError("measured"))
    )
    for change in ({"limit": 3}, {"seed": 6}, {"seeds": [1]}):
        with pytest.raises(AnalysisError, match="measured"):
            dynamics(**{**asked, **change})
    monkeypatch.setattr(module, "library_hash", lambda: "other")
    with pytest.raises(AnalysisError, match="measured"):
        dynamics(**asked)


def test_shipped_measurements_are_those_of_what_was_asked_for(found, home, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "data_directory", lambda: tmp_path)
    monkeypatch.setitem(runs.RUNS, "shipped", replace(runs.RUNS["bert-4"], data="absent.txt"))
    asked = {"data": "news", "limit": 2, "seed": 0, "seeds": [0, 1]}
    Dynamics(found, {**found.about, **asked}).save(tmp_path / "measurements" / "shipped")
    assert frames(dynamics("shipped", **asked)) == frames(found)
    assert frames(dynamics("shipped", **{**asked, "seeds": [0, 1, 1]})) == frames(found)
    for change in (
        {"data": "reviews"},
        {"limit": 3},
        {"seed": 1},
        {"seeds": [0]},
        {"seeds": [1, 0]},
    ):
        # It would have to be trained, on a file that is not there.
        with pytest.raises(AnalysisError, match=r"absent\.txt"):
            dynamics("shipped", **{**asked, **change})


def test_shipped_measurements_know_the_versions_that_made_them(found, monkeypatch, tmp_path):
    found.save(tmp_path / "shipped")
    shipped = Dynamics.load(tmp_path / "shipped")
    assert shipped.code_warning == ""
    monkeypatch.setattr(metrics.HeadMeans, "version", metrics.HeadMeans.version + 1)
    assert "another version of the code" in shipped.code_warning


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "bert-5"}, "there is no run"),
        ({"data": "absent.txt"}, r"absent\.txt"),
        ({"limit": 0}, "limit is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [7]}, "no seed 7"),
    ],
)
def test_what_cannot_be_measured(asked, change, words):
    with pytest.raises(AnalysisError, match=words):
        dynamics(**{**asked, **change})


def test_the_multiberts_from_a_cache(home, tmp_path, monkeypatch):
    """As on the hub: the weights as a pickle, and the configuration and vocabulary of BERT."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    monkeypatch.setattr(runs, "MULTIBERTS_STEPS", (0, 2000))
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "data"))
    for name, step in (("0k", 0), ("2000k", 9)):
        repository = tmp_path / "hub" / f"models--google--multiberts-seed_0-step_{name}"
        snapshot = shutil.copytree(
            home / "run" / f"seed_0-step_{step}", repository / "snapshots" / ("0" * 40)
        )
        (snapshot / "model.safetensors").unlink()
        weights = transformers.BertForMaskedLM.from_pretrained(
            home / "run" / f"seed_0-step_{step}"
        ).state_dict()
        torch.save(weights, snapshot / "pytorch_model.bin")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    (start, end) = checkpoints("multiberts", [0])
    assert load_model(end.model).revision == f"google/multiberts-seed_0-step_2000k@{'0' * 40}"
    assert load_model(start.model).model.config.num_hidden_layers == LAYERS
    found = dynamics("multiberts", str(home / "lines.txt"), LIMIT, SEED)
    assert found.steps == [0, 2_000_000]
    assert found["losses"].empty
    run = dynamics(str(home / "run"), str(home / "lines.txt"), LIMIT, SEED)
    for name in ("head_means", "attention_entropy", "vectors"):
        theirs = run[name][run[name]["step"] != 3].drop(columns="step").reset_index(drop=True)
        pd.testing.assert_frame_equal(found[name].drop(columns="step"), theirs)


def test_the_heads_shown_are_the_most_similar_and_the_most_opposite_at_the_end(found):
    for end, choose in (("similar", "idxmax"), ("opposite", "idxmin")):
        last = found["qk_alignment"].query("seed == 1 and step == 9")
        layer, head = last.loc[getattr(last["cosine"], choose)()][["layer", "head"]]
        assert heads_shown(found["qk_alignment"])[end] == (layer, head)


# --- The runs that are shipped --------------------------------------------------------------------


@pytest.mark.parametrize("run", [path.parent.name for path in SHIPPED.glob("*/dynamics.json")])
def test_a_shipped_run_is_what_its_settings_say_and_small(run):
    found = Dynamics.load(SHIPPED / run)
    training, settings = found.about["training"], runs.RUNS[run]
    ours = json.loads(json.dumps({**asdict(settings), "checkpoints": settings.checkpoints}))
    del ours["also_kept"]
    # What is left at its default since these were added is not written down.
    written = {
        name: value for name, value in ours.items() if value or name not in ("cased", "tokenizer")
    }
    assert {name: training["settings"][name] for name in written} == written
    assert training["data"] == data_identity(settings.data)
    assert found.steps == ours["checkpoints"]
    assert found.layers == settings.configuration["num_hidden_layers"]
    assert found.head_width == 64
    assert set(found) - {"vectors"} == {*module.METRICS, "losses", "baselines"}
    for name, table in found.items():
        assert name == "baselines" or set(table["seed"]) <= set(found.seeds)
    assert found["losses"].groupby("seed")["step"].max().to_dict() == dict.fromkeys(
        found.seeds, settings.steps
    )
    assert sum(path.stat().st_size for path in (SHIPPED / run).iterdir()) <= 22e6


def test_the_pages_defaults_are_shipped(monkeypatch):
    """What the pages on training ask for is neither trained nor measured."""
    monkeypatch.setattr(module, "checkpoints", None)
    deep, several = load_runs(["modernbert-12", "bert-4"]).values()
    assert deep.layers == 12
    assert deep["vectors"]["seed"].eq(0).all()
    assert several.seeds == [0, 1, 2, 3, 4]
    with pytest.raises(
        AnalysisError,
        match=r"bert-4 is shipped without vectors: .* dynamics\('bert-4', seeds=\[0\]\)",
    ):
        several["vectors"]
    with pytest.raises(KeyError):
        several["vector"]


def test_the_shipped_run_has_learned_more_than_counting_gives():
    found = Dynamics.load(SHIPPED / "modernbert-12")
    ends = found["losses"].query("step == step.max()").set_index("seed")["held_out"]
    counting = found["baselines"].set_index("baseline")["loss"]
    assert counting["unigram"] > counting["bigram"] > counting["neighbours"] > 1
    assert (ends < counting["bigram"] - 0.5).all()
    assert (ends < counting["neighbours"]).all()


def test_attention_sharpens_in_the_shipped_run():
    found = Dynamics.load(SHIPPED / "modernbert-12")
    entropy = found["attention_entropy"].groupby(["layer", "step"])["entropy_nats"].mean().unstack()
    assert (entropy[found.steps[-1]] < entropy[0]).sum() > found.layers / 2
