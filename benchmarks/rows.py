"""What is compared with what. Each benchmark makes two calls that take turns; the first is ours."""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from analysis_lib import Corpus, LoadedModel, load_corpus, load_model, measure
from analysis_lib.capture import Batch, Settings
from analysis_lib.capture.batching import make_batches
from analysis_lib.measurement import stored
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.models.folders import located
from analysis_lib.models.tokenization import encoded

Call = Callable[[], object]
WITHOUT_ATTENTION = (
    "anisotropy,mean_vector,utterance_similarity,qk_alignment,head_means,dimension_means"
)


def options_with_rows(
    parser: argparse.ArgumentParser, known: Collection[str]
) -> argparse.Namespace:
    """The options of a command, with ``rows``, which are some of those known; all by default."""
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"some of {', '.join(known)} (default: all)"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in known]:
        parser.error(f"there is no row {unknown[0]}: give some of {', '.join(known)}")
    options.rows = options.rows or [*known]
    return options


def sentences(count: int) -> Corpus:
    """Sentences of the bundled corpora of some 16 tokens, shuffled, so that any number of them is a
    fair sample.
    """
    texts = [text for name in ("wikipedia", "news", "reviews") for text in load_corpus(name).texts]
    texts = [text for text in texts if 6 <= len(text.split()) <= 18]
    order = np.random.default_rng(0).permutation(len(texts))
    # More than there are begin again: what a measurement costs does not depend on what a text says.
    return Corpus("mixed", [texts[order[i % len(order)]] for i in range(count)])


def long_texts(count: int) -> Corpus:
    """Articles of more than 300 words."""
    texts = [text for text in load_corpus("news:articles").texts if len(text.split()) > 300]
    return Corpus("articles", texts[:count])


def bert_base() -> LoadedModel:
    """BERT of the base size, 12 blocks of width 768, with random weights: its cost does not depend
    on them.
    """
    minilm = load_model("minilm")
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).save_pretrained(
            folder
        )
        minilm.processor.save_pretrained(folder)
        return load_model(folder)


def full_batches(model: LoadedModel, corpus: Corpus) -> list[Batch]:
    """The texts by length, in batches as full as they can be, whatever their padding."""
    whole = encoded(model.name, model.tokenizer, corpus.texts, model.max_length)
    texts = [text.beginning(model.max_length) for text in whole]
    size = Settings.tokens_per_batch
    return [*make_batches(model, texts, [0] * len(texts), True, size, most_padding=size)]


def bare(model: LoadedModel, corpus: Corpus) -> Call:
    """A forward pass with the fused attention of transformers, in full batches of texts of similar
    length.
    """
    batches = full_batches(model, corpus)

    def run() -> None:
        with torch.inference_mode():
            for batch in batches:
                model.model(**batch.inputs)

    return run


def measured(model: LoadedModel, corpus: Corpus, metrics: str = "all", **settings) -> Call:
    """``measure`` as a user calls it, tokenising and tables included."""

    def run() -> None:
        tables = measure(model, corpus, metrics, progress=False, **settings)
        for name in tables:
            assert len(tables[name])

    return run


def by_hand(model: LoadedModel, corpus: Corpus) -> Call:
    """All tables of a BERT, without intervals, as a user would write them: keep all, then numpy."""
    blocks, keep, kept = (
        [block.attention.self for block in model.model.encoder.layer],
        {},
        defaultdict(list),
    )
    heads, weights = (
        blocks[0].num_attention_heads,
        [block.key.weight.detach().double().numpy() for block in blocks],
    )

    def forward() -> None:
        model.model.set_attn_implementation("eager")
        handles = [
            getattr(block, space).register_forward_hook(
                lambda *call, at=(space, layer): keep.update({at: call[-1]})
            )
            for layer, block in enumerate(blocks, 1)
            for space in ("query", "key", "value")
        ]
        kept.clear()
        with torch.inference_mode():
            for start in range(0, len(corpus), 32):
                texts = corpus.texts[start : start + 32]
                inputs = model.tokenizer(
                    texts,
                    padding=True,
                    truncation=True,
                    return_tensors="pt",
                    return_special_tokens_mask=True,
                )
                types = model.token_types(
                    inputs["input_ids"], inputs.pop("special_tokens_mask").bool()
                )
                output = model.model(**inputs, output_hidden_states=True, output_attentions=True)
                keep.update(
                    {("hidden", layer): values for layer, values in enumerate(output.hidden_states)}
                )
                for i, mask in enumerate(inputs["attention_mask"].bool()):
                    kept["types"].append(types[i, mask].numpy())
                    for at, values in keep.items():
                        split = values.unflatten(-1, (1 if at[0] == "hidden" else heads, -1))
                        kept[at].append(split[i, mask].double().numpy())
                    for layer, values in enumerate(output.attentions, 1):
                        kept["weights", layer].append(
                            values[i][:, mask][:, :, mask].double().numpy()
                        )
        for handle in handles:
            handle.remove()
        model.model.set_attn_implementation("sdpa")

    def run() -> dict[tuple, object]:
        forward()
        found, types, every = {}, kept["types"], np.concatenate(kept["types"])
        kinds, mass, scores = np.unique(every), defaultdict(float), defaultdict(float)
        for at in [at for at in kept if at[0] in ("hidden", "query", "key", "value")]:
            vectors = np.concatenate(kept[at])
            unit = [text / np.linalg.norm(text, axis=-1, keepdims=True) for text in kept[at]]
            found["anisotropy", *at] = mean_pair_cosine(
                np.concatenate(unit).sum(0), np.array(len(vectors))
            )
            found["utterance_similarity", *at] = np.mean(
                [mean_pair_cosine(text.sum(0), np.array(len(text))) for text in unit], 0
            )
            found["head_means", *at], norms = vectors.mean(0), np.linalg.norm(vectors, axis=-1)
            found["mean_vector", *at] = np.linalg.norm(vectors.mean(0), axis=-1), norms.mean(0)
            for kind in kinds if at[0] == "hidden" else ():
                found["dimension_means", *at, kind] = vectors[every == kind].mean(0)
        for layer, weight in enumerate(weights, 1):
            query, key = found["head_means", "query", layer], found["head_means", "key", layer]
            found["qk_alignment", layer] = (query * key).sum(-1)
            rows = kept["weights", layer]
            entropies = [
                -(text * np.log(np.where(text > 0, text, 1))).sum(-1).sum(-1) for text in rows
            ]
            found["attention_entropy", layer] = sum(entropies)
            weight = weight.reshape(heads, -1, weight.shape[-1])
            texts = zip(rows, kept["query", layer], kept["hidden", layer - 1], types, strict=True)
            for text, queries, hidden, ours in texts:
                gradient = np.einsum("he,hed->hd", queries.sum(0), weight)
                for kind in kinds:
                    mass[layer, kind] += text[:, :, ours == kind].sum((1, 2))
                    scores[layer, kind] += gradient * hidden[ours == kind, 0].sum(0)
        found["attention_by_token_type"], found["score_contributions"] = mass, scores
        return found

    return run


def collected(model: LoadedModel, corpus: Corpus, forward: Callable[[dict], dict]) -> Call:
    """The average cosine of every layer and space from vectors that another library collects.

    The batches are ours, by length, and so is the closed form: what differs is the collecting.

    Args:
        forward: the vectors, of shape utterance x token x ..., of a batch's inputs, by space and
            layer.
    """
    batches = full_batches(model, corpus)

    def run() -> dict[tuple, float]:
        found = defaultdict(list)
        for batch in batches:
            mask = batch.inputs["attention_mask"].bool()
            for place, vectors in forward(batch.inputs).items():
                found[place].append(
                    vectors[mask].flatten(1, -2)
                    if vectors.dim() > 3
                    else vectors[mask].unsqueeze(1)
                )
        return {place: mean_cosine(torch.cat(vectors).double()) for place, vectors in found.items()}

    return run


def mean_cosine(vectors: Tensor) -> Tensor:
    """Of vectors of shape token x head x width."""
    total, count = nn.functional.normalize(vectors, dim=-1).sum(0), len(vectors)
    return (total.square().sum(-1) - count) / (count * (count - 1))


def with_nnsight(model: LoadedModel) -> Callable[[dict], dict]:
    """What nnsight saves of a Llama; its queries and keys are those before they are turned."""
    from nnsight import NNsight

    traced, width = NNsight(model.model), model.model.config.head_dim

    def forward(inputs: dict) -> dict:
        found = {}
        with torch.inference_mode(), traced.trace(**inputs):
            found["hidden", 0] = traced.embed_tokens.output.save()
            for layer, block in enumerate(traced.layers, 1):
                found["query", layer] = block.self_attn.q_proj.output.save()
                found["key", layer] = block.self_attn.k_proj.output.save()
                found["value", layer] = block.self_attn.v_proj.output.save()
                found["hidden", layer] = block.output.save()
        return {
            at: vectors if at[0] == "hidden" else vectors.unflatten(-1, (-1, width))
            for at, vectors in found.items()
        }

    return forward


def with_transformer_lens(model: LoadedModel) -> Callable[[dict], dict]:
    """What TransformerLens caches; it has no call without logits."""
    from transformer_lens.model_bridge import TransformerBridge

    folder, _ = located(model.name, None)
    bridge = TransformerBridge.boot_transformers(
        str(folder), device="cpu", tokenizer=model.tokenizer
    )
    ends = {
        "hook_resid_post": "hidden",
        "hook_rot_q": "query",
        "hook_rot_k": "key",
        "attn.hook_v": "value",
    }

    def forward(inputs: dict) -> dict:
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(
                inputs["input_ids"], names_filter=lambda name: name.endswith((*ends,))
            )
        at = {
            name: next(space for end, space in ends.items() if name.endswith(end)) for name in cache
        }
        return {(space, int(name.split(".")[1]) + 1): cache[name] for name, space in at.items()}

    return forward


OTHERS = {"nnsight": with_nnsight, "transformer-lens": with_transformer_lens}


def cosines(library: str, count: int) -> Call:
    """The average cosines of SmolLM2 on so many sentences, with another library, or ours where
    there is none.
    """
    model, corpus = load_model("smollm2-135m"), sentences(count)
    if not library:
        return measured(model, corpus, "anisotropy")
    return collected(model, corpus, OTHERS[library](model))


def added_memory(library: str, count: int) -> float:
    """By how much, in MiB, the memory of a process grows while it computes :func:`cosines`, at
    most.
    """
    code = f"""
import torch
from pathlib import Path
from benchmarks import rows
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
torch.set_num_threads(1)
rows.cosines({library!r}, 8)()
call = rows.cosines({library!r}, {count})
Path("/proc/self/clear_refs").write_text("5")
before = peak()
call()
print(peak() - before)
"""
    return printed(code)


def printed(code: str) -> float:
    """The last number that a process prints which runs some code."""
    command = [sys.executable, "-c", code]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def errors(model: LoadedModel, exact: LoadedModel, corpus: Corpus) -> dict[str, float]:
    """By table and column, the largest difference between two models, over the column's root mean
    square.
    """
    found = {}
    ours, theirs = (measure(one, corpus, progress=False) for one in (model, exact))
    for name in set(ours) - {"outlier_dimensions"}:  # Whose rows differ.
        for column in ours[name].select_dtypes("float64"):
            one, other = ours[name][column].to_numpy(), theirs[name][column].to_numpy()
            found[f"{name}.{column}"] = float(
                np.nanmax(abs(one - other)) / np.sqrt(np.nanmean(other**2))
            )
    return dict(sorted(found.items()))


def tables_again(model: LoadedModel, corpus: Corpus) -> Call:
    """The tables from the sums of a measurement."""
    metrics = [*measure(model, corpus, progress=False)._parts.values()]

    def run() -> None:
        for metric in metrics:
            assert len(metric.table())

    return run


def peak_memory(count: int) -> float:
    """The peak resident set, in MiB, of a process that measures so many sentences, which a program
    gives one by one.
    """
    code = "from benchmarks import rows; texts = rows.sentences(2000).texts; "
    code += f"corpus = rows.load_corpus(texts[i % 2000] for i in range({count})); "
    code += "rows.measured(rows.load_model('minilm'), corpus)(); "
    code += "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    return printed(code)


def left_on_disk(count: int, seconds: float = stored.SECONDS_AT_RISK) -> float:
    """The most, in MB, that lies in the folder of a measurement of so many sentences while it runs.

    Args:
        seconds: after which what is merged is written.
    """
    most, over, before = 0, threading.Event(), stored.SECONDS_AT_RISK
    with tempfile.TemporaryDirectory() as folder:

        def watch() -> None:
            nonlocal most
            while not over.is_set():
                with suppress(FileNotFoundError):
                    most = max(most, sum(path.stat().st_size for path in Path(folder).rglob("*")))
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            stored.SECONDS_AT_RISK = seconds
            measured(load_model("minilm"), sentences(count), checkpoints=folder)()
        finally:
            stored.SECONDS_AT_RISK = before
            over.set()
            watcher.join()
    return most / 1e6
