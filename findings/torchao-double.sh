#!/bin/sh
# torchao 0.18.0: after quantization to int8, double() and to(dtype) leave the weights as they are, and say nothing.
#
# The handler of `_to_copy` that all its tensors share (TorchAOBaseTensor, _implements_common_tensor_ops) moves them
# between devices, and drops the dtype. Embeddings and norms turn to float64, so that model.dtype and the logits are
# float64; the weights of linear layers still are int8 with scales in float32, and say float32. Their products are
# formed in float64, so that the logits are those of the rounded weights in float64: no reference for what quantization
# costs. transformers refuses float() and half() for such a model, but not double(). Keep a copy from before
# quantization, and turn that to float64.
# Small random models. PYTHON names a Python that has torch, transformers and accelerate; without it, they are
# installed. Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" torchao==0.18.0
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
import torch
import torchao
import transformers
from torchao.quantization import Int8WeightOnlyConfig
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

print("torchao", torchao.__version__, "transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.arange(5, 25).unsqueeze(0)
torch.manual_seed(0)
dense = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes)).eval()
dense.save_pretrained("model")
quantized = LlamaForCausalLM.from_pretrained(
    "model", dtype=torch.float32, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
).eval()


def logits(model):
    with torch.no_grad():
        return model(ids).logits


refused = []
for cast in ("float", "half"):
    try:
        getattr(quantized, cast)()
    except ValueError:
        refused.append(cast)
single = logits(quantized)
quantized.double()
weights = quantized.model.layers[0].self_attn.k_proj.weight
double = logits(quantized)
print(f"after double(): model.dtype {quantized.dtype}, logits {double.dtype}. Refused: {', '.join(refused)}")
kind = f"{type(weights).__name__} of {weights.dtype}"
print(f"weights of keys: {kind}, with data of {weights.qdata.dtype}, scales of {weights.scale.dtype}")

true = logits(dense.double())
rounded = LlamaForCausalLM.from_pretrained("model").eval().double()
for name, layer in quantized.named_modules():
    if hasattr(getattr(layer, "weight", None), "qdata"):
        of_layer = rounded.get_submodule(name).weight
        of_layer.data = layer.weight.qdata.double() * layer.weight.scale.double()
off = [(double - others).abs().max().item() for others in (true, logits(rounded), single)]
print(f"spread of logits {true.std():.2g}; off after double() by {off[0]:.2g} from those without quantization,")
print(f"by {off[1]:.2g} from the integers times their scales in float64, by {off[2]:.2g} from before double()")
assert quantized.dtype == double.dtype == torch.float64
assert (weights.dtype, weights.qdata.dtype, weights.scale.dtype) == (torch.float32, torch.int8, torch.float32)
assert weights.to(torch.float64).dtype == weights.bfloat16().dtype == torch.float32
assert refused == ["float", "half"]
assert off[0] > 0.1 and off[1] < 1e-5
PYTHON
