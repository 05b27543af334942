"""The adapters of architectures that transformers lacks, against sums written out by hand."""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    ByT5Tokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from analysis_book.architectures import (
    CharacterBertConfig,
    CharacterBertModel,
    CharacterBertTokenizer,
    MantaConfig,
    MantaModel,
    VanConfig,
    VanModel,
)
from analysis_lib.errors import AnalysisError

TEXTS = ["The cone of vectors points one way.", "Hi"]

VAN = VanConfig(
    hidden_sizes=[4, 6],
    depths=[1, 2],
    mlp_ratios=[2, 3],
    patch_sizes=[7, 3],
    strides=[4, 2],
    layer_scale_init_value=0.5,
)
CHARACTER_BERT = CharacterBertConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=40,
    cnn_filters=[[1, 4], [2, 4], [3, 6]],
    character_embeddings_dim=5,
    max_word_length=12,
    initializer_range=0.4,
)
MANTA = MantaConfig(
    byte_embedding_dim=8,
    frontier_predictor_num_attention_heads=2,
    frontier_predictor_attention_window=4,
    max_length_inputs=64,
    max_length_encoder_decoder=48,
    d_model=24,
    d_kv=12,
    d_ff=32,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=2,
    feed_forward_proj="gated-gelu",
)
MODELS = {
    "van": (VanModel, VAN),
    "character_bert": (CharacterBertModel, CHARACTER_BERT),
    "manta": (MantaModel, MANTA),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    return kind(config).eval()


def characters(texts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = CharacterBertTokenizer(max_word_length=CHARACTER_BERT.max_word_length)
    words = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
    input_ids = nn.utils.rnn.pad_sequence(words, batch_first=True)
    lengths = torch.tensor([len(ids) for ids in words])
    return {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
    }


def byte_inputs(model: MantaModel, texts: list[str]) -> dict[str, torch.Tensor]:
    inputs = dict(ByT5Tokenizer()(texts, return_tensors="pt", padding=True))
    return {**inputs, "decoder_input_ids": model._shift_right(inputs["input_ids"])}


def run(model: nn.Module, texts: list[str] = TEXTS) -> torch.Tensor:
    if isinstance(model, VanModel):
        inputs = {
            "pixel_values": torch.randn(2, 3, 33, 30, generator=torch.Generator().manual_seed(1))
        }
    else:
        inputs = (
            characters(texts)
            if isinstance(model, CharacterBertModel)
            else byte_inputs(model, texts)
        )
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_by_its_folder(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info.values())
    assert torch.equal(run(loaded.eval()), run(model))


@pytest.mark.parametrize("name", MODELS)
def test_an_untrained_model_is_its_seed(name):
    twins = []
    for _ in range(2):
        torch.manual_seed(3)
        twins.append(AutoModel.from_config(MODELS[name][1]).state_dict())
    assert all(
        torch.equal(value, twins[1][key]) and value.isfinite().all()
        for key, value in twins[0].items()
    )


def test_the_untrained_weights_have_the_published_scales():
    van = make("van").encoder.stages[1].layers[1]
    assert torch.equal(van.mlp_scaling.weight, torch.full((6,), 0.5))
    # fan-out: 3 × 3 positions of one channel each.
    assert van.mlp.depth_wise.weight.std().item() == pytest.approx(math.sqrt(2 / 9), rel=0.2)
    convolution = make("manta").encoder.pooler.conv_layers[0].weight
    assert convolution.abs().max() < 3**-0.5
    assert convolution.std().item() == pytest.approx(1 / 3, rel=0.3)


@pytest.mark.parametrize(
    ("name", "prefix", "heads"),
    [
        ("van", "van.", ["classifier.weight", "classifier.bias"]),
        (
            "character_bert",
            "character_bert.",
            [
                "character_bert.embeddings.position_ids",
                "cls.predictions.bias",
                "cls.seq_relationship.weight",
            ],
        ),
        ("character_bert", "", []),
        ("manta", "", ["lm_head.weight"]),
    ],
)
def test_published_weights_load_with_their_prefix_and_heads(name, prefix, heads, tmp_path):
    model = make(name)
    # The published file of MANTa holds this matrix under two names.
    weights = {f"{prefix}{key}": value.clone() for key, value in model.state_dict().items()}
    save_file(
        weights | {head: torch.zeros(1, 1) for head in heads},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    # Remote code is offered, and neither asked about nor run.
    written = model.config.to_dict() | {
        "auto_map": {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert torch.equal(run(loaded.eval()), run(model))


def test_published_names_of_van():
    block = "encoder.stages.1.layers.1."
    names = {
        name.removeprefix(block) for name in make("van").state_dict() if name.startswith(block)
    }
    convolutions = [
        "attention.pre_projection.conv",
        *(
            f"attention.attention_layer.attention.{part}"
            for part in ("depth_wise", "depth_wise_dilated", "point_wise")
        ),
        "attention.post_projection",
        *(f"mlp.{part}" for part in ("in_dense", "depth_wise", "out_dense")),
    ]
    norms = ["pre_normomalization", "post_normalization"]
    assert names == {
        *(f"{name}.{part}" for name in convolutions for part in ("weight", "bias")),
        *(
            f"{n}.{p}"
            for n in norms
            for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        ),
        "attention_scaling.weight",
        "mlp_scaling.weight",
    }


def test_published_names_of_character_bert():
    names = make("character_bert").state_dict()
    words = {
        name.removeprefix("embeddings.word_embeddings.")
        for name in names
        if "word_embeddings" in name
    }
    layers = [
        *(f"char_conv_{i}" for i in range(3)),
        *(f"_highways._layers.{i}" for i in range(2)),
        "_projection",
    ]
    assert words == {
        "_char_embedding_weights",
        *(f"{layer}.{part}" for layer in layers for part in ("weight", "bias")),
    }
    assert names["embeddings.word_embeddings._highways._layers.0.weight"].shape == (28, 14)
    assert "encoder.layer.1.attention.self.key.weight" in names


def test_published_names_of_manta():
    names = make("manta").state_dict()
    assert names["encoder.pooler.conv_layers.0.weight"].shape == (1, 1, 3, 8)
    assert names[
        "encoder.frontier_predictor.local_transformer.embeddings.position_embeddings.weight"
    ].shape == (69, 8)
    assert {name.partition(".")[0] for name in names} == {
        "encoder",
        "decoder",
        "decoder_embeddings",
    }
    assert (
        "encoder.t5_encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in names
    )
    assert "encoder.t5_encoder.embed_tokens.weight" not in names
    assert "decoder.block.2.layer.1.EncDecAttention.q.weight" in names


@pytest.mark.parametrize(("name", "layers"), [("character_bert", 2), ("manta", 2 + 2 * 3)])
def test_attention_goes_through_the_interface_of_transformers(name, layers, tmp_path):
    calls = []

    def counted(module, *arguments, **options):
        calls.append(module)
        return sdpa_attention_forward(module, *arguments, **options)

    AttentionInterface.register("counted", counted)
    model = make(name)
    model.save_pretrained(tmp_path)
    run(AutoModel.from_pretrained(tmp_path, attn_implementation="counted").eval())
    assert len(calls) == layers


# --- VAN ------------------------------------------------------------------------------------------


def test_a_van_block_written_out():
    model = make("van")
    for module in model.modules():  # As after training: normalisations that do something.
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    block = model.encoder.stages[1].layers[1]
    weights = block.state_dict()
    maps = torch.randn(2, 6, 7, 5)

    def convolve(values, name, **options):
        return functional.conv2d(
            values, weights[f"{name}.weight"], weights[f"{name}.bias"], **options
        )

    def normalise(values, name):
        mean, variance, scale, shift = (
            weights[f"{name}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (values - mean) / (variance + 1e-5).sqrt() * scale + shift

    normal = normalise(maps, "pre_normomalization")
    value = functional.gelu(convolve(normal, "attention.pre_projection.conv"))
    large = convolve(value, "attention.attention_layer.attention.depth_wise", padding=2, groups=6)
    large = convolve(
        large,
        "attention.attention_layer.attention.depth_wise_dilated",
        padding=9,
        dilation=3,
        groups=6,
    )
    attended = value * convolve(large, "attention.attention_layer.attention.point_wise")
    attended = normal + convolve(attended, "attention.post_projection")
    middle = maps + 0.5 * attended
    wide = convolve(normalise(middle, "post_normalization"), "mlp.in_dense")
    wide = functional.gelu(convolve(wide, "mlp.depth_wise", padding=1, groups=18))
    expected = middle + 0.5 * convolve(wide, "mlp.out_dense")
    assert torch.allclose(block(maps), expected, atol=1e-5)


def test_van_reads_through_patches_and_normalises_each_position():
    model = make("van")
    pixels = torch.randn(2, 3, 33, 30)
    with torch.no_grad():
        output = model(pixels)
    # 33 × 30 pixels, in steps of 4 and then 2.
    assert output.last_hidden_state.shape == (2, 6, 5, 4)
    assert torch.allclose(output.last_hidden_state.mean(1), torch.zeros(2, 5, 4), atol=1e-5)
    assert torch.allclose(output.pooler_output, output.last_hidden_state.mean((2, 3)))


def test_images_are_prepared_as_the_published_models_had_them(tmp_path):
    make("van").save_pretrained(tmp_path)
    # What transformers 4 wrote.
    written = {
        "feature_extractor_type": "ConvNextFeatureExtractor",
        "crop_pct": 0.875,
        "size": 224,
        "do_resize": True,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    image = torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8)
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 224, 224)


# --- CharacterBERT --------------------------------------------------------------------------------


def test_words_are_embedded_from_their_characters():
    embedding = make("character_bert").embeddings.word_embeddings
    weights = {name: value.double() for name, value in embedding.state_dict().items()}
    word = CharacterBertTokenizer(max_word_length=12).word_ids("cône")
    table = weights["_char_embedding_weights"]

    responses = []
    for i, (width, filters) in enumerate(CHARACTER_BERT.cnn_filters):
        kernel, bias = weights[f"char_conv_{i}.weight"], weights[f"char_conv_{i}.bias"]
        for f in range(filters):
            sums = [
                sum(kernel[f, :, k] @ table[word[start + k]] for k in range(width))
                for start in range(12 - width + 1)
            ]
            responses.append(max(0.0, float(max(sums) + bias[f])))
    hidden = torch.tensor(responses, dtype=torch.double)
    for i in range(2):
        transformed = (
            weights[f"_highways._layers.{i}.weight"] @ hidden
            + weights[f"_highways._layers.{i}.bias"]
        )
        gate = 1 / (1 + torch.exp(-transformed[14:]))
        hidden = gate * hidden + (1 - gate) * transformed[:14].clamp(min=0)
    expected = weights["_projection.weight"] @ hidden + weights["_projection.bias"]

    with torch.no_grad():
        embedded = embedding(torch.tensor([[word]]))[0, 0]
    assert torch.allclose(embedded.double(), expected, atol=1e-5)


def test_words_of_padding_change_nothing():
    model = make("character_bert")
    together = run(model)
    for row, text in enumerate(TEXTS):
        alone = run(model, [text])[0]
        assert torch.allclose(together[row, : len(alone)], alone, atol=1e-5)


def test_an_untrained_character_embedding_tells_words_apart():
    model = make("character_bert")
    table = model.embeddings.word_embeddings._char_embedding_weights
    # Of padding, as in the published code: words, then characters.
    assert torch.equal(table[[0, 261]], torch.zeros(2, 5))
    vectors = model.embeddings.word_embeddings(characters(["one two"])["input_ids"])[0]
    assert torch.pdist(vectors).min() > 0.1


def test_words_and_their_ids():
    tokenizer = CharacterBertTokenizer()
    assert tokenizer.words("Où est-ce?  東京") == ["ou", "est", "-", "ce", "?", "東", "京"]
    cased = CharacterBertTokenizer(do_lower_case=False)
    assert cased.words("Où") == ["Où"]
    # Bytes between begin (258) and end (259), then padding (260); ids are one more.
    assert tokenizer.word_ids("hi") == [259, 105, 106, 260, *[261] * 46]
    assert cased.word_ids("ù")[:4] == [259, 0xC3 + 1, 0xB9 + 1, 260]
    assert tokenizer.cls_token_id == [259, 257, 260, *[261] * 47]
    assert tokenizer.sep_token_id == [259, 258, 260, *[261] * 47]
    assert tokenizer.word_ids("[MASK]") == [259, 262, 260, *[261] * 47]
    assert tokenizer.pad_token_id == [0] * 50
    long = tokenizer.word_ids("x" * 80)
    assert len(long) == 50
    assert long[-2:] == [ord("x") + 1, 260]


def test_the_tokenizer_comes_with_the_folder(tmp_path):
    make("character_bert").save_pretrained(tmp_path)
    CharacterBertTokenizer(do_lower_case=False, max_word_length=12).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is CharacterBertTokenizer
    assert tokenizer.words("Hi") == ["Hi"]
    assert [len(word) for word in tokenizer("Hi")["input_ids"]] == [12] * 3


def test_the_published_tokenizer_file_is_read_and_its_code_left_alone(tmp_path):
    make("character_bert").save_pretrained(tmp_path)
    written = {
        "tokenizer_class": "CharacterBertTokenizer",
        "max_word_length": 50,
        "do_lower_case": True,
        "do_basic_tokenize": True,
        "cls_token": "[CLS]",
        "auto_map": {"AutoTokenizer": ["tokenization_character_bert.CharacterBertTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    assert AutoTokenizer.from_pretrained(tmp_path).words("Hi") == ["hi"]


# --- MANTa-LM -------------------------------------------------------------------------------------


def naive_shares(frontiers: list[float], max_blocks: int) -> list[list[float]]:
    """P[block][byte] of one text, from the formula of the docstring."""
    begins = [0.0, *frontiers[1:]]
    means = [sum(begins[: s + 1]) for s in range(len(begins))]
    deviations = [
        math.sqrt(sum(p * (1 - p) for p in begins[: s + 1]) + 5e-6) for s in range(len(begins))
    ]
    blocks = min(
        len(begins), int(max(m + 3 * d for m, d in zip(means, deviations, strict=True))) + 1
    )
    shares = [[0.0] * len(begins) for _ in range(blocks)]
    for s, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        densities = [-((mean - b) ** 2) / (2 * deviation) for b in range(blocks)]
        largest = max(densities)
        total = sum(math.exp(density - largest) for density in densities)
        for b in range(blocks):
            shares[b][s] = math.exp(densities[b] - largest) / total
    return shares[:max_blocks]


@pytest.mark.parametrize(
    "frontiers", [[0.9, 0.1, 0.8, 0.2, 0.02, 0.97, 0.5], [0.0] * 5, [1.0] * 5, [0.3]]
)
def test_frontiers_share_bytes_out_over_blocks(frontiers):
    pooler = make("manta").encoder.pooler
    shares, own = pooler.shares(
        torch.tensor([frontiers]), torch.ones(1, len(frontiers), dtype=torch.bool)
    )
    expected = torch.tensor([naive_shares(frontiers, MANTA.max_length_encoder_decoder)])
    assert own.all()
    assert torch.allclose(shares, expected, atol=1e-5)
    assert torch.allclose(shares.sum(1), torch.ones(1, len(frontiers)))


def test_certain_frontiers_give_hard_blocks():
    shares, own = make("manta").encoder.pooler.shares(
        torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]]), torch.ones(1, 5, dtype=torch.bool)
    )
    assert own.shape == (1, 2)
    assert torch.allclose(
        shares[0], torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0]])
    )


@torch.no_grad()
@pytest.mark.parametrize("mean_pool", [False, True])
@pytest.mark.parametrize("kernels", [3, [[1, 5], [3, 4]]])
def test_a_block_pools_a_convolution_of_its_share(kernels, mean_pool):
    torch.manual_seed(0)
    depthwise = isinstance(kernels, int)
    config = MANTA.to_dict() | {
        "pooling_kernel_size": kernels,
        "pooling_mean_pool": mean_pool,
        "pooling_depthwise_convolution": depthwise,
    }
    pooler = MantaModel(MantaConfig(**config)).encoder.pooler
    embedded, frontiers = torch.randn(1, 9, 8), torch.rand(1, 9)
    blocks, _ = pooler(embedded, frontiers, torch.ones(1, 9, dtype=torch.bool))

    pooled = []
    for share in naive_shares(frontiers[0].tolist(), MANTA.max_length_encoder_decoder):
        weight = 1 / max(1.0, sum(share)) if mean_pool else 1.0
        values = []
        for layer, (size, filters) in zip(
            pooler.conv_layers, [[3, 8]] if depthwise else kernels, strict=True
        ):
            for f in range(filters):
                responses = []
                for s in range(9):
                    total = 0.0
                    for k in range(size):
                        t = s + k - size // 2
                        if 0 <= t < 9:
                            x = embedded[0, t]
                            response = (
                                layer.weight[0, 0, k, f] * x[f]
                                if depthwise
                                else layer.weight[:, f, k] @ x
                            )
                            total += weight * share[t] * float(response)
                    responses.append(total)
                values.append(sum(responses) if mean_pool else max(responses))
        pooled.append(values)
    expected = torch.tensor([pooled]) @ pooler.out_projection.weight.T + pooler.out_projection.bias
    assert torch.allclose(blocks, expected, atol=1e-4)


def test_a_batch_of_texts_gives_what_each_gives_alone():
    model = make("manta")
    with torch.no_grad():
        inputs = byte_inputs(model, TEXTS)
        together = model(**inputs)
        _, masks = model.encoder(inputs["input_ids"], inputs["attention_mask"])
        for row, text in enumerate(TEXTS):
            alone = model(**byte_inputs(model, [text]))
            blocks, length = (
                alone.encoder_last_hidden_state.shape[1],
                alone.last_hidden_state.shape[1],
            )
            assert masks[row].sum() == blocks
            hidden = together.encoder_last_hidden_state[row, :blocks]
            assert torch.allclose(hidden, alone.encoder_last_hidden_state[0], atol=1e-4)
            assert torch.allclose(
                together.last_hidden_state[row, :length], alone.last_hidden_state[0], atol=1e-4
            )
    assert not masks.all()


def test_the_encoder_is_called_with_the_mask_of_its_blocks():
    model = make("manta")
    calls = []
    model.encoder.t5_encoder.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        model(**byte_inputs(model, TEXTS))
        embedded = model.encoder.byte_embeddings(byte_inputs(model, TEXTS)["input_ids"])
        mask = byte_inputs(model, TEXTS)["attention_mask"]
        blocks, own = model.encoder.pooler(
            embedded, model.encoder.frontier_predictor(embedded, mask), mask.bool()
        )
    assert torch.equal(calls[0]["attention_mask"].bool(), own)
    assert torch.equal(calls[0]["inputs_embeds"], blocks)


def test_the_decoder_reads_the_bytes_from_left_to_right():
    model = make("manta")
    inputs = byte_inputs(model, TEXTS[:1])
    changed = inputs["decoder_input_ids"].clone()
    changed[0, 10] = 77
    with torch.no_grad():
        before = model(**inputs).last_hidden_state[0]
        after = model(**{**inputs, "decoder_input_ids": changed}).last_hidden_state[0]
    differs = (before - after).abs().amax(-1) > 1e-6
    assert not differs[:10].any()
    assert differs[10]


def test_hidden_states_of_both_stacks_are_given_on_request():
    model = make("manta")
    with torch.no_grad():
        output = model(**byte_inputs(model, TEXTS), output_hidden_states=True)
    assert len(output.encoder_hidden_states) == 1 + MANTA.num_layers
    assert len(output.decoder_hidden_states) == 1 + MANTA.num_decoder_layers


def test_the_tokenizer_of_manta_is_byt5s(tmp_path):
    make("manta").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer"})
    )
    assert AutoTokenizer.from_pretrained(tmp_path)("Hi")["input_ids"] == [
        ord("H") + 3,
        ord("i") + 3,
        1,
    ]


def test_what_manta_cannot_read_is_said():
    model = make("manta")
    with pytest.raises(AnalysisError, match="a text has 81 bytes, but MANTa reads 64 at once"):
        model(**byte_inputs(model, ["x" * 80]))
    with pytest.raises(
        AnalysisError, match="pooling_kernel_size has a kernel of 4 bytes: give an odd number"
    ):
        MantaModel(MantaConfig(**MANTA.to_dict() | {"pooling_kernel_size": 4}))


PLUGGED_IN = """
import sys
from analysis_lib import load_model
assert "analysis_book" not in sys.modules
print(type(load_model(sys.argv[1]).model).__module__)
"""


@pytest.mark.parametrize("name", ["character_bert", "manta", "van"])
def test_an_architecture_of_the_book_is_found_when_a_folder_asks_for_it(name, tiny_folder):
    command = [sys.executable, "-c", PLUGGED_IN, tiny_folder(name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"analysis_book.architectures.{name}", done.stderr
