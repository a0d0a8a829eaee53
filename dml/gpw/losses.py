"""Every pair loss of the paper, each under its equation.

Sums over positives leave out the anchor itself. S_ij is the similarity of anchor i and sample j,
P_i and N_i the numbers of positive and negative pairs of anchor i. Eq. is the paper, Supp. its
supplement. Weights follow from the value by differentiation; the tests check that against autograd
and finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from dml.catalogue import complete_loss
from dml.gpw.statistics import (
    LEAST,
    Collect,
    Count,
    Exponent,
    Histogram,
    LogSumExp,
    Scope,
    Side,
    Statistics,
    Sum,
    SumPerPositive,
)
from dml.gpw.weighting import Mining, PairLoss, Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x); the 1 is given up where it is below the precision of float64."""
    return torch.nn.functional.softplus(x, threshold=50)


def share(exponent: Exponent, S: Tensor, lse: Tensor) -> Tensor:
    """e^{scale S + shift} / e^lse: a pair's share in a sum of exponentials.

    At most 1, by definition for the pairs of the sum and by force for those outside it: they are
    masked later, but an infinity times zero would be not a number. Near e^LEAST, and where the sum
    is empty, it is 0.
    """
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    w = torch.add(exponent.shift - lse, S, alpha=exponent.scale).clamp_(LEAST, 0).exp_()
    return torch.threshold_(w, 2 * math.exp(LEAST), 0)


@dataclass(frozen=True)
class MultiSimilarity(Weighting):
    """Eq. 15; its weights are Eq. 13 and 14.

    1/alpha log[1 + sum_pos e^{-alpha (S - lam)}] + 1/beta log[1 + sum_neg e^{beta (S - lam)}]
    """

    alpha: float
    beta: float
    lam: float
    read: ClassVar = ("lse_pos", "lse_neg")

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

    vanishes: ClassVar = False
    read: ClassVar = ()

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
    read: ClassVar = ()

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
    read: ClassVar = ("positives", "triplets")

    def hinge(self, S_an: Tensor, S_ap: Tensor) -> Tensor:
        return (S_an - (S_ap - self.lam)).relu_()

    def valid(self, S_an: Tensor, S_ap: Tensor) -> Tensor:
        return self.hinge(S_an.detach(), S_ap).sign_()  # 0 or 1; a mask would take longer

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
    """Eq. 6; its weights are Eq. 7 and 8.   [log sum_pos e^{lam - S} + log sum_neg e^S]_+"""

    lam: float
    read: ClassVar = ("lse_pos", "lse_neg")

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(1))}),
            (POSITIVE, {"lse_pos": LogSumExp(Exponent(-1, self.lam))}),
        )

    def value(self, t: Statistics) -> Tensor:
        return torch.relu(t["lse_pos"] + t["lse_neg"])

    def active(self, t: Statistics) -> Tensor:
        return t["lse_pos"] + t["lse_neg"] > 0

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(-1, self.lam), S, t["lse_pos"]).mul_(self.active(t))

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(1), S, t["lse_neg"]).mul_(self.active(t))


@dataclass(frozen=True)
class LiftedStructureStar(Weighting):
    """Eq. 16:   1/alpha log sum_pos e^{-alpha S} + 1/beta log sum_neg e^{beta S}

    An anchor without negatives (a batch of one class) keeps its first term.
    """

    alpha: float
    beta: float
    read: ClassVar = ("lse_pos", "lse_neg")

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
    vanishes: ClassVar = False
    read: ClassVar = ("P", "N")

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


@dataclass(frozen=True)
class NPairs(Weighting):
    """Supp. 2: the lifted structure loss (Eq. 6) with a single positive.

    1/P sum_pos [lam - S + log sum_neg e^S]_+

    Every positive of the anchor is the single one in turn, and the anchor takes their mean; with
    two images a class, as N-pairs draws its batches, there is only one.
    """

    lam: float
    read: ClassVar = ("P", "lse_neg", "active")

    def hinge(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.relu(self.lam - S + t["lse_neg"])

    def active(self, S: Tensor, t: Statistics) -> Tensor:
        return (self.lam - S + t["lse_neg"] > 0).to(S.dtype)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(1))}),
            (POSITIVE, {"hinges": Sum(self.hinge), "active": Sum(self.active)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return t["hinges"] / t["P"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.active(S, t) / t["P"]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(1), S, t["lse_neg"]).mul_(t["active"] / t["P"].clamp(min=1))


@dataclass(frozen=True)
class NCA(Weighting):
    """Supp. Eq. 1, negated, for the paper states a maximisation; its weights are Supp. Eq. 2.

    log sum_{k != i} e^S - log sum_pos e^S  =  log[1 + sum_neg e^S / sum_pos e^S]
    """

    read: ClassVar = ("lse_pos", "lse_neg")

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExp(Exponent(1))}),
            (POSITIVE, {"lse_pos": LogSumExp(Exponent(1))}),
        )

    def value(self, t: Statistics) -> Tensor:
        return softplus(t["lse_neg"] - t["lse_pos"])

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        # e^S / pos - e^S / (pos + neg), written so that it cannot fall below zero
        return share(Exponent(1), S, t["lse_pos"]) * torch.sigmoid(t["lse_neg"] - t["lse_pos"])

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return share(Exponent(1), S, torch.logaddexp(t["lse_pos"], t["lse_neg"]))


@dataclass(frozen=True)
class HistogramLoss(Weighting):
    """Supp. Eq. 3-9:   sum_r h-_r sum_{q <= r} h+_q, with the histograms of all pairs of the batch.

    A positive pair in [t_p, t_p+1] has the weight h-_p / (Delta |S+|), a negative one
    h+_{p+1} / (Delta |S-|).
    """

    bins: int
    scope: ClassVar[Scope] = Scope.BATCH
    vanishes: ClassVar = False
    read: ClassVar = ("nodes_pos", "nodes_neg")

    def stages(self) -> tuple[Stage, ...]:
        histogram = Histogram(self.bins)
        return (NEGATIVE, {"nodes_neg": histogram}), (POSITIVE, {"nodes_pos": histogram})

    def normalised(self, nodes: Tensor) -> Tensor:
        return nodes / nodes.detach().sum().clamp(min=1)

    def value(self, t: Statistics) -> Tensor:
        h_pos, h_neg = self.normalised(t["nodes_pos"]), self.normalised(t["nodes_neg"])
        return (h_neg * h_pos.cumsum(0)).sum()

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

    It is defined by its weights: the value is  sum_neg w S - sum_pos w S  with w held constant
    (Eq. 2), so differences of the value are not its gradient.
    """

    alpha: float
    beta: float
    lam: float
    vanishes: ClassVar = False
    read: ClassVar = ("lse_pos", "lse_neg")

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


LOSSES: Mapping[str, type[Weighting]] = MappingProxyType(
    {
        "multi_similarity": MultiSimilarity,
        "ms_weighting": MultiSimilarity,
        "ms_mining": Equal,
        "contrastive": Contrastive,
        "triplet": Triplet,
        "lifted_structure": LiftedStructure,
        "lifted_structure_star": LiftedStructureStar,
        "binomial_deviance": BinomialDeviance,
        "n_pairs": NPairs,
        "nca": NCA,
        "histogram": HistogramLoss,
        "bin_lifted": BinLifted,
    }
)
"""The weighting of every loss by name; `dml.catalogue` has their hyper-parameters."""


def make_loss(name: str, **parameters: float | bool) -> PairLoss:
    """The description of a loss. Parameters left out take the defaults of `dml.catalogue`.

    >>> make_loss("multi_similarity", alpha=2, beta=50, lam=1.0, eps=0.1).mining
    Mining(eps=0.1)
    >>> make_loss("binomial_deviance", mine=True, eps=0.1).weighting
    BinomialDeviance(alpha=2.0, beta=50.0, lam=1.0)
    """
    complete, problems = complete_loss(name, parameters)
    if problems:
        raise ValueError("; ".join(str(problem) for problem in problems))
    eps = complete.pop("eps", None)
    complete.pop("mine", None)
    return PairLoss(
        name=name,
        weighting=LOSSES[name](**complete),
        mining=None if eps is None else Mining(eps),
    )
