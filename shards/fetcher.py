"""A process that downloads files into a cache before they are needed.

It is only faster with it than without: a process that reads a shard that is not there downloads it itself.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection

from tqdm import tqdm

from shards.cache import Cache, File
from shards.item import ShardError
from shards.output import Progress
from shards.workers import end_with_parent

DOWNLOADS = 4  # at a time
AGAIN = 0.2  # seconds until a file that another process downloads is looked for again


class Fetcher:
    """Downloads the files that are wanted, the first ones first, in a process of its own."""

    def __init__(self, cache: Cache) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy the memory of a training
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, cache), daemon=True)
        self._process.start()
        other.close()

    def want(self, files: Sequence[File], no_longer: Iterable[File] = ()) -> None:
        """The files that are needed next, in order, and those that may leave the cache."""
        with suppress(BrokenPipeError):  # it was killed: whoever reads a file downloads it
            self._connection.send((list(files), list(no_longer)))

    def has_failed(self) -> bool:
        """Whether a file cannot be had; the process that reads it says why."""
        return self._connection.poll() or not self._process.is_alive()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, cache: Cache) -> None:
    # The training process decides what follows from a signal, and ends this one.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    end_with_parent()
    # tqdm's own lock is also a semaphore between processes, which would stay behind
    tqdm.set_lock(threading.RLock())
    downloads = _Downloads(cache, connection)
    for _ in range(DOWNLOADS):
        threading.Thread(target=downloads.work, daemon=True).start()
    try:
        while True:
            files, no_longer = connection.recv()
            cache.release(no_longer)
            cache.keep(files)
            downloads.want(files)
    except EOFError:
        return


class _Downloads:
    def __init__(self, cache: Cache, connection: Connection) -> None:
        self.cache, self.connection = cache, connection
        self.wanted: list[File] = []
        self.busy: set[File] = set()
        self.refused: set[File] = set()
        self.changed = threading.Condition()

    def want(self, files: list[File]) -> None:
        with self.changed:
            first = not self.wanted
            self.wanted = files
            self.changed.notify_all()
        if first and (missing := [file for file in files if not self.cache.has(file)]):
            threading.Thread(target=self.show, args=(missing,), daemon=True).start()

    def show(self, missing: list[File]) -> None:
        """A bar, or a line per minute, until the files that were wanted first are there."""
        with closing(Progress(len(missing), "shard", label="download", leave=False)) as progress:
            while missing and not self.refused:
                there = [file for file in missing if self.cache.has(file)]
                progress.update(len(there))
                missing = [file for file in missing if file not in there]
                threading.Event().wait(AGAIN)

    def next(self) -> File:
        """The first file that is wanted and that nobody here downloads; waits until there is one."""
        with self.changed:
            while True:
                for file in self.wanted:
                    if file not in self.busy | self.refused and not self.cache.has(file):
                        self.busy.add(file)
                        return file
                self.changed.wait(AGAIN * 5)

    def work(self) -> None:
        while True:
            file, ours = self.next(), False
            try:
                ours = self.cache.try_fetch(file)
            except ShardError:
                # The process that reads it meets the same error, and tells it.
                with self.changed:
                    self.refused.add(file)
                    self.connection.send("refused")
            finally:
                self.busy.discard(file)
            if not ours:
                threading.Event().wait(AGAIN)
