#!/bin/sh
# gguf 0.19.0: GGUFReader gives tensors of BF16 as raw bytes, in rows twice as long, where those of F16 are numbers.
#
# NumPy has no bfloat16, so BF16 goes the way of the quantized types: `data` is uint8, and casting it to float raises no
# error but gives integers from 0 to 255, as if a matrix had twice the columns. `shape` gives the true sizes, columns
# first. `_build_tensors` of GGUFReader chooses the type. gguf.quants.dequantize(tensor.data, tensor.tensor_type) gives
# float32 for all types of floats and blocks.
# PYTHON names a Python that has NumPy, PyYAML, requests and tqdm; without it, they are installed. Fails when that is no
# longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet numpy==2.4.6 pyyaml==6.0.3 requests==2.34.2 tqdm==4.70.1
fi
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" gguf==0.19.0
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
from importlib.metadata import version

import gguf
import numpy

print("gguf", version("gguf"))
weights = numpy.random.default_rng(0).normal(size=(6, 4)).astype(numpy.float32)
writer = gguf.GGUFWriter("weights.gguf", "llama")
for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
    writer.add_tensor(kind.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

seen = {}
for tensor in gguf.GGUFReader("weights.gguf").tensors:
    data = tensor.data
    numbers = gguf.quants.dequantize(data, tensor.tensor_type)
    seen[tensor.name] = str(data.dtype), data.shape
    span = f"{data.astype(float).min():.3g} to {data.astype(float).max():.3g}"
    print(f"{tensor.name}, shape {tensor.shape}: {data.dtype} of {data.shape}, {span}; dequantized {numbers.shape}")
    assert numbers.shape == weights.shape
    assert numpy.abs(numbers - weights).max() < 0.01
assert seen == {"F32": ("float32", (6, 4)), "F16": ("float16", (6, 4)), "BF16": ("uint8", (6, 8))}, seen
PYTHON
