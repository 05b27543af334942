"""What an intervention does to what a model gives out, against transformers' own loss and hooks of
the test.
"""

import numpy as np
import pytest
import tiny
import torch
import transformers
from torch.nn import functional

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.capture.interventions import Replace

TEXTS = list(tiny.TEXTS[:6])
CUT = Replace("residual", layers=[1], dimensions=[2, 5], by="zero")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with its head, as one finds it."""
    base, tokenizer = tiny.build("llama")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(base.config)
    model.model.load_state_dict(base.state_dict())
    path = tmp_path_factory.mktemp("outputs") / "llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def cut(_module, _args, output):
    kept = output.clone() if isinstance(output, torch.Tensor) else output[0].clone()
    kept[..., [2, 5]] = 0
    return kept if isinstance(output, torch.Tensor) else (kept, *output[1:])


def by_hand(folder, change: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each text, its ids, logits and last vectors; with two dimensions of the first block's
    output at zero.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if change:
        model.model.layers[0].register_forward_hook(cut)
    found = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True)
        found.append((inputs["input_ids"][0], out.logits[0], out.hidden_states[-1][0]))
    return found


@pytest.mark.parametrize("change", [False, True])
def test_loss_divergence_and_cosine(folder, change):
    plain, changed = by_hand(folder, False), by_hand(folder, change)
    loss = torch.cat(
        [
            functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            for ids, logits, _ in changed
        ]
    ).mean()
    pairs = [
        (a.log_softmax(-1)[:-1], b.log_softmax(-1)[:-1])
        for (_, a, _), (_, b, _) in zip(plain, changed, strict=True)
    ]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean()
    vectors = zip(plain, changed, strict=True)
    cosine = torch.cat(
        [functional.cosine_similarity(a, b, dim=-1) for (*_, a), (*_, b) in vectors]
    ).mean()
    intervention = CUT if change else Replace("residual", by="nothing")
    asked = ["next_token_loss", "output_change"]
    for batch in (1, 10**6):
        tables = measure(
            load_model(folder, dtype="float64"),
            TEXTS,
            asked,
            intervention=intervention,
            tokens_per_batch=batch,
            progress=False,
        )
        row = tables["next_token_loss"].iloc[0]
        np.testing.assert_allclose([row["loss"], row["kl"]], [loss, kl], atol=1e-9)
        assert row["tokens"] == sum(len(ids) - 1 for ids, *_ in plain)
        np.testing.assert_allclose(tables["output_change"]["cosine"], [cosine], atol=1e-9)
    assert (kl > 1e-4) == change


def test_a_live_model_brings_its_head(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    live = measure(model, TEXTS, "next_token_loss", tokenizer=tokenizer, progress=False)[
        "next_token_loss"
    ]
    read = measure(folder, TEXTS, "next_token_loss", progress=False)["next_token_loss"]
    np.testing.assert_allclose(live["loss"], read["loss"], rtol=1e-5)


def test_effects_come_with_other_tables_and_leave_them_alone(folder):
    alone = measure(folder, TEXTS, "anisotropy", progress=False, intervention=CUT)
    together = measure(folder, TEXTS, "anisotropy,output_change", progress=False, intervention=CUT)
    np.testing.assert_array_equal(alone["anisotropy"]["cosine"], together["anisotropy"]["cosine"])
    assert len(together.layers) == len(alone.layers)


def test_what_predicts_no_next_token_is_refused(tiny_folder, folder, tmp_path):
    with pytest.raises(AnalysisError, match="it is no causal language model"):
        measure(tiny_folder("bert"), TEXTS, "next_token_loss", progress=False)
    bare = transformers.LlamaModel.from_pretrained(folder)
    bare.save_pretrained(tmp_path / "bare")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    with pytest.raises(AnalysisError, match="it is no causal language model"):
        measure(tmp_path / "bare", TEXTS, "next_token_loss", progress=False)


def masked_model(tmp_path):
    base, tokenizer = tiny.build("bert")
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(base.config)
    model.bert.load_state_dict(base.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", [False, True])
def test_masked_tokens_are_predicted_as_transformers_does(tmp_path, change):
    folder = masked_model(tmp_path)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    read, asked = [], load_model(folder, dtype="float64")
    words = asked.model.embeddings.word_embeddings
    handle = words.register_forward_pre_hook(lambda _module, args: read.append(args[0][0]))
    intervention = CUT if change else Replace("residual", by="nothing")
    measure(
        asked,
        TEXTS,
        "masked_token_loss",
        intervention=intervention,
        tokens_per_batch=1,
        progress=False,
    )
    handle.remove()
    losses, divergences, count = [], [], 0
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        ids = inputs["input_ids"][0]
        masked = ((one, one == tokenizer.mask_token_id) for one in read if len(one) == len(ids))
        seen, where = next(
            (one, at) for one, at in masked if at.any() and ((one == ids) | at).all()
        )
        # Of 15 % of what are no special tokens, none is one of these.
        assert where.sum() == max(1, round(0.15 * (len(ids) - 2)))
        assert not where[[0, -1]].any()
        with torch.no_grad():
            plain = model(**inputs | {"input_ids": seen[None]}).logits[0, where].log_softmax(-1)
            handle = model.bert.encoder.layer[0].register_forward_hook(cut) if change else None
            found = model(**inputs | {"input_ids": seen[None]}).logits[0, where].log_softmax(-1)
            if handle:
                handle.remove()
        losses.append(functional.nll_loss(found, ids[where], reduction="none"))
        divergences.append((plain.exp() * (plain - found)).sum(-1))
        count += int(where.sum())
    for batch in (1, 10**6):
        table = measure(
            asked,
            TEXTS,
            "masked_token_loss",
            intervention=intervention,
            tokens_per_batch=batch,
            progress=False,
        )["masked_token_loss"].iloc[0]
        wanted = torch.cat(losses).mean(), torch.cat(divergences).mean()
        np.testing.assert_allclose([table["loss"], table["kl"]], wanted, atol=1e-9)
        assert table["tokens"] == count
    assert (table["kl"] > 1e-5) == change


def test_loss_at_masked_positions_comes_with_other_tables_and_leaves_them_alone(tmp_path):
    folder = masked_model(tmp_path)
    alone = measure(folder, TEXTS, "anisotropy", progress=False, intervention=CUT)
    together = measure(
        folder,
        TEXTS,
        "anisotropy,output_change,masked_token_loss",
        progress=False,
        intervention=CUT,
    )
    np.testing.assert_array_equal(alone["anisotropy"]["cosine"], together["anisotropy"]["cosine"])
    only = measure(folder, TEXTS, "masked_token_loss", progress=False, intervention=CUT)[
        "masked_token_loss"
    ]
    np.testing.assert_array_equal(only["loss"], together["masked_token_loss"]["loss"])


def test_what_predicts_no_masked_token_is_refused(tiny_folder, folder):
    for model in (tiny_folder("bert"), folder):
        with pytest.raises(AnalysisError, match="it is no masked language model"):
            measure(model, TEXTS, "masked_token_loss", progress=False)


def test_an_untrained_copy_has_the_head_of_its_architecture(folder):
    losses = [
        measure(f"{folder}:untrained@seed={seed}", TEXTS, "next_token_loss", progress=False)[
            "next_token_loss"
        ]["loss"][0]
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_dimensions_add_up_to_the_average_cosine(folder):
    model = load_model(folder, dtype="float64")
    tables = measure(model, TEXTS, "anisotropy,cosine_by_dimension", progress=False)
    parts = tables["cosine_by_dimension"].groupby(["space", "layer"])["cosine"].sum()
    wanted = tables["anisotropy"].query("head.isna()").set_index(["space", "layer"])["cosine"]
    np.testing.assert_allclose(parts[wanted.index], wanted, atol=1e-12)
    hidden = [by_hand(folder, False)[place][2] for place in range(len(TEXTS))]
    units = torch.cat(hidden)
    units = units / units.norm(dim=-1, keepdim=True)
    by_pairs = (torch.einsum("nd,md->d", units, units) - units.square().sum(0)) / (
        len(units) * (len(units) - 1)
    )
    final = tables["cosine_by_dimension"].query("space == 'final'")["cosine"]
    np.testing.assert_allclose(final, by_pairs, atol=1e-6)


def test_a_head_that_calls_the_decoder_of_its_body(folder, tmp_path):
    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.OPTConfig(vocab_size=len(tokenizer), ffn_dim=32, **sizes)
    torch.manual_seed(2)
    model = transformers.OPTForCausalLM(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    losses, counts = [], []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
        counts.append(inputs["input_ids"].shape[1] - 1)
    wanted = np.average(losses, weights=counts)
    found = measure(
        tmp_path, TEXTS, "next_token_loss,output_change", intervention=CUT, progress=False
    )
    plain = measure(tmp_path, TEXTS, "next_token_loss", progress=False)["next_token_loss"]
    np.testing.assert_allclose(plain["loss"], [wanted], rtol=1e-5)
    assert found["next_token_loss"]["kl"][0] > 0
    assert found["output_change"]["cosine"][0] < 0.9999


def test_what_gives_out_a_map_is_compared_at_its_positions(tmp_path):
    loaded = load_model(tiny.save(tmp_path / "segformer", "segformer"), dtype="float64")
    images = load_corpus("digits:test", limit=4, seed=None)
    change = Replace("residual", layers=[1], dimensions=[0, 1], by="zero")
    found = measure(loaded, images, "output_change", intervention=change, progress=False)[
        "output_change"
    ]
    first, *_ = next(iter(loaded.stacks.values()))

    def cut_first(_module, _args, output):
        return (
            cut_two(output)
            if isinstance(output, torch.Tensor)
            else (cut_two(output[0]), *output[1:])
        )

    def cut_two(hidden):
        return hidden * (torch.arange(hidden.shape[-1]) > 1)

    cosines = []
    for item in images.items:
        pixels = loaded.processor(item.load().convert("RGB"), return_tensors="pt")[
            "pixel_values"
        ].double()
        with torch.no_grad():
            plain = loaded.model(pixels).last_hidden_state
            handle = first.register_forward_hook(cut_first)
            changed = loaded.model(pixels).last_hidden_state
            handle.remove()
        cosines.append(functional.cosine_similarity(plain, changed, dim=1).flatten())
    np.testing.assert_allclose(found["cosine"], [torch.cat(cosines).mean()], atol=1e-9)
    assert found["tokens"].item() == sum(map(len, cosines))
    assert found["cosine"].item() < 0.999
    unchanged = load_model(tiny.save(tmp_path / "cvt", "cvt"))
    nothing = Replace("residual", by="nothing")
    row = measure(unchanged, images, "output_change", intervention=nothing, progress=False)[
        "output_change"
    ].iloc[0]
    pixels = unchanged.processor(images.items[0].load().convert("RGB"), return_tensors="pt")[
        "pixel_values"
    ]
    assert row["tokens"] == len(images) * unchanged.model(pixels).last_hidden_state[0, 0].numel()
    assert row["cosine"] == pytest.approx(1)
