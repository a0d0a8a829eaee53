"""What the encoders of two towers expect, side by side in one array.

    images    b x 2 x size x size x 3
    vectors   b x (size of x + size of y)

So the loader and the copies to the device treat a pair as one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dml.data.preprocessing import Input
from dml.data.vectors import Features


@dataclass(frozen=True)
class PairSpec:
    """Both are images of the same size, or both are vectors, perhaps of different sizes."""

    x: Input | Features
    y: Input | Features

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.x, Features):
            return (self.x.shape[0] + self.y.shape[0],)
        return (2, *self.x.shape)

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    @property
    def tensor_dtype(self) -> torch.dtype:
        return self.x.tensor_dtype

    @property
    def bytes(self) -> int:
        return self.x.bytes + self.y.bytes

    def split(self, both: Any) -> tuple[Any, Any]:
        """The x and the y of a batch, which is a tensor or an array; nothing is copied."""
        if isinstance(self.x, Features):
            return both[:, : self.x.size], both[:, self.x.size :]
        return both[:, 0], both[:, 1]


Spec = Input | Features | PairSpec


def inputs_of(spec: Spec, batch: Tensor) -> tuple[Tensor, ...]:
    """What a model is given of a batch: one tensor, or those of two towers."""
    return spec.split(batch) if isinstance(spec, PairSpec) else (batch,)
