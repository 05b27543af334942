"""What the settings of a folder say of its model: its type, told by its weights where they do not; and no code."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers
from torch import Size

from analysis_lib.errors import AnalysisError
from analysis_lib.models.checkpoint import NOT_MEASURED, OLD_BUFFERS, tensors_of, weight_files

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
# The settings that make transformers fetch and run code, where their values name a repository.
NAMES_CODE = ("implementation", "kernel", "custom_generate")
# What attention is computed by here, whatever a configuration asks for.
ATTENTION = (None, "eager", "sdpa")
# Types of the years when a configuration did not say its type (until spring 2020). Those in brackets compute the same.
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
# How norms were called by the first of them.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# Constants of GPT-2, which are no longer saved.
OLD_MASKS = ".attn.bias"


def refuse_named_code(name: str, folder: Path) -> None:
    """Refuse settings that name code to fetch, as an owner and a repository: none of it is run.

    Raises:
        AnalysisError: some do.
    """
    for path in sorted(folder.glob("*config*.json")):
        if not path.is_file():
            continue
        # Of a damaged file, whoever reads it says what is wrong.
        for key, value in _strings(_settings(path)):
            if "/" in value and any(part in key for part in NAMES_CODE):
                raise AnalysisError(
                    f"{name}: its {path.name} names code to fetch ({key}: {value}), and none is fetched or run: take "
                    f"that setting out of it"
                )


def own_code(folder: Path) -> list[str]:
    """The code of its own that the settings of a folder name (``auto_map``), such as ``modeling.Model``."""
    code = set()
    for path in folder.glob("*config.json"):
        code |= {value for _, value in _strings(_settings(path).get("auto_map"))}
    return sorted(code)


def _strings(settings: object, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts of nested settings, with the path of each."""
    if isinstance(settings, str):
        yield key, settings
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _strings(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(settings, list):
        for value in settings:
            yield from _strings(value, key)


def left_to_sentence_transformers(folder: Path, max_length: int) -> list[str]:
    """What sentence-transformers would do with a text before a model reads it, by the settings of a folder.

    A model is read here as transformers reads it, which does none of this.

    Args:
        folder: of the model; other settings lie above it, where it is that of a module.
        max_length: how many tokens the model reads here.
    """
    root = folder if (folder / "modules.json").is_file() else folder.parent
    if not (root / "modules.json").is_file():
        return []
    settings = _settings(folder / "sentence_bert_config.json")
    wanted, found = settings.get("max_seq_length"), []
    if isinstance(wanted, int) and wanted < max_length:
        found.append(f"cut it at {wanted} tokens")
    if settings.get("do_lower_case"):
        found.append("put it in lower case")
    chosen = _settings(root / "config_sentence_transformers.json")
    prompts = chosen.get("prompts")
    if isinstance(prompts, Mapping) and (prompt := prompts.get(chosen.get("default_prompt_name"))):
        found.append(f"put {prompt!r} before it")
    return found


def _settings(path: Path) -> Mapping:
    """The settings of a file; none where it is damaged or not there."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def choose_attention(config: transformers.PreTrainedConfig) -> None:
    """Let a model compute attention as it can anywhere, where its configuration asks for flash attention or such."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    if any(getattr(part, "_attn_implementation", None) not in ATTENTION for part in parts):
        config._attn_implementation = None


def config_by_weights(name: str, folder: Path, settings: dict) -> transformers.PreTrainedConfig:
    """The configuration of a model whose settings do not say its type: its weights have the names and shapes of one.

    Raises:
        AnalysisError: of none, or of several that compute differently.
    """
    stored = dict(_shapes(folder))
    fitting = [types for types in OLD_TYPES if any(_fits(each, settings, stored) for each in types)]
    if len(fitting) == 1:
        found = next(each for each in fitting[0] if _fits(each, settings, stored))
        logging.getLogger(__name__).warning(
            "note: %s: its config.json says no model_type: its weights are all of a %s model", name, found
        )
        return CONFIGS[found](**settings)
    reason = f"fit {' and '.join(types[0] for types in fitting)} alike" if fitting else "are of no type that is known"
    raise AnalysisError(
        f"{name} is of no type that transformers knows: its config.json says no model_type, and its weights {reason}: "
        f"save it anew with the class that it was made with, as in `from transformers import BertModel`; "
        f"`BertModel.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`, or give another model"
    )


def _shapes(folder: Path) -> Iterator[tuple[str, Size]]:
    for path in weight_files(folder):
        for key, tensor in tensors_of(path, "cpu").items():
            for old, new in OLD_NAMES.items():
                key = key.removesuffix(old) + new if key.endswith(old) else key
            yield key, tensor.shape


def _fits(model_type: str, settings: dict, stored: Mapping[str, Size]) -> bool:
    """Whether weights are all those of a model, and no others of its body are there."""
    try:
        config = CONFIGS[model_type](**settings)
        made = transformers.MODEL_MAPPING[type(config)]
        with torch.device("meta"):
            model = made(config)
    except Exception:  # Settings of another type may be none of this one.
        return False
    prefix = f"{made.base_model_prefix}."
    has_head = any(key.startswith(prefix) for key in stored)
    own = {key.removeprefix(prefix): shape for key, shape in stored.items() if key.startswith(prefix) or not has_head}
    wanted = {key: tensor.shape for key, tensor in model.state_dict().items()}
    parts = {key for key, _ in model.named_children()}
    # Of tied weights, the first.
    lost = [key for key, _ in model.named_parameters() if key not in own and not _is_unmeasured(key)]
    # Others are those of a head.
    inside = [key for key in own if key.partition(".")[0] in parts]
    beyond = [key for key in inside if key not in wanted and not _is_unmeasured(key)]
    return not lost and not beyond and all(own.get(key, shape) == shape for key, shape in wanted.items())


def _is_unmeasured(key: str) -> bool:
    return key.endswith((*OLD_BUFFERS, OLD_MASKS)) or any(part in key for part in NOT_MEASURED)
