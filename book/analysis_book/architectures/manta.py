"""MANTa-LM: a T5 whose encoder reads blocks of bytes, whose limits a small network predicts."""

import copy

import torch
from torch import Tensor, nn
from transformers import LongformerConfig, LongformerModel, T5Config
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqModelOutput
from transformers.models.t5.modeling_t5 import T5Model, T5PreTrainedModel, T5Stack

from analysis_lib.errors import AnalysisError


class MantaConfig(T5Config):
    """Sizes of a MANTa-LM: those of T5 and of the pooling.

    The configuration of ``almanach/manta-lm-base`` sets all.
    """

    model_type = "manta"

    vocab_size: int = 384
    byte_embedding_dim: int = 64
    frontier_predictor_num_layers: int = 1
    frontier_predictor_num_attention_heads: int = 8
    frontier_predictor_attention_window: int = 16
    pooling_variance_regularization: float = 1e-6
    # The width in bytes of one kernel for all dimensions; or of several, each with its number of
    # filters.
    pooling_kernel_size: int | list[list[int]] = 3
    pooling_depthwise_convolution: bool = True
    pooling_mean_pool: bool = False
    max_length_inputs: int = 256
    max_length_encoder_decoder: int = 256
    # Missing from the published configuration; its model card starts the decoder with padding.
    decoder_start_token_id: int | None = 0


class MantaFrontierPredictor(nn.Module):
    """The probability that a block begins at each byte, from attention within a window of bytes."""

    def __init__(self, config: MantaConfig) -> None:
        super().__init__()
        width = config.byte_embedding_dim
        window = config.frontier_predictor_attention_window
        self.local_transformer = LongformerModel(
            LongformerConfig(
                attention_window=window,
                attention_probs_dropout_prob=config.dropout_rate,
                hidden_dropout_prob=config.dropout_rate,
                hidden_size=width,
                intermediate_size=4 * width,
                # The input is padded to whole windows; position 0 is reserved for padding.
                max_position_embeddings=(config.max_length_inputs // window + 1) * window + 1,
                num_attention_heads=config.frontier_predictor_num_attention_heads,
                num_hidden_layers=config.frontier_predictor_num_layers,
                # It reads vectors: its vocabulary holds only padding.
                vocab_size=1,
                pad_token_id=0,
                bos_token_id=None,
                sep_token_id=None,
                eos_token_id=None,
            )
        )
        self.output_projection = nn.Linear(width, 1)

    def forward(self, embedded: Tensor, mask: Tensor) -> Tensor:
        outputs = self.local_transformer(inputs_embeds=embedded, attention_mask=mask.long())
        logits = self.output_projection(outputs.last_hidden_state)
        return logits.squeeze(-1).sigmoid()


class MantaConvolution(nn.Module):
    """A convolution along bytes that keeps their number; its weights have the published layout."""

    def __init__(self, channels: int, filters: int, kernel: int, depthwise: bool) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise AnalysisError(
                f"pooling_kernel_size has a kernel of {kernel} bytes: give an odd number"
            )
        self.depthwise = depthwise
        shape = (channels, filters, kernel)
        if depthwise:
            shape = (1, 1, kernel, filters)
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, sequence: Tensor) -> Tensor:
        if self.depthwise:
            kernel = self.weight[0].permute(2, 0, 1)
            groups = len(kernel)
        else:
            kernel = self.weight.transpose(0, 1)
            groups = 1
        channels_first = sequence.transpose(1, 2)
        padding = kernel.shape[-1] // 2
        responses = nn.functional.conv1d(channels_first, kernel, padding=padding, groups=groups)
        return responses.transpose(1, 2)


class MantaPooler(nn.Module):
    """Bytes to blocks: a block pools all bytes by the probabilities that they belong to it.

    With p_s the probability that a block begins at byte s (0 at the first), the index of the block
    of byte s has the mean μ_s = Σ_{t≤s} p_t and the variance σ²_s = Σ_{t≤s} p_t (1 − p_t) + ε. Then
    P_bs ∝ exp(−(μ_s − b)² / 2σ_s), normalised over b = 0 .. min(bytes, ⌊max_s(μ_s + 3σ_s)⌋ + 1) −
    1: the published code divides by 2σ, not 2σ². A block is the largest response (or the mean)
    along s of a convolution of P_bs x_s.

    In the published code, padding enters the blocks and the number of blocks is that of the whole
    batch. Here, each text has the blocks that it has alone, and further blocks are masked. Padding
    is on the right.
    """

    def __init__(self, config: MantaConfig) -> None:
        super().__init__()
        width = config.byte_embedding_dim
        kernels = config.pooling_kernel_size
        if isinstance(kernels, int):
            kernels = [[kernels, width]]
        self.variance = config.pooling_variance_regularization
        self.mean_pool = config.pooling_mean_pool
        self.max_blocks = config.max_length_encoder_decoder
        self.conv_layers = nn.Sequential()
        for size, filters in kernels:
            layer = MantaConvolution(width, filters, size, config.pooling_depthwise_convolution)
            self.conv_layers.append(layer)
        self.out_projection = nn.Linear(sum(filters for _, filters in kernels), config.d_model)

    def forward(self, embedded: Tensor, frontiers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks, [text, block, width], and their mask, [text, block].

        The mask is True at a text's own blocks.
        """
        shares, own = self.shares(frontiers, mask)
        if self.mean_pool:
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=1)
        # One block at a time: together they would need blocks × bytes × channels elements.
        blocks = [self._pool(embedded * share.unsqueeze(-1), mask) for share in shares.unbind(1)]
        return self.out_projection(torch.stack(blocks, dim=1)), own

    def shares(self, frontiers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """P, [text, block, byte], and the mask of blocks, [text, block]."""
        begins = frontiers * mask
        begins[:, 0] = 0.0
        least = max(self.variance, 5 * torch.finfo(begins.dtype).resolution)
        mean = begins.cumsum(-1)
        variance = (begins * (1 - begins)).cumsum(-1) + least
        deviation = variance.sqrt()
        last = (mean + 3 * deviation).amax(-1).long()
        counts = torch.minimum(mask.sum(-1), last + 1)
        indices = torch.arange(counts.max(), device=mask.device)
        own = indices < counts.unsqueeze(-1)
        distances = mean.unsqueeze(1) - indices.unsqueeze(-1)
        scores = -(distances**2) / (2 * deviation.unsqueeze(1))
        scores = scores.masked_fill(~own.unsqueeze(-1), -torch.inf)
        shares = scores.softmax(1) * mask.unsqueeze(1)
        return shares[:, : self.max_blocks], own[:, : self.max_blocks]

    def _pool(self, weighted: Tensor, mask: Tensor) -> Tensor:
        responses = torch.cat([layer(weighted) for layer in self.conv_layers], dim=-1)
        padding = ~mask.unsqueeze(-1)
        if self.mean_pool:
            return responses.masked_fill(padding, 0.0).sum(1)
        return responses.masked_fill(padding, -torch.inf).amax(1)


class MantaEncoder(nn.Module):
    """Bytes to blocks, then T5's encoder over the blocks, whose mask it gets and gives back."""

    def __init__(self, config: MantaConfig) -> None:
        super().__init__()
        self.max_bytes = config.max_length_inputs
        self.byte_embeddings = nn.Embedding(config.vocab_size, config.byte_embedding_dim)
        self.frontier_predictor = MantaFrontierPredictor(config)
        self.pooler = MantaPooler(config)
        self.t5_encoder = T5Stack(
            _stack_config(config, is_decoder=False, num_layers=config.num_layers)
        )
        # It reads only blocks; none is published.
        self.t5_encoder.embed_tokens = None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs
    ) -> tuple[BaseModelOutput, Tensor]:
        if input_ids.shape[1] > self.max_bytes:
            raise AnalysisError(
                f"a text has {input_ids.shape[1]} bytes, but MANTa reads {self.max_bytes} at once: "
                "cut the text"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        embedded = self.byte_embeddings(input_ids)
        blocks, own = self.pooler(embedded, self.frontier_predictor(embedded, mask), mask.bool())
        outputs = self.t5_encoder(inputs_embeds=blocks, attention_mask=own.long(), **kwargs)
        return BaseModelOutput(**outputs), own.long()


class MantaModel(T5PreTrainedModel):
    """MANTa-LM without its language-modelling head.

    T5's blocks are in ``encoder.t5_encoder`` and in ``decoder``. The encoder reads bytes (ByT5's
    ids) pooled into blocks; the decoder reads the bytes themselves, each embedded at the model's
    width, and attends to the blocks.

    Names and shapes of the weights are those of the authors' last code for transformers
    (NathanGodey/transformers, ``models/manta``), which ``almanach/manta-lm-base`` and ``-small``
    carry with the configuration that is read here. Those weights have not been tried: their file
    sizes suggest one matrix of bytes × width fewer than these names and the head's add up to, so
    the head may share the decoder's embeddings.

    Source: Godey et al. 2022, arXiv 2212.07284.
    """

    config_class = MantaConfig
    config: MantaConfig
    _keys_to_ignore_on_load_unexpected = (r"^lm_head\.", r"embeddings\.position_ids$")
    _tied_weights_keys = {"decoder.embed_tokens.weight": "decoder_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: MantaConfig) -> None:
        super().__init__(config)
        self.encoder = MantaEncoder(config)
        self.decoder_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.decoder = T5Stack(
            _stack_config(config, is_decoder=True, num_layers=config.num_decoder_layers)
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.byte_embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # T5 initialises its own modules; the others keep PyTorch's initialisation, as in the
        # published code.
        if isinstance(module, MantaConvolution):
            fan_in = module.weight.shape[2] if module.depthwise else module.weight[0].numel()
            bound = fan_in**-0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """The vectors of the decoder for ``decoder_input_ids``, and of the encoder for the blocks.

        ``decoder_input_ids`` are [text, byte].
        """
        encoded, own = self.encoder(input_ids, attention_mask, **kwargs)
        decoded = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
        }
        # T5's own, which keeps the embeddings elsewhere.
        return T5Model.forward(
            self, attention_mask=own, encoder_outputs=encoded, **decoded, **kwargs
        )


def _stack_config(config: MantaConfig, is_decoder: bool, num_layers: int) -> MantaConfig:
    """The configuration of one of T5's stacks, including the attention implementation."""
    config = copy.deepcopy(config)
    config.is_decoder = is_decoder
    config.num_layers = num_layers
    config.is_encoder_decoder = False
    config.use_cache = False
    return config
