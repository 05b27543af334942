"""One forward pass of a batch, and the activations of every layer on its way.

Items become batches (``batching.py``). A batch goes through the model once the capture has been checked
against the plain forward pass (``checked_pass.py``, ``forward_pass.py``). Metrics receive the activations of each layer
(``activations.py``): vectors (``vectors.py``), attention rows (``attention_rows.py``) and sums of scores
(``score_sums.py``, where the formula of C_j is). How attention is reached is in ``interface.py`` for models on
transformers' attention interface, and in ``hooked.py`` for the others.
"""

from analysis_lib.capture.activations import SCORES, SPACES, WEIGHTS, Activations
from analysis_lib.capture.attention_rows import AttentionRows
from analysis_lib.capture.batching import batches, longest
from analysis_lib.capture.checked_pass import run
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interface import IMPLEMENTATION, attended_by
from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Tokens, Visibility, unpadded
from analysis_lib.capture.vectors import Vectors

__all__ = [
    "IMPLEMENTATION",
    "SCORES",
    "SPACES",
    "WEIGHTS",
    "Activations",
    "AttentionRows",
    "Batch",
    "Reading",
    "ScoreSums",
    "Settings",
    "Tokens",
    "Vectors",
    "Visibility",
    "attended_by",
    "batches",
    "longest",
    "run",
    "unpadded",
]
