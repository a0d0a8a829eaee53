"""The margin loss with distance-weighted negatives, under its equation.

The notation is that of `paper`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.statistics import (
    LEAST,
    Count,
    LogSumExpOf,
    Scope,
    Side,
    Statistics,
    SumsOfBatch,
    finite,
    masked,
)
from dml.gpw.weighting import Stage, Weighting

POSITIVE, NEGATIVE = Side.POSITIVE, Side.NEGATIVE


@dataclass(frozen=True)
class Margin(Weighting):
    """Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, Eq. 4 and 7.

    ( sum_pos [alpha + D - beta]_+  +  sum_i P_i sum_neg share [alpha - D + beta]_+ ) / active pairs

    D^2 = 2 - 2 S. The published code draws one negative for each positive of an anchor, with a
    probability proportional to 1/q(D), where q(D) ~ D^{d-2} (1 - D^2/4)^{(d-3)/2} is the density of
    distances on the sphere. Here the draw is replaced by its expectation: every negative counts with
    that probability, its share. As published, distances below `cutoff` have the weight of `cutoff`, and
    distances of `nonzero_loss_cutoff` or more have none. Active pairs, those with a hinge above 0, are
    counted in the whole batch, a negative with its share. Shares and count have no gradient, so finite
    differences of the value are not its gradient. beta is fixed, or with `learn` learned from this value on;
    the published regularisation of it, nu, is 0.

    dim: d, the dimensions of the embeddings.
    """

    alpha: float
    beta: float
    dim: int
    cutoff: float
    nonzero_loss_cutoff: float
    learn: bool = False
    scope: ClassVar[Scope] = Scope.BATCH
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("P", "lse_neg", "of_positives", "of_negatives")

    def squared_distance(self, S: Tensor) -> Tensor:
        return torch.rsub(S, 2, alpha=2)

    def distance(self, D2: Tensor) -> Tensor:
        """D, at least 1e-4: its slope would be infinite at S = 1, and rounding can carry S beyond."""
        return D2.clamp(min=1e-8).sqrt()

    def slope(self, D2: Tensor, D: Tensor) -> Tensor:
        """-dD/dS"""
        return (D2 >= 1e-8) / D

    def log_weight(self, D2: Tensor) -> Tensor:
        """-log q(D) up to a constant, clipped; -inf from the far cutoff on."""
        near, far = self.cutoff**2, self.nonzero_loss_cutoff**2
        clipped = D2.detach().clamp(near, far)
        x = torch.rsub(clipped, 4).log_().mul_((3 - self.dim) / 2)
        x.add_(clipped.log_(), alpha=1 - self.dim / 2)
        return masked(x, D2 < far, -torch.inf)

    def probability(self, D2: Tensor, t: Statistics) -> Tensor:
        """That a draw takes this negative. As in `share`, it is 0 near e^LEAST; where an anchor draws
        none, the weight of its negatives is 0 as well."""
        x = self.log_weight(D2).sub_(finite(t["lse_neg"].detach()))
        return torch.threshold_(x.clamp_(LEAST, 0).exp_(), 2 * math.exp(LEAST), 0)

    def positive_hinge(self, D: Tensor) -> Tensor:
        return torch.relu(D + (self.alpha - self.beta))

    def negative_hinge(self, D: Tensor) -> Tensor:
        return torch.relu(self.alpha + self.beta - D)

    def positive_terms(self, S: Tensor, t: Statistics) -> tuple[Tensor, Tensor]:
        hinge = self.positive_hinge(self.distance(self.squared_distance(S)))
        return hinge, hinge.detach().sign()

    def negative_terms(self, S: Tensor, t: Statistics) -> tuple[Tensor, Tensor]:
        D2 = self.squared_distance(S)
        draws = self.probability(D2, t).mul_(t["P"])  # in expectation
        hinge = self.negative_hinge(self.distance(D2))
        return draws * hinge, draws * hinge.detach().sign()

    def stages(self) -> tuple[Stage, ...]:
        return (
            (
                NEGATIVE,
                {"lse_neg": LogSumExpOf(lambda S, t: self.log_weight(self.squared_distance(S)))},
            ),
            (POSITIVE, {"P": Count(), "of_positives": SumsOfBatch(self.positive_terms)}),
            (NEGATIVE, {"of_negatives": SumsOfBatch(self.negative_terms)}),
        )

    def total(self, t: Statistics) -> tuple[Tensor, Tensor]:
        """The sum of all hinges, and the number of active pairs; a negligible floor if there are none."""
        hinges, active = t["of_positives"] + t["of_negatives"]
        return hinges, active.clamp(min=1e-30)

    def value(self, t: Statistics) -> Tensor:
        hinges, active = self.total(t)
        return hinges / active

    def learned(self) -> dict[str, float]:
        return {"beta": self.beta} if self.learn else {}

    def at(self, learned: Mapping[str, float]) -> Margin:
        return replace(self, beta=learned["beta"])

    def slopes(self, t: Statistics) -> tuple[Tensor, ...]:
        """An active positive falls with beta, an active negative rises."""
        return ((t["of_negatives"][1] - t["of_positives"][1]) / self.total(t)[1],)

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        D2 = self.squared_distance(S)
        D = self.distance(D2)
        return self.positive_hinge(D).sign_() * self.slope(D2, D) / self.total(t)[1]

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        D2 = self.squared_distance(S)
        D, (_, active) = self.distance(D2), self.total(t)
        w = self.probability(D2, t).mul_(self.negative_hinge(D).sign_())
        return w.mul_(self.slope(D2, D)).mul_((t["P"] / active).to(S.dtype))
