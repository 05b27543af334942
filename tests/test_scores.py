"""The scores of the models trained here are those of their training records."""

import json

import pytest

from analysis_lib import AnalysisError
from analysis_lib.training import recipe_of, scores, trained


def test_scores_are_those_of_the_record_and_other_models_have_none():
    table = scores(["minilm", "digits-vit@steps=2", "owner/name", "digits-vit@steps=2@seed=1"])
    assert table["model"].tolist() == ["digits-vit@steps=2", "digits-vit@steps=2@seed=1"]
    for row, seed in zip(table.itertuples(), (0, 1), strict=True):
        told = json.loads((trained("digits-vit", steps=2, seed=seed) / "training.json").read_text(encoding="utf-8"))
        assert (row.parameters, row.steps, row.metric) == (told["parameters"], 2, "accuracy")
        expected = [told["score"][part] for part in ("value", "ci_low", "ci_high", "baseline")]
        assert [row.score, row.ci_low, row.ci_high, row.baseline] == expected
        assert row.ci_low <= row.score <= row.ci_high
    assert scores(["minilm"]).empty
    assert scores([]).columns.tolist() == table.columns.tolist()


def test_a_name_says_how_it_differs_from_the_recipe():
    assert recipe_of("digits-vit") == ("digits-vit", {})
    assert recipe_of("digits-vit@learning_rate=0.5@seed=3") == ("digits-vit", {"learning_rate": 0.5, "seed": 3})
    assert recipe_of("bert-base-uncased") is None
    with pytest.raises(AnalysisError, match="'steps' is no setting: write it as digits-vit@steps=50"):
        recipe_of("digits-vit@steps")
