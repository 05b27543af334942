"""Folders that name code to fetch, that do not say their type, whose weights are pickles, or of
which there are two.
"""

import copy
import json
import logging
import pickle
from pathlib import Path

import pandas as pd
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.models.loading import revision_of

REPOSITORY = "nobody/no-such-kernel"


def table(model: object, **given: object) -> pd.DataFrame:
    return measure(model, list(tiny.TEXTS), "anisotropy", progress=False, **given)["anisotropy"]


def changed(path: Path, **settings: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))


# --- Code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"_attn_implementation": REPOSITORY}),
        ("config.json", {"attn_implementation": f"paged|{REPOSITORY}"}),
        (
            "config.json",
            {"attn_implementation": {"": "sdpa", "text_config": f"{REPOSITORY}:forward"}},
        ),
        ("config.json", {"text_config": {"_attn_implementation": f"{REPOSITORY}@main"}}),
        ("config.json", {"_experts_implementation": REPOSITORY}),
        (
            "config.json",
            {"kernel_config": {"kernel_mapping": {"RMSNorm": f"{REPOSITORY}:RMSNorm"}}},
        ),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "kernel": REPOSITORY}}),
        ("generation_config.json", {"custom_generate": REPOSITORY}),
        ("tokenizer_config.json", {"attn_implementation": REPOSITORY}),
    ],
)
def test_settings_that_name_code_are_one_line(file, settings, tmp_path):
    changed(tiny.save(tmp_path / "bert", "bert") / file, **settings)
    with pytest.raises(
        AnalysisError, match=f"its {file} names code to fetch .*{REPOSITORY}"
    ) as refused:
        load_model(tmp_path / "bert")
    assert "\n" not in str(refused.value)


def test_flash_attention_in_a_configuration_does_not_matter(tmp_path):
    folder = tiny.save(tmp_path / "bert", "bert")
    expected = table(folder)
    changed(folder / "config.json", _attn_implementation="flash_attention_2")
    pd.testing.assert_frame_equal(table(folder), expected)


# --- Weights --------------------------------------------------------------------------------------


def pickled(folder: Path, old_names: bool = False) -> None:
    """The weights of a folder as they were published in 2019."""
    weights = load_file(folder / "model.safetensors")
    if old_names:
        ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, old in ends.items():
            weights = {
                name.removesuffix(new) + old if name.endswith(new) else name: w
                for name, w in weights.items()
            }
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_a_pickle_is_read_as_tensors_and_said(tmp_path, caplog):
    folder = tiny.save(tmp_path / "bert", "bert")
    expected = table(folder)
    pickled(folder)
    with caplog.at_level(logging.WARNING):
        pd.testing.assert_frame_equal(table(folder), expected)
    assert (
        "its weights are a pickle (pytorch_model.bin), of which tensors alone are read"
        in caplog.text
    )
    before = revision_of(str(folder))
    weights = torch.load(folder / "pytorch_model.bin")
    torch.save({name: weight + 1 for name, weight in weights.items()}, folder / "pytorch_model.bin")
    assert revision_of(str(folder)) != before


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_pickle_of_code_is_one_line_and_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny.save(tmp_path / "bert", "bert")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(
        AnalysisError, match="holds more than tensors, and no code of a model is run"
    ):
        load_model(folder)
    assert not Path("ran").exists()


OLD = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "distilbert": "DistilBertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}


@pytest.mark.parametrize("name", OLD)
def test_the_type_of_an_old_model_follows_from_its_weights(name, tmp_path, caplog):
    bare, tokenizer = tiny.build(name)
    made = getattr(transformers, OLD[name])
    model = made(copy.deepcopy(bare.config)).eval()
    model.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    expected = table(tmp_path / name)
    pickled(tmp_path / name, old_names=True)
    path = tmp_path / name / "config.json"
    settings = json.loads(path.read_text())
    for key in ("model_type", "architectures", "transformers_version"):
        settings.pop(key)
    path.write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        pd.testing.assert_frame_equal(table(tmp_path / name), expected)
    assert (
        f"its config.json says no model_type: its weights are all of a {name} model" in caplog.text
    )


def test_a_type_that_does_not_follow_is_one_line_with_the_remedy(tmp_path):
    """The body of a BERT has the names and shapes of that of a RoBERTa."""
    folder = tiny.save(tmp_path / "bert", "bert")
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("model_type")
    path.write_text(json.dumps(settings))
    with pytest.raises(
        AnalysisError, match=r"fit bert and roberta.* alike: save it anew .*save_pretrained"
    ) as refused:
        load_model(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("with_index", [True, False])
def test_the_weights_of_two_saves_are_one_line(with_index, tmp_path):
    folder = tiny.save(tmp_path / "run", "bert")
    tuned, _ = tiny.build("bert", seed=5)
    tuned.save_pretrained(folder, max_shard_size="20KB")
    if not with_index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        AnalysisError, match=r"two saves, model.safetensors and model-00001-of-.*: delete those"
    ):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    if with_index:
        pd.testing.assert_frame_equal(table(folder), table(tuned, tokenizer=tiny.build("bert")[1]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("attention.", "attention._orig_mod."),
        ("encoder.layer.", "_fsdp_wrapped_module.encoder._checkpoint_wrapped_module.layer."),
    ],
)
def test_weights_of_parts_that_were_wrapped(before, after, tmp_path):
    folder = tiny.save(tmp_path / "bert", "bert")
    expected = table(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace(before, after): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    pd.testing.assert_frame_equal(table(folder), expected)


# --- Names ----------------------------------------------------------------------------------------


def test_a_folder_called_like_a_known_model_is_passed_over_with_a_note(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    with caplog.at_level(logging.WARNING):
        assert len(load_model("minilm").stacks) == 1
    assert (
        "minilm is the known model of that name, and not the folder minilm that lies here"
        in caplog.text
    )
    assert "give ./minilm" in caplog.text


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_what_sentence_transformers_would_do_with_a_text_is_said(inner, tmp_path, caplog):
    folder = tiny.save(tmp_path / "st" / inner, "bert")
    kind = "sentence_transformers.models.Transformer"
    modules = [{"idx": 0, "name": "0", "path": inner, "type": kind}]
    (tmp_path / "st" / "modules.json").write_text(json.dumps(modules))
    with caplog.at_level(logging.WARNING):
        expected = table(tmp_path / "st")
    assert "sentence-transformers would" not in caplog.text
    changed(folder / "sentence_bert_config.json", max_seq_length=16, do_lower_case=True)
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    changed(tmp_path / "st" / "config_sentence_transformers.json", **prompts)
    with caplog.at_level(logging.WARNING):
        found = table(tmp_path / "st")
    steps = "cut it at 16 tokens and put it in lower case and put 'query: ' before it"
    assert f"sentence-transformers would {steps}; it is read here as transformers" in caplog.text
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("name", ["digits", "wikipedia"])
def test_what_is_called_like_a_known_corpus_is_passed_over_with_a_note(
    name, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    load_corpus(name, limit=1)
    assert "known corpus" not in caplog.text
    Path(name).write_text("one line")
    with caplog.at_level(logging.WARNING):
        load_corpus(name, limit=1)
    assert (
        f"{name} is the known corpus of that name, and not what lies here under it" in caplog.text
    )
    assert f"give ./{name}" in caplog.text
