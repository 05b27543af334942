"""The command line as a user meets it: exit status, one clear line, files that are whole or
absent.
"""

import argparse
import importlib.metadata
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import tiny
from eager import EAGER, wait_until_stopped
from planted import shown
from reference import COLUMNS
from safetensors import SafetensorError
from waiting import PATIENCE, wait_until

from analysis_book.papers import claims
from analysis_lib import load_corpus, load_model, measure, metrics
from analysis_lib.cli import _parser, main, whole
from analysis_lib.errors import BEGINS_ANEW, CONTINUES, INTERRUPTED, AnalysisError
from analysis_lib.files import LOCK, Output
from analysis_lib.measurement import execution, shards, stored
from analysis_lib.metrics.intervals import Estimate


@pytest.fixture
def run(capsys):
    """Run a command in this process: its status and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    status, _, err = result
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1
    assert len(lines) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in lines[0]


def test_measure_writes_every_table_and_says_what_made_it(run, tiny_folder, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text(
        "A girl is styling her hair.\n\nHi\nQueries ask keys, keys answer.\n", encoding="utf-8"
    )
    out = tmp_path / "out"
    model = tiny_folder("bert")
    status, stdout, err = run(
        "measure", "--model", model, "--data", text, "--limit", 3, "--seed", 5, "--out", out
    )
    assert status == 0
    assert str(out) in stdout
    assert re.search(r"note: .*: 1 of 4 texts are blank or hold no token, and are left out", err)
    assert {path.name for path in out.glob("[!.]*")} == {f"{name}.parquet" for name in COLUMNS} | {
        "run.json"
    }
    for name, columns in COLUMNS.items():
        assert pd.read_parquet(out / f"{name}.parquet").columns.tolist() == columns
    written = json.loads((out / "run.json").read_text())
    assert written["model"] == str(model)
    assert set(written["model_files"]) >= {"config.json", "model.safetensors"}
    assert written["seed"] == 5
    assert written["limit"] == 3
    assert written["data_sha256"]
    assert written["versions"]["torch"]
    assert written["seconds"] > 0
    assert written["report"]["utterances"] == 3


def test_a_limit_draws_items_unless_the_first_are_asked_for(run, tiny_folder, tmp_path):
    text, out, model = tmp_path / "lines.txt", tmp_path / "out", tiny_folder("bert")
    text.write_text("\n".join(f"Line {number} of twenty" for number in range(20)), encoding="utf-8")
    asked = [
        "measure",
        "--model",
        model,
        "--data",
        text,
        "--metrics",
        "mean_vector",
        "--out",
        out,
        "--limit",
        4,
    ]
    for options, draw in (
        ([], {"seed": 0}),
        (["--seed", 3], {"seed": 3}),
        (["--first"], {"seed": None}),
    ):
        assert run(*asked, *options)[0] == 0
        written = json.loads((out / "run.json").read_text())
        assert written["data_sha256"] == load_corpus(str(text), 4, **draw).sha256
        assert {"limit": 4, **draw}.items() <= written.items()
    assert load_corpus(str(text), 4, seed=None).texts[3] == "Line 3 of twenty"
    assert_refused(run(*asked, "--first", "--seed", 1), "--first", "--seed", "give one of them")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "--first"], ["--first", "give --limit"]),
        (["measure", "--seed", "3"], ["--seed", "give --limit"]),
        (["compare", "--seed", "3"], ["--seed", "give --limit"]),
        (["measure", "--worker-timeout", "5"], ["--worker-timeout", "give --scheduler"]),
        (["measure", "--worker-timeout", "60"], ["--worker-timeout", "give --scheduler"]),
        (["measure", "--device", "cpu", "--device-map", "auto"], ["exclude each other"]),
        (
            ["measure", "--maps", "positions"],
            ["maps is positions", "convolutional", "leave maps out"],
        ),
        (["measure", "--units", "doc"], ["no column of a table", "leave doc out"]),
        (["measure", "--units", "doc", "--data", "-"], ["lines of text", "leave doc out"]),
        (["measure", "--units", "doc", "--data", "news"], ["leave units= out"]),
        (["compare", "--units", "doc"], ["no column of a table", "leave doc out"]),
        (["report", "--units", "doc"], ["no column of a table", "leave doc out"]),
        (["report", "--index", "."], ["--index lists the reports", "leave"]),
        (["measure@dtype=float64", "--dtype", "bfloat16"], ["own dtype", "leave --dtype out"]),
        (["compare@dtype=float64", "--dtype", "bfloat16"], ["own dtype", "leave --dtype out"]),
        (["report@dtype=float64", "--dtype", "bfloat16"], ["own dtype", "leave --dtype out"]),
        (
            ["pretrain", "--tokenizer", "minilm", "--cased"],
            ["cased", "tokenizer that is learned", "leave it out"],
        ),
        (
            ["pretrain", "--tokenizer", "minilm", "--vocabulary", "9"],
            ["vocabulary", "leave it out"],
        ),
        (["run", "--list", "-p", "a", "b"], ["--list", "leave -p out"]),
        (["run", "outliers/attention", "--list"], ["--list", "leave NOTEBOOK out"]),
        (["run", "--list", "--parameters"], ["--list", "leave --parameters out"]),
        (
            ["run", "outliers/attention", "--parameters", "-p", "a", "b"],
            ["--parameters", "leave -p out"],
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(
    run, tiny_folder, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a girl")))
    (tmp_path / "lines.txt").write_text("a girl is styling her hair\nthe cat sat\n")
    (name, *others), out = arguments, tmp_path / "out"
    command, _, dtype = name.partition("@")
    model = f"{tiny_folder('bert')}{'@' * bool(dtype)}{dtype}"
    models = {"measure": ["--model", model], "compare": [model], "report": [model]}.get(command, [])
    data = [] if command == "run" else ["--data", tmp_path / "lines.txt", "--out", out]
    assert_refused(run(command, *models, *data, *others), *words)
    assert not out.exists()


def test_options_at_their_defaults_are_taken(run, tiny_folder, tmp_path):
    (tmp_path / "lines.txt").write_text("a girl is styling her hair\nthe cat sat\n")
    asked = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        tmp_path / "lines.txt",
        "--out",
        tmp_path / "out",
    ]
    asked += ["--metrics", "mean_vector", "--seed", 0, "--dtype", "float32", "--maps", "flatten"]
    assert run(*asked)[0] == 0


def test_some_metrics_only(run, tiny_folder, tmp_path):
    status, _, _ = run(
        "measure", "--model", tiny_folder("bert"), "--data", "news", "--limit", 4,
        "--metrics", "anisotropy, qk_alignment", "--out", tmp_path,
    )  # fmt: skip
    assert status == 0
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "anisotropy.parquet",
        "qk_alignment.parquet",
        "run.json",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "news", "--limit", "0"], ["limit is 0"]),
        (["--data", "news", "--limit", "-3"], ["limit is -3"]),
        (["--data", "news", "--limit", "5", "--seed", "-1"], ["seed is -1"]),
        (["--data", "newz"], ["newz", "news"]),
        (["--data", "news:sentence"], ["sentences"]),
        (["--data", "absent.csv:text"], ["absent.csv"]),
        (["--data", "news", "--metrics", "anisotrpy"], ["anisotrpy", "anisotropy"]),
        (["--data", "news", "--metrics", ""], ["--metrics is empty"]),
        (["--data", "news", "--metrics", "all,anisotropy"], ["all stands by itself"]),
        (
            ["--data", "news", "--limit", "2", "--revision", "main"],
            ["not read from the hub", "leave the revision out"],
        ),
        (["--data", "news", "--model", "minilm:untrained@seed=-1"], ["'-1'", "whole number"]),
        (["--data", "news", "--limit", "2", "--long-texts", "fold"], ["fold", "cut", "window"]),
        (["--data", "news", "--limit", "2", "--special-tokens", "no"], ["keep", "drop"]),
        (["--data", "news", "--limit", "2", "--workers", "0"], ["workers is 0"]),
        (["--data", "news", "--limit", "2", "--tokens-per-batch", "0"], ["tokens_per_batch is 0"]),
        (["--data", "news", "--limit", "2", "--dtype", "float8"], ["float32", "float16"]),
        (
            ["--data", "news", "--workers", "2", "--scheduler", "tcp://x:1"],
            ["--workers", "--scheduler"],
        ),
        (["--data", "news", "--limit", "2", "--device", "warp"], ["warp"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_table(run, tiny_folder, tmp_path, arguments, words):
    out = tmp_path / "out"
    assert_refused(run("measure", "--model", tiny_folder("bert"), "--out", out, *arguments), *words)
    assert not list(out.glob("*.parquet"))
    assert not list(out.glob("run.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "--limit", "two"], ["--limit", "'two' is no whole number", "measure --help"]),
        (["pretrain", "--warmup", "half"], ["--warmup", "'half' is no number", "pretrain --help"]),
        (["measure", "--model", "minilm"], ["--data", "--out", "measure --help"]),
        (["measur"], ["'measur'", "measure", "--help"]),
    ],
)
def test_a_misspelt_command_is_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words)


def test_a_misspelt_model_is_offered_the_nearest(run, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis_lib.corpora.hub._reachable", lambda: False)
    result = run(
        "measure", "--model", "minlm", "--data", "news", "--limit", 2, "--out", tmp_path / "out"
    )
    assert_refused(result, "minlm", "minilm", "cannot be reached")


def test_an_output_folder_that_cannot_be_written(run, tiny_folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "out"
    result = run(
        "measure", "--model", tiny_folder("bert"), "--data", "news", "--limit", 2, "--out", out
    )
    assert_refused(result, str(out), "cannot be written")


def test_texts_that_are_cut_are_counted(run, tiny_folder, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("a " * 400 + "\nHi\n", encoding="utf-8")
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        text,
        "--metrics",
        "anisotropy",
    ]
    _, _, err = run(*arguments, "--out", tmp_path / "cut")
    assert re.search(
        r"note: .*: 1 of 2 texts are longer than the 160 tokens that are read, and are cut there",
        err,
    )
    _, _, err = run(*arguments, "--out", tmp_path / "window", "--long-texts", "window")
    assert "read in windows" in err
    written = [
        json.loads((tmp_path / kind / "run.json").read_text())["report"]
        for kind in ("cut", "window")
    ]
    assert written[0]["utterances"] == 2
    assert written[1]["utterances"] > 2


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder of images."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, image in enumerate(tiny.items("vit")):
        image.save(folder / f"{i}.png")
    return folder


def test_a_convolutional_network_on_a_folder_of_images(run, tiny_folder, images, tmp_path):
    arguments = ["measure", "--model", tiny_folder("resnet-basic"), "--data", images]
    assert run(*arguments, "--out", tmp_path / "flat")[0] == 0
    assert run(*arguments, "--maps", "positions", "--out", tmp_path / "spread")[0] == 0
    tables = {"anisotropy", "mean_vector", "dimension_means", "outlier_dimensions"}
    assert {path.stem for path in (tmp_path / "flat").glob("*.parquet")} == tables
    assert {path.stem for path in (tmp_path / "spread").glob("*.parquet")} == {
        *tables,
        "utterance_similarity",
    }
    written = [
        json.loads((tmp_path / kind / "run.json").read_text()) for kind in ("flat", "spread")
    ]
    assert [run["settings"]["maps"] for run in written] == ["flatten", "positions"]
    flat, spread = ([layer["width"] for layer in run["layers"]] for run in written)
    assert flat == [8 * 8 * 8, 8 * 8 * 8, 8 * 8 * 8, 16 * 4 * 4, 16 * 4 * 4]
    assert spread == [8, 8, 8, 16, 16]


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (
            "resnet-basic",
            ["--metrics", "attention_entropy"],
            ["attention_entropy makes no sense", "no attention"],
        ),
        (
            "resnet-basic",
            ["--metrics", "utterance_similarity"],
            ["utterance_similarity makes no sense", "positions"],
        ),
        ("resnet-basic", ["--maps", "flat"], ["maps is 'flat'", "flatten, positions"]),
        ("bert", [], ["reads texts", "holds images"]),
        ("wav2vec2", [], ["reads sounds", "holds images"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    run, tiny_folder, images, tmp_path, model, arguments, words
):
    out = tmp_path / "out"
    result = run(
        "measure", "--model", tiny_folder(model), "--data", images, "--out", out, *arguments
    )
    assert_refused(result, *words)
    assert not list(out.glob("*.parquet"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "--model", "digits-vit@steps=7", "--data", "news"], ["reads images and news", "holds texts"]),
        (["measure", "--model", "digits-vit@steps=7", "--data", "digits", "--workers", "0"], ["workers is 0"]),
        (["measure", "--model", "digits-resnet@steps=7:untrained", "--data", "digits", "--metrics", "score_terms"],
         ["score_terms makes no sense"]),
        (["compare", "text-gpt2@steps=7", "digits-vit@steps=7", "--data", "news"], ["digits-vit@steps=7 reads images"]),
        (["dynamics", "bert-4@steps=7", "--data", "digits"], ["bert-4@steps=7 reads texts and digits holds images"]),
    ],
)  # fmt: skip
def test_nothing_is_trained_for_what_cannot_be_measured(
    run, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setattr(
        "analysis_book.training.recipes._train", lambda *_: pytest.fail("a model was trained")
    )
    monkeypatch.setattr(
        "analysis_book.training.pretraining._train", lambda *_: pytest.fail("a run was trained")
    )
    assert_refused(run(*arguments, "--limit", 4, "--out", tmp_path / "out"), *words)


def test_an_untrained_twin(run, tiny_folder, tmp_path):
    folder = tiny_folder("bert")
    for name in (folder, f"{folder}:untrained"):
        out = tmp_path / Path(name).name
        arguments = ["--data", "news", "--limit", 3, "--metrics", "mean_vector", "--out", out]
        assert run("measure", "--model", name, *arguments)[0] == 0
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/run.json"))]
    assert [run["model"] for run in written] == [str(folder), f"{folder}:untrained"]
    assert written[1]["model_revision"] == f"untrained, seed 0, of {written[0]['model_revision']}"
    tables = [pd.read_parquet(path) for path in sorted(tmp_path.glob("*/mean_vector.parquet"))]
    assert not tables[0]["mean_norm"].equals(tables[1]["mean_norm"])


def test_a_run_that_is_killed_resumes_and_gives_the_same_tables(
    run, tiny_folder, tmp_path, monkeypatch
):
    real = shards.begin
    arguments = [
        "measure",
        "--model",
        str(tiny_folder("bert")),
        "--data",
        "reviews",
        "--limit",
        "1500",
    ]
    out = tmp_path / "killed"
    process = subprocess.Popen([*EAGER, *arguments, "--out", str(out)], stderr=subprocess.DEVNULL)
    wait_until_stopped(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(out.glob("*.parquet"))
    measured = []
    monkeypatch.setattr(
        "analysis_lib.measurement.shards.begin",
        lambda shard, *rest: measured.append(shard.index) or real(shard, *rest),
    )
    (kept,) = out.glob(".unfinished-*.npz")
    merged = int(np.load(kept)["merged"])
    assert 1 <= merged < 3
    assert run(*arguments, "--out", out)[0] == 0
    assert len(measured) == 3 - merged
    assert not list(out.glob(".unfinished-*"))
    assert run(*arguments, "--out", tmp_path / "whole")[0] == 0
    name = "anisotropy.parquet"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_interrupted_run_is_one_line(tiny_folder, tmp_path):
    arguments = [
        "measure",
        "--model",
        str(tiny_folder("bert")),
        "--data",
        "reviews",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [*EAGER, *arguments, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    wait_until_stopped(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == CONTINUES
    assert list(tmp_path.glob(".unfinished-*.npz"))
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize(
    ("delay", "script"), [(0, False), (0.1, False), (1, False), (0, True), (0.1, True)]
)
def test_an_interruption_while_the_library_is_imported_is_one_line(tmp_path, delay, script):
    path = tmp_path / "analysis-lib"
    path.write_text("from analysis_lib.cli import main; main()")
    arguments = ["measure", "--model", "minilm", "--data", "wikipedia", "--out", tmp_path / "out"]
    started = [path] if script else ["-m", "analysis_lib"]
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *started, *arguments],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    read = []
    # Python's own start is not ours.
    while "analysis_lib.errors" not in (read or [""])[-1]:
        read.append(process.stderr.readline())
        assert read[-1], read
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert [line[line.index("interrupted") :] for line in said] == [INTERRUPTED]


def interrupts(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


MEASUREMENT = "analysis_lib.measurement"


@pytest.mark.parametrize(
    ("place", "arguments", "words"),
    [
        (f"{MEASUREMENT}.measuring.make_shards", ["measure", "--model", "{bert}", "--data", "{lines}"], BEGINS_ANEW),
        (f"{MEASUREMENT}.comparison.measure", ["compare", "{bert}", "{gpt2}", "--data", "{lines}"], BEGINS_ANEW),
        ("analysis_book.build.reports.measure_sensible", ["report", "{bert}", "--data", "{lines}"], BEGINS_ANEW),
        ("analysis_book.training.recipes._train", ["train", "digits-vit"], BEGINS_ANEW),
        ("analysis_book.build.run_notebook", ["run", "anisotropy/layers"], BEGINS_ANEW),
    ],
)  # fmt: skip
def test_an_interruption_says_that_the_command_begins_anew(
    run, tiny_folder, tmp_path, monkeypatch, place, arguments, words
):
    """In the tests, no finished measurement is kept."""
    (tmp_path / "lines.txt").write_text("a girl is styling\nher hair\n")
    monkeypatch.setattr(place, interrupts)
    given = {
        "bert": tiny_folder("bert"),
        "gpt2": tiny_folder("gpt2"),
        "lines": tmp_path / "lines.txt",
    }
    arguments = [argument.format(**given) for argument in arguments]
    status, _, err = run(*arguments, "--out", tmp_path / "out")
    assert (status, err.splitlines()[-1]) == (130, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["compare", "report"])
def test_an_interruption_after_the_first_of_two_models_says_that_it_is_kept(
    run, tiny_folder, tmp_path, monkeypatch, command
):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "kept"))
    (tmp_path / "lines.txt").write_text("a girl is styling\nher hair\n")
    loaded = []

    def interrupts_the_second(name: str, *given: object, **more: object) -> object:
        loaded.append(name)
        if len(loaded) == 2:
            raise KeyboardInterrupt
        return load_model(name, *given, **more)

    module = (
        "analysis_lib.measurement.comparison"
        if command == "compare"
        else "analysis_book.build.reports"
    )
    monkeypatch.setattr(f"{module}.load_model", interrupts_the_second)
    models = [tiny_folder("bert"), tiny_folder("gpt2")]
    options = ["--twins", 0] if command == "compare" else []
    status, _, err = run(
        command, *models, "--data", tmp_path / "lines.txt", *options, "--out", tmp_path / "out"
    )
    assert (status, err.splitlines()[-1]) == (130, CONTINUES)
    assert [*(tmp_path / "kept").rglob("*.npz")]


def test_compare_takes_a_device_and_workers(run, tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("a girl is styling\nher hair\n")
    asked = []

    def measured(model: object, *given: object, **more: object) -> object:
        asked.append((str(model.device), more["workers"]))
        return measure(model, *given, **more)

    monkeypatch.setattr("analysis_lib.measurement.comparison.measure", measured)
    given = [
        "compare",
        tiny_folder("bert"),
        "--data",
        tmp_path / "lines.txt",
        "--twins",
        0,
        "--out",
        tmp_path / "out",
    ]
    assert run(*given, "--device", "cpu", "--workers", 2)[0] == 0
    assert asked == [("cpu", 2)]
    assert_refused(run(*given, "--device", "warp"), "warp")
    assert_refused(run(*given, "--workers", 0), "workers is 0")


# --- Pretraining and its dynamics -----------------------------------------------------------------


@pytest.fixture
def little(tmp_path) -> list[object]:
    """The options of a run that takes a second."""
    text, config = tmp_path / "lines.txt", tmp_path / "config.json"
    text.write_text(
        "\n".join(
            f"{a} {b} sees {b} {a}." for a in ("cat", "dog", "bird") for b in ("mouse", "fox")
        )
        * 40
    )
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config.write_text(json.dumps(sizes))
    options = {
        "data": text,
        "config": config,
        "steps": 3,
        "batch": 2,
        "length": 12,
        "vocabulary": 60,
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def test_pretrain_then_dynamics(run, little, tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "data"))
    rates = [
        "--learning-rate",
        "2e-3",
        "--warmup",
        0.5,
        "--weight-decay",
        0,
        "--seeds",
        "3,1",
        "--device",
        "cpu",
    ]
    status, out, err = run("pretrain", "--out", tmp_path / "run", *little, *rates)
    assert (status, err) == (0, "")
    assert "seed 3, 1" in out
    written = json.loads((tmp_path / "run" / "pretraining.json").read_text())["settings"]
    assert (written["steps"], written["batch"], written["length"], written["vocabulary"]) == (
        3,
        2,
        12,
        60,
    )
    assert (written["learning_rate"], written["warmup"], written["weight_decay"]) == (
        2e-3,
        0.5,
        0.0,
    )
    assert written["configuration"]["hidden_size"] == 16
    data = ["--data", tmp_path / "lines.txt", "--limit", 4, "--seed", 2, "--seeds", "1,3"]
    status, out, err = run("dynamics", tmp_path / "run", "--out", tmp_path / "tables", *data)
    # One note for all checkpoints.
    assert status == 0
    cut, units = (
        "1 of 4 texts are longer than the 12 tokens that are read.*",
        "its intervals rest on 4 independent .*",
    )
    assert re.fullmatch(f"note: seed_1-step_3: {cut}\nnote: seed_1-step_3: {units}\n", err)
    assert str(tmp_path / "tables") in out
    about = json.loads((tmp_path / "tables" / "dynamics.json").read_text())
    assert (about["limit"], about["seed"], about["seeds"]) == (4, 2, [1, 3])
    written = {path.stem for path in (tmp_path / "tables").glob("[!.]*")}
    assert written == {
        "anisotropy", "attention_entropy", "qk_alignment", "head_means", "losses", "baselines",
        "vectors", "dynamics",
    }  # fmt: skip
    alignment = pd.read_parquet(tmp_path / "tables" / "qk_alignment.parquet")
    assert len(alignment) == 2 * 4 * 2 * 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("command", ["pretrain", "classifiers", "measure"])
def test_a_full_disk_is_one_line_that_names_the_folder(
    run, little, tiny_folder, yelphat, tmp_path, monkeypatch, command, error
):
    def full(*_, **__):
        raise error

    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "data"))
    few = ["--data", tmp_path / "lines.txt", "--limit", 3]
    arguments = {
        "pretrain": little,
        "classifiers": ["--data", yelphat, "--layers", 1, "--seeds", 0],
        "measure": ["--model", tiny_folder("bert"), *few],
    }
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    monkeypatch.setattr(stored, "SECONDS_AT_RISK", 0)
    monkeypatch.setattr(stored.np, "savez", full)
    result = run(command, "--out", tmp_path / "out", *arguments[command])
    written = tmp_path / ("data" if command == "classifiers" else "out")
    assert_refused(
        result, str(written), "cannot be written", "No space left on device", "free some space"
    )
    assert not [path for path in tmp_path.glob("out/[!.]*") if path.name != "pretraining.json"]


def test_what_needs_no_package_is_measured_where_nothing_can_be_kept(
    run, tiny_folder, tmp_path, monkeypatch
):
    """A file in the place of the folder: permissions do not bind root, who runs CI."""
    (tmp_path / "packages").write_text("in the way")
    (tmp_path / "lines.txt").write_text("a girl is styling\n")
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    monkeypatch.delenv("ANALYSIS_LIB_MEASUREMENTS")
    arguments = ["measure", "--data", tmp_path / "lines.txt", "--out"]
    assert run(*arguments, tmp_path / "out", "--model", tiny_folder("bert"))[0] == 0
    monkeypatch.setattr("analysis_lib.models.conversion.CONVERTERS", {})
    minilm = run(*arguments, tmp_path / "minilm", "--model", "minilm")
    assert_refused(minilm, str(tmp_path / "packages"), "cannot be written", "ANALYSIS_LIB_DATA")


def test_a_command_that_is_refused_leaves_no_folder(run, tmp_path):
    (tmp_path / "lines.txt").write_text("a girl\n")
    out = tmp_path / "new" / "deep"
    assert_refused(
        run("measure", "--model", tmp_path, "--data", tmp_path / "lines.txt", "--out", out),
        "config.json",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


# --- Classifiers
# ------------------------------------------------------------------------------------


def test_classifiers_are_trained_and_measured(run, yelphat, tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "data"))
    out = tmp_path / "out"
    options = ["--layers", "1,2", "--entropy-weights", "0.1", "--seeds", "3", "--out", out]
    status, written, _ = run("classifiers", "--data", yelphat, *options)
    assert status == 0
    assert str(out) in written
    found = pd.read_csv(out / "trials.csv")
    assert [*found.groupby(["layers", "entropy_weight", "seed"]).groups] == [
        (1, 0.0, 3),
        (1, 0.1, 3),
        (2, 0.0, 3),
    ]
    about = json.loads((out / "results.json").read_text())
    assert about["texts"] == {"train": 14, "validation": 4, "test": 6}
    trials = {"limit": 0, "utterances": 1000, "epochs": 50, "patience": 5}
    asked = {"layers": [1, 2], "entropy_weights": [0.1], "seeds": [3]}
    asked |= {"sensitivity_seeds": [], "sensitivity_layers": [1]}
    assert about["settings"] == {**asked, "trials": trials}
    assert str(tmp_path) not in json.dumps(about)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "newz"], ["newz", "news"]),
        (["--data", "news"], ["news has no split train"]),
        (["--data", "README.md"], ["README.md names no classes", "reviews.csv:text:label"]),
        (["--data", "{tmp}/absent/yelphat"], ["absent/yelphat"]),
        (["--layers", "one"], ["--layers is 'one'", "1,2"]),
        (["--layers", "2,0"], ["layers is 0"]),
        (["--entropy-weights", "0.1,-1"], ["entropy_weight is -1.0"]),
        (["--entropy-weights", "x"], ["--entropy-weights is 'x'", "0.001"]),
        (["--seeds", ""], ["--seeds is empty"]),
        (["--seeds", "0,-1"], ["seed is -1"]),
        (["--sensitivity", "all"], ["--sensitivity is 'all'"]),
        (["--sensitivity", "0,-1"], ["seed is -1"]),
    ],
)
def test_classifiers_that_cannot_be_trained(run, tmp_path, arguments, words):
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    given += [] if "--data" in given else ["--data", "reviews"]
    assert_refused(run("classifiers", *given, "--out", tmp_path / "out"), *words)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", ["config.json cannot be read (TypeError: it holds a list)", "hidden_size"]),
        ("{bad", ["config.json cannot be read (JSONDecodeError"]),
        (None, ["config.json cannot be read"]),
        ('{"hidden_sise": 32}', ["did you mean hidden_size"]),
        ('{"layer_norm_eps": NaN}', ["layer_norm_eps is nan"]),
    ],
)
def test_a_configuration_that_cannot_be_used(run, little, tmp_path, content, words):
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert_refused(run("pretrain", "--out", tmp_path / "run", *little), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "wikipedai"], ["did you mean wikipedia"]),
        (["--steps", "0"], ["steps is 0"]),
        (["--learning-rate", "0"], ["learning_rate is 0.0"]),
        (["--seeds", "0,x"], ["--seeds is '0,x'", "0,1,2"]),
        (["--seeds", "-1"], ["seeds is -1"]),
        (["--workers", "0"], ["workers is 0"]),
        (["--device", "warp"], ["warp"]),
        (["--vocabulary", "8"], ["no room", "or more"]),
        (["--batch", str(10**15)], ["a batch below"]),
        (["--length", str(10**15)], ["GB of memory", "a shorter length"]),
        (["--length", str(10**5)], ["makes 0 sequences"]),
        (["--out", "{tmp}/lines.txt"], ["is a file"]),
        (["--out", "{tmp}/lines.txt/run"], ["cannot be written"]),
        (["--out", "{tmp}"], ["holds config.json and no training"]),
    ],
)
def test_what_cannot_be_pretrained_leaves_no_folder(run, little, tmp_path, arguments, words):
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert_refused(run("pretrain", "--out", tmp_path / "run", *little, *given), *words)
    assert {path.name for path in tmp_path.iterdir()} == {"lines.txt", "config.json"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bert-44"], ["there is no run 'bert-44'", "bert-4"]),
        (["bert-4@stpes=3"], ["stpes", "steps"]),
        (["{tmp}"], ["there is no run"]),
        (["multiberts", "--seeds", "9"], ["seed 9", "0 to 4"]),
        (["multiberts", "--data", "newz"], ["newz", "news"]),
        (["multiberts", "--limit", "0"], ["limit is 0"]),
        (["multiberts", "--seeds", ""], ["--seeds is empty"]),
        (["multiberts"], ["google/multiberts-seed_0-step_2000k", "cannot be reached"]),
    ],
)
def test_dynamics_that_cannot_be_measured(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr("analysis_lib.corpora.hub._reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    if not any(argument == "--data" for argument in given):
        given += ["--data", "news"]
    assert_refused(run("dynamics", *given, "--out", tmp_path / "out"), *words)
    assert not list(tmp_path.glob("out/*"))


def test_an_interrupted_pretraining_in_processes_is_one_line_and_goes_on(run, little, tmp_path):
    """Interrupted as by Ctrl-C in a terminal: its workers are, too."""
    arguments = ["pretrain", "--out", tmp_path / "run", *little, "--steps", 400]
    process = subprocess.Popen(
        [sys.executable, "-m", "analysis_lib", *map(str, arguments), "--seeds=0,1,2", "--workers=2"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "run" / "seed_0-step_8").is_dir(), process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    # Within a minute of its start, no state is kept to go on from.
    assert err.splitlines() == [
        "interrupted: no state of the training is kept yet, and the same command begins it anew"
    ]
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("seed_0-step_*")}
    assert run(*arguments)[0] == 0
    assert (
        kept.items()
        <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}.items()
    )
    assert len(pd.read_csv(tmp_path / "run" / "seed_0.csv")) == 401


def test_models_and_datasets_list_what_is_known_by_name(run):
    status, out, _ = run("models")
    assert status == 0
    assert "minilm" in out
    assert "bert-base-uncased" in out
    assert ":untrained" in out
    assert out.count("multiberts-seed") == 2
    assert out.count("\n") < 50
    status, out, _ = run("datasets")
    assert status == 0
    for name in ("wikipedia", "news", "reviews", "stsb:dev", "wikitext-103"):
        assert name in out


def test_claims_are_the_ledger_and_a_status(run, tmp_path):
    """A notebook with one verdict that holds and one that does not."""
    numbers = {
        "maruta-early-cls": Estimate(1.0, 0.9, 1.1),
        "maruta-middle-sep": Estimate(-1.0, -1.1, -0.9),
    }
    found = pd.DataFrame(
        [claims.judged(name, one) | {"model": "mine"} for name, one in numbers.items()]
    )
    data, metadata = shown(found)._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    path = tmp_path / "attention.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]), path
    )
    status, out, _ = run("claims", str(path))
    assert status == 0
    line = r"^maruta-early-cls \(above \S+\)\n  holds +mine +1\.000 \[0\.900, 1\.100\]$"
    assert re.search(line, out, re.MULTILINE)
    assert re.search(r"^maruta-late-punctuation: not run$", out, re.MULTILINE)
    status, out, _ = run("claims", str(path), "--csv", "--require", "maruta-early-cls")
    assert status == 0
    assert pd.read_csv(io.StringIO(out))["verdict"].tolist() == ["holds", "does not hold"]
    # A page of the same name in another folder is another page.
    other = tmp_path / "untrained" / "attention.ipynb"
    other.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), other)
    status, again, _ = run("claims", str(path), str(other), "--csv")
    assert (status, again) == (0, out)
    for name in ("maruta-middle-sep", "maruta-late-punctuation"):
        status, _, err = run("claims", str(path), "--require", f"maruta-early-cls,{name}")
        assert (status, err.count("\n")) == (1, 1)
        assert name in err
    status, _, err = run("claims", str(path), "--require", "maruta-early-cl")
    assert status == 1
    assert "maruta-early-cls" in err


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_ledger_fits_into_the_terminal_and_cuts_no_name(run, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    found = claims.judged("maruta-early-cls", Estimate(1.0, 0.9, 1.1))
    rows = [found | {"model": f"a model with a long name, number {number}"} for number in range(2)]
    data, metadata = shown(pd.DataFrame(rows))._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    path = tmp_path / "attention.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])]), path
    )
    status, out, _ = run("claims", path)
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    for paper in claims.PAPERS:
        for name in claims.load(paper):
            assert re.search(rf"^{name}(:| \()", out, re.MULTILINE)
    assert out.count("number 0") == out.count("number 1") == 1


COMMANDS = "measure merge compare generate pretrain train dynamics classifiers run book report claims cache metrics models datasets"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_the_help_of_a_command_says_what_it_does_with_examples_that_it_takes(capsys, command):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    usage, does, *_ = shown.split("\n\n")
    assert usage.startswith(f"usage: analysis-lib {command}")
    assert re.match(r"[A-Z].+\.$", does, re.DOTALL)
    _, _, examples = shown.rpartition("example")
    lines = [line.strip() for line in examples.splitlines()[1:]]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "analysis-lib"
        assert _parser().parse_args(arguments).command


def test_every_command_is_helped():
    assert all(f" {name} " in _parser().format_help() for name in COMMANDS.split())


def test_no_option_prints_what_a_shell_takes_for_a_redirection(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["measure", "--help"])
    assert "'norm<10x'" in capsys.readouterr().out


def test_notebooks_and_their_parameters_are_listed(run, tmp_path):
    status, out, _ = run("run", "--list")
    assert status == 0
    assert re.search(r"^anisotropy/layers +How anisotropic is each layer\?$", out, re.MULTILINE)
    assert re.search(r"^report/similarity +", out, re.MULTILINE)
    status, out, _ = run("run", "anisotropy/layers", "--parameters")
    assert status == 0
    assert re.search(r"^limit +int +1500 +how many texts, drawn at random$", out, re.MULTILINE)
    assert re.search(
        r"^model +str +'minilm' +a name of `models`, a hub id, or a folder$", out, re.MULTILINE
    )
    (tmp_path / "mine.ipynb").write_text("{}")
    assert_refused(
        run("run", tmp_path / "mine.ipynb", "--parameters"), "mine.ipynb", "as Jupyter saves it"
    )
    assert_refused(run("run", "anisotropy/layer", "--parameters"), "did you mean anisotropy/layers")
    assert_refused(run("run"), "NOTEBOOK is missing", "run --list")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "absent.ipynb"], ["absent.ipynb"]),
        (["run", "anisotropy/layer"], ["anisotropy/layer", "did you mean anisotropy/layers"]),
        (["run", "anisotropy/layers", "-p", "modell", "minilm"], ["modell", "model"]),
        (["run", "book/anisotropy/layers.ipynb", "-p", "modell", "minilm"], ["modell", "model"]),
        (["run", "book/anisotropy/layers.ipynb", "-p", "limit", "many"], ["limit", "int", "many"]),
        (["book", "-p", "limt", "5"], ["limt", "limit"]),
        (["book", "--profile", "papr"], ["papr", "paper"]),
        (["book", "-p", "data", "absent.csv:text"], ["absent.csv"]),
    ],
)
def test_a_misspelt_notebook_or_parameter_is_refused(run, arguments, words):
    assert_refused(run(*arguments), *words)


def test_the_paper_profile_says_offline_what_cannot_be_reached(run, monkeypatch, tmp_path):
    monkeypatch.setattr("analysis_lib.corpora.hub._reachable", lambda: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert_refused(
        run("book", "--profile", "paper"), "is not in the local cache", "cannot be reached"
    )


def test_an_unexpected_error_is_one_line_too(run, monkeypatch, tmp_path):
    def broken(*_args, **_kwargs):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("analysis_lib.load_corpus", broken)
    result = run("measure", "--model", "minilm", "--data", "news", "--out", tmp_path)
    assert_refused(result, "RuntimeError: first line second line", "--debug")
    with pytest.raises(RuntimeError):
        main(["measure", "--model", "minilm", "--data", "news", "--out", str(tmp_path), "--debug"])


def test_a_run_leaves_the_sums_of_another_alone(run, tiny_folder, tmp_path):
    other = tmp_path / ".unfinished-0123456789abcdef.npz"
    other.write_bytes(b"of another run")
    assert (
        run(
            "measure",
            "--model",
            tiny_folder("bert"),
            "--data",
            "news",
            "--limit",
            3,
            "--out",
            tmp_path,
        )[0]
        == 0
    )
    assert other.read_bytes() == b"of another run"
    assert [path.name for path in tmp_path.glob(".unfinished-*")] == [other.name]


def test_a_second_run_into_the_same_folder_is_refused(run, tiny_folder, tmp_path):
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        "news",
        "--limit",
        3,
        "--out",
        tmp_path,
    ]
    with Output(tmp_path, "measure", ("another", "news"), "run.json").alone():
        assert_refused(run(*arguments), "another run", str(tmp_path))
    assert run(*arguments)[0] == 0
    assert not (tmp_path / LOCK).exists()


def test_a_folder_holds_the_tables_of_one_run(run, tiny_folder, tmp_path):
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        "news",
        "--limit",
        3,
        "--out",
        tmp_path,
    ]
    (tmp_path / "notes.txt").write_text("mine")
    assert run(*arguments)[0] == 0
    assert run(*arguments, "--metrics", "mean_vector")[0] == 0
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "mean_vector.parquet",
        "run.json",
        "notes.txt",
    }


def test_a_folder_in_the_way_of_a_table_leaves_the_old_result(run, tiny_folder, tmp_path):
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        "news",
        "--limit",
        3,
        "--out",
        tmp_path,
    ]
    assert run(*arguments, "--metrics", "mean_vector")[0] == 0
    before = (tmp_path / "run.json").read_bytes()
    (tmp_path / "anisotropy.parquet").mkdir()
    assert_refused(run(*arguments), "anisotropy.parquet is a folder")
    assert (tmp_path / "run.json").read_bytes() == before
    assert not list(tmp_path.glob(".unfinished-tables-*"))


def cut_short(content: bytes) -> bytes:
    return content[:100]


def flipped(content: bytes) -> bytes:
    """One bit of the last array, which the directory of the file does not show."""
    place = content.rindex(b"\x93NUMPY") + 200
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [cut_short, flipped])
def test_damaged_sums_are_measured_again(run, tiny_folder, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(stored, "SECONDS_AT_RISK", 0)
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        "news",
        "--limit",
        3,
        "--out",
        tmp_path,
    ]
    module = sys.modules["analysis_lib.measurement.tables"]
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "save_tables", lambda *_: (_ for _ in ()).throw(AnalysisError("stopped"))
        )
        assert_refused(run(*arguments), "stopped")
    (kept,) = tmp_path.glob(".unfinished-*.npz")
    kept.write_bytes(damage(kept.read_bytes()))
    assert run(*arguments)[0] == 0
    assert not list(tmp_path.glob(".unfinished-*"))


def test_a_failed_run_leaves_no_folder_of_its_own(run, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS_TO_ANSWER", 1)
    arguments = [
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        "news",
        "--limit",
        3,
        "--out",
        tmp_path,
    ]
    assert_refused(run(*arguments, "--scheduler", "tcp://127.0.0.1:9"), "no Dask scheduler")
    assert not list(tmp_path.iterdir())


def test_a_notebook_is_not_replaced_by_its_executed_copy(run, tmp_path):
    notebook = tmp_path / "layers.ipynb"
    notebook.write_bytes(
        (Path(__file__).parent.parent / "book/anisotropy/layers.ipynb").read_bytes()
    )
    before = notebook.read_bytes()
    assert_refused(
        run("run", notebook, "-p", "limit", 5, "--out", tmp_path), "would replace", "--out"
    )
    assert notebook.read_bytes() == before


def test_a_reader_that_has_gone_does_not_hide_a_failure(tiny_folder, tmp_path):
    command = f"{sys.executable} -m analysis_lib measure --model {tiny_folder('bert')} --data news --limit 600"
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"{command} --out {tmp_path / 'o'} 2>&1 | head -c 0; exit ${{PIPESTATUS[0]}}",
        ],
        check=False,
    )
    assert (tmp_path / "o" / "run.json").is_file() == (result.returncode == 0)


@pytest.mark.parametrize("listing", ["models", "datasets", "metrics", "claims", "cache"])
def test_a_reader_that_has_gone_is_no_error(listing):
    command = f"PYTHONUNBUFFERED=1 {sys.executable} -m analysis_lib {listing} | head -c 0"
    assert (
        subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stderr
        == ""
    )


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"analysis_lib {importlib.metadata.version('analysis_lib')}\n"


def test_metrics_are_listed_and_named_in_the_help(run, capsys):
    _, out, _ = run("metrics")
    assert [line.split()[0] for line in out.splitlines()] == [*metrics.METRICS]
    for name in metrics.METRICS:
        assert re.search(rf"^{name} +\w+", out, re.MULTILINE)


def test_quiet_shows_results_and_errors_only(run, tiny_folder, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("a girl\n\nher hair\n")
    given = ("measure", "--model", tiny_folder("bert"), "--data", text, "--metrics", "anisotropy")
    assert "blank" in run(*given, "--out", tmp_path / "loud")[2]
    assert run(*given, "--out", tmp_path / "quiet", "--quiet")[2] == ""
    assert_refused(
        run(*given, "--out", tmp_path / "quiet", "--quiet", "--dtype", "int8"), "one of float32"
    )


def test_tables_as_csv_are_those_of_parquet(run, tiny_folder, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("a girl is styling\nher hair\n")
    given = (
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        text,
        "--metrics",
        "anisotropy",
        "--out",
        tmp_path,
    )
    assert run(*given)[0] == 0
    wanted = pd.read_parquet(tmp_path / "anisotropy.parquet")
    assert run(*given, "--format", "csv")[0] == 0
    assert not (tmp_path / "anisotropy.parquet").exists()
    found = pd.read_csv(tmp_path / "anisotropy.csv", dtype=wanted.dtypes.to_dict())
    pd.testing.assert_frame_equal(found, wanted, check_exact=False, rtol=1e-12)


def test_compare_writes_models_and_twins_side_by_side(run, tiny_folder, tmp_path):
    text, out = tmp_path / "lines.txt", tmp_path / "out"
    text.write_text("a girl is styling\nher hair\n")
    bert, gpt2 = tiny_folder("bert"), tiny_folder("gpt2")
    status, said, _ = run("compare", bert, gpt2, "--data", text, "--twins", 2, "--out", out)
    assert (status, said) == (0, f"wrote 2 tables of 2 models to {out}\n")
    differences = pd.read_parquet(out / "anisotropy_difference.parquet")
    assert {"difference", "ci_low", "ci_high"} <= {*differences}
    assert {*differences["model"]} == {gpt2.name}
    table = pd.read_parquet(out / "anisotropy.parquet")
    assert [*dict.fromkeys(table["model"])] == [bert.name, gpt2.name]
    assert table.groupby("model")["twin"].nunique().tolist() == [2, 2]
    runs = json.loads((out / "run.json").read_text())["runs"]
    assert [each["twin"] for each in runs] == [None, 0, 1, None, 0, 1]
    assert_refused(
        run("compare", bert, bert, "--data", text, "--out", tmp_path / "twice"), "given twice"
    )


def test_all_leaves_out_what_single_words_cannot_give(run, tiny_folder, tmp_path):
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text("a\nb\nc\n")
    given = ("measure", "--model", tiny_folder("gpt2"), "--data", text, "--out", out)
    status, _, err = run(*given)
    assert status == 0
    assert re.search("note: .*: left out: utterance_similarity", err)
    assert not (out / "utterance_similarity.parquet").exists()
    assert len([*out.glob("*.parquet")]) == 10
    assert "utterance_similarity" in json.loads((out / "run.json").read_text())["left_out"]
    assert_refused(run(*given, "--metrics", "utterance_similarity"), "two tokens or more")


def test_words_that_the_tokenizer_does_not_know_are_counted(run, tiny_folder, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("\u6ce8 \u610f\n\u9375 girl\n")
    _, _, err = run(
        "measure",
        "--model",
        tiny_folder("bert"),
        "--data",
        text,
        "--metrics",
        "anisotropy",
        "--out",
        tmp_path,
    )
    assert re.search(
        r"note: .*: its tokenizer does not know 38% of the tokens, so that its numbers say little",
        err,
    )


def test_a_home_folder_is_one_and_no_folder_has_no_name(run, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a girl is styling\n")
    given = [
        "measure",
        "--model",
        str(tiny_folder("bert")),
        "--data",
        "lines.txt",
        "--metrics",
        "anisotropy",
    ]
    assert run(*given, "--out=~/tables", "--data=~/lines.txt")[0] == 0
    assert (tmp_path / "tables" / "run.json").is_file()
    assert not (tmp_path / "~").exists()
    with pytest.raises(SystemExit) as left:
        main([*given, "--out", ""])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "limit", "-4"), ("limit is -4",)),
        (("-p", "text_models", "minilmm"), ("minilmm",)),
        (("-p", "text_data", "nowhere.csv:text"), ("there is no file",)),
    ],
)
def test_a_notebook_is_not_started_on_what_is_not_there(
    run, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setattr(
        "analysis_book.build.run_notebook", lambda *_: pytest.fail("a kernel was started")
    )
    assert_refused(run("run", "book/anisotropy/text.ipynb", *arguments, "--out", tmp_path), *words)


def test_the_shell_completes_commands_names_and_metrics():
    def completed(line: str) -> list[str]:
        asked = {
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "_ARGCOMPLETE_IFS": " ",
        }
        code = "import os, sys; os.dup2(1, 8); from analysis_lib.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
        )
        return done.stdout.split()

    assert "measure" in completed("analysis-lib mea")
    assert "minilm" in completed("analysis-lib measure --model min")
    assert "wikipedia" in completed("analysis-lib measure --data wiki")
    assert "isotropy" in completed("analysis-lib measure --metrics iso")


def test_what_is_kept_is_said_and_cleared(run, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis_lib.files.package_directory", lambda: tmp_path)
    kept = [f"measurements/{name}-on-news-0123456789abcdef/a.npz" for name in ("one", "two")]
    for name in (*kept, "derived/model-0123456789ab/weights"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(3_000_000))
    status, out, _ = run("cache")
    assert status == 0
    assert re.search(r"^measurements +6 MB in +2 entries", out, re.MULTILINE)
    assert re.search(r"^derived +3 MB in +1 entries", out, re.MULTILINE)
    assert run("cache", "--clear", "measurements")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"derived", ".in-use"}
    # What is nothing that the library keeps stays.
    (tmp_path / "derived" / "thesis.txt").write_text("mine")
    assert "but for what is not ours: thesis.txt" in run("cache", "--clear", "derived")[1]
    assert [path.name for path in (tmp_path / "derived").iterdir()] == ["thesis.txt"]
    assert "0 entries" in run("cache")[1]
    assert run("cache", "--clear", "measurements")[0] == 0


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--out", "a.parquet"], "answers are JSON lines: give a name that ends in .jsonl"),
        (["--out", "a.jsonl", "--chat-template", "absent"], "there is no file absent: give one"),
        (["--out", "a.jsonl", "--chat-template", "."], "there is no file .: give one with a chat"),
    ],
)
def test_options_of_answers_are_refused_in_one_line(run, tmp_path, monkeypatch, options, fault):
    monkeypatch.chdir(tmp_path)
    status, _, err = run("generate", "smollm2-135m", "--data", "prompts.txt", *options)
    assert status
    assert fault in err
    assert len(err.strip().splitlines()) == 1
    assert not [*tmp_path.iterdir()]


def test_a_number_of_many_digits_is_said_to_be_too_long():
    with pytest.raises(argparse.ArgumentTypeError, match="has too many digits: give 18 at most"):
        whole("9" * 20)
    with pytest.raises(argparse.ArgumentTypeError, match="is no whole number"):
        whole("1_0")
