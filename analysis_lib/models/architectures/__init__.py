"""Architectures that transformers lacks, registered with its Auto classes on import.

No code from a model's repository is run. Each architecture keeps the names and shapes of its
published weights. Others are plug-ins: an entry point of the group ``analysis_lib.architectures``
with the name of a ``model_type``, whose module registers its classes when it is imported.
"""

from importlib.metadata import entry_points

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
)

from analysis_lib.models.architectures.efficientnet_lite import (
    EfficientNetLiteConfig,
    EfficientNetLiteForImageClassification,
    EfficientNetLiteModel,
)
from analysis_lib.models.architectures.self_attention import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
    SelfAttentionModel,
)

for _config, _model in (
    (EfficientNetLiteConfig, EfficientNetLiteModel),
    (SelfAttentionConfig, SelfAttentionModel),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
AutoTokenizer.register(SelfAttentionConfig, BertTokenizer)
AutoModelForImageClassification.register(
    EfficientNetLiteConfig, EfficientNetLiteForImageClassification
)
AutoModelForSequenceClassification.register(
    SelfAttentionConfig, SelfAttentionForSequenceClassification
)


def plug_in(model_type: object) -> None:
    """Import the plug-in of an architecture, if there is one."""
    for point in entry_points(group="analysis_lib.architectures", name=model_type):
        point.load()
