"""A row of the atlas in words: what you get, what you might expect, and the lines that help."""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from packaging.version import Version

from analysis_lib.files import data_directory

TABLE = "transformers_outputs.csv"
BUILT = "built"
# A corpus of what a type reads, as `load_corpus` takes it.
DATA = {
    "texts": "texts.txt",
    "images": "photos/",
    "sounds": "recordings/",
    "images with texts": "photos/:text",
    "sounds with texts": "recordings/:text",
}
# Of cells that say that there is nothing to say.
NO_TEXT = "no text"
EMPTY = ("none", NO_TEXT, "no attention", "no weights", "it takes no mask")
EMPTY += ("it takes no position_ids",)
UNSEEN = ("not seen", "not tried")
# How the kinds of attentions begin that are weights.
OF_WEIGHTS = ("weights", "part of")


@dataclass(frozen=True)
class Fact:
    """A column of the table.

    Attributes:
        name: its name.
        label: what it is about, as a reader would say it.
        expected: what one would expect; empty where nothing is.
        more: whether a cell may say more than that.
    """

    name: str
    label: str
    expected: str = ""
    more: bool = False

    def surprises(self, cell: str) -> bool:
        """Whether a cell, or a part of it, is not what one expects.

        >>> BY_NAME["row_sums"].surprises("encoder: 1; decoder: 0.2 to 1")
        True
        """
        if not self.expected:
            return False
        for value in values_of(cell):
            as_expected = value == self.expected
            if self.more:
                as_expected = value.startswith(self.expected)
            if value not in EMPTY and not value.startswith(UNSEEN) and not as_expected:
                return True
        return False


FACTS = (
    Fact("hidden_states", "number of hidden states", "blocks + 1"),
    Fact("first_state", "hidden_states[0]", "embeddings", more=True),
    Fact("states_between", "hidden_states in between", "outputs of blocks"),
    Fact("last_state", "hidden_states[-1]", "output of the last block", more=True),
    Fact("state_axes", "axes of a hidden state", "batch × token × width"),
    Fact("attentions", "number of attentions", "one per block"),
    Fact("attention_kind", "what attentions hold", "weights"),
    Fact("attention_axes", "axes of an attention", "batch × head × token × token"),
    Fact("row_sums", "a row of attention adds up to", "1"),
    Fact("dropout", "attentions are taken", "after dropout"),
    Fact("default_attention", "default attention"),
    Fact("attentions_by_default", "attentions under the default", "as under eager"),
    Fact("left_padding", "[PAD] before a text, masked", "real tokens keep"),
    Fact("left_padding_with_positions", "the same with position_ids", "real tokens keep"),
    Fact("right_padding", "[PAD] behind a text, masked", "real tokens keep"),
    Fact("pad_positions", "positions behind three [PAD]"),
    Fact("rotation", "rotation of queries and keys"),
    Fact("rotation_bases", "base of the angles"),
    Fact("key_groups", "heads of queries and keys"),
    Fact("scale", "factor of the scores", "1/√d", more=True),
    Fact("cap", "cap of the scores", "none"),
    Fact("window", "window of attention", "none"),
    Fact("two_calls", "two calls in evaluation give", "same"),
    Fact("dtype", "weights are loaded", "as saved", more=True),
    Fact("measured", "measured by analysis_lib"),
)
BY_NAME = {fact.name: fact for fact in FACTS}
# Before what a cell says of one of several stacks; behind what it says of some of the layers.
_STACK = re.compile(r"^(?!not seen|not tried|refused|error|eager)[\w ]+: ")
_FIRST_POSITION = re.compile(r"\[PAD\] (\d+) ")
_COUNT = re.compile(r" \(\d+\)(?:, |$)")


def values_of(cell: str) -> list[str]:
    """What a cell says: of each stack, and of each kind of layer, if it tells them apart.

    >>> values_of("encoder: 1; decoder: 2"), values_of("weights (1), state (2)")
    (['1', '2'], ['weights', 'state'])
    """
    values = []
    for part in cell.split("; "):
        text = _STACK.sub("", part).replace("decoder token", "token")
        values += [value for value in _COUNT.split(text) if value]
    return list(dict.fromkeys(values))


# --- The table ------------------------------------------------------------------------------------


def read_table(path: Path) -> pd.DataFrame:
    """The cells of a table of the atlas, as words; empty where nothing is said."""
    return pd.read_csv(path, keep_default_na=False, dtype=str)


@functools.cache
def _read() -> pd.DataFrame:
    rows = read_table(data_directory() / TABLE)
    return rows.assign(measured=rows["type"].map(measured_by_library))


def versions() -> list[str]:
    """The versions of transformers that the table has, the oldest first."""
    return sorted(_read()["transformers"].unique(), key=Version)


def load(version: str = "") -> pd.DataFrame:
    """The rows of a version of transformers, one per type (default: of the newest)."""
    rows = _read()
    return rows[rows["transformers"] == (version or versions()[-1])].reset_index(drop=True)


def changes(before: str, after: str) -> pd.DataFrame:
    """The cells that differ between two versions of transformers.

    Types that one version lacks, or of which it runs no model, have one row, whose fact is
    ``result``.

    Returns:
        type, fact, before and after; empty where the version does not know the type.
    """
    facts = ["result", *(fact.name for fact in FACTS if fact.name != "measured")]
    columns = [load(version).set_index("type")[facts].stack() for version in (before, after)]
    cells = pd.concat(columns, axis="columns", keys=["before", "after"]).fillna("")
    cells = cells.rename_axis(["type", "fact"]).reset_index()
    results = cells[cells["fact"] == "result"].set_index("type")[["before", "after"]]
    built = results.eq(BUILT).all(axis="columns")
    # Two reasons for which no model runs are one, and how long it takes is that of a machine.
    is_slow = results.apply(lambda side: side.str.startswith("it takes")).any(axis="columns")
    results = results.isin(["", BUILT]).any(axis="columns") & ~is_slow
    is_result = cells["fact"] == "result"
    kept = cells["type"].map(results).where(is_result, cells["type"].map(built))
    return cells[kept & (cells["before"] != cells["after"])].reset_index(drop=True)


@functools.cache
def _survey() -> dict[str, list[dict[str, str]]]:
    rows = pd.read_csv(data_directory() / "architectures.csv", keep_default_na=False)
    return {name: same.to_dict("records") for name, same in rows.groupby("architecture")}


def measured_by_library(model_type: str) -> str:
    """What the survey has of a type: tables that equal a naive reference, or a reason.

    >>> measured_by_library("llava").partition(". ")[2]
    'Images with texts: hidden states; queries, keys, values and attention; contributions'
    """
    results = []
    for result in _survey().get(model_type, []):
        said = result["tables"] or f"{result['result']}: {result['why']}"
        if "with" in result["reads"]:
            said = f"{result['reads'].capitalize()}: {said}"
        results.append(said)
    return ". ".join(results) or "not surveyed"


# --- What to do -----------------------------------------------------------------------------------

TRAPS = {
    "final-norm": "The last hidden state has gone through the final norm.",
    "no-embeddings": "The list begins with the output of block 1: the embeddings are missing.",
    "streams": "A hidden state has other axes, such as parallel residual streams or maps.",
    "wider": "The last hidden state has another width than the first.",
    "not-weights": "Not all that `attentions` holds are weights.",
    "sinks": "Rows of attention do not add up to 1, or would not with their sink.",
    "fewer": "There are fewer attentions than blocks.",
    "empty": "Under the default attention, `attentions` holds no weights.",
    "left-padding": "[PAD] before a text changes its tokens, although the mask hides it.",
    "right-padding": "[PAD] behind a text changes its tokens, although the mask hides it.",
    "rotation": "Pairs of neighbouring dimensions are rotated, not the two halves of a head.",
    "scale": "Scores are not divided by the root of the width of a head.",
    "two-calls": "Two calls with the same input differ in evaluation.",
    "dtype": "Some weights are loaded in another precision than they were saved in.",
}
_BY_FACT = {
    "first_state": {"output of block 1": "no-embeddings"},
    "last_state": {"after the final norm": "final-norm", "wide, the first": "wider"},
    "attentions": {" for ": "fewer"},
    "left_padding": {"change": "left-padding"},
    "right_padding": {"change": "right-padding"},
    "rotation": {"interleaved": "rotation"},
    "two_calls": {"differ": "two-calls"},
}


def traps(row: Mapping[str, str]) -> list[str]:
    """The traps of a type, by their names."""
    names = []
    for fact, patterns in _BY_FACT.items():
        for pattern, name in patterns.items():
            if pattern in row[fact]:
                names.append(name)
    if BY_NAME["state_axes"].surprises(row["state_axes"]):
        names.append("streams")
    kinds = row["attention_kind"]
    if any(not kind.startswith(OF_WEIGHTS) for kind in values_of(kinds) if kind not in EMPTY):
        names.append("not-weights")
    if BY_NAME["row_sums"].surprises(row["row_sums"]) or "before a sink" in kinds:
        names.append("sinks")
    if BY_NAME["attentions_by_default"].surprises(row["attentions_by_default"]):
        names.append("empty")
    if BY_NAME["scale"].surprises(row["scale"]):
        names.append("scale")
    if BY_NAME["dtype"].surprises(row["dtype"]) and "error" not in row["dtype"]:
        names.append("dtype")
    return [name for name in TRAPS if name in names]


def plain_lines(row: Mapping[str, str], name: str) -> str:
    """What gets hidden states and weights with transformers alone, as code.

    Args:
        row: the row of the type.
        name: the name of the model.
    """
    lines = ["from transformers import AutoModel", ""]
    eager = ""
    if "empty" in traps(row):
        eager = ', attn_implementation="eager"'
    lines.append(f"model = AutoModel.from_pretrained({json.dumps(name)}{eager})")
    paths = [path for path in values_of(row["blocks"]) if path not in ("not recognised", *EMPTY)]
    # Norms that end blocks are none.
    paths = [path for path in paths if " " not in path]
    if "final-norm" in traps(row) and paths:
        lines.append("kept = []  # what the last block gives, before the final norm")
        for path in paths:
            lines += [
                f'last = model.get_submodule("{path}")[-1]',
                "last.register_forward_hook(lambda block, read, gave: kept.append(gave))",
            ]
    arguments = "**inputs, output_hidden_states=True, output_attentions=True"
    if "left-padding" in traps(row):
        first = _FIRST_POSITION.match(row["pad_positions"])
        if first and row["left_padding_with_positions"] == "real tokens keep":
            lines.append('positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)')
            if first[1] != "0":
                lines[-1] += f" + {first[1]}"
            arguments = arguments.replace("**inputs", "**inputs, position_ids=positions")
        else:
            lines.append('tokenizer.padding_side = "right"  # or one text at a time')
    lines.append(f"output = model({arguments})")
    if "no-embeddings" in traps(row) and row["reads"].startswith("texts"):
        lines.append('embeddings = model.get_input_embeddings()(inputs["input_ids"])')
    if "sinks" in traps(row) and "beside a sink" in row["attention_kind"]:
        lines.append("sinks = [1 - weights.sum(-1) for weights in output.attentions]")
    return "\n".join(lines)


def measured_lines(row: Mapping[str, str], name: str) -> str:
    """The same with ``measure``, as code; empty if the library does not measure the type."""
    measured = [result for result in _survey().get(row["type"], []) if result["tables"]]
    if not measured:
        return ""
    data = json.dumps(DATA[measured[0]["reads"]])
    lines = [
        "from analysis_lib import load_corpus, load_model, measure",
        "",
    ]
    metrics = "anisotropy"
    if "attention" in measured[0]["tables"]:
        metrics = "anisotropy,attention_entropy"
    model = json.dumps(name)
    lines.append(f'tables = measure(load_model({model}), load_corpus({data}), "{metrics}")')
    lines.append("# Layer 0: embeddings; layer l: output of block l.")
    lines.append('tables["anisotropy"].query("space == \'hidden\'")')
    return "\n".join(lines)
