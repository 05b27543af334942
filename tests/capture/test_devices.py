"""A pass over a device that works behind the program's back, and over two of them.

PyTorch's meta device stands for a GPU. Its tensors have shapes and no values, so that whatever asks for a value, and
on a GPU would wait until all work is done, fails.
"""

import pytest
import tiny
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from passes import batch_of

from analysis_lib import LoadedModel, load_model
from analysis_lib.capture import Activations, Batch, Visibility
from analysis_lib.capture.forward_pass import captured_pass
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics import METRICS, Metric

META = torch.device("meta")
BIDIRECTIONAL = ["bert", "modernbert"]
CAUSAL = ["gpt2", "gpt_neox", "qwen3"]


@pytest.fixture
def asked(monkeypatch) -> list[torch.Tensor | None]:
    """The masks of which it is asked what they allow."""
    masks = []

    def from_mask(mask, queries, keys):
        masks.append(mask)
        return Visibility(queries, keys, causal=mask is not None)

    monkeypatch.setattr(Visibility, "from_mask", from_mask)
    return masks


def summed(loaded: LoadedModel, batch: Batch) -> tuple[list[Metric], Report]:
    # The moments of isotropy are summed in memory: a device may have no room for them.
    metrics, report = [METRICS[name]() for name in METRICS if name != "isotropy"], Report()

    def receive(activations: Activations) -> None:
        for metric in metrics:
            metric.update(activations)
        report.add(activations)

    captured_pass(loaded, batch, frozenset().union(*(metric.needs for metric in metrics)), receive)
    return metrics, report


def devices(metrics: list[Metric]) -> dict[int, set[str]]:
    """Where the sums of each layer are."""
    found = {}
    for metric in metrics:
        assert metric.sums
        for (*_, layer), (_, values) in metric.sums.items():
            found.setdefault(layer, set()).add(values.device.type)
    return found


@pytest.mark.parametrize("name", BIDIRECTIONAL + CAUSAL)
def test_no_layer_waits_for_the_device(name, tmp_path, monkeypatch, asked):
    loaded = load_model(tiny.save(tmp_path, name))
    monkeypatch.setattr(LoadedModel, "device", META)
    loaded.model.to(META)
    batch = batch_of(loaded, tiny.TEXTS)
    if name in BIDIRECTIONAL:
        # transformers itself asks whether there is padding.
        del batch.inputs["attention_mask"]
    (blocks,) = loaded.stacks.values()
    metrics, report = summed(loaded, batch)
    assert devices(metrics) == {layer: {"meta"} for layer in range(len(blocks) + 1)}
    assert report.tokens.device == report.counted.device == META
    # What a mask allows is asked once, not in each layer.
    assert len({*map(id, asked)}) == len(asked) <= 2


@pytest.mark.parametrize("name", BIDIRECTIONAL + CAUSAL)
def test_what_is_measured_follows_a_model_over_its_devices(name, tmp_path, asked):
    loaded = load_model(tiny.save(tmp_path, name))
    (blocks,) = loaded.stacks.values()
    after = [
        module
        for path, module in loaded.model.named_children()
        if path in ("pooler", "final_norm", "ln_f", "norm", "final_layer_norm")
    ]
    for module in (blocks[-1], *after):
        add_hook_to_module(module.to(META), AlignDevicesHook(META))
    metrics, _ = summed(loaded, batch_of(loaded, ["texts of one length", "texts of one length"]))
    *first, last = range(len(blocks) + 1)
    assert devices(metrics) == {layer: {"cpu"} for layer in first} | {last: {"meta"}}
