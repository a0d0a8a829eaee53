"""The sweeps of mined multi-similarity over a batch that is one tile of S, for a process alone.

    selected:      z = S - b > 0, b = min_positive - eps, and of the positives S - eps < max_negative
                                                                                    (Eq. 11 and 12)
    terms:         E_neg = e^{beta z - h}, E_pos = e^{-alpha S}, of the selected
    statistics:    lse_neg = c_neg + log sum E_neg, c_neg = beta (b - lam) + h
                   lse_pos = c_pos + log sum E_pos, c_pos = alpha lam
    weights:       w = f E, f = e^c / (1 + e^lse)                                    (Eq. 13 and 14)
    gradient:      dX = (G + G^T) X, G = w_neg - w_pos

A batch of a thousand takes so little time that the small operations on rows and positives count, and
so does memory that is not in the cache: here they are few, and S becomes E and then G in place. It
gives what `algebra` and `losses` give; `fused` tells of h and of what is next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dml.gpw.engine.fused import LARGEST, Terms, factor
from dml.gpw.engine.symmetric import Layout, mirrored_product
from dml.gpw.engine.tiles import Memory
from dml.gpw.grouping import GlobalBatch
from dml.gpw.losses import MultiSimilarity
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import Mining, PairLoss


class WholeSweeps:
    """Both sweeps over the whole of S."""

    @staticmethod
    def of(loss: PairLoss, batch: GlobalBatch, tile: int, memory: Memory) -> WholeSweeps | None:
        """None if the batch is more than a tile, the loss another, or its exponents are too large."""
        ms, mining, dtype = loss.weighting, loss.mining, batch.X.dtype
        layout = Layout.of(batch.groups, tile)
        if not isinstance(ms, MultiSimilarity) or mining is None or len(layout.spans) > 1:
            return None
        largest_z = 2 * batch.largest + mining.eps
        largest_exponent = ms.alpha * (batch.largest + abs(ms.lam))  # of positives
        if not Terms(ms.beta, largest_z, dtype).possible or largest_exponent > LARGEST[dtype]:
            return None
        return WholeSweeps(ms, mining, batch, layout, memory)

    def __init__(
        self,
        ms: MultiSimilarity,
        mining: Mining,
        batch: GlobalBatch,
        layout: Layout,
        memory: Memory,
    ) -> None:
        self.ms, self.mining, self.batch, self.memory = ms, mining, batch, memory
        self.slots, self.valid = layout.slots[0], layout.valid

    def statistics(self) -> dict[str, Tensor]:
        ms, mining, X = self.ms, self.mining, self.batch.X
        S = self.memory("S", (len(X), len(X)), X)
        mirrored_product(X, out=S)
        S_pos = torch.where(self.valid, S.gather(1, self.slots), torch.inf)
        S.scatter_(1, self.slots, -torch.inf)
        t = {"min_positive": S_pos.amin(1), "max_negative": S.amax(1)}

        bound = mining.threshold(t)
        self.terms = terms = Terms(ms.beta, self.batch.largest - float(bound.min()), X.dtype)
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
        """Alone, the statistics are those of before."""
        f_neg = factor(self.c_neg, self.lse_neg).to(out.dtype)
        f_pos = factor(self.ms.alpha * self.ms.lam, self.lse_pos)
        w_neg = torch.threshold_(self.E_neg.mul_(f_neg[:, None]), self.terms.next_to_nothing, 0)
        G = w_neg.scatter_add_(1, self.slots, self.E_pos.mul_(-f_pos[:, None]))
        both = torch.add(G, G.T, out=self.memory("G + G^T", G.shape, G))
        out.addmm_(both, self.batch.X, beta=0, alpha=scale)
