#!/bin/sh
# transformer-lens 4.3.0: in its compatibility mode, values and hidden states of GPT-2 have other cosines.
#
# Log-probabilities stay the same, and so do queries and keys. But fold_value_biases takes the bias off the values, with
# what the bias of the norm adds to them: a bias is one direction that all share, so the average cosine of values falls.
# center_writing_weights subtracts the mean of its coordinates from each hidden state. Without the mode, or with
# no_processing=True, all are those of transformers; fold_value_biases=False gives back the values, and
# center_writing_weights=False the hidden states. See ProcessWeights: fold_layer_norm and the two of these names.
# A small random GPT-2 with biases. PYTHON names a Python that has torch, transformers, accelerate, pandas, pyarrow,
# jaxtyping and rich; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 pandas==3.1.1 \
        pyarrow==26.0.1 jaxtyping==0.3.11 rich==15.0.0
fi
# Without what it needs for training and downloads.
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" transformer-lens==4.3.0 einops==0.8.2 \
    datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0
cd "$folder"
HF_HUB_OFFLINE=1 PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
from importlib.metadata import version

import torch
import transformers
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel

print("transformer-lens", version("transformer-lens"), "transformers", transformers.__version__)
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
block = model.transformer.h[1]
with torch.no_grad():
    # Biases, as training gives them, and embeddings whose mean is not 0.
    block.attn.c_attn.bias.normal_(0, 0.1)
    block.ln_1.bias.normal_(0, 0.5)
    model.transformer.wte.weight += 0.02
words = {str(each): each for each in range(99)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
marks = {"bos_token": "0", "eos_token": "1", "pad_token": "1"}
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
model.save_pretrained("gpt2")
tokenizer.save_pretrained("gpt2")
ids = torch.arange(5, 45).unsqueeze(0)


def cosine(vectors):
    """The average over pairs of different tokens."""
    units = torch.nn.functional.normalize(vectors, dim=-1)
    return ((units.sum(0).square().sum() - len(units)) / (len(units) * (len(units) - 1))).item()


def near(one, other):
    return torch.allclose(one, other, atol=1e-5)


seen = {}
block.attn.c_attn.register_forward_hook(lambda module, given, output: seen.update(qkv=output[0]))
with torch.no_grad():
    output = model(ids, output_hidden_states=True)
    exact = dict(zip("qkv", seen["qkv"].split(32, -1)), states=output.hidden_states[1][0])
    # What the bias and that of the norm add to all values alike.
    weight, bias = block.attn.c_attn.weight[:, 64:], block.attn.c_attn.bias[64:]
    shared = bias + block.ln_1.bias @ weight


def by_bridge(**options):
    bridge = TransformerBridge.boot_transformers("gpt2", device="cpu")
    if options.pop("compatible", True):
        bridge.enable_compatibility_mode(disable_warnings=True, **options)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
    assert near(logits.log_softmax(-1), output.logits.log_softmax(-1))
    vectors = {each: cache[f"blocks.1.attn.hook_{each}"][0].flatten(1) for each in "qkv"}
    vectors["states"] = cache["blocks.1.hook_resid_pre"][0]
    assert near(vectors["q"], exact["q"])
    assert near(vectors["k"], exact["k"])
    return vectors


found = {
    "transformers": exact,
    "bridge": by_bridge(compatible=False),
    "compatibility mode": by_bridge(),
    "no_processing=True": by_bridge(no_processing=True),
    "fold_value_biases=False": by_bridge(fold_value_biases=False),
    "center_writing_weights=False": by_bridge(center_writing_weights=False),
}
for name, vectors in found.items():
    of_values, of_states = cosine(vectors["v"]), cosine(vectors["states"])
    print(f"{name}: average cosine of values {of_values:.2f}, of hidden states {of_states:.2f}")
for name, vectors in found.items():
    turned = name in ("compatibility mode", "center_writing_weights=False")
    assert near(vectors["v"], exact["v"] - shared if turned else exact["v"])
    turned = name in ("compatibility mode", "fold_value_biases=False")
    means = exact["states"].mean(-1, keepdim=True)
    assert near(vectors["states"], exact["states"] - means if turned else exact["states"])
assert cosine(exact["v"]) - cosine(found["compatibility mode"]["v"]) > 0.3
assert cosine(exact["states"]) - cosine(found["compatibility mode"]["states"]) > 0.1
PYTHON
