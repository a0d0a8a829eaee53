"""A tile of negatives of mined multi-similarity, in place: the paper's loss in the fewest passes.

    selected:      z = S - bound > 0, bound = min_positive - eps                              (Eq. 11)
    terms:         E = e^{beta z - h} of the selected pairs, and e^LEAST, negligible, of the others
    statistics:    max S, and sum E, from which  lse_neg = beta (bound - lam) + h + log sum E
    weights:       f E, f = e^{beta (bound - lam) + h} / (1 + e^lse_neg)                      (Eq. 13)

It computes what the statistics of `statistics` and the weights of `losses` compute. There every
operation makes a new tile, and a boolean mask is slower than all the rest; together they would take as
long as the two matrix products. Here a pair that is no negative has S = -inf, and no mask is needed.

A log-sum-exp is usually relative to its maximum, which takes one more pass. Here z is positive and
bounded, so the terms are relative to the constant h, which is zero unless beta z may be so large that
sums overflow. Where no h is possible, for beta above 54 in float32 and above 428 in float64 with
normalised embeddings and eps = 0.1, the loss is left to the general kernel.

Shapes: R x C tiles, m anchors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.engine.general_kernel import PART_PAIRS
from dml.gpw.engine.tiles import row_parts
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.losses.exponentials import softplus
from dml.gpw.statistics import Partial, Statistic, Statistics
from dml.gpw.weighting import Mining, PairLoss

# Exponents that are far from where numbers, and exp, leave the normal range: the least, the largest
# of which a million can be added, and the largest h.
LEAST = {torch.float32: -84.0, torch.float64: -700.0}
LARGEST = {torch.float32: 70.0, torch.float64: 600.0}
LARGEST_H = {torch.float32: 45.0, torch.float64: 300.0}


def exponents_fit(ms: MultiSimilarity, mining: Mining, batch: GlobalBatch) -> bool:
    """Whether there is an h for any similarities of this batch: z is at most 2 max S + eps."""
    largest_z = 2 * batch.largest_similarity + mining.eps
    dtype = batch.X.dtype
    return ms.beta * largest_z <= LARGEST[dtype] + LARGEST_H[dtype]


@dataclass(frozen=True)
class Terms:
    """E = e^{beta z - h} of the selected pairs, and e^LEAST, which is negligible, of the others."""

    beta: float
    h: float
    dtype: torch.dtype

    @staticmethod
    def up_to(largest_z: float, beta: float, dtype: torch.dtype) -> Terms:
        """With the smallest h for z up to this one."""
        return Terms(beta, max(0.0, beta * largest_z - LARGEST[dtype]), dtype)

    def __call__(self, S: Tensor, bound: Tensor, out: Tensor) -> Tensor:
        z_of_others = (LEAST[self.dtype] + self.h) / self.beta
        z = torch.threshold_(torch.sub(S, bound, out=out), 0, z_of_others)
        return torch.add(S.new_full((), -self.h), z, alpha=self.beta, out=out).exp_()

    def of_selected(self, sum_E: Tensor) -> Tensor:
        """In place: the sum without the others. One selected pair adds more than all of them."""
        return torch.threshold_(sum_E, math.exp(-self.h) / 2, 0)

    @property
    def negligible(self) -> float:
        """A number above the weight f E of any pair that is not selected."""
        return 2 * math.exp(LEAST[self.dtype] + self.h)


def factor(c: Tensor | float, lse: Tensor) -> Tensor:
    """f = e^c / (1 + e^lse); 0 where nothing is selected."""
    return torch.where(lse > -torch.inf, torch.exp(c - softplus(lse)), 0)


class MsKernel:
    def __init__(
        self,
        ms: MultiSimilarity,
        mining: Mining,
        largest_similarity: float,
        workspace: Workspace,
        part_pairs: int,
    ) -> None:
        self.ms, self.mining, self.largest_similarity = ms, mining, largest_similarity
        self.workspace, self.part_pairs = workspace, part_pairs

    @staticmethod
    def of(
        loss: PairLoss, batch: GlobalBatch, workspace: Workspace, part_pairs: int = PART_PAIRS
    ) -> MsKernel | None:
        """None if the loss is another one, or its exponents do not fit."""
        ms, mining = loss.weighting, loss.mining
        if not isinstance(ms, MultiSimilarity) or mining is None:
            return None
        if not exponents_fit(ms, mining, batch):
            return None
        return MsKernel(ms, mining, batch.largest_similarity, workspace, part_pairs)

    def prepare_statistics(self, stage: Mapping[str, Statistic], t: Statistics) -> MsStatistics:
        assert stage.keys() == {"max_negative", "lse_neg"}
        terms, bound, relative_to = self.prepare(t)
        shift = self.ms.negative_exponent.shift
        return MsStatistics(terms, bound, relative_to, shift, self.workspace, self.part_pairs)

    def prepare_weights(self, t: Statistics) -> MsWeights:
        terms, bound, relative_to = self.prepare(t)
        f = factor(relative_to + self.ms.negative_exponent.shift, t["lse_neg"].double())
        return MsWeights(terms, bound, f.to(bound.dtype), self.workspace, self.part_pairs)

    def prepare(self, t: Statistics) -> tuple[Terms, Tensor, Tensor]:
        """The terms, bound, and beta bound + h, which the exponents beta z - h are relative to: in
        float64, as it is large beside their differences."""
        bound = self.mining.threshold(t)
        largest_z = self.largest_similarity - float(bound.min())
        terms = Terms.up_to(largest_z, self.ms.beta, bound.dtype)
        return terms, bound, self.ms.beta * bound.double() + terms.h


@dataclass(frozen=True)
class MsStatistics:
    """max_negative and lse_neg of the anchors in the rows. The partial result of lse_neg is sum E."""

    terms: Terms
    bound: Tensor
    relative_to: Tensor
    shift: float
    workspace: Workspace
    part_pairs: int

    symmetric: ClassVar[bool] = False

    def select(self, rows: slice) -> MsStatistics:
        return replace(self, bound=self.bound[rows], relative_to=self.relative_to[rows])

    def reduce(self, S: Tensor, keep: Tensor | None) -> dict[str, Partial]:
        assert keep is None
        bound = self.bound[:, None]
        by_rows = S.stride(1) == 1  # S^T is stored by columns, and cut between them
        largest, total = [], []
        for some in row_parts(S if by_rows else S.T, self.part_pairs):
            part, of_part = (S[some], bound[some]) if by_rows else (S[:, some], bound)
            largest.append(part.amax(1))
            total.append(self.terms(part, of_part, out=like(part, "E", self.workspace)).sum(1))
        top = torch.cat(largest) if by_rows else torch.stack(largest).amax(0)
        sum_E = torch.cat(total) if by_rows else torch.stack(total).sum(0)
        return {"max_negative": (top,), "lse_neg": (self.terms.of_selected(sum_E),)}

    def merge(self, a: Mapping[str, Partial], b: Mapping[str, Partial]) -> dict[str, Partial]:
        top = torch.maximum(a["max_negative"][0], b["max_negative"][0])
        return {"max_negative": (top,), "lse_neg": (a["lse_neg"][0] + b["lse_neg"][0],)}

    def finish(self, partials: Mapping[str, Partial]) -> dict[str, Tensor]:
        (max_negative,), (sum_E,) = partials["max_negative"], partials["lse_neg"]
        lse = (self.relative_to + sum_E.log() + self.shift).to(sum_E.dtype)
        return {
            "max_negative": max_negative,
            "lse_neg": torch.where(sum_E > 0, lse, -torch.inf),
        }


@dataclass(frozen=True)
class MsWeights:
    """bound and f of all m anchors."""

    terms: Terms
    bound: Tensor
    f: Tensor
    workspace: Workspace
    part_pairs: int

    def weigh_both(
        self, S: Tensor, keep: Tensor | None, rows: slice | Tensor, columns: slice
    ) -> None:
        """A sample without a positive selects nothing, so there is nothing to mask."""
        assert keep is None
        bound_rows, f_rows = self.bound[rows][:, None], self.f[rows][:, None]
        bound_columns, f_columns = self.bound[columns][None], self.f[columns][None]
        for some in row_parts(S, self.part_pairs):
            part = S[some]
            E = self.terms(part, bound_rows[some], out=like(part, "E", self.workspace))
            E_columns = like(part, "E of columns", self.workspace)
            self.terms(part, bound_columns, out=E_columns)
            torch.addcmul(E.mul_(f_rows[some]), E_columns, f_columns, out=part)
            torch.threshold_(part, 2 * self.terms.negligible, 0)


def like(S: Tensor, name: str, workspace: Workspace) -> Tensor:
    """A buffer that is stored as S is, by rows or by columns."""
    by_rows = S.stride(1) == 1
    return workspace.buffer(name, S.shape, S) if by_rows else workspace.buffer(name, S.T.shape, S).T
