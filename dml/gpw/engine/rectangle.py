"""The sweeps over a rectangle of similarities: anchors against columns that are not the batch.

    for every block of anchors:  S = A_block Y^T, row statistics                   (first sweep)
    for every block of anchors:  S again; G = w_neg - w_pos from S and the         (second sweep)
                                 statistics of the anchors, plus those of the
                                 columns where they are anchors too;
                                 dA_block += G Y,  dY += G^T A_block if asked for

S is kept from the first sweep to the second if it is small, and computed twice if it is not. Where the
weights depend on the statistics of their own row alone, no second sweep is needed: those of a block are
complete before the next block (`one_sweep`), so S is computed once whatever its size.

Shapes: R anchors of a block, C columns, K slots (the largest class among the columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dml.cost import Cutting, rows_at_a_time
from dml.gpw.columns import Matches, Slots
from dml.gpw.engine.kernel import (
    MakeKernel,
    Partials,
    TileStatistics,
    TileWeights,
    choose_kernel,
    merged,
)
from dml.gpw.engine.tiles import Tile, spans
from dml.gpw.engine.views import AnchorSet, against_positives, concatenate, of_anchors, select
from dml.gpw.engine.workspace import Workspace
from dml.gpw.statistics import Partial, Scope, Side, Statistic, Statistics, masked
from dml.gpw.weighting import PairLoss

ALIGNED = 16  # numbers: rows of S begin at a multiple of it


class RectangleSweeps:
    """The sweeps of one step.

    anchors: A, own rows of this process. columns: Y. matches: which columns are of the anchors' classes,
    for exactly these anchors. cutting: how S is cut; None: as suits the device. buffer: the name of the
    memory of S in the workspace; sweeps that are alive at the same time need different ones.
    of_positives: S in the slots of some anchors, where it is known already.
    """

    def __init__(
        self,
        loss: PairLoss,
        anchors: Tensor,
        columns: Tensor,
        matches: Matches,
        tile: int,
        workspace: Workspace,
        cutting: Cutting | None = None,
        make_kernel: MakeKernel = choose_kernel,
        buffer: str = "S",
        of_positives: Callable[[slice], Tensor] | None = None,
    ) -> None:
        assert len(columns) == matches.count
        assert len(anchors) == len(matches.start)
        self.loss, self.A, self.Y, self.matches, self.tile = loss, anchors, columns, matches, tile
        self.workspace, self.buffer, self.of_positives = workspace, buffer, of_positives
        R, C, size = len(anchors), len(columns), anchors.element_size()
        cutting = cutting or workspace.cutting(anchors.device)
        self.keeps = R * C * size <= cutting.kept_bytes
        rows = rows_at_a_time(R, C, tile, size, cutting)
        self.spans, self.columns = spans(R, rows), spans(C, tile)
        # One more column than there are: empty slots read and write it.
        width = (C // ALIGNED + 1) * ALIGNED
        self.S = workspace.buffer(buffer, (R if self.keeps else rows, width), anchors)
        self.kept: list[RectangleBlock] = []
        self.kernel = make_kernel(loss, workspace, cutting.part_pairs)

    def blocks(self) -> Iterator[RectangleBlock]:
        """S of some anchors at a time. Unless S is kept, every block uses the same memory."""
        if self.kept:
            yield from self.kept
            return
        for span in self.spans:
            S = self.S[span] if self.keeps else self.S[: span.stop - span.start]
            torch.mm(self.A[span], self.Y.T, out=S[:, : len(self.Y)])
            block = RectangleBlock(self, span, S, self.matches.select(span).slots)
            yield block
            if self.keeps:
                self.kept.append(block)

    def statistics(self) -> dict[str, Tensor]:
        """Those of the anchors; of a statistic of the batch, the share of these anchors."""
        return concatenate(self.loss, [block.statistics() for block in self.blocks()])

    def gradient(
        self,
        rows: AnchorSet,
        columns: AnchorSet | None,
        scale: float,
        out: Tensor,
        columns_out: Tensor | None = None,
    ) -> None:
        """Add scale G Y to `out`, and scale G^T A to `columns_out`. It overwrites S.

        rows: all anchors of these sweeps. columns: all columns as anchors; None: they are none.
        """
        weights = self.kernel.prepare_weights(rows, columns)
        for block in self.blocks():
            some = AnchorSet(select(self.loss, rows.t, block.span), None)
            block.weigh_positives(some, columns)
            block.weigh_negatives(weights, block.span)
            block.multiply(scale, out, columns_out)

    def one_sweep(
        self, scale: float, out: Tensor | None, columns_out: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`statistics`, and `gradient` for columns that are no anchors, with S computed once. The loss must
        have no statistics of the whole batch. out: None: no gradient."""
        assert one_sweep_suffices(self.loss)
        found = []
        for block in self.blocks():
            t = block.statistics()
            found.append(t)
            if out is not None:
                block.gradient(of_rows(self.loss, t), scale, out, columns_out)
        return concatenate(self.loss, found)


def one_sweep_suffices(loss: PairLoss) -> bool:
    """Whether the weights of a row depend on statistics of that row alone."""
    return all(loss.scopes[name] is not Scope.BATCH for name in loss.shared_statistics)


def of_rows(loss: PairLoss, t: Statistics) -> AnchorSet:
    """Anchors by their own statistics. One whose positives were all left out by mining weights nothing:
    then none of its negatives is selected either."""
    if not loss.has_anchors:
        return AnchorSet(t, None)
    is_anchor = t["P"] > 0
    every = is_anchor.is_cpu and bool(is_anchor.all())  # a GPU would be waited for
    return AnchorSet(t, None if every else is_anchor)


class RectangleBlock:
    """Some anchors against all columns.

        t = {}
        for side, stage in loss.stages:
            statistics, partials = block.reduce(side, stage, t)
            # here the partial results of other columns can be merged
            t |= statistics.finish(partials)
        block.gradient(of_rows(loss, t), scale, out, columns_out)

    span: which of the anchors of the sweeps. S: R x C; it becomes G. padded: S and the spare columns.
    """

    def __init__(self, sweeps: RectangleSweeps, span: slice, padded: Tensor, slots: Slots) -> None:
        self.sweeps, self.span, self.padded, self.slots = sweeps, span, padded, slots
        C = len(sweeps.Y)
        self.S = padded[:, :C]
        padded[:, C:] = 0
        known = sweeps.of_positives
        self.S_pos = padded.gather(1, slots.columns) if known is None else known(span)
        self.keep: Tensor | None = None
        if sweeps.loss.weighting.ignores_minus_inf:
            padded.scatter_(1, slots.columns, -torch.inf)

    def negatives(self) -> Tensor | None:
        """Which pairs are negative; None: all above -inf."""
        if self.sweeps.loss.weighting.ignores_minus_inf:
            return None
        like = torch.empty(0, dtype=torch.bool, device=self.S.device)
        keep = self.sweeps.workspace.buffer(
            f"negatives of {self.sweeps.buffer}", self.padded.shape, like
        )
        return keep.fill_(True).scatter_(1, self.slots.columns, False)

    def tiles(self) -> Iterator[Tile]:
        keep = self.negatives()
        for columns in self.sweeps.columns:
            kept = None if keep is None else keep[:, columns]
            yield Tile(columns, self.S[:, columns], kept)

    def reduce(
        self, side: Side, stage: Mapping[str, Statistic], t: Statistics
    ) -> tuple[StageStatistics, Partials]:
        """The partial results of a stage, and what merges and finishes them. t: the statistics of these
        anchors from earlier stages."""
        if side is Side.POSITIVE:
            known, valid = against_positives(self.sweeps.loss, t), self.slots.valid
            found = {name: s.reduce(self.S_pos, valid, known) for name, s in stage.items()}
            return PositiveStatistics(stage), found
        statistics, partials = self.sweeps.kernel.prepare_statistics(stage, t), None
        for tile in self.tiles():
            partials = merged(statistics, partials, statistics.reduce(tile.S, tile.keep))
        assert partials is not None
        return statistics, partials

    def statistics(self) -> dict[str, Tensor]:
        """All statistics of these anchors, stage by stage."""
        t: dict[str, Tensor] = {}
        for side, stage in self.sweeps.loss.stages:
            statistics, partials = self.reduce(side, stage, t)
            t |= statistics.finish(partials)
        return t

    def gradient(
        self, rows: AnchorSet, scale: float, out: Tensor, columns_out: Tensor | None = None
    ) -> None:
        """Add scale G Y to the rows of these anchors in `out`, and scale G^T A to `columns_out`, for columns
        that are no anchors. rows: the anchors of this block. It overwrites S."""
        weights = self.sweeps.kernel.prepare_weights(rows, None)
        self.weigh_positives(rows, None)
        self.weigh_negatives(weights, slice(0, len(self.S)))
        self.multiply(scale, out, columns_out)

    def weigh_positives(self, rows: AnchorSet, columns: AnchorSet | None) -> None:
        """w_ij, and w_ji if the columns are anchors, of the pairs in the slots; 0 in the others."""
        loss, S, slots = self.sweeps.loss, self.S_pos, self.slots
        w = loss.positive_weight(S, against_positives(loss, rows.t))
        if columns is not None:
            anchors = slots.columns * slots.valid  # of an empty slot, any
            places = self.sweeps.matches.place[self.span, None] * slots.valid
            w_back = loss.positive_weight(S, of_anchors(loss, columns.t, anchors, places))
            w = w + columns.share * w_back
        self.w_pos = masked(w, slots.valid, 0)

    def weigh_negatives(self, weights: TileWeights, rows: slice) -> None:
        """rows: where these anchors are among those of `weights`."""
        for tile in self.tiles():
            weights.weigh(tile.S, tile.keep, rows, tile.columns)

    def multiply(self, scale: float, out: Tensor, columns_out: Tensor | None) -> None:
        self.padded.scatter_(1, self.slots.columns, self.w_pos.neg_())
        G, A = self.S, self.sweeps.A[self.span]
        out[self.span].addmm_(G, self.sweeps.Y, alpha=scale)
        if columns_out is not None:
            columns_out.addmm_(G.T, A, alpha=scale)


@dataclass(frozen=True)
class PositiveStatistics:
    """Merges and finishes partial results of positive pairs."""

    stage: Mapping[str, Statistic]

    def merge(self, a: Partials, b: Partials) -> dict[str, Partial]:
        return {name: s.merge(a[name], b[name]) for name, s in self.stage.items()}

    def finish(self, partials: Partials) -> dict[str, Tensor]:
        return {name: s.finish(partials[name]) for name, s in self.stage.items()}


StageStatistics = TileStatistics | PositiveStatistics
