"""The quantities, each an accumulator that merges.

To add a quantity, subclass :class:`Metric` and list it here and in ``registry.py``. ``tests/reference.py``
computes the same table naively, unless it is made on request: its columns go into ``COLUMNS``, at the same place, its
name into ``OF_HIDDEN_STATES`` if it needs no attention, and a method of its name gives its rows.
"""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib.metrics.accumulator import Metric
    from analysis_lib.metrics.anisotropy import Anisotropy, CosineByDimension, UtteranceSimilarity
    from analysis_lib.metrics.attention import AttentionByTokenType, AttentionEntropy
    from analysis_lib.metrics.dimensions import DimensionMeans, OutlierDimensions
    from analysis_lib.metrics.isotropy import Isotropy
    from analysis_lib.metrics.means import HeadMeans, MeanVector, QueryKeyAlignment
    from analysis_lib.metrics.outputs import MaskedTokenLoss, NextTokenLoss, OutputChange
    from analysis_lib.metrics.registry import METRICS, resolve
    from analysis_lib.metrics.score_contributions import ScoreContributions, ScoreTerms
    from analysis_lib.metrics.sinks import AttentionReceived, SpikeDimensions, TokenNorms

__getattr__, __dir__ = lazily(__name__)
