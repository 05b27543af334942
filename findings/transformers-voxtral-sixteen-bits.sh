#!/bin/sh
# transformers 5.23.0, mistral-common 1.13.1: a sound in a message, as Voxtral reads it, is rounded to 16 bits if it is named by its path.
#
# The same WAV file of 32-bit samples, in base64, keeps them. By its path, it is read and written again in 16 bits on the way to the
# tokenizer: quiet sounds lose most. At a hundred-thousandth of full scale, it is off by thrice the largest sample. No message says so.
# PYTHON names a Python that has torch and transformers 5.23.0; without it, they are installed. Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/mistral" mistral-common==1.13.1 tiktoken==0.14.0 \
    pydantic-extra-types==2.11.1 pycountry==26.2.16
"$PYTHON" -m pip install --quiet --target "$folder/others" pydantic jsonschema requests pillow numpy==2.4.6 soundfile==0.14.0
cd "$folder"
cat > tried.py <<'PYTHON'
import base64
import json
from pathlib import Path

import numpy as np
import soundfile
from transformers import MistralCommonBackend

whole = json.loads(Path("mistral/mistral_common/data/tekken_240911.json").read_text())
whole.pop("image")
whole["vocab"] = whole["vocab"][:256]
whole["config"] |= {"num_vocab_tokens": 256, "default_vocab_size": 296, "default_num_special_tokens": 40, "version": "v7"}
names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 11: "<pad>", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]"}
names |= {5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]", 7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]"}
names |= {10: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]"}
names |= {17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]", 19: "[TOOL_CONTENT]", 34: "[TRANSCRIBE]"}
whole["special_tokens"] = [
    {"rank": rank, "token_str": names.get(rank, f"<SPECIAL_{rank}>"), "is_control": True} for rank in range(40)
]
spectrogram = {"num_mel_bins": 80, "hop_length": 160, "window_size": 400}
whole["audio"] = {"sampling_rate": 16000, "frame_rate": 12.5, "audio_encoding_config": spectrogram, "chunk_length_s": 30.0}
Path("tekken.json").write_text(json.dumps(whole))
tokenizer = MistralCommonBackend(tokenizer_path="tekken.json")
samples = np.sin(np.arange(16000) / 20).astype(np.float32)
lost = {}
for loudness in (1, 1e-5):
    soundfile.write("sound.wav", loudness * samples, 16000, subtype="FLOAT")
    for form, content in (("path", "sound.wav"), ("base64", base64.b64encode(Path("sound.wav").read_bytes()).decode())):
        message = {"role": "user", "content": [{"type": "audio", form: content}, {"type": "text", "text": "?"}]}
        [read] = tokenizer.apply_chat_template([message], tokenize=True, return_dict=True)["audio"]
        lost[form, loudness] = abs(read[:16000] - loudness * samples).max() / loudness
        print(f"loudness {loudness:g}, by {form}: off by {lost[form, loudness]:.2g} of the largest sample")
assert lost["base64", 1] == lost["base64", 1e-5] == 0, lost
assert 1e-6 < lost["path", 1] < 1e-4 and lost["path", 1e-5] > 1, lost
PYTHON
PYTHONPATH="$folder/mistral:$folder/others" "$PYTHON" tried.py
