"""The metrics on clouds of vectors whose geometry is known, and the laws that they obey."""

import copy
import importlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from clouds import CLS, OTHER, PUNCT, SEP, accumulated, activations_of, repeatable, seeds, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from reference import COLUMNS, ON_REQUEST
from sklearn.metrics.pairwise import cosine_similarity
from tiny import TEXTS, build, items, kind

from analysis_lib import AnalysisError, LoadedModel, measure, metrics
from analysis_lib.capture import Activations, AttentionWeights, Block, ScoreSums, Tokens, Visibility
from analysis_lib.capture.vectors import Vectors
from analysis_lib.corpora import ArrayImage, Corpus
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.dimensions import magnitude_zscores
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.models import TOKEN_TYPES


def anisotropy_of(*utterances: np.ndarray) -> float:
    table = accumulated(metrics.Anisotropy(), activations_of(list(utterances))).table()
    return table["cosine"].item()


# --- By hand, in two dimensions -------------------------------------------------------------------

EAST, NORTH, WEST = np.array([2.0, 0.0]), np.array([0.0, 3.0]), np.array([-1.0, 0.0])


@pytest.mark.parametrize(
    ("vectors", "cosine"),
    [
        ([EAST, NORTH], 0),
        ([EAST, WEST], -1),
        ([EAST, EAST], 1),
        ([EAST, NORTH, WEST], -1 / 3),
        ([EAST, np.array([2.0, 2.0])], math.sqrt(0.5)),
    ],
)
def test_anisotropy_by_hand(vectors, cosine):
    assert anisotropy_of(np.array(vectors)) == pytest.approx(cosine, abs=1e-15)
    # Every pair of the corpus counts, not only those within an utterance.
    assert anisotropy_of(np.array(vectors[:1]), np.array(vectors[1:])) == pytest.approx(
        cosine, abs=1e-15
    )


def test_mean_vector_by_hand():
    table = accumulated(
        metrics.MeanVector(), activations_of([np.array([EAST, NORTH]), np.array([WEST])])
    ).table()
    assert table["mean_norm"].item() == pytest.approx(2)
    assert table["norm_of_mean"].item() == pytest.approx(math.hypot(1, 3) / 3)
    assert list(table.columns) == ["space", "layer", "head", "norm_of_mean", "mean_norm"]


def test_utterance_similarity_by_hand():
    """Each utterance counts once, however long; one of a single token does not count."""
    utterances = [np.array([EAST, NORTH, WEST]), np.array([EAST, EAST]), np.array([NORTH])]
    row = accumulated(metrics.UtteranceSimilarity(), activations_of(utterances)).table().iloc[0]
    assert row["similarity"] == pytest.approx((-1 / 3 + 1) / 2)
    assert row["utterances"] == 2


def test_qk_alignment_by_hand():
    activations = activations_of([np.array([EAST, NORTH])], "query")
    keys = activations_of([np.array([NORTH, NORTH])], "key")
    activations.spaces["key"] = Vectors(keys.spaces["key"].values, activations.tokens)
    row = accumulated(metrics.QueryKeyAlignment(), activations).table().iloc[0]
    assert row["dot"] == pytest.approx(1.5 * 3)
    assert row["cosine"] == pytest.approx(1.5 / math.hypot(1, 1.5))


def test_queries_of_a_group_meet_the_keys_they_share():
    activations = activations_of([np.array([[EAST], [NORTH], [WEST], [EAST]])], "query")
    keys = activations_of([np.array([[EAST], [NORTH]])], "key")
    activations.spaces["key"] = Vectors(keys.spaces["key"].values, activations.tokens)
    table = accumulated(metrics.QueryKeyAlignment(), activations).table()
    assert table["head"].tolist() == [1, 2, 3, 4]
    assert table["dot"].tolist() == [4, 0, 0, 0]
    assert table["cosine"].tolist() == [1, 0, 0, 0]


def test_dimension_means_by_hand():
    types = [[CLS, OTHER, SEP], [CLS, SEP]]
    utterances = [np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([[3.0, 2], [7, 8]])]
    table = accumulated(metrics.DimensionMeans(), activations_of(utterances, types=types)).table()
    found = {
        kind: rows.sort_values("dimension")["mean"].tolist()
        for kind, rows in table.groupby("token_type")
    }
    assert found == {"all": [3.8, 4.4], "cls": [2, 2], "other": [3, 4], "sep": [6, 7]}


def attention_of(weights: torch.Tensor, tokens: Tokens, causal: bool = False) -> Activations:
    """A layer of one text and one head whose queries give these weights to keys."""
    part = slice(0, 1), slice(0, 1), slice(0, len(weights))
    block = Block(part, len(weights), weights[None, None])
    entropy = torch.special.entr(weights).sum(-1)[None, None]
    mass = weights[None, None] @ tokens.type_masks.double().mT.unsqueeze(1)
    attention = AttentionWeights(
        Visibility(tokens, tokens, causal), 1, lambda: [block], entropy, mass
    )
    return Activations(1, "blocks", "layer.0", tokens, attention=attention)


def test_attention_by_token_type_and_entropy_by_hand():
    tokens = tokens_of([[CLS, OTHER, OTHER, SEP]])
    # Three rows at [CLS] alone, one spread evenly.
    weights = torch.tensor([[1.0, 0, 0, 0]] * 3 + [[0.25] * 4], dtype=torch.float64)
    activations = attention_of(weights, tokens)
    table = accumulated(metrics.AttentionByTokenType(), activations).table().set_index("key_type")
    assert table["mass"].to_dict() == {"cls": 3.25 / 4, "sep": 0.25 / 4, "other": 0.5 / 4}
    assert table["weight"].to_dict() == {"cls": 3.25 / 4, "sep": 0.25 / 4, "other": 0.25 / 4}
    assert table["uniform_mass"].to_dict() == {"cls": 0.25, "sep": 0.25, "other": 0.5}
    assert table["uniform_weight"].to_dict() == dict.fromkeys(("cls", "sep", "other"), 0.25)
    row = accumulated(metrics.AttentionEntropy(), activations).table().iloc[0]
    assert row["entropy_nats"] == pytest.approx(math.log(4) / 4)
    assert row["entropy_normalised"] == pytest.approx(1 / 4)


def test_attention_distance_by_hand():
    """Three queries look at the first key; one at all keys alike."""
    weights = torch.tensor([[1.0, 0, 0, 0]] * 3 + [[0.25] * 4], dtype=torch.float64)
    activations = attention_of(weights, tokens_of([[CLS, OTHER, OTHER, SEP]]))
    row = accumulated(metrics.AttentionDistance(), activations).table().iloc[0]
    assert row["distance"] == (0 + 1 + 2 + (3 + 2 + 1 + 0) / 4) / 4


def test_keys_that_are_other_tokens_have_no_distance():
    activations = attention_of(torch.eye(2).double(), tokens_of([[CLS, OTHER]]))
    activations.attention.visibility.keys = tokens_of([[CLS, OTHER]])
    with pytest.raises(AnalysisError, match=r"attention_distance: .* tokens of its queries"):
        accumulated(metrics.AttentionDistance(), activations).table()


def test_attention_to_same_word_by_hand():
    """The second token is there again, fourth; others look at themselves alone."""
    weights = torch.eye(5, dtype=torch.float64)
    weights[1] = torch.tensor([0, 0.25, 0, 0.75, 0])
    weights[3] = torch.tensor([0, 0.5, 0.25, 0.25, 0])
    of_characters = [[1, 0], [2, 3], [2, 4], [2, 3], [3, 2]]
    for ids, special_tokens, mass in (
        ([1, 2, 4, 2, 3], True, (0.75 + 0.5) / 5),
        ([1, 2, 4, 2, 3], False, (0.75 + 0.5) / 3),
        (of_characters, True, (0.75 + 0.5) / 5),
        ([1, 2, 3, 4, 5], True, 0),
    ):
        tokens = tokens_of([[CLS, OTHER, OTHER, OTHER, SEP]], special_tokens=special_tokens)
        tokens.ids = torch.tensor([ids])
        activations = attention_of(weights, tokens)
        row = accumulated(metrics.AttentionToSameWord(), activations).table().iloc[0]
        assert row["mass"] == pytest.approx(mass)


def test_tokens_without_ids_are_no_words():
    activations = attention_of(torch.eye(2).double(), tokens_of([[CLS, OTHER]]))
    with pytest.raises(AnalysisError, match=r"attention_to_same_word: .* have ids"):
        accumulated(metrics.AttentionToSameWord(), activations).table()


def test_rows_that_see_fewer_keys_are_held_to_their_own_number():
    """Causal attention, spread evenly: every row that has a choice is at its largest entropy."""
    weights = torch.tensor(
        [[1.0, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64
    )
    activations = attention_of(weights, tokens_of([[CLS, OTHER, OTHER]]), causal=True)
    row = accumulated(metrics.AttentionEntropy(), activations).table().iloc[0]
    assert row["entropy_nats"] == pytest.approx((math.log(2) + math.log(3)) / 3)
    assert row["entropy_normalised"] == pytest.approx(1)
    table = accumulated(metrics.AttentionByTokenType(), activations).table().set_index("key_type")
    assert table["mass"].to_dict() == pytest.approx({"cls": 11 / 18, "other": 7 / 18})
    assert table["weight"].to_dict() == pytest.approx({"cls": 11 / 18, "other": 7 / 18})
    # That is what even attention gives the first token under the mask.
    assert table["uniform_mass"].to_dict() == pytest.approx(table["mass"].to_dict())
    assert table["uniform_weight"].to_dict() == pytest.approx(table["weight"].to_dict())


def test_a_row_of_one_key_has_no_normalised_entropy():
    activations = attention_of(torch.ones(1, 1).double(), tokens_of([[CLS]]))
    table = accumulated(metrics.AttentionEntropy(), activations).table()
    assert table["entropy_nats"].item() == 0
    assert table["entropy_normalised"].isna().item()


def scores_of(query, inputs, weight, bias=None, types=None, causal: bool = False) -> ScoreSums:
    """The scores of one utterance: query heads x queries x d', inputs keys x dim, weight heads x d'
    x dim.
    """
    query, inputs, weight = (
        torch.as_tensor(part, dtype=torch.float64) for part in (query, inputs, weight)
    )
    bias = None if bias is None else torch.as_tensor(bias, dtype=torch.float64)
    queries = tokens_of([[OTHER] * query.shape[1]])
    keys = (
        queries
        if types is None and len(inputs) == query.shape[1]
        else tokens_of([types or [OTHER] * len(inputs)])
    )
    return ScoreSums(
        query[None],
        Vectors(inputs[None, None], keys),
        weight,
        bias,
        Visibility(queries, keys, causal),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_what_scores_are_made_of_by_hand(causal):
    """Queries 1 and 2; keys x · (1, -1) + 1/2 of x = (1, 0), of type cls, and x = (2, 3)."""
    scores = scores_of([[[1], [2]]], [[1, 0], [2, 3]], [[[1, -1]]], [[0.5]], [CLS, OTHER], causal)
    activations = Activations(1, "blocks", "layer.0", scores.visibility.queries, scores=scores)
    table = accumulated(metrics.ScoreContributions(), activations).table()
    found = {
        kind: rows["contribution"].tolist()
        for kind, rows in table.groupby("key_type", observed=True)
    }
    pairs = table.groupby("key_type", observed=True)["pairs"].first().to_dict()
    terms = accumulated(metrics.ScoreTerms(), activations).table()
    assert terms["pairs"].tolist() == [pairs[kind] for kind in terms["key_type"]]
    by_term = {
        term: dict(zip(t["key_type"], t["contribution"], strict=True))
        for term, t in terms.groupby("term")
    }
    if causal:
        # The first query does not see the second key.
        assert pairs == {"all": 3, "cls": 2, "other": 1}
        assert found == {"all": [7 / 3, -2], "cls": [1.5, 0], "other": [4, -6]}
        assert by_term["content"] == pytest.approx({"all": 1 / 3, "cls": 1.5, "other": -2})
        assert by_term["key_bias"] == pytest.approx({"all": 2.5 / 3, "cls": 0.75, "other": 1})
    else:
        assert pairs == {"all": 4, "cls": 2, "other": 2}
        assert found == {"all": [2.25, -2.25], "cls": [1.5, 0], "other": [3, -4.5]}
        assert by_term["content"] == {"all": 0, "cls": 1.5, "other": -1.5}
        assert by_term["key_bias"] == {"all": 0.75, "cls": 0.75, "other": 0.75}
    assert set(by_term) == {"content", "key_bias"}


def test_outlier_dimensions_are_above_three_standard_deviations():
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 0.1, 100)
    mean[[17, 60]] = -9.0, 5.0
    cloud = mean + rng.normal(0, 1, (40, 100))
    cloud += mean - cloud.mean(0)
    table = accumulated(metrics.OutlierDimensions(), activations_of([cloud])).table()
    assert table["dimension"].tolist() == [17, 60]
    np.testing.assert_allclose(table["mean"], [-9, 5])
    magnitude = np.abs(mean)
    expected = (magnitude[[17, 60]] - magnitude.mean()) / magnitude.std()
    np.testing.assert_allclose(table["zscore"], expected)


def test_no_outlier_gives_no_row():
    table = accumulated(metrics.OutlierDimensions(), activations_of([np.ones((3, 8))])).table()
    assert len(table) == 0
    assert list(table.columns) == ["layer", "dimension", "mean", "zscore"]


# --- Laws -----------------------------------------------------------------------------------------


@repeatable
@given(seeds, st.integers(2, 30), st.integers(1, 12))
def test_anisotropy_is_that_of_scikit_learn(seed, tokens, dim):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(tokens, dim)) + rng.normal(size=dim) * rng.choice([0, 0.1, 1, 10])
    cosines = cosine_similarity(vectors)
    expected = cosines[~np.eye(tokens, dtype=bool)].mean()
    assert anisotropy_of(vectors) == pytest.approx(expected, abs=1e-12)
    cut = int(rng.integers(0, tokens))
    if cut:
        assert anisotropy_of(vectors[:cut], vectors[cut:]) == pytest.approx(expected, abs=1e-12)


@repeatable
@given(seeds, st.integers(2, 20), st.integers(1, 12))
def test_anisotropy_does_not_change_under_rotation_and_scaling(seed, tokens, dim):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(tokens, dim)) + rng.normal(size=dim)
    rotation, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    scales = rng.uniform(1e-3, 1e3, size=(tokens, 1))
    assert anisotropy_of(vectors @ rotation * scales) == pytest.approx(
        anisotropy_of(vectors), abs=1e-12
    )


@repeatable
@given(seeds, st.integers(2, 40), st.integers(1, 5), st.floats(0, 100))
def test_anisotropy_lies_between_its_bounds(seed, tokens, dim, drift):
    rng = np.random.default_rng(seed)
    cosine = anisotropy_of(rng.normal(size=(tokens, dim)) + drift)
    assert -1 / (tokens - 1) - 1e-12 <= cosine <= 1 + 1e-12


@pytest.mark.parametrize("tokens", [2, 3, 7])
def test_the_lower_bound_is_reached_by_a_regular_polygon(tokens):
    angles = 2 * np.pi * np.arange(tokens) / tokens
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert mean_pair_cosine(vectors.sum(0)[None], np.array([float(tokens)]))[0] == pytest.approx(
        -1 / (tokens - 1)
    )


@pytest.mark.parametrize("degrees", [5, 30, 60, 85])
def test_a_cone_of_known_angle(degrees):
    """Vectors at an angle to an axis, in symmetric pairs around it: the cosine tends to the square
    of the angle's.
    """
    rng = np.random.default_rng(degrees)
    around = rng.normal(size=(500, 15))
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    around = np.concatenate([around, -around])
    angle = math.radians(degrees)
    cone = np.concatenate([np.full((1000, 1), math.cos(angle)), math.sin(angle) * around], axis=1)
    # Exactly, for the pairs of distinct vectors: (N cos² − 1) / (N − 1).
    expected = (1000 * math.cos(angle) ** 2 - 1) / 999
    assert anisotropy_of(cone * rng.uniform(0.1, 10, (1000, 1))) == pytest.approx(
        expected, abs=1e-12
    )


@repeatable
@given(seeds, st.integers(2, 40), st.integers(1, 6))
def test_mean_vector_is_no_longer_than_the_mean_norm(seed, tokens, dim):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(tokens, dim)) + rng.normal(size=dim)
    row = accumulated(metrics.MeanVector(), activations_of([vectors])).table().iloc[0]
    assert row["norm_of_mean"] == pytest.approx(np.linalg.norm(vectors.mean(0)))
    assert 0 <= row["norm_of_mean"] <= row["mean_norm"] + 1e-12


@repeatable
@given(seeds, st.integers(2, 60))
def test_zscores_average_zero_with_unit_variance(seed, dim):
    zscores = magnitude_zscores(np.random.default_rng(seed).normal(size=dim))
    assert zscores.mean() == pytest.approx(0, abs=1e-12)
    assert (zscores**2).mean() == pytest.approx(1)


@repeatable
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 8))
def test_contributions_of_a_pair_add_up_to_its_score_less_the_key_bias(
    seed, heads, head_dim, width
):
    rng = np.random.default_rng(seed)
    query, x = rng.normal(size=(heads, 1, head_dim)), rng.normal(size=(1, width))
    projection, bias = rng.normal(size=(heads, head_dim, width)), rng.normal(size=(heads, head_dim))
    scores = scores_of(query, x, projection, bias)
    score = (query[:, 0] * (projection @ x[0] + bias)).sum(-1)
    beside = (query[:, 0] * bias).sum(-1)
    assert scores.visibility.keys.kinds == [OTHER]
    np.testing.assert_allclose(scores.contributions.sum(-1)[0, :, 0], score - beside, atol=1e-12)
    np.testing.assert_allclose(scores.terms["content"][0, :, OTHER], score - beside, atol=1e-12)
    np.testing.assert_allclose(scores.terms["key_bias"][0, :, OTHER], beside, atol=1e-12)


@repeatable
@given(seeds, st.integers(1, 6), st.integers(1, 6))
def test_summed_contributions_are_the_sum_over_pairs(seed, queries, keys):
    rng = np.random.default_rng(seed)
    q, x, projection = (
        rng.normal(size=(queries, 3)),
        rng.normal(size=(keys, 4)),
        rng.normal(size=(3, 4)),
    )
    expected = sum((q[m] @ projection) * x[n] for m in range(queries) for n in range(keys))
    scores = scores_of(q[None], x, projection[None])
    found = scores.visibility.keys.of_types(scores.contributions)
    np.testing.assert_allclose(found[0, 0, OTHER], expected, atol=1e-12)
    assert found[0, 0, :OTHER].eq(0).all()


# --- Accumulators on a model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """It rotates its queries and keys, as some metrics need."""
    transformer, words = build("gpt_neox")
    return LoadedModel("tiny", "seed 0", transformer.double(), words)


# Predicting tokens takes a model that does; what an intervention changes takes one; the similarity
# of two models takes both.
OTHERS = ("next_token_loss", "masked_token_loss", "output_change", "representation_similarity")
# Of pictures, and of pictures with texts.
OF_PICTURES = ("attention_by_patch", "pair_cosine")
OF_ANY_MODEL = [name for name in metrics.METRICS if name not in (*OTHERS, *OF_PICTURES)]


@dataclass
class Passes:
    """The accumulators of the same model on a corpus and on its parts (whose texts keep their
    jackknife groups).
    """

    whole: dict[str, metrics.Metric]
    parts: list[dict[str, metrics.Metric]]


@pytest.fixture
def passes(model) -> Passes:
    texts = [f"{text} {again}" for text in TEXTS for again in TEXTS[:5]]

    def accumulate(chosen: list[str]) -> dict[str, metrics.Metric]:
        # Twenty units, and multiples of as many texts, so that the same texts fall into the same
        # groups.
        corpus = Corpus("part", chosen, units=[str(i % GROUPS) for i in range(len(chosen))])
        return measure(model, corpus, OF_ANY_MODEL, progress=False)._parts

    assert GROUPS == 20
    return Passes(accumulate(texts), [accumulate(texts[:20]), accumulate(texts[20:])])


def assert_same(found: pd.DataFrame, expected: pd.DataFrame, tolerance: float) -> None:
    pd.testing.assert_frame_equal(found, expected, rtol=tolerance, atol=tolerance)


def test_merging_two_halves_is_one_pass(passes):
    assert set(passes.whole) == set(OF_ANY_MODEL)
    for name, whole in passes.whole.items():
        merged = whole.fresh()
        for part in passes.parts:
            merged.merge(part[name])
        assert_same(merged.table(), whole.table(), 1e-12)


def assert_untouched(metric, before) -> None:
    after = metric.arrays()
    assert after.keys() == before.keys()
    for key, (groups, values) in before.items():
        assert after[key].groups == groups
        assert np.array_equal(after[key].values, values)


def test_sums_of_a_layer_are_of_the_corpus_whole_and_without_groups(passes):
    metric = passes.whole["score_contributions"]
    groups, values = metric.arrays()["pairs", 2]
    layer = next(layer for layer in metric.layers() if layer.layer == 2)
    np.testing.assert_array_equal(layer.whole["pairs"], values.sum(0))
    replicates = layer.replicated([(), (groups[3],), (groups[0], groups[5], 99)])["pairs"]
    wanted = [values.sum(0), np.delete(values, 3, 0).sum(0), np.delete(values, [0, 5], 0).sum(0)]
    np.testing.assert_array_equal(replicates, wanted)
    kinds = layer.parts("sum")
    assert {*layer} == {"pairs", *(("sum", kind) for kind in kinds)}
    assert len(kinds) > 2
    assert layer.parts("pairs") == []
    with pytest.raises(KeyError, match="99"):
        layer["sum", 99]


class Misshapen(metrics.Metric):
    name, needs = "misshapen", frozenset({"hidden"})

    def update(self, activations):
        norms = activations.spaces["hidden"].norms
        self.add(("norms", activations.layer), norms.sum(-1), activations)

    def rows(self, sums):
        return {"norm": sums["norms"]}


class OfTerms(metrics.Metric):
    """Sums of terms, one of which is called like a space."""

    name, needs, axes = "of_terms", frozenset({"hidden"}), ("term",)

    def update(self, activations):
        norms = activations.spaces["hidden"].norms.sum((1, 2))
        for term in ("content", "key"):
            self.add(("sum", term, activations.layer), norms, activations)

    def rows(self, sums):
        terms = np.array(["content", "key"], object)
        return {"term": terms, "norm": np.stack([sums["sum", term] for term in terms], -1)}


def test_a_term_may_be_called_like_a_space(model):
    table = measure(model, list(TEXTS), [OfTerms()], progress=False)["of_terms"]
    assert table.columns.tolist() == ["layer", "term", "norm"]
    layers = len(table["layer"].unique())
    assert layers > 2
    assert table["term"].tolist() == ["content", "key"] * layers


def test_columns_of_another_shape_than_the_axes_are_one_clear_line(model):
    with pytest.raises(
        AnalysisError, match=r"misshapen: .*'norm': \(1, 1\).* let rows give arrays of replicate"
    ):
        measure(model, list(TEXTS), [Misshapen()], progress=False)["misshapen"]


def test_every_metric_of_the_modules_is_listed():
    """By its plain name, such as ``metrics.Anisotropy``, and by that of its table."""
    for path in Path(metrics.__file__).parent.glob("[!_]*.py"):
        module = importlib.import_module(f"analysis_lib.metrics.{path.stem}")
        for value in vars(module).values():
            is_metric = isinstance(value, type) and issubclass(value, metrics.Metric)
            if is_metric and value.__module__ == module.__name__ and hasattr(value, "name"):
                assert metrics.METRICS[value.name] is value
                assert getattr(metrics, value.__name__) is value


def test_every_common_metric_has_a_reference():
    assert {*COLUMNS} == {name for name, metric in metrics.METRICS.items() if not metric.on_request}
    assert {*ON_REQUEST} < {*metrics.METRICS} - {*COLUMNS}


def test_intervals_are_those_of_the_tables_without_a_group(passes):
    # The second moments of isotropy are not kept by group.
    with_interval = [
        name for name, metric in passes.whole.items() if metric.interval and name != "isotropy"
    ]
    assert len(with_interval) > 5
    for metric in (passes.whole[name] for name in with_interval):
        table, interval, counts, left_out = metric.table(), metric.interval, metric.counts, []
        for group in metric.occupied_groups():
            part = metric.without(group)
            no_part = counts is not None and (part[counts] == table[counts]).to_numpy()
            left_out.append(np.ma.array(part[interval].to_numpy(), mask=no_part))
        ends = jackknife_interval(table[interval].to_numpy(), left_out, metric.smooth)
        for name, end in zip(("ci_low", "ci_high"), ends, strict=True):
            assert np.array_equal(
                table[name], end.clip(*(metric.limits or (None, None))), equal_nan=True
            )


def test_merging_is_associative_and_leaves_the_other_alone(passes):
    for name in OF_ANY_MODEL:
        a, b = (part[name] for part in passes.parts)
        c = passes.whole[name]
        before = copy.deepcopy(b.arrays())
        left, right, inner = a.fresh(), a.fresh(), a.fresh()
        for other in (a, b, c):
            left.merge(other)
        for other in (b, c):
            inner.merge(other)
        right.merge(a)
        right.merge(inner)
        assert_same(left.table(), right.table(), 1e-12)
        left.merge(left.fresh())
        assert_same(left.table(), right.table(), 1e-12)
        assert_untouched(b, before)


def test_merging_unequal_counts_weighs_tokens_not_parts():
    """What averaging the averages would get wrong."""
    one, many = np.array([EAST, NORTH]), np.array([WEST] * 6)
    a = accumulated(metrics.MeanVector(), activations_of([one]))
    a.merge(accumulated(metrics.MeanVector(), activations_of([many])))
    assert a.table()["mean_norm"].item() == pytest.approx((2 + 3 + 6) / 8)


@pytest.mark.parametrize("special_tokens", [True, False])
def test_masses_sum_to_one_and_entropies_lie_between_their_bounds(model, special_tokens):
    tables = measure(model, Corpus("texts", TEXTS), special_tokens=special_tokens, progress=False)
    masses = tables["attention_by_token_type"].groupby(["layer", "head"])["mass"].sum()
    np.testing.assert_allclose(masses, 1, atol=1e-12)
    assert tables["attention_by_token_type"]["weight"].between(0, 1).all()
    entropy = tables["attention_entropy"]
    longest = max(len(ids) for ids in model.tokenizer(list(TEXTS))["input_ids"])
    assert entropy["entropy_nats"].between(0, math.log(longest)).all()
    assert entropy["entropy_normalised"].between(0, 1).all()
    similarity = tables["utterance_similarity"]["similarity"]
    assert similarity.between(-1, 1).all()


def test_contributions_add_up_over_key_types(model):
    table = measure(model, Corpus("texts", TEXTS), "score_contributions", progress=False)[
        "score_contributions"
    ]
    by_type = table[table["key_type"] != "all"]
    keys = ["layer", "head", "dimension"]
    total = (
        (by_type["contribution"] * by_type["pairs"]).groupby([by_type[key] for key in keys]).sum()
    )
    everything = table[table["key_type"] == "all"].set_index(keys)
    np.testing.assert_allclose(total, everything["contribution"] * everything["pairs"], atol=1e-9)
    lengths = [len(ids) for ids in model.tokenizer(list(TEXTS))["input_ids"]]
    assert set(everything["pairs"]) == {sum(length * (length + 1) // 2 for length in lengths)}


@pytest.mark.parametrize("architecture", ["bert", "deberta-v3", "qwen3", "t5", "cvt"])
def test_terms_that_meet_the_content_of_keys_are_the_sum_of_the_contributions(architecture):
    corpus = Corpus("items", items(architecture), kind=kind(architecture))
    if corpus.kind == "image":
        corpus = Corpus(
            "items", [ArrayImage(np.asarray(image)) for image in corpus.items], kind="image"
        )
    transformer, reads = build(architecture)
    loaded = LoadedModel("tiny", "seed 0", transformer.double(), reads)
    tables = measure(loaded, corpus, "score_contributions,score_terms", progress=False)
    keys = ["layer", "head", "key_type"]
    contributions = tables["score_contributions"].groupby(keys)
    terms = tables["score_terms"]
    content = terms[terms["term"].isin(["content", "position_query"])].groupby(keys)
    pd.testing.assert_series_equal(
        contributions["contribution"].sum(), content["contribution"].sum(), rtol=1e-9
    )
    pd.testing.assert_series_equal(contributions["pairs"].first(), content["pairs"].first())
    present = {
        "bert": {"content", "key_bias"},
        "deberta-v3": {"content", "position_query", "key_bias", "position"},
        "qwen3": {"content"},
        "t5": {"content", "position"},
        "cvt": {"content", "key_bias"},
    }
    assert set(terms["term"]) == present[architecture]
    assert not terms.duplicated([*keys, "term"]).any()


def test_a_planted_rogue_dimension_is_found():
    """A large bias in one dimension of the embeddings' LayerNorm is an outlier of the embedding
    output, and only it.
    """
    transformer, words = build("bert", hidden_size=48, initializer_range=0.02)
    with torch.no_grad():
        transformer.embeddings.LayerNorm.bias.zero_()
        transformer.embeddings.LayerNorm.bias[31] = -40
    model = LoadedModel("rogue", "seed 0", transformer, words)
    tables = measure(
        model, Corpus("texts", TEXTS), "outlier_dimensions,dimension_means", progress=False
    )
    found = tables["outlier_dimensions"]
    embedding = found[found["layer"] == 0]
    assert embedding["dimension"].tolist() == [31]
    assert embedding["mean"].item() == pytest.approx(-40, abs=3)
    means = tables["dimension_means"].query(
        "layer == 0 and token_type == 'all' and dimension == 31"
    )
    assert means["mean"].item() == pytest.approx(embedding["mean"].item())


# --- Tokens that do not count ---------------------------------------------------------------------

OF_VECTORS = [
    metrics.Anisotropy,
    metrics.MeanVector,
    metrics.UtteranceSimilarity,
    metrics.DimensionMeans,
    metrics.OutlierDimensions,
    metrics.Isotropy,
]


@pytest.mark.parametrize("metric", OF_VECTORS)
def test_silence_counts_as_no_vector(metric):
    """As if it were not there, wherever it lies."""
    rng = np.random.default_rng(0)
    spoken = [rng.normal(size=(n, 20)) + np.eye(20)[3] * 9 for n in (4, 2)]
    activations = activations_of(
        [np.concatenate([part, rng.normal(size=(5, 20))]) for part in spoken]
    )
    silent = torch.arange(9) >= torch.tensor([[4], [2]])
    tokens = replace(activations.tokens, silent=silent)
    activations = replace(
        activations, tokens=tokens, spaces={"hidden": Vectors(values_of(activations), tokens)}
    )
    found, expected = (
        accumulated(metric(), one).table() for one in (activations, activations_of(spoken))
    )
    assert len(expected)
    assert_same(found, expected, 1e-12)


@pytest.mark.parametrize("metric", OF_VECTORS)
def test_special_tokens_count_as_vectors_or_not(metric):
    rng = np.random.default_rng(1)
    framed = [rng.normal(size=(n, 20)) + np.eye(20)[3] * 9 for n in (6, 4)]
    activations = activations_of(
        framed, types=[[CLS, OTHER, PUNCT, OTHER, OTHER, SEP], [CLS, OTHER, PUNCT, SEP]]
    )
    tokens = replace(activations.tokens, special_tokens=False)
    activations = replace(
        activations, tokens=tokens, spaces={"hidden": Vectors(values_of(activations), tokens)}
    )
    bare = activations_of(
        [part[1:-1] for part in framed], types=[[OTHER, PUNCT, OTHER, OTHER], [OTHER, PUNCT]]
    )
    found, expected = (accumulated(metric(), one).table() for one in (activations, bare))
    assert len(expected)
    assert_same(found, expected, 1e-12)


def values_of(activations: Activations) -> torch.Tensor:
    return activations.spaces["hidden"].values


# --- Vectors without a direction, and no vectors at all -------------------------------------------


def test_zero_vectors_are_left_out_of_cosines_and_counted():
    with_zero = np.array([EAST, [0, 0], NORTH, EAST])
    activations = activations_of([with_zero, np.array([[0.0, 0]])])
    row = accumulated(metrics.Anisotropy(), activations).table().iloc[0]
    assert row["tokens"] == 3
    assert row["cosine"] == pytest.approx(1 / 3)
    row = accumulated(metrics.UtteranceSimilarity(), activations).table().iloc[0]
    assert (row["similarity"], row["utterances"]) == (pytest.approx(1 / 3), 1)
    # The mean vector has room for them.
    row = accumulated(metrics.MeanVector(), activations).table().iloc[0]
    assert row["mean_norm"] == pytest.approx((2 + 3 + 2) / 5)
    hidden = activations.spaces["hidden"]
    assert (hidden.counts.unsqueeze(1) - hidden.nonzero).sum() == 2


def test_zero_vectors_of_a_model_are_in_the_report():
    transformer, words = build("bert")
    with torch.no_grad():
        key = transformer.encoder.layer[1].attention.self.key
        for part in (key.weight, key.bias):
            part.zero_()
    model = LoadedModel("no keys", "seed 0", transformer, words)
    tables = measure(model, Corpus("texts", TEXTS), "mean_vector", progress=False)
    heads = transformer.config.num_attention_heads
    assert tables.report.zero_vectors == {"key 2": tables.report.tokens * heads}
    with pytest.raises(AnalysisError, match="key space of layer 2"):
        measure(model, Corpus("texts", TEXTS), "anisotropy", progress=False)["anisotropy"]
    with pytest.raises(AnalysisError, match="utterance_similarity"):
        measure(model, Corpus("texts", TEXTS), "utterance_similarity", progress=False)[
            "utterance_similarity"
        ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "metric",
    [metrics.Anisotropy, metrics.MeanVector, metrics.UtteranceSimilarity, metrics.DimensionMeans],
)
def test_vectors_that_are_not_finite_stop_the_run_with_the_layer(metric, bad):
    vectors = np.array([EAST, [bad, 0]])
    with pytest.raises(AnalysisError, match="layer 1"):
        accumulated(metric(), activations_of([vectors])).arrays()


def test_nothing_measured_is_an_error():
    for metric in metrics.resolve(list(metrics.METRICS)):
        with pytest.raises(AnalysisError, match=metric.name):
            metric.table()


@pytest.mark.parametrize("metric", [metrics.Anisotropy, metrics.UtteranceSimilarity])
def test_a_single_token_says_nothing(metric):
    with pytest.raises(AnalysisError, match=r"two (vectors|tokens)"):
        accumulated(metric(), activations_of([np.array([EAST])])).table()


def test_unknown_metric_gets_the_nearest_names():
    with pytest.raises(AnalysisError, match="did you mean anisotropy"):
        metrics.resolve("anisotropie")
    with pytest.raises(AnalysisError, match="no metric"):
        metrics.resolve([])
    common = [name for name, metric in metrics.METRICS.items() if not metric.on_request]
    assert [metric.name for metric in metrics.resolve("all")] == common


# --- Intervals ------------------------------------------------------------------------------------


def test_one_group_has_no_interval():
    low, high = jackknife_interval(np.array([1.0, 2.0]), np.array([[1.0, 2.0]]))
    assert np.isnan([low, high]).all()
    row = (
        accumulated(metrics.Anisotropy(), activations_of([np.array([EAST, NORTH, EAST])]))
        .table()
        .iloc[0]
    )
    assert row["cosine"] == pytest.approx(1 / 3)
    assert np.isnan([row["ci_low"], row["ci_high"]]).all()


def test_the_interval_covers_the_truth_for_clustered_tokens():
    """Tokens of an utterance share a direction: an interval over tokens would cover far too
    seldom.
    """
    rng = np.random.default_rng(1)
    corpora, utterances, tokens, dim = 2000, 2 * GROUPS, 6, 5
    count = float(utterances * tokens)

    def unit_sums(*shape: int) -> np.ndarray:
        vectors = (
            [1, 0, 0, 0, 0]
            + rng.normal(size=(*shape, 1, dim))
            + 0.3 * rng.normal(size=(*shape, tokens, dim))
        )
        return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).sum(-2)

    # Of two tokens of different utterances, as nearly all are where there are many, the expected
    # cosine is the squared norm of the mean direction.
    truth = ((unit_sums(200_000).mean(0) / tokens) ** 2).sum()

    grouped = unit_sums(corpora, 2, GROUPS).sum(1)
    total = grouped.sum(1)
    point = mean_pair_cosine(total, np.full(corpora, count))
    rest = np.full(corpora, count * (1 - 1 / GROUPS))
    left_out = np.stack(
        [mean_pair_cosine(total - grouped[:, group], rest) for group in range(GROUPS)]
    )
    low, high = jackknife_interval(point, left_out)
    covered = ((low <= truth) & (truth <= high)).mean()
    assert 0.93 <= covered <= 0.97
    # The simulation can tell: an interval for independent tokens would be narrower by about this
    # factor.
    narrow = np.abs(point - truth) <= (high - low) / 2 / math.sqrt(tokens)
    assert narrow.mean() < 0.75


def test_token_types_are_those_of_the_design():
    assert TOKEN_TYPES == ("cls", "sep", "register", "detection", "first", "punct", "other")
