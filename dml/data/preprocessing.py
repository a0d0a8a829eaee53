"""From encoded bytes to the pixels a network expects: decoding, crops, flips, normalisation."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Input:
    """What a network expects of an image; every backbone describes its own."""

    size: int = 224  # side of the crop, in pixels
    resize: int = 256  # short side of a test image before its centre crop
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channels: Literal["rgb", "bgr"] = "rgb"
    top: float = 1.0  # the value of white: 1.0, or 255.0 for networks that were trained on bytes


def normalise(images: Tensor, spec: Input) -> Tensor:
    """Turn uint8 RGB images, N x size x size x 3, into what the network expects, N x 3 x size x size,
    on the images' device."""
    x = images.permute(0, 3, 1, 2).float() * (spec.top / 255)
    if spec.channels == "bgr":
        x = x.flip(1)
    mean, std = (x.new_tensor(v).view(3, 1, 1) for v in (spec.mean, spec.std))
    return (x - mean) / std


# The recipe of the paper's authors: a crop of 16% to 100% of the area.
SMALLEST_CROP = 0.16
RATIOS = (3 / 4, 4 / 3)
LOG_RATIOS = (math.log(RATIOS[0]), math.log(RATIOS[1]))
Box = tuple[float, float, float, float]


# Random numbers per image: two for each of ten boxes, two for the position, one for the flip.
NUMBERS = 23


def random_box(width: int, height: int, numbers: Iterator[float]) -> Box:
    """A crop of random area and aspect ratio; if none of ten tries fits, the largest centre crop."""
    low, high = LOG_RATIOS
    for _ in range(10):
        area = width * height * (SMALLEST_CROP + (1 - SMALLEST_CROP) * next(numbers))
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


def opened(data: bytes, size: int = 0) -> Image.Image:
    """Open an image; it is decoded when it is used.

    A small JPEG is decoded at once: Pillow would spend a quarter of the time on opening it. size: the
    side to which it will be resized; 0 if the whole image is wanted.
    """
    w, h = plain_jpeg_size(data) or (0, 0)
    if 0 < min(w, h) < 2 * size and max(w, h) < 4 * size:
        try:
            return Image.frombytes("RGB", (w, h), data, "jpeg", "RGB", "")
        except ValueError:
            pass  # damaged: Pillow's own reader says how
    return Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))


FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of an 8-bit JPEG with three colours; None for anything else."""
    at = 2
    while data[:2] == b"\xff\xd8" and data[at : at + 1] == b"\xff" and at + 10 <= len(data):
        if data[at + 1] in FRAMES:
            bits, h, w, colours = struct.unpack_from(">BHHB", data, at + 4)
            return (w, h) if (bits, colours) == (8, 3) else None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def resized(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Resize a box of an image to size x size. A large JPEG is decoded at the smallest scale that has
    enough pixels, which saves most of the time."""
    scale = min(box[2] - box[0], box[3] - box[1]) / size
    if image.format == "JPEG" and scale >= 2:
        w, h = image.size
        image.draft("RGB", (int(w / scale), int(h / scale)))
        x, y = image.size[0] / w, image.size[1] / h
        box = box[0] * x, box[1] * y, box[2] * x, box[3] * y
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


def train_image(data: bytes, spec: Input, numbers: Iterator[float]) -> Image.Image:
    """A random resized crop, flipped with probability 1/2."""
    image = opened(data, spec.size)
    cropped = resized(image, random_box(*image.size, numbers), spec.size)
    return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if next(numbers) < 0.5 else cropped


def eval_image(data: bytes, spec: Input) -> Image.Image:
    """The centre crop of `size`, after resizing the short side to `resize`."""
    image = opened(data, spec.size)
    w, h = image.size
    side = min(w, h) * spec.size / spec.resize
    x, y = (w - side) / 2, (h - side) / 2
    return resized(image, (x, y, x + side, y + side), spec.size)
