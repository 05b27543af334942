"""Folders as others leave them: heads, wrappers, checkpoints, sentence-transformers; and damaged
ones, in one line.
"""

import ast
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

import analysis_book
import analysis_lib
from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.models.folders import file_hashes
from analysis_lib.models.loading import revision_of

HEADS = {
    "whisper": ["WhisperForAudioClassification", "WhisperForConditionalGeneration"],
    "t5": ["T5ForQuestionAnswering", "T5ForConditionalGeneration", "T5ForSequenceClassification"],
    "llama": ["LlamaForQuestionAnswering", "LlamaForTokenClassification", "LlamaForCausalLM"],
    "qwen2": ["Qwen2ForQuestionAnswering"],
    "bert": ["BertForQuestionAnswering", "BertForMaskedLM"],
    "dinov2": ["Dinov2Backbone", "Dinov2ForImageClassification"],
    "beit": ["BeitBackbone"],
    "resnet-basic": ["ResNetBackbone"],
    "convnext": ["ConvNextBackbone"],
}
ON_AN_ENCODER = ("T5ForTokenClassification", "T5EncoderModel")


def table(model, name: str, **options) -> pd.DataFrame:
    found = measure(model, tiny.corpus(name), "anisotropy", progress=False, **options)["anisotropy"]
    return found[found["space"] == "hidden"].drop(columns="head")


def head_of(
    name: str, head: str
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel, object]:
    """A tiny model with a head, whose base has the weights of the tiny model; that; and what
    prepares its input.
    """
    bare, reads = tiny.build(name)
    model = getattr(transformers, head)(bare.config).eval()
    weights = bare.state_dict()
    for key, value in model.state_dict().items():
        inner = next((k for k in weights if key == k or key.endswith(f".{k}")), None)
        if inner is not None and weights[inner].shape == value.shape:
            value.copy_(weights[inner])
    return model, bare, reads


@pytest.mark.parametrize(
    ("name", "head"), [(name, head) for name, heads in HEADS.items() for head in heads]
)
def test_a_head_does_not_matter(name, head, tmp_path):
    model, bare, reads = head_of(name, head)
    expected = table(bare, name, processor=reads)
    pd.testing.assert_frame_equal(table(model, name, processor=reads), expected, rtol=1e-4)
    model.save_pretrained(tmp_path)
    reads.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(table(tmp_path, name), expected, rtol=1e-4)


@pytest.mark.parametrize("head", ON_AN_ENCODER)
def test_a_head_on_an_encoder_alone(head, tmp_path):
    model, bare, reads = head_of("t5", head)
    expected = table(bare, "t5", processor=reads).iloc[:3]
    pd.testing.assert_frame_equal(table(model, "t5", processor=reads), expected, rtol=1e-4)
    model.save_pretrained(tmp_path)
    reads.save_pretrained(tmp_path)
    pd.testing.assert_frame_equal(table(tmp_path, "t5"), expected, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("head", ["BertModel", "BertForMaskedLM"])
def test_weights_of_a_wrapped_model(prefix, head, tmp_path):
    model, bare, reads = head_of("bert", head)
    model.save_pretrained(tmp_path)
    reads.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {prefix + key: value for key, value in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    pd.testing.assert_frame_equal(
        table(tmp_path, "bert"), table(bare, "bert", processor=reads), rtol=1e-4
    )


@pytest.mark.parametrize(
    "name", ["bert", "t5", "llama", "vit", "whisper", "convnext", "character_bert", "manta", "van"]
)
def test_a_configuration_that_asks_for_tuples(name, tmp_path):
    folder = tiny.save(tmp_path / name, name)
    expected = table(folder, name)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"return_dict": False}))
    pd.testing.assert_frame_equal(table(folder, name), expected)


def test_a_folder_of_sentence_transformers(tmp_path):
    inner = tiny.save(tmp_path / "0_Transformer", "bert")
    kind = "sentence_transformers.models."
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind + "Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": kind + "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    pd.testing.assert_frame_equal(table(tmp_path, "bert"), table(inner, "bert"))
    assert load_model(tmp_path).revision == revision_of(str(tmp_path)) == revision_of(str(inner))


def test_the_tokenizer_of_a_checkpoint_lies_in_the_folder_of_its_run(tmp_path):
    model, reads = tiny.build("bert")
    model.save_pretrained(tmp_path / "checkpoint-10")
    with pytest.raises(AnalysisError, match="has no tokenizer"):
        load_model(tmp_path / "checkpoint-10")
    reads.save_pretrained(tmp_path)
    loaded = load_model(tmp_path / "checkpoint-10")
    assert loaded.revision == revision_of(str(tmp_path / "checkpoint-10"))
    # Another tokenizer is another model.
    reads.add_tokens(["cones"])
    reads.save_pretrained(tmp_path)
    assert revision_of(str(tmp_path / "checkpoint-10")) != loaded.revision


def test_a_tokenizer_from_elsewhere(tmp_path):
    model, reads = tiny.build("bert")
    model.save_pretrained(tmp_path / "bare")
    whole = tiny.save(tmp_path / "whole", "bert")
    expected = table(whole, "bert")
    pd.testing.assert_frame_equal(table(tmp_path / "bare", "bert", tokenizer=whole), expected)
    loaded = load_model(tmp_path / "bare", processor=str(whole))
    assert loaded.revision == revision_of(str(tmp_path / "bare"), str(whole))
    assert table(loaded, "bert").equals(expected)
    with pytest.raises(AnalysisError, match="is loaded with its tokenizer"):
        measure(loaded, ["a"], tokenizer=reads)
    with pytest.raises(AnalysisError, match="give the name or folder of its TokenizersBackend"):
        load_model(whole, processor=reads)


def test_weights_in_another_folder_are_part_of_what_a_model_is_known_by(tmp_path):
    tiny.save(tmp_path, "bert")
    (tmp_path / "parts").mkdir()
    os.rename(tmp_path / "model.safetensors", tmp_path / "parts" / "one.safetensors")
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(
            load_file(tmp_path / "parts/one.safetensors"), "parts/one.safetensors"
        ),
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = revision_of(str(tmp_path))
    assert "parts/one.safetensors" in file_hashes(tmp_path)
    assert load_model(tmp_path).revision == before
    weights = load_file(tmp_path / "parts/one.safetensors")
    save_file(
        {key: value + 1 for key, value in weights.items()},
        tmp_path / "parts/one.safetensors",
        {"format": "pt"},
    )
    assert revision_of(str(tmp_path)) != before


# --- Damage
# -----------------------------------------------------------------------------------------


def reconfigured(**changes):
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def complex_weights(folder: Path) -> None:
    weights = {
        key: torch.from_numpy(value)
        for key, value in load_file(folder / "model.safetensors").items()
    }
    key = "encoder.layer.1.attention.self.key.weight"
    save_torch(
        weights | {key: torch.complex(weights[key], weights[key])},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')


def fifo(name: str):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 5000 + "]" * 5000)


DAMAGE = {
    "quantization by nobody": reconfigured(quantization_config={"bits": 3}),
    "quantization in a word": reconfigured(quantization_config="int3"),
    "complex": complex_weights,
    "empty index": empty_index,
    "pipe for a tokenizer": fifo("tokenizer.json"),
    "pipe for a configuration": fifo("config.json"),
    "pipe for weights": fifo("model.safetensors"),
    "deep": deep,
    "a million layers": reconfigured(num_hidden_layers=10**6),
    "layers in words": reconfigured(num_hidden_layers="three"),
    "a list of heads": reconfigured(num_attention_heads=[2]),
    "no type": reconfigured(model_type=None),
    "type of a list": reconfigured(model_type=["bert"]),
    "chunks": reconfigured(chunk_size_feed_forward=7),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_one_line(kind, tmp_path):
    DAMAGE[kind](tiny.save(tmp_path / "bert", "bert"))
    with pytest.raises(AnalysisError) as refused:
        measure(tmp_path / "bert", list(tiny.TEXTS), "anisotropy", progress=False)
    assert len(str(refused.value).splitlines()) == 1
    assert str(tmp_path / "bert") in str(refused.value)


def test_a_t5_that_does_not_say_how_its_decoder_starts(tmp_path):
    tiny.save(tmp_path, "t5")
    reconfigured(decoder_start_token_id=None)(tmp_path)
    with pytest.raises(AnalysisError, match="decoder_start_token_id"):
        measure(tmp_path, ["a text"], "anisotropy", progress=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit", {"image_size": 16}),
        ("deit", {"image_size": 64}),
        ("vit", {"num_channels": 1, "image_size": 48}),
    ],
)
def test_images_of_another_size_are_one_line(name, changes, tmp_path):
    tiny.save(tmp_path, name, **changes)
    with pytest.raises(
        AnalysisError, match=r"its .*ImageProcessor.* (makes (of the data|alone)|fails)"
    ):
        measure(tmp_path, tiny.corpus(name), "anisotropy", progress=False)


def test_one_letter_is_too_little_for_canine_or_measured(tiny_folder):
    with pytest.raises(AnalysisError, match=r"isotropy|cannot read"):
        measure(tiny_folder("canine"), ["a"], "isotropy", progress=False)


# --- Foreign code
# -----------------------------------------------------------------------------------

AUTOMATIC = {
    "AutoModel",
    "AutoTokenizer",
    "AutoConfig",
    "AutoImageProcessor",
    "AutoFeatureExtractor",
}


def test_every_call_that_reads_a_folder_refuses_its_code():
    """Each ``from_pretrained`` of the library has ``trust_remote_code=False``, by name or as part
    of ``LOCALLY``.
    """
    assert analysis_lib.models.loading.LOCALLY == {
        "local_files_only": True,
        "trust_remote_code": False,
    }
    found = []
    homes = [Path(package.__file__).parent for package in (analysis_lib, analysis_book)]
    for path in [path for home in homes for path in home.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                given = {
                    keyword.arg or ast.unparse(keyword.value): keyword.value
                    for keyword in node.keywords
                }
                # peft has no code of others to trust, and is given folders whose files are there.
                of_peft = path.name == "adapters.py" and ast.unparse(node.func).startswith("peft.")
                safe = "LOCALLY" in given or "where" in given or of_peft
                assert safe, f"{path}:{node.lineno}: {ast.unparse(node)}"
                found.append(path.name)
    assert {
        "checkpoint.py",
        "loading.py",
        "text_classifiers.py",
        "pretraining.py",
        "conversion.py",
    } <= {*found}


@pytest.mark.parametrize(
    ("name", "file", "key", "auto"),
    [
        ("vit", "preprocessor_config.json", "image_processor_type", "AutoImageProcessor"),
        ("wav2vec2", "preprocessor_config.json", "feature_extractor_type", "AutoFeatureExtractor"),
        ("bert", "tokenizer_config.json", "tokenizer_class", "AutoTokenizer"),
        ("bert", "config.json", "model_type", "AutoConfig"),
    ],
)
def test_code_beside_the_weights_does_not_run(name, file, key, auto, tmp_path, monkeypatch):
    folder = tiny.save(tmp_path / "model", name)
    evidence = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(evidence)!r}, 'w').close()\nclass Evil: pass\n")
    target = ["evil.Evil", "evil.Evil"] if auto == "AutoTokenizer" else "evil.Evil"
    settings = json.loads((folder / file).read_text()) | {
        key: "Unheard",
        "auto_map": {auto: target},
    }
    (folder / file).write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    # A tokenizer that it does not know, transformers reads by its own class.
    with suppress(AnalysisError) if auto == "AutoTokenizer" else pytest.raises(AnalysisError):
        measure(folder, tiny.corpus(name), "anisotropy", progress=False)
    assert not evidence.exists()


def test_a_note_says_that_code_beside_the_weights_is_not_run(tmp_path, caplog):
    folder = tiny.save(tmp_path / "model", "bert")
    load_model(folder)
    assert "auto_map" not in caplog.text
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit")
    load_model(folder)
    notes = [record.getMessage() for record in caplog.records if "auto_map" in record.getMessage()]
    (note,) = notes
    assert note.startswith(f"note: {folder}: ")
    assert "configuration.Config, modeling.Model" in note
    assert "is not run: the BertModel of transformers is measured" in note


def test_weights_are_compared_by_shape(tmp_path):
    """A folder that two models were saved to."""
    tiny.save(tmp_path, "bert")
    other = tiny.save(tmp_path / "other", "bert", hidden_size=32)
    shutil.copy(other / "model.safetensors", tmp_path)
    with pytest.raises(AnalysisError, match="of shape"):
        load_model(tmp_path)
    assert np.isfinite(table(other, "bert")["cosine"]).all()
