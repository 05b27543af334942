"""What changes do to what a model gives out: ``Effects(model, corpus, {"zero": [Replace("key",
by="zero")]})``.
"""

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
    """What each of several changes does to the output of a model.

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
            try:
                several = [
                    measure(model, corpus, self._table, intervention=c, progress=False)
                    for c in changes
                ]
                self._changed[arm] = several
            except AnalysisError as error:
                self.left_out[arm] = str(error).replace(model.name, "the model")

    def table(self) -> pd.DataFrame:
        """Columns arm, effect, and the ends of its 95 % interval, paired over texts."""
        return self._rows([*self._changed], self._plain.interval(self._effects, *self._runs))

    def differences(self, first: "Effects") -> pd.DataFrame:
        """How much larger the effects are than those on another model, as :meth:`table`; of changes
        that both have.
        """
        both = [
            arm for arm in self._changed if arm in first._changed and self._table == first._table
        ]
        mine = 1 + len(self._runs)

        def difference(*tables: TableSet) -> pd.Series:
            return self._effects(*tables[:mine])[both] - first._effects(*tables[mine:])[both]

        found = (
            self._plain.interval(difference, *self._runs, first._plain, *first._runs)
            if both
            else []
        )
        return self._rows(both, found)

    @property
    def _runs(self) -> list[Tables]:
        return [run for several in self._changed.values() for run in several]

    def _effects(self, plain: TableSet, *changed: TableSet) -> pd.Series:
        """By arm, from the tables in the order of the runs."""
        names = [arm for arm, several in self._changed.items() for _ in several]
        values = np.array([t[self._table][self._column].iloc[0] for t in (plain, *changed)])
        return (
            pd.Series(self._sign * (values[1:] - values[0]), names)
            .groupby(level=0, sort=False)
            .mean()
        )

    def _rows(self, arms: list[str], found: list[Estimate]) -> pd.DataFrame:
        rows = [one.row for one in found]
        return pd.DataFrame(rows, columns=["effect", "ci_low", "ci_high"], dtype=float).assign(
            arm=arms, unit=self.unit
        )
