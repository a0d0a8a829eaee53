"""Batches of P classes x M images from shards, as a pure function of (seed, step).

    (seed, step) -> P classes, M images of each -> this process's slice -> decoded, cropped, uint8

The batch of a step is the same for any number of processes and loader workers, and depends on no
earlier batch: a resumed run starts at its step. Random crops and flips are a function of (seed, step,
position in the global batch). Images stay uint8 until `normalise` on the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from dml.data.deck import Deck, mix, uniforms
from dml.data.preprocessing import NUMBERS, Input, eval_image, train_image
from shards.index import ImageReader, Index
from shards.item import ShardError

Rows = NDArray[np.int64]
Pixels = NDArray[np.uint8]  # RGB
# what a random number is used for; part of its hash
CLASSES, IMAGES, AUGMENT, HOLD_OUT = range(4)


class Batches:
    """The global batches of a run: the rows of the index, and their labels, for every step."""

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
        """The m rows and labels of a step, grouped by class."""
        classes, times = self.deck.deal(step)
        chosen = [self.images(c, int(n)) for c, n in zip(classes, times, strict=True)]
        place = np.concatenate(chosen)
        return self.rows[place], self.labels[place]

    def images(self, c: int, n: int) -> Rows:
        """The M images of class c the n-th time it is dealt. A class with fewer images repeats all of
        them, and deals the rest; every copy gets a crop of its own."""
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


def put(images: Iterable[Image.Image], out: Pixels) -> None:
    for i, image in enumerate(images):
        out[i] = np.asarray(image)


class ImageBatches(Dataset[tuple[Tensor, Tensor]], ABC):
    """Batches by number: at most `most` images, n x size x size x 3 uint8, and a number for each."""

    spec: Input
    most: int

    @abstractmethod
    def into(self, out: Pixels, n: int) -> Tensor:
        """Write the images of batch n; return a number for each, such as its label."""

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        images = np.empty((self.most, self.spec.size, self.spec.size, 3), dtype=np.uint8)
        numbers = self.into(images, n)
        return torch.from_numpy(images[: len(numbers)]), numbers


class TrainBatches(ImageBatches):
    """By step: this process's slice of the global batch, b x size x size x 3 uint8, and b labels."""

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
    """By number: this process's share of the images, each of them once, in order."""

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
    """Name the image that cannot be decoded."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ShardError(
            f"image {row} of {index.root} cannot be decoded ({error}): run shards/verify.py on "
            "the shards, and build them again"
        ) from None


def own_share(n: int, rank: int, size: int) -> range:
    """This process's part of n samples: contiguous, each sample once, no padding."""
    return range(n * rank // size, n * (rank + 1) // size)
