"""Which modules are the blocks of a model and whose attention is captured, where a model does not
say so plainly.
"""

import copy

import naive
import numpy as np
import pytest
import shrunk
import tiny
import torch
import transformers
from models.test_any_transformer import TOLERANCE, built, reads
from tiny import TEXTS
from torch import nn

from analysis_book.atlas.sizes import CHANGES
from analysis_lib import AnalysisError, Replace, load_model, measure
from analysis_lib.models.probe import evaluated

SOME = [TEXTS[0], TEXTS[3], TEXTS[4]]
_SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 66, "pad_token_id": 0}


def hidden(tables: dict, stack: str | None = None) -> list[float]:
    """The mean cosine of all pairs of hidden vectors, by layer."""
    rows = tables["anisotropy"].query("space == 'hidden'")
    kept = tables.layers if stack is None else tables.layers.query("stack == @stack")
    return rows[rows["layer"].isin(kept["layer"])]["cosine"].tolist()


def documented(
    model: nn.Module, name: str = "hidden_states", shift: bool = False
) -> list[list[np.ndarray]]:
    """What ``output_hidden_states`` gives of each text alone, without padding, by layer."""
    found = []
    for text in SOME:
        ids = reads()(text, return_tensors="pt")["input_ids"]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if shift:
            given["decoder_input_ids"] = ids.roll(1, 1)
            given["decoder_input_ids"][:, 0] = model.config.decoder_start_token_id
        with torch.no_grad():
            states = model(**given, output_hidden_states=True)[name]
        states = [state for state in states if isinstance(state, torch.Tensor)]
        found.append([state[0, : ids.shape[1]].double().numpy() for state in states])
    return [list(layer) for layer in zip(*found, strict=True)]


def cosines(layers: list[list[np.ndarray]]) -> list[float]:
    return [naive.cosine(vectors) for vectors in layers]


def random(model: nn.Module) -> nn.Module:
    tiny.randomise(model)
    return model.double().eval()


@pytest.mark.parametrize("depths", [(2, 3), (3, 1)])
def test_an_encoder_and_a_decoder_of_other_depths_are_both_there(depths):
    sizes = {"encoder_layers": depths[0], "decoder_layers": depths[1]}
    model = shrunk.build("mvp", **sizes).double()
    tables = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    for stack, depth in zip(("encoder", "decoder"), depths, strict=True):
        wanted = cosines(documented(model, f"{stack}_hidden_states", shift=True))
        assert len(wanted) == 1 + depth
        # The last is given out after a norm, or as it is.
        assert hidden(tables, stack)[:-1] == pytest.approx(wanted[:-1], abs=TOLERANCE)


def test_an_encoder_that_gives_no_hidden_states_is_there_without_its_padding():
    sizes = {"num_global_tokens": 2, "block_size": 4, "encoder_layers": 2, "decoder_layers": 2}
    model = shrunk.build("pegasus_x", **sizes).double()
    tables = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    wanted = cosines(documented(model.encoder))
    assert hidden(tables, "encoder")[:-1] == pytest.approx(wanted, abs=TOLERANCE)
    assert (
        "the attention of encoder.layers.0.self_attn and of 1 more modules"
        in tables.run["notes"][0]
    )


def test_bert_to_bert_has_two_stacks():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**_BERT), transformers.BertConfig(**_BERT)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = random(transformers.EncoderDecoderModel(config))
    tables = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    for stack in ("encoder", "decoder"):
        wanted = cosines(documented(model, f"{stack}_hidden_states", shift=True))
        assert hidden(tables, stack) == pytest.approx(wanted, abs=TOLERANCE)


def test_a_model_that_gives_one_vector_of_each_text():
    model = random(transformers.DPRQuestionEncoder(transformers.DPRConfig(**_BERT)))
    tables = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    assert hidden(tables) == pytest.approx(cosines(documented(model)), abs=TOLERANCE)
    assert "final" not in set(tables["anisotropy"]["space"])


def test_half_of_an_encoder_decoder_is_not_read_for_the_whole():
    model = shrunk.build("led")  # Its windows are longer than it has positions.
    with pytest.raises(AnalysisError, match="cannot read a few token ids"):
        load_model(model, processor=reads())


def test_the_encoder_of_whisper_as_an_object():
    model, processor = tiny.build("whisper")
    whole = load_model(model, processor=processor)
    encoder = load_model(model.encoder, processor=processor)
    alike = [
        measure(loaded, tiny.corpus("whisper"), "anisotropy", progress=False)["anisotropy"]
        for loaded in (whole, encoder)
    ]
    assert alike[0].equals(alike[1])


def test_a_text_is_cut_to_the_positions_of_mpt():
    model = shrunk.build("mpt", max_seq_len=16)
    tables = measure(
        model, [" ".join(TEXTS), *SOME], "anisotropy", tokenizer=reads(), progress=False
    )
    assert "longer than the 16 tokens that are read" in tables.run["notes"][0]


def test_a_mixture_of_experts_in_double_precision():
    model = built("qwen3_moe").double()
    before = model.get_experts_implementation()
    tables = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    assert model.get_experts_implementation() == before
    model.set_experts_implementation("eager")
    assert hidden(tables)[:-1] == pytest.approx(cosines(documented(model))[:-1], abs=1e-6)


def test_a_model_has_no_more_hooks_than_before():
    model = built("llama")
    load_model(model, processor=reads())
    assert not any(module._forward_hooks for module in model.modules())
    assert not hasattr(model, "_output_capturing_hooks_installed")


# --- Attention that modules compute by themselves ------------------------------------------------


@pytest.mark.parametrize("model_type", ["gptj", "xlnet", "falcon", "convbert"])
def test_keys_that_are_zero_draw_even_attention(model_type):
    """What is changed acts on attention that a module computes by itself: all scores are then the
    same.
    """
    model = built(model_type).double()
    changed = Replace("key", layers=[1], by="zero")
    tables = measure(
        model, SOME, "attention_entropy", tokenizer=reads(), intervention=changed, progress=False
    )["attention_entropy"]
    lengths = [len(reads()(text)["input_ids"]) for text in SOME]
    causal = model_type in ("gptj", "falcon")
    seen = [np.arange(1, length + 1) if causal else np.full(length, length) for length in lengths]
    wanted = np.log(np.concatenate(seen)).mean()
    found = tables.query("layer == 1")["entropy_nats"]
    if model_type == "xlnet":  # Its scores have a part by distance.
        assert (found < wanted).all()
    else:
        assert found.tolist() == pytest.approx([wanted] * len(found), abs=TOLERANCE)
    assert not np.allclose(tables.query("layer == 2")["entropy_nats"], wanted)


def test_pytorchs_own_attention_is_the_same_as_the_eager_one():
    model, found = built("falcon").double(), {}
    for kind in ("eager", "sdpa"):
        model.config._attn_implementation = kind
        tables = measure(model, SOME, tokenizer=reads(), progress=False)
        found[kind] = np.concatenate(
            [
                tables["attention_entropy"]["entropy_nats"],
                tables["score_contributions"]["contribution"],
            ]
        )
    np.testing.assert_allclose(found["eager"], found["sdpa"], atol=1e-9)


def test_attention_of_xglm_in_single_precision():
    model = built("xglm")
    tables = measure(model, SOME, "attention_entropy", tokenizer=reads(), progress=False)[
        "attention_entropy"
    ]
    entropies = {layer: [[] for _ in range(model.config.attention_heads)] for layer in (1, 2)}
    for text in SOME:
        with torch.no_grad():
            output = model(**reads()(text, return_tensors="pt"), output_attentions=True)
        for layer, weights in enumerate(output.attentions, 1):
            for head, of_head in enumerate(torch.special.entr(weights[0].double()).sum(-1)):
                entropies[layer][head] += of_head.tolist()
    for layer, heads in entropies.items():
        found = tables[tables["layer"] == layer]["entropy_nats"].tolist()
        assert found == pytest.approx([np.mean(of_head) for of_head in heads], abs=1e-5)


def test_a_long_text_does_not_find_bigbird_as_a_short_one_left_it():
    model = built("big_bird")
    measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False)
    assert model.attention_type == "block_sparse"
    with evaluated(model):
        model(**reads()("Hi", return_tensors="pt"))
        assert model.attention_type == "original_full"
    assert model.attention_type == "block_sparse"


def test_attention_by_blocks_is_said_not_to_be_captured():
    model = shrunk.build("big_bird", block_size=4, num_random_blocks=1, max_position_embeddings=160)
    long = [" ".join(TEXTS[:5])]
    assert len(reads()(long[0])["input_ids"]) > 28
    with pytest.raises(
        AnalysisError, match=r"attention_entropy makes no sense .* captured in 0 of 2 layers"
    ):
        measure(copy.deepcopy(model), long, "attention_entropy", tokenizer=reads(), progress=False)
    tables = measure(model.double(), long, tokenizer=reads(), progress=False)
    assert "attention_entropy" not in tables
    ids = reads()(long, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    # Behind the tokens, it pads them to whole blocks.
    wanted = [naive.cosine([state[0, : ids.shape[1]].numpy()]) for state in states]
    assert states[0].shape[1] > ids.shape[1]
    assert hidden(tables) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("yoso", "its attention is not captured"),
        ("diffllama", "its attention is not captured"),
        ("mamba", "it has no attention"),
        ("fnet", "it has no attention"),
    ],
)
def test_attention_that_is_not_captured_is_no_lack_of_it(model_type, reason):
    model = built(model_type)
    with pytest.raises(
        AnalysisError, match=f"attention_entropy makes no sense for .*: {reason}; leave it out"
    ):
        measure(model, SOME, "attention_entropy", tokenizer=reads(), progress=False)
    notes = measure(model, SOME, "anisotropy", tokenizer=reads(), progress=False).run["notes"]
    assert any("is not captured, and in no table" in note for note in notes) == (
        "not captured" in reason
    )


def test_a_softmax_that_is_a_module_of_its_own_is_part_of_what_is_captured():
    assert load_model(built("ibert"), processor=reads()).layout.uncaptured == ()


def test_the_attention_of_windows_of_an_image_is_said_not_to_be_captured():
    model = shrunk.build("swin", **CHANGES["swin"])
    with pytest.raises(AnalysisError, match="its attention is not captured"):
        measure(
            model,
            tiny.corpus("vit"),
            "attention_entropy",
            processor=shrunk.processor(model),
            progress=False,
        )
