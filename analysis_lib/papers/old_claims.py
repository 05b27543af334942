"""The claims that are not in ``data/claims`` yet."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Comparison, Tables, grouped

TableSet = Mapping[str, pd.DataFrame]
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
VERDICTS = ("claim", "source", "quantity", "value", "ci_low", "ci_high", "bound", "verdict")


@dataclass(frozen=True)
class Claim:
    """A published claim as a number that lies above a bound if the claim is true.

    Attributes:
        source: paper and section.
        statement: what the paper says, transferred to a model of any depth.
        quantity: what is computed, in words.
        statistic: computes it from the tables of ``needs``.
        needs: the tables it reads.
        bound: the claim holds where the statistic is larger.
        limits: what the statistic cannot leave, and its interval neither.
        sampled: False where the statistic is itself a verdict on chance, such as a p-value: it decides alone, without
            an interval.
    """

    source: str
    statement: str
    quantity: str
    statistic: Callable[[TableSet], float]
    needs: tuple[str, ...]
    bound: float = 0.0
    limits: tuple[float, float] = (-math.inf, math.inf)
    sampled: bool = True


def verdict(low: float, high: float, bound: float) -> str:
    """``holds`` where the whole interval lies above the bound, ``does not hold`` below it, else ``undecided``.

    >>> verdict(0.1, 0.3, 0.0), verdict(-0.1, 0.3, 0.0), verdict(-0.3, -0.1, 0.0)
    ('holds', 'undecided', 'does not hold')
    """
    if low > bound:
        return HOLDS
    return FAILS if high <= bound else UNDECIDED  # NaN compares false both times: undecided


def verdicts(claims: Iterable[Claim], tables: Tables) -> pd.DataFrame:
    """Every claim with the number that decides it, its 95 % jackknife interval over utterances, and the verdict.

    Returns:
        Columns claim, source, quantity, value, ci_low, ci_high (missing where the claim has no interval), bound,
        verdict.
    """
    claims = list(claims)
    missing = {table for claim in claims for table in claim.needs} - set(tables)
    if missing:
        raise AnalysisError(f"these claims need the tables {', '.join(sorted(missing))}: measure them too")
    value = np.array([claim.statistic(tables) for claim in claims], dtype=float)
    low, high = np.full((2, len(claims)), math.nan)
    if sampled := [i for i, claim in enumerate(claims) if claim.sampled]:
        ends = tables.interval(lambda t: [claims[i].statistic(t) for i in sampled])[1:]
        low[sampled], high[sampled] = (np.clip(end, *np.transpose([claims[i].limits for i in sampled])) for end in ends)
    return decided(claims, value, low, high)


def decided(claims: Sequence[Claim], value: np.ndarray, low: np.ndarray, high: np.ndarray) -> pd.DataFrame:
    """The table of ``verdicts``, from the number of each claim and the ends of its interval."""
    bounds = [claim.bound for claim in claims]
    # What is not sampled decides by itself: an interval that is a point.
    alone = np.array([not claim.sampled for claim in claims])
    deciding = zip(np.where(alone, value, low), np.where(alone, value, high), bounds, strict=True)
    return pd.DataFrame(
        {
            "claim": [claim.statement for claim in claims],
            "source": [claim.source for claim in claims],
            "quantity": [claim.quantity for claim in claims],
            "value": value,
            "ci_low": low,
            "ci_high": high,
            "bound": bounds,
            "direction": "above",
            "verdict": [verdict(*numbers) for numbers in deciding],
        }
    )


# A value and the ends of its interval.
Estimate = tuple[float, float, float]
# Section, statement, quantity, bound and what was found.
EstimatedClaim = tuple[str, str, str, float, Estimate]


def estimated(claims: Iterable[EstimatedClaim], paper: str) -> pd.DataFrame:
    """The table of ``verdicts`` of claims whose number and interval are there already, as those over several seeds."""
    rows = [
        (statement, f"{paper}, {source}", quantity, *estimate, bound, verdict(*estimate[1:], bound))
        for source, statement, quantity, bound, estimate in claims
    ]
    return pd.DataFrame(rows, columns=list(VERDICTS)).assign(direction="above")


def verdicts_by_model(comparison: Comparison, claims_of: Callable[[Tables], Iterable[Claim]]) -> pd.DataFrame:
    """The verdicts on every model of a comparison, without the untrained twins.

    Args:
        comparison: with the tables that the claims need.
        claims_of: the claims to test on a model, from its tables: some depend on the widths of its layers.

    Returns:
        The column model, then those of ``verdicts``.
    """
    found = {model: verdicts(claims_of(tables), tables) for model, tables in comparison.trained.items()}
    return grouped(found, "model")
