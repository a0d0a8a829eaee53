"""Batches made by worker processes, in order.

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

from dml.data.batches import ImageBatches
from dml.distributed.signals import SIGNALS
from shards.workers import end_with_parent


def loader(
    batches: ImageBatches,
    order: Sequence[int],
    workers: int = 0,
    prefetch: int = 2,
    context: str | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches in order. Each worker process keeps `prefetch` of them ready.

    `batches` is the share of this training process. context: how workers start, such as "spawn".
    """
    if workers == 0:
        for n in order:
            images, numbers = batches[n]
            yield images.pin_memory() if torch.cuda.is_available() else images, numbers
        return
    # One slot more than batches under way: the DataLoader asks for another batch before it hands one
    # out.
    slots = Slots(batches, workers * prefetch + 1)
    ready = DataLoader(
        slots,
        sampler=((place % len(slots.memory), n) for place, n in enumerate(order)),
        batch_size=None,  # a sample is a whole batch
        num_workers=workers,
        prefetch_factor=prefetch,
        generator=torch.Generator(),  # else every iteration would draw from torch's global one
        worker_init_fn=set_up_worker,
        collate_fn=unchanged,
        multiprocessing_context=context,
    )
    yield from (slots.take(*batch) for batch in ready)


class Slots(Dataset[tuple[int, NDArray[Any]]]):
    """Memory that the processes share and reuse for every batch.

    A plain DataLoader, which allocates it per batch, takes 15% more time on Cars-196 at 96 px and 35%
    more on icons at 32 px (one worker, batches of 80; docs/log.md).
    """

    def __init__(self, batches: ImageBatches, count: int) -> None:
        size = batches.spec.size
        self.batches = batches
        self.memory = torch.empty(count, batches.most, size, size, 3, dtype=torch.uint8)
        self.memory.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, NDArray[Any]]:
        """Decode batch n into a slot."""
        slot, n = where
        return slot, self.batches.into(self.memory[slot].numpy(), n).numpy()

    def take(self, slot: int, numbers: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Copy a batch out of its slot, which is then free."""
        images = self.memory[slot, : len(numbers)]
        images = images.pin_memory() if torch.cuda.is_available() else images.clone()
        return images, torch.from_numpy(numbers)


def unchanged(batch: Any) -> Any:
    return batch


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
