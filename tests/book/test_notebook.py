"""The strict runner, on notebooks of a few cells."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from planted_notebooks import alive, outputs, write
from waiting import PATIENCE, wait_until

from analysis_book.build.notebook import execute, run_notebook
from analysis_lib.errors import AnalysisError


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
    done, changed = [], {"layers": [2, 3]}
    run = execute(
        notebook, changed, tmp_path / "new" / "out.ipynb", threads=1, on_cell=lambda: done.append(1)
    )
    out = asyncio.run(run)
    # A bar that counts them ends full: parameters and code, without the cell that changes
    # parameters.
    assert len(done) == 1 + len(code)
    assert outputs(out) == "[2, 3] 10 found 1\n"
    assert str(tmp_path) not in out.read_text()
    assert nbformat.read(out, 4).metadata.analysis_lib.parameters["limit"] == 10
    assert [path.name for path in out.parent.iterdir()] == ["out.ipynb"]


@pytest.mark.parametrize(
    ("source", "tags", "written"),
    [
        ("# two lines\nraise ValueError('too wide')", (), "ValueError: too wide"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", (), "Kernel died"),
        ("import sys\nsys.exit(0)", (), "SystemExit"),
        ("1 / 0", ("raises-exception",), "ZeroDivisionError"),
        ("print('never run')", ("skip-execution",), "it was not executed"),
    ],
    ids=["error", "killed", "exit", "allowed-error", "never-run"],
)
def test_a_run_that_did_not_finish_leaves_the_previous_copy(tmp_path, source, tags, written):
    notebook, out = write(tmp_path / "n.ipynb", "print(1)"), tmp_path / "out.ipynb"
    previous = run_notebook(notebook, {}, out).read_bytes()
    write(notebook, "print(1)", source, tags=tags)
    with pytest.raises(AnalysisError) as error:
        run_notebook(notebook, {"limit": 4}, out)
    message = str(error.value)
    assert f"n.ipynb failed in cell 4: {source.splitlines()[0]}" in message
    assert "limit = 4" in message
    assert written in message
    assert "Kernel died" not in message or "\n" not in message
    assert out.read_bytes() == previous
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "n.ipynb",
        "out.failed.ipynb",
        "out.ipynb",
    ]
    # What was executed can be looked at, until the notebook runs.
    assert nbformat.read(tmp_path / "out.failed.ipynb", 4).cells[1].execution_count == 1
    run_notebook(write(notebook, "print(1)"), {}, out)
    assert not (tmp_path / "out.failed.ipynb").exists()


def test_a_full_disk_leaves_the_previous_copy(tmp_path, monkeypatch):
    notebook, out = write(tmp_path / "n.ipynb", "print(1)"), tmp_path / "out" / "n.ipynb"
    previous = run_notebook(notebook, {}, out).read_text()

    def full(_, path):
        path.write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("analysis_book.build.notebook.nbformat.write", full)
    with pytest.raises(
        AnalysisError, match=f"^{out.parent} cannot be written .No space left on device.: free some"
    ):
        run_notebook(notebook, {}, out)
    assert [path.read_text() for path in out.parent.iterdir()] == [previous]


@pytest.mark.parametrize("name", ["out.ipynb", "out.failed.ipynb"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_notebook_or_file_of_the_users_is_not_replaced(tmp_path, name, fails):
    notebook, theirs = write(tmp_path / "n.ipynb", "1 / 0" if fails else "1"), tmp_path / name
    write(theirs, "print('mine')")
    before = theirs.read_bytes()
    with pytest.raises(AnalysisError, match=f"{name} is no executed copy of a notebook: move it"):
        run_notebook(notebook, {}, tmp_path / "out.ipynb")
    assert theirs.read_bytes() == before
    theirs.write_text("no notebook")
    with pytest.raises(AnalysisError, match=f"{name} is no executed copy of a notebook: move it"):
        run_notebook(notebook, {}, tmp_path / "out.ipynb")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["n.ipynb", name])


def test_an_executed_copy_is_replaced_unless_it_was_changed_or_is_of_something_else(tmp_path):
    declared = 'model: str = "minilm"  # model\nlimit: int = 3  # texts'
    notebook, out = (
        write(tmp_path / "n.ipynb", "print(model, limit)", parameters=declared),
        tmp_path / "out.ipynb",
    )
    run_notebook(notebook, {}, out)
    run_notebook(notebook, {"limit": 4}, out)
    assert outputs(out) == "minilm 4\n"
    with pytest.raises(
        AnalysisError, match=r"out.ipynb was executed with model = 'minilm': give another --out"
    ):
        run_notebook(notebook, {"model": "smollm2-135m"}, out)
    with pytest.raises(AnalysisError, match=r"out.ipynb is the executed copy of another notebook"):
        run_notebook(
            write(tmp_path / "other.ipynb", "print(model, limit)", parameters=declared), {}, out
        )
    annotated = nbformat.read(out, 4)
    annotated.cells[0].source += "\nMy remarks."
    nbformat.write(annotated, out)
    with pytest.raises(
        AnalysisError, match=r"out.ipynb has been changed since it was executed: move it"
    ):
        run_notebook(notebook, {}, out)
    assert "My remarks." in out.read_text()


def test_a_notebook_of_an_old_format_is_refused(tmp_path):
    path = write(tmp_path / "n.ipynb", "print('old')", parameters="")
    path.write_text(nbformat.writes(nbformat.convert(nbformat.read(path, 4), 3), 3))
    assert json.loads(path.read_text())["nbformat"] == 3
    with pytest.raises(
        AnalysisError, match=r"n.ipynb cannot be read \(ValueError: its format is older than 4"
    ):
        run_notebook(path, {}, tmp_path / "out" / "n.ipynb")


def test_a_kernel_begins_with_the_library_imported(tmp_path):
    code = "import sys\nprint({'transformers', 'seaborn', 'analysis_lib.measurement.measuring'} - {*sys.modules})"
    out = run_notebook(write(tmp_path / "n.ipynb", code), {}, tmp_path / "out.ipynb")
    assert outputs(out) == "set()\n"


def test_a_kernel_listens_at_no_port(tmp_path):
    """Another program may take a port that was free before the kernel has started, which then
    dies.
    """
    code = "import ipykernel\nprint(ipykernel.get_connection_info(unpack=True)['transport'])"
    out = run_notebook(write(tmp_path / "n.ipynb", code), {}, tmp_path / "out.ipynb")
    assert outputs(out) == "ipc\n"


def test_a_long_path_of_the_folder_for_temporary_files_is_no_trouble(tmp_path, monkeypatch):
    """Longer than a socket's may be; only where there is no other folder is it one line."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    notebook, out = write(tmp_path / "n.ipynb", "print(1)"), tmp_path / "out.ipynb"
    command = [sys.executable, "-m", "analysis_lib", "run", notebook, "--out", out.parent / "new"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert outputs(out.parent / "new" / "n.ipynb") == "1\n"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(AnalysisError, match=r"longlong.* is too long: set TMPDIR to a shorter one"):
        run_notebook(notebook, {}, out)
    assert not out.exists()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_no_kernel_outlives_its_run(tmp_path, end):
    pid = tmp_path / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep({10 * PATIENCE})"
    notebook = write(tmp_path / "n.ipynb", code)
    call = "import sys, pathlib; from analysis_book.build import run_notebook as run; "
    call += "run(pathlib.Path(sys.argv[1]), {}, pathlib.Path(sys.argv[2]))"
    out = tmp_path / "site" / "out.ipynb"
    run = subprocess.Popen([sys.executable, "-c", call, notebook, out], stderr=subprocess.DEVNULL)
    wait_until(lambda: pid.exists() and pid.read_text(), run)
    run.send_signal(end)
    assert run.wait(PATIENCE) != 0
    wait_until(lambda: not alive(int(pid.read_text())))
    assert not out.exists()
    if end == signal.SIGINT:
        assert {path.name for path in out.parent.iterdir()} <= {"out.failed.ipynb"}
    # What a killed run had no time to clear goes with the next one.
    run_notebook(write(notebook, "print(1)"), {}, out)
    assert [path.name for path in out.parent.iterdir()] == ["out.ipynb"]
