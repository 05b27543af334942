#!/bin/sh
# transformers 5.23.0: without torchvision, the processor of Qwen2-VL cannot be loaded for images, although its images need none.
#
# The image processor on Pillow works. AutoProcessor asks for torchvision for the part that reads videos, and gives up as a whole;
# made by hand without that part, the processor fails with an AttributeError that does not name torchvision.
# A tokenizer of six words. PYTHON names a Python with torch, transformers and pillow, without torchvision; else they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.23.0 pillow
fi
cd "$folder"
"$PYTHON" - <<'PYTHON'
import json
from pathlib import Path

import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers.utils import is_torchvision_available

print("transformers", transformers.__version__)
assert not is_torchvision_available()
marks = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
words = {word: index for index, word in enumerate(["<unk>", "cat", *marks])}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
    unk_token="<unk>",
    extra_special_tokens={"image_token": marks[0], "video_token": marks[1]},
)
images = transformers.Qwen2VLImageProcessorPil()
pixels = images(Image.new("RGB", (56, 56)), return_tensors="pt")["pixel_values"]
print("its image processor reads an image:", tuple(pixels.shape))

home = Path("model")
tokenizer.save_pretrained(home)
images.save_pretrained(home)
(home / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
(home / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
try:
    transformers.AutoProcessor.from_pretrained(home)
except ImportError as error:
    loaded = str(error).split("\n")[1]
    print("AutoProcessor: ImportError:", loaded[:90])
try:
    transformers.Qwen2VLProcessor(images, tokenizer)
except AttributeError as error:
    made = str(error)
    print("Qwen2VLProcessor(images, tokenizer): AttributeError:", made)
assert "requires the Torchvision library" in loaded
assert "torchvision" not in made.lower()
PYTHON
