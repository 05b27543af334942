"""Models by name: a bundled alias, a hub id, or a local folder becomes a :class:`LoadedModel`."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import nn

from analysis_lib.errors import (
    AnalysisError,
    refuse_all,
    require_choice,
    require_extra,
    require_path,
    require_text,
    shown,
)
from analysis_lib.models import devices
from analysis_lib.models.adapters import Adapter
from analysis_lib.models.architectures import plug_in
from analysis_lib.models.checkpoint import Stored, model_class, stored_model, without_adapters
from analysis_lib.models.configurations import (
    CONFIGS,
    choose_attention,
    config_by_weights,
    left_to_sentence_transformers,
    own_code,
    refuse_named_code,
)
from analysis_lib.models.layouts import kind_of, model_part
from analysis_lib.models.live import live_model, predicts_tokens
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
    model_home,
    of_part,
    split_dtype,
    split_name,
    weights_identity,
)
from analysis_lib.models.parts import listed_layout, refuse_too_large
from analysis_lib.models.reading import ALONE, LOCALLY, reading, refuse_damaged

# Language models by what they predict: what they are called, what that is, and their classes.
OBJECTIVES = {
    "next": ("causal language model", "next token", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked": ("masked language model", "masked token", transformers.MODEL_FOR_MASKED_LM_MAPPING),
}
DTYPES = ("float32", "float64", "bfloat16", "float16")


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
            weights and a tokenizer, image processor or feature extractor, or a hub id (``owner/name``). Weights are
            read from safetensors files, or where there are none from pickles, as tensors and nothing else.
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
        AnalysisError: an unknown name, a model that cannot be reached, is of no supported architecture, names code to
            fetch, has no weights, lacks some, or has weights that are not finite (the layer is named).

    >>> load_model("minilm").max_length
    512
    """
    if not isinstance(part, str):
        raise AnalysisError(f"part is {shown(part)}: give the path of a part, such as vision_model, or leave it out")
    if isinstance(name, nn.Module):
        return live_model(name, processor, part)
    require_path("the model", name, "a name of `models`, a hub id, a folder or a model that is at hand")
    if revision is not None:
        require_text("the revision", revision, "a commit, branch or tag, or leave it out")
    name = of_part(str(name), part) if part else str(name)
    if not isinstance(processor, str | Path | None):
        raise AnalysisError(f"{name} is read from files: give the name or folder of its {type(processor).__name__}")
    bare, told = split_dtype(name)
    dtype = told or dtype
    device = checked_options(dtype, device, device_map)
    *_, part, seed = split_name(name)
    folder, base, home, identity = _folders(name, revision)
    for place in {folder, home}:
        refuse_named_code(name, place)
    config = _read_config(name, home)
    # Before the weights are read: they may be large.
    kind = _kind(name, config) if not part else None
    files = file_hashes(folder) | ({} if base is None else {f"{base}/{n}": f for n, f in file_hashes(home).items()})
    adapted = None
    if seed is not None:
        model, files, identity = _untrained(config, dtype, seed), {}, _of_twin(seed, identity)
    elif (folder / ADAPTER).is_file():
        adapted, stored = _adapted(name, home, folder, config, dtype, device_map)
        model = stored.body
    else:
        model = stored_model(name, home, config, dtype, device_map).body
    parts = {*getattr(adapted or model, "hf_device_map", {}).values()}
    if parts and not model._no_split_modules:
        raise AnalysisError(f"a {type(model).__name__} cannot be spread over devices: leave the device map out")
    if not parts:
        (adapted or model).to(device)
    candidates = [folder, *([folder.parent] if folder.name.startswith(CHECKPOINT) else ()), home]
    if processor is not None:
        processor, candidates = str(processor), [located(str(processor), None)[0]]
        identity = read_by(identity, processor)
    if part:
        own = listed_layout(config.model_type, part)
        kind = own.kind if own and own.reads_texts_too else kind_of(model_part(name, model, part))
        identity = _of_part(part, identity)
    spec = ModelSpec(bare, revision, dtype, device, device_map, processor)
    reader = read_processor(name, candidates, kind, config)
    if part and own and own.reads_texts_too:
        reader = SimpleNamespace(feature_extractor=reader, tokenizer=read_processor(name, candidates, "text"))
    outer = adapted if not part else None
    loaded = LoadedModel(name, identity, model.eval(), reader, spec, files, part, outer)
    if adapted is not None and stored.has_head and predicts_tokens(stored.whole):
        loaded.headed = adapted
    _say_whose_code_runs(loaded, home, bare)
    _say_what_is_left_out(loaded, home, bare)
    return loaded


def _say_whose_code_runs(loaded: LoadedModel, folder: Path, bare: str) -> None:
    """A note on code beside the weights, which may compute something else than the class that is measured."""
    code = own_code(folder)
    if code and not known_model(split_name(bare).model):
        made = type(loaded.model)
        said = "note: %s: the code that its settings name (auto_map: %s) is not run: the %s of %s is measured"
        package = made.__module__.partition(".")[0]
        called = split_name(bare).model
        logging.getLogger(__name__).warning(said, called, ", ".join(code), made.__name__, package)


def _say_what_is_left_out(loaded: LoadedModel, folder: Path, bare: str) -> None:
    """A note on what sentence-transformers does with texts; that of a known model is in its own papers."""
    if loaded.kind != "text" or known_model(split_name(bare).model):
        return
    steps = left_to_sentence_transformers(folder, loaded.max_length)
    if steps:
        said = "note: %s: of a text, sentence-transformers would %s; it is read here as transformers reads it"
        logging.getLogger(__name__).warning(said, loaded.name, " and ".join(steps))


def _adapted(
    name: str, home: Path, folder: Path, config: transformers.PreTrainedConfig, dtype: str, device_map: object
) -> tuple[nn.Module, Stored]:
    """The model of a folder with the adapter of another, as peft makes it; and that model."""
    require_extra("adapters", "peft")
    # Until the weights of the adapter take their places, random ones stand there.
    with torch.random.fork_rng(devices=[]):
        with reading(f"{name}: its adapter cannot be applied", folder):
            adapter = Adapter(name, folder)
            made = adapter.class_of_base(config)
        stored = stored_model(name, home, config, dtype, device_map, made)
        with reading(f"{name}: its adapter cannot be applied", folder):
            return adapter.applied(stored.whole), stored


def checked_options(dtype: str, device: str | None, device_map: object = None) -> str:
    """The device to use; an AnalysisError, before anything is read, if a model cannot be loaded so."""
    require_choice("the dtype", dtype, DTYPES)
    places = [*device_map.values()] if isinstance(device_map, dict) else []
    sensible = places and all(isinstance(place, str | int) and place != "meta" for place in places)
    if not sensible and device_map not in (None, "auto"):
        raise AnalysisError(f"the device map is {device_map!r}: give auto, or where each part lies, as in transformers")
    if device_map is not None:
        require_extra("cluster", "accelerate")
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
        with reading(f"{loaded.name} cannot be loaded", home), without_adapters():
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
    with ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In single precision whatever was asked for, so that both precisions hold the same weights.
        made = made or model_class(config)
        build = made.from_config if made is transformers.AutoModel else made._from_config
        model = build(config, dtype=torch.float32)
    return model.to(getattr(torch, dtype))


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


def read_processor(
    name: str, folders: Sequence[Path], kind: str, config: transformers.PreTrainedConfig | None = None
) -> object:
    """The tokenizer, image processor or feature extractor of the first folder that has one.

    Args:
        config: of the model, whose type says which tokenizer it is where the folder does not.
    """
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
    if kind == "image":
        require_extra("packages", "PIL")
    autos = {"text": "AutoTokenizer", "image": "AutoImageProcessor", "audio": "AutoFeatureExtractor"}
    with reading(f"{name} cannot be loaded", folder):
        if kind == "text" and config is not None and not _says_type(folder):
            return transformers.AutoTokenizer.from_pretrained(folder, config=config, **LOCALLY)
        return getattr(transformers, autos[kind]).from_pretrained(folder, **LOCALLY)


def _says_type(folder: Path) -> bool:
    """Whether a folder says which model, and so which tokenizer, it is of."""
    path = folder / "config.json"
    return not path.is_file() or "model_type" in json.loads(path.read_text(encoding="utf-8"))


def refuse_unloadable(names: Iterable[str]) -> None:
    """Refuse those of several models that are not there, or whose files are damaged, all at once; loads none.

    Raises:
        AnalysisError: what is wrong with each of them.
    """
    faults = []
    for name in dict.fromkeys(names):
        try:
            revision_of(name)
            model, adapter, *_ = split_name(name)
            for folder in (model, adapter):
                if folder and not known_model(folder) and os.path.isdir(folder):
                    refuse_damaged(model_home(Path(folder)))
        except AnalysisError as error:
            faults.append(str(error))
    refuse_all(faults)


def _read_config(name: str, folder: Path) -> transformers.PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise AnalysisError(f"{name} has no config.json: give a folder saved with save_pretrained")
    # Configurations validate themselves, each with errors of its own.
    with reading(f"{name}: its config.json cannot be read", folder):
        settings = json.loads(path.read_text(encoding="utf-8"))
        refuse_too_large(name, settings)
        architectures = settings.get("architectures") or []
        if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
            raise AnalysisError(f"{name}: architectures is no list of names: mend its config.json")
        model_type = settings.get("model_type")
        if model_type is None:
            return config_by_weights(name, folder, settings)
        if model_type not in CONFIGS:
            plug_in(model_type)
        if model_type not in CONFIGS:
            raise AnalysisError(
                f"{name} is of no type that transformers knows (model_type {model_type!r}): write its type into its "
                f"config.json, or give another model"
            )
        _refuse_ignored_positions(name, settings, model_type)
        config = transformers.AutoConfig.from_pretrained(folder, **LOCALLY)
        choose_attention(config)
        return config


def _refuse_ignored_positions(name: str, settings: dict, model_type: str) -> None:
    """Refuse a kind of position embeddings that transformers passes by, so that other vectors would be measured.

    ESM-2 (rotary), Granite (rope, nope) and DETR (sine, learned) declare the setting. The relative positions of BERT
    and its kin are no longer computed by any of them.
    """
    kind = settings.get("position_embedding_type") or "absolute"
    declared = hasattr(CONFIGS[model_type], "position_embedding_type")
    if kind != "absolute" and (str(kind).startswith("relative_key") or not declared):
        raise AnalysisError(
            f"{name} has position embeddings of the kind {kind!r} (position_embedding_type), which transformers no "
            f"longer computes for a {model_type} model: give another model"
        )
