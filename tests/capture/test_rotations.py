"""Queries and keys before rotation: what the model's own function of rotation receives."""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import naive
import pytest
import shrunk
import tiny
import torch
from models.test_any_transformer import built, reads
from passes import captured, first_batch
from torch import Tensor, nn

from analysis_lib import AnalysisError, LoadedModel, load_model, measure
from analysis_lib.capture import UNROTATED
from analysis_lib.models.probe import kind_of

# All that rotate of the architectures that researchers use most.
ROTARY = (
    *("modernbert", "eurobert", "nomic_bert", "gpt_neox", "falcon", "llama"),
    *("mistral", "ministral3", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo", "olmo2"),
    *("olmo3", "phi", "phi3", "phimoe", "cohere", "cohere2"),
    *("granite", "granitemoe", "granite_swa", "smollm3", "starcoder2", "stablelm"),
    *("deepseek_v3", "glm", "glm4", "gpt_oss", "exaone4", "helium"),
    *("persimmon", "t5gemma", "bamba", "llava", "seed_oss", "ernie4_5"),
    *("apertus", "glm4_moe_lite", "minicpm3", "dots3_note_text", "llama4_text", "nanochat"),
    *(
        "gemma4_text",
        "openai_privacy_filter",
        "mlcd_vision_model",
        "moonshine",
        "gpt_neox_japanese",
        "zamba2",
    ),
    *("longcat_flash", "mllama_text_model", "chameleon"),
)
# They normalise or scale queries and keys after they have rotated them.
SCALED_LAST = {"llama4_text", "nanochat", "openai_privacy_filter"}
# What their queries and keys are before rotation could not be shown.
NOT_SHOWN = ("gptj", "codegen", "roformer", "jetmoe")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SPACES = frozenset({"query", "key", *UNROTATED})


def in_double(model: nn.Module) -> LoadedModel:
    processor = reads() if kind_of(model) == "text" else shrunk.processor(model)
    return load_model(naive.in_double(model), processor=processor)


@contextlib.contextmanager
def rotations(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside it, what the functions of rotation of a model's source receive and give is noted."""
    noted = []

    def noting(function):
        def noted_call(*args, **kwargs):
            made = function(*args, **kwargs)
            results = made if isinstance(made, tuple) else (made,)
            noted.extend(zip(args, results, strict=False))
            return made

        return noted_call

    with contextlib.ExitStack() as stack:
        for source in {sys.modules[type(module).__module__] for module in model.modules()}:
            for name in [name for name in vars(source) if "apply_rotary" in name]:
                function = noting(getattr(source, name))
                stack.enter_context(mock.patch.object(source, name, function))
        yield noted


def assert_among(vectors: Tensor, candidates: list[Tensor], scaled: bool) -> None:
    """The numbers of each vector, in any order, are the first or last of one of the candidates."""
    errors = []
    for candidate in candidates:
        if candidate.dim() != 4 or candidate.shape[-1] > vectors.shape[-1]:
            continue
        size = candidate.shape[-1]
        for of_heads in (candidate, candidate.transpose(1, 2)):
            if of_heads.shape[1] == 1:
                of_heads = of_heads.expand(-1, vectors.shape[1], -1, -1)
            if of_heads.shape[:3] != vectors.shape[:3]:
                continue
            for part in (vectors[..., :size], vectors[..., -size:]):
                ours, theirs = part.sort(-1)[0], of_heads.sort(-1)[0]
                if scaled:
                    ours, theirs = (v / v.norm(dim=-1, keepdim=True) for v in (ours, theirs))
                errors.append(((ours - theirs).abs().max() / theirs.abs().max()).item())
    assert errors
    assert min(errors) < 1e-12


@pytest.mark.parametrize("model_type", [*ROTARY, "yarn"])
def test_the_models_own_rotation_receives_them(model_type):
    if model_type == "yarn":
        model = shrunk.build("llama", rope_parameters=YARN)
        assert model.rotary_emb.attention_scaling > 1.1
    else:
        model = built(model_type)
    loaded = in_double(model)
    of_kind = {"text": tiny.TEXTS[4:6], "image": tiny.items("vit")[:2]}
    of_kind["audio"] = tiny.items("wav2vec2")[:2]
    batch = first_batch(loaded, of_kind[loaded.kind])
    captured(loaded, batch, SPACES)  # The check of the captured pass is made once.
    with rotations(loaded.model) as noted:
        layers = captured(loaded, batch, SPACES)
    received = [before for before, _ in noted]
    given = [after for _, after in noted]
    rotated = [layer for layer in layers if UNROTATED[0] in layer.spaces]
    assert rotated
    for layer in rotated:
        for space in ("query", "key"):
            scaled = model_type in SCALED_LAST
            before, after = (layer.spaces[name].values for name in (f"{space}_unrotated", space))
            assert (before - after).abs().max() > 0.01 * after.abs().max()
            assert_among(before, received, scaled)
            assert_among(after, given, scaled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "model_type", ["llama", "cohere", "deepseek_v3", "gpt_neox", "llama4_text"]
)
def test_half_precision_shows_the_same_rotation(model_type, dtype):
    rotations = []
    for precision in (torch.float32, dtype):
        model = built(model_type).to(precision)
        specs = [spec for _, spec in load_model(model, processor=reads()).attending]
        assert all(spec.rotates for spec in specs)
        rotations.append([spec.rotates for spec in specs])
    assert rotations[0] == rotations[1]
    spaces = measure(model, list(tiny.TEXTS[:3]), "anisotropy", tokenizer=reads(), progress=False)
    assert {*UNROTATED} < {*spaces["anisotropy"]["space"]}


@pytest.mark.parametrize("model_type", NOT_SHOWN)
def test_what_is_not_shown_is_left_out_with_the_reason(model_type):
    loaded = in_double(built(model_type))
    with pytest.raises(AnalysisError, match=r"before rotation could not be shown; leave it out$"):
        measure(loaded, list(tiny.TEXTS[:2]), "rotary_pairs", progress=False)
    spaces = measure(loaded, list(tiny.TEXTS[:2]), "anisotropy", progress=False)["anisotropy"]
    assert {*spaces["space"]} & {*SPACES} == {"query", "key"}
