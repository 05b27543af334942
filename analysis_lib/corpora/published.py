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
from analysis_lib.corpora.media import ArchivedSound, StoredImage, parquet_file
from analysis_lib.corpora.splits import SPLITS, divided
from analysis_lib.errors import AnalysisError, near_names

# What makes a split's rows of those of its file.
Prepare = Callable[[list[Labelled]], list[Labelled]]


def _hub_source(
    description: str, repository: str, revision: str, column: str, files: dict[str, Sequence[str]]
) -> Source:
    """A corpus whose splits are Parquet files of a dataset on the hub."""

    def reader(split: str) -> Callable[[], list[str]]:
        def read() -> list[str]:
            paths = [hub.dataset_file(repository, revision, file) for file in files[split]]
            return [str(text) for path in paths for text in pd.read_parquet(path, columns=[column])[column]]

        return read

    return Source(description, {split: reader(split) for split in files}, _hub_origin(repository, revision, files))


def _hub_origin(repository: str, revision: str, files: dict[str, Sequence[str]]) -> Callable[[str], str]:
    return lambda split: f"{repository}@{hub.require(repository, revision, files[split][0], 'dataset')}"


def _class_source(
    description: str,
    repository: str,
    revision: str,
    columns: Sequence[str],
    labelled: Callable[..., Labelled | None],
    splits: dict[str, tuple[str, Prepare]],
) -> Source:
    """A corpus with classes whose splits are Parquet files of a dataset on the hub.

    Args:
        labelled: makes an example from the cells of a row, or None if the row is left out.
        splits: the file of each split, and what makes its examples of those of the file.
    """

    def reader(split: str) -> Callable[[], list[Labelled]]:
        file, prepare = splits[split]

        def read() -> list[Labelled]:
            path = hub.dataset_file(repository, revision, file)
            rows = [row for cells in _parquet_cells(path, columns) if (row := labelled(*cells)) is not None]
            refuse_gaps(str(path), rows)
            return prepare(rows)

        return read

    origin = _hub_origin(repository, revision, {split: [file] for split, (file, _) in splits.items()})
    return Source(description, {split: reader(split) for split in splits}, origin)


def _parquet_cells(path: Path, columns: Sequence[str]) -> Iterator[tuple]:
    with parquet_file(path) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise AnalysisError(f"{path} has no column {missing[0]}: {near_names(missing[0], file.schema_arrow.names)}")
        table = file.read(columns=list(columns))
    return zip(*(table[name].to_pylist() for name in columns), strict=True)


def _image_source(description: str, repository: str, revision: str, files: dict[str, Sequence[str]]) -> Source:
    """A corpus whose splits are Parquet files with the columns ``image`` and ``label``."""

    def reader(split: str) -> Callable[[], Iterable]:
        def read() -> Iterable:
            for file in files[split]:
                path = hub.dataset_file(repository, revision, file)
                with parquet_file(path) as rows:
                    groups = [rows.read_row_group(i, columns=["label"]) for i in range(rows.num_row_groups)]
                for i, group in enumerate(groups):
                    labels = group["label"].to_pylist()
                    yield from ((StoredImage(path, i, row), label) for row, label in enumerate(labels))

        return read

    origin = _hub_origin(repository, revision, files)
    return Source(description, {split: reader(split) for split in files}, origin, "image")


_COMMON_VOICE = ("mozilla-foundation/common_voice_11_0", "3a1ecdc235db65ef38a7e97dd04b603ea68a5810")


@contextmanager
def _withdrawn() -> Iterator[None]:
    try:
        yield
    except AnalysisError as error:
        raise AnalysisError(
            f"{error} (its publisher took it off the hub in October 2025: get it there and give the folder of clips)"
        ) from error


def _common_voice(part: str) -> Callable[[], Iterable]:
    """The English clips that the table of a part names, in its order, out of the part's archive."""

    def read() -> Iterable:
        with _withdrawn():
            table = hub.dataset_file(*_COMMON_VOICE, f"transcript/en/{part}.tsv")
            archive = hub.dataset_file(*_COMMON_VOICE, f"audio/en/{part}/en_{part}_0.tar")
        try:
            with tarfile.open(archive, "r:") as tar:
                clips = {
                    PurePosixPath(member.name).name: ArchivedSound(
                        archive, member.name, member.offset_data, member.size
                    )
                    for member in tar
                }
        except tarfile.TarError as error:
            raise AnalysisError(f"{archive} is no whole tar archive ({error}): fetch it again") from error
        # In this table a quotation mark is a character like any other.
        names = pd.read_csv(table, sep="\t", usecols=["path"], quoting=csv.QUOTE_NONE)["path"]
        missing = [name for name in names if name not in clips]
        if missing:
            raise AnalysisError(
                f"{archive} lacks {len(missing)} clips of {table}, such as {missing[0]}: fetch it again"
            )
        return ((clips[name], None) for name in names)

    return read


def _common_voice_origin(split: str) -> str:
    with _withdrawn():
        hub.require(*_COMMON_VOICE, f"transcript/en/{'dev' if split == 'validation' else split}.tsv", "dataset")
    return "@".join(_COMMON_VOICE)


# Where the hub keeps, as Parquet, what the publishers of a dataset left to a program to download.
_CONVERTED = "refs/convert/parquet"


def _converted(split: str) -> tuple[str, Prepare]:
    return f"plain_text/{split}/0000.parquet", list


def _imdb_split(split: str) -> tuple[str, Prepare]:
    """A tenth of what is published for training is for validation."""
    return _IMDB_TRAIN, partial(divided, split=split, validation=0.1)


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


_IMDB_TRAIN, _IMDB_TEST = (_parquet("plain_text", split)[0] for split in ("train", "test"))

PUBLISHED = {
    "stsb": _hub_source(
        "STS Benchmark, first sentence of each pair (hub: nyu-mll/glue)",
        "nyu-mll/glue",
        "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
        "sentence1",
        {
            "dev": _parquet("stsb", "validation"),
            "test": _parquet("stsb", "test"),
            "train": _parquet("stsb", "train"),
        },
    ),
    "wikitext-103": _hub_source(
        "WikiText-103, raw, a paragraph a line (hub: Salesforce/wikitext)",
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "text",
        {
            "validation": _parquet("wikitext-103-raw-v1", "validation"),
            "test": _parquet("wikitext-103-raw-v1", "test"),
            "train": _parquet("wikitext-103-raw-v1", "train", parts=2),
        },
    ),
    "yelphat": Source(
        "YelpHat, restaurant reviews of two classes (not on the hub: give a folder, FOLDER/yelphat:train)",
        dict.fromkeys(SPLITS, _no_yelphat),
        _no_yelphat,
    ),
    "hatexplain": _class_source(
        f"HateXplain, posts of three classes (hub: Hate-speech-CNERG/hatexplain, branch {_CONVERTED})",
        "Hate-speech-CNERG/hatexplain",
        _CONVERTED,
        ("annotators", "post_tokens"),
        _hatexplain,
        {split: _converted(split) for split in SPLITS},
    ),
    "e-snli": _class_source(
        f"e-SNLI, pairs of sentences of three classes (hub: esnli/esnli, branch {_CONVERTED})",
        "esnli/esnli",
        _CONVERTED,
        ("premise", "hypothesis", "label"),
        _e_snli,
        {split: _converted(split) for split in SPLITS},
    ),
    "imdb": _class_source(
        "IMDb, film reviews of two classes; a tenth of train is for validation (hub: stanfordnlp/imdb)",
        "stanfordnlp/imdb",
        "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
        ("text", "label"),
        _imdb,
        {
            "train": _imdb_split("train"),
            "validation": _imdb_split("validation"),
            "test": (_IMDB_TEST, list),
        },
    ),
    "imagenet-1k": _image_source(
        "ImageNet 2012, 50,000 images of 1,000 classes (hub: ILSVRC/imagenet-1k, gated)",
        "ILSVRC/imagenet-1k",
        "49e2ee26f3810fb5a7536bbf732a7b07389a47b5",
        {"validation": _parquet("data", "validation", parts=14)},
    ),
    "common_voice_11_0": Source(
        "Common Voice 11.0, English clips read aloud (hub, until October 2025: mozilla-foundation/common_voice_11_0)",
        {"validation": _common_voice("dev"), "test": _common_voice("test")},
        _common_voice_origin,
        "audio",
    ),
}
