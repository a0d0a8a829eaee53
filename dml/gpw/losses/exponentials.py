"""Functions of exponentials that several losses share, safe against overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dml.gpw.statistics import LEAST, Exponent


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), which is x where the 1 is below the precision of float64."""
    return torch.nn.functional.softplus(x, threshold=50)


def share(exponent: Exponent, S: Tensor, lse: Tensor) -> Tensor:
    """e^{scale S + shift} / e^lse: a pair's share in a sum of exponentials.

    It is at most 1. For the pairs of the sum that holds by definition; the others are clamped,
    because they are masked only later, and infinity times zero would be NaN. The share is 0 near
    e^LEAST and where the sum is empty.
    """
    lse = lse.nan_to_num(torch.nan, torch.inf, torch.inf)  # -inf becomes inf
    w = torch.add(exponent.shift - lse, S, alpha=exponent.scale).clamp_(LEAST, 0).exp_()
    return torch.threshold_(w, 2 * math.exp(LEAST), 0)
