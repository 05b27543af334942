"""What classifiers are trained, stopped and tested on, where a test set was published."""

from pathlib import Path

import pytest

from analysis_book.papers.fosse.splits import splits
from analysis_lib import AnalysisError, load_corpus


@pytest.fixture
def reviews(tmp_path) -> str:
    return table(
        tmp_path / "reviews.csv",
        {f"{label} {i}": label for i in range(40) for label in ("good", "bad")},
    )


def table(path: Path, rows: dict[str, str]) -> str:
    path.write_text(
        "\n".join(["text,label", *(f"{text},{label}" for text, label in rows.items())]) + "\n"
    )
    return f"{path}:text:label"


def test_with_a_published_test_set_all_else_is_trained_on(reviews, tmp_path):
    published = table(
        tmp_path / "test.csv", {"good 3": "good", "bad 7": "bad", "bad elsewhere": "bad"}
    )
    train, validation, test = splits(reviews, test=published)
    assert sorted(test.items) == ["bad 7", "bad elsewhere", "good 3"]
    assert sorted(validation.items) == sorted(load_corpus(f"{reviews}:validation").items)
    rest = {*load_corpus(reviews).items} - {*validation.items, *test.items}
    assert sorted(train.items) == sorted(rest)
    # Also those of the split that would be tested on without one.
    assert rest & {*load_corpus(f"{reviews}:test").items}
    for corpus in (train, validation, test):
        assert all(
            text.startswith(corpus.classes[label])
            for text, label in zip(corpus.items, corpus.labels, strict=True)
        )


def test_limits_hold_with_a_published_test_set_too(reviews, tmp_path):
    published = table(
        tmp_path / "test.csv",
        {f"{label} {i}": label for i in range(9) for label in ("good", "bad")},
    )
    train, validation, test = splits(reviews, limit=8, test_limit=6, test=published)
    assert [len(corpus) for corpus in (train, validation, test)] == [8, 2, 6]
    assert not {*train.items} & {*test.items}
    assert [corpus.labels.count(0) for corpus in (train, validation, test)] == [4, 1, 3]


def test_a_published_test_set_of_another_class_is_refused(reviews, tmp_path):
    published = table(tmp_path / "test.csv", {"good": "good", "so so": "mixed"})
    with pytest.raises(
        AnalysisError, match=r"test.csv:text:label has the class mixed, which .*reviews.csv"
    ):
        splits(reviews, test=published)
