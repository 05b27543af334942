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
    counts = next((inputs[name] for name in PATCH_COUNTS if name in inputs), None)
    if counts is not None and len(counts) == 1:
        frames, rows, columns = counts[0].tolist()
        merged = frames * rows * columns / max(count, 1)
        side = math.isqrt(round(merged))
        fits = side * side == merged and rows % side == columns % side == 0
        return (rows // side, columns // side) if fits else None
    lengths = [len([*run]) for image, run in itertools.groupby(is_image.tolist()) if image]
    between = int(is_image.nonzero()[-1] - is_image.nonzero()[0]) + 1 - count if count else 0
    if len(lengths) > 1:
        # One token between two rows.
        is_even = len({*lengths}) == 1 and between == len(lengths) - 1
        return (len(lengths), lengths[0]) if is_even else None
    return grid_of_shape(inputs, count)


def grid_of_shape(inputs: Mapping[str, object], count: int) -> tuple[int, int] | None:
    """The rows and columns of ``count`` tokens of an image, by its height and width."""
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 4 or len(pixels) != 1:
        return None
    height, width = pixels.shape[-2:]
    rows = math.isqrt(count * height // width) if width else 0
    if not rows or count % rows or rows * width != (count // rows) * height:
        return None
    return rows, count // rows
