"""Architectures of the papers that transformers lacks: once imported, its Auto classes load them.

No code of a model's repository is run. Each adapter keeps the names and shapes of the published weights, and takes
from transformers every block that it has: the attention of CharacterBERT and MANTa-LM is BERT's and T5's own.
"""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
)
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from analysis_lib.models.architectures.character_bert import (
    CharacterBertConfig,
    CharacterBertModel,
    CharacterBertTokenizer,
)
from analysis_lib.models.architectures.manta import MantaConfig, MantaModel
from analysis_lib.models.architectures.self_attention import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
    SelfAttentionModel,
)
from analysis_lib.models.architectures.van import VanConfig, VanModel

__all__ = [
    "CharacterBertConfig",
    "CharacterBertModel",
    "CharacterBertTokenizer",
    "MantaConfig",
    "MantaModel",
    "SelfAttentionConfig",
    "SelfAttentionForSequenceClassification",
    "SelfAttentionModel",
    "VanConfig",
    "VanModel",
]

for _config, _model in (
    (CharacterBertConfig, CharacterBertModel),
    (MantaConfig, MantaModel),
    (SelfAttentionConfig, SelfAttentionModel),
    (VanConfig, VanModel),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
AutoTokenizer.register(CharacterBertConfig, CharacterBertTokenizer)
AutoTokenizer.register(MantaConfig, ByT5Tokenizer)
AutoTokenizer.register(SelfAttentionConfig, BertTokenizer)
AutoModelForSequenceClassification.register(SelfAttentionConfig, SelfAttentionForSequenceClassification)
AutoImageProcessor.register(VanConfig, image_processor_classes={"pil": ConvNextImageProcessorPil})
