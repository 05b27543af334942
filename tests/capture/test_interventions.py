"""Interventions equal hooks on plain eager models, and change nothing else."""

import functools
import itertools

import pytest
import tiny
import torch
from intervened import Arm, Plain

from analysis_lib import Corpus, LoadedModel, load_model
from analysis_lib.capture import Activations, Reading, Settings, batches, run
from analysis_lib.capture.interventions import Replace
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.metrics.accumulator import GROUPS

MODELS = ("bert", "gpt2", "llama", "mpnet", "vit", "t5")
# Two of one length, so that some have padding and some have none.
TEXTS = [tiny.TEXTS[0], tiny.TEXTS[3], tiny.TEXTS[2], tiny.TEXTS[4]]
SIDES = ("query_side", "key_side", "value_side")
HEADS = ("query", "key", "value")
SITES = ("residual", "attention_input", *SIDES, *HEADS)
GIVEN = ((1.0, 2.0, 0.5), (0.5, -1.0, 3.0))


def given_directions(width: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple((row * width)[:width]) for row in GIVEN)


@functools.cache
def plain(name: str) -> Plain:
    return Plain(*tiny.build(name))


@functools.cache
def loaded(name: str) -> LoadedModel:
    model, reads = tiny.build(name)
    return load_model(model.double(), processor=reads)


def items(name: str) -> list:
    return TEXTS if tiny.kind(name) == "text" else list(tiny.items(name))[:3]


def corpus_of(name: str) -> Corpus:
    if tiny.kind(name) == "text":
        return Corpus(name, tuple(TEXTS))
    return Corpus(name, tiny.corpus(name).items[:3], kind="image")


def changed(model: LoadedModel, corpus: Corpus, intervention: object, **settings) -> list[Activations]:
    """All layers of all batches, with an intervention."""
    settings, found = Settings(intervention=intervention, **settings), []
    changes, groups = changes_of(model, corpus, settings), corpus.groups(GROUPS)
    needs = frozenset({"hidden", "query", "key", "weights"} - model.lacking.keys())
    for batch in batches(model, corpus.items, groups, settings, Reading()):
        run(model, batch, needs, found.append, "flatten", changes)
    return found


def by_text(found: list[Activations], corpus: Corpus) -> list[dict[int, tuple]]:
    """Of each text, by layer, its hidden vectors and the entropies of its attention rows."""
    groups = corpus.groups(GROUPS)
    assert len({*groups}) == len(corpus)
    texts = [{} for _ in groups]
    for layer in found:
        if layer.stack == "cross":
            continue
        for place, group in enumerate(layer.tokens.groups):
            mask = layer.tokens.mask[place]
            rows = None if layer.rows is None else layer.rows.entropy[place][:, mask]
            texts[groups.index(group)][layer.layer] = layer.spaces["hidden"].values[place, 0][mask], rows
    return texts


def assert_equal(model: LoadedModel, corpus: Corpus, arm: Arm, replace: Replace, within: float = 1e-9) -> None:
    ours, theirs = by_text(changed(model, corpus, replace), corpus), arm.ran(replace)
    for mine, text in zip(ours, theirs, strict=True):
        for layer, hidden in text.hidden.items():
            torch.testing.assert_close(mine[layer][0].double(), hidden, rtol=within, atol=within, msg=str(replace))
        for layer, weights in text.weights.items():
            entropy = torch.special.entr(weights).sum(-1)
            torch.testing.assert_close(mine[layer][1].double(), entropy, rtol=within, atol=within, msg=str(replace))


def widths(name: str, site: str) -> int:
    model = loaded(name)
    (layer, *_) = [layer for layer in plain_layers(name) if layer.spaces.get("key") is not None]
    return layer.spaces["key"].values.shape[-1] if site in HEADS else model.model.config.hidden_size


@functools.cache
def plain_layers(name: str) -> list[Activations]:
    return changed(loaded(name), corpus_of(name), ())


def components(width: int) -> list[dict]:
    directions = given_directions(width)
    return [
        {},
        {"dimensions": (0, 3)},
        {"dimensions": (0, 3), "but": True},
        {"directions": "mean"},
        {"directions": 2},
        {"directions": directions},
        {"directions": directions[:1], "but": True},
    ]


@pytest.mark.parametrize(("name", "site"), [(n, s) for n in MODELS for s in SITES if not (n == "mpnet" and s in HEADS)])
def test_every_site_arm_and_component_equals_hooks_on_eager_attention(name, site):
    corpus, arm = corpus_of(name), Arm(plain(name), items(name), Replace(site))
    layers = sorted(arm.seen)
    # Whose turn it is: all tokens, one type or two, the first; one layer or all.
    tokens = itertools.cycle([None, ("other",), ("first",), None, ("first", "other")])
    some = itertools.cycle([layers[-1:], layers[:1], None])
    for by, component in itertools.product(("mean", "type_mean", "zero", "centre"), components(widths(name, site))):
        replace = Replace(site, by=by, tokens=next(tokens), layers=next(some), **component)
        assert_equal(loaded(name), corpus, arm, replace)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
@pytest.mark.parametrize("tokens", [("first",), ("other",), ("first", "other"), None])
def test_masked_keys_equal_a_mask_on_eager_attention(name, tokens):
    arm = Arm(plain(name), items(name), Replace("weights"))
    for layers in (None, (1,)):
        assert_equal(loaded(name), corpus_of(name), arm, Replace("weights", tokens=tokens, layers=layers))
