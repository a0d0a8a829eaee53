"""Full float32 for similarities, whatever precision the model has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: no autocast, no TF32 or bf16 inside a matrix product.
    Rounding S would flip mining decisions between the two sides of a pair, and ranks in retrieval."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    lowered = {b: b.fp32_precision for b in backends if b.fp32_precision not in ("none", "ieee")}
    autocast = torch.is_autocast_enabled(device.type)
    try:
        for backend in lowered:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            yield
    finally:
        for backend, precision in lowered.items():
            backend.fp32_precision = precision


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
