"""Tiny models of any architecture that transformers knows: of its own configuration, with smaller
sizes.
"""

import inspect

import tiny
import torch
import transformers
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from analysis_book.atlas.sizes import configuration
from analysis_lib.models.probe import kind_of

# What configurations call the bins of a spectrogram.
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size")
MOST_PARAMETERS = 6_000_000
TYPES = tuple(MODEL_MAPPING_NAMES)


def processor(model: transformers.PreTrainedModel) -> object:
    """What prepares images or sounds for a model, with the settings that it has by default and the
    model's sizes.
    """
    config = model.config
    if kind_of(model) == "image":
        size = getattr(
            config, "image_size", getattr(getattr(config, "vision_config", None), "image_size", 64)
        )
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return transformers.ViTImageProcessorPil(size={"height": height, "width": width})
    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(config.model_type, "Wav2Vec2FeatureExtractor")
    if model.main_input_name == "input_features" and name == "Wav2Vec2FeatureExtractor":
        name = "SeamlessM4TFeatureExtractor"  # As its checkpoints say themselves.
    made = getattr(transformers, name)
    bins = next((getattr(config, name) for name in _BINS if hasattr(config, name)), None)
    names = {} if bins is None else dict.fromkeys(("feature_size", "num_mel_bins"), bins)
    if isinstance(config, transformers.ASTConfig):
        names["max_length"] = config.max_length
    return made(
        **{
            name: value
            for name, value in names.items()
            if name in inspect.signature(made).parameters
        }
    )


def build(model_type: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A random model of an architecture, without a head.

    Raises:
        ValueError: it is still too large.
    """
    config = configuration(model_type, **changes)
    with torch.device("meta"):
        whole = transformers.AutoModel.from_config(config)
    if (count := sum(part.numel() for part in whole.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    tiny.randomise(model)
    return model.eval()
