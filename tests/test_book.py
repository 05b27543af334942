"""The strict runner, on notebooks of a few cells, and the build, on a book of a few pages."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from analysis_lib.book import site as book
from analysis_lib.book.site import Parameter, book_parameters, build_book, coerce, notebook_parameters, run_notebook
from analysis_lib.errors import AnalysisError

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
PARAMETERS = """\
layers: list = [1]  # the layers to show
limit: int = 10  # how many
scale: float = 1.0  # of the axis
name: str = "a"  # of the model
log: bool = False  # axis"""


def write(path: Path, *sources: str, parameters: str = PARAMETERS, tags: tuple = ()) -> Path:
    """A notebook with a title, a cell of parameters, and the given cells, the last one tagged."""
    cells = [new_markdown_cell(f"# {path.stem}")]
    cells += [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    cells[-1].metadata.setdefault("tags", []).extend(tags)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), path)
    return path


def outputs(path: Path) -> str:
    cells = nbformat.read(path, 4).cells
    return "".join(o.get("text", "") for c in cells for o in c.get("outputs", []))


# Parameters


def spec() -> dict[str, Parameter]:
    return {
        "layers": Parameter("layers", "list", [1], ""),
        "models": Parameter("models", "list", ["a"], ""),
        "limit": Parameter("limit", "int", 10, ""),
        "scale": Parameter("scale", "float", 1.0, ""),
        "name": Parameter("name", "str", "a", ""),
        "log": Parameter("log", "bool", False, ""),
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
    with pytest.raises(AnalysisError, match=f"parameter {name} wants"):
        coerce([(name, text)], spec())


def test_coerce_offers_the_nearest_name():
    with pytest.raises(AnalysisError, match="did you mean layers"):
        coerce([("layerz", "1")], spec())


def test_parameters_are_read_with_type_default_and_help(tmp_path):
    found = notebook_parameters(write(tmp_path / "n.ipynb"))
    assert found["layers"] == Parameter("layers", "list", [1], "the layers to show")
    assert list(found) == ["layers", "limit", "scale", "name", "log"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("limit: int = 3  # where n = 3", "cannot read the parameter limit"),
        ("limit: int = 'three'  # how many", "wants a value of type int"),
        ("limit: int = max(3, 4)  # how many", "not a literal"),
        ("limit: tuple = (3,)  # how many", "has type tuple"),
    ],
)
def test_a_parameter_that_papermill_would_pass_over_is_refused(tmp_path, line, complaint):
    with pytest.raises(AnalysisError, match=complaint):
        notebook_parameters(write(tmp_path / "n.ipynb", parameters=line))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [({"layer": [1]}, "did you mean layers"), ({"layers": "[3]"}, "wants a value of type list")],
)
def test_run_refuses_a_parameter_before_it_runs(tmp_path, given, complaint):
    with pytest.raises(AnalysisError, match=complaint):
        run_notebook(write(tmp_path / "n.ipynb"), given, tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


# One notebook


def test_run_is_this_interpreter_in_this_folder(tmp_path, monkeypatch):
    """Even where another `python3` kernel is installed; and the copy tells no path of ours."""
    other = tmp_path / "data" / "kernels" / "python3"
    other.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "other", "language": "python"}
    (other / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    Path("here.txt").write_text("found")
    code = [
        f"import os, sys; assert sys.executable == {sys.executable!r}",
        "print(layers, limit, open('here.txt').read(), os.environ['OMP_NUM_THREADS'])",
    ]
    notebook = write(tmp_path / "n.ipynb", *code)
    out = run_notebook(notebook, {"layers": [2, 3]}, tmp_path / "new" / "out.ipynb", threads=1)
    assert outputs(out) == "[2, 3] 10 found 1\n"
    assert str(tmp_path) not in out.read_text()
    assert nbformat.read(out, 4).metadata.analysis_lib.parameters["limit"] == 10
    assert [path.name for path in out.parent.iterdir()] == ["out.ipynb"]


@pytest.mark.parametrize(
    ("source", "tags", "told"),
    [
        ("# two lines\nraise ValueError('too wide')", (), "ValueError: too wide"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", (), "Kernel died"),
        ("import sys\nsys.exit(0)", (), "SystemExit"),
        ("1 / 0", ("raises-exception",), "ZeroDivisionError"),
        ("print('never run')", ("skip-execution",), "it was not executed"),
    ],
    ids=["error", "killed", "exit", "allowed-error", "never-run"],
)
def test_a_run_that_did_not_finish_leaves_the_previous_copy(tmp_path, source, tags, told):
    notebook = write(tmp_path / "n.ipynb", "print(1)", source, tags=tags)
    out = tmp_path / "out.ipynb"
    out.write_text("previous")
    with pytest.raises(AnalysisError) as error:
        run_notebook(notebook, {"limit": 4}, out)
    message = str(error.value)
    assert f"n.ipynb failed in cell 4: {source.splitlines()[0]}" in message
    assert "limit = 4" in message
    assert told in message
    assert out.read_text() == "previous"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.ipynb", "out.ipynb"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_no_kernel_outlives_its_run(tmp_path, end):
    pid = tmp_path / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    notebook = write(tmp_path / "n.ipynb", code)
    call = "import sys, pathlib; from analysis_lib.book import run_notebook as run; "
    call += "run(pathlib.Path(sys.argv[1]), {}, pathlib.Path(sys.argv[2]))"
    out = tmp_path / "site" / "out.ipynb"
    run = subprocess.Popen([sys.executable, "-c", call, notebook, out], stderr=subprocess.DEVNULL)
    until(lambda: pid.exists() and pid.read_text())
    run.send_signal(end)
    assert run.wait(20) != 0
    until(lambda: not alive(int(pid.read_text())))
    assert not out.exists()
    if end == signal.SIGINT:
        assert not list(out.parent.iterdir())


def until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# The book


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A small book, built once; tests take copies, which are up to date like it."""
    root = tmp_path_factory.mktemp("book") / "root"
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    shutil.copy(ROOT / "_config.yml", root)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: index\nchapters:\n  - file: part/one\n  - file: part/two\n  - file: status\n"
    )
    (root / "book" / "index.md").write_text("# Index\n\n{cite:p}`a`\n\n```{bibliography}\n```\n")
    (root / "book" / "references.bib").write_text("@misc{a, author={A. Author}, title={T}, year=1}")
    (root / "book" / "parameters").mkdir()
    for profile in ("smoke", "default"):
        path = root / "book" / "parameters" / f"{profile}.yml"
        path.write_text("all: {limit: 3}\npart/one: {layers: [7]}\n")
    write(root / "book" / "part" / "one.ipynb", "print(limit, layers)")
    write(root / "book" / "part" / "two.ipynb", "print(n)", parameters="n: int = 2  # number")
    build_book(root=root)
    return root


@pytest.fixture
def root(built, tmp_path) -> Path:
    return shutil.copytree(built, tmp_path / "root")


def state(root: Path) -> dict[str, int]:
    """When each file of the site and each executed copy was written."""
    folders = [root / "_build" / "html", root / "_build" / "executed"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in files}


def executed(root: Path, name: str, profile: str = "default") -> Path:
    return root / "_build" / "executed" / profile / "part" / f"{name}.ipynb"


def test_profile_goes_under_each_notebook_that_has_the_parameter(built):
    assert outputs(executed(built, "one")) == "3 [7]\n"
    assert outputs(executed(built, "two")) == "2\n"


def test_status_page_tells_what_was_executed(built):
    page = (built / "_build" / "html" / "status.html").read_text()
    page = re.sub("<[^>]*>", "", page)
    for wanted in ("limit = 3", "layers = [7]", "papermill", "Table 1"):
        assert wanted in page


def test_mathjax_lies_inside_the_site(built):
    assert (built / "_build" / "html" / "_static" / "mathjax" / "tex-mml-chtml.js").exists()


def test_nothing_changed_executes_and_builds_nothing(root, monkeypatch):
    before = state(root)
    monkeypatch.setattr(book, "_work", None)
    monkeypatch.setattr(book, "_sphinx", None)
    assert build_book(root=root) == root / "_build" / "html" / "index.html"
    assert state(root) == before


def test_a_changed_notebook_is_executed_and_no_other(root):
    before = state(root)
    write(root / "book" / "part" / "two.ipynb", "print(n + 1)", parameters="n: int = 2  # number")
    build_book(root=root)
    changed = {name for name, when in state(root).items() if before.get(name) != when}
    assert "_build/html/index.html" in changed
    assert {n for n in changed if "executed" in n} == {"_build/executed/default/part/two.ipynb"}
    assert outputs(executed(root, "two")) == "3\n"


def test_a_parameter_goes_over_the_profile(root):
    build_book(parameters={"limit": 5}, root=root)
    assert outputs(executed(root, "one")) == "5 [7]\n"


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [({"limits": 5}, "did you mean limit"), ({"limit": "5"}, "wants a value of type int")],
)
def test_a_parameter_that_no_notebook_has_is_refused(root, parameters, complaint):
    before = state(root)
    with pytest.raises(AnalysisError, match=complaint):
        build_book(parameters=parameters, root=root)
    assert state(root) == before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("all: {limits: 3}", "did you mean limit"),
        ("part/one: {n: 3}", "no parameter n"),
        ("part/three: {}", "names no notebook"),
        ("part/one: [", "cannot read the profile"),
    ],
)
def test_a_profile_with_unknown_names_is_refused(root, text, complaint):
    (root / "book" / "parameters" / "default.yml").write_text(text)
    with pytest.raises(AnalysisError, match=complaint):
        build_book(root=root)


def test_a_profile_may_extend_another(root):
    text = "extends: smoke\npart/one: {limit: 9}\npart/two: {n: 4}\n"
    (root / "book" / "parameters" / "default.yml").write_text(text)
    build_book(root=root)
    assert outputs(executed(root, "one")) == "9 [7]\n"
    assert outputs(executed(root, "two")) == "4\n"


def test_every_corpus_of_a_list_is_known_to_the_key(root, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n")
    declared = 'class_data: list = ["news"]  # corpora'
    write(root / "book" / "part" / "two.ipynb", "print(class_data)", parameters=declared)
    build_book(parameters={"class_data": ["news", str(lines)]}, root=root)
    before = executed(root, "two").stat().st_mtime_ns
    build_book(parameters={"class_data": ["news", str(lines)]}, root=root)
    assert executed(root, "two").stat().st_mtime_ns == before
    lines.write_text("two\n")
    build_book(parameters={"class_data": ["news", str(lines)]}, root=root)
    assert executed(root, "two").stat().st_mtime_ns > before
    with pytest.raises(AnalysisError, match="newz"):
        build_book(parameters={"class_data": ["news", "newz"]}, root=root)


def test_unknown_profile_is_refused(root):
    with pytest.raises(AnalysisError, match="did you mean smoke"):
        build_book("smok", root=root)


def test_all_failures_are_told_and_what_finished_is_kept(root):
    before = state(root)
    third = write(root / "book" / "part" / "three.ipynb", "1 / 0", parameters="m: int = 1  # m")
    write(root / "book" / "part" / "one.ipynb", "undefined")
    write(root / "book" / "part" / "two.ipynb", "print('new')", parameters="n: int = 2  # number")
    with (root / "_toc.yml").open("a") as toc:
        toc.write("  - file: part/three\n")
    with pytest.raises(AnalysisError) as error:
        build_book(root=root)
    assert "NameError" in str(error.value)
    assert f"{third} failed" in str(error.value)
    assert outputs(executed(root, "two")) == "new\n"
    kept = {n: when for n, when in before.items() if not n.endswith("two.ipynb")}
    assert {n: when for n, when in state(root).items() if n in kept} == kept


def test_a_warning_of_sphinx_keeps_the_last_good_site(root):
    before = state(root)
    (root / "book" / "index.md").write_text("# Index\n\n{ref}`nowhere`\n")
    with pytest.raises(AnalysisError, match="nowhere"):
        build_book(root=root)
    assert state(root) == before
    assert not list((root / "_build").glob(".stage-*"))


def test_the_key_holds_the_model_and_the_data(monkeypatch):
    models = {"a": "1", "b": "1"}
    monkeypatch.setattr("analysis_lib.models.fingerprint", lambda name: models[name])
    monkeypatch.setattr("analysis_lib.corpora.fingerprint", lambda spec: models["b"])
    monkeypatch.setattr("analysis_lib.papers.godey.dynamics.fingerprint", lambda run: models[run])
    parameters = {"model": "a", "models": ["b"], "data": "x", "run": "b", "runs": ["a"]}
    first = book._inputs(parameters)
    models["b"] = "2"
    second = book._inputs(parameters)
    assert {name for name in first if first[name] != second[name]} == {"model b", "data x", "run b"}


def test_book_parameters_refuses_two_types_of_one_name(root):
    assert book_parameters(root).keys() >= {"limit", "n"}
    write(root / "book" / "part" / "two.ipynb", parameters="limit: str = 'x'  # another")
    with pytest.raises(AnalysisError, match="use one type"):
        book_parameters(root)


def test_ctrl_c_keeps_what_finished_and_says_so(root):
    pid = root / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    write(root / "book" / "part" / "one.ipynb", code)
    before = state(root)
    call = "import sys, pathlib; from analysis_lib.book import build_book; "
    call += "build_book(root=pathlib.Path(sys.argv[1]))"
    run = subprocess.Popen([sys.executable, "-c", call, root], stderr=subprocess.PIPE, text=True, env=os.environ)
    until(lambda: pid.exists() and pid.read_text())
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=20)
    assert run.returncode != 0
    assert "interrupted: 0 of 1 notebooks" in told
    until(lambda: not alive(int(pid.read_text())))
    assert state(root) == before
