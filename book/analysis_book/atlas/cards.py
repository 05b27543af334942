"""A row of the atlas in words: what you get, what you might expect, and the lines that help."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from analysis_lib.files import data_directory

TABLE = "transformers_outputs.csv"
BUILT = "built"
# Of cells that say that there is nothing to say.
EMPTY = ("", "none", "no text", "no attention", "no weights", "it takes no mask")
UNSEEN = "not seen"


@dataclass(frozen=True)
class Fact:
    """A column of the table.

    Attributes:
        name: its name.
        label: what it is about, as a reader would say it.
        expected: what one would expect, as the beginning of a cell; empty where nothing is.
    """

    name: str
    label: str
    expected: str = ""

    def surprises(self, cell: str) -> bool:
        """Whether a cell, or what it says of one of several stacks, is not what one expects."""
        if not self.expected or cell in EMPTY or cell.startswith(UNSEEN):
            return False
        return any(not value.startswith(self.expected) for value in values_of(cell))


FACTS = (
    Fact("hidden_states", "number of hidden states", "blocks + 1"),
    Fact("first_state", "hidden_states[0]", "embeddings"),
    Fact("states_between", "hidden_states in between", "outputs of blocks"),
    Fact("last_state", "hidden_states[-1]", "output of the last block"),
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
    Fact("scale", "factor of the scores", "1/√d"),
    Fact("cap", "cap of the scores", "none"),
    Fact("window", "window of attention", "none"),
    Fact("two_calls", "two calls in evaluation give", "same"),
    Fact("dtype", "saved in half precision, loaded", "as saved"),
    Fact("measured", "measured by analysis_lib"),
)
BY_NAME = {fact.name: fact for fact in FACTS}
# Expected axes of several stacks have other names for tokens.
_TOKENS = re.compile("decoder token")


def values_of(cell: str) -> Iterator[str]:
    """What a cell says, of each stack if it says something of several.

    >>> list(values_of("encoder: 1; decoder: 2"))
    ['1', '2']
    """
    for part in cell.split("; "):
        yield _TOKENS.sub("token", re.sub(r"^[\w ]+: ", "", part))


@functools.cache
def load() -> pd.DataFrame:
    """The table of all types."""
    return pd.read_csv(data_directory() / TABLE, keep_default_na=False, dtype=str)


# --- What to do -----------------------------------------------------------------------------------

TRAPS = {
    "final-norm": "The last hidden state has gone through the final norm.",
    "no-embeddings": "The list begins with the output of block 1: the embeddings are missing.",
    "streams": "A hidden state has further axes, such as parallel residual streams.",
    "wider": "The last hidden state has another width than the first.",
    "not-weights": "Not all that `attentions` holds are weights.",
    "sinks": "Rows of attention do not add up to 1.",
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
    "dtype": {"float32": "dtype"},
}


def traps(row: Mapping[str, str]) -> list[str]:
    """The traps of a type, by their names."""
    names = []
    for fact, patterns in _BY_FACT.items():
        for pattern, name in patterns.items():
            if pattern in row[fact]:
                names.append(name)
    if BY_NAME["state_axes"].surprises(row["state_axes"]) and "input_ids" not in row["state_axes"]:
        names.append("streams")
    kinds = row["attention_kind"]
    if any(word in kinds for word in ("state", "scores", "other", "a dict", "a tuple")):
        names.append("not-weights")
    if BY_NAME["row_sums"].surprises(row["row_sums"]):
        names.append("sinks")
    if BY_NAME["attentions_by_default"].surprises(row["attentions_by_default"]):
        names.append("empty")
    if BY_NAME["scale"].surprises(row["scale"]):
        names.append("scale")
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
    lines.append(f"model = AutoModel.from_pretrained({name!r}{eager})")
    blocks = row["blocks"]
    hooked = "final-norm" in traps(row) and ":" not in blocks and blocks != "not recognised"
    if hooked:
        lines += [
            "kept = []",
            f"last = model.get_submodule({blocks!r})[-1]  # its output, before the final norm",
            "last.register_forward_hook(lambda block, read, gave: kept.append(gave))",
        ]
    arguments = "**inputs, output_hidden_states=True, output_attentions=True"
    if "left-padding" in traps(row):
        if row["left_padding_with_positions"] == "real tokens keep":
            lines.append('positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)')
            arguments = arguments.replace("**inputs", "**inputs, position_ids=positions")
        else:
            lines.append('tokenizer.padding_side = "right"  # or one text at a time')
    lines.append(f"output = model({arguments})")
    if "no-embeddings" in traps(row):
        lines.append('embeddings = model.get_input_embeddings()(inputs["input_ids"])')
    if "sinks" in traps(row) and "sink" in row["attention_kind"]:
        lines.append("sinks = [1 - weights.sum(-1) for weights in output.attentions]")
    return "\n".join(lines)


def measured_lines(row: Mapping[str, str], name: str) -> str:
    """The same with ``measure``, as code; empty if the library does not measure the type."""
    tables = row["measured"]
    if "hidden states" not in tables:
        return ""
    lines = [
        "from analysis_lib import load_corpus, load_model, measure",
        "",
    ]
    metrics = "anisotropy"
    if "attention" in tables:
        metrics = "anisotropy,attention_entropy"
    lines.append(f'tables = measure(load_model({name!r}), load_corpus("texts.txt"), {metrics!r})')
    lines.append(
        'tables["anisotropy"].query("space == \'hidden\'")  # layer 0: embeddings, '
        "layer l: output of block l"
    )
    return "\n".join(lines)


def differences(row: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The facts that are not as one would expect: label, expectation, fact."""
    rows = []
    for fact in FACTS:
        if fact.surprises(row[fact.name]):
            rows.append((fact.label, fact.expected, row[fact.name]))
    return rows
