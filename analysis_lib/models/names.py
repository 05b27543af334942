"""Names of models, models known by name, and their titles in figures."""

import csv
import itertools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Self

from analysis_lib import files
from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, shown

UNTRAINED, SEED, PART, DTYPE = ":untrained", "@seed=", "@part=", "@dtype="
# All random number generators accept seeds of this length.
SEEDS = re.compile("[0-9]{1,18}")
# In letters: a longer entry would make a legend wider than its figure.
LONGEST_TITLE = 48


@dataclass(frozen=True)
class ModelName:
    """A parsed name of a model: ``BASE+ADAPTER@part=PATH:untrained@seed=N@dtype=TYPE``.

    Only the base is required, and ``str`` gives the text that was parsed.

    Attributes:
        base: a known model, a folder or a hub id, including the settings of a recipe, as in
            ``digits-vit@steps=50``.
        adapter: the folder or hub id of an adapter for it.
        part: the path of the part to measure; empty for the whole model.
        untrained: whether its weights are random, as training would start from them.
        seed: the seed of these weights, if given.
        dtype: the precision, if given.
    """

    base: str
    adapter: str | None = None
    part: str = ""
    untrained: bool = False
    seed: int | None = None
    dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The parts of a name.

        >>> ModelName.parse("minilm+runs/legal").adapter
        'runs/legal'
        >>> name = ModelName.parse("own/clip@part=vision_model:untrained@seed=3@dtype=bfloat16")
        >>> name.base, name.part, name.untrained, name.seed, name.dtype
        ('own/clip', 'vision_model', True, 3, 'bfloat16')

        Raises:
            AnalysisError: the name is not a text, its seed not a number, or the path of the part is
                missing.
        """
        if not isinstance(text, str):
            raise AnalysisError(f"the name of a model is {shown(text)}: give a text")
        rest, dtype = _without_dtype(text)
        rest, untrained, seed = _without_seed(rest)
        whole, names_part, part = rest.partition(PART)
        if names_part and not part.strip():
            raise AnalysisError(
                f"{text} names no part: give its path, as in {whole}{PART}vision_model, or leave "
                "it out"
            )
        base, _, adapter = whole.rpartition("+")
        # The name of a folder may contain a plus sign.
        if not base or os.path.isdir(whole):
            return cls(whole, None, part, untrained, seed, dtype)
        return cls(base, adapter, part, untrained, seed, dtype)

    def __str__(self) -> str:
        text = self.whole
        if self.part:
            text += f"{PART}{self.part}"
        if self.untrained:
            text += UNTRAINED
        if self.seed is not None:
            text += f"{SEED}{self.seed}"
        if self.dtype is not None:
            text += f"{DTYPE}{self.dtype}"
        return text

    @property
    def whole(self) -> str:
        """The base with its adapter, as text."""
        return self.base if self.adapter is None else f"{self.base}+{self.adapter}"

    @property
    def without_dtype(self) -> str:
        """The same name without its precision, as text."""
        return str(replace(self, dtype=None))

    @property
    def trained(self) -> str:
        """The name of the trained model behind an untrained one, without precision, as text."""
        return str(replace(self, untrained=False, seed=None, dtype=None))

    @property
    def folders(self) -> list[str]:
        """The base and the adapter, each of which may be a folder."""
        return [self.base] if self.adapter is None else [self.base, self.adapter]


def _without_dtype(text: str) -> tuple[str, str | None]:
    rest, is_stated, dtype = text.rpartition(DTYPE)
    return (rest, dtype) if is_stated and dtype.isalnum() else (text, None)


def _without_seed(text: str) -> tuple[str, bool, int | None]:
    """A name without ``:untrained``, whether it had that ending, and the seed after it."""
    rest, is_seeded, seed = text.partition(f"{UNTRAINED}{SEED}")
    if not is_seeded:
        return text.removesuffix(UNTRAINED), text.endswith(UNTRAINED), None
    if not SEEDS.fullmatch(seed):
        raise AnalysisError(
            f"the seed of {text} is {shown(seed)}: give a whole number of at most 18 digits"
        )
    return rest, True, int(seed)


@dataclass(frozen=True)
class KnownModel:
    """A model known by name: in a pinned package, or on the hub at a pinned revision.

    Attributes:
        description: a description in a few words.
        packages: the packages that hold it, in order.
        form: the format of its weights there, see :mod:`~analysis_lib.models.conversion`.
        repository: its repository on the hub.
        revision: the pinned revision; None if none could be pinned: the hub's current one is used
            and recorded in ``run.json``.
        pickled: whether weights that are published only as a pickle are read; no code in it runs.
    """

    description: str
    packages: tuple[str, ...] = ()
    form: str | None = None
    repository: str | None = None
    revision: str | None = None
    pickled: bool = False


def _read_known() -> dict[str, KnownModel]:
    path = files.data_directory() / "models.csv"
    known = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            known[row["name"]] = KnownModel(
                row["description"],
                tuple(row["packages"].split()),
                row["form"] or None,
                row["repository"] or None,
                row["revision"] or None,
                row["pickled"] == "yes",
            )
    return known


MODELS = _read_known()
# Seeds of the MultiBERTs with published intermediate checkpoints, and their steps in thousands
# (Sellam et al. 2022, sec. 2).
MULTIBERTS_SEEDS = range(5)
MULTIBERTS_STEPS = (*range(0, 201, 20), *range(300, 2001, 100))


def multibert(seed: int | str, step: int | str) -> str:
    """The name of one of the MultiBERTs after ``step`` thousand steps.

    >>> multibert(0, 20)
    'multiberts-seed_0-step_20k'
    """
    return f"multiberts-seed_{seed}-step_{step}k"


MULTIBERTS: dict[str, KnownModel] = {}
for _seed, _step in itertools.product(MULTIBERTS_SEEDS, MULTIBERTS_STEPS):
    _name = multibert(_seed, _step)
    MULTIBERTS[_name] = KnownModel("BERT", repository=f"google/{_name}", pickled=True)


@dataclass(frozen=True)
class Maker:
    """Models that another package makes on first use, by name.

    Attributes:
        descriptions: a line about each model, by name, for the list of known models.
        makes: tells whether a name, with settings as in ``digits-vit@steps=50``, is one of its
            models.
        folder: returns the folder of a model, which is made first if it does not exist.
        identity: returns a short text that changes with the model, without making it.
        architecture: returns the model's ``model_type`` in transformers, without making it.
    """

    descriptions: Mapping[str, str]
    makes: Callable[[str], bool]
    folder: Callable[[str], Path]
    identity: Callable[[str], str]
    architecture: Callable[[str], str]


@cache
def _makers() -> list[Maker]:
    """The makers of installed packages: entry points of the group ``analysis_lib.models``."""
    return [point.load() for point in entry_points(group="analysis_lib.models")]


def maker_of(base: str) -> Maker | None:
    """The package that makes a model of this name on first use; None for other names."""
    return next((maker for maker in _makers() if maker.makes(base)), None)


def architecture_to_make(name: str) -> str | None:
    """The ``model_type`` of a model that is made on first use; None for other models."""
    base = ModelName.parse(name).base
    maker = maker_of(base)
    return None if maker is None else maker.architecture(base)


def known_models() -> dict[str, str]:
    """Name and description of every model known by name; the MultiBERTs share one line."""
    bundled = {}
    on_hub = {}
    for name, known in MODELS.items():
        if known.packages:
            late = any(packages.on_demand(package) for package in known.packages)
            source = "downloaded at first use" if late else "bundled"
            bundled[name] = f"{known.description} ({source})"
        else:
            unpinned = "" if known.revision else "; no pinned revision"
            on_hub[name] = f"{known.description} (hub: {known.repository}{unpinned})"
    every = multibert("S", "T")
    on_hub[every] = (
        "BERT after T = 0, 20, ..., 200, 300, ..., 2000 thousand steps of pretraining, S = 0 to 4 "
        f"(hub: google/{every}; no pinned revision)"
    )
    made: dict[str, str] = {}
    for maker in _makers():
        made |= maker.descriptions
    return bundled | made | on_hub


def known_model(base: str) -> KnownModel | None:
    """The entry of a name in the list of known models."""
    return MODELS.get(base) or MULTIBERTS.get(base)


def title(name: str) -> str:
    """Label of a model in figures and sentences: its proper name, or the end of a path or hub id.

    Characters that Matplotlib treats specially are avoided: it leaves labels that begin with ``_``
    out of a legend, and typesets text between two ``$`` as mathematics.

    >>> names = "minilm", "models/bert$1", "own/_gpt", "google/canine-c:untrained"
    >>> tuple(map(title, names))
    ('MiniLM', 'bert_1', 'own/_gpt', 'canine-c, untrained')
    >>> title("minilm+runs/legal"), title("own/clip@part=vision_model")
    ('MiniLM+legal', 'clip (vision_model)')

    A long label is cut in the middle.

    >>> title("runs/a-model-whose-name-says-all-of-its-settings-and-its-seed-3")
    'a-model-whose-name-says-…-settings-and-its-seed-3'
    """
    model = ModelName.parse(name)
    label = _title_of_base(model.base)
    if model.adapter is not None:
        label += f"+{_path_parts(model.adapter)[-1]}"
    for detail in (model.part, model.dtype):
        if detail:
            label += f" ({detail})"
    if len(label) > LONGEST_TITLE:
        half = LONGEST_TITLE // 2
        label = f"{label[:half]}…{label[-half:]}"
    return f"{label}, untrained" if model.untrained else label


def _title_of_base(base: str) -> str:
    known = known_model(base)
    parts = _path_parts(base)
    label = parts[-1]
    if known and known.description:
        label = re.split("[:,] ", known.description)[0]
    if label.startswith("_"):
        folder = parts[-2] if len(parts) > 1 else "."
        return f"{folder}/{label}"
    return label


def _path_parts(path: str) -> list[str]:
    return path.replace("$", "_").rstrip("/").split("/")
