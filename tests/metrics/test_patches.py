"""Attention by patch, against transformers' own attentions and by hand."""

import numpy as np
import pytest
import tiny
import torch
from test_metrics import accumulated, attention_of

from analysis_lib import Corpus, load_corpus, load_model, measure, metrics
from analysis_lib.capture import Tokens
from analysis_lib.capture.grids import grid_of_shape, grid_of_tokens
from analysis_lib.corpora import ArrayImage, Captioned
from analysis_lib.corpora.token_types import PAIR_TYPES
from analysis_lib.errors import AnalysisError


def tokens_of_picture(names, grid) -> Tokens:
    types = torch.tensor([[PAIR_TYPES.index(name) for name in names]])
    return Tokens(types > -1, types, (0,), type_names=PAIR_TYPES, grid=grid)


def test_patches_by_hand():
    """Four patches between two words: half of the queries look at one, half at all tokens."""
    names = ["first", "image", "image", "image", "image", "other"]
    tokens = tokens_of_picture(names, (1, 4))
    weights = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    weights[:3] = torch.eye(6, dtype=torch.float64)[3]
    table = accumulated(metrics.AttentionByPatch(), attention_of(weights, tokens)).table()
    assert table["row"].tolist() == [1] * 4
    assert table["column"].tolist() == [1, 2, 3, 4]
    assert table["weight"].tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 2 + 1 / 12, 1 / 12])
    assert table["pictures"].tolist() == [1] * 4


def test_pictures_of_several_grids_are_refused():
    metric = metrics.AttentionByPatch()
    for grid in ((1, 4), (2, 2)):
        tokens = tokens_of_picture(["image"] * 4, grid)
        metric.update(attention_of(torch.full((4, 4), 0.25, dtype=torch.float64), tokens))
    with pytest.raises(AnalysisError, match="patches of 1 x 4 and of 2 x 2: give pictures of one"):
        metric.table()


def test_texts_have_no_patches(tiny_folder):
    with pytest.raises(AnalysisError, match="attention_by_patch: no layer has the patches"):
        measure(str(tiny_folder("bert")), tiny.corpus("bert"), "attention_by_patch")[
            "attention_by_patch"
        ]


def test_patches_of_a_vision_transformer_are_those_of_transformers():
    model = load_model("digits-vit", dtype="float64")
    corpus = load_corpus("digits", limit=3)
    table = measure(model, corpus, "attention_by_patch", progress=False)["attention_by_patch"]
    plain = model.model
    implementation = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    weights = []
    for item in corpus.items:
        pixels = model.processor(item.load().convert("L"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            attentions = plain(pixels.double(), output_attentions=True).attentions
        weights.append(torch.cat(attentions).mean(2)[..., 1:])
    plain.set_attn_implementation(implementation)
    wanted = torch.stack(weights).mean(0)
    side = table["row"].max()
    assert side**2 == wanted.shape[-1]
    assert table["weight"].to_numpy() == pytest.approx(wanted.flatten().numpy(), abs=1e-6)


def test_patches_that_words_see_are_those_of_transformers():
    model = load_model("digits-llava", dtype="float64")
    corpus = load_corpus("captioned-digits", limit=3)
    metric = metrics.AttentionByPatch(bins="type")
    table = measure(model, corpus, [metric], progress=False)["attention_by_patch"]
    words = table[table["type"] == "other"]
    reader = model.reading("image+text")
    plain = reader.outer
    plain.set_attn_implementation("eager")
    weights = []
    for item in corpus.items:
        inputs = reader.processor.processor(
            images=item.media[0].load().convert("RGB"),
            text="<image>" + item.text,
            return_tensors="pt",
        )
        inputs["pixel_values"] = inputs["pixel_values"].double()
        with torch.no_grad():
            attentions = plain(**inputs, output_attentions=True).attentions
        is_picture = inputs["input_ids"][0] == plain.config.image_token_id
        # The full stop is no word.
        after = is_picture.nonzero().max() + 1
        weights.append(torch.cat(attentions)[:, :, after:-1, is_picture].mean(2))
    wanted = torch.stack(weights).mean(0)
    assert wanted.shape[-1] == 64
    assert words["weight"].to_numpy() == pytest.approx(wanted.flatten().numpy(), abs=1e-6)


def test_the_grid_of_patches_is_that_of_the_shape():
    assert grid_of_shape({"pixel_values": torch.zeros(1, 3, 8, 8)}, 16) == (4, 4)
    assert grid_of_shape({"pixel_values": torch.zeros(1, 3, 4, 16)}, 16) == (2, 8)
    assert grid_of_shape({"pixel_values": torch.zeros(1, 3, 8, 8)}, 15) is None
    assert grid_of_shape({"pixel_values": torch.zeros(1, 3, 8, 8)}, 0) is None
    assert grid_of_shape({"input_ids": torch.zeros(1, 3)}, 16) is None


def test_the_grid_of_tokens_is_what_the_processor_says():
    is_image = torch.tensor([False, *[True] * 12, False])
    # Two by two patches are merged into a token.
    said = {"image_grid_thw": torch.tensor([[1, 6, 8]])}
    assert grid_of_tokens(said, is_image) == (3, 4)
    assert grid_of_tokens({"image_grid_thw": torch.tensor([[1, 6, 7]])}, is_image) is None
    # A token ends each row of two.
    rows = torch.tensor([True, True, False] * 3)
    assert grid_of_tokens({}, rows) == (3, 2)
    assert grid_of_tokens({}, torch.tensor([True, True, False, True])) is None


def test_pictures_with_texts_have_types_of_their_own():
    picture = ArrayImage(np.zeros((16, 16), np.uint8))
    corpus = Corpus("one", [Captioned((picture,), "a one.")] * 3, kind="image+text")
    table = measure("digits-llava", corpus, "attention_by_token_type", progress=False)
    table = table["attention_by_token_type"]
    assert {*table.loc[table["layer"] > 5, "key_type"]} == {"cls", "image", "other", "punct"}
    assert {*table.loc[table["layer"] < 5, "key_type"]} == {"cls", "image"}
