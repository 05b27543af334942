"""What commands write beside the files of others: nothing of these is replaced, removed or taken
for ours.
"""

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest

from analysis_lib.cli import _parser, main
from analysis_lib.errors import AnalysisError
from analysis_lib.files import LOCK, SEAL, Output

ROOT = Path(__file__).resolve().parents[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def written(output: Output, **files: str) -> None:
    with output.scratch() as new:
        for name, text in files.items():
            path = new / f"{name}.txt"
            path.write_text(text)


@pytest.fixture
def output(tmp_path) -> Output:
    return Output(tmp_path / "out", "measure", ("model", "lines.txt"), "run.txt")


def test_the_same_command_replaces_its_files_and_nothing_else(output):
    written(output, a="1", b="1", run="1")
    (output.folder / "notes.md").write_text("mine")
    written(output, b="2", c="2", run="2")
    found = contents(output.folder)
    seal = json.loads(found.pop(SEAL))
    assert found == {"b.txt": b"2", "c.txt": b"2", "run.txt": b"2", "notes.md": b"mine"}
    assert (seal["program"], seal["command"], seal["inputs"]) == (
        "analysis-lib",
        "measure",
        ["model", "lines.txt"],
    )
    assert seal["files"] == {
        f"{name}.txt": [hashlib.sha256(b"2").hexdigest()] for name in ("b", "c", "run")
    }


def test_folders_are_made_and_go_with_the_last_file_that_is_ours(output, tmp_path):
    for name in ("pages/one.html", "tables/deep/a.csv"):
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(name)
    output.replace(tmp_path / "site")
    (output.folder / "pages" / "mine.html").write_text("mine")
    written(output, run="1")
    assert {*contents(output.folder)} == {SEAL, "run.txt", "pages/mine.html"}
    assert not (output.folder / "tables").exists()


def refused(output: Output, message: str, **files: str) -> None:
    before = contents(output.folder)
    with pytest.raises(AnalysisError, match=message) as error:
        written(output, **files)
    assert len(str(error.value).splitlines()) == 1
    assert contents(output.folder) == before


def test_a_file_that_was_changed_is_not_replaced(output):
    written(output, a="1", run="1")
    (output.folder / "a.txt").write_text("1, and what I noted")
    refused(output, r"a\.txt has been changed since analysis-lib wrote it: move it", a="2", run="2")
    refused(output, r"a\.txt has been changed", b="2", run="2")
    (output.folder / "a.txt").unlink()
    written(output, a="2", run="2")
    assert contents(output.folder)["a.txt"] == b"2"


def test_a_file_of_the_name_of_a_new_one_is_not_replaced(output):
    written(output, run="1")
    (output.folder / "a.txt").write_text("mine")
    refused(output, r"a\.txt was not written by analysis-lib: move it", a="2", run="2")
    written(output, run="2")
    assert contents(output.folder)["a.txt"] == b"mine"


def test_what_is_in_the_way_is_named(output, tmp_path):
    (tmp_path / "site" / "tables").mkdir(parents=True)
    (tmp_path / "site" / "tables" / "a.csv").write_text("1")
    output.folder.mkdir()
    (output.folder / "tables").write_text("mine")
    with pytest.raises(AnalysisError, match="tables is a file: move it"):
        output.replace(tmp_path / "site")
    assert contents(output.folder) == {"tables": b"mine"}
    (output.folder / "run.txt").mkdir()
    refused(output, r"run\.txt is a folder: move it", run="1")


@pytest.mark.parametrize(
    "other",
    [
        ("compare", ("model", "lines.txt")),
        ("measure", ("other", "lines.txt")),
        ("measure", ("model", "lines.csv")),
    ],
)
def test_the_folder_of_another_command_model_or_corpus_is_refused(output, other):
    written(output, run="1")
    command, inputs = other
    message = "out holds what analysis-lib measure wrote of model, lines.txt: give another folder"
    refused(Output(output.folder, command, inputs, "run.txt"), message, run="2")


def test_inputs_are_told_apart_by_where_they_lie_and_may_be_moved_with_the_folder(
    tmp_path, monkeypatch
):
    for place in ("here", "there"):
        (tmp_path / place / "checkpoint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    written(Output(out, "measure", ("here/checkpoint", "news"), "run.txt"), run="1")
    assert str(tmp_path) not in (out / SEAL).read_text()
    assert "here" not in (out / SEAL).read_text()
    other = Output(out, "measure", ("there/checkpoint", "news"), "run.txt")
    refused(other, "wrote of other inputs, called checkpoint, news: give another folder", run="2")
    same = Output(tmp_path / "out", "measure", (f"{tmp_path}/here/checkpoint", "news"), "run.txt")
    written(same, run="2")
    (tmp_path / "moved").mkdir()
    for name in ("here", "out"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    monkeypatch.chdir(tmp_path / "moved")
    written(Output(out, "measure", ("here/checkpoint", "news"), "run.txt"), run="3")


@pytest.mark.parametrize(
    "seal",
    [
        "",
        "{",
        "[" * 100_000,
        "[1]",
        '{"program": "another", "files": {}}',
        '{"program": "analysis-lib", "files": ["a.txt"]}',
        '{"program": "analysis-lib", "files": {"a.txt": "b"}}',
        '{"program": "analysis-lib", "files": {"../a.txt": []}}',
        '{"program": "analysis-lib", "files": {"/a.txt": []}}',
        '{"program": "analysis-lib", "files": {"run.txt": []}}',
    ],
)
def test_a_damaged_or_foreign_seal_makes_nothing_ours(output, seal):
    output.folder.mkdir()
    (output.folder / SEAL).write_text(seal)
    (output.folder / "run.txt").write_text("mine")
    refused(output, "give another folder", run="2")


def test_a_link_is_followed(output, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    output.folder.symlink_to(tmp_path / "elsewhere")
    written(output, run="1")
    written(output, run="2")
    assert output.folder.is_symlink()
    assert (tmp_path / "elsewhere" / "run.txt").read_text() == "2"


def test_one_writes_at_a_time_and_a_lock_that_was_left_is_none(output):
    output.folder.mkdir()
    (output.folder / LOCK).write_text("")
    with (
        output.alone(),
        pytest.raises(AnalysisError, match="another run is writing to"),
        output.alone(),
    ):
        pass
    assert not [*output.folder.iterdir()]


# --- The ways to lose files: each command beside the files of others
# ----------------------------------------------

FOREIGN = {"tables": ["customers"]}
MINE = {"customers.csv": "name\nAnn\n", "thesis.txt": "chapter one", "src/code.py": "print()"}


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A folder of somebody's."""
    for name, text in MINE.items():
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(text)
    return tmp_path / "theirs"


@pytest.fixture
def nothing_is_measured(monkeypatch) -> None:
    """What would take long fails: everything is refused before it."""
    for name in (
        "analysis_lib.load_model",
        "analysis_lib.measure",
        "analysis_lib.measure_vectors",
        "analysis_lib.compare",
        "analysis_book.training.dynamics.dynamics",
        "analysis_book.papers.fosse.trials.trials",
        "analysis_book.build.reports.load_model",
        "analysis_book.training.recipes._train",
        "analysis_book.training.pretraining._train",
    ):
        monkeypatch.setattr(name, None)


MEASURE = ("measure", "--model", "minilm", "--data", "news", "--limit", "3")
VECTORS = ("measure", "--vectors", "vectors")
COMPARE = ("compare", "minilm", "smollm2-135m", "--data", "news", "--limit", "3")
DYNAMICS = ("dynamics", "bert-4", "--data", "news")
CLASSIFIERS = ("classifiers", "--data", "reviews")
REPORT = ("report", "minilm", "--data", "news")
PRETRAIN = ("pretrain", "--data", "news")
TRAIN = ("train", "digits-vit")


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    ("command", "foreign"),
    [
        (MEASURE, "run.json"),
        (MEASURE, "anisotropy.parquet"),
        ((*MEASURE, "--format", "csv"), "anisotropy.csv"),
        (VECTORS, "run.json"),
        (VECTORS, "mean_vector.parquet"),
        (COMPARE, "run.json"),
        (COMPARE, "anisotropy_difference.parquet"),
        (DYNAMICS, "dynamics.json"),
        (DYNAMICS, "losses.parquet"),
        (CLASSIFIERS, "results.json"),
        (CLASSIFIERS, "trials.csv"),
        (REPORT, "report.json"),
        (REPORT, "index.html"),
        (PRETRAIN, "pretraining.json"),
        (PRETRAIN, "seed_0.csv"),
        (TRAIN, "training.json"),
    ],
)
def test_a_foreign_file_of_our_name_is_refused_before_anything_is_measured(
    command, foreign, theirs, capsys
):
    (theirs / foreign).write_text(json.dumps(FOREIGN))
    before = contents(theirs)
    assert main([*command, "--out", str(theirs)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search("give (another|a new|an empty) (folder|one)", line)
    assert contents(theirs) == before


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("command", [MEASURE, COMPARE, DYNAMICS, CLASSIFIERS, REPORT])
def test_the_folder_that_another_command_has_sealed_is_refused(command, tmp_path, capsys):
    written(
        Output(tmp_path / "out", "pretrain", ("lines.txt",), "pretraining.txt"), pretraining="1"
    )
    before = contents(tmp_path)
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    assert (
        "out holds what analysis-lib pretrain wrote of lines.txt: give another"
        in capsys.readouterr().err
    )
    assert contents(tmp_path) == before


def test_a_measurement_beside_the_files_of_others_touches_none(theirs, tiny_folder):
    command = ["measure", "--model", str(tiny_folder("bert")), "--data", "news", "--limit", "3"]
    for options in ((), ("--format", "csv"), ("--metrics", "mean_vector")):
        assert main([*command, *options, "--out", str(theirs)]) == 0
        assert {name: (theirs / name).read_text() for name in MINE} == MINE
    assert {*contents(theirs)} == {*MINE, "mean_vector.parquet", "run.json", SEAL}


def test_no_two_commands_of_the_readme_write_into_one_folder():
    using = ROOT / "book" / "using.md", *(ROOT / "book" / "using").glob("*.md")
    for pages in ([ROOT / "README.md"], using):
        text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        text = text.replace("\\\n", " ")
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines() if " --out " in line]
        folders = [shlex.split(line, comments=True) for line in lines]
        folders = [words[words.index("--out") + 1].rstrip("/") for words in folders]
        assert folders
        assert len({*folders}) == len(folders), sorted(folders)


def test_no_two_examples_of_the_help_write_into_one_folder():
    (commands,) = [
        action.choices for action in _parser()._actions if isinstance(action.choices, dict)
    ]
    folders = [
        folder
        for command in commands.values()
        for folder in re.findall(r"--out (\w+/\S+)", command.format_help())
    ]
    assert len(folders) > 5
    assert len({*folders}) == len(folders), sorted(folders)
