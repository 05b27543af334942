"""Small models of types whose sizes hang together, and inputs beside texts, images and sounds."""

import pytest
import torch

from analysis_book.atlas.sizes import related_configuration
from analysis_book.atlas.small import (
    BATCH,
    MOST_PATCHES,
    SIDE,
    NotBuiltError,
    read_by,
    readable_input,
    running,
)

# What `small` reads of them.
READ = {
    "patchtst": "time series",
    "timesfm": "time series",
    "informer": "time series",
    "pix2struct_vision_model": "images",
    "siglip2_vision_model": "images",
    "kimi_k25_vision": "images",
}


def test_equal_widths_stay_equal():
    config = related_configuration("mimi")
    # A group of its convolution for each channel.
    assert config.upsample_groups == config.hidden_size == 256
    config = related_configuration("florence2")
    assert config.vision_config.projection_dim == config.text_config.d_model == 256


def test_key_heads_are_as_many_as_by_default():
    config = related_configuration("esmc")
    assert config.num_key_value_heads == config.num_attention_heads == 4
    config = related_configuration("llama")
    assert config.num_key_value_heads == config.num_attention_heads
    config = related_configuration("mistral")
    assert (config.num_key_value_heads, config.num_attention_heads) == (2, 4)


def test_what_a_class_computes_is_computed_anew():
    config = related_configuration("d_fine")
    assert config.head_dim * config.decoder_attention_heads == config.d_model
    # The width of heads that a model divides by, and no class computes.
    config = related_configuration("hunyuan_v1_dense")
    assert config.head_dim * config.num_attention_heads == config.hidden_size


@pytest.mark.parametrize(("name", "outputs"), [("zoedepth", 4), ("vitpose", 1)])
def test_there_are_layers_for_as_many_outputs_as_by_default(name, outputs):
    backbone = related_configuration(name).backbone_config
    assert len(backbone.out_features) == outputs
    assert backbone.out_features[-1] == backbone.stage_names[-1]
    assert backbone.num_hidden_layers == max(outputs, 2)


def test_sizes_are_known_by_the_ends_of_their_names():
    config = related_configuration("luke")
    assert config.entity_vocab_size == config.vocab_size == 128
    assert related_configuration("rt_detr").num_queries <= SIDE**2


def test_sizes_of_types_that_run_by_themselves_are_not_touched():
    # Windows of two patches are those of its row in the table.
    assert running("swin").model.config.window_size == 2


TYPES = ("hunyuan_v1_dense", "esmc", "luke", "vitpose", "mimi", "lilt", "dbrx", "layoutlmv3")


@pytest.mark.parametrize("name", TYPES)
def test_types_whose_sizes_hang_together_run(name):
    small = running(name)
    with torch.no_grad():
        small.model(**small.inputs)


@pytest.mark.parametrize("name", READ)
def test_series_and_rows_of_patches_are_read(name):
    small = running(name)
    assert read_by(small.model, small.inputs) == READ[name]
    assert all(torch.is_tensor(value) for value in small.inputs.values())


def test_patches_lie_in_a_square():
    inputs = running("kosmos_2_5_vision_model").inputs
    places = inputs["flattened_patches"][..., :2]
    assert places.shape == (BATCH, SIDE**2, 2)
    assert places[0, 0].tolist() == [1, 1]
    assert places[0, -1].tolist() == [SIDE, SIDE]


def test_images_of_too_many_patches_are_not_tried():
    model = running("vit").model
    model.config.image_size = 1024
    assert (model.config.image_size // model.config.patch_size) ** 2 > MOST_PATCHES
    with pytest.raises(NotBuiltError, match="its input is unknown"):
        readable_input(model)
