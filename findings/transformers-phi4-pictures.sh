#!/bin/sh
# transformers 5.23.0: by default (sdpa), the vision tower of Phi-4 Multimodal reads a picture causally: a patch sees only those before it.
#
# Its attention modules are marked as causal. The mask of a picture without padding hides nothing and is left out, and sdpa then takes the mark for
# the mask. Eager attention sees the whole picture, and so does sdpa as soon as one patch is padding. A small random model.
# PYTHON names a Python that has torch and transformers 5.23.0; without it, they are installed. Fails when that is no longer so.
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
from transformers import Phi4MultimodalVisionConfig, Phi4MultimodalVisionModel

print("transformers", transformers.__version__)
torch.manual_seed(0)
config = Phi4MultimodalVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
)
model = Phi4MultimodalVisionModel(config).eval()
picture = torch.rand(1, 3, 32, 32)
other = picture.clone()
other[..., 24:, 24:] = 0  # the last of 16 patches
whole = torch.ones(1, 4, 4, dtype=torch.bool)
padded = whole.clone()
padded[0, 3] = False


def first_patch(picture, mask, attention):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(picture, patch_attention_mask=mask).last_hidden_state[0, 0]


changes = {}
for attention in ("sdpa", "eager"):
    change = first_patch(picture, whole, attention) - first_patch(other, whole, attention)
    changes[attention] = change.abs().max().item()
    print(f"{attention}: the first patch changes with the last one by {changes[attention]:.1e}")
apart = {}
for name, mask in (("a whole picture", whole), ("a padded picture", padded)):
    difference = first_patch(picture, mask, "sdpa") - first_patch(picture, mask, "eager")
    apart[name] = difference.abs().max().item()
    print(f"{name}: sdpa and eager attention differ by {apart[name]:.1e}")
assert changes["sdpa"] == 0 and changes["eager"] > 1e-4, changes
assert apart["a whole picture"] > 1e-3 and apart["a padded picture"] < 1e-5, apart
PYTHON
