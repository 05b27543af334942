"""Published numbers and claims, and the verdict of a model on each."""

from analysis_lib.papers.claims import early_layers, late_layers, middle_layers, published, representative_layers
from analysis_lib.papers.godey.block_claims import (
    godey_block_claims,
    godey_fixed_point_claims,
    verdicts_by_architecture,
)
from analysis_lib.papers.godey.models import (
    GODEY_DRIFT,
    GODEY_SPEECH,
    compare_with_untrained,
    godey_claims,
    godey_convolution_claims,
    training_effect,
)
from analysis_lib.papers.godey.training_claims import (
    MULTIBERTS_TOKENS,
    godey_direction_verdicts,
    godey_training_verdicts,
    layers_of_figure,
)
from analysis_lib.papers.maruta.outliers import (
    MARUTA_CONTRIBUTIONS,
    MARUTA_DIMENSIONS,
    agreement,
    compare_table1,
    contributions_by_key_type,
    dominated_heads,
    explained_gap,
    is_published_model,
    outlier_share,
    tested_layers,
)
from analysis_lib.papers.old_claims import Claim, verdict, verdicts, verdicts_by_model

__all__ = [
    "GODEY_DRIFT",
    "GODEY_SPEECH",
    "MARUTA_CONTRIBUTIONS",
    "MARUTA_DIMENSIONS",
    "MULTIBERTS_TOKENS",
    "Claim",
    "agreement",
    "compare_table1",
    "compare_with_untrained",
    "contributions_by_key_type",
    "dominated_heads",
    "early_layers",
    "explained_gap",
    "godey_block_claims",
    "godey_claims",
    "godey_convolution_claims",
    "godey_direction_verdicts",
    "godey_fixed_point_claims",
    "godey_training_verdicts",
    "is_published_model",
    "late_layers",
    "layers_of_figure",
    "middle_layers",
    "outlier_share",
    "published",
    "representative_layers",
    "tested_layers",
    "training_effect",
    "verdict",
    "verdicts",
    "verdicts_by_architecture",
    "verdicts_by_model",
]
