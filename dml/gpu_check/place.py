"""Where a check runs, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass(frozen=True)
class Sizes:
    """rows and dimensions: of the batch that is compared with float64. steps: of a training that is.
    speed_rows: global batches whose loss is timed. backbone, pixels, images per process: of a training
    step that is timed. repeats: of everything that is timed. training_steps: of the run that is killed.
    """

    rows: int = 512
    dimensions: int = 128
    steps: int = 5
    speed_rows: tuple[int, ...] = (1_000, 4_000, 16_000, 65_000)
    speed_dimensions: int = 512
    backbone: str = "resnet50"
    pixels: int = 224
    images: int = 64
    gathered_mb: float = 64
    repeats: int = 20
    training_steps: int = 2_000


@dataclass(frozen=True)
class Place:
    """A process of a group, and its device."""

    accelerator: Accelerator
    sizes: Sizes

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def rank(self) -> int:
        rank: int = self.accelerator.process_index
        return rank

    @property
    def size(self) -> int:
        size: int = self.accelerator.num_processes
        return size

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This process's rows of a global batch, on its device."""
        b = len(x) // self.size
        return x[self.rank * b : (self.rank + 1) * b].to(self.device)
