"""Models by name, and what is said of those that cannot be measured."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
import safetensors.torch
import tiny
import torch
import transformers
from huggingface_hub import constants

from analysis_book.training.recipes import RECIPES
from analysis_lib import AnalysisError, LoadedModel, load_corpus, load_model, measure, models
from analysis_lib.capture.projections import key_projection
from analysis_lib.corpora import Corpus, hub
from analysis_lib.models import TOKEN_TYPES, names
from analysis_lib.models.loaded import LONGEST_TEXT
from analysis_lib.models.names import MODELS, ModelName

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A tiny BERT to spoil."""
    return Path(shutil.copytree(tiny_folder("bert"), tmp_path / "spoilt"))


@pytest.fixture
def offline_cache(tmp_path, monkeypatch) -> Path:
    """An empty hub cache, and no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    return cache


def cached(
    cache: Path, repository: str, source: Path, commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Lay ``source`` into a hub cache as the snapshot of a model."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    return Path(shutil.copytree(source, home / "snapshots" / commit))


def refused(folder: Path | str, *words: str) -> str:
    """The one line that ``load_model`` refuses ``folder`` with; it holds ``words``."""
    with pytest.raises(AnalysisError) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


# --- Models that load -----------------------------------------------------------------------------


def test_the_bundled_model(minilm):
    ((stack, blocks),) = minilm.stacks.items()
    assert blocks == list(minilm.model.encoder.layer)
    assert stack.attention is not None
    assert (len(blocks), minilm.max_length) == (6, 512)
    assert minilm.kind == "text"
    assert minilm.model.dtype == torch.float32
    assert not minilm.model.training
    assert "sha256:b9a0018d" in minilm.revision


def test_dtype(minilm64):
    assert {parameter.dtype for parameter in minilm64.model.parameters()} == {torch.float64}
    with pytest.raises(AnalysisError, match="float16"):
        load_model("minilm", dtype="float8")


@pytest.mark.parametrize("name", tiny.EVERY_ARCHITECTURE)
def test_a_folder_of_every_architecture(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)))
    assert loaded.kind == tiny.kind(name)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    built, _ = tiny.build(name)
    stored = built.get_submodule(loaded.layout.part).state_dict()
    for weight, value in loaded.model.state_dict().items():
        torch.testing.assert_close(value, stored[weight], rtol=0, atol=0)
    # Every block is found once, and holds an attention with keys where the layout says so.
    found = [block for blocks in loaded.stacks.values() for block in blocks]
    assert len(found) == len(set(found))
    for stack, blocks in loaded.stacks.items():
        assert blocks
        for block in blocks:
            if stack.attention:
                assert (
                    block.get_submodule(stack.attention.module)
                    .get_submodule(stack.attention.key)
                    .weight.dim()
                    >= 2
                )


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_length_of_a_text_is_that_of_the_positions(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)))
    assert loaded.max_length == 160
    # The longest sequence that is read is read indeed, and one more position does not exist.
    ids = torch.full((1, 160), loaded.tokenizer.cls_token_id)
    assert loaded.model(input_ids=ids).last_hidden_state.shape == (1, 160, 24)
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(input_ids=torch.full((1, 161), loaded.tokenizer.cls_token_id))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(
            ("gpt2", 160),
            ("qwen3", 160),
            ("mpnet", 160),
            ("deberta-v3", 160),
            ("canine", 256),
            ("character_bert", 160),
        ),
        *(("manta", 128), ("byt5", LONGEST_TEXT), ("t5", LONGEST_TEXT)),
    ],
)
def test_the_length_of_a_text_in_other_architectures(name, length, tiny_folder):
    assert load_model(str(tiny_folder(name))).max_length == length


def types_of(loaded, *text) -> list[str]:
    found = loaded.tokenizer(*text, return_special_tokens_mask=True)
    ids, special = (torch.tensor([found[name]]) for name in ("input_ids", "special_tokens_mask"))
    return [TOKEN_TYPES[i] for i in loaded.token_types(ids, special.bool())[0]]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_token_types(name, tiny_folder):
    loaded = load_model(str(tiny_folder(name)))
    ids = loaded.tokenizer("Attention, attention. Hi!")["input_ids"]
    found = types_of(loaded, "Attention, attention. Hi!")
    tokens = loaded.tokenizer.convert_ids_to_tokens(ids)
    assert found[0] == "cls"
    assert found[-1] == "sep"
    assert found.count("punct") == 2
    assert {token for token, kind in zip(tokens, found, strict=True) if kind == "punct"} == {
        ",",
        ".",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Nothing around a text; a token before it (and a space); one after it; [CLS] and [SEP] as
        # code points or words.
        ("gpt2", "first other punct other"),
        ("llama", "cls other other other punct other"),
        ("t5", "first other other punct other sep"),
        ("byt5", "first other punct other sep"),
        ("canine", "cls other other punct other sep"),
        ("character_bert", "cls other punct other sep"),
    ],
)
def test_token_types_of_other_tokenizers(name, expected, tiny_folder):
    loaded = load_model(str(tiny_folder(name)))
    assert " ".join(types_of(loaded, "ab,c")) == expected


def test_token_types_of_the_bundled_vocabulary(minilm):
    vocabulary = minilm.tokenizer.get_vocab()
    ids = torch.tensor([list(vocabulary.values())])
    types = minilm.token_types(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    words = {token: TOKEN_TYPES[kind] for token, kind in zip(vocabulary, types, strict=True)}
    assert {token for token, kind in words.items() if kind == "cls"} == {"[CLS]"}
    assert {token for token, kind in words.items() if kind == "sep"} == {"[SEP]"}
    punctuation = {token for token, kind in words.items() if kind == "punct"}
    assert {",", "."} <= punctuation
    assert punctuation <= set(",.，．、。،।")
    assert {
        words[token] for token in ("!", "?", ";", "...", "the", "[MASK]") if token in words
    } == {"other"}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *(
            ("bert", 2),
            ("distilbert", 2),
            ("mpnet", 2),
            ("deberta", 2),
            ("deberta-v3", 2),
            ("modernbert-biases", 2),
        ),
        *(
            ("gpt2", 2),
            ("gpt_neox", 2),
            ("llama", 2),
            ("qwen2", 2),
            ("t5", 2),
            ("canine", 2),
            ("vit", 2),
        ),
    ],
)
def test_key_projection_gives_the_keys(name, heads, tiny_folder):
    """However an architecture stores it: alone, as the middle third, or between the query and value
    of each head.
    """
    loaded = load_model(str(tiny_folder(name)))
    stack, blocks = next(iter(loaded.stacks.items()))
    attention = blocks[-1].get_submodule(stack.attention.module)
    x = torch.randn(5, loaded.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weight, bias = key_projection(
        attention.get_submodule(stack.attention.key), stack.attention.fused, heads, heads
    )
    found = torch.einsum("hed,td->hte", weight, x) + (0 if bias is None else bias.unsqueeze(1))
    projected = attention.get_submodule(stack.attention.key)(x)
    fused = stack.attention.fused
    if fused == "by_head":
        projected = projected.view(5, heads, 3, -1)[:, :, 1]
    elif fused == "stacked":
        projected = projected.view(5, 3, heads, -1)[:, 1]
    else:
        projected = projected.view(5, heads, -1)
    torch.testing.assert_close(found, projected.transpose(0, 1))


def test_revision_tells_weights_apart(folder, tiny_folder):
    before = load_model(str(folder)).revision
    assert before == load_model(str(tiny_folder("bert"))).revision
    assert models.weights_identity(str(folder)) == before
    edit_weights(folder, lambda weights: weights["embeddings.LayerNorm.bias"].add_(1e-3))
    assert load_model(str(folder)).revision != before
    assert models.weights_identity(str(folder)) != before


def test_a_checkpoint_of_a_language_model_loads_without_pooler(tmp_path):
    model, words = tiny.build("bert")
    whole = transformers.BertForMaskedLM(model.config)
    whole.bert.load_state_dict(model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    ((_, blocks),) = loaded.stacks.items()
    torch.testing.assert_close(
        blocks[2].output.dense.weight, model.encoder.layer[2].output.dense.weight
    )


def test_known_models_are_described():
    described = models.known_models()
    assert set(described) == {*MODELS, *RECIPES, "multiberts-seed_S-step_Tk"}
    assert all(described.values())
    for name, known in MODELS.items():
        if known.repository:
            assert known.repository in described[name]
            assert ("no pinned revision" in described[name]) == (known.revision is None)
            assert known.revision is None or re.fullmatch("[0-9a-f]{40}", known.revision)


# --- Untrained twins ------------------------------------------------------------------------------


def test_an_untrained_twin_has_the_same_shape_and_the_weights_of_its_seed(minilm):
    state = torch.get_rng_state()
    twin = load_model("minilm:untrained")
    assert torch.equal(torch.get_rng_state(), state)
    assert twin.name == "minilm:untrained"
    assert twin.revision == f"untrained, seed 0, of {minilm.revision}"
    assert twin.files == {}
    weights, trained = twin.model.state_dict(), minilm.model.state_dict()
    assert {name: value.shape for name, value in weights.items()} == {
        n: v.shape for n, v in trained.items()
    }
    key = "encoder.layer.3.attention.self.key.weight"
    assert not torch.allclose(weights[key], trained[key])
    # As training would start: a normal law of this spread, and norms that do nothing yet.
    assert weights[key].std().item() == pytest.approx(
        minilm.model.config.initializer_range, rel=0.02
    )
    assert weights["embeddings.LayerNorm.weight"].eq(1).all()
    assert twin.tokenizer("A cone.")["input_ids"] == minilm.tokenizer("A cone.")["input_ids"]
    torch.manual_seed(1)
    again = load_model("minilm:untrained", dtype="float64").model.state_dict()
    assert all(torch.equal(value.double(), again[name].double()) for name, value in weights.items())
    assert again[key].dtype == torch.float64
    assert models.weights_identity("minilm:untrained") == models.weights_identity("minilm")


@pytest.mark.parametrize(
    "name", ["bert", "llama", "t5", "canine", "whisper", "vit", "resnet-basic", "manta"]
)
def test_an_untrained_twin_of_a_folder(name, tiny_folder, tmp_path):
    trained = load_model(str(tiny_folder(name)))
    # It needs no weights.
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / "bare"))
    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors")
    twin = load_model(f"{folder}:untrained")
    assert twin.layout == trained.layout
    assert type(twin.processor) is type(trained.processor)
    weights, others = twin.model.state_dict(), trained.model.state_dict()
    assert {key: value.shape for key, value in weights.items()} == {
        key: value.shape for key, value in others.items()
    }
    assert all(value.isfinite().all() for value in weights.values())
    assert not all(torch.equal(value, others[key]) for key, value in weights.items())


def test_what_is_no_model_has_no_untrained_twin(offline_cache):
    refused("minilmm:untrained", "did you mean minilm")
    refused(":untrained", "is no model")


# --- The hub, from its cache ----------------------------------------------------------------------


def test_a_hub_model_from_the_cache(offline_cache, tiny_folder):
    cached(offline_cache, "someone/tiny-bert", tiny_folder("bert"))
    loaded = load_model("someone/tiny-bert")
    assert loaded.revision == f"someone/tiny-bert@{COMMIT}"
    assert loaded.model.config.hidden_size == 24
    assert load_model("someone/tiny-bert", COMMIT).revision == loaded.revision


def test_an_alias_reads_its_pinned_commit(offline_cache, tiny_folder):
    known = MODELS["bert-base-uncased"]
    other = "f" * 40
    cached(offline_cache, known.repository, tiny_folder("roberta"), commit=other)
    message = refused("bert-base-uncased", "not in the local cache")
    assert known.repository in message
    cached(
        offline_cache, known.repository, tiny_folder("bert"), commit=known.revision, ref="pinned"
    )
    assert load_model("bert-base-uncased").revision == f"{known.repository}@{known.revision}"


def test_the_multiberts_are_known_by_name(offline_cache, tiny_folder):
    assert len(names.MULTIBERTS) == 5 * 29
    assert all(
        known.pickled and known.repository == f"google/{name}"
        for name, known in names.MULTIBERTS.items()
    )
    name = "multiberts-seed_4-step_2000k"
    refused(name, f"google/{name} is not in the local cache")
    cached(offline_cache, f"google/{name}", tiny_folder("bert"))
    assert load_model(name).revision == f"google/{name}@{COMMIT}"
    assert models.weights_identity(name) == f"google/{name}@{COMMIT}"
    assert load_model(f"{name}:untrained").revision.endswith(COMMIT)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("multiberts-seed_0-step_30k", "multiberts-seed_0-step_300k"),
        ("multiberts-seed_5-step_20k", "multiberts-seed_4-step_20k"),
        ("multiberts-seed-0-step-20k", "multiberts-seed_0-step_2"),
        ("multiberts-seed_T-step_Sk", "did you mean"),
        ("multiberts", "known names: albert-base"),
    ],
)
def test_a_multibert_that_was_not_published(offline_cache, name, near):
    assert len(refused(name, near)) < 2000


def test_offline_says_what_to_do(offline_cache):
    refused(
        "someone/unknown",
        "someone/unknown is not in the local cache",
        "cannot be reached",
        "connect once",
        "local folder",
    )


def test_a_hub_that_fails_half_way_is_one_line(offline_cache, monkeypatch):
    """Reachable, it seems, but no request goes through: nothing listens at the port."""
    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("someone/unknown", "someone/unknown")


@pytest.mark.parametrize(
    "text",
    ["a b/c", "owner/name/more", "owner//name", "", "  ", "./nothing", "/no/such/folder", "~x"],
)
def test_what_cannot_be_a_name(offline_cache, text):
    refused(text)


def test_unknown_names_get_the_nearest(offline_cache):
    refused("minilmm", "minilmm", "did you mean minilm?")
    refused("bert-base-uncase", "did you mean bert-base-uncased")


# --- Folders that are no model --------------------------------------------------------------------


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json", str(folder))


@pytest.mark.parametrize("text", ["{not json", "[]", "", '"bert"', "\x00"])
def test_a_config_that_is_no_config(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", "cannot be read")


def test_a_config_in_another_encoding(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    refused(folder, "config.json", "cannot be read")


@pytest.mark.parametrize("model_type", [None, "", "no-such-model", 7])
def test_a_model_that_is_no_transformer(folder, model_type):
    edit(folder, model_type=model_type)
    refused(folder, "is of no type that transformers knows", "give another model")


def test_a_model_that_transformers_has_only_with_a_head(folder):
    config = transformers.AutoConfig.for_model("clvp_encoder")
    (folder / "config.json").write_text(config.to_json_string())
    refused(folder, "a clvp_encoder model", "none without a head")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 5},
        {"num_hidden_layers": -1},
        {"hidden_act": "none such"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_with_impossible_values(folder, changes):
    edit(folder, **changes)
    refused(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors weights", "save_pretrained")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"]
)
@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_cut_short_is_named(folder, name, size):
    (folder / name).write_bytes((folder / name).read_bytes()[:size])
    refused(folder, f"{folder / name} cannot be read", "again")


@pytest.mark.parametrize("content", ["{}", "[]", "\0"])
def test_a_tokenizer_that_is_none_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content)
    refused(folder, f"{folder / 'tokenizer.json'} cannot be read")


def test_an_index_without_its_shard(folder):
    shard, index = "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"
    weights = {
        "embeddings.word_embeddings.weight": shard,
        "encoder.layer.0.output.dense.weight": "model-00002.safetensors",
    }
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (folder / "model.safetensors").rename(folder / shard)
    refused(folder, f"{index} names model-00002.safetensors", "not there")
    (folder / shard).unlink()
    refused(folder, f"{index} names {shard}", "not there")


def test_missing_weights(folder):
    edit_weights(folder, lambda weights: weights.pop("encoder.layer.1.attention.self.key.weight"))
    refused(folder, "encoder.layer.1.attention.self.key.weight", "config.json")


def test_more_layers_than_weights(folder):
    edit(folder, num_hidden_layers=4)
    refused(folder, "encoder.layer.3", "config.json")


def test_weights_of_another_shape(folder):
    edit(folder, intermediate_size=48)
    refused(folder)


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("encoder.layer.1.attention.self.query.weight", "layer 2"),
        ("encoder.layer.2.output.LayerNorm.bias", "layer 3"),
        ("embeddings.word_embeddings.weight", "embeddings"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, weight, where, bad):
    def spoil(weights):
        weights[weight].view(-1)[3] = bad

    edit_weights(folder, spoil)
    refused(folder, weight, where, "NaN")


def test_not_finite_layer_in_another_architecture(tiny_folder, tmp_path):
    folder = Path(shutil.copytree(tiny_folder("distilbert"), tmp_path / "spoilt"))

    def spoil(weights):
        weights["transformer.layer.1.attention.k_lin.weight"][0, 0] = float("nan")

    edit_weights(folder, spoil)
    refused(folder, "layer 2")


def test_not_finite_in_this_process_too():
    model, words = tiny.build("bert")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] = float("nan")
    with pytest.raises(AnalysisError, match="layer 1"):
        LoadedModel("by hand", "seed 0", model, words)


def test_large_weights_whose_sum_is_not_finite_are():
    model, words = tiny.build("bert")
    weight = model.half().encoder.layer[0].output.dense.weight
    torch.nn.init.constant_(weight, 1e4)
    assert weight.sum().isinf()
    LoadedModel("by hand", "seed 0", model, words)


def test_no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(folder, "no tokenizer", "save_pretrained")


@pytest.mark.parametrize(
    ("name", "items"), [("vit", "images"), ("wav2vec2", "audios"), ("resnet-basic", "images")]
)
def test_no_processor(name, items, tiny_folder, tmp_path):
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / "spoilt"))
    (folder / "preprocessor_config.json").unlink()
    refused(folder, "preprocessor_config.json", items, "save_pretrained")


def test_no_block_at_all(folder):
    edit(folder, num_hidden_layers=0)
    edit_weights(
        folder, lambda weights: [weights.pop(key) for key in list(weights) if "layer." in key]
    )
    refused(folder, "no transformer block")


def test_a_tokenizer_larger_than_the_embeddings(folder):
    words = tiny.tokenizer("wordpiece")
    words.add_tokens([f"more{i}" for i in range(10)])
    words.save_pretrained(folder)
    refused(folder, "tokenizer", "embeddings")


# --- Corpora of the hub share the cache -----------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "near"), [("stsb:dev", "nyu-mll/glue"), ("wikitext-103:test", "Salesforce/wikitext")]
)
def test_a_hub_corpus_offline_says_what_to_do(offline_cache, spec, near):
    with pytest.raises(AnalysisError, match=f"{near} is not in the local cache.*connect once"):
        load_corpus(spec)


def test_weights_that_do_not_fit_say_which_and_how(folder):
    edit(folder, intermediate_size=48)
    refused(folder, "intermediate.dense", "(32,", "(48,", "config.json")


def test_more_layers_in_the_weights_than_in_the_config(folder):
    edit(folder, num_hidden_layers=2)
    refused(folder, "encoder.layer.2.", "no place")


def test_relative_positions_are_refused(folder):
    edit(folder, position_embedding_type="relative_key")
    refused(folder, "relative_key", "no longer computes", "bert")


@pytest.mark.parametrize("device", ["cuda:7", "warp", "meta"])
def test_a_device_that_is_not_there(folder, device):
    with pytest.raises(
        AnalysisError, match=f"device {device!r} cannot be used here: give one of cpu"
    ):
        load_model(str(folder), device=device)


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "a\0b"])
def test_a_name_that_is_none(name):
    with pytest.raises(AnalysisError, match="give a name of `models`"):
        load_model(name)


def test_models_load_in_threads_and_leave_transformers_whole(tiny_folder):
    """As in a Dask worker: a model with tied weights, loaded by several threads, then once more."""
    name = str(tiny_folder("t5"))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load_model, [name] * 12))
    loaded.append(load_model(name))
    for model in loaded:
        assert model.model.encoder.embed_tokens.weight is model.model.shared.weight


def test_constants_of_old_checkpoints_are_passed_over(tmp_path):
    folder = tiny.save(tmp_path, "gpt2")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load_model(str(folder)).kind == "text"
    weights["h.0.attn.strange"] = torch.ones(2)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AnalysisError, match=r"h\.0\.attn\.strange"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_a_folder_with_an_encoder_alone_is_measured_as_such(name, tiny_folder, tmp_path):
    """The encoder gives what it gives in the whole model."""
    whole = load_model(str(tiny_folder(name)))
    encoder = getattr(transformers, f"{name.upper()}EncoderModel")
    encoder.from_pretrained(tiny_folder(name)).save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    alone = load_model(str(tmp_path))
    assert [stack.name for stack in alone.stacks] == ["encoder"]
    corpus = Corpus("texts", list(tiny.TEXTS))
    tables = [measure(model, corpus, "anisotropy", progress=False) for model in (whole, alone)]
    both, one = (table["anisotropy"] for table in tables)
    pd.testing.assert_frame_equal(
        one, both[both["layer"] <= one["layer"].max()].reset_index(drop=True)
    )
    assert load_model(f"{tmp_path}:untrained").stacks.keys() == alone.stacks.keys()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("minilm", ModelName("minilm")),
        ("digits-vit@steps=50@seed=1", ModelName("digits-vit@steps=50@seed=1")),
        ("owner/base+owner/legal", ModelName("owner/base", adapter="owner/legal")),
        ("+legal", ModelName("+legal")),
        ("clip@part=vision_model", ModelName("clip", part="vision_model")),
        ("minilm:untrained", ModelName("minilm", untrained=True)),
        ("minilm:untrained@seed=0", ModelName("minilm", untrained=True, seed=0)),
        ("minilm@dtype=bfloat16", ModelName("minilm", dtype="bfloat16")),
        ("minilm@dtype=", ModelName("minilm@dtype=")),
        (
            "bert@steps=5+a/b@part=encoder:untrained@seed=3@dtype=float16",
            ModelName("bert@steps=5", "a/b", "encoder", True, 3, "float16"),
        ),
    ],
)
def test_a_name_and_its_parts(text, name):
    assert ModelName.parse(text) == name
    assert str(name) == text


def test_a_folder_may_have_a_plus_in_its_name(tmp_path):
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert ModelName.parse(f"{folder}:untrained") == ModelName(str(folder), untrained=True)


def test_a_part_is_named_once():
    with pytest.raises(AnalysisError, match="give one of them"):
        load_model("minilm@part=encoder", part="embeddings")
