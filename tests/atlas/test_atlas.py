"""The table of the atlas: a few rows computed anew, and cells drawn by lot computed plainly.

``ATLAS_CELLS=50 pytest -n 0 -s tests/atlas -k plain`` draws as many, and says which.
"""

import os
import random

import plainly
import pytest
import transformers

from analysis_book.atlas import cards
from analysis_book.atlas.building import COLUMNS, row
from analysis_book.atlas.small import running

TABLE = cards.load()
BUILT = TABLE[TABLE["result"] == cards.BUILT].set_index("type", drop=False)
# A few of each kind, which the plain way may not know.
ANEW = ("gpt2", "vit", "mamba", "gpt_oss")
COUNT = int(os.environ.get("ATLAS_CELLS", "10"))


def test_there_is_a_row_for_each_type_of_the_version_that_is_installed():
    assert {*TABLE["transformers"]} == {transformers.__version__}
    assert sorted(TABLE["type"]) == sorted(transformers.CONFIG_MAPPING)
    assert tuple(TABLE) == COLUMNS
    # What could not be had says why.
    assert (TABLE["result"] != "").all()
    assert not TABLE["result"].str.startswith("failed").any()
    empty = BUILT[[fact.name for fact in cards.FACTS]] == ""
    assert empty.to_numpy().sum() < len(BUILT)


@pytest.mark.parametrize("name", ANEW)
def test_a_row_computed_anew_is_the_one_that_ships(name):
    assert row(name) == BUILT.loc[name].to_dict()


def drawn(count):
    """Cells by lot that the plain way knows, each with what it says."""
    lot = random.Random(0)
    cells = [(name, column) for name in sorted(BUILT.index) for column in plainly.WAYS]
    lot.shuffle(cells)
    for name, column in cells:
        small = running(name)
        try:
            yield name, column, plainly.cell(column, small.model, small.inputs)
        except plainly.NotKnownError:
            continue
        count -= 1
        if not count:
            return


def test_cells_drawn_by_lot_are_what_transformers_alone_says():
    different = []
    for name, column, plain in drawn(COUNT):
        print(f"{name}, {column}: {plain}")
        if BUILT.loc[name, column] != plain:
            different.append((name, column, BUILT.loc[name, column], plain))
    assert not different
