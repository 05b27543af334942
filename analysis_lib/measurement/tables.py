"""The tables of a measurement, and the report of what was read."""

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
from analysis_lib.models import title

# Computes one number, or several, from the tables of a measurement, or of several.
Statistic = Callable[..., float | Sequence[float]]
TableSet = Mapping[str, pd.DataFrame]
# The endings of the files of tables.
FORMATS = ("parquet", "csv")
# What adds up of a report.
COUNTS = (*(part.name for part in fields(Reading)), "tokens", "counted")
_SIZES = ("width", "heads", "key_heads", "head_width")


@dataclass
class Report(Reading):
    """What was read, and what was not.

    Attributes:
        tokens: of all utterances at the first layer, special tokens included.
        counted: those that count as vectors and as queries.
        zero_vectors: by "space layer", how many vectors had no direction and were left out of
            cosines.
        long: by layer, how many tokens were left out for the norm of their hidden vector.
        layers: the rows of :attr:`Tables.layers`, in order.
    """

    tokens: int = 0
    counted: int = 0
    zero_vectors: dict[str, int] = field(default_factory=dict)
    long: dict[str, int] = field(default_factory=dict)
    layers: list[dict] = field(default_factory=list)

    def merge(self, other: "Report") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.zero_vectors, other.zero_vectors), (self.long, other.long)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.layers = self.layers or other.layers

    def joined(self, other: "Report") -> "Report":
        """What is known of one corpus from two passes over it, whose metrics looked at other
        spaces.
        """
        layers = []
        for mine, theirs in zip(self.layers or other.layers, other.layers, strict=True):
            known = {name: value for name, value in mine.items() if value is not None}
            layers.append(theirs | known)
        dictionaries = {
            "zero_vectors": self.zero_vectors | other.zero_vectors,
            "long": self.long | other.long,
        }
        return replace(other, layers=layers, **dictionaries)

    def add(self, activations: Activations) -> None:
        """Count what a layer of a batch holds, where the activations are: see :meth:`close`."""
        if all(row["layer"] != activations.layer for row in self.layers):
            self.layers.append(_layer(activations))
        # What a model gives out comes a second time, after its last layer.
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
            # Only where a metric computed the norms: counting alone is not worth them.
            if space != "attention_input" and "norms" in vars(vectors):
                key = f"{space} {activations.layer}"
                self.zero_vectors[key] = self.zero_vectors.get(key, 0) + vectors.zeros

    def close(self) -> None:
        """End the counting: all counts come over from the device at once, as numbers, and zeros are
        forgotten.
        """
        # A decoder's attentions to an encoder come between its layers.
        self.layers.sort(key=operator.itemgetter("layer"))
        if isinstance(self.tokens, Tensor):
            # The layers of one model can lie on several devices.
            counts = [*self.zero_vectors.values(), *self.long.values()]
            counts = [count.to(self.tokens.device) for count in counts]
            self.tokens, self.counted, *counts = torch.stack(
                [self.tokens, self.counted, *counts]
            ).tolist()
            pairs = zip(self.zero_vectors, counts, strict=False)
            self.long = dict(zip(self.long, counts[len(self.zero_vectors) :], strict=True))
            self.zero_vectors = {key: count for key, count in pairs if count}


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
    """Tables with the same columns below each other, with the name of each in a column in front.

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
    """The table that ``make`` makes of each part, by the name of the part, made when first asked
    for.

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
    """A number of the tables of one or more measurements, or several.

    Attributes:
        smooth: whether it changes little by little where texts are left out. Ranks, medians and
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
    """Numbers of something that is chosen on one half of the texts, such as a layer, and judged on
    the other half.

    The largest of several numbers is too large, and its jackknife is not consistent. On a corpus of
    three groups or fewer, both are done on all texts.

    Attributes:
        number: is given what was chosen after the tables.
        choose: what is chosen, from the tables.
    """

    choose: Callable[..., Any]


def largest(statistic: Statistic) -> Chosen:
    """The largest of several numbers, or the column of a table whose least is largest, chosen on
    half of the texts.

    Args:
        statistic: gives a Series, such as one number per layer, or a DataFrame, such as one column
            per dimension.
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
    """One number over another, which has no value where the interval of the latter holds zero.

    Attributes:
        both: gives the two numbers.
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
    """The tables of a measurement by name, made when first asked for.

    Attributes:
        report: what was read.
        layers: one row per layer: layer, stack (encoder, decoder, ...), part (the path of its
            block), width (dimensions of its hidden vectors), heads, key_heads and head_width
            (missing where it has no attention, or where no metric asked for it).
        run: parameters, model, data, versions and duration, as in ``run.json``.
        checkpoints: the file from which this measurement would go on, if it was kept; it can be
            deleted once the tables are saved.
    """

    def __init__(
        self, metrics: Iterable[Metric], report: Report, run: dict, checkpoints: Path | None = None
    ):
        super().__init__(
            {metric.name: metric for metric in metrics}, operator.methodcaller("table")
        )
        self.report = report
        self.layers = pd.DataFrame(report.layers).astype(dict.fromkeys(_SIZES, "Int64"))
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
        """What the model is called, see :func:`~analysis_lib.models.title`."""
        return title(self.run["model"])

    @property
    def groups(self) -> list[int]:
        """The groups over which intervals are: as many as the corpus has independent units, up to
        20.
        """
        return sorted(
            {group for metric in self._parts.values() for group in metric.occupied_groups()}
        )

    def smooth(self, name: str) -> bool:
        """Whether the numbers of a table change little by little where texts are left out."""
        return self._parts[name].smooth

    def interval(
        self, statistic: "Statistic | Plain | Ratio", *others: "Tables"
    ) -> Estimate | list[Estimate]:
        """One number computed from the tables, or several, with 95 % jackknife intervals over
        utterances.

        ``statistic`` is called on the tables of the whole corpus, then on those of the corpus
        without each of its groups of utterances in turn (which have no interval columns). With
        other measurements of the same corpus it is called on the tables of all of them: the same
        utterances are left out of each, so that what is particular to a text drops out of a
        difference. A number that jumps, such as a rank, is ``Plain(statistic, smooth=False)``.

        Returns:
            An estimate, which has no interval for a corpus of one utterance; of several numbers, a
            list of them.

        Raises:
            AnalysisError: another measurement read other texts.

        >>> entropy = lambda tables: tables["attention_entropy"]["entropy_nats"].mean()
        >>> print(tables.interval(entropy))  # doctest: +SKIP
        1.58 [1.57, 1.59]
        """
        return self.intervals({"": statistic}, *others)[""]

    def intervals(
        self, statistics: "Mapping[str, Statistic | Plain | Ratio]", *others: "Tables"
    ) -> dict[str, Estimate | list[Estimate]]:
        """The :meth:`interval` of each of several statistics: the tables without a group are made
        once for all.
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
        # The sums of layers are put together once for all tables without some groups.
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
            # What is chosen on every other group is judged on the rest.
            half, rest = (groups[::2], groups[1::2]) if len(groups) > 3 else ((), groups)
            of_half = without(*rest) if half else measured
            choices = {name: statistic.choose(*of_half) for name, statistic in chosen.items()}
            estimates |= _jackknifed(chosen, without, half, rest, choices)
        return {name: estimates[name] for name in statistics}

    def leave_out_what_fails(self) -> dict[str, str]:
        """Make every table; those that too little was read for are no more among them: by name,
        why.
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
        without: gives the tables without some groups.
        left_out: groups that are in none of the tables.
        groups: those of which the jackknife leaves one out at a time.
        choices: what each statistic is given after the tables, by name.
    """

    def numbers(*without_groups: int) -> dict[str, np.ndarray]:
        tables = without(*without_groups)
        values = {}
        for name, statistic in statistics.items():
            given = tables if choices is None else (*tables, choices[name])
            values[name] = _as_numbers(statistic.number(*given))
        return values

    whole = numbers(*left_out)
    # Without its only group there is nothing to compute a number from.
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
    """Write one file per table, Parquet or CSV, then the description: JSON of the run that also
    lists the tables.

    The description is written last: where it exists, so does every table it lists.

    Args:
        output: the folder, which is to be new, or one of the same command on the same inputs, whose
            tables go.
        run: what the description holds.
        form: of the tables.

    Raises:
        AnalysisError: the folder cannot be written, holds something else that would be lost, or a
            table cannot be made: then nothing is written.
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
