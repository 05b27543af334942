"""Every architecture of transformers against the naive reference: the rows of
``data/architectures.csv``.

``python tests/survey.py data/architectures.csv`` takes an hour of one core; with names, those alone
are tried. Types that read images or sounds together with texts have a further row, of their pairs.

Some types need torchvision, torchaudio or timm, whose parts in Python do: ``make .venv/.vision``,
with that folder in ``PYTHONPATH``.
"""

import csv
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pair_survey
import shrunk
import tiny
import transformers
from models import test_any_transformer as proof
from pair_survey import COLUMNS, TooLongError, first_line

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.models.probe import kind_of

# The tables of ``measure`` that prove what is captured.
TABLES = {
    "anisotropy": "hidden states",
    "attention_entropy": "queries, keys, values and attention",
    "score_contributions": "contributions",
}
REASONS = {
    "without overflow": "transformers does not compute it in float64",
    # Of the small model: whether the architecture needs more, or its sizes do not go together, is
    # not known.
    "no reference for its attention": "no reference for its attention",
    r"cannot read an? [a-z]+\+text pair": "a small model of it reads no such pair",
    "needs torchvision": "needs the package torchvision",
    r"Package `(\w+)` is required": r"needs the package \1",
    "no model without a head": "transformers has no model of it without a head",
    "cannot read a few": "a small model of it reads no text alone",
    "cannot read what": "a small model of it reads no image or sound alone",
    "other vectors of one": "reads its input anew each time",
    "further tokens behind": "has tokens behind those of an image",
    "tokens_per_batch=1": "joins the images of a batch",
    "switch its padding off": "its processor pads",
    "which stand for no tokens": "its vectors stand for no tokens",
    "no transformer block": "no list of blocks that follow one another",
    "stand for no tokens": "its vectors stand for no tokens",
    "^(reads .*)": r"\1",
    r"([\d,]+) parameters": r"its smallest has \1 parameters",
    r"requires the (\w+) library": r"needs the package \1",
    "no small model": "no small model of it was made",
    "(takes more than .*)": r"\1",
    "mask for each": "a mask for each head",
    "not captured exactly": "its attention is not captured exactly",
}
# Of one processor, for each row.
SECONDS = 180
# More than a test takes time for.
MOST_PARAMETERS = 30_000_000
OF_BOOK = {model_type: name for name, (model_type, *_) in tiny.EVERY_ARCHITECTURE.items()}


def row(model_type: str) -> dict[str, str]:
    """What became of an architecture."""
    if model_type in OF_BOOK:
        # Their own tests prove them.
        name = OF_BOOK[model_type]
        model, processor = tiny.build(name)
        loaded = load_model(model, processor=processor)
        items = tiny.corpus(name)
        kind = {"text": "texts", "image": "images", "audio": "sounds"}[tiny.kind(name)]
        maps = {"maps": "positions"} if loaded.layout.maps else {}
        return measured(model_type, kind, measure(loaded, items, progress=False, **maps))
    try:
        model = proof.built(model_type)
    except Exception as error:
        return left(model_type, "not tried", f"no small model of it: {first_line(error)}")
    reads = {"text": "texts", "image": "images", "audio": "sounds"}[kind_of(model)]
    try:
        tables = proof.tables(model_type)
    except AnalysisError as error:
        why = str(error).partition("model, ")[2].partition(": give")[0] or str(error)
        return left(model_type, "not tried" if "cannot read" in why else "refused", why, reads)
    except Exception as error:
        return left(model_type, "not tried", first_line(error), reads)
    try:
        proof.test_hidden_states(model_type)
    except Exception as error:
        return left(model_type, "not tried", f"no reference: {first_line(error)}", reads)
    try:
        proof.test_queries_keys_and_entropies(model_type)
        proof.test_masses_sum_to_one_and_a_sink_has_its_part(model_type)
        proof.test_contributions(model_type)
    except Exception as error:
        why = f"no reference for its attention: {first_line(error)}"
        return measured(model_type, reads, ["anisotropy"]) | {"why": why}
    return measured(model_type, reads, tables)


def measured(model_type: str, reads: str, tables: Sequence[str]) -> dict[str, str]:
    kinds = "; ".join(word for table, word in TABLES.items() if table in tables)
    return dict(zip(COLUMNS, (model_type, reads, "measured", kinds, ""), strict=True))


def left(model_type: str, result: str, why: str, reads: str = "texts") -> dict[str, str]:
    return dict(zip(COLUMNS, (model_type, reads, result, "", in_words(why)), strict=True))


def in_words(why: str) -> str:
    """A reason as a reader understands it; errors of other libraries are not meant for readers."""
    for pattern, words in REASONS.items():
        if found := re.search(pattern, why):
            return found.expand(words)
    return "no reference for it"


def rows_of(names: Sequence[str]) -> Iterator[tuple[Callable[[str], dict[str, str]], str]]:
    """What makes each row, and the type that it is of."""
    every = {*shrunk.TYPES, *OF_BOOK}
    pairs = {*pair_survey.types()}
    for model_type in names or sorted(every | pairs):
        if model_type in every:
            yield row, model_type
        if model_type in pairs:
            yield pair_survey.row, model_type


def timed(make: Callable[[str], dict[str, str]], model_type: str) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        made = make(model_type)
    except TooLongError as error:
        made = left(model_type, "not tried", str(error))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return made | {"why": in_words(made["why"]) if made["why"] else ""}


def too_long(*_: object) -> None:
    raise TooLongError(f"takes more than {SECONDS} seconds")


def main(path: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    shrunk.MOST_PARAMETERS = MOST_PARAMETERS
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, too_long)
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        for make, model_type in rows_of(names):
            made = timed(make, model_type)
            for tests in (proof, pair_survey.proof):
                pair_survey.forget(tests)
            out.writerow(made)
            file.flush()
            print(*made.values(), sep=" | ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main(*sys.argv[1:])
