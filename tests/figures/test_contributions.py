"""The largest contributions are marked where they are planted."""

import pandas as pd
import pytest

from analysis_lib.errors import AnalysisError
from analysis_lib.figures import contribution_peaks


@pytest.fixture
def contribution_table() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [
        (layer, head, d, "all", 4.0 if d == 7 else 2.0 if d == 12 else 0.01, 1)
        for layer in (1, 2)
        for head in (1, 2)
        for d in range(20)
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "dimension", "key_type", "contribution", "pairs"])
    return table, pd.DataFrame({"layer": [0], "dimension": [7], "mean": [4.0], "zscore": [5.0]})


def test_contributions_mark_outliers_of_the_layer_that_is_read(contribution_table):
    table, outliers = contribution_table
    figure = contribution_peaks(table, [1, 2], outliers, named=2)
    names = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    # Dimension 7 is an outlier of hidden layer 0, which attention layer 1 reads; layer 2 reads layer 1.
    assert names == [["7*", "12"], ["7", "12"]]
    heads = {collection.get_label() for collection in figure.axes[0].collections}
    assert heads == {"1", "2"}


def test_contributions_refuse_a_layer_that_is_not_there(contribution_table):
    table, outliers = contribution_table
    with pytest.raises(AnalysisError, match="attention layers 1 to 2"):
        contribution_peaks(table, [3], outliers)
