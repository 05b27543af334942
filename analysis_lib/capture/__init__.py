"""One forward pass of a batch, and the activations of every layer.

Items become batches (``batching.py``). A batch goes through the model once the capture has been
checked against the plain forward pass (``checked_pass.py``, ``forward_pass.py``). Metrics receive
the activations of each layer (``activations.py``): vectors (``vectors.py``), attention weights
(``attention_rows.py``) and sums of scores (``score_sums.py``, where the formula of C_j is). Hidden
states come from hooks on the blocks; queries, keys and values from transformers' attention
interface or from a module's own softmax (``interface.py``), or from hooks where a listed model has
neither (``hooked.py``). The tokens behind the vectors of a stack are in ``stack_tokens.py``.
"""

from analysis_lib.capture.activations import (
    BESIDE,
    BLOCKS,
    EMBEDDINGS,
    LOGITS,
    LOSS,
    MASKED,
    OUTPUT,
    SCORES,
    SPACES,
    UNROTATED,
    WEIGHTS,
    Activations,
)
from analysis_lib.capture.attention_rows import AttentionWeights, Block, Logits, Softmax
from analysis_lib.capture.batching import batches, longest, unreadable
from analysis_lib.capture.checked_pass import check, lacking, run
from analysis_lib.capture.inputs import Batch, Reading, Settings
from analysis_lib.capture.interface import IMPLEMENTATION, attended_by
from analysis_lib.capture.memory import OutOfMemory
from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Owners, Tokens, Visibility, unpadded
from analysis_lib.capture.vectors import VECTORS_OF, Vectors

# Raise it in the commit that changes what is read of a model, see ``measurement.versions``.
VERSION = 1
