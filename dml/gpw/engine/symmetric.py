"""The sweeps of one process alone: S is symmetric, so a tile serves its rows and its columns.

    tiles I = J of S = X X^T:       S of the positive pairs
    tiles I <= J of S = X X^T:      statistics of the rows I from S, of the rows J from S^T
    the same tiles again:           W = w_ij + w_ji;  dX_I += W X_J,  dX_J += W^T X_I

Half of S is computed twice, and W X once: as many multiplications as in the two bare products X X^T
and W X, and fewer if S is small enough to be kept. A tile stays in the cache. The samples are grouped
by class and tiles end between classes, so only tiles on the diagonal hold positive pairs. Classes
larger than a tile are left to `rows`.

Shapes: m samples, d dimensions, K slots (largest class), R x C tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import combinations, pairwise

import torch
from torch import Tensor

from dml.cost import Cutting
from dml.gpw.engine.kernel import MakeKernel, Partials, choose_kernel, merged
from dml.gpw.engine.tiles import PositiveSlots, spans
from dml.gpw.engine.views import against_positives, concatenate, of_batch
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch, Groups
from dml.gpw.statistics import Side, Statistic, Statistics, masked
from dml.gpw.weighting import PairLoss


class SymmetricSweeps:
    """The two sweeps of a process whose own rows are the whole batch.

    cutting: how S is cut; None: as suits the device. As many tiles of S are kept between the sweeps
    as fit into its `kept_bytes`.
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
        self.loss, self.X, self.groups = loss, batch.X, batch.groups
        self.cutting = cutting = cutting or workspace.cutting(batch.X.device)
        self.layout = layout = Layout.of(batch.groups, tile)
        self.spans = layout.spans
        size = max(span.stop - span.start for span in self.spans) ** 2
        kept = cutting.kept_bytes // (size * batch.X.element_size())
        self.S = workspace.buffer("S", (min(kept + 1, len(layout.pairs)), size), batch.X)
        self.kept: dict[int, Tensor] = {}
        self.kernel = make_kernel(loss, workspace, cutting.part_pairs)
        self.S_pos = batch.X.new_empty(layout.valid.shape)
        for n in range(len(self.spans)):
            self.tile(n)

    @staticmethod
    def can_sweep(batch: GlobalBatch, tile: int) -> bool:
        """Whether one process has the whole batch, and no class is larger than a tile."""
        return batch.processes == 1 and batch.groups.K <= tile

    def tile(self, n: int) -> Tensor:
        """The similarities of pair number n of spans. As many as there is room for are kept; the
        others share the last place."""
        if n in self.kept:
            return self.kept[n]
        i, j = self.layout.pairs[n]
        A, B, last = self.X[self.spans[i]], self.X[self.spans[j]], len(self.S) - 1
        S = self.S[min(n, last), : len(A) * len(B)].view(len(A), len(B))
        if i == j:
            mirrored_product(A, self.cutting.strip, out=S)
            columns = self.layout.slots[i]
            torch.gather(S, 1, columns, out=self.S_pos[self.spans[i]])
            if self.loss.weighting.ignores_minus_inf:
                S.scatter_(1, columns, -torch.inf)
        else:
            torch.mm(A, B.T, out=S)
        if n < last or len(self.S) == len(self.layout.pairs):
            self.kept[n] = S
        return S

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
        """The numbers of the two spans, the similarities, and which of them are negative; None: all
        above -inf."""
        for n, (i, j) in enumerate(self.layout.pairs):
            S, keep = self.tile(n), None
            if i == j and not self.loss.weighting.ignores_minus_inf:
                keep = torch.ones_like(S, dtype=torch.bool)
                keep.scatter_(1, self.layout.slots[i], False)
            yield i, j, S, keep

    def statistics(self) -> dict[str, Tensor]:
        t: dict[str, Tensor] = {}
        for side, stage in self.loss.stages:
            t |= (self.positive_stage if side is Side.POSITIVE else self.negative_stage)(stage, t)
        return t

    def positive_stage(self, stage: Mapping[str, Statistic], t: Statistics) -> dict[str, Tensor]:
        known, valid = against_positives(self.loss, t), self.layout.valid
        return {name: s.finish(s.reduce(self.S_pos, valid, known)) for name, s in stage.items()}

    def negative_stage(self, stage: Mapping[str, Statistic], t: Statistics) -> dict[str, Tensor]:
        prepared = self.kernel.prepare_statistics(stage, t)
        statistics = [prepared.select(I) for I in self.spans]
        partials: list[Partials | None] = [None] * len(self.spans)
        for i, j, S, keep in self.tiles():
            new = statistics[i].reduce(S, keep)
            partials[i] = merged(statistics[i], partials[i], new)
            if i != j:
                if not prepared.symmetric:
                    new = statistics[j].reduce(S.T, None)
                partials[j] = merged(statistics[j], partials[j], new)
        return concatenate(
            self.loss,
            [s.finish(p) for s, p in zip(statistics, partials, strict=True) if p is not None],
        )

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """It overwrites S."""
        loss, X = self.loss, self.X
        w_pos = loss.positive_weight(self.S_pos, against_positives(loss, t))
        w_pos = masked(w_pos, self.layout.valid, 0).neg_()
        w_pos += w_pos[self.layout.partners]  # a new tensor, before the sum
        anchors = of_batch(loss, t, self.groups)
        weights = self.kernel.prepare_weights(anchors, anchors)
        for i, j, S, keep in self.tiles():
            I, J = self.spans[i], self.spans[j]
            weights.weigh(S, keep, I, J)
            W = S  # overwritten by the weights
            if i == j:
                W.scatter_(1, self.layout.slots[i], w_pos[I])
                out[I].addmm_(W, X[I], beta=0, alpha=scale)
            else:
                out[I].addmm_(W, X[J], alpha=scale)
                out[J].addmm_(W.T, X[I], alpha=scale)


def mirrored_product(A: Tensor, strip: int | None, out: Tensor) -> None:
    """A A^T: strips of rows from the diagonal to the right; the part left of the diagonal is copied."""
    for rows in spans(len(A), strip or len(A)):
        torch.mm(A[rows], A[rows.start :].T, out=out[rows, rows.start :])
        if rows.stop < len(A):
            out[rows.stop :, rows] = out[rows, rows.stop :].T


class Layout:
    """How a batch is cut into tiles.

    spans: [0, m) cut between classes. pairs: the numbers of two spans for each tile, the diagonal
    first. slots: for every span, the columns of the slots of its rows in the tile on the diagonal.
    valid: m x K, which slots hold a positive pair. partners: the row, and the slot of that row, in
    which the same pair stands for its other anchor, m x K each.
    """

    def __init__(self, groups: Groups, tile: int) -> None:
        self.spans = between_classes(groups, tile)
        n = range(len(self.spans))
        self.pairs = [*zip(n, n, strict=True), *combinations(n, 2)]
        rows = torch.arange(groups.m, device=groups.start.device)
        slots = PositiveSlots(groups, rows, slice(None))
        self.valid = slots.valid
        self.partners = slots.columns, slots.own
        self.slots = [slots.columns[I] - I.start for I in self.spans]

    @staticmethod
    @lru_cache(maxsize=1)
    def of(groups: Groups, tile: int) -> Layout:
        """The last one is cached: batches of P classes x M images are all grouped alike."""
        return Layout(groups, tile)


def between_classes(groups: Groups, tile: int) -> list[slice]:
    """[0, m) in about equal spans of about `tile`, cut between classes."""
    count = max(1, round(groups.m / tile))
    start = groups.host.start
    edges = {int(start[groups.m * i // count]) for i in range(count)} | {groups.m}
    return [slice(a, b) for a, b in pairwise(sorted(edges))]
