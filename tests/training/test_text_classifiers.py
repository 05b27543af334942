"""Text classifiers: what they learn, that they resume, and what they refuse."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers

from analysis_book.architectures import CharacterBertTokenizer
from analysis_book.training import (
    accuracy,
    finetune,
    loop,
    predict,
    self_attention,
    text_classifiers,
)
from analysis_book.training.wordpiece import word_pieces
from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.corpora import Pair
from analysis_lib.models import devices
from analysis_lib.models.architectures import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)
from analysis_lib.models.tokenization import encoded

GOOD = (
    "a warm and lovely film",
    "lovely from start to end",
    "warm , funny and lovely",
    "a funny , warm thing",
)
BAD = (
    "a dull and tired film",
    "tired from start to end",
    "dull , loud and tired",
    "a loud , dull thing",
)
QUICK = {"epochs": 12, "patience": 4, "batch": 4, "learning_rate": 1e-2}
SMALL = {"vocabulary": 80, "block": {"hidden_size": 16}}


def table(path, texts, labels, columns=("text",)):
    rows = [
        dict(zip(columns, [text] if isinstance(text, str) else text, strict=True)) for text in texts
    ]
    pd.DataFrame(rows).assign(label=labels).to_csv(path, index=False)
    return load_corpus(f"{path}:{','.join(columns)}:label")


@pytest.fixture
def reviews(tmp_path):
    return table(tmp_path / "reviews.csv", GOOD + BAD, ["fresh"] * 4 + ["rotten"] * 4)


@pytest.fixture
def encoder(tmp_path):
    """A small BERT as it is before training."""
    tokenizer = word_pieces(GOOD + BAD, 80)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    ).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return load_model(str(tmp_path / "bert"))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


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
    assert all(
        torch.equal(value, before[name]) for name, value in encoder.model.state_dict().items()
    )
    tuned = load_model(str(folder))
    assert not torch.equal(
        tuned.model.get_input_embeddings().weight, encoder.model.get_input_embeddings().weight
    )


def test_finetuning_starts_from_the_encoder(encoder, reviews, tmp_path):
    folder = finetune(
        encoder,
        reviews,
        reviews,
        tmp_path / "out",
        **{**QUICK, "epochs": 1, "learning_rate": 1e-12},
    )
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


@pytest.fixture
def always_saved(monkeypatch):
    """The state is saved after every epoch."""
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_STATES", 0)


def test_an_interrupted_training_resumes_and_ends_the_same(
    reviews, tmp_path, monkeypatch, always_saved
):
    settings = {**SMALL, **QUICK, "epochs": 5, "patience": 5}
    whole = self_attention(reviews, reviews, tmp_path / "whole", **settings)
    batches, calls = text_classifiers.batches, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return batches(*arguments)

    monkeypatch.setattr(text_classifiers, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        self_attention(reviews, reviews, tmp_path / "part", **settings)
    assert not (tmp_path / "part" / "model.safetensors").exists()
    part = self_attention(reviews, reviews, tmp_path / "part", **settings)
    assert len(calls) == 3 + 3
    assert contents(part) == contents(whole)


class Killed(BaseException):
    """Nothing in the library catches it."""


def killed_at(monkeypatch, owner, method, call):
    """From its ``call``-th call on, a method kills the process; the list of the calls."""
    calls, real = [], getattr(owner, method)

    def stop(*arguments, **named):
        calls.append(arguments)
        if len(calls) >= call:
            raise Killed
        return real(*arguments, **named)

    monkeypatch.setattr(owner, method, stop)
    return calls


@pytest.mark.parametrize(
    ("owner", "method", "calls"),
    [
        # The description and its seal; state and table of the epoch; the table at the end.
        (os, "replace", 5),
        # The state at the end.
        (Path, "unlink", 1),
        # As it starts, the best and the last.
        (transformers.PreTrainedModel, "save_pretrained", 3),
        (transformers.PreTrainedTokenizerBase, "save_pretrained", 3),
    ],
)
def test_a_process_killed_while_it_writes_resumes(
    reviews, tmp_path, monkeypatch, always_saved, owner, method, calls
):
    settings = {**SMALL, **QUICK, "epochs": 1}
    with monkeypatch.context() as patch:
        seen = killed_at(patch, owner, method, math.inf)
        whole = self_attention(reviews, reviews, tmp_path / "whole", **settings)
    assert len(seen) == calls
    for call in range(1, calls + 1):
        folder = tmp_path / f"killed at {call}"
        with monkeypatch.context() as patch:
            killed_at(patch, owner, method, call)
            with pytest.raises(Killed):
                self_attention(reviews, reviews, folder, **settings)
        self_attention(reviews, reviews, folder, **settings)
        assert contents(folder) == contents(whole)


def test_the_same_texts_with_other_names_of_their_classes_are_another_classifier(
    reviews, monkeypatch, tmp_path
):
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    renamed = dataclasses.replace(reviews, classes=[name.upper() for name in reviews.classes])
    folders = [
        self_attention(corpus, corpus, **SMALL, **{**QUICK, "epochs": 1})
        for corpus in (reviews, renamed)
    ]
    assert folders[0] != folders[1]
    for folder, corpus in zip(folders, (reviews, renamed), strict=True):
        assert set(predict(folder, corpus)["predicted"]) <= set(corpus.classes)
    with pytest.raises(AnalysisError, match=r"a training whose classes is .*: give another folder"):
        self_attention(renamed, renamed, folders[0], **SMALL, **{**QUICK, "epochs": 1})


def test_an_unfinished_training_with_other_settings_is_refused(reviews, tmp_path, monkeypatch):
    settings = {**SMALL, **QUICK, "epochs": 2}
    with monkeypatch.context() as patch:
        killed_at(patch, text_classifiers, "batches", 2)
        with pytest.raises(Killed):
            self_attention(reviews, reviews, tmp_path / "out", **settings)
    with pytest.raises(
        AnalysisError, match=r"settings\.learning_rate is 0\.01, not 0\.0001: give another folder"
    ):
        self_attention(reviews, reviews, tmp_path / "out", **{**settings, "learning_rate": 1e-4})
    self_attention(reviews, reviews, tmp_path / "out", **settings)


def test_training_stops_after_epochs_without_gain_and_keeps_the_best(
    reviews, tmp_path, monkeypatch
):
    rights = iter([0.5, 0.75, 0.5, 0.25, 0.75, 1.0])
    states = []

    def predicted(model, texts):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        labels = torch.tensor(reviews.labels)
        return torch.where(
            torch.arange(len(labels)) < int(next(rights) * len(labels)), labels, 1 - labels
        )

    monkeypatch.setattr(text_classifiers, "predict_encoded", predicted)
    folder = self_attention(reviews, reviews, tmp_path / "out", **SMALL, **{**QUICK, "patience": 3})
    assert pd.read_csv(folder / "epochs.csv")["accuracy"].tolist() == [0.5, 0.75, 0.5, 0.25, 0.75]
    kept = transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in states[1].items())


def test_a_trained_classifier_is_not_trained_again_and_other_settings_are_refused(
    reviews, tmp_path, monkeypatch
):
    settings = {**SMALL, **QUICK, "epochs": 1}
    folder = self_attention(reviews, reviews, tmp_path / "out", **settings)
    monkeypatch.setattr(text_classifiers, "_fit", None)
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
    for name, given in (("given", {"device": device}), ("not given", {})):
        folder = self_attention(reviews, reviews, tmp_path / name, **SMALL, **QUICK, **given)
        found = json.loads((folder / "classifier.json").read_text())
        assert found.get("device", "cpu") == device
        assert accuracy(predict(folder, reviews, **given))["accuracy"] == 1
        finetune(
            encoder,
            reviews,
            reviews,
            tmp_path / f"finetuned {name}",
            **{**QUICK, "epochs": 1},
            **given,
        )


@pytest.mark.parametrize("device", ["warp", "meta"])
def test_a_device_that_cannot_be_used(encoder, reviews, tmp_path, device):
    words = f"the device {device!r} cannot be used here: give one of cpu"
    with pytest.raises(AnalysisError, match=words):
        self_attention(reviews, reviews, tmp_path / "out", device=device, **SMALL, **QUICK)
    with pytest.raises(AnalysisError, match=words):
        finetune(encoder, reviews, reviews, tmp_path / "out", device=device, **QUICK)
    with pytest.raises(AnalysisError, match=words):
        predict(tmp_path / "out", reviews, device=device)
    assert not (tmp_path / "out").exists()


def test_another_device_makes_another_classifier(reviews, tmp_path, monkeypatch):
    monkeypatch.setattr(text_classifiers, "_fit", Mock())
    monkeypatch.setattr(
        transformers.PreTrainedModel, "save_pretrained", Mock()
    )  # "meta" has no values.
    monkeypatch.setattr(devices, "usable", lambda device: device)
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    settings = {**SMALL, **QUICK}
    folders = [
        self_attention(reviews, reviews, device=device, **settings)
        for device in ("cpu", "meta", "meta:1")
    ]
    assert folders[0] != folders[1] == folders[2]
    cpu, meta = (json.loads((folder / "classifier.json").read_text()) for folder in folders[:2])
    assert meta == {**cpu, "device": "meta"}
    with pytest.raises(AnalysisError, match="whose device is meta, not None: give another folder"):
        self_attention(reviews, reviews, folders[1], device="cpu", **settings)


def test_what_a_model_reads_is_brought_to_its_device(reviews):
    model = SelfAttentionForSequenceClassification(SelfAttentionConfig(vocab_size=80)).to("meta")
    texts = text_classifiers.encode(reviews, word_pieces(GOOD + BAD, 80), 64)
    inputs = text_classifiers.inputs(model, texts, [0, 5])
    assert {"input_ids", "attention_mask"} <= {*inputs}
    assert {part.device.type for part in inputs.values()} == {"meta"}


# --- Measured
# ---------------------------------------------------------------------------------------


def test_the_weight_lowers_the_entropy(reviews, tmp_path):
    found = []
    for weight in (0.0, 1.0):
        block = {"hidden_size": 16, "entropy_weight": weight}
        settings = {**QUICK, "epochs": 20, "patience": 20}
        folder = self_attention(
            reviews, reviews, tmp_path / str(weight), vocabulary=80, block=block, **settings
        )
        tables = measure(load_model(str(folder)), reviews, "attention_entropy", progress=False)
        found.append(tables["attention_entropy"]["entropy_normalised"].mean())
    assert found[1] < found[0]


def test_measure_gives_equation_3_on_a_saved_classifier(reviews, tmp_path):
    folder = self_attention(
        reviews, reviews, tmp_path / "out", layers=2, **SMALL, **{**QUICK, "epochs": 2}
    )
    tables = measure(
        load_model(str(folder), dtype="float64"), reviews, "utterance_similarity", progress=False
    )
    found = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    seen = {("key", 1): [], ("key", 2): [], ("value", 1): [], ("value", 2): []}
    for (space, layer), vectors in seen.items():
        part = getattr(model.encoder.layers[layer - 1].attention, space)
        part.register_forward_hook(
            lambda _module, _args, output, kept=vectors: kept.append(output[0].detach())
        )
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
    pairs = table(
        tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two")
    )
    tokenizer = word_pieces(GOOD + BAD, 80)
    found, wanted = text_classifiers.encode(pairs, tokenizer, 64), tokenizer(list(GOOD), list(BAD))
    for name in ("input_ids", "token_type_ids"):
        assert [text.columns[name].tolist() for text in found] == wanted[name]
    cut = text_classifiers.encode(pairs, tokenizer, 9)
    wanted = tokenizer(list(GOOD), list(BAD), truncation=True, max_length=9)
    assert {len(text) for text in cut} == {9}
    for name in ("input_ids", "token_type_ids"):
        assert [text.columns[name].tolist() for text in cut] == wanted[name]


def test_a_pair_of_words_of_characters_is_read_as_bert_reads_it():
    tokenizer = CharacterBertTokenizer()
    pairs = [Pair("A warm film", "dull, tired"), Pair("loud", "a thing")]
    words = ["[CLS] a warm film [SEP] dull , tired [SEP]", "[CLS] loud [SEP] a thing [SEP]"]
    found = encoded("bert", tokenizer, pairs, 64)
    assert [text.ids for text in found] == [
        [tokenizer.word_ids(word) for word in text.split()] for text in words
    ]
    assert [text.columns["token_type_ids"] for text in found] == [
        [0] * 5 + [1] * 4,
        [0] * 3 + [1] * 3,
    ]
    assert [text.special for text in found] == [
        [word[0] == "[" for word in text.split()] for text in words
    ]


def test_measure_reads_pairs_of_words_of_characters(tmp_path):
    loaded = load_model(str(tiny.save(tmp_path / "model", "character_bert")), dtype="float64")
    pairs = table(
        tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two")
    )
    found = measure(loaded, pairs, "utterance_similarity", progress=False)["utterance_similarity"]
    words = [f"[CLS] {one} [SEP] {two} [SEP]".split() for one, two in zip(GOOD, BAD, strict=True)]
    similarities = []
    for text in words:
        ids = torch.tensor([[loaded.tokenizer.word_ids(word) for word in text]])
        with torch.no_grad():
            types = torch.tensor(
                [[0] * (text.index("[SEP]") + 1) + [1] * (len(text) - text.index("[SEP]") - 1)]
            )
            output = loaded.model(
                ids, torch.ones(ids.shape[:2], dtype=torch.long), token_type_ids=types
            )
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
    pairs = table(
        tmp_path / "pairs.csv", list(zip(GOOD, BAD, strict=True)), list("abab"), ("one", "two")
    )
    with pytest.raises(
        AnalysisError, match="puts nothing between the texts of a pair: give a model"
    ):
        measure(load_model(str(tmp_path / "gpt2")), pairs, "anisotropy", progress=False)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["fresh"] * 8, "only one class, fresh"),
        (["fresh"] * 7 + ["rotten"], "only one example of rotten"),
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
    with pytest.raises(
        AnalysisError, match=r"no classes: give texts with them, as in reviews\.csv:text:label"
    ):
        self_attention(bare, reviews, tmp_path / "out", **SMALL, **QUICK)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": math.nan}, "learning rate is nan"),
        ({"block": {"width": 3}}, "'width' is no setting of a block"),
        ({"layers": 0}, "layers is 0"),
        ({"block": {"entropy_weight": -1}}, "entropy_weight is -1"),
        ({"vocabulary": 9}, "vocabulary of 9"),
        (
            {"learning_rate": 1e30},
            "the loss of a batch is nan: give another folder and a learning rate below 1e\\+30",
        ),
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
    train = table(
        tmp_path / "train.csv", GOOD + BAD + ("one", "two"), ["c"] * 4 + ["a"] * 4 + ["b"] * 2
    )
    validation = table(tmp_path / "validation.csv", GOOD + BAD, ["c"] * 4 + ["a"] * 4)
    assert (list(train.classes), list(validation.classes)) == (["a", "b", "c"], ["a", "c"])
    folder = self_attention(train, validation, tmp_path / "out", **SMALL, **QUICK)
    best = pd.read_csv(folder / "epochs.csv")["accuracy"].max()
    found = accuracy(predict(folder, validation))["accuracy"]
    assert best == pytest.approx(found)
    assert found > 0.9
