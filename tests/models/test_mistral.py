"""Tokenizers of mistral-common, and the processor that reads sounds through it."""

import base64
import io

import composite
import numpy as np
import pytest
import soundfile
import transformers

from analysis_lib import load_corpus, load_model, measure
from analysis_lib.errors import AnalysisError
from analysis_lib.models import pairs

SAMPLES = np.linspace(-1, 1, 16000, dtype=np.float32) ** 3
# What Mistral's tokenizers put around a message.
START, END = [1, 3], [4]


class Tokenizer:
    """Letters by their code points; a message has marks around it."""

    def apply_chat_template(self, messages):
        [message] = messages
        return {"input_ids": [*START, *map(ord, message["content"]), *END]}


class Processor:
    """Reads a text when it is called, and sounds in a message, as Voxtral's does."""

    tokenizer = Tokenizer()
    feature_extractor = transformers.WhisperFeatureExtractor()

    def __call__(self, text, **kwargs):
        raise AssertionError("it reads no sounds")

    def apply_chat_template(self, messages):
        [message] = messages
        assert message["role"] == "user"
        *sounds, text = message["content"]
        read = [soundfile.read(io.BytesIO(base64.b64decode(one["base64"]))) for one in sounds]
        self.rates = [rate for _, rate in read]
        ids = [*START, *[24] * len(sounds), *map(ord, text["text"]), *END]
        return {"input_ids": [ids], "input_features": np.stack([samples for samples, _ in read])}


@pytest.fixture
def with_mistral(monkeypatch):
    monkeypatch.setattr(pairs, "is_mistral_common_available", lambda: True)


def test_sounds_are_in_a_message_whole_and_at_their_rate(with_mistral):
    processor = Processor()
    [reader] = pairs.readers(processor, "audio+text")
    made = reader([SAMPLES, -SAMPLES], "hi")
    assert made["input_ids"].tolist() == [[1, 3, 24, 24, 104, 105, 4]]
    assert processor.rates == [16000, 16000]
    np.testing.assert_array_equal(made["input_features"], [SAMPLES, -SAMPLES])
    assert reader.plain_ids("hi", 2) == [1, 3, 104, 105, 4]


def test_without_mistral_common_its_sounds_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(pairs, "is_mistral_common_available", lambda: False)
    with pytest.raises(AnalysisError, match=r"run pip install .mistral-common.audio") as caught:
        list(pairs.readers(Processor(), "audio+text"))
    assert "\n" not in str(caught.value)


def test_a_folder_with_a_tokenizer_of_mistral_common_is_measured(tmp_path, caplog):
    config = transformers.MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.MistralModel(config).save_pretrained(tmp_path)
    composite.write_tekken(tmp_path)
    texts = ["the words of a text", "and others"]
    tables = measure(load_model(str(tmp_path)), load_corpus(texts), "anisotropy", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    count = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    hidden = tables["anisotropy"].query("space == 'hidden'")
    assert (hidden["tokens"] == count).all()
    starts = tokenizer("a")["input_ids"][0] == 1
    assert ("without mistral-common" in caplog.text) == (not starts)
