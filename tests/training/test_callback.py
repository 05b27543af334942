"""A real loop of transformers' Trainer: measured along the way, and from the checkpoints that it leaves."""

import copy
import logging
import shutil

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers

from analysis_book.papers.godey import dynamics
from analysis_book.training import GeometryCallback, checkpoints
from analysis_lib import AnalysisError, measure

TEXTS = ["the cat sat on the mat , and slept .", "a dog barked at it", "where is the other one ?"] * 4


@pytest.fixture
def trainer(tmp_path):
    """A Trainer of a tiny classifier that keeps every second step of six."""
    bare, tokenizer = tiny.build("bert")

    def make(folder: str = "run") -> transformers.Trainer:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(copy.deepcopy(bare.config))
        rows = [{**tokenizer(text), "labels": i % 2} for i, text in enumerate(TEXTS)]
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=6,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)

    return make


def logged(trainer: transformers.Trainer, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in trainer.state.log_history if name in row]


def test_the_callback_logs_where_trainer_logs_and_changes_no_step(trainer):
    plain = trainer("plain")
    plain.train()
    watched = trainer("watched")
    callback = GeometryCallback(watched, TEXTS, "anisotropy,attention_entropy", every=3)
    watched.add_callback(callback)
    watched.train()
    assert logged(watched, "loss") == logged(plain, "loss")
    assert [*callback.tables] == [0, 3, 6]
    for name in (
        "geometry/anisotropy/cosine/hidden/layer_3",
        "geometry/anisotropy/cosine/key/layer_1",
        "geometry/attention_entropy/entropy_nats/layer_2",
    ):
        assert [step for step, _ in logged(watched, name)] == [0, 3, 6]
    last = measure(watched.model, TEXTS, "anisotropy", tokenizer=watched.processing_class, progress=False)["anisotropy"]
    pd.testing.assert_frame_equal(callback.tables[6]["anisotropy"], last, rtol=1e-6)
    hidden = last.query("space == 'hidden' and layer == 3")["cosine"].item()
    assert logged(watched, "geometry/anisotropy/cosine/hidden/layer_3")[-1][1] == pytest.approx(hidden, rel=1e-6)
    assert watched.model.training


def test_the_callback_takes_numbers_of_ones_own(trainer):
    watched = trainer()
    watched.add_callback(
        GeometryCallback(watched, TEXTS, every=4, numbers=lambda tables: {"rows": float(len(tables["anisotropy"]))})
    )
    watched.train()
    assert [step for step, _ in logged(watched, "rows")] == [0, 4]
    with pytest.raises(AnalysisError, match="every is 0"):
        GeometryCallback(watched, TEXTS, every=0)


def test_the_checkpoints_of_trainer_are_a_run_whose_copies_are_left_out(trainer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("analysis_lib.corpora.packages.package_directory", lambda: tmp_path / "packages")
    trained = trainer()
    trained.train()
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint-6", run / "checkpoint-8")
    with caplog.at_level(logging.WARNING):
        found = checkpoints(str(run))
    assert [checkpoint.step for checkpoint in found] == [2, 4, 6]
    assert "checkpoint-8 has the weights of checkpoint-6" in caplog.text
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS))
    tables = dynamics.dynamics(str(run), str(lines), 6, progress=False)
    assert tables.steps == [2, 4, 6]
    assert tables["losses"].empty
    texts = tables["anisotropy"].query("step == 6 and space == 'hidden'")["cosine"]
    last = measure(
        trained.model, dynamics.corpora.load_corpus(str(lines), 6, 0), "anisotropy", tokenizer=trained.processing_class
    )["anisotropy"].query("space == 'hidden'")["cosine"]
    np.testing.assert_allclose(texts, last, rtol=1e-6)
    # It is one run, whatever seeds a page shows by default.
    with caplog.at_level(logging.WARNING):
        assert checkpoints(str(run), [0, 1]) == found
        assert dynamics.dynamics(str(run), str(lines), 6, seeds=[1, 2], progress=False).seeds == [0]
    assert "is one run, which is shown for all seeds" in caplog.text


def test_revisions_of_a_model_of_the_hub_are_a_run():
    found = checkpoints("EleutherAI/pythia-160m@step1000,step0")
    assert [tuple(checkpoint) for checkpoint in found] == [
        (0, 0, "EleutherAI/pythia-160m", "step0"),
        (0, 1000, "EleutherAI/pythia-160m", "step1000"),
    ]
    assert [c.step for c in checkpoints("me/mine@first,second")] == [0, 1]
