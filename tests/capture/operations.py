"""Operations that a pass sends to its device, and two models to count them of."""

from collections.abc import Callable

import tiny
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from analysis_lib.capture.inputs import Batch, Settings
from analysis_lib.capture.source import as_source
from analysis_lib.corpora import Corpus
from analysis_lib.measurement.shards import make_shards
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.models import LoadedModel
from analysis_lib.models.live import live_model

TEXTS = tuple(f"{text} {again}" for text in tiny.TEXTS for again in tiny.TEXTS)
SIZE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


class Count(TorchDispatchMode):
    """Counts operations; views, empty tensors and questions for a device are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        is_view = any(part.alias_info and not part.alias_info.is_write for part in returns)
        if not is_view and "empty" not in str(function) and "prim" not in str(function):
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


MODELS = {"bert": bert, "llama": llama}


def first_of(name: str, wanted: str) -> tuple[LoadedModel, Batch, list[Metric]]:
    """A model, its first batch of several texts, and empty metrics."""
    words = tiny.tokenizer("wordpiece")
    model = live_model(MODELS[name](len(words)).eval(), words)
    source, settings = as_source(model), Settings(tokens_per_batch=200)
    [shard] = make_shards(source, Corpus("texts", TEXTS), resolve(wanted), settings)
    batch, *_ = source.batches(shard.items, shard.groups, settings, Report())
    return model, batch, [*shard.metrics]
