"""The mean of the tokens that stay, in the place of those that are replaced."""

import numpy as np
import pytest
import tiny
import torch

from analysis_lib import AnalysisError, Corpus, load_model, measure
from analysis_lib.capture.interventions import Replace

CORPUS = Corpus("texts", tiny.TEXTS)


def means(folder, kind: str, *changes: Replace):
    """The mean vector of tokens of a type, by layer and dimension."""
    model = load_model(folder, dtype="float64")
    table = measure(model, CORPUS, "dimension_means", intervention=changes, progress=False)[
        "dimension_means"
    ]
    return (
        table[table["token_type"] == kind]
        .pivot(index="layer", columns="dimension", values="mean")
        .to_numpy()
    )


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "first"), ("bert", "cls")])
def test_it_is_the_mean_over_all_other_tokens(tmp_path, name, kind):
    folder = tiny.save(tmp_path / name, name)
    model, tokenizer = tiny.build(name)
    with torch.no_grad():
        rest = [
            model.double()(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
            for text in tiny.TEXTS
        ]
    rest = torch.cat([found.hidden_states[1][0, 1:] for found in rest]).mean(0).numpy()
    change = Replace("residual", layers=(1,), dimensions=(2, 5), tokens=(kind,), by="mean_of_rest")
    before, after = means(folder, kind)[1], means(folder, kind, change)[1]
    np.testing.assert_allclose(after[[2, 5]], rest[[2, 5]], rtol=1e-6)
    np.testing.assert_allclose(np.delete(after, [2, 5]), np.delete(before, [2, 5]), rtol=1e-9)


def test_what_has_no_rest_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="give the tokens that are replaced"):
        Replace("residual", by="mean_of_rest")
    folder = tiny.save(tmp_path / "bert", "bert")
    with pytest.raises(AnalysisError, match="the first token of a text has a type of its own"):
        means(folder, "cls", Replace("residual", layers=(1,), tokens=("first",), by="mean_of_rest"))
    with pytest.raises(AnalysisError, match="no other token to take the mean of"):
        means(
            folder,
            "cls",
            Replace(
                "residual", layers=(1,), tokens=("cls", "sep", "punct", "other"), by="mean_of_rest"
            ),
        )
