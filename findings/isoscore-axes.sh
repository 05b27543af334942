#!/bin/sh
# IsoScore 2.0.1: wants a point in each row; 1.0 wanted one in each column, and the same script gets another score.
#
# No version checks the shape, and no README names the change: that of 1.0 passes 100 points in space as 3 rows, and
# only the docstrings of 2.0.0 and 2.0.1 say (num_samples, dimension). After an update, a script for 1.0 finds 0.01 in
# a round cloud that had 0.98. Given rows, 1.0 raises an error if points outnumber dimensions, and none if not.
# Pin the version, and pass the axes that it wants. See pca_normalization in 1.0 and IsoScore in 2.0.1.
# PYTHON names a Python that has torch, numpy and scikit-learn; without it, they are installed.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 numpy==2.4.6 scikit-learn==1.9.0
fi
for version in 1.0 2.0.1; do
    "$PYTHON" -m pip install --quiet --no-deps --target "$folder/$version" "IsoScore==$version"
done
cd "$folder"
cat > score.py <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import numpy
from IsoScore import IsoScore

# Of a tensor that is made from a tensor.
warnings.simplefilter("ignore")
generator = numpy.random.default_rng(0)
many = generator.normal(size=(500, 8))
few = generator.normal(size=(8, 500))


def score(points):
    try:
        return float(IsoScore.IsoScore(points))
    except ValueError as error:
        print("ValueError:", str(error).split(" must")[0], "...")
        return None


print("IsoScore", version("IsoScore"))
seen = {}
for name, points in {"500 points in 8 dimensions": many, "8 points in 500 dimensions": few}.items():
    for axes, matrix in {"a point a row": points, "a point a column": points.T}.items():
        seen[name[0], axes] = number = score(matrix)
        print(f"{name}, {axes}:", "no score" if number is None else f"{number:.4f}")
if sys.argv[1] == "columns":
    assert seen["5", "a point a column"] > 0.95
    assert seen["5", "a point a row"] is None
    assert seen["8", "a point a row"] > 0.95
else:
    assert seen["5", "a point a row"] > 0.95
    assert seen["5", "a point a column"] < 0.05
PYTHON
PYTHONPATH="$folder/1.0" "$PYTHON" score.py columns
PYTHONPATH="$folder/2.0.1" "$PYTHON" score.py rows
