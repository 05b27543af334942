"""The corpora that were published elsewhere: Parquet files of the hub, each at a pinned revision."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from analysis_lib.corpora import hub
from analysis_lib.corpora.corpus import Labelled, Pair, Source, refuse_gaps
from analysis_lib.corpora.media import MediaFile, parquet_file, row_group
from analysis_lib.corpora.packages import entries
from analysis_lib.corpora.splits import divided
from analysis_lib.errors import AnalysisError, near_names


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

    def source(self) -> Source:
        """The corpus of its files."""
        origin = _origin(self.repository, self.revision, {split: self.files(split)[0] for split in self.splits})
        return Source(self.description, {split: partial(self.rows, split) for split in self.splits}, origin, self.kind)

    def files(self, split: str) -> list[str]:
        """The files of a split: ``test-*-of-00002.parquet`` stands for two."""
        pattern = self.splits[split]
        parts = int(pattern.removesuffix(".parquet")[-5:]) if "*" in pattern else 1
        return [pattern.replace("*", f"{part:05d}") for part in range(parts)]

    def rows(self, split: str) -> Iterator:
        """What the files of a split hold, one file after the other."""
        for file in self.files(split):
            path = hub.dataset_file(self.repository, self.revision, file)
            found = _images(path) if self.kind == "image" else self.texts(path)
            yield from divided(found, split, self.validation) if self.validation and split != "test" else found

    def texts(self, path: Path) -> list[str] | list[Labelled]:
        """The texts of a file; where they have a class, those with a majority for it."""
        columns = [self.text] if isinstance(self.text, str) else self.text
        if not self.label:
            return [str(text) for (text,) in _cells(columns, path)]
        rows = []
        for *texts, label in _cells([*columns, self.label], path):
            # Where posts are words, each has the classes that its annotators gave.
            texts = [" ".join(text) if isinstance(text, list) else text or "" for text in texts]
            votes = label["label"] if isinstance(label, dict) else [label]
            most, count = Counter(votes).most_common(1)[0]
            if 2 * count > len(votes):
                # No name where there is no such class, as for the -1 of the hub, which is no class.
                name = dict(enumerate(self.classes)).get(most, "")
                rows.append(Labelled(Pair(*texts) if len(texts) > 1 else texts[0], name))
        refuse_gaps(str(path), rows)
        return rows


def _origin(repository: str, revision: str, files: dict[str, str]) -> Callable[[str], str]:
    return lambda split: f"{repository}@{hub.require(repository, revision, files[split], repo_type='dataset')}"


def _cells(columns: Sequence[str], path: Path) -> Iterable[tuple]:
    """The rows of a Parquet file, each as the cells of these columns."""
    with parquet_file(path) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise AnalysisError(f"{path} has no column {missing[0]}: {near_names(missing[0], file.schema_arrow.names)}")
        table = file.read(columns=list(columns))
    return zip(*(table[name].to_pylist() for name in columns), strict=True)


def _images(path: Path) -> Iterator[tuple[MediaFile, int]]:
    with parquet_file(path) as rows:
        groups = [rows.read_row_group(i, columns=["label"])["label"] for i in range(rows.num_row_groups)]
    for i, labels in enumerate(groups):
        for row, label in enumerate(labels.to_pylist()):
            yield MediaFile("image", path, f"row {row} of row group {i}", _image_content, (i, row)), label


def _image_content(path: Path, group: int, row: int) -> bytes:
    return row_group(path, group, "image")[row].as_py()["bytes"]


PUBLISHED = {name: dataset.source() for name, dataset in entries("corpora.yml", Dataset).items()}
