"""Parts of a measurement, made by commands of their own, and their merging into one.

Each part measures consecutive shards of the corpus and writes one file. The sums in it are merged
as far as the order of merging allows (:class:`~analysis_lib.measurement.merging.Merging`), so that
all parts together give the bytes of one process.
"""

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from analysis_lib import files, store
from analysis_lib.capture.inputs import Settings
from analysis_lib.errors import AnalysisError, require_path, require_whole, shown
from analysis_lib.measurement import shards
from analysis_lib.measurement.description import Subject, say, say_left_out
from analysis_lib.measurement.interventions import reads_corpus
from analysis_lib.measurement.merging import Merging
from analysis_lib.measurement.stored import (
    add_stored,
    identity_of_library,
    merging_of,
    read_entries,
    read_sums,
    write_merging,
)
from analysis_lib.measurement.tables import Tables
from analysis_lib.measurement.versions import metric_identity
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.registry import METRICS, resolve

Content = TypeVar("Content")
FILE = re.compile(r"part-([0-9]{1,6})-of-([0-9]{1,6})\.npz")
# Largest number of parts.
MOST = 999_999


class Part(NamedTuple):
    """One of several parts of a corpus, such as the third of sixteen.

    Attributes:
        number: counts from 1.
        count: the number of parts.
        entries: further entries of ``run.json``.
    """

    number: int
    count: int
    entries: Mapping[str, object] | None = None

    @classmethod
    def of(cls, given: object) -> Self:
        """The part that two numbers name.

        Raises:
            AnalysisError: they name none.
        """
        if not isinstance(given, tuple | list) or len(given) not in (2, 3):
            raise AnalysisError(
                f"the part is {shown(given)}: give its number and how many there are, as in (3, 16)"
            )
        part = cls(*given)
        require_whole("the number of parts", part.count, 1, MOST)
        require_whole("the number of the part", part.number, 1)
        if part.number > part.count:
            raise AnalysisError(
                f"part {part.number} of {part.count} does not exist: parts count from 1 to "
                f"{part.count}"
            )
        return part

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"part-{self.number:0{len(str(self.count))}}-of-{self.count}.npz"

    def shards(self, items: int) -> range:
        """The numbers of its shards, of a corpus of so many items."""
        total = math.ceil(items / shards.UTTERANCES_PER_SHARD)
        return range(
            total * (self.number - 1) // self.count,
            total * self.number // self.count,
        )


WHOLE = Part(1, 1)


def refuse_part(part: Part, folder: object, settings: Settings) -> None:
    """Raise an AnalysisError for a part without a folder, or with a pass over the whole corpus."""
    if folder is None:
        raise AnalysisError(
            f"{part} has no folder: name the one where all parts are kept in checkpoints="
        )
    if reads_corpus(settings):
        raise AnalysisError(
            "these changes, or this limit of norms, are made of a pass over all texts, which every "
            "part would repeat: measure in one run, with workers"
        )


class PartFile:
    """The file of a part, which is written whole or not at all.

    Attributes:
        known: all that the sums depend on, see :func:`~analysis_lib.measurement.stored.identity`.
    """

    def __init__(self, folder: Path | str, part: Part, known: Mapping[str, str]):
        self.part = part
        self.known = known
        self._entry = store.Entry(Path(folder))

    def read(self, metrics: list[Metric], first: int) -> Merging | None:
        """The sums of the part; None if there is no file, or a damaged one.

        Args:
            metrics: empty metrics, to be filled.
            first: the number of its first shard.

        Raises:
            AnalysisError: the file is of another measurement.
        """
        about = self._entry.read(self.part.file, _about)
        if about is None:
            return None
        if differences := _differences(about["known"], self.known):
            raise AnalysisError(
                f"{self._entry.folder / self.part.file} comes from another {differences}: remove "
                "it, or give another folder"
            )
        return self._entry.read(self.part.file, partial(merging_of, metrics, first))

    def write(
        self,
        merging: Merging,
        subject: Subject,
        left_out: Mapping[str, str],
        is_all: bool,
        seconds: float,
    ) -> None:
        """Keep the sums of the part, with all that merging needs.

        Args:
            left_out: metrics that are not measured, with the reason.
            is_all: whether all metrics were asked for that can be had.
        """
        about = {
            "known": self.known,
            "metrics": {metric.name: _hash(metric) for metric in merging.metrics},
            "token_types": merging.metrics[0].types,
            "bins": {metric.name: metric.binned_by for metric in merging.metrics},
            "subject": asdict(subject),
            "left_out": left_out,
            "is_all": is_all,
            "entries": self.part.entries or {},
            "seconds": seconds,
        }
        write_merging(self._entry, self.part.file, merging, about=json.dumps(about))


def merge_parts(folder: Path | str, metrics: str | Iterable[str | Metric] = ()) -> Tables:
    """The tables of a corpus from the files of all its parts, without the model or the texts.

    Each is from ``measure(..., part=(3, 16), checkpoints=folder)`` or ``analysis-lib measure --part
    3/16 --out FOLDER``. The tables are those of a measurement in one process, byte for byte, if all
    parts were computed with as many threads on processors or GPUs of one kind.

    Args:
        folder: holds the files of all parts.
        metrics: metrics of your own, and those with other parameters than usual, as ``measure`` was
            given them: their code is not kept with the sums.

    Raises:
        AnalysisError: parts are missing, damaged, or of different measurements; the message names
            them. Or a metric of your own is not given.
    """
    folder = require_path("the folder of parts", folder)
    paths = _paths(folder)
    abouts = {number: _checked(path, number, _about) for number, path in paths.items()}
    _refuse_differences(folder, {number: about["known"] for number, about in abouts.items()})
    first = abouts[1]
    types = tuple(first["token_types"])
    accumulators = _accumulators(first["metrics"], first["bins"], metrics)
    accumulators = [metric.for_types(types) for metric in accumulators]
    merging = Merging(accumulators)
    for number, path in paths.items():
        _checked(path, number, lambda path: add_stored(merging, read_sums(path)))
    merging.close()
    merging.report.require_counted(first["subject"]["run"]["data"])
    threads = sorted({about["subject"]["run"]["threads"] for about in abouts.values()})
    subject = Subject(**first["subject"])
    subject.run["threads"] = threads[0] if len(threads) == 1 else threads
    seconds = sum(about["seconds"] for about in abouts.values())
    run = subject.described(merging.report, accumulators, seconds)
    say(run["model"], run["notes"])
    tables = Tables(accumulators, merging.report, run)
    run["left_out"] = first["left_out"]
    if first["is_all"]:
        run["left_out"] |= tables.leave_out_what_fails()
    say_left_out(run["model"], run["left_out"])
    run.update(first["entries"])
    return tables


def _about(path: Path) -> dict:
    return json.loads(read_entries(path)["about"])


def _hash(metric: Metric) -> str:
    return store.key(*metric_identity(metric))


def _checked(path: Path, number: int, how: Callable[[Path], Content]) -> Content:
    return files.read(path, how, f"remove it, and run part {number} again")


def _paths(folder: Path) -> dict[int, Path]:
    """The files of all parts in a folder, by number, in order.

    Raises:
        AnalysisError: there are none, some are missing, or there are some of two divisions.
    """
    by_count: dict[int, dict[int, Path]] = {}
    names = os.listdir(folder) if os.path.isdir(folder) else []
    for name in names:
        if match := FILE.fullmatch(name):
            number, count = map(int, match.groups())
            if name == Part(number, count).file:
                by_count.setdefault(count, {})[number] = folder / name
    if not by_count:
        raise AnalysisError(
            f"{folder} holds no parts: measure them with --part 1/16 and so on, and --out {folder}"
        )
    if len(by_count) > 1:
        counts = " and of ".join(map(str, sorted(by_count)))
        raise AnalysisError(f"{folder} holds parts of {counts}: remove those of all but one")
    [(count, paths)] = by_count.items()
    missing = [number for number in range(1, count + 1) if number not in paths]
    if missing:
        raise AnalysisError(
            f"{folder} lacks {_named(missing)} of {count}: run what is missing again"
        )
    return {number: paths[number] for number in sorted(paths)}


def _named(numbers: list[int]) -> str:
    """Numbers of parts as SLURM takes them in ``--array``.

    >>> _named([3]), _named([2, 5, 6, 7])
    ('part 3', 'parts 2,5-7')
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    words = ",".join("-".join(map(str, ends)) for ends in ranges)
    return f"part{'s' * (len(numbers) > 1)} {words}"


def _differences(known: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What differs between two measurements, in words; empty if nothing does."""
    names = [name for name in other if known.get(name) != other[name]]
    return " and another ".join(names)


def _refuse_differences(folder: Path, known: Mapping[int, Mapping[str, str]]) -> None:
    """Raise an AnalysisError unless all parts are of one measurement by this library."""
    often = Counter(json.dumps(of_part) for of_part in known.values())
    usual = json.loads(often.most_common(1)[0][0])
    others: dict[str, list[int]] = {}
    for number, of_part in known.items():
        if differences := _differences(of_part, usual):
            others.setdefault(differences, []).append(number)
    if others:
        odd = [
            f"{_named(numbers)} from another {differences}"
            for differences, numbers in others.items()
        ]
        raise AnalysisError(
            f"the parts in {folder} are not of one measurement ({'; '.join(odd)} than the rest): "
            "remove these files, and run them again"
        )
    if differences := _differences(usual, identity_of_library()):
        raise AnalysisError(
            f"the parts in {folder} come from another {differences} than this one: merge them "
            "where they were measured, or measure them again"
        )


def _accumulators(
    measured: Mapping[str, str],
    bins: Mapping[str, str | None],
    given: str | Iterable[str | Metric],
) -> list[Metric]:
    """Empty metrics of the parts, in their order.

    Args:
        measured: the hash of each metric by name.
        bins: the bins of each metric.
        given: metrics of the user.
    """
    own = {metric.name: metric for metric in resolve(given)} if given else {}
    for name in own:
        if name not in measured:
            raise AnalysisError(f"{name} is not in these parts: leave it out")
    accumulators = []
    for name, known in measured.items():
        if name not in own and name not in METRICS:
            raise AnalysisError(
                f"{name} is a metric of your own: give it to merge_parts(folder, [...]) in Python"
            )
        metric = own[name] if name in own else METRICS[name]()
        metric = metric.in_bins(bins[name])
        if _hash(metric) != known:
            raise AnalysisError(
                f"{name} was measured with other parameters or other code: give it to "
                "merge_parts(folder, [...]) in Python as measure was given it"
            )
        accumulators.append(metric)
    return accumulators


def say_kept(folder: Path | str, part: Part) -> None:
    """Log that a part is not measured again."""
    note = "note: %s is in %s already, and is not measured again"
    logging.getLogger(__name__).warning(note, part, folder)
