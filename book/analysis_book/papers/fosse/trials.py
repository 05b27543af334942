"""Classifiers of self-attention, trained several times over and measured.

Fosse et al. 2023, sec. 2.2 and 4.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from analysis_book.papers.fosse.splits import splits, stratified
from analysis_book.training import accuracy, predict, self_attention, text_classifiers
from analysis_book.training.settings import versions
from analysis_lib import files
from analysis_lib.corpora import SPLITS, Corpus, title
from analysis_lib.errors import (
    AnalysisError,
    in_order,
    require_choice,
    require_known,
    require_number,
    require_seed,
    require_text,
    require_whole,
    shown,
)
from analysis_lib.files import Output
from analysis_lib.measurement import grouped, measure, processes, shipping
from analysis_lib.measurement.versions import formulas, is_current
from analysis_lib.metrics import resolve
from analysis_lib.models import load_model
from analysis_lib.progress import bar

METRICS = ("utterance_similarity", "attention_entropy", "mean_vector")
# The corpora of the paper, in the order of its tables.
DATASETS = ("HateXplain", "YelpHat", "e-SNLI")
# About how many texts the paper trains on (sec. 2.3), where ours are fewer.
WHOLE = {"YelpHat": 3_500, "e-SNLI": 550_000}
ATTENDING = "attention in use"
# What the paper leaves open, and what changes its numbers: settings of the block, or of the
# training.
VARIANTS: dict[str, dict] = {
    "BERT's initialisation": {},
    "no biases": {"block": {"bias": False}},
    "PyTorch's linear layers": {"block": {"initializer_range": None}},
    "PyTorch's linear layers and embeddings": {
        "block": {"initializer_range": None, "embedding_std": 1.0}
    },
    "embeddings from N(0, 1)": {"block": {"embedding_std": 1.0}},
    "width 128": {"block": {"hidden_size": 128}},
    "batches of 32": {"batch": 32},
    # Queries and keys of variance 1, where the others have one of 0.00005: no row of attention is
    # uniform.
    ATTENDING: {"block": {"attention_gain": 144.0}},
}
# What a classifier is unless given: the initial values are those of BERT, with which the paper
# compares.
DEFAULTS = {"variant": "BERT's initialisation", "layers": 1, "entropy_weight": 0.0, "seed": 0}
# The states that are measured, by their folders; kept is that of the best accuracy on the
# validation split.
STAGES = {"untrained": text_classifiers.INITIAL, "kept": "", "last": text_classifiers.LAST}
# What a penalty on entropy changes, as readers know it.
WEIGHED = {
    "entropy": "entropy of attention",
    "key": "similarity of keys",
    "value": "similarity of values",
    "key_norm": "norm of a key",
}
COLUMNS = ["dataset", *DEFAULTS, "stage", "quantity", "layer", "value"]
FILES = _TABLE, _RECORD = "trials.csv", "results.json"
# Raised where the splits, the settings of a trial or the rows made of it change.
VERSION = 1


def trials(
    classifiers: Iterable[Mapping],
    limit: int = 0,
    utterances: int = 1000,
    test: str | None = None,
    **settings,
) -> pd.DataFrame:
    """Train classifiers of self-attention and measure them.

    Where PyTorch may use several threads, as many classifiers are trained at once. None is trained
    whose numbers come with the book, see :func:`record`.

    Args:
        classifiers: one mapping per classifier: ``data`` (a corpus, as of :func:`splits`),
            ``variant`` (one of ``VARIANTS``), ``layers`` (how many blocks), ``entropy_weight`` (λ)
            and ``seed`` (of the training). All but data may be left out, and are those of
            ``DEFAULTS`` then.
        limit: as of :func:`splits`.
        utterances: of the test corpus, drawn with its class balance, on which keys, values and
            attention are measured, 1000 as in the paper unless given; the accuracy is that of the
            whole test corpus.
        test: as of :func:`splits`.
        settings: of :func:`self_attention`.

    Returns:
        One row per number: dataset, variant, layers, entropy_weight, seed, stage (one of
        ``STAGES``), quantity, layer (missing for accuracy and epochs) and value. The quantities are
        ``accuracy`` (share of the test corpus), ``epochs`` (after how many the state was reached),
        ``key``, ``value``, ``query`` and ``hidden`` (similarity inside an utterance, eq. 3),
        ``entropy`` (of the attention rows, normalised) and ``key_norm`` (the mean of ‖k‖).

    Raises:
        AnalysisError: two corpora have one name, or a depth, weight or seed is out of range.
    """
    # Refused here, and not when the turn of that classifier comes, maybe after hours.
    described = [
        _checked(row) for row in in_order("the classifiers", classifiers, "a mapping for each")
    ]
    _require_sizes(limit, utterances)
    unique = dict.fromkeys(tuple(row.items()) for row in described)
    work = [dict(items) for items in unique]
    datasets = [*dict.fromkeys(row["data"] for row in work)]
    require_names(datasets)
    of_record = {"limit": limit, "utterances": utterances}
    if test:
        of_record["test"] = test
    of_record |= settings
    shipped = {data: _shipped(data, of_record) for data in datasets}
    known = [_rows_of(row, shipped[row["data"]]) for row in work]
    missing = [row for row, rows in zip(work, known, strict=True) if rows.empty]
    corpora = {}
    for row in missing:
        data = row["data"]
        if data not in corpora:
            corpora[data] = splits(data, limit, test=test)
    train = partial(_trial, utterances=utterances, settings=settings)
    with processes.mapped(max(1, min(torch.get_num_threads(), len(missing)))) as mapped:
        fresh = mapped(train, missing, [corpora[row["data"]] for row in missing])
        fresh = iter(bar(fresh, "classifiers", total=len(missing), unit="classifier"))
        tables = [next(fresh) if rows.empty else rows for rows in known]
    return pd.concat(tables, ignore_index=True).astype({"layer": "Int64"})


def _rows_of(row: Mapping, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that are of one classifier."""
    values = [row[name] for name in DEFAULTS]
    same = (table[[*DEFAULTS]] == values).all(axis=1)
    return table[same.astype(bool)]


def _checked(row: object) -> dict:
    """The description of a classifier over ``DEFAULTS``, or an AnalysisError."""
    if not isinstance(row, Mapping):
        raise AnalysisError(
            f"a classifier is {shown(row)}: give a mapping, as in "
            f"{{'data': 'reviews', 'layers': 2}}"
        )
    require_known("setting of a classifier", row, ["data", *DEFAULTS])
    whole = DEFAULTS | dict(row)
    require_text("data", whole.get("data"), "a corpus with classes")
    require_choice("variant", whole["variant"], [*VARIANTS])
    whole["layers"] = require_whole("layers", whole["layers"], 1, text_classifiers.MOST_LAYERS)
    whole["entropy_weight"] = require_number("entropy_weight", whole["entropy_weight"], least=0)
    whole["seed"] = require_seed("seed", whole["seed"])
    return whole


def _require_sizes(limit: int, utterances: int) -> None:
    require_whole("the limit of texts to train on", limit)
    require_whole("the number of texts to measure on", utterances, 1)


def _shipped(data: str, settings: dict) -> pd.DataFrame:
    """The numbers of classifiers of a corpus, with these settings, that come with the book."""
    none = pd.DataFrame(columns=COLUMNS)
    run = shipping.descriptions(_RECORD).get(data)
    if not run or run["settings"].get("trials") != settings:
        return none
    tables = _read()
    if data not in tables:
        return none
    return tables[data].assign(dataset=title(data))[COLUMNS]


def _trial(
    row: Mapping,
    corpora: Sequence[Corpus],
    utterances: int,
    settings: dict,
) -> pd.DataFrame:
    chosen = {**settings, **VARIANTS[row["variant"]], "layers": row["layers"], "seed": row["seed"]}
    chosen["block"] = {**chosen.get("block", {}), "entropy_weight": float(row["entropy_weight"])}
    train, validation, test = corpora
    folder = self_attention(train, validation, **chosen)
    longest = chosen.get("longest", text_classifiers.Classification.longest)
    epochs = pd.read_csv(folder / text_classifiers.TABLE)
    measured = stratified(test, utterances)
    reached = {
        "untrained": 0,
        "kept": epochs["epoch"][epochs["accuracy"].idxmax()],
        "last": epochs["epoch"].max(),
    }
    numbers = []
    for stage, home in STAGES.items():
        correct = accuracy(predict(folder / home, test, longest))["accuracy"]
        numbers.append((stage, "accuracy", pd.NA, correct))
        numbers.append((stage, "epochs", pd.NA, float(reached[stage])))
        model = load_model(str(folder / home))
        similar, entropies, norms = measure(model, measured, METRICS, progress=False).values()
        for values in similar.itertuples():
            numbers.append((stage, values.space, values.layer, values.similarity))
        for values in entropies.itertuples():
            numbers.append((stage, "entropy", values.layer, values.entropy_normalised))
        for values in norms.query("space == 'key'").itertuples():
            numbers.append((stage, "key_norm", values.layer, values.mean_norm))
    keys = (title(row["data"]), *(row[name] for name in DEFAULTS))
    return pd.DataFrame([(*keys, *number) for number in numbers], columns=COLUMNS)


def require_names(data: Iterable[str]) -> None:
    """Refuse corpora of one :func:`~analysis_lib.corpora.title`, and a choice of none."""
    names = [title(spec) for spec in dict.fromkeys(data)]
    if len(set(names)) < len(names) or not names:
        raise AnalysisError(
            f"the corpora are {', '.join(names) or 'none'}: give one or more, of different names"
        )


def samples(rows: pd.DataFrame, corpora: Mapping[str, Sequence[Corpus]]) -> pd.Series:
    """The samples of verdicts on trials, by corpus, in words.

    That is epochs, texts to train on, their share of the paper's, and seeds.

    Args:
        rows: of :func:`trials`, of one stage.
        corpora: by name, what classifiers of this build are trained on, stopped by and tested on.
    """
    sizes = {}
    for name, run in shipping.descriptions(_RECORD).items():
        sizes[title(name)] = run["texts"]["train"]
    for name, (train, _, _) in corpora.items():
        sizes[name] = len(train)

    def sample(of_corpus: pd.DataFrame) -> str:
        name = of_corpus.name
        epochs = of_corpus.loc[of_corpus["quantity"] == "epochs", "value"].mean()
        share = f" of the paper's {WHOLE[name]:,}" if name in WHOLE else ""
        seeds = of_corpus["seed"].nunique()
        return f"{epochs:.1f} epochs of {sizes[name]:,}{share} texts, {seeds} seeds"

    return rows.groupby("dataset", sort=False).apply(sample)


# --- Results of long runs
# -----------------------------------------------------------------------------


def record(
    data: str,
    folder: Path,
    *,
    layers: Sequence[int],
    entropy_weights: Sequence[float],
    seeds: Sequence[int],
    sensitivity_seeds: Sequence[int] = (),
    sensitivity_layers: Sequence[int] = (1,),
    variants: Sequence[str] | None = None,
    limit: int = 0,
    utterances: int = 1000,
    test: str | None = None,
    **settings,
) -> None:
    """Run trials at full length and keep their numbers, without texts and weights.

    Writes ``trials.csv``, and last ``results.json``, which says how the numbers were made.

    Args:
        data: as of :func:`splits`.
        folder: where to write.
        layers: how many blocks, for an entropy weight of 0.
        entropy_weights: for one block, beside 0, with which they are compared.
        seeds: of the trainings.
        sensitivity_seeds: those with which to train the variants, if any; ``ATTENDING`` with each
            entropy weight, too.
        sensitivity_layers: how many blocks, for these.
        variants: some of ``VARIANTS``, by name; by default all.
        limit, utterances, test, settings: as of :func:`trials`.
    """
    if variants is None:
        variants = [*VARIANTS]
    else:
        variants = in_order("variants", variants, "names of variants in a list")
    named = {
        "layers": layers,
        "entropy_weights": entropy_weights,
        "seeds": seeds,
        "sensitivity_seeds": sensitivity_seeds,
        "sensitivity_layers": sensitivity_layers,
    }
    for name, numbers in named.items():
        in_order(name, numbers, "numbers in a list")
    _require_sizes(limit, utterances)
    cells = [(depth, 0.0) for depth in layers]
    if entropy_weights:
        cells += [(1, weight) for weight in (0.0, *entropy_weights)]
    work = []
    for seed, (depth, weight) in itertools.product(seeds, cells):
        work.append({"layers": depth, "entropy_weight": weight, "seed": seed})
    for seed, name, depth in itertools.product(sensitivity_seeds, variants, sensitivity_layers):
        work.append({"variant": name, "layers": depth, "seed": seed})
    if ATTENDING in variants:
        for seed, weight in itertools.product(sensitivity_seeds, entropy_weights):
            work.append({"variant": ATTENDING, "entropy_weight": weight, "seed": seed})
    work = [{"data": data, **row} for row in work]
    for depth in sensitivity_layers:
        require_whole("a depth of sensitivity_layers", depth, 1, text_classifiers.MOST_LAYERS)
    if [*sensitivity_layers] != [1] and not sensitivity_seeds:
        raise AnalysisError(
            "sensitivity_layers are depths to vary with some seeds: give sensitivity_seeds, too"
        )
    for row in work:
        _checked(row)
    given = {"limit": limit, "utterances": utterances}
    if test:
        given["test"] = test
    settings |= given
    made = output(folder, data)
    made.check(FILES)
    corpora = splits(data, limit, test=test)
    table = trials(work, **settings)
    settings = {
        "layers": layers,
        "entropy_weights": entropy_weights,
        "seeds": seeds,
        "trials": settings,
        "sensitivity_seeds": [*sensitivity_seeds],
        "sensitivity_layers": [*sensitivity_layers],
    }
    if sensitivity_seeds and variants != [*VARIANTS]:
        settings["variants"] = variants
    by_split = dict(zip(SPLITS, corpora, strict=True))
    description = {
        "dataset": title(data),
        "texts": {split: len(corpus) for split, corpus in by_split.items()},
        "classes": list(corpora[0].classes),
        "settings": settings,
        "sha256": {split: corpus.sha256 for split, corpus in by_split.items()},
        "versions": versions(),
        "formulas": _formulas(),
    }
    with made.scratch() as new:
        table.drop(columns="dataset").to_csv(new / _TABLE, index=False, float_format="%.6g")
        (new / _RECORD).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def output(folder: Path, data: str) -> Output:
    """The folder that the trials on a corpus are written into."""
    return Output(Path(folder), "classifiers", (data,), _RECORD)


def recorded() -> pd.DataFrame:
    """The results of :func:`record` on the corpora of the paper, as they come with the book.

    Returns:
        The columns of :func:`trials`, in the order of the paper.

    Raises:
        AnalysisError: none come with it.
    """
    tables = _read()
    runs = shipping.descriptions(_RECORD)
    frames = {}
    for name in DATASETS:
        recorded_runs = [run for run, about in runs.items() if title(about["dataset"]) == name]
        if recorded_runs:
            frames[name] = pd.concat([tables[run] for run in recorded_runs])
    if not frames:
        raise AnalysisError(
            "no trials of the paper come with the book: data/README.md says how they are made"
        )
    return grouped(frames, "dataset")


def similarities(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`trials`, or of the paper's Table 3, on how alike keys and values are.

    Those after the last epoch are left out.
    """
    rows = rows[rows["quantity"].isin(["key", "value"]) & (rows["stage"] != "last")]
    return rows.astype({"layer": int}).replace({"key": "keys", "value": "values"})


def weighed(rows: pd.DataFrame, unit: float) -> pd.DataFrame:
    """The rows of :func:`trials`, or of the paper's Table 4, on what a penalty on entropy changes.

    Args:
        rows: of one epoch.
        unit: the weight of the mean entropy that is a λ of 1.

    Returns:
        The rows by quantity, each by its weight, with readable names and a column ``λ``.
    """
    rows = rows.sort_values("entropy_weight", kind="stable", ignore_index=True)
    rows["λ"] = (rows["entropy_weight"] / unit).map("{:g}".format)
    parts = [rows[rows["quantity"] == quantity] for quantity in WEIGHED]
    return pd.concat(parts).replace({"quantity": WEIGHED})


def _read() -> dict[str, pd.DataFrame]:
    paths = shipping.home().glob(f"*/{_TABLE}")
    table = partial(pd.read_csv, dtype={"layer": "Int64", "entropy_weight": float})
    return {path.parent.name: files.read(path, table) for path in paths}


def code_warning() -> str:
    """For a page: which recorded results may not be what the code gives today; or an empty text."""
    today = _formulas()
    runs = shipping.descriptions(_RECORD).values()
    outdated = [title(run["dataset"]) for run in runs if not is_current(run, today)]
    return shipping.code_warning(outdated)


def _formulas() -> dict[str, object]:
    """The versions that recorded results depend on, which have no intervals."""
    of_tables = formulas(resolve(METRICS))
    del of_tables["intervals"]
    return {"trials": VERSION, "training": text_classifiers.VERSION, **of_tables}
