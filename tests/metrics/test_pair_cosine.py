"""The cosine of pairs against ``model(**processor(...))`` of transformers, with every pair formed."""

import composite
import numpy as np
import pytest
import tiny
import torch
from reference import DoublePrecision
from scipy import stats
from transformers import PreTrainedModel, ProcessorMixin

from analysis_lib import AnalysisError, load_corpus, load_model, measure, metrics
from analysis_lib.measurement import shards

TEXTS = ("a cat, and a dog.", "One tree", "The owl sees, and waits.", "Two fish", "Stones")
NAMES = ["matched", "mismatched", "difference", "modality_gap"]


def media(model_type: str) -> list:
    random = np.random.default_rng(0)
    if model_type == "clap":
        return [random.normal(size=4000 + 500 * k).astype(np.float32) for k in range(len(TEXTS))]
    return [random.integers(0, 256, (40, 50, 3), dtype=np.uint8) for _ in TEXTS]


def rows(model_type: str, rate: int) -> list[dict]:
    made = []
    for content, text in zip(media(model_type), TEXTS, strict=True):
        given = {"audio": (content, rate)} if model_type == "clap" else {"image": content}
        made.append({**given, "text": text})
    return made


def built(model_type: str) -> tuple[PreTrainedModel, ProcessorMixin, int]:
    """A model, its processor and the rate of its sounds."""
    model, processor = composite.build(model_type)
    if model_type == "clip":
        # As in the published configurations: the vector of the largest id is that of a text.
        model.text_model.eos_token_id = 2
    if model_type == "siglip":
        # As in the published tokenizers.
        processor.tokenizer.model_input_names = ["input_ids"]
    extractor = getattr(processor, "feature_extractor", None)
    return model.double(), processor, getattr(extractor, "sampling_rate", 1)


def units(
    model_type: str, model: PreTrainedModel, processor: ProcessorMixin
) -> tuple[np.ndarray, np.ndarray]:
    """The output vectors of images or sounds and of texts at unit length, pair x dim."""
    both = [], []
    for content, text in zip(media(model_type), TEXTS, strict=True):
        given = {"images": content}
        if model_type == "clap":
            given = {"audio": content, "sampling_rate": processor.feature_extractor.sampling_rate}
        options = {}
        if model_type == "siglip":
            # As its documentation asks for.
            positions = model.config.text_config.max_position_embeddings
            options = {"padding": "max_length", "max_length": positions}
        inputs = processor(text=text, return_tensors="pt", **given, **options)
        for name, values in inputs.items():
            inputs[name] = values.double() if values.is_floating_point() else values
        with torch.no_grad(), DoublePrecision():
            output = model(**inputs)
        for name, made in zip(("audio_embeds", "text_embeds"), both, strict=True):
            name = name if name in output else "image_embeds"
            made.append(output[name][0].numpy())
    made = (np.stack(vectors) for vectors in both)
    return tuple(vectors / np.linalg.norm(vectors, axis=1)[:, None] for vectors in made)


def quantities(files: np.ndarray, texts: np.ndarray) -> np.ndarray:
    cosines = files @ texts.T
    matched = np.diag(cosines).mean()
    mismatched = cosines[~np.eye(len(cosines), dtype=bool)].mean()
    gap = np.linalg.norm(files.mean(0) - texts.mean(0))
    return np.array([matched, mismatched, matched - mismatched, gap])


def interval(files: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """The jackknife's interval, with a group for each pair."""
    groups = len(files)
    point = quantities(files, texts)
    kept = ~np.eye(groups, dtype=bool)
    without = np.stack([quantities(files[others], texts[others]) for others in kept])
    error = np.sqrt((groups - 1) / groups * ((without - without.mean(0)) ** 2).sum(0))
    bias = np.clip((groups - 1) * (without.mean(0) - point), -error, error)
    reach = stats.t.ppf(0.975, groups - 1) * error
    ends = np.stack([point - bias - reach, point - bias + reach])
    return ends.clip([-1, -1, -2, 0], [1, 1, 2, 2])


@pytest.mark.parametrize("model_type", ["clip", "siglip", "clap"])
def test_the_cosine_of_pairs_is_that_of_what_transformers_gives_out(model_type):
    model, processor, rate = built(model_type)
    files, texts = units(model_type, model, processor)
    # Each text and each image has a vector of its own.
    for vectors in (files, texts):
        assert np.linalg.norm(vectors - vectors[:1], axis=1)[1:].min() > 1e-3
    loaded = load_model(model, processor=processor)
    corpus = load_corpus(rows(model_type, rate))
    table = measure(loaded, corpus, "pair_cosine", progress=False)["pair_cosine"]
    assert table["measure"].tolist() == NAMES
    assert table["pairs"].tolist() == [len(TEXTS)] * 4
    assert table["value"].to_numpy() == pytest.approx(quantities(files, texts), abs=1e-12)
    ends = table[["ci_low", "ci_high"]].to_numpy().T
    assert ends == pytest.approx(interval(files, texts), abs=1e-10)


def test_workers_give_the_same_bytes(tmp_path, monkeypatch):
    folder = composite.save(tmp_path / "model", "clip")
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 2)
    corpus = load_corpus(rows("clip", 1))
    alone, by_two = (
        measure(str(folder), corpus, "pair_cosine", workers=workers, progress=False)["pair_cosine"]
        for workers in (1, 2)
    )
    assert by_two.equals(alone)


def test_a_single_pair_is_compared_with_no_other():
    model, processor, _ = built("clip")
    corpus = load_corpus(rows("clip", 1)[:1])
    table = measure(model, corpus, "pair_cosine", processor=processor, progress=False)
    values = table["pair_cosine"].set_index("measure")["value"]
    assert values.isna().tolist() == [False, True, True, False]
    # Two unit vectors, by the law of cosines.
    assert values["modality_gap"] ** 2 == pytest.approx(2 - 2 * values["matched"])


def test_a_pair_without_a_text_is_one_line():
    with pytest.raises(AnalysisError, match="item 1 has no text: give it one"):
        load_corpus([{"image": media("clip")[0], "text": ""}])


def test_models_that_do_not_compare_are_refused(tiny_folder):
    model, processor = composite.build("llava")
    with pytest.raises(AnalysisError, match="it does not compare an image or a sound with a text"):
        measure(model, load_corpus(rows("llava", 1)), "pair_cosine", processor=processor)
    with pytest.raises(AnalysisError, match="it does not compare an image or a sound with a text"):
        measure(str(tiny_folder("bert")), tiny.corpus("bert"), "pair_cosine")
    with pytest.raises(AnalysisError, match="pair_cosine has no bins"):
        metrics.PairCosine(bins="type")
