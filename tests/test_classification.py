"""Classifiers of texts: what they learn, that they go on where they were, and what they refuse."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy import stats

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.corpora.loading import Pair
from analysis_lib.models import devices
from analysis_lib.models.architectures import (
    CharacterBertTokenizer,
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)
from analysis_lib.models.architectures.self_attention import mean_normalised_entropy
from analysis_lib.models.tokenization import token_ids
from analysis_lib.training import classification
from analysis_lib.training.classification import accuracy, finetune, predict, self_attention
from analysis_lib.training.wordpiece import word_pieces
from tests import tiny

GOOD = ("a warm and lovely film", "lovely from start to end", "warm , funny and lovely", "a funny , warm thing")
BAD = ("a dull and tired film", "tired from start to end", "dull , loud and tired", "a loud , dull thing")
QUICK = {"epochs": 12, "patience": 4, "batch": 4, "learning_rate": 1e-2}
SMALL = {"vocabulary": 80, "block": {"hidden_size": 16}}


def table(path, texts, labels, columns=("text",)):
    rows = [dict(zip(columns, [text] if isinstance(text, str) else text, strict=True)) for text in texts]
    pd.DataFrame(rows).assign(label=labels).to_csv(path, index=False)
    return load_corpus(f"{path}:{','.join(columns)}:label")


@pytest.fixture
def reviews(tmp_path):
    return table(tmp_path / "reviews.csv", GOOD + BAD, ["fresh"] * 4 + ["rotten"] * 4)


@pytest.fixture
def encoder(tmp_path):
    """A small BERT as it is before training."""
    tokenizer = word_pieces(GOOD + BAD, 80)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(
        tmp_path / "bert"
    )
    tokenizer.save_pretrained(tmp_path / "bert")
    return load_model(str(tmp_path / "bert"))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_self_attention_learns_what_is_there_to_learn(reviews, tmp_path):
    folder = self_attention(reviews, reviews, tmp_path / "out", **SMALL, **QUICK)
    predictions = predict(folder, reviews)
    assert (predictions["label"] == predictions["predicted"]).all()
    assert accuracy(predictions)["accuracy"] == 1
    log = pd.read_csv(folder / "epochs.csv")
    assert log["loss"].iloc[-1] < log["loss"].iloc[0] / 2


def test_finetuning_learns_and_leaves_the_encoder_alone(encoder, reviews, tmp_path):
    before = {name: value.clone() for name, value in encoder.model.state_dict().items()}
    slower = {"epochs": 40, "patience": 40, "learning_rate": 1e-3}
    folder = finetune(encoder, reviews, reviews, tmp_path / "out", **{**QUICK, **slower})
    loss = pd.read_csv(folder / "epochs.csv")["loss"]
    assert loss.iloc[-1] < loss.iloc[0] / 2
    assert accuracy(predict(folder, reviews))["accuracy"] == 1
    assert all(torch.equal(value, before[name]) for name, value in encoder.model.state_dict().items())
    tuned = load_model(str(folder))
    assert not torch.equal(tuned.model.get_input_embeddings().weight, encoder.model.get_input_embeddings().weight)


def test_finetuning_starts_from_the_encoder(encoder, reviews, tmp_path):
    folder = finetune(encoder, reviews, reviews, tmp_path / "out", **{**QUICK, "epochs": 1, "learning_rate": 1e-12})
    tuned = load_model(str(folder)).model.state_dict()
    for name, value in encoder.model.state_dict().items():
        assert torch.allclose(tuned[name], value, atol=1e-9), name


def test_the_same_seed_gives_the_same_weights(reviews, tmp_path):
    settings = {**SMALL, **QUICK, "epochs": 2}
    one, two, other = (
        self_attention(reviews, reviews, tmp_path / name, **settings, seed=seed)
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert weights(one) == weights(two)
    assert weights(one) != weights(other)


def test_an_interrupted_training_goes_on_and_ends_the_same(reviews, tmp_path, monkeypatch):
    settings = {**SMALL, **QUICK, "epochs": 5, "patience": 5}
    whole = self_attention(reviews, reviews, tmp_path / "whole", **settings)
    epoch, epochs = classification._Training._epoch, itertools.count(1)

    def interrupted(training):
        if next(epochs) == 3:
            raise KeyboardInterrupt
        return epoch(training)

    monkeypatch.setattr(classification._Training, "_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        self_attention(reviews, reviews, tmp_path / "part", **settings)
    assert not (tmp_path / "part" / "model.safetensors").exists()
    part = self_attention(reviews, reviews, tmp_path / "part", **settings)
    assert weights(part) == weights(whole)
    assert (part / "epochs.csv").read_text() == (whole / "epochs.csv").read_text()


class Killed(BaseException):
    """Nothing in the library catches it."""


def killed_at(monkeypatch, method, call):
    """From its ``call``-th call on, a method of ``Path`` kills the process; a list that grows by one a call."""
    calls, real = [], getattr(Path, method)

    def stop(path, *arguments, **named):
        calls.append(path)
        if len(calls) >= call:
            raise Killed
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, method, stop)
    return calls


@pytest.mark.parametrize("method", ["rename", "rmdir", "unlink"])
def test_a_process_killed_while_it_writes_the_classifier_goes_on(reviews, tmp_path, monkeypatch, method):
    settings = {**SMALL, **QUICK, "epochs": 1}
    with monkeypatch.context() as patch:
        steps = killed_at(patch, method, math.inf)
        whole = self_attention(reviews, reviews, tmp_path / "whole", **settings)
    names = sorted(path.name for path in whole.iterdir())
    # The state, each file of the classifier and its description are renamed; there is one folder and one state.
    assert len(steps) == (len(names) if method == "rename" else 1)
    for step in range(1, len(steps) + 1):
        folder = tmp_path / f"killed at {step}"
        with monkeypatch.context() as patch:
            killed_at(patch, method, step)
            with pytest.raises(Killed):
                self_attention(reviews, reviews, folder, **settings)
        self_attention(reviews, reviews, folder, **settings)
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_same_texts_with_other_names_of_their_classes_are_another_classifier(reviews, monkeypatch, tmp_path):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    renamed = dataclasses.replace(reviews, classes=[name.upper() for name in reviews.classes])
    folders = [self_attention(corpus, corpus, **SMALL, **{**QUICK, "epochs": 1}) for corpus in (reviews, renamed)]
    assert folders[0] != folders[1]
    for folder, corpus in zip(folders, (reviews, renamed), strict=True):
        assert set(predict(folder, corpus)["predicted"]) <= set(corpus.classes)
    with pytest.raises(AnalysisError, match="other classes: give another folder"):
        self_attention(renamed, renamed, folders[0], **SMALL, **{**QUICK, "epochs": 1})


def test_an_unfinished_training_with_other_settings_is_refused(reviews, tmp_path, monkeypatch):
    settings = {**SMALL, **QUICK, "epochs": 2}
    with monkeypatch.context() as patch:
        killed_at(patch, "rename", 2)
        with pytest.raises(Killed):
            self_attention(reviews, reviews, tmp_path / "out", **settings)
    with pytest.raises(AnalysisError, match="other settings: give another folder"):
        self_attention(reviews, reviews, tmp_path / "out", **{**settings, "learning_rate": 1e-4})
    self_attention(reviews, reviews, tmp_path / "out", **settings)


def test_training_stops_after_epochs_without_gain_and_keeps_the_best(reviews, tmp_path, monkeypatch):
    rights = iter([0.5, 0.75, 0.5, 0.25, 0.75, 1.0])
    states = []

    def predicted(model, texts):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        right = int(next(rights) * len(texts.labels))
        return torch.where(torch.arange(len(texts.labels)) < right, texts.labels, 1 - texts.labels)

    monkeypatch.setattr(classification, "predict_encoded", predicted)
    folder = self_attention(reviews, reviews, tmp_path / "out", **SMALL, **{**QUICK, "patience": 3})
    assert pd.read_csv(folder / "epochs.csv")["accuracy"].tolist() == [0.5, 0.75, 0.5, 0.25, 0.75]
    kept = transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in states[1].items())


def test_a_trained_classifier_is_not_trained_again_and_other_settings_are_refused(reviews, tmp_path, monkeypatch):
    settings = {**SMALL, **QUICK, "epochs": 1}
    folder = self_attention(reviews, reviews, tmp_path / "out", **settings)
    monkeypatch.setattr(classification, "_Training", None)
    assert self_attention(reviews, reviews, tmp_path / "out", **settings) == folder
    with pytest.raises(AnalysisError, match="another folder"):
        self_attention(reviews, reviews, tmp_path / "out", **{**settings, "epochs": 2})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(AnalysisError, match=r"thesis\.tex"):
        self_attention(reviews, reviews, tmp_path / "full", **settings)


# --- Devices --------------------------------------------------------------------------------------


def test_without_a_device_it_is_the_one_there_is(encoder, reviews, tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, told in (("told", {"device": device}), ("untold", {})):
        folder = self_attention(reviews, reviews, tmp_path / name, **SMALL, **QUICK, **told)
        found = json.loads((folder / classification.DESCRIPTION).read_text())
        assert found.get("device", "cpu") == device
        assert accuracy(predict(folder, reviews, **told))["accuracy"] == 1
        finetune(encoder, reviews, reviews, tmp_path / f"finetuned {name}", **{**QUICK, "epochs": 1}, **told)


@pytest.mark.parametrize("device", ["warp", "meta"])
def test_a_device_that_cannot_be_used(encoder, reviews, tmp_path, device):
    words = f"the device {device} cannot be used here: give one of cpu"
    with pytest.raises(AnalysisError, match=words):
        self_attention(reviews, reviews, tmp_path / "out", device=device, **SMALL, **QUICK)
    with pytest.raises(AnalysisError, match=words):
        finetune(encoder, reviews, reviews, tmp_path / "out", device=device, **QUICK)
    with pytest.raises(AnalysisError, match=words):
        predict(tmp_path / "out", reviews, device=device)
    assert not (tmp_path / "out").exists()


def test_another_device_makes_another_classifier(reviews, tmp_path, monkeypatch):
    tellings = []

    def training(_folder, told, *_):
        tellings.append(told)
        return SimpleNamespace(go=lambda: None)

    monkeypatch.setattr(classification, "_Training", training)
    monkeypatch.setattr(devices, "usable", lambda device: device)
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    settings = {**SMALL, **QUICK}
    folders = [self_attention(reviews, reviews, device=device, **settings) for device in ("cpu", "meta", "meta:1")]
    assert folders[0] != folders[1] == folders[2]
    assert tellings[1] == tellings[2] == {**tellings[0], "device": "meta"}


def test_a_classifier_of_another_device_is_refused(reviews, tmp_path):
    settings = {**SMALL, **QUICK, "epochs": 1, "device": "cpu"}
    folder = self_attention(reviews, reviews, tmp_path / "out", **settings)
    description = folder / classification.DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), "device": "cuda"}))
    with pytest.raises(AnalysisError, match="other device: give another folder"):
        self_attention(reviews, reviews, folder, **settings)


def test_what_a_model_reads_is_brought_to_its_device(reviews):
    inputs = classification.encode(reviews, word_pieces(GOOD + BAD, 80), 64).inputs(torch.tensor([0, 5]), "meta")
    assert {name: part.device.type for name, part in inputs.items()} == {"input_ids": "meta", "attention_mask": "meta"}


# --- The block ------------------------------------------------------------------------------------


def test_the_block_is_equations_1_and_2_residual_and_norm():
    torch.manual_seed(0)
    config = SelfAttentionConfig(vocab_size=11, hidden_size=6, initializer_range=0.7, embedding_std=1.0, num_labels=2)
    model = SelfAttentionForSequenceClassification(config).double().eval()
    block = model.encoder.layers[0]
    torch.nn.init.normal_(block.attention.key.bias)
    ids = [3, 7, 7, 2]
    x = model.encoder.word_embeddings.weight.detach().numpy()[ids]
    q, k, v = (
        x @ part.weight.detach().numpy().T + part.bias.detach().numpy()
        for part in (block.attention.query, block.attention.key, block.attention.value)
    )
    y = np.zeros_like(x)
    for i in range(4):
        scores = np.array([math.exp(q[i] @ k[j] / math.sqrt(6)) for j in range(4)])
        y[i] = sum(scores[j] / scores.sum() * v[j] for j in range(4))
    total = x + y
    normed = (total - total.mean(1, keepdims=True)) / np.sqrt(total.var(1, keepdims=True) + 1e-12)
    logits = normed[0] @ model.classifier.weight.detach().numpy().T + model.classifier.bias.detach().numpy()
    # Padding after the text changes nothing.
    padded, mask = torch.tensor([[*ids, 0, 0]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    found = model(padded, mask)
    assert np.allclose(found.logits.detach().numpy(), logits, atol=1e-12)


def test_the_entropy_of_the_loss_is_scipys():
    torch.manual_seed(1)
    settings = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "initializer_range": 1.5, "num_labels": 2}
    model = SelfAttentionForSequenceClassification(SelfAttentionConfig(**settings, entropy_weight=0.3)).double().eval()
    ids, mask = torch.tensor([[3, 4, 5, 6], [7, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    weights = [layer.detach().numpy() for layer in model.encoder(ids, mask).attentions]
    rows = [
        stats.entropy(layer[text, 0, query, :keys], base=keys)
        for layer in weights
        for text, keys in ((0, 4), (1, 2))
        for query in range(keys)
    ]
    found = model(ids, mask, torch.tensor([0, 1]))
    assert found.entropy.item() == pytest.approx(np.mean(rows), abs=1e-12)
    cross = torch.nn.functional.cross_entropy(found.logits, torch.tensor([0, 1]))
    assert found.loss.item() == pytest.approx(cross.item() + 0.3 * np.mean(rows), abs=1e-12)


def test_a_text_of_one_token_has_no_entropy():
    weights = torch.ones(1, 2, 1, 2, 2) / 2
    weights[0, 1, 0] = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert mean_normalised_entropy(weights, torch.tensor([[1, 1], [1, 0]])).item() == pytest.approx(1)


def test_padding_has_no_part_in_the_gradient_of_the_entropy():
    torch.manual_seed(4)
    settings = {"vocab_size": 9, "hidden_size": 6, "num_labels": 2, "entropy_weight": 0.7}
    model = SelfAttentionForSequenceClassification(SelfAttentionConfig(**settings)).double()
    texts, labels = [torch.tensor([2, 5, 6, 7, 3]), torch.tensor([2, 8, 3])], torch.tensor([0, 1])

    def gradients(batches):
        model.zero_grad()
        for ids, chosen in batches:
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            output = model(padded, (padded > 0).long(), torch.tensor(chosen))
            # Of the mean over rows, what belongs to these texts.
            rows = sum(map(len, ids)) / sum(map(len, texts))
            (0.7 * output.entropy * rows).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    together = gradients([(texts, labels.tolist())])
    assert together.isfinite().all()
    assert together.abs().max() > 0
    alone = gradients([([texts[0]], [0]), ([texts[1]], [1])])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_the_weight_lowers_the_entropy(reviews, tmp_path):
    found = []
    for weight in (0.0, 1.0):
        block = {"hidden_size": 16, "entropy_weight": weight}
        settings = {**QUICK, "epochs": 20, "patience": 20}
        folder = self_attention(reviews, reviews, tmp_path / str(weight), vocabulary=80, block=block, **settings)
        tables = measure(load_model(str(folder)), reviews, "attention_entropy", progress=False)
        found.append(tables["attention_entropy"]["entropy_normalised"].mean())
    assert found[1] < found[0]


def test_measure_gives_equation_3_on_a_saved_classifier(reviews, tmp_path):
    folder = self_attention(reviews, reviews, tmp_path / "out", layers=2, **SMALL, **{**QUICK, "epochs": 2})
    tables = measure(load_model(str(folder), dtype="float64"), reviews, "utterance_similarity", progress=False)
    found = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    seen = {("key", 1): [], ("key", 2): [], ("value", 1): [], ("value", 2): []}
    for (space, layer), vectors in seen.items():
        part = getattr(model.encoder.layers[layer - 1].attention, space)
        part.register_forward_hook(lambda _module, _args, output, kept=vectors: kept.append(output[0].detach()))
    for text in reviews.items:
        model(**tokenizer(text, return_tensors="pt"))
    for key, vectors in seen.items():
        similarities = []
        for rows in vectors:
            cosines = [
                float(rows[i] @ rows[j] / (rows[i].norm() * rows[j].norm()))
                for i in range(len(rows))
                for j in range(i + 1, len(rows))
            ]
            similarities.append(2 / (len(rows) * (len(rows) - 1)) * sum(cosines))
        assert found[key] == pytest.approx(np.mean(similarities), abs=1e-9)


# --- Pairs, and bad input -------------------------------------------------------------------------


def test_a_pair_is_read_as_the_tokenizer_reads_it(tmp_path):
    pairs = table(tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two"))
    tokenizer = word_pieces(GOOD + BAD, 80)
    encoded = classification.encode(pairs, tokenizer, 64)
    assert [ids.tolist() for ids in encoded.ids] == tokenizer(list(GOOD), list(BAD))["input_ids"]
    cut = classification.encode(pairs, tokenizer, 9)
    assert {len(ids) for ids in cut.ids} == {9}
    assert {int(ids[-1]) for ids in cut.ids} == {tokenizer.sep_token_id}


def test_a_tokenizer_that_knows_no_pairs_puts_its_separator():
    tokenizer = tiny.tokenizer("wordpiece")
    bare = tokenizer(["film", "dull"], add_special_tokens=False)["input_ids"]
    assert token_ids(tokenizer, [Pair("film", "dull")]) == [[*bare[0], tokenizer.sep_token_id, *bare[1]]]


def test_a_pair_of_words_of_characters_has_the_separator_between():
    tokenizer = CharacterBertTokenizer()
    pairs = [Pair("A warm film", "dull, tired"), Pair("loud", "a thing")]
    words = [["a", "warm", "film", "[SEP]", "dull", ",", "tired"], ["loud", "[SEP]", "a", "thing"]]
    assert token_ids(tokenizer, pairs) == [[tokenizer.word_ids(word) for word in text] for text in words]


def test_measure_reads_pairs_of_words_of_characters(tmp_path):
    loaded = load_model(str(tiny.save(tmp_path / "model", "character_bert")), dtype="float64")
    pairs = table(tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two"))
    found = measure(loaded, pairs, "utterance_similarity", progress=False)["utterance_similarity"]
    words = [f"[CLS] {one} [SEP] {two} [SEP]".split() for one, two in zip(GOOD, BAD, strict=True)]
    similarities = []
    for text in words:
        ids = torch.tensor([[loaded.tokenizer.word_ids(word) for word in text]])
        with torch.no_grad():
            output = loaded.model(ids, torch.ones(ids.shape[:2], dtype=torch.long))
        rows = torch.nn.functional.normalize(output.last_hidden_state[0], dim=-1).numpy()
        similarities.append((rows @ rows.T)[np.triu_indices(len(rows), 1)].mean())
    last = found[found["space"] == "hidden"].iloc[-1]
    assert last["utterances"] == len(pairs)
    assert last["similarity"] == pytest.approx(np.mean(similarities), abs=1e-9)


@pytest.mark.parametrize("name", ["character_bert", "gpt2", "t5"])
def test_a_model_without_a_head_on_cls_is_not_finetuned(reviews, tmp_path, name):
    loaded = load_model(str(tiny.save(tmp_path / name, name)))
    with pytest.raises(AnalysisError, match=r"no head for classes on \[CLS\]: give an encoder"):
        finetune(loaded, reviews, reviews, tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_a_separator_refuses_pairs(tmp_path):
    tiny.save(tmp_path / "gpt2", "gpt2")
    pairs = table(tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two"))
    with pytest.raises(AnalysisError, match="no separator"):
        measure(load_model(str(tmp_path / "gpt2")), pairs, "anisotropy", progress=False)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["fresh"] * 8, "one class alone, fresh"),
        (["fresh"] * 7 + ["rotten"], "one example of the class rotten"),
    ],
)
def test_too_few_classes_are_refused(tmp_path, labels, words):
    corpus = table(tmp_path / "bad.csv", GOOD + BAD, labels)
    with pytest.raises(AnalysisError, match=words):
        self_attention(corpus, corpus, tmp_path / "out", **SMALL, **QUICK)
    assert not (tmp_path / "out").exists()


def test_classes_that_training_lacks_are_refused(reviews, tmp_path):
    more = table(tmp_path / "more.csv", GOOD + BAD, ["fresh"] * 4 + ["so-so"] * 4)
    with pytest.raises(AnalysisError, match="so-so, which"):
        self_attention(reviews, more, tmp_path / "out", **SMALL, **QUICK)
    folder = self_attention(reviews, reviews, tmp_path / "out", **SMALL, **{**QUICK, "epochs": 1})
    with pytest.raises(AnalysisError, match="so-so, unknown to the classifier"):
        predict(folder, more)


def test_texts_without_classes_are_refused(reviews, tmp_path):
    bare = load_corpus(f"{tmp_path / 'reviews.csv'}:text")
    with pytest.raises(AnalysisError, match=r"no classes: give texts with them, as in reviews\.csv:text:label"):
        self_attention(bare, reviews, tmp_path / "out", **SMALL, **QUICK)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": math.nan}, "learning rate is nan"),
        ({"block": {"width": 3}}, "a block has no width"),
        ({"layers": 0}, "layers 0"),
        ({"block": {"entropy_weight": -1}}, "no negative weight"),
        ({"vocabulary": 9}, "vocabulary of 9"),
        ({"learning_rate": 1e30}, "the loss is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(reviews, tmp_path, settings, words):
    with pytest.raises(AnalysisError, match=words):
        self_attention(reviews, reviews, tmp_path / "out", **{**SMALL, **QUICK, **settings})
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("text,label\ngood,a\n ,b\n", "example 2 has no text"),
        ("text,label\ngood,a\nbad,\n", "example 2 has no class"),
        ("one,two,label\na,b,x\nc,,y\n", "one side of pair 2 is empty"),
    ],
)
def test_gaps_in_labelled_data_are_refused(tmp_path, rows, words):
    (tmp_path / "gaps.csv").write_text(rows)
    columns = "one,two" if "one" in rows else "text"
    with pytest.raises(AnalysisError, match=words):
        load_corpus(f"{tmp_path / 'gaps.csv'}:{columns}:label")


def test_the_bundled_classes_are_balanced_and_the_splits_apart():
    for name, classes in (("reviews", 2), ("films", 3)):
        splits = [load_corpus(f"{name}:{split}") for split in ("train", "validation", "test")]
        for split in splits:
            assert len(split.classes) == classes
            assert len({split.labels.count(label) for label in range(classes)}) == 1
        seen = [set(split.items) for split in splits]
        assert not any(one & two for one, two in itertools.combinations(seen, 2))


def test_a_validation_split_that_lacks_a_class_is_scored_by_names(tmp_path):
    train = table(tmp_path / "train.csv", GOOD + BAD + ("one", "two"), ["c"] * 4 + ["a"] * 4 + ["b"] * 2)
    validation = table(tmp_path / "validation.csv", GOOD + BAD, ["c"] * 4 + ["a"] * 4)
    assert (list(train.classes), list(validation.classes)) == (["a", "b", "c"], ["a", "c"])
    folder = self_attention(train, validation, tmp_path / "out", **SMALL, **QUICK)
    best = pd.read_csv(folder / "epochs.csv")["accuracy"].max()
    found = accuracy(predict(folder, validation))["accuracy"]
    assert best == pytest.approx(found)
    assert found > 0.9
