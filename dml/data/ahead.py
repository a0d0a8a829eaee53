"""Shards that come from a server, downloaded in the order in which the coming batches need them.

Only the first process of a machine looks ahead, for all processes of it: the others find the shards in
the cache. With a limit the window is as many coming batches as the cache can hold; what no batch of the
window needs leaves first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from dml.data.batches import EvalBatches, TrainBatches
from dml.distributed.workers import ranks_of_machine
from shards.cache import Cache, File
from shards.fetcher import Fetcher
from shards.item import ShardError

LOOK = 32  # batches at most that are looked at between two batches


class Ahead:
    """order: the numbers of the batches, as the loader gets them."""

    def __init__(
        self, batches: TrainBatches | EvalBatches, order: Sequence[int], cache: Cache | None
    ) -> None:
        self.batches, self.order, self.cache = batches, order, cache
        self.window: deque[list[File]] = deque()  # what the batches from place `first` on need
        self.needed = Counter[
            File
        ]()  # by how many batches of the window, in the order of first need
        self.first = self.end = 0  # places in the order
        self.fetcher: Fetcher | None = None
        first = ranks_of_machine(batches.rank, batches.size)[0] == batches.rank
        if cache is None or cache.ranges or not first:
            return
        self.all_files = batches.files(batches.all_rows)
        if cache.limit is None and all(map(cache.has, self.all_files)):
            return
        self._grow()
        if self.needed:
            self.fetcher = Fetcher(cache)
            self.fetcher.want(list(self.needed))

    def files_of(self, place: int) -> list[File]:
        return self.batches.files(self.batches.rows_on_machine(self.order[place]))

    def refuse_small_cache(self) -> None:
        """ShardError if the cache cannot hold what a single batch needs."""
        if self.fetcher is None or self.cache is None or self.cache.limit is None:
            return
        size = sum(file.size for file in self.window[0])
        if size > self.cache.limit:
            self.close()
            raise ShardError(
                f"data.cache_gib allows {self.cache.limit:,} bytes, but the shards that one batch needs "
                f"on a machine have {size:,}: raise it, or set data.remote=range"
            )

    def is_ready(self) -> bool:
        """Whether the first batch need not wait for its shards, or waits in vain."""
        if self.fetcher is None or self.cache is None:
            return True
        return all(map(self.cache.has, self.window[0])) or self.fetcher.has_failed()

    def at(self, place: int) -> None:
        """The batches before this place in the order have been used."""
        if self.fetcher is None or self.cache is None or self._has_seen_all():
            return
        before = list(self.needed)
        while self.cache.limit is not None and self.first < place and self.window:
            self.needed.subtract(self.window.popleft())
            self.first += 1
        self.needed = +self.needed  # without those that are needed no more
        self._grow()
        if list(self.needed) != before:
            self.fetcher.want(list(self.needed), [f for f in before if f not in self.needed])

    def _grow(self) -> None:
        """Take more batches into the window, as many as the cache can hold."""
        assert self.cache is not None
        limit, size = self.cache.limit, sum(file.size for file in self.needed)
        for _ in range(LOOK):
            if self.end == len(self.order) or self._has_seen_all():
                return
            files = self.files_of(self.end)
            size += sum(file.size for file in files if file not in self.needed)
            if limit is not None and size > limit and self.window:
                return
            self.window.append(files)
            self.needed.update(files)
            self.end += 1

    def _has_seen_all(self) -> bool:
        assert self.cache is not None
        return self.cache.limit is None and len(self.needed) == len(self.all_files)

    def close(self) -> None:
        if self.fetcher is not None:
            self.fetcher.close()
            self.fetcher = None
