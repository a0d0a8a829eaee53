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
from itertools import combinations, pairwise

import torch
from torch import Tensor

from dml.gpw.algebra import Side, Statistics, masked
from dml.gpw.batch import GlobalBatch, Groups
from dml.gpw.fused import negatives_of
from dml.gpw.pair_loss import PairLoss
from dml.gpw.tiles import (
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
)
from dml.plan import KEPT_SIMILARITIES


def fits(groups: Groups, tile: int) -> bool:
    """Whether no class is larger than a tile."""
    return groups.K <= tile


class SymmetricSweeps:
    """The two sweeps of a process whose own rows are the batch."""

    def __init__(self, loss: PairLoss, batch: GlobalBatch, tile: int, memory: Memory) -> None:
        self.loss, self.X = loss, batch.X
        self.spans = between_classes(batch.groups, tile)
        n = range(len(self.spans))
        self.pairs = [*zip(n, n, strict=True), *combinations(n, 2)]  # the diagonal comes first
        size = max(span.stop - span.start for span in self.spans) ** 2
        kept = KEPT_SIMILARITIES // (size * batch.X.element_size())
        self.S = memory("S", (min(kept + 1, len(self.pairs)), size), batch.X)
        self.computed = [False] * len(self.pairs)
        self.negatives = negatives_of(loss, batch, size, memory)
        classes = Classes(batch.groups, batch.own_rows)
        self.valid = classes.valid
        self.slots = [classes.slots[I] - I.start for I in self.spans]  # in tiles on the diagonal
        self.S_pos = torch.cat([self.tile(i).gather(1, self.slots[i]) for i in n])

    def tile(self, n: int) -> Tensor:
        """The similarities of pair number n of spans. As many as there is room for are kept, the
        others share the last place."""
        I, J = (self.spans[i] for i in self.pairs[n])
        A, B, last = self.X[I], self.X[J], len(self.S) - 1
        S = self.S[min(n, last), : len(A) * len(B)].view(len(A), len(B))
        if not self.computed[n]:
            torch.mm(A, B.T, out=S)
            self.computed[n] = n < last or n == last == len(self.pairs) - 1
        return S

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
        """The numbers of the spans, similarities, and which are negative; None: all, or all above
        -inf."""
        for n, (i, j) in enumerate(self.pairs):
            S, keep = self.tile(n), None
            if i == j and self.loss.weighting.vanishes:
                S.scatter_(1, self.slots[i], -torch.inf)
            elif i == j:
                keep = torch.ones_like(S, dtype=torch.bool)
                keep.scatter_(1, self.slots[i], False)
            yield i, j, S, keep

    def statistics(self) -> dict[str, Tensor]:
        t: dict[str, Tensor] = {}
        for side, statistics in self.loss.stages:
            t |= (self.of_positives if side is Side.POSITIVE else self.of_negatives)(statistics, t)
        return t

    def of_positives(self, statistics: Named, t: Statistics) -> dict[str, Tensor]:
        known = of_rows(self.loss, t, Side.POSITIVE)
        return {
            name: s.finish(s.of(self.S_pos, self.valid, known)) for name, s in statistics.items()
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

    def gradient(self, t: Statistics) -> Tensor:
        """Overwrites S."""
        loss, X = self.loss, self.X
        w_pos = loss.positive_weight(self.S_pos, of_rows(loss, t, Side.POSITIVE))
        w_pos = masked(w_pos, self.valid, 0).neg_()
        known = self.negatives.known(t)
        rows, columns = self.of_rows(known), [of_columns(loss, known, J) for J in self.spans]
        dX = torch.empty_like(X)
        for i, j, S, keep in self.tiles():
            I, J = self.spans[i], self.spans[j]
            self.negatives.weigh_both(S, keep, rows[i], columns[j])
            W = S
            if i == j:
                W.scatter_add_(1, self.slots[i], w_pos[I])
                W.T.scatter_add_(1, self.slots[i], w_pos[I])
                torch.mm(W, X[I], out=dX[I])
            else:
                dX[I].addmm_(W, X[J])
                dX[J].addmm_(W.T, X[I])
        return dX


def between_classes(groups: Groups, tile: int) -> list[slice]:
    """[0, m) in about equal parts of about `tile`, cut between classes."""
    parts = max(1, round(groups.m / tile))
    edges = {int(groups.start[groups.m * i // parts]) for i in range(parts)} | {groups.m}
    return [slice(a, b) for a, b in pairwise(sorted(edges))]
