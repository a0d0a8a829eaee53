"""Vectors of features from shards, copied at the speed of memory: nothing is decoded.

Every vector is a .npy file in a tar. Files in a tar begin at multiples of 512 bytes and the headers of
all vectors have the same length, so the shards in memory are one array with a row per 512 bytes, and a
batch is a selection of its rows. Where shards do not stay on this machine (a cache with a limit, or
`data.remote: range`), vectors are read one by one, as images are.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dml.data.reading import JointReader
from shards.index import AGAIN, ImageReader, Index
from shards.item import ShardError
from shards.vector import Form, form_of, is_vector

BLOCK = 512  # bytes, of a tar


@dataclass(frozen=True)
class Features:
    """What a head without a backbone expects: vectors of `size` numbers. (A network expects images as
    `Input` describes them.)"""

    size: int
    dtype, tensor_dtype = np.float32, torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def bytes(self) -> int:
        return 4 * self.size


def features_of(indexes: Sequence[Index]) -> Features | None:
    """What the shards hold: vectors, which must all have the same size and type, or images (None)."""
    forms = [form_in(index) for index in indexes]
    for index, form in zip(indexes, forms, strict=True):
        if form != forms[0]:
            raise ShardError(
                f"{indexes[0].root} has {described(forms[0])} but {index.root} has {described(form)}: "
                "datasets in one run must be alike"
            )
    return None if forms[0] is None else Features(forms[0].size)


def form_in(index: Index) -> Form | None:
    """The form of the first vector of the shards; None if they hold images."""
    # one vector is no reason to download a shard
    far = not index.is_here(int(index.rows["shard"][0]))
    data = ImageReader(index, ranges=far).read(0)
    if not is_vector(data):
        return None
    try:
        return form_of(data)
    except ShardError as error:
        raise ShardError(f"{index.root}: vector 0 {error}: {AGAIN}") from None


def described(form: Form | None) -> str:
    return "images" if form is None else f"vectors of {form.size:,} numbers ({form.dtype})"


class Shard:
    """A tar in memory. The mapping is private and nothing is written to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ShardError(f"{path} cannot be read: {error}") from None
        self.address: int = np.frombuffer(self.memory, np.uint8).ctypes.data

    def check_length(self) -> None:
        """ShardError if the file was cut short since: to read beyond its end would kill the process."""
        if self.memory.size() < len(self.memory):
            raise ShardError(f"{self.path} was cut short: {AGAIN}")


class VectorReader(JointReader):
    """Copies vectors. The checksum of a vector is compared when this process first copies it."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        super().__init__(indexes)
        form = form_in(indexes[0])
        assert form is not None
        self.form = form
        caches = [index.cache for index in indexes if index.cache is not None]
        self._stay = not any(cache.ranges or cache.limit is not None for cache in caches)
        self._shards: dict[
            int, Shard
        ] = {}  # those that are in memory, by their number in all datasets

    def into(self, out: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
        """Copy the vectors of some rows; float16 becomes float32."""
        if not self._stay:
            self.expect(rows)
            for to, row in zip(out, rows.tolist(), strict=True):
                data = self._check(row)
                to[:] = np.frombuffer(data, self.form.dtype, offset=len(self.form.header))
            return
        self._open(rows)
        for shard in self._shards.values():
            shard.check_length()
        for row in rows[~self._checked[rows]].tolist():
            self._check(row)
            self._checked[row] = True
        blocks, to = self._blocks.take(torch.from_numpy(rows)), torch.from_numpy(out)
        if self._rows.dtype == to.dtype:
            torch.index_select(self._rows, 0, blocks, out=to)
        else:
            to.copy_(torch.index_select(self._rows, 0, blocks))

    def _open(self, rows: NDArray[np.int64]) -> None:
        """Map the shards of some rows, and view all mapped shards as one array, which starts in the one
        with the lowest address. What lies between the shards belongs to it as well, but only rows with
        vectors are read."""
        if not self._shards:
            indexes = [reader.index for reader in self.readers]
            first = np.cumsum([0, *(len(index.places) for index in indexes)])
            self._shard = np.concatenate(
                [index.rows["shard"] + n for index, n in zip(indexes, first, strict=False)]
            )
            self._offset = np.concatenate([index.rows["offset"] for index in indexes])
            self._address = np.zeros(first[-1], np.int64)
            self._places = [(index, n) for index in indexes for n in range(len(index.places))]
            self._checked = np.zeros(len(self._shard), np.bool_)
        missing = np.flatnonzero(self._address == 0)
        missing = missing[np.isin(missing, self._shard[rows])] if len(missing) else missing
        if not len(missing):
            return
        for number in missing.tolist():
            index, own = self._places[number]
            self._shards[number] = Shard(index.local(own))
            self._address[number] = self._shards[number].address
        lowest = min(self._shards.values(), key=lambda shard: shard.address)
        blocks = (self._address[self._shard] + self._offset - lowest.address) // BLOCK
        first = np.frombuffer(lowest.memory, self.form.dtype, 1, offset=len(self.form.header))
        shape, strides = (int(blocks.max()) + 1, self.form.size), (BLOCK, first.itemsize)
        self._rows = torch.from_numpy(np.lib.stride_tricks.as_strided(first, shape, strides))
        self._blocks = torch.from_numpy(blocks)

    def _check(self, row: int) -> bytes:
        """The file of a vector; ShardError if it is not the one that was packed, or not like the first."""
        data = self.read(row)
        if not data.startswith(self.form.header) or len(data) != self.form.bytes:
            reader, own = self.place(row)
            raise ShardError(
                f"vector {own:08d} of {reader.index.root} is not like the first one, which is one of "
                f"{described(self.form)}: build the shards again"
            )
        return data

    def __getstate__(self) -> dict[str, Any]:
        """Without the memory, which a worker that is spawned maps itself."""
        kept = ("readers", "first", "form", "_stay")
        return {**{key: self.__dict__[key] for key in kept}, "_shards": {}}
