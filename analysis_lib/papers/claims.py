"""Claims are data, in ``data/claims``; verdicts are computed, from the number that decides a claim and its interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
import yaml

from analysis_lib.corpora.packages import data_directory
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measurement import Comparison, Tables, grouped
from analysis_lib.metrics.intervals import seed_interval

PAPERS = {
    "godey": "Godey et al. 2024",
    "fosse": "Fosse et al. 2023",
    "maruta": "Maruta and Matsuzaki 2024",
}
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"

TableSet = Mapping[str, pd.DataFrame]
# Computes the number that decides a claim from the tables of a measurement.
Statistic = Callable[[TableSet], float]
# A value and the ends of its interval.
Estimate = tuple[float, float, float]


@dataclass(frozen=True)
class Claim:
    """A published claim, and the number that decides it.

    Attributes:
        id: its name, such as ``maruta-persistent-outlier``; the paper comes first.
        place: the section of the paper.
        sentence: what the paper says, in our words, transferred to a model of any depth.
        quantity: the number that decides, in words.
        statistic: the function that computes it, by its full name, which a cell of the page calls; or ``cell`` where
            the cell computes it.
        page: the page that tests it.
        rationale: why the bound is what it is, and when it was set.
        bound: the claim holds where the whole interval of the quantity lies beyond it.
        direction: ``above`` or ``below``: on which side of the bound the claim holds.
        limits: the range of the quantity, which its interval cannot leave.
        sampled: False where the quantity already is a statement about chance, such as a p-value: it decides
            alone, without an interval.
    """

    id: str
    place: str
    sentence: str
    quantity: str
    statistic: str
    page: str
    rationale: str
    bound: float = 0.0
    direction: str = "above"
    limits: tuple[float, float] = (-math.inf, math.inf)
    sampled: bool = True

    @property
    def source(self) -> str:
        """Paper and section."""
        return f"{PAPERS[self.id.partition('-')[0]]}, {self.place}"


@lru_cache
def load(paper: str) -> dict[str, Claim]:
    """The claims of a paper by their ids, in the order of ``data/claims/PAPER.yml``.

    Raises:
        AnalysisError: an unknown paper, or a file whose claims are not whole.
    """
    if paper not in PAPERS:
        raise AnalysisError(f"there are no claims of a paper {paper}: {near_names(paper, PAPERS)}")
    path = data_directory() / "claims" / f"{paper}.yml"
    try:
        claims = [Claim(**fields) for fields in yaml.safe_load(path.read_text(encoding="utf-8")) or []]
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise AnalysisError(f"{path} cannot be read as a list of claims: {error}") from error
    return {claim.id: claim for claim in claims}


def claim(name: str) -> Claim:
    """One claim by its id.

    Raises:
        AnalysisError: its paper has no such claim (with the nearest ids), or there is no such paper.
    """
    claims = load(name.partition("-")[0])
    if name not in claims:
        raise AnalysisError(f"there is no claim {name}: {near_names(name, claims)}")
    return claims[name]


def verdict(low: float, high: float, bound: float, direction: str = "above") -> str:
    """``holds`` where the whole interval lies on the claimed side of the bound, ``does not hold`` on the other.

    An interval that contains the bound, or that is missing, leaves the claim ``undecided``.

    >>> verdict(0.1, 0.3, 0.0), verdict(-0.1, 0.3, 0.0), verdict(-0.3, -0.1, 0.0)
    ('holds', 'undecided', 'does not hold')
    """
    if direction == "below":
        low, high, bound = -high, -low, -bound
    if low > bound:
        return HOLDS
    return FAILS if high <= bound else UNDECIDED  # NaN compares false both times: undecided


def verdicts(statistics: Mapping[str, Statistic], tables: Tables) -> pd.DataFrame:
    """Each claim with the number that decides it, its 95 % jackknife interval over utterances, and the verdict.

    Args:
        statistics: by the id of a claim, what computes its number from the tables.
        tables: of a measurement.

    Returns:
        As :func:`verdicts_of_estimates`.
    """
    sampled = {name: statistic for name, statistic in statistics.items() if claim(name).sampled}
    intervals = tables.interval(lambda t: [statistic(t) for statistic in sampled.values()])
    estimates = dict(zip(sampled, zip(*intervals, strict=True), strict=True))
    alone = {name: (statistics[name](tables), math.nan, math.nan) for name in statistics if name not in sampled}
    return verdicts_of_estimates({name: (estimates | alone)[name] for name in statistics})


def verdicts_of_estimates(estimates: Mapping[str, Estimate]) -> pd.DataFrame:
    """Each claim with the number that decides it, its interval, which is known already, and the verdict.

    Args:
        estimates: by the id of a claim, the value and the lower and upper end of its 95 % interval.

    Returns:
        One row per claim: id, claim (the sentence), source, quantity, value, ci_low and ci_high (missing where the
        claim has no interval), bound, direction, verdict.
    """
    rows = []
    for name, (value, low, high) in estimates.items():
        found = claim(name)
        low, high = np.clip((low, high), *found.limits) if found.sampled else (value, value)
        ends = (float(low), float(high)) if found.sampled else (math.nan, math.nan)
        side = (found.bound, found.direction)
        numbers = (float(value), *ends, *side, verdict(low, high, *side))
        rows.append((name, found.sentence, found.source, found.quantity, *numbers))
    columns = ["id", "claim", "source", "quantity", "value", "ci_low", "ci_high", "bound", "direction", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def verdicts_by_model(
    comparison: Comparison, statistics: Mapping[str, Statistic] | Callable[[Tables], Mapping[str, Statistic]]
) -> pd.DataFrame:
    """The verdicts on every model of a comparison, without the untrained twins.

    Args:
        comparison: with the tables that the statistics read.
        statistics: as of :func:`verdicts`, or what gives them for the tables of a model, where they depend on it.

    Returns:
        The column model, then those of :func:`verdicts_of_estimates`.
    """
    chosen = statistics if callable(statistics) else lambda _: statistics
    return grouped({model: verdicts(chosen(tables), tables) for model, tables in comparison.trained.items()}, "model")


def verdicts_over_seeds(numbers: pd.DataFrame) -> pd.DataFrame:
    """The verdicts on claims whose number has one value per seed; its mean decides, with Student's interval over seeds.

    Args:
        numbers: one column per claim, called by its id, and one row per seed; the last level of the index is the
            seed, and each value of the levels before, such as run and dataset, is judged for itself.

    Returns:
        These levels as columns, then those of :func:`verdicts_of_estimates`.
    """
    *levels, _ = numbers.index.names
    groups = numbers.groupby(levels[0] if len(levels) == 1 else levels, sort=False)
    found = {name: verdicts_of_estimates(rows.apply(seed_interval).to_dict("list")) for name, rows in groups}
    return pd.concat(found, names=levels).reset_index(levels).reset_index(drop=True)


def recorded(model: str) -> pd.DataFrame:
    """The verdicts on a model whose measurement comes with the book, see :func:`~analysis_lib.measurement.shipped`.

    Returns:
        The column model, then those of :func:`verdicts_of_estimates`.

    Raises:
        AnalysisError: no verdicts on the model come with the book.
    """
    path = data_directory() / "measurements" / model / "verdicts.csv"
    if not path.is_file():
        raise AnalysisError(f"no verdicts on {model} come with the book: data/README.md says which do")
    rows = pd.read_csv(path).set_index("id")[["value", "ci_low", "ci_high"]]
    return grouped({model: verdicts_of_estimates({name: tuple(row) for name, row in rows.T.items()})}, "model")


def published(name: str) -> pd.DataFrame:
    """A table that a paper prints, such as ``maruta_table1_contributions``.

    Raises:
        AnalysisError: no such table (with the nearest names).
    """
    folder = data_directory() / "reference"
    names = [path.stem for path in folder.glob("*.csv")]
    if name not in names:
        raise AnalysisError(f"there is no published table {name}: {near_names(name, names)}")
    return pd.read_csv(folder / f"{name}.csv")


def beside_published(found: pd.DataFrame, printed: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Numbers of several seeds beside published ones.

    Args:
        found: with the columns of ``on``, and value.
        printed: with the columns of ``on``, and published.
        on: what identifies a number, such as layers, layer and quantity.

    Returns:
        The columns of ``on``; mean and ``spread over seeds`` (the standard deviation), published, and ``difference in
        spreads``: how many spreads our mean lies above the published value, as text.
    """
    groups = found.groupby([*on], dropna=False)["value"]
    both = groups.agg(mean="mean", spread="std").reset_index().merge(printed, on=[*on], how="left")
    ratio = (both["mean"] - both["published"]) / both["spread"].where(both["spread"] > 0)
    # The spread of a few seeds does not carry more than one decimal of a ratio to it.
    difference = ["–" if pd.isna(number) else f"{number:+.1f}" for number in ratio]
    return both.rename(columns={"spread": "spread over seeds"}).assign(**{"difference in spreads": difference})
