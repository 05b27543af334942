"""The table of the atlas: a few rows computed anew, and cells drawn by lot computed plainly.

``ATLAS_CELLS=50 pytest -n 0 -s tests/atlas -k plain`` draws as many, and says which.
"""

import os
import random

import pandas as pd
import plainly
import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from analysis_book.atlas import cards
from analysis_book.atlas.building import COLUMNS, row
from analysis_book.atlas.small import running

TABLE = cards.load(transformers.__version__)
BUILT = TABLE[TABLE["result"] == cards.BUILT].set_index("type", drop=False)
# A few of each kind, which the plain way may not know.
ANEW = ("gpt2", "vit", "mamba", "gpt_oss")
# Of rows that `make atlas` has not reached.
NOT_RUN = "not run yet"
COUNT = int(os.environ.get("ATLAS_CELLS", "10"))


def test_there_is_a_row_for_each_type_of_the_version_that_is_installed():
    assert sorted(TABLE["type"]) == sorted(CONFIG_MAPPING_NAMES)
    assert tuple(TABLE) == (*COLUMNS, "measured")
    # What could not be had says why.
    assert (TABLE["result"] != "").all()
    assert not TABLE["result"].str.startswith("failed").any()
    empty = BUILT[[fact.name for fact in cards.FACTS]] == ""
    assert empty.to_numpy().sum() < len(BUILT)


# What the page says of types, by type and column.
SAID = {
    "last_state": {
        **dict.fromkeys(("gpt2", "llama"), "after the final norm"),
        **dict.fromkeys(
            ("vit", "dinov2", "siglip_vision_model", "clip_text_model"),
            "output of the last block, before the final norm",
        ),
    },
    "first_state": dict.fromkeys(("mamba", "falcon_mamba", "rwkv"), "output of block 1"),
    "state_axes": {
        "gemma3n_text": "4 × batch × token × width",
        "deepseek_v4": "batch × token × 4 × width",
    },
    "attention_kind": {
        "squeezebert": "scores before the softmax",
        "minimax": "weights (1), state (1)",
        "yoso": "output of attention",
        **dict.fromkeys(("gpt_oss", "deepseek_v4"), "weights beside a sink"),
        "granite_swa": "weights before a sink takes its part",
    },
    "left_padding": {
        **dict.fromkeys(("gpt2", "bert"), "real tokens change"),
        **dict.fromkeys(("roberta", "llama"), "real tokens keep"),
    },
    "pad_positions": {"bert": "[PAD] 0 1 2, then 3", "roberta": "[PAD] 1 1 1, then 2"},
    "left_padding_with_positions": {
        "gpt2": "real tokens keep",
        **dict.fromkeys(("recurrent_gemma", "deepseek_v4"), "real tokens change"),
    },
    "right_padding": {
        "fnet": "it takes no mask",
        **dict.fromkeys(("convbert", "mobilebert", "nystromformer", "yoso"), "real tokens change"),
    },
    "rotation": {
        "llama": "halves",
        **dict.fromkeys(("gptj", "cohere"), "interleaved"),
        "deepseek_v3": "interleaved, returned in halves, 64 of 192 dimensions",
    },
    "scale": {"t5": "1", "whisper": "1/√d, already in queries and keys"},
    "two_calls": dict.fromkeys(("vit_mae", "vilt"), "differ"),
}


@pytest.mark.parametrize("column", SAID)
def test_what_the_page_says_of_types_is_in_the_table(column):
    missing = TABLE.loc[TABLE["result"] == NOT_RUN, "type"]
    said = {name: cell for name, cell in SAID[column].items() if name not in {*missing}}
    assert said
    assert BUILT.loc[[*said], column].to_dict() == said


@pytest.mark.parametrize("name", ANEW)
def test_a_row_computed_anew_is_the_one_that_ships(name):
    assert row(name) == BUILT.loc[name].drop("measured").to_dict()


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


def test_versions_are_compared_cell_by_cell(monkeypatch):
    both = cards.load(transformers.__version__).set_index("type", drop=False)
    old = both.loc[["bert", "gpt2", "llama", "vit"]].assign(transformers="5.9.0")
    new = old.drop("vit").assign(transformers="5.10.0")
    old.loc["llama", "result"] = "it needs a package"
    old.loc["bert", "result"], new.loc["bert", "result"] = "it fails", "it fails otherwise"
    new.loc["gpt2", "scale"] = "1"
    old = pd.concat([old, both.loc[["rwkv"]].assign(transformers="5.9.0", result="it takes long")])
    new = pd.concat([new, both.loc[["rwkv"]].assign(transformers="5.10.0")])
    new.loc["mamba"] = both.loc["mamba"].replace(transformers.__version__, "5.10.0")
    monkeypatch.setattr(cards, "_read", lambda: pd.concat([new, old], ignore_index=True))
    # By number, not by letter.
    assert cards.versions() == ["5.9.0", "5.10.0"]
    assert {*cards.load()["transformers"]} == {"5.10.0"}
    changes = cards.changes("5.9.0", "5.10.0").set_index(["type", "fact"])
    assert changes.to_dict("index") == {
        ("gpt2", "scale"): {"before": both.loc["gpt2", "scale"], "after": "1"},
        ("llama", "result"): {"before": "it needs a package", "after": cards.BUILT},
        ("mamba", "result"): {"before": "", "after": cards.BUILT},
        ("vit", "result"): {"before": cards.BUILT, "after": ""},
    }


@pytest.mark.parametrize(
    ("name", "data"), [("gpt2", "texts.txt"), ("vit", "photos/"), ("qwen2_vl", "photos/:text")]
)
def test_lines_of_the_library_read_what_a_type_reads(name, data):
    lines = cards.measured_lines(BUILT.loc[name], "MODEL")
    assert f'load_corpus("{data}")' in lines
