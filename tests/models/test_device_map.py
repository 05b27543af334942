"""Models larger than their device: their parts lie on disk until they are used, and measure the
same.
"""

import subprocess
import sys

import pandas as pd
import pytest
import tiny
import torch
import transformers

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.measurement import shards

DISK = {"": "disk"}
# One of each kind that transformers spreads over devices.
SPREAD = [
    "bert",
    "modernbert",
    "gpt2",
    "gpt_neox",
    "qwen3",
    "t5",
    "hubert",
    "whisper",
    "vit",
    "beit",
    "resnet-basic",
    "cvt",
    "character_bert",
    "manta",
]


def assert_same(found: dict[str, pd.DataFrame], wanted: dict[str, pd.DataFrame]) -> None:
    assert list(found) == list(wanted)
    for table in wanted:
        pd.testing.assert_frame_equal(found[table], wanted[table], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SPREAD)
def test_parts_on_disk_measure_as_those_in_memory(name, tmp_path):
    tiny.save(tmp_path, name)
    models = [load_model(tmp_path, dtype="float64", device_map=places) for places in (DISK, None)]
    assert all(parameter.is_meta for parameter in models[0].model.parameters())
    found, wanted = (dict(measure(model, tiny.corpus(name), progress=False)) for model in models)
    assert_same(found, wanted)
    assert len(wanted["anisotropy"]) > 2


@pytest.mark.parametrize("name", ["deberta", "canine"])
def test_what_cannot_be_spread_says_so(name, tmp_path):
    with pytest.raises(
        AnalysisError, match="cannot be spread over devices: leave the device map out"
    ):
        load_model(tiny.save(tmp_path, name), device_map=DISK)


def test_a_map_of_ones_own_splits_a_model_and_workers_read_it_likewise(tmp_path):
    tiny.save(tmp_path, "bert")
    whole = load_model(tmp_path)
    split = load_model(
        tmp_path, device_map={"embeddings": "cpu", "encoder": "disk", "pooler": "disk"}
    )
    assert {p.is_meta for p in split.model.parameters()} == {True, False}
    assert all(
        p.is_meta for p in shards._loaded(split.spec, "text").model.model.encoder.parameters()
    )
    assert_same(
        *(
            dict(measure(model, tiny.corpus("bert"), "anisotropy", progress=False))
            for model in (split, whole)
        )
    )


def test_auto_keeps_what_fits_on_the_device(tmp_path):
    assert not any(
        p.is_meta
        for p in load_model(tiny.save(tmp_path, "bert"), device_map="auto").model.parameters()
    )


def test_weights_on_disk_that_are_not_finite_are_named(tmp_path):
    model, tokenizer = tiny.build("bert")
    torch.nn.init.constant_(model.encoder.layer[1].output.dense.weight, torch.nan)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.raises(
        AnalysisError, match=r"encoder.layer.1.output.dense.weight \(layer 2\) hold NaN"
    ):
        load_model(tmp_path, device_map=DISK)


def test_a_model_at_hand_that_lies_on_disk(tmp_path):
    tiny.save(tmp_path, "llama")
    read = [
        transformers.AutoModel.from_pretrained(tmp_path, device_map=place)
        for place in (DISK, "cpu")
    ]
    models = [load_model(model, processor=load_model(tmp_path).processor) for model in read]
    assert models[0].revision == models[1].revision
    assert_same(*(dict(measure(model, tiny.corpus("llama"), progress=False)) for model in models))


LOADING = """
import pathlib, re, sys, threading, time
import torch
from analysis_lib import load_model
from transformers.models.llama import modeling_llama

def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

before, highest, done = private(), [0], threading.Event()
watch = threading.Thread(target=lambda: [highest.append(private()) for _ in iter(lambda: done.wait(0.001), True)])
watch.start()
model = load_model(sys.argv[1], dtype=sys.argv[2]).model
done.set()
watch.join()
size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
print((max(highest) - before) * 1024 / size)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_in_memory_once_while_they_are_read(dtype, tmp_path):
    tiny.save(tmp_path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, tmp_path, dtype], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.5


@pytest.mark.parametrize("places", ["disk", "", {}, {"": "meta"}, {"": None}, 5])
def test_a_map_that_makes_no_sense_says_so(places, tmp_path):
    with pytest.raises(
        AnalysisError, match=r"the device map is .*: give auto, or where each part lies"
    ):
        load_model(tiny.save(tmp_path, "bert"), device_map=places)


def test_a_part_that_is_not_there_is_the_fault_of_the_map(tmp_path):
    tiny.save(tmp_path, "bert")
    (tmp_path / "data_config.json").write_text("[]")  # As sentence-transformers leaves some.
    with pytest.raises(AnalysisError) as caught:
        load_model(tmp_path, device_map={"encoder": "disk"})
    assert "data_config" not in str(caught.value)


def test_a_model_without_values_says_so():
    model, tokenizer = tiny.build("bert")
    with pytest.raises(AnalysisError, match="has no values, on torch's meta device"):
        load_model(model.to("meta"), processor=tokenizer)
