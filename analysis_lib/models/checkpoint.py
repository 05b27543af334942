"""Weights of a folder: the files that hold them, and the model made from them."""

import json
import logging
import pickle
import re
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers.quantizers import AutoHfQuantizer

from analysis_lib.corpora.hub import PICKLES
from analysis_lib.errors import AnalysisError
from analysis_lib.models.live import bare_model
from analysis_lib.models.parts import is_encoder_alone
from analysis_lib.models.reading import LOCALLY, reading

# Weights that are not used in a forward pass: checkpoints of other tasks lack them.
NOT_MEASURED = ("pooler.", "mask_token", "masked_spec_embed")
# Prefixes and infixes in the names of the weights of a compiled or distributed model.
WRAPPED = re.compile(
    r"^module\.|(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Constants that transformers once saved with the weights, and now makes itself.
OLD_BUFFERS = ("masked_bias", "inv_freq", "position_ids")
# A subfolder that does not exist, so that transformers finds no adapter beside the weights: it
# would apply the adapter at once, and no longer report missing weights of the model itself.
WITHOUT_ADAPTER = {"adapter_kwargs": {"subfolder": "without"}}
# File names of weights saved in several parts.
SHARD = "model-*-of-*.safetensors"


def _automatic_class(config: transformers.PreTrainedConfig) -> type:
    """The class that AutoModel builds; unlike AutoModel, it also accepts a state dictionary."""
    known = transformers.MODEL_MAPPING[type(config)]
    if isinstance(known, type):
        return known
    named = [made for made in known if made.__name__ in (config.architectures or ())]
    return (named or known)[0]


class Stored(NamedTuple):
    """A model of a folder, the same without its head, and whether the head's weights are there."""

    whole: transformers.PreTrainedModel
    body: transformers.PreTrainedModel
    has_head: bool


def model_class(config: transformers.PreTrainedConfig) -> type:
    """Class of the model without a head.

    For an encoder alone, AutoModel would add a decoder.
    """
    return (
        getattr(transformers, config.architectures[0])
        if is_encoder_alone(config)
        else transformers.AutoModel
    )


def stored_model(
    name: str,
    folder: Path,
    config: transformers.PreTrainedConfig,
    dtype: str,
    device_map: object,
    made: type | None = None,
) -> Stored:
    """The model of a folder, without the adapter that may lie beside it.

    Args:
        made: the class of the whole model; by default the one without a head, unless that cannot be
            read alone.

    Raises:
        AnalysisError: the folder lacks weights of the body, has some that do not fit its
            config.json, or has those of two saves.
    """
    with reading(f"{name} cannot be loaded", folder):
        refuse_strange_weights(name, folder, config)
        return _stored_model(name, folder, config, dtype, device_map, made)


def _stored_model(
    name: str,
    folder: Path,
    config: transformers.PreTrainedConfig,
    dtype: str,
    device_map: object,
    made: type | None,
) -> Stored:
    renamed = _unwrapped_weights(folder)

    def read(made: type) -> tuple[transformers.PreTrainedModel, dict]:
        if renamed is not None and made is transformers.AutoModel:
            made = _automatic_class(config)
        source = folder if renamed is None else None
        return made.from_pretrained(
            source,
            state_dict=renamed,
            config=config,
            dtype=getattr(torch, dtype),
            device_map=device_map,
            # A pickle is read as tensors and nothing else (transformers' default).
            use_safetensors=bool(safe_files(folder)),
            output_loading_info=True,
            # Reported below, with names and shapes.
            ignore_mismatched_sizes=True,
            **WITHOUT_ADAPTER,
            **LOCALLY,
        )

    if made is not None:
        model, info = read(made)
        body = bare_model(model)
    else:
        model, info = read(model_class(config))
        body = model
        named, *_ = config.architectures or ["none"]
        headed = getattr(transformers, named, type(model))
        if info["missing_keys"] and headed is not type(model):
            # Some heads keep their base under another name, or only a part of it.
            model, info = read(headed)
            body = bare_model(model)
    within = _names_within(model, body)
    missing = [key for key in info["missing_keys"] if not is_unmeasured(key)]
    missing_in_body = sorted(key for key in missing if key in within)
    _refuse_misfit(name, body, info, missing_in_body)
    return Stored(model, body, has_head=len(missing_in_body) == len(missing))


def is_unmeasured(key: str) -> bool:
    """Whether a weight is not used in a forward pass."""
    return any(part in key for part in NOT_MEASURED)


def _names_within(model: nn.Module, body: nn.Module) -> set[str]:
    """Names, within a model, of the weights of its body."""
    tensors = {id(tensor) for tensor in (*body.parameters(), *body.buffers())}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name for name, tensor in every if id(tensor) in tensors}


def _refuse_misfit(name: str, body: nn.Module, info: dict, missing: list[str]) -> None:
    """Raise an AnalysisError for weights that do not fit a configuration, except in a head."""
    if missing:
        fault = f"lacks the weights {missing[0]} and {len(missing) - 1} more, which would be random"
    elif info["mismatched_keys"]:
        key, stored, expected = min(info["mismatched_keys"])
        fault = (
            f"has weights {key} of shape {tuple(stored)} where its config.json wants "
            f"{tuple(expected)}"
        )
    elif unexpected := _unexpected_in_blocks(body, info):
        fault = f"has the weights {min(unexpected)}, which its config.json has no place for"
    else:
        return
    raise AnalysisError(f"{name} {fault}: give a folder whose weights match its config.json")


def _unexpected_in_blocks(body: nn.Module, info: dict) -> list[str]:
    """Stored weights of blocks that a model does not have; others may be those of a head."""
    paths = [path for path, _ in body.named_parameters() if re.search(r"\.\d+\.", path)]
    blocks = {re.sub(r"\.\d+\..*", ".", path) for path in paths}
    unexpected = []
    for key in info["unexpected_keys"]:
        if any(block in key for block in blocks) and not key.endswith(OLD_BUFFERS):
            unexpected.append(key)
    return unexpected


# --- Files ----------------------------------------------------------------------------------------


def safe_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, and their index."""
    return sorted(path for path in folder.glob("*.safetensors*") if path.is_file())


def pickle_files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights as pickles, if there are no others."""
    if safe_files(folder):
        return []
    return sorted(path for pattern in PICKLES for path in folder.glob(pattern) if path.is_file())


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder."""
    files = safe_files(folder) or pickle_files(folder)
    return [
        path
        for path in files
        if path.suffix in (".safetensors", ".bin") and not path.name.startswith("adapter_")
    ]


def tensors_of(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The weights of a file by name; a pickle is read as tensors and nothing else."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path, device)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        folder = str(path.parent)
        raise AnalysisError(
            f"{path} holds more than tensors, and no code of a model is run: if you trust it, save "
            "it anew: `import torch, safetensors.torch`; "
            f"`safetensors.torch.save_file(torch.load({str(path)!r}, weights_only=False), "
            f"{folder + '/model.safetensors'!r})`"
        ) from error


def names_of_weights(folder: Path) -> set[str]:
    """The names of all weights of a folder."""
    names: set[str] = set()
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as stored:
                names.update(stored.keys())
        else:
            names.update(tensors_of(path, "meta"))
    return names


def refuse_strange_weights(name: str, folder: Path, config: transformers.PreTrainedConfig) -> None:
    """Raise an AnalysisError for weights that transformers would skip, cut or ignore.

    At most, it would give a warning.

    Raises:
        AnalysisError: there are no weights, those of two saves, or complex ones, or they are
            quantised in an unknown way.
    """
    pickles = pickle_files(folder)
    if not pickles and not safe_files(folder):
        raise AnalysisError(
            f"{name} has no safetensors weights, and no pickle of any: save it with "
            "save_pretrained, which writes them"
        )
    if pickles:
        note = "note: %s: its weights are a pickle (%s), of which tensors alone are read"
        logging.getLogger(__name__).warning(note, name, pickles[0].name)
    refuse_two_saves(name, folder)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and not AutoHfQuantizer.supports_quant_method(quantised):
        raise AnalysisError(
            f"{name}: its quantization_config is none that transformers knows: give another model"
        )
    for path in folder.glob("*.safetensors"):
        _refuse_complex(name, path)


def _refuse_complex(name: str, path: Path) -> None:
    with safetensors.safe_open(path, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 (it is no mapping)
            if stored.get_slice(key).get_dtype().startswith("C"):
                raise AnalysisError(
                    f"{name}: the weights {key} are complex numbers, which no model here computes "
                    "with"
                )


def refuse_two_saves(name: str, folder: Path) -> None:
    """Raise an AnalysisError for a folder with two saved models, one of them in a single file.

    transformers would read the single file, even if it is the older one.
    """
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if not whole.is_file():
        return
    shards = sorted(path.name for path in folder.glob(SHARD))
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards += sorted({*weight_map.values()})
    others = [shard for shard in shards if shard != whole.name]
    if others:
        raise AnalysisError(
            f"{name} has the weights of two saves, {whole.name} and {others[0]}: delete those that "
            "are not meant"
        )


def _unwrapped_weights(folder: Path) -> dict[str, Tensor] | None:
    """Weights of a compiled or distributed model, under the names of the model itself.

    None if they have these names already.
    """
    if not any(WRAPPED.search(key) for key in names_of_weights(folder)):
        return None
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        weights |= {WRAPPED.sub("", key): tensor for key, tensor in tensors_of(path).items()}
    return weights
