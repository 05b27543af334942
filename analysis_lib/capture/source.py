"""Sources of activations: a model, or given vectors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from analysis_lib.capture.activations import (
    BESIDE,
    BLOCKS,
    EMBEDDINGS,
    LOGITS,
    LOSS,
    MASKED,
    OUTPUT,
    SCORES,
    SPACES,
    UNROTATED,
    WEIGHTS,
    Receive,
)
from analysis_lib.capture.batching import batches, unreadable
from analysis_lib.capture.checked_pass import check, lacking, run
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interventions import Changes
from analysis_lib.errors import AnalysisError, refuse_all
from analysis_lib.models import LoadedModel
from analysis_lib.models.devices import used
from analysis_lib.models.parts import Layout

# Inputs of metrics that the model's output provides.
OF_OUTPUTS = frozenset({OUTPUT, LOSS, MASKED, EMBEDDINGS})
# All inputs that a metric can need.
NEEDS = frozenset({*SPACES, WEIGHTS, BLOCKS, LOGITS, SCORES, BESIDE, *OF_OUTPUTS})
# Size of weights in bytes from which on the operations of a model occupy all threads.
LARGE = 2**30
WITHOUT_ATTENTION = frozenset({"hidden", "final", *OF_OUTPUTS})


class Source(ABC):
    """A source of activations, which reads items and passes on the activations of each layer.

    Attributes:
        model: the model, or the vectors themselves.
        runs_side_by_side: whether several threads, each with a :meth:`replica`, use the cores
            better than one batch.
    """

    model: Any
    runs_side_by_side = False

    @property
    def devices(self) -> list[str]:
        """The names of the devices that compute."""
        return [str(self.model.device)]

    @abstractmethod
    def unsupported(self, items: Sequence, settings: Settings) -> dict[str, str]:
        """Inputs of metrics that this source cannot provide, with the reason.

        A few of the items may be read to find out.
        """

    @abstractmethod
    def refuse_unreadable(self, items: Sequence) -> None:
        """Raise an AnalysisError that names every item that cannot be read."""

    @abstractmethod
    def batches(
        self, items: Sequence, groups: Sequence[int], settings: Settings, reading: Reading
    ) -> Iterator[Batch]:
        """The items as batches with their jackknife groups; ``reading`` counts the items."""

    @abstractmethod
    def run(
        self,
        batch: Batch,
        needs: frozenset[str],
        receive: Receive,
        maps: str = "flatten",
        changes: Changes | None = None,
    ) -> None:
        """Read a batch and call ``receive`` with the activations of each layer in turn."""

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Raise an AnalysisError if captured activations are not those the model computes."""

    def replica(self) -> "Source":
        """A copy for another thread, on the same weights."""
        return self


class ModelSource(Source):
    """A model, which computes its activations."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    @property
    def runs_side_by_side(self) -> bool:
        """Whether the model is small, on a CPU, and not held by the user's program.

        If threads share its many small operations, they wait for one another after each. A user's
        own model may carry hooks, and a model on several devices moves its weights: both run in one
        thread.
        """
        spec = self.model.spec
        if self.model.device.type != "cpu" or spec is None or spec.device_map:
            return False
        return sum(weight.nbytes for weight in self.model.model.parameters()) <= LARGE

    @property
    def devices(self) -> list[str]:
        return used(self.model.model)

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
        reasons[BESIDE] = "it compares two models, as `compare` does"
        layout = self.model.layout
        if not layout.embeddings:
            reasons[EMBEDDINGS] = (
                "it does not compare an image or a sound with a text, as CLIP does"
            )
        reasons |= without_rotation(layout)
        if all(attention.hooked for _, attention in self.model.attending):
            reasons[LOGITS] = "its attention shows weights, and no scores"
        return reasons | unsupported_by(layout)

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
    """Inputs of metrics that an architecture does not have, with the reason."""
    if layout.has_attention:
        return {}
    reason = "its attention is not captured" if layout.uncaptured else "it has no attention"
    return dict.fromkeys(NEEDS - WITHOUT_ATTENTION, reason)


def without_rotation(layout: Layout) -> dict[str, str]:
    """Vectors before rotation, if a model does not have them, with the reason."""
    attentions = [
        attention
        for stack in layout.stacks
        for attention in (*stack.each, stack.attention, *stack.further)
        if attention is not None
    ]
    if any(attention.may_rotate for attention in attentions):
        reason = "what its queries and keys are before rotation could not be shown"
    elif not any(attention.rotates for attention in attentions):
        reason = "it does not rotate queries and keys"
    else:
        return {}
    return dict.fromkeys(UNROTATED, reason)


def as_source(model: "LoadedModel | Source") -> Source:
    """The source itself if it is one (given vectors), or a model as a source."""
    return model if isinstance(model, Source) else ModelSource(model)
