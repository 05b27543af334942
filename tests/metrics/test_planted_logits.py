"""Resultant lengths of rotated pairs, and largest logits, where they are known."""

import numpy as np
import pytest
import tiny
import torch
from clouds import accumulated, activations_of

from analysis_lib import measure, metrics
from analysis_lib.metrics.sums import Maxima

TEXTS = list(tiny.TEXTS)
BASE = 100.0


def rotary_model(**changes) -> tuple:
    """A Qwen2 of two layers, whose queries of layer 1 are one constant bias for all tokens."""
    rope = {"rope_type": "default", "rope_theta": BASE}
    model, tokenizer = tiny.build("qwen2", rope_parameters=rope, **changes)
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.mul_(1e-6)
        # Heads 1 and 2 share the keys of a group, whose bias is that of the query of head 1.
        size = attention.head_dim
        attention.k_proj.bias.copy_(attention.q_proj.bias.unflatten(0, (4, size))[[0, 2]].flatten())
    return model.double(), tokenizer


def test_a_constant_query_has_resultant_one_before_and_the_known_mean_after():
    model, tokenizer = rotary_model()
    tables = measure(model, TEXTS, "rotary_pairs", tokenizer=tokenizer, progress=False)
    rows = tables["rotary_pairs"].query("layer == 1")
    pairs = rows["pair"].nunique()
    assert len(rows) == 4 * pairs
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    positions = np.concatenate([np.arange(length) for length in lengths])
    for row in rows.itertuples():
        theta = BASE ** -(row.pair / pairs)
        assert row.frequency == pytest.approx(theta, rel=1e-6)
        known = abs(np.exp(1j * theta * positions).mean())
        assert known < 0.999
        assert row.query_resultant == pytest.approx(1, abs=1e-12)
        assert row.query_resultant_rotated == pytest.approx(known, abs=1e-6)
        assert row.key_resultant == pytest.approx(1, abs=1e-6)
    assert rows.query("head in (1, 3)")["alignment"].to_numpy() == pytest.approx(1, abs=1e-6)
    bias = model.layers[0].self_attn.q_proj.bias.detach().numpy().reshape(4, 2, pairs)
    z = bias[:, 0] + 1j * bias[:, 1]
    wanted = np.cos(np.angle(z[1]) - np.angle(z[0]))
    np.testing.assert_allclose(rows.query("head == 2")["alignment"], wanted, atol=1e-5)


def test_the_mean_query_is_aligned_before_rotation_alone():
    model, tokenizer = rotary_model()
    wanted = ["qk_alignment", "qk_alignment_unrotated", "mean_vector", "anisotropy"]
    tables = measure(model, TEXTS, wanted, tokenizer=tokenizer, progress=False)
    heads = "layer == 1 and head in (1, 3)"
    before = tables["qk_alignment_unrotated"].query(heads)["cosine"]
    np.testing.assert_allclose(before, 1, atol=1e-9)
    cosine = tables["anisotropy"].query("layer == 1").groupby("space")["cosine"]
    np.testing.assert_allclose(cosine.get_group("query_unrotated"), 1, atol=1e-12)
    assert cosine.get_group("query").max() < 0.9
    norms = tables["mean_vector"].query("layer == 1").groupby("space")
    kept = {space: (rows["norm_of_mean"] / rows["mean_norm"]).mean() for space, rows in norms}
    assert kept["query_unrotated"] == pytest.approx(1)
    assert kept["query"] < 0.9


def test_a_constant_query_has_one_centre_before_rotation_and_the_known_one_after():
    model, tokenizer = rotary_model()
    tables = measure(model, TEXTS, "resultant_by_position", tokenizer=tokenizer, progress=False)
    rows = tables["resultant_by_position"].query("layer == 1").set_index("space")
    before, after = rows.loc["query_unrotated"], rows.loc["query"]
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    positions = np.concatenate([np.arange(length) for length in lengths])
    firsts = [0, 1, 2, 4, 8, 16, 32]
    assert max(lengths) in range(33, 64)
    assert before["from_position"].tolist() == after["from_position"].tolist() == 4 * firsts
    for column in ("resultant", "ci_low", "ci_high", "cosine_to_mean"):
        np.testing.assert_allclose(before[column].dropna(), 1, atol=1e-12)
    bias = model.layers[0].self_attn.q_proj.bias.detach().numpy().reshape(4, 2, -1)
    z = bias[:, 0] + 1j * bias[:, 1]
    turn = np.exp(1j * np.outer(positions, BASE ** -(np.arange(z.shape[1]) / z.shape[1])))
    for row in after.itertuples():
        inside = (positions >= row.from_position) & (positions < max(2 * row.from_position, 1))
        of_head = z[row.head - 1]
        mean, of_all = turn[inside].mean(0) * of_head, turn.mean(0) * of_head
        known = np.linalg.norm(mean) / np.linalg.norm(of_head)
        assert row.resultant == pytest.approx(known, rel=1e-6)
        cosine = (mean * of_all.conj()).sum().real / np.linalg.norm(mean) / np.linalg.norm(of_all)
        assert row.cosine_to_mean == pytest.approx(cosine, abs=1e-6)
        assert row.tokens == inside.sum()
        assert (known < 0.999) == (row.from_position > 1)


def test_resultants_by_hand():
    # Position 0 has (0, 2) in both texts; 1 has (3, 0) and (1, 0); 2 and 3 have (4, 0) and (0, 4).
    texts = [np.array([[0.0, 2], [3, 0], [4, 0], [0, 4]]), np.array([[0.0, 2], [1, 0]])]
    metric = accumulated(metrics.ResultantByPosition(), activations_of(texts, "query", [0, 1]))
    table = metric.table()
    assert table["from_position"].tolist() == [0, 1, 2]
    assert table["tokens"].tolist() == [2, 2, 2]
    np.testing.assert_allclose(table["resultant"], [1, 1, 0.5**0.5])
    # The sum of all is (8, 8).
    np.testing.assert_allclose(table["cosine_to_mean"], [0.5**0.5, 0.5**0.5, 1])
    # Only the first text has the last bin, so that nothing says how texts differ.
    assert table["ci_low"].isna().tolist() == [False, False, True]


def test_a_planted_logit_is_the_largest():
    """All queries of layer 1 are one vector, so that a key's logit is known without its query."""
    model, tokenizer = tiny.build("bert")
    model = model.double().eval()
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.query.weight.zero_()
    rows = measure(model, TEXTS, "largest_logits", tokenizer=tokenizer, progress=False)
    rows = rows["largest_logits"].query("layer == 1")
    largest = {}
    for text in TEXTS:
        read = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            keys = attention.key(model.embeddings(read["input_ids"]))[0].unflatten(-1, (2, -1))
        bias = attention.query.bias.unflatten(0, (2, -1))
        logits = (keys * bias).sum(-1) / bias.shape[1] ** 0.5
        words = tokenizer.convert_ids_to_tokens(read["input_ids"][0])
        for word, of_heads in zip(words, logits.tolist(), strict=True):
            kind = {"[CLS]": "cls", "[SEP]": "sep", ",": "punct", ".": "punct"}.get(word, "other")
            for head, logit in enumerate(of_heads, 1):
                largest.setdefault((head, kind), []).append(logit)
    # Types of queries make no difference, but that not every text has punctuation.
    others = rows[rows["query_type"] == "other"].set_index(["head", "key_type"])["logit"]
    assert len(others) == len(largest) == 8
    for (head, kind), logits in largest.items():
        assert others[head, kind] == pytest.approx(max(logits), rel=1e-9)


def test_masked_pairs_never_count():
    """The first token of a causal model sees itself alone, whatever the largest score is."""
    model, tokenizer = tiny.build("gpt2")
    rows = measure(model, TEXTS, "largest_logits", tokenizer=tokenizer, progress=False)
    rows = rows["largest_logits"]
    assert {*rows.query("query_type == 'first'")["key_type"]} == {"first"}
    assert rows["logit"].abs().max() < 1e6


def test_parts_merge_to_the_largest():
    """Whole, in batches of one text, and by two workers' order of merging."""
    model, tokenizer = tiny.build("gpt2")
    given = {"tokenizer": tokenizer, "progress": False}
    whole = measure(model, TEXTS, "largest_logits", **given)["largest_logits"]
    single = measure(model, TEXTS, "largest_logits", tokens_per_batch=1, **given)["largest_logits"]
    keys = ["layer", "head", "query_type", "key_type"]
    assert single[keys].equals(whole[keys])
    np.testing.assert_allclose(single["logit"], whole["logit"], rtol=1e-5)
    halves = [
        measure(model, part, "largest_logits", **given)["largest_logits"].set_index(keys)["logit"]
        for part in (TEXTS[:4], TEXTS[4:])
    ]
    larger = halves[0].combine(halves[1], np.fmax)
    np.testing.assert_allclose(
        whole.set_index(keys)["logit"],
        larger.loc[[*zip(*map(whole.get, keys), strict=True)]],
        rtol=1e-5,
    )


def test_maxima_keep_the_largest_and_what_is_no_number():
    maxima = Maxima()
    for values in ([[1.0, -3.0], [0.0, -2.0]], [[-1.0, -5.0]]):
        maxima.add(("logit", 1), torch.tensor(values))
    assert maxima["logit", 1].values.tolist() == [[1.0, -2.0]]
    again = Maxima(maxima.arrays())
    again.add(("logit", 1), torch.tensor([[2.0, float("nan")]]))
    first, second = again.arrays()["logit", 1].values[0]
    assert first == 2
    assert np.isnan(second)
