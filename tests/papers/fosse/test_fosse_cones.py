"""The cone of the values: on planted vectors, and against the attention of a small model."""

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_cells

from analysis_book.papers.fosse.directions import (
    attention_rows,
    cone,
    cosines,
    head_vectors,
    narrowing,
)
from analysis_lib import AnalysisError, load_model
from tests import tiny


@pytest.mark.parametrize("layer", [1, 3])
def test_outputs_are_those_of_the_models_own_attention(tmp_path, layer):
    tiny.save(tmp_path / "bert", "bert")
    model = load_model(str(tmp_path / "bert"), dtype="float64")
    own = []
    attention = model.model.encoder.layer[layer - 1].attention.self
    found = head_vectors(model, tiny.TEXTS[0])
    query, key, value = found[layer - 1]
    hook = attention.register_forward_hook(lambda *args: own.append(args[2][0]))
    with torch.inference_mode():
        model.model(torch.tensor([model.tokenizer(tiny.TEXTS[0])["input_ids"]]))
    hook.remove()
    heads = own[0][0].unflatten(-1, (2, -1)).transpose(0, 1).numpy()
    assert len(found) == 3
    assert np.allclose(attention_rows(query, key) @ value, heads, atol=1e-12)


def test_attention_by_position_is_refused(tmp_path):
    tiny.save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(AnalysisError, match="depends on positions"):
        head_vectors(load_model(str(tmp_path / "gpt2")), tiny.TEXTS[0])


def test_attention_narrows_by_the_similarity_of_its_outputs_and_values(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    model = load_model(str(tmp_path / "bert"), dtype="float64")
    expected = []
    for query, key, value in head_vectors(model, tiny.TEXTS[1]):
        off = ~np.eye(value.shape[1], dtype=bool)
        for head, rows in zip(value, attention_rows(query, key), strict=True):
            expected.append(cosines(rows @ head)[off].mean() - cosines(head)[off].mean())
    found = narrowing(model, tiny.TEXTS[:2])
    assert found.shape == (2,)
    assert found[1] == pytest.approx(np.mean(expected))


def test_a_planted_cone_has_its_angle_and_its_lengths():
    angle, lengths = np.radians(35), np.array([1.0, 2.0, 3.0, 4.0])
    around = np.array([[1, 0], [-1, 0], [0, 0.6], [0, -0.6]])
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    values = lengths[:, None] * np.column_stack([np.full(4, np.cos(angle)), np.sin(angle) * around])
    found = cone((values[None], values.mean(0)[None, None]), 1)
    planted = found[found["vector"] == "value"]
    assert planted["angle"].tolist() == pytest.approx([35] * 4)
    assert planted["along"].tolist() == pytest.approx((lengths * np.cos(angle)).tolist())
    assert planted["aside"].abs().tolist() == pytest.approx((lengths * np.sin(angle)).tolist())
    # Values on opposite sides of the axis are drawn on opposite sides where the principal direction
    # lies: the longest.
    assert planted["aside"].iloc[2] * planted["aside"].iloc[3] < 0
    output = found[found["vector"] == "output"].iloc[0]
    assert np.hypot(output["along"], output["aside"]) == pytest.approx(
        np.linalg.norm(values.mean(0))
    )
    assert output["angle"] < 35


def test_no_output_leaves_a_cone_of_its_values():
    random = np.random.default_rng(0)
    values = random.standard_normal((40, 7, 5))
    values[:, :, 0] += random.uniform(0, 4, (40, 1))
    weights = random.dirichlet(np.full(7, 0.3), (40, 7))
    vectors = values, weights @ values
    found = pd.DataFrame(
        [cone(vectors, head).groupby("vector")["angle"].max() for head in range(1, 41)]
    )
    narrow = found[found["value"] <= 90]
    assert 5 < len(narrow) < 40
    assert (narrow["output"] <= narrow["value"] + 1e-9).all()


@pytest.mark.parametrize("head", [0, 3, -1])
def test_heads_count_from_one(head):
    values, outputs = np.random.default_rng(0).standard_normal((2, 2, 3, 2))
    second = cone((values, outputs), 2)
    lengths = np.hypot(second["along"], second["aside"])
    assert lengths.tolist() == pytest.approx(
        np.linalg.norm([*values[1], *outputs[1]], axis=1).tolist()
    )
    with pytest.raises(AnalysisError, match=f"no head {head}: give one from 1 to 2"):
        cone((values, outputs), head)


def test_a_cone_is_drawn_at_its_angle_and_its_outputs_inside():
    values = np.array([[3**0.5, 1.0], [3**0.5, -1.0]])
    outputs = np.array([[3**0.5, 0.0], [3**0.5, 0.8]])
    drawn = cone((values[None], outputs[None]), 1).assign(
        stage="planted", word=["a", "b", "a", "b"]
    )
    cells = "def label", 'row="stage"'
    grid = run_cells("classification/direction", *cells, cone=drawn)["grid"]
    (axes,) = grid.axes.flat
    side = np.sign(drawn["aside"].iloc[0])
    widest = axes.lines[-1].get_xydata()
    assert np.degrees(np.arctan2(*widest.T))[[0, 2]] == pytest.approx([-30, 30])
    ends = np.array([[1, 3**0.5], [-1, 3**0.5], [0, 3**0.5], [0.8, 3**0.5]]) * [side, 1]
    np.testing.assert_allclose(axes.collections[0].get_offsets(), ends, atol=1e-12)
    words = {text.get_text().strip(): text.xy for text in axes.texts}
    assert words == {"a": pytest.approx(ends[0]), "b": pytest.approx(ends[1])}
    # On its own side, as far out as all that is drawn.
    farthest = drawn[["aside", "along"]].abs().to_numpy().max()
    assert [abs(text.xyann[0]) for text in axes.texts] == pytest.approx(2 * [1.1 * farthest])
    assert all(text.xyann[0] * text.xy[0] > 0 for text in axes.texts)
    assert axes.get_aspect() == 1
    assert axes.get_title() == "planted"
