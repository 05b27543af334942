#!/bin/sh
# transformers 5.23.0: a Llama 3.1 loaded from a GGUF file has lost its rotary scaling, without a word.
#
# GGUF has no rotary scaling of the type "llama3": llama.cpp's converter writes the divisors of frequencies as a tensor,
# rope_freqs.weight (LlamaModel.generate_extra_tensors). load_gguf_checkpoint reads no scaling for a Llama, and passes
# over tensors that no parameter takes. The weights are right, and the config says rope_type "default"; logits depart
# from the true ones the more, the longer the text. Take the config from the checkpoint before its conversion, and pass
# it: from_pretrained(..., gguf_file=..., config=config).
# Small random models. PYTHON names a Python that has torch, transformers and accelerate; without it, they are
# installed. Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 requests==2.34.2
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" gguf==0.19.0
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
from importlib.metadata import version

import gguf
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "gguf", version("gguf"))
transformers.logging.set_verbosity_warning()
rotary = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
config = LlamaConfig(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=65536, initializer_range=0.3, tie_word_embeddings=False,
    rope_parameters=rotary | {"original_max_position_embeddings": 8192},
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()

# A file as llama.cpp's converter writes it.
writer = gguf.GGUFWriter("llama.gguf", "llama")
writer.add_name("small")
writer.add_vocab_size(config.vocab_size)
writer.add_context_length(config.max_position_embeddings)
writer.add_block_count(config.num_hidden_layers)
writer.add_embedding_length(config.hidden_size)
writer.add_feed_forward_length(config.intermediate_size)
writer.add_head_count(config.num_attention_heads)
writer.add_head_count_kv(config.num_key_value_heads)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_rope_dimension_count(config.head_dim)
writer.add_rope_freq_base(rotary["rope_theta"])
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
for key, weights in model.state_dict().items():
    if "q_proj" in key or "k_proj" in key:
        weights = weights.unflatten(0, (config.num_attention_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    module, _, kind = key.rpartition(".")
    writer.add_tensor(f"{names.get_name(module)}.{kind}", weights.contiguous().numpy())
plain = rotary["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

ids = torch.arange(400).unsqueeze(0) * 37 % 96
kinds = [kind.name for kind in gguf.RopeScalingType]
print("types of scaling in gguf:", *kinds)
seen = {}
for name, more in {"as the file says": {}, "with the config": {"config": config}}.items():
    loaded = LlamaForCausalLM.from_pretrained(".", gguf_file="llama.gguf", **more).eval()
    same = all(torch.equal(weights, loaded.state_dict()[key]) for key, weights in model.state_dict().items())
    with torch.no_grad():
        off = (loaded(ids).logits - model(ids).logits).abs().amax(-1)[0]
    seen[name] = loaded.config.rope_parameters["rope_type"], off.max().item()
    print(f"{name}: weights {'the same' if same else 'others'}, rope_type {seen[name][0]}, logits off by", end=" ")
    print(f"{off[:10].max():.2g} in the first 10 tokens, {off[-10:].max():.2g} in the last 10")
    assert same
assert "LLAMA3" not in kinds
assert seen["as the file says"][0] == "default" and seen["as the file says"][1] > 0.5
assert seen["with the config"][0] == "llama3" and seen["with the config"][1] < 1e-4
PYTHON
