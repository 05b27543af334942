"""Models by name: a bundled alias, a hub id, or a local folder becomes a :class:`LoadedModel`."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from torch import nn

from analysis_lib.errors import AnalysisError
from analysis_lib.models import devices
from analysis_lib.models.live import live_model
from analysis_lib.models.loaded import LoadedModel, ModelSpec
from analysis_lib.models.names import file_hashes, known_model, located, split_twin, weights_identity
from analysis_lib.models.parts import MODEL_LAYOUTS, Layout, is_encoder_alone, layout_for

# One of these holds the vocabulary of a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
# These read bytes or code points.
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "CharacterBertTokenizer")
# Weights that play no part in a forward pass: checkpoints of other tasks come without them.
NOT_MEASURED = ("pooler.", "mask_token", "masked_spec_embed")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# Constants that transformers once saved with the weights, and makes itself now.
OLD_BUFFERS = ("masked_bias", "inv_freq", "position_ids")


def load_model(
    name: str | Path | nn.Module,
    revision: str | None = None,
    *,
    dtype: str = "float32",
    device: str | None = None,
    device_map: str | dict | None = None,
    processor: object = None,
) -> LoadedModel:
    """A model by name, or one that is at hand.

    Args:
        name: a known alias (``minilm``; ``known_models()`` lists them), a folder with ``config.json``,
            safetensors weights and a tokenizer, image processor or feature extractor, or a hub id (``owner/name``).
            Followed by ``:untrained``, it is the same model with the random weights that its training would start
            from (transformers' initialisation of its configuration, seed 0; ``minilm:untrained@seed=1`` has another).
            A model trained here takes settings of its recipe, as in ``digits-vit@steps=50@seed=1``.
            Or a model of transformers that is at hand, with a head or without, compiled or in training: it is measured
            as it is, in its precision and on its device, and does not change.
        revision: a commit, branch or tag of a model of the hub; an alias has its own.
        dtype: one of ``DTYPES``. ``float64`` tells a small number from rounding; a model in half precision takes half
            the memory, and what it computes is summed in single precision and then in float64.
        device: a torch device; by default a GPU where there is one.
        device_map: for a model that is larger than its device. ``auto`` spreads it over the GPUs; what does not fit
            there lies in memory, and what does not fit there on disk, until it is used. Or parts of the model by
            device, as in transformers.
        processor: of a model that is at hand, its tokenizer, image processor or feature extractor.

    Raises:
        AnalysisError: an unknown name, a model that cannot be reached, is of no supported architecture, has
            no safetensors weights, lacks weights, or has weights that are not finite (the layer is named).

    >>> load_model("minilm").max_length
    512
    """
    if isinstance(name, nn.Module):
        return live_model(name, processor)
    name = str(name)
    device = checked_options(dtype, device, device_map)
    whole, seed = split_twin(name)
    folder, identity = located(whole, revision)
    config = _read_config(name, folder)
    # Before the weights are read: an unsupported model may be large.
    layout = layout_for(name, config)
    if seed is not None:
        model, files, identity = _untrained(config, dtype, seed), {}, _of_twin(seed, identity)
    else:
        model, files = _read_weights(name, folder, config, layout, dtype, device_map), file_hashes(folder)
    parts = {*getattr(model, "hf_device_map", {}).values()}
    if parts and not model._no_split_modules:
        raise AnalysisError(f"a {type(model).__name__} cannot be spread over devices: leave the device map out")
    model = model if parts else model.to(device)
    processor, spec = _read_processor(name, folder, layout.kind), ModelSpec(name, revision, dtype, device, device_map)
    return LoadedModel(name, identity, model.eval(), processor, spec, files)


def checked_options(dtype: str, device: str | None, device_map: object = None) -> str:
    """The device to use; an AnalysisError, before anything is read, if a model cannot be loaded so."""
    if dtype not in DTYPES:
        raise AnalysisError(f"the dtype is {dtype}: give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    places = [*device_map.values()] if isinstance(device_map, dict) else []
    sensible = places and all(isinstance(place, str | int) and place != "meta" for place in places)
    if not sensible and device_map not in (None, "auto"):
        raise AnalysisError(f"the device map is {device_map!r}: give auto, or where each part lies, as in transformers")
    return devices.usable(device)


def revision_of(name: str) -> str:
    """The ``revision`` of the model that ``load_model`` gives for a name, which is not loaded."""
    _, seed = split_twin(name)
    return weights_identity(name) if seed is None else _of_twin(seed, weights_identity(name))


def _of_twin(seed: int, identity: str) -> str:
    return f"untrained, seed {seed}, of {identity}"


def _untrained(config: transformers.PreTrainedConfig, dtype: str, seed: int) -> transformers.PreTrainedModel:
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In single precision whatever was asked for, so that both precisions hold the same weights.
        made = _model_class(config)
        build = made.from_config if made is transformers.AutoModel else made._from_config
        model = build(config, dtype=torch.float32)
    return model.to(getattr(torch, dtype))


def _model_class(config: transformers.PreTrainedConfig) -> type:
    """The class that builds the model without a head; AutoModel would give an encoder alone a decoder."""
    return getattr(transformers, config.architectures[0]) if is_encoder_alone(config) else transformers.AutoModel


def _read_processor(name: str, folder: Path, kind: str) -> object:
    """The tokenizer, image processor or feature extractor of the folder."""
    if kind == "text":
        if not _has_vocabulary(folder):
            # transformers would make one up that knows no word.
            raise AnalysisError(f"{name} has no tokenizer: save the tokenizer to the same folder with save_pretrained")
        read = transformers.AutoTokenizer
    else:
        if not (folder / "preprocessor_config.json").is_file():
            raise AnalysisError(
                f"{name} has no preprocessor_config.json, which says how its {kind}s are prepared: "
                f"save its processor to the same folder with save_pretrained"
            )
        read = transformers.AutoImageProcessor if kind == "image" else transformers.AutoFeatureExtractor
    with _reading(f"{name} cannot be loaded", folder):
        return read.from_pretrained(folder, local_files_only=True)


def _has_vocabulary(folder: Path) -> bool:
    if any(list(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("tokenizer_class") in WITHOUT_VOCABULARY


# transformers switches parts of itself off while it builds a model, and two threads at once (as in a Dask worker) leave
# them off: the next model with tied weights would lack some.
_ALONE = threading.Lock()


@contextmanager
def _reading(fault: str, folder: Path) -> Iterator[None]:
    """Around code of other libraries: whatever fails there is a defect of the folder, and becomes one line."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    try:
        with _ALONE:
            yield
    except AnalysisError:
        raise
    except Exception as error:
        _refuse_damaged(folder)
        remedy = "give a folder as save_pretrained writes it"
        raise AnalysisError(f"{fault} ({_first_line(error)}): {remedy}") from error


def _refuse_damaged(folder: Path) -> None:
    """Raise an AnalysisError that names the file of a model's folder that cannot be read, which libraries may not."""
    remedy = "copy or save the model again"
    for path in sorted(path for path in folder.glob("*") if path.suffix in (".json", ".safetensors")):
        try:
            if path.suffix == ".safetensors":
                safetensors.safe_open(path, "pt")
            elif path.name == "tokenizer.json":
                tokenizers.Tokenizer.from_file(str(path))
            else:
                settings = json.loads(path.read_text(encoding="utf-8"))
                # Others may hold lists, such as the modules of sentence-transformers.
                told = path.name == "config.json" or path.name.endswith(".index.json")
                shards = settings.get("weight_map", {}) if told else {}
                if missing := sorted(name for name in {*shards.values()} if not (folder / name).is_file()):
                    raise AnalysisError(f"{path} names {missing[0]}, which is not there: {remedy}")
        except AnalysisError:
            raise
        except Exception as error:
            raise AnalysisError(f"{path} cannot be read ({_first_line(error)}): {remedy}") from error


def _read_weights(
    name: str, folder: Path, config: transformers.PreTrainedConfig, layout: Layout, dtype: str, device_map: object
) -> transformers.PreTrainedModel:
    safe = any(path.is_file() for path in folder.glob("*.safetensors*"))
    if not safe and not ((known := known_model(name)) and known.pickled):
        raise AnalysisError(f"{name} has no safetensors weights: save it with save_pretrained, which writes them")
    with _reading(f"{name} cannot be loaded", folder):
        model, info = _model_class(config).from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            device_map=device_map,
            # A pickle is read as tensors and nothing else (transformers' default), and for pinned models alone.
            use_safetensors=safe,
            output_loading_info=True,
            # Reported below, with names and shapes.
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in NOT_MEASURED))
    mismatched = sorted(info["mismatched_keys"])
    within = [stack.blocks.partition("*")[0] for stack in layout.stacks]
    beyond = sorted(
        key
        for key in info["unexpected_keys"]
        if any(blocks in key for blocks in within) and not key.endswith(OLD_BUFFERS)
    )
    if missing:
        fault = f"lacks the weights {missing[0]} and {len(missing) - 1} more, which would be random"
    elif mismatched:
        key, stored, wanted = mismatched[0]
        fault = f"has weights {key} of shape {tuple(stored)} where its config.json wants {tuple(wanted)}"
    elif beyond:
        fault = f"has the weights {beyond[0]}, which its config.json has no place for"
    else:
        return model
    raise AnalysisError(f"{name} {fault}: give a folder whose weights match its config.json")


def _read_config(name: str, folder: Path) -> transformers.PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise AnalysisError(f"{name} has no config.json: give a folder saved with save_pretrained")
    # Configurations validate themselves, each with errors of its own.
    with _reading(f"{name}: its config.json cannot be read", folder):
        settings = json.loads(path.read_text(encoding="utf-8"))
        if (settings.get("position_embedding_type") or "absolute") != "absolute":
            raise AnalysisError(f"{name} has relative position embeddings, which are not measured: give another model")
        model_type = settings.get("model_type")
        if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise AnalysisError(
                f"{name} is no transformers model (model_type {model_type!r}): give one of {', '.join(MODEL_LAYOUTS)}"
            )
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # A line that ends in a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"
