"""What a measurement costs on a GPU, and by the length of a text, beside a bare forward pass.

    python -m benchmarks.gpu [--size tiny] [--turns 3] [ROW ...]

Models have random weights, since the cost does not depend on them. Each row gives, for the bare
pass, its seconds and its peak memory; for the average cosines of hidden states by hand and for
``measure``, the time over that of the bare pass, of calls that take turns within one run, of the
first call too, and the peak memory. Memory is that of the device, or else the resident set of the
process, whose seconds are then those of one core. ``--size`` takes smaller models and few texts,
for a machine without a GPU; the lengths of texts stay. Rows are printed, and written to
``benchmarks/results/``, a file each.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# What was measured before must not be found again.
os.environ["ANALYSIS_LIB_MEASUREMENTS"] = ""

import torch
import transformers
from torch.nn import functional

from analysis_lib import AnalysisError, Corpus, LoadedModel, load_model, measure
from analysis_lib.capture import Batch, OutOfMemory
from analysis_lib.models.live import live_model
from benchmarks.rows import Call, bare, full_batches, options_with_rows, sentences

RESULTS = Path(__file__).with_name("results")
MIB = 2**20
LONGEST = 2**15
BERT = {
    "base": {},
    "135m": {},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
LLAMA = {
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
    "7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
    },
    # That of SmolLM2.
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
}
# By name: the model, the number of texts, and the tokens of each; sentences if there is no number.
ROWS = {
    "gpu-bert": ("bert", "base", 4000, None),
    "gpu-1b": ("llama", "1b", 2000, None),
    "gpu-1b-1700": ("llama", "1b", 24, 1700),
    "gpu-1b-6921": ("llama", "1b", 2, 6921),
    "gpu-1b-13846": ("llama", "1b", 2, 13846),
    "gpu-7b": ("llama", "7b", 1000, None),
    "gpu-7b-32768": ("llama", "7b", 1, LONGEST),
    "length-1024": ("llama", "1b", 1, 1024),
    "length-4096": ("llama", "1b", 1, 4096),
    "length-16384": ("llama", "1b", 1, 16384),
    "length-32768": ("llama", "1b", 1, LONGEST),
}
# Sizes for a machine without a GPU, and the part of the texts above that they read: one in so many.
SMALLER = ("tiny", "135m")
FEWER = 100


def random_model(kind: str, size: str, device: str) -> LoadedModel:
    """A model of random weights, of a named size: a Llama in bfloat16, a BERT in float32."""
    tokenizer = load_model("minilm").tokenizer
    tokenizer.model_max_length = LONGEST
    words = {"vocab_size": len(tokenizer)}
    if kind == "bert":
        config = transformers.BertConfig(**words, **BERT[size])
        make, dtype = partial(transformers.BertModel, add_pooling_layer=False), torch.float32
    else:
        limit = {"max_position_embeddings": LONGEST}
        config = transformers.LlamaConfig(**words, **limit, **LLAMA[size])
        make, dtype = transformers.LlamaModel, torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = make(config)
    finally:
        torch.set_default_dtype(before)
    return live_model(model.eval(), tokenizer)


def corpus_of(model: LoadedModel, texts: int, tokens: int | None) -> Corpus:
    """So many sentences, or texts of at least so many tokens, of which that many are read."""
    if tokens is None:
        return sentences(texts)
    model.tokenizer.model_max_length = tokens
    # Every word has a token, at least.
    words = " ".join(sentences(4000).texts).split()
    if tokens > len(words):
        raise AnalysisError(f"there are {len(words)} words for a text of {tokens} tokens")
    # Texts differ, so that no other is known from one.
    parts = []
    for start in range(texts):
        turned = words[start:] + words[:start]
        parts.append(" ".join(turned[:tokens]))
    return Corpus(f"{texts} texts of {tokens} tokens", parts)


def cosines_by_hand(model: LoadedModel, corpus: Corpus) -> Call:
    """The average cosine of every layer from the hidden states that transformers gives out."""
    batches = full_batches(model, corpus)

    def add(batch: Batch) -> Iterator[torch.Tensor]:
        mask = batch.inputs["attention_mask"].bool().unsqueeze(-1)
        output = model.model(**batch.inputs, output_hidden_states=True)
        for hidden in output.hidden_states:
            unit = functional.normalize(hidden.float(), dim=-1)
            yield (unit * mask).sum((0, 1)).double()

    def run() -> torch.Tensor:
        with torch.inference_mode():
            sums = sum(torch.stack([*add(batch)]) for batch in batches)
            count = sum(batch.inputs["attention_mask"].sum() for batch in batches)
            return (sums.square().sum(-1) - count) / (count * (count - 1))

    return run


def peak_of(call: Call, device: str) -> tuple[float, float]:
    """The seconds of a call, and the peak memory until its end, in MiB."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started, torch.cuda.max_memory_allocated() / MIB
    Path("/proc/self/clear_refs").write_text("5")
    # On one core, which other work on the machine disturbs less than the clock.
    started = time.process_time()
    call()
    seconds = time.process_time() - started
    status = Path("/proc/self/status").read_text()
    return seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024


def compared(name: str, smaller: str | None, turns: int, device: str) -> dict[str, object]:
    """A row: the bare pass over some texts, and what else is done with them, over that."""
    kind, size, texts, tokens = ROWS[name]
    if smaller:
        size = smaller
        texts = max(1, texts // FEWER)
    model = random_model(kind, size, device)
    corpus = corpus_of(model, texts, tokens)
    calls: dict[str, Callable[[], object]] = {
        "bare": bare(model, corpus),
        "by hand": cosines_by_hand(model, corpus),
        "anisotropy": partial(measure, model, corpus, "anisotropy", progress=False),
        "all": partial(measure, model, corpus, "all", progress=False),
    }
    row: dict[str, object] = {"model": f"{kind} {size}", "texts": texts, "tokens": tokens}
    # A first call loads kernels, which no other call does again.
    calls["bare"]()
    failed = {}
    seconds = {}
    peaks = {}
    for _ in range(turns + 1):
        for what, call in calls.items():
            if what in failed:
                continue
            try:
                took, peak = peak_of(call, device)
            except (torch.OutOfMemoryError, OutOfMemory) as error:
                failed[what] = str(error).splitlines()[0]
                continue
            seconds.setdefault(what, []).append(took)
            peaks[what] = max(peak, peaks.get(what, 0))
    for what in calls:
        if what in failed:
            row[what] = {"failed": failed[what]}
            continue
        first, *again = seconds[what]
        own = {"peak MiB": round(peaks[what])}
        if what == "bare":
            own["seconds"] = round(statistics.median(again), 4)
        else:
            pairs = zip(again, seconds["bare"][1:], strict=True)
            over = [ours / theirs for ours, theirs in pairs]
            own["ratio"] = round(statistics.median(over), 3)
            own["first call"] = round(first / seconds["bare"][0], 3)
        row[what] = own
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=3, help="calls of each kind (default 3)")
    parser.add_argument(
        "--size", choices=SMALLER, help="smaller models and few texts, for a processor"
    )
    options = options_with_rows(parser, ROWS)
    if options.turns < 1:
        parser.error(f"--turns is {options.turns}: give 1 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.size:
        parser.error("there is no GPU: give --size tiny for small models on the processor")
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    for name in options.rows:
        row = compared(name, options.size, options.turns, device)
        row["machine"] = f"{machine}, torch {torch.__version__}"
        print(f"{name}: {json.dumps(row)}", flush=True)
        file = f"{name}-{options.size}.json" if options.size else f"{name}.json"
        (RESULTS / file).write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
