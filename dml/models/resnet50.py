"""ResNet-50, He et al. (2015), in torchvision's layout.

resnet50 has the stride in the 3x3 convolution: for the same weights its features equal those of torchvision
0.29.2 up to rounding (tests/test_models.py). resnet50_v1 is the network as first published, with the stride
in the 1x1 convolution before it: for the weights of Keras its features equal Keras's
(tests/test_keras_resnet50.py).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, max_pool2d, relu

from dml.data.preprocessing import Input
from dml.models.backbone import Backbone, BlockNetwork, initialise

FEATURES = 2048
BLOCKS = (3, 4, 6, 3)
# of Caffe, where the first weights come from
CAFFE = Input(mean=(103.939, 116.779, 123.68), std=(1.0, 1.0, 1.0), channels="bgr", top=255.0)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, v1: bool) -> None:
        super().__init__()
        out = 4 * width
        first, second = (stride, 1) if v1 else (1, stride)
        self.conv1 = nn.Conv2d(channels, width, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, second, padding=1, bias=False)
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


def layer(channels: int, width: int, blocks: int, stride: int, v1: bool) -> nn.Sequential:
    rest = [Bottleneck(4 * width, width, 1, v1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride, v1), *rest)


class ResNet50(BlockNetwork):
    def __init__(self, v1: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = layer(64, 64, BLOCKS[0], 1, v1)
        self.layer2 = layer(256, 128, BLOCKS[1], 2, v1)
        self.layer3 = layer(512, 256, BLOCKS[2], 2, v1)
        self.layer4 = layer(1024, 512, BLOCKS[3], 2, v1)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.bn1(self.conv1(x)), inplace=True), 3, stride=2, padding=1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for bottleneck in stage:
                x = self.block(bottleneck, x)
        return adaptive_avg_pool2d(x, 1).flatten(1)


def resnet50() -> Backbone:
    published = "resnet50-0676ba61.pth of torchvision"
    return Backbone(ResNet50(), FEATURES, Input(), ("fc.",), published)


def resnet50_v1() -> Backbone:
    published = "resnet50_v1.safetensors, which docs/weights.md says how to make"
    return Backbone(ResNet50(v1=True), FEATURES, CAFFE, ("fc.",), published)
