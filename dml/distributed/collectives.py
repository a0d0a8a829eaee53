"""What the processes of a run tell each other for the loss: few, fused all-gathers, and their bytes.

Alone, without torch.distributed or with one process, nothing is sent and nothing is copied.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """The processes of the default group, and what this one has sent to the others.

    bytes_sent counts a ring: W processes pass on what each of them brought, W - 1 times.
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
        """Every tensor of every process, stacked: W x its shape. One collective for them all.

        Every process brings the same shapes and dtypes; `agree` makes sure of it.
        """
        if self.size == 1:
            return [x[None] for x in tensors]
        mine = torch.cat([x.flatten().view(torch.uint8) for x in tensors])
        everyone = mine.new_empty(self.size, len(mine))
        dist.all_gather(list(everyone.unbind(0)), mine)
        self.collectives += 1
        self.bytes_sent += (self.size - 1) * len(mine)
        sizes = [x.numel() * x.element_size() for x in tensors]
        return [
            part.contiguous().view(x.dtype).view(self.size, *x.shape)
            for part, x in zip(torch.split(everyone, sizes, dim=1), tensors, strict=True)
        ]

    def agree(self, mine: str, problem: str | None) -> None:
        """Raise the same ValueError on all processes if one of them has a problem, or if they did
        not all bring the same; otherwise a collective would hang or mix up their data.

        They ask each other in the first step only. Later a process that brings something else
        fails on its own, before it sends anything, and the launcher ends the others.
        """
        if self.size > 1 and self.agreed is None:
            everyone: list[tuple[str, str | None]] = [("", None)] * self.size
            dist.all_gather_object(everyone, (mine, problem))
            problems = [f"process {r}: {p}" for r, (_, p) in enumerate(everyone) if p is not None]
            problem = "; ".join(problems) or None
            if problem is None and len({what for what, _ in everyone}) > 1:
                brought = "; ".join(f"process {r}: {what}" for r, (what, _) in enumerate(everyone))
                problem = f"every process must bring the same shapes and types ({brought})"
        elif self.size > 1 and problem is None and mine != self.agreed:
            problem = (
                f"process {self.rank} brought {mine}, but in the first step {self.agreed}; "
                "every step must bring the same"
            )
        if problem is not None:
            raise ValueError(problem)
        self.agreed = mine
