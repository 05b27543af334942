"""The directions that vectors share."""

import numpy as np
from jaxtyping import Float

from analysis_lib.errors import AnalysisError


def singular_directions(
    vectors: Float[np.ndarray, "vector dim"], towards: Float[np.ndarray, " dim"], count: int = 2
) -> Float[np.ndarray, "count dim"]:
    """The first right singular vectors of vectors that are not centred (Godey et al. 2024, sec. 5).

    They are the eigenvectors of XᵀX, in float64, with the largest eigenvalues. A singular vector is one only up to
    its sign: each is turned so that ``towards`` has a coordinate of zero or more along it.

    Args:
        vectors: a vector a row.
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
        raise AnalysisError("there are vectors that are not finite (NaN or infinity): they have no directions")
    wide = vectors.astype(np.float64)
    _, eigenvectors = np.linalg.eigh(wide.T @ wide)
    directions = eigenvectors.T[::-1][:count]
    return directions * np.where(directions @ towards < 0, -1, 1)[:, None]
