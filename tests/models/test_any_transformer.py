"""Models that no entry lists: their layout is found, and their tables equal a naive reference in
float64.
"""

import functools
import itertools
from collections.abc import Mapping

import naive
import numpy as np
import pytest
import shrunk
import tiny
import torch
import transformers
from tiny import TEXTS
from torch import nn

from analysis_book.atlas.sizes import CHANGES, CONFIGURED
from analysis_lib import AnalysisError, Replace, load_model, measure
from analysis_lib.models import LoadedModel
from analysis_lib.models.parts import PADDED_TEXTS
from analysis_lib.models.probe import kind_of

# Latent attention; and norms after rotations, other rotations, keys that are repeated or
# multiplied.
LATENT = ("glm4_moe_lite", "minicpm3", "dots3_note_text")
CHAINED = (
    "llama4_text",
    "nanochat",
    "jetmoe",
    "gemma4_text",
    "openai_privacy_filter",
    "mlcd_vision_model",
)
# Of those that researchers use most, a few of each kind.
MOST_USED = (
    *(
        "bert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "electra",
        "distilbert",
        "albert",
        "modernbert",
        "eurobert",
    ),
    *("mobilebert", "ernie", "roformer", "esm", "nomic_bert", "gpt2", "gpt_neox", "gptj", "falcon"),
    *(
        "opt",
        "llama",
        "mistral",
        "ministral3",
        "mixtral",
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen2",
        "qwen2_moe",
    ),
    *(
        "qwen3",
        "qwen3_moe",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "phimoe",
        "cohere",
        "cohere2",
        "granite",
    ),
    *(
        "granitemoe",
        "granite_swa",
        "smollm3",
        "starcoder2",
        "stablelm",
        "deepseek_v3",
        "glm",
        "glm4",
        "gpt_oss",
    ),
    *("exaone4", "helium", "persimmon", "bart", "mbart", "marian", "pegasus", "m2m_100", "t5gemma"),
    *("clip", "siglip", "t5", "umt5", "mamba", "jamba", "bamba", "fnet", "llava", "seed_oss"),
    *("ernie4_5", "apertus", "biogpt"),
    *("clip_vision_model", "siglip_vision_model", "ijepa", "data2vec-audio", "unispeech", "sew"),
    *("audio-spectrogram-transformer", "wav2vec2-bert", "wavlm"),
    *LATENT,
    *CHAINED,
    *(
        "yolos",
        "sam_vision_model",
        "sam2_vision_model",
        "swin",
        "swinv2",
        "focalnet",
        "pvt_v2",
        "poolformer",
    ),
    *("speech_to_text", "moonshine"),
    # Attention that modules compute by themselves.
    *(
        "mpt",
        "codegen",
        "gpt_neox_japanese",
        "big_bird",
        "bigbird_pegasus",
        "convbert",
        "tapas",
        "git",
        "mvp",
        "xlnet",
    ),
    *("visual_bert", "sew-d", "ibert"),
    # Parts of blocks that are declared as blocks, two attentions in each, blocks that are not run;
    # vectors padded to a window; norms of all keys at once.
    *(
        "zamba",
        "zamba2",
        "longcat_flash",
        "mllama_text_model",
        "longformer",
        "led",
        "longt5",
        "chameleon",
    ),
)
SOME = [TEXTS[0], TEXTS[3], TEXTS[4]]
TOLERANCE = 1e-9
every_type = pytest.mark.parametrize("model_type", MOST_USED)


def reads() -> transformers.PreTrainedTokenizerFast:
    tokenizer = tiny.tokenizer("llama")
    tokenizer.pad_token = "<unk>"
    return tokenizer


def built(model_type: str) -> transformers.PreTrainedModel:
    """A small random model of an architecture."""
    if model_type not in CONFIGURED:
        return shrunk.build(model_type, **CHANGES.get(model_type, {}))
    config = transformers.AutoConfig.for_model(model_type, **CONFIGURED[model_type])
    kind = (
        transformers.MllamaTextModel
        if model_type == "mllama_text_model"
        else transformers.AutoModel.from_config
    )
    torch.manual_seed(0)
    model = kind(config)
    tiny.randomise(model)
    return model.eval()


@functools.cache
def loaded(model_type: str) -> LoadedModel:
    model = built(model_type)
    processor = reads() if kind_of(model) == "text" else shrunk.processor(model)
    return load_model(naive.in_double(model), processor=processor)


@functools.cache
def tables(model_type: str) -> dict:
    model = loaded(model_type)
    example = {"text": None, "image": "vit", "audio": "wav2vec2"}[model.kind]
    return measure(model, SOME if example is None else tiny.corpus(example), progress=False)


def prepared(model: LoadedModel) -> list[Mapping[str, torch.Tensor]]:
    """What a model reads of each item, as its documentation says."""
    if model.model.config.model_type in PADDED_TEXTS:
        padding = {"padding": "max_length", "max_length": model.max_length}
        return [
            {"input_ids": reads()(text, **padding, return_tensors="pt")["input_ids"]}
            for text in SOME
        ]
    if model.kind == "text":
        read = [reads()(text, return_tensors="pt") for text in SOME]
        return [{name: given[name] for name in ("input_ids", "attention_mask")} for given in read]
    if model.kind == "image":
        given = [
            model.processor(image.convert("RGB"), return_tensors="pt")
            for image in tiny.items("vit")
        ]
    else:
        rate = model.processor.sampling_rate
        given = [
            model.processor(sound, sampling_rate=rate, return_tensors="pt")
            for sound in tiny.items("wav2vec2")
        ]
    return [
        {
            name: values.double() if values.is_floating_point() else values
            for name, values in each.items()
        }
        for each in given
    ]


def real_vectors(model: LoadedModel) -> list[np.ndarray | None]:
    """Which vectors of each item count, where a model reads padding that nothing masks."""
    config = model.model.config
    if config.model_type in PADDED_TEXTS:
        # The tests' tokenizer pads at the end.
        return [np.arange(model.max_length) < len(reads()(text)["input_ids"]) for text in SOME]
    if config.model_type != "audio-spectrogram-transformer":
        return [None] * 4
    bands, steps = (
        (size - config.patch_size) // stride + 1
        for size, stride in (
            (config.num_mel_bins, config.frequency_stride),
            (config.max_length, config.time_stride),
        )
    )
    found = []
    for sound in tiny.items("wav2vec2"):
        frames = 1 + (len(sound) - 400) // 160
        in_sound = np.arange(steps) * config.time_stride < frames
        found.append(np.concatenate([[True, True], np.tile(in_sound, bands)]))
    return found


@functools.cache
def reference(model_type: str) -> list[naive.Text]:
    """What a model makes of each text alone."""
    model, projections = loaded(model_type), {}
    names = {module: path for path, module in model.model.named_modules()}
    for stack, blocks in model.stacks.items():
        for place, block in enumerate(blocks):
            for spec in (stack.attention_of(place), stack.cross, *stack.further):
                if spec and spec.key:
                    norms = [norm for norm in (spec.key_norm, *(spec.latent or ())[:1]) if norm]
                    projections[names[block.get_submodule(spec.module)]] = spec.key, norms
    # Of texts, all give what each block gives.
    blocks = [] if model.kind == "text" else [*itertools.chain(*model.stacks.values())]
    own = any(spec.own for _, spec in model.attending)
    real = real_vectors(model)
    return [
        naive.read(model.model, given, projections, blocks, counted, own)
        for given, counted in zip(prepared(model), real, strict=False)
    ]


@every_type
def test_hidden_states(model_type):
    texts, found = (
        reference(model_type),
        tables(model_type)["anisotropy"].query("space == 'hidden'"),
    )
    assert len(found) == len(texts[0].hidden)
    for layer, row in enumerate(found.itertuples()):
        if texts[0].hidden[layer] is not None:
            # A map of features is one vector; of a grid, each position.
            one = loaded(model_type).layout.maps
            vectors = [
                v.reshape(1 if one else -1, -1 if one else v.shape[-1])
                for v in (t.hidden[layer] for t in texts)
            ]
            assert row.cosine == pytest.approx(naive.cosine(vectors), abs=TOLERANCE)


def attended(model_type: str) -> list[tuple[int, list[naive.Attended]]]:
    """The attention layers, by their numbers, and what the reference has of them."""
    found = tables(model_type)
    if "attention_entropy" not in found:
        assert all(stack.attention is None for stack in loaded(model_type).layout.stacks)
        return []
    layers = sorted(found["attention_entropy"]["layer"].unique())
    texts = reference(model_type)
    count = len(texts[0].attended)
    assert len(layers) == count
    # The first attention of every block comes first, then the second ones.
    of_block = 1 + max(len(stack.further) for stack in loaded(model_type).stacks)
    places = sorted(range(count), key=lambda place: place % of_block)
    return [
        (layer, [text.attended[place] for text in texts])
        for place, layer in zip(places, layers, strict=True)
    ]


@every_type
def test_queries_keys_and_entropies(model_type):
    found = tables(model_type)
    for layer, of_texts in attended(model_type):
        naive.assert_attention_agrees(found, layer, of_texts, TOLERANCE)


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
            assert "could not be shown" in loaded(model_type).unsupported["scores"]
            continue
        rows = tables(model_type)["score_contributions"]
        rows = rows[(rows["layer"] == layer) & (rows["key_type"] == "all")]
        if of_texts[0].contributions is None:
            continue
        for head, of_head in rows.groupby("head"):
            wanted = sum(one.contributions[head - 1].sum(0) for one in of_texts) / sum(
                one.pairs for one in of_texts
            )
            np.testing.assert_allclose(
                of_head["contribution"], wanted, atol=TOLERANCE * abs(wanted).max()
            )


def test_most_of_them_have_contributions():
    """A reference that is never reached would prove nothing."""
    have = [name for name in MOST_USED if "score_contributions" in tables(name)]
    assert len(have) >= 50
    assert {
        "gpt_oss",
        "gemma2",
        "olmo2",
        "qwen3_moe",
        "bart",
        "phi3",
        "persimmon",
        *LATENT,
        *CHAINED,
    } <= {*have}


@pytest.mark.parametrize(
    "model_type", ["bart", "mbart", "marian", "pegasus", "m2m_100", "t5gemma", "t5"]
)
def test_attention_to_an_encoder_has_numbers_after_all_layers(model_type):
    found = tables(model_type).layers
    assert found["stack"].drop_duplicates().tolist() == ["encoder", "decoder", "cross"]
    assert found["layer"].tolist() == list(range(len(found)))
    assert (
        found.query("stack == 'cross'")["part"].tolist()
        == found.query("stack == 'decoder'")["part"].tolist()[1:]
    )


def test_detection_tokens_have_a_type_and_leave_with_the_special_ones():
    texts, last = (
        reference("yolos"),
        slice(-loaded("yolos").model.config.num_detection_tokens, None),
    )
    rows = tables("yolos")["attention_by_token_type"].query(
        "key_type == 'detection' and layer == 1"
    )
    weights = np.concatenate([text.attended[0].weights for text in texts], axis=1)
    np.testing.assert_allclose(rows["mass"], weights[:, :, last].sum(2).mean(1), atol=TOLERANCE)
    found = measure(
        loaded("yolos"), tiny.corpus("vit"), "anisotropy", special_tokens=False, progress=False
    )
    for layer in (0, 1):
        cosine = found["anisotropy"].query("space == 'hidden'")["cosine"].iloc[layer]
        assert cosine == pytest.approx(
            naive.cosine([t.hidden[layer][1 : last.start] for t in texts]), abs=TOLERANCE
        )


def test_a_grid_is_changed_where_it_stands():
    model, changed = (
        loaded("sam_vision_model"),
        Replace("residual", layers=[1], dimensions=[3], by="zero"),
    )
    found = measure(model, tiny.corpus("vit"), "anisotropy", intervention=changed, progress=False)[
        "anisotropy"
    ]
    first, second = model.model.vision_encoder.layers
    seen = []

    def without(_block: nn.Module, _args: tuple, output: torch.Tensor) -> torch.Tensor:
        output[..., 3] = 0
        return output

    hooks = (
        first.register_forward_hook(without),
        second.register_forward_hook(lambda *call: seen.append(call[2])),
    )
    with torch.no_grad():
        for given in prepared(model):
            model.model(**given)
    for hook in hooks:
        hook.remove()
    wanted = naive.cosine([grid[0].flatten(0, 1).numpy() for grid in seen])
    assert found["cosine"].iloc[2] == pytest.approx(wanted, abs=TOLERANCE)


def test_layers_of_a_hybrid_keep_their_numbers():
    found = tables("jamba")
    assert found["anisotropy"].query("space == 'hidden'")["layer"].tolist() == [0, 1, 2]
    assert set(found["attention_entropy"]["layer"]) == {2}


def test_images_that_a_model_joins_are_read_one_by_one():
    model, items = loaded("pixtral"), tiny.corpus("vit")
    with pytest.raises(AnalysisError, match="1 sequences of 2 images: give tokens_per_batch=1"):
        measure(model, items, "anisotropy", progress=False)
    found = measure(model, items, "anisotropy", tokens_per_batch=1, progress=False)["anisotropy"]
    for layer, row in enumerate([*found.query("space == 'hidden'").itertuples()][:-1]):
        wanted = naive.cosine([text.hidden[layer] for text in reference("pixtral")])
        assert row.cosine == pytest.approx(wanted, abs=TOLERANCE)


def test_a_sound_with_its_channels_first_has_no_tokens():
    with pytest.raises(AnalysisError, match="channels first, which stand for no tokens"):
        loaded("dac")


@pytest.mark.parametrize("model_type", ["fnet", "mobilebert"])
def test_texts_of_other_lengths_are_read_apart_where_padding_would_change_them(model_type):
    assert loaded(model_type).layout.equal_lengths
    assert not loaded("llama").layout.equal_lengths


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("cpmant", "stand for no tokens"), ("xlm", "no transformer block"), ("lxmert", "read")],
)
def test_what_is_not_found_is_one_line(model_type, words):
    config = shrunk.configuration(model_type)
    torch.manual_seed(0)
    with pytest.raises(AnalysisError, match=words) as raised:
        load_model(transformers.AutoModel.from_config(config).eval(), processor=reads())
    assert "\n" not in str(raised.value)
    assert model_type in str(raised.value)
