#!/bin/sh
# transformers 5.23.0: [PAD] before a text changes the vectors of its tokens in GPT-2, although the attention mask hides it.
#
# The mask does not move positions: behind three [PAD], the first token of GPT-2 has the position 3. With `position_ids` it
# gives the vectors of the text alone. In Llama, where attention sees distances only, the mask is enough.
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
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

print("transformers", transformers.__version__)
torch.manual_seed(0)
gpt2 = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)).double().eval()
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
llama = LlamaModel(LlamaConfig(**sizes)).double().eval()
ids = torch.arange(5, 17).unsqueeze(0)
padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
mask = (padded > 0).long()
positions = (mask.cumsum(1) - 1).clamp(min=0)


def change(model, **more):
    """The largest change of the vectors of real tokens, beside the largest number in them."""
    with torch.no_grad():
        alone = model(ids, use_cache=False).last_hidden_state
        behind = model(padded, attention_mask=mask, use_cache=False, **more).last_hidden_state[:, 3:]
    return ((behind - alone).abs().max() / alone.abs().max()).item()


by_mask, by_positions, of_llama = change(gpt2), change(gpt2, position_ids=positions), change(llama)
print(f"GPT-2: {by_mask:.2g} with the mask alone, {by_positions:.2g} with position_ids. Llama: {of_llama:.2g} with the mask alone")
assert by_mask > 0.1
assert max(by_positions, of_llama) < 1e-6
PYTHON
