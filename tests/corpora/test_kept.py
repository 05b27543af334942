"""What is kept on disk: whole or not at all; damage is noticed, and what killed processes leave is
cleaned up.
"""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from waiting import wait_until

from analysis_book.training.settings import RECIPES
from analysis_lib import AnalysisError, files, measure, store
from analysis_lib.corpora import packages
from analysis_lib.files import SEAL, Output
from analysis_lib.measurement import execution
from analysis_lib.measurement.tables import save_tables


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "kept"))
    return tmp_path / "kept" / "packages"


def damaged(path) -> None:
    """Another byte, the same size and time."""
    state, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    # Another process has not read it.
    files._file_hash.cache_clear()


def test_a_derived_folder_with_another_byte_is_made_again(home):
    def fill(folder) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("content")

    folder = store.derived("key", "label", fill)
    assert store.is_whole(folder)
    damaged(folder / "sub" / "a")
    assert not store.is_whole(folder)
    assert store.derived("key", "label", fill) == folder
    assert (folder / "sub" / "a").read_text() == "content"
    (folder / "sub" / "a").unlink()
    assert not store.is_whole(folder)


def test_a_package_with_another_byte_is_refused(home, monkeypatch):
    home.mkdir(parents=True)
    wheel = home / "thing-1.0-py3-none-any.whl"
    wheel.write_bytes(b"content of a wheel")
    line = f"thing==1.0 --hash=sha256:{files.file_hash(wheel)}"
    monkeypatch.setattr(packages, "pin", lambda package: line)
    assert packages.archive("thing") == wheel
    damaged(wheel)
    with pytest.raises(AnalysisError, match="is damaged: delete it and run again"):
        packages.archive("thing")


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom analysis_lib import files\n"
        "with files.scratch(Path(sys.argv[1]), '.unfinished-tables') as folder:\n"
        "    (folder / 'half').write_text('x')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    with files.scratch(tmp_path, ".unfinished-tables"):
        assert not left.exists()
    assert not [*tmp_path.iterdir()]


HOLDING = """
import sys, time
from pathlib import Path
from analysis_lib import files, store
from analysis_lib.corpora import packages
files._machine = lambda real=files._machine: (sys.argv[2:] or [real()])[0]
with files.scratch(Path(sys.argv[1]), ".unfinished") as folder:
    (folder / "half").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holding(folder, *machine, inside=()) -> tuple[subprocess.Popen, Path]:
    """A process with a scratch folder, and that folder."""
    command = [*inside, sys.executable, "-c", HOLDING, folder, *machine]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.parametrize("inside", [(), NAMESPACE], ids=["here", "of another pid namespace"])
def test_a_scratch_folder_is_kept_while_its_process_lives_and_no_longer(tmp_path, inside):
    """A process id that is unknown here may be at work in a container."""
    if inside and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of process ids can be made here")
    process, held = holding(tmp_path, inside=inside)
    with files.scratch(tmp_path, ".unfinished"):
        assert (held / "half").read_text() == "x"
    process.kill()
    process.wait()
    # The child of unshare ends a moment after it.
    wait_until(lambda: swept(tmp_path, held))


def test_a_scratch_folder_of_this_machine_is_safe_from_another_pid_namespace(tmp_path):
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of process ids can be made here")
    with files.scratch(tmp_path, ".unfinished") as mine:
        (mine / "half").write_text("x")
        process, _ = holding(tmp_path, inside=NAMESPACE)
        process.communicate("")
        assert (mine / "half").read_text() == "x"


def test_a_scratch_folder_of_another_machine_is_left_over_after_thirty_days(tmp_path):
    process, held = holding(tmp_path, "0123456789ab")
    process.kill()
    process.wait()
    # Its lock is free here, which says nothing of where it was made.
    assert not swept(tmp_path, held)
    long_ago = time.time() - files.FORGOTTEN - 60
    os.utime(held.parent, (long_ago, long_ago))
    assert swept(tmp_path, held)


def test_what_only_looks_like_a_scratch_folder_stays(tmp_path):
    names = (
        ".unfinished-4194305-abcdefgh",
        ".unfinished-notes",
        f".unfinished-{files._machine()}-mine",
    )
    for name in names:
        (tmp_path / name).mkdir()
    with files.scratch(tmp_path, ".unfinished"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*names}


def swept(parent, held) -> bool:
    """Whether a new scratch folder has taken another one away."""
    with files.scratch(parent, ".unfinished"):
        return not held.exists()


def test_where_files_cannot_be_locked_nothing_is_taken_for_left_over(tmp_path, monkeypatch, caplog):
    process, held = holding(tmp_path)
    process.kill()
    process.wait()

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", unsupported)
        with files.scratch(tmp_path, ".unfinished") as mine:
            assert mine.is_dir()
            assert held.exists()
    assert "cannot be locked" in caplog.text
    assert swept(tmp_path, held)


def test_a_package_is_downloaded_by_one_process_alone(home, monkeypatch):
    """Whoever waited finds it."""
    monkeypatch.setattr(packages, "pin", lambda package: "thing==1.0 --hash=sha256:0")
    home.mkdir(parents=True)
    kept = []
    monkeypatch.setattr(packages, "_kept", lambda package: kept[0] if kept else None)
    monkeypatch.setattr(packages.subprocess, "run", None)
    with files.alone(home / ".downloading"):
        waiting = threading.Thread(target=lambda: done.append(packages.archive("thing")))
        done = []
        waiting.start()
        kept.append(home / "thing-1.0-py3-none-any.whl")
    waiting.join()
    assert done == kept


def test_what_a_process_at_work_has_stays(tmp_path):
    with files.scratch(tmp_path, ".unfinished") as other:
        with files.scratch(tmp_path, ".unfinished") as folder:
            assert other.is_dir()
        assert not folder.exists()
        assert other.is_dir()


def output(folder) -> Output:
    return Output(folder, "measure", ("minilm", "news"), "run.json")


@pytest.mark.parametrize("killed_at", range(1, 8))
def test_no_table_of_another_run_stays(killed_at, tmp_path, monkeypatch):
    """However far a run came before it was killed, the next one leaves its own tables alone."""

    def tables(*names):
        return {name: pd.DataFrame({"from": [names]}) for name in names}

    save_tables(tables("a", "b"), output(tmp_path), {})
    (tmp_path / "mine.csv").write_text("x")
    replace, calls = os.replace, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        try:
            save_tables(tables("b", "c"), output(tmp_path), {})
        except KeyboardInterrupt:
            if (tmp_path / "run.json").exists():
                described = json.loads((tmp_path / "run.json").read_text())["tables"]
                assert {*described} == ({"b", "c"} if killed_at == 5 else {"a", "b"})
                assert {path.stem for path in tmp_path.glob("*.parquet")} == {*described}
    save_tables(tables("c", "d"), output(tmp_path), {})
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "c.parquet",
        "d.parquet",
        "run.json",
        "mine.csv",
    }
    assert [path.name for path in tmp_path.glob(".*")] == [SEAL]


def test_a_form_that_is_none_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="give parquet or csv"):
        save_tables({"one": pd.DataFrame({"a": [1]})}, output(tmp_path), {}, "xlsx")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_cleared_while_somebody_measures(home):
    (home / "derived" / "x-0123456789ab").mkdir(parents=True)
    with store.in_use(), pytest.raises(AnalysisError, match="another process uses"):
        store.cleared("derived")
    store.cleared("derived")
    assert not (home / "derived").exists()


def test_a_mistake_in_a_file_that_extends_the_library_is_one_line(tmp_path, monkeypatch):
    for content, said in (
        ("- a\n", "entries.yml"),
        ("x: {y: 1}\n", "unexpected"),
        ("x: [\n", "entries.yml"),
        ("", "entries.yml"),
    ):
        (tmp_path / "entries.yml").write_text(content)
        with monkeypatch.context() as patch:
            patch.setattr(files, "data_directory", lambda: tmp_path)
            with pytest.raises(AnalysisError, match=said) as refused:
                files.entries("entries.yml", type(RECIPES["digits-vit"]))
        assert "\n" not in str(refused.value)


def test_what_listens_and_is_no_scheduler_is_told_in_time(tiny_folder, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS_TO_ANSWER", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        held = []
        threading.Thread(target=lambda: held.append(silent.accept()), daemon=True).start()
        started = time.monotonic()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(AnalysisError, match="no Dask scheduler answers"):
            measure(
                tiny_folder("bert"), ["a", "b c"], "anisotropy", scheduler=address, progress=False
            )
        # A second, and what a busy machine adds.
        assert time.monotonic() - started < 100
