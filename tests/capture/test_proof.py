"""What a check has proven of a model is kept for later processes."""

from pathlib import Path

import pytest
import tiny
from passes import first_batch

from analysis_lib import AnalysisError, LoadedModel, load_model, store
from analysis_lib.capture import checked_pass, proof


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def checks(monkeypatch) -> list[str]:
    """The names of the models whose passes have been compared."""
    compared = []
    check = checked_pass._check

    def counted(loaded: LoadedModel, batch) -> None:
        compared.append(loaded.name)
        check(loaded, batch)

    monkeypatch.setattr(checked_pass, "_check", counted)
    return compared


def check(loaded: LoadedModel, name: str) -> LoadedModel:
    checked_pass.check(loaded, first_batch(loaded, tiny.items(name)))
    return loaded


@pytest.mark.parametrize("name", ["bert", "llama", "canine"])
def test_a_proven_model_is_not_checked_again(name, tiny_folder, home, checks):
    folder = str(tiny_folder(name))
    first = check(load_model(folder), name)
    second = check(load_model(folder), name)
    assert len(checks) == 1
    assert second.unsupported == first.unsupported
    assert (second.outer is second.model) == (first.outer is first.model)


@pytest.mark.parametrize("changed", ["dtype", "library", "torch", "torchvision"])
def test_what_a_proof_depends_on(changed, tiny_folder, home, checks, monkeypatch):
    folder = str(tiny_folder("bert"))
    check(load_model(folder), "bert")
    dtype = "float32"
    if changed == "dtype":
        dtype = "float64"
    elif changed == "library":
        monkeypatch.setattr(store, "library_hash", lambda: "edited")
    else:
        version = store.installed_version
        replaced = {changed: "99"}
        monkeypatch.setattr(
            store, "installed_version", lambda name: replaced.get(name, version(name))
        )
    check(load_model(folder, dtype=dtype), "bert")
    assert len(checks) == 2


def test_another_model_needs_a_proof_of_its_own(tiny_folder, home, checks):
    check(load_model(str(tiny_folder("bert"))), "bert")
    check(load_model(str(tiny_folder("llama"))), "llama")
    assert len(checks) == 2


def test_an_object_of_a_program_is_always_checked(home, checks):
    for _ in range(2):
        check(LoadedModel("shared", "seed 0", *tiny.build("bert")), "bert")
    assert len(checks) == 2
    assert not home.exists()


def test_a_failed_check_is_not_kept(tiny_folder, home, checks, monkeypatch):
    folder = str(tiny_folder("bert"))
    with monkeypatch.context() as patch:
        patch.setattr(checked_pass, "_difference", lambda *arguments: 1.0)
        with pytest.raises(AnalysisError, match="not captured exactly"):
            check(load_model(folder), "bert")
    check(load_model(folder), "bert")
    assert len(checks) == 2


def test_a_damaged_proof_is_made_again(tiny_folder, home, checks):
    folder = str(tiny_folder("bert"))
    check(load_model(folder), "bert")
    (kept,) = home.glob("*/" + proof.FILE)
    kept.write_text("{")
    check(load_model(folder), "bert")
    assert len(checks) == 2
    check(load_model(folder), "bert")
    assert len(checks) == 2
