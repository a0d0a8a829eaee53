"""The next batch goes to the GPU while the GPU works on this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceCopies:
    """Copies to a device beside its other work: on a GPU they have a stream of their own.

    Neither method waits for the GPU if the tensors are in pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the device; use them after `end`."""
        with torch.cuda.stream(self.stream):  # None: as if there were no such line
            return [x.to(self.device, non_blocking=True) for x in tensors]

    def end(self, tensors: Sequence[Tensor]) -> None:
        """Let what the GPU is asked from here on wait until the copies are there."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for x in tensors:
            x.record_stream(current)  # its memory is in use until `current` is done with it
