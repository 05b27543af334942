"""Types of models of images or sounds with texts against transformers, for ``survey.py``."""

import gc
from types import ModuleType

import composite
from models import test_pairs as proof
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

COLUMNS = ("architecture", "reads", "result", "tables", "why")
TABLES = {
    "hidden states": proof.test_hidden_states,
    "queries, keys, values and attention": proof.test_queries_keys_values_and_entropies,
    "contributions": proof.test_contributions,
}
NEEDED = {
    "queries, keys, values and attention": "attention_entropy",
    "contributions": "score_contributions",
}


class TooLongError(BaseException):
    """Raised in what takes too long; models swallow plain exceptions."""


def types() -> list[str]:
    """The types with a processor that has a tokenizer and reads images or sounds."""
    every = []
    for model_type in sorted({*PROCESSOR_MAPPING_NAMES, *composite.PROCESSORS}):
        try:
            parts = composite.processor_class(model_type).get_attributes()
        except Exception:
            continue
        reads_media = any("image" in part or "feature" in part or "audio" in part for part in parts)
        if any("tokenizer" in part for part in parts) and reads_media:
            every.append(model_type)
    return every


def row(model_type: str) -> dict[str, str]:
    """What became of a type as a model of pairs."""
    made = dict.fromkeys(COLUMNS, "") | {"architecture": model_type}
    made["reads"] = "images or sounds with texts"
    made["result"] = "not tried"
    if model_type not in MODEL_MAPPING_NAMES:
        return made | {"why": "no model without a head"}
    stage = "no small model of it"
    try:
        composite.build(model_type)
        stage = "refused"
        model = proof.loaded(model_type)
        made["reads"] = {"image+text": "images", "audio+text": "sounds"}[model.kind]
        made["reads"] += " with texts"
        tables = proof.tables(model_type)
        stage = "no reference"
        proof.reference(model_type)
        proven = []
        for name, test in TABLES.items():
            if name in NEEDED and NEEDED[name] not in tables:
                continue
            test(model_type)
            proven.append(name)
    except Exception as error:
        if stage == "refused":
            return made | {"result": stage, "why": first_line(error)}
        return made | {"why": f"{stage}: {first_line(error)}"}
    return made | {"result": "measured", "tables": "; ".join(proven)}


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:120]


def forget(tests: ModuleType) -> None:
    """Let go of the models that a module of tests keeps."""
    for known in (tests.loaded, tests.tables, tests.reference):
        known.cache_clear()
    gc.collect()
