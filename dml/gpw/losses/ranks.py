"""The losses of ranks: Recall@K and average precision, made smooth.

The notation is that of `paper`. A positive p of anchor i is ranked among the other pairs of i by a smooth
step s(x) = sigmoid(x / tau):

    a_ip = 1 + sum_{positives q != p} s(S_iq - S_ip)        its rank among the positives
    n_ip =     sum_{negatives n} s(S_in - S_ip)             negatives that rank before it
    r_ip = a_ip + n_ip                                      its rank

For a loss of these, with its derivatives c_pos = dL/da_ip and c_neg = dL/dn_ip, the weights are

    w_in = sum_p c_neg_ip s'(S_in - S_ip)
    w_ip = c_neg_ip sum_n s'(S_in - S_ip) + sum_q (c_pos_ip - c_pos_iq) s'(S_iq - S_ip)

since s' is even. Everything that a pair needs to know of an anchor are three numbers per positive: S_ip,
c_neg_ip and w_ip. The work on a negative pair is that of the triplet loss, once per positive.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.statistics import (
    Additive,
    Collect,
    OfPositives,
    Partial,
    PerPositive,
    Scope,
    Side,
    Statistics,
    masked,
)
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


def step(S: Tensor, S_ap: Tensor, tau: float) -> Tensor:
    """s(S - S_ap); 0 for S = -inf, and for the +inf of an empty slot."""
    return torch.add(S_ap / -tau, S, alpha=1 / tau).sigmoid_()


def slope(s: Tensor) -> Tensor:
    """tau s', from s, in place."""
    return s.addcmul_(s, s, value=-1)


@dataclass(frozen=True)
class PositivesBefore(OfPositives):
    """sum over the other positives q of s(S_iq - S_ip), for each positive p: its rank among them - 1."""

    tau: float

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        total = torch.zeros_like(S)
        for q in range(S.shape[-1]):
            before = step(S[:, q, None], S, self.tau)
            others = torch.arange(S.shape[-1], device=S.device) != q
            counts = others if keep is None else others & keep[:, q, None]
            total = total + torch.where(counts, before, 0)
        return (masked(total, keep, 0),)


@dataclass(frozen=True)
class NegativesBefore(Additive):
    """For each positive p: the sum over the negatives n of s(S_in - S_ip), and that of tau s'."""

    tau: float
    scope: ClassVar[Scope] = Scope.POSITIVE_PAIR

    def reduce(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Partial:
        sums, slopes = [], []
        for S_ap in t["positives"].unbind(-1):
            s = masked(step(S, S_ap, self.tau), keep, 0)
            sums.append(s.sum(-1))
            slopes.append(slope(s.detach().clone() if s.requires_grad else s).sum(-1))
        return (torch.stack([torch.stack(sums, -1), torch.stack(slopes, -1)], -1),)


class RankLoss(Weighting):
    """A loss of the ranks of an anchor's positives, from its derivatives."""

    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("positives", "c_neg", "w_pos")

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
        weights = {"c_neg": PerPositive(self.c_neg), "w_pos": PerPositive(self.w_pos)}
        return (
            (POSITIVE, before),
            (NEGATIVE, {"negatives_before": NegativesBefore(self.tau)}),
            (POSITIVE, weights),
        )

    def value(self, t: Statistics) -> Tensor:
        return self.of_ranks(*self.ranks(t))

    def c_neg(self, S: Tensor, t: Statistics) -> Tensor:
        return self.derivatives(*(x.detach() for x in self.ranks(t)))[1]

    def w_pos(self, S: Tensor, t: Statistics) -> Tensor:
        a, n, valid = (x.detach() for x in self.ranks(t))
        S, c_pos, c_neg = S.detach(), *self.derivatives(a, n, valid)
        w = c_neg * t["negatives_before"][..., 1].detach()
        for q in range(S.shape[-1]):
            difference = (c_pos - c_pos[:, q, None]) * valid[:, q, None]
            w.addcmul_(slope(step(S[:, q, None], S, self.tau)), difference)
        return w / self.tau

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return t["w_pos"]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = torch.zeros_like(S)
        slots = zip(t["positives"].unbind(-1), t["c_neg"].unbind(-1), strict=True)
        for S_ap, c in slots:
            w.addcmul_(slope(step(S, S_ap, self.tau)), c / self.tau)
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

    def within(self, a: Tensor, n: Tensor, valid: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For every k: sigmoid((k - r) / tau_k), their sum over the positives, and min(k, P)."""
        P = valid.sum(-1, keepdim=True, dtype=a.dtype).clamp(min=1)
        found = []
        for k, tau in zip(self.ks, self.taus, strict=True):
            s = torch.where(valid, torch.sigmoid((k - a - n) / tau), 0)
            found.append((s, s.sum(-1, keepdim=True), P.clamp(max=k)))
        return found

    def of_ranks(self, a: Tensor, n: Tensor, valid: Tensor) -> Tensor:
        recalls = [
            total.clamp(max=k) / most
            for k, (_, total, most) in zip(self.ks, self.within(a, n, valid), strict=True)
        ]
        return 1 - torch.cat(recalls, -1).mean(-1)

    def derivatives(self, a: Tensor, n: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.zeros_like(a)
        of_ks = zip(self.ks, self.taus, self.within(a, n, valid), strict=True)
        for k, tau, (s, total, most) in of_ks:
            c += s * (1 - s) * (total <= k) / (most * tau * len(self.ks))
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
