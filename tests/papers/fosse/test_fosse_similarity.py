"""Similarity inside an utterance before and after: intervals of both models, and claims on planted similarities."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from planted import run_cells

from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import shipping
from analysis_lib.measurement.tables import Report, Tables
from analysis_lib.papers import claims

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
        hidden = pd.DataFrame({"space": "hidden", "layer": np.arange(len(curve)), "similarity": curve})
        others = [
            pd.DataFrame({"space": space, "layer": np.arange(1, len(curve)), "similarity": similar + of_head})
            for space, similar in {"query": 0.9, "key": 0.9, "value": 0.9, **self.alike}.items()
            for of_head in (-0.05, 0.05)
        ]
        return pd.concat([hidden, *others])

    def without(self, group: int) -> pd.DataFrame:
        return self.table(self.groups[group])

    def occupied_groups(self) -> range:
        return range(len(self.groups))


class PlantedEntropy(PlantedSimilarity):
    """The entropy of the rows of two heads, which is another one in the last layer."""

    name = "attention_entropy"

    def table(self, curve: np.ndarray | None = None) -> pd.DataFrame:
        layers = np.repeat(np.arange(1, len(self.curve)), 2)
        wide = np.where(layers == layers[-1], self.alike.get("entropy", 0.5), 0.7)
        of_heads = wide + np.tile([-0.05, 0.05], len(self.curve) - 1)
        return pd.DataFrame({"layer": layers, "head": 1 + np.arange(len(layers)) % 2, "entropy_normalised": of_heads})


def of_groups(curve: np.ndarray, groups: tuple[np.ndarray, ...], texts: str = "one", **alike: float) -> Tables:
    sizes = dict.fromkeys(("width", "heads", "key_heads", "head_width"), 1)
    metrics = [metric(curve, groups, alike) for metric in (PlantedSimilarity, PlantedEntropy)]
    return Tables(metrics, Report(layers=[sizes]), {"data_sha256": texts})


def planted(curve: np.ndarray, noise: float = 1e-4, **alike: float) -> Tables:
    return of_groups(curve, tuple(curve + shift * noise for shift in (-1, 0, 1)), **alike)


def on_page(before: Tables, after: Tables, gaps: dict | None = None) -> dict:
    layers = pd.DataFrame({"layer": np.arange(len(PRETRAINED)), "similarity": 0.5})
    stages = {"before fine-tuning": before, "after it": after}
    hidden = pd.concat(dict.fromkeys(stages, layers.set_index("layer")), names=["stage"])
    names = {"measured": stages, "hidden": hidden, "depth": len(PRETRAINED) - 1, "display": lambda _: None}
    names |= {"load_model": str, "measure": lambda *_, **__: after, "folders": range(5), "seeds": 5, "test": None}
    names |= {"metrics": None, "gaps": gaps or {}}
    return run_cells(
        "classification/similarity", "def curve", "def numbers", "def of_last_layer", "estimates = ", **names
    )


def verdicts_of(before: Tables, after: Tables) -> list[str]:
    return on_page(before, after)["verdicts"]["verdict"].tolist()[:5]


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


@pytest.mark.parametrize(
    ("query", "key", "entropy", "verdicts"),
    [
        (0.6, 0.7, 0.95, ["holds", "holds", "holds"]),
        (0.25, 0.7, 0.85, ["does not hold", "holds", "does not hold"]),
        (0.6, 0.1, 0.95, ["holds", "does not hold", "holds"]),
    ],
)
def test_queries_keys_and_rows_of_the_last_layer(query, key, entropy, verdicts):
    before = planted(PRETRAINED, query=0.2, key=0.3, entropy=0.4)
    found = on_page(before, planted(FINE_TUNED, query=query, key=key, entropy=entropy))["verdicts"][5:]
    assert found["value"].tolist() == pytest.approx([query - 0.2, key - 0.3, entropy])
    assert found["verdict"].tolist() == verdicts


def test_an_interval_leaves_the_same_utterances_out_of_both():
    """What both models owe to a text is no uncertainty of the difference."""
    shifts = (-0.2, 0.0, 0.2)
    before, after = (of_groups(c, tuple(c + shift for shift in shifts)) for c in (PRETRAINED, FINE_TUNED))
    difference, low, _ = on_page(before, after)["interval"]
    assert difference == pytest.approx(FINE_TUNED - PRETRAINED)
    assert low == pytest.approx(difference)
    apart = of_groups(FINE_TUNED, tuple(FINE_TUNED - shift for shift in shifts))
    difference, _, high = on_page(before, apart)["interval"]
    assert (high - difference > 0.4).all()
    assert verdicts_of(before, apart)[2] == "undecided"


def accuracies(tmp_path, monkeypatch, **right: dict[str, float]) -> dict:
    """The cells on Table 1, where of 100 texts so many are classified rightly by the encoder and by one layer."""
    (tmp_path / "measurements" / "minilm-on-x").mkdir(parents=True)
    lines = ["dataset,texts,classifier,trainings,mean,spread", "x,50,one layer of self-attention,5,0.6,0.1"]
    (tmp_path / "measurements" / "minilm-on-x" / "accuracies.csv").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(shipping, "home", lambda: tmp_path / "measurements")

    def split(spec: str, *_: int) -> list[Corpus]:
        return [Corpus(spec, [f"{spec} {i}" for i in range(size)]) for size in (80, 20, 100)]

    def predicted(which: tuple[str, str, int], test: Corpus) -> pd.DataFrame:
        kind, spec, seed = which
        found = np.random.default_rng(seed).permutation(100) < right[Path(spec).name][kind] + seed
        return pd.DataFrame({"label": "a", "predicted": np.where(found, "a", "b")})

    names = {"data": "x/hatexplain", "more_data": ["yelphat"], "train_limit": 0, "test_limit": 0, "seed": 3, "seeds": 5}
    names |= {"model": "m", "pretrained": None, "settings": {}, "beside": ["minilm-on-x"], "splits": split}
    names |= {"finetune": lambda model, *texts, seed: ("encoder", texts[0].name, seed), "predict": predicted}
    names |= {"self_attention": lambda *texts, seed: ("layer", texts[0].name, seed), "display": lambda _: None}
    full = ("hatexplain", 15_000, "one layer of self-attention", 5, 0.7, 0.01)
    names["at_full"] = pd.DataFrame([full], columns=["dataset", "texts", "classifier", "trainings", "mean", "spread"])
    return run_cells("classification/similarity", "require_names", "ours = pd.DataFrame(rows", **names)


def test_both_classifiers_are_tested_on_the_same_texts_and_set_beside_table_1(tmp_path, monkeypatch):
    hatexplain, yelphat = {"encoder": 40, "layer": 61}, {"encoder": 80, "layer": 78}
    found = accuracies(tmp_path, monkeypatch, hatexplain=hatexplain, yelphat=yelphat)
    gaps = {name: np.array(numbers)[:, 0] for name, numbers in found["gaps"].items()}
    assert gaps["hatexplain"] == pytest.approx(np.full(5, 0.21))
    assert gaps["yelphat"] == pytest.approx(np.full(5, -0.02))
    at_full = found["shown"]["texts"] == 15_000
    assert found["shown"].loc[at_full, ["mean", "published"]].to_numpy().tolist() == [[0.7, 0.611]]
    table = found["shown"][~at_full].set_index(["dataset", "classifier"])
    assert table.loc[("hatexplain", "m, fine-tuned"), "mean"].item() == pytest.approx(0.40 + 0.05)
    assert table.loc[("hatexplain", "one layer of self-attention"), "published"].item() == 0.611
    assert table.loc[("yelphat", "m, fine-tuned"), ["texts", "trainings", "published"]].tolist() == pytest.approx(
        [80, 5, 0.936]
    )
    assert table.loc[("x", "one layer of self-attention"), "mean"].item() == 0.6


def test_an_encoder_and_one_layer_are_judged_on_the_corpus_the_paper_names():
    before, after = planted(PRETRAINED), planted(FINE_TUNED)
    ids = ["fosse-one-layer-beats-encoder", "fosse-small-gap"]
    for gap, verdicts in (
        (0.2, ["holds", "holds"]),
        (-0.02, ["does not hold", "holds"]),
        (-0.2, ["does not hold"] * 2),
    ):
        of_seeds = [[gap, gap - 0.01, gap + 0.01]] * 5
        found = on_page(before, after, gaps={"hatexplain": of_seeds, "yelphat": of_seeds, "reviews": of_seeds})
        found = found["verdicts"].set_index("id")["verdict"]
        assert found[ids].tolist() == verdicts
        assert len(found) == 8 + 2


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


def test_one_layer_at_full_length_is_that_of_the_recorded_trials():
    found = run_cells("classification/similarity", "alone = trials.recorded()", kinds=("encoder", "one layer"))[
        "at_full"
    ]
    found = found.set_index("dataset")
    rows = pd.read_csv(shipping.home() / "hatexplain" / "trials.csv").query("layers == 1 and entropy_weight == 0")
    right = rows[(rows["stage"] == "kept") & (rows["quantity"] == "accuracy")]["value"]
    assert found.loc["hatexplain", ["trainings", "mean"]].tolist() == pytest.approx([5, right.mean()])
    assert found.index.tolist() == ["hatexplain", "yelphat", "e-snli"]
