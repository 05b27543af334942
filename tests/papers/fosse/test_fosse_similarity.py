"""Similarity inside a text before and after fine-tuning: claims on planted similarities."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from planted import run_cells

from analysis_book.papers import claims
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import shipping
from analysis_lib.measurement.tables import Report, Tables

# The numbers of section 3, and straight lines between them.
PRETRAINED = np.append(np.linspace(0.12, 0.42, 12), 0.41)
FINE_TUNED = np.concatenate([np.linspace(0.08, 0.34, 9), np.linspace(0.34, 0.69, 5)[1:]])


class PlantedSimilarity:
    """A metric without a model: its table, and those without each of three groups of utterances."""

    name = "utterance_similarity"

    def __init__(self, curve: np.ndarray, groups: tuple[np.ndarray, ...], alike: dict[str, float]):
        self.curve, self.groups, self.alike = curve, groups, alike

    def table(self, curve: np.ndarray | None = None) -> pd.DataFrame:
        curve = self.curve if curve is None else curve
        hidden = pd.DataFrame(
            {"space": "hidden", "layer": np.arange(len(curve)), "similarity": curve}
        )
        others = [
            pd.DataFrame(
                {"space": space, "layer": np.arange(1, len(curve)), "similarity": similar + of_head}
            )
            for space, similar in {"query": 0.9, "key": 0.9, "value": 0.9, **self.alike}.items()
            for of_head in (-0.05, 0.05)
        ]
        return pd.concat([hidden, *others])

    def leaving_out(self) -> Callable[[int], pd.DataFrame]:
        return lambda group: self.table(self.groups[group])

    def occupied_groups(self) -> range:
        return range(len(self.groups))


class PlantedEntropy(PlantedSimilarity):
    """The entropy of the rows of two heads, which is another one in the last layer."""

    name = "attention_entropy"

    def table(self, curve: np.ndarray | None = None) -> pd.DataFrame:
        layers = np.repeat(np.arange(1, len(self.curve)), 2)
        wide = np.where(layers == layers[-1], self.alike.get("entropy", 0.5), 0.7)
        of_heads = wide + np.tile([-0.05, 0.05], len(self.curve) - 1)
        return pd.DataFrame(
            {
                "layer": layers,
                "head": 1 + np.arange(len(layers)) % 2,
                "entropy_normalised": of_heads,
            }
        )


def of_groups(
    curve: np.ndarray, groups: tuple[np.ndarray, ...], texts: str = "one", **alike: float
) -> Tables:
    sizes = dict.fromkeys(("width", "heads", "key_heads", "head_width"), 1)
    metrics = [metric(curve, groups, alike) for metric in (PlantedSimilarity, PlantedEntropy)]
    run = {"data_sha256": texts, "model": "planted", "texts": 40, "data": "texts"}
    return Tables(metrics, Report(layers=[sizes]), run)


def planted(curve: np.ndarray, noise: float = 1e-4, **alike: float) -> Tables:
    return of_groups(curve, tuple(curve * (1 + shift * noise) for shift in (-1, 0, 1)), **alike)


def on_page(before: Tables, *after: Tables) -> pd.DataFrame:
    """The verdicts on five trainings, which take turns to end in these tables."""
    texts = Corpus("x", [str(i) for i in range(40)])
    names = {
        "before": before,
        "after": [after[i % len(after)] for i in range(5)],
        "depth": len(PRETRAINED) - 1,
    }
    names |= {"late": 8, "train": texts, "test": texts, "splits": lambda _: [texts], "beside": []}
    names |= {
        "trainings": pd.DataFrame({"epochs": [1, 2, 3, 2, 2], "failed": False, "judged": True})
    }
    found = run_cells(
        "classification/similarity",
        "def curve",
        "def late_growth",
        "uniform = {",
        "judged = [",
        **names,
    )
    return found["verdicts"]


def verdicts_of(before: Tables, after: Tables) -> list[str]:
    return on_page(before, after)["verdict"].tolist()[:5]


def test_similarity_claims_hold_on_the_published_numbers():
    found = on_page(planted(PRETRAINED), planted(FINE_TUNED))
    assert found["verdict"].tolist()[:5] == ["holds"] * 5
    least = np.sort(np.diff(PRETRAINED[:-1]))[2]
    assert found["value"].tolist()[:3] == pytest.approx([least, 0.01, 0.28])
    # Three groups of texts, or five trainings: p comes from Student's law.
    assert found["draws"].tolist() == [3, 3, *[5] * 6]
    assert (
        found["sample"].tolist()[2:]
        == ["40 texts; 5 trainings of 1 to 3 epochs on 40 of 40 texts"] * 6
    )


def test_similarity_claims_fail_on_curves_that_fall():
    verdicts = verdicts_of(planted(PRETRAINED[::-1]), planted(0.77 - FINE_TUNED))
    assert verdicts == ["does not hold"] * 5


@pytest.mark.parametrize(
    ("claim", "before", "after"),
    [
        (1, np.append(PRETRAINED[:-1], 0.43), FINE_TUNED),
        (2, np.append(PRETRAINED[:-1], 0.41), np.linspace(0.08, 0.40, 13) ** 1.01),
        (3, PRETRAINED, np.concatenate([[0.2], FINE_TUNED[1:]])),
        (4, PRETRAINED, np.concatenate([np.linspace(0.08, 0.6, 9), np.linspace(0.6, 0.69, 5)[1:]])),
    ],
)
def test_each_similarity_claim_fails_on_the_curve_that_contradicts_it(claim, before, after):
    assert verdicts_of(planted(before), planted(after))[claim] == "does not hold"


@pytest.mark.parametrize(
    ("query", "key", "entropy", "verdicts"),
    [
        (0.6, 0.7, 0.95, ["holds", "holds", "holds"]),
        # A gain of less than a tenth.
        (0.25, 0.7, 0.85, ["holds, small", "holds", "does not hold"]),
        (0.6, 0.1, 0.95, ["holds", "does not hold", "holds"]),
    ],
)
def test_queries_keys_and_rows_of_the_last_layer(query, key, entropy, verdicts):
    before = planted(PRETRAINED, query=0.2, key=0.3, entropy=0.4)
    means, shifts = {"query": query, "key": key, "entropy": entropy}, (-2e-3, -1e-3, 0, 1e-3, 2e-3)
    after = [
        planted(FINE_TUNED, **{name: mean + shift for name, mean in means.items()})
        for shift in shifts
    ]
    found = on_page(before, *after)[5:]
    assert found["value"].tolist() == pytest.approx([query - 0.2, key - 0.3, entropy])
    assert found["verdict"].tolist() == verdicts


def test_most_steps_grow_but_the_last():
    """Of eleven steps eight grow: less than three of four. The third least is what nine exceed."""
    falls = np.concatenate([[0.3, 0.2, 0.1, 0.05], np.linspace(0.12, 0.42, 8), [0.41]])
    row = on_page(planted(falls), planted(FINE_TUNED)).iloc[0]
    assert (row["value"], row["verdict"]) == (pytest.approx(-0.05), "does not hold")
    grows = np.concatenate([[0.15, 0.1, 0.05], np.linspace(0.12, 0.42, 9), [0.41]])
    row = on_page(planted(grows), planted(FINE_TUNED)).iloc[0]
    assert (row["value"], row["verdict"]) == (pytest.approx(0.3 / 8), "holds")


def test_an_interval_leaves_the_same_texts_out_of_both():
    """What both models owe to a text is no uncertainty of the difference."""
    shifts = (-0.2, 0.0, 0.2)
    before, after = (
        of_groups(c, tuple(c + shift for shift in shifts)) for c in (PRETRAINED, FINE_TUNED)
    )
    assert verdicts_of(before, after)[2] == "holds"
    apart = of_groups(FINE_TUNED, tuple(FINE_TUNED - shift for shift in shifts))
    assert verdicts_of(before, apart)[2] == "undecided"


def test_one_step_that_is_lost_in_some_trainings_leaves_every_layer_undecided():
    falls = planted(np.concatenate([[0.12], FINE_TUNED[1:]]))
    found = on_page(planted(PRETRAINED), planted(FINE_TUNED), falls).set_index("id")
    row = found.loc["fosse-constant-growth"]
    steps = np.array(
        [np.diff(FINE_TUNED), np.diff(falls["utterance_similarity"]["similarity"][:13])]
    )
    assert row["value"] == pytest.approx((3 * steps[0] + 2 * steps[1]).min() / 5, abs=1e-6)
    assert row["verdict"] == "undecided"


def test_other_texts_are_refused():
    with pytest.raises(AnalysisError, match="different texts: measure one corpus"):
        planted(PRETRAINED).interval(len, of_groups(FINE_TUNED, (FINE_TUNED,) * 3, texts="other"))


@pytest.mark.parametrize("name", ["minilm-on-hatexplain", "minilm-on-yelphat", "minilm-on-e-snli"])
def test_the_tables_of_the_recorded_trainings_give_the_recorded_change(name):
    hidden = shipping.shipped(name)["utterance_similarity"].query("space == 'hidden'")
    last = hidden[hidden["layer"] == hidden["layer"].max()].set_index("training")["similarity"]
    assert [*last.index] == ["before", "0", "1", "2", "3", "4"]
    recorded = claims.recorded(name).set_index("id")["value"]["fosse-marked-convergence"]
    assert last.drop("before").mean() - last["before"] == pytest.approx(recorded, abs=1e-6)
