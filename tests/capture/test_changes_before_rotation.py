"""Interventions on queries and keys before their rotation, against the model's own rotation."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import naive
import pytest
import tiny
import torch
from models.test_any_transformer import built, reads
from reference import DoublePrecision
from test_interventions import by_text, changed
from torch import Tensor, nn

from analysis_lib import AnalysisError, Corpus, load_model
from analysis_lib.capture.interventions import Replace

TEXTS = tiny.TEXTS[:4]
CORPUS = Corpus("some", tuple(TEXTS))
# Halves, neighbours, a part of each head, norms before it, windows with their own angles, sinks.
TYPES = ("llama", "cohere", "gpt_neox", "qwen3", "gemma3_text", "gpt_oss")
Change = Callable[[int, Tensor], Tensor]


@contextlib.contextmanager
def rotation_of(model: nn.Module, which: int, change: Change) -> Iterator[None]:
    """Inside it, what the model's function of rotation receives is changed.

    Args:
        which: 0 for queries, 1 for keys.
        change: makes new vectors, utterance x head x token x dim, of the number of the call and
            those that are given.
    """
    source = sys.modules[type(model).__module__]
    rotate = source.apply_rotary_pos_emb
    calls = iter(range(10**6))

    def changed(*given: Tensor, **named: object) -> tuple[Tensor, Tensor]:
        vectors = list(given)
        vectors[which] = change(next(calls), vectors[which])
        return rotate(*vectors, **named)

    with mock.patch.object(source, "apply_rotary_pos_emb", changed):
        yield


def states(model: nn.Module, text: str) -> list[Tensor]:
    """The outputs of the blocks."""
    inputs = reads()(text, return_tensors="pt")
    kept = []
    layers = model.get_submodule("layers")
    with contextlib.ExitStack() as stack:
        for block in layers:
            hook = block.register_forward_hook(
                lambda _, __, given: kept.append(given[0] if isinstance(given, tuple) else given)
            )
            stack.callback(hook.remove)
        with torch.no_grad(), DoublePrecision():
            model(**inputs)
    return [hidden[0] for hidden in kept]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("model_type", TYPES)
def test_without_the_mean_that_the_models_own_rotation_receives(model_type, which):
    model = naive.in_double(built(model_type)).eval()
    received: list[Tensor] = []

    def note(call: int, vectors: Tensor) -> Tensor:
        if call == 0:
            received.append(vectors[0])
        return vectors

    for text in TEXTS:
        with rotation_of(model, which, note):
            plain = states(model, text)
    mean = torch.cat(received, 1).mean(1, keepdim=True)

    def without_mean(call: int, vectors: Tensor) -> Tensor:
        return vectors - mean if call == 0 else vectors

    site = ("query_unrotated", "key_unrotated")[which]
    loaded = load_model(model, processor=reads())
    found = by_text(changed(loaded, CORPUS, Replace(site, layers=(1,), by="centre")), CORPUS)
    for text, mine in zip(TEXTS, found, strict=True):
        with rotation_of(model, which, without_mean):
            expected = states(model, text)
        for layer, hidden in enumerate(expected, 1):
            torch.testing.assert_close(mine[layer][0], hidden, rtol=1e-9, atol=1e-9)
    # The mean key before rotation acts, as no mean key after it does.
    assert (expected[0] - plain[0]).abs().max() > 1e-4


def test_tokens_that_do_not_change_keep_their_bits():
    loaded = load_model(built("llama"), processor=reads())
    first = Replace("query_unrotated", layers=(2,), dimensions=(3,), by="zero", tokens=("first",))
    runs = [by_text(changed(loaded, CORPUS, given), CORPUS) for given in ((), first)]
    for before, after in zip(*runs, strict=True):
        same = (before[2][0] == after[2][0]).all(-1)
        assert same[1:].all()
        assert torch.equal(before[1][0], after[1][0])


def test_a_model_that_does_not_rotate_has_no_such_site():
    model, processor = tiny.build("bert")
    loaded = load_model(model, processor=processor)
    with pytest.raises(AnalysisError, match=r"has no key_unrotated .*give another site"):
        changed(loaded, CORPUS, Replace("key_unrotated", by="mean"))
