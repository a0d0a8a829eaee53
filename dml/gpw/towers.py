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

Backward sends nothing, as for one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dml.distributed.collectives import Wire
from dml.gpw.checks import row_norms
from dml.gpw.columns import Matches
from dml.gpw.engine.rectangle import RectangleSweeps
from dml.gpw.engine.views import AnchorSet, select
from dml.gpw.engine.workspace import Workspace
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
        every = not loss.has_anchors or bool(on_host.has_column.all())
        matches = on_host.to(anchors.X.device)
        self.is_anchor = None if every else matches.has_column
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


def compare_towers(
    loss: PairLoss, towers: Towers, tile: int, workspace: Workspace, wire: Wire
) -> tuple[Tensor, Direction, Direction]:
    """The loss, with slopes if something is learned, and both directions, which know the gradient of their own anchors."""
    there = Direction(loss, towers.x, towers.y, tile, workspace, "S")
    back = Direction(loss, towers.y, towers.x, tile, workspace, "S of the other tower")
    parts = there.shared(), back.shared()
    sums_there, sums_back, *gathered = wire.gather(
        there.own_sum(), back.own_sum(), *parts[0], *parts[1]
    )
    there.learn(sums_there, gathered[: len(parts[0])])
    back.learn(sums_back, gathered[len(parts[0]) :])
    return (there.value + back.value) / 2, there, back
