"""Folders of HateXplain, YelpHat and e-SNLI: their splits, and what is said of those that are not
whole.
"""

import itertools
import os
from collections import Counter

import pytest
from conftest import SHARED

from analysis_lib import AnalysisError, corpora, load_corpus
from analysis_lib.corpora import SPLITS, Pair
from analysis_lib.corpora.folders import join_words

YELP_PARTS = (1, 6, 7, 8)


@pytest.fixture
def lay_out(tmp_path):
    """A function that writes CSV files, by name, into a folder of a name, and gives the folder as a
    string.
    """

    def lay_out(name: str, files: dict[str, str]) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
        return str(folder)

    return lay_out


@pytest.fixture
def hatexplain(lay_out):
    rows = {
        "train": "fine,normal\nrude,offensive\n",
        "val": "mild,normal\n",
        "test": "plain,normal\n",
    }
    files = {
        f"hatexplain_{name}.csv": f"split,text,label\n{name},{row}" for name, row in rows.items()
    }
    files["hatexplain_train.csv"] = "split,text,label\ntrain,fine,normal\ntrain,rude,offensive\n"
    return lay_out("hatexplain", files)


@pytest.fixture
def esnli(lay_out):
    names = ("snli_train_subset", "esnli_dev", "esnli_test")
    row = '"A man , he says .",He does n\'t .,neutral\n'
    return lay_out("esnli", {f"{name}.csv": f"sentence1,sentence2,label\n{row}" for name in names})


@pytest.fixture
def yelphat(lay_out):
    """Forty reviews in four files, of which twelve are good."""
    files = {}
    for at, number in enumerate(YELP_PARTS):
        rows = [
            f'r{i},"meal {i},\nand more",{int(i % 10 < 3)}' for i in range(10 * at, 10 * at + 10)
        ]
        files[f"yelphat_part{number}.csv"] = "\n".join(["review_id,text,label", *rows]) + "\n"
    return lay_out("yelphat", files)


def refused(spec: str, *words: str) -> None:
    """``load_corpus`` refuses ``spec`` in one line that holds ``words``."""
    with pytest.raises(AnalysisError) as caught:
        load_corpus(spec)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- Splits ---------------------------------------------------------------------------------------


def test_hatexplain_is_read_as_it_is(hatexplain):
    train = load_corpus(f"{hatexplain}:train")
    assert (train.items, train.labels, train.classes) == (
        ["fine", "rude"],
        [0, 1],
        ["normal", "offensive"],
    )
    assert (
        load_corpus(hatexplain).sha256 == load_corpus(f"{hatexplain}/:train").sha256 == train.sha256
    )
    assert load_corpus(f"{hatexplain}:validation").items == ["mild"]
    assert load_corpus(f"{hatexplain}:test").items == ["plain"]


def test_a_folder_is_found_from_where_one_is(hatexplain, monkeypatch):
    monkeypatch.chdir(os.path.dirname(hatexplain))
    assert load_corpus("./hatexplain:test").items == ["plain"]


def test_word_level_pairs_of_e_snli_are_joined(esnli):
    assert load_corpus(f"{esnli}:train").items == [Pair("A man , he says .", "He does n't .")]
    for split in ("validation", "test"):
        assert load_corpus(f"{esnli}:{split}").items == [Pair("A man, he says.", "He doesn't.")]


@pytest.mark.parametrize(
    ("apart", "joined"),
    [
        ("Wait ! Is it 5 % ( or more ) ?", "Wait! Is it 5% (or more)?"),
        ("They 've gone , we 'll see ; it 's $ 5 .", "They've gone, we'll see; it's $5."),
        ("As written, it stays (even so).", "As written, it stays (even so)."),
        ("`` Yes , '' he says .", '"Yes," he says.'),
    ],
)
def test_words_are_joined_as_they_are_written(apart, joined):
    assert join_words(apart) == joined
    assert join_words(joined) == joined


def test_yelphat_is_divided_with_the_balance_of_its_classes(yelphat):
    splits = {split: load_corpus(f"{yelphat}:{split}") for split in SPLITS}
    # Of 28 bad and 12 good reviews a quarter is for the test and 15 % for validation.
    assert {split: Counter(corpus.labels) for split, corpus in splits.items()} == {
        "train": {0: 17, 1: 7},
        "validation": {0: 4, 1: 2},
        "test": {0: 7, 1: 3},
    }
    numbers = {
        split: [int(text.split(",")[0].removeprefix("meal ")) for text in corpus.texts]
        for split, corpus in splits.items()
    }
    assert sorted(itertools.chain(*numbers.values())) == list(range(40))
    for split, corpus in splits.items():
        assert numbers[split] == sorted(numbers[split])
        assert list(corpus.labels) == [int(number % 10 < 3) for number in numbers[split]]
        assert load_corpus(f"{yelphat}:{split}").sha256 == corpus.sha256


# --- Identities -----------------------------------------------------------------------------------


def test_identities_change_with_the_files_of_the_folder(hatexplain, yelphat, tmp_path):
    specs = [f"{folder}:{split}" for folder in (hatexplain, yelphat) for split in SPLITS]
    before = {spec: corpora.data_identity(spec) for spec in specs}
    assert len(set(before.values())) == len(specs)
    assert {spec: corpora.data_identity(spec) for spec in specs} == before
    # Where the folder alone is named, all of its splits may be read.
    assert corpora.data_identity(hatexplain) == before[f"{hatexplain}:train"]
    (tmp_path / "hatexplain" / "hatexplain_val.csv").write_text("text,label\nother,normal\n")
    changed = [spec for spec in specs if corpora.data_identity(spec) != before[spec]]
    assert changed == [f"{hatexplain}:{split}" for split in SPLITS]
    (tmp_path / "yelphat" / "yelphat_part8.csv").write_text("text,label\nother,1\n")
    assert all(corpora.data_identity(spec) != before[spec] for spec in specs)


def test_a_split_needs_its_own_files_only(hatexplain, tmp_path):
    (tmp_path / "hatexplain" / "hatexplain_val.csv").unlink()
    assert load_corpus(f"{hatexplain}:train").items == ["fine", "rude"]
    corpora.data_identity(f"{hatexplain}:train")
    refused(f"{hatexplain}:validation", "there is no", "hatexplain_val.csv", "data/README.md")
    with pytest.raises(AnalysisError, match=r"there is no .*hatexplain_val\.csv"):
        corpora.data_identity(f"{hatexplain}:validation")


# --- Folders that are not as they should be -------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("sentence,label\nfine,normal\n", "has no column text"),
        ("text,class\nfine,normal\n", "has no column label"),
        ("text,label\nfine,normal\nrude,\n", "hatexplain_test.csv: example 2 has no class"),
        ("text,label\nfine,normal\n ,normal\n", "hatexplain_test.csv: example 2 has no text"),
        ("text,label\n", "no utterance"),
        ("", "is empty"),
    ],
)
def test_files_with_gaps(lay_out, rows, words):
    folder = lay_out("hatexplain", {"hatexplain_test.csv": rows})
    refused(f"{folder}:test", words)


def test_half_a_pair(lay_out):
    content = "sentence1,sentence2,label\nA man .,He .,neutral\nA dog .,,neutral\n"
    folder = lay_out("esnli", {"esnli_dev.csv": content})
    refused(f"{folder}:validation", "esnli_dev.csv: one side of pair 2 is empty")
    refused(f"{folder}:test", "there is no", "esnli_test.csv")


def test_a_gap_is_found_whatever_the_split(yelphat, tmp_path):
    with (tmp_path / "yelphat" / "yelphat_part6.csv").open("a") as file:
        file.write("r,a meal,\n")
    for split in SPLITS:
        refused(f"{yelphat}:{split}", "yelphat_part6.csv: example 11 has no class")


def test_splits_and_folders_that_are_not_there(hatexplain, tmp_path):
    refused(f"{hatexplain}:val", "has no split val", "validation")
    refused(f"{tmp_path}/elsewhere/hatexplain:train", "there is no file")
    refused("a" * 300 + "/hatexplain:train", "there is no file")


# --- The data beside the project ------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
@pytest.mark.parametrize(
    ("spec", "classes", "counts"),
    [
        ("hatexplain:train", "hatespeech normal offensive", (4748, 6251, 4384)),
        ("hatexplain:validation", "hatespeech normal offensive", (593, 781, 548)),
        ("hatexplain:test", "hatespeech normal offensive", (594, 782, 548)),
        ("yelphat:train", "0 1", (458, 470)),
        ("yelphat:validation", "0 1", (114, 117)),
        ("yelphat:test", "0 1", (190, 196)),
        ("esnli:train", "contradiction entailment neutral", (6086, 6015, 5899)),
        ("esnli:validation", "contradiction entailment neutral", (3278, 3329, 3235)),
        ("esnli:test", "contradiction entailment neutral", (3237, 3368, 3219)),
    ],
)
def test_real_folders(spec, classes, counts):
    corpus = load_corpus(str(SHARED / spec))
    assert corpus.classes == classes.split()
    assert tuple(Counter(corpus.labels)[label] for label in range(len(counts))) == counts


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
def test_the_splits_of_the_real_reviews_are_apart_and_whole():
    splits = [set(load_corpus(f"{SHARED / 'yelphat'}:{split}").texts) for split in SPLITS]
    parts = [
        load_corpus(f"{SHARED / 'yelphat' / f'yelphat_part{number}.csv'}:text")
        for number in YELP_PARTS
    ]
    assert sum(map(len, splits)) == len(set().union(*splits)) == 1545
    assert set().union(*splits) == {text for part in parts for text in part.texts}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data beside the project is not there")
def test_real_pairs_are_joined_and_nothing_is_lost():
    for split, file in (("validation", "esnli_dev.csv"), ("test", "esnli_test.csv")):
        joined = load_corpus(f"{SHARED / 'esnli'}:{split}").items
        apart = load_corpus(f"{SHARED / 'esnli' / file}:sentence1,sentence2:label").items
        assert not any(side.endswith((" .", " ?", " !")) for pair in joined for side in pair)

        def letters(text: str) -> str:
            return text.replace("``", '"').replace("''", '"').replace(" ", "")

        assert [tuple(map(letters, pair)) for pair in joined] == [
            tuple(map(letters, pair)) for pair in apart
        ]
