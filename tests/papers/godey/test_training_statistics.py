"""The numbers that decide claims on a run of training, on planted runs."""

import math

import pytest
from planted_run import planted, thirds_apart

from analysis_lib.papers import claims
from analysis_lib.papers.godey import training_statistics
from analysis_lib.papers.godey.dynamics import Dynamics

STATISTICS = {
    "godey-heads-align": training_statistics.aligned_share,
    "godey-first-layers-align": lambda run: training_statistics.aligned_share(run, "first third"),
    "godey-first-layers-common": lambda run: training_statistics.common_drift(run, "first third"),
    "godey-last-layers-opposite": lambda run: training_statistics.opposite_drift(run, "last third"),
    "godey-products-grow": training_statistics.share_of_growing_products,
    "godey-attention-sharpens": training_statistics.share_of_sharpened_layers,
    "godey-first-layers-end-sharper": training_statistics.entropy_gap,
    "godey-seeds-agree": training_statistics.agreement_of_seeds,
}


def verdicts_of(run: Dynamics) -> list[str]:
    estimates = {claim: statistic(run) for claim, statistic in STATISTICS.items() if "seeds" not in claim}
    if len(run.seeds) > 1:
        estimates["godey-seeds-agree"] = training_statistics.agreement_of_seeds(run)
    return claims.verdicts_of_estimates(estimates)["verdict"].tolist()


def test_verdicts_hold_on_the_run_of_the_paper_and_fail_on_its_reverse():
    paper = planted(thirds_apart, seeds=(0, 1))
    assert verdicts_of(paper) == ["does not hold"] + ["holds"] * 7
    values = [statistic(paper)[0] for statistic in STATISTICS.values()]
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


def test_two_heads_in_a_third_decide_no_share():
    """Alike in all of few heads is not yet more than half of the heads: Wilson's interval says so."""
    found = planted(thirds_apart)
    # The layers 1, 3 and 5 are all there are, with two heads each.
    few = {name: found[name].query("layer in (1, 3, 5)") for name in ("qk_alignment", "head_means")}
    few["attention_entropy"] = found["attention_entropy"].query("layer in (1, 3, 5)")
    few = {name: table.replace({"layer": {3: 2, 5: 3}}).query("head < 3") for name, table in few.items()}
    estimate = training_statistics.aligned_share(Dynamics(few, found.about), "first third")
    assert estimate[0] == 1
    assert claims.verdict(*estimate[1:], bound=0.5) == "undecided"


def test_a_gap_between_single_heads_has_no_interval():
    found = planted(thirds_apart)
    one = {"attention_entropy": found["attention_entropy"].query("layer in (1, 6) and head == 1")}
    one["qk_alignment"] = found["qk_alignment"]
    value, low, high = training_statistics.entropy_gap(Dynamics(one, found.about))
    assert value == pytest.approx(0.5)
    assert math.isnan(low)
    assert math.isnan(high)
