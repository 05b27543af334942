#!/bin/sh
# peft 0.21.2: transformers 5.23.0 loads an adapter of DoRA from its folder without the magnitudes that were trained.
#
# AutoModelForCausalLM.from_pretrained(folder) and load_adapter keep the lengths of the base model's rows instead, so
# the logits are others. A report lists the magnitudes as UNEXPECTED and as MISSING; no error is raised.
# PeftModel.from_pretrained and AutoPeftModelForCausalLM load them: use those, or save what merge_and_unload gives.
# Files name a magnitude without ".weight". LoraModel._remap_adapter_state_dict_for_load puts it back; the renaming that
# transformers takes from build_peft_weight_mapping does not. The same is seen in transformers 5.24.0.
# A small random Llama. PYTHON names a Python with torch, transformers and accelerate; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
import warnings

import peft
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("peft", peft.__version__, "transformers", transformers.__version__)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("base")
ids = torch.arange(5, 25).unsqueeze(0)


def magnitudes(model):
    return torch.cat([each.flatten() for name, each in model.named_parameters() if "magnitude" in name]).detach()


def logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits


base = AutoModelForCausalLM.from_pretrained("base")
untrained = logits(base)
config = LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(base, config)
before = magnitudes(model).clone()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
for _ in range(50):
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("adapter")
after, trained = magnitudes(model), logits(model)
moved = (after - before).abs().max(), (trained - untrained).abs().max()
print(f"training moves magnitudes by up to {moved[0]:.2f} and logits by up to {moved[1]:.2f}")

with_adapter = AutoModelForCausalLM.from_pretrained("base")
report = with_adapter.load_adapter("adapter")
for keys in (report.missing_keys, report.unexpected_keys):
    assert len(keys) == 4
    assert all("lora_magnitude_vector" in key for key in keys)
loaded = {
    "PeftModel": PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter"),
    "AutoPeftModelForCausalLM": AutoPeftModelForCausalLM.from_pretrained("adapter"),
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained("adapter"),
    "load_adapter": with_adapter,
}
for name, each in loaded.items():
    off = (logits(each) - trained).abs().max().item()
    kept = torch.equal(magnitudes(each), after)
    print(f"{name}: logits off by {off:.2f}; its magnitudes are those", "of training" if kept else "of the base model")
    if "Peft" in name:
        assert kept
        assert off < 1e-6
    else:
        assert torch.allclose(magnitudes(each), before)
        assert off > 0.05
loaded["PeftModel"].merge_and_unload().save_pretrained("merged")
off = (logits(AutoModelForCausalLM.from_pretrained("merged")) - trained).abs().max().item()
print(f"merged, and loaded by AutoModelForCausalLM: logits off by {off:.2f}")
assert off < 1e-5
PYTHON
