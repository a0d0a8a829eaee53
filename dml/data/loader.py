"""Batches made by worker processes, in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dml.data.batches import ImageBatches


def loader(
    batches: ImageBatches,
    order: Sequence[int],
    workers: int = 0,
    prefetch: int = 2,
    context: str | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches in order, made by worker processes, each with `prefetch` of them ready.

    Every process has its own share already. context: how workers start, such as "spawn".
    """
    if workers == 0:
        for n in order:
            images, others = batches[n]
            yield images.pin_memory() if torch.cuda.is_available() else images, others
        return
    # One more than there are batches on the way: when the loader hands out a batch, it has asked for
    # the next already.
    slots = Slots(batches, workers * prefetch + 1)
    ready = DataLoader(
        slots,
        sampler=((place % len(slots.memory), n) for place, n in enumerate(order)),
        batch_size=None,  # a sample is a whole batch
        num_workers=workers,
        prefetch_factor=prefetch,
        generator=torch.Generator(),  # or every iteration would take a number from torch's own
        worker_init_fn=ignore_signals,
        collate_fn=as_it_is,
        multiprocessing_context=context,
    )
    yield from (slots.take(*batch) for batch in ready)


class Slots(Dataset[tuple[int, NDArray[Any]]]):
    """Memory that the processes share and use again: to make it anew for every batch would cost a
    worker 5% of its time."""

    def __init__(self, batches: ImageBatches, count: int) -> None:
        size = batches.spec.size
        self.batches = batches
        self.memory = torch.empty(count, batches.most, size, size, 3, dtype=torch.uint8)
        self.memory.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, NDArray[Any]]:
        """Puts batch n into a slot."""
        slot, n = where
        return slot, self.batches.into(self.memory[slot].numpy(), n).numpy()

    def take(self, slot: int, others: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """A copy of what is in a slot, which is then free."""
        images = self.memory[slot, : len(others)]
        images = images.pin_memory() if torch.cuda.is_available() else images.clone()
        return images, torch.from_numpy(others)


def as_it_is(batch: Any) -> Any:
    return batch


def ignore_signals(worker: int) -> None:
    """A scheduler signals all processes of a job. The training process decides what to do about it,
    and ends its workers itself."""
    for s in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(s, signal.SIG_IGN)
