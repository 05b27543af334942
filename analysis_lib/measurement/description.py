"""Descriptions of measurements, as in ``run.json``, and notes for readers of their tables."""

import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from analysis_lib import capture, store
from analysis_lib.capture.given import GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.paired import ModelPair
from analysis_lib.corpora import PLURAL, Corpus
from analysis_lib.measurement.tables import Report
from analysis_lib.measurement.versions import formulas
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.intervals import FEW_UNITS
from analysis_lib.models import LoadedModel, ModelName
from analysis_lib.models.pairs import MEDIA

# Share of unknown tokens from which on a note says so, and from which on numbers are unreliable.
SOME_UNKNOWN, MUCH_UNKNOWN = 0.01, 0.1
# Names of training checkpoints: of Trainer, of ``pretrain``, and of the MultiBERTs.
CHECKPOINT_NAME = re.compile(r"checkpoint-\d+|(multiberts-)?seed_\d+-step_\d+k?")
# Packages whose versions a description has.
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pandas", "scipy")


@dataclass(frozen=True)
class Subject:
    """A model and a corpus with settings, as they are described before anything is read.

    Attributes:
        run: their entries of ``run.json``.
        longest: the longest text or sound that the model reads at once; empty where nothing is cut.
        uncaptured: the modules whose attention is not captured.
    """

    run: dict[str, object]
    longest: str
    uncaptured: list[str]

    @classmethod
    def of(
        cls, model: LoadedModel | GivenVectors | ModelPair, corpus: Corpus, settings: Settings
    ) -> Self:
        """The subject of a measurement."""
        written = settings.described()
        if not model.layout.maps:
            # ``maps`` has no effect on models without feature maps.
            written["maps"] = None
        run = {
            "model": model.name,
            "model_revision": model.revision,
            "model_files": model.files,
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "data": corpus.name,
            "data_sha256": corpus.sha256,
            "kind": corpus.kind,
            "texts": len(corpus),
            **units_of(corpus),
            "blank_left_out": corpus.blank,
            "settings": written,
            "threads": torch.get_num_threads(),
            "versions": {name: store.installed_version(name) for name in PACKAGES},
        }
        longest = ""
        if corpus.kind in ("text", "audio", *MEDIA):
            reader = model.shortest if isinstance(model, ModelPair) else model
            longest = capture.longest(reader, settings)
        return cls(run, longest, list(model.layout.uncaptured))

    def described(
        self, report: Report, metrics: Iterable[Metric], seconds: float
    ) -> dict[str, object]:
        """The description of a measurement, as in ``run.json``.

        Args:
            report: counts of what was read.
            metrics: those that were measured.
            seconds: how long it took.
        """
        counts = asdict(report)
        more = {name: counts.pop(name) for name in ("layers", "devices")}
        return {
            **self.run,
            **more,
            "report": counts,
            "notes": self._notes(report),
            "seconds": round(seconds, 3),
            "formulas": formulas(metrics),
        }

    def _notes(self, report: Report) -> list[str]:
        """Notes for readers of the tables about how the corpus was read."""
        blank = self.run["blank_left_out"]
        plural = PLURAL[self.run["kind"]]
        items = f"of {self.run['texts'] + blank} {plural}"
        notes = []
        if self.uncaptured:
            others = len(self.uncaptured) - 1
            more = f" and of {others} more modules" if others else ""
            notes.append(
                f"the attention of {self.uncaptured[0]}{more} is not captured, and in no table"
            )
        empty = blank + report.empty
        if empty:
            notes.append(f"{empty} {items} are blank or hold no token, and are left out")
        limit = f"the {self.longest} that are read"
        if report.cut:
            notes.append(f"{report.cut} {items} are longer than {limit}, and are cut there")
        if report.windowed:
            how = "are read in windows"
            notes.append(f"{report.windowed} {items} are longer than {limit}, and {how}")
        unknown = report.unknown / max(report.tokens, 1)
        if unknown >= SOME_UNKNOWN:
            note = f"its tokenizer does not know {unknown:.0%} of the tokens"
            if unknown > MUCH_UNKNOWN:
                note += ", so that its numbers say little of these texts"
            notes.append(note)
        if report.spelt:
            notes.append(
                f"{report.spelt} special tokens are spelt out in the texts, and count as their own"
            )
        if report.doubled:
            notes.append(
                f"{report.doubled} texts begin with a token that its tokenizer puts before them: "
                "leave it out"
            )
        if report.without_text:
            notes.append(
                f"{report.without_text} {items} have no text, so that its decoder reads the tokens "
                "alone that begin one"
            )
        if report.unanswered:
            note = f"{report.unanswered} conversations end without an answer of the assistant"
            notes.append(note)
        if report.halved:
            notes.append(
                "its batches did not fit the memory, and were made smaller: a smaller "
                "tokens_per_batch saves the attempt"
            )
        zeros = sum(report.zero_vectors.values())
        if zeros:
            notes.append(f"{zeros} zero vectors have no direction and enter no cosine")
        longest = max(report.long.values(), default=0)
        if longest:
            notes.append(
                f"of {longest} of {report.tokens} tokens in some layer the vector is too long to "
                "count"
            )
        units = self.run["units"]
        if units == 1:
            notes.append(f"its {plural} are one unit, so that there are no intervals")
        elif units < FEW_UNITS:
            notes.append(f"its intervals rest on {units} independent units, and are rough")
        return notes


def units_of(corpus: Corpus) -> dict[str, object]:
    """The units of intervals: the name of their column, if any, and their number."""
    count = len(corpus) if corpus.units is None else len({*corpus.units})
    return {"unit_column": corpus.unit_column, "units": count}


def say(model: str, notes: Iterable[str]) -> None:
    """Log notes about a model."""
    # The checkpoints of a run are read alike, and so are a model and its untrained twins: one note
    # is enough.
    whole = Path(ModelName.parse(model).trained)
    subject = whole.parent if CHECKPOINT_NAME.fullmatch(whole.name) else whole
    for words in notes:
        about = {"subject": f"model {subject}"}
        logging.getLogger(__name__).warning("note: %s: %s", Path(model).name, words, extra=about)


def say_left_out(model: str, reasons: dict[str, str]) -> None:
    """Log the metrics that are left out, by reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, why in reasons.items() if why == reason)
        say(model, [f"left out: {names} ({reason})"])
