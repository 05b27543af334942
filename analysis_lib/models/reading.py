"""Calls of other libraries that read a model's folder.

They read nothing but the folder, and each defect becomes an error of one line.
"""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors
import tokenizers
import transformers

from analysis_lib import files
from analysis_lib.errors import AnalysisError, what_failed

# Arguments of all calls that read files: nothing is downloaded, and no code beside the weights
# runs.
LOCALLY = {"local_files_only": True, "trust_remote_code": False}

# transformers switches parts of itself off while it builds a model; two threads at once (as in a
# Dask worker) would leave them off, and the next model with tied weights would lack some.
ALONE = threading.Lock()


@contextmanager
def reading(fault: str, folder: Path) -> Iterator[None]:
    """A context for code of other libraries that reads a model: their errors become one line.

    This is the only place that translates errors of transformers, safetensors, tokenizers and peft.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    for path in folder.iterdir():
        # Reading from a pipe would wait forever.
        if not path.is_file() and not path.is_dir():
            raise AnalysisError(
                f"{path} is no regular file, or leads nowhere: copy the model again"
            )
    try:
        with ALONE:
            yield
    except AnalysisError:
        raise
    except Exception as error:
        refuse_damaged(folder)
        remedy = "give a folder as save_pretrained writes it"
        raise AnalysisError(f"{fault} ({first_line(error)}): {remedy}") from error


def refuse_damaged(folder: Path) -> None:
    """Raise an AnalysisError that names a damaged file of a model's folder.

    Other libraries may not name it.

    Raises:
        AnalysisError: there is one.
    """
    remedy = "copy or save the model again"
    for path in sorted(folder.glob("*")):
        if path.suffix == ".safetensors":
            files.read(path, lambda path: safetensors.safe_open(path, "pt"), remedy)
        elif path.name == "tokenizer.json":
            files.read(path, lambda path: tokenizers.Tokenizer.from_file(str(path)), remedy)
        elif path.suffix == ".json":
            shards = files.read(path, _shards, remedy)
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing:
                raise AnalysisError(f"{path} names {min(missing)}, which is not there: {remedy}")


def _shards(path: Path) -> list[str]:
    """The files that an index names."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    # Other files may hold lists, such as the modules of sentence-transformers.
    is_object = path.name == "config.json" or path.name.endswith(".index.json")
    return [*settings.get("weight_map", {}).values()] if is_object else []


def first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return what_failed(error)
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # A line that ends in a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"
