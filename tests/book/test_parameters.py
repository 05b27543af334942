"""Parameters of a notebook, read and set."""

from pathlib import Path

import pytest
import yaml
from planted_notebooks import write

from analysis_book.build import listing
from analysis_book.build.listing import located
from analysis_book.build.notebook import run_notebook
from analysis_book.build.parameters import Parameter, coerce, notebook_parameters
from analysis_lib.errors import AnalysisError


def spec() -> dict[str, Parameter]:
    return {
        "layers": Parameter("layers", "list", [1]),
        "models": Parameter("models", "list", ["a"]),
        "limit": Parameter("limit", "int", 10),
        "scale": Parameter("scale", "float", 1.0),
        "name": Parameter("name", "str", "a"),
        "log": Parameter("log", "bool", False),
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("layers", "[3]", [3]),
        ("layers", "3,6", [3, 6]),
        ("layers", "3", [3]),
        ("models", "no,bert-base", ["no", "bert-base"]),
        ("models", '["stsb:dev", "x"]', ["stsb:dev", "x"]),
        ("limit", "20", 20),
        ("scale", "1e-3", 0.001),
        ("scale", "2", 2.0),
        ("name", "007", "007"),
        ("log", "true", True),
    ],
)
def test_coerce_gives_the_declared_type(name, text, value):
    found = coerce([(name, text)], spec())[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("limit", "ten"),
        ("limit", "3.5"),
        ("scale", "wide"),
        ("log", "maybe"),
        ("layers", "a,b"),
        ("layers", "[1, [2]]"),
        ("layers", "[1"),
    ],
)
def test_coerce_refuses_what_does_not_fit(name, text):
    with pytest.raises(AnalysisError, match=f"parameter {name} takes"):
        coerce([(name, text)], spec())


def test_coerce_offers_the_nearest_name():
    with pytest.raises(AnalysisError, match="did you mean layers"):
        coerce([("layerz", "1")], spec())


def test_parameters_are_read_with_type_and_default(tmp_path):
    found = notebook_parameters(write(tmp_path / "n.ipynb"))
    assert found["layers"] == Parameter("layers", "list", [1])
    assert list(found) == ["layers", "limit", "scale", "name", "log"]


def test_a_parameter_without_a_type_has_that_of_its_default(tmp_path):
    lines = 'é: list[str] = ["#", "b"]  # where n = 3 # or 4\nlimit = 3'
    found = notebook_parameters(write(tmp_path / "n.ipynb", parameters=lines))
    assert [*found.values()] == [
        Parameter("é", "list", ["#", "b"]),
        Parameter("limit", "int", 3),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("limit: int = 3 +  # how many", "not plain Python"),
        ("limit: int = 'three'  # how many", "takes a value of type int"),
        ("limit: int = max(3, 4)  # how many", "not a literal"),
        ("limit: tuple = (3,)  # how many", "has type tuple"),
    ],
)
def test_a_parameter_that_cannot_be_set_is_refused(tmp_path, line, complaint):
    with pytest.raises(AnalysisError, match=complaint):
        notebook_parameters(write(tmp_path / "n.ipynb", parameters=line))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [({"layer": [1]}, "did you mean layers"), ({"layers": "[3]"}, "takes a value of type list")],
)
def test_run_refuses_a_parameter_before_it_runs(tmp_path, given, complaint):
    with pytest.raises(AnalysisError, match=complaint):
        run_notebook(write(tmp_path / "n.ipynb"), given, tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize("home", ["book", "notebooks"])
def test_a_page_is_found_by_its_name_in_a_clone_or_installed(tmp_path, monkeypatch, home):
    monkeypatch.setattr(listing, "ROOT", tmp_path)
    monkeypatch.setattr(listing, "PACKAGE", tmp_path)
    if home == "book":
        (tmp_path / "_toc.yml").write_text("")
    page = write(tmp_path / home / "part" / "one.ipynb")
    assert located(Path("part/one")) == located(page) == page
    for name in ("part/on", "part/one.ipynb", "/part/one"):
        with pytest.raises(AnalysisError, match=f"no notebook {name}: did you mean part/one"):
            located(Path(name))
    # A file of one's own goes before a page of the same name.
    monkeypatch.chdir(tmp_path)
    own = Path("part/one")
    own.parent.mkdir()
    own.write_text("{}")
    assert located(own) == own


BOOK = Path(__file__).parents[2] / "book"


@pytest.mark.parametrize("profile", ["default", "paper"])
def test_a_page_with_a_model_of_its_own_names_it_in_the_profile(profile):
    """What a profile sets on all pages would make it read a model that it does not fit."""
    chosen = yaml.safe_load((BOOK / "parameters" / f"{profile}.yml").read_text(encoding="utf-8"))
    missing = []
    for path in sorted(BOOK.glob("*/*.ipynb")):
        page = path.relative_to(BOOK).with_suffix("").as_posix()
        own = notebook_parameters(path)
        for name in {"model", "data"} & own.keys():
            is_other = own[name].default not in ("minilm", "wikipedia", "wikipedia:short", "")
            if is_other and name not in chosen.get(page, {}):
                missing.append(f"{page}: {name}")
    assert not missing
