"""Mined multi-similarity on a tile of negatives, in place: the paper's loss in the fewest passes.

    selected:      z = S - (min_positive - eps) > 0                                           (Eq. 11)
    terms:         E = e^{beta z - h} of the selected, and next to nothing, e^LEAST, of the others
    statistics:    max S, and sum E
    weights:       f E, f = e^{h + beta (min_positive - eps - lam)} / (1 + e^lse_neg)         (Eq. 13)

It gives what the statistics of `algebra` and the weights of `losses` give. There every operation makes
a new tile, and a mask is slower than all the rest; beside the two products that would be as long again.
A pair that is no negative has S = -inf, for there is no mask.

As z is positive, the sums need no maximum to be relative to: h is zero unless beta z may be so large
that sums overflow. Where no h will do, for beta above 54 in float32 and 428 in float64 at the earliest, the
work is left to `algebra`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dml.gpw.engine.tiles import Memory, Named, Negatives, parts_of
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity, softplus
from dml.gpw.statistics import State, Statistics
from dml.gpw.weighting import Mining, PairLoss

# Exponents, far from where numbers, and exp, leave the normal range: the least, the largest of which a
# million can be added, and the largest h.
LEAST = {torch.float32: -84.0, torch.float64: -700.0}
LARGEST = {torch.float32: 70.0, torch.float64: 600.0}
LARGEST_H = {torch.float32: 45.0, torch.float64: 300.0}


@dataclass(frozen=True)
class Terms:
    """E = e^{beta z - h} of the selected, and next to nothing, e^LEAST, of the others."""

    beta: float
    largest_z: float
    dtype: torch.dtype

    @cached_property
    def h(self) -> float:
        return max(0.0, self.beta * self.largest_z - LARGEST[self.dtype])

    @property
    def possible(self) -> bool:
        return self.h <= LARGEST_H[self.dtype]

    def __call__(self, S: Tensor, bound: Tensor, out: Tensor) -> Tensor:
        far_down = (LEAST[self.dtype] + self.h) / self.beta
        z = torch.threshold_(torch.sub(S, bound, out=out), 0, far_down)
        return torch.add(S.new_full((), -self.h), z, alpha=self.beta, out=out).exp_()

    def of_selected(self, sum_E: Tensor) -> Tensor:
        """In place: what one selected pair adds is more than all others together."""
        return torch.threshold_(sum_E, math.exp(-self.h) / 2, 0)

    @property
    def next_to_nothing(self) -> float:
        """More than the weight f E of a pair that is not selected."""
        return 2 * math.exp(LEAST[self.dtype] + self.h)


def factor(c: Tensor | float, lse: Tensor) -> Tensor:
    """f = e^c / (1 + e^lse); 0 where nothing is selected."""
    return torch.where(lse > -torch.inf, torch.exp(c - softplus(lse)), 0)


def negatives_of(loss: PairLoss, batch: GlobalBatch, memory: Memory) -> Negatives:
    if isinstance(loss.weighting, MultiSimilarity) and loss.mining is not None:
        return FusedNegatives(loss, loss.weighting, loss.mining, batch, memory)
    return Negatives(loss, batch.groups)


class FusedNegatives(Negatives):
    def __init__(
        self,
        loss: PairLoss,
        ms: MultiSimilarity,
        mining: Mining,
        batch: GlobalBatch,
        memory: Memory,
    ) -> None:
        super().__init__(loss, batch.groups)
        self.ms, self.mining, self.largest = ms, mining, batch.largest
        self.memory = memory
        self.terms = Terms(ms.beta, 0.0, batch.X.dtype)

    def known(self, t: Statistics) -> Statistics:
        """The bound of z; what the sums are relative to; and, once lse_neg is known, f. In float64,
        as their exponents are large beside their differences."""
        bound = self.mining.threshold(t)
        largest_z = self.largest - float(bound.min())
        self.terms = Terms(self.ms.beta, largest_z, bound.dtype)
        if not self.terms.possible:
            return super().known(t)
        relative_to = self.ms.beta * bound.double() + self.terms.h
        if "lse_neg" not in t:
            return {"bound": bound, "relative_to": relative_to}
        f = factor(relative_to - self.ms.beta * self.ms.lam, t["lse_neg"].double())
        return {"bound": bound, "f": f.to(bound.dtype)}

    def states(
        self, statistics: Named, S: Tensor, keep: Tensor | None, t: Statistics
    ) -> dict[str, State]:
        if "bound" not in t:
            return super().states(statistics, S, keep, t)
        by_rows = S.stride(1) == 1  # S^T lies by columns, and is cut between them
        largest, total = [], []
        for some in parts_of(S if by_rows else S.T):
            part, bound = (S[some], t["bound"][some]) if by_rows else (S[:, some], t["bound"])
            largest.append(part.amax(1))
            total.append(self.terms(part, bound, out=self.like(part, "E")).sum(1))
        top = torch.cat(largest) if by_rows else torch.stack(largest).amax(0)
        sum_E = torch.cat(total) if by_rows else torch.stack(total).sum(0)
        of_selected = self.terms.of_selected(sum_E)
        return {"max_negative": (top,), "lse_neg": (t["relative_to"][:, 0], of_selected)}

    def weigh_both(
        self, S: Tensor, keep: Tensor | None, rows: Statistics, columns: Statistics
    ) -> None:
        """An anchor without a positive selects nothing, so there is nothing to mask."""
        if "f" not in rows:
            return super().weigh_both(S, keep, rows, columns)
        for some in parts_of(S):
            part = S[some]
            E = self.terms(part, rows["bound"][some], out=self.like(part, "E"))
            E_columns = self.terms(part, columns["bound"], out=self.like(part, "E of columns"))
            torch.addcmul(E.mul_(rows["f"][some]), E_columns, columns["f"], out=part)
            torch.threshold_(part, 2 * self.terms.next_to_nothing, 0)

    def like(self, S: Tensor, name: str) -> Tensor:
        """Memory laid out as S is, by rows or by columns."""
        by_rows = S.stride(1) == 1
        return self.memory(name, S.shape, S) if by_rows else self.memory(name, S.T.shape, S).T
