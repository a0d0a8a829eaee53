"""A map over processes that keeps the order, holds little in memory and stops cleanly."""

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

CHUNK = 16  # tasks sent together: one task a message costs more than a small image's decoding
AHEAD = 3  # chunks a worker; what is done but not yet asked for waits in memory


def default_workers() -> int:
    return min(8, available_cores())


def _end_with_parent() -> None:
    """A pool's workers outlive a parent that is killed; these do not."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _each(function: Callable[[Task], Result], chunk: list[Task]) -> list[Result]:
    return [function(task) for task in chunk]


def _start(workers: int) -> ProcessPoolExecutor:
    # spawn, not fork: the same on every platform, and no locks of threads copied half-way
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
    # a terminal sends Ctrl-C to workers as well; they inherit that it is the parent's business
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(workers):
        pool.submit(int)  # the pool starts a process when it is asked to work
    signal.signal(signal.SIGINT, before)
    return pool


def in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Generator[Result, None, None]:
    """map(function, tasks), by worker processes if there is more than one."""
    if workers == 1:
        yield from map(function, tasks)
        return
    pool, tasks = _start(workers), iter(tasks)
    waiting: deque[Future[list[Result]]] = deque()
    try:
        while chunk := list(islice(tasks, CHUNK)):
            waiting.append(pool.submit(_each, function, chunk))
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
