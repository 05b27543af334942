"""The models known by name, and where the files of a model lie: in a package, on this machine or on the hub."""

import csv
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from analysis_lib.corpora import hub, packages
from analysis_lib.corpora.sharing import path_to_share
from analysis_lib.errors import AnalysisError, near_names, shown

# Says what an adapter changes, and of which model.
ADAPTER = "adapter_config.json"
# How Trainer calls the folders that it leaves in that of its run.
CHECKPOINT = "checkpoint-"
# One of these holds the vocabulary of a tokenizer; the other says how images or sounds are prepared.
VOCABULARIES, PREPARATION = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model"), "preprocessor_config.json"
# These read bytes or code points.
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "CharacterBertTokenizer")
# What every name can be followed by: the same architecture with the weights that training starts from.
UNTRAINED = ":untrained"
# And before that: the path of the part of the model that is measured alone.
PART = "@part="
# And last: its precision.
DTYPE = "@dtype="
# In letters: a legend of longer ones is wider than its figure.
LONGEST_TITLE = 48


def split_dtype(name: str) -> tuple[str, str | None]:
    """The name of a model without its precision, and that; None where it says none.

    >>> split_dtype("smollm2-135m@dtype=bfloat16"), split_dtype("minilm")
    (('smollm2-135m', 'bfloat16'), ('minilm', None))
    """
    if not isinstance(name, str):
        raise AnalysisError(f"the name of a model is {shown(name)}: give a text")
    whole, is_told, dtype = name.rpartition(DTYPE)
    return (whole, dtype) if is_told and dtype.isalnum() else (name, None)


def split_twin(name: str) -> tuple[str, int | None]:
    """The name of a model without ``:untrained``, and the seed of its random weights; None where they are its own.

    >>> split_twin("minilm:untrained"), split_twin("minilm:untrained@seed=3"), split_twin("minilm")
    (('minilm', 0), ('minilm', 3), ('minilm', None))

    Raises:
        AnalysisError: the seed is no number.
    """
    name, _ = split_dtype(name)
    whole, is_seeded, seed = name.partition(f"{UNTRAINED}@seed=")
    if is_seeded:
        # As many digits as every generator of random numbers takes.
        if not re.fullmatch("[0-9]{1,18}", seed):
            raise AnalysisError(f"the seed of {name} is {shown(seed)}: give a whole number of at most 18 digits")
        return whole, int(seed)
    return (name.removesuffix(UNTRAINED), 0) if name.endswith(UNTRAINED) else (name, None)


class Name(NamedTuple):
    """What a name says: ``MODEL+ADAPTER@part=PATH:untrained@seed=N``, of which all but the model may be missing."""

    model: str
    adapter: str | None = None
    part: str = ""
    seed: int | None = None


def split_name(name: str) -> Name:
    """What a name says.

    >>> split_name("minilm+runs/legal"), split_name("own/clip@part=vision_model:untrained").part
    (Name(model='minilm', adapter='runs/legal', part='', seed=None), 'vision_model')

    Raises:
        AnalysisError: the seed is no number, or the path of the part is missing.
    """
    whole, seed = split_twin(name)
    whole, names_part, part = whole.partition(PART)
    if names_part and not part.strip():
        raise AnalysisError(f"{name} names no part: give its path, as in {whole}{PART}vision_model, or leave it out")
    model, plus, adapter = whole.rpartition("+")
    # A folder may have such a name.
    is_whole = not plus or not model or os.path.isdir(whole)
    return Name(whole, None, part, seed) if is_whole else Name(model, adapter, part, seed)


def of_part(name: str, part: str) -> str:
    """The name of a part of a model."""
    whole, _ = split_twin(name)
    return f"{whole}{PART}{part}{name[len(whole) :]}"


@dataclass(frozen=True)
class KnownModel:
    """A model known by name: in a pinned package, or on the hub at a pinned revision.

    Attributes:
        description: what it is, in a few words.
        packages: the packages that hold it, in order.
        form: how its weights lie there, see :mod:`~analysis_lib.models.conversion`.
        repository: where it is on the hub.
        revision: None where no revision could be pinned: the hub's current one is taken and recorded in ``run.json``.
        pickled: whether weights published only as a pickle are read, without running any code that it may hold.
    """

    description: str
    packages: tuple[str, ...] = ()
    form: str | None = None
    repository: str | None = None
    revision: str | None = None
    pickled: bool = False


def _read_known() -> dict[str, KnownModel]:
    with (packages.data_directory() / "models.csv").open(encoding="utf-8", newline="") as file:
        rows = [{column: cell or None for column, cell in row.items()} for row in csv.DictReader(file)]
    return {
        row.pop("name"): KnownModel(
            **row | {"packages": tuple((row["packages"] or "").split()), "pickled": row["pickled"] == "yes"}
        )
        for row in rows
    }


MODELS = _read_known()
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


MULTIBERTS = {
    name: KnownModel("BERT", repository=f"google/{name}", pickled=True)
    for name in (multibert(seed, step) for seed in MULTIBERTS_SEEDS for step in MULTIBERTS_STEPS)
}


@dataclass(frozen=True)
class Maker:
    """Models that another package makes when they are asked for, by name.

    Attributes:
        descriptions: a line on each model, by name, for the list of known models.
        makes: whether a name, with settings as in ``digits-vit@steps=50``, is one of its models.
        folder: the folder of a model, which is made first where it is not there yet.
        identity: a short text that changes when that model would; makes nothing.
        architecture: its ``model_type``, as transformers names it; makes nothing.
    """

    descriptions: Mapping[str, str]
    makes: Callable[[str], bool]
    folder: Callable[[str], Path]
    identity: Callable[[str], str]
    architecture: Callable[[str], str]


@cache
def _makers() -> list[Maker]:
    """Those of the packages that are installed: the entry points of the group ``analysis_lib.models``."""
    return [point.load() for point in entry_points(group="analysis_lib.models")]


def _maker(name: str) -> Maker | None:
    return next((maker for maker in _makers() if maker.makes(name)), None)


def architecture_to_make(name: str) -> str | None:
    """The ``model_type`` of a model that is made when it is asked for; None where it is not one of these."""
    return (maker := _maker(whole := split_name(name).model)) and maker.architecture(whole)


def known_models() -> dict[str, str]:
    """Name and description of every model known by name; those of the MultiBERTs are one line."""
    every = multibert("S", "T")
    steps = "BERT after T = 0, 20, ..., 200, 300, ..., 2000 thousand steps of pretraining, S = 0 to 4"
    found, on_hub = {}, {}
    for name, known in (MODELS | {every: KnownModel(steps, repository=f"google/{every}")}).items():
        if known.packages:
            source = "downloaded at first use" if any(map(packages.on_demand, known.packages)) else "bundled"
            found[name] = f"{known.description} ({source})"
        else:
            unpinned = "" if known.revision else "; no pinned revision"
            on_hub[name] = f"{known.description} (hub: {known.repository}{unpinned})"
    made = {name: text for maker in _makers() for name, text in maker.descriptions.items()}
    return found | made | on_hub


def title(name: str) -> str:
    """What a model is called in figures and sentences: its proper name, or the last part of a path or hub id.

    Matplotlib leaves what begins with ``_`` out of a legend, and sets what stands between two ``$`` as mathematics.

    >>> title("minilm"), title("models/bert$1"), title("own/_gpt"), title("google/canine-c:untrained")
    ('MiniLM', 'bert_1', 'own/_gpt', 'canine-c, untrained')
    >>> title("minilm+runs/legal"), title("own/clip@part=vision_model")
    ('MiniLM+legal', 'clip (vision_model)')

    A long one, beside which no figure would have a place, is cut in the middle.

    >>> title("runs/a-model-whose-name-says-all-of-its-settings-and-its-seed-3")
    'a-model-whose-name-says-…-settings-and-its-seed-3'
    """
    whole, adapter, part, twin = split_name(name)
    known, parts = known_model(whole), whole.replace("$", "_").rstrip("/").split("/")
    proper = re.split("[:,] ", known.description)[0] if known and known.description else parts[-1]
    if proper.startswith("_"):
        proper = f"{parts[-2] if len(parts) > 1 else '.'}/{proper}"
    proper += "" if adapter is None else f"+{adapter.replace('$', '_').rstrip('/').rpartition('/')[2]}"
    for told in (part, split_dtype(name)[1]):
        proper += f" ({told})" if told else ""
    return _cut(proper) if twin is None else f"{_cut(proper)}, untrained"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TITLE:
        return text
    return f"{text[: LONGEST_TITLE // 2]}…{text[-LONGEST_TITLE // 2 :]}"


def names_to_share(names: Iterable[str]) -> list[str]:
    """Models as pages that leave this machine name them: their folders without the way to them.

    Of folders that would end alike, as many of the last parts as tell them apart.

    >>> names_to_share(["minilm", "/home/someone/bert@dtype=bfloat16", "/data/a/gpt", "/data/b/gpt"])
    ['minilm', 'bert@dtype=bfloat16', 'a/gpt', 'b/gpt']
    """
    names = list(names)
    shared = [_name_to_share(name, 1) for name in names]
    longest = max((name.count("/") for name in names), default=0)
    for parts in range(2, longest + 2):
        alike = [number for number, name in enumerate(shared) if shared.count(name) > 1]
        for number in alike:
            shared[number] = _name_to_share(names[number], parts)
    return shared


def _name_to_share(name: str, parts: int) -> str:
    """A name whose folders have at most so many parts, unless they lie below the current one."""
    whole, adapter, *_ = split_name(name)
    for folder in filter(None, (whole, adapter)):
        if path_to_share(folder) != folder:
            name = name.replace(folder, "/".join(Path(folder).parts[-parts:]).lstrip("/"), 1)
    return name


def known_model(name: str) -> KnownModel | None:
    """The entry of a name in the lists of this module."""
    return MODELS.get(name) or MULTIBERTS.get(name)


def weights_identity(name: str) -> str:
    """A short text that changes when the weights behind ``name`` change; neither downloads nor loads them.

    Raises:
        AnalysisError: ``name`` is on a hub that cannot be reached, and not in the local cache.
    """
    model, adapter, *_ = split_name(name)
    if adapter is not None:
        # The base that is given counts, and not the one that the adapter names.
        of_adapter = _hashed(Path(adapter)) if os.path.isdir(adapter) else weights_identity(adapter)
        return f"{of_adapter} on {weights_identity(model)}"
    name, known = model, known_model(model)
    if known and known.packages:
        return " ".join(map(packages.pin, known.packages))
    if maker := _maker(name):
        return maker.identity(name)
    if not known and os.path.isdir(name):
        return folder_identity(model_home(Path(name)))
    repository, revision = (known.repository, known.revision) if known else (name, None)
    with _explained(name):
        return f"{repository}@{hub.require(repository, revision, 'config.json', ADAPTER)}"


def folder_identity(folder: Path) -> str:
    """A short text that changes when a folder does from which a model is read, or another one that it needs."""
    identity = _hashed(folder)
    if (base := adapter_base(folder)) is not None:
        identity += f" on {weights_identity(base)}"
    if folder.name.startswith(CHECKPOINT) and not has_processor(folder) and has_processor(folder.parent):
        read_by = json.dumps(file_hashes(folder.parent, (*VOCABULARIES, "*token*", "*processor*.json")))
        identity += f" read by sha256:{hashlib.sha256(read_by.encode()).hexdigest()}"
    return identity


def _hashed(folder: Path) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(file_hashes(folder)).encode()).hexdigest()}"


def located(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of the files of a model, or of the adapter that its name adds, and what identifies the model.

    Raises:
        AnalysisError: there is no such model, it is on a hub that cannot be reached, or a revision is given of one that
            is not on the hub.
    """
    if not name.strip() or "\0" in name or len(name) > 4096:
        raise AnalysisError(f"{name[:40]!r} is no model: give a name of `models`, a hub id or a folder")
    if (adapter := split_name(name).adapter) is not None:
        folder = Path(adapter) if os.path.isdir(adapter) else located(adapter, revision)[0]
        if not (folder / ADAPTER).is_file():
            raise AnalysisError(f"{adapter} holds no adapter ({ADAPTER} is missing): give the folder of one after +")
        return folder, weights_identity(name)
    known = known_model(name)
    maker = None if known else _maker(name)
    if (known or maker) and os.path.isdir(name):
        said = "note: %s is the known model of that name, and not the folder %s that lies here: for that, give %s"
        logging.getLogger(__name__).warning(said, name, name, os.path.join(".", name))
    if not (known.packages if known else maker or os.path.isdir(name)):
        known = known or KnownModel("", repository=name, pickled=True)
        with _explained(name):
            folder = hub.model_folder(known.repository, revision or known.revision, pickled=known.pickled)
        return folder, f"{known.repository}@{folder.name}"
    if revision is not None:
        raise AnalysisError(f"{name} is not read from the hub: leave the revision out")
    if known:
        # Imported here: what can be said of a model without its weights needs no torch.
        from analysis_lib.models.conversion import converted

        folder = converted(name, known.form, known.packages)
    else:
        folder = maker.folder(name) if maker else model_home(Path(name))
    return folder, weights_identity(name)


def model_home(folder: Path) -> Path:
    """Where in a folder the model lies: in that of sentence-transformers it may be the first of its modules."""
    listed = folder / "modules.json"
    if (folder / "config.json").is_file() or not listed.is_file():
        return folder
    inner = packages.read(listed, lambda path: folder / json.loads(path.read_text(encoding="utf-8"))[0]["path"])
    return inner if inner.is_dir() and inner.resolve().is_relative_to(folder.resolve()) else folder


def adapter_base(folder: Path) -> str | None:
    """The name of the model that an adapter belongs to; None where a folder holds a whole model.

    Raises:
        AnalysisError: it is not told.
    """
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    base = packages.read_json(folder / ADAPTER).get("base_model_name_or_path")
    if isinstance(base, str) and base.strip():
        return base
    raise AnalysisError(f"{folder / ADAPTER} does not say whose adapter it is: give its base_model_name_or_path")


def has_processor(folder: Path, kind: str | None = None) -> bool:
    """Whether a folder holds what prepares the input of a model that reads texts, images or sounds; or of any."""
    if kind != "text" and (folder / PREPARATION).is_file():
        return True
    if kind in (None, "text"):
        settings = folder / "tokenizer_config.json"
        if settings.exists() and packages.read_json(settings).get("tokenizer_class") in WITHOUT_VOCABULARY:
            return True
        return any(path.is_file() for pattern in VOCABULARIES for path in folder.glob(pattern))
    return False


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Around a request to the hub: a name that is neither known nor a folder may be a misspelt one."""
    if known_model(name):
        yield
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise AnalysisError(f"there is no folder {name!r}: give a folder with config.json, or a name of `models`")
    try:
        yield
    except AnalysisError as error:
        near = near_names(name, MULTIBERTS if name.startswith("multiberts-") else known_models())
        raise AnalysisError(f"there is no model or folder named {name} here ({near}); {error}") from error


def file_hashes(folder: Path, patterns: Iterable[str] = hub.MODEL_FILES) -> dict[str, str]:
    """sha256 of files of a folder, by their paths in it: its configuration, weights and tokenizer unless told.

    Weights that an index of the folder names are among them, wherever they lie. Pickles count where they are read:
    where there are no safetensors files.
    """
    if patterns == hub.MODEL_FILES and not any(folder.glob("*.safetensors")):
        patterns = (*patterns, *hub.PICKLES, "adapter_model.bin")
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    for index in [path for path in paths if path.name.endswith(".index.json")]:
        # A damaged one is told by whoever loads the weights.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            paths |= {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return {os.path.relpath(path, folder): packages.file_hash(path) for path in sorted(paths) if path.is_file()}
