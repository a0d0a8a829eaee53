"""From a photo to the pixels a network expects: crops, flips, normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from shards.photo import Box, open_photo


@dataclass(frozen=True)
class Input:
    """What a network expects of an image; every backbone describes its own."""

    size: int = 224  # side of the crop, in pixels
    resize: int = 256  # short side of a test image before its centre crop
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channels: Literal["rgb", "bgr"] = "rgb"
    top: float = 1.0  # the value of white: 1.0, or 255.0 for networks that were trained on bytes
    smallest_crop: float = 0.16  # of the area, in training: the recipe of the paper's authors
    dtype, tensor_dtype = np.uint8, torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image as the loader delivers it."""
        return (self.size, self.size, 3)

    @property
    def bytes(self) -> int:
        return 3 * self.size**2


class Normalise(nn.Module):
    """Turns uint8 RGB images, N x size x size x 3, into what the network expects, N x 3 x size x size
    in float32, with the channels last in memory."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: Input) -> None:
        super().__init__()
        self.spec = spec
        # Buffers move to the GPU with the model, once; a run's weights do not include them.
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(spec, name)), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(x top / 255 - mean) / std, channel by channel.

        Whole rows of pixels at a time, and in place: with loops over three channels inside, and a new
        tensor for every operation, it takes five times as long (docs/log.md).
        """
        n, h, w, channels = images.shape
        if self.spec.channels == "bgr":
            images = images.flip(3)
        x = images.reshape(n, h, w * channels).float()
        x.mul_(self.spec.top / 255)
        x.sub_(self.mean.float().repeat(w)).div_(self.std.float().repeat(w))
        return x.view(n, h, w, channels).permute(0, 3, 1, 2)


RATIOS = (3 / 4, 4 / 3)
LOG_RATIOS = (math.log(RATIOS[0]), math.log(RATIOS[1]))


# Random numbers per image: two for each of ten boxes, two for the position, one for the flip.
NUMBERS = 23


def random_box(
    width: int, height: int, numbers: Iterator[float], smallest: float = Input.smallest_crop
) -> Box:
    """A crop of random area and aspect ratio; if none of ten tries fits, the largest centre crop.
    smallest: share of the area."""
    low, high = LOG_RATIOS
    for _ in range(10):
        area = width * height * (smallest + (1 - smallest) * next(numbers))
        ratio = math.exp(low + (high - low) * next(numbers))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            x, y = int(next(numbers) * (width - w + 1)), int(next(numbers) * (height - h + 1))
            return x, y, x + w, y + h
    return centre_box(width, height)


def centre_box(width: int, height: int) -> Box:
    """The largest centred box whose aspect ratio lies within RATIOS."""
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    w, h = (height * ratio, height) if width > height * ratio else (width, width / ratio)
    x, y = (width - w) / 2, (height - h) / 2
    return x, y, x + w, y + h


def train_image(data: bytes, spec: Input, numbers: Iterator[float]) -> Image.Image:
    """A random resized crop, flipped with probability 1/2."""
    photo = open_photo(data, spec.size)
    box = random_box(*photo.size, numbers, spec.smallest_crop)
    cropped = photo.resized(box, spec.size)
    return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if next(numbers) < 0.5 else cropped


def eval_image(data: bytes, spec: Input) -> Image.Image:
    """The centre crop of `size`, after resizing the short side to `resize`."""
    photo = open_photo(data, spec.size)
    w, h = photo.size
    side = min(w, h) * spec.size / spec.resize
    x, y = (w - side) / 2, (h - side) / 2
    return photo.resized((x, y, x + side, y + side), spec.size)
