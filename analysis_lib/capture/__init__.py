"""One forward pass of a batch, and the activations of every layer on its way.

Items become batches (``batching``, ``sounds``); a pass goes through the model once its capture has been checked
(``checked_pass``, ``forward_pass``); each layer's activations are handed to the metrics (``activations``): vectors
(``vectors``), attention rows (``attention_rows``) and sums of scores (``score_sums``).

>>> from analysis_lib import load_corpus, load_model
>>> model, corpus = load_model("minilm"), load_corpus("news", limit=2)
>>> def receive(activations):
...     print(activations.layer, *activations.spaces["hidden"].values.shape)  # doctest: +SKIP
>>> for batch in batches(model, corpus.items, range(2), Settings(), Reading()):
...     run(model, batch, frozenset({"hidden"}), receive)  # doctest: +SKIP
"""

from analysis_lib.capture.activations import SCORES, SPACES, WEIGHTS, Activations
from analysis_lib.capture.attention_rows import AttentionRows
from analysis_lib.capture.batching import batches, longest
from analysis_lib.capture.checked_pass import run
from analysis_lib.capture.inputs import LONG_TEXTS, MAPS, Batch, Reading, Settings
from analysis_lib.capture.interface import IMPLEMENTATION, attended_by
from analysis_lib.capture.score_sums import ScoreSums
from analysis_lib.capture.tokens import Tokens, unpadded
from analysis_lib.capture.vectors import Vectors
from analysis_lib.capture.visibility import Visibility

__all__ = [
    "IMPLEMENTATION",
    "LONG_TEXTS",
    "MAPS",
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
