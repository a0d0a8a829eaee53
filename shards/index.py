"""The layout of shards on disk, and random access to their images.

    DIR/manifest.json       format, version, source, splits, classes, notes; checksums of the shards,
                            of the index and of the manifest itself
    DIR/index.npy           one ROW per image, with its checksum, in the order of the tars
    DIR/train-000000.tar    KEY.jpg or KEY.png, KEY.cls (the label), KEY.json; KEY is the row number
    DIR/test-000000.tar     ...

Any webdataset reader can read the tars; training reads single images at their offsets. Version 1 had
no checksums of images and of the manifest; shards of version 1 are read without these two checks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shards.files import read_bounded
from shards.item import LARGEST_IMAGE, ShardError

FORMAT, VERSION = "dml-shards", 2
ROW_1 = np.dtype(
    [("split", "u1"), ("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i4")]
)
ROW = np.dtype([*ROW_1.descr, ("crc32", "<u4")])
ROWS = {1: ROW_1, VERSION: ROW}
SHARD_NAME = re.compile(r"[a-z]+-[0-9]{6,}\.tar")  # no slash: cannot point elsewhere
LARGEST_MANIFEST = 2**28  # bytes: the names of ten million classes
AGAIN = "copy or build the shards again"


@dataclass(frozen=True, eq=False)
class Index:
    root: Path
    manifest: Mapping[str, Any]
    rows: NDArray[np.void]  # of dtype ROW, or ROW_1

    @property
    def splits(self) -> tuple[str, ...]:
        """Names, in the order of the split column."""
        return tuple(self.manifest["splits"])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names, in the order of the labels."""
        return tuple(self.manifest["classes"])

    @property
    def shards(self) -> tuple[Path, ...]:
        return tuple(self.root / shard["name"] for shard in self.manifest["shards"])

    @property
    def has_checksums(self) -> bool:
        """Whether there is a checksum for every image."""
        return self.rows.dtype == ROW

    def positions(self, split: str) -> NDArray[np.int64]:
        """The row numbers of a split."""
        if split not in self.splits:
            raise ShardError(f"{self.root} has no split {split!r}, only {', '.join(self.splits)}")
        return np.flatnonzero(self.rows["split"] == self.splits.index(split)).astype(np.int64)

    def labels(self, split: str) -> NDArray[np.int64]:
        """The labels of `positions(split)`."""
        labels: NDArray[np.int64] = self.rows["label"][self.positions(split)].astype(np.int64)
        return labels


def _well_formed(manifest: Mapping[str, Any]) -> bool:
    try:
        return (
            all(type(s[k]) is int for s in manifest["splits"].values() for k in s)
            and all(s.keys() == {"classes", "images"} for s in manifest["splits"].values())
            and all(SHARD_NAME.fullmatch(s["name"]) for s in manifest["shards"])
            and all(type(s["bytes"]) is int for s in manifest["shards"])
            and all(type(s["sha256"]) is str for s in [*manifest["shards"], manifest["index"]])
            and all(type(name) is str for name in [manifest["source"], *manifest["classes"]])
            and (manifest["version"] == 1 or manifest["sha256"] == manifest_sha256(manifest))
        )
    except (KeyError, TypeError, AttributeError, RecursionError):
        return False


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's content without the checksum itself. The order of keys counts,
    because the order of the splits has a meaning."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest: counts, classes, checksums. Reads no images and no index."""
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
            f"versions up to {VERSION}: build them again"
        )
    if not _well_formed(manifest):
        raise ShardError(f"{path} is damaged: {AGAIN}")
    return manifest


def _row_problem(rows: NDArray[np.void], manifest: Mapping[str, Any]) -> str | None:
    """Why the rows cannot belong to the shards, or None."""
    ends = np.array([shard["bytes"] for shard in manifest["shards"]], np.int64)
    for column, count in (("split", "splits"), ("label", "classes"), ("shard", "shards")):
        if np.any((rows[column] < 0) | (rows[column] >= len(manifest[count]))):
            return f"has a {column} that the manifest does not have"
    # offset + size could overflow, so the size is subtracted instead
    room = ends[rows["shard"]] - rows["size"]
    if np.any((rows["size"] <= 0) | (rows["offset"] < 0) | (rows["offset"] > room)):
        return "points outside a shard"
    if np.any(rows["size"] > LARGEST_IMAGE):
        return f"has an image of more than {LARGEST_IMAGE:,} bytes"
    counts = np.bincount(rows["split"], minlength=len(manifest["splits"]))
    if counts.tolist() != [split["images"] for split in manifest["splits"].values()]:
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


def load_index(directory: str | Path) -> Index:
    """The index, checked against the manifest and the shards' sizes (verify.py checks more)."""
    manifest, root = read_manifest(directory), Path(directory).absolute()
    for shard in manifest["shards"]:
        try:
            size = (root / shard["name"]).stat().st_size
        except OSError as error:
            raise ShardError(f"{root / shard['name']}: {error.strerror}; {AGAIN}") from None
        if size != shard["bytes"]:
            what = "is cut short" if size < shard["bytes"] else "is too long"
            numbers = f"{size} bytes, but the manifest says {shard['bytes']}"
            raise ShardError(f"{root / shard['name']} {what} ({numbers}): {AGAIN}")
    path = root / "index.npy"
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
    if rows.dtype != ROWS[manifest["version"]] or rows.ndim != 1:
        raise ShardError(f"{path} is not an index of images: {AGAIN}")
    if problem := _row_problem(rows, manifest):
        raise ShardError(f"{path} {problem}: {AGAIN}")
    rows.flags.writeable = False
    return Index(root, manifest, rows)


class ImageReader:
    """Reads the encoded bytes of single images. A process opens each shard once, when it needs it.

    pread has no file position, so processes can share descriptors after a fork. Pickling leaves them
    out.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._paths = index.shards
        self._files: dict[int, int] = {}

    def read(self, row: int) -> bytes:
        """The encoded image; ShardError if its bytes are not those that were packed."""
        _, _, shard, offset, size, *checksum = self.index.rows[row].item()
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise ShardError(f"{self._paths[shard]}: {error.strerror}") from None
        if len(data) != size:
            raise ShardError(f"{self._paths[shard]} was cut short: {AGAIN}")
        if checksum and zlib.crc32(data) != checksum[0]:
            raise ShardError(
                f"{self._paths[shard]}: image {row:08d} ({size:,} bytes at offset {offset:,}) is "
                f"damaged, its checksum differs from that in the index: {AGAIN}"
            )
        return data

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}
