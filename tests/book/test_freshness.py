"""The key of a notebook: what changes it, and what does not."""

import nbformat
import pytest
from planted_notebooks import write

from analysis_book import sources
from analysis_book.build import freshness
from analysis_book.build.freshness import notebook_key
from analysis_lib.errors import AnalysisError

CLAIMS = sources.PACKAGE / "papers" / "claims.py"


def test_an_edit_of_the_library_changes_the_key(tmp_path, monkeypatch):
    notebook = write(tmp_path / "one.ipynb", "print(1)")
    before = notebook_key(notebook, {})
    monkeypatch.setattr(freshness, "library_hash", lambda: "edited")
    assert notebook_key(notebook, {}) != before


def test_what_the_cells_import_of_the_book_counts_and_nothing_else():
    def imported(*cells: str) -> set[str]:
        return {
            path.relative_to(sources.PACKAGE).as_posix() for path in sources.imported_sources(cells)
        }

    alone = imported(
        "from analysis_lib import measure", "%matplotlib inline\nimport analysis_book.papers"
    )
    assert not alone
    one = imported("from analysis_book.papers import maruta")
    assert {"papers/maruta.py", "papers/counts.py"} <= one
    assert "papers/claims.py" not in one
    # By the name that the whole package offers, and with all that it imports.
    assert {"papers/claims.py", "figures/views.js"} <= imported("from analysis_book import claims")
    assert "figures/theme.mplstyle" in imported("from analysis_book import figures")
    assert "training/dynamics.py" in imported(
        "from analysis_book.papers.godey.alignment import alignment"
    )


def test_an_edit_of_what_a_notebook_imports_changes_the_key(tmp_path, monkeypatch):
    with_claims = write(tmp_path / "one.ipynb", "from analysis_book import claims")
    without = write(tmp_path / "two.ipynb", "from analysis_lib import measure")
    keys = []
    for text in ("a", "b"):
        # As if the file of claims had another text.
        edited = {True: text, False: ""}
        monkeypatch.setattr(
            freshness, "source_hash", lambda paths, edited=edited: edited[CLAIMS in paths]
        )
        keys.append([notebook_key(notebook, {}) for notebook in (with_claims, without)])
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


@pytest.mark.parametrize("name", ["reference", "claims", "measurements"])
def test_data_of_the_papers_count_where_papers_are_imported(tmp_path, name):
    papers = write(
        tmp_path / "papers.ipynb", "from analysis_book.papers import claims\nclaims.load('maruta')"
    )
    plain = write(
        tmp_path / "plain.ipynb", "from analysis_lib import load_corpus\nload_corpus('news')"
    )
    keys = []
    for content in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name / "file").write_text(content)
        keys.append([notebook_key(notebook, {}, tmp_path) for notebook in (papers, plain)])
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


def test_code_parameters_and_versions_are_in_the_key(tmp_path, monkeypatch):
    one, two = write(tmp_path / "one.ipynb", "print(1)"), write(tmp_path / "two.ipynb", "print(2)")
    keys = {notebook_key(one, {}), notebook_key(two, {}), notebook_key(one, {"limit": 3})}
    monkeypatch.setattr(freshness, "installed", lambda: {"numpy": "0"})
    assert len(keys | {notebook_key(one, {})}) == 4


def test_a_corpus_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="newz"):
        notebook_key(write(tmp_path / "n.ipynb"), {"data": "newz"})


def test_the_key_holds_the_model_and_the_data(monkeypatch):
    models = {"a": "1", "b": "1"}
    monkeypatch.setattr("analysis_book.build.freshness.weights_identity", lambda name: models[name])
    monkeypatch.setattr("analysis_lib.corpora.data_identity", lambda spec: models["b"])
    monkeypatch.setattr("analysis_book.build.freshness.run_identity", lambda run: models[run])
    parameters = {"model": "a", "models": ["b"], "data": "x", "run": "b", "runs": ["a"]}
    first = freshness.inputs(parameters)
    models["b"] = "2"
    second = freshness.inputs(parameters)
    assert {name for name in first if first[name] != second[name]} == {"model b", "data x", "run b"}


def test_what_ships_is_known_by_its_content(monkeypatch, tmp_path):
    """On a page: measurements that its parameters name, and what the modules on the papers read."""
    monkeypatch.setattr(freshness, "data_directory", lambda: tmp_path)
    notebook = nbformat.read(
        write(tmp_path / "n.ipynb", "from analysis_book.papers import claims\nclaims.load('x')"), 4
    )
    seen = []
    for text in ("a", "b"):
        for folder in ("measurements/one", "measurements/two", "claims", "reference"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "measurements" / "one" / "run.json").write_text(text)
        found = freshness.inputs({"beside": ["one"], "shipped_models": ["two"]})
        seen.append(found | freshness.paper_data(notebook, tmp_path))
    changed = {name for name in seen[0] if seen[0][name] != seen[1][name]}
    assert changed == {"shipped measurement one", "data/measurements"}
    assert seen[0].keys() - changed == {"shipped measurement two", "data/claims", "data/reference"}
