"""The facts of the atlas, of small models of types that once had them wrong."""

import functools

import pytest
import torch
from torch import nn

from analysis_book.atlas.building import groups_of_type, saved_in_half
from analysis_book.atlas.cards import load, measured_lines, plain_lines, traps
from analysis_book.atlas.conventions import rotation_bases
from analysis_book.atlas.probing import probe
from analysis_book.atlas.small import read_by, running
from analysis_book.atlas.tracing import Rotation, alike, traced

KEEP = "real tokens keep"
WITHIN = "1/√d, already in queries and keys"
# By type, what a reading of its source says.
CELLS = {
    # Its attention is recorded without its weights, and patches of all images make one sequence.
    "qwen2_vl_vision": {
        "attention_kind": "output of attention",
        "attention_axes": "token × width",
        "state_axes": "token × width",
        "rotation_bases": "10,000, by row and column",
    },
    "yoso": {"attention_kind": "output of attention"},
    "groupvit_vision_model": {"attention_kind": "weights over queries"},
    # Its mask and positions pass through to the language model.
    "vibevoice": {"left_padding": KEEP, "left_padding_with_positions": KEEP},
    # Points in maps of several sizes share a softmax. Its encoder is what attends, not what
    # projects its maps.
    "rt_detr": {
        "blocks": "decoder: decoder.layers; encoder: encoder.aifi",
        "hidden_states": "blocks + 1",
        "attention_kind": "decoder: weights; cross: weights over the last two axes; "
        "encoder: weights",
    },
    # A softmax over more keys, of which those of its prompt are cut off.
    "cpmant": {"attention_kind": "other", "hidden_states": "blocks + 1"},
    # As many tokens as images in a batch.
    "vit_mae": {"attention_axes": "batch × head × token × token"},
    "mobilevit": {"state_axes": "batch × channel × row × column"},
    "opt": {"scale": WITHIN},
    "esm": {"scale": WITHIN},
    "openai_privacy_filter": {"scale": WITHIN, "window": "129, both ways"},
    "t5": {"scale": "1"},
    "gemma2": {"scale": "1/√d"},
    "granite": {"scale": "1"},
    "gemma4_text": {
        "rotation": "halves (1), halves, 128 of 512 dimensions (1)",
        "rotation_bases": "10,000, 1,000,000",
    },
    "smollm3": {"rotation": "halves (1), none (1)"},
    "t5gemma": {"window": "4096, both ways (1), none (4), 4096 (1)"},
    "cohere2": {"rotation": "interleaved (1), none (1)"},
    "diffllama": {"rotation": "halves"},
    "roformer": {"rotation": "interleaved", "rotation_bases": "10,000"},
    "mimo_v2_flash": {"rotation_bases": "5,000,000, 10,000"},
    "llama4_text": {"window": "chunks of 8192 (1), none (1)"},
    "modernbert": {"window": "none (1), 65, both ways (1)"},
    # The forward of its blocks is called, not the blocks.
    "squeezebert": {"hidden_states": "blocks + 1", "states_between": "outputs of blocks"},
    # Padded to a multiple of its window, and cut again.
    "longformer": {
        "first_state": "embeddings after a norm",
        "last_state": "output of the last block (no norm follows)",
        "left_padding_with_positions": KEEP,
    },
    # Its positions begin at 2, in a table that is no nn.Embedding.
    "ibert": {"left_padding_with_positions": KEEP},
    "longcat_flash": {"attentions": "4 from 2 blocks"},
    # Its eager attention needs a key for each query head.
    "unlimited_ocr_text": {"attentions": "one per block", "attention_kind": "weights"},
    # Under eager attention, all keys of some queries are hidden.
    "nemotron3_5_asr": {"attention_kind": "NaN", "states_between": "outputs of blocks"},
    "qwen2_5_omni_thinker": {
        "left_padding": "not tried: the small model runs without a mask alone",
    },
    "qwen4_exp_text": {"attentions": "1 for 2 blocks", "attention_kind": "weights"},
    # Its classes that attend are chosen when it is built.
    "sam": {
        "attentions": "vision: one per block; mask_decoder: 2",
        "attention_kind": "vision: weights; mask_decoder: output of attention",
    },
    "data2vec-vision": {"attention_kind": "weights", "row_sums": "1"},
    # The norm that ends a block reads no embeddings.
    "flaubert": {"first_state": "embeddings after a norm", "attentions": "one per block"},
    "lfm2_moe": {"attentions": "1 for 2 blocks", "last_state": "after the final norm"},
    # Rows of an image turn one half of a head, and columns the other.
    "gemma4_vision": {"rotation": "halves of each of 2 parts", "rotation_bases": "100"},
    # Stages are lists of lists, and each ends in a norm.
    "glpn": {
        "blocks": "encoder.layer_norm (norms that end blocks)",
        "hidden_states": "as many as blocks",
        "attentions": "8",
    },
    # What projects its maps gives back those that have its width, and is no stack of blocks.
    "mask2former": {
        "first_state": "encoder: not recognised: no list of modules ran as blocks; "
        "pixel_decoder: output of another module; transformer_decoder: embeddings",
    },
}


@functools.cache
def facts_of(model_type):
    small = running(model_type)
    return probe(small.model, small.inputs)


@pytest.mark.parametrize("model_type", CELLS)
def test_cells_say_what_the_source_of_a_type_does(model_type):
    facts = facts_of(model_type)
    cells = CELLS[model_type]
    assert {name: facts[name] for name in cells} == cells


def test_weights_of_queries_scaled_before_are_those_of_plain_ones_over_the_root_of_their_width():
    small = running("opt")
    small.model.set_attn_implementation("eager")
    attention = small.model.decoder.layers[0].self_attn
    trace = traced(small.model, small.inputs, output_attentions=True)
    projected = {}
    for name in ("q_proj", "k_proj"):
        (run,) = trace.runs_of(getattr(attention, name))
        by_head = run.gave.double().unflatten(-1, (attention.num_heads, -1))
        projected[name] = by_head.transpose(1, 2)
    scores = projected["q_proj"] @ projected["k_proj"].mT / attention.head_dim**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    wanted = scores.masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(trace.output.attentions[0].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model_type", "later"), [("openai_privacy_filter", 128), ("mistral", 0)])
def test_a_window_looks_both_ways_where_a_token_sees_later_ones(model_type, later):
    assert ("both ways" in facts_of(model_type)["window"]) == bool(later)
    small = running(model_type)
    small.model.set_attn_implementation("eager")
    ids = torch.arange(4, 104).repeat(1, 4)
    with torch.no_grad():
        weights = small.model(input_ids=ids, output_attentions=True).attentions[0]
    assert (weights[0, 0, 200] > 0).nonzero().max() == 200 + later


def rotated(angles, gap=0):
    """Vectors of tokens, and the same with their halves rotated by the angles of each."""
    generator = torch.Generator().manual_seed(0)
    tokens, pairs = angles.shape
    halves = torch.randn(2, 3, 4, tokens, pairs + gap, generator=generator, dtype=torch.float64)
    first, second = halves
    turns = nn.functional.pad(angles, (0, gap))
    cos, sin = turns.cos(), turns.sin()
    after = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return Rotation(torch.cat([first, second], -1), after)


@pytest.mark.parametrize("base", [1e3, 1e4, 5e6, 1e8])
def test_the_base_of_a_table_of_angles_is_that_which_made_it(base):
    places = torch.arange(16, dtype=torch.float64)
    steps = base ** -(torch.arange(32, dtype=torch.float64) / 32)
    assert rotation_bases([rotated(places[:, None] * steps)]) == f"{base:,.0f}"
    # A quarter of the pairs of a table for the whole head.
    quarter = places[:, None] * steps[:8]
    assert rotation_bases([rotated(quarter, gap=24)]) == f"{base:,.0f}"
    # Patches of an image, four in a row.
    half = base ** -(torch.arange(16, dtype=torch.float64) / 16)
    row, column = places // 4, places % 4
    patches = torch.cat([row[:, None] * half, column[:, None] * half], -1)
    assert rotation_bases([rotated(patches)]) == f"{base:,.0f}, by row and column"
    scaled = torch.where(torch.arange(32) < 9, steps, steps / 8)
    assert rotation_bases([rotated(places[:, None] * scaled)]) == "no single base"


def test_states_without_tokens_that_a_model_added_are_those_of_its_blocks():
    whole = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    assert alike(whole, whole[:, :4])
    assert alike(whole, whole[:, 3:])
    assert not alike(whole, whole[:, 1:5])
    assert not alike(whole[:, :4], whole)


def test_modules_whose_forward_is_called_are_seen_once():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.direct = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, vectors):
            return self.direct.forward(self.called(vectors))

    model = Direct()
    trace = traced(model, {"vectors": torch.ones(1, 3)})
    assert [run.path for run in trace.runs] == ["called", "direct", ""]
    assert "forward" not in vars(model.direct)


@pytest.mark.parametrize("model_type", ["dinov2", "gpt_neo"])
def test_precisions_are_tried_with_configurations_that_cannot_be_saved(model_type):
    assert saved_in_half(running(model_type).model) == "as saved"


@pytest.mark.parametrize(
    ("model_type", "reads"),
    [
        # Widths of several parts are equal.
        ("d_fine", "images"),
        ("florence2", "texts (images not tried)"),
        ("luke", "texts"),
        ("informer", "time series"),
        # Rows of patches, and vectors, of the width that the first layer reads.
        ("pix2struct_vision_model", "images"),
        ("granite_speech_encoder", "vectors"),
    ],
)
def test_a_type_is_built_by_the_relations_of_its_sizes(model_type, reads):
    small = running(model_type)
    assert read_by(small.model, small.inputs) == reads
    assert "blocks + 1" in probe(small.model, small.inputs)["hidden_states"]


def test_a_type_says_what_it_reads_and_what_was_not_tried():
    small = running("qwen2_vl")
    assert read_by(small.model, small.inputs) == "texts (images and videos not tried)"


def test_a_type_that_cannot_be_set_back_from_eager_attention_is_built():
    assert running("pp_ocrv5_server_rec").model.config._attn_implementation


def test_a_type_without_a_class_of_its_own_is_not_half_a_model():
    assert type(running("pop2piano").model).__name__ == "Pop2PianoForConditionalGeneration"


def test_how_heads_share_keys_is_said_without_numbers_of_a_small_model():
    cell = "48 query heads, 8 key heads (1), 4 query heads, 2 key heads (1)"
    assert groups_of_type(cell) == "groups of query heads can share a key"
    assert groups_of_type("4 query heads, 1 key head") == "all query heads share a key"


def test_lines_of_a_card_fit_what_a_type_reads():
    rows = load().set_index("type", drop=False)
    image, text = (rows.loc[name].to_dict() for name in ("segformer", "mamba"))
    assert "get_input_embeddings" in plain_lines(text, "MODEL")
    assert "get_input_embeddings" not in plain_lines(image, "MODEL")
    assert 'load_corpus("photos/")' in measured_lines(rows.loc["vit"].to_dict(), "MODEL")
    assert "(norms" not in plain_lines(rows.loc["xlm"].to_dict(), "MODEL")
    # More attentions than blocks are not fewer.
    assert "fewer" not in traps(text | {"attentions": "4 from 2 blocks"})
    assert "fewer" in traps(text | {"attentions": "1 for 2 blocks"})
