#!/bin/sh
# reptrix 0.1.0: get_rankme is not the RankMe of the paper that it cites (Garrido et al. 2023), but a smaller number.
#
# The paper takes the singular values of the matrix of vectors, whose mean is not subtracted. reptrix takes the
# eigenvalues of the covariance: squares of singular values, around the mean. Shares of squares are less even, so the
# rank is lower; and where the mean is long, as in language models, the paper's number is near 1 and reptrix's is not.
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
from reptrix import rankme


def of_the_paper(vectors):
    shares = numpy.linalg.svd(vectors, compute_uv=False)
    shares = shares / shares.sum() + 1e-7
    return numpy.exp(-(shares * numpy.log(shares)).sum())


generator = numpy.random.default_rng(0)
scales = numpy.exp(-numpy.arange(64) / 20)
centred = generator.normal(size=(4000, 64)) * scales
centred -= centred.mean(0)
numbers = {}
for name, mean in {"around zero": 0, "around a long mean": 300}.items():
    vectors = centred + mean * numpy.eye(64)[-1]
    numbers[name] = of_the_paper(vectors), rankme.get_rankme(torch.tensor(vectors))
    print(f"{name}: the paper's {numbers[name][0]:.2f}, reptrix {numbers[name][1]:.2f}")
paper, peer = numbers["around zero"]
assert paper > 1.5 * peer
paper, peer = numbers["around a long mean"]
assert paper < 2 < peer
PYTHON
