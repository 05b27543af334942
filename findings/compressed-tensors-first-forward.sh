#!/bin/sh
# compressed-tensors 0.20.1: weights of an int8 model are integers until its first forward pass, then other tensors.
#
# transformers loads a checkpoint compressed, and ModelCompressor.add_decompress_hook gives the outermost model a hook
# that rewrites all quantized layers at its first call. Before, `weight` of an int8 checkpoint holds whole numbers up to
# 127, without its scale, in a layer that is a plain Linear; norms and spectra read there are not those of the weights.
# After, it is a new parameter, so that a reference from before still has the integers. A call of the inner model alone
# (model.model) does not trigger the hook, and raises. Loaded with CompressedTensorsConfig(dequantize=True), weights are
# floats from the start; activations that the checkpoint quantizes are then not quantized.
# Small random models. PYTHON names a Python that has torch, transformers, accelerate and pydantic; without it, they are
# installed. Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 pydantic==2.14.3
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" compressed-tensors==0.20.1 loguru==0.7.3
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

print("compressed-tensors", compressed_tensors.__version__, "transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.arange(5, 25).unsqueeze(0)

# A checkpoint of int8 weights, each row with its scale, and of activations rounded token by token.
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
true = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
by_row = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
by_token = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
scheme = QuantizationScheme(targets=["Linear"], weights=by_row, input_activations=by_token)
apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
for layer in model.modules():
    if hasattr(layer, "weight_scale"):
        layer.weight_scale.data = layer.weight.data.abs().amax(1, keepdim=True) / 127
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained("model")
compressor.update_config("model")


def norm(weights):
    return weights.float().norm().item()


model = AutoModelForCausalLM.from_pretrained("model").eval()
layer = model.model.layers[0].self_attn.k_proj
first = layer.weight
before = first.dtype, norm(first)
try:
    with torch.no_grad():
        model.model(ids)
    raised = "nothing"
except RuntimeError as error:
    raised = str(error)
with torch.no_grad():
    model(ids)
after = layer.weight.dtype, norm(layer.weight)
replaced = layer.weight is not first and first.dtype == torch.int8
print(f"weights of keys, in {type(layer).__module__}.{type(layer).__name__}: norm {norm(true):.4g} before quantization")
print(f"loaded: {before[0]}, norm {before[1]:.4g}; after a forward pass: {after[0]}, norm {after[1]:.4g}")
print(f"model.model before the first forward pass raises: {raised}")

dense = AutoModelForCausalLM.from_pretrained(
    "model", quantization_config=CompressedTensorsConfig(dequantize=True)
).eval()
weights = dense.model.layers[0].self_attn.k_proj.weight
print(f"with dequantize=True: {weights.dtype}, norm {norm(weights):.4g}")
with torch.no_grad():
    off = (dense(ids).logits - model(ids).logits).abs().max().item()
print(f"its logits are off by {off:.2g} from those of the model with quantized activations")
assert before[0] == torch.int8 and before[1] > 100 * norm(true)
assert after[0] == torch.float32 and abs(after[1] / norm(true) - 1) < 0.01
assert replaced and raised != "nothing"
assert torch.equal(weights, layer.weight) and off > 1e-4
PYTHON
