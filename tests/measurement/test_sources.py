"""Which edits change the hash of the sources of a result, and which do not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis_lib import AnalysisError
from analysis_lib.measurement import sources
from analysis_lib.measurement.sources import imported_modules, source_hash

ANISOTROPY = ["analysis_lib.metrics.anisotropy"]


@pytest.fixture
def edit(tmp_path, monkeypatch) -> Callable[[str, str, str], None]:
    """A function that replaces text in a module of a copy of the library, which is the library for the test."""
    library = tmp_path / "analysis_lib"
    shutil.copytree(sources.LIBRARY, library, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "LIBRARY", library)

    def replace(module: str, old: str, new: str) -> None:
        path = library / f"{module}.py"
        before = path.read_text(encoding="utf-8")
        assert old in before
        path.write_text(before.replace(old, new), encoding="utf-8")

    return replace


def test_a_docstring_a_comment_and_the_layout_change_nothing(edit):
    before = source_hash(ANISOTROPY)
    edit("metrics/anisotropy", "Anisotropy: the expected cosine", "The expected cosine")
    edit("metrics/anisotropy", "    return np.asarray(", "    # A comment.\n\n    return np.asarray(")
    assert source_hash(ANISOTROPY) == before


def test_code_of_the_module_or_of_one_that_it_imports_changes_the_hash(edit):
    hashes = [source_hash(ANISOTROPY)]
    edit("metrics/anisotropy", "(unit_sum**2).sum(-1) - vectors", "(unit_sum**2).sum(-1) + vectors")
    hashes.append(source_hash(ANISOTROPY))
    edit("metrics/accumulator", "GROUPS = 20", "GROUPS = 10")
    hashes.append(source_hash(ANISOTROPY))
    # Imported by what it imports.
    edit("capture/vectors", "self.norms != 0", "self.norms > 0")
    hashes.append(source_hash(ANISOTROPY))
    assert len(set(hashes)) == 4


def test_code_of_a_module_that_is_not_imported_changes_nothing(edit):
    before = source_hash(ANISOTROPY)
    edit("metrics/dimensions", "THRESHOLD = 3.0", "THRESHOLD = 4.0")
    edit("__init__", "__getattr__, __dir__", "something = 1\n__getattr__, __dir__")
    assert source_hash(ANISOTROPY) == before


def test_an_import_inside_a_function_counts(edit):
    before = source_hash(ANISOTROPY)
    edit("metrics/intervals", "    ratio = ", "    import analysis_lib.metrics.means\n\n    ratio = ")
    hashes = {before, source_hash(ANISOTROPY)}
    edit("metrics/means", "axis=-1", "axis=-2")
    assert len({*hashes, source_hash(ANISOTROPY)}) == 3


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("from analysis_lib import measure", "measurement.measuring"),
        ("from analysis_lib import AnalysisError as Error", "errors"),
        ("import analysis_lib\nanalysis_lib.load_model('minilm')", "models.loading"),
        ("from analysis_lib import metrics\nmetrics.Isotropy()", "metrics.isotropy"),
        ("from analysis_lib.metrics import intervals as i\ni.wilson(1, 2)", "metrics.intervals"),
        ("import analysis_lib.metrics.intervals", "metrics.intervals"),
        ("from analysis_lib import metrics\nprint(metrics)", "metrics"),
        ("from analysis_lib import metrics\nmetrics.METRICS", "metrics.registry"),
        ("%matplotlib inline\n!ls\ndef f():\n    from analysis_lib.errors import near_names", "errors"),
        ("import numpy as np\nnp.ones(3)", ""),
    ],
)
def test_an_import_leads_to_the_module_that_provides_the_name(code, modules):
    assert imported_modules(code) == {f"analysis_lib.{module}" for module in modules.split()}


def test_a_package_that_registers_names_counts_with_its_modules(edit):
    start = ["analysis_lib.models.architectures.character_bert"]
    before = source_hash(start)
    edit("models/architectures/van", "class Van", "class Renamed")
    assert source_hash(start) != before


def test_a_name_that_a_package_makes_when_asked_may_come_from_any_of_its_modules():
    found = imported_modules("from analysis_lib.metrics import Unheard")
    files = Path(sources.LIBRARY, "metrics").glob("*.py")
    assert found == {"analysis_lib.metrics", *(f"analysis_lib.metrics.{f.stem}" for f in files if f.stem[0] != "_")}


def test_what_cannot_be_hashed_is_refused():
    with pytest.raises(AnalysisError, match=r"no module analysis_lib\.metric:"):
        source_hash(["analysis_lib.metric"])
    with pytest.raises(AnalysisError, match=r"no valid Python.*line 2"):
        imported_modules("x = 1\nx =")
    assert source_hash(["numpy.linalg", *ANISOTROPY]) == source_hash(ANISOTROPY)
