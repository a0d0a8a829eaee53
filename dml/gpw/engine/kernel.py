"""What is done to a tile of negatives: the protocol, and which kernel a step uses.

    statistics = kernel.prepare_statistics(stage, t)      # once per stage, or per block of rows
        partials = statistics.reduce(S, keep)             # per tile
        partials = statistics.merge(partials, more)       # of tiles of the same rows
        t |= statistics.finish(partials)
    weights = kernel.prepare_weights(t)                   # once
        weights.weigh_both(S, keep, rows, columns)        # per tile: S becomes w_ij + w_ji

What a kernel prepares is a frozen dataclass with all it needs to know of the anchors. Only the object
that made partial results merges and finishes them, so each kernel has its own kind.

A tile comes with `keep`, which says which pairs are negative. None means all of them; those of losses
that ignore S = -inf always come with None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.ms_kernel import MsKernel
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.statistics import Partial, Statistic, Statistics
from dml.gpw.weighting import PairLoss

Partials = Mapping[str, Partial]


class TileStatistics(Protocol):
    """The statistics of a negative stage, of some anchors in the rows of tiles."""

    @property
    def symmetric(self) -> bool:
        """Whether reduce(S) equals reduce(S^T)."""

    def select(self, rows: slice) -> TileStatistics:
        """Those of some of the anchors."""

    def reduce(self, S: Tensor, keep: Tensor | None) -> Partials: ...

    def merge(self, a: Partials, b: Partials) -> Partials: ...

    def finish(self, partials: Partials) -> dict[str, Tensor]: ...


class TileWeights(Protocol):
    """The weights of negative pairs, from the statistics of all m anchors."""

    def weigh_both(
        self, S: Tensor, keep: Tensor | None, rows: slice | Tensor, columns: slice
    ) -> None:
        """w_ij + w_ji into S, the tile of these rows and columns."""


class TileKernel(Protocol):
    def prepare_statistics(self, stage: Mapping[str, Statistic], t: Statistics) -> TileStatistics:
        """t: the statistics of earlier stages of the anchors in question."""

    def prepare_weights(self, t: Statistics) -> TileWeights:
        """t: the shared statistics of all m anchors."""


# From the loss, the batch, the workspace, and how many pairs of a tile are worked on at a time
MakeKernel = Callable[[PairLoss, GlobalBatch, Workspace, int | None], TileKernel]


def choose_kernel(
    loss: PairLoss, batch: GlobalBatch, workspace: Workspace, part_pairs: int | None
) -> TileKernel:
    """The kernel made for this loss, if there is one."""
    made_for_it = MsKernel.of(loss, batch, workspace, part_pairs)
    return made_for_it or GeneralKernel(loss, batch.groups, part_pairs)


def merged(statistics: TileStatistics, a: Partials | None, b: Partials) -> Partials:
    """a: None before the first tile."""
    return b if a is None else statistics.merge(a, b)
