"""Where the seconds of a step go."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds spent in the phases of a step, and in the whole run. On a GPU a phase ends when its work
    is done. before: seconds of the run before it was resumed."""

    def __init__(self, device: torch.device, before: float = 0.0) -> None:
        self.device, self.started = device, time.monotonic() - before
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.bytes_sent = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] += time.perf_counter() - start

    def total(self) -> float:
        return time.monotonic() - self.started

    def timing(self, batch_size: int, bytes_sent: int) -> dict[str, float]:
        """What a step took, on average since the last call. bytes_sent: since the beginning."""
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
