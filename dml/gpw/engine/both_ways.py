"""The sweeps over a rectangle whose rows and columns are all anchors, of one process alone: two towers.

    S of the positive pairs, by index
    for every block of rows:   S = X_block Y^T; statistics of the rows from S, of the columns from S^T
    for every block of rows:   S again; W = w_ij + w_ji;  dX_block = W Y,  dY += W^T X_block

A block of S serves both directions: four products, as many as the two bare ones of each direction, and
three if S is small enough to be kept. Several processes cannot do that without sending gradients back;
they sweep each direction on its own (`rectangle`).

Shapes: R rows of a block, C columns, K slots (the largest class among the columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from dml.cost import Cutting
from dml.gpw.columns import Matches
from dml.gpw.engine.kernel import MakeKernel, Partials, choose_kernel, merged
from dml.gpw.engine.rectangle import RectangleSweeps
from dml.gpw.engine.tiles import spans
from dml.gpw.engine.views import AnchorSet, against_positives, concatenate, select
from dml.gpw.engine.workspace import Workspace
from dml.gpw.statistics import Side, Statistic, Statistics
from dml.gpw.weighting import PairLoss

GATHERED = 2**22  # numbers of vectors that are gathered at a time for the positive pairs


class BothWays:
    """X: all rows. Y: all columns. there, back: which columns are of the classes of the rows, and the
    reverse; both without identities."""

    def __init__(
        self,
        loss: PairLoss,
        X: Tensor,
        Y: Tensor,
        there: Matches,
        back: Matches,
        tile: int,
        workspace: Workspace,
        cutting: Cutting | None = None,
        make_kernel: MakeKernel = choose_kernel,
    ) -> None:
        self.loss, self.there, self.back = loss, there, back
        self.sweeps = RectangleSweeps(
            loss, X, Y, there, tile, workspace, cutting, make_kernel, of_positives=self.positives
        )
        self.kernel = self.sweeps.kernel

    @cached_property
    def S_pos(self) -> Tensor:
        """S in the slots of the rows; anything in an empty one."""
        X, Y, slots = self.sweeps.A, self.sweeps.Y, self.there.slots
        columns, found = slots.columns * slots.valid, X.new_empty(slots.columns.shape)
        for rows in spans(len(X), max(1, GATHERED // (self.there.K * X.shape[1]))):
            torch.bmm(Y[columns[rows]], X[rows, :, None], out=found[rows, :, None])
        return found

    def positives(self, span: slice) -> Tensor:
        return self.S_pos[span]

    @cached_property
    def S_pos_back(self) -> Tensor:
        """The same numbers in the slots of the columns."""
        slots = self.back.slots
        return self.S_pos[slots.columns * slots.valid, self.back.place[:, None] * slots.valid]

    def statistics(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of the rows, and those of the columns."""
        t: dict[str, Tensor] = {}
        t_back: dict[str, Tensor] = {}
        for side, stage in self.loss.stages:
            if side is Side.POSITIVE:
                t |= self.of_positives(stage, self.S_pos, self.there.slots.valid, t)
                t_back |= self.of_positives(stage, self.S_pos_back, self.back.slots.valid, t_back)
            else:
                found = self.of_negatives(stage, t, t_back)
                t |= found[0]
                t_back |= found[1]
        return t, t_back

    def of_positives(
        self, stage: Mapping[str, Statistic], S: Tensor, valid: Tensor, t: Statistics
    ) -> dict[str, Tensor]:
        known = against_positives(self.loss, t)
        return {name: s.finish(s.reduce(S, valid, known)) for name, s in stage.items()}

    def of_negatives(
        self, stage: Mapping[str, Statistic], t: Statistics, t_back: Statistics
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        across = self.kernel.prepare_statistics(stage, t_back)
        columns = [across.select(some) for some in self.sweeps.columns]
        found: list[Partials | None] = [None] * len(columns)
        of_blocks = []
        for block in self.sweeps.blocks():
            along = self.kernel.prepare_statistics(stage, select(self.loss, t, block.span))
            partials: Partials | None = None
            for n, tile in enumerate(block.tiles()):
                partials = merged(along, partials, along.reduce(tile.S, tile.keep))
                keep = None if tile.keep is None else tile.keep.T
                found[n] = merged(columns[n], found[n], columns[n].reduce(tile.S.T, keep))
            assert partials is not None
            of_blocks.append(along.finish(partials))
        of_columns = [
            statistics.finish(partials)
            for statistics, partials in zip(columns, found, strict=True)
            if partials is not None
        ]
        return concatenate(self.loss, of_blocks), concatenate(self.loss, of_columns)

    def gradient(
        self,
        rows: AnchorSet,
        columns: AnchorSet,
        scale: float,
        out: Tensor,
        columns_out: Tensor | None,
    ) -> None:
        """Add scale W Y to `out` and scale W^T X to `columns_out`. It overwrites S."""
        self.sweeps.gradient(rows, columns, scale, out, columns_out)
