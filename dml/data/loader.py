"""Batches made by worker processes, in order.

    batch n ──> parts of at most 64 images ──> workers decode them into slots of shared memory
    batch n <── copied out of the slots, in order, into memory of this process (pinned for a GPU)

So several workers share a batch, and the shared memory (/dev/shm) does not grow with it.
Workers ignore the signals that ask a run to leave, so they are killed instead when Python ends, and end
by themselves when their parent was killed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dml.data.batches import ImageBatches, own_share
from dml.data.forking import fork_context
from dml.distributed.signals import SIGNALS
from shards.workers import end_with_parent

Batch = tuple[Tensor, Tensor]  # images, and a number for each
PART = 64  # images at most that a worker makes at a time ...
PART_BYTES = 16 * 2**20  # ... and bytes, unless a single image has more
SHARED_MEMORY = 512 * 2**20  # bytes for all workers of a training process


def loader(
    batches: ImageBatches,
    order: Sequence[int],
    workers: int = 0,
    prefetch: int = 2,
    context: str | None = None,
) -> Iterator[Batch]:
    """Yield the batches in order. `batches` is the share of this training process.

    prefetch: each worker process keeps at least so many parts ready, and all of them together so many
    batches, as far as SHARED_MEMORY allows. context: how workers start, such as "spawn", if they are not
    forked.
    """
    if not order:
        return
    if workers == 0:
        for n in order:
            images = empty_images(batches, n)
            yield images, batches.into(images.numpy(), n, range(len(images)))
        return
    slots = Slots(batches, order, workers, prefetch)
    ready = iter(
        DataLoader(
            slots,
            sampler=slots.plan(order),
            batch_size=None,  # a sample is a whole part
            num_workers=workers,
            prefetch_factor=slots.ahead,
            generator=torch.Generator(),  # else every iteration would draw from torch's global one
            worker_init_fn=set_up_worker,
            collate_fn=unchanged,
            multiprocessing_context=context or fork_context(),
        )
    )
    for n in order:
        images, numbers = empty_images(batches, n), []
        for part in parts_of(batches, n):
            slot, own = next(ready)
            images[part.start : part.stop] = slots.memory[slot, : len(part)]  # the slot is free now
            numbers.append(torch.from_numpy(own))
        yield images, torch.cat(numbers)


def empty_images(batches: ImageBatches, n: int) -> Tensor:
    """Memory for batch n. For a GPU it is pinned: torch keeps pinned memory that is no longer used,
    and hands it out again once the copies from it have ended."""
    spec, pinned = batches.spec, torch.cuda.is_available()
    return torch.empty(batches.count(n), *spec.shape, dtype=spec.tensor_dtype, pin_memory=pinned)


def part_size(batches: ImageBatches) -> int:
    """Images at most in a part."""
    return max(1, min(batches.most, PART, PART_BYTES // batches.spec.bytes))


def parts_of(batches: ImageBatches, n: int) -> list[range]:
    """The positions of batch n in parts of nearly equal size."""
    count = batches.count(n)
    parts = max(1, -(-count // part_size(batches)))
    return [own_share(count, i, parts) for i in range(parts)]


class Slots(Dataset[tuple[int, NDArray[Any]]]):
    """Memory that the processes share and reuse for every part. ahead: parts that a worker keeps ready.

    A plain DataLoader, which allocates it every time, takes 15% more time on Cars-196 at 96 px and 35%
    more on icons at 32 px (one worker, batches of 80; docs/log.md).
    """

    def __init__(
        self, batches: ImageBatches, order: Sequence[int], workers: int, prefetch: int
    ) -> None:
        most = part_size(batches)
        wanted = max(prefetch, -(-prefetch * len(parts_of(batches, order[0])) // workers))
        room = SHARED_MEMORY // (workers * most * batches.spec.bytes)
        self.batches, self.ahead = batches, max(1, min(wanted, room))
        # One slot more than parts under way: the DataLoader asks for another part before it hands one
        # out.
        slots = workers * self.ahead + 1
        spec = batches.spec
        self.memory = torch.empty(slots, most, *spec.shape, dtype=spec.tensor_dtype)
        self.memory.share_memory_()  # type: ignore[no-untyped-call]

    def plan(self, order: Sequence[int]) -> Iterator[tuple[int, int, range]]:
        """(slot, batch, part) of all parts in order; the slots take turns."""
        parts = ((n, part) for n in order for part in parts_of(self.batches, n))
        return ((place % len(self.memory), *each) for place, each in enumerate(parts))

    def __getitem__(self, where: tuple[int, int, range]) -> tuple[int, NDArray[Any]]:
        """Decode a part of batch n into a slot."""
        slot, n, part = where
        return slot, self.batches.into(self.memory[slot].numpy(), n, part).numpy()


def unchanged(part: Any) -> Any:
    return part


def set_up_worker(worker: int) -> None:
    """A scheduler signals all processes of a job; the training process decides what follows, and ends
    its workers itself."""
    for s in SIGNALS:
        signal.signal(s, signal.SIG_IGN)
    end_with_parent()


@atexit.register
def kill_workers() -> None:
    """Python terminates its daemonic child processes at exit and waits for them. Workers ignore that
    signal, so it would wait for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
