"""Compares shards with their checksums in the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from shards.cores import available_cores
from shards.index import AGAIN, Index
from shards.item import ShardError
from shards.output import Progress


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def differing(index: Index, shards: Iterable[int]) -> Iterator[tuple[int, str]]:
    """The shards that differ, and how, with a progress bar. Those that are still on their server are
    left out: they are checked when they come."""
    there = [shard for shard in shards if index.is_here(shard)]
    with (
        ThreadPoolExecutor(min(4, available_cores())) as threads,
        closing(Progress(len(there), "shard", label="checksums")) as progress,
    ):
        for shard, problem in zip(
            there, threads.map(lambda n: _problem(index, n), there), strict=True
        ):
            progress.update()
            if problem:
                yield shard, problem


def _problem(index: Index, shard: int) -> str | None:
    try:
        found = sha256_of(index.shards[shard])
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    same = found == index.manifest["shards"][shard]["sha256"]
    return None if same else "differs from its checksum in the manifest"


def check_shards(index: Index, part: int = 0, parts: int = 1) -> None:
    """ShardError if a shard differs from its checksum. part: of the shards, which processes share out."""
    for shard, problem in differing(index, range(part, len(index.places), parts)):
        path = index.shards[shard]
        fix = AGAIN if index.places[shard] == path else "remove it, and it is fetched again"
        raise ShardError(f"{path} {problem}: {fix}")
