"""The sweeps of mined multi-similarity over a batch that is one tile of S, for a process alone.

    selected:      S > bound, bound = min_positive - eps, of the negatives                    (Eq. 11)
                   S - eps < max_negative, of the positives                                   (Eq. 12)
    terms:         E = e^{x - c} of the selected pairs;  x = beta (S - lam) for negatives and
                   x = -alpha (S - lam) for positives, c the largest x of the anchor
    statistics:    lse = c + log sum E
    weights:       w = f E, f = e^c / (1 + e^lse)                                      (Eq. 13 and 14)
    gradient:      dX = (G + G^T) X, G = w_neg - w_pos

A batch of a thousand takes so little time that small operations on rows and positives count, and so
does memory outside of the cache. Here these operations are few, and S becomes E and then G in place.
`ms_kernel` explains how terms are computed; here one with a weight below e^LEAST is zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dml.gpw.engine.ms_kernel import LOG2_E, exponents, raised, terms
from dml.gpw.engine.symmetric import Layout, SymmetricSweeps, mirrored_product
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.losses.exponentials import softplus
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import Mining, PairLoss


class OneTileSweeps:
    """Both sweeps over all of S."""

    @staticmethod
    def of(
        loss: PairLoss, batch: GlobalBatch, tile: int, workspace: Workspace
    ) -> OneTileSweeps | None:
        """None if the loss is another one, or the batch is more than a tile or not of one process."""
        ms, mining = loss.weighting, loss.mining
        if not isinstance(ms, MultiSimilarity) or mining is None:
            return None
        if not SymmetricSweeps.can_sweep(batch, tile):
            return None
        layout = Layout.of(batch.groups, tile)
        if len(layout.spans) > 1:
            return None
        return OneTileSweeps(ms, mining, batch, layout, workspace)

    def __init__(
        self,
        ms: MultiSimilarity,
        mining: Mining,
        batch: GlobalBatch,
        layout: Layout,
        workspace: Workspace,
    ) -> None:
        self.ms, self.mining, self.batch, self.workspace = ms, mining, batch, workspace
        self.slots, self.valid = layout.slots[0], layout.valid

    def statistics(self) -> dict[str, Tensor]:
        ms, mining, X = self.ms, self.mining, self.batch.X
        S = self.workspace.buffer("S", (len(X), len(X)), X)
        mirrored_product(X, self.workspace.cutting(X.device).strip, out=S)
        S_pos = torch.where(self.valid, S.gather(1, self.slots), torch.inf)
        S.scatter_(1, self.slots, -torch.inf)
        t = {"min_positive": S_pos.amin(1), "max_negative": S.amax(1)}

        self.c_neg = ms.beta * (t["max_negative"].double() - ms.lam)
        # Of m equal terms: the largest that lse_neg can be, so f is known up to a factor of m
        largest = softplus(self.c_neg + math.log(len(X)))
        bound = raised(mining.threshold(t), ms, largest)
        at_bound = exponents(bound, ms, self.c_neg)
        self.E_neg = terms(S, bound[:, None], at_bound[:, None], ms.beta, out=S)

        hardest = t["min_positive"].clamp(max=torch.finfo(X.dtype).max)  # without a positive: inf
        selected = mining.select_positive(S_pos, {"max_negative": t["max_negative"][:, None]})
        self.c_pos = -ms.alpha * (hardest.double() - ms.lam)
        x_pos = S_pos.sub_(hardest[:, None]).mul_(-ms.alpha * LOG2_E)
        self.E_pos = x_pos.exp2_().mul_(selected)

        self.lse_neg = self.c_neg + self.E_neg.sum(1).log()
        self.lse_pos = self.c_pos + self.E_pos.sum(1).log()
        return {
            **t,
            "lse_neg": self.lse_neg.to(X.dtype),
            "lse_pos": self.lse_pos.to(X.dtype),
            "P": selected.sum(1, dtype=X.dtype),
        }

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """With one process `t` is unused: it equals what `statistics` stored."""
        f_neg, f_pos = factor(self.c_neg, self.lse_neg), factor(self.c_pos, self.lse_pos)
        G = self.E_neg.mul_(f_neg.to(out.dtype)[:, None])
        G.scatter_(1, self.slots, self.E_pos.mul_(-f_pos.to(out.dtype)[:, None]))
        both = torch.add(G, G.T, out=self.workspace.buffer("G + G^T", G.shape, G))
        out.addmm_(both, self.batch.X, beta=0, alpha=scale)


def factor(c: Tensor, lse: Tensor) -> Tensor:
    """f = e^c / (1 + e^lse); 0 where nothing is selected."""
    return torch.where(lse > -torch.inf, torch.exp(c - softplus(lse)), 0)
