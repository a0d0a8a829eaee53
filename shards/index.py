"""The layout of shards on disk, and random access to their images.

    DIR/manifest.json       format, version, source, splits, classes, shards with checksums, notes
    DIR/index.npy           one ROW per image, in the order of the tars
    DIR/train-000000.tar    KEY.jpg or KEY.png, KEY.cls (the label), KEY.json; KEY is the row number
    DIR/test-000000.tar     ...

Any webdataset reader can read the tars; training reads single images at their offsets.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.item import ShardError

FORMAT, VERSION = "dml-shards", 1
ROW = np.dtype(
    [("split", "u1"), ("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i4")]
)
SHARD_NAME = re.compile(r"[a-z]+-[0-9]{6,}\.tar")  # no slash: cannot point elsewhere


@dataclass(frozen=True, eq=False)
class Index:
    root: Path
    manifest: Mapping[str, Any]
    rows: NDArray[np.void]  # of dtype ROW

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
            and all(type(name) is str for name in manifest["classes"])
        )
    except (KeyError, TypeError, AttributeError):
        return False


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest: counts, classes, checksums. Reads no images and no index."""
    path = Path(directory) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        there = Path(directory).is_dir()
        what = "has no manifest.json (not shards, or not finished)" if there else "is not there"
        raise ShardError(f"{directory} {what}: make it with shards/build.py") from None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ShardError(f"{path} is not the manifest of {FORMAT}: build the shards again")
    if manifest.get("version") != VERSION:
        raise ShardError(
            f"{directory} has shards of version {manifest.get('version')!r}, but this program reads "
            f"version {VERSION}: build them again"
        )
    if not _well_formed(manifest):
        raise ShardError(f"{path} is damaged: build the shards again")
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
    counts = np.bincount(rows["split"], minlength=len(manifest["splits"]))
    if counts.tolist() != [split["images"] for split in manifest["splits"].values()]:
        return "has other numbers of images per split than the manifest"
    return None


def load_index(directory: str | Path) -> Index:
    """The index, checked against the manifest and the shards' sizes (verify.py checks more)."""
    manifest, root = read_manifest(directory), Path(directory).absolute()
    again = "copy or build the shards again"
    for shard in manifest["shards"]:
        try:
            size = (root / shard["name"]).stat().st_size
        except OSError as error:
            raise ShardError(f"{root / shard['name']}: {error.strerror}; {again}") from None
        if size != shard["bytes"]:
            what = "is cut short" if size < shard["bytes"] else "is too long"
            numbers = f"{size} bytes, but the manifest says {shard['bytes']}"
            raise ShardError(f"{root / shard['name']} {what} ({numbers}): {again}")
    path = root / "index.npy"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}; {again}") from None
    if hashlib.sha256(data).hexdigest() != manifest["index"]["sha256"]:
        raise ShardError(f"{path} differs from its checksum in the manifest: {again}")
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError):
        rows = None
    if not isinstance(rows, np.ndarray) or rows.dtype != ROW or rows.ndim != 1:
        raise ShardError(f"{path} is not an index of images: {again}")
    if problem := _row_problem(rows, manifest):
        raise ShardError(f"{path} {problem}: {again}")
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
        _, _, shard, offset, size = self.index.rows[row].item()
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise ShardError(f"{self._paths[shard]}: {error.strerror}") from None
        if len(data) != size:
            raise ShardError(f"{self._paths[shard]} was cut short: copy or build the shards again")
        return data

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}
