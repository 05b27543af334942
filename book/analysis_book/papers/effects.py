"""The effects of changes on the output of a model.

``Effects(model, corpus, {"zero": [Replace("key", by="zero")]})``.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis_lib.capture.interventions import Replace
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.measuring import measure, measure_sensible
from analysis_lib.measurement.tables import Tables, TableSet
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import LoadedModel

# What is looked at, the first that a model has: its table and column, the sign of an effect, and
# what that is called.
OUTPUTS = {
    "next_token_loss": ("loss", 1, "added loss of the next token, nats"),
    "masked_token_loss": ("loss", 1, "added loss of masked tokens, nats"),
    "output_change": ("cosine", -1, "1 − cosine of the outputs"),
}


class Effects:
    """The effect of each of several changes on the output of a model.

    An effect is by how much the loss grows where the model predicts tokens, else 1 less the cosine
    of a vector that it gives out to the one without the change. It is 0 where nothing changes.

    Attributes:
        left_out: the changes that the model has no place for, and why.
        unit: what an effect is.

    Args:
        arms: by name, changes of which each is made alone, such as several draws; their effects are
            averaged.

    Raises:
        AnalysisError: what ``measure`` raises of the model without a change.
    """

    def __init__(
        self,
        model: LoadedModel,
        corpus: Corpus,
        arms: Mapping[str, Iterable[Replace]],
    ):
        self._plain = measure_sensible(model, corpus, [*OUTPUTS], progress=False)
        self._table = next(name for name in OUTPUTS if name in self._plain)
        self._column, self._sign, self.unit = OUTPUTS[self._table]
        self._changed: dict[str, list[Tables]] = {}
        self.left_out: dict[str, str] = {}
        for arm, changes in arms.items():
            runs = []
            try:
                for change in changes:
                    run = measure(model, corpus, self._table, intervention=change, progress=False)
                    runs.append(run)
                self._changed[arm] = runs
            except AnalysisError as error:
                reason = str(error).replace(model.name, "the model")
                self.left_out[arm] = reason

    def table(self) -> pd.DataFrame:
        """Columns arm, effect, and the ends of its 95 % interval, paired over texts."""
        effects = self._plain.interval(self._effects, *self._runs)
        return self._rows([*self._changed], effects)

    def differences(self, first: "Effects") -> pd.DataFrame:
        """How much larger the effects are than those on another model, as :meth:`table`.

        Of changes that both have.
        """
        both = []
        if self._table == first._table:
            both = [arm for arm in self._changed if arm in first._changed]
        if not both:
            return self._rows([], [])
        mine = 1 + len(self._runs)

        def difference(*tables: TableSet) -> pd.Series:
            effects = self._effects(*tables[:mine])[both]
            return effects - first._effects(*tables[mine:])[both]

        others = (*self._runs, first._plain, *first._runs)
        differences = self._plain.interval(difference, *others)
        return self._rows(both, differences)

    @property
    def _runs(self) -> list[Tables]:
        return [*itertools.chain(*self._changed.values())]

    def _effects(self, plain: TableSet, *changed: TableSet) -> pd.Series:
        """By arm, from the tables in the order of the runs."""
        arms = []
        for arm, runs in self._changed.items():
            arms += [arm] * len(runs)
        before = self._output(plain)
        values = np.array([self._output(tables) for tables in changed])
        effects = pd.Series(self._sign * (values - before), arms)
        return effects.groupby(level=0, sort=False).mean()

    def _output(self, tables: TableSet) -> float:
        return tables[self._table][self._column].iloc[0]

    def _rows(self, arms: list[str], estimates: list[Estimate]) -> pd.DataFrame:
        numbers = [estimate.row for estimate in estimates]
        columns = ["effect", "ci_low", "ci_high"]
        rows = pd.DataFrame(numbers, columns=columns, dtype=float)
        return rows.assign(arm=arms, unit=self.unit)
