"""EfficientNet-Lite: EfficientNet's inverted residuals with ReLU6, no squeeze-and-excitation."""

import math

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)


class EfficientNetLiteConfig(PreTrainedConfig):
    """Sizes of an EfficientNet-Lite, one value per stage; the defaults are those of Lite0."""

    model_type = "efficientnet_lite"

    image_size: int = 224
    num_channels: int = 3
    stem_width: int = 32
    head_width: int = 1280
    repeats: list[int] | tuple[int, ...] = (1, 2, 2, 3, 3, 4, 1)
    widths: list[int] | tuple[int, ...] = (16, 24, 40, 80, 112, 192, 320)
    kernels: list[int] | tuple[int, ...] = (3, 3, 5, 3, 5, 5, 3)
    strides: list[int] | tuple[int, ...] = (1, 2, 2, 2, 1, 2, 1)
    expansions: list[int] | tuple[int, ...] = (1, 6, 6, 6, 6, 6, 6)
    batch_norm_eps: float = 1e-3


class SameConv2d(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow does.

    It gives ceil(size / stride) positions; if the padding is odd, the additional zero is at the
    end.
    """

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(channels, width, kernel, stride, groups=groups, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        pads: list[int] = []
        for size in reversed(maps.shape[-2:]):
            needed = (
                (math.ceil(size / self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - size
            )
            pads += [max(needed, 0) // 2, max(needed, 0) - max(needed, 0) // 2]
        return super().forward(functional.pad(maps, pads))


class EfficientNetLiteBlock(nn.Module):
    """Expand, convolve each channel, project; with a residual connection if the shape is kept."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int, expansion: int, eps: float
    ) -> None:
        super().__init__()
        inner = channels * expansion
        if expansion > 1:
            self._expand_conv = SameConv2d(channels, inner, 1)
            self._bn0 = nn.BatchNorm2d(inner, eps=eps)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = nn.BatchNorm2d(inner, eps=eps)
        self._project_conv = SameConv2d(inner, width, 1)
        self._bn2 = nn.BatchNorm2d(width, eps=eps)
        self.expands = expansion > 1
        self.residual = stride == 1 and channels == width

    def forward(self, maps: Tensor) -> Tensor:
        inner = functional.relu6(self._bn0(self._expand_conv(maps))) if self.expands else maps
        inner = functional.relu6(self._bn1(self._depthwise_conv(inner)))
        projected = self._bn2(self._project_conv(inner))
        return maps + projected if self.residual else projected


class EfficientNetLitePreTrainedModel(PreTrainedModel):
    config_class = EfficientNetLiteConfig
    config: EfficientNetLiteConfig
    base_model_prefix = "backbone"
    main_input_name = "pixel_values"


class EfficientNetLiteModel(EfficientNetLitePreTrainedModel):
    """EfficientNet-Lite without its classifier; its blocks are ``_blocks.N``, through all stages.

    Names and shapes of its weights are those of the published state dictionaries
    (``efficientnet-lite0-57934424.pth``).

    Source: Tan and Le 2019, arXiv 1905.11946; https://github.com/tensorflow/tpu,
    models/official/efficientnet/lite.
    """

    _keys_to_ignore_on_load_unexpected = (r"^_fc\.",)

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        eps = config.batch_norm_eps
        self._conv_stem = SameConv2d(config.num_channels, config.stem_width, 3, 2)
        self._bn0 = nn.BatchNorm2d(config.stem_width, eps=eps)
        blocks = []
        channels = config.stem_width
        stages = (config.repeats, config.widths, config.kernels, config.strides, config.expansions)
        for repeats, width, kernel, stride, expansion in zip(*stages, strict=True):
            for _ in range(repeats):
                blocks.append(
                    EfficientNetLiteBlock(channels, width, kernel, stride, expansion, eps)
                )
                channels = width
                # Only the first block of a stage makes the map smaller.
                stride = 1
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv2d(channels, config.head_width, 1)
        self._bn1 = nn.BatchNorm2d(config.head_width, eps=eps)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPoolingAndNoAttention:
        """Feature maps, image x channel x height x width, and their means over positions."""
        maps = functional.relu6(self._bn0(self._conv_stem(pixel_values)))
        for block in self._blocks:
            maps = block(maps)
        maps = functional.relu6(self._bn1(self._conv_head(maps)))
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=maps, pooler_output=maps.mean((-2, -1))
        )


class EfficientNetLiteForImageClassification(EfficientNetLitePreTrainedModel):
    """The classifier of ImageNet's classes on the mean of the last maps."""

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        self.backbone = EfficientNetLiteModel(config)
        self._fc = nn.Linear(config.head_width, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutputWithNoAttention:
        return ImageClassifierOutputWithNoAttention(
            logits=self._fc(self.backbone(pixel_values).pooler_output)
        )
