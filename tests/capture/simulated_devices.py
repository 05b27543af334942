"""Passes of tiny models over simulated devices, in a process of their own: ``simulated_devices.py
1:bert 2:bert operations:llama``.

PyTorch's fake tensors lie on devices that need not exist. They have shapes and no values: an
operation that asks for one, and would wait on a GPU until all work is done, fails, and so does one
on tensors of two devices. The devices are registered with PyTorch, which from then on believes that
there is a GPU: hence the process.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import tiny
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from operations import counted, first_of
from passes import first_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import masking_utils

from analysis_lib import LoadedModel, load_model
from analysis_lib.capture import Batch, Visibility
from analysis_lib.capture.forward_pass import captured_pass
from analysis_lib.measurement.shards import Summing
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics import METRICS

# PyTorch knows few names of devices that are not there.
DEVICES = "npy:0", "npy:1"


class NothingComesBack(TorchDispatchMode):
    """Inside it, nothing is copied from a simulated device to the processor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        target = (kwargs or {}).get("device")
        if (
            function is torch.ops.aten._to_copy.default
            and target == torch.device("cpu") != args[0].device
        ):
            raise RuntimeError(f"a tensor of shape {[*args[0].shape]} came back from its device")
        return function(*args, **(kwargs or {}))


def moved(
    loaded: LoadedModel, batch: Batch, devices: tuple[str, ...], mode: FakeTensorMode
) -> Batch:
    """Spread the blocks of a model over the devices, as accelerate does, and move a batch to the
    first of them.
    """

    def on(device: str, value: object) -> object:
        return mode.from_tensor(value).to(device) if isinstance(value, Tensor) else value

    blocks = [block for blocks in loaded.stacks.values() for block in blocks]
    places = {
        m: devices[i * len(devices) // len(blocks)]
        for i, block in enumerate(blocks)
        for m in block.modules()
    }
    for module in loaded.outer.modules():
        device = places.get(module, devices[0])
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(on(device, weight), requires_grad=False)
        module._buffers.update({name: on(device, value) for name, value in module._buffers.items()})
        if module in blocks or (module not in places and (module._parameters or module._buffers)):
            add_hook_to_module(module, AlignDevicesHook(device))
    first = devices[0]
    tokens, shifted = (
        part
        and replace(
            part,
            mask=on(first, part.mask),
            types=on(first, part.types),
            ids=on(first, part.ids),
        )
        for part in (batch.tokens, batch.shifted)
    )
    inputs = {name: on(first, value) for name, value in batch.inputs.items()}
    return replace(
        batch, inputs=inputs, tokens=tokens, shifted=shifted, lengths=on(first, batch.lengths)
    )


def forward_alone(function: Callable, given: Tensor) -> tuple[Tensor, Callable]:
    """In place of ``torch.func.vjp``: PyTorch's autograd knows one simulated device, and refuses a
    second one.
    """
    return function(given), lambda _: (torch.empty_like(given),)


def attempted(asked: str) -> dict[str, object]:
    """What :func:`measured` or :func:`operations` returns, or the ``error`` that it raises."""
    kind, name = asked.split(":")
    try:
        return operations(name) if kind == "operations" else measured(name, int(kind))
    except Exception:
        return {"error": traceback.format_exc()}


def operations(name: str) -> dict[str, float]:
    """How many operations a batch sends to a device, in multiples of those of a bare pass.

    Returns:
        The ratio for anisotropy alone, and for all tables.
    """
    # A mask has no values here.
    Visibility.from_mask = lambda _mask, *tokens: Visibility(*tokens, causal=name == "llama")
    return {wanted: _operations(name, wanted) for wanted in ("anisotropy", "all")}


def _operations(name: str, wanted: str) -> float:
    loaded, batch, metrics = first_of(name, wanted)
    summing = Summing(metrics, Report())
    with FakeTensorMode() as mode, torch.inference_mode():
        batch = moved(loaded, batch, DEVICES[:1], mode)
        remove_hook_from_module(loaded.model, recurse=True)

        def captured() -> None:
            captured_pass(loaded, batch, summing.needs, summing.receive)
            summing.settle()

        captured()  # Makes room for the sums.
        return counted(captured) / counted(lambda: loaded.model(**batch.inputs))


def measured(name: str, count: int) -> dict[str, object]:
    """What is found of a tiny model that lies on so many devices.

    Returns:
        ``masks``, of how many it was asked what they allow; and by layer, the devices of its sums.
    """
    masks = []

    def from_mask(mask, queries, keys):
        masks.append(mask)
        return Visibility(
            queries, keys, causal=mask is not None and queries.mask.shape == keys.mask.shape
        )

    Visibility.from_mask = from_mask
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(tiny.save(Path(folder), name))
        batch = first_batch(loaded, tiny.items(name) * 2)
    # The moments of isotropy are summed in memory: a device may have no room for them.
    metrics, report = (
        [METRICS[name]() for name in METRICS if not METRICS[name].on_request],
        Report(),
    )

    summing = Summing(metrics, report)

    with FakeTensorMode() as mode:
        batch = moved(loaded, batch, DEVICES[:count], mode)
        vjp = torch.func.vjp if count == 1 else forward_alone
        with NothingComesBack(), mock.patch.object(torch.func, "vjp", vjp):
            captured_pass(loaded, batch, summing.needs, summing.receive)
            summing.settle()
        try:
            report.close()
        except DataDependentOutputException:
            pass  # Now all counts come over, and have no values.
        else:
            raise AssertionError("the counts are not on the device")
    layers = {}
    for metric in metrics:
        for (*_, layer), (_, values) in metric.sums.items():
            layers.setdefault(layer, set()).add(str(values.device))
    return {"masks": len(masks), "layers": [sorted(layers[layer]) for layer in sorted(layers)]}


def main() -> None:
    _setup_privateuseone_for_python_backend("npy")
    # transformers' own question whether there is padding, which a device would have to answer.
    masking_utils._ignore_bidirectional_mask_sdpa = lambda *_, **__: False
    print(json.dumps({asked: attempted(asked) for asked in sys.argv[1:]}))


if __name__ == "__main__":
    main()
