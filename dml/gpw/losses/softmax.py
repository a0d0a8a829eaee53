"""Contrastive losses of later papers: softmax over the pairs of an anchor, and a sigmoid for each pair.

The notation is that of `paper`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.losses.exponentials import share, softplus
from dml.gpw.statistics import (
    Exponent,
    LogSumExp,
    LogSumExpOf,
    Side,
    Statistic,
    Statistics,
    Sum,
    finite,
)
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


@dataclass(frozen=True)
class SupCon(Weighting):
    """Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, Eq. 2 ("out") and 3 ("in").

    out:  log sum_{k != i} e^{S / tau} - 1/P sum_pos S / tau
    in:   log sum_{k != i} e^{S / tau} - log[1/P sum_pos e^{S / tau}]

    A positive pair of "out" has the weight (1/P - share) / tau, its share in the softmax over all
    pairs. It is below 0 where the share exceeds 1/P. "in" is NCA with a temperature, plus log P.
    """

    tau: float
    variant: str
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("P", "lse_pos", "lse_neg")

    @property
    def exponent(self) -> Exponent:
        return Exponent(1 / self.tau)

    def stages(self) -> tuple[Stage, ...]:
        of_positives = {"lse_pos": LogSumExp(self.exponent), "sum_pos": Sum(lambda S, t: S)}
        return (NEGATIVE, {"lse_neg": LogSumExp(self.exponent)}), (POSITIVE, of_positives)

    def value(self, t: Statistics) -> Tensor:
        everything = torch.logaddexp(t["lse_pos"], t["lse_neg"])
        if self.variant == "in":
            return everything - t["lse_pos"] + t["P"].log()
        return everything - t["sum_pos"] / (t["P"] * self.tau)

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        if self.variant == "in":
            of_negatives = torch.sigmoid(t["lse_neg"] - t["lse_pos"]) / self.tau
            return share(self.exponent, S, t["lse_pos"]) * of_negatives
        everything = torch.logaddexp(t["lse_pos"], t["lse_neg"])
        return (1 / t["P"] - share(self.exponent, S, everything)) / self.tau

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        everything = torch.logaddexp(t["lse_pos"], t["lse_neg"])
        return share(self.exponent, S, everything).div_(self.tau)


@dataclass(frozen=True)
class InfoNCE(Weighting):
    """van den Oord et al. 2018; NT-Xent, Chen et al., ICML 2020, Eq. 1, with several positives.

    1/P sum_pos log[1 + sum_neg e^{(S_an - S_ap) / tau}]

    Every positive stands against the negatives alone, not against the other positives.
    """

    tau: float
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("P", "lse_neg", "confusion")

    @property
    def exponent(self) -> Exponent:
        return Exponent(1 / self.tau)

    def stages(self) -> tuple[Stage, ...]:
        of_positives = {
            "terms": Sum(lambda S, t: softplus(t["lse_neg"] - S / self.tau)),
            "confusion": Sum(self.confusion),
        }
        return (NEGATIVE, {"lse_neg": LogSumExp(self.exponent)}), (POSITIVE, of_positives)

    def confusion(self, S: Tensor, t: Statistics) -> Tensor:
        """1 - the softmax of a positive among itself and the negatives."""
        return torch.sigmoid(t["lse_neg"] - S / self.tau)

    def value(self, t: Statistics) -> Tensor:
        return t["terms"] / t["P"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.confusion(S, t) / (t["P"] * self.tau)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        mean_confusion = t["confusion"] / (t["P"].clamp(min=1) * self.tau)
        return share(self.exponent, S, t["lse_neg"]).mul_(mean_confusion)


@dataclass(frozen=True)
class Circle(Weighting):
    """Sun et al., Circle Loss, CVPR 2020, Eq. 6 and 8, for pairs.

    log[1 + sum_neg e^{gamma a_n (S - m)} sum_pos e^{-gamma a_p (S - (1 - m))}]

    with a_n = [S + m]_+ and a_p = [1 + m - S]_+ held constant (no gradient), so finite differences of
    the value are not its gradient.
    """

    m: float
    gamma: float
    # at S <= -m the exponent of a negative is 0, which is a term of 1
    ignores_minus_inf: ClassVar = False
    shared_statistics: ClassVar = ("lse_pos", "lse_neg")

    def positive_pace(self, S: Tensor) -> Tensor:
        return torch.relu(1 + self.m - S.detach())

    def negative_pace(self, S: Tensor) -> Tensor:
        return torch.relu(S.detach() + self.m)

    def positive_term(self, S: Tensor, t: Statistics) -> Tensor:
        return -self.gamma * self.positive_pace(S) * (S - (1 - self.m))

    def negative_term(self, S: Tensor, t: Statistics) -> Tensor:
        return self.gamma * self.negative_pace(S) * (S - self.m)

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExpOf(self.negative_term)}),
            (POSITIVE, {"lse_pos": LogSumExpOf(self.positive_term)}),
        )

    def value(self, t: Statistics) -> Tensor:
        return softplus(t["lse_pos"] + t["lse_neg"])

    def slope(self, t: Statistics) -> Tensor:
        return self.gamma * torch.sigmoid(t["lse_pos"] + t["lse_neg"])

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        of_pair = share(Exponent(1), self.positive_term(S, t), t["lse_pos"])
        return of_pair * self.positive_pace(S) * self.slope(t)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        of_pair = share(Exponent(1), self.negative_term(S, t), t["lse_neg"])
        return of_pair.mul_(self.negative_pace(S)).mul_(self.slope(t))


@dataclass(frozen=True)
class PairwiseSigmoid(Weighting):
    """Zhai et al., Sigmoid Loss for Language Image Pre-Training (SigLIP), ICCV 2023, for one modality.

    sum_pos log[1 + e^{-(t S + b)}] + sum_neg log[1 + e^{t S + b}]

    t and b are fixed, or with `learn` learned from these values on, t as e^{log_t}. Unlike theirs, an
    anchor without positives contributes zero.
    """

    t: float
    b: float
    learn: bool = False
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ()

    def logit(self, S: Tensor) -> Tensor:
        return self.t * S + self.b

    def stages(self) -> tuple[Stage, ...]:
        of_negatives: dict[str, Statistic] = {"sum_neg": Sum(lambda S, t: softplus(self.logit(S)))}
        of_positives: dict[str, Statistic] = {"sum_pos": Sum(lambda S, t: softplus(-self.logit(S)))}
        if self.learn:  # dL/d(logit), and the same times S; S may be -inf where the first is 0
            of_negatives |= {
                "slope_neg": Sum(lambda S, t: torch.sigmoid(self.logit(S))),
                "slope_neg_S": Sum(lambda S, t: torch.sigmoid(self.logit(S)) * finite(S)),
            }
            of_positives |= {
                "slope_pos": Sum(lambda S, t: -torch.sigmoid(-self.logit(S))),
                "slope_pos_S": Sum(lambda S, t: -torch.sigmoid(-self.logit(S)) * S),
            }
        return (NEGATIVE, of_negatives), (POSITIVE, of_positives)

    def value(self, t: Statistics) -> Tensor:
        return t["sum_pos"] + t["sum_neg"]

    def learned(self) -> dict[str, float]:
        return {"log_t": math.log(self.t), "b": self.b} if self.learn else {}

    def at(self, learned: Mapping[str, float]) -> PairwiseSigmoid:
        return replace(self, t=math.exp(learned["log_t"]), b=learned["b"])

    def slopes(self, t: Statistics) -> tuple[Tensor, ...]:
        by_t = t["slope_pos_S"] + t["slope_neg_S"]
        return self.t * by_t, t["slope_pos"] + t["slope_neg"]

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.sigmoid(-self.logit(S)).mul_(self.t)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.sigmoid(self.logit(S)).mul_(self.t)
