"""How many operations a batch sends to its device, beside a bare forward pass.

On a GPU, a small operation costs more than its arithmetic. The number is the same on any machine.
"""

from collections.abc import Callable

import pytest
import tiny
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from analysis_lib.capture.inputs import Batch, Settings
from analysis_lib.capture.source import as_source
from analysis_lib.corpora import Corpus
from analysis_lib.measurement.shards import _measure_part, _Part, make_shards
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics import resolve
from analysis_lib.models.live import live_model

TEXTS = tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS)
SIZE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


class Count(TorchDispatchMode):
    """Counts operations, views and empty tensors left out."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        is_view = any(part.alias_info and not part.alias_info.is_write for part in returns)
        if not is_view and "empty" not in str(function):
            self.number += 1
        return function(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> int:
    with torch.inference_mode(), Count() as count:
        call()
    return count.number


def bert(words: int) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(vocab_size=words, num_hidden_layers=12, **SIZE)
    return transformers.BertModel(config)


def llama(words: int) -> transformers.PreTrainedModel:
    grouped = {"num_key_value_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(vocab_size=words, num_hidden_layers=16, **grouped, **SIZE)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "wanted", "most"),
    [
        (bert, "anisotropy", 1.9),
        (bert, "all", 4.7),
        (llama, "anisotropy", 1.5),
        (llama, "all", 3.6),
    ],
)
def test_a_batch_sends_few_operations(make, wanted, most):
    words = tiny.tokenizer("wordpiece")
    model = live_model(make(len(words)).eval(), words)
    source, corpus = as_source(model), Corpus("texts", TEXTS)
    settings = Settings(tokens_per_batch=200)
    [shard] = make_shards(source, corpus, resolve(wanted), settings)
    first, batch, *_ = source.batches(shard.items, shard.groups, settings, Report())

    def measured(*batches: Batch) -> int:
        part = _Part(shard, batches, True, Report())
        return counted(lambda: _measure_part(source, part))

    measured(first)  # The check of the captured pass is made once.
    bare = counted(lambda: model.model(**batch.inputs))
    # The first batch makes room for the sums.
    assert measured(batch, batch) - measured(batch) < most * bare
