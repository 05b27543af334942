"""What a measurement costs: each row is a ratio of two calls that take turns within one run.

    python -m benchmarks [--pairs 5] [ROW ...]

What is compared with a bare forward pass is timed twice: by the clock, in two threads, which is
what a user waits for, and in seconds of one core, which other work on the machine disturbs less.
All else is in seconds of one core, but what depends on workers. The table is printed, and written
to ``benchmarks/results/``, a file per row.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# What was measured before must not be found again.
os.environ["ANALYSIS_LIB_MEASUREMENTS"] = ""

import torch

from analysis_lib import Corpus, LoadedModel, load_model
from benchmarks.rows import (
    WITHOUT_ATTENTION,
    Call,
    added_memory,
    bare,
    bert_base,
    by_hand,
    cosines,
    errors,
    left_on_disk,
    long_texts,
    measured,
    options_with_rows,
    peak_memory,
    sentences,
    tables_again,
)

RESULTS = Path(__file__).with_name("results")


def pair(
    ours: Call, theirs: Call, pairs: int, clock: Callable[[], float] = time.process_time
) -> dict[str, object]:
    """The ratios of two calls that take turns, after one of each that warms up."""

    def seconds(call: Call) -> float:
        started = clock()
        call()
        return clock() - started

    ratios = [seconds(ours) / seconds(theirs) for _ in range(pairs + 1)][1:]
    return {
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "pairs": pairs,
    }


def over_bare(
    model: Callable[[], LoadedModel], corpus: Callable[[], Corpus], metrics: str = "all"
) -> Callable[[int], dict]:
    """``measure`` over a bare forward pass: by the clock in two threads, of twice the pairs, and on
    one core.
    """

    def run(pairs: int) -> dict:
        ours, theirs = measured(model(), corpus(), metrics), bare(model(), corpus())
        one_core = pair(ours, theirs, pairs)["median"]
        torch.set_num_threads(2)
        found = pair(ours, theirs, 2 * pairs, time.perf_counter)
        torch.set_num_threads(1)
        return found | {"one core": one_core}

    return run


def two_workers(pairs: int) -> dict:
    model, corpus = minilm(), sentences(12_000)
    return pair(
        measured(model, corpus, workers=2), measured(model, corpus), pairs, time.perf_counter
    )


def memory(_: int) -> dict:
    small, large = peak_memory(2_000), peak_memory(200_000)
    return {"median": large / small, "MiB at 2,000": round(small), "MiB at 200,000": round(large)}


def half(pairs: int) -> dict:
    whole, short = minilm(), load_model("minilm", dtype="bfloat16")
    found = pair(measured(short, many()), measured(whole, many()), pairs)
    # What the processor gains by half the digits: no measurement can gain more.
    found["bare forwards"] = pair(bare(short, many()), bare(whole, many()), pairs)["median"]
    return found | {
        "errors": {name: round(error, 4) for name, error in errors(short, whole, many()).items()}
    }


def without_a_library(pairs: int) -> dict:
    found = pair(measured(minilm(), many()), by_hand(minilm(), many()), pairs)
    # What the model alone takes, with fused attention and little padding: no measurement can take
    # less.
    found["bare forwards"] = pair(bare(minilm(), many()), by_hand(minilm(), many()), 1)["median"]
    return found


def beside(library: str) -> Callable[[int], dict]:
    """The average cosines of SmolLM2, and the memory they take, against another library."""

    def run(pairs: int) -> dict:
        try:
            found = pair(cosines("", 200), cosines(library, 200), pairs)
        except ModuleNotFoundError as error:
            raise SystemExit(f"{error.name} is not installed: pip install {error.name}") from None
        ours, theirs = added_memory("", 200), added_memory(library, 200)
        return found | {
            "memory": ours / theirs,
            "MiB": round(ours),
            "MiB of the other": round(theirs),
        }

    return run


def disk(_: int) -> dict:
    return {
        "median": left_on_disk(1100),
        "MB when a minute has passed": round(left_on_disk(1100, 0), 1),
    }


minilm, smollm2 = partial(load_model, "minilm"), partial(load_model, "smollm2-135m")
many = partial(sentences, 1500)
# By name: what is compared, with what, and at most what is wanted.
ROWS = {
    "sentences": ("all tables, MiniLM, sentences", "bare forward", 1.20, over_bare(minilm, many)),
    "vectors": (
        "tables of vectors, MiniLM, sentences",
        "bare forward",
        1.08,
        over_bare(minilm, many, WITHOUT_ATTENTION),
    ),
    "long": (
        "all tables, MiniLM, articles",
        "bare forward",
        1.35,
        over_bare(minilm, partial(long_texts, 40)),
    ),
    "base": (
        "all tables, BERT of base size, sentences",
        "bare forward",
        1.02,
        over_bare(bert_base, partial(sentences, 300)),
    ),
    "causal": (
        "all tables, SmolLM2-135M, sentences",
        "bare forward",
        1.15,
        over_bare(smollm2, partial(sentences, 200)),
    ),
    "causal-long": (
        "all tables, SmolLM2-135M, articles",
        "bare forward",
        1.40,
        over_bare(smollm2, partial(long_texts, 8)),
    ),
    "nnsight": ("average cosines, SmolLM2-135M, sentences", "nnsight", 1.0, beside("nnsight")),
    "transformer-lens": (
        "average cosines, SmolLM2-135M, sentences",
        "TransformerLens",
        1.0,
        beside("transformer-lens"),
    ),
    "by-hand": (
        "all tables, MiniLM, sentences",
        "hidden states and attention kept, then numpy",
        1 / 3,
        without_a_library,
    ),
    "tables": (
        "tables of a finished measurement",
        "the pass over 1,500 sentences",
        0.05,
        lambda pairs: pair(tables_again(minilm(), many()), measured(minilm(), many()), pairs),
    ),
    "disk": ("MB on disk while 1,100 sentences are measured", "", 4, disk),
    "bfloat16": ("all tables, MiniLM in bfloat16, sentences", "in float32", 0.5, half),
    "memory": ("peak memory at 200,000 sentences", "at 2,000", 1.02, memory),
    "workers": ("two workers of one thread, 12,000 sentences", "one", 0.6, two_workers),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=5, help="pairs of calls (default 5)")
    options = options_with_rows(parser, ROWS)
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    RESULTS.mkdir(exist_ok=True)
    for name in options.rows:
        ours, theirs, wanted, run = ROWS[name]
        found = run(options.pairs)
        found = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in found.items()
        }
        spread = f" ({found['least']:.2f} to {found['most']:.2f})" if "least" in found else ""
        spread += f", {found['one core']:.2f} on one core" if "one core" in found else ""
        print(f"| {ours} | {theirs} | {found['median']:.2f}{spread} | {wanted:.2f} |", flush=True)
        record = {
            "ours": ours,
            "against": theirs,
            "at most": round(wanted, 3),
            **found,
            "machine": machine,
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
