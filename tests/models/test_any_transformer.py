"""Models that no entry lists: their layout is found, and their tables equal a naive reference in float64."""

import functools
from collections.abc import Mapping

import naive
import numpy as np
import pytest
import shrunk
import tiny
import torch
import transformers
from tiny import TEXTS

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.models import LoadedModel
from analysis_lib.models.layouts import kind_of

# Latent attention; and norms after rotations, other rotations, keys that are repeated or multiplied.
LATENT = ("glm4_moe_lite", "minicpm3", "dots3_note_text")
CHAINED = ("llama4_text", "nanochat", "jetmoe", "gemma4_text", "openai_privacy_filter", "mlcd_vision_model")
# Of those that researchers use most, a few of each kind.
MOST_USED = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "modernbert", "eurobert"),
    *("mobilebert", "ernie", "roformer", "esm", "nomic_bert", "gpt2", "gpt_neox", "gptj", "falcon"),
    *("opt", "llama", "mistral", "ministral3", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "olmo", "olmo2", "olmo3", "phi", "phi3", "phimoe", "cohere", "cohere2", "granite"),
    *("granitemoe", "granite_swa", "smollm3", "starcoder2", "stablelm", "deepseek_v3", "glm", "glm4", "gpt_oss"),
    *(
        "exaone4",
        "helium",
        "persimmon",
        "bart",
        "mbart",
        "marian",
        "pegasus",
        "m2m_100",
        "t5gemma",
        "clip",
        "siglip",
        "t5",
        "umt5",
    ),
    *(
        "clip",
        "siglip",
        "t5",
        "umt5",
        "mamba",
        "jamba",
        "bamba",
        "fnet",
        "llava",
        "seed_oss",
        "ernie4_5",
        "apertus",
        "biogpt",
    ),
    *("clip_vision_model", "siglip_vision_model", "ijepa", "data2vec-audio", "unispeech", "sew"),
    *("audio-spectrogram-transformer", "wav2vec2-bert", "wavlm"),
    *LATENT,
    *CHAINED,
)
# What their small configuration lacks otherwise.
CHANGES = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "t5": {"decoder_start_token_id": 0},
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 0},
}
_SPEECH = {"conv_dim": [32] * 7, "conv_stride": [5, 2, 2, 2, 2, 2, 2], "conv_kernel": [10, 3, 3, 3, 3, 2, 2]}
CHANGES |= dict.fromkeys(("data2vec-audio", "unispeech", "wavlm"), _SPEECH)
SOME = [TEXTS[0], TEXTS[3], TEXTS[4]]
TOLERANCE = 1e-9
every_type = pytest.mark.parametrize("model_type", MOST_USED)


def reads() -> transformers.PreTrainedTokenizerFast:
    tokenizer = tiny.tokenizer("llama")
    tokenizer.pad_token = "<unk>"
    return tokenizer


@functools.cache
def loaded(model_type: str) -> LoadedModel:
    model = shrunk.build(model_type, **CHANGES.get(model_type, {}))
    processor = reads() if kind_of(model) == "text" else shrunk.processor(model)
    return load_model(naive.in_double(model), processor=processor)


@functools.cache
def tables(model_type: str) -> dict:
    model = loaded(model_type)
    example = {"text": None, "image": "vit", "audio": "wav2vec2"}[model.kind]
    return measure(model, SOME if example is None else tiny.corpus(example), progress=False)


def prepared(model: LoadedModel) -> list[Mapping[str, torch.Tensor]]:
    """What a model reads of each item, as its documentation says."""
    if model.kind == "text":
        read = [reads()(text, return_tensors="pt") for text in SOME]
        return [{name: given[name] for name in ("input_ids", "attention_mask")} for given in read]
    if model.kind == "image":
        given = [model.processor(image.convert("RGB"), return_tensors="pt") for image in tiny.items("vit")]
    else:
        rate = model.processor.sampling_rate
        given = [model.processor(sound, sampling_rate=rate, return_tensors="pt") for sound in tiny.items("wav2vec2")]
    return [
        {name: values.double() if values.is_floating_point() else values for name, values in each.items()}
        for each in given
    ]


@functools.cache
def reference(model_type: str) -> list[naive.Text]:
    """What a model makes of each text alone."""
    model, projections = loaded(model_type), {}
    names = {module: path for path, module in model.model.named_modules()}
    for stack, blocks in model.stacks.items():
        for place, block in enumerate(blocks):
            for spec in (stack.attention_of(place), stack.cross):
                if spec and spec.key:
                    norms = [norm for norm in (spec.key_norm, *(spec.latent or ())[:1]) if norm]
                    projections[names[block.get_submodule(spec.module)]] = spec.key, norms
    return [naive.read(model.model, given, projections) for given in prepared(model)]


@every_type
def test_hidden_states(model_type):
    texts, found = reference(model_type), tables(model_type)["anisotropy"].query("space == 'hidden'")
    assert len(found) == len(texts[0].hidden)
    for layer, row in enumerate(found.itertuples()):
        if texts[0].hidden[layer] is not None:
            # A map of features is one vector.
            vectors = [v.reshape(1, -1) if v.ndim == 3 else v for v in (text.hidden[layer] for text in texts)]
            assert row.cosine == pytest.approx(naive.cosine(vectors), abs=TOLERANCE)


def attended(model_type: str) -> list[tuple[int, list[naive.Attended]]]:
    """The attention layers, by their numbers, and what the reference has of them."""
    found = tables(model_type)
    if "attention_entropy" not in found:
        assert all(stack.attention is None for stack in loaded(model_type).layout.stacks)
        return []
    layers = sorted(found["attention_entropy"]["layer"].unique())
    texts = reference(model_type)
    assert len(layers) == len(texts[0].attended)
    return [(layer, [text.attended[place] for text in texts]) for place, layer in enumerate(layers)]


@every_type
def test_queries_keys_and_entropies(model_type):
    found = tables(model_type)
    for layer, of_texts in attended(model_type):
        for space in ("query", "key", "value"):
            rows = found["anisotropy"]
            rows = rows[(rows["space"] == space) & (rows["layer"] == layer)]
            wanted = [
                naive.cosine([getattr(one, space)[head] for one in of_texts])
                for head in range(len(getattr(of_texts[0], space)))
            ]
            np.testing.assert_allclose(rows["cosine"], wanted, atol=TOLERANCE)
        rows = found["attention_entropy"]
        rows = rows[rows["layer"] == layer]
        wanted = [naive.entropies(of_texts, head).mean() for head in range(len(rows))]
        np.testing.assert_allclose(rows["entropy_nats"], wanted, atol=TOLERANCE)


@every_type
def test_masses_sum_to_one_and_a_sink_has_its_part(model_type):
    found = tables(model_type).get("attention_by_token_type")
    for layer, of_texts in attended(model_type):
        rows = found[found["layer"] == layer]
        by_head = rows.groupby("head")
        np.testing.assert_allclose(by_head["mass"].sum(), 1, atol=TOLERANCE)
        np.testing.assert_allclose(by_head["uniform_mass"].sum(), 1, atol=TOLERANCE)
        sinks = rows[rows["key_type"] == "sink"]
        assert len(sinks) == (0 if of_texts[0].sink is None else rows["head"].nunique())
        if len(sinks):
            wanted = np.concatenate([one.sink for one in of_texts], axis=1).mean(1)
            np.testing.assert_allclose(sinks["mass"], wanted, atol=TOLERANCE)


@every_type
def test_contributions(model_type):
    for layer, of_texts in attended(model_type):
        if "score_contributions" not in tables(model_type):
            assert "could not be shown" in loaded(model_type).lacking["scores"]
            continue
        rows = tables(model_type)["score_contributions"]
        rows = rows[(rows["layer"] == layer) & (rows["key_type"] == "all")]
        for head, of_head in rows.groupby("head"):
            wanted = sum(one.contributions[head - 1].sum(0) for one in of_texts) / sum(one.pairs for one in of_texts)
            np.testing.assert_allclose(of_head["contribution"], wanted, atol=TOLERANCE * abs(wanted).max())


def test_most_of_them_have_contributions():
    """A reference that is never reached would prove nothing."""
    have = [name for name in MOST_USED if "score_contributions" in tables(name)]
    assert len(have) >= 50
    assert {"gpt_oss", "gemma2", "olmo2", "qwen3_moe", "bart", "phi3", "persimmon", *LATENT, *CHAINED} <= {*have}


@pytest.mark.parametrize("model_type", ["bart", "mbart", "marian", "pegasus", "m2m_100", "t5gemma", "t5"])
def test_attention_to_an_encoder_has_numbers_after_all_layers(model_type):
    found = tables(model_type).layers
    assert found["stack"].drop_duplicates().tolist() == ["encoder", "decoder", "cross"]
    assert found["layer"].tolist() == list(range(len(found)))
    assert found.query("stack == 'cross'")["part"].tolist() == found.query("stack == 'decoder'")["part"].tolist()[1:]


def test_layers_of_a_hybrid_keep_their_numbers():
    found = tables("jamba")
    assert found["anisotropy"].query("space == 'hidden'")["layer"].tolist() == [0, 1, 2]
    assert set(found["attention_entropy"]["layer"]) == {2}


@pytest.mark.parametrize("model_type", ["fnet", "mobilebert"])
def test_texts_of_other_lengths_are_read_apart_where_padding_would_change_them(model_type):
    assert loaded(model_type).layout.equal_lengths
    assert not loaded("llama").layout.equal_lengths


@pytest.mark.parametrize(
    ("model_type", "words"), [("cpmant", "stand for no tokens"), ("xlm", "no transformer block"), ("lxmert", "read")]
)
def test_what_is_not_found_is_one_line(model_type, words):
    config = shrunk.configuration(model_type)
    torch.manual_seed(0)
    with pytest.raises(AnalysisError, match=words) as raised:
        load_model(transformers.AutoModel.from_config(config).eval(), processor=reads())
    assert "\n" not in str(raised.value)
    assert model_type in str(raised.value)
