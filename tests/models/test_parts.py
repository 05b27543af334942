"""One part of a model of several: a text, image or speech tower, by its path."""

from pathlib import Path

import naive
import numpy as np
import pytest
import shrunk
import soundfile
import tiny
import torch
import transformers
from torch import special

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.corpora.media import Sound
from analysis_lib.models.loading import revision_of


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """CLIP as one finds it: a text and a vision tower, a tokenizer and an image processor."""
    folder = tmp_path_factory.mktemp("parts") / "clip"
    model = shrunk.build("clip")
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer("llama")
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(folder)
    size = model.config.vision_config.image_size
    transformers.ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(clip) -> transformers.CLIPModel:
    return transformers.AutoModel.from_pretrained(clip).double().eval()


def cosines(tables) -> np.ndarray:
    return tables["anisotropy"].query("space == 'hidden'")["cosine"].to_numpy()


def test_a_vision_tower_reads_images(clip, whole):
    processor = transformers.ViTImageProcessorPil.from_pretrained(clip)
    given = [processor(image.convert("RGB"), return_tensors="pt") for image in tiny.items("vit")]
    with torch.no_grad():
        read = [
            whole.vision_model(each["pixel_values"].double(), output_hidden_states=True)
            for each in given
        ]
    wanted = [
        naive.cosine([one.hidden_states[layer][0].numpy() for one in read]) for layer in range(3)
    ]
    loaded = load_model(clip, dtype="float64", part="vision_model")
    tables = measure(loaded, tiny.corpus("vit"), progress=False)
    np.testing.assert_allclose(cosines(tables), wanted, atol=1e-9)
    types = tables["attention_by_token_type"]["key_type"]
    assert {*types} == {"cls", "other"}
    assert loaded.layout.class_tokens == 1
    by_name = load_model(f"{clip}@part=vision_model")
    assert (by_name.name, by_name.kind) == (f"{clip}@part=vision_model", "image")
    assert by_name.revision == revision_of(by_name.name) != revision_of(f"{clip}@part=text_model")


def test_a_text_tower_reads_texts(clip, whole):
    tables = measure(f"{clip}@part=text_model", tiny.corpus("llama"), progress=False)
    assert tables.layers["part"].tolist()[1:] == ["encoder.layers.0", "encoder.layers.1"]
    live = load_model(
        whole, processor=transformers.AutoTokenizer.from_pretrained(clip), part="text_model"
    )
    np.testing.assert_allclose(
        cosines(tables), cosines(measure(live, tiny.corpus("llama"), progress=False)), rtol=1e-4
    )
    assert live.name.endswith("clip@part=text_model")


def test_a_part_has_twins(clip):
    one, other = (load_model(f"{clip}@part=vision_model:untrained@seed={seed}") for seed in (0, 1))
    assert one.kind == other.kind == "image"
    assert one.revision != other.revision


def test_a_part_on_the_command_line(clip, tmp_path, capsys):
    images = tmp_path / "images"
    images.mkdir()
    for place, image in enumerate(tiny.items("vit")):
        image.save(images / f"{place}.png")
    out = tmp_path / "out"
    given = [
        "measure",
        "--model",
        f"{clip}@part=vision_model",
        "--data",
        str(images),
        "--out",
        str(out),
    ]
    assert main(given) == 0
    assert [*out.glob("anisotropy.*")]
    assert (
        main(
            [
                "measure",
                "--model",
                f"{clip}@part=vision",
                "--data",
                str(images),
                "--out",
                str(tmp_path / "none"),
            ]
        )
        != 0
    )
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has no part vision: give one of text_model, vision_model" in said


def test_an_encoder_of_speech_has_its_part():
    model, processor = tiny.build("whisper")
    whole = load_model(model, processor=processor)
    part = load_model(model, processor=processor, part="encoder")
    corpus = tiny.corpus("whisper")
    np.testing.assert_array_equal(
        *(cosines(measure(each, corpus, progress=False)) for each in (whole, part))
    )


def test_whispers_decoder_reads_what_is_said():
    """Its tables beside those of the encoder, against transformers as documented, one sound at a
    time.
    """
    extractor, tokenizer = (
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
        tiny.tokenizer("t5"),
    )
    model, _ = tiny.build(
        "whisper", vocab_size=len(tokenizer), decoder_layers=2, decoder_start_token_id=1
    )
    model, processor = naive.in_double(model), transformers.WhisperProcessor(extractor, tokenizer)
    said = ["the cat", "", "a dog on the mat", "the cat"]
    sounds = [
        Sound(samples, 16000, text)
        for samples, text in zip(tiny.items("whisper"), said, strict=True)
    ]
    loaded = load_model(model, processor=processor, part="decoder")
    tables = measure(loaded, Corpus("said", sounds, kind="audio"), progress=False)
    attention = {
        f"decoder.layers.{layer}.{name}": ("k_proj", ())
        for layer in (0, 1)
        for name in ("self_attn", "encoder_attn")
    }
    hidden, own, cross, read = [], [], [], []
    for sound in sounds:
        features = extractor(sound.samples, sampling_rate=16000, return_tensors="pt")[
            "input_features"
        ].double()
        ids = torch.tensor([[1, *tokenizer(sound.text, add_special_tokens=False)["input_ids"]]])
        asked = {"output_attentions": True, "output_hidden_states": True}
        with torch.no_grad():
            given = model(input_features=features, decoder_input_ids=ids, **asked)
        hidden.append([layer[0].numpy() for layer in given.decoder_hidden_states])
        own.append([layer[0].numpy() for layer in given.decoder_attentions])
        cross.append([layer[0].numpy() for layer in given.cross_attentions])
        # The encoder's two layers come first.
        read.append(
            naive.read(
                model, {"input_features": features, "decoder_input_ids": ids}, attention
            ).attended[2:]
        )
    layers, rows = tables.layers.query("stack == 'decoder'")["layer"], tables["anisotropy"]
    assert len(layers) == 3
    for place, layer in enumerate(layers):
        space = "final" if place == 2 else "hidden"
        row = rows[(rows["layer"] == layer) & (rows["space"] == space)]
        assert row["cosine"].item() == pytest.approx(
            naive.cosine([text[place] for text in hidden]), abs=1e-9
        )
    entropy = tables["attention_entropy"]
    for stack, numbers, weights in (
        ("decoder", layers[1:], own),
        ("cross", tables.layers.query("stack == 'cross'")["layer"], cross),
    ):
        assert len(numbers) == 2, stack
        for place, layer in enumerate(numbers):
            for head, found in enumerate(entropy[entropy["layer"] == layer]["entropy_nats"]):
                rows_of = torch.cat(
                    [special.entr(torch.from_numpy(text[place][head])).sum(-1) for text in weights]
                )
                assert found == pytest.approx(rows_of.mean().item(), abs=1e-9)
    contributions = tables["score_contributions"].query("key_type == 'all'")
    numbers = [*layers[1:], *tables.layers.query("stack == 'cross'")["layer"]]
    assert {*numbers} <= {*contributions["layer"]}
    for of_sounds, layer in zip(zip(*read, strict=True), numbers, strict=True):
        for head, of_head in contributions[contributions["layer"] == layer].groupby("head"):
            wanted = sum(one.contributions[head - 1].sum(0) for one in of_sounds) / sum(
                one.pairs for one in of_sounds
            )
            np.testing.assert_allclose(
                of_head["contribution"], wanted, atol=1e-9 * abs(wanted).max()
            )


def test_a_folder_says_what_its_sounds_say(tmp_path):
    for name, samples in zip("ab", tiny.items("whisper"), strict=False):
        soundfile.write(tmp_path / f"{name}.wav", samples, 16000, subtype="FLOAT")
    silent = load_corpus(str(tmp_path))
    (tmp_path / "metadata.csv").write_text(
        "transcription,file_name\nthe cat,b.wav\n", encoding="utf-8"
    )
    corpus = load_corpus(str(tmp_path))
    assert [item.load().text for item in corpus.items] == ["", "the cat"]
    assert corpus.sha256 != silent.sha256
    tokenizer, extractor = (
        tiny.tokenizer("t5"),
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
    )
    model, _ = tiny.build("whisper", vocab_size=len(tokenizer), decoder_start_token_id=1)
    for part in (model, extractor, tokenizer):
        part.save_pretrained(tmp_path / "model")
    tables = measure(load_model(f"{tmp_path / 'model'}@part=decoder"), corpus, progress=False)
    assert tables.run["report"]["without_text"] == 1
    assert any(note.startswith("1 of 2 sounds have no text") for note in tables.run["notes"])
    counts = tables["anisotropy"].query("space == 'hidden'").set_index("layer")["tokens"]
    start = tables.layers.query("stack == 'decoder'")["layer"].iloc[0]
    assert counts[start] == 1 + 1 + len(tokenizer("the cat", add_special_tokens=False)["input_ids"])


def test_the_text_of_a_sound_that_is_cut_is_refused():
    tokenizer, extractor = (
        tiny.tokenizer("t5"),
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
    )
    model, _ = tiny.build("whisper", vocab_size=len(tokenizer))
    loaded = load_model(
        model, processor=transformers.WhisperProcessor(extractor, tokenizer), part="decoder"
    )
    long = [Sound(np.tile(tiny.items("whisper")[0], 6), 16000, "the cat")] * 2
    with pytest.raises(AnalysisError, match=r"longer than the 1 seconds .* its text cannot be cut"):
        measure(loaded, Corpus("long", long, kind="audio"), progress=False)


def test_a_decoder_of_sound_needs_a_tokenizer():
    model, extractor = tiny.build("whisper")
    with pytest.raises(
        AnalysisError, match="its decoder reads texts, and a WhisperFeatureExtractor none: give"
    ):
        load_model(model, processor=extractor, part="decoder")


def test_padded_patches_are_no_vectors():
    """SigLIP 2 reads images of any proportion in one number of patches, the last of which are
    padding.
    """
    model = shrunk.build("siglip2").vision_model
    processor = transformers.Siglip2ImageProcessorPil(
        patch_size=model.config.patch_size, max_num_patches=16
    )
    loaded = load_model(naive.in_double(model), processor=processor)
    tables = measure(loaded, tiny.corpus("vit"), progress=False)
    vectors = []
    for image in tiny.items("vit"):
        given = processor(image.convert("RGB"), return_tensors="pt")
        given["pixel_values"] = given["pixel_values"].double()
        with torch.no_grad():
            read = loaded.model(**given, output_hidden_states=True)
        vectors.append(
            [
                layer[0][given["pixel_attention_mask"][0].bool()].numpy()
                for layer in read.hidden_states
            ]
        )
    assert sum(len(layers[0]) for layers in vectors) < 16 * len(vectors)
    wanted = [naive.cosine([layers[layer] for layers in vectors]) for layer in range(3)]
    np.testing.assert_allclose(cosines(tables), wanted, atol=1e-9)


def test_an_image_that_is_read_anew_each_time_is_refused():
    model = shrunk.build("vit_mae")
    with pytest.raises(AnalysisError, match="other vectors of one image each time"):
        load_model(model, processor=shrunk.processor(model))
