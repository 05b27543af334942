"""Corpora by name and by file, and what is said of those that cannot be read."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from conftest import SHARED
from huggingface_hub import constants

from analysis_lib import AnalysisError, corpora, hub, load_corpus

TEXTS = ["The first line.", "A second one, with a comma", "Ünïcödé – “quoted”", "last"]


@pytest.fixture
def write(tmp_path):
    """A function that writes bytes or text to a file and gives its path as a string."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
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
    """Not at a form feed, a vertical tab or a Unicode separator, where ``str.splitlines`` would cut."""
    text = "one\ftwo\vthree\x1cfour\u2028five\x85six"
    assert list(load_corpus(write("lines.txt", f"{text}\nnext\n")).texts) == [text, "next"]


def test_blank_lines_are_left_out_and_counted(write):
    corpus = load_corpus(write("lines.txt", "\n".join(["", *TEXTS, "  ", "\t", "", "more"])))
    assert list(corpus.texts) == [*TEXTS, "more"]
    assert corpus.blank == 4
    assert len(corpus) == 5


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


AWKWARD = [*TEXTS, 'She said "no", twice', "two\nlines", "three\r\nlines\n\nof it", " spaces kept ", "tab\tinside"]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
def test_a_column_of_a_table(write, mark):
    assert list(load_corpus(write("table.csv", mark + table(AWKWARD)) + ":text").texts) == AWKWARD
    assert list(load_corpus(write("table.tsv", mark + table(AWKWARD, "\t")) + ":text").texts) == AWKWARD


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
        ("zzz", "known names: news, plots, reviews, stsb, wikipedia, wikitext-103"),
        ("", "name"),
        ("news:artikles", "did you mean articles?"),
        ("reviews:xyz", "known names: fresh, lines, rotten"),
    ],
)
def test_unknown_names_get_the_nearest(spec, near):
    refused(spec, near)


# --- Limit and seed -------------------------------------------------------------------------------


def test_limit_without_seed_keeps_the_first():
    whole = load_corpus("news")
    assert list(load_corpus("news", limit=7).texts) == list(whole.texts[:7])
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
    counts = Counter(text for seed in range(300) for text in load_corpus(path, limit=3, seed=seed).texts)
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


def test_fingerprints_change_with_the_file(write):
    path = write("a.txt", "one\n")
    before = corpora.fingerprint(path)
    assert before == corpora.fingerprint(path)
    write("a.txt", "two\n")
    assert corpora.fingerprint(path) != before
    assert corpora.fingerprint("news") != corpora.fingerprint("wikipedia")
    assert "sha256" in corpora.fingerprint("news")
    with pytest.raises(AnalysisError, match="did you mean news"):
        corpora.fingerprint("newss")


# --- Bundled corpora ------------------------------------------------------------------------------


def test_bundled_corpora_have_their_sizes():
    sizes = {
        name: len(load_corpus(name))
        for name in ("wikipedia", "wikipedia:paragraphs", "news:articles", "reviews", "reviews:fresh", "reviews:rotten")
    }
    assert sizes["wikipedia"] > 18_000
    assert sizes["wikipedia:paragraphs"] > 5_000
    assert sizes["news:articles"] == 300
    assert sizes["reviews"] == sizes["reviews:fresh"] + sizes["reviews:rotten"] > 12_500
    assert len(load_corpus("plots")) > 1_000
    assert len(load_corpus("news")) > 2_000


def test_review_labels_are_those_of_the_reviews():
    fresh, rotten = (Counter(load_corpus(f"reviews:{label}").texts) for label in ("fresh", "rotten"))
    assert fresh + rotten == Counter(load_corpus("reviews").texts)
    words = {label: " ".join(lines).lower() for label, lines in (("fresh", fresh), ("rotten", rotten))}
    for good, bad in (("enjoyable", "dull"), ("masterpiece", "mess"), ("delightful", "bore")):
        assert words["fresh"].count(good) > words["rotten"].count(good)
        assert words["rotten"].count(bad) > words["fresh"].count(bad)


@pytest.mark.parametrize(
    "markup", ["[[", "]]", "{{", "}}", "<ref", "</ref", "{|", "|}", "<!--", "&nbsp;", "==", "<br", "|-"]
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
    assert {name.partition(":")[0] for name in corpora.known_corpora()} == set(corpora.CORPORA)
    for name, source in corpora.CORPORA.items():
        if name not in ("stsb", "wikitext-103"):
            assert all(len(load_corpus(f"{name}:{split}")) for split in source.splits)


# --- Corpora of the hub, from a cache -------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that lays a Parquet file into an offline hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_reachable", lambda: False)

    def put(repository: str, commit: str, file: str, columns: dict[str, list]) -> None:
        home = tmp_path / "hub" / f"datasets--{repository.replace('/', '--')}"
        path = home / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(commit)
        pd.DataFrame(columns).to_parquet(path)

    return put


GLUE = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
WIKITEXT = "b08601e04326c79dfdd32d625aee71d232d685c3"


def test_stsb_from_the_cache(cache):
    columns = {"sentence1": ["One.", "Two."], "sentence2": ["Three.", "Four."], "label": [1.0, 2.0]}
    cache("nyu-mll/glue", GLUE, "stsb/validation-00000-of-00001.parquet", columns)
    assert list(load_corpus("stsb").texts) == list(load_corpus("stsb:dev").texts) == ["One.", "Two."]
    refused("stsb:test", "nyu-mll/glue", "not in the local cache")


def test_wikitext_from_the_cache_in_parts(cache):
    for part, texts in enumerate((["", " = Title = \n", " A paragraph . \n"], ["", " Another . \n"])):
        cache(
            "Salesforce/wikitext", WIKITEXT, f"wikitext-103-raw-v1/train-{part:05d}-of-00002.parquet", {"text": texts}
        )
    corpus = load_corpus("wikitext-103:train")
    assert [text.strip() for text in corpus.texts] == ["= Title =", "A paragraph .", "Another ."]
    assert corpus.blank == 2


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
