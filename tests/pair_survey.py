"""Every type of model of images or sounds with texts against transformers.

``python tests/pair_survey.py OUT.csv`` tries all types of which transformers has a processor; with
names behind it, those alone.
"""

import csv
import gc
import logging
import signal
import sys
import traceback
import warnings

import composite
import numpy as np
import transformers
from models import test_pairs as proof
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

COLUMNS = ("architecture", "kind", "result", "stacks", "tables", "why")
# Of one processor, for each type.
SECONDS = 120
TABLES = {
    "hidden states": proof.test_hidden_states,
    "queries, keys, values and attention": proof.test_queries_keys_values_and_entropies,
    "contributions": proof.test_contributions,
}


class TooLong(BaseException):
    """Raised in what takes too long; models swallow plain exceptions."""


def types() -> list[str]:
    """The types with a processor that has a tokenizer and reads images or sounds."""
    every = []
    for model_type in sorted(PROCESSOR_MAPPING_NAMES):
        try:
            parts = composite.processor_class(model_type).get_attributes()
        except Exception:
            continue
        reads_media = any("image" in part or "feature" in part or "audio" in part for part in parts)
        if any("tokenizer" in part for part in parts) and reads_media:
            every.append(model_type)
    return every


def row(model_type: str) -> dict[str, str]:
    made = dict.fromkeys(COLUMNS, "") | {"architecture": model_type}
    if model_type not in MODEL_MAPPING_NAMES:
        return made | {"result": "not tried", "why": "no model without a head"}
    stage = "not built"
    try:
        composite.build(model_type)
        stage = "refused"
        model = proof.loaded(model_type)
        made["kind"] = model.kind
        made["stacks"] = " ".join(f"{stack.name}:{stack.tokens}" for stack in model.layout.stacks)
        tables = proof.tables(model_type)
        stage = "no reference"
        proof.reference(model_type)
        stage = "differs"
        proven = []
        for name, test in TABLES.items():
            needed = {"contributions": "score_contributions"}.get(name, "attention_entropy")
            if name != "hidden states" and needed not in tables:
                continue
            test(model_type)
            proven.append(name)
        made["tables"] = "; ".join(proven)
        return made | {"result": "measured", "why": str(tables.run["left_out"] or "")}
    except (Exception, TooLong) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "-v" in sys.argv:
            traceback.print_exc()
        why = f"{type(error).__name__}: {(lines or [''])[0][:300]}"
        if isinstance(error, AssertionError):
            why = " ".join(lines)[:300]
        return made | {"result": stage, "why": why}


def main(path: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()

    def too_long(*_: object) -> None:
        raise TooLong(f"takes more than {SECONDS} seconds")

    signal.signal(signal.SIGPROF, too_long)
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        for model_type in [name for name in names if name != "-v"] or types():
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            made = row(model_type)
            signal.setitimer(signal.ITIMER_PROF, 0)
            for known in (proof.loaded, proof.tables, proof.reference):
                known.cache_clear()
            gc.collect()
            out.writerow(made)
            file.flush()
            print(*made.values(), sep=" | ", flush=True)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main(*sys.argv[1:])
