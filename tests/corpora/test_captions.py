"""Images and sounds with texts, from folders, tables and rows in memory."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import soundfile
from PIL import Image

from analysis_lib import AnalysisError, load_corpus
from analysis_lib.corpora import Captioned, Sound

TEXTS = ["a cat", "two, dogs", "an owl"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (8 + index, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    rows = [f'{index}.png,"{text}",{text[:2]}' for index, text in enumerate(TEXTS)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text,kind", *rows]))
    return folder


def texts_and_sizes(corpus) -> list[tuple[str, tuple[int, int]]]:
    return [(item.text, item.media[0].load().size) for item in corpus.items]


def test_a_folder_with_its_table_holds_images_with_texts(photos):
    corpus = load_corpus(f"{photos}:text")
    assert corpus.kind == "image+text"
    assert texts_and_sizes(corpus) == [(text, (9, 8 + i)) for i, text in enumerate(TEXTS)]
    assert repr(corpus).endswith("3 images with texts>")
    # Without a column, it is a folder of images as before.
    assert load_corpus(photos).kind == "image"


def test_every_form_of_a_table_holds_the_same_pairs(photos):
    rows = [{"file_name": f"{i}.png", "text": text} for i, text in enumerate(TEXTS)]
    lines = photos / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    known = load_corpus(f"{photos}:text")
    of_table = load_corpus(f"{photos}/metadata.csv:file_name,text")
    of_lines = load_corpus(f"{lines}:file_name,text")
    in_memory = [{"image": str(photos / row["file_name"]), "text": row["text"]} for row in rows]
    frame = pd.DataFrame(in_memory).rename(columns={"text": "caption"})
    of_frame = load_corpus(frame, column=("image", "caption"))
    of_rows = load_corpus(in_memory)
    for corpus in (of_table, of_lines, of_rows, of_frame):
        assert corpus.kind == "image+text"
        assert corpus.sha256 == known.sha256
        assert len(load_corpus(corpus, limit=2)) == 2


def test_pairs_have_classes_and_units(photos):
    corpus = load_corpus(f"{photos}:text:kind", units="kind")
    assert corpus.classes == ["a ", "an", "tw"]
    assert corpus.labels == [0, 2, 1]
    assert corpus.units == ["a ", "tw", "an"]


def test_images_and_sounds_in_memory_are_read_as_they_are(tmp_path):
    image = Image.new("RGBA", (5, 4), (10, 20, 30, 255))
    grey = np.full((4, 6), 7, np.uint8)
    corpus = load_corpus([{"image": image, "text": "one"}, {"image": grey, "text": "two"}])
    first, second = (np.asarray(item.media[0].load()) for item in corpus.items)
    assert first.shape == (4, 5, 3)
    assert first[0, 0].tolist() == [10, 20, 30]
    assert np.array_equal(second, grey)
    samples = np.sin(np.arange(800) / 9).astype(np.float32)
    path = tmp_path / "tone.flac"
    soundfile.write(path, samples, 16000)
    cells = (Sound(samples, 16000), (samples, 16000), {"array": samples, "sampling_rate": 16000})
    for cell in (*cells, path):
        [item] = load_corpus([{"audio": cell, "text": "a tone"}]).items
        assert isinstance(item, Captioned)
        assert item.media[0].load().rate == 16000
        np.testing.assert_allclose(item.media[0].load().samples, samples, atol=1e-4)


def test_the_hash_of_pairs_has_file_and_text(photos):
    first = load_corpus(f"{photos}:text").sha256
    table = photos / "metadata.csv"
    table.write_text(table.read_text().replace("a cat", "a dog"))
    assert load_corpus(f"{photos}:text").sha256 != first
    assert load_corpus(f"{photos}:text").sha256 != load_corpus(photos).sha256


def test_two_texts_remain_a_pair_of_texts(tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text("a,b\nsee 3.5 of it,x\nreadme.txt,y\n")
    assert load_corpus(f"{table}:a,b").kind == "text"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0.png,", ["row 2 has no text"]),
        ('0.png," "', ["row 2 has no text"]),
        (",a text", ["row 2 names no image"]),
        ("9.png,a text", ["row 2 names 9.png", "not there"]),
    ],
)
def test_a_bad_row_is_one_line(photos, row, words):
    (photos / "metadata.csv").write_text(f"file_name,text\n0.png,one\n{row}\n")
    with pytest.raises(AnalysisError) as raised:
        load_corpus(f"{photos}:text")
    assert "\n" not in str(raised.value)
    assert "metadata.csv" in str(raised.value)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"image": "9.png", "text": "x"}], "item 1 names 9.png, which is not there"),
        ([{"image": np.zeros((2, 2), np.uint8), "text": None}], "item 1 has None for a text"),
        (
            [{"image": np.zeros((2, 2), np.uint8), "text": "x"}, {"image": None, "text": "y"}],
            "item 2 is None where an image is wanted",
        ),
        ([{"image": np.zeros((2, 2)), "text": "x"}], "uint8"),
    ],
)
def test_a_bad_item_is_one_line(rows, words):
    with pytest.raises(AnalysisError) as raised:
        load_corpus(rows)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_table_of_its_files_says_what_it_lacks(photos):
    table = photos / "metadata.csv"
    with pytest.raises(AnalysisError, match="no column words"):
        load_corpus(f"{photos}:words")
    with pytest.raises(AnalysisError, match="not divided"):
        load_corpus(f"{photos}:text:kind:test")
    table.write_text("picture,text\n0.png,one\n")
    with pytest.raises(AnalysisError, match="no column of file names"):
        load_corpus(f"{photos}:text")
    table.unlink()
    with pytest.raises(AnalysisError, match="is a folder, and its tables are none"):
        load_corpus(f"{photos}:text")


# --- Several images with a text -------------------------------------------------------------------


def sizes(corpus) -> list[list[tuple[int, int]]]:
    return [[image.size for image in item.load()] for item in corpus.items]


def test_every_form_of_several_images_is_the_same(photos):
    rows = [
        {"file_names": ["0.png", "1.png"], "text": "two"},
        {"file_names": ["2.png"], "text": "one"},
    ]
    (photos / "metadata.csv").unlink()
    lines = photos / "metadata.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    known = load_corpus(f"{photos}:text")
    assert sizes(known) == [[(9, 8), (9, 9)], [(9, 10)]]
    pd.DataFrame(rows).to_parquet(photos / "rows.parquet")
    of_parquet = load_corpus(f"{photos}/rows.parquet:file_names,text")
    paths = [{"images": [str(photos / name) for name in row["file_names"]]} for row in rows]
    in_memory = [given | {"text": row["text"]} for given, row in zip(paths, rows, strict=True)]
    for corpus in (of_parquet, load_corpus(in_memory)):
        assert corpus.sha256 == known.sha256
    # One image in a list is that image.
    alone = load_corpus([{"image": str(photos / "2.png"), "text": "one"}])
    assert alone.sha256 == load_corpus(in_memory[1:]).sha256


def test_the_order_of_images_counts(photos):
    paths = [str(photos / f"{index}.png") for index in range(2)]
    first, second = (
        load_corpus([{"images": each, "text": "two"}]) for each in (paths, paths[::-1])
    )
    assert first.sha256 != second.sha256


@pytest.mark.parametrize(
    ("cell", "words"),
    [([], "has no image"), (["0.png", "missing.png"], "which is not there")],
)
def test_a_list_without_its_images_is_one_line(photos, cell, words, monkeypatch):
    monkeypatch.chdir(photos)
    rows = [{"images": ["0.png"], "text": "one"}, {"images": cell, "text": "two"}]
    with pytest.raises(AnalysisError, match=words) as raised:
        load_corpus(rows)
    assert "\n" not in str(raised.value)


def test_several_sounds_with_a_text_are_one_line():
    sound = Sound(np.zeros(800, np.float32), 16000)
    with pytest.raises(AnalysisError, match="has 2 sounds: give one"):
        load_corpus([{"audio": [sound, sound], "text": "two"}])


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        (["1", "2.png"], "row 2 names 1, which is not there"),
        (["1.png", "2"], "row 3 names 2, which is not there"),
    ],
)
def test_a_row_that_names_no_picture_is_a_fault_of_its_table(photos, others, fault):
    table = photos / "pairs.csv"
    table.write_text("\n".join(["image,text", "0.png,a", *(f"{name},b" for name in others)]))
    with pytest.raises(AnalysisError, match=fault):
        load_corpus(f"{table}:image,text").items  # noqa: B018


def test_a_column_of_pictures_holds_them_whatever_their_endings(photos):
    table = photos / "pairs.csv"
    table.write_text("image,text\none.svg,a\ntwo.svg,b\n")
    with pytest.raises(AnalysisError, match=r"names one\.svg, which is not there"):
        load_corpus(f"{table}:image,text").items  # noqa: B018
    table.write_text("title,text\nReadme.svg,a\nthe first. and second,b\n")
    assert load_corpus(f"{table}:title,text").kind == "text"
