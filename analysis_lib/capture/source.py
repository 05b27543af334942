"""What a measurement reads: a model, or vectors that are given."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from analysis_lib.capture.activations import (
    BLOCKS,
    LOSS,
    MASKED,
    OUTPUT,
    SCORES,
    SPACES,
    WEIGHTS,
    Receive,
)
from analysis_lib.capture.batching import batches, unreadable
from analysis_lib.capture.checked_pass import check, lacking, run
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.errors import AnalysisError, refuse_all
from analysis_lib.models import LoadedModel
from analysis_lib.models.parts import Layout

# All that a metric can need, and of it what there is without attention.
NEEDS = frozenset({*SPACES, WEIGHTS, BLOCKS, SCORES, OUTPUT, LOSS, MASKED})
# The weights of a large model, in bytes, whose operations occupy all threads.
LARGE = 2**30
WITHOUT_ATTENTION = frozenset({"hidden", "final", OUTPUT, LOSS, MASKED})


class Source(ABC):
    """A reader of items, which hands on the activations of each layer.

    Attributes:
        model: what is read: the model, or the vectors themselves.
        runs_side_by_side: whether several threads, each with a :meth:`replica`, use the cores
            better than one batch.
    """

    model: Any
    runs_side_by_side = False

    @abstractmethod
    def unsupported(self, items: Sequence, settings: Settings) -> dict[str, str]:
        """What metrics may need and this cannot give, and why; a few of the items tell it."""

    @abstractmethod
    def refuse_unreadable(self, items: Sequence) -> None:
        """Raise an AnalysisError that names every item that cannot be read."""

    @abstractmethod
    def batches(
        self, items: Sequence, groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[Batch]:
        """The items as batches, with the jackknife group of each; ``reading`` counts them."""

    @abstractmethod
    def run(
        self,
        batch: Batch,
        needs: frozenset[str],
        receive: Receive,
        maps: str = "flatten",
        changes: Changes | None = None,
    ) -> None:
        """Read a batch: ``receive`` is called with the activations of each layer in turn."""

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Raise an AnalysisError if what is captured of a batch is not what the model computes."""

    def replica(self) -> "Source":
        """One that another thread reads, on the same weights."""
        return self


class ModelSource(Source):
    """A model, which computes the activations."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    @property
    def runs_side_by_side(self) -> bool:
        """Whether a small model on a CPU that nobody else holds.

        Its many small operations wait for one another between any two, if threads share them. Hooks
        of a model that a program holds may be anybody's, and a model on several devices moves its
        weights.
        """
        spec = self.model.spec
        if self.model.device.type != "cpu" or spec is None or spec.device_map:
            return False
        return sum(weight.nbytes for weight in self.model.model.parameters()) <= LARGE

    def check(self, batch: Batch) -> None:
        check(self.model, batch)

    def replica(self) -> "ModelSource":
        return ModelSource(self.model.replica())

    def unsupported(self, items: Sequence, settings: Settings) -> dict[str, str]:
        try:
            reasons = dict(lacking(self.model, items[:2], settings))
        except AnalysisError:
            self.refuse_unreadable(items)
            raise
        if any(change.where == "key" for change in settings.intervention):
            reasons[SCORES] = (
                "its keys are changed after they are made, so that no dimension has a share in them"
            )
        return reasons | unsupported_by(self.model.layout)

    def refuse_unreadable(self, items: Sequence) -> None:
        refuse_all(unreadable(self.model, items))

    def batches(
        self, items: Sequence, groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[Batch]:
        return batches(self.model, items, groups, settings, reading)

    def run(
        self,
        batch: Batch,
        needs: frozenset[str],
        receive: Receive,
        maps: str = "flatten",
        changes: Changes | None = None,
    ) -> None:
        run(self.model, batch, needs, receive, maps, changes)


def unsupported_by(layout: Layout) -> dict[str, str]:
    """What metrics may need and an architecture has not, and why."""
    if layout.has_attention:
        return {}
    reason = "its attention is not captured" if layout.uncaptured else "it has no attention"
    return dict.fromkeys(NEEDS - WITHOUT_ATTENTION, reason)


def as_source(model: "LoadedModel | Source") -> Source:
    """A model as a source; vectors that are given are one."""
    return model if isinstance(model, Source) else ModelSource(model)
