"""Tokens behind the vectors of a stack, and the feature maps of convolutional networks as vectors.

A feature map is a hidden state of shape image x channel x height x width. CvT's blocks have
attention: their vectors are a sequence of the positions of the map, preceded by a class token in
the last stage, and their further arguments are its height and width.
"""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.grids import grid_of_shape
from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Tokens
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.pairs import MEDIA


def stack_tokens(
    loaded: LoadedModel, batch: Batch, rule: str, count: int, args: tuple, sequences: int = 1
) -> Tokens:
    """The tokens of a stack.

    Args:
        rule: ``parts.Stack.tokens``.
        count: the number of tokens.
        args: the positional arguments of the stack's block.
        sequences: the number of sequences of each item, such as the crops of an image.

    Raises:
        AnalysisError: an image or sound was padded, and the tokens of the padding are not known.
    """
    if rule in ("text", "shifted"):
        return batch.tokens if rule == "text" else batch.shifted
    if rule in ("before", "after"):
        return _with_image(batch.tokens, rule, count)
    config = loaded.model.config
    if loaded.kind in MEDIA:
        config = getattr(config, "vision_config", config)
    registers = getattr(config, "num_register_tokens", 0)
    # CANINE's deep encoder reads [CLS], then "molecules": one vector for about every four
    # characters.
    leading = {
        "patches": ["cls"] * loaded.layout.class_tokens + ["register"] * registers,
        "molecules": ["cls"],
    }
    if batch.steps is not None:
        # The leading tokens of AST.
        leading["frames"] = ["cls"] * batch.steps.leading
    tokens = batch.unpadded(count, leading.get(rule, ()), sequences)
    medium = {"patches": "image", "frames": "sound"}.get(rule)
    if medium in tokens.type_names:
        is_other = tokens.types == tokens.type_names.index("other")
        tokens.types[is_other] = tokens.type_names.index(medium)
    trailing = getattr(loaded.model.config, "num_detection_tokens", 0)
    if rule == "patches" and trailing:
        # The tokens with which YOLOS detects objects.
        tokens.types[:, -trailing:] = tokens.type_names.index("detection")
    if rule == "patches":
        tokens.grid = grid_of_shape(batch.inputs, count - len(leading["patches"]) - trailing)
    if rule == "blocks" and args[1] is not None:
        # The number of blocks of MANTa's encoder depends on the text: the attention mask holds it.
        tokens.mask = args[1][:, 0].any(1).expand(len(batch.groups), -1).to(batch.device)
    if loaded.kind in MEDIA:
        if rule == "frames":
            tokens.silent = _padded_frames(batch, tokens)
        return tokens
    for name, mask in batch.inputs.items():
        if rule in ("patches", "frames") and "mask" in name and not mask.all():
            if mask.shape != tokens.mask.shape:
                reader = type(loaded.processor).__name__
                raise AnalysisError(
                    f"{loaded.name}: its {reader} pads, as {name} says: switch its padding off"
                )
            tokens.mask = mask.bool()
    if rule in ("windows", "frames") and batch.steps is not None:
        tokens.silent = batch.steps.padding(count, batch.lengths)
    return tokens


def _padded_frames(batch: Batch, tokens: Tokens) -> Tensor | None:
    """True at the vectors of a sound that stand for padding, as its processor says; None if none.

    A vector stands for as many steps of the spectrogram as are merged into it.
    """
    sequences, count = tokens.mask.shape
    for name, mask in batch.inputs.items():
        if "mask" not in name or name == "attention_mask" or not isinstance(mask, Tensor):
            continue
        if mask.dim() == 2 and len(mask) == sequences and mask.shape[1] % count == 0:
            padded = ~mask[:, :: mask.shape[1] // count].bool()
            return padded if padded.any() else None
    return None


def _with_image(text: Tokens, rule: str, count: int) -> Tokens:
    """The tokens of a text with those of an image, of ``count`` in all, before or after it."""
    more = count - text.mask.shape[1]
    sides = (more, 0) if rule == "before" else (0, more)
    types = functional.pad(text.types, sides, value=text.type_names.index("image"))
    mask = functional.pad(text.mask, sides, value=True)
    return replace(text, mask=mask, types=types, ids=None)


def class_tokens(hidden: Tensor, args: tuple) -> int:
    """Number of class tokens before the positions of a map.

    Args:
        args: the positional arguments of the block.
    """
    return hidden.shape[1] - args[1] * args[2] if hidden.dim() == 3 else 0


def token_count(hidden: Tensor) -> int:
    """Number of tokens in the attention over a map: its positions and its class tokens."""
    return hidden.shape[1] if hidden.dim() == 3 else hidden[0, 0].numel()


def map_vectors(hidden: Tensor, args: tuple, maps: str) -> Float[Tensor, "image vector width"]:
    """The vectors of a map without its class tokens.

    With ``positions`` there is one per position, with ``flatten`` a single one.
    """
    is_sequence = hidden.dim() == 3
    positions = (
        hidden[:, class_tokens(hidden, args) :]
        if is_sequence
        else hidden.flatten(2).transpose(1, 2)
    )
    return positions if maps == "positions" else positions.flatten(1).unsqueeze(1)
