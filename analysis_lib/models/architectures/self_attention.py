"""Classifier of Fosse et al. (2023, sec. 2.2): one-head attention blocks, dense layer on [CLS]."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward


class SelfAttentionConfig(PreTrainedConfig):
    """Sizes of the classifier, and settings that the paper leaves open (initial values, biases, ε).

    By default, embeddings and matrices are initialised as in BERT, with which the paper compares,
    and biases are zero. The initial biases of PyTorch's linear layers are, at this width, about as
    long as the vectors to which they are added: all keys, and all values, would be similar from the
    start.

    Attributes:
        vocab_size: the number of tokens.
        hidden_size: the width d of the embeddings and of the single head.
        num_hidden_layers: the number of blocks; 1 to 5 in the paper.
        embedding_std: the standard deviation of the embeddings' initial values.
        initializer_range: the standard deviation of the matrices' initial values, with biases of
            zero; None for PyTorch's default, which is uniform in ±1/√d for both.
        attention_gain: the factor of the initial values of the matrices of queries and keys.
        bias: whether queries, keys and values have biases; equations 1 and 2 have none.
        entropy_weight: λ, the weight of the attention rows' mean normalised entropy in the loss.
        layer_norm_eps: the epsilon of the norm after each block.
    """

    model_type = "self_attention"

    vocab_size: int = 8000
    hidden_size: int = 300
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    embedding_std: float = 0.02
    initializer_range: float | None = 0.02
    attention_gain: float = 1.0
    bias: bool = True
    entropy_weight: float = 0.0
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0


class SelfAttention(nn.Module):
    """Equations 1 and 2: y_i = Σ_j a_ij v_j, where a_ij is the softmax over j of q_i · k_j / √d."""

    is_causal = False

    def __init__(self, config: SelfAttentionConfig):
        super().__init__()
        self.config = config
        self.scaling = config.hidden_size**-0.5
        width = config.hidden_size
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=config.bias) for _ in range(3)
        )
        self.query.gain = self.key.gain = config.attention_gain

    def forward(
        self, hidden: Float[Tensor, "text token width"], mask: Tensor | None
    ) -> tuple[Float[Tensor, "text token width"], Float[Tensor, "text head token key"] | None]:
        query, key, value = (
            part(hidden).unsqueeze(1) for part in (self.query, self.key, self.value)
        )
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, weights = attend(self, query, key, value, mask, scaling=self.scaling, dropout=0.0)
        return attended.reshape(hidden.shape), weights


class SelfAttentionBlock(nn.Module):
    """Self-attention, a residual connection, then layer norm."""

    def __init__(self, config: SelfAttentionConfig):
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(hidden, mask)
        return self.norm(hidden + attended), weights


class SelfAttentionPreTrainedModel(PreTrainedModel):
    config_class = SelfAttentionConfig
    base_model_prefix = "encoder"
    _input_embed_layer = "word_embeddings"
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and self.config.initializer_range is None:
            module.reset_parameters()
        else:
            super()._init_weights(module)
        if isinstance(module, nn.Linear):
            module.weight *= getattr(module, "gain", 1.0)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.embedding_std)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])


class SelfAttentionModel(SelfAttentionPreTrainedModel):
    """Word embeddings and blocks. As in the paper's equations, positions are not encoded."""

    def __init__(self, config: SelfAttentionConfig):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.layers = nn.ModuleList(
            SelfAttentionBlock(config) for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "text token"],
        attention_mask: Int[Tensor, "text token"] | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        hidden = self.word_embeddings(input_ids)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask
        )
        weights = []
        for layer in self.layers:
            hidden, layer_weights = layer(hidden, mask)
            weights.append(layer_weights)
        attentions = None if None in weights else tuple(weights)
        return BaseModelOutput(last_hidden_state=hidden, attentions=attentions)


class SelfAttentionForSequenceClassification(SelfAttentionPreTrainedModel):
    """A dense layer on [CLS], the first token.

    Its loss is the cross-entropy in nats plus λ times :func:`mean_normalised_entropy` of the
    attention rows.
    """

    def __init__(self, config: SelfAttentionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = SelfAttentionModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        if config.entropy_weight:
            # Fused attention does not return the weights, which the loss needs.
            self.set_attn_implementation("eager")
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "text token"],
        attention_mask: Int[Tensor, "text token"] | None = None,
        labels: Int[Tensor, " text"] | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        output = self.encoder(input_ids, attention_mask)
        logits = self.classifier(output.last_hidden_state[:, 0])
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        if loss is not None and self.config.entropy_weight:
            tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            entropy = mean_normalised_entropy(torch.stack(output.attentions), tokens)
            loss = loss + self.config.entropy_weight * entropy
        return SequenceClassifierOutput(loss=loss, logits=logits, attentions=output.attentions)


def mean_normalised_entropy(
    weights: Float[Tensor, "layer text head token key"], tokens: Int[Tensor, "text token"]
) -> Float[Tensor, ""]:
    """Mean over attention rows of −Σ_j p_j ln p_j / ln n, where n is the number of keys; in [0, 1].

    Rows of padding, and of texts of one token, are left out.

    Args:
        tokens: 1 at a token, 0 at padding.
    """
    # At a weight of 0, as at padding, the gradient of p ln p would be 0 · ∞ = NaN; 1 gives the same
    # value, 0.
    positive = weights.where(weights > 0, 1.0)
    entropy = -(positive * positive.log()).sum(-1)
    keys = tokens.sum(-1)
    rows = (tokens.bool() & (keys > 1).unsqueeze(-1))[None, :, None].expand_as(entropy)
    normalised = entropy / keys.clamp(min=2).to(entropy.dtype).log()[None, :, None, None]
    return normalised[rows].mean()
