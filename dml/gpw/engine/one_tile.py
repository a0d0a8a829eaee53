"""The sweeps of mined multi-similarity over a batch that is one tile of S, for a process alone.

    selected:      z = S - bound > 0, bound = min_positive - eps                              (Eq. 11)
                   S - eps < max_negative, of the positives                                   (Eq. 12)
    terms:         E_neg = e^{beta z - h}, E_pos = e^{-alpha S}, of the selected pairs
    statistics:    lse_neg = c_neg + log sum E_neg, c_neg = beta (bound - lam) + h
                   lse_pos = c_pos + log sum E_pos, c_pos = alpha lam
    weights:       w = f E, f = e^c / (1 + e^lse)                                      (Eq. 13 and 14)
    gradient:      dX = (G + G^T) X, G = w_neg - w_pos

A batch of a thousand takes so little time that small operations on rows and positives count, and so
does memory outside of the cache. Here these operations are few, and S becomes E and then G in place.
`ms_kernel` explains h and the terms of pairs that are not selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dml.gpw.engine.ms_kernel import LARGEST, Terms, exponents_fit, factor
from dml.gpw.engine.symmetric import Layout, SymmetricSweeps, mirrored_product
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import Mining, PairLoss


class OneTileSweeps:
    """Both sweeps over all of S."""

    @staticmethod
    def of(
        loss: PairLoss, batch: GlobalBatch, tile: int, workspace: Workspace
    ) -> OneTileSweeps | None:
        """None if the loss is another one, the batch is more than a tile or not of one process, or the
        exponents do not fit."""
        ms, mining = loss.weighting, loss.mining
        if not isinstance(ms, MultiSimilarity) or mining is None:
            return None
        if not SymmetricSweeps.can_sweep(batch, tile):
            return None
        layout = Layout.of(batch.groups, tile)
        of_positives = ms.alpha * (batch.largest_similarity + abs(ms.lam))
        if (
            len(layout.spans) > 1
            or not exponents_fit(ms, mining, batch)
            or of_positives > LARGEST[batch.X.dtype]
        ):
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
        mirrored_product(X, out=S)
        S_pos = torch.where(self.valid, S.gather(1, self.slots), torch.inf)
        S.scatter_(1, self.slots, -torch.inf)
        t = {"min_positive": S_pos.amin(1), "max_negative": S.amax(1)}

        bound = mining.threshold(t)
        largest_z = self.batch.largest_similarity - float(bound.min())
        self.terms = terms = Terms.up_to(largest_z, ms.beta, X.dtype)
        self.E_neg = terms(S, bound[:, None], out=S)

        selected = mining.select_positive(S_pos, {"max_negative": t["max_negative"][:, None]})
        self.E_pos = S_pos.mul_(-ms.alpha).exp_().mul_(selected)

        sum_neg = terms.of_selected(self.E_neg.sum(1))
        self.c_neg = ms.beta * (bound.double() - ms.lam) + terms.h
        self.lse_neg = torch.where(sum_neg > 0, self.c_neg + sum_neg.log(), -torch.inf)
        self.lse_pos = ms.alpha * ms.lam + self.E_pos.sum(1).log()
        return {
            **t,
            "lse_neg": self.lse_neg.to(X.dtype),
            "lse_pos": self.lse_pos,
            "P": selected.sum(1, dtype=X.dtype),
        }

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """With one process `t` is unused: it equals what `statistics` stored."""
        f_neg = factor(self.c_neg, self.lse_neg).to(out.dtype)
        f_pos = factor(self.ms.alpha * self.ms.lam, self.lse_pos)
        w_neg = torch.threshold_(self.E_neg.mul_(f_neg[:, None]), self.terms.negligible, 0)
        G = w_neg.scatter_add_(1, self.slots, self.E_pos.mul_(-f_pos[:, None]))
        both = torch.add(G, G.T, out=self.workspace.buffer("G + G^T", G.shape, G))
        out.addmm_(both, self.batch.X, beta=0, alpha=scale)
