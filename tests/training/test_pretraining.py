"""Pretraining: what is refused, and that a run ends the same however often it is killed."""

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny import WORDS
from waiting import PATIENCE

from analysis_book import training
from analysis_book.training import Pretraining, loop, pretrain, pretraining, runs
from analysis_book.training import settings as run_settings
from analysis_book.training.pretraining import mask_tokens
from analysis_book.training.settings import spread
from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.files import SEAL

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
# A process that shares what is imported starts in no time; a fresh one imports torch first.
fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Two hundred lines of random words, an utterance a line."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text(
        "\n".join(" ".join(draw.choices(WORDS, k=10)) + "." for _ in range(200)), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def tiny(text) -> Pretraining:
    """Twelve steps of a BERT of two blocks."""
    return Pretraining(str(text), TINY, vocabulary=80, length=16, steps=12, batch=4)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """The run of ``tiny``, never interrupted."""
    return pretrain(tmp_path_factory.mktemp("run") / "tiny", tiny)


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file but the locks, and the seal, which knows where the data lies, by its
    path.
    """
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != SEAL
    }


def losses(folder: Path, seed: int = 0) -> pd.DataFrame:
    return pd.read_csv(folder / f"seed_{seed}.csv")


def refused(*words: str, **arguments) -> None:
    with pytest.raises(AnalysisError) as caught:
        pretrain(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# --- Steps that are kept --------------------------------------------------------------------------


def test_checkpoints_lie_where_those_of_the_multiberts_do():
    assert spread(2_000_000) == [1000 * step for step in runs.MULTIBERTS_STEPS]


@given(st.integers(1, 10**7))
def test_checkpoints_are_dense_early(steps):
    kept = spread(steps)
    assert (kept[0], kept[-1]) == (0, steps)
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert min(gaps) > 0
    assert len(kept) == 29 or steps < 100
    if steps >= 1000:
        assert max(gaps[:10]) < min(gaps[10:])


def test_further_steps_are_kept_up_to_the_last():
    settings = Pretraining(steps=500, also_kept=(7, 1, 5, 600))
    assert settings.checkpoints == sorted({*spread(500), 1, 7})
    assert settings.identity()["settings"]["checkpoints"] == settings.checkpoints
    # Without them, a run is what it was before they could be given.
    assert "also_kept" not in Pretraining().identity()["settings"]


# --- A run ----------------------------------------------------------------------------------------


def test_a_run_leaves_checkpoints_losses_and_what_made_it(run, tiny):
    models = {f"seed_0-step_{step}" for step in range(13)}
    files = {path.name for path in run.iterdir() if path.suffix != ".lock"}
    seals = {".run.sha256", ".seed_0.sha256", SEAL}
    assert files == {
        ".tokenizer",
        "baselines.csv",
        "pretraining.json",
        "seed_0.csv",
        *models,
        *seals,
    }
    table = losses(run)
    assert table.columns.tolist() == ["step", "tokens", "learning_rate", "loss", "held_out"]
    assert table["step"].tolist() == list(range(13))
    assert (table["tokens"] == table["step"] * 4 * 16).all()
    assert table["held_out"].notna().all()
    # Weights that are as small as at the start say nothing: every piece is as likely.
    pieces = len(transformers.AutoTokenizer.from_pretrained(run / "seed_0-step_0"))
    assert table["held_out"][0] == pytest.approx(math.log(pieces), abs=0.1)
    identity = json.loads((run / "pretraining.json").read_text())
    assert identity["settings"]["steps"] == 12
    assert identity["settings"]["checkpoints"] == spread(12)
    assert identity["data"].startswith("lines of sha256:")
    assert identity["versions"] == run_settings.versions()


def test_the_learning_rate_rises_and_falls_along_straight_lines(tiny, tmp_path):
    table = losses(pretrain(tmp_path / "run", replace(tiny, warmup=0.25, learning_rate=0.4e-3)))
    rates = [0, 1, 2, 3, *(3 * (13 - step) / 10 for step in range(4, 12))]
    assert table["learning_rate"][1:].tolist() == pytest.approx(
        [rate * 0.4e-3 / 3 for rate in rates]
    )


def test_a_run_is_the_same_twice_and_another_with_another_seed(run, tiny, tmp_path):
    state = torch.get_rng_state()
    again = pretrain(tmp_path / "again", tiny, seeds=(1, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    both = contents(again)
    assert {name: value for name, value in both.items() if "seed_1" not in name} == contents(run)
    for name in (
        "seed_{}.csv",
        "seed_{}-step_0/model.safetensors",
        "seed_{}-step_12/model.safetensors",
    ):
        assert both[name.format(0)] != both[name.format(1)]


def test_what_is_kept_does_not_change_what_is_learned(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run_settings, "spread", lambda steps: [1, steps])
    other = pretrain(tmp_path / "run", tiny)
    table = losses(other)
    assert table["step"][table["held_out"].notna()].tolist() == [1, 12]
    assert table["loss"].tolist()[1:] == losses(run)["loss"].tolist()[1:]
    weights = "seed_0-step_12/model.safetensors"
    assert (other / weights).read_bytes() == (run / weights).read_bytes()


def test_an_epoch_has_every_sequence_at_most_once_in_an_order_of_its_own():
    sequences = torch.arange(11).unsqueeze(1)
    batches = (pretraining._batch(sequences, 4, 0, step) for step in range(1, 5))
    first, second, third, fourth = (batch.flatten().tolist() for batch in batches)
    assert len({*first, *second}) == len({*third, *fourth}) == 8
    assert (first, second) != (third, fourth)
    assert pretraining._batch(sequences, 4, 1, 1).flatten().tolist() != first


def test_masking_is_berts():
    special, size, mask = 5, 300, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.randint(size, (1000, 100))
        ids, labels = mask_tokens(before, torch.arange(special, size), mask)
    words, predicted = before >= special, labels != -100
    assert not (predicted & ~words).any()
    assert torch.equal(labels[predicted], before[predicted])
    assert torch.equal(ids[~predicted], before[~predicted])
    assert predicted.sum() / words.sum() == pytest.approx(0.15, abs=0.005)
    assert (ids[predicted] == mask).float().mean() == pytest.approx(0.8, abs=0.02)
    kept = ids[predicted] == before[predicted]
    assert kept.float().mean() == pytest.approx(0.1 + 0.1 / (size - special), abs=0.01)


def test_the_held_out_loss_is_that_of_transformers(run, tiny):
    folder = run / "seed_0-step_12"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = load_corpus(tiny.data).texts
    # Every 40th line, one after the other, in sequences of 14 tokens and their two edges.
    stream = [
        t
        for line in lines[39::40]
        for t in (*tokenizer.convert_tokens_to_ids(tokenizer.tokenize(line)), 3)
    ]
    rows = torch.tensor([[2, *stream[i : i + 14], 3] for i in range(0, len(stream) - 13, 14)])
    model = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    total = count = 0
    torch.manual_seed(0)
    with torch.inference_mode():
        for part in rows.split(tiny.batch):
            ids, labels = mask_tokens(
                part, torch.arange(5, len(tokenizer)), tokenizer.mask_token_id
            )
            predicted = int((labels != -100).sum())
            total += (
                model(input_ids=ids, labels=labels).loss.double().item() * predicted
                if predicted
                else 0
            )
            count += predicted
    assert count > 5
    assert losses(run)["held_out"].iloc[-1] == pytest.approx(total / count, rel=1e-5)


def test_training_teaches(tmp_path):
    """Of two sentences without a word in common, every word follows from its neighbours."""
    sentences = ["one red fox sees seven grey owls", "my old cat hates your new drum"]
    (tmp_path / "text.txt").write_text("\n".join(random.Random(0).choices(sentences, k=600)))
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = Pretraining(
        str(tmp_path / "text.txt"), {**TINY, **without_dropout, "hidden_size": 64, "initializer_range": 0.05},
        vocabulary=200, length=10, steps=250, batch=8, learning_rate=5e-3,
    )  # fmt: skip
    table = losses(pretrain(tmp_path / "run", settings))
    assert table["held_out"][0] > 3
    assert table["held_out"].iloc[-1] < 0.1
    assert table["loss"].tail(20).mean() < 0.1


def test_a_checkpoint_is_a_model_like_any_other(run, tiny):
    loaded = load_model(str(run / "seed_0-step_12"))
    assert loaded.max_length == tiny.length
    tables = measure(
        loaded, load_corpus(tiny.data, limit=5), "qk_alignment, anisotropy", progress=False
    )
    assert len(tables["qk_alignment"]) == 2 * 2
    assert tables["anisotropy"]["cosine"].between(-1, 1).all()
    whole = transformers.BertForMaskedLM.from_pretrained(run / "seed_0-step_12").bert.state_dict()
    assert all(
        torch.equal(value, whole[name])
        for name, value in loaded.model.state_dict().items()
        if name in whole
    )


def test_seeds_in_processes_of_their_own_are_the_same(run, tiny, tmp_path, copied_workers):
    both = contents(pretrain(tmp_path / "run", tiny, seeds=(0, 1), workers=2))
    assert {name: value for name, value in both.items() if "seed_1" not in name} == contents(run)
    assert "seed_1-step_12/model.safetensors" in both


def test_without_a_device_it_is_the_one_there_is(run, tiny, tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert contents(pretrain(tmp_path / "run", tiny, device=device)) == contents(run)


# --- Killed, and at the same time -----------------------------------------------------------------


def train_and_die(folder: Path, settings: Pretraining, steps: int, delay: float) -> None:
    """Train in this process, which kills itself some time after some steps."""
    real, left = pretraining._Run._step, [steps]

    def step(self, number: int) -> float:
        loss = real(self, number)
        left[0] -= 1
        if not left[0]:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return loss

    pretraining._Run._step = step
    loop.SECONDS_BETWEEN_STATES = 0
    pretrain(folder, settings)


def ended(target, *arguments) -> int:
    process = fork.Process(target=target, args=arguments)
    process.start()
    process.join(timeout=PATIENCE)
    return process.exitcode


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(run, tiny, tmp_path, seed):
    draw, folder, kills = random.Random(seed), tmp_path / "run", 0
    while (
        status := ended(train_and_die, folder, tiny, draw.randint(1, 3), draw.uniform(0, 0.04))
    ) == -signal.SIGKILL:
        kills += 1
        assert kills < 40
    assert status == 0
    assert kills >= 3
    assert (folder / "seed_0.csv").read_bytes() == (run / "seed_0.csv").read_bytes()
    assert contents(folder) == contents(run)


def test_killed_before_the_first_step(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "_train", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert ended(pretrain, tmp_path / "run", tiny) == -signal.SIGKILL
    monkeypatch.undo()
    assert contents(pretrain(tmp_path / "run", tiny)) == contents(run)


def test_two_at_once_do_not_disturb_each_other(run, tiny, tmp_path):
    folder = tmp_path / "run"
    both = [fork.Process(target=pretrain, args=(folder, tiny)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=PATIENCE)
    assert [process.exitcode for process in both] == [0, 0]
    assert contents(folder) == contents(run)


def test_what_is_done_is_not_trained_again(run, tiny, monkeypatch):
    before = contents(run)
    monkeypatch.setattr(pretraining, "_Run", None)
    monkeypatch.setattr(pretraining, "word_pieces", None)
    assert pretrain(run, tiny) == run
    assert contents(run) == before


# --- Damaged --------------------------------------------------------------------------------------


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (gone, "seed_0-step_5"),
        (cut, "seed_0-step_5/model.safetensors"),
        (flipped, "seed_0-step_12/model.safetensors"),
        (gone, "seed_0-step_0/tokenizer.json"),
        (emptied, "seed_0.csv"),
        (cut, "seed_0.csv"),
        (cut, "baselines.csv"),
        (gone, ".tokenizer"),
        (cut, ".seed_0.sha256"),
    ],
)
def test_what_is_damaged_is_noticed_and_mended(run, tiny, copied, damage, name):
    before = training.run_identity(str(copied))
    damage(copied / name)
    with pytest.raises(
        AnalysisError, match=f"{copied / name}.* is missing or damaged: give `pretrain` the same"
    ):
        training.checkpoints(str(copied))
    assert (training.run_identity(str(copied)) != before) == ("-step_" in name)
    pretrain(copied, tiny)
    assert contents(copied) == contents(run)
    assert len(training.checkpoints(str(copied))) == 13
    assert training.run_identity(str(copied)) == before


def test_what_is_whole_stays_when_a_run_is_mended(tiny, copied, caplog):
    whole = (copied / "seed_0-step_4").stat().st_mtime_ns
    cut(copied / "seed_0-step_5" / "model.safetensors")
    pretrain(copied, tiny)
    assert (copied / "seed_0-step_4").stat().st_mtime_ns == whole
    assert "step_5/model.safetensors is missing or damaged: seed 0 is trained again" in caplog.text


def test_what_a_user_puts_beside_a_checkpoint_is_no_part_of_it_and_stays(tiny, copied):
    """Also where the checkpoint is made again."""
    note = copied / "seed_0-step_5" / "notes.md"
    note.write_text("mine")
    cut(copied / "seed_0-step_5" / "model.safetensors")
    pretrain(copied, tiny)
    assert note.read_text() == "mine"
    note.write_text("mine, and more")
    assert len(training.checkpoints(str(copied))) == 13


def test_a_run_of_an_earlier_version_is_finished_and_is_sealed(run, tiny, copied, monkeypatch):
    for path in copied.glob(".*.sha256"):
        path.unlink()
    assert len(training.checkpoints(str(copied))) == 13
    monkeypatch.setattr(pretraining, "_Run", None)
    pretrain(copied, tiny)
    assert contents(copied) == contents(run)


@pytest.mark.parametrize(("damage", "name"), [(gone, "seed_0-step_1"), (cut, ".seed_0.pt")])
def test_a_run_that_was_killed_and_damaged_ends_the_same(run, tiny, tmp_path, damage, name):
    folder = tmp_path / "run"
    assert ended(train_and_die, folder, tiny, 4, 0.0) == -signal.SIGKILL
    damage(folder / name)
    pretrain(folder, tiny)
    assert contents(folder) == contents(run)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 13}, ["holds a training whose settings.steps is 12, not 13", "another folder"]),
        ({"configuration": {**TINY, "num_hidden_layers": 3}}, ["settings.configuration"]),
    ],
)
def test_a_folder_holds_one_run(run, tiny, changes, words):
    before = contents(run)
    refused(str(run), *words, folder=run, settings=replace(tiny, **changes))
    assert contents(run) == before


def test_a_run_on_other_text_is_refused(tiny, text, tmp_path):
    copy = tmp_path / "lines.txt"
    copy.write_text(text.read_text())
    settings = replace(tiny, data=str(copy), steps=1)
    folder = pretrain(tmp_path / "run", settings)
    copy.write_text(text.read_text() + "\nOne line more.")
    refused("holds a training whose data is", folder=folder, settings=settings)


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_damaged_description_is_refused(tiny, tmp_path, damage):
    (tmp_path / "pretraining.json").write_text(damage)
    refused("pretraining.json cannot be read", "another folder", folder=tmp_path, settings=tiny)


def test_a_folder_with_other_things_is_refused(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused("holds notes.txt and no training", folder=tmp_path, settings=tiny)
    refused("is a file", folder=tmp_path / "notes.txt", settings=tiny)
    refused("cannot be written", folder=tmp_path / "notes.txt" / "run", settings=tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "wikipedai"}, ["did you mean wikipedia?"]),
        ({"data": "absent.txt"}, ["absent.txt"]),
        ({"data": "digits"}, ["digits holds images: give texts"]),
        ({"vocabulary": 20}, ["no room"]),
        ({"batch": 1000}, ["to train on", "a batch below 1000"]),
        ({"length": 5000, "batch": 1}, ["makes 0 sequences of 5000 tokens"]),
        ({"model_type": "brt"}, ["no masked language model 'brt'", "did you mean bert"]),
        ({"model_type": "gpt2"}, ["no masked language model 'gpt2'"]),
        ({"configuration": {"hidden_sise": 32}}, ["hidden_sise", "did you mean hidden_size"]),
        ({"configuration": {"vocab_size": 32}}, ["vocab_size", "leave them out"]),
        ({"configuration": {"hidden_size": 33}}, ["hidden_size", "not a multiple", "12"]),
        ({"configuration": {"hidden_size": "many"}}, ["hidden_size", "many"]),
        ({"configuration": {"hidden_size": 0}}, ["makes no bert"]),
        ({"configuration": {"num_attention_heads": 0}}, ["makes no bert"]),
        ({"configuration": {**TINY, "num_attention_heads": -2}}, ["num_attention_heads is -2"]),
        (
            {"configuration": {**TINY, "num_hidden_layers": 10**6}},
            ["num_hidden_layers is 1000000: give 10000"],
        ),
        (
            {"configuration": {**TINY, "hidden_size": 10**9}},
            ["parameters need", "GB of memory", "'hidden_size': 10000"],
        ),
        (
            {"configuration": {**TINY, "intermediate_size": 10**12}},
            ["parameters need", "smaller sizes"],
        ),
        ({"configuration": {**TINY, "intermediate_size": 10**21}}, ["makes no bert", "10"]),
        ({"configuration": {**TINY, "max_position_embeddings": 10**12}}, ["parameters need"]),
        ({"steps": 10**12}, ["1000000000000 steps", "fewer steps"]),
        ({"steps": 10**15}, ["fewer steps"]),
        ({"batch": 10**9}, ["a batch below 1000000000"]),
        ({"configuration": {"hidden_act": "rectify"}}, ["makes no bert", "rectify"]),
        ({"configuration": {"num_hidden_layers": 0}}, ["num_hidden_layers is 0"]),
        ({"configuration": {"hidden_dropout_prob": math.nan}}, ["hidden_dropout_prob is nan"]),
        (
            {"configuration": {"max_position_embeddings": 8}},
            ["max_position_embeddings is 8", "16 or more"],
        ),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(tiny, tmp_path, changes, words):
    refused(*words, folder=tmp_path / "new" / "run", settings=replace(tiny, **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seeds": ()}, ["seeds is empty", "one whole number or more"]),
        ({"seeds": (0, -1)}, ["seeds is -1"]),
        ({"workers": 0}, ["workers is 0"]),
        ({"device": "warp"}, ["the device 'warp' cannot be used here"]),
        ({"device": "meta"}, ["the device 'meta' cannot be used here"]),
    ],
)
def test_who_cannot_train_it_leaves_no_folder(tiny, tmp_path, arguments, words):
    refused(*words, folder=tmp_path / "run", settings=tiny, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps is 0: give a whole number, 1 or more"),
        ({"steps": 4.5}, "steps is 4.5"),
        ({"batch": 0}, "batch is 0"),
        ({"length": 7}, "length is 7: give a whole number, 8 or more"),
        ({"vocabulary": 4}, "vocabulary is 4"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"also_kept": "12"}, "also_kept is '12': give a list of steps"),
        ({"also_kept": [1, 2.5]}, "a step of also_kept is 2.5"),
        ({"also_kept": [0]}, "a step of also_kept is 0"),
    ],
)
def test_settings_that_make_no_sense(changes, words):
    with pytest.raises(AnalysisError, match=words.replace("(", r"\(")):
        Pretraining(**changes)


def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path):
    """At no moment is a checkpoint there whose weights are not those of a model that predicts
    something.
    """
    settings = replace(tiny, learning_rate=1e30, warmup=0.0)
    refused(
        "the loss of step",
        "is nan",
        "a learning rate below 1e+30",
        folder=tmp_path / "run",
        settings=settings,
    )
    assert "seed_0-step_0" in {path.name for path in (tmp_path / "run").iterdir()}
    for path in (tmp_path / "run").glob("seed_0-step_*"):
        weights = transformers.BertForMaskedLM.from_pretrained(path).state_dict()
        assert all(value.isfinite().all() for value in weights.values())


# --- Runs by name ---------------------------------------------------------------------------------


@pytest.fixture
def named(tiny, tmp_path, monkeypatch) -> str:
    """A run by name, whose folders lie apart from the reader's."""
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(runs.RUNS, "tiny", tiny)
    return "tiny"


def test_a_run_by_name_is_trained_once(run, named, monkeypatch):
    found = training.checkpoints(named)
    assert [(at.seed, at.step) for at in found] == [(0, step) for step in range(13)]
    folder = Path(found[0].model).parent
    assert contents(folder) == contents(run)
    assert folder.name == training.run_identity(named)
    monkeypatch.setattr(pretraining, "_Run", None)
    assert training.checkpoints(named) == found
    pd.testing.assert_frame_equal(runs.losses(named).drop(columns="seed"), losses(run))


def test_a_run_with_other_settings_is_another(named):
    other = training.checkpoints(f"{named}@steps=2@learning_rate=1e-3")
    assert [at.step for at in other] == [0, 1, 2]
    assert training.run_identity(f"{named}@steps=2") != training.run_identity(f"{named}@steps=3")


def test_the_checkpoints_of_a_folder(run, tiny, tmp_path):
    found = training.checkpoints(str(run))
    assert found == [
        runs.Checkpoint(0, step, str(run / f"seed_0-step_{step}")) for step in range(13)
    ]
    both = pretrain(tmp_path / "run", tiny, seeds=(0,))
    before = training.run_identity(str(both))
    pretrain(both, tiny, seeds=(1,))
    assert training.run_identity(str(both)) != before
    assert [at.seed for at in training.checkpoints(str(both), (1, 0, 1))] == [1] * 13 + [0] * 13
    assert runs.losses(str(both), (1, 0))["seed"].tolist() == [1] * 13 + [0] * 13


def test_the_checkpoints_of_a_run_under_way_are_refused(run, tiny, tmp_path):
    folder = tmp_path / "run"
    assert ended(train_and_die, folder, tiny, 4, 0.0) == -signal.SIGKILL
    assert (folder / "seed_0-step_3").is_dir()
    with pytest.raises(AnalysisError, match="no seed 0 that is trained to its end"):
        training.checkpoints(str(folder))


@pytest.mark.parametrize(
    ("name", "seeds", "words"),
    [
        ("bert-5", (0,), "there is no run 'bert-5': did you mean bert-4"),
        ("multibert", (0,), "did you mean multiberts"),
        ("multiberts", (0, 5), "no checkpoints of seed 5: give seeds from 0 to 4"),
        ("tiny@stepz=3", (0,), "tiny has no setting stepz: did you mean steps"),
        ("tiny@steps=many", (0,), "'steps=many' is not a setting"),
        ("tiny@steps=2.5", (0,), "steps is 2.5: give a whole number"),
        ("tiny", (), "seeds is empty"),
        ("tiny", (-1,), "seeds"),
        ("{run}", (3,), "no seed 3 that is trained to its end"),
        ("{run}/seed_0-step_3", (0,), "there is no run"),
    ],
)
def test_a_run_that_is_not_there(named, run, name, seeds, words):
    with pytest.raises(AnalysisError, match=words):
        training.checkpoints(name.format(run=run), seeds)


def test_the_names_of_the_multiberts():
    found = training.checkpoints("multiberts", (2, 0))
    assert [at.seed for at in found] == [2] * 29 + [0] * 29
    assert [at.step for at in found[:29]] == spread(2_000_000)
    assert found[1].model == "multiberts-seed_2-step_20k"
    assert runs.losses("multiberts", (0,)).empty


@pytest.mark.parametrize("content", ["", "x", "[]", "{}"])
def test_a_damaged_description_is_named(tmp_path, content):
    (tmp_path / "pretraining.json").write_text(content)
    for of_run in (training.checkpoints, runs.run_description, runs.losses):
        with pytest.raises(
            AnalysisError, match=r"pretraining\.json (cannot be read|lists no checkpoints)"
        ):
            of_run(str(tmp_path))


# --- Other architectures, other tokenizers
# ----------------------------------------------------------

SIZES = {
    **dict.fromkeys(
        ("hidden_size", "dim", "embedding_size", "intermediate_size", "hidden_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_attention_heads", "n_heads"), 2),
}
KINDS = (
    "albert",
    "bert",
    "camembert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
)
KINDS += ("roberta", "xlm-roberta")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_measured_can_be_pretrained(kind, text, tmp_path):
    """Whatever follows its base, and wherever its positions begin."""
    known = transformers.AutoConfig.for_model(kind).to_dict()
    configuration = {name: size for name, size in SIZES.items() if name in known}
    settings = Pretraining(
        str(text), configuration, kind, vocabulary=80, length=16, steps=2, batch=4
    )
    last = pretrain(tmp_path / "run", settings) / "seed_0-step_2"
    loaded = load_model(last)
    assert loaded.max_length == 16
    tables = measure(loaded, ["the cat sees the dog.", "a bird eats an apple."], progress=False)
    assert {"anisotropy", "score_contributions"} <= {*tables}
    # The loss is that of transformers, with the head that comes with the model.
    tokenizer = transformers.AutoTokenizer.from_pretrained(last)
    model = transformers.AutoModelForMaskedLM.from_pretrained(last).eval()
    (_, held_out), total, count = pretraining._sequences(tokenizer, settings), 0, 0
    torch.manual_seed(0)
    with torch.inference_mode():
        for part in held_out.split(settings.batch):
            ids, labels = mask_tokens(
                part, torch.arange(5, len(tokenizer)), tokenizer.mask_token_id
            )
            predicted = labels != -100
            logits = model(input_ids=ids).logits[predicted]
            total += (
                torch.nn.functional.cross_entropy(logits, labels[predicted], reduction="sum")
                .double()
                .item()
            )
            count += int(predicted.sum())
    assert losses(tmp_path / "run")["held_out"].iloc[-1] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(
    "kind", ["bart", "xlm", "flaubert", "ibert", "longformer", "reformer", "esm", "data2vec-text"]
)
def test_what_cannot_be_measured_is_not_pretrained(kind, text, tmp_path):
    settings = Pretraining(str(text), TINY, kind, vocabulary=80, length=16, steps=2, batch=4)
    refused(
        "there is no masked language model",
        kind,
        "bert",
        folder=tmp_path / "run",
        settings=settings,
    )
    assert not (tmp_path / "run").exists()


def test_a_model_of_full_size_says_what_takes_a_while(text, caplog, monkeypatch):
    monkeypatch.setattr(pretraining, "LARGE", 1000)
    settings = Pretraining(str(text), TINY, vocabulary=80, length=16, steps=2, batch=4)
    with caplog.at_level("WARNING"):
        pretraining._configuration(
            settings, pretraining._tokenizer(load_corpus(str(text)), settings)
        )
    assert "takes a while to begin with" in caplog.text


def test_a_tokenizer_of_ones_own(tiny, tmp_path):
    """Whose special tokens do not come first."""
    pieces = [
        *"abcdefghijklmnopqrstuvwxyz.",
        *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    ]
    pieces += ["[CLS]", "[PAD]", "[MASK]", "[UNK]", "[SEP]"]
    backend = transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    backend.save_pretrained(tmp_path / "words")
    settings = replace(
        tiny, tokenizer=str(tmp_path / "words"), vocabulary=Pretraining.vocabulary, steps=2
    )
    run = pretrain(tmp_path / "run", settings)
    config = load_model(run / "seed_0-step_2").model.config
    assert (config.vocab_size, config.pad_token_id) == (58, 54)
    ids, labels = mask_tokens(torch.arange(58).repeat(200, 1), pretraining._ordinary(backend), 55)
    assert (labels[:, 53:] == -100).all()
    assert (ids[:, 53:] == torch.arange(53, 58)).all()
    assert {*labels.unique().tolist()} == {-100, *range(53)}
    assert {*ids[:, :53].unique().tolist()} == {55, *range(53)}
    # Another tokenizer is another run.
    backend.add_tokens(["cat"])
    backend.save_pretrained(tmp_path / "words")
    refused("whose tokenizer is", folder=tmp_path / "run", settings=settings)


def test_a_tokenizer_without_a_mask_is_refused(tiny, tmp_path):
    import tiny as models

    models.tokenizer("gpt2").save_pretrained(tmp_path / "gpt2")
    settings = replace(tiny, tokenizer=str(tmp_path / "gpt2"), vocabulary=Pretraining.vocabulary)
    refused("has no mask token", folder=tmp_path / "run", settings=settings)


def test_capital_letters_are_kept_where_they_are_asked_for(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"Paris is in France and {i % 7} is not" for i in range(200)))
    settings = Pretraining(str(path), TINY, vocabulary=80, length=16, steps=1, batch=4, cased=True)
    tokenizer = load_model(pretrain(tmp_path / "run", settings) / "seed_0-step_1").tokenizer
    assert tokenizer.tokenize("Paris paris")[0] == "Paris"
    assert "cased" not in Pretraining().identity()["settings"]


# --- Descriptions that lead elsewhere
# ---------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [["../../etc"], [-1], [0.5], ["3"], [True], [], "0", None, {"0": 1}, [0, 10**6]],
    ids=repr,
)
def test_steps_that_are_none_are_refused(steps, run, copied):
    path = copied / "pretraining.json"
    about = json.loads(path.read_text())
    about["settings"]["checkpoints"] = steps
    path.write_text(json.dumps(about))
    with pytest.raises(AnalysisError, match=r"lists no checkpoints|is missing or damaged"):
        runs.checkpoints(str(copied))


@pytest.mark.parametrize("content", ["[" * 10**5, "3", '{"settings": 3}', "\udcff"])
def test_a_description_that_is_none_is_one_line(content, run, copied):
    (copied / "pretraining.json").write_text(content, errors="surrogateescape")
    with pytest.raises(AnalysisError, match=r"pretraining\.json"):
        runs.checkpoints(str(copied))


def test_a_pipe_in_place_of_a_description_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "pretraining.json")
    with pytest.raises(AnalysisError, match=r"is no regular file|there is no run"):
        runs.checkpoints(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    ["", "step,loss\n0,1\n", "a\0b", "step,tokens,learning_rate,loss,held_out\nx,1,1,1,1\n"],
)
def test_losses_that_are_none_are_one_line(content, run, copied):
    (copied / "seed_0.csv").write_text(content)
    with pytest.raises(AnalysisError, match=r"seed_0\.csv"):
        runs.losses(str(copied))


def test_checkpoints_of_different_sizes_are_refused(tmp_path):
    import tiny as models

    from analysis_book.training.dynamics import dynamics

    models.save(tmp_path / "run" / "checkpoint-1", "bert")
    models.save(tmp_path / "run" / "checkpoint-2", "bert", num_hidden_layers=2)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(models.TEXTS))
    with pytest.raises(AnalysisError, match="has other layers or heads than"):
        dynamics(str(tmp_path / "run"), str(lines), 6, progress=False)
