"""The build, on a book of a few pages: what is executed again, what is refused, what is kept."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from planted_notebooks import alive, outputs, write
from waiting import PATIENCE, wait_until

from analysis_book.build import notebook, site
from analysis_book.build.site import build_book
from analysis_book.papers import claims
from analysis_lib.errors import AnalysisError

ROOT = Path(__file__).resolve().parents[2]
INDEX = """\
# Index

{cite:p}`a`

```{finding} part/two
```
```{findings} part
```
```{gallery}
```
```{models}
```
```{claim-counts}
```
```{ledger}
```
```{bibliography}
```
"""
# Of one pixel.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DRAW = f"""\
from base64 import b64decode
from IPython.display import Image, Markdown, display
display(Image(b64decode("{PICTURE}")))"""
JUDGE = """\
import pandas as pd
from analysis_lib.metrics.intervals import Estimate
from analysis_book.papers import claims
row = claims.judged("maruta-early-cls", Estimate(0.5, 0.4, 0.6, 20), "40 texts") | {"model": "BERT-base"}
claims.show(pd.DataFrame([row]))"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A small book, built once; tests take copies, which are up to date like it."""
    root = tmp_path_factory.mktemp("book") / "root"
    for folder in ("_ext", "_static", "_templates"):
        shutil.copytree(ROOT / "book" / folder, root / "book" / folder)
    for name in ("_config.yml", "book/status.md"):
        shutil.copy(ROOT / name, root / name)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: index\nchapters:\n  - file: part/one\n  - file: part/two\n  - "
        "file: status\n"
    )
    (root / "book" / "index.md").write_text(INDEX)
    (root / "book" / "references.bib").write_text("@misc{a, author={A. Author}, title={T}, year=1}")
    (root / "book" / "parameters").mkdir()
    for profile in ("smoke", "default"):
        path = root / "book" / "parameters" / f"{profile}.yml"
        path.write_text("all: {limit: 3}\npart/one: {layers: [7]}\n")
    write(root / "book" / "part" / "one.ipynb", "print(limit, layers)")
    shown, parameters = (
        'display(Markdown(f"There are **{n}**."))',
        'n: int = 2  # number\nmodel: str = "minilm"  # model',
    )
    two = root / "book" / "part" / "two.ipynb"
    write(two, "print(n)", DRAW, JUDGE, shown, parameters=parameters, tags=("found",))
    notebook = nbformat.read(two, 4)
    about = {"figure": {"name": "fig-a", "caption": "A caption."}, "image": {"alt": "A dot."}}
    notebook.cells[3].metadata["mystnb"] = about
    nbformat.write(notebook, two)
    build_book(root=root)
    return root


@pytest.fixture
def root(built, tmp_path) -> Path:
    return shutil.copytree(built, tmp_path / "root")


@pytest.fixture
def no_pages(monkeypatch) -> None:
    """Notebooks are executed as ever, but no pages are made of them, which takes longest."""

    def empty(_stage: Path, target: Path, _log: Path) -> Path:
        target.mkdir()
        return target

    monkeypatch.setattr(site, "_sphinx", empty)


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


def test_neighbours_are_executed_one_after_the_other(tmp_path, monkeypatch):
    """Two cores, and a first notebook that takes longest: the other core comes from the end for its
    neighbours.
    """
    write(notebook := tmp_path / "one.ipynb", "1")
    tasks, begun, others = (
        [site.Task(name, notebook, {}, notebook, "") for name in "abcdef"],
        [],
        asyncio.Event(),
    )

    async def execute(_, __, ___, ____, _threads, _on_cell, line_file):
        begun.append(line_file.name)
        others.set() if len(begun) == len(tasks) else None
        await (others.wait() if line_file.name == "a" else asyncio.sleep(0))

    monkeypatch.setattr(site, "execute", execute)
    monkeypatch.setattr(site, "cores", lambda: 2)
    asyncio.run(site._execute(tasks))
    assert begun == [*"adefcb"]


def test_status_page_tells_what_was_executed(built):
    page = (built / "_build" / "html" / "status.html").read_text()
    page = re.sub("<[^>]*>", "", page)
    for wanted in ("limit = 3", "layers = [7]", "papermill", "Table 1"):
        assert wanted in page


def words(page: Path) -> str:
    """What a reader sees of a page, each blank one space."""
    main = re.search("<main.*</main>", page.read_text(), re.DOTALL)[0]
    return " ".join(re.sub("<[^>]*>", " ", main).split())


def test_what_a_page_found_stands_at_its_top_with_its_figure_and_nowhere_else(built):
    page = built / "_build" / "html" / "part" / "two.html"
    text, source = words(page), page.read_text()
    assert text.index("Finding") < text.index("There are 2 .") < text.index("n : int")
    assert text.count("There are 2 .") == 1
    assert source.count('id="fig-a"') == source.count('<img class="figure') == 1
    assert text.index("There are 2 .") < text.index("A caption.") < text.index("n : int")
    assert "is at the top of the page." in text
    assert "Finding" not in words(page.with_name("one.html"))


def test_the_parameters_are_shown_as_they_ran(built):
    text = words(built / "_build" / "html" / "part" / "one.html")
    assert "layers : list = [ 7 ] # the layers to show limit : int = 3 # how many" in text
    assert "# Parameters" not in text
    assert "python -m analysis_lib run part/one -p layers '[7]' -p limit 3" in " ".join(
        text.replace("\\", " ").split()
    )


def test_a_page_brings_its_figures_and_its_notebook_without_outputs(built):
    site = built / "_build" / "html"
    assert (site / "_static" / "figures" / "fig-a.png").read_bytes() == b64decode(PICTURE)
    assert (
        '<a href="../_static/figures/fig-a.png" download>PNG</a>'
        in (site / "part" / "two.html").read_text()
    )
    for page, cells in ("two", 5), ("one", 2):
        notebook = nbformat.read(site / "_sources" / "part" / f"{page}.ipynb", 4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        assert len(code) == cells
        assert notebook.cells[0].source == f"# {page}"
        assert "analysis_lib" not in notebook.metadata
        if page == "two":  # It ran as it is.
            ran = nbformat.read(executed(built, page), 4)
            assert [cell.source for cell in notebook.cells] == [cell.source for cell in ran.cells]
    # With the values that ran.
    assert "limit: int = 3" in "".join(cell.source for cell in notebook.cells)


def test_the_first_page_has_what_the_others_found(built):
    """A card, a list, the figures, the models, and the claims."""
    text = words(built / "_build" / "html" / "index.html")
    assert text.count("two There are 2 .") == 2
    assert "Fig. 1 . A caption." in text or "Figure 1 . A caption." in text
    assert "MiniLM" in text
    # One holds on the model of the paper; the others were not run.
    of_maruta = sum(not claim.ours for claim in claims.load("maruta").values())
    assert f"Maruta and Matsuzaki 2024 1 {of_maruta - 1} ≤ 0.0" in text
    page = (built / "_build" / "html" / "index.html").read_text()
    assert '<a href="part/two.html#maruta-early-cls">BERT-base</a>' in page
    assert (
        page.count('<span class="chip none">not run</span>')
        == sum(len(claims.load(p)) for p in claims.PAPERS) - 1
    )


def test_nothing_changed_executes_and_builds_nothing(root, monkeypatch):
    before = state(root)
    monkeypatch.setattr(notebook, "_run", None)
    monkeypatch.setattr(site, "_sphinx", None)
    assert build_book(root=root) == root / "_build" / "html" / "index.html"
    assert state(root) == before


def test_a_changed_notebook_is_executed_and_no_other(root):
    """Launch buttons and a link appear once the repository has an address, which executes
    nothing.
    """

    def page() -> str:
        return (root / "_build" / "html" / "part" / "one.html").read_text()

    assert "mybinder" not in page()
    before, text = state(root), (root / "_config.yml").read_text()
    assert 'url: ""' in text
    (root / "_config.yml").write_text(text.replace('url: ""', "url: https://github.com/owner/name"))
    write(root / "book" / "part" / "two.ipynb", "print(n + 1)", parameters="n: int = 2  # number")
    build_book(root=root)
    changed = {name for name, when in state(root).items() if before.get(name) != when}
    assert "_build/html/index.html" in changed
    assert {n for n in changed if "executed" in n} == {"_build/executed/default/part/two.ipynb"}
    assert outputs(executed(root, "two")) == "3\n"
    assert (
        'href="https://mybinder.org/v2/gh/owner/name/main?urlpath=lab/tree/book/part/one.ipynb"'
        in page()
    )
    assert 'href="https://github.com/owner/name"' in page()


def test_a_parameter_goes_over_the_profile(root, no_pages, capsys):
    """And the log of the build has a line for the notebook, one for the site, and one for all."""
    build_book(parameters={"limit": 5}, root=root)
    err = capsys.readouterr().err
    assert "\r" not in err
    executed_one, building, summary = err.splitlines()
    assert executed_one == "executed part/one (1 of 1)"
    assert building == "building the site"
    assert summary.startswith("executed 1 of 2 notebooks")
    assert outputs(executed(root, "one")) == "5 [7]\n"


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [({"limits": 5}, "did you mean limit"), ({"limit": "5"}, "takes a value of type int")],
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
        ("part/three: {}", "unknown notebook part/three"),
        ("part/one: [", "cannot read the profile"),
    ],
)
def test_a_profile_with_unknown_names_is_refused(root, text, complaint):
    (root / "book" / "parameters" / "default.yml").write_text(text)
    with pytest.raises(AnalysisError, match=complaint):
        build_book(root=root)


def test_a_profile_may_extend_another(root, no_pages):
    text = "extends: smoke\npart/one: {limit: 9}\npart/two: {n: 4}\n"
    (root / "book" / "parameters" / "default.yml").write_text(text)
    build_book(root=root)
    assert outputs(executed(root, "one")) == "9 [7]\n"
    assert outputs(executed(root, "two")) == "4\n"


def test_every_corpus_of_a_list_is_known_to_the_key(root, tmp_path, no_pages):
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


BUILD = """
import sys
from pathlib import Path
from analysis_book.build import site

def pages(stage, target, log):
    target.mkdir()
    (target / "index.html").write_text("built")
    return target

site._sphinx = pages
site.build_book(root=Path(sys.argv[1]))
"""


def test_two_builds_at_once_execute_each_notebook_once(root):
    """The second one waits for the first, and finds all executed."""
    log, go = root / "log", root / "go"
    append = f"open({str(log)!r}, 'a').write"
    write(
        root / "book" / "part" / "two.ipynb",
        f"{append}('two\\n')",
        parameters="n: int = 2  # number",
    )
    waits = f"import pathlib, time\n{append}('one\\n')\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)"
    write(root / "book" / "part" / "one.ipynb", waits)
    command = [sys.executable, "-c", BUILD, root]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and "one" in log.read_text(), first)
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "another process: waiting for that one to end" in second.stderr.readline()
    go.touch()
    assert "executed 2 of 2 notebooks" in first.communicate(timeout=PATIENCE)[1]
    assert "executed 0 of 2 notebooks" in second.communicate(timeout=PATIENCE)[1]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(log.read_text().split()) == ["one", "two"]


def test_a_build_that_was_killed_holds_up_no_other(root):
    pid = root / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep({10 * PATIENCE})"
    write(root / "book" / "part" / "one.ipynb", code)
    first = subprocess.Popen([sys.executable, "-c", BUILD, root], stderr=subprocess.DEVNULL)
    wait_until(lambda: pid.exists() and pid.read_text(), first)
    first.kill()
    first.wait()
    write(root / "book" / "part" / "one.ipynb", "print(1)")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, root], stderr=subprocess.PIPE, text=True, check=True
    )
    assert "executed 1 of 2 notebooks" in done.stderr


def test_what_is_put_beside_the_pages_stays_and_a_site_of_something_else_is_left_alone(
    root, no_pages
):
    html = root / "_build" / "html"
    (html / "CNAME").write_text("geometry.example.org")
    write(root / "book" / "part" / "one.ipynb", "print('new')")
    build_book(root=root)
    assert (html / "CNAME").read_text() == "geometry.example.org"
    assert not (html / "part").exists()
    shutil.rmtree(html)
    html.mkdir()
    (html / "index.html").write_text("mine")
    with pytest.raises(
        AnalysisError, match=r"index.html was not written by analysis-lib: move it.*make clean"
    ):
        build_book(root=root)
    assert [path.name for path in html.iterdir()] == ["index.html"]


def test_a_warning_of_sphinx_keeps_the_last_good_site(root):
    before = state(root)
    (root / "book" / "index.md").write_text("# Index\n\n{ref}`nowhere`\n")
    with pytest.raises(AnalysisError, match="nowhere"):
        build_book(root=root)
    assert state(root) == before
    assert not list((root / "_build" / "html").glob(".stage-*"))


def test_ctrl_c_keeps_what_finished_and_says_so(root):
    pid = root / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep({10 * PATIENCE})"
    write(root / "book" / "part" / "one.ipynb", code)
    before = state(root)
    call = "import sys, pathlib; from analysis_book.build import build_book; "
    call += "build_book(root=pathlib.Path(sys.argv[1]))"
    run = subprocess.Popen(
        [sys.executable, "-c", call, root], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    wait_until(lambda: pid.exists() and pid.read_text(), run)
    run.send_signal(signal.SIGINT)
    _, written = run.communicate(timeout=PATIENCE)
    assert run.returncode != 0
    assert "interrupted: 0 of 1 notebooks" in written
    wait_until(lambda: not alive(int(pid.read_text())))
    assert state(root) == before
