"""The pair losses of the paper's supplement (Supp.), each under its equation.

The notation is that of `paper`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.losses.exponentials import share, softplus
from dml.gpw.statistics import Exponent, Histogram, LogSumExp, Scope, Side, Statistics, Sum
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


@dataclass(frozen=True)
class NPairs(Weighting):
    """Supp. 2: the lifted structure loss (Eq. 6) with a single positive.

    1/P sum_pos [(lam - S) / tau + log sum_neg e^{S / tau}]_+

    Each positive of the anchor is the single one in turn, and the loss of the anchor is their mean.
    With two images per class, as N-pairs draws its batches, there is only one positive. The paper has
    tau = 1.
    """

    lam: float
    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("P", "lse_neg", "active")

    def hinge(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.relu((self.lam - S) / self.tau + t["lse_neg"])

    def active(self, S: Tensor, t: Statistics) -> Tensor:
        return ((self.lam - S) / self.tau + t["lse_neg"] > 0).to(S.dtype)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(1 / self.tau))}),
            (POSITIVE, {"hinges": Sum(self.hinge), "active": Sum(self.active)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["hinges"] / t["P"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.active(S, t) / (t["P"] * self.tau)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        open_hinges = t["active"] / (t["P"].clamp(min=1) * self.tau)
        return share(Exponent(1 / self.tau), S, t["lse_neg"]).mul_(open_hinges)


@dataclass(frozen=True)
class NCA(Weighting):
    """Supp. Eq. 1, negated because the paper maximises it; its weights are Supp. Eq. 2.

    log sum_{k != i} e^{S / tau} - log sum_pos e^{S / tau}
        =  log[1 + sum_neg e^{S / tau} / sum_pos e^{S / tau}]

    The paper has tau = 1, so that on the unit sphere two terms differ by e^2 at most.
    """

    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    @property
    def exponent(self) -> Exponent:
        return Exponent(1 / self.tau)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(self.exponent)}),
            (POSITIVE, {"lse_pos": LogSumExp(self.exponent)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return softplus(t["lse_neg"] - t["lse_pos"])

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        # e^S / pos - e^S / (pos + neg), in a form that rounding cannot make negative
        of_negatives = torch.sigmoid(t["lse_neg"] - t["lse_pos"]) / self.tau
        return share(self.exponent, S, t["lse_pos"]) * of_negatives

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = share(self.exponent, S, torch.logaddexp(t["lse_pos"], t["lse_neg"]))
        return w if self.tau == 1 else w.div_(self.tau)


@dataclass(frozen=True)
class HistogramLoss(Weighting):
    """Supp. Eq. 3-9:   sum_r h-_r sum_{q <= r} h+_q, with the histograms of all pairs of the batch.

    A positive pair in [t_p, t_p+1] has the weight h-_p / (Delta |S+|), a negative one
    h+_{p+1} / (Delta |S-|).
    """

    bins: int
    scope: ClassVar[Scope] = Scope.BATCH
    ignores_minus_inf: ClassVar = False
    shared_statistics: ClassVar = ("nodes_pos", "nodes_neg")

    def stages(self) -> tuple[Stage, ...]:
        histogram = Histogram(self.bins)
        return (NEGATIVE, {"nodes_neg": histogram}), (POSITIVE, {"nodes_pos": histogram})

    def normalised(self, nodes: Tensor) -> Tensor:
        return nodes / nodes.detach().sum().clamp(min=1)

    def value(self, t: Statistics) -> Tensor:
        h_pos, h_neg = self.normalised(t["nodes_pos"]), self.normalised(t["nodes_neg"])
        return (h_neg[:, None] * h_pos).tril().sum()  # CUDA has no reproducible cumsum

    def weight(self, S: Tensor, own: Tensor, other: Tensor, shift: int) -> Tensor:
        cell, _ = Histogram(self.bins).locate(S)
        slope = (self.bins - 1) / 2 / own.sum().clamp(min=1)
        return (self.normalised(other) * slope).to(S.dtype)[cell + shift]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.weight(S, own=t["nodes_pos"], other=t["nodes_neg"], shift=0)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.weight(S, own=t["nodes_neg"], other=t["nodes_pos"], shift=1)


@dataclass(frozen=True)
class BinLifted(Weighting):
    """Supp. Eq. 10, the average of the binomial and the lifted weights; positives analogously.

    w_neg = 1/2 ( sigmoid(beta (S - lam)) + e^{beta S} / sum_neg e^{beta S} )

    The loss is defined by its weights: the value is  sum_neg w S - sum_pos w S  with w held constant
    (Eq. 2), so finite differences of the value are not its gradient.
    """

    alpha: float
    beta: float
    lam: float
    ignores_minus_inf: ClassVar = False
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(self.beta))}),
            (POSITIVE, {"lse_pos": LogSumExp(Exponent(-self.alpha))}),
            (NEGATIVE, {"sum_neg": Sum(lambda S, t: self.negative_weight(S, t).detach() * S)}),
            (POSITIVE, {"sum_pos": Sum(lambda S, t: self.positive_weight(S, t).detach() * S)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["sum_neg"] - t["sum_pos"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        binomial = torch.sigmoid(self.alpha * (self.lam - S))
        return (binomial + share(Exponent(-self.alpha), S, t["lse_pos"])) / 2

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        binomial = torch.sigmoid(self.beta * (S - self.lam))
        return (binomial + share(Exponent(self.beta), S, t["lse_neg"])) / 2
