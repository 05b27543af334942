"""The directions that queries and keys share along training, and how much of their drift lies along them."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.errors import AnalysisError
from analysis_lib.papers.godey.dynamics import Dynamics, heads_shown


def singular_directions(
    vectors: Float[np.ndarray, "vector dim"], towards: Float[np.ndarray, " dim"], count: int = 2
) -> Float[np.ndarray, "count dim"]:
    """The first right singular vectors of vectors that are not centred (Godey et al. 2024, sec. 5).

    They are the eigenvectors of XᵀX, in float64, with the largest eigenvalues. The sign of a singular vector is
    arbitrary: each is turned so that ``towards`` has a coordinate of zero or more along it.

    Args:
        vectors: one row per vector.
        towards: a vector on whose side the directions lie, such as the mean of the vectors.
        count: how many directions.

    Raises:
        AnalysisError: fewer vectors or dimensions than directions, or vectors that are not finite.

    >>> singular_directions(np.array([[-3.0, -4], [6, 8], [4, -3]]), np.array([1.0, 1])).round(6)
    array([[ 0.6,  0.8],
           [ 0.8, -0.6]])
    """
    if min(vectors.shape) < count:
        raise AnalysisError(f"{len(vectors)} vectors of {vectors.shape[1]} dimensions have no {count} directions")
    if not np.isfinite(vectors).all():
        raise AnalysisError("some vectors are not finite (NaN or infinity): they have no directions")
    wide = vectors.astype(np.float64)
    _, eigenvectors = np.linalg.eigh(wide.T @ wide)
    directions = eigenvectors.T[::-1][:count]
    return directions * np.where(directions @ towards < 0, -1, 1)[:, None]


def cloud(run: Dynamics, end: str, vectors: str = "both") -> pd.DataFrame:
    """Sampled queries and keys of a head at every step, on two directions that all steps share (Fig. 11, 19, 20).

    The directions are the first right singular vectors, uncentred, of the sampled vectors of all steps; the mean
    key of the last step has no negative coordinate along them.

    Args:
        run: its measurements.
        end: ``similar`` or ``opposite``, which of the :func:`~analysis_lib.papers.godey.dynamics.heads_shown`.
        vectors: whose directions they are: ``query``, ``key`` or ``both``.

    Returns:
        Columns step, space, x and y.
    """
    sampled = _of_head(run, end, "vectors")
    along = _values(sampled) @ _directions(sampled, vectors).T
    return sampled[["step", "space"]].assign(x=along[:, 0], y=along[:, 1])


def mean_path(run: Dynamics, end: str, vectors: str = "both") -> pd.DataFrame:
    """The mean query and key of a head at every step, on the directions of :func:`cloud` (Fig. 12, 21, 22).

    Args:
        run, end, vectors: as for :func:`cloud`.

    Returns:
        Columns step, space, x and y, in the order of the steps.
    """
    means = _means(run, end)
    along = means.to_numpy() @ _directions(_of_head(run, end, "vectors"), vectors).T
    return means.index.to_frame(index=False).assign(x=along[:, 0], y=along[:, 1])


def _of_head(run: Dynamics, end: str, name: str) -> pd.DataFrame:
    """The rows of a table on one of the heads shown, in the first seed."""
    layer, head = heads_shown(run["qk_alignment"])[end]
    table = run[name]
    return table[(table["seed"] == run.seeds[0]) & (table["layer"] == layer) & (table["head"] == head)]


def _means(run: Dynamics, end: str) -> pd.DataFrame:
    """The mean query and key: one row per step and space, one column per dimension."""
    means = _of_head(run, end, "head_means")
    means = means[means["space"].isin(["query", "key"])]
    return means.pivot(index=["step", "space"], columns="dimension", values="mean").sort_index()


def _values(sampled: pd.DataFrame) -> Float[np.ndarray, "vector dim"]:
    return sampled[[column for column in sampled if column.isdigit()]].to_numpy(np.float64)


def _directions(sampled: pd.DataFrame, vectors: str) -> Float[np.ndarray, "two dim"]:
    last_keys = sampled[(sampled["space"] == "key") & (sampled["step"] == sampled["step"].max())]
    chosen = sampled if vectors == "both" else sampled[sampled["space"] == vectors]
    return singular_directions(_values(chosen), _values(last_keys).mean(0))


def drift_along(run: Dynamics, end: str) -> pd.DataFrame:
    """How much of a head's queries and keys its first directions hold, by the vectors whose directions they are.

    Args:
        run, end: as for :func:`cloud`.

    Returns:
        One row per choice of vectors (both, key, query), with columns vectors; angle, in degrees, between their first
        direction and that of both, as lines; first and first_two, the share of the squared length of all sampled
        queries and keys on the first direction, and on the first two; query and key, how far their means have moved
        along the first direction from the first step to the last; query_share and key_share, the squares of these over
        the squared lengths of the whole moves.
    """
    sampled, means = _of_head(run, end, "vectors"), _means(run, end)
    values = _values(sampled)
    moves = (means.loc[run.steps[-1]] - means.loc[run.steps[0]]).T
    common = _directions(sampled, "both")[0]
    rows = []
    for vectors in ("both", "key", "query"):
        directions = _directions(sampled, vectors)
        held = np.square(values @ directions.T).sum(0) / np.square(values).sum()
        row = {"vectors": vectors, "angle": math.degrees(math.acos(min(1.0, abs(directions[0] @ common))))}
        row |= {"first": held[0], "first_two": held.sum()}
        for space in ("query", "key"):
            along, length = float(directions[0] @ moves[space]), float(np.square(moves[space]).sum())
            row |= {space: along, f"{space}_share": along**2 / length if length else math.nan}
        rows.append(row)
    return pd.DataFrame(rows)


def steps_shown(steps: Sequence[int], shares: Sequence[float] = (0, 0.02, 0.1, 1)) -> list[int]:
    """The checkpoints nearest to these shares of the run; by default those of Fig. 11 (0, 40k, 200k and 2M of 2M).

    >>> steps_shown([0, 40, 80, 400, 2000, 4000])
    [0, 80, 400, 4000]
    """
    return sorted({min(steps, key=lambda step: abs(step - share * max(steps))) for share in shares})
