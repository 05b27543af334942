"""A small random model of any type that transformers knows, and an input that it reads."""

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

from analysis_book.atlas.sizes import (
    CHANGES,
    CONFIGURED,
    SIZES,
    configuration,
    related_configuration,
)

# Sizes of the input: numbers that nothing else in a small model has.
BATCH = 3
TOKENS = 11
# What a small model may have: a larger one takes too long.
MOST_PARAMETERS = 60_000_000
SECOND = 16_000
WIDE_HEAD = 128
# Patches of an image along one side.
SIDE = 4
# What an image may have: attention among more of them takes too long.
MOST_PATCHES = 4000
# Frames of a spectrogram, and the names that configurations give to its number of bins.
FRAMES = 100
BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels")
# Lists of configurations that tell layers apart.
BY_LAYER = ("layer_types", "no_rope_layers")
INPUTS = {
    "input_ids": "texts",
    "pixel_values": "images",
    "pixel_values_videos": "videos",
    "input_values": "sounds",
    "input_features": "sounds",
    "flattened_patches": "images",
    "spectrogram": "sounds",
    "past_values": "time series",
}


class NotBuiltError(Exception):
    """No small model of a type could be made, or none reads an input; the message says why."""


@dataclass
class Running:
    """A small model that runs.

    Attributes:
        model: the model, in evaluation mode.
        inputs: the arguments of a call of it that works.
    """

    model: PreTrainedModel
    inputs: dict[str, object]


def running(model_type: str) -> Running:
    """A small random model of a type, and an input that it reads.

    Raises:
        NotBuiltError: there is none.
    """
    made = model_class(model_type)
    reasons = {}
    tried = []
    ways = (_with_every_kind, _by_sizes, _with_wide_heads, _with_sizes_set, _as_it_is)
    # Another way comes last, so that what runs already stays as it is.
    for make in (*ways, related_configuration):
        try:
            config = make(model_type)
            if config.to_dict() in tried:
                continue
            tried.append(config.to_dict())
            model = _built(made, config)
            small = Running(model, readable_input(model))
            return small if _attends_eagerly(small) else _with_keys_for_each_head(made, small)
        except Exception as error:  # Configurations and models fail in many ways.
            reasons[make] = reason_of(error)
    # The plainest reason is that of the plainest way.
    raise NotBuiltError(reasons.get(_by_sizes) or next(iter(reasons.values())))


def _attends_eagerly(small: Running) -> bool:
    """Whether eager attention runs; some that compute attention by themselves refuse it."""
    if getattr(small.model.config, "_attn_implementation", None) == "eager":
        return True
    # Some cannot be set back.
    model = copy.deepcopy(small.model)
    try:
        model.set_attn_implementation("eager")
    except Exception:  # Models refuse in many ways.
        return True
    try:
        with torch.no_grad():
            model(**small.inputs)
        return True
    except Exception:  # Models fail in many ways.
        return False


def _with_keys_for_each_head(made: Callable, small: Running) -> Running:
    """The same with a key for each query head, which some types need under eager attention."""
    config = copy.deepcopy(small.model.config)
    for part in _parts_of(config):
        if getattr(part, "num_key_value_heads", None) is not None:
            part.num_key_value_heads = part.num_attention_heads
    with suppress(Exception):  # Then what runs otherwise stays.
        other = Running(_built(made, config), small.inputs)
        if _attends_eagerly(other):
            return other
    return small


def _parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value)


def reason_of(error: Exception) -> str:
    """The first line of an error, and the next one if it announces that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    words = lines[0]
    if words.endswith(":") and len(lines) > 1:
        words += f" {lines[1]}"
    return words[:160]


def model_class(model_type: str) -> Callable:
    """What makes a model without a head from a configuration of a type.

    Raises:
        NotBuiltError: transformers has no such class.
    """
    kind = CONFIG_MAPPING[model_type]
    with suppress(ValueError):  # Some entries name a class that is not there.
        if transformers.MODEL_MAPPING.get(kind, None) is not None:
            return AutoModel.from_config
    # Parts of larger models have a class and no entry among the Auto classes.
    name = kind.__module__.replace(".configuration_", ".modeling_")
    try:
        source = importlib.import_module(name)
    except ImportError as error:
        raise NotBuiltError(reason_of(error)) from error
    classes = []
    for value in vars(source).values():
        if not inspect.isclass(value) or not issubclass(value, PreTrainedModel):
            continue
        # A stack is half a model, which nobody loads.
        is_part = value.__name__.endswith(("PreTrainedModel", "Stack"))
        if value.config_class is kind and not is_part:
            classes.append(value)
    if not classes:
        raise NotBuiltError("transformers has no class of models for it alone")
    # That without a head has the shortest name.
    return min(classes, key=lambda value: len(value.__name__))._from_config


def _built(made: Callable, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        whole = made(config)
    count = sum(part.numel() for part in whole.parameters())
    if count > MOST_PARAMETERS:
        raise NotBuiltError(f"its smallest has {count:,} parameters")
    torch.manual_seed(0)
    model = made(config)
    randomise(model)
    return model.float().eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Random values everywhere: a norm with the gain 1 might hide whether it was applied."""
    for name, parameter in model.named_parameters():
        # Sines and cosines of positions are no weights.
        if not parameter.is_floating_point() or not parameter.requires_grad:
            continue
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim:
            inputs = parameter.numel() // parameter.shape[0]
            if parameter.shape[0] == 1:
                inputs = parameter.shape[-1]
            parameter.normal_(0, 2 * inputs**-0.5)


# --- Configurations -------------------------------------------------------------------------------


def _by_sizes(model_type: str) -> PreTrainedConfig:
    """The default configuration with small sizes, made anew."""
    if model_type in CONFIGURED:
        return CONFIG_MAPPING[model_type](**CONFIGURED[model_type])
    return configuration(model_type, **CHANGES.get(model_type, {}))


def _with_every_kind(model_type: str) -> PreTrainedConfig:
    """The same with a layer of each kind that the default configuration has."""
    config = _by_sizes(model_type)
    default = CONFIG_MAPPING[model_type]()
    for small, whole in zip(_texts_of(config), _texts_of(default), strict=True):
        layers = _layers_of(whole)
        kinds = list(dict.fromkeys(layers))
        if len(kinds) > len({*_layers_of(small)}):
            kinds = _each_kind(kinds)
            for name, values in zip(_lists_of(whole), zip(*kinds, strict=True), strict=True):
                setattr(small, name, list(values))
            small.num_hidden_layers = len(kinds)
    return config


def _lists_of(config: PreTrainedConfig) -> dict[str, list]:
    """What a configuration says of each layer, such as whether it rotates."""
    count = getattr(config, "num_hidden_layers", None)
    lists = {name: getattr(config, name, None) for name in BY_LAYER}
    return {
        name: values
        for name, values in lists.items()
        if isinstance(values, list) and len(values) == count
    }


def _layers_of(config: PreTrainedConfig) -> list[tuple]:
    return list(zip(*_lists_of(config).values(), strict=True))


def _with_wide_heads(model_type: str) -> PreTrainedConfig:
    """The same with heads of 128 dimensions, for rotations whose parts are of fixed widths."""
    config = _by_sizes(model_type)
    for part in _texts_of(config):
        part.num_attention_heads = 2
        part.num_key_value_heads = 2
        part.hidden_size = 2 * WIDE_HEAD
        if getattr(part, "head_dim", None) is not None:
            part.head_dim = WIDE_HEAD
    return config


def _texts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A configuration, and that of its part that reads text."""
    part = config.get_text_config()
    return [config] if part is config else [config, part]


def _each_kind(kinds: list) -> list:
    """Each kind of layer, in order; at least two layers."""
    unique = list(dict.fromkeys(kinds))
    return unique if len(unique) > 1 else unique * 2


def _with_sizes_set(model_type: str) -> PreTrainedConfig:
    """The default configuration whose sizes are set afterwards, which skips its own checks."""
    config = CONFIG_MAPPING[model_type]()
    _set_sizes(config)
    return config


def _set_sizes(config: PreTrainedConfig) -> None:
    for name, value in [*vars(config).items()]:
        if isinstance(value, PreTrainedConfig):
            _set_sizes(value)
        elif name == "layer_types" and isinstance(value, list):
            config.layer_types = _each_kind(value)[: SIZES["num_hidden_layers"]]
        elif name in SIZES and type(value) is int:
            setattr(config, name, min(value, SIZES[name]))


def _as_it_is(model_type: str) -> PreTrainedConfig:
    """The default configuration."""
    return CONFIG_MAPPING[model_type]()


# --- Inputs ---------------------------------------------------------------------------------------


def readable_input(model: PreTrainedModel) -> dict[str, object]:
    """The arguments of a call that works, the first of several that are tried.

    Raises:
        NotBuiltError: it reads none of them.
    """
    reasons = []
    for inputs in _inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:  # Models fail in many ways.
            reasons.append(f"{reason_of(error)} (given {', '.join(inputs)})")
    reasons.append("its input is unknown")
    raise NotBuiltError(reasons[0])


def read_by(model: PreTrainedModel, inputs: Mapping[str, object]) -> str:
    """What a model reads in a call, and what else it takes: "texts (images not tried)"."""
    accepted = inspect.signature(model.forward).parameters
    given = list(dict.fromkeys(kind for name, kind in INPUTS.items() if name in inputs))
    others = [kind for name, kind in INPUTS.items() if name in accepted and kind not in given]
    words = " and ".join(given) or "vectors"
    if given and others:
        words += f" ({' and '.join(dict.fromkeys(others))} not tried)"
    return words


def _inputs(model: PreTrainedModel) -> Iterator[dict[str, object]]:
    """Arguments that a model may read, those of texts first if it reads texts."""
    accepted = inspect.signature(model.forward).parameters
    images = [image for image in _images(model) if image.keys() <= accepted.keys()]
    sounds = [sound for sound in _sounds(model) if sound.keys() <= accepted.keys()]
    first, *_ = [name for name in accepted if name != "self"] or [""]
    text = _text(model, accepted)
    if first in ("pixel_values", "pixel_values_videos", "input_values", "input_features"):
        yield from images
        yield from sounds
    if text:
        yield text
        bare = {name: ids for name, ids in text.items() if "mask" not in name}
        yield bare
        for other in (*images, *sounds):
            yield text | other
    yield from images
    yield from sounds
    if "grid_thw" in accepted:
        yield _patches(model, accepted, first)
    yield from _vectors(model, accepted)
    for patches in _rows_of_patches(model, accepted):
        yield patches
        if text:
            yield text | patches
    yield from _spectra(model, accepted)
    if "past_values" in accepted:
        yield _series(model, accepted)


def _patches(model: PreTrainedModel, accepted: dict, first: str) -> dict[str, Tensor]:
    """The patches of one image, each a row of numbers, and how they lie."""
    config = model.config
    sizes = ("in_channels", "in_chans", "num_channels")
    channels = next((getattr(config, name) for name in sizes if hasattr(config, name)), 3)
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    rows = torch.randn(SIDE**2, width, generator=torch.Generator().manual_seed(0))
    given = {first: rows, "grid_thw": torch.tensor([[1, SIDE, SIDE]])}
    if "merge_sizes" in accepted:
        given["merge_sizes"] = torch.tensor([2])
    return given


def plain_ids(model: PreTrainedModel, count: int) -> list[int]:
    """Ids of tokens without a special meaning, by both configurations of a model."""
    config = model.config.get_text_config()
    special = {0, 1, 2, 3}
    for name, value in {**model.config.to_dict(), **config.to_dict()}.items():
        if name.endswith(("_token_id", "_token_index")):
            values = value if isinstance(value, list) else [value]
            special |= {*values}
    plain = [index for index in range(_words(model)) if index not in special]
    return [plain[(7 * index + 3) % len(plain)] for index in range(count)]


def _words(model: PreTrainedModel) -> int:
    """How many tokens a model has vectors of, at most 256."""
    embeddings = None
    with suppress(NotImplementedError, AttributeError):
        embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        return min(embeddings.num_embeddings, 256)
    return min(getattr(model.config.get_text_config(), "vocab_size", None) or 100, 256)


def _text(model: PreTrainedModel, accepted: dict) -> dict[str, Tensor]:
    if "input_ids" not in accepted:
        return {}
    ids = torch.tensor(plain_ids(model, BATCH * TOKENS)).reshape(BATCH, TOKENS)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "decoder_input_ids" in accepted:
        # One token fewer, to tell cross-attention from self-attention.
        given["decoder_input_ids"] = ids[:, :-1]
    if "bbox" in accepted:
        given["bbox"] = torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)
    if getattr(model.config, "use_cache", False) and "use_cache" in accepted:
        given["use_cache"] = False
    taken = {name: value for name, value in given.items() if name in accepted}
    passes_on = any(argument.kind is argument.VAR_KEYWORD for argument in accepted.values())
    if passes_on:
        # To the language model that it is made of; some keep it to themselves.
        taken["attention_mask"] = given["attention_mask"]
    return taken


def _images(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    config = model.config
    vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", config)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    patch = getattr(vision, "patch_size", None)
    if isinstance(patch, int) and height * width > MOST_PATCHES * patch**2:
        return
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(BATCH, channels, height, width, generator=generator)
    yield {"pixel_values": pixels}
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    video = torch.randn(BATCH, frames, channels, height, width, generator=generator)
    yield {"pixel_values": video}
    yield {"pixel_values_videos": video}


def _sounds(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    config = model.config
    bins = [getattr(config, name) for name in BINS if hasattr(config, name)] or [80]
    frames = 2 * (getattr(config, "max_source_positions", None) or 0)
    frames = frames or getattr(config, "max_length", None) or FRAMES
    wave = torch.sin(torch.arange(SECOND) / 20)
    waves = torch.stack([wave / (1 + index) for index in range(BATCH)])
    decoder = {"decoder_input_ids": torch.full((BATCH, TOKENS), 3)}
    yield {"input_values": waves}
    yield {"input_values": waves.unsqueeze(1)}
    yield {"input_values": waves, **decoder}
    for shape in ((BATCH, bins[0], frames), (BATCH, frames, bins[0]), (BATCH, 100, 160)):
        spectrum = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        yield {"input_features": spectrum}
        yield {"input_values": spectrum}
        yield {"input_features": spectrum, **decoder}
        mask = torch.ones(BATCH, spectrum.shape[-1], dtype=torch.long)
        for name in ("attention_mask", "input_features_mask", "feature_attention_mask"):
            yield {"input_features": spectrum, name: mask}


def _vectors(model: PreTrainedModel, accepted: dict) -> Iterator[dict[str, Tensor]]:
    """Vectors for what reads neither texts nor images nor sounds."""
    width = getattr(model.config, "hidden_size", None) or getattr(model.config, "d_model", 64)
    vectors = torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(0))
    for name in ("inputs_embeds", "hidden_states", "query_embeds", "inputs"):
        if name in accepted:
            yield {name: vectors}
            rest = ("encoder_hidden_states", "image_features", "context")
            yield {name: vectors, **{other: vectors for other in rest if other in accepted}}


# --- Inputs by what a model reads first -----------------------------------------------------------


def _first_layer(model: PreTrainedModel) -> nn.Module | None:
    """What embeds patches, or the first layer that multiplies by weights."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
    of_patches = [layer for name, layer in layers.items() if "patch" in name]
    return next(iter((*of_patches, *layers.values())), None)


def _rows_of_patches(model: PreTrainedModel, accepted: dict) -> Iterator[dict[str, Tensor]]:
    """Images as their patches, and where each lies."""
    layer = _first_layer(model)
    if isinstance(layer, nn.Linear):
        shape = (layer.in_features,)
    elif isinstance(layer, nn.Conv2d):
        shape = (layer.in_channels, *layer.kernel_size)
    else:
        return
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(BATCH, SIDE**2, *shape, generator=generator)
    side = torch.arange(SIDE)
    positions = torch.cartesian_prod(side, side).expand(BATCH, -1, -1)
    if "flattened_patches" in accepted:
        # A row begins with the numbers of its row and column.
        yield {"flattened_patches": torch.cat([positions + 1, patches], dim=-1)}
    if "pixel_values" not in accepted:
        return
    places = {
        "pixel_position_ids": positions,
        "pixel_attention_mask": torch.ones(BATCH, SIDE**2, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), SIDE),
    }
    places = {name: values for name, values in places.items() if name in accepted}
    if places:
        yield {"pixel_values": patches, **places}
    if "grid_thw" in accepted:
        grid = torch.tensor([[1, SIDE, SIDE]])
        yield {"pixel_values": patches[0], "grid_thw": grid}
        yield {"pixel_values": patches[:1], "grid_thw": grid}


def _spectra(model: PreTrainedModel, accepted: dict) -> Iterator[dict[str, Tensor]]:
    """Vectors of the width that the first layer reads, and sounds of as many bins as a part."""
    generator = torch.Generator().manual_seed(0)
    layer = _first_layer(model)
    if isinstance(layer, nn.Linear | nn.Conv1d):
        width = getattr(layer, "in_features", None) or layer.in_channels
        vectors = torch.randn(BATCH, TOKENS, width, generator=generator)
        for name in ("hidden_states", "input_features", "spectrogram"):
            if name in accepted:
                yield {name: vectors}
    if "input_features" not in accepted:
        return
    decoder = {"decoder_input_ids": torch.full((BATCH, TOKENS), 3)}
    for part in _parts_of(model.config):
        for name in BINS:
            if hasattr(part, name):
                frames = torch.randn(BATCH, FRAMES, getattr(part, name), generator=generator)
                mask = torch.ones(BATCH, FRAMES, dtype=torch.long)
                yield {"input_features": frames}
                yield {"input_features": frames, "attention_mask": mask}
                yield {"input_features": frames, **decoder}


def _series(model: PreTrainedModel, accepted: dict) -> dict[str, Tensor]:
    """Time series: what a model knows of the past, and of the times to come."""
    config = model.config
    steps = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
    to_come = getattr(config, "prediction_length", 0)
    features = getattr(config, "num_time_features", 0)
    shape = (BATCH, steps)
    if hasattr(config, "num_input_channels"):
        shape += (config.num_input_channels,)
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    given = {
        "past_values": values,
        "past_values_padding": torch.zeros_like(values),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
    }
    if "past_time_features" in accepted:
        given["past_observed_mask"] = torch.ones_like(values)
        given["past_time_features"] = torch.zeros(BATCH, steps, features)
        given["future_values"] = values[:, :to_come]
        given["future_time_features"] = torch.zeros(BATCH, to_come, features)
    return {name: value for name, value in given.items() if name in accepted}
