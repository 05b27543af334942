"""Similarity inside an utterance before and after: intervals of both models, and claims on planted similarities."""

import numpy as np
import pandas as pd
import pytest
from fosse_cells import run_cells

from analysis_lib.errors import AnalysisError
from analysis_lib.papers.fosse import similarity

# The numbers of section 3, and straight lines between them.
PRETRAINED = np.append(np.linspace(0.12, 0.42, 12), 0.41)
FINE_TUNED = np.concatenate([np.linspace(0.08, 0.34, 9), np.linspace(0.34, 0.69, 5)[1:]])


class Planted(dict):
    """Tables of ``utterance_similarity`` without a model, and without each of three groups of utterances."""

    def __init__(self, curve: np.ndarray, groups: tuple[np.ndarray, ...] = (), texts: str = "one"):
        self.groups, self.run = [Planted(group) for group in groups], {"data_sha256": texts}
        layers = np.arange(len(curve))
        hidden = pd.DataFrame({"space": "hidden", "layer": layers, "similarity": curve})
        values = pd.DataFrame({"space": "value", "layer": layers[1:], "similarity": 0.9})
        super().__init__(utterance_similarity=pd.concat([hidden, values]))

    def left_out(self, statistic):
        value = statistic(self)
        return value, np.array([statistic(group) for group in self.groups]).reshape(-1, len(value))


def planted(curve: np.ndarray, noise: float = 1e-4) -> Planted:
    return Planted(curve, tuple(curve + shift * noise for shift in (-1, 0, 1)))


def verdicts_of(before: Planted, after: Planted) -> list[str]:
    names = {"before": before, "after": after, "depth": len(PRETRAINED) - 1, "display": lambda _: None}
    return run_cells("similarity", "def numbers", **names)["verdicts"]["verdict"].tolist()


def change(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new - old


def test_similarity_claims_hold_on_the_published_numbers():
    assert verdicts_of(planted(PRETRAINED), planted(FINE_TUNED)) == ["holds"] * 5


def test_similarity_claims_fail_on_curves_that_fall():
    assert verdicts_of(planted(PRETRAINED[::-1]), planted(0.77 - FINE_TUNED)) == ["does not hold"] * 5


@pytest.mark.parametrize(
    ("claim", "before", "after"),
    [
        # Of eleven steps eight grow: less than three of four.
        (0, np.concatenate([[0.3, 0.2, 0.1, 0.05], np.linspace(0.12, 0.42, 8), [0.41]]), FINE_TUNED),
        (1, np.append(PRETRAINED[:-1], 0.43), FINE_TUNED),
        (2, np.append(PRETRAINED[:-1], 0.41), np.linspace(0.08, 0.40, 13) ** 1.01),
        (3, PRETRAINED, np.concatenate([[0.2], FINE_TUNED[1:]])),
        (4, PRETRAINED, np.concatenate([np.linspace(0.08, 0.6, 9), np.linspace(0.6, 0.69, 5)[1:]])),
    ],
)
def test_each_similarity_claim_fails_on_the_curve_that_contradicts_it(claim, before, after):
    assert verdicts_of(planted(before), planted(after))[claim] == "does not hold"


def test_an_interval_leaves_the_same_utterances_out_of_both():
    """What both models owe to a text is no uncertainty of the difference."""
    shifts = (-0.2, 0.0, 0.2)
    before, after = (Planted(c, tuple(c + shift for shift in shifts)) for c in (PRETRAINED, FINE_TUNED))
    difference, low, _ = similarity.paired(before, after, change)
    assert difference == pytest.approx(FINE_TUNED - PRETRAINED)
    assert low == pytest.approx(difference)
    apart = Planted(FINE_TUNED, tuple(FINE_TUNED - shift for shift in shifts))
    difference, _, high = similarity.paired(before, apart, change)
    assert (high - difference > 0.4).all()
    assert verdicts_of(before, apart)[2] == "undecided"


def test_other_layers_and_other_texts_are_refused():
    with pytest.raises(AnalysisError, match="same layers and texts"):
        similarity.paired(planted(PRETRAINED), planted(FINE_TUNED[:7]), change)
    with pytest.raises(AnalysisError, match="same layers and texts"):
        similarity.paired(planted(PRETRAINED), Planted(FINE_TUNED, (FINE_TUNED,) * 3, texts="other"), change)
