"""Notes on how texts were read: each is passed once for every model that it is about."""

import logging

import pytest
import tiny

import analysis_book
from analysis_lib import measure
from analysis_lib.measurement import description
from analysis_lib.progress import Once


@pytest.fixture
def said() -> list[str]:
    """What reaches a reader of the library's log."""
    messages: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    reader, logger = Reader(), logging.getLogger("analysis_lib")
    reader.addFilter(Once())
    logger.addHandler(reader)
    yield messages
    logger.removeHandler(reader)


def test_what_the_book_says_is_heard_there_too(said):
    logging.getLogger(f"{analysis_book.__name__}.training.runs").warning("note: one run")
    assert said == ["note: one run"]


def test_each_of_two_models_is_named(said, tmp_path):
    texts = ["注意 鍵 問 生 girl", "鍵 問 cone 注意"] * 2
    for name in ("base", "tuned"):
        for part in tiny.build("bert"):
            part.save_pretrained(tmp_path / name)
    for name in ("base", "tuned", "base"):
        measure(tmp_path / name, texts, "anisotropy", progress=False)
    unknown = [message for message in said if ": its tokenizer does not know" in message]
    assert [message.partition(":")[2].split(":")[0].strip() for message in unknown] == [
        "base",
        "tuned",
    ]


@pytest.mark.parametrize(
    "alike",
    [
        ["run/checkpoint-10", "run/checkpoint-200"],
        ["run/seed_0-step_5", "run/seed_1-step_20"],
        ["multiberts-seed_0-step_20k", "multiberts-seed_1-step_40k"],
        ["base", "base:untrained", "base:untrained@seed=3"],
    ],
)
def test_a_run_and_a_model_with_its_twins_are_named_once(alike, said):
    for name in alike:
        description.say(name, ["2 of 4 texts are cut"])
    assert len(said) == 1


@pytest.mark.parametrize(
    "others", [["a/model", "b/model"], ["bert-4", "bert-12"], ["a/checkpoint-1", "b/checkpoint-1"]]
)
def test_models_of_like_names_are_not_one(others, said):
    for name in others:
        description.say(name, ["2 of 4 texts are cut"])
    assert len(said) == 2


def test_other_notes_are_told_apart_by_all_of_their_words(said):
    for file in ("a.csv", "b.csv", "a.csv"):
        logging.getLogger("analysis_lib.corpora").warning(
            "note: the columns of %s are separated by %r", file, ";"
        )
    assert said == [
        f"note: the columns of {file} are separated by ';'" for file in ("a.csv", "b.csv")
    ]
