"""Batches of P classes x M images from shards, as a pure function of (seed, step).

    (seed, step) -> P classes, M images of each -> this process's slice -> decoded, cropped, uint8

The batch of a step is the same for any number of processes and loader workers and needs no history:
to resume is to start at another step. Random crops and flips are a function of (seed, step, position
in the global batch). Images stay uint8 until `normalise` on the device.
"""

from __future__ import annotations

import io
import math
import signal
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dml.deck import Deck, mix, uniforms
from shards.index import ImageReader, Index
from shards.item import ShardError

Rows = NDArray[np.int64]
Pixels = NDArray[np.uint8]  # RGB
# what a random number is for; part of its hash
CLASSES, IMAGES, AUGMENT, HOLD_OUT = range(4)


@dataclass(frozen=True)
class Input:
    """What a network expects of an image. Each backbone describes its own."""

    size: int = 224  # the crop it sees
    resize: int = 256  # the short side before the centre crop of a test image
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channels: Literal["rgb", "bgr"] = "rgb"
    top: float = 1.0  # white: 1.0, or 255.0 for networks that were trained on bytes


def normalise(images: Tensor, spec: Input) -> Tensor:
    """uint8 RGB batches, N x size x size x 3, as the network expects them, N x 3 x size x size; on
    the images' device."""
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


# Random numbers of an image: two for each of ten boxes, two for its place, one for the flip.
NUMBERS = 23


def random_box(width: int, height: int, numbers: Iterator[float]) -> Box:
    """A crop of random area and aspect ratio; the largest that fits if none of ten does."""
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
    """The largest box in the middle whose aspect ratio RATIOS allow."""
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    w, h = (height * ratio, height) if width > height * ratio else (width, width / ratio)
    x, y = (width - w) / 2, (height - h) / 2
    return x, y, x + w, y + h


def opened(data: bytes, size: int = 0) -> Image.Image:
    """An image that decodes itself when it is used. But a JPEG that is small beside the size it is
    wanted in goes to the decoder at once: with such a one Pillow spends a quarter of the time on
    opening it."""
    w, h = plain_jpeg_size(data) or (0, 0)
    if 0 < min(w, h) < 2 * size and max(w, h) < 4 * size:
        try:
            return Image.frombytes("RGB", (w, h), data, "jpeg", "RGB", "")
        except ValueError:
            pass  # damaged: Pillow says how
    return Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))


FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG of three colours with 8 bits; None for anything else."""
    at = 2
    while data[:2] == b"\xff\xd8" and data[at : at + 1] == b"\xff" and at + 10 <= len(data):
        if data[at + 1] in FRAMES:
            bits, h, w, colours = struct.unpack_from(">BHHB", data, at + 4)
            return (w, h) if (bits, colours) == (8, 3) else None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def resized(image: Image.Image, box: Box, size: int) -> Image.Image:
    """The box of an image at size x size. A large JPEG is decoded at the smallest scale that has
    enough pixels, which is most of the speed."""
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
    """A random resized crop, flipped half of the time."""
    image = opened(data, spec.size)
    cropped = resized(image, random_box(*image.size, numbers), spec.size)
    return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if next(numbers) < 0.5 else cropped


def eval_image(data: bytes, spec: Input) -> Image.Image:
    """The centre crop of `size` after the short side became `resize`."""
    image = opened(data, spec.size)
    w, h = image.size
    side = min(w, h) * spec.size / spec.resize
    x, y = (w - side) / 2, (h - side) / 2
    return resized(image, (x, y, x + side, y + side), spec.size)


def put(images: Iterable[Image.Image], out: Pixels) -> None:
    for i, image in enumerate(images):
        out[i] = np.asarray(image)


class Batches:
    """The global batches of a run: which rows of the index, and their labels, for every step."""

    def __init__(self, rows: Rows, labels: Rows, classes: int, per_class: int, seed: int) -> None:
        order = np.argsort(labels, kind="stable")
        self.rows, self.labels = rows[order], labels[order]
        self.names, self.start, self.size = np.unique(
            self.labels, return_index=True, return_counts=True
        )
        if classes > len(self.names):
            raise ValueError(
                f"batch.classes is {classes} but there are only {len(self.names)} classes to train "
                f"on; set batch.classes to at most {len(self.names)}"
            )
        self.deck = Deck(len(self.names), classes, mix(seed, CLASSES))
        self.per_class, self.seed, self.m = per_class, seed, classes * per_class

    def __call__(self, step: int) -> tuple[Rows, Rows]:
        """The m rows and labels of a step, class by class."""
        classes, times = self.deck.deal(step)
        chosen = [self.images(c, int(n)) for c, n in zip(classes, times, strict=True)]
        place = np.concatenate(chosen)
        return self.rows[place], self.labels[place]

    def images(self, c: int, n: int) -> Rows:
        """The M images of class c in its n-th turn. A class with fewer of them gives all it has, as
        often as it takes, and deals the rest; each copy is cropped on its own."""
        size = int(self.size[c])
        times, rest = divmod(self.per_class, size)
        chosen = [np.arange(size)] * times
        if rest:
            deck = Deck(size, rest, mix(self.seed, IMAGES, int(self.names[c])))
            chosen.append(deck.deal(n)[0])
        return np.asarray(self.start[c] + np.concatenate(chosen), dtype=np.int64)


def held_out(labels: Rows, share: float, seed: int) -> NDArray[np.bool_]:
    """Which samples belong to the classes held out for validation: a share of the classes."""
    names = np.unique(labels)
    chosen = Deck(len(names), len(names), mix(seed, HOLD_OUT)).deal(0)[0]
    return np.isin(labels, names[chosen[: round(share * len(names))]])


class ImageBatches(Dataset[tuple[Tensor, Tensor]], ABC):
    """Batches by number: at most `most` images, n x size x size x 3 uint8, and something of each."""

    spec: Input
    most: int

    @abstractmethod
    def into(self, out: Pixels, n: int) -> Tensor:
        """Writes the images of batch n; returns what is said of each."""

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        images = np.empty((self.most, self.spec.size, self.spec.size, 3), dtype=np.uint8)
        others = self.into(images, n)
        return torch.from_numpy(images[: len(others)]), others


class TrainBatches(ImageBatches):
    """By step: this process's slice of the global batch, b x size x size x 3 uint8, and b labels.

    What is random about an image is a function of (seed, step, position in the global batch).
    """

    def __init__(
        self, index: Index, batches: Batches, spec: Input, rank: int = 0, size: int = 1
    ) -> None:
        self.reader, self.batches, self.spec = ImageReader(index), batches, spec
        self.rank, self.size = rank, size
        self.most = len(own_share(batches.m, rank, size))

    def into(self, out: Pixels, step: int) -> Tensor:
        rows, labels = self.batches(step)
        own = own_share(len(rows), self.rank, self.size)
        numbers = uniforms(len(rows) * NUMBERS, mix(self.batches.seed, AUGMENT, step))
        images = (
            self.image(row, iter(numbers[i * NUMBERS : (i + 1) * NUMBERS]))
            for i, row in zip(own, rows[own].tolist(), strict=True)
        )
        put(images, out)
        return torch.from_numpy(labels[own])

    def image(self, row: int, numbers: Iterator[float]) -> Image.Image:
        data = self.reader.read(row)
        with naming(row, self.reader.index):
            return train_image(data, self.spec, numbers)


class EvalBatches(ImageBatches):
    """By number: batches of this process's share of the images, every one once, in order."""

    def __init__(
        self,
        index: Index,
        rows: Rows,
        labels: Rows,
        spec: Input,
        batch: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        own = own_share(len(rows), rank, size)
        self.reader, self.rows, self.labels = ImageReader(index), rows[own], labels[own]
        self.spec, self.most = spec, batch

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.most)

    def into(self, out: Pixels, n: int) -> Tensor:
        part = slice(n * self.most, (n + 1) * self.most)
        rows = self.rows[part]
        put((self.image(row) for row in rows.tolist()), out)
        return torch.from_numpy(self.labels[part])

    def image(self, row: int) -> Image.Image:
        data = self.reader.read(row)
        with naming(row, self.reader.index):
            return eval_image(data, self.spec)


@contextmanager
def naming(row: int, index: Index) -> Iterator[None]:
    """Says which image it was that could not be decoded."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ShardError(
            f"image {row} of {index.root} cannot be decoded ({error}): see what shards/verify.py "
            "says, and build the shards again"
        ) from None


def own_share(n: int, rank: int, size: int) -> range:
    """This process's part of n samples, in order: every one once, no padding."""
    return range(n * rank // size, n * (rank + 1) // size)


def loader(
    batches: ImageBatches,
    order: Sequence[int],
    workers: int = 0,
    prefetch: int = 2,
    context: str | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches in order, made by worker processes, each with `prefetch` of them ready.

    Every process has its own share already. context: how workers start, such as "spawn".
    """
    if workers == 0:
        for n in order:
            images, others = batches[n]
            yield images.pin_memory() if torch.cuda.is_available() else images, others
        return
    # One more than there are batches on the way: when the loader hands out a batch, it has asked for
    # the next already.
    slots = Slots(batches, workers * prefetch + 1)
    ready = DataLoader(
        slots,
        sampler=((place % len(slots.memory), n) for place, n in enumerate(order)),
        batch_size=None,  # a sample is a whole batch
        num_workers=workers,
        prefetch_factor=prefetch,
        generator=torch.Generator(),  # or every iteration would take a number from torch's own
        worker_init_fn=ignore_signals,
        collate_fn=as_it_is,
        multiprocessing_context=context,
    )
    yield from (slots.take(*batch) for batch in ready)


class Slots(Dataset[tuple[int, NDArray[Any]]]):
    """Memory that the processes share and use again: to make it anew for every batch would cost a
    worker 5% of its time."""

    def __init__(self, batches: ImageBatches, count: int) -> None:
        size = batches.spec.size
        self.batches = batches
        self.memory = torch.empty(count, batches.most, size, size, 3, dtype=torch.uint8)
        self.memory.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, NDArray[Any]]:
        """Puts batch n into a slot."""
        slot, n = where
        return slot, self.batches.into(self.memory[slot].numpy(), n).numpy()

    def take(self, slot: int, others: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """A copy of what is in a slot, which is then free."""
        images = self.memory[slot, : len(others)]
        images = images.pin_memory() if torch.cuda.is_available() else images.clone()
        return images, torch.from_numpy(others)


def as_it_is(batch: Any) -> Any:
    return batch


def ignore_signals(worker: int) -> None:
    """A scheduler signals all processes of a job. The training process decides what to do about it,
    and ends its workers itself."""
    for s in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(s, signal.SIG_IGN)


def attempts(
    batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[tuple[Tensor, Tensor], ShardError | None]]:
    """Every batch, and None; or in the end nothing, and why: one process among many must not end
    alone."""
    try:
        for batch in batches:
            yield batch, None
    except ShardError as error:
        # a loader's worker wraps the sentence in its traceback
        sentence = str(error).rpartition("ShardError: ")[2].strip()
        yield (torch.empty(0), torch.empty(0)), ShardError(sentence)
