"""Models that cannot be captured, or not exactly, are refused; rounding is no reason to."""

import os
import types
import weakref

import pytest
import tiny
import torch
from passes import EVERYTHING, SHORT, attentions, batch_of, captured, first_batch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from analysis_lib import AnalysisError, LoadedModel, load_model
from analysis_lib.capture import Activations, checked_pass, interface, run

pytestmark = pytest.mark.kernels


def test_kernels_are_those_asked_for():
    """What the Makefile asks for with an environment variable is no longer in force if torch
    renames it.
    """
    asked = os.environ.get("ATEN_CPU_CAPABILITY", "").upper()
    assert asked in ("", torch.backends.cpu.get_cpu_capability())


def _own_attention(self, hidden_states, attention_mask=None, *args, **kwargs):
    """An attention that computes by itself what BERT's does, without the interface."""
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query, key, value = (
        getattr(self, name)(hidden_states).view(shape).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    output = functional.scaled_dot_product_attention(query, key, value, attention_mask)
    return output.transpose(1, 2).flatten(2), None


@pytest.mark.parametrize("layers", [[0, 1, 2], [1]], ids=["all", "one"])
def test_a_model_that_does_not_call_the_interface_is_refused(layers):
    model, words = tiny.build("bert")
    loaded = LoadedModel("by itself", "seed 0", model, words)
    for layer in layers:
        attentions(loaded)[layer].forward = types.MethodType(
            _own_attention, attentions(loaded)[layer]
        )
    with pytest.raises(AnalysisError, match=rf"by itself.*{3 - len(layers)} of 3 layers"):
        captured(loaded, batch_of(loaded, SHORT))


def rescaled(monkeypatch, error: float, dtypes=(torch.float32, torch.float64)) -> None:
    """Plant an error in the capture: attention of these precisions is computed with a scaling that
    is slightly off.
    """
    right = interface.attend

    def wrong(softmax, *args):
        softmax.scaling *= 1 + error * (softmax.query.dtype in dtypes)
        return right(softmax, *args)

    monkeypatch.setattr(interface, "attend", wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("error", [1e-2, 1e-4])
def test_a_model_whose_captured_pass_differs_is_refused(monkeypatch, dtype, error):
    model, words = tiny.build("bert")
    loaded = LoadedModel("different", "seed 0", model.to(dtype), words)
    rescaled(monkeypatch, error)
    with pytest.raises(AnalysisError, match="different: the captured forward pass differs"):
        captured(loaded, batch_of(loaded, SHORT))


@pytest.mark.parametrize("error", [1e-2, 1e-4])
def test_a_difference_that_vanishes_in_double_precision_is_rounding(monkeypatch, error):
    """Whatever its size: a processor's kernels may round as they like."""
    model, words = tiny.build("bert")
    loaded = LoadedModel("rounded", "seed 0", model, words)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rescaled(monkeypatch, error, (torch.float32,))
    batch = batch_of(loaded, SHORT)
    layers = captured(loaded, batch)
    assert layers[-1].spaces["hidden"].values.dtype == torch.float32
    # The copy in float64 left the model, its blocks and the batch alone.
    assert loaded.model is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == before[name].dtype for name, value in model.state_dict().items())
    assert all(
        isinstance(module, torch.nn.Module) and module in set(model.modules())
        for module in attentions(loaded)
    )


@pytest.mark.parametrize("sharpness", [1, 60])
def test_large_scores_amplify_rounding_and_hide_no_error(sharpness, monkeypatch):
    """T5 does not scale its scores: their rounding is no reason to refuse a model, and hides no
    error.
    """
    model, words = tiny.build("byt5")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(sharpness if name.endswith("SelfAttention.q.weight") else 1)
    sizes = []

    def receive(activations: Activations) -> None:
        if activations.attended:
            query, key = (activations.spaces[space].values for space in ("query", "key"))
            sizes.append((query @ key.mT).abs().max().item())

    loaded = LoadedModel("large scores", "seed 0", model, words)
    batch = first_batch(loaded, tiny.items("byt5"))
    run(loaded, batch, EVERYTHING, receive)
    assert max(sizes) > 20 * sharpness
    rescaled(monkeypatch, 1e-5)
    with pytest.raises(AnalysisError, match="large scores: the captured forward pass differs"):
        captured(LoadedModel("large scores", "seed 0", model, words), batch)


class Doubles(TorchDispatchMode):
    """Counts numbers in float64 that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.held = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64 and not made._is_view():
            self.made += 1
            self.held += made.numel()
            self.most = max(self.most, self.held)
            weakref.finalize(made, self._freed, made.numel())
        return made

    def _freed(self, numbers: int) -> None:
        self.held -= numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_check_needs_no_copy_of_the_model(dtype, tmp_path, monkeypatch):
    """It is decided in float64, where all weights at once would take up to four times the memory:
    each is converted when it is used.
    """
    large = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    model = load_model(tiny.save(tmp_path, "llama", **large), dtype=dtype)
    monkeypatch.setattr(checked_pass, "ROUNDING", 0)
    with Doubles() as doubles:
        checked_pass.check(model, first_batch(model, tiny.items("llama")[:2]))
    assert doubles.made > 100
    assert doubles.most < 0.3 * sum(weight.numel() for weight in model.model.parameters())
    assert model.model.dtype == getattr(torch, dtype)


def test_a_weight_is_not_converted_to_ask_for_its_type():
    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    given = torch.ones(1, 64, dtype=torch.bfloat16)
    with Doubles() as doubles, torch.no_grad(), checked_pass._DoublePrecision():
        assert layer.weight.dtype == torch.float64
        assert layer.weight.is_floating_point()
        assert (layer.weight.shape, layer.weight.device.type) == ((32, 64), "cpu")
        assert doubles.made == 0
        made = layer(given)
    expected = layer.weight.double() @ given[0].double() + layer.bias.double()
    torch.testing.assert_close(made[0], expected, rtol=1e-14, atol=0)


def test_no_memory_for_double_precision_is_said(monkeypatch):
    model, words = tiny.build("bert")
    loaded = LoadedModel("large", "seed 0", model, words)
    rescaled(monkeypatch, 1e-2)

    def no_memory(*_, **__):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(checked_pass, "_in_double", no_memory)
    with pytest.raises(AnalysisError, match=r"large: .* in doubt.* float64.*can't allocate memory"):
        captured(loaded, batch_of(loaded, SHORT))


def test_the_check_reads_the_beginning_of_long_texts():
    model, words = tiny.build("bert", max_position_embeddings=512)
    loaded = LoadedModel("long", "seed 0", model, words)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    batch = first_batch(loaded, (" ".join(tiny.TEXTS) * 3,))
    count = batch.tokens.mask.shape[1]
    checked_pass.check(loaded, batch)
    assert count > checked_pass.CHECKED
    assert {*lengths} == {checked_pass.CHECKED}
    layers = captured(loaded, batch)
    assert layers[-1].spaces["hidden"].values.shape[2] == count
