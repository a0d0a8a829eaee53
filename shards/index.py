"""The layout of shards on disk, and random access to their images.

    DIR/manifest.json       format, version, source, splits, classes, notes; checksums of the shards,
                            of the index and of the manifest itself
    DIR/index.npy           one ROW per image, with its checksum, in the order of the tars
    DIR/train-000000.tar    KEY.jpg, KEY.png or KEY.npy (a vector of features), KEY.cls (the label),
                            KEY.json; KEY is the row number
    DIR/test-000000.tar     ...

Any webdataset reader can read the tars; training reads single images at their offsets. Version 1 had
no checksums of images and of the manifest; shards of version 1 are read without these two checks.
Version 3 is an index of tars that lie elsewhere: the manifest has the address or path of each of them
(shards/index_tars.py). DIR may be an address, too (shards/remote.py); the shards then come to a cache.
Where classes have super-classes, the index has one more column, and the manifest their names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shards.cache import Cache, File
from shards.files import MEMORY, read_bounded
from shards.item import LARGEST_IMAGE, ShardError, is_safe
from shards.remote import is_remote, read_range

FORMAT, VERSION = "dml-shards", 2
INDEXED = 3  # the version of an index of tars that lie elsewhere
ROW_1 = np.dtype(
    [("split", "u1"), ("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i4")]
)
ROW = np.dtype([*ROW_1.descr, ("crc32", "<u4")])
ROWS = {1: ROW_1, VERSION: ROW, INDEXED: ROW}
SUPER_CLASS = ("super_class", "<i4")
SHARD_NAME = re.compile(r"[a-z]+-[0-9]{6,}\.tar")  # no slash: cannot point elsewhere
LARGEST_MANIFEST = 2**28  # bytes: the names of ten million classes
MOST_IMAGES = 2**31 - 1  # numbers of images in 32 bits: labels cannot be more
REQUESTS = 16  # images that a process requests from a server at a time
AGAIN = "copy or build the shards again"


@dataclass(frozen=True, eq=False)
class Index:
    """root: the folder of manifest and index, in the cache if they come from a server. address: of the
    server, or None."""

    root: Path
    manifest: Mapping[str, Any]
    rows: NDArray[np.void]  # of dtype ROW, or ROW_1
    cache: Cache | None = None
    address: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names, in the order of the split column."""
        return tuple(self.manifest["splits"])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names, in the order of the labels."""
        return tuple(self.manifest["classes"])

    @cached_property
    def places(self) -> tuple[Path | File, ...]:
        """Where each shard is: a path, or a file on a server."""
        return tuple(_place(shard, self.root, self.address) for shard in self.manifest["shards"])

    @property
    def shards(self) -> tuple[Path, ...]:
        """The paths of the shards. One that comes from a server may not be there yet: see `local`."""
        return tuple(self._cached.path(p) if isinstance(p, File) else p for p in self.places)

    def local(self, shard: int) -> Path:
        """The path of a shard, which comes from its server if need be."""
        place = self.places[shard]
        return self._cached.fetch(place) if isinstance(place, File) else place

    def is_here(self, shard: int) -> bool:
        """Whether a shard need not come from a server first."""
        place = self.places[shard]
        return isinstance(place, Path) or self._cached.has(place)

    @property
    def _cached(self) -> Cache:
        assert self.cache is not None, "load_index refuses shards on a server without a cache"
        return self.cache

    @property
    def has_checksums(self) -> bool:
        """Whether there is a checksum for every image."""
        return "crc32" in (self.rows.dtype.names or ())

    def positions(self, split: str) -> NDArray[np.int64]:
        """The row numbers of a split."""
        if split not in self.splits:
            raise ShardError(f"{self.root} has no split {split!r}, only {', '.join(self.splits)}")
        return np.flatnonzero(self.rows["split"] == self.splits.index(split)).astype(np.int64)

    def labels(self, split: str) -> NDArray[np.int64]:
        """The labels of `positions(split)`."""
        labels: NDArray[np.int64] = self.rows["label"][self.positions(split)].astype(np.int64)
        return labels

    def super_classes(self, split: str) -> NDArray[np.int64]:
        """The super-classes of `positions(split)`; ShardError if the shards know none."""
        if SUPER_CLASS[0] not in (self.rows.dtype.names or ()):
            raise ShardError(
                f"{self.root} has no super-classes: build the shards again from sop, or from a table "
                "with the column super_class"
            )
        found: NDArray[np.int64] = self.rows[SUPER_CLASS[0]][self.positions(split)].astype(np.int64)
        return found


def _place(shard: Mapping[str, Any], root: Path, address: str | None) -> Path | File:
    url = shard.get("url", None if address is None else f"{address}/{shard['name']}")
    if url is not None and is_remote(url):
        return File(url, shard["bytes"], shard["sha256"])
    name: str = shard["name"] if url is None else url
    return root / name


def _named(shard: Mapping[str, Any], version: int) -> bool:
    """Whether a shard has a name that cannot point elsewhere, or in an index of other tars a place."""
    name, url = shard["name"], shard.get("url")
    if version != INDEXED:
        return SHARD_NAME.fullmatch(name) is not None and url is None
    return is_safe(name) and "/" not in name and type(url) is str and bool(url) and is_safe(url)


def _well_formed(manifest: Mapping[str, Any]) -> bool:
    try:
        return (
            all(type(s[k]) is int for s in manifest["splits"].values() for k in s)
            and all(s.keys() == {"classes", "images"} for s in manifest["splits"].values())
            and all(_named(shard, manifest["version"]) for shard in manifest["shards"])
            and all(type(s["bytes"]) is int for s in manifest["shards"])
            and all(type(s["sha256"]) is str for s in [*manifest["shards"], manifest["index"]])
            and all(type(name) is str for name in [manifest["source"], *manifest["classes"]])
            and all(type(name) is str for name in manifest.get("super_classes", []))
            and (manifest["version"] == 1 or manifest["sha256"] == manifest_sha256(manifest))
        )
    except (KeyError, TypeError, AttributeError, RecursionError):
        return False


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's content without the checksum itself. The order of keys counts,
    because the order of the splits has a meaning."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(directory: str | Path, cache: Cache | None = None) -> dict[str, Any]:
    """The manifest: counts, classes, checksums. Reads no images and no index."""
    if is_remote(directory):
        address = str(directory).rstrip("/")
        kept = _need(cache, address).manifest(f"{address}/manifest.json", LARGEST_MANIFEST)
        found = read_manifest(kept.parent)
        if bad := [s["url"] for s in found["shards"] if not is_remote(s.get("url", "file://"))]:
            raise ShardError(f"{address} points to {bad[0]}, which is a path on another machine")
        return found
    path = Path(directory) / "manifest.json"
    try:
        manifest = json.loads(read_bounded(path, LARGEST_MANIFEST))
    except FileNotFoundError:
        there = Path(directory).is_dir()
        what = "has no manifest.json (not shards, or not finished)" if there else "is not there"
        raise ShardError(
            f"{Path(directory).absolute()} {what}: make it with shards/build.py"
        ) from None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ShardError(f"{path} is not the manifest of {FORMAT}: build the shards again")
    version = manifest.get("version")
    if type(version) is not int or version not in ROWS:
        raise ShardError(
            f"{directory} has shards of version {version!r}, but this program reads "
            f"versions up to {max(ROWS)}: build them again"
        )
    if not _well_formed(manifest):
        raise ShardError(f"{path} is damaged: {AGAIN}")
    return manifest


def _need(cache: Cache | None, place: str | Path) -> Cache:
    if cache is None:
        raise ShardError(
            f"the shards of {place} are on a server: name a folder of this machine to keep them in "
            "(data.cache in a config, --cache of verify)"
        )
    return cache


def _row_problem(rows: NDArray[np.void], manifest: Mapping[str, Any]) -> str | None:
    """Why the rows cannot belong to the shards, or None."""
    ends = np.array([shard["bytes"] for shard in manifest["shards"]], np.int64)
    counts = {"split": "splits", "label": "classes", "shard": "shards"}
    if SUPER_CLASS[0] in (rows.dtype.names or ()):
        counts[SUPER_CLASS[0]] = "super_classes"
    for column, names in counts.items():
        if np.any((rows[column] < 0) | (rows[column] >= len(manifest.get(names, ())))):
            return f"has a {column} that the manifest does not have"
    # offset + size could overflow, so the size is subtracted instead
    room = ends[rows["shard"]] - rows["size"]
    if np.any((rows["size"] <= 0) | (rows["offset"] < 0) | (rows["offset"] > room)):
        return "points outside a shard"
    if np.any(rows["size"] > LARGEST_IMAGE):
        return f"has an image of more than {LARGEST_IMAGE:,} bytes"
    images = np.bincount(rows["split"], minlength=len(manifest["splits"]))
    if images.tolist() != [split["images"] for split in manifest["splits"].values()]:
        return "has other numbers of images per split than the manifest"
    return None


def load_npy(file: BinaryIO) -> NDArray[Any]:
    """The array of a .npy file; ValueError if it is damaged. Nothing is unpickled."""
    try:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    # numpy reads the header with Python's parser, which raises many kinds of errors on damaged bytes,
    # and allocates what the header claims, which may be more than the memory
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"a damaged .npy file ({str(error) or type(error).__name__})") from None
    return array


def load_index(directory: str | Path, cache: Cache | None = None) -> Index:
    """The index, checked against the manifest and the shards' sizes (verify.py checks more).

    cache: where files of servers are kept.
    """
    manifest, address = read_manifest(directory, cache), None
    if is_remote(directory):
        address = str(directory).rstrip("/")
        sha256 = manifest["index"]["sha256"]
        path = _need(cache, address).index(f"{address}/index.npy", sha256, MEMORY // 2)
        root = path.parent.absolute()
    else:
        root = Path(directory).absolute()
        path = root / "index.npy"
    for shard in manifest["shards"]:
        place = _place(shard, root, address)
        if isinstance(place, File):
            _need(cache, directory)
        else:
            _check_shard(place, shard["bytes"])
    try:
        data = read_bounded(path)
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}; {AGAIN}") from None
    if hashlib.sha256(data).hexdigest() != manifest["index"]["sha256"]:
        raise ShardError(f"{path} differs from its checksum in the manifest: {AGAIN}")
    try:
        rows = load_npy(io.BytesIO(data))
    except ValueError:
        rows = np.empty(0)
    plain = ROWS[manifest["version"]]
    if rows.dtype not in (plain, np.dtype([*plain.descr, SUPER_CLASS])) or rows.ndim != 1:
        raise ShardError(f"{path} is not an index of images: {AGAIN}")
    if problem := _row_problem(rows, manifest):
        raise ShardError(f"{path} {problem}: {AGAIN}")
    rows.flags.writeable = False
    return Index(root, manifest, rows, cache, address)


def _check_shard(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}; {AGAIN}") from None
    if size != expected:
        what = "is cut short" if size < expected else "is too long"
        numbers = f"{size} bytes, but the manifest says {expected}"
        raise ShardError(f"{path} {what} ({numbers}): {AGAIN}")


class ImageReader:
    """Reads the encoded bytes of single images. A process opens each shard once, when it needs it; one
    of a cache with a limit each time, since a file that is open takes space after it has left.

    pread has no file position, so processes can share descriptors after a fork. Pickling leaves them
    out. ranges: images of servers are read one by one, whatever the cache says.
    """

    def __init__(self, index: Index, ranges: bool = False) -> None:
        self.index = index
        self._paths = index.shards
        self._files: dict[int, int] = {}
        self._ranges = ranges or (index.cache is not None and index.cache.ranges)
        self._expected: dict[int, Future[bytes]] = {}
        self._threads: tuple[int, ThreadPoolExecutor] | None = None

    def expect(self, rows: Iterable[int]) -> None:
        """Say which images will be read next: those that come from a server one by one are requested
        together."""
        if not self._ranges:
            return
        if self._threads is None or self._threads[0] != os.getpid():
            # a fork leaves threads behind
            self._threads, self._expected = (os.getpid(), ThreadPoolExecutor(REQUESTS)), {}
        for row in rows:
            _, _, shard, offset, size, *_ = self.index.rows[row].item()
            if row not in self._expected and isinstance(self.index.places[shard], File):
                self._expected[row] = self._threads[1].submit(self._bytes, shard, offset, size)

    def files(self, rows: NDArray[np.int64]) -> list[File]:
        """The files of servers that hold some images, in the order of the images."""
        shards = dict.fromkeys(self.index.rows["shard"][rows].tolist())
        places = (self.index.places[shard] for shard in shards)
        return [place for place in places if isinstance(place, File)]

    def read(self, row: int) -> bytes:
        """The encoded image; ShardError if its bytes are not those that were packed."""
        _, _, shard, offset, size, *checksum = self.index.rows[row].item()[: len(ROW.descr)]
        expected = self._expected.pop(row, None)
        data = expected.result() if expected else self._bytes(shard, offset, size)
        if len(data) != size:
            raise ShardError(f"{self._paths[shard]} was cut short: {AGAIN}")
        if checksum and zlib.crc32(data) != checksum[0]:
            place, name, fix = self.index.places[shard], str(self._paths[shard]), AGAIN
            if isinstance(place, File) and self._ranges:
                name = place.url
            elif isinstance(place, File):
                fix = "remove it, and it is fetched again"
            raise ShardError(
                f"{name}: image {row:08d} ({size:,} bytes at offset {offset:,}) is "
                f"damaged, its checksum differs from that in the index: {fix}"
            )
        return data

    def _bytes(self, shard: int, offset: int, size: int) -> bytes:
        if shard in self._files:
            return self._pread(self._files[shard], shard, size, offset)
        place, cache = self.index.places[shard], self.index.cache
        if self._ranges and isinstance(place, File):
            return read_range(place.url, offset, size)
        descriptor = self._open(shard)
        if isinstance(place, Path) or cache is None or cache.limit is None:
            self._files[shard] = descriptor
            return self._pread(descriptor, shard, size, offset)
        try:
            return self._pread(descriptor, shard, size, offset)
        finally:
            os.close(descriptor)

    def _open(self, shard: int) -> int:
        while True:
            path = self.index.local(shard)
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                # it may have left the cache since
                if isinstance(error, FileNotFoundError) and self.index.places[shard] != path:
                    continue
                raise ShardError(f"{path}: {error.strerror}") from None

    def _pread(self, descriptor: int, shard: int, size: int, offset: int) -> bytes:
        try:
            return os.pread(descriptor, size, offset)
        except OSError as error:
            raise ShardError(f"{self._paths[shard]}: {error.strerror}") from None

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_expected": {}, "_threads": None}
