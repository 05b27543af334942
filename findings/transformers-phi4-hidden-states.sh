#!/bin/sh
# transformers 5.23.0: Phi-4 Multimodal that has read a picture once fails for good after it is asked for its hidden states.
#
# The first call adds hooks to the vision tower, since the model takes the last hidden state but one from there. The call with
# output_hidden_states=True adds hooks to the whole model, and to the tower a second time: each of its layers is then counted twice, the one
# that is taken is not there, and no later call works. Asked for in the first call, they come. A small random model.
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
from transformers import Phi4MultimodalConfig, Phi4MultimodalModel

print("transformers", transformers.__version__)
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
vision = small | {"image_size": 32, "patch_size": 8, "crop_size": 32}
audio = {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 2}
audio |= dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32)
config = Phi4MultimodalConfig(
    **small, num_key_value_heads=2, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    vision_config=vision | {"image_token_id": 97}, audio_config=audio | {"audio_token_id": 98},
)
# 2 x 2 vectors of the picture, of it in small, a line end after each row, and one vector between.
ids = torch.tensor([[5, *[97] * 13, 6, 7]])
inputs = {
    "input_ids": ids,
    "image_pixel_values": torch.rand(1, 2, 3, 32, 32),
    "image_sizes": torch.tensor([[32, 32]]),
    "image_attention_mask": torch.ones(1, 2, 4, 4),
}


def tried(model, **options):
    try:
        with torch.no_grad():
            model(**inputs, **options)
        return "works"
    except AttributeError as error:
        return f"fails: {error}"


results = []
for order in ([{}, {"output_hidden_states": True}, {}], [{"output_hidden_states": True}, {}]):
    torch.manual_seed(0)
    model = Phi4MultimodalModel(config).eval()
    results.append([tried(model, **options) for options in order])
    for options, result in zip(order, results[-1]):
        print(options or "plain", result)
    print()
assert [result[:5] for result in results[0]] == ["works", "fails", "fails"], results
assert results[1] == ["works", "works"], results
PYTHON
