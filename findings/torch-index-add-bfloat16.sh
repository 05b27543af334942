#!/bin/sh
# torch 2.13.0: on a processor, index_add_ in bfloat16 stalls at 256 when it adds ones to a vector, and not to a matrix.
#
# It adds in bfloat16, where 256 + 1 is 256 again. A matrix with an int64 index along its first or last axis is handed
# to scatter_add_, which adds in float32, as sum does. A vector, an int32 index, a middle axis or alpha=2 stays in
# bfloat16; so does index_put_ with accumulate=True. Counts of frequent tokens stall, and nothing warns.
# Add in float32 and round once, at the end. The choice is made in the kernel index_add_cpu_out.
# PYTHON names a Python that has torch 2.13.0; without it, it is installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 numpy==2.4.6
fi
cd "$folder"
"$PYTHON" - <<'PYTHON'
import torch

print("torch", torch.__version__)
count = 5000
first = torch.zeros(count, dtype=torch.long)


def added(shape, axis, dtype=torch.bfloat16, index=first, **more):
    """What lands in entry 0 of an axis once `count` slices of ones were added to it."""
    sizes = list(shape)
    sizes[axis] = count
    total = torch.zeros(shape, dtype=dtype).index_add_(axis, index, torch.ones(sizes, dtype=dtype), **more)
    return total.select(axis, 0).unique().item()


ones = torch.ones(count, dtype=torch.bfloat16)
zeros = torch.zeros(3, dtype=torch.bfloat16)
stalled = {
    "index_add_ to a vector": added((3,), 0),
    "index_add_ to a matrix, index in int32": added((3, 4), 0, index=first.int()),
    "index_add_ along a middle axis": added((2, 3, 4), 1),
    "index_add_ to a matrix, alpha=2, halved": added((3, 4), 0, alpha=2) / 2,
    "index_put_, accumulate=True": zeros.clone().index_put_((first,), ones, accumulate=True)[0].item(),
}
whole = {
    "index_add_ to a matrix": added((3, 4), 0),
    "index_add_ to a matrix, last axis": added((4, 3), 1),
    "scatter_add_ to a vector": zeros.clone().scatter_add_(0, first, ones)[0].item(),
    "sum": ones.sum().item(),
}
in_float16, in_float32 = (added((3,), 0, dtype=dtype) for dtype in (torch.float16, torch.float32))
for name, number in (stalled | whole).items():
    print(f"{count} ones in bfloat16, {name}: {number:.0f}")
print(f"index_add_ to a vector: {in_float16:.0f} in float16, {in_float32:.0f} in float32")
assert set(stalled.values()) == {256}
# The number of bfloat16 that is nearest to 5000.
assert set(whole.values()) == {4992}
assert (in_float16, in_float32) == (2048, count)
PYTHON
