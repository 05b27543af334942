"""Classes and directions: the separation against scikit-learn, on planted cones and on a small model."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from analysis_lib import AnalysisError, load_model
from analysis_lib.corpora.loading import Corpus, Pair
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.papers.fosse.directions import (
    attention_vectors,
    change_of_separation,
    class_vectors,
    cone,
    cosines,
    cosines_to,
    draw_representatives,
    examples,
    examples_of_each,
    mean_areas,
    of_head,
    over_utterances,
    pair_cosines,
    separation,
    widest_angles,
)
from analysis_lib.papers.fosse.splits import fine_tuned
from tests import tiny


def test_the_area_is_scikit_learns():
    random = np.random.default_rng(0)
    vectors, labels = random.standard_normal((60, 5)), random.integers(0, 3, 60)
    vectors[:, 0] += labels
    correct = random.random(60) < 0.7
    found = separation(vectors, labels, correct).set_index("class")
    similar = cosines(vectors)
    for label in range(3):
        areas = []
        for i in np.flatnonzero(correct & (labels == label)):
            rest = np.arange(60) != i
            areas.append(roc_auc_score(labels[rest] == label, similar[i, rest]))
        row = found.loc[label]
        assert row["auc"] == pytest.approx(np.mean(areas), abs=1e-12)
        assert row["representatives"] == len(areas)
        assert (row["lowest"], row["highest"]) == pytest.approx(tuple(np.quantile(areas, [0.025, 0.975])))
        assert row["ci_low"] < row["auc"] < row["ci_high"]


def test_ties_count_half():
    found = separation(np.ones((8, 2)), np.arange(8) % 2, np.ones(8, bool))
    assert found["auc"].tolist() == [0.5, 0.5]


def test_planted_cones_separate_and_one_cloud_does_not():
    random = np.random.default_rng(1)
    labels, centres = np.arange(200) % 2, np.eye(2, 30)
    cones = 3 * centres[labels] + random.standard_normal((200, 30)) / 5
    assert (separation(cones, labels, np.ones(200, bool))["auc"] == 1).all()
    cloud = separation(random.standard_normal((200, 30)), labels, np.ones(200, bool))
    assert ((cloud["ci_low"] < 0.5) & (cloud["ci_high"] > 0.5)).all()


def test_what_cannot_be_separated_is_refused():
    vectors = np.eye(4)
    with pytest.raises(AnalysisError, match="two classes"):
        separation(vectors, np.zeros(4, int), np.ones(4, bool))
    with pytest.raises(AnalysisError, match="class 1 was classified correctly"):
        separation(vectors, np.array([0, 0, 1, 1]), np.array([True, True, False, False]))


def test_examples_are_of_the_right_class_and_not_the_representative():
    similar = np.array([0.2, 1.0, 0.7, -0.5, 0.9, 0.0, 0.1])
    own = np.array([True, True, True, True, False, False, False])
    assert examples(similar, own, 1) == {"nearest": 2, "farthest": 3, "nearest other": 4, "median other": 6}


def test_the_vectors_are_those_of_the_first_token_in_the_order_of_the_corpus(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    model = load_model(str(tmp_path / "bert"), dtype="float64")
    corpus = Corpus("texts", tiny.TEXTS)
    expected = []
    for text in tiny.TEXTS:
        ids = torch.tensor([model.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            expected.append(model.model(ids).last_hidden_state[0, 0].numpy())
    assert np.allclose(class_vectors(model, corpus), np.stack(expected), atol=1e-12)


def test_images_are_refused(tmp_path):
    tiny.save(tmp_path / "vit", "vit")
    with pytest.raises(AnalysisError, match="reads texts"):
        class_vectors(load_model(str(tmp_path / "vit")), Corpus("texts", tiny.TEXTS))


def cloud_and_cones(utterances: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors in which two classes are one cloud, vectors in which each has a direction, and the classes."""
    random = np.random.default_rng(2)
    labels = np.arange(utterances) % 2
    cloud = random.standard_normal((utterances, 12))
    return cloud, 2 * np.eye(2, 12)[labels] + random.standard_normal((utterances, 12)) / 3, labels


def test_the_change_of_separation_is_that_of_the_same_representatives():
    cloud, cones, labels = cloud_and_cones(80)
    correct = np.arange(80) % 5 > 0
    change = change_of_separation(cloud, cones, labels, correct)
    for column, vectors in (("before", cloud), ("after", cones)):
        assert change[column].tolist() == separation(vectors, labels, correct)["auc"].tolist()
    assert change["difference"].to_numpy() == pytest.approx((change["after"] - change["before"]).to_numpy())
    assert (change["ci_low"] > 0.2).all()
    assert (change["ci_high"] > change["difference"]).all()
    none = change_of_separation(cones, cones, labels, correct)
    assert none[["difference", "ci_low", "ci_high"]].to_numpy().tolist() == [[0.0] * 3] * 2


def test_intervals_leave_every_twentieth_utterance_out_of_all_that_is_computed():
    _, cones, labels = cloud_and_cones(50)
    correct, similar = np.ones(50, bool), cosines(cones)
    value, low, high = over_utterances(lambda kept: mean_areas(similar, labels, correct, kept), 50)
    left_out = []
    for group in range(20):
        kept = np.arange(50) % 20 != group
        left_out.append(separation(cones[kept], labels[kept], correct[kept])["auc"])
    expected = jackknife_interval(separation(cones, labels, correct)["auc"].to_numpy(), np.array(left_out))
    assert np.allclose((low, high), expected, atol=1e-12)
    assert ((low < value) & (value < high)).all()


def test_pairs_are_all_of_a_representative_and_another_utterance():
    _, cones, labels = cloud_and_cones(30)
    correct, kept, similar = np.arange(30) % 3 > 0, np.arange(5, 28), cosines(cones)
    found = pair_cosines(similar, labels, correct, kept)
    for label in range(2):
        of = [r for r in kept if correct[r] and labels[r] == label]
        own = [similar[r, j] for r in of for j in kept if labels[j] == label and j != r]
        rest = [similar[r, j] for r in of for j in kept if labels[j] != label]
        assert [sorted(cosines) for cosines in found[label]] == [sorted(own), sorted(rest)]


def test_representatives_are_correct_utterances_of_their_class():
    labels, correct = np.arange(60) % 3, np.arange(60) % 4 == 0
    drawn = {seed: draw_representatives(labels, correct, seed) for seed in range(8)}
    for representatives in drawn.values():
        assert list(representatives) == [0, 1, 2]
        assert all(correct[place] and labels[place] == label for label, place in representatives.items())
    assert draw_representatives(labels, correct, 3) == drawn[3]
    assert len({tuple(found.values()) for found in drawn.values()}) > 1
    with pytest.raises(AnalysisError, match="class 2 was classified correctly"):
        draw_representatives(labels, correct & (labels < 2))


def test_cosines_to_a_representative_leave_itself_out():
    _, cones, labels = cloud_and_cones(12)
    found = cosines_to(cones, labels, {0: 4, 1: 7})
    assert found.groupby("representative")["utterance"].apply(list).tolist() == [
        [i for i in range(12) if i != place] for place in (4, 7)
    ]
    assert (found["class"] == labels[found["utterance"]]).all()
    row = found[(found["representative"] == 1) & (found["utterance"] == 2)].iloc[0]
    expected = cones[7] @ cones[2] / np.linalg.norm(cones[7]) / np.linalg.norm(cones[2])
    assert row["cosine"] == pytest.approx(expected)


def test_examples_have_texts_only_if_asked_for():
    angles = np.radians([0, 10, 70, 30, 50, 100])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    items = ["zero", Pair("ten", "degrees"), "seventy", "thirty", "fifty", "a hundred"]
    corpus = Corpus("planted", items, labels=[0, 0, 0, 1, 1, 1], classes=["good", "bad"])
    predicted = ["good", "good", "good", "good", "bad", "bad"]
    found = examples_of_each(vectors, corpus, predicted, {0: 0}, show_texts=True)
    assert found["which"].tolist() == ["itself", "nearest", "farthest", "nearest other", "median other"]
    assert found["text"].tolist() == ["zero", "ten / degrees", "seventy", "thirty", "fifty"]
    assert found["class"].tolist() == ["good"] * 3 + ["bad"] * 2
    assert found["predicted"].tolist() == ["good"] * 4 + ["bad"]
    assert found["cosine"].tolist()[1:] == pytest.approx(np.cos(np.radians([10, 70, 30, 50])).tolist())
    assert np.isnan(found["cosine"][0])
    assert "text" not in examples_of_each(vectors, corpus, predicted, {0: 0})


@pytest.mark.parametrize("layer", [1, 3])
def test_outputs_are_those_of_the_models_own_attention(tmp_path, layer):
    tiny.save(tmp_path / "bert", "bert")
    model = load_model(str(tmp_path / "bert"), dtype="float64")
    own = []
    attention = model.model.encoder.layer[layer - 1].attention.self
    values, outputs = attention_vectors(model, tiny.TEXTS[0], layer)
    hook = attention.register_forward_hook(lambda *args: own.append(args[2][0]))
    with torch.inference_mode():
        model.model(torch.tensor([model.tokenizer(tiny.TEXTS[0])["input_ids"]]))
    hook.remove()
    heads = own[0][0].unflatten(-1, (2, -1)).transpose(0, 1).numpy()
    assert np.allclose(outputs, heads, atol=1e-12)
    assert values.shape == heads.shape
    if layer == 3:
        assert np.array_equal(attention_vectors(model, tiny.TEXTS[0], 0)[0], values)


def test_layers_that_are_not_there_and_attention_by_position_are_refused(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    with pytest.raises(AnalysisError, match="no attention layer 4"):
        attention_vectors(load_model(str(tmp_path / "bert")), tiny.TEXTS[0], 4)
    tiny.save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(AnalysisError, match="depends on positions"):
        attention_vectors(load_model(str(tmp_path / "gpt2")), tiny.TEXTS[0], 1)


def test_a_planted_cone_has_its_angle_and_its_lengths():
    angle, lengths = np.radians(35), np.array([1.0, 2.0, 3.0, 4.0])
    around = np.array([[1, 0], [-1, 0], [0, 0.6], [0, -0.6]])
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    values = lengths[:, None] * np.column_stack([np.full(4, np.cos(angle)), np.sin(angle) * around])
    found = cone(values, values.mean(0, keepdims=True))
    planted = found[found["of"] == "value"]
    assert planted["angle"].tolist() == pytest.approx([35] * 4)
    assert planted["along"].tolist() == pytest.approx((lengths * np.cos(angle)).tolist())
    assert planted["aside"].abs().tolist() == pytest.approx((lengths * np.sin(angle)).tolist())
    # Values on opposite sides of the axis are drawn on opposite sides where the principal direction lies: the longest.
    assert planted["aside"].iloc[2] * planted["aside"].iloc[3] < 0
    output = found[found["of"] == "output"].iloc[0]
    assert np.hypot(output["along"], output["aside"]) == pytest.approx(np.linalg.norm(values.mean(0)))
    assert output["angle"] < 35


def test_no_output_leaves_a_cone_of_its_values():
    random = np.random.default_rng(0)
    values = random.standard_normal((40, 7, 5))
    values[:, :, 0] += random.uniform(0, 4, (40, 1))
    weights = random.dirichlet(np.full(7, 0.3), (40, 7))
    found = widest_angles(values, weights @ values)
    assert found["head"].tolist() == list(range(1, 41))
    narrow = found[found["value"] <= 90]
    assert 5 < len(narrow) < 40
    assert (narrow["output"] <= narrow["value"] + 1e-9).all()


def test_an_encoder_before_and_after_on_texts_drawn_with_the_balance_of_the_classes(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    settings = {"epochs": 1, "learning_rate": 1e-2, "folder": tmp_path / "classifier"}
    found = fine_tuned(str(tmp_path / "bert"), "reviews", 8, 6, seed=1, **settings)
    for corpus, split, texts in (
        (found.train, "train", 8),
        (found.validation, "validation", 2),
        (found.test, "test", 6),
    ):
        assert corpus.name == f"reviews:{split}"
        assert np.bincount(corpus.labels).tolist() == [texts / 2] * 2
    kept, own = (load_model(str(tmp_path / name)) for name in ("bert", "classifier"))
    weights = [of.model.encoder.layer[0].attention.self.value.weight for of in (found.before, found.after, kept, own)]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    whole = fine_tuned(str(tmp_path / "bert"), "reviews", 8, 0, seed=1, **settings)
    assert len(whole.test) == 2152


@pytest.mark.parametrize("head", [0, 3, -1])
def test_heads_count_from_one(head):
    values, outputs = np.arange(12.0).reshape(2, 3, 2), np.ones((2, 3, 2))
    of_second = of_head((values, outputs), 2)
    assert (of_second[0] == values[1]).all()
    with pytest.raises(AnalysisError, match=f"no head {head}: give one from 1 to 2"):
        of_head((values, outputs), head)
