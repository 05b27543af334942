"""What is given to a public function and makes no sense is refused in one line, before anything is
read or written.
"""

import inspect
import subprocess
import sys

import jaxtyping
import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from analysis_book.papers import claims
from analysis_book.papers.fosse.splits import splits
from analysis_book.papers.fosse.trials import trials
from analysis_book.papers.geometry import geometry_of, headline_differences, headlines, references
from analysis_book.training import (
    Pretraining,
    accuracy,
    checkpoints,
    finetune,
    held_out_scores,
    predict,
    pretrain,
    run_identity,
    self_attention,
)
from analysis_book.training.dynamics import dynamics
from analysis_book.training.recipes import train
from analysis_lib import (
    AnalysisError,
    Corpus,
    Replace,
    compare,
    corpora,
    generate,
    load_corpus,
    load_model,
    measure,
    measure_vectors,
    merge_parts,
    metrics,
)
from analysis_lib.corpora import ArrayImage, Sound, data_identity
from analysis_lib.errors import LARGEST, require_number, require_whole, shown
from analysis_lib.measurement import grouped, largest, shipped
from analysis_lib.models import title, weights_identity

TEXTS = ["a girl is styling her hair", "the men are playing", "two dogs run", "a boy sings"]
LABELLED = Corpus("labelled", TEXTS, labels=[0, 1, 0, 1], classes=["a", "b"])
VECTORS = {0: np.eye(4)}
NUMBERS = [
    None,
    "",
    "2",
    1.5,
    -1,
    True,
    [],
    {},
    float("nan"),
    float("inf"),
    b"x",
    object(),
    10**30,
    (1,),
    {1},
    "\0",
]
# What is no number, text, list or mapping.
NOTHING = [1.5, b"x", object(), {1}]
WORDS = [None, "", 1.5, -1, True, [], {}, b"x", object(), {1}, "\0", "x" * 5000]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and the model."""
    folder = tmp_path_factory.mktemp("arguments")
    tiny.save(folder / "bert", "bert")
    (folder / "lines.txt").write_text("\n".join(TEXTS) + "\n")
    return folder, load_model(folder / "bert")


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place[0])
    monkeypatch.setattr("analysis_lib.corpora.hub._reachable", lambda: False)
    # The type checker of the tests would refuse first what the library has to.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def refused(call, *arguments, **named):
    with pytest.raises(AnalysisError) as caught:
        call(*arguments, **named)
    assert len(str(caught.value).splitlines()) == 1
    assert "object at 0x" not in str(caught.value)
    return str(caught.value)


# By the name of a call: what makes it of one argument, the name of that, and values that make no
# sense.
def _numbers(*allowed):
    return [value for value in NUMBERS if not any(value is each for each in allowed)]


def _measured(place, **given):
    return measure(
        **{"model": place[1], "data": TEXTS, "metrics": "anisotropy", "progress": False} | given
    )


MEASURE = {
    "workers": NUMBERS,
    "tokens_per_batch": NUMBERS,
    "worker_timeout": [None, "", "2", -1, 0, True, [], float("nan"), float("inf")],
    "metrics": [None, "", 1.5, metrics.Anisotropy, metrics.Anisotropy(), {"anisotropy"}],
    "special_tokens": [None, "no", 1, 0],
    "long_texts": WORDS,
    "max_length": [*NUMBERS[1:], 161],
    "maps": WORDS,
    "tokens": WORDS,
    "bins": WORDS[1:],
    "intervention": ["", 0, False, 1.5, "residual", [1], {"where": "residual", "nope": 1}, [{"layers": [1]}]],
    "progress": [None, "no", 1],
    "scheduler": WORDS[1:],
    "checkpoints": WORDS[1:],
    "column": ["text", 3],
    "part": ["", "1/4", 3, 1.5, (1,), {1, 2}, (0, 4), (5, 4), (1, 0), (1.5, 4), (True, 2), (1, 10**9), (1, 2, 3, 4), (1, 2)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MEASURE.items() for value in values]
)
def test_measure(place, name, value):
    refused(_measured, place, **{name: value})


@pytest.mark.parametrize("folder", [*WORDS, ".", "absent", "bert/config.json"])
def test_merge_parts(folder):
    refused(merge_parts, folder)


GENERATE = {
    "max_new_tokens": NUMBERS,
    "batch_size": NUMBERS,
    "seed": NUMBERS,
    "temperature": [None, "", "2", -1, True, [], float("nan"), float("inf")],
    "progress": [None, "no", 1],
    "column": ["text", 3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GENERATE.items() for value in values]
)
def test_generate(place, name, value):
    words = refused(generate, **{"model": place[1], "data": TEXTS, "progress": False, name: value})
    # The model itself would be refused last.
    assert "cannot answer" not in words


def test_measure_takes_numbers_of_numpy(place):
    tables = _measured(
        place, tokens_per_batch=np.int64(64), workers=np.int32(1), worker_timeout=np.float32(60)
    )
    assert type(tables.run["settings"]["tokens_per_batch"]) is int


def test_measure_is_given_one_who_prepares_and_one_who_works(place):
    assert "give one of them" in refused(
        measure, place[0] / "bert", TEXTS, tokenizer="a", processor="b"
    )
    assert "give one of them" in refused(_measured, place, workers=2, scheduler="tcp://localhost:1")


def test_a_setting_without_an_effect_is_refused(place):
    assert "none: leave maps out" in refused(_measured, place, maps="positions")
    assert "of a cluster: give scheduler=" in refused(_measured, place, worker_timeout=5)


def test_what_an_intervention_changes_needs_one(place):
    words = refused(_measured, place, metrics="anisotropy,output_change")
    assert (
        words
        == "output_change is what an intervention changes: give an intervention, or leave it out"
    )
    assert "output_change" in refused(compare, {"lines.txt": ["bert"]}, "output_change", twins=0)
    unchanged = _measured(
        place, metrics="output_change", intervention=Replace("residual", by="nothing")
    )
    assert unchanged["output_change"]["cosine"].item() == pytest.approx(1)


@pytest.mark.parametrize("given", [[metrics.Anisotropy], [1], [None], ["anisotropy", b"x"]])
def test_metrics(given):
    # Behind the type checker of the tests.
    words = refused(inspect.unwrap(metrics.resolve), given)
    assert "give" in words


VECTORS_TAKE = {
    "vectors": [None, "", 1.5, {}, [], b"x", {1}, "\0", "x" * 5000],
    "lengths": ["", 1.5, -1, {}, [1.5], [-1, 5], "four"],
    "metrics": [None, 1.5, metrics.Anisotropy],
    "layers": [0, 1.5, "", "0", {}, {0}, [None], [-1], [0]],
    "units": ["abcd", 1.5, {}, {1}, ["a"]],
    "workers": [None, "2", 1.5, 0],
    "checkpoints": [1.5, "", []],
    "progress": [None, 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in VECTORS_TAKE.items() for value in values]
)
def test_measure_vectors(name, value):
    given = {"vectors": VECTORS, "lengths": [1, 3], "metrics": "anisotropy", "progress": False} | {
        name: value
    }
    refused(measure_vectors, **given)


@pytest.mark.parametrize("name", ["layer_" + "9" * 20, "layer_" + "9" * 5000, "layer_-1"])
def test_a_layer_has_a_number(name):
    assert "name its vectors as in layer_3" in refused(
        measure_vectors, {name: np.eye(4)}, [4], "anisotropy"
    )


@pytest.mark.parametrize("limit", _numbers(None))
def test_load_corpus_limits(limit):
    assert "whole number" in refused(load_corpus, TEXTS, limit)


@pytest.mark.parametrize("seed", _numbers(None))
def test_load_corpus_seeds(seed):
    assert "whole number" in refused(load_corpus, TEXTS, 3, seed)


@pytest.mark.parametrize(
    "data", [None, 1.5, True, b"x", object(), [], {}, [1], [b"x"], [None], {"text": "x"}, "\0", ""]
)
def test_load_corpus_data(data):
    refused(load_corpus, data)


@pytest.mark.parametrize("column", [1.5, [], {}, {1}, b"x", object(), ["a", "b", "c"], "nope", 7])
def test_load_corpus_columns(column):
    refused(load_corpus, pd.DataFrame({"text": TEXTS}), column=column)
    refused(load_corpus, pd.DataFrame({"text": TEXTS}), column="text", units=column)


def test_a_corpus_needs_the_name_of_a_split():
    assert refused(load_corpus, "wikipedia:").startswith("wikipedia: names no split")


@pytest.mark.parametrize("kind", [set, frozenset])
def test_texts_without_an_order_are_refused(kind):
    """Their order, and with it the hash of the corpus, is another in every process."""
    assert "another order in every process: give sorted(...)" in refused(load_corpus, kind(TEXTS))
    order = "print([*{'a girl', 'two dogs', 'the men', 'a boy'}])"
    orders = {
        subprocess.run([sys.executable, "-c", order], capture_output=True).stdout for _ in range(6)
    }
    assert len(orders) > 1
    assert load_corpus(sorted(kind(TEXTS))).items == sorted(TEXTS)


MODELS_TAKE = {
    "name": [
        None,
        "",
        1.5,
        [],
        b"x",
        "\0",
        "bert@part=",
        "bert:untrained@seed=99999999999999999999",
        "x" * 5000,
    ],
    "revision": WORDS[1:],
    "dtype": WORDS,
    "device": ["", "cpu:7", "tpu", 1.5, True, [], {}, object(), 10**30],
    "device_map": ["", 1.5, [], {}, "x"],
    "processor": ["", 1.5, [], object(), "\0"],
    "part": [None, 1.5, [], {}, "nope"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in MODELS_TAKE.items() for value in values]
)
def test_load_model(name, value):
    refused(load_model, **{"name": "bert"} | {name: value})


COMPARED = [
    *(
        "minilm",
        None,
        [],
        {},
        3,
        [("lines.txt", ["bert"])],
        {"lines.txt": "bert"},
        {"lines.txt": []},
    ),
    *(
        {"lines.txt": None},
        {"lines.txt": [None]},
        {"lines.txt": {"bert"}},
        {3: ["bert"]},
        {"lines.txt": [""]},
    ),
    *(
        {"lines.txt": ["bert", "./bert"]},
        {"lines.txt": ["bert", "bert@dtype=float32"]},
        {"nope": ["bert"]},
    ),
]


@pytest.mark.parametrize("models", COMPARED)
def test_compare(models):
    refused(compare, models, "anisotropy", twins=0)


def test_compare_takes_no_loaded_model(place):
    refused(compare, {"lines.txt": [place[1]]}, "anisotropy")


def test_compare_knows_a_model_behind_a_link(place):
    (place[0] / "link").symlink_to("bert")
    words = refused(compare, {"lines.txt": ["bert", "link"]}, "anisotropy")
    assert words == "link was given twice, also as bert: give each model once"


COMPARE_TAKES = {
    **{
        "twins": NUMBERS,
        "limit": _numbers(None),
        "seed": _numbers(None),
        "dtype": WORDS,
        "tokenizer": WORDS[1:],
    },
    **{
        "metrics": NOTHING,
        "nope": [1],
        "column": ["text"],
        "workers": ["2", 1.5],
        "units": WORDS[1:],
    },
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in COMPARE_TAKES.items() for value in values]
)
def test_compare_settings(name, value):
    refused(
        compare,
        **{"models": {"lines.txt": ["bert"]}, "metrics": "anisotropy", "twins": 0} | {name: value},
    )


def test_all_models_that_cannot_be_loaded_are_named_before_one_is_measured(place, monkeypatch):
    tiny.save(place[0] / "broken", "bert")
    weights = place[0] / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr(
        "analysis_lib.measurement.comparison.measure",
        lambda *_, **__: pytest.fail("one was measured"),
    )
    words = refused(compare, {"lines.txt": ["bert", "absent", "broken"]}, "anisotropy", twins=0)
    assert "no model or folder named absent" in words
    assert "model.safetensors cannot be read" in words


REPLACED = {
    "where": [*WORDS, ["residual"]],
    "layers": ["x", 1.5, -1, True, [-1], [1.5], ["1"], [True], b"x", {}, object()],
    "dimensions": ["x", 1.5, -1, True, [-1], [1.5], b"x", {}],
    "directions": ["", "x", 1.5, -1, True, {}, b"x", {1}, [[0, 0]], [[1], [1, 2]], [float("nan")]],
    "tokens": ["x", 1.5, ["x"], {"cls"}, b"x", [1]],
    "by": WORDS,
    "of": WORDS,
    "but": [None, "no", 1, 0],
    "seed": NUMBERS,
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in REPLACED.items() for value in values]
)
def test_replace(name, value):
    refused(Replace, **{"where": "residual"} | {name: value})


@pytest.mark.parametrize("spaces", ["hidden", [], ["nope"]])
def test_isotropy(spaces):
    refused(metrics.Isotropy, spaces)


CORPUS_TAKES = {
    "name": WORDS,
    "items": [None, "text", 1.5, [1], [""]],
    "blank": NUMBERS,
    "kind": [None, "", "vector", 1, []],
    "labels": ["abcd", 3, {0, 1}, [0]],
    "units": ["abcd", 3, {0, 1}, [0]],
    "classes": ["ab", 3, {"a"}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in CORPUS_TAKES.items() for value in values]
)
def test_corpus(name, value):
    refused(Corpus, **{"name": "it", "items": TEXTS} | {name: value})


@pytest.mark.parametrize("places", [None, "1", 3, [9], [-1], ["a"], [1.5], {1}, [True]])
def test_take(places):
    refused(LABELLED.take, places)


@pytest.mark.parametrize(
    "value", [None, "", [], 1.5, np.zeros(0, np.float32), np.zeros((2, 2), np.float32)]
)
def test_sounds_and_images(value):
    refused(Sound, value, 16000)
    refused(ArrayImage, value)
    refused(Sound, np.zeros(9, np.float32), "16000")
    refused(Sound, np.zeros(9, np.float32), 16000, [value])


RUN = {"steps": 1, "batch": 1, "length": 8, "vocabulary": 60}
PRETRAINING = {
    **dict.fromkeys(("vocabulary", "length", "steps", "batch"), _numbers(0)),
    **{
        "learning_rate": [None, "", 0, -1, True, float("nan"), float("inf")],
        "warmup": [None, "", -1, 1, True],
    },
    **{
        "weight_decay": [None, "", -1, True],
        "cased": [None, 1, "no"],
        "configuration": [None, "", 1, []],
    },
    **{"data": WORDS, "model_type": WORDS, "tokenizer": [None, 1, []]},
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in PRETRAINING.items() for value in values]
)
def test_pretraining(name, value):
    refused(Pretraining, **RUN | {name: value})


@pytest.mark.parametrize(
    "given",
    [
        *({"settings": value} for value in ("", 0, {}, [])),
        *({"seeds": value} for value in (None, (), 0, "0", {}, [1.5], [-1], [True], [10**30])),
        *({"workers": value} for value in (None, 0, "1", 1.5, True)),
        *({"device": value} for value in ("", "cpu:7", 1.5)),
        *({"folder": value} for value in (None, "", 1.5, "\0", "x" * 5000)),
    ],
)
def test_pretrain(given):
    refused(pretrain, **{"folder": "run", "settings": Pretraining("lines.txt", **RUN)} | given)


TRAINED = {
    **{"train": [None, "x", [], load_corpus(TEXTS)], "validation": [None, [], load_corpus(TEXTS)]},
    **{"folder": [1.5, "", "\0"], "device": ["", "cpu:7"], "nope": [1]},
    **{
        name: [None, "2", 1.5, -1, True]
        for name in ("batch", "epochs", "patience", "longest", "seed")
    },
    "learning_rate": [None, "x", 0, True, float("inf")],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, value) for n, values in TRAINED.items() for value in values]
)
def test_classifiers(place, name, value):
    given = {"train": LABELLED, "validation": LABELLED} | {name: value}
    refused(self_attention, **given)
    refused(finetune, place[1], **given)


@pytest.mark.parametrize(
    "given",
    [
        *({"layers": value} for value in (None, 0, 101, 100_000, "1", 1.5)),
        *({"vocabulary": value} for value in (None, 0, "8")),
        *(
            {"block": value}
            for value in (3, "x", {"nope": 1}, {"hidden_size": 0}, {"hidden_size": 10**9})
        ),
        *({"block": {"entropy_weight": value}} for value in (None, -1, "1", float("nan"))),
        *(
            {"block": value}
            for value in ({"bias": 1}, {"attention_gain": None}, {"initializer_range": "x"})
        ),
    ],
)
def test_self_attention(given):
    refused(self_attention, LABELLED, LABELLED, **given)


@pytest.mark.parametrize("model", [None, "minilm", 3, torch.nn.Linear(1, 1)])
def test_finetune(model):
    refused(finetune, model, LABELLED, LABELLED)


def test_predict(place):
    for folder in (None, "", "nope", 1.5):
        refused(predict, folder, LABELLED)
    for table in (None, {}, pd.DataFrame(), pd.DataFrame({"label": [1]})):
        refused(accuracy, table)


@pytest.mark.parametrize(
    "call",
    [checkpoints, run_identity, dynamics, weights_identity, data_identity, title, corpora.title],
)
@pytest.mark.parametrize("name", [None, 1.5, [], b"x", object()])
def test_names(call, name):
    refused(call, name)


@pytest.mark.parametrize(
    "name", [None, "", 1.5, "nope", "digits-vit@steps=1@steps=2", "digits-vit@seed=" + "9" * 20]
)
def test_train(name):
    refused(train, name, "out")
    refused(held_out_scores, name)


@pytest.mark.parametrize("seeds", [None, (), "0", 0, {}, [1.5], [-1]])
def test_seeds_of_a_run(seeds):
    refused(checkpoints, "bert-4", seeds)


ROWS = [None, "x", [], {}, {"data": "reviews", "nope": 1}, *({"data": name} for name in WORDS)]
ROWS += [{"data": "reviews", "layers": value} for value in (None, 0, "1", 1.5, 100_000)]
ROWS += [{"data": "reviews", "entropy_weight": value} for value in (None, -1, "1", float("nan"))]
ROWS += [{"data": "reviews", "seed": value} for value in (None, -1, "1", 10**30)] + [
    {"data": "reviews", "variant": 1}
]


@pytest.mark.parametrize("row", ROWS)
def test_trials(row):
    refused(trials, [row])


@pytest.mark.parametrize(
    "given", [{"limit": -1}, {"test_limit": 1.5}, {"seed": "0"}, {"test": 3}, {"data": None}]
)
def test_splits(given):
    refused(splits, **{"data": "reviews"} | given)


@pytest.mark.parametrize("value", [None, "", "nope", 1.5, [], b"x"])
def test_tables(place, value):
    tables = _measured(place)
    comparison = compare({"lines.txt": ["bert"]}, "anisotropy", twins=0)
    for call in (
        tables.interval,
        tables.intervals,
        headlines,
        headline_differences,
        geometry_of,
        references,
        largest,
    ):
        refused(call, value)
    for call in (
        shipped,
        claims.claim,
        claims.published,
        claims.recorded,
        lambda v: grouped(v, "model"),
    ):
        refused(call, value)
    refused(claims.verdicts, value, tables)
    refused(comparison.differences, value)
    refused(tables.save, [value])
    refused(tables.save, "out", value)
    refused(lambda: tables[value])
    assert value not in tables
    refused(tables.interval, lambda t: "no number")


def test_a_table_that_is_not_there_is_named_with_the_nearest(place):
    assert (
        refused(lambda: _measured(place)["anisotrpy"])
        == "there is no table 'anisotrpy': did you mean anisotropy?"
    )


# --- The helpers
# ------------------------------------------------------------------------------------


def test_numbers_come_out_as_those_of_python():
    assert type(require_whole("it", np.int64(3))) is int
    assert type(require_number("it", np.float32(0.5))) is float
    assert require_whole("it", LARGEST) == LARGEST
    with pytest.raises(AnalysisError, match=rf"it is \d+: give a whole number, {LARGEST} or less"):
        require_whole("it", LARGEST + 1)


def test_no_number():
    for value in (10**400, 10**5000, float("nan"), float("inf"), "1", True, None):
        with pytest.raises(AnalysisError, match=r"^it is .{1,60}: give a number above 0$"):
            require_number("it", value, above=0)


def test_what_is_shown_is_short():
    for value in ("x" * 10**6, 10**4000, b"y" * 10**6, pd.DataFrame(), [1] * 10**6, int, object()):
        assert len(shown(value)) < 60
