"""Atomic writes, bounded reads, syncing to disk and file locks, for all programs.

Nothing is written through a symbolic link: one that somebody else has put where a program writes would
make it overwrite another file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path
from typing import IO

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(path: Path, most: int = MEMORY // 2) -> None:
    """OSError if a file has more than `most` bytes or is a device, which has no end.

    A sparse file can be larger than any disk: a program that read it would run out of memory.
    """
    found = path.stat()
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
    if found.st_size > most:
        reason = f"it has {found.st_size:,} bytes, more than the {most:,} that may be read"
        raise OSError(errno.EFBIG, reason, str(path))


def read_bounded(path: Path, most: int = MEMORY // 2) -> bytes:
    """The content of a regular file; OSError as `check_size`."""
    check_size(path, most)
    with open(path, "rb", opener=regular) as file:
        return file.read()


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file, and return when it is on disk."""
    with path.open("xb") as file:
        file.write(data)
        sync_file(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write a temporary file, sync it and rename it: a reader sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; of a symbolic link only the link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def sync_file(file: IO[bytes]) -> None:
    """Return when all that was written to an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open` that takes regular files only: a pipe would wait, a device has no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def no_follow(path: str | Path, flags: int) -> int:
    """An opener for `open` that takes regular files only, and no symbolic links."""
    try:
        return regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path)) from None


def open_lock(path: Path) -> IO[str]:
    """Open a lock file for `try_lock`; it is created if need be, and its content is never changed."""
    return open(path, "a", encoding="utf-8", opener=no_follow)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file; no file means no lock."""
    try:
        with open(path, encoding="utf-8", opener=no_follow) as file:
            return not try_lock(file, shared=True)
    except FileNotFoundError:
        return False


def try_lock(file: IO[str] | int, shared: bool = False, patience: float = 0) -> bool:
    """Lock a file until it is closed; return False if another process holds the lock, and keeps it
    for longer than `patience` seconds.

    Some cluster file systems have no locks. There it always returns True, because working without
    a lock is better than not working.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            continue
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return True
