"""Adapters, wrappers, hooks and quantised layers: what is measured is the model that runs, as if it
had been merged.
"""

import copy
import json
import shutil

import numpy as np
import peft
import pytest
import shrunk
import tiny
import torch
import transformers
from reference import Reference, assert_agree
from torch import nn

from analysis_book.training import checkpoints
from analysis_book.training.dynamics import dynamics
from analysis_lib import AnalysisError, compare, load_model, measure
from analysis_lib.models.loading import revision_of

# The projections that an adapter changes: keys, and another.
TARGETS = {
    "bert": ["query", "key"],
    "distilbert": ["q_lin", "k_lin"],
    "llama": ["q_proj", "k_proj"],
    "qwen3": ["k_proj", "v_proj"],
    "gpt_neox": ["query_key_value"],
    "gpt2": ["c_attn"],
    "t5": ["q", "k"],
    "modernbert": ["Wqkv"],
    "mpnet": ["k", "o"],
    "deberta": ["in_proj"],
    "vit": ["k_proj"],
}
# What is merged is saved in float32.
MERGED = (1e-5, 1e-5)
SCORES = "score_contributions,score_terms"


def adapted(
    folder, name: str, model: nn.Module | None = None, scale: float = 8.0
) -> peft.PeftModel:
    """A LoRA that changes the model; saved with its tokenizer, and merged beside it."""
    base = tiny.save(folder / "base", name) if not (folder / "base").exists() else folder / "base"
    model = model or transformers.AutoModel.from_pretrained(base)
    config = peft.LoraConfig(
        r=2, lora_alpha=scale, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"
    )
    found = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, weight in found.named_parameters():
            if "lora_B" in key:
                weight.normal_(0, 0.3)
    return found


def merged(folder, found: peft.PeftModel, name: str):
    bare = copy.deepcopy(found).merge_and_unload().base_model
    bare.save_pretrained(folder / "merged")
    tiny.build(name)[1].save_pretrained(folder / "merged")
    return folder / "merged"


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_is_measured_as_if_it_were_merged(name, tmp_path):
    """From a folder of its own, beside its base, and live."""
    found = adapted(tmp_path, name)
    expected = Reference(merged(tmp_path, found, name), tiny.items(name)).tables()
    found.save_pretrained(tmp_path / "adapter")
    shutil.copytree(tmp_path / "base", tmp_path / "both")
    shutil.copytree(tmp_path / "adapter", tmp_path / "both", dirs_exist_ok=True)
    for folder in ("adapter", "both"):
        assert_agree(
            measure(
                load_model(tmp_path / folder, dtype="float64"), tiny.corpus(name), progress=False
            ),
            expected,
            MERGED,
        )
    live = measure(found.double(), tiny.corpus(name), processor=tiny.build(name)[1], progress=False)
    assert_agree(live, expected, MERGED)
    assert live.run["model"].endswith("base+default")


def test_an_adapter_of_the_second_projection_of_latent_keys():
    model = shrunk.build("minicpm3").double()
    config = peft.LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)
    found = peft.get_peft_model(model, config).eval()
    tokenizer = tiny.tokenizer("llama")
    tables = [
        measure(one, tiny.TEXTS[:2], SCORES, tokenizer=tokenizer, progress=False)
        for one in (found, copy.deepcopy(found).merge_and_unload(), copy.deepcopy(found).unload())
    ]
    live, merged_in, without = (
        table["score_contributions"]["contribution"].to_numpy() for table in tables
    )
    np.testing.assert_allclose(live, merged_in, atol=1e-9 * abs(live).max())
    assert abs(live - without).max() > 1e-3 * abs(live).max()


def test_an_adapter_of_a_model_with_a_head(tmp_path):
    tiny.save(tmp_path / "base", "bert")
    head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    found = adapted(tmp_path, "bert", head)
    expected = Reference(merged(tmp_path, found, "bert"), tiny.items("bert")).tables()
    found.save_pretrained(tmp_path / "adapter")
    assert_agree(
        measure(
            load_model(tmp_path / "adapter", dtype="float64"), tiny.corpus("bert"), progress=False
        ),
        expected,
        MERGED,
    )


def test_an_adapter_that_is_scaled_is_another(tmp_path):
    found, tokenizer = adapted(tmp_path, "bert"), tiny.build("bert")[1]
    before = load_model(found, processor=tokenizer).revision
    for module in found.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(10)
    assert load_model(found, processor=tokenizer).revision != before


def test_an_adapter_is_known_by_its_weights_and_its_base(tmp_path):
    adapted(tmp_path, "bert").save_pretrained(tmp_path / "adapter")
    adapted(tmp_path, "bert", scale=80).save_pretrained(tmp_path / "scaled")
    names = [str(tmp_path / name) for name in ("base", "adapter", "scaled")]
    assert len({revision_of(name) for name in names}) == 3
    assert load_model(names[1]).revision == revision_of(names[1])
    tiny.save(tmp_path / "base", "bert", seed=1)
    assert load_model(names[1]).revision == revision_of(names[1])
    cosines = compare({tiny.corpus("bert"): names}, "anisotropy", twins=0)["anisotropy"]
    assert cosines.query("space == 'key'").groupby("model")["cosine"].mean().nunique() == 3


def test_adapters_of_one_base_stand_side_by_side(tmp_path):
    """The base that the name gives counts, and not the one that an adapter names."""
    expected = {}
    for name, scale in (("legal", 8.0), ("medical", 80.0)):
        found = adapted(tmp_path, "bert", scale=scale)
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        expected[name] = Reference(merged(tmp_path, found, "bert"), tiny.items("bert")).tables()
        found.save_pretrained(tmp_path / name)
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps(settings | {"base_model_name_or_path": "elsewhere/gone"})
        )
    names = {name: f"{tmp_path}/base+{tmp_path}/{name}" for name in expected}
    for name, whole in names.items():
        loaded = load_model(whole, dtype="float64")
        assert_agree(measure(loaded, tiny.corpus("bert"), progress=False), expected[name], MERGED)
        assert loaded.revision == revision_of(whole)
    models = [str(tmp_path / "base"), *names.values()]
    table = compare({tiny.corpus("bert"): models}, "anisotropy", twins=0)["anisotropy"]
    assert table["model"].drop_duplicates().tolist() == ["base", "base+legal", "base+medical"]
    assert table.query("space == 'key'").groupby("model")["cosine"].mean().nunique() == 3


def test_what_is_no_adapter_is_one_line(tmp_path):
    base = tiny.save(tmp_path / "base", "bert")
    with pytest.raises(AnalysisError, match="holds no adapter"):
        load_model(f"{base}+{base}")
    with pytest.raises(AnalysisError, match="there is no"):
        load_model(f"{base}+{tmp_path}/nowhere")


def test_checkpoints_that_hold_adapters_alone(tmp_path):
    """As Trainer leaves them; the tokenizer lies in the folder of the run."""
    run = tmp_path / "run"
    for step, scale in ((10, 1.0), (20, 30.0)):
        adapted(tmp_path, "bert", scale=scale).save_pretrained(run / f"checkpoint-{step}")
    tiny.build("bert")[1].save_pretrained(run)
    assert [each.step for each in checkpoints(str(run))] == [10, 20]
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(tiny.TEXTS))
    table = dynamics(str(run), str(text), limit=8, progress=False)["qk_alignment"]
    cosines = table.pivot(index=["layer", "head"], columns="step", values="cosine")
    assert (cosines[10] != cosines[20]).any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model_name_or_path": None}, "does not say whose adapter it is"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "there is no folder"),
        ({"target_modules": ["nothing_of_that_name"]}, "its adapter cannot be applied"),
        ({"peft_type": "NO_SUCH"}, "its adapter cannot be applied"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, "its adapter cannot be applied"),
    ],
)
def test_an_adapter_that_cannot_be_applied_is_one_line(change, said, tmp_path):
    adapted(tmp_path, "bert").save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AnalysisError, match=said):
        load_model(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    adapted(tmp_path, "bert").save_pretrained(tmp_path / "adapter")
    tiny.save(tmp_path / "base", "bert", hidden_size=32)
    with pytest.raises(AnalysisError, match="its adapter cannot be applied"):
        load_model(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(AnalysisError, match="its adapter cannot be applied"):
        load_model(tmp_path / "adapter")


def test_a_prefix_is_not_measured(tmp_path):
    tiny.save(tmp_path / "base", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    prefix = peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(AnalysisError, match="puts vectors before a text is not measured"):
        measure(prefix, ["a"], tokenizer=tiny.build("llama")[1])


# --- Other projections
# ------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A projection made by hand: twice another, and a constant."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return 2 * self.inner(hidden) + 0.5


class Rounded(nn.Module):
    """A layer of 8-bit weights that are scaled when they are used."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.scale = inner.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("stored", (inner.weight / self.scale).round().to(torch.int8))
        self.bias = inner.bias

    def forward(self, hidden):
        return nn.functional.linear(
            hidden, self.stored.to(hidden.dtype) * self.scale.to(hidden.dtype), self.bias
        )


class Squared(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) ** 2


@pytest.fixture
def bert():
    model, tokenizer = tiny.build("bert")
    return model.double(), tokenizer


def scores(model, tokenizer):
    return measure(model, tiny.corpus("bert"), SCORES, tokenizer=tokenizer, progress=False)


def put(model, made) -> None:
    for layer in model.encoder.layer:
        layer.attention.self.key = made(layer.attention.self.key)


@torch.no_grad()
def test_a_wrapper_made_by_hand(bert):
    model, tokenizer = bert
    plain = copy.deepcopy(model)
    put(model, Doubled)
    for layer in plain.encoder.layer:
        layer.attention.self.key.weight *= 2
        layer.attention.self.key.bias.mul_(2).add_(0.5)
    assert_agree(scores(model, tokenizer), scores(plain, tokenizer), (1e-9, 1e-9))


@torch.no_grad()
def test_a_linear_layer_of_8_bits(bert):
    model, tokenizer = bert
    plain = copy.deepcopy(model)
    put(model, Rounded)
    for ours, layer in zip(model.encoder.layer, plain.encoder.layer, strict=True):
        rounded = ours.attention.self.key
        layer.attention.self.key.weight.copy_(rounded.stored * rounded.scale)
    assert_agree(scores(model, tokenizer), scores(plain, tokenizer), (1e-9, 1e-9))


@torch.no_grad()
def test_hooks_on_a_projection(bert):
    """One that changes what it reads, and one that changes what it gives."""
    model, tokenizer = bert
    plain = copy.deepcopy(model)
    for layer in model.encoder.layer:
        layer.attention.self.key.register_forward_hook(lambda _module, _args, output: 3 * output)
        layer.attention.self.key.register_forward_pre_hook(lambda _module, args: (args[0] / 2,))
    for layer in plain.encoder.layer:
        layer.attention.self.key.weight *= 1.5
        layer.attention.self.key.bias *= 3
    assert_agree(scores(model, tokenizer), scores(plain, tokenizer), (1e-9, 1e-9))


def test_a_hook_that_only_looks_on_sees_each_pass_once(bert):
    model, tokenizer = bert
    expected, seen = scores(model, tokenizer), []
    for layer in model.encoder.layer:
        layer.attention.self.key.register_forward_hook(
            lambda _module, args, _output: seen.append(args[0].shape)
        )
    assert_agree(scores(model, tokenizer), expected, (1e-12, 1e-12))
    assert all(shape[1:] != (25, 24) for shape in seen)


def test_what_is_not_linear_has_no_contributions(bert):
    model, tokenizer = bert
    put(model, Squared)
    tables = measure(model, tiny.corpus("bert"), tokenizer=tokenizer, progress=False)
    assert {"score_contributions", "score_terms"} == {*tables.run["left_out"]}
    assert "Squared that is not linear" in tables.run["left_out"]["score_terms"]
    assert {"anisotropy", "attention_entropy", "attention_by_token_type"} <= {*tables}
    with pytest.raises(AnalysisError, match=r"score_terms makes no sense .* not linear"):
        measure(model, tiny.corpus("bert"), "score_terms", tokenizer=tokenizer, progress=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_round_what_they_read():
    """PyTorch's dynamic 8-bit layers: what is left out has a reason."""
    model, tokenizer = tiny.build("bert")
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    tables = measure(quantised, tiny.corpus("bert"), tokenizer=tokenizer, progress=False)
    assert "not linear" in tables.run["left_out"]["score_contributions"]
    assert "anisotropy" in tables


class Packed(torch.Tensor):
    """Weights of 8 bits, as quanto's: unpacked when they are used, which inference mode does not
    let them.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            assert not torch.is_inference_mode_enabled()
            hidden, weight, *bias = args
            return function(hidden, weight.dequantize(), *bias, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def dequantize(self):
        rounded = self.as_subclass(torch.Tensor).mul(64).round()
        return rounded / 64


@torch.no_grad()
def test_weights_that_are_tensors_of_a_class_of_their_own(bert):
    """As those of torchao and quanto; the scores are those of the weights that they stand for."""
    model, tokenizer = bert
    plain = copy.deepcopy(model)
    for ours, layer in zip(model.encoder.layer, plain.encoder.layer, strict=True):
        key = ours.attention.self.key
        packed = key.weight.detach().as_subclass(Packed)
        layer.attention.self.key.weight.copy_(packed.dequantize())
        key.weight = nn.Parameter(packed, requires_grad=False)
    assert_agree(scores(model, tokenizer), scores(plain, tokenizer), (1e-9, 1e-9))
