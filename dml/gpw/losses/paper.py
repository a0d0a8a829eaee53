"""The pair losses of the paper's main text, each under its equation.

Sums over positives leave out the anchor itself. S_ij is the similarity of anchor i and sample j,
P_i and N_i are the numbers of positive and negative pairs of anchor i. Weights follow from the value
by differentiation; the tests check them against autograd and finite differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.losses.exponentials import share, softplus
from dml.gpw.statistics import (
    Collect,
    Count,
    Exponent,
    LogSumExp,
    Side,
    Statistics,
    Sum,
    SumPerPositive,
)
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


@dataclass(frozen=True)
class MultiSimilarity(Weighting):
    """Eq. 15; its weights are Eq. 13 and 14.

    1/alpha log[1 + sum_pos e^{-alpha (S - lam)}] + 1/beta log[1 + sum_neg e^{beta (S - lam)}]
    """

    alpha: float
    beta: float
    lam: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    @property
    def positive_exponent(self) -> Exponent:
        return Exponent(-self.alpha, self.alpha * self.lam)

    @property
    def negative_exponent(self) -> Exponent:
        return Exponent(self.beta, -self.beta * self.lam)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(self.negative_exponent)}),
            (POSITIVE, {"lse_pos": LogSumExp(self.positive_exponent)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return softplus(t["lse_pos"]) / self.alpha + softplus(t["lse_neg"]) / self.beta

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(self.positive_exponent, S, softplus(t["lse_pos"]))

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(self.negative_exponent, S, softplus(t["lse_neg"]))


@dataclass(frozen=True)
class Equal(Weighting):
    """Equal weights (Section 5.1, "MS mining"):  sum_neg S - sum_pos S."""

    ignores_minus_inf: ClassVar = False
    shared_statistics: ClassVar = ()

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"sum_neg": Sum(lambda S, t: S)}),
            (POSITIVE, {"sum_pos": Sum(lambda S, t: S)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["sum_neg"] - t["sum_pos"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.ones_like(S)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.ones_like(S)


@dataclass(frozen=True)
class Contrastive(Weighting):
    """Eq. 4, over all pairs of an anchor:  sum_neg [S - lam]_+ - sum_pos S."""

    lam: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ()

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"sum_neg": Sum(lambda S, t: torch.relu(S - self.lam))}),
            (POSITIVE, {"sum_pos": Sum(lambda S, t: S)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["sum_neg"] - t["sum_pos"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.ones_like(S)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return (S > self.lam).to(S.dtype)


@dataclass(frozen=True)
class Triplet(Weighting):
    """Eq. 5, over all triplets of an anchor:  sum_pos sum_neg [S_an - S_ap + lam]_+.

    A pair's weight is the number of valid triplets it is in.
    """

    lam: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("positives", "triplets")

    def hinge(self, S_an: Tensor, S_ap: Tensor) -> Tensor:
        return (S_an - (S_ap - self.lam)).relu_()

    def valid(self, S_an: Tensor, S_ap: Tensor) -> Tensor:
        return self.hinge(S_an.detach(), S_ap).sign_()  # 0 or 1; a mask is slower

    def stages(self) -> tuple[Stage, ...]:
        return (
            (POSITIVE, {"positives": Collect()}),
            (
                NEGATIVE,
                {
                    "hinges": SumPerPositive("positives", self.hinge),
                    "triplets": SumPerPositive("positives", self.valid),
                },
            ),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["hinges"].sum(-1)

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return t["triplets"]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        w = torch.zeros_like(S)
        for S_ap in t["positives"].unbind(-1):
            w += self.valid(S, S_ap)
        return w


@dataclass(frozen=True)
class LiftedStructure(Weighting):
    """Eq. 6; its weights are Eq. 7 and 8.   [log sum_pos e^{(lam - S) / tau} + log sum_neg e^{S / tau}]_+

    The paper has tau = 1.
    """

    lam: float
    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    @property
    def positive_exponent(self) -> Exponent:
        return Exponent(-1 / self.tau, self.lam / self.tau)

    @property
    def negative_exponent(self) -> Exponent:
        return Exponent(1 / self.tau)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(self.negative_exponent)}),
            (POSITIVE, {"lse_pos": LogSumExp(self.positive_exponent)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return torch.relu(t["lse_pos"] + t["lse_neg"])

    def slope(self, t: Statistics) -> Tensor:
        active = t["lse_pos"] + t["lse_neg"] > 0
        return active.to(t["lse_neg"].dtype) / self.tau

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(self.positive_exponent, S, t["lse_pos"]).mul_(self.slope(t))

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(self.negative_exponent, S, t["lse_neg"]).mul_(self.slope(t))


@dataclass(frozen=True)
class LiftedStructureStar(Weighting):
    """Eq. 16:   1/alpha log sum_pos e^{-alpha S} + 1/beta log sum_neg e^{beta S}

    An anchor without negatives (a batch of one class) keeps its first term.
    """

    alpha: float
    beta: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(self.beta))}),
            (POSITIVE, {"lse_pos": LogSumExp(Exponent(-self.alpha))}),
        )

    def value(self, t: Statistics) -> Tensor:
        some = t["lse_neg"] > -torch.inf
        return t["lse_pos"] / self.alpha + torch.where(some, t["lse_neg"], 0) / self.beta

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(-self.alpha), S, t["lse_pos"])

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(self.beta), S, t["lse_neg"])


@dataclass(frozen=True)
class BinomialDeviance(Weighting):
    """Eq. 9; its weights are Eq. 10.

    1/P sum_pos log[1 + e^{alpha (lam - S)}] + 1/N sum_neg log[1 + e^{beta (S - lam)}]

    After mining P and N count the selected pairs.
    """

    alpha: float
    beta: float
    lam: float
    ignores_minus_inf: ClassVar = False
    shared_statistics: ClassVar = ("P", "N")

    def positive_exponent(self, S: Tensor) -> Tensor:
        return self.alpha * (self.lam - S)

    def negative_exponent(self, S: Tensor) -> Tensor:
        return self.beta * (S - self.lam)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (
                NEGATIVE,
                {"N": Count(), "sum_neg": Sum(lambda S, t: softplus(self.negative_exponent(S)))},
            ),
            (POSITIVE, {"sum_pos": Sum(lambda S, t: softplus(self.positive_exponent(S)))}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["sum_pos"] / t["P"] + t["sum_neg"] / t["N"].clamp(min=1)

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.alpha * torch.sigmoid(self.positive_exponent(S)) / t["P"]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.beta * torch.sigmoid(self.negative_exponent(S)) / t["N"]
