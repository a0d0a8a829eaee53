"""ResNet-50 in torchvision's layout: He et al. (2015), with the stride in the 3x3 convolution.

For the same weights its features equal those of torchvision 0.29.2 up to rounding
(tests/test_models.py).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, max_pool2d, relu

from dml.data.preprocessing import Input
from dml.models.backbone import Backbone, initialise

FEATURES = 2048


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential()
        if channels != out:
            projection = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)), inplace=True)
        y = relu(self.bn2(self.conv2(y)), inplace=True)
        return relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


def layer(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = layer(64, 64, blocks=3, stride=1)
        self.layer2 = layer(256, 128, blocks=4, stride=2)
        self.layer3 = layer(512, 256, blocks=6, stride=2)
        self.layer4 = layer(1024, 512, blocks=3, stride=2)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.bn1(self.conv1(x)), inplace=True), 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return adaptive_avg_pool2d(x, 1).flatten(1)


def resnet50() -> Backbone:
    published = "resnet50-0676ba61.pth of torchvision"
    return Backbone(ResNet50(), FEATURES, Input(), ("fc.",), published)
