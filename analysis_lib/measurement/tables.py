"""Tables of a measurement, and the report of what was read."""

import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis_lib.capture import Activations
from analysis_lib.capture.inputs import Reading
from analysis_lib.errors import AnalysisError, UnknownNameError, near_names, require_path, shown
from analysis_lib.files import Output
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.intervals import Estimate, jackknife
from analysis_lib.metrics.sums import Sums
from analysis_lib.models import title

# Function that computes one or several numbers from the tables of one or several measurements.
Statistic = Callable[..., float | Sequence[float]]
TableSet = Mapping[str, pd.DataFrame]
# Formats of table files, by their ending.
FORMATS = ("parquet", "csv")
# Fields of a report that add up.
COUNTS = (*(part.name for part in fields(Reading)), "tokens", "counted")
_SIZES = ("width", "heads", "key_heads", "head_width")


@dataclass
class Report(Reading):
    """Counts of what was read, and of what was left out.

    Attributes:
        tokens: the tokens of all utterances at the first layer, special tokens included.
        counted: the tokens that count as vectors and as queries.
        zero_vectors: by "space layer", the number of vectors without a direction, which cosines
            leave out.
        long: by layer, the number of tokens left out because of the norm of their hidden vector.
        layers: the rows of :attr:`Tables.layers`, in order.
        devices: names of the devices that computed.
    """

    tokens: int = 0
    counted: int = 0
    zero_vectors: dict[str, int] = field(default_factory=dict)
    long: dict[str, int] = field(default_factory=dict)
    layers: list[dict] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Numbers of zero vectors, where they were counted.
        self._zeros = Sums()

    def merge(self, other: "Report") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.zero_vectors, other.zero_vectors), (self.long, other.long)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.layers = self.layers or other.layers
        self.devices = in_order_of_number({*self.devices, *other.devices})

    def joined(self, other: "Report") -> "Report":
        """The report of one corpus from two passes over it, whose metrics read different spaces."""
        layers = []
        for mine, theirs in zip(self.layers or other.layers, other.layers, strict=True):
            known = {name: value for name, value in mine.items() if value is not None}
            layers.append(theirs | known)
        dictionaries = {
            "zero_vectors": self.zero_vectors | other.zero_vectors,
            "long": self.long | other.long,
        }
        devices = in_order_of_number({*self.devices, *other.devices})
        return replace(other, layers=layers, devices=devices, **dictionaries)

    def require_counted(self, corpus: str) -> None:
        """Raise an AnalysisError if no token of the corpus counts."""
        if not self.counted:
            raise AnalysisError(
                f"{corpus} has no token that counts: keep the special tokens or give other text"
            )

    def add(self, activations: Activations) -> None:
        """Add the counts of a layer and batch, on the device of its activations; see ``close``."""
        if all(row["layer"] != activations.layer for row in self.layers):
            self.layers.append(_layer(activations))
        # The model's final output arrives separately, after its last layer.
        if activations.layer == self.layers[0]["layer"] and "final" not in activations.spaces:
            hidden = activations.spaces.get("hidden")
            tokens = activations.tokens if hidden is None else hidden.tokens
            self.tokens += tokens.mask.sum()
            self.counted += tokens.counts.sum().long()
        hidden = activations.spaces.get("hidden")
        if hidden is not None and hidden.tokens.long is not None:
            key = str(activations.layer)
            self.long[key] = self.long.get(key, 0) + hidden.tokens.long.sum()
        for space, vectors in activations.spaces.items():
            # Count zero vectors only if a metric has already computed the norms.
            if space != "attention_input" and "every_norm" in vars(vectors):
                owners = activations.tokens.owners
                self._zeros.add((space, activations.layer), vectors.lengths, owners, _zeros)

    def settle(self) -> None:
        """Count what has been added, at the end of a batch."""
        self._zeros.settle()

    def close(self) -> None:
        """Finish the counting: copy all counts from the device at once, and drop zeros."""
        # Cross-attention layers arrive between the layers of the decoder.
        self.layers.sort(key=operator.itemgetter("layer"))
        if isinstance(self.tokens, Tensor):
            # The layers of a model can lie on several devices.
            zeros = {key: counts.sum().long() for key, (_, counts) in self._zeros.items()}
            counts = [*zeros.values(), *self.long.values()]
            counts = [count.to(self.tokens.device) for count in counts]
            self.tokens, self.counted, *counts = torch.stack(
                [self.tokens, self.counted, *counts]
            ).tolist()
            self.long = dict(zip(self.long, counts[len(zeros) :], strict=True))
            for (space, layer), count in zip(zeros, counts, strict=False):
                if count:
                    self.zero_vectors[f"{space} {layer}"] = count
            self._zeros = Sums()


def in_order_of_number(devices: Iterable[str]) -> list[str]:
    """Names of devices, sorted: ``cuda:2`` before ``cuda:10``."""
    return sorted(devices, key=lambda name: (len(name), name))


def _zeros(norms: Tensor, counted: Tensor) -> Tensor:
    """Number of counted vectors of an utterance that are zero."""
    return ((norms == 0) & counted).sum((-1, -2))


def _layer(activations: Activations) -> dict:
    sizes = {space: vectors.values.shape for space, vectors in activations.spaces.items()}
    return {
        "layer": activations.layer,
        "stack": activations.stack,
        "part": activations.part,
        "width": sizes["hidden"][-1] if "hidden" in sizes else None,
        "heads": sizes["query"][1] if "query" in sizes else None,
        "key_heads": sizes["key"][1] if "key" in sizes else None,
        "head_width": sizes["query"][-1] if "query" in sizes else None,
    }


def grouped(frames: Mapping[str, pd.DataFrame], column: str) -> pd.DataFrame:
    """Tables with the same columns, one below the other, with their names in a new first column.

    >>> two = {"bert": pd.DataFrame({"layer": [0]}), "gpt2": pd.DataFrame({"layer": [1]})}
    >>> grouped(two, "model").to_dict("list")
    {'model': ['bert', 'gpt2'], 'layer': [0, 1]}
    """
    if not isinstance(frames, Mapping) or not all(
        isinstance(table, pd.DataFrame) for table in frames.values()
    ):
        raise AnalysisError(
            "the tables are no mapping of tables by name: give them as in {'bert': table}"
        )
    if not frames:
        raise AnalysisError("no table was given: give one or more, by name")
    return pd.concat(frames, names=[column]).reset_index(column).reset_index(drop=True)


class LazyTables(Mapping[str, pd.DataFrame]):
    """Tables by name, each made on first use by a function of its part.

    Attributes:
        layers: one row per layer, see :class:`Tables`.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        make: Callable[[Any], pd.DataFrame],
        layers: pd.DataFrame | None = None,
    ):
        self._parts = parts
        self._make = make
        self.layers = layers
        self._tables: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if not isinstance(name, str) or name not in self._parts:
            raise UnknownNameError(
                f"there is no table {shown(name)}: {near_names(str(name), self._parts)}"
            )
        if name not in self._tables:
            self._tables[name] = self._make(self._parts[name])
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class Plain:
    """A statistic: one or several numbers computed from the tables of one or several measurements.

    Attributes:
        number: the function that computes them.
        smooth: whether the numbers change gradually when texts are left out. Ranks, medians and
            counts jump, so that their bias is not known: their intervals are around the number
            itself, see :func:`~analysis_lib.metrics.intervals.jackknife_interval`.
    """

    number: Statistic
    smooth: bool = field(default=True, kw_only=True)

    def judged(self, estimates: list[Estimate]) -> list[Estimate]:
        """The estimates of the statistic, from those of its numbers."""
        return estimates


@dataclass(frozen=True)
class Chosen(Plain):
    """Numbers of an item, such as a layer, chosen on half of the texts and judged on the rest.

    The largest of several numbers is biased upwards, and its jackknife is not consistent. For a
    corpus of three groups or fewer, all texts are used for both.

    Attributes:
        number: receives the tables, then the chosen item.
        choose: chooses the item from the tables.
    """

    choose: Callable[..., Any]


def largest(statistic: Statistic) -> Chosen:
    """Largest of several numbers, or column with the largest minimum, by halves of the texts.

    It is chosen on half of the texts, and judged on the rest, see :class:`Chosen`.

    Args:
        statistic: returns a Series, such as one number per layer, or a DataFrame, such as one
            column per dimension.
    """

    if not callable(statistic):
        raise AnalysisError(f"a statistic is {shown(statistic)}: give a function of the tables")

    def choose(*tables: Mapping[str, pd.DataFrame]) -> Any:
        numbers = statistic(*tables)
        if isinstance(numbers, pd.DataFrame):
            numbers = numbers.min(skipna=False)
        numbers = numbers.dropna()
        return numbers.idxmax() if len(numbers) else None

    return Chosen(
        lambda *given: math.nan if given[-1] is None else statistic(*given[:-1])[given[-1]], choose
    )


@dataclass(frozen=True)
class Ratio:
    """A ratio of two numbers, without a value if the interval of the denominator contains zero.

    Attributes:
        both: returns numerator and denominator.
    """

    both: Callable[..., tuple[float, float]]
    smooth: ClassVar[bool] = True

    def number(self, *tables: Mapping[str, pd.DataFrame]) -> list[float]:
        over, under = self.both(*tables)
        return [over / under if under else math.nan, under]

    def judged(self, estimates: list[Estimate]) -> Estimate:
        ratio, under = estimates
        return ratio if under.side(0) in ("above", "below") else Estimate(math.nan)


class Tables(LazyTables):
    """The tables of a measurement by name, made on first use.

    Attributes:
        report: counts of what was read.
        layers: one row per layer: layer, stack (encoder, decoder, ...), part (the path of its
            block), width (dimensions of its hidden vectors), heads, key_heads and head_width
            (missing where it has no attention, or where no metric needed it).
        run: parameters, model, data, versions and duration, as in ``run.json``.
        checkpoints: the file from which this measurement can resume, if one was kept; it can be
            deleted once the tables are saved.
    """

    def __init__(
        self, metrics: Iterable[Metric], report: Report, run: dict, checkpoints: Path | None = None
    ):
        super().__init__(
            {metric.name: metric for metric in metrics}, operator.methodcaller("table")
        )
        self.report = report
        # A part without texts has no layers.
        layers = pd.DataFrame(report.layers, columns=["layer", "stack", "part", *_SIZES])
        self.layers = layers.astype(dict.fromkeys(_SIZES, "Int64"))
        self.run = run
        self.checkpoints = checkpoints

    def __repr__(self) -> str:
        read = f"{self.report.tokens:,} tokens in {self.report.utterances:,} utterances"
        return (
            f"<Tables of {self.run.get('model')} on {self.run.get('data')}, {read}: "
            f"{', '.join(self)}>"
        )

    @property
    def title(self) -> str:
        """The title of the model, see :func:`~analysis_lib.models.title`."""
        return title(self.run["model"])

    @property
    def groups(self) -> list[int]:
        """Jackknife groups of the intervals: up to 20, made of the corpus's independent units."""
        return sorted(
            {group for metric in self._parts.values() for group in metric.occupied_groups()}
        )

    def smooth(self, name: str) -> bool:
        """Whether the numbers of a table change gradually when texts are left out."""
        return self._parts[name].smooth

    def interval(
        self, statistic: "Statistic | Plain | Ratio", *others: "Tables"
    ) -> Estimate | list[Estimate]:
        """Numbers computed from the tables, with 95 % jackknife intervals over utterances.

        ``statistic`` is called with the tables of the whole corpus, then with those of the corpus
        without each of its groups of utterances in turn (which have no interval columns). With
        other measurements of the same corpus, it is called with the tables of all of them: the same
        utterances are left out of each, so that effects of single texts cancel in a difference. For
        a number that jumps, such as a rank, pass ``Plain(statistic, smooth=False)``.

        Returns:
            An estimate, without an interval for a corpus of one utterance; a list if there are
            several numbers.

        Raises:
            AnalysisError: one of ``others`` read other texts.

        >>> entropy = lambda tables: tables["attention_entropy"]["entropy_nats"].mean()
        >>> print(tables.interval(entropy))  # doctest: +SKIP
        1.58 [1.57, 1.59]
        """
        return self.intervals({"": statistic}, *others)[""]

    def intervals(
        self, statistics: "Mapping[str, Statistic | Plain | Ratio]", *others: "Tables"
    ) -> dict[str, Estimate | list[Estimate]]:
        """The :meth:`interval` of each of several statistics.

        Faster than one by one: the tables without a group are made once for all.
        """
        if not isinstance(statistics, Mapping):
            raise AnalysisError(
                f"the statistics are {shown(statistics)}: give functions of the tables, by name"
            )
        for statistic in statistics.values():
            if not callable(statistic) and not isinstance(statistic, Plain | Ratio):
                raise AnalysisError(
                    f"a statistic is {shown(statistic)}: give a function of the tables"
                )
        for other in others:
            if not isinstance(other, Tables):
                raise AnalysisError(
                    f"another measurement is {shown(other)}: give the tables of measure"
                )
        if any(other.run["data_sha256"] != self.run["data_sha256"] for other in others):
            raise AnalysisError(
                "the measurements are of different texts: measure one corpus with every model"
            )
        measured = (self, *others)
        # The sums of layers are joined once for all tables.
        leaving_out = functools.cache(operator.methodcaller("leaving_out"))

        def without(*left_out: int) -> Sequence[LazyTables]:
            if not left_out:
                return measured
            make = lambda part: leaving_out(part)(*left_out)  # noqa: E731
            return [LazyTables(tables._parts, make, tables.layers) for tables in measured]

        plain = {}
        chosen = {}
        for name, statistic in statistics.items():
            if isinstance(statistic, Chosen):
                chosen[name] = statistic
            else:
                is_plain = not isinstance(statistic, Plain | Ratio)
                plain[name] = Plain(statistic) if is_plain else statistic
        groups = self.groups
        estimates = {}
        if plain:
            estimates |= _jackknifed(plain, without, (), groups)
        if chosen:
            # Items chosen on every second group are judged on the rest.
            half, rest = (groups[::2], groups[1::2]) if len(groups) > 3 else ((), groups)
            of_half = without(*rest) if half else measured
            choices = {name: statistic.choose(*of_half) for name, statistic in chosen.items()}
            estimates |= _jackknifed(chosen, without, half, rest, choices)
        return {name: estimates[name] for name in statistics}

    def leave_out_what_fails(self) -> dict[str, str]:
        """Make every table and remove those that cannot be made; returns the reasons by name.

        If none can be made, all of them stay.
        """
        reasons = {}
        for name in list(self):
            try:
                self[name]
            except AnalysisError as error:
                reasons[name] = str(error)
        for name in reasons if len(reasons) < len(self) else ():
            del self._parts[name]
        return reasons

    def save(self, folder: Path | str, form: str = "parquet") -> None:
        """Write the tables and ``run.json``, see :func:`save_tables`."""
        inputs = (str(self.run.get("model", "")), str(self.run.get("data", "")))
        save_tables(
            self,
            Output(require_path("the folder", folder), "measure", inputs, "run.json"),
            self.run,
            form,
        )


def _jackknifed(
    statistics: Mapping[str, Plain | Ratio],
    without: Callable[..., Sequence[Mapping]],
    left_out: Sequence[int],
    groups: Sequence[int],
    choices: Mapping[str, object] | None = None,
) -> dict[str, Estimate | list[Estimate]]:
    """The estimates of several statistics, by name.

    Args:
        without: returns the tables without some groups.
        left_out: groups that are left out of all tables.
        groups: groups that the jackknife leaves out one at a time.
        choices: further arguments of each statistic after the tables, by name.
    """

    def numbers(*without_groups: int) -> dict[str, np.ndarray]:
        tables = without(*without_groups)
        values = {}
        for name, statistic in statistics.items():
            given = tables if choices is None else (*tables, choices[name])
            values[name] = _as_numbers(statistic.number(*given))
        return values

    whole = numbers(*left_out)
    # Without its only group, a corpus has no numbers.
    replicates = [numbers(*left_out, group) for group in groups if len(groups) > 1]
    estimates = {}
    for name, statistic in statistics.items():
        values = [replicate[name] for replicate in replicates]
        estimate = jackknife(whole[name], values, statistic.smooth)
        estimates[name] = statistic.judged(estimate) if isinstance(estimate, list) else estimate
    return estimates


def _as_numbers(values: object) -> np.ndarray:
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise AnalysisError(
            f"a statistic gives {shown(values)}: let it give a number, or several"
        ) from error


def save_tables(
    tables: Mapping[str, pd.DataFrame], output: Output, run: dict, form: str = "parquet"
) -> None:
    """Write one file per table, Parquet or CSV, and a JSON description of the run that lists them.

    The description is written last: where it exists, so does every table that it lists.

    Args:
        output: the folder, which must be new, or hold results of the same command on the same
            inputs; their tables are deleted.
        run: the content of the description.
        form: the format of the tables.

    Raises:
        AnalysisError: the folder cannot be written or holds other files that would be lost, or a
            table cannot be made; nothing is written then.
    """
    if form not in FORMATS:
        raise AnalysisError(f"the form of the tables is {form!r}: give {' or '.join(FORMATS)}")
    run = {**run, "tables": {name: len(table) for name, table in tables.items()}}
    output.check(table_files(tables, output.last, form))
    with output.scratch() as new:
        for name, table in tables.items():
            path = new / f"{name}.{form}"
            if form == "csv":
                table.to_csv(path, index=False)
            else:
                table.to_parquet(path, index=False, compression="zstd")
        text = json.dumps(run, indent=2, ensure_ascii=False) + "\n"
        (new / output.last).write_text(text, encoding="utf-8", errors="backslashreplace")


def table_files(tables: Iterable[str], description: str, form: str = "parquet") -> list[str]:
    """The names of the files that :func:`save_tables` writes."""
    return [*(f"{name}.{form}" for name in tables), description]
