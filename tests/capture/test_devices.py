"""A pass over a device that works on its own, as a GPU does, and over two of them: see
``simulated_devices.py``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# How many masks the layers of a model share. BEiT, CvT and MANTa wait for their device in each
# layer.
MASKS = {
    "bert": 1,
    "albert": 1,
    "mpnet": 0,
    "deberta": 0,
    "modernbert": 2,
    "gpt2": 1,
    "qwen3": 1,
    # The decoder and its attention to the encoder have one each.
    "t5": 3,
    "canine": 0,
    "character_bert": 1,
    "wav2vec2": 1,
    "whisper": 1,
    "vit": 1,
    "segformer": 3,
    "resnet-basic": 0,
    "convnext": 0,
}


# Text in both directions and in one, with hooks, two masks, a decoder beside its encoder; sound; an
# image; maps.
SPREAD = "bert", "gpt2", "mpnet", "modernbert", "t5", "whisper", "vit", "convnext"


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    script = Path(__file__).with_name("simulated_devices.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        script,
        *(f"1:{name}" for name in MASKS),
        *(f"2:{name}" for name in SPREAD),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MASKS)
def test_no_layer_waits_for_its_device(name, found):
    on_one = found[f"1:{name}"]
    assert "error" not in on_one, on_one["error"]
    assert {*map(tuple, on_one["layers"])} == {("npy:0",)}
    # What a mask allows is asked once, not in each layer.
    assert on_one["masks"] == MASKS[name]


@pytest.mark.parametrize("name", SPREAD)
def test_each_layer_is_measured_where_it_lies(name, found):
    on_one, on_two = (found[f"{count}:{name}"] for count in (1, 2))
    assert "error" not in on_two, on_two["error"]
    assert len(on_two["layers"]) == len(on_one["layers"])
    devices = [device for (device,) in on_two["layers"]]
    # A decoder's attention to its encoder comes between its layers.
    assert devices == sorted(devices) or name == "t5"
    assert {*devices} == {"npy:0", "npy:1"}
