"""A parallel map that keeps the order, bounds its memory and stops cleanly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from shards.cores import available_cores
from shards.item import ShardError

Task = TypeVar("Task")
Result = TypeVar("Result")

CHUNK = 16  # tasks per message: one message per task costs more than decoding a small image
AHEAD = 3  # chunks per worker that are under way or wait in memory


def default_workers() -> int:
    return min(8, available_cores())


def end_with_parent() -> None:
    """End this worker process when its parent has ended, however that happened; it would otherwise
    outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _each(function: Callable[[Task], Result], chunk: list[Task]) -> list[Result]:
    return [function(task) for task in chunk]


def _start(workers: int) -> ProcessPoolExecutor:
    # spawn, not fork: it works on every platform and copies no lock that a thread holds
    context = multiprocessing.get_context("spawn")
    try:
        pool = ProcessPoolExecutor(workers, context, initializer=end_with_parent)
    except OSError as error:  # its locks are in /dev/shm
        raise ShardError(
            f"worker processes cannot be started ({error.strerror}): make room in /dev/shm, or pass "
            "--workers 1"
        ) from None
    # A terminal sends Ctrl-C to the workers too. They inherit SIG_IGN, so only the parent reacts.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(workers):
        pool.submit(int)  # the pool starts a process for each task submitted
    signal.signal(signal.SIGINT, before)
    return pool


def in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int, chunk: int = CHUNK
) -> Generator[Result, None, None]:
    """map(function, tasks), in worker processes if `workers` is more than 1. chunk: tasks per message."""
    if workers == 1:
        yield from map(function, tasks)
        return
    pool, tasks = _start(workers), iter(tasks)
    waiting: deque[Future[list[Result]]] = deque()
    try:
        while some := list(islice(tasks, chunk)):
            waiting.append(pool.submit(_each, function, some))
            if len(waiting) > AHEAD * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise ShardError(
            "a worker process was killed (out of memory?): try fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
