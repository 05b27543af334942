"""A tower that attends within windows of an image, against eager attention of transformers.

Qwen2.5-VL orders the patches of an image by window, and calls its attention once for each.
"""

from dataclasses import dataclass

import composite
import naive
import numpy as np
import pytest
import torch
from reference import DoublePrecision
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from analysis_lib import load_corpus, load_model, measure
from analysis_lib.measurement.tables import Tables

# In pixels: five rows of seven cells of four patches, and windows of three by three cells.
SHAPE, CELL, WINDOW = (80, 112), 16, 48
WINDOWS = [9, 9, 3, 6, 6, 2]
TEXTS = ("an owl, and a tree.", "Stones")
METRICS = "attention_entropy,attention_by_token_type,attention_by_patch"


@dataclass
class Measured:
    """The tables, and for each pair the weights of each call and the tokens of the image.

    Attributes:
        weights: by module, one array for each call: head x query x key.
    """

    tables: Tables
    weights: list[dict[torch.nn.Module, list[Tensor]]]
    is_image: list[Tensor]
    model: torch.nn.Module


@pytest.fixture(scope="module")
def measured() -> Measured:
    model, processor = composite.build("qwen2_5_vl")
    processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 2**14}
    for part in (model.visual, model.config.vision_config):
        part.window_size = WINDOW
        part.fullatt_block_indexes = [1]
    model = naive.in_double(model)
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (*SHAPE, 3), dtype=np.uint8) for _ in TEXTS]
    pairs = [
        {"image": picture, "text": text} for picture, text in zip(pictures, TEXTS, strict=True)
    ]
    loaded = load_model(model, processor=processor)
    tables = measure(loaded, load_corpus(pairs), METRICS, progress=False)
    placeholder = loaded.reading("image+text").processor.placeholder
    weights, is_image = [], []
    plain = modeling_qwen2_5_vl.eager_attention_forward
    for pair in pairs:
        of_pair = {}

        def recorded(module, *args, of_pair=of_pair, **options):
            output, made = plain(module, *args, **options)
            of_pair.setdefault(module, []).append(made[0])
            return output, made

        text = placeholder + pair["text"]
        inputs = processor(images=pair["image"], text=text, return_tensors="pt")
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), DoublePrecision():
            patch.setattr(modeling_qwen2_5_vl, "eager_attention_forward", recorded)
            model(**inputs, use_cache=False)
        weights.append(of_pair)
        is_image.append(inputs["input_ids"][0] == model.config.image_token_id)
    return Measured(tables, weights, is_image, model)


def layers_of(measured: Measured, stack: str) -> list[tuple[int, list[list[Tensor]]]]:
    """The layers with attention, by their numbers, and their weights by pair and call."""
    layers = measured.tables.layers
    numbers = [*layers["layer"][(layers["stack"] == stack) & (layers["part"] != "")]]
    modules = [
        module
        for module in measured.weights[0]
        if (module in [*measured.model.visual.modules()]) == (stack == "visual")
    ]
    assert len(numbers) == len(modules) == 2
    return [
        (number, [of_pair[module] for of_pair in measured.weights])
        for number, module in zip(numbers, modules, strict=True)
    ]


def column(measured: Measured, table: str, name: str, layer: int, query: str = "") -> np.ndarray:
    rows = measured.tables[table].query(f"layer == {layer}{query}")
    return rows[name].to_numpy()


def test_a_layer_has_windows_or_sees_the_whole_image(measured):
    windowed, whole = (calls for _, calls in layers_of(measured, "visual"))
    for of_pair in windowed:
        assert [len(call[0]) for call in of_pair] == [4 * cells for cells in WINDOWS]
    for of_pair in whole:
        assert [len(call[0]) for call in of_pair] == [4 * sum(WINDOWS)]


def test_entropies_within_windows(measured):
    for layer, of_pairs in layers_of(measured, "visual"):
        calls = [call for of_pair in of_pairs for call in of_pair]
        entropies = [torch.special.entr(call).sum(-1) for call in calls]
        nats = torch.cat(entropies, -1).mean(-1).numpy()
        parts = [of_call / np.log(of_call.shape[-1]) for of_call in entropies]
        normalised = torch.cat(parts, -1).mean(-1).numpy()
        made = column(measured, "attention_entropy", "entropy_nats", layer)
        assert made == pytest.approx(nats, abs=1e-10)
        made = column(measured, "attention_entropy", "entropy_normalised", layer)
        assert made == pytest.approx(normalised, abs=1e-10)


def test_mass_within_windows(measured):
    query = " and key_type == 'image'"
    for layer, of_pairs in layers_of(measured, "visual"):
        sizes = np.array([call.shape[-1] for of_pair in of_pairs for call in of_pair])
        masses = column(measured, "attention_by_token_type", "mass", layer, query)
        assert masses == pytest.approx(np.ones(4), abs=1e-10)
        weights = column(measured, "attention_by_token_type", "weight", layer, query)
        assert weights == pytest.approx(np.full(4, sizes.sum() / (sizes**2).sum()), abs=1e-10)


def test_patches_that_words_see(measured):
    """``test_pair_readers.py`` shows that they are row by row again behind the tower."""
    rows, columns = (side // CELL for side in SHAPE)
    for layer, of_pairs in layers_of(measured, "language_model"):
        received, masses = [], []
        for [weights], is_image in zip(of_pairs, measured.is_image, strict=True):
            seen_by = torch.arange(len(is_image), 0, -1)
            received.append((weights.sum(1) / seen_by)[:, is_image])
            masses.append(weights[:, :, is_image].sum(-1))
        by_patch = torch.stack(received).mean(0).flatten().numpy()
        made = column(measured, "attention_by_patch", "weight", layer)
        assert made == pytest.approx(by_patch, abs=1e-10)
        assert column(measured, "attention_by_patch", "row", layer).max() == rows
        assert column(measured, "attention_by_patch", "column", layer).max() == columns
        mass = torch.cat(masses, -1).mean(-1).numpy()
        query = " and key_type == 'image'"
        made = column(measured, "attention_by_token_type", "mass", layer, query)
        assert made == pytest.approx(mass, abs=1e-10)
    # In the tower patches are in the order of the windows: it has no map.
    in_tower = [layer for layer, _ in layers_of(measured, "visual")]
    assert not measured.tables["attention_by_patch"]["layer"].isin(in_tower).any()
