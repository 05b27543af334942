"""The directions that queries and keys share along training, and how much of their drift lies along them."""

import math

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import grouped
from analysis_lib.papers.godey.dynamics import Dynamics, heads_shown


def singular_directions(
    vectors: Float[np.ndarray, "vector dim"], towards: Float[np.ndarray, " dim"]
) -> Float[np.ndarray, "two dim"]:
    """The first two right singular vectors of vectors that are not centred (Godey et al. 2024, sec. 5).

    They are the eigenvectors of XᵀX, in float64, with the largest eigenvalues. The sign of a singular vector is
    arbitrary: each is turned so that ``towards`` has a coordinate of zero or more along it.

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
        raise AnalysisError("some vectors are not finite (NaN or infinity): they have no directions")
    wide = vectors.astype(np.float64)
    _, eigenvectors = np.linalg.eigh(wide.T @ wide)
    directions = eigenvectors.T[::-1][:2]
    return directions * np.where(directions @ towards < 0, -1, 1)[:, None]


def projections(run: Dynamics, vectors: str = "both") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Queries and keys of the heads shown, on two directions that all steps share (Fig. 11, 12 and 19 to 22).

    The directions of a head are the first right singular vectors, uncentred, of its sampled vectors of all steps; the
    mean key of the last step has no negative coordinate along them.

    Args:
        run: its measurements.
        vectors: whose directions they are: ``query``, ``key`` or ``both``.

    Returns:
        The sampled queries and keys, and their means over all tokens, in the order of the steps. Columns head (such as
        ``similar (layer 1, head 1)``), step, space, x and y.
    """
    clouds, paths = {}, {}
    for end, (layer, head) in heads_shown(run["qk_alignment"]).items():
        sampled, means = _of_head(run, layer, head)
        directions = _directions(sampled, vectors).T
        for projected, table in ((clouds, sampled), (paths, means)):
            along = pd.DataFrame(table.to_numpy() @ directions, table.index, ["x", "y"])
            projected[f"{end} (layer {layer}, head {head})"] = along.reset_index()
    return grouped(clouds, "head"), grouped(paths, "head")


def _of_head(run: Dynamics, layer: int, head: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The sampled queries and keys of a head in the first seed, and their means: rows by step and space."""
    here = f"seed == {run.seeds[0]} and layer == {layer} and head == {head}"
    sampled = run["vectors"].query(here).set_index(["step", "space"]).drop(columns=["seed", "layer", "head"])
    means = run["head_means"].query(f"{here} and space != 'value'")
    return sampled.astype(float), means.pivot(index=["step", "space"], columns="dimension", values="mean")


def _directions(sampled: pd.DataFrame, vectors: str) -> Float[np.ndarray, "two dim"]:
    chosen = sampled if vectors == "both" else sampled.xs(vectors, level="space")
    last_key = sampled.query("space == 'key' and step == step.max()").mean()
    return singular_directions(chosen.to_numpy(), last_key.to_numpy())


def drift_along(run: Dynamics) -> pd.DataFrame:
    """How much of a head's queries and keys its first directions hold, by the vectors whose directions they are.

    Returns:
        One row per head shown and choice of vectors (both, key, query), with columns head (``similar``, ``opposite``);
        vectors; angle, in degrees, between their first direction and that of both, as lines; first and first_two, the
        share of the squared length of all sampled queries and keys on the first direction, and on the first two; query
        and key, how far their means have moved along the first direction from the first step to the last; query_share
        and key_share, the squares of these over the squared lengths of the whole moves.
    """
    rows = []
    for end, place in heads_shown(run["qk_alignment"]).items():
        sampled, means = _of_head(run, *place)
        moves = means.loc[run.steps[-1]] - means.loc[run.steps[0]]
        common = _directions(sampled, "both")[0]
        for vectors in ("both", "key", "query"):
            directions = _directions(sampled, vectors)
            held = np.square(sampled.to_numpy() @ directions.T).sum(0) / np.square(sampled.to_numpy()).sum()
            angle = math.degrees(math.acos(min(1.0, abs(directions[0] @ common))))
            row = {"head": end, "vectors": vectors, "angle": angle, "first": held[0], "first_two": held.sum()}
            for space, move in moves.iterrows():
                along, length = float(directions[0] @ move), float(np.square(move).sum())
                row |= {space: along, f"{space}_share": along**2 / length if length else math.nan}
            rows.append(row)
    return pd.DataFrame(rows)
