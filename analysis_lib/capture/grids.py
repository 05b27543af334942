"""Where the tokens of an image lie in it: the rows and columns of its patches."""

import itertools
import math
from collections.abc import Mapping

from jaxtyping import Bool, Int
from torch import Tensor

# Arguments of models with the numbers of patches of each image: frames, rows and columns.
PATCH_COUNTS = ("image_grid_thw", "grid_thw")


def cells_of(is_image: Bool[Tensor, "utterance token"]) -> Int[Tensor, "utterance token"]:
    """The number of each token of an image, in order from 0; -1 at other tokens."""
    return (is_image.cumsum(1) * is_image) - 1


def grid_of_tokens(
    inputs: Mapping[str, object], is_image: Bool[Tensor, " token"]
) -> tuple[int, int] | None:
    """The rows and columns of the tokens of one image; None if they are not known.

    They are known if the image is not cut into crops, and its tokens follow one another row by row:
    by the numbers of patches that the processor gives, of which several may be merged into a token;
    or by a token that ends each row; or by the shape of the image.
    """
    count = int(is_image.sum())
    for name in PATCH_COUNTS:
        if name in inputs:
            return _merged(inputs[name], count)
    positions = is_image.nonzero().flatten().tolist()
    runs = [len([*run]) for image, run in itertools.groupby(is_image.tolist()) if image]
    if len(runs) == 1:
        return grid_of_shape(inputs, count)
    if not runs or len({*runs}) > 1:
        return None
    # One token ends each row but the last.
    between = positions[-1] - positions[0] + 1 - count
    if between != len(runs) - 1:
        return None
    return len(runs), runs[0]


def _merged(counts: Int[Tensor, "image 3"], count: int) -> tuple[int, int] | None:
    """The rows and columns of ``count`` tokens, into each of which a square of patches is merged.

    Args:
        counts: the numbers of frames, rows and columns of patches of each image.
    """
    if len(counts) != 1 or not count:
        return None
    frames, rows, columns = counts[0].tolist()
    side = math.isqrt(frames * rows * columns // count)
    if not side or rows * columns * frames != count * side * side:
        return None
    return rows // side, columns // side


def grid_of_shape(
    inputs: Mapping[str, object], count: int, images: int = 1
) -> tuple[int, int] | None:
    """The rows and columns of ``count`` tokens of each image, by its height and width."""
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 4 or len(pixels) != images:
        return None
    height, width = pixels.shape[-2:]
    rows = math.isqrt(count * height // width)
    if not rows:
        return None
    columns = count // rows
    is_shape = rows * columns == count and rows * width == columns * height
    return (rows, columns) if is_shape else None
