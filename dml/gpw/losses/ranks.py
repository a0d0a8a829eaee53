"""The losses of ranks: Recall@K and average precision, made smooth.

The notation is that of `paper`. A positive p of anchor i is ranked among the other pairs of i by a smooth
step s(x) = sigmoid(x / tau):

    a_ip = 1 + sum_{positives q != p} s(S_iq - S_ip)        its rank among the positives
    n_ip =     sum_{negatives n} s(S_in - S_ip)             negatives that rank before it
    r_ip = a_ip + n_ip                                      its rank

For a loss of these, with its derivatives c_pos = dL/da_ip and c_neg = dL/dn_ip, the weights are

    w_in = sum_p c_neg_ip s'(S_in - S_ip)
    w_ip = c_neg_ip sum_n s'(S_in - S_ip) + sum_q (c_pos_ip - c_pos_iq) s'(S_iq - S_ip)

since s' is even. All that the weights need to know of an anchor are three numbers per positive: S_ip,
c_neg_ip and w_ip. A negative pair is compared with one positive at a time, so memory does not grow with
their number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.statistics import (
    Additive,
    Collect,
    OfPositives,
    Partial,
    Scope,
    Side,
    Statistics,
    masked,
)
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE
COMPARED = 2**20  # pairs of positives that are compared at a time


def step(S: Tensor, shift: Tensor, tau: float) -> Tensor:
    """s(S - S_ap), with shift = -S_ap / tau; 0 for S = -inf, and for the +inf of an empty slot."""
    return torch.add(shift, S, alpha=1 / tau).sigmoid_()


def slope(s: Tensor) -> Tensor:
    """tau s', from s, in place."""
    return s.addcmul_(s, s, value=-1)


def compared(S: Tensor, tau: float) -> Iterator[tuple[slice, Tensor]]:
    """s(S_iq - S_ip) for all positives p, and some positives q at a time: R x K x q."""
    R, K = S.shape
    width = max(1, COMPARED // (R * K))
    shift = (S / -tau)[..., None]
    for first in range(0, K, width):
        Q = slice(first, first + width)
        yield Q, step(S[:, None, Q], shift, tau)


@dataclass(frozen=True)
class PositivesBefore(OfPositives):
    """sum over the other positives q of s(S_iq - S_ip), for each positive p: its rank among them - 1."""

    tau: float

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        total, slots = torch.zeros_like(S), torch.arange(S.shape[-1], device=S.device)
        for Q, s in compared(S, self.tau):
            others = slots[Q] != slots[:, None]
            counts = others if keep is None else others & keep[:, None, Q]
            total = total + masked(s, counts, 0).sum(-1)
        return (masked(total, keep, 0),)


@dataclass(frozen=True)
class NegativesBefore(Additive):
    """For each positive p: the sum over the negatives n of s(S_in - S_ip), and that of tau s'."""

    tau: float
    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        sums, slopes = [], []
        for shift in (t["positives"] / -self.tau).unbind(-1):
            s = masked(step(S, shift, self.tau), keep, 0)
            sums.append(s.sum(-1))
            slopes.append(slope(s.detach().clone() if s.requires_grad else s).sum(-1))
        both = torch.stack([*sums, *slopes], -1)
        return (both.view(*both.shape[:-1], 2, -1).transpose(-1, -2),)


@dataclass(frozen=True)
class PairWeights(OfPositives):
    """For each positive p: c_neg_ip and w_ip."""

    loss: RankLoss

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        loss, S = self.loss, S.detach()
        a, n, valid = (x.detach() for x in loss.ranks(t))
        c_pos, c_neg = loss.derivatives(a, n, valid)
        w = c_neg * t["negatives_before"][..., 1].detach()
        for Q, s in compared(S, loss.tau):
            difference = (c_pos[..., None] - c_pos[:, None, Q]) * valid[:, None, Q]
            w = w + slope(s).mul_(difference).sum(-1)
        both = torch.stack([c_neg, w], -1) / loss.tau
        return (masked(both, None if keep is None else keep[..., None], 0),)


class RankLoss(Weighting):
    """A loss of the ranks of an anchor's positives, from its derivatives."""

    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("positives", "weights")

    @abstractmethod
    def of_ranks(self, a: Tensor, n: Tensor, valid: Tensor) -> Tensor:
        """The loss of every anchor. valid: which of its slots hold a positive."""

    @abstractmethod
    def derivatives(self, a: Tensor, n: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(c_pos, c_neg) of every slot; anything where the slot is empty."""

    def ranks(self, t: Statistics) -> tuple[Tensor, Tensor, Tensor]:
        return 1 + t["positives_before"], t["negatives_before"][..., 0], t["positives"] < torch.inf

    def stages(self) -> tuple[Stage, ...]:
        before = {"positives": Collect(), "positives_before": PositivesBefore(self.tau)}
        return (
            (POSITIVE, before),
            (NEGATIVE, {"negatives_before": NegativesBefore(self.tau)}),
            (POSITIVE, {"weights": PairWeights(self)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return self.of_ranks(*self.ranks(t))

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return t["weights"][..., 1]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = torch.zeros_like(S)
        shifts, c_neg = t["positives"] / -self.tau, t["weights"][..., 0]
        for shift, c in zip(shifts.unbind(-1), c_neg.unbind(-1), strict=True):
            w.addcmul_(slope(step(S, shift, self.tau)), c)
        return w


@dataclass(frozen=True)
class RecallSurrogate(RankLoss):
    """RS@k: Patel et al., Recall@k Surrogate Loss with Large Batches and Similarity Mixup, CVPR 2022.

    1 - mean over k of  min(k, sum_pos sigmoid((k - r_ip) / tau_k)) / min(k, P)

    The published code also ranks the anchor itself, which is before every other image, so that its ranks
    are larger by 1. We do not rank it.
    """

    tau: float
    ks: tuple[int, ...]
    taus: tuple[float, ...]

    def within(self, a: Tensor, n: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """k and tau_k; for every k: sigmoid((k - r) / tau_k), their sum over the positives, min(k, P)."""
        both = torch.tensor([self.ks, self.taus], dtype=a.dtype)[..., None, None]
        ks, taus = both.to(a.device, non_blocking=True)
        s = masked(torch.sigmoid((ks - (a + n)) / taus), valid, 0)
        P = valid.sum(-1, keepdim=True, dtype=a.dtype).clamp(min=1)
        return ks, taus, s, s.sum(-1, keepdim=True), torch.minimum(P, ks)

    def of_ranks(self, a: Tensor, n: Tensor, valid: Tensor) -> Tensor:
        ks, _, _, total, most = self.within(a, n, valid)
        return 1 - (torch.where(total <= ks, total, ks) / most).mean(0).squeeze(-1)

    def derivatives(self, a: Tensor, n: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        ks, taus, s, total, most = self.within(a, n, valid)
        c = (slope(s) * ((total <= ks) / (most * taus))).mean(0)
        return c, c


@dataclass(frozen=True)
class SmoothAP(RankLoss):
    """Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020.

    1 - 1/P sum_pos a_ip / r_ip

    The anchor itself is not ranked, and is none of its positives.
    """

    tau: float

    def of_ranks(self, a: Tensor, n: Tensor, valid: Tensor) -> Tensor:
        P = valid.sum(-1, dtype=a.dtype).clamp(min=1)
        return 1 - torch.where(valid, a / (a + n), 0).sum(-1) / P

    def derivatives(self, a: Tensor, n: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        P = valid.sum(-1, keepdim=True, dtype=a.dtype).clamp(min=1)
        scale = 1 / (P * (a + n).square())
        return -n * scale, a * scale
