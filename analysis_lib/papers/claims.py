"""Claims are data, in ``data/claims``; verdicts are computed, from the number that decides a claim and its interval."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
import yaml

from analysis_lib.corpora import packages
from analysis_lib.corpora.packages import data_directory
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.figures import Table
from analysis_lib.measurement import Comparison, Tables, grouped
from analysis_lib.metrics.intervals import CONFIDENCE, holm, seed_interval, two_sided_p

PAPERS = {
    "godey": "Godey et al. 2024",
    "fosse": "Fosse et al. 2023",
    "maruta": "Maruta and Matsuzaki 2024",
}
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"

TableSet = Mapping[str, pd.DataFrame]
# Computes the number that decides a claim from the tables of a measurement.
Statistic = Callable[[TableSet], float]
# A value, the ends of its 95 % interval, and how many seeds, or groups of independent units, that is over, if known.
Estimate = tuple[float, ...]
# An interval over fewer says over how many.
FEW_DRAWS = 8


@dataclass(frozen=True)
class Claim:
    """A published claim, and the number that decides it.

    Attributes:
        id: its name, such as ``maruta-persistent-outlier``; the paper comes first.
        place: the section of the paper.
        setting: the models and data that the paper judges it on.
        sentence: what the paper says, in our words, transferred to a model of any depth.
        quantity: the number that decides, in words.
        statistic: the function that computes it, by its full name, which a cell of the page calls; or ``cell`` where
            the cell computes it.
        page: the page that tests it.
        figures: by name, those that show the number that decides, at most one on each page that tests it.
        rationale: why the bound is what it is, and when it was set.
        bound: the claim holds where the whole interval of the quantity lies beyond it.
        direction: ``above`` or ``below``: on which side of the bound the claim holds.
        limits: the range of the quantity, which its interval cannot leave.
        needs: what has to be measured for a verdict.
    """

    id: str
    place: str
    setting: str
    sentence: str
    quantity: str
    statistic: str
    page: str
    rationale: str
    bound: float = 0.0
    direction: str = "above"
    limits: tuple[float, float] = (-math.inf, math.inf)
    needs: str = "a run of its page"
    figures: Sequence[str] = ()

    @property
    def source(self) -> str:
        """Paper, section, and what it judges the claim on."""
        return f"{PAPERS[self.id.partition('-')[0]]}, {self.place}; {self.setting}"


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
    intervals = tables.interval(lambda t: [statistic(t) for statistic in statistics.values()])
    estimates = ((*ends, len(tables.groups)) for ends in zip(*intervals, strict=True))
    return verdicts_of_estimates(dict(zip(statistics, estimates, strict=True)))


def verdicts_of_estimates(estimates: Mapping[str, Estimate]) -> pd.DataFrame:
    """Each claim with the number that decides it, its interval, which is known already, and the verdict.

    Args:
        estimates: by the id of a claim.

    Returns:
        One row per claim: id, claim (the sentence), source, quantity, value, ci_low and ci_high (missing where the
        number has no interval), draws (as of ``Estimate``), p (of the value if the truth lay at the bound), bound,
        direction, rationale, verdict.
    """
    rows = []
    for name, numbers in estimates.items():
        found, (value, low, high, draws, *_) = claim(name), (*map(float, numbers), math.inf)
        side = (found.bound, found.direction)
        ends = np.clip((low, high), *found.limits).tolist()
        p = two_sided_p(value, low, high, found.bound, draws)
        what = (name, found.sentence, found.source, found.quantity)
        rows.append((*what, value, *ends, draws, p, *side, found.rationale, verdict(*ends, *side)))
    columns = ["id", "claim", "source", "quantity", "value", "ci_low", "ci_high", "draws", "p"]
    return pd.DataFrame(rows, columns=[*columns, "bound", "direction", "rationale", "verdict"])


def corrected(verdicts: pd.DataFrame) -> pd.Series:
    """The verdicts if those of all rows are to be right at once: Holm (1979), at the level of the intervals."""
    raised = pd.Series(holm([*verdicts["p"]]), verdicts.index)
    return verdicts["verdict"].mask(raised > 1 - CONFIDENCE, UNDECIDED)


def told(verdicts: pd.Series, after: pd.Series, mark: str = "", words: str = " (after Holm: {})") -> pd.Series:
    """Verdicts for a sentence: each between marks, followed by what :func:`corrected` made of it where that differs.

    >>> [*told(pd.Series([HOLDS, FAILS]), pd.Series([UNDECIDED, FAILS]), "**")]
    ['**holds** (after Holm: undecided)', '**does not hold**']
    """
    corrections = pd.Series([words.format(verdict) for verdict in after], after.index, dtype=str)
    return mark + verdicts + mark + corrections.where(after != verdicts, "")


def verdict_table(verdicts: pd.DataFrame, name: str, caption: str) -> Table:
    """The verdicts as a numbered table: each, as it is and after :func:`corrected`; the claim; the number; the bound.

    What they are about comes first: the model, and of dataset, variant, classes and stage those in which the rows
    differ, so that the number stays in sight on a phone. What decides a claim, its source and its bound are explained
    where it comes first. The verdicts are in the metadata of the output, as ``verdicts``.
    """
    after = corrected(verdicts)
    rows = [*zip(verdicts.itertuples(), ~verdicts["id"].duplicated(), strict=True)]
    columns = {
        "verdict": told(verdicts["verdict"], after, "**", " after Holm: **{}**"),
        "number that decides, with 95 % interval": [
            f"**{'none' if np.isnan(row.value) else f'{row.value:z.3f}'}**"
            + interval(row.ci_low, row.ci_high, row.draws)
            + f": {row.quantity}" * first
            for row, first in rows
        ],
        "claim, and what the paper judged it on": [row.claim + f" ({row.source})" * first for row, first in rows],
        "what the claim needs, and why": [
            f"{row.direction} {row.bound:g}" + f". {row.rationale}" * first for row, first in rows
        ],
    }
    groups = [group for group in ("stage", "dataset", "model", "variant", "classes") if group in verdicts]
    telling = [group for group in groups if group == "model" or verdicts[group].nunique(dropna=False) > 1]
    for group in telling or groups[:1]:
        columns = {group: verdicts[group], **columns}
    tested = int(verdicts["p"].notna().sum())
    if tested > 1:
        caption += (
            f" Of {tested} claims with an interval, {tested * (1 - CONFIDENCE) / 2:.2g} would hold by chance if every "
            f"number lay at its bound; *after Holm* is the verdict on all of them together, where it differs."
        )
    # In full precision, for those who gather the verdicts of the pages.
    records = json.loads(verdicts.drop(columns="rationale").assign(table=name).to_json(orient="records"))
    return Table(pd.DataFrame(columns), name, caption, metadata={"verdicts": records})


def interval(low: float, high: float, draws: float) -> str:
    """An interval in words, empty where there is none; one over few draws says over how many.

    >>> interval(0.1, 0.2, 20.0), interval(0.1, 0.2, 5.0)
    (' [0.100, 0.200]', ' [0.100, 0.200] over 5')
    """
    few = f" over {draws:g}" if draws < FEW_DRAWS else ""
    return "" if np.isnan(low) else f" [{low:z.3f}, {high:z.3f}]{few}"


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
    found = {
        name: verdicts_of_estimates({i: (*seed_interval(rows[i]), len(rows)) for i in rows}) for name, rows in groups
    }
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
    rows = (
        packages.read(path, pd.read_csv)
        .set_index("id")[["value", "ci_low", "ci_high", "draws"]]
        .fillna({"draws": math.inf})
    )
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
    return packages.read(folder / f"{name}.csv", pd.read_csv)
