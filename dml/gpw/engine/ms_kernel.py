"""A tile of negatives of mined multi-similarity, in place: the paper's loss in the fewest passes.

    selected:      S > bound, bound = min_positive - eps                                      (Eq. 11)
    terms:         e^{beta (S - lam) - c} of the selected pairs, exactly 0 of the others
    statistics:    top = max S, and the sum of the terms with c = beta (top - lam), from which
                   lse_neg = beta (top - lam) + log sum
    weights:       the terms with c = log(1 + e^lse_neg)                                      (Eq. 13)

It computes what the statistics of `statistics` and the weights of `losses` compute. There every
operation makes a new tile, and a boolean mask is slower than all the rest; together they would take as
long as the two matrix products. Here a pair that is no negative has S = -inf, and no mask is needed.

Terms below e^LEAST count as zero: bound is raised to where they begin. So no number is denormal,
neither here nor in the product after it, whatever the parameters are; denormal numbers would make both
many times slower. Powers of two are used because torch computes 2^x in the same time for every x. On an
AMD EPYC e^x takes three times as long, and over a hundred times where it underflows.

Shapes: R x C tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.engine.tiles import row_parts
from dml.gpw.engine.views import AnchorSet
from dml.gpw.engine.workspace import Workspace
from dml.gpw.losses import MultiSimilarity
from dml.gpw.losses.exponentials import softplus
from dml.gpw.statistics import LEAST, Partial, Statistic, Statistics, finite
from dml.gpw.weighting import Mining, PairLoss

LOG2_E = math.log2(math.e)
Bounds = tuple[Tensor, Tensor]  # of some anchors: bound, and the exponent of a weight at the bound


def raised(bound: Tensor, ms: MultiSimilarity, c: Tensor) -> Tensor:
    """The bound above which pairs are selected and e^{beta (S - lam) - c} is above e^LEAST."""
    return torch.maximum(bound, (ms.lam + (c + LEAST) / ms.beta).to(bound.dtype))


def exponents(bound: Tensor, ms: MultiSimilarity, c: Tensor) -> Tensor:
    """beta (bound - lam) - c in powers of two. It is above 0 only where no S is above the bound."""
    x = ms.beta * (bound.double() - ms.lam) - c
    return x.mul_(LOG2_E).clamp_(max=0).to(bound.dtype)


def terms(S: Tensor, bound: Tensor, at_bound: Tensor, beta: float, out: Tensor) -> Tensor:
    """2^{at_bound} e^{beta (S - bound)} where S > bound, exactly 0 elsewhere."""
    z = torch.threshold_(torch.sub(S, bound, out=out), 0, -torch.inf)
    return torch.add(at_bound, z, alpha=beta * LOG2_E, out=out).exp2_()


class MsKernel:
    def __init__(
        self, ms: MultiSimilarity, mining: Mining, workspace: Workspace, part_pairs: int | None
    ) -> None:
        self.ms, self.mining = ms, mining
        self.workspace, self.part_pairs = workspace, part_pairs

    @staticmethod
    def of(loss: PairLoss, workspace: Workspace, part_pairs: int | None) -> MsKernel | None:
        """None if the loss is another one."""
        ms, mining = loss.weighting, loss.mining
        if not isinstance(ms, MultiSimilarity) or mining is None:
            return None
        return MsKernel(ms, mining, workspace, part_pairs)

    def prepare_statistics(self, stage: Mapping[str, Statistic], t: Statistics) -> MsStatistics:
        assert stage.keys() == {"max_negative", "lse_neg"}
        return MsStatistics(self.ms, self.mining.threshold(t), self.workspace, self.part_pairs)

    def prepare_weights(self, rows: AnchorSet, columns: AnchorSet | None) -> MsWeights:
        of_rows = self.bounds(rows.t)
        of_columns = of_rows if columns is rows else None
        if columns is not None and columns is not rows:
            bound, at_bound = self.bounds(columns.t)
            of_columns = bound, at_bound + math.log2(columns.share)
        return MsWeights(self.ms.beta, of_rows, of_columns, self.workspace, self.part_pairs)

    def bounds(self, t: Statistics) -> Bounds:
        c = softplus(t["lse_neg"].double())
        bound = raised(self.mining.threshold(t), self.ms, c)
        # An anchor that selected nothing weights nothing, if S has other last bits on its other side.
        bound = torch.where(t["lse_neg"] > -torch.inf, bound, torch.inf)
        return bound, exponents(bound, self.ms, c)


@dataclass(frozen=True)
class MsStatistics:
    """max_negative and lse_neg of the anchors in the rows. The partial result of lse_neg is the sum
    of e^{beta (S - top)}, and top is that of max_negative."""

    ms: MultiSimilarity
    bound: Tensor
    workspace: Workspace
    part_pairs: int | None

    symmetric: ClassVar[bool] = False

    def select(self, rows: slice) -> MsStatistics:
        return replace(self, bound=self.bound[rows])

    def reduce(self, S: Tensor, keep: Tensor | None) -> dict[str, Partial]:
        assert keep is None
        by_rows = S.stride(1) == 1  # S^T is stored by columns, and cut between them
        tops, sums = [], []
        for some in row_parts(S if by_rows else S.T, self.part_pairs):
            part, bound = (S[some], self.bound[some]) if by_rows else (S[:, some], self.bound)
            top, total = self.reduce_part(part, bound)
            tops.append(top)
            sums.append(total)
        if len(tops) == 1:
            return partials(tops[0], sums[0])
        if by_rows:
            return partials(torch.cat(tops), torch.cat(sums))
        return self.merge_all(torch.stack(tops), torch.stack(sums))

    def reduce_part(self, S: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        beta, top = self.ms.beta, S.amax(1)
        bound = torch.maximum(bound, top + LEAST / beta)
        at_bound = (bound - top).mul_(beta * LOG2_E).clamp_(max=0)
        E = like(S, "E", self.workspace)
        return top, terms(S, bound[:, None], at_bound[:, None], beta, out=E).sum(1)

    def merge(self, a: Mapping[str, Partial], b: Mapping[str, Partial]) -> dict[str, Partial]:
        names = "max_negative", "lse_neg"
        tops, sums = (torch.stack([a[name][0], b[name][0]]) for name in names)
        return self.merge_all(tops, sums)

    def merge_all(self, tops: Tensor, sums: Tensor) -> dict[str, Partial]:
        """Of several tiles of the same rows: n x R."""
        top = tops.amax(0)
        scale = (tops - finite(top)).mul_(self.ms.beta * LOG2_E).exp2_()
        return partials(top, sums.mul_(scale).sum(0))

    def finish(self, partials: Mapping[str, Partial]) -> dict[str, Tensor]:
        (top,), (total,) = partials["max_negative"], partials["lse_neg"]
        lse = self.ms.beta * (top.double() - self.ms.lam) + total.log()
        return {"max_negative": top, "lse_neg": lse.to(top.dtype)}


def partials(top: Tensor, total: Tensor) -> dict[str, Partial]:
    return {"max_negative": (top,), "lse_neg": (total,)}


@dataclass(frozen=True)
class MsWeights:
    """of_rows, of_columns: of the anchors there; None: the columns are none."""

    beta: float
    of_rows: Bounds
    of_columns: Bounds | None
    workspace: Workspace
    part_pairs: int | None

    def weigh(self, S: Tensor, keep: Tensor | None, rows: slice | Tensor, columns: slice) -> None:
        """A sample without a positive selects nothing, so there is nothing to mask."""
        assert keep is None
        bound, at_bound = (x[rows][:, None] for x in self.of_rows)
        across = None
        if self.of_columns is not None:
            across = self.of_columns[0][columns][None], self.of_columns[1][columns][None]
        for some in row_parts(S, self.part_pairs):
            part = S[some]
            if across is None:
                terms(part, bound[some], at_bound[some], self.beta, out=part)
                continue
            w = like(part, "E", self.workspace)
            terms(part, bound[some], at_bound[some], self.beta, out=w)
            terms(part, *across, self.beta, out=part).add_(w)


def like(S: Tensor, name: str, workspace: Workspace) -> Tensor:
    """A buffer that is stored as S is, by rows or by columns."""
    by_rows = S.stride(1) == 1
    return workspace.buffer(name, S.shape, S) if by_rows else workspace.buffer(name, S.T.shape, S).T
