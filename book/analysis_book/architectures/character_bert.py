"""CharacterBERT: a BERT that reads whole words, embedded by convolutions over their characters."""

import json
from pathlib import Path

import torch
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertEncoder,
    BertPooler,
    BertPreTrainedModel,
)

# A character is a byte of UTF-8 (0 to 255) or one of these. Its id is one more: a word of padding
# consists of zeros.
_CLS, _SEP, _WORD_BEGINS, _WORD_ENDS, _PADDING, _MASK = range(256, 262)
_SPECIAL_WORDS = {"[CLS]": _CLS, "[SEP]": _SEP, "[MASK]": _MASK}
CHARACTERS = 263


class CharacterBertConfig(BertConfig):
    """Sizes of a CharacterBERT; the defaults are those of ``helboukkouri/character-bert``."""

    model_type = "character_bert"

    vocab_size: int = CHARACTERS
    character_embeddings_dim: int = 16
    cnn_activation: str = "relu"
    # Each kernel's width in characters and number of filters.
    cnn_filters: list[list[int]] | tuple[tuple[int, int], ...] = (
        (1, 32),
        (2, 32),
        (3, 64),
        (4, 128),
        (5, 256),
        (6, 512),
        (7, 1024),
    )
    num_highway_layers: int = 2
    max_word_length: int = 50


class Highway(nn.Module):
    """Layers y = g ∘ x + (1 − g) ∘ relu(A x + a), with gates g = sigmoid(B x + b)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self._layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self._layers:
            transformed, gate = layer(hidden).chunk(2, dim=-1)
            hidden = torch.lerp(transformed.relu(), hidden, gate.sigmoid())
        return hidden


class CharacterCnn(nn.Module):
    """One vector per word, from the largest response of each filter along the word's characters."""

    def __init__(self, config: CharacterBertConfig) -> None:
        super().__init__()
        self._char_embedding_weights = nn.Parameter(
            torch.empty(CHARACTERS, config.character_embeddings_dim)
        )
        self._activation = ACT2FN[config.cnn_activation]
        self._filters = len(config.cnn_filters)
        for i, (width, filters) in enumerate(config.cnn_filters):
            convolution = nn.Conv1d(config.character_embeddings_dim, filters, width)
            setattr(self, f"char_conv_{i}", convolution)
        responses = sum(filters for _, filters in config.cnn_filters)
        self._highways = Highway(responses, config.num_highway_layers)
        self._projection = nn.Linear(responses, config.hidden_size)

    def forward(self, characters: Tensor) -> Tensor:
        """The vectors, [text, word, width], of words given by ids, [text, word, character]."""
        words = characters.flatten(0, 1)
        embedded = nn.functional.embedding(words, self._char_embedding_weights).transpose(1, 2)
        responses = []
        for i in range(self._filters):
            convolution = getattr(self, f"char_conv_{i}")
            largest = convolution(embedded).amax(-1)
            responses.append(self._activation(largest))
        transformed = self._highways(torch.cat(responses, dim=-1))
        return self._projection(transformed).unflatten(0, characters.shape[:2])


class CharacterBertEmbeddings(BertEmbeddings):
    """BERT's sum of word, position and segment embeddings, the first computed from characters."""

    def __init__(self, config: CharacterBertConfig) -> None:
        super().__init__(config)
        self.word_embeddings = CharacterCnn(config)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class CharacterBertModel(BertModel):
    """BERT's encoder over words.

    ``input_ids`` are [text, word, character], ``attention_mask`` is [text, word].

    Names and shapes of the weights are those of ``helboukkouri/character-bert`` and ``-medical``,
    where they have the prefix ``character_bert.``, and of the authors' ``general_character_bert``,
    which has none. The authors test the latter on "Hello World!": the vector of [CLS] in the last
    layer begins with -0.065009, 0.282772, -0.292036, -0.156121, 0.16317.

    Source: El Boukkouri et al. 2020, arXiv 2010.10392.
    """

    config_class = CharacterBertConfig
    config: CharacterBertConfig
    base_model_prefix = "character_bert"
    _keys_to_ignore_on_load_unexpected = (r"^cls\.", r"embeddings\.position_ids$")

    def __init__(self, config: CharacterBertConfig) -> None:
        # Not BertModel's initialiser, which would create embeddings of a WordPiece vocabulary.
        BertPreTrainedModel.__init__(self, config)
        self.embeddings = CharacterBertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CharacterCnn):
            weights = torch.randn(module._char_embedding_weights.shape)
            weights[[0, _PADDING + 1]] = 0.0
            init.copy_(module._char_embedding_weights, weights)
        elif isinstance(module, nn.Conv1d):
            # PyTorch's initialisation, as in the published code.
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)


class CharacterBertTokenizer:
    """The words of BERT's basic tokenisation, each as a list of character ids.

    There is no vocabulary: a word is the first bytes of its UTF-8 encoding between a begin and an
    end sign, padded to ``max_word_length`` ids.

    >>> tokenizer = CharacterBertTokenizer()
    >>> tokenizer.words("Hello, world")
    ['hello', ',', 'world']
    >>> tokenizer("Hi")["input_ids"][1][:5]
    [259, 105, 106, 260, 261]
    """

    cls_token = "[CLS]"
    sep_token = "[SEP]"
    pad_token = "[PAD]"
    _SETTINGS = ("do_lower_case", "max_word_length", "model_max_length")

    def __init__(
        self, do_lower_case: bool = True, max_word_length: int = 50, model_max_length: int = 512
    ) -> None:
        self.do_lower_case = do_lower_case
        self.max_word_length = max_word_length
        self.model_max_length = model_max_length
        self._normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
        self._splitter = pre_tokenizers.BertPreTokenizer()
        self.cls_token_id = self.word_ids(self.cls_token)
        self.sep_token_id = self.word_ids(self.sep_token)
        self.pad_token_id = self.word_ids(self.pad_token)

    def word_ids(self, word: str) -> list[int]:
        """The character ids of a word."""
        if word == self.pad_token:
            return [0] * self.max_word_length
        if word in _SPECIAL_WORDS:
            characters = [_SPECIAL_WORDS[word]]
        else:
            characters = list(word.encode("utf-8", "ignore")[: self.max_word_length - 2])
        characters = [_WORD_BEGINS, *characters, _WORD_ENDS]
        characters += [_PADDING] * (self.max_word_length - len(characters))
        return [character + 1 for character in characters]

    def words(self, text: str) -> list[str]:
        """The words of a text."""
        normalized = self._normalizer.normalize_str(text)
        return [word for word, _ in self._splitter.pre_tokenize_str(normalized)]

    def __call__(
        self, text: str | list[str], text_pair: str | list[str] | None = None, **_: object
    ) -> dict[str, list]:
        """BERT's inputs for a text or a pair, or for each in a list.

        The ids of a word are those of its characters.

        Returns:
            ``input_ids``, ``token_type_ids`` and ``special_tokens_mask``, as of transformers'
            tokenizers.
        """
        if not isinstance(text, str):
            pairs = zip(*filter(None, (text, text_pair)), strict=True)
            rows = [self(*pair) for pair in pairs]
            columns = {}
            for name in rows[0]:
                columns[name] = [row[name] for row in rows]
            return columns
        words = [self.cls_token, *self.words(text), self.sep_token]
        segments = [0] * len(words)
        if text_pair is not None:
            second = [*self.words(text_pair), self.sep_token]
            words += second
            segments += [1] * len(second)
        return {
            "input_ids": [self.word_ids(word) for word in words],
            "token_type_ids": segments,
            "special_tokens_mask": [int(word in _SPECIAL_WORDS) for word in words],
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``tokenizer_config.json``, which holds all settings."""
        settings = {
            "tokenizer_class": type(self).__name__,
            **{name: getattr(self, name) for name in self._SETTINGS},
        }
        (Path(folder) / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_: object) -> "CharacterBertTokenizer":
        """The tokenizer saved in a folder.

        Other arguments of transformers, such as a revision, are ignored.
        """
        path = Path(folder) / "tokenizer_config.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(**{name: value for name, value in stored.items() if name in cls._SETTINGS})
