"""Models and texts that a program holds: measured as if they had been loaded, and left as they
were.
"""

import copy
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import accelerate
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers

from analysis_lib import AnalysisError, Corpus, load_corpus, load_model, measure
from analysis_lib.corpora import Pair
from analysis_lib.corpora.objects import TextFile

TEXTS = [
    "the cat sat on the mat , and slept .",
    "a dog barked at it",
    "where is the other one ?",
] * 3


def state(model: torch.nn.Module) -> list:
    """All that a measurement could leave behind in a model."""
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()
    ]
    return [
        *hooks,
        model.config._attn_implementation,
        *(p.detach().clone() for p in model.parameters()),
    ]


def same(before: list, after: list) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


@pytest.fixture(scope="module")
def bert() -> tuple[transformers.BertModel, object]:
    return tiny.build("bert")


@pytest.fixture(scope="module")
def expected(bert, tmp_path_factory) -> pd.DataFrame:
    """What the same model gives when it is loaded from a folder."""
    folder = tmp_path_factory.mktemp("bert")
    for part in bert:
        part.save_pretrained(folder)
    return measure(folder, TEXTS, "anisotropy", progress=False)["anisotropy"]


def headed(bare: transformers.BertModel) -> transformers.PreTrainedModel:
    model = transformers.BertForSequenceClassification(bare.config)
    model.bert.load_state_dict(bare.state_dict(), strict=False)
    return model


@pytest.mark.parametrize("form", ["bare", "head", "compiled", "compiled in place", "wrapped"])
def test_a_model_at_hand_is_measured_by_its_base_and_stays_as_it_was(bert, expected, form):
    bare, tokenizer = bert
    model = copy.deepcopy(bare) if form == "bare" else headed(bare)
    model.train()
    model.base_model.encoder.layer[0].eval()  # Frozen, as some layers are.
    given, before = model, state(model)
    if form == "compiled":
        given = torch.compile(model)
    if form == "compiled in place":
        model.base_model.compile()
        compiled = model.base_model._compiled_call_impl
    if form == "wrapped":
        given = torch.nn.Module()
        given.module = model
    found = measure(given, TEXTS, "anisotropy", tokenizer=tokenizer, progress=False)["anisotropy"]
    pd.testing.assert_frame_equal(found, expected)
    assert same(before, state(model))
    if form == "compiled in place":
        assert model.base_model._compiled_call_impl is compiled


def test_the_head_of_a_t5_stays_beside_its_stacks():
    bare, tokenizer = tiny.build("t5")
    model = transformers.T5ForConditionalGeneration(bare.config)
    model.load_state_dict(bare.state_dict(), strict=False)
    found, expected = (
        measure(each, TEXTS, "anisotropy", processor=tokenizer, progress=False)["anisotropy"]
        for each in (model, bare)
    )
    pd.testing.assert_frame_equal(found, expected)


def test_a_training_with_a_measurement_in_it_takes_the_same_steps(bert):
    bare, tokenizer = bert

    def losses(every: int) -> list[float]:
        torch.manual_seed(0)
        model, found = headed(bare).train(), []
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        ids = tokenizer(TEXTS, return_tensors="pt", padding=True)
        for step in range(6):
            if every and step % every == 0:
                measure(model, TEXTS, "anisotropy", tokenizer=tokenizer, progress=False)
            loss = model(**ids, labels=torch.tensor([0, 1, 0] * 3)).loss
            adam.zero_grad()
            loss.backward()
            adam.step()
            found.append(loss.item())
        return found

    assert losses(2) == losses(0)


def test_a_model_at_hand_that_has_changed_is_another(bert):
    model, tokenizer = copy.deepcopy(bert[0]), bert[1]
    before = load_model(model, processor=tokenizer).revision
    assert load_model(model, processor=tokenizer).revision == before
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert load_model(model, processor=tokenizer).revision != before


@pytest.mark.parametrize(
    "data", [TEXTS, tuple(TEXTS), pd.Series(TEXTS), (text for text in TEXTS), iter(TEXTS)]
)
def test_texts_at_hand_are_measured_alike(bert, expected, data):
    found = measure(bert[0], data, "anisotropy", tokenizer=bert[1], progress=False)
    pd.testing.assert_frame_equal(found["anisotropy"], expected)


class Dataset:
    """As much of a ``datasets.Dataset`` as its users rely on."""

    column_names = ("text", "label")

    def __iter__(self):
        return ({"text": text, "label": 0} for text in TEXTS)


@pytest.mark.parametrize("data", [pd.DataFrame({"text": TEXTS, "label": 0}), Dataset()])
def test_tables_at_hand_are_read_by_column(bert, expected, data):
    found = measure(bert[0], data, "anisotropy", tokenizer=bert[1], column="text", progress=False)
    pd.testing.assert_frame_equal(found["anisotropy"], expected)
    with pytest.raises(AnalysisError, match=r"give column=.*text"):
        measure(bert[0], data, "anisotropy", tokenizer=bert[1], column="texts", progress=False)


def test_a_path_is_as_good_as_its_name(bert, expected, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(TEXTS))
    found = measure(bert[0], path, "anisotropy", tokenizer=bert[1], progress=False)
    pd.testing.assert_frame_equal(found["anisotropy"], expected)


def test_what_is_missing_is_left_out_and_counted():
    for data in (
        ["a", None, " ", "b", float("nan")],
        pd.Series(["a", None, "", "b", pd.NA]),
        iter(["a", "", "b", None, ""]),
    ):
        corpus = load_corpus(data)
        assert ([*corpus.items], corpus.blank) == (["a", "b"], 3)
    pairs = load_corpus([("a", "b"), Pair("c", "d")])
    assert pairs.items == [Pair("a", "b"), Pair("c", "d")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "item 1 is a int"),
        (["a", ["b"]], "item 2 is a list"),
        ([], "no utterance"),
        (iter(["", " "]), "no utterance"),
        (3, "a int is no corpus"),
        (b"text", "a bytes is no corpus"),
        (iter([("a", "b")]), "give them in a list"),
        ([("a", "")], "one side of pair 1 is empty"),
    ],
)
def test_what_gives_no_texts_is_refused_in_a_line(data, message):
    with pytest.raises(AnalysisError, match=message) as caught:
        load_corpus(data)
    assert "\n" not in str(caught.value)


def test_a_corpus_is_a_list_of_texts_without_blanks():
    for items in ("one string", b"bytes", None, 3):
        with pytest.raises(AnalysisError, match="give a list of them"):
            Corpus("x", items)
    with pytest.raises(AnalysisError, match="item 2 is blank"):
        Corpus("x", ["a", " "])
    with pytest.raises(AnalysisError, match="item 2 is of type int: give texts, or each pair"):
        Corpus("x", ["a", 3])


def test_what_is_no_model_is_refused_in_a_line(bert):
    with pytest.raises(AnalysisError, match="a Linear is no model of transformers"):
        load_model(torch.nn.Linear(1, 1))
    with pytest.raises(AnalysisError, match="tokenizer= or processor="):
        measure(bert[0], TEXTS, "anisotropy")


def test_objects_say_what_they_are_in_a_line(bert):
    model, corpus = load_model(bert[0], processor=bert[1]), load_corpus(TEXTS)
    tables = measure(model, corpus, "anisotropy", progress=False)
    for shown, words in (
        (model, "BertModel of 3 layers"),
        (corpus, "9 texts"),
        (tables, "anisotropy"),
    ):
        assert words in repr(shown)
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 200
    assert "2 units, of the classes a" in repr(
        Corpus("c", ["x", "y"], labels=[0, 0], classes=["a"], units=["1", "2"])
    )


def test_a_stream_is_read_once_and_lies_in_a_file():
    asked = []

    def texts():
        for number in range(30_000):
            asked.append(number)
            yield f"text {number}"

    corpus = load_corpus(texts())
    assert len(asked) == len(corpus) == 30_000
    assert isinstance(corpus.items, TextFile)
    assert isinstance(corpus.items[10:20], TextFile)
    assert (corpus.items[29_999], [*corpus.items[5:7]]) == ("text 29999", ["text 5", "text 6"])
    assert corpus.sha256 == Corpus("listed", [f"text {n}" for n in range(30_000)]).sha256
    assert load_corpus(texts(), limit=3, seed=None).items[2] == "text 2"


def test_parts_of_texts_that_a_program_gives_do_not_pile_up_in_memory():
    corpus = load_corpus(f"{i} {'word ' * 100}" for i in range(20_000))
    parts = [corpus.items[start : start + 500] for start in range(0, len(corpus), 500)]
    tracemalloc.start()
    assert [part[0].split()[0] for part in parts] == [
        str(start) for start in range(0, len(corpus), 500)
    ]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Of 10 MB.
    assert held < 1e6


STREAM = """
from pathlib import Path
from analysis_lib import load_corpus

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

load_corpus(str(i) for i in range(1000))
Path("/proc/self/clear_refs").write_text("5")  # The peak so far is that of the imports.
before = peak()
corpus = load_corpus(f"{number} " + 1000 * "x" for number in range(100_000))
groups, digest = corpus.groups(20), corpus.sha256
print(len(corpus), peak() - before)
"""


def test_a_hundred_thousand_texts_take_no_memory_of_their_own():
    """They are 100 MB; what is remembered of each is its group."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM], capture_output=True, text=True, check=True
    )
    count, kilobytes = map(int, done.stdout.split())
    assert count == 100_000
    assert kilobytes < 30_000


def errors(name: str, dtype: torch.dtype) -> dict[str, float]:
    """How far the tables of a model in half precision lie from those of the same weights in
    float32.

    In each table's root mean square.
    """
    half, reads = tiny.build(name)
    half = half.to(dtype)
    models = half, copy.deepcopy(half).float()
    found, wanted = (measure(model, TEXTS, processor=reads, progress=False) for model in models)
    numbers = ("cosine", "similarity", "mean", "entropy_nats", "weight", "contribution")
    pairs = {
        f"{table} {number}": (found[table][number].to_numpy(), wanted[table][number].to_numpy())
        for table in found
        for number in numbers
        if number in found[table] and len(found[table])
    }
    return {
        name: np.abs(half - full).max() / np.sqrt(np.mean(full**2))
        for name, (half, full) in pairs.items()
    }


@pytest.mark.parametrize("name", ["bert", "mpnet", "deberta-v3", "gpt2", "llama", "qwen3"])
def test_half_precision_costs_its_rounding_and_no_more(name):
    """bfloat16 has three bits less than float16: what is rounding shrinks by eight, and a mistake
    of ours would not.
    """
    coarse, fine = errors(name, torch.bfloat16), errors(name, torch.float16)
    assert len(coarse) > 8
    for number, error in fine.items():
        assert error < 0.02, number
        assert error < 0.5 * coarse[number] + 0.001, number


def test_the_precisions_have_names(tmp_path):
    for part in tiny.build("bert"):
        part.save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(AnalysisError, match="give one of float32, float64, bfloat16, float16"):
        load_model(tmp_path, dtype="float8")


def test_the_metric_of_ones_own_that_the_book_shows_runs(bert):
    page = Path(__file__).parents[2] / "book" / "using" / "program.md"
    (code,) = re.findall(
        r"```python\n(from analysis_lib import measure, metrics.*?)\nmeasure\(",
        page.read_text(),
        re.DOTALL,
    )
    space = {}
    exec(code, space)
    model = load_model(bert[0], processor=bert[1])
    norms = measure(model, TEXTS, "mean_vector", progress=False)["mean_vector"].query(
        "space == 'hidden'"
    )["mean_norm"]
    shares = [
        measure(model, TEXTS, [space["LongVectors"](bound)], progress=False)["long_vectors"]
        for bound in (0, 1e9)
    ]
    assert [table["share"].unique().tolist() for table in shares] == [[1.0], [0.0]]
    assert len(shares[0]) == len(norms)
    between = measure(model, TEXTS, [space["LongVectors"](norms.mean())], progress=False)[
        "long_vectors"
    ]
    assert between["share"].between(0, 1).all()
    assert (between["ci_low"] <= between["share"]).all()


def test_the_lines_that_the_first_page_shows_run(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "book" / "index.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for part in tiny.build("bert"):
        part.save_pretrained(tmp_path / "path" / "to" / "model")
    pd.DataFrame({"text": TEXTS}).to_csv(tmp_path / "texts.csv")
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(code, space)
    assert len(space["tables"]["anisotropy"].query("space == 'hidden'")) == 4


# --- As others leave them
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_whose_weights_lie_elsewhere_until_they_are_used(bert, expected, where, tmp_path):
    model = copy.deepcopy(bert[0])
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    found = measure(model, TEXTS, "anisotropy", tokenizer=bert[1], progress=False)["anisotropy"]
    pd.testing.assert_frame_equal(found, expected)
    assert load_model(model, processor=bert[1]).model.device.type == "meta"


def test_a_body_whose_encoder_bears_the_name_of_a_body():
    """As in DINOv3."""
    config = transformers.DINOv3ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    )
    model = transformers.DINOv3ViTModel(config).eval()
    _, processor = tiny.build("vit")
    loaded = load_model(model, processor=processor)
    assert loaded.model is model
    measure(loaded, tiny.corpus("vit"), "anisotropy", progress=False)


def test_a_part_of_a_listed_architecture_alone():
    whole, processor = tiny.build("whisper")
    found, expected = (
        measure(model, tiny.corpus("whisper"), "anisotropy", processor=reads, progress=False)[
            "anisotropy"
        ]
        for model, reads in (
            (whole.encoder, getattr(processor, "feature_extractor", processor)),
            (whole, processor),
        )
    )
    both = found.merge(expected, on=["space", "layer", "head"])
    hidden = both.query("space == 'hidden'")
    np.testing.assert_allclose(hidden["cosine_x"], hidden["cosine_y"], rtol=1e-4)
    assert len(hidden) > 2


def test_a_mixture_of_experts_in_float64():
    model = transformers.Qwen3MoeModel(
        transformers.Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=12,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
        )
    ).eval()
    tokenizer = tiny.tokenizer("llama")
    single = measure(model, TEXTS, "anisotropy", tokenizer=tokenizer, progress=False)["anisotropy"]
    model = model.double()
    before = model.get_experts_implementation()
    double = measure(model, TEXTS, "anisotropy", tokenizer=tokenizer, progress=False)["anisotropy"]
    np.testing.assert_allclose(single["cosine"], double["cosine"], atol=1e-5)
    assert model.get_experts_implementation() == before
