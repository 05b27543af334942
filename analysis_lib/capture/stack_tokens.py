"""What the vectors of a stack stand for, and the feature maps of convolutional networks as vectors.

A feature map is a hidden state of shape image x channel x height x width. CvT's blocks have
attention: theirs is a sequence of the positions of the map, preceded by a class token in the last
stage, and their further arguments are its height and width.
"""

from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Tokens
from analysis_lib.errors import AnalysisError
from analysis_lib.models import TOKEN_TYPES, LoadedModel


def stack_tokens(loaded: LoadedModel, batch: Batch, rule: str, count: int, args: tuple) -> Tokens:
    """The tokens of a stack.

    Args:
        rule: ``parts.Stack.tokens``.
        count: how many tokens there are.
        args: the positional arguments of the stack's block.

    Raises:
        AnalysisError: an image or sound was padded, and which tokens stand for padding is not
            known.
    """
    if rule in ("text", "shifted"):
        return batch.tokens if rule == "text" else batch.shifted
    registers = getattr(loaded.model.config, "num_register_tokens", 0)
    # CANINE's deep encoder reads [CLS], then "molecules": one vector for about every four
    # characters.
    leading = {
        "patches": ["cls"] * loaded.layout.class_tokens + ["register"] * registers,
        "molecules": ["cls"],
    }
    if batch.steps is not None:
        # As AST has them.
        leading["frames"] = ["cls"] * batch.steps.leading
    tokens = batch.unpadded(count, leading.get(rule, ()))
    if rule == "patches" and (trailing := getattr(loaded.model.config, "num_detection_tokens", 0)):
        # YOLOS finds objects by them.
        tokens.types[:, -trailing:] = TOKEN_TYPES.index("detection")
    if rule == "blocks" and args[1] is not None:
        # MANTa's encoder reads as many blocks as it finds in a text: its attention mask says how
        # many.
        tokens.mask = args[1][:, 0].any(1).expand(len(batch.groups), -1).to(batch.device)
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


def class_tokens(hidden: Tensor, args: tuple) -> int:
    """How many class tokens precede the positions of a map; ``args`` are the positional arguments
    of the block.
    """
    return hidden.shape[1] - args[1] * args[2] if hidden.dim() == 3 else 0


def token_count(hidden: Tensor) -> int:
    """How many tokens the attention over a map reads: its positions and its class tokens."""
    return hidden.shape[1] if hidden.dim() == 3 else hidden[0, 0].numel()


def map_vectors(hidden: Tensor, args: tuple, maps: str) -> Float[Tensor, "image vector width"]:
    """The vectors of a map without its class tokens: with ``positions`` one per position, with
    ``flatten`` one.
    """
    is_sequence = hidden.dim() == 3
    positions = (
        hidden[:, class_tokens(hidden, args) :]
        if is_sequence
        else hidden.flatten(2).transpose(1, 2)
    )
    return positions if maps == "positions" else positions.flatten(1).unsqueeze(1)
