"""What sweeps are, and which ones a step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dml.gpw.engine.one_tile import OneTileSweeps
from dml.gpw.engine.rows import RowSweeps
from dml.gpw.engine.symmetric import SymmetricSweeps
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.statistics import Statistics
from dml.gpw.weighting import PairLoss


class Sweeps(Protocol):
    """Two sweeps over the similarities of the own rows, and what is kept between them."""

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of the own rows, and this process's share of those of the batch."""

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """The gradient of the own rows: scale sum_j (G_ij + G_ji) x_j with G = w_neg - w_pos, from
        the shared statistics of all rows."""


# From the loss, the batch, the number of rows and columns of a tile, and the workspace
MakeSweeps = Callable[[PairLoss, GlobalBatch, int, Workspace], Sweeps]


def choose_sweeps(loss: PairLoss, batch: GlobalBatch, tile: int, workspace: Workspace) -> Sweeps:
    """The fastest sweeps in plain torch, on any device."""
    one_tile = OneTileSweeps.of(loss, batch, tile, workspace)
    if one_tile is not None:
        return one_tile
    if SymmetricSweeps.can_sweep(batch, tile):
        return SymmetricSweeps(loss, batch, tile, workspace)
    return RowSweeps(loss, batch, tile, workspace)
