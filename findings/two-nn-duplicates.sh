#!/bin/sh
# scikit-dimension 0.5.0, dadapy 0.3.4: repeated points raise the TwoNN dimension in the one and lower it in the other.
#
# Of 2000 points of a Gaussian in 5 dimensions, 10 % with a twin: 5.3 and 3.4; with 20 %: 5.5 and, in dadapy, a
# ValueError (0 with algorithm="ml"). Otherwise both only warn. Repeated tokens make such twins among the embeddings.
# TwoNN._twonn leaves out the twins but not the points near them, for which the second neighbour is no further than the
# first. compute_id_2NN takes the ratio of a twin for an infinite one; remove_zero_dists(), which the warning names
# first, makes it huge instead: 0.06. Drop repeats before: numpy.unique(points, axis=0) or remove_identical_points().
# dadapy needs numpy < 2, jax 0.4.30, a C compiler and Python 3.11 or 3.12: a Python of its own is made.
# Fails when that is no longer so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scikit-dimension==0.5.0 dadapy==0.3.4 \
    numpy==1.26.4 scipy==1.17.1 scikit-learn==1.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import warnings
from importlib.metadata import version

import numpy
from dadapy import Data
from skdim.id import TwoNN

print("scikit-dimension", version("scikit-dimension"), "dadapy", version("dadapy"))
generator = numpy.random.default_rng(0)
cloud = generator.normal(size=(2000, 5))


def by_skdim(points):
    return TwoNN().fit(points).dimension_


def by_dadapy(points, algorithm="base", zeros=False):
    data = Data(coordinates=points, n_jobs=1)
    data.compute_distances(maxk=3)
    if zeros:
        data.distances = data.remove_zero_dists(data.distances)
    return data.compute_id_2NN(algorithm=algorithm)[0]


ways = {
    "scikit-dimension": by_skdim,
    "dadapy": by_dadapy,
    "dadapy, ml": lambda points: by_dadapy(points, "ml"),
    "dadapy, remove_zero_dists": lambda points: by_dadapy(points, zeros=True),
}
found, warned = {}, {}
for share in (0, 10, 20):
    twins = 2000 * share // 200
    points = numpy.concatenate([cloud[: 2000 - twins], cloud[:twins]])
    for kind, given in {"all": points, "unique": numpy.unique(points, axis=0)}.items():
        for name, way in ways.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found[share, kind, name] = way(given)
                except ValueError as error:
                    found[share, kind, name] = str(error)
            warned[share, kind, name] = len(caught)
            number = found[share, kind, name]
            number = number if isinstance(number, str) else f"{number:.2f}"
            print(f"{share} % with a twin, {kind} {len(given)} points, {name}: {number}; {len(caught)} warnings")
for share in (0, 10, 20):
    assert all(4.9 < found[share, "unique", name] < 5.3 for name in ways)
    assert not any(warned[share, "unique", name] for name in ways)
assert all(warned[share, "all", name] for share in (10, 20) for name in ways)
assert 5.2 < found[10, "all", "scikit-dimension"] < 5.45 < found[20, "all", "scikit-dimension"] < 5.7
assert 3.2 < found[10, "all", "dadapy"] < 3.7
assert "infs or NaNs" in found[20, "all", "dadapy"]
assert found[20, "all", "dadapy, ml"] == 0
assert found[20, "all", "dadapy, remove_zero_dists"] < 0.1
PYTHON
