"""What the Triton kernels of multi-similarity share: selected pairs, weights, and compiler options.

Each works on S of any shape, with numbers of the anchors that broadcast against it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dml.gpw.grouping import Groups
from dml.gpw.losses.exponentials import softplus
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import PairLoss

# Triton 3.10 fuses multiply-adds only if it is asked to.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Anchors:
    """What the weights of all m anchors use."""

    min_positive: Tensor
    max_negative: Tensor
    log_pos: Tensor
    log_neg: Tensor
    eps: float

    @staticmethod
    def of(loss: PairLoss, t: Statistics, groups: Groups) -> Anchors:
        # A sample without a positive is no anchor: its negatives get the weight e^-inf.
        log_neg = softplus(t["lse_neg"]).masked_fill(~groups.has_positive, torch.inf)
        if loss.mining is None:
            min_positive, max_negative, eps = no_mining(t["lse_pos"])
        else:
            min_positive, max_negative, eps = t["min_positive"], t["max_negative"], loss.mining.eps
        return Anchors(min_positive, max_negative, softplus(t["lse_pos"]), log_neg, eps)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.min_positive, self.max_negative, self.log_pos, self.log_neg


def no_mining(like: Tensor) -> tuple[Tensor, Tensor, float]:
    """min_positive, max_negative and eps with which anchors select all their pairs."""
    return torch.full_like(like, -torch.inf), torch.full_like(like, torch.inf), 0.0


# Eq. 11:  S_ij > min_{y_k = y_i} S_ik - eps
@triton.jit
def select_negative(S, min_positive, eps):
    return S > min_positive - eps


# Eq. 12:  S_ij < max_{y_k != y_i} S_ik + eps, with eps on the left as in `Mining`
@triton.jit
def select_positive(S, max_negative, eps):
    return S - eps < max_negative


# Eq. 13 and 14:  w = e^x / (1 + sum e^x), with log_pos and log_neg the logarithms of the denominators
@triton.jit
def positive_weight(S, max_negative, log_pos, alpha, lam, eps):
    w = tl.exp(-alpha * (S - lam) - log_pos)
    return tl.where(select_positive(S, max_negative, eps), w, 0.0)


@triton.jit
def negative_weight(S, min_positive, log_neg, beta, lam, eps):
    w = tl.exp(beta * (S - lam) - log_neg)
    return tl.where(select_negative(S, min_positive, eps), w, 0.0)


@triton.jit
def add_one(x):
    """The smallest kernel, with which `triton_probe` tries out Triton."""
    tl.store(x, tl.load(x) + 1)


@triton.jit
def both_weights(
    S, i, j, start, min_positive, max_negative, log_pos, log_neg, alpha, beta, lam, eps
):
    """G_ij + G_ji of the pairs (i, j), whose shapes broadcast to that of S."""
    w_pos = positive_weight(S, tl.load(max_negative + i), tl.load(log_pos + i), alpha, lam, eps)
    w_pos += positive_weight(S, tl.load(max_negative + j), tl.load(log_pos + j), alpha, lam, eps)
    w_neg = negative_weight(S, tl.load(min_positive + i), tl.load(log_neg + i), beta, lam, eps)
    w_neg += negative_weight(S, tl.load(min_positive + j), tl.load(log_neg + j), beta, lam, eps)
    w_pos = tl.where(i == j, 0.0, w_pos)
    same = tl.load(start + i) == tl.load(start + j)
    return tl.where(same, -w_pos, w_neg)
