"""A loss whose gradient is known when its value is, for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KnownGradient(torch.autograd.Function):
    """A value whose gradient is already computed: of n tensors, which come first, and then it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[len(tensors) // 2 :])
        return value.to(tensors[0].dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "GlobalPairLoss has no gradient of its gradient (create_graph=True); use dense_loss"
            )
        known = ctx.saved_tensors
        is_one = grad.is_cpu and grad == 1  # on a GPU the comparison would wait for it
        return None, *(dX if is_one else grad * dX for dX in known), *(None for _ in known)
