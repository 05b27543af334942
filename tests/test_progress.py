"""How far something is: a bar on a terminal, and in a log, where nothing is overwritten, now and
then a line.
"""

import io
import re
import sys

import huggingface_hub
import pytest
import tiny
from terminals import OfNotebook, Terminal

from analysis_lib import Replace, load_model, measure, progress
from analysis_lib.corpora import hub
from analysis_lib.measurement import interventions


@pytest.fixture
def often(monkeypatch) -> None:
    """A line in a log after each step."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e-9)


def shown(stream: io.StringIO, monkeypatch, show: bool | None = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in progress.bar(range(4), "minilm on news", unit="text", show=show):
        pass
    return stream.getvalue()


@pytest.mark.parametrize("show", [True, None])
def test_in_a_log_a_bar_is_lines(monkeypatch, often, show):
    written = shown(io.StringIO(), monkeypatch, show)
    assert "\r" not in written
    lines = written.splitlines()
    assert len(lines) >= 4
    for line in lines:
        assert re.fullmatch(r"minilm on news: \d of 4 texts, [\d:?]+ left", line)
    assert lines[-1].startswith("minilm on news: 4 of 4 texts")


def test_in_a_log_what_takes_less_than_a_minute_says_nothing(monkeypatch):
    assert shown(io.StringIO(), monkeypatch) == ""


def test_a_terminal_and_a_notebook_have_a_bar(monkeypatch):
    for stream in (Terminal(), OfNotebook()):
        written = shown(stream, monkeypatch)
        assert "\rminilm on news: 100%" in written
        assert "4/4" in written


@pytest.mark.parametrize("stream", [io.StringIO, Terminal, OfNotebook])
def test_a_bar_that_is_not_to_be_shown_is_not(monkeypatch, often, stream):
    assert shown(stream(), monkeypatch, show=False) == ""


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"intervention": Replace("residual", layers=[1], dimensions=[0], by="mean")}, ["first pass"]),
        ({"tokens": "norm<10x"}, ["norms"]),
        ({"intervention": Replace("residual", layers=[1], dimensions=[0], by="mean"), "tokens": "norm<10x"},
         ["first pass", "norms"]),
    ],
)  # fmt: skip
def test_the_passes_before_a_measurement_are_shown(monkeypatch, tiny_folder, settings, passes):
    monkeypatch.setattr(interventions, "_latest", {})
    monkeypatch.setattr(interventions, "ITEMS", 3)
    bars = []

    def bar(**given: object) -> object:
        made = progress.bar(**given)
        bars.append((given, made))
        return made

    monkeypatch.setattr(interventions, "bar", bar)
    monkeypatch.setattr(sys, "stderr", Terminal())
    texts = [*tiny.TEXTS]
    measure(load_model(str(tiny_folder("bert"))), texts, "anisotropy", **settings)
    assert [given["description"].rpartition(", ")[2] for given, _ in bars] == passes
    for given, made in bars:
        assert given["show"]
        assert made.n == made.total == len(texts)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_in_a_log_the_hub_shows_no_bar(monkeypatch, tmp_path, stream):
    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream := stream())
    huggingface_hub.utils.enable_progress_bars()
    try:
        hub._fetch("owner/name", lambda *_, **__: str(tmp_path))
        assert huggingface_hub.utils.are_progress_bars_disabled() != stream.isatty()
    finally:
        huggingface_hub.utils.enable_progress_bars()
