"""The sweeps of one process alone: S is symmetric, so a tile serves its rows and its columns.

    tiles I = J of S = X X^T:       S of the positive pairs
    tiles I <= J of S = X X^T:      statistics of the rows I from S, of the rows J from S^T
    the same tiles again:           W = w_ij + w_ji;  dX_I += W X_J,  dX_J += W^T X_I

Half of S twice, and W X: as many multiplications as in the two bare products X X^T and W X, and fewer
where S is small enough to be kept. A tile stays in the cache. The samples are grouped by class and tiles
end between classes, so only those on the diagonal hold positive pairs; for classes larger than a tile
there is dml/gpw/rows.py.

Shapes: m samples, d dimensions, K slots (largest class), R x C tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise

import torch
from torch import Tensor

from dml.cost import KEPT_SIMILARITIES
from dml.gpw.engine.fused import negatives_of
from dml.gpw.engine.tiles import (
    Classes,
    Memory,
    Named,
    States,
    finished,
    joined,
    merged,
    of_columns,
    of_rows,
    part,
    spans,
)
from dml.gpw.grouping import GlobalBatch, Groups
from dml.gpw.statistics import Side, Statistics, masked
from dml.gpw.weighting import PairLoss

# Rows multiplied at a time in a tile on the diagonal
STRIP = 384


def fits(groups: Groups, tile: int) -> bool:
    """Whether no class is larger than a tile."""
    return groups.K <= tile


class SymmetricSweeps:
    """The two sweeps of a process whose own rows are the batch."""

    def __init__(self, loss: PairLoss, batch: GlobalBatch, tile: int, memory: Memory) -> None:
        self.loss, self.X = loss, batch.X
        self.layout = layout = Layout.of(batch.groups, tile)
        self.spans = layout.spans
        size = max(span.stop - span.start for span in self.spans) ** 2
        kept = KEPT_SIMILARITIES // (size * batch.X.element_size())
        self.S = memory("S", (min(kept + 1, len(layout.pairs)), size), batch.X)
        self.kept: dict[int, Tensor] = {}
        self.negatives = negatives_of(loss, batch, memory)
        self.S_pos = batch.X.new_empty(layout.valid.shape)
        for n in range(len(self.spans)):
            self.tile(n)

    def tile(self, n: int) -> Tensor:
        """The similarities of pair number n of spans. As many as there is room for are kept, the
        others share the last place."""
        if n in self.kept:
            return self.kept[n]
        i, j = self.layout.pairs[n]
        A, B, last = self.X[self.spans[i]], self.X[self.spans[j]], len(self.S) - 1
        S = self.S[min(n, last), : len(A) * len(B)].view(len(A), len(B))
        if i == j:
            mirrored_product(A, out=S)
            slots = self.layout.slots[i]
            torch.gather(S, 1, slots, out=self.S_pos[self.spans[i]])
            if self.loss.weighting.vanishes:
                S.scatter_(1, slots, -torch.inf)
        else:
            torch.mm(A, B.T, out=S)
        if n < last or len(self.S) == len(self.layout.pairs):
            self.kept[n] = S
        return S

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
        """The numbers of the spans, similarities, and which are negative; None: all, or all above
        -inf."""
        for n, (i, j) in enumerate(self.layout.pairs):
            S, keep = self.tile(n), None
            if i == j and not self.loss.weighting.vanishes:
                keep = torch.ones_like(S, dtype=torch.bool)
                keep.scatter_(1, self.layout.slots[i], False)
            yield i, j, S, keep

    def statistics(self) -> dict[str, Tensor]:
        t: dict[str, Tensor] = {}
        for side, statistics in self.loss.stages:
            t |= (self.of_positives if side is Side.POSITIVE else self.of_negatives)(statistics, t)
        return t

    def of_positives(self, statistics: Named, t: Statistics) -> dict[str, Tensor]:
        known = of_rows(self.loss, t, Side.POSITIVE)
        return {
            name: s.finish(s.of(self.S_pos, self.layout.valid, known))
            for name, s in statistics.items()
        }

    def of_negatives(self, statistics: Named, t: Statistics) -> dict[str, Tensor]:
        known = self.of_rows(self.negatives.known(t))
        mirrored = all(s.mirrored for s in statistics.values())
        states: list[States | None] = [None] * len(self.spans)
        for i, j, S, keep in self.tiles():
            new = self.negatives.states(statistics, S, keep, known[i])
            states[i] = merged(statistics, states[i], new)
            if i != j:
                if not mirrored:
                    new = self.negatives.states(statistics, S.T, None, known[j])
                states[j] = merged(statistics, states[j], new)
        return joined(self.loss, [finished(statistics, state) for state in states])

    def of_rows(self, t: Statistics) -> list[Statistics]:
        return [of_rows(self.loss, part(self.loss, t, I), Side.NEGATIVE) for I in self.spans]

    def gradient(self, t: Statistics, scale: float, out: Tensor) -> None:
        """Overwrites S."""
        loss, X = self.loss, self.X
        w_pos = loss.positive_weight(self.S_pos, of_rows(loss, t, Side.POSITIVE))
        w_pos = masked(w_pos, self.layout.valid, 0).neg_()
        known = self.negatives.known(t)
        rows, columns = self.of_rows(known), [of_columns(loss, known, J) for J in self.spans]
        for i, j, S, keep in self.tiles():
            I, J = self.spans[i], self.spans[j]
            self.negatives.weigh_both(S, keep, rows[i], columns[j])
            W = S  # it is that now
            if i == j:
                W.scatter_add_(1, self.layout.slots[i], w_pos[I])
                W.T.scatter_add_(1, self.layout.slots[i], w_pos[I])
                out[I].addmm_(W, X[I], beta=0, alpha=scale)
            else:
                out[I].addmm_(W, X[J], alpha=scale)
                out[J].addmm_(W.T, X[I], alpha=scale)


def mirrored_product(A: Tensor, out: Tensor) -> None:
    """A A^T: strips of rows from the diagonal on, and what is left of it copied from above."""
    for rows in spans(len(A), STRIP):
        torch.mm(A[rows], A[rows.start :].T, out=out[rows, rows.start :])
        out[rows.stop :, rows] = out[rows, rows.stop :].T


class Layout:
    """How a batch lies in tiles.

    spans: [0, m) cut between classes. pairs: of the numbers of spans, a tile each, the diagonal first.
    slots: for every span, the columns of its rows' classes in the tile on the diagonal. valid: of the
    slots of all rows, those of a positive pair.
    """

    def __init__(self, groups: Groups, tile: int) -> None:
        self.spans = between_classes(groups, tile)
        n = range(len(self.spans))
        self.pairs = [*zip(n, n, strict=True), *combinations(n, 2)]
        classes = Classes(groups, torch.arange(groups.m, device=groups.start.device))
        self.valid = classes.valid
        self.slots = [classes.slots[I] - I.start for I in self.spans]

    @staticmethod
    @lru_cache(maxsize=1)
    def of(groups: Groups, tile: int) -> Layout:
        """The last one is kept: batches of P classes x M images are grouped alike."""
        return Layout(groups, tile)


def between_classes(groups: Groups, tile: int) -> list[slice]:
    """[0, m) in about equal parts of about `tile`, cut between classes."""
    parts = max(1, round(groups.m / tile))
    edges = {int(groups.start[groups.m * i // parts]) for i in range(parts)} | {groups.m}
    return [slice(a, b) for a, b in pairwise(sorted(edges))]
