"""The corpora that were published elsewhere: Parquet files of the hub, each at a pinned revision, and Common Voice."""

import csv
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

import pandas as pd

from analysis_lib.corpora import hub
from analysis_lib.corpora.corpus import Labelled, Pair, Source, refuse_gaps
from analysis_lib.corpora.media import ArchivedFile, ParquetRow, parquet_file
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.errors import AnalysisError, near_names

# The files of each split of a dataset.
Files = dict[str, Sequence[str]]


def _dataset(
    description: str,
    repository: str,
    revision: str,
    files: Files,
    read: Callable[[Path], Iterable],
    kind: str = "text",
    validation: float = 0.0,
) -> Source:
    """A corpus whose splits are files of a dataset on the hub.

    Args:
        read: what a file holds.
        validation: the share of the training file that is for validation, where the publishers set none apart.
    """

    def rows(split: str) -> Iterator:
        for file in files[split]:
            found = read(hub.dataset_file(repository, revision, file))
            yield from divided(found, split, validation) if validation and split != "test" else found

    splits = {split: partial(rows, split) for split in files}
    return Source(description, splits, _origin(repository, revision, files), kind)


def _origin(repository: str, revision: str, files: Files) -> Callable[[str], str]:
    return lambda split: f"{repository}@{hub.require(repository, revision, files[split][0], 'dataset')}"


def _cells(columns: Sequence[str], path: Path) -> Iterator[tuple]:
    """The rows of a Parquet file, each as the cells of these columns."""
    with parquet_file(path) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise AnalysisError(f"{path} has no column {missing[0]}: {near_names(missing[0], file.schema_arrow.names)}")
        table = file.read(columns=list(columns))
    return zip(*(table[name].to_pylist() for name in columns), strict=True)


def _texts(column: str, path: Path) -> Iterator[str]:
    return (str(text) for (text,) in _cells([column], path))


def _labelled(columns: Sequence[str], example: Callable[..., Labelled | None], path: Path) -> list[Labelled]:
    """The examples made of the cells of each row; None leaves the row out."""
    rows = [row for cells in _cells(columns, path) if (row := example(*cells)) is not None]
    refuse_gaps(str(path), rows)
    return rows


def _images(path: Path) -> Iterator[tuple[ParquetRow, int]]:
    with parquet_file(path) as rows:
        groups = [rows.read_row_group(i, columns=["label"])["label"] for i in range(rows.num_row_groups)]
    for i, labels in enumerate(groups):
        yield from ((ParquetRow("image", path, i, row), label) for row, label in enumerate(labels.to_pylist()))


_COMMON_VOICE = ("mozilla-foundation/common_voice_11_0", "3a1ecdc235db65ef38a7e97dd04b603ea68a5810")
_COMMON_VOICE_PARTS = {"validation": "dev", "test": "test"}


@contextmanager
def _withdrawn() -> Iterator[None]:
    try:
        yield
    except AnalysisError as error:
        raise AnalysisError(
            f"{error} (its publisher took it off the hub in October 2025: get it there and give the folder of clips)"
        ) from error


@_withdrawn()
def _common_voice(part: str) -> list[tuple[ArchivedFile, None]]:
    """The English clips that the table of a part names, in its order, out of the part's archive."""
    table = hub.dataset_file(*_COMMON_VOICE, f"transcript/en/{part}.tsv")
    archive = hub.dataset_file(*_COMMON_VOICE, f"audio/en/{part}/en_{part}_0.tar")
    try:
        with tarfile.open(archive, "r:") as tar:
            members = {PurePosixPath(member.name).name: member for member in tar}
    except tarfile.TarError as error:
        raise AnalysisError(f"{archive} is no whole tar archive ({error}): fetch it again") from error
    # In this table a quotation mark is a character like any other.
    names = pd.read_csv(table, sep="\t", usecols=["path"], quoting=csv.QUOTE_NONE)["path"]
    if missing := [name for name in names if name not in members]:
        raise AnalysisError(f"{archive} lacks {len(missing)} clips of {table}, such as {missing[0]}: fetch it again")
    found = (members[name] for name in names)
    return [(ArchivedFile("audio", archive, clip.name, clip.offset_data, clip.size), None) for clip in found]


def _class_name(names: Sequence[str], label: int | None) -> str:
    """No name where there is no such class, as for the -1 of the hub, which is no class."""
    return dict(enumerate(names)).get(label, "")


def _imdb(text: str | None, label: int | None) -> Labelled:
    return Labelled(text or "", _class_name(("neg", "pos"), label))


def _e_snli(premise: str | None, hypothesis: str | None, label: int | None) -> Labelled:
    names = ("entailment", "neutral", "contradiction")
    return Labelled(Pair(premise or "", hypothesis or ""), _class_name(names, label))


def _hatexplain(annotators: dict[str, list[int]], tokens: list[str]) -> Labelled | None:
    """A post with the class that most of its annotators gave, or None where no class has a majority."""
    labels = annotators["label"]
    majority = [label for label, votes in Counter(labels).items() if 2 * votes > len(labels)]
    names = ("hatespeech", "normal", "offensive")
    return Labelled(" ".join(tokens), _class_name(names, majority[0])) if majority else None


def _no_yelphat(*_: object) -> NoReturn:
    raise AnalysisError(
        "the hub has no YelpHat: get it at github.com/cansusen/Human-Attention-for-Text-Classification, lay it out as "
        "data/README.md says and give the folder, as in FOLDER/yelphat:train"
    )


def _parquet(folder: str, split: str, parts: int = 1) -> list[str]:
    return [f"{folder}/{split}-{i:05d}-of-{parts:05d}.parquet" for i in range(parts)]


# Where the hub keeps, as Parquet, what the publishers of a dataset left to a program to download.
_CONVERTED = "refs/convert/parquet"
_CONVERTED_FILES = {split: [f"plain_text/{split}/0000.parquet"] for split in SPLITS}

PUBLISHED = {
    "stsb": _dataset(
        "STS Benchmark, first sentence of each pair (hub: nyu-mll/glue)",
        "nyu-mll/glue",
        "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
        {"dev": _parquet("stsb", "validation"), "test": _parquet("stsb", "test"), "train": _parquet("stsb", "train")},
        partial(_texts, "sentence1"),
    ),
    "wikitext-103": _dataset(
        "WikiText-103, raw, a paragraph a line (hub: Salesforce/wikitext)",
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        {
            split: _parquet("wikitext-103-raw-v1", split, parts)
            for split, parts in (("validation", 1), ("test", 1), ("train", 2))
        },
        partial(_texts, "text"),
    ),
    "yelphat": Source(
        "YelpHat, restaurant reviews of two classes (not on the hub: give a folder, FOLDER/yelphat:train)",
        dict.fromkeys(SPLITS, _no_yelphat),
        _no_yelphat,
    ),
    "hatexplain": _dataset(
        f"HateXplain, posts of three classes (hub: Hate-speech-CNERG/hatexplain, branch {_CONVERTED})",
        "Hate-speech-CNERG/hatexplain",
        _CONVERTED,
        _CONVERTED_FILES,
        partial(_labelled, ("annotators", "post_tokens"), _hatexplain),
    ),
    "e-snli": _dataset(
        f"e-SNLI, pairs of sentences of three classes (hub: esnli/esnli, branch {_CONVERTED})",
        "esnli/esnli",
        _CONVERTED,
        _CONVERTED_FILES,
        partial(_labelled, ("premise", "hypothesis", "label"), _e_snli),
    ),
    "imdb": _dataset(
        "IMDb, film reviews of two classes; a tenth of train is for validation (hub: stanfordnlp/imdb)",
        "stanfordnlp/imdb",
        "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
        {split: _parquet("plain_text", "test" if split == "test" else "train") for split in SPLITS},
        partial(_labelled, ("text", "label"), _imdb),
        validation=0.1,
    ),
    "imagenet-1k": _dataset(
        "ImageNet 2012, 50,000 images of 1,000 classes (hub: ILSVRC/imagenet-1k, gated)",
        "ILSVRC/imagenet-1k",
        "49e2ee26f3810fb5a7536bbf732a7b07389a47b5",
        {"validation": _parquet("data", "validation", parts=14)},
        _images,
        "image",
    ),
    "common_voice_11_0": Source(
        "Common Voice 11.0, English clips read aloud (hub, until October 2025: mozilla-foundation/common_voice_11_0)",
        {split: partial(_common_voice, part) for split, part in _COMMON_VOICE_PARTS.items()},
        _withdrawn()(
            _origin(*_COMMON_VOICE, {s: [f"transcript/en/{part}.tsv"] for s, part in _COMMON_VOICE_PARTS.items()})
        ),
        "audio",
    ),
}
