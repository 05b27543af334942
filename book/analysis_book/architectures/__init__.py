"""Architectures of the papers that transformers lacks, as plug-ins of the library.

No page reads them by default. Once this package is imported, the Auto classes of transformers load
them. Each keeps the names and shapes of its published weights and is built from transformers' own
blocks where they exist: CharacterBERT has BERT's attention, and MANTa-LM has T5's.
"""

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, ByT5Tokenizer
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from analysis_book.architectures.character_bert import (
    CharacterBertConfig,
    CharacterBertModel,
    CharacterBertTokenizer,
)
from analysis_book.architectures.manta import MantaConfig, MantaModel
from analysis_book.architectures.van import VanConfig, VanModel

for _config, _model in (
    (CharacterBertConfig, CharacterBertModel),
    (MantaConfig, MantaModel),
    (VanConfig, VanModel),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
AutoTokenizer.register(CharacterBertConfig, CharacterBertTokenizer)
AutoTokenizer.register(MantaConfig, ByT5Tokenizer)
AutoImageProcessor.register(VanConfig, image_processor_classes={"pil": ConvNextImageProcessorPil})
