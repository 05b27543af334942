"""Visual Attention Network: feature maps multiplied by large-kernel convolutions of themselves."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention


class VanConfig(PreTrainedConfig):
    """Sizes of a VAN, one per stage.

    The defaults are those of ``Visual-Attention-Network/van-base``.
    """

    model_type = "van"

    image_size: int = 224
    num_channels: int = 3
    patch_sizes: list[int] | tuple[int, ...] = (7, 3, 3, 3)
    strides: list[int] | tuple[int, ...] = (4, 2, 2, 2)
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 320, 512)
    depths: list[int] | tuple[int, ...] = (3, 3, 12, 3)
    mlp_ratios: list[int] | tuple[int, ...] = (8, 8, 4, 4)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    layer_scale_init_value: float = 1e-2


def _sequence(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _depthwise(width: int, kernel: int, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        width, width, kernel, padding=kernel // 2 * dilation, dilation=dilation, groups=width
    )


class VanLargeKernelAttention(nn.Module):
    """x ∘ W(D₇(D₅(x))), where D₅ is a 5×5, D₇ a 7×7 (dilation 3) and W a 1×1 convolution.

    D₅ and D₇ are depthwise.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = _sequence(
            depth_wise=_depthwise(width, 5),
            depth_wise_dilated=_depthwise(width, 7, dilation=3),
            point_wise=nn.Conv2d(width, width, 1),
        )

    def forward(self, maps: Tensor) -> Tensor:
        return maps * self.attention(maps)


class VanLayerScaling(nn.Module):
    """Multiplies each channel by a learnt factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, maps: Tensor) -> Tensor:
        return self.weight[:, None, None] * maps


class VanLayer(nn.Module):
    """A block: attention, then a perceptron with a 3×3 convolution.

    The output of each is scaled and added to its input.
    """

    def __init__(self, config: VanConfig, width: int, ratio: int) -> None:
        super().__init__()
        # Misspelt in the published weights.
        self.pre_normomalization = nn.BatchNorm2d(width)
        self.attention = _sequence(
            pre_projection=_sequence(
                conv=nn.Conv2d(width, width, 1), act=ACT2FN[config.hidden_act]
            ),
            attention_layer=VanLargeKernelAttention(width),
            post_projection=nn.Conv2d(width, width, 1),
        )
        self.attention_scaling = VanLayerScaling(width)
        self.post_normalization = nn.BatchNorm2d(width)
        self.mlp = _sequence(
            in_dense=nn.Conv2d(width, width * ratio, 1),
            depth_wise=_depthwise(width * ratio, 3),
            activation=ACT2FN[config.hidden_act],
            out_dense=nn.Conv2d(width * ratio, width, 1),
        )
        self.mlp_scaling = VanLayerScaling(width)

    def forward(self, maps: Tensor) -> Tensor:
        normed = self.pre_normomalization(maps)
        # Attention has a residual connection of its own.
        maps = maps + self.attention_scaling(normed + self.attention(normed))
        return maps + self.mlp_scaling(self.mlp(self.post_normalization(maps)))


class VanStage(nn.Module):
    """Overlapping patches, blocks at one resolution, and a layer norm over the channels."""

    def __init__(self, config: VanConfig, stage: int) -> None:
        super().__init__()
        width = config.hidden_sizes[stage]
        patch = config.patch_sizes[stage]
        channels = config.hidden_sizes[stage - 1] if stage else config.num_channels
        self.embeddings = _sequence(
            convolution=nn.Conv2d(
                channels, width, patch, stride=config.strides[stage], padding=patch // 2
            ),
            normalization=nn.BatchNorm2d(width),
        )
        self.layers = nn.Sequential()
        for _ in range(config.depths[stage]):
            self.layers.append(VanLayer(config, width, config.mlp_ratios[stage]))
        self.normalization = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.layers(self.embeddings(maps))
        return self.normalization(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class VanModel(PreTrainedModel):
    """A VAN without its classifier; block M of stage N is ``encoder.stages.N.layers.M``.

    Names and shapes of the weights are those on the hub, as transformers 4.16 to 4.30 saved them
    (``Visual-Attention-Network/van-tiny``, ``-small``, ``-base``, ``-large``), with or without
    their prefix ``van.``. Dropout and stochastic depth, whose rates are 0 there, are left out.

    Source: Guo et al. 2022, arXiv 2202.09741.
    """

    config_class = VanConfig
    config: VanConfig
    base_model_prefix = "van"
    main_input_name = "pixel_values"
    _keys_to_ignore_on_load_unexpected = (r"^classifier\.",)

    def __init__(self, config: VanConfig) -> None:
        super().__init__(config)
        stages = [VanStage(config, i) for i in range(len(config.depths))]
        self.encoder = _sequence(stages=nn.Sequential(*stages))
        # Among the published weights, although nothing passes through it.
        self.layernorm = nn.LayerNorm(config.hidden_sizes[-1], eps=config.layer_norm_eps)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):
            fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
            init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, VanLayerScaling):
            init.constant_(module.weight, self.config.layer_scale_init_value)

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPoolingAndNoAttention:
        """Maps of the last stage, [image, channel, height, width], and their spatial means."""
        maps = self.encoder(pixel_values)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=maps, pooler_output=maps.mean((-2, -1))
        )
