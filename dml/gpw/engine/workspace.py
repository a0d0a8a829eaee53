"""What one step leaves for the next: buffers by name, how S is cut, how the last batch was grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dml.cost import CPU, GIB, Cutting, on_gpu
from dml.gpw.grouping import Groups

ASSUMED_FREE = 32 * GIB  # on a device that does not say


class Workspace:
    """Allocating a large buffer takes as long as an operation on it, so buffers are reused.

    groups: those of the last batch; batches of P classes x M images are all grouped alike.
    norms: the lengths of the last batch's embeddings.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.groups: Groups | None = None
        self.norms: Tensor | None = None
        self.cuttings: dict[torch.device, Cutting] = {}

    def cutting(self, device: torch.device) -> Cutting:
        """How S is cut on a device. The first step asks for its free memory and the others keep to
        that."""
        if device not in self.cuttings:
            self.cuttings[device] = CPU if device.type == "cpu" else on_gpu(free_memory(device))
        return self.cuttings[device]

    def buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape with the type and device of `like`; its values are arbitrary."""
        size, buffer = math.prod(shape), self.buffers.get(name)
        if (
            buffer is None
            or len(buffer) < size
            or (buffer.dtype, buffer.device) != (like.dtype, like.device)
        ):
            buffer = self.buffers[name] = like.new_empty(size)
        return buffer[:size].view(*shape)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles are empty."""
        return Workspace, ()


def free_memory(device: torch.device) -> int:
    """Bytes. Deterministic runs must cut S in the same way when they are resumed, so they count on a
    part of the whole memory instead."""
    if device.type != "cuda":
        return ASSUMED_FREE
    free, total = torch.cuda.mem_get_info(device)
    return total // 4 if torch.are_deterministic_algorithms_enabled() else free
