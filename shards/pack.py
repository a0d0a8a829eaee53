"""Writes shards: the same images give the same bytes, and the folder appears only when complete."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shards.files import sync_file, sync_folder, try_lock, write_synced
from shards.images import Picture
from shards.index import FORMAT, ROW, SHARD_NAME, VERSION, manifest_sha256
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


def _member(name: str, data: bytes) -> bytes:
    header = tarfile.TarInfo(name)  # mtime, uid and gid 0, mode 644
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


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
        self._shards: list[dict[str, Any]] = []
        self._tar: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def close(self) -> None:
        if self._tar:
            self._tar.close()

    def add(self, item: Item, picture: Picture) -> None:
        if item.split not in self.images:
            self._finish_shard()
            self.images[item.split] = 0
            self.classes[item.split] = set()
        label = self.labels.setdefault(item.class_name, len(self.labels))
        key = f"{len(self._rows):08d}"
        about = {
            "class": item.class_name,
            "split": item.split,
            "source": item.name,
            "extra": dict(item.extra),
        }
        image = _member(f"{key}.{picture.suffix}", picture.data)
        rest = _member(f"{key}.cls", b"%d" % label) + _member(f"{key}.json", _json(about))
        if self._tar and self._tar.tell() + len(image) + len(rest) > self.max_bytes:
            self._finish_shard()
        if not self._tar:
            # shards are numbered within their split
            number = sum(s["name"].startswith(f"{item.split}-") for s in self._shards)
            name = f"{item.split}-{number:06d}.tar"
            self._tar, self._hash = (self.folder / name).open("xb"), hashlib.sha256()
            self._shards.append({"name": name})
        offset = self._tar.tell() + tarfile.BLOCKSIZE
        split, shard = list(self.images).index(item.split), len(self._shards) - 1
        checksum = zlib.crc32(picture.data)
        self._rows.append((split, label, shard, offset, len(picture.data), checksum))
        self._put(image + rest)
        self.images[item.split] += 1
        self.classes[item.split].add(label)

    def _put(self, data: bytes) -> None:
        assert self._tar is not None
        self._tar.write(data)
        self._hash.update(data)

    def _finish_shard(self) -> None:
        if self._tar is None:
            return
        self._put(bytes(2 * tarfile.BLOCKSIZE))  # two empty blocks end a tar
        sync_file(self._tar)
        self._shards[-1] |= {"bytes": self._tar.tell(), "sha256": self._hash.hexdigest()}
        self._tar.close()
        self._tar = None

    def finish(self, source: str, notes: Sequence[str], skipped: Sequence[str]) -> dict[str, Any]:
        """Write the index and the manifest; return the manifest. It comes last, because a folder with
        a manifest counts as complete."""
        self._finish_shard()
        index = io.BytesIO()
        np.save(index, np.array(self._rows, ROW), allow_pickle=False)
        write_synced(self.folder / "index.npy", index.getvalue())
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "source": source,
            "splits": {
                split: {"classes": len(self.classes[split]), "images": images}
                for split, images in self.images.items()
            },
            "index": {"sha256": hashlib.sha256(index.getvalue()).hexdigest()},
            "shards": self._shards,
            "notes": list(notes),
            "skipped": list(skipped),
            "classes": list(self.labels),
        }
        manifest["sha256"] = manifest_sha256(manifest)
        write_synced(self.folder / "manifest.json", _json(manifest, indent=1))
        return manifest
