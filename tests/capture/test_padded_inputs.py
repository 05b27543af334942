"""What a processor pads or cuts by itself: padding counts nowhere, and what is cut is said."""

import numpy as np
import pytest
import tiny
import torch
import transformers
from naive import cosine, in_double

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.capture.batching import batches
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.corpora import Corpus, Sound
from analysis_lib.models.sounds import Steps, steps_of, window_of

RATE = 16_000
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
# Frames of a spectrogram in the window of an AST; the default has 1024.
FRAMES = 128


def spectrogram_transformer(
    stride: int,
) -> tuple[transformers.PreTrainedModel, transformers.ASTFeatureExtractor]:
    """A tiny AST; neighbouring patches overlap where the stride is below 16."""
    strides = {"frequency_stride": stride, "time_stride": stride}
    config = transformers.ASTConfig(
        **SIZES, **strides, patch_size=16, max_length=FRAMES, num_mel_bins=32
    )
    torch.manual_seed(0)
    model = transformers.ASTModel(config).eval()
    tiny.randomise(model)
    return in_double(model), transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=FRAMES)


def sounds(lengths: list[int]) -> list[Sound]:
    """Tones in noise, each of so many samples, another tone after the first 1.28 seconds."""
    draw = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        time = np.arange(length) / RATE
        tone = 0.3 * np.sin(2 * np.pi * (200 + 150 * number + 300 * (time > 1.28)) * time)
        found.append(Sound((tone + 0.02 * draw.standard_normal(length)).astype(np.float32), RATE))
    return found


def of_padded(
    model, reads, corpus: list[Sound], stride: int, count: bool = True
) -> list[torch.Tensor]:
    """By layer, the vectors that transformers gives, without those of patches of padding alone."""
    every = []
    for sound in corpus:
        # Frames of 25 ms, 10 ms apart, none of which reaches beyond the end of the sound.
        real = min(FRAMES, 1 + (len(sound.samples) - 400) // 160)
        values = reads(sound.samples, sampling_rate=RATE, return_tensors="pt")[
            "input_values"
        ].double()
        with torch.no_grad():
            hidden = model(values, output_hidden_states=True).hidden_states
        in_time = (FRAMES - 16) // stride + 1
        kept = [step for step in range(in_time) if step * stride < real]
        grids = [
            layer[0, 2:].unflatten(0, (-1, in_time))[:, kept].flatten(0, 1) for layer in hidden
        ]
        every.append(
            [torch.cat([layer[0, :2], grid]) for layer, grid in zip(hidden, grids, strict=True)]
        )
    return [torch.cat(layer) for layer in zip(*every, strict=True)]


def hidden_cosines(tables) -> list[float]:
    return tables["anisotropy"].query("space == 'hidden'")["cosine"].tolist()


@pytest.mark.parametrize("stride", [16, 10])
def test_padding_of_a_spectrogram_counts_nowhere(stride):
    model, reads = spectrogram_transformer(stride)
    # At the edges of a frame, of a step of patches and of the window, and beyond it.
    lengths = [
        4800,
        560,
        2959,
        2960,
        3119,
        3120,
        16 * 160,
        17 * 160 + 400,
        20_480,
        20_720,
        20_719,
        40_000,
    ]
    corpus = sounds(lengths)
    tables = measure(
        load_model(model, processor=reads), Corpus("sounds", corpus, kind="audio"), progress=False
    )
    expected = of_padded(model, reads, corpus, stride)
    assert tables["anisotropy"]["tokens"].iloc[0] == len(expected[0])
    wanted = [cosine([layer.numpy()]) for layer in expected]
    np.testing.assert_allclose(hidden_cosines(tables), wanted, rtol=1e-6)
    # One window has 128 frames, 10 ms apart.
    assert tables.run["report"]["cut"] == sum(length > 20_480 for length in lengths) == 3
    assert any(
        "3 of 12 sounds are longer than the 1.28 seconds that are read" in note
        for note in tables.run["notes"]
    )


def test_what_is_behind_a_window_is_read_in_windows():
    model, reads = spectrogram_transformer(16)
    corpus = sounds([5 * RATE, 20_480, 30_000])
    given = {"long_texts": "window", "progress": False}
    tables = measure(
        load_model(model, processor=reads),
        Corpus("sounds", corpus, kind="audio"),
        "anisotropy",
        **given,
    )
    report = tables.run["report"]
    assert (report["utterances"], report["windowed"], report["cut"]) == (4 + 1 + 2, 2, 0)
    # Of the second window of each, all steps of time that begin in the sound.
    steps = sum(-(-(length - 240) // 2560) for length in [5 * RATE - 3 * 20_480, 30_000 - 20_480])
    assert tables["anisotropy"]["tokens"].iloc[0] == (3 + 1 + 1) * (2 + 2 * 8) + 2 * 2 + 2 * steps


def test_the_class_tokens_of_a_spectrogram_are_of_their_type():
    model, reads = spectrogram_transformer(16)
    given = {"special_tokens": False, "progress": False}
    loaded = load_model(model, processor=reads)
    tables = measure(
        loaded, Corpus("sounds", sounds([4800, 9600]), kind="audio"), "anisotropy", **given
    )
    # Two and four steps of time, in two bands.
    assert tables["anisotropy"]["tokens"].iloc[0] == 2 * (2 + 4)


def test_whisper_is_known_by_what_it_does():
    """By neither a name nor a setting: its vectors begin 20 ms apart, and those that begin in the
    sound count.
    """
    model, reads = tiny.build("whisper")
    loaded = load_model(model, processor=reads)
    assert (window_of(loaded.processor).samples, steps_of(loaded)) == (RATE, Steps(320))
    lengths = [1600, 3200, 3201, 15_999, 16_000, 40_000]
    reading = Reading()
    made = batches(loaded, sounds(lengths), range(len(lengths)), Settings(), reading)
    found = {}
    for batch in made:
        silent = batch.steps.padding(50, batch.lengths)
        found |= dict(zip(batch.groups, (~silent).sum(1).tolist(), strict=True))
    assert [found[number] for number in range(len(lengths))] == [
        -(-min(n, RATE) // 320) for n in lengths
    ]
    assert reading.cut == 1


def test_processors_that_pad_nothing_have_no_window():
    for reads in (
        transformers.Wav2Vec2FeatureExtractor(),
        transformers.SeamlessM4TFeatureExtractor(),
    ):
        assert window_of(reads) is None


@pytest.mark.parametrize("name", ["Siglip", "Siglip2"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_tower_that_was_trained_on_padding_reads_it(name, side):
    tokenizer = tiny.tokenizer("t5")
    tokenizer.model_max_length, tokenizer.padding_side = 24, side
    made = getattr(transformers, f"{name}TextConfig")
    config = made(vocab_size=len(tokenizer), max_position_embeddings=24, pad_token_id=0, **SIZES)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}TextModel")(config).eval()
    tiny.randomise(model)
    model = in_double(model)
    texts = [*tiny.TEXTS[:6], " ".join(tiny.TEXTS)]
    every, weights = [], []
    for text in texts:
        padding = {"padding": "max_length", "max_length": 24, "truncation": True}
        inputs = tokenizer(text, **padding, return_tensors="pt")
        with torch.no_grad():
            given = model(
                input_ids=inputs["input_ids"], output_hidden_states=True, output_attentions=True
            )
        real = inputs["attention_mask"][0].bool()
        every.append([layer[0, real] for layer in given.hidden_states])
        weights.append([layer[0][:, real] for layer in given.attentions])
    tables = measure(
        model, texts, ["anisotropy", "attention_entropy"], tokenizer=tokenizer, progress=False
    )
    wanted = [cosine([text[layer].numpy() for text in every]) for layer in range(3)]
    np.testing.assert_allclose(hidden_cosines(tables), wanted, rtol=1e-6)
    entropy = tables["attention_entropy"].query("layer == 1")["entropy_nats"]
    rows = torch.cat([-(layer[0] * layer[0].log()).sum(-1) for layer in weights], dim=1)
    np.testing.assert_allclose(entropy, rows.mean(1), rtol=1e-6)
    assert tables.run["report"]["cut"] == 2


def test_vectors_that_do_not_follow_in_time_are_refused(monkeypatch):
    model, reads = spectrogram_transformer(16)
    loaded = load_model(model, processor=reads)
    patches = loaded.model.get_submodule("embeddings")

    def shuffled(_module: torch.nn.Module, _args: tuple, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[
            :,
            [0, 1, *torch.randperm(16, generator=torch.Generator().manual_seed(0)).add(2).tolist()],
        ]

    with (
        patches.register_forward_hook(shuffled),
        pytest.raises(AnalysisError, match="which vectors stand for padding"),
    ):
        steps_of(loaded)
