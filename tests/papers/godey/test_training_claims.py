"""The numbers that decide claims on a run of training, as the page computes them on planted runs."""

import pandas as pd
import pytest
from planted import run_cells
from planted_run import planted, thirds_apart

from analysis_lib.papers.godey.dynamics import Dynamics

SEEDS = (0, 1, 2, 3, 4)


def on_page(run: Dynamics) -> pd.DataFrame:
    """The verdicts of the three pages on a run."""
    names = {"measured": {"planted": run}}
    pages = {
        "alignment": ("def at_the_end", "def on_the_way", "several_runs.verdicts"),
        "sharpness": ("def sharper", "def earlier", "several_runs.verdicts"),
        "queries-and-keys": ("def numbers", "several_runs.verdicts"),
    }
    found = [run_cells(f"training/{page}", *cells, **names)["verdicts"] for page, cells in pages.items()]
    return pd.concat(found).set_index("id")


def verdicts_of(run: Dynamics) -> dict[str, str]:
    return on_page(run)["verdict"].rename(lambda name: name.removeprefix("godey-")).to_dict()


def test_verdicts_hold_on_the_run_of_the_paper_and_fail_on_its_reverse():
    paper = planted(thirds_apart, seeds=SEEDS)
    found = verdicts_of(paper)
    # Heads align by the third checkpoint, which is at a tenth of the run: too late for the common ones.
    failing = {"heads-align", "common-at-once", "products-sharpen"}
    assert {name for name, verdict in found.items() if verdict != "holds"} == failing
    values = on_page(paper)["value"]
    # The heads of the middle third have no scalar product: it grows in two thirds of 36 heads.
    expected = {"heads-align": 2 / 3, "first-layers-common": 0.86, "last-layers-opposite": 0.86, "products-grow": 2 / 3}
    # Layers 5 and 6 end 0.4 nats above layers 1 and 2; every layer falls by one nat.
    expected |= {"first-layers-end-sharper": 0.4, "attention-sharpens": 1.0, "distributions-leave-origin": 1.0}
    for name, value in expected.items():
        assert values[f"godey-{name}"] == pytest.approx(value), name
    reverse = planted(
        lambda layer, head, way, seed: (-1 if seed else 1) * (0.1 - 0.2 * (layer <= 3)) * way * (1 + 0.1 * head),
        entropy=lambda layer, way: 3 + way - 0.1 * layer * way,
        dot=lambda cosine, way: 1 - way + 1e-3 * cosine,
        seeds=SEEDS,
    )
    found = verdicts_of(reverse)
    for name in ("heads-align", "products-grow", "attention-sharpens", "first-layers-end-sharper"):
        assert found[name] == "does not hold", name
    apart = verdicts_of(planted(lambda *place: -thirds_apart(*place), entropy=lambda layer, way: 3 + way, seeds=SEEDS))
    for name in ("first-layers-common", "last-layers-opposite", "attention-sharpens"):
        assert apart[name] == "does not hold", name


def test_the_seed_is_the_unit_and_fewer_than_five_decide_nothing():
    """However many heads and layers a run has, they are those of a model that was trained once."""
    for seeds in ((0,), (0, 1), (0, 1, 2, 3)):
        found = on_page(planted(thirds_apart, seeds=seeds))
        assert set(found["verdict"]) == {"undecided"}
        assert found["ci_low"].isna().all()
        assert ("godey-seeds-agree" in found.index) == (len(seeds) > 1)


def test_seeds_that_differ_widen_the_interval_whatever_their_heads_agree_on():
    def sign(layer: int, head: int, way: float, seed: int) -> float:
        return (1 if seed < 3 else -1) * thirds_apart(layer, head, way, seed)

    found = on_page(planted(sign, seeds=SEEDS)).loc["godey-first-layers-common"]
    assert found["value"] == pytest.approx(0.86 / 5)
    # Three seeds at 0.86 and two at -0.86: t = 2.776 times a standard error of 0.4213; a cosine ends at 1.
    assert found["ci_low"] == pytest.approx(0.172 - 2.7764 * 0.42131, abs=1e-3)
    assert found["ci_high"] == 1
    assert found["verdict"] == "undecided"
