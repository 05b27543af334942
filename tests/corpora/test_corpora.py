"""Corpora by name, file and folder, and what is said of those that cannot be read."""

import bz2
import csv
import gzip
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from conftest import ROOT, SHARED
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from PIL import Image
from sklearn.datasets import load_digits

from analysis_lib import AnalysisError, Corpus, corpora, load_corpus
from analysis_lib.corpora import Pair, hub, loading, media
from analysis_lib.corpora.published import PUBLISHED

TEXTS = ["The first line.", "A second one, with a comma", "Ünïcödé – “quoted”", "last"]


@pytest.fixture
def write(tmp_path):
    """A function that writes bytes or text to a file and gives its path as a string."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def refused(spec: str, *words: str, **arguments) -> None:
    """``load_corpus`` refuses ``spec`` in one line that holds ``words``."""
    with pytest.raises(AnalysisError) as caught:
        load_corpus(spec, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# --- Text files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False], ids=["end", "no end"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
def test_lines(write, end, last, mark):
    path = write("lines.txt", mark + end.join(TEXTS) + (end if last else ""))
    corpus = load_corpus(path)
    assert list(corpus.texts) == TEXTS
    assert corpus.blank == 0


def test_a_line_ends_at_its_line_end_only(write):
    """Not at a form feed, a vertical tab or a Unicode separator, where ``str.splitlines`` would
    cut.
    """
    text = "one\ftwo\vthree\x1cfour\u2028five\x85six"
    assert list(load_corpus(write("lines.txt", f"{text}\nnext\n")).texts) == [text, "next"]


def test_blank_lines_are_left_out_and_counted(write):
    corpus = load_corpus(write("lines.txt", "\n".join(["", *TEXTS, "  ", "\t", "", "more"])))
    assert list(corpus.texts) == [*TEXTS, "more"]
    assert corpus.blank == 4
    assert len(corpus) == 5


def test_texts_that_show_nothing_are_blank(write):
    invisible = ["\u200b", "\u200b\u200d \ufeff", "\u2060", "\u00ad", "\u3164", "\u2800", "\x07"]
    corpus = load_corpus(write("lines.txt", "\n".join([*invisible, "a\u200bb", "\u0301"])))
    assert (corpus.items, corpus.blank) == (["a\u200bb", "\u0301"], len(invisible))
    assert load_corpus([*invisible, "text"]).blank == len(invisible)
    refused(write("pairs.csv", "a,b\none,\u200b\n") + ":a,b", "one side of pair 1 is empty")


@pytest.mark.parametrize("content", ["", "\n", "\n\n  \n", "\ufeff", "\ufeff\n"])
def test_an_empty_text_file(write, content):
    refused(write("lines.txt", content), "no utterance")


@pytest.mark.parametrize(
    ("content", "byte"),
    [
        ("caf\u00e9\n".encode("latin-1"), "0xe9"),
        ("text\n".encode("utf-16"), "iconv -f UTF-16"),
        (b"ok\nbad \x80\n", "0x80"),
    ],
)
def test_another_encoding(write, content, byte):
    refused(write("lines.txt", content), "lines.txt is not UTF-8", byte, "iconv")
    refused(write("table.csv", b"text\n" + content) + ":text", "table.csv is no")


@pytest.mark.parametrize("content", [b"a\0b\n", "text\n".encode("utf-16-le"), b"PK\x03\x04\0\0"])
def test_a_file_that_is_no_text(write, content):
    refused(write("lines.txt", content), "lines.txt is no text", "zero byte")


def test_two_columns_of_one_name(write):
    refused(write("table.csv", "text,text\na,b\n") + ":text", "2 columns named text")


@pytest.mark.parametrize("spec", ["", " ", "a" * 5000, "a" * 300 + ".txt", "a\0b"])
def test_a_specification_that_is_no_path(spec):
    with pytest.raises(AnalysisError):
        load_corpus(spec)


# --- Tables ---------------------------------------------------------------------------------------


def table(texts: list[str], delimiter: str = ",") -> str:
    rows = [["id", "text", "label"], *([str(i), text, "x"] for i, text in enumerate(texts))]
    quoted = [[f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row] for row in rows]
    return "".join(delimiter.join(row) + "\n" for row in quoted)


AWKWARD = [
    *TEXTS,
    'She said "no", twice',
    "two\nlines",
    "three\r\nlines\n\nof it",
    " spaces kept ",
    "tab\tinside",
]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
def test_a_column_of_a_table(write, mark):
    assert list(load_corpus(write("table.csv", mark + table(AWKWARD)) + ":text").texts) == AWKWARD
    assert (
        list(load_corpus(write("table.tsv", mark + table(AWKWARD, "\t")) + ":text").texts)
        == AWKWARD
    )


def test_the_first_column_after_a_byte_order_mark(write):
    path = write("table.csv", "\ufefftext,label\nhello,1\n")
    assert list(load_corpus(f"{path}:text").texts) == ["hello"]


def test_blank_cells_are_left_out_and_counted(write):
    corpus = load_corpus(write("table.csv", "text,label\none,1\n,2\n  ,3\n\ntwo,4\n") + ":text")
    assert list(corpus.texts) == ["one", "two"]
    assert corpus.blank == 2


def test_a_huge_field(write):
    """The csv module alone stops at 128 KiB."""
    huge = "word " * 100_000
    assert list(load_corpus(write("table.csv", table([huge, "b"])) + ":text").texts) == [huge, "b"]


def test_a_column_that_is_not_there(write):
    path = write("table.csv", table(TEXTS))
    refused(f"{path}:txt", "no column txt", "did you mean text?")
    refused(f"{path}:Text", "no column Text", "text")
    refused(f"{path}:", "column")
    refused(path, "name its column", "id, text, label")


# Ten texts of a class, twenty of the other, and some of them twice.
CLASSED = "text,label\n" + "".join(
    f"text {i},{'even' if i % 3 else 'odd'}\n" for i in [*range(30), 3, 4, 5]
)


def test_splits_of_a_table_with_classes(write):
    path = write("table.csv", CLASSED)
    parts = [load_corpus(f"{path}:text:label:{split}") for split in ("train", "validation", "test")]
    assert [Counter(corpus.classes[label] for label in corpus.labels) for corpus in parts] == [
        {"even": 14, "odd": 7},
        {"even": 2, "odd": 1},
        {"even": 4, "odd": 2},
    ]
    assert sorted(text for corpus in parts for text in corpus.texts) == sorted(
        f"text {i}" for i in range(30)
    )
    for corpus in parts:
        for text, label in zip(corpus.texts, corpus.labels, strict=True):
            assert corpus.classes[label] == ("even" if int(text.split()[1]) % 3 else "odd")
    again = load_corpus(f"{path}:text:label:test")
    assert list(again.texts) == list(parts[2].texts)
    assert again.labels == parts[2].labels


def test_splits_of_a_table_of_pairs(write):
    rows = "".join(f"first {i},second {i},{i % 2}\n" for i in range(20))
    path = write("pairs.csv", "a,b,label\n" + rows)
    corpus = load_corpus(f"{path}:a,b:label:test")
    assert len(corpus) == 4
    assert all(pair.first.split()[1] == pair.second.split()[1] for pair in corpus.items)


def test_a_column_of_classes_may_be_named_like_a_split(write):
    path = write("table.csv", CLASSED.replace("label", "kind:test", 1))
    assert len(load_corpus(f"{path}:text:kind:test")) == 33


def test_splits_that_cannot_be_drawn(write):
    path = write("table.csv", CLASSED)
    refused(f"{path}:text:label:tset", "no split tset", "did you mean test?")
    refused(f"{path}:text:lable:test", "no column lable", "did you mean label?")
    refused(
        write("few.csv", CLASSED.replace("text 0,odd\n", "")) + ":text:label:test",
        "9 distinct texts",
        "class odd",
    )
    refused(
        write("gap.csv", CLASSED + "text 40,\n") + ":text:label:train", "example 34 has no class"
    )


def test_tables_without_utterances(write):
    refused(write("header.csv", "id,text\n") + ":text", "no utterance")
    refused(write("blank.csv", "id,text\n1,\n2,  \n") + ":text", "no utterance", "2")
    empty = write("empty.csv", "")
    refused(f"{empty}:text", "empty")
    refused(empty, "empty.csv")
    refused(write("newlines.csv", "\n\n"), "newlines.csv")
    refused(write("newlines2.csv", "\n\n") + ":text", "newlines2.csv")


def test_tables_that_are_broken(write):
    refused(write("quote.csv", 'id,text\n1,"never closed\n2,b\n') + ":text", "quote.csv")
    refused(write("short.csv", "id,text\n1,a\n2\n3,c\n") + ":text", "row 3", "text")


# --- Files that are not there ---------------------------------------------------------------------


RECORDS = [
    {"text": "Hi there.", "label": "odd", "n": 1},
    {"text": None, "label": "even"},
    {"text": "Bye.", "label": "odd"},
]


RECORD_FORMATS = [
    "jsonl",
    "ndjson",
    "json",
    "parquet",
    "csv",
    "semicolons.csv",
    "pipes.csv",
    "tsv",
    "feather",
]
RECORD_FORMATS += [
    "arrow",
    "stream.arrow",
    "csv.gz",
    "jsonl.bz2",
    "tsv.xz",
    "json.zst",
    "parquet.gz",
    "arrow.gz",
]
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKERS[".zst"] = lambda content: pa.compress(content, "zstd", asbytes=True)


@pytest.fixture(params=RECORD_FORMATS)
def records(request, tmp_path):
    """The same table in every format that is read."""
    name = f"table.{request.param}"
    packer = PACKERS.get(Path(name).suffix)
    path, table = tmp_path / (name if packer is None else Path(name).stem), pd.DataFrame(RECORDS)
    if path.suffix in {".jsonl", ".ndjson"}:
        path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(RECORDS, indent=1))
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".feather":
        table.to_feather(path)
    elif path.suffix == ".arrow":
        columns = pa.Table.from_pandas(table)
        writer = pa.ipc.new_stream if "stream" in name else pa.ipc.new_file
        with writer(str(path), columns.schema) as out:
            out.write_table(columns)
    else:
        separators = {"semicolons.csv": ";", "pipes.csv": "|", "tsv": "\t", "tsv.xz": "\t"}
        table.to_csv(path, index=False, sep=separators.get(request.param, ","))
    if packer is None:
        return path
    (tmp_path / name).write_bytes(packer(path.read_bytes()))
    return tmp_path / name


def test_tables_of_every_format_are_read_by_column(records):
    corpus = load_corpus(f"{records}:text")
    assert (corpus.items, corpus.blank) == (["Hi there.", "Bye."], 1)
    refused(f"{records}:texts", "no column texts", "text")
    refused(records, "name its column", "text, label, n")


def test_a_separator_that_is_taken_for_one_is_said(tmp_path, caplog):
    path = tmp_path / "semi.csv"
    path.write_text("text;label\na, b;1\n")
    assert load_corpus(f"{path}:text").items == ["a, b"]
    assert "taken to be separated by ';'" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ("line 2 is no JSON",)),
        ("a.jsonl", b'["a"]\n', ("line 1 is no JSON object",)),
        ("a.jsonl", b'{"text": ["a"]}\n', ("column text holds a list",)),
        ("a.jsonl", b'{"text": []}\n', ("column text holds a list",)),
        ("a.jsonl", b"", ("is empty",)),
        ("a.json", b'[{"text": "a"}, ', ("line 1 is no JSON",)),
        ("a.json", b"[1]", ("line 1 is no JSON object",)),
        ("a.json", b"[]", ("is empty",)),
        ("a.parquet", b"no", ("is no Parquet file",)),
        ("a.parquet", b"PAR1" + 40 * b"x" + b"PAR1", ("is no Parquet file",)),
        ("a.arrow", b"ARROW1" + 40 * b"x", ("is no Arrow file",)),
        ("a.csv.gz", b"text\na\n", ("cannot be unpacked",)),
        ("a.csv.xz", b"no", ("cannot be unpacked",)),
        ("a.jsonl", b"[" * 100_000, ("line 1 is no JSON",)),
    ],
)
def test_broken_records_are_refused_in_a_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refused(f"{tmp_path / name}:text", *words)


def test_the_other_columns_of_a_table_are_not_read(tmp_path):
    """Two of one name, as a join leaves them, or embeddings, which take far more memory than the
    texts.
    """
    path = tmp_path / "joined.parquet"
    pq.write_table(
        pa.Table.from_arrays([["one", "two"], [1, 2], [3, 4]], names=["a.text", "n", "n"]), path
    )
    assert load_corpus(f"{path}:a.text").items == ["one", "two"]
    refused(f"{path}:n", "2 columns named n")
    rows = 2000
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * 384, np.float32)), 384)
    wide = pa.table({"text": ["keys"] * rows, "embedding": vectors})
    pq.write_table(wide, path)
    wide.to_pandas().to_feather(tmp_path / "wide.feather")
    for spec in (f"{path}:text", f"{tmp_path / 'wide.feather'}:text"):
        before = pa.total_allocated_bytes()
        pa.default_memory_pool().release_unused()
        tracemalloc.start()
        load_corpus(spec)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # As Python objects, the embeddings are some 30 MB.
        assert most < 5e6
        assert pa.total_allocated_bytes() - before < 1e6


def test_lines_of_a_compressed_file(write):
    assert load_corpus(write("lines.txt.gz", gzip.compress(b"one\ntwo\n"))).items == ["one", "two"]


def test_standard_input_is_lines_of_text(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a\n\nb\u00e9\n".encode())))
    corpus = load_corpus("-")
    assert (corpus.items, corpus.blank) == (["a", "b\u00e9"], 1)
    refused("-", "leave doc out", units="doc")


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in ("/dev/zero", tmp_path / "pipe.txt"):
        refused(path, "no regular file")


def test_files_that_are_not_there(tmp_path):
    refused(str(tmp_path / "none.txt"), "there is no file", "none.txt")
    refused(str(tmp_path / "none.csv") + ":text", "there is no file", "none.csv")
    refused(str(tmp_path), "is a folder")
    refused(f"{tmp_path}:text", "is a folder")


def test_a_file_with_a_colon_in_its_name(write):
    assert list(load_corpus(write("a:b.txt", "one\ntwo\n")).texts) == ["one", "two"]


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        ("wikipdia", "did you mean wikipedia?"),
        ("stbs:dev", "did you mean stsb?"),
        ("wikitext", "did you mean wikitext-103?"),
        ("zzz", f"known names: {', '.join(sorted(loading.CORPORA))}"),
        ("digit", "did you mean digits?"),
        ("imagenet", "did you mean imagenet-1k?"),
        ("digits:dev", "known names: test, train"),
        ("", "name"),
        ("news:artikles", "did you mean articles?"),
        ("reviews:xyz", "known names: fresh, lines, rotten, test, train, validation"),
    ],
)
def test_unknown_names_get_the_nearest(spec, near):
    refused(spec, near)


# --- Limit and seed -------------------------------------------------------------------------------


def test_the_first_items_are_taken_where_they_are_asked_for():
    whole = load_corpus("news")
    assert list(load_corpus("news", limit=7, seed=None).texts) == list(whole.texts[:7])
    drawn = load_corpus("news", limit=7)
    assert (
        list(drawn.texts)
        == list(load_corpus("news", limit=7, seed=0).texts)
        != list(whole.texts[:7])
    )
    assert list(load_corpus("news", limit=10**9).texts) == list(whole.texts)


def test_a_seed_draws_a_sample_that_repeats():
    whole = list(load_corpus("news").texts)
    samples = [list(load_corpus("news", limit=50, seed=seed).texts) for seed in (3, 3, 4)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] != whole[:50]
    # In the order of the corpus, none of them twice.
    positions = {text: i for i, text in enumerate(whole)}
    assert len(samples[0]) == 50
    assert not Counter(samples[0]) - Counter(whole)
    if len(positions) == len(whole):
        order = [positions[text] for text in samples[0]]
        assert order == sorted(order)


def test_a_sample_is_uniform(write):
    path = write("lines.txt", "\n".join(str(i) for i in range(10)))
    counts = Counter(
        text for seed in range(300) for text in load_corpus(path, limit=3, seed=seed).texts
    )
    # 90 of each are expected, with a standard deviation of 8.
    assert set(counts) == {str(i) for i in range(10)}
    assert all(55 < count < 125 for count in counts.values())


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one(limit):
    refused("news", str(limit), "1 or more", limit=limit)


def test_a_negative_seed():
    refused("news", "-1", "0 or more", limit=5, seed=-1)


def test_the_hash_is_that_of_the_texts(write):
    a = load_corpus(write("a.txt", "one\ntwo\n"))
    b = load_corpus(write("b.csv", "text\none\ntwo\n") + ":text")
    c = load_corpus(write("c.txt", "one\ntwo!\n"))
    joined = load_corpus(write("d.csv", 'text\n"one\ntwo"\n') + ":text")
    assert a.sha256 == b.sha256 == hashlib.sha256(b"one\0two").hexdigest()
    assert len({a.sha256, c.sha256, joined.sha256}) == 3
    assert load_corpus(a.name, limit=1).sha256 != a.sha256


def test_identities_change_with_the_file(write):
    path = write("a.txt", "one\n")
    before = corpora.data_identity(path)
    assert before == corpora.data_identity(path)
    write("a.txt", "two\n")
    assert corpora.data_identity(path) != before
    assert corpora.data_identity("news") != corpora.data_identity("wikipedia")
    assert "sha256" in corpora.data_identity("news")
    with pytest.raises(AnalysisError, match="did you mean news"):
        corpora.data_identity("newss")


def test_corpora_import_neither_torch_nor_transformers():
    # The package itself imports all of the library; here it is an empty one.
    code = (
        "import sys, types; package = sys.modules['analysis_lib'] = "
        "types.ModuleType('analysis_lib'); "
        f"package.__path__ = [{str(ROOT / 'analysis_lib')!r}]; import analysis_lib.corpora; "
        "print(*({'torch', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


# --- Bundled corpora ------------------------------------------------------------------------------


def test_bundled_corpora_have_their_sizes():
    sizes = {
        name: len(load_corpus(name))
        for name in (
            "wikipedia",
            "wikipedia:paragraphs",
            "news:articles",
            "reviews",
            "reviews:fresh",
            "reviews:rotten",
        )
    }
    assert sizes["wikipedia"] > 18_000
    assert sizes["wikipedia:paragraphs"] > 5_000
    assert sizes["news:articles"] == 300
    assert sizes["reviews"] == sizes["reviews:fresh"] + sizes["reviews:rotten"] > 12_500
    assert len(load_corpus("plots")) > 1_000
    assert len(load_corpus("news")) > 2_000


def test_review_labels_are_those_of_the_reviews():
    fresh, rotten = (
        Counter(load_corpus(f"reviews:{label}").texts) for label in ("fresh", "rotten")
    )
    assert fresh + rotten == Counter(load_corpus("reviews").texts)
    words = {
        label: " ".join(lines).lower() for label, lines in (("fresh", fresh), ("rotten", rotten))
    }
    for good, bad in (("enjoyable", "dull"), ("masterpiece", "mess"), ("delightful", "bore")):
        assert words["fresh"].count(good) > words["rotten"].count(good)
        assert words["rotten"].count(bad) > words["fresh"].count(bad)


def test_articles_are_the_sentences_of_wikipedia_by_article():
    splits = [load_corpus(f"articles:{split}") for split in ("train", "validation", "test")]
    classes = splits[0].classes
    assert [corpus.classes for corpus in splits] == [classes] * 3
    assert len(classes) == 88
    rows = [
        (classes[label], text)
        for c in splits
        for label, text in zip(c.labels, c.texts, strict=True)
    ]
    # Each sentence of an article is in one split alone.
    assert len(set(rows)) == len(rows)
    assert {text for _, text in rows} < set(load_corpus("wikipedia").texts)
    for label in range(len(classes)):
        parts = [corpus.labels.count(label) for corpus in splits]
        whole = sum(parts)
        assert whole >= 20
        assert parts == [whole - whole // 10 - whole // 5, whole // 10, whole // 5]
    lincoln = [text for name, text in rows if name == "Abraham Lincoln"]
    assert sum("Lincoln" in text for text in lincoln) > 0.5 * len(lincoln)


@pytest.mark.parametrize(
    "markup",
    ["[[", "]]", "{{", "}}", "<ref", "</ref", "{|", "|}", "<!--", "&nbsp;", "==", "<br", "|-"],
)
def test_wikipedia_is_running_text(markup):
    for name in ("wikipedia", "wikipedia:paragraphs"):
        residue = [text for text in load_corpus(name).texts if markup in text]
        assert residue == []


def test_bundled_sentences_are_sentences():
    for name in ("wikipedia", "news"):
        texts = load_corpus(name).texts
        assert all(text == text.strip() and "\n" not in text for text in texts)
        words = [len(text.split()) for text in texts]
        assert 15 < sum(words) / len(words) < 30


def test_known_corpora_all_load_or_are_on_the_hub():
    assert {name.partition(":")[0] for name in corpora.known_corpora()} == set(loading.CORPORA)
    for name, source in loading.CORPORA.items():
        if name not in PUBLISHED:
            assert all(len(load_corpus(f"{name}:{split}")) for split in source.splits)


# --- Corpora of the hub, from a cache -------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that lays a file, or columns as a Parquet file, into an offline hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_reachable", lambda: False)

    def put(
        repository: str,
        commit: str,
        file: str,
        content: dict[str, list] | bytes,
        rows: int | None = None,
        branch: str = "main",
    ) -> None:
        home = tmp_path / "hub" / f"datasets--{repository.replace('/', '--')}"
        path = home / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        ref = home / "refs" / branch
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pd.DataFrame(content).to_parquet(path, row_group_size=rows)

    return put


GLUE = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
WIKITEXT = "b08601e04326c79dfdd32d625aee71d232d685c3"


def test_stsb_from_the_cache(cache):
    columns = {"sentence1": ["One.", "Two."], "sentence2": ["Three.", "Four."], "label": [1.0, 2.0]}
    cache("nyu-mll/glue", GLUE, "stsb/validation-00000-of-00001.parquet", columns)
    assert (
        list(load_corpus("stsb").texts) == list(load_corpus("stsb:dev").texts) == ["One.", "Two."]
    )
    refused("stsb:test", "nyu-mll/glue", "not in the local cache")


def test_wikitext_from_the_cache_in_parts(cache):
    for part, texts in enumerate(
        (["", " = Title = \n", " A paragraph . \n"], ["", " Another . \n"])
    ):
        cache(
            "Salesforce/wikitext",
            WIKITEXT,
            f"wikitext-103-raw-v1/train-{part:05d}-of-00002.parquet",
            {"text": texts},
        )
    corpus = load_corpus("wikitext-103:train")
    assert [text.strip() for text in corpus.texts] == ["= Title =", "A paragraph .", "Another ."]
    assert corpus.blank == 2


IMDB = "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
# Of the branch that the hub converts; any will do.
CONVERTED = "0123456789abcdef0123456789abcdef01234567"


def put_converted(cache, repository: str, split: str, columns: dict[str, list]) -> None:
    cache(
        repository,
        CONVERTED,
        f"plain_text/{split}/0000.parquet",
        columns,
        branch="refs/convert/parquet",
    )


def votes(*labels: int) -> dict[str, list]:
    """What the annotators of a post gave, with the other columns that the hub has."""
    return {
        "label": list(labels),
        "annotator_id": list(range(len(labels))),
        "target": [["None"]] * len(labels),
    }


def test_hatexplain_from_the_cache_by_majority(cache):
    annotators = [votes(0, 0, 2), votes(0, 1, 2), votes(1, 1, 1), votes(2, 1, 2)]
    tokens = [["a", "post", "."], ["no", "majority"], ["another", "one"], ["a", "third"]]
    columns = {
        "id": list("wxyz"),
        "annotators": annotators,
        "rationales": [[], [], [], []],
        "post_tokens": tokens,
    }
    put_converted(cache, "Hate-speech-CNERG/hatexplain", "validation", columns)
    corpus = load_corpus("hatexplain:validation")
    assert list(corpus.texts) == ["a post .", "another one", "a third"]
    assert [corpus.classes[label] for label in corpus.labels] == [
        "hatespeech",
        "normal",
        "offensive",
    ]
    refused("hatexplain", "Hate-speech-CNERG/hatexplain", "not in the local cache")


def test_e_snli_from_the_cache(cache):
    columns = {
        "premise": ["A man sleeps.", "A dog runs.", "Two cats."],
        "hypothesis": ["He rests.", "A dog sleeps.", "They are old."],
        "label": [0, 2, 1],
        "explanation_1": ["", "", ""],
    }
    put_converted(cache, "esnli/esnli", "test", columns)
    corpus = load_corpus("e-snli:test")
    assert corpus.items == [*map(Pair, columns["premise"], columns["hypothesis"])]
    assert [corpus.classes[label] for label in corpus.labels] == [
        "entailment",
        "contradiction",
        "neutral",
    ]
    refused("e-snli:validation", "esnli/esnli", "not in the local cache")


def put_imdb(cache) -> None:
    """Forty reviews to train on, of which the even ones are good, and three to test."""
    train = {"text": [f"film {i}" for i in range(40)], "label": [1 - i % 2 for i in range(40)]}
    cache("stanfordnlp/imdb", IMDB, "plain_text/train-00000-of-00001.parquet", train)
    test = {"text": ["bad", "good", "worse"], "label": [0, 1, 0]}
    cache("stanfordnlp/imdb", IMDB, "plain_text/test-00000-of-00001.parquet", test)


def test_imdb_from_the_cache_with_a_validation_split(cache):
    refused("imdb", "stanfordnlp/imdb", "not in the local cache")
    put_imdb(cache)
    train, validation, test = (
        load_corpus(f"imdb:{split}") for split in ("train", "validation", "test")
    )
    assert list(test.texts) == ["bad", "good", "worse"]
    assert [test.classes[label] for label in test.labels] == ["neg", "pos", "neg"]
    assert (len(train), len(validation)) == (36, 4)
    assert Counter(train.labels) == {0: 18, 1: 18}
    assert Counter(validation.labels) == {0: 2, 1: 2}
    assert {*train.texts, *validation.texts} == {f"film {i}" for i in range(40)}
    assert list(train.labels) == [1 - int(text.split()[1]) % 2 for text in train.texts]
    # The first split is the default, and a draw repeats.
    assert load_corpus("imdb").sha256 == train.sha256
    assert load_corpus("imdb:validation").sha256 == validation.sha256


@pytest.mark.parametrize(
    ("premise", "hypothesis", "label", "words"),
    [
        ("A man.", None, 0, "one side of pair 2 is empty"),
        ("A man.", " ", 0, "one side of pair 2 is empty"),
        (None, None, 0, "example 2 has no text"),
        ("A man.", "He.", -1, "example 2 has no class"),
        ("A man.", "He.", 3, "example 2 has no class"),
        ("A man.", "He.", None, "example 2 has no class"),
    ],
)
def test_gaps_in_classes_of_the_hub(cache, premise, hypothesis, label, words):
    columns = {
        "premise": ["One.", premise],
        "hypothesis": ["Two.", hypothesis],
        "label": [1, label],
    }
    put_converted(cache, "esnli/esnli", "train", columns)
    refused("e-snli", "plain_text/train/0000.parquet", words)


def test_files_of_the_hub_that_are_not_as_they_were(cache):
    put_converted(
        cache, "esnli/esnli", "train", {"premise": ["One."], "hypotheses": ["Two."], "label": [1]}
    )
    refused("e-snli", "0000.parquet has no column hypothesis", "hypotheses")
    cache("stanfordnlp/imdb", IMDB, "plain_text/test-00000-of-00001.parquet", b"PAR1 and no more")
    refused("imdb:test", "test-00000-of-00001.parquet", "cannot be read")


def test_identities_on_the_hub_are_those_of_the_cached_commit(cache, monkeypatch):
    for spec in ("imdb", "e-snli:test", "hatexplain:validation"):
        with pytest.raises(AnalysisError, match="not in the local cache"):
            corpora.data_identity(spec)
    put_imdb(cache)
    assert (
        corpora.data_identity("imdb:validation") == f"imdb:validation from stanfordnlp/imdb@{IMDB}"
    )
    put_converted(
        cache, "esnli/esnli", "test", {"premise": ["One."], "hypothesis": ["Two."], "label": [1]}
    )
    assert corpora.data_identity("e-snli:test") == f"e-snli:test from esnli/esnli@{CONVERTED}"
    # What the branch holds is not known before it is fetched.
    monkeypatch.setattr(hub, "_reachable", lambda: True)
    assert corpora.data_identity("e-snli") == "e-snli from esnli/esnli@refs/convert/parquet"


# --- Folders of images ----------------------------------------------------------------------------


def picture(seed: int, *shape: int) -> np.ndarray:
    """Smooth colours, which lossy formats keep."""
    height, width, *channels = shape or (24, 32, 3)
    rng = np.random.default_rng(seed)
    corners = Image.fromarray(rng.integers(0, 256, (2, 2, *channels), dtype=np.uint8))
    return np.asarray(corners.resize((width, height), Image.Resampling.BILINEAR))


def encoded(pixels: np.ndarray | Image.Image, kind: str, **options) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "webp": "WebP",
    "bmp": "BMP",
    "tif": "TIFF",
    "TIFF": "TIFF",
}


def test_a_folder_of_images_of_every_format(write, tmp_path):
    for i, (suffix, kind) in enumerate(FORMATS.items()):
        write(f"photos/{i}.{suffix}", encoded(picture(i), kind))
    write("photos/README.txt", "Taken in May.\n")
    write("photos/.hidden.png", b"")
    write("photos/.cache/x.png", b"")
    corpus = load_corpus(str(tmp_path / "photos"))
    assert (corpus.kind, corpus.labels, corpus.blank, len(corpus)) == (
        "image",
        None,
        0,
        len(FORMATS),
    )
    assert [item.path.name for item in corpus.items] == [
        f"{i}.{suffix}" for i, suffix in enumerate(FORMATS)
    ]
    for i, (item, kind) in enumerate(zip(corpus.items, FORMATS.values(), strict=True)):
        image = item.load()
        assert (image.mode, image.size) == ("RGB", (32, 24))
        gap = np.abs(np.asarray(image).astype(int) - picture(i))
        assert gap.max() == 0 if kind in ("PNG", "BMP", "TIFF") else gap.mean() < 4


SEVERAL = {"gif": "GIF", "webp": "WebP", "tif": "TIFF", "png": "PNG", "avif": "AVIF"}


@pytest.mark.parametrize("suffix", SEVERAL)
def test_each_picture_of_a_file_is_an_item_and_the_file_a_unit(write, tmp_path, suffix):
    frames = [Image.fromarray(np.full((16, 16, 3), value, np.uint8)) for value in (40, 120, 200)]
    options = {"lossless": True} if suffix == "webp" else {}
    write(
        f"several/b.{suffix}",
        encoded(frames[0], SEVERAL[suffix], save_all=True, append_images=frames[1:], **options),
    )
    for name, value in (("a", 80), ("c", 240)):
        write(f"several/{name}.png", encoded(np.full((16, 16, 3), value, np.uint8), "PNG"))
    corpus = load_corpus(str(tmp_path / "several"))
    found = [np.asarray(item.load()).mean() for item in corpus.items]
    assert found == pytest.approx([80, 40, 120, 200, 240], abs=2)
    assert corpus.groups(20) == [0, 1, 1, 1, 2]
    assert len({item.digest() for item in corpus.items}) == 5
    assert [str(item).partition(" in ")[0] for item in corpus.items[2:4]] == [
        "picture 2",
        "picture 3",
    ]
    assert len(load_corpus(str(tmp_path / "several"), limit=2)) == 2
    # Of files with one picture each, none is a unit.
    (tmp_path / "several" / f"b.{suffix}").unlink()
    assert load_corpus(str(tmp_path / "several")).units is None


def test_a_reduced_copy_in_a_tiff_is_left_out_and_said(write, caplog):
    pages = [Image.fromarray(picture(i)) for i in range(2)]
    reduced = pages[0].resize((8, 6))
    # Tag 254: what a page is of the others; 1 says a reduced copy.
    reduced.encoderinfo = {"tiffinfo": {254: 1}}
    path = write(
        "scan.tif", encoded(pages[0], "TIFF", save_all=True, append_images=[reduced, pages[1]])
    )
    corpus = load_corpus(path)
    assert [item.load().size for item in corpus.items] == [(32, 24)] * 2
    assert "of the 3 pictures" in caplog.text
    assert "1 are reduced copies" in caplog.text


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("1", "L"), ("L", "L"), ("LA", "L"), ("P", "RGB"), ("RGBA", "RGB"), ("RGB", "RGB")],
)
def test_grey_images_stay_grey_and_others_become_rgb(write, mode, wanted):
    image = Image.fromarray(picture(0)).convert(mode)
    loaded = load_corpus(write("x.png", encoded(image, "PNG"))).items[0].load()
    assert loaded.mode == wanted
    assert np.array_equal(loaded, image.convert(wanted))


def test_images_for_print_become_rgb(write):
    path = write("x.jpg", encoded(Image.fromarray(picture(0)).convert("CMYK"), "JPEG"))
    assert load_corpus(path).items[0].load().mode == "RGB"


def test_sixteen_bits_are_scaled_to_eight(write):
    pixels = np.array([[0, 257, 40_000, 65_535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        image = load_corpus(write(f"x.{kind.lower()}", encoded(pixels, kind))).items[0].load()
        assert image.mode == "L"
        assert np.asarray(image).tolist() == [[0, 1, 156, 255]]
    header = b"P5\n4 1\n65535\n"
    image = load_corpus(write("x.pgm", header + pixels.astype(">u2").tobytes())).items[0].load()
    assert np.asarray(image).tolist() == [[0, 1, 156, 255]]
    path = write("float.tif", encoded(np.full((4, 4), 0.5, np.float32), "TIFF"))
    unreadable(path, "float.tif", "32-bit", "8 or 16 bits")


def test_a_photograph_taken_sideways_is_turned(write):
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: the top of the picture is at the right of the stored one.
    path = write("x.png", encoded(picture(0), "PNG", exif=exif))
    assert np.array_equal(load_corpus(path).items[0].load(), np.rot90(picture(0), -1))


def test_sub_folders_are_searched_and_are_the_labels(write, tmp_path):
    for name in ("b/2.png", "b/1.PNG", "a/deep/3.png", "c d/x.png", "a/4.png"):
        write(f"photos/{name}", encoded(picture(len(name)), "PNG"))
    write("photos/notes/read.txt", "no image here")
    corpus = load_corpus(str(tmp_path / "photos"))
    found = [str(item.path.relative_to(tmp_path / "photos")) for item in corpus.items]
    assert found == ["a/4.png", "a/deep/3.png", "b/1.PNG", "b/2.png", "c d/x.png"]
    assert list(corpus.labels) == [0, 0, 1, 1, 2]
    write("photos/loose.png", encoded(picture(0), "PNG"))
    assert load_corpus(str(tmp_path / "photos")).labels is None


def test_links_are_followed_but_not_round(write, tmp_path):
    write("photos/a/1.png", encoded(picture(0), "PNG"))
    write("elsewhere/2.png", encoded(picture(1), "PNG"))
    (tmp_path / "photos" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "a" / "back").symlink_to(tmp_path / "photos")
    (tmp_path / "linked").symlink_to(tmp_path / "photos")
    for folder in ("photos", "linked"):
        assert [item.path.name for item in load_corpus(str(tmp_path / folder)).items] == [
            "1.png",
            "2.png",
        ]


def unreadable(path: str, *words: str) -> None:
    """The item in ``path`` is refused on loading, in one line that holds ``words``."""
    (item,) = load_corpus(path).items
    with pytest.raises(AnalysisError) as caught:
        item.load()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP", "BMP", "TIFF", "GIF"])
def test_a_truncated_image(write, kind):
    whole = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), kind)
    path = write(f"x.{kind.lower()}", whole)
    load_corpus(path).items[0].load()
    write(f"x.{kind.lower()}", whole[: len(whole) // 2])
    unreadable(path, path, "cannot be read")


@pytest.mark.parametrize("content", [b"", b"text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_a_file_that_is_no_image(write, content):
    path = write("x.png", content)
    unreadable(path, path)


def test_a_file_that_went_away(write):
    for name in ("x.png", "x.wav"):
        path = write(name, b"")
        corpus = load_corpus(path)
        Path(path).unlink()
        with pytest.raises(AnalysisError, match="cannot be read: No such file"):
            corpus.items[0].load()
        with pytest.raises(AnalysisError, match="cannot be read: No such file"):
            _ = corpus.sha256


def test_folders_that_are_no_corpus(write, tmp_path):
    refused(str(tmp_path), "without images or sounds", "png", "flac")
    write("x/lines.txt", "text\n")
    write("x/.hidden.png", b"")
    refused(str(tmp_path / "x"), "is a folder without images or sounds")
    write("x/a/1.png", b"")
    write("x/b/2.wav", b"")
    write("x/b/3.wav", b"")
    refused(str(tmp_path / "x"), "1 images and 2 sound files", "one kind")
    refused(f"{tmp_path / 'x'}:text", "is a folder")


def test_a_folder_that_may_not_be_read(write, tmp_path, monkeypatch):
    """Its files are not left out in silence."""
    write("x/a.png", b"")
    write("x/closed/b.png", b"")
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    refused(str(tmp_path / "x"), "closed cannot be read: Permission denied")


def test_only_texts_have_texts(write):
    corpus = load_corpus(write("x.png", b""))
    with pytest.raises(AnalysisError, match=r"x\.png holds images where texts are wanted"):
        _ = corpus.texts
    assert Corpus("mine", ["a", "b"]).texts == ["a", "b"]


# --- Folders of sounds ----------------------------------------------------------------------------

RATE = 16_000
TONE = (0.5 * np.sin(2 * np.pi * 220 * np.arange(RATE) / RATE)).astype(np.float32)


def recorded(
    samples: np.ndarray,
    kind: str = "WAV",
    subtype: str | None = None,
    rate: int = RATE,
    endian: str | None = None,
) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype, endian=endian)
    return out.getvalue()


def samples_of(content: bytes) -> np.ndarray:
    """What soundfile gives, its channels averaged."""
    return soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)[0].mean(axis=1)


def test_a_folder_of_sounds_of_every_format(write, tmp_path):
    for i, kind in enumerate(("WAV", "FLAC", "OGG", "MP3")):
        write(f"calls/{i}.{kind.lower()}", recorded(TONE, kind))
    write("calls/notes.txt", "Heard at dawn.\n")
    corpus = load_corpus(str(tmp_path / "calls"))
    assert (corpus.kind, corpus.labels, len(corpus)) == ("audio", None, 4)
    for item, error in zip(corpus.items, (2**-15, 2**-15, 0.05, 0.05), strict=True):
        sound = item.load()
        assert (sound.rate, sound.samples.shape, sound.samples.dtype) == (
            RATE,
            TONE.shape,
            np.float32,
        )
        assert np.abs(sound.samples - TONE).max() < error


@pytest.mark.parametrize(
    ("subtype", "error"),
    [
        ("PCM_U8", 2**-7),
        ("PCM_16", 2**-15),
        ("PCM_24", 2**-23),
        ("PCM_32", 2**-24),
        ("FLOAT", 0),
        ("DOUBLE", 0),
    ],
)
def test_every_depth_of_a_wave_file(write, subtype, error):
    (item,) = load_corpus(write("x.wav", recorded(TONE, subtype=subtype))).items
    assert np.abs(item.load().samples - TONE).max() <= error


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_sound_keeps_its_rate(write, rate):
    sound = load_corpus(write("x.flac", recorded(TONE, "FLAC", rate=rate))).items[0].load()
    assert (sound.rate, len(sound.samples)) == (rate, len(TONE))


def test_channels_are_averaged(write):
    stereo = np.stack([TONE, np.zeros_like(TONE)], axis=1)
    sound = load_corpus(write("x.wav", recorded(stereo, subtype="FLOAT"))).items[0].load()
    assert np.array_equal(sound.samples, TONE / 2)


def test_a_long_sound_is_read_to_its_end(write):
    """Longer than the blocks it is read in."""
    ramp = np.linspace(-1, 1, 2**21 + 5, dtype=np.float32)
    sound = load_corpus(write("x.wav", recorded(ramp, subtype="FLOAT"))).items[0].load()
    assert np.array_equal(sound.samples, ramp)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite(write, value):
    path = write("x.wav", recorded(np.append(TONE, np.float32(value)), subtype="FLOAT"))
    unreadable(path, path, "not finite")


def test_samples_on_another_scale(write):
    path = write("x.wav", recorded(TONE * 32768, subtype="FLOAT"))
    unreadable(path, path, "16384", "between -1 and 1")


@pytest.mark.parametrize(
    ("kind", "subtype"), [("MP3", None), ("OGG", "VORBIS"), ("WAV", "FLOAT"), ("WAV", "DOUBLE")]
)
def test_samples_beyond_full_scale_are_those_of_soundfile(write, kind, subtype):
    """As what lossy formats decode to, and floats, may be."""
    loud = 1.5 * np.sign(np.random.default_rng(0).normal(size=RATE))
    loud = loud.clip(-1, 1) if kind == "MP3" else loud
    content = recorded(loud.astype(np.float32), kind, subtype)
    expected = soundfile.read(io.BytesIO(content), dtype="float32")[0]
    assert np.abs(expected).max() > 1.2
    samples = load_corpus(write(f"x.{kind.lower()}", content)).items[0].load().samples
    np.testing.assert_allclose(samples, expected, atol=1e-6)


JOINED = [
    ("OGG", "VORBIS", RATE),
    ("OGG", "OPUS", 48_000),
    ("MP3", None, RATE),
    ("MP3", None, 44_100),
]
JOINED += [
    ("FLAC", None, RATE),
    ("WAV", None, RATE),
    ("AU", None, RATE),
    ("CAF", None, RATE),
    ("RF64", None, RATE),
]
JOINED += [("W64", None, RATE), ("AIFF", None, RATE)]


@pytest.mark.parametrize(("kind", "subtype", "rate"), JOINED)
@pytest.mark.parametrize("channels", [1, 2])
def test_recordings_joined_into_one_file_are_read_to_the_end(write, kind, subtype, rate, channels):
    tones = [np.stack([TONE * loudness] * channels, axis=1) for loudness in (1, 0.3, 0.6)]
    parts = [recorded(tone, kind, subtype, rate) for tone in tones]
    each = [soundfile.read(io.BytesIO(part), always_2d=True)[0].mean(axis=1) for part in parts]
    sound = load_corpus(write(f"x.{kind.lower()}", b"".join(parts))).items[0].load()
    assert sound.rate == rate
    np.testing.assert_allclose(sound.samples, np.concatenate(each), atol=1e-6)


def test_a_tag_before_a_recording_is_not_one_of_its_own(write):
    tag = b"ID3\x03\0\0\0\0\x00\x40" + b"TIT2" + bytes(60)
    part = recorded(TONE, "MP3")
    expected = np.tile(soundfile.read(io.BytesIO(part))[0], 2)
    sound = load_corpus(write("x.mp3", tag + part + tag + part)).items[0].load()
    np.testing.assert_allclose(sound.samples, expected, atol=1e-6)


def test_joined_recordings_of_two_rates_are_refused(write):
    unreadable(
        write("x.ogg", recorded(TONE, "OGG") + recorded(TONE, "OGG", rate=8000)),
        "8000 and 16000 Hz",
    )


def test_an_empty_sound(write):
    path = write("x.wav", recorded(TONE[:0]))
    unreadable(path, path, "holds no sound")


@pytest.mark.parametrize("content", [b"", b"text", b"RIFF", b"ID3"])
@pytest.mark.parametrize("suffix", ["wav", "mp3"])
def test_a_file_that_is_no_sound(write, content, suffix):
    path = write(f"x.{suffix}", content)
    unreadable(path, path, "is no sound")


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("FLAC", None), ("MP3", None)],
)
def test_a_truncated_sound(write, kind, subtype):
    whole = recorded(np.random.default_rng(0).normal(scale=0.1, size=3 * RATE), kind, subtype)
    path = write(f"x.{kind.lower()}", whole)
    assert len(load_corpus(path).items[0].load().samples) == 3 * RATE
    write(f"x.{kind.lower()}", whole[: len(whole) * 6 // 10])
    unreadable(path, path)


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFF000, 0])
@pytest.mark.parametrize("whole", [0xFFFFFFFF, 0])
def test_a_wave_file_written_to_a_pipe(write, length, whole):
    """Its header gives no length, or about the largest there is, and that is no sign of a truncated
    file.
    """
    content = bytearray(recorded(TONE))
    content[4:8] = struct.pack("<I", whole)
    start = content.index(b"data") + 4
    content[start : start + 4] = struct.pack("<I", length)
    (item,) = load_corpus(write("x.wav", bytes(content))).items
    np.testing.assert_allclose(item.load().samples, TONE, atol=2**-15)


@pytest.mark.parametrize("rate", [RATE, 44_100, 12_345])
@pytest.mark.parametrize("count", [1, 100, 4096, 4097, 3 * RATE])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_flac_written_to_a_pipe_is_read_to_its_end(write, rate, count, channels):
    """Its header says that it has 0 samples, of which soundfile makes as many as there can be."""
    samples = np.random.default_rng(0).normal(scale=0.1, size=(count, channels)).astype(np.float32)
    whole = recorded(samples, "FLAC", rate=rate)
    content = bytearray(whole)
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    (item,) = load_corpus(write("x.flac", bytes(content))).items
    np.testing.assert_array_equal(item.load().samples, samples_of(whole))
    if count > 4097:
        write("x.flac", bytes(content[: len(content) * 6 // 10]))
        unreadable(str(item.path), str(item.path))


LENGTHS = {
    ("AU", "BIG"): (8, ">I", [0, 0xFFFFFFFF, 0x7FFFF000]),
    ("AU", "LITTLE"): (8, "<I", [0, 0xFFFFFFFF]),
    ("CAF", None): (b"data", ">q", [0, -1]),
    ("RF64", None): (28, "<q", [0, -1]),
    ("W64", None): (b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a", "<q", [0, -1, 24]),
    ("WAV", "BIG"): (b"data", ">I", [0, 0xFFFFFFFF, 0x7FFFF000]),
    ("WAVEX", None): (b"data", "<I", [0, 0xFFFFFFFF, 0x7FFFF000]),
    ("AIFF", None): (b"SSND", ">I", [0, 0xFFFFFFFF]),
}


@pytest.mark.parametrize(("kind", "endian"), LENGTHS)
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_a_sound_of_any_format_whose_header_gives_no_length(write, kind, endian, subtype):
    whole = recorded(TONE, kind, subtype, endian=endian)
    place, form, lengths = LENGTHS[kind, endian]
    place = place if isinstance(place, int) else whole.index(place) + len(place)
    for length in lengths:
        content = bytearray(whole)
        struct.pack_into(form, content, place, length)
        (item,) = load_corpus(write(f"x.{kind.lower().removesuffix('ex')}", bytes(content))).items
        np.testing.assert_array_equal(item.load().samples, samples_of(whole), err_msg=str(length))


@pytest.mark.parametrize("kind", ["AU", "CAF", "RF64", "W64", "AIFF", "WAV", "WAVEX", "SVX", "VOC"])
def test_a_sound_of_any_length_is_read_whole_and_a_cut_one_refused(write, kind):
    for count in (*range(1, 20), RATE):
        whole = recorded(TONE[-count:], kind, "PCM_U8" if kind == "VOC" else "PCM_16")
        name = f"x.{kind.lower().removesuffix('ex')}"
        (item,) = load_corpus(write(name, whole)).items
        np.testing.assert_array_equal(item.load().samples, samples_of(whole))
    write(name, whole[: len(whole) * 6 // 10])
    unreadable(str(item.path), str(item.path))


def test_an_empty_sound_before_another_chunk(write):
    """What follows in an empty file is no sound."""
    path = write(
        "x.wav", recorded(TONE[:0]) + b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + bytes(18)
    )
    unreadable(path, path, "holds no sound")


def test_a_header_that_claims_more_than_memory_holds(write):
    content = bytearray(recorded(TONE, "FLAC"))
    content[21:26] = bytes(
        [content[21] | 0x0F, 255, 255, 255, 255]
    )  # The number of samples in STREAMINFO.
    path = write("x.flac", bytes(content))
    assert soundfile.info(path).frames == 2**36 - 1
    unreadable(path, path)


# --- What is said in sounds -----------------------------------------------------------------------

SAID_IN = {
    "metadata.csv": "file_name,transcription\na.wav,hello\nsub/b.wav,bye\n",
    "metadata.tsv": "path\tsentence\na.wav\thello\nb.wav\tbye\n",
    "transcripts.csv": '"File_Name";"Transcript"\n"a";"hello"\n"b";"bye"\n',
    "metadata.jsonl": '{"file_name": "a.wav", "text": "hello"}\n{"file_name": "sub/b", "text": "bye"}\n',
    "metadata.csv.gz": gzip.compress(b"file_name,text\na.wav,hello\nb.wav,bye\n"),
    "sub/metadata.csv": "file_name,text\nb.wav,bye\n",
}


@pytest.mark.parametrize("name", SAID_IN)
def test_what_is_said_in_sounds(write, tmp_path, caplog, name):
    write("calls/a.wav", recorded(TONE))
    write("calls/sub/b.wav", recorded(TONE))
    write("calls/c.wav", recorded(TONE))
    write(f"calls/{name}", SAID_IN[name])
    texts = [item.text for item in load_corpus(str(tmp_path / "calls")).items]
    alone = name.startswith("sub")
    assert texts == ["" if alone else "hello", "", "bye"]
    assert f"of the 3 sounds of {tmp_path / 'calls'}, {2 - alone} have a text" in caplog.text
    assert f"and {1 + alone} have none" in caplog.text
    assert "are other files" not in caplog.text


def test_absolute_paths_and_those_from_a_folder_above_name_sounds(write, tmp_path):
    path = write("calls/sub/b.wav", recorded(TONE))
    for number, name in enumerate((path, "calls/sub/b.wav", "calls\\sub\\b.wav")):
        write("calls/metadata.csv", f"file_name,text\n{name},said {number}\n")
        assert [item.text for item in load_corpus(str(tmp_path / "calls")).items] == [
            f"said {number}"
        ]


def test_tables_that_say_nothing_of_sounds(write, tmp_path, caplog):
    folder = str(tmp_path / "calls")
    for name in ("a.wav", "x/b.wav", "y/b.wav"):
        write(f"calls/{name}", recorded(TONE))
    write("calls/metadata.csv", "file_name,text\nz.wav,hello\nelsewhere/b.wav,bye\n")
    refused(folder, "metadata.csv names none of the 3 sounds", "'z.wav'", "a.wav")
    write("calls/metadata.csv", "file_name,text\na.wav,hello\na.wav,bye\n")
    refused(folder, "a.wav twice, with other words")
    # Which of two sounds is meant is not known.
    write("calls/metadata.csv", "file_name,text\na.wav,hello\nb.wav,bye\n")
    assert [item.text for item in load_corpus(folder).items] == ["hello", "", ""]
    write("calls/metadata.csv", "file_name,speaker\na.wav,hello\n")
    assert [item.text for item in load_corpus(folder).items] == ["", "", ""]
    assert "has no column of what is said, such as transcription" in caplog.text
    # A table of something else does not matter, be it broken.
    write("calls/metadata.csv", "file_name,text\na.wav,hello\n")
    write("calls/settings.json", '{"rate": 16000}')
    write("calls/other.json", "{")
    assert [item.text for item in load_corpus(folder).items] == ["hello", "", ""]


@pytest.mark.parametrize(
    ("name", "remedy"), [("a.m4a", "ffmpeg"), ("a.heic", "PNG"), ("folder/a.m4a", "ffmpeg")]
)
def test_what_neither_library_reads_is_to_be_converted(write, tmp_path, name, remedy):
    path = write(name, b"\0\0\0 ftyp")
    refused(
        str(Path(path).parent) if "/" in name else path, Path(name).suffix, "convert them", remedy
    )


# --- What all items share -------------------------------------------------------------------------


@pytest.fixture
def classes(write, tmp_path):
    """A folder of 40 grey images in 4 classes, each with its number as its brightness."""
    for i in range(40):
        write(f"photos/{i // 10}/{i:02d}.png", encoded(np.full((3, 3), i, np.uint8), "PNG"))
    return str(tmp_path / "photos")


def brightness(corpus: Corpus) -> list[int]:
    return [item.load().getpixel((0, 0)) for item in corpus.items]


def test_a_sample_of_items_keeps_their_labels(classes):
    assert brightness(load_corpus(classes)) == list(range(40))
    assert brightness(load_corpus(classes, limit=15, seed=None)) == list(range(15))
    samples = [load_corpus(classes, limit=15, seed=seed) for seed in (3, 3, 4)]
    values = [brightness(sample) for sample in samples]
    assert values[0] == values[1] != values[2]
    assert values[0] == sorted(set(values[0])) != list(range(15))
    for sample, value in zip(samples, values, strict=True):
        assert list(sample.labels) == [i // 10 for i in value]
    assert brightness(load_corpus(classes, limit=100, seed=0)) == list(range(40))


def test_nothing_is_decoded_before_it_is_asked_for(classes, write, tmp_path, monkeypatch):
    write("calls/x.wav", recorded(TONE))
    monkeypatch.setattr(media, "decoded", None)
    assert len(load_corpus(classes, limit=5, seed=0).sha256) == 64
    assert len(load_corpus(str(tmp_path / "calls")).sha256) == 64


def test_the_hash_is_that_of_the_content(write, tmp_path):
    for kind, suffix, contents in (
        ("image", "png", [encoded(picture(i), "PNG") for i in range(3)]),
        ("audio", "wav", [recorded(TONE * i / 3) for i in range(3)]),
    ):
        hashes = []
        for folder, chosen in (("a", [0, 1]), ("b", [0, 1]), ("c", [1, 0]), ("d", [0, 2])):
            for i in chosen:
                write(f"{kind}-{folder}/{folder}{chosen.index(i)}.{suffix}", contents[i])
            hashes.append(load_corpus(str(tmp_path / f"{kind}-{folder}")).sha256)
        assert hashes[0] == hashes[1]
        assert len(set(hashes)) == 3


def test_identities_of_folders(classes, write):
    before = corpora.data_identity(classes)
    assert before.startswith("images of sha256:")
    os.utime(Path(classes) / "0" / "00.png", (0, 0))
    assert corpora.data_identity(classes) == before
    (Path(classes) / "0" / "00.png").rename(Path(classes) / "1" / "00.png")
    moved = corpora.data_identity(classes)
    write("photos/1/00.png", encoded(picture(0), "PNG"))
    assert len({before, moved, corpora.data_identity(classes)}) == 3
    assert corpora.data_identity(f"{classes}/1/00.png").startswith("images of sha256:")


def test_items_are_small_and_can_be_sent_away(write, tmp_path, monkeypatch):
    """A corpus of files travels as paths: nothing of a picture of three megabytes, or of an hour of
    sound.
    """
    write("photos/large.bmp", encoded(picture(0, 1000, 1000, 3), "BMP"))
    write("calls/long.wav", recorded(np.tile(TONE, 60)))
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "calls"):
        corpus = load_corpus(folder)
        loaded = corpus.items[0].load()
        sent = pickle.dumps(corpus.items)
        assert len(sent) < 500
        monkeypatch.chdir("/")
        (again,) = pickle.loads(sent)
        assert again == corpus.items[0]
        if folder == "photos":
            assert np.array_equal(again.load(), loaded)
        else:
            assert np.array_equal(again.load().samples, loaded.samples)
        monkeypatch.chdir(tmp_path)


def test_items_made_in_memory():
    """What a program has made itself is a corpus as well."""
    pixels, sounds = (
        [picture(0), picture(0, 4, 6)],
        [corpora.Sound(TONE, RATE), corpora.Sound(TONE, 8000)],
    )
    images = Corpus("mine", [corpora.ArrayImage(array) for array in pixels], kind="image")
    assert [item.load().mode for item in images.items] == ["RGB", "L"]
    assert all(
        np.array_equal(item.load(), array) for item, array in zip(images.items, pixels, strict=True)
    )
    assert Corpus("mine", sounds, kind="audio").items[0].load().samples is TONE
    hashes = {
        Corpus("mine", chosen, kind="audio").sha256 for chosen in (sounds, sounds[:1], sounds[1:])
    }
    reshaped = Corpus(
        "mine", [corpora.ArrayImage(array.reshape(-1, 2)) for array in pixels], kind="image"
    )
    assert len({*hashes, images.sha256, reshaped.sha256}) == 5


# --- Digits ---------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    train, test = load_corpus("digits:train"), load_corpus("digits:test")
    assert (len(train), len(test), train.kind, test.kind) == (897, 900, "image", "image")
    assert load_corpus("digits").sha256 == test.sha256 != train.sha256
    digits = load_digits()
    expected = Counter(
        ((pixels * 255 / 16 + 0.5).astype(np.uint8).tobytes(), int(label))
        for pixels, label in zip(digits.images, digits.target, strict=True)
    )
    found = Counter()
    for corpus in (train, test):
        images = [item.load() for item in corpus.items]
        assert all((image.mode, image.size) == ("L", (8, 8)) for image in images)
        found.update(
            (image.tobytes(), label) for image, label in zip(images, corpus.labels, strict=True)
        )
    # Every digit once, in one of the two.
    assert found == expected
    # As many of a class in either, but for one: 178 zeros give 89 and 89.
    sizes = [Counter(corpus.labels) for corpus in (train, test)]
    assert all(abs(sizes[0][label] - sizes[1][label]) <= 1 for label in range(10))


def test_digits_have_an_identity_and_travel():
    assert corpora.data_identity("digits").endswith(
        f"scikit-learn=={importlib.metadata.version('scikit-learn')}"
    )
    corpus = load_corpus("digits:train", limit=20, seed=1)
    sent = pickle.dumps(corpus)
    assert len(sent) < 20 * 400
    again = pickle.loads(sent)
    assert again.sha256 == corpus.sha256
    assert again.items[3].load().tobytes() == corpus.items[3].load().tobytes()


# --- Images and sounds of the hub, from a cache ---------------------------------------------------

IMAGENET = "49e2ee26f3810fb5a7536bbf732a7b07389a47b5"


def put_imagenet(cache, part: int) -> None:
    """Five images of brightness 5·part + 0..4, two to a group of rows."""
    values = range(5 * part, 5 * part + 5)
    stored = [
        {"bytes": encoded(np.full((4, 6), i, np.uint8), "PNG"), "path": f"{i}.JPEG"} for i in values
    ]
    columns = {"image": stored, "label": [i % 7 for i in values]}
    cache(
        "ILSVRC/imagenet-1k",
        IMAGENET,
        f"data/validation-{part:05d}-of-00014.parquet",
        columns,
        rows=2,
    )


def test_imagenet_from_the_cache(cache):
    for part in range(14):
        put_imagenet(cache, part)
    corpus = load_corpus("imagenet-1k")
    assert (corpus.kind, len(corpus)) == ("image", 70)
    assert brightness(corpus) == list(range(70))
    assert list(corpus.labels) == [i % 7 for i in range(70)]
    sample = load_corpus("imagenet-1k:validation", limit=9, seed=0)
    assert list(sample.labels) == [value % 7 for value in brightness(sample)]
    assert (
        len({corpus.sha256, sample.sha256, load_corpus("imagenet-1k", limit=9, seed=None).sha256})
        == 3
    )
    again = pickle.loads(pickle.dumps(sample.items))
    assert brightness(Corpus("again", again, kind="image")) == brightness(sample)
    assert IMAGENET in corpora.data_identity("imagenet-1k")


def test_the_first_images_need_the_first_file_only(cache):
    refused("imagenet-1k", "ILSVRC/imagenet-1k", "not in the local cache")
    put_imagenet(cache, 0)
    assert brightness(load_corpus("imagenet-1k", limit=4, seed=None)) == [0, 1, 2, 3]
    refused("imagenet-1k", "not in the local cache", limit=6, seed=None)
    refused("imagenet-1k", "not in the local cache", limit=4, seed=0)


def test_a_damaged_file_of_images(cache):
    cache(
        "ILSVRC/imagenet-1k",
        IMAGENET,
        "data/validation-00000-of-00014.parquet",
        b"PAR1 and no more",
    )
    refused(
        "imagenet-1k", "validation-00000-of-00014.parquet", "cannot be read", limit=1, seed=None
    )


def test_a_gated_corpus_says_so(cache, monkeypatch):
    def download(*_, **__):
        raise GatedRepoError("403\nCannot access gated repo", response=Mock())

    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    refused(
        "imagenet-1k", "ILSVRC/imagenet-1k is gated", "ask for access", "hf auth login", limit=1
    )


# --- Files of others ------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
@pytest.mark.parametrize(
    ("file", "column", "rows"),
    [
        ("stsb/stsb-en-dev.csv", "sentence1", 1500),
        ("yelphat/yelphat_part8.csv", "text", 181),
        ("esnli/esnli_test.csv", "sentence2", 9824),
    ],
)
def test_real_tables(file, column, rows):
    path = Path(SHARED / file)
    corpus = load_corpus(f"{path}:{column}")
    with path.open(encoding="utf-8", newline="") as opened:
        expected = [row[column] for row in csv.DictReader(opened)]
    assert len(expected) == rows
    assert list(corpus.texts) == [text for text in expected if text.strip()]
    assert len(corpus) + corpus.blank == rows


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
def test_real_lines():
    path = SHARED / "wikitext" / "wikitext_valid_raw.txt"
    corpus = load_corpus(str(path))
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 3760 == len(corpus) + corpus.blank
    assert list(corpus.texts) == [line for line in lines if line.strip()]


@pytest.mark.parametrize("column", ["text", "text:label"])
def test_a_row_with_more_cells_than_the_header_is_refused(tmp_path, column):
    """A comma without quotes would cut the text, and take its rest for the class."""
    path = tmp_path / "comma.csv"
    path.write_text("text,label\nhello there,a\nbye, now,b\n")
    with pytest.raises(
        AnalysisError, match="row 3 has 3 cells, and the header 2: put what has the separator"
    ):
        load_corpus(f"{path}:{column}")


# --- Quotation marks, units, tables at hand
# ---------------------------------------------------------

SAID = ['"No," he said.', '"so it goes', 'a "b" c', '"', "plain", '""quoted""']


@pytest.mark.parametrize("name", ["said.tsv", "said.csv", "said.tab.csv"])
def test_quotation_marks_between_tabs_are_part_of_the_text(write, name):
    path = write(
        name, "text\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(SAID))
    )
    corpus = load_corpus(f"{path}:text:label")
    assert list(corpus.items) == SAID
    assert list(corpus.labels) == [0, 1] * 3


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_cells_of_several_lines_are_counted_and_said(write, caplog, delimiter):
    """As a lone quotation mark makes them."""
    path = write(
        "table.csv",
        f'text{delimiter}label\n"one\ntwo"{delimiter}a\nthree{delimiter}b\n"four\nfive"{delimiter}c\n',
    )
    assert list(load_corpus(f"{path}:text").texts) == ["one\ntwo", "three", "four\nfive"]
    assert "2 of the rows" in caplog.text


def test_a_missing_number_is_no_text(write):
    path = write("table.jsonl", '{"text": "one"}\n{"text": NaN}\n{"text": null}\n{"text": "two"}\n')
    corpus = load_corpus(f"{path}:text")
    assert (list(corpus.texts), corpus.blank) == (["one", "two"], 2)
    table = pd.DataFrame({"text": ["one", None, "two"], "number": [1.0, float("nan"), 2.0]})
    table.to_parquet(path + ".parquet")
    assert list(load_corpus(f"{path}.parquet:text").texts) == ["one", "two"]
    assert list(load_corpus(f"{path}.parquet:number").texts) == ["1.0", "2.0"]


def test_half_a_character_is_one_line(write):
    path = write("table.jsonl", '{"text": "one"}\n{"text": "\\ud800 two"}\n')
    refused(f"{path}:text", "item 2 holds half of a character", "d800")
    for data in (["one", "\ud800"], (text for text in ["one", "\ud800"])):
        with pytest.raises(AnalysisError, match=r"item 2 holds half of a character .*d800"):
            load_corpus(data)


ROWS = [{"text": f"text {i}", "other": f"answer {i}", "unit": i // 2} for i in range(6)]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


class Polars:
    """As much of a frame of polars as its users rely on."""

    def to_pandas(self):
        return pd.DataFrame(COLUMNS)

    def iter_rows(self):
        raise NotImplementedError


class Lazy:
    def collect(self):
        return Polars()


class Rows:
    """A stream of ``datasets`` after ``map``, which no longer knows its columns."""

    column_names = None

    def __iter__(self):
        return iter(ROWS)


TABLES = {
    "pandas": pd.DataFrame(COLUMNS),
    "dictionary": COLUMNS,
    "arrow": pa.table(COLUMNS),
    "record batch": pa.record_batch(COLUMNS),
    "polars": Polars(),
    "lazy polars": Lazy(),
    "rows": ROWS,
    "stream of rows": Rows(),
    "reader of CSV": csv.DictReader(io.StringIO(pd.DataFrame(COLUMNS).to_csv(index=False))),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_at_hand(kind):
    data = TABLES[kind]
    if kind == "reader of CSV":
        data = csv.DictReader(io.StringIO(pd.DataFrame(COLUMNS).to_csv(index=False)))
    corpus = load_corpus(data, column="text", units="unit")
    assert list(corpus.texts) == COLUMNS["text"]
    assert list(corpus.units) == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != "reader of CSV"])
def test_a_table_at_hand_without_its_column_is_refused(kind):
    for column in (None, "txt"):
        with pytest.raises(AnalysisError, match=r"give column=, the texts of the .*text"):
            load_corpus(TABLES[kind], column=column)


@pytest.mark.parametrize("kind", ["pandas", "dictionary", "arrow", "rows"])
def test_two_columns_make_pairs(kind):
    corpus = load_corpus(TABLES[kind], column=["text", "other"])
    assert list(corpus.items) == [
        Pair(*pair) for pair in zip(COLUMNS["text"], COLUMNS["other"], strict=True)
    ]


def test_columns_of_one_name_are_refused():
    twice = pd.concat([TABLES["pandas"], TABLES["pandas"][["text"]]], axis=1)
    with pytest.raises(AnalysisError, match="text, is there several times"):
        load_corpus(twice, column="text")
    levels = pd.DataFrame({("a", "text"): ["one"], ("a", "other"): ["two"]})
    with pytest.raises(AnalysisError, match="give column="):
        load_corpus(levels, column="a")


def test_columns_of_what_has_none_are_refused(write):
    for data in (["one", "two"], (text for text in ["one", "two"])):
        with pytest.raises(AnalysisError, match="has no columns: leave column="):
            load_corpus(data, column="text")
    refused(
        write("lines.txt", "one\ntwo\n"), "column= is of a table that is at hand", column="text"
    )
    refused("wikipedia", "column= is of a table that is at hand", column="text")
    refused("wikipedia", "has its own units", units="text")


def test_units_from_a_column(write):
    path = write("table.csv", "text,patent,label\none,A,x\ntwo,A,y\n,B,x\nthree,B,y\n")
    corpus = load_corpus(f"{path}:text", units="patent")
    assert list(corpus.units) == ["A", "A", "B"]
    assert corpus.groups(20) == [0, 0, 1]
    labelled = write("labelled.csv", "text,patent,label\none,A,x\ntwo,A,y\nthree,B,y\n")
    corpus = load_corpus(f"{labelled}:text:label", units="patent")
    assert (list(corpus.units), list(corpus.labels)) == (["A", "A", "B"], [0, 1, 1])
    refused(f"{path}:text", "no column patents", "did you mean patent?", units="patents")
    refused(write("lines.txt", "one\n"), "is no column of a table", units="patent")


def test_texts_without_a_unit_are_units_of_their_own(write, caplog):
    rows = "one,A\ntwo,\nthree,A\nfour,\nfive,B\n"
    path = write("table.csv", f"text,doc\n{rows}")
    expected = [0, 1, 0, 2, 3]
    assert load_corpus(f"{path}:text", units="doc").groups(20) == expected
    assert "note: 2 of 5 texts of" in caplog.text
    assert "have no doc, and are units of their own" in caplog.text
    table = pd.read_csv(path)
    streamed = (row for row in table.to_dict("records"))
    for data in (table, pa.Table.from_pandas(table), table.to_dict("records"), streamed):
        corpus = load_corpus(data, column="text", units="doc")
        assert corpus.groups(20) == expected
        assert corpus.unit_column == "doc"
    assert corpus.take([1, 3]).groups(20) == [0, 1]
    gaps = write("gaps.csv", "text,doc,label\n" + "".join(f"{row},x\n" for row in rows.split()))
    assert load_corpus(f"{gaps}:text:label", units="doc").groups(20) == expected
    refused(
        write("none.csv", "text,doc\none,\ntwo, \n") + ":text",
        "the column doc is empty",
        units="doc",
    )
    with pytest.raises(AnalysisError, match="units= is of a table"):
        load_corpus(corpus, units="doc")


def test_a_column_may_be_known_by_a_number():
    table = pd.DataFrame({0: ["a", "b"], 1: ["u", "v"]})
    assert load_corpus(table, column=0).items == ["a", "b"]
    assert load_corpus(table, column=[0, 1]).items == [Pair("a", "u"), Pair("b", "v")]
    assert load_corpus(table, column=0, units=1).units == ["u", "v"]


def test_a_corpus_is_of_one_kind_and_whole():
    for items, said in (
        (["one", Pair("a", "b")], "item 2 is a Pair"),
        ([Pair("a", "b"), "one"], "item 2 is a str"),
    ):
        with pytest.raises(AnalysisError, match=said):
            Corpus("mixed", items)
    with pytest.raises(AnalysisError, match="2 items and 1 labels"):
        Corpus("short", ["a", "b"], labels=[0], classes=["x"])
    corpus = Corpus("arrays", ["a", "b", "c"], labels=np.array([0, 1, 1]), classes=["x", "y"])
    assert corpus.groups(3) == Corpus(
        "list", ["a", "b", "c"], labels=[0, 1, 1], classes=["x", "y"]
    ).groups(3)
    assert corpus.take([0, 2]).labels == [0, 1]


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4)),
        np.zeros((0, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros(4, np.uint8),
    ],
)
def test_an_image_at_hand_has_bytes_and_a_shape(pixels):
    with pytest.raises(AnalysisError, match="give uint8, of height x width"):
        media.ArrayImage(pixels)


@pytest.mark.parametrize(
    "samples", [np.zeros(9, np.int16), np.zeros((9, 2), np.float32), np.zeros(0, np.float32)]
)
def test_a_sound_at_hand_has_samples_of_one_channel(samples):
    with pytest.raises(AnalysisError, match="give those of one channel, float32"):
        media.Sound(samples, 16000)


def test_a_sound_at_hand_has_a_rate_and_a_scale():
    for rate in (0, -1, 44.1):
        with pytest.raises(AnalysisError, match=r"samples per second, is .*: give a whole number"):
            media.Sound(np.zeros(9, np.float32), rate)
    with pytest.raises(AnalysisError, match="scale them to lie between -1 and 1"):
        media.Sound(np.full(9, 100, np.float32), 16000)


# --- Whatever the libraries read
# --------------------------------------------------------------------

SOUND_FORMATS = {
    "aiff": "AIFF",
    "aif": "AIFF",
    "au": "AU",
    "caf": "CAF",
    "w64": "W64",
    "opus": "OGG",
    "oga": "OGG",
}
SOUND_FORMATS |= {
    "wav": "WAV",
    "flac": "FLAC",
    "mp3": "MP3",
    "rf64": "RF64",
    "voc": "VOC",
    "nist": "NIST",
}
IMAGE_FORMATS = {
    "jfif": "JPEG",
    "jpe": "JPEG",
    "png": "PNG",
    "avif": "AVIF",
    "jp2": "JPEG2000",
    "ppm": "PPM",
    "tga": "TGA",
}
IMAGE_FORMATS |= {"webp": "WEBP", "gif": "GIF", "tif": "TIFF", "bmp": "BMP", "ico": "ICO"}


def test_every_sound_that_libsndfile_reads_is_one(tmp_path):
    tone = np.sin(np.arange(4800) / 20).astype(np.float32) / 2
    for ending, form in SOUND_FORMATS.items():
        subtype = "OPUS" if ending == "opus" else None
        soundfile.write(tmp_path / f"tone.{ending}", tone, 48000, format=form, subtype=subtype)
    corpus = load_corpus(str(tmp_path))
    assert len(corpus) == len(SOUND_FORMATS)
    for item in corpus.items:
        # Lossy formats begin a little late, and each in its own way.
        assert np.abs(item.load().samples).max() == pytest.approx(0.5, abs=0.1)


def test_every_image_that_pillow_reads_is_one(tmp_path):
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    for i, (ending, form) in enumerate(IMAGE_FORMATS.items()):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        picture.save(tmp_path / "ab"[i % 2] / f"picture.{ending}", form)
    corpus = load_corpus(str(tmp_path))
    assert len(corpus) == len(IMAGE_FORMATS)
    assert {item.load().size for item in corpus.items} == {(32, 32)}
    assert Counter(corpus.labels) == {0: 6, 1: 6}


def test_other_files_of_a_folder_are_counted_and_named(write, tmp_path, caplog):
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    for name in ("b.heic", "c.heic", "notes.txt", "README"):
        write(name, "x")
    assert len(load_corpus(str(tmp_path))) == 1
    assert (
        "where 1 images are read, are other files: 2 of .heic, 1 of no ending, 1 of .txt"
        in caplog.text
    )


class Dataset:
    """As much of a dataset of ``datasets`` as its users rely on: its other columns are costly to
    decode.
    """

    def __init__(self, chosen=None):
        self.chosen = chosen
        self.column_names = [*ROWS[0], "image"]

    def select_columns(self, columns):
        return Dataset(columns)

    def __iter__(self):
        assert self.chosen is not None
        for row in ROWS:
            yield {name: row[name] for name in self.chosen}


def test_the_other_columns_of_a_dataset_are_not_decoded():
    corpus = load_corpus(Dataset(), column="text", units="unit")
    assert list(corpus.texts) == COLUMNS["text"]
    assert list(corpus.units) == ["0", "0", "1", "1", "2", "2"]


def test_a_table_may_have_another_ending(write):
    assert load_corpus(write("table.txt", "text,label\none,1\n") + ":text").items == ["one"]


def test_the_first_texts_are_taken_and_no_more_is_read(write):
    """From a file as from a stream: blank lines behind them are not counted."""
    path = write("lines.txt", "\none\ntwo\n\n\nthree\n")
    corpus = load_corpus(path, limit=2, seed=None)
    assert (corpus.items, corpus.blank) == (["one", "two"], 1)
    labelled = write("labelled.csv", "text,label\none,b\ntwo,a\nthree,c\n")
    corpus = load_corpus(f"{labelled}:text:label", limit=2, seed=None)
    # Classes are those of the whole corpus.
    assert (corpus.labels, corpus.classes) == ([1, 0], ["a", "b", "c"])
