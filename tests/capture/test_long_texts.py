"""Texts of many tokens: memory grows with their length, not with its square."""

import pandas as pd
import pytest
import tiny
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis_lib import measure
from analysis_lib.capture import long_sums, masks
from analysis_lib.capture.batching import make_batches
from analysis_lib.capture.checked_pass import check
from analysis_lib.capture.forward_pass import captured_pass
from analysis_lib.capture.inputs import Batch, Settings
from analysis_lib.capture.source import OF_OUTPUTS, as_source
from analysis_lib.capture.tokens import Tokens
from analysis_lib.metrics import METRICS
from analysis_lib.models import LoadedModel
from analysis_lib.models.live import live_model
from analysis_lib.models.tokenization import Encoded

LONG = 4096
WINDOW = 6
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": LONG,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
OF_ATTENTION = frozenset({"weights", "scores", "query", "key", "value", "hidden"})


def bert(words: int) -> transformers.PreTrainedModel:
    return transformers.BertModel(transformers.BertConfig(vocab_size=words, **SIZE))


def llama(words: int) -> transformers.PreTrainedModel:
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=words, **SIZE))


def mistral(words: int) -> transformers.PreTrainedModel:
    config = transformers.MistralConfig(
        vocab_size=words, num_key_value_heads=1, sliding_window=WINDOW, **SIZE
    )
    return transformers.MistralModel(config)


def modernbert(words: int) -> transformers.PreTrainedModel:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(
        vocab_size=words, local_attention=WINDOW, pad_token_id=0, **special, **SIZE
    )
    return transformers.ModernBertModel(config)


def gemma2(words: int) -> transformers.PreTrainedModel:
    """Scores are capped; every second layer has a window."""
    config = transformers.Gemma2Config(
        vocab_size=words,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=0.5,
        **ENDS,
        **SIZE,
    )
    return transformers.Gemma2Model(config)


def gpt_oss(words: int) -> transformers.PreTrainedModel:
    """Heads have learnt sinks; every second layer has a window."""
    config = transformers.GptOssConfig(
        vocab_size=words,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
        **ENDS,
        **SIZE,
    )
    model = transformers.GptOssModel(config)
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


EVERY = [bert, llama, mistral, modernbert, gemma2, gpt_oss]


class Largest(TorchDispatchMode):
    """The largest number of values of a tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            # A view, however it is expanded, has the memory of what it views.
            if type(part) is torch.Tensor:
                self.values = max(
                    self.values, part.untyped_storage().nbytes() // part.element_size()
                )
        return made


def loaded(make) -> LoadedModel:
    words = tiny.tokenizer("wordpiece")
    words.model_max_length = LONG
    torch.manual_seed(0)
    return live_model(make(len(words)).eval(), words)


def text_of(model: LoadedModel, length: int) -> Batch:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(model.tokenizer), (length,), generator=draws).tolist()
    [batch] = make_batches(
        model, [Encoded({"input_ids": ids}, [False] * length)], [0], True, length
    )
    return batch


@pytest.mark.parametrize("needs", [OF_ATTENTION, frozenset({"hidden", "key"})])
@pytest.mark.parametrize("make", EVERY)
def test_no_tensor_grows_with_the_square_of_a_length(make, needs, monkeypatch):
    room = 2**18
    monkeypatch.setattr(masks, "LARGEST_MASK", room)
    monkeypatch.setattr("analysis_lib.capture.attention_rows.SCORES_AT_ONCE", room)
    model = loaded(make)
    check(model, text_of(model, 8))
    batch = text_of(model, LONG)

    def receive(activations) -> None:
        if activations.scores is not None:
            assert activations.scores.contributions.isfinite().all()
            assert activations.attention.pairs.sum() > 0

    with Largest() as largest:
        captured_pass(model, batch, needs, receive)
    per_token = 4 * SIZE["hidden_size"]
    assert largest.values <= max(room, LONG * per_token) < LONG**2 / 16


def metrics_of(model: LoadedModel) -> list[str]:
    """Names of the metrics that the model has, except those of what it gives out."""
    absent = OF_OUTPUTS | {*as_source(model).unsupported(tiny.TEXTS, Settings())}
    # Texts have no patches.
    of_texts = {name: metric for name, metric in METRICS.items() if name != "attention_by_patch"}
    return [name for name, metric in of_texts.items() if not metric.needs <= absent]


@pytest.mark.parametrize("room", [1, 100])
@pytest.mark.parametrize("make", EVERY)
def test_rows_of_a_mask_give_what_all_of_it_gives(make, room, monkeypatch):
    model = loaded(make)
    model.model.double()
    # Nothing that was measured before is read.
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    every = metrics_of(model)
    for metrics in (every, ["anisotropy"]):
        whole = measure(model, tiny.TEXTS, metrics, progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(masks, "LARGEST_MASK", room)
            by_rows = measure(model, tiny.TEXTS, metrics, progress=False)
        assert {*whole} == {*by_rows} == {*metrics}
        for name in whole:
            pd.testing.assert_frame_equal(by_rows[name], whole[name], rtol=1e-9, atol=1e-12)


def test_a_model_may_change_the_mask_of_a_long_text(monkeypatch):
    monkeypatch.setattr(masks, "LARGEST_MASK", 20)
    long = masks.causal(7, 7, torch.device("cpu"))
    whole = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    assert isinstance(long, masks.LongMask)
    assert torch.equal(long & True, whole)
    assert torch.equal(long[:, :, 2:5], whole[:, :, 2:5])
    assert torch.equal(masks.rows_of(long, slice(2, 5)), whole[:, :, 2:5])
    opposite = masks.changed(long, torch.logical_not)
    assert isinstance(opposite, masks.LongMask)
    assert torch.equal(opposite.whole(), ~whole)
    for band in masks.bands(long.shape, long.device):
        assert (band.queries.stop - band.queries.start) * 7 <= 20


@pytest.mark.parametrize("make", [bert, mistral, gpt_oss])
def test_sums_by_chunks_of_tokens_give_what_all_of_them_give(make, monkeypatch):
    model = loaded(make)
    model.model.double()
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    every = metrics_of(model)
    whole = measure(model, tiny.TEXTS, every, progress=False)
    monkeypatch.setattr(long_sums, "TOKENS_AT_ONCE", 3)
    by_chunks = measure(model, tiny.TEXTS, every, progress=False)
    for name in whole:
        pd.testing.assert_frame_equal(by_chunks[name], whole[name], rtol=1e-9, atol=1e-12)


def test_long_sums_keep_the_digits_of_single_precision():
    count = 2**15
    draws = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 1, count, generator=draws)
    values = 1 + torch.rand(2, count, 5, generator=draws)
    sums = long_sums.weighted_sums(weights, values)
    assert sums.dtype == torch.float32
    exact = weights.double() @ values.double()
    torch.testing.assert_close(sums.double(), exact, rtol=5e-7, atol=0)
    types = torch.randint(0, 3, (2, count), generator=draws)
    tokens = Tokens(torch.ones(2, count, dtype=torch.bool), types, (0, 1))
    by_kind = tokens.in_bags(values.flatten(0, 1))
    exact = tokens.kind_masks.double() @ values.double()
    torch.testing.assert_close(by_kind.double(), exact, rtol=5e-7, atol=0)
    # The plain product of short texts keeps its bytes.
    few = weights[..., :500], values[:, :500]
    assert torch.equal(long_sums.weighted_sums(*few), few[0] @ few[1])
