"""The numbers that decide claims on a run of training, as the page computes them on planted
runs.
"""

import pandas as pd
import pytest
from planted import run_cells
from planted_run import planted, thirds_apart

from analysis_book.training.dynamics import Dynamics

SEEDS = (0, 1, 2, 3, 4)


def on_page(run: Dynamics) -> pd.DataFrame:
    """The verdicts of the three pages on a run."""
    names = {"measured": {"planted": run}}
    pages = {
        "alignment": ("def at_the_end", "def on_the_way", "claims.verdicts_of_first_run"),
        "sharpness": ("def sharper", "def earlier", "claims.verdicts_of_first_run"),
        "queries-and-keys": ("def numbers", "claims.verdicts_of_first_run"),
    }
    found = [
        run_cells(f"training/{page}", *cells, **names)["verdicts"] for page, cells in pages.items()
    ]
    return pd.concat(found).set_index("id")


def test_the_numbers_of_the_run_of_the_paper_and_of_its_reverse():
    values = on_page(planted(thirds_apart, seeds=SEEDS))["value"].rename(
        lambda name: name.removeprefix("godey-")
    )
    # The heads of the middle third have no scalar product: it grows in two thirds of 36 heads,
    # which alone align.
    expected = {"heads-align": 2 / 3, "first-layers-align": 1, "products-grow": 2 / 3}
    expected |= {"first-layers-common": 0.86, "last-layers-opposite": 0.86, "seeds-agree": 1}
    # Layers 5 and 6 end 0.4 nats above layers 1 and 2; every layer falls by one nat, and its input
    # rises by 0.3.
    expected |= {
        "first-layers-end-sharper": 0.4,
        "attention-sharpens": 1.0,
        "inner-anisotropy-rises": 0.3,
    }
    # Heads are beyond the band of eight dimensions at the last checkpoint alone.
    expected |= {"distributions-leave-origin": 1.0, "common-at-once": 0.0, "opposite-later": 1.0}
    for name, value in expected.items():
        assert values[name] == pytest.approx(value), name
    # All layers and heads sharpen alike: there is nothing to correlate.
    assert values[["products-sharpen", "drift-with-anisotropy"]].isna().all()
    reverse = planted(
        lambda *place: -thirds_apart(*place),
        entropy=lambda layer, way: 3 + way - 0.1 * layer * way,
        anisotropy=lambda layer, way: 0.5 - 0.3 * way,
        dot=lambda cosine, way: 1 - way + 1e-3 * cosine,
        seeds=SEEDS,
    )
    values = on_page(reverse)["value"].rename(lambda name: name.removeprefix("godey-"))
    expected = {"first-layers-common": -0.86, "last-layers-opposite": -0.86, "products-grow": 0}
    # The last layer rises least, by 0.4 nats, the first most: the least fall is the first layer's.
    expected |= {
        "attention-sharpens": -0.9,
        "first-layers-end-sharper": -0.4,
        "inner-anisotropy-rises": -0.3,
    }
    for name, value in expected.items():
        assert values[name] == pytest.approx(value), name
    # Where sharpness and anisotropy fall, neither is first.
    assert values[["anisotropy-first", "alignment-first"]].isna().all()


def test_verdicts_follow_the_sign_in_seeds_that_differ_a_little():
    for sign, verdict in ((1, "holds"), (-1, "does not hold")):
        found = on_page(
            planted(
                lambda *place, sign=sign: sign * (1 - 0.01 * place[-1]) * thirds_apart(*place),
                seeds=SEEDS,
            )
        )
        for name in ("first-layers-common", "last-layers-opposite"):
            assert found.loc[f"godey-{name}", "verdict"] == verdict
    assert found.loc["godey-heads-align", "sample"] == "9 texts of texts, seeds: 5, steps: 1,000"


def test_the_seed_is_the_unit_and_fewer_than_five_decide_nothing():
    """However many heads and layers a run has, they are those of a model that was trained once."""
    for seeds in ((0,), (0, 1, 2, 3)):
        found = on_page(
            planted(lambda *place: (1 - 0.01 * place[-1]) * thirds_apart(*place), seeds=seeds)
        )
        assert set(found["verdict"]) == {"no interval", "not applicable"}
        assert found["ci_low"].isna().all()
        # Of one seed, no two agree.
        assert (found.loc["godey-seeds-agree", "verdict"] == "not applicable") == (len(seeds) == 1)


def test_seeds_that_differ_widen_the_interval_whatever_their_heads_agree_on():
    def sign(layer: int, head: int, way: float, seed: int) -> float:
        return (1 if seed < 3 else -1) * thirds_apart(layer, head, way, seed)

    found = on_page(planted(sign, seeds=SEEDS)).loc["godey-first-layers-common"]
    assert found["value"] == pytest.approx(0.86 / 5)
    # Three seeds at 0.86 and two at -0.86: t = 2.776 times a standard error of 0.4213; a cosine
    # ends at 1.
    assert found["ci_low"] == pytest.approx(0.172 - 2.7764 * 0.42131, abs=1e-3)
    assert found["ci_high"] == 1
    assert found["verdict"] == "undecided"
