"""The outermost model runs, and its body is listened to: adapters of every kind, subclasses, hooks;
as transformers and peft give hidden states."""

import copy
import json

import numpy as np
import peft
import pytest
import tiny
import torch
import transformers
from torch import nn

from analysis_lib import AnalysisError, load_model, measure

WITH_HEAD = transformers.LlamaForCausalLM
TWO = ["q_proj", "k_proj"]
# Norms and angles are computed in float32 by transformers, and here in float64.
CLOSE = 2e-6
OF_ONE = {"model.layers.0.self_attn.k_proj": 8}


def cosine(vectors: np.ndarray) -> float:
    """The average cosine of all pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    total, count = unit.sum(0), len(unit)
    return float((total @ total - count) / (count * (count - 1)))


@torch.no_grad()
def expected(model: nn.Module, tokenizer) -> list[float]:
    """The cosines of all that ``output_hidden_states`` gives, text by text; the last may be behind
    a norm.
    """
    layers: list[list] = []
    for text in tiny.TEXTS:
        hidden = model(
            **tokenizer(text, return_tensors="pt"), output_hidden_states=True
        ).hidden_states
        layers = layers or [[] for _ in hidden]
        for layer, vectors in zip(layers, hidden, strict=True):
            layer.append(vectors[0].double().numpy())
    return [cosine(np.concatenate(layer)) for layer in layers[:-1]]


def ours(model: object, **given: object) -> list[float]:
    found = measure(model, list(tiny.TEXTS), "anisotropy", progress=False, **given)["anisotropy"]
    return found.query("space == 'hidden'")["cosine"].tolist()[:-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple:
    """The folder of a causal model with its head, and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    body, tokenizer = tiny.build("llama", num_hidden_layers=3)
    model = WITH_HEAD(body.config)
    model.model.load_state_dict(body.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def fresh(base: tuple, more: int = 0) -> WITH_HEAD:
    model = WITH_HEAD.from_pretrained(base[0], dtype=torch.float64)
    if more:
        model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
    return model


def lora(**settings: object) -> peft.LoraConfig:
    settings = {"target_modules": TWO, "r": 4, "lora_alpha": 4, **settings}
    return peft.LoraConfig(**settings)


def trained(model: nn.Module, config: peft.PeftConfig) -> peft.PeftModel:
    torch.manual_seed(1)
    made = peft.get_peft_model(model, config)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.4)
    return made.eval()


def invoked(base: tuple) -> list[int]:
    """A token that some of the texts hold."""
    return base[1]("the", add_special_tokens=False)["input_ids"][:1]


KINDS = {
    "LoRA": lora(),
    "alpha_pattern": lora(alpha_pattern=dict.fromkeys(OF_ONE, 64)),
    "rank_pattern": lora(rank_pattern=OF_ONE),
    "layers_to_transform": lora(layers_to_transform=[1, 2]),
    "regular expression": lora(target_modules=r"model\.layers\.\d+\.self_attn\.(q|k)_proj"),
    "full names": lora(
        target_modules=["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]
    ),
    "all layers": lora(target_modules="all-linear", task_type="CAUSAL_LM"),
    "rank-stabilised": lora(use_rslora=True),
    "biases": lora(bias="all"),
    "DoRA": lora(use_dora=True),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=TWO, total_step=10, init_r=4, target_r=2),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHa": peft.LoHaConfig(r=4, target_modules=TWO),
    "VeRA": peft.VeraConfig(r=4, target_modules=TWO),
    "trained tokens": lora(trainable_token_indices=[3, 4]),
    "embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "a layer as a whole": lora(modules_to_save=["down_proj"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_read_as_peft_reads_it(kind, base, tmp_path):
    """From its folder, and at hand."""
    made = trained(fresh(base), copy.deepcopy(KINDS[kind]))
    made.save_pretrained(tmp_path)
    wanted = expected(peft.PeftModel.from_pretrained(fresh(base), tmp_path).eval(), base[1])
    assert abs(wanted[-1] - expected(fresh(base), base[1])[-1]) > 1e-4
    np.testing.assert_allclose(ours(load_model(tmp_path, dtype="float64")), wanted, rtol=CLOSE)
    np.testing.assert_allclose(ours(made, tokenizer=base[1]), expected(made, base[1]), rtol=CLOSE)


def test_an_adapter_that_takes_parts_out_of_its_base(base, tmp_path):
    """PiSSA; peft makes it in single precision alone."""
    made = trained(fresh(base).float(), lora(init_lora_weights="pissa"))
    made.save_pretrained(tmp_path)
    wanted = expected(peft.PeftModel.from_pretrained(fresh(base).float(), tmp_path).eval(), base[1])
    np.testing.assert_allclose(ours(load_model(tmp_path)), wanted, rtol=1e-4)


def test_an_adapter_that_acts_from_some_tokens_on(base, tmp_path):
    config = lora(task_type="CAUSAL_LM", alora_invocation_tokens=invoked(base))
    made = trained(fresh(base), config)
    made.save_pretrained(tmp_path)
    wanted = expected(made, base[1])
    for other in (fresh(base), trained(fresh(base), lora(task_type="CAUSAL_LM"))):
        assert abs(wanted[-1] - expected(other, base[1])[-1]) > 1e-4
    np.testing.assert_allclose(ours(load_model(tmp_path, dtype="float64")), wanted, rtol=CLOSE)
    np.testing.assert_allclose(ours(made, tokenizer=base[1]), wanted, rtol=CLOSE)
    tables = measure(made, list(tiny.TEXTS), tokenizer=base[1], progress=False)
    assert "acts on some tokens" in tables.run["left_out"]["score_contributions"]
    assert not any(module._forward_pre_hooks for module in made.modules())


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_that_was_made_with_more_tokens(whole, base, tmp_path):
    known = fresh(base).config.vocab_size
    config = lora(modules_to_save=["embed_tokens", "lm_head"] if whole else None)
    if not whole:
        config.trainable_token_indices = [known, known + 1, known + 2]
    made = trained(fresh(base, 3), config)
    made.save_pretrained(tmp_path, save_embedding_layers=whole)
    tokenizer = copy.deepcopy(base[1])
    tokenizer.add_tokens(["cones", "vectors", "styling"])
    tokenizer.save_pretrained(tmp_path)
    wanted = expected(made, tokenizer)
    np.testing.assert_allclose(ours(load_model(tmp_path, dtype="float64")), wanted, rtol=CLOSE)


def test_the_embeddings_of_added_tokens_are_missed(base, tmp_path):
    made = trained(fresh(base, 3), lora(target_modules=["embed_tokens"]))
    made.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(
        AnalysisError, match=r"made for .* tokens, the model embeds .* save_embedding_layers=True"
    ):
        load_model(tmp_path)


def test_an_adapter_of_the_head_changes_its_predictions(base, tmp_path):
    made = trained(fresh(base), lora(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    made.save_pretrained(tmp_path)
    tables = [
        measure(model, list(tiny.TEXTS), "next_token_loss", progress=False, **given)[
            "next_token_loss"
        ]
        for model, given in (
            (load_model(tmp_path, dtype="float64"), {}),
            (made, {"tokenizer": base[1]}),
            (load_model(base[0], dtype="float64"), {}),
        )
    ]
    of_folder, at_hand, of_base = (table.select_dtypes(float).to_numpy() for table in tables)
    np.testing.assert_allclose(of_folder, at_hand, rtol=1e-9)
    assert abs(of_folder - of_base).max() > 1e-3


def test_an_adapter_that_names_code_is_refused(base, tmp_path, monkeypatch):
    trained(fresh(base), lora()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    settings = json.loads(path.read_text()) | {
        "megatron_config": {"a": 1},
        "megatron_core": "named_module",
    }
    path.write_text(json.dumps(settings))
    (tmp_path / "named_module.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AnalysisError, match=r"names code to run .*megatron_core"):
        load_model(tmp_path)


def test_an_adapter_that_is_a_pickle_is_read_as_tensors(base, tmp_path):
    made = trained(fresh(base), lora())
    made.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "adapter_model.bin").is_file()
    np.testing.assert_allclose(
        ours(load_model(tmp_path, dtype="float64")), expected(made, base[1]), rtol=CLOSE
    )


# --- The outermost model --------------------------------------------------------------------------


class Moved(WITH_HEAD):
    """All embeddings are moved before the body reads them."""

    def forward(self, input_ids=None, **given):
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) + 0.05, **given)


class Twice(WITH_HEAD):
    def forward(self, **given):
        super().forward(**given)
        return super().forward(**given)


def test_a_forward_of_ones_own_is_run(base):
    moved = Moved.from_pretrained(base[0], dtype=torch.float64)
    wanted = expected(moved, base[1])
    assert abs(wanted[-1] - expected(fresh(base), base[1])[-1]) > 1e-2
    np.testing.assert_allclose(ours(moved, tokenizer=base[1]), wanted, rtol=CLOSE)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_hook_on_the_outermost_model_is_run(name):
    bare, tokenizer = tiny.build(name)
    made = {"llama": WITH_HEAD, "bert": transformers.BertForSequenceClassification}[name]
    model = made(bare.config).double().eval()

    def next_id(_module, args, given):
        return args, given | {"input_ids": given["input_ids"].clamp(min=7) - 2}

    plain = expected(model, tokenizer)
    handle = model.register_forward_pre_hook(next_id, with_kwargs=True)
    wanted = expected(model, tokenizer)
    assert abs(wanted[1] - plain[1]) > 1e-3
    np.testing.assert_allclose(ours(model, tokenizer=tokenizer), wanted, rtol=CLOSE)
    handle.remove()
    np.testing.assert_allclose(ours(model, tokenizer=tokenizer), plain, rtol=CLOSE)


def test_a_head_of_transformers_that_changes_what_its_body_reads(base, monkeypatch):
    """As that of a Longformer does, which lets the first token attend to all others."""
    monkeypatch.setattr(Moved, "__module__", "transformers.moved")
    moved = Moved.from_pretrained(base[0], dtype=torch.float64)
    np.testing.assert_allclose(ours(moved, tokenizer=base[1]), expected(moved, base[1]), rtol=CLOSE)


def test_a_head_that_needs_more_than_its_body_is_left_out():
    """This one needs a padding token, or texts one by one."""
    bare, tokenizer = tiny.build("llama")
    model = transformers.LlamaForSequenceClassification(bare.config).double().eval()
    model.config.pad_token_id = None
    np.testing.assert_allclose(
        ours(model, tokenizer=tokenizer), expected(model.model, tokenizer), rtol=CLOSE
    )


def test_a_body_that_runs_twice_is_one_line(base):
    model = Twice.from_pretrained(base[0])
    with pytest.raises(AnalysisError, match="a pass of its Twice runs its LlamaModel 2 times"):
        ours(model, tokenizer=base[1])


def test_hooks_on_a_wrapper_are_one_line(base):
    wrapped = nn.Module()
    wrapped.module = fresh(base)
    wrapped.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(AnalysisError, match="put them on the model"):
        ours(wrapped, tokenizer=base[1])


def test_the_outermost_model_is_part_of_what_a_model_is_known_by(base):
    plain, moved = fresh(base), Moved.from_pretrained(base[0], dtype=torch.float64)
    revisions = {
        load_model(model, processor=base[1]).revision for model in (plain, moved, plain.model)
    }
    plain.register_forward_pre_hook(lambda *_: None)
    revisions.add(load_model(plain, processor=base[1]).revision)
    assert len(revisions) == 4
