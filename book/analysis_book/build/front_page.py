"""The first page of a report in words, and its part of a model card, from ``geometry.json``."""

from collections.abc import Iterable, Mapping, Sequence

from analysis_book.build.sharing import data_name
from analysis_book.figures.markup import code, plain
from analysis_lib.corpora import PLURAL

# Headline numbers in words.
WORDS = {
    "anisotropy": "average cosine of two tokens",
    "similarity": "average cosine of two tokens of one text",
    "drift": "norm of the mean vector over the mean norm",
    "entropy": "attention entropy over its largest value",
    "alignment": "cosine of the mean query and the mean key",
    "attention_mass": "share of the attention",
    "attention_received": "attention that one key receives",
    "mean_norm": "mean norm",
}
SPACES = {
    "hidden": "hidden states",
    "query": "queries",
    "key": "keys",
    "value": "values",
    "query_unrotated": "queries before rotation",
    "key_unrotated": "keys before rotation",
    "final": "vectors that the model gives out",
}
KEYS = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "first": "the first token",
    "punct": "punctuation",
    "other": "other tokens",
}
# How many changes are listed.
CHANGES = 5
# The quantities of a report, with the page that has them.
GLOSSARY = {
    "Average cosine": (
        "similarity",
        "of two tokens of the corpus, over all pairs: 0 for random directions, 1 where all point "
        "the same way. A high one is called anisotropy.",
    ),
    "Average cosine of one text": (
        "within",
        "the same, of two tokens of the same text, averaged over texts.",
    ),
    "Drift": (
        "drift",
        "the norm of the mean vector of a layer, here as a share of the mean norm: 1 where all "
        "vectors are the same, 0 where they have no common part.",
    ),
    "Attention entropy": (
        "attention",
        "how evenly a query spreads its attention, over the largest value that it can have: 1 is "
        "even, 0 a single key.",
    ),
    "Share of attention": (
        "attention",
        "what a query gives to all keys of a type together, mean over queries.",
    ),
    "Sink": (
        "sinks",
        "a key that receives more than 0.3 of the attention of the queries that see it, on "
        "average.",
    ),
    "Outlier dimension": (
        "dimensions",
        "one whose absolute mean lies more than 3 standard deviations above those of the other "
        "dimensions of its layer.",
    ),
    "Spike": (
        "spikes",
        "a token whose vector is so long that the norms of its layer leave a gap below it, of a "
        "factor of two or more.",
    ),
    "Contribution": (
        "contributions",
        "of a dimension to an attention score: its term in the sum over dimensions that the score "
        "is.",
    ),
    "Effect": (
        "interventions",
        "of a change: what it adds to the loss of a model that predicts tokens; of another model, "
        "1 − the cosine of what it gives out to what it gives out without the change.",
    ),
}
INTERVAL = (
    "in brackets: the 95 % confidence interval over the texts, or over what they are parts of. "
    "That of a difference is paired: the same texts are left out of both models."
)


def notes(models: Sequence[Mapping]) -> str:
    """The notes on the texts, by model; "" if there are none."""
    lines = []
    for model in models:
        for note in model["notes"]:
            lines.append(f"- {plain(model['title'])}: {plain(note)}.")
    if not lines:
        return ""
    opening = [":::{admonition} Before you read the numbers", ":class: warning", ""]
    return "\n".join([*opening, *lines, ":::"])


def unusual(models: Sequence[Mapping]) -> str:
    """The numbers outside the range of the reference models, a line each; or that none is."""
    lines = []
    names = {}
    for model in models:
        rows = model["beside_references"]
        beyond = [row for row in rows if row["side"] != "within"]
        summary = "" if beyond else "nothing beyond the reference models"
        lines.append(f"- {plain(model['title'])}: {summary}")
        lines += [f"  - {_beside(row)}" for row in beyond or rows]
        for row in rows:
            names |= dict.fromkeys(row["references"])
    items = PLURAL[models[0]["kind"]]
    if not names:
        return f"There is no reference model that reads {items}."
    plural = "s" if len(names) > 1 else ""
    references = (
        f"Reference model{plural}: {_listed(names)}. A number is unusual where its interval lies "
        f"beyond theirs. They were measured on other {items}, which moves numbers, too."
    )
    return "\n".join([*lines, "", references])


def _beside(row: Mapping) -> str:
    """A number of a model, and the range of the reference models."""
    low, high = f"{row['reference_low']:.2f}", f"{row['reference_high']:.2f}"
    several = len(row["references"]) > 1
    theirs = f"reference models {low} to {high}" if several else f"reference model {low}"
    end = "down to" if row["quantity"] == "entropy" else "up to"
    number = f"**{row['value']:.2f}** [{row['ci_low']:.2f}, {row['ci_high']:.2f}]"
    return f"{WORDS[row['quantity']]} {end} {number} (layer {row['layer']}); {theirs}"


def changes(geometry: Mapping) -> str:
    """The largest differences to the first model, a line for each quantity; "" of one model."""
    first, *others = geometry["models"]
    parts = []
    for model in others:
        of_model = [row for row in geometry["differences"] if row["model"] == model["title"]]
        rows = [row for row in of_model if row["quantity"] in WORDS]
        clear = [row for row in rows if _is_clear(row)]
        clear.sort(key=lambda row: _size(row, first), reverse=True)
        largest = {}
        for row in clear:
            largest.setdefault(row["quantity"], row)
        lines = [f"- {_change(row, first)}." for row in [*largest.values()][:CHANGES]]
        count = f"{len(clear)} of {len(rows)} differences have an interval without zero"
        text = f"{plain(model['title'])} less {plain(first['title'])}: {count}"
        text += ". The largest of each quantity, with the first model's number:" if lines else "."
        parts += [text, "", *lines, ""]
    return "\n".join(parts)


def _is_clear(row: Mapping) -> bool:
    """True if the interval of a difference is without zero."""
    return row["ci_low"] is not None and row["ci_low"] * row["ci_high"] > 0


def _base(row: Mapping, first: Mapping) -> float:
    """The number of the first model that a difference is to."""
    (layer,) = (layer for layer in first["layers"] if layer["layer"] == row["layer"])
    number = layer[row["quantity"]]
    if row["of"]:
        number = number[row["of"]]
    return number["value"]


def _size(row: Mapping, first: Mapping) -> float:
    """The size of a difference; of norms, which have no bound, as a share of the first model's."""
    size = abs(row["difference"])
    return size / _base(row, first) if row["quantity"] == "mean_norm" else size


def _change(row: Mapping, first: Mapping) -> str:
    base = _base(row, first)
    number = f"**{row['difference']:+.3g}** [{row['ci_low']:.3g}, {row['ci_high']:.3g}]"
    of = _of(row["quantity"], row["of"])
    return f"{WORDS[row['quantity']]}{of}: {number} in layer {row['layer']}, from {base:.3g}"


def _of(quantity: str, of: str) -> str:
    """The vectors or keys that a number is of, in words."""
    if not of:
        return ""
    if quantity.startswith("attention"):
        return f", keys of the type {plain(KEYS.get(of, of))}"
    return f", {plain(SPACES.get(of, of))}"


def glossary(pages: Iterable[str]) -> str:
    """The quantities of a report, each with the page that has it."""
    pages = {*pages}
    lines = []
    for term, (page, words) in GLOSSARY.items():
        if page in pages:
            lines.append(f"{term}\n: {words} See {{doc}}`report/{page}`.\n")
    return "\n".join([":::{dropdown} Glossary", *lines, f"Interval\n: {INTERVAL}", ":::"])


def facts(models: Sequence[Mapping]) -> str:
    """The facts of the models, as a table with a column for each."""
    rows = {
        "architecture": lambda m: f"{m['architecture']} ({m['model_type']})",
        "parameters": lambda m: f"{m['parameters']:,}",
        "precision": lambda m: m["dtype"],
        "layers": lambda m: len(m["layers"]) - 1,
        "width": lambda m: _once(layer["width"] for layer in m["layers"]),
        "heads": lambda m: _once(layer["heads"] for layer in m["layers"] if layer["heads"]),
        "read by": lambda m: m["reader"],
        "vocabulary": lambda m: f"{m['vocabulary']:,}" if m.get("vocabulary") else "",
        "reads at most": lambda m: f"{m['longest']:,} tokens" if m.get("longest") else "",
        "measured on": lambda m: (
            f"{m['texts']:,} items of {data_name(m['data'])}, {m['tokens']:,} tokens"
        ),
        "computed on": lambda m: ", ".join(m.get("devices", ())),
        "left out": lambda m: "; ".join(f"{name} ({why})" for name, why in m["left_out"].items()),
    }
    titles = [plain(model["title"]) for model in models]
    lines = [["", *titles], [":---"] * (1 + len(models))]
    for name, say in rows.items():
        cells = [plain(str(say(model))) for model in models]
        if any(cells):
            lines.append([name, *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_files(models)}"


def _once(values: Iterable[object]) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _files(models: Sequence[Mapping]) -> str:
    """The files of the models and the texts with their hashes, folded."""
    rows = []
    for model in models:
        rows += [(model["title"], file, digest) for file, digest in model["model_files"].items()]
    rows.append(("", f"texts of {data_name(models[0]['data'])}", models[0]["data_sha256"]))
    lines = [f"| {plain(title)} | {plain(file)} | {code(digest)} |" for title, file, digest in rows]
    head = [":::{dropdown} Files", "| model | file | SHA-256 |", "|:---|:---|:---|"]
    return "\n".join([*head, *lines, ":::"])


def card_lines(model: Mapping) -> list[str]:
    """The lines of a model card on a model besides its numbers: notes, and what is unusual."""
    lines = [f"- Note: {plain(note)}." for note in model["notes"]]
    beyond = [row for row in model["beside_references"] if row["side"] != "within"]
    lines += [f"- Unusual: {_beside(row)} ({_listed(row['references'])})." for row in beyond]
    return [*lines, ""] if lines else []


def _listed(names: Iterable[str]) -> str:
    *first, last = (plain(name) for name in names)
    return f"{', '.join(first)} and {last}" if first else last
