"""Claims are data, in ``data/claims``; verdicts are computed, from numbers and their intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import yaml

from analysis_book.figures import OUTCOMES, SCOPES, Verdicts
from analysis_book.papers.counts import Settled, pooled
from analysis_lib import corpora, files, measurement
from analysis_lib.corpora import PLURAL
from analysis_lib.errors import AnalysisError, near_names, require_text, shown
from analysis_lib.files import data_directory
from analysis_lib.metrics.intervals import (
    CONFIDENCE,
    FEW_UNITS,
    Estimate,
    least,
    seed_and_unit_interval,
    seed_interval,
)
from analysis_lib.models import title

# The site reads claims and their verdicts without a model, and need not wait for torch.
if TYPE_CHECKING:
    from analysis_book.training.dynamics import Dynamics
    from analysis_lib.measurement import Plain, Ratio, Shipped, Tables
    from analysis_lib.measurement.tables import Statistic

PAPERS = {
    "godey": "Godey et al. 2024",
    "fosse": "Fosse et al. 2023",
    "maruta": "Maruta and Matsuzaki 2024",
    "queipo": "Queipo-de-Llano et al. 2025",
    "li": "Li et al. 2025",
    "qiu": "Qiu et al. 2026",
    "fesser": "Fesser et al. 2026",
    "mao": "Mao et al. 2026",
    "wertheimer": "Wertheimer et al. 2026",
    # Predictions of this book, written down before they were computed.
    "causes": "this book",
}
HOLDS, SMALL, FAILS, UNDECIDED, NO_INTERVAL, NOT_APPLICABLE = OUTCOMES
DECIDED = (HOLDS, SMALL, FAILS)
# In the models of a claim: it is about every model, such as a statement on an equation.
ANY = "any"
OWN_SETTING, ELSEWHERE, OURS = SCOPES


@dataclass(frozen=True)
class Claim:
    """A published claim, and the number that decides it.

    Attributes:
        id: its name, such as ``maruta-persistent-outlier``; the paper comes first.
        place: the section of the paper.
        setting: the models and data that the paper judges it on, in words.
        models: the titles of these models; of one of "any", the sentence is about every model.
        corpora: the titles of the corpora that they were trained and judged on; empty where the
            sentence is about models, whatever they read.
        confined: whether the sentence says something of these corpora alone.
        ours: whether no paper makes the claim: a prediction, or a paper's claim carried over.
        sentence: what the paper says, in our words, transferred to a model of any depth.
        quantity: the number that decides, in words.
        statistic: the function that computes it, by its full name, which a cell of the page calls;
            or ``cell`` where the cell computes it.
        page: the page that tests it.
        figures: by name, those that show the number that decides.
        rationale: why the bound is what it is, and when it was set.
        bound: the claim holds where the whole interval of the quantity lies beyond it.
        turn: where the sentence turns from true to false, if the bound is another one, which asks
            for more: between the two, the claim holds, but little.
        direction: ``above`` or ``below``: on which side of the bound the claim holds.
        limits: the range of the quantity, which its interval cannot leave.
        needs: what has to be measured for a verdict.
        formula: the section of the notation page that has it, such as ``anisotropy``.
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
    turn: float | None = None
    direction: str = "above"
    limits: tuple[float, float] = (-math.inf, math.inf)
    needs: str = "a run of its page"
    models: Sequence[str] = ()
    corpora: Sequence[str] = ()
    confined: bool = False
    ours: bool = False
    figures: Sequence[str] = ()
    formula: str = ""

    @property
    def source(self) -> str:
        """Paper, section, and what it judges the claim on."""
        after = "after " if self.ours and not self.is_prediction else ""
        return f"{after}{PAPERS[self.id.partition('-')[0]]}, {self.place}; {self.setting}"

    @property
    def paper(self) -> str:
        """Whose claim it is."""
        return PAPERS["causes"] if self.ours else PAPERS[self.id.partition("-")[0]]

    @property
    def is_prediction(self) -> bool:
        """True if the book made it up before the number was computed."""
        return self.id.startswith("causes-")

    def judged_on(self, model: object = None, dataset: object = None) -> str:
        """Which of ``SCOPES`` a verdict on a model, trained on a corpus, is about."""
        if self.ours:
            return OURS
        is_model = ANY in self.models or model in self.models
        is_corpus = not self.corpora or dataset in self.corpora
        return OWN_SETTING if is_model and is_corpus else ELSEWHERE


@lru_cache
def load(paper: str) -> dict[str, Claim]:
    """The claims of a paper by their ids, in the order of ``data/claims/PAPER.yml``.

    Raises:
        AnalysisError: an unknown paper, or a file whose claims are not whole.
    """
    if not isinstance(paper, str) or paper not in PAPERS:
        raise AnalysisError(
            f"there are no claims of a paper {shown(paper)}: {near_names(str(paper), PAPERS)}"
        )
    path = data_directory() / "claims" / f"{paper}.yml"
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        claims = [Claim(**fields) for fields in rows]
        nobody_s = [claim.id for claim in claims if not (claim.models or claim.ours)]
        if nobody_s:
            raise TypeError(f"{nobody_s[0]} says neither its models nor that it is ours")
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise AnalysisError(f"{path} cannot be read as a list of claims: {error}") from error
    return {claim.id: claim for claim in claims}


def claim(name: str) -> Claim:
    """One claim by its id.

    Raises:
        AnalysisError: its paper has no such claim (with the nearest ids), or there is no such
            paper.
    """
    require_text("a claim", name, "its id, as in godey-drift-norms")
    claims = load(name.partition("-")[0])
    if name not in claims:
        raise AnalysisError(f"there is no claim {name}: {near_names(name, claims)}")
    return claims[name]


def verdict(
    estimate: Estimate,
    bound: float,
    direction: str = "above",
    turn: float | None = None,
) -> str:
    """The verdict on a claim, by the side of the bound that an estimate lies on.

    It ``holds`` where the whole interval lies on the claimed side, and ``does not hold`` where it
    lies on the other. An interval that contains the bound leaves the claim ``undecided``. A number
    that has no interval decides nothing (``no interval``), and where there is no number the claim
    is ``not applicable``. Where the sentence turns at another number than the bound, it ``holds,
    small`` if the whole interval lies on the claimed side of that one alone.

    >>> intervals = (0.1, 0.3), (-0.1, 0.5), (math.nan, math.nan)
    >>> [verdict(Estimate(0.2, *ends), 0.0) for ends in intervals]
    ['holds', 'undecided', 'no interval']
    >>> verdict(Estimate(0.2, 0.1, 0.3), 0.5, turn=0.0)
    'holds, small'
    """
    if math.isnan(estimate.value):
        return NOT_APPLICABLE
    side = estimate.side(bound)
    if not side:
        return NO_INTERVAL
    if side == direction:
        return HOLDS
    if turn is not None:
        side = estimate.side(turn)
        if side == direction:
            return SMALL
    return UNDECIDED if side == "undecided" else FAILS


def judged(
    name: str,
    estimates: Estimate | Sequence[Estimate],
    sample: str = "",
    p: float | None = None,
) -> dict:
    """A claim with the number that decides it and the verdict: a row of :func:`verdicts`.

    Args:
        name: the id of the claim. estimates: the number; of several, such as one per layer, each
        has to lie beyond the bound: see
            :func:`~analysis_lib.metrics.intervals.least`.
        sample: what it was measured on.
        p: where it is known, instead of that of the number.
    """
    decided = claim(name)
    several = [estimates] if isinstance(estimates, Estimate) else [*estimates]
    below = decided.direction == "below"
    if below:
        # All lie below the bound where the least of their negatives lies above its negative.
        several = [-estimate for estimate in several]
    tested = least(several) if several else Estimate(math.nan)
    number = -tested if below else tested
    number = number.within(*decided.limits)
    outcome = verdict(number, decided.bound, decided.direction, decided.turn)
    if p is None:
        # Of the number at which the verdict was reached.
        at = decided.bound if decided.turn is None or outcome == HOLDS else decided.turn
        if below:
            at = -at
        p = tested.p(at)
    value, ci_low, ci_high = number.row
    return {
        "id": name,
        "claim": decided.sentence,
        "source": decided.source,
        "quantity": decided.quantity,
        "formula": decided.formula,
        "value": value,
        "ci_low": ci_low,
        "ci_high": ci_high,
        "draws": number.draws,
        "p": p,
        "bound": decided.bound,
        "turn": decided.turn,
        "direction": decided.direction,
        "rationale": decided.rationale,
        "sample": sample,
        "verdict": outcome,
    }


def verdicts(
    statistics: "Mapping[str, Statistic | Plain | Ratio]",
    tables: "Tables | Shipped | Mapping[str, Tables | Shipped]",
) -> pd.DataFrame:
    """Each claim with the number that decides it, its 95 % interval over texts, and the verdict.

    Args:
        statistics: by the id of a claim, what computes its number from the tables, or several that
            all have to lie beyond the bound, such as one per layer.
            :func:`~analysis_lib.measurement.largest` stands for some of them.
        tables: of a measurement, or by the name of a model. Of one that comes with the book, the
            verdicts come with it.

    Returns:
        One row per claim and model: model, id, claim (the sentence), source, quantity; value,
        ci_low and ci_high (missing where the number has no interval), draws (groups of independent
        units), p (of the value if the truth lay at the bound), bound, direction, rationale, sample,
        verdict.
    """
    if not isinstance(statistics, Mapping):
        raise AnalysisError(
            f"the statistics are {shown(statistics)}: give functions of the tables, by claim"
        )
    of_one_model = isinstance(tables, measurement.Tables | measurement.Shipped)
    if not of_one_model and not (isinstance(tables, Mapping) and tables):
        raise AnalysisError(
            f"the tables are {shown(tables)}: give what measure returns, or several by model"
        )
    if not of_one_model:
        parts = []
        for model, of_model in tables.items():
            rows = verdicts(statistics, of_model)
            parts.append(rows.assign(model=model))
        return pd.concat(parts, ignore_index=True)
    run = tables.run
    sample = f"{run['texts']:,} {PLURAL[run.get('kind', 'text')]} of {run['data']}"
    if run.get("units", run["texts"]) < FEW_UNITS:
        sample += f", {run.get('units', run['texts'])} independent"
    if isinstance(tables, measurement.Shipped):
        table = recorded(tables.folder.name)
        table = table[table["id"].isin(statistics)].assign(sample=sample)
    else:
        estimates = tables.intervals(statistics)
        rows = [judged(name, estimate, sample) for name, estimate in estimates.items()]
        table = pd.DataFrame(rows)
    table.insert(0, "model", title(run["model"]))
    return table.reset_index(drop=True)


def verdicts_over_seeds(
    numbers: Mapping[str, pd.Series | pd.DataFrame | Estimate], sample: str = ""
) -> pd.DataFrame:
    """The verdicts on claims whose number has one value per seed: its mean decides.

    Its interval is Student's over seeds. Where each value is an estimate with an interval over the
    same texts, the half-width over texts is added: see
    :func:`~analysis_lib.metrics.intervals.seed_and_unit_interval`.

    Args:
        numbers: by the id of a claim, one value per seed, or columns of values that all have to lie
            beyond the bound; or for each item of a seed, such as a head, whether it counts. The
            last level of the index is the seed; each value of the levels before, such as the model,
            is judged for itself. A number of all seeds together comes with its interval.
        sample: what each was measured on.

    Returns:
        These levels as columns, then those of :func:`verdicts`.
    """
    rows = []
    for name, values in numbers.items():
        if isinstance(values, Estimate):
            rows.append(judged(name, values, sample))
            continue
        *levels, _ = values.index.names
        columns = values.to_frame() if isinstance(values, pd.Series) else values
        groups = columns.groupby(levels, sort=False) if levels else [((), columns)]
        for labels, of_seeds in groups:
            estimates = [over_seeds(of_seeds[column]) for column in of_seeds]
            row = dict(zip(levels, labels, strict=True))
            rows.append(row | judged(name, estimates, sample))
    return pd.DataFrame(rows)


def verdicts_of_first_run(
    runs: Mapping[str, "Dynamics"],
    numbers: Callable[["Dynamics"], Mapping[str, pd.Series | pd.DataFrame | Estimate]],
) -> pd.DataFrame:
    """The verdicts on the first run; the others stand beside it in figures and tables.

    Args:
        runs: by what they are called.
        numbers: gives those of a run by the ids of claims, as
            :func:`verdicts_over_seeds` takes them.
    """
    name, run = next(iter(runs.items()))
    sample = (
        f"{run.about['limit']} texts of {run.about['data']}, seeds: {len(run.seeds)}, "
        f"steps: {run.steps[-1]:,}"
    )
    return verdicts_over_seeds(numbers(run), sample).assign(model=name)


def over_seeds(values: pd.Series) -> Estimate:
    """The mean of one value per seed, with its interval over seeds.

    It is over texts, too, where each value has an interval over them. Of items that are counted,
    such as heads, it is the share: see :func:`~analysis_book.papers.counts.pooled`.
    """
    if values.dtype == bool:
        return pooled(values)
    if all(isinstance(value, Estimate) for value in values):
        return seed_and_unit_interval(values)
    return seed_interval(values)


def corrected(verdicts: pd.DataFrame) -> pd.Series:
    """The verdicts if those on one claim are to be right at once: Holm (1979).

    That is of all models on the paper's own setting, and of all others.
    """

    def raised(p: pd.Series) -> pd.Series:
        return pd.Series(holm([*p]), p.index)

    by_claim = verdicts["p"].groupby([verdicts["id"], scopes(verdicts)])
    by_chance = by_claim.transform(raised) > 1 - CONFIDENCE
    decided = verdicts["verdict"].isin(DECIDED)
    return verdicts["verdict"].mask(by_chance & decided, UNDECIDED)


def said(
    verdicts: pd.DataFrame,
    name: str,
    words: Mapping[str, str],
) -> str:
    """The words for the verdict on a claim for the first model, after :func:`corrected`.

    Args:
        verdicts: as of :func:`verdicts`.
        name: the id of the claim.
        words: for each verdict that may be, the sentence; what holds a little holds, unless that
            has words of its own.
    """
    outcomes = corrected(verdicts)[verdicts["id"] == name]
    outcome = NOT_APPLICABLE if outcomes.empty else outcomes.iloc[0]
    if outcome == SMALL and SMALL not in words:
        outcome = HOLDS
    return words.get(outcome, words[UNDECIDED])


def scopes(verdicts: pd.DataFrame) -> pd.Series:
    """What each verdict is about: one of ``SCOPES``, by its claim, model and dataset."""
    scope_of_each = []
    for row in verdicts.to_dict("records"):
        scope = claim(row["id"]).judged_on(row.get("model"), row.get("dataset"))
        scope_of_each.append(scope)
    return pd.Series(scope_of_each, verdicts.index, dtype=object)


def on_their_corpora(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Without the verdicts on a claim about some corpora alone that were reached on another."""
    rows = []
    for row in verdicts.to_dict("records"):
        decided = claim(row["id"])
        rows.append(not decided.confined or row["dataset"] in decided.corpora)
    return verdicts[rows].reset_index(drop=True)


def show(verdicts: pd.DataFrame) -> None:
    """Show the verdicts: on a page a line per claim, with a chip for each model; else as text."""
    # Imported here: where it is missing, the figures say which extra brings it.
    from IPython.display import display

    after = corrected(verdicts)
    display(Verdicts(verdicts.assign(after=after, scope=scopes(verdicts))))


def recorded(name: str) -> pd.DataFrame:
    """The verdicts on a model whose measurement comes with the book.

    See :func:`~analysis_lib.measurement.shipped`.

    Raises:
        AnalysisError: none come with the book.
    """
    require_text("the model", name, "the name of one whose verdicts come with the book")
    path = data_directory() / "measurements" / name / "verdicts.csv"
    if not path.is_file():
        raise AnalysisError(
            f"no verdicts on {name} come with the book: data/README.md says which do"
        )
    rows = []
    for row in files.read(path, pd.read_csv).itertuples():
        estimate = Estimate(row.value, row.ci_low, row.ci_high, row.draws)
        if math.isnan(row.ci_low) and row.verdict in DECIDED:
            estimate = Settled(row.value)
        rows.append(judged(row.id, estimate, p=row.p))
    return pd.DataFrame(rows)


def published(name: str) -> pd.DataFrame:
    """A table that a paper prints, such as ``maruta_table1_contributions``.

    Raises:
        AnalysisError: no such table (with the nearest names).
    """
    require_text("the table", name, "the name of one that a paper prints")
    folder = data_directory() / "reference"
    names = [path.stem for path in folder.glob("*.csv")]
    if name not in names:
        raise AnalysisError(f"there is no published table {name}: {near_names(name, names)}")
    table = files.read(folder / f"{name}.csv", pd.read_csv)
    if "dataset" in table:
        table = table.assign(dataset=table["dataset"].map(corpora.title))
    return table


def holm(p_values: Sequence[float]) -> np.ndarray:
    """The p-values of several tests, adjusted for their number (Holm 1979); NaN are left out.

    >>> holm([0.01, 0.04, math.nan, 0.03]).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    p_values = np.asarray(p_values, dtype=float)
    # NaN are sorted to the end.
    count = np.isfinite(p_values).sum()
    ascending = np.argsort(p_values)
    order = ascending[:count]
    factors = np.arange(len(order), 0, -1)
    raised = np.full(len(p_values), math.nan)
    products = p_values[order] * factors
    raised[order] = np.maximum.accumulate(products)
    return np.minimum(1, raised)
