"""Folder of a model, from a package, this machine or the hub, and the identity of its files."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from analysis_lib import files
from analysis_lib.corpora import hub, packages
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.models.names import (
    MULTIBERTS,
    KnownModel,
    ModelName,
    known_model,
    known_models,
    maker_of,
)

# Settings of an adapter, which name the model it belongs to.
ADAPTER = "adapter_config.json"
# Prefix of the folders that Trainer leaves in the folder of its run.
CHECKPOINT = "checkpoint-"
# The tokenizer of mistral-common.
MISTRAL = "tekken.json"
# Files of which one holds the vocabulary of a tokenizer, and files about the preparation of images
# or sounds.
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", MISTRAL, "*.model")
PREPARATION = "preprocessor_config.json"
# The file of a processor that reads images or sounds with texts.
COMPOSITE = "processor_config.json"
PROCESSOR_FILES = (*VOCABULARIES, "*token*", "*processor*.json")
# Tokenizers that read bytes or code points.
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "CharacterBertTokenizer")


def weights_identity(name: str) -> str:
    """A short text that changes with the weights behind ``name``; nothing is downloaded or loaded.

    Raises:
        AnalysisError: ``name`` is on a hub that cannot be reached, and not in the local cache.
    """
    model = ModelName.parse(name)
    if model.adapter is None:
        return _identity(model.base)
    # The adapter may name another base than the one it is used with.
    if os.path.isdir(model.adapter):
        return f"{_hashed(Path(model.adapter))} on {_identity(model.base)}"
    return f"{weights_identity(model.adapter)} on {_identity(model.base)}"


def _identity(base: str) -> str:
    known = known_model(base)
    if known and known.packages:
        return " ".join(map(packages.pin, known.packages))
    if maker := maker_of(base):
        return maker.identity(base)
    if not known and os.path.isdir(base):
        return folder_identity(model_home(Path(base)))
    repository, revision = (known.repository, known.revision) if known else (base, None)
    with _explained(base):
        return f"{repository}@{hub.require(repository, revision, 'config.json', ADAPTER)}"


def folder_identity(folder: Path) -> str:
    """A short text that changes with the folder of a model, or with another folder read with it."""
    identity = _hashed(folder)
    base = adapter_base(folder)
    if base is not None:
        identity += f" on {weights_identity(base)}"
    is_checkpoint = folder.name.startswith(CHECKPOINT)
    if is_checkpoint and not has_processor(folder) and has_processor(folder.parent):
        identity += f" read by {_hashed(folder.parent, PROCESSOR_FILES)}"
    return identity


def _hashed(folder: Path, patterns: Iterable[str] = hub.MODEL_FILES) -> str:
    listing = json.dumps(file_hashes(folder, patterns))
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def located(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of a model, or of the adapter in its name, and the identity of its weights.

    Raises:
        AnalysisError: there is no such model, its hub cannot be reached, or a revision is given for
            a model that is not on the hub.
    """
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise AnalysisError(
            f"{name[:40]!r} is no model: give a name of `models`, a hub id or a folder"
        )
    model = ModelName.parse(name)
    if model.adapter is not None:
        return _adapter_folder(model.adapter, revision), weights_identity(name)
    known = known_model(name)
    maker = None if known else maker_of(name)
    is_folder = os.path.isdir(name)
    if (known or maker) and is_folder:
        note = (
            "note: %s is the known model of that name, and not the folder %s that lies here: for "
            "that, give %s"
        )
        logging.getLogger(__name__).warning(note, name, name, os.path.join(".", name))
    is_local = known.packages if known else maker or is_folder
    if not is_local:
        return _downloaded(name, known or KnownModel("", repository=name, pickled=True), revision)
    if revision is not None:
        raise AnalysisError(f"{name} is not read from the hub: leave the revision out")
    if known:
        # Imported late, since torch is not needed without weights.
        from analysis_lib.models.conversion import converted

        folder = converted(name, known.form, known.packages)
    elif maker:
        folder = maker.folder(name)
    else:
        folder = model_home(Path(name))
    return folder, weights_identity(name)


def _adapter_folder(adapter: str, revision: str | None) -> Path:
    folder = Path(adapter) if os.path.isdir(adapter) else located(adapter, revision)[0]
    if not (folder / ADAPTER).is_file():
        raise AnalysisError(
            f"{adapter} holds no adapter ({ADAPTER} is missing): give the folder of one after +"
        )
    return folder


def _downloaded(name: str, known: KnownModel, revision: str | None) -> tuple[Path, str]:
    with _explained(name):
        folder = hub.model_folder(
            known.repository, revision or known.revision, pickled=known.pickled
        )
    return folder, f"{known.repository}@{folder.name}"


def model_home(folder: Path) -> Path:
    """The folder of the model itself; for sentence-transformers, that of its first module."""
    modules = folder / "modules.json"
    if (folder / "config.json").is_file() or not modules.is_file():
        return folder
    inner = files.read(modules, lambda path: folder / _read(path)[0]["path"])
    is_inside = inner.is_dir() and inner.resolve().is_relative_to(folder.resolve())
    return inner if is_inside else folder


def _read(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def adapter_base(folder: Path) -> str | None:
    """The name of the model that an adapter belongs to; None for a folder with a whole model.

    Raises:
        AnalysisError: the settings of the adapter name no model.
    """
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    base = files.read_json(folder / ADAPTER).get("base_model_name_or_path")
    if isinstance(base, str) and base.strip():
        return base
    raise AnalysisError(
        f"{folder / ADAPTER} does not say whose adapter it is: give its base_model_name_or_path"
    )


def has_processor(folder: Path, kind: str | None = None) -> bool:
    """Whether a folder has a tokenizer (of kind ``text``), another processor, or (None) either."""
    if kind != "text" and any((folder / name).is_file() for name in (PREPARATION, COMPOSITE)):
        return True
    if kind not in (None, "text"):
        return False
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        tokenizer = files.read_json(settings).get("tokenizer_class")
        if tokenizer in WITHOUT_VOCABULARY:
            return True
    return any(path.is_file() for path in _matching(folder, VOCABULARIES))


def _matching(folder: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in folder.glob(pattern)}


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """A context for a request to the hub, whose errors hint at misspelt names."""
    if known_model(name):
        yield
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise AnalysisError(
            f"there is no folder {name!r}: give a folder with config.json, or a name of `models`"
        )
    try:
        yield
    except AnalysisError as error:
        candidates = MULTIBERTS if name.startswith("multiberts-") else known_models()
        near = near_names(name, candidates)
        raise AnalysisError(
            f"there is no model or folder named {name} here ({near}); {error}"
        ) from error


def file_hashes(folder: Path, patterns: Iterable[str] = hub.MODEL_FILES) -> dict[str, str]:
    """SHA-256 of files of a folder, by path: by default, of all files that a model is read from.

    Weights named by an index of the folder are included, wherever they lie. Pickles are included
    only if there are no safetensors files, since otherwise they are not read.
    """
    if patterns == hub.MODEL_FILES and not any(folder.glob("*.safetensors")):
        patterns = (*patterns, *hub.PICKLES, "adapter_model.bin")
    paths = _matching(folder, patterns)
    indices = [path for path in paths if path.name.endswith(".index.json")]
    for index in indices:
        # A damaged index is reported when the weights load.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            paths |= {folder / name for name in _read(index)["weight_map"].values()}
    there = sorted(path for path in paths if path.is_file())
    return {os.path.relpath(path, folder): files.file_hash(path) for path in there}
