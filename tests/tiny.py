"""Tiny random models with a tokenizer or processor of their own, one per supported architecture and
variant.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from analysis_book.architectures import CharacterBertTokenizer
from analysis_lib.corpora import ArrayImage, Corpus, Sound

# Random texts are made of these.
WORDS = [
    *("a", "the", "cat", "dog", "bird", "mouse", "apple", "house", "bridge"),
    *("sees", "eats", "draws", "finds"),
]
# The texts that tokenizers are made from, and tests measure: punctuation, sub-words, other scripts.
TEXTS = (
    "A girl is styling her hair, slowly.",
    "The cone of vectors points one way.",
    "Attention, attention!",
    "Hi",
    "Dimensions, heads, layers, tokens, and a full stop.",
    "Nothing here is unusual",
    "Keys answer queries. Queries ask keys.",
    "An outlier dimension draws attention to the first token, it seems.",
)
_OTHER_SCRIPTS = ("L'été dernier, l'élève a compris.", "注意は、鍵と問いから生まれる。")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
_WORDS = sorted({word.strip(".,!").lower() for text in TEXTS for word in text.split()})

_SIZE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 160,
}
# The same for causal models, in fewer blocks; four queries to two keys where keys are grouped.
_CAUSAL = {**_SIZE, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0}
_GROUPED = {**_CAUSAL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
# Positions are counted from the padding index on.
_ROBERTA = {
    **_SIZE,
    "max_position_embeddings": 162,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# DeBERTa takes the root of its scaling in float32. The root of 36 (heads of 12, three kinds of
# score) is exact there, so that a comparison in float64 does not turn on how it is rounded.
_DEBERTA = {
    **_SIZE,
    "pad_token_id": 1,
    "relative_attention": True,
    "max_relative_positions": -1,
    "pos_att_type": "c2p|p2c",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_DEBERTA_V3 = {
    **_DEBERTA,
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
# Heads of 8 and two kinds of score: the root of 16.
_ONE_RELATION = {**_DEBERTA, "hidden_size": 16, "position_buckets": 6, "norm_rel_ebd": "layer_norm"}
_MODERN = {
    **_ROBERTA,
    "max_position_embeddings": 160,
    "local_attention": 12,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
_T5 = {
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_CANINE = {
    **_SIZE,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "num_hash_functions": 4,
    # These are its positions, too.
    "num_hash_buckets": 256,
    "local_transformer_stride": 16,
}
_SPEECH = {
    **_SIZE,
    "num_hidden_layers": 2,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_LARGE_SPEECH = {
    **_SPEECH,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "conv_bias": True,
}
_WHISPER = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "vocab_size": 60,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_IMAGE = {
    **{name: size for name, size in _SIZE.items() if name != "max_position_embeddings"},
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 8,
}
_DINO = {**_IMAGE, "mlp_ratio": 2}
_SEGFORMER = {
    "num_encoder_blocks": 3,
    "depths": [1, 2, 1],
    "sr_ratios": [4, 2, 1],
    "hidden_sizes": [8, 16, 24],
    "patch_sizes": [7, 3, 3],
    "strides": [4, 2, 2],
    "num_attention_heads": [1, 2, 3],
    "mlp_ratios": [2, 2, 2],
}
_CVT = {
    "embed_dim": [8, 16, 24],
    "num_heads": [1, 2, 3],
    "depth": [1, 2, 3],
    "mlp_ratio": [2.0, 2.0, 2.0],
}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
_EFFICIENTNET = {
    "image_size": 32,
    "width_coefficient": 0.5,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 5, 3],
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 24],
    "strides": [1, 2, 1],
    "num_block_repeats": [1, 2, 1],
    "expand_ratios": [1, 3, 3],
    "hidden_dim": 640,
}
_EFFICIENTNET_LITE = {
    "image_size": 32,
    "stem_width": 8,
    "head_width": 24,
    "repeats": [1, 2],
    "widths": [8, 12],
    "kernels": [3, 5],
    "strides": [1, 2],
    "expansions": [1, 3],
}
_VAN = {
    "hidden_sizes": [8, 12],
    "depths": [1, 2],
    "mlp_ratios": [2, 3],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "image_size": 32,
}
_CHARACTER_BERT = {
    **_SIZE,
    "num_hidden_layers": 2,
    "character_embeddings_dim": 6,
    "cnn_filters": [[1, 4], [2, 4], [3, 6]],
    "max_word_length": 12,
}
_MANTA = {
    **_T5,
    "feed_forward_proj": "gated-gelu",
    "byte_embedding_dim": 8,
    "frontier_predictor_num_attention_heads": 2,
    "frontier_predictor_attention_window": 4,
    "max_length_inputs": 128,
    "max_length_encoder_decoder": 128,
}
_GPT_NEO = {
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 160,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
_CONVNEXT = {
    "num_stages": 3,
    "hidden_sizes": [8, 12, 16],
    "depths": [1, 2, 1],
    "image_size": 32,
    "patch_size": 4,
}

# By name: the architecture, what its config says beyond the vocabulary, and its kind of tokenizer
# or processor.
EVERY_ARCHITECTURE = {
    "bert": ("bert", _SIZE, "wordpiece"),
    "roberta": ("roberta", _ROBERTA, "bpe"),
    "xlm-roberta": ("xlm-roberta", _ROBERTA, "unigram"),
    "camembert": ("camembert", _ROBERTA, "unigram"),
    "electra": ("electra", {**_SIZE, "embedding_size": 24}, "wordpiece"),
    "electra-projected": ("electra", {**_SIZE, "embedding_size": 10}, "wordpiece"),
    "distilbert": (
        "distilbert",
        {"dim": 24, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 160},
        "wordpiece",
    ),
    "albert": (
        "albert",
        {**_SIZE, "embedding_size": 10, "num_hidden_layers": 4, "num_hidden_groups": 2},
        "unigram",
    ),
    "albert-inner": (
        "albert",
        {**_SIZE, "embedding_size": 24, "num_hidden_layers": 2, "inner_group_num": 2},
        "bpe",
    ),
    "mpnet": ("mpnet", {**_ROBERTA, "relative_attention_num_buckets": 32}, "bpe"),
    "megatron-bert": ("megatron-bert", _SIZE, "wordpiece"),
    "rembert": (
        "rembert",
        {**_SIZE, "input_embedding_size": 10, "output_embedding_size": 12, "pad_token_id": 0},
        "unigram",
    ),
    "openai-gpt": (
        "openai-gpt",
        {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 160},
        "gpt2",
    ),
    "gpt_neo": ("gpt_neo", _GPT_NEO, "gpt2"),
    "bloom": ("bloom", {"hidden_size": 24, "n_layer": 2, "n_head": 2}, "gpt2"),
    "deberta": ("deberta", {**_DEBERTA, "max_relative_positions": 12}, "bpe"),
    "deberta-v3": ("deberta-v2", _DEBERTA_V3, "unigram"),
    "deberta-v2-xlarge": (
        "deberta-v2",
        {**_DEBERTA_V3, "conv_kernel_size": 3, "conv_act": "gelu"},
        "unigram",
    ),
    "deberta-v2-own": (
        "deberta-v2",
        {**_DEBERTA, "share_att_key": False, "position_biased_input": True},
        "wordpiece",
    ),
    "deberta-v2-c2p": ("deberta-v2", {**_ONE_RELATION, "pos_att_type": "c2p"}, "unigram"),
    "deberta-v2-p2c": ("deberta-v2", {**_ONE_RELATION, "pos_att_type": "p2c"}, "unigram"),
    "modernbert": ("modernbert", {**_MODERN, "num_hidden_layers": 4}, "bpe"),
    "modernbert-biases": (
        "modernbert",
        {**_MODERN, "attention_bias": True, "norm_bias": True},
        "bpe",
    ),
    "gpt2": ("gpt2", {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 160}, "gpt2"),
    "gpt_neox": ("gpt_neox", {**_CAUSAL, "rotary_pct": 0.5}, "gpt2"),
    "llama": ("llama", {**_GROUPED, "bos_token_id": 1, "eos_token_id": 2}, "llama"),
    "mistral": (
        "mistral",
        {**_GROUPED, "sliding_window": 6, "bos_token_id": 1, "eos_token_id": 2},
        "llama",
    ),
    "qwen2": ("qwen2", {key: size for key, size in _GROUPED.items() if key != "head_dim"}, "gpt2"),
    "qwen3": ("qwen3", _GROUPED, "gpt2"),
    "t5": ("t5", _T5, "t5"),
    "mt5": ("mt5", {**_T5, "feed_forward_proj": "gated-gelu"}, "t5"),
    "byt5": ("t5", {**_T5, "feed_forward_proj": "gated-gelu"}, "byt5"),
    "canine": ("canine", _CANINE, "canine"),
    "wav2vec2": ("wav2vec2", _SPEECH, "speech"),
    "wav2vec2-large": ("wav2vec2", _LARGE_SPEECH, "speech-masked"),
    "hubert": ("hubert", _SPEECH, "speech"),
    "whisper": ("whisper", _WHISPER, "whisper"),
    "vit": ("vit", _IMAGE, "vit"),
    "beit": ("beit", {**_IMAGE, "use_shared_relative_position_bias": True}, "beit"),
    "beit-own": ("beit", {**_IMAGE, "use_relative_position_bias": True}, "beit"),
    "beit-absolute": ("beit", {**_IMAGE, "use_absolute_position_embeddings": True}, "beit"),
    "deit": ("deit", _IMAGE, "deit"),
    "dinov2": ("dinov2", _DINO, "bit"),
    "dinov2-registers": ("dinov2_with_registers", _DINO, "bit"),
    "segformer": ("segformer", _SEGFORMER, "segformer"),
    "resnet-basic": ("resnet", {**_RESNET, "layer_type": "basic"}, "convnext"),
    "resnet-bottleneck": ("resnet", {**_RESNET, "layer_type": "bottleneck"}, "convnext"),
    "efficientnet": ("efficientnet", _EFFICIENTNET, "efficientnet"),
    "efficientnet-lite": ("efficientnet_lite", _EFFICIENTNET_LITE, "convnext"),
    "convnext": ("convnext", _CONVNEXT, "convnext"),
    "convnextv2": ("convnextv2", _CONVNEXT, "convnext"),
    "cvt": ("cvt", _CVT, "convnext"),
    "van": ("van", _VAN, "convnext"),
    "character_bert": ("character_bert", _CHARACTER_BERT, "characters"),
    "manta": ("manta", _MANTA, "byt5"),
    "self_attention": ("self_attention", {"hidden_size": 12, "num_hidden_layers": 3}, "wordpiece"),
}
# The first of them: bidirectional encoders of BERT's kind.
ARCHITECTURES = {name: EVERY_ARCHITECTURE[name] for name in list(EVERY_ARCHITECTURE)[:7]}

_BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ROBERTA_TOKENS = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def _wordpiece(special: list[str]) -> tokenizers.Tokenizer:
    pieces = [*special, *_LETTERS, *(f"##{sign}" for sign in _LETTERS), *_WORDS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _bytes(special: list[str]) -> tokenizers.Tokenizer:
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "Ġa"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _unigram(special: list[str]) -> tokenizers.Tokenizer:
    pieces = [*special, "▁", *_LETTERS, *_LETTERS.upper(), *(f"▁{word}" for word in _WORDS)]
    scored = [(piece, -float(i) / 10) for i, piece in enumerate(dict.fromkeys(pieces))]
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=special.index("<unk>")))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


# By kind: how it cuts words, its special tokens, and the templates of a text and of a pair of
# texts.
_TOKENIZERS = {
    "wordpiece": (_wordpiece, _BERT_TOKENS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "bpe": (_bytes, _ROBERTA_TOKENS, "<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "unigram": (_unigram, _ROBERTA_TOKENS, "<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "gpt2": (_bytes, {"eos": "<|endoftext|>"}, "$A", "$A $B"),
    "llama": (_unigram, {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}, "<s> $A", "<s> $A <s> $B"),
    "t5": (_unigram, {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}, "$A </s>", "$A </s> $B </s>"),
}


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the given kind that knows every word of ``TEXTS`` and spells out the
    others.
    """
    cut, special, single, pair = _TOKENIZERS[kind]
    return framed(cut(list(special.values())), special, single, pair)


def framed(
    backend: tokenizers.Tokenizer, special: dict[str, str], single: str, pair: str
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with special tokens, which its templates put around a text and a pair; segments
    where they differ.
    """
    added = {part.partition(":")[0] for part in single.split() + pair.split()} - {"$A", "$B"}
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(token, backend.token_to_id(token)) for token in sorted(added)],
    )
    names = {f"{name}_token": token for name, token in special.items()}
    if ":1" in pair:
        names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


_SQUARE = {"height": 32, "width": 32}
_PROCESSORS: dict[str, Callable] = {
    "byt5": transformers.ByT5Tokenizer,
    "canine": transformers.CanineTokenizer,
    "characters": lambda: CharacterBertTokenizer(max_word_length=12),
    "speech": lambda: transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False),
    "speech-masked": lambda: transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True),
    "whisper": lambda: transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
    "vit": lambda: transformers.ViTImageProcessorPil(size=_SQUARE),
    "beit": lambda: transformers.BeitImageProcessorPil(size=_SQUARE, do_center_crop=False),
    "deit": lambda: transformers.DeiTImageProcessorPil(
        size={"height": 36, "width": 36}, crop_size=_SQUARE
    ),
    "bit": lambda: transformers.BitImageProcessorPil(size={"shortest_edge": 36}, crop_size=_SQUARE),
    "segformer": lambda: transformers.SegformerImageProcessorPil(size=_SQUARE),
    "convnext": lambda: transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    "efficientnet": lambda: transformers.EfficientNetImageProcessorPil(size=_SQUARE),
}


def kind(name: str) -> str:
    """What an architecture reads: ``text``, ``image`` or ``audio``."""
    processor = EVERY_ARCHITECTURE[name][2]
    if processor in _TOKENIZERS or processor in ("byt5", "canine", "characters"):
        return "text"
    return "audio" if processor in ("speech", "speech-masked", "whisper") else "image"


def _images() -> tuple[Image.Image, ...]:
    """Smooth random images of several sizes, the last of them grey."""
    random = np.random.default_rng(0)
    images = []
    for width, height in ((32, 32), (48, 40), (36, 50), (32, 32)):
        coarse = random.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        images.append(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return (*images[:-1], images[-1].convert("L"))


def _sounds() -> tuple[np.ndarray, ...]:
    """Tones in noise, 16 kHz, of 0.1 to 0.2 seconds."""
    random = np.random.default_rng(0)
    sounds = []
    for pitch, samples in ((220, 3200), (330, 2000), (440, 3200), (550, 1600)):
        tone = np.sin(2 * np.pi * pitch * np.arange(samples) / 16000)
        sounds.append((0.4 * tone + 0.1 * random.standard_normal(samples)).astype(np.float32))
    return tuple(sounds)


def items(name: str) -> tuple:
    """Inputs for an architecture: texts, images (PIL) or sounds (float32 samples at 16 kHz) of
    several sizes.
    """
    makers = {
        "text": lambda: (TEXTS[0], TEXTS[3], *_OTHER_SCRIPTS, " ".join(TEXTS[4:7])),
        "image": _images,
        "audio": _sounds,
    }
    return makers[kind(name)]()


def corpus(name: str) -> Corpus:
    """The :func:`items` as the library reads them."""
    wrapped = {
        "text": str,
        "image": lambda image: ArrayImage(np.asarray(image)),
        "audio": lambda samples: Sound(samples, 16000),
    }
    return Corpus(name, tuple(map(wrapped[kind(name)], items(name))), kind=kind(name))


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Random values everywhere: a bias at 0, a gain at 1 or a position table near 0 hides where it
    is lost.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim:
            # Attention far from uniform: vectors keep about their length, and scores spread over a
            # few units.
            inputs = (
                parameter.numel() // parameter.shape[0]
                if parameter.shape[0] > 1
                else parameter.shape[-1]
            )
            parameter.normal_(0, 2 * inputs**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def build(name: str, seed: int = 0, **changes) -> tuple[transformers.PreTrainedModel, object]:
    """A random model of an architecture of ``EVERY_ARCHITECTURE``, and its tokenizer or
    processor.
    """
    model_type, settings, processor = EVERY_ARCHITECTURE[name]
    if processor in _TOKENIZERS:
        reads = tokenizer(processor)
        settings = {"vocab_size": len(reads), **settings}
    else:
        reads = _PROCESSORS[processor]()
    if processor == "byt5":
        settings = {"vocab_size": len(reads), **settings}
    config = transformers.AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    randomise(model)
    return model.eval(), reads


def save(folder: Path, name: str, seed: int = 0, **changes) -> Path:
    """:func:`build`, saved to ``folder`` as safetensors."""
    model, reads = build(name, seed, **changes)
    model.save_pretrained(folder)
    reads.save_pretrained(folder)
    return folder
