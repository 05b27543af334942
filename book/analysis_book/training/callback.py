"""Measurements along a training by transformers' Trainer."""

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from analysis_lib.corpora import load_corpus
from analysis_lib.errors import AnalysisError, require_known, require_whole, shown
from analysis_lib.measurement import Tables, measure
from analysis_lib.measurement.comparison import SETTINGS
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import Metric

# The columns that say what a row of a table is about, the layer last.
KEYS = ("positions", "space", "token_type", "key_type", "layer")


class GeometryCallback(transformers.TrainerCallback):
    """Measure the model of a Trainer every so many steps, and log the numbers with its loss.

    The first measurement is before the first step. The training takes the same steps as without.

    Args:
        trainer: whose model is measured, with its ``processing_class``.
        data: as ``measure`` takes it; it is read once.
        metrics: as ``measure`` takes them.
        every: how many steps there are between measurements.
        numbers: from the tables, what is logged, by name; unless given, every quantity of the
            tables without dimensions, averaged over heads, as in
            ``geometry/anisotropy/cosine/hidden/layer_3``.
        column: of a table that is at hand, the texts.
        settings: of ``measure``.

    Attributes:
        tables: of every measurement, by step.

    >>> trainer.add_callback(GeometryCallback(trainer, texts, every=100))  # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        data: object,
        metrics: str | Iterable[str | Metric] = "anisotropy",
        *,
        every: int = 500,
        numbers: Callable[[Mapping[str, pd.DataFrame]], Mapping[str, float]] | None = None,
        column: str | None = None,
        **settings,
    ):
        if not isinstance(trainer, transformers.Trainer):
            raise AnalysisError(f"the trainer is {shown(trainer)}: give a Trainer of transformers")
        if is_spread(trainer):
            raise AnalysisError(
                "the weights of this training are spread over its processes, all of which a "
                "forward pass needs: leave the callback out, and measure the checkpoints with "
                "`analysis-lib dynamics FOLDER`"
            )
        require_whole("every", every, 1)
        require_known("setting of measure", settings, SETTINGS)
        if numbers is not None and not callable(numbers):
            raise AnalysisError(f"numbers is {shown(numbers)}: give a function of the tables")
        self.trainer = trainer
        self.every = every
        self.settings = {"progress": False, **settings}
        self.corpus = load_corpus(data, column=column)
        self.metrics = resolve(metrics)
        self.numbers = numbers or self._quantities
        self.tables = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Before the first step."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """After every step."""
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            reads = self.trainer.processing_class
            tables = measure(
                self.trainer.model, self.corpus, self.metrics, processor=reads, **self.settings
            )
            self.tables[state.global_step] = tables
            # Logging takes back that the Trainer wanted to log its loss at this step.
            wanted = control.should_log
            self.trainer.log(dict(self.numbers(tables)))
            control.should_log = wanted

    @staticmethod
    def _quantities(tables: Tables) -> dict[str, float]:
        quantities = {}
        for name, table in tables.items():
            if "dimension" in table:
                continue
            by = [column for column in KEYS if column in table]
            numbers = table.select_dtypes("float").join(table[by])
            numbers = numbers.drop(columns=["ci_low", "ci_high"], errors="ignore")
            means = numbers.groupby(by, sort=False, observed=True).mean()
            for (*about, layer, quantity), value in means.stack().items():
                path = ("geometry", name, quantity, *about, f"layer_{layer}")
                quantities["/".join(path)] = float(value)
        return quantities


def is_spread(trainer: transformers.Trainer) -> bool:
    """Whether each process holds a part of the weights alone: FSDP, ZeRO-3, tensor parallelism.

    One process that measures by itself would wait for the others for ever.
    """
    if trainer.is_fsdp_enabled or any(map(_is_spread, trainer.model.modules())):
        return True
    settings = getattr(trainer.args, "hf_deepspeed_config", None)
    return trainer.is_deepspeed_enabled and settings is not None and settings.is_zero3()


def _is_spread(module: nn.Module) -> bool:
    """Whether a module, or a weight of its own, is spread, whoever has done it."""
    if isinstance(module, FullyShardedDataParallel | FSDPModule):
        return True
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False))
