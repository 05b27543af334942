"""Vectors without a model: the tables that a measurement of the model gives, in Python and on the
command line.
"""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import naive
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tiny
import torch
import transformers
from reference import OF_HIDDEN_STATES
from safetensors.torch import save_file

from analysis_lib import AnalysisError, load_model, measure, measure_vectors, metrics
from analysis_lib.capture.given import GivenVectors, Part
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shards
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.intervals import jackknife_interval

TEXTS = tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS[:4])
# How far tables may differ where texts are read alone or together: in half precision the vectors
# round otherwise.
TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
LENGTHS = [3, 1, 4, 2]


@pytest.fixture(scope="module", params=TOLERANCE)
def documented(request, tiny_folder):
    """A model and, of each text, the hidden states as transformers documents them."""
    model = load_model(str(tiny_folder("bert")), dtype=request.param)
    with torch.no_grad():
        outputs = [
            model.model(**model.tokenizer(t, return_tensors="pt"), output_hidden_states=True)
            for t in TEXTS
        ]
    return request.param, model, [output.hidden_states for output in outputs]


def assert_close(found, expected, tolerance: float) -> None:
    """The tables of hidden vectors, of all types of tokens together, which vectors do not tell
    apart.
    """
    for name in OF_HIDDEN_STATES:
        wanted = expected[name]
        for column in {"space", "token_type"} & {*wanted}:
            wanted = wanted[wanted[column].isin(["hidden", "all"])]
        got = (
            found[name][found[name]["token_type"] == "all"]
            if "token_type" in wanted
            else found[name]
        )
        if name == "outlier_dimensions":
            wanted, got = (t.sort_values(["layer", "dimension"]) for t in (wanted, got))
        wanted, got = (t.reset_index(drop=True) for t in (wanted, got))
        pd.testing.assert_frame_equal(
            got, wanted, rtol=tolerance, atol=tolerance, check_dtype=False
        )


def flat(hidden: list[tuple[torch.Tensor, ...]]) -> dict[int, torch.Tensor]:
    """By layer, the vectors of all texts one after another."""
    return {
        layer: torch.cat([text[layer][0] for text in hidden]) for layer in range(len(hidden[0]))
    }


def test_hidden_states_of_transformers_give_the_tables_of_the_model(documented):
    dtype, model, hidden = documented
    expected = measure(model, Corpus("texts", TEXTS), progress=False)
    lengths = [text[0].shape[1] for text in hidden]
    of_lists = measure_vectors(
        [[text[layer] for text in hidden] for layer in range(4)], progress=False
    )
    assert set(of_lists) == {*OF_HIDDEN_STATES}
    assert_close(of_lists, expected, TOLERANCE[dtype])
    together = measure_vectors(flat(hidden), lengths, progress=False)
    padded = {
        f"layer_{layer}": torch.nn.utils.rnn.pad_sequence(
            [text[layer][0] for text in hidden], batch_first=True
        )
        for layer in range(4)
    }
    in_batch = measure_vectors(padded, torch.tensor(lengths), progress=False)
    for name in OF_HIDDEN_STATES:
        pd.testing.assert_frame_equal(together[name], of_lists[name], check_exact=True)
        pd.testing.assert_frame_equal(in_batch[name], of_lists[name], check_exact=True)
    assert together.report.tokens == expected.report.tokens == sum(lengths)
    assert together.layers["width"].tolist() == [24] * 4


def test_a_folder_gives_the_tables_of_the_model_on_the_command_line(documented, tmp_path, capsys):
    dtype, model, hidden = documented
    expected = measure(model, Corpus("texts", TEXTS), progress=False)
    lengths, layers = [text[0].shape[1] for text in hidden], flat(hidden)
    folder = tmp_path / "vectors"
    folder.mkdir()
    save_file({"hidden": layers[0]}, folder / "layer_0.safetensors")
    # In parts, of which one divides a text.
    save_file({"hidden": layers[1][:50].clone()}, folder / "layer_1-part_9.safetensors")
    save_file({"hidden": layers[1][50:].clone()}, folder / "layer_1-part_10.safetensors")
    save_file({"layer_2": layers[2], "layer_3": layers[3]}, folder / "rest.safetensors")
    np.save(folder / "lengths.npy", lengths)
    out = tmp_path / "out"
    assert (
        main(["measure", "--vectors", str(folder), "--out", str(out), "--format", "csv", "--quiet"])
        == 0
    )
    assert (
        f"wrote 5 tables of {sum(lengths)} tokens in {len(TEXTS)} utterances"
        in capsys.readouterr().out
    )
    found = {name: pd.read_csv(out / f"{name}.csv") for name in OF_HIDDEN_STATES}
    for table in found.values():
        if "head" in table:
            table["head"] = table["head"].astype("Int64")
    assert_close(found, expected, TOLERANCE[dtype])
    run = json.loads((out / "run.json").read_text())
    assert (run["model"], run["dtype"], run["texts"]) == (str(folder), dtype, len(TEXTS))
    assert {*run["model_files"]} == {path.name for path in folder.iterdir()}
    assert "attention_entropy" in run["left_out"]
    assert {path.suffix for path in out.iterdir()} == {".csv", ".json"}


def test_cosines_and_their_intervals_are_those_of_all_pairs():
    """Every pair formed in float64, and once more without each group of texts."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 9, 30)
    vectors = draw.normal(size=(lengths.sum(), 5)) + 1
    of_text = np.repeat(np.arange(30), lengths)
    group = of_text * GROUPS // 30

    def cosines(chosen: np.ndarray) -> float:
        rows = vectors[chosen]
        pairs = [
            a @ b / np.sqrt((a @ a) * (b @ b))
            for i, a in enumerate(rows)
            for j, b in enumerate(rows)
            if i != j
        ]
        return float(np.mean(pairs))

    table = measure_vectors({7: vectors.astype("float32")}, lengths, "anisotropy", progress=False)[
        "anisotropy"
    ]
    whole = cosines(np.full(len(vectors), True))
    low, high = jackknife_interval(
        np.array(whole), [np.array(cosines(group != left)) for left in range(GROUPS)]
    )
    assert table[["layer", "tokens"]].to_numpy().tolist() == [[7, len(vectors)]]
    np.testing.assert_allclose(
        table[["cosine", "ci_low", "ci_high"]].to_numpy()[0], [whole, low, high], rtol=1e-5
    )


def test_queries_and_keys_have_heads(tiny_folder):
    """The means and alignment of heads, of vectors token x head x dim; keys may come without
    queries.
    """
    draw = np.random.default_rng(1)
    query, key = draw.normal(size=(10, 4, 3)), draw.normal(size=(10, 2, 3))
    given = {
        "query_1": query,
        "key_1": key,
        "final_1": query.reshape(10, 12),
        "hidden_1": query.reshape(10, 12) + 1,
    }
    tables = measure_vectors(given, LENGTHS, progress=False)
    assert {*tables} == {*OF_HIDDEN_STATES, "qk_alignment", "head_means"}
    means = query.mean(0), key.mean(0).repeat(2, 0)
    np.testing.assert_allclose(tables["qk_alignment"]["dot"], (means[0] * means[1]).sum(-1))
    assert tables["anisotropy"].groupby("space")["tokens"].agg(list).to_dict() == {
        **{"hidden": [10], "final": [10], "query": [10] * 4, "key": [10] * 2},
    }
    assert tables.report.tokens == 10
    alone = measure_vectors({"key_0": key}, LENGTHS, progress=False)
    assert {*alone} == {"anisotropy", "mean_vector", "utterance_similarity", "head_means"}
    assert "nothing was measured" in alone.run["left_out"]["qk_alignment"]


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["npy", "safetensors", "fortran", "big-endian", "parts", "by-text"]
)
def test_every_form_of_a_folder_gives_the_same(tmp_path, form):
    vectors = np.random.default_rng(2).normal(size=(2, 10, 6)).astype("float32")
    np.save(tmp_path / "lengths.npy", LENGTHS)
    match form:
        case "npy":
            for layer in range(2):
                np.save(tmp_path / f"layer_{layer}.npy", vectors[layer])
        case "safetensors":
            # Two shards of the texts, each with all layers and its lengths.
            (tmp_path / "lengths.npy").unlink()
            for shard, (rows, lengths) in enumerate(
                [(slice(4), LENGTHS[:2]), (slice(4, 10), LENGTHS[2:])]
            ):
                tensors = {
                    f"hidden_{layer}": torch.tensor(vectors[layer, rows]) for layer in range(2)
                }
                save_file(
                    {**tensors, "lengths": torch.tensor(lengths)},
                    tmp_path / f"shard-{shard + 9}.safetensors",
                )
        case "fortran":
            for layer in range(2):
                np.save(tmp_path / f"{layer}.npy", np.asfortranarray(vectors[layer]))
        case "big-endian":
            for layer in range(2):
                np.save(tmp_path / f"{layer}.npy", vectors[layer].astype(">f4"))
        case "parts":
            for layer in range(2):
                for part in range(10):
                    np.save(
                        tmp_path / f"layer_{layer}-part_{part + 5}.npy",
                        vectors[layer, part : part + 1],
                    )
        case "by-text":
            for layer in range(2):
                for text, (end, length) in enumerate(zip(np.cumsum(LENGTHS), LENGTHS, strict=True)):
                    np.save(
                        tmp_path / f"layer_{layer}-part_{text}.npy",
                        vectors[layer, end - length : end],
                    )
    expected = measure_vectors(
        [*vectors], LENGTHS, "anisotropy,utterance_similarity", progress=False
    )
    found = measure_vectors(tmp_path, metrics="anisotropy,utterance_similarity", progress=False)
    for name in expected:
        pd.testing.assert_frame_equal(found[name], expected[name], check_exact=True)


def test_units_are_what_intervals_are_over(tmp_path):
    vectors = np.random.default_rng(3).normal(size=(10, 6))
    np.save(tmp_path / "0.npy", vectors)
    np.save(tmp_path / "lengths.npy", LENGTHS)
    np.save(tmp_path / "units.npy", ["a", "a", "b", "b"])
    assert measure_vectors(tmp_path, metrics="anisotropy", progress=False).groups == [0, 1]
    assert measure_vectors([vectors], LENGTHS, "anisotropy", progress=False).groups == [0, 1, 2, 3]
    assert measure_vectors(
        [vectors], LENGTHS, "anisotropy", units=[7, 7, 7, 8], progress=False
    ).groups == [0, 1]


def test_one_text_has_no_interval():
    table = measure_vectors([np.eye(4) + 1], [4], "anisotropy", progress=False)["anisotropy"]
    assert table[["ci_low", "ci_high"]].isna().all(axis=None)
    assert table["cosine"].notna().all()


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_a_file_is_read_some_vectors_at_a_time(tmp_path, monkeypatch, form):
    """No read is larger than a batch, and what is in memory is a small part of the file."""
    count, width = 100_000, 64
    vectors = np.random.default_rng(4).normal(size=(count, width)).astype("float32")
    match form:
        case "npy":
            np.save(tmp_path / "layer_0.npy", vectors)
        case "safetensors":
            save_file({"hidden": torch.tensor(vectors)}, tmp_path / "layer_0.safetensors")
    del vectors
    read, rows = [], Part.rows

    def watched(part: Part, *which: slice) -> torch.Tensor:
        found = rows(part, *which)
        read.append(len(found))
        return found

    monkeypatch.setattr(Part, "rows", watched)
    tracemalloc.start()
    tables = measure_vectors(tmp_path, [20] * (count // 20), "anisotropy", progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tables.report.tokens == sum(read) == count
    assert max(read) <= 2048
    assert peak < count * width * 4 / 4


def test_an_interrupted_measurement_goes_on_and_workers_give_the_same_bytes(
    tmp_path, monkeypatch, copied_workers
):
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 4)
    lengths = [1, 2, 3] * 8
    np.save(tmp_path / "layer_0.npy", np.random.default_rng(5).normal(size=(sum(lengths), 6)))
    np.save(tmp_path / "lengths.npy", lengths)
    expected = measure_vectors(tmp_path, metrics="anisotropy", progress=False)
    found = measure_vectors(tmp_path, metrics="anisotropy", workers=2, progress=False)
    pd.testing.assert_frame_equal(found["anisotropy"], expected["anisotropy"], check_exact=True)
    batches, seen = GivenVectors.batches, []

    def interrupted(given, texts, *rest):
        seen.append(texts[0].number)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return batches(given, texts, *rest)

    monkeypatch.setattr(GivenVectors, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_vectors(
            tmp_path, metrics="anisotropy", checkpoints=tmp_path / "out", progress=False
        )
    again = measure_vectors(
        tmp_path, metrics="anisotropy", checkpoints=tmp_path / "out", progress=False
    )
    pd.testing.assert_frame_equal(again["anisotropy"], expected["anisotropy"], check_exact=True)
    assert seen == [0, 4, 8, 12, 12, 16, 20]
    # Kept results are of these vectors alone, whose file has the same name and size.
    path = tmp_path / "layer_0.npy"
    np.save(path, np.load(path) + 1)
    other = measure_vectors(
        tmp_path, metrics="anisotropy", checkpoints=tmp_path / "out", progress=False
    )
    assert other["anisotropy"]["cosine"][0] > 0.3 > expected["anisotropy"]["cosine"][0]


def test_finished_measurements_are_known_by_their_files(tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "kept"))
    folder = tmp_path / "vectors"
    folder.mkdir()
    vectors = np.random.default_rng(6).normal(size=(10, 6))
    np.save(folder / "layer_0.npy", vectors)
    reads = []
    run = GivenVectors.run
    monkeypatch.setattr(
        GivenVectors, "run", lambda self, *given: reads.append(1) or run(self, *given)
    )
    for lengths, times in ((LENGTHS, 1), (LENGTHS, 1), ([5, 5], 2)):
        measure_vectors(folder, lengths, "anisotropy", progress=False)
        assert len(reads) == times
    np.save(folder / "layer_0.npy", vectors + 1)
    measure_vectors(folder, LENGTHS, "anisotropy", progress=False)
    assert len(reads) == 3


# --- Bad input ------------------------------------------------------------------------------------

GOOD = np.random.default_rng(7).normal(size=(10, 6))
NAN = GOOD.copy()
NAN[5, 2] = np.nan
PADDED = np.zeros((4, 4, 6)) + GOOD[:4, None]


@pytest.mark.parametrize(
    ("vectors", "lengths", "words"),
    [
        ({0: GOOD}, None, ["lengths", "1 for each"]),
        ({0: GOOD}, [3, 1, 4], ["layer 0", "10 vectors", "make 8"]),
        ({0: GOOD, 1: GOOD[:9]}, LENGTHS, ["layer 1", "9 vectors", "make 10"]),
        ({0: PADDED}, [1, 2, 3], ["4 texts", "make 3"]),
        ({0: PADDED}, [1, 2, 3, 5], ["vectors[0]", "4 vectors a text"]),
        ({0: GOOD}, [10, 0], ["text 2", "length 0", "leave it out"]),
        ({0: GOOD}, [11, -1], ["text 2", "length -1"]),
        ({0: GOOD}, [[5], [5]], ["shape (2, 1)", "whole number"]),
        ({0: GOOD}, [5.0, 5.0], ["float64", "whole number"]),
        ({0: GOOD, 2: NAN}, LENGTHS, ["vectors[2]", "layer 2", "text 3", "NaN"]),
        ({0: GOOD.astype(int)}, LENGTHS, ["vectors[0]", "int64", "bfloat16"]),
        ({0: GOOD[0]}, [6], ["(6,)", "token x width"]),
        ({"key_0": GOOD}, LENGTHS, ["(10, 6)", "token x head x dim"]),
        ({"layer": GOOD}, LENGTHS, ["layer_3"]),
        ({-1: GOOD}, LENGTHS, ["layer_3"]),
        ({0: GOOD.tolist()}, LENGTHS, ["vectors[0], array 1", "list"]),
        ({0: [GOOD[:5], GOOD[5:, :3]]}, None, ["vectors[0], array 2", "(5, 3)", "one width"]),
        ({0: [GOOD, GOOD[None]]}, None, ["one form"]),
        (
            {0: [GOOD[:5], GOOD[5:]], 1: [GOOD[:6], GOOD[6:]]},
            None,
            ["layer 1", "other lengths than layer 0"],
        ),
        ({}, LENGTHS, ["no vectors"]),
        (GOOD, LENGTHS, ["ndarray", "{layer: vectors}"]),
        ({0: np.zeros((3, 2))}, [3], ["vectors with a direction", "has 0"]),
    ],
)
def test_bad_vectors_are_one_line(vectors, lengths, words):
    with pytest.raises(AnalysisError) as refused:
        measure_vectors(vectors, lengths, "anisotropy", progress=False)["anisotropy"]
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_metric_that_needs_more_is_refused_by_name():
    with pytest.raises(
        AnalysisError,
        match="attention_entropy makes no sense for vectors: it needs more than the hid",
    ):
        measure_vectors([GOOD], LENGTHS, "anisotropy,attention_entropy", progress=False)
    with pytest.raises(AnalysisError, match=r"4 texts and 1 units of texts, .*: give one for each"):
        measure_vectors([GOOD], LENGTHS, units=["a"], progress=False)
    with pytest.raises(AnalysisError, match="save it to a folder"):
        measure_vectors([GOOD], LENGTHS, "anisotropy", workers=2, progress=False)
    with pytest.raises(AnalysisError, match="the number of workers is 0"):
        measure_vectors([GOOD], LENGTHS, "anisotropy", workers=0, progress=False)
    isotropy = measure_vectors([GOOD], LENGTHS, [metrics.Isotropy()], progress=False)["isotropy"]
    assert isotropy["dimensions"].tolist() == [6]


class Trap:
    """What would make a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("unpickled"),)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "layer_0.npy").unlink(), ["there are no vectors"]),
        (lambda f: [path.unlink() for path in f.iterdir()], ["there are no vectors", "files"]),
        (lambda f: np.save(f / "layer_1.npy", NAN), ["layer_1.npy", "layer 1 (hidden)", "text 3"]),
        (
            lambda f: (np.save(f / "layer_1.npy", GOOD), truncated(f / "layer_1.npy")),
            ["layer_1.npy cannot be read"],
        ),
        (lambda f: (f / "layer_1.npy").write_bytes(b""), ["layer_1.npy cannot be read"]),
        (lambda f: np.save(f / "layer_1.npy", np.array([Trap()])), ["layer_1.npy cannot be read"]),
        (
            lambda f: (f / "layer_1.safetensors").write_bytes(b"no tensor"),
            ["layer_1.safetensors cannot be read"],
        ),
        (
            lambda f: (
                save_file({"x": torch.zeros(10, 6)}, f / "layer_1.safetensors"),
                truncated(f / "layer_1.safetensors"),
            ),
            ["layer_1.safetensors cannot be read"],
        ),
        (lambda f: np.save(f / "layer_1.npy", GOOD.astype("int8")), ["layer_1.npy", "int8"]),
        (
            lambda f: save_file(
                {"x": torch.zeros(10, 6, dtype=torch.int16)}, f / "layer_1.safetensors"
            ),
            ["I16"],
        ),
        (lambda f: np.save(f / "layer_1.npy", GOOD[:, 0]), ["layer_1.npy", "(10,)"]),
        (lambda f: np.save(f / "layer_0-part_1.npy", GOOD[:, :5]), ["(10, 5)", "one width"]),
        (
            lambda f: np.save(f / "layer_0-part_1.npy", GOOD),
            ["20 vectors", "layer_0.npy and 1 more"],
        ),
        (lambda f: np.save(f / "hidden.npy", GOOD), ["hidden.npy", "layer_3"]),
        (lambda f: np.save(f / "lengths.npy", [1, 2, 3]), ["of the 3 texts make 6"]),
        (lambda f: (f / "lengths.npy").unlink(), ["lengths.npy"]),
    ],
)
def test_a_bad_folder_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, spoil, words):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "vectors"
    folder.mkdir()
    np.save(folder / "layer_0.npy", GOOD)
    np.save(folder / "lengths.npy", LENGTHS)
    spoil(folder)
    assert main(["measure", "--vectors", str(folder), "--out", "out", "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "--debug" not in line
    for word in words:
        assert word in line
    assert {path.name for path in tmp_path.iterdir()} == {"vectors"}


def test_vectors_stand_in_the_place_of_model_and_data(tmp_path, capsys):
    assert (
        main(["measure", "--vectors", str(tmp_path / "absent"), "--out", str(tmp_path / "out")])
        == 1
    )
    assert "there is no folder" in capsys.readouterr().err
    given = ["measure", "--vectors", str(tmp_path), "--out", str(tmp_path / "out")]
    for option in (
        ["--model", "minilm"],
        ["--limit", "3"],
        ["--special-tokens", "drop"],
        ["--device-map", "auto"],
    ):
        assert main([*given, *option]) == 1
        assert f"leave {option[0]} out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["measure", "--out", str(tmp_path / "out")])
    assert "--model, --data" in capsys.readouterr().err


# --- Names, masks, forms and scales
# -----------------------------------------------------------------


def cosines(vectors, lengths=None, **given) -> dict[int, float]:
    """By layer, the average cosine."""
    table = measure_vectors(vectors, lengths, "anisotropy", progress=False, **given)["anisotropy"]
    return dict(zip(table["layer"], table["cosine"], strict=True))


def of_pairs(vectors) -> float:
    """The average cosine of all pairs, formed in float64."""
    return naive.cosine([np.asarray(vectors, np.float64).reshape(-1, np.shape(vectors)[-1])])


def layers_of(count: int, *shape: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(np.float32) + layer for layer in range(count)]


@pytest.mark.parametrize("name", ["layer_{}", "hidden_{}", "{}"])
def test_vectors_are_known_by_the_number_of_their_layer(name, tmp_path):
    arrays = layers_of(3, 5, 4)
    expected = {
        layer: pytest.approx(of_pairs(array), abs=1e-6) for layer, array in enumerate(arrays)
    }
    named = {name.format(layer): array for layer, array in enumerate(arrays)}
    assert cosines(named, [1] * 5) == expected
    save_file(
        {key: torch.from_numpy(array) for key, array in named.items()},
        tmp_path / "vectors.safetensors",
    )
    np.save(tmp_path / "lengths.npy", [1] * 5)
    assert cosines(tmp_path) == expected


@pytest.mark.parametrize(
    "name", ["gpt2.h.0", "blocks.0", "layer_0_of_12", "step_100-layer_0", "keys_0", "layer0"]
)
def test_names_are_not_guessed_at(name, tmp_path):
    (array,) = layers_of(1, 5, 4)
    np.save(tmp_path / f"{name}.npy", array)
    for given in ({name: array}, tmp_path):
        with pytest.raises(AnalysisError, match="name its vectors as in layer_3"):
            measure_vectors(given, [1] * 5, progress=False)


def test_two_names_of_one_layer_are_refused(tmp_path):
    first, second = layers_of(2, 5, 4)
    with pytest.raises(AnalysisError, match="3 and layer_3 are both taken for layer 3"):
        measure_vectors({3: first, "layer_3": second}, [1] * 5, progress=False)
    np.save(tmp_path / "hidden_3.npy", first)
    save_file({"layer_3": torch.from_numpy(second)}, tmp_path / "other.safetensors")
    with pytest.raises(AnalysisError, match="hidden_3 and layer_3 are both taken for layer 3"):
        measure_vectors(tmp_path, [1] * 10, progress=False)


def test_the_steps_of_generate_are_not_layers():
    model, tokenizer = tiny.build("llama")
    head = transformers.LlamaForCausalLM(model.config).eval()
    tiny.randomise(head)
    asked = {
        "output_hidden_states": True,
        "return_dict_in_generate": True,
        "do_sample": False,
        "max_new_tokens": 4,
    }
    steps = head.generate(**tokenizer(tiny.TEXTS[0], return_tensors="pt"), **asked).hidden_states
    for vectors, lengths in ((steps, None), (steps, [1] * 3), (steps[1:], None), ([*steps], None)):
        with pytest.raises(AnalysisError, match="as the hidden_states of generate are"):
            measure_vectors(vectors, lengths, progress=False)
    joined = {
        layer: torch.cat([step[layer] for step in steps], 1) for layer in range(len(steps[0]))
    }
    for layer, cosine in cosines(joined).items():
        assert cosine == pytest.approx(of_pairs(joined[layer][0]), abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_says_where_padding_is(side):
    model, tokenizer = tiny.build("llama")
    tokenizer.pad_token = "</s>"
    inputs = tokenizer(
        [*tiny.TEXTS[:3], "Hi there"], return_tensors="pt", padding=True, padding_side=side
    )
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    expected = [of_pairs(layer[inputs["attention_mask"].bool()]) for layer in hidden]
    for mask in (
        inputs["attention_mask"],
        inputs["attention_mask"].bool().numpy(),
        inputs["attention_mask"].tolist(),
    ):
        assert [*cosines(hidden, mask=mask).values()] == pytest.approx(expected, abs=1e-6)
    # In batches, each with a mask of its own.
    parts = [[layer[:1], layer[1:]] for layer in hidden]
    masks = [inputs["attention_mask"][:1], inputs["attention_mask"][1:]]
    assert [*cosines(parts, mask=masks).values()] == pytest.approx(expected, abs=1e-6)


def test_a_mask_may_have_holes_and_changes_what_is_kept():
    (values,) = layers_of(1, 2, 5, 4)
    mask = np.array([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]])
    assert cosines({0: values}, mask=mask)[0] == pytest.approx(
        of_pairs(values[mask == 1]), abs=1e-6
    )
    given = GivenVectors({0: values})
    digests = [[text.digest() for text in given.texts(mask=each)] for each in (mask, mask[:, ::-1])]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.ones((3, 5)), "2 texts, and the mask 3"),
        (np.ones((2, 4)), "5 vectors a text, and its mask 4"),
        (np.full((2, 5), 2), "1 at each token and 0"),
        (np.eye(5)[:2] * [[1], [0]], "the mask of text 2 has no token"),
    ],
)
def test_masks_that_do_not_fit_are_one_line(mask, words):
    (values,) = layers_of(1, 2, 5, 4)
    with pytest.raises(AnalysisError, match=words):
        measure_vectors({0: values}, mask=mask, progress=False)
    with pytest.raises(AnalysisError, match="leave one of them out"):
        measure_vectors({0: values}, [5, 5], mask=mask, progress=False)
    with pytest.raises(AnalysisError, match="has no padding: leave mask= out"):
        measure_vectors({0: values[0]}, mask=np.ones((2, 5)), progress=False)


def test_forms_of_other_libraries():
    (dense,) = layers_of(1, 12, 6)
    dense[np.abs(dense) < 0.5] = 0
    expected = of_pairs(dense)
    sparse = torch.tensor(dense).to_sparse()
    forms = [sparse, sparse.to_sparse_csr(), sparse.requires_grad_(), sparse.detach().bfloat16()]
    forms += [
        scipy.sparse.csr_matrix(dense),
        scipy.sparse.coo_array(dense),
        dense.astype(ml_dtypes.bfloat16),
    ]
    for form in forms:
        assert cosines({0: form}, [1] * 12)[0] == pytest.approx(expected, abs=1e-3)
        assert cosines([[form]])[0] == pytest.approx(expected, abs=1e-3)
    exact = torch.tensor(dense).bfloat16()
    rounded = cosines({0: dense.astype(ml_dtypes.bfloat16)}, [1] * 12)
    assert (
        rounded[0]
        == cosines({0: exact}, [1] * 12)[0]
        == pytest.approx(of_pairs(exact.float()), abs=1e-6)
    )
    with pytest.raises(AnalysisError, match="is a masked array"):
        measure_vectors({0: np.ma.masked_greater(dense, 0.5)}, [1] * 12, progress=False)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1e20, 1e30])
def test_cosines_do_not_depend_on_the_scale(scale):
    (values,) = layers_of(1, 6, 5, 8)
    values[2, 3] = 0
    plain = measure_vectors({0: values}, progress=False)
    scaled = measure_vectors({0: values * np.float32(scale)}, progress=False)
    of_all = values.reshape(-1, 8)
    assert scaled["anisotropy"]["cosine"].item() == pytest.approx(
        of_pairs(of_all[of_all.any(1)]), abs=1e-6
    )
    assert scaled.report.zero_vectors == plain.report.zero_vectors == {"hidden 0": 1}
    for name in ("utterance_similarity", "cosine_by_dimension"):
        found = (
            measure_vectors({0: values * np.float32(s)}, None, name, progress=False)[name]
            for s in (1, scale)
        )
        one, other = (
            table.select_dtypes("float").drop(columns=["ci_low", "ci_high"]).iloc[:, 0]
            for table in found
        )
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
