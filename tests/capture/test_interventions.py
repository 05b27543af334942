"""Interventions equal hooks on plain eager models, and change nothing else."""

import functools
import itertools

import naive
import pytest
import shrunk
import tiny
import torch
from intervened import Arm, Plain

from analysis_lib import AnalysisError, Corpus, LoadedModel, load_model
from analysis_lib.capture import Activations, Reading, Settings, batches, checked_pass, run
from analysis_lib.capture.interventions import Replace, interventions
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


def changed(
    model: LoadedModel, corpus: Corpus, intervention: object, **settings
) -> list[Activations]:
    """All layers of all batches, with an intervention."""
    settings, found = Settings(intervention=intervention, **settings), []
    changes, groups = changes_of(model, corpus, settings), corpus.groups(GROUPS)
    needs = frozenset({"hidden", "query", "key", "weights"} - model.unsupported.keys())
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
            rows = None if layer.attention is None else layer.attention.entropy[place][:, mask]
            texts[groups.index(group)][layer.layer] = (
                layer.spaces["hidden"].values[place, 0][mask],
                rows,
            )
    return texts


def assert_equal(
    model: LoadedModel, corpus: Corpus, arm: Arm, replace: Replace, within: float = 1e-9
) -> None:
    ours, theirs = by_text(changed(model, corpus, replace), corpus), arm.ran(replace)
    for mine, text in zip(ours, theirs, strict=True):
        for layer, hidden in text.hidden.items():
            torch.testing.assert_close(
                mine[layer][0].double(), hidden, rtol=within, atol=within, msg=str(replace)
            )
        for layer, weights in text.weights.items():
            entropy = torch.special.entr(weights).sum(-1)
            torch.testing.assert_close(
                mine[layer][1].double(), entropy, rtol=within, atol=within, msg=str(replace)
            )


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


@pytest.mark.parametrize(
    ("name", "site"), [(n, s) for n in MODELS for s in SITES if not (n == "mpnet" and s in HEADS)]
)
def test_every_site_arm_and_component_equals_hooks_on_eager_attention(name, site):
    """Of BERT, each arm with each component at every site; of the others, a quarter of these pairs,
    in turn.
    """
    corpus, arm = corpus_of(name), Arm(plain(name), items(name), Replace(site))
    layers = sorted(arm.seen)
    # Whose turn it is: all tokens, one type or two, the first; one layer or all.
    tokens = itertools.cycle([None, ("other",), ("first",), None, ("first", "other")])
    some = itertools.cycle([layers[-1:], layers[:1], None])
    pairs = itertools.product(
        ("mean", "type_mean", "zero", "centre"), components(widths(name, site))
    )
    every = [
        Replace(site, by=by, tokens=next(tokens), layers=next(some), **component)
        for by, component in pairs
    ]
    # Of seven components, so that the four quarters have them all, and all arms.
    for replace in every if name == "bert" else every[SITES.index(site) % 4 :: 4]:
        assert_equal(loaded(name), corpus, arm, replace)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
@pytest.mark.parametrize("tokens", [("first",), ("other",), ("first", "other"), None])
def test_masked_keys_equal_a_mask_on_eager_attention(name, tokens):
    arm = Arm(plain(name), items(name), Replace("weights"))
    for layers in (None, (1,)):
        assert_equal(
            loaded(name), corpus_of(name), arm, Replace("weights", tokens=tokens, layers=layers)
        )


@pytest.mark.parametrize("replace", [
    Replace("key_side", dimensions=(3, 99), by="mean", layers=(2, 3)),
    Replace("residual", dimensions=(99,), by="type_mean", tokens=("cls", "sep", "punct"), layers=(3,)),
])  # fmt: skip
def test_the_bundled_model(minilm, replace):
    plain_model = Plain(minilm.model, minilm.tokenizer)
    texts = [text for text in TEXTS if "," in text]
    corpus = Corpus("some", tuple(texts))
    assert_equal(minilm, corpus, Arm(plain_model, texts, replace), replace, within=1e-5)


# --- What no attention sees -----------------------------------------------------------------------


def weights_of(name: str, replace: Replace | None) -> list[torch.Tensor]:
    """Of every text and layer, the weights of eager attention, by hooks alone."""
    arm = Arm(plain(name), items(name), replace or Replace("key_side", layers=()))
    return [weights for ran in arm.ran() for weights in ran.weights.values()]


def entropies(name: str, replace: Replace) -> torch.Tensor:
    found = changed(loaded(name), corpus_of(name), replace)
    entropies = torch.cat([layer.attention.entropy.flatten() for layer in found if layer.attention])
    return entropies[entropies > 0]


@pytest.mark.parametrize(
    ("name", "rotary"), [("bert", False), ("gpt2", False), ("vit", False), ("llama", True)]
)
def test_zero_and_mean_are_the_same_on_the_key_side_without_rotation(name, rotary):
    zero, mean = (Replace("key_side", dimensions=(0, 3, 5), by=by) for by in ("zero", "mean"))
    parted = max(
        (a - b).abs().max()
        for a, b in zip(weights_of(name, zero), weights_of(name, mean), strict=True)
    )
    ours = (entropies(name, zero) - entropies(name, mean)).abs().max()
    assert (parted > 1e-4 and ours > 1e-4) if rotary else (parted < 1e-8 and ours < 1e-8)
    assert (
        entropies(name, zero) - entropies(name, Replace("key_side", by="nothing"))
    ).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_the_mean_key_as_it_enters_attention_is_invisible(name):
    """A constant added to all keys adds q_m · k̄ to all scores of row m, after any rotation,
    too.
    """
    centred, as_is = (weights_of(name, r) for r in (Replace("key", by="centre"), None))
    assert max((a - b).abs().sum(-1).max() / 2 for a, b in zip(centred, as_is, strict=True)) < 1e-6
    ours = entropies(name, Replace("key", by="centre")) - entropies(
        name, Replace("key", by="nothing")
    )
    assert ours.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_the_mean_query_does_is_its_product_with_centred_keys(name):
    """The weights without q̄ are softmax(S − q̄·(k_n − k̄)/√d'), whatever k̄ is."""
    arm, replace = (
        Arm(plain(name), items(name), Replace("query", layers=(1,))),
        Replace("query", by="centre", layers=(1,)),
    )
    keys = Arm(plain(name), items(name), Replace("key"))
    as_is, place = Arm(plain(name), items(name), Replace("query", layers=())).ran(), 0
    ours = by_text(changed(loaded(name), corpus_of(name), replace), corpus_of(name))
    query_mean, all_keys = torch.cat(arm.seen[1], 1).mean(1), torch.cat(keys.seen[1], 1)
    for text, mine in zip(as_is, ours, strict=True):
        weights, count = text.weights[1], text.weights[1].shape[-1]
        shared = len(weights) // len(all_keys)
        centred = (
            all_keys[:, place : place + count] - all_keys.mean(1, keepdim=True)
        ).repeat_interleave(shared, 0)
        change = torch.einsum("hd,hnd->hn", query_mean, centred) / centred.shape[-1] ** 0.5
        expected = (weights.log() - change[:, None]).softmax(-1)
        torch.testing.assert_close(
            mine[1][1], torch.special.entr(expected).sum(-1), rtol=1e-9, atol=1e-9
        )
        place += count


# --- What is drawn --------------------------------------------------------------------------------


def residual(name: str, replace: Replace, layer: int = 1) -> list[torch.Tensor]:
    return [
        text[layer][0]
        for text in by_text(changed(loaded(name), corpus_of(name), replace), corpus_of(name))
    ]


def places(vector: torch.Tensor, others: torch.Tensor) -> list[int]:
    """Which of others a vector is; kernels that keep no rows of attention round otherwise."""
    return ((others - vector).abs().max(1).values < 1e-9).nonzero().flatten().tolist()


@pytest.mark.parametrize("by", ["other", "other_of_type"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_others_are_whole_vectors_of_other_texts(name, by):
    before, after = (
        residual(name, Replace("residual", by="nothing")),
        residual(name, Replace("residual", (1,), by=by)),
    )
    types = [plain(name).inputs(item)[1][0] for item in items(name)]
    for text, vectors in enumerate(after):
        others = torch.cat([vector for place, vector in enumerate(before) if place != text])
        kinds = [kind for place, of_text in enumerate(types) if place != text for kind in of_text]
        for vector, kind in zip(vectors, types[text], strict=True):
            same = places(vector, others)
            assert same
            assert by == "other" or kind in {kinds[place] for place in same}
    assert sum(len(vectors.unique(dim=0)) for vectors in after) > len(after) * 2


def test_of_some_dimensions_those_of_one_token_come_together():
    replace = Replace("residual", (1,), dimensions=(2, 7, 11), by="other")
    before, after = residual("bert", Replace("residual", by="nothing")), residual("bert", replace)
    kept = [d for d in range(24) if d not in (2, 7, 11)]
    for text, vectors in enumerate(after):
        others = torch.cat([vector for place, vector in enumerate(before) if place != text])[
            :, [2, 7, 11]
        ]
        assert all(places(vector, others) for vector in vectors[:, [2, 7, 11]])
        assert torch.equal(vectors[:, kept], before[text][:, kept])


@pytest.mark.parametrize("directions", [None, 2])
def test_noise_has_the_mean_and_the_variance_of_what_it_replaces(directions):
    texts = tuple(
        " ".join(tiny.TEXTS[:6]) + f" {word}"
        for word in ("girl", "cone", "keys", "heads", "hi", "stop") * 10
    )
    corpus = Corpus("many", texts)
    replace = Replace("residual", (1,), directions=directions, by="noise")

    def vectors(replace: Replace) -> torch.Tensor:
        found = [layer for layer in changed(loaded("bert"), corpus, replace) if layer.layer == 1]
        return torch.cat(
            [layer.spaces["hidden"].values[:, 0][layer.tokens.mask] for layer in found]
        )

    before, after = vectors(Replace("residual", by="nothing")), vectors(replace)
    if directions:
        axes = torch.linalg.svd(before - before.mean(0), full_matrices=False)[2]
        before, after, rest = before @ axes[:2].T, after @ axes[:2].T, (before - after) @ axes[2:].T
        assert rest.abs().max() < 1e-9
    error = before.std(0) / len(before) ** 0.5
    assert ((after.mean(0) - before.mean(0)).abs() < 4.5 * error).all()
    assert (after.std(0) / before.std(0) - 1).abs().max() < 0.1
    assert torch.corrcoef(after.T).fill_diagonal_(0).abs().max() < 0.1


@pytest.mark.parametrize("by", ["noise", "other", "other_of_type"])
def test_what_is_drawn_depends_on_the_seed_alone(by):
    first, again, other = (
        residual("bert", Replace("residual", (1,), by=by, seed=seed)) for seed in (0, 0, 1)
    )
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_two_sites_of_a_layer_do_not_draw_alike():
    found = changed(
        loaded("bert"),
        corpus_of("bert"),
        [Replace("query", (1,), by="noise"), Replace("key", (1,), by="noise")],
    )
    query, key = (
        next(layer for layer in found if layer.layer == 1).spaces[space].values[0].flatten()
        for space in HEADS[:2]
    )
    assert abs(torch.corrcoef(torch.stack([query, key]))[0, 1]) < 0.5


# --- Which texts ----------------------------------------------------------------------------------


def test_the_others_are_the_groups_of_the_other_parity():
    corpus, replace = corpus_of("bert"), Replace("residual", (1,), by="mean", of="others")
    before, after = residual("bert", Replace("residual", by="nothing")), residual("bert", replace)
    groups = corpus.groups(GROUPS)
    assert {group % 2 for group in groups} == {0, 1}
    for group, vectors in zip(groups, after, strict=True):
        theirs = torch.cat(
            [x for other, x in zip(groups, before, strict=True) if other % 2 != group % 2]
        )
        torch.testing.assert_close(
            vectors, theirs.mean(0).expand_as(vectors), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("by", ["other", "other_of_type"])
def test_vectors_of_others_are_of_the_other_parity(by):
    groups = corpus_of("bert").groups(GROUPS)
    before = residual("bert", Replace("residual", by="nothing"))
    after = residual("bert", Replace("residual", (1,), by=by, of="others", tokens=("cls", "other")))
    for group, vectors, own in zip(groups, after, before, strict=True):
        theirs = torch.cat(
            [x for other, x in zip(groups, before, strict=True) if other % 2 != group % 2]
        )
        changed_ones = [v for v, o in zip(vectors, own, strict=True) if not torch.equal(v, o)]
        assert changed_ones
        assert all(places(vector, theirs) for vector in changed_ones)


def test_a_type_that_the_other_half_lacks_is_refused():
    """Of four texts in groups 0, 5, 10 and 15, only even ones have punctuation."""
    corpus = Corpus("half", ("Hi, Hi.", "Hi Hi", "Keys.", "Keys Hi"))
    for by in ("type_mean", "other_of_type"):
        with pytest.raises(
            AnalysisError, match=r"no token of type punct.*give more texts, or other tokens"
        ):
            changed(loaded("bert"), corpus, Replace("residual", by=by, of="others"))
        changed(loaded("bert"), corpus, Replace("residual", by=by, of="others", tokens=("cls",)))


def test_texts_without_a_token_of_the_type_stay_as_they_are():
    corpus = Corpus("half", ("Hi, Hi.", "Hi Hi", "Keys.", "Keys Hi"))
    before, after = (by_text(changed(loaded("bert"), corpus, r), corpus) for r in
                     ((), Replace("residual", by="mean", tokens=("punct",))))  # fmt: skip
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old[3][0], new[3][0]) == (place % 2 == 1)
        assert new[3][0].isfinite().all()


@pytest.mark.parametrize("by", ["mean", "zero", "type_mean", "centre"])
@pytest.mark.parametrize("name", ["bert", "llama", "mpnet", "t5"])
def test_padding_and_the_other_texts_of_a_batch_change_nothing(name, by):
    corpus, replace = corpus_of(name), Replace("key_side", by=by, dimensions=(0, 3, 4))
    alone = by_text(changed(loaded(name), corpus, replace, tokens_per_batch=1), corpus)
    together = by_text(changed(loaded(name), corpus, replace, tokens_per_batch=10**5), corpus)
    for one, other in zip(alone, together, strict=True):
        for layer in one:
            torch.testing.assert_close(one[layer][0], other[layer][0], rtol=1e-9, atol=1e-9)


def test_special_tokens_are_changed_whether_or_not_they_count():
    corpus, replace = corpus_of("bert"), Replace("residual", (1,), tokens=("cls",))
    found = [
        by_text(changed(loaded("bert"), corpus, replace, special_tokens=s), corpus)
        for s in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[3][0], other[3][0])


# --- Other architectures --------------------------------------------------------------------------


@functools.cache
def shrunk_model(model_type: str) -> tuple[torch.nn.Module, object]:
    reads = tiny.tokenizer("llama")
    reads.pad_token = "<unk>"
    return shrunk.build(model_type), reads


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("site", ["residual", "key_side", "query", "key", "value", "weights"])
def test_soft_caps_sinks_and_windows(model_type, site):
    model, reads = shrunk_model(model_type)
    reference, ours = Plain(model, reads), load_model(naive.in_double(model), processor=reads)
    corpus = Corpus("some", tuple(TEXTS[:3]))
    for more in ({"tokens": ("first",)}, {} if site == "weights" else {"dimensions": (0, 3)}):
        replace = Replace(site, by="mean", **more)
        arm = Arm(reference, TEXTS[:3], replace)
        found = by_text(changed(ours, corpus, replace), corpus)
        for mine, text in zip(found, arm.ran(), strict=True):
            for layer, hidden in text.hidden.items():
                torch.testing.assert_close(mine[layer][0], hidden, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["albert", "albert-inner", "deberta", "deberta-v3", "canine", "segformer", "whisper",
                                  "gpt_neox", "qwen3", "modernbert", "character_bert", "beit", "wav2vec2"])  # fmt: skip
def test_a_change_begins_at_its_layer_in_every_architecture(name):
    """Layers before it are the same to the byte; its own dimensions are what was asked for."""
    model, corpus = loaded(name), tiny.corpus(name)
    last = max(layer.layer for layer in changed(model, corpus, ()) if layer.stack != "cross")
    before, after = (
        changed(model, corpus, r)
        for r in ((), Replace("residual", (last - 1,), dimensions=(1,), by="zero"))
    )
    for old, new in zip(before, after, strict=True):
        one, other = (layer.spaces["hidden"].values for layer in (old, new))
        assert torch.equal(one, other) == (old.layer < last - 1)
        if old.layer == last - 1:
            kept = [d for d in range(one.shape[-1]) if d != 1]
            assert torch.equal(one[..., kept], other[..., kept])
            mask = new.spaces["hidden"].tokens.mask
            assert not other[:, 0][mask][:, 1].any()


@pytest.mark.parametrize(
    "name", ["segformer", "self_attention", "albert", "gpt_neox", "qwen3", "modernbert", "beit"]
)
@pytest.mark.parametrize("site", SITES)
def test_every_site_of_other_architectures_can_be_taken_away(name, site):
    """Where all keys are alike, and scores hold nothing else, rows are uniform."""
    model, corpus = loaded(name), tiny.corpus(name)
    found = changed(model, corpus, Replace(site, by="mean"))
    assert all(
        layer.spaces["hidden"].values[:, 0][layer.spaces["hidden"].tokens.mask].isfinite().all()
        for layer in found
    )
    alike = name in ("segformer", "self_attention", "albert") and site in (
        "key_side",
        "attention_input",
    )
    for layer in found:
        if layer.attention is not None and (alike or (site == "key" and name != "beit")):
            entropy, counted = layer.attention.entropy.transpose(1, 2), layer.tokens.counted
            expected = (
                layer.attention.key_counts[counted].log().unsqueeze(1).expand_as(entropy[counted])
            )
            torch.testing.assert_close(entropy[counted], expected, rtol=1e-9, atol=1e-9)


def test_attention_to_the_encoder_changes_through_the_residual_stream_alone():
    """In a decoder of one block, its own attention comes first; what the block gives comes
    later.
    """
    corpus = corpus_of("t5")
    arms = [(), Replace("residual", (6,), by="zero"), Replace("key", (6,), by="zero")]
    plain_one, after, before = (
        [layer for layer in changed(loaded("t5"), corpus, arm) if layer.stack == "cross"]
        for arm in arms
    )
    for one, other in zip(plain_one, after, strict=True):
        assert torch.equal(one.attention.entropy, other.attention.entropy)
    for one, other in zip(plain_one, before, strict=True):
        last = one.layer == max(layer.layer for layer in plain_one)
        assert torch.equal(one.attention.entropy, other.attention.entropy) != last


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("site", ["residual", "key_side", "key", "weights"])
def test_half_precision(dtype, site):
    model, reads = tiny.build("llama")
    model, corpus = load_model(model.to(dtype), processor=reads), corpus_of("llama")
    more = {} if site == "weights" else {"dimensions": (1,)}
    before, after = (
        changed(model, corpus, r)
        for r in ((), Replace(site, (1,), tokens=("first",), by="mean", **more))
    )
    for old, new in zip(before, after, strict=True):
        one, other = (layer.spaces["hidden"].values for layer in (old, new))
        assert other[:, 0][new.tokens.mask].isfinite().all()
        if old.layer == 0:
            assert torch.equal(one, other)
        if old.layer == 1 and site == "residual":
            differs = one != other
            assert differs[:, 0, 0, 1].all()
            assert differs.sum() == differs[:, 0, 0, 1].sum()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "mpnet", "deberta-v3"])
@pytest.mark.parametrize("site", ["key_side", "query_side", "attention_input"])
def test_contributions_are_those_of_the_changed_inputs(name, site):
    """What dimensions contribute adds up to the scores of changed queries and keys."""
    model, found = loaded(name), []
    settings = Settings(intervention=Replace(site, dimensions=(0, 3), by="zero"))
    changes = changes_of(model, corpus_of(name), settings)
    for batch in batches(model, TEXTS, range(len(TEXTS)), settings, Reading()):
        run(model, batch, frozenset({"query", "key", "scores"}), found.append, "flatten", changes)
    assert sum(layer.scores is not None for layer in found) >= 2
    for layer in found:
        checked_pass._prove_scores(1e-9, layer)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("bert", {"where": "residual", "layers": [9]}, r"no residual in layer 9: give layers of 0, 1, 2, 3"),
        ("bert", {"where": "key", "layers": [0]}, r"no key in layer 0: give layers of 1, 2, 3"),
        ("bert", {"where": "weights", "layers": [0]}, r"no weights in layer 0"),
        ("bert", {"where": "residual", "dimensions": [24]}, r"no dimension 24: give one of 0 to 23"),
        ("bert", {"where": "key", "dimensions": [-1]}, r"one of dimensions is -1: give a whole number, 0 or more"),
        ("bert", {"where": "residual", "directions": [[1.0, 2.0]]}, r"shape \(1, 2\): give vectors of 24 numbers"),
        ("bert", {"where": "residual", "directions": 25}, r"25 principal directions of 24"),
        ("bert", {"where": "residual", "directions": [[1.0], [1.0, 2.0]]}, r"directions are .* give mean"),
        ("bert", {"where": "residual", "directions": [[0.0] * 24]}, r"directions are .* zero"),
        ("bert", {"where": "residual", "directions": [[float("nan")] * 24]}, r"directions are .* give mean"),
        ("bert", {"where": "residual", "directions": "means"}, r"directions is 'means': give mean"),
        ("bert", {"where": "residual", "directions": -1}, r"directions is -1: give mean"),
        ("bert", {"where": "residual", "tokens": ["clss"]}, r"tokens are 'clss': give types of tokens, of cls"),
        ("bert", {"where": "residual", "tokens": ["register"]}, r"no token of type register"),
        ("bert", {"where": "weights", "tokens": ["register"]}, r"no token of type register"),
        ("bert", {"where": "residual", "tokens": ["register"], "by": "zero"}, r"no token of type register"),
        ("gpt2", {"where": "key", "tokens": ["cls"], "by": "type_mean"}, r"no token of type cls"),
        ("bert", {"where": "stream"}, r"where is 'stream': give one of residual"),
        ("bert", {"where": "residual", "by": "median"}, r"by is 'median': give one of mean"),
        ("bert", {"where": "residual", "of": "all"}, r"of is 'all': give one of same, others"),
        ("bert", {"where": "residual", "layers": ["one"]}, r"one of layers is 'one': give a whole number"),
        ("bert", {"where": "residual", "layers": [1.5]}, r"one of layers is 1.5: give a whole number"),
        ("bert", {"where": "residual", "dimension": [1]}, r"an intervention has no 'dimension': give where, layers"),
        ("bert", {"dimensions": [1]}, r"an intervention says where"),
        ("bert", {"where": "residual", "dimensions": [1], "directions": 1}, r"both dimensions and directions"),
        ("bert", {"where": "weights", "dimensions": [1]}, r"attention weights have no dimensions"),
        ("bert", "zero", r"the intervention is 'zero': give Replace"),
        ("bert", 3, r"the intervention is 3: give Replace"),
        ("bert", [3], r"an intervention is a int: give Replace"),
        ("resnet-basic", {"where": "residual", "dimensions": [99]}, r"no dimension 99: give one of 0 to"),
        ("resnet-basic", {"where": "attention_input"}, r"has no attention_input .*give another site"),
        ("cvt", {"where": "key"}, r"has no key .*give another site"),
        ("cvt", {"where": "key_side"}, r"key_side of layer 1 holds no vector for each token"),
        ("mpnet", {"where": "key"}, r"has no key .*give another site"),
        ("deberta", {"where": "key_side"}, r"has no key_side .*give another site"),
        ("canine", {"where": "key_side"}, r"key_side of layer 1 holds no vector for each token, as in attention by"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_one_line(name, given, words):
    with pytest.raises(AnalysisError, match=words) as caught:
        changed(loaded(name), tiny.corpus(name), given)
    assert "\n" not in str(caught.value)


def test_one_text_has_no_others():
    for by in ("mean", "noise", "other"):
        with pytest.raises(AnalysisError, match="give more texts"):
            changed(
                loaded("bert"), Corpus("one", (TEXTS[0],)), Replace("residual", by=by, of="others")
            )
    with pytest.raises(AnalysisError, match=r"no token of type any.*give more texts"):
        changed(loaded("bert"), Corpus("one", (TEXTS[0],)), Replace("residual", by="other"))
    # Zero is zero, and half of the texts is enough for the directions of all.
    changed(loaded("bert"), Corpus("one", (TEXTS[0],)), Replace("residual", by="zero", of="others"))
    changed(loaded("bert"), Corpus("one", (TEXTS[0],)), Replace("residual", directions=3))


def test_what_changes_nothing_is_no_intervention():
    nothing = [
        {"by": "nothing"},
        {"but": True},
        *({name: ()} for name in ("layers", "tokens", "dimensions", "directions")),
    ]
    for given in (*nothing, {"directions": 0}):
        assert interventions(Replace("residual", **given)) == interventions(None) == ()
    everything = interventions(
        [Replace("residual", dimensions=(), but=True), {"where": "weights", "layers": 2}]
    )
    assert [one.layers for one in everything] == [None, (2,)]


def test_dependent_directions_count_once():
    one = given_directions(24)[0]
    single, double = (
        residual("bert", Replace("residual", (1,), directions=d)) for d in ((one,), (one, one))
    )
    for a, b in zip(single, double, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    flat = residual("bert", Replace("residual", (1,), directions=torch.tensor(one)))
    assert all(torch.equal(*pair) for pair in zip(flat, single, strict=True))
