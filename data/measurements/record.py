"""Make anew what ships in this folder: ``make record NAME=untrained``, from the root of the
repository.

Each function below writes the folder, or the file of ``causes/``, that has its name;
``reference-models`` writes one above. Run one after its formula has changed, in the commit that
raises the version. Times are those of one core.

The corpora of Fosse et al. 2023 are read from folders beside the repository, see
``data/README.md``.
"""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from analysis_book.figures.exploring import rows_of
from analysis_book.papers import causes, cones, long_texts, sentences, spikes
from analysis_book.papers.fosse import directions, trials
from analysis_book.papers.fosse.splits import splits
from analysis_book.papers.geometry import headlines
from analysis_book.training import finetune
from analysis_lib import Corpus, compare, files, load_corpus, load_model, measure
from analysis_lib.cli import main as command_line
from analysis_lib.errors import AnalysisError
from analysis_lib.files import Output
from analysis_lib.measurement import grouped, shipped
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.measurement.tables import save_tables

HOME = Path(__file__).parent
# As it is written down, from the root of the repository.
CORPORA_BESIDE = Path("..", "shared", "data")
SEEDS = range(5)
FINETUNED_PAGES = ("similarity", "direction", "accuracy", "words")
OUTLIER_PAGES = ("dimensions", "attention", "contributions", "types", "checks")
# What is not said of the claims elsewhere.
OF_VERDICTS = ["id", "page", "value", "ci_low", "ci_high", "draws", "p", "verdict"]
MPNET_TABLES = (
    "anisotropy,mean_vector,utterance_similarity,cosine_by_dimension,qk_alignment,attention_entropy,"
    "attention_by_token_type,dimension_means,outlier_dimensions,score_contributions"
)
SMOLLM2_TABLES = (
    "anisotropy,mean_vector,isotropy,norms_by_type,text_entropy,attention_received,"
    "attention_by_token_type,value_weighted_attention,output_rank"
)


def run(*arguments: object) -> None:
    """Run a command of ``analysis-lib``."""
    if command_line([str(argument) for argument in arguments]):
        raise AnalysisError(f"analysis-lib {arguments[0]} failed: nothing more was recorded")


def emptied(name: str) -> Path:
    """A folder of this name without what it held."""
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _without_intervals(measurement: str, *tables: str) -> None:
    """Remove the intervals from shipped tables whose intervals no page shows."""
    for table in tables:
        path = HOME / measurement / f"{table}.parquet"
        rows = files.read(path, how=pd.read_parquet).drop(columns=["ci_low", "ci_high"])
        rows.to_parquet(path, index=False, compression="zstd")


def _in_single_precision(measurement: str, table: str, column: str) -> None:
    """Round a column of a shipped table to single precision, that of the vectors behind it.

    Half of the bits of each number are then zero, and the file is half as large.
    """
    path = HOME / measurement / f"{table}.parquet"
    rows = files.read(path, how=pd.read_parquet)
    rows[column] = rows[column].astype("float32").astype("float64")
    others = [name for name in rows if name != column]
    packed = {"use_dictionary": others, "column_encoding": {column: "BYTE_STREAM_SPLIT"}}
    rows.to_parquet(path, index=False, compression="zstd", **packed)


def untrained() -> None:
    """Models of the anisotropy pages with random weights, five draws of each (half an hour).

    They read 1,500 texts; of images and sounds there are fewer.
    """
    emptied("untrained")
    text, images = "anisotropy,mean_vector,isotropy", "anisotropy,mean_vector"
    for model in ("minilm", "smollm2-135m", "text-gpt2", "bytes-gpt2"):
        _twins(model, "wikipedia", text, model)
    _twins("whisper-base", "speech-clips", text, "whisper-base")
    _twins("vit-s14", "photographs", text, "vit-s14")
    _twins("efficientnet-lite0", "photographs", images, "efficientnet-lite0-flatten")
    positions = "anisotropy,dimension_means,isotropy"
    name = "efficientnet-lite0-positions"
    _twins("efficientnet-lite0", "photographs", positions, name, "--maps", "positions")
    _twins("mpnet-base", "wikipedia:short", "anisotropy", "mpnet-base")


def _twins(model: str, data: str, metrics: str, name: str, *options: object) -> None:
    for seed in SEEDS:
        twin = f"{model}:untrained@seed={seed}"
        out = HOME / "untrained" / f"{name}-{seed}"
        draw = ("--limit", 1500, "--seed", 0)
        run(
            "measure",
            "--model",
            twin,
            "--data",
            data,
            *draw,
            "--metrics",
            metrics,
            "--out",
            out,
            *options,
        )


def modernbert_12() -> None:
    """An encoder of 12 layers along its training, five seeds (half an hour per seed)."""
    _dynamics("modernbert-12")


def bert_4() -> None:
    """A BERT of 4 layers along its training, five seeds, without vectors (five minutes per
    seed).
    """
    _dynamics("bert-4")
    (HOME / "bert-4" / "vectors.parquet").unlink()


def _dynamics(name: str) -> None:
    run("dynamics", name, "--seeds", ",".join(map(str, SEEDS)), "--out", emptied(name))
    _without_intervals(name, "anisotropy", "attention_entropy", "qk_alignment")
    description = HOME / name / "dynamics.json"
    about = json.loads(description.read_text(encoding="utf-8"))
    del about["formulas"]["intervals"]
    description.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _in_single_precision(name, "head_means", "mean")


def hatexplain() -> None:
    """Classifiers of self-attention on HateXplain (six hours)."""
    _classifiers("hatexplain", "hatexplain", "--entropy-weights", "0.0001,0.001,0.01,0.1,1,10,100")


def hatexplain_variants() -> None:
    """Classifiers of one layer on HateXplain that begin with other weights than BERT's (two
    hours).
    """
    variants = [
        "PyTorch's linear layers",
        "PyTorch's linear layers and embeddings",
        "embeddings from N(0, 1)",
    ]
    choice = {
        "layers": [1],
        "entropy_weights": [],
        "seeds": [*SEEDS],
        "sensitivity_seeds": [*SEEDS],
    }
    data = str(CORPORA_BESIDE / "hatexplain")
    trials.record(
        data, emptied("hatexplain-variants"), **choice, variants=variants, epochs=50, patience=5
    )


def yelphat() -> None:
    """Classifiers of self-attention on YelpHat (three hours)."""
    _classifiers("yelphat", "yelphat", "--entropy-weights", "0.1,1,10,100")


def e_snli() -> None:
    """Classifiers of self-attention on e-SNLI (three hours)."""
    _classifiers("esnli", "e-snli", "--layers", "1,2", "--entropy-weights", "0.1,1,10,100")


def _classifiers(folder: str, name: str, *options: object) -> None:
    run("classifiers", "--data", CORPORA_BESIDE / folder, *options, "--out", emptied(name))


def reviews() -> None:
    """Classifiers of self-attention on film reviews, for the default pages."""
    options = [
        "--limit",
        1000,
        "--utterances",
        400,
        "--epochs",
        20,
        "--patience",
        20,
        "--layers",
        "1,2,3",
    ]
    options += ["--entropy-weights", "0.1,1,10,100"]
    options += ["--sensitivity", "0,1,2,3,4", "--sensitivity-layers", "1,3"]
    run("classifiers", "--data", "reviews", *options, "--out", emptied("reviews"))


def mpnet_base() -> None:
    """Tables of ``mpnet-base`` on short sentences, and the verdicts of seven pages on it (half an
    hour).
    """
    folder = emptied("mpnet-base")
    data = ("--data", "wikipedia:short", "--limit", 1500, "--seed", 0)
    run("measure", "--model", "mpnet-base", *data, "--metrics", MPNET_TABLES, "--out", folder)
    # The intervals of these two would be nine megabytes.
    for name in ("score_contributions", "cosine_by_dimension"):
        table = pd.read_parquet(folder / f"{name}.parquet").drop(columns=["ci_low", "ci_high"])
        table.to_parquet(folder / f"{name}.parquet", index=False)
    _in_single_precision("mpnet-base", "score_contributions", "contribution")
    executed = emptied("executed")
    model = ("-p", "model", "mpnet-base", "-p", "data", "wikipedia:short", "-p", "beside", "[]")
    for page in OUTLIER_PAGES:
        run("run", f"outliers/{page}", *model, "--out", executed)
    _anisotropy_pages("mpnet-base", "wikipedia:short", executed)
    _verdicts(executed, folder)


def smollm2_135m() -> None:
    """Tables of ``smollm2-135m`` on Wikipedia, and the verdicts of five pages (a quarter of an
    hour).
    """
    folder = emptied("smollm2-135m")
    data = ("--data", "wikipedia", "--limit", 1500, "--seed", 0)
    run("measure", "--model", "smollm2-135m", *data, "--metrics", SMOLLM2_TABLES, "--out", folder)
    executed = emptied("executed")
    _anisotropy_pages("smollm2-135m", "wikipedia", executed)
    given = ("-p", "models", "[smollm2-135m]", "-p", "shipped_models", "[]", "-p", "limit", 1500)
    for page in ("valleys", "added"):
        run("run", f"since/{page}", *given, "--out", executed)
    run("run", "since/sinks", *given, "-p", "image_models", "[]", "--out", executed)
    _verdicts(executed, folder)


def _anisotropy_pages(model: str, data: str, executed: Path) -> None:
    """Execute the pages whose verdicts come with a model that a build does not read."""
    parameters = {"text_models": f"[{model}]", "shipped_models": "[]", "text_data": data}
    parameters["limit"] = 1500
    given = [part for item in parameters.items() for part in ("-p", *item)]
    run("run", "anisotropy/text", *given, "-p", "twins", 0, "--out", executed)
    for others in ("speech_models", "image_models", "conv_models"):
        given += ["-p", others, "[]"]
    run("run", "anisotropy/drift", *given, "--out", executed)


def minilm_on_corpora() -> None:
    """MiniLM fine-tuned five times on each corpus of Fosse et al. 2023 (two hours)."""
    corpora = {"hatexplain": ("hatexplain", 10), "yelphat": ("yelphat", 5), "esnli": ("e-snli", 5)}
    for data, (name, epochs) in corpora.items():
        executed, folder = emptied("executed"), HOME / f"minilm-on-{name}"
        parameters = {"data": CORPORA_BESIDE / data, "train_limit": 2000, "test_limit": 1000}
        parameters |= {"learning_rate": "5e-5", "epochs": epochs}
        given = [part for item in parameters.items() for part in ("-p", *item)]
        for page in FINETUNED_PAGES:
            own = ("show_texts", "false") if page == "words" else ("beside", "[]")
            run("run", f"classification/{page}", "-p", *own, *given, "--out", executed)
        _verdicts(executed, folder, leave_out="fosse-one-layer-")
        _finetuned_tables(data, folder, epochs)


def _finetuned_tables(data: str, folder: Path, epochs: int) -> None:
    train, validation, test = splits(str(CORPORA_BESIDE / data), 2000, 1000, 0)
    model, settings = load_model("minilm"), {"learning_rate": 5e-5, "epochs": epochs, "patience": 3}
    tuned = [finetune(model, train, validation, seed=seed, **settings) for seed in SEEDS]
    states = {
        "before": model,
        **{str(seed): load_model(str(path)) for seed, path in enumerate(tuned)},
    }
    measured = {}
    for state, of_state in states.items():
        measured[state] = measure(of_state, test, "utterance_similarity,attention_entropy")
    tables = {}
    for name in measured["before"]:
        tables[name] = grouped(
            {state: found[name] for state, found in measured.items()}, "training"
        )
    training = {"training": settings | {"texts": len(train), "seeds": [*SEEDS]}}
    # Those that ship bear no seal, without which nothing is replaced.
    for last in (folder / "run.json", *folder.glob("*.parquet")):
        last.unlink(missing_ok=True)
    output = Output(folder, "record", ("minilm", data), "run.json")
    save_tables(tables, output, measured["before"].run | training)
    if data != "hatexplain":
        similar, right = directions.classified(tuned[0], test)
        drawn = directions.draw_representatives(np.array(test.labels), right)
        shown = directions.to_representatives(similar, test, drawn)
        shown.to_csv(folder / "class_cosines.csv", index=False, float_format="%.3f")


def _verdicts(executed: Path, folder: Path, leave_out: str = "") -> None:
    """The verdicts of executed pages as one file.

    Those on claims that begin with ``leave_out`` stay as they are: other classifiers decide them.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run("claims", "--csv", *sorted(executed.glob("*.ipynb")))
    printed.seek(0)
    rows = pd.read_csv(printed)
    if leave_out:
        earlier = pd.read_csv(folder / "verdicts.csv")
        kept = earlier[earlier["id"].str.startswith(leave_out)]
        rows = pd.concat([rows[~rows["id"].str.startswith(leave_out)], kept])
    # Those of other corpora, which the page shows beside, come after its own.
    rows = rows.drop_duplicates("id")
    rows[OF_VERDICTS].to_csv(folder / "verdicts.csv", index=False)
    shutil.rmtree(executed)


def lengths() -> None:
    """SmolLM2 on four articles of 16,384 tokens, twice its trained length (half an hour)."""
    corpus = long_texts.longest_texts("wikipedia:paragraphs", 4)
    tables, run = long_texts.measured(load_model("smollm2-135m"), corpus, 8192)
    output = Output(emptied("lengths"), "record", ("smollm2-135m", corpus.name), "run.json")
    save_tables(tables, output, run)
    for name, table in tables.items():
        for column in table.select_dtypes("float"):
            _in_single_precision("lengths", name, column)


def reference_models() -> None:
    """``data/reference_models.csv``: the headline numbers that a report is compared with (five
    minutes).
    """
    metrics = "anisotropy,mean_vector,utterance_similarity,attention_entropy"
    texts = compare(
        {"wikipedia": ["minilm", "mpnet-base", "smollm2-135m"]}, metrics, limit=300, seed=0, twins=0
    )
    others = compare(
        {"speech-clips": ["whisper-base"], "photographs": ["vit-s14"]}, metrics, twins=0
    )
    parts = [_headlines_by_revision(comparison) for comparison in (texts, others)]
    path = HOME.parent / "reference_models.csv"
    pd.concat(parts).to_csv(path, index=False, float_format="%.5f")


def _headlines_by_revision(comparison: Comparison) -> pd.DataFrame:
    rows = headlines(comparison)
    rows = rows[
        rows["of"].isin(["hidden", ""]) & ~rows["quantity"].isin(["norm_of_mean", "mean_norm"])
    ]
    runs = {title: tables.run for title, tables in comparison.trained.items()}
    kinds = [runs[title]["kind"] for title in rows["model"]]
    revisions = [runs[title]["model_revision"] for title in rows["model"]]
    rows.insert(1, "kind", kinds)
    rows.insert(2, "revision", revisions)
    return rows


def causes_spike() -> None:
    """``causes/spike.csv``: the effects of all arms of ``causes/spike`` (a quarter of an hour)."""
    texts = load_corpus("wikipedia", limit=60, seed=0)
    images = load_corpus("photographs", limit=20, seed=0)
    spikes.record(**{"smollm2-135m": (texts, 20), "vit-s14": (images, 0)})


def causes_norms() -> None:
    """``causes/norms.csv``: spike and sink of ten small models trained for it (three and a half
    hours).
    """
    names = [f"bytes-{where}norm@seed={seed}" for where in ("pre", "post") for seed in SEEDS]
    spikes.record_first_tokens(names, load_corpus("news:sentences", limit=200, seed=0))


def causes_cone() -> None:
    """``causes/cone.csv``: average cosines taken apart, of models and of an untrained copy of each
    (half an hour).
    """
    texts = load_corpus("wikipedia", limit=1500, seed=0)
    images = load_corpus("photographs", limit=80, seed=0)
    cones.record(**{"minilm": texts, "smollm2-135m": texts, "vit-s14": images})


def causes_dimensions() -> None:
    """``causes/dimensions.csv``: what single dimensions do, for the explorer (half an hour)."""
    short = load_corpus("wikipedia:short", limit=1500, seed=0)
    some = load_corpus("wikipedia:short", limit=100, seed=0)
    longer = load_corpus("wikipedia", limit=60, seed=0)
    few = load_corpus("wikipedia", limit=20, seed=0)
    names = "dimension_means,outlier_dimensions,attention_by_token_type,attention_entropy,"
    names += "score_contributions,cosine_by_dimension"
    tables = {
        "minilm": measure(load_model("minilm"), short, names),
        "mpnet-base": shipped("mpnet-base"),
    }
    tables["smollm2-135m"] = measure(load_model("smollm2-135m"), longer, names)
    listed = rows_of(tables).query("head == 0").groupby("model")["dimensions"].first()
    given = {name: (some, [*map(int, dimensions.split())]) for name, dimensions in listed.items()}
    # SmolLM2 is slow.
    given["smollm2-135m"] = few, given["smollm2-135m"][1][:3]
    causes.record_removed(**given)


def causes_sentences() -> None:
    """``causes/sentences-minilm.csv``: what the corpus says beside a typed sentence (ten
    minutes).
    """
    corpus = load_corpus("wikipedia:short", limit=1500, seed=0)
    sentences.record(load_model("minilm"), corpus, 99)


def causes_layers() -> None:
    """The other files of ``causes/``: experiments layer by layer, with every jackknife group (an
    hour and a half).
    """
    corpus = load_corpus("wikipedia:short", limit=500, seed=0)
    _causes_of_minilm(corpus)
    _causes_of_mpnet(corpus)
    for name, data in (
        ("minilm", "wikipedia"),
        ("smollm2-135m", "wikipedia"),
        ("vit-s14", "photographs"),
    ):
        items = load_corpus(data, limit=80, seed=0)
        for model in (name, f"{name}:untrained@seed=0"):
            if model != "minilm":
                causes.ship(causes.drift(load_model(model), items), f"drift-{model}", items)


def _causes_of_minilm(corpus: Corpus) -> None:
    model = load_model("minilm")
    tables = measure(model, corpus, [causes.DimensionVariances(), *causes.TABLES])
    outliers = causes.outliers(tables)
    arms = _arms_of_keys(outliers, causes.largest(tables, outliers))
    others = {"mean of the type": "type_mean", "other token": "other", "noise": "noise"}
    for name, by in others.items():
        arms[name] = causes.arm("key_side", outliers, by=by)
    arms["dimension 99"] = causes.arm("key_side", causes.in_every_layer(model, 99), by="mean")
    arms |= causes.random_arms("key_side", outliers, tables, 20, by="mean")
    causes.ship(causes.layer_by_layer(model, corpus, arms), "key-side-minilm", corpus)
    arms = causes.random_arms("residual", outliers, tables, 20, by="mean", of="same")
    arms = {arm: changes for arm, changes in arms.items() if "matched" in arm}
    causes.ship(
        causes.layer_by_layer(model, corpus, arms, causes.same_article), "residual-minilm", corpus
    )


def _causes_of_mpnet(corpus: Corpus) -> None:
    model = load_model("mpnet-base")
    tables = measure(model, corpus, [causes.DimensionVariances(), *causes.TABLES])
    outliers = causes.outliers(tables)
    arms = causes.random_arms("key_side", outliers, tables, 5, by="mean")
    arms = {arm: changes for arm, changes in arms.items() if "matched" in arm}
    arms |= _arms_of_keys(outliers, causes.largest(tables, outliers))
    causes.ship(causes.layer_by_layer(model, corpus, arms), "key-side-mpnet-base", corpus)


def _arms_of_keys(outliers: causes.Dimensions, largest: causes.Dimensions) -> dict:
    """The arms of both models, with the names of the page."""
    return {
        "unchanged": causes.arm("key_side", outliers, by="nothing"),
        "mean": causes.arm("key_side", outliers, by="mean"),
        "only outliers": causes.arm("key_side", outliers, by="mean", but=True),
        "other of the type": causes.arm("key_side", outliers, by="other_of_type"),
        "largest": causes.arm("key_side", largest, by="mean"),
    }


def recordings() -> dict[str, Callable[[], None]]:
    """The functions that record, by the names that ``make record`` takes."""
    helpers = {"run", "emptied", "recordings", "main"}
    functions = {}
    for name, value in globals().items():
        is_function = callable(value) and getattr(value, "__module__", None) == __name__
        if is_function and name not in helpers and not name.startswith("_"):
            functions[name.replace("_", "-")] = value
    return functions


def main(names: list[str]) -> int:
    known = recordings()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        print("give NAME, one of:", file=sys.stderr)
        for name, record in known.items():
            print(f"  {name:18} {record.__doc__.splitlines()[0]}", file=sys.stderr)
        return 2
    for name in names:
        known[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
