"""What a measurement costs beside a bare forward pass, and whether its memory grows with the corpus.

    .venv/bin/python benchmarks/one_pass.py

Cost: every table in one pass over the same batches as a bare forward of the same model, in turn, pair by pair; the
figure is the median ratio. Memory: the largest resident set of a process that measures 2,000 and of one that
measures 20,000 sentences. Results are printed and written to ``benchmarks/one_pass.json``.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from analysis_lib import load_corpus, load_model, measure
from analysis_lib.capture import Batch, run
from analysis_lib.capture.batching import make_batches
from analysis_lib.corpora import Corpus
from analysis_lib.measurement.shards import release_freed_memory
from analysis_lib.metrics import resolve

RESULTS = Path(__file__).with_suffix(".json")


def sentences(count: int) -> Corpus:
    """So many sentences of the bundled corpora, shuffled so that every prefix is alike."""
    texts = [text for name in ("wikipedia", "news", "reviews") for text in load_corpus(name).texts]
    order = np.random.default_rng(0).permutation(len(texts))[:count]
    return Corpus("mixed", [texts[i] for i in order])


def cost(batches: list[Batch], model, pairs: int) -> dict[str, object]:
    """The ratio of one pass with every metric to a bare forward, over the same batches."""
    ratios = []
    for _ in tqdm(range(pairs + 1), desc="cost"):
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                model.model(**batch.inputs)
        bare = time.perf_counter() - started
        # Sums that a batch remembers would make the second pass cheaper than a first one.
        fresh = [replace(b, tokens=replace(b.tokens)) for b in batches]
        metrics = resolve("all")
        needs = frozenset().union(*(metric.needs for metric in metrics))

        def receive(activations, metrics=metrics):
            for metric in metrics:
                metric.update(activations)

        started = time.perf_counter()
        for batch in fresh:
            run(model, batch, needs, receive)
            release_freed_memory()
        ratios.append((time.perf_counter() - started) / bare)
    counted = ratios[1:]  # the first pair warms up
    return {
        "tokens": int(sum(batch.tokens.mask.sum() for batch in batches)),
        "batches": len(batches),
        "pairs": pairs,
        "ratio": round(statistics.median(counted), 3),
        "range": [round(min(counted), 3), round(max(counted), 3)],
    }


def batches_of(model, texts: list[str], tokens_per_batch: int = 2048) -> list[Batch]:
    ids = model.tokenizer(texts, truncation=True, max_length=model.max_length)["input_ids"]
    return make_batches(model, ids, [i % 20 for i in range(len(ids))], True, tokens_per_batch)


def peak_memory(count: int) -> float:
    """The largest resident set, in MiB, of a process that measures so many sentences."""
    command = [sys.executable, __file__, "--only-measure", str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only-measure", type=int, metavar="SENTENCES", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of passes (default 5)")
    options = parser.parse_args()
    if options.only_measure:
        tables = measure(load_model("minilm"), sentences(options.only_measure), progress=False)
        assert all(len(tables[name]) for name in tables)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    model = load_model("minilm")
    short = batches_of(model, sentences(1500).texts)
    articles = load_corpus("news:articles", limit=150).texts
    long = batches_of(model, [text for text in articles if len(model.tokenizer(text)["input_ids"]) > 256])
    costs = {
        "sentences": cost(short, model, options.pairs),
        "texts over 256 tokens": cost(long, model, options.pairs),
    }
    small, large = (peak_memory(count) for count in tqdm((2000, 20000), desc="memory"))
    results = {
        "threads": torch.get_num_threads(),
        **costs,
        "peak MiB at 2,000 sentences": round(small),
        "peak MiB at 20,000 sentences": round(large),
        "growth": round(large / small - 1, 4),
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
