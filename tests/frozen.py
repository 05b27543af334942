"""Whether a refactor left every number alone, to the byte; not part of the suite.

    python tests/frozen.py before.json      # on the commit before; some ten minutes
    python tests/frozen.py after.json before.json   # after: lists what differs, status 1 if
    anything does

Bytes are those of one machine and one version of each library: write both files on the same
machine.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import tiny
import torch

from analysis_book.papers.geometry import geometry_of
from analysis_lib import Corpus, load_corpus, load_model, measure, measure_vectors
from analysis_lib.capture.interventions import Replace
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.tables import Tables
from analysis_lib.metrics import METRICS

REAL = {
    "minilm": "wikipedia",
    "smollm2-135m": "wikipedia",
    "text-gpt2": "news",
    "whisper-base": "speech-clips",
    "vit-s14": "photographs",
}
ITEMS = 40
INTERVENTIONS = {
    "residual": Replace("residual", layers=(3,), dimensions=(99,), by="mean"),
    "weights": Replace("weights", layers=(4, 5, 6), tokens=("cls",)),
    "key": Replace("key", layers=(2,), by="other", seed=1),
}
STATISTICS = {
    "highest cosine": lambda t: t["anisotropy"].query("space == 'hidden'")["cosine"].max(),
    "entropy": lambda t: t["attention_entropy"]["entropy_normalised"].mean(),
    "contribution": lambda t: t["score_contributions"]["contribution"].abs().max(),
}
# What is not of the machine or the file that the model lies in.
GEOMETRY = (
    "kind",
    "texts",
    "tokens",
    "left_out",
    "layers",
    "outlier_dimensions",
    "sinks",
    "spikes",
)


def digest(table: pd.DataFrame) -> str:
    """SHA-256 of the names, types and bytes of the columns."""
    state = hashlib.sha256()
    for name, column in table.items():
        is_text = column.dtype.kind not in "fiub"
        values = column.astype(str).to_numpy(dtype="U") if is_text else column.to_numpy()
        state.update(f"{name} {'text' if is_text else column.dtype} {len(values)}\n".encode())
        state.update(np.ascontiguousarray(values).tobytes())
    return state.hexdigest()


def hashes(tables: Tables) -> Iterator[tuple[str, str]]:
    """Of every table, of the intervals of three statistics, and of ``geometry.json``."""
    for name, table in tables.items():
        yield name, digest(table)
    for name, statistic in STATISTICS.items():
        try:
            estimate = tables.interval(statistic)
        except (AnalysisError, KeyError) as error:
            yield f"interval of the {name}", type(error).__name__
        else:
            yield f"interval of the {name}", repr([float(number) for number in estimate.row])
    if "anisotropy" not in tables:
        return
    geometry = geometry_of(tables)
    numbers = {name: geometry[name] for name in GEOMETRY}
    yield "geometry.json", hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def measurements() -> Iterator[tuple[str, Tables]]:
    """Every tiny architecture in two precisions, real models, interventions, and vectors that are
    given.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in tiny.EVERY_ARCHITECTURE:
            path = tiny.save(Path(folder) / name, name)
            for dtype in ("float32", "float64"):
                model = load_model(str(path), dtype=dtype)
                for tables in measured(model, tiny.corpus(name)):
                    yield f"{name} {dtype}", tables
    for name, data in REAL.items():
        for tables in measured(load_model(name), load_corpus(data, limit=ITEMS)):
            yield name, tables
    model, corpus = load_model("minilm"), load_corpus("wikipedia", limit=ITEMS)
    for name, change in INTERVENTIONS.items():
        yield f"minilm, {name}", measure(model, corpus, intervention=change, progress=False)
    numbers = np.random.default_rng(0)
    lengths = [*range(2, 30)]
    vectors = {layer: numbers.normal(1, 2, (sum(lengths), 16)) for layer in range(3)}
    yield "vectors", measure_vectors(vectors, lengths=lengths, progress=False)


def measured(model: object, corpus: Corpus) -> Iterator[Tables]:
    """All tables, and then each of those on request that can be had."""
    yield measure(model, corpus, progress=False)
    for name, kind in METRICS.items():
        if kind.on_request:
            with suppress(AnalysisError):
                tables = measure(model, corpus, name, progress=False)
                # Too little may be there to make it of.
                tables[name]
                yield tables


def main(path: str, before: str | None = None) -> int:
    os.environ["ANALYSIS_LIB_MEASUREMENTS"] = ""
    torch.set_num_threads(1)
    found = {}
    for name, tables in measurements():
        found[f"{name}: {', '.join(tables)}"] = dict(hashes(tables))
        print(name, file=sys.stderr)
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
    if before is None:
        return 0
    known = json.loads(Path(before).read_text())
    differing = [
        f"{name}: {table}"
        for name in sorted({*known, *found})
        for table in sorted({*known.get(name, {}), *found.get(name, {})})
        if known.get(name, {}).get(table) != found.get(name, {}).get(table)
    ]
    print("\n".join(differing) or "every byte is the same")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
