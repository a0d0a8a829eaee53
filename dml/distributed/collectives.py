"""The collectives of the loss: few, fused all-gathers and a reduce-scatter, with a count of their bytes.

With one process, or without torch.distributed, nothing is sent and nothing is copied.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """The default process group, and what this process has sent to the others.

    bytes_sent counts a ring: every process passes on W - 1 contributions.
    """

    def __init__(self) -> None:
        self.collectives = 0
        self.bytes_sent = 0
        self.agreed: str | None = None

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.size > 1 else 0

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """All-gather several tensors in one collective; each comes back as W x its shape.

        Shapes and dtypes must be the same on every process; `agree` checks that.
        """
        tensors = tuple(x.contiguous() for x in tensors)
        if self.size == 1:
            return [x[None] for x in tensors]
        parts = [x.flatten().view(torch.uint8) for x in tensors]
        mine = parts[0] if len(parts) == 1 else torch.cat(parts)
        everyone = mine.new_empty(self.size * len(mine))
        dist.all_gather_single(everyone, mine)  # all_gather_into_tensor, until torch 2.12
        self.collectives += 1
        self.bytes_sent += (self.size - 1) * len(mine)
        kinds = [(x.dtype, x.numel() * x.element_size()) for x in tensors]
        parts, rest = [], everyone.view(self.size, -1)
        for (_, size), alike in groupby(kinds):  # one copy for those of the same type and size
            n = len(list(alike))
            some, rest = rest[:, : n * size], rest[:, n * size :]
            parts += some.view(self.size, n, size).transpose(0, 1).contiguous()
        return [
            part.view(x.dtype).view(self.size, *x.shape)
            for part, x in zip(parts, tensors, strict=True)
        ]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over all processes of their x, W b x ..., of which each process gets its own b rows."""
        if self.size == 1:
            return x
        own = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_single(own, x.contiguous())  # reduce_scatter_tensor, until torch 2.12
        self.collectives += 1
        self.bytes_sent += (self.size - 1) * own.numel() * own.element_size()
        return own

    def everyone(self, mine: str | None) -> list[str | None]:
        """What each process has to say. It waits, so it is not for every step."""
        found = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(found, mine)
        return found

    def agree(self, mine: str, problem: str | None) -> None:
        """Raise the same ValueError on all processes if one of them has a problem, or if their inputs
        differ; otherwise a collective would hang or mix up data.

        The processes compare inputs in the first step only. Later a process with another input fails
        on its own, before it sends anything, and the launcher ends the others.
        """
        if self.size > 1 and self.agreed is None:
            everyone: list[tuple[str, str | None]] = [("", None)] * self.size
            dist.all_gather_object(everyone, (mine, problem))
            problems = [f"process {r}: {p}" for r, (_, p) in enumerate(everyone) if p is not None]
            problem = "; ".join(problems) or None
            if problem is None and len({what for what, _ in everyone}) > 1:
                brought = "; ".join(f"process {r}: {what}" for r, (what, _) in enumerate(everyone))
                problem = f"every process must give the same shapes and types ({brought})"
        elif self.size > 1 and problem is None and mine != self.agreed:
            problem = (
                f"process {self.rank} gave {mine}, but in the first step {self.agreed}; every step must "
                "give the same"
            )
        if problem is not None:
            raise ValueError(problem)
        self.agreed = mine
