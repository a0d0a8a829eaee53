"""Batches of P classes x M images from shards, as a pure function of (seed, step).

    (seed, step) -> P classes, M images of each -> this process's slice -> decoded, cropped, uint8

The batch of a step is the same for any number of processes and loader workers, and depends on no
earlier batch: a resumed run starts at its step. Random crops and flips are a function of (seed, step,
position in the global batch). So any part of a batch can be made on its own, and the labels of the
global batch are known on every process. Images stay uint8 until `Normalise` on the device.
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

from dml.data.deck import Deck, mix, uniforms
from dml.data.preprocessing import NUMBERS, Input, eval_image, train_image
from dml.distributed.workers import ranks_of_machine
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

    def __call__(self, step: int, positions: range | None = None) -> tuple[Rows, Rows]:
        """The rows and labels of a step, grouped by class: all m, or those at some positions."""
        positions = range(self.m) if positions is None else positions
        first = positions.start // self.per_class  # classes before it need not be dealt
        dealt = slice(first, -(-positions.stop // self.per_class))
        classes, times = self.deck.deal(step)
        chosen = [self.images(c, int(n)) for c, n in zip(classes[dealt], times[dealt], strict=True)]
        place = np.concatenate(chosen)[positions.start - first * self.per_class :][: len(positions)]
        return self.rows[place], self.labels[place]

    def all_labels(self, step: int) -> Rows:
        """The m labels of a step, without its rows."""
        return np.repeat(self.names[self.deck.deal(step)[0]], self.per_class)

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


class ImageBatches(ABC):
    """Batches by number: images, n x size x size x 3 uint8, and a number for each.

    A batch is made in parts of any length, by one process or by several.
    """

    spec: Input
    most: int  # images in the largest batch

    @abstractmethod
    def count(self, n: int) -> int:
        """The number of images in batch n."""

    @abstractmethod
    def into(self, out: Pixels, n: int, part: range) -> Tensor:
        """Write the images at these positions of batch n; return a number for each, such as its
        label."""

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        images = np.empty((self.count(n), self.spec.size, self.spec.size, 3), dtype=np.uint8)
        numbers = self.into(images, n, range(len(images)))
        return torch.from_numpy(images), numbers


class TrainBatches(ImageBatches):
    """By step: this process's slice of the global batch, b x size x size x 3 uint8, and b labels."""

    def __init__(
        self, index: Index, batches: Batches, spec: Input, rank: int = 0, size: int = 1
    ) -> None:
        self.reader, self.batches, self.spec = ImageReader(index), batches, spec
        self.rank, self.size = rank, size
        self.own = own_share(batches.m, rank, size)
        self.most = len(self.own)

    @property
    def all_rows(self) -> Rows:
        """All that any batch may hold."""
        return self.batches.rows

    def rows_on_machine(self, step: int) -> Rows:
        """The images of a step for all processes of this machine."""
        ranks = ranks_of_machine(self.rank, self.size)
        first, last = (own_share(self.batches.m, ranks[i], self.size) for i in (0, -1))
        return self.batches(step, range(first.start, last.stop))[0]

    def count(self, step: int) -> int:
        return self.most

    def into(self, out: Pixels, step: int, part: range) -> Tensor:
        positions = self.own[part.start : part.stop]
        rows, labels = self.batches(step, positions)
        key, first = mix(self.batches.seed, AUGMENT, step), positions.start * NUMBERS
        numbers = uniforms(len(rows) * NUMBERS, key, first)
        self.reader.expect(rows.tolist())
        images = (
            self.image(row, iter(numbers[i * NUMBERS : (i + 1) * NUMBERS]))
            for i, row in enumerate(rows.tolist())
        )
        put(images, out)
        return torch.from_numpy(labels)

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
        self.spec, self.most, self.rank, self.size = spec, batch, rank, size
        shares = (own_share(len(rows), each, size) for each in ranks_of_machine(rank, size))
        self.machine = [rows[share.start : share.stop] for share in shares]

    @property
    def all_rows(self) -> Rows:
        """All that any batch may hold."""
        return np.concatenate(self.machine)

    def rows_on_machine(self, n: int) -> Rows:
        """The images of the n-th batches of all processes of this machine."""
        return np.concatenate([rows[n * self.most : (n + 1) * self.most] for rows in self.machine])

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.most)

    def count(self, n: int) -> int:
        return len(self.rows[n * self.most :][: self.most])

    def into(self, out: Pixels, n: int, part: range) -> Tensor:
        rows, labels = (
            x[n * self.most :][part.start : part.stop] for x in (self.rows, self.labels)
        )
        self.reader.expect(rows.tolist())
        put((self.image(row) for row in rows.tolist()), out)
        return torch.from_numpy(labels)

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
