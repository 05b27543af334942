"""Small models, each trained in a minute or two: ``trained("digits-vit")`` is a folder."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from analysis_book.training.settings import RECIPES, RECORD, Recipe, named_settings, versions
from analysis_lib import corpora, files, store
from analysis_lib.errors import AnalysisError, in_order, near_names, require_path, require_text
from analysis_lib.files import Output
from analysis_lib.models import Maker

if TYPE_CHECKING:
    import pandas as pd

NAMED = "a small model of `models`, with other settings as in digits-vit@steps=50"
COLUMNS = ("model", "parameters", "steps", "metric", "score", "ci_low", "ci_high", "baseline")


def trained(name: str) -> Path:
    """The folder of a trained model, which is trained once unless it is in ``data/models``.

    The folder is what ``save_pretrained`` makes: configuration, safetensors weights, and a
    tokenizer or image processor. In it, ``training.json`` says how the model was trained, and its
    score on held-out data with a 95 % interval. The same settings and versions give the same
    weights on one machine. If several processes ask for a model at once, one trains it. The
    caller's random numbers do not change.

    Args:
        name: one of ``RECIPES``, with any number of its settings changed as in
            ``digits-vit@steps=50@seed=1``.

    Raises:
        AnalysisError: there is no such recipe or setting, or the data are missing.
    """
    require_text("the model", name, NAMED)
    recipe, identity, shipped = _recipe(name)
    key, base = _key(identity), identity["recipe"]
    folder = store.derived_folder(key, base)
    if shipped or store.is_whole(folder):
        return shipped or folder
    with files.alone(folder.with_name(f"{folder.name}.lock")):
        return store.derived(key, base, lambda unfinished: _train(recipe, identity, unfinished))


def train(name: str, folder: Path) -> "pd.DataFrame":
    """Train a model anew and write its folder, which must be new or empty, whole or not at all.

    A symbolic link to an empty folder is followed.

    Returns:
        As :func:`held_out_scores`: its score, and that of the shipped model of the recipe.

    Raises:
        AnalysisError: what :func:`trained` raises; or the folder is not empty, or cannot be
            written.
    """
    require_text("the model", name, NAMED)
    folder = require_path("the folder", folder)
    recipe, identity, _ = _recipe(name)
    folder = Path(os.path.realpath(folder))
    with files.writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise AnalysisError(
                f"{folder} is there already, and is no empty folder: give another one"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.scratch(folder.parent, ".unfinished") as home:
            unfinished = home / "model"
            _train(recipe, identity, unfinished)
            output = Output(unfinished, "train", (name,), RECORD)
            output.seal(*(path.name for path in unfinished.iterdir()))
            unfinished.rename(folder)
    base = identity["recipe"]
    shipped = files.data_directory() / "models" / base
    return _scores({name: folder, f"{base} (shipped)": shipped})


def model_identity(name: str) -> str:
    """A short text that changes when the model of ``trained(name)`` would. Trains nothing."""
    _, identity, shipped = _recipe(name)
    if shipped:
        content = b"\0".join(path.read_bytes() for path in sorted(shipped.iterdir()))
    else:
        content = _key(identity).encode()
    return f"{identity['recipe']}@{hashlib.sha256(content).hexdigest()[:12]}"


def held_out_scores(names: Iterable[str]) -> "pd.DataFrame":
    """The score of each model trained here on held-out data.

    Those that have not been trained yet are trained.

    Args:
        names: as ``load_model`` takes them; models that are not trained here have no row.

    Returns:
        Columns model, parameters (their number), steps (of training), metric, score, ci_low,
        ci_high and baseline, see :class:`HeldOutScore`.
    """
    listed = in_order("names", names, "names of models in a list")
    for name in listed:
        require_text("a model", name, "its name")
    return _scores({name: trained(name) for name in filter(_is_recipe, listed)})


def _scores(folders: dict[str, Path]) -> "pd.DataFrame":
    import pandas as pd

    rows = []
    for name, folder in folders.items():
        if not (folder / RECORD).is_file():
            continue
        record = _record(folder)
        score = record["score"]
        row = {
            **score,
            "model": name,
            "parameters": record["parameters"],
            "steps": record["settings"]["steps"],
            "score": score["value"],
            "metric": score["metric"].replace("_", " "),
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def _record(folder: Path) -> dict:
    return files.read_json(folder / RECORD)


def _is_recipe(name: str) -> bool:
    return name.partition("@")[0] in RECIPES


def _recipe(name: str) -> tuple[Recipe, dict, Path | None]:
    """The recipe with its changes, its identity, and the folder of its model if that is shipped.

    The identity is all that decides the weights but the versions.
    """
    recipe = named_settings(name, RECIPES)
    if not recipe:
        raise AnalysisError(f"there is no recipe named {name}: {near_names(name, RECIPES)}")
    base = name.partition("@")[0]
    data = corpora.data_identity(recipe.data)
    identity = {"recipe": base, "settings": recipe.settings(), "data": data}
    folder = files.data_directory() / "models" / base
    shipped = (folder / RECORD).is_file() and identity.items() <= _record(folder).items()
    return recipe, identity, folder if shipped else None


def _train(recipe: Recipe, identity: dict, folder: Path) -> None:
    # Imported where it is needed, since torch takes seconds.
    from analysis_book.training import tasks

    tasks.train(recipe, identity, folder)


def _key(identity: dict) -> str:
    return json.dumps([identity, versions()], sort_keys=True)


_DESCRIPTIONS = {
    name: f"{recipe.description} (trained here, shipped)" for name, recipe in RECIPES.items()
}
# Found by the library: an entry point of the group ``analysis_lib.models``.
MAKER = Maker(
    _DESCRIPTIONS, _is_recipe, trained, model_identity, lambda name: _recipe(name)[0].model_type
)
