"""The geometry of self-attention: one forward pass, exact sums, tidy tables.

>>> from analysis_lib import load_corpus, load_model, measure, metrics
>>> corpus = load_corpus("wikipedia", limit=50)
>>> tables = measure(load_model("minilm"), corpus, [metrics.Anisotropy()], progress=False)
>>> list(tables["anisotropy"].columns)
['space', 'layer', 'head', 'cosine', 'ci_low', 'ci_high', 'tokens']
"""

from typing import TYPE_CHECKING

# First of all, since the imports that follow take time and Ctrl-C should work during them.
from analysis_lib import errors
from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_lib import metrics
    from analysis_lib.capture.interventions import Replace
    from analysis_lib.corpora import Corpus, load_corpus
    from analysis_lib.errors import AnalysisError
    from analysis_lib.measurement import (
        Comparison,
        Tables,
        check_layers,
        compare,
        generate,
        measure,
        measure_vectors,
        merge_parts,
        similarity,
    )
    from analysis_lib.models import LoadedModel, load_model

__version__ = "0.1.0"
__getattr__, __dir__ = lazily(__name__)
