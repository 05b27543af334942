"""The similarity of two models, against kernels of n x n entries made from what transformers gives
out.
"""

import json

import numpy as np
import pandas as pd
import pytest
import scipy
import tiny
import torch
import transformers

from analysis_lib import AnalysisError, compare, load_corpus, load_model, measure, similarity
from analysis_lib.capture.paired import word_numbers
from analysis_lib.cli import main
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.representation_similarity import RepresentationSimilarity as of_layers

TEXTS = [
    *tiny.TEXTS,
    "The first token draws attention, it seems.",
    "Queries, keys and layers point one way.",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two BERTs with one tokenizer and other weights, and a GPT-2 with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("pair")
    kinds = ("bert", "bert", "gpt2")
    return [tiny.save(folder / str(seed), kind, seed) for seed, kind in enumerate(kinds)]


def loaded(folder):
    return load_model(folder, dtype="float64")


def hidden_states(folder, text):
    """Layer x token x width, as transformers documents it, without hooks of ours."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).double().eval()
    blocks = [*next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))]
    outputs = []
    hooks = [blocks[0].register_forward_pre_hook(lambda _, given: outputs.append(given[0]))]
    for block in blocks:
        hooks.append(block.register_forward_hook(lambda _, given, out: outputs.append(out)))
    with torch.no_grad():
        model(**tokenizer(text, return_tensors="pt"))
    states = [out[0] if isinstance(out, tuple) else out for out in outputs]
    return np.stack([state[0].numpy() for state in states])


def kernel_cka(x, y):
    """Debiased CKA by U-centred kernels (Szekely and Rizzo 2014), n x n."""

    def centred(values):
        kernel = values @ values.T
        n = len(kernel)
        np.fill_diagonal(kernel, 0)
        rows = kernel.sum(0) / (n - 2)
        kernel = kernel - rows[:, None] - rows[None] + kernel.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(kernel, 0)
        return kernel

    k, m = centred(x), centred(y)
    return (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())


def procrustes(x, y):
    """The squared distance after the rotation that scipy finds."""
    x, y = (values - values.mean(0) for values in (x, y))
    x, y = (values / np.linalg.norm(values) for values in (x, y))
    width = max(x.shape[1], y.shape[1])
    x, y = (np.pad(values, ((0, 0), (0, width - values.shape[1]))) for values in (x, y))
    rotation, _ = scipy.linalg.orthogonal_procrustes(x, y)
    return np.square(x @ rotation - y).sum()


def explained(x, y):
    x, y = (values - values.mean(0) for values in (x, y))
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    return 1 - np.square(y - x @ solution).sum() / np.square(y).sum()


def expected(first, other):
    """By (layer, other layer), the three measures, from vectors layer x vector x width."""
    rows = {}
    for layer, x in enumerate(first):
        for other_layer, y in enumerate(other):
            rows[layer, other_layer] = kernel_cka(x, y), procrustes(x, y), explained(x, y)
    return rows


def measured(table):
    wide = table.pivot(index=["layer", "other_layer"], columns="measure", values="value")
    return {index: tuple(row) for index, row in zip(wide.index, wide.to_numpy(), strict=True)}


def assert_alike(table, rows):
    got = measured(table)
    assert got.keys() == rows.keys()
    for places, numbers in rows.items():
        np.testing.assert_allclose(got[places], numbers, atol=2e-10)


def all_tokens(folder, texts):
    return np.concatenate([hidden_states(folder, text) for text in texts], 1)


def test_the_same_tokens_are_compared_token_by_token(pair):
    first, other, _ = pair
    tables = similarity(loaded(first), loaded(other), TEXTS, progress=False)
    assert tables.run["compared_by"] == "token"
    rows = expected(all_tokens(first, TEXTS), all_tokens(other, TEXTS))
    assert_alike(tables["representation_similarity"], rows)


def test_a_model_equals_itself_and_any_rotation_of_it(pair):
    model = loaded(pair[0])
    tables = similarity(model, model, TEXTS, progress=False)
    table = tables["representation_similarity"]
    same = table[table["layer"] == table["other_layer"]].set_index("measure")["value"]
    np.testing.assert_allclose(same["cka"], 1, atol=1e-10)
    np.testing.assert_allclose(same["procrustes"], 0, atol=1e-10)
    np.testing.assert_allclose(same["r2"], 1, atol=1e-8)


def by_word(folder, text):
    """The mean vector of each word that white space divides, from offsets alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    states = hidden_states(folder, text)
    words = {}
    start = 0
    for word in text.split():
        start = text.index(word, start)
        end = start + len(word)
        places = []
        for index, (begin, stop) in enumerate(spans):
            letters = [at for at in range(begin, stop) if not text[at].isspace()]
            if letters and start <= letters[0] < end:
                places.append(index)
        if places:
            words[start] = states[:, places].mean(1)
        start = end
    return words


def test_other_tokens_are_compared_word_by_word(pair):
    first, _, other = pair
    tables = similarity(loaded(first), loaded(other), TEXTS, progress=False)
    assert tables.run["compared_by"] == "word"
    vectors = ([], [])
    for text in TEXTS:
        of_both = [by_word(folder, text) for folder in (first, other)]
        for start in of_both[0]:
            if start in of_both[1]:
                for words, kept in zip(of_both, vectors, strict=True):
                    kept.append(words[start])
    rows = expected(*(np.stack(kept, 1) for kept in vectors))
    assert_alike(tables["representation_similarity"], rows)


def test_intervals_leave_out_one_group_at_a_time(pair):
    first, other, _ = pair
    corpus = load_corpus(TEXTS)
    tables = similarity(loaded(first), loaded(other), corpus, metric=of_layers([3]), progress=False)
    table = tables["representation_similarity"].set_index(["other_layer", "measure"])
    groups = np.array(corpus.groups(GROUPS))
    left_out = []
    for group in sorted({*groups}):
        kept = [text for text, of in zip(TEXTS, groups, strict=True) if of != group]
        x, y = (all_tokens(folder, kept) for folder in (first, other))
        left_out.append([kernel_cka(x[3], y[1]), explained(x[3], y[1])])
    for measure_, values in zip(("cka", "r2"), np.transpose(left_out), strict=True):
        value, low, high = table.loc[(1, measure_), ["value", "ci_low", "ci_high"]]
        count = len(values)
        error = np.sqrt((count - 1) / count * np.square(values - values.mean()).sum())
        reach = scipy.stats.t.ppf(0.975, count - 1) * error
        bias = np.clip((count - 1) * (values.mean() - value), -error, error)
        lowest = {"cka": -1, "r2": 0}[measure_]
        centre = value - bias
        expected_ends = np.clip([centre - reach, centre + reach], lowest, 1)
        np.testing.assert_allclose([low, high], expected_ends, atol=1e-9)


def test_independent_vectors_have_a_debiased_cka_of_zero():
    """Where the biased one is far from it: 60 vectors of 40 dimensions."""
    generator = np.random.default_rng(0)
    draws = [kernel_cka(*generator.normal(size=(2, 60, 40))) for _ in range(40)]
    assert abs(np.mean(draws)) < 3 * np.std(draws) / np.sqrt(40)


def test_pictures_are_compared_picture_by_picture(tmp_path):
    for name in ("a", "b"):
        tiny.save(tmp_path / name, "vit")
    corpus = tiny.corpus("vit")
    tables = similarity(tmp_path / "a", tmp_path / "b", corpus, progress=False)
    table = tables["representation_similarity"]
    assert tables.run["compared_by"] == "item"
    assert {*table["vectors"]} == {len(corpus)}


def test_each_token_is_in_the_word_where_it_begins(pair):
    model = loaded(pair[2])
    text = "Attention, attention  it seems."
    [numbers] = word_numbers(model, [text])
    tokens = model.tokenizer.convert_ids_to_tokens(model.tokenizer(text)["input_ids"])
    in_words = [""] * 4
    for token, number in zip(tokens, numbers, strict=True):
        if number >= 0:
            in_words[number] += token.replace("Ġ", "")
    assert in_words == text.split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": [9]}, "has no layer 9"),
        ({"layers": []}, "layers is empty"),
        ({"other_layers": [-1]}, "a layer"),
    ],
)
def test_what_cannot_be_compared_is_refused(pair, arguments, words):
    with pytest.raises(AnalysisError, match=words):
        similarity(pair[0], pair[1], TEXTS, metric=of_layers(**arguments), progress=False)


def test_models_that_read_other_kinds_are_refused(pair, tmp_path):
    tiny.save(tmp_path, "vit")
    with pytest.raises(AnalysisError, match="give two models that read the same"):
        similarity(pair[0], tmp_path, TEXTS, progress=False)


def test_one_model_alone_has_no_similarity(pair):
    with pytest.raises(AnalysisError, match="compares two models"):
        measure(pair[0], TEXTS, "representation_similarity", progress=False)


def test_compare_gives_the_table_beside_others(pair, tmp_path):
    first, other, _ = map(str, pair)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    names = "anisotropy,representation_similarity"
    both = compare({str(data): [first, other]}, names, twins=0, progress=False)
    assert [*both] == names.split(",")
    table = both["representation_similarity"]
    assert {*table["model"]} == {both.titles[first]}
    assert {*table["compared_with"]} == {both.titles[other]}
    alone = compare({str(data): [first, other]}, "representation_similarity", progress=False)
    assert alone["representation_similarity"].equals(table)
    whole = similarity(first, other, data, progress=False)["representation_similarity"]
    assert whole.equals(table[whole.columns])


def test_the_command_writes_the_table_of_two_models(pair, tmp_path):
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    out = tmp_path / "out"
    models = [*map(str, pair[:2])]
    given = ["--data", str(data), "--metrics", "representation_similarity", "--out", str(out)]
    assert main(["compare", *models, *given, "--format", "csv", "--quiet"]) == 0
    table = pd.read_csv(out / "representation_similarity.csv")
    whole = similarity(*models, data, progress=False)["representation_similarity"]
    np.testing.assert_allclose(table["value"], whole["value"], atol=1e-12)
    run = json.loads((out / "run.json").read_text())
    assert run["pairs"][0]["compared_by"] == "token"
    assert [*run["tables"]] == ["representation_similarity"]


def test_compare_refuses_one_model_and_settings_that_would_be_ignored(pair, tmp_path):
    first, other, _ = map(str, pair)
    corpus = str(tmp_path / "texts.txt")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    with pytest.raises(AnalysisError, match="compares two models"):
        compare({corpus: [first]}, "representation_similarity", progress=False)
    with pytest.raises(AnalysisError, match="long_texts"):
        compare(
            {corpus: [first, other]},
            "representation_similarity",
            long_texts="window",
            progress=False,
        )


def test_vectors_that_are_not_finite_name_the_layer(pair, tmp_path):
    model = transformers.AutoModel.from_pretrained(pair[1])
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[0] = 1e38
        model.encoder.layer[1].output.LayerNorm.weight[:] = 1e38
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(pair[1]).save_pretrained(tmp_path)
    with pytest.raises(AnalysisError, match="layer 2 has"):
        similarity(pair[0], tmp_path, TEXTS, progress=False)
