#!/bin/sh
# reptrix 0.1.0: the decay of eigenvalues (alpha) is another number each time that it is asked for with the same range.
#
# The range of ranks that is given is counted up by 1 in place: the second call fits ranks one further, the third one
# two. Whoever makes one range for all layers of a model compares layers over other ranks each. A fresh copy for each
# call gives the same number twice.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 numpy==2.4.6 scikit-learn==1.9.0 matplotlib==3.11.2
fi
# Without what it needs for downloads of its examples.
"$PYTHON" -m pip install --quiet --no-deps --target "$folder/peer" reptrix==0.1.0
cd "$folder"
PYTHONPATH="$folder/peer" "$PYTHON" - <<'PYTHON'
import numpy
import torch
from reptrix import alpha

generator = numpy.random.default_rng(0)
# Variances that fall as 1, 1/2, 1/3 and then faster, so that the fit depends on the range.
scales = numpy.exp(-numpy.arange(200) / 60)
vectors = torch.tensor(generator.normal(size=(2000, 200)) * scales)

ranks = numpy.arange(10, 100)
several = [alpha.get_alpha(vectors, fit_range=ranks)[0] for _ in range(3)]
print("alpha, three times with one range:", *(f"{each:.4f}" for each in several))
print("the range afterwards:", ranks[0], "to", ranks[-1])
fresh = [alpha.get_alpha(vectors, fit_range=numpy.arange(10, 100))[0] for _ in range(2)]
print("alpha, twice with a range of its own:", *(f"{each:.4f}" for each in fresh))
assert (ranks[0], ranks[-1]) == (13, 102)
assert several[0] == fresh[0] == fresh[1]
assert several[0] < several[1] < several[2]
PYTHON
