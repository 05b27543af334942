"""Several models side by side: whose rows are whose, and how alike the inputs are."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.measurement.comparison import compare, pixel_cosine


def test_each_model_and_its_twin_are_measured_on_the_corpus_of_their_kind(tiny_folder, tmp_path):
    (tmp_path / "lines.txt").write_text("One sentence.\nAnother one, longer.\nA third.\n", encoding="utf-8")
    text, image, data = str(tiny_folder("bert")), str(tiny_folder("resnet-basic")), str(tmp_path / "lines.txt")
    comparison = compare({data: [text], "digits:test": [image]}, "anisotropy", limit=3, progress=False)
    assert list(comparison.runs) == [(text, True), (text, False), (image, True), (image, False)]
    table = comparison["anisotropy"]
    for (model, trained), tables in comparison.runs.items():
        rows = table[(table["model"] == model) & (table["trained"] == trained)]
        np.testing.assert_array_equal(rows["cosine"], tables["anisotropy"]["cosine"])
        widths = tables.layers.set_index("layer")["width"]
        assert rows["width"].tolist() == widths[rows["layer"]].tolist()
    assert not table["cosine"].isna().any()
    alone = measure(load_model(text), load_corpus(data, 3), "anisotropy", progress=False)
    np.testing.assert_array_equal(comparison.trained[text]["anisotropy"]["cosine"], alone["anisotropy"]["cosine"])


def test_a_twin_has_no_twin_and_none_is_measured_where_none_is_wanted(tiny_folder):
    resnet = str(tiny_folder("resnet-basic"))
    twin = f"{resnet}:untrained"
    assert list(compare({"digits:test": [twin]}, "anisotropy", limit=2).runs) == [(twin, True)]
    assert list(compare({"digits:test": [resnet]}, "anisotropy", limit=2, twins=False).runs) == [(resnet, True)]


@pytest.mark.parametrize(
    ("models", "message"), [({"news": []}, "no model"), ({"news": ["a", "a"]}, "a was given twice")]
)
def test_what_cannot_be_compared_is_refused(models, message):
    with pytest.raises(AnalysisError, match=message):
        compare(models, "anisotropy")


def test_pixel_cosine_is_the_mean_over_all_pairs_of_prepared_images(tiny_folder, tmp_path, minilm):
    draws = np.random.default_rng(0).integers(0, 256, (7, 9, 9, 3), dtype=np.uint8)
    for i, pixels in enumerate(draws):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    images, model = load_corpus(str(tmp_path)), load_model(str(tiny_folder("vit")))
    read = [model.processor(images=item.load(), return_tensors="pt")["pixel_values"].flatten() for item in images.items]
    cosines = cosine_similarity(torch.stack(read).double())
    expected = cosines[~np.eye(7, dtype=bool)].mean()
    assert pixel_cosine(model, images) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(AnalysisError, match="minilm on"):
        pixel_cosine(minilm, images)
