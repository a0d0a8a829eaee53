"""BN-Inception, the paper's backbone, in the layout of bn_inception-52deb4733.pth.

Ioffe & Szegedy, "Batch Normalization" (2015), as trained by Y. Xiong and published with R. Cadene's
pretrained-models. It ends in global max pooling, as the code of the paper's authors. For the same
weights its features equal those of pretrainedmodels 0.7.4 up to rounding (tests/test_models.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

from dml.data.preprocessing import Input
from dml.models.backbone import Backbone, BlockNetwork, initialise

SPEC = Input(mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0), channels="bgr", top=255.0)
FEATURES = 1024


class Block(NamedTuple):
    """Channels of the four branches. A block without a 1x1 branch and a projection halves the map."""

    name: str
    single: int
    triple: tuple[int, int]  # 1x1 reduce, 3x3
    double: tuple[int, int]  # 1x1 reduce, 3x3 twice
    projection: int


BLOCKS = [
    Block("inception_3a", 64, (64, 64), (64, 96), 32),
    Block("inception_3b", 64, (64, 96), (64, 96), 64),
    Block("inception_3c", 0, (128, 160), (64, 96), 0),
    Block("inception_4a", 224, (64, 96), (96, 128), 128),
    Block("inception_4b", 192, (96, 128), (96, 128), 128),
    Block("inception_4c", 160, (128, 160), (128, 160), 128),
    Block("inception_4d", 96, (128, 192), (160, 192), 128),
    Block("inception_4e", 0, (128, 192), (192, 256), 0),
    Block("inception_5a", 352, (192, 320), (160, 224), 128),
    Block("inception_5b", 352, (192, 320), (192, 224), 128),
]


def halved(x: Tensor) -> Tensor:
    return max_pool2d(x, 3, stride=2, ceil_mode=True)


class BNInception(BlockNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.add("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self.add("conv2_3x3_reduce", 64, 64)
        self.add("conv2_3x3", 64, 192, kernel=3)
        channels = 192
        for name, single, triple, double, projection in BLOCKS:
            stride = 1 if single else 2
            if single:
                self.add(f"{name}_1x1", channels, single)
            self.add(f"{name}_3x3_reduce", channels, triple[0])
            self.add(f"{name}_3x3", *triple, kernel=3, stride=stride)
            self.add(f"{name}_double_3x3_reduce", channels, double[0])
            self.add(f"{name}_double_3x3_1", *double, kernel=3)
            self.add(f"{name}_double_3x3_2", double[1], double[1], kernel=3, stride=stride)
            if projection:
                self.add(f"{name}_pool_proj", channels, projection)
            channels = single + triple[1] + double[1] + (projection or channels)
        initialise(self)

    def add(self, name: str, channels: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(out))

    def conv(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x))
            x = relu(x, inplace=True)
        return x

    def inception(self, x: Tensor, block: Block) -> Tensor:
        name = block.name
        branches = [
            self.conv(x, f"{name}_3x3_reduce", f"{name}_3x3"),
            self.conv(
                x, f"{name}_double_3x3_reduce", f"{name}_double_3x3_1", f"{name}_double_3x3_2"
            ),
        ]
        if not block.single:
            return torch.cat([*branches, halved(x)], 1)
        # the last block uses max pooling, the others average pooling
        pool = max_pool2d if block is BLOCKS[-1] else avg_pool2d
        projection = self.conv(pool(x, 3, stride=1, padding=1), f"{name}_pool_proj")
        return torch.cat([self.conv(x, f"{name}_1x1"), *branches, projection], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = halved(self.conv(x, "conv1_7x7_s2"))
        x = halved(self.conv(x, "conv2_3x3_reduce", "conv2_3x3"))
        for block in BLOCKS:
            x = self.block(self.inception, x, block)
        return x.amax((2, 3))


def bn_inception() -> Backbone:
    published = "bn_inception-52deb4733.pth of Cadene's pretrained-models"
    return Backbone(BNInception(), FEATURES, SPEC, ("last_linear.", "fc."), published)
