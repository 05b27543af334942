#!/bin/sh
# gguf 0.19.0: GGUFReader gives the query and key rows of a Llama in another order than transformers loads them.
#
# llama.cpp rotates neighbouring dimensions of a Llama's head together, transformers the first half with the second. Its
# converter therefore interleaves the rows of both matrices (LlamaModel.permute), and transformers 5.23.0 puts them back
# on loading (LlamaTensorProcessor). Nothing in the file says so, and GGUFReader gives rows as they lie: the dimensions
# of keys computed from them come in another order, and a rotation of halves pairs the wrong ones. Some architectures,
# such as Qwen2, keep the order of the checkpoint. A Llama that one writes with GGUFWriter in that order loads without a
# word, and as another model. Read the weights of the loaded model, and interleave rows before writing a Llama.
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

print("transformers", transformers.__version__, "gguf", version("gguf"))
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.3}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
ids = torch.arange(5, 45).unsqueeze(0)


def interleaved(rows, heads):
    """Dimension i of the first half of a head, then dimension i of its second half."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(name, model, arch, interleave):
    config = model.config
    writer = gguf.GGUFWriter(name, arch)
    writer.add_name("small")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    for key, weights in model.state_dict().items():
        if interleave and "q_proj" in key:
            weights = interleaved(weights, config.num_attention_heads)
        if interleave and "k_proj" in key:
            weights = interleaved(weights, config.num_key_value_heads)
        module, _, kind = key.rpartition(".")
        writer.add_tensor(f"{names.get_name(module)}.{kind}", weights.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seen(kind, config, arch, interleave):
    """Whether row 1 of the keys in the file is row 1 of the model read from it; whether that is the model written."""
    torch.manual_seed(0)
    model = kind(config(**sizes)).eval()
    name = f"{arch}-{interleave}.gguf"
    write(name, model, arch, interleave)
    loaded = AutoModelForCausalLM.from_pretrained(".", gguf_file=name).eval()
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(name).tensors}
    in_file = torch.tensor(tensors["blk.0.attn_k.weight"])
    keys = loaded.model.layers[0].self_attn.k_proj.weight
    in_place = (in_file == keys).all(1)
    with torch.no_grad():
        off = (loaded(ids).logits - model(ids).logits).abs().max().item()
    order = "interleaved" if interleave else "of the checkpoint"
    print(f"{arch}, rows {order}: {in_place.sum()} of {len(keys)} rows of the keys in the file", end=" ")
    print(f"are those of the loaded model; logits off by {off:.2g}")
    return in_place.all().item(), off < 1e-4


transformers.logging.set_verbosity_error()
# As llama.cpp writes them.
assert seen(LlamaForCausalLM, LlamaConfig, "llama", True) == (False, True)
assert seen(Qwen2ForCausalLM, Qwen2Config, "qwen2", False) == (True, True)
# As one would write them.
assert seen(LlamaForCausalLM, LlamaConfig, "llama", False) == (False, False)
PYTHON
