"""Architectures of the papers that transformers lacks. Once this package is imported, its Auto classes load them.

No code from a model's repository is run. Each architecture keeps the names and shapes of its published weights and is
built from transformers' own blocks where they exist: CharacterBERT has BERT's attention, and MANTa-LM has T5's.
"""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
)
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from analysis_book.architectures.character_bert import (
    CharacterBertConfig,
    CharacterBertModel,
    CharacterBertTokenizer,
)
from analysis_book.architectures.manta import MantaConfig, MantaModel
from analysis_book.architectures.van import VanConfig, VanModel
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
    (CharacterBertConfig, CharacterBertModel),
    (EfficientNetLiteConfig, EfficientNetLiteModel),
    (MantaConfig, MantaModel),
    (SelfAttentionConfig, SelfAttentionModel),
    (VanConfig, VanModel),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
AutoTokenizer.register(CharacterBertConfig, CharacterBertTokenizer)
AutoTokenizer.register(MantaConfig, ByT5Tokenizer)
AutoTokenizer.register(SelfAttentionConfig, BertTokenizer)
AutoModelForImageClassification.register(EfficientNetLiteConfig, EfficientNetLiteForImageClassification)
AutoModelForSequenceClassification.register(SelfAttentionConfig, SelfAttentionForSequenceClassification)
AutoImageProcessor.register(VanConfig, image_processor_classes={"pil": ConvNextImageProcessorPil})
