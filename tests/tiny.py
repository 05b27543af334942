"""Tiny random transformers with a tokenizer of their own, one per supported architecture."""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

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
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
_WORDS = sorted({word.strip(".,!").lower() for text in TEXTS for word in text.split()})

_SIZE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 160,
    # Wide enough for attention that is far from uniform.
    "initializer_range": 0.4,
}
_ROBERTA = {**_SIZE, "max_position_embeddings": 162, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# By name: the architecture, what its config says beyond the vocabulary, and its kind of tokenizer.
ARCHITECTURES = {
    "bert": ("bert", _SIZE, "wordpiece"),
    "roberta": ("roberta", _ROBERTA, "bpe"),
    "xlm-roberta": ("xlm-roberta", _ROBERTA, "unigram"),
    "camembert": ("camembert", _ROBERTA, "unigram"),
    "electra": ("electra", {**_SIZE, "embedding_size": 24}, "wordpiece"),
    "electra-projected": ("electra", {**_SIZE, "embedding_size": 10}, "wordpiece"),
    "distilbert": (
        "distilbert",
        {
            "dim": 24,
            "n_layers": 3,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 160,
            "initializer_range": 0.4,
        },
        "wordpiece",
    ),
}


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the given kind that knows every word of ``TEXTS`` and spells out the others."""
    if kind == "wordpiece":
        special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        pieces = [*special.values(), *_LETTERS, *(f"##{sign}" for sign in _LETTERS), *_WORDS]
        backend = tokenizers.Tokenizer(
            models.WordPiece({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]")
        )
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    else:
        special = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
        if kind == "bpe":
            pieces = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "Ġa"]
            merges = [("Ġ", "t"), ("Ġ", "a")]
            vocabulary = {piece: i for i, piece in enumerate(pieces)}
            backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
        else:
            pieces = [*special.values(), "▁", *_LETTERS, *_LETTERS.upper(), *(f"▁{word}" for word in _WORDS)]
            scored = [(piece, -float(i) / 10) for i, piece in enumerate(dict.fromkeys(pieces))]
            backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=3))
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            backend.decoder = decoders.Metaspace()
    cls, sep = special["cls"], special["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        special_tokens=[(cls, backend.token_to_id(cls)), (sep, backend.token_to_id(sep))],
    )
    names = {f"{name}_token": token for name, token in special.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def build(
    name: str, seed: int = 0, **changes
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerFast]:
    """A random model of an architecture of ``ARCHITECTURES``, biases included, and its tokenizer."""
    model_type, settings, kind = ARCHITECTURES[name]
    words = tokenizer(kind)
    config = transformers.AutoConfig.for_model(model_type, **{"vocab_size": len(words), **settings, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers starts biases at zero, where a lost bias would not show.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model.eval(), words


def save(folder: Path, name: str, seed: int = 0, **changes) -> Path:
    """:func:`build`, saved to ``folder`` as safetensors."""
    model, words = build(name, seed, **changes)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
