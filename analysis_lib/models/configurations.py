"""Settings of a model's folder, including a model type that only the weights reveal.

Code named by settings is never run.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers
from torch import Size

from analysis_lib.errors import AnalysisError
from analysis_lib.models.checkpoint import OLD_BUFFERS, is_unmeasured, tensors_of, weight_files
from analysis_lib.models.probe import with_parts

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
# Settings that make transformers download and run code if their value names a repository.
NAMES_CODE = ("implementation", "kernel", "custom_generate")
# Implementations of attention that a configuration may name; others are replaced by the default.
ATTENTION = (None, "eager", "sdpa")
# Candidate types for configurations that state none (until spring 2020). Types in the same tuple
# compute the same.
OLD_TYPES = (
    ("bert",),
    ("roberta", "camembert", "xlm-roberta"),
    ("gpt2",),
    ("openai-gpt",),
    ("distilbert",),
    ("albert",),
    ("electra",),
    ("xlnet",),
    ("xlm",),
    ("flaubert",),
    ("ctrl",),
    ("t5",),
    ("bart",),
)
# Names of the parameters of norms in the first such models.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# Constants of GPT-2, which are no longer saved.
OLD_MASKS = ".attn.bias"


def refuse_named_code(name: str, folder: Path) -> None:
    """Raise an AnalysisError for settings that name code of a repository (owner/name) to download.

    None of it is run.

    Raises:
        AnalysisError: there are such settings.
    """
    for path in sorted(folder.glob("*config*.json")):
        if not path.is_file():
            continue
        # A damaged file is reported when it is read.
        for key, value in _strings(_settings(path)):
            if "/" in value and any(part in key for part in NAMES_CODE):
                raise AnalysisError(
                    f"{name}: its {path.name} names code to fetch ({key}: {value}), and none is "
                    "fetched or run: take that setting out of it"
                )


def own_code(folder: Path) -> list[str]:
    """Code in a model's folder that its settings name (``auto_map``): ``modeling.Model``."""
    code = set()
    for path in folder.glob("*config.json"):
        code |= {value for _, value in _strings(_settings(path).get("auto_map"))}
    return sorted(code)


def _strings(settings: object, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in nested settings, with the path of each."""
    if isinstance(settings, str):
        yield key, settings
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _strings(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(settings, list):
        for value in settings:
            yield from _strings(value, key)


def left_to_sentence_transformers(folder: Path, max_length: int) -> list[str]:
    """Steps of sentence-transformers before a model reads a text, which transformers does not take.

    Args:
        folder: the folder of the model; if it is that of a module, further settings are in its
            parent.
        max_length: the number of tokens that the model reads here.
    """
    root = folder if (folder / "modules.json").is_file() else folder.parent
    if not (root / "modules.json").is_file():
        return []
    steps = []
    settings = _settings(folder / "sentence_bert_config.json")
    longest = settings.get("max_seq_length")
    if isinstance(longest, int) and longest < max_length:
        steps.append(f"cut it at {longest} tokens")
    if settings.get("do_lower_case"):
        steps.append("put it in lower case")
    settings = _settings(root / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    prompt = (
        prompts.get(settings.get("default_prompt_name")) if isinstance(prompts, Mapping) else None
    )
    if prompt:
        steps.append(f"put {prompt!r} before it")
    return steps


def _settings(path: Path) -> Mapping:
    """The settings of a file; empty if it is damaged or missing."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def choose_attention(config: transformers.PreTrainedConfig) -> None:
    """Use the default attention for a configuration that asks for flash attention or the like."""
    attention = [getattr(part, "_attn_implementation", None) for part in with_parts(config)]
    if any(implementation not in ATTENTION for implementation in attention):
        config._attn_implementation = None


def config_by_weights(name: str, folder: Path, settings: dict) -> transformers.PreTrainedConfig:
    """The configuration for settings without a model type, from names and shapes of the weights.

    Raises:
        AnalysisError: no type fits, or several that compute differently.
    """
    stored = dict(_shapes(folder))
    fitting = {}
    for types in OLD_TYPES:
        for model_type in types:
            if _fits(model_type, settings, stored):
                fitting.setdefault(types, model_type)
    if len(fitting) == 1:
        (model_type,) = fitting.values()
        note = "note: %s: its config.json says no model_type: its weights are all of a %s model"
        logging.getLogger(__name__).warning(note, name, model_type)
        return CONFIGS[model_type](**settings)
    reason = "are of no type that is known"
    if fitting:
        reason = f"fit {' and '.join(types[0] for types in fitting)} alike"
    raise AnalysisError(
        f"{name} is of no type that transformers knows: its config.json says no model_type, and "
        f"its weights {reason}: save it anew with the class that it was made with, as in `from "
        "transformers import BertModel`; "
        f"`BertModel.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`, or give "
        "another model"
    )


def _shapes(folder: Path) -> Iterator[tuple[str, Size]]:
    """Shapes of the weights of a folder, under current names."""
    for path in weight_files(folder):
        for key, tensor in tensors_of(path, "cpu").items():
            for old, new in OLD_NAMES.items():
                if key.endswith(old):
                    key = key.removesuffix(old) + new
            yield key, tensor.shape


def _fits(model_type: str, settings: dict, stored: Mapping[str, Size]) -> bool:
    """Whether stored weights are exactly those of the body of a model type."""
    try:
        config = CONFIGS[model_type](**settings)
        made = transformers.MODEL_MAPPING[type(config)]
        with torch.device("meta"):
            model = made(config)
    except Exception:  # Settings of one type may be invalid for another.
        return False
    prefix = f"{made.base_model_prefix}."
    if any(key.startswith(prefix) for key in stored):
        # The weights are those of a model with its head.
        stored = {
            key.removeprefix(prefix): shape
            for key, shape in stored.items()
            if key.startswith(prefix)
        }
    expected = {key: tensor.shape for key, tensor in model.state_dict().items()}
    # Of tied weights, only the first name.
    for key, _ in model.named_parameters():
        if key not in stored and not _is_ignored(key):
            return False
    # Weights outside the parts of the body are those of a head.
    parts = {key for key, _ in model.named_children()}
    for key in stored:
        if key.partition(".")[0] in parts and key not in expected and not _is_ignored(key):
            return False
    return all(stored.get(key, shape) == shape for key, shape in expected.items())


def _is_ignored(key: str) -> bool:
    return key.endswith((*OLD_BUFFERS, OLD_MASKS)) or is_unmeasured(key)
