#!/bin/sh
# transformers 5.23.0: a Llama in float64 takes its norms, its angles and its softmax in single precision; a BERT does not.
#
# The numbers that come out are float64 and right to 1e-8, not to 1e-16: attention weights are all numbers that float32 can hold, and a
# norm of a float64 vector is off by single rounding. So "the same in float64" cannot tell rounding from a fault below that.
# Small random models. PYTHON names a Python that has torch and transformers; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
cd "$folder"
"$PYTHON" - <<'PYTHON'
import torch
import transformers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

print("transformers", transformers.__version__)
torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.arange(5, 17).unsqueeze(0)
single = {}
for kind, config in ((LlamaModel, LlamaConfig(**sizes)), (BertModel, BertConfig(**sizes))):
    config._attn_implementation = "eager"
    model = kind(config).double().eval()
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions)
    # Zeros and ones would be the same in any precision.
    inner = weights[(weights > 0) & (weights < 1)]
    single[kind.__name__] = (inner == inner.float().double()).double().mean().item()
    print(f"{kind.__name__}: weights are {weights.dtype}; {single[kind.__name__]:.0%} of them are numbers of float32")

norm = LlamaModel(LlamaConfig(**sizes)).double().norm
x = torch.randn(1000, 32, dtype=torch.float64)
with torch.no_grad():
    given = norm(x)
exact = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
off = ((given - exact).abs().max() / exact.abs().max()).item()
print(f"the last norm of the Llama: {given.dtype}, off by {off:.1g} of the largest number")
assert single["LlamaModel"] == 1
assert single["BertModel"] < 0.01
assert 1e-10 < off < 1e-6
PYTHON
