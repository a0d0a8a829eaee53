"""A small network for studies on a CPU, at 32 pixels."""

from itertools import pairwise

from torch import Tensor, nn

from dml.data.preprocessing import Input
from dml.models.backbone import Backbone, BlockNetwork, initialise

SPEC = Input(size=32, resize=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
WIDTHS = (32, 64, 128, 256)
LAYERS = 4  # of a stage; the last one has no pooling


class ConvNet(BlockNetwork):
    """Four stages of 3x3 convolution, GroupNorm and ReLU, with max pooling between them and global max
    pooling at the end.

    GroupNorm treats each image alone, so the numbers of micro-batches and processes change nothing. It
    comes after the pooling, where only a quarter of the map is left to normalise: 1300 instead of 970
    images per second (measured on one thread, forward and backward, 100 images).
    """

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for channels, width in pairwise((3, *WIDTHS)):
            stages.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
            if width < WIDTHS[-1]:
                stages.append(nn.MaxPool2d(2))
            stages += [nn.GroupNorm(8, width), nn.ReLU(inplace=True)]
        self.stages = nn.Sequential(*stages)
        initialise(self)

    def stage(self, x: Tensor, first: int) -> Tensor:
        for i in range(first, min(first + LAYERS, len(self.stages))):
            x = self.stages[i](x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.stages), LAYERS):
            x = self.block(self.stage, x, first)
        return x.amax((2, 3))


def convnet() -> Backbone:
    return Backbone(ConvNet(), WIDTHS[-1], SPEC)
