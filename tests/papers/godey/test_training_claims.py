"""The numbers that decide claims on a run of training, as the page computes them on planted runs."""

import math

import pandas as pd
import pytest
from planted import run_cells
from planted_run import planted, thirds_apart

from analysis_lib.papers import claims
from analysis_lib.papers.godey.alignment import share
from analysis_lib.papers.godey.dynamics import Dynamics


def on_page(run: Dynamics) -> pd.DataFrame:
    """The verdicts of the page on a run."""
    cells = ("estimates = {}", "dots = ", "welch = ", "claims.verdicts_of_estimates")
    return run_cells("training/alignment", *cells, runs={"planted": run})["verdicts"]


def verdicts_of(run: Dynamics) -> list[str]:
    return on_page(run)["verdict"].tolist()


def test_verdicts_hold_on_the_run_of_the_paper_and_fail_on_its_reverse():
    paper = planted(thirds_apart, seeds=(0, 1))
    assert verdicts_of(paper) == ["does not hold"] + ["holds"] * 7
    values = on_page(paper)["value"].tolist()
    # The heads of the middle third have no scalar product: it grows in two thirds of 36 heads.
    assert values[:6] == pytest.approx([2 / 3, 1, 0.86, 0.86, 2 / 3, 1])
    # Layers 5 and 6 end 0.4 nats above layers 1 and 2.
    assert values[6] == pytest.approx(0.4)
    assert values[7] == pytest.approx(1)
    reverse = planted(
        lambda layer, head, way, seed: (-1 if seed else 1) * (0.1 - 0.2 * (layer <= 3)) * way * (1 + 0.1 * head),
        entropy=lambda layer, way: 3 + way - 0.1 * layer * way,
        dot=lambda cosine, way: 1 - way + 1e-3 * cosine,
        seeds=(0, 1),
    )
    found = verdicts_of(reverse)
    assert [found[i] for i in (0, 1, 4, 6, 7)] == ["does not hold"] * 5
    # Half of the seeds drift in common and half in opposite directions.
    assert found[2:4] == ["undecided"] * 2
    apart = planted(lambda *place: -thirds_apart(*place), entropy=lambda layer, way: 3 + way)
    assert verdicts_of(apart)[2:4] == ["does not hold"] * 2
    assert verdicts_of(apart)[5] == "does not hold"


def test_one_seed_says_nothing_of_seeds():
    assert len(verdicts_of(planted(thirds_apart))) == 7


def test_two_heads_decide_no_share():
    """Alike in all of few heads is not yet more than half of the heads: Wilson's interval says so."""
    estimate = share(pd.Series([True, True]))
    assert estimate[0] == 1
    assert claims.verdict(*estimate[1:], bound=0.5) == "undecided"
    assert all(map(math.isnan, share(pd.Series([], dtype=bool))))


@pytest.mark.filterwarnings("ignore")
def test_a_gap_between_single_heads_has_no_interval():
    found = planted(thirds_apart)
    one = {name: found[name].query("layer in (1, 6) and head == 1") for name in ("attention_entropy", "qk_alignment")}
    row = on_page(Dynamics({**found, **one}, found.about)).set_index("id").loc["godey-first-layers-end-sharper"]
    assert row["value"] == pytest.approx(0.5)
    assert math.isnan(row["ci_low"])
    assert row["verdict"] == "undecided"
