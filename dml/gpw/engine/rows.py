"""The sweeps over S in blocks of own rows: for any number of processes and classes of any size.

    for every block of own rows:  S = X_rows X^T, row statistics       (first sweep)
    for every block of own rows:  S again; G_ij + G_ji from S and the  (second sweep)
                                  statistics of row i and of row j;
                                  dX_rows = (G + G^T) X

S is kept from the first sweep to the second where it is small, and computed twice where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dml.cost import KEPT_SIMILARITIES, rows_at_a_time
from dml.gpw.engine.fused import negatives_of
from dml.gpw.engine.tiles import (
    Block,
    Memory,
    block_statistics,
    joined,
    of_columns,
    of_partners,
    of_rows,
    part,
    spans,
)
from dml.gpw.grouping import GlobalBatch
from dml.gpw.statistics import Side, Statistics, masked
from dml.gpw.weighting import PairLoss


class RowSweeps:
    """The two sweeps of a process over its own rows."""

    def __init__(self, loss: PairLoss, batch: GlobalBatch, tile: int, memory: Memory) -> None:
        self.loss, self.batch, self.tile = loss, batch, tile
        b, m, X = len(batch.own_rows), batch.groups.m, batch.X
        self.keeps = b * m * X.element_size() <= KEPT_SIMILARITIES
        rows = rows_at_a_time(b, m, tile, X.element_size())
        self.spans = spans(b, rows)
        self.S = memory("S", (b if self.keeps else rows, m), X)
        self.kept: list[Block] = []
        self.negatives = negatives_of(loss, batch, memory)

    def blocks(self) -> Iterator[Block]:
        """S of some own rows at a time; unless it is kept, all in the same memory."""
        if self.kept:
            yield from self.kept
            return
        X, own = self.batch.X, self.batch.own_rows
        for span in self.spans:
            rows = own[span]
            S = self.S[span] if self.keeps else self.S[: len(rows)]
            block = Block(torch.mm(X[rows], X.T, out=S), rows, self.batch.groups)
            if self.loss.weighting.vanishes:
                block.erase_positives()
            yield block
            if self.keeps:
                self.kept.append(block)

    def statistics(self) -> dict[str, Tensor]:
        blocks = self.blocks()
        parts = [block_statistics(self.negatives, block, self.tile) for block in blocks]
        return joined(self.loss, parts)

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """Overwrites S."""
        loss, X = self.loss, self.batch.X
        known = self.negatives.known(t)
        for block, span in zip(self.blocks(), self.spans, strict=True):
            S_pos, classes = block.S_pos, block.classes
            own = of_rows(loss, part(loss, t, block.rows), Side.POSITIVE)
            w = loss.positive_weight(S_pos, own)
            w_back = loss.positive_weight(S_pos, of_partners(loss, t, block))
            w_pos = masked(w + w_back, classes.valid, 0)

            rows = of_rows(loss, part(loss, known, block.rows), Side.NEGATIVE)
            for columns, S, keep in block.negatives(self.tile):
                self.negatives.weigh_both(S, keep, rows, of_columns(loss, known, columns))

            G = block.S.scatter_add_(1, classes.slots, -w_pos)
            out[span].addmm_(G, X, beta=0, alpha=scale)
