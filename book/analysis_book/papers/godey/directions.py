"""The directions that queries and keys share along training, and the part of drift along them."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_book.papers.godey.alignment import chance_band, chance_dimensions
from analysis_book.training.dynamics import Dynamics, heads_shown
from analysis_lib.errors import AnalysisError

Vectors = Float[np.ndarray, "vector dim"]
Directions = Float[np.ndarray, "two dim"]


def singular_directions(
    vectors: Vectors,
    towards: Float[np.ndarray, " dim"],
) -> Directions:
    """The first two right singular vectors of vectors that are not centred.

    Godey et al. 2024, sec. 5. They are the eigenvectors of XᵀX, in float64, with the largest
    eigenvalues. The sign of a singular vector is arbitrary: each is turned so that ``towards`` has
    a coordinate of zero or more along it.

    Args:
        vectors: one row per vector.
        towards: a vector on whose side the directions lie, such as the mean of the vectors.

    Raises:
        AnalysisError: a vector is not finite.

    >>> singular_directions(np.array([[-3.0, -4], [6, 8], [4, -3]]), np.array([1.0, 1])).round(6)
    array([[ 0.6,  0.8],
           [ 0.8, -0.6]])
    """
    if not np.isfinite(vectors).all():
        raise AnalysisError(
            "some vectors are not finite (NaN or infinity): they have no directions"
        )
    wide = vectors.astype(np.float64)
    _, eigenvectors = np.linalg.eigh(wide.T @ wide)
    directions = eigenvectors.T[::-1][:2]
    signs = np.where(directions @ towards < 0, -1, 1)
    return directions * signs[:, None]


def projections(run: Dynamics) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Queries and keys of the heads shown, on two directions that all steps share.

    Fig. 11, 12 and 19 to 22. The directions of a head are the first right singular vectors,
    uncentred, of its sampled vectors of all steps, or of its keys or queries alone; the mean key of
    the last step has no negative coordinate along them.

    Returns:
        The sampled queries and keys, and their means over all tokens, in the order of the steps.
        Columns directions (``both``, ``keys``, ``queries``: whose they are), head (such as
        ``similar (layer 1, head 1)``), step, space, x and y.
    """
    first_seed = run.seeds[0]
    sampled = run["vectors"].query("seed == @first_seed")
    sampled = sampled.set_index(["layer", "head", "step", "space"]).sort_index()
    sampled = sampled.drop(columns="seed").astype(float)
    means = _means(run).loc[first_seed]
    clouds = []
    paths = []
    last_step = run.steps[-1]
    shown = heads_shown(run["qk_alignment"])
    for end, (layer, head) in shown.items():
        title = f"{end} (layer {layer}, head {head})"
        vectors = sampled.loc[layer, head]
        of_head = means.loc[layer, head]
        last_key = vectors.loc[(last_step, "key")].mean().to_numpy()
        for name, part in _choices(vectors).items():
            directions = singular_directions(part.to_numpy(), last_key)
            labels = {"directions": name, "head": title}
            clouds.append(_along(directions, vectors, labels))
            paths.append(_along(directions, of_head, labels))
    sampled_rows = pd.concat(clouds, ignore_index=True)
    mean_rows = pd.concat(paths, ignore_index=True)
    return sampled_rows, mean_rows


def _along(
    directions: Directions,
    vectors: pd.DataFrame,
    labels: dict[str, str],
) -> pd.DataFrame:
    """The coordinates x and y of vectors, a row for each with its index and labels as columns."""
    coordinates = vectors.to_numpy() @ directions.T
    table = pd.DataFrame(coordinates, vectors.index, ["x", "y"])
    table = table.reset_index()
    table.insert(0, "head", labels["head"])
    table.insert(0, "directions", labels["directions"])
    return table


def shared_drift(run: Dynamics) -> pd.DataFrame:
    """How much of the drifts of a head's mean query and mean key lies along one line.

    A drift is the move of a mean from the first step to the last. Lines are the first right
    singular vectors, uncentred, of the means of all steps: of queries and keys together (``of
    both``), or of the keys for the drift of the query and of the queries for that of the key (``of
    the other``). Of two drifts with the cosine c, no line holds more than (1 + ǀcǀ) / 2 of both.

    Returns:
        One row per direction, seed, layer and head, with share: of the squared length of the drift
        along the line, the smaller of query and key; and chance: what independent drifts stay below
        99 times in 100.
    """
    keys = ["seed", "layer", "head"]
    band = chance_band(chance_dimensions(run))
    start = run.steps[0]
    end = run.steps[-1]
    rows = []
    for labels, head in _means(run).groupby(keys):
        means = head.droplevel(keys)
        drift = means.loc[end] - means.loc[start]
        lengths = np.linalg.norm(drift, axis=1)
        units = drift.div(lengths, axis=0)
        last = means.iloc[-1].to_numpy()
        shares = {}
        for name, part in _choices(means).items():
            line = singular_directions(part.to_numpy(), last)[0]
            shares[name] = np.square(units @ line)
        of_both = shares["both"].min()
        of_query = shares["keys"]["query"]
        of_key = shares["queries"]["key"]
        of_other = min(of_query, of_key)
        rows.append(("of both", *labels, of_both, (1 + band) / 2))
        rows.append(("of the other", *labels, of_other, band**2))
    columns = ["direction", *keys, "share", "chance"]
    return pd.DataFrame(rows, columns=columns)


def _means(run: Dynamics) -> pd.DataFrame:
    """Mean queries and keys: rows by seed, layer, head, step and space, a column per dimension."""
    rows = ["seed", "layer", "head", "step", "space"]
    means = run["head_means"].query("space != 'value'")
    return means.pivot(index=rows, columns="dimension", values="mean")


def _choices(vectors: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Vectors whose directions are taken, from rows by step and space."""
    return {
        "both": vectors,
        "keys": vectors.xs("key", level="space"),
        "queries": vectors.xs("query", level="space"),
    }
