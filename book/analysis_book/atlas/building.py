"""The table of the atlas: one row per type of model that transformers knows.

``python -m analysis_book.atlas.building data/transformers_outputs.csv`` takes half an hour of two
cores; with names behind it, those types alone are tried. Each type runs in a process of its
own, so that none can stop or fill the others. What is there already is not made again: it lies
beside the packages, by the version of transformers.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis_book.atlas.cards import BUILT, read_table, values_of
from analysis_lib.files import package_directory

# In the order of the table.
COLUMNS = (
    *("type", "transformers", "result", "class", "reads"),
    *("blocks", "hidden_states", "first_state", "states_between", "last_state", "state_axes"),
    *("attentions", "attention_kind", "attention_axes", "row_sums", "dropout"),
    *("default_attention", "attentions_by_default"),
    *("left_padding", "left_padding_with_positions", "right_padding", "pad_positions"),
    *("rotation", "rotation_bases", "key_groups", "scale", "cap", "window"),
    *("two_calls", "dtype"),
)
# Of one processor, for each type; the clock also counts what others do.
SECONDS = 15
PATIENCE = 30 * SECONDS
# Of address space, for each type.
MOST_BYTES = 10 * 2**30


def row(model_type: str) -> dict[str, str]:
    """All that the atlas has of a type; where no small model of it runs, the reason."""
    import torch
    import transformers

    from analysis_book.atlas.probing import probe, quiet
    from analysis_book.atlas.small import NotBuiltError, read_by, running

    torch.set_num_threads(1)
    known = {"type": model_type, "transformers": transformers.__version__}
    try:
        with quiet():
            small = running(model_type)
    except NotBuiltError as error:
        return known | {"result": str(error)}
    known |= {"result": BUILT, "class": type(small.model).__name__}
    known |= {"reads": read_by(small.model, small.inputs)}
    known |= probe(small.model, small.inputs)
    return known | {
        "key_groups": groups_of_type(known["key_groups"]),
        "dtype": saved_in_half(small.model),
    }


def groups_of_type(cell: str) -> str:
    """Which heads share a key, without the numbers of a small model.

    >>> groups_of_type("4 query heads, 2 key heads")
    'groups of query heads can share a key'
    """
    words = {}
    for value in values_of(cell):
        several = re.fullmatch(r"\d+ query heads, (\d+) key heads?", value)
        if several:
            value = "groups of query heads can share a key"
            if several[1] == "1":
                value = "all query heads share a key"
        words[value] = None
    return ", or ".join(words)


def saved_in_half(model: object) -> str:
    """The precisions that ``from_pretrained`` gives of weights in half precision.

    Nothing is written: a small configuration need not be one that may be saved.
    """
    import torch

    from analysis_book.atlas.probing import dtypes_of, joined, quiet
    from analysis_book.atlas.small import reason_of
    from analysis_lib.models.reading import LOCALLY

    given = {}
    for saved in ("bfloat16", "float16"):
        dtype = getattr(torch, saved)
        weights = model.to(dtype).state_dict()
        model.config.dtype = dtype
        try:
            with quiet():
                kind = type(model)
                settings = {"config": model.config, "state_dict": weights}
                loaded = dtypes_of(kind.from_pretrained(None, **settings, **LOCALLY))
            given[saved] = "as saved" if loaded == saved else loaded
        except Exception as error:  # Models fail in many ways.
            given[saved] = f"error: {reason_of(error)}"
    return joined(given)


# --- Processes ------------------------------------------------------------------------------------


def _write_row(model_type: str, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        made = row(model_type)
    except Exception:
        # An error of ours: the row says so, and the table is not done.
        lines = traceback.format_exc().strip().splitlines()
        made = {"type": model_type, "result": f"failed: {lines[-1]}", "trace": lines[-8:]}
    path.with_suffix(".part").write_text(json.dumps(made), encoding="utf-8")
    path.with_suffix(".part").rename(path)


def rows(model_types: Iterable[str], folder: Path, workers: int) -> Iterator[dict[str, str]]:
    """The rows of types, in order; those of which there is a file are read from it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Its server imports transformers once, and each process begins as a copy of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["analysis_book.atlas.preloaded"])
    paths = {name: folder / f"{name}.json" for name in model_types}
    missing = [name for name, path in paths.items() if not path.is_file()]
    working: dict[str, tuple] = {}
    while missing or working:
        while missing and len(working) < workers:
            name = missing.pop(0)
            process = context.Process(target=_write_row, args=(name, paths[name]))
            process.start()
            working[name] = process, time.monotonic()
        time.sleep(0.05)
        for name, (process, start) in [*working.items()]:
            if process.is_alive() and time.monotonic() - start < PATIENCE:
                continue
            _end(name, process, paths[name])
            del working[name]
            print(name, len(missing), "left", file=sys.stderr, flush=True)
    for path in paths.values():
        yield json.loads(path.read_text(encoding="utf-8"))


def _end(name: str, process: multiprocessing.Process, path: Path) -> None:
    """End a process; where it wrote no row, write why."""
    if process.is_alive():
        process.kill()
    process.join()
    reason = f"it takes more than {SECONDS} seconds, or too much memory"
    if not path.is_file():
        path.write_text(json.dumps({"type": name, "result": reason}), encoding="utf-8")


def table(made: Iterable[Mapping[str, str]]) -> pd.DataFrame:
    """The rows as a table; without a model, the other cells are empty."""
    return pd.DataFrame(made, columns=COLUMNS).fillna("")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the table, or what is missing of it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the table, as CSV")
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    folder = package_directory() / "derived" / "atlas" / transformers.__version__
    names = options.types or sorted(CONFIG_MAPPING_NAMES)
    made = table(rows(names, folder, options.workers))
    made["transformers"] = transformers.__version__
    if options.path.is_file():
        # What it has of other versions and types stays.
        kept = read_table(options.path)
        is_other = kept["transformers"] != transformers.__version__
        kept = kept[is_other | ~kept["type"].isin(names)]
        made = pd.concat([kept, made]).sort_values(["type", "transformers"])
    made.to_csv(options.path, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
