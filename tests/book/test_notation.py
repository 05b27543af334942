"""The lines of Python on the notation page compute what the library computes: one text, one head,
by transformers.
"""

import math
import re
from pathlib import Path

import composite
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import tiny
import torch
import transformers

from analysis_lib import load_corpus, load_model, measure, metrics, similarity

PAGE = Path(__file__).parents[2] / "book" / "notation.md"
TEXT = tiny.TEXTS[4]
ROTARY = ("rotary_pairs", "qk_alignment_unrotated")
# Predicting tokens takes a model that does; what an intervention changes takes one; what is before
# rotation, one that rotates; the similarity of two models, both.
OTHERS = ("next_token_loss", "masked_token_loss", "output_change", "representation_similarity")
# What is of pictures has no rows of a text.
OTHERS += ("attention_by_patch", "pair_cosine")
OF_ANY_MODEL = [name for name in metrics.METRICS if name not in (*OTHERS, *ROTARY)]


def _lines(section: str) -> str:
    part = re.split(
        r"\n#{2,3} ", PAGE.read_text(encoding="utf-8").partition(f"\n### `{section}`\n")[2]
    )[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL))


@pytest.fixture(scope="module")
def given():
    """What the page's lines speak of, for layer 1 and head 2 of a tiny BERT, in float64."""
    model, tokenizer = tiny.build("bert")
    model = model.double().eval()
    model.config._attn_implementation = "eager"
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True, output_attentions=True)
        attention = model.encoder.layer[0].attention.self
        hidden, head = (
            out.hidden_states[0][0],
            slice(attention.attention_head_size, 2 * attention.attention_head_size),
        )
        projections = attention.query, attention.key, attention.value
        queries, keys, values = (part(hidden)[:, head] for part in projections)
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    weight = torch.nn.Parameter(attention.key.weight[head])
    names = {
        **{
            "vectors": hidden,
            "hidden": hidden,
            "N": len(hidden),
            "d": hidden.shape[1],
            "inputs": hidden,
        },
        **{
            "queries": queries,
            "keys": keys,
            "values": values,
            "weights": out.attentions[0][0, 1],
            "torch": torch,
            "math": math,
        },
        "units_by_text": [hidden / hidden.norm(dim=-1, keepdim=True)],
        "unit": hidden / hidden.norm(dim=-1, keepdim=True),
        "of_type": torch.tensor([word in ",." for word in words]),
        "ids": inputs["input_ids"][0],
        "inside": torch.isin(torch.arange(len(queries)), torch.arange(4, 8)),
        "key_projection": type("Projection", (), {"weight": weight.detach()}),
    }
    tables = dict(measure(model, [TEXT], OF_ANY_MODEL, tokenizer=tokenizer))
    rotary, reads = tiny.build("qwen3")
    return names, tables | dict(measure(rotary, [TEXT], ROTARY, tokenizer=reads))


# Which row the lines compute, where that is not the one of the first layer, and of the second head.
ROWS = {
    "attention_by_token_type": "layer == 1 and head == 2 and key_type == 'punct'",
    "norms_by_type": "space == 'hidden' and layer == 0 and token_type == 'punct'",
    "value_weighted_attention": "layer == 1 and head == 2 and key_type == 'punct'",
    "largest_logits": "layer == 1 and head == 2 and query_type == key_type == 'punct'",
    "resultant_by_position": (
        "space == 'query' and layer == 1 and head == 2 and from_position == 4"
    ),
}
# Those whose lines give no single row: tests of their own follow.
OF_MANY_ROWS = {
    "cosine_by_dimension",
    "dimension_means",
    "outlier_dimensions",
    "score_contributions",
    "attention_received",
}


@pytest.mark.parametrize(
    "name", [name for name in OF_ANY_MODEL if _lines(name) and name not in OF_MANY_ROWS]
)
def test_the_lines_of_a_table(given, name):
    names, table = dict(given[0]), given[1][name]
    exec(_lines(name), names)
    usual = "space == 'hidden' and layer == 0" if "space" in table else "layer == 1 and head == 2"
    (row,) = table.query(ROWS.get(name, usual)).to_dict("records")
    columns = [column for column in row if column in names]
    assert columns
    for column in columns:
        assert float(names[column].mean()) == pytest.approx(row[column], rel=1e-6), column


@pytest.mark.parametrize("name", ROTARY)
def test_the_lines_of_a_table_before_rotation(given, name):
    """Layer 1 and head 2 of a tiny Qwen3, in which two heads of queries share one of keys."""
    model, tokenizer = tiny.build("qwen3")
    model = model.double().eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    block = model.layers[0]
    attention = block.self_attn
    with torch.no_grad():
        read = block.input_layernorm(model.embed_tokens(ids))
        queries = attention.q_norm(attention.q_proj(read).unflatten(-1, (4, -1)))[0, :, 1]
        keys = attention.k_norm(attention.k_proj(read).unflatten(-1, (2, -1)))[0, :, 0]
    pairs = queries.shape[1] // 2
    angles = torch.outer(torch.arange(len(queries)), 1e4 ** -(torch.arange(pairs) / pairs))
    names = {
        "torch": torch,
        "unrotated_queries": queries,
        "unrotated_keys": keys,
        "query_pairs": torch.complex(*queries.split(pairs, 1)),
        "key_pairs": torch.complex(*keys.split(pairs, 1)),
        "turn": torch.exp(1j * angles.double()),
    }
    exec(_lines(name), names)
    rows = given[1][name].query("layer == 1 and head == 2")
    columns = [column for column in rows if column in names]
    assert len(columns) == (2 if name == "qk_alignment_unrotated" else 6)
    for column in columns:
        values = np.atleast_1d(names[column])
        np.testing.assert_allclose(values, rows[column], rtol=1e-4, atol=1e-6, err_msg=column)


@pytest.mark.parametrize(
    ("section", "table", "name", "column", "rows"),
    [
        (
            "dimension_means",
            "dimension_means",
            "mean",
            "mean",
            "layer == 0 and token_type == 'punct'",
        ),
        (
            "score_contributions",
            "score_contributions",
            "mean",
            "contribution",
            "layer == 1 and head == 2 and key_type == 'all'",
        ),
        (
            "cosine_by_dimension",
            "cosine_by_dimension",
            "parts",
            "cosine",
            "space == 'hidden' and layer == 0",
        ),
    ],
)
def test_the_lines_of_a_table_by_dimension(given, section, table, name, column, rows):
    names, tables = dict(given[0]), given[1]
    exec(_lines(section), names)
    np.testing.assert_allclose(names[name], tables[table].query(rows)[column], rtol=1e-5, atol=1e-9)
    if "contributions" in names:
        np.testing.assert_allclose(names["contributions"].mean((0, 1)), names["mean"], rtol=1e-9)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The similarity of two tiny BERTs, and the vectors X and Y of one pair of their layers."""
    folder = tmp_path_factory.mktemp("two")
    states = []
    for seed, name in enumerate("XY"):
        path = tiny.save(folder / name, "bert", seed, hidden_size=8)
        model = transformers.AutoModel.from_pretrained(path).double().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        with torch.no_grad():
            read = model(**tokenizer(TEXT, return_tensors="pt"), output_hidden_states=True)
        states.append(read.hidden_states[1][0])
    models = [load_model(folder / name, dtype="float64") for name in "XY"]
    return states, similarity(*models, [TEXT], progress=False)["representation_similarity"]


def test_the_lines_of_the_similarity_of_two_models(of_two):
    (x, y), table = of_two
    names = {"X": x, "Y": y, "torch": torch}
    exec(_lines("representation_similarity"), names)
    values = table.query("layer == 1 and other_layer == 1").set_index("measure")["value"]
    for name, value in values.items():
        assert float(names[name]) == pytest.approx(value, abs=1e-9), name
    assert len(values) == 3


@pytest.fixture(scope="module")
def of_picture():
    """A table of patches."""
    model, picture = load_model("digits-vit"), load_corpus("digits", limit=1)
    return measure(model, picture, "attention_by_patch", progress=False)["attention_by_patch"]


@pytest.fixture(scope="module")
def of_pairs():
    """Vectors of pictures and of texts at unit length, by a tiny CLIP, and the table."""
    model, processor = composite.build("clip")
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(3)]
    both = [], []
    for picture, text in zip(pictures, tiny.TEXTS, strict=False):
        with torch.no_grad():
            output = model(**processor(images=picture, text=text, return_tensors="pt"))
        for made, vectors in zip(both, (output.image_embeds, output.text_embeds), strict=True):
            made.append(vectors[0].double())
    pairs = pd.DataFrame({"image": pictures, "text": tiny.TEXTS[:3]})
    table = measure(model, pairs, "pair_cosine", processor=processor, progress=False)
    return [torch.stack(made) for made in both], table["pair_cosine"]


def test_the_lines_of_the_cosine_of_pairs(of_pairs):
    (u, v), table = of_pairs
    names = {"u": u, "v": v}
    exec(_lines("pair_cosine"), names)
    for name, value in table.set_index("measure")["value"].items():
        assert float(names[name]) == pytest.approx(value, abs=1e-6), name
    assert len(table) == 4


@pytest.mark.parametrize("name", metrics.METRICS)
def test_every_table_has_its_section_with_its_columns(given, of_two, of_picture, of_pairs, name):
    sections = re.split(r"\n(?=#{2,3} )", PAGE.read_text(encoding="utf-8"))
    (section,) = [text for text in sections if f"`{name}`" in text.partition("\n")[0]]
    tables = {**given[1], "representation_similarity": of_two[1]}
    tables["attention_by_patch"] = of_picture
    tables["pair_cosine"] = of_pairs[1]
    columns = tables[name] if name in tables else metrics.METRICS[name].columns
    explained = {*re.findall(r"`(\w+)`", section)}
    assert {*columns} <= explained
    module = metrics.METRICS[name].__module__.removeprefix("analysis_lib.")
    assert f"`{module.replace('.', '/')}.py`" in section


def test_the_lines_of_outlier_dimensions(given):
    names = dict(given[0])
    exec(_lines("outlier_dimensions"), names)
    size = names["hidden"].mean(0).abs().numpy()
    np.testing.assert_allclose(names["zscore"], scipy.stats.zscore(size), rtol=1e-9)


def test_the_lines_of_the_jackknife():
    values = np.random.default_rng(0).normal(size=20)
    names = {"np": np, "scipy": scipy, "G": 20, "value": values.mean(), "statistic": np.mean}
    names["tables_without_group"] = lambda group: np.delete(values, group)
    text = PAGE.read_text(encoding="utf-8").partition("\n## Confidence intervals\n")[2]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    wanted = scipy.stats.t.interval(0.95, 19, values.mean(), scipy.stats.sem(values))
    assert (names["low"], names["high"]) == pytest.approx(wanted)
