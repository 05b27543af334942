"""Parts of a measurement, each by a process of its own: merged, they are the bytes of one."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import copies
import pandas as pd
import pytest
import tiny
import torch
from eager import EAGER, wait_until_stopped
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE

from analysis_lib import (
    AnalysisError,
    LoadedModel,
    load_model,
    measure,
    merge_parts,
    metrics,
    store,
)
from analysis_lib.capture.interventions import Replace
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import merging, shards, stored
from analysis_lib.measurement.parts import Part
from analysis_lib.measurement.tables import Report

TEXTS = tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS)
# With two texts to a shard, of 100 shards: three branches and a beginning.
CORPUS = Corpus("texts", (TEXTS * 4)[:199])
FEW = "anisotropy,attention_entropy"


class Long(metrics.Metric):
    """A metric of the user's: the share of hidden vectors that are longer than ``norm``."""

    name, needs, interval = "long", frozenset({"hidden"}), "share"

    def __init__(self, norm: float):
        super().__init__()
        self.norm = norm

    def update(self, activations):
        hidden, layer = activations.spaces["hidden"], activations.layer
        self.add(("norms", layer), hidden.norms.clamp_max(self.norm).sum((1, 2)), activations)
        self.add(("tokens", layer), hidden.counts, activations)

    def rows(self, sums):
        return {"share": sums["norms"] / sums["tokens"]}


@pytest.fixture(scope="module")
def model(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder("bert")))


@pytest.fixture
def measured_shards(measured_shards, monkeypatch) -> list[int]:
    """The same of shards of two texts each."""
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 2)
    return measured_shards


def csv(tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    return {name: table.to_csv(index=False) for name, table in tables.items()}


def assert_same_run(run: dict, expected: dict) -> None:
    """As they are written, they differ in seconds alone."""
    run, expected = (json.dumps({**each, "seconds": 0}, indent=2) for each in (run, expected))
    assert run == expected


# --- The order of merging -------------------------------------------------------------------------


class Written:
    """A metric whose sums are what a sum would be written as."""

    name = "written"

    def __init__(self, sums: str = ""):
        self.sums = sums

    def fresh(self, sums: str = "") -> "Written":
        return Written(sums)

    def merge(self, other: "Written") -> None:
        self.sums = f"({self.sums}+{other.sums})"


def written(pieces: list[tuple[int, str]]) -> str:
    """The sum of pieces that follow one another, each of so many shards."""
    metric = Written()
    whole = merging.Merging([metric])
    for count, sums in pieces:
        whole.add(count, ({"written": sums}, Report()))
        assert len(whole.pieces) <= 3
    whole.close()
    return metric.sums


def in_turn(units: list[str]) -> str:
    total = units[0]
    for unit in units[1:]:
        total = f"({total}+{unit})"
    return total


def by_definition(shards: list[str]) -> str:
    """Three shards make a branch, three branches a limb, and the rest is added from its end."""
    rest = []
    for _ in range(2):
        whole = len(shards) // 3 * 3
        if left := shards[whole:]:
            rest.append(in_turn(left))
        shards = [in_turn(shards[at : at + 3]) for at in range(0, whole, 3)]
    if shards:
        rest.append(in_turn(shards))
    total = rest[0]
    for unit in rest[1:]:
        total = f"({unit}+{total})"
    return total


@given(total=st.integers(1, 40), cuts=st.sets(st.integers(1, 39)))
def test_parts_are_merged_in_the_order_of_one_process(total, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "SHARDS_PER_BRANCH", 3)
        patch.setattr(merging, "UNITS", (1, 3, 9))
        names = [chr(ord("a") + shard % 26) + str(shard) for shard in range(total)]
        expected = written([(1, name) for name in names])
        assert expected == by_definition(names)
        ends = [0, *sorted(cut for cut in cuts if cut < total), total]
        pieces = []
        for start, stop in itertools.pairwise(ends):
            part = merging.Merging([Written()], start)
            for name in names[start:stop]:
                part.add(1, ({"written": name}, Report()))
            pieces += [(piece.stop - piece.start, piece.metrics[0].sums) for piece in part.pieces]
        assert written(pieces) == expected


@pytest.mark.parametrize("count", [1, 3, 4, 7, 16])
def test_every_shard_is_in_one_part(count):
    ranges = [Part(number, count).shards(2000) for number in range(1, count + 1)]
    assert [shard for shards in ranges for shard in shards] == [0, 1, 2, 3]
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# --- Parts of one measurement ---------------------------------------------------------------------


def die_halfway(model: str, folder: Path) -> None:
    """Measure part 2 of 4, and be killed at its eleventh shard."""
    original = shards.begin

    def begin(shard, *args):
        if shard.index == 35:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(shard, *args)

    shards.UTTERANCES_PER_SHARD, shards.begin = 2, begin
    stored.SECONDS_AT_RISK = 0
    torch.set_num_threads(1)
    chosen = ["anisotropy", "score_contributions", Long(1.1)]
    measure(load_model(model), CORPUS, chosen, part=(2, 4), checkpoints=folder, progress=False)


def test_four_parts_of_which_one_was_killed_are_the_bytes_of_one(model, tmp_path, measured_shards):
    chosen = ["anisotropy", "score_contributions", Long(1.1)]
    expected = measure(model, CORPUS, chosen, progress=False)
    killed = copies.context().Process(target=die_halfway, args=(model.name, tmp_path))
    killed.start()
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    assert [path.name[:12] for path in tmp_path.iterdir()] == [".unfinished-"]
    with pytest.raises(AnalysisError, match="holds no parts"):
        merge_parts(tmp_path, [Long(1.1)])
    settings = {"checkpoints": tmp_path, "progress": False}
    for number in (4, 1, 3):
        measure(model, CORPUS, chosen, part=(number, 4), **settings)
    with pytest.raises(AnalysisError, match="lacks part 2 of 4: run what is missing again"):
        merge_parts(tmp_path, [Long(1.1)])
    measured_shards.clear()
    second = measure(model, CORPUS, chosen, part=(2, 4), **settings)
    # It goes on where it was killed.
    assert measured_shards == [*range(35, 50)]
    assert (second.run["part"], second.report.utterances) == ([2, 4], 50)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"part-{number}-of-4.npz" for number in (1, 2, 3, 4)
    ]
    found = merge_parts(tmp_path, [Long(1.1)])
    assert csv(found) == csv(expected)
    assert found.report == expected.report
    assert_same_run(found.run, expected.run)
    assert found.interval(lambda tables: tables["long"]["share"].mean()) == expected.interval(
        lambda tables: tables["long"]["share"].mean()
    )


def test_a_part_that_is_there_is_not_measured_again(model, tmp_path, measured_shards, caplog):
    settings = {"part": [1, 10], "checkpoints": tmp_path, "progress": False}
    first = measure(model, CORPUS, FEW, **settings)
    assert measured_shards == [*range(10)]
    measured_shards.clear()
    again = measure(model, CORPUS, FEW, **settings)
    assert not measured_shards
    assert "part 1 of 10 is in" in caplog.text
    assert csv(again) == csv(first)
    assert again.report == first.report
    # A damaged one is.
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert csv(measure(model, CORPUS, FEW, **settings)) == csv(first)
    assert measured_shards == [*range(10)]


def test_the_tables_of_a_part_are_those_of_its_texts(model, tmp_path, measured_shards):
    part = measure(model, CORPUS, FEW, part=(3, 4), checkpoints=tmp_path, progress=False)
    texts = Corpus("texts", CORPUS.items[100:150])
    alone = measure(model, texts, FEW, progress=False)
    assert part.report == alone.report
    for name in alone:
        values = [name for name in alone[name] if not name.startswith("ci_")]
        pd.testing.assert_frame_equal(part[name][values], alone[name][values], rtol=1e-6)


def test_there_may_be_more_parts_than_shards(model, tmp_path, measured_shards):
    corpus = Corpus("few", TEXTS[:3])
    for number in range(1, 6):
        settings = {"part": (number, 5), "checkpoints": tmp_path, "progress": False}
        tables = measure(model, corpus, **settings)
        assert tables.report.utterances in (0, 1, 2)
    expected = measure(model, corpus, progress=False)
    found = merge_parts(tmp_path)
    assert csv(found) == csv(expected)
    assert_same_run(found.run, expected.run)


def test_workers_measure_a_part(model, tmp_path, measured_shards, copied_workers):
    expected = measure(model, CORPUS, FEW, part=(2, 9), checkpoints=tmp_path / "one")
    found = measure(model, CORPUS, FEW, part=(2, 9), checkpoints=tmp_path / "two", workers=2)
    assert csv(found) == csv(expected)


# --- Parts that do not fit ------------------------------------------------------------------------


@pytest.fixture
def kept(model, tmp_path, measured_shards) -> Callable[..., None]:
    """A function that measures a part of three."""

    def keep(number: int, corpus: Corpus = CORPUS, model=model, chosen=FEW, **settings) -> None:
        given = {"part": (number, 3), "checkpoints": tmp_path / str(number), "progress": False}
        measure(model, corpus, chosen, **given, **settings)
        for path in (tmp_path / str(number)).iterdir():
            path.rename(tmp_path / path.name)

    return keep


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("setting", "part 1 from another setting of long_texts than"),
        ("corpus", "part 1 from another corpus than"),
        ("weights", "part 1 from another model revision than"),
        ("precision", "part 1 from another precision than"),
        ("metrics", "part 1 from another choice of metrics than"),
    ],
)
def test_parts_of_two_measurements_are_not_merged(kept, tmp_path, tiny_folder, other, words):
    given = {
        "setting": lambda: {"long_texts": "window"},
        "corpus": lambda: {"corpus": Corpus("texts", (*CORPUS.items[:-1], "another one"))},
        "weights": lambda: {"model": load_model(tiny.save(tmp_path / "bert", "bert", seed=1))},
        "precision": lambda: {"model": load_model(str(tiny_folder("bert")), dtype="float64")},
        "metrics": lambda: {"chosen": "anisotropy"},
    }[other]()
    kept(1, **given)
    kept(2)
    kept(3)
    with pytest.raises(AnalysisError, match=words) as caught:
        merge_parts(tmp_path)
    assert "\n" not in str(caught.value)
    assert "remove these files, and run them again" in str(caught.value)
    usual = load_model(str(tiny_folder("bert")))
    with pytest.raises(AnalysisError, match=r"part-1-of-3.npz comes from another .*remove it"):
        measure(usual, CORPUS, FEW, part=(1, 3), checkpoints=tmp_path, progress=False)


def test_parts_of_another_version_of_the_library_are_not_merged(kept, tmp_path, monkeypatch):
    for number in (1, 2, 3):
        kept(number)
    monkeypatch.setattr(store, "library_hash", lambda: "of another version")
    with pytest.raises(AnalysisError, match="come from another version of analysis_lib than this"):
        merge_parts(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(store, "installed_version", lambda name: "9.9")
    with pytest.raises(AnalysisError, match="another version of torch and another version of tra"):
        merge_parts(tmp_path)


def test_parts_of_two_divisions_are_not_merged(model, kept, tmp_path):
    kept(1)
    measure(model, CORPUS, FEW, part=(1, 12), checkpoints=tmp_path, progress=False)
    with pytest.raises(AnalysisError, match="holds parts of 3 and of 12: remove those of all but"):
        merge_parts(tmp_path)
    (tmp_path / "part-1-of-3.npz").unlink()
    measure(model, CORPUS, FEW, part=(5, 12), checkpoints=tmp_path, progress=False)
    # As SLURM takes them.
    with pytest.raises(AnalysisError, match="lacks parts 2-4,6-12 of 12"):
        merge_parts(tmp_path)


@pytest.mark.parametrize("damaged", ["head", "sums"])
def test_a_damaged_part_is_named(kept, tmp_path, damaged):
    for number in (1, 2, 3):
        kept(number)
    path = tmp_path / "part-2-of-3.npz"
    content = bytearray(path.read_bytes())
    if damaged == "head":
        content = content[:50]
    else:
        content[content.rindex(b"\x93NUMPY") + 140] ^= 1
    path.write_bytes(content)
    with pytest.raises(AnalysisError, match=r"part-2-of-3.npz cannot.*and run part 2 again"):
        merge_parts(tmp_path)


def test_a_metric_of_ones_own_is_given_again(kept, tmp_path):
    for number in (1, 2, 3):
        kept(number, chosen=["anisotropy", Long(1.1)])
    with pytest.raises(
        AnalysisError, match=r"long is a metric of your own: give it to merge_parts"
    ):
        merge_parts(tmp_path)
    with pytest.raises(AnalysisError, match=r"long was measured with other parameters"):
        merge_parts(tmp_path, [Long(1.2)])
    with pytest.raises(AnalysisError, match="attention_entropy is not in these parts"):
        merge_parts(tmp_path, FEW)
    assert [*merge_parts(tmp_path, [Long(1.1)])] == ["anisotropy", "long"]


def test_what_every_part_would_read_whole_is_refused(model, tmp_path):
    settings = {"part": (1, 2), "checkpoints": tmp_path, "progress": False}
    cone = Replace("residual", layers=[1], by="mean")
    for changed in ({"intervention": cone}, {"tokens": "norm<2x"}):
        with pytest.raises(AnalysisError, match=r"a pass over all texts.*measure in one run"):
            measure(model, CORPUS, FEW, **settings, **changed)
    blind = Replace("residual", layers=[1], dimensions=[0], by="zero")
    for number in (1, 2):
        given = settings | {"part": (number, 2)}
        measure(model, CORPUS, FEW, **given, intervention=blind)
    expected = measure(model, CORPUS, FEW, intervention=blind, progress=False)
    assert csv(merge_parts(tmp_path)) == csv(expected)
    with pytest.raises(AnalysisError, match="name the one where all parts are kept"):
        measure(model, CORPUS, FEW, part=(1, 2))


# --- The command line -----------------------------------------------------------------------------


@pytest.fixture
def arguments(tiny_folder, tmp_path) -> list[str]:
    """Of a measurement of nine shards."""
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS * 72), encoding="utf-8")
    given = ["measure", "--model", str(tiny_folder("bert")), "--data", str(lines)]
    return [*given, "--limit", "4500", "--seed", "3", "--metrics", FEW]


def measure_parts(arguments: list[str], *numbers: int) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        assert main([*arguments, "--part", f"{number}/4"]) == 0


def test_a_killed_job_is_run_again_and_a_command_merges(arguments, tmp_path, capsys):
    out = ["--out", str(tmp_path / "parts")]
    job = subprocess.Popen(
        [*EAGER, *arguments, "--part", "4/4", *out],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    wait_until_stopped(job)
    job.kill()
    job.wait()
    measure_parts([*arguments, *out], 1, 2, 3)
    assert main(["merge", out[1]]) == 1
    assert "lacks part 4 of 4: run what is missing again" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "run.json").exists()
    measure_parts([*arguments, *out], 4)
    read = capsys.readouterr().out
    assert "part 4 of 4, " in read
    assert "part-4-of-4.npz" in read
    assert main(["merge", out[1], "--format", "csv"]) == 0
    assert "wrote 2 tables" in capsys.readouterr().out
    whole = tmp_path / "whole"
    assert main([*arguments, "--out", str(whole), "--format", "csv"]) == 0
    for name in FEW.split(","):
        path = f"{name}.csv"
        assert (tmp_path / "parts" / path).read_bytes() == (whole / path).read_bytes()
    runs = [json.loads((folder / "run.json").read_text()) for folder in (Path(out[1]), whole)]
    assert_same_run(*runs)
    assert runs[0]["seed"] == 3
    # The folder belongs to this measurement now, and can be measured into without parts.
    assert main([*arguments, *out]) == 0


def test_jobs_write_into_one_folder_at_once(arguments, tmp_path):
    out = ["--out", str(tmp_path / "parts")]
    context = copies.context()
    # The first part twice, as when a job is put back into the queue and still runs.
    jobs = [
        context.Process(target=measure_parts, args=([*arguments, *out], *numbers))
        for numbers in ((1, 2), (3, 4, 1))
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(PATIENCE)
        assert job.exitcode == 0
    assert main(["merge", out[1]]) == 0
    whole = tmp_path / "whole"
    assert main([*arguments, "--out", str(whole)]) == 0
    for path in whole.glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()


@pytest.mark.parametrize("part", ["0/4", "5/4", "a/b", "3", "1/0", "-1/4", "1/4/2", "1.0/4"])
def test_a_malformed_part_is_one_line(arguments, tmp_path, capsys, part):
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*arguments, f"--part={part}", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert err.startswith(f"error: argument --part: {part!r} is no part: give its number")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["measure", "--format", "csv"], "--format is of the tables that `merge` writes"),
        (["measure", "--tokens", "norm<10x"], "which every part would repeat"),
        (["--vectors"], "leave --part out"),
    ],
)
def test_what_a_part_has_no_use_for_is_refused(arguments, tmp_path, capsys, given, words):
    command = [*arguments, *given[1:]]
    if given == ["--vectors"]:
        command = ["measure", "--vectors", str(tmp_path)]
    assert main([*command, "--part", "1/4", "--out", str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_measurement_takes_no_parts(arguments, tmp_path, capsys):
    out = ["--out", str(tmp_path / "parts")]
    other = [*arguments[:4], "news", *arguments[5:-4], "--limit", "3", "--metrics", FEW]
    assert main([*other, *out]) == 0
    assert main([*arguments, "--part", "1/4", *out]) == 1
    assert "give another folder" in capsys.readouterr().err


# --- Devices --------------------------------------------------------------------------------------


class OnTwoDevices(Long):
    """It brings two simulated devices along, wherever it is unpacked."""

    def __setstate__(self, state: dict) -> None:
        from analysis_lib.capture import source
        from analysis_lib.models import devices

        vars(self).update(state)
        devices.of_kind = lambda kind: ["cpu:0", "cpu:1"]
        # The weights themselves say no more than that they are on the processor.
        source.ModelSource.devices = property(lambda self: [self.model.spec.device])


def test_each_worker_has_a_device_of_its_own(model, measured_shards, copied_workers, monkeypatch):
    from analysis_lib.capture import source
    from analysis_lib.models import devices

    monkeypatch.setattr(devices, "of_kind", lambda kind: ["cpu:0", "cpu:1"])
    of_spec = property(lambda self: [self.model.spec.device])
    monkeypatch.setattr(source.ModelSource, "devices", of_spec)
    chosen = [OnTwoDevices(1.1)]
    expected = measure(model, CORPUS, chosen, progress=False)
    assert expected.run["devices"] == ["cpu"]
    # This process computes on the first device, under the name that it was given.
    found = measure(model, CORPUS, chosen, workers=2, progress=False)
    assert found.run["devices"] == ["cpu", "cpu:1"]
    assert csv(found) == csv(expected)
    found = measure(model, CORPUS, chosen, workers=4, progress=False)
    assert {"cpu", "cpu:1"} <= {*found.run["devices"]} <= {"cpu", "cpu:0", "cpu:1"}
    # One that is named is that of all workers.
    named = load_model(model.name, device="cpu:1")
    found = measure(named, CORPUS, chosen, workers=3, progress=False)
    assert found.run["devices"] == ["cpu:1"]


def test_workers_take_devices_in_turn(monkeypatch):
    from analysis_lib.models import devices

    three = [f"cuda:{index}" for index in range(3)]
    monkeypatch.setattr(devices, "of_kind", lambda kind: three)
    first = torch.device("cuda:0")
    assert devices.for_workers("cuda", first, 5) == [*three, *three[:2]]
    # The program has chosen another one, by ``torch.cuda.set_device``.
    assert devices.for_workers("cuda", torch.device("cuda:2"), 3) == [three[2], *three[:2]]
    assert devices.for_workers("cuda:1", torch.device("cuda:1"), 3) == ["cuda:1"] * 3


def test_the_devices_of_all_parts_are_in_the_run(model, tmp_path, measured_shards, monkeypatch):
    for number in (1, 2):
        spec = replace(model.spec, device=f"cpu:{number}")
        there = load_model(model.name)
        there.spec = spec
        from analysis_lib.capture import source

        of_spec = property(lambda self: [self.model.spec.device])
        monkeypatch.setattr(source.ModelSource, "devices", of_spec)
        measure(there, CORPUS, FEW, part=(number, 2), checkpoints=tmp_path, progress=False)
    assert merge_parts(tmp_path).run["devices"] == ["cpu:1", "cpu:2"]
