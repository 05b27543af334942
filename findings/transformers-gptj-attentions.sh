#!/bin/sh
# transformers 5.24.0: the attentions of GPT-J and CodeGen are an empty tuple by default; in 5.23.0 they are the weights.
#
# Both now attend by sdpa unless told otherwise, which forms no weights, and output_attentions=True logs at most a warning. A script that worked
# the day before reads nothing: it is attn_implementation="eager" that gives the same weights in both versions.
# Small random models. PYTHON names a Python that has torch and transformers 5.23.0; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/newer" transformers==5.24.0
cd "$folder"
cat > attentions.py <<'PYTHON'
import sys

import torch
import transformers
from transformers import CodeGenConfig, CodeGenModel, GPTJConfig, GPTJModel

sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
sizes |= {"bos_token_id": 0, "eos_token_id": 1}
ids = torch.arange(5, 17).unsqueeze(0)
print("transformers", transformers.__version__)
for kind, config in ((GPTJModel, GPTJConfig), (CodeGenModel, CodeGenConfig)):
    counts = []
    for chosen in ({}, {"attn_implementation": "eager"}):
        model = kind._from_config(config(**sizes), **chosen).eval()
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        counts.append(len([weights for weights in attentions if weights is not None]))
        last = model.config._attn_implementation
        print(f"{kind.__name__}, {chosen or 'default'}: attends by {last}, {counts[-1]} attentions of 2 blocks")
    assert counts == [int(sys.argv[1]), 2], counts
PYTHON
"$PYTHON" attentions.py 2
PYTHONPATH="$folder/newer" "$PYTHON" attentions.py 0
