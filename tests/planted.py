"""Planted tables, and the verdicts on them."""

from collections.abc import Mapping

import numpy as np

from analysis_lib.papers import claims


class Planted(dict):
    """Tables without a model: what ``claims.verdicts`` needs, with an interval that reaches so far on each side."""

    def __init__(self, tables=(), reach: float = 0.0, **more):
        super().__init__(tables, **more)
        self.reach = reach

    def interval(self, statistic):
        value = np.asarray(statistic(self), dtype=float)
        return value, value - self.reach, value + self.reach


def verdicts_of(statistics: Mapping[str, claims.Statistic], **tables) -> list[str]:
    return claims.verdicts(statistics, Planted(tables))["verdict"].tolist()
