"""Classifiers trained several times over, and those of self-attention measured (Fosse et al. 2023, sec. 2.2, 4)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analysis_lib.corpora import SPLITS, Corpus
from analysis_lib.corpora.packages import data_directory
from analysis_lib.corpora.splits import stratified
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import grouped, measure, processes
from analysis_lib.models import load_model
from analysis_lib.papers.fosse.splits import UTTERANCES, splits
from analysis_lib.training import accuracy, finetune, predict, self_attention
from analysis_lib.training.loop import versions, write
from analysis_lib.training.text_classifiers import Classification

COLUMNS = ["quantity", "layer", "value"]
METRICS = ("utterance_similarity", "attention_entropy", "mean_vector")
# The corpora of the paper, in the order of its tables.
DATASETS = ("hatexplain", "yelphat", "e-snli")
# What the paper leaves open, and what changes its numbers: settings of the block, and of the training.
Variant = tuple[dict, dict]
VARIANTS: dict[str, Variant] = {
    "as here": ({}, {}),
    "batches of 32": ({}, {"batch": 32}),
    "BERT's linear layers": ({"initializer_range": 0.02}, {}),
    "no biases": ({"bias": False}, {}),
    "embeddings from N(0, 1)": ({"embedding_std": 1.0}, {}),
    "width 128": ({"hidden_size": 128}, {}),
    "width 128, N(0, 1), no biases": ({"hidden_size": 128, "embedding_std": 1.0, "bias": False}, {}),
}


def trials(
    train: Corpus,
    validation: Corpus,
    test: Corpus,
    *,
    layers: Sequence[int] = (1,),
    entropy_weights: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    utterances: int = UTTERANCES,
    block: dict | None = None,
    progress: bool = True,
    **settings,
) -> pd.DataFrame:
    """Train classifiers of self-attention and measure them: without a weight on entropy at each depth, and with each
    weight at a depth of one block.

    Where PyTorch may use several threads, as many classifiers are trained at once.

    Args:
        train: with classes; validation and test with the same.
        layers: how many blocks, for an entropy weight of 0.
        entropy_weights: λ, for one block.
        seeds: of the training.
        utterances: of the test corpus, drawn with its class balance, on which keys, values and attention are
            measured; the accuracy is that of the whole test corpus.
        block: as of :func:`self_attention`.
        progress: whether to show a bar, on a terminal.
        settings: of :func:`self_attention`.

    Returns:
        One row per number: layers, entropy_weight, seed, quantity, layer (missing for accuracy and epochs) and value.
        The quantities are ``accuracy`` (share of the test corpus), ``epochs`` (after which the state was best),
        ``key``, ``value``, ``query`` and ``hidden`` (similarity inside an utterance, eq. 3), ``entropy`` (of the
        attention rows, normalised) and ``key_norm`` (the mean of ‖k‖).

    Raises:
        AnalysisError: as :func:`self_attention`; a depth, weight or seed is out of range.
    """
    # One block without a weight is what those with a weight are compared with.
    weights = [0.0, *map(float, entropy_weights)] if entropy_weights else []
    cells = dict.fromkeys([*((depth, 0.0) for depth in layers), *((1, weight) for weight in weights)])
    work = [_work(depth, weight, seed, block or {}, settings) for seed in seeds for depth, weight in cells]
    return _all_trials(train, validation, test, work, utterances, progress)


def sensitivity(
    train: Corpus,
    validation: Corpus,
    test: Corpus,
    *,
    variants: Mapping[str, Variant] = VARIANTS,
    layers: Sequence[int] = (1,),
    seeds: Sequence[int] = (0,),
    utterances: int = UTTERANCES,
    progress: bool = True,
    **settings,
) -> pd.DataFrame:
    """How the numbers of :func:`trials` depend on what the paper leaves open.

    Args:
        variants: by name, how a block and its training differ.

    Returns:
        The columns variant, stage, and those of :func:`trials`. The stage is ``trained``, or ``untrained`` for the
        similarities of the same block with other random weights and no training.
    """
    work = [
        _work(depth, 0.0, seed, block, {**settings, **rules}, variant=name)
        for seed in seeds
        for name, (block, rules) in variants.items()
        for depth in layers
    ]
    return _all_trials(train, validation, test, work, utterances, progress, untrained=True)


def _work(layers: int, weight: float, seed: int, block: dict, settings: dict, **columns: str) -> tuple[dict, dict]:
    """The columns that say which classifier it is, and its settings."""
    chosen = {**settings, "layers": layers, "block": {**block, "entropy_weight": weight}, "seed": seed}
    return {**columns, "layers": layers, "entropy_weight": weight, "seed": seed}, chosen


def _all_trials(
    train: Corpus,
    validation: Corpus,
    test: Corpus,
    work: Sequence[tuple[dict, dict]],
    utterances: int,
    progress: bool,
    untrained: bool = False,
) -> pd.DataFrame:
    """The trial of each item of :func:`_work`, in their order."""
    # Refused here, and not when the turn of that classifier comes, maybe after hours.
    if not work or any(min(row["layers"] - 1, row["entropy_weight"], row["seed"]) < 0 for row, _ in work):
        raise AnalysisError("give depths of one layer or more, weights that are not negative, and seeds from 0")
    frames = []
    one = partial(_trial, train, validation, stratified(test, utterances), test, untrained)
    with _mapped(min(torch.get_num_threads(), len(work))) as mapped:
        found = mapped(one, [settings for _, settings in work])
        bar = tqdm(found, total=len(work), unit="classifier", desc=train.name, disable=None if progress else True)
        for (row, _), numbers in zip(work, bar, strict=True):
            frames.append(pd.concat([pd.DataFrame(row, numbers.index), numbers], axis=1))
    return pd.concat(frames, ignore_index=True)


@contextmanager
def _mapped(workers: int) -> Iterator[Callable]:
    """``map``, in other processes if there are to be several."""
    if workers < 2:
        yield map
        return
    with processes.pool(workers, threads=1) as pool:
        yield pool.map


def _trial(
    train: Corpus, validation: Corpus, measured: Corpus, test: Corpus, untrained: bool, settings: dict
) -> pd.DataFrame:
    """Columns quantity, layer and value of one classifier; the stage, too, where its untrained twin is measured."""
    folder = self_attention(train, validation, **settings)
    scores = accuracy(predict(folder, test, settings.get("longest", Classification.longest)))
    rows = [("accuracy", pd.NA, scores["accuracy"]), ("epochs", pd.NA, _best_epoch(folder))]
    found = _table([*rows, *_measured(str(folder), measured)])
    if not untrained:
        return found
    twin = _table(_measured(f"{folder}:untrained", measured))
    return pd.concat([found.assign(stage="trained"), twin.assign(stage="untrained")], ignore_index=True)


def _table(rows: list[tuple]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64"})


def _measured(model: str, corpus: Corpus) -> list[tuple]:
    tables = measure(load_model(model), corpus, METRICS, progress=False)
    norms = tables["mean_vector"].query("space == 'key'")
    return [
        *((row.space, row.layer, row.similarity) for row in tables["utterance_similarity"].itertuples()),
        *(("entropy", row.layer, row.entropy_normalised) for row in tables["attention_entropy"].itertuples()),
        *(("key_norm", row.layer, row.mean_norm) for row in norms.itertuples()),
    ]


def _best_epoch(folder: Path) -> float:
    epochs = pd.read_csv(folder / "epochs.csv")
    return float(epochs["epoch"][epochs["accuracy"].idxmax()])


# --- Several corpora ----------------------------------------------------------------------------------


def dataset_name(data: str) -> str:
    """How the published tables call the corpus of a specification.

    >>> dataset_name("corpora/esnli"), dataset_name("hatexplain"), dataset_name("corpora/mine.csv:text:label")
    ('e-snli', 'hatexplain', 'mine.csv')
    """
    name = Path(data).name.partition(":")[0]
    return {"esnli": "e-snli"}.get(name, name)


def _refuse_names(data: Sequence[str]) -> None:
    """Two corpora of one name could not be told apart in the table."""
    names = [dataset_name(spec) for spec in data]
    if len(set(names)) < len(names) or not names:
        raise AnalysisError(f"the corpora are {', '.join(names) or 'none'}: give one or more, each once")


def trials_on(
    data: Sequence[str], limit: int = 0, *, layers: Sequence[int] = (1,), shallow: Sequence[str] = (), **settings
) -> pd.DataFrame:
    """:func:`trials` of several corpora, with the column dataset in front.

    Args:
        data: the corpora, as of :func:`splits`.
        limit: as of :func:`splits`.
        layers: how many blocks.
        shallow: more corpora, on which models of more than two layers are left out, as on e-SNLI in the paper.
        settings: of :func:`trials`.
    """
    most = [*((spec, max(layers, default=0)) for spec in data), *((spec, 2) for spec in shallow)]
    _refuse_names([spec for spec, _ in most])
    frames = {
        dataset_name(spec): trials(*splits(spec, limit), layers=[n for n in layers if n <= deepest], **settings)
        for spec, deepest in most
    }
    return grouped(frames, "dataset")


def finetuned(
    model: str, data: Sequence[str], limit: int = 0, test_limit: int = 0, *, seeds: Sequence[int] = (0,), **settings
) -> pd.DataFrame:
    """An encoder fine-tuned several times over, on several corpora: the first row of Table 1.

    Args:
        model: as ``load_model`` takes it.
        data: the corpora, as of :func:`splits`.
        limit, test_limit: as of :func:`splits`.
        seeds: of the draws of the texts and of the training.
        settings: of :func:`finetune`.

    Returns:
        One row per number: dataset, seed, quantity and value. The quantities are ``accuracy`` (share of the texts of
        the test split that were drawn) and ``epochs`` (after which the state was best).
    """
    _refuse_names(data)
    if not seeds:
        raise AnalysisError("there is no seed: give one or more")
    encoder, frames = load_model(model), {}
    for spec in data:
        rows = []
        for seed in seeds:
            train, validation, test = splits(spec, limit, test_limit, seed)
            folder = finetune(encoder, train, validation, seed=seed, **settings)
            found = accuracy(predict(folder, test))["accuracy"]
            rows += [(seed, "accuracy", found), (seed, "epochs", _best_epoch(folder))]
        frames[dataset_name(spec)] = pd.DataFrame(rows, columns=["seed", "quantity", "value"])
    return grouped(frames, "dataset")


# --- Results of long runs -----------------------------------------------------------------------------


def record(data: str, folder: Path, sensitivity_seeds: Sequence[int] = (), **settings) -> None:
    """Run trials at full length and keep their numbers, without texts and weights.

    Writes ``trials.csv``, the ``sensitivity.csv`` of :func:`sensitivity`, and last ``results.json``, which says how
    they were made.

    Args:
        data: as of :func:`splits`.
        folder: where to write.
        sensitivity_seeds: those with which to run :func:`sensitivity`, too, if any.
        settings: of :func:`trials`.
    """
    if min(sensitivity_seeds, default=0) < 0:
        raise AnalysisError(f"the seeds of the sensitivity are {list(sensitivity_seeds)}: give them from 0")
    corpora = splits(data)
    tables = {"trials.csv": trials(*corpora, **settings)}
    if sensitivity_seeds:
        tables["sensitivity.csv"] = sensitivity(*corpora, seeds=sensitivity_seeds)
    description = {
        "dataset": dataset_name(data),
        "texts": {split: len(corpus) for split, corpus in zip(SPLITS, corpora, strict=True)},
        "classes": list(corpora[0].classes),
        "settings": {**settings, "sensitivity_seeds": list(sensitivity_seeds)},
        "sha256": {split: corpus.sha256 for split, corpus in zip(SPLITS, corpora, strict=True)},
        "versions": versions(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write(folder / name, table.to_csv(index=False, float_format="%.6g"))
    write(folder / "results.json", json.dumps(description, indent=1) + "\n")


def recorded(table: str = "trials") -> pd.DataFrame:
    """The results of :func:`record` on the corpora of the paper, as they come with the book.

    Args:
        table: trials or sensitivity.

    Returns:
        The columns of :func:`trials` or :func:`sensitivity`, with dataset in front, in the order of the paper.

    Raises:
        AnalysisError: there are none.
    """
    types = {"layer": "Int64", "entropy_weight": float}
    frames = {name: pd.read_csv(path, dtype=types) for name, path in _recorded(f"{table}.csv").items()}
    return grouped(frames, "dataset")


def recorded_texts() -> pd.DataFrame:
    """How many texts the classifiers of :func:`recorded` were trained, stopped and tested on, and how many seeds."""
    rows = []
    for name, path in _recorded("results.json").items():
        description = json.loads(path.read_text(encoding="utf-8"))
        seeds = len(description["settings"]["seeds"])
        rows.append({"dataset": name, "classes": len(description["classes"]), **description["texts"], "seeds": seeds})
    return pd.DataFrame(rows)


def _recorded(file: str) -> dict[str, Path]:
    """Where a file of the results lies, by dataset."""
    folder = data_directory() / "measurements"
    if not (found := {name: folder / name / file for name in DATASETS if (folder / name / file).is_file()}):
        raise AnalysisError(f"{folder} has no {file}: data/README.md says how it is made")
    return found
