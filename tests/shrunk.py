"""Tiny models of any architecture that transformers knows: of its own configuration, with smaller
sizes.
"""

import inspect

import tiny
import torch
import transformers
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from analysis_lib.models.probe import kind_of

# By size, the names that configurations give to what it is the size of.
_SIZES = {
    "width": (
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim word_embed_proj_dim "
        "d_embed emb_dim width "
        "encoder_hidden_size decoder_hidden_size encoder_hidden_dim model_dim vision_hidden_size "
        "projection_dim "
        "word_embedding_size attention_hidden_size lru_width mamba_d_model out_hidden_size "
        "text_embed_dim output_dim"
    ),
    "heads": (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads "
        "num_q_heads "
        "decoder_num_attention_heads linear_num_value_heads"
    ),
    "key_heads": (
        "num_key_value_heads num_kv_heads multi_query_groups encoder_num_key_value_heads "
        "decoder_num_key_value_heads "
        "n_head_kv linear_num_key_heads multi_query_group_num"
    ),
    "head": (
        "head_dim kv_channels attention_head_size d_kv head_size d_head linear_key_head_dim "
        "linear_value_head_dim "
        "global_head_dim mamba_d_head mamba_head_dim"
    ),
    "layers": (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_encoder_layers depth "
        "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_blocks "
        "l_layers x_layers r_layers"
    ),
    "inner": (
        "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
        "feed_forward_size "
        "inner_dim moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size d_inner "
        "intermediate_size_mlp expert_ffn_hidden_size ffn_size shared_intermediate_size mamba_d_ssm"
    ),
    "words": "vocab_size text_vocab_size vocab_size_per_layer_input",
    "positions": (
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length "
        "max_source_positions "
        "max_target_positions max_seq_length max_encoder_position_embeddings "
        "max_decoder_position_embeddings"
    ),
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "chosen": (
        "num_experts_per_tok moe_topk num_experts_per_token moe_k num_selected_experts topk_group "
        "n_group "
        "num_expert_group"
    ),
    "rank": "q_lora_rank kv_lora_rank mamba_d_state state_size time_step_rank ssm_state_size",
    "little": "hidden_size_per_layer_input",
    # Twice the width in heads of 64.
    "mamba_heads": "mamba_n_heads mamba_num_heads",
}
_AT_MOST = {
    "width": 256,
    "heads": 4,
    "key_heads": 2,
    "head": 64,
    "layers": 2,
    "inner": 128,
    "words": 128,
}
_AT_MOST |= {"positions": 160, "experts": 4, "chosen": 2, "rank": 32, "little": 8, "mamba_heads": 8}
SIZES = {name: _AT_MOST[kind] for kind, names in _SIZES.items() for name in names.split()}
# What the configuration makes anew for its sizes.
MADE_ANEW = {
    *(
        "rope_parameters",
        "rope_scaling",
        "layer_types",
        "mlp_layer_types",
        "layers_block_type",
        "block_types",
    ),
    *(
        "hybrid_override_pattern",
        "no_rope_layers",
        "layer_block_types",
        "attention_layers",
        "attn_layer_indices",
    ),
    *(
        "hybrid_layer_ids",
        "mlp_only_layers",
        "full_attn_idxs",
        "moe_layers",
        "transformers_version",
        "_name_or_path",
    ),
    *("architectures", "per_layer_config"),
}
# What configurations call the bins of a spectrogram.
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size")
MOST_PARAMETERS = 5_000_000
TYPES = tuple(MODEL_MAPPING_NAMES)


def configuration(model_type: str, **changes: object) -> transformers.PreTrainedConfig:
    """The configuration that an architecture has by default, in small; parts of it, too."""
    base = transformers.AutoConfig.for_model(model_type)
    settings = {
        name: value for name, value in _shrunk(base.to_dict()).items() if name != "model_type"
    }
    return type(base)(**settings | changes)


def _shrunk(settings: dict) -> dict:
    found = {}
    for name, value in settings.items():
        if name in MADE_ANEW:
            continue
        found[name] = value
        if isinstance(value, dict) and "model_type" in value:
            found[name] = _shrunk(value)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(value, SIZES[name])
        elif (
            name.endswith(("_token_id", "_token_index"))
            and isinstance(value, int)
            and value >= SIZES["vocab_size"]
        ):
            found[name] = value % 8
    sizes = (found.get(name) for name in ("image_size", "patch_size"))
    if all(isinstance(size, int) for size in sizes) and "window_size" not in found:
        found["image_size"] = 3 * found["patch_size"]
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        # Latent attention has as many heads of keys as of queries.
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


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
