"""Folders of hidden states as vLLM writes them: a file per text, with its tokens and several layers.
The test writes them from a plain pass of transformers.
"""

import json
from pathlib import Path

import naive
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from analysis_lib import AnalysisError, check_layers, load_model, measure_vectors
from analysis_lib.capture.given import GivenVectors, Part
from analysis_lib.cli import main
from analysis_lib.measurement import layer_check, shards

BLOCKS = 4
# In files, the layers as vLLM numbers them: the outputs of blocks, the last one before the norm.
LAYERS = [1, 2, 3, 4]
METRICS = "anisotropy,utterance_similarity"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return tiny.save(folder, "llama", num_hidden_layers=BLOCKS)


def states_of(model, ids: list[int]) -> dict[str, torch.Tensor]:
    """By name, the hidden states of a text as transformers gives them, and the output of the last
    block, before the final norm.
    """
    outputs = []
    block = model.layers[-1]
    handle = block.register_forward_hook(lambda module, given, output: outputs.append(output))
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    handle.remove()
    named = {str(layer): states[0] for layer, states in enumerate(hidden[:-1])}
    last = len(hidden) - 1
    return named | {str(last): outputs[0][0], f"final_{last}": hidden[-1][0]}


def write(
    folder: Path, model, tokenizer, layers, texts=tiny.TEXTS, dtype=torch.float32
) -> list[dict]:
    """A folder as vLLM writes it; returns the states of each text."""
    folder.mkdir(exist_ok=True)
    written = []
    for number, text in enumerate(texts, 8):
        ids = tokenizer(text)["input_ids"]
        states = states_of(model, ids)
        chosen = [states[str(layer)] for layer in layers]
        tensors = {
            "hidden_states": torch.stack(chosen, 1).to(dtype),
            "token_ids": torch.tensor(ids),
        }
        path = folder / f"{number}-a{number}b.safetensors"
        save_file(tensors, path)
        # The lock that vLLM leaves beside it.
        path.with_name(f"{path.name}.lock").touch()
        written.append(states)
    return written


def in_order(folder: Path) -> list[Path]:
    """The files of a folder by the numbers in front of their names."""
    return sorted(folder.glob("*.safetensors"), key=lambda path: int(path.name.split("-")[0]))


@pytest.fixture(scope="module")
def loaded(model_folder):
    model = transformers.LlamaModel.from_pretrained(model_folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    write(folder, *loaded, LAYERS)
    return folder


# --- Measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_folder_gives_the_tables_of_its_arrays(loaded, tmp_path, dtype):
    """In any order of layers; files are in the order of the numbers in their names."""
    layers = [3, 1, "final_4"]
    texts = write(tmp_path, *loaded, layers, dtype=dtype)
    units = [*"aabbccdd"]
    np.save(tmp_path / "units.npy", units)
    arrays = {layer: [text[str(layer)].to(dtype) for text in texts] for layer in layers}
    expected = measure_vectors(arrays, metrics=METRICS, units=units, progress=False)
    found = measure_vectors(tmp_path, metrics=METRICS, layers=layers, progress=False)
    for name in expected:
        pd.testing.assert_frame_equal(found[name], expected[name], check_exact=True)
    assert found.groups == expected.groups == [0, 1, 2, 3]
    assert found.run["dtype"] == str(dtype).removeprefix("torch.")
    table = found["anisotropy"].set_index("layer")
    assert table["space"].to_dict() == {1: "hidden", 3: "hidden", 4: "final"}
    for layer in (1, 3):
        vectors = torch.cat(arrays[layer]).double().numpy()
        assert table["cosine"][layer] == pytest.approx(naive.cosine([vectors]), abs=1e-6)


def test_workers_give_the_same_bytes(folder, monkeypatch, copied_workers):
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 2)
    given = {"metrics": "anisotropy", "layers": LAYERS, "progress": False}
    expected = measure_vectors(folder, **given)["anisotropy"]
    found = measure_vectors(folder, workers=2, **given)["anisotropy"]
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_kept_results_are_of_the_same_layers(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "kept"))
    runs = []
    run = GivenVectors.run
    monkeypatch.setattr(GivenVectors, "run", lambda *given: runs.append(1) or run(*given))
    for layers, count in ((LAYERS, 1), (LAYERS, 1), ([0, 1, 2, 3], 2)):
        tables = measure_vectors(folder, metrics="anisotropy", layers=layers, progress=False)
        assert tables["anisotropy"]["layer"].tolist() == layers
        assert len(runs) == count


def test_no_more_than_a_batch_of_one_layer_is_read_at_a_time(tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    for number in range(40):
        states = torch.randn(100, 3, 8, generator=draw)
        save_file(
            {"hidden_states": states, "token_ids": torch.arange(100)},
            tmp_path / f"{number}.safetensors",
        )
    rows = Part.rows
    shapes = []

    def watched(part: Part, *which: slice) -> torch.Tensor:
        values = rows(part, *which)
        shapes.append(tuple(values.shape))
        return values

    monkeypatch.setattr(Part, "rows", watched)
    measure_vectors(tmp_path, metrics="anisotropy", layers=[1, 2, 3], progress=False)
    assert shapes == [(100, 8)] * 40 * 3


# --- Bad input ------------------------------------------------------------------------------------


def text_of(tokens: int = 5, layers: int = 2, width: int = 6, ids: int | None = None) -> dict:
    """The tensors of a file."""
    return {
        "hidden_states": torch.ones(tokens, layers, width),
        "token_ids": torch.arange(tokens if ids is None else ids),
    }


def spoilt(**changes) -> dict:
    tensors = text_of() | changes
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("files", "layers", "words"),
    [
        ({"a": text_of()}, None, "of 2 layers, and which these are is not known: give layers"),
        ({"a": text_of()}, [1, 2, 3], "of 2 layers, and 3 are given"),
        ({"a": text_of()}, [], "of 2 layers, and 0 are given"),
        ({"a": text_of()}, [1, 1], "layers has 1 twice"),
        ({"a": text_of()}, [1, "hidden_1"], "layers has hidden_1 twice"),
        ({"a": text_of()}, [1, "key_2"], "layers has 'key_2': give numbers"),
        ({"a": text_of()}, [1, -2], "layers has -2"),
        ({"a": text_of()}, [1, 2.0], "layers has 2.0"),
        ({"a": text_of()}, [True, 2], "layers has True"),
        ({"a": text_of()}, "1,2", "layers is '1,2': give a number for each"),
        ({"a": text_of()}, {1, 2}, "layers is a set"),
        ({"a": text_of(ids=4)}, [1, 2], r"I64 of the shape \(4,\).*of 5 tokens"),
        ({"a": text_of(), "b": text_of(width=7)}, [1, 2], r"b.*\(5, 2, 7\).*a.*\(5, 2, 6\)"),
        ({"a": text_of(), "b": text_of(layers=3)}, [1, 2], r"b.*\(5, 3, 6\).*a.*\(5, 2, 6\)"),
        ({"a": text_of(), "b": spoilt(token_ids=None)}, [1, 2], "b.safetensors has no token_ids"),
        ({"a": spoilt(hidden_states=None)}, [1, 2], "a.safetensors has no hidden_states"),
        ({"layer_1": {"x": torch.ones(5, 6)}}, [1], "has no hidden_states.*leave layers out"),
        ({"a": text_of(), "layer_1": {"x": torch.ones(5, 6)}}, None, "layer_1.*no hidden_states"),
        ({"a": text_of(), "b": text_of(tokens=0)}, [1, 2], r"b.*\(0, 2, 6\).*leave the text out"),
        ({"a": spoilt(hidden_states=torch.ones(5, 6))}, [1, 2], r"\(5, 6\): give token x layer"),
        ({"a": spoilt(token_ids=torch.ones(5))}, [1, 2], "F32.*a whole number for each token"),
        ({"a": spoilt(hidden_states=torch.ones(5, 2, 6).int())}, [1, 2], "holds I32"),
        ({"a": spoilt(hidden_states=torch.ones(5, 2, 6) / 0)}, [1, 2], "a.*has NaN or infinity"),
        ({}, [1, 2], "there are no vectors: give a folder of the files that vLLM writes"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path, files, layers, words):
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(AnalysisError, match=words) as refused:
        measure_vectors(tmp_path, metrics="anisotropy", layers=layers, progress=False)
    assert "\n" not in str(refused.value)


def test_layers_are_of_a_folder():
    with pytest.raises(AnalysisError, match="layers are given for vectors in memory"):
        measure_vectors({0: np.eye(3)}, [3], layers=[0], progress=False)


# --- Checked against a model ----------------------------------------------------------------------


def test_layers_are_those_of_the_model(model_folder, folder):
    check = check_layers(folder, model_folder, LAYERS)
    assert check.layers == ("hidden_1", "hidden_2", "hidden_3", "hidden_4")
    words = f"layers 1 to 4 of {model_folder}, the last before the final norm (relative difference"
    assert str(check).startswith(words)
    assert check.difference < 1e-5 < 0.3 < check.next_difference
    assert check.texts == 4
    assert check_layers(folder, model_folder).layers == check.layers


def test_differences_are_those_of_a_plain_pass(model_folder, folder):
    """In float64, of the four texts that are evenly spaced among eight."""
    double = transformers.LlamaModel.from_pretrained(model_folder, dtype=torch.float64).eval()
    expected = {}
    for index in (0, 2, 5, 7):
        tensors = load_file(in_order(folder)[index])
        plain = states_of(double, tensors["token_ids"].tolist())
        for column, values in enumerate(tensors["hidden_states"].double().unbind(1)):
            for name, states in plain.items():
                lengths = torch.maximum(values.norm(dim=1), states.norm(dim=1))
                shares = (values - states).norm(dim=1) / lengths
                middle = sorted(shares.tolist())[(len(shares) - 1) // 2]
                expected[column, name] = max(middle, expected.get((column, name), 0))
    table = check_layers(folder, model_folder).differences
    assert len(table) == len(expected) == BLOCKS * (BLOCKS + 2)
    for row in table.itertuples():
        name = f"final_{row.layer}" if row.space == "final" else f"{row.layer}"
        assert row.difference == pytest.approx(expected[row.column, name], abs=1e-5)


@pytest.mark.parametrize(
    ("real", "said", "words", "remedy"),
    [
        # Off by one, either way: vectors of inputs of blocks, or layers counted from 0.
        ([0, 1, 2], [1, 2, 3], "layers 0 to 2 of ", "give 0,1,2"),
        ([1, 2, 4], [0, 1, 3], "layers 1, 2 and 4 of ", "give 1,2,4"),
        # In the order of the model, whatever the order that vLLM was given.
        ([1, 3], [3, 1], "layers 1 and 3 of ", "give 1,3"),
        ([3, "final_4"], [3, 4], "layer 3 of ", "layer 4 after the final norm"),
        (["final_4"], [4], "layer 4 of ", "give final_4"),
        (
            [2, 4, "final_4"],
            [2, 3, 4],
            "the last before the final norm, layer 4 after",
            "give 2,4,",
        ),
    ],
)
def test_other_layers_are_named(loaded, model_folder, tmp_path, real, said, words, remedy):
    write(tmp_path, *loaded, real)
    with pytest.raises(AnalysisError) as refused:
        check_layers(tmp_path, model_folder, said)
    message = str(refused.value)
    says = ",".join(map(str, said))
    assert f"says {says}, and the vectors are those of" in message
    assert words in message
    assert remedy in message
    assert "\n" not in message
    check = check_layers(tmp_path, model_folder, real)
    assert check.argument == ",".join(map(str, real))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_told_from_another_layer(model_folder, tmp_path, dtype):
    """A model that computes in half precision, against one in single precision."""
    half = transformers.LlamaModel.from_pretrained(model_folder, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    write(tmp_path, half, tokenizer, LAYERS, dtype=dtype)
    check = check_layers(tmp_path, model_folder, LAYERS)
    assert 1e-5 < check.difference < layer_check.LIMIT / 2
    assert check.next_difference > 4 * check.difference
    with pytest.raises(AnalysisError, match="the vectors are those of layers 1 to 4 of"):
        check_layers(tmp_path, model_folder, [0, 1, 2, 3])


def test_other_models_fit_no_layer(loaded, folder, tmp_path):
    other = tiny.save(tmp_path / "other", "llama", seed=1, num_hidden_layers=BLOCKS)
    with pytest.raises(AnalysisError, match=r"layer number 1 .* is none of .*other: the nearest,"):
        check_layers(folder, other, LAYERS)
    narrow = tiny.save(tmp_path / "narrow", "llama", hidden_size=16)
    with pytest.raises(AnalysisError, match=r"has vectors of 24 dimensions, and .*narrow of 16:"):
        check_layers(folder, narrow, LAYERS)
    with pytest.raises(AnalysisError, match="vit reads images"):
        check_layers(folder, tiny.save(tmp_path / "vit", "vit"), LAYERS)


@pytest.mark.parametrize("token", [10**6, -1])
def test_tokens_beyond_the_vocabulary_are_named(loaded, model_folder, tmp_path, token):
    write(tmp_path, *loaded, LAYERS, texts=tiny.TEXTS[:1])
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["token_ids"][2] = token
    save_file(tensors, path)
    with pytest.raises(AnalysisError, match=f"its token_ids have {token}, and .* embeds tokens up"):
        check_layers(tmp_path, model_folder, LAYERS)


def test_the_vectors_of_other_tokens_fit_no_layer(loaded, model_folder, tmp_path):
    """Of one of the texts alone."""
    write(tmp_path, *loaded, LAYERS)
    path = in_order(tmp_path)[-1]
    tensors = load_file(path)
    tensors["token_ids"] = tensors["token_ids"].flip(0)
    save_file(tensors, path)
    with pytest.raises(AnalysisError, match="is none of"):
        check_layers(tmp_path, model_folder, LAYERS)


def test_layers_that_cannot_be_told_apart_are_named(model_folder, tmp_path):
    """A block that adds nothing has the vectors of the one before."""
    model = transformers.LlamaModel.from_pretrained(model_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    for weight in (model.layers[1].self_attn.o_proj.weight, model.layers[1].mlp.down_proj.weight):
        torch.nn.init.zeros_(weight)
    write(tmp_path, model, tokenizer, LAYERS)
    with pytest.raises(AnalysisError, match=r"layer number 1 .* may be 1 or 2 of .* by 0 and 0 of"):
        check_layers(tmp_path, model, LAYERS, tokenizer=tokenizer)


def test_long_texts_are_compared_at_their_beginning(loaded, model_folder, tmp_path):
    model, tokenizer = loaded
    words = " ".join(tiny.TEXTS * 4)
    write(tmp_path, model, tokenizer, LAYERS, texts=[words])
    most = model.config.max_position_embeddings
    assert len(tokenizer(words)["input_ids"]) > most
    check = check_layers(tmp_path, model_folder, LAYERS)
    assert (check.texts, check.tokens) == (1, most)


def test_a_vector_that_is_not_finite_is_named(loaded, model_folder, tmp_path):
    write(tmp_path, *loaded, LAYERS, texts=tiny.TEXTS[:1])
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    tensors["hidden_states"][1, 1] = torch.nan
    save_file(tensors, path)
    with pytest.raises(AnalysisError, match="hidden_states have NaN or infinity"):
        check_layers(tmp_path, model_folder, LAYERS)


@pytest.mark.parametrize("value", [None, "", 1.5, [], {1}, "absent"])
def test_what_is_no_folder_or_model_is_one_line(folder, value):
    for given in ((value, folder), (folder, value)):
        with pytest.raises(AnalysisError) as refused:
            check_layers(*given)
        assert "\n" not in str(refused.value)


def test_a_model_without_a_norm_behind_its_last_block(tmp_path):
    """All hidden states of transformers, from the embeddings on."""
    model, tokenizer = tiny.build("bert")
    folder = tiny.save(tmp_path / "bert", "bert")
    states = tmp_path / "states"
    states.mkdir()
    for number, text in enumerate(tiny.TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        tensors = {"hidden_states": torch.cat(hidden).transpose(0, 1).contiguous()}
        save_file(tensors | {"token_ids": inputs["input_ids"][0]}, states / f"{number}.safetensors")
    check = check_layers(states, folder, [0, 1, 2, 3])
    assert str(check).startswith(f"layers 0 to 3 of {folder} (relative difference")


# --- On the command line --------------------------------------------------------------------------


def run(*options: object) -> int:
    return main(["measure", "--metrics", "anisotropy", "--quiet", *map(str, options)])


def test_the_command_line_checks_and_measures(folder, model_folder, tmp_path, capsys):
    out = tmp_path / "out"
    given = ["--vectors", folder, "--layers", "1,2,3,4", "--out", out]
    assert run(*given) == 0
    assert "layer_check" not in json.loads((out / "run.json").read_text())
    capsys.readouterr()
    assert run(*given, "--check", model_folder, "--device", "cpu") == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"the vectors are those of layers 1 to 4 of {model_folder}, the last be"
    )
    assert last.startswith("wrote 1 table of ")
    entry = json.loads((out / "run.json").read_text())["layer_check"]
    assert entry["layers"] == ["hidden_1", "hidden_2", "hidden_3", "hidden_4"]
    assert entry["difference"] < 1e-5 < entry["next_difference"]
    assert pd.read_parquet(out / "anisotropy.parquet")["layer"].tolist() == LAYERS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "0,1,2,3", "--check", "{model}"], "says 0,1,2,3, and the vectors are those"),
        (["--check", "{model}"], "give --layers 1,2,3,4"),
        (["--layers", "1,2,3", "--check", "{model}"], "of 4 layers, and 3 are given"),
        (["--layers", "1,2,3,4", "--check", "absent"], "absent"),
        (["--layers", "1,,2"], "layers has ''"),
        (["--layers", ""], "layers has ''"),
        ([], "give layers (--layers)"),
        (["--layers", "1,2,3,4", "--dtype", "float64"], "leave --dtype out"),
        (["--layers", "1,2,3,4", "--check", "{model}", "--limit", "3"], "leave --limit out"),
    ],
)
def test_what_does_not_fit_is_one_line_and_writes_nothing(
    folder, model_folder, tmp_path, monkeypatch, capsys, options, words
):
    monkeypatch.chdir(tmp_path)
    given = [option.format(model=model_folder) for option in options]
    assert run("--vectors", folder, "--out", "out", *given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "--debug" not in line
    assert words in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["--layers", "--check"])
def test_options_of_vectors_need_vectors(model_folder, tmp_path, capsys, option):
    given = ["--model", model_folder, "--data", tmp_path / "lines.txt", "--out", tmp_path / "out"]
    assert run(*given, option, "1") == 1
    assert f"{option} is of vectors: give --vectors" in capsys.readouterr().err


def test_other_vectors_have_no_tokens_to_check(model_folder, tmp_path, capsys):
    np.save(tmp_path / "layer_0.npy", np.eye(4))
    given = ["--vectors", tmp_path, "--check", model_folder, "--out", tmp_path / "out"]
    assert run(*given) == 1
    assert "has no hidden_states" in capsys.readouterr().err


def test_a_model_that_is_loaded_is_checked_as_it_is(folder, model_folder):
    model = load_model(model_folder, dtype="bfloat16")
    check = check_layers(folder, model, LAYERS)
    assert 1e-3 < check.difference < layer_check.LIMIT
