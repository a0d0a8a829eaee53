"""Where the seconds of a step go."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds spent in the phases of a step, and in the whole run.

    On a GPU a phase is measured on the GPU, between two events, and nobody waits for it before the
    seconds are asked for. What the CPU does while the GPU is busy, such as taking the next batch from
    the loader, then takes no time: seconds of data are those in which the GPU waits for data.
    before: seconds of the run before it was resumed.
    """

    def __init__(self, device: torch.device, before: float = 0.0) -> None:
        self.device, self.started = device, time.monotonic() - before
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: deque[tuple[str, Any, Any]] = deque()  # phases that the GPU may not have ended
        self.steps = 0
        self.bytes_sent = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self.seconds[phase] += time.perf_counter() - start
            return
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        yield
        last.record()
        self.events.append((phase, first, last))
        while self.events and self.events[0][2].query():
            self.add_oldest()

    def add_oldest(self) -> None:
        phase, first, last = self.events.popleft()
        self.seconds[phase] += first.elapsed_time(last) / 1000

    def total(self) -> float:
        return time.monotonic() - self.started

    def timing(self, batch_size: int, bytes_sent: int) -> dict[str, float]:
        """What a step took, on average since the last call. bytes_sent: since the beginning."""
        if self.events:
            self.events[-1][2].synchronize()
        while self.events:
            self.add_oldest()
        timing = {
            "images_per_second": self.steps * batch_size / sum(self.seconds.values()),
            **{f"seconds_{phase}": s / self.steps for phase, s in self.seconds.items()},
            "bytes_sent": (bytes_sent - self.bytes_sent) / self.steps,
            "memory_bytes": memory_bytes(self.device),
        }
        self.seconds.clear()
        self.steps, self.bytes_sent = 0, bytes_sent
        return timing


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this process: of the GPU, or without one of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
