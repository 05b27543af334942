"""The one memory: keys, files that are written whole, seals, and two writers at once."""

import threading
from pathlib import Path

import numpy as np
import pytest

from analysis_lib import AnalysisError, files, store


def test_a_key_depends_on_all_of_its_parts_and_not_on_the_order_of_names():
    assert store.key({"a": 1, "b": 2}) == store.key({"b": 2, "a": 1})
    assert len({store.key(), store.key(1), store.key("1"), store.key(1, None), store.key([1])}) == 5


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    entry = store.Entry(tmp_path / "entry")
    entry.write("a.txt", "first")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        entry.write("a.txt", fail)
    assert entry.read("a.txt", Path.read_text) == "first"
    assert [path.name for path in entry.folder.iterdir()] == ["a.txt"]
    entry.remove("a.txt")
    assert entry.read("a.txt", Path.read_text) is None


def test_what_is_damaged_is_not_there(tmp_path):
    entry = store.Entry(tmp_path)
    entry.write("a.npy", lambda path: np.save(path, np.arange(3)))
    assert entry.read("a.npy", np.load).tolist() == [0, 1, 2]
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    assert entry.read("a.npy", np.load) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AnalysisError, match=r"cannot be written .*: give another folder") as caught:
        store.Entry(tmp_path / "file").write("a.txt", "text")
    assert "\n" not in str(caught.value)


def test_two_writers_leave_one_whole_file(tmp_path):
    texts = [letter * 100_000 for letter in "ab"]
    entry = store.Entry(tmp_path)

    def write(text: str) -> None:
        for _ in range(20):
            entry.write("a.txt", text)
            assert entry.read("a.txt", Path.read_text) in texts

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry.read("a.txt", Path.read_text) in texts
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_one_of_two_makers_waits_and_finds_it_made(tmp_path):
    entry, made = store.Entry(tmp_path), []

    def make() -> None:
        with entry.alone():
            if entry.read("a.txt", Path.read_text) is None:
                made.append(1)
                entry.write("a.txt", "made")

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_seal_tells_what_is_lost(tmp_path):
    for name in ("a.txt", "sub/b [1].txt"):
        files.write(tmp_path / name, name)
    seal = tmp_path / ".seal"
    assert store.lost(seal, "a.txt") == []
    assert store.lost(seal, "c.txt") == [tmp_path / "c.txt"]
    store.seal(seal)
    assert store.lost(seal) == []
    files.write(tmp_path / "of the user's.txt", "mine")
    assert store.lost(seal) == []
    files.write(tmp_path / "sub/b [1].txt", "changed")
    assert store.lost(seal) == [tmp_path / "sub/b [1].txt"]
    seal.write_text("{")
    assert store.lost(seal) == [seal]


def test_any_edit_of_the_library_changes_its_hash(tmp_path, monkeypatch):
    (tmp_path / "metrics").mkdir()
    source = tmp_path / "metrics" / "one.py"
    monkeypatch.setattr(store, "LIBRARY", tmp_path)
    hashes = []
    for text in ("x = 1\n", "x = 1  # a comment\n", "x = 1\n"):
        source.write_text(text)
        store.library_hash.cache_clear()
        hashes.append(store.library_hash())
    store.library_hash.cache_clear()
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]
