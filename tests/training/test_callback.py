"""A real loop of transformers' Trainer: measured along the way, and from the checkpoints that it
leaves.
"""

import copy
import json
import logging
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers
from waiting import PATIENCE

from analysis_book.training import GeometryCallback, checkpoints, dynamics
from analysis_book.training.runs import losses
from analysis_lib import AnalysisError, measure

TEXTS = [
    "the cat sat on the mat , and slept .",
    "a dog barked at it",
    "where is the other one ?",
] * 4


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
        return transformers.Trainer(
            model, arguments, train_dataset=rows, processing_class=tokenizer
        )

    return make


def logged(trainer: transformers.Trainer, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize(
    ("spread", "is_refused"),
    [({"is_fsdp_enabled": True}, True), (3, True), (2, False)],
    ids=["FSDP", "ZeRO-3", "ZeRO-2"],
)
def test_weights_that_are_spread_over_processes_are_refused(trainer, spread, is_refused):
    """One process alone would wait for the others for ever."""
    spreading = trainer()
    if isinstance(spread, int):
        spreading.is_deepspeed_enabled = True
        spreading.args.hf_deepspeed_config = SimpleNamespace(is_zero3=lambda: spread == 3)
    else:
        vars(spreading).update(spread)
    if not is_refused:
        GeometryCallback(spreading, TEXTS)
        return
    with pytest.raises(AnalysisError, match=r"spread over its processes.*analysis-lib dynamics"):
        GeometryCallback(spreading, TEXTS)


PROCESSES = """
import copy, json, os, sys
rank, folder = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
# Asked for, and not used: the processes meet at a file, since a free port may be taken meanwhile.
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import torch, transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tiny
from analysis_book.training import GeometryCallback
from analysis_lib import AnalysisError

torch.set_num_threads(1)
distributed.init_process_group("gloo", f"file://{folder}/met", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
bare, tokenizer = tiny.build("bert")
texts = ["the cat sat", "a dog barked"] * 4
inputs = tokenizer(texts, padding=True)
rows = [{name: values[i] for name, values in inputs.items()} | {"labels": i % 2} for i in range(8)]
settings = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
settings |= {"disable_tqdm": True, "save_strategy": "no", "ddp_backend": "gloo"}
results = {}
for how in ("FSDP", "FSDP2", "tensor parallelism", "DDP"):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(copy.deepcopy(bare.config))
    if how == "FSDP":
        model.bert = FullyShardedDataParallel(model.bert, device_id=torch.device("cpu"))
    elif how == "FSDP2":
        fully_shard(model, mesh=mesh)
    elif how == "tensor parallelism":
        plan = {"bert.encoder.layer.0.intermediate.dense": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
    arguments = transformers.TrainingArguments(f"{folder}/run", **settings)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    # All processes take part.
    assert model(torch.tensor([inputs["input_ids"][0]])).logits.shape == (1, 2)
    try:
        callback = GeometryCallback(trainer, texts, every=1)
        trainer.add_callback(callback)
        trainer.train()
        results[how] = [*callback.tables]
    except AnalysisError as error:
        results[how] = str(error)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(results, file)
distributed.destroy_process_group()
"""


def test_two_processes_never_wait_for_one_that_measures(tmp_path):
    (tmp_path / "script.py").write_text(PROCESSES)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in "01":
        command = [sys.executable, tmp_path / "script.py", rank, tmp_path]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    # Each has all weights, and the first one measures.
    assert [of_rank.pop("DDP") for of_rank in results] == [[0, 1, 2], []]
    for of_rank in results:
        assert [*of_rank] == ["FSDP", "FSDP2", "tensor parallelism"]
        for said in of_rank.values():
            assert "the weights of this training are spread over its processes" in said
            assert "analysis-lib dynamics" in said


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
    last = measure(
        watched.model, TEXTS, "anisotropy", tokenizer=watched.processing_class, progress=False
    )["anisotropy"]
    pd.testing.assert_frame_equal(callback.tables[6]["anisotropy"], last, rtol=1e-6)
    hidden = last.query("space == 'hidden' and layer == 3")["cosine"].item()
    assert logged(watched, "geometry/anisotropy/cosine/hidden/layer_3")[-1][1] == pytest.approx(
        hidden, rel=1e-6
    )
    assert watched.model.training


def test_the_callback_takes_numbers_of_ones_own(trainer):
    watched = trainer()
    watched.add_callback(
        GeometryCallback(
            watched,
            TEXTS,
            every=4,
            numbers=lambda tables: {"rows": float(len(tables["anisotropy"]))},
        )
    )
    watched.train()
    assert [step for step, _ in logged(watched, "rows")] == [0, 4]
    with pytest.raises(AnalysisError, match="every is 0"):
        GeometryCallback(watched, TEXTS, every=0)


def test_the_checkpoints_of_trainer_are_a_run_whose_copies_are_left_out(
    trainer, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("analysis_lib.files.package_directory", lambda: tmp_path / "packages")
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
    assert tables["losses"]["step"].tolist() == [1, 2, 3, 4, 5, 6]
    texts = tables["anisotropy"].query("step == 6 and space == 'hidden'")["cosine"]
    last = measure(
        trained.model,
        dynamics.corpora.load_corpus(str(lines), 6, 0),
        "anisotropy",
        tokenizer=trained.processing_class,
    )["anisotropy"].query("space == 'hidden'")["cosine"]
    np.testing.assert_allclose(texts, last, rtol=1e-6)
    # It is one run, whatever seeds a page shows by default.
    with caplog.at_level(logging.WARNING):
        assert checkpoints(str(run), [0, 1]) == found
        assert dynamics.dynamics(str(run), str(lines), 6, seeds=[1, 2], progress=False).seeds == [0]
    assert "is one run, which is shown for all seeds" in caplog.text


def test_the_losses_of_trainer_are_those_that_it_has_logged(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis_lib.files.package_directory", lambda: tmp_path / "packages")
    trained = trainer()
    trained.eval_dataset = trained.train_dataset[:3]
    trained.args.eval_strategy, trained.args.eval_steps = "steps", 3
    trained.args.include_num_input_tokens_seen = "all"
    trained.add_callback(GeometryCallback(trained, TEXTS, every=2))
    trained.train()
    table = losses(str(tmp_path / "run"))
    assert table.columns.tolist() == ["seed", "step", "tokens", "learning_rate", "loss", "held_out"]
    assert {*table["seed"]} == {0}
    for column, name in (
        ("loss", "loss"),
        ("learning_rate", "learning_rate"),
        ("held_out", "eval_loss"),
    ):
        known = table.dropna(subset=column)
        assert [*zip(known["step"], known[column], strict=True)] == logged(trained, name), name
    assert table.dropna(subset="held_out")["step"].tolist() == [3, 6]
    assert table["tokens"].is_monotonic_increasing
    assert table["tokens"].iloc[-1] == trained.state.num_input_tokens_seen > 0


def test_the_losses_of_trainer_are_of_the_state_that_went_furthest(trainer, tmp_path):
    trained, run = trainer(), tmp_path / "run"
    trained.args.save_steps, trained.args.max_steps = 4, 5
    trained.train()
    (run / "checkpoint-5" / "trainer_state.json").unlink()
    assert losses(str(run)).empty
    trained.save_state()
    assert losses(str(run))["step"].tolist() == [1, 2, 3, 4, 5]
    shutil.rmtree(run / "checkpoint-5")
    assert losses(str(run))["step"].tolist() == [1, 2, 3, 4, 5]
    # What an earlier run has left there.
    (run / "trainer_state.json").write_text('{"global_step": 2, "log_history": []}')
    assert losses(str(run))["step"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "state", ["", "[]", "{}", '{"global_step": 9}', '{"global_step": 9, "log_history": [{}]}']
)
def test_a_damaged_state_of_trainer_is_named_before_anything_is_measured(tmp_path, state):
    folder = tmp_path / "run" / "checkpoint-2"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)
    with pytest.raises(
        AnalysisError,
        match=r"trainer_state\.json cannot be read .*: remove it, and the losses are left",
    ):
        losses(str(tmp_path / "run"))


def test_revisions_of_a_model_of_the_hub_are_a_run():
    found = checkpoints("EleutherAI/pythia-160m@step1000,step0")
    assert [tuple(checkpoint) for checkpoint in found] == [
        (0, 0, "EleutherAI/pythia-160m", "step0"),
        (0, 1000, "EleutherAI/pythia-160m", "step1000"),
    ]
    assert [c.step for c in checkpoints("me/mine@first,second")] == [0, 1]
