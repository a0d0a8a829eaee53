"""A folder that keeps files of servers, one copy per machine, shared by all of its processes.

    CACHE/host_path-1f0c93ab77d2/                       of one address; the hash tells apart what is cut off
        manifest.json  index.npy
        train-000000-5be1c2f09a41.tar                   the hash is that of its content
        .train-000000-5be1c2f09a41.tar.256000000.part   a download that goes on where it ended
        .train-000000-5be1c2f09a41.tar.lock             held by the process that downloads

A file has its name only when it is complete and has its checksum. What leaves first when the cache has
reached its limit is what has the oldest time of modification.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shards.files import is_locked, open_lock, sync_file, sync_folder, try_lock, write_whole
from shards.item import ShardError
from shards.remote import Patience, Silent, Unreachable, content, open_range

BLOCK = 2**20
AGAIN = 0.2  # seconds until room is looked for again
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class File:
    """A file on a server, and what it must be."""

    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Cache:
    """limit: bytes of all files. ranges: shards are not kept, and images are read one by one."""

    folder: Path
    limit: int | None = None
    ranges: bool = False

    def folder_of(self, url: str) -> Path:
        """Where the files below an address are kept."""
        parts = urlsplit(url)
        readable = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{parts.netloc}{parts.path}").strip("._")
        return self.folder / f"{readable[-100:]}-{_hash(url.rstrip('/'))}"

    def path(self, file: File) -> Path:
        folder, name = _parted(file.url)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.removesuffix(".tar"))[-100:]
        return self.folder_of(folder) / f"{stem}-{file.sha256[:12]}.tar"

    def manifest(self, url: str, most: int) -> Path:
        """A manifest, as the server has it now."""
        folder, name = _parted(url)
        data, path = content(url, most), self.folder_of(folder) / name
        with self._writing(path):
            if not path.exists() or path.read_bytes() != data:
                write_whole(path, data)
        return path

    def index(self, url: str, sha256: str, most: int) -> Path:
        """An index, which is downloaded if the one that is kept is another."""
        folder, name = _parted(url)
        path = self.folder_of(folder) / name
        with self._writing(path):
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                write_whole(path, content(url, most))
        return path

    def has(self, file: File) -> bool:
        return self.path(file).exists()

    def fetch(self, file: File) -> Path:
        """The path of a file, which this process downloads unless another one has, or does."""
        path = self.path(file)
        while not path.exists():
            with self._writing(path):
                if not path.exists():
                    self._download(file, path)
        return path

    def try_fetch(self, file: File) -> bool:
        """As `fetch`, but without waiting for another process that downloads it: returns False."""
        path = self.path(file)
        if path.exists():
            return True
        with self._writing(path, wait=False) as ours:
            if ours and not path.exists():
                self._download(file, path)
            return ours

    def keep(self, files: Iterable[File]) -> None:
        """These files leave last."""
        self._touch(files, time.time())

    def release(self, files: Iterable[File]) -> None:
        """These files leave first."""
        self._touch(files, 0)

    def _touch(self, files: Iterable[File], when: float) -> None:
        for file in files:
            try:
                os.utime(self.path(file), (when, when))
            except FileNotFoundError:  # not here yet, or gone
                continue

    @contextmanager
    def _writing(self, path: Path, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of a path; without `wait` yield False if another process holds it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_lock(path.with_name(f".{path.name}.lock")) as lock:
                yield try_lock(lock, patience=float("inf") if wait else 0)
        except OSError as error:
            what = f"cannot be written ({error.strerror}): set data.cache to another folder"
            if error.errno in FULL:
                what = (
                    f"is full, {path.name} does not fit: make room, set data.cache_gib, or set "
                    "data.remote=range"
                )
            raise ShardError(f"the cache {self.folder} {what}") from None

    def _download(self, file: File, path: Path) -> None:
        part = path.with_name(f".{path.name}.{file.size}.part")
        resumed = part.exists()
        found = self._receive(file, part)
        if found != file.sha256 and resumed:  # the first half may be of another time
            found = self._receive(file, part)
        if found != file.sha256:
            raise ShardError(
                f"{file.url} differs from its checksum in the manifest (SHA-256 {found[:12]}... instead "
                f"of {file.sha256[:12]}...): it was not used; copy or build the shards again"
            )
        part.replace(path)
        sync_folder(path.parent)

    def _receive(self, file: File, part: Path) -> str:
        """Download what is missing of a part; return the checksum of the whole. A part that is wrong or
        does not fit is removed."""
        self.make_room(file.size, part)
        digest, patience = hashlib.sha256(), Patience(file.url)
        try:
            with part.open("a+b") as out:
                out.seek(0)
                while block := out.read(BLOCK):
                    digest.update(block)
                while out.tell() < file.size:
                    try:
                        with open_range(file.url, out.tell()) as stream:
                            while out.tell() <= file.size and (block := stream.read(BLOCK)):
                                out.write(block)
                                digest.update(block)
                                patience.heard()
                        if out.tell() < file.size:
                            raise ShardError(
                                f"{file.url} is cut short ({out.tell():,} bytes, but the manifest says "
                                f"{file.size:,}): copy or build the shards again"
                            )
                    except Unreachable as error:
                        out.flush()
                        patience.wait(error)
                sync_file(out)
        except (OSError, ShardError) as error:
            if not isinstance(error, Silent):  # a server that is away may be asked again later
                part.unlink(missing_ok=True)
            raise
        if digest.hexdigest() != file.sha256:
            part.unlink(missing_ok=True)
        return digest.hexdigest()

    def make_room(self, size: int, part: Path) -> None:
        """Remove files until the limit allows a download of `size` bytes, perhaps after those that are
        under way, which count as complete."""
        if self.limit is None:
            return
        if size > self.limit:
            raise ShardError(
                f"the cache {self.folder} may hold {self.limit:,} bytes, but {part.name} has {size:,}: "
                "raise data.cache_gib, or set data.remote=range"
            )
        while not self._try_to_make_room(size, part):
            time.sleep(AGAIN)

    def _try_to_make_room(self, size: int, part: Path) -> bool:
        assert self.limit is not None
        with open_lock(self.folder / ".room.lock") as lock:
            try_lock(lock, patience=float("inf"))
            others = {path: each for path in self.folder.glob("*/*.tar") if (each := _stat(path))}
            sizes = {path: each.st_size for path, each in others.items()}
            under_way = 0
            for path in set(self.folder.glob("*/.*.part")) - {part}:
                *name, expected, _ = path.name.split(".")
                if is_locked(path.with_name(f"{'.'.join(name)}.lock")):
                    under_way += int(expected)
                elif each := _stat(path):  # left by a process that has ended
                    others[path], sizes[path] = each, each.st_size
            if size + under_way > self.limit:
                return False
            total = size + under_way + sum(sizes.values())
            for path in sorted(others, key=lambda path: others[path].st_mtime):
                if total <= self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= sizes[path]
            part.touch()  # the next process that makes room counts it
            return True


def _parted(url: str) -> tuple[str, str]:
    """The address of a file's folder, and its name; what follows a question mark belongs to neither."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    return f"{parts.scheme}://{parts.netloc}{folder}", name


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # another process has removed it
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
