"""Mined multi-similarity on a tile of negatives, in place: the paper's loss in the fewest passes.

    selected:      z = S - (min_positive - eps) > 0                                           (Eq. 11)
    statistics:    max S, and sum e^{beta z - h} of the selected
    weights:       e^{beta z + c}, c = beta (min_positive - eps - lam) - log[1 + e^lse_neg]   (Eq. 13)

It gives what the statistics of `algebra` and the weights of `losses` give. There every operation makes
a new tile, and a mask is slower than all the rest; beside the two products that would be as long again.
A pair that is no negative has S = -inf.

As z is positive, the sums need no maximum to be relative to while beta z stays below 2.4 h, and a million
of e^{1.4 h} can be added: for normalised embeddings and beta up to 57, and in float64 up to 340. Beyond, the
statistics are those of `algebra`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dml.gpw.algebra import LEAST, State, Statistics
from dml.gpw.batch import GlobalBatch
from dml.gpw.losses import MultiSimilarity, softplus
from dml.gpw.pair_loss import Mining, PairLoss
from dml.gpw.tiles import Memory, Named, Negatives

# h, and what stands for -inf: far from where numbers, and exp, leave the normal range
HALF = {torch.float32: (50.0, -84.0), torch.float64: (300.0, -700.0)}


def negatives_of(loss: PairLoss, batch: GlobalBatch, size: int, memory: Memory) -> Negatives:
    """For tiles of at most `size` pairs."""
    if isinstance(loss.weighting, MultiSimilarity) and loss.mining is not None:
        tiles = memory("tiles", (2, size), batch.X)
        return FusedNegatives(loss, loss.weighting, loss.mining, batch, tiles)
    return Negatives(loss, batch.groups)


class FusedNegatives(Negatives):
    def __init__(
        self,
        loss: PairLoss,
        ms: MultiSimilarity,
        mining: Mining,
        batch: GlobalBatch,
        tiles: Tensor,
    ) -> None:
        super().__init__(loss, batch.groups)
        self.ms, self.mining, self.largest, self.tiles = ms, mining, batch.largest, tiles
        self.half, self.least = HALF[tiles.dtype]
        self.minus_half = tiles.new_tensor(-self.half)

    def known(self, t: Statistics) -> Statistics:
        """Besides: the bound of z; what the sums are relative to; and, once lse_neg is known, c. In
        float64, as they are large beside their differences."""
        bound = self.mining.threshold(t)
        more = {"bound": bound}
        if "lse_neg" in t:
            c = self.ms.beta * (bound.double() - self.ms.lam) - softplus(t["lse_neg"].double())
            # without a positive nothing is selected
            more["c"] = c.masked_fill_(bound == torch.inf, 0).to(bound.dtype)
        elif self.ms.beta * (self.largest - bound.min()) < 2.4 * self.half:
            more["relative_to"] = self.ms.beta * bound.double() + self.half
        return {**super().known(t), **more}

    def states(
        self, statistics: Named, S: Tensor, keep: Tensor | None, t: Statistics
    ) -> dict[str, State]:
        if keep is not None or "relative_to" not in t:
            return super().states(statistics, S, keep, t)
        z = self.selected(S, t["bound"], 0, (self.least + self.half) / self.ms.beta)
        z = torch.add(self.minus_half, z, alpha=self.ms.beta, out=z).exp_()
        total = torch.threshold_(z, 2 * math.exp(self.least), 0).sum(1)
        return {"max_negative": (S.amax(1),), "lse_neg": (t["relative_to"][:, 0], total)}

    def weigh_both(
        self, S: Tensor, keep: Tensor | None, rows: Statistics, columns: Statistics
    ) -> None:
        """An anchor without a positive selects nothing, so there is nothing to mask."""
        if keep is not None:
            return super().weigh_both(S, keep, rows, columns)
        torch.add(self.share(S, rows, 0), self.share(S, columns, 1), out=S)
        torch.threshold_(S, 4 * math.exp(LEAST), 0)

    def share(self, S: Tensor, t: Statistics, place: int) -> Tensor:
        z = self.selected(S, t["bound"], place, -torch.inf)
        return torch.add(t["c"], z, alpha=self.ms.beta, out=z).clamp_(LEAST, 0).exp_()

    def selected(self, S: Tensor, bound: Tensor, place: int, otherwise: float) -> Tensor:
        """z of the selected pairs; laid out as S is, by rows or by columns."""
        z = self.tiles[place, : S.numel()]
        z = z.view(S.shape) if S.stride(1) == 1 else z.view(S.T.shape).T
        return torch.threshold_(torch.sub(S, bound, out=z), 0, otherwise)
