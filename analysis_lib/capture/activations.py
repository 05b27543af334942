"""What a metric can ask for, and what it receives: the activations of one layer for one batch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from analysis_lib.capture.attention_rows import AttentionRows
from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import Vectors

# What a metric can ask for: the vectors of a space, attention weights, or sums of scores.
SPACES = ("hidden", "attention_input", "query", "key", "value")
WEIGHTS = "weights"
SCORES = "scores"


@dataclass(eq=False)
class Activations:
    """What one layer computed from one batch.

    Attributes:
        layer: 0 for the input of the first block, l for the output of block l. A second stack continues the count.
        stack: the name of the layer's stack.
        part: the path of the block below the model; empty for the input of a stack.
        tokens: the tokens of the queries, and of the hidden vectors unless those are vectors of a feature map.
        spaces: the vectors asked for, by their name in ``SPACES``. ``hidden`` is the output of the layer (one head);
            ``attention_input`` is what its attention projects to keys (one head); ``query``, ``key`` and ``value``
            are by head, as they enter attention: after bias, normalisation and rotation.
        rows: summaries of the attention rows, if a metric asked for ``weights``.
        scores: sums of the attention scores, if a metric asked for ``scores``.
        attended: whether the layer's attention was captured.
    """

    layer: int
    stack: str
    part: str
    tokens: Tokens
    spaces: dict[str, Vectors] = field(default_factory=dict)
    rows: AttentionRows | None = None
    scores: ScoreSums | None = None
    attended: bool = False


Receive = Callable[[Activations], None]
