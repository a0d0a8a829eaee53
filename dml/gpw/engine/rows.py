"""The sweeps over S in blocks of own rows: for any number of processes and classes of any size.

    for every block of own rows:  S = X_rows X^T, row statistics       (first sweep)
    for every block of own rows:  S again; G_ij + G_ji from S and the  (second sweep)
                                  statistics of row i and of row j;
                                  dX_rows = (G + G^T) X

S is kept from the first sweep to the second if it is small, and computed twice if it is not.

Shapes: m samples, b own rows, R rows of a block, C columns of a tile, K slots (largest class).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dml.cost import Cutting, rows_at_a_time
from dml.gpw.engine.kernel import MakeKernel, TileKernel, choose_kernel, merged
from dml.gpw.engine.tiles import PositiveSlots, RowBlock, spans
from dml.gpw.engine.views import (
    against_positives,
    concatenate,
    of_batch,
    of_both,
    of_partners,
    select,
)
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.statistics import Side, Statistics, masked
from dml.gpw.weighting import PairLoss


class RowSweeps:
    """The two sweeps of a process over its own rows.

    cutting: how S is cut; None: as suits the device.
    """

    def __init__(
        self,
        loss: PairLoss,
        batch: GlobalBatch,
        tile: int,
        workspace: Workspace,
        cutting: Cutting | None = None,
        make_kernel: MakeKernel = choose_kernel,
    ) -> None:
        self.loss, self.batch, self.tile = loss, batch, tile
        b, m, X = len(batch.own_rows), batch.groups.m, batch.X
        cutting = cutting or workspace.cutting(X.device)
        self.keeps = b * m * X.element_size() <= cutting.kept_bytes
        rows = rows_at_a_time(b, m, tile, X.element_size(), cutting)
        self.spans = spans(b, rows)
        self.S = workspace.buffer("S", (b if self.keeps else rows, m), X)
        self.kept: list[RowBlock] = []
        self.kernel = make_kernel(loss, workspace, cutting.part_pairs)
        self.slots: list[PositiveSlots] | list[None] = [None] * len(self.spans)
        if batch.groups.arrived_grouped and batch.groups.K <= tile:
            self.slots = PositiveSlots.of_blocks(batch.groups, batch.rank * b, b, rows)

    def blocks(self) -> Iterator[RowBlock]:
        """S of some own rows at a time. Unless S is kept, every block uses the same memory."""
        if self.kept:
            yield from self.kept
            return
        X, own = self.batch.X, self.batch.own_rows
        groups, on_host = self.batch.groups, self.batch.own_rows_on_host
        erase = self.loss.weighting.ignores_minus_inf
        for span, slots in zip(self.spans, self.slots, strict=True):
            rows = self.batch.own(span)
            S = self.S[span] if self.keeps else self.S[: span.stop - span.start]
            torch.mm(X[rows], X.T, out=S)
            block = RowBlock(S, own[span], groups, erase, on_host[span], rows, slots)
            yield block
            if self.keeps:
                self.kept.append(block)

    def statistics(self) -> dict[str, Tensor]:
        blocks = self.blocks()
        of_blocks = [block_statistics(self.loss, self.kernel, b, self.tile) for b in blocks]
        return concatenate(self.loss, of_blocks)

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """It overwrites S."""
        loss, X = self.loss, self.batch.X
        anchors = of_batch(loss, t, self.batch.groups)
        weights = self.kernel.prepare_weights(anchors, anchors)
        for block, span in zip(self.blocks(), self.spans, strict=True):
            w_pos = weigh_positives(loss, block, t)
            for tile in block.tiles(self.tile):
                weights.weigh(tile.S, tile.keep, block.where, tile.columns)

            G = block.S.scatter_(1, block.slots.columns, w_pos.neg_())
            out[span].addmm_(G, X, beta=0, alpha=scale)


def weigh_positives(loss: PairLoss, block: RowBlock, t: Statistics) -> Tensor:
    """w_ij + w_ji of the pairs in the slots; 0 in an empty one. A GPU computes both in one go, which takes
    half as many kernels. For a CPU that would be more work."""
    S, slots = block.S_pos, block.slots
    if loss.same_from_both:
        w = w_back = loss.positive_weight(S, t)
    elif S.is_cpu:
        w = loss.positive_weight(S, against_positives(loss, select(loss, t, block.where)))
        w_back = loss.positive_weight(S, of_partners(loss, t, slots))
    else:
        w, w_back = loss.positive_weight(S.expand(2, -1, -1), of_both(loss, t, slots))
    return masked(w + w_back, slots.valid, 0)


def block_statistics(
    loss: PairLoss, kernel: TileKernel, block: RowBlock, tile: int
) -> dict[str, Tensor]:
    """All statistics of the rows of a block, stage by stage, tile by tile."""
    t: dict[str, Tensor] = {}
    for side, stage in loss.stages:
        if side is Side.POSITIVE:
            known, valid = against_positives(loss, t), block.slots.valid
            t |= {n: s.finish(s.reduce(block.S_pos, valid, known)) for n, s in stage.items()}
        else:
            statistics, partials = kernel.prepare_statistics(stage, t), None
            for each in block.tiles(tile):
                new = statistics.reduce(each.S, each.keep)
                partials = merged(statistics, partials, new)
            assert partials is not None
            t |= statistics.finish(partials)
    return t
