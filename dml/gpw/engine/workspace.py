"""What one step leaves for the next: buffers by name, and how the last batch was grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dml.gpw.grouping import Groups


class Workspace:
    """Allocating a large buffer takes as long as an operation on it, so buffers are reused.

    groups: those of the last batch; batches of P classes x M images are all grouped alike.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.groups: Groups | None = None

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
