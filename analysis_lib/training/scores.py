"""What the models trained here reach on data held out."""

import json
from collections.abc import Iterable

import pandas as pd

from analysis_lib.training.recipes import recipe_of, trained


def scores(names: Iterable[str]) -> pd.DataFrame:
    """How well each model trained here does on held-out data, trained now where it is not there yet.

    Args:
        names: as ``load_model`` takes them; models that are not trained here have no row.

    Returns:
        Columns model, parameters (how many), steps (of training), metric (see :class:`Score`), score, ci_low, ci_high
        and baseline.

    Raises:
        AnalysisError: as ``recipe_of`` and ``trained``.
    """
    rows = []
    for name in names:
        if (found := recipe_of(name)) is not None:
            recipe, settings = found
            told = json.loads((trained(recipe, **settings) / "training.json").read_text(encoding="utf-8"))
            score = told["score"]
            numbers = [score[part] for part in ("value", "ci_low", "ci_high", "baseline")]
            metric = score["metric"].replace("_", " ")
            rows.append((name, told["parameters"], told["settings"]["steps"], metric, *numbers))
    columns = ["model", "parameters", "steps", "metric", "score", "ci_low", "ci_high", "baseline"]
    return pd.DataFrame(rows, columns=columns)
