"""S in blocks of rows, and these in tiles: what the engines share.

Shapes: m samples, R rows (anchors) of a block, C columns of a tile, K slots (largest class).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise

import torch
from torch import Tensor

from dml.gpw.grouping import Groups
from dml.gpw.statistics import Scope, Side, State, Statistic, Statistics, masked
from dml.gpw.weighting import PairLoss

# Pairs worked on at a time
PAIRS = 2**18

Named = Mapping[str, Statistic]  # statistics by name
States = Mapping[str, State]


class Classes:
    """Of some rows, the columns of their classes: R x K slots. A smaller class repeats its last column,
    which counts once.

    valid: which slots hold a positive pair.
    """

    def __init__(self, groups: Groups, rows: Tensor) -> None:
        start, end = groups.start[rows, None], groups.end[rows, None]
        column = start + torch.arange(groups.K, device=rows.device)
        self.slots = torch.minimum(column, end - 1)
        self.valid = (column < end) & (column != rows[:, None])


class Block:
    """The similarities of some rows, ascending grouped positions, with all m columns."""

    def __init__(self, S: Tensor, rows: Tensor, groups: Groups) -> None:
        self.S, self.rows, self.groups = S, rows, groups
        self.classes = Classes(groups, rows)
        self.S_pos = S.gather(1, self.classes.slots)
        self.erased = False

    def erase_positives(self) -> None:
        """In S they become -inf, where a pair is as good as none to losses that `vanish`."""
        self.S.scatter_(1, self.classes.slots, -torch.inf)
        self.erased = True

    def negatives(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Tiles of at most `width` columns: where, similarities, which are negative (None: all, or
        all above -inf)."""
        tiles = spans(self.groups.m, width)
        if self.erased:
            yield from ((columns, self.S[:, columns], None) for columns in tiles)
            return
        start, end = self.groups.start[self.rows, None], self.groups.end[self.rows, None]
        band = int(start[0]), int(end[-1])
        for columns in tiles:
            S = self.S[:, columns]
            if columns.stop <= band[0] or columns.start >= band[1]:
                yield columns, S, None
            else:
                c = torch.arange(columns.start, columns.stop, device=S.device)
                yield columns, S, (c < start) | (c >= end)


def spans(n: int, width: int) -> list[slice]:
    """[0, n) in equal parts of at most `width`: a sliver would be multiplied by another kernel,
    with other rounding, and the two sides of a pair could then be mined differently."""
    parts = -(-n // width)
    edges = [n * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def parts_of(S: Tensor) -> list[slice]:
    """The rows of a tile in parts that, with a few results of as many pairs, stay in the cache."""
    return spans(len(S), max(1, PAIRS // S.shape[1]))


def of_rows_together(statistic: Statistic, states: Sequence[State]) -> State:
    """The state of all rows from those of consecutive parts of them."""
    if len(states) == 1:
        return states[0]
    if statistic.scope is Scope.BATCH:
        return reduce(statistic.merge, states)
    return tuple(torch.cat(x) for x in zip(*states, strict=True))


def scope(loss: PairLoss, name: str) -> Scope:
    """What is no statistic is a number of each anchor."""
    return loss.scopes.get(name, Scope.ANCHOR)


def part(loss: PairLoss, t: Statistics, rows: slice | Tensor) -> Statistics:
    """The statistics of some rows."""
    return {n: x if scope(loss, n) is Scope.BATCH else x[rows] for n, x in t.items()}


def of_rows(loss: PairLoss, t: Statistics, side: Side) -> Statistics:
    """The statistics of a block's own rows, to broadcast against R x K or R x C similarities."""
    views = {}
    for name, x in t.items():
        if scope(loss, name) is Scope.BATCH:
            views[name] = x
        elif scope(loss, name) is Scope.POSITIVE_PAIR and side is Side.POSITIVE:
            views[name] = x  # its slots are the pairs
        else:
            views[name] = x.unsqueeze(1)
    return views


def of_columns(loss: PairLoss, t: Statistics, columns: slice) -> Statistics:
    """The statistics of the anchors in these columns, against R x C similarities."""
    return {
        name: x if scope(loss, name) is Scope.BATCH else x[columns].unsqueeze(0)
        for name, x in t.items()
    }


def of_partners(loss: PairLoss, t: Statistics, block: Block) -> Statistics:
    """The statistics of the anchors in a block's slots, against R x K similarities.

    Row i lies in its partners' slot number i - start: the class is the same.
    """
    slots = block.classes.slots
    own_slot = (block.rows - block.groups.start[block.rows])[:, None]
    views = {}
    for name, x in t.items():
        if scope(loss, name) is Scope.BATCH:
            views[name] = x
        elif scope(loss, name) is Scope.POSITIVE_PAIR:
            views[name] = x[slots, own_slot]
        else:
            views[name] = x[slots]
    return views


def block_statistics(negatives: Negatives, block: Block, width: int) -> dict[str, Tensor]:
    """All statistics of a block's rows: stage after stage, tile after tile."""
    loss = negatives.loss
    t: dict[str, Tensor] = {}
    for side, statistics in loss.stages:
        states: States | None = None
        if side is Side.POSITIVE:
            known, valid = of_rows(loss, t, side), block.classes.valid
            states = {name: s.of(block.S_pos, valid, known) for name, s in statistics.items()}
        else:
            known = of_rows(loss, negatives.known(t), side)
            for _, S, keep in block.negatives(width):
                new = negatives.states(statistics, S, keep, known)
                states = merged(statistics, states, new)
        t |= finished(statistics, states)
    return t


def merged(statistics: Named, a: States | None, b: States) -> States:
    return b if a is None else {name: s.merge(a[name], b[name]) for name, s in statistics.items()}


def finished(statistics: Named, states: States | None) -> dict[str, Tensor]:
    assert states is not None
    return {name: s.finish(states[name]) for name, s in statistics.items()}


def joined(loss: PairLoss, parts: Sequence[Statistics]) -> dict[str, Tensor]:
    """The statistics of all rows from those of consecutive parts of them."""
    return {
        name: torch.stack([p[name] for p in parts]).sum(0)
        if loss.scopes[name] is Scope.BATCH
        else torch.cat([p[name] for p in parts])
        for name in parts[0]
    }


class Negatives:
    """What is done to a tile of negatives. `keep`: which of its pairs are; None means all."""

    def __init__(self, loss: PairLoss, groups: Groups) -> None:
        self.loss, self.groups = loss, groups

    @cached_property
    def anchors(self) -> Tensor | None:
        return self.groups.anchors(self.loss)

    def known(self, t: Statistics) -> Statistics:
        """The anchors' statistics, and what else of an anchor `states` and `weigh` want to know."""
        return t if self.anchors is None else {**t, "anchor": self.anchors}

    def states(
        self, statistics: Named, S: Tensor, keep: Tensor | None, t: Statistics
    ) -> dict[str, State]:
        parts = [
            {name: s.of(*some) for name, s in statistics.items()}
            for some in self.in_parts(S, keep, t)
        ]
        return {
            name: of_rows_together(s, [p[name] for p in parts]) for name, s in statistics.items()
        }

    def weigh(self, S: Tensor, keep: Tensor | None, t: Statistics) -> Tensor:
        """w_ij; zero for what is no negative pair, or not of an anchor."""
        return masked(masked(self.loss.negative_weight(S, t), keep, 0), t.get("anchor"), 0)

    def weigh_both(
        self, S: Tensor, keep: Tensor | None, rows: Statistics, columns: Statistics
    ) -> None:
        """w_ij + w_ji into S, from the statistics of the rows and of the columns."""
        for some, kept, known in self.in_parts(S, keep, rows):
            torch.add(self.weigh(some, kept, known), self.weigh(some, kept, columns), out=some)

    def in_parts(
        self, S: Tensor, keep: Tensor | None, t: Statistics
    ) -> Iterator[tuple[Tensor, Tensor | None, Statistics]]:
        for rows in parts_of(S):
            yield S[rows], None if keep is None else keep[rows], part(self.loss, t, rows)


class Memory:
    """What is kept from one step to the next: pieces of memory by name, as new memory costs as much
    time as an operation on it, and how the last batch was grouped."""

    def __init__(self) -> None:
        self.pieces: dict[str, Tensor] = {}
        self.groups: Groups | None = None

    def __call__(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        size, piece = math.prod(shape), self.pieces.get(name)
        if (
            piece is None
            or len(piece) < size
            or (piece.dtype, piece.device) != (like.dtype, like.device)
        ):
            piece = self.pieces[name] = like.new_empty(size)
        return piece[:size].view(*shape)

    def __reduce__(self) -> tuple[object, ...]:
        return Memory, ()
