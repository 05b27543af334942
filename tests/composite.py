"""Tiny models of images or sounds with texts, of any type, and processors for them without files.

The configuration is the default one with smaller sizes; the processor is that which transformers
names for the type, around a tokenizer of bytes with the special tokens that its source names, and
an image processor or a feature extractor with the sizes of the model.
"""

import base64
import contextlib
import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedConfig, ProcessorMixin
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from analysis_book.atlas.sizes import CHANGES, _shrunk
from analysis_lib.models.pairs import arguments, pair_kinds, readers, without_videos

SIDE = 32
PATCH = 8
# Special tokens in the source of a processor.
_SPECIAL = re.compile(
    r"""["'](<[^"'\s{}<>]{1,40}>|\[[A-Z_]+\]|\|[A-Z]+\||\]<\][a-z ]{1,40}\[>\[)["']"""
)
_NAMED = re.compile(r"tokenizer(?:\.|, \")(\w+)_token(?:_id)?\b")
# The shares of the axes of positions in the source of a model.
_AXES = re.compile(r"\"mrope_section\", (\[[\d, ]+\])")
_USUAL = ("bos", "eos", "unk", "pad", "cls", "sep", "mask", "add_bos", "add_eos")
_FRAME = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
# Settings of a processor that hold the number of tokens of an image or a sound.
_COUNTS = (
    *("image_seq_length", "image_seq_len", "num_image_tokens", "image_length"),
    *("num_query_tokens", "audio_seq_length", "query_num", "num_img_tokens"),
)
_MISMATCH = re.compile(r"tokens:? (\d+).*?features:?(?: shape)? \D*(\d+)", re.S)
# By type: settings of the configuration, of the image processor or feature extractor, and of the
# processor.
_OMNI = {"vision_start_token_id": "<vision_bos>", "audio_start_token_id": "<audio_bos>"}
SETTINGS: dict[str, tuple[dict, dict, dict]] = {
    "llava": ({}, {}, {"num_additional_image_tokens": 1}),
    "vipllava": (
        {"vision_feature_layers": [-2, -1]},
        {},
        {"num_additional_image_tokens": 0},
    ),
    "aria": (
        {
            "vision_config": {"patch_size": 70, "image_size": 490},
            "projector_patch_to_query_dict": {196: 16},
        },
        {},
        {"size_conversion": {490: 4, 980: 16}},
    ),
    "llava_next": ({}, {}, {"num_additional_image_tokens": 1}),
    "llava_next_video": ({}, {}, {"num_additional_image_tokens": 1}),
    "t5gemma2": ({"encoder": {"mm_tokens_per_image": 4}}, {}, {"image_seq_length": 4}),
    "llava_onevision": ({}, {}, {"num_image_tokens": 16}),
    "paligemma": ({}, {"image_seq_length": 16}, {}),
    "clap": ({"audio_config": {"hidden_size": 192}}, {"truncation": "rand_trunc"}, {}),
    "align": ({"projection_dim": 640}, {}, {}),
    "ovis2": (
        {
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": [
                *("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            ],
        },
        {},
        {},
    ),
    "florence2": ({}, {"image_seq_length": 16}, {}),
    "fuyu": (
        {"patch_size": 30, "image_size": 60},
        {"size": {"height": 60, "width": 60}, "patch_size": {"height": 30, "width": 30}},
        {},
    ),
    "mllama": (
        {
            "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 768},
            "text_config": {"cross_attention_layers": [1]},
        },
        {},
        {},
    ),
    "llama4": (
        {
            "image_token_id": "<|patch|>",
            "image_token_index": "<|patch|>",
            "vision_config": {
                **{"intermediate_size": 1024, "projector_input_dim": 256},
                **{"projector_output_dim": 256, "vision_output_dim": 256},
            },
        },
        {},
        {},
    ),
    "lfm2_vl": ({"vision_config": {"patch_size": 16, "num_patches": 256}}, {}, {}),
    "kimi_k25": ({"projection_hidden_size": 256}, {}, {}),
    "muse_glimmer": ({"out_hidden_size": 1024}, {}, {}),
    "molmo2": (
        {
            "adapter_config": {"vision_feature_layer": [-1, 0]},
            "vision_config": {"image_size": [SIDE, SIDE], "num_position_embeddings": 16},
        },
        {"overlap_margins": [1, 1]},
        {},
    ),
    # The processor takes a number of tokens by a tile for the size of its patches.
    "cohere2_vision": ({}, {"patch_size": 2}, {}),
    # Its image processor counts on images of 32 x 32 patches.
    "phi4_multimodal": (
        {
            "vision_config": {"image_size": 448, "patch_size": 14, "crop_size": 448},
            "audio_config": {
                "nemo_conv_channels": 256,
                "depthwise_separable_out_channel": 256,
                "ext_pw_out_channel": 256,
            },
        },
        {"size": {"height": 448, "width": 448}, "patch_size": 14},
        {},
    ),
    "deepseek_vl_hybrid": ({"high_res_vision_config": {"global_attn_indexes": [1]}}, {}, {}),
    "chameleon": (
        {
            "vocabulary_map": {
                "<image>": 4,
                **{f"IMGIMG{chr(65 + index)}Z": 10 + index for index in range(16)},
            }
        },
        {},
        {},
    ),
    "qwen2_5_omni_thinker": (_OMNI, {}, {}),
    "qwen3_omni_moe_thinker": (_OMNI, {}, {}),
    **dict.fromkeys(
        ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
        ({}, {"scale_resolution": 64, "max_slice_nums": 2}, {}),
    ),
    "cosmos3_edge": ({"text_config": {"head_dim": 128}}, {}, {}),
    "dots3_note": ({"text_config": {"per_layer_config": None}}, {}, {}),
    "fun_asr_nano": ({"adaptor_config": {"intermediate_size": 64}}, {}, {}),
    "inkling2": ({"vision_config": {"text_hidden_size": 256}}, {}, {}),
    "cohere_compass": (
        {
            "text_config": {
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
                    for kind in ("full_attention", "sliding_attention")
                }
            }
        },
        {},
        {},
    ),
    # As published.
    "siglip": ({"text_config": {"max_position_embeddings": 64}}, {}, {}),
    "siglip2": (
        {
            "text_config": {"max_position_embeddings": 64},
            "vision_config": {"patch_size": 16, "num_patches": 256},
        },
        {},
        {},
    ),
    # A block whose windows are as wide as two tokens, and one without windows.
    "qwen2_5_vl": (
        {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
        {},
        {},
    ),
    "gemma3": ({"mm_tokens_per_image": 4}, {}, {"image_seq_length": 4}),
    # Its processor reads 30 seconds at once, and its projector reads four frames for a token.
    "voxtral": (
        {"audio_config": {"max_source_positions": 1500, "intermediate_size": 1024}},
        {},
        {},
    ),
}
# Processors of types that transformers has no entry for.
PROCESSORS = {
    "mistral3": "PixtralProcessor",
    "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
    "fast_vlm": "LlavaProcessor",
    "glm_ocr": "Glm46VProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}


# Types whose parts for files are those of another type.
_MEDIA_OF = {
    "mistral3": "pixtral",
    "kosmos-2": "clip",
    "fast_vlm": "llava",
    "glm_ocr": "glm46v",
    "qwen2_5_omni_thinker": "qwen2_vl",
    "musicflamingo": "audioflamingo3",
    "qwen3_omni_moe_thinker": "qwen2_vl",
}


def processor_class(model_type: str) -> type[ProcessorMixin]:
    """The class of the processor of a type of model."""
    name = PROCESSOR_MAPPING_NAMES.get(model_type) or PROCESSORS.get(model_type)
    if name is None:
        raise KeyError(f"no processor of {model_type}")
    return getattr(transformers, name)


def tokenizer(*sources: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens that sources name."""
    special = dict.fromkeys(_FRAME.values())
    named = {}
    for source in sources:
        special |= dict.fromkeys(_SPECIAL.findall(source))
        for name in _NAMED.findall(source):
            if name not in _USUAL and f"{name}_token.content" not in source:
                token = re.search(rf'\b{name}_token(?:: str)? ?= ?"([^"]+)"', source)
                named[f"{name}_token"] = token[1] if token else f"<{name}>"
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
        model_max_length=1024,
        **{f"{name}_token": token for name, token in _FRAME.items()},
    )


def mistral_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of mistral-common that reads :func:`write_tekken`."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tekken(Path(folder))
        return transformers.MistralCommonBackend(tokenizer_path=str(path))


def write_tekken(folder: Path) -> Path:
    """Write a small tokenizer of bytes, with tokens of sounds, in the form of mistral-common."""
    characters = [bytes([byte]) for byte in range(256)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(characters)
    ]
    special = [
        {"rank": rank, "token_str": _MISTRAL.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
        for rank in range(_MISTRAL_SPECIAL)
    ]
    config = {
        "pattern": r"\S+|\s+",
        "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": len(vocabulary) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v7",
    }
    spectrogram = {"num_mel_bins": 80, "hop_length": 160, "window_size": 400}
    audio = {
        "sampling_rate": 16000,
        "frame_rate": 12.5,
        "audio_encoding_config": spectrogram,
        "chunk_length_s": 30.0,
    }
    content = {"config": config, "vocab": vocabulary, "special_tokens": special, "audio": audio}
    path = folder / "tekken.json"
    path.write_text(json.dumps(content))
    return path


# Special tokens of Mistral's tokenizers by their ids, as published, and how many there are.
_MISTRAL = {
    **dict(enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"))),
    **{6: "[/AVAILABLE_TOOLS]", 7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]"},
    **{10: "[IMG]", 11: "<pad>", 12: "[IMG_BREAK]", 13: "[IMG_END]", 14: "[PREFIX]"},
    **{15: "[MIDDLE]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]"},
    **{19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"},
}
_MISTRAL_SPECIAL = 40


# --- The configuration ----------------------------------------------------------------------------


def configuration(model_type: str, words: int) -> PreTrainedConfig:
    """The default configuration of a type with small sizes and a number of words."""
    changes, *_ = SETTINGS.get(model_type, ({}, {}, {}))
    base = transformers.AutoConfig.for_model(model_type)
    small = _shrunk(_whole(model_type, base)) | CHANGES.get(model_type, {})
    small = _resized(small, words, changes)
    small.pop("model_type", None)
    config = type(base)(**small)
    sections = _AXES.search(_modeling_source(type(base)))
    default = json.loads(sections[1]) if sections else None
    for part in [config, *_parts(config)]:
        _fit_rotation(part, default if part is config.get_text_config() else None)
    return config


def _whole(model_type: str, base: PreTrainedConfig) -> dict:
    """The settings of a configuration, with those of towers that it has none of by default."""
    settings = base.to_dict()
    for tower in ("vision", "audio"):
        kind = f"{model_type}_{tower}"
        if settings.get(f"{tower}_config", 0) is None and kind in CONFIG_MAPPING:
            settings[f"{tower}_config"] = transformers.AutoConfig.for_model(kind).to_dict()
    return settings


def _resized(settings: dict, words: int, changes: dict) -> dict:
    """Settings with a number of words, pictures of few patches, and other changes."""
    made = {}
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            made[name] = _resized(value, words, changes.get(name, {}))
        elif name in ("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"):
            made[name] = words
        elif name == "max_source_positions":
            made[name] = 150
        elif name == "max_position_embeddings" and isinstance(value, int):
            made[name] = 1024
        elif name in ("image_size", "img_size") and isinstance(value, int):
            made[name] = SIDE
        elif name in ("image_size", "img_size") and isinstance(value, list | tuple):
            made[name] = [SIDE, SIDE]
        elif name == "patch_size" and isinstance(value, int):
            made[name] = PATCH
        elif name == "image_grid_pinpoints" and value:
            made[name] = _PINPOINTS
        else:
            made[name] = value
    for name, value in changes.items():
        if "token_id" in name or "token_index" in name:
            # Names of tokens, whose ids are not known yet.
            continue
        is_config = isinstance(settings.get(name), dict) and "model_type" in settings[name]
        if not is_config:
            made[name] = value
    return made


_PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


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


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


def _part(config: PreTrainedConfig, *words: str) -> PreTrainedConfig:
    """The part of a configuration with one of some words in its name; itself without one."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and any(word in name for word in words):
            return value
    for part in _parts(config):
        inner = _part(part, *words)
        if inner is not part:
            return inner
    return config


def _set_tokens(model_type: str, config: PreTrainedConfig, processor: ProcessorMixin) -> None:
    """Give a configuration the ids of the tokens of its processor."""
    reads = processor.tokenizer
    changes, *_ = SETTINGS.get(model_type, ({}, {}, {}))
    read = _example_ids(processor)
    named = {
        name: value
        for name, value in changes.items()
        if "token_id" in name or "token_index" in name
    }
    for name, tokens in named.items():
        setattr(config, name, reads.convert_tokens_to_ids(tokens))
    for part in [config, *_parts(config)]:
        for name in {*dir(part)} - named.keys():
            match = re.fullmatch(r"(\w+?)_token_(?:id|index)", name)
            if not match or match[1] in ("eos", "bos", "pad"):
                continue
            candidates = [_id_of(match[1], reads, processor), _id_of(match[1], processor, reads)]
            # A placeholder may differ from the token that takes its place.
            index = max(candidates, key=lambda index: read.count(index) if index else -1)
            if index is not None:
                with contextlib.suppress(Exception):
                    setattr(part, name, index)


def _example_ids(processor: ProcessorMixin) -> list[int]:
    """The tokens of an example, if the processor reads it."""
    kind, *_ = pair_kinds(processor)
    for reader in readers(processor, kind):
        with contextlib.suppress(Exception):
            return reader(*reader.example())["input_ids"][0].tolist()
    return []


def _id_of(token: str, *owners: object) -> int | None:
    reads = next(owner for owner in owners if not isinstance(owner, ProcessorMixin))
    for owner in owners:
        index = getattr(owner, f"{token}_token_id", None)
        name = getattr(owner, f"{token}_token", None)
        if index is None and name is not None:
            index = reads.convert_tokens_to_ids(str(name))
        if isinstance(index, int):
            return index
    return None


# --- The processor --------------------------------------------------------------------------------


def _source(made: type) -> str:
    return inspect.getsource(importlib.import_module(made.__module__))


def _taken(made: type, settings: dict) -> dict:
    """Those settings that a class takes."""
    known = inspect.signature(made.__init__).parameters
    return {name: value for name, value in settings.items() if name in known}


def _mapped(names: dict, model_type: str) -> object:
    """The entry of a type in a mapping, or that of another type with the same processor."""
    if model_type in names:
        return names[model_type]
    if _MEDIA_OF.get(model_type) in names:
        return names[_MEDIA_OF[model_type]]
    if "omni_thinker" in model_type:
        return names["whisper"]
    own = processor_class(model_type).__name__
    for other, name in PROCESSOR_MAPPING_NAMES.items():
        if name == own and other in names:
            return names[other]
    raise KeyError(f"{model_type} has no part for its files")


# Settings of an image processor that go with the sizes of a model.
_IMAGE_SETTINGS = (
    *("patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size"),
    *("size", "crop_size", "max_image_size", "high_res_size", "image_grid_pinpoints"),
    *("max_pixels", "min_pixels"),
)


def image_processor(model_type: str, config: PreTrainedConfig, counts: dict) -> object:
    """The image processor of a type that works without torchvision, for a small model."""
    _, changes, _ = SETTINGS.get(model_type, ({}, {}, {}))
    entry = _mapped(IMAGE_PROCESSOR_MAPPING_NAMES, model_type)
    names = [*entry.values()] if isinstance(entry, dict) else [entry]
    name = entry.get("pil") if isinstance(entry, dict) else None
    if name is None and not is_torchvision_available():
        raise ImportError("its image processor needs torchvision")
    made = getattr(transformers, name or names[0])
    vision = _part(config, "vision", "image", "vit")
    default = made()
    settings = {}
    for name in (*_IMAGE_SETTINGS, *counts):
        value = getattr(default, name, None)
        known = getattr(vision, name, None)
        spatial = getattr(vision, f"spatial_{name}", None)
        if name in ("patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size"):
            if isinstance(known or spatial, int) and isinstance(value, int):
                settings[name] = known or spatial
        elif name in ("size", "crop_size", "max_image_size", "high_res_size") and value:
            settings[name] = _small_size(value)
        elif name == "image_grid_pinpoints" and value:
            settings[name] = _PINPOINTS
        elif name in counts:
            settings[name] = counts[name]
        elif name in ("max_pixels", "min_pixels") and value:
            settings[name] = 4 * SIDE**2 if name == "max_pixels" else SIDE**2
    processor = made(**settings | changes)
    for name, value in counts.items():
        if hasattr(processor, name):
            setattr(processor, name, value)
    return processor


def _small_size(value: object) -> object:
    if isinstance(value, int):
        return SIDE
    given = {name: size for name, size in dict(value).items() if size is not None}
    if "height" in given:
        return {"height": SIDE, "width": SIDE}
    if given.keys() == {"shortest_edge"}:
        return {"shortest_edge": SIDE}
    if given.keys() == {"longest_edge"}:
        return {"longest_edge": SIDE}
    if given.get("longest_edge", 0) > 10_000:
        # Numbers of pixels.
        return {"shortest_edge": SIDE**2, "longest_edge": 4 * SIDE**2}
    return {"shortest_edge": SIDE, "longest_edge": SIDE} if "longest_edge" in given else given


def feature_extractor(model_type: str, config: PreTrainedConfig) -> object:
    """The feature extractor of a type, for a small model."""
    _, changes, _ = SETTINGS.get(model_type, ({}, {}, {}))
    made = getattr(transformers, _mapped(FEATURE_EXTRACTOR_MAPPING_NAMES, model_type))
    audio = _part(config, "audio", "speech", "encoder")
    bins = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "num_mels")
    known = next((getattr(audio, name) for name in bins if hasattr(audio, name)), None)
    settings = {}
    if known is not None:
        settings = dict.fromkeys(("feature_size", "num_mel_bins"), known)
    positions = getattr(audio, "max_source_positions", None)
    if positions and "chunk_length" in inspect.signature(made.__init__).parameters:
        # Two steps of 10 ms for each position.
        settings["chunk_length"] = max(1, positions * 2 // 100)
    return made(**_taken(made, settings | changes))


def processor(
    model_type: str, config: PreTrainedConfig, reads: object, counts: dict
) -> ProcessorMixin:
    """The processor of a type, for a small model.

    Args:
        counts: settings that hold the number of tokens of an image or a sound.
    """
    *_, changes = SETTINGS.get(model_type, ({}, {}, {}))
    made = processor_class(model_type)
    parts = {}
    for name in made.get_attributes():
        if "tokenizer" in name:
            parts[name] = reads
        elif "video" in name:
            parts[name] = None
            if is_torchvision_available():
                parts[name] = object.__new__(BaseVideoProcessor)
                vars(parts[name]).update(vars(parts.get("image_processor", made)))
        elif "image" in name:
            parts[name] = image_processor(model_type, config, counts)
        else:
            parts[name] = feature_extractor(model_type, config)
    vision = _part(config, "vision", "image", "vit")
    known = {"patch_size": getattr(vision, "patch_size", None)}
    known["spatial_merge_size"] = getattr(config, "spatial_merge_size", None)
    for setting in ("vision_feature_select_strategy", *_COUNTS, "downsample_factor"):
        if isinstance(getattr(config, setting, None), str | int):
            known[setting] = getattr(config, setting)
    known |= {"img_size": SIDE, "image_size": SIDE} | changes | counts
    known = {name: value for name, value in known.items() if value is not None}
    with without_videos():
        processor = made(**parts, **_taken(made, known))
    for name, value in counts.items():
        setattr(processor, name, value)
    return processor


# --- Both -----------------------------------------------------------------------------------------


def build(model_type: str, seed: int = 0) -> tuple[transformers.PreTrainedModel, ProcessorMixin]:
    """A random model of a type, without a head, and its processor."""
    if model_type == "voxtral":
        reads = mistral_tokenizer()
    else:
        reads = tokenizer(_source(processor_class(model_type)), _source(CONFIG_MAPPING[model_type]))
    counts: dict[str, int] = {}
    for _ in range(4):
        config = configuration(model_type, len(reads))
        made = processor(model_type, config, reads, counts)
        if len(reads) != config.get_text_config().vocab_size:
            config = configuration(model_type, len(reads))
        _set_tokens(model_type, config, made)
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(config)
        tiny.randomise(model)
        better = _counts(model.eval(), made)
        if better is None or better == counts:
            break
        counts = better
    return model, made


def _counts(model: transformers.PreTrainedModel, made: ProcessorMixin) -> dict | None:
    """Numbers of tokens that fit the features of an image; None if they fit, or cannot be known."""
    kind, *_ = pair_kinds(made)
    if kind != "image+text":
        return None
    for reader in readers(made, kind):
        try:
            with torch.no_grad():
                model(**arguments(reader, model, *reader.example()))
            return None
        except Exception as error:
            match = _MISMATCH.search(str(error))
            if match is None or not int(match[1]):
                continue
            tokens, features = map(int, match.groups())
            width = model.config.get_text_config().hidden_size
            if features > tokens and features % width == 0 and "shape" not in str(error):
                features //= width
            owners = (made, made.image_processor)
            settings = {}
            for name in _COUNTS:
                for owner in owners:
                    if isinstance(value := getattr(owner, name, None), int):
                        settings[name] = max(1, value * features // tokens)
            source = _source(type(made))
            return settings or {name: features for name in _COUNTS if name in source}
    return None


def example() -> Image.Image:
    """A picture of random colours."""
    random = np.random.default_rng(0)
    return Image.fromarray(random.integers(0, 256, (60, 50, 3), dtype=np.uint8))


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
