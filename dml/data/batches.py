"""Batches of P classes x M images from shards, as a pure function of (seed, step).

    (seed, step) -> P classes, M images of each -> this process's slice -> decoded, cropped, uint8

The batch of a step is the same for any number of processes and loader workers, and depends on no
earlier batch: a resumed run starts at its step. Random crops and flips are a function of (seed, step,
position in the global batch, tower). So any part of a batch can be made on its own, and the labels of the
global batch are known on every process. Images stay uint8 until `Normalise` on the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dml.data.deck import Deck, GroupedDeck, mix, mix_each, uniforms
from dml.data.pair import Spec
from dml.data.preprocessing import NUMBERS, Input, eval_image, train_image
from dml.data.reading import JointReader
from dml.data.vectors import Features, VectorReader
from dml.distributed.workers import ranks_of_machine
from shards.cache import File
from shards.index import Index

Rows = NDArray[np.int64]
Pixels = NDArray[np.uint8]  # RGB
MOST_KEPT = 2**24  # numbers
# what a random number is used for; part of its hash
CLASSES, IMAGES, AUGMENT, HOLD_OUT, GROUPS, GROUP_IMAGES, DATASET, AUGMENT_Y = range(8)


@dataclass(frozen=True)
class Grouping:
    """Batches within a group of classes. groups: the group of every image. mixed: the share of the
    batches that are dealt from all classes."""

    groups: Rows
    mixed: float = 0.0


class Batches:
    """The global batches of a run: the rows of the index, and their labels, for every step."""

    def __init__(
        self,
        rows: Rows,
        labels: Rows,
        classes: int,
        per_class: int,
        seed: int,
        grouping: Grouping | None = None,
    ) -> None:
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
        self.kept: dict[tuple[int, int], Rows] = {}
        self.mixed = Fraction(1)
        if grouping is not None:
            group = grouping.groups[order][self.start]
            self.by_group = np.argsort(group, kind="stable")
            _, sizes = np.unique(group, return_counts=True)
            self.grouped = GroupedDeck(sizes.tolist(), classes, mix(seed, GROUPS))
            # the decimal as written: 0.1 in binary is slightly more
            self.mixed = Fraction(str(grouping.mixed))

    def __call__(self, step: int, positions: range | None = None) -> tuple[Rows, Rows]:
        """The rows and labels of a step, grouped by class: all m, or those at some positions."""
        positions = range(self.m) if positions is None else positions
        classes, times, purpose = self.classes(step)
        first = positions.start // self.per_class  # classes before it need not be dealt
        dealt = slice(first, -(-positions.stop // self.per_class))
        place = self.images(classes[dealt], times[dealt], purpose)
        place = place[positions.start - first * self.per_class :][: len(positions)]
        return self.rows.take(place), self.labels.take(place)

    def all_labels(self, step: int) -> Rows:
        """The m labels of a step, without its rows."""
        return np.repeat(self.names[self.classes(step)[0]], self.per_class)

    def classes(self, step: int) -> tuple[Rows, Rows, int]:
        """The P classes of a step, how often each was dealt before, and which decks their images come
        from."""
        n = math.floor(step * self.mixed)  # mixed batches before this one
        if math.floor((step + 1) * self.mixed) > n:
            return *self.deck.deal(n), IMAGES
        cards, times = self.grouped.deal(step - n)
        return self.by_group[cards], times, GROUP_IMAGES

    def images(self, classes: Rows, times: Rows, purpose: int) -> Rows:
        """M images of every class, by how often it was dealt before, which never falls within a deal."""
        cut = int(np.searchsorted(times, times[0], side="right"))
        place = self.hands(classes[:cut], int(times[0]), purpose)
        if cut < len(times):
            later = self.hands(classes[cut:], int(times[-1]), purpose)
            place = np.concatenate([place, later])
        place += self.start[classes, None]
        return place.reshape(-1)

    def hands(self, classes: Rows, n: int, purpose: int) -> Rows:
        """The images of classes that were dealt n times before. For all classes at once this takes
        hardly longer than for the first ones, so the hands of all are kept for the coming steps."""
        if len(self.names) * self.per_class > MOST_KEPT:
            return self.deal(classes, n, purpose)
        if (n, purpose) not in self.kept:
            while len(self.kept) >= 4:  # two for each of the two purposes
                del self.kept[next(iter(self.kept))]
            self.kept[n, purpose] = self.deal(np.arange(len(self.names)), n, purpose)
        return self.kept[n, purpose].take(classes, axis=0)

    def deal(self, classes: Rows, n: int, purpose: int) -> Rows:
        """A class with fewer than M images repeats all of them, and deals the rest; every copy gets a
        crop of its own. Classes of the same size are dealt together."""
        M, sizes = self.per_class, self.size[classes]
        place = np.empty((len(classes), M), dtype=np.int64)
        for size in np.unique(sizes).tolist():
            alike = np.flatnonzero(sizes == size)
            whole = M - M % size
            place[alike, :whole] = np.arange(whole) % size
            if whole < M:
                keys = mix_each(self.seed, purpose, self.names[classes[alike]])
                place[alike, whole:] = Deck(size, M - whole, keys).deal(n)[0]
        return place


class Mixture:
    """The global batches of several datasets: each brings its own classes to every batch. The rows of
    a dataset follow those of the one before, and start at `first`."""

    def __init__(self, parts: Sequence[Batches], first: Sequence[int], seed: int) -> None:
        self.parts, self.first, self.seed = parts, first, seed
        self.m = sum(part.m for part in parts)

    @property
    def rows(self) -> Rows:
        """Of all datasets."""
        each = zip(self.parts, self.first, strict=True)
        return np.concatenate([part.rows + first for part, first in each])

    def __call__(self, step: int, positions: range | None = None) -> tuple[Rows, Rows]:
        """The rows and labels of a step: all m, or those at some positions."""
        positions = range(self.m) if positions is None else positions
        rows, labels, start = [], [], 0
        for part, first in zip(self.parts, self.first, strict=True):
            wanted = range(max(positions.start - start, 0), min(positions.stop - start, part.m))
            if wanted:
                found = part(step, wanted)
                rows.append(found[0] + first)
                labels.append(found[1])
            start += part.m
        return np.concatenate(rows), np.concatenate(labels)

    def all_labels(self, step: int) -> Rows:
        """The m labels of a step, without its rows."""
        return np.concatenate([part.all_labels(step) for part in self.parts])


def held_out(labels: Rows, share: float, seed: int) -> NDArray[np.bool_]:
    """Which samples belong to the classes held out for validation: a share of the classes."""
    names = np.unique(labels)
    chosen = Deck(len(names), len(names), mix(seed, HOLD_OUT)).deal(0)[0]
    return np.isin(labels, names[chosen[: round(share * len(names))]])


def put(images: Iterable[Image.Image], out: Pixels) -> None:
    for i, image in enumerate(images):
        out[i] = np.asarray(image)


class ImageBatches(ABC):
    """Batches by number: images, n x size x size x 3 uint8, or vectors, n x size float32, and a number
    for each; or those of two towers (`PairSpec`).

    A batch is made in parts of any length, by one process or by several.
    """

    spec: Spec
    most: int  # images in the largest batch

    @abstractmethod
    def count(self, n: int) -> int:
        """The number of images in batch n."""

    @abstractmethod
    def into(self, out: NDArray[Any], n: int, part: range) -> Tensor:
        """Write the images at these positions of batch n; return a number for each, such as its
        label."""

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        images = np.empty((self.count(n), *self.spec.shape), dtype=self.spec.dtype)
        numbers = self.into(images, n, range(len(images)))
        return torch.from_numpy(images), numbers


class TrainBatches(ImageBatches):
    """By step: this process's slice of the global batch, and b labels. augment: what its random numbers
    are for, AUGMENT or, in the other of two towers, AUGMENT_Y."""

    def __init__(
        self,
        index: Index | Sequence[Index],
        batches: Batches | Mixture,
        spec: Input | Features,
        rank: int = 0,
        size: int = 1,
        augment: int = AUGMENT,
    ) -> None:
        self.reader, self.batches, self.spec = reader_of(index, spec), batches, spec
        self.augment = augment
        self.rank, self.size = rank, size
        self.own = own_share(batches.m, rank, size)
        self.most = len(self.own)

    @property
    def all_rows(self) -> Rows:
        """All that any batch may hold."""
        return self.batches.rows

    def files(self, rows: Rows) -> list[File]:
        """The files of servers that some rows need."""
        return self.reader.files(rows)

    def all_labels(self, step: int) -> Rows:
        """The labels of the global batch."""
        return self.batches.all_labels(step)

    def rows_on_machine(self, step: int) -> Rows:
        """The images of a step for all processes of this machine."""
        ranks = ranks_of_machine(self.rank, self.size)
        first, last = (own_share(self.batches.m, ranks[i], self.size) for i in (0, -1))
        return self.batches(step, range(first.start, last.stop))[0]

    def count(self, step: int) -> int:
        return self.most

    def into(self, out: NDArray[Any], step: int, part: range) -> Tensor:
        positions = self.own[part.start : part.stop]
        rows, labels = self.batches(step, positions)
        if isinstance(self.reader, VectorReader):
            self.reader.into(out[: len(rows)], rows)
            return torch.from_numpy(labels)
        key, first = mix(self.batches.seed, self.augment, step), positions.start * NUMBERS
        numbers = uniforms(len(rows) * NUMBERS, key, first)
        self.reader.expect(rows)
        images = (
            self.image(row, iter(numbers[i * NUMBERS : (i + 1) * NUMBERS]))
            for i, row in enumerate(rows.tolist())
        )
        put(images, out)
        return torch.from_numpy(labels)

    def image(self, row: int, numbers: Iterator[float]) -> Image.Image:
        assert isinstance(self.spec, Input)
        data = self.reader.read(row)
        with self.reader.naming(row):
            return train_image(data, self.spec, numbers)


class EvalBatches(ImageBatches):
    """By number: this process's share of the images, each of them once, in order."""

    def __init__(
        self,
        index: Index,
        rows: Rows,
        labels: Rows,
        spec: Input | Features,
        batch: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        own = own_share(len(rows), rank, size)
        self.reader, self.rows, self.labels = reader_of(index, spec), rows[own], labels[own]
        self.spec, self.most, self.rank, self.size = spec, batch, rank, size
        shares = (own_share(len(rows), each, size) for each in ranks_of_machine(rank, size))
        self.machine = [rows[share.start : share.stop] for share in shares]

    @property
    def all_rows(self) -> Rows:
        """All that any batch may hold."""
        return np.concatenate(self.machine)

    def files(self, rows: Rows) -> list[File]:
        """The files of servers that some rows need."""
        return self.reader.files(rows)

    def rows_on_machine(self, n: int) -> Rows:
        """The images of the n-th batches of all processes of this machine."""
        return np.concatenate([rows[n * self.most : (n + 1) * self.most] for rows in self.machine])

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.most)

    def count(self, n: int) -> int:
        return len(self.rows[n * self.most :][: self.most])

    def into(self, out: NDArray[Any], n: int, part: range) -> Tensor:
        rows, labels = (
            x[n * self.most :][part.start : part.stop] for x in (self.rows, self.labels)
        )
        if isinstance(self.reader, VectorReader):
            self.reader.into(out[: len(rows)], rows)
        else:
            self.reader.expect(rows)
            put((self.image(row) for row in rows.tolist()), out)
        return torch.from_numpy(labels)

    def image(self, row: int) -> Image.Image:
        assert isinstance(self.spec, Input)
        data = self.reader.read(row)
        with self.reader.naming(row):
            return eval_image(data, self.spec)


def reader_of(index: Index | Sequence[Index], spec: Input | Features) -> JointReader:
    indexes = [index] if isinstance(index, Index) else index
    return VectorReader(indexes) if isinstance(spec, Features) else JointReader(indexes)


def own_share(n: int, rank: int, size: int) -> range:
    """This process's part of n samples: contiguous, each sample once, no padding."""
    return range(n * rank // size, n * (rank + 1) // size)
