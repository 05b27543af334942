"""Models by name: a bundled alias, a hub id, or a local folder becomes a :class:`LoadedModel`."""

import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import safetensors
import tokenizers
import torch
import transformers
from torch import nn
from transformers.quantizers import AutoHfQuantizer

from analysis_lib.errors import AnalysisError
from analysis_lib.models import devices
from analysis_lib.models.layouts import kind_of, model_part
from analysis_lib.models.live import bare_model, live_model
from analysis_lib.models.loaded import LoadedModel, ModelSpec
from analysis_lib.models.names import (
    ADAPTER,
    CHECKPOINT,
    PREPARATION,
    adapter_base,
    file_hashes,
    has_processor,
    known_model,
    located,
    of_part,
    split_dtype,
    split_name,
    weights_identity,
)
from analysis_lib.models.parts import is_encoder_alone, listed_layout, refuse_too_large

# Language models by what they predict: what they are called, what that is, and their classes.
OBJECTIVES = {
    "next": ("causal language model", "next token", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked": ("masked language model", "masked token", transformers.MODEL_FOR_MASKED_LM_MAPPING),
}
# Weights that play no part in a forward pass: checkpoints of other tasks come without them.
NOT_MEASURED = ("pooler.", "mask_token", "masked_spec_embed")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# Of every call that reads files: nothing from elsewhere, and no code that lies beside the weights.
LOCALLY = {"local_files_only": True, "trust_remote_code": False}
# What saving a compiled or distributed model puts before the names of its weights.
WRAPPED = re.compile(r"^(_orig_mod\.|module\.)+")
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
    part: str = "",
) -> LoadedModel:
    """A model by name, or one that is at hand.

    Args:
        name: a known alias (``minilm``; ``known_models()`` lists them), a folder with ``config.json``,
            safetensors weights and a tokenizer, image processor or feature extractor, or a hub id (``owner/name``).
            An adapter (LoRA and its like) beside the weights of a model is applied to it; one that lies alone, to the
            model that its ``adapter_config.json`` names; ``MODEL+ADAPTER`` names both.
            Followed by ``:untrained``, it is the same model with the random weights that its training would start
            from (transformers' initialisation of its configuration, seed 0; ``minilm:untrained@seed=1`` has another).
            A model trained here takes settings of its recipe, as in ``digits-vit@steps=50@seed=1``.
            Or a model of transformers that is at hand, with a head or without, compiled, with adapters or in training:
            it is measured as it is, in its precision and on its device, and does not change.
        revision: a commit, branch or tag of a model of the hub; an alias has its own.
        dtype: one of ``DTYPES``, unless the name says it, as in ``NAME@dtype=bfloat16``. ``float64`` tells a small
            number from rounding; a model in half precision takes half the memory, and what it computes is summed in
            single precision and then in float64.
        device: a torch device; by default a GPU where there is one.
        device_map: for a model that is larger than its device. ``auto`` spreads it over the GPUs; what does not fit
            there lies in memory, and what does not fit there on disk, until it is used. Or parts of the model by
            device, as in transformers.
        processor: of a model that is at hand, its tokenizer, image processor or feature extractor; of another one, the
            name or folder to read it from where its own has none, or another shall be tried.
        part: the path of the part that is measured alone, such as ``vision_model``: with it, a model of several towers
            reads what that part reads. A name says the same as ``NAME@part=vision_model``.

    Raises:
        AnalysisError: an unknown name, a model that cannot be reached, is of no supported architecture, has
            no safetensors weights, lacks weights, or has weights that are not finite (the layer is named).

    >>> load_model("minilm").max_length
    512
    """
    if isinstance(name, nn.Module):
        return live_model(name, processor, part)
    name = of_part(str(name), part) if part else str(name)
    if not isinstance(processor, str | Path | None):
        raise AnalysisError(f"{name} is read from files: give the name or folder of its {type(processor).__name__}")
    bare, told = split_dtype(name)
    dtype = told or dtype
    device = checked_options(dtype, device, device_map)
    *_, part, seed = split_name(name)
    folder, base, home, identity = _folders(name, revision)
    config = _read_config(name, home)
    # Before the weights are read: they may be large.
    kind = _kind(name, config) if not part else None
    files = file_hashes(folder) | ({} if base is None else {f"{base}/{n}": f for n, f in file_hashes(home).items()})
    if seed is not None:
        model, files, identity = _untrained(config, dtype, seed), {}, _of_twin(seed, identity)
    else:
        model = _read_weights(name, home, config, dtype, device_map)
        if (folder / ADAPTER).is_file():
            _adapt(name, model, folder, dtype)
    parts = {*getattr(model, "hf_device_map", {}).values()}
    if parts and not model._no_split_modules:
        raise AnalysisError(f"a {type(model).__name__} cannot be spread over devices: leave the device map out")
    model = model if parts else model.to(device)
    candidates = [folder, *([folder.parent] if folder.name.startswith(CHECKPOINT) else ()), home]
    if processor is not None:
        processor, candidates = str(processor), [located(str(processor), None)[0]]
        identity = read_by(identity, processor)
    if part:
        own = listed_layout(config.model_type, part)
        kind = own.kind if own and own.reads_texts_too else kind_of(model_part(name, model, part))
        identity = _of_part(part, identity)
    spec = ModelSpec(bare, revision, dtype, device, device_map, processor)
    reader = read_processor(name, candidates, kind)
    if part and own and own.reads_texts_too:
        reader = SimpleNamespace(feature_extractor=reader, tokenizer=read_processor(name, candidates, "text"))
    return LoadedModel(name, identity, model.eval(), reader, spec, files, part)


def checked_options(dtype: str, device: str | None, device_map: object = None) -> str:
    """The device to use; an AnalysisError, before anything is read, if a model cannot be loaded so."""
    if dtype not in DTYPES:
        raise AnalysisError(f"the dtype is {dtype}: give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    places = [*device_map.values()] if isinstance(device_map, dict) else []
    sensible = places and all(isinstance(place, str | int) and place != "meta" for place in places)
    if not sensible and device_map not in (None, "auto"):
        raise AnalysisError(f"the device map is {device_map!r}: give auto, or where each part lies, as in transformers")
    return devices.usable(device)


def revision_of(name: str, processor: str | None = None) -> str:
    """The ``revision`` of the model that ``load_model`` gives for a name, which is not loaded."""
    *_, part, seed = split_name(name)
    identity = weights_identity(name) if seed is None else _of_twin(seed, weights_identity(name))
    identity = _of_part(part, identity) if part else identity
    return identity if processor is None else read_by(identity, processor)


def read_by(identity: str, processor: str) -> str:
    """What identifies a model that has the tokenizer, or other processor, of another one."""
    return f"{identity} read by that of {weights_identity(processor)}"


def _folders(name: str, revision: str | None) -> tuple[Path, str | None, Path, str]:
    """Where the files of a name lie; the base of the adapter that these are, if they are one; where the model lies, and
    what identifies it."""
    model, adapter, *_ = split_name(name)
    folder, identity = located(model if adapter is None else f"{model}+{adapter}", revision)
    base = adapter_base(folder) if adapter is None else model
    return folder, base, folder if base is None else located(base, None)[0], identity


def lacks_head(loaded: LoadedModel, objective: str) -> str:
    """Why a loaded model is not the body of a language model, empty if it is.

    Args:
        objective: what it predicts, one of ``OBJECTIVES``.
    """
    kind, predicted, classes = OBJECTIVES[objective]
    config = loaded.model.config
    made, names = classes.get(type(config), None), [*(config.architectures or ()), type(loaded.model).__name__]
    if made is None or made.__name__ not in names or loaded.layout.part:
        return f"it is no {kind} ({names[0]}), so that it predicts no {predicted}"
    return ""


def with_head(loaded: LoadedModel, objective: str) -> transformers.PreTrainedModel:
    """A language model around a model that is loaded, which it shares.

    Raises:
        AnalysisError: it is none, see :func:`lacks_head`, or its head is not at hand.
    """
    if lacking := lacks_head(loaded, objective):
        raise AnalysisError(f"{loaded.name}: {lacking}")
    if loaded.headed is None:
        loaded.headed = _head(loaded, OBJECTIVES[objective][2][type(loaded.model.config)])
    return loaded.headed


def _head(loaded: LoadedModel, made: type) -> transformers.PreTrainedModel:
    config, spec = loaded.model.config, loaded.spec
    if spec is None or spec.device_map:
        raise AnalysisError(f"{loaded.name}: its head is not at hand: give the model with its head, or its name")
    if (seed := split_name(spec.name).seed) is not None:
        headed = _untrained(config, spec.dtype, seed, made)
    else:
        *_, home, _ = _folders(spec.name, spec.revision)
        with reading(f"{loaded.name} cannot be loaded", home), _without_adapters():
            headed, told = made.from_pretrained(home, dtype=loaded.model.dtype, output_loading_info=True, **LOCALLY)
        if lost := sorted(told["missing_keys"]):
            raise AnalysisError(f"{loaded.name} has no weights {lost[0]}: it was saved without its head")
    setattr(headed, headed.base_model_prefix, loaded.model)
    headed.tie_weights()
    return headed.to(loaded.device).eval()


def _of_twin(seed: int, identity: str) -> str:
    return f"untrained, seed {seed}, of {identity}"


def _of_part(part: str, identity: str) -> str:
    return f"{part} of {identity}"


def _untrained(
    config: transformers.PreTrainedConfig, dtype: str, seed: int, made: type | None = None
) -> transformers.PreTrainedModel:
    """A model with random weights; without its head, unless it is of a class that has one."""
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In single precision whatever was asked for, so that both precisions hold the same weights.
        made = made or _model_class(config)
        build = made.from_config if made is transformers.AutoModel else made._from_config
        model = build(config, dtype=torch.float32)
    return model.to(getattr(torch, dtype))


def _model_class(config: transformers.PreTrainedConfig) -> type:
    """The class that builds the model without a head; AutoModel would give an encoder alone a decoder."""
    return getattr(transformers, config.architectures[0]) if is_encoder_alone(config) else transformers.AutoModel


def _kind(name: str, config: transformers.PreTrainedConfig) -> str:
    """What a model reads.

    Raises:
        AnalysisError: transformers has no model without a head of this type.
    """
    if listed := listed_layout(config.model_type):
        return listed.kind
    made = transformers.MODEL_MAPPING.get(type(config), None)
    if not isinstance(made, type):
        raise AnalysisError(
            f"{name} is a {config.model_type} model, of which transformers has none without a head: give another model"
        )
    return kind_of(made)


def read_processor(name: str, folders: Sequence[Path], kind: str) -> object:
    """The tokenizer, image processor or feature extractor of the first folder that has one."""
    folder = next((folder for folder in folders if has_processor(folder, kind)), None)
    if folder is None and kind == "text":
        # transformers would make one up that knows no word.
        raise AnalysisError(
            f"{name} has no tokenizer: save the tokenizer to the same folder with save_pretrained, or give another one "
            f"(--tokenizer)"
        )
    if folder is None:
        raise AnalysisError(
            f"{name} has no {PREPARATION}, which says how its {kind}s are prepared: save its processor to the same "
            f"folder with save_pretrained"
        )
    autos = {"text": "AutoTokenizer", "image": "AutoImageProcessor", "audio": "AutoFeatureExtractor"}
    with reading(f"{name} cannot be loaded", folder):
        return getattr(transformers, autos[kind]).from_pretrained(folder, **LOCALLY)


# transformers switches parts of itself off while it builds a model, and two threads at once (as in a Dask worker) leave
# them off: the next model with tied weights would lack some.
_ALONE = threading.Lock()


@contextmanager
def reading(fault: str, folder: Path) -> Iterator[None]:
    """Around code of other libraries: whatever fails there is a defect of the folder, and becomes one line."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    for path in folder.iterdir():
        # A pipe would be waited for for ever.
        if not path.is_file() and not path.is_dir():
            raise AnalysisError(f"{path} is no regular file, or leads nowhere: copy the model again")
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
    name: str, folder: Path, config: transformers.PreTrainedConfig, dtype: str, device_map: object
) -> transformers.PreTrainedModel:
    """The model of a folder, without its head, and without the adapter that may lie beside it."""
    safe = any(path.is_file() for path in folder.glob("*.safetensors*"))
    if not safe and not ((known := known_model(name)) and known.pickled):
        raise AnalysisError(f"{name} has no safetensors weights: save it with save_pretrained, which writes them")
    _refuse_strange_weights(name, folder, config)

    def read(made: type, **more: object) -> tuple[transformers.PreTrainedModel, dict]:
        with reading(f"{name} cannot be loaded", folder), _without_adapters():
            return made.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                device_map=device_map,
                # A pickle is read as tensors and nothing else (transformers' default), and for pinned models alone.
                use_safetensors=safe,
                output_loading_info=True,
                # Reported below, with names and shapes.
                ignore_mismatched_sizes=True,
                **LOCALLY,
                **more,
            )

    renamed: dict[str, object] = {}
    model, info = read(_model_class(config))
    if any(WRAPPED.match(key) for key in info["unexpected_keys"]):
        renamed = {"key_mapping": {WRAPPED.pattern: ""}}
        model, info = read(_model_class(config), **renamed)
    headed = getattr(transformers, (config.architectures or ["none"])[0], type(model))
    if info["missing_keys"] and headed is not type(model):
        # Some heads keep their base under another name, or a part of it.
        model, info = read(headed, **renamed)
        model = bare_model(model)
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in NOT_MEASURED))
    mismatched = sorted(info["mismatched_keys"])
    # In the blocks: those of heads may be left out.
    within = {re.sub(r"\.\d+\..*", ".", path) for path, _ in model.named_parameters() if re.search(r"\.\d+\.", path)}
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


def _refuse_strange_weights(name: str, folder: Path, config: transformers.PreTrainedConfig) -> None:
    """Refuse what transformers would leave out, or cut, with a warning."""
    quantised = getattr(config, "quantization_config", None)
    with reading(f"{name}: its quantization_config cannot be read", folder):
        if quantised is not None and not AutoHfQuantizer.supports_quant_method(quantised):
            raise AnalysisError(f"{name}: its quantization_config is none that transformers knows: give another model")
    for path in folder.glob("*.safetensors"):
        with reading(f"{name} cannot be loaded", folder), safetensors.safe_open(path, "pt") as stored:
            kinds = {key: stored.get_slice(key).get_dtype() for key in stored.keys()}  # noqa: SIM118 (it is no mapping)
        if complex_ := [key for key, kind in kinds.items() if kind.startswith("C")]:
            raise AnalysisError(
                f"{name}: the weights {complex_[0]} are complex numbers, which no model here computes with"
            )


@contextmanager
def _without_adapters() -> Iterator[None]:
    """transformers would apply the adapter in a folder at once, and no longer say what the model itself lacks."""
    none = mock.patch.object(
        transformers.modeling_utils, "maybe_load_adapters", lambda name, *_, **given: (None, name, given)
    )
    with none:
        yield


def _adapt(name: str, model: transformers.PreTrainedModel, folder: Path, dtype: str) -> None:
    """Apply the adapter of a folder."""
    with reading(f"{name}: its adapter cannot be applied", folder):
        info = model.load_adapter(str(folder), adapter_kwargs={"local_files_only": True})
    lost = sorted([*info.missing_keys, *info.mismatched_keys, *info.error_msgs], key=str)
    # Heads are not measured.
    unplaced = sorted(key for key in info.unexpected_keys if "lora_" in key)
    if lost or unplaced:
        raise AnalysisError(f"{name}: its adapter does not fit the model ({(lost or unplaced)[0]}): give its own base")
    model.to(getattr(torch, dtype))


def _read_config(name: str, folder: Path) -> transformers.PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise AnalysisError(f"{name} has no config.json: give a folder saved with save_pretrained")
    # Configurations validate themselves, each with errors of its own.
    with reading(f"{name}: its config.json cannot be read", folder):
        settings = json.loads(path.read_text(encoding="utf-8"))
        refuse_too_large(name, settings)
        if (settings.get("position_embedding_type") or "absolute") != "absolute":
            raise AnalysisError(f"{name} has relative position embeddings, which are not measured: give another model")
        model_type = settings.get("model_type")
        if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise AnalysisError(
                f"{name} is of no type that transformers knows (model_type {model_type!r}): write its type into its "
                f"config.json, or give another model"
            )
        return transformers.AutoConfig.from_pretrained(folder, **LOCALLY)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # A line that ends in a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"
