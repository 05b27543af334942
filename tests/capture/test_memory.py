"""Batches that do not fit the memory: they are made smaller, and what does not fit is said."""

import logging

import pandas as pd
import pytest
import tiny
import torch

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.capture import checked_pass, memory

CUDA = "CUDA out of memory. Tried to allocate 42.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
CPU = "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
TEXTS = [f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS][:24]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(str(tiny_folder("bert")))


@pytest.fixture
def room(monkeypatch):
    """A function that leaves room for batches of so many tokens."""

    def leave(tokens: int, error: Exception) -> None:
        def forward(loaded, batch, *given):
            if batch.tokens.mask.numel() > tokens:
                raise error
            return captured(loaded, batch, *given)

        captured = checked_pass.captured_pass
        monkeypatch.setattr(checked_pass, "captured_pass", forward)

    return leave


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(CUDA), RuntimeError(CPU), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_a_batch_that_does_not_fit_is_halved(model, room, error, caplog):
    expected = measure(model, TEXTS, progress=False, tokens_per_batch=512)
    room(200, error)
    with caplog.at_level(logging.WARNING):
        tables = measure(model, TEXTS, progress=False, tokens_per_batch=512)
    assert tables.report.halved == 1
    assert "its batches did not fit the memory" in caplog.text
    assert tables.run["settings"]["tokens_per_batch"] == 512
    assert (tables.report.utterances, tables.report.tokens) == (24, expected.report.tokens)
    for name in expected:
        pd.testing.assert_frame_equal(tables[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_text_that_does_not_fit_is_one_line_that_says_so(model, room):
    room(4, torch.OutOfMemoryError(CUDA))
    wanted = r"bert.*: out of memory on cpu \(42.00 GiB asked for\), for a batch of 1 of up to \d+ tokens: give shorter"
    with pytest.raises(AnalysisError, match=wanted) as caught:
        measure(model, TEXTS[:3], progress=False)
    assert "\n" not in str(caught.value)
    assert "okenizer" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_other_errors_are_none_of_memory():
    assert not memory.is_out_of_memory(RuntimeError("shapes do not agree"))
    assert not memory.is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert memory.is_out_of_memory(caught.value)
