"""The cone of the values that attention averages (Fosse et al. 2023, Fig. 1)."""

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import special

from analysis_lib import capture
from analysis_lib.corpora import Pair
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel

# Values, and the outputs of attention.
HeadVectors = tuple[Float[np.ndarray, "head token width"], Float[np.ndarray, "head token width"]]


def attention_vectors(model: LoadedModel, text: str | Pair, layer: int) -> HeadVectors:
    """The values v_j of a text in one layer, and what attention makes of them: y_i = Σ_j a_ij v_j (eq. 1 and 2).

    Args:
        layer: of attention, from 1; 0 is the last.

    Raises:
        AnalysisError: the model has no such layer, or its weights are not those of equation 1, where every query
            sees every key and a score does not depend on positions.
    """
    found: list[capture.Activations] = []
    layer = layer or sum(map(len, model.stacks.values()))

    def receive(activations: capture.Activations) -> None:
        if activations.layer == layer and activations.scores is not None:
            found.append(activations)

    needs = frozenset({"query", "key", "value", capture.SCORES})
    for batch in capture.batches(model, [text], [0], capture.Settings(), capture.Reading()):
        capture.run(model, batch, needs, receive)
    if not found:
        raise AnalysisError(f"{model.name} has no attention layer {layer}: give one from 1 to its last")
    (seen,) = found
    if not seen.scores.visibility.everyone or seen.scores.position is not None:
        raise AnalysisError(f"attention in {model.name} depends on positions: give a model such as BERT")
    query, key, value = (seen.spaces[name].values[0].double().cpu().numpy() for name in ("query", "key", "value"))
    return value, special.softmax(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5, axis=-1) @ value


def cone(vectors: HeadVectors, head: int) -> pd.DataFrame:
    """The values of a head and its outputs around the axis of the values, the mean of their directions.

    An output is a convex combination of the values. All vectors within an angle θ of an axis form a convex cone as
    long as θ is at most 90°; then no output is farther from the axis than the farthest value.

    Args:
        vectors: from :func:`attention_vectors`.
        head: counted from 1.

    Returns:
        One row per vector: vector (value or output), token (its place), angle (to the axis, in degrees), along (its
        component along the axis) and aside (the length of the rest, negative on one side of the first principal
        direction of what the values have besides the axis). In the plane of along and aside, angles to the axis and
        lengths are those of the space.
    """
    if not 1 <= head <= len(vectors[0]):
        raise AnalysisError(f"there is no head {head}: give one from 1 to {len(vectors[0])}")
    values, outputs = (kind[head - 1] for kind in vectors)
    axis = (values / np.linalg.norm(values, axis=1, keepdims=True)).mean(0)
    axis /= np.linalg.norm(axis)
    across = np.linalg.svd(values - np.outer(values @ axis, axis), full_matrices=False)[2][0]
    both = np.concatenate([values, outputs])
    along = both @ axis
    rest = np.linalg.norm(both - np.outer(along, axis), axis=1)
    columns = {
        "vector": np.repeat(["value", "output"], [len(values), len(outputs)]),
        "token": [*range(len(values)), *range(len(outputs))],
        "angle": np.degrees(np.arctan2(rest, along)),
        "along": along,
        "aside": np.where(both @ across < 0, -rest, rest),
    }
    return pd.DataFrame(columns)
