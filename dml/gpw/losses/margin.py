"""The margin loss with distance-weighted negatives, under its equation.

The notation is that of `paper`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.losses.exponentials import share
from dml.gpw.statistics import (
    Count,
    Exponent,
    LogSumExpOf,
    Scope,
    Side,
    Statistics,
    SumOfBatch,
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
    differences of the value are not its gradient. beta is fixed here.

    dim: d, the dimensions of the embeddings.
    """

    alpha: float
    beta: float
    dim: int
    cutoff: float
    nonzero_loss_cutoff: float
    scope: ClassVar[Scope] = Scope.BATCH
    ignores_minus_inf: ClassVar = True
    shared_statistics: ClassVar = ("P", "lse_neg", "sum_pos", "sum_neg", "live_pos", "live_neg")

    def distance(self, S: Tensor) -> Tensor:
        """D, with the 1e-8 of the published code under the root: its slope is finite at S = 1."""
        return (torch.relu(2 - 2 * S) + 1e-8).sqrt()

    def slope(self, S: Tensor) -> Tensor:
        """-dD/dS; rounding may carry S beyond 1, where D is constant."""
        return (S < 1) / self.distance(S)

    def log_weight(self, S: Tensor, t: Statistics) -> Tensor:
        """-log q(D), clipped; -inf from the far cutoff on."""
        near, far = self.cutoff**2, self.nonzero_loss_cutoff**2
        D2 = 2 - 2 * S.detach()
        clipped = D2.clamp(near, far)
        x = (1 - self.dim / 2) * clipped.log() + (3 - self.dim) / 2 * torch.log1p(clipped / -4)
        return torch.where(D2 < far, x, -torch.inf)

    def share(self, S: Tensor, t: Statistics) -> Tensor:
        """How many of an anchor's P draws take this negative, in expectation."""
        return share(Exponent(1), self.log_weight(S, t), t["lse_neg"].detach()) * t["P"]

    def positive_hinge(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.relu(self.alpha + self.distance(S) - self.beta)

    def negative_hinge(self, S: Tensor, t: Statistics) -> Tensor:
        return torch.relu(self.alpha - self.distance(S) + self.beta)

    def positive_live(self, S: Tensor, t: Statistics) -> Tensor:
        return self.positive_hinge(S.detach(), t).sign()

    def negative_live(self, S: Tensor, t: Statistics) -> Tensor:
        return self.share(S, t) * self.negative_hinge(S.detach(), t).sign()

    def stages(self) -> tuple[Stage, ...]:
        return (
            (NEGATIVE, {"lse_neg": LogSumExpOf(self.log_weight)}),
            (
                POSITIVE,
                {
                    "P": Count(),
                    "sum_pos": SumOfBatch(self.positive_hinge),
                    "live_pos": SumOfBatch(self.positive_live),
                },
            ),
            (
                NEGATIVE,
                {
                    "sum_neg": SumOfBatch(
                        lambda S, t: self.share(S, t) * self.negative_hinge(S, t)
                    ),
                    "live_neg": SumOfBatch(self.negative_live),
                },
            ),
        )

    def live(self, t: Statistics) -> Tensor:
        """The number of active pairs; a negligible floor where there are none."""
        return (t["live_pos"] + t["live_neg"]).clamp(min=1e-30)

    def value(self, t: Statistics) -> Tensor:
        return (t["sum_pos"] + t["sum_neg"]) / self.live(t)

    def positive_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.positive_live(S, t) * self.slope(S) / self.live(t)

    def negative_weight(self, S: Tensor, t: Statistics) -> Tensor:
        return self.negative_live(S, t) * self.slope(S) / self.live(t)
