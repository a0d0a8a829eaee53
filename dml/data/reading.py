"""Reads single images of one or several datasets, whose rows are numbered one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.cache import File
from shards.index import ImageReader, Index
from shards.item import ShardError

Rows = NDArray[np.int64]


def first_rows(indexes: Sequence[Index]) -> list[int]:
    """The number of the first row of every dataset."""
    first: list[int] = np.cumsum([0, *(len(index.rows) for index in indexes)])[:-1].tolist()
    return first


class JointReader:
    def __init__(self, indexes: Sequence[Index]) -> None:
        self.readers = [ImageReader(index) for index in indexes]
        self.first = first_rows(indexes)

    def place(self, row: int) -> tuple[ImageReader, int]:
        """The dataset that a row belongs to, and its number there."""
        which = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.readers[which], row - self.first[which]

    def read(self, row: int) -> bytes:
        """The encoded image or vector; ShardError if its bytes are not those that were packed."""
        reader, own = self.place(row)
        return reader.read(own)

    def expect(self, rows: Rows) -> None:
        """Say which images will be read next."""
        for reader, own in self._by_dataset(rows):
            reader.expect(own.tolist())

    def files(self, rows: Rows) -> list[File]:
        """The files of servers that hold some images, dataset by dataset in the order of the images."""
        return [file for reader, own in self._by_dataset(rows) for file in reader.files(own)]

    def _by_dataset(self, rows: Rows) -> Iterator[tuple[ImageReader, Rows]]:
        which = np.searchsorted(self.first, rows, side="right") - 1
        for i, (reader, first) in enumerate(zip(self.readers, self.first, strict=True)):
            yield reader, rows[which == i] - first

    @contextmanager
    def naming(self, row: int) -> Iterator[None]:
        """Name the image that cannot be decoded."""
        try:
            yield
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reader, own = self.place(row)
            raise ShardError(
                f"image {own} of {reader.index.root} cannot be decoded ({error}): run shards/verify.py "
                "on the shards, and build them again"
            ) from None
