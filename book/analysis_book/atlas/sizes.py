"""Small sizes for the configuration of any type of model that transformers knows."""

import dataclasses

import transformers

# By size, the names that configurations give to what it is the size of.
_SIZES = {
    "width": (
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim word_embed_proj_dim "
        "d_embed emb_dim width "
        "encoder_hidden_size decoder_hidden_size encoder_hidden_dim model_dim vision_hidden_size "
        "projection_dim "
        "word_embedding_size attention_hidden_size lru_width mamba_d_model out_hidden_size "
        "text_embed_dim output_dim projection_size"
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
        "global_head_dim mamba_d_head mamba_head_dim query_pre_attn_scalar"
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
_LAYERS = "num_hidden_layers"
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
    # Made of the width of a head.
    *("architectures", "per_layer_config", "attention_multiplier"),
}


# What their small configuration lacks otherwise.
CHANGES = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "t5": {"decoder_start_token_id": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    # Its default configuration leaves out the sizes of the layers that choose tokens.
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 0},
}
_SPEECH = {
    "conv_dim": [32] * 7,
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
}
CHANGES |= dict.fromkeys(("data2vec-audio", "unispeech", "wavlm"), _SPEECH)
_SWIN = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [2, 2, 6, 2],
    "num_heads": [1, 1, 2, 2],
    "window_size": 2,
}
_HIERA = {
    "hidden_size": 16,
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "image_size": [128, 128],
}
_HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hidden_size": 32,
}
_HYBRID |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_d_state": 4,
    "intermediate_size": 48,
}
_WINDOWS = {"attention_window": [4, 4], "num_hidden_layers": 2}
CHANGES |= {
    "zamba": _HYBRID | {"n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "longformer": _WINDOWS,
    "led": _WINDOWS | {"max_encoder_position_embeddings": 160},
    "longt5": {"local_radius": 3, "decoder_start_token_id": 0},
    "chameleon": {
        "vocabulary_map": {"<image>": 63},
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 16,
            "latent_channels": 16,
            "base_channels": 32,
        }
        | {"channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
}
_SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 128,
    "pad_token_id": 0,
}
_SMALL |= {"max_position_embeddings": 64}
# The sizes of these hang together.
CONFIGURED = {
    "zamba2": {
        **_SMALL,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "n_mamba_heads": 8,
    }
    | {
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    }
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]},
    "longcat_flash": {
        **_SMALL,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 48,
        "head_dim": 4,
    }
    | {
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "q_lora_rank": 12,
    }
    | {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "mllama_text_model": {
        **_SMALL,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1],
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
CHANGES |= dict.fromkeys(("swin", "swinv2", "maskformer-swin", "donut-swin"), _SWIN) | {
    # Nine tenths of a head, and a third, are even numbers.
    "moonshine": {
        "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
        "hidden_size": 320,
    },
    "mimo_v2_flash": {"head_dim": 192},
    # A token for each pixel: six deep stages of them took 18 GB.
    "swin2sr": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 4,
        "image_size": 16,
    },
    "yolos": {"image_size": [48, 64], "num_detection_tokens": 5},
    "pvt_v2": {"image_size": 64},
    "audio-spectrogram-transformer": {"max_length": 128},
    "dac": {"encoder_hidden_size": 16, "decoder_hidden_size": 32},
    "poolformer": {"image_size": 64, "hidden_sizes": [8, 16, 32, 64]},
    "focalnet": {"image_size": 64, "embed_dim": 16},
    "hiera": _SWIN | {"image_size": [64, 64]},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": {
        "backbone_config": {"model_type": "sam2_hiera_det_model", **_HIERA},
        "backbone_channel_list": [128, 64, 32, 16],
    },
    "sam_vision_model": {
        "global_attn_indexes": [1],
        "image_size": 64,
        "hidden_size": 32,
        "window_size": 3,
    },
}
# A language model inside another type.
_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "intermediate_size": 128,
}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
_COHERE = {"rope_parameters": {"full_attention": _AXES, "sliding_attention": _AXES}}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
_FOUR_AXES = {"head_dim": 64, "rope_parameters": _AXES | {"mrope_section": [8, 8, 8, 8]}}
# What their default configurations leave open.
CHANGES |= {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "step3p5": {"sliding_window": 4, "num_sliding_attention_heads": 4},
    "step3p7": {"text_config": {"model_type": "step3p5", **_TEXT, "sliding_window": 4}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "cohere_compass_text": _COHERE,
    "cohere_compass": {"text_config": {"model_type": "cohere_compass_text", **_TEXT, **_COHERE}},
    "hunyuan_vl_text": _FOUR_AXES,
    "hunyuan_vl": {"text_config": {"model_type": "hunyuan_vl_text", **_TEXT, **_FOUR_AXES}},
    "diffusion_gemma_text": _EXPERTS,
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {
        "text_config": {"model_type": "t5gemma2_text", **_TEXT, "dropout_rate": 0.0}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    # A sixth of the width for each side of a box, or so many for all of them.
    "lilt": {"hidden_size": 192},
    "layoutlmv3": {"hidden_size": 192, "coordinate_size": 32, "shape_size": 32},
    "sapiens2": {
        "out_features": ["stage2"],
        "out_indices": [2],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads_per_layer": [4, 2],
    },
}


def configuration(model_type: str, **changes: object) -> transformers.PreTrainedConfig:
    """The configuration that an architecture has by default, in small; parts of it, too."""
    base = transformers.AutoConfig.for_model(model_type)
    settings = {
        name: value for name, value in _shrunk(base.to_dict()).items() if name != "model_type"
    }
    return type(base)(**settings | changes)


def _shrunk(settings: dict) -> dict:
    smaller = {}
    for name, value in settings.items():
        if name in MADE_ANEW:
            continue
        smaller[name] = value
        if isinstance(value, dict) and "model_type" in value:
            smaller[name] = _shrunk(value)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            smaller[name] = min(value, SIZES[name])
        elif isinstance(value, list) and len(value) == settings.get(_LAYERS):
            # A number for each layer.
            smaller[name] = value[: SIZES[_LAYERS]]
            if name in SIZES:
                smaller[name] = [min(size, SIZES[name]) for size in smaller[name]]
        elif (
            name.endswith(("_token_id", "_token_index"))
            and isinstance(value, int)
            and value >= SIZES["vocab_size"]
        ):
            smaller[name] = value % 8
    sizes = (smaller.get(name) for name in ("image_size", "patch_size"))
    if all(isinstance(size, int) for size in sizes) and "window_size" not in smaller:
        smaller["image_size"] = 3 * smaller["patch_size"]
    if "kv_lora_rank" in smaller and "num_key_value_heads" in smaller:
        # Latent attention has as many heads of keys as of queries.
        smaller["num_key_value_heads"] = smaller["num_attention_heads"]
    return smaller


# --- Sizes that hang together ---------------------------------------------------------------------

# More sizes, some of which would change the small models of types that run without them.
_FURTHER = {
    "num_queries": 10,
    "num_filters": 8,
    "base_channels": 32,
    "upsample_initial_channel": 128,
    "window_size": 3,
}
# Along one side of an image.
_PATCHES, _PIXELS = 4, 64
# What a default configuration leaves open, and a model needs: steps of a time series.
_OPEN = {"context_length": 11, "prediction_length": 10}


def related_configuration(model_type: str) -> transformers.PreTrainedConfig:
    """The default configuration in small, in which equal widths stay equal.

    What the class of a configuration computes of other sizes, it computes anew.
    """
    base = transformers.AutoConfig.for_model(model_type)
    settings = _declared(base)
    widths = {value for value in _widths(settings) if value > _AT_MOST["width"]}
    smaller = _related(_shrunk(settings), settings, widths)
    del smaller["model_type"]
    return type(base)(**smaller)


def _declared(config: transformers.PreTrainedConfig) -> dict:
    """What a configuration was made of, without what its class computed of that."""
    names = {field.name for field in dataclasses.fields(config)}
    names |= {"model_type", "out_indices"}
    settings = {}
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            settings[name] = _declared(part)
        elif name in names:
            settings[name] = value
    return settings


def _widths(settings: dict) -> set[int]:
    widths = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            widths |= _widths(value)
        elif name in _SIZES["width"].split() and isinstance(value, int):
            widths.add(value)
    return widths


def _related(settings: dict, default: dict, widths: set[int]) -> dict:
    """The same with smaller sizes that have the relations of those of the default."""
    smaller = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            smaller[name] = _related(value, default[name], widths)
        elif value is None:
            smaller[name] = _OPEN.get(name)
        else:
            smaller[name] = _smaller(name, value, widths)
    heads = smaller.get("num_attention_heads")
    if default.get("num_key_value_heads") == default.get("num_attention_heads") and heads:
        smaller["num_key_value_heads"] = heads
    if heads and "head_dim" in smaller and smaller["head_dim"] is None:
        smaller["head_dim"] = smaller["hidden_size"] // heads
    patch = smaller.get("patch_size")
    if isinstance(patch, int) and isinstance(smaller.get("image_size"), int):
        smaller["image_size"] = patch * max(_PATCHES, _PIXELS // patch)
    outputs = smaller.get("out_indices")
    if outputs and _LAYERS in smaller:
        # The last layers, as many as there are outputs.
        layers = max(len(outputs), SIZES[_LAYERS])
        smaller[_LAYERS] = layers
        smaller["out_indices"] = list(range(layers - len(outputs) + 1, layers + 1))
    return smaller


def _smaller(name: str, value: object, widths: set[int]) -> object:
    """A size by its name, or by the end of it, or because it equals a width."""
    if isinstance(value, list | tuple):
        if name == "depths":
            # Layers of each stage of an image model.
            return [min(depth, SIZES[_LAYERS]) for depth in value]
        return [_smaller(name, item, widths) for item in value]
    if type(value) is not int or name in SIZES or name.endswith(("_id", "_index")):
        return value
    if value in widths:
        return _AT_MOST["width"]
    for known, size in (_FURTHER | SIZES).items():
        if name == known or name.endswith(f"_{known}"):
            return min(value, size)
    return value
