"""What keys receive and how long vectors are, against naive float64; sinks and spikes that were
planted.
"""

import numpy as np
import pytest
import scipy
import tiny
import torch
from clouds import CLS, OTHER, SEP, accumulated, activations_of, seeds, tokens_of
from hypothesis import given

from analysis_lib import load_corpus, measure, metrics
from analysis_lib.capture import Activations, AttentionWeights, Block, Visibility
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.metrics.attention import SINK
from analysis_lib.metrics.norms import BINS, GAP, norm_bins, separating_bin
from analysis_lib.metrics.slots import POSITIONS

COLUMNS = [
    "layer",
    "head",
    "position",
    "key_type",
    "received",
    "ci_low",
    "ci_high",
    "sink_rate",
    "keys",
]


def received_by_hand(model, tokenizer, texts: list[str], layer: int) -> list[np.ndarray]:
    """Of each text, head x key: the mean weight over the queries that see the key, pair by pair."""
    model = model.double().eval()
    model.config._attn_implementation = "eager"
    found = []
    for text in texts:
        with torch.no_grad():
            weights = model(
                **tokenizer(text, return_tensors="pt"), output_attentions=True
            ).attentions[layer - 1][0]
        heads, count, _ = weights.shape
        causal = float(weights[:, 0, 1:].sum()) == 0
        seen = [[m for m in range(count) if not causal or m >= n] for n in range(count)]
        found.append(
            np.array(
                [
                    [np.mean([weights[h, m, n] for m in seen[n]]) for n in range(count)]
                    for h in range(heads)
                ]
            )
        )
    return found


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "mpnet", "deberta"])
def test_received_is_that_of_the_pairs(architecture):
    model, tokenizer = tiny.build(architecture)
    eager = architecture in ("bert", "gpt2")
    # Of one text in which every query sees every key, what keys of a type receive is their weight.
    texts = list(tiny.TEXTS) if eager else list(tiny.TEXTS[4:5])
    by_hand = received_by_hand(model, tokenizer, texts, 2) if eager else []
    tables = measure(
        model.double(), texts, "attention_received,attention_by_token_type", tokenizer=tokenizer
    )
    table = tables["attention_received"]
    assert list(table.columns) == COLUMNS
    assert table["received"].between(0, 1).all()
    if not eager:
        weights = tables["attention_by_token_type"].set_index(["layer", "head", "key_type"])[
            "weight"
        ]
        of_types = table[table["position"].isna() & (table["key_type"] != "all")]
        joined = of_types.astype({"key_type": str}).set_index(["layer", "head", "key_type"])[
            "received"
        ]
        np.testing.assert_allclose(joined, weights, rtol=1e-9)
        return
    for head in (1, 2):
        rows = table.query("layer == 2 and head == @head")
        first = [part[head - 1][0] for part in by_hand]
        every = np.concatenate([part[head - 1] for part in by_hand])
        third = [part[head - 1][2] for part in by_hand if part.shape[1] > 2]
        for values, row in (
            (first, rows.query("position == 1")),
            (third, rows.query("position == 3")),
            (every, rows.query("position.isna() and key_type == 'all'")),
        ):
            assert row["received"].item() == pytest.approx(np.mean(values), rel=1e-9)
            assert row["sink_rate"].item() == np.mean(np.array(values) > SINK)
            assert row["keys"].item() == len(values)


def test_a_planted_sink_is_found():
    """Two texts of three and two tokens, in which every query gives the first key 0.9."""
    tokens = tokens_of([[CLS, OTHER, SEP], [CLS, SEP]])
    row = torch.tensor([[0.9, 0.2 / 3, 0.1 / 3], [0.9, 0.1, 0.0]], dtype=torch.float64)
    block = Block((slice(0, 2), slice(0, 1), slice(0, 3)), 3, row[:, None, None].expand(2, 1, 3, 3))
    attention = AttentionWeights(Visibility(tokens, tokens), 1, lambda: [block])
    layer = Activations(1, "blocks", "layer.0", tokens, attention=attention)
    table = accumulated(metrics.AttentionReceived(), layer).table()
    by_type = table[table["position"].isna()].set_index("key_type")
    assert by_type.loc["cls", ["received", "sink_rate", "keys"]].tolist() == pytest.approx(
        [0.9, 1, 2]
    )
    assert by_type.loc["all", "received"] == pytest.approx(
        (0.9 + 0.2 / 3 + 0.1 / 3 + 0.9 + 0.1) / 5
    )
    assert by_type.loc["all", "sink_rate"] == pytest.approx(2 / 5)
    assert table.loc[table["position"] == 1, "received"].item() == pytest.approx(0.9)


@given(seed=seeds)
def test_norms_are_those_of_numpy_to_a_bin(seed):
    rng = np.random.default_rng(seed)
    utterances = [
        rng.normal(size=(int(n), 5)) * 10 ** rng.uniform(-2, 3) for n in rng.integers(1, 12, 7)
    ]
    types = [[CLS, *[OTHER] * (len(part) - 1)] for part in utterances]
    table = accumulated(metrics.TokenNorms(), activations_of(utterances, types=types)).table()
    norms = [np.linalg.norm(part, axis=1) for part in utterances]
    row = table.query("token_type == 'all' and position.isna()").iloc[0]
    every = np.sort(np.concatenate(norms))
    assert row["median"] == pytest.approx(np.median(every), rel=0.011)
    assert row["largest"] == pytest.approx(every[-1], rel=0.0056)
    assert row["tokens"] == len(every)
    assert table.query("token_type == 'cls'")["largest"].item() == pytest.approx(
        max(n[0] for n in norms), rel=0.0056
    )


@pytest.mark.parametrize(
    "norms", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 1.0], [*np.linspace(1, 5, 20)], [3.0]]
)
def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two(norms):
    vectors = [np.array([[norm, 0.0]]) for norm in norms]
    table = accumulated(metrics.TokenNorms(), activations_of(vectors)).table()
    assert table.query("token_type == 'all' and position.isna()")["median"].item() == pytest.approx(
        np.median(norms), rel=0.011
    )


def median_by_hand(norms: np.ndarray) -> float:
    """The mean of the middle two, or the middle one twice, if the norms of a bin lie evenly in
    it.
    """
    bins = np.sort(np.floor(np.log2(norms) * 64))
    middle = []
    for rank in ((len(bins) - 1) // 2, len(bins) // 2):
        alike = np.flatnonzero(bins == bins[rank])
        inside = (rank - alike[0] + 0.5) / len(alike)
        middle.append(2 ** ((bins[rank] + inside) / 64))
    return np.mean(middle)


def test_the_median_has_the_interval_of_the_jackknife():
    rng = np.random.default_rng(0)
    utterances = [np.exp(rng.normal(3, 0.02, (40, 1))) for _ in range(60)]
    utterances[7][3] = 1e4
    groups = [i % 6 for i in range(60)]
    types = [[CLS, *[OTHER] * 39]] * 60
    batches = [
        activations_of(utterances[:13], groups=groups[:13], types=types[:13]),
        activations_of(utterances[13:], groups=groups[13:], types=types[13:]),
    ]
    metric = accumulated(metrics.TokenNorms(), *batches)
    row = metric.table().query("token_type == 'all' and position.isna()").iloc[0]
    whole = np.concatenate(utterances).ravel()
    left_out = [
        np.concatenate([u for u, g in zip(utterances, groups, strict=True) if g != n]).ravel()
        for n in range(6)
    ]
    medians = [median_by_hand(norms) for norms in left_out]
    reach = scipy.stats.t.ppf(0.975, 5) * np.sqrt(5 / 6 * np.sum((medians - np.mean(medians)) ** 2))
    found = [median_by_hand(whole) + sign * reach for sign in (0, -1, 1)]
    assert row[["median", "ci_low", "ci_high"]].tolist() == pytest.approx(found, rel=1e-9)
    # Closer to the median than a bin is wide.
    assert row["median"] == pytest.approx(np.median(whole), rel=1e-3)
    # What hangs on single tokens has no interval: it stays when they are left out.
    without = metric.without(7 % 6).query("token_type == 'all' and position.isna()").iloc[0]
    assert (without[["largest", "multiple"]] == row[["largest", "multiple"]]).all()
    assert (row["spikes"], without["spikes"], without["tokens"]) == (1, 0, 2000)


def test_the_interval_of_the_median_holds_it_in_95_of_100_corpora():
    """Of texts whose tokens are alike: each has its own scale, so that it counts like few
    tokens.
    """
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        norms = np.exp(rng.normal(0, 0.05, (400, 1)) + rng.normal(0, 0.05, (400, 5)))
        groups = [i // 20 for i in range(400)]
        table = accumulated(
            metrics.TokenNorms(), activations_of([*norms[:, :, None]], groups=groups)
        ).table()
        row = table.query("token_type == 'all' and position.isna()").iloc[0]
        held += row["ci_low"] <= 1 <= row["ci_high"]
    assert 88 <= held < 100


def test_models_are_compared_by_their_medians_with_an_interval(tiny_folder):
    names, texts = [str(tiny_folder("bert")), str(tiny_folder("gpt2"))], [*tiny.TEXTS] * 3
    runs = {(name, None): measure(name, texts, "token_norms", progress=False) for name in names}
    found = (
        Comparison(runs).differences("token_norms").query("token_type == 'all' and position.isna()")
    )
    first, other = (
        tables["token_norms"].query("token_type == 'all' and position.isna()")
        for tables in runs.values()
    )
    medians = found.query("quantity == 'median'").set_index("layer")
    expected = other.set_index("layer")["median"] - first.set_index("layer")["median"]
    np.testing.assert_allclose(medians["difference"], expected[medians.index])
    assert (medians["ci_low"] < medians["difference"]).all()
    assert (medians["difference"] < medians["ci_high"]).all()
    assert found.query("quantity != 'median'")[["ci_low", "ci_high"]].isna().all(axis=None)


def test_planted_spikes_are_found_with_their_dimension():
    rng = np.random.default_rng(0)
    utterances = [rng.normal(size=(9, 16)) for _ in range(30)]
    for vectors in utterances:
        vectors[0, 11] = 400 + rng.normal()
    types = [[CLS, *[OTHER] * 8]] * 30
    batches = [
        activations_of(utterances[:10], types=types[:10]),
        activations_of(utterances[10:], types=types[10:]),
    ]
    whole = accumulated(metrics.TokenNorms(), *batches)
    table = whole.table()
    every = table.query("token_type == 'all' and position.isna()").iloc[0]
    assert (every["spikes"], every["tokens"]) == (30, 270)
    norms = np.concatenate([np.linalg.norm(part[1:], axis=1) for part in utterances])
    assert norms.max() < every["multiple"] * np.median([*norms, *[400] * 30]) < 400 - 5
    assert table.query("token_type == 'cls'")["spikes"].item() == 30
    assert table.query("position == 1")["spikes"].item() == 30
    assert table.query("token_type == 'other'")["spikes"].item() == 0
    spikes = accumulated(metrics.SpikeDimensions(), *batches).table()
    assert spikes["dimension"].tolist() == [11]
    of_spikes = np.array([part[0] for part in utterances])
    assert spikes["share"].item() == pytest.approx(
        (of_spikes[:, 11] ** 2).sum() / (of_spikes**2).sum(), rel=1e-9
    )
    assert spikes["rms"].item() == pytest.approx(np.sqrt((of_spikes[:, 11] ** 2).mean()), rel=1e-9)
    merged = accumulated(metrics.TokenNorms(), batches[1])
    merged.merge(accumulated(metrics.TokenNorms(), batches[0]))
    assert merged.table().equals(table)


def test_without_a_gap_there_are_no_spikes():
    rng = np.random.default_rng(0)
    cloud = [rng.normal(size=(50, 30)) for _ in range(20)]
    table = accumulated(metrics.TokenNorms(), activations_of(cloud)).table()
    assert table["multiple"].isna().all()
    assert (table["spikes"] == 0).all()
    assert accumulated(metrics.SpikeDimensions(), activations_of(cloud)).table().empty


@given(seed=seeds)
def test_spikes_lie_beyond_the_median_and_a_gap(seed):
    rng = np.random.default_rng(seed)
    norms = np.sort(10 ** rng.uniform(-3, 5, int(rng.integers(1, 30))))
    counts = np.bincount(norm_bins(torch.tensor(norms)).numpy(), minlength=BINS)
    found = separating_bin(counts)
    if found is None:
        above = norms[(len(norms) - 1) // 2 :]
        assert (above[1:] / above[:-1] < GAP * 1.03).all()
    else:
        spikes = norms[len(norms) - counts[found:].sum() :]
        rest = norms[: len(norms) - len(spikes)]
        assert spikes.min() / rest.max() > GAP
        assert len(rest) > len(spikes) - 1


def test_a_zero_vector_is_no_token():
    table = accumulated(
        metrics.TokenNorms(), activations_of([np.array([[3.0, 4], [0, 0]])])
    ).table()
    row = table.query("token_type == 'all' and position.isna()").iloc[0]
    assert (row["tokens"], row["spikes"]) == (1, 0)
    assert row["median"] == pytest.approx(5, rel=0.0056)


def test_on_the_bundled_model(minilm):
    tables = measure(
        minilm,
        load_corpus("news", limit=20, seed=None),
        "attention_received,token_norms",
        progress=False,
    )
    table = tables["attention_received"]
    # Each text has one [CLS], at its first position.
    first = table.query("position == 1")[["layer", "head", "received", "sink_rate"]].reset_index(
        drop=True
    )
    cls = table.query("key_type == 'cls'")[["layer", "head", "received", "sink_rate"]].reset_index(
        drop=True
    )
    np.testing.assert_array_equal(first, cls)
    assert table["position"].max() == POSITIONS
