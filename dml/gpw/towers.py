"""Two towers: the embeddings of two encoders, or of two views, are compared with each other.

    L = 1/2 ( mean_i L_i(x_i against all y)  +  mean_j L_j(y_j against all x) )

x_i and y_j are a positive pair where their labels agree; there is no self pair. With labels that are all
different it is the symmetric loss of CLIP (info_nce) or of SigLIP (pairwise_sigmoid). A loss that is one
number of the whole batch (histogram, margin) has one number per direction, from the pairs of that
direction's anchors.

    all-gather x and y with their labels                               X, Y
    first sweeps:  S = x_own Y^T, the statistics of the own x;  y_own X^T, those of the own y
    all-gather the statistics, a few scalars per row
    second sweeps: dL/dx_own from S, the statistics of row i as anchor and of column j as anchor;
                   dL/dy_own alike

Backward sends nothing, as for one batch. One process alone uses S for both directions (`engine.both_ways`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.gpw.checks import row_norms
from dml.gpw.columns import Matches
from dml.gpw.engine.both_ways import BothWays
from dml.gpw.engine.rectangle import RectangleSweeps
from dml.gpw.engine.views import AnchorSet, select
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import copied
from dml.gpw.statistics import Scope, Statistics, constant
from dml.gpw.weighting import PairLoss


@dataclass(frozen=True, eq=False)
class Tower:
    """own: the rows of this process. X: those of all. labels: of all, on the CPU. where: of the own rows
    among all."""

    own: Tensor
    X: Tensor
    labels: Tensor
    where: slice

    @property
    def count(self) -> int:
        return len(self.X)


class Towers:
    """Both towers, gathered in one collective.

    norms: the lengths of all embeddings, those of y behind those of x for every process.
    """

    def __init__(
        self,
        x: tuple[Tensor, Tensor],
        y: tuple[Tensor, Tensor],
        all_labels: tuple[Tensor, Tensor] | None,
        wire: Wire,
    ) -> None:
        """x, y: the own embeddings and labels. all_labels: those of all processes for both, on the CPU, if
        they are known; otherwise they are gathered."""
        sent = (x[0], y[0]) if all_labels is not None else (x[0], y[0], x[1], y[1])
        X, Y, *labels = wire.gather(*sent)
        of_x, of_y = all_labels or (z.flatten().cpu() for z in labels)
        norms = [row_norms(Z.flatten(0, 1)).view(wire.size, -1) for Z in (X, Y)]
        self.norms = torch.cat(norms, 1).flatten()
        self.x = tower(x[0], X, of_x, wire.rank)
        self.y = tower(y[0], Y, of_y, wire.rank)


def problem_of_towers(
    x: Tensor, y: Tensor, known: tuple[Tensor | None, Tensor | None]
) -> str | None:
    """Why two towers cannot be compared, in a sentence; None if they can."""
    if (known[0] is None) != (known[1] is None):
        return "all_labels and all_y_labels must be given together"
    if x.ndim == y.ndim == 2 and (x.shape[1], x.dtype, x.device) != (y.shape[1], y.dtype, y.device):
        what = " and ".join(f"{z.shape[1]} of {z.dtype} on {z.device}" for z in (x, y))
        return f"both towers must have embeddings of the same size, type and device, not {what}"
    return None


def tower(own: Tensor, gathered: Tensor, labels: Tensor, rank: int) -> Tower:
    b = len(own)
    return Tower(own, gathered.flatten(0, 1), labels, slice(rank * b, (rank + 1) * b))


class Direction:
    """One tower as anchors, the other as columns."""

    def __init__(
        self,
        loss: PairLoss,
        anchors: Tower,
        columns: Tower,
        tile: int,
        workspace: Workspace,
        buffer: str,
    ) -> None:
        self.loss, self.anchors = loss, anchors
        on_host = Matches.of(anchors.labels, columns.labels)
        matches = on_host.to(anchors.X.device)
        self.is_anchor = anchors_of(loss, on_host, anchors.X.device)
        mine = matches.select(anchors.where)
        self.sweeps = RectangleSweeps(
            loss, anchors.own, columns.X, mine, tile, workspace, buffer=buffer
        )
        self.own = self.sweeps.statistics()

    def own_sum(self) -> Tensor:
        """Over the own anchors; 0 of a loss without anchors."""
        if self.loss.has_anchors:
            return self.loss.totals_of_anchors(self.own)
        return constant(0, torch.float64, self.anchors.X.device)

    def shared(self) -> list[Tensor]:
        return [self.own[name] for name in self.loss.shared_statistics]

    def learn(self, sums: Tensor, gathered: list[Tensor]) -> None:
        """The loss of this direction, and the statistics of all its anchors, from what all processes
        sent."""
        loss, self.t = self.loss, {}
        for name, x in zip(loss.shared_statistics, gathered, strict=True):
            self.t[name] = x.sum(0) if loss.scopes[name] is Scope.BATCH else x.flatten(0, 1)
        if loss.has_anchors:
            self.value = sums.sum(0) / self.anchors.count
        else:
            self.value = loss.totals_of_batch(self.t)

    t: Statistics

    def of_all(self, share: float) -> AnchorSet:
        return AnchorSet(self.t, self.is_anchor, share)

    def of_own(self) -> AnchorSet:
        where, is_anchor = self.anchors.where, self.is_anchor
        t = select(self.loss, self.t, where)
        return AnchorSet(t, None if is_anchor is None else is_anchor[where])

    def gradient(self, other: Direction, scale: float) -> Tensor:
        """Of the own anchors, by both directions. scale: of the gradient of the whole loss."""
        mine, others = (self.loss.divisor(each.anchors.count) for each in (self, other))
        out = torch.zeros_like(self.anchors.own)
        columns = other.of_all(mine / others)
        self.sweeps.gradient(self.of_own(), columns, scale / (2 * mine), out)
        return out


class Compared(Protocol):
    """Two towers after the first sweeps. value: with slopes, if something is learned."""

    value: Tensor

    def gradients(self, scale: float, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of the own x and of the own y, where they are wanted."""


class ComparedApart:
    """On several processes, which know the statistics of each other's anchors: each direction has its
    own sweeps."""

    def __init__(
        self, loss: PairLoss, towers: Towers, tile: int, workspace: Workspace, wire: Wire
    ) -> None:
        there = Direction(loss, towers.x, towers.y, tile, workspace, "S")
        back = Direction(loss, towers.y, towers.x, tile, workspace, "S of the other tower")
        parts = there.shared(), back.shared()
        sums_there, sums_back, *gathered = wire.gather(
            there.own_sum(), back.own_sum(), *parts[0], *parts[1]
        )
        there.learn(sums_there, gathered[: len(parts[0])])
        back.learn(sums_back, gathered[len(parts[0]) :])
        self.value = (there.value + back.value) / 2
        self.directions = there, back

    def gradients(self, scale: float, wanted: Sequence[bool]) -> list[Tensor | None]:
        there, back = self.directions
        ways = zip(((there, back), (back, there)), wanted, strict=True)
        return [
            anchors.gradient(others, scale) if asked else None for (anchors, others), asked in ways
        ]


class ComparedTogether:
    """On one process: the sweeps serve both directions."""

    def __init__(self, loss: PairLoss, towers: Towers, tile: int, workspace: Workspace) -> None:
        self.loss, self.x, self.y = loss, towers.x, towers.y
        x, y, device = self.x, self.y, self.x.X.device
        there, back = Matches.of(x.labels, y.labels), Matches.of(y.labels, x.labels)
        self.are_anchors = [anchors_of(loss, matches, device) for matches in (there, back)]
        self.sweeps = BothWays(loss, x.X, y.X, there.to(device), back.to(device), tile, workspace)
        self.t = self.sweeps.statistics()
        values = [
            loss.totals_of_anchors(t) / tower.count if loss.has_anchors else loss.totals_of_batch(t)
            for t, tower in zip(self.t, (x, y), strict=True)
        ]
        self.value = (values[0] + values[1]) / 2

    def gradients(self, scale: float, wanted: Sequence[bool]) -> list[Tensor | None]:
        if not any(wanted):
            return [None, None]
        mine, others = (self.loss.divisor(tower.count) for tower in (self.x, self.y))
        rows = AnchorSet(self.t[0], self.are_anchors[0])
        columns = AnchorSet(self.t[1], self.are_anchors[1], mine / others)
        dx, dy = torch.zeros_like(self.x.X), torch.zeros_like(self.y.X) if wanted[1] else None
        self.sweeps.gradient(rows, columns, scale / (2 * mine), dx, dy)
        return [dx if wanted[0] else None, dy]


def anchors_of(loss: PairLoss, on_host: Matches, device: torch.device) -> Tensor | None:
    """Which samples have a column of their class; None: all, or the loss has no anchors."""
    if not loss.has_anchors or bool(on_host.has_column.all()):
        return None
    return copied(on_host.has_column, device)


def compare_towers(
    loss: PairLoss, towers: Towers, tile: int, workspace: Workspace, wire: Wire
) -> Compared:
    if wire.size == 1:
        return ComparedTogether(loss, towers, tile, workspace)
    return ComparedApart(loss, towers, tile, workspace, wire)
