"""Several runs of training on one page, and the verdicts on the first of them, over its seeds."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from analysis_book.papers import claims
from analysis_book.papers.godey.dynamics import DESCRIPTION, Dynamics, dynamics
from analysis_lib.measurement import shipping
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import title


def load_runs(
    runs: Sequence[str],
    data: str = "",
    limit: int = 128,
    seed: int = 0,
    seeds: Sequence[int] = (),
) -> dict[str, Dynamics]:
    """The measurements of runs, by what each is called.

    Args:
        runs: each as :func:`~analysis_book.papers.godey.dynamics.dynamics` takes it.
        data: what they read; by default what the measurements that come with the book have read, or
            ``wikipedia:held-out``.
        limit: how many of its texts.
        seed: with which to draw them.
        seeds: of each run; by default those of the measurements that come with the book, or 0.
    """
    shipped = shipping.descriptions(DESCRIPTION)
    tables = {}
    for run in runs:
        settings = {"data": data or "wikipedia:held-out", "seeds": [0]}
        if run in shipped and data in ("", shipped[run]["data"]):
            settings = shipped[run]
        tables[title(run)] = dynamics(
            run,
            settings["data"],
            limit,
            seed,
            seeds=seeds or settings["seeds"],
            progress=False,
        )
    return tables


def verdicts(
    runs: Mapping[str, Dynamics],
    numbers: Callable[[Dynamics], Mapping[str, pd.Series | pd.DataFrame | Estimate]],
) -> pd.DataFrame:
    """The verdicts on the first run; the others stand beside it in figures and tables.

    Args:
        runs: by what they are called.
        numbers: gives those of a run by the ids of claims, as
            :func:`~analysis_book.papers.claims.verdicts_over_seeds` takes them.
    """
    name, run = next(iter(runs.items()))
    sample = (
        f"{run.about['limit']} texts of {run.about['data']}, seeds: {len(run.seeds)}, "
        f"steps: {run.steps[-1]:,}"
    )
    return claims.verdicts_over_seeds(numbers(run), sample).assign(model=name)
