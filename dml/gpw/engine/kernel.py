"""What is done to a tile of negatives: the protocol, and which kernel a step uses.

    statistics = kernel.prepare_statistics(stage, t)      # once per stage, or per block of rows
        partials = statistics.reduce(S, keep)             # per tile
        partials = statistics.merge(partials, more)       # of tiles of the same rows
        t |= statistics.finish(partials)
    weights = kernel.prepare_weights(rows, columns)       # once
        weights.weigh(S, keep, some_rows, some_columns)   # per tile: S becomes w_ij + w_ji

The samples in the columns of a tile may be anchors too, as in a batch that is compared with itself:
then w_ji is their weight of the pair. Where they are none, S becomes w_ij.

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
from dml.gpw.engine.views import AnchorSet
from dml.gpw.engine.workspace import Workspace
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
    """The weights of negative pairs, from the statistics of their anchors."""

    def weigh(self, S: Tensor, keep: Tensor | None, rows: slice | Tensor, columns: slice) -> None:
        """w_ij + w_ji into S, the tile of these rows and columns; w_ij alone if the columns are no
        anchors."""


class TileKernel(Protocol):
    def prepare_statistics(self, stage: Mapping[str, Statistic], t: Statistics) -> TileStatistics:
        """t: the statistics of earlier stages of the anchors in question."""

    def prepare_weights(self, rows: AnchorSet, columns: AnchorSet | None) -> TileWeights:
        """The anchors in the rows, and those in the columns: the same object for a batch that is compared
        with itself, None if the samples in the columns are no anchors."""


# From the loss, the workspace, and how many pairs of a tile are worked on at a time
MakeKernel = Callable[[PairLoss, Workspace, int | None], TileKernel]


def choose_kernel(loss: PairLoss, workspace: Workspace, part_pairs: int | None) -> TileKernel:
    """The kernel made for this loss, if there is one."""
    made_for_it = MsKernel.of(loss, workspace, part_pairs)
    return made_for_it or GeneralKernel(loss, part_pairs)


def merged(statistics: TileStatistics, a: Partials | None, b: Partials) -> Partials:
    """a: None before the first tile."""
    return b if a is None else statistics.merge(a, b)
