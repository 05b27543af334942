"""Loading of models: an alias, a hub id or a local folder becomes a :class:`LoadedModel`."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import nn
from transformers.utils import is_mistral_common_available

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
from analysis_lib.models.checkpoint import WITHOUT_ADAPTER, Stored, model_class, stored_model
from analysis_lib.models.configurations import (
    CONFIGS,
    choose_attention,
    config_by_weights,
    left_to_sentence_transformers,
    own_code,
    refuse_named_code,
)
from analysis_lib.models.folders import (
    ADAPTER,
    CHECKPOINT,
    COMPOSITE,
    MISTRAL,
    PREPARATION,
    adapter_base,
    file_hashes,
    has_processor,
    located,
    model_home,
    weights_identity,
)
from analysis_lib.models.layouts import model_part
from analysis_lib.models.live import live_model, predicts_tokens
from analysis_lib.models.loaded import LoadedModel, ModelSpec
from analysis_lib.models.names import ModelName, known_model
from analysis_lib.models.outer import without_adapters
from analysis_lib.models.pairs import is_composite, without_videos
from analysis_lib.models.parts import listed_layout, refuse_too_large
from analysis_lib.models.probe import kind_of
from analysis_lib.models.reading import ALONE, LOCALLY, reading, refuse_damaged

# Language models by objective: their name, what they predict, and their classes.
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
    """Load a model by name, or wrap a model object.

    Args:
        name: a known alias (``minilm``; ``known_models()`` lists them), a folder with
            ``config.json``, weights and a tokenizer, image processor or feature extractor, or a hub
            id (``owner/name``). Weights are read from safetensors files, or if there are none from
            pickles, as tensors and nothing else. An adapter (LoRA and the like) beside the weights
            of a model is applied to it; one in a folder of its own, to the model that its
            ``adapter_config.json`` names; ``MODEL+ADAPTER`` names both. With ``:untrained`` at the
            end, it is the same model with random weights, as its training would start
            (transformers' initialisation from its configuration, seed 0;
            ``minilm:untrained@seed=1`` has another seed). A model trained here takes settings of
            its recipe, as in ``digits-vit@steps=50@seed=1``. Or a model object of transformers,
            with or without a head, compiled, with adapters or in training: it is measured as it is,
            in its precision and on its device, and does not change.
        revision: a commit, branch or tag of a model of the hub; an alias has its own.
        dtype: one of ``DTYPES``, unless the name has one, as in ``NAME@dtype=bfloat16``.
            ``float64`` tells small numbers from rounding errors; a model in half precision takes
            half the memory, and its activations are summed in single precision and then in float64.
        device: a torch device; by default a GPU if there is one.
        device_map: for a model that is larger than its device. ``auto`` spreads it over the GPUs;
            the rest is kept in memory, and what does not fit there on disk, until it is used. Or
            parts of the model by device, as in transformers.
        processor: for a model object, its tokenizer, image processor or feature extractor;
            otherwise the name or folder to read it from, if the model has none or another one is to
            be used.
        part: the path of the part to measure, such as ``vision_model``: with it, a model of several
            towers reads the input of that part. ``NAME@part=vision_model`` is the same in a name.

    Raises:
        AnalysisError: an unknown name, or a model that cannot be reached, has an unsupported
            architecture, names code to download, lacks weights, or has weights that are not finite
            (the message names the layer).

    >>> load_model("minilm").max_length
    512
    """
    if not isinstance(part, str):
        raise AnalysisError(
            f"part is {shown(part)}: give the path of a part, such as vision_model, or leave it out"
        )
    if isinstance(name, nn.Module):
        return live_model(name, processor, part)
    sources = "a name of `models`, a hub id, a folder or a model that is at hand"
    require_path("the model", name, sources)
    if revision is not None:
        require_text("the revision", revision, "a commit, branch or tag, or leave it out")
    name = _named(str(name), part)
    if not isinstance(processor, str | Path | None):
        raise AnalysisError(
            f"{name} is read from files: give the name or folder of its {type(processor).__name__}"
        )
    processor = None if processor is None else str(processor)
    dtype = name.dtype or dtype
    device = checked_options(dtype, device, device_map)
    return _loaded(
        name, ModelSpec(name.without_dtype, revision, dtype, device, device_map, processor)
    )


def _named(text: str, part: str) -> ModelName:
    name = ModelName.parse(text)
    if not part:
        return name
    if name.part:
        raise AnalysisError(f"{name} names a part, and so does part={part}: give one of them")
    return replace(name, part=part)


def _loaded(name: ModelName, spec: ModelSpec) -> LoadedModel:
    text = str(name)
    files = _files(name, spec.revision)
    for folder in {files.folder, files.home}:
        refuse_named_code(text, folder)
    config = _read_config(text, files.home)
    # Before the weights are read, which may be large.
    kind = None if name.part else _kind(text, config)
    # Only a trained model has hashes, computed before its files are read.
    hashes = {} if name.untrained else files.hashes()
    adapted = None
    stored = None
    if name.untrained:
        model = _untrained(config, spec.dtype, name.seed or 0)
    elif (files.folder / ADAPTER).is_file():
        adapted, stored = _adapted(text, files, config, spec)
        model = stored.body
    else:
        model = stored_model(text, files.home, config, spec.dtype, spec.device_map).body
    outermost = model if adapted is None else adapted
    _move(outermost, model, spec.device)
    reader = _read_processors(name, files, kind, config, model, spec.processor)
    # A part is called alone.
    outer = None if name.part else adapted
    loaded = LoadedModel(
        text,
        _identity(name, files.identity, spec.processor),
        model.eval(),
        reader,
        spec,
        hashes,
        name.part,
        outer=outer,
        composite=_composite(name, files, config, spec.processor),
    )
    if adapted is not None and stored.has_head and predicts_tokens(stored.whole):
        loaded.headed = adapted
    _note_own_code(loaded, files.home, name.base)
    _note_sentence_transformers(loaded, files.home, name)
    return loaded


def _composite(
    name: ModelName,
    files: "_Files",
    config: transformers.PreTrainedConfig,
    processor: str | None,
) -> Callable[[], transformers.ProcessorMixin | None] | None:
    """What reads the processor of images or sounds with texts; None for a part of a model."""
    if name.part:
        return None
    return partial(read_composite, str(name), _processor_folders(files, processor), config)


def _processor_folders(files: "_Files", processor: str | None) -> list[Path]:
    """The folders that may hold the processor: those of the model, unless another is named."""
    return files.of_processor if processor is None else [located(processor, None)[0]]


def _note_own_code(loaded: LoadedModel, folder: Path, base: str) -> None:
    """Log a note about code beside the weights, which the class that is measured ignores."""
    code = own_code(folder)
    if not code or known_model(base):
        return
    made = type(loaded.model)
    package = made.__module__.partition(".")[0]
    note = (
        "note: %s: the code that its settings name (auto_map: %s) is not run: the %s of %s is "
        "measured"
    )
    logging.getLogger(__name__).warning(note, base, ", ".join(code), made.__name__, package)


def _move(outermost: nn.Module, model: nn.Module, device: str) -> None:
    """Move a model to its device, unless a device map has placed its parts."""
    if not getattr(outermost, "hf_device_map", None):
        outermost.to(device)
    elif not model._no_split_modules:
        raise AnalysisError(
            f"a {type(model).__name__} cannot be spread over devices: leave the device map out"
        )


def _read_processors(
    name: ModelName,
    files: "_Files",
    kind: str | None,
    config: transformers.PreTrainedConfig,
    model: nn.Module,
    processor: str | None,
) -> object:
    """The processor of the input of a model, or of the part that is measured."""
    text = str(name)
    folders = _processor_folders(files, processor)
    if not name.part:
        return read_processor(text, folders, kind, config)
    listed = listed_layout(config.model_type, name.part)
    if not listed or not listed.reads_texts_too:
        kind = kind_of(model_part(text, model, name.part))
        return read_processor(text, folders, kind, config)
    sounds = read_processor(text, folders, listed.kind, config)
    return SimpleNamespace(
        feature_extractor=sounds, tokenizer=read_processor(text, folders, "text")
    )


def _note_sentence_transformers(loaded: LoadedModel, folder: Path, name: ModelName) -> None:
    """Log a note on what sentence-transformers does to texts, except for known models.

    The papers of known models describe it.
    """
    if loaded.kind != "text" or known_model(name.base):
        return
    steps = left_to_sentence_transformers(folder, loaded.max_length)
    if steps:
        note = (
            "note: %s: of a text, sentence-transformers would %s; it is read here as transformers "
            "reads it"
        )
        logging.getLogger(__name__).warning(note, loaded.name, " and ".join(steps))


def _adapted(
    name: str, files: "_Files", config: transformers.PreTrainedConfig, spec: ModelSpec
) -> tuple[nn.Module, Stored]:
    """The model with its adapter, as peft makes it; and without."""
    require_extra("adapters", "peft")
    fault = f"{name}: its adapter cannot be applied"
    # Random weights stand in for those of the adapter until they are read.
    with torch.random.fork_rng(devices=[]):
        with reading(fault, files.folder):
            adapter = Adapter(name, files.folder)
            made = adapter.class_of_base(config)
        stored = stored_model(name, files.home, config, spec.dtype, spec.device_map, made)
        with reading(fault, files.folder):
            return adapter.applied(stored.whole), stored


def checked_options(dtype: str, device: str | None, device_map: object = None) -> str:
    """The device to use.

    Raises:
        AnalysisError: no model can be loaded with these options; nothing has been read yet.
    """
    require_choice("the dtype", dtype, DTYPES)
    if device_map not in (None, "auto") and not _is_device_map(device_map):
        raise AnalysisError(
            f"the device map is {device_map!r}: give auto, or where each part lies, as in "
            "transformers"
        )
    if device_map is not None:
        require_extra("cluster", "accelerate")
    return devices.usable(device)


def _is_device_map(given: object) -> bool:
    devices_of_parts = [*given.values()] if isinstance(given, dict) else []
    valid = (isinstance(each, str | int) and each != "meta" for each in devices_of_parts)
    return bool(devices_of_parts) and all(valid)


def revision_of(name: str, processor: str | None = None) -> str:
    """The ``revision`` of the model that ``load_model`` gives for a name, without loading it."""
    return _identity(ModelName.parse(name), weights_identity(name), processor)


def _identity(name: ModelName, weights: str, processor: str | None) -> str:
    if name.untrained:
        weights = f"untrained, seed {name.seed or 0}, of {weights}"
    if name.part:
        weights = f"{name.part} of {weights}"
    if processor is not None:
        weights = f"{weights} read by that of {weights_identity(processor)}"
    return weights


@dataclass(frozen=True)
class _Files:
    """The folders of a model.

    Attributes:
        folder: the folder of the adapter if there is one, else of the model.
        home: the folder of the model itself.
        base: the name of the model at ``home``, if ``folder`` is that of an adapter alone.
        identity: the identity of the weights.
    """

    folder: Path
    home: Path
    base: str | None
    identity: str

    @property
    def of_processor(self) -> list[Path]:
        """The folders that may hold a processor, in order."""
        folders = [self.folder, self.home]
        if self.folder.name.startswith(CHECKPOINT):
            folders.insert(1, self.folder.parent)
        return folders

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every file, by name."""
        hashes = file_hashes(self.folder)
        if self.base is not None:
            of_base = file_hashes(self.home)
            hashes |= {f"{self.base}/{path}": digest for path, digest in of_base.items()}
        return hashes


def _files(name: ModelName, revision: str | None) -> _Files:
    folder, identity = located(name.whole, revision)
    base = adapter_base(folder) if name.adapter is None else name.base
    home = folder if base is None else located(base, None)[0]
    return _Files(folder, home, base, identity)


def lacks_head(loaded: LoadedModel, objective: str) -> str:
    """The reason why a loaded model is not the body of a language model; empty if it is.

    Args:
        objective: the kind of prediction, one of ``OBJECTIVES``.
    """
    kind, predicted, classes = OBJECTIVES[objective]
    config = loaded.model.config
    made = classes.get(type(config), None)
    names = [*(config.architectures or ()), type(loaded.model).__name__]
    if loaded.headed is not None:
        # A model that was never saved does not name its class.
        names.append(type(without_adapters(loaded.headed)).__name__)
    if made is None or made.__name__ not in names or loaded.layout.part:
        return f"it is no {kind} ({names[0]}), so that it predicts no {predicted}"
    return ""


def with_head(loaded: LoadedModel, objective: str) -> transformers.PreTrainedModel:
    """A language model around a loaded model, which it shares.

    Raises:
        AnalysisError: there is none, see :func:`lacks_head`, or its head is not available.
    """
    if reason := lacks_head(loaded, objective):
        raise AnalysisError(f"{loaded.name}: {reason}")
    if loaded.headed is None:
        *_, classes = OBJECTIVES[objective]
        loaded.headed = _head(loaded, classes[type(loaded.model.config)])
    return loaded.headed


def _head(loaded: LoadedModel, made: type) -> transformers.PreTrainedModel:
    config = loaded.model.config
    spec = loaded.spec
    if spec is None or spec.device_map:
        raise AnalysisError(
            f"{loaded.name}: its head is not at hand: give the model with its head, or its name"
        )
    name = ModelName.parse(spec.name)
    if name.untrained:
        headed = _untrained(config, spec.dtype, name.seed or 0, made)
    else:
        home = _files(name, spec.revision).home
        with reading(f"{loaded.name} cannot be loaded", home):
            headed, info = made.from_pretrained(
                home,
                dtype=loaded.model.dtype,
                output_loading_info=True,
                **WITHOUT_ADAPTER,
                **LOCALLY,
            )
        if missing := sorted(info["missing_keys"]):
            raise AnalysisError(
                f"{loaded.name} has no weights {missing[0]}: it was saved without its head"
            )
    setattr(headed, headed.base_model_prefix, loaded.model)
    headed.tie_weights()
    return headed.to(loaded.device).eval()


def _untrained(
    config: transformers.PreTrainedConfig, dtype: str, seed: int, made: type | None = None
) -> transformers.PreTrainedModel:
    """A model with random weights; without its head, unless its class has one."""
    with ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = made or model_class(config)
        build = made.from_config if made is transformers.AutoModel else made._from_config
        # First in single precision, so that all precisions have the same weights.
        model = build(config, dtype=torch.float32)
    return model.to(getattr(torch, dtype))


def _kind(name: str, config: transformers.PreTrainedConfig) -> str:
    """``text``, ``image`` or ``audio``, from the configuration alone.

    Raises:
        AnalysisError: transformers has no model without a head of this type.
    """
    if listed := listed_layout(config.model_type):
        return listed.kind
    made = transformers.MODEL_MAPPING.get(type(config), None)
    if not isinstance(made, type):
        raise AnalysisError(
            f"{name} is a {config.model_type} model, of which transformers has none without a "
            "head: give another model"
        )
    return kind_of(made)


PROCESSORS = {
    "text": transformers.AutoTokenizer,
    "image": transformers.AutoImageProcessor,
    "audio": transformers.AutoFeatureExtractor,
}


def read_processor(
    name: str,
    folders: Sequence[Path],
    kind: str,
    config: transformers.PreTrainedConfig | None = None,
) -> object:
    """The tokenizer, image processor or feature extractor of the first folder that has one.

    Args:
        name: the name of the model, for errors.
        folders: the folders to search, in order.
        kind: the kind of input, ``text``, ``image`` or ``audio``.
        config: the configuration of the model, whose type decides on the tokenizer if the folder
            does not.
    """
    folder = next((folder for folder in folders if has_processor(folder, kind)), None)
    if folder is None and kind == "text":
        # Without files, transformers would make a tokenizer that knows no word.
        raise AnalysisError(
            f"{name} has no tokenizer: save the tokenizer to the same folder with save_pretrained, "
            "or give another one (--tokenizer)"
        )
    if folder is None:
        raise AnalysisError(
            f"{name} has no {PREPARATION}, which says how its {kind}s are prepared: save its "
            "processor to the same folder with save_pretrained"
        )
    if kind == "image":
        require_extra("packages", "PIL")
    with reading(f"{name} cannot be loaded", folder):
        options = {}
        if kind == "text" and config is not None and not _states_type(folder):
            options["config"] = config
        made = PROCESSORS[kind].from_pretrained(folder, **options, **LOCALLY)
    if kind == "text":
        _note_mistral(name, folder)
    return made


def _note_mistral(name: str, folder: Path) -> None:
    """Log a note if a tokenizer of mistral-common is read without it."""
    is_alone = (folder / MISTRAL).is_file() and not (folder / "tokenizer.json").is_file()
    if not is_alone or is_mistral_common_available():
        return
    logging.getLogger(__name__).warning(
        "note: %s: without mistral-common, transformers reads its %s so that no <s> begins a text: "
        'run pip install "mistral-common[audio]"',
        name,
        MISTRAL,
    )


def read_composite(
    name: str, folders: Sequence[Path], config: transformers.PreTrainedConfig
) -> transformers.ProcessorMixin | None:
    """The processor of images or sounds with texts of the first folder that has one, if any does.

    Raises:
        AnalysisError: it cannot be read.
    """
    for folder in folders:
        is_described = any((folder / file).is_file() for file in (COMPOSITE, PREPARATION))
        if is_described and has_processor(folder, "text"):
            options = {} if _states_type(folder) else {"config": config}
            with reading(f"{name}: its processor cannot be loaded", folder), without_videos():
                made = transformers.AutoProcessor.from_pretrained(folder, **options, **LOCALLY)
            return made if is_composite(made) else None
    return None


def _states_type(folder: Path) -> bool:
    """Whether a folder names the type of its model, and thereby of its tokenizer."""
    path = folder / "config.json"
    return not path.is_file() or "model_type" in json.loads(path.read_text(encoding="utf-8"))


def refuse_unloadable(names: Iterable[str]) -> None:
    """Check that several models exist and that their files are not damaged.

    Raises:
        AnalysisError: the defects of all of them, in one message.
    """
    faults = []
    for name in dict.fromkeys(names):
        try:
            revision_of(name)
            for folder in ModelName.parse(name).folders:
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
        names = settings.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise AnalysisError(f"{name}: architectures is no list of names: mend its config.json")
        model_type = settings.get("model_type")
        if model_type is None:
            return config_by_weights(name, folder, settings)
        if model_type not in CONFIGS:
            plug_in(model_type)
        if model_type not in CONFIGS:
            raise AnalysisError(
                f"{name} is of no type that transformers knows (model_type {model_type!r}): write "
                "its type into its config.json, or give another model"
            )
        _refuse_ignored_positions(name, settings, model_type)
        config = transformers.AutoConfig.from_pretrained(folder, **LOCALLY)
        choose_attention(config)
        return config


def _refuse_ignored_positions(name: str, settings: dict, model_type: str) -> None:
    """Raise an AnalysisError for position embeddings that transformers ignores.

    Vectors would be wrong. ESM-2 (rotary), Granite (rope, nope) and DETR (sine, learned) declare
    the setting. The relative positions of BERT and its relatives are no longer computed by any of
    them.
    """
    kind = settings.get("position_embedding_type") or "absolute"
    is_declared = hasattr(CONFIGS[model_type], "position_embedding_type")
    if kind != "absolute" and (str(kind).startswith("relative_key") or not is_declared):
        raise AnalysisError(
            f"{name} has position embeddings of the kind {kind!r} (position_embedding_type), which "
            f"transformers no longer computes for a {model_type} model: give another model"
        )
