"""Tiny models of images or sounds with texts, of any type, and processors for them without files.

The configuration is the default one with smaller sizes; the processor is that which transformers
names for the type, around a tokenizer of bytes with the special tokens that its source names, and
an image processor or a feature extractor with the sizes of the model.
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tiny
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedConfig, ProcessorMixin
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)
from transformers.video_processing_utils import BaseVideoProcessor

from analysis_book.atlas.sizes import CHANGES, _shrunk
from analysis_lib.models.pairs import without_videos

# Special tokens in the source of a processor.
_SPECIAL = re.compile(r"""["'](<[^"'\s{}<>]{1,40}>|\[[A-Z_]+\])["']""")
_NAMED = re.compile(r"tokenizer\.(\w+)_token(?:_id)?\b")
# The shares of the axes of positions in the source of a model.
_AXES = re.compile(r'"mrope_section", (\[[\d, ]+\])')
_USUAL = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
_FRAME = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def processor_class(model_type: str) -> type[ProcessorMixin]:
    return processor_class_from_name(PROCESSOR_MAPPING_NAMES[model_type])


def tokenizer(*sources: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens that sources name."""
    special = dict.fromkeys(_FRAME.values())
    named = {}
    for source in sources:
        special |= dict.fromkeys(_SPECIAL.findall(source))
        for name in _NAMED.findall(source):
            if name not in _USUAL:
                named[f"{name}_token"] = f"<{name}>"
    special |= dict.fromkeys(named.values())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*special, *alphabet])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    framed = tiny.framed(backend, _FRAME, "<s> $A", "<s> $A <s> $B")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=framed.backend_tokenizer,
        extra_special_tokens=named,
        **{f"{name}_token": token for name, token in _FRAME.items()},
    )


# --- The model ------------------------------------------------------------------------------------

# By type: settings of the configuration, of the image processor or feature extractor, and of the
# processor.
SETTINGS: dict[str, tuple[dict, dict, dict]] = {}
SIDE = 32
PATCH = 8


def _resized(settings: dict, words: int, changes: dict) -> dict:
    """Settings with the vocabulary of a tokenizer, pictures of few patches, and other changes."""
    made = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            given = changes.get(name, {})
            made[name] = _resized(value, words, given)
        elif name == "vocab_size":
            made[name] = words
        elif name == "image_size" and isinstance(value, int):
            made[name] = SIDE
        elif name == "patch_size" and isinstance(value, int):
            made[name] = PATCH
        else:
            made[name] = value
    for name, value in changes.items():
        if not isinstance(value, dict) or name not in made:
            made[name] = value
    return made


def configuration(model_type: str, reads: transformers.PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The default configuration of a type with small sizes and the tokens of a tokenizer."""
    changes, *_ = SETTINGS.get(model_type, ({}, {}, {}))
    base = transformers.AutoConfig.for_model(model_type)
    small = _shrunk(base.to_dict()) | CHANGES.get(model_type, {})
    small = _resized(small, len(reads), changes)
    small.pop("model_type")
    config = type(base)(**small)
    sections = _AXES.search(_modeling_source(type(base)))
    default = json.loads(sections[1]) if sections else None
    for part in [config, *_parts(config)]:
        _fit_rotation(part, default if part is config.get_text_config() else None)
    return config


def _modeling_source(kind: type[PreTrainedConfig]) -> str:
    name = kind.__module__.replace(".configuration_", ".modeling_")
    return inspect.getsource(importlib.import_module(name))


def _fit_rotation(config: PreTrainedConfig, default: list[int] | None) -> None:
    """Give the axes of positions, if there are several, shares of the pairs of a small head."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        sections = each.get("mrope_section") or default
        if not sections or "rope_type" not in each:
            continue
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        pairs = int(width * each.get("partial_rotary_factor", 1)) // 2
        shares = [max(1, pairs * section // sum(sections)) for section in sections]
        shares[0] += pairs - sum(shares)
        each["mrope_section"] = shares


def _set_tokens(config: PreTrainedConfig, processor: ProcessorMixin) -> None:
    """Give a configuration the ids of the tokens of its processor."""
    reads = processor.tokenizer
    for part in [config, *_parts(config)]:
        for name in [*vars(part)]:
            match = re.fullmatch(r"(\w+)_token_(?:id|index)", name)
            if not match:
                continue
            token = match[1]
            for owner in (processor, reads):
                index = getattr(owner, f"{token}_token_id", None)
                if index is None and isinstance(getattr(owner, f"{token}_token", None), str):
                    index = reads.convert_tokens_to_ids(getattr(owner, f"{token}_token"))
                if index is not None:
                    setattr(part, name, index)
                    break


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


# --- The processor --------------------------------------------------------------------------------


def _source(made: type) -> str:
    return inspect.getsource(inspect.getmodule(made))


def _taken(made: type, settings: dict) -> dict:
    """Those settings that a class takes."""
    known = inspect.signature(made.__init__).parameters
    return {name: value for name, value in settings.items() if name in known}


def image_processor(model_type: str, config: PreTrainedConfig) -> object:
    _, changes, _ = SETTINGS.get(model_type, ({}, {}, {}))
    name = IMAGE_PROCESSOR_MAPPING_NAMES[model_type]["pil"]
    made = getattr(transformers, name)
    vision = getattr(config, "vision_config", config)
    settings = {}
    default = made()
    for setting in ("patch_size", "merge_size", "temporal_patch_size"):
        if hasattr(default, setting):
            known = getattr(vision, setting, None) or getattr(vision, f"spatial_{setting}", None)
            if known:
                settings[setting] = known
    for setting in ("size", "crop_size"):
        value = getattr(default, setting, None)
        if value is None:
            continue
        keys = dict(value).keys()
        if "height" in keys:
            settings[setting] = {"height": SIDE, "width": SIDE}
        elif keys == {"shortest_edge"}:
            settings[setting] = {"shortest_edge": SIDE}
        elif "longest_edge" in keys:
            settings[setting] = {"shortest_edge": SIDE**2, "longest_edge": 4 * SIDE**2}
    return made(**settings | changes)


def feature_extractor(model_type: str, config: PreTrainedConfig) -> object:
    _, changes, _ = SETTINGS.get(model_type, ({}, {}, {}))
    name = FEATURE_EXTRACTOR_MAPPING_NAMES[model_type]
    return getattr(transformers, name)(**changes)


def processor(model_type: str, config: PreTrainedConfig, reads: object) -> ProcessorMixin:
    *_, changes = SETTINGS.get(model_type, ({}, {}, {}))
    made = processor_class(model_type)
    parts = {}
    for name in made.get_attributes():
        if "tokenizer" in name:
            parts[name] = reads
        elif "video" in name:
            parts[name] = None
        elif "image" in name:
            parts[name] = image_processor(model_type, config)
        else:
            parts[name] = feature_extractor(model_type, config)
    vision = getattr(config, "vision_config", config)
    known = {"patch_size": getattr(vision, "patch_size", None)}
    for setting in ("vision_feature_select_strategy", "image_seq_length"):
        if hasattr(config, setting):
            known[setting] = getattr(config, setting)
    with without_videos():
        return made(**parts, **_taken(made, known) | changes)


def build(model_type: str, seed: int = 0) -> tuple[transformers.PreTrainedModel, ProcessorMixin]:
    """A random model of a type, without a head, and its processor."""
    kind = CONFIG_MAPPING[model_type]
    reads = tokenizer(_source(processor_class(model_type)), _source(kind))
    config = configuration(model_type, reads)
    made = processor(model_type, config, reads)
    if len(reads) != config.get_text_config().vocab_size:
        config = configuration(model_type, reads)
    _set_tokens(config, made)
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    tiny.randomise(model)
    return model.eval(), made


SETTINGS |= {
    "llava": ({}, {}, {"num_additional_image_tokens": 1}),
}


def save(folder: Path, model_type: str, seed: int = 0) -> Path:
    """:func:`build`, saved to ``folder``."""
    model, made = build(model_type, seed)
    model.save_pretrained(folder)
    for name in made.get_attributes():
        if getattr(made, name) is None:
            # Its part for videos cannot be made without torchvision.
            setattr(made, name, object.__new__(BaseVideoProcessor))
    made.save_pretrained(folder)
    return folder
