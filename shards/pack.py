"""Writes shards: the same images give the same bytes, and the folder appears only when complete.

Members of a tar are written by webdataset's TarWriter, the image of a key first.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.files import sync_file, sync_folder, try_lock, write_synced
from shards.images import Picture
from shards.index import (
    FORMAT,
    MOST_IMAGES,
    ROW,
    SHARD_NAME,
    SUPER_CLASS,
    VERSION,
    manifest_sha256,
)
from shards.item import Item, ShardError


def _is_ours(name: str) -> bool:
    return name in ("index.npy", "manifest.json") or SHARD_NAME.fullmatch(name) is not None


def _refuse_existing(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ShardError(f"{out} exists: remove it, or choose another --out")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Create OUT.partial for the block to fill; then rename it to OUT, or remove it on an error."""
    out = out.absolute()
    partial = out.with_name(f"{out.name}.partial")
    _refuse_existing(out)
    if partial.is_symlink():
        raise ShardError(f"{partial} is a symbolic link: remove it, or choose another --out")
    partial.mkdir(parents=True, exist_ok=True)
    folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # The lock ends with its process: a folder without one was left by a build that was killed.
        if not try_lock(folder):
            raise ShardError(f"{partial} is being written by another build: wait until it ends")
        _refuse_existing(out)  # another build may have finished before we got the lock
        foreign = sorted(name for name in os.listdir(partial) if not _is_ours(name))
        if foreign:
            raise ShardError(f"{partial} holds {foreign[0]!r}, which no build wrote: remove it")
        for name in os.listdir(partial):
            (partial / name).unlink()
        try:
            yield partial
            sync_folder(partial)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(out.parent)
    finally:
        os.close(folder)


class _Tar:
    """A shard that is being written: webdataset's TarWriter over a file that is hashed on its way."""

    def __init__(self, path: Path) -> None:
        from webdataset import TarWriter  # here: it imports torch, which takes time

        self._file, self._hash = path.open("xb"), hashlib.sha256()
        self._writer = TarWriter(self, user="", group="", mode=0o644, mtime=0, encoder=False)

    @property
    def size(self) -> int:
        """The bytes so far, without the end of the tar."""
        return int(self._writer.tarstream.offset)

    def add(self, key: str, suffix: str, data: bytes) -> int:
        """Add a member; return the offset of its data."""
        offset = self.size + tarfile.BLOCKSIZE
        self._writer.write({"__key__": key, suffix: data})
        return offset

    def write(self, data: bytes) -> None:
        """What the TarWriter calls."""
        if self._file.closed:  # given up: tarfile still writes an end when it is collected
            return
        self._file.write(data)
        self._hash.update(data)

    def finish(self) -> dict[str, Any]:
        """End the tar; return its size and checksum for the manifest."""
        self._writer.close()
        sync_file(self._file)
        found = {"bytes": self._file.tell(), "sha256": self._hash.hexdigest()}
        self._file.close()
        return found

    def close(self) -> None:
        self._file.close()


def _padded(data: bytes) -> int:
    """The bytes of a member in a tar: its header, and its data in whole blocks."""
    return tarfile.BLOCKSIZE * (1 - -len(data) // tarfile.BLOCKSIZE)


def _json(value: object, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode() + b"\n"


class Packer:
    """Packs images into tars of at most about `max_bytes`, split by split; `finish` adds the index and
    the manifest."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.images: dict[str, int] = {}  # split -> count
        self.classes: dict[str, set[int]] = {}  # split -> its labels
        self.labels: dict[str, int] = {}  # class name -> label
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._super_classes: dict[str, int] = {}  # name -> number
        self._super_class: list[int] = []  # of every row, if any has one
        self._shards: list[dict[str, Any]] = []
        self._tar: _Tar | None = None

    def close(self) -> None:
        if self._tar:
            self._tar.close()

    def add(self, item: Item, picture: Picture) -> None:
        if item.split not in self.images:
            self._finish_shard()
            self.images[item.split] = 0
            self.classes[item.split] = set()
        if len(self._rows) == MOST_IMAGES:
            raise ShardError(
                f"there are more than {MOST_IMAGES:,} images, which is the most that an index holds: "
                "build several folders"
            )
        label = self.labels.setdefault(item.class_name, len(self.labels))
        key = f"{len(self._rows):08d}"
        about = {
            "class": item.class_name,
            "split": item.split,
            "source": item.name,
            "extra": dict(item.extra),
        }
        members = {
            picture.suffix: picture.data,
            "cls": b"%d" % label,
            "json": _json(about),
        }
        size = sum(map(_padded, members.values()))
        if self._tar and self._tar.size + size > self.max_bytes:
            self._finish_shard()
        if not self._tar:
            # shards are numbered within their split
            number = sum(s["name"].startswith(f"{item.split}-") for s in self._shards)
            name = f"{item.split}-{number:06d}.tar"
            self._tar = _Tar(self.folder / name)
            self._shards.append({"name": name})
        offset, *_ = [self._tar.add(key, suffix, data) for suffix, data in members.items()]
        split, shard = list(self.images).index(item.split), len(self._shards) - 1
        checksum = zlib.crc32(picture.data)
        self._rows.append((split, label, shard, offset, len(picture.data), checksum))
        if item.super_class is not None:
            number = self._super_classes.setdefault(item.super_class, len(self._super_classes))
            self._super_class.append(number)
        self.images[item.split] += 1
        self.classes[item.split].add(label)

    def _finish_shard(self) -> None:
        if self._tar is None:
            return
        self._shards[-1] |= self._tar.finish()
        self._tar = None

    def _index(self) -> NDArray[np.void]:
        rows = np.array(self._rows, ROW)
        if not self._super_class:
            return rows
        wide = np.empty(len(rows), [*ROW.descr, SUPER_CLASS])
        for name in ROW.names or ():
            wide[name] = rows[name]
        wide[SUPER_CLASS[0]] = self._super_class
        return wide

    def finish(self, source: str, notes: Sequence[str], skipped: Sequence[str]) -> dict[str, Any]:
        """Write the index and the manifest; return the manifest. It comes last, because a folder with
        a manifest counts as complete."""
        self._finish_shard()
        return write_index(
            self.folder,
            self._index(),
            {
                "version": VERSION,
                "source": source,
                "splits": {
                    split: {"classes": len(self.classes[split]), "images": images}
                    for split, images in self.images.items()
                },
                "shards": self._shards,
                "notes": list(notes),
                "skipped": list(skipped),
                "classes": list(self.labels),
                **({"super_classes": list(self._super_classes)} if self._super_classes else {}),
            },
        )


def write_index(folder: Path, rows: NDArray[np.void], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write index.npy and, after it, the manifest, which has its checksum; return the manifest."""
    index = io.BytesIO()
    np.save(index, rows, allow_pickle=False)
    write_synced(folder / "index.npy", index.getvalue())
    checksum = {"sha256": hashlib.sha256(index.getvalue()).hexdigest()}
    manifest: dict[str, Any] = {"format": FORMAT, **about, "index": checksum}
    manifest["sha256"] = manifest_sha256(manifest)
    write_synced(folder / "manifest.json", _json(manifest, indent=1))
    return manifest
