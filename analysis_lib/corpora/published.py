"""Corpora of the hub: Parquet files, each at a pinned revision.

To add one, write an entry of ``data/corpora.yml``, where the fields are explained.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis_lib.corpora import hub
from analysis_lib.corpora.corpus import Example, KnownCorpus, Pair, checked
from analysis_lib.corpora.media import MediaFile, parquet_file, row_group
from analysis_lib.corpora.splits import divided
from analysis_lib.corpora.tables import open_table
from analysis_lib.files import entries


@dataclass(frozen=True)
class Dataset:
    """A dataset of the hub, as ``data/corpora.yml`` describes it."""

    description: str
    repository: str
    revision: str
    splits: dict[str, str]
    kind: str = "text"
    text: str | Sequence[str] = ()
    label: str = ""
    classes: Sequence[str] = ()
    validation: float = 0.0

    def known(self) -> KnownCorpus:
        """The corpus of the dataset."""
        splits = [*self.splits]
        return KnownCorpus(self.description, splits, self.examples, self.origin, self.kind)

    def origin(self, split: str) -> str:
        """The repository and the commit, or revision, of a split."""
        first = self.files(split)[0]
        commit = hub.require(self.repository, self.revision, first, repo_type="dataset")
        return f"{self.repository}@{commit}"

    def files(self, split: str) -> list[str]:
        """The files of a split: ``test-*-of-00002.parquet`` stands for two."""
        pattern = self.splits[split]
        if "*" not in pattern:
            return [pattern]
        count = int(pattern.removesuffix(".parquet")[-5:])
        return [pattern.replace("*", f"{part:05d}") for part in range(count)]

    def examples(self, split: str) -> Iterator[Example]:
        """The examples of a split, file by file."""
        for file in self.files(split):
            path = hub.dataset_file(self.repository, self.revision, file)
            examples = _images(path) if self.kind == "image" else self._texts(path)
            if self.validation and split != "test":
                examples = divided([*examples], split, self.validation)
            yield from examples

    def _texts(self, path: Path) -> Iterable[Example]:
        """The texts of a file; if they have classes, only those on which a majority agrees."""
        columns = [self.text] if isinstance(self.text, str) else [*self.text]
        if not self.label:
            return (Example(str(text)) for (text,) in open_table(path).rows(columns))
        examples = []
        for *texts, label in open_table(path).rows([*columns, self.label]):
            class_name = self._class_name(label)
            if class_name is not None:
                texts = [_joined(text) for text in texts]
                text = Pair(*texts) if len(texts) > 1 else texts[0]
                examples.append(Example(text, class_name))
        return checked(str(path), examples)

    def _class_name(self, label: int | dict | None) -> str | None:
        """The name of a class; None if annotators disagree.

        It is blank for a missing class, such as -1 on the hub.
        """
        # An annotated post has a label from each annotator.
        votes = label["label"] if isinstance(label, dict) else [label]
        (majority, count), *_ = Counter(votes).most_common(1)
        if 2 * count <= len(votes):
            return None
        return dict(enumerate(self.classes)).get(majority, "")


def _joined(text: str | list[str] | None) -> str:
    return " ".join(text) if isinstance(text, list) else text or ""


def _images(path: Path) -> Iterator[Example]:
    with parquet_file(path) as file:
        count = file.num_row_groups
    for group in range(count):
        for row, label in enumerate(row_group(path, group, "label").to_pylist()):
            part = f"row {row} of row group {group}"
            yield Example(MediaFile("image", path, part, _image_content, (group, row)), label)


def _image_content(path: Path, group: int, row: int) -> bytes:
    return row_group(path, group, "image")[row].as_py()["bytes"]


PUBLISHED = {name: dataset.known() for name, dataset in entries("corpora.yml", Dataset).items()}
